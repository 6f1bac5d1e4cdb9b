"""Repeats the ops of loss and gradients for each micro-batch, in a loop or layer by layer, and adds up the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fzero.ir.attributes import AddAttrs, CastAttrs, JoinAttrs, LoopAttrs, PartAttrs, UpdateAttrs
from fzero.ir.program import Instruction, Program, Value
from fzero.ir.value_names import Names
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.transform import find


def rewrite(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> Program:
    """Repeats the ops of loss and gradients for each micro-batch, with the schedule that the step's `Accumulate` names.

    Args:
        program: a base program.
        num: the number of micro-batches.
        batch: for each input that is split into micro-batches, the shape of this rank's batch.
    """
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
        # Casts of parameters do not depend on the micro-batch, so they run once, before the loop.
        if op.op == "cast" and op.args[0] in program.leaves and op.out[0].name not in update.attrs.sums
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
        body = [op.saying(count=num) if op.op == "part_index" else op for op in body]
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
    new: list[dict[str, str]] = [{} for _ in range(num)]  # names that differ between micro-batches
    out: list[Instruction] = []
    for whole in batch:
        for m in range(num):
            new[m][whole] = names(f"{whole}_micro_{m}")
            out.append(
                Instruction(
                    "take_part",
                    (whole,),
                    (replace(values[whole], name=new[m][whole]),),
                    attrs=PartAttrs(micro=(m, num)),
                    by="accumulate",
                )
            )
    for unit in _units(ops, summands):
        if unit[0].of_sums:
            out += [op.rename(new[0]) for op in unit]  # the totals
            continue
        made = [v for op in unit for v in op.out]
        adds = [v for v in made if v.name in summands]
        # Depends on no micro-batch, directly or indirectly, so it runs once for all of them.
        if not adds and not any(op.op == "part_index" or not new[0].keys().isdisjoint(op.args) for op in unit):
            out += unit
            continue
        for m in range(num):
            for v in made:
                # The result of the first micro-batch is the first total, so nothing has to be initialized to zero.
                new[m][v.name] = names(f"{v.name}_total_0" if m == 0 and v in adds else f"{v.name}_micro_{m}")
            for op in unit:
                renamed = tuple(replace(v, name=new[m][v.name]) for v in op.out)
                out.append(replace(op.rename(new[m]), out=renamed).saying(micro=(m, num)))
            out += _added(adds, {v.name: _how(update, summands[v.name]) for v in adds}, new, m, names) if m else ()
    return out, {name: new[0][summand] for summand, name in summands.items()}


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
            yield Instruction("add", parts, totals, attrs=AddAttrs(micro=(m, len(new)), reduction=op), by="accumulate")
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
