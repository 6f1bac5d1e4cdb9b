"""Does a step again, from the state that was kept before it, and says which rank came to something else.

A step is a function of a state and a batch: with deterministic operations it comes to the same bits every time. A run
    notes the sums of all values that this rank sends, line by line. So the erring rank is the first whose notes of two
    runs differ, not a rank that received its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import checkpoint, tree
from fzero.checkpoint.index import Index
from fzero.comm.replicas import word_sum
from fzero.elastic.health import Finding
from fzero.elastic.vault import held, on_host, serves
from fzero.errors import FzeroValueError
from fzero.layout import leaf_of
from fzero.measure.profile import LinePlace
from fzero.mesh import Mesh
from fzero.program.ir import Line, Program
from fzero.program.ops import COLLECTIVES
from fzero.ranks import agreement
from fzero.runtime.observe import observe
from fzero.runtime.training import CompiledStep
from fzero.state import storage
from fzero.step import State, lasting

_AT_THE_END = 1 << 40  # a position behind all lines


@dataclass
class RanStep:
    """A run of a step: its metrics, the sums of what this rank gave to each transfer, in their order, and of each leaf
    of the state behind it."""

    metrics: dict[str, Any]
    given: list[tuple[Line, torch.Tensor]]
    state: dict[str, int]


class StepDifference(NamedTuple):
    """The place where two runs differ first, and the ranks on which they do."""

    ranks: tuple[int, ...]
    where: str


def twice(
    train: CompiledStep, state: State, batch: Any, seen: int, memory: Path | None, on_host: Sequence[int]
) -> tuple[dict[str, Any], Finding | None]:
    """Takes a step, and does it again from the state before it: once if it comes to the same, else twice. The state is
    behind it: the result that two runs come to, else that of the last one.

    Args:
        train, state, batch: of the step.
        seen: batches that the state has seen.
        memory: the directory of kept states, which has the state before the step; None if none are kept.
        on_host: the ranks of this host.

    Returns: the metrics, and what is wrong, the same on every rank.

    Raises:
        FzeroValueError: the state before the step was not kept.
    """
    mesh = train.mesh

    def once_more() -> RanStep:
        _rewind(state, _kept(mesh, seen, memory, on_host), mesh)
        train.rewound(state)
        return _carried_out(train, state, batch)

    first, second = _carried_out(train, state, batch), once_more()
    odd = _differing(mesh, first, second)
    if odd is None:
        return second.metrics, None
    third = once_more()
    if _differing(mesh, second, third) is None:
        text = "two more runs agree, and theirs is kept"
    elif _differing(mesh, first, third) is None:
        odd = _differing(mesh, second, third) or odd
        text = "the first and the third of three runs agree, and theirs is kept"
    else:
        text = "three runs come to three results: operations that are not deterministic, or failing hardware"
    who = f"rank{'s' * (len(odd.ranks) > 1)} {', '.join(map(str, odd.ranks))}"
    text = f"batch {seen} came to other bits on {who} when done again, {odd.where}; {text}"
    return third.metrics, Finding("replay", seen, odd.ranks, text)


def _kept(mesh: Mesh, seen: int, memory: Path | None, on_host: Sequence[int]) -> Index:
    """The kept state of the ranks of this host that has seen so many batches."""
    index = None if memory is None else held(memory).get((seen, mesh.size))
    whole = agreement.everyones(mesh, "run", lambda: index is not None and serves(index, mesh.size, mesh.size, on_host))
    if not all(whole):
        fix = "start the ranks by torchrun or python -m fzero.run, or give fz.run(memory=DIR): else none is kept"
        what = "the state before this step was not kept"
        raise FzeroValueError("run.step", what, [f"after {seen} batches"], fix)
    assert index is not None
    return index


def _carried_out(train: CompiledStep, state: State, batch: Any) -> RanStep:
    """Takes a step and notes what this rank gives to others."""
    for x in tree.leaves(state):  # padding is nobody's: what is read back has zeros there
        _own(x, rest=True).zero_()
    lowered, run = train.built(state, batch)
    with _watching(run, lowered.program) as given:
        _, metrics = train(state, batch)
    return RanStep(metrics, given, _sums(state))


@torch.no_grad()
def _sums(state: State) -> dict[str, int]:
    """The sum of each leaf's words, by name."""
    kept = lasting(state)
    found = dict(zip(tree.names(kept), (word_sum(_own(x)) for x in tree.leaves(kept)), strict=True))
    return dict(zip(found, on_host([*found.values()]).tolist(), strict=True))


def _own(x: torch.Tensor, rest: bool = False) -> torch.Tensor:
    """The elements of a tensor of a state that are the leaf's, or the rest: the padding behind a shard."""
    known = leaf_of(x)
    if known is None or not known[0].layout.axes:
        return x.new_empty(0) if rest else x
    numel = known[0].boxes(known[1]).numel
    return x.detach().view(-1)[numel:] if rest else x.detach().view(-1)[:numel]


@torch.no_grad()
def _rewind(state: State, index: Index, mesh: Mesh) -> None:
    """Makes a state, in place, the one that hosts have kept.

    Communication: three exchanges of a small object.
    """
    kept = lasting(state)
    named = dict(tree.with_names(kept))
    wanted = {name: known[0] for name, x in named.items() if (known := leaf_of(x)) is not None}
    checkpoint.read(index, wanted, mesh, into={leaf.path: named[name] for name, leaf in wanted.items()})
    params = dict(tree.with_names(state.params))
    copies = state.extras.get("compute")
    for name, copy in tree.with_names(copies):
        storage.fill(copy, storage.cast(params[name], copy.dtype))


def _differing(mesh: Mesh, one: RanStep, other: RanStep) -> StepDifference | None:
    """The first difference between two runs of a step, the same on every rank.

    Communication: about a hundred bytes through the store.
    """
    found = {r: x for r, x in enumerate(agreement.everyones(mesh, "run", lambda: _first(one, other))) if x is not None}
    if not found:
        return None
    first = min(position for position, _ in found.values())
    ranks = tuple(rank for rank, (position, _) in found.items() if position == first)
    return StepDifference(ranks, found[ranks[0]][1])


def _first(one: RanStep, other: RanStep) -> tuple[int, str] | None:
    for i, (x, y) in enumerate(zip(_numbers(one.given), _numbers(other.given), strict=True)):
        if x != y:
            line = one.given[i][0]
            return i, f"in what is given to {line.op}({', '.join(line.args[:3])})"
    odd = [name for name, x in one.state.items() if other.state[name] != x]
    return (_AT_THE_END, f"in {', '.join(odd[:3])}{' and others' if len(odd) > 3 else ''}") if odd else None


def _numbers(given: Sequence[tuple[Line, torch.Tensor]]) -> list[int]:
    return on_host([x for _, x in given]).tolist()


@contextmanager
def _watching(run: Callable[..., Any], program: Program) -> Iterator[list[tuple[Line, torch.Tensor]]]:
    """Notes the sums of what is given to transfers between ranks in the one run of an executable in the body."""
    given: list[tuple[Line, torch.Tensor]] = []

    def sums(place: LinePlace, args: tuple[Any, ...]) -> None:
        line = place[0]
        if line.op in COLLECTIVES and line.op != "take_start":  # which is given no value
            values = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            given.append((line, torch.stack([word_sum(x) for x in values]).sum()))

    with observe(run, program, sums, lambda *_: None):
        yield given
