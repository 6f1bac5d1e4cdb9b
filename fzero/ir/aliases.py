"""Determines aliases: which results of an op may share memory with which of its arguments.

For an op that calls no subgraph, the op table says so (fzero/ir/ops). For a call, the recorded graph of the subgraph
determines it (fzero/trace/storages.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fzero.ir.ops import OPS, stays
from fzero.ir.program import Function, Instruction, Program
from fzero.trace.storages import Output, output_storages


class Aliases:
    """The aliases of ops that call these subgraphs. Each subgraph is analyzed once."""

    def __init__(self, functions: Mapping[str, Function]):
        self._functions = functions
        self._outputs: dict[str, list[Output]] = {}

    def outputs(self, name: str) -> list[Output]:
        """Returns where each result of a subgraph is stored: in an argument's memory, or in memory of its own."""
        if name not in self._outputs:
            self._outputs[name] = output_storages(self._functions[name].graph)
        return self._outputs[name]

    def of(self, op: Instruction) -> Iterable[tuple[str, str]]:
        """Returns the results that may lie in an argument's memory, each with that argument."""
        if not op.fn:
            return OPS[op.op].shares(op)
        return [
            (v.name, op.args[x.argument])
            for v, x in zip(op.out, self.outputs(op.fn), strict=True)
            if x.argument is not None
        ]

    def own(self, op: Instruction) -> Iterable[str]:
        """Returns the results that certainly share memory with no argument and with no other result."""
        if not op.fn:
            return [v.name for v in op.out] if OPS[op.op].makes_own else ()
        outputs = self.outputs(op.fn)
        num = Counter(x.root for x in outputs)
        return [
            v.name for v, x in zip(op.out, outputs, strict=True) if x.argument is None and num[x.root] == 1 and x.nbytes
        ]


class Views:
    """Determines which values of a program share memory: a subgraph may return views of its arguments, or several
    views of one tensor.
    """

    def __init__(self, program: Program):
        self._of: dict[str, str] = {}
        self._same: dict[str, str] = {}  # copies that move nothing, and so are their sources
        self.alone: set[str] = set()  # results that share no memory with another result
        aliases = Aliases(program.functions)
        started: dict[str, Instruction] = {}
        for op, _ in program.walk():
            if not op.writes and stays(op, program.mesh):
                started[op.out[0].name] = op
            if op.is_wait and op.args[0] in started:
                self._same.update((v.name, a) for v, a in zip(op.out, started[op.args[0]].args, strict=True))
            self._of.update(aliases.of(op))
            self.alone.update(aliases.own(op))
        self._of |= self._same
        self.returned = {root for name in program.outputs for root in self.roots(name)}

    def origin(self, name: str) -> str:
        """Returns the name under which a value was first computed: the source of copies that move nothing."""
        while name in self._same:
            name = self._same[name]
        return name

    def roots(self, name: str) -> set[str]:
        """Returns a value and all values in whose memory it lies."""
        return {name} | (self.roots(self._of[name]) if name in self._of else set())
