"""Repeats the ops of loss and gradients for each micro-batch, in a loop or layer by layer, and adds up the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fzero.ir.attributes import AddAttrs, CastAttrs, JoinAttrs, PartAttrs, TurnsAttrs, UpdateAttrs
from fzero.ir.program import Line, Program, Value
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
    lines, totals = (
        _repeated(program, num, batch) if record is not None and record.layerwise else _looped(program, num, batch)
    )
    update = _update(program)
    grads = {leaf: totals[name] for leaf, name in program.grads.items()}
    sums, maxima = (tuple(totals[name] for name in names) for names in (update.attrs.sums, update.attrs.maxima))
    update = update.rename(totals).saying(sums=sums, maxima=maxima)
    inputs = tuple(replace(v, shape=batch[v.name]) if v.name in batch else v for v in program.inputs)
    return replace(program, inputs=inputs, lines=(*lines, update), grads=grads)


def loop_totals(program: Program) -> set[str]:
    """Returns the names of the totals that loops over micro-batches accumulate."""
    return {v.name for line in program.lines for x in line.body if x.op == "accumulate" for v in x.out}


def _looped(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> tuple[list[Line], dict[str, str]]:
    """Returns the ops of loss and gradients in a loop over micro-batches, and the name of the total of each sum and
    gradient."""
    update = _update(program)
    before = [
        line
        for line in program.lines
        if line.op == "cast" and line.args[0] in program.leaves and line.out[0].name not in update.attrs.sums
    ]
    inside = [line for line in program.lines if line is not update and line not in before]
    values = program.values()
    names = Names(values)
    totals: dict[str, str] = {}

    def loop(lines: Sequence[Line], summands: Sequence[str], parts: dict[str, str]) -> Line:
        """Returns a loop over these ops that accumulates `summands`. `parts` maps names of values to their names in the
        loop."""
        body = []
        for name in batch:
            if any(name in line.args for line in lines):
                parts[name] = names(f"{name}_part")
                part = replace(values[name], name=parts[name])
                body.append(Line("take_part", (name,), (part,), attrs=PartAttrs(count=num), by="accumulate"))
        body += [
            replace(line.rename(parts), out=tuple(replace(v, name=parts.get(v.name, v.name)) for v in line.out))
            for line in lines
        ]
        for name in summands:
            totals[name] = names(f"{name}_total")
            body.append(
                Line(
                    "accumulate",
                    (parts.get(name, name),),
                    (replace(values[name], name=totals[name]),),
                    attrs=JoinAttrs(reduction=_how(update, name)),
                    by="accumulate",
                )
            )
        body = [line.saying(count=num) if line.op == "part_index" else line for line in body]
        return Line("loop", attrs=TurnsAttrs(count=num), body=tuple(_early(body)), by="accumulate")

    seeds, ahead, rest = _ahead(inside)
    loops = list[Line]()
    if ahead:
        again = {v.name: names(f"{v.name}_ahead") for line in ahead if line in rest for v in line.out}
        loops.append(loop(ahead, [s for s in _summands(program) if any(s in line.args for line in seeds)], again))
    seeds = [line.rename(totals) for line in seeds]
    main = loop(rest, [s for s in _summands(program) if s not in totals], {})
    return [*before, *loops, *seeds, main], totals


def _ahead(lines: Sequence[Line]) -> tuple[list[Line], list[Line], list[Line]]:
    """Splits the ops of a loop if some of them (the seeds) read sums over all micro-batches.

    Returns the seeds, the ops that compute the sums that the seeds read (they need a loop of their own before the main
    loop), and the ops of the main loop after them. The main loop computes some of the second group again if its ops
    read them.
    """
    seeds = [line for line in lines if line.of_sums]
    if not seeds:
        return [], [], [*lines]
    wanted, ahead = {a for line in seeds for a in line.args}, list[Line]()
    for line in reversed(lines):
        if not line.of_sums and any(v.name in wanted for v in line.out):
            ahead.insert(0, line)
            wanted.update(line.args)
    rest = list[Line]()
    read = {a for line in lines if not line.of_sums and line not in ahead for a in line.args}
    for line in reversed(lines):
        if not line.of_sums and (line not in ahead or any(v.name in read for v in line.out)):
            rest.insert(0, line)
            read.update(line.args)
    return seeds, ahead, rest


def _update(program: Program) -> Line[UpdateAttrs]:
    assert program.update is not None
    return program.update


def _summands(program: Program) -> tuple[str, ...]:
    """The values that the update reads summed (or, for maxima, maximized) over all micro-batches."""
    update = _update(program)
    return (*update.attrs.sums, *update.attrs.maxima, *program.grads.values())


def _how(update: Line[UpdateAttrs], name: str) -> str:
    return "max" if name in update.attrs.maxima else "sum"


def _early(lines: list[Line]) -> list[Line]:
    """Moves each `accumulate` directly after the op that makes its summand, so that unsharded gradients are freed
    early."""
    adds: dict[str, Line] = {line.args[0]: line for line in lines if line.op == "accumulate"}
    out: list[Line] = []
    for line in lines:
        if line.op != "accumulate":
            out.append(line)
            out.extend(adds[v.name] for v in line.out if v.name in adds)
    return out


def _repeated(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> tuple[list[Line], dict[str, str]]:
    """Like `_looped`, but without a loop: each op is repeated for every micro-batch before the next op.

    Ops that depend on neither the batch nor the index of the micro-batch run once. The sums and gradients of the first
    micro-batch become the totals; those of each later micro-batch are added to them in place as soon as they are
    computed. The attribute `micro` of an op is a pair: the micro-batch it belongs to, and the number of micro-batches.
    """
    names, values = Names(program.values()), program.values()
    update = _update(program)
    lines, summands = _alone(program, names)
    new: list[dict[str, str]] = [{} for _ in range(num)]  # names that differ between micro-batches
    out: list[Line] = []
    for whole in batch:
        for m in range(num):
            new[m][whole] = names(f"{whole}_micro_{m}")
            out.append(
                Line(
                    "take_part",
                    (whole,),
                    (replace(values[whole], name=new[m][whole]),),
                    attrs=PartAttrs(micro=(m, num)),
                    by="accumulate",
                )
            )
    for unit in _units(lines, summands):
        if unit[0].of_sums:
            out += [line.rename(new[0]) for line in unit]  # the totals
            continue
        made = [v for line in unit for v in line.out]
        adds = [v for v in made if v.name in summands]
        if not adds and not any(line.op == "part_index" or not new[0].keys().isdisjoint(line.args) for line in unit):
            out += unit
            continue
        for m in range(num):
            for v in made:
                new[m][v.name] = names(f"{v.name}_total_0" if m == 0 and v in adds else f"{v.name}_micro_{m}")
            for line in unit:
                renamed = tuple(replace(v, name=new[m][v.name]) for v in line.out)
                out.append(replace(line.rename(new[m]), out=renamed).saying(micro=(m, num)))
            out += _added(adds, {v.name: _how(update, summands[v.name]) for v in adds}, new, m, names) if m else ()
    return out, {name: new[0][summand] for summand, name in summands.items()}


def _added(
    values: Sequence[Value], how: Mapping[str, str], new: Sequence[dict[str, str]], m: int, names: Names
) -> Iterator[Line]:
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
            yield Line("add", parts, totals, attrs=AddAttrs(micro=(m, len(new)), reduction=op), by="accumulate")
            new[0].update((v.name, total.name) for v, total in zip(group, totals, strict=True))


def _alone(program: Program, names: Names) -> tuple[list[Line], dict[str, str]]:
    """Returns the ops of loss and gradients, and a map from each accumulated value to its name in the update.

    A result that other ops read too is copied, because totals are overwritten in place; the copy is accumulated.
    """
    update = _update(program)
    lines = [line for line in program.lines if line is not update]
    read = {a for line in lines if not line.of_sums for a in line.args}
    summands = {name: name for name in _summands(program)}
    out: list[Line] = []
    for line in lines:
        out.append(line)
        for v in (v for v in line.out if v.name in summands and v.name in read):
            copy = replace(v, name=names(f"{v.name}_copy"))
            out.append(Line("cast", (v.name,), (copy,), attrs=CastAttrs(dtype=v.dtype), by="accumulate"))
            summands[copy.name] = summands.pop(v.name)
    return out, summands


def _units(lines: Sequence[Line], summands: Mapping[str, str]) -> Iterator[list[Line]]:
    """Yields the groups of ops that are repeated together: an op, followed by the casts of its results to the values
    that are accumulated."""
    casts: dict[str, list[Line]] = {}
    for line in lines:
        if line.op == "cast" and line.out[0].name in summands:
            casts.setdefault(line.args[0], []).append(line)
    done: set[int] = set()
    for line in (line for line in lines if id(line) not in done):
        unit = [line, *(cast for v in line.out for cast in casts.get(v.name, ()))]
        done.update(map(id, unit))
        yield unit
