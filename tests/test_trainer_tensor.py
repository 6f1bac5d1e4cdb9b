"""fzero.hf.Trainer under tensor_parallel, on real ranks, beside transformers' own on one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from test_trainer import STILL, TINY, arguments, collate, llama, texts  # noqa: E402

from fzero.hf import Trainer  # noqa: E402

ROWS = 8  # of a micro-batch, over all parts of the data


def accuracy(found: Any) -> dict[str, float]:
    seen = found.label_ids != -100
    hits = (found.predictions.argmax(-1) == found.label_ids)[seen]
    return {"accuracy": float(hits.mean()), "rows": float(len(found.label_ids))}


def made(cls: Any, path: Path, rows: int, **given: Any) -> Any:
    """A trainer of two epochs of 32 rows that evaluates 7 after each, and saves after the first."""
    settings = {
        "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": rows, "lr_scheduler_type": "cosine",
        "include_num_input_tokens_seen": "all", "eval_strategy": "epoch", "save_strategy": "epoch",
    }  # fmt: skip
    args = arguments(output_dir=str(path), **settings)
    data = {"train_dataset": texts(32), "eval_dataset": texts(7), "data_collator": collate}
    return cls(llama(), args, compute_metrics=accuracy, **data, **given)


def told(trainer: Any) -> dict[str, Any]:
    """What a trainer says of its training."""
    names = ("max_steps", "num_input_tokens_seen", "total_flos", "train_batch_size", "num_train_epochs")
    timed = ("runtime", "per_second", "preparation_time")
    log = [{n: x for n, x in row.items() if not n.endswith(timed)} for row in trainer.state.log_history]
    found = trainer.predict(texts(7))
    means = {n: x for n, x in found.metrics.items() if not n.endswith(timed)}
    total = trainer.get_total_train_batch_size(trainer.args)
    return {"log": log, "means": means, "shape": found.predictions.shape, "total": total} | {
        n: getattr(trainer.state, n) for n in names
    }


def on_ranks(path: Path, mesh: dict[str, int], resumed: str | None) -> dict[str, Any]:
    """On each rank, by `tensor_parallel`, or with a mesh and transforms of the caller's from a checkpoint."""
    from accelerate.state import AcceleratorState, GradientState

    size = mesh["model"]
    given: dict[str, Any] = {"tensor_parallel": size}
    if resumed:
        rules = fz.hf.tensor_rules(llama(), ranks=size)
        given = {"mesh": fz.make_mesh(**mesh), "transforms": [fz.tensor_parallel(rules=rules), fz.shard_opt_state()]}
    trainer = made(Trainer, path, ROWS // mesh["data"], backend="eager", lengths=[40], **given)
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resumed)
    trainer.save_model(str(path / "whole"))
    said = told(trainer) | {"before": before, "rank": os.environ["RANK"]}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return said


def alike(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            alike(mine[name], theirs[name])
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs)
        for one, two in zip(mine, theirs, strict=True):
            alike(one, two)
    else:
        assert mine == (pytest.approx(theirs, rel=1e-5, abs=1e-6) if isinstance(theirs, float) else theirs)


def test_as_the_librarys(run_ranks: Any, tmp_path: Path) -> None:
    """Losses, rates, tokens, epochs, metrics and predictions; the library counts tokens once for each rank."""
    one = made(transformers.Trainer, tmp_path / "one", ROWS)
    before = one.evaluate()["eval_loss"]
    one.train()
    theirs = told(one)
    saved = str(tmp_path / "four" / "checkpoint-2")
    for name, mesh, resumed in (("four", {"data": 2, "model": 2}, None), ("two", {"data": 1, "model": 2}, saved)):
        wanted = theirs | {"train_batch_size": ROWS // mesh["data"]}
        for mine in run_ranks(mesh["data"] * 2, on_ranks, tmp_path / name, mesh, resumed):
            assert mine.pop("rank") is not None and mine.pop("before") == pytest.approx(before, rel=1e-5)
            alike(mine, wanted)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "whole")
        for mine, x in zip(again.parameters(), one.model.parameters(), strict=True):
            assert (mine - x).abs().max() < 1e-5


def test_refused(tmp_path: Path) -> None:
    data = {"train_dataset": texts(8), "data_collator": collate, "backend": "eager"}
    mesh = fz.AbstractMesh(data=2, model=2)
    spec = fz.tensor_parallel(rules={"q_proj.weight": 0})
    args = arguments(output_dir=str(tmp_path))
    for given, text in (
        ({"tensor_parallel": 0}, "tensor_parallel=0: must be a whole number"),
        ({"tensor_parallel": 2}, "tensor_parallel=2: does not divide 1 processes"),
        ({"tensor_parallel": 4, "mesh": mesh}, "tensor_parallel=4: the mesh has data=2, model=2"),
        ({"transforms": [spec]}, "transforms: tensor_parallel wants tensor_parallel=N, or mesh="),
    ):
        with pytest.raises(fz.errors.FzeroValueError, match=text):
            Trainer(llama(), args, **data, **given)
    planless = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, **STILL, num_labels=3))
    with pytest.raises(fz.errors.FzeroValueError, match="neither transformers nor fzero has a plan for 'bert'"):
        Trainer(planless, args, **data, tensor_parallel=2, mesh=mesh)
