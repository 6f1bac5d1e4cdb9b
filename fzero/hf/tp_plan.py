"""Determines how `tensor_parallel` shards a transformers model: converts the model's own tensor-parallel plan to
rules."""

from __future__ import annotations

from typing import Any

import torch

from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.modules.functionalize import Functional
from fzero.transforms.tensor import matches

_OUTPUTS = {"colwise", "colwise_gather_output", "packed_colwise", "colwise_rep"}
_INPUTS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_WORDS = {"embedding_rowwise"}
_OWN = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.c_proj": "rowwise",
        "wte": "embedding_rowwise",
    }
}
"""Plans for model types for which transformers has none."""
_PIECES = {"c_attn": 3, "gate_up_proj": 2}
"""Matrices that consist of several matrices of equal size, concatenated along their outputs."""


@plain_numbers
def tensor_rules(model: Any, *, ranks: int | None = None) -> dict[str, Any]:
    """Returns the rules of `fz.tensor_parallel` for a transformers model, from transformers' own plan for it
    (`tp_plan`).

    Args:
        model: a model of transformers, or what `fz.functionalize`, `from_pretrained` or `from_config` made from one.
        ranks: the size of the axis. If it does not divide the size of a vocabulary or the number of attention heads,
            the vocabulary or the attention is not sharded. If it only does not divide the number of key and value
            heads, these alone are not sharded.

    Returns: for each name in the plan, with `*` for the number of a layer, the dim that is sharded, or `(dim,
    groups)`.

    Raises:
        FzeroTypeError: the argument is no such model.
        FzeroValueError: neither transformers nor fzero has a plan for the model.

    Example:
        >>> import transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> rules = fz.hf.tensor_rules(fz.hf.from_config(transformers.AutoModelForCausalLM, config))
        >>> rules["h.*.attn.c_attn.weight"], rules["h.*.c_proj.weight"]
        ((1, 3), 0)
    """
    module = getattr(model, "module", model._module if isinstance(model, Functional) else model)
    config = getattr(module, "config", None)
    if not isinstance(module, torch.nn.Module) or config is None:
        fix = "fz.hf.tensor_rules(fz.hf.from_pretrained(transformers.AutoModelForCausalLM, directory))"
        raise FzeroTypeError("tensor_rules", f"{type(model).__name__} is not a model of transformers", fix=fix)
    kind = config.model_type
    plan = {**(getattr(module, "tp_plan", None) or {}), **_OWN.get(kind, {})}
    if not any(style in _OUTPUTS | _INPUTS for style in plan.values()):
        what = f"neither transformers nor fzero has a plan for {kind!r}"
        fix = (
            "leave rules out: fz.tensor_parallel() chooses them for a batch; or give some of your own, "
            "rules={'q_proj.weight': 0, 'o_proj.weight': 1, ...}"
        )
        raise FzeroValueError("tensor_rules", what, fix=fix)
    rules: dict[str, Any] = {}
    parts = dict(module.named_modules())
    known = {name for name, _ in module.named_parameters()}  # of tied parameters, only the first name
    for glob, style in plan.items():
        part = next((x for name, x in parts.items() if matches(name, glob)), None)
        if part is None or style not in _OUTPUTS | _INPUTS | _WORDS or (ranks and _torn(glob, config, ranks)):
            continue
        weight = getattr(part, "weight", None)
        if weight is None or weight.dim() != 2:
            continue
        of_words = weight.shape[0] == getattr(config.get_text_config(), "vocab_size", None)
        if (of_words and ranks and weight.shape[0] % ranks) or not any(matches(x, f"{glob}.weight") for x in known):
            continue
        # transformers' Conv1D stores its weight as [inputs, outputs], nn.Linear as [outputs, inputs].
        outputs = 1 if type(part).__name__ == "Conv1D" else 0
        pieces = _pieces(glob.rpartition(".")[2], weight.shape[outputs], config)
        dim = 1 - outputs if style in _INPUTS else outputs
        rules[f"{glob}.weight"] = dim if style in _INPUTS or pieces == 1 else (dim, pieces)
        if getattr(part, "bias", None) is not None:
            rules[f"{glob}.bias"] = None if style in _INPUTS else 0 if pieces == 1 else (0, pieces)
    return rules


def _torn(glob: str, config: Any, ranks: int) -> bool:
    """Whether sharding over this many ranks would split attention heads."""
    *parents, last = glob.split(".")
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or not any("attn" in name or "attention" in name for name in parents):
        return False
    pairs = getattr(text, "num_key_value_heads", None) or heads
    return bool(heads % ranks or (pairs % ranks and last in ("k_proj", "v_proj", "qkv_proj")))


def _pieces(last: str, size: int, config: Any) -> int:
    """Returns how many matrices of equal size a matrix consists of, judging by its name."""
    if last == "qkv_proj":  # queries, keys and values
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return size // (heads * head)
    return _PIECES.get(last, 1)
