"""The sharding rules of lookups: embeddings, indexing, gather and scatter.

If the dim that is looked up is sharded, each rank looks up the rows that it has, and the result is partial. This is
computed by a *local body*: a PyTorch function of the shards and of the rank's index, which `w.trace` writes into the
graph, like the body of a `shard_map`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx

from fzero.sharding.factors import Factors, Labels, custom, dims, factors_of, labelled
from fzero.sharding.operations import Operation, Strategy, shape_of
from fzero.sharding.placements import REPLICATE, SUM, Shard, lined_up

aten = torch.ops.aten


def _here(
    index: torch.Tensor, rank: torch.Tensor, rows: int, whole: int, wraps: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts row numbers to row numbers within this rank's shard, and returns them together with a mask of those that
    are in the shard. A number that is invalid on every rank stays invalid, so that the lookup raises. `wraps`: whether
    negative numbers count from the end."""
    index = index.to(torch.int64)
    if wraps:
        index = torch.where(index < 0, index + whole, index)
    known = (index >= 0) & (index < whole)
    index = index - rank.view([]) * rows
    inside = (index >= 0) & (index < rows)
    none = torch.full([], rows, dtype=torch.int64, device=index.device)
    return torch.where(known, index.clamp(0, rows - 1), none), inside


def _only(x: torch.Tensor, inside: torch.Tensor, behind: int) -> torch.Tensor:
    """`x` where a row is in this rank's shard, and zeros elsewhere. `behind`: the number of dims of `x` after the
    index."""
    mask = inside.view([*inside.shape, *[1] * behind])
    return torch.where(mask, x, torch.full([], 0, dtype=x.dtype, device=x.device))


def zeros(node: fx.Node) -> bool:
    """Whether a value is known to be all zeros."""
    if node.target is aten.zeros.default:
        return True
    if node.target is aten.expand.default:
        return zeros(node.args[0])  # type: ignore[arg-type]
    return node.target is aten.full.default and bool(node.args[1] == 0)


