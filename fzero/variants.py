"""The programs that one base program becomes under the choices that a step leaves open, and what they share, worked out once.

    base -- remat --> -- accumulate --> -- spread --> -- cut the update --> -- tiers --> -- order --> -- place in the pool -->

A memory budget looks at many of them (fzero/budget.py). Only the one that is taken is verified: after every arrow, and its pool at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fzero.budget import ENDS, Choice
from fzero.layout import TIERS as TIERS_OF_LEAVES
from fzero.layout import Leaf
from fzero.program.early import early
from fzero.program.guess import TIERS, guess, num_guessable
from fzero.program.ir import WHOLE, Placement, Program, Value
from fzero.program.names import apart
from fzero.program.record import uncollected
from fzero.program.splice import cut_as
from fzero.program.split import Choices
from fzero.program.update import cut_update
from fzero.program.verify import verify
from fzero.schedule import buffers
from fzero.schedule.check import check
from fzero.schedule.order import Order, order
from fzero.transforms import accumulate, remat, spread, tiers
from fzero.transforms.shard import Zero


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

    def __init__(self, base: Program, zero: Zero, num_micro: int, batch: Mapping[str, tuple[int, ...]], gradients: Mapping[str, Leaf]):
        self.base, self._zero, self._num_micro, self._batch, self._gradients = base, zero, num_micro, batch, gradients
        self._blocks: dict[Any, Choices] = {}
        self._looped: dict[Any, tuple[Program, Program]] = {}
        self._spread: dict[Any, tuple[Program, Program]] = {}
        self._finished: dict[Any, Program] = {}
        self._cut: dict[Any, tuple[Program, ...]] = {}
        self._shared: dict[Any, tuple[Program, tuple[Program, ...]]] = {}  # with the base of each, whose lines must stay what they are
        self.open_side = tiers.leaves_side_open(base)

    def guesses(self, least: Choice) -> list[Choice]:
        """A choice with updates on a guess for each set of tiers by which more of them can be."""
        off = {leaf.layout.tier for leaf in self.base.leaves.values()} - {"device"}
        counts = [0, *(num_guessable(self._stages(least)[-1], tiers) if off else 0 for tiers in TIERS)]
        return [replace(least, guess=tiers) for tiers, fewer, more in zip(TIERS, counts, counts[1:], strict=False) if more > fewer]

    def grads(self, least: Choice) -> list[str]:
        """Which gradients of a choice may wait on the host, what comes to the same once: with the last they take least of the device's memory."""
        program, on_disk, found = self._stages(least)[-1], self._on_disk(least), dict[Any, str]()
        for grads in tiers.GRADS:
            waiting = [tiers.waiting_on_host(program, tiers.updated_on_device(program, share), grads).difference(on_disk) for share in ENDS]
            if tuple(waiting) not in found or grads == "update":
                found[tuple(waiting)] = grads
        return list(found.values())

    def like(self, base: Program, gradients: Mapping[str, Leaf]) -> Variants:
        """Those of another base program with the same blocks: what comes to the same is worked out once for all of them."""
        out = Variants(base, self._zero, self._num_micro, self._batch, gradients)
        out._blocks, out._shared = self._blocks, self._shared
        return out

    def __call__(self, choice: Choice) -> Program:
        """The program of a choice, not verified: the same object for choices that come to the same."""
        program, on_disk = self._stages(choice)[-1], self._on_disk(choice)
        on_device = tiers.updated_on_device(program, choice.host_share)
        waiting = tiers.waiting_on_host(program, on_device, choice.grads).difference(on_disk)
        key = (*self._key(choice), choice.order, on_device, waiting, choice.guess)
        if key not in self._finished:
            self._finished[key] = finished(_with_leaves(program, self._gradients), choice.order, on_device, choice.guess, waiting, on_disk)
        return self._finished[key]

    def _on_disk(self, choice: Choice) -> dict[str, str]:
        """The gradients of a choice that wait on disk, each with its leaf."""
        if not self._gradients:
            return {}
        *_, whole, cut = self._stages(choice)
        names = next(line.attrs["grads"] for line in whole.lines if line.op == "update")
        waiting = tiers.gradients_that_wait(cut)
        return {names[param]: leaf.path for param, leaf in self._gradients.items() if names.get(param) in waiting}

    def cut(self, choice: Choice) -> Program:
        """The program of a choice before copies between tiers are placed: in the order of its lines."""
        return self._stages(choice)[-1]

    def verified(self, choice: Choice) -> Program:
        """The program of a choice, with each that it came from verified."""
        with uncollected():
            for program in self._stages(choice):
                verify(program)
            return check(verify(self(choice)))

    def _key(self, choice: Choice) -> tuple[Any, bool]:
        return remat.kept(self.base, choice.remat, self._blocks), choice.whole_grads

    def _stages(self, choice: Choice) -> tuple[Program, ...]:
        key = self._key(choice)
        if key not in self._cut:
            shared = (id(self.base.lines), self._apart(), key)
            if shared not in self._shared:
                self._shared[shared] = self.base, self._made(choice)
            leaves = {"leaves": self.base.leaves, "transforms": self.base.transforms}
            self._cut[key] = tuple(program if program.leaves is self.base.leaves else replace(program, **leaves) for program in self._shared[shared][1])
        return self._cut[key]

    def _made(self, choice: Choice) -> tuple[Program, ...]:
        kept, whole = key = self._key(choice)
        if kept not in self._looped:
            program = remat.rewrite(self.base, choice.remat, self._blocks)
            self._looped[kept] = program, accumulate.rewrite(program, self._num_micro, self._batch)
        if key not in self._spread:
            program = spread.rewrite(self._looped[kept][1], self._zero, whole)
            before = next(iter(self._spread.values()), None)
            self._spread[key] = program, (before and cut_as(program, *before)) or cut_update(program)
        return *self._looped[kept], *self._spread[key]

    def _apart(self) -> tuple[int, ...]:
        """For each leaf which of the tiers that there are it is on: an update is cut alike whichever tiers those are."""
        numbers = [TIERS_OF_LEAVES.index(leaf.layout.tier) for leaf in self.base.leaves.values()]
        present = sorted({*numbers})
        return tuple(map(present.index, numbers))


def _with_leaves(program: Program, gradients: Mapping[str, Leaf]) -> Program:
    """The program with the leaves that gradients wait in among its inputs."""
    leaves = {leaf.path: leaf for leaf in gradients.values()}
    values = (Value(x.path, x.shape, x.dtype, Placement("shard", x.layout.axes) if x.layout.axes else WHOLE) for x in leaves.values())
    return replace(program, inputs=(*program.inputs, *values), leaves={**program.leaves, **leaves})


def finished(
    program: Program,
    choice: Order,
    on_device: frozenset[str] = frozenset(),
    guesses: Sequence[str] = (),
    waiting: frozenset[str] = frozenset(),
    on_disk: Mapping[str, str] | None = None,
) -> Program:
    """A program whose update is cut, that of leaves on some tiers on a guess, put in order, with its places in the pool."""
    return buffers.place(apart(order(tiers.rewrite(early(guess(program, guesses)), on_device, waiting, on_disk), choice)))
