"""Does a step again, from the state that was kept before it, and says which rank came to something else.

A step is a function of a state and a batch: with deterministic operations it comes to the same bits every time. While
one runs the sums of what this rank gives to other ranks are noted, line by line; so the first rank whose notes of two
runs differ, not one that has only heard of it, is the one that erred.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero import checkpoint, tree
from fzero.checkpoint.index import Index
from fzero.comm.replicas import word_sum
from fzero.elastic.vault import on_host
from fzero.layout import leaf_of
from fzero.lowering.layouts import zero_of
from fzero.mesh import Mesh
from fzero.program.ir import Line, Program
from fzero.program.ops import COLLECTIVES
from fzero.program.ops.transfers import AllReduce, ReduceScatter
from fzero.ranks import agreement
from fzero.ranks.notes import gathered_tensors
from fzero.runtime.observe import Follower
from fzero.runtime.training import CompiledStep
from fzero.state import storage
from fzero.step import State, lasting

_REDUCTIONS = (ReduceScatter.name, AllReduce.name)
_AT_THE_END = 1 << 40  # a position behind all lines


@dataclass
class Ran:
    """A run of a step: its metrics, the sums of what this rank gave to each transfer, in their order, and of each leaf
    of the state behind it."""

    metrics: dict[str, Any]
    given: list[tuple[Line, torch.Tensor]]
    state: dict[str, int] = field(default_factory=dict)


class Difference(NamedTuple):
    """The place where two runs differ first, and the ranks on which they do."""

    ranks: tuple[int, ...]
    where: str


def carried_out(train: CompiledStep, state: State, batch: Any, shift: int = 0) -> Ran:
    """Takes a step and notes what this rank gives to others. `shift`: the batch is that of the rank so many places
    further on, and so are the draws."""
    for x in tree.leaves(state):  # padding is nobody's: what is read back has zeros there
        _own(x, rest=True).zero_()
    lowered, run = train.built(state, batch)
    axes = batch_axes(train)
    here, size = train.mesh.index(axes), train.mesh.axis_size(axes)
    with _watching(run, lowered.program, (here + shift) % size - here) as given:
        _, metrics = train(state, batch)
    return Ran(metrics, given)


@torch.no_grad()
def sums(state: State) -> dict[str, int]:
    """The sum of each leaf's words, by name."""
    kept = lasting(state)
    found = dict(zip(tree.names(kept), (word_sum(_own(x)) for x in tree.leaves(kept)), strict=True))
    return dict(zip(found, on_host([*found.values()]).tolist(), strict=True))


@torch.no_grad()
def words(batch: Any) -> list[torch.Tensor]:
    """The sums of a batch's words, each where its tensor is."""
    return [word_sum(x) for x in tree.leaves(batch) if isinstance(x, torch.Tensor)]


def _own(x: torch.Tensor, rest: bool = False) -> torch.Tensor:
    """The elements of a tensor of a state that are the leaf's, or the rest: the padding behind a shard."""
    known = leaf_of(x)
    if known is None or not known[0].layout.axes:
        return x.new_empty(0) if rest else x
    numel = known[0].boxes(known[1]).numel
    return x.detach().view(-1)[numel:] if rest else x.detach().view(-1)[:numel]


@torch.no_grad()
def rewind(state: State, index: Index, mesh: Mesh) -> None:
    """Makes a state, in place, the one that hosts have kept.

    Communication: three exchanges of a small object.
    """
    kept = lasting(state)
    named = dict(zip(tree.names(kept), tree.leaves(kept), strict=True))
    wanted = {name: known[0] for name, x in named.items() if (known := leaf_of(x)) is not None}
    checkpoint.read(index, wanted, mesh, into={leaf.path: named[name] for name, leaf in wanted.items()})
    params = dict(zip(tree.names(state.params), tree.leaves(state.params), strict=True))
    copies = state.extras.get("compute")
    for name, copy in zip(tree.names(copies), tree.leaves(copies), strict=True):
        storage.fill(copy, storage.cast(params[name], copy.dtype))


def differing(mesh: Mesh, one: Ran, other: Ran) -> Difference | None:
    """The first difference between two runs of a step, the same on every rank.

    Communication: about a hundred bytes through the store.
    """
    found = {r: x for r, x in enumerate(agreement.everyones(mesh, "run", lambda: _first(one, other))) if x is not None}
    if not found:
        return None
    first = min(position for position, _ in found.values())
    ranks = tuple(rank for rank, (position, _) in found.items() if position == first)
    return Difference(ranks, found[ranks[0]][1])


