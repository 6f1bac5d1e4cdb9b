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
there must be memory: so updates of leaves in host memory are guessed only if a host budget says that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fzero.ir.attributes import AssignAttrs, CastAttrs, TurnsAttrs
from fzero.ir.ops import OPS
from fzero.ir.program import Line, Program
from fzero.ir.value_names import Names, identifier

if TYPE_CHECKING:
    from fzero.compiler.options import Choice

TIERS = (("disk",), ("disk", "host"))
"""The tiers whose leaves can be updated on a guess: with the disk's alone no more memory rests."""


def rewrite(program: Program, tiers: Sequence[str]) -> Program:
    """A program whose update is cut, with the updates of leaves on these tiers on a guess, where they would wait for
    reductions of gradients.

    The program itself, if none does, or if what they wait for depends on more than gradients: then a guess would hardly
    ever be right.

    Cost: gradients wait until the end of the step, as without (offload_analysis.py says where); of leaves that are
    updated on a guess and do not rest on disk a copy, made before the update. On disk twice the bytes at rest, and a
    wrong guess reads and writes them twice. No communication.
    """
    return _Guess(program, tiers).run()


def with_old_values(program: Program) -> Program:
    """The program, after its updates were hoisted, with copies of the leaves that updates on a guess overwrite, which
    the `redo` puts back. A leaf on disk needs none: its new value is written beside the old one. Copies in the compute
    dtype need none: no update reads them."""
    names, lines, kept = Names(program.values_by_name), list[Line](), dict[str, str]()
    tier_of = lambda name: program.leaves[name].layout.tier  # noqa: E731
    for line in program.lines:
        for name in line.writes if line.guess else ():
            if tier_of(name) != "disk" and program.leaves[name].role != "compute":
                old = replace(program.values_by_name[name], name=names(f"{identifier(name)}_kept"))
                attrs = CastAttrs(dtype=old.dtype, guess=True)
                lines.append(Line("cast", (name,), (old,), attrs=attrs, by="optimizer"))
                kept[name] = old.name
        if line.op == "redo":
            attrs, written = AssignAttrs(restores=True, guess=True), [w for x in line.body for w in x.writes]
            for tier in ("host", "device"):
                if ws := tuple(w for w in written if w in kept and tier_of(w) == tier):
                    back = Line("assign", (*ws, *(kept[w] for w in ws)), attrs=attrs, writes=ws, by="optimizer")
                    line = replace(line, body=(back, *line.body))
        lines.append(line)
    return replace(program, lines=tuple(lines)) if kept else program


def starts(least: Choice, program: Program, budget: Any) -> list[Choice]:
    """The least choice with updates on a guess, for each set of tiers by which more of them can be. In host memory only
    a budget has room for the old values. `program`: whose update is cut."""
    counts = [0, *(len(_Guess(program, tiers).updates) for tiers in TIERS)]
    more = [tiers for tiers, before, num in zip(TIERS, counts, counts[1:], strict=False) if before < num]
    return [replace(least, guess=tiers) for tiers in more if budget.host is not None or "host" not in tiers]


def is_possible(program: Program) -> bool:
    """Whether any update can be on a guess. `program`: whose update is cut."""
    return bool(_Guess(program, TIERS[-1]).updates)


def shares(tiers: Sequence[str], rests: Any, copies: bool) -> tuple[float, float]:
    """Upper bounds of the shares of the state in host memory and on disk that are updated on a guess. `rests`: where
    it is (compiler/cost_bounds.py); `copies`: whether masters have copies that are computed with."""
    (state_h, state_d), (params_h, _) = rests.state, rests.params
    if tiers != ("disk",) or not state_d:
        return float("host" in tiers), float("disk" in tiers)
    if state_h > rests.masters(copies)[0]:
        return 0.0, 0.0  # most state on disk is updated together with state in host memory
    return 0.0, max(0.0, 1 - max(0.0, params_h - state_h) / state_d)  # that of parameters in host memory is not


def decision(choice: Choice) -> tuple[str, str, str] | None:
    why = "the update of what rests off the device does not wait for the norm of all gradients, and is done again "
    return ("update", "on a guess", f"{why}if that changes it") if choice.guess else None


class _Guess:
    def __init__(self, program: Program, tiers: Sequence[str]):
        self.program, self.values, self.tiers = program, program.values_by_name, {*tiers}
        self.lines = [line for line in program.lines if line.by == "optimizer"]
        self.made = {v.name: line for line in self.lines for v in line.out}
        self.keys = {name for name, leaf in program.leaves.items() if leaf.role == "key"}
        self.updates = [line for line in self.lines if self._may_be_guessed(line)]

    def _may_be_guessed(self, line: Line) -> bool:
        leaves = self.program.leaves
        off = {leaves[w].layout.tier if w in leaves else "" for w in line.writes} - {"device"}
        if not line.fn or not off or not off <= self.tiers:
            return False
        waits_for = set().union(*(self._reductions(a) for a in line.args if a in self.made))
        return bool(waits_for) and all(self._of_gradients(r) for r in waits_for)

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
            a not in self.made and a not in self.keys and self.values[a].shape for a in line.args
        )

    def _of_gradients(self, name: str) -> bool:
        """Whether a reduction reads nothing but gradients."""
        line = self.made[name]
        if OPS[line.op].waits:
            start = self.made[line.args[0]]
            return start.op == "all_reduce_start" and all(self._of_gradients(a) for a in start.args)
        return self._reduces(line) and not any(a in self.program.leaves or a in self.made for a in line.args)

    def run(self) -> Program:
        if not self.updates:
            return self.program
        names = Names(self.values)
        zeros: dict[tuple[tuple[int, ...], str], str] = {}
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
                    zeros[key] = names("neutral")
                    new.append(Line("zeros", (), (replace(value, name=zeros[key]),), by="optimizer"))
                return known.setdefault(name, zeros[key])
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
