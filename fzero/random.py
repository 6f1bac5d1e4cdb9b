"""Draws counter-based random numbers: a draw is a function of a key and a global index, never of the mesh.

[Note: keys and parts] A key is an int64 tensor of shape [3]: two 32-bit words and a *part*. Element `i` of a draw of
`n` elements is Threefry-2x32 of the counter `part * n + i` under the two words. The part is the index of the
contiguous piece of the global batch that a process or micro-batch handles: with M micro-batches, rank r gives its
m-th one the part `r * M + m`. Then `dropout(key, x)` with the batch as leading dim drops exactly the elements of one
draw for the complete batch. `split` and `fold_in` keep the part and do not hash it, so keys derived for a layer agree
on every rank; `replicated` sets it to 0, for noise that must be the same everywhere.

[Note: operators] Under tracing every draw is one node, `fzero::draw(key, shape, numel, start, kind)`: elements
`start, start + 1, ...` of a draw of `numel` elements, in `shape`. A piece of a draw is the same operator with another
shape and start (`sub_range`), so a rewrite can shard a draw without drawing all of it. `fzero::draw_from` is that
operator with a start that is known only at run time (`from_start`), so one subgraph draws for every rank and every
parameter. Deriving a key is one node as well, `fzero::derive`. `DECOMPOSITIONS` expands them into pointwise
operations for a compiler to fuse; run eagerly, they work in place on blocks that fit into the cache.

Generator: Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC
2011).
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero._compat import compat
from fzero._utils.arguments import count, python_numbers
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ops.registration import define
from fzero.tree import describe

__all__ = [
    "key",
    "split",
    "fold_in",
    "with_part",
    "replicated",
    "bits",
    "uniform",
    "normal",
    "bernoulli",
    "dropout",
]

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KINDS = {"bits": torch.int64, "uniform": torch.float32, "normal": torch.float32}
# The high counter word says what a counter is for. Draws count below 2**63, so their high word is below 2**31: no
# derived key ever equals bits that were drawn from its parent.
_SPLIT, _FOLD = 1 << 31, 3 << 30
_CPU_BLOCK = 1 << 16  # elements per thread: three int32 buffers of it (768 KiB) stay in a core's L2 cache
_GPU_BLOCK = 1 << 22  # elements: at most 80 MiB of buffers, enough to hide the launches


def key(seed: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns the key for a seed, with part 0.

    Args:
        seed: an integer from 0 to 2**64 - 1.
        device: where the key is stored; draws are made there.

    Returns:
        int64[3], see [Note: keys and parts].

    Raises:
        FzeroTypeError: if the seed is not an integer.
        FzeroValueError: if the seed does not fit in 64 bits.

    Example:
        >>> key(7)
        tensor([7, 0, 0])
    """
    seed = python_numbers(seed)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise FzeroTypeError(
            "random.key", f"a seed is an integer, not {describe(seed)}", fix="pass an int, e.g. key(0)"
        )
    if not 0 <= seed < 1 << 64:
        raise FzeroValueError(
            "random.key", f"seed {seed} does not fit 64 bits", fix="choose a seed from 0 to 2**64 - 1"
        )
    return torch.tensor([seed & _MASK, seed >> 32, 0], dtype=torch.int64, device=device)


def split(key: torch.Tensor, n: int = 2) -> torch.Tensor:
    """Returns `n` keys, independent of each other and of everything else made from `key`; all keep its part.

    Args:
        key: int64[3].
        n: the number of keys, at least 1.

    Returns:
        int64[n, 3]; iterate over it or unpack it.

    Example:
        >>> first, second = split(key(0))
        >>> bool((first == second).all())
        False
    """
    check_key("random.split", key)
    n = python_numbers(n)
    if count("n", n):
        raise FzeroValueError("random.split", f"cannot split a key into {n!r}", fix="ask for at least 1 key")
    return DERIVE(key, torch.arange(n, device=key.device), _SPLIT)


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """Returns a key for `data`, such as a step or a layer's index; the same data gives the same key. Keeps the part.

    Args:
        key: int64[3].
        data: an integer from 0 to 2**62 - 1, or a 0-dim int64 tensor with one (which is not read on the host).

    Returns:
        int64[3].

    Example:
        >>> fold_in(key(0), 1).tolist() == fold_in(key(0), 1).tolist() != fold_in(key(0), 2).tolist()
        True
    """
    check_key("random.fold_in", key)
    data = python_numbers(data)
    if isinstance(data, torch.Tensor):
        if data.dim() or data.is_floating_point() or data.is_complex():
            raise FzeroTypeError(
                "random.fold_in", f"data is {describe(data)}", fix="fold in an integer or a 0-dim integer tensor"
            )
        data = data.to(device=key.device, dtype=torch.int64)
    elif not isinstance(data, int) or isinstance(data, bool):
        raise FzeroTypeError(
            "random.fold_in", f"data is {describe(data)}", fix="fold in an integer or a 0-dim integer tensor"
        )
    elif not 0 <= data < 1 << 62:
        raise FzeroValueError("random.fold_in", f"cannot fold in {data}", fix="fold in a number from 0 to 2**62 - 1")
    else:
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return DERIVE(key, data, _FOLD)


