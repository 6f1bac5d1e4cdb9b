"""Records the formats that `compress("auto")` has chosen in the state, as text in its slot.

So all programs of a state, and those of a run that goes on from its checkpoint, have the same formats. An axis that is
not recorded, because it had one rank, is decided when it has more.
"""

from __future__ import annotations

import json

import torch

from fzero.errors import FzeroValueError
from fzero.read_json import parsed
from fzero.step import State
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
