"""Runs collectives between the CPU processes of one host through shared memory: each rank reads the pools of the
others.

A pool is an in-memory file whose file descriptor the ranks send to each other. A start tells the ranks along the axis
that this rank's data is ready, by adding one to a kernel counter (eventfd). A wait sleeps until the data of the other
ranks is ready, and then reads it with one system call per tensor. Nothing is sent through a socket, copied twice or
reduced twice. An all-gather is one copy of the other ranks' shards. A reduction is one pass over this rank's shard of
each summand, in the order of the ranks, so the result is the same in every run. A rank that leaves closes its
connection, which a waiting rank notices.

The program determines when a buffer may be overwritten: [Note: release] in ir/liveness.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fzero._utils import units
from fzero.comm.collectives import CHUNK, COMBINE, PendingTransfer, ProcessGroups, merged, settle
from fzero.comm.control_messages import timed_out
from fzero.comm.groups import ranks_along
from fzero.errors import DivergenceError, RankLost

if TYPE_CHECKING:
    from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_NUM_SECRET = 64  # characters of the hex digest by which a caller proves that it knows the secret
_NUMBER = 8  # bytes that encode the number of a program
_PATIENCE = 10.0  # seconds to wait for the connection of a rank
_HELLO = 1.0  # seconds that a caller has to say who it is


@dataclass(frozen=True)
class SharedTransfer:
    """A transfer in flight.

    Attributes:
        kind: "gather", "scatter", "reduce", "exchange" or "send".
        due: for each other rank that takes part, the number of notifications from it after which its data is ready.
        flats: the buffers in the pool that the other ranks read.
        filled: the tensors that hold the result.
    """

    kind: str
    axis: str
    op: str
    due: dict[int, int]
    flats: Sequence[torch.Tensor]
    filled: Sequence[torch.Tensor]


@dataclass(eq=False)
class _Peer:
    """Another rank: the connection to it, the counter that it increments, the counter that this rank increments, and
    how many notifications were received and sent."""

    rank: int
    connection: socket.socket
    theirs: int
    ours: int
    received: int = 0
    sent: int = 0


class SharedMemory:
    """The transport of a CPU mesh whose ranks are all on this host. `connect` creates it on all ranks, or on none."""

    def __init__(self, mesh: Mesh, peers: dict[int, _Peer]):
        self._mesh, self._peers = mesh, peers
        self._pool: _Pool | None = None
        self._names: list[str] = []  # names of the programs, indexed by the number of their pool
        self._runs = 0
        # The end of its connections is how the other ranks notice that this rank has left.
        weakref.finalize(
            self,
            _close,
            [fd for p in peers.values() for fd in (p.ours, p.theirs)],
            [p.connection for p in peers.values()],
        )
        self._messages = ProcessGroups(mesh)  # for messages between two ranks, such as pipeline stages
        self.connect_pairs, self.send_start = self._messages.connect_pairs, self._messages.send_start
        self.recv_start = self._messages.recv_start
        # Another rank does not know where in this rank's buffer its rows begin.
        self.all_to_all_v_start = self._messages.all_to_all_v_start
        self._along = {axis: ranks_along(mesh.axes, mesh.rank, axis) for axis in mesh.axes}
        self._scratch = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu") for _ in range(3)]
        self._scratch_bytes = [x.numpy().data.cast("B") for x in self._scratch]
        # where each rank writes which program it runs, for the current run and for the previous one
        self._board = self._shared(2 * _NUMBER)

    def pool(self, nbytes: int, name: str = "") -> torch.Tensor:
        """Allocates memory for a program's transfers, which the other ranks can read. Every rank calls this for the
        same programs in the same order."""
        found = self._shared(nbytes)
        found.number = len(self._names)
        self._names.append(name)
        found.tensor._fzero_pool = found  # type: ignore[attr-defined]
        return found.tensor

    def _shared(self, nbytes: int) -> _Pool:
        # An empty file cannot be mapped.
        size, fds, fd = max(nbytes, mmap.PAGESIZE), dict[int, int](), -1
        try:
            fd = os.memfd_create("fzero", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            for peer in self._peers.values():
                # All ranks send before they receive. The sockets buffer the messages, so no two ranks wait for each
                # other.
                _send_fd(peer.connection, fd, peer.rank)
            for peer in self._peers.values():
                fds[peer.rank] = _receive_fd(peer.connection, peer.rank, self._mesh.timeout)
            return _Pool(mmap.mmap(fd, size), fds)
        except OSError as error:
            # closes the connections, so that the other ranks do not wait for descriptors that never come
            _close([*fds.values()], [p.connection for p in self._peers.values()])
            fix = (
                "look at the other ranks' errors; a limit of memory or of open files (`ulimit -n`) may be reached; "
                "make_mesh(shared_memory=False) works without it"
            )
            what = f"the ranks cannot share the memory of a program, {units.size(nbytes)}"
            raise DivergenceError("compile", what, [f"rank {self._mesh.rank}: {error}"], fix) from error
        finally:
            # The mapping, and the descriptors that the other ranks have received, keep the memory alive.
            if fd >= 0:
                os.close(fd)

    def begin(self, pool: torch.Tensor) -> None:
        """Called before a program runs. Waits until no rank reads data that an earlier run left in the pools, and
        checks that all ranks are about to run this program.

        Raises:
            DivergenceError: the ranks call different steps; nothing has been written.

        Cost: a notification to each rank, and a system call per rank to read which program it runs.
        """
        self._pool = pool._fzero_pool  # type: ignore[attr-defined]
        number = self._pool.number  # type: ignore[union-attr]
        self._mesh.collective_sequence.begin(f"program {number}", f"runs {self._names[number]}, program {number}")
        self._runs += 1
        at = self._runs % 2 * _NUMBER  # two entries suffice: no rank is two runs ahead of another
        # Written before the notification, after which the others read it.
        self._board.bytes[at : at + _NUMBER] = number.to_bytes(_NUMBER, "little")
        everyone = list(self._peers.values())
        self._tell(everyone)
        self._hear({p.rank: p.sent for p in everyone})
        runs = {p.rank: int.from_bytes(os.pread(self._board.fds[p.rank], _NUMBER, at), "little") for p in everyone}
        runs[self._mesh.rank] = number
        if len({*runs.values()}) > 1:
            which = [f"rank {rank}: {self._names[number]}, program {number}" for rank, number in sorted(runs.items())]
            fix = "call the same compiled steps in the same order on every rank: an evaluation too"
            raise DivergenceError("step", "ranks run different programs", which, fix)

    def all_gather_start(
        self, shards: Sequence[torch.Tensor], axis: str, into: Sequence[torch.Tensor]
    ) -> SharedTransfer:
        """See `ProcessGroups.all_gather_start`. Copies this rank's shards into the pool, unless they are there."""
        index = self._mesh.index(axis)
        for shard, whole in zip(shards, into, strict=True):
            part = whole[index * shard.numel() : (index + 1) * shard.numel()]
            if part.data_ptr() != shard.data_ptr():
                part.copy_(shard.reshape(-1))
        return SharedTransfer("gather", axis, "", self._announce(axis), into, into)

    def reduce_scatter_start(
        self, wholes: Sequence[torch.Tensor], axis: str, op: str, into: Sequence[torch.Tensor]
    ) -> SharedTransfer:
        flats = into[: len(wholes)]
        settle(wholes, flats)
        return SharedTransfer("scatter", axis, op, self._announce(axis), flats, into[len(wholes) :])

    def all_reduce_start(
        self, values: Sequence[torch.Tensor], axis: str, op: str, into: Sequence[torch.Tensor]
    ) -> SharedTransfer:
        settle(values, into)
        return SharedTransfer("reduce", axis, op, self._announce(axis), into, into)

    def all_to_all_start(
        self, values: Sequence[torch.Tensor], axis: str, into: Sequence[torch.Tensor]
    ) -> SharedTransfer:
        flats = into[: len(values)]
        settle(values, flats)
        return SharedTransfer("exchange", axis, "", self._announce(axis), flats, into[len(values) :])

    def connect(self, axis: str) -> None:
        """Prepares sends along an axis. Nothing to do: the ranks are connected already."""

    def replicate_start(
        self,
        values: Sequence[torch.Tensor],
        axis: str,
        shift: int,
        into: Sequence[torch.Tensor],
        through: Sequence[torch.Tensor],
    ) -> SharedTransfer:
        """Sends values to the rank at offset `shift` along an axis, which reads them from the pool, and receives into
        `into` the values that the rank at offset `-shift` sends."""
        settle(values, through)
        along, index = self._along[axis], self._mesh.index(axis)
        reader, source = (along[(index + n) % len(along)] for n in (shift, -shift))
        # Both are notified: `due` is the number of notifications sent to a rank, which equals the number it has sent.
        self._tell([self._peers[rank] for rank in {reader, source}])
        return SharedTransfer("replicate", axis, "", {source: self._peers[source].sent}, through, into)

    def wait(
        self, moving: SharedTransfer | PendingTransfer, into: Sequence[torch.Tensor], together: bool = False
    ) -> Sequence[torch.Tensor]:
        """Returns the values of a transfer after the data of the other ranks is ready. With `together`, it also waits
        until the other ranks have read this rank's data."""
        if isinstance(moving, PendingTransfer):
            return self._messages.wait(moving, into)
        self._hear(moving.due)
        along, index = self._along[moving.axis], self._mesh.index(moving.axis)
        if moving.kind == "gather":
            for whole in moving.flats:
                self._gather(whole, along)
        elif moving.kind == "exchange":
            for flat, out in zip(moving.flats, moving.filled, strict=True):
                self._exchange(flat, out, along, index)
        elif moving.kind == "replicate":
            (source,) = moving.due
            for flat, place in zip(moving.flats, moving.filled, strict=True):
                if flat.nbytes:
                    data = place.detach().reshape(-1).view(torch.uint8).numpy().data
                    self._read(source, self._offset(flat), flat.nbytes, data, 0)
        elif moving.kind == "scatter":
            for whole, shard in zip(moving.flats, moving.filled, strict=True):
                self._combine(whole, index * shard.numel(), shard, along, moving.op)
        elif any(value.data_ptr() != flat.data_ptr() for value, flat in zip(into, moving.flats, strict=True)):
            for flat, value in zip(merged(moving.flats), merged([v.view(-1) for v in into]), strict=True):
                self._combine(flat, 0, value, along, moving.op)
        else:
            for flat in moving.flats:
                # Each rank reduces in place the shard that no other rank reads; then all read the others' shards.
                part = _part(flat, index, len(along))
                if part.numel():
                    self._combine(flat, int(part.storage_offset() - flat.storage_offset()), part, along, moving.op)
            self._hear(self._announce(moving.axis))
            for flat in moving.flats:
                self._gather(flat, along)
        if together:
            self._hear(self._announce(moving.axis))
        return into

    def abandon(self) -> None:
        """Called when a run ended in the middle. Apart from the messages through process groups, no transfer is in
        flight that another thread or process carries out."""
        self._messages.abandon()

    # --- reading ---

    def _gather(self, whole: torch.Tensor, along: Sequence[int]) -> None:
        """Reads every other rank's shard of a flat tensor into this rank's pool."""
        for i, rank in enumerate(along):
            part = _part(whole, i, len(along))
            if rank != self._mesh.rank and part.numel():
                self._read(rank, self._offset(part), part.nbytes, self._pool.bytes, self._offset(part))  # type: ignore[union-attr]

    def _exchange(self, flat: torch.Tensor, out: torch.Tensor, along: Sequence[int], index: int) -> None:
        """Reads from every rank's flat tensor the row that is meant for this rank."""
        for i, rank in enumerate(along):
            row, mine = _part(out, i, len(along)), _part(flat, index, len(along))
            if rank == self._mesh.rank:
                row.copy_(mine)
            elif row.numel():
                assert self._pool is not None
                self._read(rank, self._offset(mine), row.nbytes, self._pool.bytes, self._offset(row))

    def _combine(self, flat: torch.Tensor, first: int, out: torch.Tensor, along: Sequence[int], op: str) -> None:
        """Reduces the ranks' flat tensors, from element `first` on, into `out`, in the order of the ranks.

        `out` may be a slice of this rank's own flat tensor.
        """
        step, itemsize = CHUNK // out.element_size(), out.element_size()
        in_place = out.data_ptr() == flat.data_ptr() + first * itemsize
        # In chunks that stay in the cache. Scratch buffer 0 has the first summand, buffer 1 each further one, and
        # buffer 2 this rank's own if the sum would overwrite it.
        for at in range(0, out.numel(), step):
            num = min(step, out.numel() - at)
            here, offset = out[at : at + num], self._offset(flat) + (first + at) * itemsize
            own = flat[first + at : first + at + num]
            if in_place and along[0] != self._mesh.rank:  # copied before the sum of the others overwrites it
                own = self._scratch[2].view(out.dtype)[:num].copy_(own)
            held = own if along[0] == self._mesh.rank else self._fetch(along[0], offset, num, out.dtype, 0)
            for rank in along[1:]:
                held = COMBINE[op](
                    held, own if rank == self._mesh.rank else self._fetch(rank, offset, num, out.dtype, 1), out=here
                )

    def _fetch(self, rank: int, offset: int, num: int, dtype: torch.dtype, which: int) -> torch.Tensor:
        """Reads elements from another rank's pool into a small buffer."""
        self._read(rank, offset, num * dtype.itemsize, self._scratch_bytes[which], 0)
        return self._scratch[which].view(dtype)[:num]

    def _read(self, rank: int, offset: int, nbytes: int, target: Any, at: int) -> None:
        fd, done = self._pool.fds[rank], 0  # type: ignore[union-attr]
        while done < nbytes:
            num = os.preadv(fd, [target[at + done : at + nbytes]], offset + done)
            if not num:
                what = f"rank {rank}'s memory is smaller than the range that rank {self._mesh.rank} reads"
                fix = "run the same code on every rank; the state is lost, continue from the last checkpoint"
                raise DivergenceError("step", "a transfer failed: another rank runs a different program", [what], fix)
            done += num

    def _offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self._pool.tensor.data_ptr()  # type: ignore[union-attr]

    # --- notifications ---

    def _announce(self, axis: str) -> dict[int, int]:
        """Notifies the other ranks along an axis that this rank's data is ready.

        Returns for each of them the number of notifications from it after which its data is ready too.
        """
        peers = [self._peers[r] for r in self._along[axis] if r != self._mesh.rank]
        self._tell(peers)
        return {p.rank: p.sent for p in peers}

    def _tell(self, peers: Sequence[_Peer]) -> None:
        for peer in peers:
            peer.sent += 1
            os.eventfd_write(peer.ours, 1)

    def _hear(self, due: dict[int, int]) -> None:
        for rank, count in due.items():
            peer = self._peers[rank]
            while peer.received < count:
                try:
                    # A read returns the notifications since the last read and resets the counter.
                    peer.received += os.eventfd_read(peer.theirs)
                except BlockingIOError:
                    self._sleep(peer)

    def _sleep(self, peer: _Peer) -> None:
        """Sleeps until the peer increments its counter."""
        poll = select.poll()
        poll.register(peer.theirs, select.POLLIN)
        # The kernel closes the connection of a rank that dies.
        poll.register(peer.connection, select.POLLHUP | select.POLLRDHUP)
        deadline = time.monotonic() + self._mesh.timeout
        while (
            not (ready := dict(poll.poll(1000 * min(self._mesh.collective_sequence.pause, self._mesh.timeout))))
            and time.monotonic() < deadline
        ):
            self._mesh.collective_sequence.look("step")
        if peer.theirs in ready:
            return
        self._mesh.collective_sequence.look("step")
        what = f"rank {peer.rank} {timed_out(self._mesh.timeout)}" if not ready else f"rank {peer.rank} has left"
        fix = "look at that rank's errors first; the state is lost, continue from the last checkpoint"
        raise (RankLost if ready else DivergenceError)(
            "step",
            "a transfer failed: another rank has left, or runs a different program",
            [f"rank {self._mesh.rank}: {what}"],
            fix,
        )


