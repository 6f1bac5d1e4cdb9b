"""Computes statistics of each block's gradients and outputs, with which precision is monitored, as a part of the step.

A watched block is a call of a block, in the order of the forward; the last one is the code outside blocks. A parameter
belongs to the first block that takes it as a parameter, or to the last entry. Statistics are vectors with one number
for each watched block, so that they do not need a separate value for each block.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero import tree
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Instruction
from fzero.optim.tree_updates import sum_of_squares


@dataclass(frozen=True)
class Watched:
    """The watched blocks of a step.

    Attributes:
        names: the name of each block, as a user knows it: `layers.3`, or the name of the function.
        reads: for each block, the positions of the parameters that it reads.
        owner: for each parameter, the number of the block that it belongs to.
    """

    names: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]


def watched_blocks(name: str, params: Inputs, ops: Sequence[Instruction]) -> Watched:
    """Returns the watched blocks among the ops of a loss and its gradients. `name` is that of the code outside
    blocks."""
    position = {params.leaves[i].path: i for i in params.distinct}
    source = {op.out[0].name: op.args[0] for op in ops if op.op == "cast"}
    dotted = tree.names(params.rebuild({i: torch.empty(0, device="meta") for i in params.distinct}))
    names, reads = [], []
    for op in ops:
        if (block := op.block) is not None and block.part == "forward":
            joint, given = block.joint, block.inputs
            here = tuple(position[p] for p in (source.get(a, a) for a in given[: joint.num_params]) if p in position)
            names.append(_above([dotted[i] for i in here]) or joint.name)
            reads.append(here)
    owner: dict[int, int] = {}
    for number, here in enumerate(reads):
        for i in here:
            owner.setdefault(i, number)
    outside = tuple(i for i in params.distinct if i not in owner)
    return Watched(
        tuple(_numbered([*names, name])), (*reads, outside), tuple(owner.get(i, len(reads)) for i in params.ties)
    )


def gradient_statistics(
    watched: Watched, grads: Mapping[int, torch.Tensor], tiny: Mapping[int, float], scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Returns statistics of the gradients of each watched block, in float32.

    Args:
        watched: the n watched blocks.
        grads: by position of the parameter, its gradient in float32 or float64, unscaled.
        tiny: by position, the smallest normal number of the dtype that the gradient was computed in.
        scale: the scale of the loss, if there is one.

    Returns:
        grad_norm: float32[n], the norm of the gradients of a block's parameters, taken as one vector.
        grad_max: float32[n], the largest of their absolute values; inf if one is nan.
        underflow: float32[n], the share of their elements that are below `tiny` once scaled, zeros included.
        zero: float32[n], the share of zeros.
    """
    flat = [i for i in grads if grads[i].numel()]
    device = grads[flat[0]].device
    # bool[n, gradients]: whether a gradient belongs to a block
    own = torch.tensor(range(len(watched.names)), device=device)[:, None] == torch.tensor(
        [watched.owner[i] for i in flat], device=device
    )
    sizes = [sum(grads[i].numel() for i in flat if watched.owner[i] == number) for number in range(len(watched.names))]

    def vector(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x.to(torch.float32) for x in scalars])

    def of_blocks(values: torch.Tensor) -> torch.Tensor:
        return torch.where(own, values, 0.0)

    squares = of_blocks(vector([sum_of_squares(grads[i]) for i in flat])).sum(1)
    # The gradients are unscaled here, but they were computed scaled, so the limits are unscaled
    # too.
    limits = {x: x if scale is None else x / scale for x in dict.fromkeys(tiny.values())}
    few = of_blocks(vector([(grads[i].abs() < limits[tiny[i]]).sum(dtype=torch.float32) for i in flat])).sum(1)
    zeros = of_blocks(vector([(grads[i] == 0).sum(dtype=torch.float32) for i in flat])).sum(1)
    largest = of_blocks(vector([torch.linalg.vector_norm(grads[i], math.inf) for i in flat])).amax(1)
    num = torch.tensor([float(max(n, 1)) for n in sizes], device=device)
    return {
        "grad_norm": squares.sqrt(),
        # not every collective propagates a nan among larger numbers
        "grad_max": torch.where(squares.isnan(), math.inf, largest),
        "underflow": few / num,
        "zero": zeros / num,
    }


def output_maxima(largest: torch.Tensor | None, loss: torch.Tensor) -> torch.Tensor:
    """Returns the largest absolute value among the outputs of each watched block, float32[n].

    For the code outside blocks it is the loss. It is inf if one is nan.

    Args:
        largest: that of each block, float32[n - 1]; None if there are none.
        loss: that of the whole batch, 0-dim.
    """
    value = loss.abs().to(torch.float32).reshape(1)
    value = torch.where(value.isnan(), math.inf, value)
    return value if largest is None else torch.cat([largest, value])


def _above(names: Sequence[str]) -> str:
    """Returns the longest common path of these parameters in their tree."""
    above = [name.split(".")[:-1] for name in names]
    same = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*above, strict=False))
    return ".".join(keys[0] for keys in same)


def _numbered(names: Sequence[str]) -> list[str]:
    """Returns the names, with a number appended to repeated ones: calls with the same parameters, or without any that
    distinguish them."""
    times: Counter[str] = Counter()
    out = []
    for name in names:
        times[name] += 1
        out.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return out
