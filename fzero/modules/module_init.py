"""Initializes a module's tensors from a key, with the module's own methods: transformers' `initialize_weights`, or
else `reset_parameters` of each submodule.

So a module that was made on the meta device gets its initial values shard by shard, the same on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.modules.meta_module import holding, slots_of
from fzero.modules.rng_mode import Draws

MOST = 1 << 20
"""Largest number of elements of a tensor that becomes a literal of a program."""


def initialized(meta_module: nn.Module, own: Mapping[str, torch.Tensor], key: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the initial values of a meta module's tensors by name. Small tensors that nothing initializes, such as
    buffers, keep their value in `own`.

    Raises:
        TraceError: listing tensors that nothing initializes and that have no value, or too large a value.
    """
    slots = slots_of(meta_module)
    for m in meta_module.modules():
        vars(m).pop("_is_hf_initialized", None)  # the mark that transformers puts on modules that it has initialized
    given = {s.name: torch.empty(s.get().shape, dtype=s.get().dtype, device=key.device) for s in slots}
    with holding(slots, given), torch.no_grad(), Draws(key, None), compat.truncated_normal(_truncated_normal):
        if hasattr(meta_module, "initialize_weights"):
            meta_module.initialize_weights()  # type: ignore[operator]
        else:
            _reset(meta_module)
        made = {s.name: s.get() for s in slots}
    # Neither replaced nor written in place.
    left = [name for name, x in made.items() if x is given[name] and x._version == 0]
    wrong = [f"{n}: {tree.describe(own[n])}" for n in left if own[n].is_meta or own[n].numel() > MOST]
    if wrong:
        what = f"nothing in {type(meta_module).__name__} initialises these tensors"
        fix = "give their modules a reset_parameters(self) that fills them; or start from its values: model.params"
        raise TraceError("functionalize", what, wrong, fix)
    return made | {n: torch.tensor(own[n].tolist(), dtype=own[n].dtype, device=key.device) for n in left}


def _truncated_normal(x: torch.Tensor, mean: float, std: float, a: float, b: float) -> torch.Tensor:
    """Draws from a truncated normal distribution, by the inverse of its distribution function."""
    low, high = (0.5 + 0.5 * math.erf((at - mean) / std / math.sqrt(2)) for at in (a, b))
    u = torch.rand(x.shape, device=x.device) * (high - low) + low
    return x.copy_((torch.erfinv(2 * u - 1) * (std * math.sqrt(2)) + mean).clamp(a, b))


def _reset(module: nn.Module) -> None:
    """Resets the children first, as when modules are constructed."""
    for child in module.children():
        _reset(child)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
