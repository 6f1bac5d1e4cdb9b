"""Provides text that is available on every machine: the source code of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from fzero._utils.arguments import count, plain_numbers
from fzero.errors import FzeroValueError

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


@plain_numbers
def python_source(limit_bytes: int | None = None) -> torch.Tensor:
    """Returns the bytes of the standard library's `.py` files, concatenated: real text without a download or an
    account.

    Files are in the order of their paths; tests and installed packages are left out. The text, about 12 MB, is the
    same for every process that runs the same Python installation; another version of Python has another text.

    Args:
        limit_bytes: stop after this many bytes; by default everything.

    Returns:
        uint8[n]: byte-level tokens, a vocabulary of 256.

    Raises:
        FzeroValueError: if there are no source files (a frozen or zipped Python), or the limit is below 1.

    Example:
        >>> python_source(limit_bytes=1000).shape
        torch.Size([1000])
    """
    if problems := [] if limit_bytes is None else count("limit_bytes", limit_bytes):
        raise FzeroValueError("data.python_source", "invalid arguments", problems, "ask for at least 1 byte")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        (f.relative_to(root).as_posix(), f) for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts)
    ]
    text = bytearray()
    for _, file in sorted(files):
        text += file.read_bytes()
        if limit_bytes is not None and len(text) >= limit_bytes:
            break
    if not text:
        raise FzeroValueError(
            "data.python_source", f"no .py files under {root}", fix="use a Python installed with its library's source"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]
