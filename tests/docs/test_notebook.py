"""docs/notebook.ipynb runs, and what is shown of it is what it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"


def printed(notebook: Any) -> list[str]:
    """Of each cell of code what it prints, but for numbers that may differ from machine to machine."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            out = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
            texts.append(re.sub(r"(?<=loss )[\d.]+ at first, [\d.]+ at last", "...", out))
    return texts


@pytest.mark.full
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parent.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = nbformat.read(PAGE, as_version=4)
    run = nbformat.read(PAGE, as_version=4)
    nbclient.NotebookClient(run, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, now in zip(printed(shown), printed(run), strict=True):
        assert before == now, "what is shown is another: jupyter nbconvert --to notebook --execute --inplace"
    said = "".join(o.get("text", "") for cell in run.cells for o in cell.get("outputs", []))
    (losses,) = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", said)
    assert 5 < float(losses[0]) < 6 and float(losses[1]) < 3.2
    pictures = [o for c in shown.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2 and PAGE.stat().st_size < 400_000
