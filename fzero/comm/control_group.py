"""Exchanges small values between ranks over gloo process groups of their own, and runs functions on all ranks together.

The exchanges of a mesh use one process group, separate from those that move tensors, so an exchange never waits behind
a transfer; an asynchronous save, which runs in a thread, has another one. Values are JSON whose type is checked:
nothing that arrives is unpickled or run as code.

A rank that raised an error immediately would leave the others waiting in their next exchange. Therefore the ranks
first exchange their results or errors, and raise afterwards. A rank that waits in an exchange checks what the others
do (comm/collective_sequence.py), so ranks that part or leave are an error within seconds, never a hang.
"""

from __future__ import annotations

import datetime
import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fzero._compat import compat
from fzero._utils.bounded_json import MOST, Malformed, dumped, formed, parsed
from fzero.comm.collective_sequence import FIRST_LOOK, SAME_CALLS, CollectiveSequence, before_leaving, finish, latest
from fzero.comm.collectives import outlast
from fzero.comm.control_messages import timed_out
from fzero.errors import (
    CheckpointError,
    DivergenceError,
    FzeroError,
    FzeroValueError,
    RankLost,
    StorageError,
    left,
    parted,
)

if TYPE_CHECKING:
    from fzero.mesh import Mesh

T = TypeVar("T")

_INLINE = 504  # bytes of a value that the first message of an exchange has room for, after the length
_LOOKS = 25  # looks for the rank that has closed a connection
_TIMEOUT = 600.0  # seconds that ranks wait for each other if there is no mesh whose timeout applies


