"""Makes mixture-of-experts layers of transformers compute a limited number of tokens per expert."""

from __future__ import annotations

import torch

from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroValueError
from fzero.hf.transformers_import import library
from fzero.modules.mixture_experts import NAME, register
from fzero.ops.experts import Capacity, capacity_problems


@plain_numbers
def experts_implementation(capacity: Capacity | None = None, ranks: int | None = None) -> str:
    """Registers an implementation of mixture-of-experts layers with transformers, and returns its name.

    `fz.experts.dispatch` arranges the tokens of all experts in rows, and each matrix product computes all experts at
    once. `fz.functionalize` and `fz.hf` use the implementation without a capacity for models for which no other one
    was chosen. Pass the name as `experts_implementation=` to `from_config` and `from_pretrained`, of transformers or of
    `fz.hf`, or to `model.set_experts_implementation`.

    Args:
        capacity: the number of tokens that an expert takes, as a factor of tokens x k / experts. Choices beyond it
            are dropped. None drops nothing, and computes one row for each choice. ("rank", factor): the rows of all
            experts of a rank together, as in `fz.experts.dispatch`.
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
    if problems := capacity_problems(capacity, ranks):
        fix = "a factor above 0, e.g. 1.25; None drops nothing"
        raise FzeroValueError("hf.experts_implementation", "invalid arguments", problems, fix)
    said = ["rank", ranks, f"{capacity[1]:g}"] if isinstance(capacity, tuple) else [f"{capacity:g}"] if capacity else []
    return register("_".join(map(str, [NAME, *said])), capacity, ranks)


def is_mixture(module: torch.nn.Module) -> bool:
    """Whether a transformers model has experts whose implementation can be chosen (`experts_implementation=`)."""
    # transformers' decorator for such modules sets these attributes, and `_computed` reads them
    return any(hasattr(part, "has_gate") and hasattr(part, "is_transposed") for part in module.modules())
