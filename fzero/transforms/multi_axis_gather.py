"""Gathers shards over one mesh axis after the other (see [Note: hops] in zero_pass.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from fzero.ir.attributes import GatherAttrs, Over
from fzero.ir.ops import STARTS
from fzero.ir.program import Instruction, Value
from fzero.ir.value_names import Names

K = TypeVar("K")


def gathered(
    values: Mapping[K, Value],
    to: Mapping[K, tuple[str, ...]],
    named: Callable[[K], str],
    names: Names,
    handle: Callable[[], Value],
    by: str,
) -> tuple[dict[K, Value], list[Instruction]]:
    """Gathers values until they are sharded only over the given axes, and returns the values and the ops that gather
    them.

    Values that are gathered over the same axis are sent together.

    Args:
        values: the shards, by any key.
        to: the axes over which each value is still sharded afterwards; by default none.
        named: returns the name of a gathered value.
        names: the generator of unused names of the program.
        handle: makes the result of a start.
        by: the transform that inserts the ops.
    """
    now, ops = dict(values), list[Instruction]()
    while left := [key for key, v in now.items() if v.placement.axes != to.get(key, ())]:
        # Values that are sharded over the most axes come first: the others join them at the axes
        # that they have in common.
        first = max((now[key].placement.axes for key in left), key=len)
        here = [key for key in left if now[key].placement.axes[-1:] == first[-1:]]
        sent = tuple(now[key].name for key in here)
        start = Instruction("all_gather_start", sent, (handle(),), attrs=GatherAttrs(axes=first[-1:]), by=by)
        for key in here:
            placement = STARTS["all_gather_start"].arrives(start, now[key].placement)
            part = f"{named(key)}_{'parts' if placement.kind == 'permuted' else 'part'}"
            name = names(part if placement.axes else named(key))
            now[key] = replace(now[key], name=name, placement=placement)
        ops += [start, Instruction("wait", (start.out[0].name,), tuple(now[key] for key in here), by=by)]
        for key in (key for key in here if now[key].placement.kind == "permuted"):
            parts, placement = now[key], now[key].placement.gathered
            name = names(f"{named(key)}_part" if placement.axes else named(key))
            now[key] = replace(parts, name=name, placement=placement)
            ops.append(Instruction("join_parts", (parts.name,), (now[key],), attrs=Over(axes=first[-1:]), by=by))
    return now, ops
