"""Offloads state to host memory or disk, activations to host memory between forward and backward, and gradients to disk
until their update.

The file has the configuration; the tier of every parameter, which the table of parameters contains; the values of a
program that are kept off the device; and two rewrites of programs. `add_copies` gives each offloaded master a copy in
the compute dtype. `rewrite` inserts the ops that copy values to the device and back.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero._utils.arguments import accepts, keywords, predicate
from fzero.errors import FzeroValueError
from fzero.ir.attributes import BufferAttrs, CopyAttrs, UpdateAttrs
from fzero.ir.ops.rollback import Rollback
from fzero.ir.program import Function, Instruction, Program, Value, local_bytes, moving, repeats, stored_placement
from fzero.ir.value_names import Names
from fzero.sharding.layout import Leaf
from fzero.step import EvalStep
from fzero.trace.recorder import Recorded
from fzero.trace.storages import output_storages
from fzero.transforms.accumulate import loop_totals
from fzero.transforms.speculate_pass import with_old_values
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


# --- the tiers of parameters ---


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
    chosen = spread_out([_nbytes(params[i]) for i in meant], record.fraction)
    return [i for i, off in zip(meant, chosen, strict=True) if off]


def _nbytes(leaf: Leaf) -> int:
    return leaf.numel * leaf.dtype.itemsize


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


# --- the values of a program that are kept off the device ---


SMALL = 1 << 14  # bytes: a smaller activation stays on the device, as do an update's gradients if all are smaller
GRADS = ("device", "update", "host")
"""The options for which gradients are held in host memory; see `waiting_on_host`."""


def records_of(program: Program) -> list[Offload]:
    """Returns the `offload` configurations of a program."""
    return [t for t in program.transforms if isinstance(t, Offload)]


def leaves_side_open(program: Program) -> bool:
    """Whether a step leaves open whether the host or the device updates offloaded state. If host and device share one
    memory, this makes no difference."""
    records = records_of(program)
    off = any("opt_state" in r.of for r in records) and not program.mesh.unified_memory
    return off and all(r.update_on == "auto" for r in records)


def updated_on_device(program: Program, host_share: float) -> frozenset[str]:
    """Returns the offloaded tensors, and the shards taken of such tensors, that the device updates while the host
    updates a share.

    Args:
        program: a program whose update has been partitioned.
        host_share: the share of their bytes that the host updates, as whole blocks spread evenly over all blocks; used
            only if the step leaves it open.
    """
    sides = (r.update_on for r in records_of(program) if r.update_on != "auto")
    share = next((float(side == "host") for side in sides), host_share)
    leaves = _state(program)
    blocks = list[dict[str, int]]()  # the offloaded tensors that each update on the host would read, and their bytes
    for op in update_ops(program):
        sizes = {a: _nbytes(leaves[a]) for a in op.args if a in leaves}
        off = {a: n for a, n in sizes.items() if leaves[a].layout.tier != "device"}
        blocks += [off] if _mostly(off, sizes) else []
    on_host = spread_out([sum(block.values()) for block in blocks], share)
    return frozenset(a for block, host in zip(blocks, on_host, strict=True) if not host for a in block)


def _state(program: Program) -> dict[str, Leaf]:
    """Returns the tensors of the state, and for each shard taken of such a tensor the tensor."""
    takes = (op for op in program.instructions if op.op == "take_shard" and op.args[0] in program.leaves)
    return {**program.leaves, **{op.out[0].name: program.leaves[op.args[0]] for op in takes}}


def _mostly(off: Mapping[str, int], state: Mapping[str, int]) -> bool:
    """Whether at least half of the bytes of an update's state are stored off the device, so that the host runs it."""
    return bool(off) and 2 * sum(off.values()) >= sum(state.values())


