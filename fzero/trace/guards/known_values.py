"""Answers questions about values in a trace: the values of literals, which are known, and conditions that only decide
whether a function raises.

The result of an op is known if all of its inputs are literals; an example is a mask made by `torch.ones(4, 4).triu()`.
If Python, or the computation of a shape, needs such a value, it is computed. Values that depend on an argument of the
function are not known.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fzero import tree
from fzero._compat import compat
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.user_frames import asking_frame, condition_line

if TYPE_CHECKING:
    from fzero.trace.recorder import Recorder

aten = torch.ops.aten


class Answers:
    """The answers that a recorder gives to questions about values."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._known = Known(recorder.graph, recorder.constants)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a question about values, if they are known, or if they only decide whether the function raises.
        None if there is no answer."""
        recorder = self._recorder
        found = self._compute(func, args, kwargs)
        if found is not None:
            return tree.map(lambda x: self._constant_like(x, args) if isinstance(x, torch.Tensor) else x, found)
        if func is aten.masked_select.default:
            shape = list(torch.broadcast_shapes(args[0].shape, args[1].shape))
            mask = recorder.do(aten.expand.default, args[1], shape)
            func, args = aten.index.Tensor, (recorder.do(aten.expand.default, args[0], shape), [mask])
        if func is aten.index.Tensor:
            places: list[Any] = []
            for index in args[1]:
                mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                at = self._compute(aten.nonzero.default, (index,), {}) if mask else None
                if mask and at is None:
                    return None
                with compat.no_modes():
                    columns = [] if at is None else [x.contiguous() for x in at.unbind(1)]
                places += [self._constant_like(x, args) for x in columns] if mask else [index]
            return recorder.do(func, args[0], places)
        frame = asking_frame() if func is aten._local_scalar_dense.default else None
        if frame is not None and (test := raise_conditions.test_of(frame)) is not None:
            if compat.backward_of() is None:  # in a backward, it was already noted when the forward ran
                self._note(frame, test, args[0])
            return test.answer
        return None

    def number_of(self, tensor: torch.Tensor) -> float | None:
        """The value of a 0-dim tensor, if it is known."""
        return self._compute(aten._local_scalar_dense.default, (tensor,), {})

    def _note(self, frame: FrameType, test: raise_conditions.Test, value: torch.Tensor) -> None:
        """Records a flag that says whether a test fails, and with it all earlier tests of the same condition."""
        do = self._recorder.do
        fails = do(aten.eq.Scalar if test.passes else aten.ne.Scalar, value, 0)
        flag = do(aten.view.default, do(aten._to_copy.default, fails, dtype=torch.float32), [1])
        if (before := raise_conditions.waited(frame, test)) is not None:
            flag = do(aten.mul.Tensor, flag, before)
        if test.last:
            raise_conditions.note(flag, [condition_line()])
        else:
            raise_conditions.wait(frame, test, flag)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._known.compute(func, *self._recorder.nodes_in((args, kwargs)))
        except Unknown:
            return None

    def _constant_like(self, value: torch.Tensor, args: Any) -> torch.Tensor:
        """A literal with a computed value, as a fake tensor of the same mode as the arguments."""
        like = tree.tensors(args)[0]
        mode = like.fake_mode  # type: ignore[attr-defined]
        out = compat.new_fake(mode, value.shape, value.dtype, like.device, value.stride())
        self._recorder.literal(value, out)
        return out


class Unknown(Exception):
    """A value depends on an argument, so it is not known."""


class Known:
    """Computes the known values of a graph while it is recorded: starts from its literals and follows the order of its
    ops, in place if an op works in place."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]):
        self._constants = constants
        self._values: dict[fx.Node, Any] = {}
        self._last = graph._root
        self._lost: set[int] = set()  # memory to which an unknown value was written

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op, given arguments in which nodes stand for tensors.

        Raises:
            Unknown: the result depends on more than literals.
        """
        with compat.no_modes(), torch.no_grad():
            # The nodes of an fx graph form a ring that begins and ends at its root. Nodes before `_last` are done.
            while (node := self._last.next).op != "root":
                self._last = node
                try:
                    if node.op == "get_attr":
                        # A copy, because in-place ops of the function are repeated here.
                        self._values[node] = self._constants[str(node.target)].clone()
                    elif node.op == "call_function":
                        self._values[node] = self._run(node.target, node.args, node.kwargs)
                except Unknown:
                    if compat.is_operator(node.target) and node.target._schema.is_mutable:  # type: ignore[union-attr]
                        self._lost.update(
                            _memory(self._values[x])
                            for x in node.all_input_nodes
                            if isinstance(self._values.get(x), torch.Tensor)
                        )
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        def value(node: fx.Node) -> Any:
            found = self._values.get(node)
            if found is None or (isinstance(found, torch.Tensor) and _memory(found) in self._lost):
                raise Unknown
            return found

        if func in _UNWRITTEN or not (
            func is operator.getitem
            or (compat.is_operator(func) and torch.Tag.nondeterministic_seeded not in func.tags)
        ):
            raise Unknown
        kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
        return func(*map_arg(args, value), **map_arg(kwargs, value))


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


_UNWRITTEN = {
    getattr(aten, name).default for name in ("empty_like", "new_empty", "empty_strided", "new_empty_strided")
} | {aten.empty.memory_format}
