"""What a recording remembers of operations: the same results as PyTorch's, new each time, and nothing of what depends
on more than metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fzero import random as fzrandom
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace import meta_cache
from fzero.trace.graph_capture import record
from fzero.trace.meta_cache import FakeResults, Remembering
from fzero.trace.recorder import Recorded

aten = torch.ops.aten


def recorded(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Recorded:
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(shape, dtype=dtype) for shape in shapes]
        return record(lambda *xs: [fn(*xs)], fakes, owner="test", names=[f"x_{i}" for i in range(len(shapes))])


def metadata(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.storage_offset(), x.requires_grad


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "promotes by the kind of number": lambda x, n: torch.stack(
        [(n * 2).sum().float(), (n * 2.0).sum(), (n * True).sum().float()]
    ),
    "keeps strides": lambda x, n: x.t() * x.t() + 1,
    "expanded": lambda x, n: x[:, :1].expand(4, 6) * 2,
    "reduced": lambda x, n: x.sum(0) + x.sum(1, keepdim=True) + x.amax(),
    "other dtype": lambda x, n: x.to(torch.bfloat16).to(torch.float64),
    "comparisons": lambda x, n: (x > 0) & (x == x),
    "matrices": lambda x, n: x @ x.t(),
    "factories": lambda x, n: torch.zeros_like(x) + torch.full((4, 6), 2) + torch.arange(6),
    "views": lambda x, n: x.view(6, 4)[1:, 2:].reshape(-1),
    "complex": lambda x, n: torch.view_as_complex(x.reshape(4, 3, 2)).conj().imag * 2,
    "draws": lambda x, n: fzrandom.normal(fzrandom.key(3), (2, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_is_as_pytorchs(name):
    mode = compat.FakeTensorMode()
    with mode:
        x, n = torch.empty(4, 6), torch.empty(3, dtype=torch.int64)
        expected = CALLS[name](x, n)
        with Remembering():
            first, second = CALLS[name](x, n), CALLS[name](x, n)
    assert metadata(expected) == metadata(first) == metadata(second)
    assert type(second) is compat.FakeTensor and second.fake_mode is mode and second is not first


def test_results_are_asked_once_and_are_apart(monkeypatch):
    monkeypatch.setattr(meta_cache, "_known", {})
    asked = []

    class Asked(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with compat.FakeTensorMode():
        x, y = torch.empty(4), torch.empty(4)
        with Asked(), Remembering():
            a, b = x * y, y * x
            _ = torch.empty(5) * torch.empty(5)
    assert asked.count(aten.mul.Tensor) == 2  # of two sizes
    a += 1
    assert b._version == 0 and a.untyped_storage()._cdata != b.untyped_storage()._cdata


def test_only_metadata_is_remembered():
    """A view shares memory, a literal has a value, an operator of another library may do anything: each is asked every
    time."""
    results = FakeResults()
    with compat.FakeTensorMode() as mode:
        x = torch.empty(4, 4)
        literal = torch.tensor(3)
        assert results(aten.view.default, (x, [16]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert results(aten.view.default, (x, [16]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        plain = torch.empty((), dtype=torch.int64)
        for _ in range(2):
            assert results(aten.add.Tensor, (literal, 1), {}).item() == 4
            with pytest.raises(compat.DATA_DEPENDENT):
                results(aten.add.Tensor, (plain, 1), {}).item()
        assert results(aten.add_.Tensor, (x, 1), {}) is x is results(aten.add_.Tensor, (x, 1), {})
        before = torch.get_default_dtype()
        try:
            one = results(aten.div.Tensor, (plain, plain), {})
            torch.set_default_dtype(torch.float64)
            two = results(aten.div.Tensor, (plain, plain), {})
        finally:
            torch.set_default_dtype(before)
    assert (one.dtype, two.dtype) == (torch.float32, torch.float64) and one.fake_mode is mode


OUTSIDE = torch.ones(3)


def test_what_is_wrong_is_found_the_second_time_too():
    """The same operation on the same metadata was fine before."""
    with pytest.raises(TraceError, match="reads a tensor that is not one of its arguments"):
        recorded(lambda x, y: x * y + x * OUTSIDE, (3,), (3,))
    with pytest.raises(TraceError, match="in place"):
        recorded(lambda x, y: (x + 1).add_(1) + x.add_(1), (3,), (3,))
    with pytest.raises(TraceError, match="needs the value"):
        recorded(lambda x, y: x.sum() + y.sum().item(), (3,), (3,))
    with pytest.raises(TraceError, match="global generator"):
        recorded(lambda x, y: x * 2 + y * torch.rand_like(x), (3,), (3,))


def test_an_in_place_change_of_one_result_is_not_one_of_its_like():
    graph = recorded(lambda x: (x * 2).add_(1) + x * 2, (3,))
    (out,) = graph.module()(torch.ones(3))
    assert out.tolist() == [5.0, 5.0, 5.0]
