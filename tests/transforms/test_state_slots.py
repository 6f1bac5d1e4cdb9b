"""State slots: a transform declares state of its own, which is laid out, begun, advanced, printed, saved, restored,
moved and refused as the state that fzero's own transforms keep."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import slot_users as users
import torch
from own_gradients import own_gradients
from slot_users import Average, Feedback, Outer

import fzero as fz
from fzero import optim
from fzero._utils import units
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.state_budget import at_rest
from fzero.errors import FzeroTypeError, TransformError
from fzero.optim.loss_scale import LossScale
from fzero.sharding.layout import leaf_of
from fzero.transforms.transform import Transform
from fzero.transforms.transform_state import Local, StepResults


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
def test_it_is_saved_and_restored_and_begins_where_a_checkpoint_has_none(
    transforms: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
            if name.startswith("residual"):
                alike(a[k], b[k], tolerance, f"{what}: {name} {k}")
                continue
            torch.testing.assert_close(a[k], b[k], **tolerance, msg=lambda m, n=name, k=k: f"{what}: {n} {k}: {m}")


def alike(got: torch.Tensor, want: torch.Tensor, tolerance: Any, what: str) -> None:
    """What rounding left over. Halfway between two numbers another processor may round to the other one: then one
    element in a thousand has the other sign."""
    close = torch.isclose(got, want, **tolerance)
    turned = torch.isclose(got, -want, rtol=1e-2, atol=tolerance["atol"])
    assert bool((close | turned).all()), f"{what}: {got[~(close | turned)]}, not {want[~(close | turned)]}"
    assert (~close).sum() <= max(1, got.numel() // 1000), f"{what}: {int((~close).sum())} elements differ"


def settings(tmp_path: Path) -> dict[str, tuple[Any, int, torch.dtype]]:
    """By name, transforms beside those of the user, micro-batches, and the dtype of compute."""
    fp32 = torch.float32
    return {
        "alone": ((), 1, fp32),
        "accumulate": ((fz.accumulate(2),), 2, fp32),
        "layerwise": ((fz.accumulate(2, schedule="layerwise"),), 2, fp32),
        "bf16": ((fz.mixed_precision("bf16"),), 1, torch.bfloat16),
        "host": ((fz.offload("cpu", ("opt_state", "params")),), 1, fp32),
        "disk": ((fz.offload("nvme", "opt_state", path=str(tmp_path)),), 1, fp32),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("data_parallel", ["alone", "accumulate", "bf16"]),
        ("shard_opt_state", ["accumulate", "disk"]),
        ("shard_grads", ["alone", "layerwise"]),
        ("shard_params", ["accumulate", "bf16", "host"]),
    ],
)
def test_they_equal_a_plain_loop(run_ranks: Any, stage: str, names: list[str], tmp_path: Path) -> None:
    cases, wanted = list[Case](), list[Any]()
    given = users.batches(4)
    for name in names:
        more, micro, dtype = settings(tmp_path)[name]
        late = stage in ("shard_grads", "shard_params") and name == "accumulate"  # reduced one by one
        chosen = ALL[:2] if late else ALL
        cases.append(((STAGES[stage], *more, *chosen), {"data": 2}))
        kept = [t.name for t in chosen]
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        if "feedback" in kept:  # sums in another order may be rounded to the next number in bfloat16
            tolerance["atol"] = max(tolerance["atol"], 1e-4)
        wanted.append((f"{stage}, {name}", kept, users.plain(given, 2, kept, micro, dtype), tolerance))
    for results in run_ranks(2, all_trained, cases, given):
        for (_, got, loss, layouts), (what, kept, want, tolerance) in zip(results, wanted, strict=True):
            same(got, want, kept, what, tolerance)
            plainly = users.loss_fn(want["ema"], given[0]).item()
            assert loss == pytest.approx(plainly, rel=2e-2), what
            sharded = () if stage == "data_parallel" else ("data",)
            tier = "host" if "host" in what else "disk" if "disk" in what else "device"
            assert layouts["u"] == (sharded, tier), what


def two_axes(*transforms: Any) -> Case:
    return (fz.shard_params(axis=("data", "node")), *transforms), {"node": 2, "data": 2}


@pytest.mark.full
def test_over_two_axes_they_equal_a_plain_loop(run_ranks: Any) -> None:
    given = users.batches(3)
    cases = [two_axes(*ALL), ((fz.shard_params(), fz.data_parallel(axis="node"), *ALL), {"node": 2, "data": 2})]
    want = users.plain(given, 4, [t.name for t in ALL])
    for results in run_ranks(4, all_trained, cases, given):
        for _, got, _, _ in results:
            same(got, want, [t.name for t in ALL], "two axes", {"rtol": 1e-5, "atol": 1e-4})


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "case"), [(1, ((*ALL,), {"data": 1})), (3, None), (4, two_axes(*ALL))])
def test_a_checkpoint_goes_on_on_another_number_of_ranks(run_ranks: Any, tmp_path: Path, ranks: int, case: Any) -> None:
    given, path = users.batches(5), str(tmp_path / "saved")
    case = case or ((fz.shard_opt_state(), *ALL), {"data": ranks})
    _, saved, _, _ = run_ranks(2, trained, ((fz.shard_params(), *ALL), {"data": 2}), given[:3], path)[0]
    names = {name for name in fz.checkpoint.describe(path).leaves if name.startswith("extras.")}
    assert {"extras.ema.u", "extras.outer.slow.w", "extras.outer.count", "extras.residual.v"} <= names
    begun, got, _, _ = run_ranks(ranks, trained, case, given[3:], path, go_on=True)[0]
    kept = [(x.params, x.extras["ema"], x.extras["outer"]) for x in (begun, saved)]
    assert all(torch.equal(a, b) for a, b in zip(*map(fz.tree.leaves, kept), strict=True))
    for k, rows in begun.extras["residual"].items():  # has values of each rank, so the run begins from scratch
        assert saved.extras["residual"][k].any() and torch.equal(rows, rows.new_zeros(ranks, *rows.shape[1:]))
    before = {
        "params": begun.params,
        "mu": begun.opt_state if isinstance(begun.opt_state, dict) and "w" in begun.opt_state else momentum(begun),
        "ema": begun.extras["ema"],
        "slow": begun.extras["outer"]["slow"],
        "outer_mu": begun.extras["outer"]["mu"],
        "count": begun.extras["outer"]["count"].item(),
        "residual": [{k: x[i] for k, x in begun.extras["residual"].items()} for i in range(ranks)],
    }
    chosen = [t.name for t in ALL if ranks > 1 or t.name != "feedback"]
    want = users.plain(given[3:], ranks, chosen, before=before)
    same(got, want, chosen, f"{ranks} ranks", {"rtol": 1e-5, "atol": 1e-4})


def momentum(state: Any) -> Any:
    """The momenta in an optimizer's state: its only tree like the parameters."""
    found = [x for x in fz.tree.leaves(state.opt_state) if x.is_floating_point()]
    return dict(zip(sorted(state.params), found, strict=True))


