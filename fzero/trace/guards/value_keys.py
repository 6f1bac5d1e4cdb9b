"""Compares values: plain values by value, arrays by content, and all others by identity."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

LARGE = 2**22
"""Arrays of more bytes than this are compared by identity; reading this many takes about 3 ms."""


def exact(value: Any) -> tuple[type, Hashable]:
    """A key for a number, a string or another plain constant. 1, 1.0 and True have three different keys, 0.0 and -0.0
    have two, and all NaNs have one."""
    # The text of a float distinguishes -0.0 from 0.0, and is the same for all NaNs, unlike the value.
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
PLAIN_TYPES = frozenset(PLAIN)


class Same:
    """A value that equals only itself. It is kept alive so that no later value can have its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def attributes_of(x: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object itself, including slots."""
    yield from getattr(x, "__dict__", {}).items()
    for base in type(x).__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (
            (name, getattr(x, name))
            for name in ((slots,) if isinstance(slots, str) else slots)
            # A slot without a value raises AttributeError.
            if name != "__dict__" and hasattr(x, name)
        )


def contents(x: Any) -> tuple[Any, ...] | None:
    """The contents of an array of numbers: its format, its shape and, unless it is large, a digest. None for other
    values."""
    try:
        view = memoryview(x)
    except (TypeError, ValueError, BufferError):
        return None
    return view.format, view.shape, *([hashlib.sha256(view.tobytes()).hexdigest()] if view.nbytes <= LARGE else [])


def hashes(x: Any) -> bool:
    """Whether a value is hashable."""
    try:
        hash(x)
    except TypeError:
        return False
    return True
