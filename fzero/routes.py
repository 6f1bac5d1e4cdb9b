"""Says which bytes of a value go to which rank along an axis, where a rank's part of a state is sent to others."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Route(NamedTuple):
    """Ranks of an axis, by their places along it.

    With `group` 0 a value goes whole to the rank `shift` further on. Else ranks `shift` apart make groups of so many,
    and each of the others in its group gets an even part of it, in their order; the last may get fewer bytes.

    Example:
        >>> Route(4, 1).shares(3, 100)
        ((0, 100), (0, 0), (0, 0), (0, 0))
        >>> Route(4, 1, 4).shares(1, 100)
        ((0, 34), (0, 0), (34, 68), (68, 100))
    """

    size: int
    shift: int
    group: int = 0

    def members(self, at: int) -> tuple[int, ...]:
        """The places of the ranks of a group, one of which is `at`, in their order."""
        if not self.group:
            return ((at - self.shift) % self.size, at)
        row, column = divmod(at, self.shift)
        first = row // self.group * self.group
        return tuple((first + i) * self.shift + column for i in range(self.group))

    def receivers(self, at: int) -> tuple[int, ...]:
        """The places of the ranks that one sends to."""
        if not self.group:
            return ((at + self.shift) % self.size,)
        return tuple(m for m in self.members(at) if m != at)

    def piece(self, nbytes: int) -> int:
        """The most bytes of a value of so many that one rank gets."""
        return -(-nbytes // (self.group - 1)) if self.group else nbytes

    @functools.cache  # noqa: B019
    def shares(self, at: int, nbytes: int) -> tuple[tuple[int, int], ...]:
        """By place, where the bytes begin and end that the rank `at` sends there of a value."""
        out = [(0, 0)] * self.size
        if not self.group:
            out[(at + self.shift) % self.size] = 0, nbytes
        else:
            piece = self.piece(nbytes)
            for i, other in enumerate(self.receivers(at)):
                out[other] = min(i * piece, nbytes), min((i + 1) * piece, nbytes)
        return tuple(out)
