"""Sends each rank's part of the state to another host, whose memory keeps it. Acts on the program, in
transforms/redundant_pass.py; what comes is kept by elastic/peer_replicas.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fzero._utils.arguments import count, keywords
from fzero.comm.launcher_environment import Processes
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.layout import Leaf, in_slot
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied


@dataclass(frozen=True)
class Redundant(Transform):
    axis: str = "data"
    every: int = 1
    order: ClassVar[int] = 70
    name: ClassVar[str] = "redundant"

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation changes no state"

    def sends(self, leaf: Leaf) -> bool:
        """Whether it sends a leaf: one of which the ranks along the axis hold different parts."""
        return (leaf.role in ("params", "mutable", "opt_state") or in_slot(leaf)) and self.axis in leaf.layout.axes

    def has_receivers(self, mesh: AbstractMesh) -> bool:
        """Whether there are other ranks along the axis. Without them nothing is sent."""
        return mesh.axes.get(self.axis, 1) > 1

    def shift(self, mesh: AbstractMesh) -> int:
        """The distance along the axis to the rank that a rank sends to: the nearest that is on another host for every
        rank, or the next if all ranks are on one host. An abstract mesh counts as one host.

        Args:
            mesh: a mesh with receivers.

        Returns:
            At least 1; 0 if no distance leaves the host of every rank.
        """
        size, num = mesh.axes[self.axis], Processes.of().num_local if isinstance(mesh, Mesh) else mesh.size
        if num >= mesh.size:
            return 1
        return next((k for k in range(1, size) if _leaves_hosts(mesh, self.axis, k, num)), 0)

    def check(self, leaves: Sequence[Leaf], mesh: AbstractMesh) -> None:
        """Raises what this mesh, or these leaves of a state, do not allow."""
        if mesh.size == 1:
            return
        if self.axis not in mesh.axes:
            fix = "name an axis over which leaves are sharded; or leave it out"
            raise FzeroValueError("redundant", "unknown mesh axis", [f"{self.axis!r}: the mesh has {mesh}"], fix)
        if not self.has_receivers(mesh):  # fz.run logs it
            return
        if not self.shift(mesh):
            num = Processes.of().num_local
            what = f"axis {self.axis!r} does not leave a host"
            said = [f"the mesh has {mesh}, {num} ranks on each host, one behind the other"]
            fix = "shard leaves over an axis that crosses hosts too, and name that: fz.redundant(axis='node')"
            raise FzeroValueError("redundant", what, said, fix)
        sent = [leaf for leaf in leaves if self.sends(leaf)]
        if on_disk := [str(leaf) for leaf in sent if leaf.layout.tier == "disk"]:
            fix = "let them rest on the device or in host memory, or leave it out: fz.checkpoint.save has those on disk"
            raise FzeroValueError(
                "redundant", f"{len(on_disk)} leaves rest on disk, and are not sent", on_disk[:5], fix
            )
        if not sent:
            what = f"does nothing: no leaf is sharded over axis {self.axis!r}, every rank along it has all of the state"
            fix = "leave it out, or shard: fz.shard_params, fz.shard_opt_state"
            raise FzeroValueError("redundant", what, [f"the mesh has {mesh}"], fix)


@keywords
def redundant(
    step: Any = None,
    *,
    axis: str = "data",
    every: int = 1,
) -> Any:
    """Sends each rank's part of the state, every step, to another host, so that the run goes on from memory when a host
    is lost (`fz.run`).

    Equal to the step without it, to the bit. The state that a step starts from is sent while it computes: nothing
    writes it before the updates, which wait for it. On one host it is sent to the next rank, otherwise so many ranks
    further along the axis that it is on another host: ranks of a host follow each other.

    What comes is kept by `fz.run`, beside what each host keeps of its own ranks. In a script without `fz.run`, or with
    one rank along the axis, nobody keeps it and nothing is sent.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis along which it is sent, over which leaves are sharded. A leaf that is whole along it is not
            sent: every rank has it.
        every: of so many steps one sends: 1, or what makes the numbers of steps that `fz.run(every=)` keeps.

    Communication: a rank's shards a step, 12P/N bytes with fp32 Adam and P parameters sharded over N ranks, beside the
        12P(N-1)/N of ZeRO-3 itself; every k steps a k-th of it. Parameters that are not trained are sent twice a run.
    Memory: in host memory two copies of the shards that come, and one more of its own. Where ranks share memory another
        in the pool from the start of the step to its updates; where the device has memory of its own, one on the host,
        which is made in every step.

    Raises:
        FzeroTypeError: an `axis` that is not a name.
        FzeroValueError: `every` below 1. When a state is made: an axis missing from the mesh, or within one
            host; leaves on disk; no leaf sharded over the axis.
        TransformError: a second, different `redundant`; an evaluation.

    Paper: Wang et al., Gemini: fast failure recovery in distributed training with in-memory checkpoints, SOSP 2023.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> step = fz.redundant(fz.shard_params(step))
        >>> params, x = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> fz.lower(step, fz.AbstractMesh(data=2), params, x).plan.channels["send:data"].bytes
        24576
    """
    problems = [] if isinstance(axis, str) and axis else [f"axis={axis!r}: the name of one axis"]
    if problems:
        raise FzeroTypeError("redundant", "invalid arguments", problems, "e.g. fz.redundant(axis='data')")
    if problems := count("every", every):
        raise FzeroValueError("redundant", "invalid arguments", problems, "e.g. fz.redundant(every=10)")
    return applied(Redundant(axis, every), step)


def _leaves_hosts(mesh: AbstractMesh, axis: str, shift: int, num: int) -> bool:
    """Whether all that is sent so far along an axis goes to another host, of which each has so many ranks."""
    names, size = list(mesh.axes), mesh.axes[axis]
    stride = math.prod(mesh.axes[n] for n in names[names.index(axis) + 1 :])
    places = ((rank, rank // stride % size) for rank in range(mesh.size))
    return all(rank // num != (rank + ((at + shift) % size - at) * stride) // num for rank, at in places)
