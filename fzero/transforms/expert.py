"""Cuts experts' parameters and the batch over one mesh axis: expert_parallel. Acts on the program, in passes/cut.py;
around products with these parameters ranks exchange rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fzero.arguments import keywords
from fzero.boxes import Dim
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, message
from fzero.layout import Leaf
from fzero.mesh import AbstractMesh
from fzero.trace.cut_rules import nearest
from fzero.transforms.base import Transform, applied
from fzero.transforms.cutting import Cutting
from fzero.transforms.fp8 import Fp8
from fzero.tree import dotted
from fzero.units import parse_bytes, size


@dataclass(frozen=True)
class ExpertParallel(Cutting):
    axis: str = "expert"
    where: Callable[[str, torch.Tensor], bool] = lambda path, leaf: False
    order: ClassVar[int] = 43
    name: ClassVar[str] = "expert_parallel"
    cuts_batch: ClassVar[bool] = True
    way_out: ClassVar[str] = "let `where` accept the parameters of products alone: torch.bmm(rows, w), w [experts, ...]"

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Cutting) and not isinstance(other, ExpertParallel):
            return "values are cut over one axis: leave one out"
        if isinstance(other, Fp8):
            return "fp8 scales whole parameters, and these are computed in parts"
        return super().conflict(other)

    def cut(self, leaf: Leaf) -> Dim | None:
        return Dim(0) if leaf.shape and self.where(leaf.path, leaf.meta) else None

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Dim]:
        dim = self.cut(leaf)
        return {} if dim is None else {self.axis: dim}

    def check(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Raises where no parameter, or one of two tied names, is of experts."""
        cuts = [leaf.role != "mutable" and self.cut(leaf) is not None for leaf in leaves]
        if not any(cuts):
            names = ", ".join(dotted(leaf.path) for leaf in leaves[:5])
            fix = f"let `where` accept parameters [experts, ...], by their path: there are {names}"
            raise FzeroValueError(message(self.name, "does nothing: `where` accepts no parameter", fix=fix))
        torn = [
            f"{dotted(leaves[i].path)} and {dotted(leaves[t].path)}"
            for i, t in enumerate(tied)
            if cuts[i] != cuts[t]
        ]
        if torn:
            fix = "accept both names, or none: they are one tensor"
            raise TransformError(message(self.name, "`where` accepts one of two tied names", torn, fix))

    def __str__(self) -> str:
        where = getattr(self.where, "__name__", repr(self.where))
        said = [] if self.whole_bytes == 1 << 20 else [f"whole_bytes={size(self.whole_bytes)!r}"]
        return f"{self.name}({', '.join([f'axis={self.axis!r}', f'where={where}', *said])})"


@keywords
def expert_parallel(step: Any = None, *, axis: str = "expert", where: Any = None, whole_bytes: int | str = "1MiB") -> Any:
    problems = [] if isinstance(axis, str) and axis else [f"axis={axis!r}: a name of a mesh axis"]
    if problems:
        raise FzeroTypeError(message("expert_parallel", "invalid arguments", problems, "e.g. axis='expert'"))
    return applied(ExpertParallel(axis=axis, whole_bytes=parse_bytes(whole_bytes), where=where), step)
