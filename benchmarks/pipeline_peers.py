"""Stages over ranks beside PyTorch's own: `fz.pipeline`, and `torch.distributed.pipelining`, alone and with FSDP2.

    python benchmarks/pipeline_peers.py                      # two and four processes: about 8 minutes on 2 cores
    python benchmarks/pipeline_peers.py --steps 3 --small    # to see that it works

One GPT; the same values, batches, AdamW and clipping for all, in fp32. Two processes are two stages, or four where
they are interleaved. On four `data` cuts the batch: fzero runs ZeRO-1 over it, PyTorch FSDP2, which keeps
parameters gathered through the step. PyTorch's layers are compiled; its norm of all gradients is an all_reduce by hand.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import publish, serve, settings
from contest import COLUMNS, Step, arguments, compared, contest, how, of_rank, own_network, row, stepped
from model import Config, make_batches, make_init
from torch import nn

LR, WEIGHT_DECAY, MAX_NORM, NUM_BATCHES, PIPE, MICRO = 3e-4, 0.01, 1.0, 16, 2, 4
TITLES = {
    "fzero": "fzero, 1F1B",
    "fzero_interleaved": "fzero, interleaved, 2 chunks",
    "torch": "torch.distributed.pipelining, 1F1B, compiled layers",
    "torch_interleaved": "torch.distributed.pipelining, interleaved, 2 chunks, compiled layers",
}
PAIRS = (("fzero", "torch"), ("fzero_interleaved", "torch_interleaved"))


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    data = size // PIPE  # ranks are row-major over data, pipe
    batches = [tuple(x.chunk(data)[rank // PIPE] for x in both) for both in make_batches(config, NUM_BATCHES)]
    make = _fzero if args.contestant.startswith("fzero") else _torch
    return of_rank(lambda: make(args, config, rank, batches[0]), batches)


def _fzero(args: argparse.Namespace, config: Config, rank: int, batch: Any) -> Step:
    from model import make_loss

    import fzero as fz
    from fzero import optim

    data = int(os.environ["WORLD_SIZE"]) // PIPE
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **({"data": data} if data > 1 else {}), pipe=PIPE)
    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    how: Any = {"schedule": "interleaved", "chunks": 2} if args.contestant == "fzero_interleaved" else {}
    more = [fz.shard_opt_state()] if data > 1 else []
    step = fz.compose(*more, fz.accumulate(MICRO, vertical=True), fz.pipeline(**how))(
        fz.train_step(make_loss(config), optimizer)
    )
    train = fz.compile(step, mesh, batch=batch, backend=args.backend)
    return stepped(train, train.init(make_init(config)(fz.random.key(0))))


# --- PyTorch ---


class Layer(nn.Module):
    def __init__(self, p: Any, heads: int):
        super().__init__()
        self.p, self.heads = nn.ParameterDict(p), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.p
        h = F.linear(F.layer_norm(x, x.shape[-1:], p["ln1"]), p["qkv"])
        q, k, v = (t.transpose(1, 2) for t in h.unflatten(-1, (3, self.heads, -1)).unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), p["o"])
        up = F.linear(F.layer_norm(x, x.shape[-1:], p["ln2"]), p["up"])
        return x + F.linear(F.gelu(up, approximate="tanh"), p["down"])


class Part(nn.Module):
    """Some layers of the GPT: with the embedding if they are the first, with the head if they are the last."""

    def __init__(self, params: Any, config: Config, number: int, parts: int):
        super().__init__()
        each = config.layers // parts
        self.embed = nn.ParameterDict(params["embed"]) if number == 0 else None
        self.layers = nn.ModuleList(
            Layer(p, config.heads) for p in params["layers"][number * each : (number + 1) * each]
        )
        self.head = nn.ParameterDict(params["head"]) if number == parts - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = F.embedding(x, self.embed["tok"]) + self.embed["pos"]
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            x = F.linear(F.layer_norm(x, x.shape[-1:], self.head["ln"]), self.head["out"])
        return x


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _torch(args: argparse.Namespace, config: Config, rank: int, batch: Any) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
    from torch.distributed.tensor import DTensor

    import fzero as fz

    data = int(os.environ["WORLD_SIZE"]) // PIPE
    mesh = init_device_mesh("cpu", (data, PIPE), mesh_dim_names=("data", "pipe"))
    group, here = mesh.get_group("pipe"), rank % PIPE
    chunks = 2 if args.contestant == "torch_interleaved" else 1
    params: Any = make_init(config)(fz.random.key(0))
    parts = [Part(params, config, here + c * PIPE, chunks * PIPE) for c in range(chunks)]
    for part in parts:
        for layer in part.layers:
            layer.compile()
        if data > 1:
            for layer in part.layers:
                fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
    stages = [
        PipelineStage(part, here + c * PIPE, chunks * PIPE, torch.device("cpu"), group=group)
        for c, part in enumerate(parts)
    ]
    leaves: list[Any] = [x for part in parts for x in part.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, MICRO, loss_fn=_loss)  # type: ignore[arg-type]
        if chunks > 1
        else Schedule1F1B(stages[0], MICRO, loss_fn=_loss)
    )

    def run(batch: Any) -> Any:
        tokens, targets = batch
        losses: list[torch.Tensor] = []
        given = (tokens,) if here == 0 else ()
        last = {"target": targets, "losses": losses} if here == PIPE - 1 else {}
        schedule.step(*given, **last)
        norm: Any = nn.utils.get_total_norm([x.grad for x in leaves], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        told = torch.stack([norm.square(), torch.stack(losses).mean().detach() if losses else torch.zeros(())])
        dist.all_reduce(told, group=group)
        nn.utils.clip_grads_with_norm_(leaves, MAX_NORM, told[0].sqrt(), foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return told[1]

    return run


# --- all of them ---


def main() -> None:
    small = {"layers": 4, "width": 64, "heads": 4, "seq": 32, "rounds": 2}
    model = {"layers": 4, "width": 256, "heads": 8, "seq": 256, "batch": 16}
    args = arguments(__doc__, "pipeline_peers", TITLES, [*TITLES], small, **model)
    if args.worker:
        serve(worker(args))
        return
    own_network()
    data: dict[str, Any] = {"settings": settings(args, "contestant"), "found": {}}
    rows, notes = [], []
    for size in args.processes:
        found = data["found"][str(size)] = contest(args, __file__, size)
        notes += compared(size, found, PAIRS)
        rows += [row(f"{size}: {TITLES[name]}", x) for name, x in found.items()]
    notes = [
        f"A GPT of {args.layers} layers, width {args.width}, {args.heads} heads, sequence {args.seq}, global "
        f"batch {args.batch} in {MICRO} micro-batches; fp32, gloo, one thread a process.",
        f"pipe={PIPE}, and on four processes data=2.",
        how(args),
        *notes,
    ]
    publish(args.name, "Stages over ranks", COLUMNS, rows, notes, data, args.out)


if __name__ == "__main__":
    main()
