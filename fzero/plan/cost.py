"""Costs the ops of a program: floating point operations and bytes, from shapes alone, and seconds on a given device.

[Note: seconds] The matrix products of a subgraph take the larger of FLOPs / rate and bytes / bandwidth. Compilers
fuse the operations between products. Each fused kernel (inductor/fusion.py) takes the larger of its bytes / bandwidth
and its transcendental functions / their rate. The two times add up, because products and the rest run one after the
other. A roofline of the complete subgraph, which takes the larger of the two, is below what is measured.

Each subgraph is analyzed once, however many ops call it: costing a program of a thousand layers takes as long as
costing one of two.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.ir.attributes import BlockCall
from fzero.ir.ops import DISK, OPS, STARTS, transfer_bytes
from fzero.ir.ops.transfers import AllReduce
from fzero.ir.program import Function, Instruction, Program, local_bytes
from fzero.mesh import AbstractMesh
from fzero.plan.device_lookup import Device, Link
from fzero.plan.inductor.fusion import compiler, given_to, kernels
from fzero.plan.inductor.temporaries import temporaries_on
from fzero.trace.flops import attention_of, packet, product_flops
from fzero.trace.joint_graph import Joint
from fzero.trace.subgraph import ancestors

aten = torch.ops.aten

BACKENDS = ("inductor", "eager")


def check_backend_name(owner: str, backend: str) -> None:
    """Raises an error, on behalf of `owner`, for an unknown backend name."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise FzeroValueError(owner, f"unknown backend {backend!r}", fix=f"one of {', '.join(map(repr, BACKENDS))}")


@dataclass(frozen=True)
class Cost:
    """The cost of running a subgraph once.

    Attributes:
        flops: floating point operations of its products, by the dtype they run in.
        attention: the part of `flops` that is fused attention, by dtype, "forward" or "backward", and the number of
            positions that are attended to.
        product_bytes: bytes that products read and write.
        bytes: bytes that all kernels read and write.
        transcendentals: for each kernel that computes transcendental functions, its bytes and the number of elementwise
            evaluations of such functions.
        num_kernels: number of products and fused kernels.
        num_calls: number of calls from Python.
    """

    flops: Mapping[torch.dtype, float] = field(default_factory=dict)
    attention: Mapping[tuple[torch.dtype, str, int], float] = field(default_factory=dict)
    bytes: float = 0.0
    product_bytes: float = 0.0
    transcendentals: tuple[tuple[float, float], ...] = ()
    num_kernels: int = 0
    num_calls: int = 1

    def seconds(self, device: Device) -> float:
        """Returns the predicted time on a device. See [Note: seconds]."""
        products = sum(flops / device.rate(dtype) for dtype, flops in self.flops.items())
        # `flops` includes attention at the rate of other products; here, its time is replaced by
        # that at the rate of attention.
        products += sum(
            flops * (1 / device.rate(dtype, way, positions) - 1 / device.rate(dtype))
            for (dtype, way, positions), flops in self.attention.items()
        )
        products = max(products, self.product_bytes / device.memory_bandwidth)
        rest = (self.bytes - self.product_bytes) / device.memory_bandwidth
        rest += sum(
            # The time of the bytes of these kernels is included already, so only the excess is
            # added.
            max(0.0, count / device.transcendentals - nbytes / device.memory_bandwidth)
            for nbytes, count in self.transcendentals
        )
        return products + rest + self.num_calls * device.call_seconds


_costs: dict[str, weakref.WeakKeyDictionary[Function, Cost]] = {}


def cost_of(function: Function, backend: str = "inductor") -> Cost:
    """Returns the FLOPs and bytes of one call, computed once per subgraph and backend.

    Args:
        function: a subgraph of a program.
        backend: "inductor" and "triton", where chains of pointwise operations write no intermediate results, or
            "eager", where every operation does.
    """
    known = _costs.setdefault(backend, weakref.WeakKeyDictionary())
    if function not in known:
        known[function] = _cost(function, backend)
    return known[function]


def _cost(function: Function, backend: str) -> Cost:
    """Computes the cost of a subgraph, from its graph and its predicted kernels."""
    found = kernels(given_to(backend, function.graph, function.into), backend)
    flops: dict[torch.dtype, float] = defaultdict(float)
    attention: dict[tuple[torch.dtype, str, int], float] = defaultdict(float)
    for node in function.graph.graph.nodes:
        if amount := product_flops(node):
            flops[_dtype(node)] += amount
            if way := attention_of(node):
                attention[_dtype(node), way, _positions(node, way)] += amount
    return Cost(
        flops=dict(flops),
        attention=dict(attention),
        bytes=sum(k.nbytes for k in found.kernels),
        product_bytes=sum(k.nbytes for k in found.kernels if k.product is not None),
        transcendentals=tuple((k.nbytes, k.transcendentals) for k in found.kernels if k.transcendentals),
        num_kernels=len(found.kernels),
    )


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.all_input_nodes[-1 if packet(node) in (aten.addmm, aten.baddbmm) else 0].meta["val"]
    return value.dtype


