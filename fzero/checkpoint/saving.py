"""Writes a checkpoint: every rank its own file, then one act that makes all of it valid at once.

    every rank   plan: what is stored, and who writes which part         (pure; equal on all ranks, compared by digest)
    rank 0       clears what killed saves left, makes a draft            (storage.py)
    every rank   `write_rank_file`: its parts, with checksums
    rank 0       `commit`: the index, publishing it, and the deletion of older checkpoints

After each of these the ranks exchange success or failure, so none waits for one that failed. Nothing is gathered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch

from fzero import tree
from fzero._utils.arguments import flag, plain_numbers
from fzero._utils.bounded_json import parsed
from fzero.checkpoint import async_save, safetensors_format
from fzero.checkpoint import treespec as skeleton
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.directory import complete_steps, pointed, step_name
from fzero.checkpoint.index import Expected, File, Index, StoredPart, dump, read_index, to_json
from fzero.checkpoint.storage import Draft, storage_of
from fzero.checkpoint.storage_paths import INDEX, Place, Url, as_path
from fzero.checkpoint.tensor_digests import differing, digested, replicas_of
from fzero.comm.all_ranks import Ranks, together, world
from fzero.errors import CheckpointError
from fzero.memory import disk
from fzero.mesh import Mesh
from fzero.sharding.layout import Cut, Only, extent_of, leaf_of
from fzero.sharding.shard_regions import Boxes, part_shape
from fzero.train_state import check_whole, lasting

logger = logging.getLogger("fzero")

_warned: set[str] = set()  # roots under which older checkpoints could not be deleted


@dataclass(frozen=True)
class _Saved:
    """What this process remembers of a checkpoint that it saved."""

    run: str
    step: int
    leaves: Expected


_saved: dict[str, _Saved] = {}  # by root, the last checkpoint


@dataclass(frozen=True)
class SavePlan:
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


@dataclass(frozen=True)
class Job:
    """A save that has begun: every rank has the same plan, and there is room for its files."""

    ranks: Ranks
    root: Place
    draft: Draft
    plan: SavePlan
    keep: int | None
    meta: Mapping[str, Any] | None
    check_replicas: bool

    @property
    def what(self) -> str:
        return f"cannot save step {self.plan.step} to {self.root}"

    def undo(self) -> None:
        """Leaves nothing of the new checkpoint."""
        _undo(self.ranks, self.root, self.draft)


@overload
def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    wait: Literal[True] = True,
    private: bool = False,
) -> Place: ...
@overload
def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    wait: Literal[False],
    private: bool = False,
) -> AsyncSave: ...
@overload
def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    wait: bool,
    private: bool = False,
) -> Place | AsyncSave: ...
@plain_numbers
def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    wait: bool = True,
    private: bool = False,
) -> Place | AsyncSave:
    """Saves a state as `path/step-XXXXXXXX`, in place of an older checkpoint of the same step.

    Every rank calls it. It returns when the checkpoint is complete and on stable storage; until then the previous one
    is the latest, whatever is killed when. It can be restored on any mesh. A tied leaf is stored once.

    Args:
        path: the root directory, on a filesystem that all ranks share; made if it is not there. Or a place in an object
            store, such as s3://bucket/run, through fsspec (the extra `fsspec`). One save at a time.
        state: a State of a plain Step or of a CompiledStep: a pytree of tensors, numbers and strings with a field
            `step`. Tensors without a layout are taken to be whole and equal on all ranks.
        keep: delete, after success, all but this many checkpoints, counting this one and those of earlier steps.
            Checkpoints of later steps are never touched.
        meta: anything JSON can hold, e.g. the run's configuration; rank 0's is stored.
        check_replicas: compare what several ranks hold, by digests: ranks that drifted apart are an error instead of a
            checkpoint that one of them wrote. It reads those leaves once, where they are, except for leaves on disk,
            which are not compared.
        wait: False to go on while it is written: what this rank writes is copied to host memory, and a thread does the
            rest. An `AsyncSave` comes back, whose `wait()` returns the path; a save under way is waited for by the next
            one. Not for states with leaves on disk, which such a copy would bring into memory.
        private: True for files that this user alone can read (0600, in directories of 0700), whatever the umask;
            otherwise files have the permissions that the umask leaves. Directories that are there stay as they are. Not
            for an object store, where its own policies say who may read.

    Communication: a few bytes through the store; five exchanges of small objects; each rank writes the shards it holds,
        one of the replicas of a shard and of a whole leaf, spread over the ranks by size. With `wait=False` two of the
        exchanges before it returns, the others through the store.

    Memory: one buffer of at most 16 MiB on the host, and two with leaves on disk; with an object store about
        80 MiB, or five 9000ths of this rank's file if that is more. With `wait=False` also what this rank reads of its
        state, kept for the next save until `close_mesh()`; in pinned memory if it comes from a GPU.

    Raises:
        CheckpointError: on every rank, if anything failed on any; names each failing rank. The previous checkpoint is
            then still valid and the latest, and nothing is left of the new one. Replicas that differ, by leaf and rank.
            Likewise what the save before it failed with, if a rank has not called `wait()` of it. That older ones
            cannot be deleted is a warning.
        DivergenceError: ranks that did not call it within the mesh's timeout, by name.

    Example:
        >>> import tempfile, typing
        >>> State = typing.NamedTuple("State", [("step", int), ("params", dict)])
        >>> root = tempfile.mkdtemp()
        >>> save(root, State(7, {"w": torch.ones(3)})).name
        'step-00000007'
    """
    mesh = next((tag[1] for x in tree.tensors(state) if (tag := leaf_of(x)) is not None), None)
    alone = contextlib.nullcontext() if mesh is None else mesh.alone("checkpoint.save")
    with alone, async_save.one_at_a_time:
        job = begin(
            world(), path, state, keep=keep, meta=meta, check_replicas=check_replicas, wait=wait, private=private
        )
        if wait:
            return carry_out(job)

        def rest(ranks: Ranks, copies: dict[str, torch.Tensor]) -> Place:
            return carry_out(replace(job, ranks=ranks, plan=replace(job.plan, tensors=copies)))

        return async_save.start(job.ranks, job.plan.step, _read(job), rest, job.what, job.undo)


def begin(
    ranks: Ranks,
    path: str | os.PathLike[str],
    state: Any,
    *,
    keep: int | None = None,
    meta: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    wait: bool = True,
    private: bool = False,
) -> Job:
    """Waits for the save under way, plans the next on all ranks, and makes room for its files.

    Arguments and errors as for `save`. Called with `behind.one_at_a_time` held.
    """
    root: Place | None = None
    plan: SavePlan | None = None
    draft: Draft | None = None

    def act() -> tuple[str, tuple[str, str] | None]:
        nonlocal root, plan, draft
        root = as_path(path)
        async_save.finish()  # it may raise on some ranks alone: those where nobody has asked
        check_whole(state, "checkpoint.save")
        plan = make_plan(state, ranks.rank, ranks.size)
        _check_arguments(keep, meta, wait, plan, not_private(root, private))
        storage = storage_of(root)  # every rank has what it takes
        if ranks.rank == 0:
            if storage.has(root / INDEX):
                fix = f"give the directory that it is in: {root.parent}"
                raise CheckpointError("checkpoint.save", f"{root} is a checkpoint, not a place for some", fix=fix)
            draft = storage.begin(root, step_name(plan.step), private)
        return plan.digest(), None if draft is None else (str(draft.directory), draft.mark)

    undo = lambda: _undo(ranks, root, draft)  # noqa: E731
    what = f"cannot save to {path}"
    begun = together(ranks, "checkpoint.save", what, act, undo, tuple[str, tuple[str, str] | None])
    digests, drafted = [digest for digest, _ in begun], begun[0][1]
    assert root is not None and plan is not None and drafted is not None
    draft = Draft(as_path(drafted[0]), drafted[1])
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        undo()
        problems = [
            f"the state of rank {r} differs from that of rank 0 in step, tree, shapes, dtypes or layouts" for r in odd
        ]
        raise CheckpointError("checkpoint.save", what, problems, "save the same state, at the same step, on every rank")
    return Job(ranks, root, draft, plan, keep, meta, check_replicas)


def carry_out(job: Job) -> Place:
    """Compares replicas, writes and commits what has begun."""
    ranks, plan = job.ranks, job.plan
    if job.check_replicas and ranks.size > 1:
        held: dict[str, tuple[str, tuple[str, ...]]] = {}
        together(ranks, "checkpoint.save", job.what, lambda: held.update(digested(replicas_of(plan.tensors))), job.undo)
        if problems := differing(held, plan.axes, ranks.size, ranks.exchange):
            job.undo()
            fix = "go back to the last checkpoint; check_replicas=False saves what one of these ranks holds"
            what = f"{job.what}: the ranks hold different values of the same leaves"
            raise CheckpointError("checkpoint.save", what, problems, fix)
    together(ranks, "checkpoint.save", job.what, lambda: write_rank_file(job.draft, plan, ranks.rank), job.undo)
    done = together(
        ranks,
        "checkpoint.save",
        job.what,
        lambda: str(commit(job.root, job.draft, plan, keep=job.keep, meta=job.meta)) if ranks.rank == 0 else "",
        job.undo,
        str,
    )
    return as_path(done[0])


def _undo(ranks: Ranks, root: Place | None, draft: Draft | None) -> None:
    if ranks.rank == 0 and root is not None and draft is not None:
        storage_of(root).undo(root, draft)


def _read(job: Job) -> dict[str, torch.Tensor]:
    """The tensors that a rank reads: the ones it writes parts of, and the ones that are compared."""
    plan, rank = job.plan, job.ranks.rank
    names = {name for name, parts in plan.parts.items() if any(r == rank for r, _ in parts)}
    if job.check_replicas and job.ranks.size > 1:
        names.update(replicas_of(plan.tensors))
    return {name: x for name, x in plan.tensors.items() if name in names}


def make_plan(state: Any, rank: int, size: int, among: Sequence[int] | None = None) -> SavePlan:
    """Who writes which elements of which leaf; the same on every rank.

    A shard that one rank holds is written by that rank. Whole leaves and shards with replicas go, largest first, to
    whichever of their holders has the fewest bytes yet (the lowest of these ranks).

    Args:
        among: the ranks that write; what none of them holds is not written. By default all.

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
    holders: dict[tuple[tuple[str, ...], Only | None], list[list[int]]] = {((), None): [list(range(size))]}
    loads = [0] * size
    parts: dict[str, list[tuple[int, Boxes]]] = {}
    shared: list[tuple[int, str, Boxes, list[int]]] = []
    for name, tensor in tensors.items():
        if name in aliases:
            leaves[name] = leaves[aliases[name]]
            continue
        tag = leaf_of(tensor)
        axes, shape = ((), tuple(tensor.shape)) if tag is None else (tag[0].layout.axes, tag[0].shape)
        only = None if tag is None else tag[0].layout.only
        leaves[name], parts[name] = (shape, tensor.dtype), []
        if problem := _unstorable(tensor, rank, size):
            problems.append(f"{name}: {problem}")
            continue
        if (axes, only) not in holders:
            assert tag is not None
            holders[axes, only] = _holders(tag[1], axes, only)
        cut = Cut((), 1) if tag is None else tag[0].cut(tag[1])
        for index, ranks in enumerate(holders[axes, only]):
            boxes = cut.boxes(shape, index)
            nbytes = boxes.numel * tensor.dtype.itemsize
            ranks = ranks if among is None else [r for r in ranks if r in among]
            if not (nbytes and ranks):
                continue
            if len(ranks) > 1:
                shared.append((nbytes, name, boxes, ranks))
            else:
                parts[name].append((ranks[0], boxes))
                loads[ranks[0]] += nbytes
    if problems:
        fix = "save the State that train_step or compile returned"
        raise CheckpointError("checkpoint.save", f"this state cannot be saved: {len(problems)} reasons", problems, fix)
    for nbytes, name, boxes, ranks in sorted(shared, key=lambda x: -x[0]):
        writer = min(ranks, key=lambda r: loads[r])
        loads[writer] += nbytes
        parts[name].append((writer, boxes))
    axes = next((tag[1].axes for x in tensors.values() if (tag := leaf_of(x)) is not None), {})
    return SavePlan(
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


def written_by(plan: SavePlan, rank: int) -> dict[str, Boxes]:
    """The parts that a rank writes, of each leaf at most one."""
    return {name: boxes for name, parts in plan.parts.items() for r, boxes in parts if r == rank}


def write_rank_file(draft: Draft, plan: SavePlan, rank: int) -> None:
    """Writes this rank's parts, and a note of what was written for `commit`."""
    mine = written_by(plan, rank)

    def entry(name: str) -> safetensors_format.Entry:
        boxes = mine[name]
        shape = part_shape(boxes.shape, boxes.along)
        return safetensors_format.Entry(
            name, plan.leaves[name][1], shape if boxes.numel == math.prod(shape) else (boxes.numel,)
        )

    def blocks(entry: safetensors_format.Entry) -> Iterator[torch.Tensor]:
        tensor, left = plan.tensors[entry.name], entry.nbytes  # less the padding, which is at the end
        on_disk = extent_of(tensor) is not None
        for piece in disk.pieces(tensor) if on_disk else [tensor.detach().resolve_conj().resolve_neg().contiguous()]:
            data = safetensors_format.as_bytes(piece)[:left]
            left -= data.numel()
            yield data

    written = safetensors_format.write(
        draft.directory / draft.name(file_name(rank, plan.size)), [entry(n) for n in mine], blocks
    )
    note = {"bytes": written.bytes, "sha256": written.sha256, "crc32": written.crc32, "offsets": dict(written.offsets)}
    storage_of(draft.directory).write(draft.directory / draft.name(_note(rank)), json.dumps(note).encode())


def commit(
    root: Place, draft: Draft, plan: SavePlan, *, keep: int | None = None, meta: Mapping[str, Any] | None = None
) -> Place:
    """Makes the files that all ranks have written the latest checkpoint."""
    storage, target = storage_of(root), root / step_name(plan.step)
    notes = [_read_note(draft, rank, plan.size) for rank in range(plan.size)]
    names = [draft.name(file_name(rank, plan.size)) for rank in range(plan.size)]
    files = {name: File(n["bytes"], n["sha256"], n["crc32"]) for name, n in zip(names, notes, strict=True)}
    parts = {
        name: [StoredPart(names[r], name, boxes, notes[r]["offsets"][name]) for r, boxes in ps]
        for name, ps in plan.parts.items()
    }
    run, warning = _run(root, plan)
    index = dump(to_json(plan.step, plan.leaves, parts, plan.aliases, plan.skeleton, dict(meta or {}), files, run))
    spare = [draft.name(_note(rank)) for rank in range(plan.size)]
    retired = storage.publish(root, draft, target.name, index, spare, names)
    _saved[_absolute(root)] = _Saved(run, plan.step, plan.leaves)
    if warning is not None:
        logger.warning(warning)
    try:
        if keep is not None:
            earlier = sorted((s, p) for s, p in complete_steps(root).items() if s < plan.step)
            retired += [p for _, p in earlier[: max(0, len(earlier) - (keep - 1))]]
        for directory in retired:
            storage.retire(root, directory)
    except (OSError, CheckpointError) as error:
        _not_deleted(str(root), str(error))
    return target


def _run(root: Place, plan: SavePlan) -> tuple[str, str | None]:
    """The name of the run that a new checkpoint belongs to, and a warning if `latest` belongs to another run.

    A save continues the run of the latest checkpoint if it has the same leaves and a step that is not earlier. That
    includes a run that was started again, from whatever source it got its state. Any other save is a new run, which
    takes over the directory.
    """
    own = f"{time.strftime('%Y-%m-%dT%H:%M:%S')}-{secrets.token_hex(3)}"
    before = _before(root)
    if before is None:
        return own, None
    differ = sum(before.leaves.get(name) != plan.leaves.get(name) for name in {*before.leaves, *plan.leaves})
    if not differ and plan.step >= before.step:
        return before.run or own, None
    why = f"has other leaves ({differ} differ)" if differ else "is of a later step"
    return own, (
        f"fzero.checkpoint.save: {step_name(plan.step)} is now the latest checkpoint in {root}, where "
        f"{step_name(before.step)} was, which {why}: a run that continues from {root} finds the new one. "
        "Fix: save another run to another directory"
    )


def _before(root: Place) -> _Saved | Index | None:
    """The latest checkpoint before a save. Its index, which can be large, is not read if this process wrote it."""
    known = _saved.get(_absolute(root))
    try:
        place = pointed(root)
        if place is not None and known is not None and place.name == step_name(known.step):
            return known
        return None if place is None else read_index(place)
    except (CheckpointError, OSError):  # damaged: this save replaces it
        return None


def _absolute(root: Place) -> str:
    return str(root if isinstance(root, Url) else root.absolute())


def _not_deleted(root: str, why: str) -> None:
    """Warns once of each root: nothing is wrong with what was saved."""
    if root not in _warned:
        _warned.add(root)
        text = "fzero.checkpoint.save: older checkpoints under %s could not be deleted: %s"
        logger.warning(text, root, why)


def _step(state: Any, problems: list[str]) -> int:
    step = getattr(state, "step", None)
    whole = isinstance(step, torch.Tensor) and step.numel() == 1 and not step.dtype.is_floating_point
    if not (whole or type(step) is int) or int(step) < 0:  # type: ignore[arg-type]
        problems.append(
            f"state.step: {tree.describe(step) if isinstance(step, torch.Tensor) else repr(step)}, not the number "
            f"of a step"
        )
        return 0
    return int(step)  # type: ignore[arg-type]


def _unstorable(tensor: torch.Tensor, rank: int, size: int) -> str | None:
    if tensor.dtype not in safetensors_format.CODES:
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
            f"it is {tree.form(tensor.shape, tensor.dtype)} where its layout says "
            f"{tree.form(leaf.resting_shape(mesh), leaf.dtype)}"
        )
    return None


