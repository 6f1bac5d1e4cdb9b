"""Records in the state the formats that `compress("auto")` has chosen, as text in its slot.

Therefore all programs of a state, and those of a run that continues from its checkpoint, use the same formats. The
format of an axis that is not recorded, because the axis had only one rank, is chosen when the axis has more ranks.
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
    """Returns the formats recorded in a state; None if it has none.

    Raises:
        FzeroValueError: the slot contains text that `record` did not write.
    """
    text = bytes(state.extras[SLOT].tolist()).strip(b"\0 ")
    try:
        return parsed(text, tuple[AxisFormats, ...]) if text else None
    except ValueError as error:
        what = "the formats that the state records cannot be read"
        fix = f"zero state.extras[{SLOT!r}], and they are chosen again"
        raise FzeroValueError("compress", what, [str(error)], fix) from error


def record(state: State, formats: Formats) -> None:
    """Records formats in a state."""
    slot, text = state.extras[SLOT], json.dumps(formats, separators=(",", ":")).encode()
    # The slot has a fixed size, because it is a tensor of the state. Spaces pad the text; the zeros of a new state mean
    # that nothing is recorded.
    slot.copy_(torch.frombuffer(bytearray(text.ljust(slot.numel())), dtype=torch.uint8))


class ChosenFormats:
    """The formats that `compress("auto")` has chosen for the current state of a compiled step.

    Attributes:
        formats: empty for a step without `compress("auto")`; None until the first program is lowered for a state that
            records none.
    """

    def __init__(self) -> None:
        self.formats: Formats | None = ()

    def read(self, step: Step, state: State) -> None:
        """Takes over the formats of another state."""
        if open_formats(step) is not None:
            self.formats = recorded(state)

    def record(self, state: State, before: Formats | None) -> None:
        """Records the formats in a state if they differ from `before`."""
        if self.formats is not None and self.formats != before:
            record(state, self.formats)

    def add(self, formats: Iterable[AxisFormats]) -> None:
        """Adds the formats of a program. Axes that have only one rank now keep theirs."""
        self.formats = tuple({x.axis: x for x in (*(self.formats or ()), *formats)}.values())
