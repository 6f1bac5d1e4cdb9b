"""Wrong arguments of everything public: an error of ours where the call is, that names the argument and says what to
write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroTypeError

NAN = math.nan
PARAMS, X = {"b": torch.ones(4), "w": torch.ones(4)}, torch.ones(8, 4)
KEY = fz.random.key(0)


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] + p["b"].sum()).square().mean()


STEP, EVALUATE = fz.train_step(loss, optim.sgd(0.1)), fz.eval_step(loss)

CALLS: list[tuple[Callable[[], Any], str]] = [
    # numbers
    (lambda: optim.clip_by_global_norm("1"), "max_norm='1': must be a Python number"),
    (lambda: optim.clip_by_global_norm(torch.ones(())), "max_norm=float32[]"),
    (lambda: optim.clip_by_global_norm(True), "max_norm=True"),
    (lambda: optim.clip_by_global_norm(NAN), "max_norm=nan: must be greater than 0"),
    (lambda: optim.clip_by_global_norm(-1.0), "max_norm=-1.0: must be greater than 0"),
    (lambda: optim.sgd(math.inf), "lr=inf: must be at least 0 and finite"),
    (lambda: optim.sgd(0.1, momentum=None), "momentum=None: must be a Python number"),
    (lambda: optim.sgd(0.1, 0.9, nesterov="yes"), "nesterov='yes': neither True nor False"),
    (lambda: optim.trace(0.9, nesterov=1), "nesterov=1"),
    (lambda: optim.adamw(1e-3, b1="x", eps=None, weight_decay=NAN), "b1='x'"),
    (lambda: optim.adamw(lambda: 1e-3), "must be a function of (step)"),
    (lambda: optim.lion(1e-3, mask="no"), "mask='no': a tree of bools, or a function of (path, leaf)"),
    (lambda: optim.lamb(1e-3, eps="a"), "eps='a'"),
    (lambda: optim.scale("2"), "factor='2'"),
    (lambda: optim.scale_by_schedule(3), "schedule=3: must be a function of (step)"),
    (
        lambda: optim.add_decayed_weights(0.1, mask=lambda p: True),
        "mask=<lambda>(p): must be a function of (path, leaf)",
    ),
    (lambda: optim.masked(3, True), "inner=3: no optimizer"),
    (lambda: optim.masked(optim.sgd(0.1), 3), "mask=3"),
    (lambda: optim.partition([optim.sgd(0.1)], lambda path, leaf: 0), "a dict of label -> optimizer"),
    (lambda: optim.partition({"a": 3}, lambda path, leaf: "a"), "transformations['a']=3: no optimizer"),
    (lambda: optim.constant(None), "value=None"),
    (lambda: optim.linear("a", 0, "10"), "steps='10': must be a Python number"),
    (lambda: optim.cosine(1, NAN, 3), "end=nan"),
    (lambda: optim.warmup_cosine(1, "10", 100), "warmup_steps='10'"),
    (lambda: optim.warmup_stable_decay(1, 10, None, 100), "decay_steps=None"),
    (lambda: optim.warmup_lr(0, 1, "x"), "warmup_steps='x'"),
    (lambda: optim.warmup_decay_lr("x"), "total_steps='x'"),
    (lambda: optim.stochastic_round(3, torch.ones(2)), "a key is a tensor, not int"),
    (lambda: optim.stochastic_round(KEY, 3), "rounds float32, not int"),
    (lambda: fz.random.split(KEY, True), "cannot split a key into True"),
    # functions, and what they take
    (lambda: fz.train_step(loss, optim.sgd(0.1), has_aux="yes"), "has_aux='yes': neither True nor False"),
    (
        lambda: fz.train_step(loss, optim.sgd(0.1), trainable=lambda p: True),
        "trainable=<lambda>(p): a predicate is a function of (path, leaf)",
    ),
    (lambda: fz.train_step(torch.nn.Linear(2, 2), optim.sgd(0.1)), "loss_fn is the module Linear(input: "),
    (
        lambda: fz.train_step(torch.nn.Linear(2, 2), optim.sgd(0.1)),
        "model = fz.functionalize(module); step = model.train_step(optimizer",
    ),
    (
        lambda: fz.train_step(loss, (optim.sgd(0.1).init, optim.sgd(0.1).update)),
        "as optim.GradientTransformation(init, update)",
    ),
    (
        lambda: STEP(STEP.init(PARAMS), X, X),
        "takes a state and one batch, not 1 argument more\nFix: give the batch as one pytree",
    ),
    (lambda: STEP((X, X)), "takes a state and a batch, not tuple alone\nFix: once state = train.init(params)"),
    (lambda: STEP(batch=X), "takes a state and a batch, not Tensor alone"),
    (lambda: STEP(STEP.init(PARAMS)), "takes a state and a batch, not a state alone"),
    (lambda: STEP(), "takes a state and a batch, not nothing"),
    (lambda: STEP(STEP.init(PARAMS), X)[1]["loss"].backward(), "leave out loss.backward(), optimizer.step()"),
    (lambda: fz.eval_step(lambda p, x, *, key: 3), "(p, x, *, key): an evaluation has no key of its own"),
    (
        lambda: fz.compose(fz.accumulate)(STEP),
        "num_micro_batches is missing\nFix: give a whole number of at least 1: fz.accumulate(4)",
    ),
    (lambda: fz.eval_step(3), "fn=3: must be a function of (params, ...)"),
    (lambda: fz.eval_step(lambda: 3), "must be a function of (params, ...)"),
    (lambda: fz.eval_step(STEP), "fn is Step, a step"),
    (lambda: EVALUATE(None, X), "parameters are tensors"),
    (lambda: fz.block(3), "fn=3: must be a function of (params, ...)"),
    (lambda: fz.block(lambda: 3), "must be a function of (params, ...)"),
    (lambda: fz.block(STEP), "fn is a step"),
    (lambda: STEP.init(lambda: PARAMS), "params=<lambda>(): must be a function of (key)"),
    (lambda: fz.compose(lambda s: None)(STEP), "argument 0 returns NoneType, not a step"),
    (lambda: fz.accumulate(2)(EVALUATE), "does nothing to an evaluation"),
    (lambda: fz.accumulate(2, vertical=1), "vertical=1: neither True nor False"),
    (lambda: fz.accumulate(2, whole=lambda p: True), "whole=<lambda>(p): a predicate is a function of (path, leaf)"),
    (lambda: fz.shard_params(where=lambda p, x, y: True), "where=<lambda>(p, x, y): a predicate is"),
    (lambda: fz.shard_params(axis=""), "axis=''"),
    (lambda: fz.mixed_precision("bf16", where=lambda p: True), "where=<lambda>(p)"),
    (lambda: fz.mixed_precision("bf16", reduce=["x"]), "reduce=['x']"),
    (lambda: fz.mixed_precision("auto", start=["bf16"]), "['bf16']"),
    (lambda: fz.fp8(where=lambda p: True), "where=<lambda>(p)"),
    (lambda: fz.offload("cpu", where=lambda p: True), "where=<lambda>(p)"),
    # means and meshes
    (lambda: fz.weighted(torch.ones(3), 4), "total is float32[3], not one floating-point number"),
    (lambda: fz.weighted(torch.ones((), dtype=torch.int64), 4), "total is int64[]"),
    (lambda: fz.weighted(torch.ones(()), torch.ones(3)), "count is float32[3], not one number"),
    (lambda: fz.weighted(torch.ones(()), -1), "count=-1: must be at least 0"),
    (lambda: fz.weighted(torch.ones(()), NAN), "count=nan"),
    (lambda: fz.make_mesh(data=None), "data=None: a size is a whole number of at least 1"),
    (lambda: fz.make_mesh(data="2"), "data='2'"),
    (lambda: fz.make_mesh(data=0), "data=0"),
    (lambda: fz.make_mesh(timeout="x"), "timeout='x'"),
    (lambda: fz.make_mesh(shared_memory=1), "shared_memory=1: neither True nor False"),
    (lambda: fz.make_mesh(unified_memory="no"), "unified_memory='no': neither True nor False"),
    (lambda: fz.make_mesh(device=0), "device=0: must be 'cpu' or 'cuda'"),
    (lambda: fz.lower(STEP, fz.AbstractMesh(data=1), PARAMS, X, device=3), "3 is not a device"),
]


def refused(call: Callable[[], Any], *words: str) -> str:
    with pytest.raises(FzeroError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("fzero.") and text.splitlines()[-1].startswith("Fix: "), text
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"
    return text


Number = Callable[[float], Any]  # of NumPy, or Python's own


def _profile(n: Number) -> Any:
    train = fz.compile(STEP, fz.make_mesh(), backend="eager")
    return train.profile(train.init(PARAMS), X, steps=n(1))[0].step


DATA = fz.data.TokenDataset(torch.arange(100), seq=4, batch=2)
NUMBERS: dict[str, Callable[[Number], Any]] = {
    "AbstractMesh": lambda n: fz.AbstractMesh(data=n(2)),
    "make_mesh": lambda n: fz.make_mesh(data=(n(2), n(1)), timeout=n(600)).axes,
    "accumulate": lambda n: (fz.accumulate(n(2)), fz.accumulate(num_micro_batches=n(2))),
    "compress": lambda n: fz.compress("auto", every=n(2), decisions=[(n(0), {"data": ("int8", None)})]),
    "local_sgd": lambda n: fz.local_sgd(every=n(10), fragments=n(1)),
    "expert_parallel": lambda n: fz.expert_parallel(where=bool, chunks=n(2), whole_bytes=n(4096)),
    "mixed_precision": lambda n: fz.mixed_precision("fp16", loss_scale=n(128)),
    "offload": lambda n: fz.offload("cpu", fraction=n(1)),
    "once_a_step": lambda n: fz.once_a_step(gathers=n(1)),
    "pipeline": lambda n: fz.pipeline(schedule="interleaved", stages=[n(1), n(2)], chunks=n(2)),
    "redundant": lambda n: fz.redundant(every=n(2)),
    "remat": lambda n: (fz.remat("full", head_rows=n(64)), fz.remat(n(1))),
    "shard_params": lambda n: fz.shard_params(gather_bytes=n(4096)),
    "sequence_parallel": lambda n: fz.sequence_parallel(whole_bytes=n(4096)),
    "tensor_parallel": lambda n: fz.tensor_parallel(rules={"w": n(0), "v": (n(1), n(2))}, whole_bytes=n(4096)),
    "LossScale": lambda n: fz.LossScale(initial=n(8), growth_interval=n(3), hysteresis=n(2)),
    "Health": lambda n: fz.Health(stragglers=n(5), replay=n(7)),
    "run": lambda n: fz.run(lambda run: run.micro_batches(n(24), rows=n(5)), every=n(1), timeout=n(60), device="cpu"),
    "weighted": lambda n: fz.weighted(torch.ones(()), n(3)),
    "adamw": lambda n: optim.adamw(n(1), b1=n(0), b2=n(0), eps=n(1)).update(
        PARAMS, optim.adamw(1).init(PARAMS), PARAMS
    ),
    "schedules": lambda n: [
        schedule(n(3))
        for schedule in (
            optim.cosine(n(1), n(0), n(10)),
            optim.warmup_cosine(n(1), n(2), n(10)),
            optim.warmup_decay_lr(n(10), warmup_steps=n(2)),
            optim.warmup_stable_decay(n(1), n(2), n(3), n(10)),
        )
    ],
    "muon": lambda n: optim.muon(1e-2, ns_steps=n(5), where=lambda p, x: n(1)).init({"w": torch.ones(4, 4)}),
    "random": lambda n: [
        fz.random.key(n(3)),
        fz.random.split(KEY, n(2)),
        fz.random.fold_in(KEY, n(2)),
        fz.random.with_part(KEY, n(2)),
        fz.random.uniform(KEY, (n(2), n(3)), minval=n(0), maxval=n(2)),
        fz.random.bernoulli(KEY, (n(3),), n(1)),
    ],
    "TokenDataset": lambda n: fz.data.TokenDataset(
        torch.arange(100), seq=n(4), batch=n(2), seed=n(1), skip=[(n(3), n(5))]
    ).cursor(n(4)),
    "batches": lambda n: (DATA.batch_at(n(3), n(1), n(2)), DATA.resume({**DATA.cursor(3), "next": n(3)})),
    "windows": lambda n: DATA.windows(n(0), n(3)),
    "read_ahead": lambda n: list(fz.data.read_ahead(DATA, n(3), n(5), rank=n(0), size=n(1), depth=n(2))),
    "dispatch": lambda n: fz.experts.dispatch(
        torch.ones(4, 2), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), num_experts=n(2), capacity=n(1)
    ),
    "profile": _profile,
    "simulate": lambda n: fz.testing.simulate(
        fz.data_parallel(STEP), fz.AbstractMesh(data=n(2)), PARAMS, X, steps=n(1)
    ),
    "lower": lambda n: fz.lower(STEP, fz.AbstractMesh(), PARAMS, X, memory_budget=n(1 << 40)).program.lines,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_taken_as_pythons_own(name: str) -> None:
    assert str(NUMBERS[name](numpy.int64)) == str(NUMBERS[name](int))


@pytest.mark.parametrize("wrong", [True, numpy.True_, numpy.float64(2), torch.tensor(2), "2"])
def test_what_is_no_whole_number_is_rejected_by_the_name_of_the_argument(wrong: Any) -> None:
    with pytest.raises(FzeroError, match=r"num_micro_batches=.*: must be a whole number"):
        fz.accumulate(wrong)


AMOUNTS = [fz.shard_params, fz.tensor_parallel, fz.sequence_parallel, fz.expert_parallel]


@pytest.mark.parametrize("transform", AMOUNTS)
def test_a_negative_size_names_the_transform_and_the_argument(transform: Any) -> None:
    name = "gather_bytes" if transform is fz.shard_params else "whole_bytes"
    more = {"rules": {"w": 0}} if transform is fz.tensor_parallel else {}
    more |= {"where": bool} if transform is fz.expert_parallel else {}
    with pytest.raises(FzeroError, match=f"fzero.{transform.__name__}: .*\n  {name}=-1: must be a number of bytes"):
        transform(**{name: -1}, **more)


def test_wrong_arguments_are_named_where_they_are_given() -> None:
    for call, words in CALLS:
        refused(call, words)
    assert refused(CALLS[9][0]).count("\n  ") == 3, "all at once"
    (
        optim.clip_by_global_norm(math.inf),
        optim.warmup_cosine(1.0, 0.5, 9.5),
        fz.weighted(torch.ones(()), 0),
        fz.eval_step(lambda *args: args),
    )


def test_a_predicate_answers_true_or_false() -> None:
    mesh = fz.AbstractMesh(data=2)
    for answer in ("no", None, 1, torch.tensor(True)):
        says = lambda path, leaf, answer=answer: answer  # noqa: E731
        steps = [
            fz.data_parallel(fz.train_step(loss, optim.sgd(0.1), trainable=says)),
            fz.data_parallel(fz.train_step(loss, optim.sgd(0.1), mutable=says)),
            *(t(where=says)(fz.data_parallel(STEP)) for t in (fz.shard_params, fz.shard_grads, fz.fp8)),
            fz.mixed_precision("bf16", where=says)(fz.data_parallel(STEP)),
            fz.offload("cpu", where=says)(fz.data_parallel(STEP)),
            fz.accumulate(2, whole=says)(fz.data_parallel(STEP)),
        ]
        for step, name in zip(
            steps, ["trainable", "mutable", "where", "where", "where", "where", "where", "whole"], strict=True
        ):
            with pytest.raises(FzeroTypeError) as caught:
                fz.lower(step, mesh, PARAMS, X)
            text = str(caught.value)
            assert (
                f"`{name}` answers neither True nor False\n  {'batch' if name == 'whole' else 'params['}" in text
                and "Fix: return a bool" in text
            ), text


def test_a_schedule_returns_one_number() -> None:
    for schedule in (lambda step: torch.ones(2) * step, lambda step: None, lambda step: "1"):
        for make in (optim.sgd, optim.adamw, optim.lion, optim.lamb, optim.scale_by_schedule):
            step = fz.train_step(loss, make(schedule))
            for act in (
                lambda step=step: step(step.init(PARAMS), X),
                lambda step=step: fz.lower(step, fz.AbstractMesh(data=1), PARAMS, X),
            ):
                refused(
                    act,
                    f"fzero.optim.{'scale_by_learning_rate' if make in (optim.sgd, optim.lamb) else make.__name__}",
                    "<lambda>(step): ",
                )
    halved = fz.train_step(loss, optim.sgd(lambda step: 0.05))
    assert torch.equal(
        halved(halved.init(PARAMS), X)[0].params["w"],
        PARAMS["w"] - 0.5 * (PARAMS["w"] - STEP(STEP.init(PARAMS), X)[0].params["w"]),
    )
