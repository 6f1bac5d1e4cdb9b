"""Executes a program: its source, compiled once, over the functions and transfers it names.

What runs is the flat text of the program (`print(program)` shows it folded). Tracebacks show its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fzero._utils.host_memory import host_pool
from fzero.comm import agreement
from fzero.comm.transport import transport
from fzero.ir.ops import COPIES, DISK, OPS, Attempt, batch_axes_of, from_to, sends_of
from fzero.ir.printer import name_of, source
from fzero.ir.program import Function, Program
from fzero.memory.tier_copies import TierCopy, TierTransport
from fzero.mesh import Mesh
from fzero.runtime.build.tracebacks import compiled
from fzero.runtime.cuda_graphs import Replayed, graphs_of, obstacles
from fzero.runtime.error_translation import indices_explained
from fzero.runtime.program_buffers import places_of
from fzero.sharding.layout import Layout, Leaf
from fzero.sharding.shard_regions import Boxes, Dim


def executable(
    program: Program,
    functions: Mapping[str, Callable[..., Any]],
    mesh: Mesh,
    graphs: bool | None = False,
    pairs: Iterable[tuple[str, int, int]] = (),
) -> Callable[..., tuple[Any, ...]]:
    """The program as a Python function of the trees it names. All ranks of the mesh make it together. `graphs`: whether
    its runs are captured and replayed, where it can be; None: if a capture does not fail. `pairs`: as of `handed`."""
    text = source(program)
    batch_axes = batch_axes_of(program)
    carrier = transport(mesh)
    carrier.connect_pairs(pairs)
    tiers = TierTransport(mesh, any(line.op in COPIES and DISK in from_to(line) for line, _ in program.walk()))
    arenas = {"device": carrier.pool(program.pool_bytes, f"{name_of(program)} {program.name}")}
    if program.host_pool_bytes:
        arenas["host"] = host_pool(program.host_pool_bytes, mesh)
    memory, places = arenas["device"], places_of(program, mesh, arenas)
    running = _Running(mesh, carrier, tiers, batch_axes)
    # where a CPU stands for both, one function may be called on either side
    same = mesh.device.type == "cpu" and mesh.unified_memory
    on_host = set() if same else {line.fn for line, _ in program.walk() if line.on_host}
    namespace: dict[str, Any] = {
        **{
            name: _on_host(f, program.functions[name], tiers) if name in on_host else f for name, f in functions.items()
        },
        **{name: named for row in OPS.values() for name, named in row.names(running).items()},
        "pool": places,
        "apart": places,
        "wards": sends_of(program),
    }
    run = compiled(text, f"program {program.name}", namespace, name_of(program))

    on = graphs_of(mesh) if graphs is not False and not obstacles(program) else None
    replayed = None if on is None else Replayed(run, namespace, mesh, on, required=graphs is True)
    called = run if replayed is None else replayed
    owner = "step" if name_of(program) == "train" else "eval_step"

    def whole_run(*trees: Any, aside: bool = False) -> tuple[Any, ...]:
        if replayed is not None:
            replayed.prepare(*trees)
        with agreement.unbroken(mesh), indices_explained(owner, trees[-1]):
            carrier.begin(memory)
            tiers.begin()
            running.attempt.begin(aside)
            try:
                outputs = called(*trees)
            except BaseException:
                if mesh.size == 1:  # else it is the last call on this mesh
                    tiers.abandon()
                raise
            failed = tiers.end()
        if failed is not None:  # on every rank, each at the end of its run
            raise failed
        # the pool is written again by the next run
        return tuple(x.clone() if _within(x, memory) else x for x in outputs)

    whole_run.namespace = namespace  # type: ignore[attr-defined]  # whose functions op_hooks.py acts around
    whole_run.skips = running.attempt.skips  # type: ignore[attr-defined]  # lines that the step which runs leaves out
    whole_run.replayed = replayed  # type: ignore[attr-defined]  # a GPU's, if its runs can be captured
    return whole_run


def _on_host(run: Callable[..., Any], function: Function, tiers: TierTransport) -> Callable[..., Any]:
    """A function that the host runs, when nothing that it writes is on its way to the device."""
    return tiers.settled(run, lambda *args: (*(args[i] for i in function.writes), *args[-1]))


class _Running:
    """The surroundings that ops of a program run in."""

    def __init__(self, mesh: Mesh, carrier: Any, tiers: TierTransport, batch_axes: tuple[str, ...]):
        self.mesh, self.carrier, self.tiers, self.batch_axes = mesh, carrier, tiers, batch_axes
        self.attempt = Attempt(tiers)
        self._parts: dict[Any, tuple[Boxes, int]] = {}

    def part_of(
        self, shape: tuple[int, ...], axis: str | tuple[str, ...], dims: tuple[Dim, ...] = ()
    ) -> tuple[Boxes, int]:
        """This rank's part of a leaf, and its number of elements with padding."""
        key = shape, axis, dims
        if key not in self._parts:
            layout = Layout(torch.float32, (axis,) if isinstance(axis, str) else axis, dims=dims)
            leaf = Leaf("", "", shape, layout)
            self._parts[key] = leaf.boxes(self.mesh), leaf.shard_numel(self.mesh)
        return self._parts[key]

    def send(
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
        """Leaves to another rank, `into` where that keeps leaves of these paths: nothing, if nobody keeps them, or does
        not want them now."""
        wards = self.mesh.context.wards
        if wards is None or (places := wards.places(into, every, once)) is None:
            return TierCopy(lambda: None, ())
        moving = self.carrier.send_start(values, axis, shift, places, through)
        return TierCopy(lambda: self.carrier.wait(moving, ()), ())

    def wait(
        self, moving: Any, into: Sequence[torch.Tensor] = (), together: bool = False, host: bool = True
    ) -> Sequence[torch.Tensor]:
        """The results of a transfer of any kind."""
        return moving.wait(into, host) if isinstance(moving, TierCopy) else self.carrier.wait(moving, into, together)


def _within(x: torch.Tensor, memory: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
