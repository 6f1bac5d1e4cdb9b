"""accumulate(n, schedule="layerwise"): the bits of a loop over micro-batches; parameters are gathered once per step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import test_parity
import test_steps as test_step
import torch
from models import MODELS, OPTIMIZERS, STAGES, batches, meta_part, part
from offloads import OFFLOADS

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError, TransformError, VerifyError
from fzero.ir.ops import transfer_bytes
from fzero.ir.pool_verifier import check
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import verify
from fzero.plan.memory import ROLES, memory_of
from fzero.transforms import offload as offload_transform

# --- the same bits ---


@fz.block
def doubled(p):
    return torch.sin(p["w"] * 2.0)


@fz.block
def product(p, x, y):
    return torch.tanh(x @ y * p["gain"])


def read_twice_loss(params, batch):
    """The gradient of `bias` is what the vjp of `doubled` reads; `bias` and `scale` are results as they are; the batch
    has a leaf that is not cut."""
    y = doubled(params["first"]) + params["bias"]
    x = product(params["second"], batch["x"], y) * batch["by"]
    return x.square().mean() + 0.1 * params["scale"], {"bias": params["bias"].sum(), "scale": params["scale"]}


def read_twice_params() -> Any:
    w = torch.linspace(-1, 1, 20).view(5, 4)
    return {
        "first": {"w": w},
        "bias": w.flip(0) * 0.1,
        "second": {"gain": torch.tensor(1.5)},
        "scale": torch.tensor(0.3),
    }


def tied_loss(params, batch):
    return MODELS["gpt"].loss({**params, "head": {"ln": params["head"]["ln"], "out": params["embed"]["token"]}}, batch)


def rows(*wanted: str, **more: torch.Tensor) -> Any:
    batch = {**test_step.ragged_batch(), **more}
    return [{k: batch[k] for k in (*wanted, *more)}] * 3


PARAMS = {"w": test_step.weights()["w"]}
CASES: dict[str, Any] = {  # loss, parameters, batches, options of the step
    **{name: (model.loss, model.init, batches(3), {}) for name, model in MODELS.items()},
    "weighted": (test_step.weighted_loss, PARAMS, rows("x", "y", "times"), {"has_aux": True}),
    "dropout": (test_step.dropout_loss, PARAMS, rows("x"), {}),
    "tied": (tied_loss, models.gpt_init, batches(3), {}),
    "read twice": (read_twice_loss, read_twice_params(), rows("x", by=torch.tensor(2.0)), {"has_aux": True}),
}


def trained(
    mesh: fz.Mesh, name: str, *transforms: Any, optimizer: str = "clipped", **options: Any
) -> tuple[Any, Program]:
    """The metrics of three steps and the gathered state, and the program."""
    loss, params, data, more = CASES[name]
    step = fz.compose(*transforms)(fz.train_step(loss, OPTIMIZERS[optimizer](), **more))
    train = fz.compile(step, mesh, **{"backend": "eager", **options})
    state, found = train.init(params, fz.random.key(7)), []
    for batch in data:
        state, metrics = train(state, part(batch, mesh))
        found.append({name: metrics[name] for name in ("loss", "grad_norm", "aux") if name in metrics})
    return (found, train.gather(state)), train.program


def assert_same_bits(got: Any, want: Any, what: Any) -> None:
    assert fz.tree.structure(got) == fz.tree.structure(want)
    for path, a, b in zip(fz.tree.paths(got), fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (what, path)


BESIDE: list[Any] = [(), (fz.mixed_precision("bf16"),), (fz.mixed_precision("bf16", reduce="bf16"), fz.remat("none"))]


@pytest.mark.full(keep=["dropout", "read twice"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_in_a_loop(name):
    mesh, which = fz.make_mesh(data=1), list(CASES).index(name)
    for num in (2 + which % 3, 2 + (which + 1) % 3):
        # a model meets two of three numbers and of three transforms, which all meet elsewhere
        more = BESIDE[(num + which) % 3]
        got, program = trained(mesh, name, fz.accumulate(num, schedule="layerwise"), *more)
        want, looped = trained(mesh, name, fz.accumulate(num), *more)
        assert not any(op.op == "loop" for op in program.instructions) and any(
            op.op == "loop" for op in looped.instructions
        )
        assert_same_bits(got, want, (num, more))


TIERS = ["cpu params", "cpu all", "nvme both", "nvme on device", "other mix"]


@pytest.mark.full(keep=["cpu all-True"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("offload", TIERS)
def test_the_same_bits_from_every_tier(tmp_path, offload, unified):
    mesh = fz.make_mesh(data=1, unified_memory=unified)
    cases = [
        ("gpt", "adamw", (fz.remat("none"),)),
        ("mixed", "clipped", (fz.mixed_precision("bf16"),)),
        ("read twice", "sgd", ()),
        ("tied", "adamw", (fz.mixed_precision("bf16"),)),
    ]
    for name, optimizer, more in cases[(TIERS.index(offload) + unified) % 2 :: 2]:
        # the others on the other kind of memory
        got, program = trained(
            mesh, name, fz.accumulate(3, schedule="layerwise"), *more, *OFFLOADS[offload](tmp_path), optimizer=optimizer
        )
        assert any(op.tiers for op in program.instructions)
        assert_same_bits(got, in_a_loop(name, *more, optimizer=optimizer), (name, more))


@functools.cache
def in_a_loop(name: str, *more: Any, optimizer: str) -> Any:
    return trained(fz.make_mesh(data=1), name, fz.accumulate(3), *more, optimizer=optimizer)[0]


# --- ranks ---


ON_RANKS = {"gpt": 2, "bare": 0, "mixed": 3, "tied": 1}
"""The stage at which each model is trained. Others are in test_tiers_apart_on_ranks."""
APART = {0: "gpt", 1: "mixed", 2: "bare", 3: "gpt"}


def on_ranks(num: int, folder: Path) -> list[Any]:
    """Of each model and stage: layerwise, layerwise from every tier, and if that is the same sum, in a loop."""
    mesh, out = fz.make_mesh(data=-1), []
    for name, stage in ON_RANKS.items():
        layerwise = (STAGES[stage](), fz.accumulate(num, schedule="layerwise"))
        forms = [layerwise, (*layerwise, fz.offload("nvme", ("opt_state", "params"), path=folder))]
        if stage < 2:  # in a loop too gradients are added up and then reduced
            forms.append((STAGES[stage](), fz.accumulate(num)))
        out.append([trained(mesh, name, *transforms)[0] for transforms in forms])
    return out


def apart_on_ranks(num: int) -> list[Any]:
    mesh, out = fz.make_mesh(data=-1, unified_memory=False), []
    for stage, name in APART.items():
        layerwise = (STAGES[stage](), fz.accumulate(num, schedule="layerwise"))
        out.append(
            [
                trained(mesh, name, *layerwise)[0],
                trained(mesh, name, *layerwise, fz.offload("cpu", ("opt_state", "params", "activations")))[0],
            ]
        )
    return out


@pytest.mark.full
def test_every_stage_equals_the_plain_step(run_ranks, tmp_path):
    for results in run_ranks(2, on_ranks, 3, tmp_path):
        for (name, stage), ((metrics, state), *others) in zip(ON_RANKS.items(), results, strict=True):
            want_metrics, want = plain(name)
            assert test_parity.difference(state.params, want.params) < 1e-5, (name, stage)
            assert test_parity.difference(state.opt_state, want.opt_state) < 1e-5, (name, stage)
            assert test_parity.difference([m["loss"] for m in metrics], [m["loss"] for m in want_metrics]) < 1e-5
            assert len(others) == (2 if stage < 2 else 1)
            for other in others:
                assert_same_bits(other, (metrics, state), (name, stage))


@pytest.mark.full
def test_tiers_apart_on_ranks(run_ranks):
    for results in run_ranks(2, apart_on_ranks, 3):
        for stage, (got, want) in zip(APART, results, strict=True):
            assert_same_bits(got, want, stage)


@functools.cache
def plain(name: str) -> Any:
    loss, params, data, more = CASES[name]
    step = fz.train_step(loss, OPTIMIZERS["clipped"](), **more)
    state, found = step.init(params(fz.random.key(7)), fz.random.key(7)), []
    for batch in data:
        state, metrics = step(state, batch)
        found.append(metrics)
    return found, state


# --- what travels ---


@functools.cache
def lowered(*transforms: Any, ranks: int = 2, layers: int = 4, optimizer: str = "adamw", **mesh: Any) -> Program:
    step = fz.compose(*transforms)(fz.train_step(models.gpt_loss, OPTIMIZERS[optimizer]()))
    batch = meta_part(batches(1, size=12 * ranks)[0], ranks)
    return fz.lower(
        step, fz.AbstractMesh(data=ranks, **mesh), functools.partial(models.gpt_init, layers=layers), batch
    ).program


def moved(program: Program) -> dict[str, tuple[int, int]]:
    """How many transfers of a step there are of each kind, copies by their tiers, and their bytes on a rank."""
    out: dict[str, tuple[int, int]] = {}
    for op, times in program.walk():
        if op.op.endswith("start"):
            kind = " ".join((op.op, *op.tiers))
            num, nbytes = out.get(kind, (0, 0))
            out[kind] = num + times, nbytes + times * transfer_bytes(op, program.values_by_name, program.mesh)
    return out


@pytest.mark.full
@pytest.mark.parametrize(
    ("num", "more"),
    [(4, ()), (2, (fz.mixed_precision("bf16"),)), (3, (fz.remat("none"),))],
    ids=["fp32", "bf16", "none"],
)
def test_parameters_and_gradients_travel_once_a_step(num, more):
    """A part of what a loop moves, and just what the step without micro-batches does."""
    layerwise, looped, once = (
        moved(lowered(fz.shard_params(), *t, *more))
        for t in ((fz.accumulate(num, schedule="layerwise"),), (fz.accumulate(num),), ())
    )
    assert layerwise == once
    for op in ("all_gather_start", "reduce_scatter_start"):
        assert [num * n for n in layerwise[op]] == list(looped[op])
    whole = moved(lowered(fz.shard_opt_state(), fz.accumulate(num), *more))
    assert layerwise["reduce_scatter_start"] == whole["reduce_scatter_start"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "tier", "op"),
    [
        (0, fz.offload("nvme", "params", path="/scratch"), "copy_start disk host"),
        (3, fz.offload("cpu", "params"), "copy_start host device"),
    ],
    ids=["whole, on disk", "sharded, on the host"],
)
def test_leaves_are_fetched_once_a_step(stage, tier, op):
    """Where a loop reads what forward and backward need once a micro-batch: the embedding and the head once, the layers
    twice."""

    def fetched(*transforms: Any) -> tuple[int, int]:
        return moved(lowered(STAGES[stage](), tier, *transforms, unified_memory=False))[op]

    once = fetched()
    assert fetched(fz.accumulate(2, schedule="layerwise")) == fetched(fz.accumulate(4, schedule="layerwise")) == once
    (few, less), (many, more) = fetched(fz.accumulate(2)), fetched(fz.accumulate(4))
    leaves = [x for x in lowered(STAGES[stage](), tier, unified_memory=False).leaves.values() if x.role == "params"]
    expected = sum(x.numel * 4 * (2 if "layers" in x.path else 1) for x in leaves) // (2 if stage == 3 else 1)
    assert (many - few, more - less) == (2 * 10, 2 * expected) and expected < once[1]


def test_activations_that_rest_come_back_for_one_micro_batch(monkeypatch):
    """Its parameters come with the first one's, a block ahead; the others' activations one micro-batch ahead."""
    monkeypatch.setattr(offload_transform, "SMALL", 0)
    offload = fz.offload("cpu", ("params", "activations"))
    program = lowered(
        offload, fz.accumulate(4, schedule="layerwise"), fz.remat("none"), fz.data_parallel(), unified_memory=False
    )
    waits = {op.args[0]: op for op in program.instructions if op.op == "wait"}
    ops = [op for op in program.instructions if op.by in ("offload", "fuse") or op.block is not None]
    seen = 0
    for i, op in enumerate(ops):
        if op.tiers == ("host", "device") and not op.writes:
            brought = {v.name for v in waits[op.out[0].name].out}
            reader = next(
                (k for k, x in enumerate(ops) if x.block is not None and not brought.isdisjoint(x.args)), None
            )
            if reader is None:  # what the update leaves on the device
                continue
            passed = sum(x.block is not None for x in ops[i:reader])
            micro = ops[reader].micro[0]
            assert micro == 0 or not any(a in program.leaves for a in op.args)
            assert passed <= (4 if micro == 0 else 1)
            seen += micro > 0
    assert seen == 3 * 4  # of each layer the micro-batches but the first


# --- the program ---


def test_what_only_reads_the_state_is_made_once():
    program = fz.lower(
        fz.accumulate(fz.train_step(read_twice_loss, optim.sgd(0.1), has_aux=True), 3, schedule="layerwise"),
        fz.AbstractMesh(data=1),
        read_twice_params(),
        rows("x", by=torch.tensor(2.0))[0],
    ).program
    called = [op.fn for op in program.instructions if op.op == "call"]
    assert called.count("doubled") == 1 and called.count("product") == 3


def test_a_line_and_its_repetitions_stand_together():
    for transforms in ((fz.data_parallel(),), (fz.shard_params(), fz.mixed_precision("bf16"))):
        program = lowered(*transforms, fz.accumulate(3, schedule="layerwise"))
        blocks = [op for op in program.instructions if op.block is not None]
        assert [op.micro for op in blocks] == [(m, 3) for _ in range(len(blocks) // 3) for m in range(3)]
        groups = [blocks[i : i + 3] for i in range(0, len(blocks), 3)]
        assert all(len({op.fn for op in group}) == 1 for group in groups)


@pytest.mark.full(keep=["0-cpu"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_function_is_compiled_twice(stage, device):
    """What makes a total and what makes a part of it is one function, writing to places of its caller's."""
    more = (fz.mixed_precision("bf16"),) if (stage + (device == "cuda")) % 2 else ()
    layerwise, looped = (
        lowered(STAGES[stage](), a, *more, device_type=device)
        for a in (fz.accumulate(3, schedule="layerwise"), fz.accumulate(3))
    )
    assert len(layerwise.functions) <= len(looped.functions)


