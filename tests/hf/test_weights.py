"""Weights of the library `transformers` in and out: from its directories into shards, and back, bit for bit."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import fzero as fz

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE = TINY | {"num_key_value_heads": 2, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
CASES: dict[str, Any] = {
    "llama": lambda t: (t.AutoModelForCausalLM, t.LlamaConfig(**TINY, num_key_value_heads=2)),
    "llama tied": lambda t: (t.AutoModelForCausalLM, t.LlamaConfig(**TINY, tie_word_embeddings=True)),
    "gpt2": lambda t: (t.AutoModelForCausalLM, t.GPT2Config(**GPT2)),
    "qwen2": lambda t: (t.AutoModelForCausalLM, t.Qwen2Config(**TINY, num_key_value_heads=2)),
    "mixtral": lambda t: (t.AutoModelForCausalLM, t.MixtralConfig(**MOE, num_local_experts=3)),
    "qwen3 moe": lambda t: (
        t.AutoModelForCausalLM,
        t.Qwen3MoeConfig(**MOE, num_experts=3, moe_intermediate_size=24, head_dim=8),
    ),
    "bert": lambda t: (t.AutoModelForMaskedLM, t.BertConfig(**TINY)),
}
IDS = torch.arange(24).view(2, 12) * 3 % 96


def made(case: str, path: Path, seed: int = 0) -> tuple[Any, Any]:
    """A directory that the library wrote, and the model in it."""
    cls, config = CASES[case](transformers)
    torch.manual_seed(seed)
    model = cls.from_config(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.05)
    model.save_pretrained(path)
    return cls, model


def keys(path: Path) -> dict[str, list[int]]:
    out = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            out |= {n: opened.get_slice(n).get_shape() for n in opened.keys()}  # noqa: SIM118
    return out


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(cls: Any, path: Path, *transforms: Any) -> tuple[Any, Any]:
    model = fz.hf.from_pretrained(cls, path)
    step = model.train_step(fz.optim.adamw(1e-3))
    return model, fz.compile(fz.compose(*transforms)(step), fz.make_mesh(data=-1), backend="eager")


@pytest.mark.full(keep=["llama", "llama tied"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    cls, plain = made(case, tmp_path / "hub")
    model, train = trained(cls, tmp_path / "hub", fz.shard_params())
    with caplog.at_level(logging.WARNING, "fzero"):
        state = train.load(tmp_path / "hub")
    assert not caplog.text
    want = logits(cls.from_pretrained(tmp_path / "hub").eval())
    assert torch.equal(logits(fz.hf.module(model, state)), want) and torch.equal(want, logits(plain))
    assert torch.equal(logits(fz.hf.module(model, state, stream=True)), want)
    fz.hf.save_pretrained(tmp_path / "out", model, state, max_shard_bytes=30_000)
    assert keys(tmp_path / "out") == keys(tmp_path / "hub")
    again, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(again.eval()), want)
    if plain.can_generate():
        args = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        tokens = plain.generate(IDS, **args)
        assert torch.equal(fz.hf.module(model, state).generate(IDS, **args), tokens)
        assert torch.equal(fz.hf.module(model, state, stream=True).generate(IDS, **args), tokens)
        assert torch.equal(again.generate(IDS, **args), tokens)


def on_ranks(path: str, out: str, scratch: str, case: str) -> tuple[bool, bool]:
    """On every rank: a step, saved and read by the library; tokens with the weights gathered layer by layer."""
    cls, _ = CASES[case](transformers)
    model, train = trained(
        cls, Path(path), fz.shard_params(), fz.offload("nvme", ("params", "opt_state"), path=scratch)
    )
    state, _ = train(train.load(path), {"input_ids": IDS, "labels": IDS})
    fz.hf.save_pretrained(out, model, state)
    again = cls.from_pretrained(out).eval()
    args = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = fz.hf.module(model, state, stream=True)
    return torch.equal(logits(found), logits(again)), torch.equal(
        found.generate(IDS, **args), again.generate(IDS, **args)
    )


@pytest.mark.full
def test_two_ranks(run_ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    made("llama tied", tmp_path / "hub")
    dirs = str(tmp_path / "hub"), str(tmp_path / "out"), str(tmp_path / "scratch")
    assert run_ranks(2, on_ranks, *dirs, "llama tied") == [(True, True)] * 2
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_a_head_that_no_file_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, plain = made("bert", tmp_path)
    model = fz.hf.from_pretrained(transformers.AutoModelForSequenceClassification, tmp_path, num_labels=5)
    step = fz.shard_params(model.train_step(fz.optim.adamw(1e-3)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    with caplog.at_level(logging.WARNING, "fzero"):
        state = train.load(tmp_path)
    assert "are initialized" in caplog.text and "classifier.weight" in caplog.text
    assert "not used: cls.predictions" in caplog.text and "position_ids" not in caplog.text
    params = train.gather(state).params
    assert params["classifier"]["weight"].shape == (5, 32) and 0.01 < params["classifier"]["weight"].std() < 0.04
    assert torch.equal(params["classifier"]["bias"], torch.zeros(5))
    found = params["bert"]["embeddings"]["word_embeddings"]["weight"]
    assert torch.equal(found, plain.bert.embeddings.word_embeddings.weight)
    again = train.gather(train.load(tmp_path)).params
    assert torch.equal(again["classifier"]["weight"], params["classifier"]["weight"])


def test_files_of_a_base_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = transformers.GPT2Model(transformers.GPT2Config(**GPT2)).eval()
    base.save_pretrained(tmp_path)
    model, train = trained(transformers.AutoModelForCausalLM, tmp_path)
    want = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert torch.equal(logits(fz.hf.module(model, train.load(tmp_path))), want)


def test_tokenizer_and_generation_files(tmp_path: Path) -> None:
    cls, plain = made("llama", tmp_path / "hub")
    plain.generation_config.max_new_tokens = 7
    plain.generation_config.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "tokenizer.json").write_text("{}")
    model, train = trained(cls, tmp_path / "hub")
    state = train.load(tmp_path / "hub")
    fz.hf.save_pretrained(tmp_path / "a", model, state)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    assert cls.from_pretrained(tmp_path / "a").generation_config.max_new_tokens == 7
    (tmp_path / "none").mkdir()
    with pytest.raises(fz.errors.CheckpointError, match="none has no files of a tokenizer"):
        fz.hf.save_pretrained(tmp_path / "b", model, state, tokenizer=tmp_path / "none")
    assert not (tmp_path / "b").exists()
    with pytest.raises(fz.errors.CheckpointError, match=r"a holds a model already: model.safetensors"):
        fz.hf.save_pretrained(tmp_path / "a", model, state)
    half = fz.hf.save_pretrained(tmp_path / "c", model, state, dtype=torch.bfloat16)
    assert half[0].stat().st_size < (tmp_path / "a" / "model.safetensors").stat().st_size * 0.6
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_refused(tmp_path: Path) -> None:
    cls, _ = made("llama", tmp_path / "llama")
    made("gpt2", tmp_path / "gpt2")
    error = fz.errors.CheckpointError
    with pytest.raises(error, match="is a directory of 'gpt2', LlamaForCausalLM is of 'llama'"):
        fz.hf.from_pretrained(transformers.LlamaForCausalLM, tmp_path / "gpt2")
    with pytest.raises(error, match=r"(?s)AutoModelForImageClassification cannot be made from .*LlamaForCausalLM"):
        fz.hf.from_pretrained(transformers.AutoModelForImageClassification, tmp_path / "llama")
    with pytest.raises(error, match=r"has no config\.json"):
        fz.hf.from_pretrained(cls, tmp_path)
    with pytest.raises(error, match="is not a directory"):
        fz.hf.from_pretrained(cls, tmp_path / "x")
    _, train = trained(cls, tmp_path / "llama")
    with pytest.raises(error, match="is a directory of 'gpt2', this model is of 'llama'"):
        train.load(tmp_path / "gpt2")
    file = tmp_path / "llama" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(error, match="truncated"):
        train.load(tmp_path / "llama")
    shutil.copy(tmp_path / "gpt2" / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=r"is quantized \(fp8\)"):
        fz.hf.from_pretrained(cls, tmp_path)


def test_rows_taken_apart_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    cls, _ = made("llama", tmp_path)
    _, train = trained(cls, tmp_path)
    turned = [WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: turned)
    with pytest.raises(fz.errors.CheckpointError, match=r"layers.0.mlp.up_proj.weight \[48, 32\]: is made of"):
        train.load(tmp_path)


# --- adapters of the library peft ---


def adapted(path: Path, *transforms: Any, **settings: Any) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings)
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, path, adapter=config)
    step = model.train_step(fz.optim.adamw(1e-2))
    return model, fz.compile(fz.compose(*transforms)(step), fz.make_mesh(data=-1), backend="eager")


def read_again(path: Path, adapter: Path) -> Any:
    import peft

    cls = transformers.AutoModelForCausalLM
    return peft.PeftModel.from_pretrained(cls.from_pretrained(path), adapter).eval()


def with_adapters(path: str, out: str) -> tuple[bool, bool, list[str], list[str]]:
    """On every rank: two steps of adapters alone, saved; the library's logits, and those of its model of the state."""
    model, train = adapted(Path(path), fz.shard_params(), lora_dropout=0.1, fan_in_fan_out="gpt2" in path)
    state = train.load(path)
    first = logits(fz.hf.module(model, state))
    for _ in range(2):
        state, _ = train(state, {"input_ids": IDS, "labels": IDS})
    fz.hf.save_pretrained(out, model, state)
    mine, again = logits(fz.hf.module(model, state)), logits(read_again(Path(path), Path(out)))
    same = torch.equal(first, logits(transformers.AutoModelForCausalLM.from_pretrained(path).eval()))
    moments = [n for n in fz.tree.names(state.opt_state) if ".mu." in n or n.startswith("mu.")]
    return same and not torch.equal(mine, first), torch.equal(mine, again), moments, os.listdir(out)


