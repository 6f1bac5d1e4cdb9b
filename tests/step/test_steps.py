"""Steps as a user meets them: weighted losses, auxiliary values, keys, evaluation, init, memory at rest, restore."""

from __future__ import annotations

from typing import Any

import models
import pytest
import tensor
import torch
import torch.nn.functional as F
from models import STAGES, batches, part

import fzero as fz
from fzero import checkpoint, optim
from fzero.errors import CheckpointError, TraceError
from fzero.testing.simulate import simulated


def compiled(
    loss: Any, mesh: fz.Mesh, stage: int = 3, accumulate: int = 1, optimizer: Any = None, **kwargs: Any
) -> fz.CompiledStep:
    step = STAGES[stage](fz.train_step(loss, optimizer or optim.sgd(0.5), **kwargs))
    return fz.compile(fz.accumulate(step, accumulate) if accumulate > 1 else step, mesh, backend="eager")


# weighted losses


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-0.5, 0.5, 20).view(5, 4)}


def ragged_batch() -> dict[str, torch.Tensor]:
    """12 rows, of which row i counts i % 5 times: no two parts have the same count."""
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randint(0, 4, (12,), generator=generator),
        "times": torch.arange(12) % 5,
    }


def weighted_loss(p, batch):
    losses = F.cross_entropy(batch["x"] @ p["w"], batch["y"], reduction="none")
    right = ((batch["x"] @ p["w"]).argmax(1) == batch["y"]).float() * batch["times"]
    aux = {
        "accuracy": fz.weighted(right.sum(), batch["times"].sum()),
        "largest": losses.max(),
        "rows": fz.weighted(losses.sum(), len(losses)),
    }
    return fz.weighted((losses * batch["times"]).sum(), batch["times"].sum()), aux


def mean_loss(p, batch):
    loss, aux = weighted_loss(p, batch)
    return loss.total / loss.count, aux


def run_weighted(num_ranks: int, stage: int, accumulate: int, loss: Any) -> Any:
    """One rank is compiled, more are simulated."""
    if num_ranks == 1:
        train = compiled(loss, fz.make_mesh(), stage, accumulate, has_aux=True)
        state, metrics = train(train.init(weights()), ragged_batch())
        return metrics, train.gather(state).params["w"]
    step = fz.accumulate(STAGES[stage](fz.train_step(loss, optim.sgd(0.5), has_aux=True)), accumulate)
    state, metrics = fz.testing.simulate(step, fz.AbstractMesh(data=num_ranks), weights(), ragged_batch())
    return metrics, state.params["w"]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "accumulate"), [(1, 1, 1), (1, 3, 2), (3, 0, 1), (3, 1, 2), (3, 2, 1), (3, 3, 2)]
)
def test_weighted_losses_are_exact_means(num_ranks, stage, accumulate):
    step = fz.train_step(weighted_loss, optim.sgd(0.5), has_aux=True)
    state, want = step(step.init(weights()), ragged_batch())
    batch = ragged_batch()
    losses = F.cross_entropy(batch["x"] @ weights()["w"], batch["y"], reduction="none")
    torch.testing.assert_close(want["loss"], (losses * batch["times"]).sum() / batch["times"].sum())
    metrics, w = run_weighted(num_ranks, stage, accumulate, weighted_loss)
    torch.testing.assert_close(metrics["loss"], want["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["grad_norm"], want["grad_norm"], rtol=1e-5, atol=0)
    torch.testing.assert_close(metrics["aux"]["accuracy"], want["aux"]["accuracy"], rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["aux"]["rows"], want["aux"]["rows"], rtol=1e-6, atol=0)
    torch.testing.assert_close(w, state.params["w"], rtol=1e-5, atol=1e-6)
    chunks = torch.stack([c.max() for c in losses.chunk(num_ranks * accumulate)])
    # what is not weighted is averaged over the parts
    torch.testing.assert_close(metrics["aux"]["largest"], chunks.mean())


def test_a_mean_of_means_is_another_number():
    """What fz.weighted is for: the same loss as a mean on each rank comes out wrong by far more than rounding."""
    step = fz.train_step(weighted_loss, optim.sgd(0.5), has_aux=True)
    _, want = step(step.init(weights()), ragged_batch())
    metrics, _ = run_weighted(2, 3, 2, mean_loss)
    assert abs(metrics["loss"] - want["loss"]) > 3e-4


# keys


def dropout_loss(p, batch, *, key):
    first, second = fz.random.split(key, 2)
    x = fz.random.dropout(first, batch["x"] @ p["w"], 0.4)
    x = fz.random.dropout(second, torch.tanh(x) + 1.0, 0.2)
    return (x**2).mean()


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (0, 2), (3, 1), (3, 2)])
def test_masks_do_not_depend_on_the_mesh(stage, accumulate):
    step, params = fz.train_step(dropout_loss, optim.sgd(0.5)), {"w": weights()["w"]}
    batch, key = {"x": ragged_batch()["x"]}, fz.random.key(7)
    state, want = step.init(params, key), []
    for _ in range(5):
        state, metrics = step(state, batch)
        want.append(metrics["loss"])
    assert len({w.item() for w in want}) == 5  # a new mask every step
    transformed, mesh = fz.accumulate(STAGES[stage](step), accumulate), fz.AbstractMesh(data=3)
    _, *steps = simulated(transformed, mesh, params, batch, 5, key)
    # one flipped bit of a mask moves a loss by 1e-2
    losses = torch.stack([metrics["loss"] for _, metrics in steps])
    torch.testing.assert_close(losses, torch.stack(want), rtol=1e-5, atol=0)
    torch.testing.assert_close(steps[-1][0].params["w"], state.params["w"], rtol=1e-5, atol=1e-6)


