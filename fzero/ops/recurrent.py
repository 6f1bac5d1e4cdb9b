"""Wraps recurrent layers: the operators of oneDNN (an LSTM layer on a CPU), and of cuDNN and MIOpen (a complete
network on a GPU), for a sequence.

Each of these operators returns a workspace that its backward needs, whose size no schema tells; oneDNN returns one
only if autograd is enabled. A program runs without autograd and keeps only values of known sizes, so the backward
computes the layers once more, only to get the workspace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.ops.registration import define

aten = torch.ops.aten
_LAYER = (
    "Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hx, Tensor cx, bool reverse, int[] batch_sizes, "
    "int mode, int hidden_size, "
    "int num_layers, bool has_biases, bool bidirectional, bool batch_first, bool train"
)
_BACKWARD = (
    "Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hx, Tensor cx, Tensor output, Tensor hy, Tensor "
    "cy, Tensor? d_output, Tensor? d_hy, "
    "Tensor? d_cy, bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, bool "
    "bidirectional, int[] batch_sizes, "
    "bool batch_first"
)


def _run(*args: Any) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():  # oneDNN takes this as training
        return aten.mkldnn_rnn_layer.default(*args)


def _layer(*args: Any) -> tuple[torch.Tensor, ...]:
    return _run(*args)[:3]


def _layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    *tensors, reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, batch_sizes, batch_first = args
    settings = reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train
    workspace = _run(*tensors[:7], *settings)[3]
    *before, bias, _, hx, cx = aten.mkldnn_rnn_layer_backward.default(*args, workspace)
    return *before, bias, bias.clone(), hx, cx  # PyTorch returns one tensor for both biases


layer = define(
    "lstm_layer",
    f"({_LAYER}) -> (Tensor, Tensor, Tensor)",
    _layer,
    lambda *args: aten.mkldnn_rnn_layer.default(*args)[:3],
)
"""`aten.mkldnn_rnn_layer` without its workspace: output, last hidden state, last cell state."""

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
"""The operators that a CPU runs in place of LSTM layers."""


# --- on GPUs ---

_SETTINGS = (
    "int mode, int hidden_size, int proj_size, int num_layers, bool batch_first, bool train, bool bidirectional, int[] "
    "batch_sizes"
)
_NETWORK = "Tensor input, Tensor[] weight, int weight_stride0, Tensor hx, Tensor? cx"
_LIBRARIES = {
    "cudnn": (aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default),
    "miopen": (aten.miopen_rnn.default, aten.miopen_rnn_backward.default),
}
_NAMES = [word.split()[-1] for word in f"{_NETWORK}, {_SETTINGS}".split(", ")]


def _named(op: Any, values: dict[str, Any]) -> Any:
    """Calls an operator of a library, without random numbers and with its weights given one by one."""
    values = {"weight_buf": None, "dropout": 0.0, "dropout_state": None, **values}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        return op(*(values[a.name] for a in op._schema.arguments))


def _network(library: str, *args: Any) -> tuple[torch.Tensor, ...]:
    output, hy, cy, *_ = _named(_LIBRARIES[library][0], dict(zip(_NAMES, args, strict=True)))
    return output.contiguous(), hy, cy


def _network_backward(
    library: str, d_output: Any, d_hy: Any, d_cy: Any, mask: Sequence[bool], *args: Any
) -> list[torch.Tensor]:
    forward, backward = _LIBRARIES[library]
    values = dict(zip(_NAMES, args, strict=True))
    output, _, _, reserve, weight_buf = _named(forward, values)
    values |= {"output": output, "reserve": reserve, "weight_buf": weight_buf, "output_mask": list(mask)}
    *states, weights = _named(backward, {**values, "grad_output": d_output, "grad_hy": d_hy, "grad_cy": d_cy})
    return [x.contiguous() for x, asked in zip(states, mask, strict=False) if asked] + [
        x.clone() for x in weights if mask[3]
    ]


def _fake_backward(
    library: str, d_output: Any, d_hy: Any, d_cy: Any, mask: Sequence[bool], *args: Any
) -> list[torch.Tensor]:
    values = dict(zip(_NAMES, args, strict=True))
    if not values["train"]:
        raise RuntimeError(f"{library} RNN backward can only be called in training mode")
    made = [values[name] for name, asked in zip(("input", "hx", "cx"), mask, strict=False) if asked] + [
        x for x in values["weight"] if mask[3]
    ]
    return [x.new_empty(x.shape) for x in made]


network = define("rnn", f"(str library, {_NETWORK}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)", _network, _network)
"""All layers of an RNN, computed by a library: output, last hidden state, and last cell state, which is empty if
there is none.
"""

network_backward = define(
    "rnn_backward",
    f"(str library, Tensor? d_output, Tensor? d_hy, Tensor? d_cy, bool[4] mask, {_NETWORK}, {_SETTINGS}) -> Tensor[]",
    _network_backward,
    _fake_backward,
)
"""The gradients of input, hidden state, cell state and weights that `mask` requests."""


def _rules(library: str) -> dict[Any, Callable[..., Any]]:
    """Returns the rules by which a library's operators are recorded: `rule(do, overwrite, *args)`, as in
    fzero/trace/guards/overwrites.py.
    """
    forward, backward = _LIBRARIES[library]

    def values(op: Any, args: Any) -> dict[str, Any]:
        return {"proj_size": 0, **{a.name: x for a, x in zip(op._schema.arguments, args, strict=True)}}

    def run(do: Callable[..., Any], overwrite: Any, *args: Any) -> Any:
        given = values(forward, args)
        output, hy, cy = do(network, library, *(given[name] for name in _NAMES))
        return (
            output,
            hy,
            cy,
            do(aten.new_empty.default, given["input"], [0]),
            do(aten.new_empty.default, given["input"], [0]),
        )

    def run_backward(do: Callable[..., Any], overwrite: Any, *args: Any) -> Any:
        given = values(backward, args)
        mask = list(given["output_mask"])
        tangents = (given[name] for name in ("grad_output", "grad_hy", "grad_cy"))
        grads = iter(do(network_backward, library, *tangents, mask, *(given[name] for name in _NAMES)))
        states = [next(grads) if asked else None for asked in mask[:3]]
        return (*states, list(grads))

    return {forward: run, backward: run_backward}


RNN: dict[Any, Callable[..., Any]] = {op: rule for library in _LIBRARIES for op, rule in _rules(library).items()}
"""The operators that are recorded in place of the libraries' operators."""
