"""Saves the checkpoints of a run at regular intervals, each with the number of batches that its state has seen, and
finds the newest one when the run starts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fzero._utils.arguments import count, plain_numbers, shown
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.directory import find
from fzero.checkpoint.index import Index, describe
from fzero.checkpoint.run_record import RunRecord, Saved
from fzero.checkpoint.saving import SaveOptions, save_as
from fzero.checkpoint.storage_paths import Place, as_path
from fzero.comm import control_group
from fzero.errors import CheckpointError, FzeroTypeError, FzeroValueError, StorageError
from fzero.mesh import Mesh
from fzero.train_state import State

if TYPE_CHECKING:
    from fzero.data.sample_order import Steps
    from fzero.runtime.compiled_step import CompiledStep

logger = logging.getLogger("fzero")

_NOTE = "fzero.run"  # the key in a checkpoint's meta: how many batches its state has seen, and of which data
_DATA = "data"  # the key in that entry, and the one at which scripts save the cursor of their data themselves


_MOST_MINUTES = 1 << 30


class _Schedule:
    """Decides when a checkpoint is due: every `every` batches, and `minutes` minutes after the last save began."""

    def __init__(self, every: int | None, minutes: float | None):
        self._every, self._minutes = every, minutes
        self.restart(0)

    def restart(self, seen: int) -> None:
        """Records that a save begins, whose state has seen `seen` batches."""
        self._since, self._saved, self._asks = time.monotonic(), seen, seen

    def is_due(self, seen: int) -> bool:
        """Whether a state that has seen `seen` batches is to be saved; the same on every rank."""
        if seen == self._saved:
            return False
        if self._every is not None and seen % self._every == 0:
            return True
        if (minutes := self._minutes) is None or seen < self._asks:
            return False

        def ask() -> tuple[bool, int]:
            passed = time.monotonic() - self._since
            left = minutes * 60 - passed
            # Clocks differ between ranks, so they follow that of rank 0. They ask again after half of the batches that
            # fit in the time that is left.
            return left <= 0, int(left * (seen - self._saved) / max(passed, 1e-3) / 2)

        due, batches = control_group.broadcast_from_rank0(control_group.world(), "checkpoint", ask)
        self._asks = seen + max(1, batches)
        return due


class CheckpointManager:
    """Saves the state of a training loop at regular intervals, so that the loop need not call `save`.

    `restore` returns the newest state, `step` is called after each training step and saves the state if that is due,
    and `close` saves the last state. As a context manager, it is closed at the end of the block, except after an
    exception. With `fz.run`, it is given to `run.state(path=)`: then `run.commit` does what `step` does, and the end of
    a run that is asked to stop what `close` does.

    If another run has saved to the directory since the manager restored or saved a checkpoint, its next save is an
    error, so two runs never replace each other's steps. Call `restore` first in a directory that has checkpoints.

    Every rank calls these methods. If a disk is full or fails when a save is due, the run continues with a warning; the
    previous checkpoint remains the latest.

    Args:
        path: the directory or URL of the run's checkpoints.
        every: save after every this many batches, counted from the beginning of the run.
        minutes: save if the last save began this many minutes ago, by the clock of rank 0.
        keep, wait, private: as in `fz.checkpoint.save`.
        data: the data set whose batches the run sees. Checkpoints record the position in it, and cannot be continued
            with other data.
        meta: what every checkpoint has as its `meta`.

    Attributes:
        seen: the number of batches that the newest state has seen: the index of the next batch.

    Communication: that of a save, when one is due. With `minutes`, also 512 bytes per rank now and then: about ten
        times between two saves.

    Raises:
        FzeroValueError: invalid arguments, all in one error.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> root = tempfile.mkdtemp()
        >>> def train_until(stop):
        ...     with fz.checkpoint.CheckpointManager(root, every=2, keep=2) as saves:
        ...         state = saves.restore(train, {"w": torch.ones(2)})
        ...         first = saves.seen
        ...         for index in range(first, stop):
        ...             state, metrics = train(state, torch.ones(2))
        ...             saves.step(state)
        ...     return first, fz.checkpoint.latest(root).name
        >>> train_until(3), train_until(5)
        ((0, 'step-00000003'), (3, 'step-00000005'))
    """

    @plain_numbers
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
        data: Steps | None = None,
        meta: Mapping[str, Any] | None = None,
        wait: bool = True,
        private: bool = False,
    ):
        self.path = as_path(path)
        self._options = SaveOptions(keep, meta, wait=wait, private=private)
        problems = (
            self._options.problems(self.path) + _reserved(meta) + ([] if every is None else count("every", every))
        )
        if minutes is not None and not (type(minutes) in (int, float) and 0 < minutes < _MOST_MINUTES):
            problems.append(f"minutes={shown(minutes)}: must be a positive number of minutes, or None")
        if data is not None and not hasattr(data, "data_step"):  # `fz.data` imports more than this folder may
            problems.append(f"data={shown(data)}: must be a data set of fz.data")
        if problems:
            fix = "fz.checkpoint.CheckpointManager('runs/gpt', every=1000, minutes=30, keep=2)"
            raise FzeroValueError("checkpoint.CheckpointManager", "invalid arguments", problems, fix)
        self._schedule, self._data = _Schedule(every, minutes), data
        self._cursor: Mapping[str, Any] = {} if data is None else data.cursor(0)  # before the first batch
        self._last = self._options  # the options of the last save
        self._run = RunRecord(set())
        self.begin(0)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise the ranks may have parted, and a save would wait for those that have left
            self.close()

    def restore(self, train: CompiledStep, params: Any = None, key: torch.Tensor | None = None) -> State:
        """Returns the state of the newest checkpoint, or an initial one if nothing has been saved yet.

        Args:
            train: the compiled training step.
            params, key: as for `train.init`; `params` as for `train.restore`, too.

        Raises:
            FzeroTypeError: `train` is not a compiled training step, or `params` are not tensors.
            CheckpointError: from `fz.checkpoint.find` or `train.restore`; or the checkpoint is of a run on other data,
                listing every difference; or nothing has been saved yet, and there are no `params` to start from.
        """
        # An evaluation has a mesh, too, but neither `init` nor `restore`.
        if not isinstance(getattr(train, "mesh", None), Mesh) or not hasattr(train, "restore"):
            what = f"{shown(train)} is not a compiled training step"
            fix = "train = fz.compile(fz.train_step(loss_fn, optimizer), mesh); manager.restore(train, params)"
            raise FzeroTypeError("checkpoint.CheckpointManager.restore", what, fix=fix)
        found, seen = self.newest(train.mesh)
        if found is None and params is None:
            what, fix = (
                f"nothing has been saved in {self.path} yet",
                "give parameters to start from: restore(train, params)",
            )
            raise CheckpointError("checkpoint.CheckpointManager.restore", what, fix=fix)
        self.begin(seen or 0, saved=seen)
        return train.init(params, key) if found is None else train.restore(found, params)

    def step(self, state: State) -> None:
        """Counts one batch, and saves the state that has seen it if a save is due.

        A step that is skipped (overflow in fp16) has seen its batch, too.

        Raises:
            CheckpointError: as for `fz.checkpoint.save`, except for errors of the storage, which are logged.
        """
        self.offer(state, self.seen + 1)

    def close(self) -> None:
        """Saves the last state, unless it is saved already, and waits until that is done.

        Raises:
            CheckpointError: as for `fz.checkpoint.save`.
        """
        self.settle()
        if self._newest is not None:
            self.save_last(self._newest, self.seen)

    def save_last(self, state: State, seen: int) -> Place | AsyncSave | None:
        """Does `close` for a state that has seen `seen` batches, with the arguments of the last save. Returns the
        checkpoint, or None if the state is saved already."""
        self.settle()
        self.seen = seen
        return None if self.saved == seen else self._save(state, replace(self._last, wait=True))

    def newest(self, mesh: Mesh) -> tuple[Index | None, int | None]:
        """Returns the newest checkpoint, and the number of batches that its state has seen. Both are None if there is
        none."""
        if (place := find(self.path)) is None:
            return None, None
        found = describe(place, mesh)
        self._run = RunRecord({found.sha256}, Saved(found.run, found.step, found.leaves))
        # A checkpoint that no manager has saved has no entry: it has seen as many batches as it has taken steps.
        note: Mapping[str, Any] = found.meta.get(_NOTE, {})
        data, cursor = self._data, (note or found.meta).get(_DATA)
        if data is not None and cursor is not None:
            return found, control_group.run_on_all_ranks(mesh.control, "checkpoint", lambda: data.resume(cursor))
        return found, note.get("seen", found.step)

    def begin(self, seen: int, saved: int | None = None) -> None:
        """Starts counting: the state has seen `seen` batches, and the newest one on disk `saved`.

        All ranks call it at the same time, with the same numbers: what they decide later follows from them.
        """
        self.seen, self.saved = seen, saved
        self._newest: State | None = None
        self._running: tuple[AsyncSave, int] | None = None  # a running save, and what its state has seen
        self._schedule.restart(seen)

    def offer(self, state: State, seen: int) -> None:
        """Saves a state that has seen `seen` batches if a save is due."""
        self._newest, self.seen = state, seen
        if not self._schedule.is_due(seen):
            return
        try:
            self.save(state)
        except StorageError as error:
            warn_about(error)

    def save(
        self,
        state: State,
        *,
        keep: int | None = None,
        meta: Mapping[str, Any] | None = None,
        wait: bool | None = None,
    ) -> Place | AsyncSave:
        """Saves a state that has seen as many batches as `self.seen`, now, after the asynchronous save before it.
        Arguments that are not given are those of the manager.

        Raises:
            FzeroValueError: the state or `meta` cannot be saved.
            CheckpointError: as for `fz.checkpoint.save`.
        """
        self.settle()
        problems = [] if isinstance(state, State) else [f"state={shown(state)}: must be the run's"]
        if problems := problems + _reserved(meta):
            fix = "give a State, and meta={'lr': 1e-3}"
            raise FzeroValueError("checkpoint.CheckpointManager.save", "invalid arguments", problems, fix)
        given: dict[str, Any] = {"keep": keep, "meta": meta, "wait": wait}
        # Set before the save, which may fail: the last save of a run uses the same options.
        self._last = replace(self._options, **{name: x for name, x in given.items() if x is not None})
        return self._save(state, self._last)

    def _save(self, state: State, options: SaveOptions) -> Place | AsyncSave:
        self._schedule.restart(self.seen)
        note: dict[str, Any] = {"seen": self.seen}
        if self._data is not None:
            note[_DATA] = {**self._cursor, "next": self._data.data_step(self.seen)}
        options = replace(options, meta={**(options.meta or {}), _NOTE: note})
        saved = save_as(self.path, state, options, self._run)
        if isinstance(saved, AsyncSave):
            self._running = saved, self.seen
        else:
            self.saved = self.seen
        return saved

    def settle(self) -> None:
        """Waits for the asynchronous save, if one is running. An error of the storage is only logged."""
        if self._running is not None:
            (saving, seen), self._running = self._running, None
            try:
                saving.wait()
                self.saved = seen
            except StorageError as error:
                warn_about(error)


def warn_about(error: StorageError) -> None:
    """Logs on one rank that the run continues although a checkpoint could not be written."""
    if control_group.world().rank == 0:
        logger.warning("fzero.checkpoint: the run continues without this checkpoint: %s", error)


def _reserved(meta: Any) -> list[str]:
    is_used = isinstance(meta, Mapping) and _NOTE in meta
    return [f"meta[{_NOTE!r}]: the name is reserved for the run"] if is_used else []