def waiting_on_host(program: Program, on_device: frozenset[str], grads: str) -> frozenset[str]:
    """Returns the gradients that are held in host memory until their update.

    These are gradients whose update depends on all gradients, for example on a norm for clipping, and the accumulated
    gradients of a loop over micro-batches. There are none if host and device share one memory.

    The device computes a gradient's contribution to such a norm before the gradient leaves the device, so that only
    scalars are sent back. Gradients that a loop accumulates on the host contribute to the norm on the host.

    Args:
        program: a program whose update has been partitioned.
        on_device: the result of `updated_on_device`.
        grads: "update": the gradients of updates that run on the host; "host": all; "device": of the gradients of
            updates that run on the host, only those that no loop accumulates.
    """
    return frozenset() if program.mesh.unified_memory else gradients_that_wait(program, on_device, grads)


def gradients_that_wait(
    program: Program, on_device: frozenset[str] = frozenset(), grads: str = "host"
) -> frozenset[str]:
    """Returns the gradients that are held until their update: those of `waiting_on_host`, also if host and device share
    one memory; by default all that are held, no matter where the update runs."""
    if not records_of(program):
        return frozenset()
    totals, own = loop_totals(program), no_gradients(program)
    values, known, leaves = program.values_by_name, known_last(program, own), _state(program)
    found: set[str] = set()
    for op in update_ops(program):
        sizes = {a: _nbytes(leaves[a]) for a in op.args if a in leaves}
        off = {a: n for a, n in sizes.items() if leaves[a].layout.tier != "device"}
        on_host = on_device.isdisjoint(off) and _mostly(off, sizes)
        read = {a for a in op.args if a not in own}
        if all(local_bytes(values[a], program.mesh) < SMALL for a in read):
            continue
        late = read if not known.isdisjoint(op.args) else read & totals
        found |= late - totals if on_host and grads == "device" else late if on_host or grads == "host" else set()
    return frozenset(found)


def waits_for_all(program: Program) -> bool:
    """Whether an update depends on all gradients. The program's update must have been partitioned."""
    known = known_last(program, no_gradients(program))
    return any(not known.isdisjoint(op.args) for op in update_ops(program))


def saved_activations(program: Program) -> set[str]:
    """Returns the values that are held on the host between forward and backward."""
    record = next((r for r in records_of(program) if "activations" in r.of), None)
    if record is None:
        return set()
    ops = [op for op, _ in program.walk()]
    late = {a for op in ops if op.is_backward for a in op.args}
    found = []
    for op in ops:
        if op.op == "call" and op.is_forward:
            # The last block is excluded: its backward follows directly, and forward and backward are one call.
            outputs = output_storages(program.functions[op.fn].graph)
            found += [
                v
                for v, o in zip(op.out, outputs, strict=True)
                if v.name in late and o.argument is None and v.nbytes >= SMALL
            ]
    chosen = spread_out([v.nbytes for v in found], record.fraction)
    return {v.name for v, off in zip(found, chosen, strict=True) if off}


def update_ops(program: Program) -> list[Instruction]:
    """Returns the calls that write parameters and optimizer state."""
    return [op for op in program.instructions if op.by == "optimizer" and op.op == "call" and op.writes]


def no_gradients(program: Program) -> set[str]:
    """Returns the values, other than gradients, that updates read."""
    made = {v.name for op in program.instructions if op.by == "optimizer" or op.op == "take_shard" for v in op.out}
    return made | {v.name for v in program.inputs}


def known_last(program: Program, own: set[str]) -> set[str]:
    """Returns the values of the optimizer that depend on reductions over gradients, and are therefore known only after
    the last gradient is.

    Args:
        program: a program whose update has been partitioned.
        own: the values that are not gradients.
    """
    found: set[str] = set()
    for op in program.instructions:
        if op.by == "optimizer" and not op.writes:
            reduces = op.op == "call" and any(a not in own and program.values_by_name[a].shape for a in op.args)
            found.update(v.name for v in op.out if reduces or not found.isdisjoint(op.args))
    return found


def blocks_updated_on_host(program: Program) -> tuple[int, int]:
    """Returns how many of the blocks with offloaded state are updated on the host, and the number of such blocks."""
    updates = update_ops(program)
    brought = {v.name for op in program.instructions if op.is_wait for v in op.out}
    on_host = sum(op.on_host for op in updates)
    return on_host, on_host + sum(not op.on_host and not brought.isdisjoint(op.writes) for op in updates)


