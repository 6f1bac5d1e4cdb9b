"""Reduces blocks of a tensor to one number each, and expands it. A block is 256 consecutive elements of the flattened
tensor, and the number is, for example, a quantization scale.

The numbers of a tensor's blocks have the shape [num_blocks, 1]. A shard consists of complete blocks ([Note: blocks],
fzero/sharding/layout.py), so computing block by block gives the same on shards as on the full tensor. Both directions
are operators, `fzero::block_max` and `fzero::block_expand`, which take the shape of their result; `DECOMPOSITIONS`
expands them into operations that a compiler fuses with the surrounding arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fzero.ops.registration import define

BLOCK = 256  # elements, see [Note: blocks]


def granule(shape: Sequence[int]) -> int:
    """Returns the number that the size of a shard of a tensor of this shape is a multiple of, see
    [Note: blocks].
    """
    # Tensors with a last dim of 1 hold one number per block of another tensor; see [Note: blocks].
    return BLOCK if math.prod(shape) >= 16 * BLOCK and shape[-1] != 1 else 1


def has_blocks(shape: Sequence[int]) -> bool:
    """Returns whether a tensor of this shape is sharded only between blocks: whether it has at least 16 of
    them.
    """
    return granule(shape) == BLOCK


def blocks_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the shape of one number per block of a tensor of this shape.

    Example:
        >>> blocks_shape((100, 70))
        (28, 1)
    """
    return -(-math.prod(shape) // BLOCK), 1


def block_max(x: torch.Tensor) -> torch.Tensor:
    """Returns the largest element of each block. The last block may be short.

    Example:
        >>> block_max(torch.arange(600.0)).flatten()
        tensor([255., 511., 599.])
    """
    return BLOCK_MAX(x, list(blocks_shape(x.shape)))


def block_expand(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns, for each element of a tensor of this shape, the number of its block.

    Memory: as much as the tensor, if run eagerly; compiled, it is part of the kernel that reads it.

    Example:
        >>> block_expand(torch.tensor([[1.0], [2.0]]), (300,)).sum()
        tensor(344.)
    """
    return BLOCK_EXPAND(blocks, list(shape))


def _max(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    flat = x.reshape(-1)
    padding = -flat.numel() % BLOCK
    if padding:  # pad with the last element, which changes no maximum
        flat = torch.cat([flat, flat[-1:].expand(padding)])
    return flat.view(-1, BLOCK).amax(1).view(shape)


def _max_fused(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK), value=-math.inf).view(-1, BLOCK).amax(1).view(shape)


def _expand(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return blocks.reshape(-1, 1).expand(-1, BLOCK).reshape(-1)[: math.prod(shape)].reshape(shape)


BLOCK_MAX: Any = define("block_max", "(Tensor x, SymInt[] shape) -> Tensor", _max, lambda x, shape: x.new_empty(shape))
BLOCK_EXPAND: Any = define(
    "block_expand", "(Tensor blocks, SymInt[] shape) -> Tensor", _expand, lambda blocks, shape: blocks.new_empty(shape)
)
DECOMPOSITIONS: dict[Any, Callable[..., torch.Tensor]] = {BLOCK_MAX: _max_fused, BLOCK_EXPAND: _expand}
"""The operators, as functions of ATen operations."""
