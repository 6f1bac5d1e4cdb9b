"""Creates the first state: from an init function, from given parameters, or from weight files.

Each rank makes or reads only its own shards, and stores each leaf on its memory tier before it makes the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero._compat.allocator import return_freed_memory
from fzero.checkpoint import tensor_digests
from fzero.checkpoint.tensor_digests import Held
from fzero.checkpoint.weight_loading import WINDOW, Weights, open_weights
from fzero.comm import control_group
from fzero.compiler.abstract_values import abstract_params, recorded
from fzero.compiler.state_layouts import opt_state_inputs
from fzero.compiler.state_slots import slots_of
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf, leaf_of, leave, shard
from fzero.state import load, tensor_init, tensor_storage
from fzero.state.state_comparison import assembled, check_model, check_values
from fzero.step import INIT_STREAM, State, Step
from fzero.step.checks import check_params
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import signature

_Leaves = Callable[[tensor_init.Put], dict[int, torch.Tensor]]
"""Makes parameters and stores them on their memory tiers. Returns them by position."""


@dataclass(frozen=True)
class InitialParams:
    """The parameters from which the first state is made.

    Attributes:
        values: a tree of unsharded leaves; meta tensors if an init function makes them.
        graph: the recorded init function, if there is one.
        key: int64[3], on the mesh's device.
    """

    values: Any
    graph: Recorded | None
    key: torch.Tensor

    def compared(self, paths: Collection[str] | None = None) -> Held:
        """Returns the values that must be the same on all ranks: the key, and the init function or the leaves at
        `paths` (by default all)."""
        held: Held = {"key": (self.key, ())}
        if self.graph is not None:
            return {**held, "the init function": ("\n".join(map(str, signature(self.graph))), ())}
        leaves = tree.with_paths(self.values, "params")
        return {**held, **{path: (x, ()) for path, x in leaves if paths is None or path in paths}}

    def sharded(self, inputs: Inputs, mesh: Mesh, put: tensor_init.Put) -> dict[int, torch.Tensor]:
        """Makes this rank's shard of every parameter."""
        if self.graph is not None:
            return tensor_init.from_function(self.graph, self.key, inputs, mesh, put)
        flat = tree.leaves(self.values)
        # `put` stores each shard before the next one is made, so at most one is in memory for leaves off the device.
        return {i: put(shard(flat[i], inputs.leaves[i], mesh), inputs.leaves[i]) for i in inputs.distinct}


def initial_key(owner: str, key: torch.Tensor | None, mesh: Mesh) -> torch.Tensor:
    """Returns the given key on the mesh's device; by default `fz.random.key(0)`."""
    key = fzrandom.key(0) if key is None else key
    fzrandom.check_key(owner, key)
    return key.to(mesh.device)


def params_of_init(params: Any, key: torch.Tensor | None, mesh: Mesh, model: Any) -> InitialParams:
    """Checks the parameters that `init` was given and compares them between the ranks. An init function is recorded."""
    key = initial_key("init", key, mesh)
    given = InitialParams(params, None, key)

    def held() -> Held:
        nonlocal given
        if callable(params):
            given = InitialParams(*recorded(params, mesh.device_type), key)
            check_model("init", model, given.values)
        else:
            check_params(params)
            fix = "initialize a module on the meta device with train.init(model.init), or read files: "
            fix += "train.load(path), in fz.run run.state(train, load=path)"
            check_values("init", fix, params=params)
            check_model("init", model, params)
        return given.compared()

    tensor_digests.same(
        mesh,
        "init",
        held,
        "give all ranks the same: seed torch before parameters are drawn, or give a function of the key, which "
        "draws alike",
    )
    return given


def params_of_load(
    path: str | os.PathLike[str], params: Any, key: torch.Tensor | None, mesh: Mesh, model: Any, known: Inputs | None
) -> tuple[Weights, InitialParams]:
    """Opens the weight files that `load` reads. Returns them with the structure of their parameters.

    The structure is the given one; without it that of the model, else that of the last state (`known`), else the one
    that the names in the files imply.
    """
    key = initial_key("load", key, mesh)
    weights = open_weights(path, mesh)
    if params is None and model is not None:
        params = model.params
    elif params is None:
        params = load.structure(weights) if known is None else abstract_params(known)
    found = InitialParams(*recorded(params, mesh.device_type), key) if callable(params) else None
    found = found or InitialParams(params, None, key)
    check_params(found.values, "load")
    control_group.run_on_all_ranks(mesh.control, "load", lambda: check_model("load", model, found.values))
    return weights, found


def init_state(given: InitialParams, step: Step, mesh: Mesh, limits: Sequence[int | None], inputs: Inputs) -> State:
    """Creates the first state for `init`.

    Args:
        inputs: the leaf table of the parameters.
        limits: as in `tensor_storage.reserve`.
    """
    return _first_state("init", step, mesh, limits, inputs, given.key, lambda put: given.sharded(inputs, mesh, put))


