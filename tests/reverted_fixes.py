"""Reverts fixes one at a time and runs the tests: does the default tier still notice each fault that was once fixed?

The table `reverted_fixes.tsv` beside this script lists commits before cabbda39 that changed both fzero/ and tests, the
newest first; it was measured at cabbda39. For each row with the status `fix`, the changes of the commit below fzero/
are undone in a scratch worktree, and tests run there:

1. `default`: those of the commit's test functions, looked up by name in today's tree, that are in the default tier.
   The column `tests` names further functions, which were written for the same fault later.
2. `full`: if none of these fails, the same functions with --full.
3. `folders`, with the option --folders: the default tier of the folders that the commit touched, then the gate.

The first test that fails ends a step and is written into the table, so an interrupted run continues where it stopped.

Where later commits have rebuilt the place, `undone` says that only a part could be undone, or that a patch in
`reverted_fixes/` disables the fix in today's code by hand. All other rows have as their status the reason why they were
passed over: no fix, a feature that 0.3 removes, conflicts, or a part that can be undone and that no test notices, which
shows nothing. `superseded` commits can be undone without a fault, because something else now prevents it.

The patches apply to the files as they are today. Whoever moves or rewrites the lines of one makes it anew: the same
edit by hand, whose `git diff` is the patch, and then `run` of its row. This lists those that do not apply any more:

    for patch in tests/reverted_fixes/*.patch; do git apply --check $patch; done

The rows without a patch have their answers from cabbda39. The files of fzero/ have been split, moved to other folders
and rewritten since, and git does not follow all of them: of these 62 rows, 8 undo nothing today (28 November 2026), and
2 conflict in most places. `run` of such a row gives it the status `conflicts`; with a patch it would stay a `fix`.

    git worktree add --detach ../scratch main
    python tests/reverted_fixes.py candidates --worktree ../scratch     # commits that could be rows
    python tests/reverted_fixes.py run --worktree ../scratch            # all rows without an answer
    python tests/reverted_fixes.py run --worktree ../scratch 0da08b7a   # one row, again
    python tests/reverted_fixes.py check --worktree ../scratch          # the tests of the table, with nothing undone
    python tests/reverted_fixes.py summary

Two runs with a worktree each may share the table: `--part 1/2` and `--part 2/2`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".tsv")
PATCHES = Path(__file__).with_suffix("")
"""Reverts made by hand, COMMIT.patch, for places that later commits have rebuilt."""
COLUMNS = ("commit", "subject", "status", "undone", "default", "full", "folders", "seconds", "failure", "tests", "note")
BROKEN = (
    r"(collection: .*)?\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError)\b|"
    r"TypeError: \S+\(\) (got an|take|missing)|AttributeError: <?module"
)
"""Failures that say nothing of the tests: names or arguments of the commit that other code of today uses."""
LIMIT = 2400  # seconds for the tests of one step


def git(*args: str, at: Path, check: bool = True, **more: Any) -> str:
    done = subprocess.run(["git", "-C", str(at), *args], capture_output=True, text=True, **more)
    if check and done.returncode:
        raise RuntimeError(f"git {' '.join(args)}: {done.stderr}")
    return done.stdout


# Undoing a commit.


def undo(commit: str, tree: Path) -> str:
    """Undo the changes of a commit below fzero/ in a worktree; returns how.

    The revert is a three-way merge, which follows files that were renamed since. Files in which it conflicts are merged
    once more without comments and with today's docstrings, because many conflicts are only about words. What conflicts
    there too stays as it is today.
    """
    git("reset", "-q", "--hard", at=tree)
    git("clean", "-fdq", at=tree)
    if (patch := PATCHES / f"{commit}.patch").exists():
        git("apply", "--3way", str(patch.resolve()), at=tree)
        return "by hand"
    # The two sides of the merge are commits whose parent, and so their merge base, is the commit to undo.
    sides = [git("commit-tree", f"{of}^{{tree}}", "-p", commit, "-m", "side", at=tree) for of in ("HEAD", f"{commit}^")]
    sides = [x.strip() for x in sides]
    merged, *rest = git("merge-tree", "--write-tree", "--no-messages", *sides, at=tree, check=False).splitlines()
    stages: dict[str, dict[str, str]] = {}
    for line in rest:
        if match := re.fullmatch(r"\d+ (\w+) (\d)\t(fzero/.*)", line):
            blob, stage, path = match.groups()
            stages.setdefault(path, {})[stage] = blob
    changed = git("diff", "--binary", "HEAD", merged, "--", "fzero", *(f":!{path}" for path in stages), at=tree)
    if changed:
        git("apply", "--whitespace=nowarn", at=tree, input=changed)
    conflicts = 0
    for path, blobs in stages.items():
        if len(blobs) == 3 and path.endswith(".py"):
            base, ours, theirs = (git("cat-file", "blob", blobs[x], at=tree) for x in "123")
            text, count = merge_without_comments(base, ours, theirs)
            (tree / path).write_text(text)
            conflicts += count
        else:  # the file has been removed since, or was added by the commit
            conflicts += 1
    if not git("status", "--porcelain", "--", "fzero", at=tree):
        return "nothing"
    if conflicts:
        hunks = git("diff", "-U0", f"{commit}^", commit, "--", "fzero", at=tree).count("\n@@")
        return f"in part: {conflicts} conflicts, {hunks} hunks"
    return "without comments" if stages else "cleanly"


def merge_without_comments(base: str, ours: str, theirs: str) -> tuple[str, int]:
    """A three-way merge of the statements of three Python files, and the number of conflicts, in which ours is kept."""
    words = docstrings(ast.parse(ours))
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, name)) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            module = ast.parse(text)
            docstrings(module, words)
            Path(path).write_text(ast.unparse(module) + "\n")
        conflicts = subprocess.run(["git", "merge-file", "-q", "-p", *paths], capture_output=True).returncode
        merged = subprocess.run(["git", "merge-file", "-q", "-p", "--ours", *paths], capture_output=True, text=True)
    try:
        ast.parse(merged.stdout)
    except SyntaxError:
        return ours, conflicts + 1
    return (merged.stdout if ast.dump(ast.parse(merged.stdout)) != ast.dump(ast.parse(ours)) else ours), conflicts


def docstrings(module: ast.Module, new: dict[str, str] | None = None) -> dict[str, str]:
    """The strings that stand as statements, by the name of what they describe; replaced by `new`'s, if given."""
    found = {}

    def visit(node: Any, name: str) -> None:
        before = name
        for at, child in enumerate(node.body):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                key = f"{before}:{at == 0}"
                if isinstance(child.value.value, str):
                    found[key] = child.value.value
                    if new is not None:
                        child.value.value = new.get(key, "")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, f"{name}.{child.name}")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                before = f"{name}.{ast.unparse(target)}"

    visit(module, "")
    return found


