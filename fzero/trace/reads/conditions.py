"""Recognises conditions under which a function raises: `if bad.any(): raise ...`, `assert`, as in `F.gaussian_nll_loss`
and `torch.distributions`.

A trace cannot know whether one holds, and a program does not raise: it takes the branch that does not, and where the
condition holds, what the function returns is NaN, and so are its gradients. A step says it by its metric `finite`.
"""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType

import torch

from fzero import compat
from fzero.trace.reads.code import instructions_from


@contextmanager
def collected() -> Iterator[list[torch.Tensor]]:
    """The conditions noted inside, bool[] each: whether the function would have raised."""
    failed: list[torch.Tensor] = []
    token = _failed.set(failed)
    try:
        yield failed
    finally:
        _failed.reset(token)


def note(failed: torch.Tensor) -> None:
    noted = _failed.get()
    assert noted is not None
    noted.append(failed)


def passing(frame: FrameType | None) -> bool | None:
    """The truth of what a frame tests now for which it does not raise; None if it tests nothing, may go on either way,
    or nobody collects."""
    return None if frame is None or _failed.get() is None else _passing(frame.f_code, frame.f_lasti)


def raises(frame: FrameType | None) -> bool:
    """Whether a frame does nothing more but raise."""
    if frame is None:
        return False
    found, at = instructions_from(frame.f_code, frame.f_lasti)
    return at is not None and _raises(found, at, frame.f_code)


def poisoned(values: Sequence[torch.Tensor], failed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The floating-point values times NaN if one of the conditions holds, else times 1."""
    if not failed:
        return list(values)
    factor = torch.where(functools.reduce(torch.logical_or, failed), math.nan, 1.0)
    return [x * factor.to(x.dtype) if x.is_floating_point() or x.is_complex() else x for x in values]


@functools.cache
def _passing(code: CodeType, offset: int) -> bool | None:
    if code in compat.raising():
        return True
    found, at = instructions_from(code, offset)
    if at is None:
        return None
    if found[at].opname == "TO_BOOL":  # Python 3.13: right before the jump
        at += 1
    test = found[at]
    if not test.opname.startswith("POP_JUMP") or not test.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    target = next(i for i, x in enumerate(found) if x.offset == test.argval)
    jumps, stays = _raises(found, target, code), _raises(found, at + 1, code)
    if jumps == stays:
        return None
    return stays == test.opname.endswith("IF_TRUE")


def _raises(found: Sequence[dis.Instruction], start: int, code: CodeType) -> bool:
    """Whether a branch does nothing but raise, and its own function does not catch it."""
    for x in found[start:]:
        if x.opname == "RAISE_VARARGS":
            return not _caught(found, x.offset, code)
        if x.opcode in dis.hasjrel or x.opcode in dis.hasjabs or x.opname.startswith("RETURN"):
            return False
    return False


def _caught(found: Sequence[dis.Instruction], offset: int, code: CodeType) -> bool:
    """Whether an instruction lies in a `try`; a `with` lets exceptions through."""
    handlers = [e.target for e in dis.Bytecode(code).exception_entries if e.start <= offset < e.end]  # type: ignore[attr-defined]
    names = {x.offset: [y.opname for y in found[i : i + 3]] for i, x in enumerate(found) if x.offset in handlers}
    return any("WITH_EXCEPT_START" not in names[h] for h in handlers)


_failed: ContextVar[list[torch.Tensor] | None] = ContextVar("fzero_checks", default=None)
