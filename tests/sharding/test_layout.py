"""Flat, padded shards: every rank holds as much as any other, and together they hold the leaf."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.layout import Layout, Leaf, leaf_of, place, shard, ties

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
_shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_meshes = st.sampled_from(
    [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 7}, {"replica": 2, "data": 3}, {"data": 2, "model": 2}]
)
_axes = st.sampled_from([(), ("data",), ("replica", "data"), ("data", "replica")])


def _ranks(axes: dict[str, int]) -> list[Mesh]:
    return [Mesh(axes, rank, CPU) for rank in range(AbstractMesh(**axes).size)]


def _unshard(shards: list[torch.Tensor], leaf: Leaf, meshes: list[Mesh]) -> torch.Tensor:
    """The whole leaf, from the resting tensors of all ranks: what an all_gather and a view give."""
    if not leaf.layout.axes:
        return shards[0]
    parts = {mesh.index(leaf.layout.axes): part for mesh, part in zip(meshes, shards, strict=True)}
    return torch.cat([parts[i] for i in sorted(parts)])[: leaf.numel].view(leaf.shape)


@given(_shapes, _meshes, _axes, st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_unshard_inverts_shard(shape, mesh_axes, axes, dtype, seed):
    axes = tuple(a for a in axes if a in mesh_axes)
    leaf = Leaf("params['w']", "params", shape, Layout(dtype, axes))
    whole = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8).to(dtype)
    meshes = _ranks(mesh_axes)
    shards = [shard(whole, leaf, mesh) for mesh in meshes]
    assert torch.equal(_unshard(shards, leaf, meshes), whole)
    for mesh, part in zip(meshes, shards, strict=True):
        assert tuple(part.shape) == leaf.stored_shape(mesh) and part.dtype == dtype and part.is_contiguous()
        assert part.numel() == leaf.shard_numel(mesh)
        boxes = leaf.boxes(mesh)
        assert torch.equal(part.reshape(-1)[: boxes.numel], whole.reshape(-1)[boxes.start : boxes.stop])
        assert not part.reshape(-1)[boxes.numel :].any(), "the padding is zero"


@given(_shapes, _meshes, _axes)
def test_the_boxes_cut_the_leaf_without_gap_or_overlap(shape, mesh_axes, axes):
    axes = tuple(a for a in axes if a in mesh_axes)
    leaf, meshes = Leaf("w", "params", shape, Layout(torch.float32, axes)), _ranks(mesh_axes)
    ranges = sorted({(boxes.start, boxes.stop) for boxes in map(leaf.boxes, meshes)})
    assert ranges[0][0] == 0 and ranges[-1][1] == leaf.numel
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    size = leaf.sharding(meshes[0]).size
    padding = leaf.shard_numel(meshes[0]) * size - leaf.numel
    assert 0 <= padding < size, "padded to the next multiple, no further"


def test_ranks_of_another_axis_hold_the_same_shard():
    leaf, whole = Leaf("w", "params", (5,), Layout(torch.float32, ("data",))), torch.arange(1.0, 6.0)
    shards = [shard(whole, leaf, mesh).tolist() for mesh in _ranks({"replica": 2, "data": 2})]
    assert shards == [[1, 2, 3], [4, 5, 0]] * 2


@pytest.mark.parametrize("axes", [(), ("data",)])
def test_a_shard_is_a_new_tensor(axes):
    whole = torch.ones(4, 2).T.requires_grad_()
    leaf = Leaf("w", "params", (2, 4), Layout(torch.float32, axes))
    part = shard(whole, leaf, Mesh({"data": 1}, 0, CPU))
    part.zero_()
    assert whole.detach().eq(1).all() and not part.requires_grad


def test_the_layouts_dtype_is_the_one_stored():
    leaf = Leaf("w", "params", (3,), Layout(torch.bfloat16, ("data",)))
    whole = torch.tensor([1.0, 1 / 3, 1e-3])
    shards = [shard(whole, leaf, mesh) for mesh in _ranks({"data": 2})]
    assert torch.equal(torch.cat(shards)[:3], whole.bfloat16())


def test_leaves_print_and_change_as_values():
    leaf = Leaf("params['w']", "params", (3000, 768), Layout(torch.float32))
    assert str(leaf) == "params['w'] (float32[3000, 768])"
    moved = leaf.with_layout(axes=("data",), tier="host", dtype=torch.bfloat16)
    assert (
        moved.layout == Layout(torch.bfloat16, ("data",), "host") and moved.path == leaf.path and leaf.layout.axes == ()
    )
    assert moved.stored_shape(AbstractMesh(data=7)) == (329216,) and leaf.stored_shape(AbstractMesh(data=7)) == (
        3000,
        768,
    )
    assert Leaf("s", "opt_state", (), Layout(torch.int64)).numel == 1


def test_a_placed_tensor_knows_its_leaf():
    leaf, mesh = Leaf("w", "params", (2,), Layout(torch.float32)), Mesh({"data": 1}, 0, CPU)
    tensor = torch.ones(2)
    assert leaf_of(tensor) is None and leaf_of(3) is None
    assert place(tensor, leaf, mesh) is tensor
    assert leaf_of(tensor) == (leaf, mesh)
    found = leaf_of(copy.deepcopy(tensor))
    assert found == (leaf, mesh), "a copied state lives on the same mesh"
    assert leaf_of(tensor + 1) is None, "a result is no part of the state"


def test_ties_are_the_same_object_not_equal_values():
    a, b = torch.ones(2), torch.ones(2)
    assert ties([a, b, a, 1, 1, b]) == [0, 1, 0, 3, 4, 1]
    assert ties([a, a.view(2)]) == [0, 1]
