"""What of a batch a module's forward gets; an entry that nobody reads is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, TraceError


class One(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, 3)

    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Many(One):
    def forward(self, *xs: Any) -> Any:  # type: ignore[override]
        return super().forward(sum(xs))


class Masked(One):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return super().forward(x if mask is None else x * mask)


class ByName(One):
    def forward(self, x: Any, *, mask: Any = None) -> Any:
        return super().forward(x if mask is None else x * mask)


class Needed(One):
    def forward(self, x: Any, *, mask: Any) -> Any:
        return super().forward(x * mask)


class More(One):
    def forward(self, x: Any, **more: Any) -> Any:
        return super().forward(x * more.get("mask", 1))


X, Y, MASK = torch.randn(4, 6), torch.randn(4, 3), (torch.arange(24).reshape(4, 6) % 2).float()
squares = fz.block(lambda params, out, y: F.mse_loss(out, y))


def alone(out: Any, batch: Any) -> torch.Tensor:
    return out.square().mean()


def to(key: Any) -> Any:
    return lambda out, batch: F.mse_loss(out, batch[key])


def trained(net: nn.Module, batch: Any, fn: Any) -> float:
    model = fz.functionalize(net)
    train = fz.compile(model.train_step(optim.sgd(0.1), fn), fz.make_mesh(), backend="eager")
    return train(train.init(model.params), batch)[1]["loss"].item()


UNREAD = [
    (Many, (X, MASK), alone, "batch[1]: float32[4, 6]"),
    (Many, (X, MASK, Y), to(2), "batch[1]: float32[4, 6]"),
    (Masked, (X, MASK), alone, "neither Masked.forward(x: 'Any', mask: 'Any' = None) -> 'Any' nor"),
    (Masked, (X, MASK, Y), to(2), "batch[1]: float32[4, 6]"),
    (Masked, {"x": X, "masks": MASK, "y": Y}, to("y"), "batch['masks']: float32[4, 6]"),
    (ByName, (X, MASK), alone, "batch[1]: float32[4, 6]"),
    (More, {"x": X, "mask": MASK, "y": Y}, to("y"), "batch['mask']: float32[4, 6]"),
    (More, (X, MASK, Y), to(2), "batch[1]: float32[4, 6]"),
    (One, {"x": X, "y": Y, "index": {"row": MASK}}, to("y"), "batch['index']: "),
]


@pytest.mark.parametrize(("net", "batch", "fn", "says"), UNREAD)
def test_an_entry_that_nobody_reads_is_refused_by_name(net: Any, batch: Any, fn: Any, says: str) -> None:
    with pytest.raises(TraceError, match=re.escape(says)):
        trained(net(), batch, fn)


READ = [
    (One, (X, Y), to(1), lambda m: F.mse_loss(m(X), Y)),
    (One, (X, Y), lambda out, b: out.sum() / len(b[1]), lambda m: m(X).sum() / 4),
    (One, (X, Y), lambda out, b: squares({}, out, b[1]), lambda m: F.mse_loss(m(X), Y)),
    (One, (X, {"y": Y, "unused": MASK}), lambda out, b: F.mse_loss(out, b[1]["y"]), lambda m: F.mse_loss(m(X), Y)),
    (Many, (X, Y), to(1), lambda m: F.mse_loss(m(X), Y)),
    (Masked, (X, Y), to(1), lambda m: F.mse_loss(m(X), Y)),
    (Masked, {"x": X, "mask": MASK, "y": Y}, to("y"), lambda m: F.mse_loss(m(X, MASK), Y)),
    (ByName, {"x": X, "mask": MASK, "y": Y}, to("y"), lambda m: F.mse_loss(m(X, mask=MASK), Y)),
    (Needed, {"x": X, "mask": MASK, "y": Y}, to("y"), lambda m: F.mse_loss(m(X, mask=MASK), Y)),
    (More, {"x": X, "y": Y}, to("y"), lambda m: F.mse_loss(m(X), Y)),
]


@pytest.mark.parametrize(("net", "batch", "fn", "plain"), READ)
def test_a_batch_means_what_it_does_in_pytorch(net: Any, batch: Any, fn: Any, plain: Any) -> None:
    assert trained(net(), batch, fn) == pytest.approx(plain(net()).item(), rel=1e-6)


class WithLoss(One):
    """As nanoGPT's `forward(idx, targets=None)`."""

    def forward(self, x: Any, mask: Any = None, targets: Any = None) -> Any:
        out = super().forward(x if mask is None else x * mask)
        return out, None if targets is None else F.mse_loss(out, targets)


class Tokens(WithLoss):
    def forward(self, x: Any, targets: Any = None) -> Any:
        return super().forward(x, None, targets)


