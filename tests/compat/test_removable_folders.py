"""The front ends `hf` and `deepspeed` and the folder `elastic` can be deleted: nothing else needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fzero

ROOT = Path(__file__).resolve().parents[2]
REMOVABLE = {"hf", "deepspeed", "elastic", "run.py"}  # run.py is the command of `elastic`
TRAINS = """
import sys, pkgutil, importlib, tempfile
import torch
import fzero as fz
assert fz.__path__ == [sys.argv[1]], fz.__path__
for module in pkgutil.walk_packages(fz.__path__, "fzero."):
    if module.name not in ("fzero.__main__",):
        importlib.import_module(module.name)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model = fz.functionalize(net)
step = fz.shard_params(model.train_step(fz.optim.adamw(1e-2), lambda out, batch: out.square().mean()))
train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
state, metrics = train(train.init(model.params), (torch.ones(2, 4),))
path = tempfile.mkdtemp()
fz.checkpoint.save(path, state)
assert int(train.restore(path).step) == 1 and train.plan
assert not [name for name in sys.modules if name.split(".")[:1] == ["fzero"] and name.split(".")[1:2] in sys.argv[2:]]
"""


TRAINER = """
import tempfile, transformers
from fzero.hf import Trainer, TrainingArguments
config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
usual = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
args = TrainingArguments(tempfile.mkdtemp(), **usual)
trainer = Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=rows, backend="eager")
assert trainer.train().global_step == 1
"""


def without(tmp_path: Path, names: set[str]) -> Path:
    """The package without these files and folders."""
    rest = tmp_path / "fzero"
    rest.mkdir()
    for path in Path(fzero.__file__).parent.iterdir():
        if path.name not in {*names, "__pycache__"}:
            (rest / path.name).symlink_to(path)
    return rest


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return without(tmp_path, REMOVABLE)


def run(package: Path, *command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_rest_trains_saves_and_plans(package: Path) -> None:
    run(package, "-P", "-c", TRAINS, str(package))


@pytest.mark.full
def test_the_rest_passes_its_tests(package: Path) -> None:
    """Some of the step, trees, data and modules, which stand for all folders below the front ends."""
    tests = ("tests/step/test_plain_step.py", "tests/tree", "tests/data", "tests/modules/test_batch_binding.py")
    run(package, "-P", "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests)


@pytest.mark.full
def test_the_trainer_needs_no_other_front_end(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(without(tmp_path, REMOVABLE - {"hf"}), "-P", "-c", TRAINER)
