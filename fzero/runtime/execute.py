"""Running a program: its source, compiled once, over the functions and transfers it names.

What runs is the flat text of the program (`print(program)` shows it folded). Tracebacks show its lines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.comm.host import host_pool
from fzero.comm.tiers import Arriving, Tiers
from fzero.comm.transport import transport
from fzero.layout import Layout, Leaf
from fzero.mesh import Mesh
from fzero.program import scaled
from fzero.program.ir import TRANSFERS, Function, Line, Place, Program
from fzero.program.show import name_of, source
from fzero.runtime import agree
from fzero.runtime.limits import limits_of
from fzero.runtime.tracebacks import compiled


def executable(program: Program, functions: Mapping[str, Callable[..., Any]], mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The program as a Python function of the trees it names. All ranks of the mesh make it together."""
    text = source(program)
    batch_axes = next((tuple(line.attrs.get("axes", ())) for line, _ in program.walk() if line.op == "part_index"), ())
    carrier = transport(mesh)
    tiers = Tiers(mesh, any(line.op.startswith("disk") for line, _ in program.walk()))
    arenas = {"device": carrier.pool(program.pool_bytes, f"{name_of(program)} {program.name}")}
    if program.host_pool_bytes:
        arenas["host"] = host_pool(program.host_pool_bytes, mesh)
    memory = arenas["device"]
    part_of = functools.cache(functools.partial(_range, mesh))
    namespace: dict[str, Any] = {
        **{name: _on_host(f, program.functions[name], tiers) if program.functions[name].on == "host" else f for name, f in functions.items()},
        "pool": [_tensors(line, program, mesh, arenas) for line in program.pooled],
        "all_gather_start": carrier.all_gather_start,
        "reduce_scatter_start": carrier.reduce_scatter_start,
        "all_reduce_start": carrier.all_reduce_start,
        "to_host_start": tiers.to_host_start,
        "to_device_start": tiers.to_device_start,
        "disk_read_start": tiers.disk_read_start,
        "disk_write_start": tiers.disk_write_start,
        "wait": functools.partial(_wait, carrier),
        "cast": tiers.settled(_cast, lambda *args: args[-1]),
        "buffer": lambda into: into,
        "zeros": functools.partial(_zeros, mesh.device),
        "guess": tiers.guess,
        "redo": tiers.redo,
        "take_shard": functools.partial(_take_shard, part_of),
        "take_part": _take_part,
        "part_index": functools.partial(_part_index, mesh, batch_axes),
        "num_valid": functools.partial(_num_valid, mesh.device, part_of),
        "draw_start": functools.partial(_draw_start, mesh.device, part_of),
        "accumulate": tiers.settled(_accumulate, lambda *args: args[-1]),
        "add": tiers.settled(_add, lambda *args: args[0]),
        "assign": tiers.settled(_assign, lambda *args: args[0]),
    }
    run = compiled(text, f"program {program.name}", namespace, name_of(program))
    limits = limits_of(program, mesh) if "train" in namespace else None
    if limits is not None:
        namespace.update(limits.around(namespace))

    def whole_run(*trees: Any, guesses: bool = False) -> tuple[Any, ...]:
        if limits is not None:
            limits.begin()
        with agree.unbroken(mesh):
            carrier.begin(memory)
            tiers.begin(guesses)
            outputs = run(*trees)
            if limits is not None:
                limits.end()
            failed = tiers.end()
        if failed is not None:  # on every rank, each at the end of its run
            raise failed
        return tuple(x.clone() if _within(x, memory) else x for x in outputs)  # the pool is written again by the next run

    whole_run.namespace = namespace  # type: ignore[attr-defined]  # what runtime/profile.py puts a clock around
    whole_run.guessing = lambda: tiers.guessing  # type: ignore[attr-defined]  # whether the step that runs does
    whole_run.limits = limits  # type: ignore[attr-defined]  # what a training step adds to its metrics
    return whole_run


def _on_host(run: Callable[..., Any], function: Function, tiers: Tiers) -> Callable[..., Any]:
    """A function that the host runs, when nothing that it writes is on its way to the device."""
    return tiers.settled(run, lambda *args: (*(args[i] for i in function.writes), *args[-1]))


