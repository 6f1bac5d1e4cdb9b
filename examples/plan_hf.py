"""Plans steps of Llama 3 8B and Qwen3 30B-A3B, from Hugging Face Transformers, without their weights.

fzero plan examples/plan_hf.py:llama_8b --mesh data=8 --device h100              # full fine-tuning on 8 GPUs
fzero plan examples/plan_hf.py:llama_8b_lora --mesh data=1 --device rtx4090      # LoRA on one GPU; needs peft
fzero plan examples/plan_hf.py:llama_8b_qlora --mesh data=1 --device rtx4090     # the same, with weights in 4 bits
fzero plan examples/plan_hf.py:qwen3_30b_a3b --mesh data=1 --device rtx4090      # a mixture, with its state on the host
fzero plan examples/plan_hf.py:llama_8b_long --mesh data=1 --device h100          # a sequence of 480,000 tokens
fzero plan examples/plan_hf.py:llama_70b_qlora --mesh data=1 --device rtx4090 --budget 22GB --host-budget 100GB
"""

from __future__ import annotations

from typing import Any

import torch

import fzero as fz


def llama(module: Any, optimizer: Any, rows: int, seq: int) -> Any:
    """Returns the step with its transforms, the parameters, and the batch of one rank, as `fzero plan` needs them."""
    model = fz.functionalize(module)
    transforms = fz.compose(fz.shard_params(), fz.mixed_precision("bf16"), fz.remat("full"))
    ids = torch.empty(rows, seq, dtype=torch.int64, device="meta")
    return transforms(model.train_step(optimizer)), model.params, {"input_ids": ids, "labels": ids}


def llama_8b(rows: int = 2, seq: int = 4096) -> Any:
    """Full fine-tuning, with the gradients clipped."""
    return llama(module(), fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-5)), rows, seq)


def llama_8b_lora(rows: int = 1, seq: int = 2048) -> Any:
    """Trains LoRA adapters of rank 8 on all linear layers. The other parameters are frozen."""
    return llama(with_lora(module()), fz.optim.adamw(2e-4), rows, seq)


def llama_8b_qlora(rows: int = 1, seq: int = 1024) -> Any:
    """The same, with the frozen weights of linear layers in 4 bits."""
    return llama(fz.quantize_frozen(with_lora(module())), fz.optim.adamw(2e-4), rows, seq)


def qwen3_30b_a3b(rows: int = 1, seq: int = 4096, count: int = 8, **sizes: int) -> Any:
    """Full fine-tuning of a mixture of 30.5 billion parameters, of which 3.3 billion compute each token. Parameters,
    in bf16, and optimizer state, with moments of 8 bits, stay in host memory. Each layer, with all its experts, is
    copied to the device once for all micro-batches.

    Args:
        rows, seq: the shape of a micro-batch.
        count: the number of micro-batches.
        sizes: replace those of the configuration, for a smaller copy.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig  # pyright: ignore[reportMissingImports]

    published = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    settings: dict[str, Any] = published | sizes
    with torch.device("meta"):
        model = fz.functionalize(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**settings)))
    transforms = fz.compose(
        fz.mixed_precision("bf16", params="bf16"),
        fz.accumulate(count, schedule="layerwise"),
        fz.remat("full"),
        fz.offload("cpu", ("params", "opt_state", "activations")),
    )
    ids = torch.empty(rows * count, seq, dtype=torch.int64, device="meta")
    step = transforms(model.train_step(fz.optim.adamw(1e-5, state_dtype="int8")))
    return step, model.params, {"input_ids": ids, "labels": ids}


def llama_70b_qlora(rows: int = 1, seq: int = 1024) -> Any:
    """The same of a 70B model. Weights in 4 bits are 38 GB: on a single GPU of 24 GB, more than half of them
    stay in host memory."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    step, params, batch = llama(fz.quantize_frozen(with_lora(module(**sizes))), fz.optim.adamw(2e-4), rows, seq)
    return fz.offload("auto")(step), params, batch


class Tiled(torch.nn.Module):
    """An MLP that computes a sequence in chunks of positions, so that its intermediate values exist for one chunk at a
    time, also in the backward: `remat("full")` recomputes the chunks of a layer one by one."""

    def __init__(self, mlp: torch.nn.Module, chunks: int):
        super().__init__()
        self.mlp, self.chunks = mlp, chunks

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows, positions, width]
        return torch.cat([self.mlp(part) for part in x.chunk(self.chunks, 1)], 1)


def llama_8b_long(seq: int = 480_000, chunks: int = 8, **sizes: int) -> Any:
    """Full fine-tuning on one long sequence. Parameters, in bf16, optimizer state and the inputs of layers stay in host
    memory, and the loss and the MLPs are computed in chunks of positions.

    Args:
        seq: the number of tokens.
        chunks: the number of chunks of each MLP; 1 leaves it as it is.
        sizes: replace those of the configuration, for a smaller copy.
    """
    net = module(**sizes)
    for layer in net.model.layers if chunks > 1 else ():
        layer.mlp = Tiled(layer.mlp, chunks)
    model = fz.functionalize(net)
    transforms = fz.compose(
        fz.mixed_precision("bf16", params="bf16"),
        fz.remat("full"),
        fz.offload("cpu", ("params", "opt_state", "activations")),
    )
    ids = torch.empty(1, seq, dtype=torch.int64, device="meta")
    step = transforms(model.train_step(fz.optim.adamw(1e-5), loss="chunked"))
    return step, model.params, {"input_ids": ids, "labels": ids}


def with_lora(base: Any) -> Any:
    """Returns the model with adapters."""
    import peft  # pyright: ignore[reportMissingImports]

    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return peft.get_peft_model(base, lora)


def module(**sizes: Any) -> Any:
    """Llama 3 8B on the meta device, or one of other sizes: its tensors have shapes, but no values."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # pyright: ignore[reportMissingImports]

    usual: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    more: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    config = LlamaConfig(**usual | more | sizes)  # or transformers.AutoConfig.from_pretrained("a directory")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
