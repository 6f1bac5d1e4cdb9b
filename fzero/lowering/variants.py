"""Keeps the programs that one base program becomes under the choices that a step leaves open, and shares work among
them.

The passes are in fzero/passes/pipeline.py. A memory budget looks at many programs (fzero/lowering/budget.py); only the
one that is taken is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fzero.layout import TIERS as TIERS_OF_LEAVES
from fzero.layout import Leaf
from fzero.lowering.budget import ENDS
from fzero.mesh import AbstractMesh
from fzero.passes import off_device
from fzero.passes.choice import Choice
from fzero.passes.pipeline import CLOSING, Pass, Sides, added, opening, sides
from fzero.passes.speculate import TIERS, num_guessable
from fzero.passes.zero import Zero
from fzero.program.ir import Program, Value, resting
from fzero.step import Step
from fzero.trace.record import uncollected
from fzero.transforms import remat
from fzero.transforms.base import find
from fzero.transforms.once_a_step import OnceAStep

RECENT = 4
"""Programs whose programs on the way are kept: one of the last that a search looks at is the one it takes."""


class Variants:
    """The finished program of each choice.

    Attributes:
        base: what all are made from.
        open_side: whether it is open on which side what rests off the device is updated.

    Args:
        base: a base program that trains.
        zero: what its parallel transforms ask for.
        num_micro: micro-batches.
        batch: the shape on this rank of each batch input that is cut into micro-batches, by name.
        gradients: leaves for gradients that wait on disk, by the path of the parameter.
    """

    def __init__(
        self,
        base: Program,
        zero: Zero,
        num_micro: int,
        batch: Mapping[str, tuple[int, ...]],
        gradients: Mapping[str, Leaf],
    ):
        self._opening = (*opening(zero, num_micro, batch), *added(base))
        # with the program before, which keys know by the identity of its lines
        self._shared: dict[Any, tuple[Program, Program]] = {}
        self._begin(base, gradients)

    def _begin(self, base: Program, gradients: Mapping[str, Leaf]) -> None:
        self.base, self._gradients = base, gradients
        # by the identity of lines, which of a program's gradients wait on disk
        self._waiting: dict[int, dict[str, str]] = {}
        self._own: dict[Any, Program] = {}  # as in `_shared`, with this base's leaves
        self._finished: dict[Any, Program] = {}
        self._recent: dict[Any, list[tuple[Pass, Program]]] = {}  # of what was finished last, every program on the way
        self._lists: dict[Choice, list[tuple[Pass, Program]]] = {}
        self.open_side = off_device.leaves_side_open(base)

    def like(self, base: Program, gradients: Mapping[str, Leaf]) -> Variants:
        """Those of another base program with the same blocks: what comes to the same is worked out once for all of
        them."""
        out = Variants.__new__(Variants)
        out._opening, out._shared = self._opening, self._shared
        out._begin(base, gradients)
        return out

    def guesses(self, least: Choice) -> list[Choice]:
        """A choice with updates on a guess for each set of tiers by which more of them can be."""
        off = {leaf.layout.tier for leaf in self.base.leaves.values()} - {"device"}
        counts = [0, *(num_guessable(self.cut(least), tiers) if off else 0 for tiers in TIERS)]
        return [
            replace(least, guess=tiers)
            for tiers, fewer, more in zip(TIERS, counts, counts[1:], strict=False)
            if more > fewer
        ]

    def grads(self, least: Choice) -> list[str]:
        """The gradients of a choice that may wait on the host, what comes to the same once: with the last they take
        least of the device's memory."""
        program, found = self.cut(least), dict[Any, str]()
        for grads in off_device.GRADS:
            waiting = tuple(
                sides(program, replace(least, host_share=share, grads=grads), self._on_disk(least)).waiting
                for share in ENDS
            )
            if waiting not in found or grads == "update":
                found[waiting] = grads
        return list(found.values())

    def __call__(self, choice: Choice) -> Program:
        """The program of a choice, not verified: the same object for choices that come to the same."""
        key = self._key(choice)
        if key not in self._finished:
            *_, _ = self.stages(choice)
        return self._finished[key]

    def cut(self, choice: Choice) -> Program:
        """The program of a choice before copies between tiers are placed: in the order of its lines."""
        return self._opened(choice)[-1][1]

    def stages(self, choice: Choice) -> Iterator[tuple[Pass, Program]]:
        """The program of a choice after every pass."""
        yield from self._opened(choice)
        key = self._key(choice)
        if key in self._recent:
            yield from self._recent[key]
            return
        made: list[tuple[Pass, Program]] = []
        for passed, program in closed(_with_leaves(self.cut(choice), self._gradients), key[1]):
            made.append((passed, self._finished.setdefault(key, program) if passed is CLOSING[-1] else program))
            yield made[-1]
        self._recent[key] = made
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]

    def _key(self, choice: Choice) -> tuple[int, Sides]:
        cut = self.cut(choice)
        return id(cut.lines), sides(cut, choice, self._on_disk(choice))

    def _on_disk(self, choice: Choice) -> dict[str, str]:
        """The gradients of a choice that wait on disk, each with its leaf."""
        if not self._gradients:
            return {}
        made = {passed.name: program for passed, program in self._opened(choice)}
        whole, cut = made["shard"], self.cut(choice)
        if id(cut.lines) not in self._waiting:
            assert whole.update is not None
            names = whole.update.attrs.grads
            waiting = off_device.gradients_that_wait(cut)
            self._waiting[id(cut.lines)] = {
                names[param]: leaf.path for param, leaf in self._gradients.items() if names.get(param) in waiting
            }
        return self._waiting[id(cut.lines)]

    def verified(self, choice: Choice) -> Program:
        """The program of a choice, verified after every pass."""
        with uncollected():
            return verified(self.base, self.stages(choice))

    def _opened(self, choice: Choice) -> list[tuple[Pass, Program]]:
        """The passes up to the cut of the update, each with the program that it made."""
        if choice in self._lists:
            return self._lists[choice]
        program, made = self.base, list[tuple[Pass, Program]]()
        for number, passed in enumerate(self._opening):
            key = number, id(program.lines), self._present(), passed.key(program, choice)
            if key not in self._shared:
                self._shared[key] = program, passed.rewrite(program, choice)
            found = self._shared[key][1]
            if found.leaves is not self.base.leaves and key not in self._own:
                self._own[key] = replace(found, leaves=self.base.leaves, transforms=self.base.transforms)
            program = self._own.get(key, found)
            made.append((passed, program))
        self._lists[choice] = made
        return made

    def _present(self) -> tuple[int, ...]:
        """For each leaf which of the tiers that there are it is on: an update is cut alike whichever tiers those
        are."""
        numbers = [TIERS_OF_LEAVES.index(leaf.layout.tier) for leaf in self.base.leaves.values()]
        present = sorted({*numbers})
        return tuple(map(present.index, numbers))


