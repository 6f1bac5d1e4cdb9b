"""Propagates sharding through a pure function: an optimizer's update, its init, an init function.

A leaf is a flat shard (fzero/sharding/layout.py), so what keeps to its elements keeps to its shards:
  pointwise operations    run on the shards, with whole scalars beside them
  blocks of 256           lie within shards: what is the same for a block, or made of it, is too
                          (fzero/ops/block_quantization.py)
  views                   are nothing: a flat shard has no shape to change
  full reductions         run on the shards and leave a summand each, which meet in an all_reduce over the axes of
                          that leaf
  constants, random bits  are made shard by shard; in an update a draw starts where a line says (`draw_start`) marked as
  whole         (fzero/ops/unsharded_mark.py) are gathered in an update; what is computed of them is cut where a
                          shard of it is asked for

Anything else on a sharded leaf is an error that names the operation and the leaf, and so is an operation on two leaves
that are sharded over different axes. A value that does not depend on a sharded leaf can always be made whole and cut.

The demands are found from the outputs back (who needs this value whole, who needs its shard), the new graph is made
from the inputs forward. Where the result needs a rank's own facts, or another rank, it holds a marker that lowering
turns into a line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.errors import FzeroTypeError
from fzero.ops.block_quantization import BLOCK_EXPAND, BLOCK_MAX, blocks_shape, has_blocks
from fzero.ops.unsharded_mark import WHOLE
from fzero.random import DRAW, DRAW_FROM, from_start, sub_range
from fzero.sharding.layout import Cut
from fzero.sharding.shard_regions import Dim, part_shape
from fzero.sharding.shard_regions import whole as all_of
from fzero.trace.guards.user_frames import line
from fzero.trace.recorder import Recorded

aten = torch.ops.aten


def all_reduce(x: torch.Tensor, op: str, axes: tuple[str, ...]) -> torch.Tensor:
    """Marker: the reduction of the `x` of every rank along these axes."""
    raise AssertionError("a marker is not executable")


def cut(x: torch.Tensor, axes: tuple[str, ...], dims: tuple[Dim, ...] = ()) -> torch.Tensor:
    """Marker: this rank's flat shard of the whole `x` over these axes, the first of which cut along these dims."""
    raise AssertionError("a marker is not executable")


def gather(x: torch.Tensor, axes: tuple[str, ...], dims: tuple[Dim, ...], shape: Sequence[int]) -> torch.Tensor:
    """Marker: the whole value of this shape from the ranks' flat shards over these axes; the first axes cut along these
    dims."""
    raise AssertionError("a marker is not executable")


def num_valid(shape: Sequence[int], axes: tuple[str, ...]) -> torch.Tensor:
    """Marker: how many elements of this rank's shard over these axes of a leaf of this shape are not padding (0-dim
    int64)."""
    raise AssertionError("a marker is not executable")


def draw_start(base: int, shape: Sequence[int], axes: tuple[str, ...]) -> torch.Tensor:
    """Marker: where this rank's part over these axes of a leaf of this shape, without axes the whole leaf, begins in a
    draw of which the leaf begins at `base` (0-dim int64)."""
    raise AssertionError("a marker is not executable")


VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}
_POINTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.where.self,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.isfinite.default,
    aten.fill.Scalar,
    aten.copy.default,
    aten.view.dtype,  # between dtypes of one size: any other changes the number of elements
}
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}
_NEW = {aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default}
_ONES = {aten.ones_like.default, aten.new_ones.default}
_FACTORY = {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}
REDUCTIONS: dict[Any, str] = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.amax.default: "max",
    aten.max.default: "max",
    aten.amin.default: "min",
    aten.min.default: "min",
    aten.any.default: "any",
    aten.any.dims: "any",
    aten.all.default: "all",
    aten.linalg_vector_norm.default: "norm",
}


@functools.cache
def _is_pointwise(target: Any) -> bool:
    return target in _POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def is_reduction(node: fx.Node) -> bool:
    """Whether a node reduces all of a tensor with more than one element to one."""
    return node.target in REDUCTIONS and num_elements(node) == 1 != num_elements(node.all_input_nodes[0])


class Sharded(NamedTuple):
    """A leaf that comes as a flat shard: its path, for errors, and how it is cut."""

    path: str
    cut: Cut


