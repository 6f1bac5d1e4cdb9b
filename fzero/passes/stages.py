"""Divides a program among the stages of a pipeline: each gets a program of its own, the lines of its blocks in the
order of a schedule, with lines that hand values to other stages or take them.

The program of `accumulate(vertical=True)` has each line once a micro-batch. It is the whole program of a pipeline, but
for its order.

[Note: stages] A line belongs to a stage:
  - a block's to that of the block;
  - another one's of a micro-batch to the last stage that it reads of, in the forward;
  - in the backward to the last stage whose forward it reads, or which reads it; else to the first that it reads of;
  - one of the step to that of what it reads or writes, such as a gather, a sum or an update of leaves. A transfer of
    several stages is divided.
A line that reads nothing of any stage is wherever it is read. One that reads values of several stages is on every one
of them: those are numbers, such as norms. Leaves of several stages it may not read.

[Note: hands] A value that other stages read is handed to each of them, at the end of the unit that makes it: a unit is
the forward or backward of a micro-batch. What of the step units read is handed before the first unit, other values of
the step behind the last, in the order of their lines. A take starts a unit ahead, a hand is waited for two units later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fzero.errors import FzeroValueError
from fzero.program.attrs import HandAttrs, TakeAttrs
from fzero.program.ir import Line, Program, moving
from fzero.program.names import Names, identifier
from fzero.program.ops import OPS, STARTS
from fzero.transforms.base import find
from fzero.transforms.pipeline import Pipeline

EVERY = -1
"""The place of what every stage has."""
Place = int | None
"""A stage, or `EVERY`; None: wherever it is read."""


class Unit(NamedTuple):
    """The forward or backward of a micro-batch on a stage."""

    backward: bool
    micro: int


def spec_of(program: Program) -> Pipeline | None:
    """The pipeline of a program, if it has several stages."""
    spec = find(program.transforms, Pipeline)
    return spec if spec is not None and program.mesh.axes[spec.axis] > 1 else None


def block_numbers(program: Program) -> list[int]:
    """The numbers of a program's blocks, in their order."""
    return [*dict.fromkeys(line.block.number for line in program.lines if line.block is not None)]


def leaf_stages(program: Program, of_block: Mapping[int, int]) -> dict[str, int]:
    """The stage of each parameter: the first that reads it. `program`: a base program, whose leaves are nowhere yet."""
    places, found = _Places(program, of_block), dict[str, int]()
    origin: dict[str, str] = {}
    stage_of: dict[int, Place] = dict(enumerate(places.of_line))
    readers: dict[str, list[int]] = defaultdict(list)
    for i in reversed(range(len(program.lines))):  # what reads the batch alone is where its readers are
        line = program.lines[i]
        if stage_of[i] is None:
            after = [s for v in line.out for j in readers[v.name] if (s := stage_of[j]) is not None]
            stage_of[i] = min(after, default=None)
        for a in line.args:
            readers[a].append(i)
    for i, line in enumerate(program.lines):
        if line.op == "cast" and origin.get(line.args[0], line.args[0]) in program.leaves:
            origin[line.out[0].name] = origin.get(line.args[0], line.args[0])
            continue
        for leaf in {origin.get(a, a) for a in line.args} & {*program.leaves} if line.op == "call" else ():
            if (stage := stage_of[i]) is not None:
                found[leaf] = min(stage, found.get(leaf, stage))
    return {x.path: found.get(x.path, 0) for x in program.leaves.values() if x.role == "params"}


