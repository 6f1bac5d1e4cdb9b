"""The contestants of a comparison: how each is built from the same parameters, and steps on the same batches.

A contestant is a group of processes (`start`) that act on commands (`worker`). Peers run as their documentation
recommends, and join process groups by torch's own means.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import Group, peak_mib, reset_peak, rss_mib
from training import (
    LR,
    NUM_BATCHES,
    WEIGHT_DECAY,
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

from cases import ZERO, processes


@dataclass(frozen=True)
class Contestant:
    """Who steps. `alone` is one process: "whole" computes the whole batch with a thread a rank, "part" one rank's part
    with one thread."""

    title: str
    library: str
    stage: int | None = None
    bf16: bool = False
    compiled: bool = False
    gloo: bool = False  # of fzero, whose ranks on one host otherwise read each other's memory
    alone: str = ""
    optional: bool = False
    offload: bool = False  # the optimizer's state in host memory, where it is updated
    model: str = "model"  # the file that has it
    functionalized: bool = False
    chunks: int | None = None  # of fz.chunked_cross_entropy

    @property
    def is_floor(self) -> bool:
        """Whether it only bounds the others: the arithmetic of one rank, without communication."""
        return self.alone == "part"


CONTESTANTS = {
    "fzero_zero3": Contestant("fzero ZeRO-3", "fzero", 3),
    "fzero_zero3_chunked": Contestant("fzero ZeRO-3, chunked loss", "fzero", 3, optional=True, chunks=8),
    "fzero_zero2": Contestant("fzero ZeRO-2", "fzero", 2),
    "fzero_zero1": Contestant("fzero ZeRO-1", "fzero", 1),
    "fzero_zero0": Contestant("fzero data parallel", "fzero", 0),
    "fzero_zero3_gloo": Contestant("fzero ZeRO-3 over gloo", "fzero", 3, gloo=True),
    "fzero_zero3_bf16": Contestant("fzero ZeRO-3, bf16", "fzero", 3, bf16=True),
    "fzero_zero2_bf16": Contestant("fzero ZeRO-2, bf16", "fzero", 2, bf16=True),
    "fzero_zero1_bf16": Contestant("fzero ZeRO-1, bf16", "fzero", 1, bf16=True),
    "fzero_zero0_bf16": Contestant("fzero data parallel, bf16", "fzero", 0, bf16=True),
    "single": Contestant("single process", "torch", alone="whole"),
    "ddp": Contestant("DDP", "ddp"),
    "fsdp2": Contestant("FSDP2", "fsdp2"),
    "fsdp2_compile": Contestant("FSDP2 + compile per block", "fsdp2", compiled=True),
    "deepspeed_zero1": Contestant("DeepSpeed ZeRO-1", "deepspeed", 1),
    "deepspeed_zero2": Contestant("DeepSpeed ZeRO-2", "deepspeed", 2),
    "deepspeed_zero3": Contestant("DeepSpeed ZeRO-3", "deepspeed", 3),
    "fzero_zero3_offload": Contestant("fzero ZeRO-3, optimizer on the host", "fzero", 3, optional=True, offload=True),
    "deepspeed_zero3_offload": Contestant(
        "DeepSpeed ZeRO-3, CPU optimizer", "deepspeed", 3, optional=True, offload=True
    ),
    # minutes a step on a CPU without native bf16
    "fsdp2_bf16": Contestant("FSDP2, bf16", "fsdp2", bf16=True, optional=True),
    # cases/modules.py
    "llama_functions": Contestant("fzero ZeRO-3, functions", "fzero", 3, optional=True, model="llama"),
    "llama_module": Contestant(
        "fzero ZeRO-3, functionalized", "fzero", 3, optional=True, model="llama", functionalized=True
    ),
    "llama_fsdp2": Contestant("FSDP2 + compile per layer", "fsdp2", compiled=True, optional=True, model="llama"),
    "llama_deepspeed": Contestant("DeepSpeed ZeRO-3", "deepspeed", 3, optional=True, model="llama"),
    "qlora_module": Contestant("fzero ZeRO-3, NF4", "fzero", 3, optional=True, model="qlora", functionalized=True),
    "qlora_whole": Contestant(
        "fzero data parallel, NF4", "fzero", 0, optional=True, model="qlora", functionalized=True
    ),
    "qlora_ddp": Contestant("peft + bitsandbytes, DDP", "ddp", optional=True, model="qlora"),
    "floor_fzero": Contestant("floor: fzero, one process", "fzero", alone="part"),
    "floor_module": Contestant("floor: eager module, one process", "torch", alone="part"),
    "floor_fzero_bf16": Contestant("floor: fzero, one process, bf16", "fzero", bf16=True, alone="part"),
}


def installed(name: str) -> bool:
    """Whether a contestant can run here: DeepSpeed comes with the extra `bench`."""
    return CONTESTANTS[name].library != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def start(name: str, args: argparse.Namespace, size: int, cache: str | None = None) -> Group:
    """The processes of a contestant, joined and idle."""
    alone = CONTESTANTS[name].alone
    threads = size if alone == "whole" else 1
    given = {"contestant": name, "parts": size}
    group = processes(args, 1 if alone else size, env=given, threads=threads, timeout=1200, cache=cache)
    group.ask("join")
    return group


# --- one process ---


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    contestant = CONTESTANTS[args.contestant]
    live: dict[str, Any] = {"done": 0}

    def join() -> None:
        """Everything before the model exists: libraries, process groups, batches."""
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        model = importlib.import_module(contestant.model)
        more = {"vocab": args.vocab} if "vocab" in args else {}
        config = model.Config(args.layers, args.width, args.heads, args.seq, args.batch, **more)
        for name in ("torch._dynamo", "torch._inductor.compile_fx", "functorch.compile"):
            # what some load while they build, an optimizer among them, is in nobody's growth
            importlib.import_module(name)
        live["make"], rank = LIBRARIES[contestant.library](args, contestant, config)
        parts = 1 if contestant.alone == "whole" else args.parts
        live["batches"] = [shard(batch, rank, parts) for batch in model.make_batches(config, NUM_BATCHES)]
        if contestant.functionalized:  # as transformers' models are called
            live["batches"] = [{"input_ids": tokens, "labels": tokens} for tokens, _ in live["batches"]]

    def build() -> dict[str, float]:
        live["rss"] = rss_mib()
        reset_peak()
        begin = time.perf_counter()
        live["step"] = live.pop("make")()
        return {"setup_s": time.perf_counter() - begin}

    def steps(count: int) -> dict[str, Any]:
        done = live["done"]
        live["done"] += count
        return timed(live["step"], live["batches"], done, count)

    def settle() -> dict[str, float]:
        """Memory since before the model was built: the peak, from here on a new one, and what rests between steps."""
        peak = peak_mib() - live["rss"]
        reset_peak()
        return {"growth_mib": peak, "resting_mib": rss_mib() - live["rss"]}

    def planned() -> dict[str, float]:
        """Of fzero's ZeRO-3: the planned peak, and the least that any order of its blocks could do with."""
        train = live["step"].train
        return {"planned_mib": train.plan.peak_bytes / 2**20, "least_mib": least_bytes(train.program) / 2**20}

    return {"join": join, "build": build, "steps": steps, "settle": settle, "planned": planned}


