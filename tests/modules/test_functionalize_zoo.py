"""Models of `transformers`, and others, through `fz.functionalize` have the loss and gradients that they have in
PyTorch, or are refused by name.

Those that differ most; with --exhaustive all. `python tests/modules/test_functionalize_zoo.py [name ...]` writes
results/models.md (all), or prints the rows of some.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import supported_models_page
import torch
from architectures import (
    GQA,
    MASKED,
    MODELS,
    TEXT,
    VISION,
    VOCABULARY,
    Model,
    build,
    keeping,
    model,
    text,
    tokens,
    transformers,
    vision,
)
from plain_models import settings_of

import fzero as fz

PAGE = Path(__file__).parents[2] / "results" / "models.md"
LIMIT = 1e-6  # of the largest gradient, and of the loss
CONTRASTIVE = ("clip", "siglip")  # of which a loss of parts is none of the whole
SOME = ["llama, tied", "t5", "resnet", "swin", "mixtral, router logits", "llava", "unet2d", "lstm language model"]
SOME += ["spectral norms, written in each forward", "wavenet of weight-normed convolutions"]
REFUSED = {
    "recurrent_gemma": r"rg_lru.recurrent_states: None before, a tensor now",
    "ibert": r"needs the value of a tensor.*\n.*quant_modules.py:\d+: if self.x_min.min",
    "longformer": r"needs the value of a tensor.*\n.*modeling_longformer.py:\d+: is_global_attn",
    "reformer": r"draws from its own seed",
}
"""Those that are refused, and what the error says."""


@model("mixtral, router logits")
def _mixtral() -> Model:
    config = transformers().MixtralConfig(
        **TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return Model(build("MixtralForCausalLM", config), {"input_ids": (x := tokens()), "labels": x})


@model("llama, hidden states")
def _hidden() -> Model:
    config = transformers().LlamaConfig(**TEXT, num_key_value_heads=2)
    module = build("LlamaForCausalLM", config)
    return Model(module, {"input_ids": (x := tokens()), "labels": x}, {"output_hidden_states": True})


@model("bert, attentions")
def _attentions() -> Model:
    config = transformers().BertConfig(**TEXT, attn_implementation="eager")
    module = build("BertForMaskedLM", config)
    return Model(module, {"input_ids": (x := tokens()), "labels": x}, {"output_attentions": True})


@model("llava")
def _llava() -> Model:
    image = VOCABULARY - 1
    config = transformers().AutoConfig.for_model(
        "llava",
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config={"model_type": "llama", **TEXT, "num_key_value_heads": 2},
        image_token_index=image,
        vision_feature_layer=-2,
    )
    x = torch.cat([torch.full((2, 16), image), tokens()[:, :8]], 1)
    module = build("LlavaForConditionalGeneration", config)
    return Model(module, {"input_ids": x, "pixel_values": torch.randn(2, 3, 32, 32), "labels": x})


for _kind in ("glm4", "biogpt", "persimmon", "nemotron"):
    text(_kind, _kind, **(GQA if _kind in ("glm4", "nemotron") else {}))
text("gpt_bigcode", "gpt_bigcode", n_embd=32, n_layer=2, n_head=4, n_positions=64)
text("olmoe", "olmoe", num_experts=4, num_experts_per_tok=2, **GQA)
text("qwen2_moe", "qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
     shared_expert_intermediate_size=16, **GQA)  # fmt: skip
text("falcon_mamba", "falcon_mamba", state_size=4, mask=False)
text("rwkv", "rwkv", mask=False, attention_hidden_size=32, context_length=64)
text(
    "recurrent_gemma", "recurrent_gemma", num_hidden_layers=3, head_dim=8, lru_width=32, attention_window_size=8, **GQA
)
for _kind in ("megatron-bert", "mpnet", "convbert", "roformer", "fnet", "nystromformer", "ibert", "longformer"):
    text(_kind, _kind, MASKED)
text("squeezebert", "squeezebert", MASKED, embedding_size=32)
text(
    "funnel",
    "funnel",
    MASKED,
    block_sizes=[1, 1],
    d_model=32,
    n_head=4,
    d_head=8,
    d_inner=64,
    drop=["num_hidden_layers"],
)
text("big_bird", "big_bird", MASKED, attention_type="original_full", sep_token_id=2)
text("reformer", "reformer", MASKED, axial_pos_embds=False, attention_head_size=8, feed_forward_size=64, num_hashes=1,
     attn_layers=["lsh", "local"], lsh_attn_chunk_length=4, local_attn_chunk_length=4, num_buckets=4,
     drop=["num_hidden_layers"])  # fmt: skip
vision("convnextv2", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)
vision("poolformer", hidden_sizes=[8, 16, 16, 16], depths=[2, 2, 2, 2])
vision("pvt", hidden_sizes=[8, 16, 16, 16], depths=[2, 2, 2, 2], num_attention_heads=[1, 2, 2, 2], image_size=32)
vision("swinv2", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, image_size=32, patch_size=4)
vision("mobilevit", image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 24, 24, 32, 32])
vision("focalnet", embed_dim=8, depths=[2, 2], image_size=32, patch_size=4)


class Result(NamedTuple):
    blocks: int
    kinds: int  # of blocks: classes, shapes and settings
    functions: int  # distinct ones, forward and backward
    loss: float
    gradient: float  # the largest difference, of the largest gradient
    buffers: float  # the largest difference after the step


@pytest.mark.full
def test_models_that_differ_most():
    check(SOME)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
def test_every_model(part):
    check(list(MODELS)[part::4])


def test_there_are_as_many_as_the_page_says():
    assert len(MODELS) >= 60 and {*SOME, *REFUSED} <= {*MODELS}


def check(names: Sequence[str]) -> None:
    found = results(names)
    assert {n: r for n, r in found.items() if isinstance(r, str)}.keys() == REFUSED.keys() & found.keys()
    assert not [(n, r) for n, r in found.items() if isinstance(r, str) and not re.search(REFUSED[n], r)]
    equal = {n: r for n, r in found.items() if isinstance(r, Result)}
    assert not [(n, r) for n, r in equal.items() if max(r.loss, r.gradient, r.buffers) > LIMIT]
    assert not [(n, r) for n, r in equal.items() if r.functions > 2 * r.kinds]


def results(names: Sequence[str]) -> dict[str, Result | str]:
    """What each comes to, or the text of the error."""
    transformers()
    mesh, found = fz.make_mesh(), dict[str, Result | str]()
    with warnings.catch_warnings(action="ignore"):
        for name in names:
            try:
                found[name] = compare(name, mesh)
            except fz.errors.FzeroError as error:
                found[name] = str(error)
    return found


def compare(name: str, mesh: fz.Mesh) -> Result:
    """One step of a model as it is, beside PyTorch's own loss, gradients and buffers."""
    torch.manual_seed(0)
    module, inputs, settings = MODELS[name]()
    given = fz.functionalize(module)
    loss = (lambda out, batch: out.loss) if name in CONTRASTIVE else None
    train = fz.compile(given.train_step(keeping(), loss, **settings), mesh, backend="eager")
    state, metrics = train(train.init(given.params), inputs)
    found = dict(zip(fz.tree.names(state.opt_state), fz.tree.leaves(state.opt_state), strict=True))
    after = dict(zip(fz.tree.names(state.params), fz.tree.leaves(state.params), strict=True))
    calls = [op for op in train.program.instructions if op.op == "call" and op.block is not None]

    want = module(**inputs, **settings).loss
    want.backward()
    own = dict(module.named_parameters(remove_duplicate=False))
    assert {id(own[n]) for n in found} == {id(p) for p in own.values() if p.requires_grad}
    grads = {n: own[n].grad if own[n].grad is not None else torch.zeros_like(own[n]) for n in found}
    largest = max(float(g.abs().max()) for g in grads.values())
    return Result(
        len(given.blocks),
        len({settings_of(module.get_submodule(b)) for b in given.blocks}),
        len({op.fn for op in calls}),
        abs(float(metrics["loss"] - want.detach())),
        max(float((found[n] - g).abs().max()) for n, g in grads.items()) / largest,
        max((float((after[n].float() - x.float()).abs().max()) for n, x in module.named_buffers()), default=0.0),
    )


