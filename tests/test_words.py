"""Module docstrings begin with a verb and a field noun, and errors speak the field's English."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import fzero as fz

PACKAGE = Path(fz.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
INVERTED = {"What", "Whatever", "Where", "Which", "Whichever", "When", "How", "Of", "That", "From"}
"""Words that begin a sentence which names nothing."""
NOT_SAID = {
    r"cannot work": "invalid arguments",
    r"did not come in (\{|time|[0-9])": "timed out after ... s",
    r"no leaf is trained": "no trainable parameters",
    r"(?<!here )\bis no (amount|directory|number|size|shape|dtype|device|function|tensor|name|state)\b": "is not a ...",
}
"""Phrases that errors do not have, and what they say instead."""


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s(?=[A-Z])", text)[0]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_module_says_what_it_does(path: Path) -> None:
    """`Packs buffers into one arena.`, not `Where buffers lie` or `Of buffers`."""
    first = sentence(path)
    assert first, "no docstring"
    assert first[-1] in ".:", first
    verb = re.split(r"[\s,:]", first)[0]
    assert verb not in INVERTED and re.fullmatch(r"[A-Z][a-z]+s", verb) and not verb.endswith("ss"), first


def test_no_two_modules_say_the_same() -> None:
    said = [sentence(path) for path in FILES]
    assert len({*said}) == len(said)


def test_a_folder_has_a_sentence() -> None:
    folders = {path.parent for path in FILES}
    assert not [name(folder) for folder in folders if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_errors_use_the_words_of_the_field(path: Path) -> None:
    texts = [x.value for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Constant)]
    wrong = {x: say for x in texts if isinstance(x, str) for said, say in NOT_SAID.items() if re.search(said, x)}
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_docstring_names_its_subject(path: Path) -> None:
    """`The place of a buffer.`, not `Where a buffer lies.`."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    first = {n.name: re.split(r"[\s,:]", text)[0] for n in nodes if (text := ast.get_docstring(n))}
    assert not {at: word for at, word in first.items() if word in INVERTED - {"When", "From"}}


_POINTS = re.compile(r"\b(that|which|what|those|where)\b", re.IGNORECASE)
_BEGINS = re.compile(r"\s*(- |\* |>>>|\.\.\.|\| |\w[\w, `]*: |\d\. )")
"""Lines that begin an entry of a list, an example, or an argument's description."""


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring or comment; a row of a table, with two spaces between its columns, is one."""
    part: list[str] = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or _BEGINS.match(line) or re.search(r"\S {2,}\S", line):
            yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\"(\[0-9])", " ".join(part))
            part.clear()
        part.append(line.strip())


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_sentence_is_read_once(path: Path) -> None:
    """At most 40 words, and at most three of `that`, `which`, `what`, `those` and `where`."""
    source = path.read_text()
    texts = [x.value.value for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Expr) and _is_text(x.value)]
    texts = [inspect.cleandoc(text) for text in texts]
    texts += [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    said = [s for text in texts for s in sentences(text)]
    assert not [s for s in said if len(s.split()) > 40 or len(_POINTS.findall(s)) > 3]


def _is_text(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and isinstance(x.value, str)


def test_class_names_occur_once() -> None:
    classes = [x.name for path in FILES for x in ast.parse(path.read_text()).body if isinstance(x, ast.ClassDef)]
    assert sorted(classes) == sorted({*classes})
