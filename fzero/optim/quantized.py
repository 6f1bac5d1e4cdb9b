"""Quantizes moments to 8 bits: each block of 256 elements has a scale, its largest magnitude, and each element has a
code for its fraction of the scale.

The elements of a moment differ by many orders of magnitude, and small ones matter: an update divides by the root of
the second moment. So codes are even steps of a root of the number: the signed square root for the mean of gradients,
and the fourth root for the mean of squares (the square root of the divisor). Square roots are rounded identically on
every device.

Measured on 300 steps of the GPT of benchmarks/convergence.py (3 layers, width 96), held-out loss compared with fp32
moments: +0.1 % with these codes; +0.5 % with even steps of the mean of gradients and of the root of the mean of
squares. Even steps of both moments diverge, because second moments become 0.

Paper: Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit optimizers via block-wise quantization, ICLR 2022; the steps in
    the paper are those of a "dynamic tree".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.ops.block_quantization import block_expand, block_max, blocks_shape, has_blocks
from fzero.optim.tree_updates import check_floating
from fzero.tree import Tree


class Code(NamedTuple):
    """A way to store a tensor in 8 bits: `encode(fraction of the scale, in [-1, 1]) -> codes` and `decode(codes) ->
    fraction`.
    """

    dtype: torch.dtype
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


def _encode_signed(share: torch.Tensor) -> torch.Tensor:
    # -127 to 127: the codes are symmetric around 0, and -128 is not used.
    return (share.abs().sqrt() * share.sign() * 127).round().to(torch.int8)


def _decode_signed(codes: torch.Tensor) -> torch.Tensor:
    root = codes.to(torch.float32) / 127
    return root * root.abs()


def _encode_positive(share: torch.Tensor) -> torch.Tensor:
    """Encodes fractions, never as 0, because the result is divided by: the smallest code stands for 2e-10 of the
    scale.
    """
    return (share.sqrt().sqrt() * 255).round().clamp(min=1).to(torch.uint8)


def _decode_positive(codes: torch.Tensor) -> torch.Tensor:
    root = codes.to(torch.float32) / 255
    return (root * root) * (root * root)


SIGNED = Code(torch.int8, _encode_signed, _decode_signed)
POSITIVE = Code(torch.uint8, _encode_positive, _decode_positive)


def new_codes(where: str, params: Tree, codes: Sequence[Code]) -> list[Tree]:
    """Returns zeros: for each code a tree of codes like `params`, then for each a tree of scales. A parameter without
    blocks (fewer than 4096 elements) has no scales: its moments are kept in float32.
    """
    check_floating(where, params)

    def zeros(code: Code, p: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(
            p, dtype=code.dtype if has_blocks(p.shape) else torch.float32, memory_format=torch.contiguous_format
        )

    def scales(p: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros(blocks_shape(p.shape), dtype=torch.float32, device=p.device) if has_blocks(p.shape) else None

    moments = [tree.map(lambda p, code=code: zeros(code, p), params) for code in codes]
    return [*moments, *(tree.map(scales, params) for _ in codes)]


class Coded:
    """Wraps a function of gradients and their moments so that it works with codes, which are decoded before and
    encoded after the call. Use one instance for one pass over the parameters, in order.
    """

    def __init__(self, codes: Sequence[Code], scales: Sequence[Tree]):
        self._codes = codes
        self._given = [iter(tree.leaves(s)) for s in scales]
        self._structures = [tree.structure(s) for s in scales]
        self._made: list[list[torch.Tensor]] = [[] for _ in codes]

    def around(self, leaf: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Returns `leaf(g, *moments, ...) -> (update, *moments)`, with codes in place of moments."""

        def coded(g: Any, *args: Any) -> tuple[Any, ...]:
            num = len(self._codes)
            if args[0].dtype == torch.float32:  # a parameter without blocks
                return leaf(g, *args)
            moments = [dequantize(c, m, next(s)) for c, m, s in zip(self._codes, args[:num], self._given, strict=True)]
            update, *moments = leaf(g, *moments, *args[num:])
            for i, (code, m) in enumerate(zip(self._codes, moments, strict=True)):
                moments[i], scales = quantize(code, m)
                self._made[i].append(scales)
            return update, *moments

        return coded

    def scales(self) -> list[Tree]:
        """Returns the new scales, after the pass over all parameters."""
        return [tree.unflatten(structure, made) for structure, made in zip(self._structures, self._made, strict=True)]


def quantize(code: Code, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes with the shape of `x`, and the scale of each block, float32 [num_blocks, 1]."""
    scales = block_max(x.abs())
    scale = block_expand(scales, x.shape)
    # A block of zeros has the scale 0, and 0 / 0 is NaN.
    return code.encode(torch.where(scale > 0, x / scale, 0)), scales


def dequantize(code: Code, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the float32 numbers that codes stand for."""
    return code.decode(codes) * block_expand(scales, codes.shape)
