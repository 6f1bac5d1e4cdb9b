"""Bounds a step's bytes on each tier and its seconds from below, by where its state rests: sums over leaves, for which
no program is made.

A search looks at many ways to lay out a state (auto_offload.py). A finished program of a large model takes a second to
make; these numbers say in which order programs are worth making, and when to stop: once no remaining choice can be
faster than the best found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.ir.program import Program, local_bytes
from fzero.plan.cost import seconds
from fzero.plan.device_lookup import Device
from fzero.plan.inductor.temporaries import temporaries_on
from fzero.transforms.offload_analysis import saved_activations, waiting_on_host, waits_for_all


class Rests(NamedTuple):
    """Shares by bytes of optimizer state and parameters in host memory and on disk, of activations on the host, and of
    gradients on disk."""

    state: tuple[float, float] = (0.0, 0.0)
    params: tuple[float, float] = (0.0, 0.0)
    activations: float = 0.0
    gradients: float = 0.0

    def masters(self, copies: bool) -> tuple[float, float]:
        """Likewise of masters: of parameters that are computed with in `copies` the rest is where their state is."""
        (state_h, state_d), (params_h, params_d) = self.state, self.params
        left = (1 - params_h - params_d) * copies
        return params_h + left * state_h, params_d + left * state_d


class Least(NamedTuple):
    """Lower bounds: bytes of each tier, and for each phase of a step (forward, backward, late updates) the busy seconds
    of each queue: compute, disk, both links, the host's memory."""

    device: float
    host: float
    disk: float
    phases: tuple[tuple[float, ...], ...]

    @property
    def peaks(self) -> tuple[int, int, int]:
        """The peaks of device, host and disk."""
        return int(self.device), int(self.host), int(self.disk)

    @property
    def seconds(self) -> float:
        """The seconds of a step, if all queues of a phase work side by side."""
        return sum(map(max, self.phases))

    @property
    def likely(self) -> float:
        """Seconds between that and one queue after the other."""
        return sum(max(queues) + HIDDEN * (sum(queues) - max(queues)) for queues in self.phases)


HIDDEN = 1 / 8  # of the seconds of a queue that is not the busiest show in a step


