"""Compiles a module with a DeepSpeed configuration, in place of `deepspeed.initialize`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fzero.deepspeed.config import Config, load_config
from fzero.deepspeed.optimizer import Given
from fzero.errors import FzeroTypeError
from fzero.mesh import Mesh, make_mesh
from fzero.modules.functionalize import functionalize
from fzero.runtime.compile import compile
from fzero.runtime.compiled_step import CompiledStep


def initialize(
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    model: Any = None,
    loss: Callable[..., Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    optimizer: Given = None,
    mesh: Mesh | None = None,
    report: bool = True,
    **settings: Any,
) -> CompiledStep:
    """Returns a compiled step for a module and a DeepSpeed configuration: `fz.compile(config(model.train_step(...)),
    mesh)`.

    A step is one call, `state, metrics = train(state, batch)`, where DeepSpeed has `engine(batch)`,
    `engine.backward` and `engine.step` for each micro-batch. So a batch has the samples of all micro-batches of a rank.

    Args:
        config: what `load_config` takes, or what it returned.
        model: a module, or `fz.functionalize(module)`, whose `params` are passed to `train.init`. If None, `loss` is
            a loss function of `(params, batch)`.
        loss: `(outputs, batch) -> loss` for a module; None for the module's own loss, as Hugging Face models have
            it.
        auto: as for `load_config`.
        optimizer: as for `load_config`.
        mesh: its ranks divide the batch. By default, all processes that torchrun started, `make_mesh()`.
        report: whether the first rank prints the table of every key to stderr.
        settings: of `fz.compile`: `memory_budget`, `backend`, `warmup`, ...

    Raises:
        FzeroValueError: as for `load_config` and `fz.compile`.
        FzeroTypeError: the model is neither of these, or neither a model nor a loss is given.

    Example:
        >>> import torch, fzero as fz
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> given = {"train_batch_size": 6, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
        >>> mean = lambda out, batch: out.square().mean()
        >>> train = initialize(model=net, config=given, loss=mean, report=False, backend="eager")
        >>> state = train.init(fz.functionalize(net).params)
        >>> state, metrics = train(state, (torch.ones(6, 4),))
        >>> int(state.step)
        1
    """
    where = "deepspeed.initialize"
    if model is None and not callable(loss):
        fix = "give model=module, or a loss function of parameters and batch"
        raise FzeroTypeError(where, "neither a model nor a loss is given", fix=fix)
    if not (model is None or isinstance(model, nn.Module) or hasattr(model, "train_step")):
        what = f"a model is a module, or fz.functionalize(module), not {type(model).__name__}"
        raise FzeroTypeError(where, what, fix="without a module: initialize(loss=loss_fn, config=...)")
    mesh = make_mesh() if mesh is None else mesh
    found = config if isinstance(config, Config) else None
    if found is None:
        found = load_config(config, auto=auto, world=mesh.size, optimizer=optimizer)  # pyright: ignore[reportArgumentType]
    if model is None:
        step = found.train_step(loss)  # pyright: ignore[reportArgumentType]  # checked above: callable without a model
    else:
        model = functionalize(model) if isinstance(model, nn.Module) else model
        step = found(model.train_step(found.optimizer, loss))
    if report and mesh.rank == 0:
        print(found.report(), file=sys.stderr, flush=True)
    return compile(step, mesh, **settings)
