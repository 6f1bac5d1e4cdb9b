"""fp8 with delayed scaling: against a reference written by hand; what is remembered; that no transform changes a bit;
what it costs; what cannot be had."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import Any

import models
import pytest
import test_fp8
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import STAGES, part
from offloads import same
from test_fp8 import LOSS, LR, WIDTH, batches, every_node, init, loss_of, mlp, nearest, product_nodes, products

import fzero as fz
from fzero import optim
from fzero.errors import CheckpointError, FzeroValueError
from fzero.operators.scaled_matmul import E4M3, E5M2, saturated, scaled_mm
from fzero.precision.delayed import Fp8State, Slot, advanced
from fzero.program.ops import transfer_bytes

STEPS = 4


def delayed(history: int = 2) -> Any:
    return fz.fp8(scaling="delayed", history=history)


# how a number is rounded


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(
    st.lists(
        st.floats(min_value=-(2.0**30), max_value=2.0**30, width=32, allow_subnormal=False), min_size=1, max_size=9
    ),
    st.integers(-9, 9),
)
def test_numbers_are_rounded_to_nearest_and_to_the_largest_at_most(dtype, values, power):
    found = saturated(torch.tensor(values), torch.tensor(2.0**power), dtype).float().tolist()
    most = torch.finfo(dtype).max
    assert found == [nearest(max(-most, min(most, v / 2.0**power)), dtype) for v in values]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_stays_so(dtype):
    assert (
        not saturated(torch.tensor([math.nan, math.inf, -math.inf]), torch.tensor(4.0), dtype).float().isfinite().any()
    )


# what is remembered


def test_the_history_of_slots():
    slots = (Slot(1, False), Slot(0, True), Slot(1, False), Slot(2, True))
    state = Fp8State(torch.zeros(2, 2, 3))
    for largest in ([1.0, 2.0, 3.0, 4.0], [5.0, math.inf, 0.5, math.nan], [0.25, 8.0, 0.125, 16.0]):
        before, state = state, advanced(state, slots, torch.tensor(largest))
        assert torch.equal(state.history[1], before.history[0]), "the oldest step is forgotten"
    assert state.history.tolist() == [[[0.0, 0.25, 0.0], [8.0, 0.0, 16.0]], [[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]]


# by hand


class Book:
    """Largest magnitudes by the parameter and whether a gradient: of earlier steps, and of this one."""

    def __init__(self, steps: int):
        self.steps, self.rows, self.now = steps, list[dict[Any, float]](), defaultdict[Any, float](float)

    def rounded(self, x: torch.Tensor, slot: Any, dtype: torch.dtype) -> torch.Tensor:
        self.now[slot] = max(self.now[slot], x.abs().max().item())
        most, largest = max((row.get(slot, 0.0) for row in self.rows), default=0.0), torch.finfo(dtype).max
        scale = 2.0 ** math.frexp(most / largest)[1] if most > 0 else 1.0
        return (x / scale).clamp(-largest, largest).to(dtype).float() * scale

    def turn(self) -> None:
        self.rows, self.now = [self.now, *self.rows][: self.steps], defaultdict(float)


class Product(torch.autograd.Function):
    """x @ w, or x @ w.T, in 8 bits: w by its own scale, x and the gradient by those of the book."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, transposed: bool, name: str, book: Book) -> torch.Tensor:
        scale = test_fp8.scale_by_hand(w, E4M3, None)
        qx, qw = book.rounded(x, (name, False), E4M3), (w / scale).to(E4M3).float() * scale
        ctx.save_for_backward(qx, qw)
        ctx.rest = transposed, name, book
        return torch.mm(qx, qw.t() if transposed else qw)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (qx, qw), (transposed, name, book) = ctx.saved_tensors, ctx.rest
        qd = book.rounded(tangents[0], (name, True), E5M2)
        return (
            torch.mm(qd, qw if transposed else qw.t()),
            torch.mm(qd.t(), qx) if transposed else torch.mm(qx.t(), qd),
            None,
            None,
            None,
        )


