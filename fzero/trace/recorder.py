"""Records a function: runs it on fake tensors and writes down every ATen op.

`Recorder` is a dispatch mode below autograd, so it records the ops of the forward and of the backward, in the order in
which they run. It identifies tensors by identity. A tensor that it has not seen before came from somewhere other than
the function's arguments, which is an error, because a program is a function of its arguments only. This file does not
know what the graph is used for.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.errors import TraceError
from fzero.ops.ctc import CTC
from fzero.ops.recurrent import RNN
from fzero.trace.guards import overwrites
from fzero.trace.guards.argument_memory import ArgumentMemory
from fzero.trace.guards.exact_types import check_types
from fzero.trace.guards.function_caches import emptied, kept_in
from fzero.trace.guards.known_values import Answers
from fzero.trace.guards.rejections import Failure, described, note, plainly, reached
from fzero.trace.guards.tensor_queries import Calls
from fzero.trace.guards.unsupported_operations import (
    check_dense,
    check_dtypes,
    check_operation,
    refuse_functions,
    refuse_value,
)
from fzero.trace.guards.user_frames import Place, line, user_place, within
from fzero.trace.meta_cache import FakeResults
from fzero.trace.storages import is_view, strides_guessed

aten = torch.ops.aten

_REWRITTEN = {**overwrites.REWRITTEN, **RNN}
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Ops that return their argument. They do not become ops of a program."""
_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_SHARED = "write y = y * 3 in place of y.mul_(3), or let the block return a copy (x.clone())"
FROM = "from"
"""The key of a node's metadata under which the user's line is stored: the line of the op or, for an op of the backward,
the line that is differentiated."""
_ON_SHARDS = {"optimizer", "init"}
"""The owners whose ops must run on shards. Errors about ops that cannot need the line of each op."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded function: a graph of ATen ops and the literal tensors in it."""

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def inputs(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def module(self) -> fx.GraphModule:
        """The graph as a callable module."""
        return fx.GraphModule(dict(self.constants), self.graph)


class Recorder(compat.TorchDispatchMode):
    """Records the ops that run inside it in an `fx.Graph`. `owner` names the traced function in errors."""

    supports_higher_order_operators = True  # so that they arrive here and are rejected by name

    def __init__(self, owner: str, constants_from: Callable[..., Any] | None = None):
        super().__init__()
        self.graph = compat.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.mutates = False
        self.memory = ArgumentMemory()
        self.failure: Failure | None = None
        # A rejection that the function may have caught. It then continues, but not as it would in PyTorch.
        self.refused: Exception | None = None
        self.owner = owner
        self.in_place: dict[str, None] = {}  # the user's lines with in-place ops
        self.source = constants_from
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # an id is valid only while its tensor is alive
        self._results = FakeResults()
        self._labels: dict[fx.Node, str] = {}
        self._answers = Answers(self)
        self._replaced: dict[int, str | None] = {}  # tensors whose memory was replaced (`set_`), and the line
        self._of_block: list[torch.Tensor] = []  # a block's arguments, in the form its function gets them
        self._outside: FrameType | None = None  # the frame that traces
        # by the sequence number of an autograd node: the user's line that it differentiates
        self._lines: dict[int, Place | None] = {}
        self._dtype = torch.get_default_dtype()

    def input(self, tensor: torch.Tensor, name: str, label: str | None = None) -> fx.Node:
        """Adds an argument of the function to the graph. `label` is its name in errors, if that is not `name`."""
        node = self.graph.placeholder(name)
        self.track(tensor, node)
        self._labels[node] = label or name
        self.memory.add_argument(tensor, label or name)
        return node

    def arguments(self, trained: Collection[int]) -> list[torch.Tensor]:
        """A block's arguments in the form in which its function gets them: leaves of autograd, of which those in
        `trained` require gradients."""
        inputs = [x for x in self._alive if id(x) in self._nodes and self._nodes[id(x)].op == "placeholder"]
        self._of_block = [x.detach().requires_grad_(i in trained) for i, x in enumerate(inputs)]
        return self._of_block

    def layout_guessed(self, tensor: torch.Tensor) -> bool:
        """Whether PyTorch may give a tensor other strides than its fake tensor has."""
        node = self._nodes.get(id(tensor))
        return node is not None and strides_guessed(node)

    def of_block(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument of the block that is being traced."""
        return any(x is tensor for x in self._of_block)

    def constant(self, name: str, value: torch.Tensor, tensor: torch.Tensor) -> None:
        """Records that `tensor` stands for a literal of the function."""
        self.constants[name] = value
        self.track(tensor, self.graph.create_node("get_attr", name))

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Records that `tensor` is the value of `node` from now on."""
        node.meta["val"] = compat.with_memory(tensor)
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor. Raises if the tensor must not be read: it is not an argument and was not computed from
        one, its memory was written through another tensor, or its memory was replaced."""
        found = self._nodes.get(id(tensor))
        if (stale := self.memory.stale(tensor)) is not None:
            written = [f"written in place: {stale.where}"] if stale.where else []
            text = (
                "reads a tensor after its memory was written through another, that an argument or a result of "
                f"{stale.block} shares with it"
            )
            raise TraceError(self.owner, text, [*self.here(described(tensor, self.named(tensor))), *written], _SHARED)
        if found is None and id(tensor) in self._replaced:
            places = self.here(
                described(tensor), *([f"set_ here: {where}"] if (where := self._replaced[id(tensor)]) else [])
            )
            raise TraceError(
                self.owner,
                "reads a tensor whose memory was replaced by that of another tensor",
                places,
                "use the other tensor itself, or x.copy_(y)",
            )
        if found is None:
            of_functions = within(self._outside, "_higher_order_ops")
            if of_functions and not within(self._outside, "_higher_order_ops/flex_attention.py"):
                refuse_functions(self, "torch.cond, scan, while_loop or their like")
            if within(self._outside, "utils/checkpoint.py"):
                what = "recomputes, in the backward, with a tensor that is not one of its arguments"
                fix = (
                    "leave torch.utils.checkpoint out, and give the module by fz.functionalize, in which it is a call: "
                    "fz.remat says what a backward recomputes"
                )
                raise TraceError(self.owner, what, self.here(described(tensor)), fix)
            kept = kept_in(tensor)
            where = self.here(described(tensor, reached(self.source, tensor) or "a tensor from its closure"))
            if isinstance(tensor, compat.FakeTensor):
                raise TraceError(
                    self.owner,
                    "reads a tensor that is not one of its arguments, but was kept from an earlier trace (a cache)",
                    [*where, *([kept] if kept else [])],
                    "compute it in each call; a constant by a function with functools.lru_cache, which a trace "
                    "ignores, or, in a module, in __init__: self.register_buffer(name, x, persistent=False)",
                )
            raise TraceError(
                self.owner,
                "reads a tensor that is not one of its arguments",
                [*where, *([kept] if kept else [])],
                "pass it in: as a parameter (a buffer that is not trained: train_step(..., trainable=lambda path, "
                "leaf: 'mask' not in path)), as part of the batch, or make it inside the function; of a module, one in "
                "a list or dict: self.register_buffer(name, x)",
            )
        return found

    def call(self, target: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> fx.Node:
        """Records a call with several outputs."""
        node = self.graph.call_function(target, args)
        for i, out in enumerate(outputs):
            self.track(out, self.graph.call_function(operator.getitem, (node, i)))
            self.memory.add_result(out)
        return node

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the user's function that runs in the body, and turns PyTorch's errors into errors of fzero."""
        # Frame 0 is this generator, frame 1 is contextlib's `__enter__`, and frame 2 is the caller.
        self._outside = sys._getframe(2)
        check_types(self.owner, self.source)
        try:
            with torch.autograd.set_multithreading_enabled(False), plainly(self.owner, self):
                # The recorder is entered last: the innermost dispatch mode gets each op first.
                with emptied(), compat.flex_attention_on_fakes(), Calls(self), self:
                    yield
                if self.refused is not None:
                    raise self.refused
        finally:
            self._outside = None

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Remembers a rejection (a TraceError) that leaves the body, so that it ends the trace even if the traced
        function catches it."""
        try:
            yield
        except TraceError as error:
            self.refused = self.refused or error
            raise

    def check_default_dtype(self) -> None:
        """Raises if the default dtype has changed since the beginning of the trace, because a program runs with one
        default dtype."""
        if torch.get_default_dtype() is not self._dtype:
            what = f"changes torch's default dtype from {self._dtype} to {torch.get_default_dtype()}"
            raise TraceError(
                self.owner,
                what,
                self.here(),
                fix="give the operations that need another their dtype, e.g. torch.full(..., dtype=torch.float64)",
            )

    def finish(self, outputs: Sequence[torch.Tensor]) -> Recorded:
        """Returns the recorded function with these results."""
        self.graph.output(tuple(self.node(t) for t in outputs))
        return Recorded(self.graph, self.constants)

    def where(self) -> str | None:
        """The user's line that is running or, during a backward, the line that is being differentiated."""
        number = compat.backward_of()
        if number is None:
            place = user_place(self._outside)
            return line(place) if place else None
        return self.backward_line(number)

    def line_of(self, tensor: torch.Tensor) -> str | None:
        """The user's line that computed a tensor, if it is known."""
        node = self._nodes.get(id(tensor))
        while node is not None and node.meta.get(FROM) is None and node.target is operator.getitem:
            node = node.all_input_nodes[0]
        place = node.meta.get(FROM) if node is not None else None
        return line(place) if place is not None else None

    def number_of(self, tensor: torch.Tensor) -> float | None:
        """The value of a 0-dim tensor that depends on nothing but literals; None for others."""
        return self._answers.number_of(tensor)

    def backward_line(self, number: int) -> str:
        """Describes the user's line that an autograd node differentiates."""
        forward = self._lines.get(number)
        return f"the backward of {line(forward)}" if forward else "PyTorch's backward"

    def empty(self) -> list[str]:
        """The tensors of the batch that have no elements."""
        named = [(label, node.meta["val"]) for node, label in self._labels.items() if label.startswith("batch")]
        return [described(x, label) for label, x in named if not x.numel()]

    def named(self, tensor: torch.Tensor) -> str | None:
        """The name of the argument that a tensor is, or of which it is a view or a cast."""
        node = self._nodes.get(id(tensor))
        while node is not None and node not in self._labels:
            node = (
                node.all_input_nodes[0]
                if node.target is aten._to_copy.default or (is_view(node) and node.all_input_nodes)
                else None
            )
        return self._labels[node] if node is not None else None

    def here(self, *lines: str) -> list[str]:
        """The user's line that is running, if it is known, followed by these lines."""
        where = self.where()
        return [*([where] if where else []), *lines]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:  # same as `remembering`, whose overhead would double the time of a dispatch
            return self._dispatch(func, types, args, kwargs)
        except TraceError as error:
            self.refused = self.refused or error
            raise

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records one op: checks that it is supported, infers its result, and adds a node for it to the graph. A few
        ops are answered, rewritten or run without being recorded."""
        kwargs = kwargs or {}
        if not compat.is_operator(func):
            refuse_functions(self, str(func))
        if func is _DEVICE:  # autograd queries the device of a leaf where raising is not allowed
            return func(*args, **kwargs)
        self.check_default_dtype()
        func = CTC.get(func, func)
        check_operation(self, func, args, kwargs)
        if func is aten.lift_fresh.default and id(args[0]) not in self._nodes:  # torch.tensor(...): a literal
            out = func(*args, **kwargs)
            self.literal(args[0], out)
            return out
        if func.overloadpacket is aten.set_:  # cuDNN inspects the memory of its weights this way; reads no values
            self._nodes.pop(id(args[0]), None)
            self._replaced[id(args[0])] = self.where()
            self._alive.append(args[0])
            return func(*args, **kwargs)
        if func is aten._linalg_check_errors.default:
            return self._nan_where_singular(args[0])
        if func in _REWRITTEN:
            results = _REWRITTEN[func](self.do, self._overwrite, *args)
            if results is not None:
                return results
        if func is aten._to_copy.default and kwargs.get("device") == _META != args[0].device:
            kwargs = kwargs | {"device": args[0].device}  # a sum with a ZeroTensor, which as a fake is on meta
        elif kwargs.get("device") == _META or any(isinstance(x, torch.Tensor) and x.device == _META for x in args):
            return func(*args, **kwargs)  # PyTorch's own call, for the shape of a product with a ZeroTensor
        backward, place = compat.backward_of(), None
        if backward is not None:
            place = self._lines.get(backward)
        elif self._outside is not None:
            place = user_place(self._outside)
            # Autograd creates an op's node before the op arrives here, so the last number given out belongs to this op.
            # An op without a node finds the number of an earlier op, whose line `setdefault` keeps.
            self._lines.setdefault(compat.next_autograd_node() - 1, place)
        node_args, node_kwargs = self.nodes_in((args, kwargs))
        try:
            check_dtypes(func, args)
            out = self._results(func, args, kwargs)
        except compat.DATA_DEPENDENT as error:
            if (answer := self._answers.answer(func, args, kwargs)) is not None:
                return answer
            refuse_value(self, func, error)
        except Exception as error:
            note(self, error, func, (args, kwargs))
            raise
        check_dense(self, func, out)
        if func in _SAME_VALUE:
            self._nodes[id(out)] = node_args[0]
            self._alive.append(out)
            return out
        if func._schema.is_mutable:
            self._write(overwrites.overwritten(func, args, kwargs))
        target = aten.zeros.default if func is aten._efficientzerotensor.default else func
        node = self.graph.call_function(target, node_args, node_kwargs)
        node.meta[FROM] = place
        if self.owner in _ON_SHARDS:
            node.meta["place"] = user_place(self._outside)
        if isinstance(out, torch.Tensor):
            self.track(out, node)
        elif isinstance(out, (tuple, list)):
            node.meta["val"] = out
            for i, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.track(item, self.graph.call_function(operator.getitem, (node, i)))
        return out

    def do(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Records an op that replaces another op, or a part of it."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _nan_where_singular(self, info: torch.Tensor) -> None:
        """Makes results NaN if PyTorch would raise because a matrix is singular or not positive definite. A program
        cannot raise."""
        # All results of a failed factorization are undefined, not only the one that is checked.
        call = self.node(info).args[0]
        of_call = {
            id(x): n
            for x in self._alive
            if (n := self._nodes.get(id(x))) is not None and n.target is operator.getitem and n.args[0] is call
        }
        replaced: dict[fx.Node, fx.Node] = {}
        for node in dict.fromkeys(of_call.values()):
            x: torch.Tensor = node.meta["val"]
            if x.is_floating_point() or x.is_complex():
                fine = self.do(aten.eq.Scalar, info, 0)
                fine = self.do(aten.view.default, fine, [*info.shape, *[1] * (x.dim() - info.dim())])
                nan = self.do(aten.full.default, [], math.nan, dtype=x.dtype, device=x.device)
                replaced[node] = self.node(self.do(aten.where.self, fine, x, nan))
        self._nodes.update({key: replaced[node] for key, node in of_call.items() if node in replaced})

    def _write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Records that these tensors are overwritten."""
        self.mutates = True
        if compat.backward_of() is None:
            self.in_place.update(dict.fromkeys(self.here()))
        for tensor in tensors:
            self.memory.write(tensor, self.where)

    def _overwrite(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Records `old.copy_(new)` without informing autograd, as PyTorch's own kernels do when they overwrite an
        argument."""
        self._write([old])
        self.track(old, self.graph.call_function(aten.copy_.default, (self.node(old), self.node(new))))

    def nodes_in(self, value: Any) -> Any:
        """Arguments with their tensors replaced by the nodes of these tensors."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self.nodes_in(v) for v in value)
        if isinstance(value, dict):
            return {k: self.nodes_in(v) for k, v in value.items()}
        return value

    def literal(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """Records that `out` stands for a literal with this value."""
        if value.numel() == 1:
            known = getattr(out, "constant", None)
            with compat.no_modes():
                # A fake tensor keeps the value of a small literal in its attribute `constant`.
                scalar = (known if known is not None else value).reshape(()).item()
            self.track(
                out,
                self.graph.call_function(
                    aten.full.default, (list(value.shape), scalar), {"dtype": value.dtype, "device": value.device}
                ),
            )
            return
        name = f"literal_{len(self.constants)}"
        with compat.no_modes():  # a real copy, not one recorded by the tracing mode
            copy = value.clone()
        self.constant(name, copy, out)


def source_place(node: fx.Node) -> Place | None:
    """Returns the user's line that an op was recorded for, if it is known."""
    return node.meta.get(FROM) or node.meta.get("place")


def line_of(tensor: Any) -> str | None:
    """The user's line that computed a tensor in the running trace. None if there is no trace, or if the line is not
    known, as for a result of a block."""
    recorder = _running()
    return recorder.line_of(tensor) if recorder is not None else None


def number_of(tensor: torch.Tensor) -> float | None:
    """The value of a 0-dim tensor in the running trace, if it depends on nothing but literals. None otherwise, or if
    there is no trace."""
    recorder = _running()
    return recorder.number_of(tensor) if recorder is not None else None


def _running() -> Recorder | None:
    return next((mode for mode in reversed(compat.dispatch_modes()) if isinstance(mode, Recorder)), None)
