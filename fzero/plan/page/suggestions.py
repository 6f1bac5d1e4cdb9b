"""Defines what a page shows besides the plan itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fzero.plan.render import TextTable


@dataclass(frozen=True)
class Suggestions:
    """What the caller of a page knows in addition to the plan.

    Attributes:
        title: what was planned, such as the name of a model and its devices; by default that of the plan.
        memory: bytes that the program of a rank may use, None if that is not known. `memory_source` says where the
            number comes from, such as "the budget".
        problems: why the step does not fit, line by line, and what would help.
        better: what would make the step faster, line by line.
        tables: alternatives that were planned.
        assumptions: what the plan assumes in addition to the rates of the device.
        code: the code to paste; by default it is made from the transforms of the program.
    """

    title: str = ""
    memory: int | None = None
    memory_source: str = ""
    problems: Sequence[str] = ()
    better: Sequence[str] = ()
    tables: Sequence[TextTable] = ()
    assumptions: Sequence[str] = ()
    code: str = ""
