"""The host tier: where its tensors lie, and copies that are there after their wait and not before."""

from __future__ import annotations

import contextlib
import gc
import mmap
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero._utils import host_memory
from fzero._utils.host_memory import host_offsets, host_pool, host_tensors
from fzero.errors import TierError
from fzero.memory.device_copies import Streams, Unified, copies
from fzero.memory.pinned_staging import Staged
from fzero.memory.simulated_copies import LateCopies

MIB = 1 << 20
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="page-locked memory and streams are CUDA's; there is no GPU here"
)


@pytest.fixture
def mesh() -> fz.Mesh:
    return fz.make_mesh(data=1, device="cpu")


@pytest.fixture
def apart() -> fz.Mesh:
    return fz.make_mesh(data=1, device="cpu", unified_memory=False)


# --- memory ---


def test_tensors_lie_one_behind_the_other(mesh):
    specs = [
        ((4, MIB), torch.float32),
        ((3,), torch.bfloat16),
        ((), torch.int64),
        ((0, 5), torch.float32),
        ((2, 5000), torch.float16),
        ((1,), torch.bool),
    ]
    tensors = host_tensors(specs, mesh)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == specs
    assert all(not t.any() for t in tensors) and all(t.is_contiguous() for t in tensors)
    large, small, scalar, _, more, last = (t.data_ptr() for t in tensors)
    assert large % mmap.PAGESIZE == 0
    assert [small - large, scalar - small, more - scalar, last - more] == [16 * MIB + 17 * 4096, 4096, 4096, 20480]


@pytest.mark.parametrize(
    ("num", "nbytes"), [(1, 1 << 28), (8, 1 << 25), (64, 1 << 22), (1 << 12, 1 << 16), (3, 1 << 28), (256, 1 << 28)]
)
def test_no_leaf_lies_a_multiple_of_2_28_bytes_from_its_moments(num, nbytes):
    """Nor within 64 KiB of one, if the leaf is large enough for that to matter."""
    *offsets, end = host_offsets([nbytes] * num * 3)
    distances = {b - a for a, b in zip(offsets, offsets[num:], strict=False)}
    assert all((1 << 16) <= d % (1 << 28) <= (1 << 28) - (1 << 16) for d in distances)
    assert end <= 3 * num * nbytes * 1.005


def test_each_tensor_is_a_storage_of_its_own(mesh):
    """What compares storages (donation, saving, deep copies) sees leaves, and never a whole state."""
    first, second = host_tensors([((1000,), torch.float32)] * 2, mesh)
    assert first.untyped_storage().data_ptr() == first.data_ptr() and first.untyped_storage().nbytes() == 4000
    second.fill_(3)
    assert not first.any() and second.sum() == 3000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_page_takes_no_memory_before_it_is_written(mesh):
    before = resident_bytes()
    tensors = host_tensors([((64 * MIB,), torch.float32)] * 4, mesh)  # 1 GiB
    assert resident_bytes() - before < 64 * MIB
    tensors[1][: 32 * MIB].fill_(1)
    assert 120 * MIB <= resident_bytes() - before < 256 * MIB


def test_memory_is_freed_after_the_last_tensor(mesh, monkeypatch):
    made: list[Any] = []
    allocated = host_memory._allocated
    monkeypatch.setattr(
        host_memory, "_allocated", lambda *args: made.append(weakref.ref(view := allocated(*args))) or view
    )
    tensors = host_tensors([((5,), torch.float32)] * 3, mesh)
    part = tensors[2][3:]
    del tensors
    gc.collect()
    (alive,) = made
    assert alive() is not None and part.tolist() == [0, 0]
    del part
    gc.collect()
    assert alive() is None


def test_a_pool_is_bytes(mesh):
    pool = host_pool(10_000, mesh)
    assert (
        pool.dtype == torch.uint8
        and pool.shape == (10_000,)
        and pool.data_ptr() % mmap.PAGESIZE == 0
        and not pool.any()
    )
    assert host_pool(0, mesh).shape == (0,)


def test_more_than_there_is_names_the_bytes_and_a_way_out(mesh):
    with pytest.raises(TierError) as error:
        host_tensors([((1 << 60,), torch.int8)], mesh)
    assert "1048576.00 TiB of host memory cannot be allocated" in str(error.value) and "Fix: offload less" in str(
        error.value
    )


def test_pages_are_asked_of_a_node(mesh):
    pool = host_pool(1 << 20, mesh)
    host_memory._prefer(pool.data_ptr(), pool.numel(), 0)
    pool.fill_(1)
    table = Path("/proc/self/numa_maps")
    lines = table.read_text().splitlines() if table.exists() else []
    found = [line for line in lines if line.startswith(f"{pool.data_ptr():x} ".zfill(9))]
    if not found:
        pytest.skip("this system does not show where pages lie")
    assert found[0].split()[1] == "prefer:0", found


