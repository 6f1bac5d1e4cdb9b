"""Parses the flags that several commands share: meshes, amounts of memory, files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from tyro.conf import arg

from fzero._utils.path_permissions import unwritable_file
from fzero._utils.units import parse_bytes
from fzero.cli.target import UsageError
from fzero.comm.launcher_environment import LOCAL
from fzero.errors import FzeroError, FzeroValueError

TARGET = arg(metavar="MODULE:FUNCTION", help_behavior_hint="")
MESH = arg(metavar="AXIS=SIZE ...", help_behavior_hint="(required, or --devices)")
DEVICE = arg(metavar="NAME", help_behavior_hint="(default: this machine's)")
BUDGET = arg(metavar="SIZE", help_behavior_hint="(default: none)")
FILE = arg(metavar="FILE", help_behavior_hint="")
FLAG = arg(help_behavior_hint="")
_PICTURES = (".png", ".svg")


def bytes_of(size: str | None) -> int | None:
    """Returns the bytes of a size given as text. A small number without a unit is an error, because it is probably
    meant in GB.
    """
    if size is None or not size.isdecimal():
        return None if size is None else parse_bytes(size)
    # Below 1 MiB: no step fits in so few bytes, so the unit was forgotten.
    if 0 < int(size) < 1 << 20:
        raise FzeroValueError(
            "plan",
            f"{size} is a number of bytes, in which nothing fits",
            fix=f"did you mean {size}GB? Bytes are {size}B",
        )
    return int(size)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Converts problems with flags to a `UsageError`."""
    try:
        yield
    except FzeroError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError("flags", str(error)) from None


def axes_of(mesh: tuple[str, ...], processes: bool = False) -> dict[str, Any]:
    """Parses names and sizes from `AXIS=SIZE ...`, separated by commas or spaces. `processes`: whether there are
    processes that can determine a size: -1 or local.
    """
    pairs = [a.partition("=") for text in mesh for a in text.split(",") if a]
    names, problems = [axis for axis, _, _ in pairs], []
    for axis, equals, size in pairs:
        if not equals and (apart := re.fullmatch(r"([a-z]+)[:x]?(\d+)", axis)):
            problems.append(f"{axis}: did you mean {apart[1]}={apart[2]}?")
        elif not equals and axis.isdecimal():
            problems.append(f"{axis}: which axis has this size? e.g. data={axis}")
        elif size in ("-1", LOCAL) and not processes:
            problems.append(
                f"{axis}={size}: {size} depends on the number of processes, and there are none: give a number"
            )
        elif not axis or not (size in ("-1", LOCAL) or (size.isdecimal() and int(size))):
            problems.append(f"{axis}{equals}{size}: a size is a whole number of at least 1")
    problems += [f"{axis}: given twice" for axis in dict.fromkeys(names) if names.count(axis) > 1]
    if problems or not pairs:
        fix = "e.g. --mesh data=8, or --mesh replica=2 data=4"
        raise UsageError("mesh", "--mesh requires axes with their sizes", problems, fix)
    return {axis: size if size == LOCAL else int(size) for axis, _, size in pairs}


def check_files(**files: Path | None) -> None:
    """Checks that the files a command will write can be written, before the work is done."""
    given = {flag: path for flag, path in files.items() if path is not None}
    problems = [
        f"--{flag} {path}: the folder {path.parent} does not exist"
        for flag, path in given.items()
        if not path.parent.is_dir()
    ]
    problems += [f"--{flag} {path}: is a folder" for flag, path in given.items() if path.is_dir()]
    problems += [
        f"--{flag} {path}: {why}"
        for flag, path in given.items()
        if path.parent.is_dir() and not path.is_dir() and (why := unwritable_file(path)) is not None
    ]
    problems += [
        f"--{flag} {path}: is also the file of --{other}"
        for (other, first), (flag, path) in combinations(given.items(), 2)
        # The second file would silently overwrite the first.
        if path.resolve() == first.resolve() and not _is_stream(path)
    ]
    problems += [
        f"--picture {path}: a picture is a .png or .svg"
        for flag, path in given.items()
        if flag == "picture" and path.suffix not in _PICTURES
    ]
    problems += [f"--{flag} {path}: a page is a .html" for flag, path in given.items() if _is_no_page(flag, path)]
    if problems:
        fix = "name files that you may write, in folders that exist, pictures .png or .svg, pages .html"
        raise UsageError("files", "cannot be written", problems, fix)


def _is_stream(path: Path) -> bool:
    """Returns whether a path is a device or a pipe, such as /dev/stdout, to which several files may be written."""
    return path.exists() and not path.is_file()


def _is_no_page(flag: str, path: Path) -> bool:
    return flag == "html" and path.suffix not in (".html", ".htm")
