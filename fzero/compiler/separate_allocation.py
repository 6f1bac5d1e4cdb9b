"""Chooses which regions lie apart from the arena: its bytes are there all along, so what makes it large for a few
lines' sake is idle at all others.

An arena costs the most that lies in it at once, at every line; what lies apart costs its bytes while it is alive. So
the peak of a step is the arena, and the most that is alive at once beside it: state, results of functions, temporaries.
What may lie apart leaves few holes in an allocator's memory. That are shards of gradients, which come one after the
other and stay, and what is there once or twice, as an embedding's and a head's gathers and gradients. The regions of
blocks, which come and go, share the arena. Equal regions lie apart together, and as few as bring the peak within `NEAR`
of the least that this choice can bring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fzero.compiler.arena import Region
from fzero.compiler.packing import Bytes, taken

NEAR = 0.01
SMALLEST = 1 << 16  # bytes: smaller regions lie in the arena
STAYS = "shards"  # the kind of regions that come one after the other and stay
FEW = 2  # regions of another kind and size that may lie apart
GROUPS = 8  # the largest groups of equal regions are looked at, in all combinations


def apart(regions: Sequence[Region], beside: Bytes, resting: int) -> list[Region]:
    """The regions of an arena that are better allocated.

    Args:
        regions: of the device's arena.
        beside: what is alive at each line beside the arena and the state.
        resting: bytes of the state.
    """
    groups: dict[tuple[str, int], list[Region]] = defaultdict(list)
    for region in regions:
        if not region.fixed and region.nbytes >= SMALLEST:
            groups[region.kind, region.nbytes].append(region)
    groups = {key: group for key, group in groups.items() if key[0] == STAYS or len(group) <= FEW}
    if not groups:
        return []
    num = len(beside)
    total = taken((r.item for r in regions), num)
    curves = {key: taken((r.item for r in group), num) for key, group in groups.items()}
    keys = sorted(curves, key=lambda key: (-int(curves[key].max()), key))[:GROUPS]
    chosen = np.array([[n >> i & 1 for i in range(len(keys))] for n in range(1 << len(keys))])
    moved = chosen @ np.stack([curves[key] for key in keys])
    peaks = (beside + moved).max(axis=1) + (total - moved).max(axis=1) + resting
    counts = chosen @ np.array([len(groups[key]) for key in keys])
    near = np.flatnonzero(peaks <= (1 + NEAR) * peaks.min())
    best = min(near, key=lambda n: (counts[n], peaks[n]))
    return [r for key, take in zip(keys, chosen[best], strict=True) if take for r in groups[key]]
