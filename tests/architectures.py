"""Architectures of `transformers` as tiny models with random weights, and what a step makes of them beside PyTorch.
Nothing is downloaded.

`functional` is what a user writes to train a module: its tensors as one tree, its layers as blocks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.stateless import _reparametrize_module

import fzero as fz
from fzero.optim import GradientTransformation

# --- a module as a function ---


def functional(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    """A module's parameters and buffers by name, a tied tensor being one object, and `apply(tensors, **kwargs)`.

    What runs has no weights of its own. Each layer, a member of a list of modules of one class, is a block. What it
    writes into buffers is dropped.
    """
    same: dict[int, torch.Tensor] = {}
    tensors = {n: same.setdefault(id(x), x.detach()) for n, x in _tensors(module)}
    meta_module = copy.deepcopy(module).to("meta")
    for layer in layers(meta_module):
        _as_block(layer)

    def apply(tensors: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        with _reparametrize_module(meta_module, _buffers_cloned(meta_module, tensors)):
            return meta_module(**kwargs)

    return tensors, apply


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _buffers_cloned(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {n: tensors[n].clone() for n, _ in module.named_buffers(remove_duplicate=False)}


def layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost members of lists that have two or more of their class with parameters."""
    for child in module.children():
        kinds = (
            [type(m) for m in child.children()] if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        )
        for m in child.children() if kinds else ():
            alike = kinds.count(type(m)) > 1 and any(True for _ in m.children()) and any(True for _ in m.parameters())
            yield from [m] if alike else layers(m)
        if not kinds:
            yield from layers(child)


