"""Receives the shards of the state that other ranks send (`fz.redundant`) into files next to those of this rank's own
state.

    of-00002/replica-00001.json          what is stored here of rank 1's state, and where in these files it lies
    of-00002/replica-00001.0.safetensors one of two slots: the newest complete state, and the one being received

A step fills one slot while the other stays valid (sealed). fzero/elastic/memory_slots.py describes the format.
Tensors that are replicated along the axis are not sent: each rank stores its own copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fzero.checkpoint.safetensors_format import Entry
from fzero.checkpoint.saving import SavePlan
from fzero.checkpoint.tensor_digests import word_sum
from fzero.elastic.memory_slots import MemorySlots
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf, leaf_of
from fzero.sharding.shard_regions import Boxes
from fzero.transforms.redundant import Redundant

logger = logging.getLogger("fzero")

_SLOTS = 2


class PeerReplica(NamedTuple):
    """The rank whose state this rank receives, as the step defines it: the rank `shift` before this one along the
    axis."""

    spec: Redundant
    shift: int

    def owner(self, mesh: Mesh) -> dict[str, int]:
        """Returns the mesh coordinates of the rank that sends to this one."""
        here, axis = mesh.coordinate, self.spec.axis
        return {**here, axis: (here[axis] - self.shift) % mesh.axes[axis]}


class PeerReplicas:
    """The slots for the state that one other rank sends. Existing slots keep their states up to the step from which the
    run continues.

    Each tensor is received once between two calls of `begin`. If several steps see the same batch, or a batch is
    repeated, the first of these steps starts from the state of that number. Every rank gets the same answers from these
    methods.

    Args:
        directory: of the states that the same number of ranks stored.
        plan: of this rank's state.
        mesh: of all ranks.
        replica: which state is received.
        seen: the number of batches seen by the state from which the run continues.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, directory: Path, plan: SavePlan, mesh: Mesh, replica: PeerReplica, seen: int):
        leaves = {
            name: (tag[0], x)
            for name, x in plan.tensors.items()
            if name not in plan.aliases and (tag := leaf_of(x)) is not None and replica.spec.sends(tag[0])
            if tag[0].is_on(mesh)  # the ranks along the axis belong to the same stage
        }
        owner = replica.owner(mesh)
        boxes = {name: _boxes_of(leaf, mesh, owner) for name, (leaf, _) in leaves.items()}
        self._numel = {leaf.path: boxes[name].numel for name, (leaf, _) in leaves.items()}  # those with checksums
        stem = f"replica-{_index(mesh, tuple(mesh.axes), owner):05d}"
        entries = [Entry(name, x.dtype, tuple(x.shape)) for name, (_, x) in leaves.items()]
        slots = MemorySlots(directory / f"{stem}.json", _SLOTS, entries, plan, boxes, seen)
        self._slots = [{leaf.path: tensors[name] for name, (leaf, _) in leaves.items()} for tensors in slots.tensors]
        self._sealed, self._sums = slots.sealed, slots.sums
        self._seen = seen  # batches seen by the state that the current step starts from
        self._coming: int | None = None  # the slot that the current step fills
        self._come: set[str] = set()  # tensors sent since the current step began
        self._lasting: list[set[str]] = [set() for _ in self._slots]  # by slot: received tensors that no step writes
        self._last: int | None = None  # the slot that was sealed last
        self._speaks = mesh.rank == 0  # False after the warning

    def begin(self, seen: int) -> None:
        """Marks the start of a step. `seen` is the number of batches that the state has consumed."""
        if self._coming is not None and self._speaks:
            self._speaks = False
            fix = "call run.commit(state) after every step; fz.run(every=k) with fz.redundant(every=k) does less"
            what = (
                f"the shards that ranks have sent of the state after {self._seen} batches (fz.redundant) cannot be used"
            )
            logger.warning("fzero.run: %s: neither this state nor the one after it was committed; %s", what, fix)
        self._seen, self._coming, self._come = seen, None, set()

    def places(self, leaves: Sequence[str], every: int = 1, once: bool = False) -> list[torch.Tensor] | None:
        """Returns the memory for these tensors of the state that the current step starts from, or None if they are not
        sent.

        Args:
            leaves: the paths of tensors that are sent together.
            every: one in `every` steps sends them.
            once: whether no step writes them, so that sending them once per slot is enough.
        """
        # Not due in this step, sent in it already, or not stored by this rank.
        if self._seen % every or not self._come.isdisjoint(leaves) or not self._numel.keys() >= {*leaves}:
            return None
        if self._coming is None and not self._come:
            # Never the slot that was sealed last: it has the newest complete state.
            known = range(_SLOTS) if self._last is None else [i for i in range(_SLOTS) if i != self._last]
            self._coming = min(known, key=lambda i: int(self._sealed[i]))
            self._sealed[self._coming].fill_(0)
        if self._coming is None:  # what was received in this step is sealed already
            return None
        if once and self._lasting[self._coming].issuperset(leaves):
            return None
        self._come.update(leaves)
        for slot, lasting in enumerate(self._lasting):
            if not once:
                lasting.difference_update(leaves)
            elif slot == self._coming:
                lasting.update(leaves)
        return [self._slots[self._coming][leaf] for leaf in leaves]

    def seal(self, seen: int) -> None:
        """Marks the state that was being received as complete, and stores its checksums.

        To be called when a step has ended, so that `seen` batches are consumed now, and when the owner has stored
        the state that the step started from.
        """
        slot = self._coming
        # Incomplete, or of another step: the slot stays unsealed, and the one that was sealed before it stays valid.
        if slot is None or self._seen != seen - 1 or not self._come | self._lasting[slot] >= self._numel.keys():
            return
        held = self._slots[slot]
        self._sums[slot].copy_(torch.stack([word_sum(held[leaf][:num]) for leaf, num in self._numel.items()]))
        # Last, as in `MemoryCheckpoint.keep`: it commits the slot.
        self._sealed[slot].fill_(seen)
        self._coming, self._last = None, slot


def _boxes_of(leaf: Leaf, mesh: Mesh, place: dict[str, int]) -> Boxes:
    """Returns the elements of a tensor that the rank at the coordinates `place` holds."""
    return leaf.sharding(mesh).boxes(leaf.shape, _index(mesh, leaf.layout.axes, place))


def _index(mesh: Mesh, axes: Sequence[str], place: dict[str, int]) -> int:
    """Returns the row-major index of the coordinates `place` along axes."""
    index = 0
    for axis in axes:
        index = index * mesh.axes[axis] + place[axis]
    return index
