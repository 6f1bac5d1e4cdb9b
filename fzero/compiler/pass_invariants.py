"""Defines the rules that programs must satisfy between certain passes, in addition to those of every program
(ir/verifier.py)."""

from __future__ import annotations

from collections.abc import Callable

from fzero.ir.ops import OPS, stays
from fzero.ir.pool_verifier import check
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import refuse, shown


def update_is_partitioned(program: Program) -> None:
    """Checks that the update has been partitioned."""
    _check(program, lambda op: "the update is not yet partitioned" if op.op == "update" else "")


def on_device(program: Program) -> None:
    """Checks that no value is on another tier than the device, and that nothing is copied between tiers."""

    def wrong(op: Instruction) -> str:
        off = [f"{v.name} on the {v.tier}" for v in op.out if v.tier != "device"]
        off += ["a copy between tiers"] if op.tiers else ["on the host"] if op.on_host else []
        return f"{', '.join(off)}, before copies are placed" if off else ""

    _check(program, wrong)


def placed(program: Program) -> None:
    """Checks that every communicated or copied value has an offset in the arena, except values that stay where they are
    and state that is written back; and that buffers follow the rules of the arena."""

    def wrong(op: Instruction) -> str:
        pool = OPS[op.op].pool
        moves = pool in ("gather", "scatter", "reduce") or (
            pool == "fetch" and not op.writes and not stays(op, program.mesh)
        )
        return "it is communicated without a buffer in the arena" if moves and (not op.into or None in op.into) else ""

    _check(program, wrong)
    check(program)


def _check(program: Program, wrong: Callable[[Instruction], str]) -> None:
    """Raises VerifyError if an op violates a rule."""
    refuse(program, [f"{shown(op)}: {text}" for op, _ in program.walk() if (text := wrong(op))])