def least_bytes(program: Any) -> int:
    """The closed form of a ZeRO-3 step's peak: the state at rest, two blocks' parameters whole, and what every block
    keeps for its backward, the last one as much as the one before it."""
    from fzero.plan.memory import resting_bytes, roles

    ops, role, values = [op for op, _ in program.walk()], roles(program), program.values()
    gathers = [sum(values[a].nbytes for a in op.args) for op in ops if op.op == "all_gather_start"]
    kept = [sum(v.nbytes for v in op.out if role[v.name] == "saved") for op in ops if op.is_forward]
    return resting_bytes(program) + max(a + b for a, b in itertools.pairwise(gathers)) + sum(kept) + kept[-1]


def _fzero(args: argparse.Namespace, contestant: Contestant, config: Any) -> tuple[Callable[[], Step], int]:
    import fzero as fz

    models = importlib.import_module(contestant.model)
    mesh = fz.make_mesh(device="cpu", shared_memory=not contestant.gloo)
    transforms = [] if contestant.stage is None else [getattr(fz, ZERO[contestant.stage])(axis="data")]
    transforms += [fz.mixed_precision("bf16")] if contestant.bf16 else []
    transforms += [fz.offload("cpu", "opt_state")] if contestant.offload else []

    def make() -> Step:
        if contestant.functionalized:
            model, init = models.functionalized(config)
            step = model.train_step(clipped_adamw())
        else:
            loss = models.make_loss(config, contestant.chunks) if contestant.chunks else models.make_loss(config)
            step, init = fz.train_step(loss, clipped_adamw()), models.make_init(config)
        initial = (init, fz.random.key(0)) if callable(init) else (init,)  # a function, or the parameters themselves
        return FzeroStep(fz.compose(*transforms)(step), mesh, *initial, backend=args.backend)

    return make, mesh.rank


def _torch(args: argparse.Namespace, contestant: Contestant, config: Any) -> tuple[Callable[[], Step], int]:
    """A plain module, or one wrapped by DDP or FSDP2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn.parallel import DistributedDataParallel

    models = importlib.import_module(contestant.model)
    mesh: Any = None
    if not contestant.alone:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make() -> Step:
        model: Any = models.module(config)
        if contestant.library == "ddp":
            model = DistributedDataParallel(model)
        if contestant.library == "fsdp2":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if contestant.bf16 else MixedPrecisionPolicy()
            fsdp2(model, models.blocks(model), mesh, contestant.compiled, mp_policy=policy)
        return torch_step(model, torch_adamw(model, **OPTIMIZERS[args.optimizer]))

    return make, 0 if contestant.alone else dist.get_rank()


def _deepspeed(args: argparse.Namespace, contestant: Contestant, config: Any) -> tuple[Callable[[], Step], int]:
    deepspeed = deepspeed_module()
    changes: dict[str, Any] = {"bf16": {"enabled": contestant.bf16}}
    if contestant.offload:
        changes["zero_optimization"] = {"stage": contestant.stage, "offload_optimizer": {"device": "cpu"}}

    def make() -> Step:
        model = importlib.import_module(contestant.model).module(config)
        if contestant.offload:  # an operator that its first run on a machine builds, which takes a minute
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            adam: Any = DeepSpeedCPUAdam
            optimizer = adam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, adamw_mode=True)
        else:
            optimizer = torch_adamw(model, **OPTIMIZERS[args.optimizer])
        rows = config.batch // args.parts
        return deepspeed_step(deepspeed_engine(model, rows, contestant.stage or 0, optimizer, **changes))

    return make, deepspeed.comm.get_rank()


OPTIMIZERS: dict[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
LIBRARIES = {"fzero": _fzero, "torch": _torch, "ddp": _torch, "fsdp2": _torch, "deepspeed": _deepspeed}
