"""Directories whose weights bitsandbytes has quantized, read as codes and written, and directories of plain weights,
which are quantized while they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fzero as fz
from fzero.errors import CheckpointError, FzeroValueError
from fzero.ops.weight_quantization import NF4

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.arange(48).view(4, 12) * 3 % 96
BATCH = {"input_ids": IDS, "labels": IDS}
BLOCK = 256
"""Scales that share a scale of their own."""


def written(path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES))
    model.to(dtype).save_pretrained(path)


def is_quantized(name: str) -> bool:
    return "_proj.weight" in name


def codes_of(name: str, like: torch.Tensor) -> torch.Tensor:
    """Codes of which some are NaNs as 16-bit floating-point numbers."""
    draw = torch.Generator().manual_seed(len(name))
    found = torch.randint(256, (like.numel(),), generator=draw).to(torch.uint8)
    found[:4] = torch.tensor([0xC0, 0x7F, 0xFF, 0xFF], dtype=torch.uint8)
    return found


def quantized(path: Path, out: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes a directory in the form of bitsandbytes. Returns the numbers that the codes stand for."""
    tensors, meant = {}, {}
    for name, x in load_file(path / "model.safetensors").items():
        if not is_quantized(name):
            tensors[name] = x
        elif kind == "int8":
            codes = codes_of(name, x).view(torch.int8).view(x.shape)
            scales = torch.rand(len(x), generator=torch.Generator().manual_seed(1)) + 0.1
            tensors |= {name: codes, f"{name[:-6]}SCB": scales, f"{name[:-6]}weight_format": torch.tensor(0).byte()}
            meant[name] = codes.float() * scales[:, None] / 127
        else:
            codes = codes_of(name, x[:, : x.shape[1] // 2])
            num = x.numel() // 64
            scales = torch.rand(num, generator=torch.Generator().manual_seed(1)) + 0.1
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(x.shape)}
            tensors |= {name: codes[:, None], f"{name}.quant_map": torch.tensor(NF4)}
            if kind == "nested":
                offset, values = 0.5, torch.linspace(-1, 1, 256)
                own, blocks = torch.arange(num).to(torch.uint8), torch.rand(-(-num // BLOCK)) + 0.1
                scales = values[own.int()] * blocks.repeat_interleave(BLOCK)[:num] + offset
                state |= {"nested_blocksize": BLOCK, "nested_offset": offset, "nested_dtype": "float32"}
                tensors |= {f"{name}.absmax": own, f"{name}.nested_absmax": blocks, f"{name}.nested_quant_map": values}
            else:
                tensors[f"{name}.absmax"] = scales
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = text
            numbers = torch.tensor(NF4)[torch.stack([codes >> 4, codes & 15], 1).int()].view(-1, 64)
            meant[name] = (numbers * scales[:, None]).view(x.shape)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    how = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    config["quantization_config"] = how | {"bnb_4bit_quant_type": "nf4"}
    (out / "config.json").write_text(json.dumps(config))
    return meant


def loaded(path: str, format: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """On every rank: the values of a loaded state, and the losses of two steps of its adapters."""
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, path, adapter=lora, quantize=format)
    step = fz.shard_params(model.train_step(fz.optim.adamw(1e-2)))
    train = fz.compile(step, fz.make_mesh(data=-1), backend="eager")
    state = train.load(path)
    whole = dict(zip(fz.tree.names(state.params), fz.tree.leaves(train.gather(state).params), strict=True))
    ids, losses = IDS.chunk(train.mesh.size)[train.mesh.rank], []
    for _ in range(2):
        state, metrics = train(state, {"input_ids": ids, "labels": ids})
        losses.append(float(metrics["loss"]))
    return whole, losses


def loss_of(path: Path, weights: dict[str, torch.Tensor]) -> float:
    """The loss of the plain model with these weights."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES))
    plain = {name: x.float() for name, x in load_file(path / "model.safetensors").items()}
    model.load_state_dict(plain | weights)
    return float(model(input_ids=IDS, labels=IDS).loss.detach())


def name_in_peft(name: str) -> str:
    return f"base_model.model.{name.removesuffix('.weight')}.base_layer"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["nf4", "nested", "int8"])
def test_directories_of_bitsandbytes_are_read_as_they_are(
    run_or_call: Any, tmp_path: Path, kind: str, ranks: int
) -> None:
    written(tmp_path / "plain")
    meant = quantized(tmp_path / "plain", tmp_path / "codes", kind)
    stored = load_file(tmp_path / "codes" / "model.safetensors")
    want = loss_of(tmp_path / "plain", meant)
    for whole, losses in run_or_call(ranks, loaded, str(tmp_path / "codes"), None):
        for name, numbers in meant.items():
            own = name_in_peft(name)
            assert torch.equal(whole[f"{own}.qweight"].flatten(), stored[name].flatten()), "codes keep their bits"
            held = fz.quantize(numbers)._replace(codes=whole[f"{own}.qweight"], absmax=whole[f"{own}.absmax"])
            torch.testing.assert_close(fz.dequantize(held), numbers, rtol=1e-6, atol=0)
        assert losses[0] == pytest.approx(want, rel=1e-6)
        assert losses[1] < losses[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_plain_directories_are_quantized_while_they_are_read(
    run_or_call: Any, tmp_path: Path, format: str, ranks: int
) -> None:
    written(tmp_path / "plain")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    weights = {name: fz.quantize(x, format) for name, x in stored.items() if is_quantized(name)}
    want = loss_of(tmp_path / "plain", {name: fz.dequantize(x) for name, x in weights.items()})
    for whole, losses in run_or_call(ranks, loaded, str(tmp_path / "plain"), format):
        for name, x in weights.items():
            assert torch.equal(whole[f"{name_in_peft(name)}.qweight"], x.codes)
            assert torch.equal(whole[f"{name_in_peft(name)}.absmax"], x.absmax)
        assert losses[0] == pytest.approx(want, rel=1e-6)


def change(out: Path, name: str, value: Any) -> None:
    tensors = load_file(out / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value(tensors[name])
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


FIRST = "model.layers.0.mlp.down_proj.weight"


def other_state(**changes: Any) -> Any:
    def edit(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(json.dumps(json.loads(bytes(x.tolist())) | changes).encode()), dtype=torch.uint8)

    return edit


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (f"{FIRST}.absmax", None, f"{FIRST}: uint8.*without {FIRST}.absmax"),
        (f"{FIRST}.absmax", lambda x: x[:-1].clone(), f"{FIRST}: has 159 scales, expected 160"),
        (f"{FIRST}.quant_map", lambda x: x * 2, f"{FIRST}: its codes stand for other numbers"),
        (f"{FIRST}.quant_state.bitsandbytes__nf4", other_state(blocksize=128), f"{FIRST}: .* blocks of 128"),
        (f"{FIRST}.quant_state.bitsandbytes__nf4", other_state(shape=[160, 64]), f"{FIRST}: its shape is"),
    ],
)
def test_stored_codes_of_another_form_are_rejected(tmp_path: Path, name: str, value: Any, says: str) -> None:
    written(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "codes", "nf4")
    change(tmp_path / "codes", name, value)
    with pytest.raises(CheckpointError, match=f"(?s){says}.*Fix: "):
        loaded(str(tmp_path / "codes"), None)


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        ("nested", "nested_absmax", None, "its description cannot be read: KeyError"),
        ("nested", "nested_absmax", lambda x: x[:0].clone(), "quantized with 256 values and 0 scales of their own"),
        ("int8", "weight_format", lambda x: x.fill_(2), "is stored in tiles for one kind of GPU"),
    ],
)
def test_damaged_descriptions_are_rejected(tmp_path: Path, kind: str, name: str, value: Any, says: str) -> None:
    written(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "codes", kind)
    stored = f"{FIRST}.{name}" if kind == "nested" else f"{FIRST.removesuffix('weight')}{name}"
    change(tmp_path / "codes", stored, value)
    with pytest.raises(CheckpointError, match=says):
        loaded(str(tmp_path / "codes"), None)


def test_the_head_of_a_classifier_is_not_quantized(tmp_path: Path) -> None:
    transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(num_key_value_heads=2, pad_token_id=0, **SIZES)
    ).save_pretrained(tmp_path)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS")
    model = fz.hf.from_pretrained(
        transformers.AutoModelForSequenceClassification, tmp_path, adapter=lora, quantize="nf4"
    )
    trained = [name for name, x in model.named_params.items() if x.dtype == torch.uint8]
    assert trained and not any("score" in name for name in trained)


def test_what_does_not_fit_is_rejected(tmp_path: Path) -> None:
    written(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "codes", "nf4")
    with pytest.raises(CheckpointError, match=r"is quantized \(nf4\), not 'int8'"):
        loaded(str(tmp_path / "codes"), "int8")
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "plain")
    train = fz.compile(model.train_step(fz.optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    with pytest.raises(CheckpointError, match=r"is quantized \(nf4\), and the model is not"):
        train.load(tmp_path / "codes")
    change(tmp_path / "plain", FIRST, lambda x: x * float("inf"))
    with pytest.raises(CheckpointError, match=r"down_proj\.base_layer\.qweight: it has values that are not finite"):
        loaded(str(tmp_path / "plain"), "nf4")


def test_a_quantized_model_without_adapters_trains_only_what_is_selected(tmp_path: Path) -> None:
    written(tmp_path)
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, quantize="nf4")
    compiled = lambda step: fz.compile(step, fz.make_mesh(data=1), backend="eager")  # noqa: E731
    train = compiled(model.train_step(fz.optim.sgd(0.1)))
    with pytest.raises(
        FzeroValueError, match=r"(?s)no trainable parameters.*adapter=.*fz.train_step\(model.loss\(\), "
    ):
        train(train.load(tmp_path), BATCH)
    step = fz.train_step(model.loss(), fz.optim.adamw(0.1), trainable=lambda path, leaf: "norm" in path)
    train = compiled(step)
    state, first = train(train.load(tmp_path), BATCH)
    assert train(state, BATCH)[1]["loss"] < first["loss"]
    assert all("norm" in name for name in fz.tree.names(state.opt_state.mu))


def saved(path: str, out: str, format: str, kind: Any = transformers.AutoModelForCausalLM) -> None:
    """On every rank: a directory of plain weights is quantized while it is read, and saved."""
    model = fz.hf.from_pretrained(kind, path, quantize=format)
    train = fz.compile(fz.shard_params(model.train_step(fz.optim.sgd(0.1))), fz.make_mesh(data=-1), backend="eager")
    fz.hf.save_pretrained(out, model, train.load(path), dtype=torch.bfloat16)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_directories_of_bitsandbytes_are_written(run_or_call: Any, tmp_path: Path, format: str, ranks: int) -> None:
    written(tmp_path / "plain")
    run_or_call(ranks, saved, str(tmp_path / "plain"), str(tmp_path / "out"), format)
    quantized(tmp_path / "plain", tmp_path / "codes", format)
    got, plain = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    form = load_file(tmp_path / "codes" / "model.safetensors")  # as bitsandbytes writes them, with other codes
    assert {n: (x.shape, x.dtype) for n, x in got.items()} == {n: (x.shape, x.dtype) for n, x in form.items()}
    for name, x in plain.items():
        if not is_quantized(name):
            assert torch.equal(got[name], x)
            continue
        want = fz.quantize(x, format)
        scales = f"{name}.absmax" if format == "nf4" else f"{name[:-6]}SCB"
        assert torch.equal(got[name].flatten(), want.codes.flatten())
        assert torch.equal(got[scales], want.absmax)
        for constant in (".quant_map", ".quant_state.bitsandbytes__nf4") if format == "nf4" else ():
            assert torch.equal(got[f"{name}{constant}"], form[f"{name}{constant}"])
    for whole, _ in run_or_call(1, loaded, str(tmp_path / "out"), None):
        for name, x in plain.items():
            if is_quantized(name):
                assert torch.equal(whole[f"{name_in_peft(name)}.qweight"], fz.quantize(x, format).codes)


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_transformers_and_bitsandbytes_load_what_is_written(tmp_path: Path, format: str) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = SIZES | {"intermediate_size": 128}  # on CPUs, bitsandbytes computes only with complete blocks in each row
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "plain")
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "plain", quantize=format)
    step = fz.shard_params(model.train_step(fz.optim.sgd(0.1)))
    state = fz.compile(step, fz.make_mesh(data=1), backend="eager").load(tmp_path / "plain")
    fz.hf.save_pretrained(tmp_path / "out", model, state)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    kinds = {type(m).__name__ for name, m in read.named_modules() if is_quantized(f"{name}.weight")}
    assert kinds == {"nf4": {"Linear4bit"}, "int8": {"Linear8bitLt"}}[format]
    read.train()  # in evaluation, bitsandbytes may compute in bf16 on CPUs
    with torch.no_grad():
        got, want = (m(input_ids=IDS).logits for m in (read, fz.hf.module(model, state)))
    # LLM.int8 rounds activations to 8 bits.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if format == "nf4" else 0.02)


def test_codes_that_would_be_stored_in_parts_are_rejected(tmp_path: Path) -> None:
    """Files of NomicBERT have the three projections of an attention as one tensor."""
    transformers.NomicBertForMaskedLM(transformers.NomicBertConfig(**SIZES)).save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"(?s)form that codes cannot have.*attn\.Wqkv\.weight.*fz\.hf\.stream"):
        saved(str(tmp_path / "plain"), str(tmp_path / "out"), "nf4", transformers.AutoModelForMaskedLM)
