"""Defines the checks that a run makes while it trains (`fz.Health`), and what they find (`Finding`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fzero._utils.arguments import python_numbers
from fzero._utils.deprecation import attribute_alias, keyword_aliases


class Finding(NamedTuple):
    """A problem that a check has found in a run.

    Attributes:
        kind: "slot": a state kept in memory has changed since it was written.
        batch: the number of batches that the state had seen.
        ranks: the ranks that the finding is about.
        text: the message that was logged.

    Example:
        >>> from fzero.elastic.health import Finding
        >>> Finding("slot", 300, (5,), "what rank 5 kept after 300 batches has changed in memory").ranks
        (5,)
    """

    kind: str
    batch: int
    ranks: tuple[int, ...]
    text: str


@keyword_aliases("fz.Health", replicas="check_replicas_every")
@dataclass(frozen=True)
class Health:
    """The checks that a run makes while it trains: `fz.run(main, health=fz.Health(...))`.

    Args:
        check_replicas_every: `run.commit` compares the values that several ranks hold replicas of
            (`train.check_replicas`) every `check_replicas_every` batches. None: never.

    Example:
        >>> import fzero as fz
        >>> fz.Health(check_replicas_every=1000).check_replicas_every
        1000
        >>> fz.run(lambda run: run.health, health=fz.Health(), device="cpu")
        []
    """

    check_replicas_every: int | None = None

    replicas = attribute_alias("Health", "replicas", "check_replicas_every")

    def __post_init__(self) -> None:
        vars(self).update(python_numbers(vars(self)))  # a frozen dataclass forbids plain assignment

    def problems(self) -> list[str]:
        """Returns one message for each invalid argument."""
        every = self.check_replicas_every
        if every is None or (type(every) is int and every >= 1):
            return []
        return [f"health: check_replicas_every={every!r}: must be a whole number of at least 1, or None"]
