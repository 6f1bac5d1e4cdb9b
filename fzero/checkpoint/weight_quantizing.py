"""Computes codes and scales of quantized weights while files are read, from the elements that a rank's shard needs.

A stored tensor is converted in blocks of elements, each independent of the others: 64 elements of a weight make 32
bytes of NF4 codes, or one scale; a row makes a row of int8 codes, or one scale. A rank reads the complete blocks that
its shard needs parts of. Codes and scales are separate tensors of a state, so a weight is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fzero.ops import weight_quantization as formats


class UnquantizableError(Exception):
    """Stored values cannot be converted."""


@dataclass(frozen=True)
class Conversion:
    """Converts a stored tensor block by block.

    Attributes:
        stored: the number of stored elements of a block.
        made: the number of elements that are made of a block.
        numel: the number of stored elements. The last block may be short.
        convert: `(elements of complete blocks, number of the first block) -> tensor`.
    """

    stored: int
    made: int
    numel: int
    convert: Callable[[torch.Tensor, int], torch.Tensor]

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the range of stored elements from which the elements `start` to `stop` are made.

        Example:
            >>> Conversion(64, 32, 1000, lambda x, block: x).needed(40, 70)
            (64, 192)
        """
        if start == stop:
            return 0, 0
        return start // self.made * self.stored, min(-(-stop // self.made) * self.stored, self.numel)

    def converted(self, parts: Iterator[torch.Tensor], start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yields the elements `start` to `stop`, given the stored elements that they need in parts of any size."""
        block, held = start // self.made, None
        for part in parts:
            held = part if held is None else torch.cat([held, part])
            if num := held.numel() // self.stored:
                yield self._within(held[: num * self.stored], block, start, stop)
                block += num
                held = held[num * self.stored :]
            held = held.clone()  # the memory of `part` is overwritten by the next one
        if held is not None and held.numel():  # a short last block
            yield self._within(held, block, start, stop)

    def _within(self, stored: torch.Tensor, block: int, start: int, stop: int) -> torch.Tensor:
        first = block * self.made
        return self.convert(stored, block).reshape(-1)[max(start - first, 0) : stop - first]


def quantizing(shape: tuple[int, ...], format: str) -> tuple[Conversion, Conversion]:
    """Returns the conversions of a weight of this shape into its codes and into its scales."""
    numel, row = torch.Size(shape).numel(), shape[-1]
    if format == "nf4":
        block = formats.NF4_BLOCK
        codes = Conversion(block, block // 2, numel, lambda x, _: formats.nf4_codes(_finite(x)))
        return codes, Conversion(block, 1, numel, lambda x, _: formats.nf4_scales(_finite(x)))
    codes = Conversion(row, row, numel, lambda x, _: formats.int8_codes(_finite(x).view(-1, row)))
    return codes, Conversion(row, 1, numel, lambda x, _: formats.int8_scales(_finite(x).view(-1, row)))


def nested(values: torch.Tensor, scales: torch.Tensor, offset: float, block: int, numel: int) -> Conversion:
    """Returns the conversion of scales that are quantized themselves ("double quantization").

    Args:
        values: float32[256], the number that each code stands for.
        scales: float32, the scale of each block of codes.
        offset: is added to all scales.
        block: the number of codes that share a scale.
        numel: the number of codes.
    """

    def convert(codes: torch.Tensor, first: int) -> torch.Tensor:
        at = torch.arange(first, first + codes.numel(), device=codes.device) // block
        return values.to(codes.device)[codes.to(torch.int32)] * scales.to(codes.device)[at] + offset

    return Conversion(1, 1, numel, convert)


def _finite(x: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(x).all()):
        raise UnquantizableError("it has values that are not finite, which cannot be quantized")
    return x
