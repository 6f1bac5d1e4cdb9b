"""Traces blocks, the unit of gathering, rematerialisation and compilation.

`block(fn)` is `fn`, except while a step is traced: there a call is one line of the program, and the function itself is
traced once per signature, forward and backward together, aside. So the program of a 64-layer model has a few hundred
lines and is traced as fast as that of a 4-layer model. Nested blocks, blocks under a torch.func transform of the user's
own (`vmap`, an inner `grad`) or under forward-mode AD, and backwards that are differentiated themselves are inlined.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.autograd.graph import saved_tensors_hooks

from fzero import compat, tree
from fzero.arguments import function
from fzero.errors import FzeroTypeError, TraceError, message
from fzero.trace import checks
from fzero.trace.functional import functional
from fzero.trace.merge_equal import merge_equal
from fzero.trace.record import record
from fzero.trace.recorder import Recorded, Recorder
from fzero.trace.settings import Settings, changes, settings
from fzero.trace.subgraph import Part
from fzero.trace.subgraph import signature as function_signature
from fzero.trace.switches import (
    Autocast,
    autocast,
    autocast_as,
    dispatch_modes,
    function_modes,
    saved_tensor_hooks,
    switches,
    told,
    without_autocast,
)
from fzero.trace.untouched import without_gradients


def call_block(joint: Joint, call: int, *inputs: torch.Tensor) -> Any:
    """The node of a block's forward in a recorded graph. Never run: lowering turns it into a line."""
    raise AssertionError("a recorded block call is not executable")


