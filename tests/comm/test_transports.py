"""Both transports move what they should: through gloo, and through the memory that ranks of one host share."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RaisedOnRank, ending

import fzero as fz
from fzero.comm import shared_memory as shared
from fzero.comm.collectives import ProcessGroups, merged
from fzero.comm.groups import ranks_along
from fzero.comm.shared_memory import SharedMemory
from fzero.comm.transport import transport
from fzero.errors import DivergenceError
from fzero.mesh import Mesh

TRANSPORTS = {"gloo": ProcessGroups, "shared memory": SharedMemory}


class Arena:
    """Flats cut one after the other from a transport's pool."""

    def __init__(self, carrier: Any, nbytes: int):
        self.memory, self.at = carrier.pool(nbytes), 0

    def __call__(self, numel: int, dtype: torch.dtype = torch.float32, align: int = 64) -> torch.Tensor:
        self.at = -(-self.at // align) * align
        begin, self.at = self.at, self.at + numel * dtype.itemsize
        return self.memory[begin : self.at].view(dtype)


def moved(shared_memory: bool, big: int) -> tuple[str, dict[str, Any]]:
    mesh = fz.make_mesh(data=-1, shared_memory=shared_memory)
    carrier, rank, size = transport(mesh), mesh.rank, mesh.size
    new = Arena(carrier, 1 << 24)
    generator = torch.Generator().manual_seed(rank)
    out: dict[str, Any] = {}
    for turn in range(3):  # the same buffers, again and again
        carrier.begin(new.memory)
        new.at = 0
        shards = [torch.full((2,), float(rank + turn)), torch.full((big,), rank, dtype=torch.int64)]
        wholes = [new(2 * size), new(big * size, torch.int64)]
        out["gathered"] = [x.clone() for x in carrier.wait(carrier.all_gather_start(shards, "data", wholes), wholes)]

        grads = [torch.randn(7, generator=generator), torch.randn(big, generator=generator)]
        flats = [new(-(-g.numel() // size) * size) for g in grads]
        parts = [new(f.numel() // size) for f in flats]
        flats[1][:big].copy_(grads[1])  # one made in its place, one not
        moving = carrier.reduce_scatter_start([grads[0], flats[1][:big]], "data", "sum", [*flats, *parts])
        out["scattered"], out["grads"] = [x.clone() for x in carrier.wait(moving, parts)], grads

        values = [torch.empty(0), torch.tensor(rank + 1.0), torch.arange(3.0) * rank]
        flats = [new(0), new(1, align=4), new(3, align=4)]
        sums = [new(0), new(1, align=4).view(()), new(3, align=4)]
        out["small"] = [x.clone() for x in carrier.wait(carrier.all_reduce_start(values, "data", "sum", flats), sums)][
            1:
        ]
        out["largest"] = carrier.wait(carrier.all_reduce_start([values[1]], "data", "max", [flats[1]]), [sums[1]])[
            0
        ].clone()

        flat = new(big)
        flat.copy_(grads[1])
        out["large"] = carrier.wait(carrier.all_reduce_start([flat], "data", "sum", [flat]), [flat])[0].clone()
    return type(carrier).__name__, out


@pytest.mark.parametrize(("big", "size"), [(5, 2), (5, 3), (300_001, 3)])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_transfers(run_ranks: Any, name: str, big: int, size: int) -> None:
    results = run_ranks(size, moved, name != "gloo", big)
    grads = [[out["grads"][k] for _, out in results] for k in range(2)]
    sums = [torch.stack(g).sum(0) for g in grads]
    for rank, (kind, out) in enumerate(results):
        assert kind == TRANSPORTS[name].__name__
        assert torch.equal(out["gathered"][0], torch.arange(2.0, 2 + size).repeat_interleave(2))
        assert torch.equal(out["gathered"][1], torch.arange(size).repeat_interleave(big))
        for part, whole in zip(out["scattered"], sums, strict=True):
            padded = torch.nn.functional.pad(whole, (0, -whole.numel() % size))
            torch.testing.assert_close(part, padded.chunk(size)[rank])
        assert out["small"][0] == size * (size + 1) / 2 and torch.equal(
            out["small"][1], torch.arange(3.0) * (size * (size - 1) / 2)
        )
        assert out["largest"] == size
        torch.testing.assert_close(out["large"], sums[1])
        assert torch.equal(out["large"], results[0][1]["large"])  # the same bits everywhere


@pytest.mark.parametrize(
    ("rank", "data", "replica"), [(0, [0, 1], [0, 2, 4]), (3, [2, 3], [1, 3, 5]), (5, [4, 5], [1, 3, 5])]
)
def test_transfers_go_along_their_axis(rank: int, data: list[int], replica: list[int]) -> None:
    mesh = Mesh({"replica": 3, "data": 2}, rank, torch.device("cpu"))
    assert [ranks_along(mesh.axes, mesh.rank, axis) for axis in ("data", "replica")] == [data, replica]


def open_files() -> int:
    """How many more files are open after meshes, pools and steps have come and gone than after the first of them."""
    counts = []
    for _ in range(4):
        mesh = fz.make_mesh(data=-1)
        carrier = transport(mesh)
        for _ in range(3):
            carrier.begin(carrier.pool(4096))
        del mesh, carrier
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[0]


def test_nothing_stays_open(run_ranks: Any) -> None:
    assert max(run_ranks(2, open_files)) <= 0  # fewer, where an earlier test's are closed meanwhile


def leaves_early() -> None:
    mesh = fz.make_mesh(data=2, timeout=30)
    carrier = transport(mesh)
    memory = carrier.pool(1024)
    carrier.begin(memory)
    if mesh.rank == 1:
        for peer in carrier._peers.values():  # what the end of its process does
            peer.connection.close()
        raise ValueError("rank 1 gives up")
    carrier.begin(memory)


def test_a_rank_that_leaves_is_named_at_once(run_ranks: Any) -> None:
    start = time.monotonic()
    first, _ = run_ranks(2, leaves_early, expect_error=True)
    assert (
        isinstance(first, RaisedOnRank)
        and "rank 1 has left" in first.traceback
        and DivergenceError.__name__ in first.traceback
    )
    assert time.monotonic() - start < 25


def never_comes(folder: str) -> None:
    mesh = fz.make_mesh(data=2, timeout=2)
    carrier = transport(mesh)
    memory = carrier.pool(1024)
    with ending(folder, last=mesh.rank == 1):
        if mesh.rank == 0:
            carrier.begin(memory)


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named(run_ranks: Any, tmp_path: Path) -> None:
    first, _ = run_ranks(2, never_comes, str(tmp_path), expect_error=True)
    assert isinstance(first, RaisedOnRank) and "rank 1 timed out after 2 s" in first.traceback


def cannot_reach(broken: int) -> tuple[str, float]:
    """Trains a step on ranks of which one cannot send its counters. What moved the data, and the loss."""
    send_fds = socket.send_fds

    def fails(*args: Any) -> Any:
        if int(os.environ["RANK"]) == broken:
            raise PermissionError("no counters for this process")
        return send_fds(*args)

    socket.send_fds = fails
    started = time.monotonic()
    try:
        mesh = fz.make_mesh(data=-1, timeout=60)
        train = fz.compile(
            fz.shard_params(fz.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fz.optim.sgd(0.1))),
            mesh,
            backend="eager",
        )
        _, metrics = train(train.init({"w": torch.arange(6.0).view(3, 2)}), torch.ones(4, 3) + mesh.rank)
    finally:
        socket.send_fds = send_fds
    assert time.monotonic() - started < 25, "nobody waits for what does not come"
    return type(transport(mesh)).__name__, float(metrics["loss"])


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_ranks_that_cannot_reach_each_other_go_through_gloo(run_ranks: Any, broken: int) -> None:
    """All of them, whichever it is; rank 2 is none of the two, so nothing is broken."""
    found = run_ranks(2, cannot_reach, broken)
    assert {name for name, _ in found} == {"SharedMemory" if broken == 2 else "ProcessGroups"}
    assert found[0][1] == pytest.approx(((6.0**2 + 9.0**2) + (12.0**2 + 18.0**2)) / 4)


def of_another_user(broken: int) -> tuple[list[str], int]:
    """What the log of a rank says where one of them takes the others for another user's, and how many more files are
    open after the second time."""
    said, same_user = list[str](), shared._same_user
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fzero").addHandler(handler)
    if int(os.environ["RANK"]) == broken:
        shared._same_user = lambda connection: False
    try:
        mesh = fz.make_mesh(data=-1)
        assert shared.connect(mesh) is None
        before = len(os.listdir("/proc/self/fd"))
        assert shared.connect(mesh) is None
        return said, len(os.listdir("/proc/self/fd")) - before
    finally:
        shared._same_user = same_user
        logging.getLogger("fzero").removeHandler(handler)


@pytest.mark.full
@pytest.mark.parametrize(
    ("broken", "why"), [(0, ""), (1, "rank 1: rank 0 cannot be reached: the socket of rank 0 belongs to another user")]
)
def test_why_ranks_do_not_share_memory_is_logged_at_once(run_ranks: Any, broken: int, why: str) -> None:
    """Within the test's minute, not the mesh's ten; and nothing stays open."""
    for rank, (said, opened) in enumerate(run_ranks(3, of_another_user, broken, timeout=60)):
        assert opened <= 0 and len(said) == (2 if rank == 0 else 0), said
        assert all("communicate through gloo: rank " in text and why in text for text in said), said


def cannot_share(broken: int) -> str:
    """What a rank says when one of them cannot make the memory of a program, and when another's memory is shorter than
    it should be."""
    memfd_create = os.memfd_create

    def fails(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    mesh = fz.make_mesh(data=-1)
    carrier = transport(mesh)
    carrier.begin(carrier.pool(4096))
    carrier._pool.fds[1 - mesh.rank] = fd = os.memfd_create("empty")
    with pytest.raises(DivergenceError, match="memory is smaller than the range that"):
        carrier._read(1 - mesh.rank, 0, 8, memoryview(bytearray(8)), 0)
    os.close(fd)
    os.memfd_create = fails if mesh.rank == broken else memfd_create  # type: ignore[assignment]
    try:
        with pytest.raises(DivergenceError) as caught:
            carrier.pool(4096)
        return str(caught.value)
    finally:
        os.memfd_create = memfd_create


def test_a_rank_that_cannot_make_its_pool_is_told_at_once(run_ranks: Any) -> None:
    other, broken = run_ranks(2, cannot_share, 1, timeout=60)
    assert "rank 1: [Errno 24] Too many open files" in broken and "rank 0: rank 1 has left" in other
    assert all("4.0 KiB" in text and "\nFix: " in text for text in (other, broken))


def test_flats_behind_each_other_are_one() -> None:
    memory = torch.arange(10.0)
    one = merged([memory[:2], memory[2:5], memory[6:]])
    assert [x.tolist() for x in one] == [[0, 1, 2, 3, 4], [6, 7, 8, 9]]
