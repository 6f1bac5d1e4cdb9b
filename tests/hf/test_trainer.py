"""fzero.hf.Trainer beside transformers' own: losses, events, evaluation, checkpoints, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import test_trainer_callbacks  # noqa: E402

from fzero.hf import Trainer, TrainingArguments  # noqa: E402
from fzero.hf import trainer_options as options  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 80}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, **STILL, num_labels=3))


def texts(num: int = 48, longest: int = 40) -> list[dict[str, Any]]:
    """Ragged rows with labels that are ignored here and there."""
    draw, rows = random.Random(0), []
    for _ in range(num):
        ids = [draw.randrange(1, 64) for _ in range(draw.randint(3, longest))]
        rows.append({"input_ids": ids, "labels": [-100 if draw.random() < 0.3 else i for i in ids], "note": "a text"})
    return rows


def classes(num: int = 14) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(texts(num, 20))]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    padded = lambda x, fill: x + [fill] * (longest - len(x))  # noqa: E731
    tokens = isinstance(rows[0]["labels"], list)
    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) if tokens else row["labels"] for row in rows]),
    }


def arguments(cls: Any = None, **settings: Any) -> Any:
    usual = {
        "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "weight_decay": 0.1, "warmup_steps": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "per_device_eval_batch_size": 3,
    }  # fmt: skip
    return (cls or transformers.TrainingArguments)(**(usual | settings))


class Events(transformers.TrainerCallback):
    """Writes down which of its methods were asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.seen.append(name)
        return super().__getattribute__(name)


def losses(trainer: Any) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def trained(cls: Any, path: Path, model: Any = llama, rows: Any = None, **settings: Any) -> Any:
    """A trainer that has trained. Settings in capitals are the Trainer's."""
    given = {k.lower(): settings.pop(k) for k in list(settings) if k.isupper()}
    if issubclass(cls, Trainer):  # one length: one program to make
        given = {"backend": "eager", "lengths": [40], **given}
    else:
        given = {k: x for k, x in given.items() if k not in ("lengths", "loss")}
    rows = texts() if rows is None else rows
    args = arguments(output_dir=str(path), **settings)
    made = {"train_dataset": rows, "eval_dataset": rows[:7], "data_collator": collate, **given}
    trainer: Any = cls(model(), args, callbacks=[events := Events()], **made)
    trainer.train()
    trainer.events = events.seen
    return trainer


def beside(path: Path, **settings: Any) -> tuple[Any, Any]:
    """Both libraries' trainers, equal in losses, norms, rates and events."""
    theirs = trained(transformers.Trainer, path / "theirs", **dict(settings))
    ours = trained(Trainer, path / "ours", **dict(settings))
    assert ours.events == theirs.events
    for one, two in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert one.keys() - {"eval_model_preparation_time"} == two.keys()
        for name in two.keys() - {k for k in two if k.endswith(("runtime", "per_second"))}:
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), (name, one, two)
    return theirs, ours


def weights(trainer: Any) -> list[torch.Tensor]:
    return [p.detach() for p in trainer.model.parameters()]


@pytest.mark.full
def test_as_the_librarys(tmp_path: Path) -> None:
    """30 steps over several epochs, the last micro-batch and the last step of each in part."""
    parts = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}
    theirs, ours = beside(tmp_path, max_steps=30, LENGTHS=None, **parts)
    assert len(losses(ours)) == 30
    assert max(abs(losses(theirs)[n] - losses(ours)[n]) for n in losses(ours)) < 1e-5
    for one, two in zip(weights(theirs), weights(ours), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert ours.num_programs == len(ours.compiled._runs) <= 4
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)
    one, two = theirs.predict(texts(8)), ours.predict(texts(8))
    assert one.predictions.shape == two.predictions.shape and (one.label_ids == two.label_ids).all()
    assert abs(one.predictions - two.predictions).max() < 1e-4