# --- the compute copies of masters ---


aten = torch.ops.aten


@dataclass(frozen=True)
class ComputeCopies:
    """The masters that have copies, and the copies, by the path of their master."""

    masters: tuple[str, ...]
    copies: Mapping[str, Leaf] = field(compare=False)


def add_copies(program: Program, options: ComputeCopies) -> Program:
    """Returns the base program of a step that reads the copies of masters, and whose update writes them too.

    Without the copies, every step would cast the masters again after they were written, and transfer them once more.
    The copies are tensors of the state, in `extras['compute']`; because they can be computed from the masters, no
    checkpoint contains them.

    Precondition: no op is split or repeated yet.
    """
    copies = options.copies
    casts = {
        x.args[0]: x
        for x in program.instructions
        if x.op == "cast" and x.args[0] in copies and x.out[0].dtype == copies[x.args[0]].dtype
    }
    held = {master: leaf for master, leaf in copies.items() if master in casts}
    if not held:
        return program
    names = {casts[master].out[0].name: leaf.path for master, leaf in held.items()}
    dropped = set(map(id, casts.values()))
    ops = [op.rename(names) for op in program.instructions if id(op) not in dropped]
    ops = [
        _written(op, {m: leaf for m, leaf in held.items() if m in op.writes}) if op.op == "update" else op for op in ops
    ]
    owners = {**program.owners, **{leaf.path: program.owners[m] for m, leaf in held.items() if m in program.owners}}
    return replace(
        program,
        inputs=(*program.inputs, *(Value(leaf.path, leaf.shape, leaf.dtype) for leaf in held.values())),
        leaves={**program.leaves, **{leaf.path: leaf for leaf in held.values()}},
        instructions=tuple(ops),
        owners=owners,
    )


def _written(update: Instruction, copies: Mapping[str, Leaf]) -> Instruction:
    """Returns the update that also writes the compute copies."""
    source = update.says(UpdateAttrs).graph
    graph = compat.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(source.graph, env)
    num, inputs, outputs = len(update.writes), [env[n] for n in source.inputs], [env[n] for n in source.outputs]
    new = dict(zip(update.writes, outputs, strict=False))
    last, casts = inputs[-1], []
    for i, (master, leaf) in enumerate(copies.items()):
        value = new[master].meta["val"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"copy_{i}")
            last.meta["val"] = torch.empty_like(value, dtype=leaf.dtype)
        cast = graph.call_function(aten._to_copy.default, (new[master],), {"dtype": leaf.dtype})
        cast.meta["val"] = torch.empty_like(value, dtype=leaf.dtype)
        casts.append(cast)
    # The outputs are the new values of the written tensors, to which the copies now belong, followed by the metrics.
    graph.output((*outputs[:num], *casts, *outputs[num:]))
    paths = tuple(leaf.path for leaf in copies.values())
    update = update.saying(graph=Recorded(graph, source.constants))
    return replace(update, args=(*update.args, *paths), writes=(*update.writes, *paths))


# --- the rewrite ---


@dataclass(frozen=True)
class UpdatePlacement:
    """Where the update of offloaded state runs, and where gradients wait for it.

    Attributes:
        on_device: the offloaded tensors that the device updates, from `updated_on_device`.
        waiting: the gradients that are held in host memory, from `waiting_on_host`.
        on_disk: pairs of a gradient that is held on disk and the tensor that stores it.
    """

    on_device: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    on_disk: tuple[tuple[str, str], ...] = ()


