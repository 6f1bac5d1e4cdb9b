"""Compares programs between ranks before they first run. Messages go through the store, not through a collective, so
that a rank that is missing, or that failed, is an error that names it, never a hang."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from fzero import turns
from fzero.comm.replicas import Held, differing, digested
from fzero.errors import DivergenceError, FzeroError, FzeroValueError, RankLost, message
from fzero.mesh import Mesh
from fzero.notes import from_store
from fzero.program.ir import Program
from fzero.program.show import show
from fzero.read_json import formed
from fzero.trace import deterministic
from fzero.trace.subgraph import signature

T = TypeVar("T")


def together(
    mesh: Mesh, make: Callable[[], tuple[Any, Callable[[], Callable[[], Any]]]], why: str = ""
) -> tuple[Any, Any]:
    """The result of `make` on this rank, once every rank has made the same program and finished building it.

    `make` returns a `Lowered` and a function that builds it, which returns one that connects what was built with the
    other ranks. An error in any of them is raised here, and reported to the other ranks: only the last waits for them,
    when all have built. They are told `why`.

    Communication: a few hundred bytes through the store, three times; the text of two programs if they differ.

    Raises:
        DivergenceError: a rank's program differs (showing the first differing line), a rank failed, or one did not come
            in time.
    """
    if mesh.size == 1:
        lowered, build = make()
        return lowered, build()()
    if turns.watcher is not None:
        turns.watcher.builds()
    talk = _Talk(mesh, about=why)
    lowered, build = talk.reporting(make)
    text = describe(*lowered.programs)
    talk.compare(text)
    connect = talk.reporting(build)
    talk.everyone({"built": True})
    with unbroken(mesh):
        connected = talk.reporting(connect)
    talk.everyone({"ok": True})
    return lowered, connected


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


def answers(mesh: Mesh, owner: str, act: Callable[[], Any]) -> list[Any]:
    """The results of `act` on every rank, which JSON can hold, by rank; an error on one is raised on all of them, as by
    `everywhere`."""
    return [act()] if mesh.size == 1 else _done(mesh, owner, act, tell=True)[1]


def _done(mesh: Mesh, owner: str, act: Callable[[], T], tell: bool = False, about: str = "") -> tuple[T, list[Any]]:
    """The result of `act` on this rank, and with `tell` that of each."""
    talk, error = _Talk(mesh, owner, about), None

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
    problems = [f"rank {rank}: " + text.replace("\n", "\n    ") for rank, text in texts.items() if text]
    raise FzeroValueError(
        message(owner, "not every rank could do its part", problems, "look at the first rank that failed")
    ) from error


def same(mesh: Mesh, owner: str, held: Callable[[], Held], fix: str) -> None:
    """Raises on every rank if two of them hold other values of what all of them hold, or all that share a place along
    the axes it is sharded over.

    `held` says what that is; it is called once, on a mesh of one device too, and what it raises the other ranks hear
    of.

    Communication: about a hundred bytes through the store; if anything differs 30 bytes more a name. Memory and time:
        see `comm.replicas.differing`.

    Raises:
        DivergenceError: naming what differs, and on which ranks.
    """
    if mesh.size == 1:
        held()
        return
    talk = _Talk(mesh, owner)

    def exchange(note: Any, form: Any) -> list[Any]:
        notes = talk.everyone({owner: note})
        return [formed(notes[rank].get(owner), form) for rank in range(mesh.size)]

    if problems := differing(talk.reporting(lambda: digested(held())), mesh.axes, mesh.size, exchange):
        raise DivergenceError(
            message(owner, "the ranks hold different values of what must be the same on all of them", problems, fix)
        )


def describe(*programs: Program) -> str:
    """Everything two ranks must have in common, as text: PyTorch's switch, and of each program of a set its lines and
    the operations of its functions."""
    parts = [f"deterministic algorithms: {deterministic.setting()}"]
    for program in programs:
        parts += [f"{v.name}: {v}" for v in program.inputs] + [show(program, fold=False)]
        parts += [f"pool[{i}] = {line.into}" for i, line in enumerate(program.pooled)]
        for name, function in program.functions.items():
            parts.append(f"def {name}:")
            parts += [f"    {line}" for line in signature(function.graph)]
    return "\n".join(parts)


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
            raise RankLost(
                message("step", "a transfer failed: another rank has left, or runs another program", problems, fix)
            )
        except DivergenceError as known:
            _end(mesh, known)
            raise known from error


def _end(mesh: Mesh, error: BaseException) -> None:
    mesh.turns.end(error)
    if mesh.context.transport is not None:
        mesh.context.transport.abandon()


class _Talk:
    """One exchange after another between the ranks of a mesh."""

    def __init__(self, mesh: Mesh, owner: str = "compile", about: str = ""):
        self._mesh, self._store, self._owner = mesh, mesh.store, owner
        mesh.turns.begin(owner, about)
        # counted where the keys are: a process may join one group after another
        self._id, self._turn = (self._store.add(f"fzero/agree/talks/{mesh.rank}", 1), 0)

    def reporting(self, act: Callable[[], Any]) -> Any:
        """The result of `act`; if it raises, the other ranks learn of it."""
        try:
            return act()
        except BaseException as error:
            self._store.set(self._key(self._mesh.rank), json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise

    def compare(self, text: str) -> None:
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(f"{self._key(self._mesh.rank)}/text", text)
        notes = self.everyone({"hash": digest})
        for rank, note in notes.items():
            if note["hash"] != notes[0]["hash"]:
                mine, other = (self._text(0), self._text(rank))
                raise DivergenceError(
                    message(
                        "compile",
                        f"rank {rank} would run another program than rank 0",
                        difference(mine, other, "rank 0", f"rank {rank}"),
                        "run the same code, flags and batch shapes on every rank",
                    )
                )

    def everyone(self, note: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The note of every rank, once all have come.

        Raises:
            DivergenceError: naming the ranks that failed or timed out.
        """
        self._store.set(self._key(self._mesh.rank), json.dumps({"at": self._owner, **note}))
        missing = self._mesh.turns.absent([self._key(rank) for rank in range(self._mesh.size)], self._owner)
        notes = {
            rank: from_store(self._store, self._key(rank), dict[str, Any])
            for rank in range(self._mesh.size)
            if rank not in missing
        }
        failed = [f"rank {rank}: {note['error']}" for rank, note in notes.items() if "error" in note]
        if failed or missing:
            fix = "look at the first rank that failed"
            if missing:
                fix = (
                    "call the step alike on every rank: one with a batch of another shape than before builds a program "
                    "of its own, the others run the old one"
                )
                fix = fix if self._owner == "compile" else f"call {self._owner} on every rank: all of them take part"
            came = [f"rank {rank} timed out after {self._mesh.timeout:g} s" for rank in missing]
            error = DivergenceError(message(self._owner, "not every rank is ready to run", [*failed, *came], fix))
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
                message(
                    self._owner,
                    "the ranks do different things",
                    [f"rank {rank}: {place}" for rank, place in places.items()],
                    fix,
                )
            )
        if self._turn == 0:
            # all have come here, and so read what was said in the talk before: a long run's notes would fill the store
            self._store.delete_key(f"fzero/agree/{self._id - 1}/0/{self._mesh.rank}")
        self._turn += 1
        return notes

    def _key(self, rank: int) -> str:
        return f"fzero/agree/{self._id}/{self._turn}/{rank}"

    def _text(self, rank: int) -> str:
        return self._store.get(f"fzero/agree/{self._id}/0/{rank}/text").decode()


def difference(first: str, other: str, one: str, another: str) -> list[str]:
    """The first line in which two texts differ, both sides."""
    pairs = itertools.zip_longest(first.splitlines(), other.splitlines(), fillvalue="(no such line)")
    for number, (a, b) in enumerate(pairs, 1):
        if a != b:
            return [f"first difference, line {number}:", f"  {one}: {a.strip()}", f"  {another}: {b.strip()}"]
    return []
