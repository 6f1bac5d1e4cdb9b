"""The sharding rules of views, and of ops that split, slice, join and reorder values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.fx as fx

from fzero.sharding.factors import Factors, custom, dims, factors_of, labelled, moved
from fzero.sharding.operations import Operation, Strategy, shape_of
from fzero.sharding.placements import Shard, local_shape, through_view

aten = torch.ops.aten

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
         aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}  # fmt: skip
ORDERS = {aten.permute.default, aten.transpose.int}


@labelled(*VIEWS)
def _view(op: Operation) -> Factors:
    """The labels of dims that stay dims. Shards of other dims, and shards in groups, are strategies of their own."""
    old, new = shape_of(op["self"]), op.shape
    of, out = dims(len(old)), [""] * len(new)
    before = {(math.prod(new[:d]), s): d for d, s in enumerate(new) if s != 1}
    for d, s in enumerate(old):
        if (at := before.get((math.prod(old[:d]), s))) is not None:
            out[at] = of[d]
    return moved(op, op["self"], of, [tuple(out)], partition=False)


def order_of(op: Operation) -> list[int]:
    """For each dim of the result, the dim of the input that it is."""
    order = list(range(len(op.shape)))
    if op.target is aten.permute.default:
        return [d % len(order) for d in op["dims"]]
    if op.target is aten.t.default:
        return order[::-1]
    if order:
        i, j = op["dim0"] % len(order), op["dim1"] % len(order)
        order[i], order[j] = order[j], order[i]
    return order


@labelled(aten.permute.default, aten.t.default, aten.transpose.int)
def _permute(op: Operation) -> Factors:
    of = dims(len(op.shape))
    return moved(op, op["self"], of, [tuple(of[d] for d in order_of(op))])


@custom(*VIEWS)
def _split_or_merged(op: Operation) -> Iterator[Strategy]:
    """A shard of a dim that is split or merged stays a shard, if its runs are runs of a dim of the result."""
    x, old, new = op["self"], shape_of(op["self"]), op.shape
    places = [p for _, p in op.sharded()]
    places += [p for c in op.asked if (p := through_view(new, c, old, op.n))]
    for p in dict.fromkeys(places):
        if (c := through_view(old, p, new, op.n)) is not None:
            size = local_shape(new, c, op.n)
            yield Strategy({x: p}, (c,), lambda w, a, size=size: w.view(a["self"], size))


@custom(aten.repeat.default)
def _repeat(op: Operation) -> Iterator[Strategy]:
    """A sharded dim that is repeated k times has k times as many groups."""
    x, repeats, lead = op["self"], op["repeats"], len(op.shape) - len(shape_of(op["self"]))
    for _, p in op.sharded():
        yield Strategy({x: p}, (Shard(p.dim + lead, p.groups * max(1, repeats[p.dim + lead])),))


SPLITS = [aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor,
          aten.unsafe_split_with_sizes.default]  # fmt: skip


@labelled(*SPLITS)
def _split_factors(op: Operation) -> Factors:
    of = dims(len(shape_of(op["self"])))
    d = op["dim"] % len(of)
    return moved(op, op["self"], of, [of] * len(op.results), blocked=(of[d],))


@custom(*SPLITS)
def _split(op: Operation) -> Iterator[Strategy]:
    """Pieces that consist of complete groups."""
    x, name = op["self"], "split_sizes" if "split_sizes" in op.named else "split_size"
    d, sizes = op["dim"] % len(shape_of(x)), [v.shape[op["dim"]] for v in op.results]
    for _, p in op.sharded():
        group = shape_of(x)[d] // p.groups if p.dim == d else 0
        if group and all(s % group == 0 and s for s in sizes):
            local = op[name] // op.n if isinstance(op[name], int) else [s // op.n for s in op[name]]
            out = tuple(Shard(d, s // group) for s in sizes)
            yield Strategy({x: p}, out, lambda w, a, local=local: w.named(op.target, a | {name: local}))


def _sliced(op: Operation) -> tuple[fx.Node, int, int, int, list[int]]:
    """The operand, the dim, the start and the end of the slice, and the shape of the unsliced value."""
    forward = op.target is aten.slice.Tensor
    x = op["self"] if forward else op["grad_output"]
    whole = shape_of(x) if forward else op.shape
    d = op["dim"] % len(whole)
    first, stop, _ = slice(op["start"], op["end"]).indices(whole[d])
    return x, d, first, max(first, stop), whole


@labelled(aten.slice.Tensor, aten.slice_backward.default)
def _slice_factors(op: Operation) -> Factors:
    x, d, _, _, whole = _sliced(op)
    of = dims(len(whole))
    sizes = {} if op.target is aten.slice.Tensor else {"input_sizes": 0}
    return moved(op, x, of, [of], blocked=(of[d],), sizes=sizes)


@custom(aten.slice.Tensor, aten.slice_backward.default)
def _slice(op: Operation) -> Iterator[Strategy]:
    """A slice that consists of complete groups."""
    x, d, first, stop, whole = _sliced(op)
    for p in dict.fromkeys(p for _, p in op.sharded() if p.dim == d):
        group = shape_of(x)[d] // p.groups
        if op["step"] != 1 or first % group or stop % group or whole[d] % group or first == stop:
            continue
        c = Shard(d, op.shape[d] // group)
        local = {"start": first // op.n, "end": stop // op.n}
        local |= {} if op.target is aten.slice.Tensor else {"input_sizes": local_shape(whole, c, op.n)}
        yield Strategy({x: p}, (c,), lambda w, a, local=local: w.named(op.target, a | local))


@labelled(aten.cat.default)
def _cat_factors(op: Operation) -> Factors | None:
    items, of = list(dict.fromkeys(op["tensors"])), dims(len(op.shape))
    if any(len(shape_of(x)) != len(of) for x in items):  # an empty tensor
        return None
    d = op["dim"] % len(of)
    linear = [range(len(items))]
    return factors_of(op, [(x, of) for x in items], [of], blocked=(of[d],), reduce="", linear=linear, moves=True)


@custom(aten.cat.default)
def _cat(op: Operation) -> Iterator[Strategy]:
    """Joins values along the sharded dim, if the groups of all of them have the same length."""
    items, d, at = op["tensors"], op["dim"] % max(1, len(op.shape)), dict(op.sharded())
    along = len(at) == len({*items}) and all(p.dim == d for p in at.values())
    if along and len({shape_of(x)[d] // at[x].groups for x in items}) == 1:
        yield Strategy(at, (Shard(d, sum(at[x].groups for x in items)),))
