"""Derives tolerances for two ways of computing one step: from dtypes and the lengths of reductions, and from how the
step itself amplifies an error.

[Note: tolerance] Let u be a dtype's unit roundoff. Roundings are modeled as independent with mean zero. Then the
relative error of n successive roundings stays below `lambda * sqrt(n) * u` with a probability of at least 1 - 2 n
exp(-lambda^2 / 2). The source is Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J.
Sci. Comput. 41(5), 2019, theorem 2.4. The worst case is n u (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., 2002, chapter 3). Here

    roundoff = sqrt(n u_sum^2 + parts u_reduce^2 + u_compute^2)

where n is the longest chain of summations and operations in the step: a matrix product counts its inner dimension, a
sum its length, and any other operation one. The dtype of sums, float32 or wider, gives u_sum. `parts` is the number
of ranks times micro-batches, and the dtype of reduced gradients gives u_reduce. Every parameter and input is rounded
once to the compute dtype, or to the dtype of the products' operands if that is lower: this gives u_compute. Values
that are sent as quantized codes are rounded further, by half a step of the largest value of their block; this
rounding moves parameters and gradients separately.

What the loss, the optimizer and earlier steps make of errors of that size is not bounded but measured, by runs of the
plain step. Four of them run in the compute dtype, with random perturbations of relative size `lambda roundoff`: of
every parameter that the loss reads, and of every gradient, relative to the root mean square of its tensor. Gradients
are moved up in two of the runs, and down in two. The resulting changes of the gradients are their noise. An element's
noise is its own change or the root mean square over its tensor, whichever is larger, because some runs may miss a
change. There are four runs because of tensors of one element, whose gradient is a sum that cancels: two runs miss its
noise once in some hundred models. In two further runs every gradient is moved by its noise: up in one, down in the
other. So an update that depends on the sign of a gradient near 0, as those of Adam and Lion do, goes both ways. A
gradient that consists only of rounding errors, as for the bias of attention's keys, gets the tolerance it needs. With

    moved    the most that its elements moved in these runs
    come     how far it has come since the start; for a metric, its size
    stored   sqrt(steps) u_store times its norm; one rounding more if the plain step is stored in a finer dtype

a tensor may be off, in the Euclidean norm, by

    2 moved + lambda (roundoff come + stored)

so a small learning rate gives a small tolerance, and the norm of a tensor hides nothing. 8-bit codes in an
optimizer's state may be off by `2 moved + lambda` of their steps: lambda^2 elements may be at a rounding boundary
that no run crossed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero._compat import compat
from fzero.ir.program import Program
from fzero.ops.scaled_matmul import E5M2
from fzero.optim import GradientTransformation
from fzero.step import Step
from fzero.step.checks import wants_key
from fzero.transforms.compress import Compress
from fzero.transforms.fp8 import Fp8
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.transform import find

LAMBDA = 4.0
"""The factor of [Note: tolerance]: one rounding in 1500 exceeds it, and the sum of a chain almost never does."""
PRECISIONS = (MixedPrecision, Fp8, Compress)
"""The transforms that change the dtype in which a step computes or sends values."""
WAYS = (1, -1)
"""The directions in which gradients are moved: one run of the plain step for each."""
NUM_MOVED = 4
"""Number of runs with perturbed parameters."""

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "expert_mm", "expert_outer", "grouped_mm", "grouped_outer")
_NORMALISED = ("softmax", "layer_norm", "native_batch_norm")


def unit(dtype: torch.dtype) -> float:
    """Returns a dtype's unit roundoff: half the distance from 1 to the next number; 0 for an exact dtype.

    Example:
        >>> unit(torch.bfloat16) == 2**-8, unit(torch.float32) == 2**-24, unit(torch.int64)
        (True, True, 0.0)
    """
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


@dataclass(frozen=True)
class Roundoff:
    """The relative error of one execution of a step, and what it consists of. See [Note: tolerance]."""

    chain: int  # the longest chain of summations and operations
    parts: int  # ranks x micro-batches
    sum: torch.dtype
    reduce: torch.dtype
    compute: torch.dtype
    store: torch.dtype
    given: torch.dtype  # the dtype in which the plain step is stored and computes
    operands: torch.dtype  # the dtype that products round their operands to
    kept: frozenset[str] = frozenset()  # the paths of parameters that are not cast, such as buffers of a module
    coded: tuple[float, float] = (0.0, 0.0)  # the roundings of parameters and of gradients that are sent as codes

    @property
    def value(self) -> float:
        rounded = max(unit(self.compute), unit(self.store), unit(self.operands))
        # Only a dtype that is coarser than the plain step's rounds values that the plain step keeps.
        rounded = rounded if rounded > unit(self.given) else 0.0
        return math.sqrt(self.chain * unit(self.sum) ** 2 + self.parts * unit(self.reduce) ** 2 + rounded**2)

    @property
    def with_codes(self) -> float:
        """The relative error of one execution whose transfers send codes."""
        return math.hypot(self.value, *self.coded)

    def __str__(self) -> str:
        dtypes = {
            "sums": self.sum,
            "reduced": self.reduce,
            "computed": self.compute,
            **({"multiplied": self.operands} if self.operands != self.compute else {}),
        }
        said = [f"{what} in {tree.dtype_name(d)}" for what, d in dtypes.items()]
        sent = zip(("parameters", "gradients"), self.coded, strict=True)
        said += [f"{what} sent to {rounding:.1e}" for what, rounding in sent if rounding]
        return f"{self.value:.1e} = a chain of {self.chain:,} roundings, {self.parts} parts; {', '.join(said)}"


def roundoff(step: Step, base: Program, params: Any, parts: int) -> Roundoff:
    """Returns the roundoff of a step.

    Args:
        step: the step with its transforms.
        base: its base program.
        params: the tree of unsharded tensors.
        parts: ranks x micro-batches.
    """
    floats = [x.dtype for x in tree.leaves(params) if x.is_floating_point()]
    coarsest = max(floats, key=unit, default=torch.float32)
    precision = find(step.transforms, MixedPrecision)
    compute = reduced = store = coarsest
    if precision is not None:
        values = [leaf for leaf in base.leaves.values() if leaf.role == "params" and leaf.dtype.is_floating_point]
        compute = max((precision.compute_dtype(x) for x in values), key=unit, default=coarsest)
        reduced = max((precision.reduce_dtype(x) for x in values), key=unit, default=coarsest)
        store = max((x.dtype for x in values), key=unit, default=coarsest)
    sums = torch.float64 if unit(compute) < unit(torch.float32) else torch.float32
    operands = compute if find(step.transforms, Fp8) is None else E5M2
    keeps = step.exact if precision is not None and step.exact is not None else lambda path, compute: False
    kept = frozenset(
        path for path in tree.paths(params, "params") if keeps(path, precision.compute if precision else "")
    )
    sent = find(step.transforms, Compress)
    coded = (0.0, 0.0) if sent is None else sent.roundings
    return Roundoff(longest_chain(base), parts, sums, reduced, compute, store, coarsest, operands, kept, coded)


def longest_chain(program: Program) -> int:
    """Returns the largest number of successive roundings that a value of a program's loss and gradients goes
    through.
    """
    inside = {name: _chain(function.graph.graph) for name, function in program.functions.items()}
    length: dict[str, int] = {}
    for op, _ in program.walk():
        here = max((length.get(a, 0) for a in op.args), default=0) + inside.get(op.fn, 0)
        length.update((v.name, here) for v in op.out)
    update = 0 if program.update is None else _chain(program.update.attrs.graph.graph)
    return max(length.values(), default=0) + update


def _chain(graph: torch.fx.Graph) -> int:
    length: dict[Any, int] = {}
    for node in graph.nodes:
        length[node] = max((length[a] for a in node.all_input_nodes), default=0) + _roundings(node)
    return max(length.values(), default=0)


def _roundings(node: torch.fx.Node) -> int:
    """Returns the number of roundings of one operation: the length of its reduction, 1 if it has none, and 0 if
    nothing is computed.
    """
    value = node.meta.get("val")
    if (
        node.op != "call_function"
        or compat.is_view(node.target)
        or not (isinstance(value, torch.Tensor) and value.is_floating_point())
    ):
        return 0
    inputs = [x for a in node.all_input_nodes if isinstance(x := a.meta.get("val"), torch.Tensor)]
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0].strip("_")
    if "attention" in name and len(inputs) > 1:
        # Attention has two sums, one after the other: over the features of a head, and over the keys.
        return inputs[0].shape[-1] + inputs[1].shape[-2]
    if name == "scaled_mm":
        return inputs[0].shape[-1]
    if name in _PRODUCTS:
        return inputs[-2:][0].shape[-1]  # of the first factor; the product of a value with itself has one input
    if any(m in name for m in _NORMALISED):
        return max((x.shape[-1] for x in inputs if x.dim()), default=1)
    return max((x.numel() // max(value.numel(), 1) for x in inputs), default=1) or 1


def moved(step: Step, size: Roundoff, number: int, seen: list[list[torch.Tensor]]) -> Step:
    """Returns the plain step with every parameter that the loss reads and every gradient moved by `LAMBDA * size`,
    computed in the dtype of `size`.

    Args:
        step: the plain step.
        size: the roundoff, relative: for parameters to themselves, for gradients to the root mean square of the
            nonzero elements of their tensor. A gradient that is 0 stays 0.
        number: the number of the run. Gradients are moved up in runs with even numbers and down in the others;
            parameters are moved at random, as a function of the number.
        seen: receives the gradients of each step.
    """
    key = fzrandom.fold_in(fzrandom.key(0x7E57), number)
    by, of_grads = (LAMBDA * math.hypot(size.value, rounding) for rounding in size.coded)
    way = WAYS[number % len(WAYS)]

    def nudged(x: torch.Tensor, number: int) -> torch.Tensor:
        draw = fzrandom.uniform(fzrandom.fold_in(key, number), tuple(x.shape)).to(x.device)
        # Relative, with a random sign for each element, as roundoff is.
        return x * (1 + by * ((draw < 0.5).to(x.dtype) * 2 - 1)) if x.is_floating_point() else x

    def lower(x: torch.Tensor, path: str = "") -> torch.Tensor:
        cast = x.is_floating_point() and unit(size.compute) > unit(x.dtype) and path not in size.kept
        return x.to(size.compute) if cast else x

    def loss_fn(params: Any, batch: Any, **kwargs: Any) -> Any:
        flat, structure = tree.flatten(params)
        paths = tree.paths(params, "params")
        near = [lower(nudged(x, i), path) for i, (x, path) in enumerate(zip(flat, paths, strict=True))]
        return step.loss_fn(tree.unflatten(structure, near), tree.map(lower, batch), **kwargs)

    def with_key(params: Any, batch: Any, *, key: torch.Tensor) -> Any:
        return loss_fn(params, batch, key=key)

    def shifted(t: int, i: int, x: torch.Tensor) -> torch.Tensor:
        present = x != 0
        # By the root mean square of the tensor, because codes round relative to the scale of a block. Zeros stay zeros
        # in codes.
        return x + way * of_grads * (x.square().sum() / present.sum().clamp(min=1)).sqrt() * present

    return with_gradients(replace(step, loss_fn=with_key if wants_key(step.loss_fn) else loss_fn), shifted, seen)


def with_gradients(
    step: Step, change: Callable[[int, int, torch.Tensor], torch.Tensor], seen: list[list[torch.Tensor]] | None = None
) -> Step:
    """Returns the plain step with other gradients: each is the result of `change`, given the number of the step (from
    0), the number of the tensor, and the gradient. `seen` receives the changed gradients of each step.
    """
    count = itertools.count()

    def update(grads: Any, state: Any, params: Any) -> Any:
        t = next(count)
        flat, structure = tree.flatten(grads)
        flat = [change(t, i, g) for i, g in enumerate(flat)]
        if seen is not None:
            seen.append([g.detach().clone() for g in flat])
        return step.optimizer.update(tree.unflatten(structure, flat), state, params)

    return replace(step, optimizer=GradientTransformation(step.optimizer.init, update))


def noise(
    exact: Sequence[Sequence[torch.Tensor]], runs: Sequence[Sequence[Sequence[torch.Tensor]]]
) -> list[list[torch.Tensor]]:
    """Returns the noise of each gradient in each step, element by element: see [Note: tolerance]. A gradient that is
    0 in all runs has none.
    """
    out = []
    for t, grads in enumerate(exact):
        leaves = []
        for i, g in enumerate(grads):
            off = torch.stack([(run[t][i] - g).abs() for run in runs]).amax(0).nan_to_num(nan=0.0, posinf=0.0)
            present = (torch.stack([run[t][i] for run in (*runs, exact)]) != 0).any(0)
            size = (off.square().sum() / present.sum().clamp(min=1)).sqrt()
            leaves.append(torch.maximum(off, size) * present)
        out.append(leaves)
    return out
