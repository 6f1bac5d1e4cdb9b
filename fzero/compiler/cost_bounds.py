"""Computes lower bounds of a step's bytes on each tier and of its seconds, from the tiers of its state: sums over
tensors, for which no program is made.

A search considers many placements of a state (auto_offload.py). Making a finished program of a large model takes a
second; these bounds determine the order in which programs are worth making, and when to stop: once no remaining
candidate can be faster than the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fzero.ir.program import Program, local_bytes
from fzero.plan.cost import seconds
from fzero.plan.device_lookup import Device
from fzero.plan.inductor.temporaries import temporaries_on
from fzero.transforms.offload import ROLES, Offload, saved_activations, waiting_on_host, waits_for_all

Pair = tuple[float, float]
"""Shares, by bytes, on the host and on disk."""


class TierPlacement(NamedTuple):
    """What leaves the device, and where it is: for each role, the shares of its bytes on the host and on disk."""

    opt_state: Pair = (0.0, 0.0)
    params: Pair = (0.0, 0.0)
    activations: Pair = (0.0, 0.0)
    gradients: Pair = (0.0, 0.0)

    @property
    def shares(self) -> list[tuple[tuple[str, ...], Pair]]:
        """The roles off the device, with their shares. State and parameters that are placed alike are one."""
        found: list[tuple[tuple[str, ...], Pair]] = [
            ((role,), pair) for role, pair in zip(self._fields, self, strict=True) if any(pair)
        ]
        if self.opt_state == self.params and any(self.params):
            found[:2] = [(("opt_state", "params"), self.params)]
        return found

    def masters(self, copies: bool) -> Pair:
        """The shares of the masters: if there are compute copies (`copies`), the masters whose compute copy is not
        offloaded separately are stored with their optimizer state."""
        (state_h, state_d), (params_h, params_d) = self.opt_state, self.params
        left = (1 - params_h - params_d) * copies
        return params_h + left * state_h, params_d + left * state_d

    def records(self, auto: Offload) -> Iterator[Offload]:
        """Returns the placement as transforms. The second of two for a role takes its fraction of what the first one
        leaves."""
        for roles, (host, disk) in self.shares:
            ordered = tuple(role for role in ROLES if role in roles)
            asked = replace(auto, of=ordered, update_on=auto.update_on if "opt_state" in ordered else "auto")
            if host:
                yield replace(asked, tier="cpu", path=(), fraction=host)
            if disk:
                yield replace(asked, tier="nvme", fraction=disk / (1 - host))

    def __str__(self) -> str:
        def shown(roles: tuple[str, ...], pair: Pair) -> str:
            what, parts = " and ".join(roles), zip(pair, ("on the host", "on disk"), strict=True)
            return " and ".join(f"{x:.0%} of {what} {at}" if x < 1 else f"{what} {at}" for x, at in parts if x)

        return ", ".join(shown(*share) for share in self.shares) or "nothing moved"


def speculative_shares(tiers: Sequence[str], placement: TierPlacement, copies: bool) -> tuple[float, float]:
    """Returns upper bounds of the shares of the state in host memory and on disk that have speculative updates.

    Args:
        tiers: the tiers whose updates may be speculative.
        placement: where the state is stored.
        copies: whether masters have compute copies.
    """
    (state_h, state_d), (params_h, _) = placement.opt_state, placement.params
    if tiers != ("disk",) or not state_d:
        return float("host" in tiers), float("disk" in tiers)
    if state_h > placement.masters(copies)[0]:
        return 0.0, 0.0  # most of the state on disk is updated together with state in host memory
    # the state of parameters in host memory is not speculative
    return 0.0, max(0.0, 1 - max(0.0, params_h - state_h) / state_d)


class LowerBound(NamedTuple):
    """Lower bounds: the bytes on each tier, and for each phase of a step (forward, backward, late updates) the busy
    seconds of each queue: compute, disk, both links, and the host's memory."""

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
        """The seconds of a step if all queues of a phase overlap completely."""
        return sum(map(max, self.phases))

    @property
    def likely(self) -> float:
        """An estimate between that and queues that do not overlap at all."""
        return sum(max(queues) + HIDDEN * (sum(queues) - max(queues)) for queues in self.phases)


HIDDEN = 1 / 8  # share of the seconds of a queue, other than the busiest, that is assumed not to be hidden