def whole_blocks(program: Program) -> int:
    """The most gathers alive at once: started, and with readers left."""
    last = {a: i for i, op in enumerate(program.instructions) for a in op.args}
    waits = {op.args[0]: op for op in program.instructions if op.op == "wait"}
    spans = [
        (i, max(last.get(v.name, i) for v in waits[op.out[0].name].out))
        for i, op in enumerate(program.instructions)
        if op.op == "all_gather_start"
    ]
    return max(sum(a <= i <= b for a, b in spans) for i in range(len(program.instructions)))


def test_a_gather_starts_before_all_of_the_block_before():
    """One block ahead, that is all its micro-batches ahead: two blocks are whole at a time, as without."""
    program = lowered(fz.shard_params(), fz.accumulate(3, schedule="layerwise"), fz.remat("full"), optimizer="clipped")
    assert whole_blocks(program) == whole_blocks(lowered(fz.shard_params(), fz.remat("full"), optimizer="clipped")) == 2
    ops = program.instructions
    waits = {op.args[0]: op for op in ops if op.op == "wait"}
    between = []
    for i, op in enumerate(ops):
        if op.op == "all_gather_start":
            brought = {v.name for v in waits[op.out[0].name].out}
            reader = next(k for k, x in enumerate(ops) if not brought.isdisjoint(x.args) and k > i)
            between.append(sum(x.block is not None for x in ops[i:reader]))
    assert between[0] == 0 and set(between[1:]) == {3}


