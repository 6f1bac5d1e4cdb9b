"""Prints plans, programs and devices: in color on a terminal, as plain text elsewhere, or as data."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from fzero._utils.units import duration, rate
from fzero.cli.plan_summary import Answer
from fzero.compiler.auto_mesh import MeshPlans
from fzero.compiler.lowered import Lowered
from fzero.ir.printer import statements
from fzero.ir.program import Program
from fzero.plan.device_lookup import Device
from fzero.plan.plan import Plan
from fzero.plan.render import TextTable, draw, plain
from fzero.testing import Report
from fzero.tree import dtype_name


def meshes_data(found: MeshPlans) -> dict[str, Any]:
    """Returns the planned meshes for the JSON output."""
    rows = list[dict[str, Any]]()
    for x in found.found:
        row: dict[str, Any] = {"axes": dict(x.mesh.axes), "transforms": [*x.code], "text": x.text}
        rows.append(row if x.plan is None else {**row, "step_seconds": x.plan.step_seconds})
    return {"meshes": rows, "left_out": [*found.left_out], "budget": found.budget}


def print_answer(found: Answer, details: bool = False) -> None:
    """Prints the answer about a step, after the tables of `--details` if they are requested."""
    console = Console()
    _print(found.details() if details else [], found.text(min(120, console.width) if console.is_terminal else 120))


def print_program(text: str) -> None:
    """Prints the text of a program, highlighted on a terminal."""
    console = Console()
    if console.is_terminal:
        syntax = Syntax("", "python", theme="ansi_dark", background_color="default")  # the terminal's own colors
        # Not wrapped by rich, so that ops stay on one line and can be copied or piped to a pager.
        console.print(syntax.highlight(text), soft_wrap=True, end="")
    else:
        sys.stdout.write(text)


def print_device(device: Device) -> None:
    """Prints the rates of a device."""
    rows = [(f"products in {dtype}", f"{flops / 1e9:.4g} GFLOP/s", "") for dtype, flops in device.flops.items()]
    memories = {
        "memory": device.memory_bandwidth,
        "host memory": device.host_memory_bandwidth,
        "disk, mixed": device.disk_mixed,
    }
    rows += [(name, rate(attained), "read and written together") for name, attained in memories.items() if attained]
    rows.append(("a call", duration(device.call_seconds), ""))
    links = {f"link {name}": link for name, link in device.links.items()}
    links |= {"host copy": device.host_copy, "disk read": device.disk_read, "disk write": device.disk_write}
    rows += [(name, rate(link.bandwidth), f"after {duration(link.latency)}") for name, link in links.items()]
    machine = ", ".join(f"{what} {n}" for what in ("cores", "threads") if (n := device.machine.get(what)))
    _print(
        [
            TextTable(
                f"{device.name}{f' ({machine})' if machine else ''}: {device.source}",
                ("each rank", "attains", ""),
                rows,
            )
        ]
    )


def print_report(found: Report) -> None:
    """Prints the comparison of a transformed step with the plain one."""
    _print(found.tables(), "\n".join(found.remarks()))


_OLD_OPTIONS = {"whole_grads": "full_grads", "stay": "secondary_shard", "guess": "speculative"}
"""Keys of 0.2 in the JSON of a plan, and what they are called now. They go in 0.4 (fzero/_utils/deprecation.py)."""


def plan_data(lowered: Lowered, plan: Plan, memory: int | None = None) -> dict[str, Any]:
    """Returns what was chosen for a budget, or whether the plan fits into the device's memory."""
    budget = lowered.budget
    if budget is None or budget.limits == (None, None, None):
        return {} if memory is None else {"device_memory": {"bytes": memory, "fits": plan.peak_bytes <= memory}}
    fits = not budget.over((plan.peak_bytes, plan.host_peak_bytes, plan.disk_bytes))
    limits = {"bytes": budget.nbytes, "host_bytes": budget.host, "disk_bytes": budget.disk}
    options = dataclasses.asdict(lowered.options)
    old = {old: options[new] for old, new in _OLD_OPTIONS.items()}
    return {"budget": {**limits, "fits": fits, **options, **old}}


def program_data(program: Program) -> dict[str, Any]:
    """Returns a program: how every tensor of the state is stored, and one row per op that runs. `times`: how often it
    runs in one step.
    """
    lines = [
        {
            "op": op.op,
            "fn": op.fn or None,
            "times": times,
            "text": text,
            "out": [
                {"name": v.name, "shape": v.shape, "dtype": dtype_name(v.dtype), "placement": str(v.placement)}
                for v in op.out
            ],
            "by": op.by or None,
        }
        for (op, times), text in zip(program.walk(), statements(program), strict=True)
    ]
    leaves = [
        {
            "name": name,
            "path": x.path,
            "role": x.role,
            "shape": x.shape,
            "dtype": dtype_name(x.dtype),
            "axes": x.layout.axes,
        }
        for name, x in program.leaves.items()
    ]
    return {
        "name": program.name,
        "mesh": program.mesh.axes,
        "transforms": [str(t) for t in program.transforms],
        "pool_bytes": program.pool_bytes,
        "leaves": leaves,
        "lines": lines,
    }


def _print(shown: Sequence[TextTable], last: str = "") -> None:
    console = Console()
    if console.is_terminal:
        draw(shown, console)
    elif shown:
        sys.stdout.write(plain(shown))
    if last:
        console.print(last, highlight=False, soft_wrap=True)
