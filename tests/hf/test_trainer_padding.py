"""Padding of fzero.hf.Trainer: checked with the first batch that is padded, asked for, or not done; compared with
transformers' own Trainer."""

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
from fzero.hf.data_parallel_ranks import Exchange  # noqa: E402
from fzero.hf.padding import Padding  # noqa: E402
from fzero.hf.traced_loss import Losses  # noqa: E402

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
AUDIO = {
    "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "layerdrop": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0, "mask_time_prob": 0.0,
    "feat_extract_norm": "layer", "do_stable_layer_norm": True,
}  # fmt: skip


def tiny(name: str, **more: Any) -> Any:
    """A model of a class of the library, small and without dropout."""
    cls = getattr(T, name)
    wanted = SMALL | (AUDIO if name.startswith("Wav2Vec2") else {}) | more
    given = {n: x for n, x in wanted.items() if hasattr(cls.config_class(), n)}
    given |= {"decoder_start_token_id": 1} if name.endswith("ConditionalGeneration") else {}
    torch.manual_seed(0)
    model = cls(cls.config_class(**given))
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    for p in model.parameters():  # or norms of zeros have gradients that are all rounding
        p.data.add_(torch.randn_like(p), alpha=0.02)
    return model


def labelled(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Token ids and labels, padded by the collator to the longest row."""
    out = ragged(rows)
    out["labels"] = out["input_ids"].masked_fill(out["attention_mask"] == 0, -100)
    return out


def sounds(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Waves of as many hundreds of samples as a row has tokens."""
    found = ragged(rows)
    wave = torch.sin(
        found["input_ids"].repeat_interleave(40, 1) * torch.arange(1.0, 1 + 40 * found["input_ids"].shape[1])
    )
    mask = found["attention_mask"].repeat_interleave(40, 1)
    return {"input_values": wave * mask, "attention_mask": mask, "labels": found["labels"]}


class Pooled(nn.Module):
    """Two layers over tokens, the mean over all positions, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.head(torch.tanh(self.tokens(input_ids)).mean(1))
        return {"loss": F.cross_entropy(y, labels), "logits": y}


class Unmasked(Pooled):
    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, torch.Tensor]:  # pyright: ignore
        return super().forward(input_ids, None, labels)


def ragged(rows: list[dict[str, Any]], lengths: Any = (1,)) -> dict[str, torch.Tensor]:
    """As a collator of the library's pads: to the longest, or the next of these lengths."""
    longest = max(len(row["input_ids"]) for row in rows)
    longest = next((n for n in lengths if n >= longest), longest)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Head(T.BertForSequenceClassification):
    """A class of the user's own."""


def head() -> Head:
    torch.manual_seed(0)
    return Head(T.BertConfig(**TINY, **STILL, num_labels=3))


class BatchStatistics(nn.Module):
    """Normalizes tokens by statistics of the batch, over rows and length."""

    def __init__(self, running: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(64, 8), nn.BatchNorm1d(8, track_running_stats=running)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        x = self.norm(self.tokens(input_ids).transpose(1, 2)).transpose(1, 2) * attention_mask[..., None]
        y = self.head(torch.tanh(x).sum(1) / attention_mask.sum(1, keepdim=True))
        return {"loss": F.cross_entropy(y, labels), "logits": y}


KINDS: dict[str, Any] = {
    "bert": (bert, ragged),
    "a subclass": (head, ragged),
    "bert of tokens": (lambda: tiny("BertForMaskedLM"), labelled),
    "gpt2": (lambda: tiny("GPT2LMHeadModel"), labelled),
    "gpt2 of rows": (lambda: tiny("GPT2ForSequenceClassification"), ragged),
    "llama": (llama, labelled),
    "mixtral": (lambda: tiny("MixtralForCausalLM", output_router_logits=True), labelled),
    "mamba": (lambda: tiny("MambaForCausalLM"), labelled),
    "t5": (lambda: tiny("T5ForConditionalGeneration"), labelled),
    "wav2vec2": (lambda: tiny("Wav2Vec2ForSequenceClassification"), sounds),
}


@pytest.mark.full(keep=["bert"])
@pytest.mark.parametrize("name", KINDS)
def test_ragged_batches_have_the_librarys_numbers(tmp_path: Path, name: str) -> None:
    """Padded to a few lengths, which the model was found to leave out."""
    model, collator = KINDS[name]
    once = {"max_steps": 4, "gradient_accumulation_steps": 1, "DATA_COLLATOR": collator, "LENGTHS": None}
    once |= {"remove_unused_columns": False}
    theirs, ours = beside(tmp_path, model=model, rows=classes(14), **once)
    assert ours.num_programs <= 3, "lengths, and the last batch of an epoch"
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)


CHANGED: dict[str, Any] = {
    "a mean over all positions": (Pooled, "ragged"),
    "batch statistics": (BatchStatistics, "ragged"),
    "convolutions over length": (
        lambda: tiny("ConvBertForSequenceClassification", head_ratio=1, initializer_range=0.5),
        "ragged",
    ),
    "a group norm over length": (
        lambda: tiny("Wav2Vec2ForSequenceClassification", feat_extract_norm="group", do_stable_layer_norm=False),
        "sounds",
    ),
}


@pytest.mark.full(keep=["a mean over all positions"])
@pytest.mark.parametrize("name", CHANGED)
def test_padding_that_changes_the_loss_is_an_error(tmp_path: Path, name: str) -> None:
    """The error names the ways out, of which lengths= gives the numbers of a collator that pads to these. An evaluation
    takes such batches as they come."""
    model, collator = CHANGED[name]
    collator = {"ragged": ragged, "sounds": sounds}[collator]
    once = {"max_steps": 4, "gradient_accumulation_steps": 1, "DATA_COLLATOR": collator, "LENGTHS": None}
    once |= {"remove_unused_columns": False}
    says = r"(?s)changes what this model.*the loss: [\d.]+ unpadded, [\d.]+ padded.*lengths=.*pad_to_multiple_of"
    with pytest.raises(fz.errors.FzeroValueError, match=says):
        trained(Trainer, tmp_path, model=model, rows=classes(16), **once)
    args = arguments(output_dir=str(tmp_path), per_device_eval_batch_size=2, remove_unused_columns=False)
    given = {"args": args, "eval_dataset": classes(8), "data_collator": collator}
    theirs, ours = T.Trainer(model(), **given), Trainer(model(), **given, backend="eager")
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-6)
    one, two = theirs.predict(classes(6)).predictions, ours.predict(classes(6)).predictions
    for x, y in zip(*((p if isinstance(p, tuple) else (p,)) for p in (one, two)), strict=True):
        assert abs(x - y).max() < 1e-5


