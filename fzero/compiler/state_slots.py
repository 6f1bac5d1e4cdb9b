"""Lists state slots: everything that a state contains in addition to parameters, optimizer state, step and key.

Transforms declare them (`Transform.slots`). Layouts, programs, `init`, `restore`, `move` and checkpoints are based on
the table in this file. If a checkpoint lacks a slot of the step, it can still be restored, and the slot starts from its
initial value; slots that the step does not have are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero import tree
from fzero._compat import compat
from fzero.compiler.abstract_values import faked
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.state_layouts import as_opt_state
from fzero.errors import FzeroTypeError, TransformError
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import ROLES_OF_NO_SLOT, Layout, Leaf, in_slot
from fzero.sharding.placements import Shard
from fzero.step import Step
from fzero.trace.meta_cache import Remembering
from fzero.transforms.transform import Transform
from fzero.transforms.transform_state import Local, StepResults

STEP = Leaf("step", "step", (), Layout(torch.int64))
KEY = Leaf("key", "key", (3,), Layout(torch.int64))


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of a step on a mesh.

    Attributes:
        inputs: the table of tensors, a tree of the slots by name.
        owners: the transform of each slot, by name.
        local: by path, the tensors that vary between ranks.
    """

    inputs: Inputs
    owners: Mapping[str, Transform] = field(default_factory=dict)
    local: Mapping[str, Local] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The tensors of a state other than parameters, optimizer state and tensors that are recomputed, by path."""
        return {leaf.path: leaf for leaf in (STEP, KEY, *self.inputs.leaves)}

    @property
    def updated(self) -> list[int]:
        """The positions of the tensors that the update reads and writes."""
        names = {n for n, t in self.owners.items() if _has(t, "update") or _has(t, "advance")}
        leaves = self.inputs.leaves
        return [i for i in self.inputs.distinct if leaves[i].role in names and leaves[i].path not in self.local]

    @property
    def transforms(self) -> list[Transform]:
        """The transforms that have slots, in the order of the step."""
        found = list(self.owners.values())
        return [t for i, t in enumerate(found) if t not in found[:i]]

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the slots among these values, by name. If only a part of a slot is given, the rest is None."""
        found = {i: values[leaf.path] for i, leaf in enumerate(self.inputs.leaves) if leaf.path in values}
        slots = self.inputs.rebuild(found)
        return {name: slots[name] for name in slots if any(self.inputs.leaves[i].role == name for i in found)}

    def around(self, held: dict[str, Any], params: Any, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps the optimizer's update, a function of gradients, in those of transforms. It replaces the slots in
        `held` by new ones.

        Args:
            held: the slots before the step, by name.
            params: the parameters before the step.
            update: returns new parameters for gradients.
        """
        # Each wraps the ones before it, so the last transform of the step is the first to see the gradients.
        for transform in (t for t in self.transforms if _has(t, "update")):
            update = functools.partial(self._around, transform, held, params, update)
        return update

    def advanced(self, held: dict[str, Any], results: StepResults) -> dict[str, Any]:
        """Puts the slots after a step into `held`; returns the metrics that transforms add."""
        metrics: dict[str, Any] = {}
        for transform in (t for t in self.transforms if _has(t, "advance")):
            own = self._own(transform, held)
            after, more = transform.advance(own, results)
            held.update(_alike(transform, "advance", own, after, "slots"))
            metrics |= more
        return metrics

    def _own(self, transform: Transform, held: Mapping[str, Any]) -> dict[str, Any]:
        return {name: held[name] for name, t in self.owners.items() if t == transform and name in held}

    def _around(
        self, transform: Transform, held: dict[str, Any], params: Any, inner: Callable[[Any], Any], grads: Any
    ) -> Any:
        """Calls a transform's `update` around an inner one, checks its result, and puts the new slots into `held`."""
        own, called = self._own(transform, held), list[Any]()

        def once(grads: Any) -> Any:
            called.append(inner(grads))
            return called[-1]

        result = transform.update(own, grads, params, once)
        if not isinstance(result, tuple) or len(result) != 2 or len(called) != 1:
            what = f"update called inner {len(called)} times and returned {tree.describe(result)}"
            fix = "call inner(grads) once, and return a pair (params, slots)"
            raise FzeroTypeError(transform.name, what, fix=fix)
        held.update(_alike(transform, "update", own, result[1], "slots"))
        return _alike(transform, "update", params, result[0], "params")


def slots_of(step: Step, mesh: AbstractMesh, params: Inputs) -> Slots:
    """Returns the slots of a step, from its transforms.

    Raises:
        TransformError: two transforms with the same slot, or a slot with a reserved name.
        FzeroTypeError: a slot contains objects that are not tensors.
    """
    mode, owners = compat.FakeTensorMode(), dict[str, Transform]()
    declaring = [t for t in step.transforms if _has(t, "slots")]
    if not declaring:
        return Slots(Inputs(tree.structure({}), (), ()))
    whole = faked(params, mode)
    made, problems = dict[str, Any](), list[str]()
    with mode, Remembering():
        for transform in declaring:
            for name, values in declared(step, transform, whole).items():
                if not isinstance(name, str) or not name.isidentifier() or name in ROLES_OF_NO_SLOT:
                    problems.append(f"{name!r} of {transform}: not a name, or one of {sorted(ROLES_OF_NO_SLOT)}")
                elif name in made:
                    problems.append(f"{name!r} of {transform}: {owners[name]} has a slot of this name")
                made[name], owners[name] = values, transform
    if problems:
        fix = "give each slot its own name, for example from a field of the transform"
        raise TransformError(declaring[-1].name, "slots need distinct names", problems, fix)
    flat, structure = tree.flatten(made)
    paths = tree.paths(made, "extras")
    if wrong := [f"{p}: {tree.describe(x)}" for p, x in zip(paths, flat, strict=True) if not _is_leaf(x)]:
        fix = "keep numbers in fields of the transform, tensors in slots"
        raise FzeroTypeError(declaring[-1].name, "slots returned leaves that are not tensors", wrong, fix)
    local = {p: x for p, x in zip(paths, flat, strict=True) if isinstance(x, Local)}
    leaves = []
    for path, value in zip(paths, flat, strict=True):
        like = value.like if isinstance(value, Local) else value
        name = path.removeprefix("extras['").partition("'")[0]
        leaves.append(Leaf(path, name, tuple(like.shape), Layout(like.dtype)))
    leaves = as_opt_state(step, mesh, params, leaves, declaring[-1].name)
    axes = zero_of(step, mesh).batch_axes
    for i, leaf in enumerate(leaves):
        if leaf.path in local:  # a row for each rank
            # Sharded along dim 0 over all axes of the batch, so that each rank has exactly one row.
            layout = Layout(leaf.dtype, axes, dims=(Shard(0),) * len(axes))
            leaves[i] = Leaf(leaf.path, leaf.role, (mesh.axis_size(axes), *leaf.shape), layout)
    return Slots(Inputs(structure, tuple(leaves), tuple(range(len(leaves)))), owners, local)


def declared(step: Step, transform: Transform, params: Any) -> Mapping[str, Any]:
    """Returns the slots of a transform before the first step, for unsharded parameters."""
    found = transform.slots(params if transform.every_leaf else step.optimized(params))
    if not isinstance(found, Mapping):
        what = f"slots returned {tree.describe(found)}"
        raise FzeroTypeError(transform.name, what, fix="return a dict of trees by the slot's name")
    return found


def check_used(program: Program, slots: Slots) -> None:
    """Raises TransformError if no op of a finished program reads or writes a slot, and names it."""
    used = {a for op, _ in program.walk() for a in (*op.args, *op.writes)}
    idle = [leaf for leaf in program.leaves.values() if in_slot(leaf) and leaf.path not in used]
    idle = [leaf for leaf in idle if slots.owners[leaf.role].idle_in(program) is None]
    if idle:
        by = slots.owners[idle[0].role]
        fix = "read or write it in the transform's update or rewrite, or leave it out"
        raise TransformError(by.name, "no op of the program reads or writes a slot", map(str, idle), fix)


def _has(transform: Transform, method: str) -> bool:
    """Whether a transform overrides this method."""
    return getattr(type(transform), method) is not getattr(Transform, method)


def _is_leaf(x: Any) -> bool:
    return isinstance(x.like if isinstance(x, Local) else x, torch.Tensor)


def _alike(transform: Transform, method: str, before: Any, after: Any, what: str) -> Any:
    """Returns the tree that a transform's method returned; raises if it differs in structure, shapes or dtypes from the
    one that the method got."""
    # A transform may return only the slots that it has changed.
    after = {**before, **after} if what == "slots" and isinstance(after, Mapping) else after
    old, new = (dict(tree.with_paths(x, what)) for x in (before, after))
    problems = [f"{p}: not among the tensors given to it" for p in new.keys() - old.keys()]
    problems += [f"{p}: missing" for p in old.keys() - new.keys()]
    problems += [
        f"{p}: {tree.describe(old[p])} before, {tree.describe(new[p])} after"
        for p in old.keys() & new.keys()
        if not isinstance(new[p], torch.Tensor) or (new[p].shape, new[p].dtype) != (old[p].shape, old[p].dtype)
    ]
    if problems or tree.structure(before) != tree.structure(after):
        fix = "return the tree that it got, with tensors of the same shapes and dtypes; declare further slots in slots"
        raise FzeroTypeError(transform.name, f"{method} returned different {what}", sorted(problems), fix)
    return after
