"""Runs a program op by op, without anything that makes it fast: the reference for the compiled execution.

Each op runs as its text says, with its own implementation (`Op.runs`). But nothing is planned, shared or overlapped:
every value is a separate tensor, all memory tiers are ordinary memory, and a transfer copies its values when it starts.
Ranks exchange values through a `RankExchange`, whatever the transport of the mesh is. Subgraphs run as they were
recorded, operation by operation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fzero.comm.collectives import check_rows, gather
from fzero.comm.groups import ranks_along
from fzero.ir.ops import OPS, STARTS, Attempt
from fzero.ir.printer import statements
from fzero.ir.program import Instruction, Program
from fzero.ir.value_names import identifier
from fzero.mesh import Mesh
from fzero.runtime.build.calling_convention import as_called
from fzero.runtime.execute import Environment, namespace_of
from fzero.trace.device_decompositions import by_operation, on_device

Tensors = Sequence[torch.Tensor]
Moving = Callable[[Tensors], Tensors]
"""A transfer that has started: given the buffers for its results, waits for it and returns the results."""

_JOIN = {"sum": lambda xs: xs.sum(0, dtype=xs.dtype), "max": lambda xs: xs.amax(0), "min": lambda xs: xs.amin(0)}


class RankExchange(Protocol):
    """Exchanges values between the ranks of a mesh."""

    def along(self, mesh: Mesh, axis: str, x: torch.Tensor) -> Tensors:
        """Returns the values of all ranks along an axis, in their order. All of them call it together."""
        ...

    def send(self, mesh: Mesh, axis: str, peer: int, number: int, values: Tensors) -> None:
        """Sends values to the rank at another index along an axis, as message `number` between the two."""
        ...

    def recv(self, mesh: Mesh, axis: str, peer: int, number: int, like: Tensors) -> Tensors:
        """Returns the values of message `number` from the rank at another index along an axis. `like`: tensors of
        their shapes and dtypes.
        """
        ...


class ProcessExchange:
    """Exchanges values through torch.distributed."""

    def __init__(self) -> None:
        self._sent: list[Any] = []  # kept until they are received

    def along(self, mesh: Mesh, axis: str, x: torch.Tensor) -> Tensors:
        return gather(mesh, x.reshape(-1), axis).view(mesh.axes[axis], *x.shape).unbind()

    def send(self, mesh: Mesh, axis: str, peer: int, number: int, values: Tensors) -> None:
        to = ranks_along(mesh.axes, mesh.rank, axis)[peer]
        # Asynchronous, because a blocking send would deadlock if two stages send to each other before they receive.
        self._sent += [(x, dist.isend(x, to, mesh.group(axis), number)) for x in values]

    def recv(self, mesh: Mesh, axis: str, peer: int, number: int, like: Tensors) -> Tensors:
        for x in like:
            dist.recv(x, ranks_along(mesh.axes, mesh.rank, axis)[peer], mesh.group(axis), number)
        return like


class PlainTransfers:
    """The transfers of a program, between ranks and between memory tiers."""

    def __init__(self, mesh: Mesh, exchange: RankExchange):
        self._mesh, self._exchange = mesh, exchange
        self._numbers: Counter[tuple[str, str, int]] = Counter()  # of messages so far, by direction, axis and peer
        self.nothing: Moving = lambda into: into  # stands for a transfer that is skipped

    def wait(self, moving: Moving, into: Tensors = (), together: bool = False) -> Tensors:
        return moving(into)

    def settled(self, function: Callable[..., Any], written: Any) -> Callable[..., Any]:
        """Returns the function as it is: no copy is in flight whose memory it could overwrite."""
        return function

    # --- between ranks. The ranks meet at the wait. ---

    def all_gather_start(self, shards: Tensors, axis: str, into: Any = None) -> Moving:
        def gathered(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return torch.cat([part.reshape(-1) for part in self._exchange.along(self._mesh, axis, x)])[: like.numel()]

        return _each(shards, gathered)

    def reduce_scatter_start(self, wholes: Tensors, axis: str, op: str, into: Any = None) -> Moving:
        index = self._mesh.index(axis)

        def shard(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            part = self.reduced(x, axis, op).reshape(-1)[index * like.numel() : (index + 1) * like.numel()]
            return torch.nn.functional.pad(part, (0, like.numel() - part.numel()))

        return _each(wholes, shard)

    def all_reduce_start(self, values: Tensors, axis: str, op: str, into: Any = None) -> Moving:
        return _each(values, lambda x, like: self.reduced(x, axis, op))

    def all_to_all_start(self, values: Tensors, axis: str, into: Any = None) -> Moving:
        n, here = self._mesh.axes[axis], self._mesh.index(axis)

        def exchanged(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return torch.cat([part.reshape(n, -1)[here] for part in self._exchange.along(self._mesh, axis, x)])

        return _each(values, exchanged)

    def all_to_all_v_start(
        self, values: Tensors, counts: torch.Tensor, axis: str, rows: int, into: Any = None
    ) -> Moving:
        here, numbers = self._mesh.index(axis), counts.tolist()
        check_rows(numbers, rows, axis)

        def exchanged(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            sent = zip(self._exchange.along(self._mesh, axis, x), numbers, strict=True)
            come = torch.cat([part[sum(to[:here]) : sum(to[: here + 1])] for part, to in sent])
            return torch.cat([come, come.new_zeros(rows - len(come), *come.shape[1:])])

        return _each(values, exchanged)

    def send_start(self, values: Tensors, axis: str, to: int) -> Moving:
        kept = [x.contiguous().clone() for x in values]
        self._exchange.send(self._mesh, axis, to, self._next("to", axis, to), kept)
        return self.nothing

    def recv_start(self, values: Sequence[tuple[Sequence[int], str]], axis: str, source: int) -> Moving:
        device, number = self._mesh.device, self._next("from", axis, source)
        like = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in values]
        return lambda into: self._exchange.recv(self._mesh, axis, source, number, like)

    def replicate_start(self, *args: Any) -> Moving:
        """Sends nothing: copies of the state on other ranks are not values of a program."""
        return self.nothing

    def reduced(self, x: torch.Tensor, axis: str, op: str) -> torch.Tensor:
        return _JOIN[op](torch.stack([*self._exchange.along(self._mesh, axis, x)]))

    def _next(self, direction: str, axis: str, peer: int) -> int:
        self._numbers[direction, axis, peer] += 1
        return self._numbers[direction, axis, peer]

    # --- between memory tiers ---

    def to_device_start(self, values: Tensors, into: Any = None, **_: bool) -> Moving:
        moved = [x.clone() for x in values]
        if into is not None:  # tensors of the state
            for target, x in zip(into, moved, strict=True):
                target.copy_(x.reshape(target.shape))
        return lambda _: moved

    to_host_start = disk_read_start = disk_write_start = to_device_start


def _each(values: Tensors, move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Moving:
    """Returns a transfer that moves each value by itself. `move` is given the value and the buffer for its result."""
    moved = [x.clone() for x in values]
    return lambda into: [move(x, like).view(like.shape) for x, like in zip(moved, into, strict=True)]


class _Buffers:
    """New buffers each time that the text of a program names those of an op. The transfers need none."""

    def __init__(self, program: Program, mesh: Mesh):
        self._ops, self._mesh = program.pooled, mesh

    def __getitem__(self, number: int) -> list[torch.Tensor | None] | None:
        op = self._ops[number]
        if op.op in STARTS:
            return None
        return [
            None if place is None else torch.zeros(v.local_shape(self._mesh), dtype=v.dtype, device=self._mesh.device)
            for v, place in zip(op.out, op.into, strict=True)
        ]


class _Tree:
    """A tree of tensors as the text of a program reads it, given the tensors by path."""

    def __init__(self, leaves: Mapping[str, Any], path: str):
        self._leaves, self._path = leaves, path

    def __getitem__(self, key: Any) -> Any:
        return self._at(f"{self._path}[{key!r}]")

    def __getattr__(self, name: str) -> Any:
        return self._at(f"{self._path}.{name}")

    def _at(self, path: str) -> Any:
        return self._leaves[path] if path in self._leaves else _Tree(self._leaves, path)


class ProgramCode:
    """The ops and the subgraphs of a program as Python code. A subgraph is built when it is first called. Building one
    takes far longer than running it on small tensors, so all ranks and steps of a simulation share them.
    """

    def __init__(self, program: Program, device: torch.device):
        self.program, self._device = program, device
        texts = zip(program.walk(), statements(program, full=True), strict=True)
        self.ops: dict[int, CodeType] = {
            id(op): compile(text, f"<{op.op}>", "exec") for (op, _), text in texts if not op.body and op.op != "update"
        }
        self._built: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()  # ranks are threads, which may reach a subgraph at the same time

    def function(self, name: str) -> Callable[..., Any]:
        with self._lock:
            if name not in self._built:
                function = self.program.functions[name]
                run = by_operation(on_device(function.graph, self._device))

                def returned(*args: torch.Tensor) -> Tensors:
                    # A value never is the tensor of another value, which a later op may overwrite.
                    return [x.clone() if any(x is a for a in args) else x for x in run(*args) or ()]

                call = as_called(replace(function, into=()), returned)
                self._built[name] = lambda *args, into=None: call(*args)
            return self._built[name]


class Interpreter:
    """Runs the ops of one program on this rank. All ranks of the mesh run it together.

    Attributes:
        values: the current value of every name, on this rank. Tensors of the state are copies: nothing of a state is
            written.

    Args:
        code: a program, which may be a base program except for its `update`.
        mesh: the mesh that it is for.
        leaves: the tensors of the state and of the batch, by the names of the program's inputs.
        exchange: exchanges values between the ranks.
        speculates: whether speculative ops run. Otherwise the body of their `rollback` runs.
    """

    def __init__(
        self,
        code: ProgramCode,
        mesh: Mesh,
        leaves: Mapping[str, torch.Tensor],
        exchange: RankExchange,
        speculates: bool = False,
    ):
        self.program, self.mesh, self._code = code.program, mesh, code
        self.values: dict[str, Any] = {v.name: leaves[v.name].detach().clone() for v in code.program.inputs}
        transfers = PlainTransfers(mesh, exchange)
        self._attempt = Attempt(transfers, right=speculates)
        self._attempt.begin(speculates)
        environment = Environment(mesh, transfers, transfers, self._attempt)
        self._namespace = namespace_of(code.program, environment, _Buffers(code.program, mesh))
        self._namespace |= {root: _Tree(self.values, root) for root in ("params", "opt_state", "extras", "batch")}

    def run(self, op: Instruction, iteration: int = 0) -> None:
        """Runs one op, in the given iteration (`iteration`) of the enclosing loop."""
        named = {identifier(name): self.values[name] for name in op.args}
        if OPS[op.op].outlives:  # what a loop adds up begins as None
            named |= {identifier(v.name): self.values[v.name] if iteration else None for v in op.out}
        if op.fn:
            self._namespace[op.fn] = self._code.function(op.fn)
        exec(self._code.ops[id(op)], self._namespace, named := {**named, "micro": iteration})
        self.values.update((v.name, named[identifier(v.name)]) for v in op.out)

    def run_ops(self, ops: Sequence[Instruction], iteration: int = 0) -> None:
        """Runs ops in order, and the body of a loop as often as the program says."""
        for op in ops:
            if self._attempt.skips(op):
                continue
            if not op.body:
                self.run(op, iteration)
            # Without speculation the body of a `rollback` always runs.
            for inner in range(OPS[op.op].iterations_run(op, True)):
                self.run_ops(op.body, inner)