def _first(one: Ran, other: Ran) -> tuple[int, str] | None:
    pairs = zip(_numbers(one.given), _numbers(other.given), strict=False)  # a run that nobody watched has none
    for i, (x, y) in enumerate(pairs):
        if x != y:
            line = one.given[i][0]
            return i, f"in what is given to {line.op}({', '.join(line.args[:3])})"
    odd = [name for name, x in one.state.items() if other.state[name] != x]
    return (_AT_THE_END, f"in {', '.join(odd[:3])}{' and others' if len(odd) > 3 else ''}") if odd else None


def _numbers(given: Sequence[tuple[Line, torch.Tensor]]) -> list[int]:
    return on_host([x for _, x in given]).tolist()


def neighbours(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """For each rank the one whose part of the batch, which is divided along these axes, comes after its own."""
    size = mesh.axis_size(axes)
    here = [Mesh(dict(mesh.axes), rank, torch.device("cpu")) for rank in range(mesh.size)]
    places = [(x.index(axes), tuple(i for a, i in x.coordinate.items() if a not in axes)) for x in here]
    return [places.index(((index + 1) % size, rest)) for index, rest in places]


def erring(train: CompiledStep, first: Ran, turned: Ran) -> Difference | None:
    """The ranks that can have erred, where some gradients are not those that another rank made of the same batch.

    Args:
        first: with each rank's own batch.
        turned: with that of its neighbour.
    """
    mesh, own = train.mesh, _first_hand(train.program)

    def digest(ran: Ran) -> str:
        given = [(line, x) for line, x in ran.given if id(line) in own]
        return hashlib.sha256(repr(_numbers(given)).encode()).hexdigest()[:16]

    notes = agreement.everyones(mesh, "run", lambda: [digest(first), digest(turned)])
    pairs = [
        {rank, other}
        for rank, other in enumerate(neighbours(mesh, batch_axes(train)))
        if notes[rank][1] != notes[other][0]
    ]
    if not pairs:
        return None
    ranks = set.intersection(*pairs) or set.union(*pairs)
    return Difference(tuple(sorted(ranks)), "in the gradients that another rank makes of the same batch")


def _first_hand(program: Program) -> set[int]:
    """The reductions of what follows from the state and the batch alone, by identity: not from what was reduced."""
    reduced: set[str] = set()
    found: set[int] = set()
    for line, _ in program.walk():
        is_late = not reduced.isdisjoint(line.args)
        if line.op in _REDUCTIONS and not is_late:
            found.add(id(line))
        if is_late or line.op in _REDUCTIONS:
            reduced.update((v.name for v in line.out), line.writes)
    return found


def turned_batch(train: CompiledStep, batch: Any) -> Any:
    """The batch of this rank's neighbour. Memory: the batches of all ranks, on the host."""
    mesh = train.mesh
    if mesh.size == 1:
        return batch
    flat, structure = tree.flatten(batch)
    other = gathered_tensors({str(i): x for i, x in enumerate(flat)})[neighbours(mesh, batch_axes(train))[mesh.rank]]
    return tree.unflatten(structure, [other[str(i)].to(x.device) for i, x in enumerate(flat)])


def batch_axes(train: CompiledStep) -> tuple[str, ...]:
    return zero_of(train.resolved, train.mesh).batch_axes


@contextmanager
def _watching(run: Callable[..., Any], program: Program, further: int) -> Iterator[list[tuple[Line, torch.Tensor]]]:
    """Notes the sums of what is given to transfers between ranks in the one run of an executable in the body."""
    namespace: dict[str, Any] = run.namespace  # type: ignore[attr-defined]
    before: Mapping[str, Callable[..., Any]] = {
        name: namespace[name] for name in {line.fn or line.op for line, _ in program.walk() if not line.body}
    }
    following = Follower(program, run.guessing)  # type: ignore[attr-defined]
    given: list[tuple[Line, torch.Tensor]] = []

    def watched(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = following.called(name)
            if place[0].op in COLLECTIVES:
                given.append((place[0], torch.stack([word_sum(x) for x in args[0]]).sum()))
            result = fn(*args, **kwargs)
            following.returned(place, result)
            return result

        def part_index(micro: int = 0, count: int = 1) -> torch.Tensor:
            return call(micro, count) + further * count

        return part_index if name == "part_index" else call

    namespace.update({name: watched(name, fn) for name, fn in before.items()})
    try:
        yield given
    finally:
        namespace.update(before)
