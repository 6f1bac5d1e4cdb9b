"""Prepares the copy of a module that runs: without caches and checkpointing, and with the hooks that a library would
install later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fzero.modules import hook_capture
from fzero.modules.batch_norms import without_counts_read
from fzero.modules.meta_module import renumber_hooks

_log = logging.getLogger("fzero")

_GROUPED, _BATCHED = "grouped_mm", "batched_mm"
"""Names of transformers for two implementations of mixtures of experts. The first is its default."""
_BY_DTYPE = "fzero_by_dtype"


def prepared(meta_module: nn.Module) -> nn.Module:
    """Prepares a meta module: turns off caches and gradient checkpointing, which a step does itself or cannot do, and
    installs the hooks that a library would install in a later forward.
    """
    for config in {id(c): c for m in meta_module.modules() for c in _configs(getattr(m, "config", None))}.values():
        if getattr(config, "use_cache", None):
            config.use_cache = False
    for m in meta_module.modules():
        if getattr(m, "gradient_checkpointing", False) is True:
            m.gradient_checkpointing = False  # type: ignore[assignment]
    _choose_experts(meta_module)
    hook_capture.install(meta_module)
    renumber_hooks(meta_module)
    return without_counts_read(meta_module)


def kept_in_fp32(module: nn.Module) -> dict[str, re.Pattern[str]]:
    """Returns, for each compute dtype, a pattern for the names of the parameters that transformers keeps in float32."""
    strict = {x for m in module.modules() for x in getattr(m, "_keep_in_fp32_modules_strict", None) or ()}
    half = {x for m in module.modules() for x in getattr(m, "_keep_in_fp32_modules", None) or ()}
    named = {"bf16": strict, "fp16": strict | half}
    return {
        dtype: re.compile("|".join(rf"(^|\.)({x})(\.|$)" for x in sorted(names)))
        for dtype, names in named.items()
        if names
    }


def _configs(config: Any) -> Iterator[Any]:
    """Yields a configuration and those inside it."""
    if config is not None and hasattr(config, "__dict__") and not isinstance(config, type):
        yield config
        yield from (c for c in vars(config).values() if hasattr(c, "use_cache"))


def _choose_experts(module: nn.Module) -> None:
    """Chooses how the mixtures of experts of a transformers model compute their products, unless `fz.hf` has.

    transformers computes grouped products, which can be traced for bfloat16 only: PyTorch's function of their shapes
    rejects other dtypes, although its CPU kernel takes float32. A model whose parameters are in bfloat16 may still
    compute in another dtype, for example with `fz.mixed_precision("fp16")`, so its experts choose in each call.
    """
    if not hasattr(module, "set_experts_implementation"):
        return
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None) or _GROUPED
    if chosen.startswith("fzero_") or not any("Experts" in type(m).__name__ for m in module.modules()):
        return
    if all(p.dtype is not torch.bfloat16 for p in module.parameters()):
        _log.info("experts of %s: batched_mm (grouped products are bf16's)", type(module).__name__)
        module.set_experts_implementation(_BATCHED)  # type: ignore[operator]
    elif chosen == _GROUPED:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

        ALL_EXPERTS_FUNCTIONS.register(_BY_DTYPE, _experts_by_dtype)
        module.set_experts_implementation(_BY_DTYPE)  # type: ignore[operator]


def _experts_by_dtype(experts: Any, *args: Any) -> torch.Tensor:
    """Computes the output of an experts module of transformers with grouped products if they can be traced."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

    weight = experts.down_proj  # [experts, width, hidden] or transposed
    # the kernel loads 16 bytes at once
    grouped = weight.dtype is torch.bfloat16 and not any(n % 8 for n in weight.shape[1:])
    return ALL_EXPERTS_FUNCTIONS[_GROUPED if grouped else _BATCHED](experts, *args)
