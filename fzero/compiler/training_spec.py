"""Describes a training step before it is a program: its functions, its tables of tensors, and its dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fzero.ir.from_graph import Inputs
from fzero.loss import Means
from fzero.mesh import AbstractMesh
from fzero.optim.loss_scale import LossScale
from fzero.sharding.layout import Leaf
from fzero.transforms.fp8 import InFp8

if TYPE_CHECKING:
    from fzero.compiler.state_slots import Slots

DType = Callable[[Leaf], torch.dtype]
ROUNDING_STREAM = 1 << 61
"""To round the parameters of step t, the state's key is folded with this number plus t; the key of the step itself is
folded with t only."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, and its loss scale. By default, everything has its own dtype.

    Attributes:
        compute: the dtype in which a parameter, or a tensor of the batch, is computed with.
        reduce: the dtype in which a parameter's gradient is reduced.
        outputs: the dtype of results that the user's function returns to the user; None: unchanged.
        casts: whether blocks cast their arguments to the dtype of their parameters.
        loss_scale: None: the loss is not scaled.
        stochastic: whether parameters that are stored in bfloat16 are rounded stochastically.
        watch: whether the blocks are watched (transforms/precision.py).
        fp8: which products are computed in 8 bits; None: none.
        changed: returns the names of the transforms that convert a tensor, or send it in fewer bits, before the loss
            reads it.
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
    """Everything from which a training step is lowered. `batch` has the shapes of one micro-batch of one rank."""

    name: str
    loss_fn: Callable[..., Any]
    optimizer: Any
    has_aux: bool
    wants_key: bool
    params: Inputs
    trains: Sequence[bool]  # for each parameter
    # for each parameter, whether the loss function returns its new value; None: it returns none
    mutates: Sequence[bool] | None
    opt_state: Inputs
    batch: Inputs
    slots: Slots
    mesh: AbstractMesh
    precision: Precision
    num_parts: int  # parts of the global batch: ranks x micro-batches

    @property
    def trained(self) -> list[int]:
        return [i for i in self.params.distinct if self.trains[i]]

    @property
    def mutable(self) -> list[int]:
        return [i for i in self.params.distinct if self.mutates is not None and self.mutates[i]]

    @property
    def averaged(self) -> list[int]:
        """The mutable tensors whose new values are means over ranks and micro-batches."""
        return [i for i in self.mutable if self.params.leaves[i].dtype.is_floating_point]

    @property
    def agreed(self) -> list[int]:
        """The mutable tensors whose new values must be the same on all ranks and in all micro-batches."""
        return [i for i in self.mutable if not self.params.leaves[i].dtype.is_floating_point]


@dataclass(frozen=True)
class Found:
    """The results of tracing a loss.

    Attributes:
        used: the parameters that have a gradient.
        num_sums: the number of sums that the forward computes.
        weighted: whether the loss is weighted.
        aux: its auxiliary values.
        lacks: the factor that corrects gradients for the rounding of the seed; None: no correction is needed.
        of_sum: whether gradients are those of the sum, not of the mean (compiler/backward_seed.py).
        raises: source lines of the conditions under which the loss raises.
    """

    used: list[int]
    num_sums: int
    weighted: bool
    aux: Means
    lacks: float | None = None
    of_sum: bool = False
    raises: tuple[str, ...] = ()
