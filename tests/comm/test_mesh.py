"""Axes, ranks and groups of meshes."""

from __future__ import annotations

import copy
import io
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rejections import raises

import fzero as fz
from fzero import mesh as mesh_module
from fzero.comm.launcher_environment import Processes
from fzero.errors import FzeroError, FzeroValueError
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
            ["4 processes are not divisible by the product of the given axes, 3", "axes: replica=3, data=-1"],
        ),
        (
            4,
            {"replica": -1, "data": -1},
            [
                "replica and data are -1, and only one axis can take the remaining processes",
                "make_mesh(replica=-1, data='local')",
            ],
        ),
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


def _hosts(monkeypatch: pytest.MonkeyPatch, world: int, rank: int, local: int, num_local: int | None) -> None:
    """The environment of a process on a host of so many."""
    for name, value in {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": num_local}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"node": -1, "data": "local"}, {"node": 3, "data": 8}),
        ({"node": -1, "data": "local", "model": 2}, {"node": 3, "data": 4, "model": 2}),
        ({"node": 3, "data": "local"}, {"node": 3, "data": 8}),
        ({"data": -1, "model": "local"}, {"data": 3, "model": 8}),
        ({"replica": -1, "data": 4}, {"replica": 6, "data": 4}),
    ],
)
def test_local_is_the_processes_of_a_host(monkeypatch, axes, sizes):
    """On 3 hosts of 8, for each place on the axes behind it."""
    _hosts(monkeypatch, 24, 13, 5, 8)
    assert Processes.of().axes(axes) == sizes


@pytest.mark.parametrize(
    ("host", "axes", "said"),
    [
        ((12, 0, 0, 8), {"node": -1, "data": "local"}, "needs the same number of processes on every host"),
        ((8, 3, 1, 4), {"node": -1, "data": "local"}, "with consecutive ranks"),
        (
            (8, 0, 0, 8),
            {"data": "local", "model": 3},
            "8 processes of this host are not divisible by the axes after",
        ),
        (
            (8, 0, 0, 2),
            {"data": "local", "model": 4},
            "2 processes of this host are not divisible by the axes after",
        ),
        ((8, 0, 0, 4), {"data": "local", "model": -1}, "so they need sizes"),
        ((8, 0, 0, 4), {"node": "local", "data": "local"}, "so they need sizes"),
        ((8, 0, 0, None), {"node": -1, "data": "local"}, "the number of processes of a host is not known"),
        ((8, 0, 0, 4), {"data": "local"}, "a mesh of 4 devices cannot be made from 8 processes"),
        ((8, 0, 0, 4), {"node": 3, "data": "local"}, "a mesh of 12 devices cannot be made from 8 processes"),
        ((8, 0, 0, 4), {"node": -1, "data": "locl"}, "data='locl': a size is a whole number of at least 1"),
    ],
)
def test_local_sizes_that_hosts_do_not_have_are_refused(monkeypatch, host, axes, said):
    _hosts(monkeypatch, *host)
    with pytest.raises(FzeroValueError) as caught:
        make_mesh(device="cpu", **axes)
    assert said in " ".join(str(caught.value).split()) and "Fix: " in str(caught.value)


def _told_axes() -> str:
    """What ranks say that were given different axes."""
    rank = int(os.environ["RANK"])
    try:
        make_mesh(device="cpu", **({"data": 2} if rank else {"replica": 2}))
    except FzeroValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_axes_are_told_each_others(run_ranks):
    for text in run_ranks(2, _told_axes):
        assert "rank 0: replica=2" in text and "rank 1: data=2" in text


def test_a_name_that_is_near_is_meant():
    with pytest.raises(FzeroValueError, match=r"'modl' is not one of .*: did you mean model\?"):
        AbstractMesh(modl=2)


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


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_that_one_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all processes were asked for, and no launcher has started any. A log or a notebook is told nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for stream, axes, told in (
        (_Terminal(), {}, True),
        (_Terminal(), {"data": -1}, True),
        (_Terminal(), {"data": 1}, False),
        (io.StringIO(), {}, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert make_mesh(device="cpu", **axes).size == 1
        said = stream.getvalue()
        assert said.startswith("fzero.make_mesh: one process trains; torchrun ") == told and said.count("\n") == told
    monkeypatch.setattr(sys, "stderr", stream := _Terminal())
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun --nproc-per-node 1 sets it
    make_mesh(device="cpu")
    assert not stream.getvalue()


@pytest.mark.parametrize(("number", "told"), [(1, False), (8, True)])
def test_one_process_on_one_of_several_gpus_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, told: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream := _Terminal())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    mesh_module._say_alone(None)
    text = "fzero.make_mesh: one process trains, on one of 8 GPUs; torchrun --nproc-per-node 8 SCRIPT uses all"
    assert caplog.messages == [text] * told and not stream.getvalue()


def test_a_mesh_of_another_type_keeps_what_was_said_of_it() -> None:
    assert fz.AbstractMesh(data=4).of_type("cuda") == fz.AbstractMesh(data=4, device_type="cuda")
    assert not fz.AbstractMesh(data=4, shared_memory=False).of_type("cuda").shared_memory
    step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1))
    params, batch = {"w": torch.empty(4, 4, device="meta")}, torch.empty(2, 4, device="meta")
    mesh = fz.AbstractMesh(data=1, unified_memory=False)
    assert not fz.lower(step, mesh, params, batch, device="h100").program.mesh.unified_memory


def test_devices_and_timeouts_that_cannot_be() -> None:
    raises(FzeroValueError, lambda: fz.make_mesh(data=1, device="gpu"), "'gpu'", "'cuda'")
    raises(FzeroValueError, lambda: fz.make_mesh(data=1, timeout=0), "timeout=0")
    if not torch.cuda.is_available():
        raises(FzeroValueError, lambda: fz.make_mesh(data=1, device="cuda"), "0 CUDA devices")


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: fz.make_mesh(data=None), "data=None: a size is a whole number of at least 1"),
    (lambda: fz.make_mesh(data="2"), "data='2'"),
    (lambda: fz.make_mesh(data=0), "data=0"),
    (lambda: fz.make_mesh(timeout="x"), "timeout='x'"),
    (lambda: fz.make_mesh(shared_memory=1), "shared_memory=1: must be True or False"),
    (lambda: fz.make_mesh(unified_memory="no"), "unified_memory='no': must be True or False"),
    (lambda: fz.make_mesh(device=0), "device=0: must be 'cpu' or 'cuda'"),
]


def test_wrong_arguments_are_named() -> None:
    for call, words in WRONG:
        raises(FzeroError, call, words)
