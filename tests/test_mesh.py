"""Axes, ranks and groups of meshes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.errors import FzeroValueError
from fzero.mesh import AXES, AbstractMesh, Mesh, close_mesh, make_mesh

CPU = torch.device("cpu")
_axes = st.lists(st.sampled_from(AXES), unique=True, min_size=1, max_size=4).flatmap(
    lambda names: st.tuples(*(st.integers(1, 4) for _ in names)).map(lambda sizes: dict(zip(names, sizes, strict=True)))
)


@given(_axes)
def test_ranks_are_laid_out_in_row_major_order(axes):
    size = math.prod(axes.values())
    meshes = [Mesh(axes, rank, CPU) for rank in range(size)]
    grid = torch.arange(size).reshape(tuple(axes.values()))
    for mesh in meshes:
        assert list(mesh.coordinate) == list(axes)
        assert grid[tuple(mesh.coordinate.values())] == mesh.rank
        assert mesh.index(tuple(axes)) == mesh.rank
        assert mesh.size == mesh.axis_size(tuple(axes)) == size


@given(_axes, st.data())
def test_index_over_some_axes_counts_them_once_each(axes, data):
    some = tuple(data.draw(st.lists(st.sampled_from(list(axes)), unique=True, min_size=1)))
    indices = [Mesh(axes, rank, CPU).index(some) for rank in range(math.prod(axes.values()))]
    num, total = AbstractMesh(**axes).axis_size(some), len(indices)
    assert all(indices.count(i) == total // num for i in range(num))


def test_index_takes_several_axes_in_the_order_given():
    mesh = Mesh({"replica": 2, "data": 3}, 5, CPU)
    assert mesh.coordinate == {"replica": 1, "data": 2}
    assert (mesh.index("data"), mesh.index(("replica", "data")), mesh.index(("data", "replica"))) == (2, 5, 5)
    mesh = Mesh({"replica": 2, "data": 3}, 1, CPU)
    assert (mesh.index(("replica", "data")), mesh.index(("data", "replica"))) == (1, 2)


def test_abstract_meshes_are_equal_by_their_axes_in_order():
    a, b = AbstractMesh(replica=2, data=4), AbstractMesh(replica=2, data=4)
    assert a == b and hash(a) == hash(b) and {a: 1}[b] == 1
    assert a != AbstractMesh(data=4, replica=2), "the order of the axes is the order of the ranks"
    assert a != AbstractMesh(replica=2, data=4, device_type="cuda")
    assert str(a) == "replica=2, data=4" and a.size == 8


def test_a_mesh_is_only_itself():
    a, b = Mesh({"data": 2}, 0, CPU), Mesh({"data": 2}, 1, CPU)
    assert a == a and a != b and a != Mesh({"data": 2}, 0, CPU) and a != AbstractMesh(data=2)
    assert len({a, b, a}) == 2
    assert copy.deepcopy({"m": a})["m"] is a


@pytest.mark.parametrize("sizes", [{"data": 0}, {"data": -2}, {"data": 1.5}, {"data": True}, {"data": "2"}], ids=str)
def test_a_size_is_a_positive_whole_number(sizes):
    with pytest.raises(FzeroValueError) as caught:
        AbstractMesh(**sizes)
    assert f"data={sizes['data']!r}: a size is a whole number of at least 1" in str(caught.value)


def test_all_problems_of_a_mesh_are_named_at_once():
    with pytest.raises(FzeroValueError) as caught:
        AbstractMesh(dta=2, model=0, rows=3)
    text = str(caught.value)
    assert "'dta' is not one of" in text and "'rows' is not one of" in text and "model=0" in text
    assert text.splitlines()[-1].startswith("Fix: ")


def _environment(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")


def test_one_process_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for mesh in (make_mesh(device="cpu"), make_mesh(device="cpu", data=-1), make_mesh(device="cpu", replica=1, data=1)):
        assert mesh.size == 1 and mesh.device_mesh is None and mesh.device == CPU
        assert set(mesh.coordinate.values()) == {0}
    assert not dist.is_initialized()
    with pytest.raises(FzeroValueError) as caught:
        mesh.group("data")
    assert "no process group for axis 'data'" in str(caught.value)
    close_mesh()


@pytest.mark.parametrize(
    ("world", "axes", "said"),
    [
        (
            4,
            {"data": 2},
            ["a mesh of 2 devices cannot be made from 4 processes", "WORLD_SIZE: 4", "--nproc-per-node 2"],
        ),
        (
            1,
            {"replica": 2, "data": 4},
            ["a mesh of 8 devices cannot be made from 1 processes", "axes: replica=2, data=4", "--nproc-per-node 8"],
        ),
        (
            4,
            {"replica": 3, "data": -1},
            ["4 processes do not divide by the product of the given axes, 3", "axes: replica=3, data=-1"],
        ),
        (4, {"replica": -1, "data": -1}, ["replica=-1: a size", "data=-1: a size"]),
        (4, {"replica": 0, "data": -1}, ["replica=0: a size"]),
        (4, {"batch": 4}, ["'batch' is not one of"]),
    ],
)
def test_a_mesh_that_cannot_be_made_says_why_before_any_communication(monkeypatch, world, axes, said):
    _environment(monkeypatch, world)
    with pytest.raises(FzeroValueError) as caught:
        make_mesh(device="cpu", **axes)
    text = str(caught.value)
    assert text.splitlines()[-1].startswith("Fix: ")
    for part in said:
        assert part in text
    assert not dist.is_initialized()


def _sums(**axes: int) -> dict:
    """Per axis, the sum over its group of each rank's number as a power of two: the set of ranks in the group."""
    mesh = make_mesh(device="cpu", **axes)
    sums = {}
    for axis in mesh.axes:
        members = torch.tensor(2**mesh.rank)
        dist.all_reduce(members, group=mesh.group(axis))
        sums[axis] = int(members)
    again = make_mesh(device="cpu", **axes)  # joins no second process group
    close_mesh()
    return {
        "axes": mesh.axes,
        "sums": sums,
        "index": mesh.index("data"),
        "again": again.rank == mesh.rank,
        "left": not dist.is_initialized(),
    }


