"""Counts what the CPU does in one step on a GPU, without one: calls, launches, collectives, and an estimate of their
time.

    python tests/cuda_stub/launches.py                       # 64 layers of width 1,024; about a minute
    python tests/cuda_stub/launches.py --before FILE.json    # beside earlier counts
    python tests/cuda_stub/launches.py --only "one device"

Programs are traced on the CPU and run without computing (rehearsal.py): what PyTorch and c10d are told is counted as
they are told. In a virtual environment with a CUDA build of PyTorch, which needs no GPU, the launches in compiled
functions are those of the code that Inductor generates (cuda_code.py), elsewhere those that the plan predicts.

The time is an estimate by the costs of `MICROSECONDS`, the same for both sides: a ratio means more than either.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benchmark_modules  # noqa: F401 - before the modules of benchmarks/
import cuda_code
import torch
from common import model_flags, publish, script_flags, settings
from model import Config, make_init, make_loss
from rehearsal import IssuedOps, rehearse

import fzero as fz
from fzero import optim
from fzero.plan.cost import cost_of

CASES = {
    "one device": (1, ()),
    "ZeRO-3 on 8": (8, (fz.shard_params(),)),
    "ZeRO-3 on 8, accumulate(4)": (8, (fz.shard_params(), fz.accumulate(4))),
    "ZeRO-3 on 8, fp8": (8, (fz.shard_params(), fz.fp8())),
}
MICROSECONDS = {
    "call of a compiled function": 20.0,
    "launch in it": 5.0,
    "other operation": 5.0,
    "view, or new memory": 1.0,
    "tensor in a list": 0.5,
    "other line": 3.0,
    # 160 to 230 us for 6 to 12 leaves, 107 to 145 without the manager, on a process group that sends nothing
    "collective by a coalescing manager": 90.0,
    "leaf of it": 12.0,
    "collective": 69.0,
    "leaf of that": 6.3,
}
"""Of one CPU core at about 3 GHz. Estimates but for the collectives', which were measured on a busy machine."""