@pytest.mark.full(keep=["loss_func"])
@pytest.mark.parametrize(
    "settings",
    [
        {
            "label_smoothing_factor": 0.1,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "optim": "sgd",
            "max_grad_norm": 0.0,
        },
        {
            "COMPUTE_LOSS_FUNC": lambda out, labels, num_items_in_batch=None: (
                F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                / num_items_in_batch  # pyright: ignore[reportOperatorIssue]
            ),
            "activation_checkpointing": True,
            "lr_scheduler_type": "cosine",
            "train_sampling_strategy": "group_by_length",
        },
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.05},
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            "include_num_input_tokens_seen": "non_padding",
            "COMPUTE_METRICS": lambda found: {"mean": float(found.predictions.mean())},
        },
    ],
    ids=["smoothing", "loss_func", "plateau"],
)
def test_options(tmp_path: Path, settings: dict[str, Any]) -> None:
    beside(tmp_path, **settings)


@pytest.mark.full(keep=["smoothing"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True},
        {
            "COMPUTE_LOSS_FUNC": lambda out, labels, num_items_in_batch=None: (
                F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                / num_items_in_batch  # pyright: ignore[reportOperatorIssue]
            ),
        },
    ],
    ids=["models_own", "smoothing", "loss_func"],
)
def test_a_loss_in_chunks(tmp_path: Path, settings: dict[str, Any]) -> None:
    _, ours = beside(tmp_path, LOSS="chunked", max_steps=2, **settings)
    for compiled in (ours.compiled, *(evaluation._usual for evaluation in ours._evaluator.evaluations.values())):
        assert any("chunk" in name for name in compiled.program.functions), [*compiled.program.functions]


class Weighted:
    """What a user's Trainer overrides, of either library."""

    scale = 2.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = self.scale * F.cross_entropy(out.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, out) if return_outputs else loss


@pytest.mark.full
def test_classes(tmp_path: Path) -> None:
    """Class labels, ragged rows, a last batch in part, and a compute_loss of the user's."""
    settings = {"model": bert, "rows": classes(), "gradient_accumulation_steps": 1, "max_steps": -1}
    _, ours = beside(tmp_path, num_train_epochs=1, LENGTHS=None, **settings)
    assert 1 < ours.num_programs <= 4
    ours = type("Ours", (Weighted, Trainer), {})
    settings |= {"per_device_eval_batch_size": 7}
    theirs = type("Theirs", (Weighted, transformers.Trainer), {})
    one, two = (trained(cls, tmp_path / cls.__name__, **dict(settings), num_train_epochs=1) for cls in (theirs, ours))
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert two.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], abs=1e-5)


@pytest.mark.full
def test_means_of_a_step(tmp_path: Path) -> None:
    """A model that takes the number of items and does not read it: the mean of a step's rows, whatever the parts."""
    settings = {"model": bert, "rows": classes(24), "LENGTHS": [20], "max_steps": 3}
    whole = trained(Trainer, tmp_path, **dict(settings), per_device_train_batch_size=8, gradient_accumulation_steps=1)
    parts = trained(Trainer, tmp_path, **dict(settings), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)


def test_a_step_whose_labels_are_all_ignored_is_skipped(tmp_path: Path) -> None:
    rows = texts(3)
    rows[1]["labels"] = [-100] * len(rows[1]["labels"])
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "seed": 0}
    settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "logging_nan_inf_filter": False}
    in_order = type("InOrder", (Trainer,), {"_get_train_sampler": lambda self, *_: range(3)})
    one = trained(in_order, tmp_path / "one", rows=rows, max_steps=1, **settings)
    two = trained(in_order, tmp_path / "two", rows=rows, max_steps=2, **settings)
    assert math.isnan(losses(two)[2]) and two.state.global_step == 2
    assert all(map(torch.equal, weights(one), weights(two)))