def call_vjp(joint: Joint, call: int, *inputs_and_tangents: torch.Tensor) -> Any:
    """The node of a block's backward in a recorded graph: the gradients of `joint.diff` given inputs and tangents."""
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
    returned: tuple[int, ...]  # its leaves: each is one of the inputs, or else of the outputs, counted on
    # of inputs and outputs: the first of them with the same memory, where the function runs as it is written
    memory: tuple[int, ...]


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a pure function `(params, *args) -> outputs` as a block.

    Called outside a trace it is `fn`. In a trace a call is one line: its parameters are gathered together right before
    it and dropped right after, it is rematerialised as a whole and compiled once however often it is called.

    Args:
        fn: a pure function of a pytree of parameters and of any further pytrees of tensors. Arguments that are not
            tensors (numbers, strings, dtypes) are constants of the signature. Returns a pytree of tensors: a result is
            a value of the program, a number or a text is none.

    Two calls are one traced function if their arguments have the same shapes, strides and dtypes, and all that the
    function reads beside them is the same: its code and that of functions it calls, closure cells, globals, defaults,
    attributes of objects, classes and modules that this code names, the environment; autocast, modes of the user's own
    and PyTorch's other settings (trace/settings.py, trace/switches.py). What is not seen, where it changes between two
    calls in one step: globals of installed libraries, the insides of C extensions, files, names that code puts together
    (`eval`), tensors written through NumPy, arrays of more than 4 MiB changed in place; `fz.testing.check_equivalent`
    traces every call and finds those. A function that does something else each time (`next(iterator)`,
    `random.random()`) is an error.

    A result that is an argument is the tensor that was given; two arguments that are one tensor are one inside. A
    result may be a view of an argument or of another result. In a program it has memory of its own, so reading one of
    these after another was written in place is an error; so is a block that changes a container it is given, and code
    in it that reads of an argument where it comes from or where it lies (`x.is_leaf`, `x.grad_fn`, `x._version`,
    `x.storage_offset()`, `x.register_hook`): a block is a function of values. For that reason, too, no attribute set on
    a tensor (`x.scale = 2`) may pass its border.

    A condition under which it raises (`assert`, `if bad.any(): raise`) is not known while tracing: where it holds,
    floating-point results are NaN.

    Derivatives of a derivative are right: where `create_graph=True` asks for one, and in forward mode, the block's own
    operations are recorded in its place.

    Communication: with `shard_params`, one all_gather of the block's parameters in the forward, one in the backward,
        and one reduce_scatter of their gradients.

    Raises:
        TraceError: while tracing, if it changes an argument in place (a tensor, a list, a dict), returns something
            other than tensors, reads a tensor from its closure, draws from torch's global generator, computes something
            else each time, asks where an argument comes from or lies, gets or returns a tensor with attributes, changes
            what is read outside of it, is differentiated twice under other settings of PyTorch's than it is called
            under, or is called under a `TorchDispatchMode` or `saved_tensors_hooks` of the user's own.

    Example:
        >>> import torch
        >>> @block
        ... def linear(p, x):
        ...     return x @ p["w"]
        >>> linear({"w": torch.ones(2, 3)}, torch.ones(1, 2))
        tensor([[2., 2., 2.]])
    """

    problems = ["fn is a step"] if hasattr(fn, "transforms") else function("fn", fn, "params", more=True)
    if problems:
        raise FzeroTypeError(
            message(
                "block",
                "takes a function of parameters and more",
                problems,
                "write @fz.block above def layer(params, x): ...",
            )
        )

    @functools.wraps(fn)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _tracer.get()
        if tracer is None or compat.functorch_active() or compat.forward_ad_active():
            return _applied(fn, params, args, kwargs) if _casting.get() else fn(params, *args, **kwargs)
        with tracer.recorder.remembering():
            return tracer.call(fn, params, args, kwargs)

    call.__dict__[_BLOCK] = fn
    return call


_BLOCK = "_fzero_block"


class Blocks:
    """The distinct blocks met during one trace, and the stamping of their calls into the recorder's graph.

    `names` gives each distinct block a name that no other has. With `casts` a block's floating-point arguments are cast
    to the dtype of its parameters where it begins, if these have one dtype. With `watch` it has one output more, the
    largest absolute value among the others: `maxima` has that of each call, float32[].
    """

    def __init__(
        self,
        recorder: Recorder,
        mode: compat.FakeTensorMode,
        names: Callable[[str], str],
        casts: bool = False,
        watch: bool = False,
    ):
        self.joints: dict[Hashable, Joint] = {}
        self.maxima: list[torch.Tensor] = []
        self.recorder, self._mode, self._casts, self._watch, self._calls = recorder, mode, casts, watch, 0
        self._names = names

    @contextmanager
    def active(self) -> Iterator[None]:
        token, casting = _tracer.set(self), _casting.set(self._casts)
        try:
            yield
        finally:
            _tracer.reset(token)
            _casting.reset(casting)

    def call(self, fn: Callable[..., Any], params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.recorder.check_default_dtype()
        flat, spec = tree.flatten((params, args, kwargs))
        num_params = len(tree.leaves(params))
        owner = f"block {_name(fn)}"
        constants = [None if isinstance(x, torch.Tensor) else x for x in flat]
        given = list({id(x): x for x in flat if isinstance(x, torch.Tensor)}.values())
        number = {id(x): i for i, x in enumerate(given)}
        places = [number.get(id(x)) for x in flat]
        tensors = [_resolved(x) for x in given]
        wrong = [
            f"{p}: {type(x).__name__}"
            for p, x in zip(tree.paths(params, "params"), flat, strict=False)
            if not isinstance(x, torch.Tensor)
        ]
        wrong += [
            f"argument of type {type(x).__name__}" for x in constants if x is not None and not isinstance(x, Hashable)
        ]
        if wrong:
            fix = "make parameters tensors; pass settings as numbers or strings"
            if any(isinstance(x, torch.nn.Module) for x in flat):
                fix = (
                    "give the layer's tensors: fz.block(lambda params, x: torch.func.functional_call(layer, params, "
                    "(x,)))"
                )
            raise TraceError(message(owner, "takes tensors and hashable constants", [*_where(fn), *wrong], fix))
        if around := [type(mode).__name__ for mode in dispatch_modes(self.recorder)] + saved_tensor_hooks():
            fix = "enter it inside the block, where what it does is recorded"
            raise TraceError(
                message(
                    owner, "is called under what its operations, which are recorded aside, would not see", around, fix
                )
            )
        if any(map(compat.attributes, given)):
            _check_bare(owner, "is given", fn, _arguments(fn, params, args, kwargs))
        grad = torch.is_grad_enabled()
        signature = tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        body = _Body(fn, owner, spec, constants, places, self._watch, autocast(), switches())

        def key() -> Hashable:
            of_code, of_arguments = (
                settings(fn, *constants, *function_modes()).facts,
                (spec, _orders((params, args, kwargs)), tuple(places), signature),
            )
            return (of_code, of_arguments, grad, body.autocast, body.switches)

        def trace(name: str, outputs: Collection[int] | None = None) -> Joint:
            grads = torch.enable_grad() if grad else torch.no_grad()
            # not those of a checkpoint around the call
            ours = saved_tensors_hooks(_pack, _unpack) if compat.saved_tensor_hooks() else nullcontext()
            with compat.no_modes(), torch.inference_mode(False), grads, ours:
                of_params = len({at for at in places[:num_params] if at is not None})
                return _trace(
                    body, name, of_params, self._mode, signature, self._labels(fn, params, args, kwargs), outputs
                )

        def compare(joint: Joint) -> None:
            if function_signature(trace(joint.name).graph) != function_signature(joint.graph):
                raise TraceError(
                    message(owner, "computes something else than at an earlier call", _where(fn), _OTHERWISE)
                )

        now = key()
        joint = self.joints.get(now)
        if joint is None:
            joint = self.joints[now] = trace(self._names(_name(fn)))
            if key() != now:
                # it changes what it reads while it runs: a counter, a list of what it met, something it keeps for later
                outside = self._read_outside(fn)
                compare(joint)
                if changed := changes(outside, self._read_outside(fn)):
                    fix = (
                        "return it from the block as a result, or change it outside: a block runs once for all its "
                        "calls, while it is traced"
                    )
                    raise TraceError(message(owner, "changes what is read outside of it", [*_where(fn), *changed], fix))
                now = key()
                self.joints[now] = joint
        elif _retracing.get():
            compare(joint)

        def restricted(outputs: tuple[int, ...]) -> Joint:
            """The block whose backward begins at these of its outputs alone: nothing of what makes the others is
            differentiated."""
            if (now, outputs) not in self.joints:
                self.joints[now, outputs] = trace(joint.name, outputs)
            return self.joints[now, outputs]

        call, self._calls = self._calls, self._calls + 1
        with torch.set_grad_enabled(bool(joint.diff)):  # which the function may have asked for itself
            outputs = (
                list(_Call.apply(self.recorder, joint, call, body, restricted, *tensors)) if joint.num_outputs else []
            )
        if self._watch:
            *outputs, largest = outputs
            self.maxima.append(largest)
        values = [*given, *outputs]
        for i, first in enumerate(joint.memory):
            if i >= joint.num_inputs and i != first:
                self.recorder.memory.share([values[first], values[i]], owner)
        return tree.unflatten(joint.structure, [values[i] for i in joint.returned])

    def _read_outside(self, fn: Any) -> Settings:
        """The settings that the traced function reads beside its arguments, outside of blocks."""
        body = fn.func if isinstance(fn, functools.partial) else fn
        owners = [fn, body, getattr(body, "__func__", fn)]
        return settings(
            self.recorder.source,
            strict=False,
            without=lambda x: _BLOCK in getattr(x, "__dict__", ()) or any(x is one for one in owners),
        )

    def _labels(self, fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The block's own name of each tensor it is given, and the leaf that it is: `p['w'] =
        params['blocks'][0]['w']`, `x`."""
        trees = _arguments(fn, params, args, kwargs)
        own = _tensors_in(trees)
        first = {id(leaf): (path, leaf) for path, leaf in reversed(own)}
        leaves = {i: self.recorder.named(leaf) for i, (_, leaf) in first.items()}
        return [
            first[i][0] if leaf in (None, first[i][0]) else f"{first[i][0]} = {leaf}"
            for i in dict.fromkeys(id(x) for _, x in own)
            for leaf in [leaves[i]]
        ]


