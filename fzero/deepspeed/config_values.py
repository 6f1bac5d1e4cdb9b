"""Reads a DeepSpeed configuration into values by path. Reports unknown keys, values of a wrong type, and "auto" without
a value.

This file does not decide what a key means. All problems are collected for one error.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fzero._utils.arguments import shown
from fzero._utils.bounded_json import Malformed, contents, parsed
from fzero._utils.deprecation import warn
from fzero.deepspeed.supported_keys import ALIASES, IGNORED, KEYS, REJECTED, SECTIONS, SUPPORTED, Rejected, same
from fzero.errors import FzeroTypeError, FzeroValueError

_MOST = 1 << 24  # bytes of a file: 16 MiB
_ELSEWHERE = 3  # sections: a name that occurs in more of them is no hint at where a key belongs
APPLIED, NOTE = "applied", "note"


@dataclass(frozen=True)
class Decision:
    """A key and how it is handled.

    Attributes:
        path: the key, with its sections: "optimizer.params.lr".
        value: the value as it is given; "" for a key that is omitted.
        status: "applied" if the key is supported, or "note" for other information about a key, for example the
            default of one that is omitted.
        says: the effect of the key.

    Example:
        >>> import fzero as fz
        >>> given = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "steps_per_print": 10}
        >>> found = fz.deepspeed.load_config(given)
        >>> found.decisions[0].path, found.decisions[0].value, found.decisions[0].status
        ('train_batch_size', '8', 'applied')
        >>> found.ignored
        ('steps_per_print',)
    """

    path: str
    value: str
    status: str
    says: str

    @property
    def answer(self) -> str:
        """Deprecated: the old name of `status`, with "meaning" for "applied"."""
        warn("Decision.answer", "Decision.status")
        return "meaning" if self.status == APPLIED else self.status


@dataclass
class ConfigSettings:
    """The values of a configuration by path, with the decisions made and the problems found so far."""

    values: dict[str, Any] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def get(self, path: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default for a key that is omitted, null or "auto"."""
        found = self.values.get(path)
        return default if found is None or found == "auto" else found

    def omitted(self, path: str, says: str) -> None:
        """Adds a note on what happens because a key is omitted."""
        self.decisions.append(Decision(path, "", NOTE, f"omitted: {says}"))

    def instead(self, path: str, says: str) -> None:
        """Adds a note on the effect of a key's value, which replaces the effect given in the table of keys."""
        name = path.rpartition("stage3_")[2]
        self.decisions = [d for d in self.decisions if not d.path.endswith(name)]
        self.note(path, says)

    def note(self, path: str, says: str) -> None:
        """Adds a note on a key, in addition to the effect given in the table of keys."""
        self.decisions.append(Decision(path, shown(self.values.get(path)), NOTE, says))

    def refuse(self, path: str, says: str) -> None:
        self.problems.append(f"{path}={shown(self.values.get(path))}: {says}")

    def check(self, source: str) -> None:
        """Raises one error with all problems, if there are any."""
        if self.problems:
            problems = list(dict.fromkeys(self.problems))
            what = f"{source} has {len(problems)} problem{'s' * (len(problems) > 1)}"
            raise FzeroValueError("deepspeed", what, problems, "correct these keys; all others are supported")