def test_a_value_that_changes_is_refused(tmp_path: Path) -> None:
    cls = type("Scaled", (Weighted, Trainer), {})
    args = arguments(output_dir=str(tmp_path))
    trainer = cls(bert(), args, train_dataset=classes(16), data_collator=collate, backend="eager", lengths=[20])
    trainer.scale = 1.0

    class Change(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.scale *= 0.5

    trainer.add_callback(Change())
    with pytest.raises(fz.errors.FzeroValueError, match=r"scale: 1\.0 before, 0\.5 now"):
        trainer.train()


class Seen(transformers.TrainerCallback):
    """Looks at the module."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.sums.append(sum(p.detach().abs().sum().item() for p in model.parameters()))


@pytest.mark.full
def test_checkpoints(tmp_path: Path) -> None:
    """The state in the library's directories; continued bit for bit; what is saved at the end loads; the best model."""
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine", "max_steps": 6}
    first = trained(Trainer, tmp_path, **settings)
    held = {p.name for p in (tmp_path / "checkpoint-4").iterdir()}
    state = {"fzero", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
    assert held == state | {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert all(torch.equal(one, two) for one, two in zip(weights(first), loaded.parameters(), strict=True))
    args = arguments(output_dir=str(tmp_path), **settings)
    again = Trainer(llama(), args, train_dataset=texts(), data_collator=collate, backend="eager", lengths=[40])
    again._save_weights = False
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(again) == losses(first)
    assert all(torch.equal(one, two) for one, two in zip(weights(first), weights(again), strict=True))
    first.save_model(str(tmp_path / "out"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(one, two) for one, two in zip(weights(first), loaded.parameters(), strict=True))
    with pytest.raises(fz.errors.CheckpointError, match="no state of fzero"):
        again.train(resume_from_checkpoint=str(tmp_path / "out"))


def test_a_save_that_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training resumes from the newest checkpoint that was saved to its end, or begins anew."""
    settings = {"model": Net, "rows": [{"x": [i / 9, 1.0], "labels": i / 5} for i in range(32)], "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1, "DATA_COLLATOR": None}
    settings |= {"LENGTHS": None, "SAVE_WEIGHTS": False}
    torch.manual_seed(0)
    first = trained(Trainer, tmp_path, **dict(settings))
    for number, content in ((4, '{"best_gl'), (3, None)):  # written in part, and not at all
        file = tmp_path / f"checkpoint-{number}" / "trainer_state.json"
        file.write_text(content) if content else file.unlink()
    args = arguments(
        output_dir=str(tmp_path), **{n: x for n, x in settings.items() if n in {"max_steps", "save_steps"}}
    )
    args.gradient_accumulation_steps = 1
    for given, expected in ((True, 2), (str(tmp_path / "checkpoint-3"), 2), (str(tmp_path / "checkpoint-1"), 1)):
        again = Trainer(Net(), args, train_dataset=settings["rows"], backend="eager")
        again.train(resume_from_checkpoint=given)
        assert losses(again) == losses(first)
        assert len(caplog.records) == 1 or expected == 1
        assert expected == 1 or f"did not finish: resuming from {tmp_path / 'checkpoint-2'}" in caplog.text
        caplog.clear()
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()
    torch.manual_seed(0)
    again = Trainer(Net(), args, train_dataset=settings["rows"], backend="eager")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert losses(again) == losses(first) and "no older checkpoint, training begins from scratch" in caplog.text
    text = "Can't find a valid checkpoint at .*checkpoint-9: there is no such directory"
    with pytest.raises(fz.errors.CheckpointError, match=text):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_the_best_model(tmp_path: Path) -> None:
    seen = Seen()
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 12}
    args = arguments(output_dir=str(tmp_path), **settings, learning_rate=0.5, load_best_model_at_end=True)
    stop = transformers.EarlyStoppingCallback(1)
    rows = texts()
    trainer = Trainer(
        llama(), args, train_dataset=rows, eval_dataset=rows[:7], data_collator=collate, callbacks=[stop, seen],
        backend="eager", lengths=[40], sync=[seen],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step < 12 and len(set(seen.sums)) == len(seen.sums)
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    best = trainer.state.best_global_step // 2 - 1
    assert seen.sums[-1] == seen.sums[best]  # of the evaluation after training
    with torch.no_grad():  # weights of the user's own are those that are evaluated
        trainer.model.lm_head.weight.zero_()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(torch.tensor(64.0).log().item(), abs=1e-5)


@pytest.mark.full
def test_shards_from_a_directory(tmp_path: Path) -> None:
    """A model of fz.hf: no whole copy of its weights is ever in memory."""
    llama().save_pretrained(tmp_path / "hub")
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "hub")
    with pytest.raises(fz.errors.FzeroValueError, match="has no weights before train"):
        Trainer(model, arguments(output_dir=str(tmp_path)), eval_dataset=texts(4), data_collator=collate).evaluate()
    ours = trained(Trainer, tmp_path, model=lambda: model)
    assert losses(ours) == losses(trained(Trainer, tmp_path))
    assert all(p.is_meta for p in ours.model.parameters())
    ours.save_model(str(tmp_path / "out"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    whole = ours.compiled.gather(ours.train_state).params
    assert torch.equal(loaded.lm_head.weight, whole["lm_head"]["weight"])
    was, ours.optimizer, ours.args.learning_rate, ours.args.max_steps = ours.evaluate()["eval_loss"], None, 0.0, 1
    ours.train()  # with new moments, and the weights that it has
    assert ours.evaluate()["eval_loss"] == was
    ours.push_to_hub, ours.args.push_to_hub = Mock(), True
    ours.model.config.use_cache = False
    (tmp_path / "out" / "model-00001-of-00002.safetensors").touch()
    ours.save_model(str(tmp_path / "out"))  # once more, in the place of what is there
    held = {p.name for p in (tmp_path / "out").iterdir()}
    assert held == {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}
    assert not transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache
    ours.push_to_hub.assert_called_once()


def test_refused_at_once(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    model = llama()
    args = arguments(
        output_dir=str(tmp_path), neftune_noise_alpha=5.0, use_liger_kernel=True, lr_scheduler_type="greedy",
        eval_strategy="steps",
    )  # fmt: skip
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(fz.errors.FzeroValueError) as error:
        Own(
            model,
            args,
            train_dataset=texts(),
            eval_dataset=texts(),
            optimizers=(lbfgs, None),
            transforms=[fz.accumulate(2)],
        )
    for text in ("neftune_noise_alpha=5.0", "use_liger_kernel=True", "Own.training_step", "LBFGS", "accumulate("):
        assert text in str(error.value)
    with pytest.raises(fz.errors.FzeroValueError, match="optim='adafactor'"):
        Trainer(model, arguments(output_dir=str(tmp_path), optim="adafactor"))
    strange = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(fz.errors.FzeroValueError, match=r"SGD\(differentiable=True\)"):
        Trainer(model, arguments(output_dir=str(tmp_path)), optimizers=(strange, None))


def test_uploads_and_best_weights(tmp_path: Path) -> None:
    """Noted, and refused, where directories of a training have states and no weights."""
    pushed = {"output_dir": str(tmp_path), "push_to_hub": True}
    assert not options.notes(arguments(**pushed))
    assert options.notes(arguments(**pushed), save_weights=False)[0].startswith(
        "hub_strategy='every_save': uploads in training"
    )
    assert not options.notes(arguments(**pushed, hub_strategy="end"), save_weights=False)
    best = {"load_best_model_at_end": True, "save_only_model": True, "save_on_each_node": True}
    args = arguments(output_dir=str(tmp_path), eval_strategy="steps", save_steps=1, **best | {"save_strategy": "steps"})
    llama().save_pretrained(tmp_path / "hub")
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "hub")
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)save_on_each_node=True.*load_best_model_at_end: "):
        Trainer(model, args)


def test_every_option_has_an_answer() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    known = [*options.KEPT.split(), *options.NOTES, *options.REFUSED]
    assert len(known) == len(set(known))
    assert fields == set(known)


def test_own_optimizer(tmp_path: Path) -> None:
    """Torch's, with groups and a scheduler: its values."""
    found = []
    for cls in (transformers.Trainer, Trainer):
        model = llama()
        frozen, first, *rest = model.parameters()
        frozen.requires_grad_(False)
        groups = [{"params": [frozen], "weight_decay": 0.2}, {"params": [first], "lr": 1e-3}]
        groups += [{"params": rest, "weight_decay": 0.1, "betas": (0.8, 0.99)}]
        made = torch.optim.Adam(groups, lr=1e-2)
        decay = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        found.append(losses(trained(cls, tmp_path, model=lambda m=model: m, OPTIMIZERS=(made, decay))))
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize("name", ["rmsprop", "adagrad"])
def test_optimizers_by_name(tmp_path: Path, name: str) -> None:
    beside(tmp_path, optim=name, learning_rate=3e-3, max_steps=3)


@pytest.mark.full(keep=["ASGD"])
@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor])
def test_optimizers_of_torch(tmp_path: Path, cls: Any) -> None:
    """By its class with a schedule, also if its updates are not proportional to the rate."""
    found = []
    for trainer in (transformers.Trainer, Trainer):
        model = llama()
        options = {"lambd": 10.0, "t0": 0} if cls is torch.optim.ASGD else {}
        made = cls(model.parameters(), lr=0.02, **options)
        decay = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        found.append(trained(trainer, tmp_path, model=lambda m=model: m, OPTIMIZERS=(made, decay), max_steps=4))
    assert losses(found[1]) == pytest.approx(losses(found[0]), abs=1e-5)
    for ours, theirs in zip(weights(found[1]), weights(found[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


DS = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.0}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear"},
    },
}


@pytest.mark.full
def test_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ds_config.json without the package: all of it, or with the library's schedule, or with its optimizer."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(DS))
    runs = {}
    for left_out in ((), ("scheduler",), ("optimizer", "scheduler")):
        config = {key: x for key, x in DS.items() if key not in left_out} if left_out else str(file)
        args = arguments(TrainingArguments, output_dir=str(tmp_path), deepspeed=config, weight_decay=0.0)
        runs[left_out] = Trainer(
            llama(), args, train_dataset=texts(), data_collator=collate, backend="eager", lengths=[40]
        )
        runs[left_out].train()
        assert [str(t) for t in runs[left_out].compiled.step.transforms][1] == "shard_grads(axis='data')"
    assert "what it becomes" in capsys.readouterr().err
    assert losses(runs["scheduler",]) == pytest.approx(losses(runs["optimizer", "scheduler"]), abs=1e-6)
    rates = [row["learning_rate"] for row in runs[()].state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.01, 0.01])
    wrong = arguments(TrainingArguments, output_dir=str(tmp_path), deepspeed=DS | {"gradient_cliping": 1.0})
    with pytest.raises(fz.errors.FzeroValueError, match=r"deepspeed: gradient_cliping: unknown: did you mean"):
        Trainer(llama(), wrong)


def test_an_optimizer_of_deepspeeds_with_the_librarys_schedule(tmp_path: Path) -> None:
    """ASGD's updates are not proportional to the rate that the library's scheduler writes."""
    config = {"gradient_clipping": 0.0, "optimizer": {"type": "ASGD", "params": {"lr": "auto", "lambd": 10.0}}}
    config |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    args = arguments(TrainingArguments, output_dir=str(tmp_path), deepspeed=config, max_grad_norm=0.0, max_steps=4)
    given: Any = {"train_dataset": texts(), "data_collator": collate}
    ours = Trainer(llama(), args, backend="eager", lengths=[40], **given)
    ours.train()
    model = llama()
    made = torch.optim.ASGD(model.parameters(), lr=1e-2, lambd=10.0)
    warm = transformers.get_linear_schedule_with_warmup(made, 2, 4)
    args = arguments(output_dir=str(tmp_path), max_grad_norm=0.0, max_steps=4)
    theirs = transformers.Trainer(model, args, optimizers=(made, warm), **given)
    theirs.train()
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-5)
    for one, two in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@dataclasses.dataclass
