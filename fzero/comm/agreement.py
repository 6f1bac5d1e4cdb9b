"""Has every rank of a mesh act, and tells all of them each one's result or error. It uses the store, not a collective:
a missing or failed rank is an error that names it, never a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fzero.comm.control_messages import Notes, timed_out
from fzero.errors import DivergenceError, FzeroError, FzeroValueError, RankLost

if TYPE_CHECKING:
    from fzero.mesh import Mesh

T = TypeVar("T")


def from_first(mesh: Mesh, owner: str, make: Callable[[], Any]) -> Any:
    """The result of `make` on rank 0, which JSON can hold, on every rank; its error there is raised on all of them, as
    by `everywhere`."""
    if mesh.size == 1:
        return make()
    _, everyones = _done(mesh, owner, lambda: make() if mesh.rank == 0 else None, tell=True)
    return everyones[0]


def everyones(mesh: Mesh, owner: str, make: Callable[[], Any]) -> list[Any]:
    """The results of `make` of all ranks, which JSON can hold, by rank; errors are raised as by `everywhere`."""
    return [make()] if mesh.size == 1 else _done(mesh, owner, make, tell=True)[1]


def everywhere(mesh: Mesh, owner: str, act: Callable[[], T], about: str = "") -> T:
    """The result of `act` on this rank, once it has returned on every rank; an error on one rank is raised on all of
    them. `about`: what this rank does, for those that do something else.

    Communication: a few hundred bytes through the store.

    Raises:
        FzeroValueError: it failed on another rank, naming each that did and why.
        DivergenceError: a rank was stopped (Ctrl-C), or timed out.
    """
    return act() if mesh.size == 1 else _done(mesh, owner, act, about=about)[0]


def _done(mesh: Mesh, owner: str, act: Callable[[], T], tell: bool = False, about: str = "") -> tuple[T, list[Any]]:
    """The result of `act` on this rank, and with `tell` that of each."""
    talk, error = Talk(mesh, owner, about), None

    def attempt() -> Any:
        nonlocal error
        try:
            return act()
        except Exception as caught:
            error = caught

    result = talk.reporting(attempt)  # a rank that is stopped is gone: it waits for nobody
    mine = "" if error is None else str(error) if isinstance(error, FzeroError) else f"{type(error).__name__}: {error}"
    notes = talk.everyone({"failed": mine, "made": result if tell else None})
    texts = {rank: note["failed"] for rank, note in notes.items()}
    if not any(texts.values()):
        return result, [note["made"] for note in notes.values()]
    if error is not None and set(texts.values()) == {mine}:
        raise error
    problems, fix = reasons(texts), "look at the first rank that failed"
    raise FzeroValueError(owner, "not every rank could do its part", problems, fix) from error


def reasons(texts: Mapping[int, str]) -> list[str]:
    """A line for each rank whose text says why it failed; that of the others is empty."""
    return [f"rank {rank}: " + text.replace("\n", "\n    ") for rank, text in texts.items() if text]


_LOST = ("gloo", "pair closure", "Connection closed", "Connection reset")
"""Texts of gloo's errors, which have no class of their own."""


@contextmanager
def unbroken(mesh: Mesh) -> Iterator[None]:
    """Around what moves data between ranks: whatever ends it in the middle, it is the last call on this mesh
    (`Turns.end`).

    Raises:
        DivergenceError: in place of a process group's own error, what another rank did or that one has left.
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
            _end(mesh, error)
            raise
        try:
            mesh.turns.look("step")  # which may know why
            fix = "look at the other ranks' errors first; the state is lost, go on from the last checkpoint"
            problems = [f"rank {mesh.rank}: {str(error).strip().splitlines()[0]}"]
            raise RankLost("step", "a transfer failed: another rank has left, or runs another program", problems, fix)
        except DivergenceError as known:
            _end(mesh, known)
            raise known from error


def _end(mesh: Mesh, error: BaseException) -> None:
    mesh.turns.end(error)
    if mesh.context.transport is not None:
        mesh.context.transport.abandon()


class Talk:
    """One exchange after another between the ranks of a mesh, each about the next thing. All ranks make it together.

    Args:
        owner: the call that they make, for errors.
        about: what this rank does, for those that do something else.
    """

    def __init__(self, mesh: Mesh, owner: str, about: str = ""):
        self._mesh, self._owner = mesh, owner
        mesh.turns.begin(owner, about)
        # counted where the keys are: a process may join one group after another
        self._id, self._turn = mesh.store.add(f"fzero/agree/talks/{mesh.rank}", 1), 0
        self._notes, self._has_text = self._of(self._id), False

    def _of(self, talk: int) -> Notes:
        return Notes(self._mesh.store, f"fzero/agree/{talk}", self._mesh.rank)

    def reporting(self, act: Callable[[], Any]) -> Any:
        """The result of `act`; if it raises, the other ranks learn of it."""
        try:
            return act()
        except BaseException as error:
            self._notes.write(self._turn, {"error": f"{type(error).__name__}: {error}"})
            raise

    def differing(self, text: str) -> tuple[int, str, str] | None:
        """The first rank whose text is another than rank 0's, and the texts of rank 0 and of that one.

        Communication: a digest of each; two texts if they differ.
        """
        self._notes.write("text", text)
        self._has_text = True
        notes = self.everyone({"hash": hashlib.sha256(text.encode()).hexdigest()})
        for rank, note in notes.items():
            if note["hash"] != notes[0]["hash"]:
                texts = self._notes.read("text", [0, rank], str)
                return rank, texts[0], texts[rank]
        return None

    def everyone(self, note: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The note of every rank, once all have come.

        Raises:
            DivergenceError: naming the ranks that failed or timed out.
        """
        ranks = range(self._mesh.size)
        self._notes.write(self._turn, {"at": self._owner, **note})
        missing = self._mesh.turns.absent(self._notes.keys(self._turn, ranks), self._owner)
        notes = self._notes.read(self._turn, [r for r in ranks if r not in missing], dict[str, Any])
        failed = [f"rank {rank}: {note['error']}" for rank, note in notes.items() if "error" in note]
        if failed or missing:
            fix = "look at the first rank that failed"
            if missing:
                fix = (
                    "call the step alike on every rank: one with a batch of another shape than before builds a program "
                    "of its own, the others run the old one"
                )
                fix = fix if self._owner == "compile" else f"call {self._owner} on every rank: all of them take part"
            came = [f"rank {rank} {timed_out(self._mesh.timeout)}" for rank in missing]
            error = DivergenceError(self._owner, "not every rank is ready to run", [*failed, *came], fix)
            if missing:  # who comes later finds the notes of this talk, and goes on alone
                self._mesh.turns.end(error)
            raise error
        places = {
            rank: ", ".join([other["at"], *(name for name in other if name not in ("at", "failed", "made"))])
            for rank, other in notes.items()
        }
        if len({*places.values()}) > 1:
            self._mesh.turns.look(self._owner)  # which knows more
            fix = (
                "make the same calls in the same order on every rank: a step with a batch of another shape than before "
                "builds a program of its own (compile)"
            )
            raise DivergenceError(
                self._owner,
                "the ranks do different things",
                [f"rank {rank}: {place}" for rank, place in places.items()],
                fix,
            )
        # all have come here, and so read what was said before: a long run's notes would fill the store
        if self._turn == 0:
            self._of(self._id - 1).clear(0)
        elif self._has_text:
            self._notes.clear("text")
            self._has_text = False
        self._turn += 1
        return notes
