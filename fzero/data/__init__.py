"""Makes batches of tokens or arrays as a pure function of seed, step, rank and number of ranks.

A training run has no data state to save: its step number determines the next batch, on any mesh. A
background thread can read batches ahead.

| file | what it does |
|---|---|
| `sample_order.py` | decides which samples each step and rank reads, without shuffling or storing an order |
| `tokens.py` | `TokenDataset`: windows of a token corpus, in memory or in a file |
| `arrays.py` | `ArrayDataset`: samples from arrays or from a map-style PyTorch dataset |
| `packed_documents.py` | `pack`: packs documents of different lengths into rows of one length |
| `prefetch.py` | `prefetch`: reads batches ahead in a background thread |
| `stdlib_text.py` | `python_source`: the source code of Python's standard library, as text for examples |
"""

from typing import Any

from fzero._utils.deprecation import warn
from fzero.data.arrays import ArrayDataset
from fzero.data.packed_documents import PackedDocuments, pack
from fzero.data.prefetch import Prefetcher, prefetch
from fzero.data.stdlib_text import python_source
from fzero.data.tokens import TokenDataset, write_tokens
from fzero.errors import no_attribute

__all__ = [
    "TokenDataset",
    "ArrayDataset",
    "PackedDocuments",
    "pack",
    "prefetch",
    "Prefetcher",
    "python_source",
    "write_tokens",
]

_RENAMED = {"read_ahead": "prefetch", "ReadAhead": "Prefetcher"}


def __getattr__(name: str) -> Any:
    if new := _RENAMED.get(name):
        warn(f"fz.data.{name}", f"fz.data.{new}")
        return globals()[new]
    raise no_attribute(__name__, name, __all__)
