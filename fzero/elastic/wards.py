"""Receives what other ranks send of their state (`fz.redundant`), in files beside those that this rank keeps.

    of-00002/ward-00001.json             what lies here of rank 1's, and where in these files it lies
    of-00002/ward-00001.0.safetensors    two slots: the newest state that came whole, and the one that is coming
    of-00004/parity-00002.*              the exclusive or of what the others of rank 2's group have sent to it

A step fills one slot while the other stays sealed (fzero/elastic/vault.py has the form). Leaves that the ranks along
the axis have in common are not sent: each of them keeps its own.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.boxes import Boxes
from fzero.checkpoint import format
from fzero.checkpoint.index import Index, Part, to_json
from fzero.checkpoint.saving import Plan
from fzero.comm.replicas import word_sum
from fzero.layout import Leaf, leaf_of
from fzero.mesh import Mesh
from fzero.routes import Route
from fzero.transforms.redundant import Redundant

logger = logging.getLogger("fzero")

SEALED = "sealed"
"""The tensor of a slot that is one more than the number of batches that its state has seen, 0 while it is written."""
SUMS = "sums"
"""The tensor of a slot that has the sum of each leaf's words, in the order of the note."""
_SLOTS = 2


class Ward(NamedTuple):
    """The source of what a rank receives, as the step says: of the rank so many before it along the axis, or of the
    others of its group."""

    spec: Redundant
    route: Route

    def owner(self, mesh: Mesh, at: int | None = None) -> dict[str, int]:
        """The place on the mesh of the rank that sends to this one, or that stands so far along the axis."""
        here, axis = mesh.coordinate, self.spec.axis
        at = (here[axis] - self.route.shift) % self.route.size if at is None else at
        return {**here, axis: at}

    def rank_of_owner(self, mesh: Mesh) -> int:
        """The rank that sends to this one."""
        return _index(mesh, tuple(mesh.axes), self.owner(mesh))

    def made(self, directory: Path, plan: Plan, mesh: Mesh, seen: int) -> Wards:
        """The slots for what comes, as `Wards` has its arguments."""
        if not self.route.group:
            return Wards(directory, plan, mesh, self, seen)
        for path in directory.glob("ward-*"):  # made again from parity, and read meanwhile
            path.unlink(missing_ok=True)
        return Parity(directory, plan, mesh, self, seen)


