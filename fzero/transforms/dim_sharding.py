"""Defines the common part of transforms whose functions compute with the parts that a mesh axis cuts values in:
tensor_parallel, sequence_parallel, expert_parallel. Acts on the program, in transforms/dim_sharding_pass.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.op_strategies import Attention
from fzero.sharding.shard_regions import Dim
from fzero.transforms.fp8 import Fp8
from fzero.transforms.transform import Transform


@dataclass(frozen=True)
class Cutting(Transform):
    """A mesh axis along which every rank computes with its part of the values. An operation of
    more than `max_replicated_bytes` that every rank would compute whole is an error."""

    axis: str = ""
    max_replicated_bytes: int = 1 << 20
    order: ClassVar[int] = 45
    cuts_batch: ClassVar[bool] = False
    """Whether ranks along the axis have rows of their own; else they have the same batch."""
    way_out: ClassVar[str] = ""
    """What to do about an operation that would be computed whole, besides to allow it."""

    @property
    def flops_axes(self) -> tuple[str, ...]:
        return () if self.cuts_batch else (self.axis,)

    @property
    def stream(self) -> Dim | None:
        """The cut of what passes between blocks."""
        return None

    @property
    def by_position(self) -> Attention | None:
        """The way of attention over queries, keys and values that are cut by position; None if they are not."""
        return None

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Fp8):
            return "fp8 scales whole parameters, and these are computed in parts"
        return super().conflict(other)

    def cut(self, leaf: Leaf) -> Dim | None:
        """The cut of a parameter."""
        return None

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Dim]:
        dim = self.cut(leaf)
        return {} if dim is None else {self.axis: dim}

    def check_passing(self, shapes: Sequence[Sequence[int]], n: int) -> None:
        """Raises where values of these shapes, which blocks hand on, cannot be cut in n parts so."""

    def check(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Raises where parameters cannot be cut so."""
