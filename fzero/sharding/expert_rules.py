"""The sharding rules of ops that assign tokens to rows of experts, and that multiply the rows of several experts.

If a value with indices is sharded, it holds indices into the full value that lie in the rank's own shard. The local
bodies convert them to indices into the shard, and the results back to indices into the full value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER, GROUPED_MM, GROUPED_OUTER
from fzero.ops.routed_rows import ROUTE, UNROUTE
from fzero.ops.row_indices import CHOICES, ROWS_AT, SLOTS
from fzero.sharding.factors import custom, rule
from fzero.sharding.operations import Operation, Strategy, shape_of
from fzero.sharding.placements import SUM, Shard, divides

aten = torch.ops.aten


rule(EXPERT_MM, "gr,grk,gkn->grn", seeds=(0, 1), linear="1|2")
rule(EXPERT_OUTER, "gr,gmr,grn->gmn", linear="1|2")
rule(GROUPED_MM, "e,rk,ekn->rn", blocked="er", linear="1|2")
rule(GROUPED_OUTER, "e,rm,rn->emn", blocked="er", linear="1|2")
rule(ROUTE, "tf,r,e->rf", blocked="tre", linear="0", moves=True)
rule(UNROUTE, "rf,m,e->mf", blocked="rme", linear="0", moves=True)


def _converted(
    x: torch.Tensor, rank: torch.Tensor, shape: list[int], place: Shard, n: int, to_shard: bool
) -> torch.Tensor:
    """Converts indices into the full value, which lie in this rank's shard, to indices into the shard (`to_shard`), or
    the other way round. -1 stays -1."""
    period = math.prod(shape[place.dim :]) // place.groups
    run = period // n
    old, new = (period, run) if to_shard else (run, period)
    start = rank.view([1] * x.dim()) * run
    within = x.remainder(old) + (-start if to_shard else start)
    return torch.where(x >= 0, torch.div(x, old, rounding_mode="floor") * new + within, -1)


@custom(SLOTS)
def _slots(op: Operation) -> Iterator[Strategy]:
    """The rows that a rank's tokens fill: a run of every expert's rows."""
    count, size = op["num_experts"], op["size"]

    def local(experts: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        return _converted(SLOTS(experts, count, size // op.n), rank, [count, size], Shard(1), op.n, False)

    for x, p in op.sharded():
        if p.dim == 0 and size % op.n == 0:
            yield Strategy({x: p}, (p,), lambda w, a: w.trace(local, a["experts"], w.index()))


@custom(CHOICES)
def _choices(op: Operation) -> Iterator[Strategy]:
    count, size = op["num_experts"], op["size"]
    for x, p in op.sharded():
        shape = shape_of(x)

        def local(slots: torch.Tensor, rank: torch.Tensor, p: Shard = p, shape: list[int] = shape) -> torch.Tensor:
            made = CHOICES(_converted(slots, rank, [count, size], Shard(1), op.n, True), count, size // op.n)
            return _converted(made, rank, shape, p, op.n, False)

        if p.dim == 0 and size % op.n == 0:
            yield Strategy({x: p}, (Shard(1),), lambda w, a, local=local: w.trace(local, a["slots"], w.index()))


@custom(ROWS_AT)
def _rows_at(op: Operation) -> Iterator[Strategy]:
    """Reads rows of a rank at their indices, if both the indices and the rows belong to the rank."""
    x, index, back = op["x"], op["index"], op["back"]
    at, rows = op.place[index], op.place[back]
    if op.place[x] == SUM:
        yield Strategy(op.at({x: SUM}), (SUM,))
    if isinstance(at, Shard) and isinstance(rows, Shard) and rows.dim == 0 and divides(shape_of(x), rows, op.n):
        shape = shape_of(x)[:1]

        def local(x: Any, index: Any, back: Any, rank: Any) -> Any:
            return ROWS_AT(x, _converted(index, rank, shape, rows, op.n, True), back, op["fill"])

        want = {index: at, back: rows, x: rows}
        yield Strategy(want, (at,), lambda w, a: w.trace(local, a["x"], a["index"], a["back"], w.index()))
