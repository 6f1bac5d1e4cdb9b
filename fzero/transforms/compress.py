"""Sends gradients and parameters in fewer bits. Acts on the program.

The file has three parts: the configuration; the codec, plain functions of tensors that are traced into the subgraphs
`encode`, `decode` and so on; and the rewrite of the transfers that transforms/zero_pass.py has inserted, one at a time:

    w_codes = encode(params['w'])                 # once per step, before all ops that read it, from the stored value
    w = decode(all_gather(w_codes))

    codes = encode_grads(d_w, ...)                # all gradients of a block: the parts for all ranks, concatenated
    d_w_shard, ... = decode_sum(all_to_all(codes))

If the sum is needed unsharded, it is encoded again (`recode`) and gathered, and every rank decodes the same bits. Codes
of parameters are sharded like the parameter, and are gathered over several axes as the parameter would be; codes of
gradients differ on every rank.

[Note: codes] A value is sent in blocks of 256 elements. The row of a block holds a code of 8 or 4 bits for each
element, followed by the block's scale: its largest magnitude, as a bfloat16 that is rounded up. A row has 258 or 130
bytes, 1.008 or 0.508 per element. Codes of parameters have equal quantization steps. Codes of gradients have
square-root steps (the code is proportional to the square root of the magnitude): an optimizer that divides by an
element's own magnitude loses the whole update of an element that is rounded to 0. A block that contains a value that is
not finite decodes to NaN throughout, so that the step is skipped, or fails, as it would without compression. With 4
bits, a byte holds one code of the first half of the block and one of the second half, so that no operation crosses
lanes.

A row depends only on the elements of its block, so the rows of a parameter are the same on every mesh ([Note: blocks]
in fzero/sharding/layout.py). Sums are computed in float32, in the order of the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from fzero._compat import compat
from fzero._utils.arguments import accepts, keywords, predicate, shown
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.attributes import Over, ScatterAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.ops import STARTS
from fzero.ir.program import Instruction, Program, Value, moving
from fzero.ir.value_names import Names
from fzero.ops.block_quantization import BLOCK, has_blocks
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import MeshPlacement, Shard, flat_shard, varying
from fzero.step import EvalStep
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.transform import Transform, applied, find
from fzero.transforms.zero import Where, Zero

_SCALE = 2  # bytes of the scale of a block


class Format(NamedTuple):
    """An encoding: the bits per element, and whether quantization steps are square-root steps. 16 bits means bfloat16,
    without blocks."""

    bits: int
    root: bool = False

    @property
    def top(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    @property
    def row(self) -> int:
        """The bytes of one block, including its scale."""
        return BLOCK * self.bits // 8 + _SCALE


PARAMS = {"int8": Format(8)}
GRADS = {"int8": Format(8, root=True), "int4": Format(4, root=True), "bf16": Format(16)}

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


# --- the codec: functions of tensors, which `traced` records as subgraphs ---


# the largest finite bfloat16 and the value after it (infinity), as bits of a float32
_MOST, _INFINITY = 0x7F7F0000, 0x7F800000
_RUN = 32  # ranks whose parts are added one by one; of more ranks, each run of this length is summed first


class Wire(NamedTuple):
    """The form in which a value is sent: its format (None: unchanged), and the number of elements and the dtype of each
    rank's part."""

    format: Format | None
    numel: int
    dtype: torch.dtype

    @property
    def coded(self) -> bool:
        """Whether the value is sent as rows of encoded blocks."""
        return self.format is not None and self.format.bits < 16

    @property
    def sent(self) -> int:
        """The number of elements that each part has in the transfer (bytes, if it is encoded)."""
        return self.numel if self.format is None or not self.coded else self.numel // BLOCK * self.format.row

    @property
    def sent_dtype(self) -> torch.dtype:
        if self.format is None:
            return self.dtype
        return torch.uint8 if self.coded else torch.bfloat16


