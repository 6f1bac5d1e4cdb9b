"""Defines the common configuration of transforms whose subgraphs compute on shards of values along a dim.

These are tensor_parallel, sequence_parallel and expert_parallel. Acts on the program, in
transforms/dim_sharding_pass.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.operations import Attention
from fzero.sharding.placements import Shard
from fzero.transforms.transform import Transform


@dataclass(frozen=True)
class DimSharding(Transform):
    """A mesh axis over which values are sharded along a dim; every rank computes on its shards.

    An operation that every rank would compute on unsharded values of more than `max_replicated_bytes` is an error.
    """

    axis: str = ""
    max_replicated_bytes: int = 1 << 20
    order: ClassVar[int] = 45
    shards_batch: ClassVar[bool] = False
    """Whether ranks along the axis have different samples of the batch; otherwise they have the same batch."""
    way_out: ClassVar[str] = ""
    """What a user can do about an operation that would be computed unsharded, other than allowing it."""

    @property
    def flops_axes(self) -> tuple[str, ...]:
        # Ranks with different samples do different work; ranks with the same samples share it.
        return () if self.shards_batch else (self.axis,)

    @property
    def stream(self) -> Shard | None:
        """The dim along which values that pass between blocks are sharded; None if they are not."""
        return None

    @property
    def attention(self) -> Attention | None:
        """How attention computes if queries, keys and values are sharded by position; None if they are not."""
        return None

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, DimSharding) and type(other) is not type(self) and other.axis == self.axis:
            return f"{self.name} and {other.name} both shard along {self.axis!r}: let one of them name another axis"
        return super().conflict(other)

    def sharded_dim(self, leaf: Leaf) -> Shard | None:
        """The dim along which a parameter is sharded; None if it is not."""
        return None

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Shard]:
        dim = self.sharded_dim(leaf)
        return {} if dim is None else {self.axis: dim}

    def check_passing(self, shapes: Sequence[Sequence[int]], n: int) -> None:
        """Raises if values of these shapes, which pass between blocks, cannot be sharded over n ranks in this way."""

    def check(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Raises if the parameters cannot be sharded in this way."""
