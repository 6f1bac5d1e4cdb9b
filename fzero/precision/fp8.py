"""Replaces products with selected parameters by products in 8 bits, in the recorded graph, before it is laid out as
lines.

Each selected parameter has three products: the forward's product reads it (through views and casts), the product for
the input's gradient reads it too, and the third makes its own gradient. Each is replaced by two roundings and one
`scaled_mm` (fzero/operators/scaled_matmul.py); equal roundings are one, so that what the forward rounded is there for
the backward. A product is done so if it is a whole parameter that it reads, and if its three dims are multiples of 16.

A parameter that nothing but such products reads may come rounded already, with its scale: a byte an element travels.
Every rank rounds its shard by the largest of all ranks' scales, which is that of the whole.

It must not know which parameters to select, or why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from fzero import compat
from fzero.errors import TransformError
from fzero.layout import Leaf
from fzero.operators.scaled_matmul import E4M3, E5M2, MULTIPLE, quantized, scaled_mm
from fzero.precision.products import dims, factors, fits, only_multiplied, origin, summands, unviewed
from fzero.program.lines import Inputs
from fzero.trace.joint import Joint, call_block, call_vjp
from fzero.trace.merge_equal import merge_equal
from fzero.trace.record import record
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import extract, inlined, reached

aten = torch.ops.aten


@dataclass(frozen=True)
class InFp8:
    """Selects the products of a step that are done in 8 bits.

    Attributes:
        selects: whether those with a parameter are.
        rows: whether each row of the first operand and each column of the second has a scale; otherwise an operand has
            one.
        gathers: whether sharded parameters travel in 8 bits.
    """

    selects: Callable[[Leaf], bool]
    rows: bool = False
    gathers: bool = True

    def multiplied(self, params: Inputs) -> list[int]:
        """The positions of the parameters whose products are. Of a tied leaf all paths are asked."""
        refused = {tie for leaf, tie in zip(params.leaves, params.ties, strict=True) if not self.selects(leaf)}
        return [i for i in params.distinct if i not in refused]

    def comes_rounded(self, leaf: Leaf) -> bool:
        """Whether a selected parameter comes in 8 bits, if nothing but products reads it: a shard, of which all ranks
        make the whole."""
        return self.gathers and not self.rows and bool(leaf.layout.axes) and leaf.layout.tier == "device"


@dataclass
class ProductUses:
    """The products with one parameter: how many are done in 8 bits, and the dims of those that cannot be."""

    done: int = 0
    left: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, other: ProductUses) -> None:
        self.done += other.done
        self.left += other.left


@dataclass(frozen=True, eq=False)
class _Block:
    """A block with the products of some of its inputs replaced, and those by the number of the input."""

    joint: Joint
    uses: Mapping[int, ProductUses]


def rewrite(
    graph: Recorded,
    weights: Mapping[fx.Node, fx.Node | None],
    seeds: Collection[fx.Node],
    fp8: InFp8,
    sharded: Collection[fx.Node],
    paths: Mapping[fx.Node, str],
) -> tuple[Recorded, Mapping[fx.Node, fx.Node]]:
    """The function with some inputs' products replaced, in itself and in the blocks it calls. Each input that only
    products read comes rounded, with its scale as a new input.

    Args:
        graph: of a step's loss and gradients, or of an evaluation; not to be used any more.
        weights: the inputs, each with the output that is its gradient, if it has one.
        seeds: what gradients are computed from; none in an evaluation.
        fp8: which products, and how.
        sharded: the inputs that may come in float8_e4m3fn.
        paths: what the user knows the inputs as.

    Raises:
        TransformError: there is none that could be replaced.
    """
    blocks: dict[Any, _Block] = {}
    uses: dict[fx.Node, ProductUses] = defaultdict(ProductUses)
    nodes = list(graph.graph.nodes)
    late = reached(graph.graph, [*seeds, *(n for n in nodes if n.target is call_vjp)])
    rounded = [n for n in weights if n in sharded and only_multiplied(n)]
    scales = _come_rounded(graph, len(graph.inputs), "in_{}", rounded)
    for weight, done in _replace(graph.graph, weights, late, fp8.rows, scales).items():
        uses[weight].add(done)
    for node in nodes:
        if node.target in (call_block, call_vjp):
            joint, call, *_ = node.args
            inputs = node.args[2 : 2 + joint.num_inputs]
            selected = frozenset(i for i, n in enumerate(inputs) if origin(n) in weights)
            given = tuple(i for i, n in enumerate(inputs) if n in scales)
            key = joint, selected, given
            if key not in blocks:
                blocks[key] = _in_block(*key, fp8.rows)
            block, more = blocks[key], [scales[inputs[i]] for i in given]
            node.args = (block.joint, call, *inputs, *more, *node.args[2 + joint.num_inputs :])
            for i in selected if node.target is call_block else ():
                uses[origin(inputs[i])].add(block.uses[i])
    if not any(u.done for u in uses.values()):
        problems = [f"{paths[n]}: {_why(uses[n])}" for n in weights] or ["no leaf is selected"]
        raise TransformError("fp8", "no product of this step can be done in 8 bits", problems, _FIX)
    graph.graph.eliminate_dead_code()
    return replace(graph), scales


_FIX = (
    f"fp8 multiplies whole 2-d leaves; both their dims, and the tokens of a rank's micro-batch, are multiples of "
    f"{MULTIPLE}"
)


def _why(uses: ProductUses) -> str:
    left = ", ".join(" x ".join(map(str, d)) for d in dict.fromkeys(uses.left))
    return f"its products are of {left}" if left else "no product reads the whole of it"


def _come_rounded(graph: Recorded, behind: int, name: str, weights: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Makes inputs of a function come in float8_e4m3fn, and adds the scale of each behind so many inputs."""
    last, scales = graph.inputs[behind - 1], dict[fx.Node, fx.Node]()
    for number, weight in enumerate(weights, behind + 1):
        value = weight.meta["val"]
        with graph.graph.inserting_after(last):
            last = scales[weight] = graph.graph.placeholder(name.format(number))
        last.meta["val"] = compat.new_fake(value.fake_mode, (), torch.float32, value.device)
        weight.meta["val"] = compat.new_fake(value.fake_mode, value.shape, E4M3, value.device, value.stride())
    return scales


