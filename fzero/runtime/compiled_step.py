"""Runs a training step on a mesh: creates or restores states, and trains them batch by batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from fzero.runtime.execute import Executable
from fzero.runtime.metrics_watch import MetricsWatch
from fzero.runtime.out_of_memory import raise_with_advice
from fzero.runtime.program_cache import CachedProgram, StepCall
from fzero.runtime.state_validation import check_first_step, compare_replicas, leaf_tables
from fzero.runtime.step_profile import check_num_steps, profile_steps
from fzero.state import gather, initial_state, restored_state, tensor_storage
from fzero.state.state_comparison import Last, check_layouts, model_of
from fzero.step import State, Step
from fzero.step.checks import check_one_batch, check_state, no_backward, state_and_batch
from fzero.train_state import check_computed, computed_by, is_computed_by, mark_broken

if TYPE_CHECKING:
    from fzero.checkpoint import Index


class CompiledStep(Compiled):
    """A training step on a mesh. Made by `compile`.

    `init`, `load` or `restore` makes a state; a call with the state and a batch runs one step.

    Attributes:
        step: the step that was compiled. It does not change; `resolved` is the step that is executed.
        mesh: the mesh.
        calls: the number of steps that were run.

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
        warm_up: str = "wait",
    ):
        super().__init__(step, mesh, backend, limits, graphs, batch, warm_up)
        self.calls = 0
        self._watch, self._last = MetricsWatch(step, mesh), Last()
        # the last trees and program, and the result of `_has_spare` for them
        self._spare: tuple[Any, Any, bool] = (None, None, False)
        self._checked = WeakTensorKeyDictionary()  # leaves of states that were checked before their first step

    @property
    def resolved(self) -> Step:
        """The step that is executed: `step` with its open choices decided.

        The memory tiers of `offload("auto")` are decided by the first `init` or `restore`. Which blocks of
        `mixed_precision("auto")` compute in a safer dtype is decided by `restore`, and whenever a program is made.

        `fz.compose(*train.resolved.transforms)(fz.eval_step(fn))` is an evaluation of the trained model.
        """
        return self._resolution.step

    @property
    def knows_model(self) -> bool:
        """Whether this object has made or restored a state. Only then can it detect a state of another model."""
        return self._last.inputs is not None

    @property
    def _model(self) -> Any:
        return model_of(self.step.loss_fn)

    @alone("init", "made")
    def init(self, params: Any, key: torch.Tensor | None = None) -> State:
        """Creates the first state. Every leaf is created sharded.

        Args:
            params: a function of a key that returns a pytree of tensors, or such a pytree with unsharded leaves (the
                same on every rank).
            key: int64[3]; by default `fz.random.key(0)`. The init function receives the key unchanged; the state's key
                is derived from it.

        Communication: about a hundred bytes between the ranks, to compare the arguments between the ranks. For the
        comparison the leaves are read once, which takes 2.5 s of a core for 6 GB. Every rank computes its own shards.
        Memory: this rank's shard of the state and, for an init function, at most one unsharded leaf. Random draws and
        pointwise operations are computed shard by shard, in pieces of 32 MiB for leaves off the device; other leaves
        are made unsharded and then sharded. A leaf that is stored on disk is written, through two buffers of 16 MiB,
        before the next leaf is made.

        Raises:
            FzeroTypeError: leaves that are not tensors.
            FzeroValueError: paths of `offload` that cannot hold the leaves, with the numbers, before any leaf is made;
                leaves of another model than that of the step (`fz.functionalize`), or a model that has changed since.
            TraceError: an init function that draws from torch's global generator instead of using its key.
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
        """Creates the first state of a model whose weights are in safetensors files: a directory in Hugging Face's
        layout, or one file. Each rank's shard is read directly to where it is stored.

        Parameters are found by their dotted names (`fz.tree.names(params)`) and converted to the dtype in which the
        state stores them. Parameters that are not in the files are initialized as by `init`, and named in the log
        `fzero`, as are unused entries of the files.

        Args:
            path: the directory, or a .safetensors file; or the URL of one.
            params: the structure of the model: a function of a key that returns a pytree of tensors, or such a pytree
                with unsharded leaves. Its values are used for parameters that are missing in the files; a missing
                parameter must not be on the meta device, unless the model can initialize it. By default the structure
                of the step's model (`fz.functionalize`), else that of the parameters made or restored last, else nested
                dicts and lists according to the names in the files, in their dtypes.
            key: int64[3]; by default `fz.random.key(0)`.
            names: the stored names of parameters that have other names in the files. By default the model defines how
                its parameters are made up from stored tensors (`fz.hf`: renamed and fused weights too).

        Communication: a parameter that several ranks hold is read by them in pieces and gathered, so that all ranks
        together read each byte once; in addition a few hundred bytes between the ranks.
        Memory: this rank's shard of the state, and 44 MiB.

        Raises:
            CheckpointError: files that are missing, truncated or malformed; files of another model; parameters of other
                shapes, or in dtypes that are not converted (integers, 8 bits). All problems are listed, before any
                parameter is made.
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
        """Returns the leaf table of a tree of unsharded parameters. Decides the open choices of the step for these
        parameters."""
        return self._runs.known(self._resolution.laid_out(params))

    def _make_room(self) -> None:
        """Drops the references to the last state, so that its memory is free for a new one if nobody else holds it."""
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
        """Lays out the state for the stages of a pipeline, for the first batch: `compile` was given none."""
        inputs = self._runs.known(self._resolution.laid_out_in_stages(self._inputs(state), batch))
        return self._begin_with(initial_state.staged_state(state, self.resolved, self.mesh, inputs), inputs)

    @alone("restore", "read")
    def restore(self, path: str | os.PathLike[str] | Index, params: Any = None) -> State:
        """Restores the state in a checkpoint, laid out for this step: from any mesh and any ZeRO stage, bit for bit.

        Args:
            path: a checkpoint directory; or a directory of checkpoints, of which the latest is used; or a URL of
                either; or the result of `fz.checkpoint.describe`.
            params: the expected structure of the model: a pytree of tensors (meta tensors are sufficient) or an init
                function. By default what `init` was called with, else the structure of the step's model
                (`fz.functionalize`), else that of the checkpoint.

        Communication: a few bytes, to agree on the checkpoint (the latest one is the one that the first rank finds) and
        to check that all ranks could read it. Every rank reads the byte ranges it needs.
        Memory: this rank's shard of the state; for leaves stored on disk, 64 MiB at a time.

        Raises:
            CheckpointError: a damaged or incomplete checkpoint, or one of another model, listing every difference;
                ranks that see different checkpoints, with the directory and the step of each.
            FzeroTypeError: `params` are not tensors.
            FzeroValueError: paths of `offload` that cannot hold the leaves, with the numbers, before anything is read.
        """
        index = restored_state.describe(path, self.mesh, self._model)
        if params is None and self._last.inputs is not None:
            inputs = self._last.inputs
        else:
            inputs = self._laid_out(restored_state.expected_params(index, params, self._model))
        plan = restored_state.plan_restore(index, self.resolved, self.mesh, inputs)
        # The counters decide which blocks are promoted, and with that the dtypes of compute copies, so they are read
        # before the state is laid out.
        if (counts := plan.precision_counts(self.mesh)) is not None:
            self._resolution.promote_restored(inputs, counts)
        self._make_room()
        return self._begin_with(restored_state.restore_state(plan, self.resolved, self.mesh, self.limits), inputs)

    @alone("gather")
    def gather(self, state: State) -> State:
        """Returns the unsharded state as plain host tensors, on every rank.

        Communication: one all_gather per sharded leaf, and a few bytes between the ranks. Memory: the unsharded state
        in host memory: for small models and tests.

        Raises:
            FzeroTypeError: the argument is not a state.
            FzeroValueError: the code of the step has come to compute something different since it was traced, on some
                rank (docs/guides/verifying.md, Built-in checks).
            DivergenceError: some rank did not call `gather`: if there are sharded leaves, all ranks must call it.
        """
        check_state(state, "gather a state that train.init, train.restore or a step returned", "gather")
        check_computed(state, "gather")
        return gather.gathered(state, self.mesh)

    @state_and_batch
    @alone("step")
    def __call__(self, state: State, batch: Any, *more: Any) -> tuple[State, dict[str, Any]]:
        """Runs one training step. `state` is donated: its tensors are written in place and become those of the returned
        state.

        Args:
            state: from `init`, `load` or `restore`, or from the previous step.
            batch: this rank's shard of the global batch, with the same shapes on every rank.

        Returns:
            The new state, and the metrics over the whole mesh: `loss`, `grad_norm` (before clipping), `finite` and,
            with `has_aux`, `aux`. They are 0-dim tensors on the device; the call does not wait until they are computed.
            With a loss scale also `loss_scale`, `skipped` and `loss_scale_at_minimum`. docs/tutorial.md, "Metrics",
            lists the entries.

        Raises:
            FzeroTypeError: more arguments than a state and one batch.
            FzeroValueError: before a state's first step, trained parameters in memory that are not finite; a state laid
                out for another step; new values of leaves (`train_step(mutable=...)`) that must agree and do not; a
                condition under which the loss function raises. On an asynchronous device the last two are raised one
                step later.
            DivergenceError: before a state's first step, replicas that differ between ranks, as `check_replicas`
                reports them; ranks that make different calls; a call that has ended in the middle on some rank, at that
                call and every later one on the mesh (docs/guides/fault-tolerance.md, Errors in a step).
            BusyError: another thread is using the mesh: steps, evaluations, `init`, `restore`, `gather` and
                `fz.checkpoint.save` are for one thread at a time.
            OutOfMemory: the device or the host is out of memory. After anything that ends a step in the middle, Ctrl-C
                included, its state can no longer be used: steps, `gather` and `fz.checkpoint.save` reject it.
            LossScaleError: with `mixed_precision(..., loss_scale_at_minimum="raise")`, an overflow at the minimum
                scale; the state is the one after that step.
        """
        check_one_batch(more)
        flat, structure = tree.flatten(batch)
        if self.awaits_batch:
            state = self._in_stages(state, batch)
        # The leaf table of the parameters, from the state's own leaves if these are not the trees of the last step.
        call = StepCall(self._inputs(state), batch, flat, structure)
        program = self._program_of(state, call)
        batch = tree.unflatten(structure, self._transfer(batch, flat, self._last.storages))
        outputs = self._run(program, state, batch)
        self.calls += 1
        metrics = tree.unflatten(program.lowered.structure, outputs)
        no_backward(metrics["loss"])
        self._watch(metrics, state, self.resolved, program.lowered)
        return state, metrics

    def built(self, state: State, batch: Any) -> tuple[Lowered, Executable]:
        """Returns the program and the executable for a step of this state on such a batch. It is lowered and built if
        necessary, and not run."""
        program = self._program_of(state, StepCall(self._inputs(state), batch, *tree.flatten(batch)))
        program.advance(to_the_end=True)
        return program.lowered, program.run

    def _program_of(self, state: State, call: StepCall) -> CachedProgram:
        """Returns the program for a step of a state, after the checks of a state's first step."""
        # Only before the first step with these trees: the checks read all of the state, which is too slow for every
        # step.
        if not self._last.begun:
            check_first_step(state, call.params, call.batch, self.resolved, self.mesh, self._checked)
            self._formats.read(self.resolved, state)
        if not self._last.begun or not is_computed_by(state, self._unsaved):
            computed_by(state, self._unsaved)
        self._last.begun, before = True, self._formats.formats
        # Called only if a program has to be made, because promotion reads counters on the host.
        program = self._program_for(call, before=lambda: self._resolution.promote(call.params, state.extras))
        self._formats.record(state, before)
        return program

    def _lower(self, call: StepCall) -> Lowered:
        lowered = super()._lower(call)
        self._formats.add(lowered.options.wire)
        promoted = self._resolution.promoted(call.params, lowered)
        return replace(lowered, chosen=(*lowered.chosen, *promoted))

    def _run(self, program: CachedProgram, state: State, batch: Any) -> tuple[Any, ...]:
        """Runs a program, which writes the new state over the old one, and returns its outputs."""
        aside = self._has_spare(state)
        trees = state.step, state.params, state.opt_state, state.key, state.extras
        try:
            with torch.no_grad():
                return program.run(*trees, batch, aside=aside)
        # Nothing has been executed, so the state is not marked: the caller can continue with it.
        except NotCaptured:
            raise
        except BaseException as error:
            mark_broken(state, error)
            self._last.let_go()  # the next call checks its state again
            if isinstance(error, (RuntimeError, MemoryError)):
                plan = lambda: self.plan  # noqa: E731
                raise_with_advice(error, self.owner, self.resolved, self.mesh, self.backend, program.lowered, plan)
            raise

    @alone("check_replicas")
    def check_replicas(self, state: State) -> None:
        """Compares the shards of a state that several ranks hold. The first step of a state does this, and so does
        `fz.checkpoint.save`; call it between them if you suspect that replicas have diverged.

        Args:
            state: as in a step. Leaves on disk are skipped, and leaves of which no two ranks hold the same shard.

        Communication: about a hundred bytes between the ranks. The leaves are read once, where they are stored: on a
        CPU this takes 2.5 s of a core for 6 GB.

        Raises:
            DivergenceError: names every leaf of which two ranks hold different values, and the ranks.
            BusyError: another thread is using the mesh.
        """
        compare_replicas(state, self.mesh)

    def _has_spare(self, state: State) -> bool:
        """Whether every leaf that the program writes speculatively on disk has a second extent there. Allocated when
        the program first runs with a state."""
        # Comparing identities is enough and takes no time: the trees are replaced when a state changes, the program
        # when the kind of batch does.
        if self._spare[0] is not self._last.trees or self._spare[1] is not self.program:
            self._spare = self._last.trees, self.program, tensor_storage.spare_for(self.program, state, self.mesh)
        return self._spare[2]

    @plain_numbers
    def profile(self, state: State, batch: Any, steps: int = 3) -> tuple[State, list[Event]]:
        """Runs one step, and then `steps` more on the same batch with each op timed. `train.plan.save_trace(path,
        measured)` shows the times next to the plan.

        Args:
            state: donated, as in a step.
            batch: this rank's shard of the global batch, with the same shapes on every rank.
            steps: number of timed steps; the fastest one is returned.

        Returns: the state after these steps, and the events of the fastest one.

        Raises:
            FzeroValueError: a number of steps below 1.
        """
        check_num_steps(steps)
        state, _ = self(state, batch)
        run = self.built(state, batch)[1]  # with all functions compiled
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
