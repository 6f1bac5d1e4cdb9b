"""Makes the tensors of a program's planned buffers: those in an arena once, separate allocations anew in each run.

A separate allocation (a room) is made by the first op that has a buffer in it, and the last such op drops the reference
to it held here. After that it stays alive as long as a value in it, or a transfer that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero.ir.ops import STARTS
from fzero.ir.program import Instruction, Place, Program
from fzero.mesh import Mesh

Tensors = list[torch.Tensor | None]
"""A tensor for each planned buffer of an op."""


def places_of(program: Program, mesh: Mesh, arenas: Mapping[str, torch.Tensor]) -> Sequence[Tensors]:
    """Returns the buffers of each op in `Program.pooled`, by the index of the op."""
    if any(place is not None and place.arena == "apart" for op in program.pooled for place in op.into):
        return _Rooms(program.pooled, mesh, arenas)
    return [_tensors(op, mesh, arenas, {}) for op in program.pooled]


class _Rooms(Sequence[Tensors]):
    """The buffers of ops if some of them are in separate allocations. Looking up an op is part of running it, because
    the lookup allocates and frees."""

    def __init__(self, ops: Sequence[Instruction], mesh: Mesh, arenas: Mapping[str, torch.Tensor]):
        self._ops, self._mesh, self._arenas = ops, mesh, arenas
        self._sizes: dict[int, int] = {}
        self._first: dict[int, list[int]] = {}  # the allocations that an op makes
        last: dict[int, int] = {}
        for i, op in enumerate(ops):
            for place in op.into:
                if place is not None and place.arena == "apart":
                    # A buffer that is this rank's part of a gathered value lies at an offset that depends on the rank.
                    # The allocation holds the parts of all ranks.
                    end = place.offset + place.nbytes * (mesh.axis_size(place.part) if place.part else 1)
                    if place.room not in self._sizes:
                        self._first.setdefault(i, []).append(place.room)
                    self._sizes[place.room] = max(self._sizes.get(place.room, 0), end)
                    last[place.room] = i
        self._last: dict[int, list[int]] = {}  # the allocations in which an op is the last one to have a buffer
        for room, i in last.items():
            self._last.setdefault(i, []).append(room)
        self._rooms: dict[int, torch.Tensor] = {}
        apart = {i for i, op in enumerate(ops) if any(p is not None and p.arena == "apart" for p in op.into)}
        self._known: list[Tensors | None] = [
            None if i in apart else _tensors(op, mesh, arenas, {}) for i, op in enumerate(ops)
        ]

    def __len__(self) -> int:
        return len(self._ops)

    def __getitem__(self, number: int) -> Tensors:  # type: ignore[override]
        known = self._known[number]
        if known is not None:
            return known
        for room in self._first.get(number, ()):
            self._rooms[room] = torch.empty(self._sizes[room], dtype=torch.uint8, device=self._mesh.device)
        found = _tensors(self._ops[number], self._mesh, self._arenas, self._rooms)
        for room in self._last.get(number, ()):
            # `found` still has views of this memory. It is freed when the op's values, and transfers that read them,
            # are gone.
            del self._rooms[room]
        return found


def _tensors(
    op: Instruction, mesh: Mesh, arenas: Mapping[str, torch.Tensor], rooms: Mapping[int, torch.Tensor]
) -> Tensors:
    """Returns the buffers of an op as tensors: flat for the start of a transfer, and in the shapes of its results for
    any other op."""
    flats: Tensors = [
        None
        if place is None
        else _flat(place, mesh, rooms[place.room] if place.arena == "apart" else arenas[place.arena])
        for place in op.into
    ]
    if op.op in STARTS:
        return flats
    return [
        None if flat is None else flat.view(value.local_shape(mesh)) for flat, value in zip(flats, op.out, strict=True)
    ]


def _flat(place: Place, mesh: Mesh, memory: torch.Tensor) -> torch.Tensor:
    offset = place.offset + (mesh.index(place.part) * place.nbytes if place.part else 0)
    return memory[offset : offset + place.nbytes].view(place.dtype)