def test_whole_gradients_do_not_pile_up():
    """A block's sum and one micro-batch's beside it, while the one before is reduced; everything else is shards."""
    program = lowered(fz.shard_grads(), fz.accumulate(4, schedule="layerwise"), layers=8, shared_memory=False)
    params = [x for x in program.leaves.values() if x.role == "params"]
    total = sum(x.numel * 4 for x in params)
    block = max(sum(x.numel * 4 for x in params if f"['layers'][{i}]" in x.path) for i in range(8))
    most = max(dict(zip(ROLES, s.by_role, strict=True))["gradients"] for s in memory_of(program, lambda _: 0))
    assert most <= total // 2 + 3 * block + 4096 < total


def test_an_update_comes_with_its_blocks_last_micro_batch():
    """As without micro-batches: nothing of all leaves must be known, so gradients need not wait for each other."""
    program = lowered(fz.shard_params(), fz.accumulate(3, schedule="layerwise"))
    ops = list(program.instructions)
    updates = [i for i, op in enumerate(ops) if op.op == "call" and op.writes]
    backwards = [i for i, op in enumerate(ops) if op.is_backward]
    assert len(updates) == 6 and sum(i < backwards[-1] for i in updates) >= 4
    assert not any(
        ops[i].micro[0] < 2 and ops[i].micro[0] + 1 == ops[k].micro[0] for i, k in _around(updates, backwards)
    )


