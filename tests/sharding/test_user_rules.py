"""Tests `fz.sharding_rule`: the sharding rules of users' own operators."""

from __future__ import annotations

import pytest
import torch

import fzero as fz


@torch.library.custom_op("fzero_tests::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@project.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


@torch.library.custom_op("fzero_tests::project_backward", mutates_args=())
def project_backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad @ w.T, torch.einsum("bsd,bse->de", x, grad)


@project_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _saved(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


project.register_autograd(lambda ctx, grad: project_backward(grad, *ctx.saved_tensors), setup_context=_saved)

FORWARD = "b s d, d e -> b s e"


def params() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"up": torch.randn(8, 16) / 3, "down": torch.randn(16, 8) / 4}


def batch() -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def loss(p, x):
    return (project(project(x, p["up"]).relu(), p["down"]) - x).square().mean()


def step():
    return fz.tensor_parallel(fz.train_step(loss, fz.optim.adamw(1e-2)), rules={"up": 1, "down": 0})


def lowered() -> str:
    return str(fz.lower(step(), fz.AbstractMesh(model=2), params(), batch()))


def test_an_operator_with_a_rule_is_sharded() -> None:
    assert "computed unsharded" in lowered()
    fz.sharding_rule("fzero_tests::project", FORWARD)
    # The gradient of x is reduced over e, that of w over b and s: each result lacks other labels than the other.
    fz.sharding_rule(torch.ops.fzero_tests.project_backward.default, "b s e, b s d, d e -> b s d, d e", blocked="bs")
    assert "computed unsharded" not in lowered()
    fz.testing.check_equivalent(step(), params(), batch(), fz.AbstractMesh(model=2), steps=3)


@pytest.mark.parametrize(
    ("labels", "options", "said"),
    [
        ("b s d, d e", {}, "no '->'"),
        ("b s d -> b s d", {}, "1 groups of labels for 2 tensor arguments"),
        ("b s d, d e -> b s f", {}, "label 'f' of a result"),
        ("b b d, d e -> b e", {}, "'b' occurs twice"),
        (FORWARD, {"blocked": ["z"]}, "label 'z'"),
        (FORWARD, {"reduce": "mean"}, "reduce='mean'"),
    ],
)
def test_labels_that_do_not_fit_the_schema(labels: str, options: dict, said: str) -> None:
    with pytest.raises(fz.errors.FzeroValueError, match=said):
        fz.sharding_rule("fzero_tests::project", labels, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((print, FORWARD), "op=<built-in function print>: not an operator"),
        (("fzero_tests::project", ["b s d", "b s e"]), "labels=.*: a string such as"),
        (("fzero_tests::project", FORWARD, 3), "blocked=3: a collection of labels"),
    ],
)
def test_arguments_of_another_type(given: tuple, said: str) -> None:
    op, labels, *blocked = given
    with pytest.raises(fz.errors.FzeroTypeError, match=rf"{said}(.|\n)*Fix: "):
        fz.sharding_rule(op, labels, **({"blocked": blocked[0]} if blocked else {}))


def test_an_operator_that_writes_its_argument() -> None:
    with pytest.raises(fz.errors.FzeroValueError, match="it writes its arguments"):
        fz.sharding_rule(torch.ops.aten.relu_, "a -> a")


def test_an_operator_that_does_not_exist() -> None:
    with pytest.raises(fz.errors.FzeroValueError, match="there is no such operator"):
        fz.sharding_rule("fzero_tests::nothing", FORWARD)


def test_labels_that_do_not_fit_the_shapes() -> None:
    @torch.library.custom_op("fzero_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1)

    twice.register_fake(lambda x: x.new_empty(*x.shape[:-1], 2 * x.shape[-1]))
    fz.sharding_rule("fzero_tests::twice", "b s d -> b s d")

    def doubled(p, x):
        y = project(x, p["up"])
        return y.sum() + twice(y.detach()).sum()

    sharded = fz.tensor_parallel(fz.train_step(doubled, fz.optim.sgd(0.1)), rules={"up": 1})
    with pytest.raises(fz.errors.FzeroValueError, match=r"test_user_rules.py:(.|\n)*'d' is 16 .* and 32 in"):
        fz.lower(sharded, fz.AbstractMesh(model=2), params(), batch())
    fz.sharding_rule("fzero_tests::twice", "b s -> b s")
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"test_user_rules.py:(.|\n)*has 3 dims, and .* have 2(.|\n)*Fix: "
    ):
        fz.lower(sharded, fz.AbstractMesh(model=2), params(), batch())
