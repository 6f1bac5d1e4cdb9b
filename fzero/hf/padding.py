"""Pads batches to a few shapes, of which each is one program: ragged lengths, and rows that a last batch lacks.

A batch is a dict of tensors, one row a sample. Lengths are those of dim 1 of token-like leaves, whose names say what
they are padded with; rows that are missing are copies of the last one whose labels are ignored. All ranks choose alike.

Batches are padded where that is known to change nothing: of models of the library that leave out padding, with the
library's loss (`unknown`). Others are padded to the lengths that are asked for, as a collator would, or taken as they
come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

from fzero import tree
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.hf.data_parts import Exchange
from fzero.hf.traced import Losses
from fzero.trace.reads.value_keys import exact

logger = logging.getLogger("fzero")

MOST = 4
"""Shapes that ragged batches are padded to, unless longer ones come."""

Shape = dict[str, int]
"""The lengths of leaves by their names, and under "" the rows of a micro-batch."""
Tensors = dict[str, torch.Tensor]

_CAUSAL = """
    AXK1 AXK2 Afmoe Apertus Arcee AriaText BailingHybrid Bart Beam BigBirdPegasus BioGpt BitNet Blenderbot
    BlenderbotSmall Bloom CodeGen Cohere Cohere2 Cohere2Moe Cwm DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4
    DiffLlama Doge Emu3 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba FlexOlmo Flint
    GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese Gemma Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Glm Glm4 Glm4Moe
    Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 Helium
    HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Inkling Inkling2 Jais2 Jamba JetMoe Kolibri1 Laguna Lfm2 Lfm3
    Llama Llama4 LongcatFlash MBart Mamba Marian Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 MiniMaxM3VL Ministral
    Ministral3 Mistral Mixtral Mllama ModernBertDecoder Moshi Mpt Mvp NanoChat Nemotron NemotronH OPT Olmo Olmo2
    Olmo3 OlmoHybrid Olmoe PLBart Pegasus Persimmon Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5
    Qwen3_5Moe RecurrentGemma Rwkv SeedOss SmolLM3 SolarOpen StableLm Starcoder2 TrOCR VaultGemma Whisper XGLM Youtu
    Zamba Zamba2
"""
_ENCODERS = """
    Albert Bert Camembert Deberta DebertaV2 DistilBert Electra ModernBert MPNet Roberta RobertaPreLayerNorm XLMRoberta
    XLMRobertaXL
