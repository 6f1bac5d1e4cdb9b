"""Names the values of a program: Python identifiers, each assigned once, none of which shadows another name.

A program is Python code that runs. A user may call a parameter `class`, `step` or `0`, and a block `wait`. A name in
the program must be an identifier, and must not shadow an argument, a primitive or a subgraph that a later op calls.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable

from fzero.ir.ops import OPS
from fzero.sharding.layout import COMPUTE

RESERVED = frozenset(
    {
        *keyword.kwlist,
        *("train", "evaluate", "step", "params", "opt_state", "key", "extras", "batch", "micro", "range"),
        *("pool", "apart", "replicas"),
        *(word for row in OPS.values() for word in row.words),
    }
)
"""Names that the text of a program already uses, in addition to those of its ops: keywords, its arguments, and its
primitives.
"""


class Names:
    """Generates names that are assigned once."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        """Returns `name`, made an identifier first, or if that is taken the next free `name_v2`, `name_v3`, …."""
        if not name.isidentifier():
            name = "_".join(p for p in "".join(c if c.isascii() and c.isalnum() else "_" for c in name).split("_") if p)
            name = name if name.isidentifier() else f"x_{name}"
        name = f"{name}_" if name in RESERVED or (name in OPS and OPS[name].in_text) else name
        new, number = name, self._next.get(name, 1)
        while new in self._taken:
            number += 1
            new = f"{name}_v{number}"
        self._next[name] = number
        self._taken.add(new)
        return new

    def numbered(self, name: str) -> str:
        """Returns `name_0`, `name_1`, … on successive calls."""
        number = self._counts[name] = self._counts.get(name, -1) + 1
        return self(f"{name}_{number}")


def identifier(path: str) -> str:
    """Returns an identifier for a path: `layers_3_qkv` for `params['layers'][3]['qkv']`."""
    text = "".join(c if c.isalnum() else "_" for c in path.removeprefix("params").removeprefix(COMPUTE))
    return "_".join(part for part in text.split("_") if part) or "leaf"
