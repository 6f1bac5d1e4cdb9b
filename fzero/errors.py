"""Errors are part of the interface: every failure at once, named by path, with a fix.

All errors fzero raises on purpose subclass `FzeroError` and the built-in class a caller would expect.
`message` lays them out the same way everywhere:

    fzero.shard_params: cannot shard 2 leaves over axis 'data'
      params['w_up'] (float32[3000, 768]): ...
    Fix: ...
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FzeroError(Exception):
    """Base class of every error raised by fzero."""


class FzeroValueError(FzeroError, ValueError):
    """A value that cannot work: an unknown axis, a batch that does not divide, a loss that is not a scalar."""


class FzeroTypeError(FzeroError, TypeError):
    """A value of the wrong kind: a parameter that is not a tensor, a block that returns a string."""


class TransformError(FzeroValueError):
    """Two transforms that contradict each other, or one that cannot be applied."""


class TraceError(FzeroValueError):
    """A function that cannot be traced: mutated inputs, closure tensors, data-dependent control flow."""


class BudgetError(FzeroValueError):
    """A step that does not fit the memory it may have."""


class VerifyError(FzeroValueError):
    """A program that breaks one of its own rules. Never raised for a user's mistake: it is a bug in a rewrite."""


class DivergenceError(FzeroError, RuntimeError):
    """Ranks that would run different programs or hold different values of the same leaves, or that did not come to
    compare them."""


class BusyError(FzeroError, RuntimeError):
    """A call that needs a mesh to itself while another thread is using it."""


class TierError(FzeroError, RuntimeError):
    """A memory that failed while a step ran: a disk that is full, an I/O error. The state is lost, the last checkpoint
    is not."""


class LossScaleError(FzeroError, RuntimeError):
    """Gradients that overflow though the loss scale is as low as it may be."""


class EquivalenceError(FzeroError, AssertionError):
    """A transformed step that does not do what the plain step does. `report` says by how much, and where it begins."""

    def __init__(self, text: str, report: object = None):
        super().__init__(text)
        self.report = report


class CheckpointError(FzeroValueError):
    """A checkpoint that is missing, damaged, incomplete or of another model."""


def message(where: str, what: str, problems: Iterable[str] = (), fix: str | None = None) -> str:
    """The one layout of error texts: `where: what`, a line a problem, and the fix last."""
    lines = [f"fzero.{where}: {what}", *(f"  {p}" for p in problems)]
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """What a module says of a name that it has not: those that are like it, or all."""
    known = sorted(known)
    names = difflib.get_close_matches(name, known) or known
    fix = f"{'there are' if names == known else 'did you mean'} {', '.join(names)}"
    return AttributeError(f"module {module!r} has no attribute {name!r}\nFix: {fix}")


def left(where: str, rank: int, size: int) -> DivergenceError:
    """For a collective of torch.distributed that failed: on one of two ranks because the other has left, on one of more
    because another has."""
    gone = f"rank {1 - rank} has left" if size == 2 else "another rank has left"
    return DivergenceError(
        message(
            where,
            "a transfer between ranks failed",
            [f"rank {rank}: {gone}"],
            "look at that rank's errors; go on from the last checkpoint",
        )
    )
