"""`fz.pipeline` compared with `torch.distributed.pipelining`, alone and with FSDP2, and with DeepSpeed's
`PipelineModule` with ZeRO-1.

Two processes are two stages, or four with the interleaved schedule. On four processes `data` shards the batch: fzero
runs ZeRO-1 over it, PyTorch FSDP2, which keeps parameters gathered through the step. The layers of the other libraries
are compiled; with PyTorch the norm of all gradients is an all_reduce by hand. "zb" has two products for each of 1F1B's
backward; its bubble is shorter, which CPU seconds do not show.
"""

from __future__ import annotations

from typing import Any

import torch
from contest import Axis
from model import Config, Embed, Layer, Logits, cross_entropy, make_init, make_loss
from torch import nn
from training import (
    LR,
    WEIGHT_DECAY,
    FzeroStep,
    Step,
    clipped_adamw,
    deepspeed_engine,
    deepspeed_module,
    own_norm_step,
    torch_adamw,
)

PIPE, MICRO = 2, 4
OPTIONS = {"fzero_interleaved": {"schedule": "interleaved", "chunks": 2}, "fzero_zb": {"schedule": "zb"}}


def _fzero(name: str, config: Config, data: int, backend: str, batch: Any) -> Step:
    import fzero as fz

    axes: dict[str, Any] = {"data": data} if data > 1 else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, pipe=PIPE)
    how: Any = OPTIONS.get(name, {})
    more = [fz.shard_opt_state()] if data > 1 else []
    transform = fz.compose(*more, fz.accumulate(MICRO, schedule="layerwise"), fz.pipeline(**how))
    step = transform(fz.train_step(make_loss(config), clipped_adamw()))
    return FzeroStep(step, mesh, make_init(config)(fz.random.key(0)), batch=batch, backend=backend)


# --- PyTorch ---


class Chunk(nn.Module):
    """Some layers of the GPT: with the embedding if they are the first, with the head if they are the last."""

    def __init__(self, params: Any, config: Config, number: int, parts: int):
        super().__init__()
        each = config.layers // parts
        self.embed = Embed(params["embed"]) if number == 0 else None
        self.layers = nn.ModuleList(
            Layer(p, config.heads) for p in params["layers"][number * each : (number + 1) * each]
        )
        self.head = Logits(params["head"]) if number == parts - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            x = self.head(x)
        return x


def _torch(config: Config, rank: int, data: int, chunks: int) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
    from torch.distributed.tensor import DTensor

    import fzero as fz

    mesh = init_device_mesh("cpu", (data, PIPE), mesh_dim_names=("data", "pipe"))
    group, here = mesh.get_group("pipe"), rank % PIPE
    params: Any = make_init(config)(fz.random.key(0))
    parts = [Chunk(params, config, here + c * PIPE, chunks * PIPE) for c in range(chunks)]
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
        ScheduleInterleaved1F1B(stages, MICRO, loss_fn=cross_entropy)  # type: ignore[arg-type]
        if chunks > 1
        else Schedule1F1B(stages[0], MICRO, loss_fn=cross_entropy)
    )

    def run(batch: Any) -> Any:
        tokens, targets = batch
        losses: list[torch.Tensor] = []
        given = (tokens,) if here == 0 else ()
        last = {"target": targets, "losses": losses} if here == PIPE - 1 else {}
        schedule.step(*given, **last)
        norm: Any = nn.utils.get_total_norm([x.grad for x in leaves], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        summed = torch.stack([norm.square(), torch.stack(losses).mean().detach() if losses else torch.zeros(())])
        dist.all_reduce(summed, group=group)
        own_norm_step(leaves, optimizer, summed[0].sqrt())
        return summed[1]

    return run


# --- DeepSpeed ---


def _deepspeed(config: Config, data: int) -> Step:
    deepspeed_module()
    from deepspeed.pipe import PipelineModule  # pyright: ignore[reportMissingImports]

    import fzero as fz

    params: Any = make_init(config)(fz.random.key(0))
    layers = [Layer(p, config.heads) for p in params["layers"]]
    for layer in layers:
        layer.compile()
    half = config.layers // PIPE
    first = nn.Sequential(Embed(params["embed"]), *layers[:half])
    last = nn.Sequential(*layers[half:], Logits(params["head"]))
    net: Any = PipelineModule([first, last], PIPE, loss_fn=cross_entropy, partition_method="uniform")
    rows = config.batch // data // MICRO
    # ZeRO-1, because without it each stage clips by its own norm
    engine = deepspeed_engine(net, rows, 1, torch_adamw(net), gradient_accumulation_steps=MICRO)
    return lambda batch: engine.train_batch(iter([*zip(*(x.split(rows) for x in batch), strict=True)]))


def make(name: str, config: Config, rank: int, size: int, backend: str, batch: Any) -> Step:
    data = size // PIPE
    if name.startswith("fzero"):
        return _fzero(name, config, data, backend, batch)
    if name == "deepspeed":
        return _deepspeed(config, data)
    return _torch(config, rank, data, chunks=2 if name == "torch_interleaved" else 1)


def shard(name: str, rank: int, size: int) -> tuple[int, int]:
    """Ranks are row-major over data and pipe; DeepSpeed's over pipe and data."""
    data = size // PIPE
    return (rank % data if name == "deepspeed" else rank // PIPE), data


AXIS = Axis(
    make,
    shard,
    titles={
        "fzero": "fzero, 1F1B",
        "fzero_interleaved": "fzero, interleaved, 2 chunks",
        "fzero_zb": "fzero, zero bubble",
        "torch": "torch.distributed.pipelining, 1F1B, compiled layers",
        "torch_interleaved": "torch.distributed.pipelining, interleaved, 2 chunks, compiled layers",
        "deepspeed": "DeepSpeed, PipelineModule, compiled layers",
    },
    pairs=(("fzero", "torch"), ("fzero_interleaved", "torch_interleaved"), ("fzero", "deepspeed")),
    model={"layers": 4, "width": 256, "heads": 8, "seq": 256, "batch": 16},
    small={"layers": 4, "width": 64, "heads": 4, "seq": 32},
    stages=True,
    note=f"{MICRO} micro-batches, pipe={PIPE}, and data=2 on four processes",
)
