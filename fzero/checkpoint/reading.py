"""Reads a checkpoint: only the byte ranges that a rank needs, with their checksums verified as they are read."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fzero._utils.progress import moved
from fzero.checkpoint import safetensors_format
from fzero.checkpoint.index import Index, agreed, describe, differences, is_gone, mismatch
from fzero.checkpoint.peer_reads import Piece
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import Place
from fzero.comm import control_group
from fzero.comm.control_group import ALONE, run_on_all_ranks, world
from fzero.errors import CheckpointError
from fzero.memory import disk
from fzero.mesh import Mesh
from fzero.sharding import shard_regions
from fzero.sharding.layout import Leaf, place
from fzero.sharding.shard_regions import Boxes, claimed

T = TypeVar("T")

_THREADS = 8
_BATCH = 1 << 26  # bytes of one file that one thread reads
_GROUP = 1 << 30  # bytes of tensors read at a time; a state that is moved exists twice only to this extent
_WINDOW = 1 << 26  # bytes that are in memory at a time of a tensor stored on disk
_REPAIR = "restore another step, or copy this one again from where it was saved"


def read(
    path: str | os.PathLike[str] | Index,
    wanted: Mapping[str, Leaf],
    mesh: Mesh,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads this rank's shards of the wanted tensors, bit for bit as saved, from a checkpoint of any mesh and layout.

    Args:
        path: the directory of one step, or the root of several, of which the latest is read, as the first rank finds
            it; or what `describe` returned.
        wanted: by dotted name (`fz.tree.names`), the layout that each tensor is to have. Names in the checkpoint
            that are not wanted are not read; `check` compares complete states. Names with the same `Leaf` (path
            included) are one tied tensor.
        mesh: each tensor has the stored shape of its shard on this rank, zero-padded, and is placed on this mesh: on
            `mesh.device` for the tier "device", in host memory for any other tier.
        into: by path of the leaf, tensors to fill and return instead of new ones. Those of tensors stored on disk
            must be among them.

    Every rank calls it.

    Communication: on a mesh of several processes, up to three exchanges of a small object, so that all ranks read
        the same checkpoint and all of them raise if one does. Each rank reads the bytes of its own ranges, rounded to
        whole MiB.

    Memory: the result, and up to 8 buffers of 16 MiB on the host; if tensors are stored on disk, additional buffers of
        96 MiB.

    Raises:
        CheckpointError: as for `describe`; tensors that are missing or of another shape or dtype; files that are
            missing, truncated or damaged in the bytes that were read, with the tensors that these belong to. All
            problems are in one error. Also a checkpoint that was deleted or replaced while it was read; and ranks that
            would read different checkpoints, with the directory and the step of each, before anything is read.

    Example:
        >>> import tempfile, typing
        >>> from fzero import checkpoint
        >>> from fzero.sharding.layout import Layout
        >>> State = typing.NamedTuple("State", [("step", int), ("params", dict)])
        >>> root = tempfile.mkdtemp()
        >>> _ = checkpoint.save(root, State(7, {"w": torch.arange(5.0)}))
        >>> leaf = Leaf("params['w']", "params", (5,), Layout(torch.float32, ("data",)))
        >>> read(root, {"params.w": leaf}, Mesh({"data": 2}, rank=1, device=torch.device("cpu")))["params.w"]
        tensor([3., 4., 0.])
    """
    ranks = ALONE if mesh.device_mesh is None else world()
    # All ranks agree on the checkpoint first, and if one raises an error, all do.
    index = agreed(ranks, path)
    return run_on_all_ranks(
        ranks,
        index.owner,
        lambda: _read(index, wanted, mesh, into or {}),
        what=f"cannot read {index if index.peer_reads else index.directory}",
        failure=CheckpointError,
    )


