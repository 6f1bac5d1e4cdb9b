"""Reads other people's safetensors files straight into shards: each rank the byte ranges that it holds, all ranks
together each byte once.

Ranges are read exactly (such files have no checksums), through buffers of 4 MiB. Of what several ranks hold alike, a
leaf that rests whole or the replicas of a shard, each of them reads a part of every 4 MiB and gathers the rest. What
files there are and what lies in them is `weight_files.py`'s, where a leaf rests the caller's.
"""

from __future__ import annotations

import itertools
import operator
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero.checkpoint import tensor_digests
from fzero.checkpoint.safetensors_format import ElementRun, Entry
from fzero.checkpoint.storage import Reader, storage_of
from fzero.checkpoint.storage_paths import Place, as_path
from fzero.checkpoint.weight_files import entries_of
from fzero.comm import agreement
from fzero.comm.collectives import gather
from fzero.errors import CheckpointError
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf
from fzero.tree import form

WINDOW = 4 << 20  # bytes, of all ranks that hold the same
_PART = 1 << 20  # bytes that are converted at a time
_ALIGNED = 16  # bytes: no element of any dtype lies across the border of two windows
_THREADS = 4


Sources = Mapping[str, Sequence[ElementRun]]
"""By a leaf's dotted name the runs that make it up, in its order."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a directory of safetensors files: their file, place, shape and dtype, by their stored names."""

    path: Place
    entries: Mapping[str, tuple[Place, Entry]]
    tied: Mapping[str, str] = field(default_factory=dict)

    def whole(self, key: str) -> tuple[ElementRun, ...]:
        """The runs of a leaf that is a stored tensor as it is."""
        numel = self.entries[key][1].numel
        return (ElementRun(0, numel, key, 0),) if numel else ()


def open_weights(path: str | os.PathLike[str], mesh: Mesh) -> Weights:
    """The tensors of a directory, or of one file; no data is read.

    Every rank calls it, and all see the same or raise.

    Raises:
        CheckpointError: files that are missing, truncated or malformed, all of them at once.
    """
    entries, tied = agreement.everywhere(mesh, "load", lambda: entries_of(path))
    found = Weights(as_path(path), entries, tied)
    seen = {name: (file.name, *vars(entry).values()) for name, (file, entry) in entries.items()}
    tensor_digests.same(
        mesh,
        "load",
        lambda: {"the files": (repr(sorted(seen.items())), ())},
        "give every rank the same directory, on a filesystem that all ranks share",
    )
    return found


def unfit(weights: Weights, sources: Sources, wanted: Mapping[str, Leaf]) -> list[str]:
    """A line for each leaf that cannot be made of what is stored: other shapes, dtypes that are not converted."""
    out = []
    for name, runs in sources.items():
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
    """Whether numbers of a dtype mean what they are: those of 8 bits have scales that lie elsewhere."""
    return dtype.is_floating_point and dtype.itemsize > 1


def read_leaves(
    weights: Weights, sources: Sources, wanted: Mapping[str, Leaf], mesh: Mesh
) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
    """This rank's part of each leaf as consecutive parts of up to 1 MiB in the leaf's dtype, padding included, on the
    mesh's device where ranks have gathered them, else on the host.

    Args:
        sources: of the leaves to read.
        wanted: how they rest, by name.

    Parts are used before the next one is asked for. Every rank goes through all leaves, also one that cannot go on and
    drops what it gets: the others gather its parts.

    Memory: 12 MiB.

    Raises:
        CheckpointError: at the end, with all that could not be read.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    problems: list[str] = []
    for name in sorted(sources, key=lambda n: _place(weights, sources[n])):
        groups.setdefault(_replicas(wanted[name], mesh), []).append(name)
    for axes in sorted(groups):
        with _Stream(weights, sources, {n: wanted[n] for n in groups[axes]}, mesh, axes, problems) as stream:
            for name in groups[axes]:
                yield name, stream.parts(name)
            stream.finish()
    if problems:
        fix = "copy or download the files again"
        raise CheckpointError("load", f"cannot read {weights.path}", dict.fromkeys(problems), fix)


def held(leaf: Leaf, mesh: Mesh) -> list[tuple[int, int]]:
    """The ranges of the flattened whole leaf that this rank holds, in the order in which they rest."""
    return leaf.boxes(mesh).spans


def _replicas(leaf: Leaf, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which every rank holds the same of a leaf."""
    return tuple(a for a, size in mesh.axes.items() if size > 1 and a not in leaf.layout.apart)


def _place(weights: Weights, runs: Sequence[ElementRun]) -> tuple[str, int]:
    if not runs:
        return "", 0
    file, entry = weights.entries[runs[0].key]
    return file.name, entry.offset + runs[0].at * entry.dtype.itemsize


class _Piece(NamedTuple):
    """Bytes of a file, in a stream from `begin` on."""

    begin: int
    file: Place
    offset: int
    nbytes: int