def rewrite(program: Program, options: UpdatePlacement) -> Program:
    """Inserts copies from and to host memory and disk: the operands of every op are copied to the tier on which it
    runs, and written state is copied back to the tier that stores it.

    Precondition: the update is partitioned and hoisted, and every value is on the device.

    Ops run on the device, except calls of the optimizer most of whose state is stored on another tier: these run on the
    host, all of them or a share, and gradients are sent to them. Gradients that are held, for the norm of all gradients
    or for the next micro-batch, are held where their update reads them, or on disk, in tensors that the step writes
    after each backward and reads before each update. An offloaded parameter is copied again for every op that reads it.
    In an evaluation, masters are cast on the host; a training step reads their compute copies. All values that are
    copied for one op are copied together. An update that directly follows its backward does not read tensors again that
    the backward has read from disk. Old values that speculative updates overwrite are copied too.
    """
    return _TierRewrite(with_old_values(program), options).run()


@dataclass(frozen=True)
class GradientLeaves:
    """The tensors that store gradients on disk."""

    leaves: tuple[Leaf, ...] = field(compare=False)


def with_gradient_leaves(program: Program, options: GradientLeaves) -> Program:
    """Returns the program with the tensors that store gradients added to its inputs.

    Precondition: the update is partitioned.
    """
    new = {leaf.path: leaf for leaf in options.leaves}
    values = (Value(x.path, x.shape, x.dtype, stored_placement(x.layout)) for x in new.values())
    return replace(program, inputs=(*program.inputs, *values), leaves={**program.leaves, **new})


class _ValueTiers:
    """The tiers on which each value of a program exists, and the ops that copy values between them."""

    def __init__(self, program: Program):
        self.program = program
        self.values, self.names = program.values(), Names(program.values())
        for name, leaf in program.leaves.items():
            self.values[name] = replace(self.values[name], tier=leaf.layout.tier)
        # by value: its name on each tier on which it exists, if not only where it was computed
        self.lies: dict[str, dict[str, str]] = {}

    def tier(self, name: str) -> str:
        """The tier on which a value was computed or is stored."""
        return self.values[name].tier if name in self.values else "device"

    def at(self, name: str) -> dict[str, str]:
        """The tiers on which a value exists, with its name on each."""
        return self.lies.get(name) or {self.tier(name): name}

    def also_at(self, name: str, tier: str, copy: str) -> None:
        """Notes that a value has a copy on a tier."""
        self.lies[name] = {**self.at(name), tier: copy}

    def made(self, op: Instruction) -> Instruction:
        """Notes the results of an op."""
        self.values.update((v.name, v) for v in op.out)
        return op

    def copy(
        self, target: str, args: Sequence[str], out: Sequence[Value] = (), writes: Sequence[str] = (), source: str = ""
    ) -> list[Instruction]:
        """Returns the start of a copy, and its wait. By default, what is copied to the host comes from the device."""
        source = source or ("device" if target == "host" else "host")
        stem = "disk_read" if source == "disk" else "disk_write" if target == "disk" else f"to_{target}"
        attrs, handle = CopyAttrs(source=source, target=target), moving(self.names.numbered(stem))
        start = Instruction("copy_start", tuple(args), (handle,), attrs=attrs, writes=tuple(writes), by="offload")
        return [self.made(start), self.made(Instruction("wait", (handle.name,), tuple(out), by="offload"))]

    def move(
        self, tier: str, names: Sequence[str], called: Sequence[str], source: str = ""
    ) -> tuple[dict[str, str], list[Instruction]]:
        """Copies values to a tier, from the disk or between host and device. Returns the names of the copies by those
        of their sources, and the ops. `called`: the values after which the copies are named."""
        if not names:
            return {}, []
        ending = "" if tier == "device" else "_host"
        out = [
            replace(self.values[n], name=self.names(f"{self.names.stem(c)}{ending}"), tier=tier)
            for n, c in zip(names, called, strict=True)
        ]
        return {n: v.name for n, v in zip(names, out, strict=True)}, self.copy(tier, names, out, source=source)

    def store(self, written: dict[str, str], tier: str) -> list[Instruction]:
        """Returns the ops that copy written values back to the tensors of the state. `written` maps each tensor to its
        copy, which is on `tier`."""
        ops: list[Instruction] = []
        back: dict[str, list[str]] = defaultdict(list)
        for target in written:
            if target in self.program.leaves:
                back[self.tier(target)].append(target)
            else:  # a shard of a tensor that is written unsharded later
                self.lies[target] = {tier: written[target]}
        if tier == "device" and back["disk"]:
            names, ops = self.move("host", [written[t] for t in back["disk"]], back["disk"])
            written = {**written, **{t: names[written[t]] for t in back["disk"]}}
        for to, targets in back.items():
            args = (*targets, *(written[t] for t in targets))
            if targets and to == tier:
                ops.append(Instruction("assign", args, writes=tuple(targets), by="optimizer"))
            elif targets:
                ops += self.copy(to, args, writes=targets)
        return ops


