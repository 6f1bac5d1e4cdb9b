"""accumulate: the batch in several micro-batches, the optimizer once. Acts on the program.

The lines of loss and gradients become the body of a loop over micro-batches, or, vertically, each of them is repeated for every micro-batch before the next.
Sums and gradients are added up in the dtype they are reduced in, in the order of the micro-batches, and the update reads the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fzero.arguments import accepts, count, flag, predicate
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.layout import Leaf
from fzero.program.ir import Line, Program, Value
from fzero.program.names import Names
from fzero.step import EvalStep
from fzero.transforms.base import Transform, applied, find
from fzero.transforms.shard import Where


@dataclass(frozen=True)
class Accumulate(Transform):
    num_micro_batches: int = 1
    vertical: bool = False
    whole: Where | None = None
    order: ClassVar[int] = 30
    name: ClassVar[str] = "accumulate"

    def __str__(self) -> str:
        whole = "" if self.whole is None else f", whole={getattr(self.whole, '__name__', repr(self.whole))}"
        return f"accumulate(num_micro_batches={self.num_micro_batches}{', vertical=True' if self.vertical else ''}{whole})"

    def idle(self, step: EvalStep) -> str | None:
        return "a batch is cut so that gradients add up, and an evaluation has none: call it with each part of the batch"

    def cuts(self, leaf: Leaf) -> bool:
        """Whether a leaf of the batch is cut: any that has a dim 0 and that `whole` does not accept."""
        if not leaf.shape:
            return False
        return self.whole is None or not accepts(self.name, "whole", self.whole, leaf.path, leaf.meta)

    def micro_shapes(self, leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
        """The shapes of the leaves of a rank's batch in one micro-batch.

        Raises:
            FzeroValueError: leaves that are cut and have another number of rows than the others, or one that cannot be cut in so many parts.
        """
        num, cut = self.num_micro_batches, [leaf for leaf in leaves if self.num_micro_batches > 1 and self.cuts(leaf)]
        rows = Counter(leaf.shape[0] for leaf in cut)
        usual = max(rows, key=lambda n: (rows[n], n), default=0)
        if odd := [f"{leaf.path} {list(leaf.shape)}: other leaves have {usual} rows" for leaf in cut if leaf.shape[0] != usual]:
            fix = f"say which leaves every micro-batch gets whole: fz.accumulate({num}, whole=lambda path, leaf: path == {odd[0].split(' ')[0]!r})"
            raise FzeroValueError(message(self.name, "the leaves of a batch have different numbers of rows: which of them are rows of the batch?", odd, fix))
        if wrong := [f"{leaf.path} {list(leaf.shape)}: dim 0 of {leaf.shape[0]} is not a multiple of {num}" for leaf in cut if leaf.shape[0] % num]:
            fix = "choose a batch that is a multiple of ranks x micro-batches"
            raise FzeroValueError(message(self.name, f"the batch of a rank does not divide into {num} micro-batches", wrong, fix))
        return [(leaf.shape[0] // num, *leaf.shape[1:]) if leaf in cut else leaf.shape for leaf in leaves]


def accumulate(step: Any = None, num_micro_batches: int | None = None, *, vertical: bool = False, whole: Where | None = None) -> Any:
    """Cuts each rank's batch into `num_micro_batches` along dim 0 and runs them one after the other.

    Equal to the untransformed step up to the order of summation: a mean is the mean over the whole batch, a `weighted` loss is
    divided by the whole count, and draws with the step's key are those of the whole batch. `vertical` changes when a line runs and
    not what it computes: on one process the same bits.

    Args:
        step: a step, or the number when called without one: `accumulate(4)`.
        num_micro_batches: at least 1; must divide dim 0 of the batch leaves, which is the same for all of them. 0-dim leaves go to each micro-batch whole.
        vertical: all micro-batches pass through a block before the next block begins. Its parameters are gathered, and fetched from the host or from
            disk, once for all of them: what `offload("cpu", "params")` wants, and `shard_params` over slow links.
        whole: predicate `(path, leaf)` of the batch leaves that go to each micro-batch whole, though they have a dim 0: class weights, position ids, a mask
            that all rows share. `leaf` is a meta tensor.

    Communication: with whole gradients (`data_parallel`, `shard_opt_state`) they are reduced once a step; with `shard_grads` and
        `shard_params` once a micro-batch, so that no whole gradient outlives its block. Vertically once a step whatever the stage, as the last
        micro-batch leaves the block, and parameters travel as often as without `accumulate`.
    Memory: activations of one micro-batch; the accumulated gradients, sharded or whole. Vertically: what passes between blocks and what they keep for their
        backward of all micro-batches, as without `accumulate` (`remat("full")` keeps only the former), and inside a block that of one; two blocks' whole
        gradients, the sum and one micro-batch's, and those of a parameter that several blocks read, from each of them, of all micro-batches.

    Raises:
        FzeroValueError: no number, or one below 1; when the program is built, a batch that it does not divide, or whose leaves have different numbers of rows.
        FzeroTypeError: a `whole` that is no function.
        TransformError: a step of `eval_step`, which has no micro-batches.
    """
    if isinstance(step, (int, float, str)):
        step, num_micro_batches = None, step  # pyright: ignore[reportAssignmentType]  # one that is no whole number is refused below
    if num_micro_batches is None or count("num_micro_batches", num_micro_batches):
        fix = "give a whole number of at least 1: fz.accumulate(4)" if num_micro_batches is None else "give a whole number of at least 1"
        raise FzeroValueError(message("accumulate", f"cannot cut a batch into {num_micro_batches!r} micro-batches", fix=fix))
    if problems := flag("vertical", vertical):
        raise FzeroValueError(message("accumulate", "these arguments cannot work", problems, "e.g. fz.accumulate(4, vertical=True)"))
    if problems := predicate("whole", whole):
        fix = "e.g. whole=lambda path, leaf: 'class_weights' in path"
        raise FzeroTypeError(message("accumulate", "these arguments cannot work", problems, fix))
    return applied(Accumulate(num_micro_batches, vertical, whole), step)


def rewrite(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> Program:
    """Repeats the lines of loss and gradients for each micro-batch, as the step's record says. `batch`: this rank's shape of each input that is cut."""
    if num == 1:
        return program
    record = find(program.transforms, Accumulate)
    lines, totals = _repeated(program, num, batch) if record is not None and record.vertical else _looped(program, num, batch)
    update = next(line for line in program.lines if line.op == "update")
    grads = {leaf: totals[name] for leaf, name in update.attrs["grads"].items()}
    attrs = {**update.attrs, "grads": grads, **{kind: tuple(totals[name] for name in update.attrs[kind]) for kind in ("sums", "maxima")}}
    update = replace(update.rename(totals), attrs=attrs)
    inputs = tuple(replace(v, shape=batch[v.name]) if v.name in batch else v for v in program.inputs)
    return replace(program, inputs=inputs, lines=(*lines, update))


def _looped(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> tuple[list[Line], dict[str, str]]:
    """The lines of loss and gradients in a loop over micro-batches, and for each sum and gradient the name of its total."""
    update = next(line for line in program.lines if line.op == "update")
    before = [
        line
        for line in program.lines
        if line.attrs.get("scales") or (line.op == "cast" and line.args[0] in program.leaves and line.out[0].name not in update.attrs["sums"])
    ]
    inside = [line for line in program.lines if line is not update and line not in before]
    values = program.values()
    names = Names(values)
    parts = {name: names(f"{name}_part") for name in batch}
    body = [Line("take_part", (name,), (replace(values[name], name=part),), attrs={"count": num}, by="accumulate") for name, part in parts.items()]
    body += [line.rename(parts) for line in inside]
    totals: dict[str, str] = {}
    for name in _summands(update):
        value = values[name]
        totals[name] = names(f"{name}_total")
        body.append(Line("accumulate", (name,), (Value(totals[name], value.shape, value.dtype),), attrs={"op": _how(update, name)}, by="accumulate"))
    body = [replace(line, attrs={**line.attrs, "count": num}) if line.op == "part_index" else line for line in body]
    loop = Line("loop", attrs={"count": num}, body=tuple(_early(body)), by="accumulate")
    return [*before, loop], totals


def _summands(update: Line) -> tuple[str, ...]:
    """What the update reads of all micro-batches together."""
    return (*update.attrs["sums"], *update.attrs["maxima"], *update.attrs["grads"].values())


def _how(update: Line, name: str) -> str:
    return "max" if name in update.attrs["maxima"] else "sum"


def _early(lines: list[Line]) -> list[Line]:
    """Each `accumulate` right after the line that makes its summand, so that a whole gradient lives no longer than it must."""
    adds: dict[str, Line] = {line.args[0]: line for line in lines if line.op == "accumulate"}
    out: list[Line] = []
    for line in lines:
        if line.op != "accumulate":
            out.append(line)
            out.extend(adds[v.name] for v in line.out if v.name in adds)
    return out


def _repeated(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> tuple[list[Line], dict[str, str]]:
    """As `_looped`, without a loop: each line once a micro-batch before the next line.

    What depends on neither the batch nor the micro-batch's number is made once. The first micro-batch's sums and gradients become the totals: as soon as
    another's are made they are added to them in place. `micro` among a line's attributes: the micro-batch it is for, and how many there are.
    """
    names, values = Names(program.values()), program.values()
    update = next(line for line in program.lines if line.op == "update")
    lines, summands = _alone(program, names)
    new: list[dict[str, str]] = [{} for _ in range(num)]  # names that differ between micro-batches
    out: list[Line] = []
    for whole in batch:
        for m in range(num):
            new[m][whole] = names(f"{whole}_micro_{m}")
            out.append(Line("take_part", (whole,), (replace(values[whole], name=new[m][whole]),), attrs={"micro": (m, num)}, by="accumulate"))
    for unit in _units(lines, summands):
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
                out.append(replace(line.rename(new[m]), out=renamed, attrs={**line.attrs, "micro": (m, num)}))
            for op in ("sum", "max") if m else ():
                group = [v for v in adds if _how(update, summands[v.name]) == op]
                parts = tuple(new[k][v.name] for k in (0, m) for v in group)
                totals = tuple(replace(v, name=names(f"{v.name}_total_{m}")) for v in group)
                out += [Line("add", parts, totals, attrs={"micro": (m, num), "op": op}, by="accumulate")] if group else []
                new[0].update((v.name, total.name) for v, total in zip(group, totals, strict=True))
    return out, {name: new[0][summand] for summand, name in summands.items()}


def _alone(program: Program, names: Names) -> tuple[list[Line], dict[str, str]]:
    """The lines of loss and gradients, and what they make that is added up, by what it is to the update: of what other lines read too, a copy, as totals
    are overwritten."""
    update = next(line for line in program.lines if line.op == "update")
    lines = [line for line in program.lines if line is not update]
    read = {a for line in lines for a in line.args}
    summands = {name: name for name in _summands(update)}
    out: list[Line] = []
    for line in lines:
        out.append(line)
        for v in (v for v in line.out if v.name in summands and v.name in read):
            copy = replace(v, name=names(f"{v.name}_copy"))
            out.append(Line("cast", (v.name,), (copy,), attrs={"dtype": v.dtype}, by="accumulate"))
            summands[copy.name] = summands.pop(v.name)
    return out, summands


def _units(lines: Sequence[Line], summands: Mapping[str, str]) -> Iterator[list[Line]]:
    """What is repeated together: a line, and right after it the casts of its results to what is added up."""
    casts: dict[str, list[Line]] = {}
    for line in lines:
        if line.op == "cast" and line.out[0].name in summands:
            casts.setdefault(line.args[0], []).append(line)
    done: set[int] = set()
    for line in (line for line in lines if id(line) not in done):
        unit = [line, *(cast for v in line.out for cast in casts.get(v.name, ()))]
        done.update(map(id, unit))
        yield unit