class _Results(NamedTuple):
    """The results of a block's function: the tensors that it made, and how the tree that it returns is made of them."""

    made: list[torch.Tensor]
    structure: tree.TreeSpec
    returned: tuple[int, ...]  # as in a `Joint`
    memory: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Body:
    """The body of a block as a function of a flat list of tensors, with PyTorch's settings that it runs under. `places`
    has, for each leaf of its arguments, the number of the tensor that it is; where it is None, `constants` has the
    leaf."""

    fn: Callable[..., Any]
    owner: str
    spec: tree.TreeSpec
    constants: Sequence[Any]
    places: Sequence[int | None]
    watch: bool
    autocast: Autocast
    switches: tuple[object, ...]

    def __call__(self, xs: Sequence[torch.Tensor]) -> _Results:
        """The results, blocks inside inlined."""
        token = _tracer.set(None)
        try:
            params, args, kwargs = tree.unflatten(
                self.spec, [c if i is None else xs[i] for c, i in zip(self.constants, self.places, strict=True)]
            )
            trees = _arguments(self.fn, params, args, kwargs)
            with checks.collected() as failed, without_gradients(self.owner, _tensors_in(trees)):
                result = _applied(self.fn, params, args, kwargs)
        finally:
            _tracer.reset(token)
        flat, structure = tree.flatten(result)
        wrong = [
            f"{p} is {type(x).__name__}"
            for p, x in zip(tree.paths(result, "result"), flat, strict=True)
            if not isinstance(x, torch.Tensor)
        ]
        if wrong or not flat:
            found = [*_where(self.fn), *(wrong or ["no tensor at all"])]
            raise TraceError(
                message(self.owner, "returns something other than tensors", found, "return a pytree of tensors")
            )
        _check_bare(self.owner, "leaves behind", self.fn, [*trees, ("result", result)])
        flat = checks.poisoned(flat, failed)
        tensors = list({id(x): x for x in (*xs, *flat)}.values())
        number = {id(x): i for i, x in enumerate(tensors)}
        storages = [x.untyped_storage()._cdata for x in tensors]
        made = [_resolved(x) for x in tensors[len(xs) :]]
        made = [*made, _largest(flat)] if self.watch else made
        return _Results(made, structure, tuple(number[id(x)] for x in flat), tuple(map(storages.index, storages)))


