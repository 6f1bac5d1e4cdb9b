"""Saves and restores checkpoints: every rank writes its shards, any mesh reads them back, and nothing damaged loads in
silence.

save, read        a State to disk and back, from any mesh to any mesh; a `Saving` is one that goes on behind the steps
Url               a place in an object store
find, describe, structure, latest, check, verify  what is there, and whether it is whole and fits
export            Hugging Face's layout of safetensors files; `train.load` reads it
"""

from typing import NoReturn

from fzero.checkpoint.behind import Saving
from fzero.checkpoint.directory import find, latest
from fzero.checkpoint.exporting import export
from fzero.checkpoint.index import Index, check, describe, structure
from fzero.checkpoint.places import Url
from fzero.checkpoint.reading import read, verify
from fzero.checkpoint.saving import save
from fzero.errors import no_attribute

__all__ = [
    "Index",
    "Saving",
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


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
