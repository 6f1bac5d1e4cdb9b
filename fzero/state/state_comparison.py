"""Assembles states from tensors, and lists the differences between a state and the one that a step expects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero._compat.compat import memory_of
from fzero.comm import control_group
from fzero.compiler.abstract_values import abstract_params
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.state_layouts import leaves_made_anew, opt_state_inputs
from fzero.compiler.state_slots import KEY, STEP, Slots, slots_of
from fzero.errors import CheckpointError, FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.sharding.layout import COMPUTE, GRADIENTS, Layout, Leaf, extent_of, home_of, leaf_of, place, ties
from fzero.sharding.placements import over_axes
from fzero.state import tensor_init, tensor_storage
from fzero.step import State, Step


def placed_inputs(values: Any, role: str = "params", mutable: Callable[[Any], Sequence[bool]] | None = None) -> Inputs:
    """Returns the leaf table of a tree of tensors that have a layout. A tensor without a layout counts as unsharded.

    Args:
        mutable: returns for each leaf whether the loss function returns a new value for it; by default as declared when
            the step was made.
    """
    flat, structure = tree.flatten(values)
    known = [leaf_of(x) for x in flat]
    changes = mutable(values) if mutable else [at is not None and at[0].role == "mutable" for at in known]
    leaves = []
    for path, x, at, changed in zip(tree.paths(values, role), flat, known, changes, strict=True):
        leaf = at[0] if at else Leaf(path, role, tuple(x.shape), Layout(x.dtype))
        leaves.append(replace(leaf, path=path, role="mutable" if changed else role))
    return Inputs(structure, tuple(leaves), tuple(ties(flat)))


def without_values(values: Any, role: str) -> list[str]:
    """Lists the leaves of a tree that are on the meta device and are not stored on disk."""
    flat = tree.with_paths(values, role)
    return [
        f"{p}: {tree.describe(x)} on the meta device"
        for p, x in flat
        if isinstance(x, torch.Tensor) and x.is_meta and extent_of(x) is None
    ]


def check_values(owner: str, fix: str = "give tensors in memory; fz.lower takes meta tensors", **parts: Any) -> None:
    """Raises an error that names every leaf without values.

    Args:
        fix: what the error proposes.
        parts: trees, by role.
    """
    if wrong := [text for role, values in parts.items() for text in without_values(values, role)]:
        raise FzeroValueError(owner, "these tensors have no values", wrong, fix)


def check_memory(**parts: Any) -> None:
    """Raises an error that names every leaf that shares memory with another leaf, or is expanded: a step writes to each
    leaf in place.

    Args:
        parts: trees, by role.
    """
    named = [(p, x) for role, values in parts.items() for p, x in tree.with_paths(values, role)]
    spans, wrong = [], []
    for path, x in {id(x): (p, x) for p, x in reversed(named) if not x.is_meta and x.numel()}.values():
        if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
            wrong.append(f"{path}: {tree.describe(x)}, expanded")
        length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        # The span from the first to the last element. For strided views this may report tensors that interleave without
        # sharing an element, which is safe.
        spans.append((memory_of(x), x.storage_offset() * x.itemsize, (x.storage_offset() + length) * x.itemsize, path))
    # After sorting, it is enough to compare neighbours: if any two spans of a storage overlap, two adjacent ones do.
    spans.sort()
    wrong += [f"{a[3]} and {b[3]} share memory" for a, b in itertools.pairwise(spans) if a[0] == b[0] and b[1] < a[2]]
    if wrong:
        raise FzeroValueError(
            "step",
            "a step writes its state in place, and these tensors share memory",
            wrong,
            "give x.clone()",
        )


class Last:
    """The trees that a step was last called with, or made. Facts about them stay valid as long as the trees are the
    same."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None  # the leaf table of the first tree, or that of an earlier state
        self.trees: tuple[Any, ...] | None = None
        self._extras: Any = None
        self._contents = tree.Contents()  # the contents of the trees: they reveal a leaf that was replaced
        self.begun = False  # whether the checks before the first training step have been done
        self.storages: frozenset[int] = frozenset()  # the storages of the leaves of all trees
        self._first: list[torch.Tensor] = []

    def holds(self, *trees: Any, extras: Any = None) -> bool:
        """Whether these are the remembered trees, unchanged.

        Args:
            extras: further parts of a state, compared only by identity.
        """
        if self.trees is None or any(x is not y for x, y in zip(trees, self.trees, strict=True)):
            return False
        return extras is self._extras and self._contents.same()

    def keep(self, inputs: Inputs, *trees: Any, extras: Any = None) -> None:
        self.inputs, self.trees, self.begun, self._first = inputs, trees, False, _first_leaves(*trees)
        self._extras = extras
        # Comparing identities of the trees is not enough: a user can replace an entry of a dict in place.
        self._contents = tree.Contents(*trees)
        self.storages = frozenset(map(memory_of, tree.leaves(trees)))

    def let_go(self) -> None:
        self.trees, self.storages, self._contents, self._first = None, frozenset(), tree.Contents(), []
        self._extras = None

    def checked(self) -> Inputs:
        """Returns the leaf table of the first tree. Raises if the trees were moved since."""
        for x in self._first:
            # Raises for a tensor whose leaf was moved since, which `leave` has marked.
            leaf_of(x)
        assert self.inputs is not None
        return self.inputs