def load_state(
    weights: Weights,
    given: InitialParams,
    step: Step,
    mesh: Mesh,
    limits: Sequence[int | None],
    inputs: Inputs,
    names: Mapping[str, str] | None,
    model: Any,
) -> State:
    """Creates the first state for `load`: all ranks together read the parameters that are in the files; the others are
    initialized."""
    graph, key = given.graph, given.key
    plan = load.plan(weights, given.values, inputs, names, model, graph)
    flat = tree.leaves(given.values)
    # The given values of the parameters that the files have are not used, so they may differ between ranks.
    held = given.compared([inputs.leaves[i].path for i in plan.missing if not flat[i].is_meta])
    tensor_digests.same(mesh, "load", lambda: held, "give all ranks the same parameters and key")

    def read(put: tensor_init.Put) -> dict[int, torch.Tensor]:
        return load.leaves(plan, inputs, mesh, put)

    def make(put: tensor_init.Put) -> dict[int, torch.Tensor]:
        if graph is not None:
            return tensor_init.from_function(graph, key, inputs, mesh, put, plan.missing)
        bare = [i for i in plan.missing if flat[i].is_meta]
        first = model.initial([plan.names[i] for i in bare], key) if bare and model is not None else {}
        values = {i: first[plan.names[i]] if i in bare else flat[i] for i in plan.missing}
        return {i: put(shard(x, inputs.leaves[i], mesh), inputs.leaves[i]) for i, x in values.items()}

    return _first_state("load", step, mesh, limits, inputs, key, make, read)


def _first_state(
    owner: str,
    step: Step,
    mesh: Mesh,
    limits: Sequence[int | None],
    inputs: Inputs,
    key: torch.Tensor,
    make: _Leaves,
    read: _Leaves | None = None,
) -> State:
    """Creates the first state.

    Args:
        make: makes parameters; each rank can do this independently.
        read: reads parameters; all ranks do this together.
    """
    opt_inputs = opt_state_inputs(step, mesh, inputs)
    places = tensor_storage.reserve(step, mesh, limits, inputs, opt_inputs, owner)
    buffer = tensor_storage.BUFFER if read is None else WINDOW

    def put(value: torch.Tensor | Iterator[torch.Tensor] | None, leaf: Leaf) -> torch.Tensor:
        return tensor_storage.put(value, leaf, places, mesh, buffer)

    def make_leaves() -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        made = stored | make(put)
        return made, tensor_init.opt_state(
            step, inputs, opt_inputs, lambda i: tensor_storage.load(made[i], mesh.device), mesh, put
        )

    stored = dict[int, torch.Tensor]()
    # Reading weight files is a collective operation, in which a rank that fails would leave the others waiting.
    with nullcontext() if read is None else control_group.unbroken(mesh):
        if read is not None:
            stored = control_group.run_on_all_ranks(mesh.control, owner, lambda: read(put))
        # if a disk or a file fails on one rank, every rank raises the error
        made, opt = (
            control_group.run_on_all_ranks(mesh.control, owner, make_leaves) if places or read else make_leaves()
        )
    # The init function received the key itself. The state needs another one, or the first step would draw the numbers
    # that the parameters were made of.
    rest = {"step": torch.zeros((), dtype=torch.int64), "key": fzrandom.fold_in(key, INIT_STREAM)}
    state = assembled(step, mesh, inputs, opt_inputs, made, opt, rest, places, owner)
    if places:  # the leaves were made in host memory, which has now been freed
        return_freed_memory()
    return state


def staged_state(state: State, step: Step, mesh: Mesh, inputs: Inputs) -> State:
    """Lays out a state for the stages of a pipeline that were unknown when the state was made.

    Until then every rank along the axis has all parameters. So each rank keeps the parameters of its stages, and
    nothing is sent.
    """
    opt_inputs = opt_state_inputs(step, mesh, inputs)
    slots = {leaf.path: leaf for leaf in slots_of(step, mesh, inputs).inputs.leaves}

    def kept(x: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        if leaf.is_on(mesh):
            return x
        # The stage that keeps the leaf uses the same tensor; this rank gives its memory back.
        if leaf_of(x) is not None:
            leave(x)
        return torch.empty(leaf.shard_numel(mesh), dtype=leaf.dtype, device=mesh.device)

    flat, opt = tree.leaves(state.params), tree.leaves(state.opt_state)
    params = {i: kept(flat[i], inputs.leaves[i]) for i in inputs.distinct}
    made = {i: kept(opt[i], opt_inputs.leaves[i]) for i in opt_inputs.distinct}
    rest = {p: kept(x, slots[p]) for p, x in tree.with_paths(state.extras, "extras") if p in slots}
    rest |= {"step": state.step, "key": state.key}
    return assembled(step, mesh, inputs, opt_inputs, params, made, rest, {}, "step")
