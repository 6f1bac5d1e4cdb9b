"""Runs functions that `fzero.sharding.propagation` propagated on the parts of n ranks at once, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero._compat.compat import FakeTensorMode
from fzero.ir.from_graph import Functions
from fzero.sharding.graph_writer import MARKERS, all_gather, all_reduce, all_to_all, reduce_scatter
from fzero.sharding.placements import REPLICATE, Partial, Placement, Shard
from fzero.sharding.propagation import propagate
from fzero.sharding.shard_regions import DimShard, parts_of
from fzero.sharding.sharded_graph import OutputPlacement, ShardedGraph
from fzero.trace.block_body import resolved
from fzero.trace.functionalization import AGAIN
from fzero.trace.graph_capture import record
from fzero.trace.joint_graph import Joint
from fzero.trace.recorder import Recorded
from fzero.transforms.joint_split import Choices, Split

Tensors = Sequence[torch.Tensor]


def recorded(fn: Callable[..., Any], inputs: Tensors) -> Recorded:
    """The graph of a function of these tensors that returns one or several."""
    with FakeTensorMode():
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]

        def flat(*xs: torch.Tensor) -> list[torch.Tensor]:
            out = fn(*xs)
            return list(out) if isinstance(out, (tuple, list)) else [out]

        return record(flat, fakes, owner="test", names=[f"x_{i}" for i in range(len(fakes))])


def with_gradients(fn: Callable[..., Any], inputs: Tensors) -> tuple[Recorded, list[torch.Tensor]]:
    """The graph of a function and its gradients, of inputs and tangents, and tangents."""
    torch.manual_seed(1)
    ys = fn(*inputs)
    ys = list(ys) if isinstance(ys, (tuple, list)) else [ys]
    of = [i for i, y in enumerate(ys) if y.is_floating_point()]
    trained = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    tangents = [torch.randn(ys[i].shape).to(ys[i].dtype) for i in of]

    def joint(*args: torch.Tensor) -> list[torch.Tensor]:
        xs = list(args[: len(inputs)])
        for i in trained:
            xs[i] = xs[i].detach().requires_grad_()
        ys = fn(*xs)
        ys = list(ys) if isinstance(ys, (tuple, list)) else [ys]
        differentiable = [k for k, i in enumerate(of) if ys[i].requires_grad]
        grads = torch.autograd.grad(
            [ys[of[k]] for k in differentiable],
            [xs[i] for i in trained],
            [args[len(inputs) + k] for k in differentiable],
            allow_unused=True,
        )
        return [*ys, *(resolved(g) for g in grads if g is not None)]

    with FakeTensorMode():
        everything = [*inputs, *tangents]
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in everything]
        names = [f"x_{i}" for i in range(len(inputs))] + [f"tangent_{i}" for i in range(len(tangents))]
        return record(joint, fakes, owner="test", names=names, trained=None), tangents


def cuts_of(shape: Sequence[int], n: int, groups: Sequence[int] = (1, 2, 3)) -> list[Shard]:
    """Every place along which a value of this shape has n equal parts."""
    return [Shard(d, g) for d, s in enumerate(shape) for g in groups if s and s % (n * g) == 0]


def parts(x: torch.Tensor, place: Placement, n: int) -> list[torch.Tensor]:
    """The parts of the ranks."""
    if not isinstance(place, Shard):
        assert place == REPLICATE
        return [x] * n
    boxes = parts_of(x.shape, (DimShard(place.dim, place.groups, n),))
    size = [s // n if d == place.dim else s for d, s in enumerate(x.shape)]
    return [b.take(x.contiguous()).view(size).clone() for b in boxes]


def whole(xs: Tensors, place: Placement) -> torch.Tensor:
    """The value of which these are the parts, or the summands; what is whole is the same on every rank."""
    if isinstance(place, Partial):
        return _reduced(torch.stack(list(xs)), place.op)
    if place == REPLICATE:
        same = [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in xs]  # float8 has no comparison
        assert all(torch.equal(x, same[0]) or (x.isnan().equal(same[0].isnan())) for x in same)
        return xs[0]
    assert isinstance(place, Shard)
    n = len(xs)
    pieces = [x.chunk(place.groups, place.dim) for x in xs]
    return torch.cat([pieces[r][g] for g in range(place.groups) for r in range(n)], place.dim)


def _reduced(all_of: torch.Tensor, op: str) -> torch.Tensor:
    return {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[op](all_of, 0)


def _together(node: fx.Node, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    n, all_of = len(xs), torch.stack(xs)
    if node.target is all_reduce:
        return [_reduced(all_of, str(node.args[1])).to(xs[0].dtype)] * n
    if node.target is all_gather:
        return [all_of.squeeze(1)] * n
    if node.target is reduce_scatter:
        return [all_of.sum(0)[r : r + 1] for r in range(n)]
    assert node.target is all_to_all
    return [all_of[:, r] for r in range(n)]


def run(graph: Recorded, inputs: Sequence[Tensors]) -> list[list[torch.Tensor]]:
    """The results of each rank; shapes and dtypes are those of the graph."""
    values: list[dict[fx.Node, Any]] = [dict(zip(graph.inputs, xs, strict=True)) for xs in inputs]
    for node in graph.graph.nodes:
        if node.target in MARKERS:
            xs = [v[node.args[0]] for v in values]
            for v, y in zip(values, _together(node, xs), strict=True):
                v[node] = y
        elif node.op in ("call_function", "get_attr"):
            for v in values:
                if node.op == "get_attr":
                    v[node] = graph.constants[str(node.target)]
                else:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a, v=v: v[a])
                    v[node] = AGAIN.get(node.target, node.target)(*args, **kwargs)
        if node.op != "output" and isinstance(node.meta["val"], torch.Tensor):
            for v in values:
                said = node.meta["val"]
                assert v[node].shape == said.shape and v[node].dtype == said.dtype, (node, v[node].shape, said)
    return [[v[x] for x in graph.outputs] for v in values]


def run_cut(cut: ShardedGraph, inputs: Tensors, places: Sequence[Placement], n: int) -> list[torch.Tensor]:
    """The whole results of a function on parts of these inputs."""
    given = list(zip(*(parts(x, p, n) for x, p in zip(inputs, places, strict=True)), strict=True))
    ranks = [[*xs, *([torch.tensor(r)] if cut.has_index else [])] for r, xs in enumerate(given)]
    out = run(cut.graph, ranks)
    _check_varies(cut, ranks)
    return [whole(xs, place) for xs, place in zip(zip(*out, strict=True), cut.places, strict=True)]


def _check_varies(cut: ShardedGraph, ranks: Sequence[Tensors]) -> None:
    for x, place in zip(cut.graph.outputs, cut.places, strict=True):
        assert place != REPLICATE or x not in cut.varies, f"{x} is whole, but the rank's own"


def collectives(cut: ShardedGraph) -> list[str]:
    """The names of its markers, in order."""
    return [x.target.__name__ for x in cut.graph.graph.nodes if x.target in MARKERS]


def choices(inputs: Tensors, n: int, most: int) -> Iterator[tuple[Placement, ...]]:
    """Places of inputs: each alone at each of its places, and combinations, at most so many."""
    each: list[list[Placement]] = [[REPLICATE, *cuts_of(x.shape, n)] for x in inputs]
    alone = [
        tuple(p if i == k else REPLICATE for i in range(len(inputs)))
        for k, ps in enumerate(each)
        for p in ps
        if p != REPLICATE
    ]
    others = (c for c in itertools.product(*each) if sum(p != REPLICATE for p in c) > 1)
    yield from itertools.islice(itertools.chain(alone, others), most)


class Halves(NamedTuple):
    """A block's forward, its vjp, and how these are called."""

    forward: Recorded
    backward: Recorded
    split: Split
    num_inputs: int
    num_outputs: int