def assembled(
    step: Step,
    mesh: Mesh,
    params: Inputs,
    opt_state: Inputs,
    made: dict[int, torch.Tensor],
    opt: dict[int, torch.Tensor],
    rest: dict[str, torch.Tensor],
    places: dict[str, torch.Tensor],
    owner: str,
) -> State:
    """Assembles a state from its tensors.

    Args:
        made, opt: the tensors of the parameters and of the optimizer state, by position.
        rest: the step, the key and slots, by path. Slots that are not among them get their initial values.
    """
    for inputs, values in ((params, made), (opt_state, opt)):
        for i, x in values.items():
            place(x, inputs.leaves[i], mesh)
    slots = slots_of(step, mesh, params)
    leaves = slots.inputs.leaves

    def begin() -> dict[str, torch.Tensor]:
        wanted = [i for i, leaf in enumerate(leaves) if leaf.path not in rest]
        load = lambda i: tensor_storage.load(made[i], mesh.device)  # noqa: E731
        put = lambda value, leaf: tensor_storage.put(value, leaf, places, mesh)  # noqa: E731
        return {leaves[i].path: x for i, x in tensor_init.slots(step, params, slots, wanted, load, mesh, put).items()}

    rest |= control_group.run_on_all_ranks(mesh.control, owner, begin) if places and leaves else begin()
    on = lambda leaf: rest[leaf.path] if leaf.path in places else rest[leaf.path].to(mesh.device)  # noqa: E731
    few = {p: place(on(leaf), leaf, mesh, extent_of(rest[p])) for p, leaf in slots.leaves.items()}
    anew = leaves_made_anew(step, mesh, params)

    def make(name: str) -> dict[int, torch.Tensor]:
        value = lambda i, leaf: tensor_storage.cast(made[i], leaf.dtype) if name == "compute" else None  # noqa: E731
        return {i: tensor_storage.put(value(i, leaf), leaf, places, mesh) for i, leaf in anew[name].items()}

    extras = {
        name: params.rebuild(
            control_group.run_on_all_ranks(mesh.control, owner, lambda name=name: make(name)) if places else make(name)
        )
        for name in anew
    }
    return State(few["step"], params.rebuild(made), opt_state.rebuild(opt), few["key"], extras | slots.of(few))


