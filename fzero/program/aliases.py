"""Tells aliases: which result of a line may lie in the memory of which of its arguments.

Of an op that calls no function its row says so (fzero/program/ops); of a function its recorded graph
(fzero/trace/storages.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fzero.program.ir import Function, Line
from fzero.program.ops import OPS
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
