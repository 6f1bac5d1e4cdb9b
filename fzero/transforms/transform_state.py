"""Defines the types with which a transform describes the state that it keeps (`Transform.slots`), and the results of a
step that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.transforms.precision import Watched


class Local:
    """A slot that has a separate value on each rank along the axes that shard the batch, with zeros before the first
    step.

    In the state it is one tensor with a row for each rank, so that a checkpoint contains all values. On another number
    of ranks the slot begins anew with zeros, and the log names it.

    Args:
        like: a tensor with the shape and dtype of one value.
    """

    def __init__(self, like: torch.Tensor):
        self.like = like


@dataclass(frozen=True, eq=False)
class StepResults:
    """The results of a step that are known at its end, all of them the same on every rank.

    Attributes:
        paths: the paths of all parameters.
        loss, norm, finite: as in the metrics.
        overflow: whether the step is skipped because a gradient overflows; None if no step is ever skipped for this
            reason.
        empty: whether the loss is a mean over nothing, so that parameters, optimizer state and slots stay as they are;
            None if the loss never is.
        watched: the watched blocks; None if blocks are not watched.
        statistics: computes the statistics of the watched blocks, once.
    """

    paths: Sequence[str]
    loss: torch.Tensor
    norm: torch.Tensor
    finite: torch.Tensor
    overflow: torch.Tensor | None
    empty: torch.Tensor | None
    watched: Watched | None
    statistics: Callable[[], Mapping[str, torch.Tensor]]
