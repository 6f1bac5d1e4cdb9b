"""State slots: a transform declares state of its own, which is laid out, begun, advanced, printed, saved, restored,
moved and refused as the state that fzero's own transforms keep."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import slot_users as users
import torch
from slot_users import Average, Feedback, Outer

import fzero as fz
from fzero import optim
from fzero.errors import CheckpointError, FzeroTypeError, TransformError
from fzero.layout import leaf_of
from fzero.passes.own_gradients import own_gradients
from fzero.transforms.base import Transform
from fzero.transforms.slots import Local, StepResults


class Norms(NamedTuple):
    """The largest gradient norm so far, the number of steps taken, and the losses of the last three."""

    largest: torch.Tensor
    num_steps: torch.Tensor
    losses: torch.Tensor


@dataclass(frozen=True)
class Watch(Transform):
    """A transform that keeps numbers of each step, left out or not, and adds to the metrics."""

    order: ClassVar[int] = 75
    name: ClassVar[str] = "norms"

    def slots(self, params: Any) -> Any:
        return {
            "grad_norms": Norms(torch.tensor(-1.0), torch.zeros((), dtype=torch.int64), torch.full((3,), 9.0)),
        }

    def advance(self, slots: Any, results: StepResults) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        before = slots["grad_norms"]
        norm = results.norm.to(torch.float32)
        after = Norms(
            torch.where(results.finite, torch.maximum(before.largest, norm), before.largest),
            before.num_steps + 1,
            torch.cat([results.loss.reshape(1).to(torch.float32), before.losses[:-1]]),
        )
        return {"grad_norms": after}, {"largest_norm": after.largest.clone()}


def watched_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) - 1).square().mean()


BATCHES = [torch.linspace(-1, n + 1, 8 * 16).reshape(8, 16) for n in range(4)]


def params() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-0.5, 0.5, 16 * 16).reshape(16, 16)}


def compiled(*transforms: Any) -> Any:
    step = fz.compose(fz.shard_params(), *transforms)(fz.train_step(watched_loss, optim.adamw(0.01)))
    return fz.compile(step, fz.make_mesh(data=1), backend="eager")


def run(train: Any, state: Any, batches: Any) -> tuple[Any, list[dict[str, Any]]]:
    said = []
    for batch in batches:
        state, metrics = train(state, batch)
        said.append({k: v.clone() for k, v in metrics.items() if isinstance(v, torch.Tensor)})
    return state, said


@pytest.mark.parametrize("transforms", [(), (fz.mixed_precision("fp16"),)], ids=["fp32", "beside a loss scale"])
def test_a_slot_of_numbers_is_in_the_state_and_the_program(transforms: Any) -> None:
    train = compiled(Watch(), *transforms)
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


@pytest.mark.parametrize("transforms", [(), (fz.mixed_precision("fp16"),)], ids=["fp32", "beside a loss scale"])
def test_it_is_saved_and_restored_and_begins_where_a_checkpoint_has_none(transforms: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = compiled(Watch(), *transforms)
    state, _ = run(train, train.init(params()), BATCHES[:2])
    fz.checkpoint.save(str(tmp_path / "with"), state)
    want, _ = run(train, state, BATCHES[2:])
    got, _ = run(train, train.restore(str(tmp_path / "with")), BATCHES[2:])
    assert all(torch.equal(a, b) for a, b in zip(got.extras["grad_norms"], want.extras["grad_norms"], strict=True))
    without = compiled(*transforms)
    plain = without.restore(str(tmp_path / "with"))  # left behind
    again = train.restore(str(tmp_path / "with"))
    assert "grad_norms" not in plain.extras and torch.equal(plain.params["w"], again.params["w"])
    fz.checkpoint.save(str(tmp_path / "without"), plain)
    with caplog.at_level(logging.WARNING, "fzero"):
        begun = train.restore(str(tmp_path / "without"))
    assert re.search(r"begin anew: extras\['grad_norms'\]\.largest, ", caplog.text)
    assert [x.tolist() for x in begun.extras["grad_norms"]] == [-1.0, 0, [9.0] * 3]


def test_matrices_move_with_the_state_and_numbers_stay(tmp_path: Path) -> None:
    train = compiled(Watch(), Average())
    state, _ = run(train, train.init(params()), BATCHES[:1])
    before = state.extras["ema"]["w"].clone(), [x.tolist() for x in state.extras["grad_norms"]]
    away = fz.move(state, "nvme", str(tmp_path))
    assert away.extras["ema"]["w"].is_meta and [x.is_meta for x in away.extras["grad_norms"]] == [False] * 3
    back = fz.move(away, "home")
    assert torch.equal(back.extras["ema"]["w"], before[0])
    assert [x.tolist() for x in back.extras["grad_norms"]] == before[1]
    run(train, back, BATCHES[1:])


def test_a_state_without_it_is_refused_by_name() -> None:
    train = compiled(Watch())
    state = train.init(params())
    with pytest.raises(fz.errors.FzeroValueError, match=r"extras\['grad_norms'\]\.largest: not in the state"):
        train(state._replace(extras={}), BATCHES[0])


# --- three transforms of a user, beside plain loops ---

ALL = (Average(), Outer(), Feedback())
STAGES = {
    "data_parallel": fz.data_parallel(),
    "shard_opt_state": fz.shard_opt_state(),
    "shard_grads": fz.shard_grads(),
    "shard_params": fz.shard_params(),
}
Case = tuple[tuple[Any, ...], dict[str, int]]


def trained(case: Case, given: Any, path: str = "", go_on: bool = False) -> Any:
    """The whole state behind these batches on a rank, with the average's outputs; saved there, or begun from there."""
    transforms, axes = case
    step = fz.compose(*transforms)(fz.train_step(users.loss_fn, optim.sgd(users.LR, momentum=users.MOMENTUM)))
    tiers = any(t.name == "offload" for t in transforms)
    mesh = fz.make_mesh(**axes, **({"unified_memory": False} if tiers else {}))
    train = fz.compile(step, mesh, backend="eager")
    state = train.restore(path) if go_on else train.init(users.first())
    begun = train.gather(state)
    for batch in given:
        state, metrics = train(state, users.own_part(batch, mesh.size, mesh.rank))
        assert metrics["finite"]
    if path and not go_on:
        fz.checkpoint.save(path, state)
    if "ema" in state.extras:
        evaluate = fz.compile(
            fz.compose(*train.resolved.transforms)(
                fz.eval_step(lambda p, batch: {"loss": fz.weighted(users.loss_fn(p, batch), torch.ones(()))})
            ),
            mesh,
            backend="eager",
        )
        loss = evaluate(state.extras["ema"], users.own_part(given[0], mesh.size, mesh.rank))["loss"].item()
        layouts = {k: (leaf_of(x)[0].layout.axes, leaf_of(x)[0].layout.tier) for k, x in state.extras["ema"].items()}  # type: ignore[index]
    else:
        loss, layouts = None, None
    return begun, train.gather(state), loss, layouts


