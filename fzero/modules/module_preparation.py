"""Prepares the copy of a module that runs: without caches and checkpointing, and with the hooks that a library would
install later.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from fzero.modules import hook_capture
from fzero.modules.batch_norms import without_counts_read
from fzero.modules.meta_module import TensorSlot, renumber_hooks
from fzero.modules.mixture_experts import NAME, register
from fzero.modules.transformers_code import sort_sets

_BATCHED = "batched_mm"
"""The name of transformers for an implementation of mixtures of experts that can be traced."""


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
    sort_sets(meta_module)
    _choose_experts(meta_module)
    _adapt_parameters(meta_module)
    _adapt_products(meta_module)
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
    """Lets the mixtures of experts of a transformers model compute with `fz.experts`, without a capacity.

    This computes what its own implementations compute. `batched_mm`, which copies the weights of the chosen experts for
    each token, stays if it was chosen.
    """
    if not hasattr(module, "set_experts_implementation"):
        return
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None) or ""
    if chosen.startswith(NAME) or chosen == _BATCHED:
        return
    if any("Experts" in type(m).__name__ for m in module.modules()):
        module.set_experts_implementation(register())  # type: ignore[operator]


def _adapt_parameters(module: nn.Module) -> None:
    """Gives adapters of parameters (`target_parameters` of peft) a forward that can be traced.

    peft's own forward registers a parametrization in each call, which changes the class of the module.
    """
    library = sys.modules.get("peft.tuners.lora.layer")
    wrapper = getattr(library, "ParamWrapper", None)
    for m in module.modules():
        if wrapper is not None and isinstance(m, wrapper):
            m.forward = types.MethodType(_adapted, m)


def _adapt_products(module: nn.Module) -> None:
    """Gives adapters of the kinds LoHa and LoKr of peft a forward that can be traced.

    In training, peft's own forward skips an adapter if a random number is below its `module_dropout`, also if that is
    0. Without any dropout, training and evaluation compute the same.
    """
    library = sys.modules.get("peft.tuners.lycoris_utils")
    kind = getattr(library, "LycorisLayer", None)
    for m in module.modules():
        if kind is not None and isinstance(m, kind):
            dropouts: Any = (*m.module_dropout.values(), *m.rank_dropout.values())  # type: ignore[operator,union-attr]
            if not any(dropouts):
                m.forward = types.MethodType(_without_dropout, m)


def _without_dropout(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an adapter whose dropouts are 0; the layers inside of it stay in the mode that they are in."""
    training, layer.training = layer.training, False
    try:
        return type(layer).forward(layer, *args, **kwargs)
    finally:
        layer.training = training


def _adapted(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an adapter of a parameter: the base layer computes with the parameter plus the product of the
    adapter's factors."""
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.disable_adapters or wrapper.merged or not active:
        return wrapper.base_layer(*args, **kwargs)
    slot = TensorSlot(wrapper.get_base_layer(), "_parameters", wrapper.parameter_name, "")
    weight = slot.get()
    slot.put(sum((wrapper.get_delta_weight(name) for name in active), weight))
    try:
        return wrapper.base_layer(*args, **kwargs)
    finally:
        slot.put(weight)
