"""Device meshes with named axes: `make_mesh` for existing devices, `AbstractMesh` for planning without devices.

The process that calls `make_mesh` is one device of the mesh; torchrun's environment variables say which one. Ranks are
laid out in row-major order of the axes as given. A mesh of one device needs no process group.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import itertools
import logging
import math
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fzero._compat import allocator, compat
from fzero._utils import cpu_affinity
from fzero._utils.arguments import flag, number, plain_numbers, python_numbers
from fzero.comm import launcher
from fzero.comm.collective_sequence import CollectiveSequence, leave_all
from fzero.comm.control_group import ALONE, ControlGroup, shared_process_group
from fzero.comm.groups import group_along
from fzero.comm.launcher_environment import LOCAL, Processes
from fzero.comm.local_device import choose_device, compare, crowded, one_visible, unsupported
from fzero.comm.rendezvous import meet
from fzero.errors import BusyError, FzeroTypeError, FzeroValueError, left

logger = logging.getLogger("fzero")

AXES = ("node", "replica", "data", "expert", "seq", "pipe", "model")
"""The names an axis can have."""

_MOST_DEVICES = 2**20  # the limit exists because a plan lists the ranks along an axis


@dataclass(frozen=True)
class AbstractMesh:
    """The names and sizes of mesh axes, without devices: enough to lower, plan and simulate a step.

    Args:
        device_type: "cpu" or "cuda".
        shared_memory: whether the ranks read each other's buffers, as CPU ranks of one host do. True by default for
            CPUs. A program then needs a larger pool, because a rank learns later that the others have read a buffer.
        unified_memory: whether host and device share one memory, as on a CPU. Offloaded values then stay where they
            are.
        **axes: the size of each axis, the slowest first. Names are "node", "replica", "data", "expert", "seq", "pipe"
            and "model".

    Raises:
        FzeroValueError: an unknown axis, or a size that is not an integer of at least 1.

    Example:
        >>> AbstractMesh(data=8).size
        8
    """

    axes: dict[str, int]
    device_type: str = "cpu"
    shared_memory: bool = True
    unified_memory: bool = True

    def __init__(
        self,
        *,
        device_type: str = "cpu",
        shared_memory: bool | None = None,
        unified_memory: bool | None = None,
        **axes: int,
    ):
        object.__setattr__(self, "axes", _checked(axes))
        object.__setattr__(self, "device_type", device_type)
        object.__setattr__(self, "shared_memory", device_type == "cpu" if shared_memory is None else shared_memory)
        object.__setattr__(self, "unified_memory", device_type == "cpu" if unified_memory is None else unified_memory)

    def of_type(self, device_type: str) -> AbstractMesh:
        """Returns a mesh with the same axes of devices of another type. Memory settings that have their default value
        get the default value for that type."""
        usual = self.device_type == "cpu"
        shared = None if self.shared_memory == usual else self.shared_memory
        unified = None if self.unified_memory == usual else self.unified_memory
        axes: dict[str, Any] = self.axes
        return AbstractMesh(device_type=device_type, shared_memory=shared, unified_memory=unified, **axes)

    @property
    def size(self) -> int:
        """The number of devices, which is the number of ranks."""
        return math.prod(self.axes.values())

    def axis_size(self, axes: str | tuple[str, ...]) -> int:
        """Returns the number of devices along one axis, or the product of the sizes of several axes."""
        return math.prod(self.axes[a] for a in ((axes,) if isinstance(axes, str) else axes))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes.items())

    def __eq__(self, other: object) -> bool:
        """Compares the axes, their order (which is the order of the ranks), the device type and the memory settings."""
        return self._key() == other._key() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return *self.axes.items(), self.device_type, self.shared_memory, self.unified_memory


class Keeps(Protocol):
    """Stores the data that arrives from another rank's state, as elastic/peer_replicas.py does."""

    def places(self, leaves: Sequence[str], every: int = ..., once: bool = ...) -> list[torch.Tensor] | None: ...


