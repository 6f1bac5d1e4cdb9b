"""Writes a checkpoint: every rank its own file, then one rename that makes all of it valid at once.

    every rank   plan: what is stored, and who writes which part         (pure; equal on all ranks, compared by digest)
    rank 0       clears what killed saves left, makes the temporary directory
    every rank   `write_rank_file`: its parts, with checksums
    rank 0       `commit`: the index, the rename, `latest`, and the deletion of older checkpoints

After each of these the ranks exchange success or failure, so none waits for one that failed. Nothing is gathered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fzero import tree
from fzero.boxes import Boxes, part_shape
from fzero.checkpoint import format, skeleton
from fzero.checkpoint.directory import INDEX, LATEST, SET_ASIDE, TEMPORARY, as_path, complete_steps, step_name
from fzero.checkpoint.index import File, Part, dump, show, to_json
from fzero.checkpoint.ranks import Ranks, together, world
from fzero.comm import disk
from fzero.comm.replicas import differing, digested, replicas_of
from fzero.errors import CheckpointError, message
from fzero.layout import Cut, extent_of, leaf_of
from fzero.mesh import Mesh
from fzero.step import lasting


@dataclass(frozen=True)
class Plan:
    """The plan of a save: `parts[name]` are the ranks that write the leaf, and what of it each writes. Alike on all
    ranks but for `tensors`."""

    step: int
    size: int
    leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    aliases: Mapping[str, str]
    skeleton: Any
    parts: Mapping[str, tuple[tuple[int, Boxes], ...]]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    axes: Mapping[str, int] = field(default_factory=dict)  # of the mesh that leaves are sharded over

    def digest(self) -> str:
        facts = (
            self.step,
            self.size,
            list(self.leaves.items()),
            list(self.aliases.items()),
            self.skeleton,
            list(self.parts.items()),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
) -> Path:
    """Saves a state as `path/step-XXXXXXXX`, in place of an older checkpoint of the same step.

    Every rank calls it. It returns when the checkpoint is complete and on stable storage; until then the previous one
    is the latest, whatever is killed when. It can be restored on any mesh. A tied leaf is stored once.

    Args:
        path: the root directory, on a filesystem that all ranks share; made if it is not there. One save at a time.
        state: a State of a plain Step or of a CompiledStep: a pytree of tensors, numbers and strings with a field
            `step`. Tensors without a layout are taken to be whole and equal on all ranks.
        keep: delete, after success, all but this many checkpoints, counting this one and those of earlier steps.
            Checkpoints of later steps are never touched.
        meta: anything JSON can hold, e.g. the run's configuration; rank 0's is stored.
        check_replicas: compare what several ranks hold, by digests: ranks that drifted apart are an error instead of a
            checkpoint that one of them wrote. It reads those leaves once, where they are, except for leaves on disk,
            which are not compared.

    Communication: a few bytes through the store; four exchanges of small objects; each rank writes the shards it holds,
        one of the replicas of a shard and of a whole leaf, spread over the ranks by size.

    Memory: one buffer of at most 16 MiB on the host, and two with leaves on disk.

    Raises:
        CheckpointError: on every rank, if anything failed on any; names each failing rank. The previous checkpoint is
            then still valid and the latest, and nothing is left of the new one (or, if only the deletion of older ones
            failed, the new one is valid and the latest, and the error says so). Replicas that differ, by leaf and rank.
        DivergenceError: ranks that did not call it within the mesh's timeout, by name.

    Example:
        >>> import tempfile, typing
        >>> State = typing.NamedTuple("State", [("step", int), ("params", dict)])
        >>> root = tempfile.mkdtemp()
        >>> save(root, State(7, {"w": torch.ones(3)})).name
        'step-00000007'
    """
    mesh = next(
        (tag[1] for x in tree.leaves(state) if isinstance(x, torch.Tensor) and (tag := leaf_of(x)) is not None), None
    )
    with contextlib.nullcontext() if mesh is None else mesh.alone("checkpoint.save"):
        return save_as(world(), path, state, keep=keep, meta=meta, check_replicas=check_replicas)


def save_as(
    ranks: Ranks,
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
) -> Path:
    """`save` as one of the given ranks."""
    root = as_path(path)
    plan: Plan | None = None
    temporary: Path | None = None
    held: dict[str, tuple[str, tuple[str, ...]]] = {}

    def begin() -> str:
        nonlocal plan, temporary, held
        plan = make_plan(state, ranks.rank, ranks.size)
        _check_arguments(keep, meta)
        temporary = root / (TEMPORARY + step_name(plan.step))
        if ranks.rank == 0:
            prepare(root, temporary)
        if check_replicas and ranks.size > 1:
            held = digested(replicas_of(plan.tensors))
        return plan.digest()

    def undo() -> None:
        if ranks.rank == 0 and temporary is not None and root.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
            (root / (TEMPORARY + LATEST)).unlink(missing_ok=True)

    what = f"cannot save to {root}"
    digests = together(ranks, "checkpoint.save", what, begin, undo)
    assert plan is not None and temporary is not None
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        undo()
        problems = [
            f"the state of rank {r} differs from that of rank 0 in step, tree, shapes, dtypes or layouts" for r in odd
        ]
        raise CheckpointError(
            message("checkpoint.save", what, problems, "save the same state, at the same step, on every rank")
        )
    if check_replicas and ranks.size > 1 and (problems := differing(held, plan.axes, ranks.size, ranks.exchange)):
        undo()
        fix = "go back to the last checkpoint; check_replicas=False saves what one of these ranks holds"
        raise CheckpointError(
            message("checkpoint.save", f"{what}: the ranks hold different values of the same leaves", problems, fix)
        )
    job, target = plan, temporary
    together(ranks, "checkpoint.save", what, lambda: write_rank_file(target, job, ranks.rank), undo)
    done = together(
        ranks,
        "checkpoint.save",
        what,
        lambda: str(commit(root, target, job, keep=keep, meta=meta)) if ranks.rank == 0 else "",
        undo,
    )
    return Path(done[0])


def make_plan(state: Any, rank: int, size: int) -> Plan:
    """Who writes which elements of which leaf; the same on every rank.

    A shard that one rank holds is written by that rank. Whole leaves and shards with replicas go, largest first, to
    whichever of their holders has the fewest bytes yet (the lowest of these ranks).

    Raises:
        CheckpointError: a state that cannot be stored, listing every reason.
    """
    tree, tensors, problems = skeleton.encode(lasting(state))
    step = _step(state, problems)
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if (original := first.setdefault(id(tensor), name)) != name:
            aliases[name] = original
    leaves: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    holders: dict[tuple[str, ...], list[list[int]]] = {(): [list(range(size))]}
    loads = [0] * size
    parts: dict[str, list[tuple[int, Boxes]]] = {}
    shared: list[tuple[int, str, Boxes, list[int]]] = []
    for name, tensor in tensors.items():
        if name in aliases:
            leaves[name] = leaves[aliases[name]]
            continue
        tag = leaf_of(tensor)
        axes, shape = ((), tuple(tensor.shape)) if tag is None else (tag[0].layout.axes, tag[0].shape)
        leaves[name], parts[name] = (shape, tensor.dtype), []
        if problem := _unstorable(tensor, rank, size):
            problems.append(f"{name}: {problem}")
            continue
        if axes not in holders:
            assert tag is not None
            holders[axes] = _holders(tag[1], axes)
        cut = Cut((), 1) if tag is None else tag[0].cut(tag[1])
        for index, ranks in enumerate(holders[axes]):
            boxes = cut.boxes(shape, index)
            nbytes = boxes.numel * tensor.dtype.itemsize
            if not nbytes:
                continue
            if len(ranks) > 1:
                shared.append((nbytes, name, boxes, ranks))
            else:
                parts[name].append((ranks[0], boxes))
                loads[ranks[0]] += nbytes
    if problems:
        fix = "save the State that train_step or compile returned"
        raise CheckpointError(
            message("checkpoint.save", f"this state cannot be saved: {len(problems)} reasons", problems, fix)
        )
    for nbytes, name, boxes, ranks in sorted(shared, key=lambda x: -x[0]):
        writer = min(ranks, key=lambda r: loads[r])
        loads[writer] += nbytes
        parts[name].append((writer, boxes))
    axes = next((tag[1].axes for x in tensors.values() if (tag := leaf_of(x)) is not None), {})
    return Plan(
        step,
        size,
        leaves,
        aliases,
        tree,
        {name: tuple(sorted(p, key=lambda x: (x[1].place, x[1].start))) for name, p in parts.items()},
        tensors,
        axes,
    )


def file_name(rank: int, size: int) -> str:
    return f"rank-{rank:05d}-of-{size:05d}.safetensors"


def prepare(root: Path, temporary: Path) -> None:
    """Makes the temporary directory, after finishing or removing what saves that were killed left."""
    if root.exists() and not root.is_dir():
        raise CheckpointError(
            message(
                "checkpoint.save",
                f"{root} is not a directory",
                fix="give the directory in which checkpoints are to be made",
            )
        )
    if not root.is_dir():
        root.mkdir(parents=True)
        format.sync(root.parent)
    for entry in list(root.iterdir()):
        if entry.name.startswith(TEMPORARY):
            _remove(entry)
        elif entry.name.startswith("step-") and entry.name.endswith(SET_ASIDE):
            if entry.with_name(entry.name.removesuffix(SET_ASIDE)).exists():
                _retire(root, entry)
            else:
                os.rename(entry, entry.with_name(entry.name.removesuffix(SET_ASIDE)))
    temporary.mkdir()


def write_rank_file(temporary: Path, plan: Plan, rank: int) -> None:
    """Writes this rank's parts, and a note of what was written for `commit`."""
    mine = {name: boxes for name, parts in plan.parts.items() for r, boxes in parts if r == rank}

    def entry(name: str) -> format.Entry:
        boxes = mine[name]
        shape = part_shape(boxes.shape, boxes.along)
        return format.Entry(name, plan.leaves[name][1], shape if boxes.numel == math.prod(shape) else (boxes.numel,))

    def blocks(entry: format.Entry) -> Iterator[torch.Tensor]:
        tensor, left = plan.tensors[entry.name], entry.nbytes  # less the padding, which is at the end
        on_disk = extent_of(tensor) is not None
        for piece in disk.pieces(tensor) if on_disk else [tensor.detach().resolve_conj().resolve_neg().contiguous()]:
            data = format.as_bytes(piece)[:left]
            left -= data.numel()
            yield data

    name = file_name(rank, plan.size)
    written = format.write(temporary / name, [entry(n) for n in mine], blocks)
    note = {"bytes": written.bytes, "sha256": written.sha256, "crc32": written.crc32, "offsets": dict(written.offsets)}
    format.write_file(temporary / _note(rank), json.dumps(note).encode())


