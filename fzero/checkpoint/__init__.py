"""Saves and restores sharded checkpoints: each rank writes its shards, and any mesh can read them.

`save` and `read` move a `State` to and from storage, and a `CheckpointManager` calls `save` at
regular intervals. `find`, `latest`, `describe`, `structure`, `check` and `verify` inspect what is
stored. `export` writes Hugging Face's layout of safetensors files, which `train.load` reads. An
`AsyncSave` is a save that continues in the background, and a `Url` names a location in an object
store.

A checkpoint is one safetensors file per rank and an index with checksums, so damaged data raises an
error instead of being loaded. This folder knows nothing about programs: it imports nothing from
`ir/`, `transforms/` or `compiler/`.

| file | what it does |
|---|---|
| `saving.py` | plans and writes a checkpoint: every rank writes its file, then rank 0 commits all of them |
| `run_record.py` | decides which run a checkpoint belongs to, and rejects a save to the directory of another run |
| `async_save.py` | saves from a copy in host memory, in a background thread, while training continues |
| `checkpoint_manager.py` | saves the state of a loop at regular intervals, and finds the newest state |
| `tensor_digests.py` | checks that replicated tensors are equal on all ranks, by comparing digests |
| `reading.py` | reads the byte ranges that this rank needs and verifies their checksums |
| `peer_reads.py` | reads data that other ranks hold: each rank requests bytes and answers the others |
| `directory.py` | finds the checkpoints below a root directory, and the newest complete one |
| `index.py` | reads and writes `index.json`, and compares a checkpoint with the expected tensors |
| `treespec.py` | encodes the structure of a pytree as JSON, and decodes it without running stored code |
| `safetensors_format.py` | writes safetensors files and reads ranges of them, in bounded memory, with checksums |
| `storage.py` | stores checkpoints in directories, which a rename publishes, and chooses the storage of a path |
| `object_store.py` | stores checkpoints as objects, through fsspec; the index, written last, publishes them |
| `storage_paths.py` | represents the path or the URL of a checkpoint |
| `weight_export.py` | exports a checkpoint to Hugging Face's layout of safetensors files |
| `weight_loading.py` | lists pretrained weights, and reads them into shards; all ranks together read each byte once |
| `weight_quantizing.py` | computes codes and scales of quantized weights from what a rank reads |
"""

from typing import Any

from fzero._utils.deprecation import warn
from fzero.checkpoint.async_save import AsyncSave
from fzero.checkpoint.checkpoint_manager import CheckpointManager
from fzero.checkpoint.directory import find, latest
from fzero.checkpoint.index import Index, check, describe, structure
from fzero.checkpoint.reading import read, verify
from fzero.checkpoint.saving import save
from fzero.checkpoint.storage_paths import Url
from fzero.checkpoint.weight_export import export
from fzero.errors import no_attribute

__all__ = [
    "AsyncSave",
    "CheckpointManager",
    "Index",
    "Url",
    "check",
    "describe",
    "export",
    "find",
    "latest",
    "read",
    "save",
    "structure",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "Saving":
        warn("fz.checkpoint.Saving", "fz.checkpoint.AsyncSave")
        return AsyncSave
    raise no_attribute(__name__, name, __all__)