def mask_loss(p, batch, *, key):
    kept = fz.random.dropout(key, torch.ones(batch["x"].shape[0], 3), 0.5)
    code = ((kept > 0).float() * torch.tensor([1.0, 2.0, 4.0])).sum(1)
    return (p["w"] * 0).sum() + 1.0, fz.weighted((code * batch["place"]).sum(), 1.0)


@pytest.mark.parametrize(("num_ranks", "accumulate"), [(1, 2), (2, 1), (3, 1), (3, 2)])
def test_masks_are_bit_equal(num_ranks, accumulate):
    """The whole mask as one number of 18 bits."""
    step = fz.train_step(mask_loss, optim.sgd(0.5), has_aux=True)
    params = {"w": weights()["w"]}
    batch = {"x": ragged_batch()["x"][:6], "place": 8.0 ** torch.arange(6)}
    _, metrics = step(step.init(params), batch)
    assert 0 < metrics["aux"] < 2**18
    transformed = fz.accumulate(fz.shard_params(step), accumulate)
    _, found = fz.testing.simulate(transformed, fz.AbstractMesh(data=num_ranks), params, batch)
    assert (found["aux"] * num_ranks * accumulate).round() == metrics["aux"]  # every part counts 1


# evaluation


def predict(p, batch):
    x = models.embed(p["embed"], batch["tokens"])
    for q in p["layers"]:
        x = models.layer(q, x)
    logits = x @ p["head"]["out"].T
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")
    return {"logits": logits, "loss": fz.weighted(losses.sum(), losses.numel()), "first": batch["tokens"][0, 0]}


def evaluation(stage: int, precision: bool) -> Any:
    return fz.compose(STAGES[stage], *([fz.mixed_precision("bf16")] if precision else []))


def run_eval(stage: int, precision: bool) -> Any:
    """A rank of real ones: what it evaluates before a step and after it, and the parameters then."""
    mesh, transform = fz.make_mesh(data=-1), evaluation(stage, precision)
    train = fz.compile(transform(fz.train_step(models.gpt_loss, optim.adamw(1e-2))), mesh, backend="eager")
    evaluate = fz.compile(transform(fz.eval_step(predict)), mesh, backend="eager")
    state = train.init(models.gpt_init, fz.random.key(0))
    batch = part(batches(1)[0], mesh)
    outputs = [evaluate(state.params, batch)]
    state, _ = train(state, batch)
    outputs.append(evaluate(state.params, batch))
    return outputs, train.gather(state).params


