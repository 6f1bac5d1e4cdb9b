"""The rules of a program, checked after every rewrite. A violation is a bug of the rewrite, never of the user.

Every name is assigned once and before it is read. Every start is waited for once, and what it makes is read by its wait alone. A function
gets what it was traced for: shapes, dtypes, whole values; only an update gets shards. What reads a value of which each rank has its own is not
whole. A gather takes shards, a reduction summands, and what arrives is placed accordingly. What is written is a leaf of the state (or its shard),
once, and nothing reads the old value afterwards, but the gather of new shards. Outputs are neither partial, nor shards, nor overwritten.
A line reads values of the tier it computes on, a copy between tiers those of the tier it is from; a copy of a leaf that is written is stored.
What is written on a guess is written, from its old value, by the redo that follows, and by nothing else; what it waits for has arrived by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fzero.errors import VerifyError, message
from fzero.program.guess import compared, is_guess
from fzero.program.ir import COLLECTIVES, COPIES, WHOLE, Line, Placement, Program, Value, from_to
from fzero.program.segment import ancestors


def verify(program: Program) -> Program:
    """The program, if it keeps the rules.

    Raises:
        VerifyError: listing every rule that is broken, with the line.
    """
    checker = _Checker(program)
    checker.lines(program.lines, {v.name: v for v in program.inputs})
    checker.guesses()
    checker.outputs()
    if checker.problems:
        raise VerifyError(
            message("verify", f"the program of {program.name} breaks its rules", checker.problems, "this is a bug in fzero: please report it with the program")
        )
    return program


class _Checker:
    def __init__(self, program: Program):
        self.program = program
        self.problems: list[str] = []
        self.known: dict[str, Value] = {}
        self.started: dict[str, Line] = {}
        self.written: set[str] = set()
        self.overwritten: set[str] = set()  # leaves that were written, or a shard of them
        self.guessed: set[str] = set()  # leaves that were written on a guess
        self.settled: set[str] = set()  # those of them that a redo writes again
        self.aliases: dict[str, str] = {}  # a shard that may be a view of its leaf, or a copy of it on another tier

    def lines(self, lines: Sequence[Line], known: dict[str, Value]) -> None:
        self.known = dict(known)
        waiting_outside = set(self.started)
        for line in lines:
            for name in line.args:
                if name not in self.known:
                    self._add(line, f"{name} is read before it is made")
                elif name in self.started and line.op != "wait":
                    self._add(line, f"{name} is still moving")
                elif self._root(name) in self.overwritten and not self._reads_new(line, name):
                    self._add(line, f"{name} has been overwritten")
            self._check(line)
            if line.op == "redo":
                self._redo(line)
            if line.body:
                outside = dict(self.known)
                self.lines(line.body, self.known)
                inner, self.known = self.known, outside
                self.known.update((v.name, inner[v.name]) for x in line.body if x.op == "accumulate" for v in x.out)
            if line.op == "redo":
                self.settled = self.guessed & self.written
            for value in line.out:
                if value.name in self.known:
                    self._add(line, f"{value.name} is made twice")
                self.known[value.name] = value
            if line.attrs.get("restores"):
                self.overwritten -= {*line.writes}
                continue
            self.guessed |= {w for w in line.writes if is_guess(line) and w in self.program.leaves}
            for name in line.writes:
                if name not in self.known:
                    self._add(line, f"writes {name}, which does not exist")
                elif name in self.written:
                    self._add(line, f"{name} is written twice")
                self.written.add(name)
                self.overwritten.add(self._root(name))
        for name in set(self.started) - waiting_outside:
            self._add(self.started[name], f"{name} is never waited for")

    def _redo(self, line: Line) -> None:
        """What a redo may read and write: leaves that were written on a guess are as they were if they rest on disk; others are put back."""
        on_disk = {w for w in self.guessed if self.program.leaves[w].layout.tier == "disk"}
        computed = {w for w in self.guessed if self.program.leaves[w].role == "compute"}  # is written and never read by an update
        self.overwritten -= on_disk | computed
        self.written -= self.guessed
        for handle in (h for h, start in self.started.items() if is_guess(start)):
            self._add(line, f"{handle}, on a guess, is still under way")
        for scalar, assumed in zip(*compared(line), strict=True):
            one, other = self.known.get(scalar), self.known.get(assumed)
            if one is None or other is None or (one.shape, one.dtype, one.placement, other.placement) != (other.shape, other.dtype, WHOLE, WHOLE):
                self._add(line, f"compares {one} with {other}")
        for x in line.body:
            if x.op in COLLECTIVES:
                self._add(x, "ranks exchange something in what may not be carried out")

    def guesses(self) -> None:
        self.problems += [f"{name} was written on a guess, and is not written again" for name in sorted(self.guessed - self.settled)]

    def outputs(self) -> None:
        for name in self.program.outputs:
            value = self.known.get(name)
            if value is None:
                self.problems.append(f"output {name} is never made")
            elif value.placement.partial or value.placement.kind in ("shard", "moving"):
                self.problems.append(f"output {name} is {value.placement}")
            elif self._root(name) in self.overwritten:
                self.problems.append(f"output {name} has been overwritten")
        state = {n for n, leaf in self.program.leaves.items() if leaf.role in ("params", "opt_state", "step", "compute", "loss_scale", "precision", "fp8")}
        for name in sorted(self.written - set(self.aliases)):
            if name not in state:
                self.problems.append(f"{name} is written, but is not a leaf of the state")
        for name in sorted(self.written & set(self.aliases)):
            if self.aliases[name] not in self.written:
                self.problems.append(f"{name} is written, but {self.aliases[name]}, of which it is a part or a copy, is not")

    def _root(self, name: str) -> str:
        """The leaf whose buffer a value may share."""
        return self.aliases.get(name, name)

    def _reads_new(self, line: Line, name: str) -> bool:
        """Whether a line is meant to read what was written: the gather and the copy of new values, the targets of an assignment or a copy."""
        return (line.op in ("all_gather_start", *COPIES) and name in self.aliases) or (line.op in ("assign", *COPIES) and name in line.writes)

    def _check(self, line: Line) -> None:
        args = [self.known[a] for a in line.args if a in self.known]
        if len(args) != len(line.args):
            return
        self._tiers(line, args)
        if line.op in COPIES:
            self.started[line.out[0].name] = line
            num = len(line.writes)
            self._pairs(line, args[:num], args[len(args) - num :], "copied")
            for target, source in zip(line.writes, args[len(args) - num :], strict=False):
                if self.aliases.get(source.name, target) != target:
                    self._add(line, f"{source.name}, which is {self.aliases[source.name]} updated, is stored in {target}")
            if num and len(args) != 2 * num:
                self._add(line, f"copies {len(args) - num} values to {num} leaves")
        elif line.op in COLLECTIVES:
            self.started[line.out[0].name] = line
            axis = line.attrs["axes"][0]
            for v in args:
                gathers = v.placement.kind == "shard" and not v.placement.partial
                if not (gathers if line.op == "all_gather_start" else axis in v.placement.partial):
                    self._add(line, f"{v.name} is {v.placement}")
        elif line.op == "wait":
            start = self.started.pop(line.args[0], None)
            if start is None:
                self._add(line, f"{line.args[0]} was not started, or is waited for twice")
                return
            sent = [self.known[a] for a in start.args if a in self.known and not start.writes]
            if [(v.shape, v.dtype) for v in line.out] != [(v.shape, v.dtype) for v in sent]:
                self._add(line, "hands back other shapes or dtypes than were sent")
                return
            for v, source in zip(line.out, sent, strict=True):
                if start.op in COPIES:
                    self.aliases |= {v.name: root} if (root := self._root(source.name)) in self.program.leaves else {}
                    if v.tier != from_to(start)[1]:
                        self._add(line, f"{v.name} is {v}")
                if v.placement != _arrives(start, source.placement):
                    self._add(line, f"{v.name} is {v.placement}, not {_arrives(start, source.placement)}")
        elif line.op == "call":
            self._call(line, args)
        elif line.op == "cast":
            here, there = args[0].placement, line.out[0].placement
            summand = there.partial and here.kind != "shard" and not here.partial  # each rank's own, to be summed
            if line.out[0].dtype != line.attrs["dtype"] or line.out[0].shape != args[0].shape or not (here == there or summand):
                self._add(line, f"{args[0]} becomes {line.out[0]}")
            for scale in args[1:]:
                if (scale.shape, scale.dtype, scale.placement) != ((), torch.float32, WHOLE):
                    self._add(line, f"casts by {scale}")
        elif line.op == "buffer":
            self.aliases.update((v.name, leaf) for v, leaf in zip(line.out, line.attrs["leaves"], strict=True))
        elif line.op == "take_shard":
            self.aliases[line.out[0].name] = self._root(line.args[0])
            if args[0].placement.kind != "whole" or line.out[0].placement.kind != "shard":
                self._add(line, f"takes a shard of {args[0]}")
        elif line.op == "accumulate":
            if line.out[0].shape != args[0].shape or line.out[0].placement != args[0].placement:
                self._add(line, f"{args[0]} accumulates to {line.out[0]}")
        elif line.op == "add":
            num = len(line.out)
            if len(args) != 2 * num:
                self._add(line, f"adds {len(args) - num} values to {num} totals")
            self._pairs(line, args[:num], args[num:], "added")
            self._pairs(line, line.out, args[num:], "added")
            self.overwritten |= {*line.args[:num]}
        elif line.op == "assign":
            num = len(line.writes)
            if len(args) != 2 * num:
                self._add(line, f"assigns {len(args) - num} values to {num} leaves")
            self._pairs(line, args[:num], args[num:], "assigned")

    def _pairs(self, line: Line, targets: Sequence[Value], sources: Sequence[Value], how: str) -> None:
        for target, source in zip(targets, sources, strict=False):
            if (target.shape, target.dtype, target.placement) != (source.shape, source.dtype, source.placement):
                self._add(line, f"{source} is {how} to {target}")

    def _tiers(self, line: Line, args: Sequence[Value]) -> None:
        """What a line reads lies on the tier that it reads from, what it writes on the one it writes to, what it makes where it computes."""
        if line.op in ("wait", "loop", "redo"):
            return
        on_host = (
            line.attrs.get("on") == "host"
            if line.op in ("call", "buffer")
            else bool(args) and line.op in ("cast", "take_shard", "assign", "accumulate") and args[0].tier == "host"
        )
        reads, writes = from_to(line) if line.op in COPIES else ("host", "host") if on_host else ("device", "device")
        num = len(line.writes) if line.op in COPIES else 0
        for v, tier in ((v, writes if i < num else reads) for i, v in enumerate(args)):
            if v.tier != tier:
                self._add(line, f"{v.name} is on the {v.tier}, not on the {tier}")
        for v in line.out if line.op not in COPIES else ():
            if v.tier != writes:
                self._add(line, f"{v.name} is made on the {writes}, and said to be on the {v.tier}")

    def _call(self, line: Line, args: list[Value]) -> None:
        function = self.program.functions.get(line.fn)
        if function is None:
            self._add(line, f"no function {line.fn}")
            return
        places = function.graph.inputs
        if len(places) != len(args):
            self._add(line, f"{line.fn} takes {len(places)} arguments, gets {len(args)}")
            return
        for place, arg in zip(places, args, strict=True):
            self._matches(line, arg, place.meta["val"], "takes")
            if arg.placement.kind == "shard" and "joint" in line.attrs:
                self._add(line, f"{arg.name} is {arg.placement}, a block takes whole values")
            if arg.placement.partial and not line.writes and "joint" in line.attrs:
                self._add(line, f"{arg.name} is {arg.placement}")
        returned = function.graph.outputs
        if len(returned) != len(line.out):
            self._add(line, f"{line.fn} returns {len(returned)} values, {len(line.out)} are named")
            return
        own = {place: a.name for place, a in zip(places, args, strict=True) if a.placement.kind == "local" or a.placement.partial}
        for node, out in zip(returned, line.out, strict=True):
            self._matches(line, out, node.meta["val"], "returns")
            if own and out.placement == WHOLE:
                read = ancestors([node], stop=set(places))
                self.problems += [f"{_name(line)}: {out.name} is whole, but reads {a}, of which each rank has its own" for p, a in own.items() if p in read]

    def _matches(self, line: Line, value: Value, expected: torch.Tensor, verb: str) -> None:
        shape = value.held(self.program.mesh)
        if tuple(expected.shape) != shape or expected.dtype != value.dtype:
            self._add(line, f"{line.fn} {verb} {str(expected.dtype).removeprefix('torch.')}{list(expected.shape)}, {value.name} is {value}")

    def _add(self, line: Line, text: str) -> None:
        self.problems.append(f"{_name(line)}: {text}")


def _name(line: Line) -> str:
    return f"{line.op} {line.fn} -> {', '.join(v.name for v in line.out)}"


def _arrives(start: Line, placement: Placement) -> Placement:
    """How a value relates to the mesh after a transfer."""
    if start.op in COPIES:
        return placement
    axes = tuple(start.attrs["axes"])
    if start.op == "all_gather_start":
        return WHOLE
    left = tuple(a for a in placement.partial if a not in axes)
    return Placement("shard", axes, left) if start.op == "reduce_scatter_start" else replace(placement, partial=left)
