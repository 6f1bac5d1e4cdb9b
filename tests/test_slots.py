"""State slots: a made-up one is one row, and then laid out, begun, advanced, printed, saved, restored, moved and
refused as those that fzero has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.lowering.slots import SLOTS, StateSlot, StepResults
from fzero.step import Step


class Norms(NamedTuple):
    """The largest gradient norm so far, the number of steps taken, and the losses of the last three."""

    largest: torch.Tensor
    num_steps: torch.Tensor
    losses: torch.Tensor


def leaves(step: Step, params: Any) -> Any:
    shapes = {"largest": ((), torch.float32), "num_steps": ((), torch.int64), "losses": ((3,), torch.float32)}
    return shapes if step.name == "watched_loss" else None


def advance(before: Norms, taken: StepResults) -> tuple[Norms, Mapping[str, Any]]:
    after = Norms(
        torch.where(taken.finite, torch.maximum(before.largest, taken.norm.to(torch.float32)), before.largest),
        before.num_steps + 1,
        torch.cat([taken.loss.reshape(1).to(torch.float32), before.losses[:-1]]),
    )
    return after, {"largest_norm": after.largest.clone()}


def init(step: Step) -> Norms:
    return Norms(torch.tensor(-1.0), torch.tensor(0), torch.full((3,), 9.0))


ROW = StateSlot("grad_norms", Norms, leaves, advance, init)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLOTS, "grad_norms", ROW)


def watched_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) - 1).square().mean()


def other_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return watched_loss(params, x)


BATCHES = [torch.linspace(-1, n + 1, 8 * 16).reshape(8, 16) for n in range(4)]


def params() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-0.5, 0.5, 16 * 16).reshape(16, 16)}


def compiled(loss: Any = watched_loss, *transforms: Any) -> Any:
    step = fz.compose(fz.shard_params(), *transforms)(fz.train_step(loss, optim.adamw(0.01)))
    return fz.compile(step, fz.make_mesh(data=1), backend="eager")


def run(train: Any, state: Any, batches: Any) -> tuple[Any, list[dict[str, Any]]]:
    said = []
    for batch in batches:
        state, metrics = train(state, batch)
        said.append({k: v.clone() for k, v in metrics.items() if isinstance(v, torch.Tensor)})
    return state, said


@pytest.mark.usefixtures("norms")
@pytest.mark.parametrize("transforms", [(), (fz.mixed_precision("fp16"),)], ids=["fp32", "beside a loss scale"])
def test_a_made_up_slot_is_one_row(transforms: Any) -> None:
    train = compiled(watched_loss, *transforms)
    state = train.init(params())
    assert [x.tolist() for x in state.extras["grad_norms"]] == [-1.0, 0, [9.0] * 3]
    state, said = run(train, state, BATCHES)
    assert (
        "extras['grad_norms'].largest" in train.program.leaves
        and "extras['grad_norms'].losses" in train.program.assigns
    )
    held = state.extras["grad_norms"]
    assert isinstance(held, Norms) and held.num_steps.item() == len(BATCHES)
    assert (
        held.largest.item()
        == max(m["grad_norm"].item() for m in said if m["finite"])
        == said[-1]["largest_norm"].item()
    )
    assert held.losses.tolist() == [m["loss"].item() for m in reversed(said[1:])]
    assert ("loss_scale" in state.extras) == bool(transforms)


@pytest.mark.usefixtures("norms")
@pytest.mark.parametrize("transforms", [(), (fz.mixed_precision("fp16"),)], ids=["fp32", "beside a loss scale"])
def test_it_is_saved_and_restored_and_begins_where_a_checkpoint_has_none(transforms: Any, tmp_path: Path) -> None:
    train = compiled(watched_loss, *transforms)
    state, _ = run(train, train.init(params()), BATCHES[:2])
    fz.checkpoint.save(str(tmp_path / "with"), state)
    want, _ = run(train, state, BATCHES[2:])
    got, _ = run(train, train.restore(str(tmp_path / "with")), BATCHES[2:])
    assert all(torch.equal(a, b) for a, b in zip(got.extras["grad_norms"], want.extras["grad_norms"], strict=True))
    without = compiled(other_loss, *transforms)
    plain = without.restore(str(tmp_path / "with"))  # left behind
    again = train.restore(str(tmp_path / "with"))
    assert "grad_norms" not in plain.extras and torch.equal(plain.params["w"], again.params["w"])
    fz.checkpoint.save(str(tmp_path / "without"), plain)
    begun = train.restore(str(tmp_path / "without"))
    assert [x.tolist() for x in begun.extras["grad_norms"]] == [-1.0, 0, [9.0] * 3]


@pytest.mark.usefixtures("norms")
@pytest.mark.parametrize("moves", [False, True])
def test_it_moves_as_its_row_says(moves: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SLOTS, "grad_norms", StateSlot("grad_norms", Norms, leaves, advance, init, moves))
    train = compiled()
    state, _ = run(train, train.init(params()), BATCHES[:1])
    before = [x.tolist() for x in state.extras["grad_norms"]]
    away = fz.move(state, "nvme", str(tmp_path))
    assert away.params["w"].is_meta and [x.is_meta for x in away.extras["grad_norms"]] == [moves] * 3
    back = fz.move(away, "home")
    assert [x.tolist() for x in back.extras["grad_norms"]] == before
    run(train, back, BATCHES[1:])


@pytest.mark.usefixtures("norms")
def test_a_state_without_it_is_refused_by_name() -> None:
    train = compiled()
    state = train.init(params())
    with pytest.raises(fz.errors.FzeroValueError, match=r"extras\['grad_norms'\]\.largest: not in the state"):
        train(state._replace(extras={}), BATCHES[0])
