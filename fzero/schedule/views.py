"""Which values of a program share memory."""

from __future__ import annotations

from collections import Counter

from fzero.program.ir import COPIES, Line, Program, stays
from fzero.program.storages import Output, output_storages


class Views:
    """Which values share memory: a function may return views of what it is given, or of one tensor several."""

    def __init__(self, program: Program):
        self._of: dict[str, str] = {}
        self._same: dict[str, str] = {}  # copies that are what they are copied from
        self.alone: set[str] = set()  # results that share no memory with another result
        found: dict[str, list[Output]] = {}
        started: dict[str, Line] = {}
        for line, _ in program.walk():
            if line.op in COPIES and not line.writes and stays(line, program.mesh):
                started[line.out[0].name] = line
            if line.op == "wait" and line.args[0] in started:
                self._of.update((v.name, a) for v, a in zip(line.out, started[line.args[0]].args, strict=True))
                self._same.update((v.name, a) for v, a in zip(line.out, started[line.args[0]].args, strict=True))
            if line.op == "add":
                self._of.update((v.name, total) for v, total in zip(line.out, line.args, strict=False))
            if line.op == "cast":
                self.alone.add(line.out[0].name)
            if line.op in ("take_shard", "take_part"):
                self._of[line.out[0].name] = line.args[0]
            if line.op != "call":
                continue
            if line.fn not in found:
                found[line.fn] = output_storages(program.functions[line.fn].graph)
            num = Counter(output.root for output in found[line.fn])
            for value, output in zip(line.out, found[line.fn], strict=True):
                if output.argument is not None:
                    self._of[value.name] = line.args[output.argument]
                elif num[output.root] == 1 and output.nbytes:
                    self.alone.add(value.name)
        self.returned = {root for name in program.outputs for root in self.roots(name)}

    def origin(self, name: str) -> str:
        """The value that a value is, under the name it was made with."""
        while name in self._same:
            name = self._same[name]
        return name

    def roots(self, name: str) -> set[str]:
        """A value and those whose memory it lies in."""
        return {name} | (self.roots(self._of[name]) if name in self._of else set())
