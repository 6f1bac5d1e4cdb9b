"""Recording: running a function on fake tensors and writing down every ATen operation it does.

`Recorder` sits below autograd, so what it writes down is the forward and the backward alike, in the order they run. It
knows tensors by identity: a tensor it has not seen is one that the function got from somewhere other than its arguments,
which is an error, for a program is a function of its arguments alone. It must not know what the graph is for.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from fzero import compat, tree
from fzero.errors import TraceError, message
from fzero.program.ambient import without_autocast
from fzero.program.results import Results
from fzero.program.settings import exact

aten = torch.ops.aten

_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Operations that return their argument: no line of a program."""
_DEVICE = torch.ops.prim.device.default


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

    def __init__(self, owner: str, constants_from: Callable[..., Any] | None = None):
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.mutates = False
        self._owner = owner
        self._source = constants_from
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids are only good while the tensor lives
        self._results = Results()
        self._dtype = torch.get_default_dtype()

    def input(self, tensor: torch.Tensor, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        self.track(tensor, node)
        return node

    def constant(self, name: str, value: torch.Tensor, tensor: torch.Tensor) -> None:
        """`tensor` stands for a literal of the function."""
        self.constants[name] = value
        self.track(tensor, self.graph.create_node("get_attr", name))

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From here on `tensor` is the value of `node`."""
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        found = self._nodes.get(id(tensor))
        if found is None:
            raise TraceError(
                message(
                    self._owner,
                    "reads a tensor that is not one of its arguments",
                    [f"{self._where(tensor)}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"],
                    "pass it in: as a parameter if it is trained or checkpointed, as part of the batch, or make it inside the function",
                )
            )
        return found

    def call(self, target: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> fx.Node:
        """Writes down a call with several outputs."""
        node = self.graph.call_function(target, args)
        for i, out in enumerate(outputs):
            self.track(out, self.graph.call_function(operator.getitem, (node, i)))
        return node

    def check_default_dtype(self) -> None:
        """Raises if it is another than at the beginning: when the program runs, one holds for all of it."""
        if torch.get_default_dtype() is not self._dtype:
            what = f"changes torch's default dtype from {self._dtype} to {torch.get_default_dtype()}"
            raise TraceError(message(self._owner, what, fix="give the operations that need another their dtype, e.g. torch.full(..., dtype=torch.float64)"))

    def finish(self, outputs: Sequence[torch.Tensor]) -> Recorded:
        """The recorded function, with these results."""
        self.graph.output(tuple(self.node(t) for t in outputs))
        return Recorded(self.graph, self.constants)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # autograd asks a leaf for its device where nothing may be raised
            return func(*args, **kwargs)
        self.check_default_dtype()
        if compat.fx_tracing():
            fix = "use torch.func.jvp, which computes the same, in place of torch.func.linearize"
            raise TraceError(message(self._owner, f"traces a function by torch.fx while being traced ({func})", fix=fix))
        if _draws(func, args, kwargs):
            raise TraceError(
                message(
                    self._owner,
                    f"draws from torch's global generator ({func})",
                    fix="use fz.random (normal, uniform, bernoulli, dropout) with a key: its draws are the same on every mesh and when recomputed",
                )
            )
        if func is aten.lift_fresh.default and id(args[0]) not in self._nodes:  # torch.tensor(...): a literal
            out = func(*args, **kwargs)
            self._literal(args[0], out)
            return out
        node_args, node_kwargs = self._nodes_in((args, kwargs))
        try:
            out = self._results(func, args, kwargs)
        except compat.DATA_DEPENDENT as error:
            raise TraceError(
                message(
                    self._owner,
                    f"needs the value of a tensor while being traced ({func})",
                    fix="choose with torch.where or arithmetic instead of .item(), bool() or Python's if on tensors",
                )
            ) from error
        if func in _SAME_VALUE:
            self._nodes[id(out)] = node_args[0]
            self._alive.append(out)
            return out
        if func._schema.is_mutable:
            self.mutates = True
        node = self.graph.call_function(func, node_args, node_kwargs)
        if isinstance(out, torch.Tensor):
            self.track(out, node)
        elif isinstance(out, (tuple, list)):
            node.meta["val"] = out
            for i, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.track(item, self.graph.call_function(operator.getitem, (node, i)))
        return out

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
            scalar = getattr(out, "constant", None)
            scalar = (scalar if scalar is not None else value).reshape(()).item()
            self.track(out, self.graph.call_function(aten.full.default, (list(value.shape), scalar), {"dtype": value.dtype, "device": value.device}))
            return
        name = f"literal_{len(self.constants)}"
        with compat.no_modes():  # a real copy, not one of the mode that traces
            copy = value.clone()
        self.constant(name, copy, out)

    def _where(self, tensor: torch.Tensor) -> str:
        """The name under which the traced function reaches a tensor that is not its argument, as far as it can be found."""
        found = _reached(self._source, tensor, set())
        return found or "a tensor from its closure"


def _reached(fn: Any, tensor: torch.Tensor, seen: set[int]) -> str | None:
    """How a function reaches a tensor other than as an argument: through its closure, globals, defaults, or functions that it calls."""
    if id(fn) in seen:
        return None
    seen.add(id(fn))
    ways: list[tuple[str, Any]] = []
    if isinstance(fn, functools.partial):
        ways += [(f"argument {i} of the partial", v) for i, v in enumerate(fn.args)] + [(f"keyword {k} of the partial", v) for k, v in fn.keywords.items()]
        ways.append(("", fn.func))
    if hasattr(fn, "__wrapped__"):
        ways.append(("", fn.__wrapped__))  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(fn, "__self__"):
        ways.append(("self", fn.__self__))  # pyright: ignore[reportAttributeAccessIssue]
    code = getattr(fn, "__code__", None)
    if code is not None:
        variables = inspect.getclosurevars(getattr(fn, "__func__", fn))
        ways += [(f"closure variable {k}", v) for k, v in variables.nonlocals.items()]
        ways += [(f"global variable {k}", v) for k, v in variables.globals.items()]
        ways += [(f"default of {k}", p.default) for k, p in inspect.signature(fn, follow_wrapped=False).parameters.items()]
    for name, value in ways:
        for path, x in _tensors(value):
            if x is tensor:
                return name + path
    for _, value in ways:
        if callable(value) and (hasattr(value, "__code__") or isinstance(value, functools.partial)):
            inner = _reached(value, tensor, seen)
            if inner:
                of = getattr(value, "__name__", "a function")
                return inner if of == getattr(fn, "__name__", "") else f"{inner} of {of}"
    return None


def _tensors(value: Any) -> list[tuple[str, Any]]:
    """The tensors a variable holds: itself, leaves of a tree, attributes of an object."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, torch.nn.Module):
        return [(f".{n}", x) for n, x in (*value.named_parameters(), *value.named_buffers())]
    if isinstance(value, (dict, list, tuple)):
        return list(zip(tree.paths(value), tree.leaves(value), strict=True))
    if isinstance(value, type(torch)) or not hasattr(value, "__dict__"):
        return []
    return [(f".{n}", x) for n, x in vars(value).items() if isinstance(x, torch.Tensor)]


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector, for work that only makes things: it would go through all of torch's objects, 0.3 s each time, to free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def plainly(owner: str) -> Iterator[None]:
    """Says in this house's words what torch says of a function that is not pure, or not deterministic: the function's own line, and a way out."""
    try:
        yield
    except RuntimeError as error:
        rule = next((rule for text, *rule in _REFUSED if text in str(error)), None)
        if rule is None:
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(f"/{package}/" in f.filename for package in ("torch", "fzero"))]
        where = [f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"] if frames else []
        raise TraceError(message(owner, rule[0], where, rule[1])) from error


_IN_PLACE = ("changes an argument in place", "return the new value instead (x = x + y for x += y)")
_REFUSED = [
    ("leaf Variable that requires grad is being used in an in-place", *_IN_PLACE),
    ("mutate a captured Tensor", *_IN_PLACE),
    (".numpy() is not supported for tensor subclasses", "needs the value of a tensor while being traced (.numpy())", "keep to torch operations"),
    (
        "does not have a deterministic implementation",
        "does what PyTorch has no deterministic algorithm for, and torch.use_deterministic_algorithms(True) asks for one",
        "compute it by other operations, or allow it: torch.use_deterministic_algorithms(True, warn_only=True)",
    ),
]
"""What torch says, what it means, and the fix."""


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws from the global generator. Attention is tagged so whatever its dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    return given.get("dropout_p", defaults.get("dropout_p")) != 0.0


def record(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], *, owner: str, names: Sequence[str], source: Any = None, labels: Sequence[str] = ()
) -> Recorded:
    """The graph of a function of a flat list of fake tensors that returns a flat list of tensors.

    The graph is functional: in-place operations on values made inside are rewritten, in-place operations on the
    arguments are an error that names them, by `labels` where those differ from the names in the graph.
    """
    versions = [x._version for x in inputs]
    recorded, mutates = _record(fn, inputs, owner, names, source)
    changed = [n for x, n, before in zip(inputs, labels or names, versions, strict=False) if x._version != before]
    if changed:
        raise TraceError(message(owner, "changes its arguments in place", changed, "return the new value instead (x = x + y for x += y)"))
    if mutates:
        recorded = functional(recorded, owner)
    merge_equal(recorded.graph)
    recorded.graph.eliminate_dead_code()
    return recorded


