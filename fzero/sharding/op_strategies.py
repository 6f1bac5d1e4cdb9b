"""Lists strategies: ways to compute an op on values that a mesh axis shards.

A `Strategy` says which placement each input must have, which placements the results have, and how the op on shards is
written. More rules are in view_strategies.py and layer_strategies.py. An op without a strategy is decomposed
(decompositions.py), or computed on replicated inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.fx as fx

from fzero.sharding.flat_propagation import REDUCTIONS
from fzero.sharding.placements import ExpertShard, Shard

aten = torch.ops.aten

Place = Shard | Literal["partial"] | None
"""The placement of a value along an axis: sharded along a dim, partial (one summand on each rank), or replicated
(None)."""
PARTIAL: Literal["partial"] = "partial"
OWN: Literal["own"] = "own"
"""The placement of a varying value: each rank has its own, computed from its samples of the batch."""


Anywhere = Place | ExpertShard | Literal["own"]
Attention = Literal["auto", "heads", "keys"]


class Writer(Protocol):
    """Writes ops on shards."""

    n: int

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...
    def named(self, target: Any, arguments: Mapping[str, Any]) -> fx.Node:
        """Writes an op, with its arguments by name."""
        ...

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node: ...
    def all_reduce(self, x: fx.Node, op: str) -> fx.Node: ...
    def index(self) -> fx.Node:
        """This rank's index along the axis: int64[1]."""
        ...


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, including defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def positional(target: Any, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Converts arguments by name to positional and keyword-only arguments."""
    schema = target._schema.arguments
    args = [arguments[a.name] for a in schema if not a.kwarg_only]
    return args, {a.name: arguments[a.name] for a in schema if a.kwarg_only}


Written = fx.Node | tuple[fx.Node, ...]


@dataclass(frozen=True)
class Strategy:
    """A way to compute an op: the required placements of its inputs, the placements of its results, and how it is
    written; by default, the op is called on the shards unchanged.

    `sent`: the bytes of replicated values that the strategy itself reduces between ranks. `back`: the placement to
    which results are exchanged if they are sharded along another dim.
    """

    want: Mapping[fx.Node, Place]
    out: Place | tuple[Place, ...]
    write: Callable[[Writer, dict[str, Any]], Written] | None = None
    sent: int = 0
    back: Shard | None = None

    def places(self, count: int) -> tuple[Place, ...]:
        """The placements of `count` results."""
        out = self.out
        several = isinstance(out, tuple) and not isinstance(out, Shard)
        return out if several else (out,) * count  # type: ignore[return-value]


@dataclass(frozen=True)
class WholeOp:
    """An op of the original function. `asked`: placements that are requested of its results. `by_position`: how
    attention is computed if its inputs are sharded by position."""

    node: fx.Node
    n: int
    place: Mapping[fx.Node, Place]
    asked: Sequence[Shard] = ()
    by_position: Attention | None = None
    named: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", named_arguments(self.node))

    def __getitem__(self, name: str) -> Any:
        return self.named.get(name)

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def inputs(self) -> list[fx.Node]:
        return self.node.all_input_nodes

    @property
    def outputs(self) -> Sequence[Any]:
        return values_of(self.node)

    @property
    def shape(self) -> list[int]:
        return list(self.outputs[0].shape)

    def sharded(self, *nodes: Any) -> list[tuple[fx.Node, Shard]]:
        """The nodes, among these or by default among all inputs, that are sharded, with their placements."""
        found = dict.fromkeys(a for a in (nodes or self.inputs) if isinstance(a, fx.Node))
        return [(a, p) for a in found if isinstance(p := self.place[a], Shard)]

    def partial(self, *nodes: Any) -> bool:
        """Whether all of these nodes are partial."""
        return all(isinstance(a, fx.Node) and self.place[a] == PARTIAL for a in nodes)

    def at(self, places: Mapping[fx.Node, Place]) -> dict[fx.Node, Place]:
        """The inputs at these placements; inputs that are not mentioned are replicated."""
        return {a: places.get(a) for a in self.inputs}


Rule = Callable[[WholeOp], Iterator[Strategy]]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of these ops."""

    def add(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, fn))
        return fn

    return add


