"""The form of each op a line can have: how many values it reads and makes, whether it writes leaves, and its attributes.

What is not in this table is no op, and no attribute of one: fzero/program/verify.py refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fzero.program.ir import Line
from fzero.program.record import Recorded

ANY = -1
"""Any number of arguments or results."""


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
        args: number of values read, or `ANY`.
        out: number of values made, or `ANY`.
        writes: whether a line of it may, must ("always") or must not write leaves.
        needs: attributes that each line of it has, with their types.
        may: attributes that it can have besides.
        body: whether it has lines of its own.
    """

    args: int = ANY
    out: int = ANY
    writes: bool | str = False
    needs: Mapping[str, type] = field(default_factory=dict)
    may: Mapping[str, type] = field(default_factory=dict)
    body: bool = False


_MICRO: dict[str, type] = {"micro": tuple}  # the micro-batch that a repeated line is for, and how many there are
_GUESS: dict[str, type] = {"guess": bool}  # carried out on a guess (fzero/program/guess.py)
_REDUCTION: dict[str, type] = {"axes": tuple, "op": str}
_COPY = Op(out=1, may={**_GUESS, **_MICRO, "memory": str})

OPS: Mapping[str, Op] = {
    "call": Op(
        writes=True,
        may={
            **_GUESS,
            **_MICRO,
            "joint": object,  # the block that is called
            "call": int,  # its number
            "backward": bool,
            "inputs": tuple,
            "grads": tuple,
            "on": str,
            "scales": str,
            "of_sums": bool,
        },
    ),
    "update": Op(writes="always", needs={"graph": Recorded, "sums": tuple, "maxima": tuple, "grads": dict}, may={"leaf": dict}),
    "loop": Op(args=0, out=0, needs={"count": int}, body=True),
    "redo": Op(out=0, needs={"count": int}, body=True),
    "all_gather_start": Op(out=1, needs={"axes": tuple}, may=_MICRO),
    "reduce_scatter_start": Op(out=1, needs=_REDUCTION, may=_MICRO),
    "all_reduce_start": Op(out=1, needs=_REDUCTION, may=_MICRO),
    "to_host_start": Op(out=1, writes=True, may=_COPY.may),
    "to_device_start": Op(out=1, writes=True, may=_COPY.may),
    "disk_read_start": _COPY,
    "disk_write_start": Op(out=1, writes="always", may=_COPY.may),
    "wait": Op(args=1, may={**_MICRO, **_GUESS, "together": bool}),
    "cast": Op(out=1, needs={"dtype": torch.dtype}, may={**_MICRO, **_GUESS, "through": torch.dtype}),
    "buffer": Op(args=0, needs={"leaves": tuple}, may={"on": str}),
    "zeros": Op(args=0, out=1),
    "take_shard": Op(args=1, out=1, needs={"axes": tuple}),
    "take_part": Op(args=1, out=1, may={"count": int, **_MICRO}),
    "part_index": Op(args=0, out=1, may={"count": int, "axes": tuple, **_MICRO}),
    "num_valid": Op(args=0, out=1, needs={"shape": tuple, "axes": tuple}),
    "draw_start": Op(args=0, out=1, needs={"base": int, "shape": tuple, "axes": tuple}),
    "accumulate": Op(args=1, out=1, needs={"op": str}),
    "add": Op(needs={"op": str, "micro": tuple}),
    "assign": Op(out=0, writes="always", may={**_GUESS, "restores": bool}),
}


def misformed(line: Line) -> list[str]:
    """What of a line is not as its op's row says."""
    row = OPS.get(line.op)
    if row is None:
        return [f"{line.op!r} is not an op"]
    problems = []
    if row.args not in (ANY, len(line.args)):
        problems.append(f"reads {len(line.args)} values, not {row.args}")
    if row.out not in (ANY, len(line.out)):
        problems.append(f"makes {len(line.out)} values, not {row.out}")
    if line.writes if not row.writes else row.writes == "always" and not line.writes:
        problems.append(f"writes {len(line.writes)} leaves")
    if line.body and not row.body:
        problems.append("has lines of its own")
    types = {**row.needs, **row.may}
    problems += [f"has no attribute {name!r}" for name in row.needs if name not in line.attrs]
    problems += [f"has an unknown attribute {name!r}" for name in line.attrs if name not in types]
    problems += [f"{name} = {x!r} is not a {types[name].__name__}" for name, x in line.attrs.items() if name in types and not isinstance(x, types[name])]
    return problems