class Form(NamedTuple):
    """The shape and dtype of an argument or a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def rows_of(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Encodes float32[blocks, BLOCK] as uint8[blocks, row]."""
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.abs() < math.inf  # and no NaN
    # Rounds up to bfloat16, in the bits of a float32. Magnitudes that are not finite are excluded first, because adding
    # to the bits of a NaN could overflow.
    up = ((torch.where(finite, largest, 0.0).view(torch.int32) + 0xFFFF) & -0x10000).clamp(max=_MOST)
    # The scale of a block that is not finite is stored as infinity, and all its elements as 0
    # (`share` below): they decode to 0 * infinity = NaN.
    words = torch.where(finite, up, _INFINITY)
    scale = up.view(torch.float32)
    share = torch.where(finite & (scale > 0), x / scale, 0.0)
    if form.root:
        share = share.abs().sqrt() * share.sign()
    share = (share * form.top).round().clamp(-form.top, form.top)
    # A code is stored with an offset of top + 1, as 1 to 255 or, with 4 bits, 1 to 15.
    codes = (share + (form.top + 1)).to(torch.uint8)
    if form.bits == 4:
        codes = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)
    high, low = ((words >> shift & 255).to(torch.uint8) for shift in (24, 16))
    return torch.cat([codes, high, low], -1)


def values_of(rows: torch.Tensor, form: Format) -> torch.Tensor:
    """Decodes uint8[blocks, row] to float32[blocks, BLOCK]."""
    last = form.row - _SCALE
    codes, high, low = rows[..., :last], *(rows[..., at : at + 1].to(torch.int32) for at in (last, last + 1))
    # A bfloat16 is the upper half of a float32. Scales are not negative, so `high` is below 128 and
    # the shift does not overflow.
    scale = (high << 24 | low << 16).view(torch.float32)
    if form.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    share = (codes.to(torch.float32) - (form.top + 1)) * (1 / form.top)
    return (share * share.abs() if form.root else share) * scale


def packed(x: torch.Tensor, wire: Wire, parts: int = 1) -> torch.Tensor:
    """Returns a value in the form in which it is sent, [parts, elements]: one part for each of `parts` ranks, the last
    of them padded."""
    flat = x.reshape(-1)
    if padding := parts * wire.numel - flat.numel():
        flat = F.pad(flat, (0, padding))
    if not wire.coded:
        return flat.to(wire.sent_dtype, copy=True).view(parts, -1)
    assert wire.format is not None
    return rows_of(flat.to(torch.float32).view(-1, BLOCK), wire.format).reshape(parts, -1)


