"""The ranks and the process groups along one axis of a mesh."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def group_along(axes: Mapping[str, int], axis: str, timeout: float, options: Any = None) -> Any:
    """Creates a process group of the ranks that differ from this rank only in their index along `axis`.

    All ranks call it together.
    """
    names = list(axes)
    strides = {name: math.prod(list(axes.values())[i + 1 :]) for i, name in enumerate(names)}
    others = [range(0, axes[n] * strides[n], strides[n]) for n in names if n != axis]
    # The ranks of every group along the axis: creating groups is collective, so each rank lists all of them.
    lines = [[sum(start) + i * strides[axis] for i in range(axes[axis])] for start in itertools.product(*others)]
    wait = datetime.timedelta(seconds=timeout)
    group, _ = dist.new_subgroups_by_enumeration(
        lines, timeout=wait, backend="nccl" if options else None, pg_options=options
    )
    return group


def ranks_along(axes: Mapping[str, int], rank: int, axis: str) -> list[int]:
    """The ranks whose coordinates differ from those of `rank` along one axis only, in the order of that axis.

    Args:
        axes: size of each axis of the mesh; ranks are numbered in row-major order.
        rank: any rank of the mesh; the result contains it.
        axis: name of the axis.

    Example:
        >>> ranks_along({"data": 2, "model": 3}, 4, "model"), ranks_along({"data": 2, "model": 3}, 4, "data")
        ([3, 4, 5], [1, 4])
    """
    names = list(axes)
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    first = rank - rank // stride % axes[axis] * stride
    return [first + i * stride for i in range(axes[axis])]
