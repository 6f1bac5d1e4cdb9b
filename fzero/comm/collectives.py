"""Collectives as a start and a wait. The only file that names torch.ops._c10d_functional.

Every start returns at once with a `Moving`; its wait hands back the values. All tensors of one start travel as one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fzero.mesh import Mesh

C = torch.ops._c10d_functional
_SMALL = 1 << 16  # elements: below this, copying into one tensor is cheaper than a transfer each


@dataclass(frozen=True)
class Moving:
    """A transfer under way. `keep` holds what it still reads."""

    tensors: Sequence[torch.Tensor]
    finish: Callable[[list[torch.Tensor], Any], Sequence[torch.Tensor]]
    keep: Any = None


def all_gather_start(mesh: Mesh, shards: Sequence[torch.Tensor], axis: str) -> Moving:
    """Gathers flat shards. The whole leaves are views of the gathered buffers: nothing is copied out."""
    out = _by_dtype(shards, lambda same: C.all_gather_into_tensor_coalesced(same, mesh.axes[axis], _group(mesh, axis)))
    return Moving(out, lambda done, shapes: [t[: math.prod(s)].view(s) for t, s in zip(done, shapes, strict=True)], shards)


def reduce_scatter_start(mesh: Mesh, wholes: Sequence[torch.Tensor], axis: str, op: str) -> Moving:
    """Reduces whole values and leaves each rank its flat shard."""
    size = mesh.axes[axis]
    flat = [F.pad(t.reshape(-1), (0, -t.numel() % size)) if t.numel() % size else t.reshape(-1) for t in wholes]
    out = _by_dtype(flat, lambda same: C.reduce_scatter_tensor_coalesced(same, op, size, _group(mesh, axis)))
    return Moving(out, lambda done, _: done, flat)


def all_reduce_start(mesh: Mesh, values: Sequence[torch.Tensor], axis: str, op: str) -> Moving:
    """Reduces values of which every rank has one. Small ones of one dtype travel in one tensor."""
    group = _group(mesh, axis)
    sizes, shapes = [v.numel() for v in values], [v.shape for v in values]
    if len({v.dtype for v in values}) == 1 and sum(sizes) <= _SMALL:
        packed = torch.cat([v.reshape(-1) for v in values])
        return Moving([C.all_reduce(packed, op, group)], lambda done, _: [x.view(s) for x, s in zip(done[0].split(sizes), shapes, strict=True)], packed)
    dense = [v.contiguous() for v in values]
    return Moving(_by_dtype(dense, lambda same: C.all_reduce_coalesced(same, op, group)), lambda done, _: done, dense)


def wait(moving: Moving, shapes: Any = None) -> Sequence[torch.Tensor]:
    """The values of a transfer, once they are there."""
    return moving.finish([C.wait_tensor(t) for t in moving.tensors], shapes)


def _by_dtype(tensors: Sequence[torch.Tensor], start: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What `start` makes of the tensors, each dtype apart: a coalesced transfer reads all of its tensors as the dtype of the first."""
    out: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        out.update(zip(places, start([tensors[i] for i in places]), strict=True))
    return [out[i] for i in range(len(tensors))]


def _group(mesh: Mesh, axis: str) -> str:
    return mesh.group(axis).group_name
