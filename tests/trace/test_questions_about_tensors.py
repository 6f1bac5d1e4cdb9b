"""What a function may ask a tensor that a program has no answer to: its type, its text, its address."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from rejections import INPUTS, WEIGHTS, compiled_loss, raises, scaled

import fzero as fz
from fzero.errors import TraceError


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
        return (scaled(p, x) * ask(p, x)).mean()

    for fn in (loss, lambda p, x: fz.block(loss)(p, x) * 1.0):
        says = [text.replace("batch:", ":") for text in says] if fn is not loss else says
        raises(
            TraceError,
            lambda fn=fn: compiled_loss(fn)(compiled_loss(fn).init(WEIGHTS), INPUTS),
            "test_questions_about_tensors.py:",
            *says,
        )


def test_types_that_are_not_those_of_tensors_and_texts_that_are_not_made_are_let_be():
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("quiet").debug("%s", x)
        again = type(p)(p)
        scale = 2.0 if type(p) is dict and type(scale_of) is not float and isinstance(x, torch.Tensor) else 3.0
        return scaled(again, x) * scale

    scale_of = 1
    train = compiled_loss(loss)
    assert train(train.init(WEIGHTS), INPUTS)[1]["loss"] == loss(WEIGHTS, INPUTS)


def test_an_error_of_the_loss_may_show_tensors():
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 8:
            raise ValueError(f"too long: {x}")
        return scaled(p, x)

    train = compiled_loss(loss)
    with pytest.raises(ValueError, match="too long: "):
        train(train.init(WEIGHTS), INPUTS)
