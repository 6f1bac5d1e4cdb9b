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
import contextlib
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import MODEL, Group, model_flags, passed_on, publish, script_flags, serve, settings, verdict
from model import Config, make_batches, make_init
from torch import nn

LR, WEIGHT_DECAY, MAX_NORM, NUM_BATCHES, SEQ = 3e-4, 0.01, 1.0, 16, 2
LOSS_LIMIT, CPU_LIMIT = 1e-5, 0.9
SMALL = {"layers": 2, "width": 64, "heads": 4, "seq": 32, "rounds": 2}
TITLES = {
    "fzero": "fzero, heads",
    "fzero_keys": "fzero, keys",
    "by_hand": "Ulysses by hand, compiled per part of a layer",
    "deepspeed": "DeepSpeed, DistributedAttention, ZeRO-1",
}
THERE = [name for name in TITLES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]

Step = Callable[[tuple[torch.Tensor, torch.Tensor]], Any]


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    data = size // SEQ
    batches = [tuple(x.chunk(data)[rank // SEQ] for x in both) for both in make_batches(config, NUM_BATCHES)]
    live: dict[str, Any] = {"done": 0}

    def build() -> None:
        if args.contestant.startswith("fzero"):
            live["step"] = _fzero(args, config, data)
        else:
            live["step"] = _ulysses(args, config, rank, size)

    def steps(count: int) -> dict[str, Any]:
        losses, wall, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(count):
            losses.append(float(live["step"](batches[live["done"] % NUM_BATCHES])))
            live["done"] += 1
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "losses": losses}

    return {"build": build, "steps": steps}


def _fzero(args: argparse.Namespace, config: Config, data: int) -> Step:
    from model import make_loss

    import fzero as fz
    from fzero import optim

    axes: dict[str, Any] = {"data": data} if data > 1 else {}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes, seq=SEQ)
    optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    attention = "keys" if args.contestant == "fzero_keys" else "heads"
    parallel = fz.sequence_parallel(fz.train_step(make_loss(config), optimizer), attention=attention)
    train = fz.compile(fz.shard_opt_state(parallel, axis=(*axes, "seq")), mesh, backend=args.backend)
    state = train.init(make_init(config)(fz.random.key(0)))

    def run(batch: Any) -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return run


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


def _ulysses(args: argparse.Namespace, config: Config, rank: int, size: int) -> Step:
    return (_by_hand if args.contestant == "by_hand" else _deepspeed)(config, rank, size)


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


# --- all of them ---


def contest(args: argparse.Namespace, size: int) -> dict[str, Any]:
    found, groups = dict[str, Any](), dict[str, Group]()
    with contextlib.ExitStack() as stack:

        def measured(name: str) -> None:
            answers = groups[name].ask("steps", count=args.steps)
            found[name]["losses"] += [statistics.mean(at) for at in zip(*(a["losses"] for a in answers), strict=True)]
            number = size * args.steps
            found[name]["rounds"].append({kind: sum(a[kind] for a in answers) / number for kind in ("cpu_s", "wall_s")})

        for name in args.only:
            given = [f"--contestant={name}", *passed_on(args, *MODEL, "backend")]
            groups[name] = stack.enter_context(Group(__file__, size, given, timeout=300))
            groups[name].ask("build")
            found[name] = {"losses": [], "rounds": []}
            measured(name)  # compiles
            found[name]["rounds"].clear()
            print(f"{size} processes, {name}: ready", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            for name in random.Random(number).sample(args.only, len(args.only)):
                measured(name)
    for x in found.values():
        x |= {kind: statistics.median(r[kind] for r in x["rounds"]) for kind in ("cpu_s", "wall_s")}
    return found


def compared(size: int, found: dict[str, Any]) -> list[str]:
    losses = [x["losses"][:20] for x in found.values()]
    apart = max((max(at) - min(at)) / min(at) for at in zip(*losses, strict=True))
    notes = [
        f"{size} processes: losses of {len(losses[0])} steps agree to {apart:.1e} "
        f"({LOSS_LIMIT:g}: {verdict(apart, LOSS_LIMIT)})"
    ]
    for other in ("by_hand", "deepspeed"):
        if {"fzero", other} <= found.keys():
            pairs = zip(found["fzero"]["rounds"], found[other]["rounds"], strict=True)
            ratio = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in pairs)
            notes.append(
                f"{size} processes: CPU seconds of fzero / {other}: {ratio:.2f} "
                f"({CPU_LIMIT}: {verdict(ratio, CPU_LIMIT)})"
            )
    return notes


def main() -> None:
    args = _arguments()
    if args.worker:
        serve(worker(args))
        return
    data: dict[str, Any] = {"settings": settings(args, "contestant"), "found": {}}
    rows, notes = [], []
    for size in args.processes:
        found = data["found"][str(size)] = contest(args, size)
        notes += compared(size, found)
        rows += [
            (f"{size}: {TITLES[n]}", f"{x['cpu_s']:.3f}", f"{x['wall_s']:.3f}", f"{x['losses'][-1]:.6f}")
            for n, x in found.items()
        ]
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    notes = [
        f"A GPT of {config.layers} layers, width {config.width}, {config.heads} heads, sequence {config.seq}, global "
        f"batch {config.batch}; fp32, gloo, one thread a process, seq=2, and data=2 on four processes.",
        f"Seconds a step and process: medians of {args.rounds} interleaved rounds of {args.steps} steps.",
        "PyTorch's context_parallel does not run here: the CPU's attention has no sharding strategy in DTensor.",
        *notes,
    ]
    publish(args.name, "Positions over ranks", ("who", "CPU s", "wall s", "last loss"), rows, notes, data, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=4, width=256, heads=8, seq=512, batch=4)
    parser.add_argument("--steps", type=int, default=4, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    parser.add_argument("--small", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=THERE)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="fzero's")
    parser.add_argument("--contestant", choices=list(TITLES), help=argparse.SUPPRESS)
    script_flags(parser, "sequence_peers")
    args = parser.parse_args()
    for name, value in SMALL.items() if args.small else ():
        setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
