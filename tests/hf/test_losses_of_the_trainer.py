"""One script in transformers' Trainer, alone, over DDP and with DeepSpeed, and in fzero's: losses step by step.

Two runs differ in the class of the Trainer, and in the class of the arguments if DeepSpeed is configured. All cases
with --exhaustive; some need DeepSpeed, which the extra `bench` brings. `python tests/hf/test_losses_of_the_trainer.py
["stage 3" ...]` writes docs/results/trainer_same.md.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from common import Group, publish, serve

STEPS = 30
PARTS = 2
MODEL_ROWS, VOCAB = 4, 64
LIMIT, DEEPSPEED_LIMIT = 1e-5, 1e-4
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_FIXED = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
_ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}
_WARMUP = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}


def _config(stage: int, **sections: Any) -> dict[str, Any]:
    """A ds_config.json as the documentation of transformers writes it, its numbers from the arguments."""
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {**_FIXED, "gradient_clipping": "auto", **zero, **sections}


class Training(NamedTuple):
    """A model, its rows and arguments, on so many ranks; with `config`, beside DeepSpeed."""

    model: str
    ranks: int = 1
    ragged: bool = True
    settings: dict[str, Any] | None = None
    config: dict[str, Any] | None = None


TRAININGS = {
    "Llama": Training("llama"),
    "Llama, label smoothing, cosine": Training(
        "llama", 1, True, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}
    ),
    "BERT, classes": Training("bert", 1, True, {"gradient_accumulation_steps": 1}),
    "T5, summaries": Training("t5", 1, True, {"gradient_accumulation_steps": 1}),
    "ViT, images": Training("vit", 1, False, {"optim": "sgd", "learning_rate": 0.05, "gradient_accumulation_steps": 1}),
    "Llama, two ranks": Training("llama", 2),
    "BERT, two ranks": Training(
        "bert", 2, True, {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False}
    ),
    "stage 1": Training("llama", 2, False, None, _config(1, optimizer=_ADAMW, scheduler=_WARMUP)),
    "stage 2": Training("llama", 2, False, None, _config(2, optimizer=_ADAMW, scheduler=_WARMUP)),
    "stage 3": Training("llama", 2, False, None, _config(3, optimizer=_ADAMW, scheduler=_WARMUP)),
    "stage 1, ragged, transformers' optimizer": Training("llama", 2, True, None, _config(1)),
    "stage 3, ragged, transformers' schedule": Training("llama", 2, True, None, _config(3, optimizer=_ADAMW)),
}


def make_model(kind: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, **still, num_labels=3))
    if kind == "t5":
        sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
        settings = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **settings))
    if kind == "vit":
        shape = {"image_size": 16, "patch_size": 4, "num_channels": 1, "num_labels": 3}
        sizes = {name: x for name, x in TINY.items() if name != "vocab_size"}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **still, **shape))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def make_rows(case: Training) -> list[dict[str, Any]]:
    import torch

    draw, rows = random.Random(0), []
    for _ in range(90):
        ids = [draw.randrange(1, VOCAB) for _ in range(draw.randint(4, 40) if case.ragged else 24)]
        if case.model == "vit":
            generator = torch.Generator().manual_seed(len(rows))
            rows.append({"pixel_values": torch.randn(1, 16, 16, generator=generator), "labels": len(rows) % 3})
        elif case.model == "bert":
            rows.append({"input_ids": ids, "labels": sum(ids) % 3})
        elif case.model == "t5":
            rows.append({"input_ids": ids, "labels": ids[: 2 + len(ids) // 3]})
        else:
            rows.append({"input_ids": ids, "labels": [-100 if case.ragged and i % 4 == 0 else i for i in ids]})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    if "pixel_values" in rows[0]:
        return {n: torch.stack([torch.as_tensor(row[n]) for row in rows]) for n in rows[0]}

    def padded(name: str, fill: int, ones: bool = False) -> Any:
        values = [[1] * len(row[name]) if ones else row[name] for row in rows]
        longest = max(map(len, values))
        return torch.tensor([x + [fill] * (longest - len(x)) for x in values])

    labels = padded("labels", -100) if isinstance(rows[0]["labels"], list) else [row["labels"] for row in rows]
    return {
        "input_ids": padded("input_ids", 0),
        "attention_mask": padded("input_ids", 0, ones=True),
        "labels": torch.as_tensor(labels),
    }


def train(library: str, name: str, folder: str) -> list[float]:
    """The losses that a Trainer logs, of a process."""
    case = TRAININGS[name]
    if library == "deepspeed":  # on a CPU it must be told of the process group
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import PartialState

        PartialState(backend="gloo")
    import transformers

    usual = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": MODEL_ROWS, "learning_rate": 5e-3,
        "gradient_accumulation_steps": PARTS, "weight_decay": 0.1, "warmup_steps": 5, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    settings, more = {**usual, **(case.settings or {})}, {}
    if library == "deepspeed":
        args = transformers.TrainingArguments(
            **settings, deepspeed=case.config, accelerator_config={"use_configured_state": True}
        )
        cls: Any = transformers.Trainer
    elif library == "transformers":
        args, cls = transformers.TrainingArguments(**settings, use_cpu=True), transformers.Trainer
    else:
        from fzero.hf import Trainer, TrainingArguments

        args, cls = TrainingArguments(**settings, use_cpu=True, deepspeed=case.config), Trainer
        more = {"backend": "eager"}
    model = make_model(case.model)
    trainer = cls(model, args, train_dataset=make_rows(case), data_collator=collate, **more)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def worker(library: str, name: str) -> None:
    """A rank of a fresh process: it trains when it is asked to, and answers with its losses."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
    if os.environ["WORLD_SIZE"] == "1":  # as a script that no launcher starts
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[variable]
    with tempfile.TemporaryDirectory() as folder:
        serve({"train": lambda: train(library, name, folder)})


