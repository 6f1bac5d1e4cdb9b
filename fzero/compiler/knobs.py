"""The options that a search within a memory budget may change (search.py): its knobs.

| knob | values |
|---|---|
| recomputation | the share of activations that `remat("auto")` keeps, in eighths |
| kept gathers | parameters that stay gathered: over the axis of `hierarchical`, and from a forward to its backward |
| accumulation | when the gradients of micro-batches are reduced |
| prefetch | how early gathers start |
| offload | which gradients the host holds, which updates are speculative, and what the host updates |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fzero.compiler.options import FINEST, Options
from fzero.compiler.overlap import sharable
from fzero.ir.program import Program
from fzero.plan.device_lookup import Device
from fzero.transforms.remat import Remat
from fzero.transforms.transform import find
from fzero.transforms.zero import keeps_gathers

FARTHEST = 3  # the largest number of blocks ahead at which a gather is tried to start

Knob = Callable[[Options, Program, Device], Sequence[Options]]
"""Returns the options with other values of one knob, given the present options, their program and the device."""


def kept_activations(options: Options, program: Program, device: Device) -> Sequence[Options]:
    spec = find(program.transforms, Remat)
    return options.shares("remat") if spec is not None and spec.policy == "auto" else ()


def kept_over_axis(options: Options, program: Program, device: Device) -> Sequence[Options]:
    """Blocks whose parameters stay gathered over the axis of `hierarchical` for the whole step."""
    once = keeps_gathers(program.transforms)
    return options.shares("secondary_shard") if once is not None and once.least < once.most else ()


def shared_gathers(options: Options, program: Program, device: Device) -> Sequence[Options]:
    """Gathers that serve both the forward and the backward of a block."""
    num = len(sharable(program)) + options.order.shared
    return [options.ordered(shared=n) for n in sorted({num * k // FINEST for k in range(FINEST + 1)})] if num else ()


def reduced_once(options: Options, program: Program, device: Device) -> Sequence[Options]:
    """Gradients are reduced once per step, and not after every micro-batch."""
    return [replace(options, full_grads=True)] if loops(program) and not options.full_grads else ()


def late_sums(options: Options, program: Program, device: Device) -> Sequence[Options]:
    """A reduction overlaps the computation of the next block; on synchronous devices, this gains nothing."""
    return [options.ordered(late_sums=True)] if device.asynchronous and loops(program) else ()


def gathers_ahead(options: Options, program: Program, device: Device) -> Sequence[Options]:
    return [options.ordered(ahead=n) for n in range(options.order.ahead + 1, FARTHEST + 1)]


def loops(program: Program) -> bool:
    """Whether a program loops over micro-batches."""
    return any(op.op == "loop" for op in program.instructions)


GROWING: tuple[Knob, ...] = (kept_activations, kept_over_axis, shared_gathers)
"""Each value takes more memory than the one before, and is never slower. The search takes the largest that fits."""
ACCUMULATION: tuple[Knob, ...] = (reduced_once, late_sums)
"""Their memory competes with that of the growing knobs, which are chosen anew for each value."""
PREFETCH: tuple[Knob, ...] = (gathers_ahead,)
