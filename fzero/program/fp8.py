"""Products with selected parameters, done in 8 bits: a rewrite of what was recorded, before it is laid out as lines.

Of each selected parameter three products are known by what they read and make: the one that reads it (through views and casts), the one that makes the
gradient of its input, which reads it too, and the one whose result becomes its gradient. Each is replaced by two roundings and one `scaled_mm`
(fzero/program/scaled.py); equal roundings are one, so that what the forward rounded is there for the backward. A product is done so if it is a whole
parameter that it reads, and if its three dims are multiples of 16.

A parameter that nothing but such products reads may come rounded already, with its scale: a byte an element travels. Every rank rounds its shard by the largest
of all ranks' scales, which is that of the whole.

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
from fzero.errors import TransformError, message
from fzero.layout import Leaf
from fzero.program.block import Joint, call_block, call_vjp
from fzero.program.record import Recorded, merge_equal, record
from fzero.program.scaled import E4M3, E5M2, MULTIPLE, quantized, scaled_mm
from fzero.program.segment import extract, reached
from fzero.program.trace import Inputs

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
"""Of all of their argument."""
_COPIES = {aten._to_copy.default, aten.clone.default}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class InFp8:
    """Which products of a step are done in 8 bits.

    Attributes:
        selects: whether those with a parameter are.
        rows: whether each row of the first operand and each column of the second has a scale; otherwise an operand has one.
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
        """Whether a selected parameter comes in 8 bits, if nothing but products reads it: a shard, of which all ranks make the whole."""
        return self.gathers and not self.rows and bool(leaf.layout.axes) and leaf.layout.tier == "device"


@dataclass
class Uses:
    """The products with one parameter: how many are done in 8 bits, and the dims of those that cannot be."""

    done: int = 0
    left: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, other: Uses) -> None:
        self.done += other.done
        self.left += other.left


def rewrite(
    graph: Recorded,
    weights: Mapping[fx.Node, fx.Node | None],
    seeds: Collection[fx.Node],
    rows: bool,
    sharded: Collection[fx.Node],
    paths: Mapping[fx.Node, str],
) -> tuple[Recorded, dict[fx.Node, fx.Node]]:
    """Replaces the products with some inputs of a function: its own and those of the blocks that it calls.

    Args:
        graph: of a step's loss and gradients, or of an evaluation; not to be used any more.
        weights: the inputs, each with the output that is its gradient, if it has one.
        seeds: what gradients are computed from.
        rows: of `InFp8`.
        sharded: the inputs that may come in float8_e4m3fn.
        paths: what the user knows the inputs as.

    Returns: the function, and for each input that does come so, as nothing but products reads it, the new input that is its scale.

    Raises:
        TransformError: there is none that could be replaced.
    """
    blocks: dict[Any, tuple[Joint, dict[int, Uses]]] = {}
    uses: dict[fx.Node, Uses] = defaultdict(Uses)
    nodes = list(graph.graph.nodes)
    late = reached(graph.graph, [*seeds, *(n for n in nodes if n.target is call_vjp)])
    scales = _given(graph, [n for n in weights if n in sharded and _only_multiplied(n)], len(graph.inputs), "in_{}")
    for node in nodes:
        if node.target in (call_block, call_vjp):
            joint: Joint = node.args[0]
            inputs = node.args[2 : 2 + joint.num_inputs]
            selected = frozenset(i for i, n in enumerate(inputs) if _origin(n) in weights)
            given = tuple(i for i, n in enumerate(inputs) if n in scales)
            if (joint, selected, given) not in blocks:
                blocks[joint, selected, given] = _in_block(joint, selected, given, rows)
            new, found = blocks[joint, selected, given]
            node.args = (new, node.args[1], *inputs, *(scales[inputs[i]] for i in given), *node.args[2 + joint.num_inputs :])
            for i in selected if node.target is call_block else ():
                uses[_origin(inputs[i])].add(found[i])
    for weight, found in _replace(graph.graph, weights, late, rows, scales).items():
        uses[weight].add(found)
    if not any(u.done for u in uses.values()):
        problems = [f"{paths[n]}: {_why(uses[n])}" for n in weights] or ["no leaf is selected"]
        raise TransformError(message("fp8", "no product of this step can be done in 8 bits", problems, _FIX))
    return replace(graph), scales


