"""Has mixtures of the library compute products of fixed size, of the rows of each expert: what expert_parallel cuts."""

from __future__ import annotations

import math
from typing import Any

import torch

from fzero.errors import FzeroValueError
from fzero.experts import combine, dispatch

NAME = "fzero_rows"
"""The beginning of the names under which the library knows these implementations."""


def expert_rows(capacity: float | None = None) -> str:
    """Registers an implementation of experts with the library, and returns its name.

    `fz.experts.dispatch` makes the rows of each expert, and two batched products compute with all of them. Give the
    name as `experts_implementation=` to `from_config` and `from_pretrained`, of the library or of `fz.hf`, or to
    `model.set_experts_implementation`.

    Args:
        capacity: the rows that an expert takes, as a factor of tokens x k / experts: choices above it are dropped.
            None drops nothing, and computes experts / k times as many rows as there are choices.

    Raises:
        FzeroValueError: a capacity that is not a number above 0.

    Example:
        >>> import transformers, fzero as fz
        >>> settings = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        >>> config = transformers.MixtralConfig(**settings, num_attention_heads=2, num_key_value_heads=2)
        >>> name = fz.hf.expert_rows(capacity=1.25)
        >>> model = fz.hf.from_config(transformers.AutoModelForCausalLM, config, experts_implementation=name)
        >>> experts = fz.expert_parallel(where=lambda path, leaf: "['experts']" in path)
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports] - of `hf`

    if capacity is not None and (
        isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or not 0 < capacity < math.inf
    ):
        what = f"capacity={capacity!r}"
        raise FzeroValueError("hf.expert_rows", what, fix="a factor above 0, e.g. 1.25; None drops nothing")
    name = NAME if capacity is None else f"{NAME}_{capacity:g}"

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return _computed(self, hidden_states, top_k_index, top_k_weights, capacity)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return name


def _computed(
    experts: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, capacity: float | None
) -> torch.Tensor:
    """The output of a module of experts of the library."""
    num = experts.num_experts
    factor = num / chosen.shape[-1] if capacity is None else capacity
    rows, back = dispatch(x, chosen, weights, num_experts=num, capacity=factor)
    if experts.has_gate:
        rows = experts._apply_gate(_product(experts, rows, "gate_up_proj"))
    else:
        rows = experts.act_fn(_product(experts, rows, "up_proj"))
    rows = _product(experts, rows, "down_proj")
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    return combine(rows, back).to(x.dtype)


def _product(experts: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    """Rows times the parameter of a name, [experts, outputs, inputs] or transposed, with its bias."""
    weight = getattr(experts, name)
    out = torch.bmm(rows, weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out
