"""Watches scalars of a running step on the host: parameters that are not finite, at the start or later; a loss scale at
its minimum; and new values of leaves that must agree between ranks but do not.

Nothing here waits for the device during a step. The parameters are checked once before the first step; the flags of a
step are read when they have arrived.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.compiler.abstract_values import abstract_params
from fzero.compiler.lowered import Lowered
from fzero.errors import FzeroValueError, LossScaleError, message
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.step import State, Step
from fzero.train_state import mark_broken
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.transform import find

_LOOKS = 8
"""Maximum number of times that parameters are checked after a step whose loss or gradients were not finite. Several
checks may be needed, because an optimizer may skip such steps."""

_STACKLEVEL = 7  # from here to the user's call: three calls in here, `CompiledStep.__call__` and its two decorators


def check_finite(params: Any, inputs: Inputs, trained: list[bool], mesh: Mesh) -> None:
    """Raises an error that names the trained parameters whose shard on this rank contains inf or NaN. Parameters on
    disk are not read for this.

    Args:
        params: the tree of a state.
        inputs: its leaf table.
        trained: for each leaf, whether it is trained.
    """
    wrong = [f"{inputs.leaves[i]}: inf or nan" for i, finite in _finite(params, inputs, trained, mesh) if not finite]
    if wrong:
        fix = "check the init function, or restore another checkpoint"
        raise FzeroValueError("step", "training cannot start from parameters that are not finite", wrong, fix)


def _finite(params: Any, inputs: Inputs, trained: list[bool], mesh: Mesh) -> list[tuple[int, bool]]:
    """Returns for each trained parameter in memory whether this rank's shard is finite. Waits for the device."""
    flat = tree.leaves(params)
    # Leaves on disk are represented by meta tensors. An empty shard has no minimum.
    asked = [i for i in inputs.distinct if trained[i] and not flat[i].is_meta and flat[i].numel()]
    # aminmax returns NaN for both if there is a NaN
    # In float64, because a float64 parameter may be finite and beyond the range of float32.
    ends = [torch.stack(torch.aminmax(flat[i].detach())).to(mesh.device, torch.float64) for i in asked]
    # float64[parameters, 2], read with one transfer
    return list(zip(asked, torch.stack(ends).isfinite().all(1).tolist() if ends else [], strict=True))


class Arriving:
    """The flags of steps as they arrive on the host, in the order of the steps.

    A device that runs asynchronously is not waited for; a flag is read after it has arrived. But an error must be
    raised in the same step on every rank. Therefore, if flags may raise an error, the flag of the second-to-last step
    is waited for, which the device has finished long ago.
    """

    def __init__(self, raises: bool):
        self._raises = raises
        self._under_way: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, flag: torch.Tensor) -> Iterator[torch.Tensor]:
        """Adds the flag of a step, and yields the flags that have arrived."""
        self._under_way.append(fetched(flag))
        # Flags arrive in the order of their steps, so the first one that has not arrived ends the search.
        while self._under_way and self._is_there(self._under_way[0][1]):
            yield self._under_way.popleft()[0]

    @property
    def num_under_way(self) -> int:
        """The number of flags that have not arrived."""
        return len(self._under_way)

    def _is_there(self, event: torch.cuda.Event | None) -> bool:
        """Whether the oldest flag has arrived. A flag that may raise an error is waited for, unless it is that of the
        last step."""
        if event is None or not self._raises:
            return event is None or event.query()
        # The flag of the step that was just enqueued. Waiting for it would make the host wait for the device in every
        # step; the flag of the step before is certainly needed, and usually there.
        if len(self._under_way) == 1:
            return False
        event.synchronize()
        return True


class Agreement:
    """Raises an error that names the leaves whose new values, which are not averaged, differed between ranks or
    micro-batches. It is raised in the same step; on an asynchronous device, in the next one."""

    def __init__(self) -> None:
        self._arriving = Arriving(raises=True)

    def __call__(self, same: torch.Tensor, paths: Sequence[str]) -> None:
        """Checks the flags of a step, bool[len(paths)]."""
        for flags in self._arriving(same):
            wrong = [
                f"{path}: not the same on every rank and in every micro-batch"
                for path, agrees in zip(paths, flags.tolist(), strict=True)
                if not agrees
            ]
            if wrong:
                fix = (
                    "return what does not depend on the part of the batch, such as a count of steps; or a "
                    "floating-point leaf, which is averaged"
                )
                raise FzeroValueError(
                    "step",
                    "new values of mutable tensors differ, and only floating-point ones are averaged",
                    wrong,
                    fix,
                )


class Raised:
    """Raises an error that names the lines at which a function of the step raises: in the same step; on an asynchronous
    device, in the next one."""

    def __init__(self) -> None:
        self._arriving, self._lines = Arriving(raises=True), deque[Sequence[str]]()

    def __call__(self, flags: torch.Tensor, lines: Sequence[str], state: State) -> None:
        """Checks the flags of a step, bool[len(lines)], combined over all ranks."""
        self._lines.append(lines)
        for raised in self._arriving(flags):
            held = [line for line, holds in zip(self._lines.popleft(), raised.tolist(), strict=True) if holds]
            if held:
                fix = "look at the batch; continue from the last checkpoint, because this state has become NaN"
                error = FzeroValueError("step", "the loss function raises, on some rank", dict.fromkeys(held), fix)
                mark_broken(state, error)
                raise error