class _HeldValues:
    """The values that are held off the device: activations until their backward, gradients until their update.

    Stores of gradients on disk and accumulations on the host come a block later, so that they overlap the computation
    of that block.
    """

    def __init__(self, tiers: _ValueTiers, waiting: frozenset[str], on_disk: Mapping[str, str]):
        program = tiers.program
        self.tiers, self.waiting, self.on_disk = tiers, waiting | on_disk.keys(), on_disk
        self.saved = saved_activations(program)
        # copies on the host: of activations from forward to backward, of gradients until their update
        self.copies: dict[str, str] = {}
        # by a tensor that stores gradients on disk: the copy that is to be written to it
        self.unwritten: dict[str, str] = {}
        self.leaving: dict[str, list[str]] = {}  # by a held gradient: all gradients of the same update
        totals = loop_totals(program)
        for op in update_ops(program):
            together = [a for a in op.args if a in self.waiting and a not in totals]
            self.leaving.update(dict.fromkeys(together, together))
        # accumulations on the host whose summands a loop has computed but not added yet
        self.summands: list[Instruction] = []

    def hold(self, op: Instruction) -> list[Instruction]:
        """Returns copies to the host of a block's saved values, and of the gradients of an update as soon as all of
        them have been computed."""
        ops: list[Instruction] = []
        for names in (
            [v.name for v in op.out if v.name in self.saved],
            *(self._complete(v.name) for v in op.out if v.name in self.waiting),
        ):
            copies, more = self.tiers.move("host", names, names)
            ops += more
            for name, copy in copies.items():
                if name in self.on_disk:
                    # A gradient that is stored on disk also has a copy on the host. Ops that run before all gradients
                    # are known (such as its part of a norm, or a speculative update) read that copy; later ops, those
                    # of a rollback among them, read the gradient from disk.
                    self.tiers.also_at(name, "host", copy)
                    self.unwritten[self.on_disk[name]] = copy
                else:
                    self.copies[name] = copy
        return [*ops, *self.written()] if self.tiers.program.mesh.unified_memory else ops

    def _complete(self, grad: str) -> list[str]:
        """Returns the gradients of an update if this is the last of them to be computed, otherwise none."""
        together = self.leaving.pop(grad)
        return [] if any(a in self.leaving for a in together) else together

    def written(self) -> list[Instruction]:
        """Returns the ops that write gradients to disk."""
        written, self.unwritten = self.unwritten, {}
        return self.tiers.store(written, "host") if written else []

    def added(self) -> list[Instruction]:
        """Returns the ops that add up micro-batches on the host."""
        summands, self.summands = self.summands, []
        parts = [op.args[0] for op in summands]
        copies, ops = self.tiers.move("host", parts, parts)
        for op in summands:
            total = replace(op.out[0], tier="host")
            ops.append(self.tiers.made(replace(op, args=(copies[op.args[0]],), out=(total,))))
        return ops


