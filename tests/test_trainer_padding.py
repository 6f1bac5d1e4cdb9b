"""Padding of fzero.hf.Trainer: proven by numbers, or batches are taken as they come; beside transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from test_trainer import STILL, TINY, Net, arguments, beside, classes, llama, losses, texts, trained  # noqa: E402

from fzero.hf import Trainer, padding, proof, traced  # noqa: E402
from fzero.hf.evaluating import Evaluation  # noqa: E402
from fzero.hf.exchange import Exchange  # noqa: E402
from fzero.hf.padding import Padding  # noqa: E402
from fzero.hf.traced import Losses  # noqa: E402
from fzero.hf.watched import Watched  # noqa: E402

T = transformers
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def made(cls: Any, config: Any) -> Callable[[], Any]:
    def model() -> Any:
        torch.manual_seed(0)
        return cls(config)

    return model


class Pooled(nn.Module):
    """Two layers over tokens, the mean over all positions or over those of the mask, and a loss."""

    def __init__(self, head: float = 1.0, masked: bool = False, kind: str = ""):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head, self.drop = nn.Embedding(64, 8), nn.Linear(8, 3), nn.Dropout(0.1 * (kind == "late"))
        self.norm = nn.BatchNorm1d(8, track_running_stats=False) if kind == "norm" else nn.Identity()
        self.masked, self.kind = masked, kind
        self.times = nn.Parameter(torch.ones(()), requires_grad=kind == "root")
        with torch.no_grad():
            self.head.weight.mul_(head)
            self.head.bias.zero_()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.tokens(input_ids))
        if self.kind == "root":  # whose gradient at 0 is not finite
            x = x + torch.where(attention_mask > 0, (self.times * input_ids).sqrt(), 0.0)[..., None]
        mask = attention_mask[..., None].float() if self.masked else torch.ones_like(x[..., :1])
        x = self.norm((x * mask).sum(1) / mask.sum(1))
        x = x + torch.randn_like(x) if self.kind == "noise" and self.training else x
        y = self.head(self.drop(x))
        loss = F.cross_entropy(y, labels)
        if self.kind == "negatives":
            loss = loss + 0.0 * F.cross_entropy(y, labels, reduction="sum") + (x @ x.T).logsumexp(1).mean()
        if self.kind == "regular" or (self.kind == "late" and self.training):
            loss = loss + 0.1 * y.square().mean()
        return {"loss": loss, "logits": y}


class Attends(nn.Module):
    """Attention over all tokens, whatever the mask; labels that are not counted are `ignored`."""

    def __init__(self, ignored: int = -100, masked: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.out, self.ignored, self.masked = nn.Embedding(64, 8), nn.Linear(8, 64), ignored, masked

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids)
        mask = attention_mask[:, None].bool() if self.masked else None
        y = self.out(x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
        return {"loss": F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=self.ignored), "logits": y}


def spans(num: int = 24) -> list[dict[str, Any]]:
    draw = random.Random(1)
    rows = [row["input_ids"] for row in texts(num, 20)]
    return [{"input_ids": r, "start_positions": draw.randrange(len(r)), "end_positions": len(r) - 1} for r in rows]


def even(num: int = 24) -> list[dict[str, Any]]:
    """Of two lengths, one a batch."""
    return [{"input_ids": [1 + i] * (4 + 5 * (i > 11)), "labels": i % 3} for i in range(num)]


def whole(num: int = 24) -> list[dict[str, Any]]:
    """Of which every token counts."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in texts(num)]


def pairs(num: int = 24) -> list[dict[str, Any]]:
    rows = texts(num)
    return [{"input_ids": a["input_ids"], "labels": b["input_ids"][:9]} for a, b in zip(rows, rows[::-1], strict=True)]


def ragged(rows: list[dict[str, Any]], ignored: int = -100) -> dict[str, torch.Tensor]:
    """As a collator of the library's pads."""
    out = {}
    for name, first in rows[0].items():
        if isinstance(first, int):
            out[name] = torch.tensor([row[name] for row in rows])
        elif isinstance(first, list):
            longest = max(len(row[name]) for row in rows)
            fill = ignored if name == "labels" else 0
            out[name] = torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
    return out | {"attention_mask": (out["input_ids"] != 0).long()}


def tried(model: Any, rows: Any, tmp_path: Path, fewer: int = 0, ignored: int = -100, **settings: Any) -> Padding:
    """The padding of a training that has seen a short batch and a long one, `fewer` rows in the last; not trained."""
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))
    trainer = Trainer(model, arguments(output_dir=str(tmp_path)), train_dataset=rows, backend="eager", **settings)
    functional, held = trainer._functional(), Watched(trainer, Trainer)
    batches = [ragged(rows[:4], ignored), ragged(rows[fewer - 4 :], ignored)]
    known = traced.probe(held, functional, batches[0], {}, True)
    found = padding.of(trainer, "training", known, 4)
    prove = partial(proof.Training(held, functional, {}, [], trainer._mesh(), known.reads), functional.params)
    for batch in batches:
        found([batch], prove)
    if fewer == 0:
        found.fills([batches[0]], prove)
    return found