def check_layouts(step: Step, mesh: Mesh, state: State, found: Inputs, opt: Inputs) -> None:
    """Raises an error that lists every leaf of a state whose layout differs from the one that a step expects.

    Args:
        found, opt: the leaf tables of the state's parameters and optimizer state.
    """
    expected = params_inputs(step, mesh, abstract_params(found))
    bare = {**unplaced(state.params), **unplaced(state.opt_state, "opt_state")}
    wrong = differences(found, expected, bare) or differences(opt, opt_state_inputs(step, mesh, expected), bare)
    wrong = wrong or _differing_extras(step, mesh, state, expected)
    if wrong:
        away = any(
            leaf_of(x) is not None and home_of(x).tier != leaf_of(x)[0].layout.tier  # type: ignore[index]
            for x in tree.leaves((state.params, state.opt_state))
        )
        anew = "make it with this step's init or restore"
        # Checked first, because a state that was moved away differs in every leaf, and moving it back is all that is
        # needed.
        if away:
            fix = "bring it back: fz.move(state, 'home')"
        elif not bare and _same_model(found, expected) and _same_model(opt, opt_state_inputs(step, mesh, expected)):
            fix = f"lay it out for this step: state = fz.reshard(state, train); or {anew}"
        else:
            fix = anew
        raise FzeroValueError("step", "the state is laid out for another step", wrong, fix)


def _same_model(found: Inputs, expected: Inputs) -> bool:
    """Whether leaves differ only in their layout in memory, so that `fz.reshard` can lay them out anew."""
    same = [(x.path, x.shape, x.dtype) for x in found.leaves] == [(x.path, x.shape, x.dtype) for x in expected.leaves]
    return same and found.structure == expected.structure and all(x.layout.tier != "disk" for x in found.leaves)


def unplaced(values: Any, role: str = "params") -> dict[str, str]:
    """Returns a description of each tensor without a layout, by path: its own shape and dtype, since it belongs to no
    larger leaf."""
    flat = tree.with_paths(values, role)
    return {
        p: f"{tree.describe(x)} without a layout, which is then assumed to be unsharded,"
        for p, x in flat
        if leaf_of(x) is None
    }


def differences(found: Inputs, expected: Inputs, bare: Mapping[str, str]) -> list[str]:
    """Lists the differences between the leaves of a state and the leaves that a step expects. Tied leaves have the
    layout of the first of them.

    Args:
        bare: see `unplaced`.
    """
    if found.structure != expected.structure:
        here, there = {x.path for x in found.leaves}, {x.path for x in expected.leaves}
        missing = [f"{p}: not in the state" for p in sorted(there - here)] + [
            f"{p}: in the state, not in this step" for p in sorted(here - there)
        ]
        return missing or [f"{found.structure} in the state, {expected.structure} in this step"]
    pairs = [(found.leaves[i], expected.leaves[i]) for i in found.distinct]
    wrong = [(a, b) for a, b in pairs if (a.shape, a.layout) != (b.shape, b.layout)]
    return [
        f"{a.path}: {bare.get(a.path, _described(a, b))} in the state, {_described(b, a)} in this step"
        for a, b in wrong
    ]


def _differing_extras(step: Step, mesh: Mesh, state: State, params: Inputs) -> list[str]:
    """Lists the differences between the extras of a state (slots, and values that are made anew) and those that a step
    expects. Slots that the step does not know are ignored."""
    slots = slots_of(step, mesh, params)
    roots = {"compute": COMPUTE, "gradients": GRADIENTS}
    roots |= {name: f"extras['{name}']" for name in sorted(slots.owners)}
    found = [x for name, path in roots.items() for x in placed_inputs(state.extras.get(name), path).leaves]
    here = {x.path: x for x in found}
    anew = leaves_made_anew(step, mesh, params)
    expected = [
        *(leaf for leaves in anew.values() for leaf in leaves.values()),
        *slots.inputs.leaves,
    ]
    pairs = [(here.get(leaf.path), leaf) for leaf in expected]
    wrong = [(a, b) for a, b in pairs if a is None or (a.shape, a.layout) != (b.shape, b.layout)]
    lines = [
        f"{b.path}: {_described(a, b) if a else 'not'} in the state, {_described(b, a or b)} in this step"
        for a, b in wrong
    ]
    lines += [f"{x}: in the state, not in this step" for x in sorted(here.keys() - {leaf.path for leaf in expected})]
    for name, values in () if lines else abstract_params(slots.inputs).items():
        one, other = tree.structure(state.extras.get(name)), tree.structure(values)
        if tree.leaves(values) and one != other:
            lines.append(f"extras['{name}']: {one} in the state, {other} in this step")
    return lines


