"""One GPT, written twice: as pure functions for fzero, as modules for the peers. Same mathematics, same initial values.

No biases, learned positions, pre-norm, tanh GELU, fused attention, cross entropy in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the global batch."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    seq: int = 128
    batch: int = 8
    vocab: int = 256

    @property
    def num_params(self) -> int:
        return self.layers * (12 * self.width**2 + 2 * self.width) + (2 * self.vocab + self.seq + 1) * self.width


def _embed(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    return p["tok"][tokens] + p["pos"][: tokens.shape[1]]


def before_attention(p: Any, x: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, each [batch, heads, positions, size of a head]."""
    b, t, d = x.shape
    qkv = F.layer_norm(x, (d,), p["ln1"]) @ p["qkv"].T
    return qkv.view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4).unbind(0)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def after_attention(p: Any, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    b, t, d = x.shape
    x = x + mixed.transpose(1, 2).reshape(b, t, d) @ p["o"].T
    return x + F.gelu(F.layer_norm(x, (d,), p["ln2"]) @ p["up"].T, approximate="tanh") @ p["down"].T


def _layer(p: Any, x: torch.Tensor, heads: int) -> torch.Tensor:
    return after_attention(p, x, attention(*before_attention(p, x, heads)))


def logits_of(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), p["ln"]) @ p["out"].T


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _head(p: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits_of(p, x), targets)


embed, layer, head = fz.block(_embed), fz.block(_layer), fz.block(_head)


def make_loss(config: Config, chunks: int | None = None) -> Any:
    """The loss as a pure function of parameters and batch; with `chunks`, without the logits of all rows."""

    def loss_fn(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, targets = batch
        x = embed(params["embed"], tokens)
        for p in params["layers"]:
            x = layer(p, x, config.heads)
        if chunks is not None:
            p = params["head"]
            x = F.layer_norm(x, p["ln"].shape, p["ln"])
            return fz.chunked_cross_entropy(x, p["out"], targets, chunks=chunks)
        return head(params["head"], x, targets)

    return loss_fn


def make_init(config: Config) -> Any:
    """An init function: a key to a tree of parameters."""
    d = config.width

    def init(key: torch.Tensor) -> Any:
        keys = iter(fz.random.split(key, 3 + 4 * config.layers))

        def draw(*shape: int) -> torch.Tensor:
            return fz.random.normal(next(keys), shape) * 0.02

        def of_layer() -> dict[str, torch.Tensor]:
            weights = {"qkv": draw(3 * d, d), "o": draw(d, d), "up": draw(4 * d, d), "down": draw(d, 4 * d)}
            return {"ln1": torch.ones(d), "ln2": torch.ones(d), **weights}

        return {
            "embed": {"tok": draw(config.vocab, d), "pos": draw(config.seq, d)},
            "head": {"ln": torch.ones(d), "out": draw(config.vocab, d)},
            "layers": [of_layer() for _ in range(config.layers)],
        }

    return init


def make_batches(config: Config, count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches of tokens and targets, the same on every rank: arithmetic sequences, which a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        start = torch.randint(0, config.vocab, (config.batch, 1), generator=generator)
        stride = torch.randint(1, 5, (config.batch, 1), generator=generator)
        rows = (start + stride * torch.arange(config.seq + 1)) % config.vocab
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


# --- the same as modules ---


class Part(nn.Module):
    """One piece of the tree as a module: its parameters under their names, cast to the compute dtype where there is
    one."""

    compute: torch.dtype | None = None

    def __init__(self, params: dict[str, torch.Tensor]):
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def tree(self) -> dict[str, torch.Tensor]:
        return {
            name: getattr(self, name) if self.compute is None else getattr(self, name).to(self.compute)
            for name in self._parameters
        }


class Embed(Part):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _embed(self.tree(), tokens)


class Layer(Part):
    def __init__(self, params: dict[str, torch.Tensor], heads: int):
        super().__init__(params)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _layer(self.tree(), x, self.heads)


class Logits(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return logits_of(self.tree(), x)


class Head(Part):
    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _head(self.tree(), x, targets)


class GPT(nn.Module):
    """The model as peers know it: called with tokens and targets, it returns the loss. With a compute dtype every part
    casts its own parameters."""

    def __init__(self, params: Any, heads: int, compute: torch.dtype | None = None):
        super().__init__()
        self.embed = Embed(params["embed"])
        self.layers = nn.ModuleList(Layer(p, heads) for p in params["layers"])
        self.head = Head(params["head"])
        for module in (self.embed, *self.layers, self.head):
            module.compute = compute  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for module in self.layers:
            x = module(x)
        return self.head(x, targets)


def module(config: Config) -> GPT:
    """With the values of `make_init`."""
    return GPT(make_init(config)(fz.random.key(0)), config.heads)


def blocks(made: Any) -> list[nn.Module]:
    """What is sharded and compiled as one."""
    return [made.embed, *made.layers, made.head]
