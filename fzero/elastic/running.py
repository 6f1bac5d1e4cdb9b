"""Calls a user's training function again on a new mesh whenever a rank was lost, with the state that the hosts' memory
has (`fz.run`)."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from fzero import agree, checkpoint, launcher, tree, turns
from fzero.arguments import count, function, number, path_like, shown
from fzero.checkpoint.index import Index
from fzero.checkpoint.ranks import together, world
from fzero.checkpoint.storage import Url
from fzero.comm.transport import transport
from fzero.data.steps import Steps
from fzero.elastic import host, moving, replay
from fzero.elastic.health import Finding, Health, Jumps, Pace
from fzero.elastic.vault import Vault, held, serves
from fzero.elastic.wards import Ward
from fzero.errors import CheckpointError, DivergenceError, FzeroError, FzeroValueError, RankLost, StorageError, message
from fzero.layout import extent_of
from fzero.mesh import Mesh, close_mesh, make_mesh
from fzero.processes import Processes
from fzero.runtime.training import CompiledStep
from fzero.step import State
from fzero.transforms.base import find
from fzero.transforms.redundant import Redundant

T = TypeVar("T")

logger = logging.getLogger("fzero")

_PATIENCE = 5.0  # seconds in which a rank that others were torn away from turns out to have died
_TRIES = 3  # to come together, of which all but one end with the loss of a rank
_STOP, _RAISED = "fzero/run/stop", "fzero/run/raised"
_MOST_LEFT_OUT = 8  # batches in a row
_IDLE = 2  # turns of a loop in a row without a step: more than a batch that is left out
_NOTE = "fzero.run"  # among a checkpoint's meta: how many batches its state has seen, and of which data
_ended: Counter[Path] = Counter()  # runs under a keeper that this process has seen the end of, by their memory
STOPPED = 143  # the exit code of a process that SIGTERM ends


class Run:
    """A run on one mesh: from where all ranks have come together to the end, or to the loss of one of them.

    Attributes:
        mesh: of all ranks.
        place: `rank` and `size` along the axes of the mesh, as the datasets of `fz.data` take them.
        source: where `state` found the state: "memory", "disk" or "init".
        stopping: whether a signal has asked the run to end; every rank sees the same between two steps.
        health: what was found wrong since the ranks came together (`fz.Health`), the same on every rank.
        rehearsing: whether this is a spare process that prepares itself, and no rank: `main` is called there up to its
            first step (docs/elastic.md). What is to happen once a run does not belong there.

    Example:
        >>> import fzero as fz
        >>> fz.run(lambda run: (run.mesh.size, run.place, run.stopping), device="cpu")
        (1, {'rank': 0, 'size': 1}, False)
    """

    rehearsing = False

    def __init__(
        self,
        mesh: Mesh,
        memory: Path | None,
        every: int,
        signals: _Signals,
        health: Health,
        on_resize: str = "keep_batch",
    ):
        self.mesh, self.source, self.stopping = mesh, "", False
        self._on_resize = on_resize
        self.health: list[Finding] = []
        alone = mesh.size == 1 or mesh.device_type == "cuda"  # there the host does not wait for others
        self._care, self._jumps = health, None if health.spikes is None else Jumps(health.spikes)
        self._kept: int | None = None  # how many batches what this run has kept last has seen
        self._left_out = 0  # batches in a row
        # what is asked for and only `step` does, until it is called
        self._unasked = [n for n in ("replay", "spikes", "replicas") if getattr(health, n) is not None]
        # of `step`: the batch, how many came before it, and the sums of its words
        self._last: tuple[CompiledStep, Any, int, list[torch.Tensor]] | None = None
        self._pace = None if alone or health.stragglers is None else Pace(mesh, health.stragglers)
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
        self._on_disk: list[str] = []
        self._path: str | os.PathLike[str] | None = None
        self._saved: dict[str, Any] = {}

    @property
    def place(self) -> dict[str, int]:
        axes = tuple(name for name in self.mesh.axes if name in ("node", "replica", "data"))
        return {"rank": self.mesh.index(axes), "size": self.mesh.axis_size(axes)}

    def micro_batches(self, batch: int, rows: int) -> int:
        """The number for `fz.accumulate` with which the global batch stays as it is on however many ranks there are:
        the smallest that divides a rank's part of it into micro-batches of at most so many rows.

        Args:
            batch: rows of the global batch.
            rows: the most that a rank takes at a time.

        Raises:
            FzeroValueError: numbers below 1; a batch that these ranks cannot share alike, with the numbers that can.

        Example:
            >>> import fzero as fz
            >>> fz.run(lambda run: run.micro_batches(24, rows=5), device="cpu")
            6
        """
        fix = "e.g. fz.accumulate(run.micro_batches(data.batch, rows=4))"
        if problems := count("batch", batch) + count("rows", rows):
            raise FzeroValueError(message("run.micro_batches", "invalid arguments", problems, fix))
        size = self.place["size"]
        if batch % size:
            able = [n for n in range(1, batch + 1) if batch % n == 0]
            near = [n for n in able if n < size][-4:] + [n for n in able if n > size][:2]
            what = f"a batch of {batch} rows cannot be shared by {size} ranks alike"
            fix = f"start the run on a number of ranks that divides it ({', '.join(map(str, near))})"
            raise FzeroValueError(message("run.micro_batches", what, fix=fix))
        share = batch // size
        return next(n for n in range(-(-share // rows), share + 1) if share % n == 0)

    def state(
        self,
        train: CompiledStep,
        params: Any,
        key: torch.Tensor | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        data: Steps | None = None,
    ) -> State:
        """The newest state that all ranks can have: of the hosts' memory, else of the checkpoints under `path`, else a
        first one.

        Args:
            train: the compiled step.
            params, key: of `train.init`.
            path: the directory of the run's checkpoints, or a URL; where `save`, and a run that is told to stop, write.
            data: the data set whose batches the run sees. Checkpoints say which it was, and are not gone on from with
                another one.

        Communication: a few bytes, and what `restore` or `init` take.

        Raises:
            CheckpointError, FzeroValueError: of these; or the hosts' memory does not take the state, with what is free;
                or the checkpoint is of a run on other data, listing every difference; or another number of ranks has
                trained it, with `on_resize="refuse"`.
        """
        problems = [] if isinstance(train, CompiledStep) else [f"train={shown(train)}: must be what fz.compile returns"]
        if data is not None and not isinstance(data, Steps):
            problems.append(f"data={shown(data)}: must be a data set of fz.data")
        if problems:
            fix = "run.state(fz.compile(step, run.mesh), params, key, path='runs/gpt', data=fz.data.TokenDataset(...))"
            raise FzeroValueError(message("run.state", "invalid arguments", problems, fix))
        if self._newest is not None:
            fix = "one step of one tree of parameters that holds both; or an fz.run for each"
            raise FzeroValueError(message("run.state", "a run has one state, and this one has it already", fix=fix))
        self._path, self._train, self._data = path, train, data
        self._cursor = None if data is None else data.cursor(0)
        kept = self._in_memory()
        self._signals.free = kept is None
        on_disk = None if path is None or checkpoint.find(path) is None else checkpoint.describe(path, self.mesh)
        seen = None if on_disk is None else self._seen_by(on_disk)
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
        self._seen = {"memory": kept.step if kept else 0, "disk": seen or 0, "init": 0}[self.source]
        logger.info("fzero.run: step %d of %s, %d ranks", int(state.step), self.source, self.mesh.size)
        self._on_disk = [n for n, x in zip(tree.names(state), tree.leaves(state), strict=True) if extent_of(x)]
        if self._vault is not None and not self._on_disk:
            vault, ward = self._vault, self._ward(train)

            def reserve() -> None:
                try:
                    vault.open(state, self._seen, self._every, self.mesh, ward)
                except OSError as error:
                    assert self._memory is not None
                    raise _no_room(self._memory, error) from error

            agree.everywhere(self.mesh, "run", reserve)
            if ward is not None:  # all are here; a step would wait for one that is lost meanwhile
                transport(self.mesh).connect(ward.spec.axis)
            self.mesh.context.wards = vault.wards
            if self.source != "memory" or not vault.has(self._seen):  # another host's, or of another number of ranks
                vault.keep(state, self._seen)
        self._newest, self._signals.free = state, self.source != "memory" and not self._signals.came
        self._known = self._seen, int(state.step)
        self._safe = self._known if self.source == "disk" else None
        return state

    def steps(self, state: State, stop: int) -> Iterator[int]:
        """The numbers of the batches from the first that this state has not seen to `stop`: of steps, but that one
        which is skipped, as those that overflow in fp16 are, is none and has seen its batch. Ends early, on every rank
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
            raise FzeroValueError(message("run.steps", "invalid arguments", problems, "run.steps(state, 10_000)"))
        # of a state that is not the run's: as many as its steps
        self._seen, self._calls = self._batches() if state is self._newest else int(state.step), None
        if state is not self._newest:
            self._known = self._seen, self._seen
        idle = 0  # turns in a row without a step
        for batch in range(self._seen, stop):
            if self._told_to_stop(batch):
                self.stopping = True
                if self.mesh.rank == 0:
                    saved = "" if self._path is None else f"; its state is saved under {self._path}"
                    logger.warning("fzero.run: told to stop: batch %d is the next%s", batch, saved)
                break
            if turns.watcher is not None:
                turns.watcher.say(host.STEPPING, batch)
            for finding in self._pace.step(batch) if self._pace else ():
                self._note(finding)
            self._seen, self._calls = batch, None if self._train is None else self._train.calls
            if self._vault is not None and self._vault.wards is not None:
                self._vault.wards.begin(batch)
            yield batch
            idle = 0 if self._batches() > batch or self._train is None else idle + 1
            if idle == _IDLE:
                asked = f"batches {batch + 1 - idle} to {batch} were asked for, and no step was taken"
                fix = "take a step for each number before the next is asked for: for index in run.steps(state, stop), "
                fix += "no list and no sampler made of it; to leave batches out, fz.data's skip=[(first, last + 1)]"
                raise FzeroValueError(message("run.steps", "it is read ahead", [asked], fix))
            self._seen, self._calls, self._signals.free = batch + 1, None, False
        if not self.stopping and state is self._newest:
            self._known = self._seen, int(state.step)
        if self.stopping and self._path is not None and self._newest is not None:
            self._save(self._newest, self._saved.get("keep"), self._saved.get("meta"))

    def keep(self, state: State) -> None:
        """Copies this rank's part of a state to its host's memory, from where the run goes on if a process is lost.

        Memory: on each host twice what its ranks hold; with `redundant` three times that, and twice what is sent to
        them. Communication: none.

        Raises:
            FzeroValueError: leaves rest on disk, which are not kept in memory; or it is not the run's state.
        """
        if not isinstance(state, State):
            what = f"{type(state).__name__} is not a state"
            raise FzeroValueError(
                message("run.keep", what, fix="state, metrics = train(state, batch); run.keep(state)")
            )
        if self._unasked:
            asked = " and ".join(f"{name}=" for name in self._unasked)
            if self.mesh.rank == 0:
                logger.warning("fzero.run: fz.Health's %s does nothing for train(...) and run.keep: run.step", asked)
            self._unasked = []
        kept = self._vault is not None and self._batches() % self._every == 0
        if kept or not state.step.is_cuda:  # else the host would wait for the step
            self._count(state, "keep")
        self._newest = state
        if self._vault is not None and self._on_disk:
            what = f"{len(self._on_disk)} leaves rest on disk, and are not kept in memory"
            fix = "leave run.keep out and call run.save(state), or let them rest elsewhere"
            raise FzeroValueError(message("run.keep", what, self._on_disk[:5], fix))
        seen = self._batches()
        if self._vault is not None and self._vault.wards is not None and self._vault.has(seen - 1):
            self._vault.wards.seal(seen)
        if self._vault is not None and seen % self._every == 0:
            self._vault.keep(state, seen)
            self._kept = seen

    def step(self, train: CompiledStep, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """`train(state, batch)` and `run.keep(state)`, looked after as `fz.run(health=...)` says: done again now and
        then, and when its numbers jump; a batch that spoils the state is left out, and `metrics["skipped"]` says so.

        Args:
            train, state, batch: as in a step.

        Communication: with `replay` or `spikes` as much as the steps that are done again, and about a kilobyte; with
            `spikes` a word of every rank through the store each step.
        Memory: none besides that of a step; the batch is held until the next one. Time: the batch is read once more.

        Raises:
            FzeroValueError: leaves rest on disk, which are not kept; eight batches in a row were left out.
            DivergenceError: with `replicas`, values that ranks hold in common and that differ, by leaf and rank.
        """
        if not isinstance(train, CompiledStep) or not isinstance(state, State):
            what = f"run.step({shown(train)}, {shown(state)}, batch)"
            fix = "state, metrics = run.step(train, state, batch), with train of fz.compile and a state of its own"
            raise FzeroValueError(message("run.step", what, fix=fix))
        self._unasked = []
        seen, care, words = self._batches(), self._care, replay.words(batch)
        due = care.replay is not None and (seen + 1) % care.replay == 0
        if not due and self._jumps is None:
            state, metrics = train(state, batch)
        else:
            metrics = self._looked_after(train, state, batch, seen, due)
        if care.replicas is not None and (seen + 1) % care.replicas == 0:
            train.check_replicas(state)
        self._last = train, batch, seen, words
        self.keep(state)
        return state, metrics

    def check(self) -> Finding | None:
        """Does the last step of `step` again, and keeps what two runs of three come to; None if it came to the same.

        Raises:
            FzeroValueError: there was no step since `state`, or nothing has kept the state before it; or its batch has
                changed since, as that of a loader that fills the same memory again.
        """
        if self._last is None or self._newest is None:
            fix = "state, metrics = run.step(train, state, batch); run.check()"
            raise FzeroValueError(message("run.check", "there is no step to be done again", fix=fix))
        train, batch, seen, words = self._last

        def unchanged() -> None:
            if any(int(x) != int(y) for x, y in zip(words, replay.words(batch), strict=True)):
                fix = "give run.step a copy of it, or check before the loader makes the next batch"
                raise FzeroValueError(message("run.check", "the batch of the last step has changed since", fix=fix))

        agree.everywhere(self.mesh, "run", unchanged)
        _, finding = self._again(train, self._newest, batch, seen, replay.Ran({}, []))
        if finding is not None:
            self.keep(self._newest)
        return finding

    def _looked_after(self, train: CompiledStep, state: State, batch: Any, seen: int, due: bool) -> dict[str, Any]:
        """The metrics of a step that is done again if it is its turn, or its numbers have jumped."""
        if self._kept != seen:  # of another number of ranks, or by nobody
            self.keep(state)
        first = replay.carried_out(train, state, batch)
        metrics, jumps, ranks, finding = first.metrics, "", (), None
        if self._jumps is not None:
            numbers = {} if bool(metrics.get("skipped", False)) else _numbers(metrics)
            jumps, ranks = self._found(self._jumps, numbers)
        if due or jumps:
            metrics, finding = self._again(train, state, batch, seen, first)
        if jumps and self._jumps is not None:
            before, (jumps, _) = jumps, self._found(self._jumps, _numbers(metrics))
            if not jumps and finding is None:  # a copy of the numbers, which is given to nobody
                who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                text = f"batch {seen} came to {before} on {who}, and to nothing of that when done again"
                self._note(Finding("replay", seen, ranks, text))
        self._left_out = self._left_out + 1 if jumps else 0
        if jumps:
            self._rewind(state, seen)
            self._note(Finding("spike", seen, (), f"batch {seen} is left out: {jumps}, and so when it was done again"))
            metrics = {**metrics, "skipped": torch.tensor(True)}
        if self._left_out == _MOST_LEFT_OUT:
            what = f"{_MOST_LEFT_OUT} batches in a row were left out: it is not the data"
            fix = "go back to a checkpoint before that, with a lower learning rate; or give a larger Health(spikes=...)"
            raise FzeroValueError(message("run.step", what, [finding.text for finding in self.health[-3:]], fix))
        return metrics

    def _found(self, jumps: Jumps, numbers: Mapping[str, float]) -> tuple[str, tuple[int, ...]]:
        """The numbers that have jumped, and on which ranks, the same on all: one that errs may see others."""
        everyones = agree.everyones(self.mesh, "run", lambda: jumps.found(numbers))
        return next(filter(None, everyones), ""), tuple(rank for rank, text in enumerate(everyones) if text)

    def _again(
        self, train: CompiledStep, state: State, batch: Any, seen: int, first: replay.Ran
    ) -> tuple[dict[str, Any], Finding | None]:
        """The metrics of a step done again, once if it comes to the same, else twice; and what is wrong then. The state
        is behind it."""
        mesh = self.mesh
        first.state = replay.sums(state)
        turned: replay.Difference | None = None
        if self._care.rotate and first.given:
            self._rewind(state, seen)
            other = replay.carried_out(train, state, replay.turned_batch(train, batch), shift=1)
            turned = replay.erring(train, first, other)
        second = self._once_more(train, state, batch, seen)
        odd, text = replay.differing(mesh, first, second), ""
        if odd is not None:
            third = self._once_more(train, state, batch, seen)
            if replay.differing(mesh, second, third) is None:
                text, second = "two more runs agree, and theirs is kept", third
            elif (other := replay.differing(mesh, first, third)) is None:
                odd, second = replay.differing(mesh, second, third), third
                text = "the first and the third of three runs agree, and theirs is kept"
            else:
                second = third
                text = "three runs come to three results: operations that are not deterministic, or failing hardware"
        elif turned is not None:
            odd, text = turned, "its result is kept: the same ranks come to it again"
        if odd is None:
            return second.metrics, None
        who = f"rank{'s' * (len(odd.ranks) > 1)} {', '.join(map(str, odd.ranks))}"
        finding = Finding(
            "replay", seen, odd.ranks, f"batch {seen} came to other bits on {who} when done again, {odd.where}; {text}"
        )
        self._note(finding)
        return second.metrics, finding

    def _once_more(self, train: CompiledStep, state: State, batch: Any, seen: int) -> replay.Ran:
        self._rewind(state, seen)
        ran = replay.carried_out(train, state, batch)
        ran.state = replay.sums(state)
        return ran

    def _rewind(self, state: State, seen: int) -> None:
        """Makes a state the one that was kept before its last step."""
        index = None if self._memory is None else held(self._memory).get((seen, self.mesh.size))
        whole = agree.everyones(
            self.mesh, "run", lambda: index is not None and serves(index, self.mesh.size, self.mesh.size, self._host)
        )
        if not all(whole):
            fix = "start the ranks by torchrun or python -m fzero.run, or give fz.run(memory=DIR): else none is kept"
            what = "the state before this step was not kept"
            raise FzeroValueError(message("run.step", what, [f"after {seen} batches"], fix))
        assert index is not None
        replay.rewind(state, index, self.mesh)

    def save(
        self, state: State, *, keep: int | None = None, meta: Mapping[str, Any] | None = None
    ) -> Path | Url | None:
        """`fz.checkpoint.save` under the path of `state`. Where the disk is full, or fails, the run goes on with a
        warning: the checkpoint before is as it was, and the state is in memory. None then."""
        try:
            return self._save(state, keep, meta)
        except StorageError as error:
            if self.mesh.rank == 0:
                logger.warning("fzero.run: the run goes on without this checkpoint: %s", error)
            return None

    def _save(self, state: State, keep: int | None, meta: Mapping[str, Any] | None) -> Path | Url:
        if self._path is None:
            fix = "run.state(train, params, key, path='runs/gpt')"
            raise FzeroValueError(message("run.save", "the run has no directory for checkpoints", fix=fix))
        problems = [] if isinstance(state, State) else [f"state={shown(state)}: must be the run's"]
        if meta is not None and not isinstance(meta, Mapping):
            problems.append(f"meta={shown(meta)}: must be a dict")
        elif meta is not None and _NOTE in meta:
            problems.append(f"meta[{_NOTE!r}]: the name is the run's own")
        if problems:
            raise FzeroValueError(
                message("run.save", "invalid arguments", problems, "run.save(state, meta={'lr': 1e-3})")
            )
        self._count(state, "save")
        self._saved = {"keep": keep, "meta": meta}
        note: dict[str, Any] = {"seen": self._batches()}
        if self._data is not None:
            note["data"] = {**(self._cursor or {}), "next": self._data.data_step(note["seen"])}
        saved = checkpoint.save(self._path, state, keep=keep, meta={**(meta or {}), _NOTE: note})
        self._safe = self._known
        return saved

    def _end(self, came: bool) -> None:
        """Once `main` has returned on all ranks: what a signal asks for that no turn of a loop has seen. `came`: to any
        rank."""
        if not came or self.stopping:
            return
        self.stopping = True
        if self._newest is not None and self._path is not None:
            self._count(self._newest, "save")
            if self._known != self._safe:
                self._save(self._newest, self._saved.get("keep"), self._saved.get("meta"))

    def _count(self, state: State, owner: str) -> None:
        """Refuses a state that has taken steps which no turn of the loop has counted: ranks would take states of
        different steps for one, and batches would come twice."""
        seen, step = self._batches(), int(state.step)
        if seen == self._known[0] and step != self._known[1]:
            what = f"the state has taken {step} steps, and had taken {self._known[1]}, after the same {seen} batches"
            fix = "loop over run.steps(state, stop), with one step and one run.keep a turn; several: train on batches "
            fix += "index * 2 and index * 2 + 1, and keep after the second"
            raise FzeroValueError(message(f"run.{owner}", what, fix=fix))
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
            return agree.everywhere(self.mesh, "run", lambda: data.resume(note["data"]))
        return note.get("seen", saved.step)

    def _ward(self, train: CompiledStep) -> Ward | None:
        """The source of what another rank sends in this step, if one does."""
        spec = find(train.resolved.transforms, Redundant)
        if spec is None or self.mesh.size == 1:
            return None
        if spec.every % self._every:
            what = f"{spec} sends states that fz.run(every={self._every}) does not keep"
            fix = f"send every {self._every} steps, or a multiple: fz.redundant(every={self._every})"
            raise FzeroValueError(message("run", what, fix=fix))
        return Ward(spec, spec.shift(self.mesh))

    def _told_to_stop(self, step: int) -> bool:
        """Whether the run ends before this step: a rank that was told tells the others before it begins one, and none
        can end that without it."""
        if self.mesh.size == 1:
            return self._signals.came
        if self._signals.came:
            self.mesh.store.compare_set(_STOP, "", str(step + 1))
        return self.mesh.store.check([_STOP]) and int(self.mesh.store.get(_STOP)) <= step

    def _resized(self, found: Index | None) -> None:
        """Says, or refuses, that another number of ranks has trained this state."""
        if found is None or (before := moving.ranks_of(found)) == (now := self.mesh.size):
            return
        if self._on_resize == "refuse":
            what = f"the state of step {found.step} was trained by {before} ranks, and here are {now}"
            fix = f"start the run on {before} ranks, or allow another number: fz.run(main, on_resize='keep_batch')"
            raise FzeroValueError(message("run", what, fix=fix))
        logger.info("fzero.run: from %d ranks to %d", before, now)

    def _in_memory(self) -> Index | None:
        """The newest state that the memories of all hosts have together."""
        if self._memory is None:
            return None
        memory, here = self._memory, Processes.of()
        agree.everywhere(self.mesh, "run", lambda: None)  # nobody keeps anything meanwhile
        what = "cannot check the memory of a host"
        damaged = together(world(), "run", what, lambda: moving.let_go_of_damaged(memory, here.local, here.num_local))
        for rank, seen, leaves, sent in (x for those in damaged for x in those):
            how = "sent of its state" if sent else "kept"
            text = f"what rank {rank} {how} after {seen} batches has changed in memory, and is not used: "
            text += ", ".join(leaves[:5])
            self._note(Finding("slot", seen, (rank,), text))
        return moving.newest(memory, self.mesh, world())


def run(
    main: Callable[[Run], T],
    *,
    memory: str | os.PathLike[str] | None = None,
    every: int = 1,
    stop_on: Sequence[int] = (signal.SIGTERM,),
    timeout: float = 600.0,
    health: Health | None = None,
    on_resize: Literal["keep_batch", "refuse"] = "keep_batch",
    **mesh: Any,
) -> T:
    """Calls `main`, and calls it again on a new mesh whenever a rank was lost, until it returns.

    Under `python -m fzero.run` (docs/elastic.md) a process that dies is started again by itself, and the others stay,
    with their memory and what they have compiled; started by torchrun alone, it starts all of them. Either way `state`
    finds what `keep` left in the memory of the hosts. One process without either: `main` is called once.

    Args:
        main: takes a `Run` and trains: on `run.mesh`, from `run.state(...)`, over `run.steps(...)`.
        memory: in place of `/dev/shm` or the directory for temporary files: where states are kept, in a directory that
            is the user's alone and is removed when the run has ended.
        every: of so many steps one is kept. Steps since the last one are done again.
        stop_on: signals that end the run after the step under way. The process then exits with code 143.
        timeout: of `make_mesh`: seconds in which all ranks must have come, and for which they wait in a transfer.
        health: the care taken of slow ranks, of memory and arithmetic that go wrong and of batches that spoil a state.
        on_resize: a state that another number of ranks has trained is gone on from, and what `run.place` and
            `run.micro_batches` say keeps the global batch; "refuse": it is an error.
        mesh: further arguments of `make_mesh`.

    Raises:
        SystemExit: with code 143, when the run was told to stop.
        FzeroValueError: invalid arguments. Whatever else `main` raises ends the run, and is raised.
        DivergenceError: the store of the ranks is gone, with the host that kept it.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
        >>> def main(run):
        ...     train = fz.compile(step, run.mesh, backend="eager")
        ...     state = run.state(train, {"w": torch.ones(2)})
        ...     for index in run.steps(state, 3):
        ...         state, metrics = train(state, torch.ones(2))
        ...         run.keep(state)
        ...     return int(state.step)
        >>> run(main, device="cpu")
        3
    """
    problems = number("timeout", timeout, above=0) + _stops(stop_on)
    if memory is not None:
        problems += path_like("memory", memory) or host.not_a_directory(os.fspath(memory))
    if type(every) is not int or every < 1:
        problems.append(f"every={every!r}: must be a whole number of at least 1")
    if health is not None and not isinstance(health, Health):
        problems.append(f"health={health!r}: must be fz.Health(...)")
    else:
        problems += (health := health or Health()).problems()
    if on_resize not in ("keep_batch", "refuse"):
        problems.append(f"on_resize={on_resize!r}: must be 'keep_batch' or 'refuse'")
    problems += function("main", main, "run")
    if any(
        kind(main) for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    ):
        problems.append(f"main={shown(main)}: a generator, or an async function: calling it runs nothing of it")
    here, keeper, torchrun = Processes.of(), host.KEEPER in os.environ, launcher.under_torchrun()
    if not problems and health is not None and (health.replay is not None or health.spikes is not None):
        if every != 1:
            problems.append(f"every={every}: health goes back to the state before a step, which every=1 keeps")
        if memory is None and not (keeper or torchrun):
            problems.append("health goes back to the state before a step, which nothing keeps here: give memory=DIR")
    if memory is not None and keeper:
        problems.append("memory: its keeper says where a rank keeps states: python -m fzero.run --memory DIR")
    elif memory is not None and here.world > 1 and not torchrun:
        problems.append("memory: no process owns these ranks' memory: start them by torchrun, or python -m fzero.run")
    if problems:
        raise FzeroValueError(message("run", "invalid arguments", problems, "e.g. fz.run(main, every=1)"))
    if host.SPARE in os.environ:
        from fzero.elastic.rehearsal import stand_by

        stand_by(main, timeout, mesh)
        here = Processes.of()
    try:
        kept_in = host.memory(memory) if keeper or torchrun or memory is not None else None
        if kept_in is not None:
            host.of_run(kept_in, _ended[kept_in]).mkdir(mode=0o700, exist_ok=True)
        turns.watcher = None if kept_in is None else host.Progress(kept_in, here.rank)
    except OSError as error:
        what = "the host's memory cannot be used"
        raise FzeroValueError(
            message("run", what, [str(error)], "fz.run(memory=DIR) takes another directory")
        ) from error
    try:
        with _Signals(stop_on) as signals:
            if keeper:
                faulthandler.register(signal.SIGUSR1, all_threads=True)
            result, stopped = _until_it_returns(
                main, kept_in, every, signals, keeper and here.world > 1, timeout, health or Health(), on_resize, mesh
            )
            if turns.watcher is not None:
                turns.watcher.say(host.FINISHED)
    except torch.distributed.DistNetworkError as error:
        what = (
            "the store is gone: the process that kept it, of the launcher or of rank 0, has left or cannot be reached"
        )
        fix = "start the run again, it goes on from its last checkpoint; keep --rdzv-endpoint on a host that stays"
        raise DivergenceError(message("run", what, [_brief(error)], fix)) from error
    finally:
        turns.watcher = None
    close_mesh()
    if kept_in is not None and keeper:
        _ended[kept_in] += 1
    elif kept_in is not None and here.local == 0:
        host.remove(kept_in)
    if stopped:
        sys.exit(STOPPED)
    return result


def _until_it_returns(
    main: Callable[[Run], T],
    memory: Path | None,
    every: int,
    signals: _Signals,
    again: bool,
    timeout: float,
    health: Health,
    on_resize: str,
    axes: Mapping[str, Any],
) -> tuple[T, bool]:
    """The result of `main`, and whether the run was told to stop. `again`: whether a lost rank comes back."""
    ended = 0 if memory is None else _ended[memory]
    place = None if memory is None else host.of_run(memory, ended)
    while True:
        mesh = _joined(signals, again, timeout, axes)
        run = Run(mesh, place, every, signals, health, on_resize)
        try:
            apart = _apart(mesh, ended) if again else None
            if apart is None:
                if memory is not None and Processes.of().local == 0:
                    host.forget(memory, ended)
                result = main(run)
                run._end(any(agree.everyones(mesh, "run", lambda: signals.came)))
                return result, run.stopping
        except Exception as error:
            if not (again and _lost(mesh, error)):
                _say_why(mesh, error)
                raise
            if why := _said_why(mesh):
                logger.warning("fzero.run: %s, which ends the run", why)
            else:
                logger.warning("fzero.run: a rank was lost (%s); joining again", _brief(error))
        else:
            raise apart
        del mesh, run
        _leave()


def _joined(signals: _Signals, again: bool, timeout: float, axes: Mapping[str, Any]) -> Mesh:
    """The mesh of all ranks. One that is lost while they come together is waited for, too."""
    if signals.came:
        sys.exit(STOPPED)
    if turns.watcher is not None:
        turns.watcher.say(host.COMING)
    tries, signals.free = _TRIES if again else 1, True
    while True:
        try:
            mesh = make_mesh(timeout=timeout, **axes)
            break
        except (torch.distributed.DistError, RuntimeError) as error:
            tries -= 1
            if not tries:
                raise
            logger.warning("fzero.run: a rank was lost while all came together (%s)", _brief(error))
        _leave()
    if turns.watcher is not None:
        turns.watcher.say(host.COMING)
    return mesh


def _apart(mesh: Mesh, ended: int) -> FzeroValueError | None:
    """The error, the same on every rank, of ranks that are in different runs of their script: one that is started again
    begins with the first."""
    everyones = agree.everyones(mesh, "run", lambda: ended)
    if len(set(everyones)) == 1:
        return None
    problems = [f"rank {rank}: in run {number + 1} of its script" for rank, number in enumerate(everyones)]
    fix = "start the script again; with a script for each fz.run, a rank that was lost comes back to it"
    return FzeroValueError(message("run", "a rank that was lost cannot come back to this run", problems, fix))


def _stops(numbers: Any) -> list[str]:
    """A line if these are not signals that a process can hear."""
    heard = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if isinstance(numbers, Sequence) and not isinstance(numbers, str) and all(n in heard for n in numbers):
        return []
    return [f"stop_on={shown(numbers)}: must be signals that can be caught, e.g. (signal.SIGTERM,), or ()"]


def _say_why(mesh: Mesh, error: Exception) -> None:
    """Tells the other ranks, which see this one go, that it has raised and does not come back."""
    if mesh.size > 1:
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        with contextlib.suppress(RuntimeError):
            mesh.store.compare_set(_RAISED, "", f"rank {mesh.rank} has raised {text}")


def _said_why(mesh: Mesh) -> str:
    """The error of its own that a rank has left with, "" if none has."""
    with contextlib.suppress(RuntimeError):
        return mesh.store.get(_RAISED).decode() if mesh.store.check([_RAISED]) else ""
    return ""


def _brief(error: Exception) -> str:
    """The line of an error that says what happened, rather than what this rank was doing."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if "has left" in line and not line.startswith("fzero.")]
    return (told or lines[1:2] or lines[:1] or [type(error).__name__])[0]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step that may jump. Waits for the step."""
    return {name: float(metrics[name]) for name in ("loss", "grad_norm")}


class _Signals:
    """Remembers that a signal has come, to be acted on between two steps.

    Attributes:
        came: whether one has.
        free: nothing is lost if the process ends at once, and it does: until the first step that follows a state which
            is no newer than what is on disk. Ranks may come, and build, for longer than the seconds that are left.
    """

    def __init__(self, numbers: Sequence[int]):
        self._numbers = numbers if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[int, Any] = {}
        self.came, self.free = False, False

    def __enter__(self) -> _Signals:
        self._before = {n: signal.signal(n, self._hear) for n in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for n, handler in self._before.items():
            signal.signal(n, handler)

    def _hear(self, number: int, _: Any) -> None:
        if self.free:
            sys.exit(128 + number)
        self.came = True


def _lost(mesh: Mesh, error: Exception) -> bool:
    """Whether an error on this rank comes of another one that is gone."""
    if isinstance(error, RankLost):
        return True
    deadline = time.monotonic() + (_PATIENCE if isinstance(error, (DivergenceError, CheckpointError)) else 0.0)
    while isinstance(error, (FzeroError, torch.distributed.DistError)):
        if mesh.turns.gone():
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return False


def _leave() -> None:
    """Leaves a mesh that has lost a rank, with all that was made on it."""
    gc.collect()
    with contextlib.suppress(FzeroError, RuntimeError):  # what nobody can end any more
        close_mesh()


def _no_room(memory: Path, error: OSError) -> FzeroValueError:
    space = os.statvfs(memory)
    free = f"{memory}: {space.f_bavail * space.f_frsize / 1e6:.0f} MB are free; {error.strerror}"
    fix = "a larger /dev/shm (docker run --shm-size, a memory volume in Kubernetes), or --memory DIR"
    return FzeroValueError(message("run", "the host's memory does not take the copies of the state", [free], fix))
