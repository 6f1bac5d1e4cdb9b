"""Interprets a program op by op: the slow and simple reference semantics that the fast execution is compared with.

Nothing is planned, shared or overlapped here: every value is a separate tensor, a transfer copies its values at its
start, and ranks exchange data through torch.distributed, whatever the transport of the mesh is. Subgraphs run as they
were recorded, operation by operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm.collectives import gather
from fzero.comm.groups import ranks_along
from fzero.ir.attributes import ShardOfAttrs
from fzero.ir.ops import OPS, batch_axes_of
from fzero.ir.program import Instruction, Placement, Program, Value
from fzero.mesh import Mesh
from fzero.sharding.layout import Layout, Leaf, shard
from fzero.trace.device_decompositions import by_operation, on_device

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class BuiltFunctions:
    """The subgraphs of a program as Python code. Each is built when it is first called. Building one takes far longer
    than running it on small tensors, so all ranks and steps of a simulation share them.
    """

    def __init__(self, program: Program, device: torch.device):
        self._program, self._device = program, device
        self._built: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()  # ranks are threads, which may reach a subgraph at the same time

    def __getitem__(self, name: str) -> Callable[..., Any]:
        with self._lock:
            if name not in self._built:
                self._built[name] = by_operation(on_device(self._program.functions[name].graph, self._device))
            return self._built[name]


class Interpreter:
    """Runs the ops of one program on this rank. All ranks of the mesh run it together.

    Attributes:
        values: the current value of every name, on this rank. Tensors of the state are copies: nothing of a state is
            written.

    Args:
        program: any program, including a base program except its `update`.
        mesh: the mesh that it is for.
        leaves: the tensors of the state and of the batch, by the names of the program's inputs.
        part: the result of `part_index`, if it should not be computed.
        functions: the program's subgraphs, if another interpreter on such a device has built them.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        leaves: Mapping[str, torch.Tensor],
        part: int | None = None,
        functions: BuiltFunctions | None = None,
    ):
        self.program, self.mesh, self._part = program, mesh, part
        self._functions = BuiltFunctions(program, mesh.device) if functions is None else functions
        self.values: dict[str, torch.Tensor] = {v.name: leaves[v.name].detach().clone() for v in program.inputs}
        self.started: dict[str, tuple[Instruction, list[torch.Tensor]]] = {}
        self._axes = batch_axes_of(program)
        self._sent: list[Any] = []  # kept until they are received

    def run(self, op: Instruction, iteration: int = 0) -> None:
        """Runs one op, in the given iteration (`iteration`) of the enclosing loop."""
        row = OPS[op.op]
        results = row.reference(op, [] if row.waits else [self.values[a] for a in op.args], self, iteration)
        self.values.update((v.name, x) for v, x in zip(op.out, results, strict=True))

    def valid_range(self, op: Instruction) -> tuple[int, int]:
        """Returns the range of this rank's elements in the flattened tensor that an op is about."""
        leaf = Leaf("", "", op.says(ShardOfAttrs).shape, Layout(torch.float32, op.axes))
        boxes = leaf.boxes(self.mesh)
        return boxes.start, boxes.stop

    def function(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def write(self, names: Sequence[str], new: Sequence[torch.Tensor]) -> None:
        for name, x in zip(names, new, strict=True):
            self.values[name] = x.reshape(self.values[name].shape).to(self.values[name].dtype, copy=True)

    def part_index(self, count: int, micro: int) -> int:
        """Returns the index of a part of the global batch."""
        here = self.mesh.index(self._axes) if self._axes else 0
        return here * count + micro if self._part is None else self._part

    def take_shard(self, x: torch.Tensor, source: Value, out: Value) -> torch.Tensor:
        """Returns this rank's shard of a value that is sharded, or sharded further, to get the placement of
        another.
        """
        if source.placement.kind not in ("shard", "permuted"):
            return flat_shard(x, out.placement, self.mesh)
        at = source.placement
        axes = at.axes[-1:] if at.kind == "permuted" else out.placement.axes[len(at.axes) :]
        return x.chunk(self.mesh.axis_size(axes))[self.mesh.index(axes)].clone()

    def gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return gather(self.mesh, x.reshape(-1), axis)

    def reduce(self, x: torch.Tensor, op: str, axis: str) -> None:
        dist.all_reduce(x, _OPS[op], self.mesh.group(axis))

    def send(self, values: Sequence[torch.Tensor], axis: str, peer: int, number: int) -> None:
        """Starts to send values to the rank at another index along an axis."""
        to = ranks_along(self.mesh.axes, self.mesh.rank, axis)[peer]
        for x in values:
            kept = x.contiguous().clone()
            # Asynchronous, because a blocking send would deadlock if two stages send to each other before they receive.
            self._sent.append((kept, dist.isend(kept, to, self.mesh.group(axis), number)))

    def recv(self, like: Sequence[torch.Tensor], axis: str, peer: int, number: int) -> Sequence[torch.Tensor]:
        """The values that the rank at another index along an axis sends under this number."""
        for x in like:
            dist.recv(x, ranks_along(self.mesh.axes, self.mesh.rank, axis)[peer], self.mesh.group(axis), number)
        return like


def flat_shard(whole: torch.Tensor, placement: Placement, mesh: Mesh) -> torch.Tensor:
    """Returns this rank's flat, padded shard of an unsharded value."""
    layout = Layout(whole.dtype, placement.axes, grid=placement.grid, dims=placement.dims)
    return shard(whole, Leaf("", "", tuple(whole.shape), layout), mesh)
