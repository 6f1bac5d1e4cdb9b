"""States the rules of programs between two passes, which hold beside those of every program (ir/verifier.py)."""

from __future__ import annotations

from collections.abc import Callable

from fzero.ir.ops import COPIES, OPS, stays
from fzero.ir.program import Line, Program
from fzero.ir.verifier import refuse, shown


def is_cut(program: Program) -> None:
    """No update is whole any more."""
    _check(program, lambda line: "the update is still whole" if line.op == "update" else "")


def on_device(program: Program) -> None:
    """Nothing lies on another tier than the device's, and nothing is copied to or from one."""

    def wrong(line: Line) -> str:
        off = [f"{v.name} on the {v.tier}" for v in line.out if v.tier != "device"]
        off += ["a copy between tiers"] if line.op in COPIES else ["on the host"] if line.on_host else []
        return f"{', '.join(off)}, before copies are placed" if off else ""

    _check(program, wrong)


def placed(program: Program) -> None:
    """Every moved value has a place in the pool, except unmoved ones and leaves that are written back."""

    def wrong(line: Line) -> str:
        pool = OPS[line.op].pool
        moves = pool in ("gather", "scatter", "reduce") or (
            pool == "fetch" and not line.writes and not stays(line, program.mesh)
        )
        return "it moves without a place in the pool" if moves and (not line.into or None in line.into) else ""

    _check(program, wrong)


def _check(program: Program, wrong: Callable[[Line], str]) -> None:
    """Raises VerifyError where a line is wrong."""
    refuse(program, [f"{shown(line)}: {text}" for line, _ in program.walk() if (text := wrong(line))])
