"""Defines the rules that programs must satisfy between certain passes, in addition to those of every program
(ir/verifier.py)."""

from __future__ import annotations

from collections.abc import Callable

from fzero.ir.ops import COPIES, OPS, stays
from fzero.ir.program import Line, Program
from fzero.ir.verifier import refuse, shown


def is_cut(program: Program) -> None:
    """Checks that the update has been partitioned."""
    _check(program, lambda line: "the update is still whole" if line.op == "update" else "")


def on_device(program: Program) -> None:
    """Checks that no value is on another tier than the device, and that nothing is copied between tiers."""

    def wrong(line: Line) -> str:
        off = [f"{v.name} on the {v.tier}" for v in line.out if v.tier != "device"]
        off += ["a copy between tiers"] if line.op in COPIES else ["on the host"] if line.on_host else []
        return f"{', '.join(off)}, before copies are placed" if off else ""

    _check(program, wrong)


def placed(program: Program) -> None:
    """Checks that every communicated or copied value has an offset in the arena, except values that stay where they are
    and state that is written back."""

    def wrong(line: Line) -> str:
        pool = OPS[line.op].pool
        moves = pool in ("gather", "scatter", "reduce") or (
            pool == "fetch" and not line.writes and not stays(line, program.mesh)
        )
        return "it moves without a place in the pool" if moves and (not line.into or None in line.into) else ""

    _check(program, wrong)


def _check(program: Program, wrong: Callable[[Line], str]) -> None:
    """Raises VerifyError if an op violates a rule."""
    refuse(program, [f"{shown(line)}: {text}" for line, _ in program.walk() if (text := wrong(line))])
