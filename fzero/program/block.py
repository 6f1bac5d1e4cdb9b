"""Blocks: the unit of gathering, rematerialisation and compilation.

`block(fn)` is `fn`, except while a step is traced: there a call is one line of the program, and the function itself is
traced once per signature, forward and backward together, aside. So the program of a 64-layer model has a few hundred
lines and is traced as fast as that of a 4-layer model. Nested blocks, and blocks under a torch.func transform of the
user's own (`vmap`, an inner `grad`), are inlined.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fzero import compat, tree
from fzero.errors import TraceError, message
from fzero.program.names import Names
from fzero.program.record import Recorded, Recorder, record


def call_block(joint: Joint, call: int, *inputs: torch.Tensor) -> Any:
    """What a block's forward is in a recorded graph. Never run: lowering turns it into a line."""
    raise AssertionError("a recorded block call is not executable")


def call_vjp(joint: Joint, call: int, *inputs_and_tangents: torch.Tensor) -> Any:
    """What a block's backward is in a recorded graph: the gradients of `joint.diff` given inputs and tangents."""
    raise AssertionError("a recorded block call is not executable")


@dataclass(frozen=True, eq=False)
class Joint:
    """One distinct block: its forward and backward in one graph.

    The graph maps `primals_1 ... tangents_1 ...` to the outputs followed by the gradients of the inputs in `diff`.
    """

    name: str
    graph: Recorded
    num_params: int  # the first inputs are parameters
    num_inputs: int
    num_outputs: int
    diff: tuple[int, ...]  # inputs that get a gradient
    diff_outputs: tuple[int, ...]  # outputs that have a tangent
    structure: tree.TreeSpec  # of what the function returns


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a pure function `(params, *args) -> outputs` as a block.

    Called outside a trace it is `fn`. In a trace a call is one line: its parameters are gathered together right before
    it and dropped right after, it is rematerialised as a whole and compiled once however often it is called.

    Args:
        fn: a pure function of a pytree of parameters and of any further pytrees of tensors. Arguments that are not tensors
            (numbers, strings, dtypes) are constants of the signature. Returns a pytree of tensors.

    Communication: with `shard_params`, one all_gather of the block's parameters in the forward, one in the backward, and
        one reduce_scatter of their gradients.

    Raises:
        TraceError: while tracing, if it changes an argument in place, returns something other than tensors, reads a tensor
            from its closure or draws from torch's global generator.

    Example:
        >>> import torch
        >>> @block
        ... def linear(p, x):
        ...     return x @ p["w"]
        >>> linear({"w": torch.ones(2, 3)}, torch.ones(1, 2))
        tensor([[2., 2., 2.]])
    """

    @functools.wraps(fn)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _tracer.get()
        if tracer is None or compat.functorch_active() or compat.forward_ad_active():
            args, kwargs = _entering(params, args, kwargs)
            return fn(params, *args, **kwargs)
        return tracer.call(fn, params, args, kwargs)

    return call


class Blocks:
    """The distinct blocks met during one trace, and the stamping of their calls into the recorder's graph.

    With `casts` a block's floating-point arguments are cast to the dtype of its parameters where it begins, if these have one dtype.
    With `watch` it has one output more, the largest absolute value among the others: `maxima` has that of each call, float32[].
    """

    def __init__(self, recorder: Recorder, mode: compat.FakeTensorMode, casts: bool = False, watch: bool = False):
        self.joints: dict[Hashable, Joint] = {}
        self.maxima: list[torch.Tensor] = []
        self._recorder, self._mode, self._casts, self._watch, self._calls = recorder, mode, casts, watch, 0
        self._names = Names()

    @contextmanager
    def active(self) -> Iterator[None]:
        token, casting = _tracer.set(self), _casting.set(self._casts)
        try:
            yield
        finally:
            _tracer.reset(token)
            _casting.reset(casting)

    def call(self, fn: Callable[..., Any], params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, spec = tree.flatten((params, args, kwargs))
        num_params = len(tree.leaves(params))
        owner = f"block {_name(fn)}"
        constants = [None if isinstance(x, torch.Tensor) else x for x in flat]
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        wrong = [p for p, x in zip(tree.paths(params, "params"), flat, strict=False) if not isinstance(x, torch.Tensor)]
        wrong += [f"argument of type {type(x).__name__}" for x in constants if x is not None and not isinstance(x, Hashable)]
        if wrong:
            raise TraceError(message(owner, "takes tensors and hashable constants", wrong, "make parameters tensors; pass settings as numbers or strings"))
        grad = torch.is_grad_enabled()
        signature = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad and grad) for t in tensors)
        key = (_identity(fn), spec, tuple((type(c), c) for c in constants), signature)
        joint = self.joints.get(key)
        if joint is None:
            name = self._names(_name(fn))
            with compat.no_modes(), torch.enable_grad() if grad else torch.no_grad():
                joint = _trace(fn, name, spec, constants, tensors, num_params, self._mode, signature, self._labels(fn, params, args, kwargs), self._watch)
            self.joints[key] = joint
        call, self._calls = self._calls, self._calls + 1
        outputs = _Call.apply(self._recorder, joint, call, *tensors)
        if self._watch:
            *outputs, largest = outputs
            self.maxima.append(largest)
        return tree.unflatten(joint.structure, outputs)

    def _labels(self, fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """What the block itself calls each tensor it is given, and which leaf that is: `p['w'] = params['blocks'][0]['w']`, `x`."""
        try:
            names = list(inspect.signature(fn).parameters)
        except (TypeError, ValueError):
            names = []
        trees = [(names[i] if i < len(names) else f"argument {i}", x) for i, x in enumerate((params, *args))] + sorted(kwargs.items())
        own = [(p, leaf) for name, x in trees for p, leaf in zip(tree.paths(x, name), tree.leaves(x), strict=True) if isinstance(leaf, torch.Tensor)]
        leaves = [self._recorder.named(leaf) for _, leaf in own]
        return [path if leaf in (None, path) else f"{path} = {leaf}" for (path, _), leaf in zip(own, leaves, strict=True)]


class _Call(torch.autograd.Function):
    """Ties a block's line into autograd, so that its vjp becomes a line of the backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, joint: Joint, call: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recorder, ctx.joint, ctx.call = recorder, joint, call
        ctx.inputs = [recorder.node(x) for x in inputs]
        outputs = _fresh(joint.graph.outputs[: joint.num_outputs])
        recorder.call(call_block, (joint, call, *ctx.inputs), outputs)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in joint.diff_outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        joint, recorder = ctx.joint, ctx.recorder
        grads = _fresh(joint.graph.outputs[joint.num_outputs :])
        seeds = [recorder.node(tangents[i]) for i in joint.diff_outputs]
        recorder.call(call_vjp, (joint, ctx.call, *ctx.inputs, *seeds), grads)
        out: list[torch.Tensor | None] = [None] * joint.num_inputs
        for i, g in zip(joint.diff, grads, strict=True):
            out[i] = g
        return None, None, None, *out


