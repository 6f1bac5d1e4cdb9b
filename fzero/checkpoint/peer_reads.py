"""Reads data that other ranks hold: each rank requests the bytes that it needs, and answers the requests of the
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.comm.point_to_point import exchange
from fzero.mesh import Mesh


class Piece(NamedTuple):
    """A range of bytes of a file that is to be read into `out`, uint8[n]."""

    offset: int
    out: torch.Tensor
    leaf: str


Asked = tuple[str, int, int]
"""A request: a file, an offset in it, and a number of bytes."""


class PeerReads:
    """Reads the bytes of an index that are held by ranks rather than stored in its directory.

    Args:
        mesh: the mesh whose ranks read together.
        owner, what: for errors: the function that reads, and what it reads.
        holder: returns the rank from which this rank gets the bytes of a file. If it is this rank, they are read
            directly.
        take: fills uint8[n] with the bytes of one of this rank's files from an offset on. If the bytes cannot be
            read, it returns a message, which is added to the problems, and the other ranks receive whatever is in the
            buffer. An exception that it raises becomes an error on all ranks.
        done: called when all ranks have the bytes that they requested, with the names of all tensors that any rank
            has requested.
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
        self._ranks = mesh.control

    def fetch(self, jobs: Mapping[str, Sequence[Piece]]) -> list[str]:
        """Fills the pieces of each file, and returns the problems with those that this rank sent or read itself. Every
        rank calls it.

        Communication: an exchange of what each rank requests from which other rank, and then these bytes, once.
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
        gathered = self._ranks.all_gather((asks, names), tuple[dict[int, list[Asked]], list[str]], self.owner)
        # bytes by (holder, requesting rank)
        sizes = {(h, r): sum(n for *_, n in asked) for r, (of, _) in enumerate(gathered) for h, asked in of.items()}

        def given(rank: int) -> _Pieces:
            asked: list[Asked] = gathered[rank][0][self.mesh.rank]
            ends = [n for *_, n in asked]
            return _Pieces(ends, lambda i, at, data: fill(asked[i][0], asked[i][1] + at, data))

        def taken(rank: int) -> _Pieces:
            into = outs[rank]
            return _Pieces([x.numel() for x in into], lambda i, at, data: into[i][at : at + data.numel()].copy_(data))

        # Every rank knows all sizes, so each pair of ranks agrees on how many bytes pass between them without asking
        # again.
        exchange(self.mesh, sizes, given, taken)
        self._done(sorted({name for _, names in gathered for name in names}))
        return list(problems)


class _Pieces:
    """A stream of consecutive pieces with these lengths."""

    def __init__(self, lengths: Sequence[int], act: Callable[[int, int, torch.Tensor], object]):
        self._lengths, self._act = lengths, act
        self._piece = self._at = 0

    def move(self, data: torch.Tensor) -> None:
        # The exchange moves buffers of a fixed size, whose boundaries do not coincide with those of the pieces.
        while data.numel():
            n = min(data.numel(), self._lengths[self._piece] - self._at)
            self._act(self._piece, self._at, data[:n])
            data, self._at = data[n:], self._at + n
            if self._at == self._lengths[self._piece]:
                self._piece, self._at = self._piece + 1, 0
