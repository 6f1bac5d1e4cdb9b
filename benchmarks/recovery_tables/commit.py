"""The costs of `fz.run`: keeping the state of each step in memory, and the failure of a rank.

Keeping: a GPT of 57 M parameters under ZeRO-3; after each step `run.commit`, whose CPU seconds are compared with those
of the step. Failure: rank 1 is killed before a step. Measured are the CPU seconds of the replacement from its start to
the end of its first step, and of the other rank from the end of the last step before the failure to the end of the next
one. An earlier run has filled the compiler's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import MODEL

from recovery_tables import Table, torchrun

_SMALL = {"layers": 4, "width": 256, "heads": 4, "seq": 128, "batch": 8}


def worker(args: argparse.Namespace) -> None:
    """A rank, which writes down what its steps took."""
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    out = Path(args.out)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
    step = fz.shard_params(fz.train_step(make_loss(config), optimizer))
    batches = make_batches(config, 16)

    def main(run: Any) -> None:
        train = fz.compile(step, run.mesh, backend=args.backend)
        state = run.state(train, make_init(config), fz.random.key(0))
        for index in run.steps(state, args.steps):
            rank = run.mesh.rank
            if args.kill and rank == 1 and run.source == "init" and index == args.kill[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = tuple(t.chunk(run.mesh.size)[run.mesh.rank].contiguous() for t in batches[index % 16])
            begin = time.thread_time()
            state, metrics = train(state, batch)
            loss, stepped = float(metrics["loss"]), time.thread_time()
            run.commit(state)
            note = {
                "rank": rank, "source": run.source, "step": index, "step_s": stepped - begin, "loss": loss,
                "keep_s": time.thread_time() - stepped, "cpu_s": time.process_time(), "at": time.monotonic(),
                "bytes": sum(x.nbytes for x in fz.tree.leaves(state)),
            }  # fmt: skip
            with (out / f"notes-{rank}").open("a") as f:
                f.write(json.dumps(note) + "\n")

    fz.run(main)


def ran(args: argparse.Namespace, folder: Path, name: str, model: dict[str, int], *flags: str) -> list[dict[str, Any]]:
    """The notes of a run's ranks, each rank's in order."""
    out = folder / name
    out.mkdir()
    sizes = {key: getattr(args, key) for key in MODEL} | model
    given = [f"--out={out}", f"--backend={args.backend}", *flags, *(f"--{key}={value}" for key, value in sizes.items())]
    torchrun("commit", args.processes, folder, given, module="fzero.run")
    return [json.loads(line) for path in sorted(out.glob("notes-*")) for line in path.read_text().splitlines()]


def after_a_loss(notes: list[dict[str, Any]]) -> dict[str, float]:
    """CPU seconds to the next step of who took the place and of who stayed; wall seconds between two steps."""
    stayed = [x for x in notes if x["rank"] == 0]
    last = max(i for i, x in enumerate(stayed) if x["source"] == "init")
    replaced = next(x for x in notes if x["rank"] == 1 and x["source"] == "memory")
    assert stayed[last + 1]["step"] == stayed[last]["step"] + 1, "no step is done again"
    survivor = stayed[last + 1]["cpu_s"] - stayed[last]["cpu_s"]
    return {
        "replaced_s": replaced["cpu_s"],
        "survivor_s": survivor,
        "wall_s": stayed[last + 1]["at"] - stayed[last]["at"],
    }


DEFAULTS = {"layers": 8, "width": 768, "heads": 12, "seq": 256, "batch": 8, "processes": 2, "steps": 12, "rounds": 3,
            "backend": "inductor"}  # fmt: skip
TINY = {"layers": 2, "width": 64, "heads": 2, "seq": 32, "steps": 6, "rounds": 1, "backend": "eager"}


def measure(args: argparse.Namespace) -> Table:
    with tempfile.TemporaryDirectory(prefix="fzero-elastic-") as temporary:
        folder = Path(temporary)
        kept = [x for x in ran(args, folder, "kept", {}, f"--steps={args.steps}") if x["step"] > 1]
        calm = ran(args, folder, "calm", _SMALL, "--steps=8")
        struck = [ran(args, folder, f"struck-{i}", _SMALL, "--steps=8", "--kill", "4") for i in range(args.rounds)]
    for notes in struck:
        assert {x["step"]: x["loss"] for x in notes} == {x["step"]: x["loss"] for x in calm}
    shares = [x["keep_s"] / x["step_s"] for x in kept]
    losses = [after_a_loss(notes) for notes in struck]
    middle = {key: statistics.median(x[key] for x in losses) for key in losses[0]}
    share = statistics.median(shares)
    rows = [
        ["run.commit, of a step's CPU seconds", f"{share:.4f}"],
        ["the replacement, CPU s", f"{middle['replaced_s']:.2f}"],
        ["the other rank, CPU s", f"{middle['survivor_s']:.2f}"],
        ["from step to step over the failure, wall s", f"{middle['wall_s']:.1f}"],
    ]
    mib = max(x["bytes"] for x in kept) / 2**20
    notes = [
        f"Kept: GPT of {args.layers} layers of width {args.width}, ZeRO-3 on {args.processes} ranks, {mib:.0f} MiB a "
        f"rank; median of {len(shares)} steps, of {statistics.median(x['step_s'] for x in kept):.2f} CPU s each "
        f"({min(shares):.4f} to {max(shares):.4f}).",
        f"Failure: 4 layers of width 256, median of {args.rounds}; the losses equal those of a run without a failure.",
    ]
    for key, who in (("replaced_s", "replaced"), ("survivor_s", "stayed")):
        notes.append(f"{who}: {min(x[key] for x in losses):.2f} to {max(x[key] for x in losses):.2f} CPU s.")
    return Table(
        "elastic", "Keeping states, and a failed rank", ["", "median"], rows, notes, {"kept": kept, "losses": losses}
    )
