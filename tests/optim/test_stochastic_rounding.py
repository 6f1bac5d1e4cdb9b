"""Stochastic rounding: what it draws, that the mean is kept, and that a run without masters is the same on every mesh,
tier and backend."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import STAGES

import fzero as fz
from fzero import optim
from fzero.optim import stochastic_round


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 numbers next to float32 ones, towards zero and away from it."""
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    return below, (below.view(torch.int32) + 65536).view(torch.float32)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50), st.integers(0, 2**32)
)
def test_only_the_two_neighbours_occur(values, seed):
    x = torch.tensor(values, dtype=torch.float32)
    rounded = stochastic_round(fz.random.key(seed), x).float()
    below, above = neighbours(x)
    exact = x == below
    assert torch.equal(rounded[exact], x[exact])
    assert bool(((rounded == below) | (rounded == above)).all())


def test_the_mean_is_kept():
    """Of 2^16 draws the mean is within five standard errors of what was rounded, at every scale and for both signs."""
    n = 1 << 16
    for i, value in enumerate([1.001, -1.001, 3.14159, -2.7e-5, 1e30, 1.5e-39, 0.9999]):
        x = torch.full((n,), value)
        rounded = stochastic_round(fz.random.key(i), x).double()
        below, above = (v[0].item() for v in neighbours(x))
        share = abs((x[0].item() - below) / (above - below))
        got = (rounded == above).double().mean().item()
        assert abs(got - share) < 5 * (share * (1 - share) / n) ** 0.5, (value, got, share)
    nearest = torch.full((n,), 1.001).bfloat16().double().mean()
    assert nearest == 1.0  # which is what is lost otherwise


def test_what_is_not_finite_stays_so_and_wrong_dtypes_are_named():
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    # NaN whose high or low bits alone say so
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(1 << 23) + 1], dtype=torch.int32).view(torch.float32)
    for seed in range(20):
        rounded = stochastic_round(fz.random.key(seed), special)
        assert (
            torch.equal(rounded[:2].float(), special[:2])
            and rounded[2].isnan()
            and rounded[3:].view(torch.int16).tolist() == [0, -(1 << 15)]
        )
        assert stochastic_round(fz.random.key(seed), odd).isnan().all()
    largest = stochastic_round(fz.random.key(0), torch.full((1000,), torch.finfo(torch.float32).max))
    assert largest.isinf().any() and set(largest.float().tolist()) <= {torch.finfo(torch.bfloat16).max, float("inf")}
    with pytest.raises(fz.errors.FzeroTypeError, match="rounds float32, not"):
        stochastic_round(fz.random.key(0), torch.ones(2, dtype=torch.float64))


def test_a_part_draws_what_the_whole_draws():
    x, key = fz.random.normal(fz.random.key(3), (1000,)), fz.random.key(4)
    whole = stochastic_round(key, x)
    assert torch.equal(stochastic_round(key, x[300:777], start=300, numel=1000), whole[300:777])
    tree = {"a": torch.ones(7, 3, dtype=torch.bfloat16), "b": torch.ones(11), "c": torch.ones(5, dtype=torch.bfloat16)}
    updates = fz.tree.map(lambda p: torch.full(p.shape, 2e-3), tree)
    new = optim.apply_updates(tree, updates, key)
    assert torch.equal(new["b"], torch.full((11,), 1.002))
    assert torch.equal(new["c"], stochastic_round(key, torch.full((5,), 1.002), start=32, numel=37))


# --- steps: sums are exact here, so that what remains to differ is what is drawn ---


