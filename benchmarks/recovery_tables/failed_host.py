"""Seconds from the failure of a host to the next step, under torchrun with a supervisor for each rank.

Each host is a launcher with one rank on this machine (tests/launchers.py); the store of the rendezvous is a separate
process. Three hosts train a small model (tests/resizer.py). Then one is killed with all its processes, or stopped like
a host without power: its connections stay open and nobody answers. The state comes from memory.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import SOURCE, Table

sys.path.insert(0, str(SOURCE / "tests"))
from launchers import Launchers, launchers  # pyright: ignore[reportMissingImports]

NAME = "lost_host"
LIMIT = 400.0  # seconds
FAST = ("--heartbeat-timeout=10",), "last_call_timeout=3"
USUAL = (), ""


def steps(out: Path) -> list[Any]:
    """Of each step that was done: the number of ranks, the state's step, the loss, the time."""
    path = out / "sizes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def first(started: Launchers, out: Path, ranks: int, since: float) -> Any:
    """The first step on so many ranks after a moment."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        for step in steps(out):
            if step[0] == ranks and step[3] > since:
                return step
        time.sleep(0.1)
    raise SystemExit(started.text())


def ran(folder: Path, name: str, how: Any, number: int, by: int) -> dict[str, float]:
    """A loss, and a new host in place of the lost one: seconds to the next step, and steps done again."""
    out = folder / name
    out.mkdir()
    supervisor, conf = how
    script = [str(SOURCE / "tests" / "resizer.py"), str(out), "1000000"]
    with launchers(out, "2:3", script, conf, {"RESIZER_NAP": "0.1", "RESIZER_SHARED": ""}) as started:
        for _ in range(3):
            started.start(supervisor)
            time.sleep(0.5)  # ranks follow the order of the launchers
        first(started, out, 3, 0.0)
        time.sleep(2.0)
        struck = time.time()
        started.lose(number, by)
        last = max(step for _, step, _, at in steps(out) if at < struck)
        after = first(started, out, 2, struck)
        time.sleep(2.0)
        begun = time.time()
        started.start(supervisor)
        grown = first(started, out, 3, begun)
        sources = [line.split()[0] for line in (out / "sources").read_text().splitlines()]
        assert sources == ["init", "memory", "memory"], sources
    return {"lost_s": after[3] - struck, "again": last + 1 - after[1], "grown_s": grown[3] - begun}


DEFAULTS = {"rounds": 1}
TINY: dict[str, Any] = {"only": ["killed"]}


def measure(args: argparse.Namespace) -> Table:
    cases = {
        "killed, default timeouts": (USUAL, 2, signal.SIGKILL),
        "killed": (FAST, 2, signal.SIGKILL),
        "stopped, as without power": (FAST, 2, signal.SIGSTOP),
        "killed, with rank 0 and the ranks' store": (FAST, 0, signal.SIGKILL),
        "stopped, with rank 0 and the ranks' store": (FAST, 0, signal.SIGSTOP),
    }
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fzero-hosts-") as temporary:
        for i, (name, case) in enumerate((n, c) for n, c in cases.items() if not args.only or n in args.only):
            found[name] = [ran(Path(temporary), f"run-{i}-{k}", *case) for k in range(args.rounds)]
            print(name, found[name], flush=True)
    rows = [
        [name, *(f"{statistics.median(x[key] for x in runs):.0f}" for key in ("lost_s", "again", "grown_s"))]
        for name, runs in found.items()
    ]
    notes = [
        "Three launchers of torchrun on one machine, each with a supervisor and a rank, as if on separate hosts; "
        f"{args.rounds} failure{'s' * (args.rounds > 1)} each. The state came from memory each time.",
        "First line: --heartbeat-timeout 45, and torchrun's last_call_timeout of 30 s, for which it waits for a third "
        "host. "
        "The others: --heartbeat-timeout 10 and --rdzv-conf last_call_timeout=3.",
        "Seconds: from the strike to the end of the first step on two ranks; from the start of a new launcher to the "
        "end of the first step on three.",
        "Other programs ran on the machine at the same time, so these seconds are an upper bound.",
    ]
    columns = ["a host is", "s to the next step", "repeated steps", "s until a new host takes part"]
    return Table("The failure of a host", columns, rows, notes, {"found": found})
