"""Random small models, optimizers and transforms: what people write, composed as nobody would.

`compose` asks for each choice, so that the same code serves hypothesis, which shrinks the choices of a failing case,
and a numbered list of cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim


class Choose(Protocol):
    def __call__(self, options: Sequence[Any], /) -> Any: ...


Layer = tuple[Callable[..., torch.Tensor], dict[str, tuple[int, ...]]]
"""A function of (parameters, x of [rows, time, width], key) and the shapes of those parameters."""


def _residual(width: int) -> Layer:
    return lambda p, x, key: x + torch.tanh(x @ p["w"] + p["b"]), {"w": (width, width), "b": (width,)}


def _mlp(width: int) -> Layer:
    return lambda p, x, key: x + F.gelu(F.linear(x, p["up"])) @ p["down"], {
        "up": (2 * width, width),
        "down": (2 * width, width),
    }


def _layer_norm(width: int) -> Layer:
    return lambda p, x, key: F.layer_norm(x, (width,), p["w"] + 1, p["b"]), {"w": (width,), "b": (width,)}


def _rms_norm(width: int) -> Layer:
    return lambda p, x, key: F.rms_norm(x, (width,), p["w"] + 1), {"w": (width,)}


def _attention(width: int) -> Layer:
    def attend(p: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, width // 2)).transpose(1, 2) for t in (q, k, v))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]

    return attend, {"qkv": (width, 3 * width), "out": (width, width)}


def _convolution(width: int) -> Layer:
    return lambda p, x, key: x + F.conv1d(x.transpose(1, 2), p["w"], p["b"], padding=1).transpose(1, 2), {
        "w": (width, width, 3),
        "b": (width,),
    }


def _gru(width: int) -> Layer:
    def recur(p: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            z = torch.sigmoid(x[:, t] @ p["wz"] + state @ p["uz"])
            state = (1 - z) * state + z * torch.tanh(x[:, t] @ p["wh"] + state @ p["uh"])
            out.append(state)
        return x + torch.stack(out, 1)

    return recur, dict.fromkeys(("wz", "uz", "wh", "uh"), (width, width))


def _in_place(width: int) -> Layer:
    def scaled(p: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
        y = x * p["w"]
        y += torch.tensor([0.25]) if width % 2 else 0.25
        y[..., 0] = y[..., 0] * 2
        return x + F.normalize(y, dim=-1)

    return scaled, {"w": (width,)}


def _stacked(width: int) -> Layer:
    def pair(p: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
        for i in range(2):
            x = x + torch.tanh(x @ p["w"][i].T)
        return x

    return pair, {"w": (2, width, width)}


def _dropout(width: int) -> Layer:
    return lambda p, x, key: fz.random.dropout(key, x, 0.2) * (1 + p["w"]), {"w": (width,)}


def _gated(width: int) -> Layer:
    return lambda p, x, key: torch.where(x > 0, x, x * torch.sigmoid(p["b"])) * torch.sigmoid(x @ p["a"]), {
        "a": (width, width),
        "b": (),
    }


LAYERS = [
    _residual,
    _mlp,
    _layer_norm,
    _rms_norm,
    _attention,
    _convolution,
    _gru,
    _in_place,
    _stacked,
    _dropout,
    _gated,
]

OPTIMIZERS: dict[str, Callable[[], optim.GradientTransformation]] = {
    "sgd": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.05)),
    "momentum": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.05, momentum=0.9, nesterov=True)),
    "adamw": lambda: optim.adamw(1e-2),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.warmup_cosine(1e-2, 2, 10))),
    "lion": lambda: optim.lion(1e-3),
    "lamb": lambda: optim.lamb(1e-2),
}
PRECISIONS: dict[str, Any] = {
    "fp32": lambda step: step,
    "bf16": fz.mixed_precision("bf16"),
    "bf16 stored": fz.mixed_precision("bf16", params="bf16"),
    "fp16": fz.mixed_precision("fp16"),
}


@dataclass(frozen=True)
class Case:
    """A step with its transforms, parameters and the whole batch; `text` says what was chosen."""

    step: Any
    params: Any
    batch: Any
    text: str


STAGES: Sequence[Any] = [fz.data_parallel(), fz.shard_opt_state(), fz.shard_grads(), fz.shard_params()]


def compose(
    choose: Choose, precisions: Sequence[str] = tuple(PRECISIONS), ranks: int = 1, stages: Sequence[Any] = STAGES
) -> Case:
    """A case from a series of choices, its batch whole. On several ranks one of the ZeRO stages is among them, or of
    what else spreads a step."""
    chosen: list[str] = []

    def pick(what: str, options: Sequence[Any]) -> Any:
        value = choose(options)
        chosen.append(f"{what}={getattr(value, '__name__', value)}")
        return value

    width, time, num_micro = pick("width", [4, 6, 10]), pick("time", [1, 3]), pick("micro", [1, 2, 3])
    rows = ranks * num_micro * pick("rows", [1, 2, 5])
    num_layers = pick("layers", [1, 2, 3, 5])
    layers, shapes = [], []
    for _ in range(num_layers):
        kind = pick("layer", LAYERS)
        function, of = kind(width)
        layers.append(fz.block(function) if pick("block", [True, False]) else function)
        shapes.append(of)
    tied = pick("tied", [False, True])  # the last layer reads the first one's parameters, where their shapes agree
    tied = tied and num_layers > 1 and shapes[0] == shapes[-1]
    tokens, weighted, aux = pick("tokens", [False, True]), pick("weighted", [False, True]), pick("aux", [False, True])
    frozen = pick("frozen", [False, True])

    def loss_fn(params: Any, batch: Any, *, key: torch.Tensor) -> Any:
        x = F.embedding(batch["x"], params["embed"]) if tokens else batch["x"] * params["embed"][0]
        keys = fz.random.split(key, num_layers)
        for i, (layer, p) in enumerate(zip(layers, params["layers"], strict=True)):
            x = layer(p, x, keys[i])
        off = (x @ params["head"] - batch["y"]).square()
        loss = fz.weighted((off * batch["mask"]).sum(), batch["mask"].sum()) if weighted else off.mean()
        return (loss, {"largest": fz.weighted(off.detach().sum(), off.numel())}) if aux else loss

    draw = torch.Generator().manual_seed(pick("seed", range(1000)))
    params: dict[str, Any] = {
        "embed": torch.randn(7, width, generator=draw),
        "layers": [{k: torch.randn(s, generator=draw) * 0.3 for k, s in of.items()} for of in shapes],
        "head": torch.randn(width, 2, generator=draw) * 0.5,
    }
    if tied:
        params["layers"][-1] = params["layers"][0]
    batch = {
        "x": torch.randint(7, (rows, time), generator=draw)
        if tokens
        else torch.randn(rows, time, width, generator=draw),
        "y": torch.randn(rows, time, 2, generator=draw),
        "mask": (torch.rand(rows, time, 1, generator=draw) < 0.7).float() + 0.1,
    }
    trainable = (lambda path, leaf: "embed" not in path) if frozen else None
    optimizer = pick("optimizer", list(OPTIMIZERS))
    step = fz.train_step(loss_fn, OPTIMIZERS[optimizer](), has_aux=aux, trainable=trainable)
    transforms = [fz.remat(pick("remat", ["full", "none", "min_cut"])), PRECISIONS[pick("precision", precisions)]]
    if num_micro > 1:
        transforms.append(fz.accumulate(num_micro, schedule=pick("schedule", ["sequential", "layerwise"])))
    if ranks > 1:
        transforms.append(pick("stage", stages))
    return Case(fz.compose(*transforms)(step), params, batch, ", ".join(chosen))


def numbered(number: int, **options: Any) -> Case:
    """The case of that number, the same everywhere."""
    return compose(random.Random(number).choice, **options)
