"""A block is a function of values: which of its arguments and results are one tensor, and the modes of autograd, are
part of its call; where a tensor comes from or lies is not, and asking for it is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, TraceError

PARAMS = {"v": torch.linspace(0.5, 1.5, 4), "w": torch.linspace(-1, 1, 16).reshape(4, 4)}
BATCH = torch.linspace(-1, 2, 8).reshape(2, 4)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@fz.block
def attention(p: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ p["w"]) * (2.0 if q is k else k)


@fz.block
def first(p: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x + y + p["v"]


@fz.block
def branches(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p * (2.0 if torch.is_grad_enabled() else 3.0)


@fz.block
def needing(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] * (2.0 if x.requires_grad else 3.0)


@fz.block
def enabled(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return torch.tanh(x @ p["w"])


@fz.block
def score(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        (g,) = torch.autograd.grad((x @ p["w"]).square().sum(), x)
    return g


@fz.block
def hooked_inside(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    y.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return y * (1.0 if y.is_leaf else y.storage_offset() + y.as_strided((2, 4), (4, 1)))


@fz.block
def jacobians(p: Any, x: torch.Tensor) -> torch.Tensor:
    rows = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(row @ p["w"])))(x).sum(1)
    return rows * torch.func.grad(lambda z: torch.tanh(z @ p["w"]).sum())(x)


def functional_derivatives_inside(p: Any, x: torch.Tensor) -> torch.Tensor:
    return jacobians(p, jacobians(p, x * p["v"])).square().mean()


def one_tensor_and_two(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x * p["v"]
    return (attention(p, h, h) + attention(p, h, h.clone())).square().sum()


def a_parameter_as_argument(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (attention(p, p["w"], p["w"]) + attention(p, p["w"], p["w"] * 1)).square().sum() * x.mean()


def one_result_is_an_argument(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x * p["v"]
    y, z = first(p, h, h)
    y.mul_(3.0)
    return (h * z).sum() * (2.0 if y is h else 1.0)


def an_argument_through_no_grad(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x * p["v"]
    with torch.no_grad():
        y, z = first(p, h, x)
    return (y * y * z).sum()


def the_mode_of_autograd(p: Any, x: torch.Tensor) -> torch.Tensor:
    frozen = torch.ones(4, 4)
    with torch.no_grad():
        y = branches(frozen, x)
    return ((y + branches(frozen, x)) * p["v"]).sum()


def an_input_that_requires_a_gradient(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x * p["v"]
    with torch.no_grad():
        y = needing(p, h)
    return (y * needing(p, h) * needing(p, x)).sum()


def a_gradient_asked_for_inside(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x * p["v"]
    with torch.no_grad():
        y, g = enabled(p, h), score(p, h)
    return (y * y * g).sum()


def hooks_of_what_is_made_inside(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x * p["v"]
    return (hooked_inside(p, h) * h).sum()


SAME = [
    functional_derivatives_inside,
    one_tensor_and_two,
    a_parameter_as_argument,
    one_result_is_an_argument,
    an_argument_through_no_grad,
    the_mode_of_autograd,
    an_input_that_requires_a_gradient,
    a_gradient_asked_for_inside,
    hooks_of_what_is_made_inside,
]


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.Tensor.sum else result


def compiled(loss: Loss, transform: Callable[..., Any] = lambda step: step) -> Any:
    return fz.compile(transform(fz.train_step(loss, optim.sgd(0.1))), fz.make_mesh(), backend="eager")


@pytest.mark.full(keep=["an_argument_through_no_grad", "one_result_is_an_argument", "a_parameter_as_argument"])
@pytest.mark.parametrize("loss", SAME, ids=lambda f: f.__name__)
def test_trains_as_in_pytorch(loss: Loss) -> None:
    leaves = {k: v.clone().requires_grad_() for k, v in PARAMS.items()}
    value = loss(leaves, BATCH.clone())
    value.backward()
    for transform in (lambda step: step, fz.remat("full"), fz.accumulate(1)):
        train = compiled(loss, transform)
        state, metrics = train(train.init(PARAMS), BATCH)
        torch.testing.assert_close(metrics["loss"], value.detach())
        for name, leaf in leaves.items():
            torch.testing.assert_close(
                state.params[name], leaf.detach() if leaf.grad is None else leaf.detach() - 0.1 * leaf.grad
            )


def test_an_argument_given_twice_is_one_tensor_after_its_cast() -> None:
    """A block's arguments are cast where it begins, to the dtype of its parameters."""

    @fz.block
    def told(p: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        assert q.dtype == p["w"].dtype == torch.bfloat16
        return (q @ p["w"]) * (2.0 if q is k else 3.0)

    train = compiled(
        lambda p, x: told(p, x, x).float().mean() - told(p, x, x.clone()).float().mean(), fz.mixed_precision("bf16")
    )
    _, metrics = train(train.init({"w": torch.eye(4)}), torch.ones(2, 4))
    assert metrics["loss"] == 2.0 - 3.0


ASKED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "is_leaf": lambda p, x: x if x.is_leaf else x * 2,
    "grad_fn": lambda p, x: x if x.grad_fn is None else x * 2,
    "register_hook": lambda p, x: (x.register_hook(lambda g: g * 2), x * 2)[1],
    "_version": lambda p, x: x * (1 + x._version),
    "storage_offset": lambda p, x: x * (1 + x.storage_offset()),
    "as_strided": lambda p, x: x.as_strided((2, 2), (2, 1), 0),
    "untyped_storage": lambda p, x: x * x.view(-1).untyped_storage().nbytes(),
}


