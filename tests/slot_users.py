"""Three transforms with state of their own, as a user writes them, and the plain loops that they equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from own_gradients import own_gradients

import fzero as fz
from fzero.transforms.transform import Transform
from fzero.transforms.transform_state import Local

LR, MOMENTUM, DECAY, EVERY, PULL = 0.1, 0.9, 0.75, 2, 0.5


@dataclass(frozen=True)
class Average(Transform):
    """Keeps an exponential moving average of the parameters."""

    decay: float = DECAY
    slot: str = "ema"
    order: ClassVar[int] = 90
    name: ClassVar[str] = "average"

    def slots(self, params: Any) -> Any:
        return {self.slot: fz.tree.map(torch.clone, params)}

    def update(self, slots: Any, grads: Any, params: Any, inner: Any) -> Any:
        new = inner(grads)
        return new, {self.slot: fz.tree.map(lambda e, p: self.decay * e + (1 - self.decay) * p, slots[self.slot], new)}


@dataclass(frozen=True)
class Outer(Transform):
    """Every so many steps, a step with momentum of slow weights towards the fast ones, which begin anew there."""

    every: int = EVERY
    order: ClassVar[int] = 80
    name: ClassVar[str] = "outer"

    def slots(self, params: Any) -> Any:
        slow, mu = fz.tree.map(torch.clone, params), fz.tree.map(torch.zeros_like, params)
        return {"outer": {"slow": slow, "mu": mu, "count": torch.zeros((), dtype=torch.int64)}}

    def update(self, slots: Any, grads: Any, params: Any, inner: Any) -> Any:
        held, fast, tree = slots["outer"], inner(grads), fz.tree
        count = held["count"] + 1
        now = count % self.every == 0
        mu = tree.map(lambda m, s, f: torch.where(now, 0.5 * m + (s - f), m), held["mu"], held["slow"], fast)
        slow = tree.map(lambda s, m: torch.where(now, s - PULL * m, s), held["slow"], mu)
        new = tree.map(lambda f, s: torch.where(now, s, f), fast, slow)
        return new, {"outer": {"slow": slow, "mu": mu, "count": count}}


@dataclass(frozen=True)
class Feedback(Transform):
    """Sends gradients rounded to bfloat16; each rank adds what it lost by that to its next gradient."""

    order: ClassVar[int] = 60
    name: ClassVar[str] = "feedback"
    after: ClassVar[str] = "shard"

    def slots(self, params: Any) -> Any:
        return {"residual": fz.tree.map(lambda p: Local(torch.zeros_like(p, dtype=torch.float32)), params)}

    def rewrite(self, program: Any) -> Any:
        return own_gradients(program, rounded, "residual", self.name)

    def idle_in(self, program: Any) -> str | None:
        return "one rank sends nothing" if program.mesh.size == 1 else super().idle_in(program)


def rounded(grad: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = grad + residual
    sent = whole.to(torch.bfloat16).to(grad.dtype)
    return sent, whole - sent


# --- a model, and the plain loops ---


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    hidden = torch.tanh(torch.tanh(x @ params["w"]) @ params["u"])
    return ((hidden @ params["v"]).squeeze(-1) + params["b"] - y).square().mean()


def first() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (8, 70), "u": (70, 64), "v": (64, 1), "b": ()}  # u is one whose shards are whole blocks
    return {name: torch.randn(shape, generator=g) * 0.2 for name, shape in shapes.items()}


def batches(num: int, rows: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(rows, 8, generator=g) for _ in range(num)]
    return [(x, x.sum(-1).sin()) for x in xs]


def own_part(batch: Any, ranks: int, rank: int) -> Any:
    return tuple(x.chunk(ranks)[rank].clone() for x in batch)


def plain(
    given: Sequence[Any],
    ranks: int,
    transforms: Sequence[str],
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    before: Any = None,
) -> dict[str, Any]:
    """The state behind steps in a plain loop: parameters, and what the transforms of these names keep. `before`: the
    state to go on from."""
    p = first()
    zeros: Callable[[], Any] = lambda: {n: torch.zeros_like(x) for n, x in first().items()}  # noqa: E731
    s = {
        "params": p, "mu": zeros(), "ema": copy.deepcopy(p), "slow": copy.deepcopy(p), "outer_mu": zeros(), "count": 0,
        "residual": [zeros() for _ in range(ranks)],
    } if before is None else copy.deepcopy(before)  # fmt: skip
    for batch in given:
        grads = zeros()
        for rank in range(ranks):
            own = zeros()
            for i in range(micro):
                here = tuple(x.chunk(micro)[i].to(dtype) for x in own_part(batch, ranks, rank))
                leaves = {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in s["params"].items()}
                (loss_fn(leaves, here) / (ranks * micro)).backward()
                own = {n: own[n] + leaves[n].grad.to(torch.float32) for n in own}  # type: ignore[union-attr]
            if "feedback" in transforms:
                for n, g in own.items():
                    own[n], s["residual"][rank][n] = rounded(g, s["residual"][rank][n])
            grads = {n: grads[n] + own[n] for n in grads}
        s["mu"] = {n: MOMENTUM * m + grads[n] for n, m in s["mu"].items()}
        s["params"] = {n: x - LR * s["mu"][n] for n, x in s["params"].items()}
        s["count"] += 1
        if "outer" in transforms and s["count"] % EVERY == 0:
            s["outer_mu"] = {n: 0.5 * m + s["slow"][n] - s["params"][n] for n, m in s["outer_mu"].items()}
            s["slow"] = {n: x - PULL * s["outer_mu"][n] for n, x in s["slow"].items()}
            s["params"] = copy.deepcopy(s["slow"])
        s["ema"] = {n: DECAY * e + (1 - DECAY) * s["params"][n] for n, e in s["ema"].items()}
    return s