def propagate(
    source: Recorded,
    sharded: Mapping[fx.Node, Sharded],
    demand: Sequence[Cut | None],
    owner: str,
    index: int | None = None,
) -> Recorded:
    """The function on shards.

    Args:
        source: the function on whole values.
        sharded: the inputs that arrive as flat shards.
        demand: for each output how the shard is cut that is wanted; None: it is wanted whole.
        owner: who is sharded, for errors.
        index: which shard is made. Only random draws need it: without it the function is the same for every rank, and
            each draw starts where a marker says.

    Raises:
        FzeroTypeError: listing every operation that cannot run on shards, with its leaf and its line.
    """
    nodes, outputs = list(source.graph.nodes), source.outputs
    leaf: dict[fx.Node, Sharded] = dict(sharded)  # values that are shards by nature, and the leaf that made them so
    culprit: dict[fx.Node, str] = {}  # values that there is no way to have, and the operation and leaf at fault
    inside: set[fx.Node] = set()  # values computed from whole leaves: leaf arithmetic, though no shards
    for node in nodes:
        origin = next((leaf[a] for a in node.all_input_nodes if a in leaf), None)
        if node.target is WHOLE and index is None:
            inside |= {node} if num_elements(node) > 1 else set()
        elif origin and node.op == "call_function" and not is_reduction(node):
            leaf[node] = origin
            place = node.meta.get("place")
            at_fault = (
                None
                if _shardable(node, origin.cut)
                else f"{node.target} on {origin.path}{f', at {line(place)}' if place else ''}"
            )
            at_fault = next((culprit[a] for a in node.all_input_nodes if a in culprit), at_fault)
            if at_fault:
                culprit[node] = at_fault
        elif not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
    # readers of a number made of whole leaves are made whole, too: the number is where these leaves are
    numbers = {n for n in inside if num_elements(n) == 1}
    at_once = {n for n in inside if not numbers.isdisjoint(n.all_input_nodes)}
    want: dict[fx.Node, set[Cut | None]] = {n: set() for n in nodes}
    problems: dict[str, None] = {}
    for node, shard in zip(outputs, demand, strict=True):
        want[node].add(shard)
    for node in reversed(nodes):
        for shard in _whole_first(want[node]):
            for arg, needs in _needs(node, None if node in at_once else shard, leaf, culprit, problems):
                want[arg].add(needs)
    if problems:
        fix = (
            "a function that reads a matrix as a matrix: optim.unsharded(fn)(leaf); or keep this leaf whole: "
            "where=lambda path, leaf: ..."
        )
        raise FzeroTypeError(owner, "cannot run on shards", problems, fix)
    graph = compat.Graph()
    env: Env = {}
    for node in nodes:
        if node.op == "placeholder":
            arrives = sharded[node].cut if node in sharded else None
            new = graph.placeholder(node.name)
            new.meta["val"] = _local(node, arrives)
            if arrives:
                new.meta["shard"] = True
            env[node, arrives] = new
            for shard in (s for s in _whole_first(want[node]) if s is not None and arrives is None):
                env[node, shard] = _cut(graph, new, shard, _local(node, shard))
                env[node, shard].meta["shard"] = True
            continue
        for shard in _whole_first(want[node]):
            draws = node.target is DRAW and index is None
            if node.target is WHOLE and node not in leaf:
                env[node, shard] = _whole(graph, node, shard, leaf, env)
            elif not draws and (
                node.op == "get_attr"
                or node in at_once
                or (not shard and node not in leaf and not (is_reduction(node) and node.args[0] in leaf))
            ):
                if (node, None) not in env:
                    env[node, None] = graph.node_copy(node, lambda n: env[n, None])
                if shard:
                    env[node, shard] = _cut(graph, env[node, None], shard, _local(node, shard))
            elif draws:
                env[node, shard] = _draw(graph, node, shard, env)
            else:
                env[node, shard] = _make(graph, node, shard, leaf, env, index)
            if shard:
                env[node, shard].meta["shard"] = True
            if (node, None) in env and node in inside and node.target is not WHOLE:
                env[node, None].meta["shard"] = True
    graph.output(tuple(env[n, s] for n, s in zip(outputs, demand, strict=True)))
    return Recorded(graph, source.constants)


Env = dict[tuple[fx.Node, Cut | None], fx.Node]
"""The node of the new graph for a value of the old one, cut so, or whole."""


def _whole_first(cuts: set[Cut | None]) -> list[Cut | None]:
    return sorted(cuts, key=lambda c: c or ((), 0, 0))


def constants_for_shapes(graph: Recorded) -> Recorded:
    """The same function, with constants where it asks a value for nothing but its shape; inputs that no line reads any
    more have no users.

    The graph is changed."""
    for node in list(graph.graph.nodes):
        if node.target in _LIKE or node.target in _NEW:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(_constant(graph.graph, node, list(node.meta["val"].shape), node.meta["val"]))
    graph.graph.eliminate_dead_code()
    return graph


