"""Exchanges small things between the ranks of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather  # pyright: ignore[reportMissingImports] - of the extra `hf`


class Exchange:
    """Tells every rank of a Trainer what the others have. All of them call its methods."""

    def __init__(self, trainer: Any):
        self._trainer, self._alone = trainer, trainer.args.world_size == 1

    def bounds(self, numbers: Mapping[str, Sequence[int]]) -> tuple[dict[str, int], dict[str, int]]:
        """The largest and the smallest number of each name, over all ranks."""
        high, low = {n: max(x) for n, x in numbers.items()}, {n: min(x) for n, x in numbers.items()}
        if self._alone:
            return high, low
        here = torch.tensor([[*high.values(), *(-x for x in low.values())]], device=self._trainer.args.device)
        everyone: Any = gather(here)
        found = everyone.amax(0).tolist()
        return dict(zip(high, found, strict=False)), dict(zip(low, (-x for x in found[len(high) :]), strict=True))
