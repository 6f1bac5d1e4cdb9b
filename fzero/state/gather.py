"""Gathers the whole state on every rank: for small models, tests and inspection."""

from __future__ import annotations

from typing import Any

import torch

from fzero import tree
from fzero.comm.collectives import gather
from fzero.layout import leaf_of
from fzero.mesh import Mesh
from fzero.state.storage import load
from fzero.step import lasting


def whole(state: Any, mesh: Mesh) -> Any:
    """A tree of plain host tensors with the whole value of every leaf; ties stay ties."""
    done: dict[int, torch.Tensor] = {}

    def read(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in done:
            known = leaf_of(x)
            sharded = known is not None and known[0].layout.axes
            value = load(x, mesh.device if sharded else torch.device("cpu"))
            if known is not None and sharded:
                for axis in reversed(sharded):
                    value = gather(mesh, value, axis)
                value = value[: known[0].numel].view(known[0].shape)
            done[id(x)] = value.to("cpu", copy=True)
        return done[id(x)]

    return tree.map(read, lasting(state))
