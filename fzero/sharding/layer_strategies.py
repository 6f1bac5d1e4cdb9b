"""Lists strategies for attention, norms, lookups, convolutions and random draws on values that a mesh axis shards."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.random import DRAW, DRAW_FROM, from_start
from fzero.sharding.op_strategies import (
    PARTIAL,
    RULES,
    Place,
    Rule,
    Strategy,
    WholeOp,
    Writer,
    Written,
    along,
    lined_up,
    moves,
    nearest,
    part,
    pointwise,
    rule,
    shape_of,
    unique,
)
from fzero.sharding.placements import Shard
from fzero.sharding.view_strategies import zeros

aten = torch.ops.aten

# --- attention ---

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_OF_HEADS = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")


ATTENTION = [getattr(aten, name + way).default for name in _ATTENTION for way in ("", "_backward")]


@rule(*ATTENTION)
def _attention(op: WholeOp) -> Iterator[Strategy]:
    """Shards attention by heads (dim 1) or by samples (dim 0).

    If there are fewer heads of keys than of queries, both are sharded alike; a single head of keys is replicated.
    Inputs that are sharded by position (dim 2) are either exchanged for a sharding by heads, or the keys and values are
    gathered.
    """
    bias = op["attn_mask"] if op["attn_mask"] is not None else op["attn_bias"]
    if op["dropout_p"] or (op["grad_input_mask"] or [False])[-1] or (op["bias_requires_grad"] or False):
        return
    grads = [op[name] for name in ("grad_out", "grad_out_") if op[name] is not None]
    main = [op[name] for name in _OF_HEADS if isinstance(op[name], fx.Node)]
    query, keys = op["query"], (op["key"], op["value"])
    if bias in main:
        return
    by_position = op.by_position is not None and any(p == _POSITIONS for _, p in op.sharded(*main))
    if by_position and gathers_keys(op):
        yield from _by_queries(op, main, bias)
    heads = [Shard(1)] * (by_position and not gathers_keys(op))
    for c in unique([*(p for _, p in op.sharded(*main) if p.dim < 2), *(c for c in op.asked if c.dim < 2), *heads]):
        want: dict[fx.Node, Place] = dict.fromkeys(op.inputs) | dict.fromkeys(main, c)
        one = [c.dim == 1 and shape_of(k)[1] == 1 != shape_of(query)[1] for k in keys]
        want |= {k: None for k, single in zip(keys, one, strict=True) if single}
        if isinstance(bias, fx.Node):
            want[bias] = lined_up(bias, c, 4) if bias.meta["val"].numel() else None
        sizes = {shape_of(a)[c.dim] for a in (query, *keys)}
        sharded = [isinstance(v, torch.Tensor) and v.dim() > 2 and v.shape[c.dim] in sizes for v in op.outputs]
        states = not grads and any(
            isinstance(v, torch.Tensor) and not k for v, k in zip(op.outputs, sharded, strict=True)
        )
        out: list[Place] = [c if k else None for k in sharded]
        if grads:  # of the query, the keys and the values; a head that every rank reads gets partial gradients
            out[1:3] = (PARTIAL if single else c for single in one)
        back = _POSITIONS if by_position and c == Shard(1) else None
        yield Strategy(want, tuple(out), _without_states(op, sharded) if states else None, back=back)


_POSITIONS = Shard(2)


def gathers_keys(op: WholeOp) -> bool:
    """Whether attention on inputs that are sharded by position gathers the keys and values, instead of exchanging
    positions for heads.

    Raises:
        FzeroValueError: heads are requested, and the number of ranks does not divide them.
    """
    heads = shape_of(op["query"])[1]
    if op.by_position == "heads" and heads % op.n:
        near = ", ".join(str(x) for x in nearest(heads, op.n))
        problems = [f"{op.target}: {heads} heads over {op.n} ranks"]
        fix = f"heads that divide ({near}), fewer ranks, or fz.sequence_parallel(attention='keys')"
        raise FzeroValueError("sequence_parallel", "cannot shard the heads of an attention", problems, fix)
    return op.by_position == "keys" or heads % op.n != 0


def _by_queries(op: WholeOp, main: Sequence[fx.Node], bias: Any) -> Iterator[Strategy]:
    """Each rank computes its own queries against all keys. Causal attention then needs a mask, which is computed from
    the rank's index."""
    query, keys = op["query"], (op["key"], op["value"])
    grads = op["grad_out"] is not None or op["grad_out_"] is not None
    causal, length = op["is_causal"], shape_of(query)[2]
    rows = [a for a in main if a not in keys]
    if (causal and "for_cpu" not in str(op.target)) or any(shape_of(a)[2:3] != [length] for a in rows):
        return
    want: dict[fx.Node, Place] = dict.fromkeys(op.inputs) | dict.fromkeys(rows, _POSITIONS)
    if isinstance(bias, fx.Node):
        want[bias] = lined_up(bias, _POSITIONS, 4)
    of_rows = [isinstance(v, torch.Tensor) and v.dim() > 2 for v in op.outputs]
    out: list[Place] = [_POSITIONS if k else None for k in of_rows]
    if grads:
        # Each rank has only the contributions of its own queries to the gradients of keys and
        # values.
        out[1:3] = PARTIAL, PARTIAL

    def write(w: Writer, a: dict[str, Any]) -> Written:
        part, like = length // op.n, query.meta["val"]
        start = w(aten.mul.Tensor, w.index(), part)
        row = w(aten.add.Tensor, w(aten.arange.default, part, dtype=torch.int64, device=like.device), start)
        column = w(aten.arange.default, shape_of(keys[0])[2], dtype=torch.int64, device=like.device)
        # bool[1, 1, queries, keys]: a query sees the keys up to its own position in the full
        # sequence.
        seen = w(aten.le.Tensor, w.view(column, [1, 1, 1, -1]), w.view(row, [1, 1, part, 1]))
        none = w(aten.full.default, [], -math.inf, dtype=like.dtype, device=like.device)
        mask = w(aten.where.self, seen, w(aten.full.default, [], 0, dtype=like.dtype, device=like.device), none)
        return w.named(op.target, a | {"attn_mask": mask, "is_causal": False})

    yield Strategy(want, tuple(out), write if causal else None)


