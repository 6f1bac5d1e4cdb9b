"""What codes on the wire cost and save (fz.compress): the loss after 200 steps over three seeds, bytes as the kernel
counts them, and seconds a step on a slow link, beside DDP and FSDP2.

    sudo python benchmarks/compressed.py            # ten minutes; Linux, root: ranks are in a network namespace
    sudo python benchmarks/compressed.py --small    # few steps, to see that it works

All ranks are in one namespace of their own, and talk over its loopback by gloo, never through shared memory. A slow
link is that loopback behind a token bucket (tc tbf), which all ranks share.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import publish, script_flags, settings, verdict

SOURCE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SOURCE / "examples"))
EVEN = "int8, even steps"
FORMATS: dict[str, tuple[dict[str, Any] | None, float | None]] = {
    "fp32": (None, None),
    "parameters int8": ({"grads": None}, 0.001),
    "both int8": ({}, 0.002),
    "int8, gradients int4": ({"grads": "int4"}, None),
    EVEN: ({}, None),
    "4 ranks: fp32": (None, None),
    "4 ranks: int8, int4 between nodes": ({"grads": {"data": "int8", "node": "int4"}}, 0.01),
}
"""Arguments of compress, and how much more the held-out loss may be, of fp32's."""
ALL_BF16 = "FSDP2, bf16, sums too"
DEEPSPEED = ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3, bf16")
PEERS = ("DDP", "DDP, fp16 hook", "FSDP2", "FSDP2, bf16", ALL_BF16)
PEERS += DEEPSPEED if importlib.util.find_spec("deepspeed") else ()
OURS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "data_parallel": ("data_parallel", None),
    "data_parallel, int8": ("data_parallel", {"params": None}),
    "data_parallel, int4": ("data_parallel", {"params": None, "grads": "int4"}),
    "ZeRO-3": ("shard_params", None),
    "ZeRO-3, int8": ("shard_params", {}),
    "ZeRO-3, int8 and int4": ("shard_params", {"grads": "int4"}),
}
LAYERS, WIDTH, HEADS, SEQ, BATCH, RATE = 2, 64, 4, 64, 4, 3e-3
WARM_UP = 3


def sent() -> int:
    """Bytes that ranks have sent over this namespace's loopback."""
    lines = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(int(rest.split()[0]) for name, _, rest in lines if name.strip() == "lo")


# --- processes ---


def losses(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: the held-out loss after the last step, bytes a step of all ranks, and those that are planned."""
    import torch
    import torch.distributed as dist
    import train_gpt

    import fzero as fz
    from fzero import optim
    from fzero.transforms import compress_codes as codes

    if args.what == EVEN:  # as others have them
        codes.GRADS["int8"] = codes.PARAMS["int8"]
    given, nodes = FORMATS[args.what][0], args.what.startswith("4 ranks")
    axes: dict[str, int] = {"node": 2, "data": 2} if nodes else {"data": 2}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes)
    rate = optim.warmup_cosine(RATE, max(1, args.steps // 10), args.steps, init=RATE / 10, end=RATE / 10)
    decayed = lambda path, leaf: leaf.ndim >= 2  # noqa: E731
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=decayed))
    zero = fz.shard_params(axis=("data", "node") if nodes else "data")
    transforms = [zero] if given is None else [zero, fz.compress(**given)]
    step = fz.compose(*transforms)(fz.train_step(lambda p, b: train_gpt.gpt(p, *b, heads=HEADS)[0], optimizer))
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(lambda key: train_gpt.init_gpt(key, layers=LAYERS, width=WIDTH), fz.random.key(args.seed))
    data = fz.data.TokenDataset(fz.data.python_source(), seq=SEQ, batch=BATCH, seed=args.seed)
    text, held_out = data.split(0.02)
    before = 0
    for i in range(args.steps):
        if i == WARM_UP:
            dist.barrier()
            before = sent()
        state, _ = train(state, text.batch_at(i, rank=mesh.rank, size=mesh.size))
    dist.barrier()
    nbytes = (sent() - before) / (args.steps - WARM_UP)
    params = train.gather(state).params
    with torch.no_grad():
        held = [float(train_gpt.gpt(params, *held_out.batch_at(i), heads=HEADS)[0]) for i in range(args.held_out)]
    planned = mesh.size * sum(c.bytes for c in train.plan.channels.values())
    num = sum(x.numel() for x in fz.tree.leaves(params))
    return {"held_out": statistics.mean(held), "bytes": nbytes, "planned": planned, "params": num}


def link(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: the median of the seconds of a step, and bytes a step of all ranks."""
    import model
    import torch
    import torch.distributed as dist
    from cases import contestants

    config = model.Config(LAYERS, WIDTH, HEADS, SEQ, 2 * BATCH)
    torch.set_num_threads(1)
    if args.what in OURS:
        run, rank = _ours(*OURS[args.what], model, config)
    else:
        library, bf16 = next(n for n in ("ddp", "fsdp2", "deepspeed") if n in args.what.lower()), "bf16" in args.what
        if args.what == ALL_BF16:
            from torch.distributed import fsdp

            policy = fsdp.MixedPrecisionPolicy
            fsdp.MixedPrecisionPolicy = lambda compute, reduce: policy(compute, compute)  # type: ignore[assignment]
        options = argparse.Namespace(optimizer="fused")
        peer = contestants.Contestant(args.what, library, 3, bf16=bf16)
        options.parts = 2
        make, rank = contestants.LIBRARIES[library](options, peer, config)
        run = make() if "hook" not in args.what else _hooked(make)
    batches = [tuple(t.chunk(2)[rank] for t in batch) for batch in model.make_batches(config, 4)]
    seconds, before = list[float](), 0
    for i in range(WARM_UP + args.timed):
        if i == WARM_UP:
            dist.barrier()
            before = sent()
        began = time.perf_counter()
        run(batches[i % len(batches)])
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return {"seconds": statistics.median(seconds[WARM_UP:]), "bytes": (sent() - before) / args.timed}


def _ours(zero: str, given: dict[str, Any] | None, model: Any, config: Any) -> tuple[Callable[[Any], Any], int]:
    import fzero as fz
    from fzero import optim

    mesh = fz.make_mesh(device="cpu", shared_memory=False)
    transforms = [getattr(fz, zero)(), *([] if given is None else [fz.compress(**given)])]
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(RATE, weight_decay=0.01))
    train = fz.compile(fz.compose(*transforms)(fz.train_step(model.make_loss(config), optimizer)), mesh)
    state = train.init(model.make_init(config), fz.random.key(0))

    def run(batch: Any) -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return run, mesh.rank


