"""Lists strategies for viewing, splitting, joining and rearranging values that a mesh axis shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from fzero.sharding.flat_propagation import VIEWS
from fzero.sharding.op_strategies import (
    PARTIAL,
    Strategy,
    WholeOp,
    along,
    in_view,
    lifted,
    lined_up,
    moves,
    part,
    rule,
    shape_of,
    unique,
)
from fzero.sharding.placements import Shard

aten = torch.ops.aten

# --- constants and views ---


@rule(aten.full.default, aten.zeros.default, aten.ones.default)
def _full(op: WholeOp) -> Iterator[Strategy]:
    for c in op.asked:
        size = part(op.shape, c, op.n)
        yield Strategy({}, c, lambda w, a, size=size: w.named(op.target, a | {"size": size}))


def zeros(node: fx.Node) -> bool:
    """Whether a value is known to be all zeros."""
    if node.target is aten.zeros.default:
        return True
    if node.target is aten.expand.default:
        return zeros(node.args[0])  # type: ignore[arg-type]
    return node.target is aten.full.default and bool(node.args[1] == 0)


@rule(*VIEWS - {aten.expand.default})
def _view(op: WholeOp) -> Iterator[Strategy]:
    x, old, new = op["self"], shape_of(op["self"]), op.shape
    yield from moves(op, x)
    places = [p for _, p in op.sharded()]
    places += unique(in_view(new, c, old, op.n) for c in op.asked)
    for p in places:
        if c := in_view(old, p, new, op.n):
            size = part(new, c, op.n)
            yield Strategy({x: p}, c, lambda w, a, size=size: w.view(a["self"], size))


@rule(aten.permute.default, aten.t.default, aten.transpose.int)
def _permute(op: WholeOp) -> Iterator[Strategy]:
    x = op["self"]
    order = list(range(len(op.shape)))
    if op.target is aten.permute.default:
        order = [d % len(order) for d in op["dims"]]
    elif op.target is aten.t.default:
        order.reverse()
    elif order:
        i, j = op["dim0"] % len(order), op["dim1"] % len(order)
        order[i], order[j] = order[j], order[i]
    yield from moves(op, x)
    # Dim d of the result is dim order[d] of the input.
    for p in unique([*(p for _, p in op.sharded()), *(Shard(order[c.dim], c.groups) for c in op.asked)]):
        yield Strategy({x: p}, Shard(order.index(p.dim), p.groups))


@rule(aten.select.int, aten.unbind.int)
def _select(op: WholeOp) -> Iterator[Strategy]:
    x = op["self"]
    d = op["dim"] % len(shape_of(x))
    yield from moves(op, x)
    for p in unique([*(p for _, p in op.sharded()), *(Shard(c.dim + (c.dim >= d), c.groups) for c in op.asked)]):
        if p.dim != d:
            yield Strategy({x: p}, tuple(Shard(p.dim - (p.dim > d), p.groups) for _ in op.outputs))


@rule(aten.select_backward.default)
def _select_backward(op: WholeOp) -> Iterator[Strategy]:
    g, d, shape = op["grad_output"], op["dim"] % len(op.shape), op.shape
    yield from moves(op, g)
    for _, p in op.sharded():
        c = Shard(p.dim + (p.dim >= d), p.groups)
        size = part(shape, c, op.n)
        yield Strategy({g: p}, c, lambda w, a, size=size: w.named(op.target, a | {"input_sizes": size}))


@rule(aten.expand.default)
def _expand(op: WholeOp) -> Iterator[Strategy]:
    x, shape = op["self"], op.shape
    yield from moves(op, x)
    for c in unique([*(lifted(x, p, len(shape)) for _, p in op.sharded()), *op.asked]):
        size = part(shape, c, op.n)
        yield Strategy(
            {x: lined_up(x, c, len(shape))}, c, lambda w, a, size=size: w.named(op.target, a | {"size": size})
        )


@rule(aten.repeat.default)
def _repeat(op: WholeOp) -> Iterator[Strategy]:
    """Repeating a sharded dim multiplies the number of its groups."""
    x, repeats, dims = op["self"], op["repeats"], len(op.shape)
    yield from moves(op, x)
    for _, p in op.sharded():
        c = lifted(x, p, dims)
        yield Strategy({x: p}, Shard(c.dim, c.groups * max(1, repeats[c.dim])))


# --- pieces ---


def _sizes(op: WholeOp, d: int) -> list[int]:
    return [v.shape[d] for v in op.outputs]


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def _split(op: WholeOp) -> Iterator[Strategy]:
    """A sharding along another dim is kept. Along the sharded dim, each piece must consist of complete groups."""
    x, name = op["self"], "split_sizes" if "split_sizes" in op.named else "split_size"
    d, sizes = op["dim"] % len(shape_of(x)), op[name]
    yield from moves(op, x)
    for _, p in op.sharded():
        if p.dim != d:
            yield Strategy({x: p}, tuple(p for _ in op.outputs))
            continue
        group = shape_of(x)[d] // p.groups
        if all(s % group == 0 and s for s in _sizes(op, d)):
            local = sizes // op.n if isinstance(sizes, int) else [s // op.n for s in sizes]
            yield Strategy(
                {x: p},
                tuple(Shard(d, s // group) for s in _sizes(op, d)),
                lambda w, a, local=local: w.named(op.target, a | {name: local}),
            )


def _slice_of(length: int, start: Any, end: Any) -> tuple[int, int]:
    first, stop, _ = slice(start, end).indices(length)
    return first, max(first, stop)


@rule(aten.slice.Tensor, aten.slice_backward.default)
def _slice(op: WholeOp) -> Iterator[Strategy]:
    """A slice along the sharded dim must begin and end at the boundary of a group."""
    forward = op.target is aten.slice.Tensor
    x = op["self"] if forward else op["grad_output"]
    sizes = shape_of(x) if forward else op.shape
    d = op["dim"] % len(sizes)
    first, stop = _slice_of(sizes[d], op["start"], op["end"])
    yield from moves(op, x)
    for p in unique([*(p for _, p in op.sharded()), *(c for c in op.asked if c.dim != d)]):
        c, local = p, dict[str, Any]()
        if p.dim == d:
            group = shape_of(x)[d] // p.groups  # group size of the sliced value, or of the slice in the backward
            if op["step"] != 1 or first % group or stop % group or sizes[d] % group or first == stop:
                continue
            c = Shard(d, ((stop - first) if forward else sizes[d]) // group)
            local |= {"start": first // op.n, "end": stop // op.n}
        if not forward:
            local["input_sizes"] = part(sizes, c, op.n)
        yield Strategy({x: p}, c, lambda w, a, local=local: w.named(op.target, a | local))


@rule(aten.cat.default, aten.stack.default)
def _cat(op: WholeOp) -> Iterator[Strategy]:
    """Tensors that are concatenated along the sharded dim must have groups of equal length."""
    items, stack = op["tensors"], op.target is aten.stack.default
    d, dims = op["dim"] % len(op.shape), len(op.shape)
    if op.partial(*items):
        yield Strategy(dict.fromkeys(items, PARTIAL), PARTIAL)
    if any(len(shape_of(a)) != dims - stack for a in items):  # an empty tensor
        return
    asked = [Shard(c.dim - (stack and c.dim > d), c.groups) for c in op.asked if c.dim != d]
    for p in unique([*(p for _, p in op.sharded()), *asked]):
        if stack or p.dim != d:
            yield Strategy(dict.fromkeys(items, p), Shard(p.dim + (stack and p.dim >= d), p.groups))
    sharded = dict(op.sharded())
    if stack or len(sharded) < len({*items}) or any(p.dim != d for p in sharded.values()):
        return
    if len({shape_of(a)[d] // sharded[a].groups for a in items}) == 1:
        yield Strategy(sharded, Shard(d, sum(sharded[a].groups for a in items)))


# --- along dims ---


@rule(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
)
def _along_dim(op: WholeOp) -> Iterator[Strategy]:
    if op.target is aten.cumsum.default:
        yield from moves(op, op["self"])
    if op.shape:
        yield from along(op, [op["dim"] % len(op.shape)])


@rule(aten.flip.default, aten.roll.default, aten.tril.default, aten.triu.default)
def _rearranged(op: WholeOp) -> Iterator[Strategy]:
    yield from moves(op, op["self"])
    dims = op["dims"] if op["dims"] is not None else (-1, -2)
    if op.shape and dims:
        yield from along(op, [d % len(op.shape) for d in dims])


@rule(aten.constant_pad_nd.default)
def _pad(op: WholeOp) -> Iterator[Strategy]:
    if op["value"] == 0:
        yield from moves(op, op["self"])
    yield from along(op, range(len(op.shape) - len(op["pad"]) // 2, len(op.shape)))
