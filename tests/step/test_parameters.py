"""Trees of parameters: which leaves and names they may have, what trains, how they begin."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from rejections import BATCH, META, ONE, PARAMS, ROWS, compiled, everywhere, lower, make, raises

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError, TraceError

GLOBAL = torch.ones(3)


TREES = {
    "number": ({"w": 1.0}, "params['w']: float"),
    "string": ({"w": PARAMS["w"], "b": [PARAMS["b"], "text"]}, "params['b'][1]: str"),
    "numpy": ({"w": PARAMS["w"].numpy()}, "params['w']: ndarray"),
    "sparse": ({"w": PARAMS["w"].to_sparse()}, "params['w']: torch.sparse_coo"),
    "none": ({"w": None}, "there are none"),
    "empty": ({}, "there are none"),
    "function of": (lambda key: {"w": 1.0, "b": {"c": "x"}}, "params['b']['c']: str"),
    "module": (torch.nn.Linear(2, 2), "Linear is a module"),
}


@pytest.mark.parametrize("name", TREES)
def test_parameters_that_are_not_tensors(name: str) -> None:
    params, word = TREES[name]
    everywhere(FzeroTypeError, make(), word, params=params)


def test_nothing_to_train() -> None:
    everywhere(FzeroValueError, make(trainable=lambda path, leaf: False), "no trainable parameters", "trainable")
    everywhere(
        FzeroValueError,
        make(lambda p, x: p["w"].sum()),
        "no trainable parameters",
        params={"w": torch.ones(3, dtype=torch.int64)},
    )
    frozen = make(lambda p, x: (x @ p["w"]).mean(), trainable=lambda path, leaf: path == "params['b']")
    everywhere(TraceError, frozen, "does not depend on any trainable parameter")


def test_an_init_function_that_draws_elsewhere() -> None:
    def init(key: torch.Tensor) -> Any:
        return {"w": torch.randn(4, 3)}

    raises(TraceError, lambda: lower(make(lambda p, x: (x @ p["w"]).mean()), params=init), "fzero.init", "fz.random")
    raises(TraceError, lambda: compiled(make()).init(init), "aten.randn", "fz.random")
    raises(
        TraceError, lambda: compiled(make()).init(lambda key: {"w": GLOBAL * 2}), "global variable GLOBAL", "float32[3]"
    )


@pytest.mark.full(keep=["f_0-names4", "f_0-names0", "scalars_0-names4"])
@pytest.mark.parametrize(
    "names",
    [
        ("class", "lambda", "None"),
        ("step", "params", "batch", "key"),
        ("wait", "cast", "micro", "train"),
        ("0", "a b", "a-b", "a_b", "²"),
        ("f", "f_0", "d_f_0"),
    ],
)
@pytest.mark.parametrize("block", ["f", "wait", "train", "scalars_0", "f_0"])
def test_any_name_is_a_name(names: tuple[str, ...], block: str) -> None:
    """Leaves and blocks may be called like keywords, like each other, or like what a program is made of."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p

    f.__name__ = block
    run = fz.block(f)
    params = {name: PARAMS["w"] + i for i, name in enumerate(names)}
    step = make(lambda p, x: sum((run(q, x).mean() for q in p.values()), torch.zeros(())))
    expected, _ = step(step.init(params), BATCH)
    train = compiled(fz.accumulate(step, 2))
    state, _ = train(train.init(params), BATCH)
    torch.testing.assert_close(state.params, expected.params)
    program = lower(fz.accumulate(step, 2), params=params).program
    made = [v.name for op, _ in program.walk() for v in op.out]
    assert all(n.isidentifier() for n in (*made, *program.functions)) and not set(made) & set(program.functions)
    compile(fz.show(program, fold=False), "program", "exec")


def test_complex_leaves_that_would_be_trained():
    params = {"w": torch.ones(4, 3, dtype=torch.complex64), "b": torch.zeros(3)}
    loss = lambda p, x: ((x.to(torch.complex64) @ p["w"]).abs() + p["b"]).square().mean()  # noqa: E731
    step = fz.train_step(loss, optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for act in (lambda: step.init(params), lambda: train.init(params), lambda: fz.lower(step, ONE, params, ROWS)):
        raises(
            FzeroTypeError,
            act,
            "complex parameters cannot be trained",
            "params['w']: complex64[4, 3]",
            "view_as_real",
            "not leaf.is_complex()",
        )

    frozen = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: not leaf.is_complex())
    real = fz.train_step(lambda p, x: loss({**p, "w": torch.view_as_complex(p["w"])}, x), optim.sgd(0.1))
    for step, given in ((frozen, params), (real, {**params, "w": torch.view_as_real(params["w"]).clone()})):
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        want, got = step(step.init(given), ROWS)[0].params, train(train.init(given), ROWS)[0].params
        assert all(torch.allclose(want[n], got[n], atol=1e-6) for n in given) and torch.equal(
            want["w"], given["w"]
        ) == (step is frozen)


def test_keys_that_cannot_be_written_down():
    class Kind(enum.Enum):
        A = 1

    train = fz.compile(
        fz.train_step(lambda p, x: (x @ p[Kind.A]).square().mean(), optim.sgd(0.1)),
        fz.make_mesh(data=1),
        backend="eager",
    )
    raises(FzeroTypeError, lambda: train.init({Kind.A: torch.ones(4)}), "a key that is neither a text nor a number")


def test_init_of_other_things() -> None:
    """A function without a key, parameters without values, a key that is none."""
    train = compiled(make())
    init = lambda: PARAMS  # noqa: E731
    raises(FzeroError, lambda: make().init(init), "params=<lambda>(): must be a function of (key)")
    raises(FzeroError, lambda: train.init(lambda key: META, 0), "fzero.init: a key is a tensor, not int")
    raises(FzeroError, lambda: train.init(META), "fzero.init: ", "\n  params['w']: float32[4, 4] on the meta device")