def _with_leaves(program: Program, gradients: Mapping[str, Leaf]) -> Program:
    """The program with the leaves that gradients wait in among its inputs."""
    if not gradients:
        return program
    leaves = {leaf.path: leaf for leaf in gradients.values()}
    values = (Value(x.path, x.shape, x.dtype, resting(x.layout)) for x in leaves.values())
    return replace(program, inputs=(*program.inputs, *values), leaves={**program.leaves, **leaves})


def verified(program: Program, stages: Iterable[tuple[Pass, Program]]) -> Program:
    """The last program of these stages, which begin with a verified one, each verified if it is another than the one
    before.

    Raises:
        VerifyError: naming the pass.
    """
    for passed, made in stages:
        if made is not program or passed.check is not None:
            passed.verified(made)
        program = made
    return program


def closed(program: Program, chosen: Sides | None = None) -> Iterator[tuple[Pass, Program]]:
    """The programs that one whose update is cut becomes, after every pass."""
    for passed in CLOSING:
        program = passed.rewrite(program, chosen or Sides())
        yield passed, program


def first_choice(step: Step, mesh: AbstractMesh, limited: bool) -> tuple[Choice, bool]:
    """The choice that takes least memory, and whether what blocks keep is open. `limited`: there is a budget of it;
    without one, and where a line is a launch, a choice with few of them instead."""
    policy = (find(step.transforms, remat.Remat) or remat.Remat()).policy
    auto = policy == "auto"
    once = find(step.transforms, OnceAStep)
    stay = 0.0 if once is None else once.least if limited else once.most
    choice = Choice(0.0 if auto and limited else policy, stay=stay)
    return (choice if limited or mesh.device_type == "cpu" else few_launches(choice)), auto


def few_launches(choice: Choice) -> Choice:
    """The choice with fewer launches over micro-batches, which takes the memory of shards in the dtype of compute, and
    of one block's gradients."""
    return replace(choice, cast_once=True, order=replace(choice.order, joined_sums=2))
