"""Executes a program: its source is compiled once, in a namespace of the functions and transfers that it names.

The executed code is what `fz.show(program, full=True)` prints. Tracebacks show its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fzero._utils.host_memory import host_pool
from fzero.comm import control_group
from fzero.comm.transport import transport
from fzero.ir.ops import DISK, OPS, Attempt, replicated_leaves
from fzero.ir.ops.op import Running
from fzero.ir.printer import name_of, source
from fzero.ir.program import Function, Program
from fzero.memory.tier_copies import TierCopy, TierTransport
from fzero.mesh import Mesh
from fzero.runtime.build.tracebacks import compiled
from fzero.runtime.cuda_graphs import Replayed, graphs_of, obstacles
from fzero.runtime.error_translation import indices_explained
from fzero.runtime.program_buffers import places_of
from fzero.sharding.layout import Layout, Leaf
from fzero.sharding.placements import Shard
from fzero.sharding.shard_regions import Boxes


class Executable:
    """A program as a function of the trees that it names. All ranks of the mesh make it together.

    Args:
        program: the program.
        functions: its subgraphs.
        mesh: the mesh it runs on.
        graphs: whether runs are captured and replayed, if the program allows it; None: captured, unless a capture
            fails.
        pairs: the pairs of stages that send and receive, as `message_directions` returns them.

    Attributes:
        namespace: what the names in the program's text stand for. It is read at every call: timers, recorders and
            `use` replace entries.
        skips: whether the current run skips an op.
        replayed: on a GPU, the captured runs.
    """

    def __init__(
        self,
        program: Program,
        functions: Mapping[str, Callable[..., Any]],
        mesh: Mesh,
        graphs: bool | None = False,
        pairs: Iterable[tuple[str, int, int]] = (),
    ):
        self._program, self._mesh = program, mesh
        self._carrier = transport(mesh)
        self._carrier.connect_pairs(pairs)
        self._tiers = TierTransport(mesh, any(DISK in op.tiers for op, _ in program.walk()))
        # A collective call: with shared memory, every rank maps the pools of the others here, and all ranks must do so
        # in the same order.
        arenas = {"device": self._carrier.pool(program.pool_bytes, f"{name_of(program)} {program.name}")}
        if program.host_pool_bytes:
            arenas["host"] = host_pool(program.host_pool_bytes, mesh)
        self._memory, places = arenas["device"], places_of(program, mesh, arenas)
        self._attempt = Attempt(self._tiers)
        self.skips = self._attempt.skips
        running = Environment(mesh, self._carrier, self._tiers, self._attempt)
        self.namespace: dict[str, Any] = {}
        self.use(functions)
        self.namespace |= namespace_of(program, running, places)
        run = compiled(source(program), f"program {program.name}", self.namespace, name_of(program))
        on = graphs_of(mesh) if graphs is not False and not obstacles(program) else None
        self.replayed = None if on is None else Replayed(run, self.namespace, mesh, on, required=graphs is True)
        self._run = run if self.replayed is None else self.replayed
        self._owner = "step" if name_of(program) == "train" else "eval_step"

    def use(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Makes the program call these subgraphs from its next run on."""
        # on a CPU that is both host and device, the same function may be called by ops of either
        same = self._mesh.device.type == "cpu" and self._mesh.unified_memory
        on_host = set() if same else {op.fn for op, _ in self._program.walk() if op.on_host}
        for name, f in functions.items():
            here = name in on_host
            self.namespace[name] = _on_host(f, self._program.functions[name], self._tiers) if here else f

    def __call__(self, *trees: Any, aside: bool = False) -> tuple[Any, ...]:
        # Outside of `unbroken`: a capture that fails has executed nothing, and the mesh can still be used.
        if self.replayed is not None:
            self.replayed.prepare(*trees)
        # If the body raises, `unbroken` marks the mesh, so that the other ranks get an error at their next call instead
        # of waiting for a collective that never comes.
        with control_group.unbroken(self._mesh), indices_explained(self._owner, trees[-1]):
            self._carrier.begin(self._memory)
            self._tiers.begin()
            self._attempt.begin(aside)
            try:
                outputs = self._run(*trees)
            except BaseException:
                if self._mesh.size == 1:  # with several ranks this is the last call on the mesh
                    self._tiers.abandon()
                raise
            failed = self._tiers.end()
        if failed is not None:  # on every rank, at the end of its run
            raise failed
        # copy outputs that are in the pool, which the next run overwrites
        return tuple(x.clone() if _within(x, self._memory) else x for x in outputs)


def namespace_of(program: Program, running: Running, places: Any) -> dict[str, Any]:
    """Returns what the names in the text of a program stand for, except its subgraphs. `places`: the buffers of each op
    in `Program.pooled`.
    """
    named = {name: named for row in OPS.values() for name, named in row.names(running).items()}
    return {**named, "pool": places, "apart": places, "replicas": replicated_leaves(program)}


def _on_host(run: Callable[..., Any], function: Function, tiers: TierTransport) -> Callable[..., Any]:
    """Wraps a function that the host runs, so that it first waits until no copy to the device reads the memory it
    writes."""
    return tiers.settled(run, lambda *args: (*(args[i] for i in function.writes), *args[-1]))


class Environment:
    """The environment in which the ops of a program run.

    Args:
        mesh: the mesh, as this rank sees it.
        carrier: moves values between ranks (comm/transport.py).
        tiers: copies values between memory tiers (memory/tier_copies.py).
        attempt: decides whether speculative ops run.
    """

    def __init__(self, mesh: Mesh, carrier: Any, tiers: Any, attempt: Attempt):
        self.mesh, self.carrier, self.tiers, self.attempt = mesh, carrier, tiers, attempt
        self._parts: dict[Any, tuple[Boxes, int]] = {}

    def part_of(
        self, shape: tuple[int, ...], axis: str | tuple[str, ...], dims: tuple[Shard, ...] = ()
    ) -> tuple[Boxes, int]:
        """Returns this rank's shard of a tensor, and its number of elements including padding."""
        key = shape, axis, dims
        # Ops ask for the same few shapes in every step, and the boxes of a layout take longer to compute than a small
        # op to run.
        if key not in self._parts:
            layout = Layout(torch.float32, (axis,) if isinstance(axis, str) else axis, dims=dims)
            leaf = Leaf("", "", shape, layout)
            self._parts[key] = leaf.boxes(self.mesh), leaf.shard_numel(self.mesh)
        return self._parts[key]

    def replicate(
        self,
        values: Sequence[torch.Tensor],
        *,
        axis: str,
        shift: int,
        into: Sequence[str],
        every: int = 1,
        once: bool = False,
        through: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Sends tensors to another rank, which stores them for the leaves with the paths `into`. Sends nothing if no
        rank stores them, or if they are not due now."""
        peer_replicas = self.mesh.context.peer_replicas
        if peer_replicas is None or (places := peer_replicas.places(into, every, once)) is None:
            return TierCopy(lambda: None, ())
        moving = self.carrier.replicate_start(values, axis, shift, places, through)
        return TierCopy(lambda: self.carrier.wait(moving, ()), ())

    def wait(
        self, moving: Any, into: Sequence[torch.Tensor] = (), together: bool = False, host: bool = True
    ) -> Sequence[torch.Tensor]:
        """Waits for a transfer of any kind and returns its results."""
        return moving.wait(into, host) if isinstance(moving, TierCopy) else self.carrier.wait(moving, into, together)


def _within(x: torch.Tensor, memory: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
