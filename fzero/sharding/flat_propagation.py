"""Propagates flat shards through a pure function: an optimizer's update, its init, or an init function.

A parameter is stored as a flat shard (fzero/sharding/layout.py), so an op that keeps elements in their order also keeps
shards:

- Pointwise ops run on the shards, together with replicated scalars.
- Blocks of 256 elements lie within shards. Ops that map a block to one value, or such a value to its block, run on
  shards (fzero/ops/block_quantization.py).
- Views do nothing, because a flat shard has no shape.
- Full reductions run on the shards, and an all_reduce over the axes that shard the parameter combines the partial
  results of the ranks.
- Constants and random bits are created shard by shard. In an update, a draw starts at an offset that an op of the
  program computes (`draw_start`).
- Values marked as unsharded (fzero/ops/unsharded_mark.py) are gathered in an update. Results computed from them are
  sharded again if a shard is needed.

Any other op on a sharded parameter is an error that names the op and the parameter. So is an op on two parameters that
are sharded over different axes. A value that does not depend on a sharded parameter can always be computed in full and
then sharded.

The rules of the other kinds of sharding decide which ops are pointwise, views and reductions. There are three
differences. A parameter may be sharded over several axes at once and padded, so the placement of a value is a
`Sharding`, and a reduction masks the padding. Nothing is gathered unless the function asks for it. And a value that
does not depend on a shard is computed only where it is needed: in full, on shards of its inputs, or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero.errors import FzeroTypeError
from fzero.ops.block_quantization import BLOCK_EXPAND, BLOCK_MAX, blocks_shape, has_blocks
from fzero.ops.unsharded_mark import WHOLE
from fzero.random import DRAW, DRAW_FROM, from_start, sub_range
from fzero.sharding.factors import pointwise, rule_of
from fzero.sharding.graph_writer import all_reduce
from fzero.sharding.layout import Sharding
from fzero.sharding.operations import Strategy, shape_of
from fzero.sharding.placements import REPLICATE, Replicate, Shard
from fzero.sharding.propagation import Propagation
from fzero.sharding.rules import REDUCTIONS
from fzero.sharding.shape_constants import SHAPE_ONLY, constant
from fzero.sharding.shard_regions import part_shape
from fzero.sharding.shard_regions import whole as all_of
from fzero.sharding.sharded_graph import OutputPlacement
from fzero.sharding.view_rules import VIEWS
from fzero.trace.guards.user_frames import line
from fzero.trace.recorder import Recorded

aten = torch.ops.aten


def take_shard(x: torch.Tensor, axes: tuple[str, ...], dims: tuple[Shard, ...] = ()) -> torch.Tensor:
    """Marker: this rank's flat shard of the full `x` over these axes. The first axes shard along these dims."""
    raise AssertionError("a marker is not executable")


def gather(x: torch.Tensor, axes: tuple[str, ...], dims: tuple[Shard, ...], shape: Sequence[int]) -> torch.Tensor:
    """Marker: the full value of this shape, gathered from the ranks' flat shards over these axes. The first axes shard
    along these dims."""
    raise AssertionError("a marker is not executable")


def num_valid(shape: Sequence[int], axes: tuple[str, ...]) -> torch.Tensor:
    """Marker: the number of elements that are not padding in this rank's shard, over these axes, of a parameter with
    this shape (0-dim int64)."""
    raise AssertionError("a marker is not executable")


def draw_start(base: int, shape: Sequence[int], axes: tuple[str, ...]) -> torch.Tensor:
    """Marker: the offset in a draw at which this rank's shard, over these axes, of a parameter with this shape begins
    (0-dim int64). The parameter itself begins at `base`. Without axes it is replicated."""
    raise AssertionError("a marker is not executable")