def with_part(key: torch.Tensor, part: int | torch.Tensor) -> torch.Tensor:
    """Returns the same key for another part of the global batch, see [Note: keys and parts].

    Args:
        key: int64[3].
        part: an integer of at least 0, or a 0-dim integer tensor with one (which is not read on the host). A draw of
            n elements needs `(part + 1) * n < 2**63`.

    Returns:
        int64[3].

    Example:
        >>> # two parts of two rows are one draw of four rows
        >>> whole, k = uniform(key(0), (4, 3)), key(0)
        >>> halves = [uniform(with_part(k, part), (2, 3)) for part in range(2)]
        >>> torch.equal(torch.cat(halves), whole)
        True
    """
    check_key("random.with_part", key)
    part = python_numbers(part)
    if isinstance(part, torch.Tensor):
        return torch.cat([key[:2], part.to(device=key.device, dtype=torch.int64).reshape(1)])
    if not isinstance(part, int) or part < 0:
        raise FzeroValueError(
            "random.with_part", f"a part is a whole number of at least 0, not {part!r}", fix="number the parts from 0"
        )
    return torch.cat([key[:2], torch.full((1,), part, dtype=torch.int64, device=key.device)])


def replicated(key: torch.Tensor) -> torch.Tensor:
    """Returns the key with part 0: its draws, such as noise on parameters, are the same on every rank and in every
    micro-batch.

    Args:
        key: int64[3].

    Returns:
        int64[3].

    Example:
        >>> torch.equal(normal(replicated(with_part(key(0), 3)), (2,)), normal(key(0), (2,)))
        True
    """
    return with_part(key, 0)


