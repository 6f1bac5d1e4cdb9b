"""Adapts code of transformers for the time of a trace. This file uses the library if it is loaded, and imports nothing.

Masks: from positions that begin anew within a row, the library concludes that the row contains several documents, and
builds a mask. In a trace it cannot read the positions, and always builds the mask: `seq` squared elements per row,
which kernels for causal attention do not need. But the positions that a model computes itself, if the batch has none,
are known. For `flex_attention`, it reads whether an attention mask is all ones; in a trace, it uses the mask.

Sets: several models loop over a set of strings. Each process does so in another order, and each rank would trace
another program.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fzero._compat import compat
from fzero.trace.recorder import number_of

_MASKS = "transformers.masking_utils"
_PACKED, _ALL = "find_packed_sequence_indices", "fast_all"


class _SortedWhenRead(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, builtins.set)


class SortedSet(builtins.set, metaclass=_SortedWhenRead):
    """A set that iterates over its elements in order, if they have one."""

    def __iter__(self) -> Iterator[Any]:
        elements = [*super().__iter__()]
        return iter(sorted(elements) if all(isinstance(x, str) for x in elements) else elements)


@contextmanager
def adapted(module: nn.Module) -> Iterator[None]:
    """Inside, code of the library can be traced: see the description of this file. `module` is what is traced."""
    changes: list[tuple[Any, str, Any]] = []
    if (masks := sys.modules.get(_MASKS)) is not None:
        if (find := getattr(masks, _PACKED, None)) is not None:
            changes.append((masks, _PACKED, lambda positions: _if_known(find(positions))))
        if (ask := getattr(masks, _ALL, None)) is not None:
            changes.append((masks, _ALL, lambda mask: _known_or_false(ask(mask))))
    owners = {type(m).__module__ for m in module.modules()}
    for name in sorted(x for x in owners if x.partition(".")[0] in ("transformers", "transformers_modules")):
        if "set" not in vars(code := sys.modules[name]):
            changes.append((code, "set", SortedSet))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in before:
            delattr(owner, name) if old is None else setattr(owner, name, old)


def sort_sets(module: nn.Module) -> None:
    """Replaces sets of strings that are attributes of the library's modules."""
    for m in module.modules():
        for name, x in [*vars(m).items()] if type(m).__module__.startswith("transformers") else ():
            if type(x) is builtins.set and all(isinstance(y, str) for y in x):
                setattr(m, name, SortedSet(x))


def _if_known(document: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the document of each position; None if they are known to be all 0."""
    return None if document is None or number_of(document.any()) == 0 else document


def _known_or_false(found: torch.Tensor) -> torch.Tensor | bool:
    if (number := number_of(found)) is not None:
        return bool(number)
    return False if isinstance(found, compat.FakeTensor) else found
