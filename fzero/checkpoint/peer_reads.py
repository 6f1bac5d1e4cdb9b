"""Reads data that other ranks hold: each rank requests the bytes that it needs, and answers the requests of the
others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fzero.comm.collective_sequence import finish
from fzero.mesh import Mesh

WINDOW = 16 << 20  # bytes that a rank sends, and receives, at a time


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

        Communication: an exchange of what each rank requests from which other rank, and then these bytes, once, through
            gloo, from and to host memory.
        Memory: 16 MiB for sending, and the same for receiving.
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
        self._transfer([asked for asked, _ in gathered], outs, fill)
        self._done(sorted({name for _, names in gathered for name in names}))
        return list(problems)

    def _transfer(
        self,
        asked: Sequence[Mapping[int, Sequence[Asked]]],
        outs: Mapping[int, Sequence[torch.Tensor]],
        fill: Callable[[str, int, torch.Tensor], None],
    ) -> None:
        """Sends all requested bytes. `asked` has, for each rank, its requests by holder; `outs` is where those of this
        rank go, by holder."""
        sequence, rank, ranks = self.mesh.collective_sequence, self.mesh.rank, range(self.mesh.size)
        # Every rank knows all sizes, so each pair of ranks agrees on how many bytes pass between them in which round.
        sizes = {(r, h): sum(n for *_, n in requests) for r, of in enumerate(asked) for h, requests in of.items()}
        peers = Counter(end for pair, nbytes in sizes.items() if nbytes for end in enumerate(pair))
        if not peers:
            return
        # The rank with the most peers determines the share of all of them.
        share = max(1, WINDOW // max(peers.values()))
        mine = [asked[r].get(rank, ()) for r in ranks]
        sends = [_rounds([n for *_, n in requests], share) for requests in mine]
        receives = [_rounds([x.numel() for x in outs.get(r, ())], share) for r in ranks]
        sequence.begin("moving", "moves a state between ranks")
        for number in range(-(-max(sizes.values()) // share)):
            out, into = ([cuts[number] if number < len(cuts) else [] for cuts in of] for of in (sends, receives))
            counts = [[sum(n for *_, n in cuts) for cuts in of] for of in (out, into)]
            given, taken = (torch.empty(sum(n), dtype=torch.uint8, device="cpu") for n in counts)
            at = 0
            for r in ranks:
                for i, begin, n in out[r]:
                    file, offset, _ = mine[r][i]
                    fill(file, offset + begin, given[at : at + n])
                    at += n
            work = dist.all_to_all_single(taken, given, counts[1], counts[0], async_op=True)
            finish(work, lambda: sequence.look("step"))
            at = 0
            for r in ranks:
                for i, begin, n in into[r]:
                    outs[r][i][begin : begin + n].copy_(taken[at : at + n])
                    at += n


def _rounds(lengths: Sequence[int], share: int) -> list[list[tuple[int, int, int]]]:
    """Cuts consecutive pieces of these lengths into rounds of `share` bytes. Lists for each round which bytes of which
    pieces are in it: the piece, the offset in it, and their number."""
    out: list[list[tuple[int, int, int]]] = []
    room = 0
    for i, length in enumerate(lengths):
        at = 0
        while at < length:
            if not room:
                out.append([])
                room = share
            n = min(length - at, room)
            out[-1].append((i, at, n))
            at, room = at + n, room - n
    return out