def skipped(given: Any) -> Any:
    scale = LossScale(initial=2.0**60)
    transforms = (fz.shard_params(), fz.mixed_precision("fp16", loss_scale=scale), *ALL)
    step = fz.compose(*transforms)(fz.train_step(users.loss_fn, optim.sgd(users.LR)))
    mesh = fz.make_mesh(data=2)
    train = fz.compile(step, mesh, backend="eager")
    state, out = train.init(users.first()), []
    for batch in given:
        state, metrics = train(state, users.own_part(batch, 2, mesh.rank))
        out.append((metrics["skipped"].item(), train.gather(state)))
    return out


@pytest.mark.full
def test_a_step_that_is_skipped_keeps_them(run_ranks: Any) -> None:
    given = users.batches(50, rows=4)
    out = run_ranks(2, skipped, given)[0]
    number = next(i for i, (left_out, _) in enumerate(out) if not left_out)
    assert 0 < number < len(given)
    begun = out[0][1]
    for x in fz.tree.leaves([begun.extras["residual"], begun.extras["outer"]["mu"], begun.extras["outer"]["count"]]):
        assert not x.any()
    for k, x in begun.extras["ema"].items():
        torch.testing.assert_close(x, users.first()[k])
    taken = out[number][1]
    assert taken.extras["outer"]["count"].item() == 1 and taken.extras["residual"]["u"].any()
    assert all(x.isfinite().all() for x in fz.tree.leaves(out[-1][1].extras))


# --- refusals ---


@dataclass(frozen=True)
class Wrong(Transform):
    """Does wrong what it is told to."""

    how: str
    order: ClassVar[int] = 95
    name: ClassVar[str] = "wrong"
    after: ClassVar[str] = "shard"

    def slots(self, params: Any) -> Any:
        like = fz.tree.map(torch.zeros_like, params)
        made = {
            "two of a name": {"ema": like},
            "a role's name": {"params": like},
            "a number": {"own": {"w": 1.0}},
            "no dict": [like],
            "local of another shape": {"own": fz.tree.map(lambda x: Local(x.new_zeros(3)), like)},
        }
        return made.get(self.how, {"own": like})

    def update(self, slots: Any, grads: Any, params: Any, inner: Any) -> Any:
        new, own = inner(grads), slots
        if self.how == "another shape":
            own = {"own": fz.tree.map(lambda x: torch.stack([x, x]), slots["own"])}
        if self.how == "another dtype":
            own = {"own": fz.tree.map(torch.Tensor.bfloat16, slots["own"])}
        if self.how == "a slot of another":
            own = {"ema": new}
        if self.how == "twice":
            inner(grads)
        if self.how == "no pair":
            return new
        return new, own

    def rewrite(self, program: Any) -> Any:
        if self.how in ("writes another's", "local of another shape"):
            return own_gradients(program, users.rounded, "residual" if "another's" in self.how else "own", self.name)
        return program

    def idle_in(self, program: Any) -> str | None:
        return "it may"