def fresh(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A tiny model of a class of the library with its initial weights, and with dropout."""
    cls = getattr(T, name)
    given = {n: x for n, x in SMALL.items() if hasattr(cls.config_class(), n) and "drop" not in n}
    given |= {"decoder_start_token_id": 1} if name.endswith("ConditionalGeneration") else {}
    torch.manual_seed(0)
    model = cls(cls.config_class(**given | more))
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


TWICE = {"max_steps": 2, "gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential", "LENGTHS": None}
# Of different tokens: of equal ones the gradients of attention's queries and keys cancel, and are all rounding.
ROWS = [
    {"input_ids": [3 + (7 * i + 5 * j * j) % 60 for j in range(n)], "labels": i % 3} for n in (9, 7) for i in range(4)
]


def test_an_effect_on_gradients_alone_is_found(tmp_path: Path) -> None:
    """The initial weights of a ConvBert are so small that its convolutions over the padding change no bit of the
    loss."""
    model = fresh("ConvBertForSequenceClassification", head_ratio=1).eval()
    batch = ragged(ROWS[:4])
    padded = {n: F.pad(x, (0, 9)) if x.dim() == 2 else x for n, x in batch.items()}
    assert model(**batch).loss.item() == pytest.approx(model(**padded).loss.item(), rel=5e-6)
    says = r"(?s)changes what this model computes\n *the gradient of \S*conv\S*: differs by .*pad_to_multiple_of"
    with pytest.raises(fz.errors.FzeroValueError, match=says):
        trained(Trainer, tmp_path, model=lambda: model, rows=ROWS, **TWICE | {"DATA_COLLATOR": ragged})


ORDINARY = [
    "GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "RobertaForSequenceClassification", "OPTForCausalLM",
    "BloomForCausalLM", "MambaForCausalLM", "ModernBertForMaskedLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration", "MixtralForCausalLM", "Gemma2ForCausalLM",
]  # fmt: skip


@pytest.mark.full(keep=["GPT2LMHeadModel-bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_padded(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """With dropout, and with weights in bfloat16: the comparison is in float32 and draws nothing."""
    collator = ragged if "Classification" in name else labelled
    made = trained(
        Trainer, tmp_path, model=lambda: fresh(name, dtype), rows=ROWS, **TWICE | {"DATA_COLLATOR": collator}
    )
    assert made.num_programs == 1


def test_batches_that_are_not_padded(tmp_path: Path) -> None:
    """Without an attention mask, with statistics of batches that are kept, and with positions that depend on the
    longest row."""

    def why(model: Any, masked: bool = True) -> str:
        trainer = Trainer(model, arguments(output_dir=str(tmp_path)))
        pad = padding.of(trainer, fz.functionalize(model.train()), "a test", Losses(), 2)
        names = ("input_ids", "labels") if not masked else ("input_ids", "labels", "attention_mask")
        pad([{n: batch(7)[n] for n in names}], never)
        return pad.kept("input_ids")

    assert why(llama()) == ""
    assert "overwrites buffers" in why(BatchStatistics(running=True))
    assert why(llama(), masked=False) == "the batch has no attention_mask"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rotary" in why(T.LlamaForCausalLM(T.LlamaConfig(**TINY, rope_parameters=rope)))
    peft = pytest.importorskip("peft")
    assert why(peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear"))) == ""


def test_the_collators_values(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(pad_token_id=7, pad_token_type_id=3)
    model = llama()
    model.config.pad_token_id = 5
    given = {"args": arguments(output_dir=str(tmp_path))}
    of = lambda **more: padding.of(Trainer(model, **given, **more), fz.functionalize(model), "", Losses(), 2)  # noqa: E731
    ids = torch.ones(2, 4, dtype=torch.int64)
    names = ("input_ids", "decoder_input_ids", "token_type_ids", "attention_mask", "labels", "position_ids")
    collator = type("Collator", (), {"tokenizer": tokenizer, "__call__": lambda self, rows: rows})()
    assert [of(data_collator=collator).fill(n, ids) for n in names] == [7, 7, 3, 0, -100, 0]
    assert [of(data_collator=ragged).fill(n, ids) for n in names] == [5, 5, 0, 0, -100, 0]
    assert of().fill("input_values", ids.float(), 4) == 0 and of().fill("input_values", ids.float(), 5) is None


def test_a_batch_without_labels_does_not_tell(tmp_path: Path) -> None:
    """Its loss is NaN with padding, too: the next batch that is padded is compared."""
    pad = padding_of()
    asked: list[tuple[int, int]] = []

    def compare(one: Any, two: Any) -> tuple[bool, str]:
        asked.append((one["input_ids"].shape[1], two["input_ids"].shape[1]))
        return len(asked) > 1, ""

    for n in (7, 9, 11, 13):
        pad([batch(n)], compare)
    assert asked == [(9, 32), (11, 32)]
    pad([batch(40)], compare)
    assert len(asked) == 2


class Regular:
    """A Trainer's loss that reads all rows' logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        out = model(**inputs)
        loss = out["loss"] + 0.1 * out["logits"].square().mean()
        return (loss, out) if return_outputs else loss


ONCE = {"gradient_accumulation_steps": 1, "DATA_COLLATOR": ragged, "max_steps": 4, "LENGTHS": None}


@pytest.mark.full
def test_rows_that_change_the_loss_are_not_added(tmp_path: Path) -> None:
    """A last batch in part is a program of its own."""
    once = ONCE | {"train_sampling_strategy": "sequential"}
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
    pad = padding_of(unknown="another model")
    for n in (5, 7, 9, 11):
        pad([batch(n)], never)
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)more than 4 shapes.*another model.*lengths=.*max_length"):
        pad([batch(13)], never)
    unmasked = lambda rows: {n: x for n, x in ragged(rows).items() if n != "attention_mask"}  # noqa: E731
    with pytest.raises(fz.errors.FzeroValueError, match=r"input_ids from 5 to 7: the batch has no attention_mask"):
        trained(Trainer, tmp_path, rows=lengths, **settings | {"DATA_COLLATOR": unmasked, "model": Unmasked})
    with pytest.raises(
        fz.errors.FzeroValueError,
        match=r"has 2 rows, and those of its step 4\n.*no samples can be added: a custom loss",
    ):
        same = [row | {"input_ids": [1 + i, 2, 3]} for i, row in enumerate(classes(6))]
        trained(type("Own", (Regular, Trainer), {}), tmp_path, rows=same, **settings | {"max_steps": -1})
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
    usual = {
        "labels": ["labels"],
        "fills": {"_ids": 0, "_mask": 0},
        "unknown": "",
        "own_loss": False,
        "losses": Losses(),
        "rows": 2,
    }
    rest = {"longest": None, "lengths": None, "ranks": Exchange(trainer), "what": "a test"}
    return Padding(**(usual | rest | settings))


