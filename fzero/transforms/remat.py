"""remat: what a block keeps from its forward for its backward. Acts on the program.

In the base program a block's vjp recomputes its forward from the block's inputs. Keeping more is a split of the block's joint
graph in two: the forward returns saved values beside its outputs, the vjp takes them. What is a view of a parameter is never
kept, whatever the policy: it would keep the gathered parameter alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.fx as fx

from fzero import compat
from fzero.errors import FzeroValueError, message
from fzero.program.block import Joint
from fzero.program.ir import Line, Program, Value
from fzero.program.record import Recorded
from fzero.program.segment import ancestors, extract, views_of
from fzero.program.trace import Functions
from fzero.transforms.base import Transform, applied

POLICIES = ("full", "min_cut", "none")


@dataclass(frozen=True)
class Remat(Transform):
    policy: str = "min_cut"
    order: ClassVar[int] = 40
    name: ClassVar[str] = "remat"


def remat(step: Any = None, policy: str = "min_cut") -> Any:
    """Chooses what each block recomputes in its backward.

    Equal to the untransformed step: bit for bit, recomputation repeats the same operations.

    Args:
        step: a step, or the policy when called without one: `remat("full")`.
        policy: "full" keeps only the inputs of a block and recomputes the rest; "none" keeps everything the backward reads;
            "min_cut", also the default of a step without `remat`, keeps the cut of the block's graph that holds the fewest bytes among those
            whose recomputation is cheap (no matrix product is repeated).

    Communication: none of its own. With `shard_params` parameters are gathered again for the backward under any policy.
    Memory: "full" holds each block's inputs, and one block's intermediates while its backward runs.

    Raises:
        FzeroValueError: an unknown policy.

    Paper: Chen et al., Training deep nets with sublinear memory cost, 2016.
    """
    if isinstance(step, str):
        step, policy = None, step
    if policy not in POLICIES:
        raise FzeroValueError(message("remat", f"unknown policy {policy!r}", fix=f"one of {', '.join(map(repr, POLICIES))}"))
    return applied(Remat(policy), step)


def rewrite(program: Program, policy: str) -> Program:
    """Splits every block that is called both forward and backward."""
    if policy == "full":
        return program
    backward = {line.attrs["call"]: line for line, _ in program.walk() if line.attrs.get("backward")}
    kept = {line.fn for line, _ in program.walk() if line.attrs.get("call") not in backward}
    functions = Functions({name: f for name, f in program.functions.items() if name in kept})
    splits: dict[tuple[Joint, tuple[int, ...]], _Split] = {}
    names: dict[int, dict[str, str]] = {}  # call -> saved node -> value name
    inputs: dict[int, tuple[str, ...]] = {}  # call -> the names of all inputs of the joint graph

    def visit(line: Line) -> list[Line]:
        call: Any = line.attrs.get("call")
        if call not in backward:
            return [line]
        joint: Joint = line.attrs["joint"]
        key = (joint, backward[call].attrs["grads"])
        if key not in splits:
            splits[key] = _split(joint, key[1], policy, functions)
        split = splits[key]
        if not line.attrs["backward"]:
            saved = [Value(f"saved_{call}_{j}", tuple(v.shape), v.dtype) for j, v in enumerate(split.saved.values())]
            names[call] = dict(zip(split.saved, (v.name for v in saved), strict=True))
            args = tuple(line.attrs["inputs"][i] for i in split.forward_inputs)
            return [replace(line, args=args, out=(*line.out, *saved), fn=split.forward, by="remat")]
        inputs[call] = line.attrs["inputs"]
        args = tuple(inputs[call][i] for i in split.backward_inputs) + tuple(names[call][n] for n in split.saved)
        return [replace(line, args=args, fn=split.backward, by="remat")]

    return replace(program.map_lines(visit), functions=functions.by_name)


@dataclass(frozen=True)
class _Split:
    forward: str
    backward: str
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]  # of the joint graph: inputs of the block, then tangents
    saved: dict[str, torch.Tensor]


def _split(joint: Joint, grads: tuple[int, ...], policy: str, functions: Functions) -> _Split:
    graph = joint.graph.graph
    places = graph.find_nodes(op="placeholder")
    outputs = joint.graph.outputs
    forward_outputs = list(outputs[: joint.num_outputs])
    backward_outputs = [outputs[joint.num_outputs + g] for g in grads]
    weights = set(places[: joint.num_params])
    keep = _kept(joint, backward_outputs, weights) if policy == "none" else _min_cut(joint, forward_outputs, backward_outputs, weights)
    keep = [n for n in graph.nodes if n in keep]
    forward, forward_inputs = _pruned(joint.graph, places[: joint.num_inputs], [*forward_outputs, *keep])
    backward, used = _pruned(joint.graph, [*places, *keep], backward_outputs)
    backward_inputs = tuple(i for i in used if i < len(places))
    saved = {keep[i - len(places)].name: keep[i - len(places)].meta["val"] for i in used if i >= len(places)}
    if len(saved) != len(keep):  # what the backward turns out not to read is not saved
        keep = [n for n in keep if n.name in saved]
        forward, forward_inputs = _pruned(joint.graph, places[: joint.num_inputs], [*forward_outputs, *keep])
    return _Split(functions.add(joint.name, forward), functions.add(f"{joint.name}_vjp", backward), forward_inputs, backward_inputs, saved)


def _pruned(source: Recorded, inputs: list[fx.Node], outputs: list[fx.Node]) -> tuple[Recorded, tuple[int, ...]]:
    needed = ancestors(outputs, stop=set(inputs))
    used = tuple(i for i, n in enumerate(inputs) if n in needed)
    return extract(source, [inputs[i] for i in used], outputs), used


def _kept(joint: Joint, backward_outputs: list[fx.Node], weights: set[fx.Node]) -> set[fx.Node]:
    """Everything of the forward that the backward reads, but for inputs, constants and views of parameters."""
    graph = joint.graph.graph
    late: set[fx.Node] = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents_")}
    varying: set[fx.Node] = set(graph.find_nodes(op="placeholder"))
    needed = ancestors(backward_outputs, stop=set())
    for node in graph.nodes:
        if any(a in late for a in node.all_input_nodes):
            late.add(node)
        if any(a in varying for a in node.all_input_nodes):
            varying.add(node)
    views = views_of(graph, weights)
    keep: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in late or node not in varying or node in views or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if any((u in late and u in needed) or u in backward_outputs for u in node.users) or node in backward_outputs:
            keep.add(node)
    return keep


def _min_cut(joint: Joint, forward_outputs: list[fx.Node], backward_outputs: list[fx.Node], weights: set[fx.Node]) -> set[fx.Node]:
    places = joint.graph.inputs
    copy = extract(joint.graph, places, [*forward_outputs, *backward_outputs], names=[n.name for n in places])
    roots = set(copy.inputs[: joint.num_params])
    names = compat.min_cut(copy.module(), joint.num_outputs, views_of(copy.graph, roots))
    views = views_of(joint.graph.graph, weights)
    return {n for n in joint.graph.graph.nodes if n.name in names and n.op == "call_function" and n not in views and isinstance(n.meta["val"], torch.Tensor)}
