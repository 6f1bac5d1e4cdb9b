"""Counts the data-parallel shards of a Trainer. All ranks along a tensor-parallel axis read the same shard of the data.

transformers and Accelerate count processes. The accelerator defined here counts shards of the data instead: data
loaders give the same samples to all ranks of a shard, and gathers return each shard once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import accelerate  # pyright: ignore[reportMissingImports] - of the extra `hf`
import torch
from accelerate.utils import (  # pyright: ignore[reportMissingImports]
    gather,
    recursively_apply,
)
from transformers.trainer_utils import seed_worker  # pyright: ignore[reportMissingImports]

from fzero import Mesh, tensor_parallel
from fzero.hf.tp_plan import tensor_rules
from fzero.transforms.sequence import SequenceParallel
from fzero.transforms.tensor import TensorParallel
from fzero.transforms.transform import Transform, find

Base: Any = accelerate.Accelerator


class TensorAxis(NamedTuple):
    """The axis of a Trainer's mesh along which all ranks read the same data, its size (1 if there is none), and the
    given transform."""

    name: str
    size: int
    given: TensorParallel | None


def tensor_axis(num: int | None, mesh: Mesh | None, transforms: Sequence[Any] | None) -> TensorAxis:
    """Returns the tensor-parallel axis that a Trainer's arguments define."""
    spec = find(tuple(transforms or ()), TensorParallel)
    name = spec.axis if spec else "model"
    size = num if num is not None else mesh.axes.get(name, 1) if spec and mesh is not None else 1
    return TensorAxis(name, size, spec)


def problems(num: Any, mesh: Mesh | None, transforms: Any, args: Any) -> list[str]:
    """Returns the reasons why a Trainer cannot use this `tensor_parallel`."""
    if num is not None and (type(num) is not int or num < 1):
        return [f"tensor_parallel={num!r}: must be a whole number of at least 1"]
    name, size, spec = tensor_axis(num, mesh, transforms)
    found = list[str]()
    if (parts := find(tuple(transforms or ()), SequenceParallel)) is not None:  # a rank reads part of a sample
        found.append(f"transforms: {parts.name} is not supported in a Trainer: fz.compile a step")
    if mesh is not None and num is not None and mesh.axes.get(name, 1) != num:
        found.append(f"tensor_parallel={num}: the mesh has {mesh}; fz.make_mesh(data=-1, {name}={num}) has the axis")
    elif mesh is None and args.world_size % size:
        found.append(f"tensor_parallel={num}: does not divide {args.world_size} processes")
    if spec is not None and num is None and (mesh is None or name not in mesh.axes):
        found.append(f"transforms: {spec.name} needs tensor_parallel=N, or mesh=fz.make_mesh(data=-1, {name}=N)")
    if size > 1 and args.accelerator_config.dispatch_batches:
        found.append("accelerator_config.dispatch_batches: with tensor_parallel every rank reads its own batches")
    return found


def missing(axis: TensorAxis, model: Any) -> list[Transform]:
    """Returns the `tensor_parallel` transform of the axis, if the caller has not given one.

    Raises:
        FzeroValueError: there is no tensor-parallel plan for the model.
    """
    if axis.size == 1 or axis.given is not None:
        return []
    return [tensor_parallel(axis=axis.name, rules=tensor_rules(model, ranks=axis.size))]


class DataParts(NamedTuple):
    """The shards into which a mesh divides the data.

    Attributes:
        index: the number of this rank's shard.
        firsts: for each shard, the first rank that reads it.
    """

    index: int
    firsts: list[int]


def of(mesh: Mesh, axis: str) -> DataParts:
    """Returns the data shards along all axes except `axis`.

    These are the axes that shard a step's batch: compiling rejects a mesh with an axis that has no use.
    """
    axes = tuple(name for name in mesh.axes if name != axis)
    # Ranks are numbered with the last axis of the mesh fastest. Along `axis`, neighbors are `stride` ranks apart, and
    # the first of them has the coordinate 0.
    stride, size = 1, mesh.axes[axis]
    for name in reversed(mesh.axes):
        if name == axis:
            break
        stride *= mesh.axes[name]
    firsts = [rank for rank in range(mesh.size) if rank // stride % size == 0]
    return DataParts(mesh.index(axes), firsts)


class ShardAccelerator(Base):
    """An accelerator of Accelerate whose processes are the data shards.

    Accelerate's own `ParallelismConfig` with a tensor-parallel axis would also give the same samples to all ranks of a
    shard. But its gathers (1.15) return the tensors of all processes, so metrics would count each sample several times,
    and the samples that pad the last batch would not be cut off.

    Args:
        parts: returns the data shards, once there is a mesh.
        settings: of `Accelerator`.
    """

    def __init__(self, parts: Callable[[], DataParts], **settings: Any):
        self._parts = parts
        super().__init__(**settings)
        # Every rank reads an iterable data set itself: a process that dispatches batches would count processes.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        return len(self._parts().firsts)

    @property
    def process_index(self) -> int:
        return self._parts().index

    def prepare_data_loader(self, data_loader: Any, *args: Any, **settings: Any) -> Any:
        seeding = data_loader.worker_init_fn
        # The workers of all ranks of a data shard draw the same random numbers.
        if isinstance(seeding, partial) and seeding.func is seed_worker:
            data_loader.worker_init_fn = partial(seeding, rank=self.process_index)
        return super().prepare_data_loader(data_loader, *args, **settings)

    def gather(self, tensor: Any) -> Any:
        firsts, size = self._parts().firsts, self.state.num_processes

        def once(x: Any) -> Any:
            # [size * batch, ...] -> [size, batch, ...] -> [shards * batch, ...]
            return x.reshape(size, x.shape[0] // size, *x.shape[1:])[firsts].flatten(0, 1)

        return recursively_apply(once, super().gather(tensor), error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object:
            try:
                recursively_apply(lambda x: x, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
        # Accelerate joins the lists of all processes, so an empty one adds nothing. A rank must not skip the call, for
        # which the others wait.
        if use_gather_object and self.state.process_index not in self._parts().firsts:
            input_data = []
        return super().gather_for_metrics(input_data, use_gather_object)


class OtherArguments:
    """Arguments of transformers with some values replaced."""

    def __init__(self, args: Any, **values: Any):
        self._args = args
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


class Exchange:
    """Exchanges numbers between all ranks of a Trainer. All of them call its methods."""

    def __init__(self, trainer: Any):
        self._trainer, self.alone = trainer, trainer.args.world_size == 1

    def bounds(self, numbers: Mapping[str, Sequence[int]]) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the largest and the smallest number of each name over all ranks."""
        high, low = {n: max(x) for n, x in numbers.items()}, {n: min(x) for n, x in numbers.items()}
        if self.alone:
            return high, low
        # One gather for both bounds: the largest of the negated numbers is the smallest number, negated.
        here = torch.tensor([[*high.values(), *(-x for x in low.values())]], device=self._trainer.args.device)
        everyone: Any = gather(here)
        found = everyone.amax(0).tolist()
        return dict(zip(high, found, strict=False)), dict(zip(low, (-x for x in found[len(high) :]), strict=True))
