"""Imports safetensors files, in Hugging Face's layout or a single one, as a pytree of host tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fzero import tree
from fzero.arguments import path_like
from fzero.checkpoint.exporting import WEIGHTS, WEIGHTS_INDEX
from fzero.checkpoint.format import DTYPES, Entry
from fzero.checkpoint.index import show
from fzero.checkpoint.places import Place, as_path, local
from fzero.checkpoint.storage import storage_of
from fzero.errors import CheckpointError, FzeroTypeError, message
from fzero.layout import ties
from fzero.read_json import Malformed, formed, parsed

_COPY = "copy or download the files again"
_HEADER = 100 << 20  # bytes: the library takes no longer one


def import_(path: str | os.PathLike[str], like: Any = None, *, cast: bool = False) -> Any:
    """Reads a model that `export` or any Hugging Face library wrote.

    Args:
        path: a directory with `model.safetensors` or `model.safetensors.index.json` and its files, or one .safetensors
            file.
        like: a tree of tensors, on the meta device will do: the result has its structure, and the names, shapes and
            dtypes found must be its own. Without it dotted names become nested dicts, and a dict whose keys are 0 to
            n-1 a list.
        cast: convert dtypes to those of `like`.

    Returns:
        A tree of CPU tensors. A tied name that was stored once is the same tensor again.

    Memory: the model, and one leaf of it mapped from its file.

    Raises:
        CheckpointError: files that are missing or malformed, or leaves that differ from `like`: all of them at once.
            Such files carry no checksums: bytes flipped inside a tensor cannot be seen.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(f"{root}/run", step.init({"w": torch.ones(2)}))
        >>> files = checkpoint.export(f"{root}/run", f"{root}/model")
        >>> import_(f"{root}/model")
        {'w': tensor([1., 1.])}
    """
    path = local(path, "checkpoint.import_", "files are imported from a directory; train.load reads a URL")
    entries, tied = entries_of(path)
    if like is None:
        tensors = _load(entries)
        for name, kept in tied.items():
            tensors.setdefault(name, tensors[kept])
        return nested(tensors, path)
    flat, spec = tree.flatten(like)
    names = tree.names(like)
    source = sources_of(names, flat, entries, tied)
    problems = [
        f"{n}: missing in the files, expected {tree.describe(x)}"
        for n, x in zip(names, flat, strict=True)
        if n not in source
    ]
    problems += [
        f"{n}: unexpected, the files have {show(e.shape, e.dtype)}"
        for n, (_, e) in entries.items()
        if n not in source.values() and n not in names
    ]
    for name, x in zip(names, flat, strict=True):
        found = entries[source[name]][1] if name in source else None
        if found and not (
            isinstance(x, torch.Tensor) and tuple(x.shape) == found.shape and (cast or x.dtype == found.dtype)
        ):
            problems.append(f"{name}: the files have {show(found.shape, found.dtype)}, expected {tree.describe(x)}")
    if problems:
        fix = "import without like= to see what is there; pass cast=True if only dtypes differ"
        what = f"{path} does not fit: {len(problems)} of {len({*names, *entries})} leaves differ"
        raise CheckpointError(message("checkpoint.import_", what, problems, fix))
    used = {(source[n], x.dtype) for n, x in zip(names, flat, strict=True)}
    tensors = _load({n: entries[n] for n in dict.fromkeys(source[n] for n in names)})
    cast_to = {key: tensors[key[0]].to(key[1]) for key in used}
    return tree.unflatten(spec, [cast_to[source[n], x.dtype] for n, x in zip(names, flat, strict=True)])


def sources_of(
    names: list[str], flat: list[Any], entries: Mapping[str, Any], tied: Mapping[str, str]
) -> dict[str, str]:
    """For each name, the stored name that has its data: itself, the one it was tied to, or one that it is tied to in
    `like`."""
    same: dict[int, list[str]] = {}
    for name, first in zip(names, ties(flat), strict=True):
        same.setdefault(first, []).append(name)
    out = {n: n for n in names if n in entries} | {n: tied[n] for n in names if n not in entries and n in tied}
    for group in same.values():
        known = next((out[n] for n in group if n in out), None)
        out |= {n: known for n in group if n not in out and known is not None}
    return out


def entries_of(
    path: str | os.PathLike[str], owner: str = "checkpoint.import_"
) -> tuple[dict[str, tuple[Place, Entry]], dict[str, str]]:
    """The place of every tensor, and the names that are tied to others.

    Raises:
        CheckpointError: files that are missing, truncated or malformed, all of them at once. `owner`: whose it is.
        FzeroTypeError: what is no path.
    """
    if problems := path_like("path", path):
        raise FzeroTypeError(message(owner, "reads files", problems, "give the path of a directory, or of one file"))
    path = as_path(path)
    storage, weight_map = storage_of(path), None
    if storage.has(path / WEIGHTS_INDEX):
        weight_map = _weight_map(path / WEIGHTS_INDEX, owner)
        files = [path / name for name in dict.fromkeys(weight_map.values())]
    elif storage.has(path / WEIGHTS):
        files = [path / WEIGHTS]
    elif not (is_directory := storage.is_directory(path)) and storage.has(path):
        files = [path]
    else:
        what = f"{path} has neither {WEIGHTS_INDEX} nor {WEIGHTS}" if is_directory else f"{path} is not there"
        fix = "give a directory that fz.checkpoint.export or save_pretrained wrote, or a .safetensors file"
        names = sorted(storage.names(path)) if is_directory else []
        if pickled := [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]:
            what += f", only {', '.join(pickled[:3])}, which can run any code where it is read"
            fix = "load it where you trust it, and write it again: from_pretrained(dir).save_pretrained(out)"
        raise CheckpointError(message(owner, what, fix=fix))
    found: dict[str, tuple[Place, Entry]] = {}
    problems, tied = [], {}
    for file in files:
        try:
            header, metadata = _header(file)
        except FileNotFoundError:
            problems.append(f"{file.name}: missing")
            continue
        except SafetensorError as error:
            size = storage.size(file)
            problems.append(f"{file.name}: {size} bytes, truncated, damaged or not safetensors: {error}")
            continue
        except (OSError, ValueError) as error:
            problems.append(f"{file.name}: {error}")
            continue
        tied |= metadata
        for name, entry in header.items():
            if weight_map is None or weight_map.get(name) == file.name:
                found[name] = (file, entry)
        problems += [
            f"{file.name}: {n} is not in it, as {WEIGHTS_INDEX} says"
            for n, f in (weight_map or {}).items()
            if f == file.name and n not in header
        ]
    if problems:
        raise CheckpointError(message(owner, f"cannot read {path}", problems, _COPY))
    return found, {n: k for n, k in tied.items() if n not in found and k in found}


def _weight_map(file: Place, owner: str) -> dict[str, str]:
    try:
        content = parsed(storage_of(file).whole(file), dict[str, Any])
        weight_map = formed(content["weight_map"], dict[str, str], "weight_map")
    except (OSError, Malformed, KeyError) as error:
        raise CheckpointError(
            message(owner, f"{file} cannot be understood", [f"{type(error).__name__}: {error}"], _COPY)
        ) from None
    if odd := [
        f"{n!r} is not a plain file name"
        for n in dict.fromkeys(weight_map.values())
        if not re.fullmatch(r"(?!\.)[^/\\\0]+", n)
    ]:
        raise CheckpointError(message(owner, f"{file} names files outside its directory", odd, _COPY))
    return weight_map


def _header(file: Place) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file in the order of their bytes, and its metadata, checked by the library."""
    storage = storage_of(file)
    at = 8 + int.from_bytes(storage.read(file, 8), "little")
    with storage.stand_in(file, min(at, _HEADER)) as here, safe_open(here, "np") as opened:
        entries = {}
        for name in opened.offset_keys():  # of which the library has made sure that they leave no gaps
            part = opened.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise ValueError(f"the dtype {part.get_dtype()!r} of {name!r} is not one of PyTorch's")
            entries[name] = Entry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()), at)
            at += entries[name].nbytes
        return entries, opened.metadata() or {}


