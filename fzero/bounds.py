"""What a step takes at least of each tier, and of time, if its state rests here or there: sums of bytes, for which no program is made.

A search looks at many ways to lay out a state (fzero/auto.py). A finished program of a large model takes a second to make; these numbers say in which order
programs are worth making, and when to stop: nothing that is left can be faster than what was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fzero.program.ir import Program, local_bytes
from fzero.schedule.cost import seconds
from fzero.schedule.devices import Device
from fzero.transforms.tiers import saved_activations, waiting_on_host


class Rests(NamedTuple):
    """Shares, by bytes, of what rests in host memory and on disk: of optimizer state and parameters; of activations those that wait on the host."""

    state: tuple[float, float] = (0.0, 0.0)
    params: tuple[float, float] = (0.0, 0.0)
    activations: float = 0.0


class Least(NamedTuple):
    """Bytes of each tier, and seconds for which each queue is busy, that it takes at least."""

    device: float
    host: float
    disk: float
    queues: tuple[float, ...]

    @property
    def peaks(self) -> tuple[int, int, int]:
        """Of device, host and disk."""
        return int(self.device), int(self.host), int(self.disk)

    @property
    def seconds(self) -> float:
        """Of a step, if all queues work side by side."""
        return max(self.queues)

    @property
    def likely(self) -> float:
        """Seconds between that and one queue after the other."""
        return (max(self.queues) + sum(self.queues)) / 2


@dataclass(frozen=True)
class Sizes:
    """What a step is made of, in bytes on each rank.

    Attributes:
        resting: state that stays on the device wherever the rest is.
        state, params, copies: of the optimizer, of parameters, of what is computed with beside masters, 0 if that is the parameters themselves.
        grads: gradients that wait for all, or for other micro-batches.
        activations: that wait for their backward.
        turns: of a loop over micro-batches, each of which reads parameters anew.
        compute_seconds: of forward and backward.
    """

    resting: int
    state: int
    params: int
    copies: int
    grads: int
    activations: int
    turns: int
    compute_seconds: float

    def least(self, rests: Rests, on_host: bool, grads: str, device: Device) -> Least:
        """What a layout takes.

        Args:
            rests: where what is.
            on_host: whether the host updates what rests off the device.
            grads: which gradients wait on the host, as in `waiting_on_host`.
            device: whose rates.
        """
        (state_h, state_d), (params_h, params_d) = rests.state, rests.params
        left = (1 - params_h - params_d) * bool(self.copies)  # of masters, which rest with their state
        master_h, master_d = params_h + left * state_h, params_d + left * state_d
        off_h, off_d = (s * self.state + m * self.params for s, m in ((state_h, master_h), (state_d, master_d)))
        copies = self.copies * (master_h + master_d)
        read_h, read_d = (p * (self.copies or self.params) for p in (params_h, params_d))  # by forward and backward
        updated = min(1.0, state_h + state_d) if on_host else 0.0
        waiting = self.grads * (1.0 if grads == "host" else 0.0 if grads == "device" and self.turns > 1 else updated)
        saved = self.activations * rests.activations
        passes = 2 * self.turns
        from_disk = off_d + passes * read_d - (0 if self.copies else min(read_d, off_d))
        streamed = 0.0 if on_host else off_h + off_d
        to_device = passes * (read_h + read_d) + streamed + saved + (waiting if not on_host else 0) + updated * (copies - self.copies * (params_h + params_d))
        to_host = waiting * (self.turns if on_host else 1) + streamed + saved
        in_host = updated * (2 * (self.state + self.params) + self.grads + copies) + (3 * waiting * self.turns if self.turns > 1 else 0)
        on_device = self.resting + self.state * (1 - state_h - state_d) + self.params * (1 - master_h - master_d) + copies - self.copies * (params_h + params_d)
        return Least(
            device=on_device + max(self.grads - waiting, self.activations - saved),
            host=off_h + self.copies * params_h + max(waiting, saved),
            disk=off_d + self.copies * params_d,
            queues=(
                self.compute_seconds,
                from_disk / device.disk_read.bandwidth + (off_d + self.copies * params_d) / device.disk_write.bandwidth,
                to_device / device.host_copy.bandwidth,
                to_host / device.host_copy.bandwidth,
                in_host / device.host_memory_bandwidth,
            ),
        )


def sizes_of(program: Program, device: Device, backend: str) -> Sizes:
    """The sizes of a step.

    Args:
        program: whose update is cut, of a step with all that may leave off the device, on the host.
        device, backend: that it runs on.
    """
    held = {"state": 0, "params": 0, "compute": 0, "": 0}
    for leaf in program.leaves.values():
        role = {"opt_state": "state"}.get(leaf.role, leaf.role) if leaf.layout.tier != "device" else ""
        held[role] += leaf.shard_numel(program.mesh) * leaf.dtype.itemsize
    values = program.values_by_name
    time = (n * seconds(line, program, device, backend) for line, n in program.walk() if line.op == "call" and line.by != "optimizer")
    return Sizes(
        resting=held[""],
        state=held["state"],
        params=held["params"],
        copies=held["compute"],
        grads=sum(local_bytes(values[g], program.mesh) for g in waiting_on_host(program, frozenset(), "host")),
        activations=sum(values[a].nbytes for a in saved_activations(program)),
        turns=max((line.attrs["count"] for line in program.lines if line.op == "loop"), default=1),
        compute_seconds=sum(time),
    )