def shape_of(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def nbytes_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def values_of(node: fx.Node) -> Sequence[Any]:
    value = node.meta["val"]
    return value if isinstance(value, (tuple, list)) else (value,)


def part(shape: Sequence[int], place: Anywhere, n: int) -> list[int]:
    """The shape of a rank's shard."""
    out = list(shape)
    if isinstance(place, (Shard, ExpertShard)):
        out[place.dim] //= n
    if isinstance(place, ExpertShard):
        out[place.rows] *= n
    return out


def divides(shape: Sequence[int], place: Place | ExpertShard, n: int) -> bool:
    """Whether a value of this shape has equal shards at a placement."""
    if isinstance(place, ExpertShard):
        return max(place.dim, place.rows) < len(shape) and shape[place.dim] > 0 and shape[place.dim] % n == 0
    if not isinstance(place, Shard):
        return True
    return place.dim < len(shape) and shape[place.dim] > 0 and shape[place.dim] % (place.groups * n) == 0


def nearest(size: int, n: int) -> list[int]:
    """The multiples of n just below and above a size."""
    return [x for x in (size // n * n, size // n * n + n) if x]


def in_view(shape: Sequence[int], place: Shard, new: Sequence[int], n: int) -> Shard | None:
    """The corresponding placement in a view with another shape, or None if the view cannot be sharded accordingly. It
    is found from the period and the run length of the shards in the flattened value.

    Example:
        >>> in_view((4, 6, 8), Shard(2, 2), (24, 2, 4), 2)
        Shard(dim=2, groups=1)
    """
    period = math.prod(shape[place.dim :]) // place.groups
    if not period:
        return None
    inner = 1
    for dim in reversed(range(len(new))):
        total = inner * new[dim]
        # The dim must hold complete periods, and each run must consist of complete indices of the
        # dim.
        if new[dim] > 1 and total % period == 0 and (period // n) % inner == 0:
            return Shard(dim, total // period)
        inner = total
    return None


def unique(places: Iterable[Place]) -> list[Shard]:
    return [p for p in dict.fromkeys(places) if isinstance(p, Shard)]


def lined_up(node: fx.Node, place: Shard, dims: int) -> Shard | None:
    """The placement of an operand that is broadcast to a result with `dims` dims; None for replicated."""
    shape = shape_of(node)
    dim = place.dim - (dims - len(shape))
    return None if dim < 0 or shape[dim] == 1 else Shard(dim, place.groups)


def lifted(node: fx.Node, place: Shard, dims: int) -> Shard:
    """The placement of a result with `dims` dims to which an operand at this placement is broadcast."""
    return Shard(place.dim + dims - len(shape_of(node)), place.groups)


def moves(op: WholeOp, x: fx.Node) -> Iterator[Strategy]:
    """The strategy of an op that only moves elements, so that it can be applied to partial values."""
    if op.partial(x):
        yield Strategy(op.at({x: PARTIAL}), (PARTIAL,) * len(op.outputs))


def along(op: WholeOp, dims: Iterable[int], places: Sequence[Shard] = ()) -> Iterator[Strategy]:
    """Strategies for an op along some dims that treats each index of the other dims alike. Every input has the dims of
    the result."""
    fixed, count = {*dims}, len(op.shape)
    if any(len(shape_of(a)) != count for a in op.inputs):
        return
    for c in unique([*(p for _, p in op.sharded()), *op.asked]):
        if c.dim not in fixed and (not places or c in places):
            yield Strategy({a: lined_up(a, c, count) for a in op.inputs}, tuple(c for _ in op.outputs))


# --- pointwise ---

_LINEAR = {
    aten.neg.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten._to_copy.default,
}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}


def _linear(op: WholeOp) -> Iterator[Strategy]:
    """Strategies on partial values: sums of partial values, and products of a partial value with a number."""
    x, *others = op.inputs
    if op.target in _SUMS and op.partial(op["self"], op["other"]):
        yield Strategy(dict.fromkeys(op.inputs, PARTIAL), PARTIAL)
    if op.target not in _LINEAR or len(others) > 1 or op["other"] is op["self"]:
        return
    if others and op.partial(others[0]) and op.target is aten.mul.Tensor:
        x, others = others[0], [x]
    number = not others or (math.prod(shape_of(others[0])) == 1 and op.place[others[0]] is None)
    if op.partial(x) and number and (op.target is not aten.div.Tensor or op["self"] is x):
        value = op.outputs[0]
        if op.target is not aten._to_copy.default or value.is_floating_point():
            yield Strategy(op.at({x: PARTIAL}), PARTIAL)


@rule(
    aten._to_copy.default,
    aten.copy.default,
    aten.fill.Scalar,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
    aten.elu_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.rsub.Tensor,
)
def pointwise(op: WholeOp) -> Iterator[Strategy]:
    """Strategies for element-by-element ops, with broadcasting."""
    dims = len(op.shape)
    yield from _linear(op)
    for c in unique([*(lifted(a, p, dims) for a, p in op.sharded()), *op.asked]):
        yield Strategy({a: lined_up(a, c, dims) for a in op.inputs}, c)


# --- reductions ---

_REDUCTIONS: dict[Any, str] = REDUCTIONS | {
    aten.any.dim: "any",
    aten.all.dim: "all",
    aten.all.dims: "all",
    aten.prod.dim_int: "",
    aten.prod.default: "",
    aten.argmax.default: "",
    aten.argmin.default: "",
    aten.max.dim: "",
    aten.min.dim: "",
    aten.logsumexp.default: "",
    aten.var.correction: "",
    aten.var_mean.correction: "",
    aten.std.correction: "",
    aten.std_mean.correction: "",
    aten.nansum.default: "sum",
    aten.median.dim: "",
    aten.mode.default: "",
    aten.kthvalue.default: "",
}


def reduced_dims(op: WholeOp) -> list[int]:
    count, dims = len(shape_of(op["self"])), op["dim"]
    dims = [dims] if isinstance(dims, int) else list(dims or range(count))
    return [d % count for d in dims] if count else []


@rule(*_REDUCTIONS)
def _reduced(op: WholeOp) -> Iterator[Strategy]:
    """A reduction over other dims keeps the sharding; sums and means over the sharded dim are partial; max, min, any,
    all and the 2-norm over it are completed by an all_reduce."""
    x, dims, kind = op["self"], reduced_dims(op), _REDUCTIONS[op.target]
    if kind in ("sum", "mean") and op.target is not aten.nansum.default:
        yield from moves(op, x)
    for _, p in op.sharded():
        if p.dim not in dims:
            c = p if op["keepdim"] else Shard(p.dim - sum(d < p.dim for d in dims), p.groups)
            yield Strategy({x: p}, tuple(c for _ in op.outputs))
        elif kind == "sum":
            yield Strategy({x: p}, PARTIAL)
        elif kind == "mean":
            # The mean over all elements is the sum of the means of the n equal shards, each divided
            # by n.
            yield Strategy({x: p}, PARTIAL, lambda w, a: w(aten.div.Scalar, w.named(op.target, a), op.n))
        elif kind and (kind != "norm" or op["ord"] == 2):
            yield Strategy({x: p}, None, _REDUCE[kind](op), sent=op.outputs[0].numel() * op.outputs[0].dtype.itemsize)


def _extreme(kind: str) -> Callable[[WholeOp], Callable[[Writer, dict[str, Any]], fx.Node]]:
    return lambda op: lambda w, a: w.all_reduce(w.named(op.target, a), kind)


def _truth(kind: str) -> Callable[[WholeOp], Callable[[Writer, dict[str, Any]], fx.Node]]:
    def of(op: WholeOp) -> Callable[[Writer, dict[str, Any]], fx.Node]:
        def write(w: Writer, a: dict[str, Any]) -> fx.Node:
            number = w(aten._to_copy.default, w.named(op.target, a), dtype=torch.int32)
            return w(aten._to_copy.default, w.all_reduce(number, kind), dtype=op.outputs[0].dtype)

        return write

    return of


def _norm(op: WholeOp) -> Callable[[Writer, dict[str, Any]], fx.Node]:
    def write(w: Writer, a: dict[str, Any]) -> fx.Node:
        part = w.named(op.target, a)
        return w(aten.sqrt.default, w.all_reduce(w(aten.mul.Tensor, part, part), "sum"))

    return write


_REDUCE = {"max": _extreme("max"), "min": _extreme("min"), "any": _truth("max"), "all": _truth("min"), "norm": _norm}


# --- products ---

_PRODUCTS: dict[Any, tuple[str, str]] = {
    aten.mm.default: ("mk,kn->mn", "self mat2"),
    aten.bmm.default: ("bmk,bkn->bmn", "self mat2"),
    aten.mv.default: ("mk,k->m", "self vec"),
    aten.dot.default: ("k,k->", "self tensor"),
    aten.addmm.default: ("mk,kn->mn", "mat1 mat2"),
    aten.baddbmm.default: ("bmk,bkn->bmn", "batch1 batch2"),
}


@rule(*_PRODUCTS)
def _product(op: WholeOp) -> Iterator[Strategy]:
    """A product is sharded along a dim of its result; if a dim that it sums over is sharded, the result is partial."""
    labels, names = _PRODUCTS[op.target]
    (a, b), (of_a, rest) = (op[name] for name in names.split()), labels.split(",")
    of_b, of_out = rest.split("->")
    bias = op["self"] if len(op.inputs) == 3 or "self" not in names else None
    if a is b or bias in (a, b):
        return
    found = [of_out[c.dim] + f" {c.groups}" for c in op.asked]
    found += [(of_a if x is a else of_b)[p.dim] + f" {p.groups}" for x, p in op.sharded(a, b)]
    for label, groups in dict.fromkeys((s[0], int(s[2:])) for s in found):
        want = {x: Shard(of.index(label), groups) if label in of else None for x, of in ((a, of_a), (b, of_b))}
        out = Shard(of_out.index(label), groups) if label in of_out else PARTIAL
        if bias is None:
            yield Strategy(want, out)
        elif isinstance(out, Shard):
            yield Strategy({bias: lined_up(bias, out, len(of_out)), **want}, out)
    if bias is None:
        for x, y in ((a, b), (b, a)):
            if op.partial(x) and op.place[y] is None:
                yield Strategy({x: PARTIAL, y: None}, PARTIAL)
