"""Replicas compared: what several ranks hold in common must be the same on all of them, bit for bit. Digests travel, never values.

A leaf sharded over some axes has a replica on every rank with the same place along those; a whole leaf on every rank of the mesh.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero.layout import leaf_of
from fzero.mesh import Mesh

_COLUMNS = 4093
"""Into how many sums a tensor is folded: a prime, so that rows of any usual width that change places change the sums."""

Held = Mapping[str, tuple["torch.Tensor | str", tuple[str, ...]]]
"""By name: what this rank holds, a tensor or a text, and the axes over which it is sharded."""


def replicas_of(named: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor | str, tuple[str, ...]]]:
    """Of the tensors of a state those that are in memory and that another rank has too. One without a layout is taken to be whole."""
    out: dict[str, tuple[torch.Tensor | str, tuple[str, ...]]] = {}
    for name, x in named.items():
        if not isinstance(x, torch.Tensor) or x.is_meta:
            continue
        tag = leaf_of(x)
        axes = tag[0].layout.axes if tag else ()
        if not axes or tag[1].axis_size(axes) < tag[1].size:  # type: ignore[index]
            out[name] = x, axes
    return out


def digested(held: Held) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The digest of each, in place of what it is of. What a rank raises here the others must hear of, before they exchange."""
    return {name: (digest(x), axes) for name, (x, axes) in held.items()}


def differing(
    digests: Mapping[str, tuple[str, tuple[str, ...]]], sizes: Mapping[str, int], size: int, exchange: Callable[[Any], list[Any]]
) -> list[str]:
    """A line for each name of which two ranks hold different values: the same lines on every rank.

    Args:
        digests: as `digested` makes them. The same names on every rank, or those that a rank lacks are among the lines.
        sizes: of the axes of the mesh.
        size: number of ranks.
        exchange: returns every rank's object, in order of rank.

    Communication: one exchange of about a hundred bytes; if anything differs another of 30 bytes a name.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name, (_, axes) in digests.items():
        groups["/".join(axes)].append(name)
    notes = exchange({axes: _sha(*(f"{n} {digests[n][0]}".encode() for n in names)) for axes, names in groups.items()})
    first = {axes: _first_holders(axes, sizes, size) for note in notes for axes in note}
    if all(notes[rank].get(axes) == notes[holder].get(axes) for axes, holders in first.items() for rank, holder in enumerate(holders)):
        return []
    tables = exchange({n: (axes, digests[n][0]) for axes, names in groups.items() for n in names})
    out = []
    for name in dict.fromkeys(n for table in tables for n in table):
        others: dict[int, list[int]] = defaultdict(list)
        for rank, holder in enumerate(first[next(table[name][0] for table in tables if name in table)]):
            if tables[rank].get(name) != tables[holder].get(name):
                others[holder].append(rank)
        out += [f"{name}: not the same on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} as on rank {holder}" for holder, ranks in others.items()]
    return out


@torch.no_grad()
def digest(x: torch.Tensor | str) -> str:
    """16 hexadecimal digits of a tensor's shape, dtype and bits, or of a text. Two tensors that differ in one element have two."""
    if isinstance(x, str):
        return _sha(x.encode())
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rows = words.numel() // _COLUMNS
    sums = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)  # modulo 2**64
    rest = flat[rows * _COLUMNS * 8 :]
    return _sha(f"{tuple(x.shape)} {x.dtype}".encode(), *(part.cpu().numpy().tobytes() for part in (sums, rest)))


def _sha(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _first_holders(axes: str, sizes: Mapping[str, int], size: int) -> list[int]:
    """For every rank the first that holds the same of what is sharded over these axes."""
    if not axes:
        return [0] * size
    found: dict[int, int] = {}
    places = [Mesh(dict(sizes), rank, torch.device("cpu")).index(tuple(axes.split("/"))) for rank in range(size)]
    return [found.setdefault(place, rank) for rank, place in enumerate(places)]
