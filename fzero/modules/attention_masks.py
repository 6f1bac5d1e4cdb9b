"""Lets the models of transformers leave out masks that are only causal, as they do outside of a trace.

From positions that begin anew within a row, they conclude that it contains several documents, and build a mask. In a
trace they cannot read the positions, and always build it: `seq` squared elements per row, which kernels for causal
attention do not need. But the positions that a model computes itself, if the batch has none, are known.

This file uses the library if it is loaded, and imports nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fzero.trace.recorder import number_of

LIBRARY, FINDS = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def left_out_if_causal() -> Iterator[None]:
    """Inside, the library sees in a trace that a row is one document, if its positions do not depend on the batch."""
    library = sys.modules.get(LIBRARY)
    find = getattr(library, FINDS, None)
    if find is None:
        yield
        return

    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        document = find(position_ids)
        return None if document is None or number_of(document.any()) == 0 else document

    setattr(library, FINDS, found)
    try:
        yield
    finally:
        setattr(library, FINDS, find)
