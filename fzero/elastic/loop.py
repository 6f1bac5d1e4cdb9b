"""Gives a training function its state, the numbers of its batches and a place for what it keeps: the run that `fz.run`
calls `main` with (`fz.Run`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero import checkpoint, launcher, tree
from fzero.arguments import count, flag, plain_numbers, shown
from fzero.checkpoint.behind import AsyncSave
from fzero.checkpoint.index import Index
from fzero.checkpoint.places import Url
from fzero.checkpoint.saving import not_private
from fzero.comm.transport import transport
from fzero.data.steps import Steps
from fzero.deprecation import attribute_alias, keyword_aliases
from fzero.elastic import host, memories
from fzero.elastic.health import Finding, Health
from fzero.elastic.joining import Signals
from fzero.elastic.vault import Damage, Vault
from fzero.elastic.wards import Ward
from fzero.errors import CheckpointError, FzeroValueError, StorageError
from fzero.layout import extent_of
from fzero.lowering.layouts import zero_of
from fzero.mesh import Mesh
from fzero.processes import Processes
from fzero.ranks import agreement, turns
from fzero.ranks.notes import STRANGERS, proven, signed
from fzero.ranks.together import together, world
from fzero.runtime.training import CompiledStep
from fzero.step import State
from fzero.train_state import check_whole
from fzero.transforms.base import find
from fzero.transforms.redundant import Redundant

logger = logging.getLogger("fzero")

_STOP = "fzero/run/stop"
_REMOVERS = "as logind does at the user's last logout, RemoveIPC, or a cleaner of temporary files"
_IDLE = 2  # turns of a loop in a row without a step: more than a batch that is left out
_NOTE = "fzero.run"  # among a checkpoint's meta: how many batches its state has seen, and of which data


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
        here = Processes.of()
        first = here.rank - here.local
        self._host = range(first, first + here.num_local)
        self._vault = None if memory is None else Vault(memory, mesh.rank, mesh.size, self._host)
        self._newest: State | None = None
        self._train: CompiledStep | None = None
        self._data: Steps | None = None
        self._cursor: Mapping[str, Any] | None = None  # of the data, before its first batch
        self._seen = 0  # batches before the one of this turn of the loop
        self._calls: int | None = None  # of the step, before this turn of the loop
        self._known = 0, 0  # batches seen and steps taken, as the state was that was looked at last
        self._safe: tuple[int, int] | None = None  # of the state that is on disk
        self._behind: tuple[AsyncSave, tuple[int, int]] | None = None  # a save that goes on, and of which state
        self._on_disk: list[str] = []
        self._path: str | os.PathLike[str] | None = None
        self._saved: dict[str, Any] = {}
        self._private = False  # whether checkpoints are for this user alone
        self._strange = False  # whether the log says that a stranger writes to the store

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
        self._path, self._train, self._data, self._private = path, train, data, private
        self._cursor = None if data is None else data.cursor(0)
        kept, lost, reached = self._in_memory()
        self._signals.free = kept is None
        on_disk = None if path is None or checkpoint.find(path) is None else checkpoint.describe(path, self.mesh)
        seen = None if on_disk is None else self._seen_by(on_disk)
        if lost:
            self._lost(lost, reached, on_disk, seen or 0)
        state: State | None = None
        self._resized(kept if kept is not None and (seen is None or kept.step >= seen) else on_disk)
        if kept is not None and (seen is None or kept.step >= seen):
            try:
                self.source, state = "memory", train.restore(kept, params)
            except CheckpointError as error:  # on every rank: of a step that is another one now
                if on_disk is None:
                    raise
                logger.warning("fzero.run: what the hosts' memory has is not taken: %s", error)
        if state is None and on_disk is not None:
            self.source, state = "disk", train.restore(on_disk, params)
        elif state is None:
            self.source, state = "init", train.init(params, key)
            if not lost and self.mesh.rank == 0 and (lives := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
                text = (
                    "fzero.run: torchrun has started the ranks again (%s), and no state is in memory%s: it begins anew"
                )
                logger.warning(text, lives, "" if path is None else f" or under {path}")
        self._seen = {"memory": kept.step if kept else 0, "disk": seen or 0, "init": 0}[self.source]
        logger.info(
            "fzero.run: the state after %d steps, from %s, on %d ranks", int(state.step), self.source, self.mesh.size
        )
        self._on_disk = [n for n, x in tree.with_names(state) if extent_of(x)]
        if self._vault is not None and not self._on_disk:
            vault, ward = self._vault, self._ward(train)

            def reserve() -> None:
                try:
                    vault.open(state, self._seen, self._every, self.mesh, ward)
                except OSError as error:
                    assert self._memory is not None
                    raise _no_room(self._memory, error) from error

            agreement.everywhere(self.mesh, "run", reserve)
            if ward is not None:  # all are here; a step would wait for one that is lost meanwhile
                transport(self.mesh).connect(ward.spec.axis)
            self.mesh.context.wards = vault.wards
            if self.source != "memory" or not vault.has(self._seen):  # another host's, or of another number of ranks
                vault.keep(state, self._seen)
        self._newest, self._signals.free = state, self.source != "memory" and not self._signals.came
        self._known = self._seen, int(state.step)
        self._safe = self._known if seen == self._seen else None
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
            self._known = self._seen, self._seen
        idle = 0  # turns in a row without a step
        for batch in range(self._seen, stop):
            if self._told_to_stop(batch):
                self.stopping = True
                if self.mesh.rank == 0:
                    logger.warning("fzero.run: told to stop: batch %d is the next", batch)
                break
            if turns.watcher is not None:
                turns.watcher.say(host.STEPPING, batch)
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
            self._known = self._seen, int(state.step)
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
            self._settle()
            return self._save(state, keep, meta, wait)
        except StorageError as error:
            self._without(error)
            return None

    def _save(
        self, state: State, keep: int | None, meta: Mapping[str, Any] | None, wait: bool = True
    ) -> Path | Url | AsyncSave:
        if self._path is None:
            fix = "run.state(train, params, key, path='runs/gpt')"
            raise FzeroValueError("run.save", "the run has no directory for checkpoints", fix=fix)
        problems = [] if isinstance(state, State) else [f"state={shown(state)}: must be the run's"]
        if meta is not None and not isinstance(meta, Mapping):
            problems.append(f"meta={shown(meta)}: must be a dict")
        elif meta is not None and _NOTE in meta:
            problems.append(f"meta[{_NOTE!r}]: the name is the run's own")
        if problems:
            raise FzeroValueError("run.save", "invalid arguments", problems, "run.save(state, meta={'lr': 1e-3})")
        self._count(state, "save")
        self._saved = {"keep": keep, "meta": meta}
        note: dict[str, Any] = {"seen": self._batches()}
        if self._data is not None:
            note["data"] = {**(self._cursor or {}), "next": self._data.data_step(note["seen"])}
        more = {**(meta or {}), _NOTE: note}
        saved = checkpoint.save(self._path, state, keep=keep, meta=more, wait=wait, private=self._private)
        if isinstance(saved, AsyncSave):
            self._behind = saved, self._known
        else:
            self._safe = self._known
        return saved

    def _settle(self) -> None:
        """Waits for the checkpoint that is written behind the steps, if one is."""
        if self._behind is not None:
            (saving, known), self._behind = self._behind, None
            try:
                saving.wait()
                self._safe = known
            except StorageError as error:
                self._without(error)

    def _without(self, error: StorageError) -> None:
        if self.mesh.rank == 0:
            logger.warning("fzero.run: the run goes on without this checkpoint: %s", error)

    def _end(self, came: bool) -> None:
        """Once `main` has returned on all ranks: what a signal asks for that no turn of a loop has seen. `came`: to any
        rank."""
        self._settle()
        if not came or self.stopping:
            return
        self.stopping = True
        self._save_last()

    def _save_last(self) -> None:
        """Saves the newest state of a run that is told to stop, unless it is saved already.

        Raises:
            CheckpointError: it cannot be saved, with what the next start goes on from.
        """
        if self._newest is None or self._path is None:
            return
        self._settle()
        self._count(self._newest, "save")
        if self._known == self._safe:
            return
        try:
            saved = self._save(self._newest, self._saved.get("keep"), self._saved.get("meta"))
        except CheckpointError as error:
            text, _, fix = str(error).partition("\nFix: ")
            what = f"the run is told to stop, and its state after {self._known[0]} batches is not saved"
            problems = [line.strip() for line in text.splitlines()] + [self._next_start()]
            raise type(error)("run", what, problems, fix or None) from error
        if self.mesh.rank == 0:
            logger.warning("fzero.run: the state after %d batches is saved: %s", self._known[0], saved)

    def _next_start(self) -> str:
        """A line on where the next start goes on from, if the last state is not on disk. All ranks call it."""
        if self._vault is not None and launcher.starts_again():
            return "the hosts' memory has it: torchrun starts the ranks again, and they go on from there"
        try:
            assert self._path is not None
            found = checkpoint.find(self._path)
        except CheckpointError as error:
            return f"the next start ends with {str(error).splitlines()[0]}"
        if found is None:
            return f"the next start begins anew: there is no checkpoint under {self._path}"
        return f"the next start goes on from {found}"

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
        self._known = seen, step

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

    def _seen_by(self, saved: Index) -> int:
        """The number of batches that the state of a checkpoint has seen."""
        note = saved.meta.get(_NOTE, {})
        if self._data is not None and "data" in note:
            data = self._data
            return agreement.everywhere(self.mesh, "run", lambda: data.resume(note["data"]))
        return note.get("seen", saved.step)

    def _ward(self, train: CompiledStep) -> Ward | None:
        """The source of what another rank sends in this step, if one does."""
        spec = find(train.resolved.transforms, Redundant)
        if spec is None:
            return None
        if not spec.has_receivers(self.mesh):
            if self.mesh.size > 1 and self.mesh.rank == 0:
                logger.warning("fzero.run: one rank along %r: nothing is sent, a lost host goes to disk", spec.axis)
            return None
        if spec.every % self._every:
            what = f"{spec} sends states that fz.run(every={self._every}) does not keep"
            fix = f"send every {self._every} steps, or a multiple: fz.redundant(every={self._every})"
            raise FzeroValueError("run", what, fix=fix)
        return Ward(spec, spec.shift(self.mesh))

    def _told_to_stop(self, step: int) -> bool:
        """Whether the run ends before this step: a rank that was told tells the others before it begins one, and none
        can end that without it."""
        if self.mesh.size == 1:
            return self._signals.came
        store, secret = self.mesh.store, self.mesh.secret
        found = store.get(_STOP) if store.check([_STOP]) else b""
        said = proven(secret, _STOP, found)
        if found and said is None and not self._strange:
            self._strange = True
            logger.warning("fzero.run: ignores a stop in the store that is not this run's: %s", STRANGERS)
        if self._signals.came and said is None:
            store.compare_set(_STOP, found.decode(errors="replace"), signed(secret, _STOP, str(step + 1)))
        return said is not None and int(said) <= step

    def _resized(self, found: Index | None) -> None:
        """Says, or refuses, that another number of ranks has trained this state."""
        if found is None or (before := memories.ranks_of(found)) == (now := self.mesh.size):
            return
        if self._on_resize == "error":
            what = f"the state of step {found.step} was trained by {before} ranks, and here are {now}"
            fix = f"start the run on {before} ranks, or allow another number: fz.run(main, on_resize='keep_batch')"
            raise FzeroValueError("run", what, fix=fix)
        logger.info("fzero.run: from %d ranks to %d", before, now)

    def _lost(self, what: str, reached: int, on_disk: Index | None, seen: int) -> None:
        """Says that no kept state is whole, and from where the run goes on; refuses to begin anew where no checkpoint
        could have another.

        Args:
            what: is lost.
            reached: batches that had been seen.
            on_disk, seen: the newest checkpoint, and how many batches its state has seen.

        Raises:
            FzeroValueError: the run has no path.
        """
        if self._path is None:
            fix = (
                "start the run again, from its first state; run.state(..., path=...) and run.save(state) outlive what "
            )
            fix += "fz.redundant does not"
            raise FzeroValueError("run.state", "the state of this run is lost", [what], fix)
        if self.mesh.rank == 0:
            anew = f"there is no checkpoint under {self._path}, and the run begins anew"
            where = anew if on_disk is None else f"the run goes back to {on_disk.directory}"
            more = reached - seen
            again = f", and does {more} batch{'es' * (more > 1)} again" if more > 0 else ""
            logger.warning("fzero.run: %s: %s%s", what, where, again)

    def _in_memory(self) -> tuple[Index | None, str, int]:
        """The newest state that the memories of all hosts have together, what is lost if there is none, and how many
        batches some rank had seen before it began its last step."""
        if self._memory is None:
            return None, "", 0
        memory, here = self._memory, Processes.of()
        mine = 0 if turns.watcher is None else turns.watcher.reached
        reached = max(agreement.everyones(self.mesh, "run", lambda: mine))  # nobody keeps meanwhile
        what = "cannot check the memory of a host"
        look = lambda: memories.let_go_of_damaged(memory, here.local, here.num_local)  # noqa: E731
        damaged = together(world(), "run", what, look, form=list[Damage])
        for rank, seen, leaves, sent in (x for those in damaged for x in those):
            how = "sent of its state" if sent else "kept"
            after = f"after {seen} batches" if seen >= 0 else "after an unknown number of batches"
            text = f"what rank {rank} {how} {after} has changed in memory, and is not used: "
            text += ", ".join(leaves[:5])
            self._note(Finding("slot", seen, (rank,), text))
        kept, lost = memories.newest(memory, self.mesh, world())
        if kept is None and not lost and reached:
            ranks = ", ".join(map(str, range(self.mesh.size)))
            lost = f"of the state after {reached} batches no host's memory has what rank{'s' * (self.mesh.size > 1)} "
            lost += f"{ranks} had (its files may have been removed: {_REMOVERS})"
        return kept, lost, reached


def _no_room(memory: Path, error: OSError) -> FzeroValueError:
    space = os.statvfs(memory)
    free = f"{memory}: {space.f_bavail * space.f_frsize / 1e6:.0f} MB are free; {error.strerror}"
    fix = f"a larger /dev/shm (docker run --shm-size, a memory volume in Kubernetes), or {host.elsewhere()}"
    return FzeroValueError("run", "the host's memory does not take the copies of the state", [free], fix)