# --- copies ---


def test_every_mesh_has_one_carrier(mesh, apart):
    assert type(copies(mesh)) is Unified and copies(mesh) is copies(mesh)
    assert type(copies(apart)) is LateCopies and copies(apart) is copies(apart) is not copies(mesh)


def values() -> list[torch.Tensor]:
    return [
        torch.randn(5, 3),
        torch.tensor(7, dtype=torch.int64),
        torch.randn(4).bfloat16(),
        torch.tensor([True, False]),
        torch.empty(0),
    ]


def test_on_one_memory_a_fetch_is_what_rests(mesh):
    sources = values()
    for start in (copies(mesh).to_host_start, copies(mesh).to_device_start):
        assert all(a is b for a, b in zip(start(sources).wait(), sources, strict=True))


def same(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", ["to_host_start", "to_device_start"])
def test_a_store_fills_what_it_is_given_and_leaves_what_lies_there(mesh, apart, way):
    for carrier in (copies(mesh), copies(apart)):
        sources, into = values(), [torch.zeros_like(v) for v in values()]
        into[2] = sources[2]
        expected, version = [s.clone() for s in sources], sources[2]._version
        filled = getattr(carrier, way)(sources, into).wait()
        carrier.settle(sources)
        assert all(a is b for a, b in zip(filled, into, strict=True))
        assert same(into, expected) and same(sources, expected) and sources[2]._version == version


def test_apart_nothing_is_there_before_the_wait():
    """And what is written to a source before it arrives: the two mistakes that a program can make."""
    go = threading.Event()
    carrier = LateCopies(60, go.wait)
    sources, into = (
        [torch.ones(3), torch.ones(2, dtype=torch.int32)],
        [torch.zeros(3), torch.zeros(2, dtype=torch.int32)],
    )
    copy = carrier.to_device_start(sources, into)
    assert into[0].isnan().all() and (into[1] == -1).all()
    sources[0].fill_(5)
    go.set()
    assert same(copy.wait(), [torch.full((3,), 5.0), torch.ones(2, dtype=torch.int32)])


def test_apart_copies_are_made_in_the_order_of_their_starts():
    go = threading.Semaphore(0)
    carrier = LateCopies(60, go.acquire)
    rest, first, second = torch.zeros(4), torch.ones(4), torch.empty(4)
    store = carrier.to_host_start([first], [rest])
    fetch = carrier.to_device_start([rest], [second])
    go.release()
    store.wait()
    assert second.isnan().all()
    go.release()
    assert same(fetch.wait(), [torch.ones(4)])


def test_a_copy_that_fails_does_so_at_its_wait(apart):
    carrier = copies(apart)
    failing = carrier.to_host_start([torch.ones(3)], [torch.zeros(4)])
    after = carrier.to_host_start([torch.ones(4)], [torch.zeros(4)])
    assert same(after.wait(), [torch.ones(4)])
    for _ in range(2):
        with pytest.raises(TierError) as error:
            failing.wait()
        assert "a copy between host and device failed\n  RuntimeError: " in str(
            error.value
        ) and "last checkpoint" in str(error.value)


def test_a_copy_that_never_comes_is_an_error():
    go = threading.Event()
    copy = LateCopies(0.05, go.wait).to_host_start([torch.ones(1)], [torch.zeros(1)])
    with pytest.raises(TierError, match=r"it was not done in 0\.05 s"):
        copy.wait()
    go.set()


def test_the_thread_ends_with_its_carrier_and_holds_no_tensor():
    carrier = LateCopies(60)
    (thread,) = [t for t in threading.enumerate() if t.name == "fzero-copies" and t.is_alive()][-1:]
    source = torch.ones(2)
    seen = weakref.ref(source)
    carrier.to_host_start([source], [torch.zeros(2)]).wait()
    carrier.to_host_start([], []).wait()  # the thread is at the next job
    del source
    assert seen() is None
    del carrier
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_the_device_alone_has_waited_for_is_not_there_for_the_host() -> None:
    """It is for a copy back, and for the host when it has settled; it is not there where the host writes too early."""
    carrier = LateCopies(60)
    rest, place = torch.zeros(4), torch.zeros(4)

    def held() -> None:
        hold = carrier.to_host_start([torch.ones(4)], [rest]).hold
        assert hold is not None
        hold()
        assert rest.isnan().all()

    held()
    assert same(carrier.to_device_start([rest], [place]).wait(), [torch.ones(4)])
    held()
    carrier.settle([place])
    assert rest.isnan().all()
    carrier.settle([rest[:1]])
    assert same([rest], [torch.ones(4)])
    held()
    rest.fill_(2.0)
    assert same(carrier.to_device_start([rest], [place]).wait(), [torch.ones(4)])


class _Event:
    """An event of CUDA, which notes who waits for it."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool:
        return "host" in self.waits

    def synchronize(self) -> None:
        self.waits.append("host")


def test_a_copy_that_the_device_alone_waits_for_is_waited_for_where_the_host_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By two streams: the host goes on at the wait, and stops where it writes what the copy fills or reads."""
    current = SimpleNamespace(wait_event=lambda event: event.waits.append("device"))
    events: list[_Event] = []

    def event(blocking: bool) -> _Event:
        events.append(_Event())
        return events[-1]

    streams = {
        "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "Event": event,
        "current_stream": lambda device: current,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in streams.items():
        monkeypatch.setattr(torch.cuda, name, value)
    carrier, other = Streams(torch.device("cpu")), torch.zeros(4)
    for way, on_host in (("to_host_start", 1), ("to_device_start", 0)):
        x, y = torch.ones(4), torch.zeros(4)
        copy: Any = getattr(carrier, way)([x], [y])
        (copy.hold or copy.wait)()
        carrier.settle([other])
        carrier.settle([(y, x)[on_host]])
        waits = events[-1].waits
        assert waits == ["device"]
        carrier.settle([(x, y)[on_host]])
        assert waits == ["device", "host"]
    last: Any = carrier.to_host_start([torch.ones(4)], [other])
    last.wait()
    assert events[-1].waits == ["host"] and same([other], [torch.ones(4)])


# --- on a GPU ---


@needs_gpu
def test_page_locked_memory_is_zeros_and_is_unlocked_when_freed():
    mesh = fz.make_mesh(data=1, device="cuda")
    tensors = host_tensors([((4, MIB), torch.float32), ((3,), torch.bfloat16)], mesh)
    assert all(t.is_pinned() and not t.any() for t in tensors)
    address = tensors[0].data_ptr()
    del tensors
    gc.collect()
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostUnregister(address)) != 0  # it is not registered any more


@needs_gpu
def test_streams_copy_what_is_made_before_the_start_and_is_read_after_the_wait():
    mesh = fz.make_mesh(data=1, device="cuda")
    carrier = copies(mesh)
    assert type(carrier) is Streams
    (rest,) = host_tensors([((4096, 4096), torch.float32)], mesh)
    rest.fill_(1 / 4096)
    place = torch.full((4096, 4096), torch.nan, device="cuda")
    x = carrier.to_device_start([rest], [place]).wait()[0]
    for _ in range(20):
        x = x @ place  # a matrix of 1 / 4096 is its own square
    carrier.settle([rest])
    rest.zero_()  # the copy has read it
    copy = carrier.to_host_start([x * 4096], [rest])
    assert torch.allclose(copy.wait()[0], torch.ones(()))


def test_a_state_beside_a_gpu_lies_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are locked by the piece; on a CPU a page takes no memory before it is written, a small one less of it."""
    asked, allocated = [], host_memory._allocated

    def noted(nbytes: int, device: torch.device, huge: bool, *owner: str) -> memoryview:
        asked.append(huge)
        return allocated(nbytes, torch.device("cpu"), huge, *owner)

    monkeypatch.setattr(host_memory, "_allocated", noted)
    for kind in ("cuda", "cpu"):
        (x,) = host_memory.host_tensors([((1 << 20,), torch.float32)], SimpleNamespace(device=torch.device(kind)))  # type: ignore[arg-type]
        assert x.shape == (1 << 20,) and not x.any()
    assert asked == [True, False]


def test_batches_go_through_a_ring_of_buffers(monkeypatch):
    """What is copied from them is there before they are used again; a batch that is larger makes them larger."""

    class Event:
        waited = 0

        def record(self):
            pass

        def query(self):
            return False

        def synchronize(self):
            Event.waited += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    staged, places = Staged(torch.device("cpu")), set()
    for step in range(6):
        rows = torch.randn(4 + step % 2, 3, generator=torch.Generator().manual_seed(step))
        given = [rows.T, torch.tensor(step), torch.zeros(0, 2), rows > 0, rows.bfloat16()]
        out = staged(given)
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype and a.is_contiguous() for a, b in zip(out, given, strict=True)
        )
        places.add(out[0].data_ptr())
    assert len(places) >= 4 and Event.waited == 2
