"""Collects the allocations of an arena and assigns an offset to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fzero._utils.host_memory import SECTOR, host_offsets, padded
from fzero.compiler.packing import Item, pack
from fzero.ir.liveness import Interval
from fzero.ir.program import Place, Value

ALIGNMENT = 64  # bytes: a cache line, and the alignment of vector instructions


@dataclass(eq=False)
class Region:
    """One allocation: bytes with common live ranges.

    Attributes:
        nbytes: its size.
        times: its live ranges, in indices of ops.
        offset: its offset in the arena.
        arena: "device" or "host".
        align: the alignment of the offset.
        first: the index of the first op that writes it.
        kind: the kind of the ops that write it.
        fixed: whether it must be in the arena.
        room: its number, if it is allocated separately from the arena.
    """

    nbytes: int = 0
    times: list[Interval] = field(default_factory=list)
    offset: int = 0
    arena: str = "device"
    align: int = ALIGNMENT
    first: int | None = None  # the index of the first op that writes it
    kind: str = ""
    fixed: bool = False
    room: int | None = None

    @property
    def item(self) -> Item:
        return Item(self.nbytes, tuple(self.times), self.align)

    def add(self, numel: int, value: Value, align: int = ALIGNMENT) -> RegionSlot:
        self.nbytes = -(-self.nbytes // align) * align
        slot = RegionSlot(self, self.nbytes, numel, value)
        self.nbytes += numel * value.dtype.itemsize
        return slot

    def add_leaves(self, numels: Mapping[Value, int]) -> list[RegionSlot]:
        """Returns slots that are laid out like state in host memory: at whole sectors, in which a disk reads and
        writes, and such that no two of them occupy the same cache sets."""
        *offsets, self.nbytes = host_offsets([n * value.dtype.itemsize for value, n in numels.items()])
        self.align, self.nbytes = SECTOR, padded(self.nbytes)
        return [RegionSlot(self, at, n, value) for at, (value, n) in zip(offsets, numels.items(), strict=True)]

    def written(self, number: int) -> None:
        self.first = number if self.first is None else min(self.first, number)


@dataclass(frozen=True, eq=False)
class RegionSlot:
    """A 1-D buffer for a value in an allocation: `numel` elements, including padding."""

    region: Region
    at: int
    numel: int
    value: Value

    def place(self, numel: int | None = None, part: tuple[str, ...] = ()) -> Place:
        return Place(
            self.region.offset + self.at,
            self.numel if numel is None else numel,
            self.value.dtype,
            part,
            self.region.arena if self.region.room is None else "apart",
            self.region.room or 0,
        )


def assign(regions: Sequence[Region]) -> int:
    """Assigns offsets to the allocations of one arena, and returns the arena's size in bytes."""
    regions = [r for r in regions if r.nbytes]
    packing = pack([r.item for r in regions])
    for region, offset in zip(regions, packing.offsets, strict=True):
        region.offset = offset
    return packing.nbytes
