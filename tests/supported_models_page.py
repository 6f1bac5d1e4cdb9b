"""The page docs/results/models.md: the table of models, and what is not equal in the tables of architectures, modules
and operators.

`python tests/supported_models_page.py` writes it from results/; the tests that write those tables call `write`.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results" / "models.md"
TABLES = {
    "Architectures, written as functions": "architectures.md",
    "Modules of PyTorch": "modules.md",
    "Operators of PyTorch": "ops.md",
}


def folded(text: str) -> str:
    """A table without the rows in which everything is equal, and its notes."""
    lines = text.splitlines()
    head, rows = lines[:2], [line for line in lines[2:] if line.startswith("|")]
    notes = [line for line in lines if line.startswith("- ")]
    shown = [row for row in rows if not is_equal(row)]
    if " plain " not in head[0]:  # numbers: the notes sum them up
        return "\n".join(notes)
    return "\n".join([*head, *shown, "", *notes])


def is_equal(row: str) -> bool:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    return all(cell == "equal" for cell in cells[2:-1])


def write() -> None:
    parts = [(RESULTS / "models.md").read_text().rstrip("\n")]
    for title, file in TABLES.items():
        parts.append(f"**{title}** (rows in which everything is equal are left out; `results/{file}` has all)\n\n"
                     + folded((RESULTS / file).read_text()))  # fmt: skip
    PAGE.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    write()