@pytest.mark.full
@pytest.mark.parametrize("case", ["llama tied", "gpt2"])
def test_adapters_on_two_ranks(run_ranks: Any, tmp_path: Path, case: str) -> None:
    pytest.importorskip("peft")
    made(case, tmp_path / case)
    ranks = run_ranks(2, with_adapters, str(tmp_path / case), str(tmp_path / "out"))
    for begins_as_the_model, read, moments, files in ranks:
        assert begins_as_the_model and read
        assert moments and all("lora_" in name for name in moments), "no optimizer state of what is frozen"
        assert {"adapter_model.safetensors", "adapter_config.json"} <= {*files}
        assert not [name for name in files if name.startswith(".")]


def test_adapters_beside_what_is_frozen(tmp_path: Path) -> None:
    """In bf16: frozen leaves rest as they are computed, adapters have masters; a head of its own is saved along."""
    peft = pytest.importorskip("peft")
    made("llama", tmp_path / "hub")
    model, train = adapted(
        tmp_path / "hub",
        fz.shard_params(),
        fz.mixed_precision("bf16"),
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
    )
    state = train.load(tmp_path / "hub")
    before = dict(zip(fz.tree.names(state.params), map(torch.clone, fz.tree.leaves(state.params)), strict=True))
    for _ in range(2):
        state, _ = train(state, {"input_ids": IDS, "labels": IDS})
    after = dict(zip(fz.tree.names(state.params), fz.tree.leaves(state.params), strict=True))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {name for name in before if "lora_" in name or "modules_to_save" in name}
    assert changed == trained and len(trained) == 5
    kept = {"base_model.model.model.rotary_emb.inv_freq", "base_model.model.model.rotary_emb.original_inv_freq"}
    assert {x.dtype for n, x in after.items() if n not in trained | kept} == {torch.bfloat16}
    assert {after[n].dtype for n in trained} == {torch.float32}
    gradients = [*train.program.grads]
    assert gradients and all("lora_" in name or "modules_to_save" in name for name in gradients)
    fz.hf.save_pretrained(tmp_path / "out", model, state)
    assert {n.partition(".lora_")[1] or n for n in keys(tmp_path / "out")} == {
        ".lora_",
        "base_model.model.lm_head.weight",
    }
    again = read_again(tmp_path / "hub", tmp_path / "out")
    head = again.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(
        head, train.gather(state).params["base_model"]["model"]["lm_head"]["modules_to_save"]["default"]["weight"]
    )
    assert isinstance(again, peft.PeftModelForCausalLM)
    for x in again.parameters():
        x.data = x.data.bfloat16()
    for stream in (False, True):  # trained and frozen parameters have one dtype, or the head could not be multiplied
        assert torch.equal(logits(again), logits(fz.hf.module(model, state, stream=stream)))


