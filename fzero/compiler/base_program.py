"""Makes the base program of a step: loss, gradients and optimizer, traced and converted to ops, with every parameter
unsharded.

A transform that acts on functions takes effect here, through three simple facts: the dtype in which a parameter is
computed, the dtype in which its gradient is reduced, and the number of parts (ranks x micro-batches) into which the
global batch is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero import random as fzrandom
from fzero import tree
from fzero._compat import compat
from fzero.compiler.backward_seed import DTYPE, SCALE, SEED, CountAhead, made_ahead, rounded, seed_of
from fzero.compiler.bitcast_check import check_bits
from fzero.compiler.training_spec import DType, Found, Precision, Training
from fzero.compiler.update_graph import AGREED, RAISED, record_update
from fzero.errors import TraceError
from fzero.ir.aliases import Aliases
from fzero.ir.attributes import CallAttrs, CastAttrs
from fzero.ir.from_graph import Functions, GraphOps, Inputs, run_traced
from fzero.ir.program import Instruction, Program, Value
from fzero.ir.value_names import Names
from fzero.loss import Means, both_ends, flatten_means, new_values, split_loss, summable
from fzero.mesh import AbstractMesh
from fzero.trace.graph_capture import record
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.write_guard import without_gradients
from fzero.trace.recorder import Recorded
from fzero.transforms.fp8 import in_8_bits
from fzero.transforms.precision import Watched, watched_blocks


class BaseProgram(NamedTuple):
    """A program, and the structures with which its outputs are converted back to the user's trees."""

    program: Program
    structure: tree.TreeSpec  # structure of the metrics, or of the results of an evaluation
    watched: Watched | None = None
    raises: tuple[str, ...] = ()  # source lines of the conditions under which the loss raises


def lower_train(t: Training) -> BaseProgram:
    """Returns the base program of one optimizer step."""
    functions, names = Functions(), Names(leaf.path for leaf in t.params.leaves)
    ops, places = _arguments(t, names)
    graph, found, seed, ahead = _record_loss(t, places, functions, names)
    num_sums, end = found.num_sums, found.num_sums + len(found.used)
    if t.precision.fp8 is not None:
        grad_of = dict(zip(found.used, graph.outputs[num_sums:end], strict=True))
        graph = in_8_bits(graph, t.precision.fp8, t.params, grad_of, [seed])
    outputs, maxima = graph.outputs[:end], _maxima(t, found, graph.outputs[end:])
    wanted = _names_of_outputs(t, found, outputs, names, ahead.count is not None)
    body = GraphOps(graph, functions, names, wanted | {n: name for name, n in maxima.items()})
    # The seed depends on the counts of all ranks, so it is computed as late as possible: right before its first reader.
    at = next((i for i, op in enumerate(body.ops) if SEED in op.args), 0)
    ops = [*ops, *ahead.ops, *body.ops[:at], *ahead.seed, *body.ops[at:]]
    # Ranks reduce these values in place, so no two of them may be the same value or share its memory.
    ops, sums = _distinct(ops, [body.name[n] for n in outputs[:num_sums]], outputs[:num_sums], names, functions)
    ops, grads = _reduced_grads(
        t, ops, {i: (body.name[n], n) for i, n in zip(found.used, outputs[num_sums:], strict=True)}, names
    )

    sum_values = [
        Value(n, tuple(o.meta["val"].shape), o.meta["val"].dtype) for n, o in zip(sums, outputs, strict=False)
    ]
    # The update takes the count right after the loss's total, even if it was computed before the loss.
    sum_values[1:1] = [] if ahead.count is None else [ahead.count]
    watched = watched_blocks(t.name, t.params, ops) if t.precision.watch else None
    max_values = {
        name: Value(body.name[n], tuple(n.meta["val"].shape), n.meta["val"].dtype) for name, n in maxima.items()
    }
    update, structure = record_update(t, grads, sum_values, max_values, found, names, watched)
    state = [inputs.leaves[i] for inputs in (t.params, t.opt_state) for i in inputs.distinct]
    leaves = [*t.slots.leaves.values(), *state]
    program = Program(
        name=t.name,
        mesh=t.mesh,
        inputs=tuple(
            Value(x.path, x.shape, x.dtype) for x in (*leaves, *(t.batch.leaves[i] for i in t.batch.distinct))
        ),
        leaves={x.path: x for x in leaves},
        instructions=(*ops, update),
        outputs=tuple(v.name for v in update.out),
        functions=functions.by_name,
        owners=_owners(ops, {x.path for x in state}),
        assigns=update.writes,
        grads={t.params.leaves[i].path: grads[i].name for i in grads},
    )
    return BaseProgram(program, structure, watched, found.raises)


