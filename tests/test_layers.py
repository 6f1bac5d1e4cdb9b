"""docs/design.md is true of the package: what imports what, and which files there are."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

import torch

import fzero

PACKAGE = Path(fzero.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design.md").read_text()


def unit(parts: tuple[str, ...]) -> str:
    """A folder of the package, or a file that lies in none."""
    return f"{parts[0]}/" if (PACKAGE / parts[0]).is_dir() else parts[0]


def table() -> str:
    return PAGE.partition("## The pipeline, folder by folder")[2].partition("**`tree`")[0]


def rows() -> list[set[str]]:
    cells = [line.split("|")[1] for line in table().splitlines() if line.startswith("| `")]
    return [set(re.findall(r"`([^`]+)`", cell)) for cell in cells]


def imported(tree: ast.Module) -> set[str]:
    """What a module imports when it runs; not what only annotations need."""
    typed = {
        id(x)
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
        for x in ast.walk(n)
    }
    nodes = [n for n in ast.walk(tree) if id(n) not in typed]
    modules = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    for n in nodes:
        if isinstance(n, ast.ImportFrom) and n.module:
            modules += [f"fzero.{a.name}" for a in n.names] if n.module == "fzero" else [n.module]
    return {unit(tuple(m.split(".")[1:])) for m in modules if m.startswith("fzero.") and not m.startswith("fzero.__")}


def test_what_imports_what() -> None:
    row = {name: i for i, names in enumerate(rows()) for name in names}
    files = [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]
    units = {p: unit(p.relative_to(PACKAGE).with_suffix("").parts) for p in files}
    assert set(units.values()) == set(row), "the table has every folder, and every file that lies in none"
    wrong = [
        f"{p.relative_to(PACKAGE)} imports {other}"
        for p in files
        for other in imported(ast.parse(p.read_text()))
        if row[other] > row[units[p]]
    ]
    assert not wrong, "\n".join(wrong)
    knows = {units[p] for p in files if "modules/" in imported(ast.parse(p.read_text()))} - {"modules/"}
    assert f"which only the front ends {' and '.join(f'`{x}`' for x in sorted(knows))} know" in table()


def closure(module: str) -> set[str]:
    """The files of fzero that are imported with this one, itself among them, by what modules import when they load."""
    paths = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): p for name, p in paths.items() if name != "fzero.__init__"}
    found, todo = set[str](), [module]
    while todo:
        if (name := todo.pop()) in found or name not in paths:
            continue
        found.add(name)
        todo += [name.rpartition(".")[0], *loaded(ast.parse(paths[name].read_text()).body)]
    return found


def loaded(body: list[ast.stmt]) -> list[str]:
    """The names of modules, and of what may be one, that statements import outside of functions."""
    out = []
    for n in body:
        if isinstance(n, ast.Import):
            out += [a.name for a in n.names]
        elif isinstance(n, ast.ImportFrom) and n.module:
            out += [n.module, *(f"{n.module}.{a.name}" for a in n.names)]
        elif not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)):
            parts = () if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) else ("body", "orelse", "handlers")
            out += [m for part in parts for m in loaded(getattr(n, part, []))]
    return out


def test_a_checkpoints_writer_and_reader_know_no_programs() -> None:
    for module in ("saving", "reading", "loading"):
        found = closure(f"fzero.checkpoint.{module}")
        units = {unit(tuple(name.split(".")[1:])) for name in found}
        assert not units & {"program/", "trace/", "transforms/", "passes/", "lowering/", "step/"}, units
        assert len(found) <= 60, f"{len(found)} files, {sorted(found)}"


def test_what_functions_read_is_told_without_graphs() -> None:
    """trace/ imports from trace/reads/, never the other way; its table names every file."""
    folder = PACKAGE / "trace" / "reads"
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    for path in folder.glob("[!_]*.py"):
        names = [m for m in loaded(ast.parse(path.read_text()).body) if m.startswith("fzero.trace")]
        assert all(m.startswith("fzero.trace.reads") for m in names), (path.name, names)
        assert f"`{path.name}`" in said, path.name


def test_ranks_are_said_to_time_out_in_one_place() -> None:
    said = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "timed out after {" in p.read_text()]
    assert said == ["ranks/notes.py"]


def test_a_folder_has_one_sentence() -> None:
    """The first of its docstring stands in the table."""
    for path in PACKAGE.glob("*/__init__.py"):
        first = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
        sentence = re.match(r".*?\.(?=\s|$)", first)
        assert sentence and sentence[0] in table(), path


def test_every_file_is_in_the_page() -> None:
    files = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if not p.stem.startswith("__")}
    assert not [
        str(p)
        for p in sorted(files)
        if f"`{p.name}`" not in PAGE
        and (p.parent != Path(".") or f"`{p.stem}`" not in PAGE)
        and p.parent != Path("trace/reads")  # it has a table of its own
    ]


def test_where_underscored_attributes_of_pytorchs_objects_are_read() -> None:
    weight = torch.ones(1, requires_grad=True)
    objects = [weight, weight.untyped_storage(), torch.ops.aten.add.Tensor, (weight + 1).grad_fn, torch.nn.LSTM(1, 1)]
    private = {name for x in objects for name in dir(x) if re.match("_[^_]", name)}
    said, read = collections.defaultdict(set), collections.defaultdict(set)
    for part in re.split(r";|\.\n", PAGE.partition("**`compat.py`**")[2].partition("\n## ")[0]):
        names = re.findall(r"`([^`]+)`", part)
        for name in names:
            if name in private:
                said[name] |= {x for x in names if x.endswith(".py")}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compat.py":
            for n in ast.walk(ast.parse(path.read_text())):
                if isinstance(n, ast.Attribute) and n.attr in private and ast.unparse(n.value) not in ("self", "cls"):
                    read[n.attr].add(path.relative_to(PACKAGE).as_posix())
    assert said == read
