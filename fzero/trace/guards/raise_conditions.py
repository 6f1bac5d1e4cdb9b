"""Recognizes conditions that make a function raise: `if bad.any(): raise ...` and `assert`, as in `F.gaussian_nll_loss`
and `torch.distributions`.

A trace cannot know whether such a condition holds, so a program takes the branch that does not raise. If the condition
holds at run time, the loss and its gradients are NaN, and a training step raises on every rank
(fzero/runtime/metrics_watch.py).

`assert a.all() or b.all()` asks for two values and raises only if both tests fail. The first question is answered such
that the second one is asked too, and the flag of the first is kept until then. The condition holds if both flags are 1.
"""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.guards.bytecode import instructions_from
from fzero.trace.guards.user_frames import line


@dataclass(frozen=True)
class Conditions:
    """The conditions that were recorded: their flags, float32[n], which are 1 if the function would have raised, and
    the line of each."""

    flags: list[torch.Tensor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    waiting: dict[int, Waiting] = field(default_factory=dict)  # by the id of the frame that evaluates the condition

    @property
    def joined(self) -> list[torch.Tensor]:
        """A list with all flags concatenated into one vector; empty if there are none."""
        return [torch.cat(self.flags)] if self.flags else []

    def poisoned(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values, of which the floating-point and complex ones are multiplied by NaN if one of the conditions
        holds, and by 1 otherwise."""
        if not self.flags:
            return list(values)
        # A factor, and not a `where` around each value, because a product with NaN also makes the gradients NaN.
        factor = torch.where(torch.cat(self.flags).amax() > 0, math.nan, 1.0)
        return [x * factor.to(x.dtype) if x.is_floating_point() or x.is_complex() else x for x in values]


class Test(NamedTuple):
    """A test whose answer decides only whether a function raises.

    Attributes:
        passes: the truth value of the tested expression with which the function does not raise.
        passing: where the code continues if it does not raise (`_place`).
        last: whether the function raises if this test fails. If not, another test follows, which may pass.
    """

    passes: bool
    passing: Hashable
    last: bool

    @property
    def answer(self) -> bool:
        """The answer that a trace gives: the last test passes, and each test before it fails, so that the next one is
        asked."""
        return self.passes if self.last else not self.passes


class Waiting(NamedTuple):
    """The flag of the failed tests of a condition that has another test to come, and where the code continues if one
    passes."""

    frame: FrameType
    passing: Hashable
    offset: int
    flag: torch.Tensor


@contextmanager
def collected(owner: str) -> Iterator[Conditions]:
    """Collects the conditions that are recorded in the body. `owner` names the traced function in errors. PyTorch's
    checks of the arguments of distributions are disabled, because each of them would be a condition.

    Raises:
        TraceError: the body raises after a test that was answered only so that the next one is asked.
    """
    noted = Conditions()
    token = _noted.set(noted)
    try:
        with compat.distributions_unchecked():
            yield noted
    except Exception as error:
        if places := _failed(error, noted):
            what = "raises if several tests fail, of which the first needs the value of a tensor"
            fix = (
                "test conditions without tensors first (assert flag or "
                "x.all()), or test once: assert (a.all() | b.all())"
            )
            raise TraceError(owner, what, places, fix) from error
        raise
    finally:
        noted.waiting.clear()  # releases the frames that it holds
        _noted.reset(token)


def _failed(error: BaseException, noted: Conditions) -> list[str]:
    """The line that raised an error, if an earlier test in the same function call is still waiting for the next one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or id(trace.tb_frame) not in noted.waiting:
        return []
    return [line((trace.tb_frame.f_code.co_filename, trace.tb_lineno))]


def note(flags: torch.Tensor, lines: Sequence[str]) -> None:
    """Records conditions: their flags, float32[n], and the line of each."""
    noted = _noted.get()
    assert noted is not None
    noted.flags.append(flags)
    noted.lines.extend(lines)


def test_of(frame: FrameType | None) -> Test | None:
    """The test that a frame is evaluating, if its answer decides only whether the frame raises, and if conditions are
    being collected."""
    return None if frame is None or _noted.get() is None else _test(frame.f_code, frame.f_lasti)


def wait(frame: FrameType, test: Test, flag: torch.Tensor) -> None:
    """Keeps the flag of a test until the next test of its condition."""
    noted = _noted.get()
    assert noted is not None
    noted.waiting[id(frame)] = Waiting(frame, test.passing, frame.f_lasti, flag)


def waited(frame: FrameType, test: Test) -> torch.Tensor | None:
    """The flag of the earlier tests of the same condition."""
    noted = _noted.get()
    found = noted.waiting.pop(id(frame), None) if noted is not None else None
    # In a loop, the first test of the next iteration has no larger offset; it begins a new condition.
    same = found is not None and found.passing == test.passing and found.offset < frame.f_lasti
    return found.flag if same and found is not None else None


def raises(frame: FrameType | None) -> bool:
    """Whether a frame does nothing but raise from here on."""
    if frame is None:
        return False
    found, at = instructions_from(frame.f_code, frame.f_lasti)
    return at is not None and _raises(found, at, frame.f_code)


@functools.cache
def _test(code: CodeType, offset: int) -> Test | None:
    if code in compat.raising():
        return Test(True, None, True)
    found, at = instructions_from(code, offset)
    return None if at is None else _test_at(found, at, code)


def _test_at(found: Sequence[dis.Instruction], at: int, code: CodeType) -> Test | None:
    """The test at an instruction, recognized by the conditional jump that follows: one of its two branches does nothing
    but raise, or leads to another test that does."""
    if found[at].opname == "TO_BOOL":  # Python 3.13: right before the jump
        at += 1
    test = found[at]
    if not test.opname.startswith("POP_JUMP") or not test.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    target, if_true = _target(found, test), test.opname.endswith("IF_TRUE")
    jumps, stays = _raises(found, target, code), _raises(found, at + 1, code)
    if jumps != stays:
        passing = at + 1 if jumps else target
        # If the code after the jump raises, the test passes by jumping, on the value `if_true`; otherwise by not
        # jumping.
        return Test(stays == if_true, _place(found, passing), last=True)
    # `a or b`: if the test passes, the code jumps. Otherwise it tests again, and continues at the same place if
    # that test passes.
    following = next((i for i in range(at + 1, target) if found[i].opcode in _JUMPS), None)
    if jumps or following is None or not found[following].opname.startswith("POP_JUMP"):
        return None
    then = _test_at(found, following, code)
    passing = _place(found, target)
    return Test(if_true, passing, last=False) if then is not None and then.passing == passing else None


def _place(found: Sequence[dis.Instruction], at: int) -> Hashable:
    """Identifies the place in the code at which a function continues.

    The compiler copies a short ending with `return` for each jump to it, so such an ending is identified by its
    instructions. Any other place is identified by its offset.
    """
    end = next((i for i in range(at, min(at + 8, len(found))) if found[i].opname.startswith("RETURN")), None)
    if end is None or any(x.opcode in _JUMPS for x in found[at:end]):
        return found[at].offset
    return tuple((x.opname, x.argrepr) for x in found[at : end + 1])


def _target(found: Sequence[dis.Instruction], jump: dis.Instruction) -> int:
    return next(i for i, x in enumerate(found) if x.offset == jump.argval)


def _raises(found: Sequence[dis.Instruction], start: int, code: CodeType) -> bool:
    """Whether a branch does nothing but raise, and the function itself does not catch the exception."""
    for x in found[start:]:
        if x.opname == "RAISE_VARARGS":
            return not _caught(found, x.offset, code)
        if x.opcode in _JUMPS or x.opname.startswith("RETURN"):
            return False
    return False


def _caught(found: Sequence[dis.Instruction], offset: int, code: CodeType) -> bool:
    """Whether an instruction is inside a `try`. A `with` does not count, because it lets exceptions through."""
    handlers = [e.target for e in dis.Bytecode(code).exception_entries if e.start <= offset < e.end]  # type: ignore[attr-defined]
    # The handler of a `with` begins with PUSH_EXC_INFO and WITH_EXCEPT_START.
    names = {x.offset: [y.opname for y in found[i : i + 3]] for i, x in enumerate(found) if x.offset in handlers}
    return any("WITH_EXCEPT_START" not in names[h] for h in handlers)


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_noted: ContextVar[Conditions | None] = ContextVar("fzero_checks", default=None)