class OwnArguments(transformers.TrainingArguments):
    alpha: float = 0.5
    names: list[str] | None = None


def test_fields_of_a_users_arguments(tmp_path: Path) -> None:
    """They are the user's own; options of the library in the same object are judged as ever."""
    args = arguments(OwnArguments, output_dir=str(tmp_path), alpha=0.7, names=["a"])
    assert Trainer(llama(), args).args.alpha == 0.7 and not options.notes(args)
    args = arguments(OwnArguments, output_dir=str(tmp_path), alpha=0.7, bf16_full_eval=True)
    with pytest.raises(fz.errors.FzeroValueError, match="bf16_full_eval=True") as error:
        Trainer(llama(), args)
    assert "alpha" not in str(error.value)


class Drawing(torch.nn.Module):
    """A loss with noise, as of diffusion; the noise is an output, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.rand(x.shape[0], 3)
        error = (self.layer(x)[:, 0] - labels).square()
        return {"loss": error.mean() + noise.mean() - noise.mean().detach(), "noise": noise}


def test_a_forward_that_draws(tmp_path: Path) -> None:
    """Training and evaluation draw from keys, each row and batch other numbers, each evaluation the same."""
    settings = {"model": Drawing, "rows": [{"x": [i / 10, 1.0], "labels": i / 5} for i in range(12)]}
    settings |= {"DATA_COLLATOR": None, "max_steps": 3, "LENGTHS": None}
    _, ours = beside(tmp_path, **settings, per_device_train_batch_size=2)
    first, again = (ours.predict(settings["rows"]).predictions for _ in range(2))
    assert first.shape == (12, 3) and len(set(first.flatten().tolist())) == 36
    assert 0 <= first.min() and first.max() < 1 and (first == again).all()
    with pytest.MonkeyPatch.context() as patch:  # another rank draws other numbers for its rows
        patch.setattr(type(ours.accelerator), "process_index", 1)
        other = ours.predict(settings["rows"]).predictions
    assert not {*other.flatten().tolist()} & {*first.flatten().tolist()}


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True], ids=["the library's loss", "an own loss"])
def test_means_that_the_library_adds_up(tmp_path: Path, caplog: pytest.LogCaptureFixture, own: bool) -> None:
    """The log says by how much its numbers are larger; `loss_is_scaled_for_ga` gives them."""
    settings = {"model": bert, "rows": classes(24), "LENGTHS": [20], "max_steps": 2}
    mixed = (Weighted,) if own else ()
    theirs = trained(type("Theirs", (*mixed, transformers.Trainer), {}), tmp_path, **dict(settings))
    assert "num_items_in_batch" not in caplog.text
    ours = trained(type("Ours", (*mixed, Trainer), {}), tmp_path, **dict(settings))
    assert "transformers.Trainer would log 2 times as much" in caplog.text
    if not own:  # class weights are of all rows of the step
        assert losses(ours) == pytest.approx({n: x / 2 for n, x in losses(theirs).items()}, rel=1e-5)
    caplog.clear()
    adding = trained(type("Adds", (*mixed, Trainer), {"loss_is_scaled_for_ga": True}), tmp_path, **dict(settings))
    assert losses(adding) == pytest.approx(losses(theirs), rel=1e-5) and "num_items_in_batch" not in caplog.text


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(texts(18))


def test_an_epoch_of_unknown_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it has left over is left out, and said; no step is of more than its own micro-batches."""
    trainer = trained(Trainer, tmp_path, TRAIN_DATASET=Stream(), max_steps=4)
    assert "1 micro-batches at an epoch's end make no step" in caplog.text
    assert losses(trainer)[3] == pytest.approx(losses(trainer)[2], abs=0.5)


