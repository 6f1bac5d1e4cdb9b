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


def executable(
    program: Program,
    functions: Mapping[str, Callable[..., Any]],
    mesh: Mesh,
    graphs: bool | None = False,
    pairs: Iterable[tuple[str, int, int]] = (),
) -> Callable[..., tuple[Any, ...]]:
    """Makes a Python function of the trees that a program names. All ranks of the mesh call this together.

    Args:
        graphs: whether runs are captured and replayed, if the program allows it; None: captured, unless a capture
            fails.
        pairs: the pairs of stages that send and receive, as `message_directions` returns them.
    """
    text = source(program)
    carrier = transport(mesh)
    carrier.connect_pairs(pairs)
    tiers = TierTransport(mesh, any(DISK in op.tiers for op, _ in program.walk()))
    # A collective call: with shared memory, every rank maps the pools of the others here, and all ranks must do so in
    # the same order.
    arenas = {"device": carrier.pool(program.pool_bytes, f"{name_of(program)} {program.name}")}
    if program.host_pool_bytes:
        arenas["host"] = host_pool(program.host_pool_bytes, mesh)
    memory, places = arenas["device"], places_of(program, mesh, arenas)
    running = Environment(mesh, carrier, tiers, Attempt(tiers))
    # on a CPU that is both host and device, the same function may be called by ops of either
    same = mesh.device.type == "cpu" and mesh.unified_memory
    on_host = set() if same else {op.fn for op, _ in program.walk() if op.on_host}
    namespace = {
        name: _on_host(f, program.functions[name], tiers) if name in on_host else f for name, f in functions.items()
    } | namespace_of(program, running, places)
    # The functions are looked up in `namespace` at every call, not bound here. Timers, recorders and `observe` rely on
    # that: they replace entries.
    run = compiled(text, f"program {program.name}", namespace, name_of(program))

    on = graphs_of(mesh) if graphs is not False and not obstacles(program) else None
    replayed = None if on is None else Replayed(run, namespace, mesh, on, required=graphs is True)
    called = run if replayed is None else replayed
    owner = "step" if name_of(program) == "train" else "eval_step"

    def whole_run(*trees: Any, aside: bool = False) -> tuple[Any, ...]:
        # Outside of `unbroken`: a capture that fails has executed nothing, and the mesh can still be used.
        if replayed is not None:
            replayed.prepare(*trees)
        # If the body raises, `unbroken` marks the mesh, so that the other ranks get an error at their next call instead
        # of waiting for a collective that never comes.
        with control_group.unbroken(mesh), indices_explained(owner, trees[-1]):
            carrier.begin(memory)
            tiers.begin()
            running.attempt.begin(aside)
            try:
                outputs = called(*trees)
            except BaseException:
                if mesh.size == 1:  # with several ranks this is the last call on the mesh
                    tiers.abandon()
                raise
            failed = tiers.end()
        if failed is not None:  # on every rank, at the end of its run
            raise failed
        # copy outputs that are in the pool, which the next run overwrites
        return tuple(x.clone() if _within(x, memory) else x for x in outputs)

    whole_run.namespace = namespace  # type: ignore[attr-defined]  # op_hooks.py wraps its functions
    whole_run.skips = running.attempt.skips  # type: ignore[attr-defined]  # ops that this step skips
    whole_run.replayed = replayed  # type: ignore[attr-defined]  # on a GPU, if its runs can be captured
    return whole_run


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
