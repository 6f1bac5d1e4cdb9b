"""Runs the plain step, whose trajectory a transformed step is compared with, and derives the tolerance of each
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.step import State, Step
from fzero.testing.first_difference import norm
from fzero.testing.tolerance import (
    LAMBDA,
    NUM_MOVED,
    WAYS,
    Roundoff,
    moved,
    noise,
    unit,
    with_gradients,
)


@dataclass(frozen=True)
class Trajectory:
    """The tensors of the plain step's states and metrics by path, beginning with the first state, and how far each
    may be off in the Euclidean norm.
    """

    first: State
    leaves: Sequence[dict[str, torch.Tensor]]
    tolerances: Sequence[dict[str, float]]


def leaves_of(state: State, metrics: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of an unsharded state and of the metrics, by path."""
    out: dict[str, torch.Tensor] = {"step": state.step, "key": state.key}
    for root, values in (("params", state.params), ("opt_state", state.opt_state), ("metrics", metrics)):
        out |= {p: x.detach() for p, x in tree.with_paths(values, root) if isinstance(x, torch.Tensor)}
    return out


def trajectory(plain: Step, first: State, batch: Any, steps: int, size: Roundoff) -> Trajectory:
    """Returns the trajectory of the plain step, and the tolerances of its tensors: see [Note: tolerance]."""
    grads: list[list[torch.Tensor]] = []
    # The trajectory itself; its gradients are recorded in `grads`.
    exact = _states(with_gradients(plain, lambda t, i, g: g, grads), first, batch, steps)
    seen: list[list[list[torch.Tensor]]] = [[] for _ in range(NUM_MOVED)]
    # Runs with perturbed parameters. Their gradients, recorded in `seen`, determine the noise.
    others = [
        _states(moved(plain, size, number, grads_of), first, batch, steps) for number, grads_of in enumerate(seen)
    ]
    amount = noise(grads, seen)
    # Runs in which every gradient is moved by its noise, up in one and down in the other.
    others += [
        _states(with_gradients(plain, lambda t, i, g, way=way: g + way * amount[t][i].to(g.dtype)), first, batch, steps)
        for way in WAYS
    ]
    tolerances = []
    for t, now in enumerate(exact):
        most = {}
        for path, x in now.items():
            if not x.is_floating_point():
                codes = path.startswith("opt_state") and x.dtype in (torch.int8, torch.uint8)
                # Integers must be equal, except for the 8-bit codes of quantized moments, in which roundoff may change
                # a code by a few steps.
                most[path] = 2 * _farthest([run[t][path] for run in others], x) + LAMBDA if codes and t else 0.0
                continue
            metric = path.startswith("metrics")
            # For a tensor of the state, only what training has changed is subject to roundoff, not the value that it
            # began with.
            come = norm(x) if metric else norm(x.to(torch.float64) - exact[0][path].to(torch.float64))
            # One rounding per step, and one more if the transformed step stores a coarser dtype.
            num_stored = 0 if metric else t + (unit(size.store) > unit(x.dtype))
            stored = math.sqrt(num_stored) * max(unit(x.dtype), unit(size.store)) * norm(x)
            most[path] = 2 * _farthest([run[t][path] for run in others], x) + LAMBDA * (size.with_codes * come + stored)
        tolerances.append(most)
    return Trajectory(first, exact, tolerances)


def _states(step: Step, state: State, batch: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    out = [leaves_of(state, {})]
    for _ in range(steps):
        state, metrics = step(state, batch)
        out.append(leaves_of(state, metrics))
    return out


def _farthest(runs: Sequence[torch.Tensor], x: torch.Tensor) -> float:
    """Returns the largest distance by which any run moved each element, as one norm. Elements that are not finite do
    not count.
    """
    off = torch.stack([(run.to(torch.float64) - x.to(torch.float64)).abs() for run in runs]).amax(0)
    return norm(off.nan_to_num(nan=0.0, posinf=0.0))
