"""Computes in one dtype, and stores masters and reduces gradients in another. Acts on the functions, before the trace.

The loss function gets parameters and batch in the compute dtype; stored parameters, and those that the optimizer sees,
have the dtype `params`. A sharded parameter is cast on its shard and gathered in the compute dtype: half the bytes.
With float16 the loss is scaled, and its scale is a part of the state (fzero/optim/loss_scale.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fzero import tree
from fzero._utils.arguments import accepts, flag, keywords, predicate
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.optim.loss_scale import LossScale, fixed_scale
from fzero.sharding.layout import Leaf
from fzero.trace.device_decompositions import computes_in
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Where

if TYPE_CHECKING:
    from fzero.transforms.transform_state import StepResults

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
    """The configuration of `mixed_precision`."""

    compute: str = "bf16"
    params: str = "fp32"
    reduce: str = "fp32"
    rounding: str | None = None
    outputs: str | None = "fp32"
    loss_scale: LossScale | None = None
    loss_scale_at_minimum: str = "warn"
    where: Where | None = None
    watch: bool = False
    exact: Callable[[str, str], bool] | None = (
        None  # `(path, compute)` -> whether the step's function needs this parameter uncast
    )
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

    def slots(self, params: Any) -> dict[str, Any]:
        """The loss scale, if there is one."""
        return {} if self.scaling is None else {"loss_scale": self.scaling.init()}

    def advance(self, slots: Mapping[str, Any], results: StepResults) -> tuple[dict[str, Any], dict[str, Any]]:
        after, metrics = self.advanced(slots, results)
        if (empty := results.empty) is not None:  # gradients of an empty batch carry no information about the scale
            after = tree.map(lambda old, new: torch.where(empty, old, new), {n: slots[n] for n in after}, after)
        return after, metrics

    def advanced(self, slots: Mapping[str, Any], results: StepResults) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the slots and metrics after a step whose batch is not empty."""
        after, metrics = dict[str, Any](), dict[str, Any]()
        if self.scaling is not None:
            before, overflow = slots["loss_scale"], results.overflow
            assert overflow is not None
            after["loss_scale"], at_minimum = self.scaling.update(before, overflow)
            metrics = {"loss_scale": before.scale.clone(), "skipped": overflow, "loss_scale_at_minimum": at_minimum}
        return after, metrics

    def compute_dtype(self, leaf: Leaf) -> torch.dtype:
        return DTYPES[self.compute] if self.selects(leaf) else leaf.dtype

    def reduce_dtype(self, leaf: Leaf) -> torch.dtype:
        return DTYPES[self.reduce] if self.selects(leaf) else leaf.dtype

    @property
    def casts_in_blocks(self) -> bool:
        """Whether blocks cast their arguments to the dtype of their parameters."""
        return self.where is not None

    def casts(self, leaf: Leaf) -> bool:
        """Whether a tensor is stored in another dtype than `compute`."""
        return self.selects(leaf) and DTYPES[self.compute] != leaf.dtype

    def resting_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which a parameter given as `leaf` is stored."""
        return DTYPES[self.params] if self.selects(leaf) else leaf.dtype

    def frozen_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which a parameter that is never updated is stored: the one it is computed in, if that is
        smaller."""
        # A frozen weight needs no fp32 master, because no update would be lost in rounding.
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
        if self.watch:
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
    from fzero.transforms.automatic_precision import AutomaticPrecision  # it extends MixedPrecision

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
    kind = AutomaticPrecision if auto else MixedPrecision
    fields = (compute, params, reduce, rounding, outputs, scale, loss_scale_at_minimum, where, watch or auto)
    return applied(kind(*fields), step)


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
