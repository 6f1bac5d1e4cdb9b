"""Blocks of 256 elements, moments in 8 bits, and that neither depends on the mesh."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import STAGES

import fzero as fz
from fzero import optim
from fzero.ops.block_quantization import BLOCK, block_expand, block_max, blocks_shape, granule, has_blocks
from fzero.optim.quantized import POSITIVE, SIGNED, dequantize, quantize
from fzero.plan.memory import resting_bytes
from fzero.sharding.layout import shard_numel

SHAPES = st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.integers(2, 40))
def test_shards_are_whole_blocks_and_as_few_as_can_be(shape, size):
    numel, local = math.prod(shape), shard_numel(shape, size)
    assert local * size >= numel and (local - granule(shape)) * size < numel and local % granule(shape) == 0
    assert shard_numel(shape, 1) == numel
    if has_blocks(shape):
        assert numel >= 16 * BLOCK and local == BLOCK * shard_numel(blocks_shape(shape), size)


@given(st.integers(1, 3000), st.integers(0, 100))
def test_the_numbers_of_blocks(numel, seed):
    x = fz.random.normal(fz.random.key(seed), (numel,))
    chunks = x.split(BLOCK)
    largest = block_max(x)
    assert largest.shape == blocks_shape(x.shape) and torch.equal(
        largest.flatten(), torch.stack([c.max() for c in chunks])
    )
    expanded = block_expand(largest, x.shape)
    assert torch.equal(expanded, torch.cat([c.max().expand(len(c)) for c in chunks]))
    matrix = x[: numel // 2 * 2].reshape(2, -1)
    assert torch.equal(
        block_expand(block_max(matrix), matrix.shape).flatten(),
        block_expand(block_max(matrix.flatten()), (matrix.numel(),)),
    )


@pytest.mark.parametrize("code", [SIGNED, POSITIVE], ids=["signed", "positive"])
def test_an_element_is_off_by_half_a_step(code):
    """A step of the root is 1/127 or 1/255 of the scale's; the derivative of its power says what that is of the
    number."""
    x = fz.random.normal(fz.random.key(1), (64, 100)) * torch.logspace(-6, 3, 100)
    x = x.square() if code is POSITIVE else x
    codes, scales = quantize(code, x)
    assert (codes.dtype, codes.shape, scales.shape) == (code.dtype, x.shape, (25, 1))
    found, scale = dequantize(code, codes, scales), block_expand(scales, x.shape)
    power, steps = (4, 255) if code is POSITIVE else (2, 127)
    root = (x.abs() / scale) ** (1 / power)
    bound = scale * ((root + 0.5 / steps) ** power - root**power) * 1.001
    smallest = scale / steps**power * 1.001  # which the positive code never goes below
    assert bool(((found - x).abs() <= torch.maximum(bound, smallest)).all())
    # the largest of a block is exact
    assert torch.equal(found.abs() == scale, (x.abs() / scale) ** (1 / power) >= 1 - 0.5 / steps)
    assert code is SIGNED or bool((found > 0).all())
    again, same = quantize(code, found)
    assert torch.equal(again, codes) and torch.equal(same, scales)


def test_nothing_and_what_is_not_finite():
    for code in (SIGNED, POSITIVE):
        x = torch.zeros(4096)
        x[300] = float("nan")
        found = dequantize(code, *quantize(code, x))
        # a block of zeros is zeros
        assert found[256:512].isnan().all() and not found[:256].any() and not found[512:].any()


# --- steps: sums are exact here, see tests/optim/test_stochastic_rounding.py ---


def init(key: torch.Tensor) -> Any:
    keys = fz.random.split(key, 3)
    return {
        "layers": [{"w": fz.random.normal(k, (70, 71)), "b": torch.ones(30)} for k in keys[:2]],
        "last": fz.random.normal(keys[2], (64, 64)),
    }


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    rows = (torch.arange(70) % 5 + 1).to(p["w"].dtype)
    return ((p["w"] * rows[:, None]).sum() + p["b"].sum()) * x.sum()


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return sum((layer(p, x) for p in params["layers"]), params["last"].sum() * x.sum()) / x.numel()


def make(stage: int, mesh: fz.Mesh, tier: str = "", backend: str = "eager", accumulate: int = 1) -> Any:
    more = [fz.offload(tier, ("opt_state", "params"))] if tier else []
    more += [fz.accumulate(accumulate)] if accumulate > 1 else []
    step = fz.train_step(loss_fn, optim.adamw(3e-3, state_dtype="int8"))
    return fz.compile(
        fz.compose(STAGES[stage], fz.mixed_precision("fp32", params="bf16"), *more)(step), mesh, backend=backend
    )


def steps(train: Any, state: Any, mesh: fz.Mesh, first: int, last: int) -> Any:
    for i in range(first, last):
        x = torch.tensor([3.0, -1.0, 2.0, 4.0, 1.0, -2.0, 1.0, 8.0]).roll(i) * (i + 1)
        size = 8 // mesh.axis_size("data")
        state, _ = train(state, x[mesh.index("data") * size :][:size])
    return state


CASES = [
    {"stage": 0},
    {"stage": 1, "tier": "cpu"},
    {"stage": 2, "accumulate": 2},
    {"stage": 3},
    {"stage": 3, "tier": "cpu"},
]


def run_cases(path: str, cases: list[dict[str, Any]]) -> list[Any]:
    mesh = fz.make_mesh(data=-1)
    results = []
    for case in cases:
        train = make(mesh=mesh, **case)
        state = steps(train, train.init(init, fz.random.key(5)), mesh, 0, 3)
        if case == {"stage": 3}:
            fz.checkpoint.save(path, state)
        results.append(train.gather(steps(train, state, mesh, 3, 5)))
    return results


def resume(path: str) -> Any:
    mesh = fz.make_mesh(data=-1)
    train = make(1, mesh)
    return train.gather(steps(train, train.restore(path), mesh, 3, 5))


@functools.cache
def alone() -> Any:
    mesh = fz.make_mesh(data=1)
    train = make(0, mesh)
    return train.gather(steps(train, train.init(init, fz.random.key(5)), mesh, 0, 5))


def same(a: Any, b: Any) -> bool:
    pairs = zip(fz.tree.leaves(a), fz.tree.leaves(b), strict=True)
    return fz.tree.structure(a) == fz.tree.structure(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )


@pytest.mark.full
def test_a_run_is_the_same_on_every_mesh(run_ranks, tmp_path: Path):
    """To the bit, over shards that end in the middle of a block or after the leaf, and across a checkpoint from one
    mesh to another."""
    want = alone()
    assert {x.dtype for x in fz.tree.leaves(want.opt_state.nu)} == {torch.uint8, torch.float32}
    assert [x.shape for x in fz.tree.leaves(want.opt_state.mu_scale)] == [(16, 1), (20, 1), (20, 1)] and all(
        x.all() for x in fz.tree.leaves(want.opt_state.nu)
    )
    for num_ranks, cases in ((2, CASES), (4, [{"stage": 3}])):
        for results in run_ranks(num_ranks, run_cases, str(tmp_path / str(num_ranks)), cases):
            for case, got in zip(cases, results, strict=True):
                assert same(got, want), (num_ranks, case)
    for got in run_ranks(4, resume, str(tmp_path / "2")):
        assert same(got, want)


def test_six_bytes_a_parameter_at_rest():
    """2 of a parameter, 1 and 1 of moments, and 2 x 4 a block of 256; of small leaves 10."""
    width, layers = 512, 4

    def many(key: torch.Tensor) -> Any:
        return {
            "layers": [
                {"w": fz.random.normal(k, (width, width)), "b": torch.zeros(width)}
                for k in fz.random.split(key, layers)
            ]
        }

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["layers"]:
            x = torch.tanh(x @ p["w"] + p["b"])
        return x.square().mean()

    step = fz.mixed_precision(
        fz.shard_params(fz.train_step(loss, optim.adamw(1e-3, state_dtype="int8"))), "bf16", params="bf16"
    )
    for size in (1, 8):
        program = fz.lower(step, fz.AbstractMesh(data=size), many, torch.empty(8, width, device="meta")).program
        expected = layers * (width * width * (4 + 8 / 256) + width * 10) / size + 8 + 24 + 8  # step, key, count
        assert resting_bytes(program) == expected < 4.1 * layers * width * width / size


@pytest.mark.full(keep=["eager"])
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_it_trains_as_fp32_does(backend):
    """A teacher of two layers, to within 3 % of the loss that fp32 moments reach, where the loss has fallen a
    hundredfold."""

    def start(key: torch.Tensor) -> Any:
        return {name: fz.random.normal(k, (64, 64)) / 8 for name, k in zip("ab", fz.random.split(key), strict=True)}

    def out(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["a"]) @ p["b"]

    teacher = start(fz.random.key(9))
    data = [fz.random.normal(fz.random.key(i), (256, 64)) for i in range(100)]

    def final(state_dtype: str, backend: str) -> tuple[float, float]:
        step = fz.train_step(
            lambda p, batch: (out(p, batch[0]) - batch[1]).square().mean(),
            optim.adamw(optim.linear(1e-2, 1e-4, 100), state_dtype=state_dtype),
        )
        train = fz.compile(step, fz.make_mesh(), backend=backend)
        state, losses = train.init(start, fz.random.key(0)), []
        for x in data:
            state, metrics = train(state, (x, out(teacher, x)))
            losses.append(float(metrics["loss"]))
        return losses[0], sum(losses[-10:]) / 10

    first, want = final("fp32", "eager")
    _, got = final("int8", backend)
    assert want < first / 10 and abs(got / want - 1) < 0.03, (first, want, got)


def test_an_unknown_dtype_is_named():
    with pytest.raises(fz.errors.FzeroValueError, match="state_dtype='int4': one of 'fp32', 'int8'"):
        optim.adam(1e-3, state_dtype="int4")


def test_what_cuts_blocks_is_an_error_on_shards():
    """The numbers of blocks of a leaf too small to be cut between blocks."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g: g / block_expand(block_max(g.abs()), g.shape), grads), state

    step = fz.shard_params(
        fz.train_step(lambda p, x: (p["w"] * x).sum(), optim.GradientTransformation(lambda params: (), update))
    )
    fz.lower(step, fz.AbstractMesh(data=3), {"w": torch.empty(4099, device="meta")}, torch.empty(4099, device="meta"))
    with pytest.raises(fz.errors.FzeroTypeError, match=r"fzero.block_max.default on the gradient of params\['w'\]"):
        fz.lower(
            step, fz.AbstractMesh(data=3), {"w": torch.empty(4095, device="meta")}, torch.empty(4095, device="meta")
        )
