"""Splits the backward of each block in two, where the schedule of a pipeline has units of weights: the gradients that
other blocks wait for, and behind them the gradients of parameters, which fill the bubble.

What both need is made once, by the first part, and kept until the second has run.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from dataclasses import replace

from fzero.errors import FzeroValueError
from fzero.passes.pieces import Groups, calls
from fzero.program.ir import Line, Program
from fzero.program.lines import Functions
from fzero.program.names import Names
from fzero.trace.segments import Pieces, in_two
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
    onward, split = _onward(program), dict[tuple[str, tuple[int, ...]], Pieces]()
    lines, groups = list[Line](), Groups()
    for line in program.lines:
        made = [line]
        first = tuple(i for i, v in enumerate(line.out) if v.name in onward)
        if line.block is not None and not line.is_forward and first and len(first) < len(line.out):
            key = line.fn, first
            if key not in split:
                split[key] = in_two(program.functions[line.fn].graph, first)
            args, fn = [values[a] for a in line.args], line.fn
            made = calls(line, args, split[key], functions, names, (fn, f"{fn}_weights").__getitem__)
            made[1:] = [x.saying(weights=True) for x in made[1:]]
        groups.add(line, range(len(lines), len(lines) + len(made)))
        lines += made
    groups.number(lines)
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
