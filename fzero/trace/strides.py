"""Refuses questions about strides of the batch: a program is given it contiguous, and of any other batch PyTorch would
answer something else."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.fx as fx

from fzero.trace.storages import is_view


@contextmanager
def noted() -> Iterator[list[str]]:
    """The lines that ask, of what is traced inside."""
    asked: list[str] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def note(where: list[str]) -> None:
    asked = _asked.get()
    if asked is not None:
        asked += [place for place in where if place not in asked]


def guessed(node: fx.Node) -> bool:
    """Whether the strides of a value that was traced may be others where it runs. They are those that its fake tensor
    says if it is made of contiguous tensors, by an elementwise operation of one tensor or a matrix product, or in a
    layout that is asked for."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        value = todo.pop()
        if (
            value in seen
            or value.op != "call_function"
            or value.target in _PRODUCTS
            or value.kwargs.get("memory_format") is torch.contiguous_format
        ):
            continue
        seen.add(value)
        todo += value.all_input_nodes
        if (
            is_view(value)
            or value.target is operator.getitem
            or (len(value.all_input_nodes) == 1 and torch.Tag.pointwise in getattr(value.target, "tags", ()))
        ):
            continue
        if not all(x.is_contiguous() for n in value.all_input_nodes if isinstance(x := n.meta["val"], torch.Tensor)):
            return True
    return False


aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_asked: ContextVar[list[str] | None] = ContextVar("fzero_strides", default=None)
