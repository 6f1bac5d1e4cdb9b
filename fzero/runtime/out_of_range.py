"""Names the leaves of a batch that an index out of range may come from, when a program has met one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroValueError


@contextmanager
def explained(owner: str, batch: Any) -> Iterator[None]:
    """Around a run of a program on a batch. Nothing is looked at unless it fails.

    Raises:
        FzeroValueError: for PyTorch's error of an index: with the whole numbers that the batch holds.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        said = next(iter(str(error).splitlines()), "").rstrip(" .")
        if not re.search("out of (bounds|range)", said):
            raise
        named = tree.with_paths(batch, "batch")
        held = [
            f"{path}: {tree.describe(x)}, from {x.min().item()} to {x.max().item()}"
            for path, x in named
            if x.numel() and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        ]
        fix = (
            "labels are from 0 to the number of classes - 1, or ignore_index; ids are less than the rows of their "
            "embedding"
        )
        raise FzeroValueError(owner, f"an index is out of range ({said})", held, fix) from error
