"""Runs a training step on a mesh: it makes or restores states and carries them on, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import tree
from fzero._utils.arguments import plain_numbers
from fzero.compiler.lowered import Lowered
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.plan.timeline import Event
from fzero.runtime.compiled_base import Compiled, alone
from fzero.runtime.cuda_graphs import NotCaptured
from fzero.runtime.metrics_watch import MetricsWatch
from fzero.runtime.out_of_memory import raise_with_advice
from fzero.runtime.state_validation import check_first_step, compare_replicas, leaf_tables
from fzero.runtime.step_profile import check_num_steps, profile_steps
from fzero.state import gather, initial_state, restored_state, tensor_storage
from fzero.state.state_comparison import Last, check_layouts, model_of
from fzero.step import State, Step
from fzero.step.checks import check_one_batch, check_state, no_backward, state_and_batch
from fzero.train_state import mark_broken

if TYPE_CHECKING:
    from fzero.checkpoint import Index


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
        super().__init__(step, mesh, backend, limits, graphs, batch)
        self.calls = 0  # how many steps were taken
        self._watch, self._last = MetricsWatch(step, mesh), Last()
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
        return self._resolution.step

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
        given = initial_state.params_of_init(params, key, self.mesh, self._model)
        inputs = self._laid_out(given.values)
        self._make_room()
        return self._begin_with(initial_state.init_state(given, self.resolved, self.mesh, self.limits, inputs), inputs)

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
        known = self._last.inputs
        weights, given = initial_state.params_of_load(path, params, key, self.mesh, self._model, known)
        inputs = self._laid_out(given.values)
        self._make_room()
        state = initial_state.load_state(
            weights, given, self.resolved, self.mesh, self.limits, inputs, names, self._model
        )
        return self._begin_with(state, inputs)

    def _laid_out(self, params: Any) -> Inputs:
        """The leaf table of a tree of unsharded parameters. Open choices of the step are decided for it."""
        return self._runs.known(self._resolution.laid_out(params))

    def _make_room(self) -> None:
        """Lets go of the last state: if nobody else holds it, it makes room for a new one."""
        self._last.let_go()
        self._spare = (None, None, False)

    def _begin_with(self, state: State, inputs: Inputs) -> State:
        """Remembers a new state, whose parameters have this leaf table."""
        self._last.keep(inputs, state.params, state.opt_state, extras=state.extras)
        return state

    @property
    def awaits_batch(self) -> bool:
        """Whether the stages of a `pipeline` are laid out at the first step, because `compile` was given no batch."""
        return self._resolution.awaits_batch

    def _in_stages(self, state: State, batch: Any) -> State:
        """The state laid out for the stages of a pipeline, which `compile` knew no batch for."""
        inputs = self._runs.known(self._resolution.laid_out_in_stages(self._inputs(state), batch))
        return self._begin_with(initial_state.staged_state(state, self.resolved, self.mesh, inputs), inputs)

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
        index = restored_state.describe(path, self.mesh, self._model)
        if params is None and self._last.inputs is not None:
            inputs = self._last.inputs
        else:
            inputs = self._laid_out(restored_state.expected_params(index, params, self._model))
        plan = restored_state.plan_restore(index, self.resolved, self.mesh, inputs)
        if (counts := plan.precision_counts(self.mesh)) is not None:
            self._resolution.promote_restored(inputs, counts)
        self._make_room()
        return self._begin_with(restored_state.restore_state(plan, self.resolved, self.mesh, self.limits), inputs)

    @alone("gather")
    def gather(self, state: State) -> State:
        """The whole state as plain host tensors, on every rank.

        Communication: one all_gather a sharded leaf, and a few bytes through the store. Memory: the whole state in host
            memory: for small models and tests.

        Raises:
            FzeroTypeError: what is not a state.
            DivergenceError: a rank that did not come: with sharded leaves all ranks call it.
        """
        return gather.gathered(state, self.mesh)

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
        batch = tree.unflatten(structure, self._transfer(batch, flat, self._last.storages))
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
                plan = lambda: self.plan  # noqa: E731
                raise_with_advice(error, self.owner, self.resolved, self.mesh, self.backend, lowered, plan)
            raise
        self.calls += 1
        metrics = tree.unflatten(lowered.structure, outputs)
        no_backward(metrics["loss"])
        self._watch(metrics, state, self.resolved, lowered)
        return state, metrics

    def built(self, state: State, batch: Any) -> tuple[Lowered, Callable[..., Any]]:
        """The executable that a step of this state on such a batch runs: lowered and built, if it was not yet, and not
        run."""
        return self._built(state, batch, *tree.flatten(batch))

    def _built(
        self, state: State, batch: Any, flat: list[Any], structure: tree.TreeSpec
    ) -> tuple[Lowered, Callable[..., Any]]:
        params = self._inputs(state)
        if not self._last.begun:
            check_first_step(state, params, batch, self.resolved, self.mesh, self._checked)
            self._formats.read(self.resolved, state)
        self._last.begun, before = True, self._formats.formats
        promote = lambda: self._resolution.promote(params, state.extras)  # noqa: E731
        lowered, run = self._run_for(params, batch, flat, structure, promote)
        self._formats.record(state, before)
        return lowered, run

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
        compare_replicas(state, self.mesh)

    def _build(self, params: Inputs, batch: Any) -> tuple[Lowered, Callable[[], Callable[[], Callable[..., Any]]]]:
        lowered, built = super()._build(params, batch)
        self._formats.add(lowered.choice.wire)
        promoted = self._resolution.promoted(params, lowered)
        return replace(lowered, chosen=(*lowered.chosen, *promoted)), built

    def _has_spare(self, state: State) -> bool:
        """Whether all that the program writes aside on disk has a second place there. Seen to when it first runs with a
        state."""
        if self._spare[0] is not self._last.trees or self._spare[1] is not self.program:
            self._spare = self._last.trees, self.program, tensor_storage.spare_for(self.program, state, self.mesh)
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
        check_num_steps(steps)
        state, _ = self(state, batch)
        run = next(kept.run for kept in self._runs.values() if kept.lowered is self._lowered)
        return profile_steps(lambda state: self(state, batch)[0], state, steps, run, self.program, self.mesh)

    def _inputs(self, state: State) -> Inputs:
        check_state(state, "make one with train.init or train.restore")
        if not self._last.holds(state.params, state.opt_state, extras=state.extras):
            found, opt = leaf_tables(state, self.resolved, self._model)
            self._resolution.decide(found)
            check_layouts(self.resolved, self.mesh, state, found, opt)
            known = self._last.inputs
            if known is None or not known.alike(found):
                known = self._runs.known(found)
            self._last.keep(known, state.params, state.opt_state, extras=state.extras)
        return self._last.checked()
