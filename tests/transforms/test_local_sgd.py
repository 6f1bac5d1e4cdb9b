"""Replicas that train by themselves (`fz.local_sgd`): equal to the algorithm written out over plain steps, saved after
a sync, and what is refused."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim, tree
from fzero.errors import BudgetError, CheckpointError, DivergenceError, FzeroTypeError, FzeroValueError, TransformError
from fzero.runtime.outer import Wandered
from fzero.transforms.local_sgd import LocalSGD

STEPS, ROWS = 7, 4
STAGES: dict[str, Any] = {
    "data_parallel": fz.data_parallel,
    "shard_opt_state": fz.shard_opt_state,
    "shard_grads": fz.shard_grads,
    "shard_params": fz.shard_params,
}


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    hidden = torch.tanh(batch["x"] @ params["w"] + params["b"]) * params["frozen"]
    return (hidden @ params["w"].T * params["s"] - batch["x"]).square().mean()


def first(width: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "b": torch.zeros(width),
        "frozen": torch.ones(width) + 0.1,
        "s": torch.ones(()),
        "w": torch.randn(16, width, generator=made) * 0.1,
    }


def batches(replicas: int, ranks: int) -> list[list[dict[str, torch.Tensor]]]:
    """By step and replica."""
    made = torch.Generator().manual_seed(1)
    return [[{"x": torch.randn(ROWS * ranks, 16, generator=made)} for _ in range(replicas)] for _ in range(STEPS)]


def plain() -> fz.Step:
    return fz.train_step(loss_fn, optim.adamw(1e-2), trainable=lambda path, _: "frozen" not in path)


def written_out(spec: LocalSGD, replicas: int, ranks: int, width: int) -> dict[str, torch.Tensor]:
    """The parameters of all replicas after a last sync: one plain step for each, and Nesterov's momentum."""
    step = plain()
    states = [step.init(first(width)) for _ in range(replicas)]
    anchor = {n: x.clone() for n, x in first(width).items() if n != "frozen"}
    momentum, met = {n: torch.zeros_like(x) for n, x in anchor.items()}, dict.fromkeys(anchor, 0)
    parts = [[n for n, x in part.items() if x is not None] for part in spec.slots(anchor)["anchor"]]

    def meet(names: list[str], at: int) -> None:
        for n in names:
            gradient = anchor[n] - sum(state.params[n] for state in states) / replicas
            momentum[n] = 0.9 * momentum[n] + gradient
            anchor[n] = anchor[n] - 0.7 * (gradient + 0.9 * momentum[n])
            met[n] = at
            for state in states:
                state.params[n].copy_(anchor[n])

    for t, given in enumerate(batches(replicas, ranks)):
        for i, batch in enumerate(given):
            states[i], _ = step(states[i], batch)
        meet([n for part in spec.due(t + 1) for n in parts[part]], t + 1)
    meet([n for n, at in met.items() if at != STEPS], STEPS)
    return states[0].params


def composed(stage: str, more: tuple[Any, ...] = (), **options: Any) -> fz.Step:
    return fz.compose(STAGES[stage](), *more, fz.local_sgd(**options))(plain())


def trained(mesh: fz.Mesh, train: Any, state: fz.State, sizes: tuple[int, int], first_step: int = 0) -> Any:
    """The state after the remaining steps, and the metrics of each."""
    replica, at, metrics = mesh.index("replica"), mesh.index("data") * ROWS, []
    for given in batches(*sizes)[first_step:]:
        state, found = train(state, {"x": given[replica]["x"][at : at + ROWS]})
        metrics.append(found)
    return state, metrics


