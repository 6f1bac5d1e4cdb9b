"""Exchanges small things between the ranks of a Trainer, by the library's own gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


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
        found = self._trainer.accelerator.gather(here).amax(0).tolist()
        return dict(zip(high, found, strict=False)), dict(zip(low, (-x for x in found[len(high) :]), strict=True))

    def all(self, x: Any) -> list[Any]:
        """Something small of every rank."""
        if self._alone:
            return [x]
        from accelerate.utils import gather_object  # pyright: ignore[reportMissingImports] - of the extra `hf`

        return gather_object([x])

    def least(self, size: int, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rows of the first rank whose size is least."""
        found = self.all((size, {n: x.cpu() for n, x in rows.items()}))
        return {n: x.to(self._trainer.args.device) for n, x in min(found, key=lambda x: x[0])[1].items()}
