"""Padding of fzero.hf.Trainer: where it is known to change nothing, or asked for, or batches are taken as they come;
beside transformers' own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from test_trainer import STILL, TINY, Net, arguments, bert, beside, classes, llama, losses, trained  # noqa: E402

from fzero.hf import Trainer, padding  # noqa: E402
from fzero.hf.data_parts import Exchange  # noqa: E402
from fzero.hf.padding import Padding  # noqa: E402
from fzero.hf.traced import Losses  # noqa: E402

T = transformers
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "n_embd": 16, "d_model": 16, "dim": 16, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2, "n_head": 2,
    "n_heads": 2, "num_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "intermediate_size": 24,
    "n_inner": 24, "hidden_dim": 24, "d_ff": 24, "d_kv": 8, "ffn_dim": 24, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 64, "n_positions": 64, "embedding_size": 16, "word_embed_proj_dim": 16, "dropout": 0.0,
    "attention_dropout": 0.0, "dropout_rate": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "seq_classif_dropout": 0.0, "hidden_dropout": 0.0,
    "num_key_value_heads": 2, "local_attention": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "decoder_start_token_id": 1, "num_labels": 3, "num_local_experts": 2,
    "num_experts_per_tok": 1, "state_size": 4, "rotary_dim": 4, "sliding_window": 4,
}  # fmt: skip
SWIN = {
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "image_size": 32,
    "drop_path_rate": 0.0,
}
CONV = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}
CAUSAL = "Bloom Falcon Gemma2 GPTJ GPTNeoX Llama Mamba Mistral Mixtral OPT Phi Qwen2 StableLm".split()  # noqa: SIM905


def tiny(name: str) -> Any:
    """A model of a class of the library, small and without dropout."""
    cls = getattr(T, name)
    kind = SWIN if name.startswith("Swin") else CONV if name.startswith("ConvNext") else SMALL | {"image_size": 32}
    given = {n: x for n, x in (kind | {"num_labels": 3}).items() if hasattr(cls.config_class(), n)}
    given |= {"decoder_start_token_id": 1} if name.endswith("ConditionalGeneration") else {}
    torch.manual_seed(0)
    model = cls(cls.config_class(**given))
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    for p in model.parameters():  # or norms of zeros have gradients that are all rounding
        p.data.add_(torch.randn_like(p), alpha=0.02)
    return model


def found(model: Any, labels: torch.Tensor, ids: torch.Tensor, images: bool) -> list[torch.Tensor]:
    """The loss and all gradients, by PyTorch."""
    model.zero_grad()
    masked = {"input_ids": ids, "attention_mask": ids.ne(0).long()}
    given = {
        "pixel_values": (ids.float()[:, :1, None, None] + torch.arange(1024.0).view(32, 32)).expand(-1, 3, -1, -1).sin()
    }
    out = model(labels=labels, **(given if images else masked))
    out.loss.backward()
    return [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.full
def test_what_is_padded_computes_the_same() -> None:
    """Loss and gradients of the library's models that are known to leave out padding: longer, and with another row."""
    causal = [f"{kind}ForCausalLM" for kind in CAUSAL]
    others = sorted(name for name in padding.KNOWN if not name.endswith("ForCausalLM"))
    assert {*causal} <= padding.KNOWN
    ids = torch.tensor([[5, 9, 3, 8, 0, 0, 0, 0, 0], [7, 3, 4, 9, 8, 6, 5, 3, 7], [4, 8, 0, 0, 0, 0, 0, 0, 0]])
    for name in causal + others:
        model, head = tiny(name), name.partition("For")[2]
        labels = torch.tensor([0, 2, 1])
        if not head.endswith(("SequenceClassification", "ImageClassification")):
            labels = (ids % 3 if head == "TokenClassification" else ids).masked_fill(ids == 0, -100)
        more = torch.cat([labels, torch.full_like(labels[:1], -100)])
        changed = [(more, torch.cat([ids, ids[:1]]))]
        if head != "ImageClassification":
            longer = F.pad(labels, (0, 23), value=-100) if labels.dim() == 2 else labels
            changed.append((longer, F.pad(ids, (0, 23))))
        one = found(model, labels, ids, head == "ImageClassification")
        most = max(x.abs().max() for x in one[1:])
        for two in (found(model, *x, head == "ImageClassification") for x in changed):
            for x, y in zip(one, two, strict=True):
                assert (x - y).abs().max() <= 2e-5 * most.clamp(min=1e-3), name


class Pooled(nn.Module):
    """Two layers over tokens, the mean over all positions, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.head(torch.tanh(self.tokens(input_ids)).mean(1))
        return {"loss": F.cross_entropy(y, labels), "logits": y}


def ragged(rows: list[dict[str, Any]], lengths: Any = (1,)) -> dict[str, torch.Tensor]:
    """As a collator of the library's pads: to the longest, or the next of these lengths."""
    longest = max(len(row["input_ids"]) for row in rows)
    longest = next((n for n in lengths if n >= longest), longest)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Head(T.BertForSequenceClassification):
    """A class of the user's own."""


