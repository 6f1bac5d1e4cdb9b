"""Lists the options that a step leaves open, which passes carry out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fzero._utils.deprecation import attribute_alias
from fzero.compiler.overlap import ScheduleOptions
from fzero.transforms.compress import Formats

FINEST = 8  # shares are multiples of 1/8


@dataclass(frozen=True)
class Options:
    """A value for every option that a step leaves open.

    Attributes:
        remat: a policy of the transform.
        full_grads: whether the gradients of micro-batches are accumulated unsharded and reduced once per step;
            `because` is the reason.
        secondary_shard: the share of blocks whose parameters stay gathered over the axis of `hierarchical`.
        cast_once: whether shards are cast once for all micro-batches, which takes memory.
        order: the options of the schedule (compiler/overlap.py).
        host_share: the share of the offloaded state, by bytes, that the host updates; `share_because` is the reason.
        grads: which gradients are held in host memory (`waiting_on_host` of transforms/offload.py).
        speculative: the tiers whose state has speculative updates (transforms/speculate_pass.py).
        offloaded: what `offload("auto")` moves off the device, and where (`TierPlacement` of compiler/cost_bounds.py).
        stage: the stage of a pipeline whose program it is.
        wire: the formats on each axis for which `compress("auto")` may choose; `wire_because` is the reason.
    """

    remat: str | float = "min_cut"
    full_grads: bool = False
    secondary_shard: float = 0.0
    cast_once: bool = False
    order: ScheduleOptions = field(default_factory=ScheduleOptions)
    host_share: float = 1.0
    grads: str = "update"
    speculative: tuple[str, ...] = ()
    offloaded: Any = field(default=None, repr=False)
    stage: int = 0
    wire: Formats = ()
    because: str = field(default="", compare=False)
    share_because: str = field(default="", compare=False)
    wire_because: tuple[str, ...] = field(default=(), compare=False)

    whole_grads = attribute_alias("Lowered.options", "whole_grads", "full_grads")
    stay = attribute_alias("Lowered.options", "stay", "secondary_shard")
    guess = attribute_alias("Lowered.options", "guess", "speculative")

    def shares(self, what: str) -> list[Options]:
        """Returns copies with more and more of one option, in steps of 1/8."""
        return [replace(self, **{what: n / FINEST}) for n in range(FINEST + 1)]

    def ordered(self, **how: Any) -> Options:
        return replace(self, order=replace(self.order, **how))

    def narrow(self) -> Options:
        """Returns a copy with as few values in flight at a time as possible, which is slower; it is used if nothing
        else fits."""
        return self.ordered(narrow=True)
