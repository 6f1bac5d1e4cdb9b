"""What is recorded of the operators of cuDNN and MIOpen for recurrent layers, which need no GPU to be recorded: no
draw, no workspace, and what they compute.

The libraries themselves are played by PyTorch's own layers on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fzero._compat import compat
from fzero.errors import TraceError
from fzero.ops import recurrent
from fzero.trace.graph_capture import record
from fzero.trace.guards.rejections import plainly
from fzero.trace.recorder import Recorded

aten = torch.ops.aten
LSTM, HIDDEN = 2, 4
SHAPES = [(5, 2, 3), (1, 2, 4), (1, 2, 4), (16, 3), (16, 4), (16,), (16,)]  # x, hx, cx, weights and biases of one layer


def called(library: str, x: Any, hx: Any, cx: Any, weights: Any, dropout: float = 0.0, train: bool = True) -> Any:
    """The operator, as `torch.lstm` calls it on a GPU."""
    buffers, projection = ((None,), (0,)) if library == "cudnn" else ((), ())
    op = {"cudnn": aten._cudnn_rnn, "miopen": aten.miopen_rnn}[library]
    return op(
        x, weights, len(weights), *buffers, hx, cx, LSTM, HIDDEN, *projection, 1, False, dropout, train, False, [], None
    )


def recorded(library: str, **settings: Any) -> Recorded:
    """Output, last cell, and gradients of all, of a loss of both; `torch.lstm` looks first whether the weights are one
    piece of memory."""

    def fn(*xs: torch.Tensor) -> list[torch.Tensor]:
        x, hx, cx, *weights = (x.detach().requires_grad_() for x in xs)
        torch.empty(0).set_(memory)
        output, _, cell, *_ = called(library, x, hx, cx, weights, **settings)
        loss = output.square().sum() + cell.sum()
        return [output, cell, *torch.autograd.grad(loss, [x, hx, cx, *weights])]

    with compat.FakeTensorMode():
        fakes = [torch.empty(s) for s in SHAPES]
        memory = fakes[3].untyped_storage()
        with plainly("test"):
            return record(fn, fakes, owner="test", names=["x", "hx", "cx", "w0", "w1", "b0", "b1"])


class Library:
    """Forward and backward of a library's operator, by PyTorch's own layers; its workspace is what the backward must be
    given."""

    def __init__(self, op: Any, backward: bool):
        self._schema, self.backward = op._schema, backward

    def __call__(self, *args: Any) -> Any:
        given = {a.name: x for a, x in zip(self._schema.arguments, args, strict=True)}
        assert given["dropout"] == 0.0 and given["dropout_state"] is None
        tensors = [given["input"], given["hx"], given["cx"], *given["weight"]]
        with torch.enable_grad():
            x, hx, cx, *weights = leaves = [t.detach().requires_grad_() for t in tensors]
            out, hy, cy = torch.lstm(x, (hx, cx), weights, True, 1, 0.0, given["train"], False, False)
        if not self.backward:
            assert given.get("weight_buf") is None
            return out.detach(), hy.detach(), cy.detach(), torch.full((7,), 3, dtype=torch.uint8), torch.ones(9)
        assert (
            given["reserve"].tolist() == [3] * 7
            and given["weight_buf"].numel() == 9
            and torch.equal(given["output"], out)
        )
        tangents = [
            torch.zeros_like(y) if g is None else g
            for y, g in zip((out, hy, cy), (given[f"grad_{n}"] for n in ("output", "hy", "cy")), strict=True)
        ]
        dx, dhx, dcx, *dw = torch.autograd.grad((out, hy, cy), leaves, tangents)
        return dx, dhx, dcx, dw


@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_a_library_computes_what_was_recorded_of_it(library, monkeypatch):
    graph = recorded(library)
    assert not [n for n in graph.graph.nodes if "set_" in str(n.target) or "_rnn.default" in str(n.target)], graph.graph
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(s, generator=g) for s in SHAPES]
    forward, backward = recurrent._LIBRARIES[library]
    monkeypatch.setitem(recurrent._LIBRARIES, library, (Library(forward, False), Library(backward, True)))
    found = graph.module()(*xs)
    x, hx, cx, *weights = leaves = [x.clone().requires_grad_() for x in xs]
    out, _, cell = torch.lstm(x, (hx, cx), weights, True, 1, 0.0, True, False, False)
    expected = [out, cell, *torch.autograd.grad(out.square().sum() + cell.sum(), leaves)]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_a_library_draws_in_training_alone():
    with pytest.raises(TraceError, match="draws from torch's global generator"):
        recorded("cudnn", dropout=0.5)
    with pytest.raises(TraceError, match="RNN backward can only be called in training mode"):
        recorded("cudnn", dropout=0.5, train=False)
