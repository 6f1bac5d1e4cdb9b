"""Reads and writes index.json, which lists the tensors of a checkpoint and their files, protected by a sha256 of
itself.

Nothing read from an index is trusted. Files must be plain names inside the checkpoint's own directory, and the whole
index is validated before any of it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fzero._utils.bounded_json import Malformed, parsed
from fzero.checkpoint import treespec
from fzero.checkpoint.directory import locate, step_number
from fzero.checkpoint.peer_reads import PeerReads
from fzero.checkpoint.safetensors_format import CHUNK, CODES
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import GIVE, INDEX, LONGEST_INDEX, Place
from fzero.comm.control_group import ALONE, ControlGroup, all_gather_values, world
from fzero.errors import CheckpointError
from fzero.mesh import Mesh
from fzero.sharding.shard_regions import Boxes, DimShard, part_shape, uneven
from fzero.tree import dtype_name, form

if TYPE_CHECKING:
    from fzero.checkpoint.saving import SavePlan

FORMAT = "fzero-checkpoint"
_SHOWN = 100  # the most lines of an error about tensors that differ
VERSION = 2
"""The newest index version that this package reads. If no tensor is sharded along dimensions, the index is written as
version 1."""

Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_FILE = re.compile(r"(?!\.)[A-Za-z0-9._-]+")
_DTYPES = {dtype_name(d): d for d in CODES}


@dataclass(frozen=True)
class StoredPart:
    """Some elements of a tensor: they are stored as the tensor `key` of `file`, whose bytes begin at `offset`."""

    file: str
    key: str
    boxes: Boxes
    offset: int


@dataclass(frozen=True)
class File:
    """A data file: its size, its sha256, and 8 hex digits of crc32 for every `CHUNK` bytes, or None if it has no
    checksums."""

    bytes: int
    sha256: str
    crc32: str | None


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint, as its index lists them. Made by `describe`.

    Attributes:
        directory: the directory or URL of the checkpoint.
        step: the step of the state.
        leaves: the full shape and the dtype of every tensor, by dotted name, including tied tensors.
        aliases: maps the later names of a tied tensor to its first name, under which it is stored.
        treespec: the structure of the pytree, as JSON; `structure` decodes it.
        meta: the `meta` that `save` was given.
        files: the data files, by name, with their sizes and checksums.
        parts: for each stored tensor, the byte ranges of files that it consists of.
        sha256: the digest of the index itself.
        run: the name of the run, which all checkpoints of a run share; None if fzero 0.2 or older wrote it.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(root, step.init({"w": torch.ones(2)}))
        >>> index = checkpoint.describe(root)
        >>> index.step, sorted(index.leaves)
        (0, ['key', 'params.w', 'step'])
    """

    directory: Place
    step: int
    leaves: Expected
    aliases: Mapping[str, str]
    treespec: Any = field(repr=False)
    meta: Mapping[str, Any]
    files: Mapping[str, File] = field(repr=False)
    parts: Mapping[str, tuple[StoredPart, ...]] = field(repr=False)
    sha256: str = field(default="", repr=False)
    peer_reads: PeerReads | None = field(default=None, repr=False, compare=False)  # reads files of other ranks
    run: str | None = None

    @property
    def owner(self) -> str:
        """The name with which error messages about this checkpoint begin."""
        return "checkpoint" if self.peer_reads is None else self.peer_reads.owner

    def __str__(self) -> str:
        return f"the checkpoint {self.directory}" if self.peer_reads is None else self.peer_reads.what

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors, with each tied tensor counted once."""
        return sum(math.prod(self.leaves[n][0]) * self.leaves[n][1].itemsize for n in self.parts)


def describe(path: str | os.PathLike[str] | Index, mesh: Mesh | None = None) -> Index:
    """Returns the contents of a checkpoint from its index alone; no data is read.

    Args:
        path: the directory of one step, or the root of several, of which the latest is used. An `Index` is returned
            as it is.
        mesh: a mesh whose ranks all call this to read one checkpoint. The latest is then the one that the first rank
            finds.

    Communication: on a mesh of several processes, two exchanges of a small object; otherwise none.

    Raises:
        CheckpointError: there is no checkpoint; its index is missing, damaged, of a newer version, or names files
            outside its directory; or the ranks see different checkpoints.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(root, step.init({"w": torch.ones(2)}))
        >>> checkpoint.describe(root).leaves["params.w"]
        ((2,), torch.float32)
    """
    return agreed(ALONE if mesh is None or mesh.device_mesh is None else world(), path)


def agreed(ranks: ControlGroup, path: str | os.PathLike[str] | Index) -> Index:
    """Does `describe` on ranks that must read the same checkpoint, or checks that the index which each of them has is
    the same."""
    found: list[Index] = []

    def look(name: str | None = None) -> tuple[str, str]:
        # Appended instead of returned: only the digest is exchanged, because an index can be large.
        found.append(path if isinstance(path, Index) else read_index(locate(path, name)))
        return f"{found[0].directory}, step {found[0].step}, index {found[0].sha256[:12]}", found[0].sha256

    if ranks.size == 1:
        look()
        return found[0]
    first: str | None = None
    if not isinstance(path, Index):  # a save in progress may rewrite `latest`, so only one rank reads it
        first = all_gather_values(
            ranks,
            "checkpoint",
            lambda: locate(path).name if ranks.rank == 0 else None,
            form=str | None,
            what=f"cannot read {path}",
            failure=CheckpointError,
        )[0]
    seen = all_gather_values(
        ranks,
        "checkpoint",
        lambda: look(first),
        form=tuple[str, str],
        what=f"cannot read {path if first is None else Path(first).name}, the checkpoint that rank 0 found",
        failure=CheckpointError,
    )
    if any(digest != seen[0][1] for _, digest in seen):
        problems = [
            f"rank {rank}: {text}" for rank, (text, digest) in enumerate(seen) if rank == 0 or digest != seen[0][1]
        ]
        fix = "give every rank the same path, on a filesystem that all ranks share"
        raise CheckpointError("checkpoint", "the ranks would read different checkpoints", problems, fix)
    return found[0]


def read_index(directory: Place) -> Index:
    """Returns the index in a checkpoint's own directory."""
    storage = storage_of(directory)
    if (real := storage.link(directory, INDEX)) is not None:
        raise _error(directory, [f"{INDEX}: a link to a file outside of its directory, {real}"])
    try:
        content = parsed(storage.whole(directory / INDEX, LONGEST_INDEX))
    except FileNotFoundError:
        if not storage.is_directory(directory):
            fix = "read another one, e.g. the latest of its root; keep= of fz.checkpoint.save deletes older ones"
            raise _error(directory, ["it does not exist"], fix) from None
        fix = (
            "a step directory without an index is incomplete: restore another step, or copy it again with all its files"
        )
        raise _error(directory, [f"{INDEX}: missing"], fix) from None
    except OSError as error:
        raise _error(directory, [f"{INDEX}: {error}"], "make it readable") from None
    except Malformed as error:
        raise _error(directory, [f"{INDEX}: corrupt, {error}"]) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        fix = f"{GIVE}; train.load reads Hugging Face directories"
        raise _error(directory, [f"{INDEX}: not the index of a fzero checkpoint"], fix)
    if type(version := content.get("version")) is not int or version > VERSION:
        raise _error(directory, [f"{INDEX}: version {version!r}, this fzero reads up to {VERSION}"], "update fzero")
    problems = (
        []
        if content.get("sha256") == digest(content)
        else [f"{INDEX}: corrupt, its contents do not match its own sha256"]
    )
    try:
        index = parse(directory, content)
        problems += _inconsistent(index)
        if (number := step_number(directory.name)) not in (None, index.step):
            problems.append(f"{INDEX}: of step {index.step}, in a directory named for step {number}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        index = None
        problems.append(f"{INDEX}: corrupt, {type(error).__name__}: {error}")
    if problems or index is None:
        raise _error(directory, problems)
    return index


def is_gone(index: Index) -> bool:
    """Whether a checkpoint was deleted, or replaced by another one of its step, since its index was read.

    False for an index without a digest, which never was in a file (elastic/memory_checkpoint.py).
    """
    if not index.sha256:
        return False
    try:
        # The digest covers the names and checksums of all files, so a replaced checkpoint of the same step has another
        # one.
        return read_index(index.directory).sha256 != index.sha256
    except CheckpointError:
        return not storage_of(index.directory).has(index.directory / INDEX)


def structure(path: str | os.PathLike[str] | Index) -> Any:
    """Returns the saved pytree, with tensors of the full shapes on the meta device. A tied parameter is one tensor.

    Args:
        path: as for `describe`, or what it returned.

    Raises:
        CheckpointError: as for `describe`; or the pytree has a NamedTuple or dataclass that this program has not
            imported, or whose fields have changed.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(root, step.init({"w": torch.ones(2)}))
        >>> checkpoint.structure(root).params["w"].shape
        torch.Size([2])
    """
    index = path if isinstance(path, Index) else describe(path)
    metas = {
        name: torch.empty(index.leaves[name][0], dtype=index.leaves[name][1], device="meta") for name in index.parts
    }
    tree, problems = treespec.decode(index.treespec, lambda name: metas[index.aliases.get(name, name)])
    if problems:
        fix = "import the modules that define these classes, with the fields they had, before reading"
        raise CheckpointError(
            "checkpoint.structure", f"cannot rebuild the tree saved in {index.directory}", problems, fix
        )
    return tree


def differences(index: Index, expected: Expected, *, subset: bool = False) -> list[str]:
    """Returns one message for each difference between the tensors of a checkpoint and the expected ones."""
    where = "the checkpoint" if index.peer_reads is None else "the state"
    out = [
        f"{name}: missing in {where}, expected {form(*expected[name])}" for name in expected if name not in index.leaves
    ]
    if not subset:
        out += [
            f"{name}: unexpected, {where} has {form(*leaf)}"
            for name, leaf in index.leaves.items()
            if name not in expected
        ]
    for name, (shape, dtype) in expected.items():
        if (stored := index.leaves.get(name)) is None:
            continue
        odd = ["shape"] if tuple(shape) != stored[0] else []
        odd += ["dtype"] if dtype != stored[1] else []
        if odd:
            what = f"different {' and '.join(odd)}, {where} has {form(*stored)}, expected {form(shape, dtype)}"
            out.append(f"{name}: {what}")
    return out


def check(index: Index, expected: Expected) -> None:
    """Checks that the tensors of a checkpoint match those of the state that they are to be loaded into.

    Args:
        index: what `describe` returned.
        expected: the full shape and dtype by dotted name (`fz.tree.names`), including tied names.

    Raises:
        CheckpointError: one error that lists every tensor that is missing, unexpected, or of another shape or dtype.

    Example:
        >>> index = Index(Path("ckpt/step-00000001"), 1, {"params.w": ((2, 3), torch.float32)}, {}, None, {}, {}, {})
        >>> check(index, {"params.w": ((2, 3), torch.float32)})
        >>> check(index, {"params.w": ((3, 2), torch.float32)})
        Traceback (most recent call last):
            ...
        fzero.errors.CheckpointError: fzero.checkpoint: the checkpoint ckpt/step-00000001 does not fit: 1 of 1
        tensors differ
          params.w: different shape, the checkpoint has float32[2, 3], expected float32[3, 2]
        Fix: build the model and optimizer that the checkpoint was saved from, or restore another checkpoint
    """
    if problems := differences(index, expected):
        raise mismatch(index, problems, len(index.leaves.keys() | expected.keys()))


def mismatch(index: Index, problems: list[str], total: int) -> CheckpointError:
    """Returns the error for tensors that differ."""
    fix = "build the model and optimizer that the checkpoint was saved from, or restore another checkpoint"
    if index.peer_reads is not None:
        fix = "compile a step of the same model and optimizer"
    elif all(": different dtype, " in p for p in problems):
        fix = "give the state the stored dtypes"
    shown = problems if len(problems) <= _SHOWN else [*problems[:_SHOWN], f"... and {len(problems) - _SHOWN} more"]
    return CheckpointError(index.owner, f"{index} does not fit: {len(problems)} of {total} tensors differ", shown, fix)


def dump(content: dict[str, Any]) -> bytes:
    """Returns the text of an index with its digest. It has one line per tensor and file, so that it can be searched."""
    cut = any("along" in part for leaf in content["leaves"].values() for part in leaf["parts"])
    # The oldest version that can express the contents, so that older releases can still read checkpoints without shards
    # along dims.
    content = {"format": FORMAT, "version": 2 if cut else 1, "sha256": "", "chunk": CHUNK, **content}
    content["sha256"] = digest(content)
    lines = []
    for key, value in content.items():
        if key in ("leaves", "files"):
            inner = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inner}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    if len(data) > LONGEST_INDEX:
        what, fix = f"its index has {len(data)} bytes", f"a state of fewer leaves or ranks: {LONGEST_INDEX} are read"
        raise CheckpointError("checkpoint.save", what, fix=fix)
    return data


