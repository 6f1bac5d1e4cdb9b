"""Divides a program among the stages of a pipeline: each rank gets a separate program, with the ops of its blocks in
the order of a schedule, and ops that send values to other stages or receive them.

The program of `accumulate(schedule="layerwise")` has each op once per micro-batch. It is the complete program of a
pipeline, except for the order.

[Note: stages] The stage of an op:
  - an op of a block belongs to the stage of the block;
  - another op of a micro-batch belongs, in the forward, to the last stage from which it reads values;
  - in the backward, it belongs to the last stage whose forward it reads, or that reads it; otherwise to the first stage
    from which it reads values;
  - an op that runs once per step belongs to the stage of the parameters and other tensors of the state that it reads or
    writes, or otherwise of all other values that it reads. Examples are a gather, a sum or an update of parameters. A
    transfer of values of several stages is divided.
An op that reads no values of any stage runs on each rank that reads its results. An op that reads values of several
stages runs on every rank: such values are scalars, for example norms. It must not read parameters of several ranks. If
the schedule is interleaved, a rank has several stages, and values that pass between two stages of one rank are not
sent.

[Note: messages between stages] A value that other ranks read is sent to each of them, at the end of
the action that computes it (fzero/transforms/pipeline.py). All values of one action for one rank are one
message. Values of the step (computed once per step) that actions read are sent before the first action. Other values of
the step, and scalars that no action reads, are sent after the last one. Of these, all values of one level are one
message for each rank: the level of a value is that of the values it is computed from, or one more if these are sent in
between. A receive starts one action before the first action that reads its values, and no later than the receives of
messages that the same rank sends later. A send is waited for two actions later, or after its receive has started,
whichever is later, according to the estimated times of the actions. So in the order of those times, every wait comes
after the other side's start, and no ranks wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fzero.errors import FzeroValueError
from fzero.ir.aliases import Views
from fzero.ir.attributes import CallAttrs, SendAttrs, SentValue
from fzero.ir.dependencies import dependences
from fzero.ir.ops import OPS, STARTS
from fzero.ir.program import Instruction, Program, moving
from fzero.ir.value_names import Names
from fzero.transforms.pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Pipeline,
    Unit,
    recv_starts,
    send_ends,
    table,
    when,
)
from fzero.transforms.transform import find

EVERY = -1
"""The place of a value that every stage has."""
Place = int | None
"""A stage or a rank, or `EVERY`; None: on each rank that reads it."""


def spec_of(program: Program) -> Pipeline | None:
    """Returns the configuration of a program's pipeline, if it has several stages."""
    spec = find(program.transforms, Pipeline)
    return spec if spec is not None and program.mesh.axes[spec.axis] > 1 else None


def num_stages(program: Program) -> int:
    """The number of ranks of a program's pipeline, each of which has a separate program; 1 without a pipeline."""
    spec = spec_of(program)
    return 1 if spec is None else program.mesh.axes[spec.axis]


def block_numbers(program: Program) -> list[int]:
    """Returns the numbers of a program's blocks, in order.

    Blocks after the last one that has a backward, such as the chunks of `chunked_cross_entropy`, are part of the loss
    and are not included.
    """
    blocks = [op.block for op in program.instructions if op.block is not None]
    numbers = [*dict.fromkeys(block.number for block in blocks)]
    last = max((block.number for block in blocks if block.part != "forward"), default=None)
    return numbers if last is None else numbers[: numbers.index(last) + 1]


def leaf_stages(program: Program, of_block: Mapping[int, int]) -> dict[str, int]:
    """Returns the stage of each parameter: the first stage that reads it. `program` is a base program, whose parameters
    have no stages yet."""
    found: dict[str, int] = {}
    origin: dict[str, str] = {}
    stage_of = stages_of_ops(program, of_block)
    for i, op in enumerate(program.instructions):
        if op.op == "cast" and origin.get(op.args[0], op.args[0]) in program.leaves:
            origin[op.out[0].name] = origin.get(op.args[0], op.args[0])
            continue
        for leaf in {origin.get(a, a) for a in op.args} & {*program.leaves} if op.op == "call" else ():
            if (stage := stage_of[i]) is not None:
                found[leaf] = min(stage, found.get(leaf, stage))
    return {x.path: found.get(x.path, 0) for x in program.leaves.values() if x.role == "params"}


