"""Reads PyTorch's switch for deterministic algorithms, `torch.use_deterministic_algorithms`: the parts of it that
determine the generated code and its behavior.

The switch is global to the process. Code that traces or runs something queries PyTorch again each time; results that
are cached are cached together with the `DeterministicSetting` under which they were made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fzero._compat import compat

WORKSPACES = (":4096:8", ":16:8")
"""The values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic."""


class DeterministicSetting(NamedTuple):
    """The state of the switch. `fill`: whether uninitialized memory is filled with NaN."""

    enabled: bool
    warn_only: bool
    fill: bool

    def __str__(self) -> str:
        return ("on, with warnings only" if self.warn_only else "on") if self.enabled else "off"


def setting() -> DeterministicSetting:
    """The current setting of this process."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return DeterministicSetting(
        enabled,
        enabled and torch.is_deterministic_algorithms_warn_only_enabled(),
        enabled and compat.fills_uninitialized_memory(),
    )


def use(setting: DeterministicSetting) -> None:
    """Sets this process's switch to the setting of another process."""
    torch.use_deterministic_algorithms(setting.enabled, warn_only=setting.warn_only)
    compat.fill_uninitialized_memory(setting.fill)


def unsettled(device_type: str, setting: DeterministicSetting, workspace: str | None) -> str | None:
    """Why matrix products on a device would raise under a setting; None if they would not. cuBLAS computes the same
    sums each time only with a workspace configuration that is set before CUDA starts.

    Args:
        device_type: the type of the device.
        setting: the state of the switch.
        workspace: the value of CUBLAS_WORKSPACE_CONFIG in the environment.
    """
    if device_type != "cuda" or not setting.enabled or setting.warn_only or workspace in WORKSPACES:
        return None
    return "CUBLAS_WORKSPACE_CONFIG " + ("is not set" if workspace is None else f"is {workspace!r}")