def _constant(graph: fx.Graph, node: fx.Node, shape: list[int], value: torch.Tensor) -> fx.Node:
    """The constant that a node like another tensor is, of any shape."""
    fill = (
        node.args[-1] if node.target in (aten.full_like.default, aten.new_full.default) else int(node.target in _ONES)
    )
    device = node.kwargs.get("device") or node.meta["val"].device
    return _emit(graph, aten.full.default, (shape, fill), value, {"dtype": value.dtype, "device": device})


def _shardable(node: fx.Node, shard: Cut) -> bool:
    """Whether a node's shard can be made from shards of its inputs."""
    if node.target in _LIKE or node.target in _NEW:
        return True
    return _is_view(node, shard) or _is_local(node, shard) or _is_blockwise(node, shard)


def _is_local(node: fx.Node, shard: Cut) -> bool:
    """Whether a node is pointwise between tensors of one size and scalars."""
    if not _is_pointwise(node.target):
        return False
    sizes = {num_elements(a) for a in node.all_input_nodes}
    return sizes <= {1, num_elements(node)} and _keeps_dims(node, shard)


def _keeps_dims(node: fx.Node, shard: Cut) -> bool:
    """Whether a node's arguments have its dims, if dims are cut."""
    shapes = {a.meta["val"].shape for a in node.all_input_nodes if num_elements(a) != 1}
    return not shard.along or shapes <= {node.meta["val"].shape}


def _is_blockwise(node: fx.Node, shard: Cut) -> bool:
    """Whether a node goes from the elements of a leaf that is cut between blocks to its blocks, or back."""
    if node.target not in (BLOCK_MAX, BLOCK_EXPAND) or shard.along:
        return False
    elements, numbers = (node.all_input_nodes[0], node) if node.target is BLOCK_MAX else (node, node.all_input_nodes[0])
    shape = elements.meta["val"].shape
    return has_blocks(shape) and tuple(numbers.meta["val"].shape) == blocks_shape(shape)


def _is_view(node: fx.Node, shard: Cut) -> bool:
    same = node.target in VIEWS and num_elements(node) == num_elements(node.args[0])  # type: ignore[arg-type]
    return same and _keeps_dims(node, shard)


def _needs(
    node: fx.Node,
    shard: Cut | None,
    leaf: Mapping[fx.Node, Sharded],
    culprit: Mapping[fx.Node, str],
    problems: dict[str, None],
) -> list[tuple[fx.Node, Cut | None]]:
    """The inputs of a node and how they must be cut, None for whole, to have the node whole or its shard."""
    if shard and node in leaf and leaf[node].cut != shard:
        path, cut = leaf[node]
        problems[f"{path}, sharded over {cut}, with a leaf that is sharded over {shard}"] = None
        return []
    if node.op != "call_function":
        return []
    args = list(node.all_input_nodes)
    natural = [(a, leaf[a].cut if a in leaf else None) for a in args]
    if node.target is WHOLE and node not in leaf:
        return [(args[0], shard)] if shard else natural
    if not shard:
        if node not in leaf and not is_reduction(node):
            return [(a, None) for a in args]
        if is_reduction(node):
            return natural
        problems[culprit.get(node, f"{node.target} on {leaf[node].path}")] = None
        return []
    if node.target in _FACTORY or node.target is DRAW:
        return [(a, None) for a in args]
    if node.target in _LIKE or node.target in _NEW:
        return natural
    if _is_view(node, shard) or _is_blockwise(node, shard):
        return [(node.args[0], shard)]  # type: ignore[list-item]
    if _is_local(node, shard):
        return [(a, shard if num_elements(a) != 1 else None) for a in args]
    if node in leaf:
        problems[culprit.get(node, f"{node.target} on {leaf[node].path}")] = None
        return []
    return [(a, None) for a in args]  # whole, then cut


