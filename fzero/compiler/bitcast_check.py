"""Finds the inputs of a traced graph whose bits are read.

For example, quantized weights are often integer codes that are stored in a floating-point dtype, and are read by
`codes.view(torch.int16)`. Converting such a tensor to another dtype, or sending it in fewer bits, would treat its codes
as numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero.errors import TraceError
from fzero.sharding.layout import Leaf
from fzero.trace.guards.user_frames import Place, line
from fzero.trace.joint_graph import Joint, call_block, call_vjp
from fzero.trace.recorder import FROM, Recorded
from fzero.trace.storages import is_view

aten = torch.ops.aten
Changed = Callable[[Leaf], Sequence[str]]
"""Returns the transforms that change the bits of a tensor before the function gets it."""


def check_bits(owner: str, graph: Recorded, leaves: Sequence[Leaf], changed: Changed) -> None:
    """Raises if a function reads the bits of a tensor that a transform has changed.

    Args:
        owner: the public name with which errors begin.
        graph: the traced function.
        leaves: the tensors that are its first inputs, in order.
        changed: returns the transforms that change the bits of a tensor.

    Raises:
        TraceError: with the path of each such tensor, the transform, and the user's line that reads the bits.
    """
    found = {i: by for i, leaf in enumerate(leaves) if (by := changed(leaf))}
    read = _bits_read(graph, {}).read if found else {}
    if not (wrong := [i for i in found if i in read]):
        return
    problems = [f"{leaves[i].path}: changed by {' and '.join(found[i])}, {_where(read[i])}" for i in wrong]
    params = [i for i in wrong if leaves[i].role != "batch"]
    fixes = []
    if params:
        names = " and ".join(dict.fromkeys(f"fz.{name}" for i in params for name in found[i]))
        where = f"where=lambda path, leaf: path not in {[leaves[i].path for i in params]!r}"
        fixes.append(f"give {names} {where}, which leaves them unchanged")
    if len(params) < len(wrong):
        fixes.append("give a tensor of the batch in the integer dtype: x.view(torch.int16)")
    raise TraceError(owner, "reads the bits of tensors that are converted by value", problems, "; ".join(fixes))


def _where(place: Place | None) -> str:
    return f"read in {line(place)}" if place else "read by view(dtype)"


class _Bits(NamedTuple):
    """What a graph does with the bits of its inputs, which are identified by position."""

    read: dict[int, Place | None]  # the inputs whose bits it reads, with the user's line
    results: list[set[int]]  # for each result, the inputs whose elements it contains


def _bits_read(graph: Recorded, known: dict[Joint, _Bits]) -> _Bits:
    """Follows the elements of each input through views and copies to a view in another dtype."""
    holds: dict[fx.Node, set[int]] = {node: {i} for i, node in enumerate(graph.inputs)}
    of_calls: dict[fx.Node, list[set[int]]] = {}
    read: dict[int, Place | None] = {}
    for node in graph.graph.nodes:
        given = [(n, holds[n]) for n in node.all_input_nodes if n in holds]
        if node.target is operator.getitem and node.args[0] in of_calls:
            source, number = node.args
            holds[node] = of_calls[source][number]  # type: ignore[index]
        elif node.op != "call_function" or not given:
            continue
        elif node.target in (call_block, call_vjp):
            called = _bits_of_call(node, holds, known)
            read = {**called.read, **read}
            if node.target is call_block:
                of_calls[node] = called.results
        elif node.target is aten.view.dtype:
            (source, elements), *_ = given
            if not _same_numbers(source.meta["val"].dtype, node.meta["val"].dtype):
                read |= {j: node.meta.get(FROM) for j in elements if j not in read}
        elif _moves(node):
            holds[node] = {j for _, elements in given for j in elements}
    return _Bits(read, [holds.get(n, set()) for n in graph.outputs])


def _bits_of_call(call: fx.Node, holds: Mapping[fx.Node, set[int]], known: dict[Joint, _Bits]) -> _Bits:
    """What the called block does with the bits of the inputs of the graph that calls it."""
    joint: Any = call.args[0]
    if joint not in known:
        known[joint] = _bits_read(joint.graph, known)
    at = [holds[n] if isinstance(n, fx.Node) and n in holds else set() for n in call.args[2:]]
    read = dict[int, Place | None]()
    for i, place in known[joint].read.items():
        read |= {j: place for j in at[i] if j not in read}
    return _Bits(read, [{j for i in of for j in at[i]} for of in known[joint].results])


def _same_numbers(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a view in another dtype has the same numbers: pairs of them as complex numbers, or the reverse."""
    return source == dtype or (source.to_real() == dtype.to_real() and (source.is_complex or dtype.is_complex))


def _moves(node: fx.Node) -> bool:
    """Whether the elements of a result are those of its arguments, in other positions."""
    if node.target is aten._to_copy.default:
        return node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype
    return (
        is_view(node)
        or node.target in _COPIES
        or (node.target is operator.getitem and is_view(node.all_input_nodes[0]))
    )


# Operations that copy elements to other positions.
_COPIES = {
    aten.clone.default,
    aten.cat.default,
    aten.stack.default,
    aten.embedding.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.repeat.default,
    aten.flip.default,
    aten.roll.default,
    aten.where.self,
    aten.constant_pad_nd.default,
    aten.masked_fill.Scalar,
}
