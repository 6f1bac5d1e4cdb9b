"""What a trace asks of tensors' values: those of literals are known, conditions to raise become NaN, and whatever else
is asked is refused, with who asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from raising import a_conjunction, an_alternative, an_assertion, asserted, branches, either, not_known_at_first, several
from test_operations import refused, trains_as_pytorch, wide
from torch import nn

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError
from fzero.trace.guards.raise_conditions import _test

W, X = {"w": wide(4, 4)}, wide(8, 4)


# --- values of literals ---


def masks(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, upper = x @ p["w"], torch.ones(8, 4).triu() > 0
    rows = torch.zeros(8)
    rows[1:4] = 1  # in place, through a view
    i, j = torch.nonzero(upper, as_tuple=True)
    return torch.cat(
        [
            y[upper],
            y.masked_select(~upper),
            y[:, torch.tensor([True, False, True, False])].flatten(),
            y[rows > 0].flatten(),
            y[i, j],
        ]
    )


def numbers(p: Any, x: torch.Tensor) -> torch.Tensor:
    sizes = torch.arange(1, 4)
    parts = (x @ p["w"]).split([*sizes.tolist(), int(sizes.max()) - 1])
    return torch.stack([part.sum() * float(sizes.double().mean()) for part in parts])


def statistics(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    return torch.cov(y.T) + torch.corrcoef(y.T) + torch.combinations(y[0])[:4, :1] + len(torch.combinations(y[0, :1]))


# --- conditions under which a function raises ---


def likelihoods(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, of = torch.tanh(x @ p["w"]), torch.distributions
    total = of.Normal(y, F.softplus(y)).log_prob(x).mean() + of.Categorical(logits=y).log_prob(torch.zeros(8)).mean()
    total = (
        total
        + of.kl_divergence(of.Gamma(y.exp(), 1.0), of.Gamma(2.0, 1.0)).mean()
        + of.Dirichlet(y.exp()).log_prob(x.softmax(-1)).mean()
    )
    return (
        total
        + F.gaussian_nll_loss(y, x, y.square() + 0.5)
        + nn.GaussianNLLLoss(full=True, reduction="sum")(y[0], x[0], torch.ones(1))
    )


def in_evaluation(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rrelu(x @ p["w"], training=False) + F.dropout(x @ p["w"], 0.5, training=False)


@pytest.mark.full(keep=["in_evaluation", "asserted", "numbers"])
@pytest.mark.parametrize(
    "fn", [masks, numbers, statistics, likelihoods, asserted, several, in_evaluation], ids=lambda fn: fn.__name__
)
def test_trains_as_pytorch(fn):
    trains_as_pytorch(fn, W, X)


def negative_variance(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(x @ p["w"], x, x @ p["w"] - 100)


def no_scale(p: Any, x: torch.Tensor) -> torch.Tensor:
    scale = x @ p["w"]
    # whatever another test made the default
    return torch.distributions.Normal(scale, scale, validate_args=True).log_prob(x)


def singular(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv((x[:4] @ p["w"]) * 0)


def indefinite(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    return torch.linalg.cholesky(torch.stack([y.T @ y + torch.eye(4), y.T @ y - 3 * torch.eye(4)]))


def test_distributions_do_not_check_arguments_while_a_step_is_traced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile sets it to False
    seen: list[bool] = []

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ p["w"])
        seen.append(torch.distributions.Distribution._validate_args)
        return torch.distributions.Normal(y, F.softplus(y) + 0.5).log_prob(x).mean()

    trains_as_pytorch(fz.block(loss), W, X)
    lowered = fz.lower(fz.train_step(loss, optim.sgd(0.1)), fz.AbstractMesh(data=1), W, X)
    assert not lowered.raises and False in seen and torch.distributions.Distribution._validate_args
    with pytest.raises(ZeroDivisionError):
        fz.lower(fz.train_step(lambda p, x: 1 / 0, optim.sgd(0.1)), fz.AbstractMesh(data=1), W, X)
    assert torch.distributions.Distribution._validate_args


RAISING = {
    negative_variance: "gaussian_nll_loss",
    no_scale: "Normal",
    an_assertion: "assert",
    an_alternative: "assert",
    a_conjunction: "if ",
}
"""Functions that raise under a condition, and what the line has."""


@pytest.mark.parametrize("fn", [*RAISING, singular, indefinite], ids=lambda fn: fn.__name__)
def test_where_pytorch_raises_a_program_raises_or_is_not_finite(fn):
    w = W["w"].clone().requires_grad_()
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        fn({"w": w}, X)
    for f in (fn, fz.block(fn)):
        train = fz.compile(
            fz.train_step(lambda p, x, f=f: f(p, x).square().mean(), optim.sgd(0.1)),
            fz.make_mesh(data=1),
            backend="eager",
        )
        state = train.init(W)
        if fn not in RAISING:
            with pytest.warns(RuntimeWarning, match="parameters are not finite any more"):
                state, metrics = train(state, X)
            assert metrics["loss"].isnan() and not metrics["finite"] and state.params["w"].isnan().any()
        else:
            with pytest.raises(FzeroValueError, match=rf"function raises.*\n  .*{RAISING[fn]}.*\nFix: look at"):
                train(state, X)
            with pytest.raises(FzeroValueError, match="the loss function raises"):
                train(state, X)  # it is of no more use
        evaluate = fz.compile(fz.eval_step(f), fz.make_mesh(data=1), backend="eager")
        assert evaluate(W, X).isnan().any()


def test_a_matrix_of_a_batch_that_is_singular_leaves_the_others():
    fn = lambda p, x: torch.linalg.solve(torch.stack([p["w"], p["w"] * 0]), x[:4])  # noqa: E731
    evaluate = fz.compile(fz.eval_step(fn), fz.make_mesh(data=1), backend="eager")
    first, second = evaluate(W, X)
    assert torch.allclose(first, torch.linalg.solve(W["w"], X[:4])) and second.isnan().all()


# --- what is refused ---


def either_way(p: Any, x: torch.Tensor) -> Any:
    y = x @ p["w"]
    if (y > 0).all():
        y = y + 1
    return y


def caught(p: Any, x: torch.Tensor) -> Any:
    y = x @ p["w"]
    try:
        if (y > 0).any():
            raise ValueError
    except ValueError:  # as which a refusal would pass
        y = y * 2
    return y


def cumulative_average(p: Any, x: torch.Tensor) -> Any:
    norm = nn.BatchNorm1d(4, momentum=None)
    given = {
        "running_mean": p["mean"].clone(),
        "running_var": p["var"].clone(),
        "num_batches_tracked": p["rows"][0, 0].long(),
    }
    return torch.func.functional_call(norm, {"weight": p["w"][0], "bias": p["w"][1], **given}, (x @ p["w"],))


def written_from_data(p: Any, x: torch.Tensor) -> Any:
    rows = torch.zeros(8)
    rows[:4] = x[:4, 0]
    return (x @ p["w"])[rows > 0]


def replaced(p: Any, x: torch.Tensor) -> Any:
    y = x @ p["w"]
    return torch.empty(0).set_(y.untyped_storage()) * p["w"].sum()


REFUSED: dict[Callable[..., Any], tuple[str, ...]] = {
    either_way: ("needs the value", "if (y > 0).all():"),
    caught: ("needs the value", "if (y > 0).any():"),
    cumulative_average: (
        "return torch.func.functional_call(",
        "asked by ",
        "batchnorm.py:",
        "float(self.num_batches_tracked)",
        "momentum=0.1",
    ),
    written_from_data: ("for a shape", "[rows > 0]"),
    lambda p, x: torch.linalg.lstsq(x, x @ p["w"]).solution: ("torch.linalg.lstsq(", "torch.linalg.pinv(a) @ b"),
    lambda p, x: nn.utils.rnn.pack_padded_sequence((x @ p["w"]).view(2, 4, 4), [4, 2], batch_first=True).data: (
        "padded sequences, and mask",
    ),
    replaced: ("whose memory was replaced", "set_ here: ", "x.copy_(y)"),
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_refused_by_name(fn):
    refused(fn, "test_tensor_values.py:", *REFUSED[fn])


def test_the_ways_out_work():
    """Of the refusals above."""

    def instead(p: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = x @ p["w"]
        norm = nn.BatchNorm1d(4, momentum=0.1)
        buffers = {n: b.clone() for n, b in norm.named_buffers()}
        normed = torch.func.functional_call(norm, {"weight": p["w"][0], "bias": p["w"][1], **buffers}, (y,))
        return [
            torch.linalg.pinv(x) @ y,
            normed,
            torch.where((y > 0).all(), y + 1, y),
            torch.where((x[:, 0] > 0)[:, None], y, 0),
        ]

    trains_as_pytorch(lambda p, x: instead(p | {"n": p["n"]}, x)[p["n"].dim() :], {**W, "n": wide(1)[0]}, X)


# --- which branches raise ---


def test_the_branch_that_does_not_raise():
    import dis

    tests = [i.offset for i in dis.get_instructions(branches.__code__) if i.opname.startswith("POP_JUMP")]
    found = [_test(branches.__code__, offset) for offset in tests[:5]]
    assert [test and test.answer for test in found] == [False, True, True, None, None]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (not_known_at_first, ("raises if several tests fail", "or y.dim() == 3", "assert flag or x.all()")),
        (either, ("needs the value", "if (y > 1e6).all():")),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_tests_that_decide_more_than_whether_a_function_raises_are_rejected(fn: Any, words: tuple[str, ...]):
    refused(fn, "raising.py:", *words)