def by_hand(book: Book, num_steps: int = STEPS) -> tuple[list[torch.Tensor], Any]:
    """Losses and parameters after steps of gradient descent."""
    want, losses = init(fz.random.key(0)), []
    for batch in batches(num_steps):
        leaves = {
            p: x.clone().requires_grad_() for p, x in zip(fz.tree.paths(want, ""), fz.tree.leaves(want), strict=True)
        }
        name = {id(x): p for p, x in leaves.items()}

        def product(transposed: bool, x: torch.Tensor, w: torch.Tensor, name: Any = name) -> torch.Tensor:
            return Product.apply(x.reshape(-1, x.shape[-1]), w, transposed, name[id(w)], book).reshape(
                *x.shape[:-1], -1
            )

        ways = {"x w": functools.partial(product, False), "x w.T": functools.partial(product, True)}
        loss = loss_of(functools.partial(mlp, product=ways), ways)(
            fz.tree.unflatten(fz.tree.structure(want), list(leaves.values())), batch
        )
        grads = torch.autograd.grad(loss, list(leaves.values()))
        want = fz.tree.unflatten(
            fz.tree.structure(want), [x.detach() - LR * g for x, g in zip(leaves.values(), grads, strict=True)]
        )
        losses.append(loss.detach())
        book.turn()
    return losses, want


def trained(
    *transforms: Any, mesh: Any = None, loss: Any = LOSS, num_steps: int = STEPS, backend: str = "eager"
) -> tuple[Any, Any, Any]:
    """Losses, parameters and history after a few steps."""
    mesh = mesh or fz.make_mesh(data=-1)
    train = fz.compile(fz.compose(*transforms)(fz.train_step(loss, optim.sgd(LR))), mesh, backend=backend)
    state, losses = train.init(init, fz.random.key(0)), []
    for batch in batches(num_steps):
        state, metrics = train(state, part(batch, mesh))
        losses.append(metrics["loss"])
    return losses, train.gather(state).params, state.extras["fp8"].history


@functools.cache
def alone(*transforms: Any, **options: Any) -> tuple[Any, Any, Any]:
    """What `trained` comes to on this process, in eager mode: once for all tests that compare with it."""
    return trained(*transforms, **options)


@pytest.mark.parametrize("history", [1, 3])
def test_a_step_is_what_one_writes_by_hand(history):
    losses, params, found = alone(delayed(history))
    book = Book(history)
    want_losses, want = by_hand(book)
    assert same(losses, want_losses) and same(params, want)
    paths = fz.tree.paths(params, "")
    assert found.tolist() == [[[row.get((p, kind), 0.0) for p in paths] for kind in (False, True)] for row in book.rows]


# the same bits under every other transform


def test_other_transforms_change_no_bit():
    want = alone(delayed())
    for others in [
        (fz.remat("full"),),
        (fz.remat("none"),),
        (fz.remat(0.5),),
        (fz.offload("cpu", ("params", "opt_state", "activations")),),
    ]:
        assert same(alone(delayed(), *others), want), others
    micro = alone(delayed(), fz.accumulate(2))
    assert same(alone(delayed(), fz.accumulate(2, vertical=True)), micro)


def on_ranks(cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    mesh = fz.make_mesh(data=-1)
    return {name: trained(*transforms, mesh=mesh) for name, transforms in cases.items()}


def test_two_ranks_are_two_micro_batches(run_ranks):
    """One history for all ranks and micro-batches: the largest of all."""
    want = alone(delayed(), fz.accumulate(2))
    cases = {f"stage {n}": (STAGES[n](), delayed()) for n in (0, 2, 3)}
    for ranks in run_ranks(2, on_ranks, cases):
        for name, found in ranks.items():
            assert same(found, want), name


def test_how_the_batch_is_cut_decides_no_rounding():
    """A micro-batch's gradients are those of its rows in the mean of the whole; what changes is the order of sums.
    Current scales change with it."""
    whole, halves = (alone(delayed(), *more, num_steps=1) for more in [(), (fz.accumulate(2),)])
    assert torch.equal(whole[2], halves[2])


def test_a_compiled_step_is_the_eager_one(compiled_here):
    (want, _, before), (found, _, after) = alone(delayed()), trained(delayed(), backend="inductor")
    torch.testing.assert_close(torch.stack(found), torch.stack(want), rtol=2e-3, atol=0.0)
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.0)


# which operands


@pytest.mark.parametrize("in_block", [True, False])
def test_products_however_written(in_block):
    layer = fz.block(products) if in_block else products
    step = fz.train_step(lambda params, x: layer(params, x).square().mean(), optim.sgd(0.1))
    params = {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH), "other": torch.randn(WIDTH, WIDTH + 16)}
    found = product_nodes(fz.lower(delayed()(step), fz.AbstractMesh(data=1), params, torch.empty(2, 16, WIDTH)).program)
    assert found == {"scaled_mm": 5 * 3 - 1, "mm": 6}


