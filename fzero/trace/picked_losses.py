"""Lets the gradient of a loss overwrite the logits in functions that are compiled for a GPU.

Inductor makes the log-probabilities of a cross entropy anew in each kernel that reads them. The kernel of the gradient
has read all logits and could write over them. But the loss reads the logits at its targets, with sums over rows that
the gradient's kernel makes: it runs later, and the logits stay. So the logits at the targets are read first, by an
operation of its own (fzero/operators/picked.py). The loss is made of these and of the sums over rows, by the same
operations. On a CPU Inductor makes these sums ahead of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from fzero.operators.picked import PICKED
from fzero.trace.device import substituted
from fzero.trace.recorder import Recorded
from fzero.trace.storages import is_view

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)


def picked_losses(graph: Recorded) -> Recorded:
    """The graph, with each cross entropy whose logits are a product and whose gradient is made beside it as said
    above."""
    rules: dict[fx.Node, Callable[..., Any]] = {}
    for node in graph.graph.nodes:
        if node.target is aten.nll_loss_forward.default and (found := _Picked.of(node)) is not None:
            rules |= {found.product: found.multiply, found.logs: found.log_softmax, node: found.loss}
    return substituted(graph, {}, rules) if rules else graph


class _Picked:
    """A cross entropy: its product, and the operations of single elements from there to its log-probabilities."""

    def __init__(self, logs: fx.Node, product: fx.Node, chain: list[fx.Node]):
        self.logs, self.product, self._chain = logs, product, chain
        self._logits: Any = None
        self._largest: Any = None
        self._log_sum: Any = None

    @classmethod
    def of(cls, node: fx.Node) -> _Picked | None:
        given: Any = node.args
        logs, _, weight, *_ = given
        if weight is not None or logs.target is not aten._log_softmax.default or len(logs.users) < 2:
            return None
        x, dim, to_float = logs.args
        value = logs.meta["val"]
        if value.dim() != 2 or dim not in (1, -1) or to_float or value.dtype is not torch.float32:
            return None
        steps = [*_elementwise(x)]
        product, chain = steps[-1], [n for n in reversed(steps[:-1]) if not is_view(n)]
        if product.target not in _PRODUCTS or product.meta["val"].shape != value.shape:
            return None
        return cls(logs, product, chain)

    def multiply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._logits = self.product.target(*args, **kwargs)  # type: ignore[operator]
        return self._logits

    def log_softmax(self, x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor:
        """By the operations that Inductor makes of it."""
        self._largest = x.amax(1, keepdim=True)
        less = x - self._largest
        self._log_sum = less.exp().sum(1, keepdim=True).log()
        return less - self._log_sum

    def loss(
        self, logs: torch.Tensor, target: torch.Tensor, weight: None, reduction: int, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        valid = target != ignored
        at = PICKED(self._logits, torch.where(valid, target, 0)[:, None])
        for node in self._chain:
            source, made = node.all_input_nodes[0], at
            args, kwargs = map_aggregate(
                (node.args, node.kwargs),  # type: ignore[arg-type]
                lambda a, source=source, made=made: made if a is source else a,
            )
            at = node.target(*args, **kwargs)  # type: ignore[operator, misc]
        losses = torch.where(valid, -((at - self._largest) - self._log_sum)[:, 0], 0)
        if reduction == 0:
            return losses, logs.new_full((), 0.0)
        total = valid.sum().to(logs.dtype)
        return losses.sum() / total if reduction == 1 else losses.sum(), total


def _elementwise(node: fx.Node) -> Iterator[fx.Node]:
    """A value and those before it of which it is made element by element, in the order of rows, up to one that is made
    otherwise."""
    while True:
        yield node
        value, tensors = node.meta["val"], node.all_input_nodes
        if node.op != "call_function" or len(tensors) != 1:
            return
        before = tensors[0].meta["val"]
        rows = value.shape[-1:] == before.shape[-1:] and math.prod(value.shape) == math.prod(before.shape)
        if is_view(node):
            alike = rows and node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
        else:
            one = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default
            alike = one and value.shape == before.shape
        if not alike:
            return
        node = tensors[0]
