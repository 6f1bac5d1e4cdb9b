"""Predicts the seconds of each op of a program, and attributes those of subgraphs to lines of the user's code.

Every operation of a recorded graph knows the user's line that it comes from; an operation of a backward knows the line
that it differentiates. A kernel takes the time of its product or of its bytes, and its time counts for the lines of
the values that it writes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch.fx as fx

from fzero.ir.ops import STARTS, transfer_bytes
from fzero.ir.program import Function, Instruction, Program
from fzero.plan.cost import as_used, on_host, seconds
from fzero.plan.device import Device
from fzero.plan.inductor.fusion import compiler, given_to, kernels
from fzero.plan.inductor.nodes import maker_of
from fzero.trace.flops import product_flops
from fzero.trace.guards.user_frames import Place
from fzero.trace.recorder import source_place

KINDS = ("forward", "backward", "forward and backward", "outside blocks", "update", "other", "host", "transfer", "wait")
"""What an op is for: computing a block, computing outside of blocks, updating the state, casts and other small ops,
computing on the host, moving data, or waiting for data.
"""


class OpCost(NamedTuple):
    """The cost of an op in one step of a rank.

    Attributes:
        kind: one of `KINDS`.
        times: how often it runs.
        seconds: the time of all its runs in its queue: compute, or the channel of a transfer.
        exposed: the time that compute waits at it.
        nbytes: bytes that it sends or copies.
        place: the user's line that it comes from, the one that takes most of its time if there are several; for an op
            that moves data, that of the subgraph which reads or makes the data.
    """

    kind: str
    times: int
    seconds: float
    exposed: float
    nbytes: int
    place: Place | None


def op_costs(program: Program, device: Device, backend: str, exposed: Mapping[int, float]) -> list[OpCost]:
    """Returns the cost of each op, in the order of `Program.walk`.

    Args:
        program: a lowered program.
        device: the rates of a rank's device.
        backend: the backend of the subgraphs.
        exposed: the seconds that compute waits, by op.
    """
    rates = as_used(device, program)
    shares = line_shares(program, rates, backend)
    places = _places(program, {fn: max(lines, key=lambda at: lines[at]) for fn, lines in shares.items() if lines})
    return [
        OpCost(
            kind_of(op, program, device),
            times,
            times * seconds(op, program, rates, backend),
            exposed.get(i, 0.0),
            times * transfer_bytes(op, program.values_by_name, program.mesh) if op.op in STARTS else 0,
            places[i],
        )
        for i, (op, times) in enumerate(program.walk())
    ]


def kind_of(op: Instruction, program: Program, device: Device) -> str:
    """Returns what an op is for, one of `KINDS`."""
    if op.op in STARTS:
        return "transfer"
    if op.is_wait:
        return "wait"
    if device.asynchronous and on_host(op, program):
        return "host"
    if op.is_forward or op.is_backward:
        return "forward" if op.is_forward else "backward"
    if op.block is not None:
        return "forward and backward"
    if not op.fn:
        return "other"
    return "update" if op.writes or op.by == "optimizer" else "outside blocks"


# --- the user's lines ---


def line_seconds(program: Program, costs: list[OpCost], device: Device, backend: str) -> dict[Place, dict[str, float]]:
    """Returns the seconds per step that subgraphs take for each line of the user's code, by kind."""
    shares = line_shares(program, as_used(device, program), backend)
    found: dict[Place, dict[str, float]] = {}
    for (op, _), cost in zip(program.walk(), costs, strict=True):
        for place, share in shares.get(op.fn, {}).items():
            kinds = found.setdefault(place, {})
            kinds[cost.kind] = kinds.get(cost.kind, 0.0) + share * cost.seconds
    return found


def line_shares(program: Program, device: Device, backend: str) -> dict[str, dict[Place, float]]:
    """Returns for each subgraph that is called the share of its time that each of the user's lines takes."""
    called = {op.fn: program.functions[op.fn] for op, _ in program.walk() if op.fn}
    made_by = compiler(program.mesh, backend)
    return {name: _shares(function, device, made_by) for name, function in called.items()}


def _shares(function: Function, device: Device, made_by: str) -> dict[Place, float]:
    graph = given_to(made_by, function.graph, function.into)
    taken: dict[Place, float] = defaultdict(float)
    for kernel in kernels(graph, made_by).kernels:
        time = kernel.nbytes / device.memory_bandwidth
        if kernel.product is not None:
            dtype = kernel.product.all_input_nodes[0].meta["val"].dtype
            time = max(time, product_flops(kernel.product) / device.rate(dtype))
        nodes = [kernel.product] if kernel.product is not None else [*kernel.writes]
        places = {place for node in nodes if (place := place_of(node)) is not None}
        for place in places:
            taken[place] += time / len(places)
    total = sum(taken.values())
    if not total:  # a subgraph of views only
        places = {place for node in graph.graph.nodes if (place := place_of(node)) is not None}
        return dict.fromkeys(sorted(places), 1 / max(1, len(places)))
    return {place: time / total for place, time in taken.items()}


_FAR = 8  # operations: how far from a rewritten operation one that knows its line is looked for


def place_of(node: fx.Node) -> Place | None:
    """Returns the user's line of an operation; of an operation that a transform has inserted or rewritten, that of the
    nearest operation that it reads.
    """
    todo = [maker_of(node)]
    for _ in range(_FAR):
        nearer = list[fx.Node]()
        for n in todo:
            if (place := source_place(n)) is not None:
                return place
            nearer += n.all_input_nodes
        todo = nearer
    return None


def _places(program: Program, of_functions: Mapping[str, Place]) -> list[Place | None]:
    """Returns the user's line of each op: that of its subgraph. An op that moves or casts values has the line of the
    first subgraph that reads them, or else of the one that makes what it reads.
    """
    ops = [op for op, _ in program.walk()]
    found = [of_functions.get(op.fn) if op.fn else None for op in ops]
    made = {v.name: place for op, place in zip(ops, found, strict=True) if place for v in op.out}
    read: dict[str, Place] = {}  # by name, the line of the first subgraph that reads it, through waits and casts
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if not op.fn and not op.body:
            found[i] = next((read[v.name] for v in op.out if v.name in read), None)
        if (place := found[i]) is not None:
            read.update(dict.fromkeys(op.args, place))
    for i, op in enumerate(ops):
        if found[i] is None and not op.fn and not op.body:
            found[i] = next((made[a] for a in op.args if a in made), None)
            if (place := found[i]) is not None:
                made.update((v.name, place) for v in op.out)
    return found


def shown_path(filename: str) -> str:
    """Returns a path as a page shows it: relative to the current folder, or from the folder of installed packages on,
    or else the last two parts. A page names no folder of the machine that made it, not even if the current folder is
    the root of the file system, to which every path is relative.

    Example:
        >>> shown_path("/opt/lib/site-packages/transformers/models/llama/modeling_llama.py")
        'transformers/models/llama/modeling_llama.py'
        >>> shown_path("/home/someone/project/model.py")
        'project/model.py'
    """
    for folder in ("site-packages", "dist-packages"):
        _, found, after = filename.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return after
    relative = os.path.relpath(filename)
    outside = relative.startswith(os.pardir) or os.getcwd() == os.path.abspath(os.sep)
    return os.sep.join(os.path.abspath(filename).split(os.sep)[-2:]).lstrip(os.sep) if outside else relative
