"""Sends gradients and parameters in fewer bits. Acts on the program, in transforms/compress_pass.py; the codes are
those of transforms/compress_codes.py."""

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
"""The name of a format, or one for each of several axes."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AUTO = "auto"


class AxisFormats(NamedTuple):
    """The formats of parameters and gradients over an axis, by name; None: as they are."""

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
    """`auto`: formats are chosen by the plan; `params` and `grads` are then None where nothing is to be chosen."""

    params: Named = "int8"
    grads: Named = "int8"
    axis: str | None = None
    where: Where | None = None
    auto: bool = False
    order: ClassVar[int] = 65
    name: ClassVar[str] = "compress"

    def chosen(self, formats: Iterable[AxisFormats]) -> Compress:
        """An "auto" with these formats."""
        params, grads = (tuple((x.axis, getattr(x, of)) for x in formats) for of in ("params", "grads"))
        return replace(self, params=params, grads=grads, axis=None, auto=False)

    def slots(self, params: Any) -> Mapping[str, Any]:
        """The formats that were chosen, as text (runtime/compress_formats.py)."""
        return {SLOT: torch.zeros(_ROOM, dtype=torch.uint8)} if self.auto else {}

    def idle_in(self, program: Any) -> str | None:
        return "formats are read and written between steps"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it names."""
        named = [axis for of in (self.params, self.grads) if isinstance(of, tuple) for axis, _ in of]
        return tuple(dict.fromkeys([*named, *([] if self.axis is None else [self.axis])]))

    def of_params(self, axis: str) -> Format | None:
        """The format of parameters over an axis; None where they travel as they are."""
        name = self._named(self.params, axis)
        return None if name is None else PARAMS[name]

    def of_grads(self, axis: str) -> Format | None:
        """The format of gradients over an axis."""
        name = self._named(self.grads, axis)
        return None if name is None else GRADS[name]

    def _named(self, of: Named, axis: str) -> str | None:
        if isinstance(of, tuple):
            return dict(of).get(axis)
        return of if self.axis in (None, axis) else None

    @property
    def roundings(self) -> tuple[float, float]:
        """Half a step of the coarsest format of parameters and of gradients, relative to the largest element of a
        block."""
        grads = "int4" if self.auto and self.grads else self.grads
        return _rounding(self.params), _rounding(grads)

    def refuses(self, leaf: Leaf) -> str | None:
        """Why a leaf travels as it is, or None."""
        if leaf.dtype not in _DTYPES:
            return "codes are of floats of 32 or 16 bits"
        if not has_blocks(leaf.shape):
            return "fewer than 4,096 elements" if leaf.shape[-1:] != (1,) else "its last dim is 1"
        return None if accepts(self.name, "where", self.where, leaf.path, leaf.meta) else "left out by `where`"

    def encodes(self, leaf: Leaf) -> bool:
        """Whether a parameter may travel in codes."""
        return leaf.role == "params" and self.params is not None and self.refuses(leaf) is None

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Pipeline):
            return "stages divide transfers value by value, and codes are made of several at once"
        return super().conflict(other)

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation reduces no gradient" if self.params is None else None

    def placed(self, line: Any) -> bool:
        return True

    def __str__(self) -> str:
        said = {n: getattr(self, n) for n in ("params", "grads")}
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

    A leaf of 4,096 elements and more travels in blocks of 256: a code for each element, and the block's scale. Smaller
    leaves travel as they are, in the same transfer. Not equal to the step without it, but near it
    (docs/transforms/compress.md): parameters are rounded once a step, and masters never; gradients once a transfer.

    Parameters are encoded once a step, of what rests, before micro-batches. Every rank computes with the decoded codes,
    the owner too. Of ZeRO-1 and 2 parameters rest sharded, as with `mixed_precision`, and are gathered in codes.
    Gradients are dealt in codes by an all_to_all, decoded and added up in float32, in the order of the ranks. Under
    `data_parallel`, or over `replica`, the sum is encoded again and gathered, so all ranks have the same bits. What is
    not finite stays so, block by block.

    `compress("auto")` chooses formats once, before the first step, for one axis after the other: the least compression
    whose planned step takes within 1 % of the fastest. From less to more: gradients "bf16", "int8", then parameters
    "int8", then gradients "int4". "int4" is only tried on an axis over which the sums of another axis travel: on the
    first one it costs about 1 % of the loss. If a memory budget leaves no room for that, it is the least compression
    with which the step fits. `plan.decisions` has the planned seconds of each alternative. All ranks
    choose alike, by the rates of the first. The state records the formats, so a run that is resumed keeps them; an axis
    that had one rank before is decided then. An evaluation gathers parameters as they are.

    Args:
        step: a step, or "auto" when called without one; without a step a transform is returned.
        formats: "auto"; None: as `params` and `grads` say.
        params: "int8"; None: as without it. Or a mapping of axes to one of these; other axes have None. With "auto"
            None leaves parameters as they are.
        grads: "int8", or "int4" for a slow axis, both with steps of the square root; "bf16", whose sum is float32;
            None. Or a mapping: `{"data": "int8", "node": "int4"}`. With "auto" None leaves gradients as they are.
        axis: the one axis over which values travel in codes, by default all that shard or divide the batch. Not beside
            a mapping.
        where: predicate `(path, leaf)` of the parameters that travel in codes, with their gradients; by default all.

    Communication: (N-1)/N x 1.008 bytes an element for "int8", 0.508 for "int4" and 2 for "bf16", sent per rank and
        transfer, where it was 4 or 2. An all_reduce becomes two transfers.
    Memory: the codes of this rank's shards, P/N bytes, during the step; of ZeRO-1 and 2 in fp32 the masters, 4P/N, and
        whole parameters during the step alone.

    Raises:
        FzeroTypeError: an axis, or a format, that is not a name.
        FzeroValueError: an unknown format; nothing to compress; a mapping beside `axis`; formats beside "auto". When
            the program is built: an axis that is missing, or has several ranks and nothing that travels in codes;
            "auto" on ranks whose links were not measured (`fzero calibrate`).
        TransformError: another `compress`; a `pipeline`; an evaluation without codes of parameters.
        TraceError: when the program is built, a parameter that travels in codes and whose bits the function reads
            (`view(dtype)`), as it reads integer codes stored in a floating-point dtype: leave it out by `where`.

    Papers: Wang et al., ZeRO++: extremely efficient collective communication for giant model training, 2023. Dettmers
        et al., 8-bit optimizers via block-wise quantization, ICLR 2022.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(compress(fz.shard_params(step)), fz.AbstractMesh(data=4), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start")]
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
        problems += [f"{formats!r}: the only word is 'auto'; formats are params= and grads="] * (formats != AUTO)
        problems += [
            f"{n}={shown(x)}: 'auto' chooses formats; None leaves {n} as they are"
            for n, x in (("params", params), ("grads", grads))
            if x not in (None, "int8")
        ]
    if isinstance(params, Mapping) or isinstance(grads, Mapping):
        problems += [] if axis is None else [f"axis={axis!r}: the mapping says over which axes"]
    if not problems and not any(_names(of) for of in (spec.params, spec.grads)):
        problems = ["params and grads are None: nothing travels in codes"]
    if problems:
        fix = "params='int8' or None; grads='int8', 'int4', 'bf16' or None; each also by axis: {'node': 'int4'}"
        raise FzeroValueError("compress", "invalid arguments", problems, fix)
    return applied(spec, step)


def _checked(params: Any, grads: Any, axis: Any, where: Any) -> tuple[Compress, list[str]]:
    """The spec, and what is of a wrong kind."""
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
    """The names of the formats."""
    return [name for name in (dict(of).values() if isinstance(of, tuple) else [of]) if name is not None]


def _rounding(of: Named) -> float:
    return max((0.5 / (GRADS | PARAMS)[name].top if name != "bf16" else 2**-8 for name in _names(of)), default=0.0)


def _unknown(argument: str, of: Named, known: Mapping[str, Format]) -> list[str]:
    return [f"{argument}: {name!r} is not one of {', '.join(known)}" for name in _names(of) if name not in known]
