"""Marks functions as blocks, the unit of gathering, rematerialization and compilation.

`block(fn)` behaves like `fn`, except while a step is traced. In a trace, each call of the block is one op of the
program, and the function itself is traced separately, once per signature, with its forward and backward in one graph.
So the program of a 64-layer model has only a few hundred ops, and is traced as fast as the program of a 4-layer model.

Some calls are inlined instead: nested blocks, blocks under a torch.func transform of the user (`vmap`, an inner
`grad`), blocks under forward-mode AD, and blocks whose backward is itself differentiated.
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

    Outside a trace, calling the block is the same as calling `fn`. In a trace, each call is one op of the program: the
    parameters of the block are gathered together right before the op and freed right after it, the block is
    rematerialized as a unit, and it is compiled once, however often it is called.

    Args:
        fn: a pure function of a pytree of parameters and of any further pytrees of tensors. Arguments that are not
            tensors (numbers, strings, dtypes) are constants of the signature. Returns a pytree of tensors. A tensor
            that is returned is a value of the program; a number or a string is not, so neither may be returned.

    Two calls share one traced function if their arguments have the same shapes, strides and dtypes, and if all other
    values that the function reads are the same:

    - its code and the code of the functions that it calls, closure cells, globals, defaults and the environment;
    - attributes of objects, classes and modules that this code names;
    - autocast, the user's own modes and PyTorch's other settings (captured_settings.py and torch_switches.py of
      trace/guards/).

    Some values are not tracked. If they change between two calls in one step, the change goes unnoticed: globals of
    installed libraries, the internals of C extensions, files, computed names (`eval`), tensors written through NumPy,
    and arrays of more than 4 MiB that are changed in place. `fz.testing.check_equivalent` traces every call and finds
    such changes. A function that does something different on each call (`next(iterator)`, `random.random()`) is an
    error.

    If the function returns one of its arguments, the caller gets the tensor that it passed. If one tensor is passed as
    two arguments, the function also sees one tensor. A result may be a view of an argument or of another result. In a
    program each result has its own memory, so it is an error to read one of these tensors after another one that shares
    its memory has been written in place. It is also an error to change a container that was passed as an argument, and
    to ask for an argument's origin or memory (`x.is_leaf`, `x.grad_fn`, `x._version`, `x.storage_offset()`,
    `x.register_hook`), because a block is a function of values. For the same reason, tensors with user-defined
    attributes (`x.scale = 2`) may be neither arguments nor results.

    A condition that makes the function raise (`assert`, `if bad.any(): raise`) cannot be evaluated while tracing. If it
    holds when the program runs, floating-point results are NaN.

    Higher-order derivatives are correct: if `create_graph=True` asks for one, and in forward mode, the operations of
    the block are recorded in place of the call.

    Communication: with `shard_params`, one all_gather of the block's parameters in the forward, one in the backward,
        and one reduce_scatter of their gradients.

    Raises:
        TraceError: while tracing, if the function changes an argument in place (a tensor, a list, a dict), returns
            something other than tensors, reads a tensor from its closure, or draws from torch's global generator; if
            its results differ from call to call; if it asks for an argument's origin or memory; if arguments or results
            are tensors with attributes; or if it changes values that are read outside of it. Also raised for a second
            derivative taken under PyTorch settings that differ from those of the call, and for the user's own
            `TorchDispatchMode` or `saved_tensors_hooks` around the call.

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
            "takes a function whose first argument are parameters",
            problems,
            "write @fz.block above def layer(params, x): ...",
        )

    @functools.wraps(fn)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = tracer.get()
        # Under vmap or an inner grad, tensors are wrappers of functorch with a batch or tangent level. A recorded call
        # would hide the block's ops from the transform, so they are run in place.
        if blocks is None or compat.functorch_active() or compat.forward_ad_active():
            return applied(fn, params, args, kwargs) if casting.get() else fn(params, *args, **kwargs)
        with blocks.recorder.remembering():
            return blocks.call(fn, params, args, kwargs)

    call.__dict__[BLOCK] = fn
    return call


@contextmanager
def attempt() -> Iterator[None]:
    """Runs a body that may be rejected. If an exception leaves the body, the surrounding trace forgets the rejection,
    because the caller has another way to proceed."""
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
    """Traces every call of a block inside the body, including calls that look like repetitions of earlier ones. A call
    whose trace differs from that of the earlier call is an error."""
    token = retracing.set(True)
    try:
        yield
    finally:
        retracing.reset(token)
