"""Which device a process takes, on machines that this one is not."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fzero._compat import allocator, compat
from fzero.comm.control_group import ALONE
from fzero.comm.local_device import choose_device, crowded, device_problems, idle, one_visible, unsupported
from fzero.elastic import abort_transfers
from fzero.errors import FzeroValueError
from fzero.mesh import groups_along, make_mesh
from fzero.runtime.build import inductor


def wanted(asked: str | None, local: int, num_local: int, num_cuda: int, one_visible: bool) -> str:
    """In words of its own: a GPU for each process, by its number unless it sees its own alone; else the CPU, or an
    error if a GPU was asked for."""
    if asked == "cpu" or num_cuda == 0:
        return "error" if asked == "cuda" else "cpu"
    if num_cuda == 1 and (one_visible or num_local == 1):
        return "cuda:0"
    if num_cuda >= num_local and local < num_cuda:
        return f"cuda:{local}"
    return "error" if asked == "cuda" else "cpu, warned"


CASES = [
    case
    for case in itertools.product((None, "cpu", "cuda"), range(4), (1, 2, 4), (0, 1, 2, 8), (False, True))
    if case[1] < case[2] or case[2] == 1  # LOCAL_WORLD_SIZE is 1 where nobody has set it
]


def found(*case: Any) -> str:
    try:
        device, warning = choose_device(*case)
    except FzeroValueError as error:
        refused = "there are fewer devices 'cuda' than processes" in str(error) and str(error).splitlines()[
            -1
        ].startswith("Fix: ")
        return "error" if refused else str(error)
    return f"{device}, warned" if warning else str(device)


def test_every_machine() -> None:
    assert {case: found(*case) for case in CASES} == {case: wanted(*case) for case in CASES}


def test_one_gpu_that_each_process_sees_as_its_own() -> None:
    """LOCAL_RANK=3 of 4 under Slurm or Ray."""
    assert choose_device(None, 3, 4, 1, True) == (torch.device("cuda", 0), None)
    device, warning = choose_device(None, 0, 2, 1, False)
    assert (
        device == torch.device("cpu")
        and warning is not None
        and "CUDA is not used: 1 CUDA device for 2 processes on this host" in warning
    )


def test_accelerators_of_other_kinds_are_named() -> None:
    """Left alone with a warning, and refused where a GPU is asked for."""
    others = unsupported("6.4", 2, True, True)
    assert others == ["2 devices of ROCm 6.4", "an XPU", "MPS"]
    assert unsupported(None, 2, False, False) == unsupported("6.4", 0, False, False) == []
    device, warning = choose_device(None, 0, 1, 0, False, others)
    assert device == torch.device("cpu") and warning is not None
    assert "uses the CPU: 2 devices of ROCm 6.4, an XPU, MPS is present, but fzero does not support it" in warning
    for asked in ("cuda", "xpu", "mps"):
        with pytest.raises(FzeroValueError, match=r"2 devices of ROCm 6\.4: fzero does not support it"):
            choose_device(asked, 0, 1, 0, False, others)
    assert choose_device("cpu", 0, 1, 0, False, others) == (torch.device("cpu"), None)
    assert choose_device(None, 0, 1, 1, False, ["MPS"]) == (torch.device("cuda", 0), None)


def test_processes_with_more_threads_than_cores_are_told() -> None:
    assert idle(4, 4) is idle(8, 4) is None
    told = idle(1, 4)
    assert told is not None and "1 of the 4 cores that each rank has: start the ranks with OMP_NUM_THREADS=4" in told
    assert crowded(16, 1, 16) is crowded(8, 2, 16) is crowded(1, 4, 2) is None
    told = crowded(16, 4, 16)
    assert told is not None and "4 processes of this host" in told and told.endswith("OMP_NUM_THREADS=4")


@pytest.mark.parametrize("gpu", [True, False])
def test_updates_on_the_host_of_a_gpu_say_that_cores_are_idle(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Once, by rank 0, where the functions of the host are built."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cpu = torch.device("cpu")
    mesh: Any = SimpleNamespace(size=1, rank=0, control=ALONE, device=torch.device("cuda", 0) if gpu else cpu)
    with caplog.at_level(logging.WARNING, "fzero"):
        inductor.Compilation({}, mesh, cpu).wait()
    texts = [r.getMessage() for r in caplog.records]
    assert texts == [f"fzero.compile: {idle(torch.get_num_threads(), 8)}"] * gpu


@pytest.mark.parametrize("device", ["xpu", "mps", "tpu", "cuda:1"])
def test_devices_that_there_is_nothing_for(device: str) -> None:
    with pytest.raises(FzeroValueError, match=f"device '{device}' is not supported"):
        make_mesh(device=device)


def test_which_environments_show_one_gpu() -> None:
    assert one_visible({"CUDA_VISIBLE_DEVICES": "3"}) and one_visible({"HIP_VISIBLE_DEVICES": "0"})
    assert (
        not one_visible({})
        and not one_visible({"CUDA_VISIBLE_DEVICES": "0,1"})
        and not one_visible({"CUDA_VISIBLE_DEVICES": ""})
    )


def test_the_mesh_warns_of_gpus_that_it_leaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(UserWarning, match="1 CUDA device for 2 processes on this host"):
        assert make_mesh().device.type == "cpu"
    for rank, device in (("1", None), ("0", "cpu")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert make_mesh(device=device).device.type == "cpu", (
                "one process of a host warns, if nobody asked for the CPU"
            )


def test_devices_that_make_no_mesh() -> None:
    assert device_problems(["cpu", "cpu"]) == device_problems(["cuda a 1 1", "cuda a 2 2", "cuda b 1 1"]) == []
    assert device_problems(["cuda a 1 1", "cpu", "cuda a 2 2", "cpu"]) == ["rank 0 is on 'cuda'", "rank 1 is on 'cpu'"]
    assert device_problems(["cuda a 1 1", "cuda a 2 2", "cuda a 1 1"]) == ["ranks 0, 2 share one GPU, a 1 1"]


def another_device(rank: int) -> None:
    from fzero.comm import local_device

    name_of = local_device._name_of
    local_device._name_of = lambda device: (
        "cuda host gpu-1 1" if rank < 0 or int(os.environ["RANK"]) == rank else name_of(device)
    )
    try:
        make_mesh(data=2, timeout=20)
    finally:
        local_device._name_of = name_of


@pytest.mark.parametrize(("rank", "said"), [(1, "rank 1 is on 'cuda'"), (-1, "ranks 0, 1 share one GPU")])
def test_ranks_on_devices_that_make_no_mesh_all_say_so(run_ranks: Any, rank: int, said: str) -> None:
    for found in run_ranks(2, another_device, rank, expect_error=True, timeout=40):
        assert (
            found.type == "FzeroValueError"
            and said in found.message
            and "Fix: give each process its own GPU" in found.message
        )


def gathers_apart(**axes: int) -> list[Any]:
    """For each axis the ranks of its groups, whether gathers have one of their own, and the sum over it."""
    mesh = make_mesh(device="cpu", timeout=30, **axes)
    object.__setattr__(mesh, "gather_groups", groups_along(mesh.axes, mesh.timeout))  # as on CUDA
    out = []
    for axis in mesh.axes:
        plain, gathers = mesh.group(axis), mesh.group(axis, gathers=True)
        sums = torch.tensor(2**mesh.rank)
        dist.all_reduce(sums, group=gathers)
        same = dist.get_process_group_ranks(plain) == dist.get_process_group_ranks(gathers)
        out.append((axis, same, plain is not gathers and gathers is not dist.group.WORLD, int(sums)))
    return out


def test_gathers_have_process_groups_of_their_own(run_ranks: Any) -> None:
    """Also along an axis that is the whole world, where PyTorch's mesh hands out the default group."""
    for found in run_ranks(2, gathers_apart, data=2):
        assert found == [("data", True, True, 0b11)]
    for rank, found in enumerate(run_ranks(4, gathers_apart, replica=2, data=2)):
        assert found == [("replica", True, True, 0b0101 << rank % 2), ("data", True, True, 0b11 << 2 * (rank // 2))]


def test_gathers_go_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    wait = datetime.timedelta(seconds=77)
    options = compat.nccl_ahead(wait)
    assert options.is_high_priority_stream is True
    engines = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2, Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", engines, raising=False)
    assert compat.nccl_ahead(wait, copies=True).config.cta_policy == 2
    assert options._timeout == wait  # as the group's, or torch warns: `_new_process_group_helper` compares them


def test_groups_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On groups of NCCL, of which this build may have none: its methods stand in for them, between a start and an
    end."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    assert kind is None or all(hasattr(kind, name) for name in ("_group_start", "_group_end", "abort"))
    assert hasattr(dist.ProcessGroup, "_get_backend") and isinstance(dist.distributed_c10d._world.pg_names, dict)
    done: list[str] = []

    def group(name: str) -> Any:
        methods = {n: lambda n=n: done.append(f"{n} {name}") for n in ("_group_start", "_group_end", "abort")}
        return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(**methods))

    def of_the_host(device: Any) -> Any:
        raise RuntimeError("no backend for cuda")

    groups = [SimpleNamespace(_get_backend=of_the_host), group("a"), group("b")]
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=groups))
    compat.abort_groups()
    assert done == ["_group_start a", "abort a", "abort b", "_group_end a"]


