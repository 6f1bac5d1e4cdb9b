"""The sharding rules of convolutions and random draws."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from fzero.random import DRAW, DRAW_FROM, from_start
from fzero.sharding.attention_rules import ATTENTION
from fzero.sharding.factors import Factors, custom, factors_of, labelled
from fzero.sharding.operations import Operation, Strategy, shape_of
from fzero.sharding.placements import REPLICATE, Shard, local_shape

aten = torch.ops.aten


@labelled(aten.convolution.default)
def _convolution(op: Operation) -> Factors | None:
    """A convolution is sharded by samples (n), by output channels (o), or by input channels (c).
    With a bias, c is blocked, because every rank would add the bias."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    if len(shape_of(x)) != len(shape_of(weight)):
        return None
    rest = ("",) * (len(shape_of(x)) - 2)
    of = ("c", "o", *rest) if op["transposed"] else ("o", "c", *rest)
    operands = [(x, ("n", "c", *rest)), (weight, of), *([(bias, ("o",))] if bias is not None else [])]
    blocked = "co" if op["groups"] != 1 else "c" if bias is not None else ""
    return factors_of(op, operands, [("n", "o", *rest)], blocked=blocked, seeds=(0, 1))


@labelled(aten.convolution_backward.default)
def _convolution_backward(op: Operation) -> Factors | None:
    grad, x, weight = op["grad_output"], op["input"], op["weight"]
    if len(shape_of(x)) != len(shape_of(weight)):
        return None
    rest = ("",) * (len(shape_of(x)) - 2)
    of = ("c", "o", *rest) if op["transposed"] else ("o", "c", *rest)
    made = [("n", "c", *rest), of, ("o",)]
    results = [k if isinstance(v, torch.Tensor) else None for k, v in zip(made, op.results, strict=True)]

    def local(op: Operation, label: str, a: dict[str, Any]) -> dict[str, Any]:
        sized = label == "o" and a["bias_sizes"] is not None
        return a | ({"bias_sizes": [shape_of(grad)[1] // op.n]} if sized else {})

    operands = [(grad, ("n", "o", *rest)), (x, ("n", "c", *rest)), (weight, of)]
    blocked = "co" if op["groups"] != 1 else ""
    return factors_of(op, operands, results, blocked=blocked, free=((2, "c"),), local=local)


@custom(aten.convolution.default)
def _grouped_convolution(op: Operation) -> Iterator[Strategy]:
    """Shards the channels of a grouped convolution so that no group is divided."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    if op["groups"] == 1 or op["transposed"]:
        return
    found = [p for a, p in op.sharded(x, weight) if p.dim == (1 if a is x else 0)]
    for g in dict.fromkeys(p.groups for p in found):
        if op["groups"] % (g * op.n) == 0:
            want = {x: Shard(1, g), weight: Shard(0, g)} | ({bias: Shard(0, g)} if bias is not None else {})
            local = {"groups": op["groups"] // op.n}
            yield Strategy(op.at(want), (Shard(1, g),), lambda w, a, local=local: w.named(op.target, a | local))


def independent_results(op: Operation, s: Strategy) -> Strategy:
    """The strategy, with the results that do not depend on sharded operands computed from the other operands alone. So
    these results are known to be the same on every rank. They are the states of random generators, which nothing reads
    without dropout, and the gradient of a convolution's bias."""
    if s.write is not None and op.target is not aten.convolution_backward.default:
        return s
    body: dict[int, Any] = {}
    if op.target is aten.convolution_backward.default:
        if s.out[2] == REPLICATE and s.want[op["input"]] != REPLICATE and op["output_mask"][2]:
            over = [d for d in range(len(shape_of(op["grad_output"]))) if d != 1]
            body = {2: lambda w, a: w(aten.sum.dim_IntList, a["grad_output"], over)}
    elif op.target in ATTENTION and op["grad_out"] is None and op["grad_out_"] is None:
        states = {i: v for i, v in enumerate(op.results) if isinstance(v, torch.Tensor) and v.dim() < 3}
        fill = lambda v: lambda w, a: w(aten.full.default, list(v.shape), 0, dtype=v.dtype, device=v.device)  # noqa: E731
        body = {i: fill(v) for i, v in states.items()}
    if not body:
        return s

    def write(w: Any, a: dict[str, Any]) -> Any:
        mask = {"output_mask": [*a["output_mask"][:2], False]} if "output_mask" in a else {}
        made = s.write(w, {**a, **mask}) if s.write else w.named(op.target, {**a, **mask})
        got = lambda i, v: w(operator.getitem, made, i) if isinstance(v, torch.Tensor) else made  # noqa: E731
        return tuple(body[i](w, a) if i in body else got(i, v) for i, v in enumerate(op.results))

    return Strategy(s.want, s.out, write, s.back)


@custom(DRAW)
def _draw(op: Operation) -> Iterator[Strategy]:
    """A shard that is contiguous in the draw starts at the offset of its first element, so that its values are those of
    the full draw."""
    for c in op.asked:
        if c.groups == 1 and math.prod(op.shape[: c.dim]) == 1:
            size = local_shape(op.shape, c, op.n)

            def write(w: Any, a: dict[str, Any], size: list[int] = size) -> fx.Node:
                start = w.trace(lambda rank: rank.view([]) * math.prod(size) + a["start"], w.index())
                return w(
                    DRAW_FROM, *from_start([a[k] for k in ("key", "shape", "numel", "start", "kind")], start, size)
                )

            yield Strategy(op.at({}), (c,), write)
