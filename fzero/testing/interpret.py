"""What the lines of a program mean, line by line: the slow and simple way of running it that the fast one is compared with.

Nothing is planned, shared or overlapped here: every value is a tensor of its own, a transfer takes its values at its start, and ranks exchange through
torch.distributed, whatever the transport of the mesh. Functions run as they were recorded, operation by operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm.collectives import gather
from fzero.layout import Layout, Leaf, shard
from fzero.mesh import Mesh
from fzero.program import scaled
from fzero.program.device import on_device
from fzero.program.ir import COLLECTIVES, COPIES, Line, Program, Value, copied

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_JOINS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sum": torch.add, "max": torch.maximum}


class Interpreter:
    """Runs the lines of one program on this rank, all ranks of the mesh together.

    Attributes:
        values: what every name stands for now, as this rank has it. Leaves are copies: nothing of a state is written.

    Args:
        program: any, also a base program, but for its `update`.
        mesh: that it is for.
        leaves: the state's tensors and the batch's, by the names of the program's inputs.
        part: what `part_index` gives, if it is not to be worked out.
    """

    def __init__(self, program: Program, mesh: Mesh, leaves: Mapping[str, torch.Tensor], part: int | None = None):
        self.program, self.mesh, self._part = program, mesh, part
        self.values: dict[str, torch.Tensor] = {v.name: leaves[v.name].detach().clone() for v in program.inputs}
        self._started: dict[str, tuple[Line, list[torch.Tensor]]] = {}
        self._axes = next((tuple(line.attrs.get("axes", ())) for line, _ in program.walk() if line.op == "part_index"), ())

    def run(self, line: Line, turn: int = 0) -> None:
        """One line, in the given turn of the loop around it."""
        results = self._results(line, turn)
        self.values.update((v.name, x) for v, x in zip(line.out, results, strict=True))

    def _results(self, line: Line, turn: int) -> Sequence[torch.Tensor]:
        args = [self.values[a] for a in line.args] if line.op != "wait" else []
        micro, count = line.attrs.get("micro", (turn, line.attrs.get("count", 1)))
        match line.op:
            case "call":
                made = self._function(line.fn)(*args)
                return [x.clone() if any(x is a for a in args) else x for x in made] if line.out else ()
            case op if op in COLLECTIVES or op in COPIES:
                self._start(line, args)
                return [args[0].new_empty(0)] * len(line.out)
            case "wait":
                return self._wait(*self._started.pop(line.args[0]), line.out)
            case "cast":
                return [scaled.cast(args[0], args[1], line.attrs["through"]) if len(args) > 1 else args[0].to(line.attrs["dtype"], copy=True)]
            case "buffer":
                return [torch.zeros(v.held(self.mesh), dtype=v.dtype, device=self.mesh.device) for v in line.out]
            case "zeros":
                return [torch.zeros(v.shape, dtype=v.dtype, device=self.mesh.device) for v in line.out]
            case "take_shard":
                return [cut(args[0], line.attrs["axes"], self.mesh)]
            case "take_part":
                size = args[0].shape[0] // count
                return [args[0][micro * size : (micro + 1) * size].clone()]
            case "part_index":
                here = self.mesh.index(self._axes) if self._axes else 0
                return [torch.tensor(here * count + micro if self._part is None else self._part, device=self.mesh.device)]
            case "num_valid":
                start, stop = self._valid_range(line)
                return [torch.tensor(stop - start, device=self.mesh.device)]
            case "draw_start":
                here = self._valid_range(line)[0] if line.attrs["axes"] else 0
                return [torch.tensor(line.attrs["base"] + here, device=self.mesh.device)]
            case "accumulate":
                return [_JOINS[line.attrs["op"]](self.values[line.out[0].name], args[0]) if turn else args[0].clone()]
            case "add":
                join = _JOINS[line.attrs["op"]]
                return [join(total, part) for total, part in zip(args[: len(line.out)], args[len(line.out) :], strict=True)]
            case "assign":
                self._write(line.writes, args[len(line.writes) :])
                return ()
        raise AssertionError(f"a line that no program has when it is run: {line.op}")

    def _valid_range(self, line: Line) -> tuple[int, int]:
        """Which elements of the flattened leaf that a line is about are this rank's."""
        return Leaf("", "", tuple(line.attrs["shape"]), Layout(torch.float32, tuple(line.attrs["axes"]))).valid_range(self.mesh)

    @functools.cache  # noqa: B019  # lives as long as the interpreter
    def _function(self, name: str) -> Callable[..., Any]:
        return on_device(self.program.functions[name].graph, self.mesh.device).module().forward

    def _write(self, names: Sequence[str], new: Sequence[torch.Tensor]) -> None:
        for name, x in zip(names, new, strict=True):
            self.values[name] = x.reshape(self.values[name].shape).to(self.values[name].dtype, copy=True)

    def _start(self, line: Line, args: list[torch.Tensor]) -> None:
        moved = [x.clone() for x in args[len(args) - len(copied(line)) :]] if line.op in COPIES else [x.clone() for x in args]
        if line.op in COPIES:
            self._write(line.writes, moved if line.writes else ())
        self._started[line.out[0].name] = line, moved

    def _wait(self, start: Line, moved: list[torch.Tensor], out: Sequence[Value]) -> Sequence[torch.Tensor]:
        if start.op in COPIES or not out:
            return moved if out else ()
        (axis,) = start.attrs["axes"]
        if start.op == "all_gather_start":
            return [gather(self.mesh, x.contiguous(), axis)[: v.numel].view(v.shape) for x, v in zip(moved, out, strict=True)]
        for x in moved:
            dist.all_reduce(x, _OPS[start.attrs["op"]], self.mesh.group(axis))
        return [cut(x, (axis,), self.mesh) for x in moved] if start.op == "reduce_scatter_start" else moved


def cut(whole: torch.Tensor, axes: Sequence[str], mesh: Mesh) -> torch.Tensor:
    """This rank's flat, padded shard of a whole value."""
    return shard(whole, Leaf("", "", tuple(whole.shape), Layout(whole.dtype, tuple(axes))), mesh)
