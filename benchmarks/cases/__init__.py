"""Shared parts of the cases of measure.py: a row of its table, the processes of a case, a step in one of them."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import MODEL, Group, Table
from training import FzeroStep, clipped_adamw, shard

__all__ = ["Table"]

MEASURE = str(Path(__file__).resolve().parent.parent / "measure.py")
ZERO = ("data_parallel", "shard_opt_state", "shard_grads", "shard_params")
"""The transform of each ZeRO stage."""


@dataclass(frozen=True)
class Case:
    """A row of the table of measure.py.

    Attributes:
        about: One line.
        minutes: On two quiet cores.
        run: Measures, from the flags to a `Table`.
        worker: From the flags to the commands of a process that `processes` starts.
        flags: Names and defaults. A type stands for a flag without a default, a list for one of several values.
        small: Values of the flags with which the case runs in seconds.
        how: How the numbers came about.
    """

    about: str
    minutes: float
    run: Callable[[argparse.Namespace], Table]
    worker: Callable[[argparse.Namespace], Mapping[str, Callable[..., Any]]] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    how: str = "Measured"


def model(layers: int, width: int, heads: int, seq: int, batch: int) -> dict[str, int]:
    """Flags for the sizes of the model of model.py. The batch is the global one."""
    return {"layers": layers, "width": width, "heads": heads, "seq": seq, "batch": batch}


TINY = model(2, 32, 2, 16, 4)


# --- in the process that measures ---


def processes(args: argparse.Namespace, size: int, *, env: Mapping[str, Any] | None = None, **more: Any) -> Group:
    """Processes of the case with its flags, of which `env` replaces some. The rest goes to `Group`."""
    return Group(MEASURE, size, [args.case, json.dumps({**vars(args), **(env or {})}, default=str)], **more)


def sizes(args: argparse.Namespace, batch: bool = True) -> str:
    text = f"{args.layers} layers, width {args.width}, sequence {args.seq}"
    return f"{text}, global batch {args.batch}" if batch else text


def number(count: int, noun: str = "process", plural: str = "es") -> str:
    return f"{count} {noun}{plural * (count > 1)}"


# --- in a process of a case ---


class Live:
    """The model, the mesh and the batches of a process, and the steps that it compiles."""

    def __init__(self, args: argparse.Namespace, num_batches: int = 1, mesh: Any = None):
        import torch
        from model import Config, make_batches, make_init

        import fzero as fz

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.args, self.mesh = args, mesh or fz.make_mesh(device="cpu")
        self.config = Config(*(getattr(args, k) for k in MODEL))
        self.init = make_init(self.config)
        self.batches = [self.part(batch) for batch in make_batches(self.config, num_batches)]

    def part(self, batch: Any) -> Any:
        """This rank's part of a global batch: all of it on a mesh that does not shard the batch."""
        return shard(batch, self.mesh.rank, self.mesh.size) if "data" in self.mesh.axes else batch

    def step(self, *transforms: Any, optimizer: Any = None) -> Any:
        """A training step under transforms, by default with AdamW after clipping."""
        from model import make_loss

        import fzero as fz

        return fz.compose(*transforms)(fz.train_step(make_loss(self.config), optimizer or clipped_adamw()))

    def meta(self) -> Any:
        """The parameters on the meta device."""
        import torch

        import fzero as fz

        return fz.tree.map(lambda x: torch.empty_like(x, device="meta"), self.init(fz.random.key(0)))

    def start(self, *transforms: Any, optimizer: Any = None, **options: Any) -> Running:
        return Running(self, self.step(*transforms, optimizer=optimizer), options)


class Running(FzeroStep):
    """A compiled step and its state. Without a batch it uses the first one."""

    def __init__(self, live: Live, step: Any, options: dict[str, Any]):
        import fzero as fz

        super().__init__(step, live.mesh, live.init, fz.random.key(0), backend=live.args.backend, **options)
        self.live = live

    def one(self, batch: Any = None) -> float:
        """Takes a step and returns its loss."""
        return float(self(batch or self.live.batches[0]))

    def timed(self, count: int = 1) -> list[float]:
        """Seconds of each of some steps, without the reading of the loss."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            loss = self(self.live.batches[0])
            seconds.append(time.perf_counter() - begin)
            float(loss)
        return seconds


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)
