"""Reads docstrings as fzero writes them, for the API reference: an extension of griffe, which mkdocstrings runs on."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Communication|Memory|Metrics|Time|Papers?|References|Raises|Returns|Args): ?(\S.*)$")


class Sections(griffe.Extension):
    """Makes paragraphs of sections with their text on the heading's line, such as `Memory: 8 bytes a parameter`."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = paragraphs(obj.docstring.value)


def paragraphs(text: str) -> str:
    """A docstring with these sections as paragraphs that begin with the heading in bold, and its example as code."""
    out, inside = [], False
    for line in inspect.cleandoc(text).split("\n"):
        if line == "Example:":
            line = "Examples:"  # as griffe knows it: >>> lines are code
        if found := _SECTION.match(line):
            out += ["", f"**{found[1]}**: {found[2]}"]
            inside = True
        elif inside and line.startswith("    "):
            out.append(line.strip())
        else:
            inside = False
            out.append(line)
    return "\n".join(out)
