"""Gathers parameters in 8 bits: the lines that round shards before they travel.

A parameter that rests as a shard, and that nothing but products in 8 bits reads (precision/fp8.py), is cast to
float8_e4m3fn by the scale of the whole. That is the largest of its shards' scales: `scales` makes one for each leaf of
a block, and passes/shard.py puts the reduction of all of them behind. A larger number is rounded to no smaller one, and
has no smaller scale: so it is the scale of the whole in the dtype that it would be multiplied in otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.fx as fx

from fzero import compat
from fzero.operators.scaled_matmul import E4M3, amax, scale_of
from fzero.precision.fp8 import InFp8, rewrite
from fzero.program.attrs import CallAttrs, CastAttrs
from fzero.program.ir import Line, Value
from fzero.program.lines import Functions, Inputs
from fzero.program.names import Names, identifier
from fzero.trace.joint import call_block, call_vjp
from fzero.trace.record import record
from fzero.trace.recorder import Recorded


def in_8_bits(
    graph: Recorded,
    lines: list[Line],
    fp8: InFp8,
    params: Inputs,
    cast: Mapping[int, Value],
    grads: Mapping[int, fx.Node],
    seeds: Sequence[fx.Node],
    functions: Functions,
    names: Names,
) -> tuple[Recorded, list[Line]]:
    """A step's loss and gradients, or an evaluation, with products in 8 bits; and the lines before it.

    Args:
        graph: whose first inputs are the distinct parameters.
        lines: that cast them.
        fp8: which products.
        params: the leaf table.
        cast: by position, what of a parameter the graph reads.
        grads: likewise the result that is its gradient.
        seeds: what gradients are computed from.
        functions, names: of the program; those of new lines are added.
    """
    places = dict(zip(params.distinct, graph.inputs, strict=False))
    multiplied = fp8.multiplied(params)
    sharded = [places[i] for i in multiplied if fp8.comes_rounded(params.leaves[i])]
    paths = {places[i]: params.leaves[i].path for i in multiplied}
    graph, scales = rewrite(graph, {places[i]: grads.get(i) for i in multiplied}, seeds, fp8, sharded, paths)
    groups: dict[fx.Node, list[int]] = {}
    for i in (i for i in multiplied if places[i] in scales):
        groups.setdefault(_block_of(places[i]), []).append(i)
    calls, casts = list[Line](), list[Line]()
    for group in groups.values():
        values = []
        for i in group:
            leaf, name = params.leaves[i], identifier(params.leaves[i].path)
            values.append(Value(names(f"{name}_scale"), (), torch.float32))
            rounded = Value(names(f"{name}_float8"), leaf.shape, E4M3)
            places[i].meta["name"], scales[places[i]].meta["name"] = rounded.name, values[-1].name
            casts.append(
                Line(
                    "cast",
                    (leaf.path, values[-1].name),
                    (rounded,),
                    attrs=CastAttrs(dtype=E4M3, through=cast[i].dtype),
                    by="fp8",
                )
            )
        facts = tuple((params.leaves[i].shape, params.leaves[i].dtype, cast[i].dtype) for i in group)
        fn = functions.add("scales", _scales(facts, graph.inputs[0].meta["val"].device))
        calls.append(
            Line(
                "call",
                tuple(params.leaves[i].path for i in group),
                tuple(values),
                fn,
                CallAttrs(scales=True),
                by="fp8",
            )
        )
    replaced = {cast[i].name for group in groups.values() for i in group}
    lines = [*calls, *casts, *(line for line in lines if not (line.op == "cast" and line.out[0].name in replaced))]
    return graph, lines


def on_shards(graph: Recorded, shapes: Sequence[tuple[int, ...]]) -> Recorded:
    """A function that makes scales, of tensors of other shapes."""
    mode = compat.FakeTensorMode()
    with mode:
        fakes = [
            compat.new_fake(mode, s, x.meta["val"].dtype, x.meta["val"].device)
            for s, x in zip(shapes, graph.inputs, strict=True)
        ]
        return record(graph.module(), fakes, owner="fp8", names=[n.name for n in graph.inputs])


def _block_of(weight: fx.Node) -> fx.Node:
    """The block that first reads a parameter; outside blocks the parameter itself."""
    return next((user for user in weight.users if user.target in (call_block, call_vjp)), weight)


@functools.lru_cache(maxsize=256)
def _scales(facts: tuple[tuple[tuple[int, ...], torch.dtype, torch.dtype], ...], device: torch.device) -> Recorded:
    """The scales of leaves with these shapes and dtypes, in other dtypes."""
    mode = compat.FakeTensorMode()
    with mode:
        fakes = [compat.new_fake(mode, shape, dtype, device) for shape, dtype, _ in facts]

        def run(*xs: torch.Tensor) -> list[torch.Tensor]:
            return [scale_of(amax(x.to(through)), E4M3) for x, (_, _, through) in zip(xs, facts, strict=True)]

        return record(run, fakes, owner="fp8", names=[f"x_{i}" for i in range(len(fakes))])