def test_transfers_end_when_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort_transfers, "_EVERY", 0.01)
    gone, aborted = set[int](), threading.Event()
    mesh = SimpleNamespace(device_type="cuda", size=2, collective_sequence=SimpleNamespace(gone=lambda: gone))
    monkeypatch.setattr(compat, "abort_groups", aborted.set)
    with abort_transfers.freed(mesh):  # type: ignore[arg-type]
        assert not aborted.wait(0.1)
        gone.add(1)
        assert aborted.wait(10)
    aborted.clear()
    for other in ({"size": 1}, {"device_type": "cpu"}):
        with abort_transfers.freed(SimpleNamespace(**(vars(mesh) | other))):  # type: ignore[arg-type]
            assert not aborted.wait(0.1)


def test_symmetric_memory_is_named_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FzeroValueError, match="applies only to GPUs, and this is a mesh of CPUs"):
        make_mesh(data=1, device="cpu", symmetric_memory=True)
    with pytest.raises(FzeroValueError, match="symmetric_memory"):
        make_mesh(data=1, symmetric_memory="yes")  # type: ignore[arg-type]
    with pytest.raises(FzeroValueError, match=r"(?s)bind_cores=1.*keep_freed_memory='no'"):
        make_mesh(data=1, bind_cores=1, keep_freed_memory="no")  # type: ignore[arg-type]


def test_the_allocator_is_left_alone_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: calls.append(1))
    make_mesh(device="cpu", keep_freed_memory=False)
    assert not calls
    make_mesh(device="cpu")
    assert calls
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    assert "does not register memory" in str(compat.lacks_symmetric_memory())
    register = SimpleNamespace(__doc__="register_mem_pool(pool, symm: bool = False)")
    new = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2, register_mem_pool=register)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", new, raising=False)
    for version, lacks in (((2, 27, 5), True), ((2, 28, 3), False)):
        monkeypatch.setattr("torch.cuda.nccl.version", lambda found=version: found)
        assert (compat.lacks_symmetric_memory() is not None) == lacks