def halves(fn: Callable[..., Any], inputs: Tensors, keep: str = "min_cut") -> tuple[Halves, list[torch.Tensor]]:
    """A function as remat splits it, and tangents."""
    graph, tangents = with_gradients(fn, inputs)
    count = len(tangents)
    trained = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())
    joint = Joint("f", graph, 0, len(inputs), count, trained, tuple(range(count)), Any, (), ())  # type: ignore[arg-type]
    of = Choices(joint, tuple(range(len(trained))))
    functions = Functions()
    split = of.split({"min_cut": of.min_cut, "none": of.none, "full": of.keep(())}[keep], functions)
    graphs = functions.by_name
    return Halves(graphs[split.forward].graph, graphs[split.backward].graph, split, len(inputs), count), tangents


def run_halves(
    parts_of: Halves,
    inputs: Tensors,
    tangents: Tensors,
    places: Sequence[Placement],
    n: int,
    stream: Shard | None = None,
) -> tuple[ShardedGraph, ShardedGraph, list[torch.Tensor], list[torch.Tensor]]:
    """Forward and vjp cut apart, as a step has them: saved values keep the places that the forward gave them. The first
    inputs with a place are parameters; the gradients of these come at their place, others as summands."""
    split, outputs, place_of = parts_of.split, parts_of.num_outputs, dict(enumerate(places))
    used = split.forward_inputs
    free = len(parts_of.forward.outputs) - outputs
    leaves = frozenset(k for k, i in enumerate(used) if place_of[i] not in (REPLICATE, stream))
    forward = propagate(
        parts_of.forward,
        n,
        [place_of[i] for i in used],
        [*[stream or REPLICATE] * outputs, *[OutputPlacement.FREE] * free],
        leaves=leaves,
        stream=stream,
    )
    given = [parts(inputs[i], place_of[i], n) for i in used]
    ranks = [[*(x[r] for x in given), *([torch.tensor(r)] if forward.has_index else [])] for r in range(n)]
    out = run(forward.graph, ranks)
    results = [whole(xs, p) for xs, p in zip(zip(*out, strict=True), forward.places, strict=True)][:outputs]
    kept = {name: outputs + i for i, name in enumerate(split.saved)} | split.reused
    at = [kept[name] for name in split.kept]
    back_places = [place_of[i] if i < parts_of.num_inputs else stream or REPLICATE for i in split.backward_inputs]
    values = [parts(([*inputs, *tangents])[i], p, n) for i, p in zip(split.backward_inputs, back_places, strict=True)]
    params = {i for i in used if place_of[i] not in (REPLICATE, stream)}
    leaves = frozenset(k for k, i in enumerate(split.backward_inputs) if i in params)
    trained = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    wanted = [place_of[i] if place_of[i] != REPLICATE else OutputPlacement.SUMMAND for i in trained]
    backward = propagate(
        parts_of.backward,
        n,
        [*back_places, *(forward.places[i] for i in at)],
        [w if i else stream or REPLICATE for i, w in enumerate(wanted)],
        leaves=leaves,
        stream=stream,
    )
    ranks = [
        [*(x[r] for x in values), *(out[r][i] for i in at), *([torch.tensor(r)] if backward.has_index else [])]
        for r in range(n)
    ]
    grads = [whole(xs, p) for xs, p in zip(zip(*run(backward.graph, ranks), strict=True), backward.places, strict=True)]
    return forward, backward, results, grads
