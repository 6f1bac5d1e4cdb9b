"""`fz.tensor_parallel` compared with DTensor's `parallelize_module` and FSDP2, and with DeepSpeed's AutoTP.

The GPT has separate queries, keys and values. On two processes the only axis is `model`; on four, `data` shards the
batch and the parameters too.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from contest import Axis
from model import Config, cross_entropy
from torch import nn
from training import (
    MAX_NORM,
    FzeroStep,
    Step,
    averaged,
    clipped_adamw,
    deepspeed_engine,
    deepspeed_module,
    deepspeed_step,
    fsdp2,
    torch_adamw,
)

COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")
"""The nn.Linear of a layer by the dimension that is sharded: outputs, inputs."""
RULES = {f"{name}.weight": dim for dim, names in enumerate((COLUMNS, ROWS)) for name in names}
RULES |= {"embed.tok.weight": 0, "head.out.weight": 0}


# --- the model ---


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
    """Logits. The parameters have the same values on every rank."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed = Embed(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in self.parameters():
                value.fill_(1.0) if value.ndim == 1 else value.normal_(std=0.02, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# --- the contestants ---


def _fzero(config: Config, data: int, backend: str, sequence: bool) -> Step:
    import fzero as fz

    axes: dict[str, Any] = {"data": data} if data > 1 else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, model=2)
    model = fz.functionalize(GPT(config), blocks=["embed", "layers.*", "head"])
    step = model.train_step(clipped_adamw(), lambda logits, batch: cross_entropy(logits, batch[1]))
    step = fz.tensor_parallel(step, rules=RULES, sequence=sequence)
    return FzeroStep(fz.shard_params(step) if data > 1 else step, mesh, model.params, backend=backend)


def _dtensor(config: Config, data: int, sequence: bool, compiled: bool) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
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
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        plan |= {"ln1": norm(), "ln2": norm(), **{name: back() for name in ROWS}}
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
        fsdp2(model, (model.embed, *model.layers, model.head), mesh["data"])
    optimizer = torch_adamw(model)

    def run(batch: Any) -> Any:
        tokens, targets = batch
        with loss_parallel():
            loss: Any = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().to_local()

    return run


def _autotp(config: Config, data: int) -> Step:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    deepspeed_module()
    model: Any = GPT(config)
    specs = [
        {"patterns": [rf".*layers\.\d+\.({'|'.join(names)})\.weight$"], "partition_type": kind}
        for names, kind in ((ROWS, "row"), (COLUMNS, "column"))
    ]
    parallel = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    engine = deepspeed_engine(model, config.batch // data, 1, torch_adamw(model), tensor_parallel=parallel)
    assert model.layers[0].q.weight.shape[0] == config.width // 2, "AutoTP has sharded nothing"
    step = deepspeed_step(engine, lambda tokens, targets: cross_entropy(engine(tokens), targets))
    return averaged(step, dist.get_world_size())


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
