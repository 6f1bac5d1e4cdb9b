"""examples/finetune_hf.py: what it leaves behind is read by the libraries, it goes on on another number of processes,
and says what is wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import EXAMPLES, Script, losses

transformers = pytest.importorskip("transformers")

TINY = ("--steps", "4", "--seq", "32", "--batch", "12", "--backend", "eager")
FINETUNE = Script("finetune_hf.py", TINY)
LICENSE = str(EXAMPLES.parent / "LICENSE")


@pytest.fixture(scope="module")
def straight(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four steps without a pause on 2 processes, from nothing, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("straight")
    flags = ("--text", LICENSE, "--save-every", 2, "--out", folder / "out", "--json", folder / "log")
    return folder, FINETUNE.on(pool.run, *flags, ranks=2).stdout


def held_out(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"held-out loss ([\d.]+)", printed)]


@pytest.mark.full
def test_what_a_run_prints_and_leaves_behind(straight: tuple[Path, str]) -> None:
    folder, printed = straight
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "out" / "model-4")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out" / "model-4")
    assert printed.count("its weights are random") == 1 and "planned for each process: " in printed
    before, after = held_out(printed)
    assert 6.5 < before < 7.5 and after < before - 0.02 and len(losses(folder / "log")) == 4, "log(1024) is 6.93"
    text = Path(LICENSE).read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    windows = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    rows = windows[len(windows) - max(1, len(windows) // 20) :]
    with torch.no_grad():
        expected = float(model(input_ids=rows, labels=rows).loss)
    assert after == pytest.approx(expected, abs=0.1), "of these rows, some of them twice"


@pytest.mark.full
def test_goes_on_on_another_number_of_processes(run_ranks: Any, straight: tuple[Path, str], tmp_path: Path) -> None:
    folder, printed = straight
    shutil.copytree(
        folder / "out", tmp_path / "out", ignore=shutil.ignore_patterns("step-00000004", "latest", "model-4")
    )
    shutil.copy(folder / "log", tmp_path / "log")
    flags = ("--text", LICENSE, "--out", tmp_path / "out", "--json", tmp_path / "log", "--resume", "--zero", 1)
    done = FINETUNE.on(run_ranks, *flags)
    assert "resuming at step 2" in done.stdout and "its weights are random" not in done.stdout
    assert losses(tmp_path / "log") == pytest.approx(losses(folder / "log"), rel=1e-5)
    assert held_out(done.stdout) == pytest.approx(held_out(printed)[1:], abs=2e-4)


@pytest.mark.full
def test_adapters(run_ranks: Any, straight: tuple[Path, str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = straight[0] / "out" / "model-4"
    flags = ("--model", base, "--text", LICENSE, "--lora", 2, "--bf16", "--remat", "--accumulate", 2, "--lr", 0.001)
    done = FINETUNE.on(run_ranks, *flags, "--offload", "nvme", "--out", tmp_path)
    before, after = held_out(done.stdout)
    assert after < before and "of which 0.0" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert peft.PeftModel.from_pretrained(model, tmp_path / "adapter-4").peft_config["default"].r == 2
    done = FINETUNE.on(run_ranks, *flags, "--plan", "--out", tmp_path / "new")
    assert "peak memory" in done.stdout and "held-out" not in done.stdout and not list((tmp_path / "new").iterdir())


@pytest.mark.full
def test_what_is_wrong(run_ranks: Any, straight: tuple[Path, str], tmp_path: Path) -> None:
    base, few = straight[0] / "out" / "base", tmp_path / "few"
    few.mkdir()
    said = FINETUNE.on(run_ranks, "--model", "no/where", "--text", "nor/here", "--lora", 0, code=2).stderr
    for text in ("--model no/where is not a directory", "--text nor/here is not a file", "--lora 0 is less than 1"):
        assert text in said
    out = ("--out", tmp_path / "out")
    assert f"{few} has no config.json" in FINETUNE.on(run_ranks, "--model", few, *out, code=2).stderr
    shutil.copy(base / "config.json", few)
    assert f"--model {few} has no tokenizer" in FINETUNE.on(run_ranks, "--model", few, *out, code=2).stderr
    (few / "tokenizer.json").write_text("{")
    assert f"the tokenizer of {few} cannot be read" in FINETUNE.on(run_ranks, "--model", few, *out, code=2).stderr
    (short := tmp_path / "short.txt").write_text("too short")
    said = FINETUNE.on(run_ranks, "--model", base, "--text", short, *out, "--seq", 4096, code=2).stderr
    assert "0 windows of --seq 4096" in said and "more than the 2048 positions" in said
    said = FINETUNE.on(run_ranks, "--out", straight[0] / "out", code=2).stderr
    assert "model-4 already exists: choose another --out or more --steps" in said