@dataclass(frozen=True)
class Unused(Transform):
    name: ClassVar[str] = "unused"

    def slots(self, params: Any) -> Any:
        return {"own": {"w": params["w"] + 1}}


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("two of a name", TransformError, r"'ema' of wrong\(.*\): average\(.*\) has a slot of this name"),
        ("a role's name", TransformError, r"'params' of wrong"),
        ("a number", FzeroTypeError, r"extras\['own'\]\['w'\]: float"),
        ("no dict", FzeroTypeError, r"slots returned list"),
        ("another shape", FzeroTypeError, r"slots\['own'\]\['w'\]: float32\[8, 70\] before, float32\[2, 8, 70\] after"),
        ("another dtype", FzeroTypeError, r"slots\['own'\]\['b'\]: float32\[\] before, bfloat16\[\] after"),
        ("a slot of another", FzeroTypeError, r"slots\['ema'\]\['b'\]: not among the tensors given to it"),
        ("twice", FzeroTypeError, "update called inner 2 times"),
        ("no pair", FzeroTypeError, r"update called inner 1 times and returned dict"),
        (
            "local of another shape",
            TransformError,
            r"\['own'\]\['u'\] \(float32\[2, 3\]\), for a gradient of \[70, 64\]",
        ),
        ("writes another's", TransformError, r"slots that it did not declare\n.*extras\['residual'\]\['v'\]"),
        ("unused", TransformError, r"no op of the program reads or writes a slot\n.*extras\['own'\]\['w'\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_path(how: str, error: type[Exception], text: str) -> None:
    others = (Feedback(),) if how == "writes another's" else (Average(),)
    wrong = Unused() if how == "unused" else Wrong(how)
    step = fz.compose(fz.shard_params(), *others, wrong)(fz.train_step(users.loss_fn, optim.sgd(0.1)))
    with pytest.raises(error, match=text) as raised:
        fz.lower(step, fz.AbstractMesh(data=2), users.first(), users.batches(1, 12)[0])
    assert "\nFix: " in str(raised.value)


def test_gradients_that_are_reduced_once_a_micro_batch_are_refused() -> None:
    step = fz.compose(fz.shard_grads(), fz.accumulate(2), Feedback())(fz.train_step(users.loss_fn, optim.sgd(0.1)))
    with pytest.raises(TransformError, match=r"once a micro-batch, not once a step\n.*the gradient of params\['"):
        fz.lower(step, fz.AbstractMesh(data=2), users.first(), users.batches(1, 12)[0])


def test_values_of_each_rank_begin_anew_on_another_number_of_ranks(
    run_ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path)
    run_ranks(2, trained, ((fz.shard_params(), Feedback()), {"data": 2}), users.batches(1), path)
    step = Feedback()(fz.train_step(users.loss_fn, optim.sgd(0.1, momentum=0.9)))
    state = fz.compile(step, fz.make_mesh(data=1), backend="eager").restore(path)
    assert all(x.shape[0] == 1 and not x.any() for x in fz.tree.leaves(state.extras["residual"]))
    assert "begin anew: extras['residual']" in caplog.text


def test_the_plan_counts_them() -> None:
    step = fz.shard_params(fz.train_step(users.loss_fn, optim.sgd(0.1)))
    given = fz.AbstractMesh(data=2), users.first(), users.batches(1, 12)[0]
    without, program = fz.lower(step, *given), fz.lower(Average()(step), *given).program
    numel = sum(leaf.shard_numel(program.mesh) for leaf in program.leaves.values() if leaf.role == "ema")
    assert f"ema {units.size(4 * numel)}" in str(program)
    more = fz.lower(Average()(step), *given).plan.peak_bytes - without.plan.peak_bytes
    assert more >= 4 * numel
    mesh, params = given[:2]
    whole, rest = (at_rest(x, mesh, params_inputs(x, mesh, params)) for x in (Average()(step), step))
    assert whole.total - rest.total == 4 * numel
