"""Trains by one script in transformers' Trainer, alone, over DDP and with DeepSpeed, and in fzero's, and compares the
losses step by step.

    python benchmarks/trainer_same.py                  # on one and two ranks over gloo, CPU: about 8 minutes
    python benchmarks/trainer_same.py --only "stage 3" # the others as they were

Needs `pip install 'fzero[hf,bench]'`. All that differs between two runs is the class of the Trainer, and that of the
arguments where DeepSpeed is configured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, publish

STEPS, ROWS, PARTS, VOCAB = 30, 4, 2, 64
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


class Case(NamedTuple):
    """A model, its rows and arguments, on so many ranks; with `config`, beside DeepSpeed."""

    model: str
    ranks: int = 1
    ragged: bool = True
    settings: dict[str, Any] | None = None
    config: dict[str, Any] | None = None


CASES = {
    "Llama": Case("llama"),
    "Llama, label smoothing, cosine": Case(
        "llama", 1, True, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}
    ),
    "BERT, classes": Case("bert", 1, True, {"gradient_accumulation_steps": 1}),
    "T5, summaries": Case("t5", 1, True, {"gradient_accumulation_steps": 1}),
    "ViT, images": Case("vit", 1, False, {"optim": "sgd", "learning_rate": 0.05, "gradient_accumulation_steps": 1}),
    "Llama, two ranks": Case("llama", 2),
    "BERT, two ranks": Case(
        "bert", 2, True, {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False}
    ),
    "stage 1": Case("llama", 2, False, None, _config(1, optimizer=_ADAMW, scheduler=_WARMUP)),
    "stage 2": Case("llama", 2, False, None, _config(2, optimizer=_ADAMW, scheduler=_WARMUP)),
    "stage 3": Case("llama", 2, False, None, _config(3, optimizer=_ADAMW, scheduler=_WARMUP)),
    "stage 1, ragged, transformers' optimizer": Case("llama", 2, True, None, _config(1)),
    "stage 3, ragged, transformers' schedule": Case("llama", 2, True, None, _config(3, optimizer=_ADAMW)),
}


def make_model(kind: str) -> Any:
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


def make_rows(case: Case) -> list[dict[str, Any]]:
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


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if "pixel_values" in rows[0]:
        return {n: torch.stack([torch.as_tensor(row[n]) for row in rows]) for n in rows[0]}

    def padded(name: str, fill: int, ones: bool = False) -> torch.Tensor:
        values = [[1] * len(row[name]) if ones else row[name] for row in rows]
        longest = max(map(len, values))
        return torch.tensor([x + [fill] * (longest - len(x)) for x in values])

    labels = padded("labels", -100) if isinstance(rows[0]["labels"], list) else [row["labels"] for row in rows]
    return {
        "input_ids": padded("input_ids", 0),
        "attention_mask": padded("input_ids", 0, ones=True),
        "labels": torch.as_tensor(labels),
    }


def train(library: str, case: Case, folder: str) -> list[float]:
    """The losses that a Trainer logs, of a process."""
    if library == "deepspeed":  # on a CPU it must be told of the process group
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import PartialState

        PartialState(backend="gloo")
    import transformers

    usual = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 5e-3,
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


def start(library: str, name: str) -> list[float]:
    """The losses of a case, of fresh processes."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "losses.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(CASES[name].ranks)]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        done = subprocess.run(
            [*(launch if CASES[name].ranks > 1 else launch[:1]), __file__]
            + ["--library", library, "--case", name, "--out", str(out)],
            env=env, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{library}, {name}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["transformers", "deepspeed", "fzero"], help="what a started process runs")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="the others as they were")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.library:
        losses = train(args.library, CASES[args.case], str(args.out.parent / "run"))
        if int(os.environ.get("RANK", "0")) == 0:
            args.out.write_text(json.dumps(losses))
        return
    import deepspeed
    import transformers

    rows, found = [], {}
    before = {} if len(args.only) == len(CASES) else json.loads((RESULTS / "trainer_same.json").read_text())
    for name, case in CASES.items():
        peer = "transformers" if case.config is None else "deepspeed"
        known = before.get(name, {})
        theirs = start(peer, name) if name in args.only else known["theirs"]
        ours = start("fzero", name) if name in args.only else known["ours"]
        assert len(theirs) == len(ours) == STEPS
        off = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        limit = LIMIT if case.config is None else DEEPSPEED_LIMIT
        found[name] = {**case._asdict(), "theirs": theirs, "ours": ours}
        beside = ("transformers" if case.ranks == 1 else "transformers, DDP") if case.config is None else "DeepSpeed"
        numbers = [f"{x:.5f}" for x in (theirs[0], theirs[-1], ours[-1])]
        rows.append([name, beside, *numbers, f"{off:.1e}", f"{limit:g}: {'met' if off <= limit else 'MISSED'}"])
        print(*rows[-1], sep=" | ", flush=True)
    publish(
        "trainer_same",
        "One script, two Trainers",
        ["", "beside", "first loss", "last, theirs", "last, fzero", "largest difference", "wanted"],
        rows,
        [
            f"{STEPS} steps of {PARTS} micro-batches of {ROWS} rows a rank (all but Llama of one), AdamW (ViT: SGD),"
            " warmup, clipped to 1; one rank, or two over gloo; all in fp32 on the CPU.",
            "Rows are ragged, but for the ViT's and stages 1 to 3, and the last batch of an epoch is in part.",
            "BERT and T5 ignore `num_items_in_batch`; transformers does not divide their loss by the micro-batches.",
            f"transformers {transformers.__version__}, DeepSpeed {deepspeed.__version__} by transformers' own Trainer.",
        ],
        found,
    )


if __name__ == "__main__":
    main()
