"""Joins the ranks' parts of a batch into the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero.compiler.abstract_values import batch_inputs
from fzero.errors import FzeroValueError
from fzero.mesh import Mesh
from fzero.transforms.accumulate import Accumulate


def rows(batch: Any, record: Accumulate | None) -> list[bool]:
    """Returns for each tensor of a batch whether each part of the batch has its own samples of it. Any other tensor
    is the same in all parts.
    """
    return [(record or Accumulate()).splits(leaf) for leaf in batch_inputs(batch).leaves]


def check_rows(owner: str, batch: Any, has_rows: Sequence[bool], record: Accumulate | None) -> None:
    """Raises an error if tensors of which each rank has its own samples have different numbers of samples."""
    of = [leaf for leaf, split in zip(batch_inputs(batch).leaves, has_rows, strict=True) if split]
    if len({leaf.shape[0] for leaf in of}) > 1:
        num, odd = record.num_micro_batches if record else 1, min(of, key=lambda leaf: leaf.shape[0]).path
        what = "the tensors of a batch differ in dim 0: which of them have the batch dimension?"
        fix = "name the tensors that are the same on every rank: "
        fix += f"fz.accumulate({num}, replicated=lambda path, leaf: path == {odd!r})"
        raise FzeroValueError(owner, what, [f"{leaf.path} {list(leaf.shape)}" for leaf in of], fix)


def gathered(batch: Any, mesh: Mesh, axes: tuple[str, ...], has_rows: Sequence[bool]) -> Any:
    """Returns the global batch: the parts of the ranks along these axes, concatenated along dim 0."""
    if mesh.axis_size(axes) == 1:
        return batch
    flat, structure = tree.flatten(batch)
    index = torch.tensor(mesh.index(axes), device="cpu")
    here = {"index": index, **{str(i): x for i, x in enumerate(flat)}}
    parts = {int(part["index"]): part for part in mesh.control.all_gather_tensors(here, "check_equivalent")}
    # Keyed by the index along the batch axes. Ranks that differ only along other axes have the same part, which counts
    # once.
    in_order = [[parts[i][str(n)] for n in range(len(flat))] for i in sorted(parts)]
    whole = [
        torch.cat(xs).to(mesh.device) if split else xs[0].to(mesh.device)
        for split, *xs in zip(has_rows, *in_order, strict=True)
    ]
    return tree.unflatten(structure, whole)