class AtMinimum:
    """Warns once, or raises, if gradients overflow although the loss scale is at its minimum."""

    def __init__(self, mesh: Mesh, minimum: float, raises: bool):
        self._mesh, self._minimum, self._raises = mesh, minimum, raises
        self._said, self._arriving = False, Arriving(raises)

    def __call__(self, flag: torch.Tensor) -> None:
        """Checks the flag of a step, bool[]."""
        if not self._said and any(value.item() for value in self._arriving(flag)):
            self._say()

    def _say(self) -> None:
        problem = f"loss scale {self._minimum:g}: it is not lowered further, and every step that overflows is skipped"
        fix = (
            "return a mean or fz.weighted(total, count), not a sum; look for values that are not finite in the batch, "
            "in the state and, with mixed_precision(..., watch=True), among the outputs of blocks; lower the learning "
            "rate; or compute in bf16, whose range is that of fp32"
        )
        text = message("mixed_precision", "gradients overflow at the minimum loss scale", [problem], fix)
        if self._raises:
            raise LossScaleError(text)
        self._said = True
        if self._mesh.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=_STACKLEVEL)


class NotFinite:
    """Warns once when parameters have become non-finite. They are checked when the loss or the gradients of a step were
    not finite. If all parameters are on disk, two such steps in a row cause the warning."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._arriving = mesh, Arriving(raises=False)
        self._looks_left = _LOOKS if mesh.rank == 0 else 0
        self._in_row = 0

    def __call__(self, finite: torch.Tensor, state: State, inputs: Inputs, trained: Callable[[], list[bool]]) -> None:
        """Checks the flag of a step, bool[], and the state if a flag that has arrived is False."""
        if not self._looks_left:
            return
        for flag in self._arriving(finite):
            self._in_row = 0 if flag.item() else self._in_row + 1
            if self._in_row and self._looks_left:
                self._look(state, inputs, trained())

    def _look(self, state: State, inputs: Inputs, trained: list[bool]) -> None:
        self._looks_left -= 1
        found = _finite(state.params, inputs, trained, self._mesh)
        wrong = [str(inputs.leaves[i]) for i, finite in found if not finite]
        if not wrong and (found or self._in_row < 2):
            return
        # One warning is enough, and the parameters do not become finite again.
        self._looks_left = 0
        # `state.step` counts the newest step. The flag just read is `num_under_way` steps older, and is the last of a
        # row of `_in_row` steps.
        step = int(state.step) - self._arriving.num_under_way - self._in_row + 1
        problems = [f"step {step} was the first whose loss or gradients were not", *wrong[:3]]
        problems += [f"and {len(wrong) - 3} more"] * (len(wrong) > 3)
        fix = "restore an earlier checkpoint; fz.optim.skip_nonfinite(optimizer) leaves out steps that are not finite"
        what = "parameters are" if wrong else "two steps in a row, and perhaps parameters, are"
        text = message("step", f"{what} not finite any more", problems, fix)
        warnings.warn(text, RuntimeWarning, stacklevel=_STACKLEVEL)


class MetricsWatch:
    """Watches the metrics of a training step: does all checks in this file that follow the first step."""

    def __init__(self, step: Step, mesh: Mesh):
        precision = find(step.transforms, MixedPrecision)
        scaling = precision.scaling if precision else None
        self._at_minimum = (
            AtMinimum(mesh, scaling.minimum, precision.loss_scale_at_minimum == "raise")
            if precision and scaling
            else None
        )
        # with a loss scale, steps that overflow are skipped
        self._not_finite = NotFinite(mesh) if self._at_minimum is None else None
        self._agreement, self._raised = Agreement(), Raised()

    def __call__(self, metrics: dict[str, Any], state: State, step: Step, lowered: Lowered) -> None:
        """Checks the metrics of a step, and removes those that exist only for these checks."""
        if "raised" in metrics:
            self._raised(metrics.pop("raised"), lowered.raises, state)
        if self._at_minimum is not None:
            self._at_minimum(metrics["loss_scale_at_minimum"])
        if self._not_finite is not None:
            trained = lambda: step.trains(abstract_params(lowered.params))  # noqa: E731
            self._not_finite(metrics["finite"], state, lowered.params, trained)
        if "agreed" in metrics:
            mutable = [
                lowered.params.leaves[i] for i in lowered.params.distinct if lowered.params.leaves[i].role == "mutable"
            ]
            self._agreement(metrics.pop("agreed"), [leaf.path for leaf in mutable if not leaf.dtype.is_floating_point])


def fetched(flag: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Starts to copy a flag to host memory. Returns the copy, and the event after which its value is there."""
    if flag.device.type != "cuda":
        return flag, None
    value = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
    # Asynchronous only because the target is pinned. The flag is a result of this step, and is not written before the
    # copy, which is enqueued on the same stream.
    value.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return value, event