def stages_of_ops(program: Program, of_block: Mapping[int, int]) -> list[Place]:
    """Returns the stage of each op of a base program. Ops that read only the batch belong to the first stage that reads
    their results."""
    stage_of = [*_Places(program, of_block).of_op]
    readers: dict[str, list[int]] = defaultdict(list)
    for i in reversed(range(len(program.instructions))):
        op = program.instructions[i]
        if stage_of[i] is None:
            after = [s for v in op.out for j in readers[v.name] if (s := stage_of[j]) is not None]
            stage_of[i] = min(after, default=None)
        for a in op.args:
            readers[a].append(i)
    return stage_of


@dataclass(frozen=True)
class Stage:
    """The index of a rank along the axis, and a cache for results about the program that all ranks share."""

    rank: int
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def project(program: Program, options: Stage) -> Program:
    """Returns the program of the ranks at one index along the axis. It has only the state of their stages.

    Precondition: the program of all stages, whose update is partitioned and hoisted.
    """
    known, on = options.known, ("stages", id(program))
    if on not in known:
        known[on] = _Whole(program)  # which keeps the program
    return _Projection(known[on], options.rank).program


class _Places:
    """The stages of a program's values and ops: see [Note: stages].

    Attributes:
        num_ranks: the number of ranks along the axis; None for a base program, whose parameters have no stages yet.
        of: the place of each value. Values that are missing belong to the batch, or to state that every rank has.
        of_line: the place of each op; `EVERY` for a transfer that runs once per step, whose values have separate
            places.
        divided: the indices of such transfers and of their waits.
        backward: the index of the first op after the forward of the last block.
    """

    def __init__(self, program: Program, of_block: Mapping[int, int]):
        self.program = program
        spec = spec_of(program)
        known = (spec and spec.leaves) or {}
        self.num_ranks = program.mesh.axes[spec.axis] if spec and known else None
        self.of: dict[str, Place] = {
            path: known.get(path, leaf.layout.only.index)
            for path, leaf in program.leaves.items()
            if leaf.layout.only is not None
        }
        self.values = program.values_by_name
        # True for a finished program; the ops of a base program have no micro-batches
        self._is_partitioned = program.update is None
        self.of_op: list[Place] = []
        self.divided: set[int] = set()
        self.made: dict[str, int] = {}
        self._of_block, self._started = of_block, dict[str, Instruction]()
        self._after: dict[int, int] = {}
        # parameters and state of one stage, their gradients, and what ops other than calls make of them
        self.leaf_like = {*self.of, *program.grads.values()}
        for i, op in enumerate(program.instructions):
            self.made.update((v.name, i) for v in op.out)
        self.backward = max((i for i, op in enumerate(program.instructions) if op.is_forward), default=-1) + 1
        for i in range(self.backward):
            self._add(i, program.instructions[i])
        self._after = self._of_readers()
        for i in range(self.backward, len(program.instructions)):
            self._add(i, program.instructions[i])

    def rank(self, place: Place) -> Place:
        """The rank of a stage; `EVERY` and None are returned unchanged."""
        return place if place is None or place == EVERY or self.num_ranks is None else place % self.num_ranks

    def _add(self, i: int, op: Instruction) -> None:
        start = self._started.get(op.args[0]) if op.args else None
        of_step = op.micro is None
        if op.op == "update":
            place: Place = EVERY
        elif op.block is not None and op.block.number in self._of_block:
            place = self._of_block[op.block.number]
        elif op.op in STARTS and of_step:
            self._started[op.out[0].name], place = op, EVERY
            self.divided.add(i)
        elif op.is_wait and start is not None:
            for v, a in zip(op.out, start.args, strict=True):
                self.of[v.name] = self.of.get(a)
                self.leaf_like |= {v.name} if a in self.leaf_like else set()
            self.of_op.append(EVERY)
            self.divided.add(i)
            return
        else:
            place = self._of_unit(i, op) if self._is_of_unit(op) else self._of_step(op)
        self.of_op.append(place)
        self.of.update((v.name, place) for v in op.out)

    def _is_of_unit(self, op: Instruction) -> bool:
        return op.micro is not None or (op.op != "update" and not self._is_partitioned)

    def _of_readers(self) -> dict[int, int]:
        """Returns the stages of ops of the backward: for an op of a block its stage, otherwise the last stage whose
        forward the op reads, or that reads it. Gradients are read on the stages of their parameters."""
        grads, found, starts = self.program.grads, dict[int, int](), dict[str, Instruction]()
        readers = {grads[leaf]: s for leaf, s in self.of.items() if leaf in grads and s is not None}
        for op in self.program.instructions:
            starts.update((v.name, op) for v in op.out if op.op in STARTS)
        for i in reversed(range(self.backward, len(self.program.instructions))):
            op = self.program.instructions[i]
            if not self._is_of_unit(op):  # a gradient that is sent to its update
                sources = starts[op.args[0]].args if op.is_wait and op.args else op.args
                pairs = zip(op.out, sources, strict=False) if len(sources) == len(op.out) else ()
                readers.update((a, readers[v.name]) for v, a in pairs if v.name in readers)
            elif stages := self._stages_around(op, readers):
                found[i] = max(stages)
                readers.update((a, max(found[i], readers.get(a, 0))) for a in op.args)
        return found

    def _stages_around(self, op: Instruction, readers: Mapping[str, int]) -> list[int]:
        """Returns the stage of an op of a block, or the stages whose forward an op reads, or that read its results."""
        if op.block is not None and op.block.number in self._of_block:
            return [self._of_block[op.block.number]]
        stages = [s for a in op.args if (s := self._stage(a)) is not None]
        return stages + [readers[v.name] for v in op.out if v.name in readers]

    def _stage(self, a: str) -> int | None:
        """Returns the stage of a value that actions compute before the backward; None for any other value."""
        at, place = self.made.get(a, -1), self.of.get(a)
        of_unit = 0 <= at < self.backward and self._is_of_unit(self.program.instructions[at])
        return place if of_unit and place != EVERY else None

    def _of_unit(self, i: int, op: Instruction) -> Place:
        """Returns the stage of an op of a micro-batch: see [Note: stages]."""
        in_place = OPS[op.op].in_place
        # a cast or an accumulation of a summand
        if op.args and op.args[0] in self.made and (op.op == "cast" or in_place):
            place = self.of.get(op.args[0])
            if place is not None or not in_place:
                return place
        elif i in self._after:
            return self._after[i]
        # a total that begins with zeros is on the stage of its summands
        units, step = set[int](), set[int]()
        for a in op.args:
            if (place := self.of.get(a)) is not None and place != EVERY:
                at = self.made.get(a)
                (units if at is not None and self._is_of_unit(self.program.instructions[at]) else step).add(place)
        if units:
            return min(units) if i >= self.backward else max(units)
        return min(step, default=None)

    def _of_step(self, op: Instruction) -> Place:
        """Returns the stage of an op that runs once per step: see [Note: stages].

        Raises:
            FzeroValueError: an update reads parameters of several ranks at once.
        """
        names = (*op.args, *op.writes)
        found = {a: s for a in names if a in self.leaf_like and (s := self.of.get(a)) is not None and s != EVERY}
        # gradients are sent to the stage of their parameters
        leaves = {a: s for a, s in found.items() if a in self.program.leaves} or found
        shared = any(self.of.get(w) is None for w in op.writes)  # for example, the step counter
        if len({*map(self.rank, leaves.values())}) > 1 or (leaves and shared):
            if op.op == "call" and op.by != "optimizer" and not op.writes:
                # The loss reads only parameters here, such as for weight decay: it runs once for all micro-batches.
                return max(leaves.values())
            raise self._reads_several(leaves)
        if leaves:
            self.leaf_like |= {v.name for v in op.out if op.op != "call"}  # for example, a shard of a parameter
            return next(iter(leaves.values()))
        return EVERY if shared else self._place_of(names)

    def _place_of(self, names: Sequence[str]) -> Place:
        """Returns the stage of an op that reads these values, none of them parameters or gradients of a stage."""
        places = [s for a in names if (s := self.of.get(a)) is not None]
        if not places:
            return None
        alone = EVERY not in places and len({*map(self.rank, places)}) == 1
        # Scalars cost less to send than what is computed from them.
        return places[0] if alone and any(self.values[a].shape for a in names) else EVERY

    def _reads_several(self, leaves: Mapping[str, int]) -> FzeroValueError:
        grads = {g: leaf for leaf, g in self.program.grads.items()}
        problems = [f"{grads.get(a, a)}: stage {s}" for a, s in leaves.items()]
        fix = (
            "use an optimizer that reads each parameter separately, and of others "
            "only scalars such as norms; or leave pipeline out"
        )
        return FzeroValueError("pipeline", "an update reads tensors of several stages at once", problems, fix)


