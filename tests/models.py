"""Tiny models and batches that the tests train: big enough to have every kind of line in their programs, small enough
to take milliseconds a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim

VOCAB, SEQ, WIDTH, BATCH = 31, 6, 32, 12  # an odd vocabulary: leaves that no number of ranks divides


# gpt: everything in blocks, the layers alike.


@fz.block
def embed(p, tokens):
    return p["token"][tokens] + p["position"][: tokens.shape[1]]


@fz.block
def layer(p, x, heads=2):
    b, t, d = x.shape
    q, k, v = (
        (F.layer_norm(x, (d,), p["ln_1"]) @ p["qkv"].T)
        .view(b, t, 3, heads, d // heads)
        .permute(2, 0, 3, 1, 4)
        .unbind(0)
    )
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d) @ p["out"].T
    return x + F.gelu(F.layer_norm(x, (d,), p["ln_2"]) @ p["up"].T, approximate="tanh") @ p["down"].T


@fz.block
def head(p, x, targets):
    logits = F.layer_norm(x, (x.shape[-1],), p["ln"]) @ p["out"].T
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt_loss(params, batch):
    x = embed(params["embed"], batch["tokens"])
    for p in params["layers"]:
        x = layer(p, x)
    return head(params["head"], x, batch["targets"])


def gpt_init(key, layers=2, width=WIDTH):
    keys = iter(fz.random.split(key, 3 + 4 * layers))

    def normal(*shape):
        return fz.random.normal(next(keys), shape) * 0.1

    return {
        "embed": {"token": normal(VOCAB, width), "position": normal(SEQ, width)},
        "layers": [
            {
                "ln_1": torch.ones(width),
                "qkv": normal(3 * width, width),
                "out": normal(width, width),
                "ln_2": torch.ones(width),
                "up": normal(2 * width, width),
                "down": normal(width, 2 * width),
            }
            for _ in range(layers)
        ],
        "head": {"ln": torch.ones(width), "out": normal(VOCAB, width)},
    }


# bare: no block anywhere; the trace falls into implicit blocks.


def bare_loss(params, batch):
    x = params["token"][batch["tokens"]].mean(1)
    for w, b in params["layers"]:
        x = torch.tanh(x @ w + b)
    return F.cross_entropy(x @ params["out"], batch["targets"][:, 0])


def bare_init(key):
    keys = iter(fz.random.split(key, 5))

    def normal(*shape):
        return fz.random.normal(next(keys), shape) * 0.3

    return {
        "token": normal(VOCAB, 12),
        "layers": [(normal(12, 12), torch.zeros(12)) for _ in range(3)],
        "out": normal(12, VOCAB),
    }


# mixed: the layers are blocks; embedding, a gate between the layers and the loss are glue.


@fz.block
def dense(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"])


def mixed_loss(params, batch):
    x = params["token"][batch["tokens"]]
    for i, p in enumerate(params["layers"]):
        x = dense(p, x) * (1 + params["gate"][i])
    logits = x @ params["token"].T + params["bias"]
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def mixed_init(key, width=10):
    keys = iter(fz.random.split(key, 5))

    def normal(*shape):
        return fz.random.normal(next(keys), shape) * 0.3

    return {
        "token": normal(VOCAB, width),
        "layers": [{"w": normal(width, width), "b": torch.zeros(width)} for _ in range(3)],
        "gate": torch.zeros(3),
        "bias": torch.zeros(VOCAB),
    }


@dataclass(frozen=True)
class Model:
    init: Callable[..., Any]
    loss: Callable[..., Any]


MODELS = {"gpt": Model(gpt_init, gpt_loss), "bare": Model(bare_init, bare_loss), "mixed": Model(mixed_init, mixed_loss)}


def matrices(path: str, leaf: torch.Tensor) -> int:
    """Of the layers all matrices, of a fused qkv three."""
    return (3 if "qkv" in path else leaf.dim() == 2) if "layers" in path else 0


OPTIMIZERS = {
    "adamw": lambda: optim.adamw(1e-2, weight_decay=0.1),
    "sgd": lambda: optim.sgd(0.3, momentum=0.9),
    "lion": lambda: optim.lion(1e-3),
    "lamb": lambda: optim.lamb(1e-2),
    "muon": lambda: optim.chain(
        optim.clip_by_global_norm(0.5),
        optim.muon(1e-2, where=matrices, other=optim.adamw(1e-2), ns_dtype="fp32"),
    ),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)),
}

STAGES = {0: fz.data_parallel, 1: fz.shard_opt_state, 2: fz.shard_grads, 3: fz.shard_params}


def whitening(lr: float) -> optim.GradientTransformation:
    """State of other shapes than its parameter's, and several results of one function of whole matrices."""

    def init(params: Any) -> Any:
        return {
            "left": fz.tree.map(lambda p: torch.eye(p.shape[0]), params),
            "mu": fz.tree.map(torch.zeros_like, params),
        }

    @optim.unsharded
    def leaf(g: torch.Tensor, left: torch.Tensor, mu: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g = g.reshape(g.shape[0], -1)
        left = 0.9 * left + g @ g.T
        found = torch.linalg.solve(left, g)
        return found.reshape(mu.shape), left, 0.9 * mu + found.reshape(mu.shape)

    def update(grads: Any, state: Any, params: Any) -> Any:
        flat = [leaf(*x) for x in zip(*map(fz.tree.leaves, (grads, state["left"], state["mu"])), strict=True)]
        _, lefts, mus = (fz.tree.unflatten(fz.tree.structure(grads), list(x)) for x in zip(*flat, strict=True))
        return fz.tree.map(lambda m: -lr * m, mus), {"left": lefts, "mu": mus}

    return optim.GradientTransformation(init, update)


def batches(num: int, seed: int = 0, size: int = BATCH) -> list[dict[str, torch.Tensor]]:
    """Global batches, learnable: each token is a function of the one before, so that the loss falls."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(num):
        start = torch.randint(0, VOCAB, (size, 1), generator=generator)
        tokens = (
            start * 3 ** torch.arange(SEQ + 1) + torch.randint(0, 2, (size, SEQ + 1), generator=generator)
        ) % VOCAB
        out.append({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    return out


def part(batch: Any, mesh: fz.Mesh) -> Any:
    """This rank's part of a global batch."""
    return fz.tree.map(lambda x: x.chunk(mesh.size)[mesh.rank] if x.dim() else x, batch)


def meta(tree: Any) -> Any:
    return fz.tree.map(lambda x: torch.empty_like(x, device="meta"), tree)


def meta_part(batch: Any, ranks: int) -> Any:
    """One rank's part of a global batch, as meta tensors."""
    return fz.tree.map(lambda x: torch.empty((x.shape[0] // ranks, *x.shape[1:]), dtype=x.dtype, device="meta"), batch)