@dataclass(frozen=True)
class Sizes:
    """The parts of a step, in bytes on each rank.

    Attributes:
        resting: state that stays on the device, wherever the rest is stored.
        state, params, copies: optimizer state; parameters; compute copies of masters, 0 if the parameters themselves
            are used to compute.
        grads: gradients that are held until all gradients, or those of other micro-batches, are known.
        activations: activations that are held for their backward.
        inside: the largest memory inside a call.
        iterations: the iterations of a loop over micro-batches, each of which reads parameters again.
        waits: whether updates depend on all gradients.
        forward_seconds, backward_seconds: the seconds of their subgraphs.
    """

    resting: int
    state: int
    params: int
    copies: int
    grads: int
    activations: int
    inside: int
    iterations: int
    waits: bool
    forward_seconds: float
    backward_seconds: float

    def lower_bound(
        self, placement: TierPlacement, on_host: bool, grads: str, device: Device, early: Sequence[float] = (0, 0)
    ) -> LowerBound:
        """Returns the lower bounds for a placement.

        Args:
            placement: the tiers of everything.
            on_host: whether the host updates offloaded state.
            grads: which of the gradients that are not held on disk are held on the host, as in `waiting_on_host`.
            device: the device whose rates are used.
            early: the shares of the state in host memory and on disk that are updated during the backward although
                their updates depend on all gradients (speculatively). Their old values are kept.
        """
        (state_h, state_d), (params_h, params_d) = placement.opt_state, placement.params
        master_h, master_d = placement.masters(bool(self.copies))
        off_h, off_d = (s * self.state + m * self.params for s, m in ((state_h, master_h), (state_d, master_d)))
        # copies that the update sends to the device
        streams = self.copies * (master_h + master_d - params_h - params_d)
        # read by the forward and by the backward
        read_h, read_d = (p * (self.copies or self.params) for p in (params_h, params_d))
        updated = min(1.0, state_h + state_d) if on_host else 0.0
        stored = self.grads * placement.gradients[1]
        waiting = (self.grads - stored) * (
            1.0 if grads == "host" else 0.0 if grads == "device" and self.iterations > 1 else updated
        )
        saved = self.activations * placement.activations[0]
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
            """Returns the queues of shares of the updates. `after`: the share of updates for which gradients are read
            back from disk."""
            brought = streamed + (waiting + stored if not on_host else 0) + updated * streams
            through = (
                updated * (2 * (self.state + self.params) + self.grads + self.copies * (master_h + master_d))
                + 2 * copied
            )
            read = off_d - (0 if self.copies else min(read_d, off_d))
            return queues(
                0.0, disk * read + after * stored, disk * written, memory * brought, memory * streamed, memory * through
            )

        # the shares that are updated during the backward
        host, disk = early if self.waits else (float(self.iterations == 1),) * 2
        memory = (disk * off_d + host * off_h) / (off_d + off_h) if off_d + off_h else 1.0
        summed = 3 * waiting * self.iterations if self.iterations > 1 else 0
        leaving = waiting * (self.iterations if on_host else 1) + stored
        from_disk, from_host = self.iterations * read_d, self.iterations * (read_h + read_d)
        forward = queues(self.forward_seconds, from_disk, 0.0, from_host, saved, 0.0)
        backward = _sum(
            queues(self.backward_seconds, from_disk, stored, from_host + saved, leaving, summed), update(disk, memory)
        )
        on_device = (
            self.resting + self.state * (1 - state_h - state_d) + self.params * (1 - master_h - master_d) + streams
        )
        return LowerBound(
            # Held gradients grow while activations shrink, so the larger of the two is a bound, and not their sum.
            device=on_device + max(self.grads - waiting - stored, self.activations - saved + self.inside),
            host=off_h + self.copies * params_h + copied + max(waiting, saved),
            # Values that are written speculatively have a second extent.
            disk=written * (1 + early[1]) + stored,
            phases=(
                *((forward, backward) if self.iterations == 1 else (_sum(forward, backward),)),
                update(1 - disk, 1 - memory, 1 - memory),
            ),
        )


def _sum(*queues: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*queues, strict=True)))


def sizes_of(program: Program, device: Device, backend: str) -> Sizes:
    """Returns the sizes of a step.

    Args:
        program: a program whose update has been partitioned, of a step with everything that may leave the device on the
            host.
        device, backend: the device and backend it runs on.
    """
    held = {"state": 0, "params": 0, "compute": 0, "": 0}
    for leaf in program.leaves.values():
        role = {"opt_state": "state"}.get(leaf.role, leaf.role) if leaf.layout.tier != "device" else ""
        held[role if role in held else "state"] += leaf.shard_bytes(program.mesh)
    values, calls = (
        program.values_by_name,
        [(op, n) for op, n in program.walk() if op.op == "call" and op.by != "optimizer"],
    )
    inside_of = temporaries_on(program.mesh, backend, torch.device(device.type))
    inside = (
        inside_of(program.functions[op.fn]) + sum(local_bytes(v, program.mesh) for v in op.out) for op, _ in calls
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
        iterations=max((op.count for op in program.instructions if op.op == "loop"), default=1),
        waits=waits_for_all(program),
        forward_seconds=time[False],
        backward_seconds=time[True],
    )