def _positions(node: fx.Node, way: str) -> int:
    """Returns the number of positions of the keys of fused attention."""
    keys = node.args[1 if way == "forward" else 2]
    return keys.meta["val"].shape[-2]  # type: ignore[union-attr]


# --- ops ---

HOST = "host"


def on_host(op: Instruction, program: Program) -> bool:
    """Returns whether the host computes an op, on a mesh whose host has separate memory."""
    if program.mesh.unified_memory or op.op in STARTS:
        return False
    return OPS[op.op].on_host(op, program.values_by_name[op.args[0]] if op.args else None)


def host_bytes(op: Instruction, program: Program, backend: str = "inductor") -> float:
    """Returns the bytes that an op which the host computes reads and writes there."""
    if op.fn:
        return cost_of(program.functions[op.fn], backend).bytes
    return OPS[op.op].touched(op, program.values_by_name, program.mesh)


def channel(op: Instruction) -> str | None:
    """Returns the queue that a start joins: `gather:data`, or `reduce:data` for reductions over the axis `data`;
    `to_host`, `to_device` and `disk`, whose reads and writes share one device; None for an op that moves nothing.
    """
    row = STARTS.get(op.op)
    return None if row is None else row.channel(op)


def seconds(op: Instruction, program: Program, device: Device, backend: str = "inductor") -> float:
    """Returns the time of one execution of an op on a device. A start takes the time of its transfer; a wait, or a
    loop itself, takes none.

    A transfer takes latency x steps + bytes / bandwidth, with ring algorithms: see `transfer_seconds`.
    """
    if on_host(op, program):  # bound by memory, whatever the arithmetic is
        return host_bytes(op, program, backend) / device.host_memory_bandwidth + (device.call_seconds if op.fn else 0.0)
    if op.fn:
        return cost_of(program.functions[op.fn], compiler(program.mesh, backend)).seconds(device)
    if op.op in STARTS:
        return transfer_seconds(op, program, device)
    return OPS[op.op].touched(op, program.values_by_name, program.mesh) / device.memory_bandwidth


