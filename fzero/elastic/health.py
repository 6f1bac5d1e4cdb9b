"""What a run checks about itself (`fz.Health`), and what it has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fzero.arguments import python_numbers


class Finding(NamedTuple):
    """Something found wrong with a run.

    Attributes:
        kind: "slot": a kept state that changed in memory.
        batch: how many batches the run had seen.
        ranks: the ranks that it is about.
        text: what was logged.

    Example:
        >>> from fzero.elastic.health import Finding
        >>> Finding("slot", 300, (5,), "what rank 5 kept after 300 batches has changed in memory").ranks
        (5,)
    """

    kind: str
    batch: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Health:
    """The checks that a run does while it trains: `fz.run(main, health=fz.Health(...))`.

    Args:
        replicas: every so many batches `run.keep` compares the values that several ranks hold in common
            (`train.check_replicas`). None: never.

    Example:
        >>> import fzero as fz
        >>> fz.Health(replicas=1000).replicas
        1000
        >>> fz.run(lambda run: run.health, health=fz.Health(), device="cpu")
        []
    """

    replicas: int | None = None

    def __post_init__(self) -> None:
        vars(self).update(python_numbers(vars(self)))  # a frozen dataclass forbids plain assignment

    def problems(self) -> list[str]:
        """A line for each argument that is invalid."""
        if self.replicas is None or (type(self.replicas) is int and self.replicas >= 1):
            return []
        return [f"health: replicas={self.replicas!r}: must be a whole number of at least 1, or None"]