class Context:
    """The mutable context of a mesh: objects that are created on first use and live as long as the mesh, which is
    frozen.

    Attributes:
        transport: moves data between the ranks (comm/transport.py).
        copies: copies data between the device and the host (memory/device_copies.py).
        graphs: captures steps as CUDA graphs (runtime/cuda_graphs.py).
        collective_sequence: numbers the collective actions of the ranks (comm/collective_sequence.py).
        control: exchanges small values between the ranks (comm/control_group.py).
        peer_replicas: stores the data that arrives from another rank's state (elastic/peer_replicas.py); None if
            nothing stores it.
        holder: has an object of the call that has exclusive use of the mesh, if there is one.
        groups: the process group along each axis, cached because a DeviceMesh of several axes takes a millisecond to
            find it.
    """

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.transport: Any = None
        self.copies: Any = None
        self.graphs: Any = None
        self.collective_sequence: CollectiveSequence | None = None
        self.control: ControlGroup | None = None
        self.peer_replicas: Keeps | None = None
        self.holder: dict[str, object] = {}


@dataclass(frozen=True, eq=False)
class Mesh(AbstractMesh):
    """A mesh that this process is part of. Made by `make_mesh`.

    Attributes:
        axes: the size of each axis, the slowest first.
        rank: the index of this process. Ranks count through the axes in row-major order.
        device: the device of this process.
        device_mesh: the `torch.distributed.DeviceMesh` with the same axes; None on a mesh of one device.
        timeout: the seconds after which a collective fails that some rank never joins.
        shared_memory, unified_memory, symmetric_memory: as for `make_mesh`, after the defaults were decided.

    Example:
        >>> mesh = make_mesh(data=1)
        >>> mesh.axes, mesh.rank, mesh.coordinate
        ({'data': 1}, 0, {'data': 0})
    """

    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_mesh: Any = None
    timeout: float = 600.0
    # on CUDA, a separate process group per axis, so that all-gathers do not queue behind reductions
    gather_groups: Mapping[str, Any] = field(default_factory=dict)
    symmetric_memory: bool = False
    joined: Any = None  # the default process group in which the mesh was made
    context: Context = field(default_factory=Context)
    _store: Any = None
    secret: bytes = field(default=b"", repr=False)  # known only to the ranks of this mesh

    def __init__(
        self,
        axes: dict[str, int],
        rank: int,
        device: torch.device,
        device_mesh: Any = None,
        timeout: float = 600.0,
        shared_memory: bool = False,
        gather_groups: Mapping[str, Any] | None = None,
        unified_memory: bool | None = None,
        store: dist.Store | None = None,
        secret: bytes = b"",
        symmetric_memory: bool = False,
    ):
        vars(self).update(  # the dataclass is frozen, so plain assignment would fail
            axes=_checked(axes),
            device_type=device.type,
            rank=rank,
            device=device,
            device_mesh=device_mesh,
            timeout=timeout,
            shared_memory=shared_memory,
            gather_groups=gather_groups or {},
            unified_memory=device.type == "cpu" if unified_memory is None else unified_memory,
            joined=dist.group.WORLD if dist.is_initialized() else None,
            context=Context(),
            _store=store,
            secret=secret,
            symmetric_memory=symmetric_memory,
        )

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's index along every axis."""
        index, out = self.rank, {}
        for name, size in reversed(self.axes.items()):
            index, out[name] = divmod(index, size)
        return {name: out[name] for name in self.axes}

    def index(self, axes: str | tuple[str, ...]) -> int:
        """Returns this rank's index along one axis, or its row-major index along several axes."""
        here, index = self.coordinate, 0
        for name in (axes,) if isinstance(axes, str) else axes:
            index = index * self.axes[name] + here[name]
        return index

    def group(self, axis: str, *, gathers: bool = False) -> Any:
        """Returns the process group of the ranks along `axis` that have this rank's index on every other axis.

        On CUDA, `gathers` selects a separate process group for all-gathers.
        """
        if self.device_mesh is None:
            raise FzeroValueError("mesh", f"a mesh of one device has no process group for axis {axis!r}")
        self.check_open()
        if gathers and self.gather_groups:
            return self.gather_groups[axis]
        if axis not in self.context.groups:
            self.context.groups[axis] = self.device_mesh[axis].get_group()
        return self.context.groups[axis]

    @property
    def store(self) -> dist.Store:
        """The key-value store through which ranks exchange control messages without a collective."""
        self.check_open()
        return self._store or compat.default_store()

    @property
    def collective_sequence(self) -> CollectiveSequence:
        """The numbered collective actions of the ranks."""
        if self.context.collective_sequence is None:
            store = None if self.size == 1 else self.store
            self.context.collective_sequence = CollectiveSequence(store, self.rank, self.size, self.timeout)
        return self.context.collective_sequence

    @property
    def control(self) -> ControlGroup:
        """The group through which the ranks exchange small values, separate from those that move tensors."""
        self.check_open()
        return ALONE if self.context.control is None else self.context.control

    def check_open(self) -> None:
        """Raises FzeroValueError if the process group in which this mesh was made no longer exists."""
        if self.device_mesh is not None and (not dist.is_initialized() or dist.group.WORLD is not self.joined):
            fix = "close_mesh() comes last; after it, make_mesh() again, and compile and restore on the new mesh"
            raise FzeroValueError("mesh", f"the mesh {self} is closed", fix=fix)

    @contextlib.contextmanager
    def alone(self, owner: str) -> Iterator[None]:
        """Returns a context manager that gives its body exclusive use of the mesh.

        Steps share resources that are not thread-safe, and a step writes its state in place. Takes microseconds.

        Raises:
            BusyError: the mesh is in use by another thread, or by a call further up the stack of this one. It does not
                wait, because the order of the two calls could then differ between ranks.
            DivergenceError: an earlier call on the mesh ended in the middle.
        """
        if self.context.collective_sequence is not None:
            self.context.collective_sequence.check(owner)
        # Not a lock: Ctrl-C between acquiring it and entering the `try` would leave the mesh in use for ever.
        holder, this_call = self.context.holder, object()
        try:
            if holder.setdefault("call", this_call) is not this_call:  # atomic: of two threads, one comes first
                raise _busy(owner)
            yield
        finally:
            # This calls no function, so Python raises no KeyboardInterrupt before the mesh is released.
            if "call" in holder and holder["call"] is this_call:
                del holder["call"]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Returns the mesh itself: a copy of a state is on the same devices and in the same process groups."""
        return self

    def __reduce__(self) -> Any:
        """Rejects pickling. It also fails for the tensors of a state, because they refer to their mesh.

        Raises:
            FzeroTypeError: always.
        """
        fix = (
            "fz.checkpoint.save(path, state) saves a state; the leaves of train.gather(state) are whole tensors, which "
            "torch.save takes"
        )
        raise FzeroTypeError(
            "mesh", "a mesh belongs to its process: neither it nor the tensors of a state on it can be pickled", fix=fix
        )


def _busy(owner: str) -> BusyError:
    what = (
        "its mesh is in use: a step, an evaluation, init, restore, gather or a save has not returned yet in another "
        "thread, or above this call"
    )
    fix = "call these one after the other, from one thread; copy first what another thread needs: train.gather(state)"
    return BusyError(owner, what, fix=fix)


@plain_numbers
def make_mesh(
    *,
    device: str | None = None,
    timeout: float = 600.0,
    shared_memory: bool = True,
    unified_memory: bool | None = None,
    symmetric_memory: bool | None = None,
    bind_cores: bool = True,
    keep_freed_memory: bool = True,
    **axes: int | str | Sequence[int],
) -> Mesh:
    """Makes the mesh of all processes that torchrun started, including this one.

    Args:
        device: "cuda" or "cpu". By default CUDA if there is a device for every process of this host.
        timeout: seconds after which a collective fails that some rank never joins.
        shared_memory: whether CPU processes that are all on one host read each other's buffers instead of sending them
            through gloo.
        unified_memory: whether host and device share one memory; by default True on a CPU. With False on a CPU, a
            thread copies offloaded values, as on a GPU (memory/simulated_copies.py). This is for tests and for trying
            out an offloaded run.
        symmetric_memory: whether the pools of programs are registered with NCCL. Copy engines then gather parameters,
            which leaves the GPU's multiprocessors to the matrix products that run at the same time. Requires torch 2.11
            and NCCL 2.28; with other versions it is left out, and a line in the log says why. Off by default, because
            it has not been run on a GPU yet.
        bind_cores: whether a process with a GPU is bound to the cores of the GPU's NUMA node, if Linux reports that
            node.
        keep_freed_memory: whether glibc keeps large freed blocks of a CPU process for later allocations. Otherwise it
            returns them to the system, which then has to zero every page again.
        **axes: the size of each axis, e.g. `replica=2, data=4`, slowest first. Their product is the number of
            processes. One size may be -1: whatever remains. One may be "local": the number of processes per host,
            divided by the sizes of the axes that follow, so that this axis and those that follow lie within a host:
            `node=-1, data="local"`. One may have several sizes, `data=-1, pipe=(4, 2, 1)`: the first one that fits the
            number of processes is used. Without any axes: `data=-1`.

    Communication: none besides joining the process group, which a mesh of one device does not need.

    Raises:
        FzeroValueError: an unknown axis name; sizes whose product is not the number of processes; "local" on hosts with
            different numbers of processes, or if the axes that follow do not divide that number; ranks that were given
            different axes; arguments of the wrong type.
        DivergenceError: ranks timed out; names them by number.

    Example:
        >>> mesh = make_mesh(data=1)
        >>> mesh.size, mesh.device_mesh is None
        (1, True)
    """
    problems = number("timeout", timeout, above=0) + flag("shared_memory", shared_memory)
    problems += flag("bind_cores", bind_cores) + flag("keep_freed_memory", keep_freed_memory)
    problems += flag("unified_memory", unified_memory) if unified_memory is not None else []
    if device is not None and not isinstance(device, str):
        problems.append(f"device={device!r}: must be 'cpu' or 'cuda'")
    problems += flag("symmetric_memory", symmetric_memory) if symmetric_memory is not None else []
    if symmetric_memory is True and (device == "cpu" or not torch.cuda.is_available()):
        problems.append("symmetric_memory=True: applies only to GPUs, and this is a mesh of CPUs")
    if problems:
        fix = "e.g. make_mesh(data=8, timeout=600)"
        raise FzeroValueError("make_mesh", "invalid arguments", problems, fix)
    if launcher.under_torchrun():
        launcher.die_with_parent()
    if launcher.under_torchrun() or Processes.of().world > 1:
        launcher.install_excepthook()
    elif all(n == -1 for n in axes.values()) and "WORLD_SIZE" not in os.environ:
        _say_alone(device)
    mesh = unjoined(device, timeout, shared_memory, unified_memory, axes)
    if mesh.device_type == "cuda" and bind_cores:
        cpu_affinity.keep_beside(mesh.device)
    elif mesh.device_type == "cpu" and keep_freed_memory:
        allocator.keep_freed_memory()
    return _joined(mesh, symmetric_memory is True)


def _say_alone(device: str | None) -> None:
    """Reports that a single process trains although all processes were asked for: the launcher was probably forgotten.

    With several GPUs this is a warning. On a CPU a single process may well be intended, so it is only printed to a
    terminal.
    """
    number = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
    if number > 1:
        text = "fzero.make_mesh: one process trains, on one of %d GPUs; torchrun --nproc-per-node %d SCRIPT uses all"
        logger.warning(text, number, number)
    elif number == 0 and sys.stderr is not None and sys.stderr.isatty():
        text = "fzero.make_mesh: one process trains; torchrun --nproc-per-node NUMBER SCRIPT starts several"
        print(text, file=sys.stderr)


def unjoined(
    device: str | None = None,
    timeout: float = 600.0,
    shared_memory: bool = True,
    unified_memory: bool | None = None,
    axes: Mapping[str, int | str | Sequence[int]] | None = None,
) -> Mesh:
    """Returns the mesh that `make_mesh` would make, but without its process groups. Lowering for it gives the same
    program."""
    processes = Processes.of()
    world, rank, local, locals_ = processes.world, processes.rank, processes.local, processes.num_local
    given: dict[str, Any] = dict(axes or {"data": -1})
    several: list[Sequence[Any]] = [n if isinstance(n, tuple | list) and n else [n] for n in given.values()]
    for some in itertools.product(*several):
        _checked({name: n for name, n in zip(given, some, strict=True) if n not in (-1, LOCAL)})
    sizes = _checked(processes.axes(given))
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hip, has_mps = torch.version.hip, torch.backends.mps.is_available()
    others = unsupported(hip, available, hasattr(torch, "xpu") and torch.xpu.is_available(), has_mps)
    available = 0 if hip else available
    where, unused = choose_device(device, local, locals_, available, one_visible(os.environ), others)
    if unused and local == 0:
        warnings.warn(unused, stacklevel=2)
    device = where.type
    if device == "cuda":
        torch.cuda.set_device(where)
        compat.settle_attention(where)
    elif local == 0 and (text := crowded(torch.get_num_threads(), locals_, len(cpu_affinity.cores_of_host()))):
        logger.warning("fzero.make_mesh: %s", text)
    if world == 1:
        return Mesh(sizes, rank, where, unified_memory=unified_memory)
    shared = device == "cpu" and shared_memory and locals_ == world and hasattr(os, "eventfd")
    return Mesh(sizes, rank, where, None, timeout, shared, unified_memory=unified_memory)


def _joined(mesh: Mesh, symmetric: bool) -> Mesh:
    """Returns the mesh with its process groups. A mesh of one device has none and is returned as it is."""
    world, rank, where, sizes, device, timeout = (
        mesh.size, mesh.rank, mesh.device, mesh.axes, mesh.device_type, mesh.timeout
    )  # fmt: skip
    if world == 1:
        return mesh
    if device == "cuda":  # kernels of two communicators run concurrently, and must start in the same order on all ranks
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if dist.is_initialized():  # its store may contain keys that an earlier start wrote
        control = _control(rank, world, timeout)
        drawn = control.all_gather_bytes(secrets.token_bytes(40), "make_mesh")[0]
        store = dist.PrefixStore(f"fzero/generation/{drawn[:8].hex()}", compat.default_store())
        launcher.tell_through(store)
        compare(store, rank, world, where, sizes, timeout)
    else:
        store = meet(rank, world, timeout)
        compare(store, rank, world, where, sizes, timeout)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
        )
        control = _control(rank, world, timeout)
        drawn = control.all_gather_bytes(secrets.token_bytes(40), "make_mesh")[0]
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if symmetric and (lacks := compat.lacks_symmetric_memory()):
        logger.warning("fzero.make_mesh: symmetric_memory is not used: %s", lacks)
        symmetric = False
    options = compat.nccl_ahead(datetime.timedelta(seconds=timeout), symmetric) if device == "cuda" else None
    gathers = None if options is None else groups_along(sizes, timeout, options)
    settings = mesh.shared_memory, gathers, mesh.unified_memory
    made = Mesh(sizes, rank, where, grid, timeout, *settings, store, drawn[8:], symmetric)
    made.context.control = control
    control.sequence = made.collective_sequence
    control.sequence.control = control
    if device == "cuda":
        _connect(made)
    return made


def _connect(mesh: Mesh) -> None:
    """Creates the NCCL communicators of a mesh of GPUs now, so that a failure to create them is reported here."""
    try:
        for axis in (axis for axis, size in mesh.axes.items() if size > 1):
            for gathers in (True, False):
                compat.connect(mesh.group(axis, gathers=gathers), mesh.device)
    except RuntimeError as error:
        what = f"NCCL cannot join the GPUs of {mesh}"
        fix = "NCCL_DEBUG=INFO prints more; nvidia-smi topo -m shows the links"
        raise FzeroValueError("make_mesh", what, str(error).splitlines()[:3], fix) from error


def _control(rank: int, world: int, timeout: float) -> ControlGroup:
    """Creates the group through which the ranks of a mesh exchange small values."""
    try:
        return ControlGroup(rank, world, timeout, shared_process_group())
    except RuntimeError as error:  # raised by the process group when a connection is lost
        raise left("make_mesh", rank, world) from error


def groups_along(axes: Mapping[str, int], timeout: float, options: Any = None) -> dict[str, Any]:
    """Creates a new process group for each axis with `group_along`."""
    return {name: group_along(axes, name, timeout, options) for name in axes}


def close_mesh() -> None:
    """Leaves the process group, if this process is in one. Call it at the end of a script.

    Example:
        >>> mesh = make_mesh()
        >>> close_mesh()
    """
    leave_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def _meant(name: str) -> str:
    near = difflib.get_close_matches(name, AXES, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _checked(axes: dict[str, int]) -> dict[str, int]:
    axes = python_numbers(axes)
    problems = [f"{name!r} is not one of {', '.join(AXES)}{_meant(name)}" for name in axes if name not in AXES]
    problems += [
        f"{name}={size!r}: a size is a whole number of at least 1"
        for name, size in axes.items()
        if type(size) is not int or size < 1
    ]
    if problems:
        raise FzeroValueError("mesh", "cannot make this mesh", problems, "give axes with their sizes, e.g. data=8")
    if math.prod(axes.values()) > _MOST_DEVICES:
        raise FzeroValueError(
            "mesh",
            f"{math.prod(axes.values()):,} devices are more than {_MOST_DEVICES:,}",
            fix="give axes of smaller sizes",
        )
    return dict(axes)