def _as_block(layer: torch.nn.Module) -> None:
    forward = layer.forward

    def run(tensors: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        with _reparametrize_module(layer, _buffers_cloned(layer, tensors)):
            return forward(*args, **kwargs)

    block = fz.block(run)
    layer.forward = lambda *args, **kwargs: block(dict(_tensors(layer)), args, kwargs)


# --- the models ---


class Model(NamedTuple):
    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    settings: Mapping[str, Any] = MappingProxyType({})


VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 2
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
MODELS: dict[str, Callable[[], Model]] = {}


@functools.cache
def transformers() -> Any:
    """The library, imported by the first test that runs one of its models, and never asking a hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip("transformers", reason="architectures come from transformers")


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, (BATCH, LENGTH))


def build(head: str, config: Any) -> torch.nn.Module:
    """A model in training mode without dropout and caches, no parameter at a special value."""
    for part in [config, *(v for v in vars(config).values() if isinstance(v, transformers().PreTrainedConfig))]:
        for name, value in vars(part).items():
            if ("drop" in name or name == "layerdrop") and isinstance(value, float):
                setattr(part, name, 0.0)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    model = getattr(transformers(), head)
    model = (model.from_config if head.startswith("Auto") else model)(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


def text(
    name: str,
    kind: str,
    head: str = "AutoModelForCausalLM",
    mask: bool = True,
    drop: Sequence[str] = (),
    experts: bool = False,
    **settings: Any,
) -> None:
    def make() -> Model:
        config = transformers().AutoConfig.for_model(
            kind, **{k: v for k, v in {**TEXT, **settings}.items() if k not in drop}
        )
        module = build(head, config)
        if experts:
            module.set_experts_implementation("batched_mm")
        x = tokens()
        labels = x.clone()
        labels[0, :5] = -100
        attention = torch.ones_like(x)
        attention[1, -3:] = 0
        return Model(module, {"input_ids": x, "labels": labels, **({"attention_mask": attention} if mask else {})})

    MODELS[name] = make


def vision(name: str, kind: str | None = None, **settings: Any) -> None:
    def make() -> Model:
        config = transformers().AutoConfig.for_model(kind or name, num_labels=5, **settings)
        return Model(
            build("AutoModelForImageClassification", config),
            {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH,))},
        )

    MODELS[name] = make


# names that a configuration of its own has
MHA = ("num_attention_heads", "intermediate_size", "max_position_embeddings", "num_hidden_layers", "hidden_size")
GQA = {"num_key_value_heads": 2}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "drop": MHA}
MASKED = "AutoModelForMaskedLM"

text("llama", "llama", **GQA)
text("llama, tied", "llama", tie_word_embeddings=True, **GQA)
text("mistral", "mistral", sliding_window=8, **GQA)
text("qwen2", "qwen2", **GQA)
text("qwen3", "qwen3", head_dim=8, **GQA)
text("gemma", "gemma", head_dim=8, **GQA)
text("gemma2", "gemma2", head_dim=8, sliding_window=8, **GQA)
text("gemma3", "gemma3_text", head_dim=8, sliding_window=8, **GQA)
text("phi", "phi")
text("phi3", "phi3", **GQA)
text("granite", "granite", **GQA)
text("cohere", "cohere", **GQA)
text("stablelm", "stablelm", **GQA)
text("starcoder2", "starcoder2", **GQA)
text("olmo2", "olmo2", **GQA)
text("smollm3", "smollm3", **GQA)
text("gpt2", "gpt2", **GPT2)
text("gpt_neox", "gpt_neox")
text("gptj", "gptj", rotary_dim=4, **GPT2)
text("codegen", "codegen", rotary_dim=4, **GPT2)
text("opt", "opt", ffn_dim=64, word_embed_proj_dim=WIDTH)
text("falcon", "falcon", alibi=False)
text("bloom", "bloom", n_layer=2, n_head=4, drop=MHA[:4])
text("mpt", "mpt", d_model=WIDTH, n_layers=2, n_heads=4, max_seq_len=64, drop=MHA)
text("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2, experts=True, **GQA)
text(
    "qwen3_moe",
    "qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    head_dim=8,
    experts=True,
    **GQA,
)
text(
    "gpt_oss", "gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8, experts=True, **GQA
)
text(
    "deepseek_v3",
    "deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    experts=True,
)
text("mamba", "mamba", state_size=4, mask=False, drop=MHA[:3])
text("mamba2", "mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8, mask=False, drop=MHA[:3])
text("bert", "bert", MASKED)
text("roberta", "roberta", MASKED)
text("electra", "electra", MASKED, embedding_size=16)
text("albert", "albert", MASKED, embedding_size=16)
text("distilbert", "distilbert", MASKED, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=64, drop=MHA)
text("modernbert", "modernbert", MASKED, cls_token_id=1, sep_token_id=2, local_attention=8)
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
text("deberta-v2", "deberta-v2", MASKED, **DEBERTA)
text("xlnet", "xlnet", "XLNetLMHeadModel", d_model=WIDTH, n_layer=2, n_head=4, d_inner=64, drop=MHA)

vision("vit", **VISION)
vision("beit", **VISION)
vision("dinov2", **{**VISION, "mlp_ratio": 2})
vision(
    "swin", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, image_size=32, patch_size=4, drop_path_rate=0.0
)
vision("convnext", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)
vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
vision("regnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], groups_width=4)
vision("mobilenet_v2", depth_multiplier=0.25)
STAGES = {
    "num_encoder_blocks": 2,
    "depths": [2, 2],
    "hidden_sizes": [8, 16],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
vision("segformer", sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], **STAGES)

SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def model(name: str) -> Callable[[Callable[[], Model]], Callable[[], Model]]:
    def register(make: Callable[[], Model]) -> Callable[[], Model]:
        MODELS[name] = make
        return make

    return register


@model("t5")
def _t5() -> Model:
    config = transformers().T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return Model(
        build("T5ForConditionalGeneration", config),
        {"input_ids": (x := tokens()), "labels": tokens(), "attention_mask": torch.ones_like(x)},
    )


@model("bart")
def _bart() -> Model:
    config = transformers().BartConfig(**SEQ2SEQ, max_position_embeddings=32)
    return Model(build("BartForConditionalGeneration", config), {"input_ids": tokens(), "labels": tokens()})


@model("whisper")
def _whisper() -> Model:
    config = transformers().WhisperConfig(**SEQ2SEQ, num_mel_bins=16, max_source_positions=30, max_target_positions=32)
    return Model(
        build("WhisperForConditionalGeneration", config),
        {"input_features": torch.randn(BATCH, 16, 60), "labels": tokens()},
    )


def _pair(kind: str) -> Model:
    projected = {"projection_dim": 16} if kind == "CLIP" else {}
    config = getattr(transformers(), f"{kind}Config")(
        text_config={**TEXT, **projected}, vision_config={**VISION, **projected}, **projected
    )
    return Model(
        build(f"{kind}Model", config),
        {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32)},
        {"return_loss": True},
    )


MODELS["clip"], MODELS["siglip"] = (lambda: _pair("CLIP")), (lambda: _pair("Siglip"))
NAMES = tuple(MODELS)  # others add their own


# --- what a step makes of them ---


def keeping() -> GradientTransformation:
    """An optimizer that changes nothing and has the gradients in its state."""

    def zeros(tree: Any) -> Any:
        return fz.tree.map(torch.zeros_like, tree)

    return GradientTransformation(zeros, lambda grads, state, params: (zeros(grads), grads))


class Result(NamedTuple):
    layers: int
    blocks: int  # calls in the forward
    functions: int  # distinct ones
    loss: float
    gradient: float  # the largest difference, of the largest gradient


def compare(name: str, mesh: fz.Mesh) -> Result:
    """One step of a model and PyTorch's own loss and gradients, as absolute difference and as part of the largest
    gradient."""
    torch.manual_seed(0)
    module, inputs, settings = MODELS[name]()
    tensors, apply = functional(module)
    trained = {f"params[{n!r}]": p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}

    def loss_fn(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return apply(params, **batch, **settings).loss

    train = fz.compile(
        fz.train_step(loss_fn, keeping(), trainable=lambda path, leaf: path in trained), mesh, backend="eager"
    )
    state, metrics = train(train.init(tensors), inputs)
    found = dict(zip(fz.tree.paths(state.opt_state, "params"), fz.tree.leaves(state.opt_state), strict=True))
    calls = [op for op in train.program.instructions if op.op == "call" and op.block is not None]

    want = module(**inputs, **settings).loss
    want.backward()
    assert {id(trained[n]) for n in found} == {id(p) for p in trained.values()}
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items() if n in found}
    largest = max(float(g.abs().max()) for g in grads.values())
    worst = max(float((found[n] - g).abs().max()) for n, g in grads.items())
    forward = [op for op in calls if op.is_forward]
    return Result(
        len([*layers(module)]),
        len(forward),
        len({op.fn for op in calls}),
        abs(float(metrics["loss"] - want.detach())),
        worst / largest,
    )
