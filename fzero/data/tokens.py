"""Divides a corpus of tokens, in memory or in a file, into the windows that the steps of a run read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fzero._utils.arguments import plain_numbers, python_numbers
from fzero.data.sample_order import Steps, counts, digest
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.tree import describe, dtype_name

DTYPES = (torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64)
"""Dtypes that tokens can be stored in."""


class TokenDataset(Steps):
    """A corpus of tokens. The batch of any step can be read at any time, on any mesh.

    Args:
        tokens: a 1-D integer tensor or array, or the path of a flat binary file of tokens, which is memory-mapped,
            not read.
        seq: tokens per sample. A window is one token longer, because the targets are the inputs shifted by one.
        batch: number of samples in the *global* batch of a step.
        seed: seed for the order of the windows.
        dtype: dtype of the tokens in the file; required for a path.
        skip: half-open ranges of data steps to leave out, numbered as if nothing were skipped, e.g. `[(1200, 1250)]`
            after the loss diverged there: steps before 1200 stay as they were, and step 1200 takes the data of step
            1250.

    Memory: the given tokens; for a file, what the operating system keeps of it in its page cache.

    Raises:
        FzeroValueError, FzeroTypeError: listing everything that is wrong: a corpus that is shorter than one window,
            not 1-D or not of integers; a file that is missing or whose size is not a multiple of the token size;
            overlapping ranges to skip.

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
        seq, batch, seed, skip = python_numbers((seq, batch, seed, skip))  # tokens may be a long list
        super().__init__("data.TokenDataset", batch, seed, skip, seq=seq)
        self.tokens = (
            _map_file(Path(tokens), dtype) if isinstance(tokens, (str, os.PathLike)) else as_tensor(tokens, dtype)
        )
        # One token less, because the target of the last input is the token after it.
        self.seq, self.num_samples = seq, (len(self.tokens) - 1) // seq
        if self.num_samples < 1:
            fix = (
                f"use at least {seq + 1} tokens or seq={len(self.tokens) - 1}"
                if len(self.tokens) > 1
                else f"use at least {seq + 1} tokens"
            )
            raise FzeroValueError(
                "data.TokenDataset",
                "the corpus is shorter than one window",
                [f"{len(self.tokens)} tokens, a window is seq + 1 = {seq + 1}"],
                fix,
            )

    @property
    def num_windows(self) -> int:
        """Number of windows of the corpus: `seq + 1` tokens each, `seq` apart, so that every token except the first
        is a target once per epoch.
        """
        return self.num_samples

    @plain_numbers
    def windows(self, first: int, count: int) -> list[int]:
        """Returns the windows that samples `first` to `first + count - 1` of the run read."""
        wrong = [
            f"{name}={n!r} is not an integer of at least 0"
            for name, n in (("first", first), ("count", count))
            if not counts(n, 0)
        ]
        if wrong:
            raise FzeroValueError("data.windows", "these samples do not exist", wrong, "count samples from 0")
        return self.order(first, count)

    def _rows(self, samples: list[int], step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        # int64[samples, seq + 1]: the inputs, and the targets one token later
        out = torch.empty((len(samples), self.seq + 1), dtype=torch.int64)
        for row, window in zip(out, samples, strict=True):
            row.copy_(self.tokens[window * self.seq : (window + 1) * self.seq + 1])
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()

    def _identity(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "batch": self.batch,
            "seed": self.seed,
            "tokens": len(self.tokens),
            "digest": digest(self.tokens),
        }

    @plain_numbers
    def split(self, fraction: float) -> tuple[TokenDataset, TokenDataset]:
        """Returns two datasets, for training and validation: the last `fraction` of the windows is for validation.

        They are contiguous and share no token. `skip` stays with the first.

        Raises:
            FzeroValueError: if the fraction leaves one of them without a window.
        """
        kept = round(self.num_windows * (1 - fraction))
        cut = kept * self.seq + 1
        if not (0 < fraction < 1 and kept >= 1 and len(self.tokens) - cut > self.seq):
            problems = [f"{self.num_windows} windows of {self.seq} + 1 tokens"]
            raise FzeroValueError(
                "data.split",
                f"fraction={fraction} leaves a side without data",
                problems,
                "choose another fraction or a smaller seq",
            )
        options: dict[str, Any] = {"seq": self.seq, "batch": self.batch, "seed": self.seed}
        return TokenDataset(self.tokens[:cut], **options, skip=self.skip), TokenDataset(self.tokens[cut:], **options)

    def __repr__(self) -> str:
        return (
            f"TokenDataset({describe(self.tokens)}, seq={self.seq}, batch={self.batch}, seed={self.seed}, "
            f"num_windows={self.num_windows})"
        )


def write_tokens(path: str | os.PathLike[str], tokens: Any, dtype: torch.dtype | None = None) -> None:
    """Writes tokens as a flat binary file in this machine's byte order, without a header. `TokenDataset(path,
    dtype=...)` maps it.

    The file is written atomically: first to a temporary file next to `path`, which is then renamed.

    Args:
        path: replaced if it exists.
        tokens: a 1-D integer tensor or array.
        dtype: the dtype to store, one of uint8, uint16, int16, int32, int64; by default that of `tokens`.

    Raises:
        FzeroValueError: if `dtype` cannot represent a token.

    Example:
        >>> import os, tempfile
        >>> path = tempfile.mkdtemp() + "/tokens.bin"
        >>> write_tokens(path, torch.arange(100), torch.uint16)
        >>> os.path.getsize(path)
        200
    """
    tokens = as_tensor(tokens, None)
    stored = tokens.dtype if dtype is None else dtype
    _check_dtype("data.write_tokens", stored)
    low, high = _range(tokens)
    if low < torch.iinfo(stored).min or high > torch.iinfo(stored).max:
        fits = [dtype_name(d) for d in DTYPES if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max]
        problem = [
            f"tokens are {low} to {high}, {dtype_name(stored)} holds {torch.iinfo(stored).min} to "
            f"{torch.iinfo(stored).max}"
        ]
        raise FzeroValueError(
            "data.write_tokens", "tokens do not fit the dtype", problem, f"store them as {' or '.join(fits)}"
        )
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            # In parts, so that a conversion takes at most 128 MiB.
            for part in tokens.split(1 << 24):
                file.write(memoryview(part.to(stored).contiguous().view(torch.uint8).numpy()))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _map_file(path: Path, dtype: torch.dtype | None) -> torch.Tensor:
    """Maps a flat binary file of tokens into memory, after checking its dtype and size."""
    if dtype is None:
        raise FzeroTypeError(
            "data.TokenDataset",
            f"{path} does not contain the dtype of its tokens",
            fix="pass the dtype of its tokens, e.g. dtype=torch.uint16",
        )
    _check_dtype("data.TokenDataset", dtype)
    if not path.is_file():
        raise FzeroValueError(
            "data.TokenDataset", f"{path} is not a file", fix="write one with fz.data.write_tokens(path, tokens)"
        )
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        problem = [f"{size} bytes are not a positive multiple of {dtype_name(dtype)} tokens of {dtype.itemsize} bytes"]
        raise FzeroValueError(
            "data.TokenDataset",
            f"{path} is not a file of such tokens",
            problem,
            "pass the dtype it was written with, or write it again",
        )
    # Not shared: if something writes to the tensor, the file stays as it is.
    return torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype)


