"""The documentation is true: its examples run, what it says they print is what they print, its links lead somewhere.

A page is one program. Its ```python blocks run one after the other in one namespace, on one process, in an empty
directory. A ```text block that follows one directly is what that block prints; a block that prints must be followed by
one. After a change that is meant to change what is printed, `python tests/docs/test_pages.py` writes the new output
into the pages. So are ```sh blocks of `fzero` commands that a ```text block follows, in the repository's root, with
what they say on stderr; one under `<!-- exhaustive -->` runs with --exhaustive.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

import fzero as fz
from fzero.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
os.environ["FZERO_PROGRESS"] = "off"  # lines of progress depend on how busy the machine is
os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise an installed DeepSpeed prints that it found no GPU
import reference  # noqa: E402

PAGES = sorted(p for p in DOCS.rglob("*.md") if "results" not in p.relative_to(DOCS).parts)
NAMES = [str(p.relative_to(DOCS)) for p in PAGES]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and where that text lies in the page."""

    language: str
    text: str
    start: int
    stop: int
    directly: bool  # whether only blank lines lie between it and the block before
    is_long: bool


def blocks(page: str) -> list[Block]:
    found, before = [], 0
    for match in _FENCE.finditer(page):
        between = page[before : match.start()].strip()
        is_long = between.endswith("<!-- exhaustive -->")
        found.append(Block(match[1], match[2], match.start(2), match.end(2), not between, is_long))
        before = match.end()
    return found


def run(path: Path, long: bool = True) -> list[tuple[Block, str, Block | None]]:
    """Every Python block of a page, and every command, with what it printed and the block that says what it should.
    `long`: those as well that take long."""
    page = path.read_text()
    all_blocks = blocks(page)
    namespace = {"__name__": "docs"}
    out = []
    for number, block in enumerate(all_blocks):
        after = all_blocks[number + 1] if number + 1 < len(all_blocks) else None
        answered = after is not None and after.directly and after.language == "text"
        command = block.language == "sh" and answered and block.text.startswith("fzero ")
        if (block.language != "python" and not command) or (block.is_long and not long):
            continue
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed) if command else contextlib.nullcontext(),
        ):
            if command:
                with contextlib.chdir(ROOT):
                    main(shlex.split(block.text)[1:])
            else:
                text = "\n" * page.count("\n", 0, block.start) + block.text
                exec(compile(text, str(path), "exec", dont_inherit=True), namespace)
        text = printed.getvalue().rstrip("\n")
        out.append((block, f"{text}\n" if text else "", after if answered else None))
    return out


