"""Units of a pipeline in time: those of the table where hands take none, and what plans of programs say besides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.lowering.least_pipeline import StageSeconds, simulate_units
from fzero.passes.schedules import table, when
from fzero.plan.devices import get_device
from fzero.plan.rates import Link


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (4, 3), (4, 16)])
def test_without_hands_units_end_as_in_the_table(schedule: str, ranks: int, micro: int) -> None:
    seconds = StageSeconds(1.0, 1.0, 1.0) if schedule == "zb" else StageSeconds(1.0, 2.0)
    order = table(schedule, ranks, 1, micro)
    times = when(order, ranks)
    found = simulate_units(schedule, micro, [seconds] * ranks, (0.0, 0.0))
    # a stage also waits until others have taken what it hands
    assert max(x.ends for x in found) == max(end for _, end in times.values())
    assert all(x.ends >= times[units[-1]][1] for x, units in zip(found, order, strict=True))
    assert all(x.gradient <= x.ends - 1 for x in found)


def test_hands_take_turns_on_each_link() -> None:
    stages = [StageSeconds(1.0, 2.0), StageSeconds(1.0, 2.0)]
    (first, last) = simulate_units("1f1b", 1, stages, (10.0, 20.0))
    assert (last.gradient, first.gradient, first.ends) == (11.0, 1 + 10 + 1 + 2 + 20, 36.0)
    ends = [simulate_units("1f1b", micro, stages, (10.0, 20.0))[0].ends for micro in (8, 9)]
    assert ends[1] - ends[0] >= 20.0


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_a_plan_of_equal_blocks_takes_as_long(micro: int) -> None:
    layer = fz.block(lambda w, x: torch.tanh(x @ w))

    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = layer(w, x)
        return x.mean()

    params = [torch.empty(256, 256, device="meta") for _ in range(2)]
    step = fz.pipeline(fz.accumulate(micro, vertical=True)(fz.train_step(loss, optim.sgd(0.1))))
    device = get_device("h100")
    device = replace(device, links={name: Link(0.0, 1e6) for name in device.links})
    lowered = fz.lower(
        step, fz.AbstractMesh(pipe=2), params, torch.empty(64 * micro, 256, device="meta"), device=device
    )
    hand = 64 * 256 * 4 / 1e6
    least = max(x.ends for x in simulate_units("1f1b", micro, [StageSeconds(0.0, 0.0)] * 2, (hand, hand)))
    assert 0.98 <= least / lowered.plan.step_seconds <= 1
