"""Ways to offload, and runs to compare bit for bit: offload changes where things lie and when they move, never what is
computed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import torch
from models import MODELS, OPTIMIZERS

import fzero as fz

Transforms = Sequence[Any]
BOTH = ("opt_state", "params")


def open_files(folder: Path) -> list[str]:
    """The files in a folder that this process has open, of which those of `offload` have no names."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [x for x in found if Path(x).parent == folder]


def matrices(path: str, leaf: torch.Tensor) -> bool:
    return leaf.dim() > 1


OFFLOADS: dict[str, Callable[[str | Path], Transforms]] = {
    "cpu opt_state": lambda d: (fz.offload("cpu", "opt_state"),),
    "cpu params": lambda d: (fz.offload("cpu", "params"),),
    "cpu all": lambda d: (fz.offload("cpu", (*BOTH, "activations")),),
    "cpu half": lambda d: (fz.offload("cpu", (*BOTH, "activations"), fraction=0.5),),
    "cpu where": lambda d: (fz.offload("cpu", BOTH, where=matrices),),
    "cpu on device": lambda d: (fz.offload("cpu", BOTH, update_on="device"),),
    "nvme opt_state": lambda d: (fz.offload("nvme", "opt_state", path=d),),
    "nvme params": lambda d: (fz.offload("nvme", "params", path=d),),
    "nvme both": lambda d: (fz.offload("nvme", BOTH, path=[d, d]),),
    "nvme half": lambda d: (fz.offload("nvme", BOTH, path=d, fraction=0.5),),
    "nvme where": lambda d: (fz.offload("nvme", BOTH, path=d, where=matrices),),
    "nvme on device": lambda d: (fz.offload("nvme", BOTH, path=d, update_on="device"),),
    "mix": lambda d: (
        fz.offload("cpu", ("params", "activations")),
        fz.offload("nvme", "opt_state", path=d, update_on="host"),
    ),
    "other mix": lambda d: (fz.offload("nvme", "params", path=d), fz.offload("cpu", "opt_state", fraction=0.7)),
}

EXTRAS: dict[str, Any] = {
    "none": (),
    "bf16": (fz.mixed_precision("bf16"),),
    "accumulate": (fz.accumulate(2),),
    "remat full": (fz.remat("full"),),
    "bf16, remat full": (fz.mixed_precision("bf16"), fz.remat("full")),
    "bf16, accumulate": (fz.mixed_precision("bf16"), fz.accumulate(2)),
    "shard": (fz.shard_params(), fz.remat("none")),
}


def trained(
    mesh: fz.Mesh,
    transforms: Transforms,
    model: str = "gpt",
    optimizer: str = "adamw",
    num_steps: int = 3,
    **options: Any,
) -> Any:
    """Losses, norms and the gathered state of a few steps on this rank; the compiled step and the state."""
    step = fz.compose(*transforms)(fz.train_step(MODELS[model].loss, OPTIMIZERS[optimizer]()))
    train = fz.compile(step, mesh, **{"backend": "eager", **options})
    state, metrics = train.init(MODELS[model].init, fz.random.key(1)), []
    for batch in models.batches(num_steps):
        state, found = train(state, models.part(batch, mesh))
        metrics.append((found["loss"], found["grad_norm"]))
    return (metrics, train.gather(state)), train, state


def same(one: Any, other: Any) -> bool:
    pairs = zip(fz.tree.leaves(one), fz.tree.leaves(other), strict=True)
    return fz.tree.structure(one) == fz.tree.structure(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )
