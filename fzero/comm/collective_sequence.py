"""Numbers the collective actions of the ranks, so that ranks that do different things raise an error.

A collective action, here called a turn, is a run of a program or an exchange of control messages
(comm/control_group.py). Its number is the same on all ranks, and counting it costs nothing.

A rank that waits in a turn writes to the store which turn it is in, and reads what the other ranks have written. If
ranks do different things, or if one has left while others wait for it, each of them raises an error that names both
sides, after about a second instead of after the mesh's timeout.

A turn that ends in the middle (an error in user code, Ctrl-C, a rank that did not come) leaves the ranks out of step:
data that one rank has sent would be taken for something later. Such a turn is therefore the last one on every rank: the
first reason is written to the store, and every later call raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from fzero._utils import procfs
from fzero.comm.control_messages import Notes
from fzero.errors import DivergenceError, RankLost

if TYPE_CHECKING:
    from fzero.comm.control_group import ControlGroup

_ENDED = "fzero/collectives/ended"
FIRST_LOOK = 0.02  # seconds; short, because a launcher that sees a rank die soon ends the ranks that could report it


SAME_CALLS = (
    "every rank must make the same calls in the same order and number, with batches of one shape and under the same "
    "settings of PyTorch"
)

watcher: Any = None
"""Notified of every turn, and of every check of the other ranks while this rank waits (elastic/host_directory.py's
Progress)."""


class _Note(NamedTuple):
    """The status of a rank, as it is written to the store: the number, kind and description of its turn, whether the
    rank has left or died, and its process, identified by its host and process number."""

    number: int
    kind: str
    about: str
    left: bool
    process: tuple[str, str, int]
    died: bool = False


class CollectiveSequence:
    """The turns of this rank on a mesh. On a mesh of one device there is no store, and turns are only counted.

    Args:
        store: the mesh's store, or None.
        timeout: seconds that a rank waits for another.
    """

    pause = 1.0  # seconds that a rank waits before it checks the other ranks, and between two checks

    def __init__(self, store: dist.Store | None, rank: int, size: int, timeout: float = 600.0):
        self.store, self.timeout = store, timeout
        self._rank, self._size = rank, size
        self._number, self._kind, self._about, self._said = 0, "", "", False
        self.control: ControlGroup | None = None  # exchanges the control messages of the same ranks
        self._ended = ""  # why there is no further turn, as far as this rank knows; empty while turns may continue
        self._world = dist.group.WORLD if dist.is_initialized() else None
        if store is not None:
            _open.append(self)
            self._say()

    def begin(self, kind: str, about: str = "") -> None:
        """Begins the next turn.

        Args:
            kind: ranks whose turns have the same number but different kinds have diverged.
            about: a description for error messages; defaults to `kind`.
        """
        self._number, self._kind, self._about, self._said = self._number + 1, kind, about or kind, False
        if watcher is not None:
            watcher.beat()

    def behind(self) -> list[int]:
        """Returns the ranks that have not reached this turn, as far as the store shows."""
        with contextlib.suppress(dist.DistError):
            numbers = dict.fromkeys(range(self._size), 0) | {r: x.number for r, x in self._places().items()}
            return [r for r, number in numbers.items() if number < self._number and r != self._rank]
        return []

    def look(self, owner: str) -> None:
        """Checks what the other ranks do. Called periodically while this rank waits for others.

        Raises:
            DivergenceError: another rank is in a turn of the same number but another kind, has ended a turn in the
                middle, has left before this turn, or has died on this host.
        """
        if self.store is None:
            return
        if watcher is not None:
            watcher.wait()
        others: dict[int, _Note] = {}
        with contextlib.suppress(dist.DistError):
            # if the store is gone there is nothing to check; the wait itself will raise an error
            if not self._said:
                self._say()
            if self.store.check([_ENDED]):
                # read before the other ranks' status: a rank that ended its turn because of a divergence has already
                # read theirs
                self._ended = self.store.get(_ENDED).decode()
            others = self._places(besides=self._rank)
        parted = {
            r: f"rank {r}: {x.about}" for r, x in others.items() if x.number == self._number and x.kind != self._kind
        }
        # A rank that took part in this turn and then left is not missed.
        gone = {r for r, x in others.items() if (x.number < self._number if x.left else _has_died(x))}
        if not (parted or gone):
            self.check(owner)
            return
        parted |= {r: f"rank {r} has left, after: {others[r].about or 'it joined'}" for r in gone} | {
            self._rank: f"rank {self._rank}: {self._about}"
        }
        lines = [parted[r] for r in sorted(parted)]
        if self._ended and self._ended != "; ".join(lines):
            lines.append(self._ended)
        what = "another rank has left" if gone else "the ranks make different calls"
        raise (RankLost if gone else DivergenceError)(
            owner,
            what,
            lines,
            "look at that rank's errors first; if it had none, " + SAME_CALLS if gone else SAME_CALLS,
        )

    def gone(self) -> set[int]:
        """Returns the ranks that have left, or have died on this host, as far as the store shows. Safe to call from any
        thread."""
        with contextlib.suppress(dist.DistError):
            return {r for r, x in self._places(besides=self._rank).items() if x.left or _has_died(x)}
        return set()

    def _places(self, besides: int | None = None) -> dict[int, _Note]:
        """Returns the most recently published status of each rank, by rank."""
        assert self.store is not None
        notes = _notes(self.store, self._rank)
        said = [r for r in range(self._size) if r != besides and notes.come("of", [r])]
        return notes.read("of", said, _Note)

    def end(self, error: BaseException) -> None:
        """Called when a turn ended in the middle on this rank: no further turn is possible. The other ranks find the
        first reason in the store when they check."""
        if self.store is None or self._ended:
            return
        self._ended = why = _brief(error, self._rank)
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone
            # Keeps the reason that was written first, and returns it.
            self._ended = self.store.compare_set(_ENDED, "", why).decode()

    def check(self, owner: str) -> None:
        """Raises DivergenceError if a turn has ended in the middle on this rank or, as far as this rank knows, on
        another rank."""
        if self._ended:
            what = "a call on this mesh ended in the middle: its ranks are out of step, and what it wrote is lost"
            fix = "start again; or on every rank close_mesh(), make_mesh(), compile, and restore the last checkpoint"
            raise DivergenceError(owner, what, [self._ended], fix)

    @property
    def is_open(self) -> bool:
        """Whether the process group in which these turns were created still exists."""
        return self._world is (dist.group.WORLD if dist.is_initialized() else None)

    def leave(self) -> None:
        """Tells the other ranks that this rank will take part in no further turn."""
        with contextlib.suppress(dist.DistError, RuntimeError):  # if the store is gone, nobody can read the message
            self._say(left=True)

    def _say(self, left: bool = False) -> None:
        assert self.store is not None
        note = _Note(self._number, self._kind, self._about, left, (*procfs.host_id(), os.getpid()))
        _notes(self.store, self._rank).write("of", note._asdict())
        self._said = True


def finish(work: Any, look: Callable[[], object], first: float = CollectiveSequence.pause) -> None:
    """Waits for a gloo collective, which blocks the host, and calls `look` periodically, which may raise.

    Args:
        first: seconds before the first look; twice as long before each further one, up to a second.
    """
    patience = min(first, CollectiveSequence.pause)
    while True:
        try:
            work.wait(datetime.timedelta(seconds=patience))
            return
        except RuntimeError:
            if work.is_completed():  # it failed, or completed at this very moment
                break
        # Only the wait has timed out; the collective continues.
        look()
        patience = min(2 * patience, CollectiveSequence.pause)
    work.wait()


_open: list[CollectiveSequence] = []
_first: list[Callable[[], object]] = []


def latest() -> CollectiveSequence | None:
    """Returns the turns of the most recently made mesh that has several ranks and is still open."""
    return next((sequence for sequence in reversed(_open) if sequence.is_open), None)


@atexit.register
def leave_all() -> None:
    """Runs the registered callbacks and leaves all turns. Called by `close_mesh`, and when the process ends."""
    while _first:
        _first.pop()()
    while _open:
        sequence = _open.pop()
        if sequence.is_open:
            sequence.leave()
        if sequence.control is not None:
            sequence.control.close()


def _forked() -> None:
    """Runs in a newly forked process, which is not a rank: its end is not reported to the other ranks."""
    _first.clear()
    _open.clear()


os.register_at_fork(after_in_child=_forked)


def before_leaving(act: Callable[[], object]) -> None:
    """Registers a function that is called once, before this rank leaves."""
    if act not in _first:
        _first.append(act)


def tell_of_death(store: dist.Store, rank: int) -> None:
    """Marks in `store`, the store of an earlier mesh, the previous process of this rank as dead.

    This process has taken the place of that process. Ranks on other hosts could not notice its death themselves.
    """
    notes = _notes(store, rank)
    if notes.come("of", [rank]):
        note = notes.read("of", [rank], _Note)[rank]
        if note.process != (*procfs.host_id(), os.getpid()):
            notes.write("of", note._replace(died=True)._asdict())


def _has_died(note: _Note) -> bool:
    """Whether a rank's process has been replaced or, if it ran on this host, no longer exists or is a zombie."""
    *host, number = note.process
    if note.died or tuple(host) != procfs.host_id():
        return note.died
    return not procfs.is_alive(number)


def _brief(error: BaseException, rank: int) -> str:
    """Formats an error, with its rank, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Fix: ")]
    if isinstance(error, DivergenceError):
        return "; ".join(lines[1:] or lines)
    return ": ".join([f"rank {rank}", type(error).__name__, *lines[:1]])


def _notes(store: dist.Store, rank: int) -> Notes:
    """Returns the notes in which each rank publishes its status."""
    return Notes(store, "fzero/collectives", rank)
