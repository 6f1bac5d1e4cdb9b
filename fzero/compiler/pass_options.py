"""Decides which passes run, and with which options.

Each function takes a `PassInput` and returns the options of the pass after which it is named: a hashable record, `True`
for a pass that has no options, and None if the pass has nothing to do. What is the same for all programs of a step is
not compared, so that programs are cached by what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fzero.compiler.buffer_allocation import Temporaries
from fzero.compiler.options import Options
from fzero.compiler.overlap import ScheduleOptions
from fzero.ir.ops import STARTS
from fzero.ir.program import Function, Program
from fzero.sharding.layout import TIERS, Leaf
from fzero.transforms import offload
from fzero.transforms.accumulate import AccumulateOptions
from fzero.transforms.compress import Compress, Encoding
from fzero.transforms.dim_sharding import DimShardings
from fzero.transforms.offload import ComputeCopies, GradientLeaves, Offload, UpdatePlacement
from fzero.transforms.pipeline import splits_backward
from fzero.transforms.pipeline_pass import Stage, spec_of
from fzero.transforms.redundant import spec_of as replicas_of
from fzero.transforms.remat import RematOptions, remat_options
from fzero.transforms.round_robin_pass import gathers
from fzero.transforms.transform import Transform, find
from fzero.transforms.zero import Zero
from fzero.transforms.zero_pass import ShardOptions

Made = dict[str, Program]
"""The intermediate programs, in order, each under the name of the pass that it comes after, whether or not that pass
ran."""
Wanted = Literal[True] | None


@dataclass(frozen=True, eq=False)
class PassContext:
    """What the step requires of the passes, independent of the chosen options.

    Attributes:
        zero: the sharding that its parallel transforms request.
        num_micro: the number of micro-batches.
        batch: by name, the shape on this rank of each batch input that is divided into micro-batches.
        copies: copies of masters in the compute dtype, by the path of the master.
        gradients: tensors that store gradients on disk, by the path of the parameter.
        skip: names of passes to leave out, for finding faults.
        slots: the transforms that declare slots, by the name of the slot.
        known: a cache for facts that passes find about programs of this step.
        temporaries: returns the peak bytes inside a call of a subgraph beyond its inputs and outputs; the same on every
            machine.
    """

    zero: Zero
    num_micro: int = 1
    batch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    copies: Mapping[str, Leaf] = field(default_factory=dict)
    gradients: Mapping[str, Leaf] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    slots: Mapping[str, Transform] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)
    temporaries: Callable[[Function], int] = lambda _: 0


class PassInput(NamedTuple):
    """What decides whether a pass runs, and with which options.

    Attributes:
        made: the programs so far; the last one is the program that the pass would rewrite.
        context: what the step requires.
        chosen: a value for every option that the step leaves open.
    """

    made: Made
    context: PassContext
    chosen: Options

    @property
    def program(self) -> Program:
        return next(reversed(self.made.values()))


def _if(wanted: Any) -> Wanted:
    return True if wanted else None


def fuse(at: PassInput) -> Wanted:
    """Training steps: without gradients there is no vjp to fuse."""
    return _if(at.program.update is not None)


def copies(at: PassInput) -> ComputeCopies | None:
    """Steps whose state has copies of masters in the compute dtype."""
    return ComputeCopies(tuple(at.context.copies), at.context.copies) if at.context.copies else None


def remat(at: PassInput) -> RematOptions | None:
    """Training steps, unless their policy recomputes whole blocks."""
    if at.program.update is None:
        return None
    return remat_options(at.program, at.chosen.remat, at.context.known, at.context.zero)


def dim_sharding(at: PassInput) -> DimShardings | None:
    """Steps with tensor, sequence or expert parallelism."""
    return DimShardings(at.context.zero) if at.context.zero.dim_shardings else None


def split_backward(at: PassInput) -> Wanted:
    """Pipelines whose schedule has weight actions."""
    return _if(splits_backward(at.program))


def accumulate(at: PassInput) -> AccumulateOptions | None:
    """Steps with several micro-batches."""
    return AccumulateOptions(at.context.num_micro, at.context.batch) if at.context.num_micro > 1 else None


def shard(at: PassInput) -> ShardOptions | None:
    """Steps whose batch or computation is sharded over an axis of the mesh."""
    zero, chosen = at.context.zero, at.chosen
    if not zero.batch_axes and not zero.dim_shardings:
        return None
    on_device = (x.path for x in at.program.leaves.values() if x.layout.tier == "device")
    return ShardOptions(zero, chosen.full_grads, chosen.secondary_shard, tuple(on_device) if chosen.cast_once else ())


def compress(at: PassInput) -> Encoding | None:
    """Steps with `compress`; with `compress("auto")`, if a format was chosen for any axis."""
    formats = tuple(x for x in at.chosen.wire if x.params or x.grads)
    spec = find(at.program.transforms, Compress)
    wanted = formats or (spec is not None and not spec.auto)
    return Encoding(at.context.zero, formats) if wanted else None


def partition_update(at: PassInput) -> tuple[int, ...] | None:
    """Training steps. The options are, for each tensor of the state, the index of its tier among the tiers in use: host
    and disk give the same partition, so programs that differ only in that share it."""
    if at.program.update is None:
        return None
    numbers = [TIERS.index(leaf.layout.tier) for leaf in at.program.leaves.values()]
    return tuple(map(sorted({*numbers}).index, numbers))


def deal(at: PassInput) -> Wanted:
    """Updates that gather whole matrices, as Muon's."""
    return _if(gathers(at.program))


