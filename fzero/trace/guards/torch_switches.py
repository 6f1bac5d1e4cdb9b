"""Captures PyTorch's own switches that determine which ops a function runs. They belong to a function's signature in
the same way as its arguments.

Switches that determine how an op is executed (`allow_tf32`, the number of threads) are not included. They take effect
when a program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fzero._compat import compat
from fzero.trace.guards import deterministic_mode

_DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """The autocast state for `_DEVICES`, in their order: whether autocast is enabled, its dtype, and whether casts of
    leaf tensors are cached."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool


def autocast() -> Autocast:
    """The current autocast state."""
    enabled = tuple(map(torch.is_autocast_enabled, _DEVICES))
    return Autocast(enabled, tuple(map(torch.get_autocast_dtype, _DEVICES)), torch.is_autocast_cache_enabled())


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Sets the autocast state to a captured one."""
    before = autocast()
    try:
        _set(state)
        yield
    finally:
        _set(before)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disables autocast, for ops whose dtypes are already determined: those of a backward, or of a recorded graph."""
    now = autocast()
    with autocast_as(now._replace(enabled=(False,) * len(_DEVICES))):
        yield


def _set(state: Autocast) -> None:
    torch.set_autocast_cache_enabled(state.cache)
    for device, enabled, dtype in zip(_DEVICES, state.enabled, state.dtypes, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


_SWITCHES: dict[str, Callable[[], object]] = {
    "the default device": compat.default_device,
    "inference mode": torch.is_inference_mode_enabled,
    "deterministic algorithms": deterministic_mode.setting,
    "the kernels of attention": lambda: (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        compat.attention_order(),
    ),
    "the fast path of nn.MultiheadAttention": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "torch.backends.opt_einsum": compat.einsum_paths,
    "hooks of all modules": compat.module_hooks,
    "modes": lambda: tuple([type(mode).__name__ for mode in function_modes()]),
}


def switches() -> tuple[object, ...]:
    """The states of all other switches, in the order of `told`. It takes microseconds, because a step reads the
    switches on every call."""
    # A list comprehension: with a generator this takes a fifth longer, and every call of a step waits for it.
    return tuple([read() for read in _SWITCHES.values()])


def told(positions: Sequence[object]) -> dict[str, object]:
    """A result of `switches` as a dictionary, with a name for each switch that users recognize."""
    return dict(zip(_SWITCHES, positions, strict=True))


def function_modes() -> list[Any]:
    """The user's own `TorchFunctionMode`s around the caller. Such a mode may replace any op."""
    return _users(compat.function_modes())


def dispatch_modes(within: Any = None) -> list[Any]:
    """The user's own `TorchDispatchMode`s around the caller; with `within`, only those between that mode and the
    caller."""
    modes = compat.dispatch_modes()
    return _users(modes[next((i + 1 for i, mode in enumerate(modes) if mode is within), 0) :])


def saved_tensor_hooks() -> list[str]:
    """The user's own `saved_tensors_hooks` around the caller, which may change what a backward reads. PyTorch's own
    hooks (checkpoints, `save_on_cpu`) do not."""
    pack = (compat.saved_tensor_hooks() or (None, None))[0]
    # PyTorch's own hooks return what they were given, so what a backward reads is unchanged.
    ours = pack is None or _package(getattr(pack, "__module__", "")) in _OURS
    return [] if ours else [f"saved_tensors_hooks({getattr(pack, '__name__', type(pack).__name__)}, ...)"]


_OURS = ("torch", "fzero")


def _users(modes: Sequence[Any]) -> list[Any]:
    return [mode for mode in modes if _package(type(mode).__module__) not in _OURS] if modes else []


def _package(module: str) -> str:
    return module.partition(".")[0]
