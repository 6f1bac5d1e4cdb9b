"""Blocks under derivatives and contexts of the user's own, beside PyTorch's autograd on the same loss: equal, or
refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
import torch.utils.checkpoint

import fzero as fz
from fzero import optim

# what forward mode imports
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
PARAMS = {name: torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) / 2 for i, name in enumerate("wv")}
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(9))
grad = torch.autograd.grad


def body(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ p["w"]) @ p["v"])


run = fz.block(body)
softmax = fz.block(lambda p, x: torch.softmax(x @ p["w"], -1) @ p["v"])


def gradient_penalty(p: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.detach().clone().requires_grad_()
    (g,) = grad(run(p, z).sum(), z, create_graph=True)
    return (g.square().sum(-1) - 1).square().mean() + run(p, x).mean()


def maml(p: Any, x: torch.Tensor) -> torch.Tensor:
    dw, dv = grad(run(p, x).square().mean(), [p["w"], p["v"]], create_graph=True)
    return run({"w": p["w"] - 0.1 * dw, "v": p["v"] - 0.1 * dv}, x).square().mean()


def first_order_maml(p: Any, x: torch.Tensor) -> torch.Tensor:
    dw, dv = grad(run(p, x).square().mean(), [p["w"], p["v"]], retain_graph=True)
    return run({"w": p["w"] - 0.1 * dw, "v": p["v"] - 0.1 * dv}, x).square().mean()


def third_derivative(p: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.detach().clone().requires_grad_()
    (g,) = grad(run(p, z).sum(), z, create_graph=True)
    return grad(g.square().sum(), z, create_graph=True)[0].square().mean()


def input_made_of_a_parameter(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The block's own gradients must stop at its inputs, of which one is made of another."""
    out = run(p, run(p, x @ p["w"]))
    return grad(out.square().mean(), p["w"], create_graph=True)[0].square().sum() + out.mean()


def one_tensor_twice(p: Any, x: torch.Tensor) -> torch.Tensor:
    product = fz.block(lambda q, a, b: (a @ q["w"]) * (b @ q["v"]))
    z = x.detach().clone().requires_grad_()
    return grad(product(p, z, z).sum(), z, create_graph=True)[0].square().mean()


def several_results(p: Any, x: torch.Tensor) -> torch.Tensor:
    several = fz.block(lambda q, a: {"y": torch.tanh(a @ q["w"]), "n": (a > 0).sum(), "in": a, "fixed": torch.ones(3)})
    z = x.detach().clone().requires_grad_()
    out = several(p, z)
    return grad((out["y"] * out["in"]).sum() * out["n"], z, create_graph=True)[0].square().mean()


def in_and_out_of_autocast(p: Any, x: torch.Tensor) -> torch.Tensor:
    total = softmax(p, x).square().mean()
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            total = total + softmax(p, x).float().square().mean()
            with torch.autocast("cpu", enabled=False):
                total = total + softmax(p, x).square().mean()
    return total


