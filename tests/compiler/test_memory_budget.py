"""A memory budget: the plan fits it, the step is still the plain one, more memory is never predicted to be slower, and
what cannot fit says so."""

from __future__ import annotations

import functools
import importlib
import json
import re
from typing import Any

import models
import pytest
import torch
from models import MODELS, OPTIMIZERS
from test_parity import NUM_STEPS, difference, plain

import fzero as fz
from fzero import optim
from fzero.compiler import overlap, pass_invariants
from fzero.compiler.options import Options
from fzero.compiler.overlap import ScheduleOptions, sharable
from fzero.compiler.pass_cache import PassCache
from fzero.errors import BudgetError, FzeroValueError
from fzero.ir.pool_verifier import check
from fzero.ir.printer import source
from fzero.ir.program import Program

lower_file = importlib.import_module("fzero.compiler.traced_step")

MESH = fz.AbstractMesh(data=2)


def make(accumulate: int = 2) -> fz.Step:
    step = fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())
    return fz.compose(fz.shard_params(), fz.remat("auto"), fz.accumulate(accumulate))(step)


def batch(size: int) -> Any:
    return fz.tree.map(
        lambda x: torch.empty(x.shape[0] // size, *x.shape[1:], dtype=x.dtype, device="meta"),
        next(iter(models.batches(1))),
    )


def lower(budget: int | None, size: int = 2) -> fz.Lowered:
    return fz.lower(
        make(),
        fz.AbstractMesh(data=size),
        MODELS["gpt"].init,
        batch(size),
        memory_budget=budget,
        device="cpu",
        backend="eager",
    )


lowered = functools.cache(lower)


@functools.cache
def span(size: int = 2) -> tuple[int, int]:
    """Peaks with as little memory as can be, and with as much as is of use."""
    step = fz.remat(
        fz.compose(fz.shard_params(), fz.accumulate(2))(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())), 0.0
    )
    least = (
        fz.lower(step, fz.AbstractMesh(data=size), MODELS["gpt"].init, batch(size)).plan_on("cpu", "eager").peak_bytes
    )
    return least, lowered(1 << 30, size).plan.peak_bytes


