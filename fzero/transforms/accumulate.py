"""Accumulates gradients over micro-batches, and runs the optimizer once. Acts on the program.

The lines of loss and gradients become the body of a loop over micro-batches, or, vertically, each of them is repeated
for every micro-batch before the next. Sums and gradients are added up in the dtype they are reduced in, in the order of
the micro-batches, and the update reads the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fzero.arguments import accepts, count, flag, keywords, predicate, shown
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.layout import Leaf
from fzero.step import EvalStep
from fzero.transforms.base import Transform, applied
from fzero.transforms.shard import Where


@dataclass(frozen=True)
class Accumulate(Transform):
    num_micro_batches: int = 1
    vertical: bool = False
    whole: Where | None = None
    order: ClassVar[int] = 30
    name: ClassVar[str] = "accumulate"

    def __str__(self) -> str:
        whole = "" if self.whole is None else f", whole={getattr(self.whole, '__name__', repr(self.whole))}"
        return (
            f"accumulate(num_micro_batches={self.num_micro_batches}{', vertical=True' if self.vertical else ''}{whole})"
        )

    def idle(self, step: EvalStep) -> str | None:
        return (
            "a batch is cut so that gradients add up, and an evaluation has none: call it with each part of the batch"
        )

    def cuts(self, leaf: Leaf) -> bool:
        """Whether a leaf of the batch is cut: any that has a dim 0 and that `whole` does not accept."""
        if not leaf.shape:
            return False
        return self.whole is None or not accepts(self.name, "whole", self.whole, leaf.path, leaf.meta)

    def micro_shapes(self, leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
        """The shapes of the leaves of a rank's batch in one micro-batch.

        Raises:
            FzeroValueError: leaves that are cut and have another number of rows than the others, or one that cannot be
                cut in so many parts.
        """
        num, cut = self.num_micro_batches, [leaf for leaf in leaves if self.num_micro_batches > 1 and self.cuts(leaf)]
        rows = Counter(leaf.shape[0] for leaf in cut)
        usual = max(rows, key=lambda n: (rows[n], n), default=0)
        if odd := [
            f"{leaf.path} {list(leaf.shape)}: other leaves have {usual} rows" for leaf in cut if leaf.shape[0] != usual
        ]:
            fix = (
                f"say which leaves every micro-batch gets whole: fz.accumulate({num}, whole=lambda path, leaf: path == "
                f"{odd[0].split(' ')[0]!r})"
            )
            raise FzeroValueError(
                self.name,
                "the leaves of a batch have different numbers of rows: which of them are rows of the batch?",
                odd,
                fix,
            )
        if wrong := [
            f"{leaf.path} {list(leaf.shape)}: dim 0 of {leaf.shape[0]} is not a multiple of {num}"
            for leaf in cut
            if leaf.shape[0] % num
        ]:
            fix = "choose a batch that is a multiple of ranks x micro-batches"
            raise FzeroValueError(
                self.name, f"the batch of a rank does not divide into {num} micro-batches", wrong, fix
            )
        return [(leaf.shape[0] // num, *leaf.shape[1:]) if leaf in cut else leaf.shape for leaf in leaves]


@keywords
def accumulate(
    step: Any = None, num_micro_batches: int | None = None, *, vertical: bool = False, whole: Where | None = None
) -> Any:
    """Cuts each rank's batch into `num_micro_batches` along dim 0 and runs them one after the other.

    Equal to the untransformed step up to the order of summation. A mean is the mean over the whole batch, a `weighted`
    loss is divided by the whole count, and draws with the step's key equal those of the whole batch. What combines rows
    inside the loss sees those of one micro-batch: batch statistics, and a hook or `torch.autograd.Function` whose
    backward combines rows, such as clipping by norm (docs/losses.md). `vertical` changes when a line runs and not what
    it computes: on one process the same bits.

    Args:
        step: a step, or the number when called without one: `accumulate(4)`.
        num_micro_batches: at least 1; must divide dim 0 of the batch leaves, which is the same for all of them. 0-dim
            leaves go to each micro-batch whole.
        vertical: all micro-batches pass through a block before the next block begins. Its parameters are gathered, and
            fetched from the host or from disk, once for all of them: what `offload("cpu", "params")` wants, and
            `shard_params` over slow links.
        whole: predicate `(path, leaf)` of the batch leaves that go to each micro-batch whole, though they have a dim 0:
            class weights, position ids, a mask that all rows share. `leaf` is a meta tensor.

    Communication: with whole gradients (`data_parallel`, `shard_opt_state`) they are reduced once a step; with
        `shard_grads` and `shard_params` once a micro-batch, so that no whole gradient outlives its block. Vertically
        once a step whatever the stage, as the last micro-batch leaves the block, and parameters travel as often as
        without `accumulate`.
    Memory: activations of one micro-batch; the accumulated gradients, sharded or whole. Vertical: block inputs and
        saved activations of all micro-batches (`remat("full")` keeps only the inputs), temporaries of one. Whole
        gradients of two blocks, a sum and a summand. A parameter that several blocks share has one gradient per block
        and micro-batch.

    Raises:
        FzeroValueError: no number, or one below 1; when the program is built, a batch that it does not divide, or whose
            leaves have different numbers of rows.
        FzeroTypeError: a `whole` that is not a function.
        TransformError: a step of `eval_step`, which has no micro-batches.

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
        what = f"cannot cut a batch into {shown(num_micro_batches)} micro-batches"
        raise FzeroValueError("accumulate", what, problems, fix)
    if problems := flag("vertical", vertical):
        raise FzeroValueError("accumulate", "invalid arguments", problems, "e.g. fz.accumulate(4, vertical=True)")
    if problems := predicate("whole", whole):
        fix = "e.g. whole=lambda path, leaf: 'class_weights' in path"
        raise FzeroTypeError("accumulate", "invalid arguments", problems, fix)
    return applied(Accumulate(num_micro_batches, vertical, whole), step)
