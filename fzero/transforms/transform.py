"""Defines transforms: each is a spec, frozen data that says what is wanted. Applying it adds the spec to the step,
nothing more.

Specs commute: a step keeps them in one canonical order, so any order of application gives the same step and hence the
same program. A spec that contradicts one already there raises at once and names both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from fzero.errors import TransformError
from fzero.ir.ops import bring
from fzero.ir.ops.op import Op
from fzero.ir.program import Line, Program
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.shard_regions import Dim
from fzero.step import EvalStep, Step
from fzero.step.checks import no_step

if TYPE_CHECKING:
    from fzero.transforms.transform_state import StepResults

T = TypeVar("T", bound="Transform")


@dataclass(frozen=True)
class Transform:
    """A spec. `order` is its place in the canonical order; `after` names the pass (fzero/compiler/passes.py), or the
    transform, that its own rewrite follows; `ops` are rows of the op table for the lines that it adds;
    `every_leaf` says whether `slots` gets all parameters, or None in place of those that are not trained."""

    order: ClassVar[int] = 0
    after: ClassVar[str] = "cut_update"
    name: ClassVar[str] = ""
    ops: ClassVar[tuple[Op[Any], ...]] = ()
    every_leaf: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "ops" in cls.__dict__:
            bring(cls.ops, cls.name)

    @property
    def flops_axes(self) -> tuple[str, ...]:
        """Mesh axes whose ranks divide the computation of the same samples among them."""
        return ()

    def __call__(self, step: Any) -> Any:
        """The step with this spec added.

        Raises:
            TransformError: one that does nothing to an evaluation, which `fz.compose(*train.resolved.transforms)` may
                have among others.
        """
        if isinstance(step, EvalStep) and (reason := self.idle(step)):
            fix = (
                "leave it out; an evaluation takes over what concerns it of a training step: "
                "fz.compose(*train.resolved.transforms)(fz.eval_step(fn))"
            )
            raise TransformError(self.name, "does nothing to an evaluation", [f"{self}: {reason}"], fix)
        return self.add(step)

    def add(self, step: Any) -> Any:
        """The step with this spec, whether it does anything to it or not."""
        if not hasattr(step, "transforms"):
            raise no_step(self.name, "transforms", step, f"fz.{self.name}(...)(fz.train_step(loss_fn, optimizer))")
        for other in step.transforms:
            if other == self:
                return step
            reason = self.conflict(other) or other.conflict(self)
            if reason:
                raise TransformError(
                    self.name, f"conflicts with {other}", [f"{self}", f"{other}", reason], "apply one of the two"
                )
        return replace(step, transforms=tuple(sorted((*step.transforms, self), key=lambda t: (t.order, str(t)))))

    def on_device(self, device: torch.device | None) -> Transform:
        """This spec with what it leaves to the device decided. None: the usual device."""
        return self

    def conflict(self, other: Transform) -> str | None:
        """Why this and `other` cannot both hold, or None. Two different specs of one kind never can."""
        return f"two different {self.name}" if type(self) is type(other) else None

    def idle(self, step: EvalStep) -> str | None:
        """Why this does nothing to an evaluation, or None."""
        return None

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Dim]:
        """The mesh axes over which a parameter, and its state and gradient, rest cut along a dim, with that dim; the
        first cuts first, and all before what shards it flat. A line that reads the parameter has it whole."""
        return {}

    def slots(self, params: Any) -> Mapping[str, Any]:
        """The state that this transform keeps, before the first step: by name a tree of tensors, made of the parameters
        as an optimizer's `init` makes its state. It is `state.extras[name]`, in checkpoints under that name.

        A leaf whose path ends in a parameter's and that has its shape rests as that parameter's optimizer state does:
        sharded, and on its tier. Any other rests whole; a `fzero.transforms.transform_state.Local` is each rank's
        own."""
        return {}

    def update(
        self, slots: Mapping[str, Any], grads: Any, params: Any, inner: Callable[[Any], Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """New parameters and slots. `inner(grads)` makes new parameters as the optimizer does, and the transforms that
        come before this one in the step; it is called once. A pure function of whole trees, recorded with the
        optimizer's update and sharded as that is. In a step that is skipped all stay as they were."""
        return inner(grads), slots

    def advance(self, slots: Mapping[str, Any], results: StepResults) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The slots behind a step, skipped or not, of what is known at its end; and metrics."""
        return slots, {}

    def rewrite(self, program: Program) -> Program:
        """The program with what this transform adds of its own, right behind the pass `after`; the passes of the
        package (fzero/passes) know their specs themselves. Equal specs rewrite programs with the same lines alike, on
        every rank, wherever their leaves rest and whatever other specs there are. One that changes nothing is an error,
        unless `idle_in` says why. Its lines may write its own slots."""
        return program

    def idle_in(self, program: Program) -> str | None:
        """Why `rewrite` may leave a program as it is, or None. By default: an evaluation, and a mesh that has one rank
        along the transform's `axis`, or along each of them."""
        axis = getattr(self, "axis", None)
        axes = (axis,) if isinstance(axis, str) else axis if isinstance(axis, tuple) else ()
        if not program.assigns:
            return "an evaluation has no gradients and no update"
        return f"one rank along {axis!r}" if axes and all(program.mesh.axes.get(x, 1) == 1 for x in axes) else None

    def placed(self, line: Line) -> bool:
        """Whether a line that was placed `by` a spec of this kind is this one's, where a step has several: by default
        one over its `axis`, or over some of them."""
        axis = getattr(self, "axis", ())
        return {*line.axes} <= ({axis} if isinstance(axis, str) else {*axis})

    def in_program(self) -> str:
        """As a program's header has it: the same on every rank and every machine."""
        return str(self)

    def __str__(self) -> str:
        shown = [f"{f.name}={_show(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) is not None]
        return f"{self.name}({', '.join(shown)})"


def applied(spec: Transform, step: Step | EvalStep | None) -> Any:
    """The transformed step, or the transform itself when called without a step."""
    return spec if step is None else spec(step)


def on_device(step: Any, device: torch.device | None) -> Any:
    """A step, or an evaluation, with what its specs leave to the device decided. None: the usual device."""
    return replace(step, transforms=tuple(t.on_device(device) for t in step.transforms))


def find(transforms: tuple[Transform, ...], kind: type[T]) -> T | None:
    """The spec of a kind, if the step has one."""
    return next((t for t in transforms if isinstance(t, kind)), None)


def _show(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
