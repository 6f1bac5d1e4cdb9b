"""Positions over ranks beside Ulysses: `fz.sequence_parallel`, and `all_to_all_single` by hand and by DeepSpeed.

    python benchmarks/sequence_peers.py                      # two and four processes: about 6 minutes on 2 cores
    python benchmarks/sequence_peers.py --steps 3 --small    # to see that it works

One GPT; the same values, batches, AdamW and clipping for all, in fp32. On two processes all axes are `seq`; on four
`data` cuts the batch. fzero runs ZeRO-1 over both axes, DeepSpeed its `DistributedAttention` under its ZeRO-1. Written
by hand: each layer compiled but for its exchanges, one all_reduce of all gradients, and every rank has the whole state.
Without DeepSpeed in the environment it is left out. PyTorch's `context_parallel` has no rule for the CPU's attention.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import publish, serve, settings
from contest import COLUMNS, Step, arguments, compared, contest, how, of_rank, row, stepped
from model import Config, make_batches, make_init
from torch import nn

LR, WEIGHT_DECAY, MAX_NORM, NUM_BATCHES, SEQ = 3e-4, 0.01, 1.0, 16, 2
TITLES = {
    "fzero": "fzero, heads",
    "fzero_keys": "fzero, keys",
    "by_hand": "Ulysses by hand, compiled per part of a layer",
    "deepspeed": "DeepSpeed, DistributedAttention, ZeRO-1",
}
THERE = [name for name in TITLES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
PAIRS = (("fzero", "by_hand"), ("fzero", "deepspeed"))


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    data = size // SEQ
    batches = [tuple(x.chunk(data)[rank // SEQ] for x in both) for both in make_batches(config, NUM_BATCHES)]
    make = _fzero if args.contestant.startswith("fzero") else _by_hand if args.contestant == "by_hand" else _deepspeed
    return of_rank(lambda: make(args, config, rank, size), batches)


def _fzero(args: argparse.Namespace, config: Config, rank: int, size: int) -> Step:
    from model import make_loss

    import fzero as fz
    from fzero import optim

    axes: dict[str, Any] = {"data": size // SEQ} if size > SEQ else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, seq=SEQ)
    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    attention = "keys" if args.contestant == "fzero_keys" else "heads"
    parallel = fz.sequence_parallel(fz.train_step(make_loss(config), optimizer), attention=attention)
    train = fz.compile(fz.shard_opt_state(parallel, axis=(*axes, "seq")), mesh, backend=args.backend)
    return stepped(train, train.init(make_init(config)(fz.random.key(0))))


# --- by hand, and by DeepSpeed ---


class _Exchanged(torch.autograd.Function):
    """Of [batch, positions, heads, size] each rank's part: of heads instead of positions, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_heads: bool, group: Any) -> torch.Tensor:  # type: ignore[override]
        import torch.distributed as dist

        ctx.to_heads, ctx.group = to_heads, group
        cut, joined = (2, 1) if to_heads else (1, 2)
        sent = torch.stack([part.contiguous() for part in x.chunk(SEQ, cut)])
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


def _behind(x: torch.Tensor, mixed: torch.Tensor, p: Any) -> torch.Tensor:
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
        self.first, self.last = compiled(_heads_of), compiled(_behind)

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


def _by_hand(args: argparse.Namespace, config: Config, rank: int, size: int) -> Step:
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


def _deepspeed(args: argparse.Namespace, config: Config, rank: int, size: int) -> Step:
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


# --- all of them ---


def main() -> None:
    small = {"layers": 2, "width": 64, "heads": 4, "seq": 32, "rounds": 2}
    model = {"layers": 4, "width": 256, "heads": 8, "seq": 512, "batch": 4}
    args = arguments(__doc__, "sequence_peers", TITLES, THERE, small, **model)
    if args.worker:
        serve(worker(args))
        return
    data: dict[str, Any] = {"settings": settings(args, "contestant"), "found": {}}
    rows, notes = [], []
    for size in args.processes:
        found = data["found"][str(size)] = contest(args, __file__, size)
        notes += compared(size, found, PAIRS)
        rows += [row(f"{size}: {TITLES[name]}", x) for name, x in found.items()]
    notes = [
        f"A GPT of {args.layers} layers, width {args.width}, {args.heads} heads, sequence {args.seq}, global "
        f"batch {args.batch}; fp32, gloo, one thread a process, seq=2, and data=2 on four processes.",
        how(args),
        "PyTorch's context_parallel does not run here: the CPU's attention has no sharding strategy in DTensor.",
        *notes,
    ]
    publish(args.name, "Positions over ranks", COLUMNS, rows, notes, data, args.out)


if __name__ == "__main__":
    main()
