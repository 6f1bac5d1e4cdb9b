"""`fz.sequence_parallel` compared with Ulysses, by hand with `all_to_all_single` and by DeepSpeed.

On two processes the only axis is `seq`; on four, `data` shards the batch. fzero runs ZeRO-1 over both axes, DeepSpeed
its `DistributedAttention` under its ZeRO-1. By hand, each layer is compiled except for its exchanges, one all_reduce
sums all gradients, and every rank has the whole state. PyTorch's `context_parallel` does not run here: DTensor has no
sharding strategy for the CPU's attention.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from contest import LR, MAX_NORM, WEIGHT_DECAY, Axis, Step, stepped
from model import Config, make_init, make_loss
from torch import nn

SEQ = 2


def _fzero(config: Config, size: int, backend: str, attention: str) -> Step:
    import fzero as fz
    from fzero import optim

    axes: dict[str, Any] = {"data": size // SEQ} if size > SEQ else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, seq=SEQ)
    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    parallel = fz.sequence_parallel(fz.train_step(make_loss(config), optimizer), attention=attention)
    train = fz.compile(fz.shard_opt_state(parallel, axis=(*axes, "seq")), mesh, backend=backend)
    return stepped(train, train.init(make_init(config)(fz.random.key(0))))


# --- by hand, and by DeepSpeed ---


class _Exchanged(torch.autograd.Function):
    """Reshards [batch, positions, heads, size] from positions to heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_heads: bool, group: Any) -> torch.Tensor:  # type: ignore[override]
        import torch.distributed as dist

        ctx.to_heads, ctx.group = to_heads, group
        split, joined = (2, 1) if to_heads else (1, 2)
        sent = torch.stack([part.contiguous() for part in x.chunk(SEQ, split)])
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent, group=group)
        return torch.cat(out.unbind(0), joined)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _Exchanged.forward(ctx, grad, not ctx.to_heads, ctx.group), None, None


def _heads_of(x: torch.Tensor, qkv: torch.Tensor, ln: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    h = F.linear(F.layer_norm(x, x.shape[-1:], ln), qkv)
    return h.unflatten(-1, (3, heads, -1)).unbind(2)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return _attention(q, k, v)


def _after(x: torch.Tensor, mixed: torch.Tensor, p: Any) -> torch.Tensor:
    x = x + F.linear(mixed.flatten(2), p["o"])
    up = F.linear(F.layer_norm(x, x.shape[-1:], p["ln2"]), p["up"])
    return x + F.linear(F.gelu(up, approximate="tanh"), p["down"])


class GPT(nn.Module):
    """The summed losses of this rank's positions, over the number of all positions of its rows."""

    def __init__(self, config: Config, attention: Any, number: int, compiled: Any = lambda fn: fn):
        super().__init__()
        import fzero as fz

        params: Any = make_init(config)(fz.random.key(0))
        self.config, self.number = config, number
        self.embed, self.head = (nn.ParameterDict(params[name]) for name in ("embed", "head"))
        self.layers = nn.ModuleList(nn.ParameterDict(p) for p in params["layers"])
        self.mixed = attention
        self.first, self.last = compiled(_heads_of), compiled(_after)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tokens, targets, pos = (
            x.chunk(SEQ, dim)[self.number] for x, dim in ((tokens, 1), (targets, 1), (self.embed["pos"], 0))
        )
        x: Any = F.embedding(tokens, self.embed["tok"]) + pos
        for p in self.layers:
            x = self.last(x, self.mixed(*self.first(x, p["qkv"], p["ln1"], self.config.heads)), dict(p.items()))
        logits = F.linear(F.layer_norm(x, x.shape[-1:], self.head["ln"]), self.head["out"])
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / (targets.numel() * SEQ)


def _by_hand(config: Config, rank: int, size: int) -> Step:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(i, i + SEQ))) for i in range(0, size, SEQ)]
    group = groups[rank // SEQ]

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        mixed: Any = _attention(*(_Exchanged.apply(t, True, group) for t in qkv))  # type: ignore[arg-type]
        return _Exchanged.apply(mixed, False, group)  # type: ignore[return-value]

    model = GPT(config, attention, rank % SEQ, torch.compile)
    leaves: list[Any] = list(model.parameters())
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def run(batch: Any) -> Any:
        loss = model(*batch)
        loss.backward()
        flat = torch.cat([*(x.grad.flatten() for x in leaves), loss.detach().view(1)])
        dist.all_reduce(flat)
        flat /= size // SEQ
        for x, grad in zip(leaves, flat[:-1].split([x.numel() for x in leaves]), strict=True):
            x.grad = grad.view_as(x)
        nn.utils.clip_grad_norm_(leaves, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return flat[-1]

    return run


def _deepspeed(config: Config, rank: int, size: int) -> Step:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel import parallel_state_sp  # pyright: ignore[reportMissingImports]
    from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed(dist_backend="gloo")
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=SEQ)
    group = parallel_state_sp.get_sequence_parallel_group()
    attention = DistributedAttention(_Attention(), group, scatter_idx=2, gather_idx=1)
    model = GPT(config, lambda q, k, v: attention(q.contiguous(), k.contiguous(), v.contiguous(), 0), rank % SEQ)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": config.batch // (size // SEQ),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=parallel_state_sp)[0]

    def run(batch: Any) -> Any:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / (size // SEQ)

    return run


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