def bits(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Draws independent random 32-bit words, on the device of `key`.

    Args:
        key: int64[3].
        shape: shape of the result.

    Returns:
        int64 of shape `shape`, with values in [0, 2**32).

    Example:
        >>> bits(key(0), (3,)).max().item() < 2**32
        True
    """
    return _draw("random.bits", key, shape, "bits")


def uniform(
    key: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> torch.Tensor:
    """Draws independent numbers, uniform over [minval, maxval).

    They are drawn as multiples of 2**-24 in float32 (fewer bits for a narrower dtype, so that 1 is never among them),
    then scaled in float32 and cast. With bounds other than 0 and 1, rounding may reach `maxval`.

    Args:
        key: int64[3].
        shape: shape of the result.
        dtype: any floating dtype.
        minval, maxval: the bounds.

    Example:
        >>> x = uniform(key(0), (1000,))
        >>> bool(((0 <= x) & (x < 1)).all()), round(x.mean().item(), 1)
        (True, 0.5)
    """
    _check_dtype("random.uniform", dtype)
    _check_number("random.uniform", minval=minval, maxval=maxval)
    if not (math.isfinite(minval) and math.isfinite(maxval) and minval < maxval):
        raise FzeroValueError(
            "random.uniform",
            f"[{minval}, {maxval}) is not an interval",
            fix="choose finite bounds with minval < maxval",
        )
    out = _draw("random.uniform", key, shape, "uniform")
    levels = min(2 / torch.finfo(dtype).eps, 2.0**24)  # the number of evenly spaced values of the dtype between 0 and 1
    if levels < 2.0**24:
        out = torch.floor(out * levels) / levels
    if (minval, maxval) != (0.0, 1.0):
        out = out * (maxval - minval) + minval
    return out.to(dtype)


def normal(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draws independent standard normal numbers.

    Box-Muller in float32 on two random words per element, then cast to `dtype`; no number is beyond 6.6 standard
    deviations. The words are the same everywhere; the numbers are the same up to the rounding of `log` and `cos` by a
    device or compiler.

    Args:
        key: int64[3].
        shape: shape of the result.
        dtype: any floating dtype.

    Memory: the result in float32, and in `dtype` if that is another; in addition, 12 bytes for each of 65,536
        elements per thread.

    Example:
        >>> normal(key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    _check_dtype("random.normal", dtype)
    return _draw("random.normal", key, shape, "normal").to(dtype)


def bernoulli(key: torch.Tensor, shape: Sequence[int], p: float = 0.5) -> torch.Tensor:
    """Draws independent booleans, True with probability `p`.

    Args:
        key: int64[3].
        shape: shape of the result.
        p: from 0 to 1. The draws resolve it in steps of 2**-24.

    Returns:
        bool of shape `shape`.

    Raises:
        FzeroValueError: if `p` is not a probability.

    Example:
        >>> round(bernoulli(key(0), (1000,), 0.2).float().mean().item(), 1)
        0.2
    """
    _check_shape("random.bernoulli", shape)
    _check_number("random.bernoulli", p=p)
    if not 0 <= p <= 1:
        raise FzeroValueError("random.bernoulli", f"p={p} is not a probability", fix="choose p from 0 to 1")
    return _draw("random.bernoulli", key, shape, "uniform") < p


def dropout(key: torch.Tensor, x: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns `x` with each element zeroed with probability `rate` and the others divided by `1 - rate`.

    Whether an element is dropped depends on the key and on its position in the global batch ([Note: keys and parts]).
    So the leading dim of `x` must be the batch, or `key` must be replicated if `x` is the same on every rank.

    Args:
        key: int64[3], on the device of `x`.
        x: any floating tensor.
        rate: in [0, 1); 0 returns `x` itself.

    Memory: 5 bytes per element, of which 1 (the mask) is kept for the backward.

    Raises:
        FzeroValueError: if the rate is outside [0, 1).

    Paper: Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting, JMLR 2014.

    Example:
        >>> dropout(key(0), torch.ones(8), 0.5).unique()
        tensor([0., 2.])
    """
    _check_number("random.dropout", rate=rate)
    if not isinstance(x, torch.Tensor):
        raise FzeroTypeError(
            "random.dropout", f"drops elements of a tensor, not of {describe(x)}", fix="dropout(key, x, rate)"
        )
    if not 0 <= rate < 1:
        raise FzeroValueError(
            "random.dropout", f"rate={rate} is outside [0, 1)", fix="choose the share of elements to drop, e.g. 0.1"
        )
    check_key("random.dropout", key)
    if rate == 0:
        return x
    dropped = _draw("random.dropout", key, x.shape, "uniform") < rate
    return x.masked_fill(dropped, 0) * (1 / (1 - rate))


def sub_range(args: Sequence[Any], lo: int, hi: int) -> tuple[Any, ...]:
    """Returns the arguments of `DRAW` for elements [lo, hi) of what it draws with `args`, as a flat tensor.

    `hi` may exceed the number of elements, for padding: the values there are arbitrary.
    """
    key, _, numel, start, kind = args
    return key, [hi - lo], numel, start + lo, kind


def from_start(args: Sequence[Any], start: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns the arguments of `DRAW_FROM` for as many elements as `shape` has of what `DRAW` draws with `args`, from
    element `start` on, a 0-dim int64 tensor.
    """
    key, _, numel, _, kind = args
    return key, start, list(shape), numel, kind


def _draw(where: str, key: torch.Tensor, shape: Sequence[int], kind: str) -> torch.Tensor:
    check_key(where, key)
    _check_shape(where, shape)
    shape = [python_numbers(n) for n in shape]
    return DRAW(key, shape, math.prod(shape), 0, kind)


def check_key(where: str, key: Any) -> None:
    """Raises an error if a value is not a key."""
    if not isinstance(key, torch.Tensor):
        raise FzeroTypeError(where, f"a key is a tensor, not {describe(key)}", fix="make one with fz.random.key(seed)")
    if key.dtype != torch.int64 or key.shape != (3,):
        problems = [f"a key is int64[3], this is {describe(key)}"]
        fix = (
            "take one of the keys that split returned"
            if key.dtype == torch.int64 and key.dim() > 1
            else "make one with fz.random.key(seed)"
        )
        raise FzeroTypeError(where, "not a key", problems, fix)


def _check_shape(where: str, shape: Any) -> None:
    if (
        not isinstance(shape, Sequence)
        or isinstance(shape, str)
        or not all(isinstance(n, (int, torch.SymInt)) and n >= 0 for n in map(python_numbers, shape))
    ):
        given = describe(shape) if isinstance(shape, torch.Tensor) else repr(shape)
        raise FzeroTypeError(
            where, f"{given} is not a shape", fix="give a sequence of integers, e.g. (3, 4), after the key"
        )


def _check_number(where: str, **given: Any) -> None:
    if wrong := [
        f"{name}={describe(x) if isinstance(x, torch.Tensor) else repr(x)}"
        for name, x in given.items()
        if not isinstance(x, numbers.Real)
    ]:
        raise FzeroTypeError(
            where, "these are numbers", wrong, "give a Python number; the order of the arguments is in the docstring"
        )


def _check_dtype(where: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise FzeroTypeError(where, f"{dtype!r} is not a dtype", fix="e.g. torch.float32")
    if not dtype.is_floating_point:
        raise FzeroTypeError(
            where, f"cannot draw {dtype}", fix="ask for a floating dtype; fz.random.bits draws integers"
        )


def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Returns both words of Threefry-2x32 for integers in [0, 2**32): Python integers or int64 tensors.

    Nothing exceeds 2**61: compiled to C++, a signed overflow would be undefined.
    """
    schedule = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + k0) & _MASK, (x1 + k1) & _MASK
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << r) & _MASK) | (x1 >> (32 - r))) ^ x0
        x0, x1 = (x0 + schedule[(i + 1) % 3]) & _MASK, (x1 + schedule[(i + 2) % 3] + (i + 1)) & _MASK
    return x0, x1


