"""Follows the memory of arguments and of blocks' results through a trace: written tensors, and tensors that must not be
read.

In PyTorch two of them may lie in one memory, which in a trace, where each fake tensor has its own, no one sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fzero._compat.compat import memory_of


class Stale(NamedTuple):
    """Why a tensor must not be read: its memory was written through another, that `block` makes it share; and where."""

    block: str
    where: str | None


class ArgumentMemory:
    """The memory of a traced function's arguments, and of blocks' results. `written` has, by an argument's label, the
    line that writes to it."""

    def __init__(self) -> None:
        self.written: dict[str, str | None] = {}
        self._labels: dict[int, str] = {}  # of arguments, by their storage
        self._crossed: set[int] = set()  # storages of arguments and of results of blocks
        # storages that stand for one memory, and the blocks that make them so
        self._shared: dict[int, dict[int, str]] = {}
        self._stale: dict[int, Stale] = {}  # storages of whose memory another was written

    def add_argument(self, tensor: torch.Tensor, label: str) -> None:
        """The memory of an argument of the function."""
        self._labels[memory_of(tensor)] = label
        self._crossed.add(memory_of(tensor))

    def add_result(self, tensor: torch.Tensor) -> None:
        """The memory of a block's result."""
        self._crossed.add(memory_of(tensor))

    def may_be_part(self, tensor: torch.Tensor) -> bool:
        """Whether in PyTorch a tensor may lie in the memory of another that the trace does not know of."""
        return memory_of(tensor) in self._crossed

    def share(self, tensors: Sequence[torch.Tensor], owner: str) -> None:
        """In PyTorch these have one memory, by a block of this name; here each has its own. A value written to one must
        not be read from another."""
        storages = [memory_of(t) for t in tensors]
        before = {k: name for s in storages for k, name in self._shared.get(s, {}).items()}
        one = before | dict.fromkeys(storages, owner)
        self._shared.update(dict.fromkeys(one, one))

    def write(self, tensor: torch.Tensor, where: Callable[[], str | None]) -> None:
        """A tensor is written in place."""
        written = memory_of(tensor)
        for storage, block in self._shared.get(written, {written: ""}).items():
            if storage in self._labels:
                self.written.setdefault(self._labels[storage], where())
            if storage != written:
                self._stale.setdefault(storage, Stale(block, where()))

    def stale(self, tensor: torch.Tensor) -> Stale | None:
        """Why a tensor must not be read any more; None if it may be."""
        return self._stale.get(memory_of(tensor)) if self._stale else None
