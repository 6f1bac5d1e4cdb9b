"""A GPT with a trillion parameters, to plan on a laptop: nothing of it is ever allocated.

fzero plan examples/plan_gpt.py:trillion --mesh data=1024 --device h200 --budget 141GB
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange

import fzero as fz
from fzero import optim

LAYERS, WIDTH, HEADS, VOCAB, SEQ = 128, 25600, 160, 50304, 2048


def norm(scale, x):
    return F.layer_norm(x, x.shape[-1:], scale)


@fz.block
def embed(p, tokens):
    return p["token"][tokens] + p["position"]


@fz.block
def attention(p, x):
    qkv = norm(p["norm"], x) @ p["qkv"]
    q, k, v = rearrange(qkv, "b t (three head d) -> three b head t d", three=3, head=HEADS)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + rearrange(mixed, "b head t d -> b t (head d)") @ p["out"]


@fz.block
def mlp(p, x):
    return x + F.gelu(norm(p["norm"], x) @ p["up"], approximate="tanh") @ p["down"]


@fz.block
def head(p, x, targets):
    logits = (norm(p["norm"], x) @ p["vocab"]).float()
    return F.cross_entropy(rearrange(logits, "b t vocab -> (b t) vocab"), rearrange(targets, "b t -> (b t)"))


def loss_fn(params, batch):
    tokens, targets = batch
    x = embed(params["embed"], tokens)
    for p in params["layers"]:
        x = mlp(p["mlp"], attention(p["attention"], x))
    return head(params["head"], x, targets)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer():
    attention = {"norm": meta(WIDTH), "qkv": meta(WIDTH, 3 * WIDTH), "out": meta(WIDTH, WIDTH)}
    return {
        "attention": attention,
        "mlp": {"norm": meta(WIDTH), "up": meta(WIDTH, 4 * WIDTH), "down": meta(4 * WIDTH, WIDTH)},
    }


def trillion(batch=1, layers=LAYERS):
    """A step with its transforms, its parameters, and one rank's batch."""
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4)))
    step = fz.compose(fz.shard_params(), fz.mixed_precision("bf16", reduce="bf16"), fz.remat("full"))(step)
    params = {
        "embed": {"token": meta(VOCAB, WIDTH), "position": meta(SEQ, WIDTH)},
        "layers": [layer() for _ in range(layers)],
    }
    params["head"] = {"norm": meta(WIDTH), "vocab": meta(WIDTH, VOCAB)}
    tokens = meta(batch, SEQ, dtype=torch.int64)
    return step, params, (tokens, tokens)
