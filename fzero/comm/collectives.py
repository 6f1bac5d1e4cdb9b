"""Runs collectives through process groups (gloo and NCCL). Each is a start, which returns immediately, and a wait.

Collectives work in buffers that the program has planned (see [Note: pool] in ir/program.py). A start copies into them
the values that are not there already, the collective reads from them and writes to them, and a wait returns views of
them. On CUDA, all-gathers use separate process groups: an NCCL communicator runs its collectives on one stream, where a
gather would queue behind the reductions.

[Note: abandoned] A gloo collective cannot be cancelled. Releasing the last reference to a process group waits for its
collectives in flight, until another rank leaves or the timeout ends. This wait can happen inside a garbage collection,
and would there delay the ranks that wait for this one on its next mesh. Therefore, after a run that ended in the
middle, a thread keeps its process groups alive until none of its collectives is in flight.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fzero._compat import compat
from fzero._utils.host_memory import host_bytes
from fzero.comm.collective_sequence import before_leaving, finish
from fzero.comm.groups import group_along, ranks_along
from fzero.errors import DivergenceError, FzeroValueError

if TYPE_CHECKING:
    from fzero.mesh import Mesh

_LOOK = 0.5  # seconds between two checks whether abandoned transfers are done
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LARGE = 1 << 20  # bytes from which an all-gather uses broadcasts: gloo's own all-gather first fills a temporary buffer
_PACKED = 1 << 16  # bytes up to which the values of a message between stages are packed into one transfer
CHUNK = 1 << 18  # bytes combined at once on the host: half of a level-2 cache
COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True, eq=False)
class PendingTransfer:
    """A transfer in flight.

    Attributes:
        works: the handles to wait for.
        filled: the flat tensors that hold the received data after the wait.
        on_host: whether gloo runs the transfer. Its waits block the host.
        parts: for each flat tensor in `filled`, a buffer and a view of it, [ranks, elements], that holds the ranks'
            contributions, which the wait combines with `op`.
        kept: the sent tensors, kept alive until the transfer is done.
    """

    works: Sequence[Any]
    filled: Sequence[torch.Tensor]
    on_host: bool
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    op: str = ""
    kept: Sequence[torch.Tensor] = ()


class ProcessGroups:
    """The transport of a mesh that uses torch.distributed."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._names: list[str] = []  # names of the programs, in the order of their pools
        self._under_way: set[PendingTransfer] = set()
        self._sends: dict[str, Any] = {}  # process groups for sends, by axis
        self._free: list[torch.Tensor] = []  # unused buffers for other ranks' contributions
        self._registered: list[weakref.finalize[..., Any]] = []  # each deregisters a pool with NCCL, once
        self._pairs: dict[tuple[str, int, int], Any] = {}  # by axis, index of sender, index of receiver

    def pool(self, nbytes: int, name: str = "") -> torch.Tensor:
        """Allocates memory for a program's transfers; on the CPU it begins at a page boundary.

        Every rank calls this for the same programs in the same order.
        """
        mesh = self._mesh
        if mesh.device.type == "cpu":
            found = host_bytes(nbytes, mesh.device)
        elif mesh.symmetric_memory and nbytes:
            axes = [axis for axis, size in mesh.axes.items() if size > 1]
            groups = [mesh.group(axis, gathers=gathers) for axis in axes for gathers in (True, False)]
            found, end = compat.symmetric_memory(nbytes, mesh.device, groups)
            self._registered.append(weakref.finalize(found, end))
            self._registered[-1].atexit = False
            before_leaving(self._deregister)
        else:
            found = torch.zeros(nbytes, dtype=torch.uint8, device=mesh.device)
        # The same number on every rank, because all ranks allocate their pools in the same order.
        found._fzero_number = len(self._names)  # type: ignore[attr-defined]
        self._names.append(name)
        return found

    def _deregister(self) -> None:
        for end in self._registered:
            end()

    def begin(self, pool: torch.Tensor) -> None:
        """Called before a program runs."""
        if self._mesh.size > 1:
            number = pool._fzero_number  # type: ignore[attr-defined]
            self._mesh.collective_sequence.begin(f"program {number}", f"runs {self._names[number]}, program {number}")

    def all_gather_start(
        self, shards: Sequence[torch.Tensor], axis: str, into: Sequence[torch.Tensor]
    ) -> PendingTransfer:
        """Starts to all-gather shards along an axis. `into`: for each shard the flat, padded, unsharded tensor."""
        group, shards = self._mesh.group(axis, gathers=True), [shard.reshape(-1) for shard in shards]
        if self._mesh.device.type == "cuda":
            return self._moving(compat.all_gather_together(into, shards, group), into)
        works, index = list[Any](), self._mesh.index(axis)
        for shard, whole in zip(shards, into, strict=True):
            if whole.nbytes < _LARGE:
                works.append(compat.all_gather(whole, shard, group))
                continue
            parts = whole.split(shard.numel())
            # This rank is the root of one broadcast, which it sends from its part of the result.
            settle([shard], [parts[index]])
            data = [part.view(torch.uint8) for part in parts]  # gloo does not support float8
            works += [dist.broadcast(part, group=group, group_src=i, async_op=True) for i, part in enumerate(data)]
        return self._moving(works, into)

    def reduce_scatter_start(
        self, wholes: Sequence[torch.Tensor], axis: str, op: str, into: Sequence[torch.Tensor]
    ) -> PendingTransfer:
        """Starts to reduce-scatter tensors along an axis.

        Args:
            into: the flat, padded buffer of each tensor, then the flat shard of each result.
        """
        group, flats, shards = self._mesh.group(axis), into[: len(wholes)], into[len(wholes) :]
        settle(wholes, flats)
        if self._mesh.device.type == "cuda":
            return self._moving(compat.reduce_scatter_together(shards, flats, _OPS[op], group), shards, kept=flats)
        # On the CPU, an all-to-all of the shards, which `wait` combines in the order of the ranks: the result is then
        # the same as over shared memory.
        works, parts, size = list[Any](), list[tuple[torch.Tensor, torch.Tensor]](), self._mesh.axes[axis]
        for flat in flats:
            buffer = self._buffer(flat.nbytes)
            come = buffer[: flat.nbytes]
            parts.append((buffer, come.view(flat.dtype).view(size, flat.numel() // size)))
            if flat.numel():
                works.append(dist.all_to_all_single(come, flat.view(torch.uint8), group=group, async_op=True))
        return self._moving(works, shards, parts=parts, op=op, kept=flats)

    def all_reduce_start(
        self, values: Sequence[torch.Tensor], axis: str, op: str, into: Sequence[torch.Tensor]
    ) -> PendingTransfer:
        """Starts to all-reduce values along an axis. `into`: the flat buffer of each value, reduced in place."""
        group = self._mesh.group(axis)
        settle(values, into)
        if self._mesh.device.type == "cuda":
            return self._moving(compat.all_reduce_together(merged(into), _OPS[op], group), into)
        works = [dist.all_reduce(flat, _OPS[op], group, async_op=True) for flat in merged(into)]
        return self._moving(works, into)

    def all_to_all_start(
        self, values: Sequence[torch.Tensor], axis: str, into: Sequence[torch.Tensor]
    ) -> PendingTransfer:
        """Starts an all-to-all along an axis. `into`: the flat buffer of each value, then that of each result."""
        group, flats, filled = self._mesh.group(axis), into[: len(values)], into[len(values) :]
        settle(values, flats)
        pairs = [(out.view(torch.uint8), flat.view(torch.uint8)) for flat, out in zip(flats, filled, strict=True)]
        works = [dist.all_to_all_single(out, flat, group=group, async_op=True) for out, flat in pairs if out.numel()]
        return self._moving(works, filled, kept=flats)

    def all_to_all_v_start(
        self,
        values: Sequence[torch.Tensor],
        counts: torch.Tensor,
        axis: str,
        rows: int,
        into: Sequence[torch.Tensor | None],
    ) -> PendingTransfer:
        """Starts an exchange of rows along an axis: rank i sends `counts[i][j]` rows to rank j.

        Args:
            into: the buffer of each value, None for the counts, then the buffer of each result, of `rows` rows.

        Raises:
            FzeroValueError: on every rank along the axis, if one of them would receive more rows.
        """
        group, here, numbers = self._mesh.group(axis), self._mesh.index(axis), counts.tolist()
        flats, filled = into[: len(values)], into[len(values) + 1 :]
        check_rows(numbers, rows, axis)
        settle(values, flats)  # type: ignore[arg-type]
        to, come = numbers[here], [row[here] for row in numbers]
        works = list[Any]()
        for flat, out in zip(flats, filled, strict=True):
            assert flat is not None and out is not None
            sent, received = flat.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
            width = received.numel() // rows
            received[sum(come) * width :].zero_()
            if sum(map(sum, numbers)):
                part = received[: sum(come) * width], sent[: sum(to) * width]
                sizes = [x * width for x in come], [x * width for x in to]
                works.append(dist.all_to_all_single(*part, *sizes, group=group, async_op=True))
        return self._moving(works, filled, kept=flats)  # type: ignore[arg-type]

    def connect(self, axis: str) -> None:
        """Creates the process groups for sends along an axis, unless they exist. All ranks call it together.

        They are separate groups because in the queue of another group a send would delay what the step needs next.

        Raises:
            DivergenceError: the ranks cannot reach each other.
        """
        if axis in self._sends:
            return
        try:
            self._sends[axis] = group_along(self._mesh.axes, axis, self._mesh.timeout)
        except (dist.DistError, RuntimeError) as error:
            what = f"the ranks cannot make the process groups for messages over {axis!r}"
            fix = "look at the other ranks' errors first"
            raise DivergenceError("run", what, [str(error).strip().splitlines()[0]], fix) from error

    def replicate_start(
        self,
        values: Sequence[torch.Tensor],
        axis: str,
        shift: int,
        into: Sequence[torch.Tensor],
        through: Sequence[torch.Tensor] = (),
    ) -> PendingTransfer:
        """Sends values in host memory to the rank at offset `shift` along an axis, and receives into `into` the values
        that the rank at offset `-shift` sends."""
        self.connect(axis)
        group, here, size = self._sends[axis], self._mesh.index(axis), self._mesh.axes[axis]
        works = []
        for value, place in zip(values, into, strict=True):
            data, target = (x.detach().reshape(-1).view(torch.uint8) for x in (value, place))
            if data.numel():
                to, source = [0] * size, [0] * size
                to[(here + shift) % size] = source[(here - shift) % size] = len(data)
                # All sizes but two are 0, so this is one send and one receive.
                works.append(dist.all_to_all_single(target, data, source, to, group, async_op=True))
        return self._moving(works, (), on_host=True)

    def connect_pairs(self, pairs: Iterable[tuple[str, int, int]]) -> None:
        """Creates a process group for each direction between two ranks along an axis, unless it exists.

        With a common queue for both directions, a send would wait for a receive. All ranks call this together.

        Args:
            pairs: (axis, index of the sender, index of the receiver).
        """
        for axis, source, to in sorted({*pairs} - {*self._pairs}):
            for rank in range(self._mesh.size):
                along = ranks_along(self._mesh.axes, rank, axis)
                if along[source] == rank:
                    ranks = [rank, along[to]]
                    # `new_group` is collective: every rank calls it for every group, in the same order.
                    made = dist.new_group(ranks, timeout=datetime.timedelta(seconds=self._mesh.timeout))
                    if self._mesh.rank in ranks:
                        self._pairs[axis, source, to] = made
            # Also on ranks outside of the group, which otherwise would make it again in the next call.
            self._pairs.setdefault((axis, source, to), None)

    def send_start(self, values: Sequence[torch.Tensor], axis: str, to: int) -> PendingTransfer:
        """Sends values to the rank at index `to` along an axis."""
        flats = [value.detach().contiguous().view(-1).view(torch.uint8) for value in values]
        if _packs(ends := _ends(flats)):
            packed = torch.empty(ends[-1], dtype=torch.uint8, device=self._mesh.device)
            compat.copy_all([packed[end - len(x) : end] for x, end in zip(flats, ends, strict=True)], flats)
            flats = [packed]
        return self._in_transit(flats, axis, self._mesh.index(axis), to, ())

    def recv_start(self, values: Sequence[tuple[Sequence[int], str]], axis: str, source: int) -> PendingTransfer:
        """Receives values from the rank at index `source` along an axis.

        Args:
            values: the shape and dtype of each value.
        """
        comes = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in values]
        if _packs(ends := _ends(comes)):
            packed = torch.empty(ends[-1], dtype=torch.uint8, device=self._mesh.device)
            parts = [packed[end - x.nbytes : end] for x, end in zip(comes, ends, strict=True)]
            filled = [part.view(x.dtype).view(x.shape) for part, x in zip(parts, comes, strict=True)]
            return self._in_transit([packed], axis, source, self._mesh.index(axis), filled)
        filled = [torch.empty_like(x, device=self._mesh.device) for x in comes]
        return self._in_transit(
            [x.view(-1).view(torch.uint8) for x in filled], axis, source, self._mesh.index(axis), filled
        )

    def _in_transit(
        self, flats: Sequence[torch.Tensor], axis: str, source: int, to: int, filled: Sequence[torch.Tensor]
    ) -> PendingTransfer:
        """Starts a transfer of bytes from index `source` to index `to` along an axis, and keeps them alive until it is
        done."""
        group, root = self._pairs[axis, source, to], ranks_along(self._mesh.axes, self._mesh.rank, axis)[source]
        # In a group of two ranks, a broadcast is a send and a receive.
        works = [dist.broadcast(flat, root, group, async_op=True) for flat in flats if flat.numel()]
        return self._moving(works, filled, kept=flats)

    def wait(
        self, moving: PendingTransfer, into: Sequence[torch.Tensor], together: bool = False
    ) -> Sequence[torch.Tensor]:
        """Returns the values of a transfer after they have arrived. After that no rank reads the sent buffers any more,
        with or without `together`."""
        for work in moving.works:
            if work is not None:
                self._finish(work, moving.on_host)
        for shard, (buffer, rows) in zip(moving.filled if moving.parts else (), moving.parts, strict=True):
            combine(shard.view(-1), list(rows), moving.op)
            self._free.append(buffer)
        if not into:
            into = moving.filled
        # results whose destination is not the buffer of the collective
        apart = [(f, v) for f, v in zip(moving.filled, into, strict=True) if f.data_ptr() != v.data_ptr()]
        compat.copy_all([value for _, value in apart], [flat.view(value.shape) for flat, value in apart])
        self._under_way.discard(moving)
        return into

    def abandon(self) -> None:
        """Called when a run ended in the middle: nobody waits for the transfers in flight. See [Note: abandoned]."""
        works = [work for moving in self._under_way if moving.on_host for work in moving.works if work is not None]
        self._under_way.clear()
        if not _done(works):
            groups = [*self._sends.values(), *(x for x in self._pairs.values() if x is not None)]
            if self._mesh.device.type == "cpu":
                groups += [self._mesh.joined, *map(self._mesh.group, self._mesh.axes)]
            threading.Thread(target=outlast, args=(works, groups), name="fzero-abandoned", daemon=True).start()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Returns the smallest free buffer that is large enough, or a new one. Buffers are reused from step to step."""
        found = min((x for x in self._free if len(x) >= nbytes), key=len, default=None)
        if found is None:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._free = [x for x in self._free if x is not found]
        return found

    def _moving(
        self,
        works: Sequence[Any],
        filled: Sequence[torch.Tensor],
        on_host: bool = False,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        op: str = "",
        kept: Sequence[torch.Tensor] = (),
    ) -> PendingTransfer:
        moving = PendingTransfer(works, filled, on_host or self._mesh.device.type == "cpu", parts, op, kept)
        self._under_way.add(moving)
        return moving

    def _finish(self, work: Any, on_host: bool) -> None:
        """Waits for a collective. A wait that blocks the host also monitors the other ranks."""
        if not on_host:
            work.wait()
            return
        finish(work, lambda: self._mesh.collective_sequence.look("step"))


def _ends(values: Sequence[torch.Tensor]) -> list[int]:
    """Returns the end offset in bytes of each of several values that are stored consecutively, each at a multiple of
    16."""
    ends, end = list[int](), 0
    for x in values:
        end = -(-end // 16) * 16 + x.nbytes
        ends.append(end)
    return ends


def _packs(ends: Sequence[int]) -> bool:
    """Whether the values are packed into one message: only if there are several small ones. Copying large values takes
    longer than sending a second message."""
    return len(ends) > 1 and ends[-1] <= _PACKED


def _done(works: Sequence[Any]) -> bool:
    return all(work.is_completed() for work in works)


def outlast(works: Sequence[Any], groups: Sequence[Any]) -> None:
    """Keeps references to process groups until all these collectives are done.

    It polls and does not wait: a thread that returns from C++ after the interpreter has shut down crashes the process.
    """
    while not _done(works):
        time.sleep(_LOOK)


def settle(values: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
    """Copies the operands of a reduction into its buffers, unless they were computed there, and zero-fills the
    padding."""
    pairs = list(zip(values, flats, strict=True))
    apart = [(value, flat) for value, flat in pairs if value.data_ptr() != flat.data_ptr()]
    compat.copy_all([flat[: value.numel()] for value, flat in apart], [value.reshape(-1) for value, _ in apart])
    compat.zero_all([flat[value.numel() :] for value, flat in pairs if flat.numel() > value.numel()])


def combine(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    """Reduces the ranks' contributions into `out`, in the order of the ranks, as the shared-memory transport does."""
    num = CHUNK // out.element_size()
    for here, *held in zip(out.split(num), *(part.split(num) for part in parts), strict=True):
        COMBINE[op](held[0], held[1], out=here)
        for part in held[2:]:
            COMBINE[op](here, part, out=here)


def check_rows(counts: Sequence[Sequence[int]], rows: int, axis: str) -> None:
    """Raises if a rank would receive more rows than its buffer has. All ranks know all counts.

    Args:
        counts: for each rank, the number of rows that it sends to each rank.
        rows: the number of rows of a buffer.
        axis: the axis of the ranks.
    """
    received = [sum(row[i] for row in counts) for i in range(len(counts))]
    over = [f"rank {i} of {axis!r}: {x} rows" for i, x in enumerate(received) if x > rows]
    if over:
        what = f"the experts of a rank were chosen for more rows than the {rows} that it has memory for"
        fix = (
            "raise max_rows, or leave it out: max_rows=None; the state is lost, so start again, or on every rank "
            "close_mesh(), make_mesh(), compile, and restore the last checkpoint"
        )
        raise FzeroValueError("expert_parallel", what, over, fix)


def merged(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Merges flat tensors that are adjacent in memory into one tensor each. Empty tensors, which have no address, are
    dropped."""
    out: list[torch.Tensor] = []
    for flat in (f for f in flats if f.numel()):
        last = out[-1] if out else None
        if last is not None and last.dtype == flat.dtype and last.data_ptr() + last.nbytes == flat.data_ptr():
            # The bytes after `last` are those of `flat`, in the same storage.
            out[-1] = last.as_strided((last.numel() + flat.numel(),), (1,))
        else:
            out.append(flat)
    return out


GATHER_BYTES = 4 << 20
"""The most bytes that `gather` gathers by one collective of Gloo."""


def gather(mesh: Mesh, shard: torch.Tensor, axis: str, into: torch.Tensor | None = None) -> torch.Tensor:
    """All-gathers the shards along an axis into one flat tensor, either a new one or `into`.

    For use outside programs. Large shards in host memory are gathered in pieces, because Gloo allocates a buffer for
    all that one collective gathers.
    """
    size, group = mesh.axes[axis], mesh.group(axis)
    whole = into
    if whole is None:
        whole = torch.empty(shard.numel() * size, dtype=shard.dtype, device=shard.device)
    num = max(1, GATHER_BYTES // (size * shard.element_size()))
    if shard.numel() <= num or shard.device.type != "cpu":
        compat.all_gather(whole, shard, group).wait()
        return whole
    buffer = torch.empty(size * num, dtype=shard.dtype, device=shard.device)
    for begin in range(0, shard.numel(), num):
        piece = shard[begin : begin + num]
        found = buffer[: size * piece.numel()]
        compat.all_gather(found, piece, group).wait()
        whole.view(size, -1)[:, begin : begin + num] = found.view(size, -1)
    return whole
