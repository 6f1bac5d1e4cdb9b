"""The batch of a step: which trees and tensors it may be, how many rows, how it lies in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rejections import (
    BATCH,
    INPUTS,
    ONE,
    PARAMS,
    ROWS,
    VECTOR,
    WEIGHTS,
    compiled,
    compiled_loss,
    everywhere,
    loss_fn,
    lower,
    make,
    raises,
    scaled,
)

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError


def test_batch_that_micro_batches_do_not_divide() -> None:
    step, batch = (
        fz.accumulate(make(lambda p, b: loss_fn(p, b["x"]) + b["y"].sum()), 4),
        {"x": BATCH, "y": torch.ones(6), "z": torch.ones(())},
    )
    text = raises(
        FzeroValueError, lambda: lower(step, batch=batch), "batch['x'] [6, 4]", "batch['y'] [6]", "4 micro-batches"
    )
    assert "batch['z']" not in text


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (1.0, ["batch: float"]),
        ({"x": BATCH, "n": 3, "s": "text"}, ["batch['n']: int", "batch['s']: str"]),
        ((BATCH, [BATCH.numpy()]), ["batch[1][0]: ndarray"]),
        (BATCH.to_sparse(), ["torch.sparse_coo"]),
    ],
    ids=["number", "mixed", "numpy", "sparse"],
)
def test_batches_that_are_not_dense_tensors(batch: Any, words: list[str]) -> None:
    everywhere(FzeroTypeError, make(lambda p, b: p["w"].sum()), *words, batch=batch)
    evaluate = fz.compile(fz.eval_step(lambda p, b: p["w"]), fz.make_mesh(data=1), backend="eager")
    raises(FzeroTypeError, lambda: evaluate(PARAMS, batch))


@pytest.mark.parametrize("batch", [None, (), {}, {"x": None}], ids=repr)
def test_a_loss_may_need_no_batch(batch: Any) -> None:
    step = make(lambda p, b: (p["w"] ** 2).sum())
    train = compiled(step)
    state, metrics = train(train.init(PARAMS), batch)
    expected, expected_metrics = step(step.init(PARAMS), batch)
    assert torch.equal(state.params["w"], expected.params["w"]) and torch.equal(
        metrics["loss"], expected_metrics["loss"]
    )


def test_an_empty_batch_is_no_number_and_says_so() -> None:
    train = compiled(make())
    _, metrics = train(train.init(PARAMS), torch.ones(0, 4))
    assert not metrics["finite"]


def columns(p, batch):
    return (batch["x"] @ p["w"])[:, batch["columns"]].mul(batch["scale"]).square().mean()


COLUMNS = {"x": torch.arange(32.0).view(8, 4), "columns": torch.tensor([0, 3]), "scale": torch.tensor(0.5)}
WIDE = {"w": torch.arange(16.0).view(4, 4) / 100}


@pytest.mark.parametrize("schedule", ["sequential", "layerwise"])
def test_a_batch_whose_leaves_have_different_numbers_of_rows(schedule):
    step, mesh = fz.train_step(columns, optim.sgd(0.1)), fz.make_mesh()
    lost = fz.accumulate(step, 2, schedule=schedule)
    raises(
        FzeroValueError,
        lambda: fz.lower(lost, ONE, WIDE, COLUMNS),
        "batch['columns'] [2]: the others have 8 samples",
        "replicated=lambda path, leaf:",
    )
    wrong = fz.accumulate(step, 3, schedule=schedule, replicated=lambda path, leaf: "columns" in path)
    raises(
        FzeroValueError,
        lambda: fz.lower(wrong, ONE, WIDE, COLUMNS),
        "batch['x'] [8, 4]: dim 0 of 8 is not a multiple of 3",
    )
    raises(
        FzeroTypeError, lambda: fz.accumulate(2, replicated=["columns"]), "a predicate is a function of (path, leaf)"
    )

    right = fz.accumulate(step, 2, schedule=schedule, replicated=lambda path, leaf: "columns" in path)
    train = fz.compile(right, mesh, backend="eager")
    (want, said), (got, heard) = step(step.init(WIDE), COLUMNS), train(train.init(WIDE), COLUMNS)
    assert torch.allclose(said["loss"], heard["loss"]) and torch.allclose(want.params["w"], got.params["w"])
    fz.testing.check_equivalent(right, WIDE, COLUMNS, mesh, backend="eager", steps=2)
    assert "replicated=<lambda>" in str(right.transforms[0])


def test_a_batch_that_is_a_conjugate_view():
    z = torch.complex(ROWS, ROWS + 1)

    def loss(p, z):
        return (z.imag @ p["w"]).square().mean()

    train = compiled_loss(loss)
    _, metrics = train(train.init(VECTOR), z.conj())
    torch.testing.assert_close(metrics["loss"], loss(VECTOR, z.conj()))


STRIDES = {
    "stride": lambda x: x.stride(0),
    "is_contiguous": lambda x: 2.0 if x.is_contiguous() else 3.0,
    "of what is made of it": lambda x: 2.0 if (x + 1).is_contiguous() else 3.0,
}


@pytest.mark.parametrize("what", STRIDES)
def test_strides_of_a_batch_that_the_loss_asks_for(what):
    ask, turned = STRIDES[what], INPUTS.t().contiguous().t()
    train = compiled_loss(lambda p, x: scaled(p, x) * ask(x))
    state, metrics = train(train.init(WEIGHTS), INPUTS)
    assert metrics["loss"] == scaled(WEIGHTS, INPUTS) * ask(INPUTS) != scaled(WEIGHTS, INPUTS) * ask(turned)
    raises(
        FzeroValueError,
        lambda: train(state, turned),
        "asks how its tensors are laid out",
        "  batch\n",
        "test_batches.py:",
        "x.contiguous()",
    )
    other = compiled_loss(scaled)
    torch.testing.assert_close(other(other.init(WEIGHTS), turned)[1]["loss"], scaled(WEIGHTS, turned))


def test_leaves_of_a_batch_that_are_one_tensor_are_one_in_the_loss():
    def loss(p: Any, batch: Any) -> torch.Tensor:
        return scaled(p, batch["x"]) * scaled(p, batch["y"]) * (2.0 if batch["x"] is batch["y"] else 3.0)

    one, two = {"x": INPUTS, "y": INPUTS}, {"x": INPUTS, "y": INPUTS.clone()}
    step = fz.train_step(loss, optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for batch in (one, two, one):
        for run, first in ((step, step.init(WEIGHTS)), (train, train.init(WEIGHTS))):
            assert torch.allclose(run(first, batch)[1]["loss"], loss(WEIGHTS, batch))
    torn = compiled_loss(loss, lambda step: fz.accumulate(step, 2, replicated=lambda path, leaf: "y" in path))
    raises(
        FzeroValueError, lambda: torn(torn.init(WEIGHTS), one), "batch['x'] and batch['y'] are one tensor", "x.clone()"
    )
    assert torn(torn.init(WEIGHTS), two)


def test_a_batch_in_the_memory_of_the_state_is_read_as_it_was():
    """The update of one block may run before the backward of another reads the batch."""

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p)

    def loss(p: Any, target: torch.Tensor) -> torch.Tensor:
        h = p["w"] * 1.0
        for i in range(3):
            h = layer(p[f"v{i}"], h * target)
        return (h * target).square().mean()

    params = {"w": WEIGHTS["w"]} | {f"v{i}": WEIGHTS["v"] + i for i in range(3)}
    found = []
    for of_state in (lambda x: x, lambda x: x.detach().t().t(), torch.clone):
        train = compiled_loss(loss)
        state = train.init(params)
        for _ in range(2):
            state, _ = train(state, of_state(state.params["v2"]))
        found.append(state.params)
    assert all(torch.equal(x[name], found[-1][name]) for x in found for name in params)


def test_a_nested_tensor_in_a_batch() -> None:
    train, x = compiled(make()), torch.ones(2, 4)
    nested = {"x": torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)}
    words = "a batch is a pytree of dense tensors\n  batch['x']: a nested tensor"
    raises(FzeroTypeError, lambda: train(train.init(PARAMS), nested), words)
