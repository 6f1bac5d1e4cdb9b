"""Draws from keys the random numbers that a module would draw from torch's global generator.

This happens below autograd, where a draw is a constant: what it is multiplied with is differentiated as usual. Each
draw has its own key: the given key with the number of the draw folded in. The random numbers of a sample depend on
its position in the global batch (see [Note: keys and parts] of random.py), so it must be known which dimension of a
draw is the batch. A dry run ("rehearsal") determines that: the module runs on tensors without values, with a number
of samples that no other size is a multiple of. A draw without such a dimension is the same on every rank and in every
micro-batch.

A dimension may contain the samples several times: `(rows, time)` flattened, or two views of the batch one after the
other. The operations that made the dimension determine which of the two it is (modules/batch_dims.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero import random
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.modules.batch_dims import ROWS, Places, arguments, at_hand, has_rows
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.unsupported_operations import draws
from fzero.trace.guards.user_frames import asking_frame, line, user_place

aten = torch.ops.aten
_NOBODYS = 0x5EED0F2E80  # a seed


class Drawn(NamedTuple):
    """A draw as a dry run found it, converted to the current number of samples.

    Attributes:
        shape: shape of the draw.
        dim: the batch dimension; None if there is none.
        split: the size of this dimension as (outer, rows, inner).
    """

    shape: tuple[int, ...]
    dim: int | None = None
    split: tuple[int, int, int] = (1, 1, 1)


Dims = tuple[Drawn, ...]
"""Every draw, in order."""


class NeedsKey(BaseException):
    """Something is drawn although no key was given. This is not an `Exception`, so that no forward catches it."""


def may_draw(module: nn.Module) -> bool:
    """Returns whether a module has dropout, according to its attributes."""
    rates = (x for m in module.modules() for name, x in vars(m).items() if "drop" in name or name == "p")
    return module.training and any(isinstance(x, float) and x > 0 for x in rates)


class _Seeded(compat.TorchDispatchMode):
    """A mode in which operations that draw random numbers are passed to `seeded`."""

    def seeded(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def draw(self, kind: Any, shape: Sequence[int], *args: Any) -> torch.Tensor:
        """Draws with a function of fz.random."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        # Nothing inside draws from torch's generator, so if the generator has another seed, the code has set one.
        self._state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_NOBODYS)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        torch.default_generator.set_state(self._state)
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seeded = compat.is_operator(func) and torch.Tag.nondeterministic_seeded in func.tags
        seeded = seeded and draws(func, args, kwargs)
        return self.seeded(func, args, kwargs) if seeded else func(*args, **kwargs)