@pytest.mark.full
def test_the_plan_fits_and_memory_makes_it_faster() -> None:
    least, most = span()
    plans = [lowered(least + (most - least) * k // 4).plan for k in range(5)]
    for k, plan in enumerate(plans):
        assert plan.peak_bytes <= least + (most - least) * k // 4
    assert plans[0].step_seconds > plans[-1].step_seconds and plans[0].peak_bytes < plans[-1].peak_bytes


def test_what_a_large_budget_chooses() -> None:
    found = lowered(1 << 30)
    assert found.options.remat == 1.0 and found.options.full_grads and found.options.order.shared > 0
    gathers = [op for op, _ in found.program.walk() if op.op == "all_gather_start"]
    assert (
        len(gathers)
        <= len([op for op, _ in lowered(None).program.walk() if op.op == "all_gather_start"])
        - found.options.order.shared
    )


def test_the_plan_says_what_was_decided_and_why() -> None:
    least, _ = span()
    small, large = (next(d for d in lowered(n).plan.decisions if d.what == "gradients") for n in (least, 1 << 30))
    assert small.chosen == "shards" and "more than the budget" in small.why
    assert large.chosen == "whole" and "a step faster than shards" in large.why
    assert (
        "a step faster than shards" in str(lowered(1 << 30).plan)
        and large._asdict() in json.loads(lowered(1 << 30).plan.to_json())["decisions"]
    )
    (free,) = lowered(None).plan.decisions
    assert free.chosen == "shards" and "no budget" in free.why
    step = fz.compose(fz.data_parallel(), fz.accumulate(2))(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    (whole,) = fz.lower(step, MESH, MODELS["gpt"].init, batch(2)).plan.decisions
    assert whole.chosen == "whole" and "the stage" in whole.why


def train_under(budgets: list[int | None]) -> list[dict[str, Any]]:
    mesh, out = fz.make_mesh(data=-1), []
    for budget in budgets:
        train = fz.compile(make(), mesh, memory_budget=budget, backend="eager")
        state, losses = train.init(MODELS["gpt"].init(fz.random.key(0))), []
        for data in models.batches(NUM_STEPS):
            state, metrics = train(state, models.part(data, mesh))
            losses.append(metrics["loss"])
        out.append(
            {
                "losses": torch.stack(losses),
                "state": train.gather(state),
                "program": str(train.program),
                "peak": train.plan.peak_bytes,
            }
        )
    return out


@pytest.mark.full
@pytest.mark.parametrize(("size", "parts"), [(1, [0.5]), (2, [0.0, 1.0]), (3, [0.0])])
def test_a_budget_changes_no_number(run_ranks: Any, size: int, parts: list[float]) -> None:
    least, most = span(size)
    want = plain("gpt", "adamw")
    results = run_ranks(size, train_under, [int(least + part * (most + 4096 - least)) for part in parts])
    for ranks in zip(*results, strict=True):
        assert len({r["program"] for r in ranks}) == 1
        for found in ranks:
            torch.testing.assert_close(found["losses"], want["losses"], rtol=1e-5, atol=1e-6)
            assert difference(found["state"].params, want["state"].params) < 1e-5
    assert len({r["program"] for r in results[0]}) > 1 or len(parts) == 1  # the budgets did choose differently


@pytest.mark.full
def test_a_budget_that_nothing_fits() -> None:
    least, _ = span()
    step = fz.accumulate(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()), 2)
    with pytest.raises(BudgetError) as caught:
        fz.lower(
            fz.data_parallel(step),
            MESH,
            MODELS["gpt"].init,
            batch(2),
            memory_budget=least,
            device="cpu",
            backend="eager",
        )
    text = str(caught.value)
    assert (
        "bytes) more than" in text
        and "at: " in text
        and "with fz.shard_grads(axis='data'): " in text
        and text.splitlines()[-1].startswith("Fix: ")
    )


def test_a_state_that_does_not_fit_is_not_made() -> None:
    train = fz.compile(make(), fz.make_mesh(data=1), memory_budget="10KiB", backend="eager")
    with pytest.raises(BudgetError, match="the state alone does not fit"):
        train.init(MODELS["gpt"].init)


@pytest.mark.parametrize("wrong", ["80", "much", -1, 1.5, True])
def test_budgets_that_are_none(wrong: Any) -> None:
    with pytest.raises(FzeroValueError, match="not an amount of memory"):
        fz.compile(make(), fz.make_mesh(data=1), memory_budget=wrong)


def test_shares_that_keep_the_same_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(lower_file, "PassCache", lambda *args: made.append(args) or PassCache(*args))
    lower(None)
    shares, together = [n / 16 for n in range(17)], PassCache(*made[0])
    built = [together(Options(share)) for share in shares]
    assert 1 < len({id(program) for program in built}) < len(shares)
    assert [source(program) for program in built] == [source(PassCache(*made[0])(Options(share))) for share in shares]


def test_only_what_is_chosen_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Program] = []
    monkeypatch.setattr(pass_invariants, "check", lambda program: checked.append(program) or check(program))
    found = lower(1 << 30)
    assert checked == [found.program]


# --- the choices one by one, in the program ---


@pytest.fixture(scope="module")
def unordered() -> Program:
    """As the last rewrite before ordering leaves it: put in order again, any order is as good."""
    step = fz.shard_params(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    return fz.lower(step, MESH, MODELS["gpt"].init, batch(2)).program


def starts(program: Program, kind: str = "all_gather_start") -> list[Any]:
    return [op for op, _ in program.walk() if op.op == kind]


def test_shared_gathers_are_those_of_the_last_blocks(unordered: Program) -> None:
    pairs = sharable(unordered)
    # the layers; the head's forward and backward are one function, the embedding's backward reads no parameter
    assert len(pairs) == 2
    shared = overlap.rewrite(unordered, ScheduleOptions(shared=1))
    assert len(starts(shared)) == len(starts(unordered)) - 1
    assert pairs[1][1] not in {x.out[0].name for x in starts(shared)} and pairs[0][1] in {
        x.out[0].name for x in starts(shared)
    }


@pytest.mark.full(keep=["transforms1"])
@pytest.mark.parametrize(
    "transforms",
    [(fz.shard_params(),), (fz.shard_grads(),), (fz.shard_params(axis=("data", "node")), fz.hierarchical(axis="node"))],
)
def test_sums_of_micro_batches_a_block_later_are_faster_where_there_is_room(transforms: Any) -> None:
    """A reduction in a loop travels while the next block computes; the one after it is added before anything else reads
    the total."""
    shapes = {"up": (1024, 4096), "down": (4096, 1024)}
    params = [{name: torch.empty(shape, device="meta") for name, shape in shapes.items()} for _ in range(8)]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = fz.block(lambda p, x: x + torch.relu(x @ p["up"]) @ p["down"])(p, x)
        return x.square().mean()

    step = fz.compose(*transforms, fz.mixed_precision("bf16"), fz.accumulate(4))(
        fz.train_step(loss, fz.optim.adamw(1e-3))
    )
    batch = torch.empty(4096, 1024, device="meta")

    def within(budget: str | None) -> fz.Lowered:
        mesh = fz.AbstractMesh(node=2, data=4) if len(transforms) > 1 else fz.AbstractMesh(data=4)
        return fz.lower(step, mesh, params, batch, memory_budget=budget, device="h100")

    first = within(None)
    roomy = within(f"{1.25 * first.plan.peak_bytes:.0f}B")  # where gradients do not fit whole
    assert roomy.options.order.late_sums and not first.options.order.late_sums
    assert ("sums", "a block later") in [d[:2] for d in roomy.plan.decisions]
    assert roomy.plan.exposed_seconds < 0.7 * first.plan.exposed_seconds
    assert not within(f"{first.plan.peak_bytes + 1}B").options.order.late_sums

    def between(found: fz.Lowered) -> list[int]:
        """Blocks that run while each reduction over `data` travels, within the loop."""
        (loop,) = (x for x in found.program.instructions if x.op == "loop")
        at = {x.args[0]: i for i, x in enumerate(loop.body) if x.op == "wait"}
        blocks = [i for i, x in enumerate(loop.body) if x.block is not None]
        sent = [(i, at[x.out[0].name]) for i, x in enumerate(loop.body) if x.op == "reduce_scatter_start"]
        return [sum(a < i < b for i in blocks) for a, b in sent]

    assert set(between(first)) == {0} and between(roomy)[:-1] == [1] * (len(between(roomy)) - 1)


def test_gathers_start_a_block_ahead(unordered: Program) -> None:
    def first_start_after(program: Program, blocks: int) -> int:
        seen = 0
        for op, _ in program.walk():
            if op.op == "call" and op.block is not None:
                if seen == blocks:
                    return sum(1 for x in before if x.op == "all_gather_start")
                seen += 1
            before.append(op)
        return -1

    counts = []
    for narrow in (True, False):
        before: list[Any] = []
        counts.append(first_start_after(overlap.rewrite(unordered, ScheduleOptions(narrow=narrow)), 1))
    assert counts[1] > counts[0]


@fz.block
def mlp(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def mlp_loss(params, batch):
    for p in params:
        batch = mlp(p, batch)
    return batch.square().mean()


PLAIN = fz.train_step(mlp_loss, optim.adamw(1e-3))
CLIPPED = fz.train_step(mlp_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
WEIGHTS = 4 * 2 * 32 * 128 * 4  # bytes of the parameters


def error_lines(
    step: Any, rows: int = 1, budget: Any = "1KB", device: str = "h100", mesh: fz.AbstractMesh | None = None
) -> list[str]:
    """The lines of the error."""
    params = [
        {"up": torch.empty(32, 128, device="meta"), "down": torch.empty(128, 32, device="meta")} for _ in range(4)
    ]
    with pytest.raises(BudgetError) as caught:
        fz.lower(
            step,
            mesh or fz.AbstractMesh(data=1),
            params,
            torch.empty(rows, 32, device="meta"),
            memory_budget=budget,
            device=device,
        )
    return str(caught.value).splitlines()


def entry(lines: list[str], begins: str) -> str:
    return next((x.strip() for x in lines if x.strip().startswith(begins)), "")


def test_what_fills_the_memory_and_what_the_gradients_wait_for() -> None:
    lines = error_lines(CLIPPED, budget=WEIGHTS)
    roles = entry(lines, "there: ").removeprefix("there: ").split(", ")
    assert roles[:3] == ["optimizer state 256.0 KiB", "parameters 128.0 KiB", "gradients 128.0 KiB"] and len(roles) > 4
    assert "more than the 128.0 KiB it may have" in lines[1] and " bytes) more" in lines[1]
    assert "clip_by_global_norm" in entry(lines, "gradients: ")
    assert not entry(error_lines(PLAIN), "gradients: "), "each is used in the backward, as soon as it is made"
    assert "micro-batches of a loop" in entry(error_lines(fz.accumulate(2)(PLAIN), rows=2), "gradients: ")


@pytest.mark.full
def test_advice_was_tried() -> None:
    """With the peak that it leads to; of the tiers that there are; more batch only where there is a batch."""
    lines = error_lines(CLIPPED, budget=3 * WEIGHTS)
    offloaded = entry(lines, "with fz.offload('cpu', ('opt_state', 'params')): ")
    assert re.search(r", which fits, and \d+\.\d KiB on the host$", offloaded) and "together" not in str(lines)
    assert lines[-1] == "Fix: apply the transform that lowers it most, or raise the budget" and "remat" not in str(
        lines
    ), "a batch of one row: not a smaller one"
    lines = error_lines(PLAIN, rows=4096, budget=4 * WEIGHTS)
    assert entry(lines, "with fz.accumulate(num_micro_batches=8): ") and not entry(lines, "with fz.remat(")
    assert "use a smaller batch" in lines[-1] and "unused buffers" not in entry(lines, "there: ")
    together = entry(lines, "with fz.accumulate(num_micro_batches=8), ")
    assert "together: " in together and together.count("fz.accumulate") == 1 and "fz.remat(policy='full')" in together
    assert sum(x.strip().startswith("with ") for x in lines) == 2
    lines = error_lines(PLAIN, device="cpu")
    assert entry(lines, "with fz.offload('nvme', ('opt_state', 'params'), path='DIR'): ") and "'cpu'" not in str(
        lines
    ), "one memory: there is a disk alone"
    lines = error_lines(fz.data_parallel(fz.accumulate(4)(PLAIN)), rows=4, mesh=fz.AbstractMesh(data=4))
    assert entry(lines, "with fz.shard_params(axis='data'): ") or "fz.shard_params(axis='data')" in str(lines)
    assert entry(lines, "with fz.accumulate(num_micro_batches=4, schedule='layerwise'): ") or "layerwise" in str(lines)


def test_few_programs_are_lowered_for_advice_on_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first ones are about what takes the most."""
    monkeypatch.setattr(importlib.import_module("fzero.compiler.advice"), "OPS_FOR_ADVICE", 0)
    advice = [x.strip() for x in error_lines(PLAIN, rows=4096, budget=4 * WEIGHTS) if x.strip().startswith("with ")]
    assert len(advice) == 1 and advice[0].startswith(("with fz.remat", "with fz.accumulate"))
    advice = [x.strip() for x in error_lines(CLIPPED, budget=3 * WEIGHTS) if x.strip().startswith("with ")]
    assert len(advice) == 1 and advice[0].startswith("with fz.offload('cpu', ('opt_state', 'params'))")


def test_auto_says_what_fills_the_device() -> None:
    lines = error_lines(fz.offload("auto")(CLIPPED), budget="40KiB")
    assert " of 40.0 KiB, host " in entry(lines, "opt_state and params on the host: device ")
    assert entry(lines, "there: ") and "clip_by_global_norm" in entry(lines, "gradients: ")
    assert lines[-1] == 'Fix: give it a disk, fz.offload("auto", path=DIR), or raise a budget'


def test_sizes_below_a_mebibyte_can_be_told_apart() -> None:
    assert (
        "B, " in (first := error_lines(PLAIN, budget="1000B")[1])
        and first.count("KiB") == 2
        and first.endswith("more than the 1000 B it may have")
    )


@pytest.mark.parametrize("wrong", ["0GB", -1, "lots", 1.5])
def test_budgets_that_are_none_are_refused_by_name(wrong: Any) -> None:
    mesh = fz.make_mesh(data=1)
    with pytest.raises(FzeroValueError) as caught:
        fz.compile(PLAIN, mesh, memory_budget=wrong, backend="eager")
    assert f"memory_budget={wrong!r}" in str(caught.value) and "24GiB" in str(caught.value)
    if wrong != "0GB":
        with pytest.raises(FzeroValueError, match=r"host_budget=.*\n.*disk_budget="):
            fz.compile(PLAIN, mesh, host_budget=wrong, disk_budget=wrong, backend="eager")


def test_a_budget_of_nothing_and_one_without_a_unit() -> None:
    zero = "memory_budget=.*must be greater than 0"
    with pytest.raises(FzeroValueError, match=zero):
        fz.compile(PLAIN, fz.make_mesh(data=1), memory_budget="0GB")
    params, x = [{"up": torch.empty(32, 128), "down": torch.empty(128, 32)}], torch.empty(1, 32)
    with pytest.raises(FzeroValueError, match=zero):
        fz.lower(PLAIN, fz.AbstractMesh(data=1), params, x, memory_budget=0)
    with pytest.raises(FzeroValueError, match='memory_budget=80: these are bytes; did you mean "80GB"'):
        fz.lower(PLAIN, fz.AbstractMesh(data=1), params, x, memory_budget=80)