def commit(
    root: Path, temporary: Path, plan: Plan, *, keep: int | None = None, meta: Mapping[str, Any] | None = None
) -> Path:
    """Makes the files that all ranks have written the latest checkpoint."""
    target = root / step_name(plan.step)
    notes = [_read_note(temporary, rank, plan.size) for rank in range(plan.size)]
    files = {file_name(rank, plan.size): File(n["bytes"], n["sha256"], n["crc32"]) for rank, n in enumerate(notes)}
    parts = {
        name: [Part(file_name(r, plan.size), name, boxes, notes[r]["offsets"][name]) for r, boxes in ps]
        for name, ps in plan.parts.items()
    }
    format.write_file(
        temporary / INDEX,
        dump(to_json(plan.step, plan.leaves, parts, plan.aliases, plan.skeleton, dict(meta or {}), files)),
    )
    for rank in range(plan.size):
        os.unlink(temporary / _note(rank))
    format.sync(temporary)
    pointer = root / (TEMPORARY + LATEST)  # written before the rename: a full disk must not come between the two
    pointer.unlink(missing_ok=True)
    format.write_file(pointer, f"{target.name}\n".encode())
    old = target.with_name(target.name + SET_ASIDE)
    if target.exists():
        os.rename(target, old)  # from here to the next rename, readers find this step under its other name
    os.rename(temporary, target)
    format.sync(root)
    os.replace(pointer, root / LATEST)
    format.sync(root)
    retired = [old] if old.exists() else []
    if keep is not None:
        earlier = sorted((s, p) for s, p in complete_steps(root).items() if s < plan.step)
        retired += [p for _, p in earlier[: max(0, len(earlier) - (keep - 1))]]
    try:
        for directory in retired:
            _retire(root, directory)
    except OSError as error:
        what = f"{target} is saved and is the latest, but an older checkpoint could not be deleted"
        raise CheckpointError(
            message("checkpoint.save", what, [str(error)], "delete it by hand, or make it writable")
        ) from error
    return target