class Rehearsal(_Seeded):
    """Records each draw inside. Draws inside a layer are recorded separately for that layer (`aside`).

    Args:
        rows: number of samples in the current batch.
    """

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        self.found: list[Drawn] = []
        self.places, self._rows = Places(), rows
        self._reads: Sequence[torch.Tensor] = ()  # the tensors that the current draw reads

    @contextmanager
    def aside(self) -> Iterator[list[Drawn]]:
        """Records the draws inside in a separate list, and yields that list."""
        outer, self.found = self.found, []
        try:
            yield self.found
        finally:
            self.found = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and (test := raise_conditions.test_of(asking_frame())) is not None:
            # the test only decides whether to raise an error, so it is answered as a trace answers it
            return test.answer
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.places.note(func, args, kwargs or {}, out)
        return out

    def seeded(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule, given = _RULES.get(func.overloadpacket), arguments(func, args, kwargs)
        # The dry run only looks for shapes.
        if rule is None:  # an error is raised when it actually draws
            return func(*args, **kwargs)
        self._reads = [x for x in given.values() if isinstance(x, torch.Tensor)]
        return rule(self, given)

    def draw(self, kind: Any, shape: Sequence[int], *args: Any) -> torch.Tensor:
        self.found.append(self._drawn(tuple(shape)))
        return torch.empty(tuple(shape), dtype=torch.int64 if kind is random.bits else torch.float32)

    def _drawn(self, shape: tuple[int, ...]) -> Drawn:
        """Returns the draw, and raises an error if it is not known which elements belong to which sample."""
        at = next((i for i, n in enumerate(shape) if has_rows(n)), None) if self._rows else None
        if at is None:
            return Drawn(shape, None)
        assert self._rows is not None
        outer = self.places.outer(shape[at], self._reads)
        if outer is None:
            place = user_place(None)
            where = [line(place)] if place else []
            what = (
                f"a random tensor has {shape[at] // ROWS} times the batch size, and "
                "it is not known which elements belong to which sample"
            )
            fix = (
                "draw with a dimension for the samples, torch.rand(len(x), 2, 8), and reshape it; or torch.rand_like(y)"
            )
            raise TraceError("functionalize", what, where, fix)
        inner = shape[at] // (ROWS * outer)
        split = at_hand(outer, self._rows), self._rows, at_hand(inner, self._rows)
        return Drawn(tuple(at_hand(n, self._rows) for n in shape), at, split)


class Draws(_Seeded):
    """Operations inside draw from `key`; without a key they raise `NeedsKey`.

    Args:
        key: int64[3], or None.
        dims: the draws that a dry run found; None if there is no batch.
    """

    def __init__(self, key: torch.Tensor | None, dims: Dims | None = ()):
        super().__init__()
        self.key, self._dims, self._keys = key, None if dims is None else list(dims), 0

    def next(self) -> torch.Tensor:
        """Returns the key of the next draw, or of the next block."""
        if self.key is None:
            raise NeedsKey
        self._keys += 1
        return random.fold_in(self.key, self._keys)

    def seeded(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule, given = _RULES.get(func.overloadpacket), arguments(func, args, kwargs)
        if torch.default_generator.initial_seed() != _NOBODYS:
            fix = "draw numbers that are the same in every step once, and register it as a buffer"
            what = f"{func} draws from its own seed (torch.manual_seed, fork_rng), which is not a key"
            raise TraceError("functionalize", what, fix=fix)
        if rule is None or given.get("generator") is not None:
            place = user_place(None)
            where, fix = [line(place)] if place else [], _fix(func, given)
            raise TraceError("functionalize", f"draws random numbers without access to a key ({func})", where, fix)
        return rule(self, given)

    def draw(self, kind: Any, shape: Sequence[int], *args: Any) -> torch.Tensor:
        """Draws with a function of fz.random, with the samples in their dimension."""
        key, shape = self.next(), tuple(shape)
        drawn = Drawn(shape) if self._dims is None else self._rehearsed(shape)
        if (at := drawn.dim) is None:
            return kind(random.replicated(key), list(shape), *args)
        outer, rows, inner = drawn.split
        rest = shape[:at] + shape[at + 1 :]
        # The batch dimension comes first in the draw, so that a sample's numbers depend only on its global index.
        if outer == 1:
            return kind(key, [rows * inner, *rest], *args).movedim(0, at)
        return kind(key, [rows, outer, inner, *rest], *args).movedim((1, 0, 2), (at, at + 1, at + 2)).reshape(shape)

    def _rehearsed(self, shape: tuple[int, ...]) -> Drawn:
        """Returns the next draw of the dry run, and raises an error if the dry run found a different one here."""
        assert self._dims is not None
        drawn = self._dims.pop(0) if self._dims else None
        if drawn is None or drawn.shape != shape:
            place = user_place(None)
            where = [f"a draw of {list(shape)}"] + ([line(place)] if place else [])
            if drawn is not None:
                where.insert(1, f"on other rows {list(drawn.shape)}, if its sizes were the batch's or a multiple of it")
            what = "the shape of a random tensor depends on the batch size in another way than as a dimension"
            fix = "draw one row per sample, torch.rand(len(x), 8), for any batch size, and slice or repeat the result"
            raise TraceError("functionalize", what, where, fix)
        return drawn


def _fix(func: Any, given: dict[str, Any]) -> str:
    """Suggests a replacement for a draw that has no rule, or that uses a generator."""
    if given.get("generator") is not None:
        return "leave the generator out: random numbers come from the step's key"
    if "attention" in str(func):
        return "give no dropout in attention (dropout_p=0.0), or models of transformers attn_implementation='eager'"
    names = sorted({op.__name__.strip("_") for op in _RULES})
    return f"build it from functions that draw from the step's key: {', '.join(names)}"


# --- rules ---


def _uniform(mode: Draws, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    u = mode.draw(random.uniform, shape)
    return u if (low, high) == (0.0, 1.0) else u * (high - low) + low


def _exponential(mode: Draws, shape: Sequence[int], rate: float = 1.0) -> torch.Tensor:
    return -torch.log1p(-_uniform(mode, shape)) / rate


def _into(made: Any) -> Any:
    """Returns a rule for an operation that overwrites a tensor."""

    def rule(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
        x = given["self"]
        return x.copy_(made(mode, given, x.shape).to(x.dtype))

    return rule


def _made(made: Any) -> Any:
    """Returns a rule for an operation that makes a tensor, of a given shape or like another tensor."""

    def rule(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
        like = given.get("self")
        shape = given["size"] if like is None else like.shape
        default = torch.get_default_dtype() if like is None else like.dtype
        return made(mode, given, shape).to(given.get("dtype") or default)

    return rule


def _integers(mode: Draws, given: dict[str, Any], shape: Sequence[int]) -> torch.Tensor:
    low, high = given.get("low", 0) or 0, given["high"]
    return mode.draw(random.bits, shape) % (high - low) + low


def _whole_numbers(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
    like = given.get("self")
    made = _integers(mode, given, given["size"] if like is None else like.shape)
    return made.to(given.get("dtype") or (torch.int64 if like is None else like.dtype))


def _bernoulli(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
    x = given["self"]
    p = x if given.get("p") is None else given["p"]
    return (_uniform(mode, x.shape) < p).to(x.dtype)


def _dropout(mode: Draws, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, p = given["input"], given["p"]
    keep = mode.draw(random.uniform, x.shape) >= p
    return x * keep * (1 / (1 - p) if p < 1 else 0.0), keep


def _normal(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
    mean, std = given["mean"], given["std"]
    like = mean if isinstance(mean, torch.Tensor) else std
    shape = given.get("size") or torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, torch.Tensor)))
    dtype = like.dtype if isinstance(like, torch.Tensor) else torch.get_default_dtype()
    return (mode.draw(random.normal, shape) * std + mean).to(given.get("dtype") or dtype)


def _permutation(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
    return mode.draw(random.uniform, [given["n"]]).argsort().to(given.get("dtype") or torch.int64)


def _multinomial(mode: Draws, given: dict[str, Any]) -> torch.Tensor:
    """Draws by the largest log p + Gumbel noise."""
    p, number = given["self"], given["num_samples"]
    # An exponential draw may be 0, whose logarithm is infinite.
    if given.get("replacement"):
        noise = _exponential(mode, [*p.shape[:-1], number, p.shape[-1]]).clamp_min(1e-20)
        return (p.unsqueeze(-2).log() - noise.log()).argmax(-1)
    noise = _exponential(mode, p.shape).clamp_min(1e-20)
    return (p.log() - noise.log()).topk(number, dim=-1).indices


def _bounds(given: dict[str, Any]) -> tuple[float, float]:
    return given.get("from", 0.0), given.get("to", 1.0)


_RULES: dict[Any, Any] = {
    aten.bernoulli_: _into(lambda mode, given, shape: _uniform(mode, shape) < given.get("p", 0.5)),
    aten.bernoulli: _bernoulli,
    aten.uniform_: _into(lambda mode, given, shape: _uniform(mode, shape, *_bounds(given))),
    aten.normal_: _into(lambda mode, given, shape: mode.draw(random.normal, shape) * given["std"] + given["mean"]),
    aten.exponential_: _into(lambda mode, given, shape: _exponential(mode, shape, given["lambd"])),
    aten.log_normal_: _into(
        lambda mode, given, shape: (mode.draw(random.normal, shape) * given["std"] + given["mean"]).exp()
    ),
    aten.cauchy_: _into(
        lambda mode, given, shape: torch.tan(math.pi * (_uniform(mode, shape) - 0.5)) * given["sigma"] + given["median"]
    ),
    aten.rand: _made(lambda mode, given, shape: _uniform(mode, shape)),
    aten.rand_like: _made(lambda mode, given, shape: _uniform(mode, shape)),
    aten.randn: _made(lambda mode, given, shape: mode.draw(random.normal, shape)),
    aten.randn_like: _made(lambda mode, given, shape: mode.draw(random.normal, shape)),
    aten.randint: _whole_numbers,
    aten.randint_like: _whole_numbers,
    aten.randperm: _permutation,
    aten.normal: _normal,
    aten.multinomial: _multinomial,
    aten.native_dropout: _dropout,
}
