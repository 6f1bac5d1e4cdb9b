"""Losses that draw, count or read a clock in Python: a program would do it once."""

from __future__ import annotations

import copy
import datetime
import functools
import io
import itertools
import multiprocessing
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

import fzero as fz
from fzero.errors import FzeroValueError

OWN, NUMPY, COUNT, VALUES, MADE = (
    random.Random(0),
    np.random.default_rng(0),
    itertools.count(),
    iter(range(1, 100)),
    (float(i) for i in range(100)),
)


WRITTEN = io.StringIO()
SEEN, LEFT, ARRAY, FLAG = [], [*range(100)], np.zeros(1), {"first": True}


def first_time():
    first, FLAG["first"] = FLAG["first"], False
    return 5.0 if first else 1.0


DRAWS = {
    "random": lambda: random.random(),
    "numpy.random": lambda: np.random.rand(),
    "a generator of Python": lambda: OWN.random(),
    "a generator of NumPy": lambda: NUMPY.random(),
    "itertools.count": lambda: next(COUNT),
    "an iterator": lambda: next(VALUES),
    "a generator function": lambda: next(MADE),
    "a file": lambda: WRITTEN.write("1") + WRITTEN.tell(),
    "a list that grows": lambda: SEEN.append(1) or len(SEEN),
    "a list that shrinks": lambda: LEFT.pop(),
    "an array": lambda: float(ARRAY.__iadd__(1)[0]),
    "a flag": first_time,
    "time": lambda: time.time() % 7,
    "perf_counter": lambda: perf_counter() % 7,
    "datetime": lambda: datetime.datetime.now().microsecond,
    "uuid": lambda: uuid.uuid4().int % 10007,
    "os.urandom": lambda: int.from_bytes(os.urandom(2)),
    "secrets": lambda: secrets.randbelow(10**6),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_loss_that_draws_counts_or_reads_a_clock_in_python(name):
    draw = DRAWS[name]
    train = compiled_loss(lambda p, x: squares(p, x) * draw())
    state, _ = train(train.init(VECTOR), ROWS)
    for again in (lambda: train(state, ROWS), lambda: train.gather(state)):
        raises(
            FzeroValueError,
            again,
            "computes something different than when it was traced",
            "test_impure_functions.py",
            "before: glue",
            "now: glue",
            "fz.random",
        )


@pytest.mark.parametrize(("draw", "names"), [(random.random, "if draw() > 2:"), (np.random.rand, "numpy.random")])
def test_a_draw_that_decides_the_same_in_both_traces(draw, names):
    """It may decide differently in any other step: a block is skipped with some probability, for example."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        if draw() > 2:
            return p["w"].sum()
        return squares(p, x)

    train = compiled_loss(loss)
    state, _ = train(train.init(VECTOR), ROWS)
    for again in (lambda: train(state, ROWS), lambda: train.gather(state)):
        raises(FzeroValueError, again, "draws random numbers in Python", names, "fz.random")


@pytest.mark.parametrize(("draw", "names"), [(random.random, "torch.tensor(draw())"), (np.random.rand, "numpy.random")])
def test_a_draw_that_becomes_a_literal_is_named(draw, names):
    train = compiled_loss(lambda p, x: squares(p, x) + torch.tensor(draw()))
    state, _ = train(train.init(VECTOR), ROWS)
    again = lambda: train(state, ROWS)  # noqa: E731
    raises(FzeroValueError, again, "computes something different", "draws random numbers: ", names, "fz.random")


def test_a_trace_that_checks_leaves_the_global_generators_as_they_were():
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        random.random(), np.random.rand()
        torch.manual_seed(3)
        return squares(p, x)

    train = compiled_loss(loss)
    state, _ = train(train.init(VECTOR), ROWS)
    torch.manual_seed(1)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    with pytest.raises(FzeroValueError):
        train(state, ROWS)
    assert before[:2] == (random.getstate(), str(np.random.get_state())) and torch.equal(
        before[2], torch.get_rng_state()
    )


def test_steps_that_take_turns_with_a_state_are_all_checked(tmp_path):
    first, second = multiprocessing.Value("d", 1.0), multiprocessing.Value("d", 1.0)  # no other look sees these
    steps = [compiled_loss(lambda p, x, by=by: squares(p, x) * by.value) for by in (first, second)]
    state = steps[0].init(VECTOR)
    for wrong in (first, second):
        for _ in range(2):
            for step in steps:
                state, _ = step(state, ROWS)
        wrong.value = 2.0
        save = functools.partial(fz.checkpoint.save, tmp_path, state)
        for use in (save, functools.partial(fz.reshard, state, steps[0])):
            raises(FzeroValueError, use, "computes something different than when it was traced")
        wrong.value = 1.0
    fz.checkpoint.save(tmp_path, state)


def test_a_step_that_is_compiled_again_continues_with_the_state(tmp_path):
    by = multiprocessing.Value("d", 1.0)
    state = None
    for value in (1.0, 2.0, 3.0):
        by.value = value
        step = compiled_loss(lambda p, x: squares(p, x) * by.value)
        state, _ = step(step.init(VECTOR) if state is None else state, ROWS)
    fz.checkpoint.save(tmp_path, state)
    assert copy.deepcopy(state.params["w"])._fzero_checks is None


def test_draws_of_another_thread_are_not_put_on_the_loss():
    stop = threading.Event()

    def augments():
        while not stop.is_set():
            random.random()

    thread = threading.Thread(target=augments, name="loader", daemon=True)
    thread.start()
    train = compiled_loss(squares)
    try:
        state, _ = train(train.init(VECTOR), ROWS)
        state, _ = train(state, ROWS)
        assert train.gather(state)
    finally:
        stop.set()
        thread.join()


def test_a_loss_that_only_writes_is_let_be():
    took = []

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        value = scaled(p, x)
        took.append(time.perf_counter() - start)
        print("once", file=WRITTEN)
        return value

    train = compiled_loss(loss)
    state, metrics = train(train.init(WEIGHTS), INPUTS)
    assert metrics["loss"] == scaled(WEIGHTS, INPUTS)
    train(state, INPUTS)
    assert len(took) == 2 == WRITTEN.getvalue().count("once")
