"""Runs a program made for CUDA as a GPU's host would, without a GPU: every line is called, nothing is computed, and
what a device and its links would have been told is counted.

Tensors are memory of the CPU that nobody touches, so that addresses, views and storages are real. The mesh says that
its device is CUDA: what asks goes the way of a GPU. Operations are counted in PyTorch's dispatcher, collectives as
c10d is told of them by a process group that sends nothing, so both count what the code does, whatever it does. Only the
functions that Inductor compiles are taken as calls: `cuda_code.py` has what is in them.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fzero import tree
from fzero._compat import compat
from fzero.comm.collectives import ProcessGroups
from fzero.ir.program import Function, Program
from fzero.memory.device_copies import PendingCopy, moves
from fzero.mesh import Mesh
from fzero.ops import scaled_matmul
from fzero.runtime import execute
from fzero.runtime.build import build as building
from fzero.runtime.build.calling_convention import as_called
from fzero.trace.recorder import Recorded

_NEW = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted)?")

ALIGNMENT = 16  # bytes: an argument at another address is cloned before Inductor's kernels read it


@dataclass
class IssuedOps:
    """All that one step tells a device, by the function or op whose line does.

    Attributes:
        calls: calls of compiled functions, by name.
        launches: operations of PyTorch that launch a kernel or a copy.
        views: those that launch nothing; and new memory.
        listed: tensors in operations on lists of them.
        clones: of arguments of compiled functions that are not aligned, and copies back to those that are written.
        collectives: told to c10d as one; leaves of them; and those made one by a coalescing manager.
        lines: of the program, as it runs.
        syncs: operations that wait for the device.
        compiled: the functions that are compiled, with their graphs.
    """

    calls: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    views: Counter[str] = field(default_factory=Counter)
    listed: Counter[str] = field(default_factory=Counter)
    clones: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    leaves: Counter[str] = field(default_factory=Counter)
    managed: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    compiled: dict[str, tuple[Function, Recorded]] = field(default_factory=dict)


def rehearse(program: Program) -> IssuedOps:
    """All that one run of a program tells a GPU and its links.

    Args:
        program: of a mesh of devices of type "cuda"; of rank 0.
    """
    issued = IssuedOps()
    with (
        _ranks(program.mesh.size),
        mock.patch.object(building.inductor, "compiled", _calls(issued)),
        mock.patch.object(scaled_matmul, "_emulated", scaled_matmul._native),
        mock.patch.object(execute, "host_pool", lambda nbytes, mesh: torch.empty(nbytes, dtype=torch.uint8)),
    ):
        mesh = _Mesh(program.mesh.axes, 0, _cuda())
        mesh.context.transport, mesh.context.copies = ProcessGroups(mesh), _Copies()
        used = {op.fn for op, _ in program.walk() if op.fn}
        functions = building.build({n: f for n, f in program.functions.items() if n in used}, "inductor", mesh)
        run: Any = execute.Executable(program, functions, mesh)
        counting = _Counting(issued)
        names = {op.fn or op.op for op, _ in program.walk()}
        run.namespace.update({n: counting.of(n, f) for n in names if callable(f := run.namespace.get(n))})
        tensors = {v.name: torch.empty(v.local_shape(program.mesh), dtype=v.dtype) for v in program.inputs}
        roots = dict.fromkeys(name.split("[")[0].split(".")[0] for name in tensors)
        order = ["step", "params", "opt_state", "key", "extras", "batch"]
        training = any(leaf.role == "step" for leaf in program.leaves.values())
        given = [_Tree(name, tensors)() for name in (order if training else list(roots))]
        with counting, torch.no_grad():
            run(*given)
    return issued


class _Cuda(str):
    """The CPU under the name of a GPU."""

    type, index = "cuda", 0


def _cuda() -> Any:
    return _Cuda("cpu")


class _Mesh(Mesh):
    def group(self, axis: str, *, gathers: bool = False) -> Any:
        return dist.group.WORLD

    def check_open(self) -> None:
        pass

    @property
    def collective_sequence(self) -> Any:
        return SimpleNamespace(begin=lambda *a, **k: None, check=lambda *a: None, end=lambda *a: None, pause=1.0)


@contextlib.contextmanager
def _ranks(size: int) -> Iterator[None]:
    """A process group of so many ranks, this one first, that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _calls(issued: IssuedOps) -> Callable[..., dict[str, Callable[..., Any]]]:
    """In the place of Inductor: functions whose calls are counted, and which make what they would, untouched."""

    def compiled(functions: Mapping[str, tuple[Function, Recorded]], *_: Any) -> dict[str, Callable[..., Any]]:
        issued.compiled |= functions
        return {name: as_called(f, call(name, f)) for name, (f, _) in functions.items()}

    def call(name: str, function: Function) -> Callable[..., Any]:
        returned = [n.meta["val"] for i, n in enumerate(function.graph.outputs) if i not in function.into]

        def run(*args: Any) -> list[Any]:
            issued.calls[name] += 1
            odd = [i for i, x in enumerate(args) if x.numel() and x.data_ptr() % ALIGNMENT]
            written = {*function.writes, *range(len(function.graph.inputs), len(args))}
            issued.clones[name] += sum(2 if i in written else 1 for i in odd)
            with compat.no_modes():
                return [_like(x) for x in returned]

        return run

    return compiled


