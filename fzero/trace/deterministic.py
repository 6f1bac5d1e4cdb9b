"""Reads PyTorch's switch for deterministic algorithms, `torch.use_deterministic_algorithms`: the parts of it that
decide which code is made and what it does.

It is the process's. Whoever traces or runs something asks PyTorch anew; what is made once and kept is kept under the
`Setting` that it was made with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fzero import compat


class Setting(NamedTuple):
    """The position of the switch. `fill`: whether memory that nobody has written yet is filled with NaN."""

    enabled: bool
    warn_only: bool
    fill: bool

    def __str__(self) -> str:
        return ("on, with warnings only" if self.warn_only else "on") if self.enabled else "off"


def setting() -> Setting:
    """The setting of this process, now."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return Setting(
        enabled,
        enabled and torch.is_deterministic_algorithms_warn_only_enabled(),
        enabled and compat.fills_uninitialized_memory(),
    )


def use(setting: Setting) -> None:
    """Takes over another process's setting."""
    torch.use_deterministic_algorithms(setting.enabled, warn_only=setting.warn_only)
    compat.fill_uninitialized_memory(setting.fill)
