"""Gives each offloaded master parameter a copy in the compute dtype; the update writes master and copy in one pass.

Without the copies, every step would cast the masters again after they were written, and transfer them once more. The
copies are tensors of the state, in `extras['compute']`; because they can be computed from the masters, no checkpoint
contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.ir.attributes import UpdateAttrs
from fzero.ir.program import Instruction, Program, Value
from fzero.sharding.layout import Leaf
from fzero.trace.recorder import Recorded

aten = torch.ops.aten


@dataclass(frozen=True)
class ComputeCopies:
    """The masters that have copies, and the copies, by the path of their master."""

    masters: tuple[str, ...]
    copies: Mapping[str, Leaf] = field(compare=False)


def rewrite(program: Program, options: ComputeCopies) -> Program:
    """Returns the base program of a step that reads the copies of masters, and whose update writes them too.

    Precondition: no op is split or repeated yet.
    """
    copies = options.copies
    casts = {
        x.args[0]: x
        for x in program.instructions
        if x.op == "cast" and x.args[0] in copies and x.out[0].dtype == copies[x.args[0]].dtype
    }
    held = {master: leaf for master, leaf in copies.items() if master in casts}
    if not held:
        return program
    names = {casts[master].out[0].name: leaf.path for master, leaf in held.items()}
    dropped = set(map(id, casts.values()))
    ops = [op.rename(names) for op in program.instructions if id(op) not in dropped]
    ops = [
        _written(op, {m: leaf for m, leaf in held.items() if m in op.writes}) if op.op == "update" else op for op in ops
    ]
    owners = {**program.owners, **{leaf.path: program.owners[m] for m, leaf in held.items() if m in program.owners}}
    return replace(
        program,
        inputs=(*program.inputs, *(Value(leaf.path, leaf.shape, leaf.dtype) for leaf in held.values())),
        leaves={**program.leaves, **{leaf.path: leaf for leaf in held.values()}},
        instructions=tuple(ops),
        owners=owners,
    )


def _written(update: Instruction, copies: Mapping[str, Leaf]) -> Instruction:
    """Returns the update that also writes the compute copies."""
    source = update.says(UpdateAttrs).graph
    graph = compat.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(source.graph, env)
    num, inputs, outputs = len(update.writes), [env[n] for n in source.inputs], [env[n] for n in source.outputs]
    new = dict(zip(update.writes, outputs, strict=False))
    last, casts = inputs[-1], []
    for i, (master, leaf) in enumerate(copies.items()):
        value = new[master].meta["val"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"copy_{i}")
            last.meta["val"] = torch.empty_like(value, dtype=leaf.dtype)
        cast = graph.call_function(aten._to_copy.default, (new[master],), {"dtype": leaf.dtype})
        cast.meta["val"] = torch.empty_like(value, dtype=leaf.dtype)
        casts.append(cast)
    # The outputs are the new values of the written tensors, to which the copies now belong,
    # followed by the metrics.
    graph.output((*outputs[:num], *casts, *outputs[num:]))
    paths = tuple(leaf.path for leaf in copies.values())
    update = update.saying(graph=Recorded(graph, source.constants))
    return replace(update, args=(*update.args, *paths), writes=(*update.writes, *paths))
