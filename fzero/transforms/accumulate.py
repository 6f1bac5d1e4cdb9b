"""accumulate: the batch in several micro-batches, the optimizer once. Acts on the program.

The lines of loss and gradients become the body of a loop over micro-batches; sums and gradients are added up in it, in the
dtype they are reduced in, and the update reads the totals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fzero.errors import FzeroValueError, message
from fzero.program.ir import Line, Program, Value
from fzero.program.names import Names
from fzero.transforms.base import Transform, applied


@dataclass(frozen=True)
class Accumulate(Transform):
    num_micro_batches: int = 1
    order: ClassVar[int] = 30
    name: ClassVar[str] = "accumulate"


def accumulate(step: Any = None, num_micro_batches: int = 1) -> Any:
    """Cuts each rank's batch into `num_micro_batches` along dim 0 and runs them one after the other.

    Equal to the untransformed step up to the order of summation: a mean is the mean over the whole batch, a `weighted` loss is
    divided by the whole count, and draws with the step's key are those of the whole batch.

    Args:
        step: a step, or the number when called without one: `accumulate(4)`.
        num_micro_batches: at least 1; must divide dim 0 of every batch leaf. 0-dim batch leaves go to each micro-batch whole.

    Communication: with whole gradients (`data_parallel`, `shard_opt_state`) they are reduced once a step; with `shard_grads` and
        `shard_params` once a micro-batch, so that no whole gradient outlives its block.
    Memory: activations of one micro-batch; the accumulated gradients, sharded or whole.

    Raises:
        FzeroValueError: a number below 1; when the program is built, a batch that it does not divide.
    """
    if isinstance(step, int):
        step, num_micro_batches = None, step
    if not isinstance(num_micro_batches, int) or isinstance(num_micro_batches, bool) or num_micro_batches < 1:
        raise FzeroValueError(message("accumulate", f"cannot cut a batch into {num_micro_batches!r} micro-batches", fix="give a whole number of at least 1"))
    return applied(Accumulate(num_micro_batches), step)


def micro_shape(path: str, shape: tuple[int, ...], num: int, problems: list[str]) -> tuple[int, ...]:
    """Shape of a batch leaf in one micro-batch; what cannot be cut is added to `problems`."""
    if not shape or num == 1:
        return shape
    if shape[0] % num:
        problems.append(f"{path} {list(shape)}: dim 0 of {shape[0]} is not a multiple of {num}")
    return (shape[0] // num, *shape[1:])


def rewrite(program: Program, num: int, batch: Mapping[str, tuple[int, ...]]) -> Program:
    """Wraps the lines of loss and gradients in a loop. `batch`: the whole shape of each batch input on this rank."""
    if num == 1:
        return program
    update = next(line for line in program.lines if line.op == "update")
    before = [line for line in program.lines if line.op == "cast" and line.args[0] in program.leaves and line.out[0].name not in update.attrs["sums"]]
    inside = [line for line in program.lines if line is not update and line not in before]
    values = program.values()
    names = Names(values)
    parts = {name: names(f"{name}_part") for name, shape in batch.items() if shape}
    body = [Line("take_part", (name,), (replace(values[name], name=part),), attrs={"count": num}, by="accumulate") for name, part in parts.items()]
    body += [line.rename(parts) for line in inside]
    totals: dict[str, str] = {}
    for name in (*update.attrs["sums"], *update.attrs["grads"].values()):
        value = values[name]
        totals[name] = names(f"{name}_total")
        body.append(Line("accumulate", (name,), (Value(totals[name], value.shape, value.dtype),), by="accumulate"))
    body = [replace(line, attrs={**line.attrs, "count": num}) if line.op == "part_index" else line for line in body]
    loop = Line("loop", attrs={"count": num}, body=tuple(_early(body)), by="accumulate")
    grads = {leaf: totals[name] for leaf, name in update.attrs["grads"].items()}
    update = replace(update.rename(totals), attrs={**update.attrs, "grads": grads, "sums": tuple(totals[s] for s in update.attrs["sums"])})
    inputs = tuple(replace(v, shape=batch[v.name]) if v.name in batch else v for v in program.inputs)
    return replace(program, inputs=inputs, lines=(*before, loop, update))


def _early(lines: list[Line]) -> list[Line]:
    """Each `accumulate` right after the line that makes its summand, so that a whole gradient lives no longer than it must."""
    adds: dict[str, Line] = {line.args[0]: line for line in lines if line.op == "accumulate"}
    out: list[Line] = []
    for line in lines:
        if line.op != "accumulate":
            out.append(line)
            out.extend(adds[v.name] for v in line.out if v.name in adds)
    return out
