"""Exports a checkpoint to Hugging Face's layout of safetensors files, in one process, one block at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fzero._utils.arguments import plain_numbers
from fzero.checkpoint.index import Index, describe
from fzero.checkpoint.reading import RunReader, damaged, grouped, missing
from fzero.checkpoint.safetensors_format import CODES, ElementRun, Entry, FormatError, as_bytes, write
from fzero.checkpoint.storage import storage_of, sync
from fzero.checkpoint.storage_paths import local
from fzero.errors import CheckpointError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_TEMPORARY = ".tmp-export-"


@plain_numbers
def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    prefix: str = "params",
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes the tensors under `prefix` as `model.safetensors`, or as `model-0000i-of-0000n.safetensors` and their
    index.

    Tensors have their full shapes and their dotted names without the prefix (`layers.3.qkv`), in the order of the
    pytree. For a tied tensor, only the first name has data, as in the files that Hugging Face writes; the metadata of
    the index and of every file maps the other names to it.

    Args:
        path: the directory of one step, or the root of several, of which the latest is exported.
        out: a directory. It is made if it does not exist; other files in it (a config, a tokenizer) are left alone.
        prefix: a dotted name of the state; "" exports all of it.
        max_shard_bytes: a file holds at most this many bytes of tensors, or one larger tensor.
        dtype: floating-point tensors are converted to it.

    Returns:
        The files written, the index last.

    Memory: buffers of 16 MiB, whatever the size of the model.

    Raises:
        CheckpointError: as for `read`; nothing is under `prefix`; or `out` already holds a model.

    Example:
        >>> import typing, safetensors.torch
        >>> from fzero import checkpoint
        >>> State = typing.NamedTuple("State", [("step", int), ("params", dict)])
        >>> root = tempfile.mkdtemp()
        >>> _ = checkpoint.save(root, State(7, {"layers": [{"w": torch.ones(2)}]}))
        >>> [file.name for file in export(root, root + "/hf")]
        ['model.safetensors']
        >>> safetensors.torch.load_file(root + "/hf/model.safetensors")
        {'layers.0.w': tensor([1., 1.])}
    """
    out = local(out, "checkpoint.export", "models are exported to a directory")
    index = describe(path)
    names = [n for n in index.leaves if not prefix or n == prefix or n.startswith(prefix + ".")]
    problems = []
    if not names:
        prefixes = ", ".join(dict.fromkeys(n.split(".")[0] for n in index.leaves)) or "none"
        problems.append(f"prefix={prefix!r}: no tensor is under it; the prefixes are {prefixes}")
    first: dict[str, str] = {}
    kept = {n: first.setdefault(index.aliases.get(n, n), n) for n in names}
    tied = {_short(n, prefix): _short(k, prefix) for n, k in kept.items() if n != k}
    shapes = {n: index.leaves[n][0] for n in names if kept[n] == n}
    tensors = {_short(n, prefix): (x, [ElementRun(0, math.prod(x), n, 0)]) for n, x in shapes.items()}
    return export_tensors(
        index, out, tensors, max_shard_bytes, dtype, tied=tied, owner="checkpoint.export", problems=problems
    )


def export_tensors(
    path: str | os.PathLike[str] | Index,
    out: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], Sequence[ElementRun]]],
    max_shard_bytes: int,
    dtype: torch.dtype | None,
    *,
    exact: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    owner: str = "hf.save_pretrained",
    problems: Sequence[str] = (),
) -> list[Path]:
    """Exports, like `export`, tensors that are assembled from runs of stored tensors.

    Args:
        tensors: their shapes and runs by name. Tensors whose runs follow each other in one stored tensor should be
            adjacent, so that each block is read once.
        exact: the tensors that keep their dtype.
        tied: further names of tensors, for the metadata.
        owner: the public function, for errors.
        problems: further problems with the arguments, which are reported with those found here.
    """
    index = describe(path)
    problems = [*problems]
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        problems.append(f"max_shard_bytes={max_shard_bytes!r}: a whole number of at least 1, e.g. 5_000_000_000")
    if dtype is not None and (dtype not in CODES or not dtype.is_floating_point):
        problems.append(f"dtype={dtype}: not a floating-point dtype that can be stored, e.g. torch.bfloat16")
    if found := [f for f in (WEIGHTS, WEIGHTS_INDEX) if (out / f).exists()]:
        problems.append(f"{out} holds a model already: {', '.join(found)}")
    elif out.exists() and not out.is_dir():
        problems.append(f"{out} is a file")
    if problems:
        fix = "change these arguments; a model is exported to a directory that holds none"
        raise CheckpointError(owner, f"cannot export {index.directory}", problems, fix)
    keys = {run.key for _, runs in tensors.values() for run in runs}
    if problems := missing(index, sorted({p.file for k in keys for p in index.parts[index.aliases.get(k, k)]})):
        raise damaged(index, problems)

    def entry(name: str) -> Entry:
        shape, runs = tensors[name]
        stored = index.leaves[runs[0].key][1] if runs else torch.float32
        is_converted = stored.is_floating_point and name not in exact
        return Entry(name, dtype if dtype is not None and is_converted else stored, shape)

    reading = RunReader(index)

    def blocks(one: Entry) -> Iterator[torch.Tensor]:
        for run in tensors[one.name][1]:
            stored = index.leaves[run.key][1]
            for block in reading.elements(run.key, run.at, run.at + run.stop - run.start):
                yield block if stored == one.dtype else as_bytes(block.clone().view(stored).to(one.dtype))

    shards = [*grouped([entry(name) for name in tensors], lambda one: one.nbytes, max_shard_bytes)]
    files = [WEIGHTS]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    out.mkdir(parents=True, exist_ok=True)
    # An export that was killed leaves its directory behind.
    for stale in out.glob(_TEMPORARY + "*"):
        shutil.rmtree(stale)
    # Within `out`, because a rename does not work between filesystems.
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=out))
    try:
        for file, shard in zip(files, shards, strict=True):
            write(temporary / file, shard, blocks, tied)
        if len(shards) > 1:
            weight_map = {e.name: file for file, shard in zip(files, shards, strict=True) for e in shard}
            total = sum(e.nbytes for shard in shards for e in shard)
            content = {"metadata": {"total_size": total, **(tied or {})}, "weight_map": weight_map}
            files.append(WEIGHTS_INDEX)
            text = json.dumps(content, indent=2) + "\n"
            storage_of(temporary).write(temporary / WEIGHTS_INDEX, text.encode())
        for file in files:  # the index last: until it exists, no reader takes the files for a model
            os.replace(temporary / file, out / file)
        sync(out)
    except (OSError, FormatError) as error:
        what, fix = f"cannot export {index.directory} to {out}", "make the directory writable with enough free space"
        raise CheckpointError(owner, what, [f"{type(error).__name__}: {error}"], fix) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [out / file for file in files]


def _short(name: str, prefix: str) -> str:
    """Returns the name without the prefix. If the prefix is itself the name of a tensor, returns its last component."""
    if name == prefix:
        return name.rpartition(".")[2]
    return name[len(prefix) + 1 :] if prefix else name