def losses(library: str, name: str, ranks: int) -> list[float]:
    with Group(__file__, ranks, [library, name]) as group:
        return group.ask("train")[0]


def compared(name: str) -> tuple[list[float], list[float], str]:
    """The losses of the other Trainer and of fzero's, and the name of the other one."""
    case = TRAININGS[name]
    peer = "transformers" if case.config is None else "deepspeed"
    theirs, ours = (losses(library, name, case.ranks) for library in (peer, "fzero"))
    assert len(theirs) == len(ours) == STEPS
    beside = ("transformers" if case.ranks == 1 else "transformers, DDP") if case.config is None else "DeepSpeed"
    return theirs, ours, beside


def difference(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(theirs, ours, strict=True))


def limit(name: str) -> float:
    """The largest difference of a loss."""
    return LIMIT if TRAININGS[name].config is None else DEEPSPEED_LIMIT


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRAININGS)
def test_losses_are_those_of_the_other_trainer(name: str) -> None:
    pytest.importorskip("transformers")
    if TRAININGS[name].config is not None:
        pytest.importorskip("deepspeed")
    theirs, ours, _ = compared(name)
    assert difference(theirs, ours) <= limit(name), (theirs, ours)


def main(names: Sequence[str]) -> None:
    rows, found = [], {}
    for name in names:
        theirs, ours, beside = compared(name)
        found[name] = {**TRAININGS[name]._asdict(), "theirs": theirs, "ours": ours}
        numbers = [f"{x:.5f}" for x in (theirs[0], theirs[-1], ours[-1])]
        rows.append([name, beside, *numbers, f"{difference(theirs, ours):.1e}"])
        print(*rows[-1], sep=" | ", flush=True)
    notes = [
        f"{STEPS} steps of {PARTS} micro-batches of {MODEL_ROWS} samples per rank (Llama; one micro-batch for the "
        "other models), AdamW (ViT: SGD), warmup, clipped to 1; one rank, or two over gloo; all in fp32 on the CPU.",
        "The lengths of samples differ, except for the ViT and stages 1 to 3, and the last batch of an epoch is not "
        "full.",
        "BERT and T5 ignore `num_items_in_batch`; transformers does not divide their loss by the micro-batches.",
        f"transformers {metadata.version('transformers')}, DeepSpeed {metadata.version('deepspeed')} by transformers' "
        "own Trainer.",
    ]
    columns = ["", "compared with", "first loss", "last, theirs", "last, fzero", "largest difference"]
    publish("trainer_same", "One script, two Trainers", columns, rows, notes, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main(sys.argv[1:] or list(TRAININGS))