def verify(path: str | os.PathLike[str]) -> Index:
    """Reads an entire checkpoint, compares every file with its sha256 and checksums, and returns its index.

    Runs in one process. Memory: 8 buffers of 1 MiB, or of 32 MiB for an object store.

    Raises:
        CheckpointError: lists every file that is missing, truncated or damaged, and the affected tensors.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(root, step.init({"w": torch.ones(2)}))
        >>> verify(root).step
        0
    """
    index = describe(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = [p for found in pool.map(lambda name: _damage(index, name), index.files) for p in found]
    if problems:
        raise damaged(index, problems)
    return index


def missing(index: Index, files: Iterable[str]) -> list[str]:
    """Returns one message for each of these files that does not exist with its full length."""
    problems = []
    for name in files:
        try:
            size = storage_of(index.directory).size(index.directory / name)
        except OSError as error:
            size = -1
            problems.append(
                f"{name}: {'missing' if isinstance(error, FileNotFoundError) else error}; "
                f"{_held(index, name, 0, index.files[name].bytes)}"
            )
        expected = index.files[name].bytes
        if 0 <= size < expected:
            problems.append(f"{name}: truncated, {size} of {expected} bytes; {_held(index, name, size, expected)}")
        elif size > expected:
            problems.append(f"{name}: {size} bytes where {expected} were written")
    return problems


class RunReader:
    """Reads runs of elements of full tensors, a block of 16 MiB at a time. Runs in the same block share one read."""

    def __init__(self, index: Index):
        self._index = index
        # The tensor of the block, and its first and last element.
        self._name, self._start, self._stop = "", 0, 0
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def elements(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yields the bytes of the elements `start` to `stop` of a tensor, uint8[n]. Each is overwritten by the next.

        Raises:
            CheckpointError: a chunk is damaged.
        """
        itemsize = self._index.leaves[name][1].itemsize
        while start < stop:
            if name != self._name or not self._start <= start < self._stop:
                self._load(name, start)
            end = min(stop, self._stop)
            yield self._block[(start - self._start) * itemsize : (end - self._start) * itemsize]
            start = end

    def _load(self, name: str, start: int) -> None:
        """Makes the elements from `start` on the current block."""
        stored, (shape, dtype) = self._index.aliases.get(name, name), self._index.leaves[name]
        wanted = shard_regions.whole(shape).within(start, start + safetensors_format.BLOCK // dtype.itemsize)
        if self._block.numel() < (nbytes := wanted.numel * dtype.itemsize):
            self._block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        jobs = defaultdict[str, list[Piece]](list)
        _cut(self._index, stored, wanted, self._block[:nbytes], jobs)
        with ThreadPoolExecutor(1, thread_name_prefix="fzero-checkpoint") as pool:
            reading = _Reading(self._index, pool)
            reading.run(jobs)
        if problems := reading.faults(all_leaves=True):
            raise damaged(self._index, problems)
        self._name, self._start, self._stop = name, start, start + wanted.numel


def _read(
    index: Index, wanted: Mapping[str, Leaf], mesh: Mesh, into: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Reads this rank's shards of the wanted tensors from the checkpoint of an index.

    Everything that can be checked without reading data is checked first: names, shapes, dtypes, ties, and the sizes
    of the files. Then tensors in memory are read in groups of at most `_GROUP` bytes, and tensors stored on disk one by
    one.
    """
    expected = {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    if problems := differences(index, expected, subset=True):
        raise mismatch(index, problems, len(wanted))
    # Names with an equal `Leaf`, path included, are one tied tensor in the new state. It can be filled only if the
    # checkpoint also has one tensor for them.
    first: dict[Leaf, str] = {}
    tied = {name: first.setdefault(leaf, name) for name, leaf in wanted.items()}
    stored = {name: index.aliases.get(name, name) for name in wanted}
    if problems := [
        f"{name} and {tied[name]}: one tensor here, two in the checkpoint"
        for name in wanted
        if stored[name] != stored[tied[name]]
    ]:
        what = f"{index} ties different tensors than this state"
        raise CheckpointError(index.owner, what, problems, "build the state without that tie")
    todo = [name for name in wanted if tied[name] == name]
    held = {name: wanted[name].boxes(mesh) for name in todo}
    touched = {p.file for name in todo for p in index.parts[stored[name]] if held[name].meets(p.boxes)}
    # Checked before anything is read or allocated, because reading the rest of a large state first would waste minutes.
    if index.peer_reads is None and (problems := missing(index, sorted(touched))):
        raise damaged(index, problems)
    on_disk = [name for name in todo if wanted[name].layout.tier == "disk"]
    if problems := [
        f"{wanted[name].path}: is stored on disk, and no file for it is given"
        for name in on_disk
        if wanted[name].path not in into
    ]:
        raise CheckpointError(
            "checkpoint.read",
            f"cannot read {index.directory}",
            problems,
            "call restore of the step, which creates the files",
        )
    out: dict[str, torch.Tensor] = {}
    # A rank that fails between transfers would leave the other ranks waiting in one.
    guard = contextlib.nullcontext() if index.peer_reads is None else control_group.unbroken(mesh)
    with guard, ThreadPoolExecutor(_THREADS, thread_name_prefix="fzero-checkpoint") as pool:
        reading = _Reading(index, pool)
        in_memory = [name for name in todo if wanted[name].layout.tier != "disk"]
        nbytes: Callable[[str], int] = lambda name: wanted[name].shard_numel(mesh) * wanted[name].dtype.itemsize  # noqa: E731
        for group in grouped(in_memory, nbytes, _GROUP):
            jobs: dict[str, list[Piece]] = defaultdict(list)
            for name in group:
                leaf = wanted[name]
                device = mesh.device if leaf.layout.tier == "device" else torch.device("cpu")
                # Zeros, because no file has the padding.
                if (given := into.get(leaf.path)) is None:
                    value = torch.zeros(leaf.stored_shape(mesh), dtype=leaf.dtype, device=device)
                else:
                    value = given.zero_()
                out[name] = place(value, leaf, mesh)
                _cut(index, stored[name], held[name], safetensors_format.as_bytes(value), jobs)
            reading.run(jobs)
        for name in on_disk:
            out[name] = into[wanted[name].path]
            reading.to_disk(stored[name], held[name], out[name])
    if problems := reading.faults():
        raise damaged(index, problems)
    return {name: out[tied[name]] for name in wanted}


class _Reading:
    """Fills memory and disk from the files of a checkpoint, several pieces at a time, and collects the problems
    found."""

    def __init__(self, index: Index, pool: ThreadPoolExecutor):
        self._index, self._pool = index, pool
        self._problems: list[str] = []
        self._bad: dict[tuple[str, int], dict[str, None]] = {}

    def run(self, jobs: Mapping[str, list[Piece]], nbytes: int = _BATCH) -> None:
        """Reads the pieces of each file. A thread reads at most `nbytes` at a time.

        If the data is spread over the ranks, all ranks must call it.
        """
        if (peer_reads := self._index.peer_reads) is not None:
            here = self._index.files
            self._problems += peer_reads.fetch({file: pieces for file, pieces in jobs.items() if file not in here})
            jobs = {file: pieces for file, pieces in jobs.items() if file in here}
        batches = [(file, batch) for file, pieces in jobs.items() for batch in _batches(pieces, nbytes)]
        for (file, pieces), (chunks, problem) in zip(
            batches, self._pool.map(lambda job: self._fill(*job), batches), strict=True
        ):
            moved(sum(len(piece.out) for piece in pieces))
            self._problems += [problem] if problem else []
            for chunk, leaf in chunks:
                self._bad.setdefault((file, chunk), {})[leaf] = None

    def _fill(self, file: str, pieces: list[Piece]) -> tuple[list[tuple[int, str]], str | None]:
        return fill(self._index.directory / file, self._index.files[file].crc32, pieces)

    def to_disk(self, name: str, held: Boxes, out: torch.Tensor) -> None:
        """Writes these elements of a tensor, followed by zeros, as the value of a tensor stored on disk."""
        size = _WINDOW // out.dtype.itemsize
        with disk.write_pieces(out) as write:
            for start in range(0, out.numel(), size):  # with padding: equally many iterations on every rank
                wanted, jobs = held.within(start, start + size), defaultdict[str, list[Piece]](list)
                part = torch.empty(wanted.numel, dtype=out.dtype, device="cpu")
                _cut(self._index, name, wanted, safetensors_format.as_bytes(part), jobs)
                self.run(jobs, _WINDOW // _THREADS)
                write(part)
            write(torch.zeros(out.numel() - held.numel, dtype=out.dtype, device="cpu"))

    def faults(self, all_leaves: bool = False) -> list[str]:
        """Returns one message for each problem and damaged chunk, with the tensors that were read there, or all tensors
        stored there if `all_leaves`."""
        return self._problems + [
            _bad_chunk(self._index, file, chunk, None if all_leaves else list(leaves))
            for (file, chunk), leaves in sorted(self._bad.items())
        ]


def _cut(index: Index, name: str, wanted: Boxes, out: torch.Tensor, jobs: dict[str, list[Piece]]) -> None:
    """Adds the pieces that make up these elements of a tensor. `out` is the memory for their bytes.

    Elements that several parts contain are read from the first of these parts.

    Raises:
        CheckpointError: some of the elements are in no part, as on a host whose memory only has the shards of its
            own ranks.
    """
    itemsize, left = index.leaves[name][1].itemsize, [(0, wanted.numel)] if wanted.numel else []
    for part in index.parts[name]:
        if not left:
            return
        # Several files may hold the same elements, for example replicas in the memory of ranks. Elements that were
        # found once are not looked for again.
        runs, left = claimed(left, wanted.runs(part.boxes))
        for here, there, numel in runs:
            piece = out[here * itemsize : (here + numel) * itemsize]
            jobs[part.file].append(Piece(part.offset + there * itemsize, piece, name))
    if lacking := sum(stop - start for start, stop in left):
        what = f"{index.directory} lacks elements that this rank needs"
        problems = [f"{name}: {lacking} of {wanted.numel}"]
        raise CheckpointError("checkpoint", what, problems, "start from the last checkpoint on disk")


def _batches(pieces: list[Piece], nbytes: int) -> Iterable[list[Piece]]:
    """Splits the pieces of one file, in file order, so that several threads can share a large file."""
    # In file order, so that pieces in the same chunk share one read and one checksum.
    cut = (
        Piece(piece.offset + at, piece.out[at : at + nbytes], piece.leaf)
        for piece in sorted(pieces, key=lambda p: p.offset)
        for at in range(0, piece.out.numel(), nbytes)
    )
    return grouped(cut, lambda piece: piece.out.numel(), nbytes)


def fill(file: Place, crc32: str | None, pieces: list[Piece]) -> tuple[list[tuple[int, str]], str | None]:
    """Reads pieces of one file. Returns the damaged chunks, each with the tensor that was read there, and any other
    problem."""
    try:
        with safetensors_format.Ranges(file, crc32) as ranges:
            return [
                (chunk, piece.leaf) for piece in pieces for chunk in ranges.read_into(piece.out, piece.offset)
            ], None
    except (OSError, safetensors_format.FormatError) as error:
        return [], f"{file.name}: {error}; it holds {_few([p.leaf for p in pieces])}"


def _damage(index: Index, name: str) -> list[str]:
    """Returns a message for everything that is wrong with one file of a checkpoint, which is read completely."""
    if problems := missing(index, [name]):
        return problems
    file, digest, bad = index.files[name], hashlib.sha256(), list[int]()
    span = storage_of(index.directory).span
    try:
        with safetensors_format.Ranges(index.directory / name, file.crc32) as ranges:
            for start in range(0, file.bytes, span):
                for view in ranges.views(start, min(span, file.bytes - start)):
                    digest.update(view)
            bad = sorted(ranges.bad)
    except (OSError, safetensors_format.FormatError) as error:
        return [f"{name}: {error}"]
    # The checksums say where a file is damaged; its sha256 only matters if none of them does.
    if not bad and digest.hexdigest() != file.sha256:
        return [f"{name}: its sha256 is {digest.hexdigest()}, {file.sha256} was written"]
    return [_bad_chunk(index, name, chunk) for chunk in bad]


def _bad_chunk(index: Index, file: str, chunk: int, leaves: list[str] | None = None) -> str:
    start, stop = chunk * safetensors_format.CHUNK, min((chunk + 1) * safetensors_format.CHUNK, index.files[file].bytes)
    return (
        f"{file}: damaged between bytes {start} and {stop}; "
        f"{_held(index, file, start, stop) if leaves is None else 'this range contains ' + _few(leaves)}"
    )


def _held(index: Index, file: str, start: int, stop: int) -> str:
    """Returns a message that names the tensors in a range of bytes."""
    hit = [
        name
        for name, parts in index.parts.items()
        if any(
            p.file == file and p.offset < stop and start < p.offset + p.boxes.numel * index.leaves[name][1].itemsize
            for p in parts
        )
    ]
    return f"there {'lie' if len(hit) > 1 else 'lies'} {_few(hit)}" if hit else "this range contains only the header"


def _few(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more tensors" if len(names) > 5 else "")


def grouped(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Splits items, in order, into groups of at most `limit` bytes, or of one larger item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + nbytes(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += nbytes(item)
    if group:
        yield group


def damaged(index: Index, problems: list[str]) -> CheckpointError:
    """Returns the error for files that do not match the index."""
    # A run with `keep=` deletes old checkpoints while others read them. That is no damage, and has another fix.
    if is_gone(index):
        what = f"the checkpoint {index.directory} was deleted or replaced while it was read"
        fix = "read again, from the root; let keep= of the run that saves keep more than what others read"
        return CheckpointError("checkpoint", what, fix=fix)
    return CheckpointError(index.owner, f"{index} is damaged", problems, _REPAIR)
