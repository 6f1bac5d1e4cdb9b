"""What a block shares with its caller in PyTorch, and not in a program: the memory of tensors and the containers of its
arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import TraceError

PARAMS = {"v": torch.linspace(0.5, 1.5, 4), "w": torch.linspace(-1, 1, 16).reshape(4, 4)}
BATCH = torch.linspace(-1, 2, 8).reshape(2, 4)


@fz.block
def same(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x


@fz.block
def view(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x.view(4, 2)


@fz.block
def conjugate(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x.conj()


@fz.block
def twice(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * p["v"]
    return y, y.view(-1)


@fz.block
def beside(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x + p["v"]


@fz.block
def assigns(p: Any, d: Any) -> torch.Tensor:
    d["x"] = d["x"] * 2
    return d["x"] @ p["w"]


@fz.block
def appends(p: Any, x: torch.Tensor, *, cache: list[torch.Tensor]) -> torch.Tensor:
    cache.append(x @ p["w"])
    return cache[-1] * 2


@fz.block
def replaces(p: Any, xs: list[Any]) -> torch.Tensor:
    xs[1] = xs[1] + 1
    return xs[0] @ p["w"] * xs[1]


@fz.block
def empties(p: Any, x: torch.Tensor, d: dict[str, Any]) -> torch.Tensor:
    d["seen"] = {}
    return x @ p["w"]


@fz.block
def within(p: Any, x: torch.Tensor) -> torch.Tensor:
    cache: list[torch.Tensor] = []
    return appends(p, x, cache=cache) + cache[0]


def write_view(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + p["v"]
    y = view(p, h)
    y.mul_(3.0)
    return h.square().sum()


def write_view_for_a_block(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + p["v"]
    view(p, h).mul_(3.0)
    return beside(p, h)[1].sum()


def write_what_is_viewed(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + p["v"]
    y = view(p, h)
    h[0] = 3.0
    return y.square().sum()


def write_through_two_blocks(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + p["v"]
    y = view(p, same(p, h))
    h.mul_(3.0)
    return y.square().sum()


def write_one_of_two_results(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, z = twice(p, x)
    y.add_(1.0)
    return z.square().sum()


def write_conjugate(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.complex(x * p["v"], x)
    y = conjugate(p, h)
    y.mul_(2.0)
    return torch.view_as_real(h).square().sum()


def write_the_batch(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = same(p, x)
    y.mul_(3.0)
    return (y * p["v"]).sum()


def write_and_report(p: Any, x: torch.Tensor) -> Any:
    h = x + p["v"]
    y = view(p, h)
    y.mul_(3.0)
    return y.sum(), {"h": h}


def read_only(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    y, z = twice(p, view(p, same(p, h)).view(2, 4))
    return (h * y * z.view(2, 4)).square().sum()


def read_what_is_written(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, z = beside(p, x + p["v"])
    y.mul_(3.0)
    return (y + z).square().sum()


def read_before(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + p["v"]
    y = view(p, h)
    before = h.sum()
    y.mul_(3.0)
    return before + y.square().sum()


def containers_of_its_own(p: Any, x: torch.Tensor) -> torch.Tensor:
    @fz.block
    def layer(q: Any, d: dict[str, Any], *, scale: float) -> torch.Tensor:
        d = {**d, "x": d["x"] @ q["w"]}
        d["x"] = torch.tanh(d["x"])
        return d["x"] * scale

    return layer(p, {"x": x, "unused": None, "n": 3}, scale=2.0).square().mean()


WRITES = {
    write_view: "y.mul_(3.0)",
    write_view_for_a_block: "view(p, h).mul_(3.0)",
    write_what_is_viewed: "h[0] = 3.0",
    write_through_two_blocks: "h.mul_(3.0)",
    write_one_of_two_results: "y.add_(1.0)",
    write_conjugate: "y.mul_(2.0)",
    write_the_batch: "y.mul_(3.0)",
    write_and_report: "y.mul_(3.0)",
}
CHANGES: dict[str, tuple[Callable[..., Any], str]] = {
    "assigns": (lambda p, x: assigns(p, {"x": x}).sum(), "d['x']"),
    "appends": (lambda p, x: appends(p, x, cache=[]).sum(), "cache[0]"),
    "replaces": (lambda p, x: replaces(p, [x, 1]).sum(), "xs[1]"),
    "empties": (lambda p, x: empties(p, x, {}).sum(), "d"),
}


def compiled(loss: Callable[..., Any], transform: Callable[..., Any] = lambda step: step, has_aux: bool = False) -> Any:
    return fz.compile(transform(fz.train_step(loss, optim.sgd(0.1), has_aux=has_aux)), fz.make_mesh(), backend="eager")


def check_as_pytorch(loss: Callable[..., Any]) -> None:
    leaves = {k: v.clone().requires_grad_() for k, v in PARAMS.items()}
    value = loss(leaves, BATCH.clone())
    value.backward()
    train = compiled(loss)
    state, metrics = train(train.init(PARAMS), BATCH)
    torch.testing.assert_close(metrics["loss"], value.detach())
    for name, leaf in leaves.items():
        expected = leaf.detach() if leaf.grad is None else leaf.detach() - 0.1 * leaf.grad
        torch.testing.assert_close(state.params[name], expected)


@pytest.mark.parametrize("loss", WRITES, ids=lambda f: f.__name__)
def test_a_write_to_memory_that_a_block_shares_is_refused_where_another_tensor_of_it_is_read(
    loss: Callable[..., Any],
) -> None:
    train = compiled(loss, has_aux=loss is write_and_report)
    with pytest.raises(TraceError, match=r"fzero\.(?s:.*)Fix: ") as error:
        train(train.init(PARAMS), BATCH)
    assert WRITES[loss] in str(error.value) and "test_block_boundaries.py" in str(error.value)
    if loss is not write_the_batch:
        assert "that an argument or a result of block " in str(error.value)


@pytest.mark.parametrize(
    "loss", [read_only, read_what_is_written, read_before, containers_of_its_own], ids=lambda f: f.__name__
)
def test_views_writes_and_containers_that_nobody_else_sees_train_as_in_pytorch(loss: Callable[..., Any]) -> None:
    check_as_pytorch(loss)


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_that_changes_a_container_it_is_given_is_refused_by_name(name: str) -> None:
    loss, argument = CHANGES[name]
    train = compiled(loss)
    with pytest.raises(TraceError) as error:
        train(train.init(PARAMS), BATCH)
    lines = str(error.value).split("\n")
    assert (
        lines[0].startswith(f"fzero.block {name}: changes a list, dict")
        and "test_block_boundaries.py:" in lines[1]
        and lines[2] == f"  {argument}"
    )
    assert lines[3].startswith("Fix: return the new value instead")


def test_a_block_within_a_block_may_change_a_container_but_not_a_copy_that_was_cast() -> None:
    loss = lambda p, x: within(p, x).square().mean()  # noqa: E731
    check_as_pytorch(loss)
    train = compiled(loss, fz.mixed_precision("bf16", where=lambda path, leaf: True))
    with pytest.raises(TraceError, match=r"block appends: changes a list, dict(?s:.*)cache\[0\]"):
        train(train.init(PARAMS), BATCH)


def test_what_no_block_takes_or_returns_names_its_line() -> None:
    calls = {
        "result is int": lambda p, x: fz.block(lambda p, x: 3)(p, x),
        "no tensor": lambda p, x: fz.block(lambda p, x: None)(p, x),
        r"params\['n'\]: int": lambda p, x: fz.block(lambda p, x: x)({"w": p["w"], "n": 3}, x),
    }
    for says, loss in calls.items():
        with pytest.raises(fz.errors.TraceError, match=rf"(?s)test_block_boundaries\.py:\d+\n  {says}\nFix: "):
            fz.lower(
                fz.train_step(loss, fz.optim.sgd(0.1)), fz.AbstractMesh(data=1), {"w": torch.ones(3)}, torch.ones(3)
            )