def carried(
    sizes: tuple[int, int],
    cases: list[tuple[str, dict[str, Any]]],
    width: int,
    path: str,
    backend: str = "eager",
    offload: bool = False,
) -> list[Any]:
    """The parameters of each case after its steps and a sync, by gather; saves, restores and goes on in each."""
    mesh = fz.make_mesh(replica=sizes[0], data=sizes[1])
    out = []
    for i, (stage, options) in enumerate(cases):
        more = (fz.offload("cpu"),) if offload else ()
        train = fz.compile(composed(stage, more, **options), mesh, backend=backend)
        state, metrics = trained(mesh, train, train.init(first(width)), sizes)
        last = [t for t, found in enumerate(metrics) if "outer_loss" in found]
        state = train.sync(train.sync(state))  # the second has nothing to do
        train.check_replicas(state)
        whole = train.gather(state)
        fz.checkpoint.save(f"{path}/{i}", state)
        again = fz.compile(composed(stage, more, **options), mesh, backend=backend)
        pairs = [
            trained(mesh, x, s, sizes, STEPS - 2) for x, s in ((train, state), (again, again.restore(f"{path}/{i}")))
        ]
        ends = [x.gather(x.sync(s)) for x, (s, _) in zip((train, again), pairs, strict=True)]
        same = all(torch.equal(a, b) for a, b in zip(tree.leaves(ends[0]), tree.leaves(ends[1]), strict=True))
        out.append((whole.params, last, same))
    return out


