"""Defines the codes in which values travel, and records the functions that make and read them.

[Note: codes] A value travels in blocks of 256 elements. The row of a block has a code of 8 or 4 bits for each element,
and behind them the block's scale, which is its largest magnitude, as bfloat16 rounded up: 258 or 130 bytes, 1.008 or
0.508 an element. Codes of parameters have even steps. Codes of gradients have steps of the square root: an optimizer
that divides by an element's own magnitude loses the whole update of an element that is rounded to 0. A block that is
not finite decodes to NaN throughout, so the step is skipped, or fails, as without codes. Two codes share a byte as the
first and the second half of a block: so no operation crosses lanes.

Rows are a function of their block alone, so a leaf has the same ones on every mesh ([Note: blocks] in
fzero/sharding/layout.py). Sums are float32, in the order of the ranks.
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
_MOST, _INFINITY = 0x7F7F0000, 0x7F800000  # the largest bfloat16 and the one behind it, as bits of a float32
_RUN = 32  # ranks whose parts are added up one by one; of more a run counts as one


class Format(NamedTuple):
    """The form of what travels: bits an element, and whether steps are those of the square root. 16 bits are bfloat16,
    without blocks."""

    bits: int
    root: bool = False

    @property
    def top(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    @property
    def row(self) -> int:
        """Bytes of a block."""
        return BLOCK * self.bits // 8 + _SCALE


PARAMS = {"int8": Format(8)}
GRADS = {"int8": Format(8, root=True), "int4": Format(4, root=True), "bf16": Format(16)}


class Wire(NamedTuple):
    """A value on its way: its format, None where it travels as it is, and the elements and dtype of each rank's
    part."""

    format: Format | None
    numel: int
    dtype: torch.dtype

    @property
    def coded(self) -> bool:
        """Whether it travels as rows of blocks."""
        return self.format is not None and self.format.bits < 16

    @property
    def sent(self) -> int:
        """Elements that a part has on its way."""
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
    """uint8[blocks, row] of float32[blocks, BLOCK]."""
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.abs() < math.inf  # and no NaN
    # rounded up, in the bits of a float32; a sum with the bits of a NaN could overflow
    up = ((torch.where(finite, largest, 0.0).view(torch.int32) + 0xFFFF) & -0x10000).clamp(max=_MOST)
    words = torch.where(finite, up, _INFINITY)
    scale = up.view(torch.float32)
    share = torch.where(finite & (scale > 0), x / scale, 0.0)
    if form.root:
        share = share.abs().sqrt() * share.sign()
    share = (share * form.top).round().clamp(-form.top, form.top)
    codes = (share + (form.top + 1)).to(torch.uint8)
    if form.bits == 4:
        codes = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)
    high, low = ((words >> shift & 255).to(torch.uint8) for shift in (24, 16))
    return torch.cat([codes, high, low], -1)


def values_of(rows: torch.Tensor, form: Format) -> torch.Tensor:
    """float32[blocks, BLOCK] of uint8[blocks, row]."""
    last = form.row - _SCALE
    codes, high, low = rows[..., :last], *(rows[..., at : at + 1].to(torch.int32) for at in (last, last + 1))
    scale = (high << 24 | low << 16).view(torch.float32)
    if form.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    share = (codes.to(torch.float32) - (form.top + 1)) * (1 / form.top)
    return (share * share.abs() if form.root else share) * scale


def packed(x: torch.Tensor, wire: Wire, parts: int = 1) -> torch.Tensor:
    """A value as it travels, [parts, elements]: the parts of so many ranks, the last of them padded."""
    flat = x.reshape(-1)
    if padding := parts * wire.numel - flat.numel():
        flat = F.pad(flat, (0, padding))
    if not wire.coded:
        return flat.to(wire.sent_dtype, copy=True).view(parts, -1)
    assert wire.format is not None
    return rows_of(flat.to(torch.float32).view(-1, BLOCK), wire.format).reshape(parts, -1)


def unpacked(sent: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The elements [..., elements] of what has come, in float32 if it is codes, else as they travel."""
    if not wire.coded:
        return sent
    assert wire.format is not None
    rows = sent.reshape(*sent.shape[:-1], -1, wire.format.row)
    return values_of(rows, wire.format).reshape(*sent.shape[:-1], -1)


def total(sent: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The sum of the ranks' parts [ranks, elements], in their order."""
    rows = unpacked(sent, wire).to(torch.float32)
    while len(rows) > _RUN:  # a graph has no thousand additions
        num = len(rows) // _RUN
        runs = rows[: num * _RUN].view(num, _RUN, wire.numel)
        rows = torch.cat([functools.reduce(torch.add, (runs[:, i] for i in range(_RUN))), rows[num * _RUN :]])
    return functools.reduce(torch.add, (rows[i] for i in range(len(rows))))


def bundles(wires: Sequence[Wire], parts: int) -> list[Form]:
    """The values in which so many values travel together: one for each dtype, part behind part."""
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
    """Bundles as the values [parts, elements] that travel in them."""
    rows = {x.dtype: x.view(parts, -1) for x in sent}
    at, found = dict.fromkeys(rows, 0), list[torch.Tensor]()
    for wire in wires:
        begin = at[wire.sent_dtype]
        at[wire.sent_dtype] = end = begin + wire.sent
        found.append(rows[wire.sent_dtype][:, begin:end])
    return found


# --- functions of lines ---


@functools.lru_cache(maxsize=256)
def shard_encoder(given: tuple[Form, ...], wires: tuple[Wire, ...], device: torch.device) -> Recorded:
    """Shards to codes, each by itself."""
    return _recorded(given, device, lambda *xs: [packed(x, w).view(-1) for x, w in zip(xs, wires, strict=True)])


@functools.lru_cache(maxsize=256)
def decoder(given: tuple[Form, ...], wires: tuple[Wire, ...], made: tuple[Form, ...], device: torch.device) -> Recorded:
    """Codes of values, each by itself, to the values without padding."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [_formed(unpacked(x.reshape(-1), w), form) for x, w, form in zip(xs, wires, made, strict=True)]

    return _recorded(given, device, run)


@functools.lru_cache(maxsize=256)
def encoder(given: tuple[Form, ...], wires: tuple[Wire, ...], parts: int, device: torch.device) -> Recorded:
    """Values to bundles for so many ranks."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        return _bundled([packed(x, w, parts) for x, w in zip(xs, wires, strict=True)], wires)

    return _recorded(given, device, run)


@functools.lru_cache(maxsize=256)
def adder(wires: tuple[Wire, ...], parts: int, made: tuple[Form, ...], device: torch.device) -> Recorded:
    """Bundles from so many ranks to the sums of the values."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        sums = (total(x, w) for x, w in zip(_apart(xs, wires, parts), wires, strict=True))
        return [_formed(x, form) for x, form in zip(sums, made, strict=True)]

    return _recorded(bundles(wires, parts), device, run)


@functools.lru_cache(maxsize=256)
def recoder(wires: tuple[Wire, ...], parts: int, device: torch.device) -> Recorded:
    """Bundles from so many ranks to a bundle of the sums, one part of those of all ranks."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        sums = [total(x, w).to(w.dtype) for x, w in zip(_apart(xs, wires, parts), wires, strict=True)]
        return _bundled([packed(x, w) for x, w in zip(sums, wires, strict=True)], wires)

    return _recorded(bundles(wires, parts), device, run)


@functools.lru_cache(maxsize=256)
def unbundler(wires: tuple[Wire, ...], parts: int, made: tuple[Form, ...], device: torch.device) -> Recorded:
    """Bundles of all ranks' parts to the values without padding."""

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