class ControlGroup:
    """The ranks that exchange values, and their process group.

    Args:
        timeout: seconds that a rank waits for the others in an exchange.
        group: a gloo process group.

    Attributes:
        sequence: numbers the exchanges among the collective actions of the mesh; None without a mesh.
    """

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = _TIMEOUT, group: Any = None):
        self.rank, self.size, self.timeout, self.group = rank, size, timeout, group
        self.sequence: CollectiveSequence | None = None

    def close(self) -> None:
        """Lets go of the process group. An exchange after that is an error."""
        self.group = None

    def all_gather(self, value: Any, form: Any = Any, owner: str = "mesh", about: str = "") -> list[Any]:
        """Returns every rank's value, ordered by rank, checked against the type `form` (bounded_json.py). All ranks
        call it.

        Args:
            owner: the name of the public call that makes the exchange.
            about: describes what this rank does. Ranks that do something else at this point show it in their errors.

        Communication: 512 bytes from each rank; a longer value, which is compressed, in a second message.

        Raises:
            DivergenceError: a value of another type, or ranks that make another call or timed out; names the ranks.
            RankLost: a rank has left.
        """
        if self.size == 1:
            return [parsed(dumped(value), form)]
        self._begin(owner, about)
        found, problems, calls = [], [], {}
        packed = zlib.compress(dumped([owner, about, value]).encode(), 1)
        for rank, data in enumerate(self.all_gather_bytes(packed, owner)):
            try:
                call, what, theirs = parsed(_unpacked(data), tuple[str, str, Any])
                calls[rank] = call, what or call
                found.append(formed(theirs, form) if call == owner else None)
            except Malformed as error:
                problems.append(f"rank {rank}: {error}")
        if len({call for call, _ in calls.values()}) > 1:
            lines = [f"rank {rank}: {what}" for rank, (_, what) in calls.items()]
            raise self._ended(DivergenceError(owner, "the ranks make different calls", lines, SAME_CALLS))
        if problems:
            fix = "look at the other ranks: they run the same version of fzero, and no other process connects to them"
            raise DivergenceError(owner, "a rank sent a message that is not of the expected form", problems, fix)
        return found

    def all_gather_bytes(self, data: bytes, owner: str = "mesh") -> list[bytes]:
        """Returns every rank's bytes, ordered by rank. All ranks call it.

        Communication: 512 bytes from each rank; if one has more, as many bytes from each rank as the longest has.
        """
        if self.size == 1:
            return [data]
        first = len(data).to_bytes(8, "little") + data[:_INLINE]
        rows = self._gathered(first, 8 + _INLINE, owner)
        lengths = [int.from_bytes(row[:8], "little") for row in rows]
        if (longest := max(lengths)) > _INLINE:
            rows = self._gathered(data, longest, owner)
            return [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return [row[8 : 8 + length] for row, length in zip(rows, lengths, strict=True)]

    def all_gather_tensors(self, tensors: dict[str, torch.Tensor], owner: str) -> list[dict[str, torch.Tensor]]:
        """Returns every rank's named tensors on the host, ordered by rank. They are sent as safetensors. All ranks call
        it."""
        from safetensors.torch import load, save

        on_host = {name: x.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, x in tensors.items()}
        seen = set[int]()
        for name, x in on_host.items():  # safetensors does not accept tensors that share memory
            if x.untyped_storage().data_ptr() in seen:
                on_host[name] = x.clone()
            seen.add(x.untyped_storage().data_ptr())
        self._begin(owner, "")
        return [load(data) for data in self.all_gather_bytes(save(on_host), owner)]

    def _gathered(self, data: bytes, width: int, owner: str) -> list[bytes]:
        """Returns every rank's bytes, padded to `width`."""
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        whole = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")
        deadline = time.monotonic() + self.timeout

        def look() -> None:
            self._look(owner)
            if time.monotonic() > deadline:
                raise self._timed_out(owner)

        work = compat.all_gather(whole, mine, self.group)
        try:
            finish(work, look, FIRST_LOOK)
        except BaseException as error:
            # A rank that takes part and then leaves is not missed: what it has sent is about to arrive.
            if isinstance(error, (RankLost, CheckpointError)) and _arrives(work):
                return self._rows(whole, width)
            # See [Note: abandoned] in comm/collectives.py.
            if not work.is_completed():
                threading.Thread(
                    target=outlast, args=([work], [self.group]), name="fzero-abandoned", daemon=True
                ).start()
            if isinstance(error, FzeroError) or not isinstance(error, RuntimeError):
                raise self._ended(error) from error.__cause__
            raise self._ended(self._lost(owner)) from error
        return self._rows(whole, width)

    def _rows(self, whole: torch.Tensor, width: int) -> list[bytes]:
        return [row.numpy().tobytes() for row in whole.view(self.size, width)]

    # --- what an exchange of the mesh does beside the exchange; an asynchronous save does something else ---

    def _begin(self, owner: str, about: str) -> None:
        """Called before an exchange."""
        if self.sequence is not None:
            self.sequence.check(owner)
            self.sequence.begin(owner, about)

    def _look(self, owner: str) -> None:
        """Called while this rank waits. Raises if the others will not come."""
        if self.sequence is not None:
            self.sequence.look(owner)

    def _ended(self, error: BaseException) -> BaseException:
        """Marks an exchange that did not take place on all ranks as the last one, and returns the error."""
        if self.sequence is not None:
            self.sequence.end(error)
        return error

    def _lost(self, owner: str) -> FzeroError:
        """Returns the error for a connection that was closed."""
        # The kernel closes the connections of a process that was killed shortly before it shows that it has ended.
        for _ in range(_LOOKS):
            try:
                self._look(owner)  # raises an error that names the rank, if that is known
            except FzeroError as known:
                return known
            time.sleep(FIRST_LOOK)
        return self._left(owner)

    def _left(self, owner: str) -> FzeroError:
        """Returns the error for a rank that has left, if it is not known which."""
        return left(owner, self.rank, self.size)

    def _timed_out(self, owner: str) -> FzeroError:
        behind = [] if self.sequence is None else self.sequence.behind()
        lines = [f"rank {r} {timed_out(self.timeout)}" for r in behind] or [f"a rank {timed_out(self.timeout)}"]
        fix = (
            "call the step in the same way on every rank: one with a batch of another shape than before builds a "
            "program of its own, the others run the old one"
            if owner == "compile"
            else f"look at these ranks' errors first; if there are none, call {owner} on every rank, outside of `if "
            "rank == 0`: all of them take part"
        )
        return DivergenceError(owner, "not every rank has arrived", lines, fix)


def _arrives(work: Any) -> bool:
    """Whether a collective ends well within a second."""
    try:
        work.wait(datetime.timedelta(seconds=1))
    except RuntimeError:
        return False
    return True


def _unpacked(data: bytes) -> bytes:
    """Decompresses at most `MOST` bytes, whatever size the data claims to have."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, MOST)
    except zlib.error as error:
        raise Malformed(f"damaged: {error}") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise Malformed(f"more than {MOST} bytes, or cut short")
    return found


ALONE = ControlGroup()
"""The group of a process without others."""

_shared: dict[Any, Any] = {}  # by default process group: the process group of the exchanges, which all meshes use


def new_process_group() -> Any:
    """Creates a process group for exchanges. All ranks call it."""
    # Exchanges have timeouts of their own. gloo's would close the connections before an error can name a rank.
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))


def shared_process_group() -> Any:
    """Returns the process group of the exchanges of this process's meshes. The first call, on all ranks, creates it."""
    if (joined := dist.group.WORLD) not in _shared:
        before_leaving(_shared.clear)
        _shared.clear()
        _shared[joined] = new_process_group()
    return _shared[joined]


def world() -> ControlGroup:
    """Returns the group of the newest mesh, or of all ranks of the default process group, or `ALONE`."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ALONE
    if (sequence := latest()) is not None and sequence.control is not None:
        return sequence.control
    return ControlGroup(dist.get_rank(), dist.get_world_size(), group=shared_process_group())


# --- functions that all ranks run together ---


class _Failure(NamedTuple):
    """An error of one rank, as the others are told: its text, its fix, and whether storage has failed."""

    text: str
    fix: str
    is_storage: bool


def run_on_all_ranks(
    group: ControlGroup,
    owner: str,
    act: Callable[[], T],
    undo: Callable[[], object] = lambda: None,
    *,
    what: str = "the work of some ranks failed",
    failure: type[FzeroError] = FzeroValueError,
    about: str = "",
) -> T:
    """Runs `act` on every rank and returns this rank's result after `act` has returned on all ranks.

    An error on one rank is raised on all of them.

    Args:
        undo: called on every rank before it raises, if `act` failed on any.
        what: the message of the error.
        failure: its class. For a `CheckpointError`, a `StorageError` is raised if every failure came from the operating
            system or from an object store. For a `DivergenceError`, which the launcher takes for a consequence, a rank
            that failed raises its own exception instead.
        about: describes what this rank does. Ranks that do something else at this point show it in their errors.

    Communication: 512 bytes from each rank.

    Raises:
        FzeroValueError: `act` failed on some rank; names each rank that failed, and why. If it failed alike on all
            ranks, each raises its own exception.
        DivergenceError: a rank makes another call, has left, or timed out.
    """
    result: list[T] = []
    _outcomes(group, owner, lambda: result.append(act()), undo, what, failure, Any, about)
    return result[0]


def all_gather_values(
    group: ControlGroup,
    owner: str,
    make: Callable[[], Any],
    undo: Callable[[], object] = lambda: None,
    *,
    form: Any = Any,
    what: str = "the work of some ranks failed",
    failure: type[FzeroError] = FzeroValueError,
) -> list[Any]:
    """Runs `make` on every rank and returns the results of all ranks, ordered by rank.

    The results must be JSON values, of the type `form`. Errors are raised as by `run_on_all_ranks`.
    """
    return _outcomes(group, owner, make, undo, what, failure, form, "")


def broadcast_from_rank0(group: ControlGroup, owner: str, make: Callable[[], Any]) -> Any:
    """Runs `make` on rank 0 and returns its result, which must be a JSON value, on every rank.

    An error of `make` on rank 0 is raised on all ranks, as by `run_on_all_ranks`.
    """
    return all_gather_values(group, owner, lambda: make() if group.rank == 0 else None)[0]


def _outcomes(
    group: ControlGroup,
    owner: str,
    act: Callable[[], Any],
    undo: Callable[[], object],
    what: str,
    failure: type[FzeroError],
    form: Any,
    about: str,
) -> list[Any]:
    error: BaseException | None = None
    result: Any = None
    try:
        result = act()
    except RankLost:  # not exchanged: the other ranks see the loss too
        raise
    except BaseException as caught:  # Ctrl-C too: the other ranks wait for this one
        error = caught
    mine = None if error is None else _failure(error, failure)
    try:
        everyone = group.all_gather((result, mine), tuple[form | None, _Failure | None], owner, about)
    except DivergenceError as diverged:  # the error cannot be reported to the other ranks
        if error is None:
            raise
        raise error from diverged
    failures = {rank: one for rank, (_, one) in enumerate(everyone) if one is not None}
    if not failures:
        return [value for value, _ in everyone]
    undo()
    if error is not None and not isinstance(error, Exception):
        raise error
    # If all ranks failed alike, each raises its own exception, with its type and traceback.
    alike = len(failures) == group.size and len({one.text for one in failures.values()}) == 1
    if error is not None and (failure is DivergenceError or (alike and failure is FzeroValueError)):
        raise error
    if alike and isinstance(error, failure):
        raise error
    if failure is CheckpointError and all(one.is_storage for one in failures.values()):
        failure = StorageError
    fix = joined_fixes(one.fix for one in failures.values())
    raise failure(owner, what, reasons({rank: one.text for rank, one in failures.items()}), fix) from error


def _failure(error: BaseException, failure: type[FzeroError]) -> _Failure:
    text, fix = parted(error)
    if failure is CheckpointError and isinstance(error, OSError) and not isinstance(error, FzeroError):
        fix = (
            "make the directory writable, with enough free space for the whole checkpoint, on a filesystem that all "
            "ranks share"
        )
    text = text if isinstance(error, FzeroError) else f"{type(error).__name__}: {text}"
    return _Failure(text, fix, isinstance(error, (OSError, StorageError)))


def joined_fixes(fixes: Iterable[str]) -> str:
    """Returns the fix of an error that reports those of several ranks."""
    return "; ".join(dict.fromkeys(fix for fix in fixes if fix)) or "look at the first rank that failed"


def reasons(texts: Mapping[int, str]) -> list[str]:
    """Returns one line for each rank that failed. `texts` maps a rank to its error text."""
    return [f"rank {rank}: " + text.replace("\n", "\n    ") for rank, text in texts.items() if text]


def differing(group: ControlGroup, owner: str, text: str, about: str = "") -> tuple[int, str, str] | None:
    """Compares `text` across ranks. Returns the first rank whose text differs from rank 0's, with both texts, or None.

    Communication: a digest from each rank, and two texts if they differ.
    """
    digests = group.all_gather(hashlib.sha256(text.encode()).hexdigest(), str, owner, about)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return None
    texts = group.all_gather(text if group.rank in (0, other) else "", str, owner, about)
    return other, texts[0], texts[other]


_LOST = ("gloo", "pair closure", "Connection closed", "Connection reset")
"""Substrings that identify gloo's connection errors, which have no exception class of their own."""


@contextmanager
def unbroken(mesh: Mesh) -> Iterator[None]:
    """Wraps code that moves data between ranks. Any exception inside makes this the last call on the mesh
    (`CollectiveSequence.end`).

    Raises:
        DivergenceError: replaces an error of the process group; says what another rank did, or that a rank has left.
    """
    try:
        yield
    except BaseException as error:
        if mesh.size == 1:
            raise
        if not (
            isinstance(error, dist.DistError)
            or (isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST))
        ):
            # An error of this rank itself, or Ctrl-C. The others are told, because a turn has ended in the middle.
            _end(mesh, error)
            raise
        try:
            # raises a DivergenceError if the other ranks' states explain the failure
            mesh.collective_sequence.look("step")
            fix = "look at the other ranks' errors first; the state is lost, continue from the last checkpoint"
            problems = [f"rank {mesh.rank}: {str(error).strip().splitlines()[0]}"]
            raise RankLost(
                "step", "a transfer failed: another rank has left, or runs a different program", problems, fix
            )
        except DivergenceError as known:
            _end(mesh, known)
            raise known from error


def _end(mesh: Mesh, error: BaseException) -> None:
    mesh.collective_sequence.end(error)
    if mesh.context.transport is not None:
        mesh.context.transport.abandon()
