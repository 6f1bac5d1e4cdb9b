"""Distinguishes batches with different entries, so that each micro-batch of a step is computed with its own entries.

A program is traced for a fixed set of entries, but a collator may return some entries only now and then: images in
every second batch, or a mask only when there is something to mask. Batches with the same entries are of one kind. If
the micro-batches of a step are of several kinds, the step is one program that calls the loss once per kind and
micro-batch. For each kind other than its own, a micro-batch is replaced by a copy of some batch of that kind, with
weight 0. All ranks run the same program, so they first agree on the kinds in the step, even if a rank has no batch of
some kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.comm.control_group import world
from fzero.errors import FzeroTypeError
from fzero.hf.data_parallel_ranks import Exchange
from fzero.trace.guards.value_keys import exact

Entries = Mapping[str, Any]
"""A batch: its entries by name, each a tensor or None."""
Kind = tuple[tuple[str, str], ...]
"""The names of a batch's entries, sorted, each with the dtype of its tensor, or with "None"."""


def kind_of(batch: Entries) -> Kind:
    """Returns the kind of a batch."""
    named = {n: tree.dtype_name(x.dtype) if isinstance(x, torch.Tensor) else "None" for n, x in batch.items()}
    return tuple(sorted(named.items()))


def tensors_of(batch: Entries) -> dict[str, torch.Tensor]:
    """Returns the entries of a batch that are tensors."""
    return {n: x for n, x in batch.items() if isinstance(x, torch.Tensor)}


class Kinds:
    """The kinds of batches seen so far, the same on all ranks.

    Args:
        ranks: the exchange between the ranks.
    """

    def __init__(self, ranks: Exchange):
        self._ranks = ranks
        self._known: dict[Kind, Entries] = {}  # with a batch of each in host memory, if there are several ranks

    def of_step(self, batches: Sequence[Entries]) -> list[Kind]:
        """Returns the kinds of the batches of all ranks. Every rank calls it."""
        here = {kind_of(batch): batch for batch in batches}
        if self._ranks.alone:
            return sorted(here)
        # Numbers by position in `_known`, which all ranks fill in the same order.
        numbers = {str(i): [int(kind in here)] for i, kind in enumerate(self._known)}
        found, _ = self._ranks.bounds({**numbers, "new": [int(any(kind not in self._known for kind in here))]})
        kinds = [kind for i, kind in enumerate(self._known) if found[str(i)]]
        return sorted(kinds + self._learned(here) if found["new"] else kinds)

    def stand_in(self, kind: Kind, batches: Sequence[Entries], device: Any) -> Entries:
        """Returns a batch of this kind: the first such batch of these, or one from another step or rank."""
        own = [batch for batch in batches if kind_of(batch) == kind]
        if own:
            return own[0]
        return {n: x if x is None else x.to(device) for n, x in self._known[kind].items()}

    def _learned(self, here: Mapping[Kind, Entries]) -> list[Kind]:
        """Returns the kinds that were not known before. If some rank has no batch of a new kind, all ranks are sent
        one."""
        held = world().all_gather([kind for kind in here if kind not in self._known], list[Kind], "hf.Trainer")
        new = sorted({kind for some in held for kind in some})
        for kind in new:
            having = [rank for rank, some in enumerate(held) if kind in some]
            tensors = {n: x.detach().cpu() for n, x in tensors_of(here.get(kind, {})).items()}
            if len(having) < len(held):
                tensors = world().all_gather_tensors(tensors, "hf.Trainer")[having[0]]
            self._known[kind] = {name: tensors.get(name) for name, _ in kind}
        return new


def differences(kinds: Sequence[Kind], batches: Sequence[Entries]) -> list[str]:
    """Describes how the kinds in a step differ, with one line for each entry that only some have, or have with another
    dtype.

    Args:
        kinds: the kinds in the step, on all ranks.
        batches: this rank's micro-batches of the step.
    """
    own = [dict(kind_of(batch)) for batch in batches]
    lines = []
    for name in sorted({name for kind in kinds for name, _ in kind}):
        forms = sorted({dict(kind).get(name, "") for kind in kinds})
        if len(forms) == 1:
            continue
        said = []
        for form in forms:
            where = [str(i) for i, entries in enumerate(own) if entries.get(name, "") == form]
            at = f"micro-batch {', '.join(where)}" if where else "batches of other ranks"
            said.append(f"{form} in {at}" if form else f"missing in {at}")
        lines.append(f"{name}: {'; '.join(said)}")
    return lines


_OF_KERNELS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})


def split(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a batch, a dict, into the entries that are tensors or None, and the other values, which are constants of
    the program. Leaves out the arguments of variable-length kernels, if positions say the same: collators that pack
    documents (transformers, TRL) add both.

    Raises:
        FzeroTypeError: an entry is neither a tensor nor a constant, or the batch is not a dict.
    """
    if not isinstance(inputs, Mapping):
        found = inputs if isinstance(inputs, (tuple, list)) else [inputs]
        parts = [tree.describe(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in found]
        what, fix = f"a batch is a {type(inputs).__name__}, not a dict", "have the collator return a dict by names"
        raise FzeroTypeError("hf.Trainer", what, parts, f"{fix}: forward's arguments")
    if isinstance(inputs.get("position_ids"), torch.Tensor):
        inputs = {n: x for n, x in inputs.items() if n not in _OF_KERNELS}
    entries = {n: x for n, x in inputs.items() if x is None or isinstance(x, torch.Tensor)}
    rest = {n: x for n, x in inputs.items() if n not in entries}
    problems = [f"{n}: {type(x).__name__}" for n, x in rest.items() if not isinstance(x, (bool, int, float, str))]
    if problems:
        fix = "have the collator return tensors, or leave them out"
        raise FzeroTypeError("hf.Trainer", "a batch has entries that are neither tensors nor constants", problems, fix)
    return entries, rest


def check_constants(known: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Raises an error if batches have other constants than the first one.

    Raises:
        FzeroTypeError: it names each constant that differs, with its first and its present value.
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
        fix = "have the collator return values that vary as a tensor with one number per sample"
        what = "a batch has different constants than the first batch of this training"
        raise FzeroTypeError("hf.Trainer", what, list(dict.fromkeys(problems)), fix)
