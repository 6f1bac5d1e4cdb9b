"""Speculates on updates that would wait for all gradients, such as for a clipping norm: they run on a guess, and again
if it was wrong.

The guess is the scalars' values if every reduction of gradients is zero: a norm below the clip, no overflow. So the
update of a block runs right behind its backward, in the same function, and leaves on disk are written beside their old
values. Once the scalars are known they are compared bit for bit. If they are the guess, the new values count; if not,
the old ones do, and the same updates run again with the scalars as they are:

    if redo([scale], [guess_scale]):
        …

Nothing depends on how good the guess is but time: a step after one whose guess was wrong does not guess, and waits. Of
a leaf on disk the old value stays where it is, in the one of two extents; of every other a copy is kept, for which
there must be memory: so updates of leaves in host memory are guessed only where a host budget says that there is
(fzero/lowering/search.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fzero.program.attrs import TurnsAttrs
from fzero.program.ir import Line, Program
from fzero.program.names import Names
from fzero.program.ops import OPS, STARTS

TIERS = (("disk",), ("disk", "host"))
"""The tiers whose leaves can be updated on a guess: with the disk's alone no more memory rests."""


def speculate(program: Program, tiers: Sequence[str]) -> Program:
    """A program whose update is cut, with the updates of leaves on these tiers on a guess, where they would wait for
    reductions of gradients.

    The program itself, if none does, or if what they wait for depends on more than gradients: then a guess would hardly
    ever be right.

    Cost: gradients wait until the end of the step, as without (off_device.py says where); of leaves that are updated
    on a guess and do not rest on disk a copy, made before the update. On disk twice the bytes at rest, and a wrong
    guess reads and writes them twice. No communication.
    """
    return _Guess(program, tiers).run()


def num_guessable(program: Program, tiers: Sequence[str]) -> int:
    """The number of updates that `guess` would speculate on."""
    return len(_Guess(program, tiers).updates)


class _Guess:
    def __init__(self, program: Program, tiers: Sequence[str]):
        self.program, self.values, self.tiers = program, program.values_by_name, {*tiers}
        self.lines = [line for line in program.lines if line.by == "optimizer"]
        self.made = {v.name: line for line in self.lines for v in line.out}
        self.handles = {line.out[0].name: line for line in self.lines if line.op in STARTS}
        self.updates = [line for line in self.lines if self._may_be_guessed(line)]

    def _may_be_guessed(self, line: Line) -> bool:
        if not line.fn or not line.writes:
            return False
        tiers = {w: self.program.leaves[w].layout.tier if w in self.program.leaves else "" for w in line.writes}
        waits_for = set().union(*(self._reductions(a) for a in line.args if a in self.made))
        off = {*tiers.values()} - {"device"}
        return bool(off) and off <= self.tiers and bool(waits_for) and all(self._of_gradients(r) for r in waits_for)

    def _reductions(self, name: str) -> set[str]:
        """The reductions over leaves that a value of the optimizer depends on: the names they have once they are known
        to all ranks."""
        line = self.made[name]
        if OPS[line.op].waits:
            return {name}
        inside = [a for a in line.args if a in self.made]
        return {name} if self._reduces(line) else set().union(*map(self._reductions, inside))

    def _reduces(self, line: Line) -> bool:
        """Whether a function makes scalars of a leaf: it reads a value from outside the optimizer, larger than a number
        or a key."""
        return bool(line.fn) and any(
            a not in self.made and self.values[a].shape and not self._is_key(a) for a in line.args
        )

    def _is_key(self, name: str) -> bool:
        return name in self.program.leaves and self.program.leaves[name].role == "key"

    def _of_gradients(self, name: str) -> bool:
        """Whether a reduction reads nothing but gradients."""
        line = self.made[name]
        if OPS[line.op].waits:
            start = self.handles[line.args[0]]
            return start.op == "all_reduce_start" and all(self._of_gradients(a) for a in start.args)
        return self._reduces(line) and not any(a in self.program.leaves or a in self.made for a in line.args)

    def run(self) -> Program:
        if not self.updates:
            return self.program
        names = Names(self.values)
        zeros: dict[tuple[tuple[int, ...], str], Line] = {}
        known: dict[str, str] = {}  # by a scalar, the guess of it
        new: list[Line] = []

        def guessed(name: str) -> str:
            """The name of a scalar's guess; of one that depends on no gradients its own."""
            if name not in self.made or not (reductions := self._reductions(name)):
                return name
            if name in known:
                return known[name]
            if name in reductions:
                value = self.values[name]
                key = value.shape, str(value.dtype)
                if key not in zeros:
                    zeros[key] = Line("zeros", (), (replace(value, name=names("neutral")),), by="optimizer")
                    new.append(zeros[key])
                known[name] = zeros[key].out[0].name
                return known[name]
            line = self.made[name]
            args = tuple(map(guessed, line.args))
            out = tuple(replace(v, name=names(f"guess_{v.name}")) for v in line.out)
            known.update((v.name, g.name) for v, g in zip(line.out, out, strict=True))
            new.append(replace(line, args=args, out=out))
            return known[name]

        chosen = {id(line) for line in self.updates}
        first = [replace(x, args=tuple(map(guessed, x.args))).saying(guess=True) for x in self.updates]
        scalars = dict.fromkeys(a for x in self.updates for a in x.args if guessed(a) != a)
        redo = Line(
            "redo",
            (*scalars, *map(guessed, scalars)),
            attrs=TurnsAttrs(count=0),
            body=tuple(self.updates),
            by="optimizer",
        )
        at = next(i for i, line in enumerate(self.program.lines) if id(line) in chosen)
        rest = [line for line in self.program.lines[at:] if id(line) not in chosen]
        assert not any(v.name in scalars for line in rest for v in line.out), "scalars before updates"
        return replace(self.program, lines=(*self.program.lines[:at], *new, *first, redo, *rest))
