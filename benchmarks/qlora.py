"""A Llama with LoRA on frozen weights in NF4: with bitsandbytes, and with `fz.quantize_frozen`. Same initial values.

Needs peft, and bitsandbytes for the peers.
"""

from __future__ import annotations

from typing import Any

import llama
import peft  # pyright: ignore[reportMissingImports]
import torch
from llama import Config, make_batches
from torch import nn

import fzero as fz

__all__ = ["Config", "functionalized", "make_batches", "module"]

LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": "gaussian"}


def _adapted(base: nn.Module) -> Any:
    """Puts adapters on a model, with the same values for all contestants."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if p.requires_grad:  # not zero, so that the first step has gradients for both factors
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name) + p.numel())) * 0.02)
    return adapted


class Adapted(llama.Llama):
    """The module that peers train: linear layers of bitsandbytes, which sees a batch as `llama.Llama` does."""

    def __init__(self, config: Config):
        nn.Module.__init__(self)
        self.inner = _adapted(_quantized(llama.module(config).inner))


def _quantized(base: Any) -> Any:
    """Replaces the linear layers that peft adapts by those of bitsandbytes."""
    import bitsandbytes  # pyright: ignore[reportMissingImports]

    for name, layer in list(base.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            made = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.float32,
                compress_statistics=False,
                quant_type="nf4",
            )
            made.weight = bitsandbytes.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
            )
            owner, _, attribute = name.rpartition(".")
            setattr(base.get_submodule(owner), attribute, made.to("cpu"))  # `to` quantizes
    return base


def module(config: Config) -> nn.Module:
    return Adapted(config)


def functionalized(config: Config) -> tuple[Any, Any]:
    """The module with `fz.quantize_frozen`, and its parameters."""
    inner: Any = llama.module(config).inner
    base = inner.train()
    model = fz.functionalize(fz.quantize_frozen(_adapted(base), "nf4"))
    return model, model.params
