"""Defines the op `rollback`, and answers questions of the rest of the package about speculative ops.

The pass fzero/transforms/speculate_pass.py makes ops speculative. They compute with assumed values of scalars that are
not known yet. Once the scalars are known, a `rollback` compares them with the assumed values and repeats the same
updates if they differ. Plans assume that it does not have to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fzero.ir.attributes import AssignAttrs, LoopAttrs
from fzero.ir.ops.op import Op, Rules, Running, Text
from fzero.ir.ops.transfers import DISK, STARTS, Wait
from fzero.ir.program import Instruction, Program, Value
from fzero.sharding.placements import REPLICATED


class Rollback(Op[LoopAttrs]):
    """Compares scalars with the values that speculative ops (those with `speculative`) assumed, and runs its body if
    they differ.
    """

    name = "rollback"
    words = ("speculative",)
    out = 0
    attrs = LoopAttrs
    computes = ""
    uncaptured = "waits for the device, to see whether a speculative update was right"

    def check(self, op: Instruction[LoopAttrs], args: list[Value], rules: Rules) -> None:
        """Checks a `rollback` and undoes the effects of the speculative ops before it on the verifier's state.

        The body of a `rollback` reads tensors of the state as they were. A tensor on disk that was written
        speculatively still has its old value. For other tensors the old values are restored by ops that are inserted
        together with the copies between tiers; until then every tensor is assumed to be on the device.
        """
        if op.attrs.count or not op.body or len(args) % 2 or not args:
            rules.bad(op, f"repeats {len(op.body)} lines {op.attrs.count} times, by {len(args)} scalars")
        leaves = rules.program.leaves
        speculated = _written_before(op, rules.program)
        on_disk = {w for w in speculated if leaves[w].layout.tier == "disk"}
        # copies in the compute dtype are written and never read by an update
        computed = {w for w in speculated if leaves[w].role == "compute"}
        placed = all(rules.known[name].tier == leaf.layout.tier for name, leaf in leaves.items())
        # The body reads the old values again. Once values are placed, only tensors on disk still have them; tensors in
        # memory are restored by the body before it reads them, and no update reads compute copies.
        rules.overwritten -= on_disk | computed if placed else speculated
        rules.written -= speculated
        for handle in (h for h, start in rules.started.items() if start.speculative):
            rules.bad(op, f"{handle}, which is speculative, has not been waited for")
        for pair in zip(*_compared(op), strict=False):
            one, other = map(rules.known.get, pair)
            if not _comparable(one, other):
                rules.bad(op, f"compares {one} with {other}")
        for x in op.body:
            if x.op in STARTS and not x.tiers:
                rules.bad(x, "ranks communicate inside a rollback, which may not run")

    def check_program(self, program: Program) -> Iterable[str]:
        speculated, again = set[str](), set[str]()
        for op, _ in program.walk():
            speculated |= _written_speculatively(op, program)
            if op.op == self.name:
                # Everything that may have been computed from wrong values must be written again by the body.
                again = {w for inner in op.with_body() if not _restores(inner) for w in inner.writes}
        return [f"{name} was written speculatively, and is not written again" for name in sorted(speculated - again)]

    def iterations(self, op: Instruction[LoopAttrs]) -> int:
        return 1

    def iterations_run(self, op: Instruction[LoopAttrs], result: Any) -> int:
        return int(result is True)

    def text(self, op: Instruction[LoopAttrs], program: Program) -> Text:
        scalars, assumed = _compared(op)
        return Text(
            f"if rollback([{', '.join(scalars)}], [{', '.join(assumed)}]):", "only if the assumed values were wrong"
        )

    def names(self, on: Running) -> Mapping[str, Any]:
        return {self.name: on.attempt.rollback, "speculative": on.attempt.of}


def _comparable(one: Value | None, other: Value | None) -> bool:
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return one.placement == other.placement == REPLICATED


def _compared(op: Instruction) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the operands that a `rollback` compares: the scalars, and the values assumed for them."""
    half = len(op.args) // 2
    return op.args[:half], op.args[half:]


def _restores(op: Instruction) -> bool:
    return isinstance(op.attrs, AssignAttrs) and op.attrs.restores


def _written_speculatively(op: Instruction, program: Program) -> set[str]:
    """Returns the tensors of the state that an op writes speculatively."""
    return {w for w in op.writes if w in program.leaves} if op.speculative and not _restores(op) else set()


def _written_before(rollback: Instruction, program: Program) -> set[str]:
    found = set[str]()
    for op, _ in program.walk():
        if op is rollback:
            break
        found |= _written_speculatively(op, program)
    return found


def written_aside(program: Program) -> list[str]:
    """Returns the tensors on disk whose next value a program writes next to the old one, in the order of its ops.
    Each of these has two extents.
    """
    return [w for op, _ in program.walk() if op.speculative and DISK in op.tiers for w in op.writes]


def is_superseded(ops: Iterable[Instruction]) -> Callable[[Instruction], bool]:
    """Returns a predicate for ops that ran: whether an op ran in vain if a `rollback` ran its body."""
    started = {x.out[0].name for x in ops if x.speculative and x.op in STARTS}
    return lambda op: op.speculative or (op.op == Wait.name and op.args[0] in started)


class Attempt:
    """The speculative part of the running step. A step speculates if the assumed values of the step before were right,
    or would have been right.

    Args:
        tiers: the copies between memory tiers of the program (fzero/memory/tier_copies.py).
        right: whether the assumed values of the step before the first were right.
    """

    def __init__(self, tiers: Any, right: bool = False):
        self._tiers = tiers
        self._made = False  # in this step
        self._right = right  # whether the last step's assumed values were right, or would have been
        self._aside: list[torch.Tensor] = []  # tensors whose spare extents have been written since the step began

    def begin(self, able: bool) -> None:
        """Prepares for a step; called before it runs. `able`: whether every tensor that the step writes to a spare
        extent has one.
        """
        self._made, self._aside = able and self._right, []

    def skips(self, op: Instruction) -> bool:
        """Returns whether the running step does not run an op at all."""
        return op.speculative and op.op not in STARTS and not self._made

    def of(self, function: Callable[..., object]) -> Callable[..., object]:
        """Returns the function itself, which then runs speculatively, or a function that does nothing if this step
        does not speculate.
        """
        return function if self._made else _nothing

    def on_disk(self, start: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        """Returns a transfer to or from a disk that may be speculative. Speculative writes go to spare extents."""

        def started(values: Sequence[torch.Tensor], into: Sequence[torch.Tensor], speculative: bool = False) -> Any:
            if not speculative:
                return start(values, into)
            if not self._made:
                return self._tiers.nothing
            if not writes:
                return start(values, into)
            self._aside += into
            return start(values, into, aside=True)

        return started

    def rollback(self, scalars: Sequence[torch.Tensor], assumed: Sequence[torch.Tensor]) -> bool:
        """Returns whether the speculative work must be repeated. If not, the speculative writes become the actual
        values. The next step speculates if these values were right.
        """
        self._right = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(scalars, assumed, strict=True))
        # If this step did not speculate, none of the speculative updates has run, and the body must
        # run even if the assumed values are right.
        counts = self._right and self._made
        if counts:
            self._tiers.take_spare(self._aside)
        self._aside = []
        return not counts


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Returns a scalar's bytes, for comparison: two NaNs may be equal, and zeros of different sign are not."""
    return x.reshape(-1).view(torch.uint8)


ROWS: Sequence[Op[Any]] = (Rollback(),)
