"""Captures PyTorch's own switches that decide a function's operations: they belong to a function's signature as its
arguments do.

Switches that decide how an operation is carried out (`allow_tf32`, the number of threads) are not among them: those
count when a program runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fzero import compat

_DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """The autocast of `_DEVICES`, in their order: whether autocast is on, and its dtype; and whether casts of leaves
    are kept."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool


def autocast() -> Autocast:
    """As it stands now."""
    enabled = tuple(map(torch.is_autocast_enabled, _DEVICES))
    return Autocast(enabled, tuple(map(torch.get_autocast_dtype, _DEVICES)), torch.is_autocast_cache_enabled())


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Autocast as it stood at another moment."""
    before = autocast()
    try:
        _set(state)
        yield
    finally:
        _set(before)


@contextmanager
def without_autocast() -> Iterator[None]:
    """For operations that have their dtypes already: those of a backward, or of a graph that was recorded."""
    now = autocast()
    with autocast_as(now._replace(enabled=(False,) * len(_DEVICES))):
        yield


def _set(state: Autocast) -> None:
    torch.set_autocast_cache_enabled(state.cache)
    for device, enabled, dtype in zip(_DEVICES, state.enabled, state.dtypes, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def switches() -> dict[str, object]:
    """The others, by the name that a user knows them by."""
    attention = torch.backends.cuda
    return {
        "the default device": str(torch.get_default_device()),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": (torch.are_deterministic_algorithms_enabled(), compat.fills_uninitialized_memory()),
        "the kernels of attention": (
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
            compat.attention_order(),
        ),
        "the fast path of nn.MultiheadAttention": torch.backends.mha.get_fastpath_enabled(),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.opt_einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "hooks of all modules": compat.module_hooks(),
        "modes": tuple(type(mode).__name__ for mode in function_modes()),
    }


def function_modes() -> list[Any]:
    """The user's own `TorchFunctionMode`s around the caller, which may make any operation another."""
    return _users(compat.function_modes())


def dispatch_modes(within: Any = None) -> list[Any]:
    """The user's own `TorchDispatchMode`s around the caller; with `within` those between that mode and the caller."""
    modes = compat.dispatch_modes()
    return _users(modes[next((i + 1 for i, mode in enumerate(modes) if mode is within), 0) :])


def saved_tensor_hooks() -> list[str]:
    """The user's own `saved_tensors_hooks` around the caller, which may change what a backward reads. PyTorch's
    (checkpoints, `save_on_cpu`) do not."""
    pack = (compat.saved_tensor_hooks() or (None, None))[0]
    ours = pack is None or _package(getattr(pack, "__module__", "")) in _OURS
    return [] if ours else [f"saved_tensors_hooks({getattr(pack, '__name__', type(pack).__name__)}, ...)"]


_OURS = ("torch", "fzero")


def _users(modes: Sequence[Any]) -> list[Any]:
    return [mode for mode in modes if _package(type(mode).__module__) not in _OURS]


def _package(module: str) -> str:
    return module.partition(".")[0]
