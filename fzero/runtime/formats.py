"""Decides anew, every so many steps, in which formats parameters and gradients travel (`compress("auto", every=)`).

[Note: decisions] Before the first step, and then every `every` steps, all ranks measure the links along each axis
together. The first rank plans the programs of all formats with its rates, and tells the others what to take. Formats
change at the beginning of a step, on all ranks at once, if two decisions in a row are for the same others. A slot of
the state has the decisions as text, each with the number of steps taken before it. So checkpoints have them, and
whoever goes on with a state has its formats; one rank alone decides nothing and keeps them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from fzero.errors import FzeroValueError, message
from fzero.lowering.budget import Decided
from fzero.measure.probes import LinkProbes
from fzero.mesh import Mesh
from fzero.passes.choice import Choice
from fzero.plan.rates import Link, along
from fzero.ranks import agreement
from fzero.read_json import parsed
from fzero.runtime.between_steps import BetweenSteps
from fzero.step import State
from fzero.transforms.compress import SLOT, AxisFormats, Compress, Formats

logger = logging.getLogger("fzero")


class FormatsOfRun(BetweenSteps):
    """The formats of a run, which may change between steps: see [Note: decisions].

    Args:
        mesh: of the run.
        spec: with `every`.
        would_choose: takes links as they were measured, and returns how the plan would choose with them; None while
            there is no program.

    Attributes:
        history: the decisions that changed them, each with the number of steps taken before it.
        decided: the formats now, and why; None: lowering the first program decides.
    """

    def __init__(
        self, mesh: Mesh, spec: Compress, would_choose: Callable[[Mapping[str, Link]], Callable[[], Choice] | None]
    ):
        assert spec.every is not None
        self._would_choose = would_choose
        self._mesh, self._every, self._given = mesh, spec.every, spec.decisions
        self.history: list[tuple[int, Formats]] = []
        self.decided: Decided | None = None
        self._pending: Formats | None = None
        self._taken, self._last = 0, -1  # steps, and at the last decision
        self._probes: LinkProbes | None = None

    def before(self, state: State, is_new: bool) -> bool:
        if is_new:
            self._begin(state)
        return self._decide(state, self._would_choose(self._links() if self._measures else {}))

    def lowered(self, choice: Choice, state: State) -> None:
        if self.decided is None:  # of the first program lowering decides
            if choice.wire:
                self._change(state, choice.wire, choice.wire_because)
            else:  # one rank: no decision for the state to have
                self.decided = Decided((), ())
            self._last = self._taken

    def after(self, state: State) -> dict[str, torch.Tensor]:
        self._taken += 1
        return {}

    @property
    def _measures(self) -> bool:
        """Whether links are measured now: where the next step has a decision, unless all are given."""
        return not self._given and self._last != self._taken and (self.decided is None or self._is_due)

    @property
    def _is_due(self) -> bool:
        return self._taken > 0 and self._taken % self._every == 0

    def _begin(self, state: State) -> None:
        """Goes on with a state that no step of this process has begun with."""
        self._taken, self._last, self._pending = int(state.step), -1, None
        self.history = _read(state)
        self.decided = Decided(self.history[-1][1], "as in the state") if self.history else None

    def _links(self) -> dict[str, Link]:
        """The links along each axis, as the first rank has measured them, by their names among `Device.links`. All
        ranks call this."""
        self._probes = self._probes or LinkProbes(self._mesh)
        with agreement.unbroken(self._mesh):
            found = self._probes.measured()
        told = agreement.from_first(self._mesh, "compress", lambda: {a: [*vars(x).values()] for a, x in found.items()})
        return {along(axis): Link(*rates) for axis, rates in told.items()}

    def _decide(self, state: State, choose: Callable[[], Choice] | None) -> bool:
        """Whether formats change before the next step.

        Args:
            state: that the step is taken with.
            choose: what the plan would choose now; None: there is no program yet.
        """
        if self._given:
            now = [formats for step, formats in self._given if step <= self._taken]
            return bool(now) and self._change(state, now[-1], "as given")
        if choose is None or self._last == self._taken or not self._is_due:
            return False
        self._last = self._taken

        def told() -> list[list[str | None]]:
            choice = choose()
            return [[*x, why] for x, why in zip(choice.wire, choice.wire_because, strict=True)]

        said = agreement.from_first(self._mesh, "compress", told)
        now = () if self.decided is None else self.decided.formats
        # nothing is chosen for an axis of one rank, which keeps its formats: the run may have more ranks again
        found = {x.axis: (x, "one rank along it") for x in now}
        found |= {axis: (AxisFormats(axis, *formats), reason) for axis, *formats, reason in said}
        formats, why = tuple(x for x, _ in found.values()), [reason for _, reason in found.values()]
        before, self._pending = self._pending, formats if formats != now else None
        return self._pending is not None and formats == before and self._change(state, formats, why)

    def _change(self, state: State, formats: Formats, why: str | Sequence[str]) -> bool:
        before = None if self.decided is None else self.decided.formats
        if formats == before:
            return False
        self.decided, self._pending = Decided(formats, why), None
        self.history.append((self._taken, formats))
        self._write(state)
        if self._mesh.rank == 0:
            reasons = [why] * len(formats) if isinstance(why, str) else why
            said = [f"{x.axis}: {x}, {reason}" for x, reason in zip(formats, reasons, strict=True)]
            what = f"formats on the wire from step {self._taken} on"
            fix = "nothing to do; fz.compress('auto', every=, decisions=train.formats) repeats it"
            logger.log(logging.INFO if before is None else logging.WARNING, message("compress", what, said, fix))
        return True

    def _write(self, state: State) -> None:
        """Puts the decisions into the state: as many of the last as its slot has room for."""
        slot, kept = state.extras[SLOT], self.history
        while len(text := json.dumps(kept, separators=(",", ":")).encode()) > slot.numel():
            kept = kept[1:]
        slot.copy_(torch.frombuffer(bytearray(text.ljust(slot.numel())), dtype=torch.uint8))


def _read(state: State) -> list[tuple[int, Formats]]:
    """The decisions in a state.

    Raises:
        FzeroValueError: other text than this module writes.
    """
    text = bytes(state.extras[SLOT].tolist()).strip(b"\0 ")
    try:
        return parsed(text or b"[]", list[tuple[int, tuple[AxisFormats, ...]]])
    except ValueError as error:
        what, fix = "the state has no decisions that can be read", f"zero state.extras[{SLOT!r}], and they begin anew"
        raise FzeroValueError("compress", what, [str(error)], fix) from error
