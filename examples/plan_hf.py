"""A model of the library transformers on 8 GPUs: what a step of full fine-tuning takes, before there are weights.

fzero plan examples/plan_hf.py:llama_8b --mesh data=8 --device h100
"""

from __future__ import annotations

from typing import Any

import torch

import fzero as fz


def llama_8b(rows: int = 2, seq: int = 4096) -> Any:
    """A step with its transforms, its parameters, and one rank's batch."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # pyright: ignore[reportMissingImports]

    config = LlamaConfig(  # or transformers.AutoConfig.from_pretrained("a directory")
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):  # shapes alone
        model = fz.functionalize(AutoModelForCausalLM.from_config(config))
    step = model.train_step(fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-5)))
    step = fz.compose(fz.shard_params(), fz.mixed_precision("bf16"), fz.remat("full"))(step)
    ids = torch.empty(rows, seq, dtype=torch.int64, device="meta")
    return step, model.params, {"input_ids": ids, "labels": ids}
