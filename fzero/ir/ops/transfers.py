"""Defines the transfers: collectives between the ranks along mesh axes, copies between the memory tiers of one rank,
and the wait for either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero._utils.units import size
from fzero.ir.attributes import (
    CopyAttrs,
    Over,
    ReduceAttrs,
    ReplicateAttrs,
    RowsAttrs,
    ScatterAttrs,
    SendAttrs,
    SentValue,
    WaitAttrs,
)
from fzero.ir.ops.op import Op, Rules, Running, Start, Text, into, over
from fzero.ir.program import Instruction, Place, Program, Value, local_bytes
from fzero.mesh import AbstractMesh
from fzero.sharding.placements import IN_FLIGHT, MeshPlacement, Partial, Shard, Varying

DISK = "disk"
_ROWS = Shard(0)
REDUCTIONS = {"sum", "max", "min"}
"""The operations by which a reduction combines the values of ranks."""


def _starts(op: Instruction, rules: Rules) -> None:
    handle = op.out[0]
    rules.started[handle.name] = op
    if handle.placement != IN_FLIGHT:
        rules.bad(op, f"{handle.name}, which has been started, is {handle.placement}")


class Collective(Start[Over]):
    """A collective over one mesh axis. Over several axes, several collectives follow each other. Bytes are those of
    ring algorithms.
    """

    attrs = Over
    computes = "device"

    def check(self, op: Instruction[Over], args: list[Value], rules: Rules) -> None:
        _starts(op, rules)
        args = [v for v in args if v.name in self.sent(op)]
        if not args or len(op.attrs.axes) != 1:
            rules.bad(op, f"moves {len(args)} values over {len(op.attrs.axes)} axes")
        if isinstance(op.attrs, ReduceAttrs) and op.attrs.reduction not in REDUCTIONS:
            rules.bad(op, f"reduces by {op.attrs.reduction!r}")
        for v in args:
            if not self.takes(op, v.placement):
                rules.bad(op, f"{v.name} is {v.placement}")

    def takes(self, op: Instruction[Over], placement: MeshPlacement) -> bool:
        """Returns whether the collective can move values of this placement. A reduction moves only values that are
        partial over its axes, by its own reduction.
        """
        # The shards are ordered for a reduction over the last axis; over another one, ranks would add up different
        # elements.
        if placement.is_permuted and placement.flat_axes[-1:] != op.attrs.axes:
            return False
        return placement.reduces(op.attrs.axes, op.says(ReduceAttrs).reduction)

    def channel(self, op: Instruction[Over]) -> str:
        return f"reduce:{','.join(op.attrs.axes)}"

    def moved_bytes(self, op: Instruction[Over], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        n = mesh.axis_size(op.attrs.axes)
        return self.together(op, values, mesh) * (n - 1) // n

    def together(self, op: Instruction[Over], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        """Returns the bytes of the data that the ranks along the axis have together: the full tensor, or a shard of
        it if other axes shard it.
        """
        found, axis = 0, {*op.attrs.axes}
        for value in (values[a] for a in op.args):
            at = value.placement
            # Other axes divide the data that the ranks along this axis have together.
            others = tuple(a for a in at.flat_axes if a not in axis)
            left = MeshPlacement(tuple(x for x in at.dim_shards if x[0] not in axis))
            found += local_bytes(replace(value, placement=left), mesh) // mesh.axis_size(others)
        return found

    def text(self, op: Instruction[Over], program: Program) -> Text:
        how = [f"op={op.attrs.reduction!r}"] if isinstance(op.attrs, ReduceAttrs) else []
        sent = size(self.moved_bytes(op, program.values_by_name, program.mesh))
        arguments = ", ".join([f"[{', '.join(op.args)}]", over(op), *how, *into(op, program)])
        return Text(f"{self.name}({arguments})", f">>> sends {sent} over {', '.join(op.attrs.axes)}")

    def runs(self, on: Running) -> Callable[..., Any]:
        return getattr(on.carrier, self.name)


class AllGather(Collective):
    """Gathers shards into the values that they are shards of: full values, or shards over the remaining axes. Also
    gathers shards of dimension 0, one after another.
    """

    name = "all_gather_start"
    pool = "gather"

    def takes(self, op: Instruction[Over], placement: MeshPlacement) -> bool:
        # Only the last axis can be gathered: it splits the shards of the axes before it, so its shards are adjacent.
        shard = placement.is_flat_shard and placement.flat_axes[-1:] == op.attrs.axes
        rows = any(((axis, _ROWS) in placement.axes) for axis in op.attrs.axes)
        return (shard or rows) and not placement.partial

    def reads_new(self, op: Instruction[Over], name: str, aliases: Mapping[str, str]) -> bool:
        return name in aliases

    def channel(self, op: Instruction[Over]) -> str:
        return f"gather:{','.join(op.attrs.axes)}"

    def arrives(self, op: Instruction[Over], placement: MeshPlacement) -> MeshPlacement:
        if placement.dim_shards:
            return placement.without(op.attrs.axes, Shard)
        along_dim = len(placement.flat_axes) == len(placement.dims)
        return placement.permuted(True) if along_dim else placement.gathered


class ReduceScatter(Collective):
    """Reduces partial values to this rank's shard of the sum. Shards are sharded further. With `rows` a rank gets its
    shard of dimension 0 instead.
    """

    name = "reduce_scatter_start"
    attrs = ScatterAttrs
    pool = "scatter"
    reads_until_wait = False

    def takes(self, op: Instruction[Over], placement: MeshPlacement) -> bool:
        finer = (*placement.flat_axes, *op.attrs.axes)  # the axes that determine the padding of the shard
        # A shard can be sharded further only if its padding already makes its length a multiple of the finer shards.
        padded = not placement.is_flat_shard or placement.grid[: len(finer)] == finer
        return padded and super().takes(op, placement)

    def filled(self, op: Instruction[Over]) -> Sequence[Place | None]:
        return op.into[len(op.args) :]

    def arrives(self, op: Instruction[Over], placement: MeshPlacement) -> MeshPlacement:
        axes, said = tuple(op.attrs.axes), op.says(ScatterAttrs)
        reduced = placement.without(axes, Partial)
        if said.rows:
            return replace(reduced, axes=(*reduced.axes, *((axis, _ROWS) for axis in axes)))
        return reduced.permuted(False) if reduced.is_permuted else reduced.sharded(axes, said.grid)


class AllReduce(Collective):
    """Reduces partial values to their sum, on every rank."""

    name = "all_reduce_start"
    attrs = ReduceAttrs
    pool = "reduce"
    reads_until_wait = False

    def arrives(self, op: Instruction[Over], placement: MeshPlacement) -> MeshPlacement:
        return placement.without(op.attrs.axes, Partial)

    def moved_bytes(self, op: Instruction[Over], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        n = mesh.axis_size(op.attrs.axes)
        # A ring all-reduce is a reduce-scatter followed by an all-gather.
        return self.together(op, values, mesh) * 2 * (n - 1) // n


class AllToAll(Collective):
    """Exchanges rows of dimension 0: each rank sends one row to each rank along the axis, and receives the rows that
    these ranks have for it. Its buffers are first those of its operands, then those of its results.
    """

    name = "all_to_all_start"
    pool = "exchange"
    reads_until_wait = False

    def takes(self, op: Instruction[Over], placement: MeshPlacement) -> bool:
        return {*op.attrs.axes} <= {*placement.over(Varying)} and not placement.partial

    def channel(self, op: Instruction[Over]) -> str:
        return f"exchange:{','.join(op.attrs.axes)}"

    def moved_bytes(self, op: Instruction[Over], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        n = mesh.axis_size(op.attrs.axes)
        return sum(local_bytes(values[a], mesh) for a in op.args) * (n - 1) // n

    def filled(self, op: Instruction[Over]) -> Sequence[Place | None]:
        return op.into[len(op.args) :]


class AllToAllV(AllToAll):
    """Exchanges any number of rows of dimension 0: rank i sends `counts[i, j]` rows to rank j, first those for rank 0.
    The result has the rows of rank 0 first, and zeros after the last row. Its last argument is the counts, int64[ranks,
    ranks]. They are gathered, so they are the same on all ranks along the axis.

    The host reads the counts, so on a GPU it waits for the device. If a rank would receive more rows than its buffer
    has, all ranks raise an error.
    """

    name = "all_to_all_v_start"
    attrs = RowsAttrs
    pool = "exchange_rows"
    # It runs over process groups, where a rank that receives no rows hears nothing of the others.
    direct = True
    uncaptured = "exchanges as many rows as the host reads"

    def sent(self, op: Instruction[Over]) -> tuple[str, ...]:
        return op.args[:-1]

    def given(self, op: Instruction[Over]) -> Sequence[str]:
        return op.args

    def check(self, op: Instruction[Over], args: list[Value], rules: Rules) -> None:
        super().check(op, args, rules)
        counts, n = args[-1], rules.program.mesh.axis_size(op.attrs.axes)
        if counts.shape != (n, n) or counts.dtype != torch.int64:
            rules.bad(op, f"{counts} are no counts of {n} ranks")
        if op.says(RowsAttrs).rows < 1:
            rules.bad(op, f"receives {op.says(RowsAttrs).rows} rows")

    def received(self, op: Instruction[Over], value: Value) -> tuple[tuple[int, ...], torch.dtype]:
        return (op.says(RowsAttrs).rows, *value.shape[1:]), value.dtype

    def moved_bytes(self, op: Instruction[Over], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        """Returns the bytes that a rank sends if all experts are chosen equally often."""
        n, rows = mesh.axis_size(op.attrs.axes), op.says(RowsAttrs).rows
        moved = 0
        for v in (values[a] for a in self.sent(op)):
            # On one of the two sides there are unused rows.
            moved += local_bytes(v, mesh) // v.shape[0] * min(rows, v.shape[0])
        return moved * (n - 1) // n

    def text(self, op: Instruction[Over], program: Program) -> Text:
        sent = size(self.moved_bytes(op, program.values_by_name, program.mesh))
        how = [f"counts={op.args[-1]}", over(op), f"rows={op.says(RowsAttrs).rows}", *into(op, program)]
        remark = f">>> sends {sent} over {', '.join(op.attrs.axes)} if balanced"
        return Text(f"{self.name}([{', '.join(self.sent(op))}], {', '.join(how)})", remark)


class ReplicateStart(Start[ReplicateAttrs]):
    """Sends tensors of the state to the rank `shift` further along an axis, which keeps them in host memory
    (fzero/elastic/peer_replicas.py). If no rank keeps them, nothing is sent.
    """

    name = "replicate_start"
    attrs = ReplicateAttrs
    pool = "replicate"
    direct = True
    uncaptured = "sends shards of the state to other hosts"

    def check(self, op: Instruction[ReplicateAttrs], args: list[Value], rules: Rules) -> None:
        _starts(op, rules)
        said, mesh = op.attrs, rules.program.mesh
        if not args or len(said.axes) != 1:
            rules.bad(op, f"sends {len(args)} values over {len(said.axes)} axes")
            return
        size = mesh.axis_size(said.axes)
        if not 0 < said.shift < size or said.every < 1 or said.number < 0:
            rules.bad(op, f"sends to rank + {said.shift} of {size}, every {said.every} steps")
        if len(said.leaves) != len(args):
            rules.bad(op, f"sends {len(args)} values as {len(said.leaves)} leaves")
        for v, path in zip(args, said.leaves, strict=False):
            # The receiver stores the values under this path, so they must be exactly the tensor of the state, unchanged
            # in this step.
            leaf = rules.program.leaves.get(path)
            if leaf is None or (leaf.shape, leaf.dtype) != (v.shape, v.dtype) or rules.root(v.name) != path:
                rules.bad(op, f"{v.name} is sent as {path}")
            at = v.placement
            if not at.is_flat_shard or said.axes[0] not in at.flat_axes or at.partial:
                rules.bad(op, f"{v.name} is {v.placement}")
            # The receiving rank keeps the values in host memory, so they are sent from there.
            if v.tier != "host" and not (mesh.unified_memory and v.tier == "device"):
                rules.bad(op, f"{v.name} is sent from the {v.tier}")

    def filled(self, op: Instruction[ReplicateAttrs]) -> Sequence[Place | None]:
        return ()

    def channel(self, op: Instruction[ReplicateAttrs]) -> str:
        return f"replicate:{','.join(op.attrs.axes)}"

    def moved_bytes(self, op: Instruction[ReplicateAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        """Returns the bytes of this rank's shards, averaged over the steps that send and those that do not. Tensors
        that are sent once count nothing.
        """
        # Amortized over a run, a tensor that is sent twice costs nothing per step.
        if op.attrs.once:
            return 0
        return sum(local_bytes(values[a], mesh) for a in op.args) // op.attrs.every

    def text(self, op: Instruction[ReplicateAttrs], program: Program) -> Text:
        said = op.attrs
        whole = self.moved_bytes(op.saying(every=1, once=False), program.values_by_name, program.mesh)
        how = [over(op), f"shift={said.shift}"]
        how += [f"every={said.every}"] if said.every > 1 else []
        how += ["once=True"] if said.once else []
        how += [f"into=replicas[{said.number}]", *(x.replace("into=", "through=") for x in into(op, program))]
        when = ", once" if said.once else f", every {said.every} steps" if said.every > 1 else ""
        remark = f">>> sends {size(whole)} over {', '.join(said.axes)}{when}"
        return Text(f"replicate_start([{', '.join(op.args)}], {', '.join(how)})", remark)

    def runs(self, on: Running) -> Callable[..., Any]:
        return on.replicate


class Send(Start[SendAttrs]):
    """Sends values of one pipeline stage, as one message, to the rank at another index along the axis."""

    name = "send_start"
    attrs = SendAttrs
    direct = True
    uncaptured = "sends values from stage to stage of a pipeline"

    def check(self, op: Instruction[SendAttrs], args: list[Value], rules: Rules) -> None:
        _starts(op, rules)
        said, mesh = op.attrs, rules.program.mesh
        if len(said.axes) != 1 or not said.values:
            rules.bad(op, f"moves {len(said.values)} values over {len(said.axes)} axes")
        elif not 0 <= said.peer < mesh.axis_size(said.axes) or said.number < 0:
            rules.bad(op, f"is number {said.number}, with place {said.peer} of {mesh.axis_size(said.axes)}")
        for v in args:
            if not {*said.axes}.isdisjoint(v.placement.varies_over) or v.tier != "device":
                rules.bad(op, f"{v.name} is {v}")
        sent = tuple(SentValue(v.local_shape(mesh), v.dtype, v.placement.varies_over) for v in args)
        if op.op == Send.name and sent != said.values:
            rules.bad(op, "sends different values than its attributes list")

    def filled(self, op: Instruction[SendAttrs]) -> Sequence[Place | None]:
        return ()

    def channel(self, op: Instruction[SendAttrs]) -> str:
        return f"{self.name.removesuffix('_start')}:{','.join(op.attrs.axes)}"

    def moved_bytes(self, op: Instruction[SendAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in op.attrs.values)

    def text(self, op: Instruction[SendAttrs], program: Program) -> Text:
        sent = size(self.moved_bytes(op, program.values_by_name, program.mesh))
        said = op.attrs
        code = f"send_start([{', '.join(op.args)}], {over(op)}, to={said.peer})"
        return Text(code, f">>> number {said.number}, {sent}")

    def runs(self, on: Running) -> Callable[..., Any]:
        return getattr(on.carrier, self.name)


class Recv(Send):
    """Receives the values of a message that the rank at another index along the axis sends."""

    name = "recv_start"
    args = 0

    def text(self, op: Instruction[SendAttrs], program: Program) -> Text:
        said, comes = op.attrs, size(self.moved_bytes(op, {}, program.mesh))
        values = [([*x.shape], str(x.dtype).removeprefix("torch.")) for x in said.values]
        return Text(f"recv_start({values}, {over(op)}, source={said.peer})", f"number {said.number}, {comes} comes")


class Copy(Start[CopyAttrs]):
    """A copy between two memory tiers of a rank. With `writes` it overwrites stored tensors of the state: its
    arguments are those tensors, then the values for them.
    """

    name = "copy_start"
    writes = True
    attrs = CopyAttrs
    pool = "fetch"
    settles = True  # a copy from the device follows the copies to it in its queue, and a read from disk waits for them

    def sent(self, op: Instruction[CopyAttrs]) -> tuple[str, ...]:
        return op.args[len(op.writes) :]

    def check(self, op: Instruction[CopyAttrs], args: list[Value], rules: Rules) -> None:
        _starts(op, rules)
        num = len(op.writes)
        if {*op.tiers} not in ({"device", "host"}, {"host", DISK}):
            rules.bad(op, f"copies from {' to '.join(op.tiers)}")
        # A disk stores only tensors of the state, and what is read from it is a new value.
        if DISK in op.tiers and bool(num) != (op.attrs.target == DISK):
            rules.bad(op, f"writes {num} leaves")
        if num and (len(args) != 2 * num or op.args[:num] != op.writes):
            rules.bad(op, f"copies {len(args) - num} values to {num} leaves")
        rules.pairs(op, args[:num], args[len(args) - num :], "copied")
        for target, source in zip(op.writes, args[len(args) - num :], strict=False):
            # A copy that writes the state must store the new value of the tensor that it writes, not of another one,
            # and not the old value again.
            root = rules.aliases.get(source.name, target)
            if root != target:
                rules.bad(op, f"{source.name}, which is {root} updated, is stored in {target}")
            elif source.name in rules.aliases and source.name not in rules.written | rules.carried:
                rules.bad(op, f"{source.name}, a copy of {target} that no line has written, is stored in it")

    def reads_new(self, op: Instruction[CopyAttrs], name: str, aliases: Mapping[str, str]) -> bool:
        return name in aliases or name in op.writes

    def channel(self, op: Instruction[CopyAttrs]) -> str:
        return DISK if DISK in op.tiers else f"to_{op.attrs.target}"

    def moved_bytes(self, op: Instruction[CopyAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        return 0 if stays(op, mesh) else sum(local_bytes(values[a], mesh) for a in self.sent(op))

    def text(self, op: Instruction[CopyAttrs], program: Program) -> Text:
        moved = size(self.moved_bytes(op, program.values_by_name, program.mesh))
        from_disk = op.attrs.source == DISK
        how = [f"[{', '.join(self.sent(op))}]", f"to={op.attrs.target!r}"]
        how += [f"source={DISK!r}"] if from_disk else []
        how += [f"into=[{', '.join(op.writes)}]"] if op.writes else [*into(op, program)]
        how += ["speculative=True"] if op.speculative and DISK in op.tiers else []
        way = f"from {DISK}" if from_disk else f"to {op.attrs.target}"
        return Text(f"copy_start({', '.join(how)})", f">>> {moved} {way}")

    def runs(self, on: Running) -> Callable[..., Any]:
        starts = {
            ("device", None): on.tiers.to_device_start,
            ("host", None): on.tiers.to_host_start,
            ("host", DISK): on.attempt.on_disk(on.tiers.disk_read_start, writes=False),
            (DISK, None): on.attempt.on_disk(on.tiers.disk_write_start, writes=True),
        }

        def copy_start(values: Sequence[torch.Tensor], to: str, source: str | None = None, **how: Any) -> Any:
            return starts[to, source](values, **how)

        return copy_start


def stays(op: Instruction, mesh: AbstractMesh) -> bool:
    """Returns whether an op is a copy between tiers that moves nothing, because host and device are one memory."""
    return mesh.unified_memory and bool(op.tiers) and DISK not in op.tiers


class Wait(Op[WaitAttrs]):
    """Waits for a transfer and returns its results."""

    name = "wait"
    args = 1
    attrs = WaitAttrs
    computes = ""

    def given(self, op: Instruction[WaitAttrs]) -> Sequence[str]:
        return ()

    def check(self, op: Instruction[WaitAttrs], args: list[Value], rules: Rules) -> None:
        start = rules.started.pop(op.args[0], None)
        if start is None:
            rules.bad(op, f"{op.args[0]} was not started, or is waited for twice")
            return
        moved = not (start.writes or isinstance(start.attrs, ReplicateAttrs | SendAttrs))
        row: Start[Any] = STARTS[start.op]
        sent = [rules.known[a] for a in row.sent(start) if a in rules.known and moved]
        # A receive reads no values of this program, so its attributes say what comes.
        if start.op == Recv.name:
            said, mesh = start.says(SendAttrs), rules.program.mesh
            comes = [(*x, "device") for x in said.values]
            if [(v.local_shape(mesh), v.dtype, v.placement.varies_over, v.tier) for v in op.out] != comes:
                rules.bad(op, "returns different values than it receives")
            return
        if [(v.shape, v.dtype) for v in op.out] != [row.received(start, v) for v in sent]:
            rules.bad(op, "returns different shapes or dtypes than were sent")
            return
        if not op.attrs.host:
            # The host has not waited, so no op of the host may read these values.
            rules.device_only |= {v.name for v in op.out}
            if start.tiers != ("device", "host") or start.writes:
                rules.bad(op, f"only the device waits for {op.args[0]}, which is not a copy of values to the host")
        for v, source in zip(op.out, sent, strict=True):
            if start.tiers:
                self._check_copy(op, v, source, start.tiers[1], rules)
            if v.placement != (arrived := STARTS[start.op].arrives(start, source.placement)):
                rules.bad(op, f"{v.name} is {v.placement}, not {arrived}")

    def _check_copy(self, op: Instruction[WaitAttrs], v: Value, source: Value, tier: str, rules: Rules) -> None:
        if source.name in rules.written | rules.carried:
            rules.carried.add(v.name)
        if (root := rules.root(source.name)) in rules.program.leaves:
            rules.aliases[v.name] = root
        if v.tier != tier:
            rules.bad(op, f"{v.name} is {v}")

    def text(self, op: Instruction[WaitAttrs], program: Program) -> Text:
        how = ["together=True"] if op.attrs.together else []
        how += [] if op.attrs.host else ["host=False"]
        keywords = [*into(op, program), *how] if op.out else []
        return Text(f"wait({', '.join([*op.args, *keywords])})", "<<<", listed=True)

    def runs(self, on: Running) -> Callable[..., Any]:
        return on.wait


STARTS: Mapping[str, Start[Any]] = {
    row.name: row
    for row in (
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        AllToAll(),
        AllToAllV(),
        ReplicateStart(),
        Send(),
        Recv(),
        Copy(),
    )
}
ROWS: Sequence[Op[Any]] = (*STARTS.values(), Wait())
