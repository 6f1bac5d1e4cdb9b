"""Chooses which buffers are allocated separately from the arena. The bytes of the arena exist during the whole step, so
if it is large for the sake of a few ops, these bytes are idle at all other times.

At every op, an arena costs the largest number of bytes that are live in it at once; a separate allocation costs its
bytes only while it is live. So the peak of a step is the size of the arena plus the largest number of bytes that are
live outside it at once: state, results of subgraphs, temporaries. Buffers that are allocated separately should leave
few holes in the allocator's memory. These are shards of gradients, which are allocated one after the other and stay,
and buffers of which there are only one or two, such as the gathers and gradients of an embedding and a head. The
buffers of blocks, which come and go, share the arena. Equal buffers are all allocated separately or none, and as few as
possible such that the peak is within `NEAR` of the lowest that this choice can achieve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fzero.compiler.arena import Region
from fzero.compiler.packing import Bytes, taken

NEAR = 0.01
SMALLEST = 1 << 16  # bytes: smaller buffers stay in the arena
STAYS = "shards"  # the kind of buffers that are allocated one after the other and stay
FEW = 2  # the largest number of buffers of another kind and one size that may be separate
GROUPS = 8  # the number of largest groups of equal buffers that are considered, in all combinations


def apart(regions: Sequence[Region], beside: Bytes, resting: int) -> list[Region]:
    """Returns the buffers of an arena that are better allocated separately.

    Args:
        regions: the buffers of the device's arena.
        beside: the bytes that are live at each op outside the arena and the state.
        resting: the bytes of the state.
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
    # [combinations, groups]: bit i of a combination says whether group i is separate.
    chosen = np.array([[n >> i & 1 for i in range(len(keys))] for n in range(1 << len(keys))])
    # [combinations, ops]: the bytes that are live in separate allocations.
    moved = chosen @ np.stack([curves[key] for key in keys])
    peaks = (beside + moved).max(axis=1) + (total - moved).max(axis=1) + resting
    counts = chosen @ np.array([len(groups[key]) for key in keys])
    near = np.flatnonzero(peaks <= (1 + NEAR) * peaks.min())
    best = min(near, key=lambda n: (counts[n], peaks[n]))
    return [r for key, take in zip(keys, chosen[best], strict=True) if take for r in groups[key]]