def _in_block(joint: Joint, selected: frozenset[int], given: Sequence[int], rows: bool) -> _Block:
    """The scales of what is given rounded are inputs behind the others."""
    if not selected:
        return _Block(joint, {})
    graph = extract(joint.graph, joint.graph.inputs, joint.graph.outputs, names=[n.name for n in joint.graph.inputs])
    places, grads = graph.inputs, dict(zip(joint.diff, graph.outputs[joint.num_outputs :], strict=True))
    late = reached(graph.graph, places[joint.num_inputs :])
    scales = _come_rounded(graph, joint.num_inputs, "primals_{}", [places[i] for i in given])
    found = _replace(graph.graph, {places[i]: grads.get(i) for i in sorted(selected)}, late, rows, scales)
    graph.graph.eliminate_dead_code()
    changed = replace(joint, graph=replace(graph), num_inputs=joint.num_inputs + len(given))
    return _Block(changed, {i: found[places[i]] for i in selected})


def _replace(
    graph: fx.Graph,
    weights: Mapping[fx.Node, fx.Node | None],
    late: Collection[fx.Node],
    rows: bool,
    scales: Mapping[fx.Node, fx.Node],
) -> dict[fx.Node, ProductUses]:
    """Replaces the products with `weights` in a graph. `late`: the nodes that depend on a gradient; `scales`: of those
    that are rounded already.

    Equal roundings are merged between two calls of blocks, as these lines become one function: a block chooses its
        saved values, and nothing is saved between two functions.
    """
    uses, runs, run, late = {n: ProductUses() for n in weights}, dict[fx.Node, int](), 0, set(late)
    makes = {
        product: weight
        for weight, grad in weights.items()
        for product in ([] if grad is None else summands(grad))
        if product in late
    }
    for node in list(graph.nodes):
        run += node.target in (call_block, call_vjp)
        found = factors(node)
        weight = next((w for w in (*map(origin, found), makes.get(node)) if w in weights), None) if found else None
        if weight is None or late.issuperset(found):
            continue
        if not fits(node):
            uses[weight].left.append(dims(found))
            continue
        made, result = _scaled(graph, node, found, [E5M2 if f in late else E4M3 for f in found], rows, scales)
        runs.update(dict.fromkeys(made, run))
        if node in late:
            late.add(result)
        uses[weight].done += 1
    merge_equal(graph, runs)
    return uses


def _scaled(
    graph: fx.Graph,
    node: fx.Node,
    found: Sequence[fx.Node],
    formats: Sequence[torch.dtype],
    rows: bool,
    scales: Mapping[fx.Node, fx.Node],
) -> tuple[list[fx.Node], fx.Node]:
    """Puts a product in 8 bits in the place of one. Operands with one scale are rounded as they lie, before they are
    viewed as matrices: the views of one tensor share it. Args: as of `_replace`. Returns: the new nodes, and the result
    among them."""
    roots = [(f, []) if rows else unviewed(f) for f in found]
    bias = [node.args[0]] if node.target is aten.addmm.default else []
    given = {i: scales[n] for i, (n, _) in enumerate(roots) if n in scales}
    inputs: list[Any] = [*(n for n, _ in roots), *bias, *given.values()]
    batched, out = node.target is aten.bmm.default, node.meta["val"]
    beta: Any = node.kwargs.get("beta", 1)

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        matrices, scales = [], []
        more = dict(zip(given, xs[len(roots) + len(bias) :], strict=True))
        for i, (x, (_, views), dtype) in enumerate(zip(xs, roots, formats, strict=False)):
            if i in more:
                scale = more[i]
            else:
                x, scale = quantized(x.squeeze(0) if rows and batched else x, dtype, 1 - i if rows else None)
            for view in views:
                x = view.target(x, *view.args[1:], **view.kwargs)  # type: ignore[operator]
            matrices.append(x if rows or not batched else x.squeeze(0))
            scales.append(scale)
        y = scaled_mm(*matrices, *scales, out.dtype)
        y = y.unsqueeze(0) if batched else y
        return [torch.add(y, xs[2], alpha=beta) if bias else y]

    fakes = [
        compat.new_fake(out.fake_mode, x.shape, x.dtype, x.device, x.stride()) for x in (n.meta["val"] for n in inputs)
    ]
    with out.fake_mode:
        made = record(run, fakes, owner="fp8", names=[f"x_{i}" for i in range(len(fakes))])
    new, (result,) = inlined(graph, node, made, inputs)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return new, result