def as_called(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function as the program's lines call it: its one result, a tuple of several, or nothing when it writes its arguments."""
    if function.into:
        return _writing(function, run)
    return (lambda *args: run(*args)[0]) if len(function.graph.outputs) == 1 else run


def _writing(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is given buffers for some of its results: those come back in place of what it would have returned."""
    number, given = len(function.graph.outputs), function.into
    returned = [i for i in range(number) if i not in given]

    def call(*args: Any, into: Sequence[Any]) -> Any:
        results = list(into)
        for i, x in zip(returned, run(*args, *(into[i] for i in given)), strict=True):
            results[i] = x
        return results if number > 1 else results[0]

    return call


def _wait(carrier: Any, moving: Any, into: Sequence[torch.Tensor] = (), together: bool = False) -> Sequence[torch.Tensor]:
    """What a transfer brought, of whichever kind it is."""
    return moving.wait(into) if isinstance(moving, Arriving) else carrier.wait(moving, into, together)


def _tensors(line: Line, program: Program, mesh: Mesh, arenas: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """The places of a line as tensors: flat for a start, shaped as its results for any other line."""
    flats = [None if place is None else _flat(place, mesh, arenas) for place in line.into]
    if line.op in TRANSFERS:
        return flats  # type: ignore[return-value]
    return [None if flat is None else flat.view(value.held(mesh)) for flat, value in zip(flats, line.out, strict=True)]


def _flat(place: Place, mesh: Mesh, arenas: Mapping[str, torch.Tensor]) -> torch.Tensor:
    offset = place.offset + (mesh.index(place.part) * place.nbytes if place.part else 0)
    return arenas[place.arena][offset : offset + place.nbytes].view(place.dtype)


def _within(x: torch.Tensor, memory: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def _cast(x: torch.Tensor, dtype: str, scale: torch.Tensor | None = None, through: str = "", into: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """A copy in another dtype, or in its own: a result must not alias the state. With a scale to 8 bits, from the dtype that it is computed in otherwise."""
    x = x if scale is None else scaled.cast(x, scale, getattr(torch, through))
    return x.to(getattr(torch, dtype), copy=True) if into is None else into[0].copy_(x)


def _zeros(device: torch.device, shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


_Range = Callable[[tuple[int, ...], str], tuple[int, int, int]]


def _take_shard(part_of: _Range, whole: torch.Tensor, axis: str) -> torch.Tensor:
    """This rank's flat shard: a view, or a padded copy on a rank whose part is not full."""
    start, num, size = part_of(tuple(whole.shape), axis)
    part = whole.reshape(-1).narrow(0, start, num)
    return part if num == size else torch.nn.functional.pad(part, (0, size - num))


def _take_part(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    size = whole.shape[0] // count
    return whole[index * size : (index + 1) * size]


def _part_index(mesh: Mesh, axes: tuple[str, ...], micro: int = 0, count: int = 1) -> torch.Tensor:
    index = mesh.index(axes) if axes else 0
    return torch.full((), index * count + micro, dtype=torch.int64, device=mesh.device)


def _num_valid(device: torch.device, part_of: _Range, shape: list[int], axis: str) -> torch.Tensor:
    return torch.full((), part_of(tuple(shape), axis)[1], dtype=torch.int64, device=device)


def _draw_start(device: torch.device, part_of: _Range, base: int, shape: Sequence[int] = (), axis: str = "") -> torch.Tensor:
    return torch.full((), base + (part_of(tuple(shape), axis)[0] if axis else 0), dtype=torch.int64, device=device)


def _range(mesh: Mesh, shape: tuple[int, ...], axis: str) -> tuple[int, int, int]:
    """Where this rank's part of a flat leaf begins, how many elements it has, and how many with its padding."""
    leaf = Leaf("", "", shape, Layout(torch.float32, (axis,)))
    start, stop = leaf.valid_range(mesh)
    return start, stop - start, leaf.shard_numel(mesh)


def _assign(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for old, new in zip(targets, sources, strict=True):
        old.copy_(new)


_JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda total, part: total.add_(part),
    "max": lambda total, part: torch.maximum(total, part, out=total),
}
"""How the values of two micro-batches become one, in the place of the first."""


def _accumulate(total: torch.Tensor | None, part: torch.Tensor, into: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """The running sum over micro-batches, or the largest so far, in its place in the pool."""
    return into[0].copy_(part) if total is None else _JOINS[op](total, part)


def _add(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], op: str = "sum") -> Sequence[torch.Tensor]:
    """Totals, each with a part added where it lies."""
    return [_JOINS[op](total, part) for total, part in zip(totals, parts, strict=True)]
