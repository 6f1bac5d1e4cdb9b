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

import torch

from fzero.checkpoint.safetensors_format import Entry
from fzero.checkpoint.saving import SavePlan
from fzero.checkpoint.tensor_digests import word_sum
from fzero.elastic.memory_slots import MemorySlots
from fzero.mesh import Mesh
from fzero.sharding.layout import leaf_of
from fzero.transforms.redundant import Redundant

logger = logging.getLogger("fzero")

_SLOTS = 2


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
        redundant: how ranks send their states: this one receives from the rank `shift` before it along the axis.
        seen: the number of batches seen by the state from which the run continues.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, directory: Path, plan: SavePlan, mesh: Mesh, redundant: Redundant, seen: int):
        leaves = {
            name: (tag[0], x)
            for name, x in plan.tensors.items()
            if name not in plan.aliases and (tag := leaf_of(x)) is not None and redundant.sends(tag[0])
            if tag[0].is_on(mesh)  # the ranks along the axis belong to the same stage
        }
        axis, here = redundant.axis, mesh.coordinate
        there = {**here, axis: (here[axis] - redundant.shift(mesh)) % mesh.axes[axis]}
        # The mesh as the rank that sends to this one has it.
        ranks = (Mesh(mesh.axes, rank, torch.device("cpu")) for rank in range(mesh.size))
        owner = next(one for one in ranks if one.coordinate == there)
        boxes = {name: leaf.boxes(owner) for name, (leaf, _) in leaves.items()}
        self._numel = {leaf.path: boxes[name].numel for name, (leaf, _) in leaves.items()}  # those with checksums
        entries = [Entry(name, x.dtype, tuple(x.shape)) for name, (_, x) in leaves.items()]
        path = directory / f"replica-{owner.rank:05d}.json"
        self._slots = MemorySlots(path, _SLOTS, entries, plan, boxes, seen)
        self._names = {leaf.path: name for name, (leaf, _) in leaves.items()}
        self._seen = seen  # batches seen by the state that the current step starts from
        self._coming: int | None = None  # the slot that the current step fills
        self._come: set[str] = set()  # tensors sent since the current step began
        self._lasting: list[set[str]] = [set() for _ in range(_SLOTS)]  # by slot: received tensors that no step writes
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
            self._coming = min(known, key=lambda i: int(self._slots.sealed[i]))
            self._slots.open(self._coming)
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
        return [self._slots.tensors[self._coming][self._names[leaf]] for leaf in leaves]

    def seal(self, seen: int) -> None:
        """Marks the state that was being received as complete, and stores its checksums.

        To be called when a step has ended, so that `seen` batches are consumed now, and when the owner has stored
        the state that the step started from.
        """
        slot = self._coming
        # Incomplete, or of another step: the slot stays unsealed, and the one that was sealed before it stays valid.
        if slot is None or self._seen != seen - 1 or not self._come | self._lasting[slot] >= self._numel.keys():
            return
        held = self._slots.tensors[slot]
        sums = [word_sum(held[self._names[leaf]][:num]) for leaf, num in self._numel.items()]
        self._slots.seal(slot, seen - 1, sums)
        self._coming, self._last = None, slot
