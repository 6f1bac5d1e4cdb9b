"""Makes batches of tokens or arrays as a pure function of (seed, step, rank, size), and reads them ahead in the
background.

A training run has no data state to save: its step says what comes next, on any mesh.
"""

from typing import Any

from fzero.data.arrays import ArrayDataset
from fzero.data.prefetch import Prefetcher, prefetch
from fzero.data.source import python_source
from fzero.data.tokens import TokenDataset, write_tokens
from fzero.deprecation import warn
from fzero.errors import no_attribute

__all__ = ["TokenDataset", "ArrayDataset", "prefetch", "Prefetcher", "python_source", "write_tokens"]

_RENAMED = {"read_ahead": "prefetch", "ReadAhead": "Prefetcher"}


def __getattr__(name: str) -> Any:
    if new := _RENAMED.get(name):
        warn(f"fz.data.{name}", f"fz.data.{new}")
        return globals()[new]
    raise no_attribute(__name__, name, __all__)