LM = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
SEQ = {"vocab_size": 64, "d_model": 16, "dropout_rate": 0.0, "dropout": 0.0}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "forced_eos_token_id": None}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
T5 = {"d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
XLNET = {"vocab_size": 64, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24, "num_labels": 3, "pad_token_id": 0}

PROVEN = {
    "llama": (llama, texts),
    "gpt2, with dropout": (made(T.GPT2LMHeadModel, T.GPT2Config(**LM)), texts),
    "bert, with dropout": (made(T.BertForSequenceClassification, T.BertConfig(**TINY, num_labels=3)), classes),
    "bert, tokens": (made(T.BertForTokenClassification, T.BertConfig(**TINY, num_labels=64)), texts),
    "t5": (made(T.T5ForConditionalGeneration, T.T5Config(**SEQ, **T5)), pairs),
    "bart": (made(T.BartForConditionalGeneration, T.BartConfig(**SEQ, **BART)), pairs),
    "a mean over the mask": (partial(Pooled, masked=True), classes),
    "noise in training": (partial(Pooled, masked=True, kind="noise"), classes),
}
REFUTED = {
    "a softmax over positions": (made(T.BertForQuestionAnswering, T.BertConfig(**TINY, **STILL)), spans),
    "a summary of the last token": (made(T.XLNetForSequenceClassification, T.XLNetConfig(**XLNET)), classes),
    "a convolution": (
        made(T.ConvBertForSequenceClassification, T.ConvBertConfig(**TINY, **STILL, embedding_size=16, head_ratio=1)),
        lambda: [row | {"labels": row["labels"] % 2} for row in classes()],
    ),
    "a mean over all": (Pooled, classes),
    "a mean over all below zeros": (partial(Pooled, 0.0), classes),
    "attention to padding": (Attends, texts),
    "a gradient that is NaN": (partial(Pooled, masked=True, kind="root"), lambda: even()),
}


def test_lengths_are_proven(tmp_path: Path) -> None:
    for name, (model, rows) in PROVEN.items():
        found = tried(model(), rows(), tmp_path)
        assert {"input_ids", ""} <= found.proven and not found.refuted, (name, found.refuted)
        assert found.shapes[-1]["input_ids"] in (32, 64), name
    zeros = tried(Attends(0, masked=True), whole(), tmp_path, ignored=0)
    assert {"input_ids", "labels", ""} <= zeros.proven and zeros.losses.ignored == 0
    for name, (model, rows) in REFUTED.items():
        found = tried(model(), rows(), tmp_path)
        assert "as they are" in found.refuted["input_ids"] or "apart" in found.refuted["input_ids"], (name, found)
        assert len(found.shapes) == 2 and "input_ids" not in found.proven, name


def test_rows_are_proven(tmp_path: Path) -> None:
    for kind in ("norm", "regular", "late", "negatives"):
        found = tried(Pooled(masked=True, kind=kind), classes(), tmp_path, fewer=1)
        assert "" in found.refuted and [s[""] for s in found.shapes] == [4, 3], (kind, found)
    assert "" in tried(Pooled(masked=True), classes(), tmp_path, fewer=1).proven


def test_errors_between_ranks_are_none_of_padding() -> None:
    model: Any = None
    for error in (fz.errors.RankLost, fz.errors.BusyError):
        training = proof.Training(model, model, {}, [], model, False)
        evaluation = Evaluation(model, model, traced.Kind(True, False, ()), {}, [], None, {})
        evaluation._prover = None, 0.0
        training._numbers = evaluation._run = Mock(side_effect=error("another rank"))
        with pytest.raises(error):
            training(None, {}, {})
        with pytest.raises(error):
            evaluation._prove(None, {}, {})


class Regular:
    """A Trainer's loss that reads all rows' logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        found = model(**inputs)
        loss = found["loss"] + 0.1 * found["logits"].square().mean()
        return (loss, found) if return_outputs else loss


def test_as_they_come(tmp_path: Path) -> None:
    """What cannot be padded has the library's numbers in training and in evaluation, in shapes of its own."""
    once = {"gradient_accumulation_steps": 1, "DATA_COLLATOR": ragged, "max_steps": 4}
    sorted_rows = sorted(classes(14), key=lambda row: len(row["input_ids"]))
    rows = [row for some in (sorted_rows[:4], sorted_rows[-4:]) for row in some] * 2
    once |= {"train_sampling_strategy": "sequential"}
    theirs, ours = beside(tmp_path / "pooled", model=Pooled, rows=rows, **once)
    assert ours.num_programs == 2
    for trainer in (theirs, ours):
        trainer.found = trainer.evaluate(classes(14))["eval_loss"], trainer.predict(classes(8)).predictions
    assert ours.found[0] == pytest.approx(theirs.found[0], abs=1e-6)
    assert abs(ours.found[1] - theirs.found[1]).max() < 1e-5
    for name, cls in (("theirs", T.Trainer), ("ours", Trainer)):
        cls = type(name, (Regular, cls), {})
        model = lambda: Pooled(masked=True)  # noqa: E731
        made = trained(
            cls, tmp_path / name, model=model, rows=classes(6), num_train_epochs=2, **once | {"max_steps": -1}
        )
        ours, theirs = made, ours
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-5) and ours._padding.refuted.keys() == {""}


