"""What a function may ask that a program has no answer to: the type, the text, the address of a tensor, the clock; and
how a batch lies in memory."""

from __future__ import annotations

import copy
import datetime
import logging
import os
import pickle
import secrets
import time
import uuid
from time import perf_counter
from typing import Any

import pytest
import torch
from test_errors import raises

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError, TraceError

X = torch.linspace(-1, 2, 32).reshape(8, 4)
PARAMS = {"v": torch.linspace(-1, 1, 16).reshape(4, 4), "w": torch.linspace(0.5, 1.5, 4)}


def base(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["v"]) * p["w"]).square().mean()


def compiled(loss: Any, transform: Any = lambda step: step) -> Any:
    return fz.compile(transform(fz.train_step(loss, optim.sgd(0.1))), fz.make_mesh(), backend="eager")


def is_plain(x: Any) -> bool:
    return type(x) is torch.Tensor


ASKED = {
    "type": (
        lambda p, x: 2.0 if is_plain(x) else 3.0,
        "compares a type with that of tensors",
        "return type(x) is torch.Tensor",
        "isinstance",
    ),
    "class": (
        lambda p, x: 2.0 if x.__class__ == torch.Tensor else 3.0,
        "compares a type",
        "isinstance(x, torch.Tensor)",
    ),
    "one of": (lambda p, x: 2.0 if type(x) in (float, torch.Tensor) else 3.0, "compares a type"),
    "name": (lambda p, x: 2.0 if type(x).__name__ == "Tensor" else 3.0, "compares a type"),
    "str": (lambda p, x: len(str(x)), "to print it", "batch: float32[8, 4]"),
    "repr": (lambda p, x: len(repr(p["w"])), "to print it", "['w']: float32[4]"),
    "text": (lambda p, x: len(f"{x.mean()}"), "to print it", "return it as an aux value"),
    "%s": (lambda p, x: len("%s" % [x]), "to print it"),
    "address": (lambda p, x: float((x * 2).data_ptr() > 0), "(data_ptr)"),
    "pickle": (lambda p, x: pickle.loads(pickle.dumps(x)), "to pickle it", "x.clone()"),
    "copy": (lambda p, x: copy.copy(x), "copy.copy"),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_only_a_tensor_in_memory_can_say_is_refused(what):
    ask, *says = ASKED[what]

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (base(p, x) * ask(p, x)).mean()

    for fn in (loss, lambda p, x: fz.block(loss)(p, x) * 1.0):
        says = [text.replace("batch:", ":") for text in says] if fn is not loss else says
        raises(
            TraceError,
            lambda fn=fn: compiled(fn)(compiled(fn).init(PARAMS), X),
            "test_questions_about_tensors.py:",
            *says,
        )


def test_types_that_are_not_those_of_tensors_and_texts_that_are_not_made_are_let_be():
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("quiet").debug("%s", x)
        again = type(p)(p)
        scale = 2.0 if type(p) is dict and type(scale_of) is not float and isinstance(x, torch.Tensor) else 3.0
        return base(again, x) * scale

    scale_of = 1
    train = compiled(loss)
    assert train(train.init(PARAMS), X)[1]["loss"] == loss(PARAMS, X)


def test_an_error_of_the_loss_may_show_tensors():
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 8:
            raise ValueError(f"too long: {x}")
        return base(p, x)

    train = compiled(loss)
    with pytest.raises(ValueError, match="too long: "):
        train(train.init(PARAMS), X)


CLOCKS = {
    "time": lambda: time.time() % 7,
    "perf_counter": lambda: perf_counter() % 7,
    "datetime": lambda: datetime.datetime.now().microsecond,
    "uuid": lambda: uuid.uuid4().int % 10007,
    "os.urandom": lambda: int.from_bytes(os.urandom(2)),
    "secrets": lambda: secrets.randbelow(10**6),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_loss_that_depends_on_the_clock_is_refused(name):
    clock = CLOCKS[name]
    train = compiled(lambda p, x: base(p, x) * clock())
    said = "time" if name == "perf_counter" else name
    raises(
        FzeroValueError,
        lambda: train(train.init(PARAMS), X),
        "draws or uses something up each time it is called",
        f"{said}: read by it",
    )


def test_a_loss_that_only_writes_the_time_down_is_let_be():
    took = []

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        value = base(p, x)
        took.append(time.perf_counter() - start)
        return value

    train = compiled(loss)
    assert train(train.init(PARAMS), X)[1]["loss"] == base(PARAMS, X) and took


STRIDES = {
    "stride": lambda x: x.stride(0),
    "is_contiguous": lambda x: 2.0 if x.is_contiguous() else 3.0,
    "of what is made of it": lambda x: 2.0 if (x + 1).is_contiguous() else 3.0,
}


@pytest.mark.parametrize("what", STRIDES)
def test_strides_of_a_batch_that_the_loss_asks_for(what):
    ask, turned = STRIDES[what], X.t().contiguous().t()
    train = compiled(lambda p, x: base(p, x) * ask(x))
    state, metrics = train(train.init(PARAMS), X)
    assert metrics["loss"] == base(PARAMS, X) * ask(X) != base(PARAMS, X) * ask(turned)
    raises(
        FzeroValueError,
        lambda: train(state, turned),
        "asks how its tensors are laid out",
        "  batch\n",
        "test_questions_about_tensors.py:",
        "x.contiguous()",
    )
    other = compiled(base)
    torch.testing.assert_close(other(other.init(PARAMS), turned)[1]["loss"], base(PARAMS, turned))


def test_leaves_of_a_batch_that_are_one_tensor_are_one_in_the_loss():
    def loss(p: Any, batch: Any) -> torch.Tensor:
        return base(p, batch["x"]) * base(p, batch["y"]) * (2.0 if batch["x"] is batch["y"] else 3.0)

    one, two = {"x": X, "y": X}, {"x": X, "y": X.clone()}
    step = fz.train_step(loss, optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for batch in (one, two, one):
        for run, first in ((step, step.init(PARAMS)), (train, train.init(PARAMS))):
            assert torch.allclose(run(first, batch)[1]["loss"], loss(PARAMS, batch))
    torn = compiled(loss, lambda step: fz.accumulate(step, 2, whole=lambda path, leaf: "y" in path))
    raises(
        FzeroValueError, lambda: torn(torn.init(PARAMS), one), "batch['x'] and batch['y'] are one tensor", "x.clone()"
    )
    assert torn(torn.init(PARAMS), two)


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

    params = {"w": PARAMS["w"]} | {f"v{i}": PARAMS["v"] + i for i in range(3)}
    found = []
    for of_state in (lambda x: x, lambda x: x.detach().t().t(), torch.clone):
        train = compiled(loss)
        state = train.init(params)
        for _ in range(2):
            state, _ = train(state, of_state(state.params["v2"]))
        found.append(state.params)
    assert all(torch.equal(x[name], found[-1][name]) for x in found for name in params)
