"""Simulates the asynchronous copies of a GPU on a CPU, for tests and for trying out an offloaded run.

Code that forgets to wait for a copy, or writes too early, computes correct results if host and device share one memory,
and wrong results on a GPU. With these copies it computes wrong results on a CPU too.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from fzero.errors import TierError
from fzero.memory.device_copies import PendingCopy, Tensors, meet, moves


class LateCopies:
    """Copies on a CPU that treat host and device as two separate memories (`make_mesh(unified_memory=False)`).

    A thread carries out the copies one after the other, with a delay. Data that is read before the wait is not there
    yet, and a source that is overwritten before the copy is copied with its new value. Until the copy, every bit of
    `into` is set, which is NaN in every floating-point format. After a wait of the device only, the host sees NaN again
    until a copy back to the device begins, or until the host settles.

    Args:
        timeout: seconds that a wait waits.
        pause: called before every copy, in the thread.
    """

    def __init__(self, timeout: float, pause: Callable[[], object] = lambda: time.sleep(1e-3)):
        self._timeout = timeout
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._hidden: list[tuple[Tensors, Tensors]] = []  # hidden from the host, with their values
        thread = threading.Thread(target=_copy_all, args=(self._queue, pause), name="fzero-copies", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._queue, thread)

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        self._show(into or ())
        done = self._start(sources, into)
        return PendingCopy(into or (), sources, lambda: self._wait(done), hold=lambda: self._hold(done, into or ()))

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        self._show(sources)
        done = self._start(sources, into)
        return PendingCopy(into or (), sources, lambda: self._wait(done))

    def _start(self, sources: Tensors, into: Tensors | None) -> Future[None]:
        assert into is not None, "two memories"
        pairs = moves(sources, into)
        for _, target in pairs:
            _hide(target)
        done: Future[None] = Future()
        self._queue.put((done, pairs))
        return done

    def _hold(self, done: Future[None], filled: Tensors) -> None:
        self._wait(done)
        # The device has waited for this copy and the host has not, so the host must not see the values. They are shown
        # once the host settles or starts a copy from there.
        self._hidden.append((filled, [x.clone() for x in filled]))
        for x in filled:
            _hide(x)

    def settle(self, written: Tensors) -> None:
        self._show(written)

    def _show(self, memory: Tensors) -> None:
        shown = [pair for pair in self._hidden if meet(pair[0], memory)]
        self._hidden = [pair for pair in self._hidden if not meet(pair[0], memory)]
        for there, held in shown:
            for x, value in zip(there, held, strict=True):
                x.copy_(value)

    def _wait(self, done: Future[None]) -> None:
        try:
            done.result(self._timeout)
        except Exception as error:
            what = f"it was not done in {self._timeout:g} s" if not done.done() else f"{type(error).__name__}: {error}"
            fix = "continue from the last checkpoint: the state is lost"
            raise TierError("step", "a copy between host and device failed", [what], fix) from error


def _hide(x: torch.Tensor) -> None:
    # All bits set are NaN in every floating-point dtype, so a value that is read too early spreads visibly.
    x.view(-1).view(torch.uint8).fill_(255)


_Job = tuple["Future[None]", Sequence[tuple[torch.Tensor, torch.Tensor]]]


@torch.no_grad()
def _copy_all(jobs: queue.SimpleQueue[_Job | None], pause: Callable[[], object]) -> None:
    """The main function of the thread of `LateCopies`. It ends when it reads None."""
    while (job := jobs.get()) is not None:
        # Makes the copy late on purpose: code that does not wait then reads the bytes that `_hide` has written.
        pause()
        _copy(*job)
        del job  # do not keep the tensors alive while waiting for the next job


def _copy(done: Future[None], moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    try:
        for source, target in moves:
            target.copy_(source)
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """Ends the thread together with its `LateCopies` object, or with the process.

    A thread that is in the middle of a copy when the interpreter shuts down would crash the process.
    """
    jobs.put(None)
    if thread is not threading.current_thread():  # the finalizer may run in this very thread, which cannot join itself
        thread.join(1.0)
