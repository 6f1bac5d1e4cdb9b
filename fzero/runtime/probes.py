"""Measures the rates of this machine for `calibrate`. Each measurement runs what a program runs, a few times, and takes
the best time.

On a mesh all ranks measure at the same time, so that shared resources (memory, the host's cores, links) are shared as
in a real run.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero._compat import compat
from fzero.comm.transport import transport
from fzero.ir.program import Function
from fzero.memory.disk import PIECE, aligned
from fzero.memory.scratch_files import ScratchFiles
from fzero.mesh import Mesh
from fzero.plan.device_lookup import Link
from fzero.plan.process_memory import resident
from fzero.runtime.build.build import build, has_compiler
from fzero.trace.device_decompositions import on_device
from fzero.trace.flops import transcendentals
from fzero.trace.graph_capture import record
from fzero.tree import dtype_name

aten = torch.ops.aten

Progress = Callable[[str], None]

# rows, columns and inner dimension of a matrix product
_SIZES = [(512, 512, 512), (512, 2048, 512), (512, 512, 2048), (1024, 1024, 1024), (2048, 512, 2048)]
_POSITIONS = (128, 512, 2048)  # of attention, whose kernels reach higher rates with more positions
_COPY = 1 << 24  # bytes: more than the caches that belong to one rank, but not so many that it takes long
_PAST_CACHES = 4 * _COPY  # for copies within memory: more than shared caches, like the values of a step together
_ELEMENTS = 1 << 18  # for functions on a CPU: 1 MiB, so that memory is not the bottleneck
_PAGE = 4096
_REQUEST = 8 * PIECE  # bytes of reads and writes of a disk: more than its threads move at once
SCRATCH = 4 * _REQUEST
"""Bytes that the measurement of a disk needs there."""


def rates(
    mesh: Mesh, seconds: float, progress: Progress = lambda what: None, directory: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Measures everything in a `Device` that is measured. All ranks of a mesh call it together.

    Args:
        mesh: of this process only, or of all ranks of a host.
        seconds: approximate duration; compiling and starting take additional time.
        progress: called with what is being measured.
        directory: the directory whose disk is measured.
    """
    device, each = mesh.device, seconds / 9
    out: dict[str, Any] = {"flops": {}, "attention": {}, "links": {}, "process_bytes": resident()}
    for dtype in _dtypes(device):
        name = dtype_name(dtype)
        progress(f"products in {name}")
        out["flops"][name] = product_rate(dtype, device, each)
        if dtype in _FUSED[device.type].dtypes:
            for positions in _POSITIONS:
                forward, backward = attention_rates(dtype, device, each / 2 / len(_POSITIONS), positions)
                out["attention"].setdefault(name, {})[str(positions)] = forward
                out["attention"].setdefault(f"{name} backward", {})[str(positions)] = backward
    progress("memory")
    out["memory_bandwidth"] = copy_rate(device, each / 2)
    progress("functions")
    out["transcendentals"] = transcendental_rate(mesh, each / 2)
    progress("calls")
    out["call_seconds"] = call_seconds(mesh, each / 2)
    progress("host")
    out["host_copy"] = host_copy(device, each / 2)
    out["host_memory_bandwidth"] = copy_rate(torch.device("cpu"), each / 2, 1 if device.type == "cpu" else 4)
    progress("disk")
    out["disk_read"], out["disk_write"], out["disk_mixed"] = disk(each, directory)
    if mesh.size > 1:
        progress("links")
        out["links"]["intra"] = link(mesh, each)
    return out