class _Counting(compat.TorchDispatchMode):
    """Counts operations without carrying them out; views are."""

    def __init__(self, issued: IssuedOps):
        super().__init__()
        self._issued, self._at, self._managed = issued, "outputs", False

    def __enter__(self) -> Any:
        self._patches = contextlib.ExitStack()
        manager = dist.distributed_c10d._coalescing_manager

        @contextlib.contextmanager
        def managed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self._issued.managed[self._at] += 1
            self._issued.collectives[self._at] += 1
            self._managed = True
            kwargs.pop("device", None)
            try:
                with manager(*args, **kwargs) as found:
                    yield found
            finally:
                self._managed = False

        self._patches.enter_context(mock.patch.object(dist.distributed_c10d, "_coalescing_manager", managed))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        self._patches.close()
        return super().__exit__(*exc)

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A line of a program: what happens in it is counted under its name."""

        def line(*args: Any, **kwargs: Any) -> Any:
            before, self._at = self._at, name
            self._issued.lines[name] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._at = before

        return line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self._issued.syncs[self._at] += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if func.is_view or func.namespace == "prim":
            self._issued.views[self._at] += 1
            return func(*args, **kwargs)
        tensors = [x for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if "_foreach_" in func.__name__:
            self._issued.listed[self._at] += len(tensors)
        nothing = all(x.numel() == 0 for x in tensors) if tensors else False
        if _NEW.fullmatch(func._schema.name):  # memory, which no kernel fills
            self._issued.views[self._at] += 1
        else:
            self._issued.launches[self._at] += not nothing
        return _results(func, args, kwargs)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Of tensors in the places of those, so that nothing is copied."""
        first = next(a for a in args if isinstance(a, (list, torch.Tensor)))
        self._issued.leaves[self._at] += 1 if isinstance(first, torch.Tensor) else len(tree.leaves(first))
        self._issued.collectives[self._at] += not self._managed
        small = tree.map(lambda x: torch.empty(0, dtype=x.dtype) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        return func(*small[0], **small[1])


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operation that is not carried out: what it writes, or new memory."""
    written = {
        a.name: i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    }
    if written:
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        found = [given[name] for name in written]
        return None if not func._schema.returns else found[0] if len(found) == 1 else tuple(found)

    def meta(x: Any) -> Any:
        return (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x
        )

    with compat.no_modes():
        args, kwargs = tree.map(meta, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        out = func(*args, **kwargs)
        return tree.map(lambda x: _like(x) if isinstance(x, torch.Tensor) else x, out)


def _like(value: torch.Tensor | None) -> torch.Tensor | None:
    """Memory for a value of this kind."""
    return None if value is None else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


class _Copies:
    """Copies between device and host that launch, and copy nothing."""

    def to_host_start(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None) -> PendingCopy:
        assert into is not None
        for source, target in moves(sources, into):
            target.copy_(source, non_blocking=True)
        return PendingCopy(into, sources, lambda: None)

    to_device_start = to_host_start

    def settle(self, written: Sequence[torch.Tensor]) -> None:
        pass


class _Tree:
    """The trees that a program names its inputs by: what is asked of them leads to tensors."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]):
        self._name, self._tensors = name, tensors

    def __call__(self) -> Any:
        return self._tensors.get(self._name, self)

    def __getitem__(self, key: Any) -> Any:
        return _Tree(f"{self._name}[{key!r}]", self._tensors)()

    def __getattr__(self, key: str) -> Any:
        return _Tree(f"{self._name}.{key}", self._tensors)()
