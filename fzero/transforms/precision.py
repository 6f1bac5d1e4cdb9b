"""Computes in one dtype, and stores masters and reduces gradients in another. Acts on the functions, before the trace.

The loss function gets parameters and batch in the compute dtype; stored parameters, and those that the optimizer sees,
have the dtype `params`. A sharded parameter is cast on its shard and gathered in the compute dtype: half the bytes.
With float16 the loss is scaled, and its scale is a part of the state (fzero/optim/loss_scale.py).

With `watch=True` or "auto", the step also computes statistics of each block's gradients and outputs. A watched block is
a call of a block, in the order of the forward; the last one is the code outside blocks. A parameter belongs to the
first block that takes it as a parameter, or to the last entry. Statistics are vectors with one number for each watched
block, so that they do not need a separate value for each block.

With "auto", every step counts the overflows and underflows in these statistics. Whenever a step is restored or a
program is built, each parameter with a counter that has reached `LIMIT` is computed in float32 from then on
(`Promotion`). Counters belong to parameters, not to blocks, because the number of parameters is known before the step
is traced, and because the compute dtype is chosen for each parameter. Blocks that share a parameter are promoted
together, so they are counted together.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import accepts, flag, keywords, predicate
from fzero.comm import control_group
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Instruction
from fzero.mesh import Mesh
from fzero.optim.loss_scale import LossScale, fixed_scale
from fzero.optim.tree_updates import sum_of_squares
from fzero.sharding.layout import Leaf
from fzero.step import Step
from fzero.trace.device_decompositions import computes_in
from fzero.transforms.transform import Transform, applied, find
from fzero.transforms.zero import Where

if TYPE_CHECKING:
    from fzero.transforms.transform_state import StepResults

logger = logging.getLogger("fzero")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {
    name: short
    for short, long in {"fp32": "float32 float", "bf16": "bfloat16", "fp16": "float16 half"}.items()
    for name in (short, *long.split(), f"torch.{long.split()[0]}")
}
"""The short name of a dtype by each of its names, including PyTorch's."""
ROUNDINGS = ("stochastic", "nearest")
AT_MINIMUM = ("warn", "raise")


