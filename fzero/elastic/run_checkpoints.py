"""Saves the checkpoints of a run, each with the number of batches that its state has seen."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero import checkpoint
from fzero._utils.arguments import shown
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.index import Index
from fzero.checkpoint.storage_paths import Url
from fzero.comm import control_group, launcher
from fzero.data.sample_order import Steps
from fzero.errors import CheckpointError, FzeroValueError, StorageError, parted
from fzero.mesh import Mesh
from fzero.step import State

logger = logging.getLogger("fzero")

_NOTE = "fzero.run"  # the key in a checkpoint's meta: how many batches its state has seen, and of which data


class RunCheckpoints:
    """The checkpoints of a run.

    Args:
        mesh: of all ranks.
        path: the directory or URL of the checkpoints; None if the run has none.
        data: the data set whose batches the run sees.
        private: whether only this user can read the checkpoints.

    Attributes:
        safe: the number of batches that the newest state on disk has seen; None if there is none.
    """

    def __init__(
        self,
        mesh: Mesh,
        path: str | os.PathLike[str] | None = None,
        data: Steps | None = None,
        private: bool = False,
    ):
        self.path = path
        self.safe: int | None = None
        self._mesh, self._data, self._private = mesh, data, private
        self._cursor: Mapping[str, Any] | None = None if data is None else data.cursor(0)  # before the first batch
        self._behind: tuple[AsyncSave, int] | None = None  # a running save, and what its state has seen
        self._saved: dict[str, Any] = {}  # the arguments of the last save

    def newest(self) -> tuple[Index | None, int | None]:
        """Returns the newest checkpoint, and the number of batches that its state has seen. Both are None if there is
        none."""
        if self.path is None or checkpoint.find(self.path) is None:
            return None, None
        found = checkpoint.describe(self.path, self._mesh)
        self.safe = self._seen_by(found)
        return found, self.safe

    def _seen_by(self, saved: Index) -> int:
        note = saved.meta.get(_NOTE, {})
        if self._data is not None and "data" in note:
            data = self._data
            return control_group.run_on_all_ranks(self._mesh.control, "run", lambda: data.resume(note["data"]))
        # A checkpoint that no run has saved has no note: it has seen as many batches as it has taken steps.
        return note.get("seen", saved.step)

    def check(self, state: Any, meta: Any) -> None:
        """Raises an error if a state cannot be saved with this `meta`."""
        if self.path is None:
            fix = "run.state(train, params, key, path='runs/gpt')"
            raise FzeroValueError("run.save", "the run has no directory for checkpoints", fix=fix)
        problems = [] if isinstance(state, State) else [f"state={shown(state)}: must be the run's"]
        if meta is not None and not isinstance(meta, Mapping):
            problems.append(f"meta={shown(meta)}: must be a dict")
        elif meta is not None and _NOTE in meta:
            problems.append(f"meta[{_NOTE!r}]: the name is reserved for the run")
        if problems:
            raise FzeroValueError("run.save", "invalid arguments", problems, "run.save(state, meta={'lr': 1e-3})")

    def save(
        self, state: State, seen: int, keep: int | None, meta: Mapping[str, Any] | None, wait: bool = True
    ) -> Path | Url | AsyncSave:
        """Saves a state that has passed `check` and has seen `seen` batches. The other arguments are those of
        `Run.save`."""
        assert self.path is not None
        # Kept before the save, which may fail: a save that a stop request causes later uses the same arguments.
        self._saved = {"keep": keep, "meta": meta}
        note: dict[str, Any] = {"seen": seen}
        if self._data is not None:
            note["data"] = {**(self._cursor or {}), "next": self._data.data_step(seen)}
        more = {**(meta or {}), _NOTE: note}
        saved = checkpoint.save(self.path, state, keep=keep, meta=more, wait=wait, private=self._private)
        if isinstance(saved, AsyncSave):
            self._behind = saved, seen
        else:
            self.safe = seen
        return saved

    def save_last(self, state: State, seen: int, in_memory: bool) -> None:
        """Saves the newest state of a run that was asked to stop, with the arguments of the last save.

        Args:
            in_memory: whether the hosts' memory has the state as well.

        Raises:
            CheckpointError: the state cannot be saved. The message names the state from which the next start
                continues.
        """
        keep, meta = self._saved.get("keep"), self._saved.get("meta")
        try:
            self.check(state, meta)
            saved = self.save(state, seen, keep, meta)
        except CheckpointError as error:
            text, fix = parted(error)
            what = f"a stop of the run is requested, and its state after {seen} batches is not saved"
            problems = [line.strip() for line in text.splitlines()] + [self._next_start(in_memory)]
            raise type(error)("run", what, problems, fix or None) from error
        if self._mesh.rank == 0:
            logger.warning("fzero.run: the state after %d batches is saved: %s", seen, saved)

    def _next_start(self, in_memory: bool) -> str:
        """Returns a message that says from which state the next start continues if the last state is not on disk. To be
        called on all ranks."""
        if in_memory and launcher.starts_again():
            return "the hosts' memory has it: torchrun restarts the ranks, and they continue from it"
        try:
            assert self.path is not None
            found = checkpoint.find(self.path)
        except CheckpointError as error:
            return f"the next start ends with {str(error).splitlines()[0]}"
        if found is None:
            return f"the next start begins from scratch: there is no checkpoint under {self.path}"
        return f"the next start continues from {found}"

    def settle(self) -> None:
        """Waits for the asynchronous save, if one is running."""
        if self._behind is not None:
            (saving, seen), self._behind = self._behind, None
            try:
                saving.wait()
                self.safe = seen
            except StorageError as error:
                self.without(error)

    def without(self, error: StorageError) -> None:
        """Logs that the run continues although a checkpoint could not be written."""
        if self._mesh.rank == 0:
            logger.warning("fzero.run: the run continues without this checkpoint: %s", error)
