"""Runs the copies of a program between memory tiers: its ops start them and wait for them.

The next value of a tensor on disk may be written speculatively, to its spare extent, while the old value is still
valid. When the next value becomes valid, the two extents are swapped.

A disk that fails in the middle of a step does not stop the step there, because the other ranks would wait for transfers
that never come. The step continues with whatever the buffers contain, and fails at its end, on every rank, with the
same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero._utils.host_memory import SECTOR, padded
from fzero.errors import TierError
from fzero.memory.device_copies import copies
from fzero.memory.disk import aligned
from fzero.mesh import Mesh
from fzero.sharding.layout import Extent, extent_of, set_extent


@dataclass(frozen=True)
class TierCopy:
    """A copy in flight.

    Attributes:
        done: waits for the copy.
        values: the values that it produces, unless they have a planned buffer.
        hold: a wait of the device that does not block the host.
    """

    done: Callable[[], object]
    values: Sequence[torch.Tensor]
    hold: Callable[[], object] | None = None

    def wait(self, into: Sequence[torch.Tensor], host: bool = True) -> Sequence[torch.Tensor]:
        (self.done if host or self.hold is None else self.hold)()
        return into or self.values


class TierTransport:
    """The copies of a program.

    Args:
        mesh: the mesh that the program runs on.
        disk: whether the program reads or writes tensors on disk.
    """

    def __init__(self, mesh: Mesh, disk: bool):
        self._mesh, self._disk, self._copies = mesh, disk, copies(mesh)
        self._failed: TierError | None = None
        self.nothing = TierCopy(lambda: None, ())  # stands for a copy that is skipped
        self._on_disk: list[Callable[[], None]] = []  # the waits of the disk transfers that were started since `begin`

    def to_host_start(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None) -> TierCopy:
        copy = self._copies.to_host_start(sources, _shaped(into, sources))
        return TierCopy(copy.wait, sources, hold=copy.hold)

    def to_device_start(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None) -> TierCopy:
        copy = self._copies.to_device_start(sources, _shaped(into, sources))
        return TierCopy(copy.wait, sources)

    def begin(self) -> None:
        """Called before a step runs."""
        self._failed, self._on_disk = None, []

    def abandon(self) -> None:
        """Called when a step ended in the middle. Returns when none of the transfers that it has started still reads or
        writes memory, whether they succeed or not: the next step uses the same memory."""
        for wait in self._on_disk:
            self._kept(wait)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        self.begin()

    def take_spare(self, leaves: Sequence[torch.Tensor]) -> None:
        """Makes the speculatively written values of these tensors their current values."""
        for leaf in leaves:
            old = _extent(leaf)
            assert old.spare is not None
            # The extent of the old value is the spare for the next speculative write.
            set_extent(leaf, replace(old.spare, spare=replace(old, spare=None)))

    def disk_read_start(self, leaves: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> TierCopy:
        # The threads of the disk write to host memory that a copy to the device may still read.
        self._copies.settle(into)
        extents = [_extent(x) for x in leaves]
        transfer = extents[0].files.read([(e.offset, _sectors(flat)) for e, flat in zip(extents, into, strict=True)])
        self._on_disk.append(transfer.wait)
        return TierCopy(lambda: self._kept(transfer.wait), into)

    def disk_write_start(
        self, values: Sequence[torch.Tensor], into: Sequence[torch.Tensor], aside: bool = False
    ) -> TierCopy:
        extents = [_extent(x) for x in into]
        if aside:
            extents = [e.spare for e in extents if e.spare is not None]
        runs = [(e.offset, _sectors(x) if _lies_well(x) else _copied(x)) for e, x in zip(extents, values, strict=True)]
        transfer = extents[0].files.write(runs)
        self._on_disk.append(transfer.wait)
        return TierCopy(lambda: self._kept(transfer.wait), ())

    def settled(
        self, function: Callable[..., Any], written: Callable[..., Iterable[torch.Tensor | None]]
    ) -> Callable[..., Any]:
        """Wraps a function that the host runs, so that it first waits for copies to the device that still read the
        memory it writes.

        Args:
            written: `written(*args, into)` returns the tensors that the function writes.
        """

        def call(*args: Any, into: Sequence[Any] = (), **kwargs: Any) -> Any:
            self._copies.settle([x for x in written(*args, into) if x is not None])
            return function(*args, **kwargs, **({"into": into} if into else {}))

        return call

    def end(self) -> TierError | None:
        """Called when a step has run. Returns the first disk error of each rank as one error, the same on every rank.

        Communication: if the program uses tensors on disk, one number from every rank.
        """
        if not self._disk:
            return None
        failed, self._failed = self._failed, None
        failures = [_said(failed)] if failed else []
        # Every step of an offloaded program makes this exchange, also if nothing failed: otherwise the ranks would
        # not agree on whether to raise.
        if self._mesh.size > 1:
            everyone = self._mesh.control.all_gather(failures, list[str], "step")
            failures = [f"rank {rank}: {text}" for rank, texts in enumerate(everyone) for text in texts]
        if not failures:
            return None
        fix = "continue from the last checkpoint, with more space or on another path: the state is lost"
        error = TierError("step", "a disk failed while the step ran", failures, fix)
        error.__cause__ = failed
        return error

    def _kept(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except TierError as error:
            self._failed = self._failed or error


def _shaped(into: Sequence[torch.Tensor] | None, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    return into and [flat.view(x.shape) for flat, x in zip(into, like, strict=True)]


def _extent(tensor: torch.Tensor) -> Extent:
    found = extent_of(tensor)
    assert found is not None, "a tensor that is stored on disk"
    return found


def _sectors(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a value, extended to the end of its last sector."""
    flat = x.new_empty(0, dtype=torch.uint8)
    # A view cannot extend beyond the tensor's own elements, so the tensor is made from the storage.
    return flat.set_(x.untyped_storage(), x.storage_offset() * x.element_size(), (padded(x.nbytes),), (1,))  # type: ignore[call-overload]


def _said(error: TierError) -> str:
    """Returns the failure and its location in one line."""
    what, *where = (line.strip() for line in str(error).splitlines() if not line.startswith("Fix: "))
    return "; ".join((what.removeprefix("fzero.offload: "), *where))


def _lies_well(x: torch.Tensor) -> bool:
    """Whether a value can be written directly from its memory: it is contiguous and aligned, and its last sector lies
    within its storage."""
    begin = x.storage_offset() * x.element_size()
    return x.is_contiguous() and x.data_ptr() % SECTOR == 0 and begin + padded(x.nbytes) <= x.untyped_storage().nbytes()


def _copied(x: torch.Tensor) -> torch.Tensor:
    out = aligned(padded(x.nbytes))
    out[: x.nbytes].view(x.dtype).copy_(x.reshape(-1))
    return out
