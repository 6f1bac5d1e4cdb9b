"""Seeds the backward with one factor for the whole batch, so that gradients are those of the whole batch's mean.

A batch is divided into parts, ranks times micro-batches, and each part differentiates its own total. If the seed is one
over the count of the whole batch, a part's backward computes its summands of the mean's gradient: the numbers that a
single process would compute when it differentiates the whole batch at once. So they fit in float16, and a backward that
is not linear but treats each sample separately, such as a hook that clamps, has the same effect on every mesh. A
backward that combines samples, such as clipping by norm, sees the samples of its part. It is not rejected: the scale of
an 8-bit product, computed from the largest element of a gradient, looks the same in a graph, and is meant to see only a
part.

The count of the whole batch is known before the first backward: the part of the forward that computes the count runs
separately, first, for all micro-batches, and ranks add up the results. A mean over parts of equal size needs no count,
and neither does a count that is a literal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.compiler.training_spec import Training
from fzero.errors import TraceError
from fzero.ir.attributes import CallAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.program import Instruction, Value
from fzero.ir.value_names import Names
from fzero.loss import Loss
from fzero.trace.graph_capture import record
from fzero.trace.guards.known_values import Known
from fzero.trace.joint_graph import call_block, call_vjp
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import ancestors, extract, inlined

aten = torch.ops.aten

SCALE = "extras['loss_scale'].scale"
SEED = "seed"
DTYPE = torch.float64
"""The dtype of a seed that is computed ahead: it is rounded once, to the dtype of the loss."""


@dataclass(frozen=True)
class CountAhead:
    """The ops that precede the backward of a weighted loss whose batch is divided into parts.

    Attributes:
        ops: the ops that compute the count of a part.
        count: the value of that count; None: the count is one of the sums that the forward computes.
        seed: the op that computes the seed from all parts' counts.
        of_sum: whether gradients are those of the sum, because the count is not known before the backward.
    """

    ops: Sequence[Instruction] = ()
    count: Value | None = None
    seed: Sequence[Instruction] = ()
    of_sum: bool = False


def seed_of(loss: Loss, num_parts: int, scale: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor:
    """Returns the derivative of the whole batch's scaled mean by a part's total, in the dtype of the total. `given`:
    the seed, for a weighted loss whose batch is divided into parts."""
    total, count = loss
    if count is None:
        if scale is None:
            # A mean over equal parts: the mean of the batch is the sum of the parts' means divided by their number.
            return torch.full_like(total, 1.0 / num_parts, memory_format=torch.preserve_format)
        return (scale / num_parts if num_parts > 1 else scale).to(total.dtype)
    if given is None:
        # A count in 16 bits would be rounded: bfloat16 represents integers exactly only up to 256.
        count = count.to(torch.promote_types(torch.promote_types(count.dtype, torch.float32), total.dtype))
        given = (1.0 if scale is None else scale) / count
    return given.to(total.dtype)


def rounded(num_parts: int, dtype: torch.dtype) -> float | None:
    """Returns the factor that corrects the rounding of the seed of a mean to a dtype with less than 32 bits; None if
    none is needed."""
    if dtype.itemsize >= 4:
        return None
    with compat.no_modes(), compat.no_function_modes():  # computed in this process, not traced
        factor = torch.full((), 1.0 / num_parts, dtype=dtype, device="cpu").item() * num_parts
    return None if factor == 1.0 else 1.0 / factor


def made_ahead(t: Training, graph: Recorded, functions: Functions, names: Names) -> CountAhead:
    """Makes the seed of a weighted loss whose batch is divided into parts. If the count is a literal, the seed is added
    to the graph itself.

    Args:
        t: the training step.
        graph: its results are the seed, the loss's total, its count, and others. If the count is computed ahead, the
            graph no longer needs to return it. A seed that is computed ahead is its argument `SEED`.
        functions, names: the subgraphs and names of the program, which are extended.

    Raises:
        TraceError: in float16, the count is not known until blocks have run.
    """
    node, (place,) = graph.outputs[2], [n for n in graph.inputs if n.meta["name"] == SEED]
    scale = [n for n in graph.inputs if n.meta["name"] == SCALE]
    needed = ancestors([node], stop=set())
    places = [n for n in graph.inputs if n in needed]
    value = Value(SEED, (), DTYPE)
    # Computing the count first would run these blocks twice, and gather their parameters twice. So each part
    # differentiates its sum, and the gradients are divided by the count after the backward.
    if blocks := [n for n in graph.graph.nodes if n in needed and n.target in (call_block, call_vjp)]:
        _check_range(t, blocks)
        one = functions.add("seed", _recorded(t, [], lambda: 1.0))
        return CountAhead(seed=[Instruction("call", (), (value,), one)], of_sum=True)
    # No argument is needed for the count, so it is a number that is known while tracing.
    if not places:
        made = extract(graph, [], [node])
        count = Known(made.graph, made.constants).compute(aten._local_scalar_dense.default, (made.outputs[0],), {})
        whole = count * t.num_parts
        first = next(n for n in graph.graph.nodes if place in n.all_input_nodes)
        _, (seed,) = inlined(graph.graph, first, _recorded(t, scale, lambda x=1.0: x / whole), scale)
        # The placeholder of the seed has no reader any more, and the program needs no op that computes it.
        place.replace_all_uses_with(seed)
        return CountAhead()
    count = Value(names("count"), (), node.meta["val"].dtype)
    fn = functions.add("count", extract(graph, places, [node]))
    op = Instruction("call", tuple(n.meta["name"] for n in places), (count,), fn)
    seed = functions.add("seed", _recorded(t, [*scale, node], lambda *x: (x[0] if scale else 1.0) / x[-1]))
    args = (*(n.meta["name"] for n in scale), count.name)
    return CountAhead([op], count, [Instruction("call", args, (value,), seed, CallAttrs(of_sums=True))])


def _recorded(t: Training, of: Sequence[fx.Node], seed: Callable[..., Any]) -> Recorded:
    """Traces a function of 0-dim tensors; the result has the dtype of a seed."""
    device = compat.trace_device(t.mesh.device_type)
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        xs = [torch.empty((), dtype=n.meta["val"].dtype, device=device) for n in of]

        def made(*xs: torch.Tensor) -> list[torch.Tensor]:
            found = seed(*(x.to(DTYPE) for x in xs))
            return [torch.full((), found, dtype=DTYPE, device=device) if isinstance(found, float) else found]

        return record(made, xs, owner="train_step", names=[f"x_{i}" for i in range(len(xs))])


def _check_range(t: Training, blocks: Sequence[fx.Node]) -> None:
    """Raises TraceError if gradients of sums might overflow the compute dtype."""
    if t.precision.loss_scale is None:
        return
    made = ", ".join(dict.fromkeys(repr(n.args[0].name) for n in blocks))  # type: ignore[union-attr]
    problem = f"count: made by {made}, and the batch is split into {t.num_parts} parts, each of which has its own count"
    fix = (
        "make the count of the batch or of the step's key; or return total "
        "/ count, a mean of the micro-batches' means; or "
        "compute in bf16"
    )
    what = "in fp16 the count of a weighted loss must be known before the backward"
    raise TraceError("mixed_precision", what, [problem], fix)
