"""Rounds stochastically, for parameters that are stored in bfloat16 without fp32 masters.

An update is often smaller than half the distance between a parameter and its neighbors in bfloat16 (1/256 to 1/128 of
its value). Rounded to nearest, it is lost every time; rounded up or down with probabilities in proportion to the
distances, the mean over steps equals the update.
"""

from __future__ import annotations

import torch

from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroTypeError
from fzero.random import DRAW, check_key
from fzero.tree import describe

_LOW = 1 << 16  # one more than the largest value of the bits that bfloat16 drops from a float32


@plain_numbers
def stochastic_round(key: torch.Tensor, x: torch.Tensor, *, start: int = 0, numel: int | None = None) -> torch.Tensor:
    """Rounds `x` to bfloat16: each element to one of its two neighbors, with probabilities such that the mean is `x`.

    Numbers that bfloat16 can represent stay as they are, and so do infinities and NaN. Beyond the largest number, the
    neighbor is infinity.

    Args:
        key: int64[3]. The random numbers depend on it and on the element's position in `x`, see
            [Note: keys and parts] (fzero/random.py).
        x: float32.
        start, numel: draw as for the elements from `start` on of a tensor of `numel` elements.

    Returns:
        bfloat16, with the shape of `x`.

    Memory: 8 bytes per element for random words, and 12 for bits, if run eagerly; compiled, it is part of the kernel
        that computes `x`.

    Raises:
        FzeroTypeError: if `x` is not float32.

    Paper: Gupta et al., Deep learning with limited numerical precision, ICML 2015.

    Example:
        >>> # 1 and 1.0078125 are neighbours; 1.001953125 is a quarter of the way.
        >>> from fzero.random import key
        >>> rounded = stochastic_round(key(0), torch.full((10_000,), 1.001953125))
        >>> sorted(set(rounded.tolist())), round(float((rounded > 1).float().mean()), 2)
        ([1.0, 1.0078125], 0.25)
    """
    check_key("optim.stochastic_round", key)
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        raise FzeroTypeError(
            "optim.stochastic_round", f"rounds float32, not {describe(x)}", fix="cast it first: x.float()"
        )
    noise = (DRAW(key, list(x.shape), x.numel() if numel is None else numel, start, "bits") >> 16).to(torch.int32)
    bits = x.view(torch.int32)
    # The 16 bits that bfloat16 drops. Their sum with 16 random bits carries into the kept bits with a probability of
    # low / 2**16.
    low = bits & (_LOW - 1)
    away = (low + noise) & _LOW  # away from zero: the bits of a float are its sign and its magnitude
    rounded = (bits - low + away).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)  # a NaN may have only low bits set
