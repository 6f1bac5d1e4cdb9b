"""Reads other people's safetensors files directly into shards: each rank reads the byte ranges that it holds, and all
ranks together read each byte once.

Exact ranges are read (such files have no checksums), through buffers of 4 MiB. If several ranks hold the same data,
because a tensor is replicated or a shard has replicas, each of them reads a part of every 4 MiB, and the parts are
all-gathered. The files are in Hugging Face's layout, or a single one. The caller determines the layout of each tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import path_like
from fzero._utils.bounded_json import Malformed, formed, parsed
from fzero.checkpoint import tensor_digests
from fzero.checkpoint.peer_reads import Piece
from fzero.checkpoint.reading import fill
from fzero.checkpoint.safetensors_format import ElementRun, Entry, read_header
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import Place, as_path
from fzero.checkpoint.weight_export import WEIGHTS, WEIGHTS_INDEX
from fzero.checkpoint.weight_quantizing import Conversion, UnquantizableError
from fzero.comm import control_group
from fzero.comm.collectives import gather
from fzero.errors import CheckpointError, FzeroTypeError
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf
from fzero.tree import form

WINDOW = 4 << 20  # bytes, of all ranks together that hold the same data
_PART = 1 << 20  # bytes that are converted at a time
_ALIGNED = 16  # bytes: no element of any dtype crosses the boundary of two windows
_THREADS = 4
_COPY = "copy or download the files again"

Sources = Mapping[str, Sequence[ElementRun]]
"""By the dotted name of a tensor: the runs that make it up, in order."""
Conversions = Mapping[str, Conversion]
"""By the dotted name of a tensor: how it is computed from the elements of its runs, if they are not its own."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a directory of safetensors files by their stored names: each one's file, offset, shape and
    dtype."""

    path: Place
    entries: Mapping[str, tuple[Place, Entry]]
    tied: Mapping[str, str] = field(default_factory=dict)

    def whole(self, key: str) -> tuple[ElementRun, ...]:
        """Returns the runs for a tensor that is identical to a stored tensor."""
        numel = self.entries[key][1].numel
        return (ElementRun(0, numel, key, 0),) if numel else ()


def open_weights(path: str | os.PathLike[str], mesh: Mesh) -> Weights:
    """Returns the tensors of a directory, or of one file; no data is read.

    Every rank calls it. All ranks see the same tensors, or all raise.

    Raises:
        CheckpointError: files that are missing, truncated or malformed; all of them in one error.
    """
    entries, tied = control_group.run_on_all_ranks(mesh.control, "load", lambda: entries_of(path))
    found = Weights(as_path(path), entries, tied)
    seen = {name: (file.name, *vars(entry).values()) for name, (file, entry) in entries.items()}
    tensor_digests.same(
        mesh,
        "load",
        lambda: {"the files": (repr(sorted(seen.items())), ())},
        "give every rank the same directory, on a filesystem that all ranks share",
    )
    return found


def unfit(weights: Weights, sources: Sources, wanted: Mapping[str, Leaf], conversions: Conversions) -> list[str]:
    """Returns a message for each tensor that cannot be made from the stored ones: because of other shapes, or dtypes
    that are not converted. Tensors with a conversion are not checked: whoever defines the conversion does."""
    out = []
    for name, runs in sources.items():
        if name in conversions:
            continue
        leaf, keys = wanted[name], dict.fromkeys(run.key for run in runs)
        stored = [weights.entries[k][1] for k in keys]
        if len(stored) == 1 and len(runs) == 1 and runs[0].at == 0 and stored[0].numel == runs[0].stop:
            other = stored[0].shape != leaf.shape
        else:
            other = sum(run.stop - run.start for run in runs) != leaf.numel
        said = ", ".join(form(e.shape, e.dtype) for e in stored[:2]) + (", ..." if len(stored) > 2 else "")
        expected = form(leaf.shape, leaf.dtype)
        if other and not (leaf.numel == 0 and not runs):
            out.append(f"{name}: the files have {said}, expected {expected}")
        elif odd := [e for e in stored if e.dtype != leaf.dtype and not (_converts(e.dtype) and _converts(leaf.dtype))]:
            out.append(f"{name}: {form(odd[0].shape, odd[0].dtype)} in the files is not converted to {expected}")
    return out


def _converts(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be converted by themselves. Those of 8 bits have scales that are stored
    elsewhere."""
    return dtype.is_floating_point and dtype.itemsize > 1


