"""The models of the micro-benchmarks, and the state that several of them start from."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim

os.environ["FZERO_PROGRESS"] = "off"
DEEP = {"layers": 64, "width": 64}
SAVED = {"layers": 4, "width": 256}


def environment(**more: str) -> dict[str, str]:
    """The environment of a child process, which finds the modules that this one does: asv removes PYTHONPATH."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, x.shape[-1:], p["norm"])
    return x + F.gelu(h @ p["up"], approximate="tanh") @ p["down"]


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    for p in params:
        batch = layer(p, batch)
    return batch.square().mean()


def params_of(layers: int, width: int, device: str = "cpu") -> Any:
    def of_layer() -> dict[str, torch.Tensor]:
        up, down = torch.full((width, 4 * width), 1e-2), torch.full((4 * width, width), 1e-2)
        return {"norm": torch.ones(width), "up": up, "down": down}

    with torch.device(device):
        return [of_layer() for _ in range(layers)]


def train_step() -> Any:
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    return fz.shard_params(fz.train_step(loss_fn, optimizer))


class Started:
    """A compiled step of the eager backend after its first call, and its state."""

    def __init__(self, layers: int, width: int):
        torch.set_num_threads(1)
        self.train = fz.compile(train_step(), fz.make_mesh(device="cpu"), backend="eager")
        self.state = self.train.init(params_of(layers, width))
        self.batch = torch.ones(2, 4, width)
        self.step()

    def step(self) -> None:
        self.state, metrics = self.train(self.state, self.batch)
        float(metrics["loss"])
