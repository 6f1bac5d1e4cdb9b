"""Multiplies the rows of several experts, each by its own expert's matrix.

A group of experts has its rows in any order, and a number for each row: that of its expert in the group, or -1 for
none. `EXPERT_MM` multiplies rows by matrices; the gradient of the matrices is `EXPERT_OUTER`. They are operators
because the sizes are known only from the numbers. A CPU multiplies expert by expert; a GPU uses one kernel for all
experts (`F.grouped_mm`), which exists for bfloat16. In other dtypes a GPU multiplies each row by all matrices of its
group, so that the host does not have to wait for a size.

`GROUPED_MM` and `GROUPED_OUTER` are the same for rows that are in the order of their experts already, with the end of
each expert's rows instead of a number for each row. Rows after the last end belong to no expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from fzero.ops.registration import define

_MULTIPLE = 8
"""The dims of a grouped product in bfloat16 must be multiples of this: the hardware loads 16 bytes at once."""


def _sorted(expert: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices of the rows of all groups in the order of their experts, with rows of no expert last; and
    the end of each expert's rows.
    """
    groups = expert.shape[0]
    base = torch.arange(groups, device=expert.device)[:, None] * each
    # int64[groups x rows]. Rows of no expert get a number after those of all experts.
    number, order = torch.sort(torch.where(expert < 0, groups * each, expert + base).flatten(), stable=True)
    # The end of expert e is the number of rows whose expert is at most e.
    return order, torch.searchsorted(number, torch.arange(groups * each, device=expert.device), right=True)


