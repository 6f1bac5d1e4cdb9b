"""Makes mixture-of-experts layers of transformers compute products of fixed size per expert, which `expert_parallel`
can shard."""

from __future__ import annotations

from typing import Any

import torch

from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroValueError
from fzero.hf.transformers_import import library
from fzero.ops.experts import Back, Capacity, capacity_problems, combine, dispatch, matmul

NAME = "fzero_rows"
"""The prefix of the names under which these implementations are registered with transformers."""


@plain_numbers
def experts_implementation(capacity: Capacity | None = None, ranks: int | None = None) -> str:
    """Registers an implementation of mixture-of-experts layers with transformers, and returns its name.

    `fz.experts.dispatch` arranges the tokens of all experts in rows, and each matrix product computes all experts at
    once. Pass the name as `experts_implementation=` to `from_config` and `from_pretrained`, of transformers or of
    `fz.hf`, or to `model.set_experts_implementation`.

    Args:
        capacity: the number of tokens that an expert takes, as a factor of tokens x k / experts. Choices beyond it
            are dropped. None drops nothing, and computes experts / k times as many rows as there are choices. ("rank",
            factor): the rows of all experts of a rank together, as in `fz.experts.dispatch`.
        ranks: for a capacity per rank, the size of the axis that shards the experts, or a multiple of it.

    Raises:
        FzeroValueError: an invalid capacity; a number of ranks below 1, or one without a capacity per rank.

    Example:
        >>> import transformers, fzero as fz
        >>> settings = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        >>> config = transformers.MixtralConfig(**settings, num_attention_heads=2, num_key_value_heads=2)
        >>> name = fz.hf.experts_implementation(capacity=1.25)
        >>> model = fz.hf.from_config(transformers.AutoModelForCausalLM, config, experts_implementation=name)
        >>> experts = fz.expert_parallel(where=lambda path, leaf: "['experts']" in path)
    """
    library("hf.experts_implementation")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports] - of `hf`

    if problems := capacity_problems(1.0 if capacity is None else capacity, ranks):
        fix = "a factor above 0, e.g. 1.25; None drops nothing"
        raise FzeroValueError("hf.experts_implementation", "invalid arguments", problems, fix)
    said = ["rank", ranks, f"{capacity[1]:g}"] if isinstance(capacity, tuple) else [f"{capacity:g}"] if capacity else []
    name = "_".join(map(str, [NAME, *said]))

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return _computed(self, hidden_states, top_k_index, top_k_weights, capacity, ranks)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return name


def is_mixture(module: torch.nn.Module) -> bool:
    """Whether a transformers model has experts whose implementation can be chosen (`experts_implementation=`)."""
    # transformers' decorator for such modules sets these attributes, and `_computed` reads them
    return any(hasattr(part, "has_gate") and hasattr(part, "is_transposed") for part in module.modules())


def _computed(
    experts: Any,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    capacity: Capacity | None,
    ranks: int | None,
) -> torch.Tensor:
    """Computes the output of an experts module of transformers."""
    num = experts.num_experts
    factor = num / chosen.shape[-1] if capacity is None else capacity
    rows, back = dispatch(x, chosen, weights, num_experts=num, capacity=factor, ranks=ranks)
    if experts.has_gate:
        rows = experts._apply_gate(_product(experts, rows, "gate_up_proj", back))
    else:
        rows = experts.act_fn(_product(experts, rows, "up_proj", back))
    rows = _product(experts, rows, "down_proj", back)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    return combine(rows, back).to(x.dtype)


def _product(experts: Any, rows: torch.Tensor, name: str, back: Back) -> torch.Tensor:
    """Multiplies rows with the parameter `name`, [experts, outputs, inputs] or transposed, and adds its bias."""
    weight = getattr(experts, name)
    out = matmul(rows, weight if experts.is_transposed else weight.transpose(1, 2), back)
    if not experts.has_bias:
        return out
    bias = getattr(experts, f"{name}_bias")[:, None]
    return out + (bias if back.expert is None else matmul(rows.new_ones(*rows.shape[:2], 1), bias, back))
