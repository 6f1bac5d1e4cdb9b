"""Recognises conditions under which a function raises: `if bad.any(): raise ...`, `assert`, as in `F.gaussian_nll_loss`
and `torch.distributions`.

A trace cannot know whether one holds: a program takes the branch that does not raise. Where the condition holds, the
loss is NaN, and so are its gradients; a training step raises on every rank (fzero/runtime/watch.py).
"""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch

from fzero import compat
from fzero.trace.reads.code import instructions_from


@dataclass(frozen=True)
class Conditions:
    """Conditions that were noted: float32[n] flags, 1 where a function would have raised, and the line of each."""

    flags: list[torch.Tensor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def joined(self) -> list[torch.Tensor]:
        """All flags as one vector, if there are any."""
        return [torch.cat(self.flags)] if self.flags else []

    def poisoned(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The floating-point values times NaN if one of the conditions holds, else times 1."""
        if not self.flags:
            return list(values)
        factor = torch.where(torch.cat(self.flags).amax() > 0, math.nan, 1.0)
        return [x * factor.to(x.dtype) if x.is_floating_point() or x.is_complex() else x for x in values]


@contextmanager
def collected() -> Iterator[Conditions]:
    """The conditions noted inside."""
    noted = Conditions()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(flags: torch.Tensor, lines: Sequence[str]) -> None:
    """Notes conditions: float32[n] flags, and the line of each."""
    noted = _noted.get()
    assert noted is not None
    noted.flags.append(flags)
    noted.lines.extend(lines)


def passing(frame: FrameType | None) -> bool | None:
    """The truth of what a frame tests now for which it does not raise; None if it tests nothing, may go on either way,
    or nobody collects."""
    return None if frame is None or _noted.get() is None else _passing(frame.f_code, frame.f_lasti)


def raises(frame: FrameType | None) -> bool:
    """Whether a frame does nothing more but raise."""
    if frame is None:
        return False
    found, at = instructions_from(frame.f_code, frame.f_lasti)
    return at is not None and _raises(found, at, frame.f_code)


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


_noted: ContextVar[Conditions | None] = ContextVar("fzero_checks", default=None)
