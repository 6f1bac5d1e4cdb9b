"""Counts what a reader has to learn: lines, files, names, optional ideas, functions with many branches.

It takes about 5 seconds.

    python benchmarks/counts.py

The limits are those of docs/design.md. Nothing is timed, so every machine has the same numbers.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from common import SOURCE, publish, script_flags, verdict

PACKAGE = SOURCE / "fzero"
FOLDERS = ("passes", "program", "lowering")
BRANCHES = 30


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
    found = _branchy()
    row(f"functions of {', '.join(FOLDERS)} with more than {BRANCHES} branches", len(found), 0, found)
    own = {p: tree for p, tree in trees.items() if p.relative_to(PACKAGE).parts[0] in FOLDERS}
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
    sys.path.insert(0, str(SOURCE / "tests"))
    from test_layers import closure

    saving = closure("fzero.checkpoint.saving")
    row("files that the writer of checkpoints imports", len(saving), 75, saving)

    from fzero.passes.pipeline import PASSES
    from fzero.program.ops import OPS

    row("passes", len(PASSES), None, (p.name for p in PASSES))
    row("operations of a program", len(OPS), None, OPS)
    optional = re.findall(r"^\| ([^|]+) \|", _section("Optional features, and what each must earn"), re.M)[1:]
    row("optional features, in the table of docs/design.md", len(optional), None, optional)
    notes = [
        "Branches: mccabe's count, by ruff (C901). Names: of files and of classes in modules, without those that begin "
        "with an underscore.",
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


def _twice(names: Counter[str], limit: int | None = 0) -> tuple[int, int | None, list[str]]:
    found = [f"{name}: {n}" for name, n in names.items() if n > 1]
    return len(found), limit, found


def _branchy() -> list[str]:
    folders = [str(PACKAGE / f) for f in FOLDERS]
    limit = f"lint.mccabe.max-complexity={BRANCHES}"
    command = ["ruff", "check", *folders, "--select", "C901", "--config", limit, "--output-format", "json", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    return [f"{_name(Path(x['filename']))}: {x['message']}" for x in json.loads(done.stdout)]


def _section(title: str) -> str:
    """The text of a section of docs/design.md."""
    text = (SOURCE / "docs" / "design.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


if __name__ == "__main__":
    main()