@pytest.mark.full(keep=["benchmarks.md", "internals/compilation-cache.md", "guides/clusters.md"])
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_examples(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.chdir(tmp_path)
    same = doctest.OutputChecker().check_output
    for block, printed, expected in run(path, pytestconfig.getoption("--exhaustive")):
        where = f"{path.relative_to(ROOT)}:{path.read_text().count(chr(10), 0, block.start)}"
        assert expected is not None or not printed, f"{where} prints, and the page does not say what:\n{printed}"
        if expected is not None and not same(expected.text, printed, doctest.ELLIPSIS):
            difference = "\n".join(
                difflib.unified_diff(
                    expected.text.splitlines(), printed.splitlines(), "the page", "printed", lineterm=""
                )
            )
            pytest.fail(
                f"{where} prints something else (if that is meant: python tests/docs/test_pages.py)\n{difference}"
            )


def test_public_names_in_the_pages_exist() -> None:
    pytest.importorskip("transformers", reason="fz.hf has names that need it")
    missing = []
    for path in PAGES:
        page = path.read_text().replace(".md)", ")")
        for name in sorted(set(re.findall(r"\bfz((?:\.[A-Za-z_]\w*)+)", page))):
            value = fz
            for part in name[1:].split("."):
                if not hasattr(value, part):
                    missing.append(f"{path.relative_to(ROOT)}: fz{name}")
                    break
                value = getattr(value, part)
    assert not missing, "\n".join(missing)


def test_every_transform_has_a_page() -> None:
    from fzero.transforms.transform import Transform

    def kinds(kind: type[Transform]) -> set[str]:
        own = {kind.name} if kind.__module__.startswith("fzero.transforms.") else set[str]()  # not a front end's
        return own - {""} | {n for sub in kind.__subclasses__() for n in kinds(sub)}

    pages = {p.stem for p in PAGES if p.parent.name == "transforms"}
    assert kinds(Transform) | {"index", "reading-a-program"} == pages


def test_the_legend_of_programs_is_complete() -> None:
    """Each op and each placement that a program prints is explained."""
    from fzero.ir.ops import OPS, OWNERS

    page = (DOCS / "transforms" / "reading-a-program.md").read_text()
    printed = "\n".join(block.text for path in PAGES for block in blocks(path.read_text()) if block.language == "text")
    legend = {
        word for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for word in re.findall(r"`[^`\w]*(\w+)", row)
    }
    ops = {name for name, op in OPS.items() if op.in_text and name not in OWNERS}
    placements = {*re.findall(r"# +(?:<<< )?\w+\[[^\]]*\] (\w+)\(", printed)}
    assert {"partial", "shard"} <= placements
    assert ops - {"rollback"} <= legend
    assert placements <= legend


ROOMS = [room for room in reference.ROOMS if room != "fz.hf" or importlib.util.find_spec("transformers")]
PUBLIC = [name for room in ROOMS for name in reference.names(room)]


def test_the_reference_has_every_public_name() -> None:
    pytest.importorskip("transformers", reason="fz.hf has names that need it")
    text = reference.index()
    assert all(f"[`{name.text}`](api/{name.text}.md)" in text for name in PUBLIC)
    modules = {name for name in fz.__all__ if inspect.ismodule(getattr(fz, name))}
    assert {f"fz.{name}" for name in modules} | {"fz"} == {*reference.ROOMS}
    kinds = {name: getattr(fz.errors, name) for name in {*vars(fz.errors), *fz.errors.__all__}}
    errors = {name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert errors == {*fz.errors.__all__}


@pytest.mark.parametrize("name", PUBLIC, ids=lambda name: name.text)
def test_every_public_name_has_an_example(name: reference.Name) -> None:
    module = importlib.import_module(name.home.rpartition(".")[0])
    assert getattr(module, name.home.rpartition(".")[2]) is name.found, "its page is made where it is defined"
    if inspect.isclass(name.found) or inspect.isfunction(name.found):
        text = inspect.getdoc(name.found) or ""
        assert re.search(r"^Example:\n    >>> ", text, re.MULTILINE), text
        assert name.summary[-1] in ".:", name.summary


@pytest.mark.full
def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: no page, link or name is missing. Where `pip install -e '.[docs]'` was not run it is skipped."""
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    pytest.importorskip("mkdocs_jupyter")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PUBLIC:
        html = (tmp_path / "reference" / "api" / name.text / "index.html").read_text()
        assert 'class="doc doc-object' in html, name
        assert "&gt;&gt;&gt;" in html, name
        assert f'href="{name.text}/"' in (tmp_path / "reference" / "api" / "index.html").read_text(), name
    broken = sorted({f"{page.relative_to(tmp_path)}: {link}" for page, link in dead_links(tmp_path)})
    assert not broken, "\n".join(broken)


def dead_links(site: Path) -> Iterator[tuple[Path, str]]:
    """Links of a built site, to itself, that lead to no file or to no anchor."""
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in anchors and unquote(anchor) not in anchors[target]):
                yield page, link


def test_the_site_has_the_flags_of_every_command() -> None:
    from fzero.cli.flag_parsing import COMMANDS, _flags

    text = reference.of_site("# Command line\n", reference.CLI)
    for command, kind in COMMANDS.items():
        section = text.partition(f"## Flags of `fzero {command}`\n")[2].partition("\n## ")[0]
        assert section.startswith(f"\n```text\nusage: fzero {command} ")
        assert all(re.search(rf"^\W*{flag}(\s|$)", section, re.MULTILINE) for flag in _flags(kind)), section


def test_the_site_has_the_tables() -> None:
    """In the repository they are links, which alone in a paragraph become what they lead to."""
    site = reference.of_site(
        "Text, [a table](results/peers.md).\n\n[The tables: peers](results/peers.md)\n\nAfter.", "benchmarks.md"
    )
    first, _, rest = site.partition("\n\n")
    assert (
        first == "Text, [a table](results/peers.md)."
        and rest.startswith("|  | wall s |")
        and rest.endswith("(results/peers.svg)\n\nAfter.")
    )
    for page in PAGES:
        assert "--8<--" not in page.read_text(), page


def test_the_site_lists_every_file_of_the_package() -> None:
    page = DOCS / reference.DESIGN
    site = reference.of_site(page.read_text(), reference.DESIGN)
    folders = dict(re.findall(r"^### `(fzero/[\w/]*)`\n\n(.*?)(?=^### |\Z)", site, re.MULTILINE | re.DOTALL))
    for path in (ROOT / "fzero").rglob("*.py"):
        listed = folders[f"{path.parent.relative_to(ROOT).as_posix()}/"]
        if path.name != "__init__.py":
            assert re.search(rf"^\| `{re.escape(path.name)}` \| \S.* \|$", listed, re.MULTILINE), path


def _update() -> None:
    """Writes what every example prints into its page."""
    only = [Path(a).resolve() for a in sys.argv[1:]]
    for path in only or PAGES:
        page, before = path.read_text(), os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            results = run(path)
            os.chdir(before)
        for _, printed, expected in reversed(results):
            if expected is not None and not doctest.OutputChecker().check_output(
                expected.text, printed, doctest.ELLIPSIS
            ):
                page = page[: expected.start] + printed + page[expected.stop :]
        if page != path.read_text():
            path.write_text(page)
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    _update()