def read_leaves(
    weights: Weights, sources: Sources, wanted: Mapping[str, Leaf], mesh: Mesh, conversions: Conversions
) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
    """Yields this rank's shard of each tensor, as consecutive pieces of up to 1 MiB in the tensor's dtype, padding
    included.

    The pieces are on the mesh's device if the ranks have gathered them, otherwise on the host.

    Args:
        sources: of the tensors to read.
        wanted: their layouts, by name.
        conversions: of those that are computed from what is read.

    Each piece must be used before the next one is requested. Every rank must iterate over all tensors. A rank that
    cannot use them must drop what it gets, because the other ranks gather its parts.

    Memory: 12 MiB.

    Raises:
        CheckpointError: at the end, with everything that could not be read.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    problems: list[str] = []
    # In the order of the files, so that they are read sequentially. Tensors whose replicas are on the same ranks form
    # one stream, whose windows these ranks gather.
    for name in sorted(sources, key=lambda n: _place(weights, sources[n])):
        groups.setdefault(_replicas(wanted[name], mesh), []).append(name)
    # In the same order on every rank, because the windows are gathered.
    for axes in sorted(groups):
        leaves = {name: wanted[name] for name in groups[axes]}
        pieces = _pieces(weights, sources, leaves, mesh, conversions)
        with contextlib.closing(_windows([p for ps in pieces.values() for p in ps], mesh, axes, problems)) as windows:
            stream = _Stream(windows)
            for name, leaf in leaves.items():
                yield name, _parts(stream, pieces[name], leaf, mesh, conversions.get(name), problems)
            # Without this, a rank that was not asked for all parts would leave the others waiting in a gather.
            for _ in windows if axes else ():
                pass
    if problems:
        raise CheckpointError("load", f"cannot read {weights.path}", dict.fromkeys(problems), _COPY)


def held(leaf: Leaf, mesh: Mesh) -> list[tuple[int, int]]:
    """Returns the ranges of the flattened full tensor that this rank holds, in the order in which they are stored."""
    return leaf.boxes(mesh).spans


def _replicas(leaf: Leaf, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which every rank holds the same shard of a tensor."""
    return tuple(a for a, size in mesh.axes.items() if size > 1 and a not in leaf.layout.apart)


def _place(weights: Weights, runs: Sequence[ElementRun]) -> tuple[str, int]:
    if not runs:
        return "", 0
    file, entry = weights.entries[runs[0].key]
    return file.name, entry.offset + runs[0].at * entry.dtype.itemsize


class _StreamPiece(NamedTuple):
    """A range of bytes of a file that has the position `begin` in a stream, and the tensor that it is part of."""

    begin: int
    file: Place
    offset: int
    nbytes: int
    leaf: str
    dtype: torch.dtype
    span: tuple[int, int]  # the elements of the flattened full tensor that are made of it and its neighbors


