"""The loss terms of the example against their formulas, and the wrong answer that averaging means gives where
fz.weighted is exact."""

from __future__ import annotations

import copy
import io
import math
import operator
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rejections import BATCH, ONE, PARAMS, ROWS, STEP, Net, compiled, everywhere, loss_fn, make, raises

import fzero as fz
from fzero import optim, tree
from fzero.errors import FzeroError, FzeroTypeError, TraceError

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(
        sys,
        "argv",
        ["train_gpt.py", "--layers=1", "--width=16", "--heads=2", "--zero=0", "--accumulate=1", "--dtype=fp32"],
    )
    import train_gpt

    return train_gpt


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
def test_the_examples_terms_are_their_formulas(train_gpt, smoothing, z_loss):
    params, key = train_gpt.init_gpt(fz.random.key(0), layers=1, width=16), fz.random.key(1)
    tokens = fz.random.bits(key, (2, 3, 9)) % train_gpt.VOCAB
    loss, means = train_gpt.gpt(params, *tokens, heads=2, smoothing=smoothing, z_loss=z_loss)
    logits = train_gpt.gpt(params, tokens[0], heads=2).double().flatten(0, 1)
    target = F.one_hot(tokens[1].flatten(), train_gpt.VOCAB).double()
    smooth = target * (1 - smoothing) + smoothing / train_gpt.VOCAB
    normaliser = logits.exp().sum(-1).log()
    want = (normaliser - (smooth * logits).sum(-1)).mean() + z_loss * (normaliser**2).mean()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert means["entropy"].item() == pytest.approx((normaliser - (target * logits).sum(-1)).mean().item(), rel=1e-5)
    assert means["accuracy"].item() == pytest.approx((logits.argmax(-1) == tokens[1].flatten()).double().mean().item())


def test_the_examples_flags_reach_the_step(train_gpt, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [*sys.argv, "--label-smoothing=0.1", "--z-loss=1e-3", "--params=bf16", "--rounding=nearest"]
    )
    sys.argv += ["--state-dtype=int8", "--fp8=row"]
    import console

    args = console.parse_args(None)
    step, _, init, _ = train_gpt.training(args)
    assert "rounding='nearest'" in str(step.transforms) and "Fp8(scales='row'" in str(step.transforms)
    batch = fz.random.bits(fz.random.key(1), (2, 4, 16)) % train_gpt.VOCAB
    params = init(fz.random.key(0))
    _, metrics = step(step.init(params), tuple(batch))
    want, _ = train_gpt.gpt(params, *batch, heads=2, smoothing=0.1, z_loss=1e-3)
    assert (
        metrics["loss"].item() == pytest.approx(want.item(), rel=1e-6) and metrics["loss"] > metrics["aux"]["entropy"]
    )
    assert any(x.dtype == torch.uint8 for x in fz.tree.leaves(step.init(params).opt_state))


