"""Runs a training step on a mesh: it makes or restores states and carries them on, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import random as fzrandom
from fzero import tree
from fzero.allocator import return_freed_memory
from fzero.arguments import count, plain_numbers
from fzero.build.cache import logger
from fzero.checkpoint.loading import WINDOW, open_weights
from fzero.comm import replicas
from fzero.comm.replicas import Held, replicas_of
from fzero.errors import CheckpointError, FzeroValueError
from fzero.layout import Leaf, in_slot, leaf_of, leave, shard
from fzero.lowering.auto import check_auto, resolve
from fzero.lowering.budget import Budget
from fzero.lowering.choose_formats import open_formats
from fzero.lowering.choose_rules import check_batch_given, choose_rules, open_rules
from fzero.lowering.choose_stages import choose_stages, open_stages
from fzero.lowering.layouts import (
    abstract,
    abstract_params,
    auto_of,
    batch_inputs,
    leaves_made_anew,
    opt_state_inputs,
    params_inputs,
    recorded,
    zero_of,
)
from fzero.lowering.lower import advice_on
from fzero.lowering.lowered import Lowered
from fzero.lowering.slots import slots_of
from fzero.measure import profile
from fzero.mesh import Mesh
from fzero.plan.devices import get_device
from fzero.plan.plan import PlanDecision
from fzero.plan.timeline import Event
from fzero.program.lines import Inputs
from fzero.program.ops import written_aside
from fzero.ranks import agreement
from fzero.runtime import formats
from fzero.runtime.compiled import Compiled, alone
from fzero.runtime.graphs import NotCaptured
from fzero.runtime.observe import observe
from fzero.runtime.told_errors import raise_out_of_memory
from fzero.runtime.watch import Agreement, AtMinimum, NotFinite, Raised, check_finite
from fzero.state import gather, initialize, load, local, storage
from fzero.state.assemble import (
    Last,
    abstract_state,
    assembled,
    check_layouts,
    check_memory,
    check_model,
    check_values,
    model_of,
    placed_inputs,
    state_leaves,
)
from fzero.step import INIT_STREAM, State, Step, lasting
from fzero.step.checks import check_one_batch, check_params, check_state, no_backward, state_and_batch
from fzero.trace.subgraph import signature
from fzero.train_state import mark_broken
from fzero.transforms.automatic_precision import Promotion
from fzero.transforms.base import find
from fzero.transforms.compress import Formats
from fzero.transforms.precision import MixedPrecision
from fzero.units import size

if TYPE_CHECKING:
    from fzero.checkpoint import Index

_Leaves = Callable[[initialize.Put], dict[int, torch.Tensor]]
"""Puts leaves of parameters where they rest; by position."""


class CompiledStep(Compiled):
    """A training step on a mesh. Made by `compile`. `step` is what it was made of and does not change; `resolved` is
    what it carries out.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, x = {"w": torch.eye(3)}, torch.ones(2, 3)
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> state = train.init(params)
        >>> state, metrics = train(state, x)
        >>> int(state.step), sorted(metrics)
        (1, ['finite', 'grad_norm', 'loss'])
    """

    owner = "step"

    def __init__(
        self,
        step: Step,
        mesh: Mesh,
        backend: str,
        limits: tuple[int | None, int | None, int | None],
        batch: Any = None,
        graphs: bool | None = False,
    ):
        super().__init__(step, mesh, backend, limits, graphs)
        if (auto := auto_of(step)) is not None:
            check_auto(auto, limits, batch is not None)
        if open_rules(step, mesh):
            check_batch_given(batch is not None)
        self._resolved = step
        self._batch = None if batch is None else batch_inputs(batch)
        precision = find(step.transforms, MixedPrecision)
        scaling = precision.scaling if precision else None
        self._at_minimum = (
            AtMinimum(mesh, scaling.minimum, precision.loss_scale_at_minimum == "raise")
            if precision and scaling
            else None
        )
        # with a loss scale steps that overflow are left out
        self._not_finite = NotFinite(mesh) if self._at_minimum is None else None
        self.calls = 0  # how many steps were taken
        # the formats of `compress("auto")`; None until the first program of a state that records none is lowered
        self._wire: Formats | None = ()
        self._agreement, self._raised, self._promotion, self._last = Agreement(), Raised(), Promotion(mesh), Last()
        # the last trees and a program, and the answer of `_has_spare`
        self._spare: tuple[Any, Any, bool] = (None, None, False)
        self._checked = WeakTensorKeyDictionary()  # leaves of states that have been looked at before their first step

    @property
    def resolved(self) -> Step:
        """The step that is carried out: `step` with its open choices decided. Where leaves rest for `offload("auto")`
        is decided by the first `init` or `restore`, and which blocks of `mixed_precision("auto")` compute in a safer
        dtype by `restore` and where a program is made.

        `fz.compose(*train.resolved.transforms)(fz.eval_step(fn))` is an evaluation of what was trained.
        """
        return self._resolved

    @property
    def knows_model(self) -> bool:
        """Whether it has made or restored a state, so that a state of another model is recognised."""
        return self._last.inputs is not None

    @property
    def _model(self) -> Any:
        return model_of(self.step.loss_fn)

    @alone("init", "made")
    def init(self, params: Any, key: torch.Tensor | None = None) -> State:
        """The first state, sharded from birth.

        Args:
            params: a function of a key that returns a pytree of tensors, or such a pytree with whole leaves (the same
                on every rank).
            key: int64[3]; by default `fz.random.key(0)`. The init function gets it as it is; the state's key derives
                from it.

        Communication: about a hundred bytes through the store, to compare what was given (the leaves are read once for
            it, 2.5 s of a core for 6 GB); every rank computes its own shards.
        Memory: this rank's part of the state and, for an init function, at most one whole leaf. Draws and pointwise
            operations are made shard by shard, in parts of 32 MiB for leaves off the device; other leaves are made
            whole and cut. A leaf that rests on disk is written, through two buffers of 16 MiB, before the next leaf is
            made.

        Raises:
            FzeroTypeError: leaves that are not tensors.
            FzeroValueError: paths of `offload` that cannot hold the leaves, with the numbers, before any is made;
                leaves of another model than that of the step (`fz.functionalize`), or one that has changed since.
            TraceError: an init function that draws from torch's global generator instead of its key.
            DivergenceError: ranks that give different parameters, keys or init functions.
        """
        key = fzrandom.key(0) if key is None else key
        fzrandom.check_key("init", key)
        key = key.to(self.mesh.device)
        graph = None

        def given() -> Held:
            nonlocal params, graph
            if callable(params):
                params, graph = recorded(params, self.mesh.device_type)
                check_model("init", self._model, params)
                return {"key": (key, ()), "the init function": ("\n".join(map(str, signature(graph))), ())}
            check_params(params)
            check_values("init", params=params)
            check_model("init", self._model, params)
            return {
                "key": (key, ()),
                **{p: (x, ()) for p, x in tree.with_paths(params, "params")},
            }

        replicas.same(
            self.mesh,
            "init",
            given,
            "give all ranks the same: seed torch before parameters are drawn, or give a function of the key, which "
            "draws alike",
        )
        self._resolve(params)
        inputs = self._known(params_inputs(self.resolved, self.mesh, params))

        def make(put: initialize.Put) -> dict[int, torch.Tensor]:
            if graph is not None:
                return initialize.from_function(graph, key, inputs, self.mesh, put)
            flat = tree.leaves(params)
            return {i: put(shard(flat[i], inputs.leaves[i], self.mesh), inputs.leaves[i]) for i in inputs.distinct}

        return self._first("init", key, inputs, make)

    @alone("load", "read and made")
    def load(
        self,
        path: str | os.PathLike[str],
        params: Any = None,
        key: torch.Tensor | None = None,
        *,
        names: Mapping[str, str] | None = None,
    ) -> State:
        """The first state of a model whose weights are safetensors files, each rank's part read straight to where it
        rests: a directory of Hugging Face's layout, or one file.

        Leaves are found by their dotted names (`fz.tree.names(params)`) and converted to the dtype that they rest in.
        Those that are not in the files begin anew, as `init` would make them, and are named in the log `fzero`; so is
        what the files have besides.

        Args:
            path: the directory, or a .safetensors file; or the URL of one.
            params: the form of the model: a function of a key that returns a pytree of tensors, or such a pytree with
                whole leaves. Its values stand for leaves missing from the files; on the meta device no leaf may be
                missing. By default that of the step's model (`fz.functionalize`), else what was last made or restored,
                else nested dicts and lists as the files' names say, in their dtypes.
            key: int64[3]; by default `fz.random.key(0)`.
            names: the stored names of leaves that have others there. By default the model says what it is made of
                (`fz.hf`: renamed and fused weights too).

        Communication: a leaf that several ranks hold is read by them in parts and gathered, so that all ranks together
            read each byte once; besides, a few hundred bytes through the store.
        Memory: this rank's part of the state, and 44 MiB.

        Raises:
            CheckpointError: files that are missing, truncated or malformed; another model's; leaves of other shapes,
                or in dtypes that are not converted (whole numbers, 8 bits): all at once, before any is made.
            FzeroTypeError, FzeroValueError, TraceError: as for `init`.
            DivergenceError: ranks that see different files, or give different parameters or keys.

        Example:
            >>> import tempfile, torch, fzero as fz
            >>> from safetensors.torch import save_file
            >>> path = tempfile.mkdtemp() + "/model.safetensors"
            >>> save_file({"w": torch.ones(3, dtype=torch.bfloat16)}, path)
            >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
            >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
            >>> train.load(path, {"w": torch.empty(3, device="meta")}).params
            {'w': tensor([1., 1., 1.])}
        """
        key = fzrandom.key(0) if key is None else key
        fzrandom.check_key("load", key)
        key, model, graph = key.to(self.mesh.device), self._model, None
        weights = open_weights(path, self.mesh)
        known = self._last.inputs if params is None and model is None else None
        if params is None and model is not None:
            params = model.params
        elif params is None:
            params = load.structure(weights) if known is None else abstract_params(known)
        whole = params
        if callable(params):
            whole, graph = recorded(params, self.mesh.device_type)
        check_params(whole, "load")
        agreement.everywhere(self.mesh, "load", lambda: check_model("load", model, whole))
        self._resolve(whole)
        inputs = self._known(params_inputs(self.resolved, self.mesh, whole))
        plan = load.plan(weights, whole, inputs, names, model, graph)
        flat = tree.leaves(whole)
        held: Held = {"key": (key, ())}
        if graph is not None:
            held = {**held, "the init function": ("\n".join(map(str, signature(graph))), ())}
        else:
            held = {**held, **{inputs.leaves[i].path: (flat[i], ()) for i in plan.missing if not flat[i].is_meta}}
        replicas.same(self.mesh, "load", lambda: held, "give all ranks the same parameters and key")

        def read(put: initialize.Put) -> dict[int, torch.Tensor]:
            return load.leaves(plan, inputs, self.mesh, put)

        def make(put: initialize.Put) -> dict[int, torch.Tensor]:
            if graph is not None:
                return initialize.from_function(graph, key, inputs, self.mesh, put, plan.missing)
            bare = [i for i in plan.missing if flat[i].is_meta]
            first = model.initial([plan.names[i] for i in bare], key) if bare and model is not None else {}
            values = {i: first[plan.names[i]] if i in bare else flat[i] for i in plan.missing}
            return {i: put(shard(x, inputs.leaves[i], self.mesh), inputs.leaves[i]) for i, x in values.items()}

        return self._first("load", key, inputs, make, read)

    def _first(
        self, owner: str, key: torch.Tensor, inputs: Inputs, make: _Leaves, read: _Leaves | None = None
    ) -> State:
        """The first state, of parameters that all ranks `read` together, and of the others, which each can `make`."""
        opt_inputs = opt_state_inputs(self.resolved, self.mesh, inputs)
        places = self._places(inputs, opt_inputs, owner)
        buffer = storage.BUFFER if read is None else WINDOW

        def put(value: torch.Tensor | Iterator[torch.Tensor] | None, leaf: Leaf) -> torch.Tensor:
            return storage.put(value, leaf, places, self.mesh, buffer)

        def bear() -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
            made = stored | make(put)
            return made, initialize.opt_state(
                self.resolved, inputs, opt_inputs, lambda i: storage.load(made[i], self.mesh.device), self.mesh, put
            )

        stored = dict[int, torch.Tensor]()
        with nullcontext() if read is None else agreement.unbroken(self.mesh):
            if read is not None:
                stored = agreement.everywhere(self.mesh, owner, lambda: read(put))
            # a disk or file that fails on one rank is every rank's error
            made, opt = agreement.everywhere(self.mesh, owner, bear) if places or read else bear()
        rest = {"step": torch.zeros((), dtype=torch.int64), "key": fzrandom.fold_in(key, INIT_STREAM)}
        state = assembled(self.resolved, self.mesh, inputs, opt_inputs, made, opt, rest, places, owner)
        self._last.keep(inputs, state.params, state.opt_state, extras=state.extras)
        if places:  # leaves were made that rest elsewhere now
            return_freed_memory()
        return state

    def _resolve(self, params: Any) -> None:
        """Decides the open choices of the step, for a tree of whole leaves: the cuts of parameters, and the tiers."""
        if open_rules(self.resolved, self.mesh):
            assert self._batch is not None
            self._resolved, self._chosen = choose_rules(self.resolved, self.mesh, params, self._batch)
        if auto_of(self.resolved) is not None:
            budget = self._rates()
            assert budget is not None and self._batch is not None
            self._resolved, more, _ = resolve(self.resolved, self.mesh, params, self._batch, budget)
            self._chosen = (*self._chosen, *more)
        if self._batch is not None and open_stages(self.resolved, self.mesh):
            self._resolved, more = choose_stages(self.resolved, self.mesh, params, self._batch)
            self._chosen = (*self._chosen, *more)

    @property
    def awaits_batch(self) -> bool:
        """Whether the stages of a `pipeline` are laid out at the first step, because `compile` was given no batch."""
        return self._batch is None and open_stages(self.resolved, self.mesh) is not None

    def _in_stages(self, state: State, batch: Any) -> State:
        """The state laid out for the stages of a pipeline, which `compile` knew no batch for. Until the first batch
        every rank along the axis has all leaves, so each keeps those of its stages, and nothing is sent."""
        found = self._inputs(state)
        whole, self._batch = abstract_params(found), batch_inputs(batch)
        try:
            self._resolve(whole)
        except BaseException:
            self._batch = None
            raise
        inputs = self._known(params_inputs(self.resolved, self.mesh, whole))
        opt_inputs = opt_state_inputs(self.resolved, self.mesh, inputs)
        slots = {leaf.path: leaf for leaf in slots_of(self.resolved, self.mesh, inputs).inputs.leaves}

        def kept(x: torch.Tensor, leaf: Leaf) -> torch.Tensor:
            if leaf.is_on(self.mesh):
                return x
            if leaf_of(x) is not None:
                leave(x)
            return torch.empty(leaf.shard_numel(self.mesh), dtype=leaf.dtype, device=self.mesh.device)

        flat, opt = tree.leaves(state.params), tree.leaves(state.opt_state)
        params = {i: kept(flat[i], inputs.leaves[i]) for i in inputs.distinct}
        made = {i: kept(opt[i], opt_inputs.leaves[i]) for i in opt_inputs.distinct}
        rest = {p: kept(x, slots[p]) for p, x in tree.with_paths(state.extras, "extras") if p in slots}
        rest |= {"step": state.step, "key": state.key}
        state = assembled(self.resolved, self.mesh, inputs, opt_inputs, params, made, rest, {}, "step")
        self._last.keep(inputs, state.params, state.opt_state, extras=state.extras)
        return state

    def _places(self, params: Inputs, opt_state: Inputs, owner: str) -> dict[str, torch.Tensor]:
        """Places in a new state for the leaves off the device."""
        self._last.let_go()  # a state that nobody else holds any more makes room for the new one
        self._spare = (None, None, False)
        return storage.reserve(self.resolved, self.mesh, self.limits, params, opt_state, owner)

    @alone("restore", "read")
    def restore(self, path: str | os.PathLike[str] | Index, params: Any = None) -> State:
        """The state a checkpoint holds, laid out as this step wants it: any mesh, any stage, bit for bit.

        Args:
            path: a checkpoint directory, or the directory of checkpoints (its latest), or a URL of one, or what
                `fz.checkpoint.describe` returned.
            params: what the model is expected to look like: a pytree of tensors (meta will do) or an init function. By
                default what `init` was called with, else that of the step's model (`fz.functionalize`), else what the
                checkpoint says.

        Communication: a few bytes, to agree on the checkpoint (the latest is what the first rank finds) and that all
            ranks could read it; every rank reads the ranges it needs.
        Memory: this rank's part of the state; of what rests on disk 64 MiB at a time.

        Raises:
            CheckpointError: a damaged or incomplete checkpoint, or one of another model, listing every difference;
                ranks that see different checkpoints, with the directory and the step of each.
            FzeroValueError: paths of `offload` that cannot hold the leaves, with the numbers, before anything is read.
        """
        from fzero import checkpoint

        index = checkpoint.describe(path, self.mesh)
        model = self._model
        agreement.everywhere(self.mesh, "restore", lambda: check_model("restore", model))
        if params is None and self._last.inputs is not None:
            inputs = self._last.inputs
        else:
            if params is None:
                whole = checkpoint.structure(index).params if model is None else model.params
            else:
                whole = abstract(params) if callable(params) else params
                check_model(index.owner, model, whole, CheckpointError)
            self._resolve(whole)
            inputs = self._known(params_inputs(self.resolved, self.mesh, whole))
        opt_inputs = opt_state_inputs(self.resolved, self.mesh, inputs)
        slots = slots_of(self.resolved, self.mesh, inputs)
        names = dict(
            zip(
                tree.names(abstract_state(inputs, opt_inputs, slots)),
                state_leaves(inputs, opt_inputs, slots),
                strict=True,
            )
        )
        stored = {name: name.split(".")[1] for name in index.leaves if name.startswith("extras.")}
        anew = {n: leaf for n, leaf in names.items() if in_slot(leaf) and leaf.role not in stored.values()}
        names = {n: leaf for n, leaf in names.items() if n not in anew}
        if anew and self.mesh.rank == 0:
            leaves = ", ".join(leaf.path for leaf in anew.values())
            logger.warning("%s has no values of these leaves, which begin anew: %s", index, leaves)
        # a slot that this step has not is left behind
        held = {n: x for n, x in index.leaves.items() if n not in stored or stored[n] in slots.owners}
        index = replace(index, leaves=held)
        others = local.of_other_ranks(index, names, slots)
        checkpoint.check(index, {n: (leaf.shape, leaf.dtype) for n, leaf in (names | others).items()})
        if counted := {n: leaf for n, leaf in names.items() if leaf.role == "precision"}:
            # before leaves that follow from the dtypes are laid out
            found = checkpoint.read(index, counted, self.mesh)
            counts = slots.of({leaf.path: found[n] for n, leaf in counted.items()})["precision"]
            self._resolved = self._promotion.resolved(self.resolved, inputs.leaves, counts)
        places = self._places(inputs, opt_inputs, "restore")
        read = checkpoint.read(index, {n: leaf for n, leaf in names.items() if n not in others}, self.mesh, into=places)
        read |= local.read_added(index, others, names, self.mesh)
        by_path = {leaf.path: read[n] for n, leaf in names.items()}
        made = {i: by_path[inputs.leaves[i].path] for i in inputs.distinct}
        opt = {i: by_path[opt_inputs.leaves[i].path] for i in opt_inputs.distinct}
        rest = {p: by_path[p] for p in slots.leaves if p in by_path}
        state = assembled(self.resolved, self.mesh, inputs, opt_inputs, made, opt, rest, places, "restore")
        self._last.keep(inputs, state.params, state.opt_state, extras=state.extras)
        return state

    @alone("gather")
    def gather(self, state: State) -> State:
        """The whole state as plain host tensors, on every rank.

        Communication: one all_gather a sharded leaf, and a few bytes through the store. Memory: the whole state in host
            memory: for small models and tests.

        Raises:
            FzeroTypeError: what is not a state.
            DivergenceError: a rank that did not come: with sharded leaves all ranks call it.
        """
        check_state(state, "gather what train.init, train.restore or a step returned", "gather")
        if any((of := leaf_of(x)) is not None and of[0].layout.apart for x in tree.leaves(state)):
            agreement.everywhere(self.mesh, "gather", lambda: None)  # a rank that does not come is named
        with agreement.unbroken(self.mesh):
            return gather.whole(state, self.mesh)

    @state_and_batch
    @alone("step")
    def __call__(self, state: State, batch: Any, *more: Any) -> tuple[State, dict[str, Any]]:
        """One step. `state` is donated: its tensors are written in place and are those of the returned state.

        Args:
            state: from `init` or `restore`.
            batch: this rank's part of the global batch, the same shapes on every rank.

        Returns: the new state, and the metrics: `loss`, `grad_norm` (before clipping), `finite` and, with `has_aux`,
            `aux`, over the whole mesh, as 0-dim tensors that have not been waited for; with a loss scale also
            `loss_scale`, `skipped` and `loss_scale_at_minimum`. Which entries are scalars: docs/tutorial.md, "What
            metrics hold".

        Raises:
            FzeroTypeError: more arguments than a state and one batch.
            FzeroValueError: before a state's first step, trained parameters in memory that are not finite; a state laid
                out for another step; new values of leaves (`train_step(mutable=...)`) that must agree and do not; a
                condition under which the loss function raises. On an asynchronous device these two come one step later.
            DivergenceError: before a state's first step, replicas that differ between ranks, as `check_replicas` says;
                ranks with different calls; a call that has ended in the middle on some rank, at that call and every
                later one on the mesh (docs/restarts.md).
            BusyError: another thread is using the mesh: steps, evaluations, `init`, `restore`, `gather` and
                `fz.checkpoint.save` are for one thread at a time.
            OutOfMemory: of the device or the host. Whatever ends a step in the middle, Ctrl-C too, its state is of no
                more use: steps, `gather` and `fz.checkpoint.save` refuse it.
            LossScaleError: with `mixed_precision(..., loss_scale_at_minimum="raise")`, an overflow at the minimum
                scale; the state is as after that step.
        """
        check_one_batch(more)
        flat, structure = tree.flatten(batch)
        if self.awaits_batch:
            state = self._in_stages(state, batch)
        lowered, run = self._built(state, batch, flat, structure)
        batch = tree.unflatten(structure, self._on_device(batch, flat, self._last.storages))
        aside = self._has_spare(state)
        trees = state.step, state.params, state.opt_state, state.key, state.extras
        try:
            with torch.no_grad():
                outputs = run(*trees, batch, aside=aside)
        except NotCaptured:
            raise
        except BaseException as error:
            mark_broken(state, error)
            self._last.let_go()  # the next call looks at its state
            if isinstance(error, (RuntimeError, MemoryError)):
                raise_out_of_memory(error, self.owner, lambda: self._advice(lowered))
            raise
        self.calls += 1
        metrics = tree.unflatten(lowered.structure, outputs)
        no_backward(metrics["loss"])
        if "raised" in metrics:
            self._raised(metrics.pop("raised"), lowered.raises, state)
        if self._at_minimum is not None:
            self._at_minimum(metrics["loss_scale_at_minimum"])
        if self._not_finite is not None:
            trained = lambda: self.resolved.trains(abstract_params(lowered.params))  # noqa: E731
            self._not_finite(metrics["finite"], state, lowered.params, trained)
        if "agreed" in metrics:
            mutable = [
                lowered.params.leaves[i] for i in lowered.params.distinct if lowered.params.leaves[i].role == "mutable"
            ]
            self._agreement(metrics.pop("agreed"), [leaf.path for leaf in mutable if not leaf.dtype.is_floating_point])
        return state, metrics

    def _advice(self, lowered: Lowered) -> list[str]:
        """The memory that a program was planned with, and transforms that lower it."""
        found = self.plan
        kind = self.mesh.device.type
        total = torch.cuda.mem_get_info(self.mesh.device)[1] if kind == "cuda" else None
        problems = [f"planned: {size(found.peak_bytes)}" + (f" of {size(total)}" if total else "")]
        if total is not None and found.peak_bytes <= total:
            problems.append("what else this process or another one holds on the device is not a part of that")
            total = None
        budget = Budget(total, get_device(None, kind), self.backend)
        return problems + advice_on(self.resolved, self.mesh, lowered.params, lowered.batch, budget, found)

    def built(self, state: State, batch: Any) -> tuple[Lowered, Callable[..., Any]]:
        """The executable that a step of this state on such a batch runs: lowered and built, if it was not yet, and not
        run."""
        return self._built(state, batch, *tree.flatten(batch))

    def _built(
        self, state: State, batch: Any, flat: list[Any], structure: tree.TreeSpec
    ) -> tuple[Lowered, Callable[..., Any]]:
        params = self._inputs(state)
        if not self._last.begun:
            self._begin(state, params, batch)
            if open_formats(self.resolved) is not None:
                self._wire = formats.recorded(state)
        self._last.begun, before = True, self._wire
        lowered, run = self._run_for(params, batch, flat, structure, lambda: self._promote(state, params))
        if self._wire is not None and self._wire != before:
            formats.record(state, self._wire)
        return lowered, run

    def _formats(self) -> Formats | None:
        return self._wire

    def _begin(self, state: State, params: Inputs, batch: Any) -> None:
        """Looks at a state before its first step, and at its batch: one with leaves that no step has begun with. Alike
        on every rank."""
        leaves = tree.leaves((state.params, state.opt_state))
        if all(x in self._checked for x in leaves):
            return
        trained = self.resolved.trains(abstract_params(params))
        agreement.everywhere(self.mesh, "step", lambda: check_finite(state.params, params, trained, self.mesh))
        self._compare(state)
        self._compare_batch(batch)
        self._checked.update((x, True) for x in leaves)

    @alone("check_replicas")
    def check_replicas(self, state: State) -> None:
        """Compares the parts of a state that several ranks hold. Its first step does it, and `fz.checkpoint.save`;
        between those it is for whoever suspects a drift.

        Args:
            state: as in a step. Leaves on disk are skipped, and leaves of which no two ranks hold the same part.

        Communication: about a hundred bytes through the store. The leaves are read once, where they are: on a CPU 2.5 s
            of a core for 6 GB.

        Raises:
            DivergenceError: names every leaf of which two ranks hold different values, and the ranks.
            BusyError: another thread is using the mesh.
        """
        self._compare(state)

    def _compare(self, state: State) -> None:
        def held() -> Held:
            check_state(state, "give what train.init, train.restore or a step returned", "check_replicas")
            parts = {
                "params": state.params,
                "opt_state": state.opt_state,
                "extras": lasting(state).extras,
                "step": state.step,
                "key": state.key,
            }
            named = {p: x for role, part in parts.items() for p, x in tree.with_paths(part, role)}
            return replicas_of(named)

        replicas.same(
            self.mesh,
            "step",
            held,
            "restore the last checkpoint; nothing may write to a state between steps, unless it does so alike on every "
            "rank",
        )

    def _compare_batch(self, batch: Any) -> None:
        """Raises if ranks have different batches along an axis that cuts no batch."""
        axes = zero_of(self.resolved, self.mesh).batch_axes
        others = [axis for axis, size in self.mesh.axes.items() if size > 1 and axis not in axes]
        if not others:
            return
        leaves = tree.with_paths(batch, "batch")
        held = {path: (x, axes) for path, x in leaves if isinstance(x, torch.Tensor)}
        fix = f"give all ranks along {', '.join(map(repr, others))} the same batch: "
        fix += (
            f"choose it by mesh.index({axes!r}) of mesh.axis_size({axes!r})"
            if axes
            else "every rank has the whole batch"
        )
        replicas.same(self.mesh, "step", lambda: held, fix)

    def _promote(self, state: State, params: Inputs) -> None:
        """Promotes blocks by the counts of the state at hand, before a program is built."""
        found = self._promotion.before_build(self.resolved, params.leaves, state.extras, self._laid_out(params))
        self._resolved = found

    def _laid_out(self, params: Inputs) -> Callable[[Step], Any]:
        return lambda step: leaves_made_anew(step, self.mesh, params)

    def _build(self, params: Inputs, batch: Any) -> tuple[Lowered, Callable[[], Callable[[], Callable[..., Any]]]]:
        lowered, built = super()._build(params, batch)
        # axes that have one rank now keep their formats
        self._wire = tuple({x.axis: x for x in (*(self._wire or ()), *lowered.choice.wire)}.values())
        promoted = self._promotion.explained(self.resolved, params.leaves, lowered.watched)
        return replace(lowered, chosen=(*lowered.chosen, *(PlanDecision(*x) for x in promoted))), built

    def _has_spare(self, state: State) -> bool:
        """Whether all that the program writes aside on disk has a second place there. Seen to when it first runs with a
        state."""
        if self._spare[0] is not self._last.trees or self._spare[1] is not self.program:
            leaves = {
                leaf_of(x)[0].path: x  # type: ignore[index]
                for x in tree.leaves((state.params, state.opt_state, state.extras))
                if leaf_of(x) is not None
            }
            self._spare = (
                self._last.trees,
                self.program,
                storage.spare([leaves[self.program.leaves[n].path] for n in written_aside(self.program)], self.mesh),
            )
        return self._spare[2]

    @plain_numbers
    def profile(self, state: State, batch: Any, steps: int = 3) -> tuple[State, list[Event]]:
        """Trains `steps` steps and one before them on one batch, each line timed: `train.plan.save_trace(path,
        measured)` shows it beside the plan.

        Args:
            state: donated, as in a step.
            batch: this rank's part of the global batch, the same shapes on every rank.
            steps: their number; the fastest is returned.

        Returns: the state after these steps, and the events of one.

        Raises:
            FzeroValueError: a number of steps below 1.
        """
        if problems := count("steps", steps):
            raise FzeroValueError("profile", "invalid arguments", problems, "e.g. train.profile(state, batch, steps=3)")
        state, _ = self(state, batch)
        run = next(kept.run for kept in self._runs.values() if kept.lowered is self._lowered)
        measured: list[list[Event]] = []
        for _ in range(steps):
            timer = profile.Timer(self.mesh.device)
            with observe(run, self.program, timer.before, timer.after):
                state, _ = self(state, batch)
            measured.append(timer.events())
        return state, min(measured, key=lambda events: events[-1].start + events[-1].seconds - events[0].start)

    def _inputs(self, state: State) -> Inputs:
        check_state(state, "make one with train.init or train.restore")
        if not self._last.holds(state.params, state.opt_state, extras=state.extras):
            check_params(state.params)
            check_values("step", params=state.params, opt_state=state.opt_state)
            check_memory("step", params=state.params, opt_state=state.opt_state)
            found, opt = (
                placed_inputs(state.params, mutable=self.resolved.mutates),
                placed_inputs(state.opt_state, "opt_state"),
            )
            check_model("step", self._model, abstract_params(found))
            self._resolve(abstract_params(found))
            check_layouts(self.resolved, self.mesh, state, found, opt)
            known = self._last.inputs
            if known is None or not known.alike(found):
                known = self._known(found)
            self._last.keep(known, state.params, state.opt_state, extras=state.extras)
        return self._last.checked()
