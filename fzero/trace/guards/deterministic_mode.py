"""Reads PyTorch's switch for deterministic algorithms, `torch.use_deterministic_algorithms`: the parts of it that
decide which code is made and what it does.

It is the process's. Whoever traces or runs something asks PyTorch anew; what is made once and kept is kept under the
`DeterministicSetting` that it was made with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fzero._compat import compat

WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic."""


class DeterministicSetting(NamedTuple):
    """The position of the switch. `fill`: whether memory that nobody has written yet is filled with NaN."""

    enabled: bool
    warn_only: bool
    fill: bool

    def __str__(self) -> str:
        return ("on, with warnings only" if self.warn_only else "on") if self.enabled else "off"


def setting() -> DeterministicSetting:
    """The setting of this process, now."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return DeterministicSetting(
        enabled,
        enabled and torch.is_deterministic_algorithms_warn_only_enabled(),
        enabled and compat.fills_uninitialized_memory(),
    )


def use(setting: DeterministicSetting) -> None:
    """Takes over another process's setting."""
    torch.use_deterministic_algorithms(setting.enabled, warn_only=setting.warn_only)
    compat.fill_uninitialized_memory(setting.fill)


def unsettled(device_type: str, setting: DeterministicSetting, workspace: str | None) -> str | None:
    """Why products on a device would refuse to run under a setting, if they would: cuBLAS gives the same sums each time
    only with a workspace that is said before CUDA starts.

    Args:
        device_type: of the device.
        setting: of the switch.
        workspace: CUBLAS_WORKSPACE_CONFIG, as the environment has it.
    """
    if device_type != "cuda" or not setting.enabled or setting.warn_only or workspace in WORKSPACES:
        return None
    return "CUBLAS_WORKSPACE_CONFIG " + ("is not set" if workspace is None else f"is {workspace!r}")