class _Stream:
    """The pieces of leaves one behind the other, read a window at a time. What fails is added to `problems`: the other
    ranks still get their parts."""

    def __init__(
        self,
        weights: Weights,
        sources: Sources,
        wanted: Mapping[str, Leaf],
        mesh: Mesh,
        axes: tuple[str, ...],
        problems: list[str],
    ):
        self._mesh, self._axes, self._wanted = mesh, axes, wanted
        self._pieces: list[_Piece] = []
        self._leaves: dict[str, list[tuple[int, int, torch.dtype]]] = {}  # of each piece: begin, bytes, dtype
        at = 0
        for name, leaf in wanted.items():
            mine = self._leaves.setdefault(name, [])
            for start, stop in held(leaf, mesh):
                runs = sources[name]
                for run in runs[max(bisect_right(runs, start, key=lambda r: r.start) - 1, 0) :]:
                    low, high = max(start, run.start), min(stop, run.stop)
                    if run.start >= stop:
                        break
                    if low < high:
                        file, entry = weights.entries[run.key]
                        size = entry.dtype.itemsize
                        piece = _Piece(at, file, entry.offset + (run.at + low - run.start) * size, (high - low) * size)
                        self._pieces.append(piece)
                        mine.append((at, piece.nbytes, entry.dtype))
                        at += -(-piece.nbytes // _ALIGNED) * _ALIGNED
        count = mesh.axis_size(axes)
        self._share = -(-min(WINDOW, max(at, 1)) // (count * _ALIGNED)) * _ALIGNED  # bytes that a rank reads
        self._window, self._total = self._share * count, at
        self._begins = [p.begin for p in self._pieces]
        self._current, self._loaded = torch.empty(0, dtype=torch.uint8, device="cpu"), -1
        self._problems = problems
        self._readers: dict[Place, Reader] = {}
        self._pending: Any = None

    def __enter__(self) -> _Stream:
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="fzero-load"))
            self._ahead = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="fzero-load-ahead"))
            for file in dict.fromkeys(p.file for p in self._pieces):
                try:
                    self._readers[file] = stack.enter_context(storage_of(file).reader(file))
                except OSError as error:
                    self._problems.append(f"{file.name}: {error}")
            # made once: new ones would leave holes between the leaves that are made meanwhile
            sizes = itertools.accumulate((self._mesh.axes[a] for a in reversed(self._axes)), operator.mul)
            self._gathered = [torch.empty(self._share * n, dtype=torch.uint8, device=self._mesh.device) for n in sizes]
            self._buffers = [torch.empty(self._share, dtype=torch.uint8, device="cpu") for _ in range(2)]
            self._pending = self._ahead.submit(self._read, 0) if self._total else None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def finish(self) -> None:
        """Goes through the windows that were not asked for, if other ranks wait for them."""
        while self._axes and (self._loaded + 1) * self._window < self._total:
            self._load()

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        leaf, filled = self._wanted[name], 0
        for begin, nbytes, dtype in self._leaves[name]:
            at = begin
            while at < begin + nbytes:
                while at >= (self._loaded + 1) * self._window:
                    self._load()
                here = at - self._loaded * self._window
                num = min(_PART, begin + nbytes - at, self._window - here)
                part = self._current[here : here + num].view(dtype).to(leaf.dtype)
                yield part
                at, filled = at + num, filled + part.numel()
        rest, size = leaf.shard_numel(self._mesh) - filled, _PART // leaf.dtype.itemsize
        for start in range(0, rest, size):
            yield torch.zeros(min(size, rest - start), dtype=leaf.dtype, device="cpu")

    def _load(self) -> None:
        """Makes the next window the current one, and begins to read the one behind it."""
        self._loaded += 1
        part = self._pending.result()
        following = self._loaded + 1
        self._pending = self._ahead.submit(self._read, following) if following * self._window < self._total else None
        for axis, whole in zip(reversed(self._axes), self._gathered, strict=True):
            part = gather(self._mesh, part.to(self._mesh.device), axis, whole)
        self._current = part

    def _read(self, number: int) -> torch.Tensor:
        """This rank's share of a window."""
        out = self._buffers[number % 2]
        low = number * self._window + self._mesh.index(self._axes) * self._share
        high = min(low + self._share, self._total)
        jobs: list[tuple[_Piece, int, int]] = []
        at = max(bisect_right(self._begins, low) - 1, 0)
        for piece in self._pieces[at : bisect_right(self._begins, max(high - 1, 0))]:
            first, last = max(low, piece.begin), min(high, piece.begin + piece.nbytes)
            jobs += [(piece, a, min(a + _PART, last)) for a in range(first, last, _PART)]
        view = memoryview(out.numpy())  # type: ignore[arg-type]
        for problem in self._pool.map(lambda job: self._fill(view[job[1] - low : job[2] - low], *job[:2]), jobs):
            if problem:
                self._problems.append(problem)
        return out

    def _fill(self, out: memoryview, piece: _Piece, first: int) -> str | None:
        if (reader := self._readers.get(piece.file)) is None:
            return None  # said before
        offset = piece.offset + first - piece.begin
        try:
            got = reader.fill(out, offset)
        except (OSError, CheckpointError) as error:
            return f"{piece.file.name}: {error}"
        return None if got == len(out) else f"{piece.file.name}: ends at byte {offset + got}, inside a tensor"
