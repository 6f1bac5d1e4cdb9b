"""Finds the tensors in other people's safetensors files, in Hugging Face's layout or a single file: where each is
stored, and which names are tied. Reads no values (weight_loading.py does)."""

from __future__ import annotations

import os
import re
from typing import Any

from safetensors import SafetensorError, safe_open

from fzero._utils.arguments import path_like
from fzero._utils.bounded_json import Malformed, formed, parsed
from fzero.checkpoint.safetensors_format import DTYPES, Entry
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import Place, as_path
from fzero.checkpoint.weight_export import WEIGHTS, WEIGHTS_INDEX
from fzero.errors import CheckpointError, FzeroTypeError

_COPY = "copy or download the files again"
_HEADER = 100 << 20  # bytes: the library rejects longer headers


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


def _header(file: Place) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the tensors of a file in the order of their bytes, and its metadata. The safetensors library checks
    both."""
    storage = storage_of(file)
    # The library opens local files only. For an object in a store it gets a local file with the same header and size.
    at = 8 + int.from_bytes(storage.read(file, 8), "little")
    with storage.stand_in(file, min(at, _HEADER)) as here, safe_open(here, "np") as opened:
        entries = {}
        for name in opened.offset_keys():  # the library has checked that there are no gaps between them
            part = opened.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise ValueError(f"the dtype {part.get_dtype()!r} of {name!r} is not one of PyTorch's")
            entries[name] = Entry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()), at)
            at += entries[name].nbytes
        return entries, opened.metadata() or {}
