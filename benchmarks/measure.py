"""Measures steps, their times, memory and losses, and writes a table of them.

    python benchmarks/measure.py --help             # all cases, and about how long each takes
    python benchmarks/measure.py CASE --help        # one of them, with its flags
    python benchmarks/measure.py CASE               # on a machine that does nothing else
    python benchmarks/measure.py CASE --small       # tiny sizes and few rounds, to see that it works

A case is a row of `CASES` and the functions that it names. Processes of a case start with empty compiler caches.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import (
    TINY,
    Case,
    contestants,
    disks,
    memory,
    model,
    modules,
    packing,
    peers,
    plans,
    preferences,
    published,
    steps,
    trainers,
    weights,
    wire,
)
from cases.contestants import CONTESTANTS
from common import OUT_HELP, SMALL_OUT, publish, serve, settings

TEMPORARY = tempfile.gettempdir()
CHOICES: dict[str, Any] = {
    "backend": ("inductor", "eager"),
    "optimizer": ("fused", "foreach", "loop"),
    "where": memory.WHERE,
}
HELP = {
    "backend": "of fzero",
    "batch": "the global one",
    "optimizer": "the peers' AdamW",
    "path": "directories on the disk to be used",
    "steps": "measured steps, of each round where there are rounds",
    "turns": "one contestant alive at a time, started again in every round",
    "warmup": "steps that are not measured",
    "threads": "of all processes",
    "device": "name or calibration file to plan with",
    "smaller": "widths are divided by it",
}
CONTEST = {"optimizer": "fused", "backend": "inductor"}
EAGER = {**TINY, "backend": "eager"}
PEERS = {**model(4, 512, 8, 128, 8), "processes": 2, "warmup": 2, "rounds": 15, "steps": 2, "turns": False, **CONTEST}
LARGE = {**model(8, 768, 12, 256, 8), "warmup": 1, "rounds": 3, "turns": True}
FEW = {**EAGER, "warmup": 1, "rounds": 2}
MODULES = {**PEERS, **model(8, 512, 8, 128, 8), "only": list(modules.NAMES)}
ON_DISK = {**model(12, 768, 12, 256, 2), "batches": [1, 2, 4], "path": [TEMPORARY], "max_norm": float, "threads": 2,
           "rounds": 9, "backend": "inductor"}  # fmt: skip

CASES = {
    "peers": Case(
        "a training step compared with DDP, FSDP2 and DeepSpeed", 11, peers.peers, contestants.worker,
        flags={**PEERS, "only": peers.default()},
        small={**FEW, "only": ["fzero_zero3", "ddp", "floor_module"]},
    ),
    "peers_large": Case(
        "the same with 57 M parameters", 27, peers.peers, contestants.worker,
        flags={**PEERS, **LARGE, "only": peers.default()},
        small={**FEW, "only": ["fzero_zero3", "ddp"]},
    ),
    "peers_vocabulary": Case(
        "a step with a vocabulary of 65,536, with a chunked loss", 15, peers.peers, contestants.worker,
        flags={**PEERS, "vocab": 65536, "rounds": 3, "turns": True, "only": list(peers.VOCABULARY)},
        small={**FEW, "vocab": 512, "rounds": 1, "only": list(peers.VOCABULARY[:2])},
    ),
    "peers_offload": Case(
        "ZeRO-3 with the optimizer on the host, compared with DeepSpeed", 3, peers.peers, contestants.worker,
        flags={**PEERS, "only": list(peers.OFFLOAD)},
        small={**FEW, "only": list(peers.OFFLOAD[:2])},
    ),
    "modules_speed": Case(
        "a module of transformers, as functions, FSDP2 and DeepSpeed", 8, modules.speed, contestants.worker,
        flags=MODULES,
        small={**FEW, "only": list(modules.NAMES[:2])},
    ),
    "modules_first": Case(
        "the first step of that module, from empty caches", 6, modules.first, contestants.worker,
        flags={**MODULES, "layers": 4, "rounds": 3},
        small={**FEW, "rounds": 1, "only": list(modules.NAMES[:2])},
    ),
    "trainers": Case(
        "fzero's Trainer compared with transformers' own, sharded by its DistributedConfig", 7, trainers.trainers,
        trainers.worker,
        flags={**model(8, 384, 6, 128, 4), "processes": 2, "warmup": 3, "rounds": 1, "steps": 20,
               "backend": "inductor", "only": list(trainers.CONTESTANTS)},
        small={**EAGER, "warmup": 1, "rounds": 1, "steps": 2, "only": ["fzero", "theirs"]},
    ),
    "packing": Case(
        "packed documents compared with padded ones, by fzero and by transformers in eager PyTorch", 4,
        packing.packing, packing.worker,
        flags={**model(4, 256, 4, 512, 1), "documents": 32, "warmup": 2, "rounds": 2, "steps": 3,
               "backend": "inductor", "only": list(packing.CONTESTANTS)},
        small={**EAGER, "documents": 6, "warmup": 1, "rounds": 1, "steps": 1, "only": list(packing.CONTESTANTS)},
    ),
    "qlora": Case(
        "adapters on frozen weights in NF4, compared with peft and bitsandbytes", 5, modules.qlora, contestants.worker,
        flags={**MODULES, "rounds": 7, "only": list(modules.QLORA)},
        small={**FEW, **model(2, 64, 2, 16, 4), "only": list(modules.QLORA[:2])},
    ),
    "dpo": Case(
        "preference optimization, compared with TRL", 4, preferences.dpo, preferences.worker,
        flags={**model(6, 384, 6, 128, 8), "processes": 2, "warmup": 3, "rounds": 3, "steps": 10,
               "backend": "inductor", "only": list(preferences.TITLES)},
        small={**EAGER, "warmup": 1, "rounds": 1, "steps": 2},
    ),
    "weights": Case(
        "weights for an inference engine: memory and time of each way", 5, weights.weights, weights.worker,
        flags={**model(8, 768, 12, 128, 8), "vocab": 16384, "processes": 2, "rounds": 3, "only": list(weights.WAYS)},
        small={**TINY, "vocab": 256, "rounds": 1},
    ),
    "build_time": Case(
        "tracing and building by depth", 4, steps.build_time, steps.build_worker,
        flags={**model(0, 64, 4, 32, 8), "layers": [4, 16, 64], "peers": [int], "processes": 2, "backend": "inductor"},
        small={**EAGER, "layers": [2, 3]},
    ),
    "first_loss": Case(
        "the first steps from empty caches, with both kinds of warm-up", 12, steps.first_loss, steps.first_worker,
        flags={**model(4, 192, 4, 128, 12), "processes": 2, "rounds": 3, "steps": 150, "backend": "inductor"},
        small={**EAGER, "rounds": 1, "steps": 3},
    ),
    "plan_time": Case(
        "planned and measured step time and memory", 10, steps.plan_time, steps.plan_worker,
        flags={**dict.fromkeys(TINY, int), "numbers": list(range(len(steps.PLANNED))), "device": str, "seconds": 5.0,
               "picture": str, "path": TEMPORARY, "processes": 2, "warmup": 3, "rounds": 5, "steps": 3,
               "backend": "inductor"},
        small={**EAGER, "numbers": [0, 3], "device": "cpu", "rounds": 2, "steps": 1, "warmup": 1},
    ),
    "plan_memory": Case(
        "planned and measured peak memory", 2, memory.plan_memory, memory.plan_worker,
        flags={**model(0, 0, 4, 0, 8), "ranks": [1, 2], "sizes": len(memory.PLAN_SIZES), "backend": "eager"},
        small={"ranks": [1], "sizes": 1},
    ),
    "offload_time": Case(
        "a step with its state on disk, compared with compute and disk alone", 5, disks.offload_time, disks.time_worker,
        flags=ON_DISK,
        small={**EAGER, "batches": [2], "rounds": 2},
    ),
    "offload_memory": Case(
        "a model larger than the memory it may use", 12, memory.offload_memory, memory.offload_worker,
        flags={**model(40, 1024, 16, 256, 2), "path": [TEMPORARY], "processes": [1, 2], "where": memory.WHERE,
               "threads": 2, "steps": 2, "backend": "inductor"},
        small={**EAGER, "steps": 1},
    ),
    "headline": Case(
        "plans of 7 billion parameters on 24 GB", 2, plans.headline,
        flags={"device": "rtx4090", "layers": int},
        small={"layers": 2},
        how="Planned",
    ),
    "model_plans": Case(
        "plans of models up to a trillion parameters", 10, plans.model_plans,
        flags={"only": str, "plans": Path(TEMPORARY) / "fzero-model-plans", "tables": False, "seconds": 1800},
        small={"only": "llama 2 7b, 8 x"},
        how="Planned",
    ),
    "published": Case(
        "published training speeds of GPUs, compared with plans", 30, published.published,
        flags={"only": str, "plans": Path(TEMPORARY) / "fzero-published", "tables": False, "layers": 0},
        small={"only": "8 H100, compiled", "layers": 2},
        how="Planned",
    ),
    "plan_search": Case(
        "programs chosen within memory budgets, and the time to plan them", 12, plans.plan_search,
        flags={"only": [str], "before": Path},
        small={"only": ["plan_memory, stage 0"]},
        how="Planned",
    ),
    "sequence_plans": Case(
        "plans of long sequences under sequence_parallel", 1, plans.sequence_plans,
        flags={"layers": 8, "shorter": 1},
        small={"layers": 1, "shorter": 64},
        how="Planned",
    ),
    "pipeline_plans": Case(
        "plans of pipelines, and of a trillion parameters in 16 stages", 10, plans.pipeline_plans,
        flags={"layers": 128, "pipe": 16, "micro": [32, 128], "smaller": 1},
        small={"layers": 4, "pipe": 2, "micro": [4], "smaller": 64},
        how="Planned",
    ),
    "compressed_plans": Case(
        "plans of 1,024 devices over five networks with compress", 8, wire.compressed_plans,
        flags={"layers": int, "seq": 4096, "nodes": 128, "only": [str]},
        small={"layers": 2, "seq": 64, "nodes": 2},
        how="Planned",
    ),
}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(CASES[sys.argv[2]], argparse.Namespace(**json.loads(sys.argv[3])))
        return
    if len(sys.argv) < 2 or sys.argv[1] not in CASES:
        listed = "\n".join(f"  {name:22}{c.minutes:3g} min  {c.about}" for name, c in CASES.items())
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"cases:\n{listed}"
        )
        parser.add_argument("case", choices=CASES, metavar="CASE", help="followed by its flags")
        parser.parse_args()
    case, args = CASES[sys.argv[1]], parsed(sys.argv[1], sys.argv[2:])
    found = case.run(args)
    data = {"settings": settings(args, "case", "path", "picture", "plans"), **found.data}
    shown = (found.title, found.columns, found.rows, found.notes)
    publish(args.name, *shown, data, args.out, found.draw, case.how)


def parsed(name: str, given: list[str]) -> argparse.Namespace:
    """The flags of a case."""
    case = CASES[name]
    about = f"{case.about}: about {case.minutes:g} minutes\n\n{inspect.getdoc(case.run)}"
    parser = argparse.ArgumentParser(
        prog=f"measure.py {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {**case.flags, **(case.small if "--small" in given else {})}
    for flag, usual in case.flags.items():
        many, first = isinstance(usual, list), usual[0] if isinstance(usual, list) else usual
        kind = first if isinstance(first, type) else type(first)
        # a default that is a type says only that
        value = [] if defaults[flag] == [kind] else None if defaults[flag] is kind else defaults[flag]
        options: dict[str, Any] = {"default": value, "help": f"{HELP.get(flag, '')} (default: {value})".strip()}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "nargs": "+" if many else None}
            contest = flag == "only" and first in CONTESTANTS
            options["choices"] = list(CONTESTANTS) if contest else CHOICES.get(flag)
        parser.add_argument(f"--{flag.replace('_', '-')}", **options)
    parser.add_argument("--small", action="store_true", help="tiny sizes and few rounds: results say nothing")
    parser.add_argument("--name", default=name, help="of the files in --out")
    parser.add_argument("--out", type=Path, default=SMALL_OUT if "--small" in given else None, help=OUT_HELP)
    return argparse.Namespace(**vars(parser.parse_args(given)), case=name)


def work(case: Case, args: argparse.Namespace) -> None:
    """A process of a case: acts on commands until the pipe closes."""
    assert case.worker is not None
    serve(case.worker(args))
    import torch.distributed as dist

    import fzero as fz

    fz.close_mesh()
    if dist.is_initialized():  # a peer's
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
