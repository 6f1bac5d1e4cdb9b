"""Layers of LSTMs on a CPU: oneDNN's operator for a whole sequence.

`aten.mkldnn_rnn_layer` returns a workspace that its backward needs, of a size that no schema tells, and only where autograd runs. A program runs without
autograd and keeps values of known sizes, so its backward computes the layer once more, for the workspace alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.operators import define

aten = torch.ops.aten
_LAYER = (
    "Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hx, Tensor cx, bool reverse, int[] batch_sizes, int mode, int hidden_size, "
    "int num_layers, bool has_biases, bool bidirectional, bool batch_first, bool train"
)
_BACKWARD = (
    "Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hx, Tensor cx, Tensor output, Tensor hy, Tensor cy, Tensor? d_output, Tensor? d_hy, "
    "Tensor? d_cy, bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, bool bidirectional, int[] batch_sizes, "
    "bool batch_first"
)


def _run(*args: Any) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():  # what oneDNN takes for training
        return aten.mkldnn_rnn_layer.default(*args)


def _layer(*args: Any) -> tuple[torch.Tensor, ...]:
    return _run(*args)[:3]


def _layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    *tensors, reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, batch_sizes, batch_first = args
    settings = reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train
    workspace = _run(*tensors[:7], *settings)[3]
    return aten.mkldnn_rnn_layer_backward.default(*args, workspace)


layer = define("lstm_layer", f"({_LAYER}) -> (Tensor, Tensor, Tensor)", _layer, lambda *args: aten.mkldnn_rnn_layer.default(*args)[:3])
"""`aten.mkldnn_rnn_layer` without its workspace: output, last hidden state, last cell."""

layer_backward = define(
    "lstm_layer_backward",
    f"({_BACKWARD}) -> ({', '.join(['Tensor'] * 7)})",
    _layer_backward,
    lambda *args: aten.mkldnn_rnn_layer_backward.default(*args, args[0].new_empty(0)),
)
"""`aten.mkldnn_rnn_layer_backward` without its workspace, in the order of its results."""


def _forward(*args: Any) -> Sequence[torch.Tensor]:
    return (*layer(*args), args[0].new_empty(0, dtype=torch.uint8))


LSTM: dict[Any, Any] = {
    aten.mkldnn_rnn_layer.default: _forward,
    aten.mkldnn_rnn_layer_backward.default: lambda *args: layer_backward(*args[:-1]),
}
"""What a CPU runs instead of layers of LSTMs."""
