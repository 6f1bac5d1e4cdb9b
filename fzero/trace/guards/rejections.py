"""Rejects functions that cannot be traced, with an error that shows the user's line, the operands with the arguments
that they come from, and a fix.

PyTorch's own errors name its operators and its own files instead. Exceptions that the function raises itself pass
unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroError, TraceError
from fzero.trace.guards.argument_memory import ArgumentMemory
from fzero.trace.guards.bytecode import cells, instructions_from, names_in
from fzero.trace.guards.user_frames import is_library, line


@dataclass(frozen=True)
class Failure:
    """A call into PyTorch that raised `error`."""

    error: Exception
    call: str
    where: str | None
    operands: Sequence[str]
    in_backward: bool


class TracedFunction(Protocol):
    """The interface of an object that knows the tensors of the function being traced."""

    failure: Failure | None
    refused: Exception | None
    in_place: dict[str, None]
    memory: ArgumentMemory

    @property
    def owner(self) -> str: ...

    def where(self) -> str | None: ...

    def here(self, *lines: str) -> list[str]: ...

    def remembering(self) -> AbstractContextManager[None]: ...

    def backward_line(self, number: int) -> str: ...

    def named(self, tensor: torch.Tensor) -> str | None: ...

    def empty(self) -> list[str]: ...

    def layout_guessed(self, tensor: torch.Tensor) -> bool: ...

    def of_block(self, tensor: torch.Tensor) -> bool: ...


def described(tensor: torch.Tensor, name: str | None = None) -> str:
    """Describes a tensor, such as `params['w']: float32[3, 4]`."""
    return (f"{name}: " if name else "") + tree.describe(tensor)


def note(traced: TracedFunction, error: Exception, func: Any, args: Any) -> None:
    """Remembers which call raised. A failure in the backward takes precedence over the call that started the backward,
    and the user's own call over the calls that it consists of."""
    known = traced.failure
    # The error of a backward passes through `torch.autograd.grad`, which is noted next, with the same text.
    if known is not None and known.in_backward and str(known.error) == str(error):
        return
    operands = [described(x, traced.named(x)) for x in tree.tensors(args)]
    name = torch.overrides.resolve_name(func) or f"{func.__module__}.{getattr(func, '__qualname__', func)}"
    traced.failure = Failure(error, name, traced.where(), operands, compat.backward_of() is not None)


@contextmanager
def plainly(owner: str, traced: TracedFunction | None = None) -> Iterator[None]:
    """Turns PyTorch's errors about the function that runs in the body into a TraceError."""
    try:
        with compat.quiet_fake_tensors():
            yield
    except FzeroError:
        raise
    except ZeroDivisionError as error:  # from the backward of a mean, as torch decomposes it
        if traced is None or not (empty := traced.empty()):
            raise
        what = "divides by the number of samples of an empty batch"
        fix = "skip an empty batch, or pad it: samples that count 0 in fz.weighted(total, count)"
        raise TraceError(owner, what, [*lines_through(error, traced), *empty], fix) from error
    except _KINDS as error:
        if _raised_by_user(error):
            raise
        failure = (
            traced.failure
            if traced is not None and traced.failure is not None and traced.failure.error is error
            else None
        )
        where = [failure.where] if failure is not None and failure.where else lines_through(error, traced)
        said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(" .")
        rule = next((rule for text, *rule in _REFUSED if text in str(error)), None)
        if rule is not None:
            places = list(traced.in_place) if traced is not None and rule[0] == _OVERWRITTEN else where
            raise TraceError(owner, rule[0], places, rule[1]) from error
        if traced is not None and any(text in said for text in _WRONG_ARGUMENTS):  # raised before any op runs
            raise TraceError(
                owner,
                said,
                where,
                "pass what the function takes: tensors are parameters, batch, and what is made of them",
            ) from error
        if failure is None:
            raise
        fix = next((fix for text, fix in _FIXES if text in said), None)
        if fix is None:
            fix = "change the operation, or the shapes and dtypes of its operands"
            fix += ", which are above" if failure.operands else ""
        raise TraceError(owner, f"{failure.call}: {said}", [*where, *failure.operands], fix) from error


