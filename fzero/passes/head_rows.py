"""Computes the head in rows: the widest product and the loss, some rows at once (fzero/trace/head_rows.py).

One line becomes several: what comes ahead, a call for each part of the rows, and what comes behind. The parts' calls
are of one function, so it is compiled once, and only one part's logits are there at a time. A gradient that is a
product over all rows is added up in place by lines `add_product`; in float32 where the product is of lower precision,
so that it is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fzero.errors import FzeroValueError
from fzero.program.attrs import CallAttrs, CastAttrs, ProductAttrs, Segment
from fzero.program.ir import WHOLE, Line, Placement, Program, Value
from fzero.program.lines import Functions
from fzero.program.names import Names
from fzero.trace.head_rows import HeadRows, NoRows, RowsInput, in_rows, widest
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import ancestors
from fzero.transforms.base import find
from fzero.transforms.cutting import Cutting
from fzero.transforms.remat import Remat

LADDER = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 0)
"""Rows at once that a budget may choose, 0 for all: each takes more memory, and is faster."""
NOTE = "remat: "
"""The beginning of the remark about it in a program's header."""
APART = (
    "no function has both passes of a product with a parameter; those of the last block are apart where the loss "
    "behind it reads parameters of its own"
)
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rows:
    """The function of a program that is computed in rows, and how."""

    fn: str
    parts: int
    made: HeadRows = field(compare=False, repr=False)


def open_rows(transforms: tuple[Any, ...]) -> bool:
    """Whether the rows are left to the memory budget."""
    spec = find(transforms, Remat)
    return spec is not None and spec.rows_open


def rows_of(program: Program, at_most: int, known: dict[Any, Any]) -> Rows | None:
    """The head of a program in parts of at most so many rows; None where it is left whole.

    Args:
        program: each of whose functions is as a rank runs it.
        at_most: rows of a part, 0 for all.
        known: facts about functions of this program from earlier calls.

    Raises:
        FzeroValueError: rows are asked for, and there are none.
    """
    if not at_most:
        return None
    asked = not open_rows(program.transforms)
    fn = _head(program, known)
    if fn is None:
        return _refused(program, [APART]) if asked else None
    graph = program.functions[fn].graph
    rows, _ = widest(graph)
    if rows <= at_most:
        return None
    key = "head rows", graph, at_most
    if key not in known:
        known[key] = in_rows(graph, at_most)
    made = known[key]
    if isinstance(made, NoRows):
        return _refused(program, [f"{fn}: {x}" for x in made.problems]) if asked else None
    if not asked and _nbytes_of_totals(made) >= made.wide:  # totals would take more than they save
        return None
    return Rows(fn, made.parts, made)


def _nbytes_of_totals(made: HeadRows) -> int:
    return sum(4 * x.shape[0] * x.shape[1] for x in made.totals if x.dtype in _LOW)


def _refused(program: Program, problems: Sequence[str]) -> None:
    cut = [t for t in program.transforms if isinstance(t, Cutting)]
    problems = [*problems, *(f"with {t}: its ranks exchange values of the head among themselves" for t in cut)]
    fix = "leave head_rows out; or compute logits and loss row by row, in the last block or behind it"
    raise FzeroValueError("remat", "the head has no rows to compute apart (head_rows)", problems, fix)


def _head(program: Program, known: dict[Any, Any]) -> str | None:
    """The function with both passes of the widest product."""
    if (key := ("head", id(program.lines))) not in known:
        lines = [line for line, _ in program.walk() if _may_be(line)]
        wide = {fn: widest(program.functions[fn].graph)[1] for fn in dict.fromkeys(line.fn for line in lines)}
        best = max(wide, key=lambda fn: wide[fn], default=None)
        known[key] = program, best if best is not None and wide[best] else None
    return known[key][1]


def _may_be(line: Line) -> bool:
    alone = line.is_forward or line.is_backward
    return (
        isinstance(line.attrs, CallAttrs)
        and not (alone or line.writes or line.of_sums or line.by == "optimizer")
        and (line.segment.count == 1)
    )


def rewrite(program: Program, rows: Rows) -> Program:
    """The program whose head is computed in rows."""
    return _ToRows(program, rows).run()