def _step(state: Any, problems: list[str]) -> int:
    step = getattr(state, "step", None)
    whole = isinstance(step, torch.Tensor) and step.numel() == 1 and not step.dtype.is_floating_point
    if not (whole or type(step) is int) or int(step) < 0:  # type: ignore[arg-type]
        problems.append(
            f"state.step: {show(step.shape, step.dtype) if isinstance(step, torch.Tensor) else repr(step)}, not the "
            f"number of a step"
        )
        return 0
    return int(step)  # type: ignore[arg-type]


def _unstorable(tensor: torch.Tensor, rank: int, size: int) -> str | None:
    if tensor.dtype not in format.CODES:
        return f"the dtype {tensor.dtype} cannot be stored"
    if (tensor.device.type == "meta" and extent_of(tensor) is None) or tensor.layout != torch.strided:
        return f"a tensor on the meta device or of layout {tensor.layout} has no bytes to store"
    if (tag := leaf_of(tensor)) is None:
        return None
    leaf, mesh = tag
    if (mesh.rank, mesh.size) != (rank, size):
        return f"it is rank {mesh.rank}'s on a mesh of {mesh.size}, saved by rank {rank} of {size}"
    if tuple(tensor.shape) != leaf.resting_shape(mesh) or tensor.dtype != leaf.dtype:
        return (
            f"it is {show(tensor.shape, tensor.dtype)} where its layout says "
            f"{show(leaf.resting_shape(mesh), leaf.dtype)}"
        )
    return None


