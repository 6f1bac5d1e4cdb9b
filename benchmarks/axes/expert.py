"""`fz.expert_parallel` compared with a mixture of experts written by hand, with `all_to_all_single` under autograd.

The feed-forwards of the GPT are mixtures: two of eight experts for each token, with a capacity that drops nothing. By
hand, the gradients of all other parameters are one all_reduce, and the norm is that of each rank's experts and the
rest. A process with all experts and samples is the reference for the losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from contest import Axis
from model import Config
from training import LR, WEIGHT_DECAY, FzeroStep, Step, clipped_adamw, own_norm_step, reduced

from fzero.ops.experts import combine, dispatch

EXPERTS, CHOICES = 8, 2
OF_EXPERTS = ("up", "down")


def init(config: Config) -> dict[str, Any]:
    g, d = torch.Generator().manual_seed(0), config.width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.02

    def layer() -> dict[str, torch.Tensor]:
        products = {"qkv": draw(d, 3 * d), "out": draw(d, d), "router": draw(d, EXPERTS)}
        experts = {"up": draw(EXPERTS, d, 2 * d), "down": draw(EXPERTS, 2 * d, d)}
        return {"ln1": torch.ones(d), "ln2": torch.ones(d), **products, **experts}

    layers = [layer() for _ in range(config.layers)]
    return {"tok": draw(config.vocab, d), "pos": draw(config.seq, d), "layers": layers, "ln": torch.ones(d)}


def before(p: Any, x: torch.Tensor, heads: int) -> tuple[Any, ...]:
    """A layer up to the inputs of its experts."""
    h = F.layer_norm(x, x.shape[-1:], p["ln1"])
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (h @ p["qkv"]).chunk(3, -1))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    h = F.layer_norm(x, x.shape[-1:], p["ln2"]).flatten(0, 1)
    weights, chosen = (h @ p["router"]).softmax(-1).topk(CHOICES, -1)
    return x, *dispatch(h, chosen, weights, num_experts=EXPERTS, capacity=EXPERTS / CHOICES)


def within(p: Any, rows: torch.Tensor) -> torch.Tensor:
    return F.gelu(rows @ p["up"], approximate="tanh") @ p["down"]


def after(x: torch.Tensor, rows: torch.Tensor, back: Any) -> torch.Tensor:
    return x + combine(rows, back).view_as(x)


def loss_of(params: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.layer_norm(x, x.shape[-1:], params["ln"]) @ params["tok"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _fzero(config: Config, size: int, backend: str) -> Step:
    import fzero as fz

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        x, rows, back = before(p, x, config.heads)
        return after(x, within(p, rows), back)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = F.embedding(batch[0], params["tok"]) + params["pos"]
        for p in params["layers"]:
            x = layer(p, x)
        return loss_of(params, x, batch[1])

    step = fz.expert_parallel(fz.train_step(loss_fn, clipped_adamw()), where=lambda path, leaf: leaf.ndim == 3)
    mesh = fz.make_mesh(device="cpu", shared_memory=False, expert=size)
    return FzeroStep(step, mesh, init(config), backend=backend)


class _Exchanged(torch.autograd.Function):
    """Sends one chunk of dim 0 to each rank and receives theirs; gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        rows = rows.contiguous()
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _Exchanged.forward(ctx, grad)


def _by_hand(config: Config, rank: int, size: int, compiled: bool) -> Step:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    params = init(config)
    for p in params["layers"]:
        for name in OF_EXPERTS:
            p[name] = p[name].chunk(size)[rank].clone()
    leaves: list[Any] = [params["tok"], params["pos"], params["ln"], *(x for p in params["layers"] for x in p.values())]
    experts = {id(p[name]) for p in params["layers"] for name in OF_EXPERTS}
    of_all = [x.requires_grad_() for x in leaves if id(x) not in experts]
    of_here = [x.requires_grad_() for x in leaves if id(x) in experts]
    optimizer = torch.optim.AdamW([*of_all, *of_here], lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    wrap: Any = torch.compile if compiled else lambda fn: fn
    first, mixture, last = (wrap(fn) for fn in (before, within, after))
    here = EXPERTS // size

    def exchanged(rows: torch.Tensor) -> torch.Tensor:
        return _Exchanged.apply(rows) if size > 1 else rows  # type: ignore[return-value]

    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        x, rows, back = first(p, x, config.heads)
        rows = exchanged(rows.unflatten(0, (size, here))).transpose(0, 1).flatten(1, 2)  # [here, rows of all, features]
        rows = mixture(p, rows).unflatten(1, (size, -1)).transpose(0, 1)
        return last(x, exchanged(rows).flatten(0, 1), back)

    def run(batch: Any) -> Any:
        x = F.embedding(batch[0], params["tok"]) + params["pos"]
        for p in params["layers"]:
            x = layer(p, x)
        loss = loss_of(params, x, batch[1])
        (loss / size).backward()
        total = reduced(of_all, loss / size) if size > 1 else loss.detach()
        squares: Any = sum(x.grad.square().sum() for x in of_here)  # type: ignore[union-attr]
        if size > 1:
            dist.all_reduce(squares)
        norm = (squares + sum(x.grad.square().sum() for x in of_all)).sqrt()  # type: ignore[union-attr]
        own_norm_step([*of_all, *of_here], optimizer, norm)
        return total

    return run


def make(name: str, config: Config, rank: int, size: int, backend: str, batch: Any) -> Step:
    if name == "fzero":
        return _fzero(config, size, backend)
    return _by_hand(config, rank, size, compiled=name == "by_hand_compile")


AXIS = Axis(
    make,
    shard=lambda name, rank, size: (rank, size),
    titles={
        "fzero": "fzero, expert=2",
        "by_hand": "all_to_all_single by hand",
        "by_hand_compile": "all_to_all_single by hand, compiled per part of a layer",
        "dense": "one process, all samples and experts",
    },
    pairs=(("fzero", "by_hand"), ("fzero", "by_hand_compile")),
    model={"layers": 4, "width": 256, "heads": 8, "seq": 128, "batch": 8},
    small={"layers": 2, "width": 64, "heads": 4, "seq": 16},
    processes=(2,),
    fixed={"dense": 1},
    note=f"{EXPERTS} experts of twice the width, the best {CHOICES} for each token",
)
