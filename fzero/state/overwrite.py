"""Writes unsharded values to parameters of a state, in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero import tree
from fzero.checkpoint import tensor_digests
from fzero.comm import control_group
from fzero.mesh import Mesh
from fzero.sharding.layout import leaf_of, shard
from fzero.state import tensor_storage
from fzero.step import State


def overwrite(state: State, values: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Assigns new values to parameters of a state, by their dotted names, and to their compute copies.

    The values are unsharded, and the same on every rank.

    Communication: a few hundred bytes between the ranks. Memory: one shard of the largest parameter.

    Raises:
        DivergenceError: the ranks give different values.
    """
    held = {f"params.{name}": (x, ()) for name, x in values.items()}
    tensor_digests.same(mesh, "overwrite", lambda: held, "write the same on every rank")
    leaves, copies = _named(state.params), _named(state.extras.get("compute"))

    def write() -> None:
        for name, value in values.items():
            known = leaf_of(leaves[name])
            assert known is not None
            tensor_storage.copy(shard(value, known[0], mesh), leaves[name])
            # With mixed precision, steps compute with a copy of the masters. It would be stale until the next update.
            if name in copies:
                # Made from the stored value, as an update makes it, so that the copy is what the next step would
                # otherwise compute.
                tensor_storage.fill(copies[name], tensor_storage.cast(leaves[name], copies[name].dtype))

    with torch.no_grad():
        control_group.run_on_all_ranks(mesh.control, "overwrite", write)


def _named(values: object) -> dict[str, torch.Tensor]:
    return dict(tree.with_names(values))
