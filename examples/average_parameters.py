"""Train replicas independently and average their parameters every few steps, for links between hosts that are too slow
to send the gradients of every step (local SGD).

Each replica is a job with its own mesh, batches, optimizer state and checkpoints:

    torchrun --nproc-per-node 2 examples/average_parameters.py --replica 0 --store host0:29600
    torchrun --nproc-per-node 2 examples/average_parameters.py --replica 1 --store host0:29600

Measure the loss for your run before you rely on it: with few averages it is higher than that of `fz.data_parallel`.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import torch
import torch.distributed as dist
from train_gpt import gpt, init_gpt

import fzero as fz
from fzero import optim


def join(store: str, replica: int, replicas: int, rank: int) -> Any:
    """The group of the processes that have this rank in the replicas' jobs. The first rank of replica 0 is the host of
    the store, on a port that no job uses otherwise."""
    host, port = store.rsplit(":", 1)
    # A store of several jobs cannot know how many processes will connect, so it must not wait for all of them.
    shared = dist.TCPStore(host, int(port), is_master=(replica, rank) == (0, 0), wait_for_workers=False)
    return dist.ProcessGroupGloo(
        dist.PrefixStore(f"rank{rank}", shared), replica, replicas, datetime.timedelta(hours=1)
    )


@torch.no_grad()
def average(state: fz.State, group: Any) -> None:
    """Set the parameters to their mean over the replicas, in place.

    All replicas have the same step and the same number of processes, so this rank's shards are the same elements in
    every replica, whatever the ZeRO stage. Parameters have to be in memory, so leave out `fz.offload` of parameters.
    """
    for x in {id(x): x for x in fz.tree.leaves(state.params)}.values():  # a tied parameter once
        total = x.to("cpu", torch.float32, copy=True)
        group.allreduce([total]).wait()
        x.copy_(total / group.size())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--replica", type=int, required=True)
    p.add_argument("--replicas", type=int, default=2)
    p.add_argument("--store", required=True, help="HOST:PORT of a host that all replicas reach")
    p.add_argument("--every", type=int, default=20, help="steps between two averages")
    p.add_argument("--steps", type=int, default=200, help="a multiple of --every")
    p.add_argument("--out", help="directory for checkpoints, one for each replica")
    p.add_argument("--backend", default="inductor")
    args = p.parse_args()

    mesh = fz.make_mesh(data=-1)
    group = join(args.store, args.replica, args.replicas, mesh.rank)
    step = fz.shard_params(fz.train_step(lambda params, batch: gpt(params, *batch, heads=4)[0], optim.adamw(1e-3)))
    train = fz.compile(step, mesh, backend=args.backend)
    state = train.init(lambda key: init_gpt(key, layers=2, width=64))  # the same parameters in every replica
    data = fz.data.TokenDataset(fz.data.python_source(), seq=64, batch=8 * args.replicas * mesh.size)
    part = args.replica * mesh.size + mesh.rank
    for i in range(args.steps):
        state, metrics = train(state, data.batch_at(i, rank=part, size=args.replicas * mesh.size))
        if (i + 1) % args.every == 0:
            average(state, group)
            if mesh.rank == 0:
                print(f"replica {args.replica}, step {i + 1}: loss {float(metrics['loss']):.4f}", flush=True)
    if args.out:
        fz.checkpoint.save(f"{args.out}/replica-{args.replica}", state)


if __name__ == "__main__":
    main()