def _holders(mesh: Mesh, axes: tuple[str, ...], only: Only | None) -> list[list[int]]:
    """For every shard, the ranks that hold it."""
    out: list[list[int]] = [[] for _ in range(mesh.axis_size(axes))]
    for rank in range(mesh.size):
        there = Mesh(mesh.axes, rank, torch.device("cpu"))
        if only is None or there.index(only.axis) == only.index:
            out[there.index(axes)].append(rank)
    return out


def not_private(path: str | os.PathLike[str], private: Any) -> list[str]:
    """A line if checkpoints of a path cannot be of this user alone, as is asked."""
    if not (problems := flag("private", private)) and private and isinstance(as_path(path), Url):
        problems = ["private=True: objects of a store have no permissions of files; its policies say who may read"]
    return problems


def _check_arguments(keep: Any, meta: Any, wait: Any, plan: SavePlan, problems: list[str]) -> None:
    if type(wait) is not bool:
        problems.append(f"wait={wait!r}: True or False")
    on_disk = [name for name, x in plan.tensors.items() if extent_of(x) is not None]
    if wait is False and on_disk:
        problems.append(
            f"wait=False: {len(on_disk)} leaves rest on disk, and would be copied to memory ({on_disk[0]}, …): save "
            "them with wait=True"
        )
    if keep is not None and (type(keep) is not int or keep < 1):
        problems.append(f"keep={keep!r}: a whole number of at least 1, or None to keep all")
    try:
        if parsed(json.dumps(dict(meta or {}), allow_nan=False)) != dict(meta or {}):
            problems.append("meta: JSON would change it (tuples, or keys that are not str)")
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(f"meta: JSON cannot hold it: {error}")
    if problems:
        raise CheckpointError("checkpoint.save", "invalid arguments", problems, "change them as said above")


def _note(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _read_note(draft: Draft, rank: int, size: int) -> dict[str, Any]:
    storage, file = storage_of(draft.directory), draft.directory / draft.name(file_name(rank, size))
    try:
        note = parsed(storage.whole(draft.directory / draft.name(_note(rank))))
        found = storage.size(file)
    except FileNotFoundError:
        what, fix = f"what rank {rank} wrote is not to be seen from rank 0", "save to a filesystem that all ranks share"
        raise CheckpointError("checkpoint.save", what, [str(file)], fix) from None
    if found != note["bytes"]:
        raise CheckpointError("checkpoint.save", f"{file} has {found} bytes, rank {rank} wrote {note['bytes']}")
    return note
