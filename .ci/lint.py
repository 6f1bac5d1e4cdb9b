"""Checks the structure of the repository: imports, names, links, the changelog. Needs only the standard library.

    python .ci/lint.py

`.ci/run` and pre-commit call it together with ruff and pyright. Every problem of every check is printed; the exit
status is 1 if there is any. It judges structure only: no check here counts lines or words or looks at the wording of a
sentence.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fzero"
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "results" not in p.relative_to(DOCS).parts)
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
DESIGN = (DOCS / "design.md").read_text()
LAYERS = DESIGN.partition("## The pipeline, folder by folder")[2].partition("\nInside a folder,")[0]
"""The table of docs/design.md: a row may import from itself and from the rows above it."""

CODE_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
README_COMMANDS = (
    "pip install -e . && torchrun --nproc-per-node 2 examples/train_gpt.py",
    "pip install -e '.[test]' && pytest",
)
CHANGELOG_HEADINGS = (
    "Numerics changed",
    "Printed program changed",
    "Added",
    "Changed",
    "Deprecated",
    "Removed",
    "Fixed",
)


def main() -> int:
    checks = (
        imports_go_upwards_in_the_table,
        checkpoints_do_not_import_programs,
        guards_do_not_import_graphs,
        private_torch_names_stay_in_compat,
        class_names_are_unique,
        test_files_have_different_names,
        folders_list_their_files,
        links_lead_somewhere,
        named_tests_exist,
        navigation_has_every_page,
        changelog_has_the_agreed_form,
        ci_runs_the_commands_of_the_readme,
    )
    failed = False
    for check in checks:
        for problem in check():
            print(f"{check.__name__}: {problem}")
            failed = True
    return int(failed)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# Imports


def unit(module: str) -> str:
    """The folder of the package (`trace/`), or the file in its root (`mesh`), of a module named `fzero.…`."""
    first = module.split(".")[1]
    return f"{first}/" if (PACKAGE / first).is_dir() else first


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported_modules(nodes: Iterator[ast.AST] | list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "fzero":
            yield from (f"fzero.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_go_upwards_in_the_table() -> Iterator[str]:
    """Includes imports inside functions, but not imports that only annotations need."""
    cells = [line.split("|")[1] for line in LAYERS.splitlines() if line.startswith("| `")]
    row = {name: i for i, cell in enumerate(cells) for name in re.findall(r"`([^`]+)`", cell)}
    for path, tree in TREES.items():
        if path == PACKAGE / "__init__.py":
            continue
        own = unit(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own not in row:
            yield f"the table of docs/design.md lacks {own}"
            continue
        typing = {id(x) for n in ast.walk(tree) if only_for_types(n) for x in ast.walk(n)}
        modules = imported_modules([n for n in ast.walk(tree) if id(n) not in typing])
        units = {unit(m) for m in modules if m.startswith("fzero.") and not m.startswith("fzero.__")}
        for other in sorted(units & row.keys()):
            if row[other] > row[own]:
                yield f"{relative(path)} imports {other}, which is further down in the table of docs/design.md"


def loaded_with(module: str) -> set[str]:
    """The modules of fzero that importing `module` loads, including itself."""
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in TREES}
    found, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        if name in found or name not in paths or name == "fzero":
            continue
        found.add(name)
        todo.append(name.rpartition(".")[0])
        todo += imported_modules(statements_at_import(TREES[paths[name]].body))
    return found


def statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if not only_for_types(node) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "handlers"):
                yield from statements_at_import(getattr(node, part, []))


def checkpoints_do_not_import_programs() -> Iterator[str]:
    """A checkpoint can be read and written by a process that never traces anything."""
    for module in ("saving", "reading", "weight_loading"):
        units = {unit(name) for name in loaded_with(f"fzero.checkpoint.{module}")}
        for other in sorted(units & {"ir/", "trace/", "transforms/", "compiler/", "step/"}):
            yield f"fzero.checkpoint.{module} loads {other}"


def guards_do_not_import_graphs() -> Iterator[str]:
    for path in (PACKAGE / "trace" / "guards").glob("[!_]*.py"):
        for module in imported_modules(statements_at_import(TREES[path].body)):
            if module.startswith("fzero.trace") and not module.startswith("fzero.trace.guards"):
                yield f"{relative(path)} imports {module}"


def private_torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names under `torch` with a part that starts with one underscore."""
    imported, used = r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*", r"(torch|dist)(\.\w+)*\._(?!_)\w+"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if re.fullmatch(imported, a.name))
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{a.name}" for a in node.names)
            yield from ((node.lineno, name) for name in names if re.fullmatch(imported, name))
        elif isinstance(node, ast.Attribute) and re.fullmatch(used, name := ast.unparse(node)):
            yield node.lineno, name


