"""Losses that draw, count or read a clock in Python: a program would do it once."""

from __future__ import annotations

import datetime
import io
import itertools
import os
import random
import secrets
import threading
import time
import uuid
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from rejections import INPUTS, ROWS, VECTOR, WEIGHTS, compiled_loss, raises, scaled, squares

from fzero.errors import FzeroValueError

OWN, NUMPY, COUNT, VALUES, MADE = (
    random.Random(0),
    np.random.default_rng(0),
    itertools.count(),
    iter([1.0] * 100),
    (float(i) for i in range(100)),
)


WRITTEN = io.StringIO()
SEEN, LEFT, ARRAY, FLAG = [], [*range(100)], np.zeros(1), {"first": True}


def first_time():
    first, FLAG["first"] = FLAG["first"], False
    return 5.0 if first else 1.0


DRAWS = {
    "random (Python's generator): drawn from": lambda: random.random(),
    "numpy.random: drawn from": lambda: np.random.rand(),
    "OWN: drawn from": lambda: OWN.random(),
    "NUMPY: drawn from": lambda: NUMPY.random(),
    "COUNT: drawn from": lambda: next(COUNT),
    "VALUES: drawn from": lambda: next(VALUES),
    "MADE: drawn from": lambda: next(MADE),
    "WRITTEN: a file that is written to or read from": lambda: print("once", file=WRITTEN) or 1.0,
    "SEEN: a list of 0 before, a list of 1 now": lambda: SEEN.append(1) or len(SEEN),
    "LEFT: ": lambda: LEFT.pop(),
    "ARRAY: ": lambda: float(ARRAY.__iadd__(1)[0]),
    "FLAG['first']: ": first_time,
}


@pytest.mark.parametrize("says", DRAWS)
def test_a_loss_that_draws_or_counts_in_python(says):
    draw = DRAWS[says]
    train = compiled_loss(lambda p, x: squares(p, x) * draw())
    raises(
        FzeroValueError,
        lambda: train(train.init(VECTOR), ROWS),
        "counts, draws or uses something up each time it is called",
        says,
        "fz.random",
    )


def test_draws_of_another_thread_are_not_put_on_the_loss_alone():
    stop = threading.Event()

    def augments():
        while not stop.is_set():
            random.random()

    thread = threading.Thread(target=augments, name="loader", daemon=True)
    thread.start()
    train = compiled_loss(squares)
    try:
        says = (
            "random (Python's generator): drawn from",
            "by a thread that runs at the same time",
            "loader",
            "random.Random(seed)",
        )
        raises(FzeroValueError, lambda: train(train.init(VECTOR), ROWS), *says)
    finally:
        stop.set()
        thread.join()
    assert train(train.init(VECTOR), ROWS)


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
    train = compiled_loss(lambda p, x: scaled(p, x) * clock())
    said = "time" if name == "perf_counter" else name
    raises(
        FzeroValueError,
        lambda: train(train.init(WEIGHTS), INPUTS),
        "draws or uses something up each time it is called",
        f"{said}: read by it",
    )


def test_a_loss_that_only_writes_the_time_down_is_let_be():
    took = []

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        value = scaled(p, x)
        took.append(time.perf_counter() - start)
        return value

    train = compiled_loss(loss)
    assert train(train.init(WEIGHTS), INPUTS)[1]["loss"] == scaled(WEIGHTS, INPUTS) and took
