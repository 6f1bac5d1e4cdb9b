"""Runs the transformed and the plain step side by side, and compares all their tensors (`check_equivalent`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fzero._utils.arguments import plain_numbers
from fzero.comm.local_device import check_default
from fzero.errors import EquivalenceError, FzeroTypeError, FzeroValueError, message
from fzero.mesh import AbstractMesh, Mesh, make_mesh
from fzero.step import Step
from fzero.testing.comparison import compare
from fzero.testing.comparison_setting import setting_of
from fzero.testing.report import Report
from fzero.testing.tolerance import (
    PRECISIONS,
)


@plain_numbers
def check_equivalent(
    step: Step,
    params: Any,
    batch: Any,
    mesh: AbstractMesh | None = None,
    *,
    steps: int = 3,
    key: torch.Tensor | None = None,
    backend: str = "eager",
    raises: bool = True,
    **options: Any,
) -> Report:
    """Runs a few steps with a transformed step and with the plain one, from the same state and global batch, and
    compares all tensors after each step.

    The plain step has the same loss and optimizer but no transforms, and sees the complete batch at once: the parts
    of all ranks, concatenated along dim 0 in the order of the ranks. Every tensor has its own tolerance, which
    follows from dtypes and the lengths of reductions (docs/guides/verifying.md). If a tensor differs by more than that,
    the check searches for the transform that causes the difference, and for the first op of the program whose value
    differs. A step that is skipped because its scaled gradients overflow is repeated with the next scale. The
    tolerance for the rounding of `mixed_precision` could hide faults of other transforms, so a step that has both is
    also compared without `mixed_precision`. Every call of a block is traced: a block that reads something unseen (see
    `fz.block`) and computes something else than was assumed is an error, and so is a loss that computes something
    else each time it is called.

    On a mesh of several ranks every rank must call this function, and all get the same report. An `AbstractMesh` is
    simulated in this process (`simulate`): the reference semantics of the program on that mesh are compared, and the
    batch is the global one.

    Args:
        step: a training step with its transforms.
        params: a pytree of unsharded tensors, the same on every rank, or a function of a key that returns one. They
            are not written.
        batch: this rank's part of the global batch, as for a compiled step. Tensors that `accumulate` does not split
            must be the same on every rank.
        mesh: from `make_mesh`, by default the mesh of all processes that torchrun started; or an `AbstractMesh`.
        steps: number of steps, at least 1.
        key: int64[3], the same on every rank; by default `fz.random.key(0)`.
        backend: "eager", or "inductor", which also checks the compiled code.
        raises: whether differing tensors are an error.
        **options: further arguments of `fz.compile`: budgets, an example batch. A simulation takes none.

    Communication: the batch and, after each step, the state are gathered on every rank.
    Memory: seven complete states, as many gradients per step, and the plain step's activations of the complete batch
        on every rank: for models, or reduced versions of models, that fit.

    Raises:
        EquivalenceError: if a tensor differs by more than its tolerance; `error.report` is the report.
        FzeroError: if the step cannot be built or run on this mesh, whatever `raises` is.
        TraceError: naming a block that computes something else at a later call; or a loss or an optimizer that does
            when it is traced again.

    Papers: Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019;
        Parker, Monte Carlo arithmetic, 1997.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.ones(3)}, torch.randn(4, 3)
        >>> report = check_equivalent(fz.accumulate(2)(step), params, batch, fz.make_mesh(data=1))
        >>> report.equivalent, report.differences[0].difference < 1e-5
        (True, True)
    """
    if not isinstance(step, Step):
        raise FzeroTypeError(
            "check_equivalent", f"checks a training step, not {type(step).__name__}", fix="make one with fz.train_step"
        )
    if not isinstance(steps, int) or steps < 1:
        raise FzeroValueError(
            "check_equivalent", f"steps={steps!r} compares nothing", fix="give an integer of at least 1"
        )
    mesh = make_mesh() if mesh is None else mesh
    if not isinstance(mesh, AbstractMesh):
        what, fix = f"runs on a mesh, not on {type(mesh).__name__}", "make one with fz.make_mesh, or fz.AbstractMesh"
        raise FzeroTypeError("check_equivalent", what, fix=fix)
    simulated = None if isinstance(mesh, Mesh) else mesh
    if simulated and (given := [*options, *([] if backend == "eager" else ["backend"])]):
        fix = "leave them out, or check on a mesh of processes: fz.make_mesh"
        raise FzeroValueError("check_equivalent", f"a simulation does not take {', '.join(given)}", fix=fix)
    here = mesh if isinstance(mesh, Mesh) else Mesh(dict(mesh.axes), 0, torch.device("cpu"))
    check_default("check_equivalent", here.device_type)
    setting = setting_of(step, params, batch, here, steps, key, backend, options, simulated)
    report = replace(compare(setting), wanted=steps)
    if not report.equivalent and not simulated:
        from fzero.testing.bisect import blame

        report = replace(report, blame=blame(setting, report))
    # Only if the step with its rounding is equivalent: otherwise that difference is what has to be explained first.
    elif report.equivalent and (others := _without_precision(step)):
        exact = check_equivalent(
            replace(step, transforms=others),
            setting.params,
            batch,
            mesh,
            steps=steps,
            key=key,
            backend=backend,
            raises=False,
            **options,
        )
        report = replace(report, exact=exact)
    if raises and not report.equivalent:
        fix = (
            "look at the transform and the line that the report names; fz.testing.check_equivalent(..., raises=False) "
            "returns it"
        )
        problems = str(report).rstrip("\n").splitlines()
        raise EquivalenceError(
            message(
                "check_equivalent", f"the transformed step of {step.name} differs from the plain one", problems, fix
            ),
            report,
        )
    return report


def _without_precision(step: Step) -> tuple[Any, ...]:
    """Returns the other transforms of a step that computes in another dtype than it is stored in; none if it does
    not.
    """
    others = tuple(t for t in step.transforms if not isinstance(t, PRECISIONS))
    return others if len(others) < len(step.transforms) else ()
