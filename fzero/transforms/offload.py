"""Offloads state to host memory or disk, activations to host memory between forward and backward, and gradients to disk
until their update.

Acts on the table of parameters and on the program. This file has the configuration, and determines from it the memory
tier of every parameter; offload_pass.py inserts the ops that copy values to the device and back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from fzero._utils.arguments import accepts, keywords, predicate
from fzero.errors import FzeroValueError
from fzero.ir.program import Instruction
from fzero.sharding.layout import Leaf
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Where

TIERS = {"cpu": "host", "nvme": "disk"}
"""The tiers that a user can name, and their names in a layout. "auto" leaves the tier open."""

ROLES = ("opt_state", "params", "activations", "gradients")
SIDES = ("auto", "host", "device")
Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Offload(Transform):
    """The configuration of `offload`."""

    tier: str = "cpu"
    of: tuple[str, ...] = ("opt_state",)
    path: tuple[str, ...] = ()
    fraction: float = 1.0
    where: Where | None = None
    update_on: str = "auto"
    within: str = ""  # the directory that relative paths start from: the working directory when they were given
    order: ClassVar[int] = 60
    name: ClassVar[str] = "offload"

    def conflict(self, other: Transform) -> str | None:
        """Two configurations are compatible if no role is in both."""
        if not isinstance(other, Offload):
            return None
        if self.tier == other.tier == "auto":
            return "tiers are chosen for all roles at once: name the roles in one call"
        if both := [role for role in ROLES if role in self.of and role in other.of]:
            return f"{', '.join(both)}: one tensor sent to two tiers"
        return (
            "the files of a state are in one directory: give both the same path"
            if self.path and other.path and self.path != other.path
            else None
        )

    def idle(self, step: EvalStep) -> str | None:
        # masters are stored with the optimizer state
        masters = any(t.name == "mixed_precision" for t in step.transforms)
        return (
            None
            if "params" in self.of or masters
            else "it has no optimizer state, and keeps no activations for a backward"
        )

    def takes(self, leaf: Leaf) -> bool:
        return accepts(self.name, "where", self.where, leaf.path, leaf.meta)

    def placed(self, op: Instruction) -> bool:
        """Copies from and to disk belong to the configuration of the disk tier; other copies, which may be part of such
        a transfer, to that of the host tier."""
        return (self.tier == "nvme") == ("disk" in op.tiers)

    def in_program(self) -> str:
        """The text without the names of directories, which can differ between machines; their number is part of the
        program."""
        text = str(replace(self, path=("...",) * len(self.path)))
        return text.replace("'...'", "...")

    def __str__(self) -> str:
        """The tier, the roles, and the arguments that differ from their defaults."""
        shown = [f"{self.tier!r}", repr(self.of) if len(self.of) > 1 else repr(*self.of)]
        for f in fields(self)[2:]:
            if (value := getattr(self, f.name)) != f.default and f.name != "within":
                value = value[0] if f.name == "path" and len(value) == 1 else value
                shown.append(f"{f.name}={getattr(value, '__name__', None) or repr(value)}")
        return f"{self.name}({', '.join(shown)})"


@keywords
def offload(
    step: Any = None,
    tier: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    *,
    path: Path | Sequence[Path] | None = None,
    fraction: float = 1.0,
    where: Where | None = None,
    update_on: str = "auto",
) -> Any:
    """Keeps optimizer state, parameters, activations or gradients in host memory ("cpu") or on disk ("nvme") and copies
    them to where they are needed.

    `offload("auto")` leaves open which of them are stored on which tier, and what share of each: `compile` and `lower`
    choose the placement with the shortest predicted step time that fits `memory_budget`, `host_budget` and
    `disk_budget`, for a given batch. The resulting step has ordinary offloads, which one could have written by hand.

    The result is bitwise equal to that of the same step without it, provided that the update runs with the same
    arithmetic: no stale values are used. Combines with every sharding: each rank keeps its own shards. Two offloads may
    be applied if their roles differ: parameters in host memory, optimizer state on disk.

    Args:
        step: a training or evaluation step, or the tier when called without one: `offload("cpu", "opt_state")`. An
            evaluation has no optimizer state and keeps no activations, so these roles do not apply to it.
        tier: "cpu", "nvme" or "auto"; by default "cpu".
        of: "opt_state" (the default), "params", "activations", "gradients", or several of them; with "auto", the roles
            that may be moved, by default all. With `mixed_precision`, the masters, which are only read to be cast, are
            stored with the optimizer state unless "params" is given separately. "params" without "opt_state" leaves the
            optimizer state on the device. "gradients" are those that are held until their update, because it needs the
            norm of all gradients or the other micro-batches; this role is for disks only: in host memory, gradients are
            held whenever the plan finds that better.
        path: for "nvme", a directory, or several over which the tensors are striped; a relative path is resolved when
            `offload` is called. Each rank may have its own directories (`$SLURM_TMPDIR`, `tempfile.mkdtemp()`), but all
            ranks must have the same number of them. The files are scratch data of this run, never a checkpoint. "auto"
            uses a disk if a path is given.
        fraction: the share of the tensors, by bytes, that is offloaded, in (0, 1]; they are spread evenly over the
            model.
        where: predicate `(path, leaf)` that selects the parameters it applies to; by default all. `leaf` is a meta
            tensor.
        update_on: "host" runs the optimizer on the host, "device" copies the state to the device. With "auto", the plan
            chooses the fastest by prediction: the host updates all blocks, none, or some of them while the state of the
            others is streamed through the device.

    Communication: none between ranks. Per rank and step, over the link between host and device, for P parameters with
        Adam state on the host: an update on the host sends 4P bytes of gradients to the host (2P if they are reduced in
        bf16) and, with mixed precision, 2P of compute parameters to the device. In fp32 with parameters on the device,
        the parameters are sent too, 4P in each direction. It moves 28P through host memory. An update on the device
        moves 8P in each direction, 12P with masters. Offloaded parameters are copied to the device once for the forward
        and once for the vjp, 4P each (2P in bf16), per micro-batch. State on disk is read and written once, 8P bytes in
        each direction, 12P with masters or parameters, and gradients on disk, 4P (2P); what the vjp has read is not
        read again. A step that clips gradients may move state on disk twice, and within a host budget 24P more through
        host memory (docs/transforms/offload.md).
    Memory: offloaded tensors are not stored on the device: 12P bytes less with fp32 Adam if everything is offloaded;
        during the step, there are buffers for the blocks that are being processed. Tensors on disk take no host memory
        between steps either; with clipping by the global norm, they take twice their bytes on disk. On a mesh whose
        device is the CPU, host and device share one memory: "cpu" saves nothing.

    Raises:
        FzeroValueError: an unknown tier, role or `update_on`; "nvme" without a path, or a path with "cpu"; a tier that
            cannot hold a role (activations on disk, gradients in host memory); a fraction outside (0, 1]. From `init`
            and `restore`: a path that is missing, not writable or has too little space, with the numbers.
        TransformError: two offloads for one role; an offload that does not include parameters, given to an evaluation
            without masters; when the program is built, gradients on disk that a loop over micro-batches accumulates.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.adamw(3e-4))
        >>> [str(t) for t in fz.offload("nvme", ("opt_state", "params"), path="/scratch")(step).transforms]
        ["offload('nvme', ('opt_state', 'params'), path='/scratch')"]

    Papers: Ren et al., ZeRO-Offload: democratizing billion-scale model training, USENIX ATC 2021; Rajbhandari et al.,
        ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning, SC 2021.
    """
    problems: list[str] = []
    if isinstance(step, str):
        if tier is not None and of is not None:
            problems.append(f"{step!r}, {tier!r}, {of!r}: one tier and the roles")
        step, tier, of = None, step, tier if tier is not None else of
    tier = "cpu" if tier is None else tier
    of = (ROLES if tier == "auto" else "opt_state") if of is None else of
    roles = (of,) if isinstance(of, str) else tuple(of) if isinstance(of, (list, tuple)) else (of,)
    paths: tuple[Any, ...] = () if path is None else tuple(path) if isinstance(path, (list, tuple)) else (path,)
    problems += _path_problems(tier, path, paths)
    problems += _roles_problems(tier, of, roles)
    problems += _share_problems(tier, fraction)
    problems += predicate("where", where)
    if update_on not in SIDES:
        problems.append(f"update_on={update_on!r}: not one of {', '.join(map(repr, SIDES))}")
    elif update_on != "auto" and "opt_state" not in roles:
        problems.append(
            f"update_on={update_on!r}: the update runs where the optimizer's "
            "state is stored, which is not offloaded here"
        )
    if problems:
        fix = "e.g. fz.offload('cpu', 'opt_state'), or fz.offload('nvme', ('opt_state', 'params'), path='/scratch')"
        raise FzeroValueError("offload", "invalid arguments", problems, fix)
    ordered = tuple(role for role in ROLES if role in roles)
    # A script may change its working directory before the files are made.
    directory = os.getcwd() if paths else ""
    files = tuple(os.fspath(p) for p in paths)
    return applied(Offload(str(tier), ordered, files, float(fraction), where, update_on, directory), step)


def _roles_problems(tier: Any, of: Any, roles: Sequence[Any]) -> list[str]:
    """What is wrong with a tier and the roles that are to be stored on it."""
    problems = []
    if not isinstance(tier, str) or tier not in (*TIERS, "auto"):
        problems.append(f"tier={tier!r}: not one of {', '.join(map(repr, (*TIERS, 'auto')))}")
    if odd := [role for role in roles if role not in ROLES]:
        problems.append(f"of={of!r}: {', '.join(map(repr, odd))} not among {', '.join(map(repr, ROLES))}")
    if not roles:
        problems.append("of=(): nothing to offload")
    if tier == "nvme" and "activations" in roles:
        problems.append(
            "of='activations': activations exist only within a step and cannot be on this tier: send them to 'cpu'"
        )
    if tier == "cpu" and "gradients" in roles:
        problems.append(
            "of='gradients': gradients wait in host memory automatically, if the plan has space: send them to 'nvme'"
        )
    return problems


def _path_problems(tier: Any, path: Any, paths: Sequence[Any]) -> list[str]:
    problems = []
    if tier == "nvme" and not paths:
        problems.append("path: 'nvme' needs a directory")
    if tier == "cpu" and path is not None:
        problems.append(f"path={path!r}: 'cpu' is memory, it has none")
    if wrong := [p for p in paths if not isinstance(p, (str, os.PathLike)) or not os.fspath(p)]:
        problems.append(f"path={path!r}: {', '.join(map(repr, wrong))} is not a directory's name")
    return problems


def _share_problems(tier: Any, fraction: Any) -> list[str]:
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        return [f"fraction={fraction!r}: a share is more than 0 and at most 1"]
    return [f"fraction={fraction!r}: 'auto' chooses it"] if tier == "auto" and fraction != 1 else []


class LeafTiers(NamedTuple):
    """The tiers of a parameter: its own, that of its optimizer state, that of its compute copy (if it is a master), and
    that of its gradient while it is held, unless the plan chooses it. Each is one of `layout.TIERS`."""

    param: str
    opt_state: str
    copy: str
    gradient: str


def tiers_of(
    records: Sequence[Offload],
    params: Sequence[Leaf],
    ties: Sequence[int] | None = None,
    casts: Callable[[Leaf], bool] = lambda leaf: False,
) -> list[LeafTiers]:
    """Returns, for each parameter, the tier that stores it, and the tiers of the tensors that belong to it.

    If there are two configurations for one role, which only "auto" produces, the second takes its fraction of what the
    first one leaves.

    Args:
        records: the `offload` configurations of a step.
        params: its parameters, in order.
        ties: for each parameter, the index of the first one that is the same tensor, whose tiers it gets; by default no
            parameters are tied.
        casts: whether a parameter is a master: computed in another dtype than it is stored in. Masters are stored with
            their optimizer state.
    """
    ties = list(range(len(params))) if ties is None else ties
    distinct = [i for i, t in enumerate(ties) if i == t]
    by_role: dict[str, dict[int, str]] = {"params": {}, "opt_state": {}, "gradients": {}}
    for record in records:
        for role in (role for role in record.of if role in by_role):
            # an integer has no optimizer state, and no gradient
            held = [i for i in distinct if role == "params" or params[i].dtype.is_floating_point]
            held = [i for i in held if i not in by_role[role] and params[i].role != "mutable"]
            by_role[role].update(dict.fromkeys(_share(record, params, held), TIERS[record.tier]))
    out = []
    for t in ties:
        state = by_role["opt_state"].get(t, "device")
        param = by_role["params"].get(t, "device")
        gradient = by_role["gradients"].get(t, "device")
        # A master is read only by the update, like the optimizer state, so it is stored with that. The parameter's own
        # tier is then the tier of its compute copy.
        out.append(LeafTiers(state if param == "device" and casts(params[t]) else param, state, param, gradient))
    return out


def paths_of(records: Sequence[Offload]) -> tuple[str, ...]:
    """The directories that store the tensors on disk; empty if nothing is on disk."""
    return next((tuple(os.path.join(record.within, p) for p in record.path) for record in records if record.path), ())


def _share(record: Offload, params: Sequence[Leaf], indices: Sequence[int]) -> list[int]:
    """Returns the indices of the parameters that are offloaded: a share of their bytes."""
    meant = [i for i in indices if record.takes(params[i])]
    chosen = spread_out([params[i].numel * params[i].dtype.itemsize for i in meant], record.fraction)
    return [i for i, off in zip(meant, chosen, strict=True) if off]


def spread_out(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Selects, from items in order, a given fraction of the sum of their sizes.

    Each item is selected if this brings the selected share of the items so far closest to the fraction.

    Example:
        >>> spread_out([4, 4, 4, 4], 0.5)
        [True, False, True, False]
    """
    out, seen, taken = [], 0, 0
    for n in sizes:
        seen += n
        # For n > 0, this is |taken + n - fraction * seen| <= |taken - fraction * seen|.
        out.append(2 * taken + n <= 2 * fraction * seen)
        taken += n * out[-1]
    return out
