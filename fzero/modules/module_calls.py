"""Calls a module's forward on given tensors, with arguments that are bound from a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroTypeError
from fzero.modules.batch_binding import Arguments, Reading, arguments, check_spelling
from fzero.modules.chunked_loss import Chunked
from fzero.modules.loss_weighting import Counting, own_loss
from fzero.modules.module_mode import Given, Mode, kind_of
from fzero.trace.guards.function_caches import emptied

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class ModuleCalls:
    """The calls of a module that was functionalized.

    Args:
        module: the original module.
        check: raises an error if the module has changed.
        params: returns its tensors as they are now, as a tree.
        names, structure: of this tree.
        shapes: of its tensors, by name.
        dtypes: of its buffers, by name.
    """

    module: nn.Module
    check: Callable[[], None]
    params: Callable[[], Any]
    names: Sequence[str]
    structure: tree.TreeSpec
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def call(self, mode: Mode, given: Given, counting: Counting | None = None) -> tuple[Any, Any]:
        self.check()
        out, new = mode(given, counting)
        return out, tree.unflatten(self.structure, map(new.get, self.names)) if new else None

    def own_loss(self, mode: Mode, given: Given, chunked: bool) -> tuple[Any, Any]:
        """Returns the loss that the model computes itself, and the new values of buffers."""
        counting, replacing = Counting(), Chunked() if chunked else None
        with replacing or nullcontext():
            out, new = self.call(mode, given, counting)
        loss = own_loss(out, counting, self._name)
        if replacing is not None:
            replacing.check(self._name)
        return loss, new

    def flat(self, params: Any, whole: bool = True) -> dict[str, torch.Tensor]:
        """Returns the tensors of a tree by name. `whole`: check that they have the shapes of the module's tensors."""
        names = tree.names(params)
        if names != self.names:
            missing, more = sorted({*self.names} - {*names}), sorted({*names} - {*self.names})
            found = [*(f"missing: {n}" for n in missing[:8]), *(f"not of this module: {n}" for n in more[:8])]
            fix = "give a tree like model.params, such as state.params"
            raise FzeroTypeError("functionalize", f"these are not the tensors of {self._name}", found, fix)
        flat = dict(zip(names, tree.leaves(params), strict=True))
        odd = [n for n, x in flat.items() if whole and x.shape != self.shapes[n]]
        if other := [f"{n}: {tree.describe(flat[n])}, not {list(self.shapes[n])}" for n in odd]:
            fix = "give a tree like model.params, such as state.params, of full tensors"
            raise FzeroTypeError("functionalize", f"these are not the tensors of {self._name}", other, fix)
        if cast := [f"{n}: {tree.describe(flat[n])}, not {d}" for n, d in self.dtypes.items() if flat[n].dtype != d]:
            fix = "mixed_precision(where=lambda path, leaf: ...) without them; the step of model.train_step does so"
            raise FzeroTypeError("functionalize", f"buffers of {self._name} are cast", cast, fix)
        return flat

    def arguments(self, batch: Any, settings: dict[str, Any], alone: bool, more: int = 0) -> Arguments:
        return arguments(self.module.forward, self._name, batch, settings, alone, more)

    def bound(
        self, fn: Loss | None, mode: Mode, batch: Any, settings: dict[str, Any], counts: dict[Any, int]
    ) -> Arguments:
        """Returns the forward's arguments from a batch that `fn` reads too.

        A forward such as `forward(idx, targets=None)` returns no loss without its optional arguments. If `fn` has no
        result without them, and leaves entries of the batch unread, the forward gets these entries. Whether that is
        so is determined on fake tensors, once for each kind of batch.

        Args:
            counts: the number of optional arguments, by kind of batch.
        """
        found = self.arguments(batch, settings, alone=fn is None)
        if fn is None or not found.optional:
            return found
        key = kind_of(batch)
        if key not in counts:
            counts[key] = self._optional(fn, mode, batch, settings, found.optional)
        return self.arguments(batch, settings, alone=False, more=counts[key])

    def _optional(self, fn: Loss, mode: Mode, batch: Any, settings: dict[str, Any], most: int) -> int:
        """The number of optional arguments that a forward needs so that `fn` has a result.

        If no number helps, the trace fails with the error that a user would get from PyTorch. A forward without its
        optional arguments has None among its outputs if they are targets. Then the error is that of the call with the
        targets, because the call without them would hide it: returns the most that were tried. Otherwise returns 0.
        """
        params, missing, tried = self.params(), False, 0
        with emptied(), compat.no_modes(), compat.FakeTensorMode(), torch.no_grad():
            tensors, fake = self.flat(tree.map(empty_like, params)), tree.map(empty_like, batch)
            for more in range(most + 1):
                given = self.arguments(fake, settings, alone=False, more=more)
                reading, result, tried = Reading(given), None, more
                try:
                    out = mode.outline(Given(tensors, None, num_rows(fake), given.args, given.kwargs))
                    missing |= more == 0 and _has_none(out)
                    with reading:
                        result = fn(out, fake)
                except Exception:  # if no number of arguments helps, the trace raises it again, with the user's line
                    pass
                reading.note(tree.leaves(result))
                if not _has_none(result):
                    return more
                if not reading.unread():
                    break
        return tried if missing else 0

    def read(self, fn: Loss, out: Any, batch: Any, given: Arguments, could_take: bool) -> Any:
        """Returns the result of a function of outputs and batch.

        Raises:
            TraceError: for entries of the batch that neither the forward nor the function reads, or one that the
                function misses.
        """
        try:
            with Reading(given) as reading:
                found = fn(out, batch)
        except KeyError as error:
            check_spelling(error, batch)
            raise
        if found is None and not could_take:  # the first fault counts: `split_loss` reports it
            return found
        reading.check(self.module.forward, self._name, found, could_take)
        return found


def empty_like(x: Any) -> Any:
    """Returns an uninitialized tensor of this shape and dtype on the default device; anything but a tensor is
    returned as it is.
    """
    return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x


def _has_none(values: Any) -> bool:
    return any(x is None for x in tree.flatten(values, is_leaf=lambda x: x is None)[0])


def num_rows(values: Any) -> int | None:
    """Returns the number of samples of a batch: the length that most of its tensors have."""
    lengths = Counter(x.shape[0] for x in tree.tensors(values) if x.dim())
    return lengths.most_common(1)[0][0] if lengths else None
