"""Defines `fz.Run`, which `fz.run` passes to the training function: its mesh, state, batch numbers, in-memory
checkpoints and checkpoints on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero._utils.arguments import count, path_like, plain_numbers, shown
from fzero._utils.deprecation import attribute_alias, warn
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.checkpoint_manager import CheckpointManager, warn_about
from fzero.checkpoint.storage_paths import Url
from fzero.comm import collective_sequence
from fzero.compiler.combined_transforms import zero_of
from fzero.data.sample_order import Steps
from fzero.elastic.health import Finding, Health
from fzero.elastic.recovery_manager import RecoveryManager
from fzero.elastic.stop_request import StopSignals
from fzero.errors import FzeroValueError, StorageError
from fzero.runtime.compiled_step import CompiledStep
from fzero.step import State
from fzero.train_state import check_whole

logger = logging.getLogger("fzero")

_IDLE = 2  # iterations in a row without a step that are an error; one may be a batch that is left out


class BatchCounter:
    """Counts the batches that the state of a run has seen.

    An iteration of `run.steps` counts as one batch, however often the step is called in it. Its batch counts as seen
    once the step was called, and also if it was left out and the next iteration has begun.

    Args:
        train: the step that is called; None before `run.state`.
        seen: the number of batches that the state has seen.
    """

    def __init__(self, train: CompiledStep | None = None, seen: int = 0):
        self._train = train
        self.close(seen)

    def close(self, seen: int) -> None:
        """Records that the state has seen `seen` batches after all calls of the step until now."""
        self._seen, self._calls, self._is_open = seen, self.calls, False

    def open(self) -> None:
        """Begins an iteration, with the next batch."""
        self._is_open = True

    @property
    def calls(self) -> int:
        """The number of calls of the step."""
        return 0 if self._train is None else self._train.calls

    @property
    def seen(self) -> int:
        """The number of batches that the state has seen, with that of an iteration if the step was called in it."""
        return self._seen + (self._is_open and self.calls > self._calls)

    def count(self, owner: str) -> int:
        """Returns `seen`, for a state that is stored now.

        Raises:
            FzeroValueError: the step was called outside of an iteration, or again after the batch of the iteration was
                counted. Ranks would treat states of different steps as one, and batches would be used twice.
        """
        if (called := self.calls - self._calls) and not self._is_open:
            what = f"the step was called {called} times more, after the same {self._seen} batches"
            fix = (
                "loop over run.steps(state, stop), with one step and one run.commit per iteration; several: train on "
                "batches index * 2 and index * 2 + 1, and commit after the second"
            )
            raise FzeroValueError(f"run.{owner}", what, fix=fix)
        if called:
            self.close(self.seen)
        return self._seen


class Run:
    """The context of a run, which `fz.run` passes to the training function: the mesh, the state and the progress.

    It lasts from the moment when all ranks have joined the mesh until the run ends or a rank is lost. After a loss,
    `fz.run` makes a new one for the new mesh.

    Attributes:
        mesh: the mesh of all ranks.
        data_shard: which shard of the global batch this rank trains on, as `{"rank": ..., "size": ...}`, the
            arguments of `batch_at` in `fz.data`.
        source: where `state` found the state: "memory", "disk" or "init".
        stopping: whether a signal has asked the run to end. Every rank sees the same value between two steps.
        health: the problems found since the ranks joined the mesh (`fz.Health`), the same on every rank.

    Example:
        >>> import fzero as fz
        >>> fz.run(lambda run: (run.mesh.size, run.data_shard, run.stopping), device="cpu")
        (1, {'rank': 0, 'size': 1}, False)
    """

    def __init__(self, recovery: RecoveryManager, signals: StopSignals, health: Health):
        mesh = recovery.mesh
        self.mesh, self.source, self.stopping = mesh, "", False
        self._recovery, self._signals = recovery, signals
        self.health: list[Finding] = []
        self._replicas = health.check_replicas_every
        self._newest: State | None = None
        self._train: CompiledStep | None = None
        self._checkpoints: CheckpointManager | None = None
        self._counter = BatchCounter()

    @property
    def data_shard(self) -> dict[str, int]:
        """Which shard of the global batch this rank trains on: the arguments `rank` and `size` of `batch_at`."""
        if self._train is not None:
            axes = zero_of(self._train.step, self.mesh).batch_axes
        else:
            axes = tuple(name for name in self.mesh.axes if name in ("node", "replica", "data"))
        return {"rank": self.mesh.index(axes), "size": self.mesh.axis_size(axes)}

    place = attribute_alias("run", "place", "data_shard")
    keep = attribute_alias("run", "keep", "commit")

    def micro_batches(self, batch: int, rows: int) -> int:
        """The old name of `num_micro_batches`."""
        warn("run.micro_batches(batch, rows=)", "run.num_micro_batches(batch, max_samples=)")
        return self.num_micro_batches(batch, rows)

    @plain_numbers
    def num_micro_batches(self, batch: int, max_samples: int) -> int:
        """Returns the number of micro-batches for `fz.accumulate` that keeps the global batch the same on any number of
        ranks.

        It is the smallest number that divides a rank's share of the batch into micro-batches of at most
        `max_samples` samples.

        Args:
            batch: samples in the global batch.
            max_samples: the largest number of samples in a micro-batch of a rank.

        Raises:
            FzeroValueError: numbers below 1; a batch that cannot be divided equally among these ranks. The error
                names numbers of ranks that can share it.

        Example:
            >>> import fzero as fz
            >>> fz.run(lambda run: run.num_micro_batches(24, max_samples=5), device="cpu")
            6
        """
        fix = "e.g. fz.accumulate(run.num_micro_batches(data.batch, max_samples=4))"
        if problems := count("batch", batch) + count("max_samples", max_samples):
            raise FzeroValueError("run.num_micro_batches", "invalid arguments", problems, fix)
        size = self.data_shard["size"]
        # Ranks with different numbers of samples would weight them differently in the mean.
        if batch % size:
            able = [n for n in range(1, batch + 1) if batch % n == 0]
            near = [n for n in able if n < size][-4:] + [n for n in able if n > size][:2]
            what = f"a batch of {batch} samples is not divisible by {size} ranks"
            fix = f"start the run on a number of ranks that divides it ({', '.join(map(str, near))})"
            raise FzeroValueError("run.num_micro_batches", what, fix=fix)
        share = batch // size
        return next(n for n in range(-(-share // max_samples), share + 1) if share % n == 0)

    def state(
        self,
        train: CompiledStep,
        params: Any = None,
        key: torch.Tensor | None = None,
        *,
        load: str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | CheckpointManager | None = None,
        data: Steps | None = None,
        private: bool = False,
    ) -> State:
        """Returns the newest state that all ranks can have: from the hosts' memory, else from the checkpoints under
        `path`, else an initial one.

        Args:
            train: the compiled step.
            params, key: of `train.init`, for an initial state.
            load: a directory of weights, from which `train.load(load, params, key)` makes the initial state. Do not
                load weights after `run.state`: a state that is recovered before the first step would not have them.
            path: the directory or URL of the run's checkpoints. `save` writes there, and so does a run that is asked
                to stop. With a `fz.checkpoint.CheckpointManager` in its place, `commit` saves checkpoints at the
                manager's intervals.
            data, private: those of the `CheckpointManager`, if `path` is none: the data set whose batches the run sees
                (checkpoints record which it was, and cannot be continued with another one), and True for checkpoints
                that only this user can read.

        Communication: a few bytes, and that of `restore` or `init`.

        Raises:
            CheckpointError, FzeroValueError: from `restore`, `load` or `init`; too little host memory for the state
                (the message gives the free amount); the state in memory is lost and there is no `path`; a checkpoint
                of a run on other data, listing every difference; another number of ranks, with `on_resize="error"`.
        """
        _check_arguments(train, params, load, path, data, private)
        if self._newest is not None:
            fix = "one step of one tree of parameters that holds both; or an fz.run for each"
            raise FzeroValueError("run.state", "a run has one state, and this one has it already", fix=fix)
        if path is not None and not isinstance(path, CheckpointManager):
            path = CheckpointManager(path, data=data, private=private)
        self._train, self._checkpoints = train, path
        self._newest, self.source, seen, self.health = self._recovery.restore(train, params, key, load, path)
        self._counter = BatchCounter(train, seen)
        return self._newest

    @plain_numbers
    def steps(self, state: State, stop: int) -> Iterator[int]:
        """Yields batch numbers, from the first batch that the state has not consumed, up to `stop`.

        A skipped step (overflow in fp16) consumes its batch without counting as a step. When a signal arrives at any
        rank, the iteration ends early, before the same step on every rank; then the state after the last step is saved
        under the path of `state`.

        Communication: one request to the store per step.

        Raises:
            FzeroValueError: numbers are requested ahead, that is, two or more without a step in between. They would
                be lost when the run continues after a restart.
        """
        problems = [] if isinstance(state, State) else [f"state={shown(state)}: must be what run.state returned"]
        if isinstance(stop, bool) or not hasattr(stop, "__index__"):
            problems.append(f"stop={shown(stop)}: must be a whole number")
        if problems:
            raise FzeroValueError("run.steps", "invalid arguments", problems, "run.steps(state, 10_000)")
        # For a state that is not the run's own, the number of batches seen is taken to be its number of steps.
        counter, idle = self._counter, 0  # iterations in a row without a step
        counter.close(counter.seen if state is self._newest else int(state.step))
        for batch in range(counter.seen, stop):
            if self._signals.stop_before(batch, self.mesh):
                self.stopping = True
                if self.mesh.rank == 0:
                    logger.warning("fzero.run: a stop was requested: batch %d is the next", batch)
                break
            if collective_sequence.watcher is not None:
                collective_sequence.watcher.begins_step(batch)
            self._recovery.begin(batch)
            calls = counter.calls
            counter.open()
            yield batch
            counter.close(batch + 1)
            idle = 0 if counter.calls > calls or self._train is None else idle + 1
            if idle == _IDLE:
                asked = f"batches {batch + 1 - idle} to {batch} were requested, and no step was taken"
                fix = "take a step for each number before the next is asked for: for index in run.steps(state, stop), "
                fix += "without a list or a sampler around it; to leave batches out, fz.data's skip=[(first, last + 1)]"
                raise FzeroValueError("run.steps", "the iterator is read in advance", [asked], fix)
            self._signals.exits = False
        if self.stopping:
            self._save_last()

    def commit(self, state: State) -> None:
        """Copies this rank's shard of a state to its host's memory. If a process is lost, the run continues from there.
        With a `CheckpointManager` (`state(path=)`), also saves a checkpoint if one is due.

        Memory: on each host, twice what its ranks hold; with `redundant`, three times that (four times if states are
            sent less often than they are stored), plus twice what is sent to them.
        Communication: none, except for the comparison that `fz.Health(check_replicas_every=)` asks for.

        Raises:
            FzeroValueError: tensors are stored on disk, which cannot be copied to memory; or it is not the run's
                state.
            DivergenceError: with `fz.Health(check_replicas_every=)`, replicas differ. The message lists them by
                tensor and rank.
        """
        if not isinstance(state, State):
            what = f"{type(state).__name__} is not a state"
            raise FzeroValueError("run.commit", what, fix="state, metrics = train(state, batch); run.commit(state)")
        check_whole(state, "run.commit")
        seen = self._counter.count("commit")
        self._newest = state
        if self._recovery.keeps and (on_disk := self._recovery.on_disk):
            what = f"{len(on_disk)} tensors are stored on disk, and are not kept in memory"
            fix = "leave run.commit out and call run.save(state), or store them elsewhere"
            raise FzeroValueError("run.commit", what, on_disk[:5], fix)
        if self._replicas is not None and self._train is not None and seen % self._replicas == 0:
            self._train.check_replicas(state)
        self._recovery.commit(state, seen)
        if self._checkpoints is not None:
            self._checkpoints.offer(state, seen)

    @plain_numbers
    def save(
        self, state: State, *, keep: int | None = None, meta: Mapping[str, Any] | None = None, wait: bool = True
    ) -> Path | Url | AsyncSave | None:
        """Saves a checkpoint with `fz.checkpoint.save` under the path of `state`.

        If the disk is full or fails, the run continues with a warning, and None is returned. The checkpoint before
        is unchanged, and the state is in memory.

        Args:
            state, keep, meta: as in `fz.checkpoint.save`; by default those of the `CheckpointManager`, if there is one.
            wait: False to continue with steps while a copy of the state is written: an `AsyncSave` is returned. The
                next `save` and the end of the run wait for it, and check whether it has written a checkpoint.

        Communication, memory: those of `fz.checkpoint.save`.

        Raises:
            CheckpointError: an error of this save or of the asynchronous one before it, except for storage errors.
        """
        if (saves := self._checkpoints) is None:
            fix = "run.state(train, params, key, path='runs/gpt')"
            raise FzeroValueError("run.save", "the run has no directory for checkpoints", fix=fix)
        try:
            saves.seen = self._counter.count("save")
            return saves.save(state, keep=keep, meta=meta, wait=wait)
        except StorageError as error:
            warn_about(error)
            return None

    def _end(self, came: bool) -> None:
        """Called once `main` has returned on all ranks: acts on a signal that no iteration of the loop has seen.

        `came`: whether a signal has arrived at any rank.
        """
        if self._checkpoints is not None:
            self._checkpoints.settle()
        if not came or self.stopping:
            return
        self.stopping = True
        self._save_last()

    def _save_last(self) -> None:
        """Saves the newest state of a run that was asked to stop, with the arguments of the last save, unless it is
        saved already.

        Raises:
            CheckpointError: the state cannot be saved. The checkpoint before it is the latest.
        """
        if self._newest is None or (saves := self._checkpoints) is None:
            return
        seen = self._counter.count("save")
        saved = saves.save_last(self._newest, seen)
        if saved is not None and self.mesh.rank == 0:
            logger.warning("fzero.run: the state after %d batches is saved: %s", seen, saved)


def _check_arguments(
    train: Any, params: Any, load: Any, path: str | os.PathLike[str] | CheckpointManager | None, data: Any, private: Any
) -> None:
    """Raises an error about invalid arguments of `Run.state`."""
    problems = [] if isinstance(train, CompiledStep) else [f"train={shown(train)}: must be what fz.compile returns"]
    if load is not None:
        problems += path_like("load", load)
    elif params is None:
        problems.append("params: are needed for an initial state, unless load= names a directory of weights")
    if (path is None or isinstance(path, CheckpointManager)) and (data is not None or private is not False):
        problems.append("data, private: are arguments of the CheckpointManager, or need a path")
    if problems:
        fix = "run.state(fz.compile(step, run.mesh), params, key, path='runs/gpt', data=fz.data.TokenDataset(...))"
        raise FzeroValueError("run.state", "invalid arguments", problems, fix)
    if train.awaits_batch:  # a restarted rank would have another layout than the others
        problems = ["batch: a run decides the layout of its state before it sees the first batch"]
        fix = "fz.compile(step, run.mesh, batch=batch), for which meta tensors are enough"
        raise FzeroValueError("run.state", "stages are made of the blocks that process a batch", problems, fix)
