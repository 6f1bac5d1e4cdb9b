"""Splits the backward of each block in two, where the schedule of a pipeline has units of weights: the gradients that
other blocks wait for, and behind them the gradients of parameters, which fill the bubble.

What both need is made once, by the first part, and kept until the second has run.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from dataclasses import replace

import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.program.attrs import CallAttrs, Segment
from fzero.program.ir import WHOLE, Line, Placement, Program, Value
from fzero.program.lines import Functions
from fzero.program.names import Names
from fzero.trace.segments import Halved, in_two
from fzero.transforms.base import find
from fzero.transforms.pipeline import Pipeline


def wanted(program: Program) -> bool:
    """Whether the program is of a pipeline of several stages whose schedule has units of weights."""
    spec = find(program.transforms, Pipeline)
    return spec is not None and spec.has_weights and program.mesh.axes[spec.axis] > 1


def rewrite(program: Program) -> Program:
    """The program with two lines for each block's backward, two segments of one function.

    Raises:
        FzeroValueError: no block has gradients that nothing else waits for.
    """
    functions, names, values = Functions(program.functions), Names(program.values()), program.values_by_name
    onward, split = _onward(program), dict[tuple[str, tuple[int, ...]], Halved]()
    lines, groups = list[Line](), dict[int | str, list[int]]()
    for line in program.lines:
        made, group = [line], line.segment.of if line.segment.count > 1 else line.out[0].name if line.out else ""
        first = tuple(i for i, v in enumerate(line.out) if v.name in onward)
        if line.block is not None and not line.is_forward and first and len(first) < len(line.out):
            key = line.fn, first
            if key not in split:
                split[key] = in_two(program.functions[line.fn].graph, first)
            made = _parts(line, [values[a] for a in line.args], split[key], functions, names)
        if line.op == "call":
            groups.setdefault(group, []).extend(range(len(lines), len(lines) + len(made)))
        lines += made
    for of, at in enumerate(groups.values()):
        for index, i in enumerate(at if len(at) > 1 else ()):
            lines[i] = lines[i].saying(segment=Segment(of, index, len(at)))
    if not split:
        what = "the schedule has units of weights, and no block has gradients that nothing else waits for"
        raise FzeroValueError("pipeline", what, fix="schedule='1f1b'")
    used = {line.fn for line in lines if line.fn}
    return replace(
        program, lines=tuple(lines), functions={name: f for name, f in functions.by_name.items() if name in used}
    )


def _onward(program: Program) -> set[str]:
    """The values that calls of blocks read, by themselves or through other lines."""
    found = set[str]()
    for line in reversed(program.lines):
        if line.op != "update" and (line.block is not None or any(v.name in found for v in line.out)):
            found.update(line.args)
    return found


def _parts(line: Line, args: list[Value], of: Halved, functions: Functions, names: Names) -> list[Line]:
    """The lines of both parts of a call."""
    made = dict(zip(of.inputs, args, strict=True))
    made.update((x, v) for x, v in zip(of.outputs, line.out, strict=True) if x not in made)
    own: dict[fx.Node, tuple[str, ...]] = {x: v.placement.own for x, v in zip(of.inputs, args, strict=True)}
    for x in of.inputs[0].graph.nodes:  # a rank has its own of a value along the axes of what that is made of
        if x not in own:
            own[x] = tuple(dict.fromkeys(axis for a in x.all_input_nodes for axis in own[a]))
    lines, block = [], line.says(CallAttrs).block
    assert block is not None
    for number, step in enumerate(of.steps):
        out = list[Value]()
        for x, position in zip(step.outputs, of.positions[number], strict=True):
            if position is not None:
                out.append(line.out[position])
                continue
            at, value = Placement("local", own[x]) if own[x] else WHOLE, x.meta["val"]
            name = names(f"{line.fn}_{block.number}_{x.name}")
            made[x] = Value(name, tuple(value.shape), value.dtype, at)
            out.append(made[x])
        fn = functions.add(f"{line.fn}{('', '_weights')[number]}", step.graph)
        new = replace(line, fn=fn, args=tuple(made[x].name for x in step.inputs), out=tuple(out))
        lines.append(new.saying(weights=True) if number else new)
    return lines
