"""Bytes that leave a host in a step: ZeRO-3 over one axis, over two hop by hop, and with `hierarchical`.

    sudo python benchmarks/across_nodes.py          # a minute; Linux, root: hosts are network namespaces

Two hosts of two ranks each are network namespaces joined by a pair of virtual interfaces, over which gloo goes. What
leaves a host is what the kernel has counted there: TCP, the barrier between steps and gloo's own ways included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import publish, script_flags, settings, verdict

WAYS = ("ZeRO-3 over one axis", "over two axes", "once a step")
WIDTH, LAYERS, ROWS = 128, 4, 4
WARM_UP, STEPS = 2, 4


def worker(folder: Path, interface: str, micro: list[int]) -> None:
    """One rank: for each way and number of micro-batches bytes a step and losses, written by the first rank."""
    import torch
    import torch.distributed as dist

    import fzero as fz
    from fzero import optim

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(x @ p["up"]) @ p["down"]

    def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        for p in params:
            batch = layer(p, batch)
        return batch.square().mean()

    def init(key: torch.Tensor) -> Any:
        keys = fz.random.split(key, 2 * LAYERS)
        up = [fz.random.normal(keys[2 * i], (WIDTH, 4 * WIDTH)) / 12 for i in range(LAYERS)]
        down = [fz.random.normal(keys[2 * i + 1], (4 * WIDTH, WIDTH)) / 24 for i in range(LAYERS)]
        return [{"up": u, "down": d} for u, d in zip(up, down, strict=True)]

    both = fz.shard_params(axis=("data", "node"))
    transforms = dict(zip(WAYS, ([fz.shard_params()], [both], [both, fz.hierarchical()]), strict=True))
    rank, found = int(os.environ["RANK"]), []
    batches = [torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(WARM_UP + STEPS)]
    for way, spread in transforms.items():
        axes = {"data": 4} if way == WAYS[0] else {"node": 2, "data": 2}
        mesh = fz.make_mesh(device="cpu", shared_memory=False, **axes)
        for num in micro:
            step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
            train = fz.compile(fz.compose(*spread, fz.accumulate(num))(step), mesh, backend="eager")
            state, losses, before = train.init(init, fz.random.key(0)), [], 0
            for i, batch in enumerate(batches):
                if i == WARM_UP:
                    dist.barrier()
                    before = sent(interface)
                state, metrics = train(state, batch[rank * ROWS :][:ROWS])
                losses.append(metrics["loss"].item())
            dist.barrier()
            found.append({"way": way, "micro": num, "bytes": (sent(interface) - before) / STEPS, "losses": losses})
        fz.close_mesh()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def sent(interface: str) -> int:
    """Bytes that have left this network namespace through an interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(
        int(rest.split()[8]) for name, _, rest in (line.partition(":") for line in lines) if name.strip() == interface
    )


@contextlib.contextmanager
def hosts() -> Iterator[list[int]]:
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


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder, hosts() as pids:
        flags = ["--worker", "--folder", folder, "--micro", *map(str, args.micro)]
        running = []
        for i, pid in enumerate(pids):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            meets = [f"--node-rank={i}", "--master-addr=10.77.0.1", "--master-port=29577"]
            command = ["nsenter", "--target", str(pid), "--net", *torchrun, *meets, __file__, *flags]
            root = str(Path(__file__).resolve().parent.parent)
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": f"fz{i}"}
            running.append(subprocess.Popen([*command, "--interface", f"fz{i}"], env=env))
        codes = [p.wait(timeout=600) for p in running]
        assert codes == [0, 0], codes
        return json.loads((Path(folder) / "found.json").read_text())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--interface", help=argparse.SUPPRESS)
    script_flags(p, "across_nodes")
    args = p.parse_args()
    if args.worker:
        worker(args.folder, args.interface, args.micro)
        return
    found = measure(args)
    of = {(x["way"], x["micro"]): x for x in found}
    rows = [(way, *(f"{of[way, n]['bytes'] / 1e6:.2f} MB" for n in args.micro)) for way in WAYS]
    once = [of[WAYS[2], n]["bytes"] for n in args.micro]
    spread = max(once) / min(once) - 1
    off = max(
        abs(a - b) / abs(b) for x in found for a, b in zip(x["losses"], of[WAYS[0], x["micro"]]["losses"], strict=True)
    )
    num = 2 * LAYERS * 4 * WIDTH * WIDTH
    notes = [
        f"{num:,} parameters in fp32, two hosts of two ranks, gloo: bytes that leave a host in a step, by its kernel.",
        f"Wanted: once a step within 1 % whatever the micro-batches ({verdict(spread, 0.01)}, {spread:.2%}), losses of "
        f"{WARM_UP + STEPS} steps within 1e-6 of one axis ({verdict(off, 1e-6)}, {off:.1e}).",
        "gloo's reduce_scatter sends about twice what a ring would.",
    ]
    columns = ("", *(f"{n} micro-batch{'es' * (n > 1)}" for n in args.micro))
    data = {"settings": settings(args, "folder", "interface"), "found": found}
    publish(args.name, "Bytes between hosts", columns, rows, notes, data, args.out)


if __name__ == "__main__":
    main()