def _fresh(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    values = [n.meta["val"] for n in nodes]
    return [compat.new_fake(v.fake_mode, v.shape, v.dtype, v.device, v.stride()) for v in values]


def _trace(
    fn: Callable[..., Any],
    name: str,
    spec: tree.TreeSpec,
    constants: list[Any],
    tensors: list[torch.Tensor],
    num_params: int,
    mode: compat.FakeTensorMode,
    signature: tuple[Any, ...],
    labels: Sequence[str],
    watch: bool,
) -> Joint:
    """Traces one distinct block on fresh fakes: outside the outer trace, and with no tracer active, so that blocks inside are inlined."""
    owner = f"block {name}"
    made: dict[str, Any] = {}
    token = _tracer.set(None)

    def run(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        it = iter(xs)
        params, args, kwargs = tree.unflatten(spec, [next(it) if c is None else c for c in constants])
        args, kwargs = _entering(params, args, kwargs)
        result = fn(params, *args, **kwargs)
        flat, made["structure"] = tree.flatten(result)
        wrong = [f"{p} is {type(x).__name__}" for p, x in zip(tree.paths(result, "result"), flat, strict=True) if not isinstance(x, torch.Tensor)]
        if wrong or not flat:
            raise TraceError(message(owner, "returns something other than tensors", wrong or ["no tensor at all"], "return a pytree of tensors"))
        return [*flat, _largest(flat)] if watch else flat

    try:
        with mode:
            primals = [torch.empty_strided(s, st, dtype=d, device=t.device) for (s, st, d, _), t in zip(signature, tensors, strict=True)]
            needs = [i for i, (*_, grad) in enumerate(signature) if grad]
            names = [f"primals_{i + 1}" for i in range(len(primals))]

            def forward(*xs: torch.Tensor) -> list[torch.Tensor]:
                leaves = [x.detach().requires_grad_(i in needs) for i, x in enumerate(xs)]
                made["inputs"], ys = leaves, run(leaves)
                made["diff_outputs"] = tuple(i for i, y in enumerate(ys) if y.requires_grad)
                made["outputs"] = [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) for y in ys]
                return ys

            graph = record(forward, primals, owner=owner, names=names, source=fn, labels=labels)
            diff: tuple[int, ...] = ()
            if made["diff_outputs"]:
                tangents = [made["outputs"][i] for i in made["diff_outputs"]]

                def joint(*args: torch.Tensor) -> list[torch.Tensor]:
                    ys = forward(*args[: len(primals)])
                    xs = made["inputs"]
                    grads = torch.autograd.grad([ys[i] for i in made["diff_outputs"]], [xs[i] for i in needs], list(args[len(primals) :]), allow_unused=True)
                    made["diff"] = tuple(i for i, g in zip(needs, grads, strict=True) if g is not None)
                    return [*ys, *(g for g in grads if g is not None)]

                names += [f"tangents_{i + 1}" for i in range(len(tangents))]
                graph = record(joint, [*primals, *tangents], owner=owner, names=names, source=fn, labels=labels)
                diff = made["diff"]
        count = sum(c is None for c in constants[:num_params])
        return Joint(name, graph, count, len(primals), len(made["outputs"]), diff, made["diff_outputs"] if diff else (), made["structure"])
    finally:
        _tracer.reset(token)


def _largest(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of floating-point tensors, float32[]: inf if one is nan, 0 if there is none."""
    ends = [torch.linalg.vector_norm(x.detach(), math.inf).to(torch.float32) for x in values if x.is_floating_point() and x.numel()]
    largest = functools.reduce(torch.maximum, ends, torch.zeros((), device=values[0].device))
    return torch.where(largest.isnan(), math.inf, largest)


def _entering(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments as a block computes with them."""
    dtypes = {x.dtype for x in tree.leaves(params) if isinstance(x, torch.Tensor) and x.is_floating_point()} if _casting.get() else ()
    if len(dtypes) != 1:
        return args, kwargs
    (dtype,) = dtypes
    return tree.map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs))


