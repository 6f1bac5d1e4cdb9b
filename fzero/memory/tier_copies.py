"""Runs copies between the tiers of a rank, as the lines of a program start them and wait for them.

A leaf's next value may be written aside, to its spare extent, while the old one still counts. When the next one does,
the two extents change places.

A disk that fails in the middle of a step does not stop it there: the other ranks would wait for transfers that never
come. The step goes on with what the buffers hold and fails at its end, on every rank, with the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fzero._utils.host_memory import SECTOR, padded
from fzero.comm.control_messages import exchanged
from fzero.errors import TierError
from fzero.memory.device_copies import copies
from fzero.memory.disk import aligned
from fzero.mesh import Mesh
from fzero.sharding.layout import Extent, extent_of, set_extent


@dataclass(frozen=True)
class TierCopy:
    """A copy in flight: its wait, the values it makes unless they have a place, and a wait of the device alone."""

    done: Callable[[], object]
    values: Sequence[torch.Tensor]
    hold: Callable[[], object] | None = None

    def wait(self, into: Sequence[torch.Tensor], host: bool = True) -> Sequence[torch.Tensor]:
        (self.done if host or self.hold is None else self.hold)()
        return into or self.values


class TierTransport:
    """The copies of a program.

    Args:
        mesh: that it runs on.
        disk: whether it reads or writes leaves on disk.
    """

    def __init__(self, mesh: Mesh, disk: bool):
        self._mesh, self._disk, self._copies = mesh, disk, copies(mesh)
        self._failed: TierError | None = None
        self.nothing = TierCopy(lambda: None, ())  # a copy that is left out
        self._on_disk: list[Callable[[], None]] = []  # waits for what was started since then

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
        """Called when a step ended in the middle: until nothing that it has started reads or writes memory, whatever
        becomes of it. The memory is the next step's."""
        for wait in self._on_disk:
            self._kept(wait)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        self.begin()

    def take_spare(self, leaves: Sequence[torch.Tensor]) -> None:
        """Makes what was written aside of these leaves their value."""
        for leaf in leaves:
            old = _extent(leaf)
            assert old.spare is not None
            set_extent(leaf, replace(old.spare, spare=replace(old, spare=None)))

    def disk_read_start(self, leaves: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> TierCopy:
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
        """A function that the host may run: what it writes, as `written(*args, into)` says, is not on its way to the
        device any more."""

        def call(*args: Any, into: Sequence[Any] = (), **kwargs: Any) -> Any:
            self._copies.settle([x for x in written(*args, into) if x is not None])
            return function(*args, **kwargs, **({"into": into} if into else {}))

        return call

    def end(self) -> TierError | None:
        """Called when a step has run. Returns the first error of a rank's disk, on every rank.

        Communication: with leaves on disk one number from every rank.
        """
        if not self._disk:
            return None
        failed, self._failed = self._failed, None
        failures = [_said(failed)] if failed else []
        if self._mesh.size > 1:
            count = torch.tensor(len(failures), device="cpu")
            dist.all_reduce(count)
            if count.item():
                everyone = exchanged(failures, list[str], "step")
                failures = [f"rank {rank}: {text}" for rank, texts in enumerate(everyone) for text in texts]
        if not failures:
            return None
        fix = "go on from the last checkpoint, with more room or on another path: the state is lost"
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
    assert found is not None, "a leaf that rests on disk"
    return found


def _sectors(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a value, to the end of the last sector."""
    flat = x.new_empty(0, dtype=torch.uint8)
    return flat.set_(x.untyped_storage(), x.storage_offset() * x.element_size(), (padded(x.nbytes),), (1,))  # type: ignore[call-overload]


def _said(error: TierError) -> str:
    """The failure and its place, in one line."""
    what, *where = (line.strip() for line in str(error).splitlines() if not line.startswith("Fix: "))
    return "; ".join((what.removeprefix("fzero.offload: "), *where))


def _lies_well(x: torch.Tensor) -> bool:
    """Whether a value can be written from where it lies."""
    begin = x.storage_offset() * x.element_size()
    return x.is_contiguous() and x.data_ptr() % SECTOR == 0 and begin + padded(x.nbytes) <= x.untyped_storage().nbytes()


def _copied(x: torch.Tensor) -> torch.Tensor:
    out = aligned(padded(x.nbytes))
    out[: x.nbytes].view(x.dtype).copy_(x.reshape(-1))
    return out