@dataclass(frozen=True)
class MixedPrecision(Transform):
    """The configuration of `mixed_precision`.

    Attributes:
        compute: the compute dtype; with "auto" the initial one, which is "auto" until the device determines it.
        exact: `(path, compute)` -> whether the step's function needs this parameter uncast.
        auto: whether blocks that overflow or underflow are promoted.
        safer: the paths of the parameters that have been promoted to float32.
    """

    compute: str = "bf16"
    params: str = "fp32"
    reduce: str = "fp32"
    rounding: str | None = None
    outputs: str | None = "fp32"
    loss_scale: LossScale | None = None
    loss_scale_at_minimum: str = "warn"
    where: Where | None = None
    watch: bool = False
    exact: Callable[[str, str], bool] | None = None
    auto: bool = False
    safer: tuple[str, ...] = ()
    order: ClassVar[int] = 20
    name: ClassVar[str] = "mixed_precision"
    every_leaf: ClassVar[bool] = True

    @property
    def scaling(self) -> LossScale | None:
        """The loss scale, if there is one."""
        return self.loss_scale if "fp16" in (self.compute, self.reduce) else None

    def selects(self, leaf: Leaf) -> bool:
        """Whether a tensor is cast: it must be floating point and, if it is a parameter, accepted by `where`. A mutable
        tensor, for which the loss function returns a new value, is not cast."""
        if not leaf.dtype.is_floating_point or leaf.role == "mutable":
            return False
        # The buffers of a module, such as running statistics or tables of frequencies, which lose too much in 16 bits.
        if leaf.role == "params" and self.exact is not None and self.exact(leaf.path, self.compute):
            return False
        return leaf.role != "params" or accepts(self.name, "where", self.where, leaf.path, leaf.meta)

    def add(self, step: Any) -> Any:
        """Returns the step with this configuration, which excludes parameters that the step's function needs uncast."""
        return Transform.add(replace(self, exact=getattr(step, "exact", None) or self.exact), step)

    def on_device(self, device: torch.device | None) -> Transform:
        if self.compute != "auto":
            return self
        return replace(self, compute="bf16" if device is None or computes_in(device, torch.bfloat16) else "fp16")

    def slots(self, params: Any) -> dict[str, Any]:
        """The loss scale, if there is one; with "auto" the counters."""
        slots: dict[str, Any] = {} if self.scaling is None else {"loss_scale": self.scaling.init()}
        if self.auto:
            num = len(tree.leaves(params))
            slots["precision"] = PrecisionState(*(torch.zeros(num, dtype=torch.int32) for _ in PrecisionState._fields))
        return slots

    def advance(self, slots: Mapping[str, Any], results: StepResults) -> tuple[dict[str, Any], dict[str, Any]]:
        after, metrics = dict[str, Any](), dict[str, Any]()
        if self.scaling is not None:
            before, overflow = slots["loss_scale"], results.overflow
            assert overflow is not None
            after["loss_scale"], at_minimum = self.scaling.update(before, overflow)
            metrics = {"loss_scale": before.scale.clone(), "skipped": overflow, "loss_scale_at_minimum": at_minimum}
        if self.auto:
            assert results.watched is not None
            safer = [path in self.safer for path in results.paths] if self.safer else ()
            after["precision"] = counted(slots["precision"], results.watched, results.statistics(), safer)
        if (empty := results.empty) is not None:  # gradients of an empty batch carry no information about precision
            after = tree.map(lambda old, new: torch.where(empty, old, new), {n: slots[n] for n in after}, after)
        return after, metrics

    def compute_dtype(self, leaf: Leaf) -> torch.dtype:
        return self._dtype(leaf, self.compute)

    def reduce_dtype(self, leaf: Leaf) -> torch.dtype:
        return self._dtype(leaf, self.reduce)

    def _dtype(self, leaf: Leaf, name: str) -> torch.dtype:
        if not self.selects(leaf):
            return leaf.dtype
        return torch.float32 if leaf.path in self.safer else DTYPES[name]

    @property
    def casts_in_blocks(self) -> bool:
        """Whether blocks cast their arguments to the dtype of their parameters."""
        return self.where is not None or self.auto

    def casts(self, leaf: Leaf) -> bool:
        """Whether a tensor is stored in another dtype than `compute`."""
        return self.selects(leaf) and DTYPES[self.compute] != leaf.dtype

    def resting_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which a parameter given as `leaf` is stored."""
        return DTYPES[self.params] if self.selects(leaf) else leaf.dtype

    def frozen_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which a parameter that is never updated is stored: the one it is computed in, if that is
        smaller."""
        # A frozen weight needs no fp32 master, because no update would be lost in rounding. But a promotion may need
        # all of its digits.
        if self.auto:
            return self.resting_dtype(leaf)
        return min(self.resting_dtype(leaf), self.compute_dtype(leaf), key=lambda dtype: dtype.itemsize)

    @property
    def output_dtype(self) -> torch.dtype | None:
        return None if self.outputs is None else DTYPES[self.outputs]

    def check_device(self, device: torch.device) -> None:
        """Raises if the device does not compute in one of the dtypes, and names them."""
        used = {"compute": self.compute, "params": self.params, "reduce": self.reduce}
        wrong = [f"{what}={dtype!r}" for what, dtype in used.items() if not computes_in(device, DTYPES[dtype])]
        if wrong:
            supported = ", ".join(repr(name) for name, dtype in DTYPES.items() if computes_in(device, dtype))
            kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            raise FzeroValueError(self.name, f"{kind} does not compute in these dtypes", wrong, f"it has {supported}")

    def shown(self) -> list[str]:
        """The arguments that differ from their defaults, as text."""
        shown = [f"compute={self.compute!r}", f"params={self.params!r}", f"reduce={self.reduce!r}"]
        if self.auto:
            shown.append("auto=True" + (f", safer={len(self.safer)} leaves" if self.safer else ""))
        if self.rounding is not None:
            shown.append(f"rounding={self.rounding!r}")
        if self.outputs != "fp32":
            shown.append(f"outputs={self.outputs!r}")
        if (scaling := self.scaling) is not None:
            plain = "'dynamic'" if scaling == LossScale() else f"{scaling.initial:g}"
            shown.append(f"loss_scale={plain if scaling.fixed or scaling == LossScale() else scaling}")
        if self.loss_scale_at_minimum != "warn":
            shown.append(f"loss_scale_at_minimum={self.loss_scale_at_minimum!r}")
        if self.where is not None:
            shown.append(f"where={getattr(self.where, '__name__', repr(self.where))}")
        if self.watch and not self.auto:
            shown.append("watch=True")
        return shown

    def __str__(self) -> str:
        return f"mixed_precision({', '.join(self.shown())})"


