"""A tiny step for tests of what is rejected, and what every rejection looks like: an error of this package, that
says where it is and ends with a fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError

MESH = fz.AbstractMesh(data=2)
PARAMS = {"b": torch.zeros(3), "w": torch.arange(12.0).reshape(4, 3) / 12}
BATCH = torch.arange(24.0).reshape(6, 4) / 24


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["w"] + params["b"]) ** 2).mean()


def make(loss: Callable[..., Any] = loss_fn, optimizer: Any = None, **kwargs: Any) -> fz.Step:
    return fz.train_step(loss, optimizer or optim.sgd(0.1), **kwargs)


def lower(step: Any, params: Any = PARAMS, batch: Any = BATCH, mesh: Any = MESH) -> fz.Lowered:
    return fz.lower(fz.shard_params(step), mesh, params, batch)


def compiled(step: Any) -> fz.CompiledStep:
    return fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")


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
