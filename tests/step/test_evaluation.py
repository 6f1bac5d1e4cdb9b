"""Evaluation steps: which functions and parameters they take, and of what their results are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rejections import (
    BATCH,
    EVALUATE,
    EYE,
    FEATURES,
    LABELS,
    META,
    ONES,
    STEP,
    predict,
    raises,
    squares,
    train_and_evaluate,
)

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError

CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "an evaluation on meta": (
        lambda train, state, run: run(META, ONES, ONES),
        "fzero.eval_step: .*\n  params['w']: float32[4, 4] on the meta device",
    ),
    "an evaluation of a state": (
        lambda train, state, run: run(state, ONES, ONES),
        "fzero.eval_step: takes parameters, not the State .*\nFix: give state.params",
    ),
    "too few arguments": (lambda train, state, run: run(state.params, (ONES, ONES)), "fzero.eval_step: predict(p: "),
    "too many arguments": (
        lambda train, state, run: run(state.params, ONES, ONES, ONES),
        "and 3 more arguments\n  too many positional arguments\nFix: ",
    ),
    "too few, uncompiled": (
        lambda train, state, run: fz.eval_step(predict)(state.params, ONES),
        "1 more argument\n  missing a required argument: 'y'",
    ),
    "too few, lowered": (
        lambda train, state, run: fz.lower(fz.eval_step(predict), train.mesh, META, (ONES,)),
        "missing a required argument: 'y'",
    ),
}


@pytest.fixture(scope="module")
def steps() -> Any:
    return train_and_evaluate()


def _averaged() -> str:
    """What an evaluation says of leaves that were computed from shards, one by one."""
    mesh = fz.make_mesh()
    train = fz.compile(fz.shard_params(fz.train_step(squares, optim.sgd(0.1))), mesh, backend="eager")
    evaluate = fz.compile(fz.shard_params(fz.eval_step(squares)), mesh, backend="eager")
    state = train.init(EYE)
    with pytest.raises(FzeroError) as caught:
        evaluate(fz.tree.map(lambda x: 0.5 * x, state.params), ONES)
    evaluate({"w": state.params["w"]}, ONES)
    return str(caught.value)


def test_what_is_computed_from_shards_has_no_layout(run_ranks: Any) -> None:
    for text in run_ranks(2, _averaged):
        assert (
            "params['w']: float32[8] without a layout, which is then assumed to be unsharded, in the state, float32[8] "
            "sharded over data in this step" in text
        )
        assert "\nFix: give the trees of the state as they are: what is computed from their leaves" in text


def _evaluates() -> list[str]:
    """What the log says of evaluations of a mean over a rank's part, and of one over all of them."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fzero").addHandler(handler)
    mesh = fz.make_mesh()
    x = torch.full((2, 4), float(mesh.rank))

    def mean(p: Any, x: torch.Tensor) -> Any:
        return (x @ p["w"]).mean(), x

    def of_all(p: Any, x: torch.Tensor) -> Any:
        return fz.weighted((x @ p["w"]).sum(), x.numel()), x

    for fn, want in ((of_all, 0.5), (mean, float(mesh.rank))):
        evaluate = fz.compile(fz.data_parallel(fz.eval_step(fn)), mesh, backend="eager")
        for _ in range(2):
            assert evaluate({"w": torch.eye(4)}, x)[0] == want
    logging.getLogger("fzero").removeHandler(handler)
    return said


def test_an_evaluation_of_each_ranks_own_mean_says_so_once(run_ranks: Any) -> None:
    first, other = run_ranks(2, _evaluates)
    assert first == [
        "mean: 1 of its results are numbers of each rank's part of the batch alone; fz.weighted(total, count) is the "
        "mean over all ranks"
    ]
    assert other == []


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: fz.eval_step(lambda p, x, *, key: 3), "(p, x, *, key): an evaluation has no key"),
    (lambda: fz.eval_step(3), "fn=3: must be a function of (params, ...)"),
    (lambda: fz.eval_step(lambda: 3), "must be a function of (params, ...)"),
    (lambda: fz.eval_step(STEP), "fn is Step, a step"),
    (lambda: EVALUATE(None, BATCH), "parameters are tensors"),
]


OUT_OF_RANGE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "an evaluation's": (
        lambda: fz.compile(fz.eval_step(lambda p, x: p[x]), fz.make_mesh(), backend="eager")(FEATURES, LABELS + 9),
        ("fzero.eval_step: an index is out of range", "\n  batch[0]: int64[6], from 9 to 11\n"),
    ),
}


def test_wrong_arguments_are_named(steps: Any) -> None:
    for call, words in CALLS.values():
        raises(FzeroError, lambda call=call: call(*steps), *words.split(".*"))
    for call, words in WRONG:
        raises(FzeroError, call, words)
    for act, says in OUT_OF_RANGE.values():
        raises(FzeroError, act, *says)
    _, state, run = steps
    assert fz.eval_step(lambda *args: args) and run(state.params, ONES, ONES).isfinite()