def read_file(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns a configuration as a dict, and its name for messages. It is read from a dict, a path, or the base64 text
    that DeepSpeed's launcher makes.

    Raises:
        FzeroTypeError: the argument is none of these.
        FzeroValueError: the file is missing, or is not JSON (or HJSON, if hjson is installed); or a key occurs
            twice.
    """
    if isinstance(config, Mapping):
        return _plain(config, "a dict"), "a dict"
    if not isinstance(config, (str, os.PathLike)):
        what = f"a configuration is a path or a dict, not {type(config).__name__}"
        raise FzeroTypeError("deepspeed", what, fix='e.g. fz.deepspeed.load_config("ds_config.json")')
    path, name = Path(config), os.fspath(config)
    if os.path.isfile(name):  # Path.is_file raises an error for a text that is too long for a file name
        try:
            return read_text(contents(path, _MOST), name), name
        except (OSError, Malformed) as error:
            fix = "give the path of a ds_config.json"
            raise FzeroValueError("deepspeed", f"{name} cannot be read", [str(error)], fix) from None
    try:
        text = base64.b64decode(name, altchars=b"-_", validate=True)  # a file name may be valid base64 too
        # Many file names are valid base64, so what it decodes to must look like JSON.
        if not text.lstrip().startswith(b"{"):
            raise ValueError
    except (binascii.Error, ValueError):
        fix = "give the path of an existing file, or the dict itself"
        raise FzeroValueError("deepspeed", f"{shown(name)} does not exist", fix=fix) from None
    return read_text(text, "base64"), "base64"


def _plain(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the configuration as JSON would store it: lists for tuples, and texts for keys."""
    try:
        # A round trip through JSON, so that a dict and a file with the same contents give the same configuration.
        return parsed(json.dumps(dict(config)))
    except (TypeError, ValueError, RecursionError) as error:
        raise FzeroTypeError("deepspeed", f"{name} has values that JSON does not have", [str(error)]) from None


def read_text(text: str | bytes, name: str) -> dict[str, Any]:
    """Returns a configuration as a dict, from its text. `name` is its name in errors.

    Raises:
        FzeroValueError: as for `read_file`.
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
"""Keys that correspond to no training argument. They are filled in if they are "auto", and compared with nothing."""


def settings(given: Mapping[str, Any], auto: Mapping[str, Any]) -> ConfigSettings:
    """Reads the values of a configuration, with "auto" filled in. The combined meaning of several keys is decided
    later."""
    out, auto = ConfigSettings(), _plain(auto, "auto")
    written: dict[str, str] = {}
    for path, value in _items(given, out):
        at = ALIASES.get(path, path)
        if at in written:
            out.problems.append(f"{path} and {written[at]}: one key under two names")
        written[at] = path
        if at in IGNORED:
            out.values[at] = value
            out.ignored.append(path)
        elif at in REJECTED:
            out.values[at] = value
            if _asks_for_nothing(value, REJECTED[at]):
                out.ignored.append(path)
            else:
                out.problems.append(f"{path}={shown(value)}: {REJECTED[at].says}")
        else:
            _read(out, path, value, auto)
    unknown = [name for name in auto if name not in KEYS or name in ALIASES]
    out.problems += [f"auto={{{name!r}: ...}}: unknown{_nearest(name)}" for name in unknown]
    return out


def _asks_for_nothing(value: Any, rejected: Rejected) -> bool:
    is_off = isinstance(value, dict) and value.get("enabled") is False and None in rejected.neutral
    return is_off or any(same(value, x) for x in rejected.neutral)


def _read(out: ConfigSettings, path: str, value: Any, auto: Mapping[str, Any]) -> None:
    """Reads a supported key."""
    at = ALIASES.get(path, path)
    kind, says = SUPPORTED[at]
    if value == "auto" and not kind.auto:
        if at not in auto:
            out.problems.append(f'{path}="auto": nothing fills it in: pass auto={{{at!r}: ...}}')
            return
        value = auto[at]
    elif at in auto and auto[at] != value and value is not None and at not in _FILLED_ALONE:
        out.problems.append(f"{path}={shown(value)}: the arguments say {shown(auto[at])}; make it 'auto'")
    if value != "auto" and (problem := kind.problem(value)):
        out.problems.append(f"{path}={shown(value)}: {problem}")
        return
    out.values[at] = value
    out.decisions.append(Decision(path, shown(value), APPLIED, _effect(at, value, says)))


def _effect(path: str, value: Any, says: str) -> str:
    """Returns what this value of a key has as its effect, where the table lists the effects of all values."""
    if path.endswith(".enabled") and value is False:
        return "off"
    by_value = dict(part.split(": ", 1) for part in says.split("; ")) if path == "zero_optimization.stage" else {}
    return by_value.get(str(value), says)


def _items(given: Mapping[str, Any], out: ConfigSettings, under: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of a configuration by path, with their values. Unknown keys become problems."""
    for key, value in given.items():
        path = f"{under}{key}"
        if path in SECTIONS and isinstance(value, Mapping):
            yield from _items(value, out, f"{path}.")
        elif path == "zero_optimization" and isinstance(value, bool):
            yield "zero_optimization.stage", int(value)
        elif path in SECTIONS and value is not None:
            out.problems.append(f"{path}={shown(value)}: a section, e.g. {{{_names(path)[0]!r}: ...}}")
        elif path in KEYS:
            yield path, value
        elif path not in SECTIONS:
            out.problems.append(f"{path}: unknown{_nearest(path)}")


def _names(section: str) -> list[str]:
    """Returns the names of the keys in a section ("" is the top level)."""
    at = f"{section}." if section else ""
    return list(dict.fromkeys(path[len(at) :].partition(".")[0] for path in KEYS if path.startswith(at)))


def _nearest(path: str) -> str:
    """Returns a hint at the key that may have been meant: one of that name in another section, or one with a similar
    name."""
    section, _, name = path.rpartition(".")
    known = dict.fromkeys((*(x for x in KEYS if x not in ALIASES), *sorted(SECTIONS)))
    elsewhere = [p for p in known if p.rpartition(".")[2] == name]
    if 0 < len(elsewhere) <= _ELSEWHERE:
        return f": it belongs at {' or '.join(elsewhere)}"
    if near := difflib.get_close_matches(name, _names(section), n=1, cutoff=0.6):
        return f": did you mean {near[0]!r}?"
    by_name = {p.rpartition(".")[2]: p for p in known}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return f": did you mean {by_name[near[0]]}?" if near else ""
