"""Runs the function of a block on a flat list of tensors, and checks the values that enter and leave the block."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.torch_switches import Autocast
from fzero.trace.guards.write_guard import without_gradients

if TYPE_CHECKING:
    from fzero.trace.block_calls import Blocks


COMPUTES = "_fzero_computes"
"""An attribute of a block's function: the names of the parameters whose dtype the block computes in. It is set if the
parameters do not all share one dtype (the buffers of a module keep their own dtypes)."""


RUNS = "_fzero_runs"
"""An attribute of a block's function: the user's function that it runs. Errors point to the line of that function."""


class BlockResults(NamedTuple):
    """The results of a block's function: the tensors that it created, and how the returned tree is built from them and
    from the inputs."""

    made: list[torch.Tensor]
    structure: tree.TreeSpec
    returned: tuple[int, ...]  # as in a `Joint`
    memory: tuple[int, ...]
    raises: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Body:
    """The body of a block as a function of a flat list of tensors, together with the PyTorch settings that it runs
    under.

    For each leaf of the block's argument tree, `places` has the index of the tensor in the flat list. If that is None,
    the leaf is not a tensor, and `constants` has its value.
    """

    fn: Callable[..., Any]
    owner: str
    spec: tree.TreeSpec
    constants: Sequence[Any]
    places: Sequence[int | None]
    watch: bool
    autocast: Autocast
    switches: tuple[object, ...]

    def __call__(self, xs: Sequence[torch.Tensor]) -> BlockResults:
        """Runs the function and returns its results. Blocks that it calls are inlined."""
        # Without a tracer, a block that the function calls runs as a plain function.
        token = tracer.set(None)
        try:
            params, args, kwargs = tree.unflatten(
                self.spec, [c if i is None else xs[i] for c, i in zip(self.constants, self.places, strict=True)]
            )
            trees = arguments(self.fn, params, args, kwargs)
            with raise_conditions.collected(self.owner) as noted, without_gradients(self.owner, tensors_in(trees)):
                result = applied(self.fn, params, args, kwargs)
        finally:
            tracer.reset(token)
        flat, structure = tree.flatten(result)
        wrong = [
            f"{p} is {type(x).__name__}"
            for p, x in zip(tree.paths(result, "result"), flat, strict=True)
            if not isinstance(x, torch.Tensor)
        ]
        if wrong or not flat:
            found = [*where(self.fn), *(wrong or ["no tensor"])]
            raise TraceError(self.owner, "returns something other than tensors", found, "return a pytree of tensors")
        check_bare(self.owner, "leaves behind", self.fn, [*trees, ("result", result)])
        # The inputs come first, so a result that is one of them gets its index, and only new tensors become outputs.
        tensors = list({id(x): x for x in (*xs, *flat)}.values())
        number = {id(x): i for i, x in enumerate(tensors)}
        storages = [compat.memory_of(x) for x in tensors]
        made = [*(resolved(x) for x in tensors[len(xs) :]), *noted.joined]
        # `Blocks.call` removes these outputs from the end: first the maximum, then the flags.
        made = [*made, _largest(flat)] if self.watch else made
        returned, memory = tuple(number[id(x)] for x in flat), tuple(map(storages.index, storages))
        return BlockResults(made, structure, returned, memory, tuple(noted.lines))


def resolved(x: torch.Tensor) -> torch.Tensor:
    """Returns a value in the form in which it enters or leaves a block: lazy conjugation and negation bits are
    materialized."""
    return x.resolve_conj().resolve_neg()


def _largest(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value in floating-point tensors, float32[]. It is inf if any element is NaN, and 0 if there
    are no floating-point elements."""
    ends = [
        torch.linalg.vector_norm(x.detach(), math.inf).to(torch.float32)
        for x in values
        if x.is_floating_point() and x.numel()
    ]
    largest = functools.reduce(torch.maximum, ends, torch.zeros((), device=values[0].device))
    # `maximum` propagates NaN, which would compare as smaller than any limit.
    return torch.where(largest.isnan(), math.inf, largest)


def _entering(fn: Any, params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments in the dtype that the block computes in: floating-point tensors are cast to the dtype of the
    parameters while `casting` is set."""
    if not casting.get():
        return args, kwargs
    own = getattr(fn, COMPUTES, None)
    leaves = tree.leaves(params) if own is None else [params[name] for name in own]
    dtypes = {x.dtype for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if len(dtypes) != 1:
        return args, kwargs
    (dtype,) = dtypes
    cast = functools.cache(lambda x: x.to(dtype))  # by identity: a tensor passed twice stays one tensor
    return tree.map(lambda x: cast(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs))


def applied(fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Any:
    """Calls `fn` with its arguments. The containers in the arguments were built for this call only, so a change that
    `fn` makes to one of them would be lost; it is reported as an error."""
    args, kwargs = _entering(fn, params, args, kwargs)

    def contents() -> list[tuple[str, dict[str, Any], tree.TreeSpec]]:
        trees = arguments(fn, params, args, kwargs)
        return [(name, dict(tree.with_paths(x, name)), tree.structure(x)) for name, x in trees]

    before = contents()
    result = fn(params, *args, **kwargs)
    changed = []
    for (name, old, structure), (_, new, now) in zip(before, contents(), strict=True):
        leaves = [path for path in {**old, **new} if path not in old or path not in new or old[path] is not new[path]]
        changed += leaves or ([name] if structure != now else [])
    if changed:
        text = "changes a list, dict or other container that it is given"
        fix = "return the new value instead, and put it into the container outside of the block"
        raise TraceError(f"block {name_of(fn)}", text, [*where(fn), *changed], fix)
    return result


def check_bare(owner: str, does: str, fn: Any, trees: Sequence[tuple[str, Any]]) -> None:
    """Raises if a tensor that enters or leaves a block has a user-defined attribute."""
    if extra := [f"{path}.{name}" for path, x in tensors_in(trees) for name in compat.attributes(x)]:
        fix = "pass what the attribute says as an argument, or return it, together with the tensor"
        raise TraceError(
            owner, f"{does} tensors with attributes, which are not part of their values", [*where(fn), *extra], fix
        )


def tensors_in(trees: Sequence[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """The tensors in several trees, with their paths."""
    return [
        (path, x) for root, values in trees for path, x in tree.with_paths(values, root) if isinstance(x, torch.Tensor)
    ]


def arguments(fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call, with the names of the function's parameters."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [(names[i] if i < len(names) else f"argument {i}", x) for i, x in enumerate((params, *args))] + sorted(
        kwargs.items()
    )


def where(fn: Any) -> list[str]:
    """The place in the user's code where the function is defined, as a list of at most one `file:line`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, RUNS, fn)
    code = getattr(fn, "__code__", None) or getattr(getattr(type(fn), "forward", type(fn).__call__), "__code__", None)
    return [f"{code.co_filename}:{code.co_firstlineno}"] if code else []


def name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


tracer: ContextVar[Blocks | None] = ContextVar("fzero_blocks", default=None)
casting: ContextVar[bool] = ContextVar("fzero_casting", default=False)
