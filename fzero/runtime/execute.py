"""Running a program: its source, compiled once, over the functions and transfers it names.

What runs is the flat text of the program (`print(program)` shows it folded). Tracebacks show its lines.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero.comm import collectives
from fzero.layout import Layout, Leaf
from fzero.mesh import Mesh
from fzero.program.ir import Function, Program
from fzero.program.show import source


def executable(program: Program, functions: Mapping[str, Callable[..., Any]], mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The program as a Python function of the trees it names."""
    text = source(program)
    filename = f"<fzero program {program.name} {id(program):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    batch_axes = next((tuple(line.attrs.get("axes", ())) for line, _ in program.walk() if line.op == "part_index"), ())
    namespace: dict[str, Any] = {
        **functions,
        "all_gather_start": functools.partial(collectives.all_gather_start, mesh),
        "reduce_scatter_start": functools.partial(collectives.reduce_scatter_start, mesh),
        "all_reduce_start": functools.partial(collectives.all_reduce_start, mesh),
        "wait": collectives.wait,
        "cast": lambda x, dtype: x.to(getattr(torch, dtype), copy=True),  # to its own dtype too: a result must not alias the state
        "take_shard": functools.partial(_take_shard, mesh),
        "take_part": _take_part,
        "part_index": functools.partial(_part_index, mesh, batch_axes),
        "num_valid": functools.partial(_num_valid, mesh),
        "accumulate": _accumulate,
        "assign": lambda old, new: old.copy_(new),
    }
    exec(compile(text, filename, "exec"), namespace)
    return namespace["train"] if "train" in namespace else namespace["evaluate"]


def as_called(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function as the program's lines call it: its one result, a tuple of several, or nothing when it writes its arguments."""
    return (lambda *args: run(*args)[0]) if len(function.graph.outputs) == 1 else run


def _take_shard(mesh: Mesh, whole: torch.Tensor, axis: str) -> torch.Tensor:
    """This rank's flat shard: a view, or a padded copy on a rank whose part is not full."""
    leaf = Leaf("", "", tuple(whole.shape), Layout(whole.dtype, (axis,)))
    start, stop = leaf.valid_range(mesh)
    part = whole.reshape(-1)[start:stop]
    return part if stop - start == leaf.shard_numel(mesh) else torch.nn.functional.pad(part, (0, leaf.shard_numel(mesh) - (stop - start)))


def _take_part(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    size = whole.shape[0] // count
    return whole[index * size : (index + 1) * size]


def _part_index(mesh: Mesh, axes: tuple[str, ...], micro: int = 0, count: int = 1) -> torch.Tensor:
    index = mesh.index(axes) if axes else 0
    return torch.full((), index * count + micro, dtype=torch.int64, device=mesh.device)


def _num_valid(mesh: Mesh, numel: int, axis: str) -> torch.Tensor:
    leaf = Leaf("", "", (numel,), Layout(torch.float32, (axis,)))
    start, stop = leaf.valid_range(mesh)
    return torch.full((), stop - start, dtype=torch.int64, device=mesh.device)


def _accumulate(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """The running sum over micro-batches, in place once there is one."""
    if total is None:
        return part.clone()
    return total.add_(part)