def test_adapters_on_a_model_with_weights(tmp_path: Path) -> None:
    """`functionalize` of peft's model, with adapters that begin with what is computed of the weights."""
    peft = pytest.importorskip("peft")
    cls, _ = made("llama", tmp_path / "hub")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    with pytest.raises(fz.errors.FzeroValueError, match="initialized from the weights"):
        adapted(tmp_path / "hub", use_dora=True)
    model = fz.functionalize(peft.get_peft_model(cls.from_pretrained(tmp_path / "hub"), config))
    train = fz.compile(fz.shard_params(model.train_step(fz.optim.adamw(1e-2))), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(model.params), {"input_ids": IDS, "labels": IDS})
    fz.hf.save_pretrained(tmp_path / "out", model, state)
    again = read_again(tmp_path / "hub", tmp_path / "out")
    found = model.apply(state.params, input_ids=IDS).logits
    assert torch.equal(logits(again), found)


def test_adapters_that_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    cls, _ = made("llama", tmp_path / "hub")
    with pytest.raises(fz.errors.FzeroTypeError, match="adapter is a configuration of peft, not dict"):
        fz.hf.from_pretrained(cls, tmp_path / "hub", adapter={"r": 8})
    with pytest.raises(fz.errors.FzeroTypeError, match=r"does not fit the model\n.*no_proj"):
        adapted(tmp_path / "hub", target_modules=["no_proj"])
    with pytest.raises(fz.errors.FzeroValueError, match="init_lora_weights='pissa'"):
        adapted(tmp_path / "hub", init_lora_weights="pissa")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(fz.errors.FzeroValueError, match="PromptTuningConfig's adapters"):
        fz.hf.from_pretrained(cls, tmp_path / "hub", adapter=prompts)
    model = fz.functionalize(peft.get_peft_model(cls.from_pretrained(tmp_path / "hub"), prompts))
    with pytest.raises(
        fz.errors.CheckpointError, match=r"(?s)prompt_embeddings: of an adapter of PROMPT_TUNING.*write_back"
    ):
        fz.hf.save_pretrained(tmp_path / "out", model, model.params)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_the_trainer_trains_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    made("llama", tmp_path / "hub")
    model, _ = adapted(tmp_path / "hub")
    args = transformers.TrainingArguments(
        str(tmp_path / "run"),
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = fz.hf.Trainer(model, args, train_dataset=rows, backend="eager")
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    again = read_again(tmp_path / "hub", tmp_path / "out")
    assert torch.equal(logits(again), logits(fz.hf.module(model, trainer.train_state)))
    again = read_again(tmp_path / "hub", tmp_path / "run" / "checkpoint-2")
    assert torch.equal(logits(again), logits(fz.hf.module(model, trainer.train_state)))
