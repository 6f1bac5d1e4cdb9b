"""Reads JSON from other processes, programs and users: limited in bytes, depth and digits, and checked against a
type.

A form is a type as in annotations: `bool`, `int`, `float`, `str`, `None`, `list[F]`, `dict[str, F]`, `dict[int, F]`,
`tuple[F, G]`, `tuple[F, ...]`, unions, `Any`, and NamedTuples and dataclasses of such fields, which are given as the
list of their values or as an object. This file does not import PyTorch, so that the process that supervises a rank
stays small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from fzero.errors import FzeroValueError

MOST = 1 << 28
"""Largest number of bytes of a text that is read, unless a caller says otherwise: 256 MiB."""

DEPTH = 500
"""Maximum nesting depth of lists and objects, so that recursive functions stay within Python's limit."""

_DIGITS = re.compile(r"\d{4301}")  # Python does not convert longer numbers


class Malformed(FzeroValueError):
    """A text that is not the expected JSON. Its message is one line, for a caller that knows where the text comes
    from.
    """


def parsed(
    data: bytes | bytearray | str, form: Any = Any, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Returns the value of a JSON text in this form: a list becomes a tuple, NamedTuple or dataclass if the form says
    so.

    Args:
        pairs: makes the value of an object from its keys and values.

    Raises:
        Malformed: saying what is wrong, and where.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        found = json.loads(text, object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON: {error}") from None
    except RecursionError:
        raise Malformed(f"lists and objects are nested more than {DEPTH} deep") from None
    except ValueError as error:
        at = _DIGITS.search(text)
        raise Malformed(f"a number of more than 4,300 digits at character {at.start()}" if at else str(error)) from None
    # Level by level rather than recursively, because Python's recursion is what has to be protected.
    level, depth = [found], 0
    while level := [x for x in level if isinstance(x, (dict, list))]:
        if (depth := depth + 1) > DEPTH:
            raise Malformed(f"lists and objects are nested more than {DEPTH} deep")
        level = [x for outer in level for x in (outer.values() if isinstance(outer, dict) else outer)]
    return found if form is Any else formed(found, form)


def read(path: Path, form: Any = Any, most: int = MOST) -> Any:
    """Returns the value of a JSON file.

    Raises:
        Malformed: saying what is wrong with its text, and where.
        OSError: if it cannot be read, or is not a regular file.
    """
    return parsed(contents(path, most), form)


def contents(path: Path, most: int = MOST) -> bytes:
    """Returns the bytes of a regular file. Pipes, which may block, and devices, which do not end, are rejected.

    Raises:
        Malformed: if it has more than `most` bytes.
        OSError: if it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        data = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > most:
        raise Malformed(f"more than {most} bytes")
    return data


def open_regular(path: Path) -> Any:
    """Opens a regular file for reading bytes.

    Raises:
        OSError: if it cannot be read, or is a directory, a pipe, a socket or a device.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for a writer
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(fd, path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def check_regular(file: int | Path, path: Path) -> None:
    """Raises an OSError if a file, or the file of a descriptor, is not a regular one."""
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode):
        kinds = (stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket")
        kind = next((name for test, name in kinds if test(mode)), "device")
        raise OSError(f"{path.name} is a {kind}, not a file")


def dumped(value: Any) -> str:
    """Returns the JSON text of a value. A dataclass becomes the list of its fields, as a form reads it."""
    return json.dumps(value, default=_fields_of)


def formed(value: Any, form: Any, at: str = "") -> Any:
    """Converts a JSON value to its form.

    Raises:
        Malformed: naming the place where the value does not match.

    Example:
        >>> formed({"3": [1, 2.5]}, dict[int, tuple[int, float]])
        {3: (1, 2.5)}
        >>> formed([["a", 1]], list[tuple[str, str]])
        Traceback (most recent call last):
        fzero._utils.bounded_json.Malformed: 1 at [0][1], expected str
    """
    origin, args = get_origin(form), get_args(form)
    if form is Any:
        return value
    if origin in (Union, types.UnionType):
        for one in args:
            try:
                return formed(value, one, at)
            except Malformed:
                pass
    elif origin in (list, Sequence) and isinstance(value, list):
        return [formed(x, args[0], f"{at}[{i}]") for i, x in enumerate(value)]
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {_key(k, args[0], at): formed(x, args[1], f"{at}[{k!r:.80}]") for k, x in value.items()}
    elif origin is tuple and isinstance(value, list):
        forms = args[:1] * len(value) if args[1:] == (...,) else args
        if len(forms) == len(value):
            return tuple(formed(x, f, f"{at}[{i}]") for i, (x, f) in enumerate(zip(value, forms, strict=True)))
    elif form in (None, type(None)) and value is None:
        return None
    elif form is float and type(value) is int:
        return float(value)
    elif form in (bool, int, float, str) and type(value) is form:
        return value
    elif hints := _hints(form):
        named = value if isinstance(value, dict) else {}
        if isinstance(value, list) and len(value) <= len(hints):
            named = dict(zip(hints, value, strict=False))
        if named and named.keys() <= hints.keys():
            with contextlib.suppress(TypeError):  # a field without a default is missing
                return cast(Any, form)(**{n: formed(x, hints[n], f"{at}.{n}") for n, x in named.items()})
    name = getattr(form, "__name__", str(form)) if not args else str(form)
    raise Malformed(f"{f'{value!r:.80}'}{f' at {at}' if at else ''}, expected {name}")


def _key(key: str, form: Any, at: str) -> Any:
    if form is not int:
        return key
    if not re.fullmatch(r"-?\d{1,18}", key):
        raise Malformed(f"the key {key!r:.80} at {at or 'the top'}, expected an integer")
    return int(key)


def _hints(form: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(form):
        hints = get_type_hints(form)
        return {f.name: hints[f.name] for f in dataclasses.fields(form)}
    return get_type_hints(form) if hasattr(form, "_fields") else {}


def _fields_of(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    raise TypeError(f"JSON has no {type(value).__name__}")