def to_json(
    plan: SavePlan,
    parts: Mapping[str, Iterable[StoredPart]],
    meta: Mapping[str, Any],
    files: Mapping[str, File],
    run: str | None = None,
) -> dict[str, Any]:
    """Returns the contents of the index of a saved plan as JSON values, for `dump`."""
    stored = {}
    for name, pieces in parts.items():
        shape, dtype = plan.leaves[name]
        stored[name] = {"shape": [*shape], "dtype": dtype_name(dtype), "parts": [_part_json(p) for p in pieces]}
    return {
        "step": plan.step,
        **({} if run is None else {"run": run}),
        "leaves": stored,
        "aliases": dict(plan.aliases),
        # The name of the treespec in the file format.
        "skeleton": plan.treespec,
        "meta": dict(meta),
        "files": {name: {"bytes": f.bytes, "sha256": f.sha256, "crc32": f.crc32} for name, f in files.items()},
    }


def _part_json(p: StoredPart) -> dict[str, Any]:
    """Returns a part as JSON: the elements `start` to `stop` of the flattened tensor or, if it is sharded along
    dimensions, of its shard number `place`."""
    cut = {"along": [[*a] for a in p.boxes.along], "place": p.boxes.place} if p.boxes.along else {}
    return {
        "file": p.file, "key": p.key, **cut, "start": p.boxes.start, "stop": p.boxes.stop, "offset": p.offset
    }  # fmt: skip