class _ToRows:
    def __init__(self, program: Program, rows: Rows):
        self.program, self.fn, self.made = program, rows.fn, rows.made
        kept = {line.fn for line, _ in program.walk() if line.fn != rows.fn}
        self.functions = Functions({name: f for name, f in program.functions.items() if name in kept})
        self.ahead = self.functions.add(f"{self.fn}_ahead", self.made.ahead)
        self.part = self.functions.add(f"{self.fn}_rows", self.made.part)
        behind = self.made.behind
        self.behind = None if behind is None else self.functions.add(f"{self.fn}_behind", behind)
        self.names, self.values = Names(program.values()), program.values()
        self.number = 1 + max((line.segment.of for line, _ in program.walk()), default=0)
        self.readers: dict[str, list[Line]] = {}
        for line, _ in program.walk():
            for a in line.args:
                self.readers.setdefault(a, []).append(line)
        self.dropped: set[int] = set()

    def run(self) -> Program:
        program = self.program.map_lines(lambda line: self._lines(line) if line.fn == self.fn else [line])
        program = program.map_lines(lambda line: [] if id(line) in self.dropped else [line])
        note = f"{NOTE}{self.fn} is computed in {self.made.parts} parts of {self.made.rows} rows"
        return replace(program, functions=self.functions.by_name, notes=(*program.notes, note))

    def _lines(self, line: Line) -> list[Line]:
        made = self.made
        given: dict[str, list[str]] = {"input": [*line.args]}
        ahead = self._call(line, self.ahead, [line.args[i] for i in made.ahead_inputs], made.ahead, "ahead")
        results = {i: line.out[i] for i, x in enumerate(made.results) if x.of == "ahead"}
        outs = list(ahead.out)
        for i, value in results.items():
            outs[made.results[i].index] = value
        ahead = replace(ahead, out=tuple(outs))
        given["ahead"] = [v.name for v in outs]
        lines, number = [ahead], outs[-1].name
        totals = [self._total(line, k) for k in range(len(made.totals))]
        lines += [Line("zeros", (), (values[0],), by="remat") for values, _ in totals]
        pieces: list[list[str]] = [[] for _ in made.part.outputs]
        for at in range(made.parts):
            args = [*self._named(made.part_inputs, given), number]
            part = self._call(line, self.part, args, made.part, f"rows_{at}")
            number = part.out[0].name
            lines.append(part)
            for k, v in enumerate(part.out):
                pieces[k].append(v.name)
            for total, (values, _) in zip(made.totals, totals, strict=True):
                operands = [pieces[k][at] for k in made.pieces[total.piece].outputs]
                attrs = ProductAttrs(micro=line.micro)
                args = [values[at].name, *operands]
                lines.append(Line("add_product", tuple(args), (values[at + 1],), attrs=attrs, by="remat"))
        lines += [x for _, more in totals for x in more]
        if made.behind is not None and self.behind is not None:
            args = self._named(made.behind_inputs, given)
            args += [name for x in made.pieces if x.how != "product" for name in pieces[x.outputs[0]]]
            args += [
                more[-1].out[0].name if more else values[-1].name
                for x, (values, more) in zip(made.totals, totals, strict=True)
                if x.result is None
            ]
            out = [line.out[i] for i, x in enumerate(made.results) if x.of == "behind"]
            lines.append(replace(line, fn=self.behind, args=tuple(args), out=tuple(out), by="remat"))
        return self._numbered(lines)

    def _numbered(self, lines: Sequence[Line]) -> list[Line]:
        """The lines as segments of one function."""
        count = sum(bool(line.fn) for line in lines)
        number, at, out = self.number, 0, list[Line]()
        self.number += 1
        for line in lines:
            if line.fn:
                line, at = line.saying(segment=Segment(number, at, count)), at + 1
            out.append(line)
        return out

    def _own(self, args: Iterable[str]) -> Placement:
        """The placement of what is computed of some values."""
        axes = tuple(dict.fromkeys(axis for a in args for axis in self.values[a].placement.own))
        return Placement("local", axes) if axes else WHOLE

    def _named(self, operands: Sequence[RowsInput], given: Mapping[str, Sequence[str]]) -> list[str]:
        return [given[x.of][x.index] for x in operands]

    def _call(self, line: Line, fn: str, args: Sequence[str], graph: Recorded, stem: str) -> Line:
        places, out = dict(zip(graph.inputs, args, strict=True)), list[Value]()
        for i, node in enumerate(graph.outputs):
            value, read = node.meta["val"], ancestors([node], stop={*places})
            at = self._own(a for place, a in places.items() if place in read)
            name = self.names(f"{self._stem(line)}_{stem}_{i}")
            out.append(Value(name, tuple(value.shape), value.dtype, at))
        self.values.update((v.name, v) for v in out)
        return replace(line, fn=fn, args=tuple(args), out=tuple(out), by="remat")

    def _stem(self, line: Line) -> str:
        return f"{line.block.joint.name}_{line.block.number}" if line.block is not None else line.fn

    def _total(self, line: Line, k: int) -> tuple[list[Value], list[Line]]:
        """The total that a product over all rows is at first and behind each part, and the lines that make its value of
        the last."""
        total = self.made.totals[k]
        low = total.dtype in _LOW
        if total.result is None:
            name = self.names(f"{self._stem(line)}_total_{k}")
            last = Value(name, total.shape, total.dtype, self._own(line.args))
        else:
            last = line.out[total.result]
        more: list[Line] = []
        if low:
            reader = self._cast(last.name)
            if reader is not None:  # it is read in float32 alone
                self.dropped.add(id(reader))
                last = reader.out[0]
            else:
                cast = Line("cast", (), (last,), attrs=CastAttrs(dtype=total.dtype, micro=line.micro), by="remat")
                last = replace(last, name=self.names(f"{last.name}_wide"), dtype=torch.float32)
                more = [replace(cast, args=(last.name,))]
        before = [replace(last, name=self.names(f"{last.name}_rows_{i}")) for i in range(self.made.parts)]
        return [*before, last], more

    def _cast(self, name: str) -> Line | None:
        """The line that casts a value to float32, if nothing else reads it."""
        readers = self.readers.get(name, [])
        if len(readers) != 1 or name in self.program.outputs or not isinstance(readers[0].attrs, CastAttrs):
            return None
        (reader,) = readers
        said = reader.attrs
        assert isinstance(said, CastAttrs)
        alone = len(reader.out) == 1 and said.through is None and said.dtype == torch.float32 and not said.guess
        return reader if alone else None


def first_rows(transforms: tuple[Any, ...], limited: bool) -> int:
    """The rows at once of the choice that takes least memory, 0 for all."""
    spec = find(transforms, Remat)
    if spec is None:
        return 0
    if spec.rows_open:
        return LADDER[0] if limited else 0
    return spec.head_rows if isinstance(spec.head_rows, int) else 0