class _Call(torch.autograd.Function):
    """Ties a block's line into autograd, so that its vjp becomes a line of the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        joint: Joint,
        call: int,
        body: _Body,
        restricted: Callable[[tuple[int, ...]], Joint],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.recorder, ctx.joint, ctx.call, ctx.body, ctx.restricted, ctx.differentiated = (
            recorder,
            joint,
            call,
            body,
            restricted,
            False,
        )
        ctx.set_materialize_grads(False)
        ctx.inputs = [recorder.node(x) for x in inputs]
        ctx.save_for_backward(*inputs)
        outputs = _fresh(joint.graph.outputs[: joint.num_outputs])
        ctx.node = recorder.call(call_block, (joint, call, *ctx.inputs), outputs)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in joint.diff_outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        recorder, asked = ctx.recorder, {i: x for i, x in enumerate(tangents) if x is not None}
        given = list(asked.values())
        if not asked:
            return (None,) * (5 + ctx.joint.num_inputs)
        again, ctx.differentiated = ctx.differentiated, True
        if not again and tuple(asked) != ctx.joint.diff_outputs:
            # in PyTorch the others have no backward: zeros in their place may become nan
            ctx.joint = ctx.restricted(tuple(asked))
            ctx.node.update_arg(0, ctx.joint)
        joint = ctx.joint
        # the line that is recorded has no derivative, was recorded without autocast, and is for these outputs
        if torch.is_grad_enabled() or any(autocast().enabled) or tuple(asked) != joint.diff_outputs:
            grads = _inlined_vjp(ctx, asked)
        else:
            grads = _fresh(joint.graph.outputs[joint.num_outputs :])
            places = joint.graph.inputs[joint.num_inputs :]
            seeds = [
                recorder.node(_laid_out_as(place.meta["val"], _resolved(x)))
                for place, x in zip(places, given, strict=True)
            ]
            recorder.call(call_vjp, (joint, ctx.call, *ctx.inputs, *seeds), grads)
        out: list[torch.Tensor | None] = [None] * joint.num_inputs
        for i, g in zip(joint.diff, grads, strict=True):
            out[i] = g
        return None, None, None, None, None, *out


def _inlined_vjp(ctx: Any, tangents: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of a block's inputs by its own operations, done again where the caller is: as differentiable as
    these are."""
    joint, body, now = ctx.joint, ctx.body, told(switches())
    other = [
        f"{name}: {then}, and {now[name]} for the derivative"
        for name, then in told(body.switches).items()
        if then != now[name]
    ]
    if other:
        raise TraceError(
            message(
                body.owner,
                "is differentiated under other settings than it is called under",
                other,
                "ask for both under the same",
            )
        )
    with autocast_as(body.autocast), torch.enable_grad():
        inputs = [x.view_as(x) for x in ctx.saved_tensors]  # one input may be made of another
        outputs = body(inputs).made
    wanted = [outputs[i] for i in tangents]
    create_graph = torch.is_grad_enabled()
    return torch.autograd.grad(
        wanted, [inputs[i] for i in joint.diff], list(tangents.values()), create_graph=create_graph, allow_unused=True
    )


