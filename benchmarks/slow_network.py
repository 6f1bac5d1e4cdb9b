"""Training over a slow network: bytes between hosts, and `fz.compress` compared with fp32, DDP, FSDP2 and DeepSpeed.

    sudo python benchmarks/slow_network.py                  # about 12 minutes; needs Linux and root's rights
    sudo python benchmarks/slow_network.py losses --small   # one table, few steps, to see that it works

Three tables: `losses`, the held-out loss after 200 steps over three seeds, and bytes as the kernel counts them;
`link`, seconds per step on a slow link; `hosts`, the bytes that leave one of two hosts per step under ZeRO-3 over one
axis, over two axes hierarchically, and with `fz.hierarchical`.

For `losses` and `link` all ranks are in one namespace and talk over its loopback device by gloo, never through shared
memory; a slow link is that device behind a token bucket (tc tbf), which all ranks share. For `hosts` two hosts of two
ranks each are namespaces joined by a pair of virtual interfaces. The kernel's counters include headers and the barrier
between steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    SOURCE,
    Table,
    chosen,
    number_flags,
    parsed,
    publish,
    script_parser,
    sent_bytes,
    settings,
    torchrun_command,
)
from training import (
    FzeroStep,
    Step,
    clipped_adamw,
    deepspeed_engine,
    deepspeed_module,
    deepspeed_step,
    fsdp2,
    shard,
    timed,
    torch_adamw,
    torch_step,
)

sys.path.insert(0, str(SOURCE / "examples"))
EVEN = "int8, even steps"
FORMATS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "parameters int8": {"grads": None},
    "both int8": {},
    "int8, gradients int4": {"grads": "int4"},
    EVEN: {},
    "4 ranks: fp32": None,
    "4 ranks: int8, int4 between nodes": {"grads": {"data": "int8", "node": "int4"}},
}
"""Arguments of compress."""
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
WAYS = ("ZeRO-3 over one axis", "over two axes", "with hierarchical")
HOSTS_LAYERS, HOSTS_WIDTH, HOSTS_ROWS, HOSTS_STEPS = 4, 128, 4, 4
NAMES = {"losses": "compressed", "link": "compressed_link", "hosts": "across_nodes"}
"""Files of the tables."""
RANKS = "GPT of 2 layers, width 64, 2 ranks (gloo over a loopback device of their own)"
TIMEOUT = 300  # seconds of a job, which takes about 10


# --- processes ---


def losses(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: the held-out loss after the last step, bytes a step of all ranks, and those that are planned."""
    import torch
    import torch.distributed as dist
    import train_gpt

    import fzero as fz
    from fzero import optim
    from fzero.transforms import compress as codes

    if args.what == EVEN:  # as others have them
        codes.GRADS["int8"] = codes.PARAMS["int8"]
    given, nodes = FORMATS[args.what], args.what.startswith("4 ranks")
    axes: dict[str, int] = {"node": 2, "data": 2} if nodes else {"data": 2}
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes)
    rate = optim.warmup_cosine(RATE, max(1, args.steps // 10), args.steps, init=RATE / 10, end=RATE / 10)
    optimizer = clipped_adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim >= 2)
    zero = fz.shard_params(axis=("data", "node") if nodes else "data")
    transforms = [zero] if given is None else [zero, fz.compress(**given)]
    step = fz.compose(*transforms)(fz.train_step(lambda p, b: train_gpt.gpt(p, *b, heads=HEADS)[0], optimizer))
    init = lambda key: train_gpt.init_gpt(key, layers=LAYERS, width=WIDTH)  # noqa: E731
    run = FzeroStep(step, mesh, init, fz.random.key(args.seed), backend="eager")
    data = fz.data.TokenDataset(fz.data.python_source(), seq=SEQ, batch=BATCH, seed=args.seed)
    text, held_out = data.split(0.02)
    before = 0
    for i in range(args.steps):
        if i == WARM_UP:
            dist.barrier()
            before = sent_bytes()
        run(text.batch_at(i, rank=mesh.rank, size=mesh.size))
    dist.barrier()
    nbytes = (sent_bytes() - before) / (args.steps - WARM_UP)
    params = run.train.gather(run.state).params
    with torch.no_grad():
        held = [float(train_gpt.gpt(params, *held_out.batch_at(i), heads=HEADS)[0]) for i in range(args.held_out)]
    planned = mesh.size * sum(c.bytes for c in run.train.plan.channels.values())
    num = sum(x.numel() for x in fz.tree.leaves(params))
    return {"held_out": statistics.mean(held), "bytes": nbytes, "planned": planned, "params": num}


def link(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: the median of the seconds of a step, and bytes a step of all ranks."""
    import torch
    import torch.distributed as dist
    from model import Config, make_batches

    config = Config(LAYERS, WIDTH, HEADS, SEQ, 2 * BATCH)
    torch.set_num_threads(1)
    run = _ours(args.what, config) if args.what in OURS else _peer(args.what, config)
    batches = [shard(batch, dist.get_rank(), 2) for batch in make_batches(config, 4)]
    timed(run, batches, 0, WARM_UP)
    dist.barrier()
    before = sent_bytes()
    seconds = [timed(run, batches, WARM_UP + i, 1)["wall_s"] for i in range(args.timed)]
    dist.barrier()
    return {"seconds": statistics.median(seconds), "bytes": (sent_bytes() - before) / args.timed}


def _ours(what: str, config: Any) -> Step:
    from model import make_init, make_loss

    import fzero as fz

    zero, given = OURS[what]
    transforms = [getattr(fz, zero)(), *([] if given is None else [fz.compress(**given)])]
    step = fz.compose(*transforms)(fz.train_step(make_loss(config), clipped_adamw()))
    return FzeroStep(step, fz.make_mesh(device="cpu", shared_memory=False), make_init(config), fz.random.key(0))


def _peer(what: str, config: Any) -> Step:
    import torch
    import torch.distributed as dist
    from model import blocks, module
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn.parallel import DistributedDataParallel

    if what in DEEPSPEED:
        deepspeed_module()
        model: Any = module(config)
        bf16 = {"enabled": "bf16" in what}
        return deepspeed_step(deepspeed_engine(model, BATCH, 3, torch_adamw(model), bf16=bf16))
    dist.init_process_group("gloo")
    model = module(config)
    if what.startswith("DDP"):
        model = DistributedDataParallel(model)
        if "hook" in what:  # the hook for bf16 does not work with gloo
            model.register_comm_hook(None, fp16_compress_hook)
    else:
        sums = torch.bfloat16 if what == ALL_BF16 else torch.float32
        policy = MixedPrecisionPolicy(torch.bfloat16, sums) if "bf16" in what else MixedPrecisionPolicy()
        fsdp2(model, blocks(model), init_device_mesh("cpu", (2,)), mp_policy=policy)
    return torch_step(model, torch_adamw(model))


def inside(args: argparse.Namespace, job: str, what: str, ranks: int, rate: int = 0, seed: int = 0) -> dict[str, Any]:
    """The result of a job on ranks in a namespace whose loopback device has a rate, in Mbit/s; 0: unlimited."""
    print(f"{job}: {what}{f', {rate} Mbit/s' if rate else f', seed {seed}'} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder:
        flags = ["--worker", "--job", job, "--what", what, "--seed", seed, "--folder", folder]
        flags += ["--steps", args.steps, "--timed", args.timed, "--held-out", args.held_out]
        run, env = torchrun_command([__file__, *map(str, flags)], ["--standalone", f"--nproc-per-node={ranks}"])
        bucket = f"tc qdisc add dev lo root tbf rate {rate}mbit burst 512kb latency 200ms && " if rate else ""
        shell = ["unshare", "--net", "sh", "-c", f'ip link set lo up && {bucket}exec "$@"', "sh"]
        subprocess.run([*shell, *run], env=env, check=True, timeout=TIMEOUT)
        return json.loads((Path(folder) / "found.json").read_text())


def hosts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank: for each way and number of micro-batches bytes per step and losses."""
    import torch
    import torch.distributed as dist

    import fzero as fz

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(x @ p["up"]) @ p["down"]

    def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        for p in params:
            batch = layer(p, batch)
        return batch.square().mean()

    def init(key: torch.Tensor) -> Any:
        keys = fz.random.split(key, 2 * HOSTS_LAYERS)
        up = [fz.random.normal(keys[2 * i], (HOSTS_WIDTH, 4 * HOSTS_WIDTH)) / 12 for i in range(HOSTS_LAYERS)]
        down = [fz.random.normal(keys[2 * i + 1], (4 * HOSTS_WIDTH, HOSTS_WIDTH)) / 24 for i in range(HOSTS_LAYERS)]
        return [{"up": u, "down": d} for u, d in zip(up, down, strict=True)]

    both = fz.shard_params(axis=("data", "node"))
    transforms = dict(zip(WAYS, ([fz.shard_params()], [both], [both, fz.hierarchical()]), strict=True))
    rank, found = int(os.environ["RANK"]), []
    batches = [
        torch.randn(4 * HOSTS_ROWS, HOSTS_WIDTH, generator=torch.Generator().manual_seed(i)).chunk(4)[rank]
        for i in range(WARM_UP + HOSTS_STEPS)
    ]
    for way, spread in transforms.items():
        axes = {"data": 4} if way == WAYS[0] else {"node": 2, "data": 2}
        mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes)
        for num in args.micro:
            step = fz.compose(*spread, fz.accumulate(num))(fz.train_step(loss_fn, clipped_adamw(1e-3)))
            run = FzeroStep(step, mesh, init, fz.random.key(0), backend="eager")
            losses = timed(run, batches, 0, WARM_UP)["losses"]
            dist.barrier()
            before = sent_bytes(args.interface)
            losses += timed(run, batches, WARM_UP, HOSTS_STEPS)["losses"]
            dist.barrier()
            nbytes = (sent_bytes(args.interface) - before) / HOSTS_STEPS
            found.append({"way": way, "micro": num, "bytes": nbytes, "losses": losses})
        fz.close_mesh()
    return found


@contextlib.contextmanager
def two_hosts() -> Iterator[list[int]]:
    """Two network namespaces that reach each other, by the processes that hold them."""
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "3600"]) for _ in range(2)]
    try:
        time.sleep(0.5)
        pids = [str(p.pid) for p in holders]
        ends = ["type", "veth", "peer", "name", "fz1", "netns", pids[1]]
        subprocess.run(["ip", "link", "add", "fz0", "netns", pids[0], *ends], check=True)
        for i, pid in enumerate(pids):
            inside = ["nsenter", "--target", pid, "--net", "ip"]
            subprocess.run([*inside, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"fz{i}"], check=True)
            subprocess.run([*inside, "link", "set", f"fz{i}", "up"], check=True)
            subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        yield [p.pid for p in holders]
    finally:
        for p in holders:
            p.kill()
            p.wait()


