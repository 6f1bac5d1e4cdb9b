"""Gives a training function its state, the numbers of its batches and a place for what it keeps: the run that `fz.run`
calls `main` with (`fz.Run`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero._utils.arguments import count, flag, plain_numbers, shown
from fzero._utils.deprecation import attribute_alias, keyword_aliases
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.saving import not_private
from fzero.checkpoint.storage_paths import Url
from fzero.comm import collective_sequence
from fzero.compiler.combined_transforms import zero_of
from fzero.data.sample_order import Steps
from fzero.elastic import host_directory
from fzero.elastic.health import Finding, Health
from fzero.elastic.join import Signals
from fzero.elastic.run_checkpoints import RunCheckpoints, RunProgress
from fzero.elastic.state_copies import leaves_on_disk, reserve_copies, vault_of
from fzero.elastic.state_recovery import in_memory, recovered
from fzero.elastic.stop_request import StopRequest
from fzero.errors import FzeroValueError, StorageError
from fzero.mesh import Mesh
from fzero.runtime.compiled_step import CompiledStep
from fzero.step import State
from fzero.train_state import check_whole

logger = logging.getLogger("fzero")

_IDLE = 2  # turns of a loop in a row without a step: more than a batch that is left out


class Run:
    """A run on one mesh: from where all ranks have come together to the end, or to the loss of one of them.

    Attributes:
        mesh: of all ranks.
        data_shard: which shard of the global batch this rank trains on, as `{"rank": ..., "size": ...}`, the arguments
            of `batch_at` in `fz.data`.
        source: where `state` found the state: "memory", "disk" or "init".
        stopping: whether a signal has asked the run to end; every rank sees the same between two steps.
        health: what was found wrong since the ranks came together (`fz.Health`), the same on every rank.

    Example:
        >>> import fzero as fz
        >>> fz.run(lambda run: (run.mesh.size, run.data_shard, run.stopping), device="cpu")
        (1, {'rank': 0, 'size': 1}, False)
    """

    def __init__(
        self,
        mesh: Mesh,
        memory: Path | None,
        every: int,
        signals: Signals,
        health: Health,
        on_resize: str = "keep_batch",
    ):
        self.mesh, self.source, self.stopping = mesh, "", False
        self._on_resize = on_resize
        self.health: list[Finding] = []
        self._replicas = health.check_replicas_every
        self._memory, self._every, self._signals = memory, every, signals
        self._vault = None if memory is None else vault_of(memory, mesh)
        self._newest: State | None = None
        self._train: CompiledStep | None = None
        self._checkpoints = RunCheckpoints(mesh)
        self._stop_request = StopRequest(mesh, signals)
        self._seen = 0  # batches before the one of this turn of the loop
        self._calls: int | None = None  # of the step, before this turn of the loop
        self._known = RunProgress(0, 0)  # as the state was that was looked at last
        self._on_disk: list[str] = []

    @property
    def data_shard(self) -> dict[str, int]:
        if self._train is not None:
            axes = zero_of(self._train.step, self.mesh).batch_axes
        else:
            axes = tuple(name for name in self.mesh.axes if name in ("node", "replica", "data"))
        return {"rank": self.mesh.index(axes), "size": self.mesh.axis_size(axes)}

    place = attribute_alias("run", "place", "data_shard")
    micro_batches = attribute_alias("run", "micro_batches", "num_micro_batches")
    keep = attribute_alias("run", "keep", "commit")

    @keyword_aliases("run.num_micro_batches", rows="max_samples")
    @plain_numbers
    def num_micro_batches(self, batch: int, max_samples: int) -> int:
        """The number of micro-batches to give to `fz.accumulate` so that the global batch stays the same on any number
        of ranks: the smallest number that divides a rank's share of the batch into micro-batches of at most
        `max_samples` samples.

        Args:
            batch: samples in the global batch.
            max_samples: the largest micro-batch of a rank.

        Raises:
            FzeroValueError: numbers below 1; a batch that these ranks cannot share alike, with the numbers that can.

        Example:
            >>> import fzero as fz
            >>> fz.run(lambda run: run.num_micro_batches(24, max_samples=5), device="cpu")
            6
        """
        fix = "e.g. fz.accumulate(run.num_micro_batches(data.batch, max_samples=4))"
        if problems := count("batch", batch) + count("max_samples", max_samples):
            raise FzeroValueError("run.num_micro_batches", "invalid arguments", problems, fix)
        size = self.data_shard["size"]
        if batch % size:
            able = [n for n in range(1, batch + 1) if batch % n == 0]
            near = [n for n in able if n < size][-4:] + [n for n in able if n > size][:2]
            what = f"a batch of {batch} rows cannot be shared by {size} ranks alike"
            fix = f"start the run on a number of ranks that divides it ({', '.join(map(str, near))})"
            raise FzeroValueError("run.num_micro_batches", what, fix=fix)
        share = batch // size
        return next(n for n in range(-(-share // max_samples), share + 1) if share % n == 0)

    def state(
        self,
        train: CompiledStep,
        params: Any,
        key: torch.Tensor | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        data: Steps | None = None,
        private: bool = False,
    ) -> State:
        """The newest state that all ranks can have: of the hosts' memory, else of the checkpoints under `path`, else a
        first one.

        Args:
            train: the compiled step.
            params, key: of `train.init`.
            path: the directory of the run's checkpoints, or a URL; where `save`, and a run that is told to stop, write.
            data: the data set whose batches the run sees. Checkpoints say which it was, and are not gone on from with
                another one.
            private: True for checkpoints that this user alone can read, as `fz.checkpoint.save` writes them.

        Communication: a few bytes, and what `restore` or `init` take.

        Raises:
            CheckpointError, FzeroValueError: from these; too little host memory for the state, with the free amount; a
                lost memory without a `path`; a checkpoint of a run on other data, listing every difference; another
                number of ranks, with `on_resize="error"`.
        """
        problems = [] if isinstance(train, CompiledStep) else [f"train={shown(train)}: must be what fz.compile returns"]
        if data is not None and not isinstance(data, Steps):
            problems.append(f"data={shown(data)}: must be a data set of fz.data")
        problems += flag("private", private) if path is None else not_private(path, private)
        if problems:
            fix = "run.state(fz.compile(step, run.mesh), params, key, path='runs/gpt', data=fz.data.TokenDataset(...))"
            raise FzeroValueError("run.state", "invalid arguments", problems, fix)
        if train.awaits_batch:  # a rank that starts again would have another layout than the others
            problems = ["batch: a run lays out its state before it sees the first batch"]
            fix = "fz.compile(step, run.mesh, batch=batch), where meta tensors will do"
            raise FzeroValueError("run.state", "stages are made of the blocks that a batch goes through", problems, fix)
        if self._newest is not None:
            fix = "one step of one tree of parameters that holds both; or an fz.run for each"
            raise FzeroValueError("run.state", "a run has one state, and this one has it already", fix=fix)
        self._train, self._checkpoints = train, RunCheckpoints(self.mesh, path, data, private)
        found = in_memory(self._memory, self.mesh, self._note)
        self._signals.free = found.kept is None
        on_disk, seen = self._checkpoints.newest()
        refuse = self._on_resize == "error"
        state, self.source, self._seen = recovered(
            self.mesh, train, params, key, found, on_disk, seen, path, refuse_resize=refuse
        )
        self._on_disk = leaves_on_disk(state)
        if self._vault is not None and not self._on_disk:
            assert self._memory is not None
            reserve_copies(self._vault, self._memory, train, state, self._seen, self._every, self.mesh)
            # another host's, or of another number of ranks
            if self.source != "memory" or not self._vault.has(self._seen):
                self._vault.keep(state, self._seen)
        self._newest, self._signals.free = state, self.source != "memory" and not self._signals.came
        self._known = RunProgress(self._seen, int(state.step))
        self._checkpoints.safe = self._known if seen == self._seen else None
        return state

    @plain_numbers
    def steps(self, state: State, stop: int) -> Iterator[int]:
        """Yields batch numbers, from the first that the state has not consumed, up to `stop`. A skipped step (overflow
        in fp16) consumes its batch without counting as a step. Ends early, on every rank
        before the same step, when a signal has come to any of them: then the state as it is after the last step is
        saved under the path of `state`.

        Communication: one question to the store a step.

        Raises:
            FzeroValueError: numbers are asked for ahead, two and more before a step was taken: they would be
                lost when the run goes on.
        """
        problems = [] if isinstance(state, State) else [f"state={shown(state)}: must be what run.state returned"]
        if isinstance(stop, bool) or not hasattr(stop, "__index__"):
            problems.append(f"stop={shown(stop)}: must be a whole number")
        if problems:
            raise FzeroValueError("run.steps", "invalid arguments", problems, "run.steps(state, 10_000)")
        # of a state that is not the run's: as many as its steps
        self._seen, self._calls = self._batches() if state is self._newest else int(state.step), None
        if state is not self._newest:
            self._known = RunProgress(self._seen, self._seen)
        idle = 0  # turns in a row without a step
        for batch in range(self._seen, stop):
            if self._stop_request.stops(batch):
                self.stopping = True
                if self.mesh.rank == 0:
                    logger.warning("fzero.run: told to stop: batch %d is the next", batch)
                break
            if collective_sequence.watcher is not None:
                collective_sequence.watcher.say(host_directory.STEPPING, batch)
            self._seen, self._calls = batch, None if self._train is None else self._train.calls
            if self._vault is not None and self._vault.wards is not None:
                self._vault.wards.begin(batch)
            yield batch
            idle = 0 if self._batches() > batch or self._train is None else idle + 1
            if idle == _IDLE:
                asked = f"batches {batch + 1 - idle} to {batch} were asked for, and no step was taken"
                fix = "take a step for each number before the next is asked for: for index in run.steps(state, stop), "
                fix += "no list and no sampler made of it; to leave batches out, fz.data's skip=[(first, last + 1)]"
                raise FzeroValueError("run.steps", "it is read ahead", [asked], fix)
            self._seen, self._calls, self._signals.free = batch + 1, None, False
        if not self.stopping and state is self._newest:
            self._known = RunProgress(self._seen, int(state.step))
        if self.stopping:
            self._save_last()

    def commit(self, state: State) -> None:
        """Copies this rank's part of a state to its host's memory, from where the run goes on if a process is lost.

        Memory: on each host twice what its ranks hold; with `redundant` three times that, and twice what is sent to
        them. Communication: none, except for the comparison that `fz.Health(check_replicas_every=)` asks for.

        Raises:
            FzeroValueError: leaves rest on disk, which are not kept in memory; or it is not the run's state.
            DivergenceError: with `fz.Health(check_replicas_every=)`, replicas that differ, by leaf and rank.
        """
        if not isinstance(state, State):
            what = f"{type(state).__name__} is not a state"
            raise FzeroValueError("run.commit", what, fix="state, metrics = train(state, batch); run.commit(state)")
        check_whole(state, "run.commit")
        kept = self._vault is not None and self._batches() % self._every == 0
        if kept or not state.step.is_cuda:  # else the host would wait for the step
            self._count(state, "commit")
        self._newest = state
        if self._vault is not None and self._on_disk:
            what = f"{len(self._on_disk)} leaves rest on disk, and are not kept in memory"
            fix = "leave run.commit out and call run.save(state), or let them rest elsewhere"
            raise FzeroValueError("run.commit", what, self._on_disk[:5], fix)
        seen = self._batches()
        if self._replicas is not None and self._train is not None and seen % self._replicas == 0:
            self._train.check_replicas(state)
        if self._vault is not None and self._vault.wards is not None and self._vault.has(seen - 1):
            self._vault.wards.seal(seen)
        if self._vault is not None and seen % self._every == 0:
            self._vault.keep(state, seen)

    @plain_numbers
    def save(
        self, state: State, *, keep: int | None = None, meta: Mapping[str, Any] | None = None, wait: bool = True
    ) -> Path | Url | AsyncSave | None:
        """`fz.checkpoint.save` under the path of `state`. Where the disk is full, or fails, the run goes on with a
        warning: the checkpoint before is as it was, and the state is in memory. None then.

        Args:
            state, keep, meta: as there.
            wait: False to go on with steps while a copy of the state is written: an `AsyncSave` is returned. The
                next `save` and the end of the run wait for it, and check whether it has written a checkpoint.

        Communication, memory: of `fz.checkpoint.save`.

        Raises:
            CheckpointError: of this save, or of the one behind the steps before it, but for a disk's.
        """
        try:
            self._checkpoints.settle()
            self._checkpoints.check(state, meta)
            self._count(state, "save")
            return self._checkpoints.save(state, self._known, keep, meta, wait)
        except StorageError as error:
            self._checkpoints.without(error)
            return None

    def _end(self, came: bool) -> None:
        """Once `main` has returned on all ranks: what a signal asks for that no turn of a loop has seen. `came`: to any
        rank."""
        self._checkpoints.settle()
        if not came or self.stopping:
            return
        self.stopping = True
        self._save_last()

    def _save_last(self) -> None:
        """Saves the newest state of a run that is told to stop, unless it is saved already."""
        if self._newest is None or self._checkpoints.path is None:
            return
        self._checkpoints.settle()
        self._count(self._newest, "save")
        if self._known != self._checkpoints.safe:
            self._checkpoints.save_last(self._newest, self._known, in_memory=self._vault is not None)

    def _count(self, state: State, owner: str) -> None:
        """Refuses a state that has taken steps which no turn of the loop has counted: ranks would take states of
        different steps for one, and batches would come twice."""
        seen, step = self._batches(), int(state.step)
        if seen == self._known[0] and step != self._known[1]:
            what = f"the state has taken {step} steps, and had taken {self._known[1]}, after the same {seen} batches"
            fix = (
                "loop over run.steps(state, stop), with one step and one run.commit a turn; several: train on batches "
            )
            fix += "index * 2 and index * 2 + 1, and commit after the second"
            raise FzeroValueError(f"run.{owner}", what, fix=fix)
        self._known = RunProgress(seen, step)

    def _note(self, finding: Finding) -> None:
        """Logs what was found, once for all ranks that know of it."""
        self.health.append(finding)
        if self.mesh.rank == 0:
            logger.warning("fzero.run: %s", finding.text)

    def _batches(self) -> int:
        """The number of batches seen: those before this turn of the loop, and its own once the step was
        called."""
        called = self._train is not None and self._calls is not None and self._train.calls > self._calls
        return self._seen + called