CASES: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {"every": 3, "wire": None}),
    ("shard_opt_state", {"every": 3, "fragments": 2, "wire": None}),
    ("shard_grads", {"every": 2, "wire": None}),
    ("shard_params", {"every": 4, "fragments": 3, "wire": None}),
]


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_it_is_the_algorithm_written_out(run_ranks: Any, tmp_path: Any, sizes: Any, offload: bool) -> None:
    cases = CASES if sizes == (2, 2) else CASES[::3]
    ranks = run_ranks(sizes[0] * sizes[1], carried, sizes, cases, 12, str(tmp_path), offload=offload)
    for i, (_, options) in enumerate(cases):
        spec = fz.local_sgd(**options)
        expected = written_out(spec, sizes[0], sizes[1], 12)
        for found in ranks:
            params, last, same = found[i]
            assert same, "a restored run goes on as the one that was saved"
            held = [len(tree.leaves(part)) for part in spec.slots(first(12))["anchor"]]
            assert last == [t for t in range(STEPS) if any(held[part] for part in spec.due(t + 1))]
            for name, x in expected.items():
                torch.testing.assert_close(params[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_compiled_and_in_codes(run_ranks: Any, tmp_path: Any) -> None:
    options = {"every": 3, "wire": "int8"}
    cases = [("shard_params", options)]
    ranks = run_ranks(4, carried, (2, 2), cases, 1024, str(tmp_path), backend="inductor")
    expected = written_out(fz.local_sgd(**options), replicas=2, ranks=2, width=1024)
    for ((params, _, same),) in ranks:
        assert same
        moved = (expected["w"] - first(1024)["w"]).norm()
        assert 0 < (params["w"] - expected["w"]).norm() < 0.05 * moved  # codes are near, and not equal
        assert torch.equal(params["w"], ranks[0][0][0]["w"])


def other_lives(path: str) -> list[str]:
    """Replicas that differ are not saved; a state of two replicas goes on as one of four and of one."""
    mesh = fz.make_mesh(replica=2, data=1)
    train = fz.compile(composed("shard_params", every=3, wire=None), mesh, backend="eager")
    state, _ = trained(mesh, train, train.init(first(12)), (2, 1))
    moved = fz.move(fz.move(state, "cpu"), "home")
    state, _ = trained(mesh, train, moved, (2, 1), STEPS - 1)  # replicas may differ when a state is looked at anew
    with pytest.raises(CheckpointError, match=r"train\.sync") as caught:
        fz.checkpoint.save(path, state)
    plainly = fz.compile(fz.data_parallel(plain()), fz.make_mesh(data=2), backend="eager")
    with pytest.raises(FzeroValueError, match="no replicas"):
        plainly.sync(plainly.init(first(12)))
    fz.checkpoint.save(path, train.sync(state))
    return str(caught.value).splitlines()


def averaged() -> list[float]:
    """An outer optimizer without a state: replicas take their mean."""
    mesh = fz.make_mesh(replica=2, data=1)
    step = composed("shard_params", every=STEPS, wire=None, outer=optim.sgd(1.0))
    train = fz.compile(step, mesh, backend="eager")
    state, _ = trained(mesh, train, train.init(first(12)), (2, 1))
    assert sorted(state.extras) == ["anchor"]
    alone = plain()
    ends = [alone.init(first(12)) for _ in range(2)]
    for given in batches(2, 1):
        ends = [alone(end, batch)[0] for end, batch in zip(ends, given, strict=True)]
    whole = train.gather(train.sync(state)).params
    return [float((whole[n] - (ends[0].params[n] + ends[1].params[n]) / 2).abs().max()) for n in whole]


def test_replicas_may_take_their_mean(run_ranks: Any) -> None:
    assert max(max(far) for far in run_ranks(2, averaged)) < 1e-6


def resumed(path: str, sizes: tuple[int, int]) -> float:
    mesh = fz.make_mesh(replica=sizes[0], data=sizes[1])
    train = fz.compile(composed("shard_grads", every=3, wire=None), mesh, backend="eager")
    state, _ = trained(mesh, train, train.restore(path), sizes, STEPS - 1)
    return float(train.sync(state).params["s"])


@pytest.mark.full
def test_other_lives(run_ranks: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "saved")
    assert any("params.w" in line for line in run_ranks(2, other_lives, path)[0])
    for sizes in [(4, 1), (2, 2), (1, 1)]:
        assert len(set(run_ranks(sizes[0] * sizes[1], resumed, path, sizes))) == 1


def test_fragments_meet_once_each() -> None:
    for every, fragments in [(1, 1), (5, 5), (100, 7), (4, 3)]:
        spec = fz.local_sgd(every=every, fragments=fragments)
        due = [spec.due(t) for t in range(1, 2 * every + 1)]
        assert due[:every] == due[every:] and sorted(i for at in due[:every] for i in at) == list(range(fragments))
    params = {f"l{i}": torch.ones(10 * (i + 1)) for i in range(9)}
    split = fz.local_sgd(fragments=3).slots(params)["anchor"]
    sizes = [sum(x.numel() for x in tree.leaves(part)) for part in split]
    assert sum(sizes) == 450 and min(sizes) > 100
    assert [len(tree.leaves(part)) for part in fz.local_sgd(fragments=3).slots({"w": torch.ones(3)})["anchor"]].count(
        1
    ) == 1


def test_the_plan_has_a_sync() -> None:
    params = {"w": torch.empty(4096, 4096, device="meta")}
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), optim.sgd(0.1))
    step = fz.compose(fz.shard_params(), fz.local_sgd(every=50))(step)
    mesh = fz.AbstractMesh(replica=4, data=8)
    lowered = fz.lower(step, mesh, params, torch.empty(2, 4096, device="meta"), device="h100")
    assert not [line for line, _ in lowered.program.walk() if "replica" in line.axes]
    (outer,) = lowered.outer
    assert outer.program.mesh.axes == {"replica": 4}
    sent = sum(channel.bytes for channel in outer.plan.channels.values())
    assert sent == pytest.approx(2 * 3 / 4 * 4096**2 / 8 * 130 / 256, rel=1e-3)
    (decision,) = [x for x in lowered.plan.decisions if "local_sgd" in x.what]
    assert decision.chosen == "every 50 steps" and decision.what.endswith("over replica")


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"axis": 3}, "the name of one axis"),
        ({"outer": 0.7}, "an optimizer"),
        ({"outer": optim.lamb(1e-2)}, "depends on others"),
        ({"outer": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0))}, "depends on others"),
        ({"every": 0}, "every"),
        ({"fragments": 3, "every": 2}, "more than every"),
        ({"wire": "int2"}, "int2"),
    ],
    ids=["axis", "outer", "lamb", "clip", "every", "fragments", "wire"],
)
def test_arguments_that_are_wrong(bad: dict[str, Any], text: str) -> None:
    with pytest.raises((FzeroTypeError, FzeroValueError), match=text):
        fz.local_sgd(**bad)


@pytest.mark.parametrize(
    "other",
    [
        fz.data_parallel(axis="replica"),
        fz.shard_params(axis=("data", "replica")),
        fz.tensor_parallel(axis="replica"),
        fz.once_a_step(axis="replica"),
        fz.redundant(axis="data"),
        fz.pipeline(),
        fz.mixed_precision("fp16"),
        fz.compress(axis="replica"),
        fz.local_sgd(every=7),
    ],
    ids=str,
)
def test_transforms_that_it_refuses(other: Any) -> None:
    with pytest.raises(TransformError, match="local_sgd"):
        fz.compose(other, fz.local_sgd())(plain())