def _threefry_(k0: Any, k1: Any, x0: torch.Tensor, x1: torch.Tensor, spare: torch.Tensor) -> None:
    """Computes `_threefry` in place on int32 tensors, three times as fast: eager int32 additions wrap around. The
    words are int or int64[].
    """
    schedule = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0.add_(_signed(k0))
    x1.add_(_signed(k1))
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0.add_(x1)
            torch.bitwise_right_shift(x1, 32 - r, out=spare)
            spare.bitwise_and_((1 << r) - 1).add_(x1, alpha=1 << r)  # x1 rotated left by r
            torch.bitwise_xor(spare, x0, out=x1)
        x0.add_(_signed(schedule[(i + 1) % 3]))
        x1.add_(_signed((schedule[(i + 2) % 3] + (i + 1)) & _MASK))


def _signed(word: Any) -> Any:
    """Returns the int32 with the bits of a word in [0, 2**32)."""
    return word - ((word >> 31) << 32)


def _draw_eager(key: torch.Tensor, shape: Sequence[int], numel: int, start: Any, kind: str) -> torch.Tensor:
    """Draws eagerly, in place on blocks: on a CPU blocks that fit into the cache, on a GPU blocks that hide the
    launches.
    """
    cpu = key.device.type == "cpu"
    k0, k1, part = key.tolist() if cpu else key.unbind()  # on an accelerator neither the key nor a start is read back
    start = int(start) if cpu else start
    out = torch.empty(shape, dtype=_KINDS[kind], device=key.device)
    flat, first = out.view(-1), part * numel + start
    size = min(flat.numel(), _CPU_BLOCK * torch.get_num_threads() if cpu else _GPU_BLOCK)
    counters = flat[:0] if kind == "bits" else torch.empty(size, dtype=torch.int64, device=key.device)
    buffers = torch.empty((3, size), dtype=torch.int32, device=key.device)
    for lo in range(0, flat.numel(), max(size, 1)):
        n = min(size, flat.numel() - lo)
        count, (x0, x1, spare) = flat[lo : lo + n] if kind == "bits" else counters[:n], buffers[:, :n].unbind()
        torch.arange(lo, lo + n, out=count).add_(first)
        x0.copy_(count)  # the low 32 bits
        x1.copy_(count.bitwise_right_shift_(32))
        _threefry_(k0, k1, x0, x1, spare)
        _finish_(kind, x0, x1, spare, flat[lo : lo + n])
    return out


def _draw_buffers(key: torch.Tensor, shape: Sequence[int], *rest: Any) -> int:
    """Returns the bytes of buffers that a draw on a GPU needs in addition to its result."""
    return min(math.prod(shape), _GPU_BLOCK) * (12 if rest[-1] == "bits" else 20)


def _finish_(kind: str, x0: torch.Tensor, x1: torch.Tensor, spare: torch.Tensor, out: torch.Tensor) -> None:
    if kind == "bits":
        out.copy_(x0).bitwise_and_(_MASK)
    elif kind == "uniform":
        out.copy_(x0.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)).mul_(2.0**-24)
    else:
        out.copy_(x0.bitwise_and_(0x7FFFFFFF)).add_(1).mul_(2.0**-31).log_().mul_(-2).sqrt_()  # of a number in (0, 1]
        out.mul_(spare.view(torch.float32).copy_(x1).mul_(math.pi * 2.0**-31).cos_())


