"""fzero.hf.Trainer under tensor_parallel, on real ranks, beside transformers' own on as many parts of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from test_trainer import STILL, TINY, arguments, collate, llama, texts  # noqa: E402

from fzero.hf import Trainer, data_parallel_ranks  # noqa: E402
from fzero.mesh import Mesh  # noqa: E402

ROWS = 8  # of a micro-batch, over all parts of the data


def accuracy(found: Any) -> dict[str, float]:
    seen = found.label_ids != -100
    hits = (found.predictions.argmax(-1) == found.label_ids)[seen]
    return {"accuracy": float(hits.mean()), "rows": float(len(found.label_ids))}


def padded(rows: Any) -> Any:
    """A batch of one length, however many rows there are, so that tokens and FLOPs are the same."""
    fill = {"labels": -100}
    return {n: F.pad(x, (0, 40 - x.shape[1]), value=fill.get(n, 0)) for n, x in collate(rows).items()}


def made(cls: Any, path: Path, rows: int, **given: Any) -> Any:
    """A trainer of two epochs of 32 rows that evaluates 7 after each, and saves after the first."""
    settings = {
        "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": rows, "lr_scheduler_type": "cosine",
        "include_num_input_tokens_seen": "all", "eval_strategy": "epoch", "save_strategy": "epoch",
    }  # fmt: skip
    args = arguments(output_dir=str(path), **settings)
    data = {"train_dataset": texts(32), "eval_dataset": texts(7), "data_collator": padded}
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


def run(trainer: Any, resumed: str | None = None) -> dict[str, Any]:
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resumed)
    trainer.save_model(f"{trainer.args.output_dir}/whole")
    return told(trainer) | {"before": before}


def forget() -> None:
    """Has accelerate forget this process's ranks: the next job has others."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def theirs_on_ranks(path: Path, parts: int) -> dict[str, Any]:
    said = run(made(transformers.Trainer, path, ROWS // parts))
    forget()
    return said


def evaluated_on_ranks(path: Path, parts: int) -> float:
    found = made(transformers.Trainer, path, ROWS // parts).evaluate()["eval_loss"]
    forget()
    return found


def ours_on_ranks(path: Path, mesh: dict[str, int], resumed: str | None) -> dict[str, Any]:
    """By `tensor_parallel`; from a checkpoint with a mesh and transforms of the caller's."""
    given: dict[str, Any] = {"tensor_parallel": mesh["model"]}
    if resumed:
        spec = fz.tensor_parallel(rules=fz.hf.tensor_rules(llama(), ranks=mesh["model"]))
        given = {"mesh": fz.make_mesh(**mesh), "transforms": [spec, fz.shard_opt_state()]}
    said = run(made(Trainer, path, ROWS // mesh["data"], backend="eager", lengths=[40], **given), resumed)
    forget()
    return said


def test_weights_that_were_never_laid_out_are_evaluated_over_all_axes(tmp_path: Path) -> None:
    """Before training each rank has all weights, so every axis of the mesh divides data."""
    trainer = made(Trainer, tmp_path, ROWS, backend="eager", lengths=[40], mesh=fz.make_mesh(data=1, model=1))
    expected = made(transformers.Trainer, tmp_path, ROWS).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    (evaluation,) = trainer._evaluator.evaluations.values()
    assert {x.axis for x in evaluation._usual.step.transforms} == {"data", "model"}


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


def steps(said: dict[str, Any]) -> list[Any]:
    """The rows of a log that training wrote."""
    return [row for row in said["log"] if "eval_loss" not in row]


@pytest.mark.full
def test_as_the_librarys(run_ranks: Any, tmp_path: Path) -> None:
    """Losses, rates, tokens, epochs, metrics and predictions, each part of the data counted once: training as in one
    process, an evaluation as on two, which have two rows of the last batch."""
    saved = str(tmp_path / "four" / "checkpoint-2")
    theirs = run_ranks(1, theirs_on_ranks, tmp_path / "one", 1)[0]
    before = run_ranks(2, evaluated_on_ranks, tmp_path / "before", 2)[0]
    for mine in run_ranks(4, ours_on_ranks, tmp_path / "four", {"data": 2, "model": 2}, None):
        alike(steps(mine), steps(theirs))
        alike(mine["before"], before)
        assert mine["train_batch_size"] == theirs["train_batch_size"] // 2 and mine["shape"] == theirs["shape"]
        for name in ("total", "max_steps", "num_input_tokens_seen", "total_flos", "num_train_epochs"):
            assert mine[name] == theirs[name]
    for mine in run_ranks(2, ours_on_ranks, tmp_path / "two", {"data": 1, "model": 2}, saved):
        for said in (mine, theirs):  # rows of the first epoch are the checkpoint's; the last is a mean over both
            rows = [row for row in said["log"] if row["step"] > 2]
            said["log"] = [{n: x for n, x in row.items() if n != "train_loss"} for row in rows]
        # the checkpoint remembers the rows that a rank had
        alike(mine, {**theirs, **{name: mine[name] for name in ("before", "train_batch_size")}})
    one = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "whole").named_parameters())
    for name in ("four", "two"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "whole")
        assert max(float((x - one[n]).detach().abs().max()) for n, x in model.named_parameters()) < 1e-5


def trained_on_ranks(path: Path, loss: Any, **settings: Any) -> list[dict[str, float]]:
    """The losses, gradient norms and evaluation of three steps by `tensor_parallel` over two ranks."""
    args = arguments(output_dir=str(path), max_steps=3, **settings)
    data = {"train_dataset": texts(24), "eval_dataset": texts(7), "data_collator": padded}
    trainer = Trainer(llama(), args, **data, tensor_parallel=2, loss=loss, lengths=[40], backend="eager")
    trainer.train()
    assert trainer.compiled is not None
    assert any("chunk" in name for name in trainer.compiled.program.functions) == (loss == "chunked")
    found = [{n: row[n] for n in ("loss", "grad_norm")} for row in trainer.state.log_history if "loss" in row]
    found.append({"eval_loss": trainer.evaluate()["eval_loss"]})
    forget()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_in_chunks_equals_that_of_all_logits(run_ranks: Any, tmp_path: Path, precision: str) -> None:
    settings = {} if precision == "fp32" else {precision: True}
    full, chunked = (
        run_ranks(2, trained_on_ranks, tmp_path / str(loss), loss, **settings) for loss in (None, "chunked")
    )
    for one, two in zip(full, chunked, strict=True):
        for a, b in zip(one, two, strict=True):
            assert b == pytest.approx(a, rel=1e-5 if precision == "fp32" else 1e-2), (full, chunked)


def test_parts_of_a_mesh() -> None:
    """Ranks along `model` read the same rows, wherever the axis lies; together all rows are read once."""

    for axes, firsts in (({"data": 2, "model": 2}, [0, 2]), ({"model": 2, "data": 2}, [0, 1]), ({"model": 4}, [0])):
        read: dict[int, list[int]] = {}
        for rank in range(4):
            parts = data_parallel_ranks.of(Mesh(axes, rank, torch.device("cpu")), "model")
            assert parts.firsts == firsts
            accelerator = data_parallel_ranks.ShardAccelerator(lambda parts=parts: parts, cpu=True)
            assert accelerator.num_processes == len(firsts)
            rows = torch.cat(list(accelerator.prepare_data_loader(DataLoader(range(16), batch_size=2)))).tolist()
            assert read.setdefault(parts.index, rows) == rows
        assert sorted(n for rows in read.values() for n in rows) == list(range(16))
    forget()


def test_heads_are_not_torn() -> None:
    every = {"q_proj", "k_proj", "v_proj", "o_proj"}
    for heads, pairs, ranks, cut in ((4, 2, 2, every), (4, 1, 2, {"q_proj", "o_proj"}), (2, 2, 4, set())):
        sizes = TINY | {"num_attention_heads": heads, "num_key_value_heads": pairs}
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        rules = fz.hf.tensor_rules(model, ranks=ranks)
        assert {name.split(".")[-2] for name in rules if "attn" in name} == cut


def test_refused(tmp_path: Path) -> None:
    data = {"train_dataset": texts(8), "data_collator": collate, "backend": "eager"}
    mesh = fz.AbstractMesh(data=2, model=2)
    spec = fz.tensor_parallel(rules={"q_proj.weight": 0})
    args = arguments(output_dir=str(tmp_path))
    for given, text in (
        ({"tensor_parallel": 0}, "tensor_parallel=0: must be a whole number"),
        ({"tensor_parallel": 2}, "tensor_parallel=2: does not divide 1 processes"),
        ({"tensor_parallel": 4, "mesh": mesh}, "tensor_parallel=4: the mesh has data=2, model=2"),
        ({"transforms": [spec]}, "transforms: tensor_parallel needs tensor_parallel=N, or mesh="),
        ({"transforms": [fz.sequence_parallel()]}, "transforms: sequence_parallel is not supported in a Trainer"),
    ):
        with pytest.raises(fz.errors.FzeroValueError, match=text):
            Trainer(llama(), args, **data, **given)
    planless = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, **STILL, num_labels=3))
    with pytest.raises(fz.errors.FzeroValueError, match="neither transformers nor fzero has a plan for 'bert'"):
        Trainer(planless, args, **data, tensor_parallel=2, mesh=mesh)
