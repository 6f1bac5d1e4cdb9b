"""Takes the weights out of a module while a compiled step trains a sharded copy of them.

Each tensor of the module then is a stand-in on the meta device. Its shape and dtype can be read, its values cannot, and
no host memory is used. The tensors keep their identity (`torch.utils.swap_tensors`), so optimizers, trackers and other
code that holds them sees the same.

The meta device alone would not be enough: PyTorch raises an error if a number is read from it, but a write such as
`p.data.zero_()` disappears without a trace, and a `state_dict()` is saved without values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.modules.captured_tensors import asks

Rule = Callable[[Any, list[str]], None]
"""Called with an operation on stand-ins and their names. Raises an error if the operation is not allowed."""

GRADIENT: Any = getattr(torch.Tensor, "grad").__get__  # noqa: B009 - type checkers take the descriptor for a tensor
"""The operation of reading `tensor.grad`."""


class _StandIn:
    """A tensor without values, which passes each operation on it to a rule first."""

    weight: str  # its name in the module
    rule: Rule

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func != GRADIENT and not asks(func, args, kwargs):
            found = [x for x in tree.tensors((args, kwargs)) if isinstance(x, _StandIn)]
            if found:
                found[0].rule(func, [x.weight for x in found])
        with compat.no_function_subclasses():
            return func(*args, **kwargs)


class _ParameterStandIn(_StandIn, nn.Parameter):
    pass


class _BufferStandIn(_StandIn, torch.Tensor):
    pass


class _NoGradient(_StandIn, torch.Tensor):
    pass


class StaleWeights:
    """The tensors of a module, of which it has either the real ones or stand-ins.

    Args:
        module: has the real ones.
        rule: decides about each operation on a stand-in.
        keep: names of tensors whose values are kept in memory, because the training state has rounded ones.

    Attributes:
        are_out: whether the module has the stand-ins.
        are_known: whether the real tensors still exist, with values that are not older than the module's state.
    """

    def __init__(self, module: nn.Module, rule: Rule, keep: Collection[str]):
        named = (*module.named_parameters(), *module.named_buffers())
        self._tensors = {n: x for n, x in named if not isinstance(x, _StandIn)}
        self._rule, self._keep = rule, {*keep}
        # The tensors that the module does not have at present: the stand-ins if it has the real tensors, otherwise the
        # real tensors that still exist. Each swap exchanges the contents of `_tensors` and `_absent`.
        self._absent = {n: _stand_in(n, x, rule) for n, x in self._tensors.items()}
        self._devices = {n: x.device for n, x in self._tensors.items()}
        self.are_out, self.are_known = False, True

    def empty_module(self) -> None:
        """Puts the stand-ins in the place of the real tensors, which stay known."""
        self._swap()
        self.are_out = True

    def free_values(self) -> list[str]:
        """Frees the real tensors, whose values are about to become old.

        Memory that other code also holds, such as an earlier `state_dict()`, cannot be freed. It is filled with NaN,
        so that nobody takes its values for the current ones.

        Returns: the names of these tensors.
        """
        if not self.are_known:
            return []
        self.are_known = False
        users = Counter(map(compat.memory_of, self._absent.values()))
        held = []
        for name, x in self._absent.items():
            if x.is_meta or name in self._keep:
                continue
            if compat.memory_users(x) > users[compat.memory_of(x)]:
                held.append(name)
                with torch.no_grad():
                    x.fill_(float("nan")) if x.is_floating_point() else None
        self._absent = {n: x for n, x in self._absent.items() if x.is_meta or n in {*self._keep, *held}}
        return held

    def refill_module(self, values: Mapping[str, torch.Tensor] | None = None) -> None:
        """Puts the real tensors in the place of the stand-ins.

        Args:
            values: the current values by the tensors' names; None if the real tensors are still known. A tensor whose
                value only differs by rounding keeps its own.
        """
        for name, x in self._tensors.items():
            if name not in self._absent:
                self._absent[name] = _without_values(x, self._devices[name])
            real = self._absent[name]
            new = None if values is None or real.is_meta else values[name]
            if new is not None and not (name in self._keep and torch.equal(real.to(new.dtype), new.to(real.device))):
                with torch.no_grad():
                    real.copy_(new)
        self._swap()
        self.are_out, self.are_known = False, True

    @contextmanager
    def hidden_gradients(self) -> Iterator[None]:
        """A context in which each trained parameter has a gradient that raises an error when it is used."""
        trained = {n: x for n, x in self._tensors.items() if x.requires_grad}
        for name, x in trained.items():
            hidden = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape).as_subclass(_NoGradient)
            hidden.weight, hidden.rule = name, lambda func, names: self._rule(GRADIENT, names)
            with compat.no_function_subclasses():
                x.grad = hidden
        try:
            yield
        finally:
            with compat.no_function_subclasses():
                for x in trained.values():
                    x.grad = None

    def _swap(self) -> None:
        done: list[str] = []
        for name, x in self._tensors.items():
            absent = self._absent[name]
            vars(absent).update({n: y for n, y in vars(x).items() if n not in ("weight", "rule")})
            try:
                torch.utils.swap_tensors(x, absent)
            except RuntimeError as error:  # before anything was swapped
                for before in done:
                    torch.utils.swap_tensors(self._tensors[before], self._absent[before])
                what = f"{name} of the model cannot be replaced while it is trained: other code refers to it"
                fix = (
                    "delete what holds it: a view of it, a weak reference, or an output of the model that still has "
                    "its graph; call the model under torch.no_grad()"
                )
                raise FzeroValueError("hf.Trainer", what, [str(error)], fix) from error
            done.append(name)


def _stand_in(name: str, x: torch.Tensor, rule: Rule) -> Any:
    empty = torch.empty_like(x, device="meta", requires_grad=False)
    parameter = isinstance(x, nn.Parameter)
    made: Any = _ParameterStandIn(empty, x.requires_grad) if parameter else empty.as_subclass(_BufferStandIn)
    made.weight, made.rule = name, rule
    return made


def _without_values(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a real tensor like a stand-in."""
    with compat.no_function_subclasses():
        # Not `as_subclass`, whose result is a view: its base would count as another user of the memory.
        empty = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