"""
_IMAGES = "Beit ConvNext ConvNextV2 DeiT Dinov2 Swin Swinv2 ViT"
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
KNOWN = {
    *(f"{name}ForCausalLM" for name in _CAUSAL.split()),
    *(name + head for name in _ENCODERS.split() for head in _HEADS),
    *(f"{name}ForImageClassification" for name in _IMAGES.split()),
    *("CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"),
    *(f"{name}ForConditionalGeneration" for name in ("Bart", "MT5", "T5")),
}
"""The models of the library of which longer rows, and further ones, change neither loss nor gradient. Each was tried
with transformers 5.23; tests/hf/test_trainer_padding.py tries some of each kind again."""


@dataclass
class Padding:
    """The shapes that there are, and how batches get one.

    Args:
        labels: names of the leaves that are labels.
        token: what pads token ids; None: there is none, and 0 does.
        mask: whether a batch without an attention mask gets one.
        unknown: why padding may change something; "": it is known not to.
        losses: what is known of the loss.
        rows: of a full micro-batch.
        longest: that the model takes; None: any.
        lengths: those to pad to; None: found as batches come.
        ranks: what the ranks tell each other.
        what: whose batches they are.
        most: lengths that there may be of what cannot be padded; None: any number.
        hint: what else may help who cannot pad.
    """

    labels: Sequence[str]
    token: int | None
    mask: bool
    unknown: str
    losses: Losses
    rows: int
    longest: int | None
    lengths: Sequence[int] | None
    ranks: Exchange
    what: str
    most: int | None = MOST
    hint: str = ""
    shapes: list[Shape] = field(default_factory=list)
    _fixed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _labelled: bool = False  # whether each token has a label
    _steady: dict[str, int | None] = field(default_factory=dict)  # lengths that have not changed yet

    def kept(self, name: str) -> str:
        """Why a leaf keeps its length, or with "" a batch its rows; "": it is padded."""
        if name and self.lengths is not None:
            return ""
        if not self.unknown and not self.losses.ignores and (not name or self._labelled):
            return f"the loss is not known to leave out labels of {self.losses.ignored}"
        return self.unknown

    def fill(self, name: str, leaf: torch.Tensor) -> int | None:
        """The number that pads a leaf behind its own length; None: nothing does."""
        last = name.rpartition(".")[2]
        if leaf.dim() != 2 or leaf.is_floating_point():
            return None
        if name in self.labels:
            return self.losses.ignored
        if last.endswith("input_ids"):
            return self.token or 0
        return 0 if last.endswith(("_mask", "_ids")) else None

    def __call__(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> tuple[list[Tensors], Shape]:
        """The micro-batches of a step in one shape.

        Raises:
            FzeroValueError: naming each leaf without a batch dim, each whose other dims change, and each ragged leaf
                without padding that has several lengths in a step, or more than `most` in all.
        """
        parts = [self._with_mask(part) for part in parts]
        self._check(parts)
        names = sorted(n for n, x in parts[0].items() if self.fill(n, x) is not None)
        sizes = [{**{n: part[n].shape[1] for n in names}, "": _rows(part)} for part in parts]
        high, low = self.ranks.bounds({n: [s[n] for s in sizes] for n in sizes[0]})
        for n in names:
            known = self._steady.setdefault(n, high[n])
            self._steady[n] = known if known == high[n] == low[n] else None
        self._labelled = any(n in self.labels for n in names)
        shape = self._choose(high, low)
        if shape not in self.shapes:
            self.shapes.append(shape)
            lengths = ", ".join(f"{n} {x}" for n, x in shape.items() if n)
            text = "fzero: program %d of %s: %d rows%s"
            logger.info(text, len(self.shapes), self.what, shape[""], f", padded to {lengths}" if lengths else "")
        return [self._padded(part, shape) for part in parts], shape

    def _with_mask(self, part: Mapping[str, torch.Tensor]) -> Tensors:
        ids = part.get("input_ids")
        if not self.mask or ids is None or "attention_mask" in part:
            return dict(part)
        return {**part, "attention_mask": torch.ones_like(ids)}

    def _check(self, parts: Sequence[Tensors]) -> None:
        problems = []
        for part in parts:
            rows = _rows(part)
            for name, x in part.items():
                if not x.dim() or x.shape[0] != rows:
                    problems.append(f"{name}: {tree.describe(x)} has no rows of the batch, which has {rows}")
                elif self.fill(name, x) is None and x.shape[1:] != self._fixed.setdefault(name, tuple(x.shape[1:])):
                    problems.append(f"{name}: {tree.describe(x)}, before it was {list(self._fixed[name])} a row")
        if problems:
            fix = "have the collator pad them to one shape, or leave them out; token ids, masks and labels are padded"
            what = "these leaves of a batch cannot be padded"
            raise FzeroValueError("hf.Trainer", what, list(dict.fromkeys(problems)), fix)

    def _padded(self, part: Tensors, shape: Shape) -> Tensors:
        return {n: self._lengthened(n, x, shape) for n, x in part.items()}

    def _lengthened(self, name: str, x: torch.Tensor, shape: Shape) -> torch.Tensor:
        if name in shape and x.shape[1] < shape[name]:
            fill = self.fill(name, x)
            assert fill is not None
            x = torch.nn.functional.pad(x, (0, shape[name] - x.shape[1]), value=fill)
        missing = shape[""] - x.shape[0]
        if missing > 0:
            rest = x[-1:].expand(missing, *x.shape[1:])
            x = torch.cat([x, torch.full_like(rest, self.losses.ignored) if name in self.labels else rest])
        return x

    # --- shapes ---

    def _choose(self, high: Shape, low: Shape) -> Shape:
        """The shape for batches of these lengths: one that there is, if it is not much longer, else a new one."""
        own = {n for n in high if self.kept(n)}
        if unlike := [n for n in own if low[n] < high[n]]:
            text = "micro-batches of one step have several shapes, and cannot be padded"
            raise self._refusal(text, {n: f"{n or 'rows'} from {low[n]} to {high[n]}" for n in unlike})
        wanted = {n: x if n in own or self._stays(n) else self._rounded(x) for n, x in high.items()}
        if "" not in own:
            wanted[""] = max(high[""], self.rows)
        fits = (s for s in self.shapes if s.keys() == wanted.keys() and all(s[n] == wanted[n] for n in own))
        fits = sorted((s for s in fits if all(s[n] >= x for n, x in high.items())), key=_volume)
        if fits and (_volume(fits[0]) <= _volume(wanted) or len(self.shapes) >= MOST - 1):
            return fits[0]
        if self.most is not None and len(self.shapes) >= self.most and own - {""}:
            text = f"batches have more than {self.most} shapes, each a program, and cannot be padded"
            raise self._refusal(text, {n: f"{n} of {high[n]}" for n in own - {""}})
        if len(self.shapes) >= MOST - 1:
            wanted |= {n: max(wanted[n], *(s.get(n, 0) for s in self.shapes)) for n in wanted.keys() - own - {""}}
        return wanted

    def _stays(self, name: str) -> bool:
        return not name or (self.lengths is None and self._steady[name] is not None)

    def _rounded(self, length: int) -> int:
        """The length to pad this one to: the next power of two, up to what the model takes; or the next of those
        given."""
        if self.lengths is None:
            up = max(32, 1 << math.ceil(math.log2(max(1, length))))
            return up if self.longest is None else max(length, min(up, self.longest))
        if up := [n for n in sorted(self.lengths) if n >= length]:
            return up[0]
        fix = "give longer ones, or truncate the data"
        raise FzeroValueError("hf.Trainer", f"a batch of {length} is longer than lengths={self.lengths}", fix=fix)

    def _refusal(self, what: str, told: Mapping[str, str]) -> FzeroValueError:
        """The error about leaves that cannot be padded, each with what is said of it."""
        problems = []
        for why in dict.fromkeys(self.kept(n) for n in sorted(told)):
            problems.append(f"{', '.join(told[n] for n in sorted(told) if self.kept(n) == why)}: {why}")
        ways = [
            *(["Trainer(..., lengths=[128, 512]) pads to these, as a collator would"] if any(told) else []),
            "have the collator pad to one length or a few (padding='max_length', pad_to_multiple_of)",
            "TrainingArguments(dataloader_drop_last=True) where it is the last batch's rows",
            *([self.hint] if self.hint else []),
        ]
        return FzeroValueError("hf.Trainer", what, problems, "; ".join(ways))


def _rows(part: Mapping[str, torch.Tensor]) -> int:
    return max((x.shape[0] for x in part.values() if x.dim()), default=0)


def _volume(shape: Shape) -> int:
    return sum(shape[n] for n in shape if n) * shape[""] + shape[""]


def of(trainer: Any, what: str, losses: Losses, rows: int, most: int | None = MOST) -> Padding:
    """The padding of a Trainer's batches."""
    config = getattr(trainer.model, "config", None)
    config = getattr(config, "text_config", config)
    tokens = (getattr(x, "pad_token_id", None) for x in (config, trainer.processing_class))
    token = next((x for x in tokens if x is not None), None)
    longest = getattr(config, "max_position_embeddings", None)
    trainer._set_signature_columns_if_needed()
    has_mask, causal = "attention_mask" in trainer._signature_columns, trainer._loss_shifts_labels
    return Padding(
        labels=trainer.label_names,
        token=token,
        mask=has_mask and not causal,
        unknown=unknown(trainer),
        losses=losses,
        rows=rows,
        longest=longest if isinstance(longest, int) and longest > 0 else None,
        lengths=trainer.lengths,
        ranks=Exchange(trainer),
        what=what,
        most=most,
        hint="model.config.pad_token_id, if it is to find the end of a row" if config and token is None else "",
    )


