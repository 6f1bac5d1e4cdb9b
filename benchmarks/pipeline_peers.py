"""Stages over ranks beside PyTorch's and DeepSpeed's: `fz.pipeline`; `torch.distributed.pipelining`, alone and with
FSDP2; and DeepSpeed's `PipelineModule` with its ZeRO-1, where DeepSpeed is installed.

    python benchmarks/pipeline_peers.py                      # two and four processes: about 12 minutes on 2 cores
    python benchmarks/pipeline_peers.py --steps 3 --small    # to see that it works

One GPT; the same values, batches, AdamW and clipping for all, in fp32. Two processes are two stages, or four where
they are interleaved. On four `data` cuts the batch: fzero runs ZeRO-1 over it, PyTorch FSDP2, which keeps
parameters gathered through the step. The peers' layers are compiled; PyTorch's norm of all gradients is an all_reduce
by hand. "zb" has two products for each of 1F1B's backward; its bubble is shorter, which CPU seconds do not show.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import publish, serve, settings, verdict
from contest import COLUMNS, Step, arguments, compared, contest, how, of_rank, own_network, row, stepped
from model import Config, make_batches, make_init
from torch import nn

LR, WEIGHT_DECAY, MAX_NORM, NUM_BATCHES, PIPE, MICRO = 3e-4, 0.01, 1.0, 16, 2, 4
TITLES = {
    "fzero": "fzero, 1F1B",
    "fzero_interleaved": "fzero, interleaved, 2 chunks",
    "fzero_zb": "fzero, zero bubble",
    "torch": "torch.distributed.pipelining, 1F1B, compiled layers",
    "torch_interleaved": "torch.distributed.pipelining, interleaved, 2 chunks, compiled layers",
    "deepspeed": "DeepSpeed, PipelineModule, compiled layers",
}
THERE = [name for name in TITLES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
PAIRS = (("fzero", "torch"), ("fzero_interleaved", "torch_interleaved"), ("fzero", "deepspeed"))
OPTIONS = {"fzero_interleaved": {"schedule": "interleaved", "chunks": 2}, "fzero_zb": {"schedule": "zb"}}


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    data = size // PIPE  # ranks are row-major over data, pipe; DeepSpeed's over pipe, data
    index = rank % data if args.contestant == "deepspeed" else rank // PIPE
    batches = [tuple(x.chunk(data)[index] for x in both) for both in make_batches(config, NUM_BATCHES)]
    make = _fzero if args.contestant.startswith("fzero") else _torch if "torch" in args.contestant else _deepspeed
    return of_rank(lambda: make(args, config, rank, batches[0]), batches)


def _fzero(args: argparse.Namespace, config: Config, rank: int, batch: Any) -> Step:
    from model import make_loss

    import fzero as fz
    from fzero import optim

    data = int(os.environ["WORLD_SIZE"]) // PIPE
    axes: dict[str, Any] = {"data": data} if data > 1 else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, pipe=PIPE)
    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    how: Any = OPTIONS.get(args.contestant, {})
    more = [fz.shard_opt_state()] if data > 1 else []
    step = fz.compose(*more, fz.accumulate(MICRO, schedule="layerwise"), fz.pipeline(**how))(
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


# --- DeepSpeed ---


class Embedding(nn.Module):
    def __init__(self, p: Any):
        super().__init__()
        self.p = nn.ParameterDict(p)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.p["tok"]) + self.p["pos"]


class Head(nn.Module):
    def __init__(self, p: Any):
        super().__init__()
        self.p = nn.ParameterDict(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.layer_norm(x, x.shape[-1:], self.p["ln"]), self.p["out"])


def _deepspeed(args: argparse.Namespace, config: Config, rank: int, batch: Any) -> Step:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.pipe import PipelineModule  # pyright: ignore[reportMissingImports]

    import fzero as fz

    data = int(os.environ["WORLD_SIZE"]) // PIPE
    deepspeed.init_distributed(dist_backend="gloo")
    params: Any = make_init(config)(fz.random.key(0))
    layers = [Layer(p, config.heads) for p in params["layers"]]
    for layer in layers:
        layer.compile()
    half = config.layers // PIPE
    net: Any = PipelineModule(
        layers=[
            nn.Sequential(Embedding(params["embed"]), *layers[:half]),
            nn.Sequential(*layers[half:], Head(params["head"])),
        ],
        num_stages=PIPE,
        loss_fn=_loss,
        partition_method="uniform",
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    rows = config.batch // data // MICRO
    config_of: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 1},  # without, each stage clips by a norm of its own
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine: Any = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of)[0]

    def run(batch: Any) -> Any:
        return engine.train_batch(data_iter=iter([*zip(*(x.split(rows) for x in batch), strict=True)]))

    return run


# --- all of them ---


def main() -> None:
    small = {"layers": 4, "width": 64, "heads": 4, "seq": 32, "rounds": 2}
    model = {"layers": 4, "width": 256, "heads": 8, "seq": 256, "batch": 16}
    args = arguments(__doc__, "pipeline_peers", TITLES, THERE, small, **model)
    if args.worker:
        serve(worker(args))
        return
    own_network()
    data: dict[str, Any] = {"settings": settings(args, "contestant"), "found": {}}
    rows, notes = [], []
    for size in args.processes:
        found = data["found"][str(size)] = contest(args, __file__, size, stages=True)
        notes += compared(size, found, PAIRS)
        for name in (x for x in found if "bubbles" in found[x]):
            measured, planned = (sum(x) / size for x in found[name]["bubbles"])
            apart = abs(measured - planned) / planned
            text = f"{name} waits for other stages {measured:.1%} of a step, by plan {planned:.1%}"
            notes.append(f"{size} processes: {text} (within 10%: {verdict(apart, 0.1)})")
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
