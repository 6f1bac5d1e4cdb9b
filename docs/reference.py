"""Makes the generated parts of the site: the API reference, indexes of files and flags, and tables of results.

`mkdocs build` calls the hooks at the end of this file. Each public name has a page, made from its docstring; the index
of these pages follows the text of docs/reference/api.md. The index of the package's files follows the text of
docs/design.md, and the flags of each command follow that of docs/reference/cli.md. A paragraph that is only
a link to a table of results becomes the table itself. All of this exists only in the built site.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOMS = {
    "fz": ("fzero", "Steps, transforms, meshes, programs and plans"),
    "fz.optim": ("fzero.optim", "Optimizers and schedules"),
    "fz.random": ("fzero.random", "Random numbers"),
    "fz.experts": ("fzero.ops.experts", "Mixtures of experts"),
    "fz.data": ("fzero.data", "Data sets and batches"),
    "fz.tree": ("fzero.tree", "Pytrees"),
    "fz.checkpoint": ("fzero.checkpoint", "Checkpoints"),
    "fz.hf": ("fzero.hf", "Hugging Face models"),
    "fz.testing": ("fzero.testing", "Checks of equivalence and determinism"),
    "fz.deepspeed": ("fzero.deepspeed", "DeepSpeed configurations"),
    "fz.errors": ("fzero.errors", "Errors"),
}
"""The modules with public names, as users write them."""

ROOT = Path(__file__).resolve().parent.parent

API = "reference/api.md"
"""The page that the index of public names follows, from docs/."""
DESIGN = "design.md"
"""The page that the index of files follows, from docs/."""
CLI = "reference/cli.md"
"""The page that the flags of the commands follow, from docs/."""


class Name(NamedTuple):
    """A public name: as users write it, where it is defined, and the object."""

    text: str
    home: str
    found: Any

    @property
    def page(self) -> str:
        """Its page, from docs/."""
        return f"reference/api/{self.text}.md"

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        if not inspect.isclass(self.found) and not inspect.isfunction(self.found):  # the name of a type
            return "A function that maps the number of an update, from 0, to a learning rate."
        return first_sentence(inspect.getdoc(self.found) or "")


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, on one line."""
    text = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s", text)[0]


def names(room: str) -> Iterator[Name]:
    """The public names of a module that are no modules."""
    module = importlib.import_module(ROOMS[room][0])
    for name in module.__all__:
        found = getattr(module, name)
        if not inspect.ismodule(found):
            defined = inspect.isclass(found) or inspect.isfunction(found)
            home = found.__module__ if defined else "fzero.optim.schedules"
            yield Name(f"{room}.{name}", f"{home}.{name}", found)


def signature(name: Name) -> str | None:
    """How a function is called: names and defaults."""
    if not inspect.isfunction(name.found):
        return None
    plain = [x.replace(annotation=inspect.Parameter.empty) for x in inspect.signature(name.found).parameters.values()]
    return f"{name.text}{inspect.Signature(plain)}"


def index() -> str:
    """The tables of names, module by module, each with the signatures of its functions."""
    out = []
    for room, (_, title) in ROOMS.items():
        found = sorted(names(room))
        rows = [f"| [`{n.text}`](api/{n.text}.md) | {n.summary.replace('|', chr(92) + '|')} |" for n in found]
        called = [text for n in found if (text := signature(n)) is not None]
        fence = ["", "```text", *called, "```"] if called else []
        out.append("\n".join([f"## {title}", "", "| | |", "|---|---|", *rows, *fence]) + "\n")
    return "\n".join(out)


def files_index() -> str:
    """The tables of files, folder by folder, each file with the first sentence of its docstring."""
    package = ROOT / "fzero"
    out = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        sentences = {
            path.name: first_sentence(ast.get_docstring(ast.parse(path.read_text())) or "")
            for path in sorted(folder.glob("*.py"))
        }
        rows = [
            f"| `{name}` | {text.replace('|', chr(92) + '|')} |"
            for name, text in sentences.items()
            if name != "__init__.py"
        ]
        title = f"### `{folder.relative_to(ROOT).as_posix()}/`"
        out.append("\n".join([title, "", sentences["__init__.py"], "", "| file | |", "|---|---|", *rows]) + "\n")
    return "\n".join(out)


def flags(columns: int = 100) -> str:
    """The output of `fzero COMMAND --help` for each command, formatted for a terminal with so many columns."""
    from fzero.cli.flag_parsing import COMMANDS, parse

    out = list[str]()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    for command in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([command, "--help"])
        lines = [line.rstrip() for line in printed.getvalue().strip().splitlines()]
        out.append("\n".join([f"## Flags of `fzero {command}`", "", "```text", *lines, "```"]) + "\n")
    if before is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = before
    return "\n".join(out)


def page(name: Name) -> str:
    """The source of a name's page; mkdocstrings fills it in."""
    return f"# {name.text}\n\n[API reference](../api.md)\n\n::: {name.home}\n"


def of_site(markdown: str, path: str) -> str:
    """Returns the text of a page as the site shows it.

    Tables of results replace the paragraphs that are only links to them; their own pages link to the benchmarks. The
    page `API` ends with the index of public names, the page `DESIGN` with the index of files, and the page `CLI` with
    the flags of each command.

    Args:
        markdown: The text in the repository.
        path: The page, from docs/.
    """

    def table(found: re.Match[str]) -> str:
        text = (ROOT / "docs" / "results" / found[2]).read_text().rstrip("\n")
        folder = f"{found[1] or ''}results"
        return re.sub(r"(?<=\]\()[^)#:]+(?=[)#])", lambda x: posixpath.normpath(f"{folder}/{x[0]}"), text)

    if path.startswith("results/"):  # is not in the navigation
        return re.sub(r"\A(# .*\n\n)?", r"\g<0>[Benchmarks](../benchmarks.md)\n\n", markdown, count=1)
    if path == API:
        return f"{markdown}\n{index()}"
    if path == DESIGN:
        return f"{markdown}\n{files_index()}"
    if path == CLI:
        return f"{markdown}\n{flags()}"
    return re.sub(r"^\[[^\]]+\]\((\.\./)?results/(\w+\.md)\)$", table, markdown, flags=re.MULTILINE)


def weight(path: str) -> float:
    """The weight of a page in the search: guides come before tutorials and public names, and tables of
    results last."""
    weights = {"tutorial": 0.7, "notebook": 0.7, "reference/api/": 0.4, "internals/": 0.6, "results/": 0.2}
    return next((weight for start, weight in weights.items() if path.startswith(start)), 1.0)


# --- called by mkdocs ---


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text of a page as the site shows it, and sets its weight in the search."""
    path = page.file.src_uri
    page.meta.setdefault("search", {}).setdefault("boost", weight(path))
    return of_site(markdown, path)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks the flags in a text, which site.css keeps on one line."""
    return re.sub(r"<code>(?=--?[a-z][\w-]*</code>)", '<code class="flag">', html)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    from mkdocs.structure.files import File

    for room in ROOMS:
        for name in names(room):
            files.append(File.generated(config, name.page, content=page(name)))
    return files
