"""Lists the choices that a step leaves open, which passes carry out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fzero.compiler.overlap import Order, coalescable
from fzero.ir.program import Program
from fzero.transforms.compress import Formats

FINEST = 16
FARTHEST = 3  # blocks ahead that a gather is tried to start


@dataclass(frozen=True)
class Choice:
    """A choice for everything that a step leaves open. `remat`: a policy of the transform; `whole_grads`: gradients of
    micro-batches add up whole and are reduced once a step, or not, `because`; `stay`: the share of blocks whose
    parameters stay gathered over the axis of `hierarchical`; `cast_once`: shards are cast once for all micro-batches,
    and take the room; `host_share`: how much of what rests off the device is updated on the host, by bytes,
    `share_because`; `grads`: which gradients wait in host memory (`waiting_on_host` of transforms/offload_analysis.py);
    `guess`: the tiers whose leaves are updated on a guess (transforms/speculate_pass.py); `rests`: what
    `offload("auto")` moves off the device, and where (compiler/auto_offload.py); `stage`: of a pipeline, whose program
    it is; `wire`: the formats over each axis that `compress("auto")` may choose for, `wire_because`."""

    remat: str | float = "min_cut"
    whole_grads: bool = False
    stay: float = 0.0
    cast_once: bool = False
    order: Order = field(default_factory=Order)
    host_share: float = 1.0
    grads: str = "update"
    guess: tuple[str, ...] = ()
    rests: tuple[Any, ...] = field(default=(), repr=False)
    stage: int = 0
    wire: Formats = ()
    because: str = field(default="", compare=False)
    share_because: str = field(default="", compare=False)
    wire_because: tuple[str, ...] = field(default=(), compare=False)

    def shares(self, what: str) -> list[Choice]:
        """The choices with more and more of something, in steps of 1/16."""
        return [replace(self, **{what: n / FINEST}) for n in range(FINEST + 1)]

    def ordered(self, **how: Any) -> Choice:
        return replace(self, order=replace(self.order, **how))

    def narrow(self) -> Choice:
        """The choice with as little on the way at a time as can be, which is slower: where nothing else fits."""
        return self.ordered(ahead=0, leafwise=True)


def orders(choice: Choice, program: Program, device: Any) -> list[list[Choice]]:
    """The same choices with gathers that start farther and farther ahead, and with small transfers merged if that is
    open."""
    link = device.links["intra"]
    small = int(link.latency * link.bandwidth)  # bytes: below that a transfer is mostly latency
    merged = [choice.ordered(coalesced=small)] if coalescable(program, small) else []
    first = min(1, choice.order.ahead)
    return [[c.ordered(ahead=n) for n in range(first, FARTHEST + 1)] for c in (choice, *merged)]