class _Pool:
    """This rank's pool for a program, as a tensor and as bytes, with the descriptors of the other ranks' pools."""

    def __init__(self, memory: mmap.mmap, fds: dict[int, int]):
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.bytes = memoryview(memory)
        self.fds = fds
        self.number = 0  # index among the pools of the mesh
        weakref.finalize(self, _close, list(fds.values()), [])


def _close(fds: Sequence[int], connections: Sequence[socket.socket]) -> None:
    for fd in fds:
        os.close(fd)
    for connection in connections:
        connection.close()


def connect(mesh: Mesh) -> SharedMemory | None:
    """Creates the shared-memory transport between the ranks of a CPU mesh. All ranks call it together.

    Returns None on every rank if one of them cannot reach another through shared memory. Rank 0's log then says which,
    and why.
    """
    peers: dict[int, _Peer] = {}
    address, failure = b"", ""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind("")  # the kernel chooses an abstract name, which any process of this host can connect to
            server.listen(mesh.size)
            address = server.getsockname()
        except OSError as error:
            failure = str(error)
        addresses = mesh.control.all_gather(address.hex(), str, "compile", "connects to the ranks of its host")
        try:
            if all(addresses):
                _connect_all(mesh, server, [bytes.fromhex(text) for text in addresses], peers)
        except OSError as error:
            failure = str(error) or type(error).__name__
    # All ranks have to decide alike, so each tells the others whether it has reached all of them.
    said = mesh.control.all_gather(failure, str, "compile")
    if not any(said):
        return SharedMemory(mesh, peers)
    _close([fd for p in peers.values() for fd in (p.ours, p.theirs)], [p.connection for p in peers.values()])
    if mesh.rank == 0:
        why = "; ".join(f"rank {r}: {text}" for r, text in enumerate(said) if text)
        logger.warning("fzero.mesh: the ranks of this host do not share memory, and communicate through gloo: %s", why)
    return None