def init(key: torch.Tensor) -> Any:
    keys = fz.random.split(key, 3)
    return {
        "layers": [{"w": fz.random.normal(k, (9, 7)), "b": torch.ones(3)} for k in keys[:2]],
        "last": fz.random.normal(keys[2], (13,)),
        "one": torch.ones(1),
    }


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x[:, None, None]).sum() + (p["b"] * x[:, None]).sum()


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Linear: the gradient of every element is the sum of a batch of small whole numbers over a power of 2."""
    total = sum((layer(p, x) for p in params["layers"]), torch.zeros(()))
    return (total + (params["last"] * x[:, None]).sum() + (params["one"] * x[:, None]).sum()) / x.numel()


def run_cases(cases: list[dict[str, Any]], rounding: str = "stochastic") -> list[Any]:
    mesh = fz.make_mesh(data=-1)
    return [run_case(mesh, rounding=rounding, **case) for case in cases]


def run_case(
    mesh: fz.Mesh,
    stage: int,
    accumulate: int = 1,
    tier: str = "",
    remat: str = "",
    backend: str = "eager",
    rounding: str = "stochastic",
) -> Any:
    more = [fz.accumulate(accumulate)] if accumulate > 1 else []
    more += [fz.offload(tier, ("opt_state", "params"))] if tier else []
    more += [fz.remat(remat)] if remat else []
    precision = fz.mixed_precision("fp32", params="bf16", rounding=rounding)
    step = fz.compose(STAGES[stage], precision, *more)(fz.train_step(loss_fn, optim.adam(3e-3)))
    train = fz.compile(step, mesh, backend=backend)
    state = train.init(init, fz.random.key(5))
    for i in range(5):
        x = torch.tensor([3.0, -1.0, 2.0, 4.0, 1.0, -2.0, 1.0, 8.0]).roll(i) * (i + 1)
        size = 8 // mesh.axis_size("data")
        state, _ = train(state, x[mesh.index("data") * size :][:size])
    return train.gather(state)


OTHERS = [{"stage": 1, "tier": "cpu"}, {"stage": 3, "accumulate": 2, "remat": "full"}, {"stage": 3, "tier": "cpu"}]
CASES = {  # every stage once without and once with micro-batches
    1: [*({"stage": stage, "accumulate": 1 + stage % 2} for stage in STAGES), OTHERS[2]],
    2: [*({"stage": stage, "accumulate": 2 - stage % 2} for stage in STAGES), *OTHERS],
    4: OTHERS[:2],
}


@functools.cache
def alone() -> Any:
    return run_case(fz.make_mesh(data=1), 0)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", CASES)
def test_a_run_is_the_same_on_every_mesh_and_tier(run_ranks, num_ranks):
    """To the bit, on shards that end in padding too."""
    want = alone()
    for results in run_ranks(num_ranks, run_cases, CASES[num_ranks]):
        for case, got in zip(CASES[num_ranks], results, strict=True):
            for path, a, b in zip(fz.tree.paths(want), fz.tree.leaves(want), fz.tree.leaves(got), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), (case, path)
    assert {x.dtype for x in fz.tree.leaves(want.params)} == {torch.bfloat16}
    assert {x.dtype for x in fz.tree.leaves((want.opt_state.mu, want.opt_state.nu))} == {torch.float32}


def test_inductor_draws_the_same(compiled_here):
    got = run_case(fz.make_mesh(data=1), 3, backend="inductor")
    for a, b in zip(fz.tree.leaves(alone().params), fz.tree.leaves(got.params), strict=True):
        assert torch.equal(a, b)


def test_small_updates_add_up_where_nearest_loses_them():
    """Ones with updates of 1/1000 of the distance to a neighbour: a thousand steps move them by one distance in the
    mean, or not at all."""
    distance, num_steps, size = 2.0**-7, 1000, 4096
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), optim.sgd(distance / num_steps))

    def after(rounding: str) -> torch.Tensor:
        train = fz.compile(
            fz.mixed_precision(step, "fp32", params="bf16", rounding=rounding), fz.make_mesh(), backend="eager"
        )
        state = train.init({"w": torch.ones(size)})
        for _ in range(num_steps // 10):
            state, _ = train(state, torch.full((size,), -10.0))
        return state.params["w"].double()

    assert torch.equal(after("nearest"), torch.ones(size, dtype=torch.float64))
    moved = (after("stochastic") - 1) / distance
    assert abs(moved.mean().item() - 1) < 5 * 1.0 / size**0.5  # each element's own has a variance below 1


def test_rounding_is_said_and_contradictions_are_errors():
    assert "rounding='stochastic'" in str(fz.mixed_precision("bf16", params="bf16"))
    assert "rounding" not in str(fz.mixed_precision("bf16"))
    with pytest.raises(fz.errors.FzeroValueError) as error:
        fz.mixed_precision("bf16", rounding="up")
    assert "rounding='up'" in str(error.value) and "params='fp32': nothing is rounded" in str(error.value)
    step = fz.mixed_precision(fz.train_step(loss_fn, optim.sgd(0.1)), "bf16", params="bf16")
    with pytest.raises(fz.errors.TransformError, match="two different mixed_precision"):
        fz.mixed_precision(step, "bf16", params="bf16", rounding="nearest")


@pytest.mark.parametrize("size", [1, 8])
def test_no_draws_are_kept_for_the_whole_model(size):
    """They are part of each block's update, wherever it runs: what is made once for all leaves is few numbers."""
    for tier in ("", "cpu"):
        step = fz.mixed_precision(
            fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-3))), "bf16", params="bf16"
        )
        step = fz.compose(fz.shard_params, *([fz.offload(tier, ("opt_state", "params"))] if tier else []))(step)
        program = fz.lower(
            step, fz.AbstractMesh(data=size, unified_memory=not tier), init, torch.empty(8, device="meta")
        ).program
        made = [v for op, _ in program.walk() if op.op == "call" and op.fn.startswith("scalars") for v in op.out]
        # a key; the smallest leaf's draws are 32 bytes and more
        assert made and max(math.prod(v.shape) * v.dtype.itemsize for v in made) <= 24, made
        draws = {
            name
            for name, f in program.functions.items()
            for n in f.graph.graph.nodes
            if n.target in (fz.random.DRAW, fz.random.DRAW_FROM)
        }
        assert {"update", "update_v2"} <= draws


def test_one_function_updates_all_layers_alike():
    """What tells the leaves apart, and the ranks, is a line's, not a constant of the function."""
    step = fz.shard_params(fz.mixed_precision(fz.train_step(loss_fn, optim.adam(1e-3)), "fp32", params="bf16"))
    for mesh in (fz.AbstractMesh(data=1), fz.AbstractMesh(data=2)):
        program = fz.lower(step, mesh, init, torch.empty(8, device="meta")).program
        starts = [op.attrs.base for op in program.instructions if op.op == "draw_start"]
        assert sorted(starts) == [0, 13, 16, 79, 82, 145]  # last, and of each layer b and w; `one` is the last
        updates = [op.fn for op in program.instructions if any("layers" in w for w in op.writes)]
        assert len(updates) == 2 and len(set(updates)) == 1
