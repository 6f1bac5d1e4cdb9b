"""Marks functions as blocks, the unit of gathering, rematerialisation and compilation.

`block(fn)` is `fn`, except while a step is traced: there a call is one line of the program, and the function itself is
traced once per signature, forward and backward together, aside. So the program of a 64-layer model has a few hundred
lines and is traced as fast as that of a 4-layer model. Nested blocks, blocks under a torch.func transform of the user's
own (`vmap`, an inner `grad`) or under forward-mode AD, and backwards that are differentiated themselves are inlined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fzero._compat import compat
from fzero._utils.arguments import function
from fzero.errors import FzeroTypeError
from fzero.trace.block_body import applied, casting, tracer
from fzero.trace.block_calls import BLOCK, retracing


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a pure function `(params, *args) -> outputs` as a block.

    Called outside a trace it is `fn`. In a trace a call is one line: its parameters are gathered together right before
    it and dropped right after, it is rematerialised as a whole and compiled once however often it is called.

    Args:
        fn: a pure function of a pytree of parameters and of any further pytrees of tensors. Arguments that are not
            tensors (numbers, strings, dtypes) are constants of the signature. Returns a pytree of tensors: a result is
            a value of the program, a number or a text is none.

    Two calls are one traced function if their arguments have the same shapes, strides and dtypes, and all other values
    they read are the same:

    - its code and that of functions it calls, closure cells, globals, defaults and the environment;
    - attributes of objects, classes and modules that this code names;
    - autocast, modes of the user's own and PyTorch's other settings (captured_settings.py and torch_switches.py of
    trace/guards/).

    Not seen, if they change between two calls in one step: globals of installed libraries, the insides of C extensions,
    files, computed names (`eval`), tensors written through NumPy, arrays of more than 4 MiB changed in place.
    `fz.testing.check_equivalent` traces every call and finds those. A function that does something else each time
    (`next(iterator)`, `random.random()`) is an error.

    A result that is an argument is the tensor that was given; two arguments that are one tensor are one inside. A
    result may be a view of an argument or of another result. In a program it has memory of its own, so reading one of
    these after another was written in place is an error. So is changing a container argument, and asking about an
    argument's origin or memory (`x.is_leaf`, `x.grad_fn`, `x._version`, `x.storage_offset()`, `x.register_hook`). A
    block is a function of values. For that reason, too, no attribute set on a tensor (`x.scale = 2`) may pass its
    border.

    A condition under which it raises (`assert`, `if bad.any(): raise`) is not known while tracing: where it holds,
    floating-point results are NaN.

    Derivatives of a derivative are right: where `create_graph=True` asks for one, and in forward mode, the block's own
    operations are recorded in its place.

    Communication: with `shard_params`, one all_gather of the block's parameters in the forward, one in the backward,
        and one reduce_scatter of their gradients.

    Raises:
        TraceError: while tracing, if it changes an argument in place (a tensor, a list, a dict), returns something
            other than tensors, reads a tensor from its closure, or draws from torch's global generator.
            So do other results each time, questions about an argument's origin or memory, tensors with attributes as
            arguments or results, and changes of values that are read outside.
            Also a second derivative under other settings of PyTorch's than the call's, and a `TorchDispatchMode` or
            `saved_tensors_hooks` of the user's own.

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
            "block",
            "takes a function of parameters and more",
            problems,
            "write @fz.block above def layer(params, x): ...",
        )

    @functools.wraps(fn)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = tracer.get()
        if blocks is None or compat.functorch_active() or compat.forward_ad_active():
            return applied(fn, params, args, kwargs) if casting.get() else fn(params, *args, **kwargs)
        with blocks.recorder.remembering():
            return blocks.call(fn, params, args, kwargs)

    call.__dict__[BLOCK] = fn
    return call


@contextmanager
def attempt() -> Iterator[None]:
    """A body whose refusal, if it leaves it, the trace around forgets: the caller has another way."""
    blocks = tracer.get()
    before = blocks.recorder.refused if blocks is not None else None
    try:
        yield
    except Exception:
        if blocks is not None:
            blocks.recorder.refused = before
        raise


@contextmanager
def every_call_traced() -> Iterator[None]:
    """A block's call that is taken for a repetition of an earlier one is traced as well inside, and is an error if it
    is none."""
    token = retracing.set(True)
    try:
        yield
    finally:
        retracing.reset(token)