def _of_results(graph: Recorded) -> Any:
    """The operations that make a function's results. An operation without results, such as the checks of torch.linalg,
    is none of that."""
    merge_equal(graph.graph)
    return Part(graph, graph.inputs, graph.outputs).signature


def _resolved(x: torch.Tensor) -> torch.Tensor:
    """A value as what crosses a block's border is recorded: no view that stands for its conjugate or negative."""
    return x.resolve_conj().resolve_neg()


def _laid_out_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` with the strides of `like`, which is dense: a copy where they differ. What is recorded for some strides (a
    view) need not hold for others."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), like.stride(), strict=True)):
        return x
    order = sorted(range(x.dim()), key=like.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def _fresh(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    values = [n.meta["val"] for n in nodes]
    return [compat.new_fake(v.fake_mode, v.shape, v.dtype, v.device, v.stride()) for v in values]


def _trace(
    body: _Body,
    name: str,
    num_params: int,
    mode: compat.FakeTensorMode,
    signature: tuple[Any, ...],
    labels: Sequence[str],
    of: Collection[int] | None = None,
) -> Joint:
    """Traces one distinct block on fresh fakes: outside the outer trace, and with no tracer active, so that blocks
    inside are inlined. `of`: the outputs that it has a backward of; None: all that can have one."""
    found: list[_Results] = []
    diff: tuple[int, ...] = ()
    with mode:
        primals = [torch.empty_strided(s, st, dtype=d, device=at) for s, st, d, at, _ in signature]
        needs = [i for i, (*_, grad) in enumerate(signature) if grad]
        names = [f"primals_{i + 1}" for i in range(len(primals))]

        def forward(*xs: torch.Tensor) -> list[torch.Tensor]:
            found.append(body(xs))
            return found[-1].made

        graph = record(forward, primals, owner=body.owner, names=names, source=body.fn, labels=labels, trained=needs)
        results = found[-1]
        diff_outputs = tuple(i for i, y in enumerate(results.made) if y.requires_grad and (of is None or i in of))
        if diff_outputs:
            tangents = [torch.empty_like(results.made[i]) for i in diff_outputs]  # dense

            def joint(*args: torch.Tensor) -> list[torch.Tensor]:
                nonlocal diff
                ys = forward(*args[: len(primals)])
                with without_autocast():  # as PyTorch advises for any backward
                    wanted = [ys[i] for i in diff_outputs]
                    grads = torch.autograd.grad(
                        wanted, [args[i] for i in needs], list(args[len(primals) :]), allow_unused=True
                    )
                diff = tuple(i for i, g in zip(needs, grads, strict=True) if g is not None)
                return [*ys, *(_resolved(g) for g in grads if g is not None)]

            names += [f"tangents_{i + 1}" for i in range(len(tangents))]
            forward_alone = graph
            graph = record(
                joint,
                [*primals, *tangents],
                owner=body.owner,
                names=names,
                source=body.fn,
                labels=labels,
                trained=needs,
            )
            both = Part(graph, graph.inputs[: len(primals)], graph.outputs[: len(results.made)])
            same = both.signature == _of_results(forward_alone)
            if not same and both.signature != _of_results(functional(forward_alone, body.owner)):
                # as the joint graph is where a backward writes in place
                raise TraceError(
                    message(body.owner, "computes something else each time it is called", _where(body.fn), _OTHERWISE)
                )
    diff_outputs = diff_outputs if diff else ()
    made, structure, returned, memory = results
    return Joint(name, graph, num_params, len(primals), len(made), diff, diff_outputs, structure, returned, memory)


def _largest(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of floating-point tensors, float32[]: inf if one is nan, 0 if there is none."""
    ends = [
        torch.linalg.vector_norm(x.detach(), math.inf).to(torch.float32)
        for x in values
        if x.is_floating_point() and x.numel()
    ]
    largest = functools.reduce(torch.maximum, ends, torch.zeros((), device=values[0].device))
    return torch.where(largest.isnan(), math.inf, largest)


def _entering(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments as a block computes with them."""
    dtypes = (
        {x.dtype for x in tree.leaves(params) if isinstance(x, torch.Tensor) and x.is_floating_point()}
        if _casting.get()
        else ()
    )
    if len(dtypes) != 1:
        return args, kwargs
    (dtype,) = dtypes
    cast = functools.cache(lambda x: x.to(dtype))  # by identity: two arguments that are one tensor stay so
    return tree.map(lambda x: cast(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs))


def _applied(fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Any:
    """`fn` of arguments whose containers were made for this call: what it changes of them is lost, and so an error."""
    args, kwargs = _entering(params, args, kwargs)

    def contents() -> list[tuple[str, dict[str, Any], tree.TreeSpec]]:
        trees = _arguments(fn, params, args, kwargs)
        return [
            (name, dict(zip(tree.paths(x, name), tree.leaves(x), strict=True)), tree.structure(x)) for name, x in trees
        ]

    before = contents()
    result = fn(params, *args, **kwargs)
    changed = []
    for (name, old, structure), (_, new, now) in zip(before, contents(), strict=True):
        leaves = [path for path in {**old, **new} if path not in old or path not in new or old[path] is not new[path]]
        changed += leaves or ([name] if structure != now else [])
    if changed:
        text = "changes a list, dict or other container that it is given"
        fix = "return the new value instead, and put it into the container outside of the block"
        raise TraceError(message(f"block {_name(fn)}", text, [*_where(fn), *changed], fix))
    return result


def _check_bare(owner: str, does: str, fn: Any, trees: Sequence[tuple[str, Any]]) -> None:
    """Raises if a tensor that crosses a block's border has an attribute that someone has set on it."""
    if extra := [f"{path}.{name}" for path, x in _tensors_in(trees) for name in compat.attributes(x)]:
        fix = "pass what the attribute says as an argument, or return it, beside the tensor"
        raise TraceError(
            message(
                owner, f"{does} tensors with attributes, which are no part of their values", [*_where(fn), *extra], fix
            )
        )


def _tensors_in(trees: Sequence[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """The tensors in trees, by path."""
    return [
        (path, x)
        for root, values in trees
        for path, x in zip(tree.paths(values, root), tree.leaves(values), strict=True)
        if isinstance(x, torch.Tensor)
    ]


def _arguments(fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call, by the names that the function has for them."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return [(names[i] if i < len(names) else f"argument {i}", x) for i, x in enumerate((params, *args))] + sorted(
        kwargs.items()
    )


def _pack(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x, x._version


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, version = packed
    if x._version != version:  # what autograd says of a tensor that it saved itself
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )
    return x


_OTHERWISE = "pass what changes as an argument: a tensor, or a number or text where it decides what is computed"


def _orders(values: Any) -> tuple[Any, ...]:
    """The keys of the dictionaries among a block's arguments, in the order that a loop over them has: to the structure
    of a tree it is no difference."""
    found: list[tuple[Any, ...]] = []

    def visit(x: Any) -> None:
        if isinstance(x, dict):
            found.append(tuple(x))
            for value in x.values():
                visit(value)
        elif isinstance(x, (list, tuple)):
            for value in x:
                visit(value)

    visit(values)
    return tuple(found)


def _where(fn: Any) -> list[str]:
    """The user's own line."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None) or getattr(getattr(type(fn), "forward", type(fn).__call__), "__code__", None)
    return [f"{code.co_filename}:{code.co_firstlineno}"] if code else []


@contextmanager
def every_call_traced() -> Iterator[None]:
    """A block's call that is taken for a repetition of an earlier one is traced as well inside, and is an error if it
    is none."""
    token = _retracing.set(True)
    try:
        yield
    finally:
        _retracing.reset(token)


def _name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


_tracer: ContextVar[Blocks | None] = ContextVar("fzero_blocks", default=None)
_retracing: ContextVar[bool] = ContextVar("fzero_retracing", default=False)
_casting: ContextVar[bool] = ContextVar("fzero_casting", default=False)
