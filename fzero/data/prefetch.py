"""Prefetches batches in a background thread while the device computes."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from typing import Any, Protocol

import torch

from fzero import tree
from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroValueError

_PATIENCE = 10.0  # seconds to wait for the batch in progress when no more batches are needed


class Dataset(Protocol):
    """Anything that can return its batch for every step."""

    def batch_at(self, step: int, rank: int = 0, size: int = 1) -> Any: ...


@plain_numbers
def prefetch(
    dataset: Dataset,
    start: int,
    stop: int | None = None,
    *,
    rank: int = 0,
    size: int = 1,
    depth: int = 2,
    device: torch.device | str | None = None,
) -> Prefetcher:
    """Returns an iterator over `(step, batch)` for the steps from `start` to `stop - 1`, prefetched by a thread.

    The batches are those of `dataset.batch_at(step, rank, size)`. An exception in the thread is raised where its
    batch would have been returned. The thread ends with the last step, with `close()`, and when the iterator is
    dropped (so a `break` is enough) or the process ends; these wait for the batch in progress, 10 seconds at most.

    Args:
        dataset: a `TokenDataset`, or anything with a `batch_at` like its own; batches are pytrees of tensors.
        start, stop: steps; without a stop there is no last one.
        rank, size: this process among those that share the batch.
        depth: how many batches may be ready.
        device: where to put the batches. For CUDA, the thread pins their memory, and the copy does not block: it is
            enqueued on the stream of the caller that asks for the batch.

    Memory: `depth + 1` batches on the host.

    Example:
        >>> from fzero.data import TokenDataset
        >>> data = TokenDataset(torch.arange(100), seq=4, batch=2)
        >>> [step for step, (tokens, targets) in prefetch(data, 3, 6)]
        [3, 4, 5]
    """
    if not isinstance(depth, int) or depth < 1:
        raise FzeroValueError(
            "data.prefetch", f"depth={depth!r} keeps no batch ready", fix="choose a depth of at least 1"
        )
    where = None if device is None else torch.device(device)
    if where is not None and where.type == "cuda" and where.index is None:
        # the current device of the caller: the thread has its own
        where = torch.device("cuda", torch.cuda.current_device())
    return Prefetcher(dataset, start, stop, rank, size, depth, where)


class Prefetcher:
    """The iterator of `prefetch`. It is also a context manager that closes itself.

    Example:
        >>> import tempfile, torch
        >>> from fzero import data
        >>> path = tempfile.mkdtemp() + "/tokens.bin"
        >>> data.write_tokens(path, torch.arange(100), torch.uint16)
        >>> tokens = data.TokenDataset(path, dtype=torch.uint16, seq=8, batch=2)
        >>> with data.prefetch(tokens, 0, 3) as batches:
        ...     print([step for step, batch in batches])
        [0, 1, 2]
    """

    def __init__(
        self,
        dataset: Dataset,
        start: int,
        stop: int | None,
        rank: int,
        size: int,
        depth: int,
        device: torch.device | None,
    ):
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._device = device
        steps = itertools.count(start) if stop is None else range(start, stop)
        # The thread must not refer to this object, or it could never be dropped.
        args = (dataset, steps, rank, size, device, self._ready, self._stopped)
        self._thread = threading.Thread(target=_produce, args=args, name="fzero-prefetch", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _stop, self._ready, self._stopped, self._thread)

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._stopped.is_set():
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "batch":
            step, batch = value
            return step, batch if self._device is None else _on_device(batch, self._device)
        self.close()
        if kind == "error":
            if isinstance(value, StopIteration):  # raised as it is, it would silently end the caller's loop
                raise RuntimeError("the dataset raised StopIteration") from value
            raise value
        raise StopIteration

    def close(self) -> None:
        """Ends the thread. A batch in progress is dropped."""
        self._close()
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _produce(
    dataset: Dataset,
    steps: Any,
    rank: int,
    size: int,
    device: torch.device | None,
    ready: queue.Queue[tuple[str, Any]],
    stopped: threading.Event,
) -> None:
    """The body of the thread: puts batches, and then the end or an exception, into the queue."""
    try:
        cuda = device is not None and device.type == "cuda"
        if cuda:
            # a new thread uses device 0, where pinning would make every rank create a context
            torch.cuda.set_device(device)
        for step in steps:
            batch = dataset.batch_at(step, rank, size)
            ready.put(("batch", (step, tree.map(_pinned, batch) if cuda else batch)))
            if stopped.is_set():
                return
        ready.put(("end", None))
    except BaseException as error:
        ready.put(("error", error))


def _stop(ready: queue.Queue[Any], stopped: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread together with its iterator, or with the process. If the interpreter exits while the thread is
    inside a PyTorch operation, the process is aborted ("terminate called without an active exception"). The thread
    puts at most one more item, for which there is room once the queue has been emptied.
    """
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()
    if thread is not threading.current_thread():  # it may be this thread that runs the garbage collection
        thread.join(_PATIENCE)


def _pinned(x: Any) -> Any:
    return x.pin_memory() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x


def _on_device(batch: Any, device: torch.device) -> Any:
    return tree.map(lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x, batch)
