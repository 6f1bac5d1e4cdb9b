"""Follows transformers' conversions of stored weights: which rows of which stored tensors make up each parameter, and
back.

In memory, models use other names than in files, and other forms: experts are fused, projections are concatenated.
transformers describes this as operations on tensors. Here, these operations are run on row numbers: for each tensor, a
tensor of the same shape except for a last dimension of 2, in which both elements are the number of the row. If only
whole rows are moved, the result tells where each row came from. An operation that splits rows (a transposition) is
rejected with an error that names it. (The last dimension is not 1 because `SplitModulelist` of transformers 5.19 and
earlier removes all dimensions of size 1.)
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero.checkpoint.safetensors_format import ElementRun, Entry
from fzero.checkpoint.weight_loading import Sources, Weights
from fzero.errors import CheckpointError

Stored = dict[str, tuple[tuple[int, ...], Sequence[ElementRun]]]
"""The shapes of tensors, and the runs of others that make them up, by name."""


def sources(module: Any, weights: Weights) -> Sources:
    """Returns the runs of stored tensors that make up each tensor of a model's state dict, if they are stored.

    Stored tensors that transformers silently leaves out appear under their stored names.

    Raises:
        CheckpointError: a conversion splits rows, or fails. The message has the parameter, what it is made from, and
            how.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # pyright: ignore[reportMissingImports] - of the extra `hf`
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key  # pyright: ignore[reportMissingImports] - of the extra `hf`

    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    mapping = get_model_conversion_mapping(module)
    renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    out: dict[str, Sequence[ElementRun]] = {}
    used: dict[str, tuple[Any, list[str]]] = {}
    state = module.state_dict()
    for key in sorted(weights.entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, state)
        if name not in shapes and key in shapes:
            name, pattern = rename_source_key(key, [], [], module.base_model_prefix, state)
        if name in shapes and pattern is None:
            out[name] = weights.whole(key)
        elif name in shapes:
            converter, keys = used.setdefault(name, (copy.deepcopy(by_pattern[str(pattern)]), []))
            converter.add_tensor(name, key, str(pattern), key)
            keys.append(key)
        elif any(re.search(p, key) for p in module._keys_to_ignore_on_load_unexpected or ()):
            out[key] = weights.whole(key)
    problems: list[str] = []
    for name, (converter, keys) in used.items():
        numbered = _Rows({key: weights.entries[key][1] for key in keys})
        for pattern, held in converter.collected_tensors.items():
            converter.collected_tensors[pattern] = [numbered.tensors[key] for key in held]
        out |= _converted(lambda c=converter, n=name: c.convert(n, module, module.config), numbered, shapes, problems)
    if problems:
        fix = "write it in the form of the model: from_pretrained(dir).save_pretrained(out, save_original_format=False)"
        what = f"{weights.path} stores tensors in a form that cannot be read in ranges"
        raise CheckpointError("load", what, problems, fix)
    return (
        out
        | {n: out[first] for n, first in tied(module).items() if first in out and n not in out}
        | {first: out[n] for n, first in tied(module).items() if n in out and first not in out}
    )


def stored(
    module: Any, state: Mapping[str, torch.Tensor] | None = None, ties: Mapping[str, str] | None = None
) -> Stored:
    """Returns the tensors that transformers writes for a model: by stored name, the shape and the runs of parameters
    that make it up.

    Args:
        state: the tensors, on any device, by their names in the model's state dict; by default the state dict.
        ties: which of them are tied to which others, and therefore not written; by default as the model has it.

    Raises:
        CheckpointError: a conversion splits rows.
    """
    from transformers.core_model_loading import revert_weight_conversion  # pyright: ignore[reportMissingImports] - of the extra `hf`

    ignored = set(module._keys_to_ignore_on_save or ())
    tensors: Mapping[str, torch.Tensor] = module.state_dict() if state is None else state
    dropped = (tied(module) if ties is None else ties).keys() | ignored
    kept = {n: x for n, x in tensors.items() if n not in dropped}
    entries = {n: Entry(n, x.dtype, tuple(x.shape)) for n, x in kept.items()}
    numbered = _Rows(entries)
    reverted = revert_weight_conversion(module, dict(numbered.tensors))
    out, problems = {}, []
    for name, rows in reverted.items():
        found = numbered.runs(rows)
        if found is None:
            problems.append(f"{name}: is not made of complete rows of the model's tensors")
            continue
        runs, shape = found
        out[name] = shape, runs
    if problems:
        fix = "fz.checkpoint.save and fz.checkpoint.export, which write the names and forms in memory"
        what = f"{type(module).__name__} is stored in a form that cannot be written in ranges"
        raise CheckpointError("hf.save_pretrained", what, problems, fix)
    return out


