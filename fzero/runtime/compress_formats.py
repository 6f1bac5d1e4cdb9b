"""Records the formats that `compress("auto")` has chosen in the state, as text in its slot.

So all programs of a state, and those of a run that goes on from its checkpoint, have the same formats. An axis that is
not recorded, because it had one rank, is decided when it has more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from fzero._utils.bounded_json import parsed
from fzero.compiler.auto_compress import open_formats
from fzero.errors import FzeroValueError
from fzero.step import State, Step
from fzero.transforms.compress import SLOT, AxisFormats, Formats


def recorded(state: State) -> Formats | None:
    """The formats in a state; None if it has none.

    Raises:
        FzeroValueError: other text than `record` writes.
    """
    text = bytes(state.extras[SLOT].tolist()).strip(b"\0 ")
    try:
        return parsed(text, tuple[AxisFormats, ...]) if text else None
    except ValueError as error:
        what = "the formats that the state records cannot be read"
        fix = f"zero state.extras[{SLOT!r}], and they are chosen anew"
        raise FzeroValueError("compress", what, [str(error)], fix) from error


def record(state: State, formats: Formats) -> None:
    """Records formats in a state."""
    slot, text = state.extras[SLOT], json.dumps(formats, separators=(",", ":")).encode()
    slot.copy_(torch.frombuffer(bytearray(text.ljust(slot.numel())), dtype=torch.uint8))


class ChosenFormats:
    """The formats that `compress("auto")` has chosen for the current state of a compiled step.

    Attributes:
        formats: none for a step without it; None until the first program of a state that records none is lowered.
    """

    def __init__(self) -> None:
        self.formats: Formats | None = ()

    def read(self, step: Step, state: State) -> None:
        """Begins with the formats of another state."""
        if open_formats(step) is not None:
            self.formats = recorded(state)

    def record(self, state: State, before: Formats | None) -> None:
        """Records the formats in a state, if they are others than `before`."""
        if self.formats is not None and self.formats != before:
            record(state, self.formats)

    def add(self, formats: Iterable[AxisFormats]) -> None:
        """Adds the formats of a program. Axes that have one rank now keep theirs."""
        self.formats = tuple({x.axis: x for x in (*(self.formats or ()), *formats)}.values())