def _draw_pointwise(key: torch.Tensor, shape: Sequence[int], numel: int, start: Any, kind: str) -> torch.Tensor:
    count = torch.arange(math.prod(shape), device=key.device).reshape(shape) + (key[2] * numel + start)
    return _drawn(key[0], key[1], count, kind)


def _drawn(k0: Any, k1: Any, count: Any, kind: str) -> Any:
    """Returns the draw for a counter, given as tensors or as elements of them."""
    x0, x1 = _threefry(k0, k1, count & _MASK, count >> 32)
    if kind == "bits":
        return x0
    if kind == "uniform":
        return (x0 >> 8).float() * 2.0**-24
    radius = ((((x0 & 0x7FFFFFFF).float() + 1) * 2.0**-31).log() * -2).sqrt()
    return radius * (_signed(x1).float() * (math.pi * 2.0**-31)).cos()


def _draw_rule(key: Any, shape: Sequence[int], numel: int, start: Any, kind: str) -> Any:
    def element(index: Sequence[Any]) -> compat.Element:
        flat = functools.reduce(lambda at, i: at * i[1] + i[0], zip(index, shape, strict=True), 0)
        first = key(2) * numel + (start() if callable(start) else start)
        return _drawn(key(0), key(1), compat.position(flat) + first, kind)

    return shape, _KINDS[kind], element


def _derive_eager(key: torch.Tensor, data: torch.Tensor, domain: int) -> torch.Tensor:
    if key.device.type != "cpu" or data.numel() > 16:
        return _derive_pointwise(key, data, domain)
    k0, k1, part = key.tolist()  # a few keys: a hundred operations on Python's numbers are faster than on tensors
    rows = [[*_threefry(k0, k1, d & _MASK, domain | ((d >> 32) & 0x3FFFFFFF)), part] for d in data.reshape(-1).tolist()]
    return torch.tensor(rows, dtype=torch.int64).reshape([*data.shape, 3])


def _derive_pointwise(key: torch.Tensor, data: torch.Tensor, domain: int) -> torch.Tensor:
    x0, x1 = _derived(key[0], key[1], data, domain)
    return torch.stack([x0, x1, key[2].expand(data.shape)], dim=-1)


def _derived(k0: Any, k1: Any, data: Any, domain: int) -> tuple[Any, Any]:
    return _threefry(k0, k1, data & _MASK, ((data >> 32) & 0x3FFFFFFF) | domain)


def _derive_rule(key: Any, data: Any, domain: int) -> Any:
    def element(index: Sequence[Any]) -> compat.Element:
        x0, x1 = _derived(key(0), key(1), data(*index[:-1]), domain)
        word = compat.position(index[-1])  # 0, 1 or 2
        second, part = word & 1, word >> 1
        return x0 * ((second + part) ^ 1) + x1 * second + key(2) * part

    return [*data.shape, 3], torch.int64, element


DRAW: Any = define(
    "draw",
    "(Tensor key, SymInt[] shape, SymInt numel, SymInt start, str kind) -> Tensor",
    _draw_eager,
    lambda key, shape, numel, start, kind: key.new_empty(shape, dtype=_KINDS[kind]),
    _draw_buffers,
)
DRAW_FROM: Any = define(
    "draw_from",
    "(Tensor key, Tensor start, SymInt[] shape, SymInt numel, str kind) -> Tensor",
    lambda key, start, shape, numel, kind: _draw_eager(key, shape, numel, start, kind),
    lambda key, start, shape, numel, kind: key.new_empty(shape, dtype=_KINDS[kind]),
    lambda key, start, *rest: _draw_buffers(key, *rest),
)
DERIVE: Any = define(
    "derive",
    "(Tensor key, Tensor data, int domain) -> Tensor",
    _derive_eager,
    lambda key, data, domain: key.new_empty([*data.shape, 3]),
)
DECOMPOSITIONS: dict[Any, Callable[..., torch.Tensor]] = {
    DRAW: _draw_pointwise,
    DRAW_FROM: lambda key, start, shape, numel, kind: _draw_pointwise(key, shape, numel, start, kind),
    DERIVE: _derive_pointwise,
}
"""The operators, as functions of pointwise operations."""
RULES = {
    DRAW: _draw_rule,
    DRAW_FROM: lambda key, start, shape, numel, kind: _draw_rule(key, shape, numel, start, kind),
    DERIVE: _derive_rule,
}
"""The operators, as code for one element of a kernel (`compat.ElementRule`)."""
