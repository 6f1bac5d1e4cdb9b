"""Records a function: runs it on fake tensors and writes down every ATen operation.

`Recorder` sits below autograd, so what it writes down is the forward and the backward alike, in the order they run. It
knows tensors by identity: a tensor it has not seen is one that the function got from somewhere other than its
arguments, which is an error, for a program is a function of its arguments alone. It must not know what the graph is
for.
"""

from __future__ import annotations

import functools
import gc
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

from fzero import compat, tree
from fzero.errors import TraceError, message
from fzero.operators.ctc import CTC
from fzero.operators.recurrent import RNN
from fzero.trace import checks, overwrites, strides
from fzero.trace.exact_types import check_types
from fzero.trace.known_values import Known, Unknown
from fzero.trace.merge_equal import merge_equal
from fzero.trace.meta_cache import Results
from fzero.trace.refusals import (
    CHANGES,
    NEW_VALUE,
    OF_HISTORY,
    OF_MEMORY,
    Calls,
    Failure,
    Place,
    asking_frame,
    described,
    is_pytorchs,
    line,
    note,
    plainly,
    reached,
    user_place,
    within,
)
from fzero.trace.storages import is_view
from fzero.trace.switches import without_autocast

aten = torch.ops.aten

_REWRITTEN = {**overwrites.REWRITTEN, **RNN}
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Operations that return their argument: no line of a program."""
_DEVICE = torch.ops.prim.device.default
_VALUE = (
    "choose with torch.where or arithmetic instead of .item(), float(), bool() or Python's if on tensors; give modules "
    "numbers (momentum=0.1, not None)"
)
_VALUE_IN_UPDATE = (
    "what a schedule and an optimizer are given are tensors, the step too: write torch.clamp(step / 100, max=1) for "
    "min(1, step / 100), "
    "torch.cos for math.cos, torch.where for Python's if; or take a schedule of fz.optim (warmup_cosine)"
)
_INSTEAD = {
    aten.linalg_lstsq.default: "torch.linalg.pinv(a) @ b, or torch.linalg.solve of the normal equations",
    aten._pack_padded_sequence.default: "run the layer on the padded sequences, and mask what lies behind their ends",
}
_SHAPE = "keep the shape: torch.where(mask, x, 0), or a sum weighted by the mask"
_SHARED = "write y = y * 3 in place of y.mul_(3), or let the block return a copy (x.clone())"

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
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.mutates = False
        self.written: dict[str, str | None] = {}  # arguments that the function writes to, and where it does
        self.failure: Failure | None = None
        # what the function may have caught: it runs on, but not as it would in PyTorch
        self.refused: Exception | None = None
        self.owner = owner
        self.in_place: dict[str, None] = {}  # lines with in-place operations
        self.source = constants_from
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids are only good while the tensor lives
        self._results = Results()
        self._labels: dict[fx.Node, str] = {}
        self._storages: dict[int, str] = {}  # of arguments
        # storages that stand for one memory, and the blocks that make them so
        self._shared: dict[int, dict[int, str]] = {}
        # storages of whose memory another was written, by which block and where
        self._stale: dict[int, tuple[str, str | None]] = {}
        self._known = Known(self.graph, self.constants)
        self._replaced: dict[int, str | None] = {}  # tensors that were given other memory, and where
        # storages of arguments and of results of blocks: in PyTorch they may be parts of others
        self._crossed: set[int] = set()
        self._of_block: list[torch.Tensor] = []  # a block's arguments, as its function gets them
        self._outside: FrameType | None = None  # the frame that traces
        # by the sequence number of an autograd node: where the operation is that it differentiates
        self._lines: dict[int, Place | None] = {}
        self._dtype = torch.get_default_dtype()

    def input(self, tensor: torch.Tensor, name: str, label: str | None = None) -> fx.Node:
        node = self.graph.placeholder(name)
        self.track(tensor, node)
        self._labels[node] = self._storages[_storage(tensor)] = label or name
        self._crossed.add(_storage(tensor))
        return node

    def arguments(self, trained: Collection[int]) -> list[torch.Tensor]:
        """A block's arguments, as its function gets them: leaves of autograd, of which these require gradients."""
        inputs = [x for x in self._alive if id(x) in self._nodes and self._nodes[id(x)].op == "placeholder"]
        self._of_block = [x.detach().requires_grad_(i in trained) for i, x in enumerate(inputs)]
        return self._of_block

    def check_layout(self, tensor: torch.Tensor) -> None:
        """Notes where code asks how a tensor is laid out; raises where a trace cannot tell."""
        strides.note(self.here())
        node = self._nodes.get(id(tensor))
        if node is not None and strides.guessed(node):
            text = (
                "asks how a tensor is laid out that is made of tensors that are not contiguous, where PyTorch may lay "
                "it out otherwise than a trace says"
            )
            fix = "ask of x.contiguous(), or do not ask: reshape and flatten copy where they must"
            raise TraceError(message(self.owner, text, self.here(described(tensor, self.named(tensor))), fix))

    def check_read(self, what: str, tensor: torch.Tensor) -> None:
        """Raises if code reads of a tensor what is another in PyTorch: where it comes from, if it is a block's
        argument, or where it lies."""
        if what in OF_HISTORY and not any(x is tensor for x in self._of_block):
            return
        if what in OF_MEMORY and what != "data_ptr" and _storage(tensor) not in self._crossed:
            # an address is none in a trace
            return
        text = (
            "asks where an argument comes from"
            if what in OF_HISTORY
            else "asks where a tensor lies that is given to it or to a block, or comes from one"
        )
        fix = (
            "do it outside of the block"
            if what in OF_HISTORY
            else "index or view it, or make a copy first: x.contiguous().clone()"
        )
        raise TraceError(message(self.owner, f"{text} ({what})", self.here(described(tensor, self.named(tensor))), fix))

    def constant(self, name: str, value: torch.Tensor, tensor: torch.Tensor) -> None:
        """`tensor` stands for a literal of the function."""
        self.constants[name] = value
        self.track(tensor, self.graph.create_node("get_attr", name))

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From here on `tensor` is the value of `node`."""
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def share(self, tensors: Sequence[torch.Tensor], owner: str) -> None:
        """In PyTorch these have one memory, by a block of this name; here each has its own. What is written to one must
        not be read from another."""
        storages = [_storage(t) for t in tensors]
        one = {k: name for s in storages for k, name in self._shared.get(s, {}).items()} | dict.fromkeys(
            storages, owner
        )
        self._shared.update(dict.fromkeys(one, one))

    def node(self, tensor: torch.Tensor) -> fx.Node:
        found = self._nodes.get(id(tensor))
        if self._stale and _storage(tensor) in self._stale:
            block, where = self._stale[_storage(tensor)]
            written = [f"written in place: {where}"] if where else []
            text = (
                f"reads a tensor after its memory was written through another, that an argument or a result of {block} "
                f"shares with it"
            )
            raise TraceError(
                message(self.owner, text, [*self.here(described(tensor, self.named(tensor))), *written], _SHARED)
            )
        if found is None and id(tensor) in self._replaced:
            places = self.here(
                described(tensor), *([f"set_ here: {where}"] if (where := self._replaced[id(tensor)]) else [])
            )
            raise TraceError(
                message(
                    self.owner,
                    "reads a tensor whose memory was replaced by another's",
                    places,
                    "use the other tensor itself, or x.copy_(y)",
                )
            )
        if found is None:
            if within(self._outside, "_higher_order_ops"):
                self._refuse_functions("torch.cond, scan, while_loop or their like")
            kept = (
                ", and if it is kept from an earlier call (a cache), compute it in each"
                if isinstance(tensor, compat.FakeTensor)
                else ""
            )
            raise TraceError(
                message(
                    self.owner,
                    "reads a tensor that is not one of its arguments",
                    self.here(described(tensor, reached(self.source, tensor) or "a tensor from its closure")),
                    "pass it in: as a parameter (a buffer that is not trained: train_step(..., trainable=lambda path, "
                    "leaf: 'mask' not in path)), "
                    f"as part of the batch, or make it inside the function{kept}",
                )
            )
        return found

    def call(self, target: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> fx.Node:
        """Writes down a call with several outputs."""
        node = self.graph.call_function(target, args)
        for i, out in enumerate(outputs):
            self.track(out, self.graph.call_function(operator.getitem, (node, i)))
            self._crossed.add(_storage(out))
        return node

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the user's function that runs inside, and speaks for PyTorch where that refuses it."""
        self._outside = sys._getframe(2)
        check_types(self.owner, self.source)
        try:
            with torch.autograd.set_multithreading_enabled(False), plainly(self.owner, self):
                with Calls(self), self:
                    yield
                if self.refused is not None:
                    raise self.refused
        finally:
            self._outside = None

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """A refusal that leaves the body ends the trace, whatever the function that is traced does with it."""
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
                message(
                    self.owner,
                    what,
                    self.here(),
                    fix="give the operations that need another their dtype, e.g. torch.full(..., dtype=torch.float64)",
                )
            )

    def finish(self, outputs: Sequence[torch.Tensor]) -> Recorded:
        """The recorded function with these results."""
        self.graph.output(tuple(self.node(t) for t in outputs))
        return Recorded(self.graph, self.constants)

    def finish_pure(self, outputs: Sequence[torch.Tensor]) -> Recorded:
        """As `finish`, without in-place operations. Those on the arguments are an error that names them."""
        if self.written:
            changed = [f"{label}: {where}" if where else label for label, where in self.written.items()]
            raise TraceError(message(self.owner, CHANGES, changed, NEW_VALUE))
        graph = self.finish(outputs)
        return functional(graph, self.owner) if self.mutates else graph

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

    def _refuse_functions(self, name: str) -> None:
        fix = "write it with torch.where, a Python loop over sizes, or torch.func.vmap"
        raise TraceError(
            message(
                self.owner, f"uses an operator of functions, which a program has no line for ({name})", self.here(), fix
            )
        )

    def here(self, *lines: str) -> list[str]:
        """The user's line, if it is known, and these."""
        where = self.where()
        return [*([where] if where else []), *lines]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:  # what `remembering` does, which would take as long as the rest
            return self._dispatch(func, types, args, kwargs)
        except TraceError as error:
            self.refused = self.refused or error
            raise

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not compat.is_operator(func):
            self._refuse_functions(str(func))
        if func is _DEVICE:  # autograd asks a leaf for its device where nothing may be raised
            return func(*args, **kwargs)
        self.check_default_dtype()
        if compat.fx_tracing():
            fix = "use torch.func.jvp, which computes the same, in place of torch.func.linearize"
            raise TraceError(
                message(self.owner, f"traces a function by torch.fx while being traced ({func})", self.here(), fix)
            )
        func = CTC.get(func, func)
        if draws(func, args, kwargs):
            raise TraceError(
                message(
                    self.owner,
                    f"draws from torch's global generator ({func})",
                    self.here(),
                    fix="use fz.random (normal, uniform, bernoulli, dropout) with a key: its draws are the same on "
                    "every mesh and when recomputed",
                )
            )
        if func is aten.lift_fresh.default and id(args[0]) not in self._nodes:  # torch.tensor(...): a literal
            out = func(*args, **kwargs)
            self._literal(args[0], out)
            return out
        if func.overloadpacket is aten.set_:  # cuDNN looks into the memory of its weights this way, and reads nothing
            self._nodes.pop(id(args[0]), None)
            self._replaced[id(args[0])] = self.where()
            self._alive.append(args[0])
            return func(*args, **kwargs)
        if func is aten._linalg_check_errors.default:
            return self._nan_where_singular(args[0])
        if func in overwrites.REFUSED and overwrites.given(func, args, kwargs, overwrites.REFUSED[func]):
            text = f"overwrites {' and '.join(overwrites.REFUSED[func])} where no trace can see it ({func})"
            raise TraceError(
                message(
                    self.owner,
                    text,
                    self.here(),
                    "compute them by other operations, or with F.batch_norm on clones of them",
                )
            )
        if func in _REWRITTEN:
            results = _REWRITTEN[func](self._do, self._overwrite, *args)
            if results is not None:
                return results
        backward = compat.backward_of()
        if backward is None and self._outside is not None:
            number = compat.next_autograd_node() - 1
            if number not in self._lines:
                self._lines[number] = user_place(self._outside)
        node_args, node_kwargs = self._nodes_in((args, kwargs))
        try:
            _check_dtypes(func, args)
            out = self._results(func, args, kwargs)
        except compat.DATA_DEPENDENT as error:
            if (answer := self._answer(func, args, node_args, node_kwargs)) is not None:
                return answer
            of_shape = isinstance(error, compat.SHAPE_DEPENDENT)
            text = "needs the value of a tensor while being traced" + (", for a shape" if of_shape else "")
            asks = asking_frame()
            place = (asks.f_code.co_filename, asks.f_lineno) if asks is not None else ("", 0)
            where = self.here(*([f"asked by {line(place)}"] if is_pytorchs(place[0]) else []))
            instead = _SHAPE if of_shape else _VALUE_IN_UPDATE if self.owner == "optimizer" else _VALUE
            raise TraceError(message(self.owner, f"{text} ({func})", where, _INSTEAD.get(func, instead))) from error
        except Exception as error:
            note(self, error, func, (args, kwargs))
            raise
        if not _is_dense(out):
            text = f"makes a tensor that is not dense ({func})"
            raise TraceError(
                message(self.owner, text, self.here(), "keep to dense tensors, and to dense gradients: sparse=False")
            )
        if func in _SAME_VALUE:
            self._nodes[id(out)] = node_args[0]
            self._alive.append(out)
            return out
        if func._schema.is_mutable:
            self._write(overwrites.overwritten(func, args, kwargs))
        node = self.graph.call_function(func, node_args, node_kwargs)
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

    def _do(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes down an operation that stands for another, or for a part of it."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _answer(self, func: Any, args: Any, node_args: Any, node_kwargs: Any) -> Any:
        """The answer to a question about values, where these are known, or decide whether the function raises and
        nothing else. None: it cannot be said."""

        def known(op: Any, *nodes: Any, **kwargs: Any) -> Any:
            try:
                return self._known.compute(op, nodes, kwargs)
            except Unknown:
                return None

        found = known(func, *node_args, **node_kwargs)
        if found is not None:
            return tree.map(lambda x: self._constant_like(x, args) if isinstance(x, torch.Tensor) else x, found)
        if func is aten.masked_select.default:
            shape = list(torch.broadcast_shapes(args[0].shape, args[1].shape))
            func, args = (
                aten.index.Tensor,
                (self._do(aten.expand.default, args[0], shape), [self._do(aten.expand.default, args[1], shape)]),
            )
            node_args = self._nodes_in(args)
        if func is aten.index.Tensor:
            places: list[Any] = []
            for index, node in zip(args[1], node_args[1], strict=True):
                mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                at = known(aten.nonzero.default, node) if mask else None
                if mask and at is None:
                    return None
                with compat.no_modes():
                    columns = [] if at is None else [x.contiguous() for x in at.unbind(1)]
                places += [self._constant_like(x, args) for x in columns] if mask else [index]
            return self._do(func, args[0], places)
        if func is aten._local_scalar_dense.default and (passes := checks.passing(asking_frame())) is not None:
            if compat.backward_of() is None:  # else it was noted when the forward ran
                checks.note(self._do(aten.eq.Scalar if passes else aten.ne.Scalar, args[0], 0))
            return passes
        return None

    def _constant_like(self, value: torch.Tensor, args: Any) -> torch.Tensor:
        """A literal of a value that was computed, as a fake tensor where the arguments are."""
        like = next(x for x in tree.leaves(args) if isinstance(x, torch.Tensor))
        out = compat.new_fake(
            like.fake_mode,  # type: ignore[attr-defined]
            value.shape,
            value.dtype,
            like.device,
            value.stride(),
        )
        self._literal(value, out)
        return out

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
                fine = self._do(aten.eq.Scalar, info, 0)
                fine = self._do(aten.view.default, fine, [*info.shape, *[1] * (x.dim() - info.dim())])
                nan = self._do(aten.full.default, [], math.nan, dtype=x.dtype, device=x.device)
                replaced[node] = self.node(self._do(aten.where.self, fine, x, nan))
        self._nodes.update({key: replaced[node] for key, node in of_call.items() if node in replaced})

    def _write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remembers that these are overwritten."""
        self.mutates = True
        if compat.backward_of() is None:
            self.in_place.update(dict.fromkeys(self.here()))
        for tensor in tensors:
            written = _storage(tensor)
            for storage, block in self._shared.get(written, {written: ""}).items():
                if storage in self._storages:
                    self.written.setdefault(self._storages[storage], self.where())
                if storage != written:
                    self._stale.setdefault(storage, (block, self.where()))

    def _overwrite(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Writes down `old.copy_(new)`, of which autograd, like PyTorch's, knows nothing."""
        self._write([old])
        self.track(old, self.graph.call_function(aten.copy_.default, (self.node(old), self.node(new))))

    def _nodes_in(self, value: Any) -> Any:
        """Arguments with tensors replaced by their nodes."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._nodes_in(v) for v in value)
        if isinstance(value, dict):
            return {k: self._nodes_in(v) for k, v in value.items()}
        return value

    def _literal(self, value: torch.Tensor, out: torch.Tensor) -> None:
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector, for work that only makes things: it would go through all of torch's
    objects, 0.3 s each time, to free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _check_dtypes(func: Any, args: Any) -> None:
    """Raises what the devices raise of products of matrices of two dtypes, and fake tensors do not."""
    dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor)} if func in _PRODUCTS else ()
    if len(dtypes) > 1:
        raise RuntimeError(f"expected operands of one dtype, but got {' and '.join(sorted(str(d) for d in dtypes))}")


_PRODUCTS = {
    getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
}


def _is_dense(result: Any) -> bool:
    return all(
        not isinstance(x, torch.Tensor) or x.layout is torch.strided
        for x in (result if isinstance(result, (tuple, list)) else (result,))
    )


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws from the global generator. Attention and layers of RNNs are tagged so whatever their
    dropout, and what draws in training alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = (
        {a.name: a.default_value for a in func._schema.arguments}
        | {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}
        | dict(kwargs)
    )
    in_training = given.get("train", given.get("training")) is not False
    return in_training and given.get("dropout_p", given.get("dropout")) != 0.0


def record(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    owner: str,
    names: Sequence[str],
    source: Any = None,
    labels: Sequence[str | None] = (),
    trained: Collection[int] | None = None,
) -> Recorded:
    """The graph of a function of a flat list of fake tensors that returns a flat list of tensors.

    The graph is functional: in-place operations on values made inside are rewritten, in-place operations on the
    arguments are an error that names them, by `labels` where those differ from the names in the graph. `trained`: of a
    block, which inputs require gradients.
    """
    recorder = Recorder(owner, source)
    for i, (tensor, name) in enumerate(zip(inputs, names, strict=True)):
        recorder.input(tensor, name, labels[i] if i < len(labels) else None)
    with recorder.recording():
        outputs = fn(*(inputs if trained is None else recorder.arguments(trained)))
    recorded = recorder.finish_pure(outputs)
    merge_equal(recorded.graph)
    recorded.graph.eliminate_dead_code()
    return recorded


# --- without in-place operations ---

torch.library.define("fzero::recorded_call", "(Tensor[] xs, int index) -> Tensor[]")
_CALL = torch.ops.fzero.recorded_call.default


def functional(graph: Recorded, owner: str) -> Recorded:
    """The same function without in-place operations, recorded under the mode of its fake tensors: what reads a tensor
    after it was overwritten reads the new value. A call of a block stays one node; it reads what its arguments were
    when it was called, and so does its vjp."""
    inputs, names = graph.inputs, list(graph.constants)
    again = _Again(owner, graph)
    for node in inputs:
        again.input(node.meta["val"], str(node.target)).meta.update(node.meta)
    literals = [
        compat.new_fake(inputs[0].meta["val"].fake_mode, x.shape, x.dtype, x.device, x.stride())
        for x in graph.constants.values()
    ]
    for name, literal in zip(names, literals, strict=True):
        again.constant(name, graph.constants[name], literal)

    def run(*xs: torch.Tensor) -> Any:
        return _Calls(graph, again.calls, dict(zip(names, xs[len(inputs) :], strict=True))).run(*xs[: len(inputs)])

    with torch.no_grad(), without_autocast(), again:
        outputs = compat.functionalized(run, [*(n.meta["val"] for n in inputs), *literals])
    return again.finish(outputs)


AGAIN: Mapping[Any, Callable[..., Any]] = {aten.view.default: torch.reshape, aten._unsafe_view.default: torch.reshape}
"""What a graph calls instead when it is run again: there a result may have other strides than the one that was traced,
and no view be had of it."""


class _Calls(fx.Interpreter):
    """Runs a recorded graph with its calls of blocks as calls of one operator, which writes nothing and returns no
    view."""

    def __init__(self, graph: Recorded, calls: list[fx.Node], literals: dict[str, torch.Tensor]):
        super().__init__(torch.nn.Module(), graph=graph.graph)
        self._of, self._literals = calls, literals

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._literals[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(AGAIN.get(target, target), args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or compat.is_operator(n.target) or n.target is operator.getitem:
            return super().run_node(n)
        (_, _, *xs), _ = self.fetch_args_kwargs_from_env(n)
        return _CALL(xs, self._of.index(n))


class _Again(Recorder):
    def __init__(self, owner: str, graph: Recorded):
        super().__init__(owner)
        self.calls = [
            n
            for n in graph.graph.nodes
            if n.op == "call_function" and not (compat.is_operator(n.target) or n.target is operator.getitem)
        ]
        self._inputs: dict[int, tuple[fx.Node, ...]] = {}  # of each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _CALL:
            return super().__torch_dispatch__(func, types, args, kwargs)
        xs, index = args
        node = self.calls[index]
        joint, call, *_ = node.args
        given = tuple(map(self.node, xs))
        before = self._inputs.setdefault(call, given)
        values = [n.meta["val"] for n in sorted(node.users, key=lambda n: n.args[1])]
        outputs = [compat.new_fake(v.fake_mode, v.shape, v.dtype, v.device, v.stride()) for v in values]
        self.call(node.target, (joint, call, *before, *given[len(before) :]), outputs)
        return outputs
