"""Determines which samples each step of a run reads, on any mesh, and where a run resumes.

[Note: which sample when] A run sees an endless sequence of samples: sample `g` is the one numbered `g % num_samples`
of epoch `g // num_samples`, in that epoch's own order. Step `s` takes samples `[s * batch, (s + 1) * batch)`, of
which rank `r` of `size` takes the `r`-th of `size` equal parts. An epoch's order is a keyed permutation, computed
sample by sample, so nothing is shuffled, stored or restored. It is a Feistel network over the smallest `2**(2 * half)
>= num_samples`, applied again to results outside the range. This is cycle walking (Black and Rogaway, Ciphers with
arbitrary finite domains, CT-RSA 2002).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from fzero import random
from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroValueError
from fzero.tree import describe

_DIGESTED = (1 << 16, 256)  # elements per piece, and number of pieces, from which the digest of a tensor is computed

# Rounds of the Feistel network. Four rounds look random to a cryptographer if the halves are wide, but small datasets
# have narrow halves.
_ROUNDS = 8


class Steps:
    """Data whose batch for any step can be read at any time, on any mesh. Each subclass defines what its samples
    are.
    """

    num_samples: int

    def __init__(self, where: str, batch: int, seed: int, skip: Iterable[tuple[int, int]], **sizes: Any):
        """Checks the arguments that all kinds of data have.

        Args:
            where: the public name that errors begin with.
            batch: number of samples in the global batch of a step.
            seed: seed for the order of the samples.
            skip: half-open ranges of data steps to leave out.
            sizes: other arguments that must be integers of at least 1, by name.

        Raises:
            FzeroValueError: listing everything that is wrong.
        """
        problems = [] if counts(seed, 0) and seed < 1 << 64 else [f"seed={seed!r} is not an integer below 2**64"]
        problems += [
            f"{name}={value!r} is not an integer of at least 1"
            for name, value in {**sizes, "batch": batch}.items()
            if not counts(value)
        ]
        self.skip = tuple(sorted((a, b) for a, b in skip))
        problems += [f"skip: ({a}, {b}) is not a range of steps" for a, b in self.skip if not 0 <= a < b]
        problems += [
            f"skip: {x} and {y} overlap" for x, y in zip(self.skip, self.skip[1:], strict=False) if x[1] > y[0]
        ]
        if problems:
            fix = "give sizes of at least 1 and disjoint ranges (first, last + 1)"
            raise FzeroValueError(where, "cannot make batches", problems, fix)
        self.batch, self.seed = batch, seed

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps until every sample was seen once. It is rarely an integer, because a batch may begin in one
        epoch and end in the next.
        """
        return self.num_samples / self.batch

    @plain_numbers
    def batch_at(self, step: int, rank: int = 0, size: int = 1) -> Any:
        """Returns the batch of rank `rank` of `size` at `step`: its samples of the global batch, which is the same
        for every size.

        Args:
            step: counted from 0.
            rank, size: position of this process among those that share the batch, e.g. `mesh.index("data"),
                mesh.axis_size("data")`.

        Raises:
            FzeroValueError: for a size that does not divide the batch, a rank outside the size, or a negative step.
        """
        problems = [f"step={step!r} is not an integer of at least 0"] if not counts(step, 0) else []
        if not counts(size):
            problems.append(f"size={size!r} is not an integer of at least 1")
        elif not (counts(rank, 0) and rank < size):
            problems.append(f"rank={rank!r} is not one of 0 to {size - 1}")
        if problems:
            fix = "count steps and ranks from 0"
            raise FzeroValueError("data.batch_at", "the batch does not exist", problems, fix)
        if self.batch % size:
            fix = (
                f"make batch a multiple of {size}, e.g. {-(-self.batch // size) * size}, or use a number of ranks that "
                f"divides {self.batch}"
            )
            what = f"a batch of {self.batch} samples is not divisible by {size} ranks"
            raise FzeroValueError("data.batch_at", what, fix=fix)
        rows = self.batch // size
        return self._rows(self.order(self.data_step(step) * self.batch + rank * rows, rows), step, rank)

    def _rows(self, samples: list[int], step: int, rank: int) -> Any:
        """Returns a batch of samples, given their numbers. The step and the rank are used for random numbers."""
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """Returns the facts that determine the batch of every step, except `skip`."""
        raise NotImplementedError

    def order(self, first: int, count: int) -> list[int]:
        """Returns the numbers of samples `first` to `first + count - 1` of the run, see
        [Note: which sample when].
        """
        out: list[int] = []
        while count:
            epoch, position = divmod(first, self.num_samples)
            n = min(count, self.num_samples - position)
            out += self._in_epoch(torch.arange(position, position + n), epoch).tolist()
            first, count = first + n, count - n
        return out

    def _in_epoch(self, positions: torch.Tensor, epoch: int) -> torch.Tensor:
        return _permute(positions, self.num_samples, _round_keys(self.seed, epoch))

    def data_step(self, step: int) -> int:
        """Returns the step whose data `step` reads, counted as if nothing were skipped."""
        for first, stop in self.skip:
            # The ranges are sorted and are ranges of data steps, so a step that one range has moved may fall into the
            # next.
            if step >= first:
                step += stop - first
        return step

    @plain_numbers
    def cursor(self, step: int) -> dict[str, Any]:
        """Returns the cursor to save with a state at `step`: the position in the data, and the identity and order of
        the data. It can be stored as JSON.

        Example:
            >>> from fzero.data import TokenDataset
            >>> data = TokenDataset(torch.arange(17), seq=4, batch=2)
            >>> data.resume(data.cursor(3))
            3
        """
        if not counts(step, 0):
            what = f"step={step!r} is not an integer of at least 0"
            raise FzeroValueError("data.cursor", what, fix="give the number of the state's step")
        return {"next": self.data_step(step), **self._identity()}

    @plain_numbers
    def resume(self, cursor: Any) -> int:
        """Returns the step whose batch is the next one after those that a `cursor` has seen. `skip` may have changed,
        but nothing else that determines which batch is next.

        Raises:
            FzeroValueError: if the cursor belongs to other data, or to another order of the data, listing every
                difference.
        """
        mine = self._identity()
        if not isinstance(cursor, Mapping) or not mine.keys() | {"next"} <= cursor.keys():
            fix = "save one with the state: fz.checkpoint.save(..., meta={'data': dataset.cursor(step)})"
            raise FzeroValueError("data.resume", f"{describe(cursor)} does not say which batch is next", fix=fix)
        if type(cursor["next"]) is not int or cursor["next"] < 0:
            raise FzeroValueError(
                "data.resume",
                f"next is {cursor['next']!r}, not the number of a batch",
                fix="give a cursor as data.cursor(step) made it",
            )
        others = {
            n: (cursor[n], now) for n, now in mine.items() if type(cursor[n]) is not type(now) or cursor[n] != now
        }
        problems = [f"{name}: saved with {then!r}, now {now!r}" for name, (then, now) in others.items()]
        if problems:
            fix = (
                "give the data, sizes and seed that it was saved with (python_source differs "
                "between versions of Python)"
            )
            raise FzeroValueError(
                "data.resume", "the run was saved with different data, or data in a different order", problems, fix
            )
        step = position = cursor["next"]
        for first, stop in self.skip:
            # Skipped ranges before the position were not steps of the run.
            step -= max(0, min(position, stop) - first)
        return step