def _pieces(
    weights: Weights, sources: Sources, wanted: Mapping[str, Leaf], mesh: Mesh, conversions: Conversions
) -> dict[str, list[_StreamPiece]]:
    """Returns the pieces that make up this rank's shard of each tensor, one after the other."""
    out: dict[str, list[_StreamPiece]] = {name: [] for name in wanted}
    at = 0
    for name, leaf in wanted.items():
        for span in held(leaf, mesh):
            start, stop = conversions[name].needed(*span) if name in conversions else span
            runs = sources[name]
            # From the run on that contains `start`.
            for run in runs[max(bisect_right(runs, start, key=lambda r: r.start) - 1, 0) :]:
                low, high = max(start, run.start), min(stop, run.stop)
                if run.start >= stop:
                    break
                if low < high:
                    file, entry = weights.entries[run.key]
                    size = entry.dtype.itemsize
                    offset, nbytes = entry.offset + (run.at + low - run.start) * size, (high - low) * size
                    out[name].append(_StreamPiece(at, file, offset, nbytes, name, entry.dtype, span))
                    # Gaps between pieces keep each one aligned to every dtype, so that the bytes of a window can be
                    # viewed as elements without a copy.
                    at += -(-nbytes // _ALIGNED) * _ALIGNED
    return out


def _windows(
    pieces: Sequence[_StreamPiece], mesh: Mesh, axes: tuple[str, ...], problems: list[str]
) -> Generator[torch.Tensor, None, None]:
    """Yields the bytes of a stream, one window at a time. Each must be used before the next one is requested.

    The ranks along `axes` gather each window. Errors are added to `problems` instead of being raised, so that the other
    ranks still get their parts.
    """
    if not pieces:
        return
    total, count = pieces[-1].begin + pieces[-1].nbytes, mesh.axis_size(axes)
    share = -(-min(WINDOW, total) // (count * _ALIGNED)) * _ALIGNED  # bytes that a rank reads
    # Allocated once: allocating them again and again would leave holes between the tensors made meanwhile.
    sizes = itertools.accumulate((mesh.axes[a] for a in reversed(axes)), operator.mul)
    gathered = [torch.empty(share * n, dtype=torch.uint8, device=mesh.device) for n in sizes]
    # Two buffers are enough: one holds the current window while the other is filled.
    buffers = [torch.empty(share, dtype=torch.uint8, device="cpu") for _ in range(2)]
    begins, numbers = [p.begin for p in pieces], range(-(-total // (share * count)))

    def read(number: int) -> torch.Tensor:
        """Reads this rank's share of a window."""
        # Consecutive shares of a window belong to consecutive ranks, so concatenating the gathered shares gives the
        # window.
        low, out = (number * count + mesh.index(axes)) * share, buffers[number % 2]
        high = min(low + share, total)
        jobs: list[tuple[Place, Piece]] = []
        at = max(bisect_right(begins, low) - 1, 0)
        for piece in pieces[at : bisect_right(begins, max(high - 1, 0))]:
            first, last = max(low, piece.begin), min(high, piece.begin + piece.nbytes)
            for start in range(first, last, _PART):
                into = out[start - low : min(start + _PART, last) - low]
                jobs.append((piece.file, Piece(piece.offset + start - piece.begin, into, piece.leaf)))
        problems.extend(p for p in pool.map(lambda job: _fill(*job), jobs) if p is not None)
        return out

    with (
        ThreadPoolExecutor(_THREADS, thread_name_prefix="fzero-load") as pool,
        ThreadPoolExecutor(1, thread_name_prefix="fzero-load-ahead") as ahead,
    ):
        # One window is read ahead, so that reading overlaps with gathering and converting the window before.
        pending = ahead.submit(read, 0)
        for number in numbers:
            part = pending.result()
            if number + 1 in numbers:
                pending = ahead.submit(read, number + 1)
            # The last axis varies fastest in `Mesh.index`, so gathering over it first puts the shares in order.
            for axis, whole in zip(reversed(axes), gathered, strict=True):
                part = gather(mesh, part.to(mesh.device), axis, whole)
            yield part


def _fill(file: Place, piece: Piece) -> str | None:
    """Reads a piece. Returns a message if that fails."""
    try:
        return fill(file, None, [piece])[1]
    except CheckpointError as error:  # of an object store
        return f"{file.name}: {error}"


class _Stream:
    """Consecutive windows, one of which is the current one."""

    def __init__(self, windows: Iterator[torch.Tensor]):
        self._windows, self._begin = windows, 0
        self._current = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, at: int, most: int) -> torch.Tensor:
        """Returns bytes from a position on: at most this many, and those of one window."""
        while at >= self._begin + self._current.numel():
            self._begin += self._current.numel()
            self._current = next(self._windows)
        return self._current[at - self._begin :][:most]


def _parts(
    stream: _Stream,
    pieces: Sequence[_StreamPiece],
    leaf: Leaf,
    mesh: Mesh,
    conversion: Conversion | None,
    problems: list[str],
) -> Iterator[torch.Tensor]:
    """Yields this rank's shard of a tensor in pieces of up to 1 MiB, followed by zeros for the padding. If stored
    values cannot be converted, this is added to `problems`, and zeros take their place."""
    filled = 0
    try:
        for span, of_span in itertools.groupby(pieces, lambda piece: piece.span):
            parts = _stored(stream, of_span)
            for part in parts if conversion is None else conversion.converted(parts, *span):
                yield part.to(leaf.dtype)
                filled += part.numel()
    except UnquantizableError as error:
        problems.append(f"{pieces[0].leaf}: {error}")
    rest, size = leaf.shard_numel(mesh) - filled, _PART // leaf.dtype.itemsize
    for start in range(0, rest, size):
        yield torch.zeros(min(size, rest - start), dtype=leaf.dtype, device="cpu")


def _stored(stream: _Stream, pieces: Iterable[_StreamPiece]) -> Iterator[torch.Tensor]:
    """Yields the elements of consecutive pieces, up to 1 MiB at a time."""
    for piece in pieces:
        at, end = piece.begin, piece.begin + piece.nbytes
        while at < end:
            data = stream.read(at, min(_PART, end - at))
            yield data.view(piece.dtype)
            at += data.numel()


def entries_of(path: str | os.PathLike[str]) -> tuple[dict[str, tuple[Place, Entry]], dict[str, str]]:
    """Returns the file and entry of every tensor, and the names that are tied to others.

    Raises:
        CheckpointError: files that are missing, truncated or malformed; all of them in one error.
        FzeroTypeError: the argument is not a path.
    """
    if problems := path_like("path", path):
        raise FzeroTypeError("load", "reads files", problems, "give the path of a directory, or of one file")
    path = as_path(path)
    storage, weight_map = storage_of(path), None
    if storage.has(path / WEIGHTS_INDEX):
        weight_map = _weight_map(path / WEIGHTS_INDEX)
        files = [path / name for name in dict.fromkeys(weight_map.values())]
    elif storage.has(path / WEIGHTS):
        files = [path / WEIGHTS]
    elif not (is_directory := storage.is_directory(path)) and storage.has(path):
        files = [path]
    else:
        what = f"{path} has neither {WEIGHTS_INDEX} nor {WEIGHTS}" if is_directory else f"{path} does not exist"
        fix = "give a directory that fz.checkpoint.export or save_pretrained wrote, or a .safetensors file"
        names = sorted(storage.names(path)) if is_directory else []
        if pickled := [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]:
            what += f", only {', '.join(pickled[:3])}, which can run any code where it is read"
            fix = "load it where you trust it, and write it again: from_pretrained(dir).save_pretrained(out)"
        raise CheckpointError("load", what, fix=fix)
    found: dict[str, tuple[Place, Entry]] = {}
    problems, tied = [], {}
    for file in files:
        try:
            header, metadata = read_header(file)
        except (OSError, ValueError) as error:  # also for a name that no file can have
            problems.append(f"{file.name}: {'missing' if isinstance(error, FileNotFoundError) else error}")
            continue
        tied |= metadata
        for name, entry in header.items():
            # A directory may have files of an earlier save with the same tensors. The index decides which file counts.
            if weight_map is None or weight_map.get(name) == file.name:
                found[name] = (file, entry)
        problems += [
            f"{file.name}: {n} is not in it, although {WEIGHTS_INDEX} lists it there"
            for n, f in (weight_map or {}).items()
            if f == file.name and n not in header
        ]
    if problems:
        raise CheckpointError("load", f"cannot read {path}", problems, _COPY)
    # The metadata of a file may hold anything, so only entries that map a missing name to a stored tensor are taken for
    # ties.
    return found, {n: k for n, k in tied.items() if n not in found and k in found}


def _weight_map(file: Place) -> dict[str, str]:
    """Returns the file of each tensor, as the index of a directory gives them. Only plain file names are accepted."""
    try:
        content = parsed(storage_of(file).whole(file), dict[str, Any])
        weight_map = formed(content["weight_map"], dict[str, str], "weight_map")
    except (OSError, Malformed, KeyError) as error:
        raise CheckpointError("load", f"{file} cannot be parsed", [f"{type(error).__name__}: {error}"], _COPY) from None
    if odd := [
        f"{n!r} is not a plain file name"
        for n in dict.fromkeys(weight_map.values())
        if not re.fullmatch(r"(?!\.)[^/\\\0]+", n)
    ]:
        raise CheckpointError("load", f"{file} names files outside its directory", odd, _COPY)
    return weight_map
