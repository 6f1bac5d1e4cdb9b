"""Rejects questions about a tensor that no trace can answer: its text, memory, history or layout."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fzero._compat import compat
from fzero.errors import FzeroError, TraceError
from fzero.ops import flex_attention
from fzero.ops.ctc import CTC_LOSS, with_tensors
from fzero.ops.mixed_norms import NORMS, with_parameters_cast
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.rejections import _KINDS, _OF_TRACES, TracedFunction, described, note
from fzero.trace.guards.unsupported_operations import refuse_functions
from fzero.trace.guards.user_frames import asking_frame, is_library


@contextmanager
def strides_noted() -> Iterator[list[str]]:
    """Collects the lines of the traced code that ask for strides. A program gets its batch contiguous; for a batch with
    other strides, PyTorch would give other answers."""
    asked: list[str] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def _note_strides(where: list[str]) -> None:
    asked = _asked.get()
    if asked is not None:
        asked += [place for place in where if place not in asked]


_asked: ContextVar[list[str] | None] = ContextVar("fzero_strides", default=None)


class Calls(TorchFunctionMode):
    """Remembers the call into PyTorch that raises, in the form in which the function wrote it."""

    def __init__(self, traced: TracedFunction):
        super().__init__()
        self._traced = traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKED_AT:  # a fast check, because the trace of a deep model makes tens of thousands of calls
            with self._traced.remembering():
                self._look(func, args, sys._getframe(1))
        elif func in CTC_LOSS:
            args, kwargs = with_tensors(args, kwargs or {})
        elif func in NORMS:
            args, kwargs = with_parameters_cast(func, args, kwargs or {})
        elif func is compat.FLEX_ATTENTION:
            func = flex_attention.flex_attention
        try:
            return func(*args, **(kwargs or {}))
        except FzeroError:
            raise
        except _KINDS as error:
            if compat.is_function_operator(func):  # from PyTorch's own trace, with which such an operator begins
                with self._traced.remembering():
                    refuse_functions(self._traced, str(func))
            note(self._traced, error, func, (args, kwargs or {}))
            if any(text in str(error) for text in _OF_TRACES):
                self._traced.refused = self._traced.refused or error
            raise

    def _look(self, func: Any, args: Any, caller: FrameType) -> None:
        """Raises if a call has effects that no trace sees, or asks a question that no trace can answer."""
        # Compared with `==`, because each access to the descriptor's `__set__` creates a new wrapper object.
        if func == _SETS_DATA:  # not an op, so no trace would record it
            what, fix = "assigns to .data", "return the new value instead, or x.copy_(y)"
            raise TraceError(self._traced.owner, what, self._traced.here(), fix)
        if func in _FACTS and _asked_by_user(caller):
            _check_read(self._traced, _FACTS[func], args[0])
        if func in _LAYOUTS and _asked_by_user(caller):
            _check_layout(self._traced, args[0])
        if func is torch.Tensor.__reduce_ex__ or (
            func in _TEXTS and _asked_by_user(caller) and not raise_conditions.raises(asking_frame())
        ):
            raise TraceError(self._traced.owner, *self._as_text(func, args[0]))

    def _as_text(self, func: Any, x: torch.Tensor) -> tuple[str, list[str], str]:
        """The parts of the error for converting a tensor to text or pickling it."""
        where = [*self._traced.here(), described(x, self._traced.named(x))]
        return (
            f"needs the value of a tensor while being traced ({_TEXTS[func]})",
            where,
            "return it as an aux value, or print its shape; x.clone() is a copy",
        )


_TEXTS = {
    torch.Tensor.__repr__: "to print it",
    torch.Tensor.__format__: "to print it",
    torch.Tensor.__reduce_ex__: "to pickle it, or for copy.copy",
}
_LAYOUTS = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.dim_order}
_OF_HISTORY = ("is_leaf", "grad_fn", "register_hook", "register_post_accumulate_grad_hook")
"""Attributes and methods of a tensor that depend on its autograd history, or change it."""
_OF_MEMORY = (
    "storage_offset",
    "as_strided",
    "untyped_storage",
    "storage",
    "data_ptr",
    "is_set_to",
    "_version",
    "_base",
    "_is_view",
)
"""Attributes and methods of a tensor that depend on its location in memory."""


def _facts() -> dict[Any, str]:
    found = {getattr(torch.Tensor, name): name for name in (*_OF_HISTORY, *_OF_MEMORY)} | {
        torch.as_strided: "as_strided"
    }
    # `__torch_function__` is called with the `__get__` of an attribute's descriptor.
    return {func.__get__ if inspect.isgetsetdescriptor(func) else func: name for func, name in found.items()}


_FACTS = _facts()
_SETS_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
LOOKED_AT = frozenset((*_FACTS, *_LAYOUTS, *_TEXTS, _SETS_DATA))


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the code that calls a method of a tensor is the user's, and not that of a library, which knows what it
    asks."""
    while frame is not None and frame.f_code.co_filename in _OF_METHODS:
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


_OF_METHODS = frozenset(os.path.join(os.path.dirname(torch.__file__), name) for name in ("_tensor.py", "overrides.py"))


def _check_layout(traced: TracedFunction, tensor: torch.Tensor) -> None:
    """Records that code asks for the layout of a tensor; raises if a trace cannot tell."""
    _note_strides(traced.here())
    if traced.layout_guessed(tensor):
        text = (
            "asks how a tensor is laid out that is made of tensors that are not contiguous, where PyTorch may lay it "
            "out otherwise than a trace says"
        )
        fix = "ask of x.contiguous(), or do not ask: reshape and flatten copy only if necessary"
        raise TraceError(traced.owner, text, traced.here(described(tensor, traced.named(tensor))), fix)


def _check_read(traced: TracedFunction, what: str, tensor: torch.Tensor) -> None:
    """Raises if code reads a property of a tensor that differs between a trace and PyTorch: the history of a block's
    argument, or the location in memory."""
    if what in _OF_HISTORY:
        if not traced.of_block(tensor):
            return
        text, fix = "reads which function made an argument", "do it outside of the block"
    elif what == "data_ptr" or traced.memory.may_be_part(tensor):  # the tensors of a trace have no addresses
        text = "reads the memory address of a tensor that is an argument, or an argument or a result of a block"
        fix = "index or view it, or make a copy first: x.contiguous().clone()"
    else:
        return
    raise TraceError(traced.owner, f"{text} ({what})", traced.here(described(tensor, traced.named(tensor))), fix)
