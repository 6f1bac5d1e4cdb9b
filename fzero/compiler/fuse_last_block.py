"""Fuses a block's forward with a backward that directly follows it: nothing is saved or recomputed, and its parameters
are gathered once.

This applies to the last block of a step; the residual subgraphs between its forward and its vjp (the loss, the seed of
the backward) are included. If a residual subgraph reads parameters, nothing is fused: the fused subgraph would hold
these parameters together with those of the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.ir.attributes import CallAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.program import Instruction, Program
from fzero.trace.cse import merge_equal
from fzero.trace.recorder import Recorded


def rewrite(program: Program) -> Program:
    """Returns the base program with the last block's forward and vjp as one op, `..._value_and_grad`, if there are only
    residual subgraphs between them.

    Precondition: the program as it was recorded.
    """
    ops = list(program.instructions)
    found = _between(program)
    if found is None:
        return program
    start, stop = found
    ahead = [op for op in ops[start:stop] if op.of_sums]  # which wait for other ranks
    # These ops read sums over ranks, so they cannot be inside a subgraph. They do not depend on the block's forward,
    # and may run before it.
    ops[start:stop] = [*ahead, *(op for op in ops[start:stop] if not op.of_sums)]
    start += len(ahead)
    group, rest = ops[start:stop], [*ops[:start], *ops[stop:]]
    read = {a for op in rest for a in op.args} | set(program.outputs)
    out = tuple(v for op in group for v in op.out if v.name in read)
    graph, args = compose(group, program, [v.name for v in out])
    functions = Functions({n: f for n, f in program.functions.items() if any(op.fn == n for op in rest)})
    block = group[0].block
    assert block is not None, group[0]
    name = functions.add(f"{block.joint.name}_value_and_grad", graph)
    fused = Instruction("call", args, out, name, CallAttrs(block=replace(block, part="both")), by="fuse")
    return replace(program, instructions=(*ops[:start], fused, *ops[stop:]), functions=functions.by_name)


def compose(ops: Sequence[Instruction], program: Program, outputs: Sequence[str]) -> tuple[Recorded, tuple[str, ...]]:
    """Returns the subgraph that a sequence of calls amounts to, from the values it reads to `outputs`, and the names of
    the values it reads. Equal operations are merged."""
    graph, constants = compat.Graph(), dict[str, torch.Tensor]()
    made = {v.name for op in ops for v in op.out}
    args = tuple(dict.fromkeys(a for op in ops for a in op.args if a not in made))
    values: dict[str, fx.Node] = {}
    for i, name in enumerate(args):
        values[name] = graph.placeholder(f"x_{i}")
    for op in ops:
        source = program.functions[op.fn].graph
        env = dict(zip(source.inputs, (values[a] for a in op.args), strict=True))
        for place, node in env.items():
            node.meta.setdefault("val", place.meta["val"])
        for node in source.graph.nodes:
            if node.op == "get_attr":
                literal = f"literal_{len(constants)}"
                constants[literal] = source.constants[node.target]
                env[node] = graph.create_node("get_attr", literal)
                env[node].meta.update(node.meta)
            elif node.op == "call_function":
                env[node] = graph.node_copy(node, lambda n, env=env: env[n])
        values.update(zip((v.name for v in op.out), (env[n] for n in source.outputs), strict=True))
    graph.output(tuple(values[n] for n in outputs))
    merge_equal(graph)  # the vjp of a base program repeats the forward
    graph.eliminate_dead_code()
    return Recorded(graph, constants), args


def _between(program: Program) -> tuple[int, int] | None:
    """Returns the range of ops from the last block's forward to its vjp, if they can be one subgraph."""
    params = {n for n, leaf in program.leaves.items() if leaf.role == "params"}
    params |= {v.name for op in program.instructions if op.op == "cast" and op.args[0] in params for v in op.out}
    blocks = [i for i, op in enumerate(program.instructions) if op.is_forward or op.is_backward]
    pair = next(
        ((i, j) for i, j in itertools.pairwise(blocks) if _is_pair(program.instructions[i], program.instructions[j])),
        None,
    )
    if pair is None:
        return None
    glue = program.instructions[pair[0] + 1 : pair[1]]
    # A collective, a write or a cast between the two cannot be part of a subgraph.
    if any(op.op != "call" or op.writes or not params.isdisjoint(op.args) for op in glue):
        return None
    return pair[0], pair[1] + 1


def _is_pair(first: Instruction, second: Instruction) -> bool:
    one, other = first.block, second.block
    assert one is not None and other is not None
    return (one.part, other.part, one.number) == ("forward", "backward", other.number)