def _only_multiplied(node: fx.Node) -> bool:
    """Whether products that can be done in 8 bits read an input, and nothing else does, here and in blocks."""
    for user in node.users:
        if user.target in (call_block, call_vjp):
            joint: Joint = user.args[0]  # type: ignore[assignment]
            places = [joint.graph.inputs[i] for i, n in enumerate(user.args[2 : 2 + joint.num_inputs]) if n is node]
            if node.op != "placeholder" or not all(map(_only_multiplied, places)):
                return False
        elif not (_only_multiplied(user) if user.target in _VIEWS else _fits(user)):
            return False
    return bool(node.users)


def _given(graph: Recorded, weights: Sequence[fx.Node], behind: int, name: str) -> dict[fx.Node, fx.Node]:
    """Makes inputs come in float8_e4m3fn, and puts that of each one's scale behind so many inputs."""
    scales: dict[fx.Node, fx.Node] = {}
    last = graph.inputs[behind - 1]
    for i, weight in enumerate(weights):
        value = weight.meta["val"]
        with graph.graph.inserting_after(last):
            scales[weight] = last = graph.graph.placeholder(name.format(behind + i + 1))
        weight.meta["val"] = compat.new_fake(value.fake_mode, value.shape, E4M3, value.device, value.stride())
        last.meta["val"] = compat.new_fake(value.fake_mode, (), torch.float32, value.device)
    return scales


_FIX = f"fp8 multiplies whole 2-d leaves; both their dims, and the tokens of a rank's micro-batch, are multiples of {MULTIPLE}"


def _why(uses: Uses) -> str:
    left = ", ".join(" x ".join(map(str, dims)) for dims in dict.fromkeys(uses.left))
    return f"its products are of {left}" if left else "no product reads the whole of it"


def _in_block(joint: Joint, selected: frozenset[int], given: Sequence[int], rows: bool) -> tuple[Joint, dict[int, Uses]]:
    """A block with the products of some of its inputs replaced, and those by the number of the input. The scales of what is given rounded are inputs behind the
    others."""
    if not selected:
        return joint, {}
    graph = extract(joint.graph, joint.graph.inputs, joint.graph.outputs, names=[n.name for n in joint.graph.inputs])
    places, grads = graph.inputs, dict(zip(joint.diff, graph.outputs[joint.num_outputs :], strict=True))
    late = reached(graph.graph, places[joint.num_inputs :])
    scales = _given(graph, [places[i] for i in given], joint.num_inputs, "primals_{}")
    found = _replace(graph.graph, {places[i]: grads.get(i) for i in selected}, late, rows, scales)
    return replace(joint, graph=replace(graph), num_inputs=joint.num_inputs + len(given)), {i: found[places[i]] for i in selected}


def _replace(
    graph: fx.Graph, weights: Mapping[fx.Node, fx.Node | None], late: Collection[fx.Node], rows: bool, scales: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, Uses]:
    """Replaces the products with `weights` in a graph. `late`: the nodes that depend on a gradient; `scales`: of those that are rounded already.

    Equal roundings are one between two calls of blocks, which is what becomes one function: a block chooses what it keeps, nothing chooses what to keep between
    two functions.
    """
    uses, runs, run, late = {n: Uses() for n in weights}, dict[fx.Node, int](), 0, set(late)
    makes = {product: weight for weight, grad in weights.items() for product in ([] if grad is None else _summands(grad)) if product in late}
    for node in list(graph.nodes):
        run += node.target in (call_block, call_vjp)
        factors = _factors(node)
        weight = next((w for w in (*map(_origin, factors), makes.get(node)) if w in weights), None) if factors else None
        if weight is None or late.issuperset(factors):
            continue
        if not _fits(node):
            uses[weight].left.append(_dims(factors))
            continue
        new = _splice(graph, node, _scaled(node, factors, [E5M2 if f in late else E4M3 for f in factors], rows, scales))
        runs.update(dict.fromkeys(new, run))
        if node in late:
            late.add(new[-1])
        uses[weight].done += 1
    merge_equal(graph, runs)
    graph.eliminate_dead_code()
    return uses


