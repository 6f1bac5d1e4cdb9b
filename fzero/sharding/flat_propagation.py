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

A traversal from the outputs to the inputs finds which values are needed in full and which as a shard. A traversal from
the inputs to the outputs then writes the new graph. If a result depends on the rank's index or on other ranks, the new
graph contains a marker, which lowering turns into an op of the program.
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
from fzero.sharding.layout import Sharding
from fzero.sharding.placements import Shard
from fzero.sharding.shard_regions import part_shape
from fzero.sharding.shard_regions import whole as all_of
from fzero.trace.guards.user_frames import line
from fzero.trace.recorder import Recorded

aten = torch.ops.aten


def all_reduce(x: torch.Tensor, op: str, axes: tuple[str, ...]) -> torch.Tensor:
    """Marker: the reduction of the `x` of all ranks along these axes."""
    raise AssertionError("a marker is not executable")


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
    aten.view.dtype,  # only between dtypes of the same size; others change the number of elements
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
    """Whether a node reduces a tensor with more than one element to a single element."""
    return node.target in REDUCTIONS and num_elements(node) == 1 != num_elements(node.all_input_nodes[0])


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
    nodes, outputs = list(source.graph.nodes), source.outputs
    leaf: dict[fx.Node, Sharded] = dict(sharded)  # values that are naturally shards, and the parameter they come from
    culprit: dict[fx.Node, str] = {}  # values that cannot be computed, and the op and parameter at fault
    inside: set[fx.Node] = set()  # computed from unsharded parameters: parameter arithmetic, but not shards
    for node in nodes:
        origin = next((leaf[a] for a in node.all_input_nodes if a in leaf), None)
        if node.target is WHOLE and index is None:
            inside |= {node} if num_elements(node) > 1 else set()
        elif origin and node.op == "call_function" and not is_reduction(node):
            leaf[node] = origin
            place = node.meta.get("place")
            at_fault = (
                None
                if _shardable(node, origin.sharding)
                else f"{node.target} on {origin.path}{f', at {line(place)}' if place else ''}"
            )
            at_fault = next((culprit[a] for a in node.all_input_nodes if a in culprit), at_fault)
            if at_fault:
                culprit[node] = at_fault
        elif not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
    # Values computed from a scalar that depends on unsharded parameters are computed in full too, because the scalar is
    # available where these parameters are.
    numbers = {n for n in inside if num_elements(n) == 1}
    at_once = {n for n in inside if not numbers.isdisjoint(n.all_input_nodes)}
    want: dict[fx.Node, set[Sharding | None]] = {n: set() for n in nodes}
    problems: dict[str, None] = {}
    for node, shard in zip(outputs, demand, strict=True):
        want[node].add(shard)
    for node in reversed(nodes):
        for shard in _unsharded_first(want[node]):
            for arg, needs in _needs(node, None if node in at_once else shard, leaf, culprit, problems):
                want[arg].add(needs)
    if problems:
        fix = (
            "wrap the function that reads the whole matrix: optim.unsharded(fn)(leaf); or keep this parameter "
            "unsharded: where=lambda path, leaf: ..."
        )
        raise FzeroTypeError(owner, "cannot run on shards", problems, fix)
    graph = compat.Graph()
    env: Env = {}
    for node in nodes:
        if node.op == "placeholder":
            arrives = sharded[node].sharding if node in sharded else None
            new = graph.placeholder(node.name)
            new.meta["val"] = _local(node, arrives)
            if arrives:
                new.meta["shard"] = True
            env[node, arrives] = new
            for shard in (s for s in _unsharded_first(want[node]) if s is not None and arrives is None):
                env[node, shard] = _take_shard(graph, new, shard, _local(node, shard))
                env[node, shard].meta["shard"] = True
            continue
        for shard in _unsharded_first(want[node]):
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
                    env[node, shard] = _take_shard(graph, env[node, None], shard, _local(node, shard))
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


Env = dict[tuple[fx.Node, Sharding | None], fx.Node]
"""Maps a value of the old graph and how it is sharded (None: in full) to a node of the new graph."""


def _unsharded_first(shardings: set[Sharding | None]) -> list[Sharding | None]:
    return sorted(shardings, key=lambda c: c or ((), 0, 0))


def constants_for_shapes(graph: Recorded) -> Recorded:
    """Replaces ops that read only the shape of a value by constants. Inputs that no op reads any more have no users
    afterwards.

    The graph is changed in place.
    """
    for node in list(graph.graph.nodes):
        if node.target in _LIKE or node.target in _NEW:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(_constant(graph.graph, node, list(node.meta["val"].shape), node.meta["val"]))
    graph.graph.eliminate_dead_code()
    return graph


