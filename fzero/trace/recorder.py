"""Records a function: runs it on fake tensors and writes down every ATen operation.

`Recorder` sits below autograd, so it writes down the forward and the backward alike, in the order they run. It knows
tensors by identity: a tensor it has not seen is one that the function got from somewhere other than its arguments,
which is an error, for a program is a function of its arguments alone. It must not know the use of the graph.
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
"""Operations that return their argument: no line of a program."""
_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_SHARED = "write y = y * 3 in place of y.mul_(3), or let the block return a copy (x.clone())"
FROM = "from"
"""The key under which the meta data of a node has the user's line that it is, or is the backward of."""
_ON_SHARDS = {"optimizer", "init"}
"""Whose operations are asked for their lines when they turn out not to run on shards."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded function: a graph of ATen operations and the literal tensors in it."""

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def inputs(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def module(self) -> fx.GraphModule:
        """As a callable."""
        return fx.GraphModule(dict(self.constants), self.graph)


class Recorder(compat.TorchDispatchMode):
    """Writes the operations that run inside it into an `fx.Graph`. `owner` names the traced function in errors."""

    supports_higher_order_operators = True  # so that they come here, and are refused by name

    def __init__(self, owner: str, constants_from: Callable[..., Any] | None = None):
        super().__init__()
        self.graph = compat.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.mutates = False
        self.memory = ArgumentMemory()
        self.failure: Failure | None = None
        # what the function may have caught: it runs on, but not as it would in PyTorch
        self.refused: Exception | None = None
        self.owner = owner
        self.in_place: dict[str, None] = {}  # lines with in-place operations
        self.source = constants_from
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids are only good while the tensor lives
        self._results = FakeResults()
        self._labels: dict[fx.Node, str] = {}
        self._answers = Answers(self)
        self._replaced: dict[int, str | None] = {}  # tensors that were given other memory, and where
        self._of_block: list[torch.Tensor] = []  # a block's arguments, as its function gets them
        self._outside: FrameType | None = None  # the frame that traces
        # by the sequence number of an autograd node: where the operation is that it differentiates
        self._lines: dict[int, Place | None] = {}
        self._dtype = torch.get_default_dtype()

    def input(self, tensor: torch.Tensor, name: str, label: str | None = None) -> fx.Node:
        node = self.graph.placeholder(name)
        self.track(tensor, node)
        self._labels[node] = label or name
        self.memory.add_argument(tensor, label or name)
        return node

    def arguments(self, trained: Collection[int]) -> list[torch.Tensor]:
        """A block's arguments, as its function gets them: leaves of autograd, of which these require gradients."""
        inputs = [x for x in self._alive if id(x) in self._nodes and self._nodes[id(x)].op == "placeholder"]
        self._of_block = [x.detach().requires_grad_(i in trained) for i, x in enumerate(inputs)]
        return self._of_block

    def layout_guessed(self, tensor: torch.Tensor) -> bool:
        """Whether PyTorch may lay a tensor out otherwise than its fake tensor says."""
        node = self._nodes.get(id(tensor))
        return node is not None and strides_guessed(node)

    def of_block(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument of the block that is traced."""
        return any(x is tensor for x in self._of_block)

    def constant(self, name: str, value: torch.Tensor, tensor: torch.Tensor) -> None:
        """`tensor` stands for a literal of the function."""
        self.constants[name] = value
        self.track(tensor, self.graph.create_node("get_attr", name))

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From here on `tensor` is the value of `node`."""
        node.meta["val"] = compat.with_memory(tensor)
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def node(self, tensor: torch.Tensor) -> fx.Node:
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
                "reads a tensor whose memory was replaced by another's",
                places,
                "use the other tensor itself, or x.copy_(y)",
            )
        if found is None:
            if within(self._outside, "_higher_order_ops"):
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
        """Writes down a call with several outputs."""
        node = self.graph.call_function(target, args)
        for i, out in enumerate(outputs):
            self.track(out, self.graph.call_function(operator.getitem, (node, i)))
            self.memory.add_result(out)
        return node

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the user's function that runs inside, and turns PyTorch's refusals into errors of fzero."""
        self._outside = sys._getframe(2)
        check_types(self.owner, self.source)
        try:
            with torch.autograd.set_multithreading_enabled(False), plainly(self.owner, self):
                with emptied(), Calls(self), self:
                    yield
                if self.refused is not None:
                    raise self.refused
        finally:
            self._outside = None

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """A refusal that leaves the body ends the trace, even if the traced function catches it."""
        try:
            yield
        except TraceError as error:
            self.refused = self.refused or error
            raise

    def check_default_dtype(self) -> None:
        """Raises if it is another than at the beginning: when the program runs, one holds for all of it."""
        if torch.get_default_dtype() is not self._dtype:
            what = f"changes torch's default dtype from {self._dtype} to {torch.get_default_dtype()}"
            raise TraceError(
                self.owner,
                what,
                self.here(),
                fix="give the operations that need another their dtype, e.g. torch.full(..., dtype=torch.float64)",
            )

    def finish(self, outputs: Sequence[torch.Tensor]) -> Recorded:
        """The recorded function with these results."""
        self.graph.output(tuple(self.node(t) for t in outputs))
        return Recorded(self.graph, self.constants)

    def where(self) -> str | None:
        """The user's line that runs, or whose backward does."""
        number = compat.backward_of()
        if number is None:
            place = user_place(self._outside)
            return line(place) if place else None
        return self.backward_line(number)

    def backward_line(self, number: int) -> str:
        """The user's line whose backward an autograd node is."""
        forward = self._lines.get(number)
        return f"the backward of {line(forward)}" if forward else "PyTorch's backward"

    def empty(self) -> list[str]:
        """The leaves of a batch that have no elements."""
        named = [(label, node.meta["val"]) for node, label in self._labels.items() if label.startswith("batch")]
        return [described(x, label) for label, x in named if not x.numel()]

    def named(self, tensor: torch.Tensor) -> str | None:
        """The argument that a tensor is, or is a view or a cast of."""
        node = self._nodes.get(id(tensor))
        while node is not None and node not in self._labels:
            node = (
                node.all_input_nodes[0]
                if node.target is aten._to_copy.default or (is_view(node) and node.all_input_nodes)
                else None
            )
        return self._labels[node] if node is not None else None

    def here(self, *lines: str) -> list[str]:
        """The user's line, if it is known, and these."""
        where = self.where()
        return [*([where] if where else []), *lines]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:  # as `remembering` does, which would take as long as the rest
            return self._dispatch(func, types, args, kwargs)
        except TraceError as error:
            self.refused = self.refused or error
            raise

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not compat.is_operator(func):
            refuse_functions(self, str(func))
        if func is _DEVICE:  # autograd asks a leaf for its device where nothing may be raised
            return func(*args, **kwargs)
        self.check_default_dtype()
        func = CTC.get(func, func)
        check_operation(self, func, args, kwargs)
        if func is aten.lift_fresh.default and id(args[0]) not in self._nodes:  # torch.tensor(...): a literal
            out = func(*args, **kwargs)
            self.literal(args[0], out)
            return out
        if func.overloadpacket is aten.set_:  # cuDNN looks into the memory of its weights this way, and reads nothing
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
            kwargs = kwargs | {"device": args[0].device}  # PyTorch's sum with a ZeroTensor, which a fake one is of meta
        elif kwargs.get("device") == _META or any(isinstance(x, torch.Tensor) and x.device == _META for x in args):
            return func(*args, **kwargs)  # PyTorch's own, for the shape of a product with a ZeroTensor
        backward, place = compat.backward_of(), None
        if backward is not None:
            place = self._lines.get(backward)
        elif self._outside is not None:
            place = user_place(self._outside)
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
        """Writes down an operation that stands for another, or for a part of it."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _nan_where_singular(self, info: torch.Tensor) -> None:
        """Makes results NaN where PyTorch raises because a matrix is singular or not positive definite: a program does
        not raise."""
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
        """Remembers that these are overwritten."""
        self.mutates = True
        if compat.backward_of() is None:
            self.in_place.update(dict.fromkeys(self.here()))
        for tensor in tensors:
            self.memory.write(tensor, self.where)

    def _overwrite(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Writes down `old.copy_(new)`, of which autograd, like PyTorch's, knows nothing."""
        self._write([old])
        self.track(old, self.graph.call_function(aten.copy_.default, (self.node(old), self.node(new))))

    def nodes_in(self, value: Any) -> Any:
        """Arguments with tensors replaced by their nodes."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self.nodes_in(v) for v in value)
        if isinstance(value, dict):
            return {k: self.nodes_in(v) for k, v in value.items()}
        return value

    def literal(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """`out` stands for a literal of this value."""
        if value.numel() == 1:
            known = getattr(out, "constant", None)
            with compat.no_modes():
                scalar = (known if known is not None else value).reshape(()).item()
            self.track(
                out,
                self.graph.call_function(
                    aten.full.default, (list(value.shape), scalar), {"dtype": value.dtype, "device": value.device}
                ),
            )
            return
        name = f"literal_{len(self.constants)}"
        with compat.no_modes():  # a real copy, not one of the mode that traces
            copy = value.clone()
        self.constant(name, copy, out)