@dataclass(frozen=True)
class Sizes:
    """The parts of a step, in bytes on each rank.

    Attributes:
        resting: state that stays on the device wherever the rest is.
        state, params, copies: of the optimizer, of parameters, of what is computed with beside masters, 0 if that is
            the parameters themselves.
        grads: gradients that wait for all, or for other micro-batches.
        activations: that wait for their backward.
        inside: of a call, at most.
        turns: of a loop over micro-batches, each of which reads parameters anew.
        waits: whether updates wait for something of all gradients.
        forward_seconds, backward_seconds: of their functions.
    """

    resting: int
    state: int
    params: int
    copies: int
    grads: int
    activations: int
    inside: int
    turns: int
    waits: bool
    forward_seconds: float
    backward_seconds: float

    def least(self, rests: Rests, on_host: bool, grads: str, device: Device, early: Sequence[float] = (0, 0)) -> Least:
        """The least that a layout takes.

        Args:
            rests: where what is.
            on_host: whether the host updates state that rests off the device.
            grads: which gradients wait on the host, as in `waiting_on_host`, of those that do not on disk.
            device: whose rates.
            early: of the state in host memory and on disk the shares that are updated in the backward although their
                updates wait for all gradients. The old values are kept.
        """
        (state_h, state_d), (params_h, params_d) = rests.state, rests.params
        master_h, master_d = rests.masters(bool(self.copies))
        off_h, off_d = (s * self.state + m * self.params for s, m in ((state_h, master_h), (state_d, master_d)))
        # copies that the update brings to the device
        streams = self.copies * (master_h + master_d - params_h - params_d)
        read_h, read_d = (p * (self.copies or self.params) for p in (params_h, params_d))  # by forward and by backward
        updated = min(1.0, state_h + state_d) if on_host else 0.0
        stored = self.grads * rests.gradients
        waiting = (self.grads - stored) * (
            1.0 if grads == "host" else 0.0 if grads == "device" and self.turns > 1 else updated
        )
        saved = self.activations * rests.activations
        written = off_d + self.copies * params_d
        copied = off_h * early[0]  # before it is overwritten
        streamed = 0.0 if on_host else off_h + off_d

        def queues(
            compute: float, read: float, write: float, to_device: float, to_host: float, in_host: float
        ) -> tuple[float, ...]:
            link = device.host_copy.bandwidth
            disk = read / device.disk_read.bandwidth + write / device.disk_write.bandwidth
            return compute, disk, to_device / link, to_host / link, in_host / device.host_memory_bandwidth

        def update(disk: float, memory: float, after: float = 0.0) -> tuple[float, ...]:
            """Shares of the updates; `after`: of those for which gradients come back from disk."""
            brought = streamed + (waiting + stored if not on_host else 0) + updated * streams
            through = (
                updated * (2 * (self.state + self.params) + self.grads + self.copies * (master_h + master_d))
                + 2 * copied
            )
            read = off_d - (0 if self.copies else min(read_d, off_d))
            return queues(
                0.0, disk * read + after * stored, disk * written, memory * brought, memory * streamed, memory * through
            )

        # what is updated in the backward
        host, disk = early if self.waits else (float(self.turns == 1),) * 2
        memory = (disk * off_d + host * off_h) / (off_d + off_h) if off_d + off_h else 1.0
        summed = 3 * waiting * self.turns if self.turns > 1 else 0
        leaving = waiting * (self.turns if on_host else 1) + stored
        from_disk, from_host = self.turns * read_d, self.turns * (read_h + read_d)
        forward = queues(self.forward_seconds, from_disk, 0.0, from_host, saved, 0.0)
        backward = _sum(
            queues(self.backward_seconds, from_disk, stored, from_host + saved, leaving, summed), update(disk, memory)
        )
        on_device = (
            self.resting + self.state * (1 - state_h - state_d) + self.params * (1 - master_h - master_d) + streams
        )
        return Least(
            device=on_device + max(self.grads - waiting - stored, self.activations - saved + self.inside),
            host=off_h + self.copies * params_h + copied + max(waiting, saved),
            disk=written * (1 + early[1]) + stored,
            phases=(
                *((forward, backward) if self.turns == 1 else (_sum(forward, backward),)),
                update(1 - disk, 1 - memory, 1 - memory),
            ),
        )


def _sum(*queues: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*queues, strict=True)))


def sizes_of(program: Program, device: Device, backend: str) -> Sizes:
    """The sizes of a step.

    Args:
        program: whose update is cut, of a step with all that may leave off the device, on the host.
        device, backend: that it runs on.
    """
    held = {"state": 0, "params": 0, "compute": 0, "": 0}
    for leaf in program.leaves.values():
        role = {"opt_state": "state"}.get(leaf.role, leaf.role) if leaf.layout.tier != "device" else ""
        held[role if role in held else "state"] += leaf.shard_bytes(program.mesh)
    values, calls = (
        program.values_by_name,
        [(line, n) for line, n in program.walk() if line.op == "call" and line.by != "optimizer"],
    )
    inside_of = temporaries_on(program.mesh, backend, torch.device(device.type))
    inside = (
        inside_of(program.functions[line.fn]) + sum(local_bytes(v, program.mesh) for v in line.out) for line, _ in calls
    )
    time = {
        back: sum(n * seconds(x, program, device, backend) for x, n in calls if x.is_backward == back)
        for back in (False, True)
    }
    return Sizes(
        resting=held[""],
        state=held["state"],
        params=held["params"],
        copies=held["compute"],
        grads=sum(local_bytes(values[g], program.mesh) for g in waiting_on_host(program, frozenset(), "host")),
        activations=sum(values[a].nbytes for a in saved_activations(program)),
        inside=max(inside, default=0),
        turns=max((line.count for line in program.lines if line.op == "loop"), default=1),
        waits=waits_for_all(program),
        forward_seconds=time[False],
        backward_seconds=time[True],
    )