def simulate_eval(stage: int, precision: bool) -> Any:
    """The same of two simulated ranks."""
    mesh, transform, batch = fz.AbstractMesh(data=2), evaluation(stage, precision), batches(1)[0]
    params = models.gpt_init(fz.random.key(0))
    step = transform(fz.train_step(models.gpt_loss, optim.adamw(1e-2)))
    trained = fz.testing.simulate(step, mesh, params, batch)[0].params
    found = [tensor.evaluated(transform(fz.eval_step(predict)), mesh, p, batch) for p in (params, trained)]
    return [(outputs, trained) for outputs in zip(*found, strict=True)]


@pytest.mark.full(keep=["0-True-simulated", "3-False-simulated"])
@pytest.mark.parametrize(
    ("stage", "precision", "ranks"),
    [
        (0, True, "simulated"),
        (1, False, "simulated"),
        (3, False, "simulated"),
        (3, True, "real"),
    ],
)
def test_evaluation(run_ranks, stage, precision, ranks):
    whole = batches(1)[0]
    found = run_ranks(2, run_eval, stage, precision) if ranks == "real" else simulate_eval(stage, precision)
    for rank, ((before, after), params) in enumerate(found):
        tolerance = 0.1 if precision else 1e-5
        for outputs, at in ((before, models.gpt_init(fz.random.key(0))), (after, params)):
            want = fz.eval_step(predict)(at, whole)
            # this rank's own
            torch.testing.assert_close(
                outputs["logits"].float(), want["logits"].chunk(2)[rank], rtol=tolerance, atol=tolerance
            )
            # over the mesh
            torch.testing.assert_close(outputs["loss"], want["loss"], rtol=1e-2 if precision else 1e-6, atol=0)
            assert outputs["first"] == whole["tokens"].chunk(2)[rank][0, 0]
            assert outputs["logits"].dtype == torch.float32  # `outputs` of mixed_precision
        assert not torch.equal(before["logits"], after["logits"])


def test_an_evaluation_returns_a_total_and_means_of_it():
    def found(p, x):
        total = (x @ p["w"]).sum()
        return {"total": total, "mean": fz.weighted(total, len(x)), "half": fz.weighted(total, 2 * len(x))}

    p, x = weights(), ragged_batch()["x"]
    whole, evaluation = (x @ p["w"]).sum(), fz.shard_params(fz.eval_step(found))
    for rank, at in enumerate(tensor.evaluated(evaluation, fz.AbstractMesh(data=3), p, x)):
        wanted = {"total": (x.chunk(3)[rank] @ p["w"]).sum(), "mean": whole / 12, "half": whole / 24}
        torch.testing.assert_close(at, wanted)


# init


def init_fn(key):
    a, b, c = fz.random.split(key, 3)
    shared = fz.random.normal(a, (33, 5)) * 0.1
    return {
        "shared": [shared, shared],
        "uniform": fz.random.uniform(b, (7,)) + 1.0,
        "scalar": fz.random.normal(c, ()),
        "ones": torch.ones(5, 3),
        "ramp": torch.linspace(0, 1, 11),
        "order": torch.arange(8),
        "triangle": torch.tril(fz.random.normal(c, (6, 6))),
    }


def init_loss(p, x):
    return (
        (p["shared"][0] * p["shared"][1]).sum()
        + p["triangle"].sum() * p["scalar"]
        + p["uniform"].sum()
        + p["ones"].sum()
        + p["ramp"].sum()
        + x.mean()
    )


def run_init(stage: int) -> Any:
    mesh, key = fz.make_mesh(data=-1), fz.random.key(11)
    train = compiled(init_loss, mesh, stage, optimizer=optim.adamw(1e-2))
    return train.gather(train.init(init_fn, key)), train.gather(train.init(init_fn(key), key))