def product_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Measures the FLOP/s of matrix products as in a layer: the forward product and those of both gradients, in typical
    sizes, as the runtime runs them. Each run uses other operands, so that they are read from memory instead of a
    cache, as those of a layer are after all other layers have run."""
    scale = 1 if device.type == "cpu" else 4  # a device with more processors needs more work to fill them
    total = taken = 0.0
    started = time.perf_counter()
    for rows, columns, inner in (tuple(n * scale for n in size) for size in _SIZES):
        shapes = ((rows, inner), (columns, inner), (rows, columns))
        count = 1 + _PAST_CACHES // (sum(map(math.prod, shapes)) * dtype.itemsize)
        sets = [[torch.randn(shape, device=device).to(dtype) for shape in shapes] for _ in range(count)]
        for product in (lambda x, w, dy: (x, w.T), lambda x, w, dy: (dy, w), lambda x, w, dy: (dy.T, x)):
            runs = itertools.cycle([as_run(aten.mm, *product(*operands)) for operands in sets])
            times = [_timed(next(runs), device) for _ in range(1 + count)][1:]
            while sum(times) < seconds / len(_SIZES) / 3:
                times.append(_timed(next(runs), device))
            taken += statistics.median(times)
            total += 2.0 * rows * columns * inner
        if time.perf_counter() - started > 2 * seconds:  # on a slow machine the larger sizes would take too long
            break
    return total / taken


def attention_rates(dtype: torch.dtype, device: torch.device, seconds: float, positions: int) -> tuple[float, float]:
    """Measures the FLOP/s of causal attention and of its backward for heads of 64. The FLOPs are counted as if nothing
    were masked."""
    largest, heads = _POSITIONS[-1], 2 if device.type == "cpu" else 64
    shape = (largest // positions, heads, positions, 64)
    q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    forward, backward, _ = _FUSED[device.type]
    out, logsumexp, *rest = forward(q, k, v, 0.0, True)
    # on CUDA also sequence offsets and lengths, and the RNG state of the dropout, which is unused
    before, after = (rest[:4], rest[4:6])
    one = as_run(lambda *x: forward(*x, 0.0, True)[0], q, k, v)
    two = as_run(lambda *x: backward(*x[:6], *before, 0.0, True, *x[6:])[0], dout, q, k, v, out, logsumexp, *after)
    flops = 4.0 * math.prod(shape) * shape[2]
    # Attention has two products in the forward and five in the backward, which computes the scores again.
    return flops / best(one, device, seconds / 2), 2.5 * flops / best(two, device, seconds / 2)


def copy_rate(device: torch.device, seconds: float, times: int = 1) -> float:
    """Measures the bytes/s of a copy, counting reads and writes together.

    Args:
        times: a factor for the size of the copy on a CPU, for hosts whose many threads together have larger caches.
    """
    nbytes = _PAST_CACHES * (times if device.type == "cpu" else 8)
    source, target = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / best(lambda: target.copy_(source), device, seconds)


def call_seconds(mesh: Mesh, seconds: float) -> float:
    """Measures the time of a call that does next to nothing: of a compiled function, or of an eager function if there
    is no compiler."""

    def calls(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.sin(x) * y, x + y]

    (_, run), x, count = _built(calls, 2048, mesh), torch.zeros(2048, device=mesh.device), 20
    return best(lambda: [run(x, x) for _ in range(count)], mesh.device, seconds) / count


def transcendental_rate(mesh: Mesh, seconds: float) -> float:
    """Measures the elements/s of exponentials, or of functions that take as long, in a compiled function: the mean over
    those that models use."""

    def functions(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.exp(x) + torch.tanh(x) + torch.erf(x) + torch.exp(y) * torch.tanh(y) * torch.erf(y)]

    numel = _ELEMENTS * (1 if mesh.device.type == "cpu" else 1 << 8)
    x, y = (torch.randn(numel, device=mesh.device) for _ in range(2))
    function, run = _built(functions, numel, mesh)
    count = sum(transcendentals(node) for node in function.graph.graph.nodes)
    return count / best(lambda: run(x, y), mesh.device, seconds)


def _built(fn: Callable[..., list[torch.Tensor]], numel: int, mesh: Mesh) -> tuple[Function, Callable[..., Any]]:
    """Returns a function of two vectors, recorded, and the same function as a program runs it: compiled if there is a
    compiler."""
    with compat.FakeTensorMode():
        fakes = [torch.empty(numel, device=mesh.device.type) for _ in range(2)]
        graph = record(fn, fakes, owner="calibrate", names=["x", "y"])
    function = Function(fn.__name__, graph)
    backend = "inductor" if mesh.device.type != "cpu" or has_compiler() else "eager"
    return function, build({function.name: function}, backend, mesh)[function.name]


def host_copy(device: torch.device, seconds: float) -> Link:
    """Measures a copy from the device's memory to the host's; on a CPU, a copy within host memory."""
    pinned = device.type != "cpu"
    source = torch.zeros(_COPY, dtype=torch.uint8, device=device)
    target = torch.zeros(_COPY, dtype=torch.uint8, pin_memory=pinned)
    return fitted(
        {
            n: best(lambda n=n: target[:n].copy_(source[:n], non_blocking=pinned), device, seconds / 2)
            for n in (_COPY // 64, _COPY)
        }
    )


def link(mesh: Mesh, seconds: float) -> Link:
    """Measures the bytes/s from a rank to the others along the fastest axis, which is the last one: gathers and
    reductions through the transport of the mesh, half each."""
    axis, size = next((a, n) for a, n in reversed(mesh.axes.items()) if n > 1)
    largest = _COPY // (size * 4) * 4 * size  # bytes of the gathered tensor
    pool = transport(mesh).pool(2 * largest)
    # a fixed number of runs instead of a fixed time, because every rank must run each equally often
    pair = lambda n: best(_pair(mesh, axis, pool, n), mesh.device, 0.0, 8 if n == largest else 30)  # noqa: E731
    fit = fitted({n * 2 * (size - 1) // size: pair(n) for n in (size * 1024, largest)})
    # A pair of collectives passes each of the `size - 1` other ranks twice.
    return Link(fit.latency / 2 / (size - 1), fit.bandwidth)


def _pair(mesh: Mesh, axis: str, pool: torch.Tensor, nbytes: int) -> Callable[[], None]:
    """Returns a function that gathers a tensor of `nbytes` and reduces it again, in a pool of at least twice that
    size."""
    carrier: Any = transport(mesh)
    size, half = mesh.axes[axis], pool.numel() // 2
    whole, summed = pool[:nbytes].view(torch.float32), pool[half : half + nbytes // size].view(torch.float32)
    part = whole.numel() // size
    shard = whole[mesh.index(axis) * part : (mesh.index(axis) + 1) * part]

    def run() -> None:
        carrier.begin(pool)
        carrier.wait(carrier.all_gather_start([shard], axis, [whole]), [whole], True)
        carrier.wait(carrier.reduce_scatter_start([whole], axis, "sum", [whole, summed]), [summed], True)

    return run


def disk(seconds: float, directory: str | os.PathLike[str] | None = None) -> tuple[Link, Link, float]:
    """Measures the bytes/s at which scratch files are read, are written, and are both read and written in alternating
    pieces. It uses the same threads and piece sizes as a program's tensors on disk.

    Args:
        seconds: approximate duration.
        directory: of the scratch files; by default the system's directory for temporary files.
    """
    cpu = torch.device("cpu")
    files = ScratchFiles(directory or tempfile.gettempdir(), SCRATCH)
    try:
        ours, theirs = (aligned(_REQUEST).random_() for _ in range(2))
        at = itertools.cycle(range(0, SCRATCH, _REQUEST))
        for _ in range(4):  # write everything once: reads of bytes that were never written do not touch the disk
            files.write([(next(at), ours)]).wait()

        def both() -> None:
            there, here = next(at), next(at)
            parts = range(0, _REQUEST, PIECE)
            reads, writes = (
                [(where + i, memory[i : i + PIECE]) for i in parts] for where, memory in ((there, theirs), (here, ours))
            )
            started = [
                move([run])
                for pair in zip(reads, writes, strict=True)
                for move, run in zip((files.read, files.write), pair, strict=True)
            ]
            for transfer in started:
                transfer.wait()

        sizes = (_PAGE * 16, _REQUEST)
        read = fitted(
            {n: best(lambda n=n: files.read([(next(at), theirs[:n])]).wait(), cpu, seconds / 6) for n in sizes}
        )
        written = fitted(
            {n: best(lambda n=n: files.write([(next(at), ours[:n])]).wait(), cpu, seconds / 6) for n in sizes}
        )
        mixed = 2 * _REQUEST / best(both, cpu, seconds / 3)
    finally:
        files.close()
    return read, written, mixed


def best(run: Callable[[], Any], device: torch.device, seconds: float, times: int = 0) -> float:
    """Returns the seconds of the fastest of several runs, after one warm-up run: `times` runs, or as many as fit in
    `seconds` and at least three."""
    run()
    _settle(device)
    quickest, spent, done = float("inf"), 0.0, 0
    while done < times if times else done < 3 or spent < seconds:
        took = _timed(run, device)
        quickest, spent, done = min(quickest, took), spent + took, done + 1
    return quickest


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of one run."""
    start = time.perf_counter()
    run()
    _settle(device)
    return time.perf_counter() - start


