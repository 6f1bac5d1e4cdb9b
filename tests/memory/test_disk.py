"""The disk tier of a rank: what is written is read, whatever its size and wherever it lies; files are private and leave
nothing; faults become errors."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import logging
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fzero as fz
from fzero.errors import FzeroValueError, TierError
from fzero.memory import disk, scratch_allocation, scratch_files
from fzero.mesh import Mesh
from fzero.sharding.layout import Layout, Leaf, extent_of, leaf_of, place

pytestmark = pytest.mark.forks

BLOCK, MIB = disk.ALIGNMENT, 1 << 20
MEMORY = Path("/dev/shm")
MESH = Mesh({"data": 1}, 0, torch.device("cpu"))


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Aligned bytes that are equal nowhere near each other."""
    out = disk.aligned(nbytes)
    return out.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def read(found: disk.ScratchFiles, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
    out = disk.aligned(found.nbytes - offset if nbytes is None else nbytes)
    found.read([(offset, out)]).wait()
    return out


def ours(path: Path) -> list[Path]:
    """The scratch files of this process under a path. They have no names, but can be opened through these links."""
    links = sorted(Path("/proc/self/fd").iterdir(), key=lambda link: int(link.name))
    targets = {link: os.readlink(link) for link in links if os.path.islink(link)}
    return [link for link, to in targets.items() if to.startswith(f"{path}/") and to.endswith(" (deleted)")]


@pytest.fixture(params=["disk", "memory"])
def root(request: Any, tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk that is written directly, as far as this machine's temporary files are; and one on a file
    system that only pretends."""
    if request.param == "disk":
        yield tmp_path
    elif not os.access(MEMORY, os.W_OK):
        pytest.skip("this machine has no file system in memory")
    else:
        path = MEMORY / f"test-disk-{os.getpid()}"
        path.mkdir()
        yield path
        left = list(path.iterdir())
        shutil.rmtree(path)
        assert not left


# --- bytes ---


@pytest.mark.parametrize("num", [1, 3])
def test_what_is_written_is_read(root: Path, num: int) -> None:
    paths = [root] * num
    with_tail = 9 * MIB + 5 * BLOCK
    found = disk.ScratchFiles(paths, with_tail)
    assert len(ours(root)) == num
    value = pattern(with_tail)
    found.write([(0, value)]).wait()
    assert torch.equal(read(found), value)
    other = pattern(5 * MIB, 1)  # over the ends of stripes
    found.write([(3 * MIB + BLOCK, other)]).wait()
    value[3 * MIB + BLOCK : 8 * MIB + BLOCK] = other
    assert torch.equal(read(found), value)
    assert found.bytes_written == with_tail + 5 * MIB and found.bytes_read == 2 * with_tail
    found.close()


def test_files_of_a_stripe_hold_what_lies_there(tmp_path: Path) -> None:
    """Piece k of 4 MiB is in directory k % n: what a disk of several is for."""
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    found = disk.ScratchFiles(paths, 9 * MIB)
    value = pattern(9 * MIB)
    found.write([(0, value)]).wait()
    first, second = (bytearray(ours(path)[0].read_bytes()) for path in paths)
    assert torch.equal(torch.frombuffer(first, dtype=torch.uint8), torch.cat([value[: 4 * MIB], value[8 * MIB :]]))
    assert torch.equal(torch.frombuffer(second, dtype=torch.uint8), value[4 * MIB : 8 * MIB])
    found.close()


@hypothesis.given(
    num=st.integers(1, 3),
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=6),
    shuffle=st.randoms(use_true_random=False),
)
@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_runs_go_where_they_should(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num: int, sizes: list[tuple[int, int]], shuffle: Any
) -> None:
    """In any order, with gaps in the file and in memory, against a plain array; with small stripes, so that there are
    many ends."""
    monkeypatch.setattr(scratch_files, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(scratch_allocation, "PIECE", 4 * BLOCK)
    total = sum(gap + size for gap, size in sizes) * BLOCK
    found, expected = disk.ScratchFiles([tmp_path] * num, total), torch.zeros(total, dtype=torch.uint8)
    memory, runs, at = pattern(total), [], 0
    for gap, size in sizes:
        at += gap * BLOCK
        runs.append((at, memory[at : at + size * BLOCK]))
        expected[at : at + size * BLOCK] = memory[at : at + size * BLOCK]
        at += size * BLOCK
    shuffle.shuffle(runs)
    found.write(runs).wait()
    assert torch.equal(read(found), expected)
    back = [(offset, disk.aligned(part.numel())) for offset, part in runs]
    found.read(back).wait()
    assert all(torch.equal(part, memory[offset : offset + part.numel()]) for offset, part in back)
    found.close()


def calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, list[int]]]:
    """Offset and sizes of each system call from now on."""
    seen, real = [], getattr(os, name)

    def note(fd: int, views: list[memoryview], at: int) -> int:
        seen.append((at, [len(v) for v in views]))
        return real(fd, views, at)

    monkeypatch.setattr(os, name, note)
    return seen


def test_neighbours_are_one_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever they lie in memory; runs of more than 4 MiB are several."""
    found = disk.ScratchFiles(tmp_path, 16 * MIB)
    seen = calls(monkeypatch, "preadv")
    found.read([(i * BLOCK, disk.aligned(BLOCK)) for i in range(2, 5)] + [(8 * BLOCK, disk.aligned(BLOCK))]).wait()
    assert sorted(seen) == [(2 * BLOCK, [BLOCK] * 3), (8 * BLOCK, [BLOCK])]
    seen.clear()
    found.read([(MIB, disk.aligned(9 * MIB))]).wait()
    assert sorted(seen) == [(MIB, [4 * MIB]), (5 * MIB, [4 * MIB]), (9 * MIB, [MIB])]
    found.close()
    striped = disk.ScratchFiles([tmp_path] * 2, 16 * MIB)
    seen.clear()
    striped.read([(MIB, disk.aligned(9 * MIB))]).wait()
    assert sorted(seen) == [(0, [4 * MIB]), (MIB, [3 * MIB]), (4 * MIB, [2 * MIB])]
    striped.close()


def test_bytes_that_were_never_written_are_zeros(root: Path) -> None:
    found = disk.ScratchFiles(root, 6 * MIB)
    found.write([(MIB, pattern(BLOCK))]).wait()
    value = read(found)
    assert not value[:MIB].any() and value[MIB : MIB + BLOCK].any() and not value[MIB + BLOCK :].any()
    found.close()


def test_blocks_are_there_from_the_start(root: Path) -> None:
    found = disk.ScratchFiles(root, 3 * MIB + 1)
    status = ours(root)[0].stat()
    assert status.st_size == found.nbytes == 3 * MIB + BLOCK and status.st_blocks * 512 >= found.nbytes
    found.close()


def test_nothing_to_move(tmp_path: Path) -> None:
    found = disk.ScratchFiles(tmp_path, 0)
    found.read([]).wait()
    found.write([(0, disk.aligned(0))]).wait()
    assert found.bytes_written == 0 and found.busy_seconds == 0
    found.close()


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, 2 * MIB - 1, 2 * MIB, 33 * MIB + 5])
def test_memory_for_direct_io(nbytes: int) -> None:
    """Of its own, all of it, and as long as any part of it is in use."""
    memory, other = disk.aligned(nbytes), disk.aligned(nbytes)
    assert memory.numel() == nbytes and memory.data_ptr() % (2 * MIB if nbytes >= 2 * MIB else BLOCK) == 0
    tail = memory.fill_(3)[nbytes // 2 :]
    other.fill_(4)
    del memory
    gc.collect()
    assert bool((tail == 3).all())


def test_runs_that_cannot_be_moved(tmp_path: Path) -> None:
    found, memory = disk.ScratchFiles(tmp_path, 4 * BLOCK), disk.aligned(4 * BLOCK)
    bad = [
        (1, memory[:BLOCK]),
        (0, memory[:100]),
        (0, memory[8 : BLOCK + 8]),
        (BLOCK, memory),
        (-BLOCK, memory[:BLOCK]),
        (0, memory.view(torch.int32)),
    ]
    with pytest.raises(FzeroValueError) as caught:
        found.write(bad)
    text = str(caught.value)
    assert (
        "6 runs" in text
        and text.count("not aligned to 4096") == 3
        and text.count("not within the 16384") == 2
        and "not a flat uint8" in text
    )
    assert found.bytes_written == 0
    found.close()


def test_transfers_are_taken_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever files they are of. With one thread held back, all others wait behind it."""
    monkeypatch.setattr(scratch_files, "_pool", scratch_files._ThreadPool())
    one, two = (disk.ScratchFiles(tmp_path, 8 * BLOCK, num_threads=1) for _ in range(2))
    seen, go, real = [], threading.Event(), os.pwritev

    def late(fd: int, views: list[memoryview], at: int) -> int:
        go.wait()
        seen.append(at // BLOCK)
        return real(fd, views, at)

    monkeypatch.setattr(os, "pwritev", late)
    transfers = [(one, two)[i % 2].write([(i * BLOCK, pattern(BLOCK, i))]) for i in range(8)]
    assert not any(t.done for t in transfers)
    go.set()
    for transfer in transfers:
        transfer.wait()
    assert seen == list(range(8)) and all(t.done and t.seconds > 0 for t in transfers)
    assert torch.equal(read(two, 7 * BLOCK), pattern(BLOCK, 7)) and not read(one, 7 * BLOCK).any()
    one.close()
    two.close()


def test_a_transfer_keeps_its_files_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, go, real = disk.ScratchFiles(tmp_path, BLOCK), threading.Event(), os.pwritev
    written: list[bytes] = []

    def late(fd: int, views: list[memoryview], at: int) -> int:
        go.wait()
        written.append(bytes(views[0]))
        return real(fd, views, at)

    monkeypatch.setattr(os, "pwritev", late)
    transfer, alive = found.write([(0, pattern(BLOCK))]), weakref.ref(found)
    del found
    gc.collect()
    assert alive() is not None and ours(tmp_path)
    go.set()
    transfer.wait()
    gc.collect()
    assert written == [bytes(pattern(BLOCK).numpy())] and alive() is None and not ours(tmp_path)


def test_counters(tmp_path: Path) -> None:
    found = disk.ScratchFiles(tmp_path, 8 * MIB)
    transfer = found.write([(0, pattern(8 * MIB))])
    transfer.wait()
    assert transfer.nbytes == found.bytes_written == 8 * MIB and found.bytes_read == 0
    busy = found.busy_seconds
    assert 0 < busy <= transfer.seconds and found.busy_seconds == busy  # nothing moves any more
    found.close()


# --- private, and gone ---


def test_only_this_user_can_look(root: Path) -> None:
    before = os.umask(0)
    try:
        found = disk.ScratchFiles(root, MIB)
    finally:
        os.umask(before)
    (file,) = ours(root)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_nlink == 0 and not list(root.iterdir())
    found.close()


def test_nothing_is_left(root: Path) -> None:
    num = len(os.listdir("/proc/self/fd"))
    closed, dropped = disk.ScratchFiles([root, root], MIB), disk.ScratchFiles(root, MIB)
    assert len(ours(root)) == 3
    closed.close()
    closed.close()
    assert len(ours(root)) == 1
    del dropped
    gc.collect()
    assert not list(root.iterdir()) and len(os.listdir("/proc/self/fd")) == num


def test_closed_files_say_so(tmp_path: Path) -> None:
    found = disk.ScratchFiles(tmp_path, MIB)
    found.close()
    with pytest.raises(TierError, match="closed before"):
        found.read([(0, disk.aligned(BLOCK))]).wait()


def run(code: str, *args: Any) -> subprocess.Popen[str]:
    """Another process, whose first lines are always the same."""
    head = "import os, sys, torch\nfrom fzero.memory import disk\npath = sys.argv[1]\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


HOLD = """
    files = disk.ScratchFiles([path, path], 1 << 20)
    files.write([(0, disk.aligned(1 << 20).fill_(9))]).wait()
    print("ready", flush=True)
    sys.stdin.read()
    back = disk.aligned(1 << 20)
    files.read([(0, back)]).wait()
    print(bool((back == 9).all()), flush=True)
"""


def test_the_kernel_frees_the_files_of_a_killed_run(tmp_path: Path) -> None:
    killed = run(HOLD, tmp_path)
    assert killed.stdout is not None and killed.stdout.readline() == "ready\n"
    assert not list(tmp_path.iterdir()), "they have no names"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with pytest.raises(FileNotFoundError):
        Path(f"/proc/{killed.pid}/fd").stat()


def test_nothing_is_left_at_exit(tmp_path: Path) -> None:
    """With a write under way. Each end is that of a process of its own, which has imported nothing anew."""
    ends = {"": 0, "sys.exit(3)": 3, "raise ValueError": 1, "keep = files; keep.cycle = keep": 0}
    process = run(
        """
        for end in sys.argv[2:]:
            pid = os.fork()
            if pid == 0:
                break
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.listdir(path), flush=True)
        else:
            os._exit(0)
        files = disk.ScratchFiles([path, path], 1 << 24)
        files.write([(0, disk.aligned(1 << 24))])
        exec(end)
        """,
        tmp_path,
        *ends,
    )
    out, _ = process.communicate(timeout=120)
    assert out.splitlines() == [f"{code} []" for code in ends.values()]


def test_a_fork_leaves_its_parents_files_alone(tmp_path: Path) -> None:
    process = run(
        """
        files = disk.ScratchFiles(path, 1 << 20)
        files.write([(0, disk.aligned(1 << 20).fill_(9))]).wait()
        pid = os.fork()
        if pid == 0:
            try:
                files.read([(0, disk.aligned(4096))])
            except ValueError as error:
                assert "was forked" in str(error)
                own = disk.ScratchFiles(path, 4096)
                own.write([(0, disk.aligned(4096).fill_(5))]).wait()
                del own, files
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        back = disk.aligned(1 << 20)
        files.read([(0, back)]).wait()
        print(len(os.listdir(path)), bool((back == 9).all()))
        """,
        tmp_path,
    )
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and out == "0 True\n"


# --- direct, or not ---


def test_memory_is_not_direct_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access(MEMORY, os.W_OK):
        pytest.skip("this machine has no file system in memory")
    monkeypatch.setattr(scratch_allocation, "_told", set())
    with caplog.at_level(logging.WARNING, "fzero"):
        for _ in range(2):
            found = disk.ScratchFiles([MEMORY, MEMORY], MIB)
            assert not found.direct
            found.close()
    assert [r.getMessage().split(" (O_DIRECT)")[0] for r in caplog.records] == [
        f"fzero.offload: {MEMORY} cannot be read and written directly"
    ]


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_without_direct_io(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refuses: str) -> None:
    """A file system that refuses the flag, or accepts it and then refuses to write."""
    if refuses == "open":
        real = fcntl.fcntl

        def fcntl_(fd: int, command: int, flags: int = 0) -> int:
            if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, command, flags)

        monkeypatch.setattr(fcntl, "fcntl", fcntl_)
        found = disk.ScratchFiles(tmp_path, MIB)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fails(errno.EINVAL))
            found = disk.ScratchFiles(tmp_path, MIB)
    assert not found.direct and len(ours(tmp_path)) == 1
    found.write([(0, pattern(MIB))]).wait()
    assert torch.equal(read(found), pattern(MIB))
    found.close()


def test_direct_io_goes_past_the_page_cache(tmp_path: Path) -> None:
    found = disk.ScratchFiles(tmp_path, MIB)
    if not found.direct:
        pytest.skip("temporary files of this machine are not written directly")
    found.write([(0, pattern(MIB))]).wait()
    data = ours(tmp_path)[0]
    assert not cached_pages(data), (
        "asked before anything reads it, for a read that may not wait starts one all the same"
    )
    data.read_bytes()
    assert cached_pages(data)
    found.close()


def cached_pages(path: Path) -> int:
    """How many pages of a file the page cache holds."""
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        held = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        try:
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), held
            )
            assert failed == 0, os.strerror(ctypes.get_errno())
            return sum(page & 1 for page in held)
        finally:
            del start


# --- faults ---


def fails(code: int, after: int = 0, name: str = "pwritev") -> Callable[..., int]:
    """A system call that works `after` times."""
    real, left, lock = getattr(os, name), [after], threading.Lock()

    def call(fd: int, views: list[memoryview], at: int) -> int:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
        return real(fd, views, at)

    return call


@pytest.mark.parametrize(("operation", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("read", errno.EIO)])
def test_a_fault_in_the_middle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operation: str, code: int) -> None:
    """One error, with what, where and what now; afterwards the same threads serve the same files."""
    found, value = disk.ScratchFiles(tmp_path, 40 * MIB), pattern(40 * MIB)
    found.write([(0, value)]).wait()
    with monkeypatch.context() as patch:
        name = "pwritev" if operation == "write" else "preadv"
        patch.setattr(os, name, fails(code, after=3, name=name))
        transfer = getattr(found, operation)([(0, pattern(40 * MIB, 1))])
        for _ in range(2):
            with pytest.raises(TierError) as caught:
                transfer.wait()
            text = str(caught.value)
            assert text.startswith(
                f"fzero.offload: a {operation} of scratch files failed: {os.strerror(code)}\n  {tmp_path}: {4 * MIB} "
                f"bytes at offset "
            )
            assert int(text.split("at offset ")[1].split()[0]) % (4 * MIB) == 0 and "last checkpoint" in text
            assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == code
    moved = found.bytes_written - 40 * MIB if operation == "write" else found.bytes_read
    assert moved == 3 * 4 * MIB, "three pieces were done"
    found.write([(0, value)]).wait()
    assert torch.equal(read(found), value)
    found.close()
    assert not ours(tmp_path)


def test_a_thread_survives_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also what is no OSError: the wait ends, the error is there, and all threads go on."""
    monkeypatch.setattr(scratch_files, "_pool", scratch_files._ThreadPool())
    found = disk.ScratchFiles(tmp_path, 16 * MIB, num_threads=2)
    before = threading.active_count()
    for broken in (MemoryError("no memory"), SystemExit(1), KeyboardInterrupt()):

        def call(*_: Any, broken: BaseException = broken) -> int:
            raise broken

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", call)
            with pytest.raises(TierError, match=r"failed: (no memory|1|KeyboardInterrupt)\n") as caught:
                found.read([(0, disk.aligned(16 * MIB))]).wait()
            assert caught.value.__cause__ is broken
    assert not read(found).any() and threading.active_count() == before + 2
    found.close()