def _holders(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """For every shard, the ranks that hold it."""
    out: list[list[int]] = [[] for _ in range(mesh.axis_size(axes))]
    for rank in range(mesh.size):
        out[Mesh(mesh.axes, rank, torch.device("cpu")).index(axes)].append(rank)
    return out


def _check_arguments(keep: Any, meta: Any) -> None:
    problems = []
    if keep is not None and (type(keep) is not int or keep < 1):
        problems.append(f"keep={keep!r}: a whole number of at least 1, or None to keep all")
    try:
        if json.loads(json.dumps(dict(meta or {}), allow_nan=False)) != dict(meta or {}):
            problems.append("meta: JSON would change it (tuples, or keys that are not str)")
    except (TypeError, ValueError) as error:
        problems.append(f"meta: JSON cannot hold it: {error}")
    if problems:
        raise CheckpointError(message("checkpoint.save", "invalid arguments", problems, "change them as said above"))


def _note(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _read_note(temporary: Path, rank: int, size: int) -> dict[str, Any]:
    try:
        note = json.loads((temporary / _note(rank)).read_bytes())
        found = os.path.getsize(temporary / file_name(rank, size))
    except FileNotFoundError:
        what, fix = f"what rank {rank} wrote is not to be seen from rank 0", "save to a filesystem that all ranks share"
        raise CheckpointError(message("checkpoint.save", what, [str(temporary / file_name(rank, size))], fix)) from None
    if found != note["bytes"]:
        raise CheckpointError(
            message(
                "checkpoint.save",
                f"{temporary / file_name(rank, size)} has {found} bytes, rank {rank} wrote {note['bytes']}",
            )
        )
    return note


def _retire(root: Path, directory: Path) -> None:
    """Deletes a checkpoint; renamed first, so that one half deleted is never taken for a complete one."""
    gone = root / f"{TEMPORARY}old-{directory.name}"
    os.rename(directory, gone)
    _remove(gone)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
