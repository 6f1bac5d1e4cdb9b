"""Traces everything that follows the backward as one function: means, gradient norm, loss scale, optimizer, new
parameters, and metrics."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

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
from fzero.optim.apply import apply_optimizer, passed_on, reject_passed_on
from fzero.optim.nonfinite import SkipsNonfinite
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded
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


class _Arguments(NamedTuple):
    """The arguments of an update function, in order; parameters, state and gradients by position.

    Attributes:
        step: int64[], the number of the step.
        key: the key of random rounding, if the step has any.
        held: the slots of transforms; the update replaces them.
        kept: the mutable tensors, first the averaged ones.
        params, opt_state, grads: the trained parameters, the optimizer state and the gradients.
        maxima: the maxima over ranks, by name.
        total, count, rest: the sum of the loss, of its weights if it is a weighted mean, and those of auxiliary values
            and of averaged tensors.
    """

    step: torch.Tensor
    key: torch.Tensor | None
    held: dict[str, Any]
    kept: list[torch.Tensor]
    params: dict[int, torch.Tensor]
    opt_state: dict[int, torch.Tensor]
    grads: dict[int, torch.Tensor]
    maxima: dict[str, torch.Tensor]
    total: torch.Tensor
    count: torch.Tensor | None
    rest: list[torch.Tensor]


class _UpdateFunction:
    """Everything after the backward as one function: means, gradient norm, optimizer, new parameters, and metrics. The
    arguments are those of `record_update`.

    Attributes:
        state: the tensors that the function replaces, after the number of the step.
        places: the names, shapes and dtypes of its arguments.
        structure, paths: the structure of the metrics and their names, once the function was called.
        passed_on: the parameters whose update is their gradient, once the function was called.
    """

    structure: tree.TreeSpec
    paths: list[str]
    passed_on: list[str]

    def __init__(
        self,
        t: Training,
        grads: Mapping[int, Value],
        sums: Sequence[Value],
        maxima: Mapping[str, Value],
        traced: Found,
        watched: Watched | None,
    ):
        self.t, self.grads, self.maxima, self.traced, self.watched = t, [*grads], [*maxima], traced, watched
        self.scaled = t.precision.loss_scale is not None
        self.state = [
            *(t.slots.inputs.leaves[i] for i in t.slots.updated),
            *(t.params.leaves[i] for i in (*t.averaged, *t.agreed, *t.trained)),
            *(t.opt_state.leaves[i] for i in t.opt_state.distinct),
        ]
        self.places: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("step", (), torch.int64),
            *([("key", (3,), torch.int64)] if t.precision.stochastic else []),
            *((x.path, x.shape, x.dtype) for x in self.state),
            *((v.name, v.shape, v.dtype) for v in (*grads.values(), *maxima.values(), *sums)),
        ]

    def __call__(self, *fakes: torch.Tensor) -> list[torch.Tensor]:
        """Returns the new number of the step, the new state, and the metrics."""
        t, a = self.t, self._arguments(fakes)
        before = dict(a.held)
        scale_state = a.held["loss_scale"] if self.scaled else None
        loss, scale = _loss_and_scale(a.total, a.count, t.num_parts, self.traced, scale_state)
        mean = _means(a.params, a.grads, scale, self.scaled)
        norm = global_norm(self._tree(mean))
        new_params, new_opt = self._optimized(a, mean)
        metrics, changed = self._metrics(a, loss, norm)
        few = tree.leaves(a.held)
        written = [a.step + 1, *few, *changed, *new_params, *new_opt]
        old = [a.step, *tree.leaves(before), *a.kept, *a.params.values(), *a.opt_state.values()]
        overflow, empty = self._reasons_to_skip(a, loss, norm)
        # An empty batch counts as consumed (position 0), and mutable tensors get the values that its forward computed.
        consumed = {0, *range(1 + len(few), 1 + len(few) + len(a.kept))}
        written = _unless_skipped(old, written, overflow, empty, consumed)

        @functools.cache
        def statistics() -> Mapping[str, torch.Tensor]:
            return self._statistics(a, mean, loss, None if scale_state is None else scale_state.scale)

        held = tree.unflatten(tree.structure(before), written[1 : 1 + len(few)])
        paths = [leaf.path for leaf in t.params.leaves]
        results = StepResults(paths, loss, norm, metrics["finite"], overflow, empty, self.watched, statistics)
        metrics |= t.slots.advanced(held, results)
        if self.watched is not None:
            metrics["precision"] = statistics()
        written[1 : 1 + len(few)] = tree.leaves(held)
        flat, self.structure = tree.flatten(metrics)
        self.paths = tree.names(metrics)
        return [*written, *flat]

    def _arguments(self, fakes: Sequence[torch.Tensor]) -> _Arguments:
        t, it = self.t, iter(fakes)  # in the order of `places`
        step = next(it)
        key = fzrandom.fold_in(next(it), step + ROUNDING_STREAM) if t.precision.stochastic else None
        held = t.slots.of({t.slots.inputs.leaves[i].path: next(it) for i in t.slots.updated})
        kept = [next(it) for _ in (*t.averaged, *t.agreed)]
        params = {i: next(it) for i in t.trained}
        opt_state = {i: next(it) for i in t.opt_state.distinct}
        grads = {i: next(it) for i in self.grads}
        maxima = {name: next(it) for name in self.maxima}
        total, *rest = it
        count = rest.pop(0) if self.traced.weighted else None
        return _Arguments(step, key, held, kept, params, opt_state, grads, maxima, total, count, rest)

    def _tree(self, of: Mapping[int, torch.Tensor]) -> Any:
        """The tree as the optimizer sees it: None for a parameter that is not trained, and for every tied one except
        the first."""
        return tree.unflatten(self.t.params.structure, [of.get(i) for i in range(len(self.t.params.ties))])

    def _optimized(
        self, a: _Arguments, mean: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the new parameters and the new optimizer state."""
        t, new_opt, params = self.t, list[torch.Tensor](), self._tree(a.params)

        def optimized(grads: Any) -> Any:
            new, state, updates = apply_optimizer(t.optimizer, grads, t.opt_state.rebuild(a.opt_state), params, a.key)
            new_opt[:] = tree.leaves(state)
            given = zip(t.trained, tree.leaves(grads), strict=True)
            self.passed_on = passed_on(updates, {t.params.leaves[i].path: g for i, g in given if i in a.grads})
            # like torch.optim, leaves parameters without a gradient unchanged
            new = zip(t.trained, tree.leaves(new), strict=True)
            return self._tree({i: x if i in a.grads else a.params[i] for i, x in new})

        new_params = tree.leaves(t.slots.around(a.held, params, optimized)(self._tree(mean)))
        return new_params, [new_opt[i] for i in t.opt_state.distinct]

    def _metrics(
        self, a: _Arguments, loss: torch.Tensor, norm: torch.Tensor
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Returns the metrics of the loss, and the new values of mutable tensors."""
        t, means, values = self.t, self.traced.aux, iter(a.rest)
        aux = [next(values) / next(values) if w else next(values) / t.num_parts for w in means.weighted]
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        metrics: dict[str, Any] = {"loss": t.precision.output(loss), "grad_norm": norm, "finite": finite}
        changed = [(next(values) / t.num_parts).to(x.dtype) for x in a.kept[: len(t.averaged)]]
        if AGREED in a.maxima:
            same, metrics["agreed"] = agreeing(a.maxima[AGREED], a.kept[len(t.averaged) :])
            changed += same
        if RAISED in a.maxima:
            metrics["raised"] = a.maxima[RAISED] > 0
        if aux:
            metrics["aux"] = tree.unflatten(means.structure, [t.precision.output(x) for x in aux])
        return metrics, changed

    def _reasons_to_skip(
        self, a: _Arguments, loss: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns whether gradients overflowed, and whether the loss is a mean over nothing; None: not checked."""
        # These two compute the norm of all gradients before any update anyway; others should not have to wait for it.
        knows_norm = self.scaled or isinstance(self.t.optimizer, SkipsNonfinite)
        empty = is_empty(loss, a.count, norm if knows_norm else None)
        overflow = torch.logical_not(torch.isfinite(norm)) if self.scaled else None
        if overflow is not None and empty is not None:  # an empty batch may have NaN gradients at any scale
            overflow = overflow & torch.logical_not(empty)
        return overflow, empty

    def _statistics(
        self, a: _Arguments, mean: Mapping[int, torch.Tensor], loss: torch.Tensor, scale: torch.Tensor | None
    ) -> Mapping[str, torch.Tensor]:
        assert self.watched is not None
        tiny = {i: torch.finfo(self.t.precision.compute(self.t.params.leaves[i])).tiny for i in a.grads}
        seen = gradient_statistics(self.watched, {i: mean[i] for i in a.grads}, tiny, scale)
        return {**seen, "output_max": output_maxima(a.maxima.get("block_max"), loss)}


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
    update = _UpdateFunction(t, grads, sums, maxima, traced, watched)
    given = [name for name, *_ in update.places]
    recorded = _recorded(update, {v.name: f"the gradient of {t.params.leaves[i].path}" for i, v in grads.items()})
    reject_passed_on(update.passed_on)
    targets, returned = ["step", *(x.path for x in update.state)], recorded.outputs
    inputs = dict(zip(given, recorded.inputs, strict=True))
    # the others are unchanged
    written = [(target, node) for target, node in zip(targets, returned, strict=False) if node is not inputs[target]]
    recorded.graph.output_node().args = ((*(node for _, node in written), *returned[len(targets) :]),)
    recorded.graph.eliminate_dead_code()
    metric_values = [
        Value(names(f"metric_{p.replace('.', '_')}"), tuple(n.meta["val"].shape), n.meta["val"].dtype)
        for p, n in zip(update.paths, returned[len(targets) :], strict=True)
    ]
    attrs = UpdateAttrs(graph=recorded, sums=tuple(v.name for v in sums), maxima=tuple(v.name for v in maxima.values()))
    writes = tuple(target for target, _ in written)
    return Instruction("update", tuple(given), tuple(metric_values), attrs=attrs, writes=writes), update.structure


def _recorded(update: _UpdateFunction, labels: Mapping[str, str]) -> Recorded:
    """Returns the graph of an update function. `labels`: what errors call arguments, by name."""
    mode, device = compat.FakeTensorMode(allow_non_fake_inputs=True), compat.trace_device(update.t.mesh.device_type)
    fakes = [compat.new_fake(mode, shape, dtype, device) for _, shape, dtype in update.places]
    with mode:
        return record(
            update,
            fakes,
            owner="optimizer",
            names=[f"in_{i}" for i in range(len(fakes))],
            source=update.t.optimizer.update,
            labels=[labels.get(name, name) for name, *_ in update.places],
        )
