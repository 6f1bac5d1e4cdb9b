"""Has several lines call what one line did, piece by piece (fzero/trace/segments.py): for passes that cut functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch.fx as fx

from fzero.program.ir import WHOLE, Line, Placement, Value
from fzero.program.lines import Functions
from fzero.program.names import Names
from fzero.trace.segments import Pieces


def calls(
    line: Line, args: Sequence[Value], of: Pieces, functions: Functions, names: Names, named: Callable[[int], str]
) -> list[Line]:
    """The lines of a call in pieces.

    Args:
        line: the call.
        args: its arguments.
        of: its function in pieces.
        functions: of the program, which get more.
        names: of its values, likewise.
        named: the name of the function that a piece is, by its number.
    """
    made = dict(zip(of.inputs, args, strict=True))
    made.update((x, v) for x, v in zip(of.outputs, line.out, strict=True) if x not in made)
    own: dict[fx.Node, tuple[str, ...]] = {x: v.placement.own for x, v in zip(of.inputs, args, strict=True)}
    for x in of.inputs[0].graph.nodes:  # a rank has its own of a value along the axes of what that is made of
        if x not in own:
            own[x] = tuple(dict.fromkeys(axis for a in x.all_input_nodes for axis in own[a]))
    stem = line.fn if line.block is None else f"{line.fn}_{line.block.number}"
    lines = list[Line]()
    for number, (step, positions) in enumerate(zip(of.steps, of.positions, strict=True)):
        out = list[Value]()
        for x, position in zip(step.outputs, positions, strict=True):
            if position is not None:
                out.append(line.out[position])
                continue
            at, value = Placement("local", own[x]) if own[x] else WHOLE, x.meta["val"]
            made[x] = Value(names(f"{stem}_{x.name}"), tuple(value.shape), value.dtype, at)
            out.append(made[x])
        fn = functions.add(named(number), step.graph)
        lines.append(replace(line, fn=fn, args=tuple(made[x].name for x in step.inputs), out=tuple(out)))
    return lines


class Groups:
    """The calls of each function of a program that is written anew, by the number or first result of what they were."""

    def __init__(self) -> None:
        self.at: dict[int | str, list[int]] = {}

    @staticmethod
    def of(line: Line) -> int | str:
        """The function that a line calls, or a segment of it."""
        return line.segment.of if line.segment.count > 1 else line.out[0].name if line.out else ""

    def add(self, line: Line, numbers: Iterable[int]) -> None:
        """Says that a line has become those with these numbers."""
        if line.op == "call":
            self.at.setdefault(self.of(line), []).extend(numbers)

    def number(self, lines: list[Line]) -> None:
        """Has the lines of each function say that they are segments of it."""
        for of, at in enumerate(self.at.values()):
            for index, i in enumerate(at if len(at) > 1 else ()):
                lines[i] = lines[i].saying(segment=lines[i].segment._replace(of=of, index=index, count=len(at)))