def counts(config: Config, size: int, transforms: tuple[Any, ...]) -> dict[str, Any]:
    """The counts of one step of rank 0."""
    step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    step = fz.compose(fz.mixed_precision("bf16"), *transforms)(step)
    mesh = fz.AbstractMesh(device_type="cuda", data=size)
    batch = tuple(torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta") for _ in range(2))
    issued = rehearse(fz.lower(step, mesh, make_init(config), batch, device="h100").program)
    return {**inside(issued), **besides(issued, config.layers)}


def inside(issued: IssuedOps) -> dict[str, Any]:
    """Compiled functions: what is in each of them, as generated or as planned, by the number of their calls."""
    found: dict[str, Any] = {"generated": cuda_code.can_generate(), "functions": {}}
    for name, (function, graph) in issued.compiled.items():
        if found["generated"]:
            code = cuda_code.read(cuda_code.generate(function, graph), 0)
            row = {"launches": code.kernels + code.externs, **vars(code)}
        else:
            row = {"launches": cost_of(function).num_kernels}
        found["functions"][name] = {"calls": issued.calls[name], **row}
    rows = found["functions"].values()
    found["calls"] = sum(row["calls"] for row in rows)
    found["launches"] = sum(row["calls"] * row["launches"] for row in rows)
    found["strange"] = sorted({name for row in rows for name in row.get("strange", ())})
    found["host"] = sum(row["calls"] * row.get("host", 0) for row in rows)
    return found


def besides(issued: IssuedOps, layers: int) -> dict[str, Any]:
    """All else."""
    collectives, launches, clones = issued.collectives.total(), issued.launches.total(), issued.clones.total()
    return {
        "operations": launches,
        "operations_by_line": {name: n for name, n in issued.launches.most_common() if n},
        "views": issued.views.total(),
        "listed": issued.listed.total(),
        "clones": clones,
        "syncs": issued.syncs.total(),
        "collectives": collectives,
        "managed": issued.managed.total(),
        "leaves": issued.leaves.total(),
        "managed_leaves": sum(n for name, n in issued.leaves.items() if issued.managed[name]),
        "lines": sum(
            n for name, n in issued.lines.items() if name not in issued.calls and not issued.collectives[name]
        ),
        "a_layer": (launches + clones + collectives) / layers,
    }


def milliseconds(found: dict[str, Any]) -> float:
    """The estimate."""
    cost = MICROSECONDS
    total = cost["call of a compiled function"] * found["calls"] + cost["launch in it"] * found["launches"]
    total += (
        cost["other operation"] * (found["operations"] + found["clones"]) + cost["view, or new memory"] * found["views"]
    )
    total += cost["tensor in a list"] * found["listed"] + cost["other line"] * found["lines"]
    total += cost["collective by a coalescing manager"] * found["managed"]
    total += cost["leaf of it"] * found["managed_leaves"]
    total += cost["collective"] * (found["collectives"] - found["managed"])
    total += cost["leaf of that"] * (found["leaves"] - found["managed_leaves"])
    return total / 1e3


def rows(columns: list[dict[str, Any] | None]) -> list[list[str]]:
    """The table, a column for each."""

    def row(name: str, text: Any) -> list[str]:
        return [name, *("" if found is None else str(text(found)) for found in columns)]

    def lines(*names: str) -> Any:
        return lambda found: sum(found["operations_by_line"].get(name, 0) for name in names)

    scalars = ("scalars_0", "scalars_1")
    named = ("cast", "accumulate", *scalars)
    planned = "" if all(found is None or found["generated"] for found in columns) else ", planned"
    return [
        row("calls of compiled functions", lambda c: c["calls"]),
        row(f"launches in them{planned}", lambda c: c["launches"]),
        row("other operations that launch", lambda c: c["operations"]),
        row("of these: casts", lines("cast")),
        row("of these: in the functions of scalars", lines(*scalars)),
        row("of these: sums of micro-batches", lines("accumulate")),
        row("of these: all else", lambda c: c["operations"] - lines(*named)(c)),
        row("clones of arguments that are not aligned", lambda c: c["clones"]),
        row("collectives", lambda c: c["collectives"]),
        row("tensors in them", lambda c: c["leaves"]),
        row("**launches besides Inductor's, a layer**", lambda c: f"**{c['a_layer']:.1f}**"),
        row("waits of the CPU for the GPU", lambda c: c["syncs"] + c["host"]),
        row("code for another device", lambda c: ", ".join(c["strange"]) or "none"),
        row("**CPU time of a step, estimated, ms**", lambda c: f"**{milliseconds(c):.1f}**"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],  # type: ignore[union-attr]
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model_flags(parser, layers=64, width=1024, heads=16, seq=1024, batch=8)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--before", type=Path, help="a .json of this script: what it is beside, or else itself")
    parser.add_argument("--only", choices=CASES, action="append", help="of the cases")
    script_flags(parser, "launches")
    args = parser.parse_args()
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch, args.vocab)
    before: dict[str, Any] = {}
    if args.before is not None:
        read = json.loads(args.before.read_text())
        before = read["before"] or {"commit": read["environment"]["commit"], "counts": read["counts"]}
    now = {name: counts(config, *case) for name, case in CASES.items() if name in (args.only or CASES)}
    names, columns = [], list[dict[str, Any] | None]()
    for name, found in now.items():
        if before:
            names.append(f"{name}: {before['commit']}")
            columns.append(before["counts"].get(name))
        names.append(f"{name}: now" if before else name)
        columns.append(found)
    notes = [
        f"{args.layers} layers of width {args.width}, bf16, AdamW, gradients clipped by their global norm; rank 0",
        "an operation on a list of tensors counts as one launch, a collective as one, a call of a library (a product, "
        "attention) as one",
        "the estimate: " + ", ".join(f"{name} {cost:g} us" for name, cost in MICROSECONDS.items()),
    ]
    for name, found in now.items():
        if name in before.get("counts", {}):
            share = milliseconds(found) / milliseconds(before["counts"][name])
            notes.append(f"{name}: {share:.0%} of the CPU time before")
    publish(
        args.name,
        "One step on a GPU, by what the CPU tells it",
        ["a step", *names],
        rows(columns),
        notes,
        {"settings": settings(args, "before"), "counts": now, "before": before},
        args.out,
        how="Counted",
    )


if __name__ == "__main__":
    main()