def _around(updates: Sequence[int], backwards: Sequence[int]) -> list[tuple[int, int]]:
    """The backwards right before and right after each update that has both."""
    return [
        (max(b for b in backwards if b < i), min(b for b in backwards if b > i))
        for i in updates
        if backwards[0] < i < backwards[-1]
    ]


@pytest.mark.full
def test_a_budget_fits_it():
    step = fz.compose(fz.shard_params(), fz.remat("auto"), fz.accumulate(2, schedule="layerwise"))(
        fz.train_step(models.gpt_loss, optim.adamw(1e-3))
    )
    smallest = fz.compose(fz.shard_params(), fz.remat(0.0), fz.accumulate(2, schedule="layerwise"))
    smallest = smallest(fz.train_step(models.gpt_loss, optim.adamw(1e-3)))
    mesh, batch = fz.AbstractMesh(data=2), meta_part(batches(1)[0], 2)
    least = fz.lower(smallest, mesh, models.gpt_init, batch).plan.peak_bytes
    for more in (0, 20_000, 1_000_000):
        found = fz.lower(
            step, fz.AbstractMesh(data=2), models.gpt_init, meta_part(batches(1)[0], 2), memory_budget=least + more
        )
        assert found.plan.peak_bytes <= least + more and not found.options.full_grads
    with pytest.raises(fz.errors.BudgetError):
        fz.lower(step, fz.AbstractMesh(data=2), models.gpt_init, meta_part(batches(1)[0], 2), memory_budget=least // 2)


# --- rules and errors ---


def edited(program: Program, which: Any, new: Any) -> Program:
    changed = program.map_instructions(lambda op: [new(op)] if which(op) else [op])
    assert changed.instructions != program.instructions
    return changed


def test_broken_sums_are_rejected():
    program = lowered(fz.shard_params(), fz.accumulate(3, schedule="layerwise"))
    adds = [op for op in program.instructions if op.op == "add"]

    def rejects(which: Instruction, new: Instruction, *words: str) -> None:
        with pytest.raises(VerifyError) as caught:
            check(verify(edited(program, lambda op: op.op == "add" and op.out == which.out, lambda _: new)))
        assert all(word in str(caught.value) for word in words), str(caught.value)

    first, second = adds[:2]
    stale = (first.args[0], *second.args[1:])
    rejects(second, replace(second, args=stale), f"{first.args[0]} has been overwritten")
    rejects(
        first, replace(first, args=first.args[:-1]), "adds 3 values to 3 totals" if len(first.out) == 4 else "values to"
    )
    swapped = (first.args[1], first.args[0], *first.args[2:])
    rejects(first, replace(first, args=swapped), "is added to")
    # what is added to must lie where nobody else writes: its place given to another value
    taken = next(
        op
        for op in program.instructions
        if op.op == "call" and second.args[len(second.out)] in {v.name for v in op.out}
    )
    total = next(op for op in program.instructions if op.op == "call" and first.args[0] in {v.name for v in op.out})
    overlapping = edited(program, lambda op: op.out == taken.out, lambda op: replace(op, into=total.into))
    with pytest.raises(VerifyError, match="is read, but"):
        check(overlapping)


def test_it_is_a_choice_of_a_step():
    step = fz.train_step(models.gpt_loss, optim.sgd(0.1))
    layerwise = fz.accumulate(step, 2, schedule="layerwise")
    assert (
        layerwise == fz.accumulate(2, schedule="layerwise")(step)
        and str(layerwise.transforms[0]) == "accumulate(num_micro_batches=2, schedule='layerwise')"
    )
    with pytest.raises(TransformError, match="two different accumulate"):
        fz.accumulate(layerwise, 2)
    with pytest.raises(FzeroValueError, match="schedule=2: must be one of 'sequential', 'layerwise'"):
        fz.accumulate(2, schedule=2)  # type: ignore[arg-type]
    both = fz.shard_params(), fz.accumulate(2, schedule="layerwise")
    assert fz.compose(*both)(step) == fz.compose(*both[::-1])(step)