class _Message(NamedTuple):
    """Values that one rank sends to another in one message."""

    values: tuple[str, ...]
    of: int
    to: int


class _Whole:
    """The program of all stages: the place of each op, its action, and the values that are sent between ranks.

    Attributes:
        units: the indices of the ops of each action.
        of_step: the indices of the ops that belong to no action.
        crossing: the ranks that receive each value.
        messages: the messages that are sent after each action.
        levels: the messages that are sent "before" all actions, and "behind" (after) them, level by level.
        posts: for each rank, the index of the action before which it starts to receive each message of actions.
    """

    def __init__(self, program: Program):
        spec = spec_of(program)
        assert spec is not None and spec.stages is not None
        self.program, self.axis, self.spec = program, spec.axis, spec
        self.n = program.mesh.axes[spec.axis]
        numbers = block_numbers(program)
        if len(numbers) != sum(spec.stages):
            what = f"the step has {len(numbers)} blocks, and its stages {sum(spec.stages)}"
            fix = "let the loss function call the same blocks for every batch; or compile the step for each"
            raise FzeroValueError("pipeline", what, [str(spec)], fix)
        owner = [stage for stage, count in enumerate(spec.stages) for _ in range(count)]
        self.places = _Places(program, dict(zip(numbers, owner, strict=True)))
        self.ops, self.values = program.instructions, program.values_by_name
        micro = next((op.micro[1] for op in self.ops if op.micro is not None), 1)
        self.table = table(spec.schedule, self.n, spec.chunks, micro)
        self.index = {unit: i for order in self.table for i, unit in enumerate(order)}
        self._weights = self._of_weights()
        self._unit_of = [self._unit(i) for i in range(len(self.ops))]
        self.units: dict[Unit, list[int]] = defaultdict(list)
        for i, unit in enumerate(self._unit_of):
            if unit is not None:
                self.units[unit].append(i)
        self.of_step = [i for i, unit in enumerate(self._unit_of) if unit is None]
        after = dependences([self.ops[i] for i in self.of_step], Views(program))
        # by op of the step: the ops of the step that it must follow
        self.after = {i: {self.of_step[j] for j in js} for i, js in zip(self.of_step, after, strict=True)}
        self._find_crossing()
        self.when = when(self.table, len(spec.stages), self._between_weights())
        self._needed = self._first_needed()
        self.posts = [self._posts_of(rank) for rank in range(self.n)]

    def rank_of(self, a: str) -> Place:
        """Returns the rank that has a value; `EVERY`, or None: each rank that reads it."""
        return self.places.rank(self.places.of.get(a))

    def runs(self, i: int) -> set[int]:
        """Returns the ranks that run an op; none if it runs on each rank that reads it."""
        place = self.places.rank(self.places.of_op[i])
        return set() if place is None else {*range(self.n)} if place == EVERY else {place}

    def _find_crossing(self) -> None:
        """Finds the values that other ranks read, with those ranks, and determines when each is sent."""
        self.crossing: dict[str, set[int]] = defaultdict(set)
        of_units = self._read_by_units()
        for i, op in enumerate(self.ops):
            for a in op.args if i not in self.places.divided else ():
                self._cross(a, self.runs(i))
        self._check_order()
        for a in self.program.outputs:
            self._cross(a, {*range(self.n)})
        sent: dict[Unit | str, list[str]] = defaultdict(list)
        for a in sorted(self.crossing, key=lambda a: self.places.made.get(a, -1)):
            unit = self._unit_of[self.places.made[a]] if a in self.places.made else None
            if a not in of_units and not self.values[a].shape:  # a scalar that no action waits for
                unit = None
            sent[unit or ("before" if a in of_units or a in self.program.leaves else "behind")].append(a)
        self.messages: dict[Unit, list[_Message]] = defaultdict(list)
        self.messages |= {unit: self._together(of) for unit, of in sent.items() if isinstance(unit, Unit)}
        level = self._levels({*sent["before"], *sent["behind"]})
        self.levels: dict[str, list[list[_Message]]] = {}
        for point in ("before", "behind"):
            numbers = sorted({level[a] for a in sent[point]})
            self.levels[point] = [self._together([a for a in sent[point] if level[a] == n]) for n in numbers]

    def _cross(self, a: str, ranks: set[int]) -> None:
        """Notes that these ranks need a value."""
        rank = self.rank_of(a)
        if rank is not None and rank != EVERY and (others := ranks - {rank}):
            self.crossing[a] |= others

    def _read_by_units(self) -> set[str]:
        """Returns the values that actions read, directly or through ops of the step, such as gathers of a norm's
        shards."""
        found = set[str]()
        for op in reversed(self.ops):
            if op.micro is not None or not found.isdisjoint(v.name for v in op.out):
                found.update(op.args)
        return found

    def _together(self, values: list[str]) -> list[_Message]:
        """Returns the messages for values that are sent at one point."""
        found: dict[tuple[int, int], list[str]] = defaultdict(list)
        for a in values:
            of = self.rank_of(a)
            assert of is not None
            for to in self.crossing[a]:
                found[of, to].append(a)
        return [_Message(tuple(those), *way) for way, those in sorted(found.items())]

    def _levels(self, sent: set[str]) -> dict[str, int]:
        """Returns the levels of values that are sent once per step: see [Note: messages between stages]."""
        of_op, found = dict[int, int](), dict[str, int]()
        for i in self.of_step:
            received = [a for a in self.ops[i].args if a in sent and self.runs(i) - {self.rank_of(a)}]
            of_op[i] = max((of_op[j] for j in self.after[i]), default=0)
            if i not in self.places.divided:
                of_op[i] = max([of_op[i], *(found.get(a, 0) + 1 for a in received)])
            found.update((v.name, of_op[i]) for v in self.ops[i].out)
        return {a: found.get(a, 0) for a in sent}

    def first(self, values: Sequence[str]) -> list[int]:
        """Returns the ops of the step that must run before these values exist, in order."""
        found, left = set[int](), [self.places.made[a] for a in values if self.places.made.get(a) in self.after]
        while left:
            if (i := left.pop()) not in found:
                found.add(i)
                left += self.after[i]
        return sorted(found)

    def _first_needed(self) -> dict[str, dict[int, int]]:
        """Returns the index of the action in which each rank first needs a value."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for a in self.program.outputs:
            found[a] = {rank: len(order) for rank, order in enumerate(self.table)}
        # In reverse order, the readers of an op have been visited before the op.
        for i in reversed(range(len(self.ops))):
            op, unit = self.ops[i], self._unit_of[i]
            if unit is not None and unit in self.index:
                when = {unit.stage % self.n: self.index[unit]}
            else:  # needed when its results are, at the latest after all actions
                when = {} if unit is not None else {rank: len(self.table[rank]) for rank in self.runs(i)}
                for v in op.out:
                    for rank, number in found[v.name].items():
                        when[rank] = min(number, when.get(rank, number))
            for a in op.args if i not in self.places.divided else ():
                for rank, number in when.items():
                    found[a][rank] = min(number, found[a].get(rank, number))
        return found

    def _posts_of(self, me: int) -> dict[_Message, int]:
        """Returns the index of the action before which a rank starts to receive each message of other ranks'
        actions."""
        last, found = len(self.table[me]), dict[_Message, int]()
        # before one action, receives from higher ranks come first
        for rank in (r for r in reversed(range(self.n)) if r != me):
            messages = [x for unit in self.table[rank] for x in self.messages[unit] if x.to == me]
            needed = [(x, min(self._needed[a].get(me, last) for a in x.values)) for x in messages]
            found |= recv_starts(needed, last)
        return found

    def _check_order(self) -> None:
        """Raises if a forward reads values of a later stage's forward, or a backward values of an earlier stage's
        backward."""
        problems = list[str]()
        for i, op in enumerate(self.ops):
            here, unit = self.places.of_op[i], self._unit_of[i]
            if unit is None or here is None or here == EVERY:
                continue
            for a in op.args:
                made, stage = self.places.made.get(a), self.places.of.get(a)
                of = None if made is None else self._unit_of[made]
                if of is None or stage is None or stage == EVERY or unit.kind > of.kind:
                    continue
                if of.kind > unit.kind or (stage > here if unit.kind == FORWARD else stage < here):
                    problems.append(f"{a}, of stage {stage}: read by {op.fn or op.op} on stage {here}")
        if problems:
            fix = "let `stages` keep the blocks that it belongs to on one stage"
            raise FzeroValueError(
                "pipeline", "a value is needed by an earlier stage than the one that computes it", problems[:5], fix
            )

    def _of_weights(self) -> set[int]:
        """Returns the indices of the ops of weight actions: calls that compute gradients of parameters, and the ops
        that read these gradients."""
        found, made = set[int](), set[str]()
        for i, op in enumerate(self.ops):
            says = isinstance(op.attrs, CallAttrs) and op.attrs.weights
            if op.micro is not None and (says or not made.isdisjoint(op.args)):
                found.add(i)
                made.update(v.name for v in op.out)
        return found

    def _between_weights(self) -> dict[Unit, set[Unit]]:
        """Returns, for weight actions, the weight actions of other stages whose results they read, for example for a
        tied embedding."""
        found: dict[Unit, set[Unit]] = defaultdict(set)
        for i in self._weights:
            for a in self.ops[i].args:
                made, unit = self.places.made.get(a), self._unit_of[i]
                of = self._unit_of[made] if made in self._weights else None
                if of is not None and unit is not None and EVERY not in (of.stage, unit.stage) and of != unit:
                    found[unit] |= {of} if of.micro == unit.micro else set()
        return found

    def _unit(self, i: int) -> Unit | None:
        """Returns the action of an op; None for an op of the step. If the op runs on each rank that reads it, the
        action has no stage (`EVERY`)."""
        micro, stage = self.ops[i].micro, self.places.of_op[i]
        kind = WEIGHTS if i in self._weights else BACKWARD if i >= self.places.backward else FORWARD
        return None if micro is None else Unit(kind, micro[0], EVERY if stage is None else stage)


class _Projection:
    """The ops of one rank, in the order of its actions."""

    def __init__(self, whole: _Whole, me: int):
        self.whole, self.me = whole, me
        self.names = Names(whole.values)
        self.out: list[Instruction] = []
        self.emitted: set[int] = set()
        self.here: dict[str, str] = {}  # the names that parameters of other stages have on this rank
        self.taken: dict[
            str, tuple[_Message, Instruction]
        ] = {}  # by value: the receive that has not been waited for yet
        self.posted: set[str] = set()
        self.waits: list[
            tuple[int, Instruction]
        ] = []  # waits for sends, with the index of the action that they precede
        self.counts: dict[tuple[bool, int], int] = defaultdict(int)
        self._emit_all()
        self.program = self._made()

    def _emit_all(self) -> None:
        """Adds the ops of all actions in schedule order, with sends and receives, and then the remaining ops of the
        step."""
        whole, units = self.whole, self.whole.table[self.me]
        receives: dict[int, list[_Message]] = defaultdict(list)
        for message, number in sorted(whole.posts[self.me].items(), key=lambda item: item[1]):
            receives[number].append(message)
        self._pass_on("before", 1)
        for number, unit in enumerate(units):
            # Receives start before this rank waits for its sends: two ranks that first waited for
            # their sends to each other would never start to receive.
            for message in receives[number]:
                self._recv(message)
            self._finish(number)
            for i in whole.units[unit]:
                self._emit(i)
            for message in whole.messages[unit]:
                self._send(message, self._awaited(message, number))
        self._finish(len(units))
        self._pass_on("behind", len(units))
        for i in whole.of_step:
            if self.me in whole.runs(i):
                self._emit(i)
        for a in whole.program.outputs:
            self._need(a)
        self._finish(len(units))

    def _pass_on(self, when: str, before: int) -> None:
        """Sends and receives the values of the step before all actions, or after them."""
        for messages in self.whole.levels[when]:
            own = [message for message in messages if message.of == self.me]
            for message in messages:
                if message.to == self.me:
                    self._recv(message)
            for i in self.whole.first([a for message in own for a in message.values]):
                if self.me in self.whole.runs(i):
                    self._emit(i)
            for message in own:
                self._send(message, before)

    def _recv(self, message: _Message) -> None:
        """Starts to receive values that are sent to this rank."""
        number = self.counts[False, message.of]
        self.counts[False, message.of] += 1
        values = [self.whole.values[a] for a in message.values]
        by = self.whole.spec.name
        handle = moving(self.names(f"recv_{self.names.stem(message.values[0])}"))
        attrs = SendAttrs(axes=(self.whole.axis,), peer=message.of, number=number, values=self._sent_values(message))
        self.out.append(Instruction("recv_start", (), (handle,), attrs=attrs, by=by))
        leaves = [a for a in message.values if a in self.whole.program.leaves]
        self.here |= {a: self.names(f"{self.names.stem(a)}_received") for a in leaves}
        made = tuple(replace(v, name=self.here.get(v.name, v.name)) for v in values)
        self.posted.update(message.values)
        self.taken |= dict.fromkeys(message.values, (message, Instruction("wait", (handle.name,), made, by=by)))

    def _send(self, message: _Message, before: int) -> None:
        """Sends values of this rank to one that reads them, and waits for the send before action `before`."""
        for a in message.values:
            self._need(a)
        number = self.counts[True, message.to]
        self.counts[True, message.to] += 1
        handle = moving(self.names(f"send_{self.names.stem(message.values[0])}"))
        attrs = SendAttrs(axes=(self.whole.axis,), peer=message.to, number=number, values=self._sent_values(message))
        self.out.append(Instruction("send_start", message.values, (handle,), attrs=attrs, by=self.whole.spec.name))
        self.waits.append((before, Instruction("wait", (handle.name,), by=self.whole.spec.name)))

    def _sent_values(self, message: _Message) -> tuple[SentValue, ...]:
        values, mesh = (self.whole.values[a] for a in message.values), self.whole.program.mesh
        return tuple(SentValue(v.local_shape(mesh), v.dtype, v.placement.varies_over) for v in values)

    def _awaited(self, message: _Message, number: int) -> int:
        """Returns the index of the action before which a rank waits for a message that its action `number` sends."""
        whole = self.whole
        taken_before = whole.table[message.to][whole.posts[message.to][message]]
        return send_ends(whole.table[self.me], number, whole.when[taken_before][0], whole.when)

    def _finish(self, unit: int) -> None:
        """Adds the waits that are due before this action."""
        self.out += [op for number, op in self.waits if number <= unit]
        self.waits = [(number, op) for number, op in self.waits if number > unit]

    def _need(self, a: str) -> None:
        """Makes a value available on this rank, before the op that reads it."""
        if self.whole.rank_of(a) not in (None, EVERY, self.me):
            assert a in self.posted, f"{a} is read on rank {self.me} before it is received"
            if a in self.taken:
                message, wait = self.taken[a]
                self.out.append(wait)
                for b in message.values:
                    del self.taken[b]
        elif a in self.whole.places.made:
            self._emit(self.whole.places.made[a])

    def _emit(self, i: int) -> None:
        """Adds an op, after the ops and waits that its arguments need, unless it has been added already."""
        if i in self.emitted:
            return
        self.emitted.add(i)
        op = self.whole.ops[i]
        if i in self.whole.places.divided:
            op = self._own_part(i, op)
            if not (op.args if op.op in STARTS else op.out):
                return
        for a in op.args:
            self._need(a)
        self.out.append(op.rename(self.here))

    def _own_part(self, i: int, op: Instruction) -> Instruction:
        """Returns a transfer of the step, or its wait, restricted to the values that this rank has."""
        has = lambda a: self.whole.rank_of(a) in (None, EVERY, self.me)  # noqa: E731
        if op.op in STARTS:
            return replace(op, args=tuple(a for a in op.args if has(a)))
        return replace(op, out=tuple(v for v in op.out if has(v.name)))

    def _made(self) -> Program:
        """Returns the program with the state of this rank's stages only."""
        program, chunks = self.whole.program, self.whole.spec.chunks
        stages = ", ".join(str(self.me + chunk * self.whole.n) for chunk in range(chunks))
        own = {p for p, leaf in program.leaves.items() if leaf.layout.only in (None, (self.whole.axis, self.me))}
        made = {v.name for op in self.out for v in op.out} | own
        written = {w for op in self.out for w in op.writes}
        return replace(
            program,
            inputs=tuple(v for v in program.inputs if v.name in own or v.name not in program.leaves),
            leaves={p: leaf.with_layout(only=None) for p, leaf in program.leaves.items() if p in own},
            instructions=tuple(self.out),
            owners={p: n for p, n in program.owners.items() if p in own},
            assigns=tuple(a for a in program.assigns if a in written),
            grads={p: g for p, g in program.grads.items() if g in made and p in own},
            notes=(*program.notes, f"stage{'s' * (chunks > 1)} {stages} of {self.whole.n * chunks}"),
        )