@keywords
def mixed_precision(
    step: Any = None,
    compute: str = "bf16",
    *,
    params: str = "fp32",
    reduce: str = "fp32",
    rounding: str | None = None,
    outputs: str | None = "fp32",
    loss_scale: str | float | LossScale | None = None,
    loss_scale_at_minimum: str = "warn",
    where: Where | None = None,
    watch: bool = False,
    start: str | None = None,
) -> Any:
    """Computes in `compute`, stores parameters in `params`, and reduces and accumulates gradients in `reduce`.

    The loss function is called with floating-point parameters and batch tensors cast to `compute`; gradients are cast
    back. Masters start from the given values, never from rounded ones. If something must be exact inside the function,
    the function must cast it (`logits.float()` before a cross entropy). Integer tensors are never cast.

    With `where`, a parameter that it rejects is treated as without this transform: it is stored, computed with and
    reduced in its own dtype. Exclude quantized weights whose integer codes are stored in a floating-point dtype:
    reading the bits of a converted parameter, by `leaf.view(torch.int16)`, is an error that names it. A block computes
    in the dtype of its parameters: if they all have one dtype, floating-point arguments in another dtype are cast to it
    at the entrance of the block. So a norm or a head whose parameters are rejected runs in full precision, and the
    block after it does not.

    With "fp16", gradients are those of the scaled loss, and are unscaled in float32 before the optimizer sees them. If
    one is not finite after all reductions, the step is skipped on every rank, whichever rank or micro-batch it came
    from. Parameters, optimizer state (including the schedules' count) and step count keep their bits, and the next step
    draws random numbers with the same key. The scale changes as `LossScale` describes; it is stored in
    `state.extras["loss_scale"]` and in checkpoints.

    With "auto", the step begins in `start`, is watched, and counts for each block how often it overflows, or how often
    more than half of its gradient, not counting zeros, underflows. Whenever a step is built, after a restore or for a
    batch of another shape, blocks that have reached their limit compute in fp32 from then on. The log and
    `plan.decisions` name them with the reason. Blocks cast their arguments as with `where`. Stored tensors and their
    tiers do not change; the counts are a part of the state, `state.extras["precision"]`, and of checkpoints.
    `train.resolved` is the step as it is built. Code outside blocks is left unchanged, and must itself cast what it
    multiplies: a promoted block returns fp32.

    Args:
        step: a step, or the compute dtype when called without one: `mixed_precision("bf16")`.
        compute: "bf16", "fp16", "fp32" or "auto". For all dtypes, PyTorch's names are accepted too: "bfloat16".
        params: the dtype in which parameters are stored. Optimizer state is float32.
        reduce: the dtype in which gradients are communicated and accumulated.
        rounding: how new parameters, computed in fp32, are rounded to `params="bf16"`: "stochastic" (the default there;
            see `optim.stochastic_round`) or "nearest", which loses updates smaller than 1/512 of a parameter. The
            random numbers are a function of the state's key, the step, and the element's index in the unsharded
            parameter: the same on every mesh and tier.
        outputs: the dtype of floating-point values that the user's function returns to the caller: the loss and `aux`
            in the metrics, and the results of an evaluation. None: as the function returns them; means in float32.
        loss_scale: "dynamic", the default if "fp16" is used to compute or reduce; a `LossScale`; or a number, a
            constant scale.
        loss_scale_at_minimum: what happens on an overflow when the scale cannot be lowered any more: "warn" once, and
            continue with the metric `loss_scale_at_minimum`; or "raise", in that step or, on a device that runs
            asynchronously to the host, in the next.
        where: predicate `(path, leaf)` that selects the parameters it applies to; by default all. `leaf` is a meta
            tensor.
        watch: whether the metrics contain statistics of each block. With "auto" they always do.
        start: the dtype that "auto" begins in: "bf16", "fp16", or by default bf16 if the device computes in it,
            otherwise fp16 with a loss scale.

    Metrics: with a loss scale, `loss_scale`: that of this step; `skipped`: whether the step was skipped;
        `loss_scale_at_minimum`. `finite` says whether loss and gradients are finite, as without it. If watched,
        `precision`: vectors, float32[num_blocks], whose entries are the blocks of `train.blocks`, in the order of the
        forward, and last the code outside blocks. `grad_norm` and `grad_max`: of the gradients of a block's parameters,
        unscaled; a parameter that several blocks read counts for the first one. `underflow`: the share of the elements
        of that gradient that are below the smallest normal number of the dtype it is computed in, including zeros; if
        the loss is scaled, of the scaled gradient. `zero`: the share of zeros. `output_max`: the largest absolute value
        of a block's outputs, over all ranks and micro-batches; for the code outside blocks, the loss. A nan counts as
        inf.
    Communication: `shard_params` gathers in `compute`: half the bytes of fp32. Gradients are reduced in `reduce`. An
        overflow is detected in the norm that is a metric anyway: nothing more is sent. Watched: 4 bytes per block,
        reduced in a separate transfer; if gradients are sharded, for each parameter 8 bytes together with those of the
        norm and 4 more in a separate transfer.
    Memory: with `params="bf16"` there are no masters, and 2 bytes per parameter are stored. Otherwise the masters are
        part of the optimizer's memory: with `shard_opt_state` and `shard_grads` they are stored sharded, and the
        unsharded copy in `compute` (2 bytes per parameter) exists only during the step. A loss scale: 28 bytes. The
        counts of "auto": 8 bytes per parameter tensor.

    Raises:
        FzeroValueError: an unknown dtype or rounding; a `start` without "auto", or one from which no block can be
            promoted; a rounding without parameters stored in bf16; a loss scale that is not above 0, or without fp16.
            From `compile`: a dtype that the device does not support, with the supported ones.
        TransformError: a different `mixed_precision` of the same step; when the program is built, a tied parameter of
            which `where` accepts one path and not another.
        TraceError: when the program is built, a converted parameter whose bits the function reads (`view(dtype)`).
        LossScaleError: from a step, with `loss_scale_at_minimum="raise"`.

    Paper: Micikevicius et al., Mixed precision training, ICLR 2018.

    Example:
        >>> import fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*mixed_precision("bf16")(step).transforms)
        mixed_precision(compute='bf16', params='fp32', reduce='fp32')
    """
    if isinstance(step, (str, torch.dtype)):
        step, compute = None, _short(step)
    compute, params, reduce, outputs, start = map(_short, (compute, params, reduce, outputs, start))
    auto = compute == "auto"
    if auto:
        compute = start or "auto"
    _check_dtypes(compute, params, reduce, outputs)
    if wrong := predicate("where", where):
        raise FzeroTypeError(
            "mixed_precision", "invalid arguments", wrong, "e.g. where=lambda path, leaf: leaf.ndim >= 2"
        )
    scaled = "fp16" in (compute, reduce) or compute == "auto"
    unscaled = _scale_problems(loss_scale, loss_scale_at_minimum, compute, reduce)
    checks = [
        (unscaled, "'dynamic', a number above 0, or fz.LossScale(...), with compute or reduce 'fp16'"),
        (_not_a_rounding(rounding, params), 'rounding="stochastic" or "nearest", with params="bf16"'),
        (_not_a_watch(watch, start, auto), 'watch=True, or fz.mixed_precision("auto", start="bf16") or "fp16"'),
    ]
    if problems := [problem for found, _ in checks for problem in found]:
        fixes = "; ".join(fix for found, fix in checks if found)
        raise FzeroValueError("mixed_precision", "invalid arguments", problems, fixes)
    if params == "bf16":
        rounding = rounding or "stochastic"
    scale = _scale_of(loss_scale) if scaled else None
    fields = (compute, params, reduce, rounding, outputs, scale, loss_scale_at_minimum, where, watch or auto)
    return applied(MixedPrecision(*fields, auto=auto), step)