def private_torch_names_stay_in_compat() -> Iterator[str]:
    """When a release of PyTorch moves a private name, one file has to follow."""
    for path, tree in TREES.items():
        if path != PACKAGE / "_compat" / "compat.py":
            yield from (f"{relative(path)}:{line}: {name}" for line, name in private_torch_names(tree))


# Names


def class_names_are_unique() -> Iterator[str]:
    names = Counter(n.name for tree in TREES.values() for n in tree.body if isinstance(n, ast.ClassDef))
    yield from (f"{name} is defined {times} times" for name, times in names.items() if times > 1)


def test_files_have_different_names() -> Iterator[str]:
    """pytest imports them by name, and fails if two have the same one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    yield from (f"{times} test files are named {name}" for name, times in names.items() if times > 1)


def folders_list_their_files() -> Iterator[str]:
    """The docstring of a folder's `__init__.py` names each of its files, so that a reader finds the file to open."""
    for path in TREES:
        if path.parent == PACKAGE or path.name == "__init__.py":
            continue
        docstring = ast.get_docstring(TREES[path.parent / "__init__.py"]) or ""
        if f"`{path.name}`" not in docstring:
            yield f"the docstring of {relative(path.parent)}/__init__.py does not mention {path.name}"


# Documents


def anchors(page: str) -> set[str]:
    """The anchors that mkdocs gives to headings."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


def links_lead_somewhere() -> Iterator[str]:
    for path in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", CODE_BLOCK.sub("", path.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists():
                yield f"{path.relative_to(ROOT)}: {target}: no such file"
            elif anchor and anchor not in anchors(file.read_text()):
                yield f"{path.relative_to(ROOT)}: {target}: no such heading"


def named_tests_exist() -> Iterator[str]:
    """Files below tests/, and functions in them, that a document names."""
    tests = ROOT / "tests"
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", tests / "README.md", *sorted(DOCS.rglob("*.md"))]
    for document in documents:
        for name, function in re.findall(r"([\w/]*\w+\.py)(?:::(\w+))?", document.read_text()):
            if not name.startswith("tests/") and not function:
                continue
            file = tests / name.removeprefix("tests/")
            if not file.exists() or (function and f"def {function}(" not in file.read_text()):
                yield f"{document.relative_to(ROOT)} names {name}{function and '::'}{function}, which does not exist"


def navigation_has_every_page() -> Iterator[str]:
    listed = set(re.findall(r"^\s*- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {p.relative_to(DOCS).as_posix() for p in PAGES}
    yield from (f"mkdocs.yml does not list {page}" for page in sorted(pages - listed))
    yield from (f"mkdocs.yml lists {page}, which does not exist" for page in sorted(listed - pages))


def changelog_has_the_agreed_form() -> Iterator[str]:
    _, *versions = (ROOT / "CHANGELOG.md").read_text().split("\n## [")
    for text in versions:
        for heading in re.findall(r"^### (.*)$", text, re.MULTILINE):
            if heading not in CHANGELOG_HEADINGS:
                yield f"[{text.partition(']')[0]}: {heading!r} is none of {', '.join(CHANGELOG_HEADINGS)}"
    if not versions or not versions[0].startswith("Unreleased]"):
        yield "the first section is not [Unreleased]"


def ci_runs_the_commands_of_the_readme() -> Iterator[str]:
    shown = [text for language, text in CODE_BLOCK.findall((ROOT / "README.md").read_text()) if language == "sh"]
    lines = [line.strip() for text in shown for line in text.splitlines()]
    run = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.lstrip().startswith("#")]
    for command in README_COMMANDS:
        if command not in lines:
            yield f"README.md does not show {command!r} alone on a line"
        if not any(command in line for line in run):
            yield f".ci/run does not run {command!r}"


if __name__ == "__main__":
    sys.exit(main())
