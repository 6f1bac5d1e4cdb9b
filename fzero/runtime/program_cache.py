"""Distinguishes the kinds of calls of a compiled step, each of which has its own program, and keeps the most recently
used programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.compiler.lowered import Lowered
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.runtime.build.artifact_cache import logger
from fzero.runtime.build.warm_up import WarmUp
from fzero.runtime.execute import Executable
from fzero.runtime.retrace import TraceRecord
from fzero.sharding.layout import ties
from fzero.trace.guards.captured_settings import Settings
from fzero.trace.guards.torch_switches import (
    autocast,
    dispatch_modes,
    function_modes,
    saved_tensor_hooks,
    switches,
    told,
)
from fzero.transforms.compress import Formats

MOST_PROGRAMS = 16
"""Number of programs that a step keeps, each with its pool: one for each kind of batch. The least recently used one is
dropped first, and made again when it is needed."""


class StepCall(NamedTuple):
    """The arguments of a call.

    Attributes:
        params: the leaf table of the parameters.
        batch: the batch, as the user gave it.
        flat, structure: its leaves and its tree.
    """

    params: Inputs
    batch: Any
    flat: list[Any]
    structure: tree.TreeSpec


@dataclass(eq=False)
class CachedProgram:
    """A built program.

    Attributes:
        lowered: the program.
        run: its executable.
        settings: the values that its functions read when it was traced.
        record: what it was traced from.
        strides: the places in the user's code that read strides.
        warm_up: replaces functions of the program by compiled ones, until all are compiled.
        calls: the number of times that it was called.
        compared_from: the number of calls from which on `settings` are compared with the current values.
    """

    lowered: Lowered
    run: Executable
    settings: Settings
    record: TraceRecord
    strides: list[str]
    warm_up: WarmUp | None = None
    calls: int = 0
    compared_from: int = 0

    def advance(self, to_the_end: bool = False) -> None:
        """Lets the program call the functions that have been compiled since the last call. All ranks call it.

        Args:
            to_the_end: waits until all functions are compiled.
        """
        if self.warm_up is not None:
            self.run.use(self.warm_up.finish() if to_the_end else self.warm_up.advance())
            self.warm_up = None if self.warm_up.done else self.warm_up


class ProgramCache(dict[Any, CachedProgram]):
    """The programs of a step, by kind of call and compression formats; the most recently used one is last."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name
        self._warned = False  # whether the user was warned that programs are made and dropped again

    def known(self, inputs: Inputs) -> Inputs:
        """Returns the equal leaf table for which there are programs, if there is one, else the given leaf table of
        parameters."""
        # Leaf tables compare by identity, so that looking up a program does not compare thousands of leaves. An equal
        # table that is new would find no program.
        return next((params for params, *_ in self if params.alike(inputs)), inputs)

    def difference(self, key: tuple[Any, ...]) -> str:
        """Describes the differences between a new kind of call and the last one."""
        before = next(reversed(self), None)
        if before is None:
            return ""
        new, old = _facts(key), _facts(before)
        changed = [name for name in {**new, **old} if new.get(name) != old.get(name)]
        return ": " + "; ".join(
            f"{name} {new.get(name, 'missing')}, before {old.get(name, 'missing')}" for name in changed
        )

    def keep(self, key: tuple[Any, ...], program: CachedProgram) -> None:
        """Keeps a program as the most recently used one, and drops the least recently used one if there are too
        many."""
        self[key] = program
        if len(self) > MOST_PROGRAMS:
            del self[next(iter(self))]
            if not self._warned:
                logger.warning(
                    "%s: more than %d kinds of batches: pad them to a few lengths, each has a program of its own",
                    self._name,
                    MOST_PROGRAMS,
                )
            self._warned = True


def key_of_call(call: StepCall, formats: Formats | None) -> tuple[Any, ...]:
    """Returns everything that a program is specialized for.

    Args:
        formats: the compression formats that the state has recorded.
    """
    # Strides are not part of the key: batches are made contiguous before a program reads them.
    kinds = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in call.flat])
    # Two entries of a batch that are one tensor are one input of the program.
    same = tuple(ties(call.flat))
    return (
        call.params,
        call.structure,
        kinds,
        same,
        torch.get_default_dtype(),
        autocast(),
        switches(),
        formats,
    )


def batch_entries(call: StepCall) -> dict[str, str]:
    """Returns the dtype and shape of each entry of a batch, by path, and which of them are one tensor."""
    kinds = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in call.flat]
    return _entries(call.structure, kinds, ties(call.flat))


def _entries(structure: tree.TreeSpec, kinds: Sequence[Any], same: Sequence[int]) -> dict[str, str]:
    paths = tree.paths(tree.unflatten(structure, range(len(kinds))), "batch")
    found = [kind.__name__ if isinstance(kind, type) else tree.form(*kind) for kind in kinds]
    return {
        path: form if i == first else f"{form}, the same tensor as {paths[first]}"
        for i, (path, form, first) in enumerate(zip(paths, found, same, strict=True))
    }


def check_modes(name: str, owner: str, backend: str, graphs: bool | None) -> None:
    """Raises if the caller has entered modes or hooks that a program does not see. A program that runs operation by
    operation does see a TorchDispatchMode."""
    unseen = [*function_modes(), *(dispatch_modes() if backend == "inductor" or graphs is True else [])]
    if around := [type(mode).__name__ for mode in unseen] + saved_tensor_hooks():
        fix = "enter it in the function that the step calls, around the operations that it is for"
        if backend == "inductor":
            fix += "; or use backend='eager', which runs every operation so that a TorchDispatchMode sees it"
        elif dispatch_modes():
            fix += "; or leave out cuda_graphs=True"
        what = f"{name} is called under a mode that a traced program does not see"
        raise FzeroValueError(owner, what, around, fix)


def _facts(key: tuple[Any, ...]) -> dict[str, str]:
    params, structure, kinds, same, default_dtype, cast, others, formats = key
    facts = {f"autocast's {name}": value for name, value in cast._asdict().items()} | told(others)
    facts |= {
        "parameters": [f"{x.path}: {x.dtype}{list(x.shape)}" for x in params.leaves],
        "the batch's tree": structure,
        **_entries(structure, kinds, same),
    }
    facts |= {"the default dtype": default_dtype}
    facts |= {f"over {x.axis}": x for x in formats or ()}
    return {name: str(value).replace("torch.", "") for name, value in facts.items()}