class Wards:
    """The slots for what one other rank sends. Those that are there keep what they hold, but for what was later than
    the state that the run goes on from.

    Between two calls of `begin` each leaf comes once: of a batch that several steps see, or one that is done again, the
    first starts from the state of that number. What is asked here is answered alike on every rank.

    Args:
        directory: of the states that as many ranks kept.
        plan: of this rank's state.
        mesh: of all ranks.
        ward: what comes.
        seen: of the state that the run goes on from.

    Attributes:
        names: of the leaves that are sent.
        files: of the slots.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, directory: Path, plan: Plan, mesh: Mesh, ward: Ward, seen: int):
        leaves = {
            name: (tag[0], x)
            for name, x in plan.tensors.items()
            if name not in plan.aliases and (tag := leaf_of(x)) is not None and ward.spec.sends(tag[0])
        }
        self.names = list(leaves)
        stem, entries, note = self._form(leaves, plan, mesh, ward)
        entries += [format.Entry(SEALED, torch.int64, (1,)), format.Entry(SUMS, torch.int64, (len(leaves),))]
        slots = [format.reserve(directory / f"{stem}.{i}.safetensors", entries) for i in range(_SLOTS)]
        note(directory / f"{stem}.json", slots)
        self.files = Files(slots, directory / f"{stem}.json")
        self._slots = [{leaf.path: slot.tensors[name] for name, (leaf, _) in leaves.items()} for slot in slots]
        self._sealed, self._sums = ([s.tensors[name] for s in slots] for name in (SEALED, SUMS))
        for sealed in self._sealed:
            if int(sealed) > seen + 1:
                sealed.fill_(0)
        self._seen = seen  # of the state that the step under way starts from
        self._coming: int | None = None  # the slot that it fills
        self._come: set[str] = set()  # leaves that were sent since it began
        self._lasting: list[set[str]] = [set() for _ in slots]  # by slot, leaves that no step writes, which have come
        self._last: int | None = None  # the slot that was sealed last
        self._speaks = mesh.rank == 0  # until it has warned

    def _form(
        self, leaves: Mapping[str, tuple[Leaf, torch.Tensor]], plan: Plan, mesh: Mesh, ward: Ward
    ) -> tuple[str, list[format.Entry], Callable[[Path, Sequence[format.Reserved]], None]]:
        """The stem of the files' names, their tensors, and what writes their note."""
        owner = ward.owner(mesh)
        boxes = {name: _boxes_of(leaf, mesh, owner) for name, (leaf, _) in leaves.items()}
        self._numel = {leaf.path: boxes[name].numel for name, (leaf, _) in leaves.items()}  # of which there are sums
        stem = f"ward-{_index(mesh, tuple(mesh.axes), owner):05d}"
        entries = [format.Entry(name, x.dtype, tuple(x.shape)) for name, (_, x) in leaves.items()]
        return stem, entries, lambda path, slots: write_note(path, plan, boxes, slots)

    def begin(self, seen: int) -> None:
        """Says that a step begins from the state that has seen so many batches."""
        if self._coming is not None and self._speaks:
            self._speaks = False
            fix = "call run.keep(state) after every step; fz.run(every=k) with fz.redundant(every=k) does less"
            what = f"what ranks have sent of the state after {self._seen} batches (fz.redundant) is of no use"
            logger.warning("fzero.run: %s: it was not kept, or the state after it; %s", what, fix)
        self._seen, self._coming, self._come = seen, None, set()

    def places(self, leaves: Sequence[str], every: int = 1, once: bool = False) -> list[torch.Tensor] | None:
        """The memory for these leaves, by their paths, of the state that the step under way starts from; None: they are
        not sent.

        Args:
            leaves: that are sent together.
            every: of so many steps one sends.
            once: no step writes them.
        """
        if self._seen % every or not self._come.isdisjoint(leaves) or not self._numel.keys() >= {*leaves}:
            return None
        if self._coming is None and not self._come:
            known = range(_SLOTS) if self._last is None else [i for i in range(_SLOTS) if i != self._last]
            self._coming = min(known, key=lambda i: int(self._sealed[i]))
            self._sealed[self._coming].fill_(0)
        if self._coming is None:  # what has come of this step is sealed
            return None
        if once and self._lasting[self._coming].issuperset(leaves):
            return None
        self._come.update(leaves)
        for slot, lasting in enumerate(self._lasting):
            if not once:
                lasting.difference_update(leaves)
            elif slot == self._coming:
                lasting.update(leaves)
        return self._room(leaves)

    def _room(self, leaves: Sequence[str]) -> list[torch.Tensor]:
        assert self._coming is not None
        held = self._slots[self._coming]
        return [held[leaf] for leaf in leaves]

    def come(self, leaves: Sequence[str], places: Sequence[torch.Tensor]) -> None:
        """Says that these leaves are in the places that were given for them."""

    def seal(self, seen: int) -> None:
        """Says that what was coming has come, with the sums of its words: a step has ended, so many batches are seen
        now, and its owner has kept the state that it started from."""
        slot = self._coming
        if slot is None or self._seen != seen - 1 or not self._come | self._lasting[slot] >= self._numel.keys():
            return
        held = self._slots[slot]
        self._sums[slot].copy_(torch.stack([word_sum(held[leaf][:num]) for leaf, num in self._numel.items()]))
        self._sealed[slot].fill_(seen)
        self._coming, self._last = None, slot

    def sums(self, seen: int) -> dict[str, int] | None:
        """The sums of the words of each leaf that its owner kept of the state after so many batches, as they have come;
        None: they have not."""
        slot = self._of(seen)
        return None if slot is None else dict(zip(self.names, self._sums[slot].tolist(), strict=True))

    def unseal(self, seen: int) -> None:
        """Lets go of what has come of a state."""
        if (slot := self._of(seen)) is not None:
            self._sealed[slot].fill_(0)
            self._last = None if slot == self._last else self._last

    def _of(self, seen: int) -> int | None:
        return next((i for i, sealed in enumerate(self._sealed) if int(sealed) == seen + 1), None)