def as_tensor(tokens: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns tokens as a 1-D integer tensor on the host. Arrays, such as memory maps, are not copied. `dtype` must be
    None.
    """
    if dtype is not None:
        raise FzeroTypeError("data.TokenDataset", "dtype is for files; these tokens have one", fix="leave dtype out")
    try:
        with warnings.catch_warnings():
            # a read-only array, such as a memory map, which is never written to
            warnings.simplefilter("ignore", UserWarning)
            out = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FzeroTypeError(
            "data", f"tokens cannot be {describe(tokens)}", [str(error)], "pass a 1-D integer tensor or array"
        ) from error
    if out.dim() != 1 or out.dtype not in DTYPES:
        raise FzeroTypeError("data", f"tokens cannot be {describe(out)}", fix=f"pass a 1-D tensor of {_names(DTYPES)}")
    return out.detach().cpu()


def _check_dtype(where: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise FzeroTypeError(where, f"tokens cannot be stored as {dtype}", fix=f"use one of {_names(DTYPES)}")


def _range(tokens: torch.Tensor) -> tuple[int, int]:
    """Returns the smallest and the largest token, computed in parts, because torch has no minimum of uint16."""
    ends = [part.to(torch.int64).aminmax() for part in tokens.split(1 << 24) if len(part)]
    return min((int(e.min) for e in ends), default=0), max((int(e.max) for e in ends), default=0)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dtype_name(d) for d in dtypes)
