"""fzero's Trainer compared with transformers' own Trainer, whose model is sharded by its `DistributedConfig`."""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import largest_difference, peak_mib, reset_peak, rss_mib, within_rounds

from cases import Table, cpu_seconds, processes

VOCAB = 4096


class Contestant(NamedTuple):
    """A Trainer of a library and its settings.

    Attributes:
        ours: whether it is fzero's.
        arguments: of TrainingArguments.
        offload: the optimizer's state (fzero), or parameters, gradients and optimizer (transformers), in host memory.
        warmup: of fzero's: whether steps run eagerly while the program is compiled.
        rival: the contestant that it is compared with.
    """

    title: str
    ours: bool = False
    arguments: dict[str, Any] | None = None
    offload: bool = False
    warmup: str = "wait"
    rival: str = ""


CONTESTANTS = {
    "fzero": Contestant("fzero.hf.Trainer", True),
    "fzero_warmup": Contestant("fzero.hf.Trainer, warmup='eager'", True, warmup="eager"),
    "theirs": Contestant("transformers' Trainer, DistributedConfig", rival="fzero"),
    "theirs_compile": Contestant("the same, torch_compile", arguments={"torch_compile": True}, rival="fzero"),
    "fzero_bf16": Contestant("fzero.hf.Trainer, bf16", True, {"bf16": True}),
    "theirs_bf16": Contestant(
        "transformers' Trainer, DistributedConfig, bf16", arguments={"bf16": True}, rival="fzero_bf16"
    ),
    "fzero_offload": Contestant("fzero.hf.Trainer, offload", True, offload=True),
    "theirs_offload": Contestant(
        "transformers' Trainer, DistributedConfig, fsdp_cpu_offload", offload=True, rival="fzero_offload"
    ),
}


def trainers(args: argparse.Namespace) -> Table:
    """Trains the same Llama on the same rows. Each contestant is alone on the machine, once in every round."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = _write_model(args, folder)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
        for turn in range(args.rounds):
            for name in random.Random(turn).sample(args.only, len(args.only)):
                env = {"contestant": name, "folder": folder}
                with processes(args, args.processes, env=env) as group:
                    answers = group.ask("train")
                kinds = ("cpu_s", "first_cpu_s", "first_s", "wall_s", "growth_mib")
                one = {kind: max(x[kind] for x in answers) for kind in kinds} | {"losses": answers[0]["losses"]}
                found[name].append(one)
                print(f"round {turn + 1}: {name}: {one}", file=sys.stderr, flush=True)
    forms = {"cpu_s": ".3f", "wall_s": ".3f", "growth_mib": ".0f", "first_cpu_s": ".1f", "first_s": ".1f"}
    rows = [
        (
            CONTESTANTS[name].title,
            *(format(statistics.median(x[kind] for x in each), form) for kind, form in forms.items()),
            f"{each[0]['losses'][-1]:.5f}",
        )
        for name, each in found.items()
    ]
    rounds = "one round" if args.rounds == 1 else f"medians of {args.rounds} rounds"
    notes = [
        f"Llama of {parameters / 1e6:.1f} M parameters ({args.layers} layers, width {args.width}, vocabulary {VOCAB}), "
        f"{args.batch} x {args.seq} tokens per rank and step, AdamW, clipping; {args.processes} processes with one "
        f"thread each; {args.steps} steps after {args.warmup}; {rounds}, a contestant alone at a time, from empty "
        "caches.",
        "fzero's ranks exchange data through shared memory, those of transformers over gloo. MiB: the peak of a rank "
        "in these steps above its memory before the model was loaded. First step: CPU and wall seconds from "
        "the call of train().",
    ]
    if any(CONTESTANTS[name].offload for name in args.only):
        notes.append(
            "offload: of the optimizer state by fzero, of all sharded tensors by transformers; on a CPU, both tiers "
            "are the same memory. transformers' memory is not pinned, which needs an accelerator."
        )
    ratios: dict[str, Any] = {}
    for name, each in found.items():
        if (mine := CONTESTANTS[name].rival) in found:
            title = f"{CONTESTANTS[mine].title} / {CONTESTANTS[name].title}, CPU seconds per step"
            ratios[name], note = within_rounds(
                title, [a["cpu_s"] / b["cpu_s"] for a, b in zip(found[mine], each, strict=True)]
            )
            notes.append(note)
    exact = [x["losses"] for n, each in found.items() if "bf16" not in n for x in each]
    if len(exact) > 1:
        ratios["losses differ by"], _ = largest_difference(exact)
        notes.append(
            f"losses of {len(exact[0])} steps in fp32 differ by {ratios['losses differ by']:.1e} at most (relative)"
        )
    columns = ("", "CPU s per step", "wall s per step", "peak MiB", "first step, CPU s", "first step, s", "last loss")
    title = "fzero's Trainer compared with transformers' Trainer and its DistributedConfig"
    return Table(title, columns, rows, notes, {"contestants": found, "ratios": ratios})


def _write_model(args: argparse.Namespace, folder: str) -> int:
    """Writes the model that all contestants read, and returns its number of parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3 // 32 * 32,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    return {"train": lambda: _train(args, CONTESTANTS[args.contestant])}


def _train(args: argparse.Namespace, contestant: Contestant) -> dict[str, Any]:
    import torch
    import transformers

    import fzero as fz

    generator = torch.Generator().manual_seed(0)
    count = args.processes * args.batch * (args.warmup + args.steps + 1)
    rows = torch.randint(VOCAB, (count, args.seq), generator=generator).tolist()
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(args.folder) / "out"),
        max_steps=args.warmup + args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **(contestant.arguments or {}),
    )
    before, reader = rss_mib(), transformers.AutoModelForCausalLM
    more: dict[str, Any] = {}
    if contestant.ours:
        model: Any = fz.hf.from_pretrained(reader, args.folder)
        base = fz.hf.Trainer
        more |= {"backend": args.backend, "warmup": contestant.warmup}
        if contestant.offload:
            more["transforms"] = [fz.shard_params(), fz.offload("cpu", "opt_state")]
    else:
        from transformers.distributed import DistributedConfig, fsdp

        # By default it pins host memory, which PyTorch cannot do without an accelerator.
        fsdp.CPUOffloadPolicy = functools.partial(fsdp.CPUOffloadPolicy, pin_memory=False)
        sharded = DistributedConfig(fsdp_size=args.processes, fsdp_cpu_offload=contestant.offload)
        model = reader.from_pretrained(args.folder, distributed_config=sharded)
        base = transformers.Trainer
    times: list[tuple[float, float]] = []
    losses: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
            times.append((time.perf_counter(), cpu_seconds()))
            if len(times) == 1:
                reset_peak()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **settings: Any) -> None:
            losses.extend([float(logs["loss"])] if "loss" in logs else [])

    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = base(model, arguments, train_dataset=data, callbacks=[Clock()], **more)
    trainer.remove_callback(transformers.PrinterCallback)
    wall, cpu = time.perf_counter(), cpu_seconds()
    trainer.train()
    measured = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times[args.warmup - 1 :])]
    return {
        "first_s": times[0][0] - wall,
        "first_cpu_s": times[0][1] - cpu,
        "wall_s": statistics.median(x for x, _ in measured),
        "cpu_s": statistics.mean(x for _, x in measured),
        "growth_mib": peak_mib() - before,
        "losses": losses,
    }
