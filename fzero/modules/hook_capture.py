"""Captures what transformers' hooks collect inside a layer (router logits, attentions), and returns it as results of
the layer: a tensor that leaves a layer in another way is not a value of a program.

This file uses the library's collector if that is loaded, and imports nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fzero.errors import TraceError

LIBRARY = "transformers.utils.output_capturing"


def _library() -> Any:
    return sys.modules.get(LIBRARY)


def install(module: nn.Module) -> None:
    """Installs the hooks that the library would install in the first forward that collects something.

    The module may have some from forwards before. They are removed first: the library installs the hooks of a model in
    all of its parts, also in a part that has them, which would collect each output twice.
    """
    library = _library()
    if library is None:
        return
    for m in module.modules():
        vars(m).pop("_output_capturing_hooks_installed", None)
        for number, hook in list(m._forward_hooks.items()):
            if getattr(hook, "__module__", "") == LIBRARY:
                del m._forward_hooks[number]
    for m in module.modules():
        if hasattr(m, "_can_record_outputs") and hasattr(m, "config"):
            library.maybe_install_capturing_hooks(m)


def wanted() -> tuple[str, ...] | None:
    """Returns the names of what is being collected; None if nothing is."""
    library = _library()
    found = None if library is None else library._active_collector.get()
    return tuple(k for k, x in found.items() if isinstance(x, list)) if found else None


@contextmanager
def aside(names: tuple[str, ...] | None) -> Iterator[dict[str, list[Any]]]:
    """Collects these outputs separately. Hidden states are outputs of complete layers, and are collected outside of
    them.

    Raises:
        TraceError: if hidden states are collected inside.
    """
    if names is None:
        yield {}
        return
    active, collected = _library()._active_collector, {name: [] for name in names}
    token = active.set(collected)
    try:
        yield collected
    finally:
        active.reset(token)
    if collected.get("hidden_states"):
        fix = "name the modules that return them in fz.functionalize(module, blocks=[...]), or turn them off"
        raise TraceError("functionalize", "hidden states are collected inside of a block", fix=fix)


def put(collected: dict[str, list[Any]]) -> None:
    """Adds what was collected in a layer to what is collected around it."""
    library = _library()
    around = library._active_collector.get() if library is not None and collected else None
    for name, values in collected.items():
        if around is not None and values:
            around[name].extend(values)
