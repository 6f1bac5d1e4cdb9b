"""Lists the values of a step that are kept off the device.

These are the state that the host updates, the gradients that are held until their update, and the activations that are
held until the backward. `offload_pass.py` inserts the copies.
"""

from __future__ import annotations

from fzero.ir.program import Instruction, Program, local_bytes
from fzero.trace.storages import output_storages
from fzero.transforms.accumulate import loop_totals
from fzero.transforms.offload import Offload, spread_out

SMALL = 1 << 14  # bytes: a smaller activation stays on the device, as do an update's gradients if all are smaller
GRADS = ("device", "update", "host")
"""The options for which gradients are held in host memory; see `waiting_on_host`."""


def leaves_side_open(program: Program) -> bool:
    """Whether a step leaves open whether the host or the device updates offloaded state. If host and device share one
    memory, this makes no difference."""
    records = [t for t in program.transforms if isinstance(t, Offload)]
    off = any("opt_state" in r.of for r in records) and not program.mesh.unified_memory
    return off and all(r.update_on == "auto" for r in records)


def updated_on_device(program: Program, host_share: float) -> frozenset[str]:
    """Returns the offloaded tensors, and the shards taken of such tensors, that the device updates while the host
    updates a share.

    Args:
        program: a program whose update has been partitioned.
        host_share: the share of their bytes that the host updates, as whole blocks spread evenly over all blocks; used
            only if the step leaves it open.
    """
    records = [t for t in program.transforms if isinstance(t, Offload)]
    share = next((float(r.update_on == "host") for r in records if r.update_on != "auto"), host_share)
    parts = (op for op in program.instructions if op.op == "take_shard" and op.args[0] in program.leaves)
    leaves = {**program.leaves, **{op.out[0].name: program.leaves[op.args[0]] for op in parts}}
    size = lambda names: sum(leaves[a].numel * leaves[a].dtype.itemsize for a in names)  # noqa: E731
    blocks = []
    for op in update_ops(program):
        state = [a for a in op.args if a in leaves]
        off = [a for a in state if leaves[a].layout.tier != "device"]
        blocks += [off] if off and 2 * size(off) >= size(state) else []
    on_host = spread_out([size(block) for block in blocks], share)
    return frozenset(a for block, host in zip(blocks, on_host, strict=True) if not host for a in block)


def waiting_on_host(program: Program, on_device: frozenset[str], grads: str) -> frozenset[str]:
    """Returns the gradients that are held in host memory until their update.

    These are gradients whose update depends on all gradients, for example on a norm for clipping, and the accumulated
    gradients of a loop over micro-batches. There are none if host and device share one memory.

    The device computes a gradient's contribution to such a norm before the gradient leaves the device, so that only
    scalars are sent back. Gradients that a loop accumulates on the host contribute to the norm on the host.

    Args:
        program: a program whose update has been partitioned.
        on_device: the result of `updated_on_device`.
        grads: "update": the gradients of updates that run on the host; "host": all; "device": of the gradients of
            updates that run on the host, only those that no loop accumulates.
    """
    return frozenset() if program.mesh.unified_memory else _waiting(program, on_device, grads)


def gradients_that_wait(program: Program) -> frozenset[str]:
    """Returns the gradients that are held until their update, no matter where the update runs. The program's update
    must have been partitioned."""
    return _waiting(program, frozenset(), "host")


def _waiting(program: Program, on_device: frozenset[str], grads: str) -> frozenset[str]:
    """Returns the held gradients as described in `waiting_on_host`, without regard to whether host and device share one
    memory."""
    if not any(isinstance(t, Offload) for t in program.transforms):
        return frozenset()
    totals = loop_totals(program)
    own = no_gradients(program)
    values, known = program.values_by_name, known_last(program, own)
    parts = {op.out[0].name: op.args[0] for op in program.instructions if op.op == "take_shard"}
    found: set[str] = set()
    for op in update_ops(program):
        state = {a: program.leaves[leaf] for a in op.args if (leaf := parts.get(a, a)) in program.leaves}
        off = {a for a, leaf in state.items() if leaf.layout.tier != "device"}
        nbytes = [sum(state[a].numel * state[a].dtype.itemsize for a in names) for names in (off, state)]
        # An update runs on the host only if at least half of the bytes of its state are stored off
        # the device, as in `updated_on_device`.
        on_host = bool(off) and on_device.isdisjoint(off) and 2 * nbytes[0] >= nbytes[1]
        read = {a for a in op.args if a not in own}
        if all(local_bytes(values[a], program.mesh) < SMALL for a in read):
            continue
        late = read if not known.isdisjoint(op.args) else read & totals
        found |= late - totals if on_host and grads == "device" else late if on_host or grads == "host" else set()
    return frozenset(found)


def waits_for_all(program: Program) -> bool:
    """Whether an update depends on all gradients. The program's update must have been partitioned."""
    known = known_last(program, no_gradients(program))
    return any(not known.isdisjoint(op.args) for op in update_ops(program))


def saved_activations(program: Program) -> set[str]:
    """Returns the values that are held on the host between forward and backward."""
    record = next((t for t in program.transforms if isinstance(t, Offload) and "activations" in t.of), None)
    if record is None:
        return set()
    ops = [op for op, _ in program.walk()]
    late = {a for op in ops if op.is_backward for a in op.args}
    found = []
    for op in ops:
        if op.op == "call" and op.is_forward:
            # The last block is excluded: its backward follows directly, and forward and backward are one call.
            outputs = output_storages(program.functions[op.fn].graph)
            found += [
                v
                for v, o in zip(op.out, outputs, strict=True)
                if v.name in late and o.argument is None and v.nbytes >= SMALL
            ]
    chosen = spread_out([v.nbytes for v in found], record.fraction)
    return {v.name for v, off in zip(found, chosen, strict=True) if off}


def update_ops(program: Program) -> list[Instruction]:
    """Returns the calls that write parameters and optimizer state."""
    return [op for op in program.instructions if op.by == "optimizer" and op.op == "call" and op.writes]


def no_gradients(program: Program) -> set[str]:
    """Returns the values, other than gradients, that updates read."""
    made = {v.name for op in program.instructions if op.by == "optimizer" or op.op == "take_shard" for v in op.out}
    return made | {v.name for v in program.inputs}


def known_last(program: Program, own: set[str]) -> set[str]:
    """Returns the values of the optimizer that depend on reductions over gradients, and are therefore known only after
    the last gradient is.

    Args:
        program: a program whose update has been partitioned.
        own: the values that are not gradients.
    """
    found: set[str] = set()
    for op in program.instructions:
        if op.by == "optimizer" and not op.writes:
            reduces = op.op == "call" and any(a not in own and program.values_by_name[a].shape for a in op.args)
            found.update(v.name for v in op.out if reduces or not found.isdisjoint(op.args))
    return found


def blocks_updated_on_host(program: Program) -> tuple[int, int]:
    """Returns how many of the blocks with offloaded state are updated on the host, and the number of such blocks."""
    updates = update_ops(program)
    brought = {v.name for op in program.instructions if op.is_wait for v in op.out}
    on_host = sum(op.on_host for op in updates)
    return on_host, on_host + sum(not op.on_host and not brought.isdisjoint(op.writes) for op in updates)
