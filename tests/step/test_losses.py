"""The loss terms of the example against their formulas, and the wrong answer that averaging means gives where
fz.weighted is exact."""

from __future__ import annotations

import math
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim, tree

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
    with pytest.raises(fz.errors.FzeroTypeError, match="has no arithmetic"):
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
    "clipped": (("sum", True), fz.AbstractMesh(data=1), (fz.accumulate(2, vertical=True),), {"clip": True}),
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
