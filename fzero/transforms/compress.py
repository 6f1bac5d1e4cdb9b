"""Sends gradients and parameters in fewer bits. Acts on the program, in transforms/compress_pass.py.

The encodings are defined in transforms/compress_codes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from fzero._utils.arguments import accepts, keywords, predicate, shown
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ops.block_quantization import has_blocks
from fzero.sharding.layout import Leaf
from fzero.step import EvalStep
from fzero.transforms.compress_codes import GRADS, PARAMS, Format
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Where

Named = str | tuple[tuple[str, str | None], ...] | None
"""The name of a format, or a format for each of several axes."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AUTO = "auto"


class AxisFormats(NamedTuple):
    """The names of the formats that parameters and gradients have on one axis; None: they are sent uncompressed."""

    axis: str
    params: str | None = None
    grads: str | None = None

    def __str__(self) -> str:
        said = {"parameters": self.params, "gradients": self.grads}
        return ", ".join(f"{what} {name}" for what, name in said.items() if name) or "as it is"


Formats = tuple[AxisFormats, ...]
SLOT = "compress"
_ROOM = 1024  # bytes of the slot


@dataclass(frozen=True)
class Compress(Transform):
    """The configuration of `compress`. If `auto`, the plan chooses the formats; `params` or `grads` is then None if
    parameters or gradients are to stay uncompressed."""

    params: Named = "int8"
    grads: Named = "int8"
    axis: str | None = None
    where: Where | None = None
    auto: bool = False
    order: ClassVar[int] = 65
    name: ClassVar[str] = "compress"

    def chosen(self, formats: Iterable[AxisFormats]) -> Compress:
        """Returns this "auto" configuration with the formats that were chosen for it."""
        params, grads = (tuple((x.axis, getattr(x, of)) for x in formats) for of in ("params", "grads"))
        return replace(self, params=params, grads=grads, axis=None, auto=False)

    def slots(self, params: Any) -> Mapping[str, Any]:
        """The chosen formats, stored as text (runtime/compress_formats.py)."""
        return {SLOT: torch.zeros(_ROOM, dtype=torch.uint8)} if self.auto else {}

    def idle_in(self, program: Any) -> str | None:
        return "formats are read and written between steps"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the configuration names."""
        named = [axis for of in (self.params, self.grads) if isinstance(of, tuple) for axis, _ in of]
        return tuple(dict.fromkeys([*named, *([] if self.axis is None else [self.axis])]))

    def of_params(self, axis: str) -> Format | None:
        """The format of parameters on an axis; None if they are sent uncompressed."""
        name = self._named(self.params, axis)
        return None if name is None else PARAMS[name]

    def of_grads(self, axis: str) -> Format | None:
        """The format of gradients on an axis; None if they are sent uncompressed."""
        name = self._named(self.grads, axis)
        return None if name is None else GRADS[name]

    def _named(self, of: Named, axis: str) -> str | None:
        if isinstance(of, tuple):
            return dict(of).get(axis)
        return of if self.axis in (None, axis) else None

    @property
    def roundings(self) -> tuple[float, float]:
        """The largest rounding errors of parameters and of gradients, relative to the largest element of a block.

        Each is half a quantization step of the coarsest format.
        """
        # "auto" may choose any format, so its rounding is that of the coarsest one.
        grads = "int4" if self.auto and self.grads else self.grads
        return _rounding(self.params), _rounding(grads)

    def refuses(self, leaf: Leaf) -> str | None:
        """Returns the reason why a tensor is sent uncompressed, or None if it is compressed."""
        if leaf.dtype not in _DTYPES:
            return "codes are of floats of 32 or 16 bits"
        if not has_blocks(leaf.shape):
            return "fewer than 4,096 elements" if leaf.shape[-1:] != (1,) else "its last dim is 1"
        return None if accepts(self.name, "where", self.where, leaf.path, leaf.meta) else "not selected by `where`"

    def encodes(self, leaf: Leaf) -> bool:
        """Whether a parameter may be sent encoded."""
        return leaf.role == "params" and self.params is not None and self.refuses(leaf) is None

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Pipeline):
            return "pipeline stages split transfers by value, and several values are encoded together"
        return super().conflict(other)

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation reduces no gradient" if self.params is None else None

    def placed(self, op: Any) -> bool:
        return True

    def __str__(self) -> str:
        said = {n: getattr(self, n) for n in ("params", "grads")}
        # With "auto", the other two are the defaults of the call and say nothing.
        said = {n: x for n, x in said.items() if x is None} if self.auto else said
        given = [f"{n}={dict(x) if isinstance(x, tuple) else x!r}" for n, x in said.items()]
        given += [] if self.axis is None else [f"axis={self.axis!r}"]
        given += [] if self.where is None else [f"where={getattr(self.where, '__name__', repr(self.where))}"]
        return f"{self.name}({', '.join([repr(AUTO)] * self.auto + given)})"


@keywords
def compress(
    step: Any = None,
    formats: str | None = None,
    *,
    params: str | Mapping[str, str | None] | None = "int8",
    grads: str | Mapping[str, str | None] | None = "int8",
    axis: str | None = None,
    where: Where | None = None,
) -> Any:
    """Sends parameters and gradients in fewer bits.

    A tensor with at least 4,096 elements is sent in blocks of 256: a code for each element, and one scale for the
    block. Smaller tensors are sent unchanged, in the same transfer. The result does not equal that of the step without
    `compress`, but is close to it (docs/transforms/compress.md): parameters are rounded once per step, masters never,
    and gradients once per transfer.

    Parameters are encoded once per step, from their stored values, before the micro-batches. Every rank computes with
    the decoded codes, including the rank that owns the shard. With ZeRO-1 and 2, parameters are stored sharded, as with
    `mixed_precision`, and their codes are gathered. Codes of gradients are exchanged by an all_to_all, decoded and
    added up in float32, in the order of the ranks. With `data_parallel`, or over `replica`, the sum is encoded again
    and gathered, so that all ranks have the same bits. Values that are not finite stay not finite, block by block.

    `compress("auto")` chooses formats once, before the first step, for one axis after the other: the least compression
    whose planned step time is within 1 % of the fastest. From less to more compression: gradients "bf16", gradients
    "int8", then parameters "int8", then gradients "int4". "int4" is only tried on an axis over which sums that another
    axis has already reduced are sent: on the first axis it costs about 1 % of the loss. If a memory budget leaves no
    room for that choice, the least compression with which the step fits is used. `plan.decisions` lists the planned
    seconds of each alternative. All ranks make the same choice, from the transfer rates of the first rank. The state
    records the formats, so that a resumed run keeps them; if an axis had only one rank before, its formats are chosen
    on resuming. An evaluation gathers parameters uncompressed.

    Args:
        step: a step, or "auto" when called without one; without a step a transform is returned.
        formats: "auto"; or None to use `params` and `grads`.
        params: "int8", or None for no compression. Or a mapping from axes to one of these; axes that it does not name
            have None. With "auto", None leaves parameters uncompressed.
        grads: "int8", or "int4" for a slow axis, both with square-root quantization steps; "bf16", which is summed in
            float32; or None. Or a mapping: `{"data": "int8", "node": "int4"}`. With "auto", None leaves gradients
            uncompressed.
        axis: the only axis over which encoded values are sent; by default all axes that shard parameters or the batch.
            Cannot be combined with a mapping.
        where: predicate `(path, leaf)` that selects the parameters that are sent encoded, with their gradients; by
            default all.

    Communication: (N-1)/N x 1.008 bytes per element for "int8", 0.508 for "int4" and 2 for "bf16", sent per rank and
        transfer, for N ranks, instead of 4 or 2. An all_reduce becomes two transfers.
    Memory: the codes of this rank's shards, P/N bytes for P parameters, during the step. With ZeRO-1 and 2 in fp32,
        the masters take 4P/N, and unsharded parameters exist only during the step.

    Raises:
        FzeroTypeError: an axis or a format is not a name.
        FzeroValueError: an unknown format; nothing to compress; a mapping together with `axis`; formats together with
            "auto". When the program is built: an axis is missing, or has several ranks but nothing is sent encoded over
            it; "auto" on ranks whose links have not been measured (`fzero calibrate`).
        TransformError: another `compress`; a `pipeline`; an evaluation when parameters are not encoded.
        TraceError: when the program is built, the function reads the bits (`view(dtype)`) of a parameter that is sent
            encoded, as it does for integer codes stored in a floating-point dtype: exclude the parameter with `where`.

    Papers: Wang et al., ZeRO++: extremely efficient collective communication for giant model training, 2023. Dettmers
        et al., 8-bit optimizers via block-wise quantization, ICLR 2022.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(compress(fz.shard_params(step)), fz.AbstractMesh(data=4), params, batch)
        >>> [op.op for op in lowered.program.instructions if op.op.endswith("start")]
        ['all_gather_start', 'all_reduce_start', 'all_to_all_start', 'all_reduce_start']
    """
    problems = []
    if isinstance(step, str):
        problems += [] if formats is None else [f"{step!r}, {formats!r}: give one of the two"]
        step, formats = None, step
    spec, wrong = _checked(params, grads, axis, where)
    wrong += [] if formats is None or isinstance(formats, str) else [f"formats={shown(formats)}: 'auto' or None"]
    if wrong:
        raise FzeroTypeError("compress", "invalid arguments", wrong, "e.g. fz.compress(params='int8', grads='int8')")
    problems += _unknown("params", spec.params, PARAMS) + _unknown("grads", spec.grads, GRADS)
    if formats is not None:
        spec = replace(spec, auto=True)
        problems += [f"{formats!r}: the only string is 'auto'; formats are params= and grads="] * (formats != AUTO)
        problems += [
            f"{n}={shown(x)}: 'auto' chooses formats; None leaves {n} unchanged"
            for n, x in (("params", params), ("grads", grads))
            if x not in (None, "int8")
        ]
    if isinstance(params, Mapping) or isinstance(grads, Mapping):
        problems += [] if axis is None else [f"axis={axis!r}: the mapping already names the axes"]
    if not problems and not any(_names(of) for of in (spec.params, spec.grads)):
        problems = ["params and grads are None: nothing is sent encoded"]
    if problems:
        fix = "params='int8' or None; grads='int8', 'int4', 'bf16' or None; each also by axis: {'node': 'int4'}"
        raise FzeroValueError("compress", "invalid arguments", problems, fix)
    return applied(spec, step)


def _checked(params: Any, grads: Any, axis: Any, where: Any) -> tuple[Compress, list[str]]:
    """Returns the configuration, and descriptions of the arguments that have a wrong type."""
    problems = [] if axis is None or (isinstance(axis, str) and axis) else [f"axis={axis!r}: the name of one axis"]
    formats = dict[str, Named]()
    for name, given in (("params", params), ("grads", grads)):
        by_axis = tuple(given.items()) if isinstance(given, Mapping) else ((None, given),)
        wrong = [x for x in by_axis if not (x[1] is None or isinstance(x[1], str))]
        wrong += [x for x in by_axis if isinstance(given, Mapping) and not (isinstance(x[0], str) and x[0])]
        problems += [f"{name}={given!r}: a format, None, or a mapping of axes to them"] if wrong else []
        formats[name] = by_axis if isinstance(given, Mapping) else given
    return Compress(formats["params"], formats["grads"], axis, where), problems + predicate("where", where)


def _names(of: Named) -> list[str]:
    """The names of the formats, without None."""
    return [name for name in (dict(of).values() if isinstance(of, tuple) else [of]) if name is not None]


def _rounding(of: Named) -> float:
    return max((0.5 / (GRADS | PARAMS)[name].top if name != "bf16" else 2**-8 for name in _names(of)), default=0.0)


def _unknown(argument: str, of: Named, known: Mapping[str, Format]) -> list[str]:
    return [f"{argument}: {name!r} is not one of {', '.join(known)}" for name in _names(of) if name not in known]