# Which tests.


def functions(source: str) -> dict[str, str]:
    try:
        module = ast.parse(source)
    except SyntaxError:
        return {}
    return {x.name: ast.unparse(x) for x in module.body if isinstance(x, ast.FunctionDef) and x.name[:5] == "test_"}


def tests_of(commit: str, tree: Path) -> list[str]:
    """Names of the test functions that a commit added, then of those that it changed."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for line in git("diff", "--name-status", "-M", f"{commit}^", commit, "--", "tests", at=tree).splitlines():
        kind, *paths = line.split("\t")
        if not re.search(r"test_\w+\.py$", paths[-1]):
            continue
        if kind != "A":
            before |= functions(git("show", f"{commit}^:{paths[0]}", at=tree))
        if kind != "D":
            after |= functions(git("show", f"{commit}:{paths[-1]}", at=tree))
    added = [name for name in after if name not in before]
    return added + [name for name in after if name in before and after[name] != before[name]]


@functools.cache
def index(tree: Path) -> dict[str, list[str]]:
    """Where the test functions of a worktree are, by name."""
    where: dict[str, list[str]] = {}
    for path in sorted(tree.glob("tests/**/test_*.py")):
        for name in functions(path.read_text()):
            where.setdefault(name, []).append(f"{path.relative_to(tree)}::{name}")
    return where


def places_today(names: list[str], tree: Path) -> list[str]:
    """Where test functions are now, in the order of their names."""
    return [place for name in names for place in index(tree).get(name, ())]


def folders(commit: str, places: list[str], tree: Path) -> list[str]:
    """The folders of tests for what a commit changed: those of its tests, and tests/X for fzero/X."""
    changed = git("diff", "--name-only", f"{commit}^", commit, "--", "fzero", at=tree).splitlines()
    names = ["/".join(x.split("/")[:2]) for x in places] + [f"tests/{x.split('/')[1]}" for x in changed]
    return [x for x in dict.fromkeys(names) if (tree / x).is_dir()]


# Running tests.


class FailureReporter:
    """A plugin of pytest that reports each failed test, and each file that cannot be collected, as it happens."""

    def __init__(self, tell: Callable[[list[str]], None]) -> None:
        self.tell = tell

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.tell([report.nodeid, (crash.message if crash else report.longreprtext).strip()])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tell(
                [report.nodeid, f"collection: {report.longreprtext.strip().splitlines()[-1].removeprefix('E').strip()}"]
            )


class PytestDied(Exception):
    """pytest was killed, crashed, or reached `LIMIT` before it had a result."""


def failures(tree: Path, args: list[str], log: Path) -> list[list[str]]:
    """Failed tests and their messages, by pytest in a fork of this process.

    A fork is quicker than a new interpreter by the import of PyTorch, which this process has done and
    which is most of the time of a short test.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        os.dup2(1, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[0] = str(tree)  # in place of the folder of this script
        import pytest

        def tell(what: list[str]) -> None:
            os.write(write, (json.dumps(what) + "\n").encode())

        code = pytest.main(["-n0", "-q", "-p", "no:cacheprovider", *args], plugins=[FailureReporter(tell)])
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            tell(["tests/conftest.py", "ImportError: pytest does not start"])
        # Without --full, all tests of a fix may be left out; with it, there must be some.
        normal = [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED]
        if code in normal or (code == pytest.ExitCode.NO_TESTS_COLLECTED and "--full" not in args):
            os.write(write, b'"done"\n')
        os._exit(int(code))
    os.close(write)
    os.set_blocking(read, False)
    told, end, ended = b"", time.monotonic() + LIMIT, False
    while not ended:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(BlockingIOError):
            told += os.read(read, 1 << 20)
        time.sleep(0.05)
    os.close(read)
    lines = [json.loads(x) for x in told.decode().splitlines()]
    found = [x for x in lines if x != "done"]
    if not found and "done" not in lines:
        raise PytestDied(f"pytest {' '.join(args)} did not end; its output is in {log}")
    return found


def first_failure(tree: Path, args: list[str], log: Path) -> list[str] | None:
    """The first failure. A timeout or a death of the process may be the machine's load: then once more."""
    with contextlib.suppress(PytestDied):
        found = failures(tree, ["-x", *args], log)
        if not (found and "imeout" in found[0][1]):
            return found[0] if found else None
    found = failures(tree, ["-x", *args], log)
    return found[0] if found else None


# The table.


def rows() -> dict[str, dict[str, str]]:
    with TABLE.open(newline="") as file:
        return {row["commit"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


def write(commit: str, **cells: str) -> None:
    """Change cells of a row, whoever else writes to the table."""
    with TABLE.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = rows()
        table[commit] |= cells
        lines = ["\t".join(COLUMNS)]
        lines += ["\t".join(" ".join((row[x] or "").split()) for x in COLUMNS) for row in table.values()]
        TABLE.write_text("\n".join(lines) + "\n")


# Commands.


def candidates(tree: Path, known: set[str]) -> None:
    """Commits that change fzero/ and tests, newest first, with how they are undone."""
    for line in git("log", "--no-merges", "--format=%h\t%s", "HEAD", "--", "fzero", at=tree).splitlines():
        commit, _, subject = line.partition("\t")
        if commit in known or not (names := tests_of(commit, tree)) or not places_today(names, tree):
            continue
        print(commit, subject, undo(commit, tree), sep="\t", flush=True)


def run(tree: Path, commit: str, step: str, log: Path) -> None:
    start, row = time.monotonic(), rows()[commit]
    places = places_today([*row["tests"].split(), *tests_of(commit, tree)], tree)
    if not places:
        write(commit, status="no test by its name today")
        return
    how = undo(commit, tree)
    numbers = [int(x) for x in re.findall(r"\d+", how)]
    if how == "nothing" or (numbers and numbers[0] > numbers[1] / 2):
        write(commit, status="conflicts")
        return
    failure = None
    chosen = {"default": [places], "full": [["--full", *places]]}
    try:
        for tests in chosen.get(step) or [folders(commit, places, tree), ["tests/gate"]]:
            failure = failure or first_failure(tree, tests, log)
    except PytestDied as died:  # shows nothing of the tests: the row stays without an answer
        print(commit, step, "not run:", died, flush=True)
        return
    name, message = failure or ("missed", "")
    message = re.sub(r"0x\w+", "0x...", (message.splitlines() or [""])[0])[:160]
    if re.match(BROKEN, message):
        print(commit, how, message, flush=True)
        write(commit, status="conflicts", failure=message)
        return
    seconds = f"{float(row['seconds'] or 0) + time.monotonic() - start:.0f}"
    write(commit, undone=how, seconds=seconds, failure=message or row["failure"], **{step: name})
    print(commit, step, seconds, name, message, flush=True)


def check(tree: Path, log: Path) -> int:
    """Run the test functions that the table names with nothing undone, each in its tier: they must exist and pass."""
    git("reset", "-q", "--hard", at=tree)
    git("clean", "-fdq", at=tree)
    problems: list[Any] = []
    for columns, flags in ((("default", "folders"), []), (("full",), ["--full"])):
        named = sorted({row[column] for row in rows().values() for column in columns if "::" in row[column]})
        if not named:  # pytest would run all tests
            continue
        # All cases of a function, as in `run`: the id of a case may be another one today.
        names = list(dict.fromkeys(re.split(r"::|\[", name)[1] for name in named))
        places = [places_today([name], tree) for name in names]
        problems += [
            f"{name}: no test by this name today" for name, found in zip(names, places, strict=True) if not found
        ]
        try:
            problems += failures(tree, [*flags, *(place for found in places for place in found)], log)
        except PytestDied as died:
            problems.append(died)
        print(f"{len(names)} functions {' '.join(flags)}", flush=True)
    print(*problems, sep="\n")
    return int(bool(problems))


def summary() -> None:
    table = rows().values()
    fixes = [row for row in table if row["status"] == "fix"]
    missed = [x for x in fixes if x["default"] == "missed"]
    by = {
        "fixes": fixes,
        "not run": [x for x in fixes if not x["default"]],
        "found by their own tests in the default tier": [x for x in fixes if "::" in x["default"]],
        "else by the default tier of their folders": [x for x in missed if "::" in x["folders"]],
        "   of these by the gate only": [x for x in missed if x["folders"].startswith("tests/gate")],
        "else by their own tests with --full": [x for x in missed if "::" not in x["folders"] and "::" in x["full"]],
        "missed": [x for x in missed if "::" not in x["folders"] and x["full"] == "missed"],
    }
    for name, of in by.items():
        print(f"{len(of):4} {name}")
    print("     undone:", dict(Counter(row["undone"].partition(":")[0] for row in fixes)))
    print(
        "     not selected:", dict(Counter(row["status"].partition(":")[0] for row in table if row["status"] != "fix"))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["candidates", "run", "check", "summary"])
    parser.add_argument("commits", nargs="*", help="run: these rows, whether or not they have an answer")
    parser.add_argument("--worktree", type=Path, help="a scratch worktree, whose files are overwritten")
    parser.add_argument(
        "--folders", action="store_true", help="run: the rows that their own tests in the default tier miss"
    )
    parser.add_argument("--part", default="1/1", help="run: every n-th row, as 1/2 and 2/2")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir(), "reverted_fixes.log"))
    args = parser.parse_intermixed_args()
    if args.command == "summary":
        summary()
        return 0
    if args.worktree is None or args.worktree.resolve() == Path(__file__).resolve().parent.parent:
        parser.error("--worktree: a scratch worktree is needed, as its files are overwritten")
    tree = args.worktree.resolve()
    if args.command == "candidates":
        candidates(tree, set(rows()))
        return 0
    import pytest  # noqa: F401  what forks share
    import torch  # noqa: F401

    if args.command == "check":
        return check(tree, args.log)
    part, parts = map(int, args.part.split("/"))
    for commit in args.commits:
        write(commit, **dict.fromkeys(("undone", "default", "full", "folders", "seconds", "failure"), ""))
    for step in ["folders"] if args.folders else ["default", "full"]:
        for commit in args.commits or [x for x, row in rows().items() if row["status"] == "fix"][part - 1 :: parts]:
            row = rows()[commit]
            wanted = row["status"] == "fix" and (step == "default" or row["default"] == "missed")
            if wanted and not row[step]:
                run(tree, commit, step, args.log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
