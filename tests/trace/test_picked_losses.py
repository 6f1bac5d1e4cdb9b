"""Losses in functions that are compiled for a GPU: the logits at the targets are read first, and the gradient of the
loss overwrites the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fzero import compat
from fzero.operators.picked import PICKED
from fzero.plan.inductor.fusion import kernels
from fzero.trace.device import by_operation
from fzero.trace.picked_losses import picked_losses
from fzero.trace.recorder import Recorded, Recorder

aten = torch.ops.aten
ROWS, WIDTH, WORDS = 24, 16, 50
NLL, LOGS = aten.nll_loss_forward.default, aten._log_softmax.default


def _recorded(fn: Callable[..., Any], *inputs: torch.Tensor) -> Recorded:
    recorder = Recorder("test")
    with compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        for i, fake in enumerate(fakes):
            recorder.input(fake, f"x{i}")
        with recorder:
            outputs = fn(*fakes)
    return recorder.finish(outputs)


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, WIDTH, generator=generator).to(dtype) for n in (ROWS, WORDS))
    t = torch.randint(0, WORDS, (ROWS,), generator=generator)
    t[3] = t[7] = -100
    return x, w, t


def _loss(
    logits: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, reduction: int = 1, weighted: bool = False
) -> Callable[..., Any]:
    """A loss, its total weight, and the gradients of both operands of the logits."""

    def fn(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> Any:
        product, weight = x @ w.T, torch.ones(WORDS) if weighted else None
        logs = aten._log_softmax.default(logits(product).float(), 1, False)
        loss, total = NLL(logs, t, weight, reduction, -100)
        each = aten.nll_loss_backward.default(torch.ones_like(loss), logs, t, weight, reduction, -100, total)
        grad = aten._log_softmax_backward_data.default(each, logs, 1, torch.float32).to(product.dtype)
        return loss, total, grad @ w, grad.T @ x

    return fn


def _picks(graph: Recorded) -> bool:
    return any(n.target is PICKED for n in graph.graph.nodes)


CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "soft cap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "through three dims": lambda x: x.view(4, -1, WORDS).float().view(-1, WORDS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("chain", [*CHAINS])
def test_the_loss_and_its_gradients_are_the_same(chain: str, reduction: int, dtype: torch.dtype) -> None:
    inputs = _inputs(dtype)
    graph = _recorded(_loss(CHAINS[chain], reduction), *inputs)
    picked = picked_losses(graph)
    assert _picks(picked)
    for got, want in zip(by_operation(picked)(*inputs), by_operation(graph)(*inputs), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shared", ["the product", "the log-probabilities"])
def test_two_losses_of_the_same_logits(shared: str) -> None:
    """As labels that are mixed have."""

    def fn(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> Any:
        product, found = x @ w.T, []
        logs = aten._log_softmax.default(product, 1, False)
        for targets, scale in ((t, 1.0), (t.flip(0), 0.5)):
            if shared == "the product":
                logs = aten._log_softmax.default(product * scale, 1, False)
            loss, total = NLL(logs, targets, None, 1, -100)
            each = aten.nll_loss_backward.default(torch.ones_like(loss), logs, targets, None, 1, -100, total)
            found += [loss, aten._log_softmax_backward_data.default(each, logs, 1, torch.float32) @ w]
        return tuple(found)

    inputs = _inputs()
    graph = _recorded(fn, *inputs)
    picked = picked_losses(graph)
    assert sum(n.target is PICKED for n in picked.graph.nodes) == 2
    for got, want in zip(by_operation(picked)(*inputs), by_operation(graph)(*inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_a_loss_of_no_target_is_not_a_number_as_before() -> None:
    x, w, t = _inputs()
    nothing = torch.full_like(t, -100)
    graph = _recorded(_loss(), x, w, t)
    want, got = (by_operation(g)(x, w, nothing) for g in (graph, picked_losses(graph)))
    assert got[0].isnan() and want[0].isnan() and got[1] == want[1] == 0


REFUSED: dict[str, Callable[..., Any]] = {
    "weights of classes": _loss(weighted=True),
    "a loss alone": lambda x, w, t: (F.cross_entropy(x @ w.T, t),),
    "one of several results": _loss(lambda x: x.sort(1).values),
    "logits of a layer norm": _loss(lambda x: F.layer_norm(x, (WORDS,))),
    "logits of another order": _loss(lambda x: x.view(WORDS, ROWS).t()),
    "logits that no product made": lambda x, w, t: _loss(lambda p: p + p.amax(1, keepdim=True))(x, w, t),
}


@pytest.mark.parametrize("case", [*REFUSED])
def test_others_stay_as_they_are(case: str) -> None:
    graph = _recorded(REFUSED[case], *_inputs())
    assert picked_losses(graph) is graph


def test_the_gradient_overwrites_the_logits_in_a_plan_for_a_gpu() -> None:
    """Their kernel is the last that reads them; and a value does not overwrite what another of its kernel reads."""
    graph = picked_losses(_recorded(_loss(), *_inputs(torch.bfloat16)))
    found = kernels(graph, "triton").kernels
    (picks,) = [i for i, k in enumerate(found) if any("picked" in b.name for b in k.writes)]
    (grads,) = [
        i for i, k in enumerate(found) if k.product is None and any("mm" in b.name for b in k.reads) and i != picks
    ]
    (logits,) = [b for b in found[grads].reads if b.target is aten.mm.default]
    assert picks < grads and not any(logits in k.reads for k in found[grads + 1 :])
    assert any(logits in over for over in found[grads].in_place.values())

    def two(x: torch.Tensor) -> Any:
        y = x @ x
        return (y + 1).tanh(), y * 2

    square = _recorded(two, torch.ones(4, 4))
    assert not any(over for k in kernels(square, "triton").kernels for over in k.in_place.values())
    assert any(over for k in kernels(square, "inductor").kernels for over in k.in_place.values())