def _name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def _identity(fn: Any) -> Hashable:
    """What makes two functions the same block: the same code with the same constants, however often it is redefined in a loop."""
    if isinstance(fn, functools.partial):
        return ("partial", _identity(fn.func), _constants(fn.args), _constants(tuple(sorted(fn.keywords.items()))))
    code = getattr(fn, "__code__", None)
    if code is None:
        return _Same(fn)
    cells = tuple(c.cell_contents for c in fn.__closure__ or ())
    own = getattr(fn, "__self__", None)  # of a method
    return (code, _constants((own, *cells)), _constants(fn.__defaults__ or ()), _constants(tuple(sorted((fn.__kwdefaults__ or {}).items()))))


@dataclass(frozen=True, eq=False)
class _Same:
    """A value that equals itself alone, kept alive so that no later one can have its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _constants(values: Any) -> Hashable:
    """Values by what they are: containers by their items now, for they may change; what has no hash by identity."""
    if isinstance(values, dict):
        return (dict, tuple((_constants(k), _constants(v)) for k, v in values.items()))
    if isinstance(values, (tuple, list)):
        return (type(values), tuple(map(_constants, values)))
    return (type(values), values) if isinstance(values, Hashable) and not isinstance(values, torch.Tensor) else _Same(values)


_tracer: ContextVar[Blocks | None] = ContextVar("fzero_blocks", default=None)
_casting: ContextVar[bool] = ContextVar("fzero_casting", default=False)