def _connect_all(mesh: Mesh, server: socket.socket, addresses: Sequence[bytes], peers: dict[int, _Peer]) -> None:
    """Connects to each rank before this one, and accepts a connection from each rank after it, into `peers`."""
    # All ranks are here, so only one that has failed does not come. The secret of the mesh itself is never sent.
    timeout, me = min(mesh.timeout, _PATIENCE), mesh.rank
    secret = hashlib.sha256(mesh.secret + addresses[0]).hexdigest().encode()
    for rank, address in enumerate(addresses[:me]):
        peers[rank] = _meet(_called(address, secret, me, rank, timeout), rank, mesh.timeout)
    for rank, connection in _callers(server, secret, range(me + 1, mesh.size), timeout):
        peers[rank] = _meet(connection, rank, mesh.timeout)


def _called(address: bytes, secret: bytes, me: int, rank: int, timeout: float) -> socket.socket:
    """Connects to the rank at an address."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
        # Before the secret is sent.
        if not _same_user(connection):
            raise OSError(f"the socket of rank {rank} belongs to another user")
        connection.sendall(secret + me.to_bytes(4, "little"))
    except OSError as error:
        connection.close()
        raise OSError(f"rank {rank} cannot be reached: {error}") from error
    return connection


def _callers(
    server: socket.socket, secret: bytes, ranks: Iterable[int], timeout: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yields the connections of these ranks as they arrive.

    A connection from another user, or without the right secret, is closed. A process of this user that says nothing
    delays the others by a second.

    Raises:
        OSError: a rank timed out.
    """
    expected, deadline = set(ranks), time.monotonic() + timeout
    while expected:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OSError(f"ranks {', '.join(map(str, sorted(expected)))} {timed_out(timeout)}")
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        text = _hello(connection) if _same_user(connection) else b""
        rank = int.from_bytes(text[_NUM_SECRET:], "little")
        if hmac.compare_digest(text[:_NUM_SECRET], secret) and rank in expected:
            expected.remove(rank)
            connection.settimeout(timeout)
            yield rank, connection
        else:
            connection.close()


