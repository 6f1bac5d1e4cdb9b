"""Multiplies matrices in 8-bit floating point: rounds the operands, and defines the operator.

[Note: fp8] An operand is divided by a scale, which is a power of two, and rounded to nearest even. Values of the
forward are rounded to float8_e4m3fn (3 bits of mantissa, up to 448), gradients to float8_e5m2 (2 bits, up to 57344).
The scale moves the largest magnitude of the operand (with `rows`: of each row of the first and each column of the
second) between half the format's largest number and that number. Because the scales are powers of two, multiplying by
them rounds nothing: the result does not depend on whether they are applied before or after a sum, in which order, or
by which kernel. Sums are kept in float32, and rounded once to the dtype of the result.

`scaled_mm` is one node of a recorded graph. A CUDA device runs its native products; any other device does the same
arithmetic in float32, with operands that were rounded to 8 bits.

Papers: Micikevicius et al., FP8 formats for deep learning, 2022; Noune et al., 8-bit numerical formats for deep
    neural networks, 2022, for powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import register_flop_formula

from fzero._compat import compat
from fzero.ops.registration import define

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The dims of a product must be multiples of this: the hardware loads 16 bytes at once."""
LEAST = 2.0**-100
"""Lower bound for the largest magnitude of an operand, for operands that are all zeros."""
_EXPONENT, _ONE = 0x7F800000, 1 << 23  # of a float32: the bits of its exponent, and the value 1 in these bits


def amax(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Returns the largest magnitude, float32[], or along a dim, which is kept with size 1. A NaN is the
    largest.
    """
    return (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the scale of values with this largest magnitude: float32, powers of two. See [Note: fp8].

    Args:
        largest: float32, of any shape.
        dtype: the dtype that the scaled values are rounded to.

    Example:
        >>> scale_of(torch.tensor([448.0, 449.0, 1.0, 0.0]), E4M3)[:3]
        tensor([2.0000, 2.0000, 0.0039])
    """
    largest_number = torch.finfo(dtype).max  # 1.75 x 2^top
    top = math.frexp(largest_number)[1] - 1
    # Clearing the mantissa rounds largest / 1.75 down to a power of two, 2^e. The scale is
    # 2^(e - top + 1): divided by it, the largest magnitude is in [max / 2, max).
    bits = (largest.clamp(min=LEAST) * (2.0**top / largest_number)).view(torch.int32) & _EXPONENT
    return (bits - (top - 1) * _ONE).view(torch.float32)


def rounded(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `x / scale` in an 8-bit dtype. Values that are not finite stay so, or become NaN.

    Example:
        >>> rounded(torch.tensor([3.0, -17.0]), torch.tensor(2.0), E4M3).float()
        tensor([ 1.5000, -8.0000])
    """
    return (x.float() * _inverse(scale)).to(dtype)


def quantized(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix rounded with the scale of its largest magnitude, and that scale: float32[], or along `dim`,
    which is kept with size 1.
    """
    scale = scale_of(amax(x, dim), dtype)
    return rounded(x, scale, dtype), scale


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Returns the inverses of powers of two. It is exact on every device, which a division is not."""
    # The exponent of a float32 is stored with an offset of 127: e + 127 for 2^e, and
    # 254 - (e + 127) for its inverse.
    return (254 * _ONE - scale.view(torch.int32)).view(torch.float32)


def multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Computes `scaled_mm`: `(a * scale_a) @ (b * scale_b)` with float32 sums, in `dtype`.

    Args:
        a: float8[m, k].
        b: float8[k, n].
        scale_a, scale_b: both float32[], or float32[m, 1] and float32[1, n].
        dtype: dtype of the result: float32, bfloat16 or float16.
    """
    return multiply_on(a.device)(a, b, scale_a, scale_b, dtype)


def multiply_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Returns `multiply` for a device, whether or not its operands are there."""
    return _native if device.type == "cuda" else _emulated


def _emulated(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return (torch.mm(a.float(), b.float()) * scale_a * scale_b).to(dtype)


def _native(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiplies on tensor cores, which read both operands along k, so the second operand is stored column by column.
    They may accumulate with less than float32 precision if requested, which only the forward does. The kernel
    supports scales per row only for results in bfloat16 and a second operand in e4m3; in other cases the scales are
    multiplied in afterwards, which gives the same.
    """
    a, b, fast = a.contiguous(), b.t().contiguous().t(), a.dtype == b.dtype == E4M3
    if scale_a.dim() == 0 or (dtype is torch.bfloat16 and b.dtype is E4M3):
        return compat.scaled_mm(a, b, scale_a, scale_b, dtype, fast)
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return (compat.scaled_mm(a, b, one, one, torch.float32, fast) * scale_a * scale_b).to(dtype)


scaled_mm = define(
    "scaled_mm",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    multiply,
    lambda a, b, scale_a, scale_b, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
)
"""See `multiply`."""


@register_flop_formula(scaled_mm.overloadpacket)
def _flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]