def unpacked(sent: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Returns the elements [..., elements] of a received value: in float32 if it is encoded, otherwise in the dtype in
    which it was sent."""
    if not wire.coded:
        return sent
    assert wire.format is not None
    rows = sent.reshape(*sent.shape[:-1], -1, wire.format.row)
    return values_of(rows, wire.format).reshape(*sent.shape[:-1], -1)


def total(sent: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Returns the sum of the ranks' parts [ranks, elements], added in the order of the ranks."""
    rows = unpacked(sent, wire).to(torch.float32)
    while len(rows) > _RUN:  # bounds the number of additions in the graph
        num = len(rows) // _RUN
        # float32[runs, ranks of a run, elements]: each addition below covers all runs at once
        runs = rows[: num * _RUN].view(num, _RUN, wire.numel)
        rows = torch.cat([functools.reduce(torch.add, (runs[:, i] for i in range(_RUN))), rows[num * _RUN :]])
    return functools.reduce(torch.add, (rows[i] for i in range(len(rows))))


def buffers(wires: Sequence[Wire], parts: int) -> tuple[Form, ...]:
    """Returns the shapes and dtypes of the buffers in which these values are sent together.

    There is one buffer for each dtype; it concatenates the parts of the ranks.
    """
    sent = dict.fromkeys((w.sent_dtype for w in wires), 0)
    for wire in wires:
        sent[wire.sent_dtype] += parts * wire.sent
    return tuple(Form((numel, 1), dtype) for dtype, numel in sent.items())


def _bundled(values: Sequence[torch.Tensor], wires: Sequence[Wire]) -> list[torch.Tensor]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for value, wire in zip(values, wires, strict=True):
        groups.setdefault(wire.sent_dtype, []).append(value)
    return [(xs[0] if len(xs) == 1 else torch.cat(xs, 1)).reshape(-1, 1) for xs in groups.values()]


def _split(sent: Sequence[torch.Tensor], wires: Sequence[Wire], parts: int) -> list[torch.Tensor]:
    """Splits received buffers into the values [parts, elements] that were sent in them."""
    rows = {x.dtype: x.view(parts, -1) for x in sent}
    at, found = dict.fromkeys(rows, 0), list[torch.Tensor]()
    for wire in wires:
        begin = at[wire.sent_dtype]
        at[wire.sent_dtype] = end = begin + wire.sent
        found.append(rows[wire.sent_dtype][:, begin:end])
    return found


def _formed(values: Iterable[torch.Tensor], forms: Sequence[Form]) -> list[torch.Tensor]:
    """Returns flat values without their padding, in their own shapes and dtypes."""
    return [
        x[: math.prod(form.shape)].to(form.dtype, copy=True).reshape(form.shape)
        for x, form in zip(values, forms, strict=True)
    ]


def encode(shards: Sequence[torch.Tensor], wires: Sequence[Wire]) -> list[torch.Tensor]:
    """Encodes shards, each into a separate tensor."""
    return [packed(x, w).view(-1) for x, w in zip(shards, wires, strict=True)]


def decode(sent: Sequence[torch.Tensor], wires: Sequence[Wire], made: Sequence[Form]) -> list[torch.Tensor]:
    """Decodes values, each from a separate tensor."""
    return _formed((unpacked(x.reshape(-1), w) for x, w in zip(sent, wires, strict=True)), made)


def encode_grads(grads: Sequence[torch.Tensor], wires: Sequence[Wire], parts: int) -> list[torch.Tensor]:
    """Encodes gradients into buffers for this many ranks."""
    return _bundled([packed(x, w, parts) for x, w in zip(grads, wires, strict=True)], wires)


def decode_sum(
    sent: Sequence[torch.Tensor], wires: Sequence[Wire], parts: int, made: Sequence[Form]
) -> list[torch.Tensor]:
    """Decodes buffers from this many ranks, and adds up the values of the ranks."""
    return _formed((total(x, w) for x, w in zip(_split(sent, wires, parts), wires, strict=True)), made)


def recode(sent: Sequence[torch.Tensor], wires: Sequence[Wire], parts: int) -> list[torch.Tensor]:
    """Decodes and adds up like `decode_sum`, and encodes the sums: each rank's result is its part of them."""
    sums = [total(x, w).to(w.dtype) for x, w in zip(_split(sent, wires, parts), wires, strict=True)]
    return encode_grads(sums, wires, 1)


def decode_sums(
    sent: Sequence[torch.Tensor], wires: Sequence[Wire], parts: int, made: Sequence[Form]
) -> list[torch.Tensor]:
    """Decodes buffers that hold all ranks' parts of the sums."""
    return _formed((unpacked(x, w).reshape(-1) for x, w in zip(_split(sent, wires, parts), wires, strict=True)), made)


@functools.lru_cache(maxsize=1024)
def traced(
    fn: Callable[..., Sequence[torch.Tensor]], given: Sequence[Form], device: torch.device, *args: Any
) -> Recorded:
    """Traces one of the functions above, called with tensors of these forms and with `args`."""
    mode = compat.FakeTensorMode()
    with mode:
        fakes = [compat.new_fake(mode, form.shape, form.dtype, device) for form in given]
        names = [f"x_{i}" for i in range(len(fakes))]
        return record(lambda *xs: fn(xs, *args), fakes, owner="compress", names=names)


# --- the rewrite ---


_GATHER, _SCATTER, _ALL_REDUCE = "all_gather_start", "reduce_scatter_start", "all_reduce_start"
_KEEPS = ("wait", "accumulate", "reshape", "split_parts", "add")
"""The ops whose results are the same gradients as their arguments, in another form."""


@dataclass(frozen=True)
class Encoding:
    """How the parallel transforms shard each parameter and, for "auto", the formats that were chosen."""

    zero: Zero = field(compare=False)
    formats: tuple[AxisFormats, ...] = ()


def rewrite(program: Program, options: Encoding) -> Program:
    """Returns the program with encoded transfers.

    Precondition: the program is sharded over the mesh, and its update is not partitioned yet.

    Raises:
        FzeroValueError: an axis of the transform is not on the mesh; or nothing is sent encoded over it, or over any
            axis.
    """
    spec = find(program.transforms, Compress)
    assert spec is not None
    transfers = _Transfers(program, spec.chosen(options.formats) if spec.auto else spec, options.zero)
    rewriter, ops = _Rewriter(transfers), list[Instruction]()
    for op in program.instructions:
        new = rewriter.rewrite(op)
        ops += [*rewriter.before, *new]
        rewriter.before.clear()
    transfers.check_effect(rewriter.axes)
    read = {a for op in ops for x in op.with_body() for a in x.args} | {*program.outputs}
    unread = lambda x: x.op == "cast" and read.isdisjoint(v.name for v in x.out)  # noqa: E731
    program = replace(program, instructions=tuple(ops), functions=rewriter.functions.by_name)
    return program.map_instructions(lambda op: [] if unread(op) else [op])


def ladders(program: Program, zero: Zero) -> list[list[AxisFormats]]:
    """Returns the formats that "auto" may choose for each axis, from no compression to the most compression.

    The program is one whose transfers are not encoded yet. 4-bit gradients are offered only on axes that reduce sums of
    another axis.

    Raises:
        FzeroValueError: the axis of the transform is not on the mesh; nothing could be sent encoded.
    """
    spec = find(program.transforms, Compress)
    assert spec is not None
    transfers = _Transfers(program, spec, zero)
    if transfers.alone:
        return []
    found = list[list[AxisFormats]]()
    for axis in (a for a in program.mesh.axes if a in transfers.axes and spec.axis in (None, a)):
        rungs = [AxisFormats(axis)]
        grads = transfers.formats_of_grads(axis)
        rungs += [AxisFormats(axis, None, name) for name in ("bf16", "int8") if name in grads]
        rungs += [rungs[-1]._replace(params="int8")] if transfers.gathers_params(axis) else []
        if "int4" in grads and not transfers.reduces_first(axis):
            rungs.append(rungs[-1]._replace(grads="int4"))
        found += [rungs] if len(rungs) > 1 else []
    if not found:
        raise transfers.does_nothing("does nothing")
    return found


class _Transfers:
    """Says which transfers of a program may send which values encoded.

    Raises:
        FzeroValueError: the configuration names an axis that the mesh does not have.
    """

    def __init__(self, program: Program, spec: Compress, zero: Zero):
        self.program, self.spec, self.mesh = program, spec, program.mesh
        if unknown := [a for a in spec.axes if a not in self.mesh.axes]:
            said = [f"{a!r}: the mesh has {self.mesh}" for a in unknown]
            raise FzeroValueError("compress", "unknown mesh axis", said, "name an axis of the mesh")
        shared = {a for r in zero.specs for a in r.axes}.difference(zero.computed)
        self.axes = {a for a in shared if self.mesh.axes[a] > 1}  # over which parameters and gradients are sent
        # No named axis has two ranks, which an elastic run may come to.
        self.alone = bool(shared) and self.axes.isdisjoint(spec.axes or shared)
        ops = [op for op, _ in program.walk()]
        self.values = program.values_by_name
        self.made = {v.name: op for op in ops for v in op.out}
        self.waits = {op.args[0]: op for op in ops if op.is_wait}
        self.leaf_of = {**self._params(ops), **self._grads()}

    def _params(self, ops: Sequence[Instruction]) -> dict[str, Leaf]:
        """Returns the parameter of each value that is one, a cast of one, or gathered from one of these."""
        found = {x.path: x for x in self.program.leaves.values() if x.role in ("params", "compute")}
        for op in ops:
            source = self.made.get(op.args[0]) if op.op == "wait" else None
            if op.op == "cast" and len(op.out) == 1:
                source = op
            if source is not None and source.op in (_GATHER, "cast"):
                found.update((v.name, found[a]) for v, a in zip(op.out, source.args, strict=False) if a in found)
        return found

    def _grads(self) -> dict[str, Leaf]:
        """Returns the parameter of each gradient, and of each value that becomes a gradient when it is accumulated and
        reduced."""
        found = dict[str, Leaf]()
        todo = [(g, self.program.leaves[path]) for path, g in self.program.grads.items()]
        while todo:
            name, leaf = todo.pop()
            if name not in found and name in self.made:
                found[name] = leaf
                todo += [(a, leaf) for a in self._summands(name)]
        return found

    def _summands(self, name: str) -> Sequence[str]:
        """Returns the gradients that are added up to a gradient, or the same gradient in another form."""
        op = self.made[name]
        if op.op not in _KEEPS:
            return ()
        source = self.made[op.args[0]] if op.op == "wait" else op
        # The arguments of an op that adds up several values are all first summands, then all second ones.
        return source.args[[v.name for v in op.out].index(name) :: len(op.out)]

    def _is_sum(self, name: str) -> bool:
        """Whether a gradient has been reduced over another axis before."""
        op = self.made.get(name)
        if op is None:
            return False
        if op.op == "wait" and self.made[op.args[0]].op in (_SCATTER, _ALL_REDUCE):
            return True
        return op.op != "wait" and any(map(self._is_sum, self._summands(name)))

    # What can be sent encoded over an axis

    def _over(self, axis: str, *kinds: str) -> list[Instruction]:
        return [op for op, _ in self.program.walk() if op.op in kinds and op.axes == (axis,)]

    def gathers_params(self, axis: str) -> bool:
        """Whether parameters can be sent encoded over an axis."""
        coded = (self.wire(a, PARAMS["int8"]).format for op in self._over(axis, _GATHER) for a in self.taken(op))
        return self.spec.params is not None and any(coded)

    def formats_of_grads(self, axis: str) -> set[str]:
        """Returns the formats that would change the gradients that are sent over an axis."""
        if not self.spec.grads:
            return set()
        ops = self._over(axis, _SCATTER, _ALL_REDUCE)
        return {name for name, x in GRADS.items() if any(w.format for op in ops for *_, w in self.grads(op, x))}

    def reduces_first(self, axis: str) -> bool:
        """Whether the axis is the first over which some gradient is reduced."""
        ops = self._over(axis, _SCATTER, _ALL_REDUCE)
        return any(a in self.leaf_of and not self._is_sum(a) for op in ops for a in op.args)

    # The form in which a value is sent

    def format(self, op: Instruction) -> Format | None:
        """The format of a transfer of parameters or gradients; None: uncompressed."""
        (axis,) = op.axes if len(op.axes) == 1 else ("",)
        of = self.spec.of_params if op.op == _GATHER else self.spec.of_grads
        return of(axis) if axis in self.axes else None

    def taken(self, op: Instruction) -> list[str]:
        """Returns the parameters that a gather takes encoded, provided that they are large enough. A gather that
        returns permuted shards of a dim takes none."""
        arrives = STARTS[_GATHER].arrives
        return [a for a in op.args if a in self.leaf_of and not arrives(op, self.values[a].placement).is_permuted]

    def wire(self, name: str, format: Format, numel: int | None = None) -> Wire:
        """Returns the form in which a value is sent in parts of `numel` elements, by default all that a rank has."""
        value, leaf = self.values[name], self.leaf_of[name]
        numel = math.prod(self.held(value).shape) if numel is None else numel
        whole = self.program.leaves.get(leaf.master, leaf)
        refused = self.spec.refuses(whole) or value.dtype.itemsize == 1 or numel % BLOCK
        narrow = format.bits == 16 and value.dtype.itemsize == 2
        return Wire(None if refused or narrow else format, numel, value.dtype)

    def grads(self, op: Instruction, format: Format) -> list[tuple[Value, Value, Wire]]:
        """Returns the gradients that a reduction takes, each with its result and the form in which it is sent; none if
        the reduction is not a sum of gradients."""
        said, size = op.says(ScatterAttrs) if op.op == _SCATTER else None, self.mesh.axis_size(op.axes)
        if getattr(op.attrs, "reduction", "") != "sum" or (said is not None and said.rows):
            return []
        found = list[tuple[Value, Value, Wire]]()
        for a, out in zip(op.args, self.waits[op.out[0].name].out, strict=True):
            if a in self.leaf_of:
                held = math.prod(self.held(out).shape)
                unit = BLOCK if self.spec.refuses(self.leaf_of[a]) is None else 1
                # An all_reduce divides a gradient among the ranks, in parts that consist of complete blocks.
                padded = -(-held // (size * unit)) * unit
                found.append((self.values[a], out, self.wire(a, format, padded if said is None else held)))
        return found

    def held(self, value: Value) -> Form:
        """The shape of the part of a value that a rank has."""
        return Form(value.local_shape(self.mesh), value.dtype)

    # Errors if nothing is encoded

    def check_effect(self, done: Collection[str]) -> None:
        """Raises if nothing is sent encoded, at all or over an axis that the configuration names. `done`: the axes over
        which something is."""
        if self.alone or (not self.program.assigns and self.spec.params is None):
            return
        idle = [a for a in self.spec.axes if self.mesh.axes[a] > 1 and a not in done]
        if done and (not idle or not self.program.assigns):
            return
        over = ", ".join(map(repr, idle))
        raise self.does_nothing(f"nothing would be sent encoded over {over}" if idle else "does nothing")

    def does_nothing(self, what: str) -> FzeroValueError:
        """Returns the error for a step whose tensors would all be sent uncompressed, with the reasons."""
        said = [f"{self.spec}: the mesh has {self.mesh}"]
        if not self.axes:
            said.append("no transform shards parameters or divides the batch")
        else:
            said.append(f"parameters are sharded, or the batch is divided, over {', '.join(sorted(self.axes))}")
            leaves = [x for x in self.program.leaves.values() if x.role == "params"]
            shown = [f"{x}: {why}" for x in leaves if (why := self.spec.refuses(x)) is not None]
            said += [*shown[:5], *([f"and {len(shown) - 5} more"] if len(shown) > 5 else [])]
        fix = (
            "leave compress out here; or select parameters of at least "
            "4,096 elements that are communicated over an axis"
        )
        return FzeroValueError("compress", what, said, fix)


class _Rewriter:
    """Replaces the transfers that are encoded, op by op.

    A parameter keeps its codes from the first gather that needs them, so that each stored value is encoded once per
    step.
    """

    def __init__(self, transfers: _Transfers):
        self.transfers, self.program, self.mesh = transfers, transfers.program, transfers.mesh
        self.names, self.functions = Names(self.program.values()), Functions(self.program.functions)
        self.device = torch.device(compat.trace_device(self.mesh.device_type))
        # the codes of a parameter, of its cast, or of a gathered shard of it
        self.codes: dict[str, tuple[Value, Wire]] = {}
        self.before: list[Instruction] = []  # calls that encode before an op, or before the loop that contains it
        self.gathers: dict[str, Instruction] = {}  # by handle of a gather of codes: the gather before the rewrite
        self.reduced: set[str] = set()  # handles of reductions that have been replaced
        self.axes: set[str] = set()  # over which something is sent encoded
        # the names that some op reads as decoded values
        ops = [op for op, _ in self.program.walk()]
        self.read = {*self.program.outputs} | {a for x in ops for a in {*x.args}.difference(self._taken(x))}

    def rewrite(self, op: Instruction) -> list[Instruction]:
        """Returns the ops in place of one op."""
        if op.body:
            return [replace(op, body=tuple(new for x in op.body for new in self.rewrite(x)))]
        if taken := self._taken(op):
            return self._gather(op, taken)
        if op.op == "wait" and op.args[0] in self.gathers:
            return self._gathered(op, self.gathers[op.args[0]])
        if op.op == "wait" and op.args[0] in self.reduced:
            return []
        if op.op in (_SCATTER, _ALL_REDUCE) and (format := self.transfers.format(op)):
            return self._reduce(op, self.transfers.grads(op, format))
        return [op]

    def _taken(self, op: Instruction) -> list[str]:
        """Returns the values that an op gathers encoded, provided that they have codes."""
        return self.transfers.taken(op) if op.op == _GATHER and self.transfers.format(op) else []

    def _call(self, fn: Callable[..., Any], args: Sequence[Value], out: Sequence[Value], *how: Any) -> Instruction:
        """Returns the call of a traced function of the codec; `how` are its arguments besides the tensors."""
        graph = traced(fn, tuple(map(self.transfers.held, args)), self.device, *how)
        name = self.functions.add(fn.__name__, graph)
        return Instruction("call", tuple(v.name for v in args), tuple(out), name, by=self.transfers.spec.name)

    def _moved(self, op: str, name: str, axis: str, sent: Sequence[Value], come: Sequence[Value]) -> list[Instruction]:
        """Returns a transfer and its wait."""
        handle, attrs, by = moving(self.names.numbered(name)), Over(axes=(axis,)), self.transfers.spec.name
        start = Instruction(op, tuple(v.name for v in sent), (handle,), attrs=attrs, by=by)
        return [start, Instruction("wait", (handle.name,), tuple(come), by=by)]

    # Parameters

    def _gather(self, op: Instruction, taken: Sequence[str]) -> list[Instruction]:
        """Returns the gather with codes in place of the values that are encoded, and the calls that encode those
        without codes."""
        format = self.transfers.format(op)
        assert format is not None
        wires = {a: self.transfers.wire(a, format) for a in taken if a not in self.codes}
        ops = self._encoded({a: wire for a, wire in wires.items() if wire.format is not None})
        sent = tuple(self.codes[a][0].name if a in taken and a in self.codes else a for a in op.args)
        if sent == op.args:
            return [op]
        self.axes.update(op.axes)
        self.gathers[op.out[0].name] = op
        return [*ops, replace(op, args=sent)]

    def _encoded(self, wires: Mapping[str, Wire]) -> list[Instruction]:
        """Encodes shards, and returns the ops that do it. Stored values are encoded once per step, before all ops that
        read them (these ops go to `self.before`)."""
        stored = {a: path for a in wires if (path := self._stored(a)) is not None}
        early = {path: wires[a] for a, path in stored.items() if path not in self.codes}
        late = {a: wire for a, wire in wires.items() if a not in stored}
        ops = list[Instruction]()
        for group, place in ((early, self.before), (late, ops)):
            if group:
                args = [self.transfers.values[a] for a in group]
                made = [self._codes(value, wire) for value, wire in zip(args, group.values(), strict=True)]
                place.append(self._call(encode, args, made, tuple(group.values())))
                self.codes.update(zip(group, zip(made, group.values(), strict=True), strict=True))
        self.codes.update((a, self.codes[path]) for a, path in stored.items())
        return ops

    def _stored(self, name: str) -> str | None:
        """Returns the stored parameter that a value is, or is cast from; None for other values. Codes are made from the
        stored values."""
        made = self.transfers.made.get(name)
        source = name if made is None else made.args[0] if made.op == "cast" else None
        return source if source in self.program.leaves else None

    def _codes(self, value: Value, wire: Wire) -> Value:
        """Returns the codes of a shard, which are sharded as the shard is."""
        at = value.placement
        placement, shape = flat_shard(at.flat_axes, at.grid), (wire.sent * self.mesh.axis_size(at.flat_axes), 1)
        return Value(self.names(f"{self.names.stem(value.name)}_codes"), shape, torch.uint8, placement)

    def _gathered(self, wait: Instruction, start: Instruction) -> list[Instruction]:
        """Returns the wait for codes, and the call that decodes those that any op except another gather reads."""
        size, taken = self.mesh.axis_size(start.axes), self._taken(start)
        out, decoded = list[Value](), list[tuple[Value, Value, Wire]]()
        for a, value in zip(start.args, wait.out, strict=True):
            if a not in taken or a not in self.codes:
                out.append(value)
                continue
            coded, wire = self.codes[a]
            placement = STARTS[_GATHER].arrives(start, coded.placement)
            come = replace(coded, name=self.names(f"{value.name}_codes"), placement=placement)
            wire = wire._replace(numel=wire.numel * size)
            self.codes[value.name] = come, wire
            out.append(come)
            if value.name in self.read:
                decoded.append((come, value, wire))
        ops = [replace(wait, out=tuple(out))]
        if decoded:
            come, made, wires = zip(*decoded, strict=True)
            ops.append(self._call(decode, come, made, wires, tuple(map(self.transfers.held, made))))
        return ops

    # Gradients

    def _reduce(self, op: Instruction, grads: Sequence[tuple[Value, Value, Wire]]) -> list[Instruction]:
        """Returns the ops of an encoded reduction: encode the summands, exchange them by an all_to_all, add them up. If
        the reduction leaves unsharded sums, the sums are then encoded, gathered and decoded. Values that are not
        gradients keep the original reduction."""
        if all(wire.format is None for *_, wire in grads):
            return [op]
        (axis,), wait = op.axes, self.transfers.waits[op.out[0].name]
        bundles = dict[tuple[str, ...], list[tuple[Value, Value, Wire]]]()  # by the axes over which gradients vary
        for grad in grads:
            over = tuple(a for a in self.mesh.axes if a in grad[0].placement.varies_over)
            bundles.setdefault(over, []).append(grad)
        ops = self._exchange(axis, bundles, op.op == _SCATTER)
        leaf_of = self.transfers.leaf_of
        if rest := [(a, v) for a, v in zip(op.args, wait.out, strict=True) if a not in leaf_of]:
            args, kept = zip(*rest, strict=True)
            ops += [replace(op, args=args), replace(wait, out=kept)]
        self.axes.add(axis)
        self.reduced.add(op.out[0].name)
        return ops

    def _exchange(
        self, axis: str, bundles: Mapping[tuple[str, ...], Sequence[tuple[Value, Value, Wire]]], scatters: bool
    ) -> list[Instruction]:
        """Returns the ops that reduce gradients along an axis; those that vary over the same axes share buffers."""
        size, number = self.mesh.axes[axis], len(self.reduced)
        encoded, summed, decoded = list[Instruction](), list[Instruction](), list[Instruction]()
        sent, come, parts, sums = list[Value](), list[Value](), list[Value](), list[Value]()
        for over, grads in bundles.items():
            values, outs, wires = zip(*grads, strict=True)
            made, forms = tuple(map(self.transfers.held, outs)), buffers(wires, size)
            own, rest = varying(over), varying(a for a in over if a != axis)
            here, there = self._buffers(f"_{number}", forms, own), self._buffers(f"_dealt_{number}", forms, own)
            encoded.append(self._call(encode_grads, values, here, wires, size))
            sent += here
            come += there
            if scatters:
                summed.append(self._call(decode_sum, there, outs, wires, size, made))
                continue
            # Each rank encodes its part of the sums, and gathers those of the others.
            part = self._buffers(f"_part_{number}", forms, rest.along(axis, Shard(0)))
            whole = self._buffers(f"_sum_{number}", forms, rest)
            summed.append(self._call(recode, there, part, wires, size))
            decoded.append(self._call(decode_sums, whole, outs, wires, size, made))
            parts += part
            sums += whole
        ops = [*encoded, *self._moved("all_to_all_start", "deal", axis, sent, come), *summed]
        return ops if scatters else [*ops, *self._moved(_GATHER, "gather_sum", axis, parts, sums), *decoded]

    def _buffers(self, ending: str, forms: Sequence[Form], placement: MeshPlacement) -> list[Value]:
        kinds = ["codes" if form.dtype == torch.uint8 else "raw" for form in forms]
        names = [self.names(f"{kind}{ending}") for kind in kinds]
        return [Value(n, form.shape, form.dtype, placement) for n, form in zip(names, forms, strict=True)]
