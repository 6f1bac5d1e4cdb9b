"""Accumulates gradients over micro-batches and runs the optimizer once per step. Acts on the program.

The ops of loss and gradients become the body of a loop over micro-batches. With the layerwise schedule, each op is
instead repeated for every micro-batch before the next op runs. Sums (such as the loss) and gradients are accumulated in
their reduction dtype, in the order of the micro-batches, and the optimizer update reads the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fzero._utils.arguments import accepts, accepts_none, count, keywords, predicate, shown
from fzero._utils.deprecation import keyword_aliases
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.sharding.layout import Leaf, torn_ties
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Where

MicroBatchSchedule = Literal["sequential", "layerwise"]
SCHEDULES = get_args(MicroBatchSchedule)


@dataclass(frozen=True)
class Accumulate(Transform):
    """The configuration of `accumulate`."""

    num_micro_batches: int = 1
    schedule: MicroBatchSchedule = "sequential"
    replicated: Where | None = None
    order: ClassVar[int] = 30
    name: ClassVar[str] = "accumulate"

    def __str__(self) -> str:
        schedule = "" if self.schedule == "sequential" else f", schedule={self.schedule!r}"
        where = self.replicated
        replicated = "" if where is None else f", replicated={getattr(where, '__name__', repr(where))}"
        return f"accumulate(num_micro_batches={self.num_micro_batches}{schedule}{replicated})"

    @property
    def layerwise(self) -> bool:
        return self.schedule == "layerwise"

    def idle(self, step: EvalStep) -> str | None:
        return (
            "a batch is split to accumulate gradients, and an evaluation has none: call it with each part of the batch"
        )

    def splits(self, leaf: Leaf) -> bool:
        """Whether a tensor of the batch is split into micro-batches: it is if it has a dim 0 and `replicated` does not
        accept it."""
        if not leaf.shape:
            return False
        where = self.replicated
        return where is None or not accepts(self.name, "replicated", where, leaf.path, leaf.meta)

    def check_replicated(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Checks `replicated` against the tensors of a batch.

        Raises:
            FzeroValueError: `replicated` accepts no tensor of the batch, or only some of the paths of a tied tensor.
        """
        if self.replicated is None:
            return
        paths, replicated = [x.path for x in leaves], [not self.splits(x) for x in leaves]
        if not any(replicated) and (missed := accepts_none("replicated", self.replicated, paths)):
            what, fix = (
                "all tensors of the batch are already split",
                "give a path as it is printed here, or leave `replicated` out",
            )
            raise FzeroValueError("accumulate", what, missed, fix)
        if torn := torn_ties(paths, tied, replicated, "replicated"):
            what = "entries of the batch are one tensor, and `replicated` matches only some of its paths"
            fix = "give x.clone() for the paths that are to be replicated"
            raise FzeroValueError("accumulate", what, torn, fix)

    def micro_shapes(self, leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
        """Returns the shapes that the tensors of a rank's batch have in one micro-batch.

        Raises:
            FzeroValueError: the tensors to be split differ in the size of dim 0, or that size is not a multiple of the
                number of micro-batches.
        """
        num, split = (
            self.num_micro_batches,
            [leaf for leaf in leaves if self.num_micro_batches > 1 and self.splits(leaf)],
        )
        rows = Counter(leaf.shape[0] for leaf in split)
        # The most frequent size counts as the batch dimension, so that the error blames the exceptions.
        usual = max(rows, key=lambda n: (rows[n], n), default=0)
        if odd := [
            f"{leaf.path} {list(leaf.shape)}: the others have {usual} samples"
            for leaf in split
            if leaf.shape[0] != usual
        ]:
            fix = (
                f"name the tensors that are the same for all micro-batches: fz.accumulate({num}, "
                f"replicated=lambda path, leaf: path == {odd[0].split(' ')[0]!r})"
            )
            raise FzeroValueError(
                self.name,
                "the tensors of a batch differ in dim 0: which of them have the batch dimension?",
                odd,
                fix,
            )
        if wrong := [
            f"{leaf.path} {list(leaf.shape)}: dim 0 of {leaf.shape[0]} is not a multiple of {num}"
            for leaf in split
            if leaf.shape[0] % num
        ]:
            fix = "choose a batch that is a multiple of ranks x micro-batches"
            raise FzeroValueError(
                self.name, f"the batch of a rank is not divisible into {num} micro-batches", wrong, fix
            )
        return [(leaf.shape[0] // num, *leaf.shape[1:]) if leaf in split else leaf.shape for leaf in leaves]


@keyword_aliases("fz.accumulate", vertical=("schedule", {True: "layerwise", False: "sequential"}), whole="replicated")
@keywords
def accumulate(
    step: Any = None,
    num_micro_batches: int | None = None,
    *,
    schedule: MicroBatchSchedule = "sequential",
    replicated: Where | None = None,
) -> Any:
    """Splits each rank's batch into `num_micro_batches` along dim 0 and accumulates their gradients.

    The result equals that of the untransformed step up to the order of summation. A mean is the mean over the whole
    batch, a `weighted` loss is divided by the count of the whole batch, and random numbers drawn with the step's key
    equal those drawn for the whole batch. Operations inside the loss that combine samples see only the samples of one
    micro-batch: batch statistics, and a hook or `torch.autograd.Function` whose backward combines samples, such as
    clipping by norm (docs/guides/losses-metrics.md). `schedule` changes the order of the operations but not what they
    compute: on one process the results are bitwise identical.

    Args:
        step: a step, or the number of micro-batches when called without a step: `accumulate(4)`.
        num_micro_batches: at least 1; must divide dim 0 of the batch tensors, which is the same for all of them. 0-dim
            tensors are passed to each micro-batch unchanged.
        schedule: "sequential" runs one micro-batch after another. "layerwise" (also called breadth-first) passes all
            micro-batches through a block before the next block starts, so that the block's parameters are gathered, or
            fetched from the host or from disk, once for all of them. Use it with `offload("cpu", "params")`, and with
            `shard_params` over slow links.
        replicated: predicate `(path, leaf)` that selects the batch tensors that have a dim 0 but are the same for all
            micro-batches: class weights, position ids, a mask shared by all samples. `leaf` is a meta tensor.

    Communication: gradients that are not sharded (`data_parallel`, `shard_opt_state`) are reduced once per step; with
        `shard_grads` and `shard_params` they are reduced once per micro-batch, so that no unsharded gradient outlives
        the backward of its block. With the layerwise schedule, gradients are reduced once per step at any ZeRO stage,
        when the last micro-batch leaves the block, and parameters are communicated as often as without `accumulate`.
    Memory: the activations of one micro-batch, and the accumulated gradients, sharded or unsharded. Layerwise: the
        block inputs and saved activations of all micro-batches (`remat("full")` keeps only the inputs), and the
        temporaries of one; the unsharded gradients of two blocks, an accumulated sum and the gradients that are added
        to it. A parameter that several blocks share has one gradient per block and micro-batch.

    Raises:
        FzeroValueError: `num_micro_batches` is missing or below 1; `schedule` is unknown; or, when the program is
            built, the batch is not divisible by `num_micro_batches`, or its tensors differ in the size of dim 0.
        FzeroTypeError: `replicated` is not a function.
        TransformError: the step comes from `eval_step`, which has no micro-batches.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*accumulate(4)(step).transforms)
        accumulate(num_micro_batches=4)
    """
    if num_micro_batches is None and not hasattr(step, "transforms"):
        step, num_micro_batches = None, step  # called as accumulate(4); a value that is no number is rejected below
    fix = "give a whole number of at least 1: fz.accumulate(4)"
    if num_micro_batches is None:
        raise FzeroValueError("accumulate", "num_micro_batches is missing", fix=fix)
    if problems := count("num_micro_batches", num_micro_batches):
        what = f"cannot split a batch into {shown(num_micro_batches)} micro-batches"
        raise FzeroValueError("accumulate", what, problems, fix)
    if schedule not in SCHEDULES:
        problems = [f"schedule={shown(schedule)}: must be one of {', '.join(map(repr, SCHEDULES))}"]
        fix = 'e.g. fz.accumulate(4, schedule="layerwise")'
        raise FzeroValueError("accumulate", "invalid arguments", problems, fix)
    if problems := predicate("replicated", replicated):
        fix = "e.g. replicated=lambda path, leaf: 'class_weights' in path"
        raise FzeroTypeError("accumulate", "invalid arguments", problems, fix)
    return applied(Accumulate(num_micro_batches, schedule, replicated), step)