def _constant(graph: fx.Graph, node: fx.Node, shape: list[int], value: torch.Tensor) -> fx.Node:
    """A constant of any shape, with the value of a node such as `zeros_like`."""
    fill = (
        node.args[-1] if node.target in (aten.full_like.default, aten.new_full.default) else int(node.target in _ONES)
    )
    device = node.kwargs.get("device") or node.meta["val"].device
    return _emit(graph, aten.full.default, (shape, fill), value, {"dtype": value.dtype, "device": device})


def _shardable(node: fx.Node, shard: Sharding) -> bool:
    """Whether a node's shard can be computed from shards of its inputs."""
    if node.target in _LIKE or node.target in _NEW:
        return True
    return _is_view(node, shard) or _is_local(node, shard) or _is_blockwise(node, shard)


def _is_local(node: fx.Node, shard: Sharding) -> bool:
    """Whether a node is pointwise, and its arguments are tensors of the same size and scalars."""
    if not _is_pointwise(node.target):
        return False
    sizes = {num_elements(a) for a in node.all_input_nodes}
    return sizes <= {1, num_elements(node)} and _keeps_dims(node, shard)


def _keeps_dims(node: fx.Node, shard: Sharding) -> bool:
    """Whether a node's arguments have the same dims as the node. This is required only if the shard is sharded along
    dims."""
    shapes = {a.meta["val"].shape for a in node.all_input_nodes if num_elements(a) != 1}
    return not shard.along or shapes <= {node.meta["val"].shape}


def _is_blockwise(node: fx.Node, shard: Sharding) -> bool:
    """Whether a node maps the elements of a parameter to values per block, or back, and the parameter is sharded only
    at block boundaries."""
    if node.target not in (BLOCK_MAX, BLOCK_EXPAND) or shard.along:
        return False
    elements, numbers = (node.all_input_nodes[0], node) if node.target is BLOCK_MAX else (node, node.all_input_nodes[0])
    shape = elements.meta["val"].shape
    return has_blocks(shape) and tuple(numbers.meta["val"].shape) == blocks_shape(shape)


def _is_view(node: fx.Node, shard: Sharding) -> bool:
    same = node.target in VIEWS and num_elements(node) == num_elements(node.args[0])  # type: ignore[arg-type]
    return same and _keeps_dims(node, shard)


def _needs(
    node: fx.Node,
    shard: Sharding | None,
    leaf: Mapping[fx.Node, Sharded],
    culprit: Mapping[fx.Node, str],
    problems: dict[str, None],
) -> list[tuple[fx.Node, Sharding | None]]:
    """The inputs that are needed to compute a node in full or its shard, and how each of them must be sharded (None: in
    full)."""
    if shard and node in leaf and leaf[node].sharding != shard:
        path, sharding = leaf[node]
        problems[f"{path}, sharded over {sharding}, with a tensor that is sharded over {shard}"] = None
        return []
    if node.op != "call_function":
        return []
    args = list(node.all_input_nodes)
    natural = [(a, leaf[a].sharding if a in leaf else None) for a in args]
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
    return [(a, None) for a in args]  # in full, and sharded afterwards