@custom(aten.embedding.default)
def _embedding(op: Operation) -> Iterator[Strategy]:
    """A table that is sharded by rows: each rank looks up the rows that it has."""
    table, indices = op["weight"], op["indices"]
    whole, rows = shape_of(table)[0], shape_of(table)[0] // op.n

    def local(weight: torch.Tensor, indices: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        at, inside = _here(indices, rank, rows, whole)
        return _only(aten.embedding.default(weight, at), inside, 1)

    if op.place[table] == Shard(0):
        want = {table: Shard(0), indices: REPLICATE}
        yield Strategy(want, (SUM,), lambda w, a: w.trace(local, a["weight"], a["indices"], w.index()))


@custom(aten.embedding_dense_backward.default)
def _embedding_backward(op: Operation) -> Iterator[Strategy]:
    grad, indices = op["grad_output"], op["indices"]
    whole, rows, padding = op.shape[0], op.shape[0] // op.n, op["padding_idx"]

    def local(grad: torch.Tensor, indices: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        at, inside = _here(indices, rank, rows, whole)
        inside = inside & (indices != padding) if padding >= 0 else inside
        return aten.embedding_dense_backward.default(_only(grad, inside, 1), at, rows, -1, False)

    if Shard(0) in op.asked and not op["scale_grad_by_freq"]:
        want = {grad: REPLICATE, indices: REPLICATE}
        yield Strategy(want, (Shard(0),), lambda w, a: w.trace(local, a["grad_output"], a["indices"], w.index()))


def _indexed(op: Operation) -> tuple[list[int], list[fx.Node], int, int] | None:
    """The dims that tensors index, these tensors, the first dim of the result that comes from the index, and the number
    of such dims. None if a tensor is a mask."""
    found = [(d, i) for d, i in enumerate(op["indices"]) if i is not None]
    if not found or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in found):
        return None
    at, indices = [d for d, _ in found], [i for _, i in found]
    together = at == list(range(at[0], at[0] + len(at)))
    return at, indices, at[0] if together else 0, max(len(shape_of(i)) for i in indices)


def _index_labels(rank: int, at: list[int], first: int, count: int) -> tuple[Labels, Labels, Labels]:
    """The labels of the indexed value, of the index, and of the result."""
    of, index = dims(rank), tuple(f"i{count - k}" for k in range(count))
    rest = tuple(k for d, k in enumerate(of) if d not in at)
    return of, index, (*rest[:first], *index, *rest[first:])


@labelled(aten.index.Tensor)
def _index_factors(op: Operation) -> Factors | None:
    if (found := _indexed(op)) is None or op["self"] in found[1]:
        return None
    at, indices, first, count = found
    of, index, out = _index_labels(len(shape_of(op["self"])), at, first, count)
    operands = [(op["self"], of), *((i, index[count - len(shape_of(i)) :]) for i in indices)]
    return factors_of(op, operands, [out], blocked={of[d] for d in at}, linear=[(0,)], moves=True, reduce="")


@custom(aten.index.Tensor)
def _index(op: Operation) -> Iterator[Strategy]:
    """A lookup along a sharded dim: each rank looks up the rows that it has."""
    x, found = op["self"], _indexed(op)
    if found is None or x in found[1] or len(found[0]) != 1:
        return
    (d,), _, _, count = found
    whole, rows = shape_of(x)[d], shape_of(x)[d] // op.n

    def local(x: torch.Tensor, index: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        at, inside = _here(index, rank, rows, whole, wraps=True)
        y = aten.index.Tensor(x, [*[None] * d, at])
        return _only(y, inside, y.dim() - d - count)

    if op.place[x] == Shard(d):
        yield Strategy(op.at({x: Shard(d)}), (SUM,), lambda w, a: w.trace(local, a["self"], a["indices"][d], w.index()))


@custom(aten.index_put.default)
def _index_put(op: Operation) -> Iterator[Strategy]:
    x, values, found = op["self"], op["values"], _indexed(op)
    if found is None or not _are_separate(x, values, *found[1]) or not _fill(op, values, *found):
        return
    at, indices, first, count = found
    of, index, out = _index_labels(len(op.shape), at, first, count)
    # Values that are added to zeros may be summands, or sharded along the looked-up rows.
    adds = op["accumulate"] and zeros(x)
    if adds and op.partial(values):
        yield Strategy(op.at({values: SUM}), (SUM,))
    kept = [Shard(of.index(out[p.dim]), p.groups) for _, p in op.sharded(values) if out[p.dim] in of]
    for p in dict.fromkeys([*kept, *(p for _, p in op.sharded(x)), *op.asked]):
        if p.dim not in at:
            yield Strategy(op.at({x: p, values: Shard(out.index(of[p.dim]), p.groups)}), (p,))
        elif at == [p.dim] and p.groups == 1 and op["accumulate"]:
            yield _added_rows(op, p, count)
    if adds:
        yield from _summed_rows(op, indices, index, out, first)


def _summed_rows(
    op: Operation, indices: Sequence[fx.Node], index: Labels, out: Labels, first: int
) -> Iterator[Strategy]:
    """Each rank adds its shard of the values, along a dim of the looked-up rows, to zeros."""
    values, count = op["values"], len(index)
    rows_of = [(index[count - len(shape_of(i)) :][p.dim], p.groups) for i, p in op.sharded(*indices)]
    rows_of += [(k, p.groups) for _, p in op.sharded(values) if (k := out[p.dim]) in index]
    for k, groups in dict.fromkeys(rows_of):
        c = Shard(out.index(k), groups)
        by = {i: lined_up(shape_of(i), Shard(c.dim - first, groups), count) for i in indices}
        yield Strategy(op.at({values: c, **by}), (SUM,))


def _are_separate(x: fx.Node, values: fx.Node, *indices: fx.Node) -> bool:
    return x is not values and {x, values}.isdisjoint(indices)


def _fill(op: Operation, values: fx.Node, at: Collection[int], indices: Sequence[fx.Node], first: int, _: int) -> bool:
    """Whether the values have the shape of the elements to which they are written, without broadcasting."""
    size = torch.broadcast_shapes(*(shape_of(i) for i in indices))
    rest = [s for d, s in enumerate(op.shape) if d not in at]
    return shape_of(values) == [*rest[:first], *size, *rest[first:]]


def _added_rows(op: Operation, place: Shard, count: int) -> Strategy:
    """Each rank adds to the rows that it has. `count`: the number of dims of the indices."""
    d, whole, rows = place.dim, op.shape[place.dim], op.shape[place.dim] // op.n

    def local(x: Any, index: Any, values: Any, rank: Any) -> Any:
        at, inside = _here(index, rank, rows, whole, wraps=True)
        y = _only(values, inside, values.dim() - d - count)
        return aten.index_put.default(x, [*[None] * d, at], y, True)

    def write(w: Any, a: dict[str, Any]) -> fx.Node:
        return w.trace(local, a["self"], a["indices"][d], a["values"], w.index())

    return Strategy(op.at({op["self"]: place}), (place,), write)


@labelled(aten.index_select.default)
def _index_select_factors(op: Operation) -> Factors | None:
    of = dims(len(shape_of(op["self"])))
    if not of or not shape_of(op["index"]):
        return None
    d = op["dim"] % len(of)
    operands = [(op["self"], of), (op["index"], ("i",))]
    return factors_of(
        op, operands, [(*of[:d], "i", *of[d + 1 :])], blocked=(of[d],), linear=[(0,)], moves=True, reduce=""
    )


@custom(aten.index_select.default, aten.gather.default)
def _selected(op: Operation) -> Iterator[Strategy]:
    """A lookup along a sharded dim: each rank looks up the rows that it has."""
    x, index, d = op["self"], op["index"], op["dim"] % max(1, len(op.shape))
    if x is index or not op.shape or op.place[x] != Shard(d):
        return
    whole, rows = shape_of(x)[d], shape_of(x)[d] // op.n

    def local(x: torch.Tensor, index: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        at, inside = _here(index, rank, rows, whole)
        y = op.target(x, d, at)
        return _only(y, inside, 0 if op.target is aten.gather.default else y.dim() - d - 1)

    if op.target is aten.gather.default or len(shape_of(index)) == 1:
        want = {x: Shard(d), index: REPLICATE}
        yield Strategy(want, (SUM,), lambda w, a: w.trace(local, a["self"], a["index"], w.index()))


@labelled(aten.gather.default)
def _gather_factors(op: Operation) -> Factors | None:
    x, index, of = op["self"], op["index"], dims(len(op.shape))
    if x is index or not of:
        return None
    d = op["dim"] % len(of)
    uneven = {of[k] for k in range(len(of)) if shape_of(x)[k] != shape_of(index)[k]}
    return factors_of(op, [(x, of), (index, of)], [of], blocked={of[d], *uneven}, linear=[(0,)], moves=True, reduce="")


@custom(aten.index_add.default)
def _index_add(op: Operation) -> Iterator[Strategy]:
    x, index, source, d = op["self"], op["index"], op["source"], op["dim"] % max(1, len(op.shape))
    if not op.shape or len({x, index, source}) < 3:
        return
    if zeros(x) and op.partial(source):
        yield Strategy(op.at({source: SUM}), (SUM,))
    for p in op.proposed(x, source):
        if p.dim != d:
            yield Strategy({x: p, index: REPLICATE, source: p}, (p,))
        elif zeros(x) and op.place[source] == p:
            yield Strategy({x: REPLICATE, index: Shard(0, p.groups), source: p}, (SUM,))


@custom(aten.scatter_add.default, aten.scatter.src, aten.scatter.value)
def _scatter(op: Operation) -> Iterator[Strategy]:
    x, index, d = op["self"], op["index"], op["dim"] % max(1, len(op.shape))
    source = cast(fx.Node, op["src"])
    if not op.shape or len(set(op.inputs)) != 2 + (source is not None):
        return
    sizes = [shape_of(a) for a in op.inputs]
    adds = op.target is aten.scatter_add.default and zeros(x) and source is not None
    if adds and op.partial(source):
        yield Strategy(op.at({source: SUM}), (SUM,))
    for p in op.proposed():
        if p.dim != d and len({s[p.dim] for s in sizes}) == 1:
            yield Strategy(dict.fromkeys(op.inputs, p), (p,))
        elif p.dim == d and adds and any(q == p for _, q in op.sharded(index, source)) and sizes[1] == sizes[2]:
            yield Strategy({x: REPLICATE, index: p, source: p}, (SUM,))
        elif p.dim == d and adds and p.groups == 1:
            whole, rows = op.shape[d], op.shape[d] // op.n

            def local(x: Any, index: Any, source: Any, rank: Any, rows: int = rows, whole: int = whole) -> Any:
                at, inside = _here(index, rank, rows, whole)
                for k, s in enumerate(at.shape if source.shape != at.shape else ()):
                    source = source.narrow(k, 0, s)
                return aten.scatter_add.default(x, d, at, _only(source, inside, 0))

            def write(w: Any, a: dict[str, Any], local: Any = local) -> fx.Node:
                return w.trace(local, a["self"], a["index"], a["src"], w.index())

            yield Strategy({x: p, index: REPLICATE, source: REPLICATE}, (p,), write)
