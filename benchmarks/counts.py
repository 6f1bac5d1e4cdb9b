"""Counts what a reader has to learn: lines, files, names, optional ideas, functions with many branches.

It takes about 5 seconds.

    python benchmarks/counts.py

The limits are those of docs/design.md. Nothing is timed, so every machine has the same numbers.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from common import SOURCE, publish, script_flags, verdict

PACKAGE = SOURCE / "fzero"
FOLDERS = ("passes", "program", "lowering")
BRANCHES = 30
SEARCH = ("passes/pipeline", "passes/choice", *(f"lowering/{x}" for x in (
    "variants", "search", "budget", "auto", "bounds", "advice", "lower", "at_rest"
)))  # fmt: skip
"""The files that choose among the programs of a step: one search of at most half the lines of the three before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    script_flags(parser, "counts")
    args = parser.parse_args()
    rows, data, missed = [], {}, []

    def row(text: str, number: int, limit: int | None, of: Iterable[str] = ()) -> None:
        listed = sorted(of)
        rows.append(
            (
                text,
                f"{number:,}",
                "" if limit is None else f"{limit:,}",
                "" if limit is None else verdict(number, limit),
            )
        )
        data[text] = {"count": number, "limit": limit, "of": listed}
        if limit is not None and number > limit:
            missed.append(text)

    files = sorted(PACKAGE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    row("fzero: lines", sum(map(_lines, files)), 50_000)
    row("fzero: files", len(files), 280)
    row("benchmarks: lines", sum(map(_lines, (SOURCE / "benchmarks").rglob("*.py"))), 6_000)
    row("tests: lines", sum(map(_lines, (SOURCE / "tests").glob("*.py"))), None)
    long = [_name(p) for p in files if _lines(p) > 400]
    row("fzero: files of more than 400 lines", len(long), None, long)
    names = Counter(p.name for p in files if not p.name.startswith("__"))
    row("file names that occur twice or more", *_twice(names, None))
    classes = Counter(
        n.name
        for tree in trees.values()
        for n in tree.body
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
    )
    row("class names that occur twice or more", *_twice(classes))
    own = {p: tree for p, tree in trees.items() if p.relative_to(PACKAGE).parts[0] in FOLDERS}
    found = _branchy(own)
    row(f"functions of {', '.join(FOLDERS)} with more than {BRANCHES} branches", len(found), 0, found)
    ever = [
        _name(p)
        for p, tree in own.items()
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and n.value == 1_000_000
    ]
    row("numbers that mean for ever (1_000_000)", len(ever), 0, ever)
    zips = [
        f"{_name(p)}:{n.lineno}"
        for p, tree in own.items()
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "zip" and len(n.args) > 2
    ]
    row(f"zips of three or more lists in {', '.join(FOLDERS)}", len(zips), 0, zips)
    search = [PACKAGE / f"{name}.py" for name in SEARCH]
    row("the choice of a program: lines", sum(map(_lines, search)), 1_050, (f"{_name(p)}: {_lines(p)}" for p in search))
    waits = [_name(p) for p in files if "timed out after {" in p.read_text()]
    row("files that say 'timed out after'", len(waits), 1, waits)
    sys.path.insert(0, str(SOURCE / "tests"))
    from test_layers import closure
    from test_words import _POINTS, sentences

    said = [(p, s) for p, tree in trees.items() for text in _texts(tree) for s in sentences(text)]
    twice = [f"{_name(p)}: {s[:60]}" for p, s in said if len(s.split()) > 40 or len(_POINTS.findall(s)) > 3]
    row("sentences of docstrings of over 40 words, or four of that, which, what, those, where", len(twice), 0, twice)
    saving = closure("fzero.checkpoint.saving")
    row("files that the writer of checkpoints imports", len(saving), 75, saving)

    from fzero.passes.pipeline import PASSES
    from fzero.program.ops import OPS

    row("passes", len(PASSES), None, (p.name for p in PASSES))
    row("operations of a program", len(OPS), None, OPS)
    optional = re.findall(r"^\| ([^|]+) \|", _section("Optional features, and what each must earn"), re.M)[1:]
    row("optional features, in the table of docs/design.md", len(optional), None, optional)
    notes = [
        "Branches: as radon counts them, in expressions too. Names: of files and of classes in modules, without those "
        "that begin with an underscore.",
        "at most so many wanted: " + (f"MISSED by {', '.join(missed)}" if missed else "met"),
    ]
    publish(
        args.name,
        "What a reader has to learn",
        ("", "count", "at most", ""),
        rows,
        notes,
        data,
        args.out,
        how="Counted",
    )


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _texts(tree: ast.Module) -> list[str]:
    """The docstrings of a module, of attributes too."""
    nodes = (n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    return [inspect.cleandoc(n.value) for n in nodes if isinstance(n.value, str)]


def _twice(names: Counter[str], limit: int | None = 0) -> tuple[int, int | None, list[str]]:
    found = [f"{name}: {n}" for name, n in names.items() if n > 1]
    return len(found), limit, found


def _branchy(trees: dict[Path, ast.Module]) -> list[str]:
    nodes = [(p, n) for p, tree in trees.items() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    counts = {f"{_name(p)}:{n.lineno} {n.name}": sum(map(_branches, _own(n))) for p, n in nodes}
    return [f"{name}: {count}" for name, count in counts.items() if count > BRANCHES]


def _own(n: ast.AST) -> Iterator[ast.AST]:
    """A function's nodes, without those of functions in it, which count on their own."""
    yield n
    for child in ast.iter_child_nodes(n):
        yield from () if isinstance(child, ast.FunctionDef) else _own(child)


def _branches(n: ast.AST) -> int:
    """The branches that radon counts at a node, of expressions too. A function is one itself."""
    if isinstance(n, ast.BoolOp):
        return len(n.values) - 1
    if isinstance(n, ast.comprehension):
        return 1 + len(n.ifs)
    if isinstance(n, (ast.For, ast.While, ast.Try)):
        return bool(n.orelse) + (len(n.handlers) if isinstance(n, ast.Try) else 1)
    return isinstance(n, (ast.If, ast.IfExp, ast.Lambda, ast.Assert, ast.match_case, ast.FunctionDef))


def _section(title: str) -> str:
    """The text of a section of docs/design.md."""
    text = (SOURCE / "docs" / "design.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


if __name__ == "__main__":
    main()