def all_trained(cases: Any, given: Any) -> Any:
    return [trained(case, given) for case in cases]


def same(got: Any, want: Any, transforms: Any, what: str, tolerance: Any) -> None:
    pairs = [("params", got.params, want["params"])]
    pairs += [("ema", got.extras["ema"], want["ema"])] if "average" in transforms else []
    if "outer" in transforms:
        outer = got.extras["outer"]
        assert outer["count"].item() == want["count"]
        pairs += [("slow", outer["slow"], want["slow"]), ("outer mu", outer["mu"], want["outer_mu"])]
    if "feedback" in transforms and len(want["residual"]) > 1:
        for rank, residual in enumerate(want["residual"]):
            own = {k: x[rank] for k, x in got.extras["residual"].items()}
            pairs.append((f"residual of rank {rank}", own, residual))
    for name, a, b in pairs:
        for k in b:
            torch.testing.assert_close(a[k], b[k], **tolerance, msg=lambda m, n=name, k=k: f"{what}: {n} {k}: {m}")


def settings(stage: str, tmp_path: Path) -> dict[str, tuple[Any, int, torch.dtype]]:
    """By name, transforms beside those of the user, micro-batches, and the dtype of compute."""
    fp32 = torch.float32
    return {
        "alone": ((), 1, fp32),
        "accumulate": ((fz.accumulate(2),), 2, fp32),
        "vertical": ((fz.accumulate(2, vertical=True),), 2, fp32),
        "bf16": ((fz.mixed_precision("bf16"),), 1, torch.bfloat16),
        "host": ((fz.offload("cpu", ("opt_state", "params")),), 1, fp32),
        "disk": ((fz.offload("nvme", "opt_state", path=str(tmp_path)),), 1, fp32),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_they_equal_a_plain_loop(run_ranks: Any, stage: str, tmp_path: Path) -> None:
    cases, wanted = list[Case](), list[Any]()
    given = users.batches(4)
    for name, (more, micro, dtype) in settings(stage, tmp_path).items():
        late = stage in ("shard_grads", "shard_params") and name == "accumulate"  # each micro-batch is reduced by itself
        chosen = ALL[:2] if late else ALL
        cases.append(((STAGES[stage], *more, *chosen), {"data": 2}))
        names = [t.name for t in chosen]
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        if "feedback" in names:  # sums in another order may be rounded to the next number in bfloat16
            tolerance["atol"] = max(tolerance["atol"], 1e-4)
        wanted.append((f"{stage}, {name}", names, users.plain(given, 2, names, micro, dtype), tolerance))
    for results in run_ranks(2, all_trained, cases, given):
        for (_, got, loss, layouts), (what, names, want, tolerance) in zip(results, wanted, strict=True):
            same(got, want, names, what, tolerance)
            plainly = users.loss_fn(want["ema"], given[0]).item()
            assert loss == pytest.approx(plainly, rel=2e-2), what
            sharded = () if stage == "data_parallel" else ("data",)
            tier = "host" if "host" in what else "disk" if "disk" in what else "device"
            assert layouts["u"] == (sharded, tier), what
