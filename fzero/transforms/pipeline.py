"""Divides blocks into stages on the ranks along a mesh axis, which send micro-batches from one to the next: pipeline.

Acts on the program, in transforms/pipeline_pass.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fzero._utils.arguments import keywords
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.sharding.layout import Leaf, Only
from fzero.step import EvalStep
from fzero.transforms.fp8 import Fp8
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.offload import Offload
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.redundant import Redundant
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Parallel

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
GATHERS = ("step", "micro")
UNIT = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")
"""An action in a user's schedule: forward, backward or weights; the micro-batch; the chunk."""
_NOT_YET = (Fp8, Offload, Hierarchical)


@dataclass(frozen=True)
class Pipeline(Transform):
    """The configuration of `pipeline`. `leaves`: the stage of each parameter, by its path, once it is known."""

    axis: str = "pipe"
    stages: tuple[int, ...] | None = None
    schedule: str | tuple[tuple[str, ...], ...] = "1f1b"
    chunks: int = 1
    gather: str = "step"
    # Not part of the hash, because a dict has none. Specs with different stages are still unequal.
    leaves: Mapping[str, int] | None = field(default=None, hash=False)
    order: ClassVar[int] = 60
    name: ClassVar[str] = "pipeline"

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Parallel) and self.axis in other.axes:
            return f"along {self.axis!r} every rank has the same samples: let {other.name} name another axis"
        if isinstance(other, Redundant) and other.axis == self.axis:
            return (
                f"along {self.axis!r} ranks have different parameters: let "
                f"{other.name} name an axis that shards parameters"
            )
        if isinstance(other, _NOT_YET):
            return f"{other.name} does not support parameters that a rank does not have"
        if isinstance(other, MixedPrecision) and other.watch:
            return "statistics of all blocks are one value, and a stage has only its own blocks"
        return super().conflict(other)

    def idle(self, step: EvalStep) -> str | None:
        return "its stages pass on the micro-batches of a training step"

    @property
    def has_weights(self) -> bool:
        """Whether the schedule has separate actions for the gradients of parameters."""
        if isinstance(self.schedule, str):
            return self.schedule == "zb"
        return any(unit.startswith("W") for order in self.schedule for unit in order)

    def only(self, leaf: Leaf) -> Only | None:
        """The index along the axis of the rank that has a parameter; None if all ranks have it."""
        if self.leaves is None or self.stages is None:
            return None
        # Stage s is on rank s modulo the number of ranks, which is the number of stages divided by those per rank.
        return Only(self.axis, self.leaves[leaf.path] % (len(self.stages) // self.chunks))

    def __str__(self) -> str:
        stages = "" if self.stages is None else f", stages={[*self.stages]}"
        schedule = self.schedule if isinstance(self.schedule, str) else [[*order] for order in self.schedule]
        chunks = f", chunks={self.chunks}" if self.chunks > 1 else ""
        gather = f", gather={self.gather!r}" if self.gather != "step" else ""
        return f"{self.name}(axis={self.axis!r}{stages}, schedule={schedule!r}{chunks}{gather})"


@keywords
def pipeline(
    step: Any = None,
    *,
    axis: str = "pipe",
    stages: Sequence[int] | None = None,
    schedule: str | Sequence[Sequence[str]] = "1f1b",
    chunks: int = 1,
    gather: str = "step",
) -> Any:
    """Divides the blocks of a step among the ranks along `axis`: each rank computes its own blocks and sends their
    outputs to the next rank, one micro-batch at a time.

    It requires `accumulate(m)` for the micro-batches, which then run in the order of `schedule`. The result equals that
    of the step with only `accumulate(m, schedule="layerwise")`: in fp32 the same bits. A rank has only the parameters
    and optimizer state of its own stages. A parameter that several stages read, such as a tied embedding, belongs to
    the first of them. Every rank along `axis` gets the same samples, and returns the same metrics. The stages are
    chosen for the `batch` given to `fz.compile`, or otherwise at the first step: until then every rank has the whole
    state.

    Args:
        step: a training step; without one a transform is returned.
        axis: the mesh axis.
        stages: the number of consecutive blocks in each stage: `[7, 9]`. By default, stages are as equal as possible in
            the FLOPs of their matrix products, including the code before the first and after the last block.
        schedule: "1f1b": a stage begins the backward of a micro-batch as soon as it can. "gpipe": all forwards come
            first. "interleaved": 1F1B with several stages (`chunks`) per rank. "zb" (zero bubble): 1F1B whose backwards
            compute only the gradients that other stages wait for; the gradients of parameters fill the bubble. Or a
            table: for each rank the order of its actions, `[["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]`;
            `F0.1` is the forward of micro-batch 0 on chunk 1. If the table has actions such as `W0`, gradients of
            parameters are computed in separate actions.
        chunks: the number of stages per rank. Stage s is on rank s mod p.
        gather: when parameters that `shard_params` shards are gathered. "step": once per step; they stay unsharded
            until their last micro-batch. "micro": for each forward and backward of a micro-batch.

    Communication: with p stages, for each micro-batch the values that pass between two stages, in forward and backward;
        once per step, one number for each block. A parameter that several stages read is sent to the other stages once
        per step, and its gradients are sent back once per micro-batch. `gather="micro"` gathers 2 m times what "step"
        gathers once. Ranks wait for (p-1)/(m+p-1) of a step if stages are equal, (p-1)/(m*chunks+p-1) interleaved,
        which sends `chunks` times as often; with "zb" (p-1)/(3m+p-1) if forward, backward and weights take equally
        long.
    Memory: the parameters, gradients and optimizer state of a stage. "1f1b": activations of at most p - s micro-batches
        on stage s. "gpipe": of all micro-batches. "zb": of p, together with the values of their backwards that the
        weight gradients need. With `shard_params`: all parameters of a stage unsharded, or with `gather="micro"` those
        of two blocks.

    Raises:
        FzeroTypeError: `axis` is not a name; `stages` are not whole numbers.
        FzeroValueError: an unknown schedule or `gather`; `chunks` that do not fit the schedule; a table that does not
            fit the step or whose ranks wait for each other. When the program is built: a step without `accumulate`, or
            with mutable tensors; more stages than blocks, or counts that do not add up; `gather="micro"` without
            sharded parameters. Also a backward that reads values of an earlier stage's backward, and an update that
            reads parameters of two stages at once.
        TransformError: a parallel transform or `redundant` over `axis`; `offload`, `hierarchical`, `fp8`, or a
            `mixed_precision` that watches blocks; an evaluation.
        VerifyError: stages wait for each other.

    Papers: Huang et al., GPipe, 2019; Narayanan et al., PipeDream: generalized pipeline parallelism for DNN training,
        2019; Qi et al., Zero Bubble Pipeline Parallelism, 2023.

    Example:
        >>> import torch, fzero as fz
        >>> layer = fz.block(lambda w, x: torch.tanh(x @ w))
        >>> def loss(params, x):
        ...     for w in params:
        ...         x = layer(w, x)
        ...     return x.square().mean()
        >>> step = fz.compose(fz.accumulate(4), fz.pipeline())(fz.train_step(loss, fz.optim.sgd(0.1)))
        >>> params, x = [torch.empty(8, 8, device="meta")] * 4, torch.empty(16, 8, device="meta")
        >>> lowered = fz.lower(step, fz.AbstractMesh(pipe=2), [x.clone() for x in params], x)
        >>> [len(program.leaves) for program in lowered.programs]  # two of the weights, the step and the key
        [4, 4]
    """
    problems = [] if isinstance(axis, str) and axis.isidentifier() else [f"axis={axis!r}: the name of a mesh axis"]
    listed = isinstance(stages, Sequence) and not isinstance(stages, str)
    if stages is not None and not (listed and stages and all(type(n) is int and n > 0 for n in stages)):
        problems.append(f"stages={stages!r}: a number of blocks, at least 1, for each stage")
    if type(chunks) is not int or chunks < 1:
        problems.append(f"chunks={chunks!r}: the number of stages of a rank, at least 1")
    if problems:
        raise FzeroTypeError("pipeline", "invalid arguments", problems, "e.g. fz.pipeline(axis='pipe', stages=[7, 9])")
    if gather not in GATHERS:
        raise FzeroValueError("pipeline", f"unknown gather {gather!r}", fix=f"one of {', '.join(map(repr, GATHERS))}")
    order = schedule if isinstance(schedule, str) else _table(schedule)
    if isinstance(order, str):
        if order not in SCHEDULES:
            fix = f"one of {', '.join(map(repr, SCHEDULES))}"
            raise FzeroValueError("pipeline", f"unknown schedule {schedule!r}", fix=fix)
        if (order == "interleaved") != (chunks > 1):
            fix = "schedule='interleaved' with chunks=2 or more, any other with 1"
            raise FzeroValueError("pipeline", f"schedule={order!r} with chunks={chunks}", fix=fix)
    return applied(Pipeline(axis, None if stages is None else tuple(stages), order, chunks, gather), step)


def _table(schedule: Any) -> tuple[tuple[str, ...], ...]:
    """Checks a user's table of actions and returns it as tuples."""
    lists = isinstance(schedule, Sequence) and all(isinstance(x, Sequence) and not isinstance(x, str) for x in schedule)
    problems = [f"rank {r}: {u!r}" for r, x in enumerate(schedule) for u in x if not _is_unit(u)] if lists else []
    if problems or not lists:
        fix = "e.g. [['F0', 'F1', 'B0', 'B1'], ['F0', 'B0', 'F1', 'B1']]; F0.1 is of the next chunk"
        raise FzeroTypeError("pipeline", "a schedule is a name, or a list of actions for each rank", problems[:5], fix)
    return tuple(tuple(order) for order in schedule)


def _is_unit(text: Any) -> bool:
    return isinstance(text, str) and UNIT.fullmatch(text) is not None