def digest(content: Mapping[str, Any]) -> str:
    """Returns the sha256 of the contents of an index, without its entry `sha256`."""
    rest = {k: v for k, v in content.items() if k != "sha256"}
    # Of a normal form, so that the digest does not depend on the formatting of the file.
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse(directory: Place, content: Mapping[str, Any]) -> Index:
    """Builds an index from a JSON object. Only its form is checked.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the object has another form.
    """
    stored = content["leaves"]
    shapes = {name: (tuple(map(_count, leaf["shape"])), _DTYPES[leaf["dtype"]]) for name, leaf in stored.items()}
    parts = {name: tuple(_part(p, shapes[name][0]) for p in leaf["parts"]) for name, leaf in stored.items()}
    files = {
        name: File(_count(f["bytes"]), _text(f["sha256"]), None if f["crc32"] is None else _text(f["crc32"]))
        for name, f in content["files"].items()
    }
    aliases = {_text(later): _text(first) for later, first in content["aliases"].items()}
    # The checksums are per chunk, so they are meaningless for another size.
    if content["chunk"] != CHUNK:
        raise ValueError(f"chunks of {content['chunk']} bytes")
    # Also validates the treespec: it raises ValueError for any node that `encode` does not write.
    order = treespec.names(content["skeleton"])
    if sorted(order) != sorted([*shapes, *aliases]):
        raise ValueError("the tree and the table of tensors list different tensors")
    leaves = {name: shapes[aliases.get(name, name)] for name in order}
    return Index(
        directory,
        _count(content["step"]),
        leaves,
        aliases,
        content["skeleton"],
        dict(content["meta"]),
        files,
        parts,
        _text(content["sha256"]),
        run=_text(content["run"]) if "run" in content else None,
    )