def _mm(expert: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if rows.device.type != "cpu":
        return mm_on_gpu(expert, rows, w)
    order, ends = _sorted(expert, w.shape[0] // rows.shape[0])
    flat, out = rows.reshape(-1, rows.shape[2]), rows.new_zeros(*rows.shape[:2], w.shape[2])
    begin = 0
    for matrix, end in zip(w, ends.tolist(), strict=True):
        at = order[begin:end]
        out.view(-1, w.shape[2]).index_copy_(0, at, flat.index_select(0, at) @ matrix)
        begin = end
    return out


def _outer(expert: torch.Tensor, a: torch.Tensor, b: torch.Tensor, each: int) -> torch.Tensor:
    if a.device.type != "cpu":
        return outer_on_gpu(expert, a, b, each)
    order, ends = _sorted(expert, each)
    flat, other = a.mT.reshape(-1, a.shape[1]), b.reshape(-1, b.shape[2])
    out, begin = a.new_empty(a.shape[0] * each, a.shape[1], b.shape[2]), 0
    for matrix, end in zip(out, ends.tolist(), strict=True):
        at = order[begin:end]
        torch.mm(flat.index_select(0, at).t(), other.index_select(0, at), out=matrix)
        begin = end
    return out


def mm_on_gpu(expert: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Computes `EXPERT_MM` with operations that do not wait for a size."""
    (groups, size, features), each = rows.shape, w.shape[0] // rows.shape[0]
    if not _has_kernel(rows, features, w.shape[2]):
        out, parts = rows.new_zeros(groups, size, w.shape[2]), w.unflatten(0, (groups, each))
        for i in range(each):
            out = torch.where((expert == i)[..., None], torch.bmm(rows, parts[:, i]), out)
        return out
    order, ends = _sorted(expert, each)
    made = F.grouped_mm(rows.reshape(-1, features)[order], w, offs=ends.int())
    # the inverse permutation, which returns the rows to their order
    back = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return torch.where(expert[..., None] < 0, 0, made[back].view(groups, size, -1))


def outer_on_gpu(expert: torch.Tensor, a: torch.Tensor, b: torch.Tensor, each: int) -> torch.Tensor:
    """Computes `EXPERT_OUTER` with operations that do not wait for a size."""
    if not _has_kernel(a, a.shape[1], b.shape[2]):
        parts = [torch.bmm(torch.where((expert == i)[:, None], a, 0), b) for i in range(each)]
        return torch.stack(parts, 1).flatten(0, 1)
    order, ends = _sorted(expert, each)
    flat, other = a.mT.reshape(-1, a.shape[1])[order], b.reshape(-1, b.shape[2])[order]
    made = F.grouped_mm(flat.t(), other, offs=ends.int())
    # zero for an expert without rows
    return torch.where((ends.diff(prepend=ends.new_zeros(1)) > 0)[:, None, None], made, 0)


def _has_kernel(x: torch.Tensor, *sizes: int) -> bool:
    return x.dtype is torch.bfloat16 and not any(n % _MULTIPLE for n in sizes)


EXPERT_MM: Any = define(
    "expert_mm",
    "(Tensor expert, Tensor rows, Tensor w) -> Tensor",
    _mm,
    lambda expert, rows, w: rows.new_empty([*rows.shape[:2], w.shape[2]]),
)
"""`rows[g, r] @ w[g * each + expert[g, r]]`, [groups, rows, outputs]; zeros if there is no expert. `expert` is
int64[groups, rows], `rows` [groups, rows, features], `w` [groups x each, features, outputs].
"""
EXPERT_OUTER: Any = define(
    "expert_outer",
    "(Tensor expert, Tensor a, Tensor b, int each) -> Tensor",
    _outer,
    lambda expert, a, b, each: a.new_empty([a.shape[0] * each, a.shape[1], b.shape[2]]),
)
"""For each expert, the sum of `a[g, :, r]` times `b[g, r]` over its rows, [groups x each, inputs, outputs]. `a` is
[groups, inputs, rows], and `b` [groups, rows, outputs].
"""


def _grouped_mm(ends: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, filled: int, k: int) -> torch.Tensor:
    if rows.device.type != "cpu":
        return grouped_mm_on_gpu(ends, rows, w, filled, k)
    out, begin = rows.new_empty(rows.shape[0], w.shape[2]), 0
    for matrix, end in zip(w, ends.tolist(), strict=True):
        torch.mm(rows[begin:end], matrix, out=out[begin:end])
        begin = end
    out[begin:].zero_()
    return out


def _grouped_outer(ends: torch.Tensor, a: torch.Tensor, b: torch.Tensor, filled: int, k: int) -> torch.Tensor:
    if a.device.type != "cpu":
        return grouped_outer_on_gpu(ends, a, b, filled, k)
    out, begin = a.new_empty(ends.shape[0], a.shape[1], b.shape[1]), 0
    for matrix, end in zip(out, ends.tolist(), strict=True):
        torch.mm(a[begin:end].t(), b[begin:end], out=matrix)  # zeros for an expert without rows
        begin = end
    return out


def _owners(ends: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the expert of each row, int64[size]; the number of experts for a row of none."""
    return torch.searchsorted(ends, torch.arange(size, device=ends.device), right=True)


def grouped_mm_on_gpu(ends: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, filled: int, k: int) -> torch.Tensor:
    """Computes `GROUPED_MM` with operations that do not wait for a size."""
    size, features = rows.shape
    if _has_kernel(rows, features, w.shape[2]):
        made = F.grouped_mm(rows, w, offs=ends.int())
        return torch.where((torch.arange(size, device=ends.device) < ends[-1])[:, None], made, 0)
    owner, out = _owners(ends, size), rows.new_zeros(size, w.shape[2])
    for i in range(w.shape[0]):
        out = torch.where((owner == i)[:, None], rows @ w[i], out)
    return out


def grouped_outer_on_gpu(ends: torch.Tensor, a: torch.Tensor, b: torch.Tensor, filled: int, k: int) -> torch.Tensor:
    """Computes `GROUPED_OUTER` with operations that do not wait for a size."""
    if _has_kernel(a, a.shape[1], b.shape[1]):
        made = F.grouped_mm(a.t(), b, offs=ends.int())
        # zero for an expert without rows
        return torch.where((ends.diff(prepend=ends.new_zeros(1)) > 0)[:, None, None], made, 0)
    owner = _owners(ends, a.shape[0])
    return torch.stack([torch.where((owner == i)[:, None], a, 0).t() @ b for i in range(ends.shape[0])])


GROUPED_MM: Any = define(
    "grouped_mm",
    "(Tensor ends, Tensor rows, Tensor w, int filled, int k) -> Tensor",
    _grouped_mm,
    lambda ends, rows, w, filled, k: rows.new_empty([rows.shape[0], w.shape[2]]),
)
"""The product of each row with its expert's matrix, [rows, outputs]; zeros after the last end. `ends` is
int64[experts], `rows` [rows, features], `w` [experts, features, outputs]. `filled`: the number of rows that belong to
an expert if all experts are chosen equally often. `k`: the number of experts that a token chooses.
"""
GROUPED_OUTER: Any = define(
    "grouped_outer",
    "(Tensor ends, Tensor a, Tensor b, int filled, int k) -> Tensor",
    _grouped_outer,
    lambda ends, a, b, filled, k: a.new_empty([ends.shape[0], a.shape[1], b.shape[1]]),
)
"""For each expert, the sum of `a[r]` times `b[r]` over its rows, [experts, inputs, outputs]."""
GROUPED = frozenset({GROUPED_MM, GROUPED_OUTER})

ON_GPU: dict[Any, Any] = {
    EXPERT_MM: mm_on_gpu,
    EXPERT_OUTER: outer_on_gpu,
    GROUPED_MM: grouped_mm_on_gpu,
    GROUPED_OUTER: grouped_outer_on_gpu,
}
"""The functions that devices other than a CPU run in place of these operators."""


@register_flop_formula(EXPERT_MM.overloadpacket)
def _flops(expert: torch.Size, rows: torch.Size, w: torch.Size, *_: object, **__: object) -> int:
    return 2 * rows.numel() * w[2]


@register_flop_formula(EXPERT_OUTER.overloadpacket)
def _flops_of_outer(expert: torch.Size, a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    return 2 * a.numel() * b[2]


@register_flop_formula(GROUPED_MM.overloadpacket)
def _flops_of_grouped(ends: torch.Size, rows: torch.Size, w: torch.Size, filled: int, *_: object, **__: object) -> int:
    return 2 * filled * w[1] * w[2]


@register_flop_formula(GROUPED_OUTER.overloadpacket)
def _flops_of_grouped_outer(
    ends: torch.Size, a: torch.Size, b: torch.Size, filled: int, *_: object, **__: object
) -> int:
    return 2 * filled * a[1] * b[1]
