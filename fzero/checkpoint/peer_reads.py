"""Reads data spread over the ranks: each rank asks for the bytes it needs and answers the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.comm.all_ranks import ALONE, world
from fzero.comm.point_to_point import exchange
from fzero.mesh import Mesh


class Piece(NamedTuple):
    """Bytes of a file that go into `out`, uint8[n]."""

    offset: int
    out: torch.Tensor
    leaf: str


Asked = tuple[str, int, int]
"""A file, where in it, and how many bytes."""


class Spread:
    """The bytes of an index that lie with ranks rather than in its directory.

    Args:
        mesh: whose ranks read together.
        owner, what: of errors: who reads, and what it reads.
        holder: the rank from which this one has the bytes of a file; its own are taken as they are.
        take: fills uint8[n] with the bytes of a file of this rank's from an offset on. What it raises on the way is
            everybody's error: what cannot be had is a line for `problems`, and the others get whatever is there.
        done: called when all ranks have what they asked for, with the leaves that anybody has asked for.
    """

    def __init__(
        self,
        mesh: Mesh,
        owner: str,
        what: str,
        holder: Callable[[str], int],
        take: Callable[[str, int, torch.Tensor], str | None],
        done: Callable[[Sequence[str]], object] = lambda names: None,
    ):
        self.mesh, self.owner, self.what = mesh, owner, what
        self._holder, self._take, self._done = holder, take, done
        self._ranks = world() if mesh.size > 1 else ALONE

    def fetch(self, jobs: Mapping[str, Sequence[Piece]]) -> list[str]:
        """Fills the pieces of each file; returns what is wrong with those that this rank gave or took. Every rank calls
        it.

        Communication: an exchange of what each asks of which, and then these bytes, once.
        """
        problems: dict[str, None] = {}
        asks: dict[int, list[Asked]] = {}
        outs: dict[int, list[torch.Tensor]] = {}

        def fill(file: str, offset: int, out: torch.Tensor) -> None:
            if (problem := self._take(file, offset, out)) is not None:
                problems[problem] = None

        for file, pieces in jobs.items():
            holder = self._holder(file)
            for piece in sorted(pieces, key=lambda p: p.offset):
                if holder == self.mesh.rank:
                    fill(file, piece.offset, piece.out)
                else:
                    asks.setdefault(holder, []).append((file, piece.offset, piece.out.numel()))
                    outs.setdefault(holder, []).append(piece.out)
        names = sorted({p.leaf for ps in jobs.values() for p in ps})
        everyones = self._ranks.exchange((asks, names), tuple[dict[int, list[Asked]], list[str]])
        sizes = {(h, r): sum(n for *_, n in asked) for r, (of, _) in enumerate(everyones) for h, asked in of.items()}

        def given(rank: int) -> _Pieces:
            asked: list[Asked] = everyones[rank][0][self.mesh.rank]
            ends = [n for *_, n in asked]
            return _Pieces(ends, lambda i, at, data: fill(asked[i][0], asked[i][1] + at, data))

        def taken(rank: int) -> _Pieces:
            into = outs[rank]
            return _Pieces([x.numel() for x in into], lambda i, at, data: into[i][at : at + data.numel()].copy_(data))

        exchange(self.mesh, sizes, given, taken)
        self._done(sorted({name for _, names in everyones for name in names}))
        return list(problems)


class _Pieces:
    """A stream of pieces of these lengths, one behind the other."""

    def __init__(self, lengths: Sequence[int], act: Callable[[int, int, torch.Tensor], object]):
        self._lengths, self._act = lengths, act
        self._piece = self._at = 0

    def move(self, data: torch.Tensor) -> None:
        while data.numel():
            n = min(data.numel(), self._lengths[self._piece] - self._at)
            self._act(self._piece, self._at, data[:n])
            data, self._at = data[n:], self._at + n
            if self._at == self._lengths[self._piece]:
                self._piece, self._at = self._piece + 1, 0
