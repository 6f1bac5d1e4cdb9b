"""Pads batches to a few shapes, each of which is compiled once: ragged lengths, and samples missing in a last batch.

A batch is a dict of tensors with the batch dimension first. If it has an attention mask, its token-like entries are
padded along dim 1 with the collator's values. Missing samples are copies of the last sample whose labels are ignored.
All ranks choose the same shape.

Whether padding changes what a model computes is not known in advance: convolutions, means over all positions or
batch statistics may read the padding. Therefore the first batch that is padded is evaluated both ways, in
`evaluation_step.py`. If the results differ, padding along the length is an error, and missing samples are not added.
Batches that cannot be padded keep their shapes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

from fzero import tree
from fzero.comm.control_group import world
from fzero.errors import FzeroValueError
from fzero.hf.data_parallel_ranks import Exchange
from fzero.hf.traced_loss import Losses
from fzero.modules.functionalize import Functional

logger = logging.getLogger("fzero")

MOST = 4
"""The number of shapes that ragged batches are padded to, unless longer batches come."""

_PADDING = 2**30
"""The number of the document that is the padding of a packed row, in `seq_idx` of collators that pack documents."""

Shape = dict[str, int]
"""The lengths of entries by their names, and under "" the number of samples of a micro-batch."""
Tensors = dict[str, torch.Tensor]
Compare = Callable[[Tensors, Tensors], tuple[bool, str]]
"""Calls `Evaluation.compared` with a batch and the same batch padded."""


@dataclass
class Padding:
    """The shapes used so far, and the rules by which a batch gets one.

    Args:
        labels: the names of the entries that are labels.
        fills: padding values, by the ends of the entries' names.
        unknown: why lengths cannot be padded; "" if they can, provided that it is found to change nothing.
        own_loss: whether the loss is the user's own. It may read the outputs of all samples, with a weight so small
            that the comparison does not show it, so no samples are added.
        losses: what is known about the loss.
        rows: the number of samples of a full micro-batch.
        longest: the greatest length that the model takes, or None for any.
        lengths: the lengths to pad to, even if that changes the results; None to choose them as batches come.
        what: "training" or "evaluation", for the log.
        strict: whether it is an error if padding along the length changes the loss, or if entries that cannot be
            padded have more than `MOST` lengths. Otherwise such batches keep their shapes.
    """

    labels: Sequence[str]
    fills: Mapping[str, int]
    unknown: str
    own_loss: bool
    losses: Losses
    rows: int
    longest: int | None
    lengths: Sequence[int] | None
    ranks: Exchange
    what: str
    strict: bool = True
    shapes: list[Shape] = field(default_factory=list)
    _fixed: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    _labelled: bool = False  # whether each token has a label
    _masked: bool = False  # whether there is an attention mask
    _steady: dict[str, int | None] = field(default_factory=dict)  # lengths that have not changed yet
    _found: dict[str, str] = field(default_factory=dict)  # by "lengths" or "rows": how padding changes the results

    def kept(self, name: str) -> str:
        """Returns why an entry keeps its length or, for the name "", why a batch keeps its number of samples; "" if it
        is padded."""
        if name and self.lengths is not None:
            return ""
        if not self.losses.ignores and (not name or self._labelled):
            return f"the loss is not known to ignore labels of {self.losses.ignored}"
        if not name:
            return "a custom loss may read all samples" if self.own_loss else self._found.get("rows", "")
        if not self._masked:
            return "the batch has no attention_mask"
        return self.unknown or self._found.get("lengths", "")

    def fill(self, name: str, x: torch.Tensor, length: int | None = None) -> int | None:
        """Returns the number that pads an entry along dim 1, or None if the entry is not padded.

        Features (`input_values`) are padded only if the attention mask has their `length`.
        """
        last = name.rpartition(".")[2]
        if last in ("input_values", "input_features"):
            return 0 if x.is_floating_point() and x.dim() > 1 and x.shape[1] == length else None
        if x.dim() != 2 or x.is_floating_point():
            return None
        if name in self.labels:
            return self.losses.ignored
        return next((fill for end, fill in self.fills.items() if last.endswith(end)), None)

    def __call__(self, parts: Sequence[Tensors], compare: Compare) -> tuple[list[Tensors], Shape]:
        """Pads the micro-batches of a step to one shape.

        Raises:
            FzeroValueError: padding changes the loss; entries without a batch dimension, or whose other dimensions
                change; ragged entries that are not padded and have several lengths in a step, or too many in all.
        """
        self._check(parts)
        names = self._names(parts[0])
        sizes = [{**{n: part[n].shape[1] for n in names}, "": _rows(part)} for part in parts]
        high, low = self.ranks.bounds({n: [s[n] for s in sizes] for n in sizes[0]})
        for n in names:
            known = self._steady.setdefault(n, high[n])
            # None equals no length, so a length that has changed once never counts as steady again.
            self._steady[n] = known if known == high[n] == low[n] else None
        self._labelled = any(n in self.labels for n in names)
        self._masked = any(n.endswith("attention_mask") for n in names)
        shape = self._choose(high, low)
        ragged = [n for n in names if low[n] < shape[n]]
        if self.lengths is None and ragged and (found := self._difference(parts, ragged, shape, compare)):
            if self.strict:
                what = "padding ragged batches to a few lengths changes what this model computes"
                raise FzeroValueError("hf.Trainer", what, [found], "; ".join(_WAYS))
            shape = self._choose(high, low)
        if low[""] < shape[""] and self._difference(parts, [""], shape, compare):
            shape = self._choose(high, low)
        if shape not in self.shapes:
            self.shapes.append(shape)
            lengths = ", ".join(f"{n} {x}" for n, x in shape.items() if n)
            text = "fzero: program %d of %s: %d rows%s"
            logger.info(text, len(self.shapes), self.what, shape[""], f", padded to {lengths}" if lengths else "")
        return [self._padded(part, shape) for part in parts], shape

    def _names(self, part: Tensors) -> list[str]:
        """Returns the names of the entries that have a length."""
        mask = next((x for n, x in part.items() if n.endswith("attention_mask") and x.dim() == 2), None)
        length = None if mask is None else mask.shape[1]
        return sorted(n for n, x in part.items() if self.fill(n, x, length) is not None)

    def _check(self, parts: Sequence[Tensors]) -> None:
        """Raises an error if an entry has no batch dimension, or if its shape changes in a dimension that is not
        padded."""
        problems = []
        for part in parts:
            rows, names = _rows(part), self._names(part)
            for name, x in part.items():
                row = ("any length", *x.shape[2:]) if name in names else tuple(x.shape[1:])
                if not x.dim() or x.shape[0] != rows:
                    problems.append(f"{name}: {tree.describe(x)} does not have the batch size, {rows}")
                elif row != self._fixed.setdefault(name, row):
                    before = ", ".join(map(str, self._fixed[name]))
                    problems.append(f"{name}: {tree.describe(x)}, before it was [{before}] per sample")
        if problems:
            fix = "have the collator pad them to one shape, or leave them out; token ids, masks and labels are padded"
            what = "these entries of a batch cannot be padded"
            raise FzeroValueError("hf.Trainer", what, list(dict.fromkeys(problems)), fix)

    def _padded(self, part: Tensors, shape: Shape) -> Tensors:
        """Pads one micro-batch to a shape."""
        padded = {}
        for name, x in part.items():
            if name in shape and x.shape[1] < shape[name]:
                fill = self.fill(name, x, x.shape[1])
                assert fill is not None
                x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, shape[name] - x.shape[1]), value=fill)
            if (missing := shape[""] - x.shape[0]) > 0:
                rest = x[-1:].expand(missing, *x.shape[1:])
                x = torch.cat([x, torch.full_like(rest, self.losses.ignored) if name in self.labels else rest])
            padded[name] = x
        return padded

    # --- whether padding changes results ---

    def _difference(self, parts: Sequence[Tensors], names: Sequence[str], shape: Shape, compare: Compare) -> str:
        """Returns how padding these entries ("" for samples) changes the results of the first padded batch, or "" if it
        does not.

        Every rank calls it, whether its own batch is padded or not. All ranks evaluate the same batch, the shortest
        one, so that they run the same programs.
        """
        what = "lengths" if any(names) else "rows"
        if what in self._found:
            return self._found[what]
        length = lambda part: sum(part[n].shape[1] if n else _rows(part) for n in names)  # noqa: E731
        batch = min(parts, key=length)
        if not self.ranks.alone:
            device = next(iter(batch.values())).device
            batch = {
                n: x.to(device) for n, x in min(world().all_gather_tensors(batch, "hf.Trainer"), key=length).items()
            }
        padded = {n: x.shape[1] for n, x in batch.items() if n in shape} | {"": _rows(batch)}
        for n in names:  # to twice its length, or the model's longest, so that a small effect of padding shows
            twice = 2 * padded[n]
            padded[n] = max(shape[n], twice if not n or self.longest is None else min(twice, self.longest))
        finite, found = compare(batch, self._padded(batch, padded))
        high, low = self.ranks.bounds({"differs": [int(bool(found))], "finite": [int(finite)]})
        if not low["finite"]:  # for example if all labels are ignored: the next batch that is padded decides
            return ""
        self._found[what] = (found or "it differs on another rank") if high["differs"] else ""
        return self._found[what]

    def check_rows(self, trainer: Any, batch: Tensors, compare: Compare) -> None:
        """Raises an error before the first step if the last micro-batch of an epoch will have fewer samples than the
        others of its step, and no samples can be added."""
        args, rows, parts = trainer.args, self.rows, trainer.accelerator.num_processes
        if parts > 1 or args.dataloader_drop_last or not hasattr(trainer.train_dataset, "__len__"):
            return
        num, parts_a_step = math.ceil(len(trainer.train_dataset) / rows), args.gradient_accumulation_steps
        last = len(trainer.train_dataset) % rows
        beside = last and (num - 1) % parts_a_step and not 0 < args.max_steps * parts_a_step < num
        if beside and (why := self.kept("") or self._difference([batch], [""], {"": _rows(batch)}, compare)):
            what = f"the last micro-batch of an epoch has {last} rows, and those of its step {rows}"
            fix = "TrainingArguments(dataloader_drop_last=True), or another batch size"
            raise FzeroValueError("hf.Trainer", what, [f"no samples can be added: {why}"], fix)

    # --- shapes ---

    def _choose(self, high: Shape, low: Shape) -> Shape:
        """Returns the shape for batches of these lengths: an existing one that is not much larger, or else a new
        one."""
        own = {n for n in high if self.kept(n)}
        if unlike := [n for n in own if low[n] < high[n]]:
            text = "micro-batches of one step have several shapes, and cannot be padded"
            raise self._refusal(text, {n: f"{n or 'rows'} from {low[n]} to {high[n]}" for n in unlike})
        steady = {n for n in high if not n or (self.lengths is None and self._steady[n] is not None)}
        wanted = {n: x if n in own | steady else self._rounded(x) for n, x in high.items()}
        if "" not in own:
            wanted[""] = max(high[""], self.rows)
        fits = (s for s in self.shapes if s.keys() == wanted.keys() and all(s[n] == wanted[n] for n in own))
        fits = sorted((s for s in fits if all(s[n] >= x for n, x in high.items())), key=_volume)
        if fits and (_volume(fits[0]) <= _volume(wanted) or len(self.shapes) >= MOST - 1):
            return fits[0]
        if self.strict and len(self.shapes) >= MOST and own - {""}:
            text = f"batches have more than {MOST} shapes, each a program, and cannot be padded"
            raise self._refusal(text, {n: f"{n} of {high[n]}" for n in own - {""}})
        # The last shape takes the greatest length of each entry so far, so that it fits all batches but longer ones.
        if len(self.shapes) >= MOST - 1:
            wanted |= {n: max(wanted[n], *(s.get(n, 0) for s in self.shapes)) for n in wanted.keys() - own - {""}}
        return wanted

    def _rounded(self, length: int) -> int:
        """Returns the length that a batch of this length is padded to.

        It is the next power of two, limited by what the model takes, or the next of the given lengths.
        """
        if self.lengths is None:
            up = max(32, 1 << math.ceil(math.log2(max(1, length))))
            return up if self.longest is None else max(length, min(up, self.longest))
        if up := [n for n in sorted(self.lengths) if n >= length]:
            return up[0]
        fix = "give longer ones, or truncate the data"
        raise FzeroValueError("hf.Trainer", f"a batch of {length} is longer than lengths={self.lengths}", fix=fix)

    def _refusal(self, what: str, told: Mapping[str, str]) -> FzeroValueError:
        """Returns the error about entries that cannot be padded. `told` describes each of them."""
        problems = []
        for why in dict.fromkeys(self.kept(n) for n in sorted(told)):
            problems.append(f"{', '.join(told[n] for n in sorted(told) if self.kept(n) == why)}: {why}")
        ways = [
            *(_WAYS if any(told) else []),
            *(["TrainingArguments(dataloader_drop_last=True) leaves out the last batch"] if "" in told else []),
        ]
        return FzeroValueError("hf.Trainer", what, problems, "; ".join(ways))


_WAYS = (
    "Trainer(..., lengths=[128, 512]) pads to these lengths nevertheless, as a collator would",
    "or have the collator pad: padding='max_length', or pad_to_multiple_of=N for a few lengths",
)


def _rows(part: Mapping[str, torch.Tensor]) -> int:
    return max((x.shape[0] for x in part.values() if x.dim()), default=0)


def _volume(shape: Shape) -> int:
    return sum(shape[n] for n in shape if n) * shape[""] + shape[""]


def of(trainer: Any, model: Functional, what: str, losses: Losses, rows: int, strict: bool = True) -> Padding:
    """Returns the padding for a Trainer's batches."""
    config = getattr(trainer.model, "config", None)
    config = getattr(config, "text_config", config)
    longest = getattr(config, "max_position_embeddings", None)
    tokenizer = getattr(trainer.data_collator, "tokenizer", None) or trainer.processing_class
    token = getattr(tokenizer, "pad_token_id", None)
    token = getattr(config, "pad_token_id", None) if token is None else token
    kind = getattr(tokenizer, "pad_token_type_id", None)
    # Padding beyond a certain length changes these frequencies, which the comparison of one batch may not show.
    rope = str([getattr(config, n, None) for n in ("rope_parameters", "rope_scaling")])
    unknown = "the frequencies of its rotary positions depend on the length of a batch"
    unknown = unknown if "longrope" in rope or "dynamic" in rope else ""
    if model.mutable is not None:
        unknown = "the model's forward overwrites buffers, which may be statistics of the batch"
    return Padding(
        labels=trainer.label_names,
        fills={"input_ids": token or 0, "token_type_ids": kind or 0, "_ids": 0, "_mask": 0, "seq_idx": _PADDING},
        unknown=unknown,
        own_loss=trainer.compute_loss_func is not None
        or type(trainer).compute_loss is not transformers.Trainer.compute_loss,
        losses=losses,
        rows=rows,
        longest=longest if isinstance(longest, int) and longest > 0 else None,
        lengths=trainer.lengths,
        ranks=Exchange(trainer),
        what=what,
        strict=strict,
    )