def _hello(connection: socket.socket) -> bytes:
    """Returns what a caller says: the secret, and its rank in four bytes."""
    connection.settimeout(_HELLO)
    text = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(_NUM_SECRET + 4 - len(text)):
            text += data
    return text


def _same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this process."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user == os.geteuid()


def _meet(connection: socket.socket, rank: int, timeout: float) -> _Peer:
    """Exchanges counters with the rank at the other end.

    On failure it closes the connection, because the other rank would wait for a counter that never comes.
    """
    ours = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        _send_fd(connection, ours, rank)
        theirs = _receive_fd(connection, rank, timeout)
    except OSError:
        _close([ours], [connection])
        raise
    return _Peer(rank, connection, theirs, ours)


def _send_fd(connection: socket.socket, fd: int, rank: int) -> None:
    try:
        socket.send_fds(connection, [b"f"], [fd])
    except ConnectionError as error:
        raise OSError(f"rank {rank} has left") from error


def _receive_fd(connection: socket.socket, rank: int, timeout: float) -> int:
    try:
        data, fds, _, _ = socket.recv_fds(connection, 1, 1)
    except TimeoutError as error:
        raise OSError(f"rank {rank} {timed_out(timeout)}") from error
    except ConnectionError as error:
        raise OSError(f"rank {rank} has left") from error
    if not data or not fds:
        raise OSError(f"rank {rank} has left")
    return fds[0]


def _part(flat: torch.Tensor, index: int, count: int) -> torch.Tensor:
    size = -(-flat.numel() // count)
    return flat[min(index * size, flat.numel()) : min((index + 1) * size, flat.numel())]
