"""Tiny steps for tests of what is rejected, and what every rejection looks like: an error of this package, that
says where it is and ends with a fix.

The models, each with its parameters and a batch:

    loss_fn     PARAMS, BATCH       a linear layer
    squares     VECTOR, ROWS        the mean square of a product with a vector, or with a square matrix (EYE, ONES)
    scaled      WEIGHTS, INPUTS     a product with a matrix, scaled by a vector
    Net()       FEATURES, LABELS    a module; its losses are `of_labels` and, if it returns its own, `own_loss`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError

MESH, ONE = fz.AbstractMesh(data=2), fz.AbstractMesh(data=1)
PARAMS = {"b": torch.zeros(3), "w": torch.arange(12.0).reshape(4, 3) / 12}
BATCH = torch.arange(24.0).reshape(6, 4) / 24


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["w"] + params["b"]) ** 2).mean()


VECTOR = {"w": torch.ones(4)}
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
EYE, META = {"w": torch.eye(4)}, {"w": torch.empty(4, 4, device="meta")}
ONES = torch.ones(2, 4)


def squares(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).square().mean()


def predict(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] - y).square().mean()


WEIGHTS = {"v": torch.linspace(-1, 1, 16).reshape(4, 4), "w": torch.linspace(0.5, 1.5, 4)}
INPUTS = torch.linspace(-1, 2, 32).reshape(8, 4)


def scaled(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["v"]) * p["w"]).square().mean()


FEATURES, LABELS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def of_labels(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(out, batch[1])


def own_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out


def make(loss: Callable[..., Any] = loss_fn, optimizer: Any = None, **kwargs: Any) -> fz.Step:
    return fz.train_step(loss, optimizer or optim.sgd(0.1), **kwargs)


def lower(step: Any, params: Any = PARAMS, batch: Any = BATCH, mesh: Any = MESH) -> fz.Lowered:
    return fz.lower(fz.shard_params(step), mesh, params, batch)


def compiled(step: Any) -> fz.CompiledStep:
    return fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")


def compiled_loss(loss: Callable[..., Any], transform: Callable[..., Any] = lambda step: step) -> fz.CompiledStep:
    return fz.compile(transform(fz.train_step(loss, optim.sgd(0.1))), fz.make_mesh(), backend="eager")


def train_and_evaluate() -> tuple[fz.CompiledStep, fz.State, fz.CompiledEval]:
    """A compiled step of `squares`, its first state, and a compiled evaluation of `predict`."""
    mesh = fz.make_mesh()
    train = fz.compile(fz.train_step(squares, optim.adam(0.1)), mesh, backend="eager")
    return train, train.init(EYE), fz.compile(fz.eval_step(predict), mesh, backend="eager")


STEP, EVALUATE = make(), fz.eval_step(loss_fn)


def blocked(fn: Callable[..., Any], of: Callable[..., Any] = torch.mean) -> fz.Step:
    """A step whose loss is `of` the result of a block of `fn`."""
    run = fz.block(fn)
    return make(lambda p, x: of(run(p, x)))


def raises(kind: type[FzeroError], run: Callable[[], Any], *words: str) -> str:
    """The text of the one error that `run` raises: of `kind`, in the house's layout, naming `words`, a fix at its
    end."""
    with pytest.raises(FzeroError) as caught:
        run()
    text = str(caught.value)
    assert isinstance(caught.value, kind), f"{type(caught.value).__name__}: {text}"
    assert text.startswith("fzero."), text
    assert text.splitlines()[-1].startswith("Fix: "), text
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"
    return text


def everywhere(
    kind: type[FzeroError], step: fz.Step, *words: str, params: Any = PARAMS, batch: Any = BATCH, plain: bool = True
) -> None:
    """Lowered for a mesh one does not have, compiled for one rank, and (if it is not the trace's own rule) eagerly: the
    same error."""

    def train() -> None:
        run = compiled(step)
        run(run.init(params), batch)

    raises(kind, lambda: lower(step, params, batch), *words)
    raises(kind, train, *words)
    if plain:
        raises(kind, lambda: step(step.init(params), batch), *words)


def optimizer(update: Any, init: Any = lambda params: {"mu": fz.tree.map(torch.zeros_like, params)}) -> Any:
    return optim.GradientTransformation(init, update)
