"""Captures the settings of a function, the values that it reads besides its arguments, so that two functions, or two
moments, can be compared.

A function is its code and everything that this code can name: closure cells, defaults, globals, attributes of objects,
modules and classes, and the same for every function among these. An attribute is read if any code that was reached
names it. Named values are looked up; no code is run. A value of an unknown kind (a file, a lock, an iterator) is
compared by identity or not at all. This file does not know about blocks or steps.

A name that code contains as a string counts if the code reads by string: `getattr(config, "rate")`,
`vars(config)["rate"]`, `globals()["RATE"]`. Unless `strict`, only named items count of the environment and of a
dictionary with string keys, if code does nothing else with the dictionary (`CONFIG["rate"]`, `os.getenv("RATE", "1")`);
its other items are not settings.

Not covered are draws and counters of a running function, the clock, globals of installed libraries, and computed names
(`globals()[prefix + "rate"]`, `eval`). Also not covered are files, tensors written through NumPy, in-place changes of
arrays above `value_keys.LARGE` bytes, and values beyond the first `settings_walk.MOST`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from fzero.trace.guards.settings_walk import SelfChecked, Walk


class Settings(NamedTuple):
    """Facts about the values that a function reads, in a fixed order, with the place of each; and the objects that
    report their own reads. Two functions with equal facts and equal arguments do the same."""

    facts: tuple[Hashable, ...]
    places: tuple[str, ...]
    standing: tuple[SelfChecked, ...] = ()


def settings(*values: Any, strict: bool = True, without: Callable[[Any], bool] = lambda value: False) -> Settings:
    """The current settings of functions, or of values that are passed to functions.

    Args:
        values: functions, and arguments that are not tensors.
        strict: whether values count as different when in doubt. If so, values of unknown kinds and tensors in memory
            are compared by identity, and if code reads attributes without naming them (`getattr`, `vars`), all
            attributes and all items of a dictionary are read. Otherwise values count as equal when in doubt.
        without: functions and objects for which this returns True are not inspected.

    Example:
        >>> rate = [0.5]
        >>> def scaled(x, rate=rate): return x * rate[0]
        >>> before = settings(scaled)
        >>> rate[0] = 0.25
        >>> settings(scaled) == before
        False
    """
    walk = Walk(strict, without)
    walk.run(values)
    return Settings(tuple(walk.facts), tuple(walk.places), tuple(walk.standing))


def changes(old: Settings, new: Settings) -> list[str]:
    """The first difference between two captures of one function, such as `temperature: 1.0 before, 2.0 now`. Empty if
    they are equal."""
    if old.facts == new.facts:
        return []
    before, after = _told(old), _told(new)
    for place in (*after, *before):
        if before.get(place) != after.get(place):
            return [f"{place}: {before.get(place, 'not set')} before, {after.get(place, 'not set')} now"]
    # All values that can be shown are equal: the difference is in one that has no text, such as an object compared by
    # identity.
    at = next((i for i, (a, b) in enumerate(zip(old.facts, new.facts, strict=False)) if a != b), 0)
    return [f"{new.places[at]}: a different object than before"]


def _told(settings: Settings) -> dict[str, str]:
    """The values that can be shown in a message, by place: plain values, and the lengths of containers."""
    shown: dict[str, str] = {}
    for fact, place in zip(settings.facts, settings.places, strict=True):
        match fact:
            case (type() as kind, value):
                shown[place] = str(value) if issubclass(kind, (float, complex)) else repr(value)
            case (type() as kind, "of", number):
                shown[place] = f"a {kind.__name__} of {number}"
    return shown
