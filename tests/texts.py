"""Programs of every kind, as a digest of each line; of a budget that is too small of the lines of the refusal."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import models
import torch
from models import MODELS, OPTIMIZERS, STAGES, batches, meta, meta_part

import fzero as fz
from fzero import optim
from fzero.errors import BudgetError
from fzero.runtime.program_agreement import describe

PARITY = {
    "bare": ("bare", "adamw", STAGES[2](), 2),
    "mixed_lamb": ("mixed", "lamb", STAGES[3](), 3),
    "mixed_clipped": ("mixed", "clipped", fz.compose(STAGES[1](), fz.mixed_precision("bf16", watch=True)), 2),
    "mixed_auto": ("mixed", "adamw", fz.compose(STAGES[3](), fz.mixed_precision("auto"), fz.remat(0.5)), 2),
    "gpt_rows": (
        "gpt",
        "lion",
        fz.compose(STAGES[3](), fz.mixed_precision("bf16", params="bf16"), fz.remat("min_cut")),
        4,
    ),
}


def stacked(p: Any, batch: Any) -> torch.Tensor:
    """Layers that are slices of one tensor, and settings from sets and dicts of text."""
    x = p["token"][batch["tokens"]]
    for i in range(3):
        x = fz.block(lambda q, x: torch.tanh(x @ q["w"] + q["b"]))({"w": p["w"][i], "b": p["b"].unbind()[i]}, x)
    scales = {"one", "two", "three", "four"}
    return (
        x.square().mean() * len(scales)
        + sum((v.square().mean() for v in p["w"].unbind()), torch.zeros(()))
        + (p["w"][0].T @ p["w"][1]).sum()
    )


def lowered(step: Any, ranks: int, init: Callable[..., Any]) -> Any:
    params, batch = meta(init(fz.random.key(0))), meta_part(batches(1)[0], ranks)
    return fz.lower(step, fz.AbstractMesh(data=ranks), params, batch).program


def within(budget: int) -> str:
    """What is chosen for a budget in bytes that one device is to keep, and what is said where none can."""
    step = fz.offload("auto")(fz.train_step(MODELS["bare"].loss, OPTIMIZERS["clipped"]()))
    params, batch = meta(MODELS["bare"].init(fz.random.key(0))), meta_part(batches(1)[0], 1)
    try:
        found = fz.lower(step, fz.AbstractMesh(data=1), params, batch, memory_budget=f"{budget}B", device="h100")
    except BudgetError as error:
        return str(error)
    return "\n".join((*map(str, found.plan.decisions), describe(found.program)))


def digests(seed: str, folder: str) -> dict[str, list[str]]:
    """The seed shuffles the order in which they are lowered; the folder is where leaves on disk would rest."""
    from test_printed_programs import VARIANTS

    on_disk = fz.offload("nvme", ("opt_state", "params"), path=[folder, f"{folder}/second"])
    with mock.patch.dict(VARIANTS, offload_nvme=on_disk):
        names = list(todo := jobs())
        random.Random(seed).shuffle(names)
        texts = {name: made if isinstance(made := todo[name](), str) else describe(made) for name in names}
    return {
        name: [hashlib.sha256(line.encode()).hexdigest()[:12] for line in text.splitlines()]
        for name, text in sorted(texts.items())
    }


def jobs() -> dict[str, Callable[[], Any]]:
    from test_printed_programs import VARIANTS, gpt_program

    made: dict[str, Callable[[], Any]] = {name: lambda name=name: gpt_program(name, layers=2) for name in VARIANTS}
    for name, (model, optimizer, transform, ranks) in PARITY.items():
        step = transform(fz.train_step(MODELS[model].loss, OPTIMIZERS[optimizer]()))
        made[name] = lambda step=step, ranks=ranks, model=model: lowered(step, ranks, MODELS[model].init)
    shapes = {"token": torch.zeros(models.VOCAB, 4), "w": torch.zeros(3, 4, 4), "b": torch.zeros(3, 4)}
    for name, transform in {"stacked_whole": fz.data_parallel(), "stacked": fz.shard_params()}.items():
        step = transform(fz.train_step(stacked, optim.sgd(0.1)))
        made[name] = lambda step=step: lowered(step, 2, lambda key: shapes)
    made |= {f"auto_{budget}": lambda budget=budget: within(budget) for budget in (100, 10_000, 20_000, 30_000)}
    return made
