"""Registers custom operators: each is one node of a recorded graph, runs eagerly as one function, and is expanded
into other operators for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MODULES: dict[str, str] = {}
_BUFFERS: dict[Any, Callable[..., int]] = {}


def module_of(operator: str) -> str:
    """Returns the module that defines a custom operator, so that a process that gets its name can import it; "" if it
    is not one.
    """
    return _MODULES.get(operator, "")


def buffers_of(operator: Any, *args: Any) -> int:
    """Returns the bytes that a custom operator, run eagerly on a GPU, allocates in addition to its results."""
    return _BUFFERS[operator](*args) if operator in _BUFFERS else 0


def define(
    name: str,
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    buffers: Callable[..., int] | None = None,
) -> Any:
    """Defines the operator `fzero::name`, on every device, without gradients. Under `vmap` it runs once per row.

    Args:
        name, schema: name and schema of the operator. For `vmap`, its result must be one tensor.
        eager: the function that it computes, a function of the module that defines the operator.
        fake: returns the shapes and dtypes of the results, given those of the arguments.
        buffers: returns the bytes that `eager` allocates in addition to the results on a GPU, given the arguments; on
            a CPU they are few.
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