def test_what_is_known(tmp_path: Path) -> None:
    """The library's own classes with its own loss, and nothing else."""

    def why(model: Any, cls: Any = Trainer, **settings: Any) -> str:
        trainer = cls(model, arguments(output_dir=str(tmp_path)), **settings)
        trainer._set_signature_columns_if_needed()
        return padding.unknown(trainer)

    still = T.BertConfig(**TINY, **STILL)
    assert [why(model) for model in (llama(), bert(), tiny("T5ForConditionalGeneration"))] == [""] * 3
    for model in (Pooled(), T.BertForQuestionAnswering(still), T.BertLMHeadModel(still), Head(still)):
        assert why(model) == f"{type(model).__name__} is not known to compute the same of rows that are padded"
    assert "loss of your own" in why(llama(), compute_loss_func=lambda out, labels, **more: out["logits"].mean())
    assert "loss of your own" in why(llama(), type("Own", (Regular, Trainer), {}))
    routed = tiny("MixtralForCausalLM")
    routed.config.output_router_logits = True
    assert "output_router_logits" in why(routed)
    peft = pytest.importorskip("peft")
    assert why(peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear"))) == ""


class Regular:
    """A Trainer's loss that reads all rows' logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        out = model(**inputs)
        loss = out["loss"] + 0.1 * out["logits"].square().mean()
        return (loss, out) if return_outputs else loss


ONCE = {"gradient_accumulation_steps": 1, "DATA_COLLATOR": ragged, "max_steps": 4, "LENGTHS": None}


@pytest.mark.full
def test_as_they_come(tmp_path: Path) -> None:
    """What is not known has the library's numbers in training and in evaluation, in shapes of its own."""
    sorted_rows = sorted(classes(14), key=lambda row: len(row["input_ids"]))
    rows = [row for some in (sorted_rows[:4], sorted_rows[-4:]) for row in some] * 2
    once = ONCE | {"train_sampling_strategy": "sequential"}
    theirs, ours = beside(tmp_path / "pooled", model=Pooled, rows=rows, **once)
    assert ours.num_programs == 2
    for trainer in (theirs, ours):
        trainer.found = trainer.evaluate(classes(14))["eval_loss"], trainer.predict(classes(8)).predictions
    assert ours.found[0] == pytest.approx(theirs.found[0], abs=1e-6)
    assert abs(ours.found[1] - theirs.found[1]).max() < 1e-5
    made = [
        trained(
            type("Of", (Regular, cls), {}), tmp_path / cls.__module__, model=bert, rows=classes(6),
            **once | {"max_steps": -1, "num_train_epochs": 2, "DATA_COLLATOR": partial(ragged, lengths=(20,))},
        )
        for cls in (T.Trainer, Trainer)
    ]  # fmt: skip
    assert losses(made[1]) == pytest.approx(losses(made[0]), abs=1e-5)
    assert made[1].num_programs == 2  # of four rows, and of two


def test_lengths_that_are_asked_for(tmp_path: Path) -> None:
    """Any model's batches are what a collator that pads to these makes of them, in one program each."""
    rows = classes(24)
    theirs = trained(
        T.Trainer, tmp_path, model=Pooled, rows=rows, **ONCE | {"DATA_COLLATOR": partial(ragged, lengths=(16, 32))}
    )
    ours = trained(Trainer, tmp_path, model=Pooled, rows=rows, **ONCE | {"LENGTHS": (16, 32)})
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6) and ours.num_programs <= 2
    assert losses(ours) != pytest.approx(
        losses(trained(T.Trainer, tmp_path, model=Pooled, rows=rows, **ONCE)), abs=1e-6
    )


def test_refused(tmp_path: Path) -> None:
    """Before a step: more lengths than programs, several lengths in one step, rows that lack beside others; tuples."""
    settings = {"model": Pooled, "DATA_COLLATOR": ragged, "train_sampling_strategy": "sequential", "LENGTHS": None}
    lengths = [{"input_ids": [1] * (n + i % 2), "labels": i % 3} for n in (4, 6, 8, 10, 12) for i in range(4)]
    pad = padding_of(most=2, unknown="another model")
    for n in (5, 7):
        pad([batch(n)])
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)more than 2 shapes.*another model.*lengths=.*max_length"):
        pad([batch(9)])
    with pytest.raises(fz.errors.FzeroValueError, match=r"input_ids from 5 to 7: Pooled is not known"):
        trained(Trainer, tmp_path, rows=lengths, **settings)
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"has 2 rows, and those of its step 4\n.*: Pooled is not known"
    ):
        same = [row | {"input_ids": [1 + i, 2, 3]} for i, row in enumerate(classes(6))]
        trained(Trainer, tmp_path, rows=same, **settings | {"max_steps": -1})
    with pytest.raises(fz.errors.FzeroTypeError, match=r"a batch is a tuple, not a dict\n *float32\[4, 2\]"):
        pair = lambda rows: (torch.zeros(len(rows), 2), torch.zeros(len(rows)))  # noqa: E731
        trained(Trainer, tmp_path, model=Net, rows=classes(8), DATA_COLLATOR=pair)


