"""Rejects writes to arguments and their gradients while a function runs. The plain step uses it, so that it rejects
what the trace of a compiled step rejects."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.guards import overwrites
from fzero.trace.guards.rejections import CHANGES, NEW_VALUE
from fzero.trace.guards.user_frames import line, user_place


class Untouched(compat.TorchDispatchMode):
    """Raises before an op inside would write to the memory of a tensor in these trees."""

    def __init__(self, owner: str, **arguments: Any):
        super().__init__()
        self._owner, self._outside = owner, sys._getframe(1)
        named = [pair for root, values in arguments.items() for pair in tree.with_paths(values, root)]
        # Reversed, so that of several tensors with one storage the first gives its path.
        self._paths = {_storage(x): path for path, x in reversed(named) if isinstance(x, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = (
            [self._paths[s] for s in map(_storage, overwrites.overwritten(func, args, kwargs)) if s in self._paths]
            if compat.is_operator(func)
            else []
        )
        if changed:
            place = user_place(self._outside)
            raise TraceError(
                self._owner, CHANGES, [f"{path}: {line(place)}" if place else path for path in changed], NEW_VALUE
            )
        return func(*args, **kwargs)


@contextmanager
def without_gradients(owner: str, arguments: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Raises if the body accumulates a gradient in one of these arguments, or registers a hook for that. The caller of
    the function differentiates its result, and reads no other gradients."""
    paths = {id(x): (path, x) for path, x in arguments if x.requires_grad and x.is_leaf}
    refused: list[TraceError] = []

    def refuse(x: torch.Tensor) -> None:
        place = user_place(None)
        refused.append(
            _refusal(
                owner,
                "accumulates gradients itself (.backward())",
                [*([line(place)] if place else []), f"{paths[id(x)][0]}.grad"],
            )
        )
        raise refused[-1]

    handles = [x.register_post_accumulate_grad_hook(refuse) for _, x in paths.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if refused:  # the function may have caught the exception
        raise refused[0]
    if graded := [f"{path}.grad" for path, x in paths.values() if x.grad is not None]:
        raise _refusal(owner, "sets gradients itself", graded)
    if hooked := [path for path, x in paths.values() if compat.gradient_hooks(x)]:
        raise _refusal(
            owner, "registers a hook for gradients that are added up (register_post_accumulate_grad_hook)", hooked
        )


def _refusal(owner: str, what: str, where: list[str]) -> TraceError:
    fix = (
        "return the loss, which the step differentiates; in it, a gradient is torch.autograd.grad(y, x, "
        "create_graph=True), and x.register_hook changes one"
    )
    return TraceError(owner, f"{what}: a step does not read those", where, fix)


def _storage(x: torch.Tensor) -> int | None:
    return compat.memory_of(x) if x.layout is torch.strided else None
