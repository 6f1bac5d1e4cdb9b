"""Amounts of memory and spans of time: from text, and as text for messages."""

from __future__ import annotations

import re
from typing import Any

from fzero.errors import FzeroValueError, message

_UNITS = {"": 1, **{f"{p}": 1000 ** (i + 1) for i, p in enumerate("KMGT")}, **{f"{p}I": 1024 ** (i + 1) for i, p in enumerate("KMGT")}}


def parse_bytes(size: Any) -> int:
    """A number of bytes from a number or text.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes(4096)
        (80000000000, 1610612736, 4096)

    Raises:
        FzeroValueError: what is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", size.upper()) if isinstance(size, str) else None
    if found is None or found[2] not in _UNITS:
        raise FzeroValueError(message("plan", f"{size!r} is no amount of memory", fix='give bytes as a number, or text like "80GB" (10^9) or "24GiB" (2^30)'))
    return int(float(found[1]) * _UNITS[found[2]])


def parse_budgets(memory: Any, host: Any, disk: Any) -> tuple[int | None, int | None, int | None]:
    """The bytes of three budgets, None where there is none. Nothing runs in no memory; a host or a disk may have none to spare.

    Raises:
        FzeroValueError: what is no amount, or a memory budget of 0.
    """
    nbytes, on_host, on_disk = (None if x is None else parse_bytes(x) for x in (memory, host, disk))
    if nbytes == 0:
        raise FzeroValueError(message("plan", f"memory_budget={memory!r}: nothing runs in no memory", fix="give what each rank may use, or leave it out"))
    return nbytes, on_host, on_disk


def size(nbytes: int) -> str:
    """Bytes as text, to about three digits; a few of them exactly.

    Example:
        >>> size(1000), size(1 << 20), size(3 << 29)
        ('1,000 bytes', '1.0 MiB', '1.50 GiB')
    """
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes:,} bytes"


def duration(seconds: float) -> str:
    """Seconds as text, to three digits.

    Example:
        >>> duration(0.0123), duration(4.0)
        ('12.3 ms', '4 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
