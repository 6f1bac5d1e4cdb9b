"""Marks the waits of copies to the host that only the device has to wait for, because nothing on the host reads these
values, except copies back to the device.

Such a copy and the copy back are both in the device's queue, so the host thread does not need to know when either is
done, and may run ahead of the device as it does elsewhere: in a step with `offload("cpu", "activations")`, no copy
blocks it. The next op of the host that writes to the same memory waits separately (`Op.settles`). This pass runs after
all buffers have been allocated, and does not move any op.
"""

from __future__ import annotations

from fzero.ir.attributes import WaitAttrs
from fzero.ir.ops import STARTS
from fzero.ir.program import Instruction, Program


def rewrite(program: Program) -> Program:
    """Returns the program with `host=False` on these waits. There are none on a mesh whose host and device share one
    memory.

    Precondition: every op is in its final position.
    """
    starts = {op.out[0].name: op for op, _ in program.walk() if op.op in STARTS}
    on_host = {*program.outputs}
    for op, _ in program.walk():
        on_host.update(op.writes)
        if op.tiers[1:] != ("device",):
            on_host.update(op.args)

    def device_alone(op: Instruction) -> bool:
        if not isinstance(op.attrs, WaitAttrs):
            return False
        start = starts[op.args[0]]
        return (
            start.tiers == ("device", "host")
            and not start.writes
            and bool(op.into)
            and None not in op.into
            and not any(v.name in on_host for v in op.out)
        )

    return program.map_instructions(lambda op: [op.saying(host=False) if device_alone(op) else op])
