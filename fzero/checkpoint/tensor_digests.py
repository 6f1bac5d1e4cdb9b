"""Compares replicas: tensors that several ranks hold must be equal on all of them, bit for bit. Only digests are
communicated.

A tensor that is sharded over some axes has a replica on every rank with the same coordinates along those axes; a
tensor that is not sharded has one on every rank of the mesh.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.comm.control_group import all_gather_values
from fzero.errors import DivergenceError
from fzero.mesh import Mesh
from fzero.sharding.layout import Only, leaf_of

_COLUMNS = 4093
"""The number of 8-byte words in a row. The rows of a tensor are added up with weights. A prime, so that no usual width
of a tensor is a multiple of it."""
_ROWS = 32
"""The number of rows that are read at once: 1 MiB."""
_SHIFT = 29
"""The number of bits by which a word is shifted before it is combined with itself. It is no multiple of the size of an
element, so that flipping the signs of all elements of a word does not cancel out."""

Held = Mapping[str, tuple["torch.Tensor | str", tuple[str, ...]]]
"""By name: what this rank holds, a tensor or a text, and the axes over which it is sharded."""


def replicas_of(named: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor | str, tuple[str, ...]]]:
    """Returns the tensors of a state that are in memory and that other ranks hold too. A tensor without a layout is
    taken to be replicated on all ranks."""
    out: dict[str, tuple[torch.Tensor | str, tuple[str, ...]]] = {}
    for name, x in named.items():
        if not isinstance(x, torch.Tensor) or x.is_meta:
            continue
        tag = leaf_of(x)
        axes = tag[0].layout.apart if tag else ()
        if not tag or tag[1].axis_size(axes) < tag[1].size:
            out[name] = x, axes
    return out


def differing(
    held: Callable[[], Held],
    sizes: Mapping[str, int],
    size: int,
    gather: Callable[[Callable[[], Any], Any], list[Any]],
) -> list[str]:
    """Returns a message for each name whose value differs between two ranks: the same messages on every rank.

    Args:
        held: returns the values. The names should be the same on every rank; those that a rank lacks are reported as
            well.
        sizes: of the axes of the mesh.
        size: the number of ranks.
        gather: calls a function on every rank, and returns the results, which have the given type, of all ranks. If
            the function raises an error on one rank, all ranks raise one.

    Communication: one exchange of about a hundred bytes; if anything differs, another one of 50 bytes per name.
    """
    digests: dict[str, tuple[str, str]] = {}  # by name: the axes, and the digest, dtype and shape

    def digest_all() -> dict[str, str]:
        # One digest per group of axes, so that the first exchange is small. Digests of single tensors are exchanged
        # only if a group differs.
        groups: dict[str, list[bytes]] = defaultdict(list)
        for name, (x, axes) in held().items():
            told = f"{digest(x)} {tree.describe(x) if isinstance(x, torch.Tensor) else 'another'}"
            digests[name] = "/".join(axes), told
            groups["/".join(axes)].append(f"{name} {told}".encode())
        return {axes: _sha(*told) for axes, told in groups.items()}

    notes = gather(digest_all, dict[str, str])
    # By axes: each group of ranks that hold the same shards.
    everyone = [[*range(size)]]
    groups_of = {a: holders_of(sizes, tuple(a.split("/"))) if a else everyone for note in notes for a in note}
    if all(
        notes[rank].get(axes) == notes[ranks[0]].get(axes)
        for axes, found in groups_of.items()
        for ranks in found
        for rank in ranks
    ):
        return []
    tables = gather(lambda: digests, dict[str, tuple[str, str]])
    out = []
    for name in dict.fromkeys(n for table in tables for n in table):
        for ranks in groups_of[next(table[name][0] for table in tables if name in table)]:
            if odd := [rank for rank in ranks if tables[rank].get(name) != tables[ranks[0]].get(name)]:
                out.append(f"{name}: {_unlike(tables, name, odd, ranks[0])}")
    return out


def same(mesh: Mesh, owner: str, held: Callable[[], Held], fix: str) -> None:
    """Raises an error on every rank if values that must be the same differ between ranks.

    Those are the values that all ranks hold, or that all ranks with the same coordinates along the sharded axes
    hold.

    `held` returns them. It is called once, also on a mesh of one device. If it raises on one rank, the other ranks
    are told.

    Communication: that of `differing`. Memory and time: see `digest`.

    Raises:
        DivergenceError: naming the values that differ, and the ranks.
    """
    if mesh.size == 1:
        held()
        return

    def gather(make: Callable[[], Any], form: Any) -> list[Any]:
        return all_gather_values(mesh.control, owner, make, form=form, failure=DivergenceError)

    if problems := differing(held, mesh.axes, mesh.size, gather):
        raise DivergenceError(
            owner, "the ranks hold different values of tensors that must be the same on all ranks", problems, fix
        )


def _unlike(tables: Sequence[Mapping[str, tuple[str, str]]], name: str, ranks: Sequence[int], holder: int) -> str:
    """Describes the difference between the values of some ranks and that of one rank: in values, or in dtype and
    shape."""
    kinds = [table[name][1].partition(" ")[2] if name in table else "no such leaf" for table in tables]
    if all(kinds[rank] == kinds[holder] for rank in ranks):
        return f"not the same on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} as on rank {holder}"
    return ", ".join(f"{kinds[rank]} on rank {rank}" for rank in (*ranks, holder))


@torch.no_grad()
def digest(x: torch.Tensor | str) -> str:
    """Returns 16 hexadecimal digits for a tensor's shape, dtype and bits, or for a text.

    Tensors that differ in one element have different digests. So do tensors that differ in many elements, including
    only in signs or in order, except with a probability of about 2**-30: each row has a random weight, and the high
    bits of a word also affect its low bits.

    Memory: 8 MiB, also for a tensor that is not contiguous, plus 1/4000 of the tensor. Time: about 6 GB/s per core;
        a tenth of that for a tensor that is not contiguous.
    """
    if isinstance(x, str):
        return _sha(x.encode())
    what = f"{tuple(x.shape)} {x.dtype}".encode()
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    width = _COLUMNS * 8 // x.element_size()  # elements of a row
    rows = x.numel() // width
    generator = torch.Generator("cpu").manual_seed(0)
    # Odd weights are invertible modulo 2**64, so the product with a weight loses no change of a word.
    # int64[rows, 1]
    weights = (torch.randint(-(2**63), 2**63 - 1, (rows, 1), generator=generator, device="cpu") | 1).to(x.device)
    sums = torch.zeros(_COLUMNS, dtype=torch.int64, device=x.device)
    for at in range(0, rows, _ROWS):
        to = min(at + _ROWS, rows)
        # int64[at most _ROWS, _COLUMNS]
        words = _bytes(x, at * width, to * width).view(torch.int64).view(-1, _COLUMNS)
        # a shift of int64 repeats the highest bit
        folded = (words >> _SHIFT).bitwise_and_(2 ** (64 - _SHIFT) - 1).bitwise_xor_(words)
        sums += folded.mul_(weights[at:to]).sum(0)  # modulo 2**64
    rest = _bytes(x, rows * width, x.numel())
    return _sha(what, *(part.cpu().numpy().tobytes() for part in (sums, rest)))


@torch.no_grad()
def word_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's 8-byte words modulo 2**64, on the tensor's device: int64[]. Trailing zeros do not
    change it.

    It detects every single flipped bit, and any other random change except with a probability of 2**-64. It does not
    reliably detect elements that have changed places. Memory: 1 MiB; for a tensor that is not contiguous, a copy. Time:
    about six times as fast as `digest`.
    """
    data = x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    # Bytes can be viewed as int64 only at multiples of 8; otherwise they are copied, in pieces to bound the memory.
    aligned = not (data.data_ptr() % 8 or data.storage_offset() % 8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in (data[:whole],) if aligned else data[:whole].split(_ROWS * _COLUMNS * 8):
        total += (part if aligned else part.clone()).view(torch.int64).sum()
    if whole < data.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=x.device)
        rest[: data.numel() - whole] = data[whole:]
        total += rest.view(torch.int64)[0]
    return total


