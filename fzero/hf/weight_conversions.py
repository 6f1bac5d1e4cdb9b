"""Follows the library's conversions of stored weights: which rows of which stored tensors make up each leaf, and back.

In memory models have other names than in files, and other forms: experts fused, projections beside each other. The
library says so as operations on tensors. They are run here on numbers of rows: of each tensor its shape with a last dim
of 1, each element the number of that row. Where rows come out whole, the result says where each came from; an operation
that takes rows apart (a transposition) is refused by name.
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


def sources(module: Any, weights: Weights) -> Sources:
    """The runs of stored tensors that make up each tensor of a model's state dict, as far as they are stored. What the
    library leaves out without a word is there under its stored name.

    Raises:
        CheckpointError: conversions that take rows apart, or that fail; with the leaf, what it is made of and how.
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
        what = f"{weights.path} stores leaves in a form that is not read in ranges"
        raise CheckpointError("load", what, problems, fix)
    return (
        out
        | {n: out[first] for n, first in _tied(module).items() if first in out and n not in out}
        | {first: out[n] for n, first in _tied(module).items() if n in out and first not in out}
    )


def stored(module: Any) -> dict[str, tuple[tuple[int, ...], Sequence[ElementRun]]]:
    """The tensors that the library writes of a model: by their stored names the shape, and the runs of leaves that
    make them up.

    Raises:
        CheckpointError: conversions that take rows apart.
    """
    from transformers.core_model_loading import revert_weight_conversion  # pyright: ignore[reportMissingImports] - of the extra `hf`

    ignored = set(module._keys_to_ignore_on_save or ())
    state = {n: x for n, x in module.state_dict().items() if n not in _tied(module) and n not in ignored}
    entries = {n: Entry(n, x.dtype, tuple(x.shape)) for n, x in state.items()}
    numbered = _Rows(entries)
    reverted = revert_weight_conversion(module, dict(numbered.tensors))
    out, problems = {}, []
    for name, rows in reverted.items():
        found = numbered.runs(rows)
        if found is None:
            problems.append(f"{name}: is made of other than whole rows of the model's tensors")
            continue
        runs, width = found
        scalar = not rows.dim() or (rows.dim() == 1 and width == 1)
        out[name] = (tuple(rows.shape) if scalar else (*rows.shape[:-1], width), runs)
    if problems:
        fix = "fz.checkpoint.save and fz.checkpoint.export, which write the names and forms in memory"
        what = f"{type(module).__name__} is stored in a form that is not written in ranges"
        raise CheckpointError("hf.save_pretrained", what, problems, fix)
    return out


def _converted(convert: Any, numbered: _Rows, shapes: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
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
            problems.append(f"{text}: become {name}, which the model has not")
        elif found is None or (tuple(rows.shape) if len(shape) < 2 else (*rows.shape[:-1], found[1])) != shape:
            problems.append(f"{name} {list(shape)}: is made of {text} otherwise than by moving whole rows")
        else:
            made[name] = found[0]
    return made


def _tied(module: Any) -> dict[str, str]:
    """The names that are another's tensor, and that one's."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})


class _Rows:
    """Tensors whose elements are the numbers of rows: each row of each tensor has its own."""

    def __init__(self, entries: Mapping[str, Entry]):
        self.tensors: dict[str, torch.Tensor] = {}
        self._begins: list[int] = []
        self._keys: list[str] = []
        self._widths: list[int] = []
        at = 0
        for key, entry in entries.items():
            shape = (*entry.shape[:-1], 1) if len(entry.shape) > 1 else entry.shape
            num = math.prod(shape)
            self.tensors[key] = torch.arange(at, at + num).view(shape)
            self._begins.append(at)
            self._keys.append(key)
            self._widths.append(entry.shape[-1] if len(entry.shape) > 1 else 1)
            at += num + 1  # the last row of one is not followed by the first of the next

    def runs(self, rows: torch.Tensor) -> tuple[list[ElementRun], int] | None:
        """The runs of elements that these rows are, and the length of a row; None if they are none, or of several
        lengths."""
        flat = rows.reshape(-1)
        if flat.dtype != torch.int64:
            return None
        if not flat.numel():
            return [], 1
        breaks = (torch.nonzero(flat.diff() != 1).view(-1) + 1).tolist()
        begins = torch.tensor(self._begins)
        starts = [0, *breaks]
        firsts = flat[torch.tensor(starts)]
        owners = (torch.searchsorted(begins, firsts, right=True) - 1).tolist()
        widths = {self._widths[i] for i in owners}
        if len(widths) != 1 or (rows.dim() > 1 and rows.shape[-1] != 1):
            return None
        (width,), out = widths, []
        for start, stop, first, i in zip(starts, [*breaks, flat.numel()], firsts.tolist(), owners, strict=True):
            out.append(ElementRun(start * width, stop * width, self._keys[i], (first - self._begins[i]) * width))
        return out, width
