"""Lists the parts of a step off the device: updates on the host, gradients that wait for them, and activations that
wait for the backward. `offload_pass.py` moves them."""

from __future__ import annotations

from fzero.ir.ops import OPS
from fzero.ir.program import Line, Program, local_bytes
from fzero.trace.storages import output_storages
from fzero.transforms.accumulate_pass import loop_totals
from fzero.transforms.offload import Offload, spread_out

SMALL = 1 << 14  # bytes: an activation of less stays on the device, as do the gradients of an update that are all less
GRADS = ("device", "update", "host")
"""The choices of which gradients wait in host memory, see `waiting_on_host`."""


def leaves_side_open(program: Program) -> bool:
    """Whether a step leaves open which side updates state that rests off the device. Where both are one memory it does
    not matter."""
    records = [t for t in program.transforms if isinstance(t, Offload)]
    off = any("opt_state" in r.of for r in records) and not program.mesh.unified_memory
    return off and all(r.update_on == "auto" for r in records)


def updated_on_device(program: Program, host_share: float) -> frozenset[str]:
    """The leaves off the device, and ranks' parts of such, that are updated on the device, where the host updates a
    share of them.

    Args:
        program: whose update is cut.
        host_share: of their bytes, as whole blocks spread evenly over all, if the step leaves it open.
    """
    records = [t for t in program.transforms if isinstance(t, Offload)]
    share = next((float(r.update_on == "host") for r in records if r.update_on != "auto"), host_share)
    parts = (line for line in program.lines if line.op == "take_shard" and line.args[0] in program.leaves)
    leaves = {**program.leaves, **{line.out[0].name: program.leaves[line.args[0]] for line in parts}}
    size = lambda names: sum(leaves[a].numel * leaves[a].dtype.itemsize for a in names)  # noqa: E731
    blocks = []
    for line in update_lines(program):
        state = [a for a in line.args if a in leaves]
        off = [a for a in state if leaves[a].layout.tier != "device"]
        blocks += [off] if off and 2 * size(off) >= size(state) else []
    on_host = spread_out([size(block) for block in blocks], share)
    return frozenset(a for block, host in zip(blocks, on_host, strict=True) if not host for a in block)


def waiting_on_host(program: Program, on_device: frozenset[str], grads: str) -> frozenset[str]:
    """The gradients that wait for their update in host memory: those whose update must know something of all gradients
    first, such as a norm to clip by, and the sums of a loop over micro-batches. None where host and device are one
    memory.

    The device reduces a gradient to the summands of such a norm before the gradient leaves, so only numbers travel.
    Sums of a loop, which the host adds up, are reduced on the host.

    Args:
        program: whose update is cut.
        on_device: of `updated_on_device`.
        grads: "update": those that are updated on the host; "host": all; "device": of those that are updated on the
            host only what no loop adds up.
    """
    return frozenset() if program.mesh.unified_memory else _waiting(program, on_device, grads)


def gradients_that_wait(program: Program) -> frozenset[str]:
    """The gradients that wait for their update, wherever that runs. `program`: whose update is cut."""
    return _waiting(program, frozenset(), "host")


def _waiting(program: Program, on_device: frozenset[str], grads: str) -> frozenset[str]:
    if not any(isinstance(t, Offload) for t in program.transforms):
        return frozenset()
    totals = loop_totals(program)
    own = no_gradients(program)
    values, known = program.values_by_name, known_last(program, own)
    parts = {line.out[0].name: line.args[0] for line in program.lines if line.op == "take_shard"}
    found: set[str] = set()
    for line in update_lines(program):
        state = {a: program.leaves[leaf] for a in line.args if (leaf := parts.get(a, a)) in program.leaves}
        off = {a for a, leaf in state.items() if leaf.layout.tier != "device"}
        nbytes = [sum(state[a].numel * state[a].dtype.itemsize for a in names) for names in (off, state)]
        on_host = bool(off) and on_device.isdisjoint(off) and 2 * nbytes[0] >= nbytes[1]
        read = {a for a in line.args if a not in own}
        if all(local_bytes(values[a], program.mesh) < SMALL for a in read):
            continue
        late = read if not known.isdisjoint(line.args) else read & totals
        found |= late - totals if on_host and grads == "device" else late if on_host or grads == "host" else set()
    return frozenset(found)


def waits_for_all(program: Program) -> bool:
    """Whether an update of a program whose update is cut must know something of all gradients first."""
    known = known_last(program, no_gradients(program))
    return any(not known.isdisjoint(line.args) for line in update_lines(program))


def saved_activations(program: Program) -> set[str]:
    """The values between forward and backward that wait on the host."""
    record = next((t for t in program.transforms if isinstance(t, Offload) and "activations" in t.of), None)
    if record is None:
        return set()
    lines = [line for line, _ in program.walk()]
    late = {a for line in lines if line.is_backward for a in line.args}
    found = []
    for line in lines:
        if line.op == "call" and line.is_forward:
            # not so the last block, whose backward follows at once: forward and backward are one call
            outputs = output_storages(program.functions[line.fn].graph)
            found += [
                v
                for v, o in zip(line.out, outputs, strict=True)
                if v.name in late and o.argument is None and v.nbytes >= SMALL
            ]
    chosen = spread_out([v.nbytes for v in found], record.fraction)
    return {v.name for v, off in zip(found, chosen, strict=True) if off}


def update_lines(program: Program) -> list[Line]:
    """The functions that write parameters and state."""
    return [line for line in program.lines if line.by == "optimizer" and line.op == "call" and line.writes]


def no_gradients(program: Program) -> set[str]:
    """The values that updates read beside gradients."""
    made = {v.name for line in program.lines if line.by == "optimizer" or line.op == "take_shard" for v in line.out}
    return made | {v.name for v in program.inputs}


def known_last(program: Program, own: set[str]) -> set[str]:
    """Values of the optimizer that depend on reductions over gradients: known when the last gradient is. `own`: what is
    no gradient."""
    found: set[str] = set()
    for line in program.lines:
        if line.by == "optimizer" and not line.writes:
            reduces = line.op == "call" and any(a not in own and program.values_by_name[a].shape for a in line.args)
            found.update(v.name for v in line.out if reduces or not found.isdisjoint(line.args))
    return found


def blocks_updated_on_host(program: Program) -> tuple[int, int]:
    """The number of blocks whose state rests off the device are updated on the host, of how many."""
    updates = update_lines(program)
    brought = {v.name for line in program.lines if OPS[line.op].waits for v in line.out}
    on_host = sum(line.on_host for line in updates)
    return on_host, on_host + sum(not line.on_host and not brought.isdisjoint(line.writes) for line in updates)
