"""Runs a function on every rank of a mesh and reports every rank's result or error to all ranks.

The exchange goes through the store and not through a collective, so a rank that failed or did not come is an error that
names this rank, never a hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fzero.comm.control_messages import Notes, timed_out
from fzero.errors import DivergenceError, FzeroError, FzeroValueError, RankLost, parted

if TYPE_CHECKING:
    from fzero.mesh import Mesh

T = TypeVar("T")


def broadcast_from_rank0(mesh: Mesh, owner: str, make: Callable[[], Any]) -> Any:
    """Runs `make` on rank 0 and returns its result, which must be a JSON value, on every rank.

    An error of `make` on rank 0 is raised on all ranks, as by `run_on_all_ranks`.
    """
    if mesh.size == 1:
        return make()
    _, values = _done(mesh, owner, lambda: make() if mesh.rank == 0 else None, tell=True)
    return values[0]


def all_gather_values(mesh: Mesh, owner: str, make: Callable[[], Any]) -> list[Any]:
    """Runs `make` on every rank and returns the results of all ranks, ordered by rank.

    The results must be JSON values. Errors are raised as by `run_on_all_ranks`.
    """
    return [make()] if mesh.size == 1 else _done(mesh, owner, make, tell=True)[1]


def run_on_all_ranks(mesh: Mesh, owner: str, act: Callable[[], T], about: str = "") -> T:
    """Runs `act` on every rank and returns this rank's result after `act` has returned on all ranks.

    An error on one rank is raised on all of them.

    Args:
        about: describes what this rank does. Ranks that do something else at this point show it in their errors.

    Communication: a few hundred bytes through the store.

    Raises:
        FzeroValueError: it failed on another rank; the error names each rank that failed, and why.
        DivergenceError: a rank was stopped (Ctrl-C), or timed out.
    """
    return act() if mesh.size == 1 else _done(mesh, owner, act, about=about)[0]


def _done(mesh: Mesh, owner: str, act: Callable[[], T], tell: bool = False, about: str = "") -> tuple[T, list[Any]]:
    """Runs `act` on every rank. Returns this rank's result and, if `tell` is set, the results of all ranks."""
    channel, error = StoreChannel(mesh, owner, about), None

    def attempt() -> Any:
        nonlocal error
        try:
            return act()
        except Exception as caught:
            error = caught

    # A rank that is stopped by Ctrl-C reports this and does not wait for the others.
    result = channel.reporting(attempt)
    mine, fix = "", ""
    if error is not None:
        mine, fix = parted(error)
        mine = mine if isinstance(error, FzeroError) else f"{type(error).__name__}: {mine}"
    notes = channel.everyone({"failed": mine, "fix": fix, "made": result if tell else None})
    texts = {rank: note["failed"] for rank, note in notes.items()}
    if not any(texts.values()):
        return result, [note["made"] for note in notes.values()]
    # All ranks failed alike, so each raises its own exception, with its type and traceback.
    if error is not None and set(texts.values()) == {mine}:
        raise error
    fix = joined_fixes(note["fix"] for note in notes.values())
    raise FzeroValueError(owner, "the work of some ranks failed", reasons(texts), fix) from error


def joined_fixes(fixes: Iterable[str]) -> str:
    """Returns the fix of an error that reports those of several ranks."""
    return "; ".join(dict.fromkeys(fix for fix in fixes if fix)) or "look at the first rank that failed"


def reasons(texts: Mapping[int, str]) -> list[str]:
    """Returns one line for each rank that failed. `texts` maps a rank to its error text, which is empty if it
    succeeded."""
    return [f"rank {rank}: " + text.replace("\n", "\n    ") for rank, text in texts.items() if text]


_LOST = ("gloo", "pair closure", "Connection closed", "Connection reset")
"""Substrings that identify gloo's connection errors, which have no exception class of their own."""


@contextmanager
def unbroken(mesh: Mesh) -> Iterator[None]:
    """Wraps code that moves data between ranks. Any exception inside makes this the last call on the mesh
    (`CollectiveSequence.end`).

    Raises:
        DivergenceError: replaces an error of the process group; says what another rank did, or that a rank has left.
    """
    try:
        yield
    except BaseException as error:
        if mesh.size == 1:
            raise
        if not (
            isinstance(error, dist.DistError)
            or (isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST))
        ):
            # An error of this rank itself, or Ctrl-C. The others are told, because a turn has ended in the middle.
            _end(mesh, error)
            raise
        try:
            # raises a DivergenceError if the other ranks' states explain the failure
            mesh.collective_sequence.look("step")
            fix = "look at the other ranks' errors first; the state is lost, continue from the last checkpoint"
            problems = [f"rank {mesh.rank}: {str(error).strip().splitlines()[0]}"]
            raise RankLost(
                "step", "a transfer failed: another rank has left, or runs a different program", problems, fix
            )
        except DivergenceError as known:
            _end(mesh, known)
            raise known from error