def _scale_problems(loss_scale: Any, at_minimum: Any, compute: str, reduce: str) -> list[str]:
    """What is wrong with the loss scale, or with giving one."""
    problems = _not_a_scale(loss_scale)
    if at_minimum not in AT_MINIMUM:
        problems.insert(0, f"loss_scale_at_minimum={at_minimum!r}: not one of 'warn', 'raise'")
    if problems or "fp16" in (compute, reduce) or compute == "auto":
        return problems
    given = [("loss_scale", loss_scale, None), ("loss_scale_at_minimum", at_minimum, "warn")]
    none = f"neither compute={compute!r} nor reduce={reduce!r} needs one"
    return [f"{what}={x!r}: {none}" for what, x, default in given if x != default]


def _scale_of(given: str | float | LossScale | None) -> LossScale:
    if isinstance(given, LossScale):
        return given
    return LossScale() if given in (None, "dynamic") else fixed_scale(float(given))  # type: ignore[arg-type]


def _check_dtypes(compute: Any, params: Any, reduce: Any, outputs: Any) -> None:
    dtypes = {"compute": compute, "params": params, "reduce": reduce}
    dtypes |= {} if outputs is None else {"outputs": outputs}
    known = lambda what, value: value in list(DTYPES) or (what, value) == ("compute", "auto")  # noqa: E731
    if unknown := [f"{what}={value!r}" for what, value in dtypes.items() if not known(what, value)]:
        fix = f"one of {', '.join(map(repr, DTYPES))}; compute may be 'auto'; for 8 bits there is fz.fp8"
        raise FzeroValueError("mixed_precision", "unknown dtype", unknown, fix)


