"""One Llama, twice: the module of transformers, and pure functions of the same arithmetic. Same initial values.

The library is imported here, by the functions too, so that its code, 77 MiB of resident memory, is in nobody's growth.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from model import Config, make_batches
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

import fzero as fz

__all__ = ["Config", "blocks", "functionalized", "make_batches", "make_init", "make_loss", "module"]

EPS, BASE = 1e-6, 10_000.0
_NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
          "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
          "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}  # fmt: skip


def hidden(config: Config) -> int:
    """The width of the MLP: a multiple of 64."""
    return -(-8 * config.width // 3 // 64) * 64


# --- as functions ---


def _norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@fz.block
def embed(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, p["token"])


@fz.block
def layer(p: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    b, t, d = x.shape
    y = _norm(p["norm_1"], x)
    q, k, v = (F.linear(y, p[name]).view(b, t, heads, d // heads).transpose(1, 2) for name in ("q", "k", "v"))
    y = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).reshape(b, t, d), p["o"])
    y = _norm(p["norm_2"], x)
    return x + F.linear(F.silu(F.linear(y, p["gate"])) * F.linear(y, p["up"]), p["down"])


@fz.block
def head(p: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(_norm(p["norm"], x), p["out"]).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_loss(config: Config) -> Any:
    """The loss as a pure function of parameters and batch. The last token has no target."""

    def loss_fn(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, _ = batch
        angles = torch.arange(tokens.shape[1])[:, None] * _frequencies(config)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        x = embed(params["embed"], tokens)
        for p in params["layers"]:
            x = layer(p, x, cos, sin, config.heads)
        return head(params["head"], x, F.pad(tokens, (0, 1), value=-100)[:, 1:])

    return loss_fn


def _frequencies(config: Config) -> torch.Tensor:
    size = config.width // config.heads
    return 1.0 / (BASE ** (torch.arange(0, size, 2, dtype=torch.float32) / size))


def make_init(config: Config) -> Any:
    """An init function: a key to a tree of parameters."""
    d, h = config.width, hidden(config)
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (h, d), "up": (h, d), "down": (d, h)}

    def init(key: torch.Tensor) -> Any:
        keys = iter(fz.random.split(key, 2 + len(shapes) * config.layers))

        def draw(*shape: int) -> torch.Tensor:
            return fz.random.normal(next(keys), shape) * 0.02

        def of_layer() -> Any:
            return {
                "norm_1": torch.ones(d),
                "norm_2": torch.ones(d),
                **{name: draw(*shape) for name, shape in shapes.items()},
            }

        return {
            "embed": {"token": draw(config.vocab, d)},
            "head": {"norm": torch.ones(d), "out": draw(config.vocab, d)},
            "layers": [of_layer() for _ in range(config.layers)],
        }

    return init


# --- as the module ---


class Llama(nn.Module):
    """The module of transformers, called with tokens, whose targets it makes itself, as peers call it. It returns the
    loss."""

    def __init__(self, config: Config):
        super().__init__()
        self.inner = _transformers(config)

    def forward(self, tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, labels=tokens).loss


def module(config: Config) -> nn.Module:
    """With the values of `make_init`."""
    made = Llama(config)
    with torch.no_grad():
        for name, x in _by_name(make_init(config)(fz.random.key(0))).items():
            made.inner.get_parameter(name).copy_(x)
    return made


def blocks(made: Any) -> list[nn.Module]:
    return list(made.inner.model.layers)


def functionalized(config: Config) -> tuple[Any, Any]:
    """The module as functions, and an init function of the values of `make_init`."""
    with torch.device("meta"):
        made = _transformers(config)
    model = fz.functionalize(made.train())

    def init(key: torch.Tensor) -> Any:
        flat = _by_name(make_init(config)(key))
        flat |= {f"model.rotary_emb.{name}": _frequencies(config) for name in ("inv_freq", "original_inv_freq")}
        return fz.tree.unflatten(fz.tree.structure(model.params), [flat[name] for name in fz.tree.names(model.params)])

    return model, init


def _transformers(config: Config) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.width,
            intermediate_size=hidden(config),
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.seq,
            rms_norm_eps=EPS,
            use_cache=False,
        )
    )


def _by_name(params: Any) -> dict[str, torch.Tensor]:
    """Parameters of the functions under the names that the module has for them."""
    found = {
        "model.embed_tokens.weight": params["embed"]["token"],
        "model.norm.weight": params["head"]["norm"],
        "lm_head.weight": params["head"]["out"],
    }
    for i, p in enumerate(params["layers"]):
        found |= {f"model.layers.{i}.{_NAMES[name]}.weight": x for name, x in p.items()}
    return found