class Net(torch.nn.Module):
    """A module of the user's own, whose loss is no cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)[:, 0]
        return {"loss": (y - labels).square().mean(), "y": y}


def test_rows_that_cannot_be_added(tmp_path: Path) -> None:
    def net() -> Net:
        torch.manual_seed(0)
        return Net()

    rows = [{"x": [i / 10, 1.0], "labels": i / 5} for i in range(10)]
    settings = {"model": net, "rows": rows, "DATA_COLLATOR": None, "max_steps": -1, "num_train_epochs": 2}
    _, ours = beside(tmp_path, **settings, gradient_accumulation_steps=1)
    assert ours.num_programs == 2  # of four rows and of two
    with pytest.raises(fz.errors.FzeroValueError, match="has 2 rows, and those of its step 4"):
        trained(Trainer, tmp_path, **settings, gradient_accumulation_steps=3)
    odd = [{"x": [0.0] * (2 + i // 4), "labels": 1.0} for i in range(8)]
    with pytest.raises(fz.errors.FzeroValueError, match=r"x: float32\[4, \d\], before it was"):
        trained(Trainer, tmp_path, **settings | {"rows": odd, "max_steps": 4}, gradient_accumulation_steps=1,
                train_sampling_strategy="sequential")  # fmt: skip
    named = [row | {"name": "a"} for row in rows]
    with pytest.raises(fz.errors.FzeroTypeError, match="name: list"):
        trained(Trainer, tmp_path, **settings | {"rows": named, "DATA_COLLATOR": listed}, remove_unused_columns=False)


class Times(Net):
    def forward(self, x: Any, labels: Any, times: float = 1.0) -> dict[str, Any]:
        out = super().forward(x, labels)
        return out | {"loss": out["loss"] * times}


def test_constants(tmp_path: Path) -> None:
    """What batches have besides tensors: of training the same in each; each evaluation has its own."""
    rows = [{"x": [i / 10, 1.0], "labels": i / 5} for i in range(12)]
    some = lambda times: [row | {"times": times} for row in rows]  # noqa: E731

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        made = transformers.default_data_collator([{n: row[n] for n in ("x", "labels")} for row in rows])
        return made | {n: rows[0][n] for n in ("times",) if n in rows[0]}

    def net() -> Net:
        torch.manual_seed(0)
        return Times()

    settings = {"model": net, "DATA_COLLATOR": collated, "max_steps": 3, "train_sampling_strategy": "sequential"}
    settings |= {"remove_unused_columns": False, "gradient_accumulation_steps": 1}
    theirs, ours = beside(tmp_path, rows=some(3.0), **settings)
    for data in (rows, some(2.0), some(3.0)):
        assert ours.evaluate(data)["eval_loss"] == pytest.approx(theirs.evaluate(data)["eval_loss"], rel=1e-5)
    for mixed, text in (
        (some(1.0)[:8] + some(100.0)[8:], r"times=100\.0, the first had times=1\.0"),
        (rows[:8] + some(100.0)[8:], r"times=100\.0, the first had no times"),
        (some(1.0)[:8] + rows[8:], r"no times, the first had times=1\.0"),
    ):
        with pytest.raises(fz.errors.FzeroTypeError, match=text):
            trained(Trainer, tmp_path, rows=mixed, **settings)


def listed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    made = transformers.default_data_collator([{k: x for k, x in row.items() if k != "name"} for row in rows])
    return made | {"name": [row["name"] for row in rows]}


def on_ranks(out: str, resumed: str) -> None:
    """On each of two ranks: from the beginning with ZeRO-3, and from one rank's checkpoint with ZeRO-1."""
    path, found = Path(out), {}
    for name, stage in (("fresh", fz.shard_params()), ("resumed", fz.shard_opt_state())):
        args = arguments(output_dir=str(path / name), per_device_train_batch_size=2, lr_scheduler_type="cosine")
        trainer = Trainer(
            llama(), args, train_dataset=texts(), eval_dataset=texts(7), data_collator=collate, backend="eager",
            transforms=[stage], lengths=[40],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resumed if name == "resumed" else None)
        shape = list(trainer.predict(texts(7)).predictions.shape) if name == "resumed" else [7]
        found[name] = {"losses": losses(trainer), "shape": shape, "programs": trainer.num_programs}
    found["callbacks"] = test_trainer_callbacks.on_ranks(path)
    from test_trainer_padding import Masked, Pooled, by_first, ragged, some_masked

    mixed = {"TRAIN_DATASET": some_masked("-m-m-mm0"), "EVAL_DATASET": some_masked("-m-m-mm0"), "model": Masked}
    mixed |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": 3}
    mixed |= {"LENGTHS": None, "DATA_COLLATOR": by_first, "train_sampling_strategy": "sequential"}
    both = [trained(cls, path / "mixed", **dict(mixed)) for cls in (transformers.Trainer, Trainer)]
    rows = [{"x": [i / 10, 1.0], "labels": i / 5} for i in range(12)]
    given = {"model": Drawing, "DATA_COLLATOR": None, "LENGTHS": None, "per_device_train_batch_size": 1, "max_steps": 1}
    noise = trained(Trainer, path / "drawing", rows=rows, **given).predict(rows).predictions
    found["noise"] = len(set(noise.flatten().tolist()))
    found["mixed"] = [[*losses(one).values(), one.evaluate()["eval_loss"]] for one in both]

    # Batches of the first rank have one length, those of the second are ragged.
    ragged_rows = [{"input_ids": [1 + (n * i) % 60 for i in range(1, n + 1)]} for n in (6, 6, 6, 9, 6, 12, 6, 7)]
    ragged_rows = [row | {"labels": row["input_ids"]} for row in ragged_rows]
    once = {"rows": ragged_rows, "LENGTHS": None, "per_device_train_batch_size": 1, "max_steps": 2}
    once |= {"train_sampling_strategy": "sequential"}
    both = [trained(cls, path / "ragged", **dict(once)) for cls in (transformers.Trainer, Trainer)]
    found["ragged"] = [[*losses(one).values()] for one in both]

    # transformers multiplies the added means by the number of ranks.
    means = {"model": bert, "rows": classes(24), "LENGTHS": [20], "max_steps": 2}
    for value in (True, False):
        names = {"loss_is_scaled_for_ga": value}
        both = [
            trained(type("Adds", (cls,), names), path / "means", **dict(means))
            for cls in (transformers.Trainer, Trainer)
        ]
        found[f"means {value}"] = [[*losses(one).values()] for one in both]

    args = arguments(output_dir=str(path / "pooled"), gradient_accumulation_steps=1)
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)padding ragged batches .* changes.*loss: "):
        Trainer(Pooled(), args, train_dataset=classes(24), data_collator=ragged, backend="eager").train()
    if trainer.is_world_process_zero():
        (path / "found.json").write_text(json.dumps(found))


