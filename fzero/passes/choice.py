"""Lists the choices that a step leaves open, which passes carry out."""

from __future__ import annotations

from dataclasses import dataclass, field

from fzero.passes.overlap import Order


@dataclass(frozen=True)
class Choice:
    """A choice for everything that a step leaves open. `remat`: a policy of the transform; `whole_grads`: gradients of
    micro-batches add up whole and are reduced once a step, or not, `because`; `stay`: the share of blocks whose
    parameters stay gathered over the axis of `once_a_step`; `cast_once`: shards are cast once for all micro-batches,
    and take the room; `host_share`: how much of what rests off the device is updated on the host, by bytes,
    `share_because`; `grads`: which gradients wait in host memory (`waiting_on_host` of passes/off_device.py); `guess`:
    the tiers whose leaves are updated on a guess (passes/speculate.py)."""

    remat: str | float = "min_cut"
    whole_grads: bool = False
    stay: float = 0.0
    cast_once: bool = False
    order: Order = field(default_factory=Order)
    host_share: float = 1.0
    grads: str = "update"
    guess: tuple[str, ...] = ()
    because: str = field(default="", compare=False)
    share_because: str = field(default="", compare=False)
