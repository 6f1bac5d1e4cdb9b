"""A transform whose parameters rest cut along dims, for tests: the layouts that one over activations would ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import Shard
from fzero.transforms.transform import Transform


@dataclass(frozen=True)
class CutDims(Transform):
    """Parameters rest cut along dims over `axis`: `rules` has the dim for the last keys of paths."""

    axis: str
    rules: tuple[tuple[str, Shard], ...]
    order: ClassVar[int] = 70
    name: ClassVar[str] = "cut_dims"

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Shard]:
        found = [dim for key, dim in self.rules if leaf.path.endswith(f"['{key}']")]
        return {self.axis: found[0]} if found else {}

    def conflict(self, other: Transform) -> str | None:
        return None


def cut_dims(axis: str, **rules: Shard) -> CutDims:
    return CutDims(axis, tuple(rules.items()))