def abstract_state(params: Inputs, opt_state: Inputs, slots: Slots) -> State:
    scalar = torch.empty((), dtype=torch.int64, device="meta")
    trees = [abstract_params(x) for x in (params, opt_state, slots.inputs)]
    return State(scalar, trees[0], trees[1], scalar, trees[2])


def state_leaves(params: Inputs, opt_state: Inputs, slots: Slots) -> list[Leaf]:
    """Returns the leaves in the order of a flattened State. A tied leaf is the first of its ties."""
    return [STEP, *(params.leaves[t] for t in params.ties), *opt_state.leaves, KEY, *slots.inputs.leaves]


def _first_leaves(*trees: Any) -> list[torch.Tensor]:
    """Returns the first leaf of each tree that has any. The first one suffices, because a tree is moved as a unit."""
    return [leaves[0] for leaves in map(tree.leaves, trees) if leaves]


def _described(leaf: Leaf, other: Leaf) -> str:
    """Describes the layout of a leaf. The tier is mentioned only if it differs from the tier of the other leaf."""
    whole = tree.form(leaf.shape, leaf.dtype)
    over = over_axes(leaf.layout.axes, leaf.layout.dims)
    text = f"{whole} sharded over {over}" if over else f"{whole} unsharded"
    text += "" if leaf.layout.only is None else f" on {leaf.layout.only.axis}={leaf.layout.only.index} only"
    text += f" (chunks of shards over {', '.join(leaf.layout.grid)})" if leaf.layout.grid else ""
    return text if leaf.layout.tier == other.layout.tier else f"{text}, on {leaf.layout.tier}"


def model_of(fn: Any) -> Any:
    """Returns the model that a step's function was made from, if the function says so (`fz.functionalize`); else
    None."""
    return getattr(fn, "model", None)


def check_model(
    owner: str, model: Any, params: Any = None, error: type[FzeroValueError | CheckpointError] = FzeroValueError
) -> None:
    """Raises if a model has changed since the step was made from it, or if a tree of unsharded leaves belongs to
    another model.

    Args:
        model: the result of `model_of`.
        params: the tree. Its dtypes may differ from the model's.

    Raises:
        FzeroValueError, or `error`: lists every leaf that is missing, is not part of the model or has another shape,
            with both sides.
    """
    if model is None:
        return
    if hasattr(model, "check"):
        model.check()
    if params is None:
        return
    given, own = (dict(tree.with_paths(x, "params")) for x in (params, model.params))
    wrong = [f"{p}: missing, the model has {tree.describe(x)}" for p, x in own.items() if p not in given]
    wrong += [f"{p}: {tree.describe(x)}, not in the model" for p, x in given.items() if p not in own]
    wrong += [
        f"{p}: {tree.describe(given[p])}, the model has {tree.describe(x)}"
        for p, x in own.items()
        if p in given and given[p].shape != x.shape
    ]
    if wrong:
        what = (
            f"these are the parameters of a different model: {len(wrong)} "
            f"of {len(given.keys() | own.keys())} leaves differ"
        )
        fix = "give model.params, of the model that the step was made of, or make a step of the other model"
        raise error(owner, what, wrong, fix)
