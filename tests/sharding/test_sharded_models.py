"""Blocks of Hugging Face's models, cut by rules on the names of their weights: two all_reduces a layer each way, and
nothing is made whole."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lockstep import collectives, run, run_cut

import fzero as fz
from fzero import optim
from fzero.compiler import fuse_last_block
from fzero.compiler.abstract_values import batch_inputs
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.traced_step import trace_step
from fzero.ir.program import Program
from fzero.sharding.placements import REPLICATE, Placement, Shard
from fzero.sharding.propagation import propagate
from fzero.sharding.sharded_graph import OutputPlacement
from fzero.transforms import remat

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

Rules = Mapping[str, Placement]
SEPARATE: Rules = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), Shard(0)),
    **dict.fromkeys(("o_proj", "down_proj"), Shard(1)),
}
PACKED: Rules = {**SEPARATE, "qkv_proj": Shard(0, 3), "gate_up_proj": Shard(0, 2)}
CONV1D: Rules = {
    "c_attn": Shard(1, 3),
    "attn.c_proj": Shard(0),
    "c_fc": Shard(1),
    "mlp.c_proj": Shard(0),
    "wte": Shard(0),
    "c_attn.bias": Shard(0, 3),
    "c_fc.bias": Shard(0),
}
MODELS: dict[str, tuple[Callable[[], Any], Rules]] = {
    "Llama": (lambda: transformers.LlamaConfig(**SIZES), SEPARATE),
    "Mistral": (lambda: transformers.MistralConfig(**SIZES), SEPARATE),
    "Qwen3": (lambda: transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False), SEPARATE),
    "Gemma": (lambda: transformers.GemmaConfig(**SIZES, head_dim=8), SEPARATE),
    "Phi3": (
        lambda: transformers.Phi3Config(
            **SIZES | {"num_key_value_heads": 4}, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0
        ),
        PACKED,
    ),
    "GPT2": (lambda: transformers.GPT2Config(**GPT2, **NO_DROPOUT, bos_token_id=1, eos_token_id=2), CONV1D),
}


def place_of(path: str, rules: Rules) -> Placement:
    """By the last rule that names the parameter, or its module."""
    name = path.replace("']['", ".").removesuffix("']")
    whole = [p for rule, p in rules.items() if fnmatch.fnmatch(name, f"*{rule}")]
    return (whole or [p for rule, p in rules.items() if fnmatch.fnmatch(name, f"*{rule}.weight")] or [REPLICATE])[-1]


def program_of(config: Any) -> Program:
    """The step of a model, split into forwards and backwards."""
    torch.manual_seed(0)
    model = fz.functionalize(transformers.AutoModelForCausalLM.from_config(config).train())

    def loss_fn(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model.apply(params, input_ids=tokens, labels=tokens).loss

    step = fz.train_step(loss_fn, optim.sgd(0.1), trainable=model.trainable)
    mesh = fz.AbstractMesh(data=1)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    base = trace_step(step, mesh, params_inputs(step, mesh, model.params), batch_inputs(tokens)).base
    fused = fuse_last_block.rewrite(base)
    options = remat.remat_options(fused, "none", {})
    return fused if options is None else remat.rewrite(fused, options)


def value(like: torch.Tensor) -> torch.Tensor:
    if like.dtype.is_floating_point:
        return torch.randn(like.shape).to(like.dtype)
    return torch.ones(like.shape, dtype=like.dtype) if like.dtype == torch.bool else torch.randint(8, like.shape)


@pytest.mark.full(keep=["Llama", "Mistral"])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_reduces_twice_each_way(name: str) -> None:
    make, rules = MODELS[name]
    program = program_of(make())
    leaves = {v.name: program.leaves[v.name] for v in program.inputs if v.name in program.leaves}
    at: dict[str, Placement] = {v.name: REPLICATE for v in program.inputs}
    at |= {n: place_of(leaf.path, rules) for n, leaf in leaves.items() if leaf.role == "params"}
    assert any(p != REPLICATE for p in at.values())
    trained = {n: program.grads[leaf.path] for n, leaf in leaves.items() if leaf.path in program.grads}
    wanted = {g: at[n] if at[n] != REPLICATE else OutputPlacement.SUMMAND for n, g in trained.items()}
    layers = 0
    for op in program.instructions:
        if op.op != "call":
            at |= {v.name: at[op.args[0]] if op.op == "cast" else REPLICATE for v in op.out}
            continue
        graph = program.functions[str(op.fn)].graph
        places = [at[a] for a in op.args]
        params = frozenset(i for i, a in enumerate(op.args) if a in leaves)
        cut = propagate(graph, 2, places, [wanted.get(v.name, OutputPlacement.FREE) for v in op.out], leaves=params)
        at |= {v.name: p for v, p in zip(op.out, cut.places, strict=True)}
        assert not cut.whole, (op.fn, cut.whole)
        if op.block is None:
            continue
        layers += 1
        assert collectives(cut) == ["all_reduce"] * 2, (op.fn, collectives(cut))
        if layers % 2 == 0:
            continue  # the second layer's functions are those of the first
        inputs = [value(x.meta["val"]) for x in graph.inputs]
        for a, b in zip(run_cut(cut, inputs, places, 2), run(graph, [inputs])[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.abs().max())))
    assert layers == 4
