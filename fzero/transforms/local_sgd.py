"""Lets replicas train by themselves for many steps, and meets them by an outer optimizer. Acts on no program: the outer
step is a program of its own (runtime/outer.py)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fzero import tree
from fzero.arguments import count, keywords
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.layout import ANCHOR
from fzero.operators.quant_blocks import has_blocks
from fzero.optim.base import GradientTransformation
from fzero.optim.sgd import sgd
from fzero.precision.codes import GRADS
from fzero.program.ir import Program
from fzero.step import EvalStep, Step, train_step
from fzero.transforms.base import Transform, applied
from fzero.transforms.compress import compress
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.redundant import Redundant
from fzero.transforms.shard import data_parallel

OUTER = "outer"
"""The slot of the outer optimizer's state: a tree for each fragment, as the slot `ANCHOR` has."""


@dataclass(frozen=True)
class LocalSGD(Transform):
    axis: str = "replica"
    every: int = 100
    outer: GradientTransformation | None = None
    fragments: int = 1
    wire: str | None = "int4"
    order: ClassVar[int] = 58
    name: ClassVar[str] = "local_sgd"

    @property
    def optimizer(self) -> GradientTransformation:
        """The outer optimizer: by default that of the paper."""
        return sgd(0.7, momentum=0.9, nesterov=True) if self.outer is None else self.outer

    def slots(self, params: Any) -> Mapping[str, Any]:
        anchor = tree.map(lambda x: x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True), params)
        anchors = self._split(anchor)
        return {ANCHOR: anchors, OUTER: [self.optimizer.init(x) for x in anchors]}

    def _split(self, params: Any) -> list[Any]:
        """A tree for each fragment, None where a leaf belongs to another: leaves in their order, cut where the elements
        before them reach the next part of all."""
        flat, structure = tree.flatten(params)
        sizes = [x.numel() for x in flat]
        middles = [end - n // 2 for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        place = [middle * self.fragments // (sum(sizes) + 1) for middle in middles]
        return [
            tree.unflatten(structure, [x if at == i else None for x, at in zip(flat, place, strict=True)])
            for i in range(self.fragments)
        ]

    def outer_step(self, anchor: Any, replicas: int) -> Step:
        """The outer step of a fragment, of flat leaves: its parameters are the anchor, its batch those of a replica."""
        step = data_parallel(train_step(distance, self.optimizer, has_aux=True), axis=self.axis)
        coded = replicas > 1 and self.wire is not None and any(has_blocks(x.shape) for x in tree.leaves(anchor))
        return compress(step, params=None, grads=self.wire) if coded else step

    def due(self, step: int) -> list[int]:
        """The fragments that meet behind this step, counted from 1: each once in `every` steps, one after the other."""
        at = step % self.every or self.every
        return [i for i in range(self.fragments) if (i + 1) * self.every // self.fragments == at]

    def conflict(self, other: Transform) -> str | None:
        if self.axis in _axes(other):
            return f"replicas along {self.axis!r} have gradients of their own, and nothing is sharded or summed over it"
        if isinstance(other, Redundant):
            return "what a host keeps of another would be another replica's"
        if isinstance(other, Pipeline):
            return "the outer step is one of all parameters, and a stage has its own alone"
        if isinstance(other, MixedPrecision) and other.scaling is not None:
            return "each replica would skip other steps, by a loss scale of its own: use bf16"
        return super().conflict(other)

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation takes the parameters that this rank's replica has"

    def idle_in(self, program: Program) -> str | None:
        return "the outer step is a program of its own"

    def __str__(self) -> str:
        shown = f"axis={self.axis!r}, every={self.every}, fragments={self.fragments}, wire={self.wire!r}"
        return f"{self.name}({shown}{'' if self.outer is None else ', outer=...'})"


def distance(anchor: Any, params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared distance of parameters and their anchor, whose gradient by the anchor is anchor - params; and
    that of each parameter."""
    pairs = zip(tree.leaves(anchor), tree.leaves(params), strict=True)
    each = torch.stack([(a - x.to(a.dtype)).square().sum() / 2 for a, x in pairs])
    return each.sum(), each


def _elementwise(optimizer: GradientTransformation) -> bool:
    """Whether the updates of a matrix are those of flat parts of it, tried on a few numbers."""
    whole = torch.tensor([1e-3, -2.0, 3e3, 0.5, 4.0, -7e-4, 0.1, -60.0])

    def twice(values: torch.Tensor) -> torch.Tensor:
        params = {"w": values}
        state = optimizer.init(params)
        _, state = optimizer.update({"w": values.cos()}, state, params)
        return optimizer.update(params, state, params)[0]["w"].reshape(-1)

    try:
        return torch.equal(twice(whole.view(2, 4)), torch.cat([twice(x) for x in whole.split(4)]))
    except FzeroError:
        return False


def _axes(other: Transform) -> tuple[str, ...]:
    found = getattr(other, "axes", None) or getattr(other, "axis", None) or ()
    return (found,) if isinstance(found, str) else tuple(found)


@keywords
def local_sgd(
    step: Any = None,
    *,
    axis: str = "replica",
    every: int = 100,
    outer: GradientTransformation | None = None,
    fragments: int = 1,
    wire: str | None = "int4",
) -> Any:
    """Lets replicas train by themselves, and meets them once in `every` steps: DiLoCo. Another algorithm than the step
    without it, for links that are too slow for a gradient a step.

    Each rank along `axis` belongs to another replica: it has its own batches, its own parameters and its own
    optimizer state. Once in `every` steps the replicas meet. The gradient of the outer step is the anchor, which is
    what all had at the last sync, minus the mean of their parameters. The outer optimizer moves the anchor by it, and
    every replica goes on from there.

    Metrics are those of this rank's replica; behind a sync there is `outer_loss` too: half the squared distance of the
    anchor and the parameters, on average over the replicas. Replicas draw the same random numbers, for different
    batches. `train.sync(state)` meets them at once and comes before a save: `fz.checkpoint.save` refuses replicas that
    differ. It gives all of them the inner optimizer state of the first.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis along which replicas lie. Nothing else is cut, summed or gathered over it, so shard over
            others: `make_mesh(replica=2, data=4)`. Give rank r the part `mesh.index(("replica", "data"))` of the data.
        every: steps between two syncs of a parameter.
        outer: the outer optimizer, over the anchor; by default `fz.optim.sgd(0.7, momentum=0.9, nesterov=True)`.
        fragments: parts of the parameters that meet one after the other, `every / fragments` steps apart. Each is a
            transfer so many times smaller, and as much less memory.
        wire: how what a replica says travels: "int8", "int4" or "bf16", as `fz.compress(grads=)` has it, or None, as
            float32.

    Communication: over `axis` with R ranks, once in `every` steps, 2 (R-1)/R x 0.508 bytes an element of this rank's
        shard with "int4", 1.008 with "int8", 4 with None; within a replica as without it. Before every 16th step and
        every sync a note, by which ranks see that all go on.
    Memory: anchor and momentum, 8P/N bytes for P parameters whose optimizer state is sharded over N ranks, where that
        rests. At a sync 12P/N more, divided by `fragments`.

    Raises:
        FzeroTypeError: an `axis` that is not a name; an `outer` that is no optimizer.
        FzeroValueError: numbers below 1, more fragments than steps, an unknown `wire`. When it is compiled: an axis
            that the mesh has not.
        TransformError: another transform over this axis; `redundant`, `pipeline` or a loss scale; an evaluation.

    Papers: Stich, Local SGD converges fast and communicates little, 2018; Douillard et al., DiLoCo: distributed
        low-communication training of language models, 2023, and Streaming DiLoCo, 2025 (fragments, 4 bits).

    Example:
        >>> import fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> step = fz.local_sgd(fz.shard_params(step), every=50)
        >>> print(step.transforms[-1])
        local_sgd(axis='replica', every=50, fragments=1, wire='int4')
    """
    problems = [] if isinstance(axis, str) and axis else [f"axis={axis!r}: the name of one axis"]
    if outer is not None and not isinstance(outer, GradientTransformation):
        problems.append(f"outer={tree.describe(outer)}: an optimizer, e.g. fz.optim.sgd(0.7, momentum=0.9)")
    elif outer is not None and not _elementwise(outer):
        problems.append("outer: its update of an element depends on others, and each rank has some of them alone")
    if problems:
        raise FzeroTypeError("local_sgd", "invalid arguments", problems, "e.g. fz.local_sgd(axis='replica', every=100)")
    problems = count("every", every) + count("fragments", fragments)
    if not problems and fragments > every:
        problems.append(f"fragments={fragments}: more than every={every} steps, and one meets behind a step")
    if wire is not None and wire not in GRADS:
        problems.append(f"wire={wire!r}: not one of {', '.join(map(repr, GRADS))} or None")
    if problems:
        raise FzeroValueError("local_sgd", "invalid arguments", problems, "e.g. fz.local_sgd(every=100, fragments=4)")
    return applied(LocalSGD(axis, every, outer, fragments, wire), step)