def _maxima(t: Training, found: Found, nodes: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """Returns the values of which the maxima over ranks and micro-batches are computed, by name."""
    kinds = [*([AGREED] if t.agreed else []), *([RAISED] if found.raises else [])]
    return dict(zip([*kinds, "block_max"][: len(nodes)], nodes, strict=True))


def _names_of_outputs(
    t: Training, found: Found, outputs: Sequence[fx.Node], names: Names, count_is_ahead: bool
) -> dict[fx.Node, str]:
    """Returns the names of the sums, of the averaged new values and of the gradients."""
    num_sums = found.num_sums
    # Reversed, so that a node that is several of the sums gets the name of the first.
    wanted: dict[fx.Node, str] = {
        n: f"sum_{j + count_is_ahead}" if j else "loss_sum" for j, n in reversed(list(enumerate(outputs[:num_sums])))
    }
    averaged = outputs[num_sums - len(t.averaged) : num_sums]
    wanted |= {n: f"new_{names.stem(t.params.leaves[i].path)}" for n, i in zip(averaged, t.averaged, strict=True)}
    gradients = zip(outputs[num_sums:], found.used, strict=True)
    return wanted | {n: f"d_{names.stem(t.params.leaves[i].path)}" for n, i in gradients}


def _arguments(t: Training, names: Names) -> tuple[list[Instruction], list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Returns the ops that make the arguments of the traced function, and the arguments' names, shapes and dtypes."""
    ops, cast = _casts(t.params, t.precision.compute, names)
    more, batch = _casts(t.batch, t.precision.compute, names)
    values = [*(cast[i] for i in t.params.distinct), *(batch[i] for i in t.batch.distinct)]
    places = [(v.name, v.shape, v.dtype) for v in values]
    if t.precision.loss_scale is not None:
        places.append((SCALE, (), torch.float32))
    if t.num_parts > 1:
        places.append((names(SEED), (), DTYPE))
    if t.wants_key:
        places += [("key", (3,), torch.int64), ("step", (), torch.int64), ("part", (), torch.int64)]
        more.append(Instruction("rank_index", (), (Value("part", (), torch.int64),)))
    return [*ops, *more], places


def _record_loss(
    t: Training, places: Sequence[Any], functions: Functions, names: Names
) -> tuple[Recorded, Found, fx.Node, CountAhead]:
    """Traces sums and gradients.

    The results are, in this order: the loss's total; its count, unless it is computed ahead; auxiliary sums; averaged
    new values; gradients; the new values that must agree, as one vector; and the flags of conditions under which the
    loss raises. The returned node is that of the seed, from which gradients are computed.
    """
    _check_anomaly_mode()
    made: list[Found] = []

    @torch.enable_grad()  # regardless of the caller's mode
    def loss_and_grads(*fakes: torch.Tensor) -> list[torch.Tensor]:
        it = iter(fakes)
        # Detached leaves of autograd: only the trained ones get gradients, whatever the user's tensors require.
        leaves = {i: next(it).detach().requires_grad_(i in t.trained) for i in t.params.distinct}
        batch = {i: next(it) for i in t.batch.distinct}
        scale = next(it) if t.precision.loss_scale is not None else None
        given = next(it) if t.num_parts > 1 else None
        kwargs = {}
        if t.wants_key:
            key, step, part = it
            kwargs["key"] = fzrandom.with_part(fzrandom.fold_in(key, step), part)
        params = t.params.rebuild(leaves)
        own = [(t.params.leaves[i].path, x) for i, x in leaves.items()]
        with raise_conditions.collected("train_step") as noted, without_gradients("train_step", own):
            result = t.loss_fn(params, t.batch.rebuild(batch), **kwargs)
        loss, aux, new = split_loss(result, t.has_aux, t.mutates is not None)
        loss = loss._replace(total=noted.poisoned([loss.total])[0])
        aux_leaves, means = flatten_means(aux)
        values = {} if t.mutates is None else new_values(new, params, t.mutates)
        seed = seed_of(loss, t.num_parts, scale, given)
        # A parameter that the loss does not read has None, and the optimizer gets zeros for it.
        grads = torch.autograd.grad(loss.total, [leaves[i] for i in t.trained], seed, allow_unused=True)
        weighted = loss.count is not None
        sums = [loss.total, *([loss.count] if weighted else []), *aux_leaves, *(values[i] for i in t.averaged)]
        used = [i for i, g in zip(t.trained, grads, strict=True) if g is not None]
        lacks = None if weighted else rounded(t.num_parts, seed.dtype)
        made.append(Found(used, len(sums), weighted, means, lacks, raises=tuple(noted.lines)))
        agreed = [both_ends([values[i] for i in t.agreed])] if t.agreed else []
        # The seed is an output only so that its node can be found in the recorded graph. It is removed from the outputs
        # below.
        # What reads a gradient expects it contiguous, as its parameter is.
        contiguous = (g.contiguous() for g in grads if g is not None)
        return [seed, *map(summable, sums), *contiguous, *agreed, *noted.joined]

    device, precision = compat.trace_device(t.mesh.device_type), t.precision
    graph = run_traced("train_step", loss_and_grads, places, device, t.loss_fn, precision.casts, precision.watch)
    leaves = [*(t.params.leaves[i] for i in t.params.distinct), *(t.batch.leaves[i] for i in t.batch.distinct)]
    check_bits("train_step", graph, leaves, precision.changed)
    (found,), ahead = made, CountAhead()
    if found.weighted and t.num_parts > 1:
        ahead = made_ahead(t, graph, functions, names)
    seed, *outputs = graph.outputs
    if ahead.count is not None:
        # The count, which has already been computed.
        del outputs[1]
        found = replace(found, num_sums=found.num_sums - 1)
    graph.graph.output_node().args = (tuple(outputs),)
    # Removes what only the removed outputs needed, such as the count if it is computed ahead.
    graph.graph.eliminate_dead_code()
    return graph, replace(found, of_sum=ahead.of_sum), seed, ahead


def _check_anomaly_mode() -> None:
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        what = "anomaly mode (torch.autograd.set_detect_anomaly) looks into gradients while the step is traced"
        fix = (
            "turn it off: metrics['finite'] tells whether loss and gradients are. The plain step, before fz.compile, "
            "runs under it: step(step.init(params), batch)"
        )
        raise TraceError("train_step", what, fix=fix)


def _reduced_grads(
    t: Training, ops: list[Instruction], sources: dict[int, tuple[str, fx.Node]], names: Names
) -> tuple[list[Instruction], dict[int, Value]]:
    """Gives each gradient a separate name and its reduction dtype; the cast comes directly after the op that computes
    it."""
    grads: dict[int, Value] = {}
    casts: dict[str, list[Instruction]] = {}
    for i, (source, node) in sources.items():
        leaf, dtype = t.params.leaves[i], node.meta["val"].dtype
        grads[i] = Value(source, leaf.shape, dtype)
        if (
            dtype != t.precision.reduce(leaf)
            or node.op == "placeholder"
            # Two parameters may have one gradient, for example in a sum. Reductions work in place, so each needs a
            # tensor of its own.
            or any(grads[k].name == source for k in grads if k != i)
        ):
            grads[i] = Value(names(f"d_{names.stem(leaf.path)}_reduce"), leaf.shape, t.precision.reduce(leaf))
            casts.setdefault(source, []).append(
                Instruction("cast", (source,), (grads[i],), attrs=CastAttrs(dtype=grads[i].dtype), by="mixed_precision")
            )
    made_here = {v.name for op in ops for v in op.out}
    ops = [new for op in ops for new in (op, *(c for v in op.out for c in casts.get(v.name, [])))]
    return ops + [c for source, group in casts.items() if source not in made_here for c in group], grads


def lower_eval(
    name: str, fn: Callable[..., Any], params: Inputs, batch: Inputs, mesh: AbstractMesh, precision: Precision
) -> BaseProgram:
    """Returns the base program of a forward-only step."""
    functions, names = Functions(), Names(leaf.path for leaf in params.leaves)
    ops, computed = _casts(params, precision.compute, names)
    places = [(computed[i].name, computed[i].shape, computed[i].dtype) for i in params.distinct]
    more, cast = _casts(batch, precision.compute, names)
    ops += more
    places += [(cast[i].name, cast[i].shape, cast[i].dtype) for i in batch.distinct]
    made: dict[str, Any] = {}

    def outputs_of(*fakes: torch.Tensor) -> list[torch.Tensor]:
        p, b = (
            dict(zip(params.distinct, fakes, strict=False)),
            dict(zip(batch.distinct, fakes[len(params.distinct) :], strict=True)),
        )
        with torch.no_grad(), raise_conditions.collected("eval_step") as noted:
            result = fn(params.rebuild(p), *batch.rebuild(b))
            leaves, made["means"] = flatten_means(result)
            leaves = noted.poisoned(leaves)
        return [summable(x) if made["means"].summed[j] else precision.output(x.detach()) for j, x in enumerate(leaves)]

    graph = run_traced("eval_step", outputs_of, places, compat.trace_device(mesh.device_type), fn, precision.casts)
    inputs = [*(params.leaves[i] for i in params.distinct), *(batch.leaves[i] for i in batch.distinct)]
    check_bits("eval_step", graph, inputs, precision.changed)
    if precision.fp8 is not None:
        graph = in_8_bits(graph, precision.fp8, params, {}, [])
    outputs = graph.outputs
    means: Means = made["means"]
    body = GraphOps(graph, functions, names, {n: f"out_{j}" for j, n in reversed(list(enumerate(outputs)))})
    ops += body.ops
    found = [body.name[n] for n in outputs]
    # If one value is both a sum and a result, the sum is the copy: ranks add up the copy, and return their own value.
    order = sorted(range(len(found)), key=means.summed.__getitem__)
    ops, ordered = _distinct(ops, [found[j] for j in order], [outputs[j] for j in order], names, functions)
    found = [name for _, name in sorted(zip(order, ordered, strict=True))]
    sums = [n for n, s in zip(found, means.summed, strict=True) if s]
    values = [Value(n, (), o.meta["val"].dtype) for n, o in zip(found, outputs, strict=True)]
    results, divisions = _divided(means, values, precision, mesh, names, functions)
    ops += divisions
    program = Program(
        name=name,
        mesh=mesh,
        inputs=tuple(Value(x.path, x.shape, x.dtype) for x in inputs),
        leaves={params.leaves[i].path: params.leaves[i] for i in params.distinct},
        instructions=tuple(ops),
        outputs=tuple(results),
        functions=functions.by_name,
        owners=_owners(ops, {params.leaves[i].path for i in params.distinct}),
        sums=tuple(sums),
    )
    return BaseProgram(program, means.structure)


def _divided(
    means: Means, values: Sequence[Value], precision: Precision, mesh: AbstractMesh, names: Names, functions: Functions
) -> tuple[list[str], list[Instruction]]:
    """Returns the names of the results of an evaluation, and the ops that divide the sums of weighted means."""
    results, ops, it, device = list[str](), list[Instruction](), iter(values), compat.trace_device(mesh.device_type)
    for weighted in means.weighted:
        if not weighted:
            results.append(next(it).name)
            continue
        sums = next(it), next(it)
        with compat.FakeTensorMode():
            pair = [torch.empty((), dtype=x.dtype, device=device) for x in sums]
            graph = record(lambda a, b: [precision.output(a / b)], pair, owner="eval_step", names=["total", "count"])
        results.append(names("mean"))
        value, fn = Value(results[-1], (), graph.outputs[0].meta["val"].dtype), functions.add("mean", graph)
        ops.append(Instruction("call", tuple(x.name for x in sums), (value,), fn, CallAttrs(of_sums=True)))
    return results, ops


def _casts(inputs: Inputs, compute_dtype: DType, names: Names) -> tuple[list[Instruction], dict[int, Value]]:
    """Returns a cast for every tensor that is computed in another dtype than it is given in, and the values to compute
    with."""
    ops, values = [], {}
    for i in inputs.distinct:
        leaf, dtype = inputs.leaves[i], compute_dtype(inputs.leaves[i])
        values[i] = Value(leaf.path, leaf.shape, leaf.dtype)
        if dtype != leaf.dtype:
            values[i] = Value(names(f"{names.stem(leaf.path)}_{str(dtype).removeprefix('torch.')}"), leaf.shape, dtype)
            ops.append(
                Instruction("cast", (leaf.path,), (values[i],), attrs=CastAttrs(dtype=dtype), by="mixed_precision")
            )
    return ops, values


def _distinct(
    ops: list[Instruction], found: list[str], nodes: Sequence[fx.Node], names: Names, functions: Functions
) -> tuple[list[Instruction], list[str]]:
    """Copies outputs where necessary.

    If two outputs are one value, one of them gets a separate name. An output in the memory of an input gets separate
    memory, because a step overwrites its state and must return the values from before.
    """
    aliases, within = Aliases(functions.by_name), dict[str, str]()
    for op in ops:
        within.update((result, within.get(arg, arg)) for result, arg in aliases.of(op))
    made = {v.name for op in ops for v in op.out}
    seen: set[str] = set()
    out = []
    for name, node in zip(found, nodes, strict=True):
        if name in seen or node.op == "placeholder" or within.get(name, name) not in made:
            value = node.meta["val"]
            ops.append(
                Instruction(
                    "cast",
                    (name,),
                    (Value(names(f"{names.stem(name)}_copy"), tuple(value.shape), value.dtype),),
                    attrs=CastAttrs(dtype=value.dtype),
                )
            )
            name = ops[-1].out[0].name
        seen.add(name)
        out.append(name)
    return ops, out


def _owners(ops: Sequence[Instruction], leaves: set[str]) -> dict[str, int]:
    """Returns, for each tensor of the state, the index of the first op that computes with it: tensors with the same
    index belong to one block."""
    origin = {op.out[0].name: op.args[0] for op in ops if op.op == "cast"}
    owners: dict[str, int] = {}
    for number, op in enumerate(ops):
        # A cast is not a computation: a parameter belongs to the block that reads its cast value.
        for arg in op.args if op.op == "call" else ():
            leaf = origin.get(arg, arg)
            if leaf in leaves:
                owners.setdefault(leaf, number)
    return owners
