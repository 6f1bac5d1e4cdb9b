"""Tells aliases: which result of a line may lie in the memory of which of its arguments.

Of an op that calls no function its row says so (fzero/ir/ops); of a function its recorded graph
(fzero/trace/storages.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fzero.ir.ops import OPS, stays
from fzero.ir.program import Function, Line, Program
from fzero.trace.storages import Output, output_storages


class Aliases:
    """The aliases of lines that call these functions, each looked at once."""

    def __init__(self, functions: Mapping[str, Function]):
        self._functions = functions
        self._outputs: dict[str, list[Output]] = {}

    def outputs(self, name: str) -> list[Output]:
        """The place of each result of a function."""
        if name not in self._outputs:
            self._outputs[name] = output_storages(self._functions[name].graph)
        return self._outputs[name]

    def of(self, line: Line) -> Iterable[tuple[str, str]]:
        """Results that may lie in an argument's memory, each with that argument."""
        if not line.fn:
            return OPS[line.op].shares(line)
        return [
            (v.name, line.args[x.argument])
            for v, x in zip(line.out, self.outputs(line.fn), strict=True)
            if x.argument is not None
        ]

    def own(self, line: Line) -> Iterable[str]:
        """Results that surely share memory with no argument and no other result."""
        if not line.fn:
            return [v.name for v in line.out] if OPS[line.op].makes_own else ()
        outputs = self.outputs(line.fn)
        num = Counter(x.root for x in outputs)
        return [
            v.name
            for v, x in zip(line.out, outputs, strict=True)
            if x.argument is None and num[x.root] == 1 and x.nbytes
        ]


class Views:
    """Tells which values share memory: a function may return views of its arguments, or several views of one tensor."""

    def __init__(self, program: Program):
        self._of: dict[str, str] = {}
        self._same: dict[str, str] = {}  # copies that are their sources
        self.alone: set[str] = set()  # results that share no memory with another result
        aliases = Aliases(program.functions)
        started: dict[str, Line] = {}
        for line, _ in program.walk():
            if not line.writes and stays(line, program.mesh):
                started[line.out[0].name] = line
            if OPS[line.op].waits and line.args[0] in started:
                self._same.update((v.name, a) for v, a in zip(line.out, started[line.args[0]].args, strict=True))
            self._of.update(aliases.of(line))
            self.alone.update(aliases.own(line))
        self._of |= self._same
        self.returned = {root for name in program.outputs for root in self.roots(name)}

    def origin(self, name: str) -> str:
        """The value that a value is, under the name it was made with."""
        while name in self._same:
            name = self._same[name]
        return name

    def roots(self, name: str) -> set[str]:
        """A value and those whose memory it lies in."""
        return {name} | (self.roots(self._of[name]) if name in self._of else set())
