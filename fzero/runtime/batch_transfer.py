"""Moves the leaves of a batch to the mesh's device, in the form that a program expects."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.memory.pinned_staging import Staged


class BatchTransfer:
    """Copies batches to a device.

    Args:
        owner: the public call that errors name.
    """

    def __init__(self, device: torch.device, owner: str):
        self._device, self._owner = device, owner
        self._staged: Staged | None = None

    def __call__(self, batch: Any, flat: list[torch.Tensor], written: Collection[int] = ()) -> list[torch.Tensor]:
        """Returns the leaves of a batch on the device, contiguous, and in memory that the program does not write to.

        Args:
            written: the storages that the program writes to.
        """
        if any(x.is_meta for x in flat):
            wrong = [
                f"{p}: {tree.describe(x)} on the meta device"
                for p, x in zip(tree.paths(batch, "batch"), flat, strict=True)
                if x.is_meta
            ]
            raise FzeroValueError(
                self._owner,
                "these tensors of the batch have no values",
                wrong,
                "give tensors in memory; fz.lower takes meta tensors",
            )
        found = [
            x
            if x.device == self._device and x.is_contiguous() and not (x.requires_grad or x.is_conj() or x.is_neg())
            # A conjugate or negative view has the memory of its base and a flag. Compiled kernels read memory and would
            # ignore the flag.
            else x.detach().resolve_conj().resolve_neg()
            for x in flat
        ]
        if self._device.type == "cuda":
            pageable = [i for i, x in enumerate(found) if x.device.type == "cpu" and not x.is_pinned()]
            self._staged = self._staged or Staged(self._device)
            for i, x in zip(pageable, self._staged([found[i] for i in pageable]) if pageable else (), strict=True):
                found[i] = x
        found = [x.to(self._device, non_blocking=True).contiguous() for x in found]
        # A batch may contain a tensor of the state, which the program overwrites while it still reads the batch.
        return [x.clone() if compat.memory_of(x) in written else x for x in found]


def check_contiguous(name: str, owner: str, batch: Any, flat: list[torch.Tensor], strides: list[str]) -> None:
    """Raises if leaves are not contiguous although the step's code reads strides.

    Args:
        strides: the places in the code that read strides.
    """
    if strides and (odd := [p for p, x in zip(tree.paths(batch, "batch"), flat, strict=True) if not x.is_contiguous()]):
        what = (
            f"{name} asks how its tensors are laid out, and a program is given its batch contiguous: these leaves are "
            f"not"
        )
        raise FzeroValueError(owner, what, [*odd, *strides], "give x.contiguous()")