def between_hosts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the ranks of two hosts have found."""
    with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder, two_hosts() as pids:
        flags = ["--worker", "--job", "hosts", "--folder", folder, "--micro", *map(str, args.micro)]
        running = []
        for i, pid in enumerate(pids):
            nodes = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={i}"]
            nodes += ["--master-addr=10.77.0.1", "--master-port=29577"]
            run, env = torchrun_command([__file__, *flags, "--interface", f"fz{i}"], nodes, f"fz{i}")
            running.append(subprocess.Popen(["nsenter", "--target", str(pid), "--net", *run], env=env))
        codes = [p.wait(timeout=TIMEOUT) for p in running]
        assert codes == [0, 0], codes
        return json.loads((Path(folder) / "found.json").read_text())


# --- tables ---


def loss_table(args: argparse.Namespace) -> Table:
    found = {
        what: [inside(args, "losses", what, 4 if "4 ranks" in what else 2, seed=s) for s in range(args.seeds)]
        for what in FORMATS
    }
    rows = list[list[str]]()
    for what, runs in found.items():
        base = found["4 ranks: fp32" if "4 ranks" in what else "fp32"]
        more = statistics.mean(r["held_out"] / b["held_out"] - 1 for r, b in zip(runs, base, strict=True))
        share = runs[0]["bytes"] / base[0]["bytes"]
        off = runs[0]["bytes"] / runs[0]["planned"] - 1
        held = ", ".join(f"{r['held_out']:.4f}" for r in runs)
        nbytes = f"{runs[0]['bytes']:,.0f}"
        rows.append([what, held, f"{100 * more:+.2f} %", nbytes, f"{share:.3f}", f"{100 * off:+.0f} %"])
    notes = [
        f"{args.steps} steps: {RANKS}. Loss of masters, on {args.held_out} held-out batches.",
        "1.008 bytes instead of 4 are 0.252 of fp32's at best.",
    ]
    nbytes = ("bytes per step, all ranks", "share of fp32's", "compared with the plan")
    columns = ("format", "held-out loss, by seed", "compared with fp32", *nbytes)
    return Table("Compressed communication", columns, rows, notes, {"losses": found})


def link_table(args: argparse.Namespace) -> Table:
    found = {(rate, what): inside(args, "link", what, 2, rate) for rate in args.rates for what in (*PEERS, *OURS)}
    about = f"135,488 parameters, medians of {args.timed} steps: {RANKS}. fzero compiled, the others eager."
    rows, notes = list[list[str]](), [about]
    for what in (*PEERS, *OURS):
        seconds = [f"{found[rate, what]['seconds']:.3f}" for rate in args.rates]
        rows.append([what, *seconds, f"{found[args.rates[0], what]['bytes']:,.0f}"])
    for rate in args.rates:
        of = {what: found[rate, what]["seconds"] for what in (*PEERS, *OURS)}
        peers = "FSDP2, DeepSpeed ZeRO-3" if DEEPSPEED[0] in of else "FSDP2"
        ddp, fsdp = min(of[x] for x in PEERS[:2]), min(of[x] for x in PEERS[2:])
        notes.append(
            f"{rate} Mbit/s, seconds of the fastest alternative / seconds of fzero: data_parallel with int8 "
            f"{ddp / of['data_parallel, int8']:.2f} (DDP), with int4 {ddp / of['data_parallel, int4']:.2f}; ZeRO-3 "
            f"with int8 {fsdp / of['ZeRO-3, int8']:.2f} ({peers})."
        )
    columns = ("", *(f"s per step at {rate} Mbit/s" for rate in args.rates), "bytes per step, both ranks")
    data = {"link": [{"rate": r, "what": w, **x} for (r, w), x in found.items()]}
    return Table("On a slow link", columns, rows, notes, data)


def hosts_table(args: argparse.Namespace) -> Table:
    found = between_hosts(args)
    of = {(x["way"], x["micro"]): x for x in found}
    rows = [[way, *(f"{of[way, n]['bytes'] / 1e6:.2f} MB" for n in args.micro)] for way in WAYS]
    once = [of[WAYS[2], n]["bytes"] for n in args.micro]
    pairs = [(x["losses"], of[WAYS[0], x["micro"]]["losses"]) for x in found]
    off = max(abs(a - b) / abs(b) for some, one_axis in pairs for a, b in zip(some, one_axis, strict=True))
    hidden = 2 * HOSTS_LAYERS * 4 * HOSTS_WIDTH * HOSTS_WIDTH
    notes = [
        f"{hidden:,} parameters in fp32, two hosts of two ranks, gloo: bytes that leave a host per step, as its kernel "
        "counts them.",
        f"{WAYS[2]}: the bytes of different numbers of micro-batches differ by {max(once) / min(once) - 1:.2%}.",
        f"Losses of {WARM_UP + HOSTS_STEPS} steps differ by {off:.1e} from those with one axis.",
        "gloo's reduce_scatter sends about twice the bytes of a ring.",
    ]
    columns = ("", *(f"{n} micro-batch{'es' * (n > 1)}" for n in args.micro))
    return Table("Bytes between hosts", columns, rows, notes, {"hosts": found})


TABLES = {"losses": loss_table, "link": link_table, "hosts": hosts_table}
JOBS = {"losses": losses, "link": link, "hosts": hosts}


def main() -> None:
    args = arguments()
    if args.worker:
        result = JOBS[args.job](args)
        if int(os.environ["RANK"]) == 0:
            (Path(args.folder) / "found.json").write_text(json.dumps(result))
        os._exit(0)  # a thread of gloo's that comes back from C++ when the interpreter has ended would abort it
    given = settings(args, "folder", "job", "what", "seed", "interface")
    for name in args.tables:
        found = TABLES[name](args)
        publish(NAMES[name], *found[:4], {"settings": given, **found.data}, args.out)


def arguments() -> argparse.Namespace:
    p = script_parser(__doc__, "slow_network", small="few steps and one seed")
    p.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    number_flags(p, steps=200, seeds=3, held_out=16, timed=12)
    p.add_argument("--rates", type=int, nargs="*", default=[20, 200], help="of the slow link, Mbit/s")
    p.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4], help="micro-batches between two hosts")
    p.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    for name in ("--what", "--seed", "--folder", "--interface"):
        p.add_argument(name, type=int if name == "--seed" else str, default=0, help=argparse.SUPPRESS)
    args = parsed(p, steps=6, seeds=1, timed=2, held_out=2, rates=[200], micro=[1])
    args.tables = chosen(p, args.tables, TABLES)
    return args


if __name__ == "__main__":
    main()