@pytest.mark.parametrize("what", ASKED)
def test_asking_where_an_argument_comes_from_or_lies_is_refused_by_name(what: str) -> None:
    run = fz.block(ASKED[what])
    train = compiled(lambda p, x: run(p, (x * p["v"])[1:]).sum())
    with pytest.raises(
        TraceError,
        match=rf"(?s)block lambda: reads (the memory address|which function).*\({what}\)\n.*test_block_values.py:\d+: "
        rf".*{what}.*x: float32\[(1, )?4\]\nFix: ",
    ):
        train(train.init(PARAMS), BATCH)


def test_taking_the_gradient_from_an_argument_is_refused() -> None:
    stops = fz.block(lambda p, x: x.detach_() @ p["w"])
    losses: list[Loss] = [
        lambda p, x: stops(p, x * p["v"]).sum(),
        lambda p, x: (x @ p["w"].requires_grad_(False) * p["v"]).sum(),
    ]
    for loss in losses:
        train = compiled(loss)
        with pytest.raises(
            TraceError, match=r"(?s)takes that from what it is given.*Fix: x.detach\(\) stops a gradient"
        ):
            train(train.init(PARAMS), BATCH)


def test_asking_where_a_batch_or_a_result_lies_is_refused_by_name() -> None:
    part = fz.block(lambda p, x: (x * p["v"])[1:])
    losses: list[Loss] = [
        lambda p, x: (x * p["v"]).sum() * x.storage_offset(),
        lambda p, x: part(p, x).as_strided((4,), (1,), 0).sum(),
    ]
    for loss in losses:
        train = compiled(loss)
        with pytest.raises(
            TraceError,
            match=r"(?s)train_step: reads the memory address.*test_block_values.py:\d+.*Fix: index or view it",
        ):
            train(train.init(PARAMS), BATCH)


def test_attributes_of_tensors_that_cross_a_border_are_refused_by_name() -> None:
    scaled = fz.block(lambda p, x: x * p["v"] * getattr(x, "scale", 1.0))

    def given(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h.scale = 3.0  # type: ignore[attr-defined]
        return scaled(p, h).sum()

    @fz.block
    def marks(p: Any, x: torch.Tensor) -> torch.Tensor:
        x.scale = 3.0  # type: ignore[attr-defined]
        return x * p["v"]

    @fz.block
    def marked(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * p["v"]
        y.scale = 3.0  # type: ignore[attr-defined]
        return y

    cases: dict[str, Loss] = {"is given .*x.scale": given, "leaves behind .*x.scale": lambda p, x: marks(p, x).sum()}
    cases["leaves behind .*result.scale"] = lambda p, x: marked(p, x).sum()
    for text, loss in cases.items():
        train = compiled(loss)
        with pytest.raises(TraceError, match=rf"(?s)block \w+: {text}\nFix: pass what the attribute says"):
            train(train.init(PARAMS), BATCH)

    train = compiled(lambda p, x: (x * p["v"]).sum() * getattr(x, "scale", 1.0))
    batch = BATCH.clone()
    batch.scale = 3.0  # type: ignore[attr-defined]
    state, leaf = train.init(PARAMS), torch.ones(4, requires_grad=True)
    for wrong, text in (
        (batch, "batch.scale"),
        (BATCH.as_subclass(Doubling), "batch is a Doubling"),
        (BATCH * leaf, "batch requires a gradient"),
    ):
        for call in (train, lambda state, x: train.step(train.step.init(PARAMS), x)):
            with pytest.raises(
                FzeroTypeError,
                match=(
                    rf"tensors of a batch are plain values(?s:.*)\n "
                    rf" {text}\nFix: x.detach"
                ),
            ):
                call(state, wrong)
    assert train(state, {**state.params}["w"][:2].detach())  # what this library notes on a state's tensors
    assert train(state, state.params["w"])
    with torch.no_grad():
        assert train(state, leaf)
