"""Divides blocks into stages on the ranks along a mesh axis, which send micro-batches from one to the next: pipeline.

Acts on the program. This file has the configuration; the table of actions, which orders what each rank does, with the
built-in schedules; and the pass that splits backwards for schedules with weight actions. transforms/pipeline_pass.py
makes the program of each stage from the table.

An action (class `Unit`) is the forward or backward of a micro-batch on a stage. In a schedule with weight actions, the
backward computes the gradients that other stages wait for, and the weight action those of parameters, which fill the
bubble. A table contains, for each rank, the order of its actions. Stage s is on rank s mod p: with `chunks` stages per
rank, its chunk is s div p.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch.fx as fx

from fzero._utils.arguments import keywords
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.from_graph import Functions
from fzero.ir.program import Instruction, Program, Value, with_segments
from fzero.ir.value_names import Names, call_name, operation_name
from fzero.sharding.collective_partitions import Pieces, in_two
from fzero.sharding.layout import Leaf, Only
from fzero.sharding.placements import varying
from fzero.step import EvalStep
from fzero.transforms.fp8 import Fp8
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.offload import Offload
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.redundant import Redundant
from fzero.transforms.transform import Transform, applied, find
from fzero.transforms.zero import Parallel

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
GATHERS = ("step", "micro")
UNIT = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")
"""An action in a user's schedule: forward, backward or weights; the micro-batch; the chunk."""
_NOT_YET = (Fp8, Offload, Hierarchical)


