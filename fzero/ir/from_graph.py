"""Converts graphs into ops: records the loss, its gradients and the optimizer on abstract values and turns them into
a program.

The result is the base form of a step, for one process: every parameter is unsharded, blocks are not split (a vjp
recomputes its forward), and one `update` op is the complete optimizer. Every transform rewrites this program.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fzero import tree
from fzero._compat import compat
from fzero.ir.attributes import BlockCall, CallAttrs
from fzero.ir.program import Function, Instruction, Value
from fzero.ir.value_names import Names
from fzero.sharding.layout import Leaf
from fzero.trace.block_calls import Blocks
from fzero.trace.functionalization import finish
from fzero.trace.joint_graph import Joint, call_block, call_vjp
from fzero.trace.recorder import Recorded, Recorder
from fzero.trace.subgraph import ancestors, extract, signature, views_of


@dataclass(frozen=True, eq=False)
class Inputs:
    """An abstract pytree of arguments: its structure, and a `Leaf` for every position. It compares equal only to
    itself; use `alike` to compare it with others.

    `ties[i]` is the position of the first leaf that is the same tensor as leaf `i`.
    """

    structure: tree.TreeSpec
    leaves: tuple[Leaf, ...]
    ties: tuple[int, ...]

    @property
    def distinct(self) -> list[int]:
        return [i for i, t in enumerate(self.ties) if i == t]

    def alike(self, other: Inputs) -> bool:
        return (self.leaves, self.ties, self.structure) == (other.leaves, other.ties, other.structure)

    def rebuild(self, distinct: Mapping[int, Any]) -> Any:
        """Returns the tree with `distinct[i]` at position `i` and at every position tied to it, and None at positions
        that are missing.
        """
        return tree.unflatten(self.structure, [distinct.get(t) for t in self.ties])


class Functions:
    """The subgraphs of a program, deduplicated: equal graphs become one `Function`.

    Args:
        known: the subgraphs so far, which are extended.
        taken: further names that no partition gets.
    """

    def __init__(self, known: Mapping[str, Function] | None = None, taken: Collection[str] = ()) -> None:
        self.by_name: dict[str, Function] = dict(known or {})
        self._taken = taken
        self._by_signature: dict[Any, str] = {(signature(f.graph), f.writes): f.name for f in self.by_name.values()}
        self._names = Names(self.by_name)

    def add(self, name: str, graph: Recorded, writes: tuple[int, ...] = ()) -> str:
        key = (signature(graph), writes)
        if key not in self._by_signature:
            self._by_signature[key] = self._names(name)
            self.by_name[self._by_signature[key]] = Function(self._by_signature[key], graph, writes)
        return self._by_signature[key]

    def add_partition(self, of: str, graph: Recorded) -> str:
        """Adds a partition of a subgraph, with the name of its block and a number: `layer_part0`, `layer_part1`, …."""
        names = (f"{of}_part{number}" for number in itertools.count())
        return self.add(next(x for x in names if x not in self.by_name and x not in self._taken), graph)


def run_traced(
    owner: str,
    fn: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[tuple[str, torch.Size | tuple[int, ...], torch.dtype]],
    device: str,
    source: Any,
    casts: bool,
    watch: bool = False,
) -> Recorded:
    """Records `fn(*fakes) -> flat list of tensors`, with each block call as a single node.

    `casts`: whether blocks cast their arguments (trace/block.py). With `watch`, and if there are any block calls, the
    last result is a vector with the largest absolute value of each call's outputs.
    """
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(owner, source)
    fakes = [compat.new_fake(mode, shape, dtype, device) for _, shape, dtype in inputs]
    for i, (fake, (name, _, _)) in enumerate(zip(fakes, inputs, strict=True)):
        recorder.input(fake, f"in_{i}", name).meta["name"] = name
    blocks = Blocks(recorder, mode, casts, watch)
    with mode:
        with recorder.recording(), blocks.active():
            outputs = [*fn(*fakes), *([torch.stack(blocks.maxima)] if watch and blocks.maxima else [])]
        graph = finish(recorder, outputs)
    graph.graph.eliminate_dead_code()
    return graph


# --- ops from a graph ---


class GraphOps:
    """Converts a recorded graph into ops: one op for each block call, and one subgraph for each run of other
    operations between block calls.
    """

    def __init__(self, graph: Recorded, functions: Functions, names: Names, result_names: Mapping[fx.Node, str]):
        self.graph, self.functions, self.names = graph, functions, names
        self.ops: list[Instruction] = []
        self.name: dict[fx.Node, str] = {}
        self._wanted = result_names
        self._run: list[fx.Node] = []
        self._num_runs = 0
        # the subgraphs of blocks, and which of the block's inputs each reads
        self._subgraphs: dict[tuple[Joint, bool, tuple[Any, ...]], tuple[str, list[int]]] = {}
        nodes = graph.graph.nodes
        self._inputs = [n for n in nodes if n.op == "placeholder"]
        self.name.update((n, n.meta["name"]) for n in self._inputs)
        self._views = views_of(graph.graph, set(self._inputs))
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.target in (call_block, call_vjp):
                self._flush()
                self._block(node)
            elif node.target is operator.getitem and node.args[0].target in (call_block, call_vjp):
                continue
            else:
                self._run.append(node)
        self._flush()

    def _block(self, node: fx.Node) -> None:
        """Appends one op: the forward, or the vjp that recomputes it. Inputs that the graph does not read are not
        passed.
        """
        joint: Joint = node.args[0]  # type: ignore[assignment]
        call: int = node.args[1]  # type: ignore[assignment]
        backward = node.target is call_vjp
        places, outputs = joint.graph.inputs, joint.graph.outputs
        outputs = outputs[joint.num_outputs :] if backward else outputs[: joint.num_outputs]  # type: ignore[index]
        results: dict[Any, fx.Node] = {g.args[1]: g for g in node.users}
        # A vjp computes only the gradients that something reads.
        used = tuple(sorted(results)) if backward else tuple(range(joint.num_outputs))
        key = (joint, backward, used)
        if key not in self._subgraphs:
            wanted = [outputs[i] for i in used]
            needed = ancestors(wanted, stop=set(places))
            reads = [i for i, p in enumerate(places) if p in needed]
            graph = extract(joint.graph, [places[i] for i in reads], wanted)
            self._subgraphs[key] = self.functions.add(f"{joint.name}_vjp" if backward else joint.name, graph), reads
        fn, reads = self._subgraphs[key]
        base, out = f"d_{joint.name}_{call}" if backward else f"{joint.name}_{call}", []
        for i in used:
            got = results.get(i)
            name = self._wanted.get(got) if got is not None else None
            name = self.names(name or (base if len(used) == 1 else f"{base}_{i}"))
            if got is not None:
                self.name[got] = name
            out.append(_value(outputs[i], name))
        inputs = tuple(self.name[a] for a in node.args[2:])  # type: ignore[index]
        part = "backward" if backward else "forward"
        block = BlockCall(joint, call, part, inputs, used if backward else ())
        self.ops.append(Instruction("call", tuple(inputs[i] for i in reads), tuple(out), fn, CallAttrs(block=block)))

    def _flush(self) -> None:
        """Appends the operations since the last block call as one subgraph. Views of inputs are computed again
        wherever they are used.
        """
        run, self._run = [n for n in self._run if n not in self._views], []
        inside = set(run)
        # A block that takes a view of a parameter needs the view as a value, so such views join the run before it.
        outputs = [n for n in run if any(u not in inside for u in n.users)]
        wanted_views = (
            n
            for n in self._views
            if n not in self.name and any(u.target in (call_block, call_vjp) or u.op == "output" for u in n.users)
        )
        outputs += sorted(wanted_views)  # in the order of the graph: sets of nodes iterate in the order of addresses
        if not outputs:
            return
        inputs = [n for n in _inputs_of(outputs, inside | self._views) if n not in inside]
        graph = extract(self.graph, inputs, outputs)
        self._num_runs += 1
        out = []
        for node in outputs:
            self.name[node] = self.names(self._wanted.get(node) or f"t_{self._num_runs}_{len(out)}")
            out.append(_value(node, self.name[node]))
        self.ops.append(
            Instruction(
                "call",
                tuple(self.name[n] for n in inputs),
                tuple(out),
                self.functions.add(f"glue_{self._num_runs}", graph),
            )
        )


def _value(node: fx.Node, name: str) -> Value:
    val = node.meta["val"]
    return Value(name, tuple(val.shape), val.dtype)


def _inputs_of(outputs: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Returns the nodes outside `inside` that `outputs` depend on, in a fixed order."""
    seen: dict[fx.Node, None] = {}
    todo = list(reversed(outputs))
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen[node] = None
        if node in inside:
            todo.extend(reversed(node.all_input_nodes))
    return [n for n in seen if n not in inside and n.op != "get_attr"]
