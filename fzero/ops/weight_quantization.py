"""Stores frozen weights in 4 or 8 bits: integer codes, and the scale of each group of them.

Both formats are those of the library bitsandbytes, so that its files can be read:

- "nf4": each block of 64 consecutive elements of the flattened tensor has a scale, its largest magnitude. A code of 4
  bits stands for one of the 16 quantiles of a normal distribution, as a fraction of the scale. A byte holds two codes,
  the first in its high bits.
- "int8": each row, along the last dim, has a scale. A value is code * scale / 127.

All tensors that are communicated, copied between memory tiers or saved are bytes and float32 scales. `dequantize` is
made of PyTorch operations, so a compiler fuses it with the arithmetic that surrounds it.

Papers: Dettmers, Pagnoni, Holtzman, Zettlemoyer: QLoRA, NeurIPS 2023, for NF4. Dettmers, Lewis, Belkada, Zettlemoyer:
    LLM.int8(), NeurIPS 2022, for scales of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.tree import describe

FORMATS = ("nf4", "int8")
NF4_BLOCK = 64  # elements that share a scale

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers that the codes of "nf4" stand for, from appendix E of the paper."""
_BOUNDS = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
_PAIRS = [(NF4[byte >> 4], NF4[byte & 15]) for byte in range(256)]
_INT8_STEP = 1 / 127


class Quantized(NamedTuple):
    """A tensor in 4 or 8 bits, which `quantize` returns: a pytree of two tensors.

    Attributes:
        codes: uint8[..., columns / 2] for "nf4", int8[..., columns] for "int8".
        absmax: float32, the scales: one per block of 64 elements for "nf4", one per row for "int8".
    """

    codes: torch.Tensor
    absmax: torch.Tensor

    @property
    def format(self) -> str:
        return "nf4" if self.codes.dtype == torch.uint8 else "int8"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that `dequantize` returns."""
        *outer, last = self.codes.shape
        return *outer, last * 2 if self.format == "nf4" else last


def quantize(x: torch.Tensor, format: str = "nf4") -> Quantized:
    """Stores a tensor as codes of 4 or 8 bits with scales, in the formats of bitsandbytes.

    The result is a part of a tree of parameters. A step shards, gathers, offloads and saves it as bytes; the loss
    function gets its values by `fz.dequantize`. It is never trained. Modules are quantized by `fz.quantize_frozen`.

    Args:
        x: floating-point, with an even last dim for "nf4".
        format: "nf4": 4 bits per element and a scale per block of 64, together 4.5 bits. "int8": 8 bits per element
            and a scale per row.

    Raises:
        FzeroTypeError: the tensor is not floating-point, or has no dims.
        FzeroValueError: an unknown format, an odd last dim, or values that are not finite.

    Example:
        >>> import torch, fzero as fz
        >>> weight = fz.quantize(torch.tensor([[0.5, -1.0, 0.0, 0.25]]))
        >>> weight.codes.dtype, tuple(weight.codes.shape), weight.absmax
        (torch.uint8, (1, 2), tensor([1.]))
        >>> fz.dequantize(weight)
        tensor([[ 0.4407, -1.0000,  0.0000,  0.2461]])
    """
    check_format("quantize", format)
    if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim()):
        what = f"takes a floating-point tensor with dims, not {describe(x)}"
        raise FzeroTypeError("quantize", what, fix="give a matrix of weights, e.g. fz.quantize(linear.weight)")
    if format == "nf4" and x.shape[-1] % 2:
        what = f"{describe(x)}: a byte holds two codes of 4 bits, and the last dim is odd"
        raise FzeroValueError("quantize", what, fix='fz.quantize(x, "int8")')
    x = x.detach()
    made = (nf4_codes(x).view(*x.shape[:-1], -1), nf4_scales(x)) if format == "nf4" else (int8_codes(x), int8_scales(x))
    has_values = not (x.is_meta or isinstance(x, compat.FakeTensor))
    if has_values and not bool(torch.isfinite(made[1]).all()):
        fix = "a tensor with infinite or missing values has no scales: quantize finite weights"
        raise FzeroValueError("quantize", f"{describe(x)} has values that are not finite", fix=fix)
    return Quantized(*made)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the numbers that a quantized tensor stands for. They are computed in float32 and rounded to `dtype`.

    Args:
        quantized: what `fz.quantize` returned.
        dtype: of the result, such as that of the activations that are multiplied by it.

    Memory: the complete tensor, for as long as it is used. A block of a step computes it again in its backward, and
        does not save it.

    Raises:
        FzeroTypeError: these are not codes and scales.
        FzeroValueError: the scales require a gradient, or were converted to another dtype.

    Example:
        >>> import torch, fzero as fz
        >>> x = torch.linspace(-1, 1, 128).view(2, 64)
        >>> weight = fz.quantize(x, "int8")
        >>> (fz.dequantize(weight) - x).abs().max() < 0.5 / 127
        tensor(True)
    """
    codes, absmax = quantized = Quantized(*quantized)
    if codes.dtype not in (torch.uint8, torch.int8):
        what = f"codes are uint8 (nf4) or int8, not {describe(codes)}"
        raise FzeroTypeError("dequantize", what, fix="give what fz.quantize returned")
    if absmax.requires_grad:
        what = f"{describe(codes)}: its scales require a gradient, but a quantized tensor is not trained"
        raise FzeroValueError("dequantize", what, fix="give the pair that fz.quantize returned, or detached scales")
    if absmax.dtype != torch.float32:
        what = f"{describe(codes)}: its scales were converted from float32 to {absmax.dtype}"
        fix = (
            "fz.mixed_precision(..., where=lambda path, leaf: not path.endswith('.absmax')); move a module with "
            "module.to(device), without a dtype"
        )
        raise FzeroValueError("dequantize", what, fix=fix)
    if codes.dtype == torch.int8:
        return (codes.to(torch.float32) * absmax.view(*codes.shape[:-1], 1) * _INT8_STEP).to(dtype)
    pairs = torch.tensor(_PAIRS, dtype=torch.float32, device=codes.device)
    fractions = pairs.index_select(0, codes.reshape(-1).to(torch.int32))  # float32[bytes, 2]
    values = (_blocks(fractions.view(-1)) * absmax.view(-1, 1)).view(-1)
    return values[: 2 * codes.numel()].view(quantized.shape).to(dtype)