def test_refused(tmp_path: Path) -> None:
    """Before a step: more lengths than programs, several lengths in one step, rows that lack beside others; tuples."""
    settings = {"model": Pooled, "DATA_COLLATOR": ragged, "train_sampling_strategy": "sequential"}
    lengths = [{"input_ids": [1] * (n + i % 2), "labels": i % 3} for n in (4, 6, 8, 10, 12) for i in range(4)]
    pad = padding_of(most=2)
    for n in (5, 7):
        pad([batch(n)], lambda rows, padded: "a loss of 2, and of 1 as they are")
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)more than 2 shapes.*a loss of 2, and of 1.*max_length"):
        pad([batch(9)], lambda rows, padded: None)
    with pytest.raises(fz.errors.FzeroValueError, match=r"input_ids from 5 to 7: 2 rows padded.*a loss of"):
        trained(Trainer, tmp_path, rows=lengths, **settings)
    with pytest.raises(
        fz.errors.FzeroValueError,
        match=r"has 2 rows, and those of its step 4\n.*: 2 rows padded .by a copy.* a loss of",
    ):
        same = [row | {"input_ids": [1 + i, 2, 3]} for i, row in enumerate(classes(6))]
        model = partial(Pooled, kind="regular")
        trained(Trainer, tmp_path, rows=same, **settings | {"model": model, "max_steps": -1})
    with pytest.raises(fz.errors.FzeroTypeError, match=r"a batch is a tuple, not a dict\n *float32\[4, 2\]"):
        pair = lambda rows: (torch.zeros(len(rows), 2), torch.zeros(len(rows)))  # noqa: E731
        trained(Trainer, tmp_path, model=Net, rows=classes(8), DATA_COLLATOR=pair)


def padding_of(**settings: Any) -> Padding:
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=1, device="cpu"))
    usual = {"labels": ["labels"], "token": 0, "mask": False, "masked": True, "losses": Losses(), "rows": 2}
    rest = {"longest": None, "lengths": None, "ranks": Exchange(trainer), "what": "a test"}
    return Padding(**(usual | rest | settings))


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.ones(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def test_lengths() -> None:
    """Those of one length stay; ragged ones become a few powers of two, up to what the model takes."""

    def fits(*parts: Any, **settings: Any) -> Any:
        return (pad if not settings else padding_of(**settings))(parts, lambda rows, padded: None)[0][0]

    pad = padding_of()
    assert [fits(batch(50))["input_ids"].shape for _ in range(3)] == [(2, 50)] * 3
    found = {fits(batch(n))["labels"].shape[1] for n in (7, 40, 90, 120, 260, 30, 500, 512)}
    assert len(pad.shapes) <= 4 and found <= {32, 50, 128, 512} and max(found) == 512
    assert fits(batch(70), batch(90), longest=100)["input_ids"].shape[1] == 100
    part = fits(batch(9, rows=1), lengths=[16, 64])
    assert part["input_ids"].shape == (2, 16) and part["labels"][0, 9:].eq(-100).all()
    assert part["labels"][1].eq(-100).all() and part["attention_mask"][1].equal(part["attention_mask"][0])
    with pytest.raises(fz.errors.FzeroValueError, match="longer than lengths"):
        fits(batch(17), lengths=[16])
    with pytest.raises(fz.errors.FzeroValueError, match="no attention_mask"):
        fits(batch(9), batch(11), masked=False)
    pad = padding_of(losses=Losses(ignores=False))  # one length, and a last batch in part
    assert [fits(batch(20, rows))["input_ids"].shape for rows in (2, 2, 1)] == [(2, 20), (2, 20), (1, 20)]
    pad = padding_of()  # the targets' length does not vary, the source's does
    found = [fits(batch(n) | {"labels": batch(6)["labels"]}) for n in (9, 11, 40)]
    assert [x["labels"].shape[1] for x in found] == [6] * 3 and [x["input_ids"].shape[1] for x in found] == [9, 32, 64]


def test_a_state_at_rest_elsewhere(tmp_path: Path) -> None:
    """Parameters on disk: the proof is a program, and the state is as it was."""
    rows, once = classes(16), {"gradient_accumulation_steps": 1, "max_steps": 3, "DATA_COLLATOR": ragged}
    found = []
    disk = fz.offload("nvme", ("opt_state", "params"), path=str(tmp_path))
    for specs in ([fz.shard_params()], [fz.shard_params(), disk]):
        ours = trained(Trainer, tmp_path, model=partial(Pooled, masked=True), rows=rows, TRANSFORMS=specs, **once)
        assert "input_ids" in ours._padding.proven
        found.append(losses(ours))
        wrong = trained(Trainer, tmp_path, model=partial(Pooled, 0.0), rows=rows, TRANSFORMS=specs, **once)
        assert "apart" in wrong._padding.refuted["input_ids"]
    assert found[0] == pytest.approx(found[1], abs=1e-7)
