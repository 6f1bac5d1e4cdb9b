"""Applies a function to each rank's own gradients, and to a slot, before the reductions: for transforms that send
something other than gradients (`Transform.rewrite`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero._compat import compat
from fzero.errors import FzeroTypeError, TransformError
from fzero.ir.from_graph import Functions
from fzero.ir.ops import COLLECTIVES
from fzero.ir.program import Instruction, Program
from fzero.ir.value_names import Names
from fzero.trace.graph_capture import record
from fzero.transforms.partition_update_pass import written

Sends = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def own_gradients(program: Program, fn: Sends, slot: str, by: str) -> Program:
    """The program with `fn(gradient, slot) -> (gradient, slot)` before each gradient's first reduction, on the summand
    that each rank has: for a rewrite behind "shard". In a step whose loss or gradients are not finite, which may be
    skipped, the slot stays as it was. Evaluations, and programs without reductions, stay as they are.

    Args:
        program: spread over the mesh, with its update whole.
        fn: pointwise, called twice. It gets tensors of the parameter's shape, and returns each in the same dtype.
        slot: the name of a slot with a `Local` for each parameter.
        by: the name of the transform.

    Raises:
        FzeroTypeError: results of another shape or dtype.
        TransformError: gradients that are reduced once a micro-batch, on whose number the slot would depend.
    """
    return _OwnGradients(program, fn, slot, by).run() if program.assigns else program


class _OwnGradients:
    def __init__(self, program: Program, fn: Sends, slot: str, by: str):
        self.program, self.fn, self.slot, self.by = program, fn, slot, by
        self.values, self.names = program.values(), Names(program.values())
        self.functions = Functions(program.functions)
        self.made = {v.name: op for op, _ in program.walk() for v in op.out}
        update = program.update
        assert update is not None, "behind 'shard' the update is whole"
        self.finite = next(v.name for v in update.out if v.name == "metric_finite")

    def run(self) -> Program:
        found = {path: self._source(grad) for path, grad in self.program.grads.items()}
        if repeated := [f"the gradient of {path}" for path, source in found.items() if source is None]:
            what = "these gradients are reduced once a micro-batch, not once a step"
            fix = "add them up first: fz.data_parallel or fz.shard_opt_state in place of sharded gradients"
            raise TransformError(self.by, what, repeated, fix)
        slots = {
            s: f"extras['{self.slot}']{path.removeprefix('params')}"
            for path, s in found.items()
            if s and self.values[s].placement.partial
        }
        leaves, wrong = self.program.leaves, list[str]()
        for grad, path in ((self.values[source], path) for source, path in slots.items()):
            rows = self.program.mesh.axis_size(grad.placement.partial)
            if path not in leaves or leaves[path].shape != (rows, *grad.shape):
                wrong.append(f"{path}: {leaves.get(path, 'not in the state')}, for a gradient of {list(grad.shape)}")
        if wrong:
            what, fix = f"slot {self.slot!r} does not fit the gradients", "declare a Local like each parameter in slots"
            raise TransformError(self.by, what, wrong, fix)
        ops, late, sent = list[Instruction](), list[Instruction](), dict[str, str]()
        for op in self.program.instructions:
            if op.op == "split_parts" or op.op in COLLECTIVES:
                for source in (a for a in dict.fromkeys(op.args) if a in slots and a not in sent):
                    sent[source], now, later = self._ops(source, slots[source])
                    ops += now
                    late += later
                op = op.rename(sent)
            ops.append(op)
        return replace(self.program, instructions=(*ops, *late), functions=self.functions.by_name)

    def _source(self, name: str) -> str | None:
        """The whole value that a gradient is reduced from; None if there is one for each micro-batch."""
        while True:
            op, value = self.made[name], self.values[name]
            if op.is_wait:
                start = self.made[op.args[0]]
                name = start.args[[v.name for v in op.out].index(name)]
            elif op.op in ("split_parts", "join_parts"):
                name = op.args[0]
            else:
                adds = op.op in ("accumulate", "add") and self._reduced(op)
                return None if adds or value.placement.is_flat_shard else name

    def _reduced(self, op: Instruction) -> bool:
        """Whether a line adds up values that were already reduced, over at least one axis."""
        return any(self.made[a].is_wait for a in op.args if a in self.made)

    def _ops(self, source: str, slot: str) -> tuple[str, list[Instruction], list[Instruction]]:
        """The name of the value sent in place of a gradient, the lines that make it, and the lines at the end of the
        step."""
        sent = replace(self.values[source], name=self.names(f"{source}_sent"))
        both = (source, slot)
        ops = [
            Instruction("call", both, (sent,), self._function("sent", both, lambda g, x: self._of(g, x, 0)), by=self.by)
        ]
        keep = lambda g, x: self._of(g, x, 1)  # noqa: E731
        new = replace(self.values[slot], name=self.names(f"{source}_kept"))
        self.values[new.name] = new
        ops.append(Instruction("call", both, (new,), self._function("kept", both, keep), by=self.by))
        three = (self.finite, new.name, slot)
        fn = self._function("keep", three, lambda finite, now, before: torch.where(finite, now, before), writes=(2,))
        return sent.name, ops, [Instruction("call", three, (), fn, writes=(slot,), by=self.by)]

    def _of(self, grad: torch.Tensor, slot: torch.Tensor, which: int) -> torch.Tensor:
        """One of the two results of `fn`, in the shape in which it rests."""
        made = self.fn(grad, slot.reshape(grad.shape))
        like = (grad, slot)[which]
        if [x.shape for x in made] != [grad.shape] * 2 or made[which].dtype != like.dtype:
            problems = [f"{tuple(like.shape)} of {like.dtype} gave {tuple(made[which].shape)} of {made[which].dtype}"]
            fix = "return a gradient and a slot, each in the shape and dtype in which it came"
            raise FzeroTypeError(self.by, "the function of gradient and slot is not pointwise", problems, fix)
        return made[which].reshape(like.shape)

    def _function(self, name: str, args: Sequence[str], run: Callable[..., Any], writes: tuple[int, ...] = ()) -> str:
        """The name of a function of values, whose result is returned or written over an argument."""
        mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
        device, values = compat.trace_device(self.program.mesh.device_type), [self.values[a] for a in args]
        fakes = [compat.new_fake(mode, v.local_shape(self.program.mesh), v.dtype, device) for v in values]
        with mode:
            names = [f"in_{i}" for i in range(len(args))]
            graph = record(lambda *xs: [run(*xs)], fakes, owner=self.by, names=names, source=self.fn)
        return self.functions.add(f"{self.by}_{name}", written(graph, writes), writes)
