"""Does a step of a run again where `fz.Health` asks for it, keeps the result that two runs of three come to, and leaves
out a batch that spoils the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero.elastic import replay
from fzero.elastic.health import Finding, Health, Jumps
from fzero.elastic.vault import held, serves
from fzero.errors import FzeroValueError, message
from fzero.mesh import Mesh
from fzero.ranks import agreement
from fzero.runtime.training import CompiledStep
from fzero.step import State

_MOST_LEFT_OUT = 8  # batches in a row


class Redo:
    """The steps of a run that are done again, from the state that was kept before them.

    Args:
        mesh: of all ranks.
        memory: the directory of kept states; None if none are kept.
        on_host: the ranks of this host.
        health: the care to be taken.
        note: is told what was found, the same on every rank.
    """

    def __init__(
        self, mesh: Mesh, memory: Path | None, on_host: Sequence[int], health: Health, note: Callable[[Finding], None]
    ):
        self._mesh, self._memory, self._host, self._note = mesh, memory, on_host, note
        self._rotate = health.rotate
        self._jumps = None if health.spikes is None else Jumps(health.spikes)
        self._spikes: list[str] = []
        self._left_out = 0  # batches in a row

    @property
    def watching(self) -> bool:
        """Whether the numbers of every step are looked at."""
        return self._jumps is not None

    def step(self, train: CompiledStep, state: State, batch: Any, seen: int, due: bool) -> dict[str, Any]:
        """The metrics of a step that is done again if it is its turn, or its numbers have jumped. The state before it
        is kept."""
        if self.watching:
            train.leave_nonfinite()
        first = replay.carried_out(train, state, batch)
        metrics, jumps, ranks, finding = first.metrics, "", (), None
        if self._jumps is not None:
            numbers = {} if bool(metrics.get("skipped", False)) else _numbers(metrics)
            jumps, ranks = self._found(self._jumps, numbers)
        if due or jumps:
            metrics, finding = self.again(train, state, batch, seen, first)
        if jumps and self._jumps is not None:
            before, (jumps, _) = jumps, self._found(self._jumps, _numbers(metrics))
            if not jumps and finding is None:  # a copy of the numbers, which is given to nobody
                who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                text = f"batch {seen} came to {before} on {who}, and to nothing of that when done again"
                self._note(Finding("replay", seen, ranks, text))
        self._left_out = self._left_out + 1 if jumps else 0
        if jumps:
            self._rewind(state, seen)
            text = f"batch {seen} is left out: {jumps}, and so when it was done again"
            self._spikes.append(text)
            self._note(Finding("spike", seen, (), text))
            metrics = {**metrics, "skipped": torch.tensor(True)}
        if self._left_out == _MOST_LEFT_OUT:
            what = f"{_MOST_LEFT_OUT} batches in a row were left out: it is not the data"
            fix = "go back to a checkpoint before that, with a lower learning rate; or give a larger Health(spikes=...)"
            raise FzeroValueError(message("run.step", what, self._spikes[-3:], fix))
        return metrics

    def _found(self, jumps: Jumps, numbers: Mapping[str, float]) -> tuple[str, tuple[int, ...]]:
        """The numbers that have jumped, and on which ranks, the same on all: one that errs may see others."""
        everyones = agreement.everyones(self._mesh, "run", lambda: jumps.found(numbers))
        return next(filter(None, everyones), ""), tuple(rank for rank, text in enumerate(everyones) if text)

    def again(
        self, train: CompiledStep, state: State, batch: Any, seen: int, first: replay.Ran
    ) -> tuple[dict[str, Any], Finding | None]:
        """The metrics of a step done again, once if it comes to the same, else twice; and what is wrong then. The state
        is behind it."""
        mesh = self._mesh
        first.state = replay.sums(state)
        turned: replay.Difference | None = None
        if self._rotate and first.given:
            self._rewind(state, seen)
            other = replay.carried_out(train, state, replay.turned_batch(train, batch), shift=1)
            turned = replay.erring(train, first, other)
        second = self._once_more(train, state, batch, seen)
        odd, text = replay.differing(mesh, first, second), ""
        if odd is not None:
            third = self._once_more(train, state, batch, seen)
            if replay.differing(mesh, second, third) is None:
                text, second = "two more runs agree, and theirs is kept", third
            elif (other := replay.differing(mesh, first, third)) is None:
                odd, second = replay.differing(mesh, second, third), third
                text = "the first and the third of three runs agree, and theirs is kept"
            else:
                second = third
                text = "three runs come to three results: operations that are not deterministic, or failing hardware"
        elif turned is not None:
            odd, text = turned, "its result is kept: the same ranks come to it again"
        if odd is None:
            return second.metrics, None
        who = f"rank{'s' * (len(odd.ranks) > 1)} {', '.join(map(str, odd.ranks))}"
        finding = Finding(
            "replay", seen, odd.ranks, f"batch {seen} came to other bits on {who} when done again, {odd.where}; {text}"
        )
        self._note(finding)
        return second.metrics, finding

    def _once_more(self, train: CompiledStep, state: State, batch: Any, seen: int) -> replay.Ran:
        self._rewind(state, seen)
        ran = replay.carried_out(train, state, batch)
        ran.state = replay.sums(state)
        return ran

    def _rewind(self, state: State, seen: int) -> None:
        """Makes a state the one that was kept before its last step."""
        index = None if self._memory is None else held(self._memory).get((seen, self._mesh.size))
        whole = agreement.everyones(
            self._mesh, "run", lambda: index is not None and serves(index, self._mesh.size, self._mesh.size, self._host)
        )
        if not all(whole):
            fix = "start the ranks by torchrun or python -m fzero.run, or give fz.run(memory=DIR): else none is kept"
            what = "the state before this step was not kept"
            raise FzeroValueError(message("run.step", what, [f"after {seen} batches"], fix))
        assert index is not None
        replay.rewind(state, index, self._mesh)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step that may jump. Waits for the step."""
    return {name: float(metrics[name]) for name in ("loss", "grad_norm")}
