"""Asynchronous saves: a background thread writes a checkpoint from a copy in host memory, while training continues.

A step updates its state in place, so the tensors to save are copied first. This copy is all that the caller waits
for. The thread then does what a synchronous save does. The ranks tell each other of success or failure through the
store and never by a collective, because collectives belong to the steps. At most one save runs at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fzero._compat import compat
from fzero._utils.host_memory import host_bytes
from fzero.checkpoint.storage_paths import Place
from fzero.comm.all_ranks import Ranks, together
from fzero.comm.collective_sequence import before_leaving, latest
from fzero.comm.control_messages import STRANGERS, Notes, timed_out
from fzero.errors import CheckpointError
from fzero.sharding.layout import leaf_of, place

_ALIGNMENT = 64  # bytes
_LOOK = 1.0  # seconds between two checks whether the ranks that are waited for are still there
_TIMEOUT = 600.0  # seconds that ranks wait for each other if there is no mesh whose timeout applies

_log = logging.getLogger("fzero")
one_at_a_time = threading.RLock()  # held from waiting for the running save until the next one has started
_last: AsyncSave | None = None
# The memory for the copies. It is kept from save to save, because allocating its pages costs more than a copy.
_memory: torch.Tensor | None = None


class AsyncSave:
    """A save that runs in a background thread, as returned by `save(..., wait=False)`.

    If a save fails, its error is logged immediately, by the logger `fzero`. The error is raised by `wait` and, if
    some rank has not called `wait`, by the next save on every rank. `close_mesh()`, the end of the process, and every
    function that looks for a checkpoint or reads one wait for the save first. A process that was forked while the save
    was running cannot tell how it ended.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
        >>> state = step.init({"w": torch.ones(2)})
        >>> saving = fz.checkpoint.save(tempfile.mkdtemp(), state, wait=False)
        >>> saving.wait().name, saving.done
        ('step-00000000', True)
    """

    def __init__(self, step: int, run: Callable[[], Place]):
        self.step = step
        self._result: Place | None = None
        self._error: BaseException | None = None
        self._heard = False
        self._process = os.getpid()
        self._ended = threading.Event()  # `Thread.join`, once interrupted, reports that the thread has ended

        def act() -> None:
            try:
                self._result = run()
            except BaseException as error:
                self._error = error
                # Logged here, because a run that never calls `wait` would otherwise learn of it only at its next save.
                _log.error("the checkpoint of step %d was not saved: %s", step, error)
            finally:
                self._ended.set()

        self._thread = threading.Thread(target=act, name=f"fzero-save-{step}")  # no daemon: awaited at exit

    def __repr__(self) -> str:
        if self._process != os.getpid():
            return f"AsyncSave(step {self.step}, of process {self._process})"
        how = "failed" if self._error is not None else str(self._result) if self.done else "under way"
        return f"AsyncSave(step {self.step}: {how})"

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, successfully or not.

        Raises:
            CheckpointError: in a process that was forked from the one that saves.
        """
        self._check_process()
        return self._ended.is_set()

    def wait(self) -> Place:
        """Waits until the checkpoint is complete and on stable storage, and returns it.

        Raises:
            CheckpointError: on every rank if anything failed on any rank, as for `save`; and in a process that was
                forked from the one that saves.
        """
        self._check_process()
        self._await()
        # Before the error is raised: an error that the caller has seen is not raised again by the next save.
        self._heard = True
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _await(self) -> None:
        """Waits for the end in short intervals, so that Ctrl-C is noticed: a signal that arrives right before a wait
        for a lock only interrupts the next wait."""
        while not self._ended.wait(_LOOK):
            pass

    def _begin(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._error = error
            self._ended.set()
            raise

    def _check_process(self) -> None:
        if self._process != os.getpid():
            what = f"process {self._process} saves step {self.step}, and this one was forked from it"
            fix = "wait in the process that called save; fz.checkpoint.find(path) finds it when it is complete"
            raise CheckpointError("checkpoint.AsyncSave", what, fix=fix)


def start(
    ranks: Ranks,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    save: Callable[[Ranks, dict[str, torch.Tensor]], Place],
    what: str,
    undo: Callable[[], object],
) -> AsyncSave:
    """Starts an asynchronous save.

    Args:
        ranks: the ranks that save together, with their collective exchange.
        step: of the state.
        tensors: the tensors that this rank reads for the save, by name. They are copied before this returns.
        save: does the rest of the save from those copies, on the ranks that it is given.
        what, undo: the message for errors, and what to call after one.

    Communication: one exchange of a few bytes.
    """
    global _last
    copies: dict[str, torch.Tensor] = {}

    def copy() -> tuple[str, str]:
        copies.update(_copied(tensors))
        return uuid.uuid4().hex, secrets.token_hex(32)

    # Every rank proposes a name and a secret; those of rank 0 are used.
    name, secret = together(ranks, "checkpoint.save", what, copy, undo, tuple[str, str])[0]

    among = _Apart(ranks, name, secret.encode()) if ranks.size > 1 else contextlib.nullcontext(ranks)

    def run() -> Place:
        with among as ranks:
            return save(ranks, copies)

    saving = _last = AsyncSave(step, run)
    # The thread uses the store of the process group, so a rank must not leave the group before it ends.
    before_leaving(_finish_and_let_go)
    saving._begin()
    return saving


def finish() -> None:
    """Waits for the running save, if there is one.

    Raises:
        CheckpointError: the save failed, and `wait` has not been called on this rank. On other ranks it may have
            been, so some ranks may raise and others not.
    """
    if _last is not None and not _last._heard:
        _last.wait()


def settle() -> None:
    """Waits for the running save, whether it succeeds or fails.

    Its `keep` deletes checkpoints, and the checkpoint that the caller looks for may be the one being saved.
    """
    if (saving := _last) is not None:
        saving._await()  # a failure has been logged already


def _finish_and_let_go() -> None:
    global _last, _memory
    settle()
    _last = _memory = None


def _forked() -> None:
    """Resets the module in a process that has just been forked, which has none of the threads."""
    global _last, one_at_a_time
    _last, one_at_a_time = None, threading.RLock()


os.register_at_fork(after_in_child=_forked)


@torch.no_grad()
def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors to host memory. A copy has the placement of its original, and tied tensors are copied once."""
    global _memory
    distinct = {id(x): x for x in tensors.values()}
    # Each copy is aligned, because bytes can be viewed as a dtype only at multiples of its size.
    sizes = [-(-x.numel() * x.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for x in distinct.values()]
    device = next((x.device for x in distinct.values() if x.is_cuda), torch.device("cpu"))
    pinned = device.type == "cuda"
    # Pinned memory also serves copies from a CPU, so it is replaced only if it is too small.
    if _memory is None or _memory.numel() < sum(sizes) or _memory.is_pinned() < pinned:
        _memory = None  # released before the next allocation, so that the two never exist together
        with torch.inference_mode(False):  # the next save writes to it, possibly outside inference mode
            _memory = host_bytes(sum(sizes), device, "checkpoint.save")
    copies: dict[int, torch.Tensor] = {}
    for (key, x), begin in zip(distinct.items(), itertools.accumulate(sizes, initial=0), strict=False):
        flat = _memory[begin : begin + x.numel() * x.dtype.itemsize]
        copies[key] = flat.view(x.dtype).view(x.shape).copy_(x, non_blocking=pinned)
        if (tag := leaf_of(x)) is not None:
            place(copies[key], *tag)
    if pinned:
        # The next step overwrites the originals, and the thread reads the copies.
        torch.cuda.synchronize()
    return {name: copies[id(x)] for name, x in tensors.items()}


class _Apart:
    """A context in which ranks exchange values through the store, independently of their sequence of collectives.

    The values are signed ([Note: the open store] in comm/control_messages.py).

    Args:
        name: of this save, unique over the whole life of the store and its restarts.
        secret: the key that these ranks share.
    """

    def __init__(self, ranks: Ranks, name: str, secret: bytes):
        self._rank, self._ranks = ranks.rank, range(ranks.size)
        self._turns = latest()
        kept = self._turns.store if self._turns is not None else None
        store = compat.default_store() if kept is None else kept
        self._notes = Notes(store, f"fzero/save/{name}", ranks.rank, secret, self._refused)
        self._number, self._failed = 0, False

    def __enter__(self) -> Ranks:
        return Ranks(self._rank, len(self._ranks), self._exchange)

    def __exit__(self, *_: object) -> None:
        """Waits, on rank 0, whose process may keep the store, until all ranks have read the last exchange."""
        # The other ranks have given up too, or will time out. Rank 0 would wait for messages that never come.
        if self._failed:
            return
        with contextlib.suppress(CheckpointError), self._store_is_there():
            self._notes.write("read", None)
            if self._rank == 0:
                self._await("read")
                for key in (*self._notes.keys(self._number - 1, self._ranks), *self._notes.keys("read", self._ranks)):
                    self._notes.store.delete_key(key)

    def _exchange(self, mine: Any, form: Any) -> list[Any]:
        """Exchanges one value per rank through the store, and returns the values in order of rank."""
        number = self._number
        self._number += 1
        with self._store_is_there():
            self._notes.write(number, mine)
            self._await(number)
            if number:  # by now all ranks have read the exchange before this one
                self._notes.clear(number - 1)
            return [*self._notes.read(number, self._ranks, form).values()]

    def _refused(self, lines: list[str]) -> CheckpointError:
        """Returns the error for messages that were not sent by the ranks of this save."""
        self._notes.write("refused", None)  # tells the other ranks, which may have read the genuine message before
        return CheckpointError("checkpoint.save", "messages in the store are not from this save", lines, STRANGERS)

    @contextlib.contextmanager
    def _store_is_there(self) -> Iterator[None]:
        """A context that turns the loss of the store into an error that says what to do."""
        try:
            yield
        except CheckpointError:
            self._failed = True
            raise
        except RuntimeError as error:  # a DistError too
            self._failed = True
            what = "the store is gone: the process that kept it, of rank 0 or of the launcher, has left"
            fix = "look at that process's errors; if none is newer, the checkpoint before this one is the latest"
            raise CheckpointError("checkpoint.save", what, fix=fix) from error

    def _await(self, what: int | str) -> None:
        """Waits until all ranks have written the message.

        Raises:
            CheckpointError: a rank left, died or timed out without writing it.
        """
        timeout = _TIMEOUT if self._turns is None else self._turns.timeout
        began = looked = time.monotonic()
        nap = 1e-3
        while not self._notes.come(what, self._ranks):
            now = time.monotonic()
            if now - looked > _LOOK:
                looked, gone = now, self._turns.gone() if self._turns is not None else set()
                absent = [r for r in self._ranks if not self._notes.come(what, [r])]
                lost = [f"rank {r} has left" for r in absent if r in gone]
                lost += [f"rank {r} has given up" for r in absent if self._notes.come("refused", [r])]
                lost = lost or [f"rank {r} {timed_out(timeout)}" for r in absent if now - began > timeout]
                if lost:
                    fix = "look at that rank's errors first; the checkpoint before this one is still the latest"
                    raise CheckpointError("checkpoint.save", "not every rank has written its shards", lost, fix)
            time.sleep(nap)
            nap = min(2 * nap, 0.1)
