"""Lists strategies for assigning tokens to rows of experts on shards of the tokens, where each rank fills a run of
every expert's rows; and for multiplying a shard of the rows.

If a value with such indices is sharded, it holds indices into the full value that lie in the rank's own shard. The
strategies convert them to indices into the shard, and the results back to indices into the full value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER
from fzero.ops.row_indices import CHOICES, ROWS_AT, SLOTS
from fzero.sharding.op_strategies import PARTIAL, Strategy, WholeOp, Writer, divides, moves, rule, shape_of, unique
from fzero.sharding.placements import Shard

aten = torch.ops.aten


@rule(SLOTS)
def _slots(op: WholeOp) -> Iterator[Strategy]:
    """The rows that a rank's tokens fill."""
    rows = op["num_experts"], op["size"]

    def write(w: Writer, a: dict[str, Any]) -> fx.Node:
        return _of_whole(w, w(SLOTS, a["experts"], rows[0], rows[1] // w.n), rows, Shard(1))

    for x, p in op.sharded():
        if p.dim == 0 and rows[1] % op.n == 0:
            yield Strategy({x: p}, p, write)


@rule(CHOICES)
def _choices(op: WholeOp) -> Iterator[Strategy]:
    rows = op["num_experts"], op["size"]
    for x, p in op.sharded():
        shape = tuple(shape_of(x))

        def write(w: Writer, a: dict[str, Any], p: Shard = p, shape: tuple[int, ...] = shape) -> fx.Node:
            slots = _of_part(w, a["slots"], rows, Shard(1))
            return _of_whole(w, w(CHOICES, slots, rows[0], rows[1] // w.n), shape, p)

        if p.dim == 0 and rows[1] % op.n == 0:
            yield Strategy({x: p}, Shard(1), write)


@rule(ROWS_AT)
def _rows_at(op: WholeOp) -> Iterator[Strategy]:
    """Reads rows of a rank at their indices, if both the indices and the rows belong to the rank."""
    x, index, back = op["x"], op["index"], op["back"]
    at, rows = op.place[index], op.place[back]
    if isinstance(at, Shard) and isinstance(rows, Shard) and rows.dim == 0 and divides(shape_of(x), rows, op.n):
        shape = tuple(shape_of(x)[:1])

        def write(w: Writer, a: dict[str, Any]) -> fx.Node:
            return w(ROWS_AT, a["x"], _of_part(w, a["index"], shape, rows), a["back"], a["fill"])

        yield Strategy({index: at, back: rows, x: rows}, at, write)
    yield from moves(op, x)


@rule(EXPERT_MM)
def _expert_mm(op: WholeOp) -> Iterator[Strategy]:
    expert, rows, w = op.node.args
    for p in unique(p for _, p in op.sharded(expert, rows)):
        if p.dim == 1 and expert is not rows:
            yield Strategy({expert: p, rows: p, w: None}, p)  # type: ignore[dict-item]


@rule(EXPERT_OUTER)
def _expert_outer(op: WholeOp) -> Iterator[Strategy]:
    expert, a, b, _ = op.node.args
    for p in unique(p for _, p in op.sharded(expert, b)):
        if p.dim == 1 and a is not b:
            # The rows are the last dim of `a`: [groups, inputs, rows].
            yield Strategy({expert: p, a: Shard(2, p.groups), b: p}, PARTIAL)  # type: ignore[dict-item]


def _runs(shape: tuple[int, ...], place: Shard, n: int) -> tuple[int, int]:
    """The flattened indices of a sharded value consist of periods, with one run per rank in each period. Returns the
    length of a run and of a period."""
    period = math.prod(shape[place.dim :]) // place.groups
    return period // n, period


def _of_part(w: Writer, numbers: fx.Node, shape: tuple[int, ...], place: Shard) -> fx.Node:
    """Converts indices into the full value, which lie in this rank's shard, to indices into the shard."""
    run, period = _runs(shape, place, w.n)
    group = w(aten.div.Scalar_mode, numbers, period, rounding_mode="floor")
    within = w(aten.sub.Tensor, w(aten.remainder.Scalar, numbers, period), _start(w, numbers, run))
    return _kept(w, numbers, w(aten.add.Tensor, w(aten.mul.Scalar, group, run), within))


def _of_whole(w: Writer, numbers: fx.Node, shape: tuple[int, ...], place: Shard) -> fx.Node:
    """Converts indices into this rank's shard to indices into the full value."""
    run, period = _runs(shape, place, w.n)
    group = w(aten.div.Scalar_mode, numbers, run, rounding_mode="floor")
    within = w(aten.add.Tensor, w(aten.remainder.Scalar, numbers, run), _start(w, numbers, run))
    return _kept(w, numbers, w(aten.add.Tensor, w(aten.mul.Scalar, group, period), within))


def _start(w: Writer, numbers: fx.Node, run: int) -> fx.Node:
    index = w.view(w.index(), [1] * len(shape_of(numbers)))
    return w(aten.mul.Scalar, index, run)


def _kept(w: Writer, numbers: fx.Node, new: fx.Node) -> fx.Node:
    """The new indices, with -1 where the old ones are negative (no index)."""
    return w(aten.where.ScalarOther, w(aten.ge.Scalar, numbers, 0), new, -1)
