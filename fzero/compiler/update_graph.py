"""Traces everything that follows the backward as one function: means, gradient norm, loss scale, optimizer, new
parameters, and metrics."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero._compat import compat
from fzero.compiler.training_spec import ROUNDING_STREAM, Found, Training
from fzero.ir.attributes import UpdateAttrs
from fzero.ir.program import Instruction, Value
from fzero.ir.value_names import Names
from fzero.loss import agreeing, is_empty
from fzero.optim import global_norm
from fzero.optim.apply import apply_optimizer
from fzero.optim.nonfinite import SkipsNonfinite
from fzero.trace.graph_capture import record
from fzero.transforms.precision import Watched, gradient_statistics, output_maxima
from fzero.transforms.transform_state import StepResults

AGREED = "agreed_max"
"""Name of the maxima for the new values of mutable tensors that must be the same everywhere. Among the metrics, the
name without its ending says whether they were."""
RAISED = "raised_max"
"""Name of the maxima for the flags of conditions under which the loss raises. Among the metrics, the name without its
ending says whether they held."""


def _loss_and_scale(total: Any, count: Any, num_parts: int, traced: Found, scale_state: Any) -> tuple[Any, Any]:
    """Returns the loss, from its sum over the batch, and the factor for gradients; None: no factor."""
    loss = total / count if count is not None else total / num_parts if num_parts > 1 else total
    scale: Any = 1.0 / count if traced.of_sum and count is not None else traced.lacks
    if scale_state is not None:  # gradients are of the scaled loss
        scale = (1.0 if scale is None else scale) / scale_state.scale
    return loss, scale


def _means(
    params: Mapping[int, torch.Tensor], grads: Mapping[int, torch.Tensor], scale: Any, scaled: bool
) -> dict[int, torch.Tensor]:
    """Returns gradients as the optimizer gets them: times `scale`, if there is one, and zeros for parameters without a
    gradient. `scaled`: they are gradients of a scaled loss."""
    mean: dict[int, torch.Tensor] = {}
    for i, p in params.items():
        dtype = torch.promote_types(grads[i].dtype, p.dtype) if i in grads else p.dtype
        dtype = torch.promote_types(dtype, torch.float32) if scaled else dtype
        x = grads[i].to(dtype) if i in grads else torch.zeros_like(p, dtype=dtype)
        mean[i] = x if scale is None or i not in grads else x * scale
    return mean


def _unless_skipped(
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    overflow: torch.Tensor | None,
    empty: torch.Tensor | None,
    consumed: Collection[int],
) -> list[torch.Tensor]:
    """Returns the values after a step, or those before it if the step is skipped.

    Args:
        before, after: the values that a step writes, in the same order.
        overflow: bool[], whether the step is skipped because a gradient overflows; None: it never is.
        empty: bool[], whether it is skipped because its loss is a mean over nothing; None: it never is.
        consumed: the positions of values that change even with an empty batch.
    """
    reasons = [reason for reason in (overflow, empty) if reason is not None]
    skipped = functools.reduce(torch.logical_or, reasons) if reasons else None
    out = []
    for i, (was, now) in enumerate(zip(before, after, strict=True)):
        keeps = overflow if i in consumed else skipped
        out.append(now if keeps is None or now is was else torch.where(keeps, was, now))
    return out


def record_update(
    t: Training,
    grads: dict[int, Value],
    sums: Sequence[Value],
    maxima: Mapping[str, Value],
    traced: Found,
    names: Names,
    watched: Watched | None,
) -> tuple[Instruction, tree.TreeSpec]:
    """Traces everything after the backward as one function: means, gradient norm, optimizer, new parameters, and
    metrics.

    Args:
        t: the step.
        grads: the reduced gradients, by the position of their parameter.
        sums: the sums of the loss and its auxiliary values, as described by `traced`.
        maxima: maxima over ranks and micro-batches: `block_max` of the blocks' outputs, `agreed_max` of new values that
            must agree, `raised_max` of conditions under which the loss raises.
        traced: the results of tracing the loss.
        names: the generator of unused names of the program.
        watched: the watched blocks; None: blocks are not watched.

    Returns: the `update` op, which writes the state and computes the metrics, and the structure of the metrics.
    """
    params, opt_state, trained, scaling = t.params, t.opt_state, t.trained, t.precision.loss_scale
    slots = t.slots.updated
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    places = [("step", (), torch.int64), *([("key", (3,), torch.int64)] if t.precision.stochastic else [])]
    mutable = [*t.averaged, *t.agreed]
    state = [
        *(t.slots.inputs.leaves[i] for i in slots),
        *(params.leaves[i] for i in (*mutable, *trained)),
        *(opt_state.leaves[i] for i in opt_state.distinct),
    ]
    places += [(x.path, x.shape, x.dtype) for x in state]
    places += [(v.name, v.shape, v.dtype) for v in (*grads.values(), *maxima.values(), *sums)]
    info: dict[str, Any] = {}

    def update(*fakes: torch.Tensor) -> list[torch.Tensor]:
        # In the order of `places`.
        it = iter(fakes)
        step = next(it)
        key = fzrandom.fold_in(next(it), step + ROUNDING_STREAM) if t.precision.stochastic else None
        held = t.slots.of({t.slots.inputs.leaves[i].path: next(it) for i in slots})
        before = dict(held)
        scale_state = held["loss_scale"] if scaling is not None else None
        kept = [next(it) for _ in mutable]
        p = {i: next(it) for i in trained}
        o = {i: next(it) for i in opt_state.distinct}
        g = {i: next(it) for i in grads}
        largest = {name: next(it) for name in maxima}
        total, *rest = it
        count = rest.pop(0) if traced.weighted else None
        loss, scale = _loss_and_scale(total, count, t.num_parts, traced, scale_state)
        mean = _means({i: p[i] for i in trained}, g, scale, scaling is not None)
        # the optimizer sees None for a parameter that is not trained, and for every tied one except the first
        view = lambda of: tree.unflatten(params.structure, [of.get(i) for i in range(len(params.ties))])  # noqa: E731
        norm = global_norm(view(mean))
        new_o: list[torch.Tensor] = []

        def optimized(grads: Any) -> Any:
            new_params, new_opt = apply_optimizer(t.optimizer, grads, opt_state.rebuild(o), view(p), key)
            new_o[:] = tree.leaves(new_opt)
            # like torch.optim, leaves parameters without a gradient unchanged
            return view({i: x if i in g else p[i] for i, x in zip(trained, tree.leaves(new_params), strict=True)})

        new_p = tree.leaves(t.slots.around(held, view(p), optimized)(view(mean)))
        means, values = traced.aux, iter(rest)
        aux = [next(values) / next(values) if w else next(values) / t.num_parts for w in means.weighted]
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        metrics: dict[str, Any] = {"loss": t.precision.output(loss), "grad_norm": norm, "finite": finite}
        changed = [(next(values) / t.num_parts).to(x.dtype) for x in kept[: len(t.averaged)]]
        if AGREED in largest:
            same, metrics["agreed"] = agreeing(largest[AGREED], kept[len(t.averaged) :])
            changed += same
        if RAISED in largest:
            metrics["raised"] = largest[RAISED] > 0
        if aux:
            metrics["aux"] = tree.unflatten(means.structure, [t.precision.output(x) for x in aux])
        few = tree.leaves(held)
        written = [step + 1, *few, *changed, *new_p, *(new_o[i] for i in opt_state.distinct)]
        old = [step, *tree.leaves(before), *kept, *(p[i] for i in trained), *(o[i] for i in opt_state.distinct)]
        # These two compute the norm of all gradients before any update anyway; others should not have to wait for it.
        knows_norm = scaling is not None or isinstance(t.optimizer, SkipsNonfinite)
        empty = is_empty(loss, count, norm if knows_norm else None)
        overflow = None if scaling is None else torch.logical_not(torch.isfinite(norm))
        if overflow is not None and empty is not None:  # an empty batch may have NaN gradients at any scale
            overflow = overflow & torch.logical_not(empty)
        # An empty batch counts as consumed (position 0), and mutable tensors get the values that its forward computed.
        consumed = {0, *range(1 + len(few), 1 + len(few) + len(kept))}
        written = _unless_skipped(old, written, overflow, empty, consumed)

        @functools.cache
        def statistics() -> Mapping[str, torch.Tensor]:
            assert watched is not None
            tiny = {i: torch.finfo(t.precision.compute(params.leaves[i])).tiny for i in grads}
            seen = gradient_statistics(
                watched, {i: mean[i] for i in grads}, tiny, None if scale_state is None else scale_state.scale
            )
            return {**seen, "output_max": output_maxima(largest.get("block_max"), loss)}

        held = tree.unflatten(tree.structure(before), written[1 : 1 + len(few)])
        paths = [leaf.path for leaf in params.leaves]
        metrics |= t.slots.advanced(held, StepResults(paths, loss, norm, finite, overflow, empty, watched, statistics))
        if watched is not None:
            metrics["precision"] = statistics()
        written[1 : 1 + len(few)] = tree.leaves(held)
        flat, info["structure"] = tree.flatten(metrics)
        info["paths"] = tree.names(metrics)
        return [*written, *flat]

    fakes = [compat.new_fake(mode, shape, dtype, compat.trace_device(t.mesh.device_type)) for _, shape, dtype in places]
    with mode:
        of_grads = {v.name: f"the gradient of {params.leaves[i].path}" for i, v in grads.items()}
        labels = [of_grads.get(name, name) for name, *_ in places]
        recorded = record(
            update,
            fakes,
            owner="optimizer",
            names=[f"in_{i}" for i in range(len(places))],
            source=t.optimizer.update,
            labels=labels,
        )
    targets = ["step", *(x.path for x in state)]
    returned = recorded.outputs
    given = dict(zip((name for name, *_ in places), recorded.inputs, strict=True))
    # the others are unchanged
    written = [(target, node) for target, node in zip(targets, returned, strict=False) if node is not given[target]]
    recorded.graph.output_node().args = ((*(node for _, node in written), *returned[len(targets) :]),)
    recorded.graph.eliminate_dead_code()
    metric_values = [
        Value(names(f"metric_{p.replace('.', '_')}"), tuple(n.meta["val"].shape), n.meta["val"].dtype)
        for p, n in zip(info["paths"], returned[len(targets) :], strict=True)
    ]
    op = Instruction(
        "update",
        tuple(n for n, _, _ in places),
        tuple(metric_values),
        attrs=UpdateAttrs(
            graph=recorded, sums=tuple(v.name for v in sums), maxima=tuple(v.name for v in maxima.values())
        ),
        writes=tuple(target for target, _ in written),
    )
    return op, info["structure"]
