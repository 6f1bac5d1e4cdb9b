"""Answers questions about values in a trace: of literals, whose values are known, and of conditions under which a
function does nothing but raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fzero import compat, tree
from fzero.trace import checks
from fzero.trace.known_values import Known, Unknown
from fzero.trace.user_lines import asking_frame

if TYPE_CHECKING:
    from fzero.trace.recorder import Recorder

aten = torch.ops.aten


class Answers:
    """The answers that a recorder gives."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._known = Known(recorder.graph, recorder.constants)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a question about values, where these are known, or decide whether the function raises and
        nothing else. None: it cannot be said."""
        recorder = self._recorder
        found = self._compute(func, args, kwargs)
        if found is not None:
            return tree.map(lambda x: self._constant_like(x, args) if isinstance(x, torch.Tensor) else x, found)
        if func is aten.masked_select.default:
            shape = list(torch.broadcast_shapes(args[0].shape, args[1].shape))
            mask = recorder.do(aten.expand.default, args[1], shape)
            func, args = aten.index.Tensor, (recorder.do(aten.expand.default, args[0], shape), [mask])
        if func is aten.index.Tensor:
            places: list[Any] = []
            for index in args[1]:
                mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                at = self._compute(aten.nonzero.default, (index,), {}) if mask else None
                if mask and at is None:
                    return None
                with compat.no_modes():
                    columns = [] if at is None else [x.contiguous() for x in at.unbind(1)]
                places += [self._constant_like(x, args) for x in columns] if mask else [index]
            return recorder.do(func, args[0], places)
        if func is aten._local_scalar_dense.default and (passes := checks.passing(asking_frame())) is not None:
            if compat.backward_of() is None:  # else it was noted when the forward ran
                checks.note(recorder.do(aten.eq.Scalar if passes else aten.ne.Scalar, args[0], 0))
            return passes
        return None

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._known.compute(func, *self._recorder.nodes_in((args, kwargs)))
        except Unknown:
            return None

    def _constant_like(self, value: torch.Tensor, args: Any) -> torch.Tensor:
        """A literal of a value that was computed, as a fake tensor where the arguments are."""
        like = next(x for x in tree.leaves(args) if isinstance(x, torch.Tensor))
        mode = like.fake_mode  # type: ignore[attr-defined]
        out = compat.new_fake(mode, value.shape, value.dtype, like.device, value.stride())
        self._recorder.literal(value, out)
        return out