@pytest.mark.full
@pytest.mark.forks
def test_two_ranks(tmp_path: Path) -> None:
    one = trained(Trainer, tmp_path, save_strategy="steps", save_steps=3, lr_scheduler_type="cosine")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "checkpoint-3")], capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("fresh", "resumed"):
        theirs = {int(step): x for step, x in found[name]["losses"].items()}
        assert theirs == pytest.approx(losses(one), abs=2e-6), name
        assert found[name]["shape"][0] == 7 and found[name]["programs"] <= 4
    assert found["noise"] == 36, "each rank's rows draw other numbers"
    # A rank without a batch of some kind computes a copy of another rank's, which counts nothing.
    assert found["mixed"][1] == pytest.approx(found["mixed"][0], rel=1e-5)
    for value in (True, False):
        assert found[f"means {value}"][1] == pytest.approx(found[f"means {value}"][0], rel=1e-5)
    assert found["ragged"][1] == pytest.approx(found["ragged"][0], rel=1e-5)
    alone = test_trainer_callbacks.made(Trainer, tmp_path, *test_trainer_callbacks.CHANGES)
    alone.train()
    assert found["callbacks"]["losses"] == pytest.approx(test_trainer_callbacks.losses(alone), abs=2e-6)
    assert "head.weight: not the same on rank 1" in found["callbacks"]["refused"]


if __name__ == "__main__":
    on_ranks(*sys.argv[1:])
