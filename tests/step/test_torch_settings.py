"""Settings of PyTorch around a step: modes of autograd, the default dtype and device, deterministic algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rejections import ONES, ROWS, VECTOR, compiled_loss, squares, train_and_evaluate

import fzero as fz
from fzero import optim


@pytest.fixture(scope="module")
def steps() -> Any:
    return train_and_evaluate()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[], Any]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "cpu:0": lambda: torch.device("cpu:0"),
    "deterministic": deterministic,
}


def _trained(backend: str) -> list[torch.Tensor]:
    """A step of a module that draws and of a function that is drawn, their losses and states."""
    torch.manual_seed(0)
    linear, dropout = torch.nn.Linear(4, 4, dtype=torch.float32, device="cpu"), torch.nn.Dropout(0.5)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(4, dtype=torch.float32))
        linear.bias.zero_()
    model = fz.functionalize(torch.nn.Sequential(linear, dropout))
    steps = {
        model.train_step(optim.adamw(0.1), lambda out, batch: out.square().mean()): model.params,
        fz.train_step(squares, optim.adamw(0.1)): lambda key: {"w": fz.random.normal(key, (4, 4))},
    }
    found = list[torch.Tensor]()
    for step, params in steps.items():
        train = fz.compile(fz.shard_params(step), fz.make_mesh(), backend=backend)
        state, metrics = train(train.init(params), ONES)
        found += [metrics["loss"], *fz.tree.leaves((state.params, state.opt_state))]
    return [x.clone() for x in found]


@pytest.mark.full(keep=["inference", "no gradients", "bfloat16"])
@pytest.mark.parametrize("around", AROUND)
def test_a_step_trains_whatever_is_around_it(around: str) -> None:
    plain = _trained("eager")
    with AROUND[around]():
        found = _trained("eager")
    assert [x.dtype for x in found] == [x.dtype for x in plain] and all(map(torch.equal, found, plain))


def test_a_default_device_that_the_mesh_has_not(steps: Any, tmp_path: Path) -> None:
    """Before anything is made; what `fz.lower` plans needs no values, and checkpoints make no tensors there."""
    train, state, run = steps
    step = fz.train_step(squares, optim.adam(0.1))
    for device in ("meta", "cuda"):
        said = rf"the default device is '{device}', and the mesh has 'cpu'(?s:.*)Fix: torch.set_default_device\(None\)"
        with torch.device(device):
            for call in (
                lambda: train.init({"w": state.params["w"]}),
                lambda: train(state, ONES),
                lambda: run(state.params, ONES, ONES),
                lambda: fz.testing.check_equivalent(step, {"w": ONES}, ONES, fz.AbstractMesh(data=1)),
            ):
                with pytest.raises(fz.errors.FzeroValueError, match=said):
                    call()
    with torch.device("meta"):
        assert fz.lower(step, fz.AbstractMesh(data=1), {"w": torch.empty(4, 4)}, torch.empty(2, 4)).program.instructions
        fz.checkpoint.save(str(tmp_path), state)
        restored = train.restore(str(tmp_path))
    assert torch.equal(train.gather(restored).params["w"], train.gather(state).params["w"])


def test_a_step_under_no_grad_is_a_step():
    train = compiled_loss(squares)
    want, _ = train(train.init(VECTOR), ROWS)
    for around in (torch.no_grad(), torch.inference_mode()):
        with around:
            train = compiled_loss(squares)
            state, _ = train(train.init(VECTOR), ROWS)
        state, _ = train(state, ROWS)
        assert int(state.step) == 2 and int(want.step) == 1
