"""Samples batches of tokens from a file, as a pure function of the step.

[Note: which window when] The corpus is cut in windows of `seq + 1` tokens, `seq` apart, so that every token but the
first is a target once an epoch. The run sees an endless sequence of samples: sample `g` is the window number `g %
num_windows` of epoch `g // num_windows`, in that epoch's own order. Step `s` takes samples `[s * batch, (s + 1) *
batch)`, of which rank `r` of `size` takes the `r`-th of `size` equal parts. An epoch's order is a keyed permutation
that is computed forwards, window by window, so nothing is shuffled, stored or restored: a Feistel network over the
smallest `2**(2 * half) >= num_windows`, applied again to what falls outside (cycle walking; Black and Rogaway, Ciphers
with arbitrary finite domains, CT-RSA 2002).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fzero import random
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.tree import describe

DTYPES = (torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64)
"""What tokens can be stored as."""

_DIGESTED = (1 << 16, 256)  # tokens a piece, pieces: what of a corpus its digest is made of

# Of the Feistel network: four look random to a cryptographer if halves are wide, small corpora have narrow ones.
_ROUNDS = 8


class TokenDataset:
    """A corpus of tokens, of which the batch of any step can be asked for at any time, on any mesh.

    Args:
        tokens: a 1-D integer tensor or array, or the path of a flat binary file of them, which is mapped, not read.
        seq: tokens a row; a window is one longer, for the targets are the inputs shifted by one.
        batch: rows of the *global* batch of a step.
        seed: of the order of the windows.
        dtype: of the tokens in the file; needed for a path.
        skip: half-open ranges of steps of data to leave out, numbered as if nothing were skipped, e.g. `[(1200, 1250)]`
            after the loss went wrong there: steps before 1200 stay what they were, step 1200 takes the data of step
            1250.

    Memory: the tokens given; of a file, what the operating system keeps of it in its page cache.

    Raises:
        FzeroValueError, FzeroTypeError: with everything that is wrong: a corpus shorter than one window, not 1-D, not
            integers; a file that is missing or not a whole number of tokens; overlapping ranges to skip.

    Example:
        >>> data = TokenDataset(torch.arange(17), seq=4, batch=2)
        >>> data.num_windows, data.steps_per_epoch
        (4, 2.0)
        >>> tokens, targets = data.batch_at(0)
        >>> tokens.shape, bool((targets == tokens + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(
        self,
        tokens: Any,
        *,
        seq: int,
        batch: int,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        skip: Iterable[tuple[int, int]] = (),
    ):
        random.key(seed)  # complains about what is not a seed
        problems = [
            f"{name}={value!r} is not a whole number of at least 1"
            for name, value in (("seq", seq), ("batch", batch))
            if not _counts(value)
        ]
        self.skip = tuple(sorted((a, b) for a, b in skip))
        problems += [f"skip: ({a}, {b}) is not a range of steps" for a, b in self.skip if not 0 <= a < b]
        problems += [
            f"skip: {x} and {y} overlap" for x, y in zip(self.skip, self.skip[1:], strict=False) if x[1] > y[0]
        ]
        if problems:
            raise FzeroValueError(
                message(
                    "data.TokenDataset",
                    "cannot make batches",
                    problems,
                    "give sizes of at least 1 and disjoint ranges (first, last + 1)",
                )
            )
        self.tokens = (
            _map_file(Path(tokens), dtype) if isinstance(tokens, (str, os.PathLike)) else _as_tensor(tokens, dtype)
        )
        self.seq, self.batch, self.seed = seq, batch, seed
        self.num_windows = (len(self.tokens) - 1) // seq
        if self.num_windows < 1:
            fix = (
                f"use at least {seq + 1} tokens or seq={len(self.tokens) - 1}"
                if len(self.tokens) > 1
                else f"use at least {seq + 1} tokens"
            )
            raise FzeroValueError(
                message(
                    "data.TokenDataset",
                    "the corpus is shorter than one window",
                    [f"{len(self.tokens)} tokens, a window is seq + 1 = {seq + 1}"],
                    fix,
                )
            )

    @property
    def steps_per_epoch(self) -> float:
        """Steps until every window was seen once; seldom whole, as a batch may begin in one epoch and end in the
        next."""
        return self.num_windows / self.batch

    def batch_at(self, step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of rank `rank` of `size` at `step`: its rows of the global batch, which is the same for every size.

        Args:
            step: counted from 0.
            rank, size: of this process among those that share the batch, e.g. `mesh.index("data"),
                mesh.axis_size("data")`.

        Returns: `(tokens, targets)`, int64[batch / size, seq] each.

        Raises:
            FzeroValueError: a size that does not divide the batch, a rank outside the size, a negative step.
        """
        problems = [f"step={step!r} is not a whole number of at least 0"] if not _counts(step, 0) else []
        if not _counts(size):
            problems.append(f"size={size!r} is not a whole number of at least 1")
        elif not (_counts(rank, 0) and rank < size):
            problems.append(f"rank={rank!r} is not one of 0 to {size - 1}")
        if problems:
            raise FzeroValueError(
                message("data.batch_at", "there is no such batch", problems, "count steps and ranks from 0")
            )
        if self.batch % size:
            fix = (
                f"make batch a multiple of {size}, e.g. {-(-self.batch // size) * size}, or use a number of ranks that "
                f"divides {self.batch}"
            )
            raise FzeroValueError(
                message(
                    "data.batch_at", f"a batch of {self.batch} rows cannot be shared by {size} ranks alike", fix=fix
                )
            )
        rows = self.batch // size
        windows = self.windows(self.data_step(step) * self.batch + rank * rows, rows)
        out = torch.empty((rows, self.seq + 1), dtype=torch.int64)
        for row, window in zip(out, windows, strict=True):
            row.copy_(self.tokens[window * self.seq : (window + 1) * self.seq + 1])
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()

    def data_step(self, step: int) -> int:
        """The step whose data `step` reads, counted without anything skipped."""
        for first, stop in self.skip:
            if step >= first:
                step += stop - first
        return step

    def cursor(self, step: int) -> dict[str, Any]:
        """The cursor to save with a state that has seen the batches before `step`: where in the data it is, and which
        data in which order. JSON can hold it.

        Example:
            >>> data = TokenDataset(torch.arange(17), seq=4, batch=2)
            >>> data.resume(data.cursor(3))
            3
        """
        return {"next": self.data_step(step), **self._identity()}

    def resume(self, cursor: Any) -> int:
        """The step whose batch is the next one after those that a `cursor` has seen. `skip` may have changed; nothing
        else that says which batch is next.

        Raises:
            FzeroValueError: the cursor is of other data, or of another order of them, listing every difference.
        """
        mine = self._identity()
        if not isinstance(cursor, Mapping) or not mine.keys() | {"next"} <= cursor.keys():
            fix = "save one with the state: fz.checkpoint.save(..., meta={'data': dataset.cursor(step)})"
            raise FzeroValueError(
                message("data.resume", f"{describe(cursor)} does not say which batch is next", fix=fix)
            )
        if type(cursor["next"]) is not int or cursor["next"] < 0:
            raise FzeroValueError(
                message(
                    "data.resume",
                    f"next is {cursor['next']!r}, not the number of a batch",
                    fix="give a cursor as data.cursor(step) made it",
                )
            )
        others = {
            n: (cursor[n], now) for n, now in mine.items() if type(cursor[n]) is not type(now) or cursor[n] != now
        }
        problems = [f"{name}: saved with {then!r}, now {now!r}" for name, (then, now) in others.items()]
        if problems:
            fix = (
                "give the corpus, seq, batch and seed that it was saved with (python_source is another text in another "
                "version of Python)"
            )
            raise FzeroValueError(
                message(
                    "data.resume", "the run was saved with other data than this, or in another order", problems, fix
                )
            )
        step = position = cursor["next"]
        for first, stop in self.skip:
            step -= max(0, min(position, stop) - first)
        return step

    def _identity(self) -> dict[str, Any]:
        """The facts that the batch of every step follows from, but for `skip`."""
        return {
            "seq": self.seq,
            "batch": self.batch,
            "seed": self.seed,
            "tokens": len(self.tokens),
            "digest": _digest(self.tokens),
        }

    def windows(self, first: int, count: int) -> list[int]:
        """The windows that samples `first` to `first + count - 1` of the run read, see [Note: which window when]."""
        out: list[int] = []
        while count:
            epoch, position = divmod(first, self.num_windows)
            n = min(count, self.num_windows - position)
            out += _permute(
                torch.arange(position, position + n), self.num_windows, _round_keys(self.seed, epoch)
            ).tolist()
            first, count = first + n, count - n
        return out

    def split(self, fraction: float) -> tuple[TokenDataset, TokenDataset]:
        """Two datasets, for training and validation: the last `fraction` of the windows is for validation.

        They are contiguous and share no token. `skip` stays with the first.

        Raises:
            FzeroValueError: a fraction that leaves one of them without a window.
        """
        kept = round(self.num_windows * (1 - fraction))
        cut = kept * self.seq + 1
        if not (0 < fraction < 1 and kept >= 1 and len(self.tokens) - cut > self.seq):
            problems = [f"{self.num_windows} windows of {self.seq} + 1 tokens"]
            raise FzeroValueError(
                message(
                    "data.split",
                    f"fraction={fraction} leaves a side without data",
                    problems,
                    "choose another fraction or a smaller seq",
                )
            )
        options: dict[str, Any] = {"seq": self.seq, "batch": self.batch, "seed": self.seed}
        return TokenDataset(self.tokens[:cut], **options, skip=self.skip), TokenDataset(self.tokens[cut:], **options)

    def __repr__(self) -> str:
        return (
            f"TokenDataset({describe(self.tokens)}, seq={self.seq}, batch={self.batch}, seed={self.seed}, "
            f"num_windows={self.num_windows})"
        )


def write_tokens(path: str | os.PathLike[str], tokens: Any, dtype: torch.dtype | None = None) -> None:
    """Writes tokens as a flat binary file in this machine's byte order, without a header; `TokenDataset(path,
    dtype=...)` maps it.

    The file appears whole or not at all: it is written beside `path` and renamed.

    Args:
        path: replaced if it exists.
        tokens: a 1-D integer tensor or array.
        dtype: to store, one of uint8, uint16, int16, int32, int64; by default that of `tokens`.

    Raises:
        FzeroValueError: a token that `dtype` cannot hold.

    Example:
        >>> import os, tempfile
        >>> path = tempfile.mkdtemp() + "/tokens.bin"
        >>> write_tokens(path, torch.arange(100), torch.uint16)
        >>> os.path.getsize(path)
        200
    """
    tokens = _as_tensor(tokens, None)
    stored = tokens.dtype if dtype is None else dtype
    _check_dtype("data.write_tokens", stored)
    low, high = _range(tokens)
    if low < torch.iinfo(stored).min or high > torch.iinfo(stored).max:
        fits = [
            str(d).removeprefix("torch.") for d in DTYPES if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max
        ]
        problem = [
            f"tokens are {low} to {high}, {str(stored).removeprefix('torch.')} holds {torch.iinfo(stored).min} to "
            f"{torch.iinfo(stored).max}"
        ]
        raise FzeroValueError(
            message("data.write_tokens", "tokens do not fit the dtype", problem, f"store them as {' or '.join(fits)}")
        )
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for part in tokens.split(1 << 24):
                file.write(memoryview(part.to(stored).contiguous().view(torch.uint8).numpy()))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(tokens: torch.Tensor) -> str:
    """SHA-256 of the tokens as they are stored; of a corpus of more than 16 M of them, of 256 pieces of 64 Ki, evenly
    spread."""
    sha, (piece, count) = hashlib.sha256(str(tokens.dtype).encode()), _DIGESTED
    starts = range(0, len(tokens), piece)
    if len(starts) > count:
        starts = [i * (len(tokens) - piece) // (count - 1) for i in range(count)]
    for start in starts:
        sha.update(tokens[start : start + piece].contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def _permute(index: torch.Tensor, size: int, keys: tuple[int, ...]) -> torch.Tensor:
    """The images under a keyed permutation of `range(size)` of each element of an int64 tensor."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, out = (1 << half) - 1, index.clone()
    outside = torch.arange(len(index))
    while len(outside):  # at most 3 of 4 fall outside, so this ends soon
        left, right = out[outside] >> half, out[outside] & mask
        for k in keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        out[outside] = (left << half) | right
        outside = outside[out[outside] >= size]
    return out


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of [0, 2**32) that spreads every bit; its factors are below 2**31, so nothing leaves int64."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(random.bits(random.fold_in(random.key(seed), epoch), (_ROUNDS,)).tolist())


def _map_file(path: Path, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        raise FzeroTypeError(
            message(
                "data.TokenDataset",
                f"{path} does not say what it holds",
                fix="pass the dtype of its tokens, e.g. dtype=torch.uint16",
            )
        )
    _check_dtype("data.TokenDataset", dtype)
    if not path.is_file():
        raise FzeroValueError(
            message(
                "data.TokenDataset", f"{path} is not a file", fix="write one with fz.data.write_tokens(path, tokens)"
            )
        )
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        problem = [
            f"{size} bytes are not a positive whole number of {str(dtype).removeprefix('torch.')} tokens of "
            f"{dtype.itemsize} bytes"
        ]
        raise FzeroValueError(
            message(
                "data.TokenDataset",
                f"{path} is not a file of such tokens",
                problem,
                "pass the dtype it was written with, or write it again",
            )
        )
    return torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype)


def _as_tensor(tokens: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None:
        raise FzeroTypeError(
            message("data.TokenDataset", "dtype is for files; these tokens have one", fix="leave dtype out")
        )
    try:
        with warnings.catch_warnings():
            # a read-only array, such as a memory map: it is never written to
            warnings.simplefilter("ignore", UserWarning)
            out = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FzeroTypeError(
            message("data", f"tokens cannot be {describe(tokens)}", [str(error)], "pass a 1-D integer tensor or array")
        ) from error
    if out.dim() != 1 or out.dtype not in DTYPES:
        raise FzeroTypeError(
            message("data", f"tokens cannot be {describe(out)}", fix=f"pass a 1-D tensor of {_names(DTYPES)}")
        )
    return out.detach().cpu()


def _check_dtype(where: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise FzeroTypeError(message(where, f"tokens cannot be stored as {dtype}", fix=f"use one of {_names(DTYPES)}"))


def _range(tokens: torch.Tensor) -> tuple[int, int]:
    """The least and the greatest token; in parts, for torch has no minimum of uint16."""
    ends = [part.to(torch.int64).aminmax() for part in tokens.split(1 << 24) if len(part)]
    return min((int(e.min) for e in ends), default=0), max((int(e.max) for e in ends), default=0)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _counts(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