def _short(dtype: Any) -> Any:
    """The short name of a dtype; any other value is returned unchanged, and rejected later."""
    text = str(dtype) if isinstance(dtype, torch.dtype) else dtype
    return DTYPE_NAMES.get(text, text) if isinstance(text, str) else text


def _not_a_scale(value: Any) -> list[str]:
    if value is None or value == "dynamic" or isinstance(value, LossScale):
        return []
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return [f"loss_scale={value!r}: neither 'dynamic', nor a number, nor a LossScale"]
    return [] if 0 < value < math.inf else [f"loss_scale={value!r}: a scale is above 0 and finite"]


def _not_a_watch(watch: Any, start: str | None, auto: bool) -> list[str]:
    problems = flag("watch", watch)
    if start is not None and not auto:
        problems.append(
            f"start={start!r}: compute='auto' is the only option that starts in one dtype and may change to another"
        )
    if auto and start not in (None, "bf16", "fp16"):
        problems.append(f"start={start!r}: neither 'bf16' nor 'fp16', from which a block can be moved to fp32")
    return problems


def _not_a_rounding(value: str | None, params: str) -> list[str]:
    if value is None:
        return []
    problems = [] if value in ROUNDINGS else [f"rounding={value!r}: not one of {', '.join(map(repr, ROUNDINGS))}"]
    return problems if params == "bf16" else [*problems, f"params={params!r}: nothing is rounded to bf16"]


# --- statistics of blocks ---


@dataclass(frozen=True)
class Watched:
    """The watched blocks of a step.

    Attributes:
        names: the name of each block, as a user knows it: `layers.3`, or the name of the function.
        reads: for each block, the positions of the parameters that it reads.
        owner: for each parameter, the number of the block that it belongs to.
    """

    names: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]