def fitted(measured: Mapping[int, float]) -> Link:
    """Returns the link (latency and bandwidth) that explains the times of a small and of a large number of bytes."""
    (few, quick), (many, slow) = sorted(measured.items())
    # At least a tenth of the time is attributed to the bytes; noise could make it zero or negative.
    per_byte = max(slow - quick, 0.1 * slow) / (many - few)
    return Link(max(0.0, quick - few * per_byte), 1 / per_byte)


def as_run(fn: Callable[..., torch.Tensor], *args: torch.Tensor) -> Callable[[], Any]:
    """Prepares a function with some arguments as the runtime runs it on their device: for example, products in float32
    if there is no native bfloat16."""
    with compat.FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device.type) for t in args]
        graph = record(lambda *xs: [fn(*xs)], fakes, owner="calibrate", names=[f"x_{i}" for i in range(len(args))])
    run = on_device(graph, args[0].device).module().forward
    return lambda: run(*args)


class _Fused(NamedTuple):
    """Fused attention of a device, and the dtypes that it supports."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dtypes: Sequence[torch.dtype]


_FUSED = {
    "cpu": _Fused(
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        (torch.float32, torch.bfloat16),
    ),
    "cuda": _Fused(
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        (torch.bfloat16, torch.float16),
    ),
}


def _dtypes(device: torch.device) -> Sequence[torch.dtype]:
    return (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.float32, torch.bfloat16, torch.float16)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
