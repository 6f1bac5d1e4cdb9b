"""Training steps of fzero, PyTorch and DeepSpeed as functions from a batch to its loss, with the same optimizer."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fzero as fz
from fzero import optim

LR, WEIGHT_DECAY, MAX_NORM = 3e-4, 0.01, 1.0
NUM_BATCHES = 16
"""Different batches of a contest, which all contestants repeat."""

Step = Callable[[Any], Any]
"""From a batch to its loss, including the update."""


def shard(batch: Any, rank: int, size: int) -> Any:
    """The part of a global batch that belongs to a rank."""
    return tuple(x.chunk(size)[rank].contiguous() for x in batch)


def timed(step: Step, batches: Sequence[Any], first: int, count: int) -> dict[str, Any]:
    """Take steps on batches in turn, beginning with number `first`: losses, and seconds of all steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    losses = [step(batches[i % len(batches)]) for i in range(first, first + count)]
    losses = [float(x) for x in losses]
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "losses": losses}


# --- fzero ---


def clipped_adamw(lr: Any = LR, **options: Any) -> Any:
    """fzero's AdamW after clipping by the global norm."""
    return optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(lr, **options))


class FzeroStep:
    """A compiled step and its state. `initial` holds the arguments of `init`: a function and a key, or parameters."""

    def __init__(self, step: Any, mesh: Any, *initial: Any, backend: str = "inductor", **options: Any):
        self.train = fz.compile(step, mesh, backend=backend, **options)
        begin = time.perf_counter()
        self.state = self.train.init(*initial)
        self.init_s = time.perf_counter() - begin

    def __call__(self, batch: Any) -> torch.Tensor:
        self.state, metrics = self.train(self.state, batch)
        return metrics["loss"]


# --- PyTorch ---


def torch_adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    """PyTorch's AdamW, by default the fused one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY, **(options or {"fused": True}))


def torch_step(model: Any, optimizer: Any, forward: Any = None) -> Step:
    """A step of a module that returns its loss. `forward` replaces the call of the module."""

    def run(batch: Any) -> torch.Tensor:
        loss = (forward or model)(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def fsdp2(model: Any, blocks: Sequence[Any], mesh: Any, compiled: bool = False, **options: Any) -> Any:
    """Shard each block of a module and the module itself."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def own_norm_step(leaves: Sequence[Any], optimizer: Any, norm: torch.Tensor) -> None:
    """Clip gradients by a norm that was computed across ranks, update, and clear the gradients."""
    torch.nn.utils.clip_grads_with_norm_(leaves, MAX_NORM, norm, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def reduced(leaves: Sequence[Any], loss: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Replace gradients by their sums over all ranks, divided by `count`, and return the same of the loss: in one
    all_reduce."""
    import torch.distributed as dist

    flat = torch.cat([*(x.grad.flatten() for x in leaves), loss.detach().view(1)])
    dist.all_reduce(flat)
    flat /= count
    for x, grad in zip(leaves, flat[:-1].split([x.numel() for x in leaves]), strict=True):
        x.grad = grad.view_as(x)
    return flat[-1]


# --- DeepSpeed ---


def deepspeed_module() -> Any:
    """DeepSpeed with its process group over gloo."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import logger  # pyright: ignore[reportMissingImports]

    warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, about names that DeepSpeed uses
    logger.setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def deepspeed_engine(model: Any, rows: int, stage: int, client: Any = None, mpu: Any = None, **changes: Any) -> Any:
    """An engine after `deepspeed_module`.

    Args:
        model: The module.
        rows: The size of a rank's batch or micro-batch.
        stage: The ZeRO stage.
        client: The optimizer, unless `changes` configures DeepSpeed's.
        mpu: DeepSpeed's interface for model parallelism.
        changes: Entries of the configuration.
    """
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # PyTorch's fused AdamW, as the other contestants use
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        **changes,
    }
    given = {"model_parameters": model.parameters()} if client is None else {"optimizer": client}
    return deepspeed_module().initialize(model=model, config=config, mpu=mpu, **given)[0]


def deepspeed_step(engine: Any, forward: Any = None) -> Step:
    """A step of an engine whose module returns the loss, or of `forward`. The loss is that of this rank."""

    def run(batch: Any) -> torch.Tensor:
        loss = (forward or engine)(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return run


def averaged(step: Step, count: int) -> Step:
    """A step that returns the sum of the ranks' losses, divided by `count`."""
    import torch.distributed as dist

    def run(batch: Any) -> torch.Tensor:
        total = step(batch).clone()
        dist.all_reduce(total)
        return total / count

    return run
