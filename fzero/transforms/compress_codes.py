"""Defines the encodings in which values are sent, and traces the functions that encode and decode them.

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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fzero._compat import compat
from fzero.ops.block_quantization import BLOCK
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded

_SCALE = 2  # bytes
# the largest finite bfloat16 and the value after it (infinity), as bits of a float32
_MOST, _INFINITY = 0x7F7F0000, 0x7F800000
_RUN = 32  # ranks whose parts are added one by one; of more ranks, each run of this length is summed first


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


def bundles(wires: Sequence[Wire], parts: int) -> list[Form]:
    """Returns the shapes and dtypes of the buffers in which these values are sent together.

    There is one buffer for each dtype; it concatenates the parts of the ranks.
    """
    sent = dict.fromkeys((w.sent_dtype for w in wires), 0)
    for wire in wires:
        sent[wire.sent_dtype] += parts * wire.sent
    return [Form((numel, 1), dtype) for dtype, numel in sent.items()]


def _bundled(values: Sequence[torch.Tensor], wires: Sequence[Wire]) -> list[torch.Tensor]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for value, wire in zip(values, wires, strict=True):
        groups.setdefault(wire.sent_dtype, []).append(value)
    return [(xs[0] if len(xs) == 1 else torch.cat(xs, 1)).reshape(-1, 1) for xs in groups.values()]


def _apart(sent: Sequence[torch.Tensor], wires: Sequence[Wire], parts: int) -> list[torch.Tensor]:
    """Splits received buffers into the values [parts, elements] that were sent in them."""
    rows = {x.dtype: x.view(parts, -1) for x in sent}
    at, found = dict.fromkeys(rows, 0), list[torch.Tensor]()
    for wire in wires:
        begin = at[wire.sent_dtype]
        at[wire.sent_dtype] = end = begin + wire.sent
        found.append(rows[wire.sent_dtype][:, begin:end])
    return found


# --- subgraphs that ops call ---


@functools.lru_cache(maxsize=256)
def shard_encoder(given: tuple[Form, ...], wires: tuple[Wire, ...], device: torch.device) -> Recorded:
    """Traces the encoding of shards, each into a separate tensor."""
    return _recorded(given, device, lambda *xs: [packed(x, w).view(-1) for x, w in zip(xs, wires, strict=True)])


@functools.lru_cache(maxsize=256)
def decoder(given: tuple[Form, ...], wires: tuple[Wire, ...], made: tuple[Form, ...], device: torch.device) -> Recorded:
    """Traces the decoding of values, each from a separate tensor, and removes the padding."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [_formed(unpacked(x.reshape(-1), w), form) for x, w, form in zip(xs, wires, made, strict=True)]

    return _recorded(given, device, run)


@functools.lru_cache(maxsize=256)
def encoder(given: tuple[Form, ...], wires: tuple[Wire, ...], parts: int, device: torch.device) -> Recorded:
    """Traces the encoding of values into buffers for this many ranks."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return _bundled([packed(x, w, parts) for x, w in zip(xs, wires, strict=True)], wires)

    return _recorded(given, device, run)


@functools.lru_cache(maxsize=256)
def adder(wires: tuple[Wire, ...], parts: int, made: tuple[Form, ...], device: torch.device) -> Recorded:
    """Traces the decoding of buffers from this many ranks, and the sums of the values over the ranks."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        sums = (total(x, w) for x, w in zip(_apart(xs, wires, parts), wires, strict=True))
        return [_formed(x, form) for x, form in zip(sums, made, strict=True)]

    return _recorded(bundles(wires, parts), device, run)


@functools.lru_cache(maxsize=256)
def recoder(wires: tuple[Wire, ...], parts: int, device: torch.device) -> Recorded:
    """Traces the sums of buffers from this many ranks, encoded again: each rank's result is its part of the sums."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        sums = [total(x, w).to(w.dtype) for x, w in zip(_apart(xs, wires, parts), wires, strict=True)]
        return _bundled([packed(x, w) for x, w in zip(sums, wires, strict=True)], wires)

    return _recorded(bundles(wires, parts), device, run)


@functools.lru_cache(maxsize=256)
def unbundler(wires: tuple[Wire, ...], parts: int, made: tuple[Form, ...], device: torch.device) -> Recorded:
    """Traces the decoding of buffers that hold all ranks' parts, and removes the padding."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        apart = zip(_apart(xs, wires, parts), wires, made, strict=True)
        return [_formed(unpacked(x, w).reshape(-1), form) for x, w, form in apart]

    return _recorded(bundles(wires, parts), device, run)


def _formed(flat: torch.Tensor, form: Form) -> torch.Tensor:
    return flat[: math.prod(form.shape)].to(form.dtype, copy=True).reshape(form.shape)


def _recorded(given: Sequence[Form], device: torch.device, run: Callable[..., Sequence[torch.Tensor]]) -> Recorded:
    mode = compat.FakeTensorMode()
    with mode:
        fakes = [compat.new_fake(mode, form.shape, form.dtype, device) for form in given]
        return record(run, fakes, owner="compress", names=[f"x_{i}" for i in range(len(fakes))])
