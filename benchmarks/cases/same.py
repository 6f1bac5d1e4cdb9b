"""The same training in two libraries, losses step by step: DeepSpeed and its configuration, transformers' Trainer."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

from common import RESULTS, verdict

from cases import Table, processes

STEPS = 30


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
    if os.environ["WORLD_SIZE"] == "1":  # as a script that no launcher starts
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    train = {"deepspeed_same": train_network, "trainer_same": train_model}[args.case]

    def losses(library: str, name: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            return train(library, name, folder)

    return {"train": losses}


def both(args: argparse.Namespace, name: str, ranks: int, peer: str) -> tuple[list[float], list[float]]:
    """Losses of the peer and of fzero, of fresh processes; of what is not in `--only`, as they were."""
    if args.only and name not in args.only:
        known = json.loads((RESULTS / f"{args.case}.json").read_text())[name]
        return known.get("theirs", known.get("deepspeed")), known.get("ours", known.get("fzero"))
    found = []
    for library in (peer, "fzero"):
        with processes(args, ranks) as group:
            found.append(group.ask("train", library=library, name=name)[0])
    return found[0], found[1]


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "is not installed here"


# --- DeepSpeed's configuration ---

RANKS, ROWS, PARTS = 2, 8, 2
_ADAM = {"type": "Adam", "params": {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}}
_BASE = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": PARTS,
    "gradient_clipping": 0.5,
    "optimizer": _ADAM,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_allow_untested_optimizer": True,
}


def _stage(stage: int, **changes: Any) -> dict[str, Any]:
    return {**_BASE, "zero_optimization": {"stage": stage}, **changes}


_L2 = {"type": "Adam", "params": {**_ADAM["params"], "adam_w_mode": False}}
_SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
_FAST = {"type": "SGD", "params": {"lr": 1.0}}  # its gradients are larger than 1
_COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}}
_DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_max_lr": 0.1}}
_UNCLIPPED = {key: value for key, value in _BASE.items() if key != "gradient_clipping"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stage 0": _stage(0),
    "stage 1": _stage(1),
    "stage 2": _stage(2),
    "stage 3": _stage(3),
    "stage 2, Adam with L2": _stage(2, optimizer=_L2),
    "stage 1, SGD, WarmupDecayLR": _stage(1, optimizer=_SGD, scheduler=_DECAY),
    "stage 3, WarmupCosineLR": _stage(3, scheduler=_COSINE),
    "stage 2, SGD, gradient_clipping omitted": {**_UNCLIPPED, "zero_optimization": {"stage": 2}, "optimizer": _FAST},
    "stage 2, bf16": _stage(2, bf16={"enabled": True}, communication_data_type="fp32"),
}


def network() -> Any:
    """A classifier of 16 numbers, with norms."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width: int = 64):
            super().__init__()
            self.first = nn.Linear(16, width)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
            self.last = nn.Linear(width, 8)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + torch.tanh(layer(norm(x)))
            return self.last(x)

    torch.manual_seed(0)
    return Net()


def rows_of(step: int) -> tuple[Any, Any]:
    """The rows of a step, of all ranks and micro-batches: the target is a function of the input."""
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * PARTS * ROWS, 16, generator=generator)
    return x, x[:, :8].argmax(1)