def _whole(graph: fx.Graph, node: fx.Node, shard: Cut | None, leaf: Mapping[fx.Node, Sharded], env: Env) -> fx.Node:
    """A value that is marked as whole: gathered, if there are shards of it, or one of these, if that is wanted."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    if shard or source not in leaf:
        return env[source, shard]
    of, shape = leaf[source].cut, tuple(node.meta["val"].shape)
    value = torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    gathered = _once(graph, gather, (env[source, of], of.axes, of.dims, shape), value)
    gathered.meta["shard"] = True
    return gathered


def _cut(graph: fx.Graph, source: fx.Node, shard: Cut, value: torch.Tensor) -> fx.Node:
    return _emit(graph, cut, (source, shard.axes, shard.dims), value)


def _make(
    graph: fx.Graph, node: fx.Node, shard: Cut | None, leaf: Mapping[fx.Node, Sharded], env: Env, index: int | None
) -> fx.Node:
    """The node on shards, in the new graph."""
    if not shard:
        return _reduce(graph, node, env, leaf[node.args[0]].cut)  # type: ignore[index]
    local = _local(node, shard)
    if node.target in _FACTORY:
        return _emit(graph, node.target, ([local.numel()], *node.args[1:]), local, node.kwargs)
    if node.target is DRAW and index is not None:
        return _draw_shard(graph, node, shard, env, index)
    if node.target in _LIKE or node.target in _NEW:
        return _constant(graph, node, [local.numel()], local)
    if _is_blockwise(node, shard):
        return _emit(graph, node.target, (env[node.args[0], shard], [local.numel()]), local)  # type: ignore[index]
    if _is_view(node, shard):
        return env[node.args[0], shard]  # type: ignore[index]
    if _is_local(node, shard):

        def argument(a: fx.Node) -> fx.Node:
            if num_elements(a) != 1:
                return env[a, shard]
            whole = env[a, None]
            if whole.meta["val"].dim() == 0:
                return whole
            scalar = _emit(graph, aten.reshape.default, (whole, []), whole.meta["val"].reshape(()))
            scalar.meta.update({"shard": True} if "shard" in whole.meta else {})
            return scalar

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        return _emit(graph, node.target, args, local, kwargs)
    if (node, None) not in env:
        env[node, None] = graph.node_copy(node, lambda n: env[n, None])
    return _cut(graph, env[node, None], shard, local)


def _draw(graph: fx.Graph, node: fx.Node, shard: Cut | None, env: Env) -> fx.Node:
    """A draw, or a rank's shard of it, that starts where a line says: a function that draws for one leaf draws for all
    like it, on every rank."""
    value, axes = _local(node, shard), shard.axes if shard else ()
    if shard and shard.along:
        what = f"random numbers for a leaf that is sharded over {shard}: they do not lie one behind the other"
        raise FzeroTypeError("optimizer", "cannot run on shards", [what], "keep this leaf uncut")
    start = _emit(
        graph,
        draw_start,
        (node.args[3], tuple(node.meta["val"].shape), axes),
        torch.empty((), dtype=torch.int64, device="meta"),
    )
    args = from_start(node.args, start, value.shape)
    return _emit(graph, DRAW_FROM, fx.map_arg(args, lambda n: env.get((n, None), n)), value, node.kwargs)


def _draw_shard(graph: fx.Graph, node: fx.Node, shard: Cut, env: Env, index: int) -> fx.Node:
    """One shard of a draw: drawn from its first element to its last, without other ranks' elements in between."""
    value, boxes = _local(node, shard), shard.boxes(node.meta["val"].shape, index)
    runs = boxes.runs(all_of(boxes.shape)) if shard.along else [(0, boxes.start, value.numel())]
    first, stop = min((a for _, a, _ in runs), default=0), max((a + n for _, a, n in runs), default=0)
    args = fx.map_arg(sub_range(node.args, first, stop), lambda n: env[n, None])
    drawn = _emit(graph, DRAW, args, torch.empty(stop - first, dtype=value.dtype, device="meta"), node.kwargs)
    if len(runs) == 1 and stop - first == value.numel():
        return drawn
    return _emit(graph, take_runs, (drawn, [(i, a - first, n) for i, a, n in runs], value.numel()), value)


def take_runs(x: torch.Tensor, runs: Sequence[tuple[int, int, int]], numel: int) -> torch.Tensor:
    """So many elements, those of each run of `x` where it says, and zeros: (where to, where from, how many)."""
    out = x.new_zeros(numel)
    for to, begins, n in runs:
        out[to : to + n] = x[begins : begins + n]
    return out


