"""Models of `transformers` through `fz.functionalize` have the loss and gradients that they have in PyTorch.

Those that differ most; with --exhaustive all. `python tests/test_functionalize_zoo.py [name ...]` writes
docs/results/models.md (all), or prints the rows of some.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architectures import MODELS, TEXT, VISION, VOCABULARY, Model, build, keeping, model, tokens, transformers

import fzero as fz

PAGE = Path(__file__).parent.parent / "docs" / "results" / "models.md"
LIMIT = 1e-6  # of the largest gradient, and of the loss
CONTRASTIVE = ("clip", "siglip")  # of which a loss of parts is none of the whole
SOME = ["llama, tied", "t5", "resnet", "swin", "mixtral, router logits", "llava"]


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


class Result(NamedTuple):
    blocks: int
    kinds: int  # classes of blocks
    functions: int  # distinct ones, forward and backward
    loss: float
    gradient: float  # the largest difference, of the largest gradient
    buffers: float  # the largest difference after the step


def test_models_that_differ_most():
    check(SOME)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
def test_every_model(part):
    check(list(MODELS)[part::4])


def check(names: list[str]) -> None:
    found = results(names)
    assert not [(name, r) for name, r in found.items() if max(r.loss, r.gradient, r.buffers) > LIMIT]


def results(names: list[str]) -> dict[str, Result]:
    transformers()
    mesh = fz.make_mesh()
    with warnings.catch_warnings(action="ignore"):
        return {name: compare(name, mesh) for name in names}


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
    calls = [line for line in train.program.lines if line.op == "call" and line.block is not None]

    want = module(**inputs, **settings).loss
    want.backward()
    own = dict(module.named_parameters(remove_duplicate=False))
    assert {id(own[n]) for n in found} == {id(p) for p in own.values() if p.requires_grad}
    grads = {n: own[n].grad if own[n].grad is not None else torch.zeros_like(own[n]) for n in found}
    largest = max(float(g.abs().max()) for g in grads.values())
    return Result(
        len(given.blocks),
        len({type(module.get_submodule(b)) for b in given.blocks}),
        len({line.fn for line in calls}),
        abs(float(metrics["loss"] - want.detach())),
        max(float((found[n] - g).abs().max()) for n, g in grads.items()) / largest,
        max((float((after[n].float() - x.float()).abs().max()) for n, x in module.named_buffers()), default=0.0),
    )


def rows(found: dict[str, Result]) -> list[str]:
    return [
        f"| {name} | {r.blocks} | {r.functions} | {r.loss:.1g} | {r.gradient:.1g} | {r.buffers:.1g} |"
        for name, r in found.items()
    ]


def table(found: dict[str, Result]) -> str:
    equal = sum(max(r.loss, r.gradient, r.buffers) <= LIMIT for r in found.values())
    versions = f"torch {torch.__version__}, transformers {transformers().__version__}"
    return "\n".join(
        [
            "| model | blocks | functions | loss differs by | gradients differ by | buffers differ by |",
            "|---|---|---|---|---|---|",
            *rows(found),
            "",
            f"- {versions}; {equal} of {len(found)} are equal to {LIMIT:g}",
            "",
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(*rows(results(sys.argv[1:])), sep="\n")
    else:
        PAGE.write_text(table(results(list(MODELS))))
