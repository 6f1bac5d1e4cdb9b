"""Sends each rank's shard of the state to another host, which keeps it in memory. Acts on the program.

Each send starts at the beginning of the step, and is waited for before the first op that overwrites the sent values.
Tensors that are written by the same op are sent together. Those in separate device memory are copied to the host first,
and are sent after the first block has run. elastic/peer_replicas.py stores what a rank receives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fzero._utils.arguments import count, keywords
from fzero.comm.launcher_environment import Processes
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.aliases import Views
from fzero.ir.attributes import CopyAttrs, ReplicateAttrs
from fzero.ir.program import Instruction, Program, moving
from fzero.ir.value_names import Names
from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.layout import Leaf, in_slot
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied, find


@dataclass(frozen=True)
class Redundant(Transform):
    """The configuration of `redundant`."""

    axis: str = "data"
    every: int = 1
    order: ClassVar[int] = 70
    name: ClassVar[str] = "redundant"

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation changes no state"

    def sends(self, leaf: Leaf) -> bool:
        """Whether it sends a tensor: one of which the ranks along the axis hold different shards."""
        return (leaf.role in ("params", "mutable", "opt_state") or in_slot(leaf)) and self.axis in leaf.layout.axes

    def has_receivers(self, mesh: AbstractMesh) -> bool:
        """Whether there are other ranks along the axis. If not, nothing is sent."""
        return mesh.axes.get(self.axis, 1) > 1

    def shift(self, mesh: AbstractMesh) -> int:
        """Returns the distance along the axis from a rank to the one that it sends to.

        It is the smallest distance that leads to another host for every rank, or 1 if all ranks are on one host. An
        abstract mesh counts as one host.

        Args:
            mesh: a mesh with receivers.

        Returns:
            At least 1; 0 if no distance leads every rank to another host.
        """
        size, num = mesh.axes[self.axis], Processes.of().num_local if isinstance(mesh, Mesh) else mesh.size
        if num >= mesh.size:
            return 1
        return next((k for k in range(1, size) if _leaves_hosts(mesh, self.axis, k, num)), 0)

    def check(self, leaves: Sequence[Leaf], mesh: AbstractMesh) -> None:
        """Raises if the mesh, or these tensors of a state, do not allow it."""
        if mesh.size == 1:
            return
        if self.axis not in mesh.axes:
            fix = "name an axis over which tensors are sharded; or leave it out"
            raise FzeroValueError("redundant", "unknown mesh axis", [f"{self.axis!r}: the mesh has {mesh}"], fix)
        if not self.has_receivers(mesh):  # fz.run logs it
            return
        if not self.shift(mesh):
            num = Processes.of().num_local
            what = f"axis {self.axis!r} does not cross hosts"
            said = [f"the mesh has {mesh}, {num} consecutive ranks on each host"]
            fix = "shard tensors over an axis that crosses hosts too, and name that: fz.redundant(axis='node')"
            raise FzeroValueError("redundant", what, said, fix)
        sent = [leaf for leaf in leaves if self.sends(leaf)]
        if on_disk := [str(leaf) for leaf in sent if leaf.layout.tier == "disk"]:
            fix = "store them on the device or in host memory, or leave it out: fz.checkpoint.save has those on disk"
            raise FzeroValueError(
                "redundant", f"{len(on_disk)} tensors are stored on disk, and are not sent", on_disk[:5], fix
            )
        if not sent:
            what = (
                f"does nothing: no tensor is sharded over axis {self.axis!r}, every rank along it has all of the state"
            )
            fix = "leave it out, or shard: fz.shard_params, fz.shard_opt_state"
            raise FzeroValueError("redundant", what, [f"the mesh has {mesh}"], fix)


@keywords
def redundant(
    step: Any = None,
    *,
    axis: str = "data",
    every: int = 1,
) -> Any:
    """Sends each rank's shard of the state to another host in every step, so that the run continues from memory when a
    host is lost (`fz.run`).

    The result is bitwise equal to that of the step without it. The state at the start of a step is sent while the step
    computes: nothing overwrites it before the updates, which wait for the sends. On one host, it is sent to the next
    rank; otherwise as many ranks further along the axis as needed to reach another host, assuming that the ranks of a
    host are consecutive.

    `fz.run` keeps the received shards, in addition to those that each host keeps of its own ranks. In a script without
    `fz.run`, or with one rank along the axis, nothing is kept or sent.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis along which the state is sent, over which it is sharded. A tensor that is replicated along
            the axis is not sent: every rank has it.
        every: one of `every` steps sends. With `fz.run(every=k)` it must be a multiple of k, because `fz.run` keeps the
            rank's own state only for every k-th step.

    Communication: a rank's shards per step, 12P/N bytes with fp32 Adam and P parameters sharded over N ranks, in
        addition to the 12P(N-1)/N of ZeRO-3 itself; with `every=k`, on average a k-th of it. Parameters that are not
        trained are sent twice per run.
    Memory: in host memory, two copies of the received shards, and one more of the rank's own. If ranks share memory,
        another one in the arena from the start of the step to its updates; if the device has separate memory, one on
        the host, which is made in every step.

    Raises:
        FzeroTypeError: `axis` is not a name.
        FzeroValueError: `every` is below 1. When a state is made: the axis is missing from the mesh, or lies within one
            host; tensors on disk; nothing is sharded over the axis.
        TransformError: a different `redundant` of the same step; an evaluation.

    Paper: Wang et al., Gemini: fast failure recovery in distributed training with in-memory checkpoints, SOSP 2023.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> step = fz.redundant(fz.shard_params(step))
        >>> params, x = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> fz.lower(step, fz.AbstractMesh(data=2), params, x).plan.channels["replicate:data"].bytes
        24576
    """
    problems = [] if isinstance(axis, str) and axis else [f"axis={axis!r}: the name of one axis"]
    if problems:
        raise FzeroTypeError("redundant", "invalid arguments", problems, "e.g. fz.redundant(axis='data')")
    if problems := count("every", every):
        raise FzeroValueError("redundant", "invalid arguments", problems, "e.g. fz.redundant(every=10)")
    return applied(Redundant(axis, every), step)


def _leaves_hosts(mesh: AbstractMesh, axis: str, shift: int, num: int) -> bool:
    """Whether a send by this distance along an axis reaches another host from every rank, with `num` ranks per host."""
    names, size = list(mesh.axes), mesh.axes[axis]
    # The distance in ranks between neighbours along the axis: ranks are numbered in row-major order.
    stride = math.prod(mesh.axes[n] for n in names[names.index(axis) + 1 :])
    places = ((rank, rank // stride % size) for rank in range(mesh.size))
    return all(rank // num != (rank + ((at + shift) % size - at) * stride) // num for rank, at in places)


# --- the rewrite ---


def spec_of(program: Program) -> Redundant | None:
    """Returns the configuration of a program whose mesh has other ranks to send to."""
    spec = find(program.transforms, Redundant)
    return spec if spec is not None and spec.has_receivers(program.mesh) else None


def rewrite(program: Program) -> Program:
    """Returns the program with its sends.

    Precondition: all its other transfers are in their final positions.
    """
    spec = spec_of(program)
    assert spec is not None
    values, names = program.values(), Names(program.values())
    groups: dict[tuple[int, bool], list[str]] = {}
    writers, end = _writers(program), len(program.instructions)
    for name, leaf in program.leaves.items():
        if spec.sends(leaf):
            apart = values[name].tier == "device" and not program.mesh.unified_memory
            groups.setdefault((writers.get(name, end), apart), []).append(name)
    before: dict[int, list[Instruction]] = {}  # by the index of an op: the ops that come before it
    # after the first block has run, or the loop over all of them, if the step begins with it
    later = next(
        (i for i, x in enumerate(program.instructions[1:], 1) if x.block or x.body or program.instructions[0].body), end
    )
    on_the_way = f"{spec.name}, to the host"
    for number, ((writer, apart), leaves) in enumerate(groups.items()):
        sent, leaves_at = leaves, 0
        if apart:
            copied = moving(names(f"replicate_{number}_to_host"))
            copies = tuple(replace(values[n], name=names(f"{names.stem(n)}_sent"), tier="host") for n in leaves)
            to_host = CopyAttrs(source="device", target="host")
            start = Instruction("copy_start", tuple(leaves), (copied,), attrs=to_host, by=on_the_way)
            before.setdefault(0, []).append(start)
            sent, leaves_at = [v.name for v in copies], min(writer, later)
            before.setdefault(leaves_at, []).append(Instruction("wait", (copied.name,), copies, by=on_the_way))
        handle = moving(names(f"replicate_{number}"))
        attrs = ReplicateAttrs(
            axes=(spec.axis,),
            shift=spec.shift(program.mesh),
            every=spec.every,
            # A tensor that no op writes never changes.
            once=writer == end,
            leaves=tuple(leaves),
            number=number,
        )
        start = Instruction("replicate_start", tuple(sent), (handle,), attrs=attrs, by=spec.name)
        before.setdefault(leaves_at, []).append(start)
        before.setdefault(writer, []).append(Instruction("wait", (handle.name,), by=spec.name))
    ops = [x for i, op in enumerate(program.instructions) for x in (*before.get(i, ()), op)]
    return replace(program, instructions=(*ops, *before.get(end, ())))


def _writers(program: Program) -> dict[str, int]:
    """Returns, for each tensor of the state, the index of the first op that writes it, or a value in its memory."""
    views, found = Views(program), dict[str, int]()
    for number, op in enumerate(program.instructions):
        for x in op.with_body():
            for name in (root for written in x.writes for root in views.roots(written)):
                found.setdefault(name, number)
    return found
