"""Computes the CTC loss. PyTorch's operator returns a table whose width depends on the longest target: if the lengths
are tensors, a trace cannot know this shape.

The operator of this file returns a table with the width that the shape of the targets allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.ops.registration import define

aten = torch.ops.aten
_Lengths = torch.Tensor | Sequence[int]


def _width(targets: torch.Tensor, lengths: _Lengths) -> int:
    longest = (
        (targets.shape[1] if targets.dim() == 2 else targets.numel())
        if isinstance(lengths, torch.Tensor)
        else max(lengths, default=0)
    )
    # The CTC recursion has a blank before, between and after the labels of a target.
    return 2 * longest + 1


def _loss(
    log_probs: torch.Tensor, targets: torch.Tensor, num_inputs: Any, num_targets: Any, *settings: Any
) -> tuple[torch.Tensor, ...]:
    loss, table = aten._ctc_loss(log_probs, targets, num_inputs, num_targets, *settings)
    wide = table.new_zeros(*table.shape[:-1], _width(targets, num_targets))
    wide[..., : table.shape[-1]] = table
    return loss, wide


def _fake(
    log_probs: torch.Tensor, targets: torch.Tensor, num_inputs: Any, num_targets: Any, *settings: Any
) -> tuple[torch.Tensor, ...]:
    length, *batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(*batch, length, _width(targets, num_targets))


def _backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    num_inputs: Any,
    num_targets: Any,
    loss: Any,
    table: torch.Tensor,
    *settings: Any,
) -> torch.Tensor:
    longest = int(torch.as_tensor(num_targets).max()) if len(num_targets) else 0
    narrow = table[..., : 2 * longest + 1].contiguous()
    return aten._ctc_loss_backward(grad, log_probs, targets, num_inputs, num_targets, loss, narrow, *settings)


CTC_LOSS = {torch.ctc_loss, torch.nn.functional.ctc_loss}
"""The functions that also take lengths as numbers, and convert them to a tensor where no trace can see it."""


def with_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a CTC loss with lengths as tensors."""

    def of(lengths: Any) -> Any:
        return torch.tensor(lengths, dtype=torch.long) if isinstance(lengths, (tuple, list)) else lengths

    args = [of(x) if i in (2, 3) else x for i, x in enumerate(args)]
    return args, {name: of(x) if name in ("input_lengths", "target_lengths") else x for name, x in kwargs.items()}


CTC: dict[Any, Any] = {}
"""PyTorch's operators, with lengths that are numbers or tensors, and the operators that are recorded in place of
them.
"""

for _overload, _kind in (("default", "int[]"), ("Tensor", "Tensor")):
    _given = f"Tensor log_probs, Tensor targets, {_kind} num_inputs, {_kind} num_targets"
    _name = "ctc_loss" if _kind == "Tensor" else "ctc_loss_of_lengths"
    CTC[getattr(aten._ctc_loss, _overload)] = define(
        _name, f"({_given}, int blank=0, bool zero_infinity=False) -> (Tensor, Tensor)", _loss, _fake
    )
    CTC[getattr(aten._ctc_loss_backward, _overload)] = define(
        f"{_name}_backward",
        f"(Tensor grad, {_given}, Tensor loss, Tensor table, int blank, bool zero_infinity=False) -> Tensor",
        _backward,
        lambda grad, log_probs, *rest: torch.empty_like(log_probs),
    )