@pytest.mark.parametrize("short", [BLOCK, 3 * BLOCK + 777, MIB - 1])
def test_short_transfers_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short: int) -> None:
    """From the last whole block, over several runs."""
    found, value = disk.ScratchFiles([tmp_path] * 2, 6 * MIB), pattern(6 * MIB)

    def shortened(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def call(fd: int, views: list[memoryview], at: int) -> int:
            memory, left = [], short - short % BLOCK
            for view in views:
                memory.append(view[:left])
                left -= len(memory[-1])
            return min(real(fd, [m for m in memory if len(m)], at) + short % BLOCK, sum(map(len, views)))

        return call

    parts = [(at, value[at : at + MIB + BLOCK]) for at in range(0, 5 * MIB, MIB + BLOCK)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", shortened("pwritev"))
        found.write(parts).wait()
    end = parts[-1][0] + parts[-1][1].numel()
    assert torch.equal(read(found, 0, end), value[:end])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", shortened("preadv"))
        assert torch.equal(read(found, 0, end), value[:end])
    found.close()


@pytest.mark.parametrize("num", [0, 100])
def test_a_transfer_that_does_not_go_on_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num: int) -> None:
    found = disk.ScratchFiles(tmp_path, MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: num)
        with pytest.raises(TierError, match="it stopped after 0 of 1048576 bytes"):
            read(found)
    found.close()


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    """By someone else; really."""
    found = disk.ScratchFiles(tmp_path, 8 * MIB)
    os.truncate(ours(tmp_path)[0], 5 * MIB)
    with pytest.raises(TierError, match=f"it stopped after {MIB} of {4 * MIB} bytes"):
        read(found)
    assert read(found, 0, MIB).numel() == MIB
    found.close()


def test_closing_under_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is being moved is finished, what is not fails, and no wait hangs."""
    monkeypatch.setattr(scratch_files, "_pool", scratch_files._ThreadPool())
    found, begun, go, real = (
        disk.ScratchFiles(tmp_path, 16 * MIB, num_threads=1),
        threading.Event(),
        threading.Event(),
        os.pwritev,
    )

    def late(fd: int, views: list[memoryview], at: int) -> int:
        begun.set()
        go.wait()
        return real(fd, views, at)

    monkeypatch.setattr(os, "pwritev", late)
    transfer = found.write([(0, disk.aligned(16 * MIB))])
    begun.wait()
    closing = threading.Thread(target=found.close)
    closing.start()
    while not found._open._closed:
        pass
    assert ours(tmp_path), "a piece is being written"
    go.set()
    closing.join()
    with pytest.raises(TierError, match="closed before it was done"):
        transfer.wait()
    assert found.bytes_written == 4 * MIB and not ours(tmp_path)


# --- paths that will not do ---


def test_every_bad_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, good, closed = tmp_path / "file", tmp_path / "good", tmp_path / "closed"
    file.write_text("")
    good.mkdir()
    closed.mkdir()
    access = os.access
    # who runs this may be root
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and access(path, mode))
    with pytest.raises(FzeroValueError) as caught:
        disk.check([tmp_path / "none", file, closed, good, good], 1 << 60, num_ranks=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"fzero.offload: cannot keep {2**20:.2f} TiB a rank on disk"
    assert lines[1:4] == [
        f"  {tmp_path / 'none'}: the directory does not exist",
        f"  {file}: it is not a directory",
        f"  {closed}: it is not writable",
    ]
    assert lines[4].startswith(f"  {good}: {2 * 2 * 2**20 / 5:.2f} TiB needed, ") and lines[4].endswith(" free")
    assert lines[5:] == ["Fix: free space, or give other paths"]
    with pytest.raises(FzeroValueError, match="no path is given"):
        disk.ScratchFiles([], 0)
    assert not ours(good)


def test_what_is_free_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two directories would do, both together will not: they are on one disk."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(scratch_allocation, "_free", lambda path: 8 * MIB)
    disk.check(paths, 8 * MIB)
    with pytest.raises(FzeroValueError, match=f"{paths[0]}, {paths[1]}: 12.0 MiB needed, 8.0 MiB free"):
        disk.check(paths, 12 * MIB)
    with pytest.raises(FzeroValueError, match=r"16\.0 MiB needed, 8\.0 MiB free"):
        disk.check(paths, 8 * MIB, num_ranks=2)


def test_a_disk_that_fills_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are gone when they are asked for: an error before anything runs, and nothing stays."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if nbytes == 4 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    num = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FzeroValueError, match=f"{paths[1]}: No space left on device: 4.0 MiB needed, ") as caught:
        disk.ScratchFiles(paths, 9 * MIB)
    assert str(paths[0]) not in str(caught.value) and not ours(paths[0]) and not ours(paths[1])
    assert len(os.listdir("/proc/self/fd")) == num


def test_a_limit_of_the_system(tmp_path: Path) -> None:
    """A real refusal: files of this process may not be so large."""
    process = run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            disk.ScratchFiles(path, 1 << 22)
        except ValueError as error:
            print(error)
        """,
        tmp_path,
    )
    out, _ = process.communicate(timeout=120)
    assert f"{tmp_path}: File too large: 4.0 MiB needed, " in out and not list(tmp_path.iterdir())


