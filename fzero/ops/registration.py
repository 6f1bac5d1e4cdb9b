"""Registers operators of our own: each is one node of a recorded graph, run eagerly by one function and expanded into
others for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MODULES: dict[str, str] = {}
_BUFFERS: dict[Any, Callable[..., int]] = {}


def module_of(operator: str) -> str:
    """The module that defines an operator of ours, to be imported by a process that is given its name; "" for none."""
    return _MODULES.get(operator, "")


def buffers_of(operator: Any, *args: Any) -> int:
    """Bytes that an operator of ours, run eagerly on a GPU, takes beside its results."""
    return _BUFFERS[operator](*args) if operator in _BUFFERS else 0


def define(
    name: str,
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    buffers: Callable[..., int] | None = None,
) -> Any:
    """The operator `fzero::name`, on every device, without gradients; under `vmap` it runs once a row.

    Args:
        name, schema: of the operator. For `vmap`, one tensor is its result.
        eager: what it computes. A function of the module that defines the operator.
        fake: shapes and dtypes of the results, from those of the arguments.
        buffers: bytes that `eager` takes beside the results on a GPU, from the arguments; on a CPU they are few.
    """
    _MODULES[f"fzero.{name}"] = eager.__module__
    torch.library.define(f"fzero::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"fzero::{name}", "CompositeExplicitAutograd", eager)  # every device; no gradients
    torch.library.register_fake(f"fzero::{name}", fake)
    op = getattr(torch.ops.fzero, name).default
    if buffers is not None:
        _BUFFERS[op] = buffers

    def batched(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[torch.Tensor, int]:
        rows = [
            [a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return torch.stack([op(*row) for row in rows]), 0

    torch.library.register_vmap(f"fzero::{name}", batched)
    return op