def ragged(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses of tokens that are not padding, their number, and how many of them are below 1."""
    losses = (batch["x"] @ params["w"] - 1).square() * batch["real"]
    return losses.sum(), batch["real"].sum(), ((losses < 1) & batch["real"]).sum().float()


def by_means(params: Any, batch: Any) -> Any:
    total, count, low = ragged(params, batch)
    return total / count, {"low": low / count}


def weighted(params: Any, batch: Any) -> Any:
    total, count, low = ragged(params, batch)
    return fz.weighted(total, count), {"low": fz.weighted(low, count)}


def test_means_of_ragged_micro_batches_are_wrong_and_weighted_ones_exact():
    """Gradients, loss and metrics against float64 over all tokens; rows have 1 to 12 of them."""
    lengths = torch.tensor([12, 1, 2, 1, 9, 1, 1, 3])
    batch = {
        "x": fz.random.normal(fz.random.key(0), (8, 12, 5)) * lengths[:, None, None] ** 0.5,
        "real": torch.arange(12) < lengths[:, None],
    }
    w = fz.random.normal(fz.random.key(1), (5,))
    exact = w.double().requires_grad_()
    total, count, low = ragged({"w": exact}, {**batch, "x": batch["x"].double()})
    loss, (grad,) = (total / count).item(), torch.autograd.grad(total / count, exact)

    def errors(loss_fn: Any, num: int) -> dict[str, float]:
        train = fz.compile(
            fz.accumulate(fz.train_step(loss_fn, optim.sgd(1.0), has_aux=True), num), fz.make_mesh(), backend="eager"
        )
        state, metrics = train(train.init({"w": w}), batch)
        update = (w - state.params["w"]).double()
        return {
            "loss": abs(float(metrics["loss"]) / loss - 1),
            "gradient": float((update - grad).norm() / grad.norm()),
            "low": abs(float(metrics["aux"]["low"]) - float(low / count)),
        }

    for num in (1, 2, 4, 8):
        assert max(errors(weighted, num).values()) < 1e-5, num
    assert max(errors(by_means, 1).values()) < 1e-5
    assert min(errors(by_means, 8).values()) > 0.05  # not rounding: another loss


@pytest.mark.parametrize("swapped", [False, True], ids=["", "reflected"])
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
@pytest.mark.parametrize("other", [0.1, torch.tensor(0.1), fz.weighted(torch.tensor(1.0), 2), (1.0, 2.0)])
def test_arithmetic_of_a_weighted_result_is_refused(op, other, swapped):
    ours = fz.weighted(torch.tensor(6.0), 3)
    with pytest.raises(fz.errors.FzeroTypeError, match=r"(?s)^fzero.weighted: .*Fix: .*fz.weighted\(total \+ 0.1"):
        op(other, ours) if swapped else op(ours, other)


def test_a_term_added_to_the_total_of_a_weighted_loss_is_exact():
    """As the message says, and in `aux` a sum of two is refused as well."""
    batch = {"x": torch.randn(8, 12, 5), "real": torch.arange(12) < torch.tensor([12, 1, 2, 1, 9, 1, 1, 3])[:, None]}

    def penalized(params: Any, batch: Any) -> Any:
        total, count, _ = ragged(params, batch)
        return fz.weighted(total + 0.1 * params["w"].square().sum() * count, count)

    def added(params: Any, batch: Any) -> Any:
        loss, aux = weighted(params, batch)
        return loss, {"both": aux["low"] + aux["low"]}

    states = []
    for num in (1, 4):
        step = fz.accumulate(fz.train_step(penalized, optim.sgd(1.0)), num)
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        states.append(train(train.init({"w": torch.ones(5)}), batch)[0].params["w"])
    torch.testing.assert_close(*states)
    step = fz.train_step(added, optim.sgd(1.0), has_aux=True)
    with pytest.raises(fz.errors.FzeroTypeError, match="does not support arithmetic"):
        step(step.init({"w": torch.ones(5)}), batch)


IGNORED = -100


def _of_targets(reduction: str, weighted: bool) -> Any:
    """The mean cross entropy of the targets that are not ignored."""

    def loss(params: Any, batch: Any) -> Any:
        x, targets = batch
        logits = (torch.tanh(x @ params["up"]) @ params["head"]).float()
        found = F.cross_entropy(logits, targets, reduction=reduction)  # type: ignore[arg-type]
        if reduction == "none":  # by a mask, whose gradients are 0 / 0 without any target
            found = (found * (targets != IGNORED)).sum()
        return fz.weighted(found, (targets != IGNORED).sum()) if weighted else found

    return loss


def _decayed(*, clip: bool = False, skip: bool = False) -> Any:
    optimizer = optim.adamw(1e-2, weight_decay=0.1)
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optimizer) if clip else optimizer
    return optim.skip_nonfinite(optimizer) if skip else optimizer


EMPTY: dict[str, tuple[Any, fz.AbstractMesh, tuple[Any, ...], dict[str, bool]]] = {
    "one process": (("sum", True), fz.AbstractMesh(data=1), (), {}),
    "0 / 0 in the backward": (("none", True), fz.AbstractMesh(data=1), (fz.accumulate(2),), {}),
    "clipped": (("sum", True), fz.AbstractMesh(data=1), (fz.accumulate(2, schedule="layerwise"),), {"clip": True}),
    "bf16": (("sum", True), fz.AbstractMesh(data=1), (fz.mixed_precision("bf16"),), {}),
    "fp16": (("none", True), fz.AbstractMesh(data=1), (fz.mixed_precision("fp16"),), {}),
    "ZeRO-1": (("sum", True), fz.AbstractMesh(data=2), (fz.shard_opt_state(),), {}),
    "ZeRO-3": (("none", True), fz.AbstractMesh(data=2), (fz.shard_params(), fz.accumulate(2)), {"clip": True}),
    "a mean that is NaN": (("mean", False), fz.AbstractMesh(data=1), (), {"skip": True}),
    "a mean that is NaN in fp16": (("mean", False), fz.AbstractMesh(data=1), (fz.mixed_precision("fp16"),), {}),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_step_whose_labels_are_all_ignored_changes_neither_parameters_nor_optimizer(name: str) -> None:
    of_loss, mesh, transforms, of_optimizer = EMPTY[name]
    loss, optimizer = _of_targets(*of_loss), _decayed(**of_optimizer)
    normal = lambda i, *shape: fz.random.normal(fz.random.key(i), shape)  # noqa: E731
    params, x = {"up": normal(0, 8, 16), "head": normal(1, 16, 5)}, normal(2, 8, 8)
    some, none = torch.arange(8) % 5, torch.full((8,), IGNORED)
    some[:4] = IGNORED  # a part of the batch may have none
    step = fz.compose(*transforms)(fz.train_step(loss, optimizer))

    def unlike(before: Any, after: Any) -> bool:
        return not all(map(torch.equal, tree.leaves(before), tree.leaves(after)))

    if mesh.size == 1:
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        state, _ = train(train.init(params), (x, some))
        before = tree.map(torch.clone, (state.params, state.opt_state))
        scale = [y.clone() for y in tree.leaves(state.extras)]
        state, metrics = train(state, (x, none))
        assert not unlike((scale, before), (tree.leaves(state.extras), (state.params, state.opt_state)))
        assert int(state.step) == 2 and not metrics.get("skipped", False)
        state, after = train(state, (x, some))
        assert unlike(before, (state.params, state.opt_state)) and bool(after["finite"])
    else:
        state, metrics = fz.testing.simulate(step, mesh, params, (x, none))
        first = step.init(params)
        assert not unlike((first.params, first.opt_state), (state.params, state.opt_state))
        plain, _ = fz.train_step(loss, optimizer)(first, (x, some))
        torch.testing.assert_close(fz.testing.simulate(step, mesh, params, (x, some))[0].params, plain.params)
    assert math.isnan(metrics["loss"]) and not metrics["finite"]
    if "fp16" not in name:  # the plain step computes in fp32, without a loss scale
        plain = fz.train_step(loss, optimizer)
        first = plain.init(params)
        state, _ = plain(first, (x, none))
        assert not unlike((first.params, first.opt_state), (state.params, state.opt_state)) and int(state.step) == 1


def _hooked(change: Any) -> Any:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ params["up"])
        if hidden.requires_grad:
            hidden.register_hook(change)
        return (hidden @ params["down"]).square().mean()

    return loss


def test_a_backward_that_treats_each_row_by_itself_is_the_same_on_every_mesh_and_one_that_combines_rows_shows() -> None:
    def by_rows(g: torch.Tensor) -> torch.Tensor:
        return g * (0.01 / g.norm(dim=-1, keepdim=True)).clamp(max=1.0)

    def by_the_whole(g: torch.Tensor) -> torch.Tensor:
        return g * (0.01 / g.norm()).clamp(max=1.0)

    normal = lambda i, *shape: fz.random.normal(fz.random.key(i), shape)  # noqa: E731
    params, x = {"up": normal(0, 8, 8), "down": normal(1, 8, 8)}, normal(2, 8, 8)

    def report(change: Any, mesh: fz.AbstractMesh, transform: Any) -> Any:
        step = transform(fz.train_step(_hooked(change), optim.sgd(0.1)))
        return fz.testing.check_equivalent(step, params, x, mesh, steps=1, raises=False)

    for mesh, transform in ((fz.AbstractMesh(data=1), fz.accumulate(4)), (fz.AbstractMesh(data=2), fz.shard_params())):
        assert report(by_rows, mesh, transform).equivalent
        assert not report(by_the_whole, mesh, transform).equivalent


LOSSES = {
    "vector": (lambda p, x: x @ p["w"], FzeroTypeError, "loss is float32[6, 3]"),
    "one element": (lambda p, x: loss_fn(p, x)[None], FzeroTypeError, "loss is float32[1]"),
    "number": (lambda p, x: 1.0, FzeroTypeError, "loss is float"),
    "integer": (lambda p, x: loss_fn(p, x).long(), FzeroTypeError, "int64[]"),
    "complex": (lambda p, x: loss_fn(p, x).to(torch.complex64), FzeroTypeError, "complex64[]"),
    "none": (lambda p, x: None, FzeroTypeError, "NoneType"),
    "dict": (lambda p, x: {"loss": loss_fn(p, x)}, FzeroTypeError, "dict"),
    "tuple": (lambda p, x: (loss_fn(p, x), x), FzeroTypeError, "has_aux=True"),
    "batch only": (lambda p, x: x.sum(), TraceError, "does not depend"),
    "detached": (lambda p, x: loss_fn(p, x).detach(), TraceError, "does not depend"),
    "no_grad": (torch.no_grad()(loss_fn), TraceError, "does not depend"),
    "weighted vector": (lambda p, x: fz.weighted((x @ p["w"]).sum(0), 6), FzeroTypeError, "total is float32[3]"),
    "weighted count": (lambda p, x: fz.weighted((x @ p["w"]).sum(), x), FzeroTypeError, "count is float32[6, 4]"),
    "weighted number": (lambda p, x: fz.weighted(3.0, 6), FzeroTypeError, "total is float"),
    "weighted string": (lambda p, x: fz.weighted((x @ p["w"]).sum(), "6"), FzeroTypeError, "count='6'"),
    "weighted constant": (lambda p, x: fz.weighted(x.sum(), 6), TraceError, "does not depend"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, kind, word = LOSSES[name]
    everywhere(kind, make(loss), word)


AUXES = {
    "missing": (loss_fn, "float32[]"),
    "three": (lambda p, x: (loss_fn(p, x), 1, 2), "tuple"),
    "list": (lambda p, x: [loss_fn(p, x), x], "list"),
    "weighted": (lambda p, x: fz.weighted(loss_fn(p, x), 1), "has_aux"),
    "string": (lambda p, x: (loss_fn(p, x), {"a": {"name": "x"}}), "result['a']['name']: str"),
    "number": (lambda p, x: (loss_fn(p, x), {"a": 1.0}), "result['a']: float"),
}


@pytest.mark.parametrize("name", AUXES)
def test_auxiliary_values(name: str) -> None:
    loss, word = AUXES[name]
    everywhere(FzeroTypeError, make(loss, has_aux=True), word)


def test_signatures() -> None:
    raises(FzeroTypeError, lambda: make(3), "loss_fn is int")
    raises(FzeroTypeError, lambda: make(lambda params: 0), "(params) does not take (params, batch)")
    raises(FzeroTypeError, lambda: make(lambda p, x, key: 0), "(p, x, key)", "*, key")
    raises(FzeroTypeError, lambda: make(trainable="w"), "trainable='w': a predicate is a function of (path, leaf)")


@pytest.mark.filterwarnings("ignore:fzero.step. parameters are not finite:RuntimeWarning")
def test_a_loss_that_is_not_a_number() -> None:
    step = make(lambda p, x: loss_fn(p, x).sub(1e9).sqrt())
    train = compiled(step)
    for run in (step, train):
        _, metrics = run(run.init(PARAMS), BATCH)
        assert not metrics["finite"] and metrics["loss"].isnan()


@pytest.mark.parametrize("transform", [fz.remat("full"), fz.accumulate(3)], ids=str)
def test_auxiliary_values_of_any_shape(transform: Any) -> None:
    step = make(
        lambda p, x: (loss_fn(p, x), {"a": x.mean(0), "w": p["w"], "n": fz.weighted(x.sum(), x.numel())}), has_aux=True
    )
    expected = step(step.init(PARAMS), BATCH)[1]["aux"]
    _, metrics = fz.testing.simulate(transform(fz.shard_params(step)), fz.AbstractMesh(data=2), PARAMS, BATCH)
    torch.testing.assert_close(metrics["aux"], expected)


def test_a_count_with_a_gradient():
    def gated(detach):
        def loss(p, x):
            w = torch.sigmoid(x @ p["gate"])
            return fz.weighted((w * (x @ p["w"]).square()).sum(), w.detach().sum() if detach else w.sum())

        return loss

    params = {"gate": ROWS[0].clone(), "w": ROWS[1].clone()}
    step = fz.train_step(gated(detach=False), optim.sgd(0.1))
    for act in (lambda: step(step.init(params), ROWS), lambda: fz.lower(step, ONE, params, ROWS)):
        raises(TraceError, act, "the count of a weighted loss depends on trainable parameters", "count.detach()")
    step = fz.train_step(gated(detach=True), optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    (want, said), (got, heard) = step(step.init(params), ROWS), train(train.init(params), ROWS)
    assert torch.allclose(said["grad_norm"], heard["grad_norm"]) and all(
        torch.allclose(want.params[n], got.params[n]) for n in params
    )


def test_a_backward_by_hand() -> None:
    """It names the fix; elsewhere the loss is a tensor like any other."""
    train = compiled(STEP)
    for run, state in ((STEP, STEP.init(PARAMS)), (train, train.init(PARAMS))):
        loss = run(state, BATCH)[1]["loss"]
        says = ("metrics['loss'] has no graph: ", "\nFix: leave out loss.backward(), optimizer.step()")
        raises(FzeroError, loss.backward, *says)
        file = io.BytesIO()
        torch.save({"loss": loss}, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["loss"]
        for other in (again, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), torch.stack([loss])[0], loss + 0):
            assert torch.equal(other, loss) and type(other) is torch.Tensor and float(other) == loss.item()
        assert not vars(again)


NAN = math.nan


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: make(has_aux="yes"), "has_aux='yes': must be True or False"),
    (
        lambda: make(trainable=lambda p: True),
        "trainable=<lambda>(p): a predicate is a function of (path, leaf)",
    ),
    (lambda: fz.train_step(torch.nn.Linear(2, 2), optim.sgd(0.1)), "loss_fn is the module Linear(input: "),
    (
        lambda: fz.train_step(torch.nn.Linear(2, 2), optim.sgd(0.1)),
        "model = fz.functionalize(module); step = model.train_step(optimizer",
    ),
    (
        lambda: make(optimizer=(optim.sgd(0.1).init, optim.sgd(0.1).update)),
        "as optim.GradientTransformation(init, update)",
    ),
    (lambda: fz.weighted(torch.ones(3), 4), "total is float32[3], not one floating-point number"),
    (lambda: fz.weighted(torch.ones((), dtype=torch.int64), 4), "total is int64[]"),
    (lambda: fz.weighted(torch.ones(()), torch.ones(3)), "count is float32[3], not one number"),
    (lambda: fz.weighted(torch.ones(()), -1), "count=-1: must be at least 0"),
    (lambda: fz.weighted(torch.ones(()), NAN), "count=nan"),
]


MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a module for a loss": (
        lambda: fz.train_step(Net(), optim.sgd(0.1)),
        ("loss_fn is the module Net(x: ", "Fix: model = fz.functionalize(module); step = model.train_step(optimizer"),
    ),
    "a model for a loss": (
        lambda: fz.train_step(fz.functionalize(Net()), optim.sgd(0.1)),
        ("loss_fn is Functional, not a function\nFix:", "model.train_step(optimizer)"),
    ),
}


def test_wrong_arguments_are_named() -> None:
    for call, words in WRONG:
        raises(FzeroError, call, words)
    assert fz.weighted(torch.ones(()), 0)
    for act, says in MODELS.values():
        raises(FzeroError, act, *says)
