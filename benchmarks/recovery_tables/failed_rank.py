"""The failure of a rank under `fz.run` compared with torchrun's restarts from checkpoints: FSDP2 with
torch.distributed.checkpoint, also asynchronous, and DeepSpeed's ZeRO-3.

The same model from the same values, the same batches and the same faults, each a SIGKILL to one rank right before a
step; all save every `--every` steps. Each contestant runs once without a fault, whose losses the other run must have.
With gloo, restarts of torch 2.13 fail about every second time, because of addresses of the life before in the store
that it keeps; so the others run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import MODEL, Table, passed_on

from recovery_tables import torchrun

TITLES = {
    "fzero": "fz.run: memory, and a checkpoint",
    "dcp": "torchrun, FSDP2, DCP save",
    "dcp_async": "torchrun, FSDP2, DCP async_save",
    "deepspeed": "torchrun, DeepSpeed ZeRO-3",
}
NAME = "elastic_peers"
NUM_BATCHES = 16


@dataclass
class Rank:
    """A rank of a run: the batch of each step, and the notes of the steps that have ended."""

    args: argparse.Namespace
    batches: list[Any]
    rank: int
    cpu_before: float  # CPU seconds that are not counted

    def batch(self, step: int) -> Any:
        """The batch of a step, unless this rank is killed before it."""
        for number, at in enumerate(self.args.kill):
            if step == at and self.rank == (number + 1) % self.args.processes:
                try:
                    with open(Path(self.args.out) / f"killed-{at}", "x") as f:
                        f.write(str(time.monotonic()))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return self.batches[step % NUM_BATCHES]

    def ended(self, step: int, loss: Any, **more: float) -> None:
        """Write down that a step has ended, and with which loss."""
        note = {"step": step, "loss": float(loss), "at": time.monotonic(), "pid": os.getpid(), **more}
        note["cpu_s"] = time.process_time() - self.cpu_before
        with (Path(self.args.out) / f"notes-{self.rank}").open("a") as f:
            f.write(json.dumps(note) + "\n")


# --- one rank ---


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed  # before the clock of the imports that are not counted

    torch.set_num_threads(1)
    rank, begin = int(os.environ["RANK"]), time.process_time()
    from model import Config, make_batches
    from training import shard

    # these modules import fzero, which other contestants do not need
    ours = 0.0 if args.contestant == "fzero" else time.process_time() - begin
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    batches = [shard(batch, rank, args.processes) for batch in make_batches(config, NUM_BATCHES)]
    run = {"fzero": _fzero, "dcp": _dcp, "dcp_async": _dcp, "deepspeed": _deepspeed}[args.contestant]
    run(args, config, Rank(args, batches, rank, ours))


def _fzero(args: argparse.Namespace, config: Any, here: Rank) -> None:
    from model import make_init, make_loss
    from training import clipped_adamw

    import fzero as fz

    step = fz.shard_params(fz.train_step(make_loss(config), clipped_adamw()))

    def main(run: Any) -> None:
        train = fz.compile(step, run.mesh, backend=args.backend)
        state = run.state(train, make_init(config), fz.random.key(0), path=Path(args.out) / "saved")
        for index in run.steps(state, args.steps):
            batch, begin = here.batch(index), time.thread_time()
            state, metrics = train(state, batch)
            loss, stepped = float(metrics["loss"]), time.thread_time()
            run.commit(state)
            seconds = {"step_s": stepped - begin, "keep_s": time.thread_time() - stepped}
            if (index + 1) % args.every == 0:
                run.save(state, keep=1)
            here.ended(index, loss, bytes=sum(x.nbytes for x in fz.tree.leaves(state)), **seconds)

    fz.run(main)


def _dcp(args: argparse.Namespace, config: Any, here: Rank) -> None:
    import model as models
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from training import averaged, fsdp2, torch_adamw, torch_step

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    made = models.module(config)
    model = fsdp2(made, models.blocks(made), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch_adamw(model)
    step = averaged(torch_step(model, optimizer), dist.get_world_size())
    root, group, saving = Path(args.out) / "saved", dist.new_group(backend="gloo"), None

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    complete = sorted(p.parent for p in root.glob("step-*/.metadata"))  # which is written last
    start = 0
    if complete:
        given = state()
        dcp.load(given, checkpoint_id=complete[-1])
        set_state_dict(model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"])
        start = int(complete[-1].name.removeprefix("step-"))
    for index in range(start, args.steps):
        loss = step(here.batch(index))
        if (index + 1) % args.every == 0:
            to = root / f"step-{index + 1:08d}"
            if args.contestant == "dcp_async":
                if saving is not None:
                    saving.result()
                saving = dcp.async_save(state(), checkpoint_id=to, process_group=group)
            else:
                dcp.save(state(), checkpoint_id=to)
        here.ended(index, loss)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


def _deepspeed(args: argparse.Namespace, config: Any, here: Rank) -> None:
    import model as models
    import torch
    from training import averaged, deepspeed_engine, deepspeed_module, deepspeed_step, torch_adamw

    warnings.simplefilter("ignore")
    deepspeed_module()
    model = models.module(config)
    engine = deepspeed_engine(model, config.batch // args.processes, 3, torch_adamw(model))
    step = averaged(deepspeed_step(engine), args.processes)
    root, start = Path(args.out) / "saved", 0
    if (root / "latest").exists():
        engine.load_checkpoint(str(root))
        start = int((root / "latest").read_text().strip().removeprefix("step-"))
    for index in range(start, args.steps):
        loss = step(here.batch(index))
        if (index + 1) % args.every == 0:
            engine.save_checkpoint(str(root), tag=f"step-{index + 1}")
        here.ended(index, loss)
    torch.distributed.destroy_process_group()


# --- all of them ---


def ran(args: argparse.Namespace, folder: Path, name: str, contestant: str, kill: list[int]) -> dict[str, Any]:
    """The notes of each rank, in order, and when which step's rank was killed."""
    out = folder / name
    out.mkdir()
    given = [f"--out={out}", f"--contestant={contestant}", "--kill", *map(str, kill)]
    given += passed_on(args, *MODEL, "backend", "every", "steps", "processes")
    begin = time.monotonic()
    if contestant == "fzero":
        torchrun("failed_rank", args.processes, folder, given, module="fzero.run")
    else:
        flags, store = [f"--max-restarts={len(kill) + 2}"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        torchrun("failed_rank", args.processes, folder, given, flags, env=store)
    notes = [
        [json.loads(line) for line in (out / f"notes-{rank}").read_text().splitlines()]
        for rank in range(args.processes)
    ]
    killed = {at: float((out / f"killed-{at}").read_text()) for at in kill}
    shutil.rmtree(out / "saved", ignore_errors=True)
    print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return {"notes": notes, "killed": killed}


def loss_of(run: dict[str, Any], at: int) -> dict[str, float]:
    """What the loss of a rank before step `at` cost: steps, CPU seconds of all ranks, seconds."""
    since, redone, cpu, ends = run["killed"][at], 0, 0.0, []
    for mine in run["notes"]:
        before = [x for x in mine if x["at"] < since]
        after = [x for x in mine if x["at"] > since]
        first = next(i for i, x in enumerate(after) if x["step"] >= at)
        ends.append(after[first]["at"])
        ended = {x["step"] for x in before}
        redone = max(redone, sum(x["step"] in ended for x in after[:first]))
        stayed = before[-1]["pid"] == after[first]["pid"]
        cpu += after[first]["cpu_s"] - (before[-1]["cpu_s"] if stayed else 0.0)
    return {"redone": redone, "cpu_s": cpu, "wall_s": max(ends) - since}


def furthest(calm: dict[str, Any], struck: dict[str, Any]) -> float:
    """The largest difference of a step's loss from that of the run without a fault, steps done again among them."""
    expected = {x["step"]: x["loss"] for x in calm["notes"][0]}
    assert {x["step"] for x in struck["notes"][0]} == expected.keys(), "a step is missing"
    return max(abs(x["loss"] - expected[x["step"]]) for mine in struck["notes"] for x in mine)


def step_seconds(calm: dict[str, Any]) -> float:
    """CPU seconds of a step of all ranks, what is kept and saved among them, without the first two."""
    return sum((x[-1]["cpu_s"] - x[1]["cpu_s"]) / (len(x) - 2) for x in calm["notes"])


DEFAULTS = {"layers": 8, "width": 768, "heads": 12, "seq": 64, "batch": 4, "processes": 2, "steps": 28, "every": 10,
            "kill": [15, 26], "only": list(TITLES), "backend": "eager"}  # fmt: skip
TINY = {
    "layers": 2,
    "width": 128,
    "heads": 2,
    "seq": 32,
    "steps": 12,
    "every": 4,
    "kill": [6],
    "only": ["fzero", "dcp"],
}


def measure(args: argparse.Namespace) -> Table:
    if "deepspeed" in args.only and importlib.util.find_spec("deepspeed") is None:
        print("no DeepSpeed here: it comes with the extra `bench`", file=sys.stderr)
        args.only.remove("deepspeed")
    found: dict[str, Any] = {}
    rows, notes, versions = [], [], []
    for contestant in args.only:
        with tempfile.TemporaryDirectory(prefix="fzero-peers-", dir=args.path, ignore_cleanup_errors=True) as temporary:
            calm = ran(args, Path(temporary), f"{contestant}-calm", contestant, [])
            struck = ran(args, Path(temporary), f"{contestant}-struck", contestant, args.kill)
        losses = [loss_of(struck, at) for at in args.kill]
        found[contestant] = {"calm": calm, "struck": struck, "losses": losses}
        middle = {key: statistics.mean(x[key] for x in losses) for key in losses[0]}
        rows.append([
            TITLES[contestant], " and ".join(str(x["redone"]) for x in losses), f"{middle['cpu_s']:.1f}",
            f"{middle['wall_s']:.1f}", f"{furthest(calm, struck):.1e}", f"{step_seconds(calm):.2f}",
        ])  # fmt: skip
    from model import Config

    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    notes += [
        f"{config.num_params / 1e6:.1f} M parameters ({args.layers} layers of width {args.width}, sequence {args.seq}, "
        f"global batch {args.batch}), fp32, AdamW, clipping, {args.processes} ranks of one thread each on one host, "
        f"CPU; {args.steps} steps, saved every {args.every} to one disk, a rank killed before steps "
        f"{' and '.join(map(str, args.kill))} (ranks 1 and 0 in turn). fzero: {args.backend}; the others are eager.",
        "Repeated steps had ended and ran again. CPU seconds: of all ranks, including imports, until a step has ended "
        "that had not ended before; for ranks that stayed, from the end of their last step. Seconds: from the "
        "kill until that step has ended on all ranks. Means of the failures.",
        "Largest difference: of any loss from the loss of the same step without a failure, including repeated steps. "
        "CPU s per step: of all ranks without a failure, including the state that is kept and saved.",
        "The others run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it torch 2.13's restarts over gloo fail "
        "about every second time. The CPU seconds in which they import fzero, for the model, are not counted.",
    ]
    if "deepspeed" in args.only:
        from importlib.metadata import version

        versions.append(f"DeepSpeed {version('deepspeed')}.")
    columns = ["", "repeated steps", "CPU s", "s", "largest difference", "CPU s per step"]
    return Table("The failure of a rank", columns, rows, [*notes, *versions], {"found": found})