def _factors(node: fx.Node) -> tuple[Any, ...]:
    """The two matrices that a node multiplies; none of any other node. A batch of one is a matrix."""
    match node.target:
        case aten.mm.default:
            return node.args[:2]
        case aten.addmm.default if node.kwargs.get("alpha", 1) == 1:
            return node.args[1:3]
        case aten.bmm.default if node.meta["val"].shape[0] == 1:
            return node.args[:2]
    return ()


def _fits(node: fx.Node) -> bool:
    """Whether a node is a product that can be done in 8 bits."""
    factors = _factors(node)
    return bool(factors) and node.meta["val"].dtype in _DTYPES and not any(n % MULTIPLE for n in _dims(factors))


def _dims(factors: Sequence[fx.Node]) -> tuple[int, int, int]:
    a, b = (f.meta["val"].shape for f in factors)
    return a[-2], a[-1], b[-1]


def _origin(node: fx.Node) -> fx.Node:
    """What a node has all elements of, in another shape, order or dtype."""
    while node.target in _VIEWS | _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _summands(grad: fx.Node) -> list[fx.Node]:
    """The products that add up to a gradient."""
    found, todo = [], [grad]
    while todo:
        node = _origin(todo.pop())
        if _factors(node):
            found.append(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            todo += [n for n in node.args if isinstance(n, fx.Node)]
    return found


@dataclass(frozen=True, eq=False)
class _Made:
    """What a product becomes: a function, and the nodes that it reads."""

    graph: Recorded
    inputs: Sequence[fx.Node]


def _scaled(node: fx.Node, factors: Sequence[fx.Node], formats: Sequence[torch.dtype], rows: bool, scales: Mapping[fx.Node, fx.Node]) -> _Made:
    """Operands with one scale are rounded as they lie, before they are viewed as matrices: the views of one tensor share it. `scales`: of what is rounded."""
    roots = [(f, []) if rows else _unviewed(f) for f in factors]
    bias = [node.args[0]] if node.target is aten.addmm.default else []
    given = {i: scales[n] for i, (n, _) in enumerate(roots) if n in scales}
    inputs: list[Any] = [*(n for n, _ in roots), *bias, *given.values()]
    batched, out = node.target is aten.bmm.default, node.meta["val"]
    beta: Any = node.kwargs.get("beta", 1)

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        matrices, scales = [], []
        known = dict(zip(given, xs[len(xs) - len(given) :], strict=True))
        for i, (x, (_, views), dtype) in enumerate(zip(xs, roots, formats, strict=False)):
            x, scale = (x, known[i]) if i in known else quantized(x.squeeze(0) if rows and batched else x, dtype, 1 - i if rows else None)
            for view in views:
                x = view.target(x, *view.args[1:], **view.kwargs)  # type: ignore[operator]
            matrices.append(x if rows or not batched else x.squeeze(0))
            scales.append(scale)
        y = scaled_mm(*matrices, *scales, out.dtype)
        y = y.unsqueeze(0) if batched else y
        return [torch.add(y, xs[2], alpha=beta) if bias else y]

    facts = [n.meta["val"] for n in inputs]
    with out.fake_mode:
        fakes = [compat.new_fake(out.fake_mode, x.shape, x.dtype, x.device, x.stride()) for x in facts]
        return _Made(record(run, fakes, owner="fp8", names=[f"x_{i}" for i in range(len(fakes))]), inputs)


def _unviewed(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a node is a view of all of, and the views, the last one last."""
    views: list[fx.Node] = []
    while node.target in _VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views[::-1]


def _splice(graph: fx.Graph, node: fx.Node, made: _Made) -> list[fx.Node]:
    """Puts a function in a node's place. Returns its nodes, that of its result last."""
    env = dict(zip(made.graph.inputs, made.inputs, strict=True))
    with graph.inserting_before(node):
        new = [env.setdefault(n, graph.node_copy(n, lambda m: env[m])) for n in made.graph.graph.nodes if n.op == "call_function"]
    node.replace_all_uses_with(new[-1])
    graph.erase_node(node)
    return new