def transfer_seconds(op: Instruction, program: Program, device: Device) -> float:
    """Returns the time of one transfer.

    Transfers between ranks go around a ring: each of its steps pays the latency of the link that it crosses. Every
    rank of a host sends its share of the bytes over the host's links, so an axis with k ranks on each host has k of
    these links.
    """
    mesh = program.mesh
    row = STARTS[op.op]
    if op.tiers:
        nbytes = transfer_bytes(op, program.values_by_name, mesh)
        source, target = op.tiers
        link = device.disk_read if source == DISK else device.disk_write if target == DISK else device.host_copy
        return link.seconds(nbytes) if nbytes else 0.0
    size = mesh.axis_size(op.axes)
    if size == 1:
        return 0.0
    intra, inter, per_host = _links(mesh, op.axes, device)
    num_hosts = -(-size // per_host)
    if row.direct:
        link = direct_link(mesh, op.axes, device)
        return link.latency + transfer_bytes(op, program.values_by_name, mesh) / link.bandwidth
    if isinstance(row, AllReduce):  # small messages go up and down a tree
        inside, across = (2 * math.ceil(math.log2(n)) for n in (per_host, num_hosts))
    else:
        # A ring takes size - 1 steps. On the way around it, data passes once from each host to the
        # next.
        across = num_hosts if num_hosts > 1 else 0
        inside = max(0, size - 1 - across)
    sent = transfer_bytes(op, program.values_by_name, mesh)
    return inside * intra.latency + across * inter.latency + sent / link_bandwidth(mesh, op.axes, device)


def link_bandwidth(mesh: AbstractMesh, axes: tuple[str, ...], device: Device) -> float:
    """Returns the bytes/s of a rank in a ring along axes."""
    intra, inter, per_host = _links(mesh, axes, device)
    if per_host >= mesh.axis_size(axes):
        return intra.bandwidth
    return inter.bandwidth if per_host == 1 else min(intra.bandwidth, per_host * inter.bandwidth)


def direct_link(mesh: AbstractMesh, axes: tuple[str, ...], device: Device) -> Link:
    """Returns the slowest link from a rank to one other rank along axes."""
    intra, inter, per_host = _links(mesh, axes, device)
    return intra if per_host >= mesh.axis_size(axes) else inter


def _links(mesh: AbstractMesh, axes: tuple[str, ...], device: Device) -> tuple[Link, Link, int]:
    """Returns the links of a group along axes within a host and between hosts, and how many of its ranks share a
    host.
    """
    return device.links["intra"], device.links["inter"], ranks_per_host(mesh, axes, device.devices_per_host)


def on_mesh(device: Device, mesh: AbstractMesh) -> Device:
    """Returns the device with its share of a host that has as many ranks as the mesh has on one host."""
    return device.shared_by(min(device.devices_per_host, mesh.size))


def as_used(device: Device, program: Program) -> Device:
    """Returns the device of a mesh with the disk rates that the program sees: they are lower if a step both reads and
    writes, because reads and writes slow each other down.
    """
    device = on_mesh(device, program.mesh)
    used = {op.tiers for op, _ in program.walk()}
    if not device.disk_mixed or not used >= {("disk", "host"), ("host", "disk")}:
        return device
    read, write = device.disk_read, device.disk_write
    # compared with reads and writes that take turns
    slower = min(1.0, device.disk_mixed / (2 / (1 / read.bandwidth + 1 / write.bandwidth)))
    return replace(
        device,
        disk_read=Link(read.latency, slower * read.bandwidth),
        disk_write=Link(write.latency, slower * write.bandwidth),
    )


def ranks_per_host(mesh: AbstractMesh, axes: tuple[str, ...], devices_per_host: int) -> int:
    """Returns the number of ranks of a group along `axes` that share a host, on the host with the fewest. Ranks are
    row-major over the mesh's axes.
    """
    return _fewest(tuple(mesh.axes.items()), axes, devices_per_host)


@functools.lru_cache(maxsize=1024)
def _fewest(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], devices_per_host: int) -> int:
    size, stride, offsets = dict(mesh), dict[str, int](), [0]
    for i, (name, _) in enumerate(mesh):
        stride[name] = math.prod(n for _, n in mesh[i + 1 :])
    for name in axes:
        offsets = [o + stride[name] * i for o in offsets for i in range(size[name])]
    # the first rank of each group; adding `offsets` gives its other ranks
    firsts = [
        rank for rank in range(math.prod(size.values())) if all(rank // stride[name] % size[name] == 0 for name in axes)
    ]
    return min(min(Counter((first + o) // devices_per_host for o in offsets).values()) for first in firsts)


# --- a step ---


def model_flops(program: Program) -> float:
    """Returns the FLOPs of the products that a rank's part of the batch takes in one step, without recomputation: the
    numerator of model FLOPs utilization.

    The FLOPs of a block are counted in its joint graph of forward and backward, where each product occurs once.
    Subgraphs outside blocks count as they run. The backward of attention counts as twice its forward, without the
    scores that fused attention recomputes. For a chain of layers the total is three times the forward. If the values
    of a block are sharded, a rank counts its share.
    """
    total = 0.0
    ranks = math.prod(program.mesh.axes[axis] for t in program.transforms for axis in t.flops_axes)
    for op, times in program.walk():
        if not op.fn:
            continue
        if (block := op.block) is not None and block.part != "both":
            total += times * _joint_flops(block) / ranks if op.begins_block else 0
        else:
            total += times * _counted(program.functions[op.fn].graph.graph.nodes)
    return total


_joint: weakref.WeakKeyDictionary[Joint, dict[Any, float]] = weakref.WeakKeyDictionary()


def _joint_flops(block: BlockCall) -> float:
    joint, backward, grads = block.joint, block.part == "backward", block.grads
    known = _joint.setdefault(joint, {})
    if (backward, grads) not in known:
        outputs = joint.graph.outputs
        nodes = ancestors(outputs[: joint.num_outputs], stop=set())
        if backward:
            nodes = ancestors([outputs[joint.num_outputs + g] for g in grads], stop=set()) - nodes
        known[backward, grads] = _counted(nodes)
    return known[backward, grads]


def _counted(nodes: Iterable[fx.Node]) -> float:
    """Returns the model FLOPs of some nodes: those of the products, with the backward of attention at twice its
    forward, although its kernel takes 2.5 times.
    """
    total = 0.0
    for node in nodes:
        # 0.8 = 2 / 2.5
        total += product_flops(node) * (0.8 if attention_of(node) == "backward" else 1)
    return total


__all__ = [
    "DISK",
    "HOST",
    "Cost",
    "as_used",
    "channel",
    "cost_of",
    "direct_link",
    "host_bytes",
    "link_bandwidth",
    "local_bytes",
    "model_flops",
    "on_host",
    "on_mesh",
    "product_flops",
    "seconds",
    "temporaries_on",
    "transfer_seconds",
]
