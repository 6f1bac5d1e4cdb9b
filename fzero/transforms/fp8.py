"""Computes matrix products with selected parameters in 8-bit floating point.

Acts on the recorded graph, before it is converted to a program. The stored parameters, the communicated gradients and
the dtype of everything except these products are the same as without this transform.

Each selected parameter takes part in three products: the product of the forward reads it (through views and casts), the
product for the input's gradient reads it too, and the third product computes its own gradient. Each is replaced by two
roundings and one `scaled_mm` (fzero/ops/scaled_matmul.py). Equal roundings are merged, so that the backward can reuse
values that the forward rounded. A product is replaced if it reads a complete parameter, and if its three dims are
multiples of 16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero._utils.arguments import accepts, keywords, predicate
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.from_graph import Inputs
from fzero.ops.scaled_matmul import E4M3, E5M2, MULTIPLE, quantized, scaled_mm
from fzero.sharding.layout import Leaf
from fzero.trace.cse import merge_equal
from fzero.trace.graph_capture import record
from fzero.trace.joint_graph import Joint, call_block, call_vjp
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import extract, inlined, reached
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Where

SCALES = ("tensor", "row")
CAPABILITY = (8, 9)
"""The lowest CUDA compute capability with tensor cores for 8-bit floating point."""


@dataclass(frozen=True)
class Fp8(Transform):
    """The configuration of `fp8`."""

    scales: str = "tensor"
    where: Where | None = None
    order: ClassVar[int] = 25
    name: ClassVar[str] = "fp8"

    def selects(self, leaf: Leaf) -> bool:
        """Whether products with this parameter are computed in 8 bits: if they can be, and `where` accepts the
        parameter."""
        # `where` may accept any parameter by default, so those that do not fit are left out here. `check` names them
        # only if the user's own `where` selects them.
        return not _unfit(leaf) and accepts(self.name, "where", self.where, leaf.path, leaf.meta)

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raises if `where` accepts parameters that no 8-bit product can read, and names them."""
        wrong = [
            f"{leaf}: {why}"
            for leaf in leaves
            if self.where is not None
            and accepts(self.name, "where", self.where, leaf.path, leaf.meta)
            and (why := _unfit(leaf))
        ]
        if wrong:
            fix = (
                f"select floating-point matrices with dims that are multiples of {MULTIPLE}: where=lambda path, leaf: "
                f"leaf.ndim == 2 and ..."
            )
            raise TransformError(
                self.name, "`where` selects parameters that cannot be multiplied in 8 bits", wrong, fix
            )

    def check_device(self, device: torch.device) -> None:
        """Raises if a device has no 8-bit products, unless it is a CPU, which emulates them."""
        if device.type == "cpu":
            return
        if (
            device.type == "cuda"
            and torch.version.hip is None
            and torch.cuda.get_device_capability(device) >= CAPABILITY
        ):
            return
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        fix = (
            f"a CUDA device of capability {'.'.join(map(str, CAPABILITY))} (Ada, Hopper) or later has them, and a CPU "
            f"emulates them; leave fp8 out here"
        )
        raise FzeroValueError(self.name, f"{kind} has no products in float8_e4m3fn and float8_e5m2", fix=fix)


@keywords
def fp8(
    step: Any = None,
    *,
    scales: str = "tensor",
    where: Where | None = None,
) -> Any:
    """Computes matrix products with selected parameters in 8-bit floating point: those of the forward, of the input's
    gradient, and of the parameter's gradient.

    Each operand is divided by a scale, which follows from its largest magnitude, and rounded to nearest: activations
    and parameters to float8_e4m3fn, values that depend on a gradient to float8_e5m2. Sums are computed in float32; the
    result has the dtype of the product that it replaces. Everything else is unchanged: stored parameters and optimizer
    state, the reduction of gradients, attention, norms, the loss. See docs/transforms/fp8.md.

    Args:
        step: a step; without one a transform is returned.
        scales: "tensor": one scale for each operand; or "row": one for each row of the first operand and each column of
            the second.
        where: predicate `(path, leaf)` that selects parameters; by default all that can be selected: floating-point
            matrices with dims that are multiples of 16. `leaf` is a meta tensor. A tied parameter is selected only if
            all of its paths are. A product is replaced if it reads all of a parameter, through views and casts, and if
            its three dims are multiples of 16; any other product is left unchanged.

    Communication: the same as without it; parameters are gathered in the dtype of `mixed_precision` and rounded
        afterwards. The scale of an activation or a gradient is that of the values that one rank multiplies in one
        micro-batch.
    Memory: values that blocks save for their backward may be saved in 8 bits.

    Raises:
        FzeroValueError: unknown `scales`; from `compile`, a device without such products, unless it is a CPU, which
            emulates them.
        FzeroTypeError: `where` is not a function.
        TransformError: a different `fp8` of the same step; when the program is built, `where` accepts a parameter that
            cannot be multiplied in 8 bits, or the step has no product that can be replaced.

    Papers: Micikevicius et al., FP8 formats for deep learning, 2022. Noune et al., 8-bit numerical formats for deep
        neural networks, 2022.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*fp8(step, scales="row").transforms)
        fp8(scales='row')
    """
    if scales not in list(SCALES):
        raise FzeroValueError("fp8", f"unknown scales={scales!r}", fix=f"one of {', '.join(map(repr, SCALES))}")
    if problems := predicate("where", where):
        raise FzeroTypeError("fp8", "invalid arguments", problems, "e.g. where=lambda path, leaf: 'head' not in path")
    return applied(Fp8(scales, where), step)


def _unfit(leaf: Leaf) -> str:
    """Returns the reason why no 8-bit product can read a parameter, or ""."""
    if not leaf.dtype.is_floating_point:
        return "not floating point"
    if leaf.role == "mutable":
        return "the loss function returns its new value"
    if len(leaf.shape) != 2:
        return f"{len(leaf.shape)}-d, not a matrix"
    odd = [str(n) for n in leaf.shape if n % MULTIPLE]
    what = "not multiples" if len(odd) > 1 else "not a multiple"
    return f"{' and '.join(odd)}: {what} of {MULTIPLE}" if odd else ""


# --- the rewrite ---


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
