"""What transforms promise: their order does not matter, nothing is done on a mesh of one, what they send is the closed
form, and any pure optimizer shards."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any, NamedTuple

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import STAGES, batches, meta, meta_part, part

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError
from fzero.ir.ops import STARTS, transfer_bytes
from fzero.ir.program import Program
from fzero.testing.simulate import simulated

SHAPES = {name: meta(model.init(fz.random.key(0))) for name, model in models.MODELS.items()}


def lowered(step: Any, ranks: int = 2, model: str = "mixed") -> fz.Lowered:
    return fz.lower(step, fz.AbstractMesh(data=ranks), SHAPES[model], meta_part(batches(1)[0], ranks))


def plain(model: str = "mixed", optimizer: str = "clipped") -> fz.Step:
    return fz.train_step(models.MODELS[model].loss, models.OPTIMIZERS[optimizer]())


# order

TRANSFORMS = [
    fz.shard_params(),
    fz.shard_grads(),
    fz.shard_opt_state(),
    fz.data_parallel(),
    fz.mixed_precision("bf16"),
    fz.accumulate(2),
    fz.remat("full"),
]


@functools.cache
def printed(kept: frozenset[int]) -> str:
    """The program of a subset of the transforms, in the order above."""
    return str(lowered(fz.compose(*(TRANSFORMS[i] for i in sorted(kept)))(plain())).program)


@pytest.mark.full
@settings(max_examples=12)
@given(st.permutations(range(len(TRANSFORMS))), st.integers(0, 2 ** len(TRANSFORMS) - 1), st.data())
def test_any_order_gives_the_same_program(order, chosen, data):
    kept = {i for i in order if chosen >> i & 1} | {data.draw(st.sampled_from(range(4)))}
    kept = frozenset(kept - {*sorted(kept & {0, 1, 2, 3})[1:]})  # of the ZeRO stages one
    step = fz.compose(*(TRANSFORMS[i] for i in order if i in kept))(plain())
    again = data.draw(st.sampled_from(sorted(kept)))
    step = TRANSFORMS[again](step)  # once more changes nothing
    assert str(lowered(step).program) == printed(kept)


def test_each_transform_changes_the_program():
    texts = [printed(frozenset({0, *more})) for n in (0, 1) for more in itertools.combinations((4, 5, 6), n)]
    assert len(set(texts)) == 4
    assert len({printed(frozenset({i})) for i in range(4)}) == 4


def test_applied_to_a_step_or_composed_is_the_same():
    composed = fz.compose(fz.shard_params(axis="data"), fz.accumulate(2), fz.mixed_precision("bf16"), fz.remat("full"))(
        plain()
    )
    step = plain()
    single = fz.remat(fz.mixed_precision(fz.accumulate(fz.shard_params(step), 2), "bf16"), "full")
    assert composed.transforms == single.transforms and step.transforms == ()


# a mesh of one device


@pytest.mark.full(keep=["0-bare", "1-bare", "0-mixed"])
@pytest.mark.parametrize("model", models.MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_mesh_of_one_sends_nothing(model, stage):
    program = lowered(STAGES[stage](plain(model)), 1, model).program
    base = lowered(plain(model), 1, model).program
    assert not [op for op, _ in program.walk() if op.op in STARTS.keys() | {"wait", "take_shard", "num_valid"}]
    assert "shard(" not in body(program) and "partial(" not in body(program)
    assert body(program) == body(base)


def body(program: Program) -> str:
    text = str(program)
    return text[text.index("def ") :]


# what is sent


class Sent(NamedTuple):
    times: int
    bytes: int


def sent(program: Any) -> dict[str, Sent]:
    out: dict[str, Sent] = {}
    for op, times in program.walk():
        if op.op in STARTS:
            old = out.get(op.op, Sent(0, 0))
            out[op.op] = Sent(old.times + times, old.bytes + times * transfer_bytes(op, program.values(), program.mesh))
    return out


def gpt_shapes(layers: int) -> Any:
    return meta(models.gpt_init(fz.random.key(0), layers=layers))


def gpt_program(ranks: int, layers: int, *transforms: Any, optimizer: str = "adamw") -> Any:
    step = fz.compose(*transforms)(fz.train_step(models.gpt_loss, models.OPTIMIZERS[optimizer]()))
    return fz.lower(
        step, fz.AbstractMesh(data=ranks), gpt_shapes(layers), meta_part(batches(1, size=24)[0], ranks)
    ).program


def num_params(layers: int) -> int:
    return sum(x.numel() for x in fz.tree.leaves(gpt_shapes(layers)))


NUM_ONCE = num_params(0)
"""Elements of the two blocks that are gathered once: the embedding, whose vjp reads no parameter, and the head, whose
forward and vjp are one function."""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("ranks", "layers"), [(2, 2), (4, 5)])
def test_zero_3_gathers_twice_and_scatters_once_a_block(ranks, layers, accumulate):
    blocks, size = layers + 2, 4 * num_params(layers)
    found = sent(gpt_program(ranks, layers, fz.shard_params(), fz.accumulate(accumulate)))
    assert found["all_gather_start"] == Sent(
        accumulate * (2 * blocks - 2), accumulate * (2 * size - 4 * NUM_ONCE) * (ranks - 1) // ranks
    )
    assert found["reduce_scatter_start"] == Sent(accumulate * blocks, accumulate * size * (ranks - 1) // ranks)
    assert found["all_reduce_start"].times == 2  # the loss; the sums of squares of the leaves' gradients
    assert found["all_reduce_start"].bytes == 2 * 4 * (1 + num_leaves(layers)) * (ranks - 1) // ranks


def num_leaves(layers: int) -> int:
    return len(fz.tree.leaves(gpt_shapes(layers)))


def test_bf16_halves_what_is_gathered():
    size = 4 * num_params(3)
    found = sent(gpt_program(2, 3, fz.shard_params(), fz.mixed_precision("bf16")))
    assert found["all_gather_start"] == Sent(2 * 5 - 2, (size - 2 * NUM_ONCE) // 2)
    assert found["reduce_scatter_start"] == Sent(5, size // 2)
    found = sent(gpt_program(2, 3, fz.shard_params(), fz.mixed_precision("bf16", reduce="bf16")))
    assert (
        found["all_gather_start"].bytes == (size - 2 * NUM_ONCE) // 2
        and found["reduce_scatter_start"].bytes == size // 4
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_zero_1_and_2_scatter_gradients_and_gather_parameters_once(accumulate):
    blocks, size = 4, 4 * num_params(2)
    for transform, scatters in ((fz.shard_opt_state(), 1), (fz.shard_grads(), accumulate)):
        found = sent(gpt_program(2, 2, transform, fz.accumulate(accumulate)))
        assert found["all_gather_start"] == Sent(blocks, size // 2)
        assert found["reduce_scatter_start"] == Sent(scatters * blocks, scatters * size // 2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_data_parallel_reduces_each_gradient_once(accumulate):
    found = sent(gpt_program(4, 2, fz.data_parallel(), fz.accumulate(accumulate)))
    assert set(found) == {"all_reduce_start"}
    # a reduction a block, and the loss
    assert found["all_reduce_start"] == Sent(4 + 1, 2 * (4 * num_params(2)) * 3 // 4 + 2 * 4 * 3 // 4)


def test_the_header_says_what_is_sent():
    program = gpt_program(2, 3, fz.shard_params(), fz.mixed_precision("bf16"))
    found = sent(program)
    head = str(program).split("def ")[0]
    match = re.search(r"shard_params ([\d.]+) KiB in (\d+) transfers", head)
    assert match, head
    placed = [op for op, _ in program.walk() if op.op in STARTS and op.by == "shard_params"]
    assert int(match[2]) == len(placed) == found["all_gather_start"].times + found["reduce_scatter_start"].times
    assert float(match[1]) == pytest.approx(
        (found["all_gather_start"].bytes + found["reduce_scatter_start"].bytes) / 1024, abs=0.06
    )
    assert f"params {4 * num_params(3) / 2 / 1024:.1f} KiB" in head


# optimizers on shards


def adagrad(lr: float = 0.1) -> optim.GradientTransformation:
    """Nothing of fzero in it: what a user would write."""

    def update(grads, state, params):
        state = fz.tree.map(lambda s, g: s + g * g, state, grads)
        return fz.tree.map(lambda g, s: -lr * g / (s.sqrt() + 1e-8), grads, state), state

    return optim.GradientTransformation(lambda params: fz.tree.map(lambda p: torch.full_like(p, 0.1), params), update)


def whole_leaf(lr: float = 0.05) -> optim.GradientTransformation:
    """Every full reduction there is, of functions that are not 0 at 0: padding must not count."""

    def leaf(g, p):
        up = torch.cos(g)  # 1 on padding
        scale = (
            up.mean()
            + up.max()
            + torch.exp(g).sum() / g.numel()
            + (g - 1.0).abs().min()
            + torch.linalg.vector_norm(g + 2.0) / g.numel()
        )
        scale = (
            scale
            + torch.linalg.vector_norm(g + 0.5, ord=1) / g.numel()
            + torch.linalg.vector_norm(g, ord=float("inf"))
            + (p * p + 3.0).amin()
            + (p - 5.0).amax()
        )
        scale = (
            scale
            + torch.where((g + 1.0 > 0).all(), 0.25, 0.0)
            + torch.where((g < -0.9).any(), 0.125, 0.0)
            + torch.sigmoid(p).norm()
        )
        return -lr * g * scale - lr * 0.1 * p / (1.0 + p.abs().max())

    return optim.GradientTransformation(
        lambda params: (), lambda grads, state, params: (fz.tree.map(leaf, grads, params), state)
    )


def factored(lr: float = 0.05) -> optim.GradientTransformation:
    """State that is not shaped like its leaf: one number a leaf, and one for all of them."""

    def init(params):
        return {"leaf": fz.tree.map(lambda p: torch.zeros(()), params), "all": torch.ones(3)}

    def update(grads, state, params):
        leaf = fz.tree.map(lambda s, g: 0.9 * s + 0.1 * (g * g).mean(), state["leaf"], grads)
        every = state["all"] * 0.9 + 0.1 * sum((g * g).sum() for g in fz.tree.leaves(grads))
        return fz.tree.map(lambda g, s: -lr * g / (s.sqrt() + 1e-3) / (1 + every[0]), grads, leaf), {
            "leaf": leaf,
            "all": every,
        }

    return optim.GradientTransformation(init, update)


def of_one_element(lr: float = 0.05) -> optim.GradientTransformation:
    """Reductions that keep their dims, and constants as long as a leaf."""

    def leaf(g, p):
        ramp = torch.arange(g.numel()).view_as(g) / g.numel() + torch.linspace(1, 2, g.numel()).reshape(g.shape)
        along = torch.nn.functional.cosine_similarity(g.flatten() + 1, p.flatten() + 2, dim=0)
        return -lr * g * ramp * (1 + along) * (g.flatten() + 0.5).square().mean(0, keepdim=True)

    return optim.GradientTransformation(
        lambda params: (), lambda grads, state, params: (fz.tree.map(leaf, grads, params), state)
    )


USERS = {"adagrad": adagrad, "whole_leaf": whole_leaf, "factored": factored, "of_one_element": of_one_element}


def odd_init() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(5, 7, generator=generator) * 0.5,
        "b": torch.randn(7, generator=generator),
        "tiny": torch.randn(1, generator=generator),
        "two": torch.randn(2, generator=generator),
    }


def odd_loss(p, batch):
    return (
        (torch.tanh(batch["tokens"][:, :5].float() / models.VOCAB @ p["w"] + p["b"]) * p["tiny"] + p["two"].sum() - 0.3)
        .pow(2)
        .mean()
    )


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_users_optimizer_shards(stage, name):
    step, batch = fz.train_step(odd_loss, USERS[name]()), batches(1)[0]
    state, norms = step.init(odd_init()), []
    for _ in range(4):
        state, metrics = step(state, batch)
        norms.append(metrics["grad_norm"])
    _, *steps = simulated(STAGES[stage](step), fz.AbstractMesh(data=3), odd_init(), batch, 4, None)
    got_norms = torch.stack([metrics["grad_norm"] for _, metrics in steps])
    torch.testing.assert_close(got_norms, torch.stack(norms), rtol=1e-5, atol=0)
    got = steps[-1][0]
    for path, a, b in zip(fz.tree.paths(state), fz.tree.leaves(got), fz.tree.leaves(state), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


CANNOT = {
    "mm": lambda g: g @ torch.tril(torch.ones(7, 7)) if g.dim() == 2 else g,
    "permute": lambda g: g @ g.T @ g if g.dim() == 2 else g,  # torch.mm would be next
    "cumsum": lambda g: g.cumsum(0),
    "sort": lambda g: g.sort(0).values,
    "std": lambda g: g / g.std(),
    "sum.dim_IntList": lambda g: g - g.sum(-1, keepdim=True) if g.dim() == 2 else g,
}


def cannot(fn: Any) -> optim.GradientTransformation:
    return optim.GradientTransformation(
        lambda params: (), lambda grads, state, params: (fz.tree.map(lambda g: -0.1 * fn(g), grads), state)
    )


@pytest.mark.parametrize("operation", CANNOT)
def test_an_optimizer_that_cannot_shard_names_operation_and_leaf(operation):
    params, batch = meta(odd_init()), meta_part(batches(1)[0], 2)
    step = fz.train_step(odd_loss, cannot(CANNOT[operation]))
    with pytest.raises(FzeroTypeError) as raised:
        fz.lower(fz.shard_params(step), fz.AbstractMesh(data=2), params, batch)
    text = str(raised.value)
    assert (
        f"aten.{operation}" in text
        and "params['w']" in text
        and "test_transforms.py:" in text
        and "where=" in text
        and "Fix:" in text
    )
    if operation in ("cumsum", "sort", "std"):
        assert "['b']" in text  # every leaf that fails is listed
    else:
        assert "['b']" not in text
    fz.lower(fz.data_parallel(step), fz.AbstractMesh(data=2), params, batch)  # whole leaves can do anything


def run_where(operation: str) -> Any:
    mesh = fz.make_mesh(data=-1)
    keep = fz.shard_params(where=lambda path, leaf: leaf.dim() < 2 and operation == "mm")
    train = fz.compile(keep(fz.train_step(odd_loss, cannot(CANNOT[operation]))), mesh, backend="eager")
    state = train.init(odd_init())
    shapes = fz.tree.map(lambda x: tuple(x.shape), state.params)
    for batch in batches(3):
        state, _ = train(state, part(batch, mesh))
    return shapes, train.gather(state).params


@pytest.mark.parametrize("operation", ["mm", "sort"])
def test_where_keeps_a_leaf_whole(run_ranks, operation):
    step = fz.train_step(odd_loss, cannot(CANNOT[operation]))
    state = step.init(odd_init())
    for batch in batches(3):
        state, _ = step(state, batch)
    for shapes, params in run_ranks(2, run_where, operation):
        assert shapes["w"] == (5, 7) and shapes["b"] == ((4,) if operation == "mm" else (7,))
        for path, a, b in zip(fz.tree.paths(params), fz.tree.leaves(params), fz.tree.leaves(state.params), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")