def test_other_refusals() -> None:
    with pytest.raises(FzeroValueError, match="unknown mesh axis"):
        fz.lower(composed("shard_params"), fz.AbstractMesh(data=2), first(12), {"x": torch.zeros(4, 16)})
    with pytest.raises(TransformError, match="this rank's replica"):
        fz.local_sgd(fz.eval_step(loss_fn))


def lives() -> dict[str, Any]:
    """A state in the hands of two steps in turn, and of steps that are not of its kind."""
    mesh = fz.make_mesh(replica=2, data=1)

    def made(**options: Any) -> Any:
        return fz.compile(composed("shard_params", **{"every": 4, "wire": None, **options}), mesh, backend="eager")

    first_train, second = made(), made()
    state, metrics = trained(mesh, first_train, first_train.init(first(12)), (2, 1), STEPS - 3)
    batch = {"x": batches(2, 1)[0][mesh.index("replica")]["x"]}
    for train in (second, second, first_train, second, first_train):
        state, found = train(state, batch)
        metrics.append(found)
    said = {}
    others = {
        "fragments": made(fragments=4),
        "stateless": made(outer=optim.sgd(1.0)),
        "plain": fz.compile(fz.data_parallel(plain()), fz.make_mesh(data=2), backend="eager"),
    }
    for name, other in others.items():
        with pytest.raises(FzeroValueError, match="laid out for another step") as caught:
            other(state, batch)
        said[name] = str(caught.value)
    cut = fz.compile(fz.shard_params(plain()), fz.make_mesh(data=2), backend="eager")
    state, _ = first_train(state, batch)
    with pytest.raises(DivergenceError, match=r"(?s)params\.w.*train\.sync"):
        fz.reshard(state, cut)  # which would take half of each replica
    state = first_train.sync(state)
    held = state.params["w"].clone()
    same = torch.equal(cut.gather(fz.reshard(state, cut)).params["w"], held)
    return {"met": [i for i, x in enumerate(metrics) if "outer_loss" in x], "said": said, "same": same}


def test_a_state_goes_from_step_to_step(run_ranks: Any) -> None:
    for found in run_ranks(2, lives):
        assert found["met"] == [3, 7] and found["same"]
        assert "extras['anchor']" in found["said"]["fragments"]
        assert "extras['outer'][0][0].trace['w']: in the state, not in this step" in found["said"]["stateless"]
        assert "extras['anchor'][0]['w']: in the state, not in this step" in found["said"]["plain"]


def far(stage: str) -> list[float]:
    """The distances of a few syncs; one parameter is empty."""
    mesh = fz.make_mesh(replica=2, data=2)
    step = fz.train_step(lambda p, x: loss_fn(p, x) + p["none"].sum(), optim.adamw(1e-2))
    step = fz.compose(STAGES[stage](), fz.local_sgd(every=3, wire=None))(step)
    train = fz.compile(step, mesh, backend="eager")
    _, metrics = trained(mesh, train, train.init({**first(12), "none": torch.zeros(0, 3)}), (2, 2))
    return [float(x["outer_loss"]) for x in metrics if "outer_loss" in x]


@pytest.mark.full
def test_the_distance_is_that_of_all_parts(run_ranks: Any) -> None:
    step = fz.train_step(loss_fn, optim.adamw(1e-2))
    ends = [step.init(first(12)) for _ in range(2)]
    for given in batches(2, 2)[:3]:
        ends = [step(end, batch)[0] for end, batch in zip(ends, given, strict=True)]
    expected = sum((end.params[n] - x).square().sum() / 4 for n, x in first(12).items() for end in ends)
    for stage in ("data_parallel", "shard_opt_state", "shard_params"):
        ranks = run_ranks(4, far, stage)
        assert len({tuple(found) for found in ranks}) == 1 and len(ranks[0]) == 2
        assert ranks[0][0] == pytest.approx(float(expected), rel=1e-5)


def unequal(steps: int, every: int) -> str:
    mesh = fz.make_mesh(replica=2, data=1, timeout=60)
    train = fz.compile(composed("shard_params", every=every, wire=None), mesh, backend="eager")
    state, given = train.init(first(12)), batches(2, 1)[0][mesh.index("replica")]
    with pytest.raises(DivergenceError) as caught:
        for _ in range(steps + mesh.rank):
            state, _ = train(state, given)
        train.sync(state)
    return str(caught.value)


