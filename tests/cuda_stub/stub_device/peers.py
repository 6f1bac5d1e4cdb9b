"""One rank of a contestant of no_gpu.py --peers: trains a few steps, and says what PyTorch's allocator had at most.

RANK=0 WORLD_SIZE=2 ... python peers.py "FSDP2" --backend eager
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmark_modules  # noqa: F401
import torch
from checks import workspaces
from model import Config, blocks, make_batches, make_init, make_loss, module
from stub_device import no_values

import fzero as fz
from fzero import optim

OURS = {
    "fzero ZeRO-3": [],
    "fzero ZeRO-3, bf16": [fz.mixed_precision("bf16")],
}
PEERS = ("FSDP2", "FSDP2, bf16")
STEPS = 3
Step = Callable[[Any], Any]


def ours(who: str, config: Config, backend: str) -> tuple[Step, Callable[[], int]]:
    """A step, and the planned peak after one."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4, weight_decay=0.01))
    step = fz.compose(fz.shard_params(), *OURS[who])(fz.train_step(make_loss(config), optimizer))
    train = fz.compile(step, fz.make_mesh(timeout=120), backend=backend)
    state = train.init(make_init(config), fz.random.key(0))

    def run(batch: Any) -> None:
        nonlocal state
        state, _ = train(state, batch)

    return run, lambda: train.plan.peak_bytes


def theirs(who: str, config: Config, compiled: bool) -> tuple[Step, Callable[[], int]]:
    """FSDP2 as its documentation recommends it, each block compiled if so said."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in who else MixedPrecisionPolicy()
    model: Any = module(config)
    for block in blocks(model):
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=0.01, fused=True)

    def run(batch: Any) -> None:
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run, lambda: 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=[*OURS, *PEERS])
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=65536)
    args = parser.parse_args()
    no_values.install()
    config, rank = Config(args.layers, args.width, vocab=args.vocab), int(os.environ["RANK"])
    make: Any = ours if args.who in OURS else theirs
    run, planned = make(args.who, config, args.backend if make is ours else args.backend == "inductor")
    batches = [tuple(x.chunk(2)[rank].contiguous().cuda() for x in batch) for batch in make_batches(config, STEPS)]
    for batch in batches:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(batch)
    peak, reserved = torch.cuda.max_memory_allocated() - workspaces(), torch.cuda.max_memory_reserved()
    if rank == 0:
        print(json.dumps({"who": args.who, "peak": peak, "reserved": reserved, "planned": planned()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