@dataclass(frozen=True)
class Pipeline(Transform):
    """The configuration of `pipeline`. `leaves`: the stage of each parameter, by its path, once it is known."""

    axis: str = "pipe"
    stages: tuple[int, ...] | None = None
    schedule: str | tuple[tuple[str, ...], ...] = "1f1b"
    chunks: int = 1
    gather: str = "step"
    # Not part of the hash, because a dict has none. Specs with different stages are still unequal.
    leaves: Mapping[str, int] | None = field(default=None, hash=False)
    order: ClassVar[int] = 60
    name: ClassVar[str] = "pipeline"

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Parallel) and self.axis in other.axes:
            return f"along {self.axis!r} every rank has the same samples: let {other.name} name another axis"
        if isinstance(other, Redundant) and other.axis == self.axis:
            return (
                f"along {self.axis!r} ranks have different parameters: let "
                f"{other.name} name an axis that shards parameters"
            )
        if isinstance(other, _NOT_YET):
            return f"{other.name} does not support parameters that a rank does not have"
        if isinstance(other, MixedPrecision) and other.watch:
            return "statistics of all blocks are one value, and a stage has only its own blocks"
        return super().conflict(other)

    def idle(self, step: EvalStep) -> str | None:
        return "its stages pass on the micro-batches of a training step"

    @property
    def has_weights(self) -> bool:
        """Whether the schedule has separate actions for the gradients of parameters."""
        if isinstance(self.schedule, str):
            return self.schedule == "zb"
        return any(unit.startswith("W") for order in self.schedule for unit in order)

    def only(self, leaf: Leaf) -> Only | None:
        """The index along the axis of the rank that has a parameter; None if all ranks have it."""
        if self.leaves is None or self.stages is None:
            return None
        # Stage s is on rank s modulo the number of ranks, which is the number of stages divided by those per rank.
        return Only(self.axis, self.leaves[leaf.path] % (len(self.stages) // self.chunks))

    def __str__(self) -> str:
        stages = "" if self.stages is None else f", stages={[*self.stages]}"
        schedule = self.schedule if isinstance(self.schedule, str) else [[*order] for order in self.schedule]
        chunks = f", chunks={self.chunks}" if self.chunks > 1 else ""
        gather = f", gather={self.gather!r}" if self.gather != "step" else ""
        return f"{self.name}(axis={self.axis!r}{stages}, schedule={schedule!r}{chunks}{gather})"


@keywords
def pipeline(
    step: Any = None,
    *,
    axis: str = "pipe",
    stages: Sequence[int] | None = None,
    schedule: str | Sequence[Sequence[str]] = "1f1b",
    chunks: int = 1,
    gather: str = "step",
) -> Any:
    """Divides the blocks of a step among the ranks along `axis`: each rank computes its own blocks and sends their
    outputs to the next rank, one micro-batch at a time.

    It requires `accumulate(m)` for the micro-batches, which then run in the order of `schedule`. The result equals that
    of the step with only `accumulate(m, schedule="layerwise")`: in fp32 the same bits. A rank has only the parameters
    and optimizer state of its own stages. A parameter that several stages read, such as a tied embedding, belongs to
    the first of them. Every rank along `axis` gets the same samples, and returns the same metrics. The stages are
    chosen for the `batch` given to `fz.compile`, or otherwise at the first step: until then every rank has the whole
    state.

    Args:
        step: a training step; without one a transform is returned.
        axis: the mesh axis.
        stages: the number of consecutive blocks in each stage: `[7, 9]`. By default, stages are as equal as possible in
            the FLOPs of their matrix products, including the code before the first and after the last block.
        schedule: "1f1b": a stage begins the backward of a micro-batch as soon as it can. "gpipe": all forwards come
            first. "interleaved": 1F1B with several stages (`chunks`) per rank. "zb" (zero bubble): 1F1B whose backwards
            compute only the gradients that other stages wait for; the gradients of parameters fill the bubble. Or a
            table: for each rank the order of its actions, `[["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]`;
            `F0.1` is the forward of micro-batch 0 on chunk 1. If the table has actions such as `W0`, gradients of
            parameters are computed in separate actions.
        chunks: the number of stages per rank. Stage s is on rank s mod p.
        gather: when parameters that `shard_params` shards are gathered. "step": once per step; they stay unsharded
            until their last micro-batch. "micro": for each forward and backward of a micro-batch.

    Communication: with p stages, for each micro-batch the values that pass between two stages, in forward and backward;
        once per step, one number for each block. A parameter that several stages read is sent to the other stages once
        per step, and its gradients are sent back once per micro-batch. `gather="micro"` gathers 2 m times what "step"
        gathers once. Ranks wait for (p-1)/(m+p-1) of a step if stages are equal, (p-1)/(m*chunks+p-1) interleaved,
        which sends `chunks` times as often; with "zb" (p-1)/(3m+p-1) if forward, backward and weights take equally
        long.
    Memory: the parameters, gradients and optimizer state of a stage. "1f1b": activations of at most p - s micro-batches
        on stage s. "gpipe": of all micro-batches. "zb": of p, together with the values of their backwards that the
        weight gradients need. With `shard_params`: all parameters of a stage unsharded, or with `gather="micro"` those
        of two blocks.

    Raises:
        FzeroTypeError: `axis` is not a name; `stages` are not whole numbers.
        FzeroValueError: an unknown schedule or `gather`; `chunks` that do not fit the schedule; a table that does not
            fit the step or whose ranks wait for each other. When the program is built: a step without `accumulate`, or
            with mutable tensors; more stages than blocks, or counts that do not add up; `gather="micro"` without
            sharded parameters. Also a backward that reads values of an earlier stage's backward, and an update that
            reads parameters of two stages at once.
        TransformError: a parallel transform or `redundant` over `axis`; `offload`, `hierarchical`, `fp8`, or a
            `mixed_precision` that watches blocks; an evaluation.
        VerifyError: stages wait for each other.

    Papers: Huang et al., GPipe, 2019; Narayanan et al., PipeDream: generalized pipeline parallelism for DNN training,
        2019; Qi et al., Zero Bubble Pipeline Parallelism, 2023.

    Example:
        >>> import torch, fzero as fz
        >>> layer = fz.block(lambda w, x: torch.tanh(x @ w))
        >>> def loss(params, x):
        ...     for w in params:
        ...         x = layer(w, x)
        ...     return x.square().mean()
        >>> step = fz.compose(fz.accumulate(4), fz.pipeline())(fz.train_step(loss, fz.optim.sgd(0.1)))
        >>> params, x = [torch.empty(8, 8, device="meta")] * 4, torch.empty(16, 8, device="meta")
        >>> lowered = fz.lower(step, fz.AbstractMesh(pipe=2), [x.clone() for x in params], x)
        >>> [len(program.leaves) for program in lowered.programs]  # two of the weights, the step and the key
        [4, 4]
    """
    problems = [] if isinstance(axis, str) and axis.isidentifier() else [f"axis={axis!r}: the name of a mesh axis"]
    listed = isinstance(stages, Sequence) and not isinstance(stages, str)
    if stages is not None and not (listed and stages and all(type(n) is int and n > 0 for n in stages)):
        problems.append(f"stages={stages!r}: a number of blocks, at least 1, for each stage")
    if type(chunks) is not int or chunks < 1:
        problems.append(f"chunks={chunks!r}: the number of stages of a rank, at least 1")
    if problems:
        raise FzeroTypeError("pipeline", "invalid arguments", problems, "e.g. fz.pipeline(axis='pipe', stages=[7, 9])")
    if gather not in GATHERS:
        raise FzeroValueError("pipeline", f"unknown gather {gather!r}", fix=f"one of {', '.join(map(repr, GATHERS))}")
    order = schedule if isinstance(schedule, str) else _table(schedule)
    if isinstance(order, str):
        if order not in SCHEDULES:
            fix = f"one of {', '.join(map(repr, SCHEDULES))}"
            raise FzeroValueError("pipeline", f"unknown schedule {schedule!r}", fix=fix)
        if (order == "interleaved") != (chunks > 1):
            fix = "schedule='interleaved' with chunks=2 or more, any other with 1"
            raise FzeroValueError("pipeline", f"schedule={order!r} with chunks={chunks}", fix=fix)
    return applied(Pipeline(axis, None if stages is None else tuple(stages), order, chunks, gather), step)


def _table(schedule: Any) -> tuple[tuple[str, ...], ...]:
    """Checks a user's table of actions and returns it as tuples."""
    lists = isinstance(schedule, Sequence) and all(isinstance(x, Sequence) and not isinstance(x, str) for x in schedule)
    problems = [f"rank {r}: {u!r}" for r, x in enumerate(schedule) for u in x if not _is_unit(u)] if lists else []
    if problems or not lists:
        fix = "e.g. [['F0', 'F1', 'B0', 'B1'], ['F0', 'B0', 'F1', 'B1']]; F0.1 is of the next chunk"
        raise FzeroTypeError("pipeline", "a schedule is a name, or a list of actions for each rank", problems[:5], fix)
    return tuple(tuple(order) for order in schedule)


def _is_unit(text: Any) -> bool:
    return isinstance(text, str) and UNIT.fullmatch(text) is not None


# --- the table of actions ---


FORWARD, BACKWARD, WEIGHTS = range(3)
KINDS = "FBW"
"""The letter of each kind of action."""


class Unit(NamedTuple):
    """The forward, backward or weight action of a micro-batch on a stage."""

    kind: int
    micro: int
    stage: int

    def text(self, ranks: int) -> str:
        """The notation of users: `F0`, or `B3.1` for chunk 1 of a rank."""
        chunk = self.stage // ranks
        return f"{KINDS[self.kind]}{self.micro}{f'.{chunk}' if chunk else ''}"


Table = tuple[tuple[Unit, ...], ...]
Message = TypeVar("Message")
"""The values that an action sends to another rank, of any type."""


def table(schedule: str | Sequence[Sequence[str]], ranks: int, chunks: int, micro: int) -> Table:
    """Returns the order of actions of each rank.

    Args:
        schedule: a name, or for each rank the texts of its actions.
        ranks: the number of ranks along the axis of the pipeline.
        chunks: the number of stages per rank.
        micro: the number of micro-batches per step.

    Raises:
        FzeroValueError: a user's table is malformed, or its ranks wait for each other.

    Example:
        >>> [" ".join(u.text(2) for u in order) for order in table("1f1b", 2, 1, 3)]
        ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
        >>> [" ".join(u.text(2) for u in order) for order in table("interleaved", 2, 2, 2)]
        ['F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1', 'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1']
        >>> [" ".join(u.text(2) for u in order) for order in table("zb", 2, 1, 3)]
        ['F0 F1 B0 W0 F2 B1 W1 B2 W2', 'F0 B0 F1 B1 W0 F2 B2 W1 W2']
    """
    if not isinstance(schedule, str):
        found = tuple(_read(order, rank, ranks) for rank, order in enumerate(schedule))
        _check(found, ranks, chunks, micro)
    elif schedule == "zb":
        found = tuple(_zero_bubble(rank, ranks, micro) for rank in range(ranks))
    else:
        found = tuple(_named(schedule, rank, ranks, chunks, micro) for rank in range(ranks))
    # only to raise an error if ranks wait for each other
    when(found, chunks * ranks)
    return found


def _named(schedule: str, rank: int, ranks: int, chunks: int, micro: int) -> tuple[Unit, ...]:
    """Returns one rank's order of actions for a named schedule.

    Interleaved 1F1B runs as many micro-batches as there are ranks through a chunk before it starts the next chunk
    (Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021); in the last round, it runs
    those that are left.
    """
    # Padded with micro-batches that do not exist, so that every round is complete. Their actions are removed at the
    # end.
    padded = -(-micro // ranks) * ranks if schedule == "interleaved" else micro
    rounds = [range(i, min(i + ranks, padded)) for i in range(0, padded, ranks)]
    groups = [(c, m) for r in rounds for c in range(chunks) for m in r]
    forward = [Unit(FORWARD, m, c * ranks + rank) for c, m in groups]
    groups = [(c, m) for r in rounds for c in reversed(range(chunks)) for m in r]
    backward = [Unit(BACKWARD, m, c * ranks + rank) for c, m in groups]
    behind = ranks - rank - 1
    # The forwards before the first backward. For interleaved stages, this is the warm-up of Megatron-LM:
    # 2 (p - rank - 1) + (chunks - 1) p.
    ahead = {"gpipe": len(forward), "1f1b": behind, "interleaved": 2 * behind + (chunks - 1) * ranks}[schedule]
    ahead = min(ahead, len(forward))
    # `zip` stops after the last forward; the remaining `ahead` backwards follow.
    steady = [u for pair in zip(forward[ahead:], backward, strict=False) for u in pair]
    order = (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
    return tuple(u for u in order if u.micro < micro)


def _read(order: Sequence[str], rank: int, ranks: int) -> tuple[Unit, ...]:
    found = [m for text in order if (m := UNIT.fullmatch(text))]
    return tuple(Unit(KINDS.index(m[1]), int(m[2]), int(m[3] or 0) * ranks + rank) for m in found)


def _check(found: Table, ranks: int, chunks: int, micro: int) -> None:
    """Raises if a table lacks actions, repeats them or has too many."""
    problems = [] if len(found) == ranks else [f"{len(found)} orders, and {ranks} ranks along the axis"]
    kinds = range(2 + any(u.kind == WEIGHTS for order in found for u in order))
    for rank, order in enumerate(found if not problems else ()):
        every = {Unit(k, m, c * ranks + rank) for k in kinds for m in range(micro) for c in range(chunks)}
        for what, units in _wrong(order, every).items():
            texts = sorted(u.text(ranks) for u in units)
            problems += [f"rank {rank} {what} {', '.join(texts[:4])}{', …' * (len(texts) > 4)}"] if texts else []
    if problems:
        each = [f"{KINDS[k]}0 to {KINDS[k]}{micro - 1}" for k in kinds]
        fix = f"each rank runs the actions {', '.join(each[:-1])} and {each[-1]} once"
        fix += f", and with chunks, F0.1 to B{micro - 1}.{chunks - 1}" if chunks > 1 else ""
        raise FzeroValueError("pipeline", "the table of actions does not fit the step", problems, fix)


def _wrong(order: Sequence[Unit], every: set[Unit]) -> dict[str, set[Unit]]:
    """Returns, for each kind of fault in a rank's order of actions, the actions with it."""
    late = {
        u for i, u in enumerate(order) if any(v.micro > u.micro for v in order[:i] if v._replace(micro=u.micro) == u)
    }
    return {
        "lacks": every - {*order},
        "has besides": {*order} - every,
        "repeats": {u for u in order if order.count(u) > 1},
        "has after a later micro-batch of its kind and chunk": late,
    }


def _zero_bubble(rank: int, ranks: int, micro: int) -> tuple[Unit, ...]:
    """Returns one rank's order of actions for 1F1B with weight actions in its idle time: ZB-H1 of Qi et al., Zero
    Bubble Pipeline Parallelism, 2023.

    The weights of a micro-batch run `rank` backwards later, so that no rank has more micro-batches in flight than the
    first rank has under 1F1B.
    """
    # One forward more than in the warm-up of `_named`, because the loop below begins with a backward.
    ahead = ranks - rank
    order = [Unit(FORWARD, m, rank) for m in range(min(ahead, micro))]
    for m in range(micro):
        order.append(Unit(BACKWARD, m, rank))
        order += [Unit(WEIGHTS, m - rank, rank)] if m >= rank else []
        order += [Unit(FORWARD, m + ahead, rank)] if m + ahead < micro else []
    return (*order, *(Unit(WEIGHTS, m, rank) for m in range(max(micro - rank, 0), micro)))


def when(
    orders: Table, num_stages: int, more: Mapping[Unit, Iterable[Unit]] | None = None
) -> dict[Unit, tuple[float, float]]:
    """Returns the start and end time of each action, which starts as soon as its rank and the actions that it depends
    on are done.

    A backward is assumed to take as long as two forwards or, with weight actions, as one. Any other durations give a
    correct order too.

    Args:
        orders: the table.
        num_stages: the number of stages on all ranks.
        more: further actions that an action depends on, in addition to the preceding one.

    Raises:
        FzeroValueError: ranks wait for each other.
    """
    found: dict[Unit, tuple[float, float]] = {}
    at, clock = [0] * len(orders), [0.0] * len(orders)
    seconds = (1.0, 1.0, 1.0) if any(u.kind == WEIGHTS for order in orders for u in order) else (1.0, 2.0)

    def needs(unit: Unit) -> set[Unit]:
        return {x for x in (_before(unit, num_stages), *(more or {}).get(unit, ())) if x is not None}

    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                unit = order[at[rank]]
                before = needs(unit)
                if not found.keys() >= before:
                    break
                start = max([clock[rank], *(found[x][1] for x in before)])
                clock[rank] = start + seconds[unit.kind]
                found[unit] = start, clock[rank]
                at[rank] += 1
                moving = True
    if stuck := [(r, order[at[r]]) for r, order in enumerate(orders) if at[r] < len(order)]:
        n = len(orders)
        problems = [
            f"rank {r} waits at {u.text(n)} for {b._replace(stage=0).text(n)} of stage {b.stage}"
            for r, u in stuck
            for b in sorted(needs(u) - found.keys())
        ]
        fix = "a forward runs after that of the stage before, a backward after that of the stage after"
        raise FzeroValueError("pipeline", "ranks wait for each other", problems, fix)
    return found


def recv_starts(needed: Sequence[tuple[Message, int]], num_units: int) -> dict[Message, int]:
    """Returns the index of the action before which a rank starts to receive each message of one other rank.

    It is one action before the first one that reads the message, and no later than the receives of messages that are
    sent later.

    Args:
        needed: messages in the order in which they are sent, each with the index of the action that first reads it.
        num_units: the number of actions of the receiving rank.

    Returns:
        The indices in the order of `needed`.

    Example:
        >>> recv_starts([("a", 3), ("b", 2)], 4)
        {'a': 1, 'b': 1}
    """
    found, number = dict[Message, int](), num_units
    for message, first in reversed(needed):
        found[message] = number = max(0, min(number, first - 1))
    return dict(reversed(found.items()))


def send_ends(order: Sequence[Unit], number: int, starts: float, times: Mapping[Unit, tuple[float, float]]) -> int:
    """Returns the index of the action before which a rank waits for the send of its action `number`.

    It is two actions later, or as many more as begin before the receive starts. The number of actions stands for the
    end of the step.

    Args:
        order: the actions of the sending rank.
        number: the index of the sending action among them.
        starts: the time at which the other rank starts to receive, as in `times`.
        times: the result of `when`.
    """
    return next((i for i in range(number + 2, len(order)) if times[order[i]][0] >= starts), len(order))


def _before(unit: Unit, num_stages: int) -> Unit | None:
    """Returns the action of another stage, or of the same stage, that an action depends on."""
    if unit.kind == FORWARD:
        return unit._replace(stage=unit.stage - 1) if unit.stage else None
    if unit.kind == WEIGHTS:
        return unit._replace(kind=BACKWARD)
    if unit.stage == num_stages - 1:
        # The last stage computes the loss, so its backward needs only its own forward.
        return unit._replace(kind=FORWARD)
    return unit._replace(stage=unit.stage + 1)


# --- backwards in two parts ---


def splits_backward(program: Program) -> bool:
    """Whether the program has a pipeline with several stages and a schedule with weight actions."""
    spec = find(program.transforms, Pipeline)
    return spec is not None and spec.has_weights and program.mesh.axes[spec.axis] > 1


def split_backward(program: Program) -> Program:
    """Returns the program with two ops for each block's backward, which are two segments of one subgraph: the gradients
    that other blocks wait for, and the gradients of parameters.

    Precondition: no op is repeated for micro-batches yet.

    Values that both parts need are computed once, by the first part, and kept until the second has run.

    Raises:
        FzeroValueError: no block has gradients that no other block waits for.
    """
    functions, names, values = Functions(program.functions), Names(program.values()), program.values_by_name
    onward, known = _onward(program), dict[tuple[str, tuple[int, ...]], Pieces]()

    def split(op: Instruction) -> list[Instruction]:
        # Gradients that another block, and so perhaps another stage, waits for. The rest are gradients of parameters.
        first = tuple(i for i, v in enumerate(op.out) if v.name in onward)
        # If all of the gradients are waited for, or none, there is nothing to postpone.
        if op.block is None or op.is_forward or not first or len(first) == len(op.out):
            return [op]
        if (op.fn, first) not in known:
            known[op.fn, first] = in_two(program.functions[op.fn].graph, first)
        inputs, *weights = _calls(op, [values[a] for a in op.args], known[op.fn, first], functions, names)
        return [inputs, *(x.saying(weights=True) for x in weights)]

    ops = with_segments((op, split(op)) for op in program.instructions)
    if not known:
        what = (
            "the schedule has actions for weight gradients, and no block has gradients that can be computed separately"
        )
        raise FzeroValueError("pipeline", what, fix="schedule='1f1b'")
    used = {op.fn for op in ops if op.fn}
    kept = {name: f for name, f in functions.by_name.items() if name in used}
    return replace(program, instructions=tuple(ops), functions=kept)


def _onward(program: Program) -> set[str]:
    """Returns the values that calls of blocks read, directly or through other ops."""
    found = set[str]()
    for op in reversed(program.instructions):
        if op.op != "update" and (op.block is not None or any(v.name in found for v in op.out)):
            found.update(op.args)
    return found


def _calls(op: Instruction, args: Sequence[Value], of: Pieces, functions: Functions, names: Names) -> list[Instruction]:
    """Returns the calls of the two pieces of a subgraph; one call if the first piece computes everything.

    Args:
        op: the call of the subgraph.
        args: its arguments.
        of: its subgraph, in pieces.
        functions: the subgraphs of the program, which are extended.
        names: the names of its values, which are extended.
    """
    made = dict(zip(of.inputs, args, strict=True))
    made.update((x, v) for x, v in zip(of.outputs, op.out, strict=True) if x not in made)
    own: dict[fx.Node, tuple[str, ...]] = {x: v.placement.varies_over for x, v in zip(of.inputs, args, strict=True)}
    for x in of.inputs[0].graph.nodes:  # a value varies between ranks along all axes along which its inputs do
        if x not in own:
            own[x] = tuple(dict.fromkeys(axis for a in x.all_input_nodes for axis in own[a]))
    stem, ops = call_name(op), list[Instruction]()
    for number, (step, positions) in enumerate(zip(of.steps, of.positions, strict=True)):
        out = list[Value]()
        for x, position in zip(step.outputs, positions, strict=True):
            if position is not None:
                out.append(op.out[position])
                continue
            value = x.meta["val"]
            made[x] = Value(names(f"{stem}_{operation_name(x)}"), tuple(value.shape), value.dtype, varying(own[x]))
            out.append(made[x])
        fn = functions.add(f"{op.fn}_weights" if number else op.fn, step.graph)
        ops.append(replace(op, fn=fn, args=tuple(made[x].name for x in step.inputs), out=tuple(out)))
    return ops
