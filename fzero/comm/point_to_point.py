"""Sends bytes between pairs of ranks, outside of programs, through two buffers of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from fzero.comm.collective_sequence import finish

if TYPE_CHECKING:
    from fzero.mesh import Mesh

WINDOW = 16 << 20  # bytes that a rank sends, and receives, at a time


class Stream(Protocol):
    """The bytes that are sent from one rank to another, in order."""

    def move(self, data: torch.Tensor) -> None:
        """On the sender, fills `data` with the next bytes of the stream. On the receiver, consumes `data`."""
        ...


def exchange(
    mesh: Mesh,
    sizes: Mapping[tuple[int, int], int],
    sends: Callable[[int], Stream],
    receives: Callable[[int], Stream],
) -> None:
    """Transfers streams of bytes between pairs of ranks, all pairs at the same time.

    Args:
        mesh: the mesh whose ranks call this together.
        sizes: the number of bytes of each stream, by (sender, receiver); the same on every rank.
        sends, receives: return this rank's stream to, or from, another rank.

    Communication: each stream once, through gloo, from and to host memory.
    Memory: 16 MiB for sending, and the same for receiving.
    """
    sizes = {pair: n for pair, n in sizes.items() if n and pair[0] != pair[1]}
    if not sizes:
        return
    peers: dict[tuple[str, int], int] = {}
    for sender, receiver in sizes:
        for end in (("from", sender), ("to", receiver)):
            peers[end] = peers.get(end, 0) + 1
    # Computed from the rank with the most peers, so that all ranks get the same share and the same number of rounds.
    share = max(1, WINDOW // max(peers.values()))
    goes = {r: (sends(r), n) for r in range(mesh.size) if (n := sizes.get((mesh.rank, r), 0))}
    comes = {r: (receives(r), n) for r in range(mesh.size) if (n := sizes.get((r, mesh.rank), 0))}
    buffers = [
        torch.empty(sum(min(share, n) for _, n in streams.values()), dtype=torch.uint8, device="cpu")
        for streams in (goes, comes)
    ]
    mesh.collective_sequence.begin("moving", "moves a state between ranks")
    for begin in range(0, max(sizes.values()), share):
        counts = [
            [min(share, max(0, streams[r][1] - begin)) if r in streams else 0 for r in range(mesh.size)]
            for streams in (goes, comes)
        ]
        out, into = (buffer[: sum(count)] for buffer, count in zip(buffers, counts, strict=True))
        for r, part in enumerate(out.split(counts[0])):
            if part.numel():
                goes[r][0].move(part)
        work = dist.all_to_all_single(into, out, counts[1], counts[0], async_op=True)
        finish(work, lambda: mesh.collective_sequence.look("step"))
        for r, part in enumerate(into.split(counts[1])):
            if part.numel():
                comes[r][0].move(part)
