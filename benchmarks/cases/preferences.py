"""Preference optimization (DPO): a step of fzero compared with TRL's trainer."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import largest_difference, peak_mib, reset_peak, rss_mib, within_rounds

from cases import Table, cpu_seconds, processes

TITLES = {"fzero": "fzero ZeRO-3", "trl": "TRL's DPOTrainer, DDP"}
VOCAB, BETA, LR, MAX_NORM = 4096, 0.1, 1e-4, 1.0
PAIRS = "pairs.jsonl"


def dpo(args: argparse.Namespace) -> Table:
    """Trains the same Llama on the same pairs, with log-probabilities of the reference that are computed before.

    Each contestant is alone on the machine, once in every round. Needs trl.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    for turn in range(args.rounds):
        for name in random.Random(turn).sample(args.only, len(args.only)):
            with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder:
                _write_pairs(args, folder)
                with processes(args, args.processes, env={"contestant": name, "folder": folder}) as group:
                    answers = group.ask("train")
            one = {k: max(x[k] for x in answers) for k in ("cpu_s", "wall_s", "growth_mib")}
            steps = zip(*(x["losses"] for x in answers), strict=True)
            found[name].append(one | {"losses": [statistics.mean(step) for step in steps]})
            print(f"round {turn + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    forms = {"cpu_s": ".3f", "wall_s": ".3f", "growth_mib": ".0f"}
    rows = [
        (
            TITLES[name],
            *(format(statistics.median(x[k] for x in each), form) for k, form in forms.items()),
            f"{each[0]['losses'][-1]:.5f}",
        )
        for name, each in found.items()
    ]
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, vocabulary {VOCAB}; {args.batch} pairs of {args.seq} "
        f"tokens, of which half are the answer, of all {args.processes} processes with one thread each; fp32, AdamW, "
        f"clipping; {args.steps} steps after {args.warmup}; medians of {args.rounds} rounds. Log-probabilities of the "
        "reference model are computed before. MiB: the peak of a rank in these steps above its memory before the "
        "model was loaded."
    ]
    data: dict[str, Any] = {"contestants": found}
    if found.keys() == TITLES.keys():
        for kind, text in (("cpu_s", "CPU"), ("wall_s", "wall")):
            each = [a[kind] / b[kind] for a, b in zip(found["fzero"], found["trl"], strict=True)]
            data[kind], note = within_rounds(f"fzero / TRL, {text} seconds per step", each)
            notes.append(note)
        data["losses differ by"], _ = largest_difference([x["losses"] for each in found.values() for x in each])
        notes.append(f"losses of the steps differ by {data['losses differ by']:.1e} at most (relative)")
    columns = ("", "CPU s per step", "wall s per step", "peak MiB", "last loss")
    return Table("Preference optimization, compared with TRL", columns, rows, notes, data)


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    return {"train": lambda: {"fzero": _fzero, "trl": _trl}[args.contestant](args)}


def _pairs(args: argparse.Namespace) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts, chosen and rejected answers, as tokens. Every batch is all of them; token 0 ends an answer."""
    draws = random.Random(0)
    half = args.seq // 2
    tokens = lambda n: [draws.randrange(2, VOCAB) for _ in range(n)]  # noqa: E731
    return [(tokens(half), [*tokens(half - 1), 0], [*tokens(half - 1), 0]) for _ in range(args.batch)]


def _write_pairs(args: argparse.Namespace, folder: str) -> None:
    """Writes the pairs as text, for TRL."""
    text = lambda tokens: "".join(f" t{i}" if i else " </s>" for i in tokens)  # noqa: E731
    columns = ("prompt", "chosen", "rejected")
    lines = [json.dumps(dict(zip(columns, map(text, pair), strict=True))) for pair in _pairs(args)]
    Path(folder, PAIRS).write_text("\n".join(lines) + "\n")


def _model(args: argparse.Namespace) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3 // 32 * 32,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def _measured(args: argparse.Namespace, times: list[tuple[float, float]], losses: list[float], before: float) -> Any:
    """`times` are those of the ends of steps."""
    each = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times[args.warmup - 1 :])]
    return {
        "wall_s": statistics.median(x for x, _ in each),
        "cpu_s": statistics.mean(x for _, x in each),
        "growth_mib": peak_mib() - before,
        "losses": losses,
    }


def _fzero(args: argparse.Namespace) -> Any:
    import torch
    import torch.nn.functional as F

    import fzero as fz

    def log_prob(out: Any, batch: Any) -> torch.Tensor:
        logits = out.logits[:, :-1].transpose(1, 2)
        return -F.cross_entropy(logits, batch["targets"][:, 1:], reduction="none").sum(-1)

    def loss(out: Any, batch: Any) -> torch.Tensor:
        chosen, rejected = (log_prob(out, batch) - batch["reference"]).view(-1, 2).unbind(-1)
        return -F.logsigmoid(BETA * (chosen - rejected)).mean()

    mesh = fz.make_mesh(device="cpu")
    pairs = _pairs(args)[mesh.rank :: mesh.size]
    tokens = torch.tensor([prompt + answer for prompt, *answers in pairs for answer in answers])
    batch = {"input_ids": tokens, "targets": tokens.clone()}
    batch["targets"][:, : args.seq // 2] = -100
    before = rss_mib()
    model = fz.functionalize(_model(args))
    adamw = fz.optim.chain(fz.optim.clip_by_global_norm(MAX_NORM), fz.optim.adamw(LR, weight_decay=0.0))
    zero = fz.shard_params()
    train = fz.compile(zero(model.train_step(adamw, loss)), mesh, backend=args.backend)
    evaluate = fz.compile(zero(model.eval_step(log_prob)), mesh, backend=args.backend)
    state = train.init(model.params)
    batch["reference"] = evaluate(state.params, batch)
    times: list[tuple[float, float]] = []
    losses = []
    for _ in range(args.warmup + args.steps):
        state, metrics = train(state, batch)
        losses.append(float(metrics["loss"]))
        times.append((time.perf_counter(), cpu_seconds()))
        if len(times) == 1:
            reset_peak()
    return _measured(args, times, losses, before)


def _trl(args: argparse.Namespace) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]
    import tokenizers
    import transformers
    import trl  # pyright: ignore[reportMissingImports]

    words = {"</s>": 0, "<pad>": 1} | {f"t{i}": i for i in range(2, VOCAB)}
    reader: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    reader.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="</s>", pad_token="<pad>")
    # from a file, because ranks look for a shared cache beside it
    data: Any = datasets.load_dataset("json", data_files=f"{args.folder}/{PAIRS}", cache_dir=args.folder)["train"]
    times: list[tuple[float, float]] = []
    losses: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
            times.append((time.perf_counter(), cpu_seconds()))
            if len(times) == 1:
                reset_peak()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **settings: Any) -> None:
            losses.extend([float(logs["loss"])] if "loss" in logs else [])

    before = rss_mib()
    config = trl.DPOConfig(
        output_dir=args.folder,
        max_steps=args.warmup + args.steps,
        per_device_train_batch_size=args.batch // args.processes,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_NORM,
        beta=BETA,
        precompute_ref_log_probs=True,
        gradient_checkpointing=False,
        bf16=False,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = trl.DPOTrainer(_model(args), args=config, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(Clock())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return _measured(args, times, losses, before)
