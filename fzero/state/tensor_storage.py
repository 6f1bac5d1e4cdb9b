"""Allocates the tensors of a state on their memory tiers (host memory or files), and writes them there.

A leaf that is stored on the device is simply the tensor that was made. The storage of every other leaf is allocated
first (`allocate`), and its value is then written into it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero._utils.host_memory import host_tensors
from fzero._utils.progress import moved
from fzero._utils.units import exact_size, size
from fzero.checkpoint.safetensors_format import as_bytes
from fzero.comm import control_group
from fzero.compiler.combined_transforms import offloads
from fzero.compiler.state_layouts import leaves_made_anew, mirrors
from fzero.compiler.state_slots import slots_of
from fzero.errors import BudgetError, FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.ir.ops import written_aside
from fzero.ir.program import Program
from fzero.memory import disk
from fzero.memory.disk import BUFFER
from fzero.mesh import Mesh
from fzero.sharding.layout import Extent, Leaf, extent_of, leaf_of, place, set_extent
from fzero.step import State, Step
from fzero.transforms.offload import paths_of

logger = logging.getLogger("fzero")

Places = Mapping[str, torch.Tensor]
"""By path, the tensor that represents each leaf off the device in a state."""


def travelling(params: Inputs, opt_state: Inputs) -> list[Leaf]:
    """Returns the leaves of a state in the order in which a step needs them: each parameter, followed by the optimizer
    state that mirrors it."""
    following: dict[int | None, list[Leaf]] = {}
    for leaf, i in zip(opt_state.leaves, mirrors(opt_state.leaves, params), strict=True):
        following.setdefault(None if i is None else params.ties[i], []).append(leaf)
    return [leaf for i in params.distinct for leaf in (params.leaves[i], *following.get(i, ()))] + following.get(
        None, []
    )


def reserve(
    step: Step, mesh: Mesh, limits: Sequence[int | None], params: Inputs, opt_state: Inputs, owner: str
) -> dict[str, torch.Tensor]:
    """Allocates storage in a new state for the leaves off the device. Raises if the state exceeds the budgets, before
    any leaf is made.

    Args:
        step: a step whose memory tiers have been decided.
        mesh: the mesh whose ranks call this together.
        limits: bytes of each rank's device memory, of its host memory, and on disk.
        params, opt_state: the leaf tables.
        owner: the public call that errors name.

    Communication: that of `allocate`.

    Raises:
        BudgetError: with the numbers of every budget that is too small.
        FzeroValueError, TierError: those of `allocate`.
    """
    leaves = [
        *travelling(params, opt_state),
        *slots_of(step, mesh, params).inputs.leaves,
        *(leaf for anew in leaves_made_anew(step, mesh, params).values() for leaf in anew.values()),
    ]
    tiers: list[tuple[set[str], str]] = [({"device"}, ""), ({"host"}, " of host memory"), ({"disk"}, " on disk")]
    # Device and host are one memory, so the budget of the device counts the leaves of both tiers.
    if mesh.unified_memory:
        tiers[:2] = [({"device", "host"}, ""), (set(), "")]
    problems = []
    for (names, where), limit in zip(tiers, limits, strict=True):
        stored = sum(resting_bytes(leaf, mesh) for leaf in leaves if leaf.layout.tier in names)
        if limit is not None and stored > limit:
            problems.append(
                f"the state takes {size(stored)}{where} on each rank, {exact_size(stored - limit)} more than "
                f"{size(limit)}"
            )
    if problems:
        fix = "shard more of it: fz.shard_params; or keep it elsewhere: fz.offload; or raise the budget"
        raise BudgetError("memory_budget", "the state alone does not fit", problems, fix)
    made = allocate(leaves, mesh, paths_of(offloads(step)), owner)
    return {leaf.path: x for leaf, x in zip(leaves, made, strict=True) if x is not None}


def allocate(leaves: Sequence[Leaf], mesh: Mesh, directories: Any, owner: str) -> list[torch.Tensor | None]:
    """Allocates storage, filled with zeros, for each leaf off the device: one allocation and one set of files, in the
    order of the leaves. Returns None for leaves on the device.

    Every rank calls it; if it fails on one rank it fails on all.

    Communication: if there are leaves off the device, up to three exchanges of a few bytes between the ranks.

    Raises:
        FzeroValueError: directories that are missing, not writable or too small for the leaves of this host's ranks,
            with the numbers.
        TierError: not enough host memory.
    """
    on_host, on_disk = ([leaf for leaf in leaves if leaf.layout.tier == tier] for tier in ("host", "disk"))
    places: dict[str, Iterator[torch.Tensor]] = {}
    if on_disk:
        # The ranks of one host share its disks; torchrun sets the number of these ranks.
        nbytes, local = (
            sum(disk.padded(resting_bytes(leaf, mesh)) for leaf in on_disk),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        control_group.run_on_all_ranks(
            mesh.control, owner, lambda: disk.check(directories, nbytes, num_ranks=min(mesh.size, local))
        )
        places["disk"] = iter(
            control_group.run_on_all_ranks(mesh.control, owner, lambda: disk.rest(on_disk, mesh, directories))
        )
    if on_host:
        made = control_group.run_on_all_ranks(
            mesh.control, owner, lambda: host_tensors([(leaf.stored_shape(mesh), leaf.dtype) for leaf in on_host], mesh)
        )
        places["host"] = (place(x, leaf, mesh) for leaf, x in zip(on_host, made, strict=True))
    return [next(places[leaf.layout.tier]) if leaf.layout.tier in places else None for leaf in leaves]


def spare_for(program: Program, state: State, mesh: Mesh) -> bool:
    """Ensures that every leaf that a program writes speculatively on disk has a second extent there (`spare`). Returns
    whether they all have one."""
    leaves = {
        leaf_of(x)[0].path: x  # type: ignore[index]
        for x in tree.leaves((state.params, state.opt_state, state.extras))
        if leaf_of(x) is not None
    }
    return spare([leaves[program.leaves[n].path] for n in written_aside(program)], mesh)


def spare(tensors: Sequence[torch.Tensor], mesh: Mesh) -> bool:
    """Gives each of these tensors on disk a second extent, into which its next value can be written before that value
    becomes valid. Returns whether there is room for them.

    Every rank calls it with the same leaves. If there is no room on one rank, no rank gets extents, and the log says
    so.

    Communication: if some tensors have no second extent yet, two exchanges of a few bytes between the ranks.
    """
    by_files: dict[Any, list[tuple[torch.Tensor, Extent]]] = {}
    for x in tensors:
        if (extent := extent_of(x)) is not None and extent.spare is None:
            by_files.setdefault(extent.files, []).append((x, extent))
    if not by_files:
        return True
    # The ranks of a host share its disks, and all of them allocate at the same time.
    local = min(mesh.size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    def room() -> None:
        for files, pairs in by_files.items():
            disk.check(files.directories, sum(disk.padded(e.nbytes) for _, e in pairs), num_ranks=local)

    def take() -> None:
        for files, pairs in by_files.items():
            offset = files.extend(sum(disk.padded(e.nbytes) for _, e in pairs))
            for x, extent in pairs:
                set_extent(x, replace(extent, spare=Extent(files, offset, extent.nbytes)))
                offset += disk.padded(extent.nbytes)

    try:
        # All ranks first check, then all take: either every rank gets the extents or none does.
        control_group.run_on_all_ranks(mesh.control, "offload", room)
        control_group.run_on_all_ranks(mesh.control, "offload", take)
    except FzeroValueError as error:
        logger.warning(
            "fzero.offload: updates wait for the norm of all gradients: a second place on disk for what they write "
            "would need more room\n%s",
            error,
        )
        return False
    return True


def put(
    value: torch.Tensor | Iterator[torch.Tensor] | None,
    leaf: Leaf,
    places: Places,
    mesh: Mesh,
    buffer: int = BUFFER,
) -> torch.Tensor:
    """Stores the first value of a leaf. Returns the tensor that represents the leaf in a state, which is the value
    itself if the leaf is stored on the device.

    Args:
        value: the value of the leaf in its stored layout; or its consecutive pieces; or None for zeros.
        buffer: bytes of each of the two buffers through which pieces go to disk.
    """
    moved(resting_bytes(leaf, mesh))
    if leaf.layout.tier == "device":
        if not isinstance(value, torch.Tensor):
            parts, value = value, torch.zeros(leaf.stored_shape(mesh), dtype=leaf.dtype, device=mesh.device)
            fill(value, parts or ())
        return place(value, leaf, mesh)
    if isinstance(value, torch.Tensor):
        # The storage is already filled with zeros, and a write to disk is slower than a look at the bytes.
        if as_bytes(value).any():  # compared as bytes, because -0.0 is not all zero bits
            copy(value, places[leaf.path])
    elif value is not None:
        fill(places[leaf.path], value, buffer)
    return places[leaf.path]


def fill(target: torch.Tensor, parts: Iterable[torch.Tensor], buffer: int = BUFFER) -> None:
    """Writes consecutive pieces into a tensor of a state. If it is on disk, they pass through two buffers of `buffer`
    bytes."""
    if extent_of(target) is None:
        flat, at = target.reshape(-1), 0
        for part in parts:
            flat[at : at + part.numel()].copy_(part.reshape(-1))
            at += part.numel()
            del part  # do not keep the piece alive while the next one is made
    else:
        with disk.write_pieces(target, buffer) as write:
            for part in parts:
                write(part)
                del part


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the value of one tensor into another, on any tiers; through two buffers of 16 MiB if one of them is on
    disk."""
    if extent_of(target) is not None:
        disk.store(source.detach(), target)
    elif extent_of(source) is None:
        target.copy_(source)
    else:
        fill(target, disk.pieces(source))


def cast(resting: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields the value of a tensor of a state in another dtype, in pieces."""
    size = BUFFER // resting.dtype.itemsize
    flat = resting.detach().reshape(-1).split(size) if extent_of(resting) is None else disk.pieces(resting)
    return (part.to(dtype) for part in flat)


def load(resting: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the value of a tensor of a state on a device: the tensor's own memory if it is stored there."""
    return (resting.detach() if extent_of(resting) is None else disk.load(resting)).to(device)


def resting_bytes(leaf: Leaf, mesh: Mesh) -> int:
    """Returns the bytes of a leaf on each rank."""
    return leaf.shard_bytes(mesh)
