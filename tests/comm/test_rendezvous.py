"""How ranks find each other: nobody of an earlier start, and no stranger, is taken for one of them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fzero as fz
from fzero.comm import shared_memory
from fzero.comm.rendezvous import meet
from fzero.comm.transport import transport
from fzero.errors import DivergenceError, FzeroValueError


def stale(store: dist.Store, world: int) -> None:
    """What a start before this one left behind, its counters at other values on each rank."""
    for r in range(world):
        store.set(f"fzero/came/{r}", f"old{r}")
        store.set(f"fzero/ack/oldest/{r}", "")
        store.add(f"fzero/agree/counts/{r}", 3 + r)
        store.add(f"fzero/shared/{r}", 5 * r)
    store.set("fzero/numbers/oldest", " ".join(f"old{r}" for r in range(world)))
    store.set("fzero/generation", "oldest")
    store.set("fzero/go/oldest", "")


def joins_over_what_was_left() -> tuple[str, float]:
    """Rank 0 leaves the traces before any rank joins; rank 1 comes late, so that rank 0 first meets its predecessor's
    number."""
    here = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        stale(here, 2)
        here.set("left", "")
    else:
        here.wait(["left", "fzero/numbers/oldest"])
        while here.get("fzero/generation") == b"oldest":
            # until rank 0 has published a generation for the number of a process that is gone
            time.sleep(0.01)
    mesh = fz.make_mesh(data=2, timeout=30)
    train = fz.compile(
        fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1))),
        mesh,
        backend="eager",
    )
    _, metrics = train(train.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
    return type(transport(mesh)).__name__, float(metrics["loss"])


def test_what_an_earlier_start_left_in_the_store_is_not_read(run_ranks: Any) -> None:
    assert run_ranks(2, joins_over_what_was_left, timeout=60) == [("SharedMemory", 4.0)] * 2


def meets_alone(monkeypatch: pytest.MonkeyPatch, rank: int, prepare: Any) -> str:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    prepare(server)
    with pytest.raises(DivergenceError) as caught:
        meet(rank, 3, 0.3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "prepare", "missing"),
    [
        (0, lambda store: None, {1, 2}),
        (1, lambda store: None, {0, 2}),
        (0, lambda store: store.set("fzero/came/1", "new"), {2}),
        (0, lambda store: stale(store, 3), {1, 2}),  # their numbers are there, and nobody acknowledges
        (2, lambda store: stale(store, 3), {0}),  # it can tell only that rank 0 did not take note of it
    ],
    ids=["nobody, rank 0", "nobody, rank 1", "one", "an earlier start, rank 0", "an earlier start, rank 2"],
)
def test_who_did_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, rank: int, prepare: Any, missing: set[int]
) -> None:
    text = meets_alone(monkeypatch, rank, prepare)
    assert {r for r in range(3) if f"rank {r} timed out after 0.3 s" in text} == missing and text.splitlines()[
        -1
    ].startswith("Fix: ")
    assert "warn" not in capfd.readouterr().err.lower(), "c10d has nothing to say of it"


def joins_again(count: int) -> list[float]:
    """A process that leaves and joins the mesh anew, in one store; meshes of before are told apart."""
    sums, closed = [], []
    for _ in range(count):
        mesh = fz.make_mesh(data=2, timeout=30)
        x = torch.tensor(mesh.rank + 1.0)
        dist.all_reduce(x, group=mesh.group("data"))
        sums.append(float(x))
        for old in closed:
            with pytest.raises(FzeroValueError, match="the mesh data=2 is closed"):
                old.group("data")
        fz.close_mesh()
        closed.append(mesh)
    return sums


def test_a_process_joins_again_and_again(run_ranks: Any) -> None:
    assert run_ranks(2, joins_again, 4) == [[3.0] * 4] * 2


def after_closing() -> list[str]:
    mesh = fz.make_mesh(data=2, timeout=30)
    step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1)))
    used, unused = fz.compile(step, mesh, backend="eager"), fz.compile(step, mesh, backend="eager")
    params, batch = {"w": torch.ones(2, 2)}, torch.ones(2, 2)
    state, _ = used(used.init(params), batch)
    fz.close_mesh()
    said = []
    for act in (lambda: used(state, batch), lambda: unused(unused.init(params), batch), lambda: used.gather(state)):
        with pytest.raises(FzeroValueError) as caught:
            act()
        said.append(str(caught.value))
    fz.close_mesh()  # twice is once
    return said


def test_a_closed_mesh_says_so(run_ranks: Any) -> None:
    for said in run_ranks(2, after_closing):
        assert all("the mesh data=2 is closed" in text and "Fix: close_mesh() comes last" in text for text in said), (
            said
        )


def with_a_group_of_the_users() -> tuple[float, bool]:
    """The script has joined the process group by itself, over a store in which an earlier start has left counters."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    inner = dist.PrefixStore("default_pg", store)  # as PyTorch names it
    for name in ("agree/counts", "share/counts", "shared"):
        inner.add(f"fzero/{name}/{rank}", 1 + rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = fz.make_mesh(data=2, timeout=20)
    train = fz.compile(
        fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1))),
        mesh,
        backend="eager",
    )
    _, metrics = train(train.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
    return float(metrics["loss"]), isinstance(transport(mesh), shared_memory.SharedMemory)


def test_a_process_group_of_the_scripts_own_will_do(run_ranks: Any) -> None:
    assert run_ranks(2, with_a_group_of_the_users) == [(4.0, True)] * 2


# --- strangers at the socket over which ranks of one host hand each other their pools ---


def call_in(address: bytes, says: Any, held: list[socket.socket]) -> None:
    for text in says:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(address)
        if text:
            stranger.sendall(text)
        held.append(stranger)


SAYS = {
    "nothing": [b""] * 4,
    "rubbish": [b"GET / HTTP/1.1\r\n\r\n", b"x" * 500, b"\1\0\0\0"],
    "another secret": [b"0" * 64 + (1).to_bytes(4, "little"), b"\xff" * 64 + (2).to_bytes(4, "little")],
}


def meets_strangers(what: str) -> tuple[str, list[bool], float]:
    """Rank 0's socket has strangers in its queue before any rank is; some hang up, some stay."""
    held: list[socket.socket] = []
    listen = socket.socket.listen

    def listens(server: socket.socket, *args: int) -> None:
        listen(server, 64)
        if os.environ["RANK"] == "0":
            call_in(server.getsockname(), [*SAYS[what]], held)
            call_in(server.getsockname(), [*SAYS[what]], gone := [])
            for stranger in gone:
                stranger.close()

    socket.socket.listen = listens  # type: ignore[method-assign]
    try:
        mesh = fz.make_mesh(data=-1, timeout=20)
        found = transport(mesh)
    finally:
        socket.socket.listen = listen  # type: ignore[method-assign]
    train = fz.compile(
        fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1))),
        mesh,
        backend="eager",
    )
    _, metrics = train(train.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
    ended = []
    for stranger in held:
        stranger.settimeout(5)
        try:
            ended.append(stranger.recv(1) == b"")
        except ConnectionError:
            ended.append(True)
    return type(found).__name__, ended, float(metrics["loss"])


@pytest.mark.parametrize("what", SAYS)
def test_strangers_neither_join_nor_stop_the_ranks(run_ranks: Any, what: str) -> None:
    for rank, (kind, ended, loss) in enumerate(run_ranks(3, meets_strangers, what, timeout=60)):
        assert (kind, loss) == ("SharedMemory", 4.0)
        assert ended == ([True] * len(SAYS[what]) if rank == 0 else []), (
            "every one of them is hung up on, and gets no word"
        )


def calls(server: socket.socket, secret: bytes, ranks: list[int], timeout: float) -> list[int]:
    return [
        rank
        for rank, connection in shared_memory._callers(server, secret, ranks, timeout)
        if connection.close() is None
    ]


def test_only_this_users_processes_with_the_secret_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, held = b"5" * 64, list[socket.socket]()
    right, later = secret + (1).to_bytes(4, "little"), secret + (2).to_bytes(4, "little")
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as closing:
        closing.callback(lambda: [stranger.close() for stranger in held])
        server.bind("")
        server.listen(16)
        # one that is not expected, one that came twice
        call_in(server.getsockname(), [right, secret + (7).to_bytes(4, "little"), right], held)
        call_in(server.getsockname(), [later[:10]], held)
        threading.Timer(0.2, lambda: held[-1].sendall(later[10:])).start()  # in two pieces
        assert calls(server, secret, [1, 2], 10.0) == [1, 2]
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        call_in(server.getsockname(), [right], held)
        with pytest.raises(OSError, match=r"ranks 1 timed out after 0\.3 s"):
            calls(server, secret, [1], 0.3)


def test_a_flood_does_not_put_the_timeout_off(tmp_path: Path) -> None:
    stop = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("")
        server.listen(16)

        def flood() -> None:
            while not stop.is_set():
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.settimeout(0.1)
                    try:
                        stranger.connect(server.getsockname())
                        stranger.sendall(b"x" * 68)
                    except OSError:
                        pass

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        try:
            with pytest.raises(OSError, match="timed out"):
                calls(server, b"5" * 64, [1], 0.5)
        finally:
            stop.set()
            thread.join()