def derivative_in_autocast(p: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = softmax(p, z)
        (g,) = grad(out.float().sum(), z, create_graph=True)
    (h,) = grad(out.float().sum(), z, create_graph=True)
    return g.square().mean() + h.square().mean()


def first_derivative_in_autocast(p: Any, x: torch.Tensor) -> torch.Tensor:
    out = run(p, x)
    with torch.autocast("cpu", torch.bfloat16):
        (g,) = grad(out.sum(), p["w"], retain_graph=True)
    return out.mean() + (g * p["w"]).sum()


def autocast_off_inside_and_in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(q: Any, a: torch.Tensor) -> torch.Tensor:
        a = a @ q["w"]
        with torch.autocast("cpu", enabled=False):
            a = a.float() @ q["v"]
        a += 1
        return a

    with torch.autocast("cpu", torch.bfloat16):
        return fz.block(inner)(p, x).square().mean()


def no_grad_and_inference(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = run(p, x).mean()
    with torch.inference_mode():
        run(p, x)
    return run(p, x).square().mean() + a


def jvp(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda z: run(p, z), (x,), (torch.ones_like(x),))[1].square().mean()


def dual_numbers(p: Any, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(p, forward_ad.make_dual(x, torch.ones_like(x)))).tangent.square().mean()


def checkpointed(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(
        lambda z: run(p, torch.tanh(run(p, z) @ p["w"])).square().mean(), x, use_reentrant=False
    )


def penalty_of_what_is_checkpointed(p: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.detach().clone().requires_grad_()
    return grad(checkpointed(p, z), z, create_graph=True)[0].square().sum()


def signed_zeros(p: Any, x: torch.Tensor) -> torch.Tensor:
    signed = fz.block(lambda q, a, zero: (a @ q["w"]).abs() * torch.copysign(torch.ones(4), torch.full((4,), zero)))
    return (signed(p, x, 0.0) - signed(p, x, -0.0)).square().mean()


def signed_zeros_in_one_graph(p: Any, x: torch.Tensor) -> torch.Tensor:
    def both(q: Any, a: torch.Tensor) -> torch.Tensor:
        a = a @ q["w"]
        return (
            (
                a * torch.copysign(torch.ones(4), torch.full((4,), 0.0))
                - a * torch.copysign(torch.ones(4), torch.full((4,), -0.0))
            )
            .square()
            .mean()
        )

    return fz.block(both)(p, x)


def kernels_of_attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    attend = fz.block(
        lambda q, a: F.scaled_dot_product_attention(*(a @ q["w"]).view(1, 2, 4, 4).expand(3, 1, 2, 4, 4).unbind())
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        a = attend(p, x)
    return (a + attend(p, x)).square().mean()


CASES = {
    f.__name__: f
    for f in [*vars().values()]
    if callable(f) and getattr(f, "__module__", "") == __name__ and f not in (body, run, softmax)
}


def in_torch(loss: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    params = {k: v.clone().requires_grad_() for k, v in PARAMS.items()}
    value = loss(params, BATCH)
    value.backward()
    return value.detach(), {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in params.items()}


def in_fzero(loss: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    train = fz.compile(fz.train_step(loss, optim.sgd(1.0)), fz.make_mesh(data=1), backend="eager")
    state, metrics = train(train.init(PARAMS), BATCH)
    return metrics["loss"], {k: PARAMS[k] - v for k, v in state.params.items()}


@pytest.mark.full(keep=["dual_numbers", "autocast_off_inside_and_in_place", "first_order_maml"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_autograd(name: str) -> None:
    torch.testing.assert_close(in_fzero(CASES[name]), in_torch(CASES[name]), rtol=1e-5, atol=1e-6)


def test_a_derivative_keeps_the_first_order_a_line_of_its_own() -> None:
    """Where nobody differentiates the derivative, a block's backward is one line still."""
    program = fz.lower(fz.train_step(first_order_maml, optim.sgd(0.1)), fz.AbstractMesh(data=1), PARAMS, BATCH).program
    assert {"body_vjp", "body_value_and_grad"} <= set(program.functions)


def test_refused_by_name() -> None:
    def other_kernels(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = run(p, x)
        return grad(out.sum(), p["w"], create_graph=True)[0].square().sum()

    with pytest.raises(
        fz.errors.TraceError,
        match=r"(?s)block body: is differentiated under different settings.*kernels of attention.*Fix: use the same",
    ):
        in_fzero(other_kernels)

    def other_dtype(p: Any, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return run(p, x).mean()
        finally:
            torch.set_default_dtype(torch.float32)

    with pytest.raises(fz.errors.TraceError, match=r"(?s)default dtype from torch.float32 to torch.float64.*Fix: give"):
        in_fzero(other_dtype)

    def linearize(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.linearize(lambda z: run(p, z), x)[1](torch.ones_like(x)).square().mean()

    with pytest.raises(fz.errors.TraceError, match=r"(?s)traces a function by torch.fx.*Fix: use torch.func.jvp"):
        in_fzero(linearize)


# --- tangents ---


def rows(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).transpose(0, 1)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "square": lambda p, y: y.square().mean(),
    "mean": lambda p, y: y.mean(),
    "another block": lambda p, y: run(p, y).square().mean(),
    "a product with rows": lambda p, y: (y.transpose(0, 1) @ p["v"]).square().mean(),
    "reshape": lambda p, y: y.reshape(-1).cumsum(0).square().mean(),
    "last dim first": lambda p, y: y.permute(2, 0, 1).contiguous().square().mean(),
}
MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "transpose(0, 1)": rows,
    "transpose(1, 2)": lambda p, x: (x @ p["w"]).transpose(1, 2).contiguous().transpose(1, 2),
    "expand": lambda p, x: (x @ p["w"]).sum(-1, keepdim=True).expand(-1, -1, 4),
    "every second": lambda p, x: (x.repeat(1, 2, 1) @ p["w"])[:, ::2],
    "channels last": lambda p, x: (x @ p["w"])[None].to(memory_format=torch.channels_last)[0],
}


@pytest.mark.parametrize("policy", ["none", "full"])
def test_results_of_any_strides(policy: str) -> None:
    """Whatever strides a block's result has, and whatever strides the caller's backward hands back."""
    x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(3))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(
            (behind(p, fz.block(make)(p, x)) for make in MAKERS.values() for behind in LOSSES.values()), torch.zeros(())
        )

    step = fz.train_step(loss, optim.sgd(0.1))
    expected, _ = step(step.init(PARAMS), x)
    train = fz.compile(fz.remat(step, policy), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(PARAMS), x)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_here")
def test_compiled_functions_get_the_strides_they_were_traced_for() -> None:
    x, params = (
        torch.randn(8, 80, 16, generator=torch.Generator().manual_seed(3)),
        {"w": torch.eye(16) * 2, "v": torch.eye(16)},
    )
    step = fz.train_step(
        lambda p, x: fz.block(lambda q, y: (y @ q["v"]).reshape(-1, 16).square().mean())(p, fz.block(rows)(p, x)),
        optim.sgd(1.0),
    )
    expected, _ = step(step.init(params), x)
    train = fz.compile(step, fz.make_mesh(data=1))
    state, _ = train(train.init(params), x)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