def _reduce(graph: fx.Graph, node: fx.Node, env: Env, shard: Cut) -> fx.Node:
    """A full reduction over shards: padding is masked out, the summands of the ranks meet in an all_reduce."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    x, value, kind = env[source, shard], node.meta["val"], REDUCTIONS[node.target]
    dtype, order = value.dtype, 0.0
    scalar = torch.empty((), dtype=dtype, device="meta")
    if kind == "norm":
        order = float(node.args[1]) if len(node.args) > 1 else 2.0  # type: ignore[arg-type]
        x = _of_shard(graph, aten.abs.default, (x,), x.meta["val"])
        if order == 0:
            nonzero = _of_shard(
                graph, aten.ne.Scalar, (x, 0), torch.empty(x.meta["val"].shape, dtype=torch.bool, device="meta")
            )
            x, kind = (
                _of_shard(graph, aten._to_copy.default, (nonzero,), x.meta["val"], {"dtype": x.meta["val"].dtype}),
                "sum",
            )
        elif math.isinf(order):
            kind = "max" if order > 0 else "min"
        else:
            x = _of_shard(graph, aten.pow.Tensor_Scalar, (x, order), x.meta["val"])
    if kind in ("any", "all"):
        x = _of_shard(graph, aten.ne.Scalar, (x, 0), torch.empty(x.meta["val"].shape, dtype=torch.bool, device="meta"))
        x = _of_shard(
            graph,
            aten._to_copy.default,
            (x,),
            torch.empty(x.meta["val"].shape, dtype=torch.int32, device="meta"),
            {"dtype": torch.int32},
        )
    if num_elements(source) != shard.size * x.meta["val"].numel():
        x = _mask(
            graph,
            x,
            part_shape(source.meta["val"].shape, shard.along),
            shard.axes[len(shard.along) :],
            {"max": "lowest", "all": 1, "min": "highest"}.get(kind, 0),
            value.device,
        )
    inner = {
        "max": aten.amax.default,
        "any": aten.amax.default,
        "min": aten.amin.default,
        "all": aten.amin.default,
    }.get(kind, aten.sum.default)
    inner_dtype = torch.int32 if kind in ("any", "all") else dtype
    kwargs = {"dtype": dtype} if inner is aten.sum.default else {}
    out = _emit(graph, inner, (x,), scalar.to(inner_dtype), kwargs)
    out.meta["reduction"] = True
    op = {"any": "max", "all": "min", "max": "max", "min": "min"}.get(kind, "sum")
    out = _emit(graph, all_reduce, (out, op, shard.axes), scalar.to(inner_dtype))
    if kind == "mean":
        out = _emit(graph, aten.div.Scalar, (out, num_elements(source)), scalar)
    if kind == "norm":
        out = _emit(graph, aten.pow.Tensor_Scalar, (out, 1.0 / order), scalar)
    if kind in ("any", "all"):
        out = _emit(graph, aten.ne.Scalar, (out, 0), scalar)
    return out if value.dim() == 0 else _emit(graph, aten.reshape.default, (out, list(value.shape)), value)


def _mask(graph: fx.Graph, x: fx.Node, shape: Sequence[int], axes: tuple[str, ...], fill: Any, device: Any) -> fx.Node:
    """`x` with its padding replaced by the reduction's neutral value: operations may have turned the zeros into
    anything."""
    value = x.meta["val"]
    if fill == "lowest":
        fill = -math.inf if value.is_floating_point() else torch.iinfo(value.dtype).min
    elif fill == "highest":
        fill = math.inf if value.is_floating_point() else torch.iinfo(value.dtype).max
    integers = torch.empty(value.shape, dtype=torch.int64, device="meta")
    valid = _once(graph, num_valid, (tuple(shape), axes), torch.empty((), dtype=torch.int64, device="meta"))
    index = _of_shard(graph, aten.arange.default, (value.numel(),), integers, {"dtype": torch.int64, "device": device})
    inside = _of_shard(graph, aten.lt.Tensor, (index, valid), integers.to(torch.bool))
    other = _once(
        graph,
        aten.full.default,
        ([], fill),
        torch.empty((), dtype=value.dtype, device="meta"),
        {"dtype": value.dtype, "device": device},
    )
    return _of_shard(graph, aten.where.self, (inside, x, other), value)


def _emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor, kwargs: Any = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = value
    return node


def _of_shard(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor, kwargs: Any = None) -> fx.Node:
    """`_emit` for a rank's own values: a shard of one element is no scalar."""
    node = _emit(graph, target, args, value, kwargs)
    node.meta["shard"] = True
    return node


def _once(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor, kwargs: Any = None) -> fx.Node:
    """The node that does this with the same constants, if there is one."""
    known = (
        n for n in graph.find_nodes(op="call_function", target=target) if n.args == args and n.kwargs == (kwargs or {})
    )
    return next(known, None) or _emit(graph, target, args, value, kwargs)


def num_elements(node: fx.Node) -> int:
    """The number of elements of a node; -1 if it has no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else -1


def _local(node: fx.Node, shard: Cut | None) -> torch.Tensor:
    """A rank's part of a node, cut so or whole."""
    value = node.meta["val"]
    if shard is None or not isinstance(value, torch.Tensor):
        return value
    return torch.empty(shard.numel(value.shape), dtype=value.dtype, device="meta")
