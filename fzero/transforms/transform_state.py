"""Defines what a transform says of the state that it keeps (`Transform.slots`), and what it is told of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.transforms.precision_statistics import Watched


class Local:
    """A slot of which each rank along the axes that cut the batch has its own, zeros before the first step.

    In the state it is one leaf with a row for each rank, so that a checkpoint has all of them.

    Args:
        like: its shape and dtype.
        adds: whether its values are summands of one value. On another number of ranks such a slot is restored with the
            same sum; any other is refused there.
    """

    def __init__(self, like: torch.Tensor, adds: bool = False):
        self.like, self.adds = like, adds


@dataclass(frozen=True, eq=False)
class StepResults:
    """The numbers of a step that are known at its end, all of them the same on every rank.

    Attributes:
        paths: of all parameters.
        loss, norm, finite: as in the metrics.
        overflow: whether the step is skipped because a gradient overflows; None: no step ever is.
        empty: whether the loss is a mean over nothing, so that parameters, optimizer state and slots stay as they are;
            None: no loss ever is.
        watched: the blocks whose numbers are watched; None: they are not.
        statistics: makes the statistics of those, once.
    """

    paths: Sequence[str]
    loss: torch.Tensor
    norm: torch.Tensor
    finite: torch.Tensor
    overflow: torch.Tensor | None
    empty: torch.Tensor | None
    watched: Watched | None
    statistics: Callable[[], Mapping[str, torch.Tensor]]
