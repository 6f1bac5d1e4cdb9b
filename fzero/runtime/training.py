"""A training step on a mesh: it makes states, or restores them, and carries them on, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero.auto import check_auto
from fzero.errors import BudgetError, FzeroTypeError, FzeroValueError, message
from fzero.layout import LOSS_SCALE, PRECISION, Leaf, home_of, leaf_of, place, shard
from fzero.leaves import (
    abstract,
    abstract_params,
    auto_of,
    batch_inputs,
    compute_leaves,
    extra_leaves,
    offloads,
    opt_state_inputs,
    params_inputs,
    precision_of,
    recorded,
)
from fzero.lower import Lowered, resolve
from fzero.mesh import Mesh, return_freed_memory
from fzero.program import counters
from fzero.program.guess import guessed_leaves
from fzero.program.trace import Inputs
from fzero.runtime import agree, birth, gather, profile, resting, safer
from fzero.runtime.compiled import Compiled
from fzero.runtime.states import KEPT, abstract_state, differences, differing_extras, first_leaves, kept, placed_inputs, state_leaves
from fzero.runtime.watch import AtMinimum, check_finite
from fzero.schedule.plan import Decision
from fzero.schedule.timeline import Event
from fzero.step import INIT_STREAM, State, Step, check_params
from fzero.transforms.base import find
from fzero.transforms.offload import paths_of
from fzero.transforms.precision import MixedPrecision


class CompiledStep(Compiled):
    """A training step on a mesh. Made by `compile`. `step` is what it carries out: what `offload("auto")` leaves open is decided by `init` or `restore`."""

    def __init__(self, step: Step, mesh: Mesh, backend: str, limits: tuple[int | None, int | None, int | None], batch: Any = None):
        super().__init__(step, mesh, backend, limits)
        if (auto := auto_of(step)) is not None:
            check_auto(auto, limits, batch is not None)
        self._batch = None if batch is None else batch_inputs(batch)
        precision = find(step.transforms, MixedPrecision)
        scaling = precision.scaling if precision else None
        self._at_minimum = AtMinimum(mesh, scaling.minimum, precision.loss_scale_at_minimum == "raise") if precision and scaling else None
        self._params: Inputs | None = None
        self._moved: tuple[Decision, ...] = ()  # the blocks that compute in a safer dtype
        self._counts: Any = None  # what that was decided by
        self._guesses: tuple[Any, Any, bool] = (None, None, False)  # `_of` and a program, and what `_may_guess` found of them
        self._of: tuple[Any, Any, Any] | None = None  # the trees of the state that was checked last, `_first` of them; self._params describes the first

    def init(self, params: Any, key: torch.Tensor | None = None) -> State:
        """The first state, sharded from birth.

        Args:
            params: a function of a key that returns a pytree of tensors, or such a pytree with whole leaves (the same on every rank).
            key: int64[3]; by default `fz.random.key(0)`. The init function gets it as it is; the state's key derives from it.

        Communication: none: every rank computes its own shards. With leaves off the device a few bytes through the store.
        Memory: this rank's part of the state and, for an init function, one whole leaf at most: draws and pointwise operations are
            made shard by shard, and in parts of 32 MiB where they rest off the device; what cannot be is made whole and cut. What rests on disk is written,
            through two buffers of 16 MiB, before the next leaf is made.

        Raises:
            FzeroTypeError: leaves that are not tensors.
            FzeroValueError: paths of `offload` that cannot hold the leaves, with the numbers, before any is made.
            TraceError: an init function that draws from torch's global generator instead of its key.
        """
        key = (fzrandom.key(0) if key is None else key).to(self.mesh.device)
        graph = None
        if callable(params):
            params, graph = recorded(params, self.mesh.device_type)
        else:
            check_params(params)
        self._resolve(params)
        inputs = params_inputs(self.step, self.mesh, params)
        opt_inputs = opt_state_inputs(self.step, self.mesh, inputs)
        places = self._places(inputs, opt_inputs, "init")

        def put(value: torch.Tensor | Iterator[torch.Tensor] | None, leaf: Leaf) -> torch.Tensor:
            return resting.put(value, leaf, places, self.mesh)

        def bear() -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
            if graph is not None:
                made = birth.from_function(graph, key, inputs, self.mesh, put)
            else:
                flat = tree.leaves(params)
                made = {i: put(shard(flat[i], inputs.leaves[i], self.mesh), inputs.leaves[i]) for i in inputs.distinct}
            return made, birth.opt_state(self.step, inputs, opt_inputs, lambda i: resting.load(made[i], self.mesh.device), self.mesh, put)

        made, opt = agree.everywhere(self.mesh, "init", bear) if places else bear()  # a disk that fails on one rank is every rank's error
        rest = {"step": torch.zeros((), dtype=torch.int64), "key": fzrandom.fold_in(key, INIT_STREAM)}
        state = self._state(inputs, opt_inputs, made, opt, rest, places, "init")
        if places:  # leaves were made that rest elsewhere now
            return_freed_memory()
        return state

    def _resolve(self, params: Any) -> None:
        """Decides what the step leaves open of what rests where, for a tree of whole leaves."""
        if auto_of(self.step) is not None:
            budget = self._rates()
            assert budget is not None and self._batch is not None
            self.step, self._chosen = resolve(self.step, self.mesh, params, self._batch, budget)

    def _places(self, params: Inputs, opt_state: Inputs, owner: str) -> dict[str, torch.Tensor]:
        """What stands in a new state for the leaves off the device; raises if those on it are more than the memory budget, before any is made."""
        self._of, self._guesses = None, (None, None, False)  # a state that nobody else holds any more makes room for the new one
        leaves = [*resting.travelling(params, opt_state), *compute_leaves(self.step, self.mesh, params).values()]
        tiers: list[tuple[set[str], str]] = [({"device"}, ""), ({"host"}, " of host memory"), ({"disk"}, " on disk")]
        if self.mesh.unified_memory:
            tiers[:2] = [({"device", "host"}, ""), (set(), "")]
        problems = []
        for (names, where), limit in zip(tiers, self.limits, strict=True):
            rests = sum(resting.resting_bytes(leaf, self.mesh) for leaf in leaves if leaf.layout.tier in names)
            if limit is not None and rests > limit:
                problems.append(f"the state takes {rests:,} bytes{where} on each rank, {rests - limit:,} more than {limit:,}")
        if problems:
            fix = "shard more of it: fz.shard_params; or keep it elsewhere: fz.offload; or raise the budget"
            raise BudgetError(message("memory_budget", "the state alone does not fit", problems, fix))
        places = resting.allocate(leaves, self.mesh, paths_of(offloads(self.step)), owner)
        return {leaf.path: x for leaf, x in zip(leaves, places, strict=True) if x is not None}

    def restore(self, path: str | Path, params: Any = None) -> State:
        """The state a checkpoint holds, laid out as this step wants it: any mesh, any stage, bit for bit.

        Args:
            path: a checkpoint directory, or the directory of checkpoints (its latest).
            params: what the model is expected to look like: a pytree of tensors (meta will do) or an init function. By default what `init` was
                called with, else what the checkpoint says.

        Communication: none: every rank reads the ranges it needs; a few bytes to agree that all could.
        Memory: this rank's part of the state; of what rests on disk 64 MiB at a time.

        Raises:
            CheckpointError: a damaged or incomplete checkpoint, or one of another model, listing every difference.
            FzeroValueError: paths of `offload` that cannot hold the leaves, with the numbers, before anything is read.
        """
        from fzero import checkpoint

        saved = checkpoint.structure(path)
        if params is None and self._params is not None:
            inputs = self._params
        else:
            whole = saved.params if params is None else abstract(params) if callable(params) else params
            self._resolve(whole)
            inputs = params_inputs(self.step, self.mesh, whole)
        opt_inputs = opt_state_inputs(self.step, self.mesh, inputs)
        extras = extra_leaves(self.step, inputs)
        names = dict(zip(tree.names(abstract_state(inputs, opt_inputs, extras)), state_leaves(inputs, opt_inputs, extras), strict=True))
        index = checkpoint.describe(path)
        for role in KEPT:
            held = {name for name in index.leaves if name.startswith(f"extras.{role}.")}
            if not held:  # of a step without it: it begins anew
                names = {n: leaf for n, leaf in names.items() if leaf.role != role}
            elif role not in {leaf.role for leaf in names.values()}:  # of a step with it, that is not wanted any more
                index = replace(index, leaves={n: x for n, x in index.leaves.items() if n not in held})
        checkpoint.check(index, {n: (leaf.shape, leaf.dtype) for n, leaf in names.items()})
        if counted := {n: leaf for n, leaf in names.items() if leaf.role == "precision"}:  # before what follows from the dtypes is laid out
            found = checkpoint.read(path, counted, self.mesh)
            counts = kept({leaf.path: found[n] for n, leaf in counted.items()})["precision"]
            self.step = safer.resolved(self.step, inputs, counts, self.mesh)
        places = self._places(inputs, opt_inputs, "restore")
        read = checkpoint.read(path, names, self.mesh, into=places)
        by_path = {leaf.path: read[n] for n, leaf in names.items()}
        made = {i: by_path[inputs.leaves[i].path] for i in inputs.distinct}
        opt = {i: by_path[opt_inputs.leaves[i].path] for i in opt_inputs.distinct}
        rest = {p: by_path[p] for p in extras if p in by_path}
        return self._state(inputs, opt_inputs, made, opt, rest, places, "restore")

    def gather(self, state: State) -> State:
        """The whole state as plain host tensors, on every rank.

        Communication: one all_gather a sharded leaf. Memory: the whole state in host memory: for small models and tests.
        """
        return gather.whole(state, self.mesh)

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """One step. `state` is donated: its tensors are written in place and are those of the returned state.

        Args:
            state: from `init` or `restore`.
            batch: this rank's part of the global batch, the same shapes on every rank.

        Returns: the new state, and the metrics: `loss`, `grad_norm` (before clipping), `finite` and, with `has_aux`, `aux`, over the whole
            mesh, as 0-dim tensors that have not been waited for; with a loss scale also `loss_scale`, `skipped` and `loss_scale_at_minimum`. A step with
            leaves or activations off the device also says what binds it on this rank, in plain numbers: `speed_of_light`, `links`, `bound_by`
            (docs/transforms/offload.md).

        Raises:
            FzeroValueError: before the first step, trained parameters that are not finite, of those in memory; a state laid out for another step.
            LossScaleError: with `mixed_precision(..., loss_scale_at_minimum="raise")`, an overflow at the minimum scale; the state is as after that step.
        """
        lowered, run = self.built(state, batch)
        flat, structure = tree.flatten(batch)
        batch = tree.unflatten(structure, self._on_device(batch, flat))
        with torch.no_grad(), agree.transferring(self.mesh):
            outputs = run(state.step, state.params, state.opt_state, state.key, state.extras, batch, guesses=self._may_guess(state))
        metrics, limits = tree.unflatten(lowered.structure, outputs), run.limits  # type: ignore[attr-defined]
        if self._at_minimum is not None:
            self._at_minimum(metrics["loss_scale_at_minimum"])
        return state, metrics if limits is None else {**metrics, **limits.metrics}

    def built(self, state: State, batch: Any) -> tuple[Lowered, Callable[..., Any]]:
        """What a step of this state on such a batch runs: lowered and built, if it was not yet, and not run."""
        params = self._inputs(state)
        if not self._runs:
            trained = self.step.trains(abstract_params(params))
            agree.everywhere(self.mesh, "step", lambda: check_finite(state.params, params, trained, self.mesh))
        return self._run_for(params, batch, tree.leaves(batch), lambda: self._make_safer(state, params))

    def _make_safer(self, state: State, params: Inputs) -> None:
        """Moves what `mixed_precision("auto")` would move by the counts of a state, unless that has been laid out otherwise: then the next restore does."""
        if (counts := state.extras.get("precision")) is not None:
            step = safer.resolved(self.step, params, counts, self.mesh)
            if compute_leaves(step, self.mesh, params) == compute_leaves(self.step, self.mesh, params):
                self.step, self._counts = step, counts
                if (scaling := precision_of(step).loss_scale) is not None:
                    safer.renew(state.extras["loss_scale"], scaling, counts)

    def _build(self, params: Inputs, batch: Any) -> tuple[Lowered, Callable[[], Callable[..., Any]]]:
        lowered, finish = super()._build(params, batch)
        if self._counts is not None and lowered.watched is not None:
            moved = safer.decisions(self.step, params, lowered.watched, self._counts)
            if moved != self._moved:
                safer.say(moved, self.mesh)
            self._moved, lowered = moved, replace(lowered, chosen=(*lowered.chosen, *moved))
        return lowered, finish

    def _may_guess(self, state: State) -> bool:
        """Whether the program's guesses can be made: all that it would write so on disk has a second place there. Seen to when it first runs with a state."""
        if self._guesses[0] is not self._of or self._guesses[1] is not self.program:
            guessed = guessed_leaves(self.program)
            leaves = {leaf_of(x)[0].path: x for x in tree.leaves((state.params, state.opt_state, state.extras)) if leaf_of(x) is not None}  # type: ignore[index]
            self._guesses = self._of, self.program, resting.spare([leaves[self.program.leaves[n].path] for n in guessed], self.mesh)
        return self._guesses[2]

    def profile(self, state: State, batch: Any, steps: int = 3) -> tuple[State, list[Event]]:
        """Trains `steps` steps and one before them on one batch, each line timed: `train.plan.save_trace(path, measured)` shows it beside the plan.

        Args:
            state: donated, as in a step.
            batch: this rank's part of the global batch, the same shapes on every rank.
            steps: of which the fastest is returned.

        Returns: the state after these steps, and the events of one.
        """
        state, _ = self(state, batch)
        run = next(run for lowered, run in self._runs.values() if lowered is self._lowered)
        measured: list[list[Event]] = []
        for _ in range(steps):
            with profile.timing(run, self.program, self.mesh.device) as events:
                state, _ = self(state, batch)
            measured.append(events)
        return state, min(measured, key=lambda events: events[-1].start + events[-1].seconds - events[0].start)

    def _inputs(self, state: State) -> Inputs:
        if not isinstance(state, State):
            raise FzeroTypeError(message("step", f"the first argument is a State, not {type(state).__name__}", fix="make one with train.init or train.restore"))
        if self._of is None or state.params is not self._of[0] or state.opt_state is not self._of[1]:
            check_params(state.params)
            found, opt = placed_inputs(state.params, self.mesh), placed_inputs(state.opt_state, self.mesh, "opt_state")
            self._resolve(abstract_params(found))
            expected = params_inputs(self.step, self.mesh, abstract_params(found))
            wrong = (
                differences(found, expected)
                or differences(opt, opt_state_inputs(self.step, self.mesh, expected))
                or differing_extras(self.step, self.mesh, state, expected)
            )
            if wrong:
                away = any(leaf_of(x) is not None and home_of(x).tier != leaf_of(x)[0].layout.tier for x in tree.leaves((state.params, state.opt_state)))  # type: ignore[index]
                fix = "bring it back: fz.move(state, 'home')" if away else "make it with this step's init or restore"
                raise FzeroValueError(message("step", "the state is laid out for another step", wrong, fix))
            if self._params is None or (self._params.leaves, self._params.ties, self._params.structure) != (found.leaves, found.ties, found.structure):
                self._params = found
            self._of = (state.params, state.opt_state, first_leaves(state.params, state.opt_state))
        for x in self._of[2]:
            leaf_of(x)  # raises if the state was moved since
        assert self._params is not None
        return self._params

    def _state(
        self,
        params: Inputs,
        opt_state: Inputs,
        made: dict[int, torch.Tensor],
        opt: dict[int, torch.Tensor],
        rest: dict[str, torch.Tensor],
        places: dict[str, torch.Tensor],
        owner: str,
    ) -> State:
        """A state of its leaves. `rest`: of the few besides parameters and optimizer state, by path; a loss scale that is not among them begins."""
        for inputs, values in ((params, made), (opt_state, opt)):
            for i, x in values.items():
                place(x, inputs.leaves[i], self.mesh)
        scaling = precision_of(self.step).loss_scale
        begins = {f"{PRECISION}.{name}": x for name, x in counters.begin(len(params.ties))._asdict().items()}
        begins |= {} if scaling is None else {f"{LOSS_SCALE}.{name}": x for name, x in scaling.init()._asdict().items()}
        few = {p: place({**begins, **rest}[p].to(self.mesh.device), leaf, self.mesh) for p, leaf in extra_leaves(self.step, params).items()}
        copies = compute_leaves(self.step, self.mesh, params)

        def cast() -> dict[int, torch.Tensor]:
            return {i: resting.put(resting.cast(made[i], leaf.dtype), leaf, places, self.mesh) for i, leaf in copies.items()}

        extras: dict[str, Any] = {"compute": params.rebuild(agree.everywhere(self.mesh, owner, cast) if places else cast())} if copies else {}
        state = State(few["step"], params.rebuild(made), opt_state.rebuild(opt), few["key"], extras | kept(few))
        self._params, self._of = params, (state.params, state.opt_state, first_leaves(state.params, state.opt_state))
        return state
