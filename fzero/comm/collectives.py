"""Runs collectives through process groups, gloo and NCCL: each is a start, which returns at once, and a wait.

Everything happens in the buffers a program planned (see [Note: pool] in program/ir.py): a start copies what does not
lie there already, the collective works from and to them, and a wait hands out views. On CUDA gathers have process
groups of their own, for one NCCL communicator is one stream and would run them behind the reductions.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fzero import compat
from fzero.comm.host import host_pool
from fzero.mesh import Mesh

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Moving:
    """A transfer under way: what to wait for, and the flats it fills."""

    works: Sequence[Any]
    filled: Sequence[torch.Tensor]


class ProcessGroups:
    """The transport of a mesh over torch.distributed."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._names: list[str] = []  # of the programs, in the order of their pools

    def pool(self, nbytes: int, name: str = "") -> torch.Tensor:
        """Memory for a program's transfers, on the CPU at a page. Every rank calls this for the same programs in the
        same order."""
        on_cpu = self._mesh.device.type == "cpu"
        found = (
            host_pool(nbytes, self._mesh)
            if on_cpu
            else torch.zeros(nbytes, dtype=torch.uint8, device=self._mesh.device)
        )
        found._fzero_number = len(self._names)  # type: ignore[attr-defined]
        self._names.append(name)
        return found

    def begin(self, pool: torch.Tensor) -> None:
        """Called before a program runs."""
        if self._mesh.size > 1:
            number = pool._fzero_number  # type: ignore[attr-defined]
            self._mesh.turns.begin(f"program {number}", f"runs {self._names[number]}, program {number}", say=False)

    def all_gather_start(self, shards: Sequence[torch.Tensor], axis: str, into: Sequence[torch.Tensor]) -> Moving:
        group = self._mesh.group(axis, gathers=True)
        with compat.coalesced(group, self._mesh.device) as works:
            for shard, whole in zip(shards, into, strict=True):
                works.append(compat.all_gather(whole, shard, group))
        return Moving(works, into)

    def reduce_scatter_start(
        self, wholes: Sequence[torch.Tensor], axis: str, op: str, into: Sequence[torch.Tensor]
    ) -> Moving:
        group, flats, shards = self._mesh.group(axis), into[: len(wholes)], into[len(wholes) :]
        settle(wholes, flats)
        with compat.coalesced(group, self._mesh.device) as works:
            for flat, shard in zip(flats, shards, strict=True):
                works.append(compat.reduce_scatter(shard, flat, _OPS[op], group))
        return Moving(works, shards)

    def all_reduce_start(
        self, values: Sequence[torch.Tensor], axis: str, op: str, into: Sequence[torch.Tensor]
    ) -> Moving:
        group = self._mesh.group(axis)
        settle(values, into)
        with compat.coalesced(group, self._mesh.device) as works:
            for flat in merged(into):
                works.append(dist.all_reduce(flat, _OPS[op], group, async_op=True))
        return Moving(works, into)

    def wait(self, moving: Moving, into: Sequence[torch.Tensor], together: bool = False) -> Sequence[torch.Tensor]:
        """The values of a transfer, once they are there; then nothing of it is being read anywhere, `together` or
        not."""
        for work in moving.works:
            if work is not None:
                self._finish(work)
        for flat, value in zip(moving.filled, into, strict=True):
            if flat.data_ptr() != value.data_ptr():  # sums that do not lie where the summands did
                value.copy_(flat.view(value.shape))
        return into

    def _finish(self, work: Any) -> None:
        """Waits for a collective: on the CPU, where that holds the host, with an eye on where the other ranks are."""
        while self._mesh.device.type == "cpu":
            try:
                work.wait(datetime.timedelta(seconds=self._mesh.turns.pause))
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or was done this very moment
                    break
            self._mesh.turns.look("step")
        work.wait()


def settle(values: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
    """Puts values where they are reduced, those that were not made there, and zeros behind them."""
    for value, flat in zip(values, flats, strict=True):
        numel = value.numel()
        if value.data_ptr() != flat.data_ptr():
            flat[:numel].copy_(value.reshape(-1))
        if flat.numel() > numel:
            flat[numel:].zero_()


def merged(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flats that lie one behind the other, as one. Empty ones, which lie nowhere, are left out."""
    out: list[torch.Tensor] = []
    for flat in (f for f in flats if f.numel()):
        last = out[-1] if out else None
        if last is not None and last.dtype == flat.dtype and last.data_ptr() + last.nbytes == flat.data_ptr():
            out[-1] = last.as_strided((last.numel() + flat.numel(),), (1,))
        else:
            out.append(flat)
    return out


def gather(mesh: Mesh, shard: torch.Tensor, axis: str, into: torch.Tensor | None = None) -> torch.Tensor:
    """The flat whole of which every rank along an axis has a shard, or `into` with it; outside any program."""
    whole = into
    if whole is None:
        whole = torch.empty(shard.numel() * mesh.axes[axis], dtype=shard.dtype, device=shard.device)
    compat.all_gather(whole, shard, mesh.group(axis)).wait()
    return whole
