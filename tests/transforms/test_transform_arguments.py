"""What transforms take: axes, numbers, names, steps and other transforms beside them; anything else is an error that
names the transform and the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from rejections import BATCH, EVALUATE, MESH, PARAMS, STEP, loss_fn, lower, make, raises, squares

import fzero as fz
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError, TransformError


@pytest.mark.parametrize(
    "transform", [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params], ids=lambda t: t.__name__
)
def test_axis_that_the_mesh_has_not(transform: Any) -> None:
    step = transform(make(), axis="dta")
    raises(FzeroValueError, lambda: fz.lower(step, MESH, PARAMS, BATCH), f"{transform.__name__}(axis='dta')", "data=2")
    raises(FzeroValueError, lambda: fz.compile(step, fz.make_mesh(data=1)), f"{transform.__name__}(axis='dta')")
    evaluate = transform(fz.eval_step(loss_fn), axis="dta")
    raises(FzeroValueError, lambda: fz.lower(evaluate, MESH, PARAMS, (BATCH,)), "axis='dta'")
    raises(FzeroTypeError, lambda: transform(make(), axis=3), "axis=3", transform.__name__)
    raises(FzeroTypeError, lambda: transform(make(), axis=["data"]), "axis=['data']")


def test_axis_that_no_transform_uses() -> None:
    raises(FzeroValueError, lambda: fz.lower(make(), MESH, PARAMS, BATCH), "data=2", "fz.data_parallel(axis='data')")
    raises(FzeroValueError, lambda: lower(make(), mesh=fz.AbstractMesh(data=2, model=3)), "model=3")
    raises(FzeroValueError, lambda: fz.lower(fz.eval_step(loss_fn), MESH, PARAMS, (BATCH,)), "data=2")


CONFLICTS = {
    "precision": (fz.mixed_precision("bf16", reduce="bf16"), fz.mixed_precision("fp32"), "compute='fp32'"),
    "accumulate": (fz.accumulate(2), fz.accumulate(4), "num_micro_batches=4"),
    "remat": (fz.remat("full"), fz.remat("none"), "policy='none'"),
    "axes": (fz.shard_params(axis="data"), fz.shard_params(axis="replica"), "'replica'"),
    "stages on two axes": (fz.shard_opt_state(axis="data"), fz.shard_params(axis="replica"), "'replica'"),
    "stages of which one does all": (
        fz.shard_grads(),
        fz.shard_params(axis=("data", "node")),
        "shard_params (ZeRO-3) does all that shard_grads (ZeRO-2) does",
    ),
    "where": (
        fz.shard_params(where=lambda path, leaf: True),
        fz.shard_params(where=lambda path, leaf: False),
        "where=<lambda>",
    ),
}


@pytest.mark.parametrize("stage", [fz.shard_opt_state, fz.shard_grads, fz.shard_params])
def test_data_parallel_together_with_a_stage_over_its_axis_changes_nothing(stage: Any) -> None:
    mesh, axis = fz.AbstractMesh(data=2, node=2), ("data", "node")
    ops = lambda *transforms: fz.lower(fz.compose(*transforms)(make()), mesh, PARAMS, BATCH).program.instructions  # noqa: E731
    for transforms in ((fz.data_parallel(axis="node"), stage(axis=axis)), (stage(axis=axis), fz.data_parallel())):
        assert ops(*transforms) == ops(stage(axis=axis))


def test_a_lower_stage_may_go_further_than_a_higher_one() -> None:
    some = lambda path, leaf: leaf.numel() > 8  # noqa: E731
    of_some = [(fz.shard_params(where=some), fz.shard_grads()), (fz.shard_grads(where=some), fz.shard_opt_state())]
    of_some.append((fz.shard_params(where=some), fz.data_parallel()))
    for one, two in [*of_some, (fz.shard_params(), fz.shard_grads(axis=("data", "node")))]:
        assert {*fz.compose(one, two)(make()).transforms} == {one, two}
    with pytest.raises(TransformError, match="does all"):
        fz.compose(fz.shard_params(where=some), fz.shard_opt_state(where=some))(make())


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_name_both_in_either_order(name: str) -> None:
    one, two, word = CONFLICTS[name]
    raises(TransformError, lambda: two(one(make())), str(one), str(two), word)
    raises(TransformError, lambda: fz.compose(two, one)(make()), str(one), str(two))


def test_the_same_transform_twice_is_none() -> None:
    once = fz.accumulate(fz.shard_params(make()), 2)
    assert fz.shard_params(fz.accumulate(once, 2)).transforms == once.transforms


@pytest.mark.parametrize(
    "transform",
    [fz.data_parallel(), fz.shard_params(), fz.accumulate(2), fz.mixed_precision("bf16"), fz.remat("full")],
    ids=str,
)
def test_transforms_of_what_is_no_step(transform: Any) -> None:
    raises(FzeroTypeError, lambda: transform(loss_fn), "not function", "train_step")
    raises(FzeroTypeError, lambda: fz.compose(transform)(PARAMS), "not dict")


def test_compose_and_compile_of_other_things() -> None:
    raises(FzeroTypeError, lambda: fz.compose(fz.shard_params(), 3), "argument 1: int")
    raises(FzeroTypeError, lambda: fz.compose(make()), "argument 0: Step")
    raises(FzeroTypeError, lambda: fz.compile(loss_fn, fz.make_mesh(data=1)), "not function")
    raises(FzeroTypeError, lambda: fz.compile(make(), fz.AbstractMesh(data=1)), "AbstractMesh", "fz.lower")
    raises(FzeroTypeError, lambda: fz.lower(make(), 8, PARAMS, BATCH), "not int")
    raises(FzeroTypeError, lambda: fz.lower(loss_fn, MESH, PARAMS, BATCH), "not function")
    raises(FzeroTypeError, lambda: fz.lower(fz.eval_step(loss_fn), fz.AbstractMesh(data=1), PARAMS, BATCH), "tuple")


@pytest.mark.parametrize("number", [0, -1, True, False, 1.5, 2.0, "4"])
def test_micro_batch_numbers(number: Any) -> None:
    raises(FzeroValueError, lambda: fz.accumulate(make(), number), repr(number))


def test_a_missing_number_of_micro_batches() -> None:
    raises(FzeroValueError, lambda: fz.accumulate(make()), "num_micro_batches is missing")


def test_unknown_names() -> None:
    raises(FzeroValueError, lambda: fz.mixed_precision("fp8"), "compute='fp8'", "'bf16'")
    raises(FzeroValueError, lambda: fz.mixed_precision("bf16", params="x", reduce="y"), "params='x'", "reduce='y'")
    raises(FzeroValueError, lambda: fz.mixed_precision(make(), torch.float64), "torch.float64")
    raises(FzeroValueError, lambda: fz.remat("ful"), "'ful'", "'full'")
    raises(FzeroValueError, lambda: fz.remat(make(), True), "True")
    raises(FzeroValueError, lambda: fz.compile(make(), fz.make_mesh(data=1), backend="xla"), "'xla'", "'eager'")
    raises(FzeroTypeError, lambda: fz.shard_params(where="w"), "where='w'")


def test_a_transform_that_does_nothing_to_an_evaluation():
    evaluate = fz.eval_step(squares)
    for act, said in (
        (lambda: fz.accumulate(evaluate, 2), "each part of the batch"),
        (lambda: fz.offload(evaluate, "cpu", "opt_state"), "no optimizer state"),
        (lambda: fz.offload(evaluate, "cpu", ("opt_state", "activations")), "no optimizer state"),
    ):
        raises(
            TransformError,
            act,
            "does nothing to an evaluation",
            said,
            "fz.compose(*train.resolved.transforms)(fz.eval_step(fn))",
        )
    assert (
        fz.offload(evaluate, "cpu", "params").transforms
        and fz.offload(fz.mixed_precision(evaluate), "cpu", "opt_state").transforms
    )
    taken = fz.compose(fz.accumulate(2), fz.offload("cpu", "opt_state"))(evaluate)
    params, x = {"w": torch.ones(4)}, torch.ones(3, 4)
    assert torch.equal(fz.compile(taken, fz.make_mesh(), backend="eager")(params, x), squares(params, x))


@pytest.mark.parametrize("wrong", [True, numpy.True_, numpy.float64(2), torch.tensor(2), "2"])
def test_what_is_no_whole_number_is_rejected_by_the_name_of_the_argument(wrong: Any) -> None:
    with pytest.raises(FzeroError, match=r"num_micro_batches=.*: must be a whole number"):
        fz.accumulate(wrong)


AMOUNTS = [fz.tensor_parallel, fz.sequence_parallel, fz.expert_parallel]


@pytest.mark.parametrize("transform", AMOUNTS)
def test_a_negative_size_names_the_transform_and_the_argument(transform: Any) -> None:
    more = {"rules": {"w": 0}} if transform is fz.tensor_parallel else {}
    more |= {"where": bool} if transform is fz.expert_parallel else {}
    with pytest.raises(
        FzeroError, match=f"fzero.{transform.__name__}: .*\n  max_replicated_bytes=-1: must be a number of bytes"
    ):
        transform(max_replicated_bytes=-1, **more)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: fz.compose(fz.accumulate)(STEP),
        "num_micro_batches is missing\nFix: give a whole number of at least 1: fz.accumulate(4)",
    ),
    (lambda: fz.compose(lambda s: None)(STEP), "argument 0 returns NoneType, not a step"),
    (lambda: fz.accumulate(2)(EVALUATE), "does nothing to an evaluation"),
    (lambda: fz.accumulate(2, schedule="depth"), "schedule='depth': must be one of 'sequential', 'layerwise'"),
    (
        lambda: fz.accumulate(2, replicated=lambda p: True),
        "replicated=<lambda>(p): a predicate is a function of (path, leaf)",
    ),
    (lambda: fz.shard_params(where=lambda p, x, y: True), "where=<lambda>(p, x, y): a predicate is"),
    (lambda: fz.shard_params(axis=""), "axis=''"),
    (lambda: fz.mixed_precision("bf16", where=lambda p: True), "where=<lambda>(p)"),
    (lambda: fz.mixed_precision("bf16", reduce=["x"]), "reduce=['x']"),
    (lambda: fz.mixed_precision("auto", start=["bf16"]), "['bf16']"),
    (lambda: fz.fp8(where=lambda p: True), "where=<lambda>(p)"),
    (lambda: fz.offload("cpu", where=lambda p: True), "where=<lambda>(p)"),
    (lambda: fz.lower(STEP, MESH, PARAMS, BATCH, device=3), "3 is not a device"),
]


def test_wrong_arguments_are_named() -> None:
    for call, words in WRONG:
        raises(FzeroError, call, words)
