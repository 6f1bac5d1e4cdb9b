"""Checkpoints and exports as PyTorch's own tools read them: `HuggingFaceStorageReader` of torch.distributed.checkpoint
lists the tensors of both, and loads what is exported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoints import State, as_ranks, meshes, save_as, save_on
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from fzero import checkpoint
from fzero.sharding.layout import Layout, Leaf, place, shard
from fzero.sharding.placements import Shard


def loaded(directory: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        load(wanted, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return wanted


@pytest.mark.parametrize("max_shard_bytes", [10**9, 300], ids=["one file", "several files"])
def test_an_export_is_read_by_torch(tmp_path: Path, max_shard_bytes: int) -> None:
    params = {"layers": [{"w": torch.randn(7, 5), "b": torch.randn(11).bfloat16()} for _ in range(3)]}
    save_on(tmp_path / "ckpt", State(torch.tensor(3), params), data=2)
    files = checkpoint.export(tmp_path / "ckpt", tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert len(files) == 1 or len(files) > 3
    want = {f"layers.{i}.{name}": x for i, layer in enumerate(params["layers"]) for name, x in layer.items()}
    got = loaded(tmp_path / "out", {name: torch.zeros_like(x) for name, x in want.items()})
    assert all(torch.equal(got[name], x) for name, x in want.items())


def test_the_parts_of_a_checkpoint_are_listed_by_torch(tmp_path: Path) -> None:
    """Flat shards as a flattened tensor, shards along a dim and unsharded tensors in their shapes."""
    whole = {"flat": torch.arange(35.0).view(7, 5), "rows": torch.arange(24.0).view(4, 6), "full": torch.ones(2, 3)}
    layouts = {
        "flat": Layout(torch.float32, ("data",)),
        "rows": Layout(torch.float32, ("data",), dims=(Shard(0),)),
        "full": Layout(torch.float32),
    }
    leaves = {name: Leaf(name, "params", tuple(x.shape), layouts[name]) for name, x in whole.items()}
    there = meshes(data=2)

    def save(ranks: Any) -> Any:
        mesh = there[ranks.rank]
        params = {name: place(shard(x, leaves[name], mesh), leaves[name], mesh) for name, x in whole.items()}
        return save_as(ranks, tmp_path, State(1, params))

    path, _ = as_ranks(2, save)
    metadata: Any = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    found = {
        name.removeprefix("params."): (tuple(x.size), sorted((tuple(c.offsets), tuple(c.sizes)) for c in x.chunks))
        for name, x in metadata.items()
    }
    assert found == {
        "flat": ((35,), [((0,), (18,)), ((18,), (17,))]),
        "rows": ((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))]),
        "full": ((2, 3), [((0, 0), (2, 3))]),
    }
    got = loaded(path, {f"params.{name}": torch.zeros(size) for name, (size, _) in found.items()})
    assert all(torch.equal(got[f"params.{name}"].flatten(), x.flatten()) for name, x in whole.items())
