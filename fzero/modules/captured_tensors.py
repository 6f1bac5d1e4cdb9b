"""Gives a function that calls a module itself the tensors that it captures, rather than takes as arguments.

Captured tensors that nothing trains, such as class weights or another module, become literals of the program, like
`torch.tensor([...])` in traced code. The code that runs the program checks whether they have changed
(`Outside.read`). The module's own tensors are those of the step, and can be used only by calling the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.guards.user_frames import own_line

# queries about a tensor that do not depend on its values
_ASKED = frozenset({"size", "dim", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex"})
_ASKED |= frozenset({"__len__", "is_contiguous", "get_device", "data_ptr"})
_VALUES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that are tensors."""


class Outside(TorchFunctionMode):
    """Sees the operations of a function, except those in calls of its module, during which `inside` is set.

    Attributes:
        read: by id, the tensors that became literals, or that determined what is computed.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self._name = type(module).__name__
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self._own = {_memory(x): name for name, x in reversed(named)}
        self._literals: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self.read: dict[int, torch.Tensor] = {}
        self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        flat, structure = tree.flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        real = [x for x in tensors if not isinstance(x, compat.FakeTensor)]
        if not real:
            return func(*args, **kwargs)
        if asks(func, args, kwargs):
            with compat.no_modes():
                return func(*args, **kwargs)
        if own := [name for x in real if (name := self._own.get(_memory(x))) is not None]:
            self._refuse(f"reads {own[0]} of the module itself", OWN)
        for x in real:
            self.read[id(x)] = x
            self._versions.setdefault(id(x), version_of(x))
        # Captured tensors only: computed now, with their values, and the result counts as captured too.
        if len(real) == len(tensors):
            with compat.no_modes(), _Drawing() as drawing:
                found = func(*args, **kwargs)
            if drawing.drawn:
                self._refuse(f"draws random numbers ({drawing.drawn})", DRAWN)
            self._check()
            return found
        literal = [self._literal(x) if any(x is y for y in real) else x for x in flat]
        args, kwargs = tree.unflatten(structure, literal)
        found = func(*args, **kwargs)
        self._check()
        return found

    def _literal(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) not in self._literals:
            with compat.no_modes():
                value = x.detach().clone(memory_format=torch.contiguous_format)
            # The recorder takes the argument of `lift_fresh` for a literal.
            self._literals[id(x)] = made = torch.ops.aten.lift_fresh.default(value)
            self._versions[id(made)] = version_of(made)
        return self._literals[id(x)]

    def _check(self) -> None:
        """Raises an error if one of the captured tensors was written to: the write would happen only once, while the
        function is traced.
        """
        for x in (*self.read.values(), *self._literals.values()):
            if version_of(x) != self._versions[id(x)]:
                self._refuse(f"writes to a tensor that it has not created, {tree.describe(x)}", WRITTEN)

    def _refuse(self, what: str, fix: str) -> None:
        raise TraceError("functionalize", f"a function that calls {self._name} {what}", own_line(), fix)


class _Drawing(compat.TorchDispatchMode):
    """Records operations that draw random numbers."""

    drawn = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = str(func)
        return func(*args, **(kwargs or {}))


DRAWN = "it is traced once, and would not draw in each step: draw in the collator, or in the module's forward"
OWN = (
    "call only the module that is passed in: its parts, and its tensors, are those of the host, "
    "which the step does not train; what needs them goes into the module's forward"
)
WRITTEN = (
    "it is traced once, and would not write in each step: return the "
    "computed values, or write where the step is called (a "
    "callback)"
)


def asks(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether an operation queries a property of a tensor that does not depend on its values."""
    name = getattr(func, "__name__", "")
    if name == "type":
        return len(args) + len(kwargs) == 1  # with a dtype, it casts
    return name in _ASKED or (name == "__get__" and getattr(func.__self__, "__name__", "") not in _VALUES)


def version_of(x: torch.Tensor) -> int:
    """Returns how often a tensor was written to; 0 for a tensor that does not count writes."""
    return 0 if x.is_inference() else x._version


def _memory(x: torch.Tensor) -> int:
    return compat.memory_of(x) if x.layout is torch.strided else id(x)
