"""`fz.tensor_parallel` compared with DTensor's `parallelize_module` and FSDP2, and with DeepSpeed's AutoTP.

The GPT has separate queries, keys and values. On two processes the only axis is `model`; on four, `data` shards the
batch and the parameters too.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from contest import LR, MAX_NORM, WEIGHT_DECAY, Axis, Step, stepped
from model import Config
from torch import nn

RULES: dict[str, int] = {
    "q": 0, "k": 0, "v": 0, "o": 1, "up": 0, "down": 1, "embed.tok": 0, "head.out": 0,
}  # fmt: skip
"""Of matrices as nn.Linear has them, [outputs, inputs]."""


# --- the model ---


def init(config: Config) -> dict[str, Any]:
    g, d = torch.Generator().manual_seed(0), config.width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.02

    def layer() -> dict[str, torch.Tensor]:
        square = {name: draw(d, d) for name in "qkvo"}
        return {"ln1": torch.ones(d), "ln2": torch.ones(d), **square, "up": draw(4 * d, d), "down": draw(d, 4 * d)}

    return {
        "embed": {"tok": draw(config.vocab, d), "pos": draw(config.seq, d)},
        "layers": [layer() for _ in range(config.layers)],
        "head": {"ln": torch.ones(d), "out": draw(config.vocab, d)},
    }


def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
    """Causal attention of heads of `size`, of as many as are here."""
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Embed(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.tok = nn.Embedding(config.vocab, config.width)
        self.pos = nn.Parameter(torch.empty(config.seq, config.width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, pos = self.tok(tokens), self.pos
        return x + (pos if type(x) is type(pos.data) else pos.to_local())  # type: ignore[operator]


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        d, self.size = config.width, config.width // config.heads
        self.ln1, self.ln2 = (nn.LayerNorm(d, bias=False) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln1(x)
        x = x + self.o(mixed(self.q(h), self.k(h), self.v(h), self.size))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln = nn.LayerNorm(config.width, bias=False)
        self.out = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.ln(x))


class GPT(nn.Module):
    """Logits; with the values of `init`."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed = Embed(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(config)
        params = init(config)
        with torch.no_grad():
            for name, value in self.named_parameters():
                value.copy_(_at(params, name.removesuffix(".weight")))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _at(params: Any, name: str) -> torch.Tensor:
    for key in name.split("."):
        params = params[int(key)] if key.isdigit() else params[key]
    return params


# --- the contestants ---


def _fzero(config: Config, data: int, backend: str, sequence: bool) -> Step:
    import fzero as fz
    from fzero import optim

    axes: dict[str, Any] = {"data": data} if data > 1 else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, model=2)
    size = config.width // config.heads

    @fz.block
    def embed(p: Any, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, p["tok"]) + p["pos"]

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, x.shape[-1:], p["ln1"])
        q, k, v = (F.linear(h, p[name]) for name in "qkv")
        x = x + F.linear(mixed(q, k, v, size), p["o"])
        up = F.linear(F.layer_norm(x, x.shape[-1:], p["ln2"]), p["up"])
        return x + F.linear(F.gelu(up, approximate="tanh"), p["down"])

    @fz.block
    def head(p: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(F.layer_norm(x, x.shape[-1:], p["ln"]), p["out"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = embed(params["embed"], batch[0])
        for p in params["layers"]:
            x = layer(p, x)
        return head(params["head"], x, batch[1])

    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    step = fz.tensor_parallel(fz.train_step(loss_fn, optimizer), rules=RULES, sequence=sequence)
    train = fz.compile(fz.shard_params(step) if data > 1 else step, mesh, backend=backend)
    return stepped(train, train.init(init(config)))


def _dtensor(config: Config, data: int, sequence: bool, compiled: bool) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "model"))
    across = mesh["model"]
    model: Any = GPT(config)

    def back() -> Any:
        return RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate(), use_local_output=not sequence)

    norm = SequenceParallel if sequence else _replicated_norm
    for layer in model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {"ln1": norm(), "ln2": norm(), "o": back(), "down": back()}
        parallelize_module(layer, across, plan)
    embedding = back()
    embedding.input_layouts = (Replicate(),)
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, across, {"embed.tok": embedding, "head.ln": norm(), "head.out": logits})
    model.embed.pos = nn.Parameter(distribute_tensor(model.embed.pos.data, across, [Replicate()]))
    if sequence:  # gathered once for all the products that read it
        for part in (*(x for layer in model.layers for x in (layer.ln1, layer.ln2)), model.head.ln):
            part.register_forward_hook(lambda _, __, out: out.redistribute(placements=[Replicate()]))
    for layer in model.layers if compiled else ():
        layer.compile()
    if data > 1:
        for part in (model.embed, *model.layers, model.head, model):
            fully_shard(part, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def run(batch: Any) -> Any:
        tokens, targets = batch
        with loss_parallel():
            loss: Any = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().to_local()

    return run


def _autotp(config: Config, data: int) -> Step:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    deepspeed.init_distributed(dist_backend="gloo")
    model: Any = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    specs = [
        {"patterns": [r".*layers\.\d+\.(o|down)\.weight$"], "partition_type": "row"},
        {"patterns": [r".*layers\.\d+\.(q|k|v|up)\.weight$"], "partition_type": "column"},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": config.batch // data,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    assert model.layers[0].q.weight.shape[0] == config.width // 2, "AutoTP has sharded nothing"

    def run(batch: Any) -> Any:
        tokens, targets = batch
        loss = F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return run


def _replicated_norm() -> Any:
    """A norm on replicated values. Its weight is a DTensor like all others, for one global gradient norm."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    class ReplicatedNorm(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            weight: Any = module.weight
            module.weight = nn.Parameter(distribute_tensor(weight.data, device_mesh, [Replicate()]))
            module.register_forward_pre_hook(lambda _, x: DTensor.from_local(x[0], device_mesh, [Replicate()]))
            return module

    return ReplicatedNorm()


def make(name: str, config: Config, rank: int, size: int, backend: str, batch: Any) -> Step:
    if name.startswith("fzero"):
        return _fzero(config, size // 2, backend, sequence="sequence" in name)
    if name == "autotp":
        return _autotp(config, size // 2)
    return _dtensor(config, size // 2, sequence="sequence" in name, compiled="compile" in name)


AXIS = Axis(
    make,
    shard=lambda name, rank, size: (rank // 2, size // 2),
    titles={
        "fzero": "fzero",
        "dtensor": "DTensor",
        "dtensor_compile": "DTensor + compile per layer",
        "fzero_sequence": "fzero, sharded by position",
        "dtensor_sequence": "DTensor, SequenceParallel",
        "autotp": "DeepSpeed, AutoTP, ZeRO-1",
    },
    pairs=(
        ("fzero", "dtensor"),
        ("fzero", "dtensor_compile"),
        ("fzero_sequence", "dtensor_sequence"),
        ("fzero", "autotp"),
    ),
    model={"layers": 4, "width": 256, "heads": 8, "seq": 128, "batch": 8},
    small={"layers": 2, "width": 64, "heads": 4, "seq": 16},
    note="model=2, and data=2 on four processes, with shard_params or FSDP2",
)