@fz.block
def heads(p, x):
    return (x @ p["q"]) * (x @ p["k"]) + x @ p["v"]


def attention_loss(params, batch):
    return sum(heads(params[name], batch).square().mean() for name in params)


def attention_init(key):
    return {
        name: {n: fz.random.normal(fz.random.fold_in(key, i), (16, 16)) for i, n in enumerate("qkv")}
        for name in ("first", "second")
    }


def test_what_several_parameters_multiply_is_rounded_once():
    step = fz.lower(
        delayed()(fz.train_step(attention_loss, optim.sgd(LR))),
        fz.AbstractMesh(data=1),
        attention_init,
        torch.empty(16, 16),
    )
    program = step.program
    forward = program.functions[
        next(line.fn for line in program.lines if line.op == "call" and line.block is not None)
    ].graph
    to_fp8 = [
        n for n in forward.graph.nodes if n.target is torch.ops.aten._to_copy.default and n.meta["val"].dtype is E4M3
    ]
    assert len(to_fp8) == 4, "q, k, v, and x once"
    calls = [line for line in program.lines if line.scales == "history"]
    assert [len(line.out) for line in calls] == [2]


def test_layers_that_share_parameters_share_their_history():
    def loss(params, x):
        return heads(params["first"], heads(params["first"], x)).square().mean() + sum(
            (v * 0).sum() for v in params["second"].values()
        )

    train = fz.compile(delayed()(fz.train_step(loss, optim.sgd(0.0))), fz.make_mesh(data=1), backend="eager")
    state, x = train.init(attention_init, fz.random.key(0)), torch.randn(16, 16)
    between = heads(state.params["first"], x)
    state, _ = train(state, x)
    by_path = dict(zip(fz.tree.names(state.params), state.extras["fp8"].history[0].T.tolist(), strict=True))
    assert (
        by_path["first.q"][0] == pytest.approx(between.abs().max().item(), rel=0.1)
        and between.abs().max() > 2 * x.abs().max()
    ), "the larger of both calls"
    assert by_path["first.k"][0] == by_path["first.v"][0] == 0.0, (
        "they multiply the same, which is counted for the first of them"
    )
    assert all(by_path[f"second.{n}"] == [0.0, 0.0] for n in "qkv")


def test_a_block_without_backward_has_current_scales():
    def loss(params, batch):
        return (heads(params["frozen"], batch).detach() @ params["w"]).square().mean()

    def made(key):
        return {"frozen": attention_init(key)["first"], "w": fz.random.normal(key, (16, 16))}

    step = fz.train_step(loss, optim.sgd(LR))
    program = fz.lower(delayed()(step), fz.AbstractMesh(data=1), made, torch.empty(16, 16)).program
    assert [tuple(v.shape) for line in program.lines if line.scales == "history" for v in line.out] == [(2 * 4,)], (
        "those of the code outside"
    )
    assert len([n for n in every_node(program) if n.target is scaled_mm]) == 3 + 2


def test_an_evaluation_has_current_scales():
    params, batch = init(fz.random.key(0)), batches()[0]
    found = [
        fz.compile(fp8(fz.eval_step(LOSS)), fz.make_mesh(data=1), backend="eager")(params, batch)
        for fp8 in (delayed(), fz.fp8())
    ]
    assert same(*found)


# with loss scales, checkpoints, and reports


