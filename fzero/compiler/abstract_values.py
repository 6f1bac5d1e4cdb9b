"""Makes trees of abstract tensors, which have only shapes and dtypes, and the table of a batch's tensors."""

from __future__ import annotations

from typing import Any

import torch

from fzero import tree
from fzero._compat import compat
from fzero.ir.from_graph import Inputs
from fzero.sharding.layout import Layout, Leaf, ties
from fzero.step.checks import check_batch, check_init, check_params
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded


def batch_inputs(batch: Any) -> Inputs:
    """Returns the table of a batch's tensors.

    If one tensor occurs several times, the function gets one tensor, too; but a tensor on the meta device counts as a
    separate tensor in each place.
    """
    check_batch(batch)
    flat, structure = tree.flatten(batch)
    leaves = tuple(
        Leaf(p, "batch", tuple(x.shape), Layout(x.dtype)) for p, x in zip(tree.paths(batch, "batch"), flat, strict=True)
    )
    return Inputs(structure, leaves, tuple(ties([None if x.is_meta else x for x in flat])))


def abstract_params(params: Inputs) -> Any:
    """Returns the tree of parameters with unsharded shapes, as meta tensors."""
    return params.rebuild({i: params.leaves[i].meta for i in params.distinct})


def faked(params: Inputs, mode: compat.FakeTensorMode) -> Any:
    """Returns the tree of parameters with unsharded shapes, as fake tensors."""
    leaves = params.leaves
    return params.rebuild({i: compat.new_fake(mode, leaves[i].shape, leaves[i].dtype, "cpu") for i in params.distinct})


def abstract(init_fn: Any) -> Any:
    """Returns the tree that an init function would return, as meta tensors; nothing is computed. Tied tensors stay
    tied."""
    return recorded(init_fn)[0]


def recorded(init_fn: Any, device_type: str = "cpu") -> tuple[Any, Recorded]:
    """Returns the tree of `abstract`, and the traced function, which returns the tensors of that tree."""
    check_init(init_fn)
    made: dict[str, Any] = {}

    def run(key: torch.Tensor) -> list[torch.Tensor]:
        result = init_fn(key)
        check_params(result)
        flat, made["structure"] = tree.flatten(result)
        made["ties"] = ties(flat)
        return flat

    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        graph = record(
            run, [torch.empty(3, dtype=torch.int64, device=device_type)], owner="init", names=["key"], source=init_fn
        )
    returned = graph.outputs
    metas = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta") for n in returned]
    return tree.unflatten(made["structure"], [metas[t] for t in made["ties"]]), graph
