"""Accumulates gradients over micro-batches and runs the optimizer once per step. Acts on the program.

The ops of loss and gradients become the body of a loop over micro-batches. With the layerwise schedule, each op is
instead repeated for every micro-batch before the next op runs. Sums (such as the loss) and gradients are accumulated in
their reduction dtype, in the order of the micro-batches, and the optimizer update reads the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from fzero._utils.arguments import accepts, accepts_none, count, keywords, predicate, shown
from fzero._utils.deprecation import keyword_aliases
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.attributes import CastAttrs, JoinAttrs, LoopAttrs, PartAttrs, UpdateAttrs
from fzero.ir.program import Instruction, Program, Value
from fzero.ir.value_names import Names
from fzero.sharding.layout import Leaf, torn_ties
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied, find
from fzero.transforms.zero import Where

MicroBatchSchedule = Literal["sequential", "layerwise"]
SCHEDULES = get_args(MicroBatchSchedule)


@dataclass(frozen=True)
class Accumulate(Transform):
    """The configuration of `accumulate`."""

    num_micro_batches: int = 1
    schedule: MicroBatchSchedule = "sequential"
    replicated: Where | None = None
    order: ClassVar[int] = 30
    name: ClassVar[str] = "accumulate"

    def __str__(self) -> str:
        schedule = "" if self.schedule == "sequential" else f", schedule={self.schedule!r}"
        where = self.replicated
        replicated = "" if where is None else f", replicated={getattr(where, '__name__', repr(where))}"
        return f"accumulate(num_micro_batches={self.num_micro_batches}{schedule}{replicated})"

    @property
    def layerwise(self) -> bool:
        return self.schedule == "layerwise"

    def idle(self, step: EvalStep) -> str | None:
        return (
            "a batch is split to accumulate gradients, and an evaluation has none: call it with each part of the batch"
        )

    def splits(self, leaf: Leaf) -> bool:
        """Whether a tensor of the batch is split into micro-batches: it is if it has a dim 0 and `replicated` does not
        accept it."""
        if not leaf.shape:
            return False
        where = self.replicated
        return where is None or not accepts(self.name, "replicated", where, leaf.path, leaf.meta)

    def check_replicated(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Checks `replicated` against the tensors of a batch.

        Raises:
            FzeroValueError: `replicated` accepts no tensor of the batch, or only some of the paths of a tied tensor.
        """
        if self.replicated is None:
            return
        paths, replicated = [x.path for x in leaves], [not self.splits(x) for x in leaves]
        if not any(replicated) and (missed := accepts_none("replicated", self.replicated, paths)):
            what, fix = (
                "all tensors of the batch are already split",
                "give a path as it is printed here, or leave `replicated` out",
            )
            raise FzeroValueError("accumulate", what, missed, fix)
        if torn := torn_ties(paths, tied, replicated, "replicated"):
            what = "entries of the batch are one tensor, and `replicated` matches only some of its paths"
            fix = "give x.clone() for the paths that are to be replicated"
            raise FzeroValueError("accumulate", what, torn, fix)

    def micro_shapes(self, leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
        """Returns the shapes that the tensors of a rank's batch have in one micro-batch.

        Raises:
            FzeroValueError: the tensors to be split differ in the size of dim 0, or that size is not a multiple of the
                number of micro-batches.
        """
        num, split = (
            self.num_micro_batches,
            [leaf for leaf in leaves if self.num_micro_batches > 1 and self.splits(leaf)],
        )
        rows = Counter(leaf.shape[0] for leaf in split)
        # The most frequent size counts as the batch dimension, so that the error blames the exceptions.
        usual = max(rows, key=lambda n: (rows[n], n), default=0)
        if odd := [
            f"{leaf.path} {list(leaf.shape)}: the others have {usual} samples"
            for leaf in split
            if leaf.shape[0] != usual
        ]:
            fix = (
                f"name the tensors that are the same for all micro-batches: fz.accumulate({num}, "
                f"replicated=lambda path, leaf: path == {odd[0].split(' ')[0]!r})"
            )
            raise FzeroValueError(
                self.name,
                "the tensors of a batch differ in dim 0: which of them have the batch dimension?",
                odd,
                fix,
            )
        if wrong := [
            f"{leaf.path} {list(leaf.shape)}: dim 0 of {leaf.shape[0]} is not a multiple of {num}"
            for leaf in split
            if leaf.shape[0] % num
        ]:
            fix = "choose a batch that is a multiple of ranks x micro-batches"
            raise FzeroValueError(
                self.name, f"the batch of a rank is not divisible into {num} micro-batches", wrong, fix
            )
        return [(leaf.shape[0] // num, *leaf.shape[1:]) if leaf in split else leaf.shape for leaf in leaves]


@keyword_aliases("fz.accumulate", vertical=("schedule", {True: "layerwise", False: "sequential"}), whole="replicated")
@keywords
def accumulate(
    step: Any = None,
    num_micro_batches: int | None = None,
    *,
    schedule: MicroBatchSchedule = "sequential",
    replicated: Where | None = None,
) -> Any:
    """Splits each rank's batch into `num_micro_batches` along dim 0 and accumulates their gradients.

    The result equals that of the untransformed step up to the order of summation. A mean is the mean over the whole
    batch, a `weighted` loss is divided by the count of the whole batch, and random numbers drawn with the step's key
    equal those drawn for the whole batch. Operations inside the loss that combine samples see only the samples of one
    micro-batch: batch statistics, and a hook or `torch.autograd.Function` whose backward combines samples, such as
    clipping by norm (docs/guides/losses-metrics.md). `schedule` changes the order of the operations but not what they
    compute: on one process the results are bitwise identical.

    Args:
        step: a step, or the number of micro-batches when called without a step: `accumulate(4)`.
        num_micro_batches: at least 1; must divide dim 0 of the batch tensors, which is the same for all of them. 0-dim
            tensors are passed to each micro-batch unchanged.
        schedule: "sequential" runs one micro-batch after another. "layerwise" (also called breadth-first) passes all
            micro-batches through a block before the next block starts, so that the block's parameters are gathered, or
            fetched from the host or from disk, once for all of them. Use it with `offload("cpu", "params")`, and with
            `shard_params` over slow links.
        replicated: predicate `(path, leaf)` that selects the batch tensors that have a dim 0 but are the same for all
            micro-batches: class weights, position ids, a mask shared by all samples. `leaf` is a meta tensor.

    Communication: gradients that are not sharded (`data_parallel`, `shard_opt_state`) are reduced once per step; with
        `shard_grads` and `shard_params` they are reduced once per micro-batch, so that no unsharded gradient outlives
        the backward of its block. With the layerwise schedule, gradients are reduced once per step at any ZeRO stage,
        when the last micro-batch leaves the block, and parameters are communicated as often as without `accumulate`.
    Memory: the activations of one micro-batch, and the accumulated gradients, sharded or unsharded. Layerwise: the
        block inputs and saved activations of all micro-batches (`remat("full")` keeps only the inputs), and the
        temporaries of one; the unsharded gradients of two blocks, an accumulated sum and the gradients that are added
        to it. A parameter that several blocks share has one gradient per block and micro-batch.

    Raises:
        FzeroValueError: `num_micro_batches` is missing or below 1; `schedule` is unknown; or, when the program is
            built, the batch is not divisible by `num_micro_batches`, or its tensors differ in the size of dim 0.
        FzeroTypeError: `replicated` is not a function.
        TransformError: the step comes from `eval_step`, which has no micro-batches.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*accumulate(4)(step).transforms)
        accumulate(num_micro_batches=4)
    """
    if num_micro_batches is None and not hasattr(step, "transforms"):
        step, num_micro_batches = None, step  # called as accumulate(4); a value that is no number is rejected below
    fix = "give a whole number of at least 1: fz.accumulate(4)"
    if num_micro_batches is None:
        raise FzeroValueError("accumulate", "num_micro_batches is missing", fix=fix)
    if problems := count("num_micro_batches", num_micro_batches):
        what = f"cannot split a batch into {shown(num_micro_batches)} micro-batches"
        raise FzeroValueError("accumulate", what, problems, fix)
    if schedule not in SCHEDULES:
        problems = [f"schedule={shown(schedule)}: must be one of {', '.join(map(repr, SCHEDULES))}"]
        fix = 'e.g. fz.accumulate(4, schedule="layerwise")'
        raise FzeroValueError("accumulate", "invalid arguments", problems, fix)
    if problems := predicate("replicated", replicated):
        fix = "e.g. replicated=lambda path, leaf: 'class_weights' in path"
        raise FzeroTypeError("accumulate", "invalid arguments", problems, fix)
    return applied(Accumulate(num_micro_batches, schedule, replicated), step)


# --- the rewrite ---


@dataclass(frozen=True)
class AccumulateOptions:
    """The number of micro-batches and, for each input that is split into micro-batches, the shape of this rank's
    batch."""

    num: int
    batch: Mapping[str, tuple[int, ...]] = field(compare=False)


def rewrite(program: Program, options: AccumulateOptions) -> Program:
    """Repeats the ops of loss and gradients for each micro-batch, with the schedule that the step's `Accumulate` names.

    Precondition: a base program, whose loss was traced with one micro-batch. No value is sharded over the ranks that
    have different samples yet.
    """
    num, batch = options.num, options.batch
    record = find(program.transforms, Accumulate)
    ops, totals = (
        _repeated(program, num, batch) if record is not None and record.layerwise else _looped(program, num, batch)
    )
    update = _update(program)
    grads = {leaf: totals[name] for leaf, name in program.grads.items()}
    sums, maxima = (tuple(totals[name] for name in names) for names in (update.attrs.sums, update.attrs.maxima))
    update = update.rename(totals).saying(sums=sums, maxima=maxima)
    inputs = tuple(replace(v, shape=batch[v.name]) if v.name in batch else v for v in program.inputs)
    return replace(program, inputs=inputs, instructions=(*ops, update), grads=grads)


def loop_totals(program: Program) -> set[str]:
    """Returns the names of the totals that loops over micro-batches accumulate."""
    return {v.name for op in program.instructions for x in op.body if x.op == "accumulate" for v in x.out}


def _looped(
    program: Program, num: int, batch: Mapping[str, tuple[int, ...]]
) -> tuple[list[Instruction], dict[str, str]]:
    """Returns the ops of loss and gradients in a loop over micro-batches, and the name of the total of each sum and
    gradient."""
    update = _update(program)
    before = [
        op
        for op in program.instructions
        # Casts of parameters and indices along an axis do not depend on the micro-batch, so they run once, before the
        # loop.
        if (op.op == "cast" and op.args[0] in program.leaves and op.out[0].name not in update.attrs.sums)
        or (op.op == "rank_index" and op.axes)
    ]
    inside = [op for op in program.instructions if op is not update and op not in before]
    values = program.values()
    names = Names(values)
    totals: dict[str, str] = {}

    def loop(ops: Sequence[Instruction], summands: Sequence[str], parts: dict[str, str]) -> Instruction:
        """Returns a loop over these ops that accumulates `summands`. `parts` maps names of values to their names in the
        loop."""
        body = []
        for name in batch:
            if any(name in op.args for op in ops):
                parts[name] = names(f"{name}_part")
                part = replace(values[name], name=parts[name])
                body.append(Instruction("take_part", (name,), (part,), attrs=PartAttrs(count=num), by="accumulate"))
        body += [
            replace(op.rename(parts), out=tuple(replace(v, name=parts.get(v.name, v.name)) for v in op.out))
            for op in ops
        ]
        for name in summands:
            totals[name] = names(f"{name}_total")
            body.append(
                Instruction(
                    "accumulate",
                    (parts.get(name, name),),
                    (replace(values[name], name=totals[name]),),
                    attrs=JoinAttrs(reduction=_how(update, name)),
                    by="accumulate",
                )
            )
        body = [op.saying(count=num) if op.op == "rank_index" else op for op in body]
        return Instruction("loop", attrs=LoopAttrs(count=num), body=tuple(_early(body)), by="accumulate")

    seeds, ahead, rest = _ahead(inside)
    loops = list[Instruction]()
    if ahead:
        # Ops that both loops need run twice. Values have unique names, so those of the first loop are renamed.
        again = {v.name: names(f"{v.name}_ahead") for op in ahead if op in rest for v in op.out}
        loops.append(loop(ahead, [s for s in _summands(program) if any(s in op.args for op in seeds)], again))
    seeds = [op.rename(totals) for op in seeds]
    main = loop(rest, [s for s in _summands(program) if s not in totals], {})
    return [*before, *loops, *seeds, main], totals


def _ahead(ops: Sequence[Instruction]) -> tuple[list[Instruction], list[Instruction], list[Instruction]]:
    """Splits the ops of a loop if some of them (the seeds) read sums over all micro-batches.

    Returns the seeds, the ops that compute the sums that the seeds read (they need a loop of their own before the main
    loop), and the ops of the main loop after them. The main loop computes some of the second group again if its ops
    read them.
    """
    seeds = [op for op in ops if op.of_sums]
    if not seeds:
        return [], [], [*ops]
    # Backwards through the ops: everything that the arguments of a seed depend on has to run in the first loop.
    wanted, ahead = {a for op in seeds for a in op.args}, list[Instruction]()
    for op in reversed(ops):
        if not op.of_sums and any(v.name in wanted for v in op.out):
            ahead.insert(0, op)
            wanted.update(op.args)
    rest = list[Instruction]()
    read = {a for op in ops if not op.of_sums and op not in ahead for a in op.args}
    for op in reversed(ops):
        # An op of the first loop runs again in the second one only if something there reads its results.
        if not op.of_sums and (op not in ahead or any(v.name in read for v in op.out)):
            rest.insert(0, op)
            read.update(op.args)
    return seeds, ahead, rest


def _update(program: Program) -> Instruction[UpdateAttrs]:
    assert program.update is not None
    return program.update


def _summands(program: Program) -> tuple[str, ...]:
    """The values that the update reads summed (or, for maxima, maximized) over all micro-batches."""
    update = _update(program)
    return (*update.attrs.sums, *update.attrs.maxima, *program.grads.values())


def _how(update: Instruction[UpdateAttrs], name: str) -> str:
    return "max" if name in update.attrs.maxima else "sum"


def _early(ops: list[Instruction]) -> list[Instruction]:
    """Moves each `accumulate` directly after the op that makes its summand, so that unsharded gradients are freed
    early."""
    adds: dict[str, Instruction] = {op.args[0]: op for op in ops if op.op == "accumulate"}
    out: list[Instruction] = []
    for op in ops:
        if op.op != "accumulate":
            out.append(op)
            out.extend(adds[v.name] for v in op.out if v.name in adds)
    return out


def _repeated(
    program: Program, num: int, batch: Mapping[str, tuple[int, ...]]
) -> tuple[list[Instruction], dict[str, str]]:
    """Like `_looped`, but without a loop: each op is repeated for every micro-batch before the next op.

    Ops that depend on neither the batch nor the index of the micro-batch run once. The sums and gradients of the first
    micro-batch become the totals; those of each later micro-batch are added to them in place as soon as they are
    computed. The attribute `micro` of an op is a pair: the micro-batch it belongs to, and the number of micro-batches.
    """
    names, values = Names(program.values()), program.values()
    update = _update(program)
    ops, summands = _alone(program, names)
    # by micro-batch: the names of values that differ between them
    new = [{whole: names(f"{whole}_micro_{m}") for whole in batch} for m in range(num)]
    out = [_take_part(values[whole], new[m][whole], (m, num)) for whole in batch for m in range(num)]
    for unit in _units(ops, summands):
        if unit[0].of_sums:
            out += [op.rename(new[0]) for op in unit]  # the totals
            continue
        adds = [v for op in unit for v in op.out if v.name in summands]
        if adds or any(_depends_on_micro_batch(op, new[0]) for op in unit):
            out += _for_each(unit, adds, {v.name: _how(update, summands[v.name]) for v in adds}, new, names)
        else:
            out += unit  # once for all micro-batches
    return out, {name: new[0][summand] for summand, name in summands.items()}


def _for_each(
    unit: Sequence[Instruction],
    adds: Sequence[Value],
    how: Mapping[str, str],
    new: Sequence[dict[str, str]],
    names: Names,
) -> Iterator[Instruction]:
    """Yields ops for each micro-batch, and the ops that add up `adds`; the arguments are those of `_added`."""
    for m in range(len(new)):
        for v in (v for op in unit for v in op.out):
            # The result of the first micro-batch is the first total, so nothing has to be initialized to zero.
            new[m][v.name] = names(f"{v.name}_total_0" if m == 0 and v in adds else f"{v.name}_micro_{m}")
        yield from (_for_micro_batch(op, new[m], (m, len(new))) for op in unit)
        if m:
            yield from _added(adds, how, new, m, names)


def _for_micro_batch(op: Instruction, new: Mapping[str, str], micro: tuple[int, int]) -> Instruction:
    renamed = tuple(replace(v, name=new[v.name]) for v in op.out)
    return replace(op.rename(new), out=renamed).saying(micro=micro)


def _take_part(whole: Value, name: str, micro: tuple[int, int]) -> Instruction:
    part = replace(whole, name=name)
    return Instruction("take_part", (whole.name,), (part,), attrs=PartAttrs(micro=micro), by="accumulate")


def _depends_on_micro_batch(op: Instruction, new: Mapping[str, str]) -> bool:
    """Whether an op reads the index of the micro-batch, or a value that differs between micro-batches."""
    return (op.op == "rank_index" and not op.axes) or not new.keys().isdisjoint(op.args)


def _added(
    values: Sequence[Value], how: Mapping[str, str], new: Sequence[dict[str, str]], m: int, names: Names
) -> Iterator[Instruction]:
    """Yields the ops that add the results of micro-batch `m` to the totals, which get new names.

    Args:
        values: the results that are accumulated.
        how: the reduction of each, "sum" or "max".
        new: for each micro-batch, the names that its values have there; entry 0 is updated with the new totals.
        m: the micro-batch.
        names: the generator of unused names.
    """
    for op in ("sum", "max"):
        if group := [v for v in values if how[v.name] == op]:
            parts = tuple(new[k][v.name] for k in (0, m) for v in group)
            totals = tuple(replace(v, name=names(f"{v.name}_total_{m}")) for v in group)
            yield Instruction("add", parts, totals, attrs=JoinAttrs(micro=(m, len(new)), reduction=op), by="accumulate")
            new[0].update((v.name, total.name) for v, total in zip(group, totals, strict=True))


def _alone(program: Program, names: Names) -> tuple[list[Instruction], dict[str, str]]:
    """Returns the ops of loss and gradients, and a map from each accumulated value to its name in the update.

    A result that other ops read too is copied, because totals are overwritten in place; the copy is accumulated.
    """
    update = _update(program)
    ops = [op for op in program.instructions if op is not update]
    read = {a for op in ops if not op.of_sums for a in op.args}
    summands = {name: name for name in _summands(program)}
    out: list[Instruction] = []
    for op in ops:
        out.append(op)
        for v in (v for v in op.out if v.name in summands and v.name in read):
            # The total is added to in place, while other ops still read the value of the first micro-batch.
            copy = replace(v, name=names(f"{v.name}_copy"))
            out.append(Instruction("cast", (v.name,), (copy,), attrs=CastAttrs(dtype=v.dtype), by="accumulate"))
            summands[copy.name] = summands.pop(v.name)
    return out, summands


def _units(ops: Sequence[Instruction], summands: Mapping[str, str]) -> Iterator[list[Instruction]]:
    """Yields the groups of ops that are repeated together: an op, followed by the casts of its results to the values
    that are accumulated."""
    casts: dict[str, list[Instruction]] = {}
    for op in ops:
        if op.op == "cast" and op.out[0].name in summands:
            casts.setdefault(op.args[0], []).append(op)
    done: set[int] = set()
    for op in (op for op in ops if id(op) not in done):
        unit = [op, *(cast for v in op.out for cast in casts.get(v.name, ()))]
        done.update(map(id, unit))
        yield unit