class Parity(Wards):
    """The slots for the parity of a group: of each leaf the exclusive or of what each of the others sends to this rank,
    without its padding. The note has of every leaf, by rank, which elements that rank holds."""

    def _form(
        self, leaves: Mapping[str, tuple[Leaf, torch.Tensor]], plan: Plan, mesh: Mesh, ward: Ward
    ) -> tuple[str, list[format.Entry], Callable[[Path, Sequence[format.Reserved]], None]]:
        route, here = ward.route, mesh.coordinate[ward.spec.axis]
        members = {at: ward.owner(mesh, at) for at in route.members(here)}
        ranks = {at: _index(mesh, tuple(mesh.axes), place) for at, place in members.items()}
        sizes = {name: x.numel() * x.dtype.itemsize for name, (_, x) in leaves.items()}
        boxes = {
            name: {at: _boxes_of(leaf, mesh, place) for at, place in members.items()}
            for name, (leaf, _) in leaves.items()
        }
        self._numel = {leaf.path: route.piece(sizes[name]) for name, (leaf, _) in leaves.items()}
        # by leaf the bytes that come from each other rank, in their order: how many, and how many of these count
        self._comes = {
            leaf.path: [
                (end - begin, max(0, min(end, boxes[name][at].numel * x.dtype.itemsize) - begin))
                for at in route.members(here)
                if at != here
                for begin, end in [route.shares(at, sizes[name])[here]]
            ]
            for name, (leaf, x) in leaves.items()
        }
        entries = [format.Entry(name, torch.uint8, (route.piece(nbytes),)) for name, nbytes in sizes.items()]

        forms: dict[str, Any] = {}

        def note(path: Path, slots: Sequence[format.Reserved]) -> None:
            for mate in members:
                parts = {name: (boxes[name][mate],) for name in boxes}
                whole = {n: tuple(Part("", n, b, 0) for b in parts.get(n, ()) if b.numel) for n in plan.parts}
                form = to_json(0, plan.leaves, whole, plan.aliases, plan.skeleton, {}, {})
                forms[str(ranks[mate])] = {**form, "chunk": format.CHUNK, "sha256": ""}
            offsets = slots[0].offsets
            content: dict[str, Any] = {"route": list(route), "here": here}
            content |= {"members": {str(rank): at for at, rank in ranks.items()}}
            content |= {"of": forms, "sent": sizes, "sealed": offsets[SEALED], "bytes": slots[0].bytes}
            content |= {"slots": len(slots), "offsets": {n: offsets[n] for n in sizes}}
            content |= {"sums": offsets[SUMS], "summed": {n: route.piece(b) for n, b in sizes.items()}}
            _write(path, json.dumps(content))

        return f"parity-{mesh.rank:05d}", entries, note

    def _room(self, leaves: Sequence[str]) -> list[torch.Tensor]:
        sizes = [sum(nbytes for nbytes, _ in self._comes[leaf]) for leaf in leaves]
        return [torch.empty(n, dtype=torch.uint8, device="cpu") for n in sizes]

    def sums(self, seen: int) -> None:
        """None: what has come is nobody's alone."""

    def come(self, leaves: Sequence[str], places: Sequence[torch.Tensor]) -> None:
        assert self._coming is not None
        for leaf, come in zip(leaves, places, strict=True):
            held = self._slots[self._coming][leaf].zero_()
            at = 0
            for nbytes, count in self._comes[leaf]:
                held[:count].bitwise_xor_(come[at : at + count])
                at += nbytes


class Files:
    """The files of some slots and their note, which somebody may remove: a cleaner, or logind at the user's logout."""

    def __init__(self, slots: Sequence[format.Reserved], note: Path):
        self._slots, self._note, self._text = list(slots), note, note.read_text()

    def are_there(self) -> bool:
        return self._note.exists() and all(format.inode_of(s.path) == s.inode for s in self._slots)

    def put_back(self) -> None:
        """Makes anew what is not there, with the same content.

        Raises:
            OSError: there is not enough memory.
        """
        for i, slot in enumerate(self._slots):
            self._slots[i] = slot.put_back()
        _write(self._note, self._text)


def write_note(path: Path, plan: Plan | Index, boxes: Any, slots: Sequence[format.Reserved]) -> None:
    """Says in a file of JSON what slots hold, of a state of this plan: these elements of each leaf."""
    offsets = slots[0].offsets
    parts = {n: [Part("", n, boxes[n], offsets[n])] if n in boxes and boxes[n].numel else [] for n in plan.parts}
    content = to_json(0, plan.leaves, parts, plan.aliases, plan.skeleton, {}, {})
    content |= {"chunk": format.CHUNK, "sha256": "", "bytes": slots[0].bytes}
    content |= {"sealed": offsets[SEALED], "slots": len(slots)}
    if SUMS in offsets:
        content |= {"sums": offsets[SUMS], "summed": list(boxes)}
    _write(path, json.dumps(content))


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:  # for which there may be no room any more
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)


def _boxes_of(leaf: Leaf, mesh: Mesh, place: dict[str, int]) -> Boxes:
    """The elements of a leaf that the rank at a place holds."""
    return leaf.cut(mesh).boxes(leaf.shape, _index(mesh, leaf.layout.axes, place))


def _index(mesh: Mesh, axes: Sequence[str], place: dict[str, int]) -> int:
    """The index of a place row-major along axes."""
    index = 0
    for axis in axes:
        index = index * mesh.axes[axis] + place[axis]
    return index
