"""`fz.sequence_parallel` compared with Ulysses, by hand with `all_to_all_single` and by DeepSpeed.

On two processes the only axis is `seq`; on four, `data` shards the batch. fzero runs ZeRO-1 over both axes, DeepSpeed
its `DistributedAttention` under its ZeRO-1. By hand, each layer is compiled except for its exchanges, one all_reduce
sums all gradients, and every rank has the whole state. PyTorch's `context_parallel` does not run here: DTensor has no
sharding strategy for the CPU's attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from contest import Axis
from model import Config, after_attention, attention, before_attention, logits_of, make_init, make_loss
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
    reduced,
    torch_adamw,
)

SEQ = 2


def _fzero(config: Config, size: int, backend: str, attention: str) -> Step:
    import fzero as fz

    axes: dict[str, Any] = {"data": size // SEQ} if size > SEQ else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, seq=SEQ)
    parallel = fz.sequence_parallel(fz.train_step(make_loss(config), clipped_adamw()), attention=attention)
    step = fz.shard_opt_state(parallel, axis=(*axes, "seq"))
    return FzeroStep(step, mesh, make_init(config)(fz.random.key(0)), backend=backend)


# --- by hand, and by DeepSpeed ---


class _Exchanged(torch.autograd.Function):
    """Reshards [batch, heads, positions, size] from positions to heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_heads: bool, group: Any) -> torch.Tensor:  # type: ignore[override]
        import torch.distributed as dist

        ctx.to_heads, ctx.group = to_heads, group
        split, joined = (1, 2) if to_heads else (2, 1)
        sent = torch.stack([part.contiguous() for part in x.chunk(SEQ, split)])
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent, group=group)
        return torch.cat(out.unbind(0), joined)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _Exchanged.forward(ctx, grad, not ctx.to_heads, ctx.group), None, None


class _Attention(nn.Module):
    """Attention as DeepSpeed calls it: of [batch, positions, heads, size]."""

    def forward(self, *qkv: torch.Tensor, **_: Any) -> torch.Tensor:
        return attention(*(x.transpose(1, 2) for x in qkv[:3])).transpose(1, 2).contiguous()


class GPT(nn.Module):
    """The summed losses of this rank's positions, over the number of all positions of its rows."""

    def __init__(self, config: Config, mixed: Any, number: int, compiled: Any = lambda fn: fn):
        super().__init__()
        import fzero as fz

        params: Any = make_init(config)(fz.random.key(0))
        self.config, self.number, self.mixed = config, number, mixed
        self.embed, self.head = (nn.ParameterDict(params[name]) for name in ("embed", "head"))
        self.layers = nn.ModuleList(nn.ParameterDict(p) for p in params["layers"])
        self.first, self.last = compiled(before_attention), compiled(after_attention)

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        tokens, targets = (x.chunk(SEQ, 1)[self.number] for x in batch)
        x: Any = F.embedding(tokens, self.embed["tok"]) + self.embed["pos"].chunk(SEQ)[self.number]
        for layer in self.layers:
            p = dict(layer.items())
            x = self.last(p, x, self.mixed(*self.first(p, x, self.config.heads)))
        logits = logits_of(self.head, x)
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / (targets.numel() * SEQ)


def _by_hand(config: Config, rank: int, size: int) -> Step:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = [dist.new_group(list(range(i, i + SEQ))) for i in range(0, size, SEQ)][rank // SEQ]

    def exchanged(*qkv: torch.Tensor) -> torch.Tensor:
        mixed: Any = attention(*(_Exchanged.apply(t, True, group) for t in qkv))  # type: ignore[arg-type]
        return _Exchanged.apply(mixed, False, group)  # type: ignore[return-value]

    model = GPT(config, exchanged, rank % SEQ, torch.compile)
    leaves, optimizer = list(model.parameters()), torch_adamw(model)

    def run(batch: Any) -> Any:
        loss = model(*batch)
        loss.backward()
        total = reduced(leaves, loss, size // SEQ)
        nn.utils.clip_grad_norm_(leaves, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return run


def _deepspeed(config: Config, rank: int, size: int) -> Step:
    deepspeed_module()
    from deepspeed.runtime.sequence_parallel import parallel_state_sp  # pyright: ignore[reportMissingImports]
    from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]

    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=SEQ)
    group = parallel_state_sp.get_sequence_parallel_group()
    distributed = DistributedAttention(_Attention(), group, scatter_idx=2, gather_idx=1)

    def mixed(*qkv: torch.Tensor) -> torch.Tensor:
        return distributed(*(x.transpose(1, 2).contiguous() for x in qkv), 0).transpose(1, 2)

    model, data = GPT(config, mixed, rank % SEQ), size // SEQ
    engine = deepspeed_engine(model, config.batch // data, 1, torch_adamw(model), mpu=parallel_state_sp)
    return averaged(deepspeed_step(engine), data)


def make(name: str, config: Config, rank: int, size: int, backend: str, batch: Any) -> Step:
    if name.startswith("fzero"):
        return _fzero(config, size, backend, "keys" if name == "fzero_keys" else "heads")
    return {"by_hand": _by_hand, "deepspeed": _deepspeed}[name](config, rank, size)


AXIS = Axis(
    make,
    shard=lambda name, rank, size: (rank // SEQ, size // SEQ),
    titles={
        "fzero": "fzero, heads",
        "fzero_keys": "fzero, keys",
        "by_hand": "Ulysses by hand, compiled per part of a layer",
        "deepspeed": "DeepSpeed, DistributedAttention, ZeRO-1",
    },
    pairs=(("fzero", "by_hand"), ("fzero", "deepspeed")),
    model={"layers": 4, "width": 256, "heads": 8, "seq": 512, "batch": 4},
    small={"layers": 2, "width": 64, "heads": 4, "seq": 32},
    note="seq=2, and data=2 on four processes",
)