@pytest.mark.full(keep=["1"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_init_of_a_function_of_a_tree_and_of_the_plain_step_are_one(run_or_call, num_ranks):
    key = fz.random.key(11)
    want = fz.train_step(init_loss, optim.adamw(1e-2)).init(init_fn, key)
    for stage in (1, 3):
        for pair in run_or_call(num_ranks, run_init, stage):
            for got in pair:
                assert fz.tree.paths(got) == fz.tree.paths(want)
                for path, a, b in zip(fz.tree.paths(want), fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
                    assert a.dtype == b.dtype and torch.equal(a, b), path
                assert got.params["shared"][0] is got.params["shared"][1]


def big_init(key):
    a, b = fz.random.split(key, 2)
    return {
        "w": fz.random.normal(a, (300, 100)) * 0.02,
        "v": [fz.random.normal(b, (200, 100)).abs() + 1.0, torch.zeros(250, 100)],
    }


def run_birth() -> tuple[int, list[int]]:
    from fzero._compat.compat import FakeTensor, TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in fz.tree.leaves(out):
                if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and x.device.type == "cpu":
                    self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
            return out

    mesh = fz.make_mesh(data=-1)
    train = compiled(lambda p, x: p["w"].sum() * x.mean(), mesh, 3, optimizer=optim.adamw(1e-2))
    with Largest() as seen:
        state = train.init(big_init, fz.random.key(0))
    return seen.numel, [x.numel() for x in fz.tree.leaves(state)]


def test_draws_are_made_shard_by_shard(run_ranks):
    for largest, leaves in run_ranks(3, run_birth):
        assert largest == max(leaves) == 10_240  # a third of a leaf of 30,000, in whole blocks of 256


def test_a_global_generator_is_refused():
    train = compiled(init_loss, fz.make_mesh(data=1))
    with pytest.raises(TraceError) as raised:
        train.init(lambda key: {"w": torch.randn(3, 3)})
    assert "randn" in str(raised.value) and "fz.random" in str(raised.value) and "Fix:" in str(raised.value)


# bytes at rest


def run_resting(stage: int, precision: bool) -> dict[str, int]:
    mesh = fz.make_mesh(data=-1)
    transform = fz.compose(STAGES[stage], *([fz.mixed_precision("bf16")] if precision else []))
    train = fz.compile(transform(fz.train_step(models.mixed_loss, optim.adamw(1e-2))), mesh, backend="eager")
    state = train.init(lambda key: models.mixed_init(key, 48), fz.random.key(0))
    state, _ = train(state, part(batches(1)[0], mesh))
    live = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves(state)}
    return {
        "bytes": sum(live.values()),
        "params": sum(x.numel() for x in fz.tree.leaves(models.mixed_init(fz.random.key(0), 48))),
    }


@pytest.mark.full
def test_bytes_at_rest(run_ranks):
    """Read off the storages of the live state after a step; 1 % is for padding, counters and the key."""
    for stage, precision in ((0, False), (1, True), (1, False), (2, False), (2, True), (3, False), (3, True)):
        for seen in run_ranks(3, run_resting, stage, precision):
            per_param = 12.0 if stage == 0 else 12.0 / 3 if precision or stage == 3 else 4 + 8 / 3
            want = per_param * seen["params"]
            assert 0.999 * want <= seen["bytes"] <= 1.01 * want, (stage, precision, seen["bytes"] / seen["params"])


# restore


def run_save(path: str, stage: int, num_steps: int) -> Any:
    mesh = fz.make_mesh(data=-1)
    train = compiled(
        models.mixed_loss, mesh, stage, optimizer=optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(1e-2))
    )
    state = train.init(models.mixed_init, fz.random.key(5))
    for batch in batches(num_steps):
        state, _ = train(state, part(batch, mesh))
    checkpoint.save(path, state)
    return train.gather(state)


def run_restore(path: str, stage: int, num_steps: int = 0) -> Any:
    mesh = fz.make_mesh(data=-1)
    train = compiled(
        models.mixed_loss, mesh, stage, optimizer=optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(1e-2))
    )
    state = train.restore(path)
    restored = train.gather(state)
    for batch in batches(num_steps, seed=1):
        state, _ = train(state, part(batch, mesh))
    return restored, train.gather(state)


def same(a: Any, b: Any) -> bool:
    return fz.tree.paths(a) == fz.tree.paths(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(fz.tree.leaves(a), fz.tree.leaves(b), strict=True)
    )


