"""Which cores a rank has, and which of them lie beside its GPU, on machines that this one is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero._utils import cpu_affinity
from fzero._utils.cpu_affinity import cores_at_start, cores_of_host, keep_beside, listed, own_cores, share_of, spelled
from fzero.mesh import unjoined
from fzero.runtime.build import shared_compilation

GPU = torch.device("cuda", 0)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Binds a process with the cores 0 to 7 on a system whose GPU is on a node; the cores that each thread has then."""

    def bind(node: str | None, beside: str | None, threads: dict[int, set[int]]) -> dict[int, set[int]]:
        gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
        monkeypatch.setattr(cpu_affinity, "_SYSTEM", tmp_path)
        monkeypatch.setattr(cpu_affinity, "_at_start", None)
        written = {"bus/pci/devices/0000:3b:01.0/numa_node": node, "devices/system/node/node1/cpulist": beside}
        for name, text in written.items():
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True)
                (tmp_path / name).write_text(text)
        found = {thread: set(own) for thread, own in threads.items()}
        monkeypatch.setattr(os, "listdir", lambda _: [str(x) for x in found])
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: found[thread or 1])
        monkeypatch.setattr(os, "sched_setaffinity", lambda thread, own: found.update({thread: set(own)}))
        keep_beside(GPU)
        return found

    return bind


EIGHT = set(range(8))


def test_threads_are_bound_to_the_cores_of_the_gpus_node(bound: Any) -> None:
    found = bound("1\n", "4-7,12-15\n", {1: EIGHT, 2: EIGHT, 3: {0}})
    assert found == {1: {4, 5, 6, 7}, 2: {4, 5, 6, 7}, 3: {0}}, "the third was bound by someone"
    assert cores_at_start() == EIGHT and own_cores() == {4, 5, 6, 7}
    keep_beside(GPU)
    assert cores_at_start() == EIGHT, "a second mesh"


@pytest.mark.parametrize(
    ("node", "beside"),
    [
        (None, "4-7"),
        ("-1\n", "4-7"),
        ("", "4-7"),
        ("1", None),
        ("1", "0-63"),
        ("1", "8-15"),
        ("1", ""),
        ("1", "all of them"),
    ],
)
def test_nothing_is_bound_where_the_system_says_nothing_else(bound: Any, node: str | None, beside: str | None) -> None:
    assert bound(node, beside, {1: EIGHT}) == {1: EIGHT} and cores_at_start() == EIGHT


def test_this_process_is_bound_with_all_its_threads(tmp_path: Path) -> None:
    """In an interpreter of its own: to the first of its cores, and threads that come later as well."""
    first = min(own_cores())
    text = f"""
import os, threading, torch
from pathlib import Path
from types import SimpleNamespace
from fzero._utils import cpu_affinity as cores
torch.ones(1 << 20).sum()
torch.cuda.get_device_properties = lambda _: SimpleNamespace(pci_domain_id=0, pci_bus_id=0, pci_device_id=0)
cores._SYSTEM = Path({str(tmp_path)!r})
event = threading.Event()
threading.Thread(target=event.wait).start()
cores.keep_beside(torch.device("cuda", 0))
threading.Thread(target=event.wait).start()
print(os.sched_getaffinity(0), {{tuple(os.sched_getaffinity(int(x))) for x in os.listdir("/proc/self/task")}})
event.set()
"""
    for name, said in {
        "bus/pci/devices/0000:00:00.0/numa_node": "0",
        "devices/system/node/node0/cpulist": first,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(str(said))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == f"{{{first}}} {{({first},)}}", done.stderr


def test_lists_of_cores() -> None:
    for some in ({0}, {0, 1, 2}, {5, 7, 8, 63}, set()):
        assert listed(spelled(some)) == some
    assert listed("0-3,8\n") == {0, 1, 2, 3, 8}


def test_shares_of_a_host() -> None:
    def of(*everyone: str) -> list[int]:
        sets = [listed(x) for x in everyone]
        return [share_of(own, sets) for own in sets]

    assert of("0-7") == [8] and of(*["0-7"] * 3) == [2] * 3 and of("0", "0", "0") == [1] * 3
    assert of("0-3", "4-7") == [4, 4], "ranks of two nodes, or bound by Slurm"
    assert of("0-3", "0-3", "4-7") == [2, 2, 4] and of("0-7", "4-7") == [6, 2]


def test_cores_of_a_host_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(pid: int) -> set[int]:
        if pid and gone:
            raise ProcessLookupError
        return EIGHT if pid else {0, 1}

    gone = False
    monkeypatch.setattr(os, "sched_getaffinity", of)
    assert cores_of_host() == EIGHT
    gone = True
    assert cores_of_host() == {0, 1}


@pytest.mark.parametrize("launcher", [range(8), range(2)])
def test_ranks_that_are_bound_to_their_own_cores_are_not_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launcher: range
) -> None:
    """Two ranks of two threads, each on two cores: too many only if both have the same two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*launcher} if pid else {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    unjoined(device="cpu")
    assert ("compute with 2 threads each" in caplog.text) == (len(launcher) == 2)


def told() -> int:
    mesh = fz.make_mesh()
    own = frozenset({0, 1, 2, 3} if mesh.rank < 2 else {4, 5, 6, 7, 8, 9})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_compilation, "own_cores", lambda: own)
        found = shared_compilation.Share(mesh, "host", "the same", {})
    assert found.ranks == [0, 1, 2]
    return found.cores


def test_ranks_divide_the_cores_that_they_share(run_ranks: Any) -> None:
    assert run_ranks(3, told) == [2, 2, 6]