# --- leaves ---


def leaf(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Leaf:
    return Leaf(f"params[{name!r}]", "params", shape, Layout(dtype, tier="disk"))


SHAPES = [
    ((), torch.float32),
    ((3, 5), torch.float64),
    ((0, 4), torch.float32),
    ((1025,), torch.bfloat16),
    ((2, 1024, 1025), torch.float32),
    ((7,), torch.bool),
]


def value_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_leaves_at_rest(root: Path) -> None:
    """Packed in order, one range of files for all, which live as long as any of them."""
    tensors = disk.rest([leaf(str(i), shape, dtype) for i, (shape, dtype) in enumerate(SHAPES)], MESH, [root, root])
    extents: list[Any] = [extent_of(t) for t in tensors]
    assert [t.device.type for t in tensors] == ["meta"] * len(SHAPES) and [
        (tuple(t.shape), t.dtype) for t in tensors
    ] == SHAPES
    sizes = [disk.padded(t.nbytes) for t in tensors]
    assert [e.offset for e in extents] == [sum(sizes[:i]) for i in range(len(sizes))] and [
        e.nbytes for e in extents
    ] == [t.nbytes for t in tensors]
    assert len({e.files for e in extents}) == 1 and extents[0].files.nbytes == sum(sizes)
    values = [value_of(*x) for x in SHAPES]
    for tensor, value in zip(tensors, values, strict=True):
        assert not disk.load(tensor).any(), "zeros at birth"
        disk.store(value, tensor)
    for tensor, value in zip(tensors, values, strict=True):
        found = disk.load(tensor)
        assert found.dtype == value.dtype and torch.equal(found, value)
    del extents, tensors[1:], tensor
    gc.collect()
    assert len(ours(root)) == 2 and torch.equal(disk.load(tensors[0]), values[0])
    tensors.clear()
    gc.collect()
    assert not ours(root)


@pytest.mark.parametrize("nbytes", [1, 5 * BLOCK, MIB, disk.BUFFER])
def test_parts_of_leaves(tmp_path: Path, nbytes: int) -> None:
    """Read in parts of one size, written in parts of any, also ones that lie oddly in memory."""
    shape = (3, 217, 411)
    (tensor, behind), value = (
        disk.rest([leaf("a", shape), leaf("b", (5,))], MESH, tmp_path),
        value_of(shape, torch.float32),
    )
    disk.store(torch.ones(5), behind)
    with disk.write_pieces(tensor, nbytes) as write:
        flat, at = value.view(-1), 0
        for size in [0, 1, 1000, 1, BLOCK, 70_001]:
            write(flat[at : at + size])
            at += size
        write(flat[at:].view(-1, 1).repeat(1, 2)[:, 0])
    assert torch.equal(disk.load(tensor), value) and torch.equal(disk.load(behind), torch.ones(5))
    size = max(nbytes // BLOCK, 1) * BLOCK // 4
    parts = [part.clone() for part in disk.pieces(tensor, nbytes)]
    assert [p.numel() for p in parts[:-1]] == [size] * (len(parts) - 1) and torch.equal(
        torch.cat(parts).view(shape), value
    )
    addresses = {part.data_ptr() for part in disk.pieces(tensor, nbytes)}
    assert len(addresses) == min(len(parts), 2), "two buffers, however many parts"


def test_parts_that_are_not_the_leafs(tmp_path: Path) -> None:
    (tensor,) = disk.rest([leaf("w", (10,))], MESH, tmp_path)
    for given, said in (
        ([9], "36 bytes in total for params['w'], which is 40 bytes"),
        ([6, 6], "bytes 24 to 48 of torch.float32 for params['w']"),
    ):
        with pytest.raises(FzeroValueError) as caught, disk.write_pieces(tensor) as write:
            for num in given:
                write(torch.ones(num))
        assert said in str(caught.value)
    with pytest.raises(FzeroValueError, match=r"torch\.float64"), disk.write_pieces(tensor) as write:
        write(torch.ones(10, dtype=torch.float64))
    with pytest.raises(
        FzeroValueError, match=r"torch.float32\[5, 2\] for params\['w'\], which is stored as torch.float32\[10\]"
    ):
        disk.store(torch.ones(5, 2), tensor)
    with pytest.raises(FzeroValueError, match="params\\['w'\\] is not stored on disk"):
        disk.load(place(torch.ones(10), leaf("w", (10,)), MESH))
    with pytest.raises(ZeroDivisionError), disk.write_pieces(tensor) as write:
        write(torch.ones(3) / (1 // 0))


@pytest.mark.parametrize("operation", ["load", "store", "pieces"])
def test_faults_reach_whoever_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operation: str) -> None:
    (tensor,) = disk.rest([leaf("w", (3 << 20,))], MESH, tmp_path)
    with monkeypatch.context() as patch:
        for name in ("preadv", "pwritev"):
            patch.setattr(os, name, fails(errno.EIO, name=name))
        with pytest.raises(TierError, match=os.strerror(errno.EIO)):
            if operation == "load":
                disk.load(tensor)
            elif operation == "store":
                disk.store(torch.ones(3 << 20), tensor)
            else:
                list(disk.pieces(tensor, MIB))
    assert not disk.load(tensor).any()


def shards_at_rest(path: str) -> tuple[int, int, bool]:
    mesh = fz.make_mesh(data=-1)
    sharded = Leaf("params['w']", "params", (7, 3), Layout(torch.float32, ("data",), "disk"))
    (tensor,) = disk.rest([sharded], mesh, path)
    disk.store(torch.full((11,), float(mesh.rank)), tensor)
    torch.distributed.barrier()
    num = len(os.listdir(path))
    torch.distributed.barrier()
    return num, tensor.numel(), bool((disk.load(tensor) == mesh.rank).all()) and leaf_of(tensor) == (sharded, mesh)


def test_ranks_on_one_path_do_not_meet(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(2, shards_at_rest, str(tmp_path)) == [(0, 11, True)] * 2