def test_an_overflow_is_seen_and_not_remembered():
    """What is not finite is not rounded to the largest number, so that the step is skipped; its magnitude is left
    out."""

    def overflowing(params, batch):
        return LOSS(params, batch) * batch["factor"]

    step = fz.compose(fz.mixed_precision("fp16"), delayed(3))(fz.train_step(overflowing, optim.sgd(LR)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state, skipped = train.init(init, fz.random.key(0)), []
    for factor in (1.0, 1e30, 1.0):
        state, metrics = train(state, {**batches(1)[0], "factor": torch.tensor(factor)})
        skipped.append(bool(metrics["skipped"]))
    history = state.extras["fp8"].history
    assert skipped == [False, True, False] and history.isfinite().all()
    assert (history[1][1] == 0).sum() > (history[0][1] == 0).sum(), "gradients of the step that was skipped"


def test_a_checkpoint_has_the_history(tmp_path):
    mesh = fz.make_mesh(data=1)
    step = fz.train_step(LOSS, optim.sgd(LR))
    train = fz.compile(delayed()(step), mesh, backend="eager")
    state = train.init(init, fz.random.key(0))
    for batch in batches(2):
        state, _ = train(state, batch)
    fz.checkpoint.save(tmp_path / "a", state)
    again = fz.compile(delayed()(step), mesh, backend="eager").restore(tmp_path / "a")
    assert torch.equal(again.extras["fp8"].history, state.extras["fp8"].history) and again.extras["fp8"].history.any()
    plain = fz.compile(step, mesh, backend="eager").restore(tmp_path / "a")
    assert "fp8" not in plain.extras
    fz.checkpoint.save(tmp_path / "b", plain)
    begins = fz.compile(delayed(5)(step), mesh, backend="eager").restore(tmp_path / "b")
    assert (
        begins.extras["fp8"].history.shape == (5, 2, len(fz.tree.leaves(plain.params)))
        and not begins.extras["fp8"].history.any()
    )
    with pytest.raises(CheckpointError, match="fp8"):
        fz.compile(delayed(5)(step), mesh, backend="eager").restore(tmp_path / "a")
    with pytest.raises(FzeroValueError, match="history"):
        fz.compile(delayed(5)(step), mesh, backend="eager")(again, batches(1)[0])


def test_check_equivalent():
    step = fz.remat(delayed()(fz.train_step(LOSS, optim.sgd(LR))), "full")
    report = fz.testing.check_equivalent(step, init, batches()[0], fz.make_mesh(data=1), backend="eager")
    assert report.exact is not None and report.exact.equivalent


def test_beside_the_watch():
    step = fz.compose(fz.mixed_precision("bf16", watch=True), delayed())(fz.train_step(LOSS, optim.sgd(LR)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state, metrics = train(train.init(init, fz.random.key(0)), batches(1)[0])
    plain = fz.compile(
        fz.mixed_precision("bf16", watch=True)(fz.train_step(LOSS, optim.sgd(LR))),
        fz.make_mesh(data=1),
        backend="eager",
    )
    _, want = plain(plain.init(init, fz.random.key(0)), batches(1)[0])
    torch.testing.assert_close(metrics["precision"]["output_max"], want["precision"]["output_max"], rtol=0.2, atol=0.0)
    assert state.extras["fp8"].history[0].count_nonzero() == 2 * 7, "of all matrices, inputs and gradients"


# what it costs


@pytest.mark.parametrize("num_micro", [1, 2])
def test_one_reduction_a_step(num_micro):
    step = fz.compose(fz.shard_params(), delayed(), fz.accumulate(num_micro))(fz.train_step(LOSS, optim.sgd(LR)))
    program = fz.lower(step, fz.AbstractMesh(data=2), init, models.meta_part(batches()[0], 2)).program
    values = program.values()
    sent = [
        n * transfer_bytes(x, values, program.mesh)
        for x, n in program.walk()
        if x.op == "all_reduce_start" and x.attrs.reduction == "max" and x.by != "fp8"
    ]
    numbers = 2 * (7 + 3 * 2)
    assert sent == [2 * 4 * numbers // 2], "outside blocks it is about all 7 matrices, in each block about 2"


def test_the_state_and_the_program_say_so():
    lowered = fz.lower(delayed(8)(fz.train_step(LOSS, optim.sgd(LR))), fz.AbstractMesh(data=1), init, batches()[0])
    assert "#   fp8(scales='tensor', history=8)" in str(lowered) and f"fp8 {8 * 2 * 10 * 4} B" in str(lowered)
    assert Fp8State._fields == ("history",)


# what cannot be had


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"scaling": "late"}, "unknown scaling='late'(.|\n)*one of 'current', 'delayed'"),
        ({"scaling": "delayed", "history": 0}, "history=0 is not a number of steps"),
        ({"scaling": "delayed", "history": True}, "history=True is not a number of steps"),
        ({"history": 4}, "history=4, but current scaling has none"),
        ({"scaling": "delayed", "scales": "row"}, "one number for an operand"),
    ],
)
def test_arguments(arguments, text):
    with pytest.raises(FzeroValueError, match=text):
        fz.fp8(**arguments)