def test_two_ranks_save_and_three_restore(run_ranks, tmp_path):
    """Bit for bit, onto another stage, and training goes on from it. All layouts: tests/checkpoint/test_layouts.py."""
    path = str(tmp_path / "checkpoint")
    (want, *_) = run_ranks(2, run_save, path, 1, 3)
    results = run_ranks(3, run_restore, path, 2, 2)
    for got, later in results:
        assert same(got, want)
        assert later.step == 5 and same(later, results[0][1])
        assert not torch.equal(later.params["token"], want.params["token"])


def test_a_plain_state_is_saved_and_restored(run_ranks, tmp_path):
    step = fz.train_step(models.mixed_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(1e-2)))
    state = step.init(models.mixed_init, fz.random.key(5))
    for batch in batches(2):
        state, _ = step(state, batch)
    checkpoint.save(str(tmp_path / "plain"), state)
    for got, _ in run_ranks(2, run_restore, str(tmp_path / "plain"), 3):
        assert same(got, state)


def test_another_models_leaves_are_all_listed(tmp_path):
    step = fz.train_step(models.mixed_loss, optim.sgd(0.1))
    checkpoint.save(str(tmp_path / "other"), step.init(models.mixed_init, fz.random.key(5)))
    other = models.mixed_init(fz.random.key(5))
    other["token"] = torch.zeros(models.VOCAB, 11)
    other["more"] = torch.zeros(2)
    del other["gate"]
    train = fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")
    with pytest.raises(CheckpointError) as raised:
        train.restore(str(tmp_path / "other"), params=other)
    assert all(
        name in str(raised.value) for name in ("params.token", "params.more", "params.gate")
    ) and "params.bias" not in str(raised.value)


# what a state shows of itself


def test_a_state_shows_its_step_and_its_size_instead_of_all_values() -> None:
    """Of a compiled step, of a plain one, and of shards; a tied parameter counts once."""
    w = torch.ones(1000, 1024)
    step = fz.train_step(lambda p, x: (x @ p["w"] @ p["tied"].T).square().mean(), optim.adamw(1e-3))
    state = fz.shard_params(step).init({"w": w, "tied": w})
    said = "1,024,000 parameters; params 3.9 MiB, opt_state 7.8 MiB; 11.7 MiB on cpu"
    assert repr(state) == f"State(step=0, {said})" == str(state)
    train = fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init({"w": w, "tied": w}), torch.ones(2, 1000))
    assert repr(state) == f"State(step=1, {said})"
    # anything else is shown as a NamedTuple is
    shapes = fz.tree.map(lambda x: tuple(x.shape), state)
    assert repr(shapes).startswith("State(step=(), params={'w': (1000, 1024), 'tied': (1000, 1024)}, opt_state=")
    meta = fz.tree.map(lambda x: x.to("meta"), state)
    assert repr(meta).startswith("State(1,024,000 parameters; ") or "on meta" in repr(meta)


def test_a_compiled_step_shows_its_mesh_and_transforms() -> None:
    mesh = fz.make_mesh(data=1)
    step = fz.compose(fz.shard_params(), fz.accumulate(2))(
        fz.train_step(lambda p, x: (x @ p["w"]).sum(), optim.sgd(0.1))
    )
    train = fz.compile(step, mesh, backend="eager")
    assert repr(train) == (
        f"<CompiledStep on mesh data=1 of {mesh.device.type}, eager, accumulate(num_micro_batches=2), "
        "shard_params(axis='data')>"
    )
    evaluate = fz.compile(fz.eval_step(lambda p, x: x @ p["w"]), mesh, backend="eager")
    assert repr(evaluate) == f"<CompiledEval on mesh data=1 of {mesh.device.type}, eager>"


def _sharded_state() -> str:
    step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), optim.adamw(1e-3)))
    train = fz.compile(fz.offload("cpu", "opt_state")(step), fz.make_mesh(unified_memory=False), backend="eager")
    return repr(train.init({"w": torch.ones(1024, 1024)}))


def test_a_sharded_state_shows_what_a_rank_holds_and_where(run_ranks: Any) -> None:
    for rank, said in enumerate(run_ranks(2, _sharded_state)):
        sizes = "params 2.0 MiB, opt_state 4.0 MiB; 2.0 MiB on cpu, 4.0 MiB on host"
        assert said == f"State(step=0, 1,048,576 parameters; {sizes} of rank {rank} of 2)"
