"""Lists the passes that turn a recorded program into a finished one, in order.

    recorded program -- fuse, copies --> base program -- remat, dim_sharding, split_backward, accumulate, shard,
    compress, partition_update --> ops in the base program's order

    ops in the base program's order -- deal, gradients, speculate, hoist_updates, stages, tiers, overlap, redundant,
    rename, pool, batch, device_waits --> finished program

Every optional feature is carried out by a pass. A pass declares when it is wanted, which part of the options
(options.py) concerns it, and which rules hold before and after it. A pass that is not wanted does not run. Training
steps and evaluations go through the same list, always by way of fzero/compiler/pass_cache.py. The chosen program is
verified after every pass; the error for a violation names the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# This module imports every pass, because the list of passes below is the only place where they are named: a pass is a
# plain function in a file of its own, and does not register itself.
from fzero.compiler import batched_ops as batch
from fzero.compiler import buffer_allocation, fuse_last_block, pass_invariants
from fzero.compiler.device_waits import mark
from fzero.compiler.hoist_updates import hoist_updates
from fzero.compiler.name_collisions import rename_functions
from fzero.compiler.options import Options
from fzero.compiler.overlap import overlap
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.ir.ops import STARTS
from fzero.ir.pool_verifier import check
from fzero.ir.program import Function, Instruction, Program
from fzero.ir.verifier import BUG, verify
from fzero.sharding.layout import TIERS, Leaf, in_slot
from fzero.transforms import (
    accumulate,
    compress_pass,
    dim_sharding_pass,
    offload_analysis,
    offload_pass,
    pipeline_pass,
    redundant,
    remat,
    speculate_pass,
    split_backward_pass,
    zero_pass,
)
from fzero.transforms import compute_copies_pass as copies
from fzero.transforms.compress import Compress
from fzero.transforms.offload import Offload
from fzero.transforms.partition_update_pass import partition_update
from fzero.transforms.round_robin_pass import deal, gathers
from fzero.transforms.transform import Transform, find
from fzero.transforms.zero_placement import Zero

FIRST = "trace"
"""The name of the recorded program, which the first pass follows."""
Made = dict[str, Program]
"""The intermediate programs, in order, each under the name of the pass that it comes after, whether or not that pass
ran."""


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


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Pass:
    """A program rewrite with its preconditions and options.

    Attributes:
        name: the name of the pass, and of the program that it returns.
        rewrite: returns the rewritten program, for an option.
        after: for a transform's own rewrite, the pass that it directly follows; the others are in order.
        wanted: whether it has something to do to a program, for an option.
        option: the part of the options that it carries out. Programs are cached by their options.
        before: the rules of programs up to this pass, in addition to those of every program; raises VerifyError.
        behind: the same, from this pass on.
        decision: what a plan says about the part of the options that it carries out: the fields of a `PlanDecision`.
        needed: the reason why a program without it would be wrong; "" if it may be skipped.
        own: whether it belongs to this package; otherwise a violation is a bug of whoever wrote it.
    """

    name: str
    rewrite: Callable[[Program, PassContext, Any], Program]
    after: str = ""
    wanted: Callable[[Program, PassContext, Any], Any] = lambda program, context, option: True
    option: Callable[[Made, PassContext, Options], Hashable] = _nothing
    before: Callable[[Program], Any] = _nothing
    behind: Callable[[Program], Any] = _nothing
    decision: Callable[[Options], tuple[str, str, str] | None] = _nothing
    needed: str = ""
    own: bool = True


def _now(made: Made) -> Program:
    return next(reversed(made.values()))


def _trains(program: Program, *_: Any) -> bool:
    return program.update is not None


def _tiers_of_leaves(made: Made, *_: Any) -> tuple[int, ...]:
    """Returns, for each tensor of the state, the index of its tier among the tiers in use: an update is partitioned in
    the same way whichever tiers those are."""
    numbers = [TIERS.index(leaf.layout.tier) for leaf in _now(made).leaves.values()]
    # The result is a cache key. Host and disk give the same partition, so programs that differ only in that share it.
    present = sorted({*numbers})
    return tuple(map(present.index, numbers))


def _cast_once(made: Made, options: Options) -> tuple[str, ...]:
    """Returns the parameters that may be cast once for all micro-batches."""
    leaves = _now(made).leaves.values()
    return tuple(x.path for x in leaves if x.layout.tier == "device") if options.cast_once else ()


class UpdatePlacement(NamedTuple):
    """The consequences of the options for a program whose update has been partitioned.

    Attributes:
        on_device: the offloaded tensors that the device updates.
        waiting: the gradients that are held in host memory.
        on_disk: the gradients that are held on disk, each with the tensor that stores it.
    """

    on_device: frozenset[str]
    waiting: frozenset[str]
    on_disk: tuple[tuple[str, str], ...]


def update_placement(made: Made, context: PassContext, options: Options) -> UpdatePlacement:
    """Returns the consequences of the options for the program whose update was partitioned."""
    program, on_disk = made["gradients"], dict[str, str]()
    if context.gradients:
        waits, grads = offload_analysis.gradients_that_wait(program), program.grads
        on_disk = {grads[param]: leaf.path for param, leaf in context.gradients.items() if grads.get(param) in waits}
    on_device = offload_analysis.updated_on_device(program, options.host_share)
    waiting = offload_analysis.waiting_on_host(program, on_device, options.grads).difference(on_disk)
    return UpdatePlacement(on_device, waiting, tuple(on_disk.items()))


PASSES = (
    Pass("fuse", lambda program, *_: fuse_last_block.rewrite(program), wanted=_trains),
    Pass(
        "copies",
        lambda program, context, _: copies.add_copies(program, context.copies),
        wanted=lambda program, context, _: context.copies,
        option=lambda made, context, options: tuple(context.copies),
        needed="the state has copies of masters in the dtype of compute, which the step reads and writes",
    ),
    Pass(
        "remat",
        lambda program, context, keeps: remat.rewrite(program, keeps.policy, context.known, context.zero),
        wanted=lambda program, context, keeps: _trains(program) and keeps is not None,
        option=lambda made, context, options: remat.keeps(_now(made), options.remat, context.known, context.zero),
    ),
    Pass(
        "dim_sharding",
        lambda program, context, _: dim_sharding_pass.rewrite(program, context.zero),
        wanted=lambda program, context, _: context.zero.dim_shardings,
        needed="subgraphs would read unsharded parameters, of which a rank has shards",
    ),
    Pass(
        "split_backward",
        lambda program, *_: split_backward_pass.rewrite(program),
        wanted=lambda program, *_: split_backward_pass.wanted(program),
        needed="the schedule has actions that compute only gradients of parameters",
    ),
    Pass(
        "accumulate",
        lambda program, context, _: accumulate.rewrite(program, context.num_micro, context.batch),
        wanted=lambda program, context, _: context.num_micro > 1,
        needed="the loss was traced with one of the micro-batches that the batch is split into",
    ),
    Pass(
        "shard",
        lambda program, context, option: zero_pass.rewrite(program, context.zero, *option),
        wanted=lambda program, context, _: context.zero.batch_axes or context.zero.dim_shardings,
        option=lambda made, context, options: (options.full_grads, options.secondary_shard, _cast_once(made, options)),
        needed="without it every rank would train independently",
    ),
    Pass(
        "compress",
        lambda program, context, wire: compress_pass.rewrite(program, context.zero, wire),
        wanted=lambda program, context, wire: wire or ((spec := find(program.transforms, Compress)) and not spec.auto),
        option=lambda made, context, options: tuple(x for x in options.wire if x.params or x.grads),
        needed="values would travel in more bits than the step asks for",
    ),
    Pass(
        "partition_update",
        lambda program, *_: partition_update(program),
        wanted=_trains,
        option=_tiers_of_leaves,
        behind=pass_invariants.update_is_partitioned,
        needed="an update is run in functions",
    ),
    Pass("deal", lambda program, *_: deal(program), wanted=lambda program, *_: gathers(program)),
    Pass(
        "gradients",
        lambda program, context, _: offload_pass.with_leaves(program, context.gradients.values()),
        wanted=lambda program, context, _: context.gradients,
        needed="gradients that wait on disk need tensors there",
    ),
    Pass(
        "speculate",
        lambda program, context, on: speculate_pass.rewrite(program, on),
        wanted=lambda program, context, on: on,
        option=lambda made, context, options: options.speculative,
        decision=speculate_pass.decision,
    ),
    Pass("hoist_updates", lambda program, *_: hoist_updates(program), wanted=lambda program, *_: program.assigns),
    Pass(
        "stages",
        lambda program, context, stage: pipeline_pass.project(program, stage, context.known),
        wanted=lambda program, *_: pipeline_pass.spec_of(program) is not None,
        option=lambda made, context, options: options.stage,
        needed="a stage has only its own tensors",
    ),
    Pass(
        "tiers",
        lambda program, context, option: offload_pass.rewrite(speculate_pass.with_old_values(program), *option),
        wanted=lambda program, context, _: find(program.transforms, Offload),
        option=update_placement,
        before=pass_invariants.on_device,
        needed="nothing would be copied to the tier on which it is read",
    ),
    Pass(
        "overlap",
        lambda program, context, order: overlap(program, order),
        wanted=lambda program, *_: any(op.op in STARTS for op, _ in program.walk()),
        option=lambda made, context, options: options.order,
    ),
    Pass(
        "redundant",
        lambda program, *_: redundant.rewrite(program),
        wanted=lambda program, *_: program.assigns and redundant.spec_of(program),
        needed="no rank would hold a replica of another rank's shard of the state",
    ),
    Pass(
        "rename",
        lambda program, *_: rename_functions(program),
        wanted=lambda program, *_: not program.values_by_name.keys().isdisjoint(program.functions),
        needed="a tensor would hide the subgraph of the same name",
    ),
    Pass(
        "pool",
        lambda program, context, _: buffer_allocation.place(program, context.temporaries),
        behind=lambda program: (pass_invariants.placed(program), check(program)),
        needed="communicated values would have no buffers",
    ),
    Pass("batch", lambda program, *_: batch.batched(program), wanted=lambda program, *_: batch.launches(program)),
    Pass("device_waits", lambda program, *_: mark(program), wanted=lambda program, *_: not program.mesh.unified_memory),
)
"""All passes of the package, in order. An evaluation has no update, so some of them have nothing to do there."""


def passes_of(transforms: Sequence[Any], skip: Collection[str] = ()) -> tuple[Pass, ...]:
    """Returns the passes of a step: those of the package, each followed by the rewrites of transforms that come after
    it.

    Args:
        transforms: the transforms of the step.
        skip: passes to leave out.

    Raises:
        TransformError: a transform names a pass that does not exist.
        FzeroValueError: a pass to leave out does not exist, or the program would be wrong without it.
    """
    passes = [*PASSES]
    # a name that is already taken is extended by the transform's arguments
    taken = [FIRST, *(x.name for x in PASSES), *(t.name for t in transforms)]
    own = (t for t in transforms if type(t).rewrite is not Transform.rewrite)
    left = [_added(t, t.name if taken.count(t.name) == 1 else str(t)) for t in own]
    while left:
        names = [FIRST, *(x.name for x in passes)]
        guest = next((x for x in left if x.after in names), None)
        if guest is None:
            problems = [f"{x.name}: after {x.after!r}, which is not a pass of this step" for x in left]
            raise TransformError("lower", "unknown passes", problems, f"name one of {', '.join(names)}")
        at, behind = names.index(guest.after), {guest.after}
        while at < len(passes) and passes[at].after in behind:  # keeps the order of the step's transforms
            # Inserted after all rewrites that come after the same pass, so that rewrites run in the order in which the
            # transforms were applied.
            behind.add(passes[at].name)
            at += 1
        passes.insert(at, guest)
        left.remove(guest)
    known = {x.name: x.needed for x in passes}
    if problems := [f"{name}: {known.get(name, 'no such pass')}" for name in sorted(skip) if known.get(name, "?")]:
        able = ", ".join(name for name, why in known.items() if not why)
        raise FzeroValueError("lower", "passes cannot be skipped", problems, f"one of {able} can be")
    return tuple(passes)


def check_after(passes: Sequence[Pass], at: int, program: Program, changed: bool = True) -> None:
    """Checks the program that the pass with this index returned. Even if the pass changed nothing, new rules may apply
    after it.

    Raises:
        VerifyError: naming the pass and the op.
    """
    try:
        if changed:
            verify(program)
        # Rules of a pass that is still to come hold up to it, and rules of a pass that has run hold from it on.
        for number, passed in enumerate(passes):
            (passed.behind if number <= at else passed.before)(program)
    except VerifyError as error:
        name = passes[at].name if at >= 0 else FIRST
        text = f"{error}\nIt was found after the pass {name!r}."
        if at >= 0 and not passes[at].own:
            text = text.replace(BUG, f"the rewrite of {name!r} caused it: make the rewrite keep the rules")
        raise VerifyError(text) from None


def _added(transform: Transform, name: str) -> Pass:
    """Returns the pass for a transform that rewrites programs itself."""
    needed = f"it carries out {transform}: leave that out of the step instead"

    def rewrite(program: Program, context: PassContext, _: Any) -> Program:
        return _rewritten(transform, program, [slot for slot, by in context.slots.items() if by == transform])

    return Pass(name, rewrite, transform.after, needed=needed, own=False)


def _rewritten(transform: Transform, program: Program, own: Collection[str]) -> Program:
    """Returns the result of a transform's own rewrite. `own`: the names of its slots.

    Raises:
        TransformError: the rewrite changes nothing, and the transform gives no reason; or it writes a slot that is not
            its own.
    """
    made = transform.rewrite(program)
    wrong = (
        [repr(x) for x in made.instructions if not isinstance(x, Instruction)]
        if isinstance(made, Program)
        else [repr(made)]
    )
    if wrong:
        what = f"the rewrite of {transform} does not return a program of instructions"
        raise FzeroTypeError(transform.name, what, wrong, "e.g. return replace(program, instructions=tuple(ops))")
    made = _assigning(transform, program, made, own)
    # A transform that silently does nothing would make the user believe that it works.
    if made == program and transform.idle_in(program) is None:
        problem = f"{transform} on mesh {program.mesh}: its rewrite leaves the program of {program.name} unchanged"
        fix = "leave it out on this mesh; or return from its idle_in(program) the reason why it may change nothing"
        raise TransformError(transform.name, "does nothing to this program", [problem], fix)
    return made


def _assigning(transform: Transform, program: Program, made: Program, own: Collection[str]) -> Program:
    """Returns the program of a rewrite, extended by the assignments of the transform's slots that its ops write."""
    before, after = (Counter(w for op, _ in x.walk() for w in op.writes) for x in (program, made))
    # Counted and not compared as sets, because a rewrite may add a second write to a slot that was written before.
    new = [made.leaves[w] for w in after - before if w in made.leaves and in_slot(made.leaves[w])]
    if wrong := [leaf for leaf in new if leaf.role not in own]:
        what = f"the rewrite of {transform} writes slots that it did not declare"
        fix = f"declare {wrong[0].role!r} in the transform's slots, or leave it to the transform that does"
        raise TransformError(transform.name, what, map(str, wrong), fix)
    return replace(made, assigns=(*made.assigns, *(x.path for x in new if x.path not in made.assigns))) if new else made