_FACTORY = {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}
FULL_REDUCTIONS: dict[Any, str] = {
    **{target: kind for target, kind in REDUCTIONS.items() if kind and target is not aten.nansum.default},
    aten.any.default: "any",
    aten.any.dims: "any",
    aten.all.default: "all",
    aten.linalg_vector_norm.default: "norm",
}
"""The ops that reduce a flat shard, if their result has one element."""


def is_reduction(node: fx.Node) -> bool:
    """Whether a node reduces a tensor with more than one element to a single element."""
    return node.target in FULL_REDUCTIONS and num_elements(node) == 1 != num_elements(node.all_input_nodes[0])


def num_elements(node: fx.Node) -> int:
    """The number of elements of a node's value; -1 if it is not a tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else -1


class Sharded(NamedTuple):
    """A tensor that arrives as a flat shard: its path, for errors, and how it is sharded."""

    path: str
    sharding: Sharding


def propagate(
    source: Recorded,
    sharded: Mapping[fx.Node, Sharded],
    demand: Sequence[Sharding | None],
    owner: str,
    index: int | None = None,
) -> Recorded:
    """Returns the function on shards.

    Args:
        source: the function on full values.
        sharded: the inputs that arrive as flat shards.
        demand: for each output, how the requested shard is sharded; None if the full output is requested.
        owner: the caller that shards, for errors.
        index: the index of the shard to compute. Only random draws depend on it: without it, the function is the same
            for every rank, and the offset of each draw comes from a marker.

    Raises:
        FzeroTypeError: lists every op that cannot run on shards, with its parameter and the user's line.
    """
    return FlatPropagation(source, sharded, owner, index).on_shards(demand)


Place = Replicate | Sharding


class FlatPropagation(Propagation):
    """The propagation of flat shards through one function. A `Sharding` is the placement of a flat shard.

    Attributes:
        path: for each value on shards, the parameter that it comes from.
        faults: the values that cannot be computed, with the op and the parameter at fault.
        from_full: the values that are computed from gathered parameters. These are arithmetic on parameters, too.
    """

    def __init__(self, source: Recorded, sharded: Mapping[fx.Node, Sharded], owner: str, index: int | None):
        self.owner, self.index = owner, index
        self.path: dict[fx.Node, str] = {}
        self.faults: dict[fx.Node, str] = {}
        self.problems: dict[str, None] = {}
        self.from_full: set[fx.Node] = set()
        places: list[Any] = [sharded[x].sharding if x in sharded else REPLICATE for x in source.inputs]
        super().__init__(source, 1, places, [OutputPlacement.FREE] * len(source.outputs))
        for x, new in zip(source.inputs, self.source.inputs, strict=True):
            if x in sharded:
                self.path[new] = sharded[x].path

    def on_shards(self, demand: Sequence[Sharding | None]) -> Recorded:
        """Finds from the inputs to the outputs which values are shards, from the outputs to the inputs at which
        placements each value is needed, and writes these values."""
        nodes = [x for x in self.source.graph.nodes if x.op != "output"]
        for node in nodes:
            self._node(node)
        wanted: dict[fx.Node, set[Place]] = {x: set() for x in nodes}
        chosen: dict[fx.Node, dict[Place, Strategy]] = {x: {} for x in nodes}
        for node, at in zip(self.source.outputs, demand, strict=True):
            wanted[node].add(at or REPLICATE)
        for node in reversed(nodes):
            # The strategy for a shard may take it from the value in full, so that one is needed, too.
            while missing := wanted[node] - self.made[node].keys() - chosen[node].keys():
                for want in missing:
                    chosen[node][want] = strategy = self._strategy(node, want)
                    for a, p in strategy.want.items():
                        wanted[a].add(p)  # type: ignore[arg-type]
        if self.problems:
            fix = (
                "wrap the function that reads the whole matrix: optim.unsharded(fn)(leaf); or keep this parameter "
                "unsharded: where=lambda path, leaf: ..."
            )
            raise FzeroTypeError(self.owner, "cannot run on shards", self.problems, fix)
        for node in nodes:
            for want in sorted(wanted[node], key=lambda p: p if isinstance(p, Sharding) else ()):
                if want not in self.made[node]:
                    self.made[node][want] = chosen[node][want].write(self.write, {})  # type: ignore[index, misc]
        self.graph.output(
            tuple(self.get(x, at or REPLICATE) for x, at in zip(self.source.outputs, demand, strict=True))
        )
        return Recorded(self.graph, self.source.constants)

    def get(self, node: fx.Node, want: Any) -> fx.Node:
        return self.made[node][want]

    # --- placements ---

    def prepared(self, source: Recorded) -> Recorded:
        return source

    def _input(self, x: fx.Node, place: Any, leaf: bool) -> None:
        new = self.graph.placeholder(x.name)
        self.place[x], self.made[x] = place, {place: new}
        new.meta["val"] = x.meta["val"]
        if isinstance(place, Sharding):
            self._as_shard(new, x, place)

    def _node(self, node: fx.Node) -> None:
        """Finds the placement at which a value is computed, and which ops cannot run on shards."""
        if node.op == "placeholder":
            return
        self.place[node], self.made[node] = REPLICATE, {}
        flat = next((a for a in node.all_input_nodes if a in self.path), None)
        fault = next((self.faults[a] for a in node.all_input_nodes if a in self.faults), None)
        if node.target is WHOLE and self.index is None:
            self.from_full |= {node} if num_elements(node) > 1 else set()
        elif flat is None and not self.from_full.isdisjoint(node.all_input_nodes):
            self.from_full.add(node)
        gathers = node.target is WHOLE and self.index is None
        if fault is None and (flat is None or gathers or is_reduction(node)):
            return
        if flat is not None and fault is None:
            place: Any = self.place[flat]
            if self._keeps_shards(node, place):
                self.place[node], self.path[node] = place, self.path[flat]
                return
            at = node.meta.get("place")
            fault = f"{node.target} on {self.path[flat]}{f', at {line(at)}' if at else ''}"
        self.faults[node] = fault  # type: ignore[assignment]

    def _strategy(self, node: fx.Node, want: Place) -> Strategy:
        """How a value is written at a placement; lists a problem if that is impossible."""
        have: Any = self.place[node]
        if node in self.faults:
            self.problems[self.faults[node]] = None
            return Strategy({}, ())
        if have != want and isinstance(have, Sharding):
            path = self.path[node]
            mixed = f"{path}, sharded over {have}, with a tensor that is sharded over {want}"
            self.problems[mixed if isinstance(want, Sharding) else f"{node.target} on {path}"] = None
            return Strategy({}, ())
        inputs = node.all_input_nodes
        flat: Any = next((self.place[a] for a in inputs if a in self.path), None)
        if node.target is WHOLE and (isinstance(want, Sharding) or flat is None):
            return _writes({inputs[0]: want}, lambda: self.get(inputs[0], want))
        if isinstance(want, Sharding):
            return self._strategy_of_shard(node, want)
        if node.target is WHOLE:
            return _writes({inputs[0]: flat}, lambda: self._gathered(node, flat))
        if flat is not None:
            return _writes({inputs[0]: flat}, lambda: self._reduced(node, flat))
        full = dict.fromkeys(inputs, REPLICATE)
        if node.target is DRAW and self.index is None:
            return _writes(full, lambda: self._drawn(node, None))
        return _writes(full, lambda: self._as_it_was(node))

    def _strategy_of_shard(self, node: fx.Node, place: Sharding) -> Strategy:
        """How the shard of a value is written: it is computed from shards, or taken from the full value."""
        inputs, size = node.all_input_nodes, place.numel(node.meta["val"].shape)
        full: dict[fx.Node, Any] = dict.fromkeys(inputs, REPLICATE)
        if node.target in _FACTORY:
            args = ([size], *node.args[1:])
            return _writes(full, lambda: self._emit_shard(node, place, node.target, args, node.kwargs))
        if node.target in SHAPE_ONLY:
            return _writes({}, lambda: self._as_shard(constant(self.graph, node, [size]), node, place))
        if node.target is DRAW:
            draw = self._drawn if self.index is None else self._draw_of
            return _writes(full, lambda: draw(node, place))
        # A scalar that depends on gathered parameters is available where these are, so its readers run there, too.
        by_scalar = node in self.from_full and any(a in self.from_full and num_elements(a) == 1 for a in inputs)
        if node.op != "call_function" or by_scalar or not self._keeps_shards(node, place):
            return _writes({node: REPLICATE}, lambda: self._taken(node, place))
        if node.target in VIEWS or node.target is aten.expand.default:
            return _writes({inputs[0]: place}, lambda: self.get(inputs[0], place))
        if node.target in (BLOCK_MAX, BLOCK_EXPAND):
            args = lambda: (self.get(inputs[0], place), [size])  # noqa: E731
            return _writes({inputs[0]: place}, lambda: self._emit_shard(node, place, node.target, args()))
        want = {a: place if num_elements(a) != 1 else REPLICATE for a in inputs}
        return _writes(want, lambda: self._elementwise(node, place))

    def _keeps_shards(self, node: fx.Node, place: Sharding) -> bool:
        """Whether the shard of a value can be computed from shards of the op's inputs."""
        inputs, count = node.all_input_nodes, num_elements(node)
        if not inputs or node.target in SHAPE_ONLY:
            return bool(inputs)
        if node.target in (BLOCK_MAX, BLOCK_EXPAND):
            elements, blocks = (inputs[0], node) if node.target is BLOCK_MAX else (node, inputs[0])
            shape = shape_of(elements)
            return not place.along and has_blocks(shape) and tuple(shape_of(blocks)) == blocks_shape(shape)
        if node.target in VIEWS or node.target is aten.expand.default:
            keeps = num_elements(inputs[0]) == count
        else:
            rule = rule_of(node.target)
            # A view as another dtype of the same size keeps the number of elements.
            elementwise = node.target is aten.view.dtype or (rule is not None and rule.factors is pointwise)
            keeps = elementwise and all(num_elements(a) in (1, count) for a in inputs)
        if not keeps or not place.along:
            return keeps
        return all(shape_of(a) == shape_of(node) for a in inputs if num_elements(a) != 1)

    # --- values ---

    def _as_it_was(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node, lambda a: self.get(a, REPLICATE))
        new.meta.update({"shard": True} if node in self.from_full else {})
        return new

    def _taken(self, node: fx.Node, place: Sharding) -> fx.Node:
        return self._emit_shard(node, place, take_shard, (self.get(node, REPLICATE), place.axes, place.dims))

    def _elementwise(self, node: fx.Node, place: Sharding) -> fx.Node:
        def argument(a: fx.Node) -> fx.Node:
            if num_elements(a) != 1:
                return self.get(a, place)
            scalar = self.get(a, REPLICATE)
            if scalar.meta["val"].dim() == 0:
                return scalar
            # Shards are 1-D: an operand of shape [1, 1] would broadcast the result to 2-D.
            mark = {"shard": True} if "shard" in scalar.meta else {}
            return self._emit(aten.reshape.default, (scalar, []), scalar.meta["val"].reshape(()), **mark)

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        return self._emit_shard(node, place, node.target, args, kwargs)

    def _gathered(self, node: fx.Node, place: Sharding) -> fx.Node:
        value, source = node.meta["val"], self.get(node.all_input_nodes[0], place)
        args = (source, place.axes, place.dims, tuple(value.shape))
        made = self._once(gather, args, torch.empty(value.shape, dtype=value.dtype, device="meta"))
        made.meta["shard"] = True
        return made

    # --- random draws ---

    def _drawn(self, node: fx.Node, place: Sharding | None) -> fx.Node:
        """A draw, or a rank's shard of it, whose offset comes from an op of the program. So the function that draws for
        one parameter is the same for all similar parameters, and on every rank."""
        value = node.meta["val"]
        if place and place.along:
            what = f"random numbers for a tensor that is sharded over {place}: they are not contiguous"
            raise FzeroTypeError("optimizer", "cannot run on shards", [what], "keep this tensor unsharded")
        args = (node.args[3], tuple(value.shape), place.axes if place else ())
        start = self._emit(draw_start, args, torch.empty((), dtype=torch.int64, device="meta"))
        shape = [place.numel(value.shape)] if place else list(value.shape)
        key, *rest = fx.map_arg(node.args, lambda a: self.get(a, REPLICATE))
        args = from_start((key, *rest), start, shape)
        if place:
            return self._emit_shard(node, place, DRAW_FROM, args, node.kwargs)
        return self._emit(DRAW_FROM, args, value, node.kwargs)

    def _draw_of(self, node: fx.Node, place: Sharding) -> fx.Node:
        """One shard of a draw. If it consists of several runs, the range from its first to its last element is drawn,
        and the elements of other ranks in between are dropped."""
        assert self.index is not None
        value, boxes = node.meta["val"], place.boxes(node.meta["val"].shape, self.index)
        numel = place.numel(value.shape)
        runs = boxes.runs(all_of(boxes.shape)) if place.along else [(0, boxes.start, numel)]
        first, stop = min((a for _, a, _ in runs), default=0), max((a + n for _, a, n in runs), default=0)
        args = fx.map_arg(sub_range(node.args, first, stop), lambda a: self.get(a, REPLICATE))
        drawn = self._emit(DRAW, args, torch.empty(stop - first, dtype=value.dtype, device="meta"), node.kwargs)
        if len(runs) == 1 and stop - first == numel:
            drawn.meta["shard"] = True
            return drawn
        return self._emit_shard(node, place, take_runs, (drawn, [(i, a - first, n) for i, a, n in runs], numel))

    # --- reductions ---

    def _reduced(self, node: fx.Node, place: Sharding) -> fx.Node:
        """A full reduction over shards: padding is masked out, and the partial results of the ranks are combined by an
        all_reduce."""
        source, value, kind = node.all_input_nodes[0], node.meta["val"], FULL_REDUCTIONS[node.target]
        x, order = self.get(source, place), 0.0
        if kind == "norm":
            order = float(node.args[1]) if len(node.args) > 1 else 2.0  # type: ignore[arg-type]
            x, kind = self._for_norm(x, order)
        if kind in ("any", "all"):  # the maximum or minimum of 0 and 1
            x = self._like(x, aten.ne.Scalar, (x, 0), torch.bool)
            x = self._like(x, aten._to_copy.default, (x,), torch.int32, {"dtype": torch.int32})
        if num_elements(source) != place.size * num_elements(x):  # the shards have padding
            x = self._masked(x, source, place, {"max": -math.inf, "all": 1, "min": math.inf}.get(kind, 0))
        op = {"any": "max", "all": "min", "max": "max", "min": "min"}.get(kind, "sum")
        inner = {"max": aten.amax.default, "min": aten.amin.default, "sum": aten.sum.default}[op]
        dtype = torch.int32 if kind in ("any", "all") else value.dtype
        scalar, of_a_rank = (torch.empty((), dtype=d, device="meta") for d in (value.dtype, dtype))
        out = self._emit(inner, (x,), of_a_rank, {"dtype": dtype} if op == "sum" else {}, reduction=True)
        out = self._emit(all_reduce, (out, op, place.axes), of_a_rank)
        if kind == "mean":
            out = self._emit(aten.div.Scalar, (out, num_elements(source)), scalar)
        if kind == "norm":
            out = self._emit(aten.pow.Tensor_Scalar, (out, 1.0 / order), scalar)
        if kind in ("any", "all"):
            out = self._emit(aten.ne.Scalar, (out, 0), scalar)
        return out if value.dim() == 0 else self._emit(aten.reshape.default, (out, list(value.shape)), value)

    def _for_norm(self, x: fx.Node, order: float) -> tuple[fx.Node, str]:
        """The terms of a norm, and the reduction of these."""
        dtype = x.meta["val"].dtype
        x = self._like(x, aten.abs.default, (x,), dtype)
        if order == 0:
            x = self._like(x, aten.ne.Scalar, (x, 0), torch.bool)
            return self._like(x, aten._to_copy.default, (x,), dtype, {"dtype": dtype}), "sum"
        if math.isinf(order):
            return x, "max" if order > 0 else "min"
        return self._like(x, aten.pow.Tensor_Scalar, (x, order), dtype), "norm"

    def _masked(self, x: fx.Node, source: fx.Node, place: Sharding, fill: Any) -> fx.Node:
        """`x` with its padding replaced by the neutral element of the reduction. Earlier ops may have turned the zeros
        of the padding into other values."""
        value, device = x.meta["val"], source.meta["val"].device
        if isinstance(fill, float) and not value.is_floating_point():
            fill = torch.iinfo(value.dtype).min if fill < 0 else torch.iinfo(value.dtype).max
        shape, axes = part_shape(source.meta["val"].shape, place.along), place.axes[len(place.along) :]
        number = torch.empty((), dtype=torch.int64, device="meta")
        valid = self._once(num_valid, (tuple(shape), axes), number)
        kwargs = {"dtype": torch.int64, "device": device}
        index = self._like(x, aten.arange.default, (value.numel(),), torch.int64, kwargs)
        inside = self._like(x, aten.lt.Tensor, (index, valid), torch.bool)
        kwargs = {"dtype": value.dtype, "device": device}
        other = self._once(aten.full.default, ([], fill), torch.empty((), dtype=value.dtype, device="meta"), kwargs)
        return self._like(x, aten.where.self, (inside, x, other), value.dtype)

    # --- writing ---

    def _emit(self, target: Any, args: Any, value: Any, kwargs: Any = None, **meta: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta.update(meta, val=value)
        return node

    def _emit_shard(self, node: fx.Node, place: Sharding, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """Writes an op that computes the shard of an original value."""
        return self._as_shard(self._emit(target, args, None, kwargs), node, place)

    def _as_shard(self, new: fx.Node, node: fx.Node, place: Sharding) -> fx.Node:
        """Marks a new node as the shard of a value. The mark distinguishes a shard with one element from a scalar."""
        value = node.meta["val"]
        new.meta["val"] = torch.empty(place.numel(value.shape), dtype=value.dtype, device="meta")
        new.meta["shard"] = True
        return new

    def _like(self, x: fx.Node, target: Any, args: Any, dtype: torch.dtype, kwargs: Any = None) -> fx.Node:
        """Writes an op whose result is a shard with the elements of another one."""
        value = torch.empty(x.meta["val"].shape, dtype=dtype, device="meta")
        return self._emit(target, args, value, kwargs, shard=True)

    def _once(self, target: Any, args: Any, value: Any, kwargs: Any = None) -> fx.Node:
        """The existing node that makes the same call with the same constants, or else a new one."""
        found = self.graph.find_nodes(op="call_function", target=target)
        known = (n for n in found if n.args == args and n.kwargs == (kwargs or {}))
        return next(known, None) or self._emit(target, args, value, kwargs)


def _writes(want: Mapping[fx.Node, Any], write: Callable[[], fx.Node]) -> Strategy:
    return Strategy(want, (), lambda _, __: write())


def take_runs(x: torch.Tensor, runs: Sequence[tuple[int, int, int]], numel: int) -> torch.Tensor:
    """A tensor of `numel` elements with runs copied from `x`, and zeros elsewhere. Each run is (destination offset,
    source offset, length)."""
    out = x.new_zeros(numel)
    for to, begins, n in runs:
        out[to : to + n] = x[begins : begins + n]
    return out