def _load(entries: Mapping[str, tuple[Place, Entry]]) -> dict[str, torch.Tensor]:
    out = {}
    for file in dict.fromkeys(file for file, _ in entries.values()):
        try:
            with safe_open(file, "pt") as opened:  # maps the file: what a tensor is copied from is no memory of ours
                out |= {name: opened.get_tensor(name).clone() for name, (where, _) in entries.items() if where == file}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(message("checkpoint.import_", f"cannot read {file}", [str(error)], _COPY)) from error
    return out


def nested(tensors: Mapping[str, torch.Tensor], path: Place) -> Any:
    """The tree whose leaves have these dotted names."""
    root: dict[str, Any] = {}
    problems = []
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        node: Any = root
        for key in outer:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            problems.append(f"{name}: another tensor's name is the beginning of this one, or the reverse")
            continue
        node[last] = tensor
    if problems:
        fix = "pass like= a dict from each dotted name to a tensor of its shape and dtype"
        raise CheckpointError(message("checkpoint.import_", f"the names in {path} do not make a tree", problems, fix))
    return _listed(root)


def _listed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inner = {key: _listed(child) for key, child in node.items()}
    if inner and set(inner) == {str(i) for i in range(len(inner))}:
        return [inner[str(i)] for i in range(len(inner))]
    return inner
