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
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import Group, peak_mib, reset_peak, rss_mib

from cases import LR, processes

WEIGHT_DECAY, MAX_NORM = 0.01, 1.0
NUM_BATCHES = 16


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
        live["batches"] = [
            tuple(t.chunk(parts)[rank].contiguous() for t in batch) for batch in model.make_batches(config, NUM_BATCHES)
        ]

    def build() -> dict[str, float]:
        live["rss"] = rss_mib()
        reset_peak()
        begin = time.perf_counter()
        live["step"] = live.pop("make")()
        return {"setup_s": time.perf_counter() - begin}

    def steps(count: int) -> dict[str, Any]:
        losses = []
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            losses.append(live["step"](live["batches"][live["done"] % NUM_BATCHES]))
            live["done"] += 1
        losses = [float(x) for x in losses]
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "losses": losses}

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


Step = Callable[[Any], Any]
"""From a batch to its loss, with everything between."""


def _fzero(args: argparse.Namespace, contestant: Contestant, config: Any) -> tuple[Callable[[], Step], int]:
    import fzero as fz
    from fzero import optim

    models = importlib.import_module(contestant.model)
    mesh = fz.make_mesh(device="cpu", shared_memory=not contestant.gloo)
    zero = (fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params)
    transforms = [] if contestant.stage is None else [zero[contestant.stage](axis="data")]
    transforms += [fz.mixed_precision("bf16")] if contestant.bf16 else []
    transforms += [fz.offload("cpu", "opt_state")] if contestant.offload else []

    def make() -> Step:
        optimizer = optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
        if contestant.functionalized:
            model, init = models.functionalized(config)
            step = model.train_step(optimizer)
        else:
            loss = models.make_loss(config, contestant.chunks) if contestant.chunks else models.make_loss(config)
            step, init = fz.train_step(loss, optimizer), models.make_init(config)
        train = fz.compile(fz.compose(*transforms)(step), mesh, backend=args.backend)
        state = train.init(init, fz.random.key(0))

        def run(batch: Any) -> Any:
            nonlocal state
            given = {"input_ids": batch[0], "labels": batch[0]} if contestant.functionalized else batch
            state, metrics = train(state, given)
            return metrics["loss"]

        run.train = train  # type: ignore[attr-defined]
        return run

    return make, mesh.rank


def _torch(args: argparse.Namespace, contestant: Contestant, config: Any) -> tuple[Callable[[], Step], int]:
    """A plain module, or one wrapped by DDP or FSDP2."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
            import torch

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if contestant.bf16 else MixedPrecisionPolicy()
            for block in models.blocks(model):
                if contestant.compiled:
                    block.compile(fullgraph=True)
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = _optimizer(args, model)

        def run(batch: Any) -> Any:
            from torch.nn.utils import clip_grad_norm_

            loss = model(*batch)
            loss.backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return run

    return make, 0 if contestant.alone else dist.get_rank()


def _deepspeed(args: argparse.Namespace, contestant: Contestant, config: Any) -> tuple[Callable[[], Step], int]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import logging

    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # builds an operator on the first run on a machine: a minute
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elsewhere = {"offload_optimizer": {"device": "cpu"}} if contestant.offload else {}
    settings = {
        "train_micro_batch_size_per_gpu": config.batch // args.parts,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": contestant.stage, **elsewhere},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as the other peers have
        "bf16": {"enabled": contestant.bf16},
    }

    def make() -> Step:
        warnings.simplefilter("ignore", FutureWarning)  # of torch's, about names that DeepSpeed uses: several a step
        model = importlib.import_module(contestant.model).module(config)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=_optimizer(args, model, deepspeed=contestant.offload), config=settings
        )

        def run(batch: Any) -> Any:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return run

    return make, deepspeed.comm.get_rank()


LIBRARIES = {"fzero": _fzero, "torch": _torch, "ddp": _torch, "fsdp2": _torch, "deepspeed": _deepspeed}


def _optimizer(args: argparse.Namespace, model: Any, deepspeed: bool = False) -> Any:
    """torch's AdamW, or the one that DeepSpeed wants where it keeps its state on the host, an operator that its first
    run on a machine builds: a minute."""
    import torch

    if deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        make: Any = DeepSpeedCPUAdam
        return make(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, adamw_mode=True)
    options: Any = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[args.optimizer]
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **options)
