"""Lists the meshes that a number of devices can form, and the transforms for the axes of a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from fzero.mesh import AbstractMesh
from fzero.step import Step
from fzero.transforms.accumulate import Accumulate, accumulate
from fzero.transforms.expert import expert_parallel
from fzero.transforms.pipeline import pipeline
from fzero.transforms.remat import Remat, remat
from fzero.transforms.sequence import sequence_parallel
from fzero.transforms.tensor import tensor_parallel
from fzero.transforms.transform import Transform, find
from fzero.transforms.zero import shard_opt_state, shard_params


def meshes_of(devices: int, per_host: int, with_experts: bool) -> list[AbstractMesh]:
    """Returns all meshes of some devices, those with the fewest axes first.

    The axes `seq`, `expert` and `model` stay within a host. If there are several hosts, one more mesh separates the
    hosts (`node`) from the devices of each (`data`).
    """
    names = ("data", "pipe", "seq", "expert", "model") if with_experts else ("data", "pipe", "seq", "model")
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    found = list[dict[str, Any]]()
    for sizes in itertools.product(divisors, repeat=len(names)):
        within_host = math.prod(sizes[2:])
        if math.prod(sizes) == devices and per_host % within_host == 0:
            found.append({name: n for name, n in zip(names, sizes, strict=True) if n > 1} or {"data": 1})
    if devices > per_host and devices % per_host == 0:
        found.append({"node": devices // per_host, "data": per_host})
    found.sort(key=lambda axes: (len(axes.keys() - {"node", "data"}), devices // axes.get("data", 1)))
    return [AbstractMesh(**axes) for axes in found]


def transforms_for(
    mesh: AbstractMesh, step: Step, num_samples: int, experts: Callable[[str, torch.Tensor], bool] | None
) -> dict[str, Transform]:
    """Returns the transforms for the axes of a mesh, by the code that makes each of them.

    Args:
        mesh: the mesh.
        step: a step without parallel transforms. Its own `accumulate` and `remat` are kept.
        num_samples: the number of samples that a rank has of the batch.
        experts: the argument `where` of `expert_parallel`.
    """
    axes, found = mesh.axes, dict[str, Transform]()
    # State is sharded over every axis along which it would be replicated; the axis with the fastest links comes first.
    over: tuple[str, ...] = tuple(axis for axis in ("expert", "data", "seq", "node") if axis in axes)
    if over:
        axis: str | tuple[str, ...] = over[0] if len(over) == 1 else over
        zero = shard_opt_state if "pipe" in axes else shard_params
        found[f"fz.{zero.__name__}(axis={axis!r})"] = zero(axis=axis)
    if "pipe" in axes:
        found["fz.pipeline()"] = pipeline()
        if find(step.transforms, Accumulate) is None:
            # Up to four micro-batches per stage keep the stages busy. Their number must divide the batch.
            micro = max(n for n in range(1, 4 * axes["pipe"] + 1) if max(num_samples, 1) % n == 0)
            found[f"fz.accumulate({micro}, schedule='layerwise')"] = accumulate(micro, schedule="layerwise")
    if "seq" in axes:
        found["fz.sequence_parallel()"] = sequence_parallel()
    if "expert" in axes and experts is not None:
        found["fz.expert_parallel(where=experts)"] = expert_parallel(where=experts)
    if "model" in axes:
        found["fz.tensor_parallel()"] = tensor_parallel()
    if find(step.transforms, Remat) is None:
        found['fz.remat("auto")'] = remat("auto")
    return found