def _whole(
    graph: fx.Graph, node: fx.Node, shard: Sharding | None, leaf: Mapping[fx.Node, Sharded], env: Env
) -> fx.Node:
    """A value that is marked as unsharded: gathered if its source is sharded, or its shard if that is requested."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    if shard or source not in leaf:
        return env[source, shard]
    of, shape = leaf[source].sharding, tuple(node.meta["val"].shape)
    value = torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    gathered = _once(graph, gather, (env[source, of], of.axes, of.dims, shape), value)
    gathered.meta["shard"] = True
    return gathered


def _take_shard(graph: fx.Graph, source: fx.Node, shard: Sharding, value: torch.Tensor) -> fx.Node:
    return _emit(graph, take_shard, (source, shard.axes, shard.dims), value)


def _make(
    graph: fx.Graph, node: fx.Node, shard: Sharding | None, leaf: Mapping[fx.Node, Sharded], env: Env, index: int | None
) -> fx.Node:
    """Writes the node, computed on shards, to the new graph."""
    if not shard:
        return _reduce(graph, node, env, leaf[node.args[0]].sharding)  # type: ignore[index]
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
            # Shards are 1-D: an operand of shape [1, 1] would broadcast the result to 2-D.
            scalar = _emit(graph, aten.reshape.default, (whole, []), whole.meta["val"].reshape(()))
            scalar.meta.update({"shard": True} if "shard" in whole.meta else {})
            return scalar

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        return _emit(graph, node.target, args, local, kwargs)
    if (node, None) not in env:
        env[node, None] = graph.node_copy(node, lambda n: env[n, None])
    return _take_shard(graph, env[node, None], shard, local)


def _draw(graph: fx.Graph, node: fx.Node, shard: Sharding | None, env: Env) -> fx.Node:
    """A draw, or a rank's shard of it, whose offset comes from an op of the program. So the function that draws for one
    parameter is the same for all similar parameters, and on every rank."""
    value, axes = _local(node, shard), shard.axes if shard else ()
    if shard and shard.along:
        what = f"random numbers for a tensor that is sharded over {shard}: they are not contiguous"
        raise FzeroTypeError("optimizer", "cannot run on shards", [what], "keep this tensor unsharded")
    start = _emit(
        graph,
        draw_start,
        (node.args[3], tuple(node.meta["val"].shape), axes),
        torch.empty((), dtype=torch.int64, device="meta"),
    )
    args = from_start(node.args, start, value.shape)
    return _emit(graph, DRAW_FROM, fx.map_arg(args, lambda n: env.get((n, None), n)), value, node.kwargs)


def _draw_shard(graph: fx.Graph, node: fx.Node, shard: Sharding, env: Env, index: int) -> fx.Node:
    """One shard of a draw. If it consists of several runs, the range from its first to its last element is drawn, and
    the elements of other ranks in between are dropped."""
    value, boxes = _local(node, shard), shard.boxes(node.meta["val"].shape, index)
    runs = boxes.runs(all_of(boxes.shape)) if shard.along else [(0, boxes.start, value.numel())]
    first, stop = min((a for _, a, _ in runs), default=0), max((a + n for _, a, n in runs), default=0)
    args = fx.map_arg(sub_range(node.args, first, stop), lambda n: env[n, None])
    drawn = _emit(graph, DRAW, args, torch.empty(stop - first, dtype=value.dtype, device="meta"), node.kwargs)
    if len(runs) == 1 and stop - first == value.numel():
        return drawn
    return _emit(graph, take_runs, (drawn, [(i, a - first, n) for i, a, n in runs], value.numel()), value)


def take_runs(x: torch.Tensor, runs: Sequence[tuple[int, int, int]], numel: int) -> torch.Tensor:
    """A tensor of `numel` elements with runs copied from `x`, and zeros elsewhere. Each run is (destination offset,
    source offset, length)."""
    out = x.new_zeros(numel)
    for to, begins, n in runs:
        out[to : to + n] = x[begins : begins + n]
    return out


def _reduce(graph: fx.Graph, node: fx.Node, env: Env, shard: Sharding) -> fx.Node:
    """A full reduction over shards: padding is masked out, and the partial results of the ranks are combined by an
    all_reduce."""
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
    # only if the shards have padding
    if num_elements(source) != shard.size * x.meta["val"].numel():
        x = _mask(
            graph,
            x,
            part_shape(source.meta["val"].shape, shard.along),
            shard.axes[len(shard.along) :],
            {"max": "lowest", "all": 1, "min": "highest"}.get(kind, 0),
            value.device,
        )
    # `any` is the maximum of 0 and 1, `all` the minimum.
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
    """`x` with its padding replaced by the neutral element of the reduction. Earlier ops may have turned the zeros of
    the padding into other values."""
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
    """`_emit` for the values of one rank's shard. The mark distinguishes a shard with one element from a scalar."""
    node = _emit(graph, target, args, value, kwargs)
    node.meta["shard"] = True
    return node


def _once(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor, kwargs: Any = None) -> fx.Node:
    """The existing node that makes the same call with the same constants, or else a new one."""
    known = (
        n for n in graph.find_nodes(op="call_function", target=target) if n.args == args and n.kwargs == (kwargs or {})
    )
    return next(known, None) or _emit(graph, target, args, value, kwargs)


def num_elements(node: fx.Node) -> int:
    """The number of elements of a node's value; -1 if it is not a tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else -1


def _local(node: fx.Node, shard: Sharding | None) -> torch.Tensor:
    """A rank's shard of a node's value, or the full value if `shard` is None."""
    value = node.meta["val"]
    if shard is None or not isinstance(value, torch.Tensor):
        return value
    return torch.empty(shard.numel(value.shape), dtype=value.dtype, device="meta")
