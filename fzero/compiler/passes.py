"""Lists the passes that turn a recorded program into a finished one, in order.

    recorded program -- fuse, copies --> base program -- remat, dim_sharding, split_backward, accumulate, shard,
    compress, partition_update --> ops in the base program's order

    ops in the base program's order -- deal, gradients, speculate, hoist_updates, stages, tiers, overlap, redundant,
    rename, pool, batch, device_waits --> finished program

Every optional feature is carried out by a pass: a plain function, whose docstring states what must hold before it.
pass_options.py decides for each pass whether it runs, and with which options. Training steps and evaluations go through
the same list, always by way of pass_cache.py. The chosen program is verified when it is finished. If it violates a
rule, it is verified after every pass, and the error names the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

# This module imports every pass, because the list of passes below is the only place where they are named: a pass is a
# plain function in a file of its own, and does not register itself.
from fzero.compiler import (
    batched_ops,
    buffer_allocation,
    device_waits,
    fuse_last_block,
    hoist_updates,
    name_collisions,
    overlap,
    pass_invariants,
    pass_options,
)
from fzero.compiler.pass_options import PassInput
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import BUG, verify
from fzero.sharding.layout import in_slot
from fzero.transforms import (
    accumulate,
    compress,
    dim_sharding,
    offload,
    partition_update_pass,
    pipeline,
    pipeline_pass,
    redundant,
    remat,
    round_robin_pass,
    speculate_pass,
    zero_pass,
)
from fzero.transforms.transform import Transform

FIRST = "trace"
"""The name of the recorded program, which the first pass follows."""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Pass:
    """A rewrite of programs, and what decides whether it runs.

    Attributes:
        name: the name of the pass, and of the program that it returns.
        rewrite: a function `(program) -> program`, or `(program, options) -> program` if the pass has options.
        options: a function that returns the options of the rewrite: `True` for a pass that has none, and None if the
            pass has nothing to do (fzero/compiler/pass_options.py). Programs are cached by their options, which are
            therefore hashable.
        after: for a transform's own rewrite, the pass that it directly follows; the others are in order.
        before: the rules of programs up to this pass, in addition to those of every program; raises VerifyError.
        behind: the same, from this pass on.
        needed: the reason why a program without it would be wrong; "" if it may be skipped.
        own: whether it belongs to this package; otherwise a violation is a bug of whoever wrote it.
    """

    name: str
    rewrite: Callable[..., Program]
    options: Callable[[PassInput], Hashable]
    after: str = ""
    before: Callable[[Program], Any] = _nothing
    behind: Callable[[Program], Any] = _nothing
    needed: str = ""
    own: bool = True

    def __call__(self, program: Program, options: Hashable) -> Program:
        return self.rewrite(program) if options is True else self.rewrite(program, options)


PASSES = (
    Pass("fuse", fuse_last_block.rewrite, pass_options.fuse),
    Pass(
        "copies",
        offload.add_copies,
        pass_options.copies,
        needed="the state has copies of masters in the dtype of compute, which the step reads and writes",
    ),
    Pass("remat", remat.rewrite, pass_options.remat),
    Pass(
        "dim_sharding",
        dim_sharding.rewrite,
        pass_options.dim_sharding,
        needed="subgraphs would read unsharded parameters, of which a rank has shards",
    ),
    Pass(
        "split_backward",
        pipeline.split_backward,
        pass_options.split_backward,
        needed="the schedule has actions that compute only gradients of parameters",
    ),
    Pass(
        "accumulate",
        accumulate.rewrite,
        pass_options.accumulate,
        needed="the loss was traced with one of the micro-batches that the batch is split into",
    ),
    Pass("shard", zero_pass.rewrite, pass_options.shard, needed="without it every rank would train independently"),
    Pass(
        "compress",
        compress.rewrite,
        pass_options.compress,
        needed="values would travel in more bits than the step asks for",
    ),
    Pass(
        "partition_update",
        partition_update_pass.rewrite,
        pass_options.partition_update,
        behind=pass_invariants.update_is_partitioned,
        needed="an update is run in functions",
    ),
    Pass("deal", round_robin_pass.rewrite, pass_options.deal),
    Pass(
        "gradients",
        offload.with_gradient_leaves,
        pass_options.gradients,
        needed="gradients that wait on disk need tensors there",
    ),
    Pass("speculate", speculate_pass.rewrite, pass_options.speculate),
    Pass("hoist_updates", hoist_updates.rewrite, pass_options.hoist_updates),
    Pass("stages", pipeline_pass.project, pass_options.stages, needed="a stage has only its own tensors"),
    Pass(
        "tiers",
        offload.rewrite,
        pass_options.tiers,
        before=pass_invariants.on_device,
        needed="nothing would be copied to the tier on which it is read",
    ),
    Pass("overlap", overlap.rewrite, pass_options.overlap),
    Pass(
        "redundant",
        redundant.rewrite,
        pass_options.redundant,
        needed="no rank would hold a replica of another rank's shard of the state",
    ),
    Pass(
        "rename",
        name_collisions.rewrite,
        pass_options.rename,
        needed="a tensor would hide the subgraph of the same name",
    ),
    Pass(
        "pool",
        buffer_allocation.rewrite,
        pass_options.pool,
        behind=pass_invariants.placed,
        needed="communicated values would have no buffers",
    ),
    Pass("batch", batched_ops.rewrite, pass_options.batch),
    Pass("device_waits", device_waits.rewrite, pass_options.device_waits),
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
    _check_skipped(passes, skip)
    return tuple(passes)


def _check_skipped(passes: Sequence[Pass], skip: Collection[str]) -> None:
    """Raises FzeroValueError if a pass to leave out does not exist or is needed."""
    known = {x.name: x.needed for x in passes}
    if problems := [f"{name}: {known.get(name, 'no such pass')}" for name in sorted(skip) if known.get(name, "?")]:
        able = ", ".join(name for name, why in known.items() if not why)
        raise FzeroValueError("lower", "passes cannot be skipped", problems, f"one of {able} can be")


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

    def rewrite(program: Program, own_slots: tuple[str, ...]) -> Program:
        return _rewritten(transform, program, own_slots)

    def own_slots(at: PassInput) -> tuple[str, ...]:
        return tuple(slot for slot, by in at.context.slots.items() if by == transform)

    return Pass(name, rewrite, own_slots, transform.after, needed=needed, own=False)


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
