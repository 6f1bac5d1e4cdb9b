"""The rules of a program, checked after every rewrite. A violation is a bug of the rewrite, never of the user.

Every name is assigned once and before it is read. Every start is waited for once, and what it makes is read by its wait alone. A function
gets what it was traced for: shapes, dtypes, whole values; only an update gets shards. What reads a value of which each rank has its own is not
whole. A gather takes shards, a reduction summands, and what arrives is placed accordingly. What is written is a leaf of the state (or its shard),
once, and nothing reads the old value afterwards, but the gather of new shards. Outputs are neither partial, nor shards, nor overwritten.
A line reads values of the tier it computes on, a copy between tiers those of the tier it is from; a copy of a leaf that is written is stored.
What is written on a guess is written, from its old value, by the redo that follows, and by nothing else; what it waits for has arrived by then.
Every leaf that the step assigns is written, and besides those only the copies that are computed with, and those in which gradients wait: these are read
once they are written, and not before.

Nothing is allowed because no rule forbids it: an op, an attribute or a number of arguments that fzero/program/ops.py does not list is a violation,
and so is an axis that the mesh does not have. Every op listed there has a rule here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fzero.errors import VerifyError, message
from fzero.program.guess import compared, is_guess
from fzero.program.ir import COLLECTIVES, COPIES, MOVING, WHOLE, Line, Placement, Program, Value, copied, from_to
from fzero.program.ops import misformed
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


REDUCTIONS = {"sum", "max", "min"}
"""How the values of ranks become one."""
JOINS = {"sum", "max"}
"""How the values of micro-batches become one."""


class _Checker:
    def __init__(self, program: Program):
        self.program = program
        self.problems: list[str] = []
        self.known: dict[str, Value] = {}
        self.started: dict[str, Line] = {}
        self.written: set[str] = set()
        self.carried: set[str] = set()  # copies made of what was written
        self.overwritten: set[str] = set()  # leaves that were written, or a shard of them
        self.guessed: set[str] = set()  # leaves that were written on a guess
        self.settled: set[str] = set()  # those of them that a redo writes again
        self.turns = 1  # of the loop that lines are in
        self.aliases: dict[str, str] = {}  # a shard that may be a view of its leaf, or a copy of it on another tier

    def lines(self, lines: Sequence[Line], known: dict[str, Value]) -> None:
        self.known = dict(known)
        waiting_outside = set(self.started)
        for line in lines:
            for name in line.args:
                if name not in self.known:
                    self._bad(line, f"{name} is read before it is made")
                elif name in self.started and line.op != "wait":
                    self._bad(line, f"{name} is still moving")
                elif self._waits(name):
                    self._gradient(line, name)
                elif self._root(name) in self.overwritten and not self._reads_new(line, name):
                    self._bad(line, f"{name} has been overwritten")
            self._check(line)
            if line.op == "redo":
                self._settle(line)
            if line.body:
                outside, self.turns = dict(self.known), line.attrs.get("count", 1)
                self.lines(line.body, self.known)
                self.turns = 1
                inner, self.known = self.known, outside
                self.known.update((v.name, inner[v.name]) for x in line.body if x.op == "accumulate" for v in x.out)
            if line.op == "redo":
                self.settled = self.guessed & self.written
            for value in line.out:
                if value.name in self.known:
                    self._bad(line, f"{value.name} is made twice")
                axes = {*value.placement.axes, *value.placement.partial}
                self.known[value.name] = value if axes <= {*self.program.mesh.axes} else replace(value, placement=WHOLE)  # it is a violation already
            if line.attrs.get("restores"):
                self.overwritten -= {*line.writes}
                continue
            self.guessed |= {w for w in line.writes if is_guess(line) and w in self.program.leaves}
            for name in line.writes:
                if name not in self.known:
                    self._bad(line, f"writes {name}, which does not exist")
                elif name in self.written:
                    self._bad(line, f"{name} is written twice")
                self.written.add(name)
                self.overwritten.add(self._root(name))
        for name, start in self.started.items():
            if name not in waiting_outside:
                self._bad(start, f"{name} is never waited for")

    def _settle(self, line: Line) -> None:
        """What a redo may read and write: leaves that were written on a guess are as they were if they rest on disk; others are put back."""
        on_disk = {w for w in self.guessed if self.program.leaves[w].layout.tier == "disk"}
        computed = {w for w in self.guessed if self.program.leaves[w].role == "compute"}  # is written and never read by an update
        self.overwritten -= on_disk | computed
        self.written -= self.guessed
        for handle in (h for h, start in self.started.items() if is_guess(start)):
            self._bad(line, f"{handle}, on a guess, is still under way")
        for scalar, assumed in zip(*compared(line), strict=True):
            one, other = self.known.get(scalar), self.known.get(assumed)
            if one is None or other is None or (one.shape, one.dtype, one.placement, other.placement) != (other.shape, other.dtype, WHOLE, WHOLE):
                self._bad(line, f"compares {one} with {other}")
        for x in line.body:
            if x.op in COLLECTIVES:
                self._bad(x, "ranks exchange something in what may not be carried out")

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
        roles = ("params", "mutable", "opt_state", "step", "compute", "gradients", "loss_scale", "precision", "fp8")
        state = {n for n, leaf in self.program.leaves.items() if leaf.role in roles}
        for name in sorted(self.written - set(self.aliases)):
            if name not in state:
                self.problems.append(f"{name} is written, but is not a leaf of the state")
            elif name not in self.program.assigns and self.program.leaves[name].role not in ("compute", "gradients"):
                self.problems.append(f"{name} is written, but the step does not assign it")
        self.problems += [f"{name} is never written, but the step assigns it" for name in self.program.assigns if name not in self.written]
        for name in sorted(self.written & set(self.aliases)):
            if self.aliases[name] not in self.written:
                self.problems.append(f"{name} is written, but {self.aliases[name]}, of which it is a part or a copy, is not")

    def _root(self, name: str) -> str:
        """The leaf whose buffer a value may share."""
        return self.aliases.get(name, name)

    def _reads_new(self, line: Line, name: str) -> bool:
        """Whether a line is meant to read what was written: the gather and the copy of new values, the targets of an assignment or a copy."""
        return (line.op in ("all_gather_start", *COPIES) and name in self.aliases) or (line.op in ("assign", *COPIES) and name in line.writes)

    def _waits(self, name: str) -> bool:
        """Whether a name is that of a leaf in which a gradient waits: it has no old value, and is read once it has the new one."""
        return name in self.program.leaves and self.program.leaves[name].role == "gradients"

    def _gradient(self, line: Line, name: str) -> None:
        if name in copied(line) and (name not in self.written or any(name in start.writes for start in self.started.values())):
            self._bad(line, f"{name} is read before it is written")

    def _check(self, line: Line) -> None:
        problems = misformed(line)
        for text in problems:
            self._bad(line, text)
        args = [self.known[a] for a in line.args if a in self.known]
        if problems or len(args) != len(line.args):
            return
        named = {a for v in line.out for a in (*v.placement.axes, *v.placement.partial)} | {*line.attrs.get("axes", ())}
        if unknown := sorted(named - {*self.program.mesh.axes}):
            self._bad(line, f"the mesh has no axis {', '.join(map(repr, unknown))}")
            return
        self._tiers(line, args)
        if line.op in COPIES:
            self._copy(line, args)
        elif line.op in COLLECTIVES:
            self._collective(line, args)
        else:
            getattr(self, f"_{line.op}")(line, args)

    # --- transfers ---

    def _copy(self, line: Line, args: list[Value]) -> None:
        self._starts(line)
        num = len(line.writes)
        if num and (len(args) != 2 * num or line.args[:num] != line.writes):
            self._bad(line, f"copies {len(args) - num} values to {num} leaves")
        self._pairs(line, args[:num], args[len(args) - num :], "copied")
        for target, source in zip(line.writes, args[len(args) - num :], strict=False):
            root = self.aliases.get(source.name, target)
            if root != target:
                self._bad(line, f"{source.name}, which is {root} updated, is stored in {target}")
            elif source.name in self.aliases and source.name not in self.written | self.carried:
                self._bad(line, f"{source.name}, a copy of {target} that no line has written, is stored in it")

    def _collective(self, line: Line, args: list[Value]) -> None:
        self._starts(line)
        axes, gathers = line.attrs["axes"], line.op == "all_gather_start"
        if not args or not axes:
            self._bad(line, f"moves {len(args)} values over {len(axes)} axes")
        if not gathers and line.attrs["op"] not in REDUCTIONS:
            self._bad(line, f"reduces by {line.attrs['op']!r}")
        for v in args:
            whole_of = v.placement.kind == "shard" and v.placement.axes == axes and not v.placement.partial
            if not (whole_of if gathers else {*axes} <= {*v.placement.partial} and v.placement.by == line.attrs["op"]):
                self._bad(line, f"{v.name} is {v.placement}")

    def _starts(self, line: Line) -> None:
        handle = line.out[0]
        self.started[handle.name] = line
        if handle.placement != MOVING:
            self._bad(line, f"{handle.name}, which is under way, is {handle.placement}")

    def _wait(self, line: Line, args: list[Value]) -> None:
        start = self.started.pop(line.args[0], None)
        if start is None:
            self._bad(line, f"{line.args[0]} was not started, or is waited for twice")
            return
        sent = [self.known[a] for a in start.args if a in self.known and not start.writes]
        if [(v.shape, v.dtype) for v in line.out] != [(v.shape, v.dtype) for v in sent]:
            self._bad(line, "hands back other shapes or dtypes than were sent")
            return
        for v, source in zip(line.out, sent, strict=True):
            if start.op in COPIES:
                if not self._waits(source.name):
                    self.carried |= {v.name} if source.name in self.written | self.carried else set()
                    self.aliases |= {v.name: root} if (root := self._root(source.name)) in self.program.leaves else {}
                if v.tier != from_to(start)[1]:
                    self._bad(line, f"{v.name} is {v}")
            if v.placement != _arrives(start, source.placement):
                self._bad(line, f"{v.name} is {v.placement}, not {_arrives(start, source.placement)}")

    # --- what needs no trace ---

    def _cast(self, line: Line, args: list[Value]) -> None:
        scales = args[1:]
        if len(scales) != ("through" in line.attrs) or not args:
            self._bad(line, f"casts {len(args)} values")
            return
        here, there = args[0].placement, line.out[0].placement
        summand = there.partial and here.kind != "shard" and not here.partial  # each rank's own, to be summed
        if line.out[0].dtype != line.attrs["dtype"] or line.out[0].shape != args[0].shape or not (here == there or summand):
            self._bad(line, f"{args[0]} becomes {line.out[0]}")
        for scale in scales:
            if (scale.shape, scale.dtype, scale.placement) != ((), torch.float32, WHOLE):
                self._bad(line, f"casts by {scale}")

    def _buffer(self, line: Line, args: list[Value]) -> None:
        leaves = line.attrs["leaves"]
        if len(leaves) != len(line.out) or not all(leaf in self.program.leaves for leaf in leaves):
            self._bad(line, f"makes {len(line.out)} buffers for {len(leaves)} leaves")
            return
        self.aliases.update((v.name, leaf) for v, leaf in zip(line.out, leaves, strict=True))
        self._pairs(line, [self.known[leaf] for leaf in leaves], line.out, "a buffer for")

    def _zeros(self, line: Line, args: list[Value]) -> None:
        if line.out[0].placement != WHOLE:
            self._bad(line, f"makes {line.out[0]}")

    def _take_shard(self, line: Line, args: list[Value]) -> None:
        self.aliases[line.out[0].name] = self._root(line.args[0])
        shard = replace(args[0], name=line.out[0].name, placement=Placement("shard", line.attrs["axes"]))
        if args[0].placement.kind != "whole" or line.out[0] != shard:
            self._bad(line, f"takes a shard of {args[0]}, which is {line.out[0]}")

    def _take_part(self, line: Line, args: list[Value]) -> None:
        whole, part = args[0], line.out[0]
        _, count = self._micro(line)
        rest = (whole.shape[1:], whole.dtype, whole.placement)
        if whole.shape[:1] != tuple(n * count for n in part.shape[:1]) or rest != (part.shape[1:], part.dtype, part.placement):
            self._bad(line, f"takes one of {count} parts of {whole}, which is {part}")

    def _part_index(self, line: Line, args: list[Value]) -> None:
        self._micro(line)
        self._number(line, line.attrs.get("axes", ()))

    def _num_valid(self, line: Line, args: list[Value]) -> None:
        self._number(line, line.attrs["axes"])

    def _draw_start(self, line: Line, args: list[Value]) -> None:
        self._number(line, line.attrs["axes"])

    def _number(self, line: Line, axes: tuple[str, ...]) -> None:
        """An integer, of which each rank along these axes has its own."""
        wanted = Value(line.out[0].name, (), torch.int64, Placement("local", axes) if axes else WHOLE)
        if line.out[0] != wanted:
            self._bad(line, f"makes {line.out[0]}, not {wanted}")

    def _micro(self, line: Line) -> tuple[int, int]:
        """The micro-batch that a line is for, -1 for that of each turn of the loop around it, and how many there are."""
        micro, count = line.attrs.get("micro", (-1, line.attrs.get("count", 1)))
        if count != self.turns if micro < 0 else micro >= count:
            self._bad(line, f"is for micro-batch {micro} of {count}, in a loop of {self.turns} turns")
        return micro, count

    def _accumulate(self, line: Line, args: list[Value]) -> None:
        self._joins(line, args)
        if self.turns == 1 or line.attrs["op"] not in JOINS:
            self._bad(line, f"accumulates by {line.attrs['op']!r} over {self.turns} turns")
        if replace(line.out[0], name=args[0].name) != args[0]:
            self._bad(line, f"{args[0]} accumulates to {line.out[0]}")

    def _add(self, line: Line, args: list[Value]) -> None:
        num = len(line.out)
        self._joins(line, args)
        if line.attrs["op"] not in JOINS:
            self._bad(line, f"adds by {line.attrs['op']!r}")
        if len(args) != 2 * num:
            self._bad(line, f"adds {len(args) - num} values to {num} totals")
        self._pairs(line, args[:num], args[num:], "added")
        self._pairs(line, line.out, args[num:], "added")
        self.overwritten |= {*line.args[:num]}

    def _joins(self, line: Line, args: list[Value]) -> None:
        """What ranks are to reduce by one operation is not joined over micro-batches by another."""
        for v in args:
            if v.placement.partial and v.placement.by != line.attrs["op"]:
                self._bad(line, f"{v.name} is {v.placement}, joined by {line.attrs['op']!r}")

    def _assign(self, line: Line, args: list[Value]) -> None:
        num = len(line.writes)
        if len(args) != 2 * num or line.args[:num] != line.writes:
            self._bad(line, f"assigns {len(args) - num} values to {num} leaves")
        self._pairs(line, args[:num], args[num:], "assigned")

    def _loop(self, line: Line, args: list[Value]) -> None:
        if line.attrs["count"] < 2 or not line.body:
            self._bad(line, f"repeats {len(line.body)} lines {line.attrs['count']} times")

    def _redo(self, line: Line, args: list[Value]) -> None:
        if line.attrs["count"] or not line.body or len(args) % 2 or not args:
            self._bad(line, f"repeats {len(line.body)} lines {line.attrs['count']} times, by {len(args)} scalars")

    def _update(self, line: Line, args: list[Value]) -> None:
        """The whole optimizer, in a program that is not cut yet: places for the arguments, a result for each leaf it writes and each value it makes."""
        graph = line.attrs["graph"]
        counts = len(args), len(line.writes) + len(line.out)
        if counts != (len(graph.inputs), len(graph.outputs)):
            self._bad(line, f"takes {len(graph.inputs)} values and gives {len(graph.outputs)}, not {counts[0]} and {counts[1]}")
        read = {*line.attrs["sums"], *line.attrs["maxima"], *line.attrs["grads"].values(), *line.writes}
        for name in sorted(read - {*line.args}):
            self._bad(line, f"{name} is not among its arguments")

    def _pairs(self, line: Line, targets: Sequence[Value], sources: Sequence[Value], how: str) -> None:
        for target, source in zip(targets, sources, strict=False):
            if (target.shape, target.dtype, target.placement) != (source.shape, source.dtype, source.placement):
                self._bad(line, f"{source} is {how} to {target}")

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
                self._bad(line, f"{v.name} is on the {v.tier}, not on the {tier}")
        for v in line.out if line.op not in COPIES else ():
            if v.tier != writes:
                self._bad(line, f"{v.name} is made on the {writes}, and said to be on the {v.tier}")

    def _call(self, line: Line, args: list[Value]) -> None:
        function = self.program.functions.get(line.fn)
        if function is None:
            self._bad(line, f"no function {line.fn}")
            return
        places = function.graph.inputs
        if len(places) != len(args):
            self._bad(line, f"{line.fn} takes {len(places)} arguments, gets {len(args)}")
            return
        for place, arg in zip(places, args, strict=True):
            self._matches(line, arg, place.meta["val"], "takes")
            if arg.placement.kind == "shard" and "joint" in line.attrs:
                self._bad(line, f"{arg.name} is {arg.placement}, a block takes whole values")
            if arg.placement.partial and not line.writes and "joint" in line.attrs:
                self._bad(line, f"{arg.name} is {arg.placement}")
        if line.writes != tuple(line.args[i] for i in function.writes):
            self._bad(line, f"{line.fn} writes its arguments {list(function.writes)}, not {', '.join(line.writes) or 'none'}")
        returned = function.graph.outputs
        if len(returned) != len(line.out):
            self._bad(line, f"{line.fn} returns {len(returned)} values, {len(line.out)} are named")
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
            self._bad(line, f"{line.fn} {verb} {str(expected.dtype).removeprefix('torch.')}{list(expected.shape)}, {value.name} is {value}")

    def _bad(self, line: Line, text: str) -> None:
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
    return Placement("shard", axes).left(left) if start.op == "reduce_scatter_start" else placement.left(left)
