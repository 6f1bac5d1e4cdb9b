"""Tells which values of a program share memory."""

from __future__ import annotations

from fzero.program.aliases import Aliases
from fzero.program.ir import Line, Program
from fzero.program.ops import OPS, stays


class Views:
    """Tells which values share memory: a function may return views of what it is given, or of one tensor several."""

    def __init__(self, program: Program):
        self._of: dict[str, str] = {}
        self._same: dict[str, str] = {}  # copies that are what they are copied from
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