def watched_blocks(name: str, params: Inputs, ops: Sequence[Instruction]) -> Watched:
    """Returns the watched blocks among the ops of a loss and its gradients. `name` is that of the code outside
    blocks."""
    position = {params.leaves[i].path: i for i in params.distinct}
    source = {op.out[0].name: op.args[0] for op in ops if op.op == "cast"}
    dotted = tree.names(params.rebuild({i: torch.empty(0, device="meta") for i in params.distinct}))
    names, reads = [], []
    for op in ops:
        if (block := op.block) is not None and block.part == "forward":
            joint, given = block.joint, block.inputs
            here = tuple(position[p] for p in (source.get(a, a) for a in given[: joint.num_params]) if p in position)
            names.append(_above([dotted[i] for i in here]) or joint.name)
            reads.append(here)
    owner: dict[int, int] = {}
    for number, here in enumerate(reads):
        for i in here:
            owner.setdefault(i, number)
    outside = tuple(i for i in params.distinct if i not in owner)
    return Watched(
        tuple(_numbered([*names, name])), (*reads, outside), tuple(owner.get(i, len(reads)) for i in params.ties)
    )


def gradient_statistics(
    watched: Watched, grads: Mapping[int, torch.Tensor], tiny: Mapping[int, float], scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Returns statistics of the gradients of each watched block, in float32.

    Args:
        watched: the n watched blocks.
        grads: by position of the parameter, its gradient in float32 or float64, unscaled.
        tiny: by position, the smallest normal number of the dtype that the gradient was computed in.
        scale: the scale of the loss, if there is one.

    Returns:
        grad_norm: float32[n], the norm of the gradients of a block's parameters, taken as one vector.
        grad_max: float32[n], the largest of their absolute values; inf if one is nan.
        underflow: float32[n], the share of their elements that are below `tiny` once scaled, zeros included.
        zero: float32[n], the share of zeros.
    """
    flat = [i for i in grads if grads[i].numel()]
    device = grads[flat[0]].device
    # bool[n, gradients]: whether a gradient belongs to a block
    own = torch.tensor(range(len(watched.names)), device=device)[:, None] == torch.tensor(
        [watched.owner[i] for i in flat], device=device
    )
    sizes = [sum(grads[i].numel() for i in flat if watched.owner[i] == number) for number in range(len(watched.names))]

    def vector(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x.to(torch.float32) for x in scalars])

    def of_blocks(values: torch.Tensor) -> torch.Tensor:
        return torch.where(own, values, 0.0)

    squares = of_blocks(vector([sum_of_squares(grads[i]) for i in flat])).sum(1)
    # The gradients are unscaled here, but they were computed scaled, so the limits are unscaled too.
    limits = {x: x if scale is None else x / scale for x in dict.fromkeys(tiny.values())}
    few = of_blocks(vector([(grads[i].abs() < limits[tiny[i]]).sum(dtype=torch.float32) for i in flat])).sum(1)
    zeros = of_blocks(vector([(grads[i] == 0).sum(dtype=torch.float32) for i in flat])).sum(1)
    largest = of_blocks(vector([torch.linalg.vector_norm(grads[i], math.inf) for i in flat])).amax(1)
    num = torch.tensor([float(max(n, 1)) for n in sizes], device=device)
    return {
        "grad_norm": squares.sqrt(),
        # not every collective propagates a nan among larger numbers
        "grad_max": torch.where(squares.isnan(), math.inf, largest),
        "underflow": few / num,
        "zero": zeros / num,
    }


def output_maxima(largest: torch.Tensor | None, loss: torch.Tensor) -> torch.Tensor:
    """Returns the largest absolute value among the outputs of each watched block, float32[n].

    For the code outside blocks it is the loss. It is inf if one is nan.

    Args:
        largest: that of each block, float32[n - 1]; None if there are none.
        loss: that of the whole batch, 0-dim.
    """
    value = loss.abs().to(torch.float32).reshape(1)
    value = torch.where(value.isnan(), math.inf, value)
    return value if largest is None else torch.cat([largest, value])


def _above(names: Sequence[str]) -> str:
    """Returns the longest common path of these parameters in their tree."""
    above = [name.split(".")[:-1] for name in names]
    same = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*above, strict=False))
    return ".".join(keys[0] for keys in same)


def _numbered(names: Sequence[str]) -> list[str]:
    """Returns the names, with a number appended to repeated ones: calls with the same parameters, or without any that
    distinguish them."""
    times: Counter[str] = Counter()
    out = []
    for name in names:
        times[name] += 1
        out.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return out


# --- "auto": promoting blocks ---


LIMIT = 256
"""A parameter whose counter reaches this number is computed in float32 from the next build on. The counter stays at
LIMIT until then, and is LIMIT + 1 afterwards."""
OVERFLOW = 8
"""An overflow adds this number to a counter, and each step without one subtracts 1. So the limit is reached by 32
overflows in a row, or by more than one in 9 steps for a long time. The overflows that a growing loss scale causes, one
in thousands of steps, never reach it."""
UNDERFLOW = 0.5
"""If more than this share of a block's gradient, not counting zeros, underflows, the step adds 1 to the counter of
underflows; any other step subtracts 1."""


class PrecisionState(NamedTuple):
    """The counters in a state."""

    overflows: torch.Tensor  # int32[number of parameters]
    underflows: torch.Tensor  # int32[number of parameters]


def counted(
    state: PrecisionState, watched: Watched, statistics: Mapping[str, torch.Tensor], safer: Sequence[bool] = ()
) -> PrecisionState:
    """Returns the counters after a step.

    An overflow counts only for the block where it begins: the first block of the forward whose output is not finite. If
    every output is finite, it is the last block whose gradient is not finite, because the backward propagates it to all
    earlier blocks. Code outside blocks comes last, and has no counters.

    Args:
        state: the counters before the step.
        watched: the n watched blocks.
        statistics: the statistics of this step, float32[n] each.
        safer: for each parameter, whether it is computed in float32 already; empty if none is.
    """
    num, device = len(watched.names), state.overflows.device
    number = torch.tensor(range(num), device=device)
    outputs = torch.logical_not(torch.isfinite(statistics["output_max"]))
    grads = torch.logical_and(torch.logical_not(torch.isfinite(statistics["grad_norm"])), number < num - 1)
    # If an output is not finite, `last` is -1. If all outputs are finite, the minimum below is `num`. So at most one
    # block counts.
    last = torch.where(outputs.any(), -1, torch.where(grads, number, -1).amax())
    begins = torch.logical_or(number == torch.where(outputs, number, num).amin(), number == last)
    zero = statistics["zero"]
    # The share among the elements that are not zero is (underflow - zero) / (1 - zero); this form does not divide by 0
    # if all elements are zero.
    lost = statistics["underflow"] - zero > UNDERFLOW * (1.0 - zero)
    of_block, of_param = _families(watched)
    own = torch.tensor(of_param, device=device)[:, None] == torch.tensor(of_block, device=device)

    def moved(count: torch.Tensor, hit: torch.Tensor, rise: int) -> torch.Tensor:
        here = torch.logical_and(own, hit).any(1).to(torch.int32)
        # Adds `rise` to the counters that are hit, and subtracts 1 from the others. A counter at the limit stays there.
        new = torch.where(count >= LIMIT, count, (count + here * (rise + 1) - 1).clamp(0, LIMIT))
        if not safer:
            return new
        return torch.where(torch.logical_and(torch.tensor(safer, device=device), new >= LIMIT), LIMIT + 1, new)

    return PrecisionState(moved(state.overflows, begins, OVERFLOW), moved(state.underflows, lost, 1))


def _families(watched: Watched) -> tuple[list[int], list[int]]:
    """Returns a group number for each block and for each parameter.

    Blocks that share parameters, directly or through other blocks, have the same number. It is -1 for code outside
    blocks, and -2 for a parameter that no block reads.
    """
    family = list(range(len(watched.names) - 1))
    first: dict[int, int] = {}  # a parameter -> the first block that takes it
    for number, reads in enumerate(watched.reads[:-1]):
        for other in {family[first.setdefault(i, number)] for i in reads}:
            family = [family[number] if f == other else f for f in family]
    return [*family, -1], [family[n] if n < len(family) else -2 for n in watched.owner]


Decision = tuple[str, str, str]
"""What is decided, the choice, and the reason: the fields of a `PlanDecision`."""


class Promotion:
    """Promotes parameters according to the counters of a state.

    A restored state's counters are evaluated before its layouts are chosen, and the current state's before a program is
    built. A state without counters, or a step without "auto", is left unchanged. All methods must be called on all
    ranks of the mesh together.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._counts: PrecisionState | None = None  # those that the last promotion followed
        self._moved: tuple[Decision, ...] = ()  # the blocks that have been promoted

    def resolved(self, step: Step, leaves: Sequence[Leaf], counts: PrecisionState) -> Step:
        """Returns the step in which every parameter whose counter has reached its limit is computed in float32.

        All ranks use the counters of the first rank.

        Args:
            step: if it has no `mixed_precision("auto")`, it is returned unchanged.
            leaves: the parameters.
            counts: the counters of the state.

        Communication: a few bytes between the ranks.
        """
        record = find(step.transforms, MixedPrecision)
        if record is None or not record.auto:
            return step
        highest = [max(pair) for pair in zip(*(x.tolist() for x in counts), strict=True)]
        mine = [x.path for x, count in zip(leaves, highest, strict=True) if count >= LIMIT and record.selects(x)]
        safer = tuple(control_group.broadcast_from_rank0(self._mesh.control, "mixed_precision", lambda: mine))
        return replace(step, transforms=tuple(replace(t, safer=safer) if t is record else t for t in step.transforms))

    def before_build(
        self, step: Step, leaves: Sequence[Leaf], extras: Mapping[str, Any], layout_of: Callable[[Step], Any]
    ) -> Step:
        """Returns the step, resolved with the counters in a state's `extras`.

        If the resolved step would store other tensors than the state has (`layout_of`), the step stays unchanged, and
        the next restore resolves it.
        """
        if (counts := extras.get("precision")) is None:
            return step
        found = self.resolved(step, leaves, counts)
        if layout_of(found) != layout_of(step):
            return step
        self._counts = counts
        record = find(found.transforms, MixedPrecision)
        newly_promoted = any(bool((x == LIMIT).any()) for x in counts)
        if record is not None and record.scaling is not None and newly_promoted:
            # The overflows of these blocks have lowered the loss scale, so it starts again.
            scale = extras["loss_scale"]
            for old, new in zip(scale, record.scaling.init()._replace(skipped=scale.skipped), strict=True):
                old.copy_(new)
        return found

    def explained(self, step: Step, leaves: Sequence[Leaf], watched: Watched | None) -> tuple[Decision, ...]:
        """Returns the promoted blocks of a resolved step, with the reasons. The first rank logs changes."""
        if self._counts is None or watched is None:
            return ()
        moved = _decisions(step, leaves, watched, self._counts)
        if moved and moved != self._moved and self._mesh.rank == 0:
            problems = [f"{what.removeprefix('mixed_precision: ')}: {why}" for what, _, why in moved]
            fix = "nothing to do; mixed_precision(where=...) sets it from the start"
            logger.warning(message("mixed_precision", "these blocks compute in fp32 from here on", problems, fix))
        self._moved = moved
        return moved


def _decisions(step: Step, leaves: Sequence[Leaf], watched: Watched, counts: PrecisionState) -> tuple[Decision, ...]:
    """Returns, for each block with promoted parameters, the decision and the counters that caused it."""
    record = find(step.transforms, MixedPrecision)
    safer = () if record is None else record.safer
    held = {name: x.tolist() for name, x in counts._asdict().items()}
    out = []
    for name, reads in zip(watched.names[:-1], watched.reads[:-1], strict=True):
        if moved := [i for i in reads if leaves[i].path in safer]:
            numbers = {kind: max(x[i] for i in moved) for kind, x in held.items()}
            why = [f"it {kind}: {min(n, LIMIT)} of {LIMIT} counts" for kind, n in numbers.items() if n >= LIMIT]
            out.append((f"mixed_precision: {name}", "fp32", "; ".join(why)))
    return tuple(out)