def unknown(trainer: Any) -> str:
    """Why padding may change what a Trainer computes; "": it is known not to, by the model's class and the loss."""
    model = trainer.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(model).__name__
    if name not in KNOWN or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is not known to compute the same of rows that are padded"
    if trainer.compute_loss_func is not None or type(trainer).compute_loss is not transformers.Trainer.compute_loss:
        return "a loss of your own is not known to be the same of rows that are padded"
    rope = str([getattr(model.config, n, None) for n in ("rope_parameters", "rope_scaling")])
    if "longrope" in rope or "dynamic" in rope:
        return "the frequencies of its rotary positions depend on the length of a batch"
    if getattr(model.config, "output_router_logits", False):
        return "output_router_logits=True: the loss of the routers is of padded tokens too"
    return ""


def split(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a batch, a dict, that are tensors or None, and its other values: constants of the program that it
    is given to.

    Raises:
        FzeroTypeError: naming what is neither a tensor nor a constant; a batch that has no names.
    """
    if not isinstance(inputs, Mapping):
        parts = [tree.describe(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in _items(inputs)]
        what, fix = f"a batch is a {type(inputs).__name__}, not a dict", "have the collator return a dict by names"
        raise FzeroTypeError("hf.Trainer", what, parts, f"{fix}: forward's arguments")
    entries = {n: x for n, x in inputs.items() if x is None or isinstance(x, torch.Tensor)}
    rest = {n: x for n, x in inputs.items() if n not in entries}
    problems = [f"{n}: {type(x).__name__}" for n, x in rest.items() if not isinstance(x, (bool, int, float, str))]
    if problems:
        fix = "have the collator return tensors, or leave them out"
        raise FzeroTypeError("hf.Trainer", "a batch has more than tensors and constants", problems, fix)
    return entries, rest


def check_constants(known: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Raises if batches have other constants than the first one.

    Raises:
        FzeroTypeError: naming each, as it was and as it is.
    """
    said = lambda held, n: f"{n}={held[n]!r}" if n in held else f"no {n}"  # noqa: E731
    of = lambda held: {n: exact(x) for n, x in held.items()}  # noqa: E731
    problems = [
        f"{said(part, n)}, the first had {said(known, n)}"
        for part in parts
        for n in sorted({**known, **part})
        if of(known).get(n) != of(part).get(n)
    ]
    if problems:
        fix = "have the collator return what varies as a tensor, a number for each row"
        what = "a batch has other constants than the first of this training"
        raise FzeroTypeError("hf.Trainer", what, list(dict.fromkeys(problems)), fix)


def _items(inputs: Any) -> list[Any]:
    return list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]


def check_rows(trainer: Any, found: Padding) -> None:
    """Refuses, before the first step, a last micro-batch with fewer rows than those beside it in its step."""
    args, rows, parts = trainer.args, trainer._train_batch_size, trainer.accelerator.num_processes
    if parts > 1 or args.dataloader_drop_last or not hasattr(trainer.train_dataset, "__len__"):
        return
    num, parts_a_step = math.ceil(len(trainer.train_dataset) / rows), args.gradient_accumulation_steps
    last = len(trainer.train_dataset) % rows
    beside = last and (num - 1) % parts_a_step and not 0 < args.max_steps * parts_a_step < num
    if beside and (why := found.kept("")):
        what = f"the last micro-batch of an epoch has {last} rows, and those of its step {rows}"
        fix = "TrainingArguments(dataloader_drop_last=True), or another batch size"
        raise FzeroValueError("hf.Trainer", what, [f"none can be added: {why}"], fix)
