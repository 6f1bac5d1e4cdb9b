"""Splits the backward of each block in two if the schedule of a pipeline has weight actions: first the gradients that
other blocks wait for, then the gradients of parameters, which fill the bubble.

Values that both parts need are computed once, by the first part, and kept until the second has run.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.ir.attributes import Segment
from fzero.ir.from_graph import Functions
from fzero.ir.program import REPLICATED, Instruction, Placement, Program, Value
from fzero.ir.value_names import Names, call_name, operation_name
from fzero.sharding.collective_partitions import Pieces, in_two
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.transform import find


def is_scheduled(program: Program) -> bool:
    """Whether the program has a pipeline with several stages and a schedule with weight actions."""
    spec = find(program.transforms, Pipeline)
    return spec is not None and spec.has_weights and program.mesh.axes[spec.axis] > 1


def rewrite(program: Program) -> Program:
    """Returns the program with two ops for each block's backward, which are two segments of one subgraph.

    Precondition: no op is repeated for micro-batches yet.

    Raises:
        FzeroValueError: no block has gradients that no other block waits for.
    """
    functions, names, values = Functions(program.functions), Names(program.values()), program.values_by_name
    onward, split = _onward(program), dict[tuple[str, tuple[int, ...]], Pieces]()
    ops, calls = list[Instruction](), dict[int | str, list[int]]()  # the indices of the ops that call each subgraph
    for op in program.instructions:
        made = [op]
        # Gradients that another block, and so perhaps another stage, waits for. The rest are gradients of parameters.
        first = tuple(i for i, v in enumerate(op.out) if v.name in onward)
        # If all of the gradients are waited for, or none, there is nothing to postpone.
        if op.block is not None and not op.is_forward and first and len(first) < len(op.out):
            key = op.fn, first
            if key not in split:
                split[key] = in_two(program.functions[op.fn].graph, first)
            args, fn = [values[a] for a in op.args], op.fn
            made = _calls(op, args, split[key], functions, names, (fn, f"{fn}_weights").__getitem__)
            made[1:] = [x.saying(weights=True) for x in made[1:]]
        if op.op == "call":
            of = op.segment.of if op.segment.count > 1 else op.out[0].name if op.out else ""
            calls.setdefault(of, []).extend(range(len(ops), len(ops) + len(made)))
        ops += made
    for of, at in enumerate(calls.values()):
        for index, i in enumerate(at if len(at) > 1 else ()):
            ops[i] = ops[i].saying(segment=Segment(of, index, len(at)))
    if not split:
        what = (
            "the schedule has actions for weight gradients, and no block has gradients that can be computed separately"
        )
        raise FzeroValueError("pipeline", what, fix="schedule='1f1b'")
    used = {op.fn for op in ops if op.fn}
    return replace(
        program, instructions=tuple(ops), functions={name: f for name, f in functions.by_name.items() if name in used}
    )


def _onward(program: Program) -> set[str]:
    """Returns the values that calls of blocks read, directly or through other ops."""
    found = set[str]()
    for op in reversed(program.instructions):
        if op.op != "update" and (op.block is not None or any(v.name in found for v in op.out)):
            found.update(op.args)
    return found


def _calls(
    op: Instruction, args: Sequence[Value], of: Pieces, functions: Functions, names: Names, named: Callable[[int], str]
) -> list[Instruction]:
    """Returns the ops of a call that is divided into pieces.

    Args:
        op: the call.
        args: its arguments.
        of: its subgraph, in pieces.
        functions: the subgraphs of the program, which are extended.
        names: the names of its values, which are extended.
        named: returns the name of a piece's subgraph, by the index of the piece.
    """
    made = dict(zip(of.inputs, args, strict=True))
    made.update((x, v) for x, v in zip(of.outputs, op.out, strict=True) if x not in made)
    own: dict[fx.Node, tuple[str, ...]] = {x: v.placement.varies_over for x, v in zip(of.inputs, args, strict=True)}
    for x in of.inputs[0].graph.nodes:  # a value varies between ranks along all axes along which its inputs do
        if x not in own:
            own[x] = tuple(dict.fromkeys(axis for a in x.all_input_nodes for axis in own[a]))
    stem = call_name(op)
    ops = list[Instruction]()
    for number, (step, positions) in enumerate(zip(of.steps, of.positions, strict=True)):
        out = list[Value]()
        for x, position in zip(step.outputs, positions, strict=True):
            if position is not None:
                out.append(op.out[position])
                continue
            at, value = Placement("varying", own[x]) if own[x] else REPLICATED, x.meta["val"]
            made[x] = Value(names(f"{stem}_{operation_name(x)}"), tuple(value.shape), value.dtype, at)
            out.append(made[x])
        fn = functions.add(named(number), step.graph)
        ops.append(replace(op, fn=fn, args=tuple(made[x].name for x in step.inputs), out=tuple(out)))
    return ops
