"""Finds out who else could change the file at a path, considering each directory and each link on the way, and
whether a folder is writable. It does not import PyTorch, so that the process that supervises a rank stays
small.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LINKS = 40  # links that are followed on the way, as many as Linux follows


def exposed(path: str | os.PathLike[str], others: int = 0o022) -> str | None:
    """Returns why another user could change or replace what lies at a path; None if only this user and root could.

    Everything on the way must belong to one of these two, and a directory on the way that others can write to must be
    sticky, as /tmp is. A group that has a user's name and no other members does not count as others.

    Args:
        others: permissions of the group and of others that the path itself must not have.

    Example:
        >>> exposed("/usr/bin/env")
        >>> exposed("/tmp")
        '/tmp can be written to by other users'
    """
    user = os.geteuid()
    for place, is_last in _way(os.path.abspath(path)):
        if place is None:
            return f"the links of {path} form a cycle"
        try:
            about = os.lstat(place)
        except OSError as error:
            return f"{place}: {error.strerror or error}"
        if about.st_uid not in (user, 0):
            return f"{place} belongs to {_name(about.st_uid)}"
        mode = stat.S_IMODE(about.st_mode)
        if stat.S_ISLNK(about.st_mode) or (not is_last and mode & stat.S_ISVTX):
            continue
        if is_last and mode & others & ~0o022:
            return f"{place} is open to other users"
        if mode & 0o002 or (mode & 0o020 and not _is_own(about.st_gid)) or (is_last and mode & others):
            return f"{place} can be written to by other users"
    return None


def not_writable(folder: str | os.PathLike[str]) -> str | None:
    """Returns why no file can be written in a folder; None if one can. It writes a file, because permissions say
    nothing about a read-only disk, or about root.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror or error}"
    return None


def make_private_directory(directory: Path) -> list[Path]:
    """Makes a directory that only this user can access, and likewise its parents that do not exist, for which
    `Path.mkdir` uses the default permissions. Returns the missing ones, the innermost first.

    Raises:
        OSError: a directory cannot be made.
    """
    missing = [d for d in (directory, *directory.parents) if not d.is_dir()]
    for one in reversed(missing):
        try:
            one.mkdir(mode=0o700)
        except FileExistsError:  # another rank was faster, unless it is a file
            if not one.is_dir():
                raise
    return missing


def unwritable_file(path: str | os.PathLike[str]) -> str | None:
    """Returns why a file cannot be written at a path; None if it can. It opens the file, because permissions say
    nothing about a read-only disk, or about root, and leaves the files that exist as they were.

    Example:
        >>> unwritable_file("/proc/plan.html")
        'No such file or directory'
    """
    try:
        if os.path.isdir(path):
            return os.strerror(errno.EISDIR)
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, where opening may wait
            return None if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
        is_new = not os.path.lexists(path)
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a path with a null character
        return str(error)
    return None


def _way(path: str) -> Iterator[tuple[str | None, bool]]:
    """Yields the locations that a path leads through, from the root on, and whether each is its end; None for a link
    that leads in a circle.
    """
    at, todo, links = "/", [part for part in path.split("/") if part], 0
    yield at, not todo
    while todo:
        part = todo.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        place = os.path.join(at, part)
        is_link = os.path.islink(place)
        yield place, not todo and not is_link
        if not is_link:
            at = place
            continue
        if (links := links + 1) > _LINKS:
            yield None, True
            return
        target = os.readlink(place)
        at, todo = "/" if target.startswith("/") else at, [*target.split("/"), *todo]


def _is_own(group: int) -> bool:
    """Returns whether a group contains only this user, as many systems create one for each user."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return found.gr_gid == user.pw_gid and found.gr_name == user.pw_name and not {*found.gr_mem} - {user.pw_name}


def _name(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"the user {user}"
