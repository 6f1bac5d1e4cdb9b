"""Six tiny models in which one number at a time is changed: heads, widths, vocabulary, layers, experts, rows, ranks.

`outcome(n)` draws case n, which is the same everywhere: a model, the number that is changed and its new value (a prime,
1, 0, one more, one less), two to four transforms and a mesh for them. It takes three steps on simulated ranks and
compares them with the plain step. Odd sizes find what round ones hide: padding, empty shards, remainders.

    python tests/changed_numbers.py 137            # one case, with what differs
    python tests/changed_numbers.py 0:500          # many; prints the faults and a count of outcomes
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import simulated
import torch
import torch.nn.functional as F
from pieces import PIECES, composed, kind

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, VerifyError
from fzero.testing.tolerance import PRECISIONS

STEPS = 3
Numbers = dict[str, int]
Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A loss function's maker, its parameters and batch, as functions of the model's numbers."""

    numbers: Numbers
    loss: Callable[[Numbers], Callable[[Any, Any], torch.Tensor]]
    params: Callable[[Numbers, Draw], Any]
    batch: Callable[[Numbers, int, torch.Generator], Any]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def token_batch(n: Numbers, rows: int, draw: torch.Generator) -> Any:
    return {k: torch.randint(0, n["vocabulary"], (rows, n["length"]), generator=draw) for k in ("x", "y")}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


# A GPT: blocks, fused queries, keys and values.


def gpt_loss(n: Numbers) -> Callable[[Any, Any], torch.Tensor]:
    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.layer_norm(x, (n["width"],), p["norm"]) @ p["qkv"]).chunk(3, -1)
        x = x + attend(q, k, v, n["heads"], causal=True) @ p["out"]
        return x + F.gelu(x @ p["up"] + p["bias"]) @ p["down"]

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = p["embedding"][batch["x"]]
        for block in p["layers"]:
            x = layer(block, x)
        return cross_entropy(x @ p["head"], batch["y"])

    return loss


def gpt_params(n: Numbers, draw: Draw) -> Any:
    w, hidden = n["width"], n["hidden"]
    shapes = {"norm": (w,), "qkv": (w, 3 * w), "out": (w, w), "up": (w, hidden), "bias": (hidden,), "down": (hidden, w)}
    layers = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(n["layers"])]
    return {"embedding": draw(n["vocabulary"], w), "head": draw(w, n["vocabulary"]), "layers": layers}


# A multi-layer perceptron without blocks; its last parameters are a scalar and a vector of one element.


def mlp_loss(n: Numbers) -> Callable[[Any, Any], torch.Tensor]:
    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = batch["x"]
        for layer in p["layers"]:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return ((x @ p["out"]) * p["scale"] + p["shift"] - batch["y"]).square().mean()

    return loss


def mlp_params(n: Numbers, draw: Draw) -> Any:
    widths = [n["inputs"], *[n["width"]] * n["layers"]]
    layers = [{"w": draw(a, b), "b": draw(b)} for a, b in itertools.pairwise(widths)]
    return {"layers": layers, "out": draw(widths[-1], n["outputs"]), "scale": draw() + 1, "shift": draw(1)}


def mlp_batch(n: Numbers, rows: int, draw: torch.Generator) -> Any:
    return {
        "x": torch.randn(rows, n["inputs"], generator=draw),
        "y": torch.randn(rows, n["outputs"], generator=draw),
    }


# A mixture of experts with room for every row.


def moe_loss(n: Numbers) -> Callable[[Any, Any], torch.Tensor]:
    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = (rows @ p["router"]).softmax(-1).topk(n["chosen"], -1)
        rows, back = fz.experts.dispatch(
            rows, chosen, weights, num_experts=n["experts"], capacity=n["experts"] / n["chosen"]
        )
        rows = fz.experts.matmul(F.silu(fz.experts.matmul(rows, p["expert_up"], back)), p["expert_down"], back)
        return x + fz.experts.combine(rows, back).view_as(x)

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = p["embedding"][batch["x"]]
        for block in p["layers"]:
            x = layer(block, x)
        return cross_entropy(x @ p["head"], batch["y"])

    return loss


def moe_params(n: Numbers, draw: Draw) -> Any:
    w, hidden, experts = n["width"], n["hidden"], n["experts"]
    shapes = {"router": (w, experts), "expert_up": (experts, w, hidden), "expert_down": (experts, hidden, w)}
    layers = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(n["layers"])]
    return {"embedding": draw(n["vocabulary"], w), "head": draw(w, n["vocabulary"]), "layers": layers}


# A convolutional model.