class Masked(nn.Module):
    """A loss that weighs its samples, if it is given weights; without labels the loss is another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any, labels: Any = None, mask: Any = None) -> dict[str, torch.Tensor]:
        error = (self.layer(x)[:, 0] - labels).square()
        return {"loss": (error if mask is None else error * mask).mean()}


class Normed(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Any, labels: Any = None, mask: Any = None) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels, mask)


def some_masked(pattern: str) -> list[dict[str, Any]]:
    """Rows with a float mask (m), an integer one (i), None (0), or none (-)."""
    draw = torch.Generator().manual_seed(1)
    masks = {"m": lambda i: {"mask": i / 4}, "i": lambda i: {"mask": i % 3}, "0": lambda _: {"mask": None}}
    rows = [{"x": torch.randn(3, generator=draw).tolist(), "labels": 1.0 - i} for i in range(len(pattern))]
    return [row | masks.get(c, lambda _: {})(i) for i, (row, c) in enumerate(zip(rows, pattern, strict=True))]


def by_first(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As the library's collator: the entries are those of the first row."""
    return {n: None if x is None else torch.tensor([row[n] for row in rows]) for n, x in rows[0].items()}


@pytest.mark.parametrize("pattern", ["-mm-mm", "m--m0i", "mmm-ii"])
def test_each_micro_batch_has_its_own_entries(tmp_path: Path, pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    """Loss, norm and evaluation are the library's if only some micro-batches of a step have an entry; the last step of
    the epoch is short of one."""
    once = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "train_sampling_strategy": "sequential"}
    once |= {"max_steps": -1, "num_train_epochs": 2, "LENGTHS": None, "DATA_COLLATOR": by_first}
    rows = some_masked(pattern)
    theirs, ours = beside(tmp_path, model=Masked, rows=rows, **once, per_device_eval_batch_size=1)
    assert ours.evaluate(rows)["eval_loss"] == pytest.approx(theirs.evaluate(rows)["eval_loss"], rel=1e-5)
    assert "micro-batches of one step have different entries (mask: " in caplog.text
    assert ours.num_programs == len(ours.compiled._runs)


def test_entries_that_cannot_be_mixed(tmp_path: Path) -> None:
    """A forward that overwrites buffers would do so with copies."""
    once = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "LENGTHS": None}
    where = r"(?s)overwrites buffers.*mask: missing in micro-batch 0; float32 in micro-batch 1"
    with pytest.raises(fz.errors.FzeroValueError, match=where):
        trained(Trainer, tmp_path, model=Normed, rows=some_masked("--mm"), **once, DATA_COLLATOR=by_first)


def padding_of(**settings: Any) -> Padding:
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=1, device="cpu"))
    usual = {"labels": ["labels"], "token": 0, "mask": False, "unknown": "", "losses": Losses(), "rows": 2}
    rest = {"longest": None, "lengths": None, "ranks": Exchange(trainer), "what": "a test"}
    return Padding(**(usual | rest | settings))


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.ones(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def test_lengths() -> None:
    """Those of one length stay; ragged ones become a few powers of two, up to what the model takes."""

    def fits(*parts: Any, **settings: Any) -> Any:
        return (pad if not settings else padding_of(**settings))(parts)[0][0]

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
    with pytest.raises(fz.errors.FzeroValueError, match=r"labels from 9 to 11: the loss is not known to leave out"):
        fits(batch(9), batch(11), losses=Losses(ignores=False))
    part = fits(batch(9), batch(11), lengths=[16], losses=Losses(ignores=False), unknown="another model")
    assert part["input_ids"].shape == (2, 16) and part["labels"][0, 9:].eq(-100).all()
    pad = padding_of(losses=Losses(ignores=False))  # one length, and a last batch in part
    assert [fits(batch(20, rows))["input_ids"].shape for rows in (2, 2, 1)] == [(2, 20), (2, 20), (1, 20)]
    pad = padding_of()  # the targets' length does not vary, the source's does
    found = [fits(batch(n) | {"labels": batch(6)["labels"]}) for n in (9, 11, 40)]
    assert [x["labels"].shape[1] for x in found] == [6] * 3 and [x["input_ids"].shape[1] for x in found] == [9, 32, 64]
