"""Quantises moments to 8 bits: each block of 256 elements has a scale, its largest magnitude, and each element a code
for its share of it.

A moment's elements differ by many orders of magnitude, and small ones matter: an update divides by the root of the
second moment. So codes are even steps of a root of the number: the signed square root for the mean of gradients, the
fourth root for the mean of squares (the square root of the divisor). Square roots are rounded alike on every device.

Measured on 300 steps of the GPT of benchmarks/convergence.py (3 layers, width 96), held-out loss compared with fp32
moments: these codes +0.1 %. Even steps of the mean of gradients and of the root of the mean of squares: +0.5 %. Even
steps of both moments diverge, because second moments become 0.

Paper: Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit optimizers via block-wise quantization, ICLR 2022; there the steps
    are those of a "dynamic tree".
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
    """A way to keep a tensor in 8 bits: `encode(share of the scale, in [-1, 1]) -> codes` and `decode(codes) ->
    share`."""

    dtype: torch.dtype
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


def _encode_signed(share: torch.Tensor) -> torch.Tensor:
    return (share.abs().sqrt() * share.sign() * 127).round().to(torch.int8)


def _decode_signed(codes: torch.Tensor) -> torch.Tensor:
    root = codes.to(torch.float32) / 127
    return root * root.abs()


def _encode_positive(share: torch.Tensor) -> torch.Tensor:
    """Never 0: what is next to nothing is the smallest number there is, 2e-10 of the scale, for it is divided by."""
    return (share.sqrt().sqrt() * 255).round().clamp(min=1).to(torch.uint8)


def _decode_positive(codes: torch.Tensor) -> torch.Tensor:
    root = codes.to(torch.float32) / 255
    return (root * root) * (root * root)


SIGNED = Code(torch.int8, _encode_signed, _decode_signed)
POSITIVE = Code(torch.uint8, _encode_positive, _decode_positive)


def new_codes(where: str, params: Tree, codes: Sequence[Code]) -> list[Tree]:
    """Zeros: for each code a tree of codes like `params`, then for each a tree of scales. A leaf without blocks (fewer
    than 4096 elements) has no
    scales: it is kept in float32."""
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
    """Wraps a function of leaves and their moments to work with codes: decoded before, encoded after. For one walk over
    the leaves, in order."""

    def __init__(self, codes: Sequence[Code], scales: Sequence[Tree]):
        self._codes = codes
        self._given = [iter(tree.leaves(s)) for s in scales]
        self._structures = [tree.structure(s) for s in scales]
        self._made: list[list[torch.Tensor]] = [[] for _ in codes]

    def around(self, leaf: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """`leaf(g, *moments, ...) -> (update, *moments)`, with codes for moments."""

        def coded(g: Any, *args: Any) -> tuple[Any, ...]:
            num = len(self._codes)
            if args[0].dtype == torch.float32:  # without blocks
                return leaf(g, *args)
            moments = [dequantize(c, m, next(s)) for c, m, s in zip(self._codes, args[:num], self._given, strict=True)]
            update, *moments = leaf(g, *moments, *args[num:])
            for i, (code, m) in enumerate(zip(self._codes, moments, strict=True)):
                moments[i], scales = quantize(code, m)
                self._made[i].append(scales)
            return update, *moments

        return coded

    def scales(self) -> list[Tree]:
        """The new scales, once all leaves have been walked."""
        return [tree.unflatten(structure, made) for structure, made in zip(self._structures, self._made, strict=True)]


def quantize(code: Code, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the shape of `x`, and the scale of each block, float32 [num_blocks, 1]."""
    scales = block_max(x.abs())
    scale = block_expand(scales, x.shape)
    return code.encode(torch.where(scale > 0, x / scale, 0)), scales


def dequantize(code: Code, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 numbers that codes stand for."""
    return code.decode(codes) * block_expand(scales, codes.shape)
