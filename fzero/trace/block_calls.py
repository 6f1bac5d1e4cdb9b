"""Records each call of a block as one node, and connects it to autograd so that its vjp is recorded as another node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx as fx
from torch.autograd.graph import saved_tensors_hooks

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.ops.flex_attention import with_dense_masks
from fzero.trace.block_body import Body, arguments, casting, check_bare, name_of, resolved, tensors_in, tracer, where
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.captured_settings import Settings, changes, settings
from fzero.trace.guards.settings_walk import SelfChecked
from fzero.trace.guards.torch_switches import (
    autocast,
    autocast_as,
    dispatch_modes,
    function_modes,
    saved_tensor_hooks,
    switches,
    told,
)
from fzero.trace.joint_graph import OTHERWISE, Joint, call_block, call_vjp, trace_joint
from fzero.trace.recorder import Recorder
from fzero.trace.subgraph import differing_line
from fzero.trace.subgraph import signature as function_signature

BLOCK = "_fzero_block"


class Blocks:
    """The distinct blocks encountered during one trace; records each of their calls in the recorder's graph.

    With `casts`, the floating-point arguments of a block are cast to the dtype of its parameters on entry, if the
    parameters share one dtype. With `watch`, each block has one additional output, the largest absolute value among its
    other outputs; `maxima` collects this output of each call, float32[].
    """

    def __init__(
        self,
        recorder: Recorder,
        mode: compat.FakeTensorMode,
        casts: bool = False,
        watch: bool = False,
    ):
        self.joints: dict[Hashable, Joint] = {}
        self.maxima: list[torch.Tensor] = []
        self.recorder, self._mode, self._casts, self._watch, self._calls = recorder, mode, casts, watch, 0
        self.contexts: list[Any] = []  # the autograd contexts of the calls
        self._masks: dict[int, Any] = {}  # of flex_attention

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes calls of blocks in the body go to this object, and releases the autograd contexts of the calls
        afterwards."""
        tokens = tracer.set(self), casting.set(self._casts)
        try:
            yield
        finally:
            tracer.reset(tokens[0])
            casting.reset(tokens[1])
            # Python never collects a reference cycle through an autograd node of PyTorch. Without this, every trace
            # would stay in memory.
            for context in self.contexts:
                context.__dict__.clear()
            self.contexts.clear()

    def call(self, fn: Callable[..., Any], params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records one call of a block and returns its result.

        Checks the arguments, finds the block with the same signature among those traced so far or traces it, and adds a
        node for the call to the recorder's graph.
        """
        self.recorder.check_default_dtype()
        args, kwargs = with_dense_masks((args, kwargs), self._masks)
        flat, spec = tree.flatten((params, args, kwargs))
        num_params = len(tree.leaves(params))
        owner = f"block {name_of(fn)}"
        constants = [None if isinstance(x, torch.Tensor) else x for x in flat]
        # A tensor that is passed twice is one input, as in eager PyTorch, where it also has one gradient.
        given = list({id(x): x for x in flat if isinstance(x, torch.Tensor)}.values())
        number = {id(x): i for i, x in enumerate(given)}
        places = [number.get(id(x)) for x in flat]
        tensors = [resolved(x) for x in given]
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
            raise TraceError(owner, "takes tensors and hashable constants", [*where(fn), *wrong], fix)
        if around := [type(mode).__name__ for mode in dispatch_modes(self.recorder)] + saved_tensor_hooks():
            fix = "enter it inside the block, so that its effect is recorded"
            raise TraceError(
                owner,
                "is called under a mode that its operations, which are recorded separately, would not see",
                around,
                fix,
            )
        if any(map(compat.attributes, given)):
            check_bare(owner, "is given", fn, arguments(fn, params, args, kwargs))
        grad = torch.is_grad_enabled()
        # Strides belong to the signature because a recorded view is valid only for the strides that it was recorded
        # with.
        signature = tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        body = Body(fn, owner, spec, constants, places, self._watch, autocast(), switches())

        def key() -> Hashable:
            """Everything that decides which traced block a call uses."""
            of_code, of_arguments = (
                settings(fn, *constants, *function_modes()).facts,
                (spec, _orders((params, args, kwargs)), tuple(places), signature),
            )
            return (of_code, of_arguments, grad, body.autocast, body.switches)

        def trace(name: str, outputs: Collection[int] | None = None) -> Joint:
            grads = torch.enable_grad() if grad else torch.no_grad()
            # Replaces the saved-tensor hooks of a checkpoint around the call.
            ours = saved_tensors_hooks(_pack, _unpack) if compat.saved_tensor_hooks() else nullcontext()
            # A block is traced like a function of its own, whatever surrounds the call. Under inference mode no tensor
            # could be saved for a backward.
            with compat.no_modes(), torch.inference_mode(False), grads, ours:
                of_params = len({at for at in places[:num_params] if at is not None})
                return trace_joint(
                    body, name, of_params, self._mode, signature, self._labels(fn, params, args, kwargs), outputs
                )

        def compare(joint: Joint) -> None:
            other = trace(joint.name).graph
            if function_signature(other) != function_signature(joint.graph):
                found = differing_line(joint.graph.graph, other.graph) or where(fn)
                raise TraceError(owner, "computes something different than at an earlier call", found, OTHERWISE)

        now = key()
        joint = self.joints.get(now)
        if joint is None:
            joint = self.joints[now] = trace(name_of(fn))
            if key() != now:
                # While it ran, the function changed a value that it reads: a counter, a list of items that it has seen,
                # or a value that it keeps for later.
                outside = self._read_outside(fn)
                compare(joint)
                if changed := changes(outside, self._read_outside(fn)):
                    fix = (
                        "return it from the block as a result, or change it outside: a block runs once for all its "
                        "calls, while it is traced"
                    )
                    raise TraceError(owner, "changes values that are read outside of it", [*where(fn), *changed], fix)
                now = key()
                # Under the new key too, so that the next call does not trace it again.
                self.joints[now] = joint
        elif retracing.get():
            compare(joint)

        def restricted(outputs: tuple[int, ...]) -> Joint:
            """The block with a backward that starts only at these of its outputs: the operations that produce only the
            other outputs are not differentiated."""
            if (now, outputs) not in self.joints:
                self.joints[now, outputs] = trace(joint.name, outputs)
            return self.joints[now, outputs]

        call, self._calls = self._calls, self._calls + 1
        with torch.set_grad_enabled(bool(joint.diff)):  # the function may have enabled gradients itself
            outputs = list(_Call.apply(self, joint, call, body, restricted, *tensors)) if joint.num_outputs else []
        if self._watch:
            *outputs, largest = outputs
            self.maxima.append(largest)
        if joint.raises:
            *outputs, flags = outputs
            raise_conditions.note(flags, joint.raises)
        values = [*given, *outputs]
        for i, first in enumerate(joint.memory):
            if i >= joint.num_inputs and i != first:
                self.recorder.memory.share([values[first], values[i]], owner)
        return tree.unflatten(joint.structure, [values[i] for i in joint.returned])

    def _read_outside(self, fn: Any) -> Settings:
        """The settings that the traced function reads besides its arguments, excluding what blocks read."""
        body = fn.func if isinstance(fn, functools.partial) else fn
        owners = [fn, body, getattr(body, "__func__", fn)]
        return settings(
            self.recorder.source,
            strict=False,
            without=lambda x: (
                isinstance(x, SelfChecked) or BLOCK in getattr(x, "__dict__", ()) or any(x is one for one in owners)
            ),
        )

    def _labels(self, fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """For each tensor that the block is given: its name inside the block, and the tensor of the step's arguments
        that it is, such as `p['w'] = params['blocks'][0]['w']`, or only `x`."""
        trees = arguments(fn, params, args, kwargs)
        own = tensors_in(trees)
        first = {id(leaf): (path, leaf) for path, leaf in reversed(own)}
        leaves = {i: self.recorder.named(leaf) for i, (_, leaf) in first.items()}
        return [
            first[i][0] if leaf in (None, first[i][0]) else f"{first[i][0]} = {leaf}"
            for i in dict.fromkeys(id(x) for _, x in own)
            for leaf in [leaves[i]]
        ]


class _Call(torch.autograd.Function):
    """Connects the op of a block's call to autograd, so that its vjp becomes one op of the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Blocks,
        joint: Joint,
        call: int,
        body: Body,
        restricted: Callable[[tuple[int, ...]], Joint],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Records the node of the call. Its outputs are new fake tensors with the metadata of the traced block's
        outputs."""
        recorder = blocks.recorder
        blocks.contexts.append(ctx)
        ctx.recorder, ctx.joint, ctx.call, ctx.body, ctx.restricted, ctx.differentiated = (
            recorder,
            joint,
            call,
            body,
            restricted,
            False,
        )
        # With materialized zeros, `backward` could not tell which outputs have a tangent.
        ctx.set_materialize_grads(False)
        ctx.inputs = [recorder.node(x) for x in inputs]
        ctx.save_for_backward(*inputs)
        outputs = _fresh(joint.graph.outputs[: joint.num_outputs])
        ctx.node = recorder.call(call_block, (joint, call, *ctx.inputs), outputs)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in joint.diff_outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Records the node of the vjp. Records the block's operations inline instead if the vjp may itself be
        differentiated, if autocast is enabled, or if it is for other outputs than those of the recorded node."""
        recorder, asked = ctx.recorder, {i: x for i, x in enumerate(tangents) if x is not None}
        given = list(asked.values())
        if not asked:
            # 5 is the number of arguments of `forward` before the tensors.
            return (None,) * (5 + ctx.joint.num_inputs)
        again, ctx.differentiated = ctx.differentiated, True
        if not again and tuple(asked) != ctx.joint.diff_outputs:
            # In PyTorch, outputs without a tangent take no part in the backward. Passing zeros for their tangents
            # instead could produce NaN.
            ctx.joint = ctx.restricted(tuple(asked))
            ctx.node.update_arg(0, ctx.joint)
        joint = ctx.joint
        # The recorded vjp node has no derivative, was recorded without autocast, and is for the outputs in
        # `diff_outputs` only. In any other case the block's operations are recorded inline.
        if torch.is_grad_enabled() or any(autocast().enabled) or tuple(asked) != joint.diff_outputs:
            grads = _inlined_vjp(ctx, asked)
        else:
            grads = _fresh(joint.graph.outputs[joint.num_outputs :])
            places = joint.graph.inputs[joint.num_inputs :]
            seeds = [
                recorder.node(_laid_out_as(place.meta["val"], resolved(x)))
                for place, x in zip(places, given, strict=True)
            ]
            recorder.call(call_vjp, (joint, ctx.call, *ctx.inputs, *seeds), grads)
        out: list[torch.Tensor | None] = [None] * joint.num_inputs
        for i, g in zip(joint.diff, grads, strict=True):
            out[i] = g
        return None, None, None, None, None, *out


def _inlined_vjp(ctx: Any, tangents: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Computes the gradients of a block's inputs by running the block's own operations again at the point of the
    backward. Unlike a recorded vjp node, the result can be differentiated again."""
    joint, body, now = ctx.joint, ctx.body, told(switches())
    other = [
        f"{name}: {then}, and {now[name]} for the derivative"
        for name, then in told(body.switches).items()
        if then != now[name]
    ]
    if other:
        raise TraceError(
            body.owner,
            "is differentiated under different settings than it is called under",
            other,
            "use the same settings for both",
        )
    with autocast_as(body.autocast), torch.enable_grad():
        inputs = [x.view_as(x) for x in ctx.saved_tensors]  # distinct: one input may be computed from another
        outputs = body(inputs).made
    wanted = [outputs[i] for i in tangents]
    create_graph = torch.is_grad_enabled()
    return torch.autograd.grad(
        wanted, [inputs[i] for i in joint.diff], list(tangents.values()), create_graph=create_graph, allow_unused=True
    )


def _laid_out_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns `x` with the strides of `like`, which is dense; copies `x` if the strides differ. Operations that were
    recorded for certain strides (a view) may not be valid for others."""
    # The stride of a dimension of size 1 has no meaning.
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), like.stride(), strict=True)):
        return x
    # Made contiguous with the dimensions in the order of decreasing stride, and permuted back.
    order = sorted(range(x.dim()), key=like.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def _fresh(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    values = [n.meta["val"] for n in nodes]
    return [compat.new_fake(v.fake_mode, v.shape, v.dtype, v.device, v.stride()) for v in values]


def _pack(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x, x._version


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, version = packed
    if x._version != version:  # the message of autograd for a tensor that it saved itself
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )
    return x


def _orders(values: Any) -> tuple[Any, ...]:
    """The keys of the dictionaries among a block's arguments, in iteration order. A loop over a dictionary depends on
    this order, but the structure of a pytree does not."""
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


retracing: ContextVar[bool] = ContextVar("fzeroretracing", default=False)
