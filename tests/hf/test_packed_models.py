"""Models of transformers on packed documents train as on the documents apart (docs/guides/packing.md)."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


from fzero.hf import Trainer  # noqa: E402

LENGTHS = (3, 5, 9, 4, 6, 7, 2, 12, 8, 11, 1, 13)
DOCUMENTS = [[(7 * n + 3 * i) % 63 + 1 for i in range(length)] for n, length in enumerate(LENGTHS)]
ROWS = fz.data.pack(DOCUMENTS, seq=16)
BATCH = fz.data.ArrayDataset(ROWS, batch=8, shuffle=False).batch_at(0)  # more rows than there are: some twice
WINDOWS = {
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
}


def model(name: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, attn_implementation=attention,
        **WINDOWS.get(name, {}),
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config)


def trained_apart(net: Any) -> tuple[float, Any]:
    """The loss, and the model after a step of SGD, on each document of the batch by itself."""
    net, losses, count = copy.deepcopy(net), [], 0
    for ids, positions in zip(BATCH["input_ids"], BATCH["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(ids)]
        for first, stop in itertools.pairwise(starts):
            document = ids[None, first:stop]
            if stop - first > 1 and document.any():  # not the padding
                logits = net(input_ids=document).logits[0, :-1].float()
                losses.append(torch.nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum"))
                count += stop - first - 1
    loss = torch.stack(losses).sum() / count
    loss.backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    return loss.item(), net


TRANSFORMS = {
    "plain": ((), fz.AbstractMesh(data=1)),
    "ZeRO-3": ((fz.shard_params(),), fz.AbstractMesh(data=2)),
    "accumulate": ((fz.accumulate(4),), fz.AbstractMesh(data=1)),
    "remat": ((fz.remat("full"),), fz.AbstractMesh(data=1)),
    "all": ((fz.shard_params(), fz.accumulate(2), fz.remat("full")), fz.AbstractMesh(data=2)),
    "tensor_parallel": ((fz.shard_params(), fz.tensor_parallel()), fz.AbstractMesh(data=2, model=2)),
    "tensor_parallel by positions": ((fz.tensor_parallel(sequence=True),), fz.AbstractMesh(model=2)),
    "keys of all positions": (
        (fz.sequence_parallel(attention="keys"),),
        fz.AbstractMesh(seq=4),
    ),  # documents cross ranks
    "pipeline": ((fz.accumulate(2, schedule="layerwise"), fz.pipeline()), fz.AbstractMesh(pipe=2)),
    "pipeline, ZeRO-1, heads": (
        (
            fz.accumulate(2, schedule="layerwise"),
            fz.pipeline(schedule="zb"),
            fz.shard_opt_state(),
            fz.tensor_parallel(),
        ),
        fz.AbstractMesh(data=2, model=2, pipe=2),
    ),
    "host memory": (
        (fz.shard_params(), fz.offload("cpu", ("params", "opt_state", "activations"))),
        fz.AbstractMesh(data=2),
    ),
    "sequence_parallel": ((fz.shard_params(), fz.sequence_parallel(axis="seq")), fz.AbstractMesh(data=2, seq=2)),
}


@pytest.mark.full(keep=["Llama-all", "Gemma3-all"])
@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma3"])
def test_a_step_on_packed_rows_is_that_on_the_documents_apart(name: str, transforms: str) -> None:
    net = model(name)
    loss, apart = trained_apart(net)
    given, mesh = TRANSFORMS[transforms]
    functional = fz.functionalize(net)
    step = fz.compose(*given)(functional.train_step(fz.optim.sgd(1.0)))
    state, metrics = fz.testing.simulate(step, mesh, functional.params, BATCH)
    functional.write_back(state.params)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    for (path, one), two in zip(apart.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-6, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.full(keep=["Llama-all", "Gemma2-all"])
@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")  # transformers passes it
def test_flex_attention_of_transformers_is_its_eager_attention(name: str, transforms: str) -> None:
    """Gemma 2 has a function of the scores, a soft cap, and layers with a sliding window."""
    loss, apart = trained_apart(model(name, "eager"))
    given, mesh = TRANSFORMS[transforms]
    net = model(name, "flex_attention")
    functional = fz.functionalize(net)
    step = fz.compose(*given)(functional.train_step(fz.optim.sgd(1.0)))
    state, metrics = fz.testing.simulate(step, mesh, functional.params, BATCH)
    functional.write_back(state.params)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    for (path, one), two in zip(apart.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-6, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
def test_flex_attention_of_transformers_takes_attention_masks() -> None:
    mask = torch.ones_like(BATCH["input_ids"])
    mask[1, 10:] = 0
    batch = {
        "input_ids": BATCH["input_ids"],
        "attention_mask": mask,
        "labels": BATCH["labels"].masked_fill(mask == 0, -100),
    }
    found = []
    for kind in ("eager", "flex_attention"):
        functional = fz.functionalize(model("Llama", kind))
        step = functional.train_step(fz.optim.sgd(1.0))
        found.append(fz.testing.simulate(step, fz.AbstractMesh(data=1), functional.params, batch))
    torch.testing.assert_close(found[1][0].params, found[0][0].params, rtol=0, atol=1e-6)


@pytest.mark.full(keep=["Gemma3"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma3"])
def test_isolation_is_proved_to_the_bit_and_an_attention_mask_breaks_it(name: str) -> None:
    functional = fz.functionalize(model(name))
    step = functional.train_step(fz.optim.sgd(0.1))
    batch = {entry: x[:2] for entry, x in BATCH.items()}
    assert fz.testing.check_isolation(step, functional.params, batch) == 0.0
    with pytest.raises(fz.errors.EquivalenceError, match="depends on row"):
        masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        fz.testing.check_isolation(step, functional.params, masked)


def test_documents_of_other_lengths_run_the_same_program_in_any_precision() -> None:
    functional = fz.functionalize(model("Llama"))
    other = fz.data.pack([list(range(1, 17)), [3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3]], seq=16)
    batches = [BATCH, fz.data.ArrayDataset(other, batch=8, shuffle=False).batch_at(0)]
    assert not torch.equal(batches[0]["position_ids"], batches[1]["position_ids"])
    step = fz.compose(fz.mixed_precision("bf16"), fz.remat("full"), fz.accumulate(2))(
        functional.train_step(fz.optim.sgd(1.0))
    )
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state, programs = train.init(functional.params), list[Any]()
    for batch in batches:
        state, metrics = train(state, batch)
        programs.append(train.program)
        assert float(metrics["loss"]) > 0
    assert programs[0] is programs[1]
    two = {name: x[:2] for name, x in BATCH.items()}
    assert fz.testing.check_isolation(step, functional.params, two) == 0.0


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_rows_that_are_one_document_have_no_mask(name: str) -> None:
    """The positions that a model computes itself are known; those of a batch are not, nor is a sliding window causal
    attention."""
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    batch, net = {"input_ids": ids, "labels": ids}, model(name)
    functional = fz.functionalize(net)
    step = functional.train_step(fz.optim.sgd(1.0))
    masks = []
    for given in (batch, {**batch, "position_ids": torch.arange(16).repeat(2, 1)}):
        state, metrics = fz.testing.simulate(step, fz.AbstractMesh(data=1), functional.params, given)
        assert float(metrics["loss"]) == pytest.approx(net(**batch).loss.item(), rel=1e-6)
        program = str(fz.lower(step, fz.AbstractMesh(data=1), functional.params, given))
        masks.append(program.count("bool[2, 1, 16, 16]"))
    assert masks == ([0, 1] if name == "Llama" else [1, 2])
    after = copy.deepcopy(net)
    after(**batch).loss.backward()
    torch.optim.SGD(after.parameters(), 1.0).step()
    functional.write_back(state.params)
    for one, two in zip(after.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-6)


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    out = {"input_ids": [x + [0] * (24 - len(x)) for x in ids], "labels": [x + [-100] * (24 - len(x)) for x in ids]}
    out["attention_mask"] = [[1] * len(x) + [0] * (24 - len(x)) for x in ids]
    return {name: torch.tensor(x) for name, x in out.items()}


def trained(base: Any, path: Path, data: Any, collator: Any = None, rows: int = 4, **settings: Any) -> Any:
    """Losses and trained parameters of a trainer."""
    args = transformers.TrainingArguments(
        str(path), max_steps=2, per_device_train_batch_size=rows, gradient_accumulation_steps=2, logging_steps=1,
        learning_rate=0.02, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", seed=3,
    )  # fmt: skip
    trainer = base(model("Llama"), args, train_dataset=data, data_collator=collator, **settings)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, list(trainer.model.parameters())


def equal(one: Any, two: Any) -> None:
    assert one[0] == pytest.approx(two[0], rel=2e-5) and len(one[0]) == 2
    for x, y in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


def test_the_trainer_packs_with_the_collator_of_transformers(tmp_path: Path) -> None:
    """Four documents in one packed row train as in four padded rows."""
    data = [{"input_ids": document} for document in DOCUMENTS if len(document) > 1]
    flattening = transformers.DataCollatorWithFlattening()
    packed = trained(Trainer, tmp_path, data, flattening, backend="eager", lengths=(48,))
    equal(packed, trained(Trainer, tmp_path, data, padded, backend="eager", lengths=(24,)))


def test_the_trainer_takes_what_trl_packs(tmp_path: Path) -> None:
    """The collator of `SFTTrainer(packing=True)` returns also the arguments of variable-length kernels. A prompt has no
    targets."""
    data = [{"input_ids": x, "labels": [-100] * (len(x) // 3) + x[len(x) // 3 :]} for x in DOCUMENTS if len(x) > 1]
    flattening = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert {"cu_seq_lens_q", "max_length_q", "seq_idx", "position_ids"} <= {*flattening(data[:2])}
    ours = trained(Trainer, tmp_path, data, flattening, backend="eager", lengths=(48,))
    equal(ours, trained(transformers.Trainer, tmp_path, data, flattening))


def test_both_trainers_take_packed_rows_as_a_data_set(tmp_path: Path) -> None:
    ours = trained(Trainer, tmp_path, ROWS, rows=2, backend="eager")
    equal(ours, trained(transformers.Trainer, tmp_path, ROWS, rows=2))
