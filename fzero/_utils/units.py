"""Parses and prints amounts of memory, rates and durations.

Sizes are printed in KiB, MiB and GiB (2^10, 2^20, 2^30 bytes), rates in GB/s (10^9). Both kinds of units are parsed.
"""

from __future__ import annotations

import re
from typing import Any

from fzero.errors import FzeroValueError

_UNITS = {
    "": 1,
    **{f"{p}": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}I": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
}


def parse_bytes(size: Any) -> int:
    """Returns the number of bytes that a number or text stands for.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes(4096)
        (80000000000, 1610612736, 4096)

    Raises:
        FzeroValueError: if the value is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", size.upper()) if isinstance(size, str) else None
    if found is None or found[2] not in _UNITS:
        raise FzeroValueError(
            "plan",
            f"{size!r} is not an amount of memory",
            fix='give bytes as a number, or text like "80GB" (10^9) or "24GiB" (2^30)',
        )
    return int(float(found[1]) * _UNITS[found[2]])


def parse_budgets(memory: Any, host: Any, disk: Any) -> tuple[int | None, int | None, int | None]:
    """Returns the bytes of three budgets, None for those that are not given. A memory budget of 0 is an error; a host
    or a disk may have none to spare.

    Raises:
        FzeroValueError: if a value is not an amount, or the memory budget is 0.
    """
    found: list[int | None] = []
    problems: list[str] = []
    for name, budget in (("memory_budget", memory), ("host_budget", host), ("disk_budget", disk)):
        try:
            found.append(None if budget is None else parse_bytes(budget))
            if isinstance(budget, int) and 0 < budget < _UNITS["KI"]:
                problems.append(f'{name}={budget}: these are bytes; did you mean "{budget}GB"? Bytes are "{budget}B"')
        except FzeroValueError:
            problems.append(f"{name}={budget!r} is not an amount of memory")
            continue
        if name == "memory_budget" and found[-1] == 0:
            problems.append(f"{name}={budget!r}: must be greater than 0")
    if problems:
        raise FzeroValueError(
            "plan",
            "invalid budgets",
            problems,
            'give bytes as a number, or text like "80GB" (10^9) or "24GiB" (2^30), or leave it out',
        )
    return found[0], found[1], found[2]


def as_argument(nbytes: int) -> str:
    """Returns bytes as an argument of a command, rounded down, in the unit in which they are printed.

    Example:
        >>> as_argument(80 * 10**9), as_argument(24 << 30), as_argument(893000), size(80 * 10**9)
        ('74.5GiB', '24GiB', '872.07KiB', '74.51 GiB')
    """
    for unit in ("GI", "MI", "KI"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes * 100 // _UNITS[unit] / 100:.10g}{unit.replace('I', 'i')}B"
    return f"{nbytes}B"


def size(nbytes: float) -> str:
    """Returns bytes as text, in units of 2^10, as device tools print memory: bytes exactly, larger units to a tenth,
    and to a hundredth from GiB on.

    Example:
        >>> size(1000), size(43360), size((1 << 20) - 10), size(3 << 29), size(3 << 40)
        ('1000 B', '42.3 KiB', '1.0 MiB', '1.50 GiB', '3.00 TiB')
    """
    for i, unit in enumerate(("B", "KiB", "MiB", "GiB")):
        digits = (0, 1, 1, 2)[i]
        if round(nbytes, digits) < 1024:
            return f"{nbytes:.{digits}f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def exact_size(nbytes: int) -> str:
    """Returns the same text as `size`, with the exact number of bytes.

    Example:
        >>> exact_size(1000), exact_size(43360)
        ('1000 B', '42.3 KiB (43,360 bytes)')
    """
    return size(nbytes) if nbytes < 1024 else f"{size(nbytes)} ({nbytes:,} bytes)"


def rate(bandwidth: float) -> str:
    """Returns bytes per second as text, in units of 10^3, as datasheets state them.

    Example:
        >>> rate(5.12e10), rate(1e9 / 8)
        ('51.2 GB/s', '125 MB/s')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if _rounded(bandwidth) < 1000:
            return f"{bandwidth:.4g} {unit}/s"
        bandwidth /= 1000
    return f"{bandwidth:.4g} TB/s"


def duration(seconds: float) -> str:
    """Returns seconds as text, to four digits: in minutes from 2 minutes on, in hours from 2 hours on.

    Example:
        >>> duration(5e-6), duration(0.01234), duration(0.99999), duration(90.0), duration(150.0), duration(18000.0)
        ('5 us', '12.34 ms', '1 s', '90 s', '2.5 min', '5 h')
    """
    for unit, length, end in (("us", 1e-6, 1000), ("ms", 1e-3, 1000), ("s", 1, 120), ("min", 60, 120)):
        if _rounded(seconds / length) < end:
            return f"{seconds / length:.4g} {unit}"
    hours = seconds / 3600
    return f"{hours:.4g} h" if _rounded(hours) < 10_000 else f"{hours:,.0f} h"


def _rounded(x: float) -> float:
    """Rounds to four digits."""
    return float(f"{x:.4g}")
