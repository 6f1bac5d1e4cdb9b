"""Tracks the memory of arguments and of blocks' results through a trace: which tensors are written, and which must not
be read any more.

In PyTorch, two of these tensors may share memory. In a trace each fake tensor has its own memory, so sharing has to be
tracked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fzero._compat.compat import memory_of


class Stale(NamedTuple):
    """Why a tensor must not be read: its memory was written through another tensor, with which the block `block` makes
    it share memory. `where` is the line of the write."""

    block: str
    where: str | None


class ArgumentMemory:
    """The memory of a traced function's arguments and of blocks' results. `written` maps the label of an argument to
    the line that writes to it."""

    def __init__(self) -> None:
        self.written: dict[str, str | None] = {}
        self._labels: dict[int, str] = {}  # labels of the arguments, by their storage
        self._crossed: set[int] = set()  # storages that belong to arguments or to results of blocks
        # for each storage: those with the same memory in PyTorch, each with the block that makes it share memory
        self._shared: dict[int, dict[int, str]] = {}
        self._stale: dict[int, Stale] = {}  # storages whose memory was written through another storage

    def add_argument(self, tensor: torch.Tensor, label: str) -> None:
        """Registers the memory of an argument of the function."""
        self._labels[memory_of(tensor)] = label
        self._crossed.add(memory_of(tensor))

    def add_result(self, tensor: torch.Tensor) -> None:
        """Registers the memory of a block's result."""
        self._crossed.add(memory_of(tensor))

    def may_be_part(self, tensor: torch.Tensor) -> bool:
        """Whether in PyTorch a tensor may share memory with another tensor without the trace knowing it."""
        return memory_of(tensor) in self._crossed

    def share(self, tensors: Sequence[torch.Tensor], owner: str) -> None:
        """Records that in PyTorch these tensors share memory because of the block named `owner`. In the trace each of
        them has its own memory, so a value written to one must not be read from another."""
        storages = [memory_of(t) for t in tensors]
        before = {k: name for s in storages for k, name in self._shared.get(s, {}).items()}
        one = before | dict.fromkeys(storages, owner)
        # All storages of a group refer to one dictionary, so groups that share a storage become one.
        self._shared.update(dict.fromkeys(one, one))

    def write(self, tensor: torch.Tensor, where: Callable[[], str | None]) -> None:
        """Records an in-place write to a tensor."""
        written = memory_of(tensor)
        for storage, block in self._shared.get(written, {written: ""}).items():
            if storage in self._labels:
                self.written.setdefault(self._labels[storage], where())
            if storage != written:
                self._stale.setdefault(storage, Stale(block, where()))

    def stale(self, tensor: torch.Tensor) -> Stale | None:
        """Why a tensor must not be read any more; None if it may be read."""
        return self._stale.get(memory_of(tensor)) if self._stale else None