def _without_states(op: WholeOp, sharded: Sequence[bool]) -> Callable[[Writer, dict[str, Any]], Written]:
    """The results of the op. Without dropout nothing reads the states of the random generator, so they are zeros, the
    same on every rank."""

    def write(w: Writer, a: dict[str, Any]) -> Written:
        node = w.named(op.target, a)
        return tuple(
            w(operator.getitem, node, i)
            if k or not isinstance(v, torch.Tensor)
            else w(aten.full.default, list(v.shape), 0, dtype=v.dtype, device=v.device)
            for i, (v, k) in enumerate(zip(op.outputs, sharded, strict=True))
        )

    return write


# --- norms ---


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm(op: WholeOp) -> Iterator[Strategy]:
    x = op["input"]
    before = len(shape_of(x)) - len(op["normalized_shape"])
    for c in unique([*(p for _, p in op.sharded(x)), *op.asked]):
        if c.dim < before:
            yield Strategy(op.at({x: c}), tuple(c for _ in op.outputs))


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _norm_backward(op: WholeOp) -> Iterator[Strategy]:
    x = op["input"]
    rows = [a for a in (op["grad_out"], x, op["mean"], op["rstd"]) if a is not None]
    before = len(shape_of(x)) - len(op["normalized_shape"])
    for c in unique([*(p for _, p in op.sharded(*rows)), *op.asked]):
        if c.dim < before:
            # The gradients of weight and bias are sums over all rows.
            yield Strategy(op.at(dict.fromkeys(rows, c)), (c, *(PARTIAL for _ in op.outputs[1:])))


