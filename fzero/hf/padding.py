"""Pads batches to a few shapes, of which each is one program: ragged lengths, and rows that a last batch lacks.

A batch is a dict of tensors, one row a sample. Lengths are those of dim 1 of token-like leaves, whose names say what
they are padded with; rows that are missing are copies of the last one whose labels are ignored. All ranks choose alike.

Whether padding changes what a model computes is tried (proof.py) the first time that a leaf is to be longer, or that
rows are to be added. Where it does, batches are taken as they come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.hf.exchange import Exchange
from fzero.hf.proof import Tensors, telling
from fzero.hf.traced import Losses
from fzero.trace.reads.value_keys import exact

logger = logging.getLogger("fzero")

MOST = 4
"""Shapes that ragged batches are padded to, unless longer ones come."""

Shape = dict[str, int]
"""The lengths of leaves by their names, and under "" the rows of a micro-batch."""
Prove = Callable[[Tensors, Tensors], str | None]
"""Says what differs between rows as they are and padded. None: nothing does; "": these rows do not tell."""


@dataclass
class Padding:
    """The shapes that there are, and how batches get one.

    Args:
        labels: names of the leaves that are labels.
        token: what pads token ids; None: there is none, and 0 does.
        mask: whether a batch without an attention mask gets one.
        masked: whether the model is said to leave out tokens behind a row's own: by a mask, or as a causal one.
        losses: what is known of the loss.
        rows: of a full micro-batch.
        longest: that the model takes; None: any.
        lengths: those to pad to; None: found as batches come.
        ranks: what the ranks tell each other.
        what: whose batches they are.
        most: lengths that there may be of what cannot be padded; None: any number.
        hint: what else may help who cannot pad.

    Attributes:
        proven: what was tried and changes nothing: names of leaves that are longer, and "" for more rows.
        refuted: what cannot be padded, and why.
    """

    labels: Sequence[str]
    token: int | None
    mask: bool
    masked: bool
    losses: Losses
    rows: int
    longest: int | None
    lengths: Sequence[int] | None
    ranks: Exchange
    what: str
    most: int | None = MOST
    hint: str = ""
    shapes: list[Shape] = field(default_factory=list)
    proven: set[str] = field(default_factory=set)
    refuted: dict[str, str] = field(default_factory=dict)
    _fixed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _steady: dict[str, int | None] = field(default_factory=dict)  # lengths that have not changed yet

    def __post_init__(self) -> None:
        if not self.losses.ignores:
            self.refuted[""] = "the loss is not one that leaves out rows by their labels"

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

    def __call__(self, parts: Sequence[Mapping[str, torch.Tensor]], prove: Prove) -> tuple[list[Tensors], Shape]:
        """The micro-batches of a step in one shape.

        Raises:
            FzeroValueError: naming leaves that have no rows, or change a shape that is not padded; those that cannot be
                padded and have several lengths in a step, or more than `most` in all.
        """
        parts = [self._with_mask(part) for part in parts]
        self._check(parts)
        names = sorted(n for n, x in parts[0].items() if self.fill(n, x) is not None)
        sizes = [{**{n: part[n].shape[1] for n in names}, "": _rows(part)} for part in parts]
        high, low = self.ranks.bounds({n: [s[n] for s in sizes] for n in sizes[0]})
        for n in names:
            known = self._steady.setdefault(n, high[n])
            self._steady[n] = known if known == high[n] == low[n] else None
        tried: set[str] = set()
        while True:
            shape = self._choose(high, low)
            if not (more := [n for n in shape if low[n] < shape[n] and n not in self.proven | tried]):
                break
            self._try(more[0], parts, shape, prove)
            tried.add(more[0])
        if shape not in self.shapes:
            self.shapes.append(shape)
            lengths = ", ".join(f"{n} {x}" for n, x in shape.items() if n)
            text = "fzero: program %d of %s: %d rows%s"
            logger.info(text, len(self.shapes), self.what, shape[""], f", padded to {lengths}" if lengths else "")
        return [self._padded(part, shape) for part in parts], shape

    def fills(self, parts: Sequence[Mapping[str, torch.Tensor]], prove: Prove) -> bool:
        """Whether rows can be added, tried with these if it is not known."""
        if "" not in self.proven | self.refuted.keys():
            self._try("", [self._with_mask(part) for part in parts], {}, prove)
        return "" not in self.refuted

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
            raise FzeroValueError(message("hf.Trainer", what, list(dict.fromkeys(problems)), fix))

    # --- what can be padded ---

    def _try(self, name: str, parts: Sequence[Tensors], shape: Shape, prove: Prove) -> None:
        """Tries to make a leaf longer, and what else is shorter than a shape where it is shortest; or to add a row."""
        if why := self._said(name):
            self.refuted[name] = why
            return
        size = lambda part: part[name].shape[1] if name else -_rows(part)  # noqa: E731
        part = min(parts, key=size)
        fills = {n: fill for n, x in part.items() if (fill := self.fill(n, x)) is not None}
        labels = {n: self.losses.ignored for n in self.labels if n in part}
        rows = self.ranks.least(size(part), telling(part, fills, labels, trim=bool(name)))
        num = _rows(rows)
        now = {n: rows[n].shape[1] for n in fills}
        names = [n for n in now if now[n] < shape[n]] if name else [""]
        padded = self._padded(rows, {**shape, "": num} if name else {"": num + 1})
        longer = ", ".join(f"{n} from {now[n]} to {shape[n]}" for n in names if n)
        how = longer or f"by a copy of one{f', {joined} ignored' if (joined := ', '.join(labels)) else ''}"
        said = f"{num} row{'s' if num > 1 else ''} padded ({how})"
        found = {x for x in self.ranks.all(prove(rows, padded)) if x is not None}
        if not found:
            self.proven.update(names)
            logger.info("fzero: %s: %s: nothing else than as they are", self.what, said)
        elif why := max(found):
            self.refuted.update(dict.fromkeys(names, f"{said}: {why}"))
            logger.warning("fzero: %s takes batches as they come: %s", self.what, self.refuted[name])

    def _said(self, name: str) -> str:
        """The reason why a leaf is not even tried."""
        if name in self.labels and not self.losses.ignores:
            return f"the loss is not known to leave out labels of {self.losses.ignored}"
        return "" if self.masked or not name or name in self.labels else "the model has no attention_mask"

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
        own = {n for n in high if n in self.refuted}
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
        raise FzeroValueError(
            message("hf.Trainer", f"a batch of {length} is longer than lengths={self.lengths}", fix=fix)
        )

    def _refusal(self, what: str, told: Mapping[str, str]) -> FzeroValueError:
        """The error about leaves that cannot be padded, each with what is said of it."""
        problems = []
        for why in dict.fromkeys(self.refuted[n] for n in sorted(told)):
            problems.append(f"{', '.join(told[n] for n in sorted(told) if self.refuted[n] == why)}: {why}")
        ways = [
            "have the collator pad to one length or a few (padding='max_length', pad_to_multiple_of)",
            "TrainingArguments(dataloader_drop_last=True) where it is the last batch's rows",
            *([self.hint] if self.hint else []),
        ]
        return FzeroValueError(message("hf.Trainer", what, problems, "; ".join(ways)))


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
        masked=has_mask or causal,
        losses=losses,
        rows=rows,
        longest=longest if isinstance(longest, int) and longest > 0 else None,
        lengths=trainer.lengths,
        ranks=Exchange(trainer),
        what=what,
        most=most,
        hint="model.config.pad_token_id, if it is to find the end of a row" if config and token is None else "",
    )


def split(inputs: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a batch, a dict, and its other values: constants of the program that it is given to.

    Raises:
        FzeroTypeError: naming what is neither a tensor nor a constant; a batch that has no names.
    """
    if not isinstance(inputs, Mapping):
        parts = [tree.describe(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in _items(inputs)]
        what, fix = f"a batch is a {type(inputs).__name__}, not a dict", "have the collator return a dict by names"
        raise FzeroTypeError(message("hf.Trainer", what, parts, f"{fix}: forward's arguments"))
    tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    rest = {n: x for n, x in inputs.items() if n not in tensors}
    problems = [
        f"{n}: {type(x).__name__}" for n, x in rest.items() if not isinstance(x, (bool, int, float, str, type(None)))
    ]
    if problems:
        fix = "have the collator return tensors, or leave them out"
        raise FzeroTypeError(message("hf.Trainer", "a batch has more than tensors and constants", problems, fix))
    return tensors, rest


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
        raise FzeroTypeError(message("hf.Trainer", what, list(dict.fromkeys(problems)), fix))


def _items(inputs: Any) -> list[Any]:
    return list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]


def check_rows(trainer: Any, found: Padding, parts: Sequence[Mapping[str, torch.Tensor]], prove: Prove) -> None:
    """Refuses, before the first step, a last micro-batch with fewer rows than those beside it in its step."""
    args, rows = trainer.args, trainer._train_batch_size
    if args.world_size > 1 or args.dataloader_drop_last or not hasattr(trainer.train_dataset, "__len__"):
        return
    num, parts_a_step = math.ceil(len(trainer.train_dataset) / rows), args.gradient_accumulation_steps
    last = len(trainer.train_dataset) % rows
    beside = last and (num - 1) % parts_a_step and not 0 < args.max_steps * parts_a_step < num
    if beside and not found.fills(parts, prove):
        what = f"the last micro-batch of an epoch has {last} rows, and those of its step {rows}"
        fix = "TrainingArguments(dataloader_drop_last=True), or another batch size"
        raise FzeroValueError(message("hf.Trainer", what, [f"none can be added: {found.refuted['']}"], fix))