def _converted(convert: Any, numbered: _Rows, shapes: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Runs a conversion on row numbers, and returns the runs that make up each resulting tensor. Adds to `problems`
    what fails."""
    made: dict[str, Any] = {}
    text = ", ".join(list(numbered.tensors)[:2]) + (", ..." if len(numbered.tensors) > 2 else "")
    try:
        results = convert()
    except Exception as error:
        problems.append(f"{text}: {type(error).__name__}: {error}")
        return made
    for name, rows in results.items():
        rows = rows[0] if isinstance(rows, list) else rows
        found = numbered.runs(rows)
        shape = shapes.get(name)
        if shape is None:
            problems.append(f"{text}: become {name}, which the model does not have")
        elif found is None or found[1] != shape:
            problems.append(f"{name} {list(shape)}: is made of {text} by an operation other than moving complete rows")
        else:
            made[name] = found[0]
    return made


def tied(module: Any) -> dict[str, str]:
    """Maps the names of tied tensors to the names of the tensors that they are tied to."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})


class _Rows:
    """Tensors whose elements are row numbers: each row of each tensor has its own number. A row of a tensor with fewer
    than two dimensions is one element."""

    def __init__(self, entries: Mapping[str, Entry]):
        self.tensors: dict[str, torch.Tensor] = {}
        self._begins: list[int] = []
        self._keys: list[str] = []
        self._widths: list[int | None] = []  # None: the row is one element, and its number occurs once
        at = 0
        for key, entry in entries.items():
            is_element = len(entry.shape) < 2
            shape = entry.shape if is_element else entry.shape[:-1]
            num = math.prod(shape)
            numbers = torch.arange(at, at + num).view(shape)
            self.tensors[key] = numbers if is_element else torch.stack([numbers, numbers], -1)
            self._begins.append(at)
            self._keys.append(key)
            self._widths.append(None if is_element else entry.shape[-1])
            at += num + 1  # a gap, so that no run continues from one tensor into the next

    def runs(self, rows: torch.Tensor) -> tuple[list[ElementRun], tuple[int, ...]] | None:
        """Returns the runs of elements that these rows stand for, and the shape of the tensor that they make up.

        Returns None if the elements are no row numbers, or their rows have several lengths.
        """
        if rows.dtype != torch.int64:
            return None
        if not rows.numel():
            return [], tuple(rows.shape)
        begins, shape, width = torch.tensor(self._begins), tuple(rows.shape), 1
        owners_of = lambda numbers: (torch.searchsorted(begins, numbers, right=True) - 1).tolist()  # noqa: E731
        (kind,) = {self._widths[i] for i in owners_of(rows.reshape(-1)[:1])}
        if kind is not None:
            if rows.shape[-1:] != (2,) or not torch.equal(rows[..., 0], rows[..., 1]):
                return None
            rows, shape, width = rows[..., 0], (*shape[:-1], kind), kind
        flat = rows.reshape(-1)
        breaks = (torch.nonzero(flat.diff() != 1).view(-1) + 1).tolist()
        starts = [0, *breaks]
        firsts = flat[torch.tensor(starts)]
        owners = owners_of(firsts)
        if any(self._widths[i] != kind for i in owners):
            return None
        out: list[ElementRun] = []
        for start, stop, first, i in zip(starts, [*breaks, flat.numel()], firsts.tolist(), owners, strict=True):
            out.append(ElementRun(start * width, stop * width, self._keys[i], (first - self._begins[i]) * width))
        return out, shape
