"""Small messages of ranks in the launcher's store: read by one rank at any time, without the others.

[Note: the open store] torchrun's store, and the one of rank 0, accept every connection that can reach their port, so a
message may have been written by a stranger. Therefore it is JSON whose type is checked, never code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fzero._utils.bounded_json import Malformed, dumped, parsed
from fzero.errors import DivergenceError

STRANGERS = "let only this run's hosts reach the port of its store (docs/guides/security.md)"


class Notes:
    """Messages of ranks in a store. Each rank writes its own messages, by topic, and reads those of the others.

    Args:
        store: the store of the ranks.
        name: the name of this exchange; unique in the store.
        rank: this rank.
    """

    def __init__(self, store: dist.Store, name: str, rank: int):
        self.store, self._name, self._rank = store, name, rank

    def key(self, about: int | str, rank: int | str) -> str:
        """Returns the key in the store of a rank's message."""
        return f"{self._name}/{about}/{rank}"

    def keys(self, about: int | str, ranks: Sequence[int]) -> list[str]:
        return [self.key(about, r) for r in ranks]

    def write(self, about: int | str, value: Any) -> None:
        """Publishes a JSON value."""
        self.store.set(self.key(about, self._rank), dumped(value))

    def come(self, about: int | str, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have written."""
        return self.store.check(self.keys(about, ranks))

    def read(self, about: int | str, ranks: Sequence[int], form: Any = Any) -> dict[int, Any]:
        """Returns the values that these ranks have written, by rank, checked against the type `form`.

        Raises:
            DivergenceError: messages of another type.
        """
        found, problems, keys = {}, [], self.keys(about, ranks)
        for rank, key, data in zip(ranks, keys, self.store.multi_get(keys) if keys else [], strict=True):
            try:
                found[rank] = parsed(data, form)
            except Malformed as error:
                problems.append(f"rank {rank}: {error}: {key}")
        if problems:
            raise DivergenceError("mesh", "messages in the store are not from this run", problems, STRANGERS)
        return found


def timed_out(seconds: float) -> str:
    """Returns the phrase for a rank that did not come within the given number of seconds."""
    return f"timed out after {seconds:g} s"
