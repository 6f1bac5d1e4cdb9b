"""Replaces products with selected parameters by 8-bit products, in the recorded graph, before it is converted to a
program.

Each selected parameter takes part in three products: the product of the forward reads it (through views and casts), the
product for the input's gradient reads it too, and the third product computes its own gradient. Each is replaced by two
roundings and one `scaled_mm` (fzero/ops/scaled_matmul.py). Equal roundings are merged, so that the backward can reuse
values that the forward rounded. A product is replaced if it reads a complete parameter, and if its three dims are
multiples of 16.

This file must not depend on which parameters are selected, or why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.errors import TransformError
from fzero.ir.from_graph import Inputs
from fzero.ops.scaled_matmul import E4M3, E5M2, MULTIPLE, quantized, scaled_mm
from fzero.sharding.layout import Leaf
from fzero.trace.cse import merge_equal
from fzero.trace.graph_capture import record
from fzero.trace.joint_graph import Joint, call_block, call_vjp
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import extract, inlined, reached

aten = torch.ops.aten


_VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
"""Views that contain all elements of their argument."""
_COPIES = {aten._to_copy.default, aten.clone.default}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class InFp8:
    """Selects the products of a step that are computed in 8 bits.

    Attributes:
        selects: whether products with this parameter are.
        rows: whether each row of the first operand and each column of the second has a scale; otherwise an operand has
            one scale.
    """

    selects: Callable[[Leaf], bool]
    rows: bool = False

    def multiplied(self, params: Inputs) -> list[int]:
        """Returns the positions of the parameters whose products are replaced. A tied parameter is only if all of its
        paths are selected."""
        refused = {tie for leaf, tie in zip(params.leaves, params.ties, strict=True) if not self.selects(leaf)}
        return [i for i in params.distinct if i not in refused]


@dataclass
class ProductUses:
    """The products with one parameter: how many are computed in 8 bits, and the dims of those that cannot be."""

    done: int = 0
    left: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, other: ProductUses) -> None:
        self.done += other.done
        self.left += other.left


@dataclass(frozen=True, eq=False)
class _Block:
    """A block in which the products with some inputs are replaced, and the uses of each of these inputs, by its
    index."""

    joint: Joint
    uses: Mapping[int, ProductUses]


def in_8_bits(
    graph: Recorded, fp8: InFp8, params: Inputs, grads: Mapping[int, fx.Node], seeds: Collection[fx.Node]
) -> Recorded:
    """Returns the graph in which the products with selected parameters are replaced, in itself and in the blocks that
    it calls.

    Args:
        graph: the loss and gradients of a step, or an evaluation; its first inputs are the distinct parameters. It must
            not be used afterwards.
        fp8: which products to replace, and how.
        params: the table of parameters.
        grads: for the position of each parameter, the output that is its gradient.
        seeds: the nodes from which gradients are computed; none in an evaluation.

    Raises:
        TransformError: no product can be replaced.
    """
    places = dict(zip(params.distinct, graph.inputs, strict=False))
    weights = {places[i]: grads.get(i) for i in fp8.multiplied(params)}
    blocks: dict[Any, _Block] = {}
    uses: dict[fx.Node, ProductUses] = defaultdict(ProductUses)
    nodes = list(graph.graph.nodes)
    # Everything that depends on the seed of the backward is a gradient and gets the format with the larger range, e5m2.
    late = reached(graph.graph, [*seeds, *(n for n in nodes if n.target is call_vjp)])
    for weight, done in _replace(graph.graph, weights, late, fp8.rows).items():
        uses[weight].add(done)
    for node in nodes:
        if node.target in (call_block, call_vjp):
            joint, call, *_ = node.args
            inputs = node.args[2 : 2 + joint.num_inputs]
            selected = frozenset(i for i, n in enumerate(inputs) if _origin(n) in weights)
            key = joint, selected
            if key not in blocks:
                blocks[key] = _in_block(joint, selected, fp8.rows)
            node.args = (blocks[key].joint, call, *node.args[2:])
            # A vjp has the same joint graph as its forward. Counting both would count each product twice.
            for i in selected if node.target is call_block else ():
                uses[_origin(inputs[i])].add(blocks[key].uses[i])
    if not any(u.done for u in uses.values()):
        named = {places[i]: params.leaves[i].path for i in fp8.multiplied(params)}
        problems = [f"{path}: {_why(uses[n])}" for n, path in named.items()] or ["no parameter is selected"]
        raise TransformError("fp8", "no product of this step can be done in 8 bits", problems, _FIX)
    graph.graph.eliminate_dead_code()
    return replace(graph)


_FIX = (
    "fp8 multiplies unsharded 2-d parameters; both their dims, and the "
    "tokens of a rank's micro-batch, are multiples of "
    f"{MULTIPLE}"
)


def _why(uses: ProductUses) -> str:
    left = ", ".join(" x ".join(map(str, d)) for d in dict.fromkeys(uses.left))
    return f"its products are of {left}" if left else "no product reads all of it"


def _in_block(joint: Joint, selected: frozenset[int], rows: bool) -> _Block:
    if not selected:
        return _Block(joint, {})
    graph = extract(joint.graph, joint.graph.inputs, joint.graph.outputs, names=[n.name for n in joint.graph.inputs])
    places, grads = graph.inputs, dict(zip(joint.diff, graph.outputs[joint.num_outputs :], strict=True))
    late = reached(graph.graph, places[joint.num_inputs :])
    found = _replace(graph.graph, {places[i]: grads.get(i) for i in sorted(selected)}, late, rows)
    graph.graph.eliminate_dead_code()
    return _Block(replace(joint, graph=replace(graph)), {i: found[places[i]] for i in selected})


def _replace(
    graph: fx.Graph,
    weights: Mapping[fx.Node, fx.Node | None],
    late: Collection[fx.Node],
    rows: bool,
) -> dict[fx.Node, ProductUses]:
    """Replaces the products with `weights` in a graph.

    Equal roundings are merged only between two calls of blocks, because the nodes between two calls become one
    subgraph: a block chooses its saved values, and nothing is saved between two subgraphs.

    Args:
        graph: the graph, which is changed in place.
        weights: the parameters, each with its gradient, if it has one.
        late: the nodes that depend on a gradient.
        rows: as in `InFp8`.
    """
    uses, runs, run, late = {n: ProductUses() for n in weights}, dict[fx.Node, int](), 0, set(late)
    makes = {
        product: weight
        for weight, grad in weights.items()
        for product in ([] if grad is None else _summands(grad))
        if product in late
    }
    for node in list(graph.nodes):
        run += node.target in (call_block, call_vjp)
        found = _factors(node)
        weight = next((w for w in (*map(_origin, found), makes.get(node)) if w in weights), None) if found else None
        # Each of the three products with a parameter reads at least one value of the forward.
        if weight is None or late.issuperset(found):
            continue
        if not _fits(node):
            uses[weight].left.append(_dims(found))
            continue
        made, result = _scaled(graph, node, found, [E5M2 if f in late else E4M3 for f in found], rows)
        # Roundings are merged only if no block is called between them: otherwise the rounded value would stay in memory
        # during the call.
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
) -> tuple[list[fx.Node], fx.Node]:
    """Replaces one product by an 8-bit product.

    Operands with a single scale are rounded in their stored shape, before they are viewed as matrices, so that all
    views of one tensor share the rounding. The arguments are those of `_replace`. Returns the new nodes, and the node
    of the result.
    """
    # With one scale per tensor, the values are rounded before they are viewed, so that products which read different
    # views of one value share its rounding. Scales by row depend on the view.
    roots = [(f, []) if rows else _unviewed(f) for f in found]
    bias = [node.args[0]] if node.target is aten.addmm.default else []
    inputs: list[Any] = [*(n for n, _ in roots), *bias]
    batched, out = node.target is aten.bmm.default, node.meta["val"]
    beta: Any = node.kwargs.get("beta", 1)

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        matrices, scales = [], []
        for i, (x, (_, views), dtype) in enumerate(zip(xs, roots, formats, strict=False)):
            # With `rows`, the largest magnitude is taken along the dim that the product sums over:
            # scales are float32[m, 1] and float32[1, n].
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


# --- products in a graph ---


def _factors(node: fx.Node) -> tuple[Any, ...]:
    """The two matrices that a node multiplies; empty for any other node. A batched product of batch size 1 counts as a
    matrix product."""
    match node.target:
        case aten.mm.default:
            return node.args[:2]
        case aten.addmm.default if node.kwargs.get("alpha", 1) == 1:
            return node.args[1:3]
        case aten.bmm.default if node.meta["val"].shape[0] == 1:
            return node.args[:2]
    return ()


def _dims(matrices: Sequence[fx.Node]) -> tuple[int, int, int]:
    """The dims of a product of two matrices: the rows of the first, the dim that is summed over, and the columns of the
    second."""
    a, b = (f.meta["val"].shape for f in matrices)
    return a[-2], a[-1], b[-1]


def _fits(node: fx.Node) -> bool:
    """Whether a node is a product that can be computed in 8 bits."""
    found = _factors(node)
    return bool(found) and node.meta["val"].dtype in _DTYPES and not any(n % MULTIPLE for n in _dims(found))


def _origin(node: fx.Node) -> fx.Node:
    """The node that has the same elements as this node, before they were viewed, reordered, copied or cast."""
    # Casts count as copies, because mixed precision reads a cast of each parameter.
    while node.target in _VIEWS | _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _unviewed(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node of which a node is a view of all elements, and the chain of views, in order."""
    views: list[fx.Node] = []
    while node.target in _VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views[::-1]


def _summands(grad: fx.Node) -> list[fx.Node]:
    """The products that are added up to a gradient."""
    found, todo = [], [grad]
    while todo:
        node = _origin(todo.pop())
        if _factors(node):
            found.append(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            todo += [n for n in node.args if isinstance(n, fx.Node)]
    return found
