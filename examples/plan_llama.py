"""A Llama of 7 billion parameters on one GPU of 24 GB, in a machine with 64 GB of memory and an NVMe: what a step
takes, before there is a machine.

fzero plan examples/plan_llama.py:headline --mesh data=1 --device rtx4090 \\
    --budget 24GB --host-budget 61GB --disk-budget 500GB --include-process
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange

import fzero as fz
from fzero import optim

LAYERS, WIDTH, HEADS, HIDDEN, VOCAB, SEQ = 32, 4096, 32, 11008, 32000, 2048


def norm(scale, x):
    return F.rms_norm(x, x.shape[-1:], scale)


def rotary(x):
    t, d = x.shape[-2:]
    angle = torch.outer(torch.arange(t, device=x.device), 10000.0 ** (-torch.arange(0, d, 2, device=x.device) / d))
    cos, sin, (a, b) = angle.cos().to(x.dtype), angle.sin().to(x.dtype), x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@fz.block
def embed(p, tokens):
    return p["token"][tokens]


@fz.block
def layer(p, x):
    h = norm(p["norm_1"], x)
    q, k, v = (rearrange(h @ p[name], "b t (head d) -> b head t d", head=HEADS) for name in ("q", "k", "v"))
    mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    x = x + rearrange(mixed, "b head t d -> b t (head d)") @ p["out"]
    h = norm(p["norm_2"], x)
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


@fz.block
def head(p, x, targets):
    logits = (norm(p["norm"], x) @ p["vocab"]).float()
    return F.cross_entropy(rearrange(logits, "b t vocab -> (b t) vocab"), rearrange(targets, "b t -> (b t)"))


def loss_fn(params, batch):
    tokens, targets = batch
    x = embed(params["embed"], tokens)
    for p in params["layers"]:
        x = layer(p, x)
    return head(params["head"], x, targets)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def weights():
    squares = {name: meta(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    return {
        "norm_1": meta(WIDTH),
        "norm_2": meta(WIDTH),
        **squares,
        "gate": meta(WIDTH, HIDDEN),
        "up": meta(WIDTH, HIDDEN),
        "down": meta(HIDDEN, WIDTH),
    }


def headline(micro_batches=4, layers=LAYERS, schedule: Literal["sequential", "layerwise"] = "layerwise"):
    """A step with its transforms, its parameters, and one rank's batch: bf16 with fp32 masters, clipped by the global
    norm, 8 sequences a micro-batch."""
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4)))
    transforms = (
        fz.mixed_precision("bf16"),
        fz.remat("full"),
        fz.accumulate(micro_batches, schedule=schedule),
        fz.offload("auto", path="."),
    )
    params = {
        "embed": {"token": meta(VOCAB, WIDTH)},
        "layers": [weights() for _ in range(layers)],
        "head": {"norm": meta(WIDTH), "vocab": meta(WIDTH, VOCAB)},
    }
    tokens = meta(8 * micro_batches, SEQ, dtype=torch.int64)
    return fz.compose(*transforms)(step), params, (tokens, tokens)