def conv_loss(n: Numbers) -> Callable[[Any, Any], torch.Tensor]:
    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(F.conv2d(x, p["w"], p["b"], padding="same"))

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = F.conv2d(batch["x"], p["stem"])
        for block in p["layers"]:
            x = layer(block, x)
        return cross_entropy(x.mean((2, 3)) @ p["head"], batch["y"])

    return loss


def conv_params(n: Numbers, draw: Draw) -> Any:
    c, k = n["channels"], n["kernel"]
    layers = [{"w": draw(c, c, k, k), "b": draw(c)} for _ in range(n["layers"])]
    return {"stem": draw(c, n["inputs"], k, k), "layers": layers, "head": draw(c, n["classes"])}


def conv_batch(n: Numbers, rows: int, draw: torch.Generator) -> Any:
    return {
        "x": torch.randn(rows, n["inputs"], n["size"], n["size"], generator=draw),
        "y": torch.randint(0, n["classes"], (rows,), generator=draw),
    }


# A recurrent model, written as a loop over time.


def recurrent_loss(n: Numbers) -> Callable[[Any, Any], torch.Tensor]:
    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            gate = torch.sigmoid(x[:, t] @ p["gate"])
            state = gate * state + (1 - gate) * torch.tanh(x[:, t] @ p["w"] + state @ p["u"])
            out.append(state)
        return x + torch.stack(out, 1)

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = p["embedding"][batch["x"]]
        for block in p["layers"]:
            x = layer(block, x)
        return cross_entropy(x @ p["embedding"].T, batch["y"])

    return loss


def recurrent_params(n: Numbers, draw: Draw) -> Any:
    w = n["width"]
    layers = [{name: draw(w, w) for name in ("gate", "w", "u")} for _ in range(n["layers"])]
    return {"embedding": draw(n["vocabulary"], w), "layers": layers}


# An encoder and a decoder, whose layers are blocks of two kinds.


def translate_loss(n: Numbers) -> Callable[[Any, Any], torch.Tensor]:
    @fz.block
    def encode(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + attend(*(x @ p["qkv"]).chunk(3, -1), n["heads"], causal=False) @ p["out"]

    @fz.block
    def decode(p: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        k, v = (memory @ p["kv"]).chunk(2, -1)
        return x + attend(x @ p["q"], k, v, n["heads"], causal=False) @ p["out"]

    def loss(p: Any, batch: Any) -> torch.Tensor:
        memory = p["embedding"][batch["x"]]
        for block in p["encoder"]:
            memory = encode(block, memory)
        x = p["embedding"][batch["y"]]
        for block in p["decoder"]:
            x = decode(block, x, memory)
        return cross_entropy(x @ p["head"], batch["y"])

    return loss


def translate_params(n: Numbers, draw: Draw) -> Any:
    w = n["width"]
    return {
        "embedding": draw(n["vocabulary"], w),
        "encoder": [{"qkv": draw(w, 3 * w), "out": draw(w, w)} for _ in range(n["layers"])],
        "decoder": [{"q": draw(w, w), "kv": draw(w, 2 * w), "out": draw(w, w)} for _ in range(n["decoders"])],
        "head": draw(w, n["vocabulary"]),
    }


TOKENS = {"vocabulary": 12, "length": 4, "layers": 2}
MODELS = {
    "gpt": Model({**TOKENS, "width": 8, "hidden": 12, "heads": 4}, gpt_loss, gpt_params, token_batch),
    "mlp": Model({"inputs": 6, "outputs": 4, "width": 8, "layers": 2}, mlp_loss, mlp_params, mlp_batch),
    "experts": Model({**TOKENS, "width": 8, "hidden": 6, "experts": 4, "chosen": 2}, moe_loss, moe_params, token_batch),
    "convolution": Model(
        {"inputs": 2, "size": 6, "channels": 4, "kernel": 3, "classes": 4, "layers": 2},
        conv_loss,
        conv_params,
        conv_batch,
    ),
    "recurrent": Model({**TOKENS, "width": 8}, recurrent_loss, recurrent_params, token_batch),
    "translation": Model(
        {**TOKENS, "width": 8, "heads": 2, "decoders": 2}, translate_loss, translate_params, token_batch
    ),
}

DATA_AXES = {"data", "node", "replica"}
DATA_PARALLEL_PIECES = [name for name, x in PIECES.items() if x.axes and {*x.axes} <= DATA_AXES and x.any_size]
OTHER_PIECES = [name for name, x in PIECES.items() if name not in DATA_PARALLEL_PIECES and x.any_size]
OPTIMIZERS = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)),
    "momentum": lambda: optim.sgd(0.05, momentum=0.9, nesterov=True),
    "lamb": lambda: optim.lamb(1e-2),
    "lion": lambda: optim.lion(1e-3),
}


