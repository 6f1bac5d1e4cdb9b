"""The base program of a step: loss, gradients and optimizer recorded and laid out as lines, every leaf whole.

A transform that acts on functions does so here, through three plain facts: the dtype a leaf is computed in, the dtype its
gradient is reduced in, and how many parts (ranks x micro-batches) the global batch is cut in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero import compat, tree
from fzero import random as fzrandom
from fzero.errors import FzeroTypeError, TraceError, message
from fzero.layout import LOSS_SCALE, Leaf
from fzero.mesh import AbstractMesh
from fzero.optim import apply_updates, global_norm
from fzero.optim.loss_scale import LossScale, LossScaleState
from fzero.program.counters import PrecisionState, counted
from fzero.program.delayed import Fp8State, Slot, advanced
from fzero.program.fp8 import InFp8
from fzero.program.ir import Line, Program, Value
from fzero.program.names import Names, identifier
from fzero.program.narrow import in_8_bits
from fzero.program.record import Recorded, record
from fzero.program.trace import Functions, Inputs, Lines, run_traced
from fzero.program.watch import Watched, gradient_statistics, output_maxima, watched_blocks

DType = Callable[[Leaf], torch.dtype]
ROUNDING_STREAM = 1 << 61
"""To round the parameters of step t the state's key is folded with this plus t; what the step itself draws from is folded with t alone."""


@dataclass(frozen=True)
class Precision:
    """What dtypes a step computes in, and how it scales its loss. By default everything in its own dtype.

    Attributes:
        compute: that a parameter or a leaf of the batch is computed in.
        reduce: that the gradient of a parameter is reduced in.
        outputs: that what the caller gets of his own function is cast to; None: as it comes.
        casts: whether blocks cast their arguments to the dtype of their parameters.
        loss_scale: None: the loss is not scaled.
        stochastic: whether parameters that rest in bfloat16 are rounded to it stochastically.
        watch: whether the numbers of each block are watched (program/watch.py).
        safer: the paths of the parameters that were moved to float32 by what was counted (program/counters.py).
        fp8: which products are done in 8 bits; None: none.
    """

    compute: DType = lambda leaf: leaf.dtype
    reduce: DType = lambda leaf: leaf.dtype
    outputs: torch.dtype | None = None
    casts: bool = False
    loss_scale: LossScale | None = None
    stochastic: bool = False
    watch: bool = False
    safer: tuple[str, ...] = ()
    fp8: InFp8 | None = None

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.outputs is None or not x.is_floating_point() else x.to(self.outputs)


class Weighted(NamedTuple):
    """A sum and what it is a sum over: `total / count` is the mean, exact however the batch was cut."""

    total: torch.Tensor
    count: torch.Tensor


class Lowered(NamedTuple):
    """A program and what is needed to hand its outputs back as the user's trees."""

    program: Program
    structure: tree.TreeSpec  # of the metrics, or of what an evaluation returns
    watched: Watched | None = None


@dataclass(frozen=True, eq=False)
class Training:
    """What a training step is lowered from. `batch` has the shapes of one micro-batch of one rank."""

    name: str
    loss_fn: Callable[..., Any]
    optimizer: Any
    has_aux: bool
    wants_key: bool
    params: Inputs
    trains: Sequence[bool]  # for each leaf of params
    opt_state: Inputs
    batch: Inputs
    extras: dict[str, Leaf]
    mesh: AbstractMesh
    precision: Precision
    num_parts: int  # ranks x micro-batches that the global batch is cut in

    @property
    def trained(self) -> list[int]:
        return [i for i in self.params.distinct if self.trains[i]]


