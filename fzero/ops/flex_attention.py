"""Writes `flex_attention` out as operations that have sharding rules, derivatives and a cost.

A program does not contain PyTorch's operator, whose kernels skip blocks of the mask: it has no backward on a CPU, and
its arguments are functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask, noop_mask
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero._compat import compat

aten = torch.ops.aten


class DenseBlockMask(BlockMask):
    """A block mask whose function reads a tensor, bool[batch or 1, heads or 1, queries, keys].

    The function of a block mask may read any tensors, which cannot be passed to a block of the program; this one tensor
    can, because it is the only leaf of this class.
    """

    def __init__(self, mask: torch.Tensor):
        self.mask = mask
        # The blocks are never read; `flex_attention` checks their batch and heads.
        super().__init__(
            (mask.shape[2], mask.shape[3]), mask, mask, None, None, None, None, None, None, mask_mod=self.allows
        )

    def allows(self, *at: torch.Tensor) -> torch.Tensor:
        return self.mask[tuple(i if n > 1 else 0 for i, n in zip(at, self.mask.shape, strict=True))]


tree.register(DenseBlockMask, lambda x: ((x.mask,), None), lambda rest, parts: DenseBlockMask(*parts))


def with_dense_masks(arguments: Any, known: dict[int, tuple[BlockMask, DenseBlockMask]]) -> Any:
    """Returns the arguments of a block with a `DenseBlockMask` in place of each block mask. `known` has those made
    before, by the id of the block mask, so that blocks share one tensor."""

    def dense(x: Any) -> Any:
        if type(x) is not BlockMask:
            return x
        if id(x) not in known:
            *outer, queries, keys = x.shape
            batch, heads = (*(1,) * (2 - len(outer)), *outer)
            mask = create_mask(x.mask_mod, batch, heads, queries, keys, str(x.kv_indices.device))
            known[id(x)] = x, DenseBlockMask(mask)
        return known[id(x)][1]

    return tree.map(dense, arguments) if any(type(x) is BlockMask for x in tree.leaves(arguments)) else arguments


def flex_attention(
    query: torch.Tensor,  # [batch, heads, queries, width]
    key: torch.Tensor,  # [batch or 1, key heads, keys, width]
    value: torch.Tensor,  # [batch or 1, key heads, keys, value width]
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `compat.FLEX_ATTENTION`: the output, [batch, heads, queries, value width], and the logsumexp and the
    maximum of the scores, [batch, heads, queries], divided by log(2).

    If `score_mod` returns its score without using it, the output is that of `scaled_dot_product_attention` with the
    mask; otherwise the scores are computed in float32, [batch, heads, queries, keys].
    """
    device, unchanged = query.device.type, []
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))

    def noted(score: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        with _Uses(score) as uses:
            changed = score_mod(score, *at)
        unchanged.append(changed is score and not uses.found)
        return changed

    with torch.autocast(device, enabled=False):
        mask, groups = _mask(block_mask[-1], query, key), query.shape[1] // key.shape[1]
        key, value = (x.to(query.dtype).expand(len(query), *x.shape[1:]) for x in (key, value))
        # Of the scores and what is computed from them, the trace drops what nothing uses.
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ key.repeat_interleave(groups, 1).to(wide).mT * scale
        scores = compat.modified_scores(noted, scores).to(wide)
        scores = scores if mask is None else torch.where(mask, scores, -math.inf)
        if all(unchanged):
            out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)
        else:
            # 0 for a query without keys
            shares = aten._safe_softmax.default(scores, -1)
            out = shares.to(query.dtype) @ value.repeat_interleave(groups, 1)
        return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


class _Uses(TorchFunctionMode):
    """Notes whether an operation gets a tensor, which it may overwrite."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self._tensor, self.found = tensor, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= any(x is self._tensor for x in tree.leaves((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _mask(mask_mod: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The pairs that a mask function allows, bool[batch or 1, heads or 1, queries, keys]. None if it allows all."""
    if mask_mod is noop_mask:
        return None
    of = getattr(mask_mod, "__self__", None)
    if isinstance(of, DenseBlockMask):
        return of.mask
    batch, heads, queries, _ = query.shape
    mask = create_mask(mask_mod, batch, heads, queries, key.shape[2], str(query.device))
    # A dimension that the function does not read is expanded, with a stride of 0.
    for dim in (0, 1):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    return mask
