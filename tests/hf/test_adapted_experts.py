"""Adapters of peft on fused experts of transformers (`target_parameters`): losses of a plain loop, files that peft
loads, and experts sharded by `expert_parallel`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.errors import FzeroError
from fzero.mesh import AbstractMesh

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
QWEN = {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**TINY, **QWEN),
}
LORA = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}  # fmt: skip
TOKENS = torch.arange(48).view(4, 12) * 7 % 64


def base_of(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def adapted(name: str, **changes: Any) -> Any:
    return peft.get_peft_model(base_of(name), peft.LoraConfig(**LORA | changes))


def plain_losses(net: Any, steps: int = 4) -> list[float]:
    net, losses = copy.deepcopy(net), []
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2, eps=1e-5, weight_decay=0.0)
    for _ in range(steps):
        loss = net(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(model: Any, *transforms: Any, steps: int = 4) -> tuple[list[float], Any, Any]:
    step = fz.compose(fz.shard_params(), *transforms)(
        model.train_step(fz.optim.adamw(1e-2, eps=1e-5, weight_decay=0.0))
    )
    train = fz.compile(step, fz.make_mesh(data=-1), backend="eager")
    state, losses = train.init(model.params), []
    tokens = TOKENS.chunk(train.mesh.size)[train.mesh.rank]
    for _ in range(steps):
        state, metrics = train(state, {"input_ids": tokens, "labels": tokens})
        losses.append(float(metrics["loss"]))
    return losses, train, state


def losses_of_a_rank(name: str, transforms: tuple[Any, ...]) -> list[float]:
    return trained(fz.functionalize(adapted(name)), *transforms)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transforms", [(), (fz.remat("full"), fz.accumulate(2))], ids=["", "remat, accumulate"])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_a_plain_loop(run_or_call: Any, name: str, transforms: Any, ranks: int) -> None:
    want = plain_losses(adapted(name))
    assert want[-1] < want[0] - 0.1
    for losses in run_or_call(ranks, losses_of_a_rank, name, transforms):
        assert losses == pytest.approx(want, rel=1e-5)


def test_saved_adapters_load_in_peft_and_the_stream_merges_them(tmp_path: Path) -> None:
    net = adapted("mixtral")
    model = fz.functionalize(net)
    _, train, state = trained(model)
    fz.hf.save_pretrained(tmp_path, model, state)
    loaded = peft.PeftModel.from_pretrained(base_of("mixtral"), tmp_path)
    model.write_back(train.gather(state).params)
    want = net(input_ids=TOKENS).logits
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, want)
    names = {name for name, _ in fz.hf.stream(model, state)}
    assert any("experts" in name for name in names) and all("lora_" in name for name in names)
    merged = dict(fz.hf.stream(model, state, merge=True))
    engine = base_of("mixtral")
    engine.save_pretrained(tmp_path / "base")
    fz.hf.save_pretrained(tmp_path / "adapters", model, state)
    expected = net.merge_and_unload()
    expected.save_pretrained(tmp_path / "merged")
    from safetensors.torch import load_file

    files = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == files.keys()
    for name, x in merged.items():
        torch.testing.assert_close(x, files[name])


def test_adapters_are_put_on_a_model_that_is_loaded(tmp_path: Path) -> None:
    base_of("mixtral").save_pretrained(tmp_path)
    config = peft.LoraConfig(**LORA | {"init_lora_weights": True})
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, adapter=config)
    step = fz.shard_params(model.train_step(fz.optim.adamw(1e-2)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state = train.load(tmp_path)
    _, metrics = train(state, {"input_ids": TOKENS, "labels": TOKENS})
    want = base_of("mixtral")(input_ids=TOKENS, labels=TOKENS).loss  # new adapters change nothing
    torch.testing.assert_close(metrics["loss"], want)


def test_experts_are_sharded_by_expert_parallel() -> None:
    net = adapted("mixtral")
    # With a capacity (of all tokens), because without one the gradient of an expert may only be added to others.
    net.base_model.model.set_experts_implementation(fz.hf.experts_implementation(capacity=2.0))
    model = fz.functionalize(net)
    experts = fz.expert_parallel(model.train_step(fz.optim.sgd(0.1)), where=lambda path, leaf: leaf.ndim == 3)
    made = fz.shard_params(axis=("data", "expert"))(experts)
    mesh, batch = AbstractMesh(data=2, expert=2), {"input_ids": TOKENS, "labels": TOKENS}
    assert not fz.lower(made, mesh, model.params, batch).program.notes  # nothing is computed unsharded
    fz.testing.check_equivalent(made, model.params, batch, mesh, steps=2)


def test_switching_the_adapters_off_later_is_an_error() -> None:
    net = adapted("mixtral")
    model = fz.functionalize(net)
    _, train, state = trained(model, steps=1)
    with net.disable_adapter(), pytest.raises(FzeroError, match="_adapters_disabled: False then, True now"):
        for _ in range(2):
            state, _ = train(state, {"input_ids": TOKENS, "labels": TOKENS})
