"""Joins the processes of one start of a run in the launcher's key-value store, under a name that no earlier start used.

torchrun keeps the same store across all its restarts, so a restarted process finds notes of its predecessors there:
dead addresses and advanced counters. Therefore the processes first agree on a *generation*, and everything that follows
(PyTorch's process groups, fzero's own notes) is written under its name.

[Note: generation] Every rank writes a random number, which each process draws anew. Rank 0 reads the numbers of all
ranks, draws a generation and publishes both. A rank acknowledges a generation only if its own number is among those
that the generation was made for. A generation that was made with a predecessor's number is therefore never complete,
and rank 0 publishes another one as soon as a number changes. When every rank has acknowledged the generation, rank 0
lets all ranks continue.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
import time
from collections.abc import Iterator

import torch.distributed as dist

from fzero.comm import collective_sequence, launcher
from fzero.comm.control_messages import timed_out
from fzero.errors import DivergenceError

_HERE = "fzero/generation"  # key under a generation's prefix that holds the generation's name
_LONGEST_PAUSE = 0.1  # seconds between two queries of the store; shorter at first
_LOOK = 0.5  # seconds between two checks whether a rank was replaced


def meet(rank: int, world: int, timeout: float) -> dist.Store:
    """Waits for all ranks and returns the store that the launcher's environment names, prefixed with their generation.

    Raises:
        DivergenceError: the store cannot be reached, or ranks timed out; names them by number.
    """
    fix = "look at why these ranks have not reached make_mesh, or give a longer timeout"
    deadline = time.monotonic() + timeout
    try:
        store, *_ = next(iter(dist.rendezvous("env://", rank, world, timeout=datetime.timedelta(seconds=timeout))))
    except (dist.DistError, RuntimeError) as error:
        raise DivergenceError(
            "make_mesh", f"the store of rank 0 cannot be reached in {timeout:g} s", [str(error).splitlines()[0]], fix
        ) from error
    # The store has a generation of an earlier start. In its notes the predecessor of this process may seem to be alive.
    if store.check(["fzero/generation"]):
        collective_sequence.tell_of_death(dist.PrefixStore(_name(store.get("fzero/generation").decode()), store), rank)
    generation = (_lead if rank == 0 else _follow)(store, rank, world, deadline)
    missing = _missing(store, world, generation) if store.check([_go(generation)]) is False else []
    if missing:
        launcher.tell_through(dist.PrefixStore(_life(store, world), store))
        raise DivergenceError(
            "make_mesh", "not every rank has arrived", [f"rank {r} {timed_out(timeout)}" for r in missing], fix
        )
    found = dist.PrefixStore(_name(generation), store)
    # So that `replaced` can tell the generation from the store alone.
    found.set(_HERE, generation)
    launcher.tell_through(found)
    if collective_sequence.watcher is not None:
        collective_sequence.watcher.met()
    return found


def _lead(store: dist.Store, rank: int, world: int, deadline: float) -> str:
    """Runs rank 0's side of the rendezvous. Returns the last generation it published; it is released if all ranks
    acknowledged it."""
    numbers, generation, came = [], "", [_came(r) for r in range(world)]
    store.set(_came(rank), secrets.token_hex(8))
    for _ in _looks(deadline):
        if store.check(came) and (found := [number.decode() for number in store.multi_get(came)]) != numbers:
            numbers, generation = found, secrets.token_hex(8)
            # The numbers first: a rank reads them as soon as it sees the generation.
            store.set(_numbers(generation), " ".join(numbers))
            store.set("fzero/generation", generation)
        if generation and store.check([_ack(generation, r) for r in range(1, world)]):
            store.set(_go(generation), "")
            break
    return generation


def _follow(store: dist.Store, rank: int, world: int, deadline: float) -> str:
    """Runs the side of every other rank. Returns the last generation that includes this process."""
    number, mine, seen = secrets.token_hex(8), "", ""
    store.set(_came(rank), number)
    for _ in _looks(deadline):
        current = store.get("fzero/generation").decode() if store.check(["fzero/generation"]) else ""
        if current != seen:
            seen, numbers = current, store.get(_numbers(current)).decode().split(" ")
            if len(numbers) == world and numbers[rank] == number:
                mine = current
                store.set(_ack(mine, rank), "")
        if mine and store.check([_go(mine)]):
            break
    return mine


def _looks(deadline: float) -> Iterator[None]:
    """Yields until the deadline, with growing pauses.

    The store is polled, because every wait on it that times out makes c10d print a warning.
    """
    pause = 0.001
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _missing(store: dist.Store, world: int, generation: str) -> list[int]:
    """Returns the ranks that have not come, as far as this rank can tell. Numbers written in an earlier start do not
    count."""
    absent = [r for r in range(world) if not store.check([_came(r)])]
    silent = [r for r in range(1, world) if generation and not store.check([_ack(generation, r)])]
    return absent or silent or [0]


def _life(store: dist.Store, world: int) -> str:
    """Returns a name for a failed start that is the same on all its ranks: a hash of the numbers of the ranks that
    came."""
    numbers = [store.get(_came(r)) for r in range(world) if store.check([_came(r)])]
    return "fzero/failed/" + hashlib.sha256(b" ".join(numbers)).hexdigest()[:16]


def _name(generation: str) -> str:
    """Returns the prefix of the keys that are written under a generation."""
    return f"fzero/generation/{generation}"


def _came(rank: int) -> str:
    return f"fzero/came/{rank}"


def _numbers(generation: str) -> str:
    return f"fzero/numbers/{generation}"


def _ack(generation: str, rank: int) -> str:
    return f"fzero/ack/{generation}/{rank}"


def _go(generation: str) -> str:
    return f"fzero/go/{generation}"


def absent(store: dist.Store, keys: list[str], timeout: float) -> list[int]:
    """Waits until all keys are set in the store. Returns the positions of the keys that are not set within `timeout`
    seconds.

    It returns earlier if a process of this generation has been replaced, because that process will not set its key.
    """
    looked = time.monotonic()
    for _ in _looks(looked + timeout):
        if store.check(keys):
            return []
        if time.monotonic() - looked > _LOOK:
            if replaced(store):
                break
            looked = time.monotonic()
    return [i for i, key in enumerate(keys) if not store.check([key])]


def replaced(store: dist.Store) -> list[int]:
    """Returns the ranks whose process has been replaced by another one since the rendezvous.

    Args:
        store: the store that `meet` returned.
    """
    if not isinstance(store, dist.PrefixStore) or not store.check([_HERE]):
        return []
    below = store.underlying_store
    numbers = below.get(_numbers(store.get(_HERE).decode())).split(b" ")
    now = below.multi_get([_came(rank) for rank in range(len(numbers))])
    return [rank for rank, number in enumerate(numbers) if now[rank] != number]
