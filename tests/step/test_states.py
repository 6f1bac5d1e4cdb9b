"""The state of a step: which one a step takes, what is done with it, and what another one is told."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import ending
from rejections import (
    BATCH,
    EYE,
    META,
    ONES,
    PARAMS,
    STEP,
    compiled,
    loss_fn,
    make,
    raises,
    squares,
    train_and_evaluate,
)

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError


def test_program_before_a_call() -> None:
    raises(FzeroValueError, lambda: compiled(make()).program, "fz.lower")


def test_results_do_not_alias_the_state() -> None:
    """A metric that is a parameter, or a view of one, is what it was before the update overwrote the parameter."""
    step = make(lambda p, x: (loss_fn(p, x), {"w": p["w"], "row": p["w"][0], "t": p["w"].T, "b": p["b"]}), has_aux=True)
    _, expected = step(step.init(PARAMS), BATCH)
    for transform in (fz.remat("full"), fz.accumulate(2)):
        train = compiled(transform(step))
        state, metrics = train(train.init(PARAMS), BATCH)
        torch.testing.assert_close(metrics["aux"], expected["aux"])
        assert not torch.equal(state.params["w"], metrics["aux"]["w"])


def test_states_of_other_steps() -> None:
    mesh = fz.make_mesh(data=1)
    train = fz.compile(make(), mesh, backend="eager")
    for wrong in (PARAMS, (1, 2, 3, 4, 5), None):
        raises(FzeroTypeError, lambda wrong=wrong: train(wrong, BATCH), type(wrong).__name__, "train.init")
        raises(FzeroTypeError, lambda wrong=wrong: make()(wrong, BATCH), type(wrong).__name__, "init")
    other = fz.compile(make(optimizer=optim.adamw(0.1)), mesh, backend="eager")
    train.init(PARAMS)
    raises(FzeroError, lambda: train(other.init(PARAMS), BATCH), "opt_state")
    half = {k: v.double() for k, v in PARAMS.items()}
    raises(
        FzeroError,
        lambda: fz.compile(fz.mixed_precision(make(), "bf16"), mesh, backend="eager")(train.init(half), BATCH),
        "params['w']",
        "float64",
    )


def test_a_plain_state_is_given_to_a_compiled_step() -> None:
    """Whole tensors are what a step without shards expects; moments must be those of the optimizer."""
    step = make(optimizer=optim.adamw(0.1))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    expected, _ = step(step.init(PARAMS), BATCH)
    state, _ = train(step.init(PARAMS), BATCH)
    torch.testing.assert_close(state.params, expected.params)


def _layouts(stages: tuple[int, int]) -> None:
    mesh = fz.make_mesh(data=2)
    kinds = [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params]
    have, want = (fz.compile(kinds[s](make(optimizer=optim.adamw(0.1))), mesh, backend="eager") for s in stages)
    want(have.init(PARAMS), BATCH)


@pytest.mark.full(keep=["stages2", "stages3"])
@pytest.mark.parametrize("stages", [(0, 3), (3, 0), (0, 1), (1, 0)])
def test_state_of_another_layout(run_ranks: Any, stages: tuple[int, int]) -> None:
    ranks = run_ranks(2, _layouts, stages, expect_error=True)
    leaf = "params['w']" if 3 in stages else "opt_state"
    for r in ranks:
        assert (
            r.type == "FzeroValueError"
            and leaf in r.message
            and "sharded over data" in r.message
            and "Fix: " in r.message
        ), r
        assert "float32[4, 3] unsharded" in r.message


def _plain_state() -> None:
    train = fz.compile(fz.shard_params(make(optimizer=optim.adamw(0.1))), fz.make_mesh(data=2), backend="eager")
    train(make(optimizer=optim.adamw(0.1)).init(PARAMS), BATCH)


def _evaluates_shards() -> None:
    mesh = fz.make_mesh(data=2)
    train = fz.compile(fz.shard_params(make()), mesh, backend="eager")
    fz.compile(fz.data_parallel(fz.eval_step(loss_fn)), mesh, backend="eager")(train.init(PARAMS).params, BATCH)


def _evaluates_whole() -> None:
    fz.compile(fz.shard_params(fz.eval_step(loss_fn)), fz.make_mesh(data=2), backend="eager")(PARAMS, BATCH)


@pytest.mark.parametrize("fn", [_plain_state, _evaluates_shards, _evaluates_whole], ids=lambda f: f.__name__)
def test_layouts_that_do_not_fit(run_ranks: Any, fn: Any) -> None:
    for r in run_ranks(2, fn, expect_error=True):
        assert (
            r.type == "FzeroValueError"
            and "params['w']" in r.message
            and "sharded over data" in r.message
            and "Fix: " in r.message
        ), r


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "a state on meta": (
        lambda train, state, run: train(state._replace(params=META), ONES),
        "fzero.step: .*\n  params['w']: float32[4, 4] on the meta device",
    ),
    "gather of no state": (
        lambda train, state, run: train.gather(3),
        "fzero.gather: the first argument is a State, not int",
    ),
    "replicas of no state": (
        lambda train, state, run: train.check_replicas(3),
        "fzero.check_replicas: the first argument is a State, not int",
    ),
    "a profile of no steps": (
        lambda train, state, run: train.profile(state, ONES, steps=0),
        "fzero.profile: .*\n  steps=0: must be at least 1",
    ),
    "a batch in parts": (
        lambda train, state, run: train(state, ONES, ONES),
        "fzero.step: takes a state and one batch, not 1 argument more",
    ),
    "the state forgotten": (
        lambda train, state, run: train((ONES, ONES)),
        "fzero.step: takes a state and a batch, not tuple only\nFix: .* state, metrics = train(state, batch)",
    ),
    "a pickled state": (
        lambda train, state, run: pickle.dumps(state),
        "fzero.mesh: .* can be pickled.*\nFix: fz.checkpoint.save(path, state)",
    ),
    "torch.save of a leaf": (
        lambda train, state, run: torch.save(state.params, io.BytesIO()),
        "Fix: fz.checkpoint.save(path, state)",
    ),
}


@pytest.fixture(scope="module")
def steps() -> Any:
    return train_and_evaluate()


def _put(tree: Any, name: str, x: Any) -> None:
    tree[name] = x


REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shape": (
        lambda s: _put(s.params, "w", torch.eye(5)),
        "laid out for another step\n  opt_state.mu['w']: float32[4, 4] unsharded in the state, float32[5, 5]",
    ),
    "another dtype": (
        lambda s: _put(s.params, "w", torch.eye(4).double()),
        "laid out for another step\n  opt_state.mu['w']: float32[4, 4] unsharded in the state, f",
    ),
    "no leaf": (
        lambda s: s.params.pop("w"),
        "laid out for another step\n  opt_state.mu['w']: in the state, not in this step",
    ),
    "None": (
        lambda s: _put(s.params, "w", None),
        "laid out for another step\n  opt_state.mu['w']: in the state, not in this step",
    ),
    "a number": (lambda s: _put(s.params, "w", 1.0), "parameters are tensors\n  params['w']: float"),
    "a leaf more": (
        lambda s: _put(s.params, "z", ONES),
        "laid out for another step\n  opt_state.mu['z']: not in the state",
    ),
    "no values": (
        lambda s: _put(s.params, "w", META["w"]),
        "these tensors have no values\n  params['w']: float32[4, 4] on the meta device",
    ),
    "expanded": (
        lambda s: _put(s.params, "w", torch.ones(1, 4).expand(4, 4)),
        "share memory\n  params['w']: float32[4, 4], expanded\nFix: give x.clone()",
    ),
    "overlapping": (
        lambda s: _put(s.params, "w", s.params["v"].view(2, 4, 4)[1]),
        "share memory\n  params['v'] and params['w'] share memory",
    ),
    "a moment of another shape": (
        lambda s: _put(s.opt_state.mu, "w", ONES),
        "opt_state.mu['w']: float32[2, 4] without a layout",
    ),
}


def test_leaves_of_a_state_that_were_replaced(steps: Any) -> None:
    """In place, between two steps: what the step has found of the state before does not hold any more."""
    train = steps[0]
    for name, (replace, words) in REPLACED.items():
        state, _ = train(train.init({"w": torch.eye(4), "v": torch.ones(8, 4)}), ONES)
        replace(state)
        with pytest.raises(FzeroError) as caught:
            train(state, ONES)
        text = str(caught.value)
        assert words in text and text.splitlines()[-1].startswith("Fix: "), f"{name}: {text}"
    state, _ = train(train.init(EYE), ONES)
    state.params["w"] = torch.full((4, 4), 0.5)
    assert train(state, ONES)[1]["loss"] == 4.0, "a value of the same kind is what it trains on with"


def _gathers_alone(folder: str, stage: int) -> str:
    """Rank 0 gathers, the other does something else."""
    mesh = fz.make_mesh(timeout=2)
    train = fz.compile(
        [fz.data_parallel, fz.shard_params][stage](fz.train_step(squares, optim.sgd(0.1))), mesh, backend="eager"
    )
    state = train.init(EYE)
    with ending(folder, last=mesh.rank == 1):
        if mesh.rank == 0:
            began = time.monotonic()
            try:
                train.gather(state)
            except fz.errors.DivergenceError as error:
                assert time.monotonic() - began < 60
                return str(error)
    return ""


@pytest.mark.full
def test_a_gather_that_a_rank_does_not_join_names_it(run_ranks: Any, tmp_path: Path) -> None:
    for stage in (0, 1):
        (folder := tmp_path / str(stage)).mkdir()
        text, _ = run_ranks(2, _gathers_alone, str(folder), stage)
        if stage == 0:
            assert text == "", "whole leaves are on every rank"
        else:
            assert (
                "rank 1 timed out after 2 s" in text
                and text.startswith("fzero.gather: ")
                and "Fix: call gather on every rank" in text
            )


def test_calls_with_other_things(steps: Any) -> None:
    for call, words in CALLS.values():
        raises(FzeroError, lambda call=call: call(*steps), *words.split(".*"))
    train, state, _ = steps
    whole = io.BytesIO()
    torch.save(train.gather(state).params, whole)
    again = torch.load(io.BytesIO(whole.getvalue()))["w"]
    assert torch.equal(again, state.params["w"]), "what is gathered is plain tensors"
    assert int(train(state, ONES)[0].step) == 1, "nothing of it has done harm"


PLAIN_CALLS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: STEP(STEP.init(PARAMS), BATCH, BATCH),
        "takes a state and one batch, not 1 argument more\nFix: give the batch as one pytree",
    ),
    (lambda: STEP((BATCH, BATCH)), "takes a state and a batch, not tuple only\nFix: once state = train.init(params)"),
    (lambda: STEP(batch=BATCH), "takes a state and a batch, not Tensor only"),
    (lambda: STEP(STEP.init(PARAMS)), "takes a state and a batch, not a state only"),
    (lambda: STEP(), "takes a state and a batch, not nothing"),
]


def test_calls_of_a_plain_step_with_other_things() -> None:
    for call, words in PLAIN_CALLS:
        raises(FzeroError, call, words)


def test_fields_of_a_state_that_are_of_another_kind() -> None:
    step = make()
    train = compiled(step)
    for init, run in ((step.init, step), (train.init, train)):
        state = init(PARAMS)
        for wrong, said in (
            ({"step": torch.tensor(1.5)}, "state.step: float32[], not int64[]"),
            ({"step": 3}, "state.step: int"),
            ({"key": None}, "state.key: NoneType, not int64[3]"),
            ({"extras": None}, "state.extras: NoneType, not a dict"),
        ):
            broken = state._replace(**wrong)
            raises(FzeroTypeError, lambda run=run, broken=broken: run(broken, BATCH), said, "init")
