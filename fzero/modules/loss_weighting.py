"""Weights the loss that a model computes itself by the number of targets it is a mean over, so that the result is the
mean over all targets, however the batch is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.errors import FzeroTypeError
from fzero.loss import weighted
from fzero.modules.layers import in_block


class Counting(TorchFunctionMode):
    """Counts the targets that each cross entropy inside is a mean over. The mean over no targets is 0, not NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[torch.Tensor] = []
        self.ignored: list[int] = []  # the label that each cross entropy ignores
        self.in_blocks = False

    def clear(self) -> None:
        """Resets the counts before a call is repeated."""
        self.counts.clear()
        self.ignored.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        target = given.get("target")
        if func not in (F.cross_entropy, F.nll_loss) or not isinstance(target, torch.Tensor):
            return func(*args, **kwargs)
        # every sample then has the same number of targets
        if given.get("reduction", "mean") != "mean" or target.is_floating_point():
            return func(*args, **kwargs)
        if in_block():  # counts inside a block cannot leave it
            self.in_blocks = True
            return func(*args, **kwargs)
        self.ignored.append(given.get("ignore_index", -100))
        real, weight = target != self.ignored[-1], given.get("weight")
        # The ignored label, usually -100, is no index of the weights.
        counted = real if weight is None else weight.detach()[target.where(real, 0)] * real
        count = counted.sum().to(torch.float32)
        kept = {k: x for k, x in given.items() if k in _KEPT}
        if kept["input"].dtype == torch.float16:  # the sum of some ten thousand losses overflows float16
            kept |= {k: kept[k].to(torch.float32) for k in ("input", "weight") if kept.get(k) is not None}
        total = func(**kept, reduction="sum")
        self.counts.append(count)
        return total / count.where(count > 0, 1.0)


ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_KEPT = ("input", "target", "weight", "ignore_index", "label_smoothing")


def own_loss(out: Any, counting: Counting | None, owner: str) -> Any:
    """Returns the loss among a model's outputs, weighted by the number of targets it is a mean over: the only output,
    the output named `loss`, or the only scalar in a tuple.

    Raises:
        FzeroTypeError: if there is no loss, or it is computed from several means.
    """
    loss = out if isinstance(out, torch.Tensor) else out.get("loss") if isinstance(out, Mapping) else None
    loss = getattr(out, "loss", None) if loss is None else loss
    if loss is None and isinstance(out, (tuple, list)):  # (logits, loss)
        scalars = [x for x in out if isinstance(x, torch.Tensor) and not x.dim() and x.is_floating_point()]
        loss = scalars[0] if len(scalars) == 1 else None
    if not isinstance(loss, torch.Tensor) or loss.dim():
        kind = tree.describe(out) if isinstance(out, torch.Tensor) else type(out).__name__
        what = f"{owner} returns {kind}, which has no loss"
        fix = "give its labels in the batch, or a function of what it returns: model.loss(lambda out, batch: ...)"
        raise FzeroTypeError("functionalize", what, fix=fix)
    counts = counting.counts if counting is not None else []
    if len(counts) > 1 or (counting is not None and counting.in_blocks):
        several = f"{len(counts)} cross entropies, each with a different count"
        what = f"the loss of {owner} is made of {several if len(counts) > 1 else 'a cross entropy inside of a block'}"
        fix = (
            "give the loss: model.loss(lambda out, batch: out.loss), a mean "
            "of the micro-batches' means, or fz.weighted(...)"
        )
        raise FzeroTypeError("functionalize", what, fix=fix)
    return weighted(loss * counts[0], counts[0]) if counts else loss
