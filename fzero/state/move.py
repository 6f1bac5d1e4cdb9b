"""Moves a state to another memory tier and back, between phases of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.comm import control_group
from fzero.errors import FzeroValueError
from fzero.mesh import Mesh
from fzero.sharding.layout import Home, Leaf, extent_of, home_of, in_slot, leaf_of, leave, place, ties
from fzero.state import tensor_storage
from fzero.transforms.offload import TIERS

HOME = "home"


def move(state: Any, tier: str, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None) -> Any:
    """Moves a state to another memory tier, to make room for an evaluation or another model, and back.

    The values are the same, bit for bit. A step does not run on a state that is stored on another tier than the step
    expects: move it home first. Checkpoints are saved from any tier, and `gather` works on any tier.

    Args:
        state: a State that `init` or `restore` made, or any part of one. It is donated: its tensors are released as
            they are moved, including those that stay where they are.
        tier: "cpu" (host memory), "nvme" (files), "device", or "home": each leaf back to the tier where its step keeps
            it.
        path: for "nvme" a directory, or several over which the leaves are striped. Leaves that a step keeps on disk go
            back to their original location there.

    Communication: none between ranks except a few bytes. Each leaf moves once over the link or to the
    disk. On a mesh whose device is the CPU, host and device are one memory, and nothing is copied between the two.
    Memory: the new storage, the old storage of each leaf until the leaf has been moved, and two buffers of 16 MiB if a
    disk is involved.

    Raises:
        FzeroValueError: an unknown tier; a path without "nvme", or "nvme" without a path; leaves that no step made; a
            path that is missing, not writable or too small, with the numbers, before anything is moved.
        TierError: an I/O error during the move: the state is lost.
        BusyError: another thread is using the mesh.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1))
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> state = move(train.init({"w": torch.ones(2)}), "cpu")
        >>> state, metrics = train(move(state, "home"), torch.ones(4, 2))
        >>> metrics["loss"]
        tensor(2.)
    """
    flat, structure = tree.flatten(state)
    tied = ties(flat)
    distinct = [i for i, t in enumerate(tied) if i == t]
    _check(state, flat, tier, path)
    moves = [_Move.of(flat[i], tier) for i in distinct]
    if tier == "nvme" and path is None and any(m.new for m in moves):
        raise FzeroValueError("move", "'nvme' needs a directory", fix="e.g. fz.move(state, 'nvme', path='/scratch')")
    if not moves:
        return state
    mesh = moves[0].mesh

    def run() -> dict[int, torch.Tensor]:
        return {i: m.run(flat[i], next(places) if m.new else None) for i, m in zip(distinct, moves, strict=True)}

    with mesh.alone("move"):
        # One allocation for all leaves, and before any of them is moved: if there is too little space, the state is
        # unchanged.
        places = iter(tensor_storage.allocate([m.to for m in moves if m.new], mesh, path or (), "move"))
        moved = (
            control_group.run_on_all_ranks(mesh.control, "move", run)
            if any("disk" in (m.leaf.layout.tier, m.to.layout.tier) for m in moves)
            else run()
        )
    return tree.unflatten(structure, [moved[t] for t in tied])


@dataclass(frozen=True)
class _Move:
    """The move of one leaf.

    Attributes:
        leaf: the leaf as it is stored now.
        to: the leaf as it will be stored.
        home: where the step keeps the leaf.
    """

    leaf: Leaf
    to: Leaf
    mesh: Mesh
    home: Home

    @staticmethod
    def of(tensor: torch.Tensor, tier: str) -> _Move:
        known, home = leaf_of(tensor), home_of(tensor)
        assert known is not None
        leaf, mesh = known
        to = leaf.layout.tier if _stays(leaf) else home.tier if tier == HOME else TIERS.get(tier, "device")
        return _Move(leaf, leaf.with_layout(tier=to), mesh, home)

    @property
    def stays(self) -> bool:
        """Whether the bytes of the leaf stay where they are."""
        here, there = self.leaf.layout.tier, self.to.layout.tier
        # With one memory, the tier is only a label, and the next step checks the label.
        return here == there or (self.mesh.unified_memory and "disk" not in (here, there))

    @property
    def new(self) -> bool:
        """Whether the leaf needs new storage off the device."""
        there = self.to.layout.tier
        return not self.stays and (there == "host" or (there == "disk" and self.home.extent is None))

    def run(self, old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
        """Returns the leaf in its new storage. The old tensor is released."""
        extent, there = None, self.to.layout.tier
        if self.stays:
            new, extent = old.detach(), extent_of(old)
        else:
            if there == "device":
                new = torch.empty(old.shape, dtype=old.dtype, device=self.mesh.device)
            elif new is None:  # back to its original extent on disk
                new = place(
                    torch.empty(old.shape, dtype=old.dtype, device="meta"), self.to, self.mesh, self.home.extent
                )
            tensor_storage.copy(old, new)
        place(new, self.to, self.mesh, extent, None if there == self.home.tier else self.home)
        # Each old tensor is released as soon as its leaf has been moved, so that not all leaves exist twice at the end.
        leave(old)
        return new


def _stays(leaf: Leaf) -> bool:
    """Whether `move` leaves a leaf where it is: the step, the key, slots that are scalars or vectors, and gradient
    buffers on disk, which are empty between steps."""
    return leaf.role in ("step", "key", "gradients") or (in_slot(leaf) and len(leaf.shape) < 2)


def _check(state: Any, flat: list[Any], tier: str, path: Any) -> None:
    known = (*TIERS, "device", HOME)
    problems = [] if tier in known else [f"tier={tier!r}: not one of {', '.join(map(repr, known))}"]
    if path is not None and tier != "nvme":
        problems.append(f"path={path!r}: only 'nvme' has one")
    for name, x in zip(tree.paths(state, "state"), flat, strict=True):
        if not isinstance(x, torch.Tensor) or leaf_of(x) is None:
            problems.append(f"{name}: {tree.describe(x)} that was not made by a compiled step")
    if problems:
        raise FzeroValueError(
            "move", "cannot move this state", problems, "move a state that train.init, train.restore or a step returned"
        )
