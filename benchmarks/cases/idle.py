"""What of a plan's peak no line needs: idle places of the arena. Nothing is run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import SOURCE, verdict

from cases import LR, ZERO, Table
from cases.memory import PLAN_SIZES, PLANNED
from cases.plans import BUDGETS, HEADLINE, SIZES

LIMIT = 0.05  # of the peak
GIANT = (128256, 25600, 102400, 90, 8)  # vocabulary, width, hidden, layers, key and value heads: 837 B
HEAD = 128  # of attention, its width
LARGE: dict[str, tuple[tuple[int, ...], int, str, int, dict[str, str]]] = {
    "Llama 3 8B, 8 x H100": (SIZES["Llama 3 8B"], 8, "h100", 4096, {}),
    "Llama 3 70B, 64 x H100": (SIZES["Llama 3 70B"], 64, "h100", 4096, {}),
    **{
        f"837 B, 128 x A100, {budget}": (GIANT, 128, "a100", 2048, {"memory_budget": budget})
        for budget in ("80GB", "50GB", "40GB")
    },
}
"""Sizes, ranks, device, tokens a rank and budgets."""
OFFLOADED = {"host_budget": "100GB", "disk_budget": "1TB"}


def memory_idle(args: argparse.Namespace) -> Table:
    """How much of a planned peak is idle places, by plan: ZeRO-3 of 8 to 837 billion parameters, the headline, a
    trillion, and the ten steps of `plan_memory`.

    `--before FILE`: the JSON of an earlier run, whose peaks stand beside these. `--only`: rows whose name has this.
    """
    before = {x["name"]: x for x in json.loads(Path(args.before).read_text())["cases"]} if args.before else {}
    rows, cases = [], []
    for name, lower in _steps(args.layers):
        if (args.only or "").lower() not in name.lower():
            continue
        print(name, file=sys.stderr)
        cases.append({"name": name, **_found(lower)})
        rows.append([name, *_cells(before.get(name)), *_cells(cases[-1])])
    planned = [x for x in cases if "peak" in x]
    least = [x for x in planned if 1 - x["needed"] / x["peak"] > LIMIT]
    notes = [
        "ZeRO-3 in bf16, remat full, clipped by the global norm, 4,096 tokens a rank. 837 B: 2,048, and "
        f"`offload('auto')` with {OFFLOADED['host_budget']} of the host and {OFFLOADED['disk_budget']} of the disk. "
        "headline, 1 T and the steps of plan_memory are planned as there, these compiled, on 2 ranks of one host.",
        "needed: the most that any one line needs; over: the share of the peak above it. idle: the share of the peak "
        "that is idle places at the line of the peak, which need not be the line that needs most.",
        f"over at most {LIMIT:.0%}: {verdict(len(least), 0)}, {len(planned) - len(least)} of {len(planned)}"
        + "".join(f"; {x['name']}: {1 - x['needed'] / x['peak']:.1%}" for x in least),
        *(f"{x['name']}: {x['refused']}" for x in cases if "refused" in x),
    ]
    columns = ("", "peak before", "idle", "over", "peak", "idle", "over")
    return Table("Peaks and what of them is idle", columns, rows, notes, {"cases": cases})


def _cells(case: dict[str, Any] | None) -> list[str]:
    if case is None:
        return [""] * 3
    if "refused" in case:
        return ["refused", "", ""]
    unit, name = (2**30, "GiB") if case["peak"] >= 2**30 else (2**20, "MiB")
    shares = (f"{case['idle'] / case['peak']:.1%}", f"{1 - case['needed'] / case['peak']:.1%}")
    return [f"{case['peak'] / unit:.2f} {name}", *shares]


def _found(lower: Any) -> dict[str, Any]:
    import fzero as fz
    from fzero.plan.memory import ROLES

    try:
        plan = lower()
    except fz.errors.BudgetError as error:
        return {"refused": "; ".join(str(error).splitlines()[:3])}
    at = ROLES.index("idle_pool")
    needed = max(sample.total - sample.by_role[at] for sample in plan.memory)
    sizes = {"peak": plan.peak_bytes, "resting": plan.persistent_bytes, "arena": plan.pool_bytes, "needed": needed}
    return {**sizes, "idle": plan.breakdown["idle_pool"], "seconds": plan.step_seconds}


def _steps(layers: int | None) -> Iterator[tuple[str, Any]]:
    """The name of each step, and a function that plans it."""
    sys.path.insert(0, str(SOURCE / "examples"))
    import plan_gpt
    import plan_llama

    import fzero as fz

    cuda = lambda n: fz.AbstractMesh(data=n, device_type="cuda")  # noqa: E731
    for name, (sizes, ranks, device, tokens, budget) in LARGE.items():
        step, params, batch = _llama(sizes, tokens, layers, bool(budget))
        budgets = {**budget, **OFFLOADED} if budget else {}
        yield (
            name,
            lambda s=step, p=params, b=batch, n=ranks, d=device, k=budgets: (
                fz.lower(s, cuda(n), p, b, device=d, **k).plan
            ),
        )
    for micro_batches, vertical in HEADLINE:
        step, params, batch = plan_llama.headline(
            micro_batches, layers or plan_llama.LAYERS, "layerwise" if vertical else "sequential"
        )
        name = f"headline, {micro_batches}{', vertical' if vertical and micro_batches > 1 else ''}"
        yield name, lambda s=step, p=params, b=batch: fz.lower(s, cuda(1), p, b, device="rtx4090", **BUDGETS).plan
    step, params, batch = plan_gpt.trillion(layers=layers or plan_gpt.LAYERS)
    yield (
        "1 T, 1024 x H200",
        lambda s=step, p=params, b=batch: fz.lower(s, cuda(1024), p, b, device="h200", memory_budget="141GB").plan,
    )
    for size in PLAN_SIZES:
        for case in PLANNED:
            name = ", ".join([ZERO[case["stage"]], *(f"{k} {v}" for k, v in case.items() if k != "stage")])
            yield f"{name}, {size['layers']} x {size['width']}", lambda s=size, c=case: _small(s, **c)


def _llama(sizes: tuple[int, ...], tokens: int, layers: int | None, offloaded: bool) -> tuple[Any, Any, Any]:
    """A step of a Llama, its parameters, and a rank's batch."""
    import plan_llama as llama
    import torch
    import torch.nn.functional as F

    import fzero as fz
    from fzero import optim

    vocab, width, hidden, depth, shared = sizes

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        h = llama.norm(p["norm_1"], x)
        q, k, v = ((h @ p[n]).view(b, t, -1, HEAD).transpose(1, 2) for n in "qkv")
        seen = F.scaled_dot_product_attention(llama.rotary(q), llama.rotary(k), v, is_causal=True, enable_gqa=True)
        x = x + seen.transpose(1, 2).reshape(b, t, d) @ p["out"]
        h = llama.norm(p["norm_2"], x)
        return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = llama.embed(params["embed"], batch)
        for p in params["layers"]:
            x = layer(p, x)
        return llama.head(params["head"], x, batch)

    def weights() -> Any:
        shapes = {"q": (width, width), "k": (width, shared * HEAD), "v": (width, shared * HEAD), "out": (width, width)}
        shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        norms = {name: llama.meta(width) for name in ("norm_1", "norm_2")}
        return norms | {name: llama.meta(*shape) for name, shape in shapes.items()}

    params = {
        "embed": {"token": llama.meta(vocab, width)},
        "layers": [weights() for _ in range(layers or depth)],
        "head": {"norm": llama.meta(width), "vocab": llama.meta(width, vocab)},
    }
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4)))
    transforms = [fz.shard_params(), fz.mixed_precision("bf16"), fz.remat("full")]
    transforms += [fz.offload("auto", path=".")] if offloaded else []
    return fz.compose(*transforms)(step), params, llama.meta(1, tokens, dtype=torch.int64)


def _small(
    size: dict[str, int], stage: int, remat: str = "min_cut", accumulate: int = 1, precision: str = "fp32"
) -> Any:
    """The plan of a step of `plan_memory`, compiled."""
    import torch
    from model import Config, make_init, make_loss

    import fzero as fz
    from fzero import optim

    config = Config(**size, heads=4, batch=8)
    transforms = [getattr(fz, ZERO[stage])(axis="data"), fz.remat(remat), fz.accumulate(accumulate)]
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(LR))
    step = fz.compose(*transforms, fz.mixed_precision(precision))(fz.train_step(make_loss(config), optimizer))
    tokens = torch.empty(4, config.seq, dtype=torch.int64, device="meta")
    return fz.lower(step, fz.AbstractMesh(data=2), make_init(config), (tokens, tokens), device="cpu").plan