class _TierRewrite:
    """The rewrite of one program: visits its ops in order, and inserts the copies that each of them needs."""

    def __init__(self, program: Program, options: UpdatePlacement):
        self.program, self.on_device = program, options.on_device
        self.tiers = _ValueTiers(program)
        self.held = _HeldValues(self.tiers, options.waiting, dict(options.on_disk))
        self.functions = dict(program.functions)
        ops = [op for op, _ in program.walk()]
        # tensors of the state, and the shards taken of them
        self.state = program.leaves.keys() | {v.name for op in ops if op.op == "take_shard" for v in op.out}
        self.scalars = {v.name for op in ops if op.by == "optimizer" and op.op == "call" for v in op.out}
        self.casts: dict[str, Instruction] = {}  # casts of parameters that are copied again for every reader
        self.shared: dict[str, str] = {}  # values copied for an op and its repetitions for other micro-batches
        self.recent: list[dict[str, str]] = []  # tensors that the last backwards have read from disk, and their copies
        self.known = known_last(program, no_gradients(program))

    def run(self) -> Program:
        ops = self._rewrite_ops(self.program.instructions)
        inputs = tuple(self.tiers.values[v.name] for v in self.program.inputs)
        return replace(self.program, inputs=inputs, instructions=tuple(ops), functions=self.functions)

    def _rewrite_ops(self, ops: Iterable[Instruction]) -> list[Instruction]:
        return [new for op in ops for new in self._rewrite_op(op)]

    def _rewrite_op(self, op: Instruction) -> list[Instruction]:
        source = op.args[0] if op.args else ""
        if op.body:
            return self._with_body(op)
        if op.speculative and op.op in ("cast", "assign"):  # the old value stays on the tier of its tensor
            return self._on(self.tiers.tier(source), op)
        on_device = self.tiers.tier(source) == "device"
        if op.op == "cast" and source in self.program.leaves and not on_device and op.micro is None:
            return self._cast(op)
        if op.op == "take_shard":
            return self._on("device" if on_device else "host", op)
        if op.op == "assign":
            return self._assign(op)
        if op.by == "optimizer" and op.op == "call":
            return self._update(op)
        if op.op == "accumulate" and op.out[0].name in self.held.waiting:
            self.held.summands.append(op)
            return []
        return self._compute(op)

    def _compute(self, op: Instruction) -> list[Instruction]:
        """Returns an op of loss and gradients on the device. After a backward come the sums and the writes that may
        run then."""
        ops, sums = self._on("device", op), list[Instruction]()
        if (op.is_backward or op.by == "fuse") and not repeats(op):
            # with separate memories, an update comes a block later (compiler/hoist_updates.py)
            num = 1 if self.program.mesh.unified_memory else 2
            before = self.recent.pop() if op.segment.index else {}
            self.recent = [*self.recent, {**before, **self._read_by(ops)}][-num:]
            sums = [*self.held.added(), *self.held.written()]
        return [*ops, *sums, *self.held.hold(op)]

    def _update(self, op: Instruction) -> list[Instruction]:
        """Returns a call of the optimizer on the side where it runs. It writes the copies of tensors that were brought
        for a recent backward."""
        for found in self.recent:
            for a in op.writes:
                if a in found:
                    self.tiers.also_at(a, self.tiers.tier(found[a]), found[a])
        before = self.held.written() if self._stored(op) else []
        ops = self._on(self._side(op), op)
        if op.speculative:
            ops = [x.saying(speculative=True) if x.writes or x.tiers == ("disk", "host") else x for x in ops]
        return [*before, *ops]

    def _with_body(self, op: Instruction) -> list[Instruction]:
        """Returns an op that contains other ops, with these rewritten."""
        before = self.held.written()
        outside = {name: dict(tiers) for name, tiers in self.tiers.lies.items()}
        if op.op == Rollback.name:
            self.tiers.lies = {name: tiers for name, tiers in outside.items() if name not in self.program.leaves}
            self.recent = []
        body = (*self._rewrite_ops(op.body), *self.held.added())
        self.tiers.lies, self.recent = outside, []
        return [*before, replace(op, body=body)]

    def _side(self, op: Instruction) -> str:
        """Returns the side on which a call of the optimizer runs. It is the host if most of the state it reads is
        offloaded and not updated on the device, or if it reads accumulated gradients on the host and writes nothing."""
        if not op.writes and any(a in self.held.waiting and "device" not in self.tiers.at(a) for a in op.args):
            return "host"
        sizes = {a: self.tiers.values[a].nbytes for a in op.args if a in self.state}
        off = {a: n for a, n in sizes.items() if "device" not in self.tiers.at(a)}
        return "host" if self.on_device.isdisjoint(off) and _mostly(off, sizes) else "device"

    def _is_late(self, op: Instruction) -> bool:
        """Whether an op of the optimizer runs after the held gradients have been computed: a non-speculative update, or
        an op that depends on all gradients."""
        return (
            op.by == "optimizer"
            and op.op == "call"
            and not op.speculative
            and bool(op.writes or not self.known.isdisjoint(op.args))
        )

    def _stored(self, op: Instruction) -> dict[str, str]:
        """Returns the gradients that an op reads from disk, each with the tensor that stores it."""
        return {a: self.held.on_disk[a] for a in op.args if a in self.held.on_disk} if self._is_late(op) else {}

    def _on(self, tier: str, op: Instruction) -> list[Instruction]:
        """Returns the op on a tier, with the ops that copy its arguments there and its results back."""
        given, ops = self._bring(op, tier)
        names = {a: given.get(a) or self.tiers.at(a)[tier] for a in op.args}
        written = tuple(names[w] for w in op.writes)
        out = tuple(replace(v, tier=tier) for v in op.out)
        self.tiers.values.update((v.name, v) for v in out)
        op = op.saying(on="host") if tier == "host" and op.op == "call" else op
        fn = self._for_host(op.fn) if op.op == "call" and op.on_host else op.fn
        ops.append(replace(op, args=tuple(names[a] for a in op.args), writes=written, out=out, fn=fn))
        return ops + self.tiers.store({w: u for w, u in zip(op.writes, written, strict=True) if w != u}, tier)

    def _for_host(self, fn: str) -> str:
        """Returns the name of the subgraph compiled for the host, if the host is a different device."""
        if self.program.mesh.device_type == "cpu":
            return fn
        name = f"{fn}_on_host"
        self.functions.setdefault(
            name, Function(name, self.program.functions[fn].graph, self.program.functions[fn].writes, on="host")
        )
        return name

    def _bring(self, op: Instruction, tier: str) -> tuple[dict[str, str], list[Instruction]]:
        """Copies an op's operands to its tier. Returns their names there, and the ops that copy them."""
        shared = {a: self.shared[a] for a in op.args if a in self.shared} if repeats(op) else {}
        stored = self._stored(op)
        absent = [a for a in self._absent(op, tier, stored) if a not in shared]
        ops = self._bring_scalars([a for a in absent if a in self.scalars], tier)
        absent = [a for a in absent if a not in self.scalars]
        given, more = self._buffers(op, absent, tier)
        ops += more
        absent = [a for a in absent if a not in given]
        given |= {a: name for a in absent if (name := self._at_hand(a, stored))}
        fetched, more = self._fetch(absent, stored)
        ops += more
        given |= fetched
        travel = [a for a in absent if self.tiers.tier(given[a]) != tier]
        arrived, more = self.tiers.move(tier, [given[a] for a in travel], travel)
        found = {**given, **{a: arrived[given[a]] for a in travel}}
        self.shared = self.shared if repeats(op) else found or self.shared
        return {**shared, **found}, ops + more

    def _bring_scalars(self, scalars: Sequence[str], tier: str) -> list[Instruction]:
        """Copies scalars that the optimizer computes. Many ops read each of them, so it is copied once, in a separate
        transfer."""
        names, ops = self.tiers.move(tier, scalars, scalars)
        for a in scalars:
            self.tiers.also_at(a, tier, names[a])
        return ops

    def _absent(self, op: Instruction, tier: str, stored: Mapping[str, str]) -> list[str]:
        """Returns the operands of an op that are not on its tier, or whose held copies are elsewhere."""
        late = op.is_backward or self._is_late(op)
        waits = lambda a: a in stored or (late and a in self.held.copies)  # noqa: E731
        return [a for a in dict.fromkeys(op.args) if tier not in self.tiers.at(a) or waits(a)]

    def _at_hand(self, name: str, stored: Mapping[str, str]) -> str | None:
        """Returns the name of a value in memory, or of its held copy; None if it must be read from disk or cast."""
        if name in self.held.copies or name in self.casts or name in stored:
            return self.held.copies.get(name)
        return self.tiers.at(name).get("host") or self.tiers.at(name).get("device")

    def _fetch(self, names: Sequence[str], stored: Mapping[str, str]) -> tuple[dict[str, str], list[Instruction]]:
        """Reads values from disk, or casts offloaded tensors. Returns the names of the results, and the ops."""
        sources = {a: self.casts[a].args[0] if a in self.casts else stored.get(a, a) for a in names}
        disk = {s: a if a in stored else s for a, s in sources.items() if {*self.tiers.at(s)} == {"disk"}}
        read, ops = self.tiers.move("host", list(disk), list(disk.values()), source="disk")
        found = {a: read[s] for a, s in sources.items() if s in read}
        for a, cast in ((a, self.casts[a]) for a in names if a in self.casts):
            name = self.tiers.names(f"{self.tiers.names.stem(sources[a])}_cast")
            value = replace(cast.out[0], name=name, tier="host")
            ops.append(self.tiers.made(replace(cast, args=(found.get(a, sources[a]),), out=(value,))))
            found[a] = name
        return found, ops

    def _buffers(self, op: Instruction, absent: Sequence[str], tier: str) -> tuple[dict[str, str], list[Instruction]]:
        """Makes buffers for tensors that an op writes but does not read, so that they need memory on its tier, but not
        their old values: the compute copies. Returns the names of the buffers, and the op that makes them."""
        unified, leaves = self.program.mesh.unified_memory, self.program.leaves
        copies = [a for a in absent if a in op.writes and a in leaves and leaves[a].role == "compute"]
        copies = [a for a in copies if self.tiers.tier(a) == "disk" or not unified]
        if not copies:
            return {}, []
        names = [self.tiers.names(f"{self.tiers.names.stem(a)}_new") for a in copies]
        out = tuple(replace(self.tiers.values[a], name=n, tier=tier) for a, n in zip(copies, names, strict=True))
        attrs = BufferAttrs(leaves=tuple(copies), on="host" if tier == "host" else "device")
        buffer = self.tiers.made(Instruction("buffer", (), out, attrs=attrs, by="offload"))
        return dict(zip(copies, names, strict=True)), [buffer]

    def _read_by(self, ops: Sequence[Instruction]) -> dict[str, str]:
        """Returns the tensors that these ops read from disk, and their copies."""
        reads = {x.out[0].name: x.args for x in ops if x.tiers == ("disk", "host")}
        return {
            leaf: v.name
            for x in ops
            if x.op == "wait" and x.args[0] in reads
            for leaf, v in zip(reads[x.args[0]], x.out, strict=True)
        }

    def _cast(self, op: Instruction) -> list[Instruction]:
        """Casts a parameter to its compute dtype: for each reader again if parameters are offloaded, or once if only
        masters are."""
        value = op.out[0]
        self.tiers.values[value.name] = replace(value, tier="host")
        if any("params" in r.of for r in records_of(self.program)):
            self.casts[value.name] = op
            return []
        on_host = replace(value, name=self.tiers.names(f"{value.name}_host"))
        ops = self._on("host", replace(op, out=(on_host,)))
        return [*ops, *self.tiers.copy("device", [on_host.name], [value])]

    def _assign(self, op: Instruction) -> list[Instruction]:
        """Writes values to tensors of the state: in place if the tensor is stored on the device; otherwise the values
        are copied."""
        pairs = dict(zip(op.args[: len(op.writes)], op.args[len(op.writes) :], strict=True))
        here = [t for t in pairs if self.tiers.tier(t) == "device"]
        ops = (
            self._on("device", replace(op, args=(*here, *(pairs[t] for t in here)), writes=tuple(here))) if here else []
        )
        for tier in ("device", "host"):
            away = {t: s for t, s in pairs.items() if t not in here and self.tiers.tier(s) == tier}
            ops += self.tiers.store(away, tier)
        return ops
