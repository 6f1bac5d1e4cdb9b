"""Functions of (path, leaf), as `where`, `trainable`, `mutable` and `replicated` take them: they answer True or False,
accept something, and treat all paths of one tensor alike."""

from __future__ import annotations

import pytest
import torch
from rejections import BATCH, MESH, ONE, PARAMS, ROWS, STEP, VECTOR, make, raises, squares

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError


def test_a_tied_leaf_of_which_a_predicate_accepts_some_paths():
    w = torch.ones(4, 4)
    params, loss = {"a": w, "b": w, "c": torch.ones(4, 4)}, lambda p, x: (x @ p["a"] @ p["b"] @ p["c"]).mean()
    torn = (
        "params['a'] and params['b'] are one tensor: `trainable` matches params['b'], not params['a']",
        "Fix: match all",
    )
    step = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: path != "params['a']")
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for act in (lambda: step.init(params), lambda: train.init(params), lambda: fz.lower(step, ONE, params, ROWS)):
        raises(FzeroValueError, act, *torn)
    only_b = lambda path, leaf: path == "params['b']"  # noqa: E731
    for transform in (
        fz.shard_params(where=only_b),
        fz.shard_opt_state(where=only_b),
        fz.offload("cpu", "params", where=only_b),
    ):
        step = fz.data_parallel(transform(fz.train_step(loss, optim.sgd(0.1))))
        raises(
            TransformError,
            lambda step=step: fz.lower(step, fz.AbstractMesh(data=2), params, ROWS),
            torn[0].replace("trainable", "where"),
        )
    both = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: path != "params['c']")
    state, _ = both(both.init(params), ROWS)
    assert not torch.equal(state.params["a"], w) and torch.equal(state.params["c"], params["c"])


TYPOS = [
    lambda p, x: "ww" in p,
    lambda p, x: p == "params['x']",
    lambda p, x: p.endswith("kernel"),
    lambda p, x: p in {"a", "b"},
]


MEANT = [lambda p, x: x.numel() > 1000, lambda p, x: False, lambda p, x: "w" in p]


def test_a_predicate_of_paths_that_accepts_none():
    step, mesh = fz.train_step(squares, optim.sgd(0.1)), fz.make_mesh()
    of_where = [
        fz.shard_params,
        lambda where: fz.mixed_precision("bf16", where=where),
        lambda where: fz.offload("cpu", "params", where=where),
    ]
    for i, transform in enumerate(of_where):
        for where in TYPOS:
            act = lambda transform=transform, where=where: fz.compile(  # noqa: E731
                transform(where=where)(step), mesh, backend="eager"
            ).init(VECTOR)
            raises(
                TransformError,
                act,
                "does nothing",
                "`where` matches none of 1 tensors; the nearest:\n  params['w']",
                "leave `where` out",
            )
        assert i or all(fz.compile(transform(where=where)(step), mesh, backend="eager").init(VECTOR) for where in MEANT)
    running = fz.train_step(
        lambda p, x: (squares(p, x), {}), optim.sgd(0.1), mutable=lambda path, leaf: "runing" in path
    )
    params = {"w": VECTOR["w"], **{name: torch.ones(1) for name in ("a", "b", "c", "d", "e", "running_mean")}}
    raises(
        FzeroValueError,
        lambda: running(running.init(params), ROWS),
        "no tensor is mutable",
        "none of 7 tensors; the nearest:\n  params['running_mean']",
    )

    def traced(p, x):
        raise AssertionError("checked before the trace, which may take minutes")

    step = fz.train_step(traced, optim.sgd(0.1))
    cut = fz.accumulate(step, 2, replicated=lambda path, leaf: "mask" in path)
    refused = lambda x, *words: raises(FzeroValueError, lambda: fz.lower(cut, ONE, VECTOR, x), *words)  # noqa: E731
    refused(ROWS, "all tensors of the batch are already split", "none of 1 tensors")
    tied = "batch['mask'] and batch['rows'] are one tensor: `replicated` matches batch['mask'], not batch['rows']"
    refused({"mask": ROWS, "rows": ROWS}, "`replicated` matches only some of its paths", tied, "give x.clone()")


def test_a_predicate_answers_true_or_false() -> None:
    for answer in ("no", None, 1, torch.tensor(True)):
        says = lambda path, leaf, answer=answer: answer  # noqa: E731
        steps = [
            fz.data_parallel(make(trainable=says)),
            fz.data_parallel(make(mutable=says)),
            *(t(where=says)(fz.data_parallel(STEP)) for t in (fz.shard_params, fz.shard_grads, fz.fp8)),
            fz.mixed_precision("bf16", where=says)(fz.data_parallel(STEP)),
            fz.offload("cpu", where=says)(fz.data_parallel(STEP)),
            fz.accumulate(2, replicated=says)(fz.data_parallel(STEP)),
        ]
        for step, name in zip(
            steps, ["trainable", "mutable", "where", "where", "where", "where", "where", "replicated"], strict=True
        ):
            with pytest.raises(FzeroTypeError) as caught:
                fz.lower(step, MESH, PARAMS, BATCH)
            text = str(caught.value)
            assert (
                f"`{name}` does not return a bool\n  {'batch' if name == 'replicated' else 'params['}" in text
                and "Fix: return a bool" in text
            ), text