def _part(p: Mapping[str, Any], shape: tuple[int, ...]) -> StoredPart:
    along = tuple(DimShard(*map(_count, a)) for a in p.get("along", ()))
    boxes = Boxes(shape, along, _count(p.get("place", 0)), _count(p["start"]), _count(p["stop"]))
    return StoredPart(_text(p["file"]), _text(p["key"]), boxes, _count(p["offset"]))


def _inconsistent(index: Index) -> list[str]:
    """Returns everything in an index that would make a reader read data that does not exist or belongs to something
    else."""
    out = []
    for name, file in index.files.items():
        if not _FILE.fullmatch(name):
            out.append(f"{INDEX}: names the file {name!r}, which is not a plain name in its directory")
        elif (real := storage_of(index.directory).link(index.directory, name)) is not None:
            out.append(f"{name}: a link to a file outside of its directory, {real}")
        if (num := len(file.crc32 or "")) != 8 * -(-file.bytes // CHUNK):
            out.append(f"{INDEX}: {num // 8} checksums for the {file.bytes} bytes of {name}")
    for name, parts in index.parts.items():
        shape, dtype = index.leaves[name]
        along = parts[0].boxes.along if parts else ()
        if any(p.boxes.along != along for p in parts) or min([1, *map(min, along)]) < 0 or uneven(shape, along):
            out.append(
                f"{INDEX}: the shards of {name} are split along dims that it does not have, or in different ways"
            )
            continue
        at, numel = 0, math.prod(part_shape(shape, along))
        for p in parts:
            if p.file not in index.files:
                out.append(f"{INDEX}: {name} is in {p.file!r}, which is not among its files")
            elif p.offset + p.boxes.numel * dtype.itemsize > index.files[p.file].bytes:
                out.append(f"{INDEX}: {name} ends beyond the end of {p.file}")
            # The parts are in order, so each has to begin where the one before it ends: this finds gaps and overlaps.
            if p.boxes.place * numel + p.boxes.start != at or not p.boxes.start < p.boxes.stop <= numel:
                break
            at += p.boxes.numel
        if at != math.prod(shape):
            out.append(f"{INDEX}: the shards of {name} do not make up its {math.prod(shape)} elements")
    return out


def _error(
    directory: Place,
    problems: list[str],
    fix: str = "restore another step, or copy this one again from where it was saved",
) -> CheckpointError:
    return CheckpointError("checkpoint", f"cannot use the checkpoint {directory}", problems, fix)


def _count(x: Any) -> int:
    # The exact type, because bool is a subclass of int.
    if type(x) is not int or x < 0:
        raise ValueError(f"{x!r} where a whole number belongs")
    return x


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"{x!r} where a text belongs")
    return x