def _hooked(make: Callable[[], Any]) -> Any:
    """DDP with PyTorch's hook that halves what its all_reduce sends; that for bf16 knows no gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    made, init = list[Any](), DistributedDataParallel.__init__

    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    DistributedDataParallel.__init__ = keeping  # type: ignore[method-assign]
    run = make()
    made[0].register_comm_hook(None, fp16_compress_hook)
    return run


def inside(
    args: argparse.Namespace,
    job: str,
    what: str,
    ranks: int,
    rate: int = 0,
    seed: int = 0,
    script: str = __file__,
) -> dict[str, Any]:
    """The result of a job of a script on ranks in a namespace whose loopback has a rate, in Mbit/s; 0: its own."""
    print(f"{job}: {what}{f', {rate} Mbit/s' if rate else f', seed {seed}'} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder:
        flags = ["--worker", "--job", job, "--what", what, "--seed", seed, "--folder", folder]
        flags += ["--steps", args.steps, "--timed", args.timed, "--held-out", args.held_out]
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
        bucket = f"tc qdisc add dev lo root tbf rate {rate}mbit burst 512kb latency 200ms && " if rate else ""
        shell = ["unshare", "--net", "sh", "-c", f'ip link set lo up && {bucket}exec "$@"', "sh"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*shell, *run, *map(str, flags)], env=env, check=True, timeout=900)
        return json.loads((Path(folder) / "found.json").read_text())


# --- tables ---


def loss_table(args: argparse.Namespace) -> tuple[list[list[str]], list[str], dict[str, Any]]:
    found = {
        what: [inside(args, "losses", what, 4 if "4 ranks" in what else 2, seed=s) for s in range(args.seeds)]
        for what in FORMATS
    }
    rows, notes = list[list[str]](), list[str]()
    for what, runs in found.items():
        base = found["4 ranks: fp32" if "4 ranks" in what else "fp32"]
        more = statistics.mean(r["held_out"] / b["held_out"] - 1 for r, b in zip(runs, base, strict=True))
        share = runs[0]["bytes"] / base[0]["bytes"]
        off = runs[0]["bytes"] / runs[0]["planned"] - 1
        held = ", ".join(f"{r['held_out']:.4f}" for r in runs)
        nbytes = f"{runs[0]['bytes']:,.0f}"
        rows.append([what, held, f"{100 * more:+.2f} %", nbytes, f"{share:.3f}", f"{100 * off:+.0f} %"])
        limit = FORMATS[what][1]
        if limit is not None:
            notes.append(f"{what}: at most {100 * limit:g} % more loss wanted: {verdict(more, limit)}.")
        if what == EVEN:
            wanted = verdict(FORMATS["both int8"][1] or 0.0, more)
            notes.append(f"{what}: the test of both int8 is to refuse it: {wanted}.")
        if what == "both int8":
            notes.append(f"{what}: at most 0.21 of fp32's bytes wanted: {verdict(share, 0.21)}; ")
            notes[-1] += (
                f"within 15 % of the plan: {verdict(abs(off), 0.15)}. 1.008 bytes instead of 4 are 0.252 at best; "
            )
            notes[-1] += "0.21 was of what fp32 sent by gloo's own reduce_scatter, which sends twice as much."
    return rows, notes, {"losses": found}


def link_table(args: argparse.Namespace) -> tuple[list[list[str]], list[str], dict[str, Any]]:
    found = {(rate, what): inside(args, "link", what, 2, rate) for rate in args.rates for what in (*PEERS, *OURS)}
    rows, notes = list[list[str]](), list[str]()
    for what in (*PEERS, *OURS):
        seconds = [f"{found[rate, what]['seconds']:.3f}" for rate in args.rates]
        rows.append([what, *seconds, f"{found[args.rates[0], what]['bytes']:,.0f}"])
    for rate in args.rates:
        of = {what: found[rate, what]["seconds"] for what in (*PEERS, *OURS)}
        peers = "of FSDP2 and DeepSpeed ZeRO-3" if DEEPSPEED[0] in of else "FSDP2"
        ddp, fsdp = min(of[x] for x in PEERS[:2]), min(of[x] for x in PEERS[2:])
        notes.append(
            f"{rate} Mbit/s: data_parallel takes {ddp / of['data_parallel, int8']:.2f} times fewer seconds than the "
            f"best DDP with int8, {ddp / of['data_parallel, int4']:.2f} with int4; ZeRO-3 with int8 "
            f"{fsdp / of['ZeRO-3, int8']:.2f} times fewer than the best {peers}."
        )
    return rows, notes, {"link": [{"rate": r, "what": w, **x} for (r, w), x in found.items()]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--held-out", type=int, default=16, help="batches")
    p.add_argument("--timed", type=int, default=12, help="steps on a slow link")
    p.add_argument("--rates", type=int, nargs="*", default=[20, 200], help="of the slow link, Mbit/s")
    p.add_argument("--tables", nargs="+", choices=("losses", "link"), default=["losses", "link"])
    p.add_argument("--small", action="store_true")
    p.add_argument("--job", choices=("losses", "link"), help=argparse.SUPPRESS)
    for name in ("--what", "--seed", "--folder"):
        p.add_argument(name, type=int if name == "--seed" else str, default=0, help=argparse.SUPPRESS)
    script_flags(p, "compressed")
    args = p.parse_args()
    if args.worker:
        result = {"losses": losses, "link": link}[args.job](args)
        if int(os.environ["RANK"]) == 0:
            (Path(args.folder) / "found.json").write_text(json.dumps(result))
        os._exit(0)  # a thread of gloo's that comes back from C++ when the interpreter has ended would abort it
    if args.small:
        args.steps, args.seeds, args.timed, args.held_out = 6, 1, 2, 2
    data = {"settings": settings(args, "folder", "job", "what", "seed")}
    common = "GPT of 2 layers, width 64, 2 ranks (gloo over a loopback of their own)"
    if "losses" in args.tables:
        rows, notes, found = loss_table(args)
        columns = [
            "travels as",
            "held-out loss, by seed",
            "beside fp32",
            "bytes a step, all ranks",
            "of fp32's",
            "beside plan",
        ]
        num = found["losses"]["fp32"][0]["params"]
        head = (
            f"{num:,} parameters, {args.steps} steps: {common}. Loss of masters, on {args.held_out} held-out batches."
        )
        publish(args.name, "Codes on the wire", columns, rows, [head, *notes], data | found, args.out)
    if "link" in args.tables:
        rows, notes, found = link_table(args)
        columns = ["", *(f"s a step at {rate} Mbit/s" for rate in args.rates), "bytes a step, both ranks"]
        head = f"135,488 parameters, medians of {args.timed} steps: {common}. fzero compiled, peers eager."
        publish(f"{args.name}_link", "On a slow link", columns, rows, [head, *notes], data | found, args.out)


if __name__ == "__main__":
    main()