CHANGES = "changes its arguments in place"
NEW_VALUE = (
    "return the new value instead (x = x + y for x += y, F.batch_norm with clones of its running statistics); for a "
    "leaf: train_step(mutable=); for a module's buffer or frozen parameter (a teacher's): "
    "functionalize(mutable=['teacher.*'])"
)
_KINDS = (RuntimeError, ValueError, TypeError, IndexError)
_OF_TRACES = (
    ".numpy() is not supported for tensor subclasses",
    "its data is not allocated yet",
    "passed to FakeTensor.__format__",
)
"""Errors of PyTorch that only the tensors of a trace cause."""
_IN_PLACE = (CHANGES, NEW_VALUE)
_OVERWRITTEN = "overwrites a value that its backward needs, in one of these places"
_WRONG_ARGUMENTS = ("(): argument '", "received an invalid combination of arguments")
_REFUSED = [
    ("has been modified by an inplace operation", _OVERWRITTEN, "return a new value there (y = y + x for y += x)"),
    (
        "is not differentiable with respect to argument 'running_",
        "trains the running statistics of a norm",
        "return their new values, from clones: train_step(..., mutable=lambda path, leaf: 'running' in path or "
        "'num_batches' in path), see docs/guides/buffers.md",
    ),
    (
        "Inference tensors cannot be saved",
        "needs for its backward tensors of torch.inference_mode",
        "use torch.no_grad()",
    ),
    ("leaf Variable that requires grad is being used in an in-place", *_IN_PLACE),
    (
        "One of the differentiated Tensors does not require grad",
        "asks for a gradient of what requires none, or takes that from what it is given (detach_, "
        "requires_grad_(False))",
        "x.detach() stops a gradient; train_step(trainable=) selects the trained parameters",
    ),
    ("mutate a captured Tensor", *_IN_PLACE),
    (
        ".numpy() is not supported for tensor subclasses",
        "needs the value of a tensor while being traced (.numpy())",
        "use only torch operations",
    ),
    (
        "its data is not allocated yet",  # an operator that reads its arguments' values before its results are known
        "needs the value of a tensor while being traced",
        "pass settings as numbers, not as a tensor (indices of torch.tensor_split)",
    ),
    (
        "passed to FakeTensor.__format__",
        "needs the value of a tensor while being traced (to print it)",
        "return it as an aux value, or print its shape",
    ),
    (
        "does not have a deterministic implementation",
        "uses an operation for which PyTorch has no deterministic algorithm, "
        "and torch.use_deterministic_algorithms(True) asks for "
        "one",
        "compute it by other operations, or allow it: torch.use_deterministic_algorithms(True, warn_only=True)",
    ),
    (
        "use_reentrant=True",
        "recomputes by a backward within the backward (torch.utils.checkpoint with use_reentrant=True)",
        "checkpoint(..., use_reentrant=False), or @fz.block with fz.remat",
    ),
]
"""Errors of torch: a pattern in the message, what it means, and the fix."""
_FIXES = [
    (
        "expected operands of one dtype",
        "give the operands above one dtype: x.to(weight.dtype); or let torch.autocast cast the operands of products: "
        "with torch.autocast(x.device.type, torch.bfloat16):. If a library's code mixes dtypes (torch's "
        "spectral_norm), also leave its parameters in float32: fz.mixed_precision(..., where=lambda path, leaf: "
        "'parametrizations' not in path)",
    ),
    ("expected class indices", "give labels as int64: labels.long()"),
]
"""Fixes for calls that raise: a pattern in the message, and the fix."""


def lines_through(error: BaseException, traced: TracedFunction | None = None) -> list[str]:
    """The innermost line of the user's code that an error passed through, or whose backward raised it; a list of at
    most one line."""
    found, trace = [], error.__traceback__
    while trace is not None:
        ctx = trace.tb_frame.f_locals.get("ctx")  # present in the backward of a torch.autograd.Function
        if not is_library(trace.tb_frame.f_code.co_filename):
            found.append(line((trace.tb_frame.f_code.co_filename, trace.tb_lineno)))
        elif traced is not None and isinstance(ctx, torch.autograd.function.FunctionCtx):
            found.append(traced.backward_line(ctx._sequence_nr()))  # pyright: ignore[reportAttributeAccessIssue]
        trace = trace.tb_next
    return found[-1:]


def _raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` statement in the user's code caused an error, and not a call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or is_library(trace.tb_frame.f_code.co_filename):
        return False
    # The instruction decides: a line of the user's code may both call PyTorch and raise.
    found, at = instructions_from(trace.tb_frame.f_code, trace.tb_lasti)
    return at is not None and found[at].opname in ("RAISE_VARARGS", "RERAISE")


# --- tensors that are not arguments ---


def reached(fn: Any, tensor: torch.Tensor, seen: set[int] | None = None) -> str | None:
    """How a function reaches a tensor other than as an argument: through its closure, its globals, its defaults, or
    functions that it calls."""
    seen = set() if seen is None else seen
    if id(fn) in seen:
        return None
    seen.add(id(fn))
    ways: list[tuple[str, Any]] = []
    if isinstance(fn, functools.partial):
        ways += [(f"argument {i} of the partial", v) for i, v in enumerate(fn.args)] + [
            (f"keyword {k} of the partial", v) for k, v in fn.keywords.items()
        ]
        ways.append(("", fn.func))
    if hasattr(fn, "__wrapped__"):
        ways.append(("", fn.__wrapped__))  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(fn, "__self__"):
        ways.append(("self", fn.__self__))  # pyright: ignore[reportAttributeAccessIssue]
    plain: Any = getattr(fn, "__func__", fn)
    if inspect.isfunction(plain):
        ways += [(f"closure variable {name}", v) for name, v in cells(plain)]
        names = names_in(plain.__code__).globals
        ways += [(f"global variable {k}", plain.__globals__[k]) for k in names if k in plain.__globals__]
        ways += [
            (f"default of {k}", p.default) for k, p in inspect.signature(fn, follow_wrapped=False).parameters.items()
        ]
    for name, value in ways:
        for path, x in _tensors(value):
            if x is tensor:
                return name + path
    for _, value in ways:
        if callable(value) and (hasattr(value, "__code__") or isinstance(value, functools.partial)):
            inner = reached(value, tensor, seen)
            if inner:
                of = getattr(value, "__name__", "a function")
                return inner if of == getattr(fn, "__name__", "") else f"{inner} of {of}"
    return None


def _tensors(value: Any) -> list[tuple[str, Any]]:
    """The tensors that a variable holds: the variable itself, leaves of a tree, or attributes of an object."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, torch.nn.Module):
        return [(f".{n}", x) for n, x in (*value.named_parameters(), *value.named_buffers())]
    if isinstance(value, (dict, list, tuple)):
        return tree.with_paths(value)
    if isinstance(value, type(torch)) or not hasattr(value, "__dict__"):
        return []
    return [(f".{n}", x) for n, x in vars(value).items() if isinstance(x, torch.Tensor)]