def train_network(library: str, name: str, _: str) -> list[float]:
    """The losses of all ranks."""
    import torch

    config, net, losses = CONFIGURATIONS[name], network(), []
    loss_of = lambda out, target: torch.nn.functional.cross_entropy(out.float(), target)  # noqa: E731
    if library == "fzero":
        import fzero as fz

        model, mesh = fz.functionalize(net), fz.make_mesh()
        given: Any = {"model": model, "config": config, "loss": lambda out, batch: loss_of(out, batch[1])}
        train = fz.deepspeed.initialize(**given, mesh=mesh, report=False, backend="eager")
        state = train.init(model.params)
        for step in range(STEPS):
            state, metrics = train(state, tuple(t.chunk(RANKS)[mesh.rank] for t in rows_of(step)))
            losses.append(float(metrics["loss"]))
        return losses
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    dtype, rank = next(net.parameters()).dtype, deepspeed.comm.get_rank()
    for step in range(STEPS):
        total = torch.zeros(())
        for x, y in zip(*(t.chunk(RANKS)[rank].chunk(PARTS) for t in rows_of(step)), strict=True):
            loss = loss_of(engine(x.to(dtype)), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / (PARTS * RANKS)
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    return losses


def deepspeed_same(args: argparse.Namespace) -> Table:
    """One module and one ds_config.json in DeepSpeed and in fzero, on two ranks over gloo: losses step by step.

    Needs `pip install -e '.[bench]'`. `--only "stage 3"` repeats some and keeps the other results.
    """
    rows, found = [], {}
    for name, config in list(CONFIGURATIONS.items())[: args.rows]:
        theirs, ours = both(args, name, RANKS, "deepspeed")
        off = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(theirs, ours, strict=True))
        limit = 3e-2 if "bf16" in name else 1e-4
        found[name] = {"config": config, "deepspeed": theirs, "fzero": ours}
        numbers = [f"{x:.5f}" for x in (theirs[0], theirs[-1], ours[-1])]
        rows.append([name, *numbers, f"{off:.1e}", f"{limit:g}: {verdict(off, limit).lower()}"])
        print(*rows[-1], flush=True)
    notes = [
        f"{STEPS} steps, {RANKS} ranks over gloo, of each {PARTS} micro-batches of {ROWS} rows; losses are of all.",
        "Unless it says so: fp32, Adam with decoupled decay, WarmupLR, clipped to 0.5.",
        f"DeepSpeed {_version('deepspeed')}.",
    ]
    columns = ["", "first loss", "last, DeepSpeed", "last, fzero", "largest relative difference", "wanted"]
    return Table("One configuration, two libraries", columns, rows, notes, found)


# --- transformers' Trainer ---

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


def train_model(library: str, name: str, folder: str) -> list[float]:
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


def trainer_same(args: argparse.Namespace) -> Table:
    """One script in transformers' Trainer, alone, over DDP and with DeepSpeed, and in fzero's: losses step by step.

    Needs `pip install -e '.[hf,bench]'`. Two runs differ in the class of the Trainer, and in that of the arguments
    where DeepSpeed is configured. `--only "stage 3"` repeats some and keeps the other results.
    """
    rows, found = [], {}
    for name, case in list(TRAININGS.items())[: args.rows]:
        theirs, ours = both(args, name, case.ranks, "transformers" if case.config is None else "deepspeed")
        assert len(theirs) == len(ours) == STEPS
        off = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        limit = LIMIT if case.config is None else DEEPSPEED_LIMIT
        found[name] = {**case._asdict(), "theirs": theirs, "ours": ours}
        beside = ("transformers" if case.ranks == 1 else "transformers, DDP") if case.config is None else "DeepSpeed"
        numbers = [f"{x:.5f}" for x in (theirs[0], theirs[-1], ours[-1])]
        rows.append([name, beside, *numbers, f"{off:.1e}", f"{limit:g}: {verdict(off, limit)}"])
        print(*rows[-1], sep=" | ", flush=True)
    notes = [
        f"{STEPS} steps of {PARTS} micro-batches of {MODEL_ROWS} rows a rank (all but Llama of one), AdamW (ViT: SGD),"
        " warmup, clipped to 1; one rank, or two over gloo; all in fp32 on the CPU.",
        "Rows are ragged, but for the ViT's and stages 1 to 3, and the last batch of an epoch is in part.",
        "BERT and T5 ignore `num_items_in_batch`; transformers does not divide their loss by the micro-batches.",
        f"transformers {_version('transformers')}, DeepSpeed {_version('deepspeed')} by transformers' own Trainer.",
    ]
    columns = ["", "beside", "first loss", "last, theirs", "last, fzero", "largest difference", "wanted"]
    return Table("One script, two Trainers", columns, rows, notes, found)
