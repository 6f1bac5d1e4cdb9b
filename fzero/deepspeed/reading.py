"""Reads a configuration of DeepSpeed's into values by path: unknown keys, values of another kind, and "auto".

Nothing is decided here about what a key means; all that is wrong is collected, for one error.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fzero.arguments import shown
from fzero.deepspeed.table import DEEPSPEED, NOTE, REFUSED, KeyTable, Row
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.read_json import Malformed, contents, parsed
from fzero.transforms.precision import DTYPE_NAMES

_MOST = 1 << 24  # bytes of a file: 16 MiB
_ELSEWHERE = 3  # sections: a name that more have says nothing about where a key belongs


@dataclass(frozen=True)
class Decision:
    """A key, its value as it is given ("" for one that is omitted), the answer to it, and why.

    Example:
        >>> import fzero as fz
        >>> given = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "steps_per_print": 10}
        >>> found = fz.deepspeed.load_config(given).decisions[2]
        >>> found.path, found.value, found.answer
        ('steps_per_print', '10', 'note')
    """

    path: str
    value: str
    answer: str
    says: str


@dataclass
class ConfigSettings:
    """Values by the path of their row, with what has been decided and what is wrong so far."""

    values: dict[str, Any] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def get(self, path: str, default: Any = None) -> Any:
        """The value of a key; of one that is omitted, null or "auto" the default."""
        found = self.values.get(path)
        return default if found is None or found == "auto" else found

    def omitted(self, path: str, says: str) -> None:
        """Notes what happens because a key is omitted."""
        self.decisions.append(Decision(path, "", NOTE, f"omitted: {says}"))

    def instead(self, path: str, says: str) -> None:
        """Notes what becomes of a key's value, in place of the answer of its row."""
        name = path.rpartition("stage3_")[2]
        self.decisions = [d for d in self.decisions if not d.path.endswith(name)]
        self.note(path, says)

    def note(self, path: str, says: str) -> None:
        """Notes something about a key beside its row."""
        self.decisions.append(Decision(path, shown(self.values.get(path)), NOTE, says))

    def refuse(self, path: str, says: str) -> None:
        self.problems.append(f"{path}={shown(self.values.get(path))}: {says}")

    def check(self, source: str) -> None:
        """Raises if something is wrong, all of it at once."""
        if self.problems:
            problems = list(dict.fromkeys(self.problems))
            what = f"{source} has {len(problems)} problem{'s' * (len(problems) > 1)}"
            raise FzeroValueError("deepspeed", what, problems, "correct these keys; every other is understood")