def scales_among(params: Any) -> list[bool]:
    """Returns for each leaf of a tree whether it is the scales of a quantized tensor.

    Example:
        >>> scales_among({"b": torch.zeros(2), "w": quantize(torch.ones(2, 2))})
        [False, False, True]
    """
    nodes = tree.flatten(params, is_leaf=lambda x: isinstance(x, Quantized))[0]
    return [scale for node in nodes for scale in ([False, True] if isinstance(node, Quantized) else [False])]


def check_format(owner: str, format: str) -> None:
    """Raises an error for a format that does not exist."""
    if format not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise FzeroValueError(owner, f"unknown format {format!r}", fix=f"one of {known}")


def scales_shape(shape: Sequence[int], format: str) -> tuple[int]:
    """Returns the shape of the scales of a tensor of this shape."""
    return (-(-math.prod(shape) // NF4_BLOCK),) if format == "nf4" else (math.prod(shape[:-1]),)


def nf4_scales(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of each block, float32[blocks]. The last block may be short."""
    return _blocks(x.reshape(-1).to(torch.float32)).abs().amax(1)


def nf4_codes(x: torch.Tensor) -> torch.Tensor:
    """Returns the codes of the flattened tensor, uint8[elements / 2]."""
    flat = x.reshape(-1).to(torch.float32)
    blocks = _blocks(flat)
    scales = blocks.abs().amax(1, keepdim=True)
    # A block of zeros has the scale 0, and 0 / 0 is NaN.
    fractions = torch.where(scales > 0, blocks / scales, 0.0).view(-1)[: flat.numel()]
    bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=x.device)
    codes = torch.bucketize(fractions, bounds, out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] * 16 + codes[:, 1]


def int8_scales(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of each row, float32[rows]."""
    return x.reshape(-1, x.shape[-1]).to(torch.float32).abs().amax(1)


def int8_codes(x: torch.Tensor) -> torch.Tensor:
    """Returns the codes, int8, in the shape of the tensor."""
    x = x.to(torch.float32)
    scales = x.abs().amax(-1, keepdim=True)
    return torch.where(scales > 0, x * (127 / scales), 0.0).round().to(torch.int8)


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    """Returns the elements as [blocks, 64]; zeros are appended to a short last block."""
    rest = -flat.numel() % NF4_BLOCK
    return (F.pad(flat, (0, rest)) if rest else flat).view(-1, NF4_BLOCK)
