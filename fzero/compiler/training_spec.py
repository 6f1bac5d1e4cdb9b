"""Describes a training step before it is a program: its functions, its leaf tables, and the dtypes it computes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fzero.ir.from_graph import Inputs
from fzero.ir.value_names import identifier
from fzero.loss import Means
from fzero.mesh import AbstractMesh
from fzero.optim.loss_scale import LossScale
from fzero.sharding.layout import Leaf
from fzero.transforms.fp8_products import InFp8

if TYPE_CHECKING:
    from fzero.compiler.state_slots import Slots

DType = Callable[[Leaf], torch.dtype]
ROUNDING_STREAM = 1 << 61
"""To round the parameters of step t the state's key is folded with this plus t; the key of the step itself is folded
with t alone."""


@dataclass(frozen=True)
class Precision:
    """The dtypes that a step computes in, and its loss scale. By default everything in its own dtype.

    Attributes:
        compute: of a parameter, or a leaf of the batch, in computation.
        reduce: of the reduction of a parameter's gradient.
        outputs: of results that the caller's own function returns to him; None: as it comes.
        casts: whether blocks cast their arguments to the dtype of their parameters.
        loss_scale: None: the loss is not scaled.
        stochastic: whether parameters that rest in bfloat16 are rounded to it stochastically.
        watch: whether the numbers of each block are watched (transforms/precision_statistics.py).
        fp8: which products are done in 8 bits; None: none.
        changed: the names of the transforms that convert a leaf, or send it in fewer bits, before the loss reads it.
    """

    compute: DType = lambda leaf: leaf.dtype
    reduce: DType = lambda leaf: leaf.dtype
    outputs: torch.dtype | None = None
    casts: bool = False
    loss_scale: LossScale | None = None
    stochastic: bool = False
    watch: bool = False
    fp8: InFp8 | None = None
    changed: Callable[[Leaf], Sequence[str]] = lambda leaf: ()

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.outputs is None or not x.is_floating_point() else x.to(self.outputs)


@dataclass(frozen=True, eq=False)
class Training:
    """The source of a lowered training step. `batch` has the shapes of one micro-batch of one rank."""

    name: str
    loss_fn: Callable[..., Any]
    optimizer: Any
    has_aux: bool
    wants_key: bool
    params: Inputs
    trains: Sequence[bool]  # for each leaf of params
    mutates: Sequence[bool] | None  # likewise, whether the loss function returns its new value; None: it returns none
    opt_state: Inputs
    batch: Inputs
    slots: Slots
    mesh: AbstractMesh
    precision: Precision
    num_parts: int  # ranks x micro-batches that the global batch is cut in

    @property
    def trained(self) -> list[int]:
        return [i for i in self.params.distinct if self.trains[i]]

    @property
    def mutable(self) -> list[int]:
        return [i for i in self.params.distinct if self.mutates is not None and self.mutates[i]]

    @property
    def averaged(self) -> list[int]:
        """The mutable leaves whose new values are means over ranks and micro-batches."""
        return [i for i in self.mutable if self.params.leaves[i].dtype.is_floating_point]

    @property
    def agreed(self) -> list[int]:
        """The mutable leaves whose new values must be the same on all ranks and in all micro-batches."""
        return [i for i in self.mutable if not self.params.leaves[i].dtype.is_floating_point]


@dataclass(frozen=True)
class Found:
    """The findings of tracing a loss.

    Attributes:
        used: the leaves that have a gradient.
        num_sums: how many sums the forward makes.
        weighted: whether the loss is.
        aux: its auxiliary values.
        lacks: the factor that gradients lack for the seed's rounding; None: they lack none.
        of_sum: whether gradients are those of the sum, not of the mean (compiler/backward_seed.py).
        raises: the lines of conditions under which the loss raises.
    """

    used: list[int]
    num_sums: int
    weighted: bool
    aux: Means
    lacks: float | None = None
    of_sum: bool = False
    raises: tuple[str, ...] = ()


def grad_name(leaf: Leaf) -> str:
    return "d_" + identifier(leaf.path)