def gradients(at: PassInput) -> GradientLeaves | None:
    """Steps that store gradients on disk."""
    return GradientLeaves(tuple(at.context.gradients.values())) if at.context.gradients else None


def speculate(at: PassInput) -> tuple[str, ...] | None:
    """Steps for which speculative updates were chosen. The options are the tiers whose state has them."""
    return at.chosen.speculative or None


def hoist_updates(at: PassInput) -> Wanted:
    """Steps that assign state."""
    return _if(at.program.assigns)


def stages(at: PassInput) -> Stage | None:
    """Pipelines with several stages."""
    return Stage(at.chosen.stage, at.context.known) if spec_of(at.program) is not None else None


def tiers(at: PassInput) -> UpdatePlacement | None:
    """Steps with `offload`."""
    return update_placement(at) if find(at.program.transforms, Offload) else None


def update_placement(at: PassInput) -> UpdatePlacement:
    """Returns where the update runs and where gradients wait, for the program whose update was partitioned."""
    program, leaves, on_disk = at.made["gradients"], at.context.gradients, dict[str, str]()
    if leaves:
        waits, grads = offload.gradients_that_wait(program), program.grads
        on_disk = {grads[param]: leaf.path for param, leaf in leaves.items() if grads.get(param) in waits}
    on_device = offload.updated_on_device(program, at.chosen.host_share)
    waiting = offload.waiting_on_host(program, on_device, at.chosen.grads).difference(on_disk)
    return UpdatePlacement(on_device, waiting, tuple(on_disk.items()))


def overlap(at: PassInput) -> ScheduleOptions | None:
    """Programs that start transfers."""
    return at.chosen.order if any(op.op in STARTS for op, _ in at.program.walk()) else None


def redundant(at: PassInput) -> Wanted:
    """Steps with `redundant` that assign state."""
    return _if(at.program.assigns and replicas_of(at.program))


def rename(at: PassInput) -> Wanted:
    """Programs in which a value has the name of a subgraph."""
    return _if(not at.program.values_by_name.keys().isdisjoint(at.program.functions))


def pool(at: PassInput) -> Temporaries:
    """Every program."""
    return Temporaries(at.context.temporaries)


def batch(at: PassInput) -> Wanted:
    """Devices on which each op is a kernel launch: all but CPUs."""
    return _if(at.program.mesh.device_type != "cpu")


def device_waits(at: PassInput) -> Wanted:
    """Meshes whose devices have a memory of their own."""
    return _if(not at.program.mesh.unified_memory)
