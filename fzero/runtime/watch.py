"""What the host looks at beside a step: parameters that are not finite at the start, and a loss scale that cannot be lowered any more.

Neither waits for the device within a step: the first is asked once, the second is read when it has arrived.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroValueError, LossScaleError, message
from fzero.mesh import Mesh
from fzero.program.trace import Inputs


def check_finite(params: Any, inputs: Inputs, trained: list[bool], mesh: Mesh) -> None:
    """Raises naming the trained parameters of which this rank's part has an inf or a nan. Those on disk are not read for it.

    Args:
        params: the tree of a state.
        inputs: its leaf table.
        trained: for each leaf.
    """
    flat = tree.leaves(params)
    asked = [i for i in inputs.distinct if trained[i] and not flat[i].is_meta and flat[i].numel()]
    ends = [torch.stack(torch.aminmax(flat[i].detach())).to(mesh.device, torch.float64) for i in asked]  # a nan is the least and the greatest
    found = torch.stack(ends).isfinite().all(1).tolist() if ends else []
    wrong = [f"{inputs.leaves[i]}: inf or nan" for i, finite in zip(asked, found, strict=True) if not finite]
    if wrong:
        fix = "check the init function, or restore another checkpoint"
        raise FzeroValueError(message("step", "training cannot start from parameters that are not finite", wrong, fix))


class AtMinimum:
    """Says once, or raises, that gradients overflow though the loss scale is at its minimum.

    A device that runs behind the host is not waited for: a warning comes when the host learns of it. An error must come in the same step
    on every rank, so the flag of the last step but one is waited for, which the device has long done.
    """

    def __init__(self, mesh: Mesh, minimum: float, raises: bool):
        self._mesh, self._minimum, self._raises = mesh, minimum, raises
        self._said = False
        self._arriving: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, flag: torch.Tensor) -> None:
        """Looks at the flag of a step, bool[]."""
        if not self._said:
            self._arriving.append(_fetched(flag))
        while self._arriving and self._is_there(self._arriving[0][1]):
            value, _ = self._arriving.popleft()
            if value.item():
                self._arriving.clear()
                self._say()

    def _is_there(self, event: torch.cuda.Event | None) -> bool:
        """Whether the oldest flag has arrived; to raise by it, that of the last step is not asked for and any other is waited for."""
        if event is None or not self._raises:
            return event is None or event.query()
        if len(self._arriving) == 1:
            return False
        event.synchronize()
        return True

    def _say(self) -> None:
        problem = f"loss scale {self._minimum:g}: it is not lowered any more, and every step that overflows is skipped"
        fix = "lower the learning rate or clip; look at `skipped` among the metrics; or compute in bf16, whose range is that of fp32"
        text = message("mixed_precision", "gradients overflow at the minimum loss scale", [problem], fix)
        if self._raises:
            raise LossScaleError(text)
        self._said = True
        if self._mesh.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _fetched(flag: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A flag in host memory, and the event after which it is there."""
    if flag.device.type != "cuda":
        return flag, None
    value = torch.empty((), dtype=flag.dtype, pin_memory=True)
    value.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return value, event