@dataclass(frozen=True)
class Case:
    step: Any
    loss: Callable[[Any, Any], torch.Tensor]
    mesh: fz.AbstractMesh
    params: Any
    batch: Any
    text: str


def changed(value: int, pick: random.Random) -> int:
    return pick.choice([0, 1, 2, 3, 5, 7, 13, value - 1, value + 1, 2 * value - 1])


def draw_case(number: int) -> Case:
    pick = random.Random(number)
    name = pick.choice([*MODELS])
    model = MODELS[name]
    numbers = {**model.numbers, "rows": 4}
    what = pick.choice([*numbers, "ranks"])
    if what != "ranks":
        numbers[what] = changed(numbers[what], pick)
    names = [pick.choice(DATA_PARALLEL_PIECES), *pick.sample(OTHER_PIECES, pick.choice([1, 2, 2, 3]))]
    if name == "experts" and pick.random() < 0.5:
        names.append("expert")
    optimizer = pick.choice([*OPTIMIZERS])
    axes = {axis: 2 for x in names for axis in PIECES[x].axes}
    if what == "ranks":
        axes[pick.choice([*axes])] = pick.choice([1, 3, 5])
    return build_case(name, numbers, names, optimizer, axes, number, what)


def build_case(
    name: str, numbers: Numbers, names: list[str], optimizer: str, axes: dict[str, int], seed: int, what: str
) -> Case:
    """A case of a model. `numbers` also has the rows of each rank; `what` is the number that is changed."""
    model, numbers = MODELS[name], dict(numbers)
    # Of two of a kind, which conflict, the last; the stages of one case belong together.
    transforms = {str(t) if kind(t) == "stage" else t.name: t for t in composed(names)[0]}
    rows = numbers.pop("rows")
    for axis in ("data", "node", "replica", "expert"):
        rows *= axes.get(axis, 1)
    rows *= transforms["accumulate"].num_micro_batches if "accumulate" in transforms else 1
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.4  # noqa: E731
    loss = model.loss(numbers)
    text = f"{name} with {what}={numbers.get(what, rows) if what != 'ranks' else axes}, {', '.join(names)}, {optimizer}"
    return Case(
        fz.compose(*transforms.values())(fz.train_step(loss, OPTIMIZERS[optimizer]())),
        loss,
        fz.AbstractMesh(unified_memory=False, **dict(sorted(axes.items()))),
        model.params(numbers, draw),
        model.batch(numbers, rows, generator),
        text,
    )


def outcome(number: int) -> tuple[str, str]:
    """What becomes of a case, and details: "equal", "rejected" by an error with a `Fix:`, "fault", or "invalid" if
    PyTorch has no loss."""
    try:
        return outcome_of(draw_case(number))
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        return "invalid", f"{type(error).__name__}: {error}"


def outcome_of(case: Case) -> tuple[str, str]:
    leaves = fz.tree.map(lambda x: x.clone().requires_grad_(), case.params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = case.loss(leaves, case.batch)
        loss.backward()
    if not loss.isfinite():  # a mean over nothing
        return "invalid", f"the loss is {loss.item()}"
    try:
        found = simulated.differences(case.step, case.mesh, case.params, case.batch, STEPS)
        others = tuple(t for t in case.step.transforms if not isinstance(t, PRECISIONS))
        if not found and others != case.step.transforms:  # what precision rounds leaves room for faults of others
            step = replace(case.step, transforms=others)
            found = simulated.differences(step, case.mesh, case.params, case.batch, STEPS)
    except FzeroError as error:
        text = str(error)
        is_rejection = "\nFix: " in text and not re.search(r"\bbug\b", text) and not isinstance(error, VerifyError)
        return "rejected" if is_rejection else "fault", f"{case.text}\n{text}"
    except Exception as error:
        return "fault", f"{case.text}\n{type(error).__name__}: {error}"
    return ("fault", "\n".join([case.text, *found])) if found else ("equal", case.text)


def main(argument: str) -> int:
    first, _, stop = argument.partition(":")
    counts: Counter[str] = Counter()
    for number in range(int(first), int(stop or int(first) + 1)):
        found, details = outcome(number)
        counts[found] += 1
        if found == "fault" or not stop:
            print(f"python tests/changed_numbers.py {number}: {found}: {details}", flush=True)
    print(dict(counts))
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
