"""Lets the gradient of a loss overwrite the logits in functions that are compiled for a GPU.

Inductor computes the log-probabilities of a cross entropy again in each kernel that reads them. The kernel of the
gradient has read all logits and could overwrite them. But the loss needs the logits at the targets and sums over rows
that the gradient's kernel computes, so it runs later and keeps the logits alive. Here the logits at the targets are
read first, by one operator (operators/picked.py). The loss is computed from them and from the sums over rows, by the
same operations as before. On a CPU Inductor computes these sums ahead of the loss, and nothing is changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from fzero.operators.picked import PICKED
from fzero.trace.device import substituted
from fzero.trace.recorder import Recorded
from fzero.trace.storages import is_view, writes

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)


def picked_losses(graph: Recorded) -> Recorded:
    """The graph, with the logits at the targets read first in each cross entropy that allows it; the same object if
    none does.

    A cross entropy allows it if one matrix product makes the logits, [rows, words], up to operations by element; if the
    log-probabilities are float32 and have a second reader, as the gradient is; and if classes have no weights.
    """
    rules, found = dict[fx.Node, Callable[..., Any]](), _Rules()
    for node in graph.graph.nodes:
        if node.target is aten.nll_loss_forward.default and (loss := _loss_at(node)) is not None:
            rules |= found.of(node, loss)
    return substituted(graph, {}, rules) if rules else graph


class _Loss(NamedTuple):
    """The log-probabilities of a cross entropy, the product that makes its logits, and the operations by element from
    the product to the logits."""

    logs: fx.Node
    product: fx.Node
    chain: list[fx.Node]


def _loss_at(node: fx.Node) -> _Loss | None:
    given: Any = node.args
    logs, _, weight, *_ = given
    if weight is not None or logs.target is not aten._log_softmax.default or len(logs.users) < 2:
        return None
    x, dim, to_float = logs.args
    value = logs.meta["val"]
    if value.dim() != 2 or dim not in (1, -1) or to_float or value.dtype is not torch.float32:
        return None
    *steps, product = _elementwise(x)
    if product.target not in _PRODUCTS or product.meta["val"].shape != value.shape:
        return None
    return _Loss(logs, product, [n for n in reversed(steps) if not is_view(n)])


class _Rules:
    """The rules by which nodes of losses run, in the order of the graph. Losses may share a product, and
    log-probabilities: what these rules compute is kept by node."""

    def __init__(self) -> None:
        self._products: dict[fx.Node, torch.Tensor] = {}
        self._sums: dict[fx.Node, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, node: fx.Node, loss: _Loss) -> dict[fx.Node, Callable[..., Any]]:
        """The rules of a loss at a node."""
        return {
            loss.product: functools.partial(self._multiply, loss.product),
            loss.logs: functools.partial(self._log_softmax, loss.logs),
            node: functools.partial(self._nll_loss, loss),
        }

    def _multiply(self, node: fx.Node, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._products[node] = found = node.target(*args, **kwargs)  # type: ignore[operator]
        return found

    def _log_softmax(self, node: fx.Node, x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor:
        """As Inductor decomposes it. Keeps the largest value of each row, and the logarithm of its sum."""
        largest = x.amax(1, keepdim=True)
        less = x - largest
        log_sum = less.exp().sum(1, keepdim=True).log()
        self._sums[node] = largest, log_sum
        return less - log_sum

    def _nll_loss(
        self, loss: _Loss, logs: torch.Tensor, target: torch.Tensor, weight: None, reduction: int, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        valid = target != ignored
        at = PICKED(self._products[loss.product], torch.where(valid, target, 0)[:, None])
        for node in loss.chain:
            source, made = node.all_input_nodes[0], at
            args, kwargs = map_aggregate(
                (node.args, node.kwargs),  # type: ignore[arg-type]
                lambda a, source=source, made=made: made if a is source else a,
            )
            at = node.target(*args, **kwargs)  # type: ignore[operator, misc]
        largest, log_sum = self._sums[loss.logs]
        losses = torch.where(valid, -((at - largest) - log_sum)[:, 0], 0)
        if reduction == 0:
            return losses, logs.new_full((), 0.0)
        total = valid.sum().to(logs.dtype)
        return losses.sum() / total if reduction == 1 else losses.sum(), total


def _elementwise(node: fx.Node) -> Iterator[fx.Node]:
    """A value, then the value that it is computed from, and so on: while each element has one source, in the same row
    and column. The last is computed otherwise."""
    while True:
        yield node
        value, tensors = node.meta["val"], node.all_input_nodes
        if node.op != "call_function" or len(tensors) != 1:
            return
        before = tensors[0].meta["val"]
        if not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):  # one of several results
            return
        rows = value.shape[-1:] == before.shape[-1:] and math.prod(value.shape) == math.prod(before.shape)
        if is_view(node):
            alike = rows and node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
        else:
            one = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default
            alike = one and value.shape == before.shape and "memory_format" not in node.kwargs and not writes(node)
        if not alike:
            return
        node = tensors[0]
