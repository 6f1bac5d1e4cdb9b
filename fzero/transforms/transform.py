"""Defines transforms: each is a spec, an immutable configuration that describes what is wanted. Applying a transform
only adds its spec to the step.

Specs commute: a step keeps them in one canonical order, so any order of application gives the same step and hence the
same program. A spec that contradicts one that is already there raises immediately and names both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from fzero._utils.deprecation import warn
from fzero.errors import TransformError
from fzero.ir.ops import bring
from fzero.ir.ops.op import Op
from fzero.ir.program import Instruction, Program
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import Shard
from fzero.step import EvalStep, Step
from fzero.step.checks import no_step

if TYPE_CHECKING:
    from fzero.transforms.transform_state import StepResults

T = TypeVar("T", bound="Transform")

RENAMED_PASSES = {"cut": "dim_sharding", "cut_update": "partition_update"}
"""The present name of each pass that had another name until 0.2."""


@dataclass(frozen=True)
class Transform:
    """The spec of a transform.

    Attributes:
        order: its position in the canonical order.
        after: the pass (fzero/compiler/passes.py), or the transform, after which its own `rewrite` runs.
        name: the public name.
        ops: rows of the op table for the ops that it adds.
        every_leaf: whether `slots` gets all parameters; otherwise it gets None in place of those that are not trained.
    """

    order: ClassVar[int] = 0
    after: ClassVar[str] = "partition_update"
    name: ClassVar[str] = ""
    ops: ClassVar[tuple[Op[Any], ...]] = ()
    every_leaf: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("after") in RENAMED_PASSES:
            cls.after = current_pass_name(cls.after, stacklevel=4)
        # Only if the class defines ops itself: a subclass that inherits them would bring them a second time, under its
        # own name.
        if "ops" in cls.__dict__:
            bring(cls.ops, cls.name)

    @property
    def flops_axes(self) -> tuple[str, ...]:
        """Mesh axes whose ranks share the computation of the same samples."""
        return ()

    def __call__(self, step: Any) -> Any:
        """Returns the step with this spec added.

        Raises:
            TransformError: the spec does nothing to an evaluation. (`fz.compose(*train.resolved.transforms)` may
                contain such specs.)
        """
        if isinstance(step, EvalStep) and (reason := self.idle(step)):
            fix = (
                "leave it out; for an evaluation with the layout of a training step: "
                "fz.compose(*train.resolved.transforms)(fz.eval_step(fn))"
            )
            raise TransformError(self.name, "does nothing to an evaluation", [f"{self}: {reason}"], fix)
        return self.add(step)

    def add(self, step: Any) -> Any:
        """Returns the step with this spec, whether or not the spec has an effect on it."""
        if not hasattr(step, "transforms"):
            raise no_step(self.name, "transforms", step, f"fz.{self.name}(...)(fz.train_step(loss_fn, optimizer))")
        for other in step.transforms:
            # Applying the same spec twice is allowed, so that composed functions may each add what they need.
            if other == self:
                return step
            reason = self.conflict(other) or other.conflict(self)
            if reason:
                raise TransformError(
                    self.name, f"conflicts with {other}", [f"{self}", f"{other}", reason], "apply one of the two"
                )
        # The text breaks ties between specs of one order, so that the order of application does not matter even for two
        # offloads.
        return replace(step, transforms=tuple(sorted((*step.transforms, self), key=lambda t: (t.order, str(t)))))

    def on_device(self, device: torch.device | None) -> Transform:
        """Returns this spec with everything that it leaves to the device decided. None means the default device."""
        return self

    def conflict(self, other: Transform) -> str | None:
        """Returns the reason why this spec and `other` cannot be combined, or None. Two different specs of one kind
        never can."""
        return f"two different {self.name}" if type(self) is type(other) else None

    def idle(self, step: EvalStep) -> str | None:
        """Returns the reason why this spec does nothing to an evaluation, or None."""
        return None

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Shard]:
        """Returns the mesh axes over which a parameter, its optimizer state and its gradient are stored sharded along a
        dim, with that dim.

        The axes are in the order of sharding, and all come before the axes that shard it flat. An op that reads the
        parameter gets it unsharded.
        """
        return {}

    def slots(self, params: Any) -> Mapping[str, Any]:
        """Returns the state that this transform keeps, before the first step: a tree of tensors by name.

        It is made from the parameters, as an optimizer's `init` makes its state, and becomes `state.extras[name]`;
        checkpoints contain it under that name. A tensor whose path ends in a parameter's path and that has its shape is
        stored as that parameter's optimizer state is: sharded, and on the same tier. Any other tensor is stored
        replicated; a `fzero.transforms.transform_state.Local` has a separate value on each rank.
        """
        return {}

    def update(
        self, slots: Mapping[str, Any], grads: Any, params: Any, inner: Callable[[Any], Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Returns new parameters and slots.

        `inner(grads)` returns new parameters as computed by the optimizer and by the transforms that come before this
        one in the step; it must be called once. This method must be a pure function of unsharded trees; it is recorded
        with the optimizer's update and sharded like the update. In a step that is skipped, all values stay as they
        were.
        """
        return inner(grads), slots

    def advance(self, slots: Mapping[str, Any], results: StepResults) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns the slots after a step, skipped or not, computed from the results that are known at its end; and
        metrics."""
        return slots, {}

    def rewrite(self, program: Program) -> Program:
        """Returns the program with the changes of this transform, directly after the pass `after`.

        The passes of the package (compiler/passes.py) handle their own specs; this method is for other transforms.
        Equal specs must rewrite programs with the same ops in the same way, on every rank, no matter where state is
        stored and which other specs there are. Changing nothing is an error, unless `idle_in` returns a reason. The ops
        that it adds may write the transform's own slots.
        """
        return program

    def idle_in(self, program: Program) -> str | None:
        """Returns the reason why `rewrite` may leave a program unchanged, or None.

        By default there are two reasons: the program is an evaluation, or the mesh has only one rank along the
        transform's `axis` (along each of them, if there are several).
        """
        axis = getattr(self, "axis", None)
        axes = (axis,) if isinstance(axis, str) else axis if isinstance(axis, tuple) else ()
        if not program.assigns:
            return "an evaluation has no gradients and no update"
        return f"one rank along {axis!r}" if axes and all(program.mesh.axes.get(x, 1) == 1 for x in axes) else None

    def placed(self, op: Instruction) -> bool:
        """Whether an op that was inserted `by` a spec of this kind belongs to this one, if a step has several: by
        default one over its `axis`, or over some of its axes."""
        axis = getattr(self, "axis", ())
        return {*op.axes} <= ({axis} if isinstance(axis, str) else {*axis})

    def in_program(self) -> str:
        """Returns the text in a program's header: the same on every rank and every machine."""
        return str(self)

    def __str__(self) -> str:
        shown = [f"{f.name}={_show(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) is not None]
        return f"{self.name}({', '.join(shown)})"


def current_pass_name(name: str, transforms: Sequence[Transform] = (), stacklevel: int = 3) -> str:
    """Returns the present name of a pass, with a warning if `name` is the one it had until 0.2.

    Args:
        name: the name of a pass. Any other name is returned unchanged.
        transforms: the transforms of the step. If one of them has this name, the name refers to its own rewrite.
        stacklevel: as in `warnings.warn`. The default attributes the warning to the caller.
    """
    new = RENAMED_PASSES.get(name, name)
    if new == name or any(t.name == name for t in transforms):
        return name
    warn(f"the pass name {name!r}", repr(new), stacklevel)
    return new


def applied(spec: Transform, step: Step | EvalStep | None) -> Any:
    """Returns the transformed step, or the transform itself when called without a step."""
    return spec if step is None else spec(step)


def on_device(step: Any, device: torch.device | None) -> Any:
    """Returns a step, or an evaluation, with everything that its specs leave to the device decided. None means the
    default device."""
    return replace(step, transforms=tuple(t.on_device(device) for t in step.transforms))


def find(transforms: tuple[Transform, ...], kind: type[T]) -> T | None:
    """Returns the spec of a kind, if the step has one."""
    return next((t for t in transforms if isinstance(t, kind)), None)


def _show(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
