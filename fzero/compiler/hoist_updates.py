"""Moves each optimizer update to directly after the backward that computes its gradients, unless it depends on all
gradients, such as on a norm for clipping. So gradients do not accumulate, and transfers of one block's state overlap
the backward of the next block.

An update that waits for other ranks, or for a host with separate memory, is placed a block later, so that the device
runs that block meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fzero.ir.aliases import Views
from fzero.ir.dependencies import dependences, scheduled
from fzero.ir.ops import COLLECTIVES
from fzero.ir.program import Instruction, Program


def rewrite(program: Program) -> Program:
    """Moves each op of the optimizer, and each other op after the last block, directly after the last op that it
    depends on or, for some ops of the optimizer, a block later.

    Precondition: the update is partitioned, and no transfer is moved from its operands yet.
    """
    ops = program.instructions
    optimizer = next((i for i, op in enumerate(ops) if op.by == "optimizer"), None)
    if optimizer is None:
        return program
    first = next((i + 1 for i in reversed(range(optimizer)) if ops[i].body or ops[i].block is not None), optimizer)
    before = dependences(ops, Views(program))
    later = _next_blocks(ops[:first])
    travels = not program.mesh.unified_memory and any(leaf.layout.tier != "device" for leaf in program.leaves.values())
    arrives = _arrives(ops)
    behind = [*range(first)]  # the op that each is placed directly after; before the optimizer, itself
    for number in range(first, len(ops)):
        at = max((behind[i] for i in before[number]), default=-1)
        waits = travels or any(arrives[i] and behind[i] == at for i in before[number])
        behind.append(later[at] if at >= 0 and waits and ops[number].by == "optimizer" else at)
    return replace(program, instructions=tuple(scheduled(ops, before, [*zip(behind, range(len(ops)), strict=True)])))


def _arrives(ops: Sequence[Instruction]) -> list[bool]:
    """Returns, for each op, whether its results arrive from other ranks."""
    gathered = {x.out[0].name for x in ops if x.op in COLLECTIVES}
    return [bool(x.of_codes or (x.is_wait and x.args[0] in gathered)) for x in ops]


def _next_blocks(ops: Sequence[Instruction]) -> list[int]:
    """Returns, for each op, the position after the next block has run and its results have been sent to the other
    ranks; at the end, the last op."""
    out, found = [len(ops) - 1] * len(ops), len(ops) - 1
    for i in reversed(range(len(ops))):
        out[i] = found
        micro, count = ops[i].micro or (0, 1)
        if ops[i].is_backward and ops[i].ends_block and micro == count - 1:
            found = i
            while found + 1 < len(ops) and _leaves(ops[found + 1]):
                found += 1
    return out


def _leaves(op: Instruction) -> bool:
    """Whether an op after a block is part of sending its gradients."""
    return op.op in ("cast", "add", "split_parts", *COLLECTIVES) or op.of_codes