def test_groups_hold_the_ranks_that_differ_in_one_axis(run_ranks):
    for rank, seen in enumerate(run_ranks(2, _sums, replica=1, data=2)):
        assert seen == {
            "axes": {"replica": 1, "data": 2},
            "sums": {"replica": 2**rank, "data": 0b11},
            "index": rank,
            "again": True,
            "left": True,
        }
    for rank, seen in enumerate(run_ranks(3, _sums)):
        assert seen["axes"] == {"data": 3} and seen["sums"] == {"data": 0b111} and seen["index"] == rank
    for rank, seen in enumerate(run_ranks(2, _sums, data=-1, replica=2)):
        assert (
            seen["axes"] == {"data": 1, "replica": 2}
            and seen["sums"] == {"data": 2**rank, "replica": 0b11}
            and seen["index"] == 0
        )


def test_a_mesh_of_another_type_keeps_what_was_said_of_it() -> None:
    assert fz.AbstractMesh(data=4).of_type("cuda") == fz.AbstractMesh(data=4, device_type="cuda")
    assert fz.AbstractMesh(data=4, gpu_direct=True).of_type("cuda").gpu_direct
    assert not fz.AbstractMesh(data=4, shared_memory=False).of_type("cuda").shared_memory
    step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1))
    params, batch = {"w": torch.empty(4, 4, device="meta")}, torch.empty(2, 4, device="meta")
    mesh = fz.AbstractMesh(data=1, gpu_direct=True)
    assert fz.lower(step, mesh, params, batch, device="h100").program.mesh.gpu_direct
