"""What a user of the Trainer meets first: each has the numbers of transformers' own Trainer.

docs/migrate/huggingface.md has the table of these cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz  # noqa: F401 - before transformers

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from fzero.hf import Trainer  # noqa: E402

LENGTHS = (5, 9, 12, 7, 11, 6, 8, 10, 4, 13)


def row(length: int, start: int, ignored: int = 0) -> dict[str, list[int]]:
    ids = [(start + 3 * i) % 60 for i in range(length)]
    return {"input_ids": ids, "labels": [-100] * ignored + ids[ignored:], "attention_mask": [1] * length}


ROWS = [row(length, n, n % 3) for n, length in enumerate(LENGTHS)]


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(r["input_ids"]) for r in rows)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {n: torch.tensor([r[n] + [x] * (longest - len(r[n])) for r in rows]) for n, x in fills.items()}


def model(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trainer(base: Any, path: Path, net: Any = None, collator: Any = collated, **settings: Any) -> Any:
    usual = {
        "max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.02,
        "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "seed": 3,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(path / base.__module__), **(usual | settings))
    given = {"backend": "eager", "lengths": (32,)} if base is Trainer else {}
    data = {"train_dataset": ROWS, "eval_dataset": ROWS[:7], "data_collator": collator}
    return base(net or model(), args, **data, **given)


def losses(found: Any) -> list[float]:
    return [x for row in found.state.log_history for n, x in row.items() if n in ("loss", "eval_loss")]


def both(path: Path, make: Any = lambda: None, **settings: Any) -> list[Any]:
    """Both libraries' trainers after the same training, whose losses and trained weights are equal."""
    found = [trainer(base, path, make(), **settings) for base in (transformers.Trainer, Trainer)]
    for each in found:
        each.train()
    compare(*found)
    return found


def compare(theirs: Any, ours: Any) -> None:
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-5) and len(losses(ours)) > 1
    for (name, one), two in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_an_epoch_leaves_micro_batches_over(tmp_path: Path) -> None:
    """Five micro-batches in an epoch, two in an update: the third update of each epoch has one."""
    _, ours = both(tmp_path, num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=2)
    assert ours.state.global_step == 6


def test_means_of_an_evaluation(tmp_path: Path) -> None:
    """Seven samples in batches of four and three, with different numbers of targets."""
    found = both(tmp_path, eval_strategy="steps", eval_steps=2)
    one, two = (each.evaluate()["eval_loss"] for each in found)
    assert two == pytest.approx(one, rel=2e-5)


def test_label_smoothing_with_accumulation(tmp_path: Path) -> None:
    both(tmp_path, label_smoothing_factor=0.1, gradient_accumulation_steps=2)


def test_packed_sequences(tmp_path: Path) -> None:
    both(tmp_path, collator=transformers.DataCollatorWithFlattening(), gradient_accumulation_steps=2)


def test_a_resume_within_an_epoch(tmp_path: Path) -> None:
    """The samples of the epoch that were used before the save are not used again."""
    saves = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "max_steps": -1}
    found = both(tmp_path, **saves)
    again = [trainer(base, tmp_path, **saves) for base in (transformers.Trainer, Trainer)]
    for each in again:
        each.train(resume_from_checkpoint=f"{each.args.output_dir}/checkpoint-2")
    compare(*again)
    compare(found[1], again[1])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("head", ["free", "tied", "kept tied"])
def test_adapters_with_a_trained_head(tmp_path: Path, head: str) -> None:
    """`modules_to_save` of peft copies the head, which may be tied to the embedding, and may stay so."""
    peft = pytest.importorskip("peft")

    def make() -> Any:
        settings = {"ensure_weight_tying": True} if head == "kept tied" else {}
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], **settings)
        return peft.get_peft_model(model(head != "free"), config)

    _, ours = both(tmp_path, make)
    trained = {n for n, p in ours.model.named_parameters() if p.requires_grad}
    assert any("modules_to_save" in n for n in trained) and any("lora_" in n for n in trained)