def _end(mesh: Mesh, error: BaseException) -> None:
    mesh.collective_sequence.end(error)
    if mesh.context.transport is not None:
        mesh.context.transport.abandon()


class StoreChannel:
    """A sequence of exchanges between the ranks of a mesh. All ranks construct it and make the same exchanges together.

    Args:
        owner: the name of the public call that makes the exchange, for errors.
        about: describes what this rank does. Ranks that do something else at this point show it in their errors.
    """

    def __init__(self, mesh: Mesh, owner: str, about: str = ""):
        self._mesh, self._owner = mesh, owner
        mesh.collective_sequence.begin(owner, about)
        # The counter is in the store, next to the keys: a process may join several process groups in succession.
        self._id, self._round = mesh.store.add(f"fzero/agree/counts/{mesh.rank}", 1), 0
        self._notes = self._of(self._id)
        self._text: str | None = None  # the topic of the last compared texts, which are not deleted yet

    def _of(self, channel: int) -> Notes:
        return Notes(self._mesh.store, f"fzero/agree/{channel}", self._mesh.rank)

    def reporting(self, act: Callable[[], Any]) -> Any:
        """Returns the result of `act`. If `act` raises, the error is also published to the other ranks."""
        try:
            return act()
        except BaseException as error:
            text, fix = parted(error)
            self._notes.write(self._round, {"error": f"{type(error).__name__}: {text}", "fix": fix})
            raise

    def differing(self, text: str) -> tuple[int, str, str] | None:
        """Compares `text` across ranks. Returns the first rank whose text differs from rank 0's, with both texts, or
        None.

        Communication: a digest from each rank, and two texts if they differ.
        """
        # Before the digest, so that the text is there as soon as the digests are found to differ.
        topic = f"text {self._round}"
        self._notes.write(topic, text)
        notes = self.everyone({"hash": hashlib.sha256(text.encode()).hexdigest()})
        self._text = topic
        for rank, note in notes.items():
            if note["hash"] != notes[0]["hash"]:
                texts = self._notes.read(topic, [0, rank], str)
                return rank, texts[0], texts[rank]
        return None

    def everyone(self, note: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Publishes this rank's note and returns the notes of all ranks after all have arrived.

        Raises:
            DivergenceError: naming the ranks that failed or timed out.
        """
        ranks = range(self._mesh.size)
        self._notes.write(self._round, {"at": self._owner, **note})
        missing = self._mesh.collective_sequence.absent(self._notes.keys(self._round, ranks), self._owner)
        notes = self._notes.read(self._round, [r for r in ranks if r not in missing], dict[str, Any])
        failed = reasons({rank: note["error"] for rank, note in notes.items() if "error" in note})
        if failed or missing:
            fix = joined_fixes(note.get("fix", "") for note in notes.values())
            if missing:
                fix = (
                    "call the step in the same way on every rank: one with a batch "
                    "of another shape than before builds a program "
                    "of its own, the others run the old one"
                )
                fix = fix if self._owner == "compile" else f"call {self._owner} on every rank: all of them take part"
            came = [f"rank {rank} {timed_out(self._mesh.timeout)}" for rank in missing]
            error = DivergenceError(self._owner, "not every rank is ready to run", [*failed, *came], fix)
            if missing:  # a rank that comes later would find the notes of this exchange and continue alone
                self._mesh.collective_sequence.end(error)
            raise error
        places = {
            # The remaining names, such as "hash", tell which exchange of a call this is.
            rank: ", ".join([other["at"], *(name for name in other if name not in ("at", "failed", "fix", "made"))])
            for rank, other in notes.items()
        }
        if len({*places.values()}) > 1:
            self._mesh.collective_sequence.look(self._owner)  # raises a more specific error if it can
            fix = (
                "make the same calls in the same order on every rank: a step with a batch of another shape than before "
                "builds a program of its own (compile)"
            )
            raise DivergenceError(
                self._owner,
                "the ranks make different calls",
                [f"rank {rank}: {place}" for rank, place in places.items()],
                fix,
            )
        # Every rank has reached this exchange and has therefore read the earlier notes. They are deleted here, since a
        # long run would otherwise fill the store.
        if self._round == 0:
            self._of(self._id - 1).clear(0)
        if self._text is not None:
            self._notes.clear(self._text)
            self._text = None
        self._round += 1
        return notes
