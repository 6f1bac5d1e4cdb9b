"""Mixtures of transformers train under `expert_parallel` without a capacity as in PyTorch, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fzero as fz

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    # Routed by groups of experts, with a shared expert, after a first dense layer.
    "DeepseekV3": {
        "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "Qwen3Moe": {"num_experts": 8, "head_dim": 8, "norm_topk_prob": True},
}  # fmt: skip
TOKENS = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name])
    net = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in net.parameters():  # routers begin with nearly equal scores
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return net


def trained(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the parameters after a step of SGD in PyTorch."""
    net = copy.deepcopy(model(name))
    loss = net(**BATCH).loss
    loss.backward()
    torch.optim.SGD(net.parameters(), 0.5).step()
    return loss.item(), dict(net.named_parameters())


def step(functional: Any, *transforms: Any) -> Any:
    experts = fz.expert_parallel(where=lambda path, leaf: "['experts']" in path, max_replicated_bytes=0)
    return fz.compose(*transforms, experts)(functional.train_step(fz.optim.sgd(0.5)))


def compare(name: str, functional: Any, net: torch.nn.Module, params: Any, loss: Any) -> None:
    expected, after = trained(name)
    functional.write_back(params)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    for path, found in net.named_parameters():
        torch.testing.assert_close(found, after[path], rtol=1e-5, atol=1e-5, msg=lambda text, path=path: path + text)


WAYS = {
    "remat, accumulate": ({"expert": 2}, (fz.remat("full"), fz.accumulate(2))),
    "ZeRO-3": ({"data": 2, "expert": 2}, (fz.shard_params(axis=("expert", "data")),)),
}


@pytest.mark.full(keep=["DeepseekV3-remat, accumulate"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_that_of_pytorch(name: str, way: str) -> None:
    axes, transforms = WAYS[way]
    net = model(name)
    functional, mesh = fz.functionalize(net), fz.AbstractMesh(**axes)
    made = step(functional, *transforms)
    program = fz.lower(made, mesh, functional.params, BATCH).program
    assert any(x.op == "all_to_all_v_start" for x, _ in program.walk()) and not program.notes
    state, metrics = fz.testing.simulate(made, mesh, functional.params, BATCH)
    compare(name, functional, net, state.params, metrics["loss"])


def on_ranks(name: str) -> None:
    mesh, net = fz.make_mesh(expert=2), model(name)
    functional = fz.functionalize(net)
    train = fz.compile(step(functional, fz.remat("full"), fz.accumulate(2)), mesh, backend="eager")
    mine = {entry: x.chunk(2)[mesh.rank] for entry, x in BATCH.items()}
    state, metrics = train(train.init(functional.params), mine)
    compare(name, functional, net, train.gather(state).params, metrics["loss"])


@pytest.mark.full(keep=["Qwen3Moe"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_on_two_ranks_is_that_of_pytorch(run_ranks: Any, name: str) -> None:
    run_ranks(2, on_ranks, name)