@pytest.mark.parametrize(
    ("net", "batch", "fn"),
    [
        (Tokens, (X, Y), None),
        (Tokens, [X, Y], None),
        (Tokens, (X, Y), lambda out, batch: out[1]),
        (Tokens, (X, Y), lambda out, batch: out[1] * 1),  # an error on None
        (WithLoss, (X, MASK, Y), lambda out, batch: out[1]),
    ],
)
def test_a_forward_that_computes_its_loss_gets_the_targets_of_a_tuple(net: Any, batch: Any, fn: Any) -> None:
    want = net()(*batch)[1].item()
    assert trained(net(), batch, fn) == pytest.approx(want, rel=1e-6)
    model = fz.functionalize(net())
    if fn is not None:
        evaluate = fz.compile(model.eval_step(fn), fz.make_mesh(), backend="eager")
        assert evaluate(model.params, batch).item() == pytest.approx(want, rel=1e-6)


def test_a_forward_gets_optional_arguments_only_if_the_loss_function_has_no_result_without_them() -> None:
    want = F.mse_loss(One()(X), Y).item()
    assert trained(Tokens(), (X, Y), lambda out, batch: F.mse_loss(out[0], batch[1])) == pytest.approx(want, rel=1e-6)
    with pytest.raises(TraceError, match=re.escape("batch[1]: float32[4, 3]")):  # labels that an autoencoder ignores
        trained(Tokens(), (X, Y), lambda out, batch: out[0].square().mean())
    with pytest.raises(AttributeError, match="no attribute 'loss'"):  # of the user's own
        trained(Tokens(), (X, Y), lambda out, batch: out.loss)


def test_a_forward_that_fails_with_its_targets_raises_that_error() -> None:
    """Not that the targets are unread, which is so only because the call without them returns None as its loss."""

    class Classes(One):
        def forward(self, x: Any, targets: Any = None) -> Any:
            out = super().forward(x)
            return out, None if targets is None else F.cross_entropy(out, targets)

    for fn in (lambda out, batch: out[1], lambda out, batch: out[1] * 1):
        with pytest.raises(TraceError, match="cross_entropy") as raised:
            trained(Classes(), (X, torch.zeros(3, dtype=torch.int64)), fn)
        assert "return out, None if targets is None else F.cross_entropy(out, targets)" in str(raised.value)
    with pytest.raises(TraceError, match="needs the value of a tensor"):
        trained(Tokens(), (X, Y), lambda out, batch: out[1].item())


def test_a_loss_of_none() -> None:
    for batch in ((X,), (X, Y)):
        with pytest.raises(FzeroTypeError, match="loss is NoneType") as raised:
            trained(One(), batch, lambda out, batch: None)
        assert "Fix: return the loss at the end of the loss function" in str(raised.value)
    with pytest.raises(FzeroTypeError, match="check that the batch contains the targets"):
        trained(Tokens(), (X,), lambda out, batch: out[1])
    with pytest.raises(FzeroTypeError, match="loss is dict") as raised:
        trained(Tokens(), (X, Y), lambda out, batch: {"loss": out[1]})
    assert "has_aux=True" in str(raised.value)


def test_a_needed_argument_by_name_is_not_taken_by_place() -> None:
    with pytest.raises(FzeroTypeError, match="missing: mask"):
        trained(Needed(), (X, MASK), alone)


def test_an_evaluation_may_leave_labels_unread() -> None:
    def outputs(net: Any, batch: Any) -> torch.Tensor:
        model = fz.functionalize(net)
        return fz.compile(model.eval_step(lambda out, b: out), fz.make_mesh(), backend="eager")(model.params, batch)

    torch.testing.assert_close(outputs(One(), (X, Y)), One()(X).detach())
    torch.testing.assert_close(outputs(Masked(), {"x": X, "y": Y}), One()(X).detach())
    for net, batch in ((Masked(), (X, MASK)), (Many(), (X, MASK)), (More(), {"x": X, "mask": MASK})):
        with pytest.raises(TraceError, match="reads these entries"):
            outputs(net, batch)


def test_code_that_calls_the_module_itself_gives_it_what_it_gives_in_pytorch() -> None:
    """The way out of the refusal: `model(*inputs)`."""
    model = fz.functionalize(Many())
    step = fz.train_step(
        model.calling(lambda forward, batch: F.mse_loss(forward(*batch[:2]), batch[2]), train=True),
        optim.sgd(0.1),
        trainable=model.trainable,
        mutable=model.mutable,
    )
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    loss = train(train.init(model.params), (X, MASK, Y))[1]["loss"].item()
    assert loss == pytest.approx(F.mse_loss(Many()(X, MASK), Y).item(), rel=1e-6)


def test_an_entry_that_the_loss_function_asks_for_in_vain() -> None:
    with pytest.raises(TraceError, match="asks for 'label', which the batch does not have") as raised:
        trained(One(), {"x": X, "labels": Y}, to("label"))
    assert "Fix: did you mean 'labels'?" in str(raised.value)
    with pytest.raises(KeyError, match="other"):  # of a dict of the user's own
        trained(One(), {"x": X, "y": Y}, lambda out, batch: F.mse_loss(out, {"y": batch["y"]}["other"]))