def lower_train(t: Training) -> Lowered:
    """The base program of one optimizer step."""
    functions, names = Functions(), Names()
    lines, cast = _casts(t.params, t.precision.compute, names)
    places = [(cast[i].name, cast[i].shape, cast[i].dtype) for i in t.params.distinct]
    more, batch = _casts(t.batch, t.precision.compute, names)
    lines += more
    places += [(batch[i].name, batch[i].shape, batch[i].dtype) for i in t.batch.distinct]
    if t.precision.loss_scale is not None:
        places.append((f"{LOSS_SCALE}.scale", (), torch.float32))
    if t.wants_key:
        places += [("key", (3,), torch.int64), ("step", (), torch.int64), ("part", (), torch.int64)]
        lines.append(Line("part_index", (), (Value("part", (), torch.int64),)))

    graph, found, seed = _record_loss(t, places)
    num_sums, end = found.num_sums, found.num_sums + len(found.used)
    slots: list[Slot] = []
    if t.precision.fp8 is not None:
        grad_of = dict(zip(found.used, graph.outputs[num_sums:end], strict=True))
        graph, lines, slots = in_8_bits(graph, lines, t.precision.fp8, t.params, cast, grad_of, [seed], functions, names)
    outputs, maxima = graph.outputs[:end], graph.outputs[end:]
    wanted: dict[fx.Node, str] = {n: f"sum_{j}" if j else "loss_sum" for j, n in reversed(list(enumerate(outputs[:num_sums])))}
    wanted |= {n: grad_name(t.params.leaves[i]) for n, i in zip(outputs[num_sums:], found.used, strict=True)}
    wanted |= dict(zip(reversed(maxima), ["fp8_max", "block_max"] if slots else ["block_max"], strict=False))
    body = Lines(graph, functions, names, wanted)
    lines, sums = _distinct([*lines, *body.lines], [body.name[n] for n in outputs[:num_sums]], outputs[:num_sums], names)
    lines, grads = _reduced_grads(t, lines, {i: (body.name[n], n) for i, n in zip(found.used, outputs[num_sums:], strict=True)}, names)

    sum_values = [Value(n, tuple(o.meta["val"].shape), o.meta["val"].dtype) for n, o in zip(sums, outputs, strict=False)]
    watched = watched_blocks(t.name, t.params, lines) if t.precision.watch else None
    max_values = [Value(body.name[n], tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in maxima]
    update, structure = record_update(t, grads, sum_values, max_values, found, names, watched, slots)
    state = [inputs.leaves[i] for inputs in (t.params, t.opt_state) for i in inputs.distinct]
    program = Program(
        name=t.name,
        mesh=t.mesh,
        inputs=tuple(Value(x.path, x.shape, x.dtype) for x in (*t.extras.values(), *state, *(t.batch.leaves[i] for i in t.batch.distinct))),
        leaves={x.path: x for x in (*t.extras.values(), *state)},
        lines=(*lines, update),
        outputs=tuple(v.name for v in update.out),
        functions=functions.by_name,
        owners=_owners(lines, {x.path for x in state}),
    )
    return Lowered(program, structure, watched)


@dataclass(frozen=True)
class Found:
    """What tracing a loss showed: which leaves have a gradient, whether it is weighted, and its auxiliary values."""

    used: list[int]
    num_sums: int
    weighted: bool
    aux: Means


def _record_loss(t: Training, places: Sequence[Any]) -> tuple[Recorded, Found, fx.Node]:
    """Records sums and gradients: the loss's total, its count, the auxiliary sums, then a gradient for each leaf that has one. The node is that of what
    gradients are computed from."""
    made: list[Found] = []

    def loss_and_grads(*fakes: torch.Tensor) -> list[torch.Tensor]:
        it = iter(fakes)
        leaves = {i: next(it).detach().requires_grad_(i in t.trained) for i in t.params.distinct}
        batch = {i: next(it) for i in t.batch.distinct}
        seed = next(it) if t.precision.loss_scale is not None else None
        kwargs = {}
        if t.wants_key:
            key, step, part = it
            kwargs["key"] = fzrandom.with_part(fzrandom.fold_in(key, step), part)
        loss, aux = split_loss(t.loss_fn(t.params.rebuild(leaves), t.batch.rebuild(batch), **kwargs), t.has_aux)
        aux_leaves, means = flatten_means(aux)
        seed = torch.ones_like(loss.total, memory_format=torch.preserve_format) if seed is None else seed.to(loss.total.dtype)
        grads = torch.autograd.grad(loss.total, [leaves[i] for i in t.trained], seed, allow_unused=True)
        scalars = [loss.total, *([] if loss.count is None else [loss.count]), *aux_leaves]
        made.append(Found([i for i, g in zip(t.trained, grads, strict=True) if g is not None], len(scalars), loss.count is not None, means))
        return [*(summable(s) for s in scalars), *(g for g in grads if g is not None), seed]

    device, precision = compat.trace_device(t.mesh.device_type), t.precision
    graph = run_traced("train_step", loss_and_grads, places, device, t.loss_fn, precision.casts, precision.watch)
    (found,), outputs = made, graph.outputs
    seed = outputs.pop(found.num_sums + len(found.used))
    graph.graph.output_node().args = (tuple(outputs),)
    return graph, found, seed


def _reduced_grads(t: Training, lines: list[Line], sources: dict[int, tuple[str, fx.Node]], names: Names) -> tuple[list[Line], dict[int, Value]]:
    """Each gradient under a name of its own, in the dtype it is reduced in, cast right after the line that makes it."""
    grads: dict[int, Value] = {}
    casts: dict[str, list[Line]] = {}
    for i, (source, node) in sources.items():
        leaf, dtype = t.params.leaves[i], node.meta["val"].dtype
        grads[i] = Value(source, leaf.shape, dtype)
        if dtype != t.precision.reduce(leaf) or node.op == "placeholder" or any(grads[k].name == source for k in grads if k != i):
            grads[i] = Value(names(f"{grad_name(leaf)}_reduce"), leaf.shape, t.precision.reduce(leaf))
            casts.setdefault(source, []).append(Line("cast", (source,), (grads[i],), attrs={"dtype": grads[i].dtype}, by="mixed_precision"))
    made_here = {v.name for line in lines for v in line.out}
    lines = [new for line in lines for new in (line, *(c for v in line.out for c in casts.get(v.name, [])))]
    return lines + [c for source, group in casts.items() if source not in made_here for c in group], grads


def lower_eval(name: str, fn: Callable[..., Any], params: Inputs, batch: Inputs, mesh: AbstractMesh, precision: Precision) -> Lowered:
    """The base program of a forward-only step."""
    functions, names = Functions(), Names()
    lines, computed = _casts(params, precision.compute, names)
    places = [(computed[i].name, computed[i].shape, computed[i].dtype) for i in params.distinct]
    more, cast = _casts(batch, precision.compute, names)
    lines += more
    places += [(cast[i].name, cast[i].shape, cast[i].dtype) for i in batch.distinct]
    made: dict[str, Any] = {}

    def outputs_of(*fakes: torch.Tensor) -> list[torch.Tensor]:
        p, b = dict(zip(params.distinct, fakes, strict=False)), dict(zip(batch.distinct, fakes[len(params.distinct) :], strict=True))
        with torch.no_grad():
            result = fn(params.rebuild(p), *batch.rebuild(b))
        leaves, made["means"] = flatten_means(result)
        return [summable(x) if made["means"].summed[j] else precision.output(x.detach()) for j, x in enumerate(leaves)]

    graph = run_traced("eval_step", outputs_of, places, compat.trace_device(mesh.device_type), fn, precision.casts)
    if precision.fp8 is not None:
        graph, lines, _ = in_8_bits(graph, lines, precision.fp8, params, computed, {}, [], functions, names)
    outputs = graph.outputs
    means: Means = made["means"]
    body = Lines(graph, functions, names, {n: f"out_{j}" for j, n in reversed(list(enumerate(outputs)))})
    lines += body.lines
    found = [body.name[n] for n in outputs]
    lines, found = _distinct(lines, found, outputs, names)
    sums = [n for n, s in zip(found, means.summed, strict=True) if s]
    dtypes = {n: o.meta["val"].dtype for n, o in zip(found, outputs, strict=True)}
    results: list[str] = []
    it = iter(found)
    for weighted in means.weighted:
        if not weighted:
            results.append(next(it))
            continue
        total, count = next(it), next(it)
        mode = compat.FakeTensorMode()
        with mode:
            pair = [torch.empty((), dtype=dtypes[n], device=compat.trace_device(mesh.device_type)) for n in (total, count)]
            graph = record(lambda a, b: [precision.output(a / b)], pair, owner="eval_step", names=["total", "count"])
        results.append(names("mean"))
        value = Value(results[-1], (), graph.outputs[0].meta["val"].dtype)
        lines.append(Line("call", (total, count), (value,), functions.add("mean", graph), {"of_sums": True}))
    inputs = [*(params.leaves[i] for i in params.distinct), *(batch.leaves[i] for i in batch.distinct)]
    program = Program(
        name=name,
        mesh=mesh,
        inputs=tuple(Value(x.path, x.shape, x.dtype) for x in inputs),
        leaves={params.leaves[i].path: params.leaves[i] for i in params.distinct},
        lines=tuple(lines),
        outputs=tuple(results),
        functions=functions.by_name,
        owners=_owners(lines, {params.leaves[i].path for i in params.distinct}),
        sums=tuple(sums),
    )
    return Lowered(program, means.structure)


# --- the pieces ---


class Loss(NamedTuple):
    total: torch.Tensor
    count: torch.Tensor | None


def split_loss(result: Any, has_aux: bool) -> tuple[Loss, Any]:
    """Checks what a loss function returned and splits it into the loss and the auxiliary values."""
    aux = None
    if has_aux:
        if not isinstance(result, tuple) or isinstance(result, Weighted) or len(result) != 2:
            raise FzeroTypeError(message("train_step", f"has_aux=True, but the loss function returned {tree.describe(result)}", fix="return (loss, aux)"))
        result, aux = result
    elif isinstance(result, tuple) and not isinstance(result, Weighted):
        raise FzeroTypeError(message("train_step", f"the loss function returned a tuple of {len(result)}", fix="pass has_aux=True to return (loss, aux)"))
    loss = Loss(*result) if isinstance(result, Weighted) else Loss(result, None)
    problems = []
    for what, x in (("total", loss.total), ("count", loss.count)) if loss.count is not None else (("loss", loss.total),):
        if not isinstance(x, torch.Tensor):
            problems.append(f"{what} is {type(x).__name__}")
        elif x.dim() != 0:
            problems.append(f"{what} is {tree.describe(x)}, not a scalar")
    if isinstance(loss.total, torch.Tensor) and not loss.total.is_floating_point():
        problems.append(f"{'loss' if loss.count is None else 'total'} is {tree.describe(loss.total)}, not floating point")
    if problems:
        raise FzeroTypeError(message("train_step", "the loss is not a scalar tensor", problems, "reduce it with .mean(), or return fz.weighted(total, count)"))
    if not loss.total.requires_grad:
        raise TraceError(
            message(
                "train_step",
                "the loss does not depend on any trainable parameter",
                fix="use the params argument (not a closure), and check `trainable` and .detach()",
            )
        )
    return loss, aux


def summable(x: torch.Tensor) -> torch.Tensor:
    """A value in the dtype it is summed in over ranks and micro-batches: float32, or float64."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


class Means(NamedTuple):
    """How a flat list of sums becomes a tree of means: for each result whether it is a total and a count, and for each flat value whether it is summed."""

    structure: tree.TreeSpec
    weighted: tuple[bool, ...]
    summed: tuple[bool, ...]


def flatten_means(result: Any) -> tuple[list[torch.Tensor], Means]:
    is_pair = lambda x: isinstance(x, Weighted)  # noqa: E731
    leaves, structure = tree.flatten(result, is_leaf=is_pair)
    flat: list[Any] = [y for x in leaves for y in (x if is_pair(x) else (x,))]
    wrong = [f"{p}: {type(x).__name__}" for p, x in zip(tree.paths(result, "result"), tree.leaves(result), strict=True) if not isinstance(x, torch.Tensor)]
    if wrong:
        raise FzeroTypeError(message("step", "the function returned something other than tensors", wrong, "return a pytree of tensors"))
    return flat, Means(structure, tuple(map(is_pair, leaves)), tuple(is_pair(x) for x in leaves for _ in (x if is_pair(x) else (x,))))


def apply_optimizer(optimizer: Any, grads: Any, opt_state: Any, params: Any, key: torch.Tensor | None = None) -> tuple[Any, Any]:
    """New parameters and the new state, if the optimizer keeps the contract: updates like params, a state like the one it got. `key`: to round with."""
    result = optimizer.update(grads, opt_state, params)
    if not isinstance(result, tuple) or len(result) != 2:
        raise FzeroTypeError(message("optimizer", f"update returned {tree.describe(result)}", fix="return a pair (updates, opt_state)"))
    updates, new = result
    wrong = [f"{p}: {type(x).__name__}" for p, x in zip(tree.paths(result), tree.leaves(result), strict=True) if not isinstance(x, torch.Tensor)]
    wrong = [f"{'updates' if p.startswith('[0]') else 'opt_state'}{p[3:]}" for p in wrong]
    if wrong:
        raise FzeroTypeError(message("optimizer", "update returned leaves that are not tensors", wrong, "keep numbers in the closure, tensors in the state"))
    before, after = tree.structure(opt_state), tree.structure(new)
    if before != after:
        problems = [f"before: {before}", f"after: {after}"]
        raise FzeroTypeError(message("optimizer", "update changes the structure of opt_state", problems, "return the same structure"))
    problems = [
        f"{path}: {tree.describe(old)} before, {tree.describe(now)} after"
        for path, old, now in zip(tree.paths(opt_state, "opt_state"), tree.leaves(opt_state), tree.leaves(new), strict=True)
        if now.shape != old.shape or now.dtype != old.dtype
    ]
    if problems:
        raise FzeroTypeError(message("optimizer", "update changes shape or dtype of its state", problems, "keep shapes and dtypes fixed"))
    return apply_updates(params, updates, key), new


def grad_name(leaf: Leaf) -> str:
    return "d_" + identifier(leaf.path)


def _casts(inputs: Inputs, compute_dtype: DType, names: Names) -> tuple[list[Line], dict[int, Value]]:
    """A cast line for every leaf that is computed in another dtype than it comes in, and the value to compute with."""
    lines, values = [], {}
    for i in inputs.distinct:
        leaf, dtype = inputs.leaves[i], compute_dtype(inputs.leaves[i])
        values[i] = Value(leaf.path, leaf.shape, leaf.dtype)
        if dtype != leaf.dtype:
            values[i] = Value(names(f"{identifier(leaf.path)}_{str(dtype).removeprefix('torch.')}"), leaf.shape, dtype)
            lines.append(Line("cast", (leaf.path,), (values[i],), attrs={"dtype": dtype}, by="mixed_precision"))
    return lines, values


def _distinct(lines: list[Line], found: list[str], nodes: Sequence[fx.Node], names: Names) -> tuple[list[Line], list[str]]:
    """Gives each output a name of its own, where two outputs are one value or an output is an input."""
    seen: set[str] = set()
    out = []
    for name, node in zip(found, nodes, strict=True):
        if name in seen or node.op == "placeholder":
            value = node.meta["val"]
            lines.append(Line("cast", (name,), (Value(names(f"{identifier(name)}_copy"), tuple(value.shape), value.dtype),), attrs={"dtype": value.dtype}))
            name = lines[-1].out[0].name
        seen.add(name)
        out.append(name)
    return lines, out


def _owners(lines: Sequence[Line], leaves: set[str]) -> dict[str, int]:
    """For each leaf the number of the line that first computes with it: leaves of one block belong together."""
    origin = {line.out[0].name: line.args[0] for line in lines if line.op == "cast"}
    owners: dict[str, int] = {}
    for number, line in enumerate(lines):
        for arg in line.args if line.op == "call" and not line.attrs.get("scales") else ():
            leaf = origin.get(arg, arg)
            if leaf in leaves:
                owners.setdefault(leaf, number)
    return owners


def record_update(
    t: Training,
    grads: dict[int, Value],
    sums: Sequence[Value],
    maxima: Sequence[Value],
    traced: Found,
    names: Names,
    watched: Watched | None,
    slots: Sequence[Slot],
) -> tuple[Line, tree.TreeSpec]:
    """Everything after the backward as one recorded function: means, gradient norm, optimizer, new parameters, metrics.

    Returns: the `update` line, which writes the state and makes the metrics, and the structure of the metrics.
    """
    params, opt_state, trained, scaling = t.params, t.opt_state, t.trained, t.precision.loss_scale
    scale_leaves, count_leaves, fp8_leaves = ([leaf for leaf in t.extras.values() if leaf.role == role] for role in ("loss_scale", "precision", "fp8"))
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    places = [("step", (), torch.int64), *([("key", (3,), torch.int64)] if t.precision.stochastic else [])]
    state = [*scale_leaves, *count_leaves, *fp8_leaves, *(params.leaves[i] for i in trained), *(opt_state.leaves[i] for i in opt_state.distinct)]
    places += [(x.path, x.shape, x.dtype) for x in state]
    places += [(v.name, v.shape, v.dtype) for v in (*grads.values(), *maxima, *sums)]
    info: dict[str, Any] = {}

    def update(*fakes: torch.Tensor) -> list[torch.Tensor]:
        it = iter(fakes)
        step = next(it)
        key = fzrandom.fold_in(next(it), step + ROUNDING_STREAM) if t.precision.stochastic else None
        scale_state = LossScaleState(*(next(it) for _ in scale_leaves)) if scaling is not None else None
        counts = [next(it) for _ in count_leaves]
        history = [next(it) for _ in fp8_leaves]
        p = {i: next(it) for i in trained}
        o = {i: next(it) for i in opt_state.distinct}
        g = {i: next(it) for i in grads}
        largest = [next(it) for _ in maxima]
        total, *rest = it
        count = rest.pop(0) if traced.weighted else None
        # the gradients are those of the summed loss: make them those of the mean
        if count is not None:
            loss, scale = total / count, 1.0 / count
        else:
            loss, scale = (total / t.num_parts, 1.0 / t.num_parts) if t.num_parts > 1 else (total, None)
        if scale_state is not None:  # and those of the unscaled loss
            scale = (1.0 if scale is None else scale) / scale_state.scale
        mean: dict[int, torch.Tensor] = {}
        for i in trained:
            dtype = torch.promote_types(g[i].dtype, p[i].dtype) if i in g else p[i].dtype
            dtype = dtype if scaling is None else torch.promote_types(dtype, torch.float32)
            x = g[i].to(dtype) if i in g else torch.zeros_like(p[i], dtype=dtype)
            mean[i] = x if scale is None or i not in g else x * scale
        # a leaf that is not trained is None to the optimizer, and so is every tie but the first
        view = lambda values: tree.unflatten(params.structure, [values.get(i) for i in range(len(params.ties))])  # noqa: E731
        norm = global_norm(view(mean))
        new_params, new_opt = apply_optimizer(t.optimizer, view(mean), opt_state.rebuild(o), view(p), key)
        new_p, new_o = tree.leaves(new_params), tree.leaves(new_opt)
        means, values = traced.aux, iter(rest)
        aux = [next(values) / next(values) if w else next(values) / t.num_parts for w in means.weighted]
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        metrics: dict[str, Any] = {"loss": t.precision.output(loss), "grad_norm": norm, "finite": finite}
        if aux:
            metrics["aux"] = tree.unflatten(means.structure, [t.precision.output(x) for x in aux])
        written, few = [step + 1, *new_p, *(new_o[i] for i in opt_state.distinct)], []
        if scaling is not None and scale_state is not None:
            overflow = torch.logical_not(torch.isfinite(norm))
            old = [step, *(p[i] for i in trained), *(o[i] for i in opt_state.distinct)]
            written = [torch.where(overflow, before, after) for before, after in zip(old, written, strict=True)]
            few, at_minimum = scaling.update(scale_state, overflow)
            metrics |= {"loss_scale": scale_state.scale.clone(), "skipped": overflow, "loss_scale_at_minimum": at_minimum}
        if watched is not None:
            tiny = {i: torch.finfo(t.precision.compute(params.leaves[i])).tiny for i in grads}
            statistics = gradient_statistics(watched, {i: mean[i] for i in grads}, tiny, None if scale_state is None else scale_state.scale)
            metrics["precision"] = statistics = {**statistics, "output_max": output_maxima(largest[: len(largest) - bool(slots)], loss)}
            safer = [leaf.path in t.precision.safer for leaf in params.leaves] if t.precision.safer else ()
            few = [*few, *(counted(PrecisionState(*counts), watched, statistics, safer) if counts else ())]
        if history:
            few = [*few, *(advanced(Fp8State(*history), slots, largest[-1]) if slots else history)]
        written[1:1] = few
        flat, info["structure"] = tree.flatten(metrics)
        info["paths"] = tree.names(metrics)
        return [*written, *flat]

    fakes = [compat.new_fake(mode, shape, dtype, compat.trace_device(t.mesh.device_type)) for _, shape, dtype in places]
    with mode:
        recorded = record(update, fakes, owner="optimizer", names=[f"in_{i}" for i in range(len(places))], source=t.optimizer.update)
    targets = ["step", *(x.path for x in state)]
    returned = recorded.outputs
    metric_values = [
        Value(names(f"metric_{p.replace('.', '_')}"), tuple(n.meta["val"].shape), n.meta["val"].dtype)
        for p, n in zip(info["paths"], returned[len(targets) :], strict=True)
    ]
    line = Line(
        "update",
        tuple(n for n, _, _ in places),
        tuple(metric_values),
        attrs={
            "graph": recorded,
            "sums": tuple(v.name for v in sums),
            "maxima": tuple(v.name for v in maxima),
            "grads": {params.leaves[i].path: grads[i].name for i in grads},
        },
        writes=tuple(targets),
    )
    return line, info["structure"]