def never(*batches: Any) -> tuple[bool, str]:
    raise AssertionError("no batch is padded")


def alike(*batches: Any) -> tuple[bool, str]:
    return True, ""


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.ones(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def test_lengths() -> None:
    """Those of one length stay; ragged ones become a few powers of two, up to what the model takes."""

    def fits(*parts: Any, **settings: Any) -> Any:
        return (pad if not settings else padding_of(**settings))(parts, alike)[0][0]

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
    with pytest.raises(fz.errors.FzeroValueError, match=r"labels from 9 to 11: the loss is not known to ignore"):
        fits(batch(9), batch(11), losses=Losses(ignores=False))
    part = fits(batch(9), batch(11), lengths=[16], losses=Losses(ignores=False), unknown="another model")
    assert part["input_ids"].shape == (2, 16) and part["labels"][0, 9:].eq(-100).all()
    pad = padding_of(losses=Losses(ignores=False))  # one length, and a last batch in part
    assert [fits(batch(20, rows))["input_ids"].shape for rows in (2, 2, 1)] == [(2, 20), (2, 20), (1, 20)]
    pad = padding_of()  # the targets' length does not vary, the source's does
    found = [fits(batch(n) | {"labels": batch(6)["labels"]}) for n in (9, 11, 40)]
    assert [x["labels"].shape[1] for x in found] == [6] * 3 and [x["input_ids"].shape[1] for x in found] == [9, 32, 64]