def read_file(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A configuration as a dict, and what to call it: from a dict, a path, or the base64 that DeepSpeed's launcher
    makes.

    Raises:
        FzeroTypeError: a value that is none of these.
        FzeroValueError: a file that is missing, or not JSON (or, where hjson is installed, HJSON); a key twice.
    """
    if isinstance(config, Mapping):
        return _plain(config, "a dict"), "a dict"
    if not isinstance(config, (str, os.PathLike)):
        what = f"a configuration is a path or a dict, not {type(config).__name__}"
        raise FzeroTypeError("deepspeed", what, fix='e.g. fz.deepspeed.load_config("ds_config.json")')
    path, name = Path(config), os.fspath(config)
    if os.path.isfile(name):  # Path.is_file raises of a text that is too long for a name
        try:
            return read_text(contents(path, _MOST), name), name
        except (OSError, Malformed) as error:
            fix = "give the path of a ds_config.json"
            raise FzeroValueError("deepspeed", f"{name} cannot be read", [str(error)], fix) from None
    try:
        text = base64.b64decode(name, altchars=b"-_", validate=True)  # the name of a file, too, may be base64
        if not text.lstrip().startswith(b"{"):
            raise ValueError
    except (binascii.Error, ValueError):
        fix = "give the path of a file that is there, or the dict itself"
        raise FzeroValueError("deepspeed", f"{shown(name)} is not there", fix=fix) from None
    return read_text(text, "base64"), "base64"


def _plain(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """As JSON has it: lists for tuples, texts for keys."""
    try:
        return parsed(json.dumps(dict(config)))
    except (TypeError, ValueError, RecursionError) as error:
        raise FzeroTypeError("deepspeed", f"{name} has values that JSON has not", [str(error)]) from None


def read_text(text: str | bytes, name: str) -> dict[str, Any]:
    """A configuration as a dict, of its text; errors call it `name`.

    Raises:
        FzeroValueError: as `read_file`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [key for key, _ in pairs]
        twice.extend(key for key in dict.fromkeys(names) if names.count(key) > 1)
        return dict(pairs)

    twice: list[str] = []
    try:
        found = parsed(text, pairs=unique)
    except Malformed as error:
        try:
            import hjson  # pyright: ignore[reportMissingImports]  # comes with DeepSpeed
        except ImportError:
            fix = "write JSON; of HJSON (comments, no quotes) one needs the package hjson"
            raise FzeroValueError("deepspeed", f"{name} is not JSON", [str(error)], fix) from None
        try:
            found = hjson.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as second:
            raise FzeroValueError("deepspeed", f"{name} is neither JSON nor HJSON", [str(second)]) from None
    if twice:
        problems = [f"{key!r} twice in one section" for key in twice]
        raise FzeroValueError("deepspeed", f"{name} has keys twice", problems, "keep one of each")
    if not isinstance(found, dict):
        what = f"{name} is {type(found).__name__}, not a section"
        raise FzeroValueError("deepspeed", what, fix='a configuration is {"train_batch_size": 32, ...}')
    return found


_FILLED_ALONE = {"scheduler.params.warmup_min_lr"}
"""Keys that no training argument is of: they are filled in where they are "auto", and compared with nothing."""


def settings(given: Mapping[str, Any], auto: Mapping[str, Any], table: KeyTable = DEEPSPEED) -> ConfigSettings:
    """The values of a configuration, "auto" filled in, and what its keys are answered, but for what several of them
    mean together."""
    out, auto = ConfigSettings(), _plain(auto, "auto")
    written: dict[str, str] = {}
    for path, value in _leaves(given, out, table):
        at = table.aliases.get(path, path)
        if at in written:
            out.problems.append(f"{path} and {written[at]}: one key under two names")
        written[at] = path
        row = table.rows[at]
        if value == "auto" and "auto" not in row.kind and row.kind not in ("any", "count~", "texts~"):
            if at not in auto and row.answer != NOTE:
                out.problems.append(f'{path}="auto": nothing fills it in: load_config(auto={{{at!r}: ...}})')
                continue
            value = auto.get(at, value)
        elif at in auto and auto[at] != value and value is not None and at not in _FILLED_ALONE:
            out.problems.append(f"{path}={shown(value)}: the arguments say {shown(auto[at])}; make it 'auto'")
        if value != "auto" and (problem := wrong(row.kind, value)):
            out.problems.append(f"{path}={shown(value)}: {problem}")
            continue
        out.values[at] = value
        _answer(out, path, row, value)
    unknown = [name for name in auto if name not in table.rows]
    out.problems += [f"auto={{{name!r}: ...}}: unknown{_nearest(name, table)}" for name in unknown]
    return out


def _answer(out: ConfigSettings, path: str, row: Row, value: Any) -> None:
    if row.answer != REFUSED:
        out.decisions.append(Decision(path, shown(value), row.answer, row.says))
    elif any(value is x or (value == x and not isinstance(value, bool)) for x in row.neutral) or _off(value):
        out.decisions.append(Decision(path, shown(value), NOTE, "asks for nothing"))
    else:
        out.problems.append(f"{path}={shown(value)}: {row.says}")


def _off(value: Any) -> bool:
    return isinstance(value, dict) and value.get("enabled") is False


def _leaves(
    given: Mapping[str, Any], out: ConfigSettings, table: KeyTable, under: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        path = f"{under}{key}"
        if path in table.sections and isinstance(value, Mapping):
            yield from _leaves(value, out, table, f"{path}.")
        elif path == "zero_optimization" and isinstance(value, bool):
            yield "zero_optimization.stage", int(value)
        elif path in table.sections and value is not None:
            out.problems.append(f"{path}={shown(value)}: a section, e.g. {{{_keys(path, table)[0]!r}: ...}}")
        elif path in table.rows or path in table.aliases:
            yield path, value
        elif path not in table.sections:
            out.problems.append(f"{path}: unknown{_nearest(path, table)}")


def _keys(section: str, table: KeyTable) -> list[str]:
    """The names of the keys of a section ("": the top)."""
    at = f"{section}." if section else ""
    names = (path[len(at) :].partition(".")[0] for path in (*table.rows, *table.aliases) if path.startswith(at))
    return list(dict.fromkeys(names))


def _nearest(path: str, table: KeyTable) -> str:
    """Words about the key that may have been meant: one of that name in another section, or one with a like name."""
    section, _, name = path.rpartition(".")
    known = dict.fromkeys((*table.rows, *sorted(table.sections)))
    elsewhere = [p for p in known if p.rpartition(".")[2] == name]
    if 0 < len(elsewhere) <= _ELSEWHERE:
        return f": it belongs at {' or '.join(elsewhere)}"
    if near := difflib.get_close_matches(name, _keys(section, table), n=1, cutoff=0.6):
        return f": did you mean {near[0]!r}?"
    by_name = {p.rpartition(".")[2]: p for p in known}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return f": did you mean {by_name[near[0]]}?" if near else ""


def wrong(kind: str | tuple[Any, ...], value: Any) -> str | None:
    """Says what a value of this kind must be, if it is not; None if it is."""
    if not isinstance(kind, str):
        right = any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in kind)
        return None if right else f"must be one of {', '.join(json.dumps(x) for x in kind)}"
    if kind == "any" or (kind.endswith("?") and value is None):
        return None
    must, test = _KINDS[kind.rstrip("?~")]
    return None if test(value) else f"must be {must}{' without quotes' if _quoted(test, value) else ''}"


def _quoted(test: Any, value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return test(parsed(value.lower()))
    except ValueError:
        return False


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def _is_whole(x: Any) -> bool:
    return _is_number(x) and x == int(x)


def _is_texts(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, list) and all(isinstance(y, str) for y in x))


_KINDS: dict[str, tuple[str, Any]] = {
    "flag": ("true or false", lambda x: isinstance(x, bool)),
    "count": ("a whole number of at least 0", lambda x: _is_whole(x) and x >= 0),
    "rows": ("a whole number of at least 1", lambda x: _is_whole(x) and x >= 1),
    "integer": ("a whole number", _is_whole),
    "number": ("a number", _is_number),
    "fraction": ("a number from 0 to 1", lambda x: _is_number(x) and 0 <= x <= 1),
    "pair": ("two numbers", lambda x: isinstance(x, list) and len(x) == 2 and all(map(_is_number, x))),
    "text": ("a text", lambda x: isinstance(x, str)),
    "texts": ("a list of texts", _is_texts),
    "dtype": (f"one of {', '.join(DTYPE_NAMES)}", lambda x: isinstance(x, str) and x in DTYPE_NAMES),
}
