"""Computes mixture-of-experts layers of transformers with `fz.experts`, which `expert_parallel` can shard."""

from __future__ import annotations

from typing import Any

import torch

from fzero.ops.experts import Back, Capacity, combine, dispatch, matmul

NAME = "fzero_rows"
"""The name under which the implementation without a capacity is registered with transformers, and the prefix of the
names of the others."""


def register(name: str = NAME, capacity: Capacity | None = None, ranks: int | None = None) -> str:
    """Registers an implementation of mixture-of-experts layers with transformers, and returns its name.

    Args:
        name: its name.
        capacity, ranks: as in `fz.experts.dispatch`.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return _computed(self, hidden_states, top_k_index, top_k_weights, capacity, ranks)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return name


def _computed(
    experts: Any,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    capacity: Capacity | None,
    ranks: int | None,
) -> torch.Tensor:
    """Computes the output of an experts module of transformers."""
    rows, back = dispatch(x, chosen, weights, num_experts=experts.num_experts, capacity=capacity, ranks=ranks)
    if experts.has_gate:
        rows = experts._apply_gate(_product(experts, rows, "gate_up_proj", back))
    else:
        rows = experts.act_fn(_product(experts, rows, "up_proj", back))
    rows = _product(experts, rows, "down_proj", back)
    if getattr(experts, "has_post_expert_norm", False):  # not in transformers 5.19
        rows = experts.post_expert_norm(rows)
    return combine(rows, back).to(x.dtype)


def _product(experts: Any, rows: torch.Tensor, name: str, back: Back) -> torch.Tensor:
    """Multiplies rows with the parameter `name`, [experts, outputs, inputs] or transposed, and adds its bias."""
    weight = getattr(experts, name)
    out = matmul(rows, weight if experts.is_transposed else weight.transpose(1, 2), back)
    if not experts.has_bias:
        return out
    bias = getattr(experts, f"{name}_bias")[:, None]
    one_each = back.expert is None and back.ends is None  # the rows of each expert are apart
    return out + (bias if one_each else matmul(rows.new_ones(*rows.shape[:-1], 1), bias, back))
