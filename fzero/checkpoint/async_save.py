"""Asynchronous saves: a background thread writes a checkpoint from a copy in host memory, while training continues.

A step updates its state in place, so the tensors to save are copied first. This copy is all that the caller waits
for. The thread then does what a synchronous save does. The ranks tell each other of success or failure through a
process group of the thread, because the other groups belong to the steps. At most one save runs at a time.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero._utils.host_memory import host_bytes
from fzero.checkpoint.storage_paths import Place
from fzero.comm.collective_sequence import before_leaving
from fzero.comm.control_group import ControlGroup, new_process_group, run_on_all_ranks
from fzero.comm.control_messages import timed_out
from fzero.errors import CheckpointError
from fzero.sharding.layout import leaf_of, place

_ALIGNMENT = 64  # bytes
_LOOK = 1.0  # seconds between two checks whether the save has ended

_log = logging.getLogger("fzero")
one_at_a_time = threading.RLock()  # held from waiting for the running save until the next one has started
_last: AsyncSave | None = None
# The memory for the copies. It is kept from save to save, because allocating its pages costs more than a copy.
_memory: torch.Tensor | None = None
_group: tuple[Any, Any] | None = None  # the process groups of a mesh's exchanges, and of its saving threads


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
        how = "failed" if self._error is not None else str(self._result) if self.done else "under way"
        return f"AsyncSave(step {self.step}: {how})"

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, successfully or not."""
        return self._ended.is_set()

    def wait(self) -> Place:
        """Waits until the checkpoint is complete and on stable storage, and returns it.

        Raises:
            CheckpointError: on every rank if anything failed on any rank, as for `save`; and in a process that was
                forked from the one that saves.
        """
        self._await()
        # Before the error is raised: an error that the caller has seen is not raised again by the next save.
        self._heard = True
        if self._error is not None:
            raise self._error
        if self._result is None:
            what = f"another process saves step {self.step}, and this one was forked from it"
            fix = "wait in the process that called save; fz.checkpoint.find(path) finds it when it is complete"
            raise CheckpointError("checkpoint.AsyncSave", what, fix=fix)
        return self._result

    def _await(self) -> None:
        """Waits for the end in short intervals, so that Ctrl-C is noticed: a signal that arrives right before a wait
        for a lock only interrupts the next wait. In a process that was forked meanwhile, the thread does not run."""
        while not self._ended.wait(_LOOK) and self._thread.is_alive():
            pass


def start(
    ranks: ControlGroup,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    save: Callable[[ControlGroup, dict[str, torch.Tensor]], Place],
    what: str,
    undo: Callable[[], object],
) -> AsyncSave:
    """Starts an asynchronous save.

    Args:
        ranks: the ranks that save together.
        step: of the state.
        tensors: the tensors that this rank reads for the save, by name. They are copied before this returns.
        save: does the rest of the save from those copies, on the ranks that it is given.
        what, undo: the message for errors, and what to call after one.

    Communication: one exchange of a few bytes; the first time, the creation of a process group.
    """
    global _last
    copies: dict[str, torch.Tensor] = {}
    run_on_all_ranks(
        ranks, "checkpoint.save", lambda: copies.update(_copied(tensors)), undo, what=what, failure=CheckpointError
    )
    group = _group_of(ranks)
    saving = AsyncSave(step, lambda: save(group, copies))
    saving._thread.start()
    _last = saving
    # The thread uses a process group, so a rank must not leave before it ends.
    before_leaving(_finish_and_let_go)
    return saving


def _group_of(ranks: ControlGroup) -> ControlGroup:
    """Returns the group of the threads that save on these ranks. All ranks call it; the first save creates the group,
    which later ones use again."""
    global _group
    if ranks.size == 1:
        return ranks
    if _group is None or _group[0] is not ranks.group:
        _group = ranks.group, new_process_group()
    return _SaveGroup(ranks, _group[1])


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
    global _last, _memory, _group
    settle()
    _last = _memory = _group = None


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


class _SaveGroup(ControlGroup):
    """The group of the threads that write a checkpoint. Its exchanges are not numbered among the collective actions of
    the mesh, because steps go on meanwhile."""

    def __init__(self, mesh: ControlGroup, group: Any):
        super().__init__(mesh.rank, mesh.size, mesh.timeout, group)
        self._sequence = mesh.sequence

    def _look(self, owner: str) -> None:
        """Raises CheckpointError if a rank has left. Safe to call from any thread."""
        if self._sequence is not None and (gone := self._sequence.gone()):
            raise self._failed([f"rank {r} has left" for r in sorted(gone)])

    def _left(self, owner: str) -> CheckpointError:
        return self._failed(["another rank has left"])

    def _timed_out(self, owner: str) -> CheckpointError:
        return self._failed([f"a rank {timed_out(self.timeout)}"])

    def _failed(self, lines: list[str]) -> CheckpointError:
        fix = "look at that rank's errors first; the checkpoint before this one is still the latest"
        return CheckpointError("checkpoint.save", "not every rank has written its shards", lines, fix)