def schedule(kind: str, stages: int, micro: int, stage: int) -> list[Unit]:
    """The order of a stage's units.

    Example:
        >>> [f"{'FB'[u.backward]}{u.micro}" for u in schedule("1f1b", 2, 3, 0)]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    ahead = micro if kind == "gpipe" else min(stages - stage - 1, micro)
    forward, backward = ([Unit(b, m) for m in range(micro)] for b in (False, True))
    steady = [u for pair in zip(forward[ahead:], backward, strict=False) for u in pair]
    return [*forward[:ahead], *steady, *backward[micro - ahead :]]


def project(program: Program, stage: int) -> Program:
    """The program of one stage. It has the leaves of that stage alone."""
    return _Projection(program, stage).program


class _Places:
    """The stages of a program's values and lines: see [Note: stages].

    Attributes:
        of: the place of each value. Those that are not there are the batch's, and leaves that every rank has.
        of_line: of each line; of a transfer of the step, whose values have places of their own, `EVERY`.
        divided: the numbers of such transfers and of their waits.
        backward: the number of the first line behind the forward of the last block.
    """

    def __init__(self, program: Program, of_block: Mapping[int, int]):
        self.program = program
        self.of: dict[str, Place] = {
            path: leaf.layout.only.index for path, leaf in program.leaves.items() if leaf.layout.only is not None
        }
        self.of_line: list[Place] = []
        self.divided: set[int] = set()
        self.made: dict[str, int] = {}
        self._of_block, self._started = of_block, dict[str, Line]()
        self._after: dict[int, int] = {}
        # leaves of one stage, their gradients, and what lines other than calls make of them
        self.leaf_like = {*self.of, *program.grads.values()}
        for i, line in enumerate(program.lines):
            self.made.update((v.name, i) for v in line.out)
        self.backward = max((i for i, line in enumerate(program.lines) if line.is_forward), default=-1) + 1
        for i in range(self.backward):
            self._add(i, program.lines[i])
        self._after = self._of_readers()
        for i in range(self.backward, len(program.lines)):
            self._add(i, program.lines[i])

    def _add(self, i: int, line: Line) -> None:
        row, start = OPS[line.op], self._started.get(line.args[0]) if line.args else None
        of_step = line.micro is None
        if line.op == "update":
            place: Place = EVERY
        elif line.block is not None:
            place = self._of_block[line.block.number]
        elif line.op in STARTS and of_step:
            self._started[line.out[0].name], place = line, EVERY
            self.divided.add(i)
        elif row.waits and start is not None:
            self.of.update((v.name, self.of.get(a)) for v, a in zip(line.out, start.args, strict=True))
            self.of_line.append(EVERY)
            self.divided.add(i)
            return
        else:
            place = self._of_unit(i, line) if self._is_of_unit(line) else self._of_step(line)
        self.of_line.append(place)
        self.of.update((v.name, place) for v in line.out)

    @property
    def _is_cut(self) -> bool:
        """Whether it is a finished program, and no base program, in which lines have no micro-batches."""
        return self.program.update is None

    def _is_of_unit(self, line: Line) -> bool:
        return line.micro is not None or (line.op != "update" and not self._is_cut)

    def _of_readers(self) -> dict[int, int]:
        """The stages of lines of the backward: of a block its own, else the last whose forward a line reads, or which
        reads it. Gradients are read where their leaves are."""
        grads, found, starts = self.program.grads, dict[int, int](), dict[str, Line]()
        readers = {grads[leaf]: s for leaf, s in self.of.items() if leaf in grads and s is not None}
        for line in self.program.lines:
            starts.update((v.name, line) for v in line.out if line.op in STARTS)
        for i in reversed(range(self.backward, len(self.program.lines))):
            line = self.program.lines[i]
            if not self._is_of_unit(line):  # a gradient on its way to its update
                sources = starts[line.args[0]].args if OPS[line.op].waits and line.args else line.args
                pairs = zip(line.out, sources, strict=False) if len(sources) == len(line.out) else ()
                readers.update((a, readers[v.name]) for v, a in pairs if v.name in readers)
                continue
            stages = [s for a in line.args if (s := self._stage(a)) is not None]
            stages += [readers[v.name] for v in line.out if v.name in readers]
            if line.block is not None:
                stages = [self._of_block[line.block.number]]
            if stages:
                found[i] = max(stages)
                readers.update((a, max(found[i], readers.get(a, 0))) for a in line.args)
        return found

    def _stage(self, a: str) -> int | None:
        """The stage that has a value of units made before the backward, if one has."""
        at, place = self.made.get(a, -1), self.of.get(a)
        of_unit = 0 <= at < self.backward and self._is_of_unit(self.program.lines[at])
        return place if of_unit and place != EVERY else None

    def _of_unit(self, i: int, line: Line) -> Place:
        if line.args and line.args[0] in self.made and (line.op == "cast" or OPS[line.op].in_place):  # of a summand
            return self.of.get(line.args[0])
        if i in self._after:
            return self._after[i]
        units, step = set[int](), set[int]()
        for a in line.args:
            if (place := self.of.get(a)) is not None and place != EVERY:
                at = self.made.get(a)
                (units if at is not None and self._is_of_unit(self.program.lines[at]) else step).add(place)
        if units:
            return min(units) if i >= self.backward else max(units)
        return min(step, default=None)

    def _of_step(self, line: Line) -> Place:
        names = (*line.args, *line.writes)
        found = {a: s for a in names if a in self.leaf_like and (s := self.of.get(a)) is not None and s != EVERY}
        # gradients are handed to where leaves are
        leaves = {a: s for a, s in found.items() if a in self.program.leaves} or found
        shared = any(self.of.get(w) is None for w in line.writes)  # such as the number of the step
        if len({*leaves.values()}) > 1 or (leaves and shared):
            grads = {g: leaf for leaf, g in self.program.grads.items()}
            problems = [f"{grads.get(a, a)}: stage {s}" for a, s in leaves.items()]
            fix = "an optimizer that reads each leaf apart, and of others numbers such as norms; or no pipeline"
            raise FzeroValueError("pipeline", "an update reads leaves of several stages at once", problems, fix)
        if leaves:
            self.leaf_like |= {v.name for v in line.out if line.op != "call"}  # such as a shard of one
            return next(iter(leaves.values()))
        return EVERY if shared or any(self.of.get(a) is not None for a in names) else None


class _Projection:
    def __init__(self, program: Program, me: int):
        spec = spec_of(program)
        assert spec is not None and spec.stages is not None
        self.source, self.me, self.axis, self.spec = program, me, spec.axis, spec
        self.n = program.mesh.axes[spec.axis]
        numbers = block_numbers(program)
        if len(numbers) != sum(spec.stages):
            what = f"the step has {len(numbers)} blocks, and its stages {sum(spec.stages)}"
            fix = "let the loss function call the same blocks for every batch; or compile the step for each"
            raise FzeroValueError("pipeline", what, [str(spec)], fix)
        owner = [stage for stage, count in enumerate(spec.stages) for _ in range(count)]
        self.places = _Places(program, dict(zip(numbers, owner, strict=True)))
        self.lines, self.values = program.lines, program.values_by_name
        self.names = Names(self.values)
        self._find_crossing()
        self.out: list[Line] = []
        self.emitted: set[int] = set()
        self.here: dict[str, str] = {}  # what leaves of other stages are called here
        self.taken: dict[str, Line] = {}  # by value, the take that is not waited for yet
        self.posted: set[str] = set()
        self.waits: list[tuple[int, Line]] = []  # for what is handed, with the number of the unit
        self.counts: dict[tuple[bool, int], int] = defaultdict(int)
        self._emit_all()
        self.program = self._made()

    # --- what crosses ---

    def _runs(self, i: int) -> set[int]:
        """The stages that run a line; of one that is wherever it is read, none."""
        place = self.places.of_line[i]
        return set() if place is None else {*range(self.n)} if place == EVERY else {place}

    def _find_crossing(self) -> None:
        """Finds the values that other stages read, with those stages, and when each is handed."""
        self.crossing: dict[str, set[int]] = defaultdict(set)
        of_units = set[str]()
        for i, line in enumerate(self.lines):
            if i in self.places.divided:
                continue
            for a in line.args:
                stage = self.places.of.get(a)
                if stage is not None and stage != EVERY and (others := self._runs(i) - {stage}):
                    self.crossing[a] |= others
                    of_units |= {a} if line.micro is not None else set()
        self._check_order()
        for a in self.source.outputs:
            if (stage := self.places.of.get(a)) is not None and stage != EVERY:
                self.crossing[a] |= {*range(self.n)} - {stage}
        self.handed: dict[Unit | str, list[str]] = defaultdict(list)
        for a in sorted(self.crossing, key=lambda a: self.places.made.get(a, -1)):
            unit = self._unit(self.places.made[a]) if a in self.places.made else None
            self.handed[unit or ("before" if a in of_units or a in self.source.leaves else "behind")].append(a)

    def _check_order(self) -> None:
        """Raises where a forward reads what a later stage's makes, or a backward what an earlier one's does."""
        problems = list[str]()
        for i, line in enumerate(self.lines):
            here, unit = self.places.of_line[i], self._unit(i)
            if unit is None or here is None or here == EVERY:
                continue
            for a in line.args:
                made, stage = self.places.made.get(a), self.places.of.get(a)
                of = None if made is None else self._unit(made)
                if of is None or stage is None or stage == EVERY or unit.backward > of.backward:
                    continue
                if of.backward > unit.backward or (stage < here if unit.backward else stage > here):
                    problems.append(f"{a}, of stage {stage}: read by {line.fn or line.op} on stage {here}")
        if problems:
            fix = "let `stages` keep the blocks that it is of on one stage"
            raise FzeroValueError("pipeline", "values go against the order of stages", problems[:5], fix)

    def _unit(self, i: int) -> Unit | None:
        micro = self.lines[i].micro
        return None if micro is None else Unit(i >= self.places.backward, micro[0])

    # --- lines ---

    def _emit_all(self) -> None:
        num = next((line.micro[1] for line in self.lines if line.micro is not None), 1)
        units = schedule(self.spec.schedule, self.n, num, self.me)
        own: dict[Unit, list[int]] = defaultdict(list)
        for i, place in enumerate(self.places.of_line):
            if place == self.me and (unit := self._unit(i)) is not None:
                own[unit].append(i)
        for a in self.handed["before"]:
            self._pass_on(a, -1)
        for number, unit in enumerate(units):
            for now in units[number : number + 2]:
                for a in self.handed[now]:
                    self._take(a)
            self._finish(number - 2)
            for i in own[unit]:
                self._emit(i)
            for a in self.handed[unit]:
                self._hand(a, number)
        self._finish(len(units))
        behind = {*self.handed["behind"]}
        for i, line in enumerate(self.lines):
            if self._unit(i) is None and self.me in self._runs(i):
                self._emit(i)
            for v in line.out:
                if v.name in behind:
                    self._pass_on(v.name, len(units))
        for a in self.source.outputs:
            self._need(a)
        self._finish(len(units))

    def _pass_on(self, a: str, unit: int) -> None:
        self._take(a)
        if self.places.of[a] == self.me:
            self._need(a)
            self._hand(a, unit)

    def _take(self, a: str) -> None:
        """Starts to take a value, if it comes to this stage."""
        stage = self.places.of[a]
        if self.me not in self.crossing[a] or a in self.posted or stage is None:
            return
        self.posted.add(a)
        value = self.values[a]
        number = self.counts[False, stage]
        self.counts[False, stage] += 1
        handle = moving(self.names(f"take_{identifier(a)}"))
        attrs = TakeAttrs(
            axes=(self.axis,),
            peer=stage,
            number=number,
            shape=value.held(self.source.mesh),
            dtype=value.dtype,
            own=value.placement.own,
        )
        self.out.append(Line("take_start", (), (handle,), attrs=attrs, by=self.spec.name))
        if a in self.source.leaves:
            self.here[a] = self.names(f"{identifier(a)}_taken")
        self.taken[a] = Line("wait", (handle.name,), (replace(value, name=self.here.get(a, a)),), by=self.spec.name)

    def _hand(self, a: str, unit: int) -> None:
        """Hands a value of this stage to the stages that read it."""
        if self.places.of[a] != self.me:
            return
        for peer in sorted(self.crossing[a]):
            number = self.counts[True, peer]
            self.counts[True, peer] += 1
            handle = moving(self.names(f"hand_{identifier(a)}"))
            attrs = HandAttrs(axes=(self.axis,), peer=peer, number=number)
            self.out.append(Line("hand_start", (a,), (handle,), attrs=attrs, by=self.spec.name))
            self.waits.append((unit, Line("wait", (handle.name,), by=self.spec.name)))

    def _finish(self, unit: int) -> None:
        """Waits for what was handed in units up to this one."""
        self.out += [line for number, line in self.waits if number <= unit]
        self.waits = [(number, line) for number, line in self.waits if number > unit]

    def _need(self, a: str) -> None:
        """Has a value here, before the line that reads it."""
        if self.places.of.get(a) not in (None, EVERY, self.me):
            assert a in self.posted, f"{a} is read on stage {self.me} before it is taken"
            if a in self.taken:
                self.out.append(self.taken.pop(a))
        elif a in self.places.made:
            self._emit(self.places.made[a])

    def _emit(self, i: int) -> None:
        if i in self.emitted:
            return
        self.emitted.add(i)
        line = self.lines[i]
        if i in self.places.divided:
            line = self._own_part(i, line)
            if not (line.args if line.op in STARTS else line.out):
                return
        for a in line.args:
            self._need(a)
        self.out.append(line.rename(self.here))

    def _own_part(self, i: int, line: Line) -> Line:
        """A transfer of the step, or its wait, as far as it is of values that this stage has."""
        has = lambda a: self.places.of.get(a) in (None, EVERY, self.me)  # noqa: E731
        if line.op in STARTS:
            return replace(line, args=tuple(a for a in line.args if has(a)))
        return replace(line, out=tuple(v for v in line.out if has(v.name)))

    def _made(self) -> Program:
        program = self.source
        own = {p for p, leaf in program.leaves.items() if leaf.layout.only in (None, (self.axis, self.me))}
        made = {v.name for line in self.out for v in line.out} | own
        written = {w for line in self.out for w in line.writes}
        return replace(
            program,
            inputs=tuple(v for v in program.inputs if v.name in own or v.name not in program.leaves),
            leaves={p: leaf.with_layout(only=None) for p, leaf in program.leaves.items() if p in own},
            lines=tuple(self.out),
            owners={p: n for p, n in program.owners.items() if p in own},
            assigns=tuple(a for a in program.assigns if a in written),
            grads={p: g for p, g in program.grads.items() if g in made and p in own},
            notes=(*program.notes, f"stage {self.me} of {self.n}"),
        )
