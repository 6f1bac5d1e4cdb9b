"""Maps the entries of a batch to the arguments of a forward, and finds entries that nothing reads.

An entry is read if the forward gets it, or if the loss function uses one of its tensors in any way, including only
its shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.errors import FzeroTypeError, TraceError


class Arguments(NamedTuple):
    """The arguments of a forward, and the entries of the batch that are not among them, by key.

    Attributes:
        optional: the number of entries of a tuple that the forward could take by position in addition to `args`, for
            its parameters with defaults.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: dict[Any, Any]
    optional: int = 0


def arguments(
    forward: Callable[..., Any], name: str, batch: Any, settings: dict[str, Any], alone: bool, more: int = 0
) -> Arguments:
    """Returns the forward's arguments from a batch, plus the settings. If nothing else reads the batch (`alone`), all
    of it is passed.

    Args:
        name: name of the module.
        more: the number of entries of a tuple that the forward gets in addition to those that it needs.

    Raises:
        FzeroTypeError: if the forward does not take these arguments, or needs more.
    """
    signature = inspect.signature(forward)
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p for p in named if p.default is p.empty and p.name not in settings]
    args, kwargs, others, optional = (), {}, {}, 0
    if isinstance(batch, Mapping):
        names = {p.name for p in named}
        kwargs = {k: x for k, x in batch.items() if alone or not named or k in names}
        others = {k: x for k, x in batch.items() if k not in kwargs}
    elif not isinstance(batch, (tuple, list)):
        args = (batch,)
    else:
        count = len(batch) if alone else max(sum(p.kind is not p.KEYWORD_ONLY for p in needed), 1) + more
        by_place = takewhile(lambda p: p.kind is not p.KEYWORD_ONLY and p.name not in settings, named)
        optional = max(min(len(list(by_place)), len(batch)) - count, 0)
        args, others = tuple(batch[:count]), dict(enumerate(batch[count:], count))
    kwargs = {**kwargs, **settings}
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problems = _misfit(error, signature, needed, args, kwargs)
        entries = batch.items() if isinstance(batch, Mapping) else enumerate(args)
        problems += [f"the batch has {k!r}: {tree.describe(x)}" for k, x in list(entries)[:16]]
        fix = "name the entries of a batch as forward's arguments, or give model.train_step(..., name=value)"
        what = f"a batch does not fit {name}.forward{signature}"
        raise FzeroTypeError("functionalize", what, problems, fix) from None
    return Arguments(args, kwargs, others, optional)


def _misfit(
    error: TypeError, signature: inspect.Signature, needed: Sequence[inspect.Parameter], args: Any, kwargs: Any
) -> list[str]:
    """Returns the argument that the forward has no parameter for; if there is none, the parameters that lack an
    argument.
    """
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as other:
        return [str(other)]
    return [f"missing: {p.name}" for p in needed if p.name not in bound] or [str(error)]


class Reading(TorchFunctionMode):
    """Records which entries of a batch a function reads while it runs.

    Args:
        given: the forward's arguments. An entry may be one of them too.
    """

    def __init__(self, given: Arguments):
        super().__init__()
        self._others = given.others
        self._seen = {id(x) for x in tree.leaves((given.args, given.kwargs))}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree.leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def note(self, values: Collection[Any]) -> None:
        self._seen.update(id(x) for x in values if isinstance(x, torch.Tensor))

    def unread(self) -> dict[Any, Any]:
        """Returns the entries that neither the forward nor the function has read."""
        return {k: x for k, x in self._others.items() if not any(id(y) in self._seen for y in tree.leaves(x))}

    def check(self, forward: Callable[..., Any], name: str, result: Any, could_take: bool) -> None:
        """Raises an error if there are entries that neither the forward nor the function has read.

        Args:
            result: the result of the function, which may be an entry.
            could_take: whether only entries count that the forward might have been meant to get.
        """
        self.note(tree.leaves(result))
        signature = inspect.signature(forward)
        unread = self.unread()
        if could_take and not _takes_more(signature, by_name=any(isinstance(k, str) for k in unread)):
            return
        if not unread:
            return
        found = [f"batch[{k!r}]: {tree.describe(x)}" for k, x in unread.items()]
        what = f"neither {name}.forward{signature} nor the loss function reads these entries of the batch"
        fix = (
            "name entries as the arguments that they are, in a dict; or call the module yourself, "
            "model.calling(lambda forward, batch: loss(forward(batch[0]), batch[1]), train=True) for fz.train_step; "
            "or leave them out"
        )
        raise TraceError("functionalize", what, found, fix)


def check_spelling(error: KeyError, batch: Any) -> None:
    """Raises an error if a loss function asked for an entry whose name is similar to one in the batch."""
    asked = error.args[0] if len(error.args) == 1 else None
    if not isinstance(batch, dict) or not isinstance(asked, str) or asked in batch:
        return
    if near := get_close_matches(asked, [k for k in batch if isinstance(k, str)], 1):
        problems = [f"the batch has {k!r}: {tree.describe(x)}" for k, x in batch.items()]
        what = f"the loss function asks for {asked!r}, which the batch does not have"
        raise TraceError("functionalize", what, problems, f"did you mean {near[0]!r}?") from error


def _takes_more(signature: inspect.Signature, by_name: bool) -> bool:
    """Returns whether a forward takes arguments beyond those that it needs: by arbitrary keyword (`by_name`), or by
    position.
    """
    kinds = [(p.kind, p.default is not p.empty) for p in signature.parameters.values()]
    if by_name:
        return any(kind is inspect.Parameter.VAR_KEYWORD for kind, _ in kinds)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(kind is inspect.Parameter.VAR_POSITIONAL or (kind in by_place and more) for kind, more in kinds)