@pytest.mark.full(keep=["2-5"])
@pytest.mark.parametrize(("steps", "every"), [(2, 5), (20, 21)])
def test_replicas_with_different_numbers_of_batches(run_ranks: Any, steps: int, every: int) -> None:
    for text in run_ranks(2, unequal, steps, every, timeout=30):
        assert f"rank 0: meets replicas behind {steps} steps" in text and "the ranks do different things" in text


def stopped() -> list[str]:
    """Ctrl-C on one rank in the middle of a sync."""
    mesh = fz.make_mesh(replica=2, data=1, timeout=30)
    train = fz.compile(composed("shard_params", every=2, wire=None), mesh, backend="eager")
    state, given = train.init(first(12)), batches(2, 1)[0][mesh.index("replica")]
    state, _ = train(state, given)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 0:
            patch.setattr(Wandered, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(2):
            try:
                state, _ = train(state, given)
            except (KeyboardInterrupt, DivergenceError, FzeroValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_end_in_the_middle_of_a_sync_is_every_ranks(run_ranks: Any) -> None:
    began = time.monotonic()
    ranks = run_ranks(2, stopped, timeout=60)
    assert time.monotonic() - began < 25, "no rank waits for the timeout of the mesh"
    assert ranks[0][0].startswith("KeyboardInterrupt") and "ended in the middle" in ranks[0][1]
    assert len(ranks[1]) == 1 and "KeyboardInterrupt" in ranks[1][0]


def ill() -> tuple[float, list[str]]:
    """The second replica has a batch that is not a number."""
    mesh = fz.make_mesh(replica=2, data=1)
    train = fz.compile(composed("shard_params", every=2, wire="int4"), mesh, backend="eager")
    state = train.init(first(256))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t, given in enumerate(batches(2, 1)):
            state, _ = train(state, {"x": given[mesh.index("replica")]["x"] * (math.nan if t == mesh.rank else 1)})
    return float(state.params["w"].isnan().float().mean()), [str(x.message) for x in caught]


def test_each_replica_says_that_it_is_not_finite(run_ranks: Any) -> None:
    for rank, (share, said) in enumerate(run_ranks(2, ill)):
        assert share == 1.0 and len(said) == 1
        assert f"step {rank + 1} was the first" in said[0] and "float32[16, 256]" in said[0]


def test_it_is_not_the_plain_step() -> None:
    with pytest.raises(FzeroValueError, match="another algorithm"):
        fz.testing.check_equivalent(composed("shard_params"), first(12), {"x": torch.zeros(4, 16)}, fz.make_mesh())


def in_a_run(replicas: int) -> str:
    def main(run: Any) -> str:
        train = fz.compile(composed("shard_params"), run.mesh, backend="eager")
        with pytest.raises(FzeroValueError, match="states of their own") as caught:
            run.state(train, first(12))
        return str(caught.value)

    return fz.run(main, device="cpu", replica=replicas, data=1)


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_refuses_it(run_ranks: Any, replicas: int) -> None:
    """On one rank too, before there are two."""
    assert all("train.sync" in text for text in run_ranks(replicas, in_a_run, replicas))


@pytest.mark.full
def test_a_budget_holds_a_sync_too() -> None:
    params = {f"w{i}": torch.empty(2048, 2048, device="meta") for i in range(16)}

    @fz.block
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params.values():
            x = layer(w, x)
        return x.square().mean()

    def peak(fragments: int, budget: str) -> int:
        step = fz.compose(
            fz.shard_params(),
            fz.remat("full"),
            fz.offload("cpu", ("opt_state", "params")),
            fz.local_sgd(fragments=fragments, wire=None),
        )(fz.train_step(loss, optim.adamw(1e-3)))
        mesh, batch = fz.AbstractMesh(replica=2, data=4), torch.empty(8, 2048, device="meta")
        return fz.lower(step, mesh, params, batch, device="h100", memory_budget=budget).plan.peak_bytes

    with pytest.raises(BudgetError, match="fragments") as caught:
        peak(1, "150MB")
    assert "the sync of replicas does not fit" in str(caught.value)
    assert peak(16, "150MB") < 150e6 and peak(1, "600MB") < 600e6
