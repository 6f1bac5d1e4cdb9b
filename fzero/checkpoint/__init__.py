"""Saves and restores checkpoints: every rank writes its shards, any mesh reads them back, and nothing damaged loads in
silence.

save, read        a State to disk and back, from any mesh to any mesh; an `AsyncSave` is a save that runs in a thread
Url               a place in an object store
find, describe, structure, latest, check, verify  what is there, and whether it is whole and fits
export            Hugging Face's layout of safetensors files; `train.load` reads it
"""

from typing import Any

from fzero.checkpoint.behind import AsyncSave
from fzero.checkpoint.directory import find, latest
from fzero.checkpoint.exporting import export
from fzero.checkpoint.index import Index, check, describe, structure
from fzero.checkpoint.places import Url
from fzero.checkpoint.reading import read, verify
from fzero.checkpoint.saving import save
from fzero.deprecation import warn
from fzero.errors import no_attribute

__all__ = [
    "AsyncSave",
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