def rows(found: dict[str, Result | str]) -> list[str]:
    return [
        f"| {name} | {r.blocks} | {r.kinds} | {r.functions} | {r.loss:.1g} | {r.gradient:.1g} | {r.buffers:.1g} |"
        for name, r in found.items()
        if isinstance(r, Result)
    ]


def table(found: dict[str, Result | str]) -> str:
    equal = sum(isinstance(r, Result) and max(r.loss, r.gradient, r.buffers) <= LIMIT for r in found.values())
    refused = {name: r for name, r in found.items() if isinstance(r, str)}
    versions = f"torch {torch.__version__}, transformers {transformers().__version__}"
    says = [f"| {name} | {'<br>'.join(_plain(line) for line in r.splitlines())} |" for name, r in refused.items()]
    return "\n".join(
        [
            "| model | blocks | kinds | functions | loss differs by | gradients differ by | buffers differ by |",
            "|---|---|---|---|---|---|---|",
            *rows(found),
            "",
            *(["| refused | by the error |", "|---|---|", *says, ""] if refused else []),
            f"- {versions}; {equal} of {len(found)} are equal to {LIMIT:g}, {len(refused)} are refused",
            "",
        ]
    )


def _plain(line: str) -> str:
    """A line of an error without this machine's folders."""
    return re.sub(r"\S*/(?=[\w.]+\.py:)", "", line).replace("|", "\\|")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        some = results(sys.argv[1:])
        print(*rows(some), *(f"{name}: {r}" for name, r in some.items() if isinstance(r, str)), sep="\n")
    else:
        PAGE.write_text(table(results(list(MODELS))))
        supported_models_page.write()