def merge_equal(graph: fx.Graph, groups: Mapping[fx.Node, Any] | None = None) -> None:
    """Makes one of operations that compute the same value: the norm of the gradients, say, that is both clipped by and reported. With `groups` only of
    operations in one group."""
    seen: dict[Any, fx.Node] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return (type(value), *map(plain, value))
        if isinstance(value, dict):
            return tuple(sorted((k, plain(v)) for k, v in value.items()))
        return exact(value)

    for node in list(graph.nodes):
        if node.op != "call_function" or (not compat.is_operator(node.target) and node.target is not operator.getitem):
            continue
        if groups is not None and node not in groups:
            continue
        key = (groups and groups[node], node.target, plain(node.args), plain(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _record(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], owner: str, names: Sequence[str], source: Any) -> tuple[Recorded, bool]:
    recorder = Recorder(owner, source)
    for tensor, name in zip(inputs, names, strict=True):
        recorder.input(tensor, name)
    with torch.autograd.set_multithreading_enabled(False), plainly(owner), recorder:
        outputs = fn(*inputs)
    return recorder.finish(outputs), recorder.mutates


# --- without in-place operations ---

torch.library.define("fzero::recorded_call", "(Tensor[] xs, int index) -> Tensor[]")
_CALL = torch.ops.fzero.recorded_call.default


def functional(graph: Recorded, owner: str) -> Recorded:
    """The same function without in-place operations, recorded under the mode of its fake tensors: what reads a tensor after it was overwritten reads the new
    value. A call of a block stays one node; it reads what its arguments were when it was called, and so does its vjp."""
    inputs, names = graph.inputs, list(graph.constants)
    again = _Again(owner, graph)
    for node in inputs:
        again.input(node.meta["val"], str(node.target)).meta.update(node.meta)
    literals = [compat.new_fake(inputs[0].meta["val"].fake_mode, x.shape, x.dtype, x.device, x.stride()) for x in graph.constants.values()]
    for name, literal in zip(names, literals, strict=True):
        again.constant(name, graph.constants[name], literal)

    def run(*xs: torch.Tensor) -> Any:
        return _Calls(graph, again.calls, dict(zip(names, xs[len(inputs) :], strict=True))).run(*xs[: len(inputs)])

    with torch.no_grad(), without_autocast(), again:
        outputs = torch.func.functionalize(run)(*(n.meta["val"] for n in inputs), *literals)
    return again.finish(outputs)


class _Calls(fx.Interpreter):
    """Runs a recorded graph with its calls of blocks as calls of one operator, which writes nothing and returns no view."""

    def __init__(self, graph: Recorded, calls: list[fx.Node], literals: dict[str, torch.Tensor]):
        super().__init__(torch.nn.Module(), graph=graph.graph)
        self._of, self._literals = calls, literals

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._literals[target]

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or compat.is_operator(n.target) or n.target is operator.getitem:
            return super().run_node(n)
        (_, _, *xs), _ = self.fetch_args_kwargs_from_env(n)
        return _CALL(xs, self._of.index(n))


class _Again(Recorder):
    def __init__(self, owner: str, graph: Recorded):
        super().__init__(owner)
        self.calls = [n for n in graph.graph.nodes if n.op == "call_function" and not (compat.is_operator(n.target) or n.target is operator.getitem)]
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