def _bytes(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns the bytes of a range of a tensor's elements, as a view if they are contiguous and aligned to 8-byte
    words, else as a copy."""
    if x.is_contiguous():
        part = x.view(-1)[start:stop].view(torch.uint8)
    else:
        # Viewed as integers of the same size: indexing is not implemented for every dtype, such as the 8-bit
        # floating-point ones.
        part = x.view(_OF_SIZE[x.element_size()]).take(torch.arange(start, stop, device=x.device)).view(torch.uint8)
    return part.clone() if part.data_ptr() % 8 or part.storage_offset() % 8 else part


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sha(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def holders_of(sizes: Mapping[str, int], axes: tuple[str, ...], only: Only | None = None) -> list[list[int]]:
    """Returns, for every shard of a tensor that is sharded over these axes, the ranks that hold it.

    `sizes` are those of the axes of the mesh; `only` is the stage that has the tensor.
    """
    cpu = torch.device("cpu")
    out: list[list[int]] = [[] for _ in range(math.prod(sizes[axis] for axis in axes))]
    for rank in range(math.prod(sizes.values())):
        # The mesh as that rank has it, for its index along axes.
        there = Mesh(dict(sizes), rank, cpu)
        if only is None or there.index(only.axis) == only.index:
            out[there.index(axes)].append(rank)
    return out