@rule(aten.native_group_norm.default)
def _group_norm(op: WholeOp) -> Iterator[Strategy]:
    for c in unique([*(p for _, p in op.sharded(op["input"])), *op.asked]):
        if c.dim == 0:
            yield Strategy(
                op.at({op["input"]: c}),
                tuple(c for _ in op.outputs),
                lambda w, a: w.named(op.target, a | {"N": a["N"] // op.n}),
            )


# --- lookups ---


def _positions(indices: Any) -> tuple[list[int], list[fx.Node]] | None:
    """The dims that an `index` op indexes with tensors, and these tensors; None if one of them is a mask."""
    found = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not found or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in found):
        return None
    return [d for d, _ in found], [i for _, i in found]


def _indexed(dims: list[int], indices: list[fx.Node]) -> tuple[int, int]:
    """The first dim of the result that comes from the index, and the number of such dims."""
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    return (dims[0] if together else 0), max(len(shape_of(i)) for i in indices)


def _through(dim: int, dims: list[int], first: int, count: int) -> int:
    """The dim of the result that corresponds to a dim which no tensor indexes."""
    rest = dim - sum(d < dim for d in dims)
    return rest if rest < first else rest + count


def _here(w: Writer, index: fx.Node, rows: int, whole: int, wraps: bool = False) -> tuple[fx.Node, fx.Node]:
    """Translates row numbers to row numbers within this rank's shard, and returns them together with a mask of those
    that are in the shard. A number that is invalid on every rank stays invalid, so that the lookup raises. `wraps`:
    whether negative numbers count from the end."""
    if index.meta["val"].dtype != torch.int64:
        index = w(aten._to_copy.default, index, dtype=torch.int64)
    if wraps:
        index = w(aten.where.self, w(aten.lt.Scalar, index, 0), w(aten.add.Tensor, index, whole), index)
    known = w(aten.logical_and.default, w(aten.ge.Scalar, index, 0), w(aten.lt.Scalar, index, whole))
    index = w(aten.sub.Tensor, index, w(aten.mul.Tensor, w(aten.view.default, w.index(), []), rows))
    inside = w(aten.logical_and.default, w(aten.ge.Scalar, index, 0), w(aten.lt.Scalar, index, rows))
    none = w(aten.full.default, [], rows, dtype=torch.int64, device=index.meta["val"].device)
    return w(aten.where.self, known, w(aten.clamp.default, index, 0, rows - 1), none), inside


def _only(w: Writer, x: fx.Node, inside: fx.Node, behind: int) -> fx.Node:
    """`x` where a row is in this rank's shard, and zeros elsewhere. `behind` is the number of dims of `x` after those
    of the index."""
    mask = w.view(inside, [*shape_of(inside), *[1] * behind])
    zero = w(aten.full.default, [], 0, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
    return w(aten.where.self, mask, x, zero)


@rule(aten.index.Tensor)
def _index(op: WholeOp) -> Iterator[Strategy]:
    """A lookup keeps a sharding of the dims that are not indexed. If the indexed dim is sharded, each rank looks up the
    rows that it has, and the result is partial. A sharding of the indices shards the result."""
    x = op["self"]
    if (found := _positions(op["indices"])) is None or x in found[1]:
        return
    dims, indices = found
    first, count = _indexed(dims, indices)
    yield from moves(op, x)
    for p in unique([*(p for _, p in op.sharded(x)), *_asked_through(op, dims, first, count, len(shape_of(x)))]):
        if p.dim not in dims:
            yield Strategy(op.at({x: p}), Shard(_through(p.dim, dims, first, count), p.groups))
        elif dims == [p.dim] and p.groups == 1:
            rows, whole = shape_of(x)[p.dim] // op.n, shape_of(x)[p.dim]

            def write(w: Writer, a: dict[str, Any], d: int = p.dim, rows: int = rows, whole: int = whole) -> fx.Node:
                index, inside = _here(w, a["indices"][d], rows, whole, wraps=True)
                y = w(aten.index.Tensor, a["self"], [*[None] * d, index])
                return _only(w, y, inside, len(shape_of(y)) - d - count)

            yield Strategy(op.at({x: p}), PARTIAL, write)
    for c in unique([Shard(first + p.dim + count - len(shape_of(i)), p.groups) for i, p in op.sharded(*indices)]):
        yield Strategy(op.at({i: lined_up(i, Shard(c.dim - first, c.groups), count) for i in indices}), c)


def _asked_through(op: WholeOp, dims: list[int], first: int, count: int, of: int) -> list[Shard]:
    back = {_through(d, dims, first, count): d for d in range(of) if d not in dims}
    return [Shard(back[c.dim], c.groups) for c in op.asked if c.dim in back]


@rule(aten.index_put.default)
def _index_put(op: WholeOp) -> Iterator[Strategy]:
    """As for lookups. If the indexed dim is sharded, each rank adds only the values whose rows it has. If the indices
    are sharded and `self` is zeros, the result is partial."""
    x, values = op["self"], op["values"]
    if (found := _positions(op["indices"])) is None or len({x, values, *found[1]}) != 2 + len({*found[1]}):
        return
    dims, indices = found
    first, count = _indexed(dims, indices)
    index = list(torch.broadcast_shapes(*(shape_of(i) for i in indices)))
    rest = [s for d, s in enumerate(op.shape) if d not in dims]
    if shape_of(values) != [*rest[:first], *index, *rest[first:]]:
        return
    back = {_through(d, dims, first, count): d for d in range(len(op.shape)) if d not in dims}
    adds = op["accumulate"] and zeros(x)
    if adds and op.partial(values):
        yield Strategy(op.at({values: PARTIAL}), PARTIAL)
    kept = [Shard(back[p.dim], p.groups) for _, p in op.sharded(values) if p.dim in back]
    for p in unique([*kept, *(p for _, p in op.sharded(x)), *op.asked]):
        if p.dim not in dims:
            yield Strategy(op.at({x: p, values: Shard(_through(p.dim, dims, first, count), p.groups)}), p)
        elif dims == [p.dim] and p.groups == 1 and op["accumulate"]:
            rows, whole = op.shape[p.dim] // op.n, op.shape[p.dim]

            def write(w: Writer, a: dict[str, Any], d: int = p.dim, rows: int = rows, whole: int = whole) -> fx.Node:
                at, inside = _here(w, a["indices"][d], rows, whole, wraps=True)
                y = _only(w, a["values"], inside, len(shape_of(a["values"])) - d - count)
                return w(aten.index_put.default, a["self"], [*[None] * d, at], y, True)

            yield Strategy(op.at({x: p}), p, write)
    of_index = [Shard(first + p.dim + count - len(shape_of(i)), p.groups) for i, p in op.sharded(*indices)]
    of_index += [p for _, p in op.sharded(values) if p.dim not in back]
    for c in unique(of_index) if adds else ():
        yield Strategy(
            op.at({values: c, **{i: lined_up(i, Shard(c.dim - first, c.groups), count) for i in indices}}), PARTIAL
        )


@rule(aten.embedding.default)
def _embedding(op: WholeOp) -> Iterator[Strategy]:
    """A table sharded by columns shards the result; if it is sharded by rows, each rank looks up the rows that it has,
    and the result is partial. A sharding of the indices shards the result."""
    table, indices = op["weight"], op["indices"]
    count = len(shape_of(indices))
    yield from moves(op, table)
    asked = [Shard(1, c.groups) for c in op.asked if c.dim == count]
    for p in unique([*(p for _, p in op.sharded(table)), *asked]):
        if p.dim == 1:
            yield Strategy({table: p, indices: None}, Shard(count, p.groups))
        elif p.groups == 1:
            rows, whole = shape_of(table)[0] // op.n, shape_of(table)[0]

            def write(w: Writer, a: dict[str, Any], rows: int = rows, whole: int = whole) -> fx.Node:
                index, inside = _here(w, a["indices"], rows, whole)
                return _only(w, w(aten.embedding.default, a["weight"], index), inside, 1)

            yield Strategy({table: p, indices: None}, PARTIAL, write)
    for p in unique([*(p for _, p in op.sharded(indices)), *(c for c in op.asked if c.dim < count)]):
        yield Strategy({table: None, indices: p}, p)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(op: WholeOp) -> Iterator[Strategy]:
    """The gradient of the table is partial if the indices are sharded, and otherwise sharded by columns or by rows."""
    grad, indices = op["grad_output"], op["indices"]
    count = len(shape_of(indices))
    if op["scale_grad_by_freq"]:
        return
    yield from moves(op, grad)
    for p in unique([*(p for _, p in op.sharded(grad)), *(p for _, p in op.sharded(indices))]):
        if p.dim < count:
            yield Strategy({grad: p, indices: p}, PARTIAL)
    last = [p for _, p in op.sharded(grad) if p.dim == count]
    for c in unique([*(Shard(1, p.groups) for p in last), *op.asked]):
        if c.dim == 1:
            yield Strategy({grad: Shard(count, c.groups), indices: None}, c)
        elif c.groups == 1:
            rows, whole = op.shape[0] // op.n, op.shape[0]

            def write(w: Writer, a: dict[str, Any], rows: int = rows, whole: int = whole) -> fx.Node:
                index, inside = _here(w, a["indices"], rows, whole)
                # `padding_idx` is a row of the full table, and would be another row of the shard.
                # Its gradients are set to zero here instead.
                if a["padding_idx"] >= 0:
                    inside = w(aten.logical_and.default, inside, w(aten.ne.Scalar, a["indices"], a["padding_idx"]))
                kept = _only(w, a["grad_output"], inside, 1)
                return w(aten.embedding_dense_backward.default, kept, index, rows, -1, False)

            yield Strategy({grad: None, indices: None}, c, write)


@rule(aten.index_select.default)
def _index_select(op: WholeOp) -> Iterator[Strategy]:
    """As for `_index`, with a one-dimensional index."""
    x, index, d = op["self"], op["index"], op["dim"] % max(1, len(op.shape))
    yield from moves(op, x)
    for p in unique([*(p for _, p in op.sharded(x)), *(c for c in op.asked if c.dim != d)]):
        if p.dim != d:
            yield Strategy({x: p, index: None}, p)
        elif p.groups == 1 and len(shape_of(index)) == 1:
            rows, whole = shape_of(x)[d] // op.n, shape_of(x)[d]

            def write(w: Writer, a: dict[str, Any], rows: int = rows, whole: int = whole) -> fx.Node:
                at, inside = _here(w, a["index"], rows, whole)
                y = w(aten.index_select.default, a["self"], d, at)
                return _only(w, y, inside, len(shape_of(y)) - d - 1)

            yield Strategy({x: p, index: None}, PARTIAL, write)
    for _, p in op.sharded(index):
        yield Strategy({x: None, index: p}, Shard(d, p.groups))


@rule(aten.gather.default)
def _gather(op: WholeOp) -> Iterator[Strategy]:
    """As for `_index`; dims other than the gathered one must have the same size in both arguments to be sharded."""
    x, index, d = op["self"], op["index"], op["dim"] % max(1, len(op.shape))
    if x is index or not op.shape:
        return
    yield from moves(op, x)
    for p in unique([*(p for _, p in op.sharded()), *op.asked]):
        if p.dim != d and shape_of(x)[p.dim] == shape_of(index)[p.dim]:
            yield Strategy({x: p, index: p}, p)
    for p in unique(p for _, p in op.sharded(x)):
        if p.dim == d and p.groups == 1:
            rows, whole = shape_of(x)[d] // op.n, shape_of(x)[d]

            def write(w: Writer, a: dict[str, Any], rows: int = rows, whole: int = whole) -> fx.Node:
                at, inside = _here(w, a["index"], rows, whole)
                return _only(w, w(aten.gather.default, a["self"], d, at), inside, 0)

            yield Strategy({x: p, index: None}, PARTIAL, write)


@rule(aten.index_add.default)
def _index_add(op: WholeOp) -> Iterator[Strategy]:
    x, index, source, d = op["self"], op["index"], op["source"], op["dim"] % max(1, len(op.shape))
    if not op.shape or len({x, index, source}) < 3:
        return
    if zeros(x) and op.partial(source):
        yield Strategy(op.at({source: PARTIAL}), PARTIAL)
    for p in unique([*(p for _, p in op.sharded(x, source)), *op.asked]):
        if p.dim != d:
            yield Strategy({x: p, index: None, source: p}, p)
        elif zeros(x) and op.place[source] == p:
            yield Strategy({x: None, index: Shard(0, p.groups), source: p}, PARTIAL)


@rule(aten.scatter_add.default, aten.scatter.src, aten.scatter.value)
def _scatter(op: WholeOp) -> Iterator[Strategy]:
    """Dims other than the scattered one keep their sharding. If the scattered dim is sharded, each rank adds only the
    values whose rows it has; if the indices and values are sharded along it instead, the result is partial. Both
    require a scatter_add to zeros."""
    x, index, d = op["self"], op["index"], op["dim"] % max(1, len(op.shape))
    source = cast(fx.Node, op["src"])
    if not op.shape or len(set(op.inputs)) != 2 + (source is not None):
        return
    sizes = [shape_of(a) for a in op.inputs]
    adds = op.target is aten.scatter_add.default and zeros(x) and source is not None
    if adds and op.partial(source):
        yield Strategy(op.at({source: PARTIAL}), PARTIAL)
    for p in unique([*(p for _, p in op.sharded()), *op.asked]):
        if p.dim != d and len({s[p.dim] for s in sizes}) == 1:
            yield Strategy(dict.fromkeys(op.inputs, p), p)
        elif p.dim == d and adds and any(q == p for _, q in op.sharded(index, source)) and sizes[1] == sizes[2]:
            yield Strategy({x: None, index: p, source: p}, PARTIAL)
        elif p.dim == d and adds and p.groups == 1:
            rows, whole = op.shape[d] // op.n, op.shape[d]

            def write(w: Writer, a: dict[str, Any], rows: int = rows, whole: int = whole) -> fx.Node:
                at, inside = _here(w, a["index"], rows, whole)
                slices = [aten.slice.Tensor] * (shape_of(a["src"]) != shape_of(at))
                source = a["src"]
                for k in range(len(sizes[2])) if slices else ():
                    source = w(aten.slice.Tensor, source, k, 0, shape_of(at)[k])
                return w(aten.scatter_add.default, a["self"], d, at, _only(w, source, inside, 0))

            yield Strategy({x: p, index: None, source: None}, p, write)


# --- convolutions ---


@rule(aten.convolution.default)
def _convolution(op: WholeOp) -> Iterator[Strategy]:
    """Shards a convolution by samples, by output channels, or by input channels; in the last case the result is
    partial."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    into, out = (0, 1) if op["transposed"] else (1, 0)  # dims of the weight's input and output channels
    if x is weight or len(shape_of(x)) != len(shape_of(weight)):
        return
    sharded = op.sharded(x, weight)
    for c in unique([*(p for a, p in sharded if a is x and p.dim == 0), *(c for c in op.asked if c.dim == 0)]):
        yield Strategy(op.at({x: c}), c)
    if op["groups"] != 1:
        for c in _of_groups(op, sharded, x, weight):
            want = {x: c, weight: Shard(0, c.groups)} | ({bias: Shard(0, c.groups)} if bias is not None else {})
            groups = {"groups": op["groups"] // op.n}
            yield Strategy(op.at(want), c, lambda w, a, groups=groups: w.named(op.target, a | groups))
        return
    of_out = [p.groups for a, p in sharded if a is weight and p.dim == out] + [c.groups for c in op.asked if c.dim == 1]
    for g in dict.fromkeys(of_out):
        want = {weight: Shard(out, g)} | ({bias: Shard(0, g)} if bias is not None else {})
        yield Strategy(op.at(want), Shard(1, g))
    # Every rank would add a bias to its partial result: decompositions.py adds it separately.
    for g in dict.fromkeys(p.groups for a, p in sharded if p.dim == (1 if a is x else into)) if bias is None else ():
        yield Strategy({x: Shard(1, g), weight: Shard(into, g)}, PARTIAL)


def _of_groups(
    op: WholeOp, sharded: Sequence[tuple[fx.Node, Shard]], x: fx.Node, weight: fx.Node, *others: fx.Node
) -> list[Shard]:
    """The shardings of channels that do not divide a group of a convolution."""
    found = [p for a, p in sharded if p.dim == 1 and (a is x or a in others)]
    found += [Shard(1, p.groups) for a, p in sharded if a is weight and p.dim == 0]
    return [c for c in unique(found) if not op["transposed"] and op["groups"] % (c.groups * op.n) == 0]


@rule(aten.convolution_backward.default)
def _convolution_backward(op: WholeOp) -> Iterator[Strategy]:
    """Shards the gradients by samples, by output channels, or by input channels."""
    grad, x, weight = op["grad_output"], op["input"], op["weight"]
    into, out = (0, 1) if op["transposed"] else (1, 0)
    if len({grad, x, weight}) < 3 or len(shape_of(x)) != len(shape_of(weight)):
        return
    sharded = op.sharded()
    for c in unique(p for a, p in sharded if a is not weight and p.dim == 0):
        yield Strategy(op.at({grad: c, x: c}), (c, PARTIAL, PARTIAL))
    if op["groups"] != 1:
        return
    for g in dict.fromkeys(
        p.groups for a, p in sharded if (a is grad and p.dim == 1) or (a is weight and p.dim == out)
    ):
        sizes = [shape_of(weight)[out] // op.n]
        named = {"bias_sizes": sizes} if op["bias_sizes"] is not None else {}
        yield Strategy(
            op.at({grad: Shard(1, g), weight: Shard(out, g)}),
            (PARTIAL, Shard(out, g), Shard(0, g)),
            lambda w, a, named=named: w.named(op.target, a | named),
        )
    for g in dict.fromkeys(p.groups for a, p in sharded if (a is x and p.dim == 1) or (a is weight and p.dim == into)):

        def write(w: Writer, a: dict[str, Any]) -> tuple[fx.Node, ...]:
            mask = a["output_mask"]
            dx_dw = w.named(op.target, a | {"output_mask": [mask[0], mask[1], False]})
            over = [d for d in range(len(shape_of(grad))) if d != 1]
            db = w(aten.sum.dim_IntList, a["grad_output"], over) if mask[2] else dx_dw
            return (*(w(operator.getitem, dx_dw, i) if mask[i] else dx_dw for i in range(2)), db)

        yield Strategy(op.at({x: Shard(1, g), weight: Shard(into, g)}), (Shard(1, g), Shard(into, g), None), write)


@rule(
    aten.avg_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)
def _over_images(op: WholeOp) -> Iterator[Strategy]:
    two = 1 if op.target is aten.reflection_pad1d.default else 2
    yield from along(op, range(len(op.shape) - two, len(op.shape)))


# --- losses ---


@rule(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
)
def _loss(op: WholeOp) -> Iterator[Strategy]:
    """The unreduced loss of each sample; dim 1 is the dim of classes. A reduced loss is decomposed."""
    x, target, grad = op["self"], op["target"], op["grad_output"]
    if op["reduction"] != 0:
        return
    # The target, and the gradient of an unreduced loss, lack the dim of classes, which is dim 1.
    of_rows = [Shard(p.dim + (p.dim > 0), p.groups) for _, p in op.sharded(target, grad)]
    for c in unique([*(p for _, p in op.sharded(x) if p.dim != 1), *of_rows]):
        rows = Shard(c.dim - (c.dim > 0), c.groups)
        if grad is None:
            yield Strategy(op.at({x: c, target: rows}), (rows, None))
        else:
            yield Strategy(op.at({x: c, target: rows, grad: rows}), c)


@rule(aten.binary_cross_entropy_with_logits.default)
def _loss_of_elements(op: WholeOp) -> Iterator[Strategy]:
    if op["reduction"] == 0:
        yield from pointwise(op)


# --- draws ---


@rule(DRAW)
def _draw(op: WholeOp) -> Iterator[Strategy]:
    """A shard that is contiguous in the draw starts at the offset of its first element, so its values are those of the
    full draw."""
    for c in op.asked:
        if c.groups == 1 and math.prod(op.shape[: c.dim]) == 1:
            size = part(op.shape, c, op.n)

            def write(w: Writer, a: dict[str, Any], size: list[int] = size) -> fx.Node:
                start = w(aten.mul.Tensor, w(aten.view.default, w.index(), []), math.prod(size))
                start = w(aten.add.Tensor, start, a["start"])
                whole = [a[k] for k in ("key", "shape", "numel", "start", "kind")]
                return w(DRAW_FROM, *from_start(whole, start, size))

            yield Strategy(op.at({}), c, write)


def rule_of(target: Any) -> Rule | None:
    """The rule of an op: the registered one, or `pointwise` if the op is tagged as pointwise and does not draw random
    numbers."""
    if target in RULES:
        return RULES[target]
    tags = getattr(target, "tags", ())
    return pointwise if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags else None
