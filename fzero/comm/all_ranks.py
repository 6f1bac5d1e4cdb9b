"""Runs the phases of a checkpoint on all ranks together: a failure on any rank is raised on all of them.

A rank that raised an error immediately would leave the others waiting in their next collective. Therefore the ranks
first exchange their results or errors, and raise afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, TypeVar

import torch.distributed as dist

from fzero._utils.bounded_json import dumped, parsed
from fzero.comm.agreement import reasons
from fzero.comm.collective_sequence import latest
from fzero.comm.control_messages import exchanged
from fzero.errors import CheckpointError, DivergenceError, RankLost, StorageError, left, parted

T = TypeVar("T")


class Ranks(NamedTuple):
    """The processes that save or restore together.

    `exchange(value, form)` returns the values of all ranks, ordered by rank. `form` is the expected type of the JSON
    value (bounded_json.py).
    """

    rank: int
    size: int
    exchange: Callable[[Any, Any], list[Any]]


def world() -> Ranks:
    """Returns the ranks of the default process group, or only this process if there is no process group."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Ranks(dist.get_rank(), dist.get_world_size(), _exchange)
    return ALONE


def together(
    ranks: Ranks,
    where: str,
    what: str,
    act: Callable[[], T],
    undo: Callable[[], object] = lambda: None,
    form: Any = None,
) -> list[T]:
    """Runs `act()` on every rank and returns the results of all ranks.

    Args:
        undo: run on every rank before raising, if any rank failed.
        form: the expected type of the results as JSON values.

    Raises:
        CheckpointError: on every rank, if `act` failed on any; names each failing rank and its error. It is a
            StorageError if every failure came from the operating system or from an object store.

    Communication: one exchange of a small object.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = act()
    except RankLost:  # not exchanged: the other ranks see the loss too
        raise
    except BaseException as caught:  # Ctrl-C too: the other ranks wait for this one
        error = caught
    try:
        everyone = ranks.exchange(
            (result, None if error is None else (*_text(error), isinstance(error, (OSError, StorageError)))),
            tuple[Optional[form], tuple[str, str | None, bool] | None],  # noqa: UP045 - of None too
        )
    except DivergenceError as apart:  # the error cannot be reported to the other ranks
        if error is None:
            raise
        raise error from apart
    failures = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
    if not failures:
        return [r for r, _ in everyone]
    undo()
    # Ctrl-C on this rank: raised as it is, now that the other ranks know.
    if error is not None and not isinstance(error, Exception):
        raise error
    texts = {text for _, (text, *_) in failures}
    if len(texts) == 1 and len(failures) == ranks.size and isinstance(error, CheckpointError):
        raise error
    lines = reasons({rank: text for rank, (text, *_) in failures})
    fixes = dict.fromkeys(fix for _, (_, fix, _) in failures if fix)
    kind = StorageError if all(is_storage for _, (*_, is_storage) in failures) else CheckpointError
    raise kind(where, what, lines, "; ".join(fixes) or None) from error


def _exchange(mine: Any, form: Any) -> list[Any]:
    sequence = latest()
    if sequence is not None:
        sequence.begin("checkpoint", "saves or restores a checkpoint")
        sequence.check("checkpoint")
        sequence.meet("checkpoint")
    try:
        return exchanged(mine, form, "checkpoint")
    except DivergenceError:
        raise
    except RuntimeError as error:  # raised by the process group when a connection is lost
        raise left("checkpoint", dist.get_rank(), dist.get_world_size()) from error


ALONE = Ranks(0, 1, lambda mine, form: [parsed(dumped(mine), form)])


def _text(error: BaseException) -> tuple[str, str | None]:
    """Returns the text of an error and its suggested fix, if it has one."""
    if isinstance(error, CheckpointError):
        text, fix = parted(error)
        return text, fix or None
    if isinstance(error, OSError):
        fix = (
            "make the directory writable, with enough free space for the whole checkpoint, on a filesystem that all "
            "ranks share"
        )
        return f"{type(error).__name__}: {error}", fix
    text, fix = parted(error)
    return f"{type(error).__name__}: {text}", fix or None
