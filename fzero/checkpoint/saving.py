"""Writes a checkpoint: every rank writes its own file, then one atomic operation makes all of them valid.

    every rank   plan: what is stored, and which rank writes which part  (pure; compared between ranks by digest)
    rank 0       removes what killed saves have left, begins the staging   (storage.py)
    every rank   `write_rank_file`: its parts, with checksums
    rank 0       `commit`: writes the index, publishes it, and deletes older checkpoints of this run

After each of these phases the ranks exchange success or failure, so that no rank waits for one that has failed. No
tensor is gathered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch

from fzero import tree
from fzero._utils.arguments import count, flag, plain_numbers
from fzero._utils.bounded_json import parsed
from fzero.checkpoint import async_save, run_record, safetensors_format, treespec
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.directory import head, newest, step_name
from fzero.checkpoint.index import File, StoredPart, dump, to_json
from fzero.checkpoint.run_record import RunRecord, Saved
from fzero.checkpoint.storage import Staging, storage_of
from fzero.checkpoint.storage_paths import INDEX, Place, Url, as_path
from fzero.checkpoint.tensor_digests import differing, holders_of, replicas_of
from fzero.comm.control_group import ControlGroup, all_gather_values, world
from fzero.errors import CheckpointError
from fzero.memory import disk
from fzero.sharding.layout import Only, Sharding, extent_of, leaf_of
from fzero.sharding.shard_regions import Boxes, part_shape
from fzero.train_state import check_computed, check_whole, lasting

logger = logging.getLogger("fzero")

# The names of torch.distributed.checkpoint for where the parts of a file begin (its `hf_storage.py`).
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

_warned: set[Place] = set()  # roots under which older checkpoints could not be deleted


@dataclass(frozen=True)
class SaveOptions:
    """The options of a save, which `save` describes."""

    keep: int | None = None
    meta: Mapping[str, Any] | None = None
    check_replicas: bool = True
    wait: bool = True
    private: bool = False

    def problems(self, root: Place) -> list[str]:
        """Returns a message for each option that is invalid."""
        keep = [] if self.keep is None else count("keep", self.keep)
        return flag("wait", self.wait) + not_private(root, self.private) + keep + not_json(self.meta)

    def check(self, root: Place, plan: SavePlan) -> None:
        """Raises one error for all options that are invalid, or do not fit the state."""
        problems = self.problems(root)
        on_disk = [name for name, x in plan.tensors.items() if extent_of(x) is not None]
        if self.wait is False and on_disk:
            problems.append(
                f"wait=False: {len(on_disk)} tensors are stored on disk, and would be copied to memory ({on_disk[0]}, "
                "…): save them with wait=True"
            )
        if problems:
            raise CheckpointError("checkpoint.save", "invalid arguments", problems, "change them as said above")


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save. `parts[name]` lists the ranks that write the tensor, each with the elements that it writes.

    The plan is the same on all ranks, except for `tensors`.
    """

    step: int
    size: int
    leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    aliases: Mapping[str, str]
    treespec: Any
    parts: Mapping[str, tuple[tuple[int, Boxes], ...]]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    axes: Mapping[str, int] = field(default_factory=dict)  # the mesh axes that tensors are sharded over

    def digest(self) -> str:
        """Returns a digest of everything except `tensors` and `axes`, by which the ranks compare their plans."""
        facts = (
            self.step,
            self.size,
            list(self.leaves.items()),
            list(self.aliases.items()),
            self.treespec,
            list(self.parts.items()),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


class _Replicas(NamedTuple):
    """A shard or an unsharded tensor that several ranks hold, any of which can write it."""

    nbytes: int
    name: str
    boxes: Boxes
    ranks: list[int]


@dataclass(frozen=True)
class Job:
    """A save that has begun: every rank has the same plan, and the staging for its files exists."""

    ranks: ControlGroup
    root: Place
    staging: Staging
    plan: SavePlan
    run: RunRecord
    options: SaveOptions

    @property
    def what(self) -> str:
        return f"cannot save step {self.plan.step} to {self.root}"

    def gather(self, act: Callable[[], Any], form: Any) -> list[Any]:
        """Runs a phase of the save and returns the results of all ranks. If it fails on any rank, every rank removes
        the new checkpoint and raises."""
        return all_gather_values(
            self.ranks, "checkpoint.save", act, self.undo, form=form, what=self.what, failure=CheckpointError
        )

    def undo(self) -> None:
        """Removes everything of the new checkpoint."""
        if self.ranks.rank == 0:
            storage_of(self.root).undo(self.root, self.staging)


class _Options(TypedDict, total=False):
    keep: int | None
    meta: Mapping[str, Any] | None
    check_replicas: bool
    private: bool


@overload
def save(
    path: str | os.PathLike[str], state: Any, *, wait: Literal[True] = True, **options: Unpack[_Options]
) -> Place: ...
@overload
def save(
    path: str | os.PathLike[str], state: Any, *, wait: Literal[False], **options: Unpack[_Options]
) -> AsyncSave: ...
@overload
def save(path: str | os.PathLike[str], state: Any, *, wait: bool, **options: Unpack[_Options]) -> Place | AsyncSave: ...
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
    """Saves a state as `path/step-XXXXXXXX`, replacing an older checkpoint of the same step.

    Every rank calls it. It returns when the checkpoint is complete and on stable storage. Until then the previous
    checkpoint is the latest one, whichever process is killed at whatever moment. The checkpoint can be restored on any
    mesh. A tied parameter is stored once.

    Args:
        path: the root directory, on a filesystem that all ranks share; it is made if it does not exist. Or a location
            in an object store, such as s3://bucket/run, through fsspec (the extra `fsspec`). Only one save at a time.
        state: a State of a plain Step or of a CompiledStep: a pytree of tensors, numbers and strings with a field
            `step`. Tensors without a layout are taken to be replicated, that is, unsharded and equal on all ranks.
        keep: delete, after success, all but this many checkpoints of this run, counting this one. Checkpoints of other
            runs (`Index.run`) are neither counted nor deleted.
        meta: anything that JSON can hold, e.g. the run's configuration; rank 0's is stored.
        check_replicas: compare tensors that several ranks hold, by digests. Ranks that have diverged then cause an
            error, instead of a checkpoint with the values of one of them. The comparison reads these tensors once, on
            the device where they are; tensors stored on disk are not compared.
        wait: False to continue while the checkpoint is written: the data that this rank writes is copied to host
            memory, and a thread does the rest. An `AsyncSave` is returned, whose `wait()` returns the path. The next
            save waits for the running one. Not for states with tensors stored on disk, which the copy would bring into
            memory.
        private: True for files that only this user can read (0600, in directories of 0700), whatever the umask;
            otherwise files have the permissions that the umask leaves. Existing directories are not changed. Not for an
            object store, whose own policies determine who may read.

    Communication: five exchanges of small objects; each rank writes the shards it holds,
        and of the replicas of a shard or of an unsharded tensor one rank writes, spread over the ranks by size. With
        `wait=False`, there is one more, three of them take place before it returns, and the others go through a process
        group of the thread.

    Memory: one buffer of at most 16 MiB on the host, and two if tensors are stored on disk; with an object store about
        80 MiB, or five 9000ths of this rank's file if that is more. With `wait=False`, also the tensors that this rank
        reads of its state, kept for the next save until `close_mesh()`; in pinned memory if they come from a GPU.

    Raises:
        CheckpointError: on every rank, if anything failed on any rank; names each failing rank. The previous checkpoint
            is then still valid and the latest, and nothing is left of the new one. Also for replicas that differ, by
            tensor and rank; and with the error of the previous asynchronous save, if a rank has not called its
            `wait()`; and after the first save of this process, if the latest checkpoint is another run's. If older
            checkpoints cannot be deleted, this is only a warning.
        FzeroValueError: the code of the step has come to compute something different since it was traced, on some rank
            (docs/guides/verifying.md, Built-in checks). Nothing is written.
        DivergenceError: ranks did not call it within the mesh's timeout; they are named.

    Example:
        >>> import tempfile, typing
        >>> State = typing.NamedTuple("State", [("step", int), ("params", dict)])
        >>> root = tempfile.mkdtemp()
        >>> save(root, State(7, {"w": torch.ones(3)})).name
        'step-00000007'
    """
    return save_as(path, state, SaveOptions(keep, meta, check_replicas, wait, private))


def save_as(
    path: str | os.PathLike[str], state: Any, options: SaveOptions, run: RunRecord | None = None
) -> Place | AsyncSave:
    """Does `save` as a part of a run; None for the run of this process in that directory."""
    mesh = next((tag[1] for x in tree.tensors(state) if (tag := leaf_of(x)) is not None), None)
    alone = contextlib.nullcontext() if mesh is None else mesh.alone("checkpoint.save")
    # `alone` keeps steps from changing the state while it is read or copied. The lock keeps two threads from starting
    # saves at the same time.
    with alone, async_save.one_at_a_time:
        check_computed(state, "checkpoint.save")
        job = begin(world(), path, state, options, run)
        if options.wait:
            return carry_out(job)

        def rest(ranks: ControlGroup, copies: dict[str, torch.Tensor]) -> Place:
            return carry_out(replace(job, ranks=ranks, plan=replace(job.plan, tensors=copies)))

        return async_save.start(job.ranks, job.plan.step, _read(job), rest, job.what, job.undo)


def begin(
    ranks: ControlGroup,
    path: str | os.PathLike[str],
    state: Any,
    options: SaveOptions,
    run: RunRecord | None = None,
) -> Job:
    """Waits for the running save, makes the plan of the next one on all ranks, and begins the staging for its files.

    Arguments and errors are those of `save_as`. To be called with `async_save.one_at_a_time` held.
    """
    made: list[tuple[Place, SavePlan]] = []

    def plan_save() -> str:
        root = as_path(path)
        async_save.finish()  # it may raise only on some ranks: those that have not called `wait`
        check_whole(state, "checkpoint.save")
        plan = make_plan(state, ranks.rank, ranks.size)
        options.check(root, plan)
        storage_of(root)  # checks on every rank that it has the necessary packages
        made.append((root, plan))
        return plan.digest()

    what = f"cannot save to {path}"
    digests = all_gather_values(ranks, "checkpoint.save", plan_save, form=str, what=what, failure=CheckpointError)
    root, plan = made[0]
    # With different plans, some elements would be written twice and others not at all.
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        problems = [
            f"the state of rank {r} differs from that of rank 0 in step, tree, shapes, dtypes or layouts" for r in odd
        ]
        raise CheckpointError("checkpoint.save", what, problems, "save the same state, at the same step, on every rank")
    record = run_record.record_of(root) if run is None else run

    def stage() -> tuple[str, str]:
        if ranks.rank:
            return "", ""
        if storage_of(root).has(root / INDEX):
            fix = f"give the directory that it is in: {root.parent}"
            raise CheckpointError("checkpoint.save", f"{root} is a checkpoint, not a directory of checkpoints", fix=fix)
        run_record.check_latest(root, record, _latest(root))
        staging = storage_of(root).begin(root, step_name(plan.step), options.private)
        return str(staging.directory), staging.mark

    form = tuple[str, str]
    begun = all_gather_values(ranks, "checkpoint.save", stage, form=form, what=what, failure=CheckpointError)
    staging = Staging(as_path(begun[0][0]), begun[0][1])
    return Job(ranks, root, staging, plan, record, options)


def carry_out(job: Job) -> Place:
    """Compares replicas, then writes and commits a save that has begun."""
    ranks, plan = job.ranks, job.plan
    problems = []
    if job.options.check_replicas and ranks.size > 1:
        problems = differing(lambda: replicas_of(plan.tensors), plan.axes, ranks.size, job.gather)
    if problems:
        job.undo()
        fix = "go back to the last checkpoint; check_replicas=False saves what one of these ranks holds"
        what = f"{job.what}: the ranks hold different values of the same tensors"
        raise CheckpointError("checkpoint.save", what, problems, fix)
    # Rank 0 commits only after every rank has reported its file as durable.
    written = job.gather(lambda: write_rank_file(job.staging, plan, ranks.rank), safetensors_format.Written)
    name, digest = job.gather(lambda: commit(job, written) if ranks.rank == 0 else ("", ""), tuple[str, str])[0]
    # On every rank, because another one may be rank 0 when a lost rank has been replaced.
    job.run.known = {*(job.run.known or ()), digest}
    job.run.last = Saved(name, plan.step, plan.leaves)
    return job.root / step_name(plan.step)


def _read(job: Job) -> dict[str, torch.Tensor]:
    """Returns the tensors that this rank reads: those that it writes parts of, and those that are compared."""
    plan, rank = job.plan, job.ranks.rank
    names = {name for name, parts in plan.parts.items() if any(r == rank for r, _ in parts)}
    if job.options.check_replicas and job.ranks.size > 1:
        names.update(replicas_of(plan.tensors))
    return {name: x for name, x in plan.tensors.items() if name in names}


def make_plan(state: Any, rank: int, size: int, among: Sequence[int] | None = None) -> SavePlan:
    """Returns the plan of which rank writes which elements of which tensor; the same on every rank.

    A shard that only one rank holds is written by that rank. Replicated tensors and shards with replicas are
    assigned, largest first, to whichever of their holders has the fewest bytes so far (the lowest such rank).

    Args:
        among: the ranks that write. Elements that none of them holds are not written. By default, all ranks.

    Raises:
        CheckpointError: the state cannot be stored; the error lists every reason.
    """
    encoded_tree, tensors, problems = treespec.encode(lasting(state))
    step = _step(state, problems)
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if (original := first.setdefault(id(tensor), name)) != name:
            aliases[name] = original
    leaves: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    # By axes and stage: for each shard, the ranks that hold it. An unsharded tensor is one shard that all ranks hold.
    holders: dict[tuple[tuple[str, ...], Only | None], list[list[int]]] = {((), None): [list(range(size))]}
    loads = [0] * size
    parts: dict[str, list[tuple[int, Boxes]]] = {}
    shared: list[_Replicas] = []
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
            # Cached by axes, because computing it goes through all ranks of the mesh, and a state has thousands of
            # tensors.
            holders[axes, only] = holders_of(tag[1].axes, axes, only)
        sharding = Sharding((), 1) if tag is None else tag[0].sharding(tag[1])
        for index, ranks in enumerate(holders[axes, only]):
            boxes = sharding.boxes(shape, index)
            nbytes = boxes.numel * tensor.dtype.itemsize
            ranks = ranks if among is None else [r for r in ranks if r in among]
            if not (nbytes and ranks):
                continue
            if len(ranks) > 1:
                shared.append(_Replicas(nbytes, name, boxes, ranks))
            else:
                parts[name].append((ranks[0], boxes))
                loads[ranks[0]] += nbytes
    if problems:
        fix = "save the State that train_step or compile returned"
        raise CheckpointError("checkpoint.save", f"this state cannot be saved: {len(problems)} reasons", problems, fix)
    # Replicas are assigned after everything that only one rank can write, so that they even out the loads.
    for name, writer, boxes in _assign_replicas(shared, loads):
        parts[name].append((writer, boxes))
    axes = next((tag[1].axes for x in tensors.values() if (tag := leaf_of(x)) is not None), {})
    return SavePlan(
        step,
        size,
        leaves,
        aliases,
        encoded_tree,
        # In the order of the elements: `_inconsistent` in index.py finds gaps and overlaps in one pass over them.
        {name: tuple(sorted(p, key=lambda x: (x[1].place, x[1].start))) for name, p in parts.items()},
        tensors,
        axes,
    )


def _assign_replicas(shared: Sequence[_Replicas], loads: Sequence[int]) -> list[tuple[str, int, Boxes]]:
    """Returns which rank writes each shard that several ranks hold: name, rank and elements of each.

    The largest are assigned first, each to whichever of its holders has the fewest bytes so far. Ties go to the first
    such rank, so that all ranks compute the same plan.

    Args:
        loads: by rank, the bytes that it writes in any case.
    """
    loads = [*loads]
    assigned = list[tuple[str, int, Boxes]]()
    for nbytes, name, boxes, ranks in sorted(shared, key=lambda x: -x.nbytes):
        writer = min(ranks, key=lambda r: loads[r])
        loads[writer] += nbytes
        assigned.append((name, writer, boxes))
    return assigned


def file_name(rank: int, size: int) -> str:
    return f"rank-{rank:05d}-of-{size:05d}.safetensors"


def written_by(plan: SavePlan, rank: int) -> dict[str, Boxes]:
    """Returns the parts that a rank writes: at most one per tensor."""
    return {name: boxes for name, parts in plan.parts.items() for r, boxes in parts if r == rank}


def write_rank_file(staging: Staging, plan: SavePlan, rank: int) -> safetensors_format.Written:
    """Writes this rank's parts."""
    mine = written_by(plan, rank)

    def entry(name: str) -> safetensors_format.Entry:
        boxes = mine[name]
        shape = part_shape(boxes.shape, boxes.along)
        # A complete tensor, or a complete shard along dims, keeps its shape; a range of its elements has none.
        return safetensors_format.Entry(
            name, plan.leaves[name][1], shape if boxes.numel == math.prod(shape) else (boxes.numel,)
        )

    def blocks(entry: safetensors_format.Entry) -> Iterator[torch.Tensor]:
        tensor, left = plan.tensors[entry.name], entry.nbytes  # without the padding, which is at the end
        on_disk = extent_of(tensor) is not None
        for piece in disk.pieces(tensor) if on_disk else [tensor.detach().resolve_conj().resolve_neg().contiguous()]:
            data = safetensors_format.as_bytes(piece)[:left]
            left -= data.numel()
            yield data

    offsets = {name: {_OFFSETS: found} for name, boxes in mine.items() if (found := _saved_offsets(boxes)) is not None}
    return safetensors_format.write(
        staging.directory / staging.name(file_name(rank, plan.size)),
        [entry(name) for name in mine],
        blocks,
        {_SHARDING: json.dumps(offsets, separators=(",", ":"))},
    )


def _saved_offsets(boxes: Boxes) -> list[int] | None:
    """Returns where a part begins in its full tensor, in the form of torch.distributed.checkpoint, whose
    `HuggingFaceStorageReader` then lists the tensor.

    A range of the elements counts as part of a flattened tensor. None for parts that are no rectangle of the tensor:
    shards of several groups of a dim, and ranges of shards along dims.
    """
    if boxes.numel != math.prod(part_shape(boxes.shape, boxes.along)):
        return None if boxes.along else [boxes.start]
    return None if any(len(ranges) > 1 for ranges in boxes.ranges) else [ranges[0][0] for ranges in boxes.ranges]


def commit(job: Job, written: Sequence[safetensors_format.Written]) -> tuple[str, str]:
    """Publishes the files that the ranks have written as the latest checkpoint. Returns the name of its run, and the
    digest of its index."""
    root, staging, plan, run = job.root, job.staging, job.plan, job.run
    storage, target = storage_of(root), root / step_name(plan.step)
    names = [staging.name(file_name(rank, plan.size)) for rank in range(plan.size)]
    for rank, (name, file) in enumerate(zip(names, written, strict=True)):
        _check_visible(staging.directory / name, rank, file.bytes)
    files = {name: File(w.bytes, w.sha256, w.crc32) for name, w in zip(names, written, strict=True)}
    parts = {
        name: [StoredPart(names[r], name, boxes, written[r].offsets[name]) for r, boxes in ps]
        for name, ps in plan.parts.items()
    }
    # Before `publish`, because they look at the checkpoint that is the latest until then.
    latest = _latest(root)
    run_record.check_latest(root, run, latest)
    run_name, warning = run_record.run_name(root, plan, run, latest)
    index = dump(to_json(plan, parts, job.options.meta or {}, files, run_name))
    digest = head(index)[1] or ""
    if run.known is not None:
        run.known.add(digest)  # also if `publish` fails after the index was written
    retired = storage.publish(root, staging, target.name, index)
    if warning is not None:
        logger.warning(warning)
    try:
        # After publishing: if the process is killed here, there are too many checkpoints, but never too few.
        if job.options.keep is not None:
            retired += run_record.superseded(root, plan.step, run_name, job.options.keep)
        for directory in retired:
            storage.retire(root, directory)
    except (OSError, CheckpointError) as error:
        if root not in _warned:
            _warned.add(root)
            text = "fzero.checkpoint.save: older checkpoints under %s could not be deleted: %s"
            logger.warning(text, root, error)
    return run_name, digest


def _latest(root: Place) -> Place | None:
    try:
        return newest(root)
    except (CheckpointError, OSError):  # there is none, or it is damaged: this save replaces it
        return None


def _step(state: Any, problems: list[str]) -> int:
    """Returns the step of a state. If it is not a valid step number, adds a problem and returns 0."""
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
    """Returns why a tensor cannot be stored, or None if it can."""
    if tensor.dtype not in safetensors_format.CODES:
        return f"the dtype {tensor.dtype} cannot be stored"
    if (tensor.device.type == "meta" and extent_of(tensor) is None) or tensor.layout != torch.strided:
        return f"a tensor on the meta device or of layout {tensor.layout} has no bytes to store"
    if (tag := leaf_of(tensor)) is None:
        return None
    leaf, mesh = tag
    if (mesh.rank, mesh.size) != (rank, size):
        return f"it is rank {mesh.rank}'s on a mesh of {mesh.size}, saved by rank {rank} of {size}"
    if tuple(tensor.shape) != leaf.stored_shape(mesh) or tensor.dtype != leaf.dtype:
        return (
            f"it is {tree.form(tensor.shape, tensor.dtype)} where its layout says "
            f"{tree.form(leaf.stored_shape(mesh), leaf.dtype)}"
        )
    return None


def not_json(meta: Any) -> list[str]:
    """Returns why `meta` cannot be stored as JSON, if it cannot."""
    try:
        # Compared after a round trip, because JSON silently turns tuples into lists and keys into text.
        if parsed(json.dumps(dict(meta or {}), allow_nan=False)) != dict(meta or {}):
            return ["meta: JSON would change it (tuples, or keys that are not str)"]
    except (TypeError, ValueError, RecursionError) as error:
        return [f"meta: JSON cannot hold it: {error}"]
    return []


def not_private(path: str | os.PathLike[str], private: Any) -> list[str]:
    """Returns a message if `private` is invalid, or if checkpoints at this path cannot be made private to this user."""
    if not (problems := flag("private", private)) and private and isinstance(as_path(path), Url):
        problems = ["private=True: objects of a store have no permissions of files; its policies say who may read"]
    return problems


def _check_visible(file: Place, rank: int, nbytes: int) -> None:
    """Raises an error if a file that another rank has written is not here, or has another size."""
    try:
        found = storage_of(file).size(file)
    except FileNotFoundError:
        what = f"the file that rank {rank} wrote is not visible from rank 0"
        fix = "save to a filesystem that all ranks share"
        raise CheckpointError("checkpoint.save", what, [str(file)], fix) from None
    if found != nbytes:
        raise CheckpointError("checkpoint.save", f"{file} has {found} bytes, rank {rank} wrote {nbytes}")
