"""Finds the buffers that a forward overwrites, by reading its code. A loss returns the new values of these buffers.

A buffer counts as overwritten if code of the modules binds it (`self.ema = ...`, `self.count += 1`), calls a method
that writes it (`self.ema.mul_(0.9)`), writes its items, or passes it to a function that writes its argument. A buffer
that is overwritten in another way is rejected when the forward runs, and can be named in `mutable=`.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.modules.meta_module import TensorSlot
from fzero.trace.guards.bytecode import stores
from fzero.trace.guards.user_frames import Place


def overwritten(module: nn.Module, slots: Sequence[TensorSlot], mutable: Sequence[str]) -> frozenset[str]:
    """Returns the names of the buffers that the forward of a module may overwrite in its current mode, and of the
    buffers and frozen parameters that `mutable` names.

    Raises:
        FzeroValueError: listing patterns of `mutable` that match none of these.
    """
    written = written_names(module)
    buffers = [s for s in slots if s.of == "_buffers"]
    found = {s.name for s in buffers if _writes(s.owner, s.attribute, written)}
    frozen = [s for s in slots if s.of == "_parameters" and not s.get().requires_grad]
    hits = {p: [s.name for s in (*buffers, *frozen) if fnmatch.fnmatchcase(s.name, p)] for p in mutable}
    if missed := [repr(pattern) for pattern, names in hits.items() if not names]:
        trained = [s.name for s in slots if any(fnmatch.fnmatchcase(s.name, p) for p in mutable)]
        missed += [f"{name}: requires a gradient, so the optimizer writes it" for name in trained[:8]]
        fix = f"there are {', '.join(s.name for s in (*buffers, *frozen)[:8]) or 'none'}"
        fix += "; module.requires_grad_(False) freezes a parameter" if trained else ""
        what = "no buffer or frozen parameter is one of `mutable`"
        raise FzeroValueError("functionalize", what, missed, fix)
    return frozenset(found.union(*hits.values()))


def _writes(owner: nn.Module, name: str, written: Collection[str]) -> bool:
    if isinstance(owner, compat.NormBase):
        return owner.training and owner.track_running_stats
    return name in written


def written_names(module: nn.Module) -> dict[str, list[Place]]:
    """Returns the attributes that the forwards of a module's classes overwrite, including methods that they name, each
    with the lines that do.
    """
    classes = dict.fromkeys(type(m) for m in module.modules())
    methods: dict[str, list[Any]] = {}
    for base in dict.fromkeys(b for cls in classes for b in cls.__mro__ if b not in (object, nn.Module)):
        if not base.__module__.startswith("torch.nn.modules."):
            for name, x in vars(base).items():
                fn = inspect.unwrap(x) if callable(x) else None
                if inspect.isfunction(fn):
                    methods.setdefault(name, []).append(fn.__code__)
    found, todo, seen = dict[str, list[Place]](), ["forward"], set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for code in methods.get(name, ()):
                for attribute, numbers in stores(code).items():
                    found.setdefault(attribute, []).extend((code.co_filename, number) for number in numbers)
                # A method that this code names may be called by it.
                todo += code.co_names
    return found