def digest(tensor: torch.Tensor) -> str:
    """Returns a SHA-256 digest of the elements of a contiguous tensor as they are stored; for more than 16 M
    elements, of 256 evenly spaced pieces of 64 Ki elements.
    """
    sha, (piece, count), flat = hashlib.sha256(str(tensor.dtype).encode()), _DIGESTED, tensor.reshape(-1)
    starts = range(0, len(flat), piece)
    if len(starts) > count:
        starts = [i * (len(flat) - piece) // (count - 1) for i in range(count)]
    for start in starts:
        sha.update(flat[start : start + piece].contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def _permute(index: torch.Tensor, size: int, keys: tuple[int, ...]) -> torch.Tensor:
    """Returns the image of each element of an int64 tensor under a keyed permutation of `range(size)`."""
    # 2**(2 * half) is the smallest even power of two that is at least `size`: both halves have as many bits.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, out = (1 << half) - 1, index.clone()
    outside = torch.arange(len(index))
    while len(outside):  # at most 3 of 4 fall outside the range, so this ends soon
        left, right = out[outside] >> half, out[outside] & mask
        for k in keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        out[outside] = (left << half) | right
        outside = outside[out[outside] >= size]
    return out


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Computes a bijection of [0, 2**32) in which every input bit affects the result. Its factors are below 2**31, so
    no product overflows int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(random.bits(random.fold_in(random.key(seed), epoch), (_ROUNDS,)).tolist())


def counts(value: Any, least: int = 1) -> bool:
    """Returns whether a value is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
