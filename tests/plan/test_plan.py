"""The plan: liveness with known peaks, queues with known times, closed forms, what is measured, and what is drawn and
written."""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import models
import pytest
import torch
from models import BATCH, STAGES, batches, meta_part, part

import fzero as fz
from fzero import errors, optim
from fzero._compat import compat
from fzero._utils.units import duration, parse_bytes, size
from fzero.ir.attributes import LoopAttrs, Over, PartAttrs, ReduceAttrs, ScatterAttrs
from fzero.ir.ops import transfer_bytes
from fzero.ir.program import Function, Instruction, Program, Value
from fzero.plan.cost import channel
from fzero.plan.device_lookup import KNOWN, get_device
from fzero.plan.memory import ROLE_NAMES, ROLES, memory_of, resting_bytes
from fzero.plan.picture import memory_over_time
from fzero.plan.plan import plan
from fzero.plan.process_memory import CONTEXT, INTERPRETER, NCCL
from fzero.plan.render import tables
from fzero.plan.timeline import COMPUTE, simulate
from fzero.runtime.op_timers import allocated
from fzero.sharding.placements import IN_FLIGHT, flat_shard
from fzero.trace.graph_capture import record
from fzero.trace.storages import output_storages

MESH = fz.AbstractMesh(data=2)
F32 = torch.float32


# --- programs by hand ---


def function(name, fn, *inputs):
    with compat.FakeTensorMode():
        fakes = [torch.empty(shape) for shape in inputs]
        return Function(name, record(fn, fakes, owner="test", names=[f"x_{i}" for i in range(len(fakes))]))


def call(fn, args, *out):
    return Instruction("call", args, tuple(Value(name, shape, F32) for name, shape in out), fn)


def gather(handle, arg, out, shape):
    start = Instruction(
        "all_gather_start",
        (arg,),
        (Value(handle, (), torch.uint8, IN_FLIGHT),),
        attrs=Over(axes=("data",)),
    )
    return start, Instruction("wait", (handle,), (Value(out, shape, F32),))


def program_of(ops, functions, outputs, inputs):
    return Program(
        "hand",
        MESH,
        tuple(Value(n, s, F32) for n, s in inputs),
        {},
        tuple(ops),
        outputs,
        {f.name: f for f in functions},
    )


def series(program, temporaries=0):
    return [s.total for s in memory_of(program, lambda _: temporaries)]


def test_a_value_is_alive_from_its_line_to_its_last_reader():
    double = function("double", lambda x: [x * 2], (100,))
    ops = [
        call("double", ("batch",), ("a", (100,))),
        call("double", ("a",), ("b", (100,))),
        call("double", ("b",), ("c", (100,))),
    ]
    program = program_of(ops, [double], ("c",), [("batch", (100,))])
    assert series(program) == [800, 1200, 1200]  # batch + a; batch + a + b; batch + b + c
    assert series(program, temporaries=60) == [860, 1260, 1260]


def test_what_is_never_read_is_gone_at_once_and_what_is_returned_stays():
    double = function("double", lambda x: [x * 2], (100,))
    ops = [
        call("double", ("batch",), ("a", (100,))),
        call("double", ("batch",), ("b", (100,))),
        call("double", ("batch",), ("c", (100,))),
    ]
    assert series(program_of(ops, [double], ("c",), [("batch", (100,))])) == [800, 800, 800]
    assert series(program_of(ops, [double], ("a", "c"), [("batch", (100,))])) == [800, 1200, 1200]


def test_views_are_not_counted_twice_and_keep_what_they_view():
    halves = function("halves", lambda x: [*(x * 2).split(50), x.view(10, 10)], (100,))
    same = function("same", lambda x, y: [x + y], (50,), (50,))
    ops = [
        # a and b share 400 bytes, v is the batch
        call("halves", ("batch",), ("a", (50,)), ("b", (50,)), ("v", (10, 10))),
        call("same", ("a", "a"), ("c", (50,))),
        call("same", ("b", "c"), ("d", (50,))),
    ]
    program = program_of(ops, [halves, same], ("d", "v"), [("batch", (100,))])
    assert series(program) == [800, 1000, 1200]  # b keeps all of the 400 bytes that a is gone from
    argument, root, nbytes = zip(*output_storages(halves.graph), strict=True)
    assert argument == (None, None, 0) and root[0] == root[1] != root[2] and nbytes[0] == nbytes[1] == 400


def test_results_of_matrix_products_that_are_reshaped_are_one_storage():
    product = function("product", lambda x: [x.view(2, 5, 10) @ torch.ones(10, 10)], (10, 10))
    assert [o.nbytes for o in output_storages(product.graph)] == [400] and output_storages(product.graph)[
        0
    ].argument is None


def test_a_gather_is_alive_from_its_start_to_the_last_reader_of_what_it_brought():
    double = function("double", lambda x: [x * 2], (100,))
    start, wait = gather("g", "shard", "w", (100,))
    ops = [
        start,
        call("double", ("batch",), ("a", (100,))),
        wait,
        call("double", ("w",), ("b", (100,))),
        call("double", ("a",), ("c", (100,))),
    ]
    program = program_of(ops, [double], ("b", "c"), [("batch", (100,)), ("shard", (50,))])
    # 600 of inputs, then 400 of w, a; w is gone when c is made
    assert series(program) == [1000, 1400, 1400, 1800, 1800]
    roles = [dict(zip(ROLES, s.by_role, strict=True)) for s in memory_of(program, lambda _: 0)]
    assert [r["gathered"] for r in roles] == [400, 400, 400, 400, 0]


def test_a_reduction_holds_what_it_reads_until_its_wait():
    double = function("double", lambda x: [x * 2], (100,))
    start = Instruction(
        "reduce_scatter_start",
        ("g",),
        (Value("h", (), torch.uint8, IN_FLIGHT),),
        attrs=ScatterAttrs(axes=("data",), reduction="sum"),
    )
    wait = Instruction("wait", ("h",), (Value("s", (100,), F32, flat_shard(["data"])),))
    ops = [
        call("double", ("batch",), ("g", (100,))),
        start,
        call("double", ("batch",), ("a", (100,))),
        wait,
        call("double", ("a",), ("b", (100,))),
    ]
    program = program_of(ops, [double], ("s", "b"), [("batch", (100,))])
    assert series(program) == [800, 1000, 1400, 1400, 1400]  # g and s until the wait, then s with a and b


def test_a_total_lives_across_the_turns_of_its_loop():
    double = function("double", lambda x: [x * 2], (100,))
    body = (
        Instruction("take_part", ("batch",), (Value("p", (100,), F32),), attrs=PartAttrs(count=3)),
        call("double", ("p",), ("g", (100,))),
        Instruction("accumulate", ("g",), (Value("total", (100,), F32),)),
    )
    loop = Instruction("loop", attrs=LoopAttrs(count=3), body=body)
    program = program_of([loop, call("double", ("total",), ("out", (100,)))], [double], ("out",), [("batch", (300,))])
    samples = memory_of(program, lambda _: 0)
    assert [s.total for s in samples] == [1200, 1600, 2000, 1600, 2000, 2000, 2000]
    assert [(s.line, s.iteration) for s in samples] == [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (4, 0)]


def test_the_pool_counts_once_for_all_that_lies_in_it():
    program = lowered(3).program
    assert program.pool_bytes > 0
    for sample in memory_of(program, lambda _: 0):
        roles = dict(zip(ROLES, sample.by_role, strict=True))
        assert 0 <= roles["idle_pool"] <= program.pool_bytes
        assert sample.total >= resting_bytes(program) + program.pool_bytes
    gathered = max(dict(zip(ROLES, s.by_role, strict=True))["gathered"] for s in memory_of(program, lambda _: 0))
    assert 0 < gathered <= program.pool_bytes


# --- queues by hand ---


def timed(program, times, asynchronous):
    """`times`: seconds by name of the function or of the handle."""
    taken = lambda op, _: times.get(op.fn or (op.out[0].name if op.out else ""), 0.0)  # noqa: E731
    return simulate([program], taken, asynchronous)[0]


@functools.cache
def two_gathers():
    work = function("work", lambda x: [x * 2], (100,))
    (start_1, wait_1), (start_2, wait_2) = gather("g_1", "s_1", "w_1", (100,)), gather("g_2", "s_2", "w_2", (100,))
    ops = [
        start_1,
        start_2,
        wait_1,
        call("work", ("w_1",), ("a", (100,))),
        wait_2,
        call("work", ("w_2",), ("b", (100,))),
    ]
    return program_of(ops, [work], ("a", "b"), [("s_1", (50,)), ("s_2", (50,))])


def test_transfers_of_a_channel_queue_and_hide_behind_compute():
    found = timed(two_gathers(), {"g_1": 3.0, "g_2": 4.0, "work": 2.0}, asynchronous=True)
    # the first gather is waited for in full; the second runs from 3 to 7, behind the work from 3 to 5
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (9.0, 4.0, 5.0)
    assert found.exposed == {2: 3.0, 4: 2.0} and found.busy_seconds == {"gather:data": 7.0}
    assert [(e.start, e.seconds) for e in found.events if e.queue == "gather:data"] == [(0.0, 3.0), (3.0, 4.0)]


def test_gathers_and_reductions_of_one_axis_share_its_link():
    """Each as if it had the link to itself, one after the other: two at once never have its bandwidth twice. Links of
    two axes work side by side."""
    for axis, begins in (("data", 3.0), ("replica", 0.0)):
        start, wait = gather("g", "s", "w", (100,))
        reduce = Instruction(
            "all_reduce_start",
            ("x",),
            (Value("r", (), torch.uint8, IN_FLIGHT),),
            attrs=ReduceAttrs(axes=(axis,), reduction="sum"),
        )
        ops = [start, reduce, wait, Instruction("wait", ("r",), (Value("y", (100,), F32),))]
        found = timed(
            program_of(ops, [], ("w", "y"), [("s", (50,)), ("x", (100,))]), {"g": 3.0, "r": 2.0}, asynchronous=True
        )
        assert [e.start for e in found.events if e.queue != COMPUTE] == [0.0, begins] and found.step_seconds == max(
            3.0, begins + 2.0
        )
        assert found.busy_seconds == {"gather:data": 3.0, f"reduce:{axis}": 2.0}


def test_without_asynchrony_a_transfer_takes_its_time_at_its_wait():
    found = timed(two_gathers(), {"g_1": 3.0, "g_2": 4.0, "work": 2.0}, asynchronous=False)
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (11.0, 4.0, 7.0)
    assert [(e.start, e.seconds) for e in found.events if e.queue == "gather:data"] == [(0.0, 3.0), (5.0, 4.0)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_loop_of_many_turns_is_exact(asynchronous):
    """As its unrolled self; and what is not simulated is added up."""
    program = two_gathers()
    times = {"g_1": 3.0, "g_2": 4.0, "work": 2.0}
    loop = replace(program, instructions=(Instruction("loop", attrs=LoopAttrs(count=50), body=program.instructions),))
    unrolled = replace(program, instructions=tuple(op for _ in range(50) for op in program.instructions))
    one, other = timed(loop, times, asynchronous), timed(unrolled, times, asynchronous)
    for field in ("step_seconds", "compute_seconds", "exposed_seconds"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-9)
    assert one.num_transfers == other.num_transfers and one.busy_seconds == other.busy_seconds
    assert len(one.events) < 50 < len(other.events)
    assert sum(e.seconds for e in one.events if e.queue == COMPUTE) == pytest.approx(one.step_seconds)


# --- plans of real steps ---


@functools.cache
def lowered(stage=3, num_micro=1, precision="fp32", policy="min_cut", ranks=2, layers=3):
    step = fz.train_step(models.gpt_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    step = fz.compose(STAGES[stage](), fz.accumulate(num_micro), fz.mixed_precision(precision), fz.remat(policy))(step)
    init = functools.partial(models.gpt_init, layers=layers)
    return fz.lower(step, fz.AbstractMesh(data=ranks), init, meta_part(batches(1)[0], ranks))


def test_lowered_has_a_plan_that_is_made_once():
    assert lowered().plan is lowered().plan
    assert lowered().plan_on("h100").device == KNOWN["h100"].shared_by(2)
    assert lowered().plan_on("h100").step_seconds < lowered().plan_on("a100").step_seconds
    with pytest.raises(errors.FzeroValueError) as caught:
        lowered().plan_on("h1000")
    assert "h1000" in str(caught.value) and "h200" in str(caught.value)


def test_a_mesh_of_devices_that_are_not_here():
    """Planned for the device that is named: no device of the kind, and no build of torch for it, is needed."""
    step = fz.shard_params(fz.train_step(models.gpt_loss, optim.adamw(1e-3)))
    found = fz.lower(step, fz.AbstractMesh(data=2), models.gpt_init, meta_part(batches(1)[0], 2), device="h100")
    assert (found.program.mesh.device_type, found.program.mesh.shared_memory, found.plan.device) == (
        "cuda",
        False,
        KNOWN["h100"].shared_by(2),
    )
    here = fz.lower(step, fz.AbstractMesh(data=2), models.gpt_init, meta_part(batches(1)[0], 2))
    assert here.program.mesh.device_type == "cpu" and found.program.pool_bytes < here.program.pool_bytes


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize(
    ("stage", "num_micro", "precision"),
    [(0, 1, "fp32"), (1, 1, "bf16"), (2, 2, "fp32"), (3, 1, "fp32"), (3, 3, "bf16")],
)
def test_parts_add_up(stage, num_micro, precision, device):
    program = lowered(stage, num_micro, precision).program
    found = plan(program, device)
    assert sum(found.breakdown.values()) == found.peak_bytes == max(s.total for s in found.memory)
    assert found.persistent_bytes + found.pool_bytes < found.peak_bytes
    assert found.step_seconds == pytest.approx(found.compute_seconds + found.exposed_seconds)
    assert (
        found.exposed_seconds
        == pytest.approx(sum(c.exposed_seconds for c in found.channels.values()))
        == pytest.approx(sum(w.seconds for w in found.waits))
    )
    assert found.lines[found.peak_line.index] == found.peak_line.text and len(found.lines) == len(list(program.walk()))
    assert all(found.breakdown[role] > 0 for role in ("params", "opt_state", "batch", "gradients", "saved"))
    assert min(found.breakdown.values()) >= 0 and 0 < found.roofline_fraction < 1
    peak = found.device.peak_flops.get({"fp32": "float32", "bf16": "bfloat16"}[precision])
    assert found.mfu == (pytest.approx(found.model_flops / found.step_seconds / peak) if peak else None)
    assert peak is None or found.mfu == pytest.approx(
        found.roofline_fraction * found.device.flops["bfloat16"] / found.device.peak_flops["bfloat16"]
    )
    assert all(w.line.text.split(" = ")[1].startswith("wait(") for w in found.waits)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_of_a_channel_are_the_closed_form(ranks):
    """Stage 3 with everything recomputed: parameters travel twice but for the last block's and the embedding's,
    gradients once."""
    program = lowered(3, policy="full", ranks=ranks if BATCH % ranks == 0 else 2).program
    ranks = program.mesh.size
    found = plan(program, "cpu")
    params = [leaf for leaf in program.leaves.values() if leaf.role == "params"]
    once = lambda prefix: sum(x.numel * 4 for x in params if x.path.startswith(prefix))  # noqa: E731
    starts = [op for op, _ in program.walk() if op.op == "all_gather_start"]
    gathered = sum(transfer_bytes(op, program.values_by_name, program.mesh) for op in starts)
    assert found.channels["gather:data"].bytes == gathered and found.channels["gather:data"].num_transfers == len(
        starts
    )
    whole = sum(x.numel * 4 for x in params)
    exact = (2 * whole - once("params['embed']") - once("params['head']")) * (ranks - 1) / ranks
    assert gathered == pytest.approx(exact, abs=len(starts))
    reduced = found.channels["reduce:data"].bytes
    scalars = sum(
        transfer_bytes(x, program.values_by_name, program.mesh) for x, _ in program.walk() if x.op == "all_reduce_start"
    )
    assert reduced - scalars == pytest.approx(whole * (ranks - 1) / ranks, abs=len(starts))


def test_loops_multiply_what_they_hold():
    one, three = plan(lowered(3, 1).program, "h100"), plan(lowered(3, 3).program, "h100")
    assert three.channels["gather:data"].bytes == 3 * one.channels["gather:data"].bytes
    assert three.channels["gather:data"].num_transfers == 3 * one.channels["gather:data"].num_transfers
    for op, times in lowered(3, 3).program.walk():
        assert channel(op) is None or times in (1, 3)


@pytest.mark.full
def test_more_sharding_rests_and_peaks_lower():
    plans = [plan(lowered(stage, ranks=6, layers=6).program, "cpu") for stage in range(4)]
    resting = [p.persistent_bytes for p in plans]
    assert resting[0] > resting[1] == resting[2] > resting[3]
    peaks = [p.peak_bytes for p in plans]
    assert peaks[3] <= min(peaks[:3]) and peaks[1] <= peaks[0]
    assert (
        plan(lowered(3, policy="full").program, "cpu").breakdown["saved"]
        < plan(lowered(3, policy="none").program, "cpu").breakdown["saved"]
    )


def test_an_evaluation_has_a_plan():
    def evaluate(params, batch):
        return {"loss": fz.weighted(models.gpt_loss(params, batch) * 3, 3)}

    step = fz.shard_params(fz.eval_step(evaluate))
    found = fz.lower(step, MESH, models.gpt_init, (meta_part(batches(1)[0], 2),)).plan
    assert found.breakdown["opt_state"] == found.breakdown["saved"] == 0 < found.breakdown["gathered"]


def test_no_transfers_no_channels():
    found = lowered(0, ranks=1).plan
    assert not found.channels and not found.waits and found.exposed_seconds == 0 and "transfers\n" not in str(found)


def large_loss(params, batch):
    x = models.embed(params["embed"], batch["tokens"])
    for p in params["layers"]:
        x = models.layer(p, x, heads=160)
    return models.head(params["head"], x, batch["targets"])


def large_init(key, width=25600, layers=12, vocab=50304, seq=2048):
    def layer():
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        return {"ln_1": torch.ones(width), "ln_2": torch.ones(width), **{k: torch.zeros(s) for k, s in shapes.items()}}

    embed = {"token": torch.zeros(vocab, width), "position": torch.zeros(seq, width)}
    return {
        "embed": embed,
        "layers": [layer() for _ in range(layers)],
        "head": {"ln": torch.ones(width), "out": torch.zeros(vocab, width)},
    }


def test_a_hundred_billion_parameters_on_a_thousand_devices():
    """A trillion, searched: docs/reference/cli.md."""
    ranks = 1024
    step = fz.train_step(large_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4)))
    step = fz.compose(fz.shard_params(), fz.mixed_precision("bf16"), fz.remat("full"))(step)
    batch = {k: torch.empty(1, 2048, dtype=torch.int64, device="meta") for k in ("tokens", "targets")}
    lowered = fz.lower(step, fz.AbstractMesh(data=ranks), large_init, batch, device="h100")
    found = lowered.plan
    num_params = sum(x.numel for x in lowered.program.leaves.values() if x.role == "params")
    assert num_params == pytest.approx(1e11, rel=0.05)
    # the shards of norms are padded to a block
    assert found.persistent_bytes == pytest.approx(12 * num_params / ranks, rel=1e-4)
    block = 2 * 12 * 25600**2  # bytes of a layer in bf16
    assert found.persistent_bytes + 2 * block < found.peak_bytes < 12 * num_params
    assert found.channels["gather:data"].bytes == pytest.approx(2 * 2 * num_params, rel=0.02)
    assert not fz.fits(found, found.peak_bytes - 1) and fz.fits(found, found.peak_bytes)


# --- measured ---

CASES = {
    "plain": (),
    "full": (fz.remat("full"),),
    "none": (fz.remat("none"),),
    "accumulate": (fz.accumulate(2),),
    "bf16": (fz.mixed_precision("bf16"),),
    "layerwise": (fz.accumulate(3, schedule="layerwise"),),
    "bf16_layerwise": (fz.mixed_precision("bf16"), fz.accumulate(3, schedule="layerwise"), fz.remat("none")),
    "bf16_accumulate": (fz.mixed_precision("bf16"), fz.accumulate(3), fz.remat("none")),
}


INITS = {name: functools.partial(m.init, width=128) if name == "gpt" else m.init for name, m in models.MODELS.items()}
"""Wide enough for what libraries need inside a product in bfloat16 (tens of kB here, which no plan knows) not to
matter."""


def measured(stage, case, model="gpt"):
    """Predicted and measured peak, in bytes, of a step on this rank."""
    mesh = fz.make_mesh()
    step = fz.train_step(models.MODELS[model].loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    train = fz.compile(fz.compose(STAGES[stage](), *CASES[case])(step), mesh, backend="eager")
    state, batch = train.init(INITS[model]), part(batches(1, size=24)[0], mesh)
    state, _ = train(state, batch)
    inputs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves((state, batch))}
    pool = train.plan.pool_bytes  # made before the first step
    return train.plan.peak_bytes, sum(inputs.values()) + pool + allocated(lambda: train(state, batch), mesh.device)


@pytest.mark.full(keep=["bare-full", "bare-none", "mixed-full"])
@pytest.mark.parametrize(
    ("model", "case"), [(m, c) for m in models.MODELS for c in CASES if m == "gpt" or "bf16" not in c]
)
def test_the_peak_on_one_process_is_what_is_measured(case, model):
    predicted, real = measured(0, case, model)
    assert predicted == pytest.approx(real, rel=0.03 if "bf16" in case else 0.001)


ON_RANKS = {
    0: ("plain", "layerwise"),
    1: ("plain", "bf16_accumulate"),
    2: ("bf16_accumulate", "layerwise"),
    3: ("plain", "bf16_accumulate", "layerwise"),
}


@pytest.mark.full
@pytest.mark.parametrize("stage", ON_RANKS)
def test_the_peak_on_two_ranks_is_what_is_measured(run_ranks, stage):
    for case in ON_RANKS[stage]:
        for predicted, real in run_ranks(2, measured, stage, case):
            assert predicted == pytest.approx(real, rel=0.05), case


def test_a_compiled_step_has_the_plan_of_what_ran_last():
    train = fz.compile(fz.train_step(models.gpt_loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    with pytest.raises(errors.FzeroValueError, match="no program has been made yet"):
        _ = train.plan
    state = train.init(models.gpt_init)
    state, _ = train(state, batches(1)[0])
    first = train.plan
    assert first is train.plan and first.backend == "eager"
    train(state, batches(1, size=2 * BATCH)[0])
    assert train.plan.peak_bytes > first.peak_bytes


def profiled(num_micro):
    mesh = fz.make_mesh()
    step = fz.compose(fz.shard_params(), fz.accumulate(num_micro))(fz.train_step(models.gpt_loss, optim.sgd(0.1)))
    train = fz.compile(step, mesh, backend="eager")
    state, batch = train.init(models.gpt_init), part(batches(1)[0], mesh)
    state, events = train.profile(state, batch, steps=2)
    _, metrics = train(state, batch)
    ops = train.program.walk()
    return events, [(op.op, times) for op, times in ops], float(metrics["loss"]), int(state.step)


def test_a_profiled_step_times_every_line(run_ranks):
    for num_micro in (1, 2):
        for events, ops, loss, steps in run_ranks(2, profiled, num_micro):
            assert steps == 4 and loss > 0
            assert sum(e.queue == COMPUTE for e in events) == sum(times for op, times in ops if op != "loop")
            transfers = [e for e in events if e.queue != COMPUTE]
            assert len(transfers) == sum(times for op, times in ops if op.endswith("_start"))
            assert all(e.seconds >= 0 for e in events) and {e.queue for e in transfers} == {
                "gather:data",
                "reduce:data",
            }
            starts = [e.start for e in events if e.queue == COMPUTE]
            assert starts == sorted(starts)


# --- what is printed and written ---


def test_it_prints_as_a_table():
    found = plan(lowered().program, "cpu")
    text = str(found)
    assert f"op {found.peak_line.index}: " in text and "gather:data" in text and "longest waits" in text
    assert all(ROLE_NAMES[role] in text for role, n in found.breakdown.items() if n)
    assert max(map(len, text.splitlines())) <= 120 and "\x1b" not in text
    assert text.split("longest waits")[1].count("wait(") == 5


def test_json_holds_what_the_plan_holds(tmp_path):
    found = lowered(2, 2).plan
    data = json.loads(found.to_json(tmp_path / "plan.json"))
    assert data == json.loads((tmp_path / "plan.json").read_text())
    times, sizes = (
        ("step_seconds", "compute_seconds", "exposed_seconds"),
        ("peak_bytes", "persistent_bytes", "host_peak_bytes", "disk_bytes", "pool_bytes"),
    )
    for field in (*times, *sizes, "model_flops", "mfu", "roofline_fraction", "mesh", "name", "bound_by", "busy"):
        assert data[field] == getattr(found, field)
    assert (
        data["channels"] == {k: {**c._asdict(), "bandwidth": c.bandwidth} for k, c in found.channels.items()}
        and data["breakdown"] == found.breakdown
    )
    assert [sum(row[2:]) for row in data["memory"]] == [s.total for s in found.memory] and len(
        data["memory_columns"]
    ) == len(data["memory"][0])
    assert data["peak_line"]["text"] == found.peak_line.text


def test_a_trace_has_every_channel_and_what_was_measured_beside_it(tmp_path):
    found = plan(lowered(3, 3).program, "h100")
    measured = [e._replace(start=2 * e.start, seconds=2 * e.seconds) for e in found.events]
    found.save_trace(tmp_path / "trace.json", measured)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for pid in (1, 2):
        threads = {
            e["args"]["name"]: e["tid"]
            for e in events
            if e["ph"] == "M" and e["pid"] == pid and e["name"] == "thread_name"
        }
        assert set(threads) == {COMPUTE, "gather:data", "reduce:data"}
        for name, tid in threads.items():
            spans = sorted(
                (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)
            )
            # a queue does one thing at a time
            assert spans and all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans)), name
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == found.peak_bytes
    found.save_trace(tmp_path / "alone.json")
    assert {e["pid"] for e in json.loads((tmp_path / "alone.json").read_text())["traceEvents"]} == {1}


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    found = lowered(3, 2).plan
    found.save_picture(tmp_path / "memory.png", budget="1MB")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "memory.png"
    ).stat().st_size > 10_000
    found.save_picture(tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    assert "<svg" in text
    assert all(f"<!-- {queue} -->" in text for queue in ("compute", "gather:data", "reduce:data", "memory"))
    assert "<!-- compute waits -->" in text and "<!-- peak -->" in text and "<!-- more iterations" not in text, (
        "its legend"
    )
    found.save_picture(tmp_path / "both.svg", measured=found.events)
    text = (tmp_path / "both.svg").read_text()
    assert "<!-- predicted: " in text and "<!-- measured: " in text
    with pytest.raises(errors.FzeroValueError) as caught:
        found.save_picture(tmp_path / "memory.jpg")
    assert "memory.jpg" in str(caught.value) and ".png" in str(caught.value)
    for path in (5, None):
        with pytest.raises(errors.FzeroTypeError, match=f"path={path}: must be a path"):
            found.save_picture(path)
    with pytest.raises(errors.FzeroValueError, match=r"(?s)the directory of .*nodir.* does not exist.*mkdir -p"):
        found.save_picture(tmp_path / "nodir" / "p.png")


@pytest.mark.parametrize("measured", [3, ["a"], "events", torch.ones(2)])
def test_what_is_no_measurement_of_a_step_is_rejected(tmp_path, measured):
    found = lowered().plan
    for draw in (lambda m: found.html(measured=m), lambda m: found.save_trace(tmp_path / "a.json", m)):
        with pytest.raises(errors.FzeroTypeError, match=r"measured=.*: must be a list of events\nFix: .*train.profile"):
            draw(measured)
    with pytest.raises(errors.FzeroTypeError, match="measured="):
        found.save_picture(tmp_path / "a.png", measured=measured)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["/proc/plan.json", "missing/plan.json", ".", 3])
def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    found = lowered().plan
    for write in (found.to_json, found.save_trace):
        with pytest.raises(errors.FzeroError, match=re.escape(str(path))):
            write(path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_plan_does_not_fit_a_budget():
    for wrong in (3, None, lowered()):
        with pytest.raises(errors.FzeroTypeError, match=f"takes a plan, not {type(wrong).__name__}"):
            fz.fits(wrong, "80GB")
    with pytest.raises(errors.FzeroTypeError, match="include_process=2: must be True or False"):
        fz.fits(lowered().plan, "80GB", include_process=2)


@pytest.mark.parametrize("micro", [1, 2, 6])
def test_memorymemory_over_time_is_that_of_the_lines(micro):
    found = lowered(3, micro).plan_on("h100")
    times, samples = zip(*memory_over_time(found), strict=True)
    assert list(times) == sorted(times) and 0 <= times[0] and times[-1] <= found.step_seconds
    assert max(sample.total for sample in samples) == found.peak_bytes
    assert list(dict.fromkeys(samples)) == list(dict.fromkeys(found.memory))


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(errors.FzeroValueError) as caught:
        lowered().plan.save_picture(tmp_path / "memory.png")
    assert "pip install matplotlib" in str(caught.value)


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5 TB", 15 * 10**11),
        ("512mb", 512 * 10**6),
        ("7B", 7),
        (" 4 KiB ", 4096),
        (123, 123),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "80 G", "80 XB", "1e9B", -1, 1.5, None, True, "80iB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(errors.FzeroValueError) as caught:
        fz.fits(lowered().plan, text)
    assert repr(text) in str(caught.value) and "24GiB" in str(caught.value)


def test_the_process_comes_on_top_of_the_peak():
    """Assumed of a datasheet and of a machine that is not calibrated; the interpreter's part as a calibration says."""
    step = fz.shard_params(fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).mean(), optim.sgd(0.1)))
    params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
    found = {}
    calibrated = replace(get_device("cpu"), process_bytes=300 << 20)
    for name, device in (("h100", get_device("h100")), ("cpu", get_device("cpu")), ("calibrated", calibrated)):
        for ranks in (1, 2):
            one = step if ranks > 1 else replace(step, transforms=())
            found[name, ranks] = fz.lower(one, fz.AbstractMesh(data=ranks), params, batch, device=device).plan
    gpu, cpu, known = found["h100", 1], found["cpu", 1], found["calibrated", 1]
    assert gpu.process_bytes == CONTEXT and found["h100", 2].process_bytes == CONTEXT + NCCL
    assert {x.where for x in gpu.process} == {"device", "host"} and not any(x.measured for x in gpu.process)
    assert cpu.process_bytes - known.process_bytes == INTERPRETER - (300 << 20)
    assert [x.measured for x in known.process] == [True, False] and [x.measured for x in cpu.process] == [False, False]
    assert "process overhead" in str(known) and "by calibration" in str(known) and "assumed" in str(cpu)
    data = json.loads(known.to_json())
    assert data["process_bytes"] == known.process_bytes == sum(x["nbytes"] for x in data["process"])
    limit = known.peak_bytes + known.process_bytes
    assert fz.fits(known, limit, include_process=True) and not fz.fits(known, limit - 1, include_process=True)
    assert fz.fits(known, known.peak_bytes)


def test_an_unknown_backend_is_refused():
    step = fz.train_step(lambda p, x: (x @ p).square().mean(), optim.sgd(0.1))
    params, x = torch.ones(4, 4), torch.ones(2, 4)
    with pytest.raises(
        errors.FzeroValueError, match=r"fzero.lower: unknown backend 'c'\nFix: one of 'inductor', 'eager'"
    ):
        fz.lower(step, fz.AbstractMesh(data=1), params, x, backend="c")
    lowered = fz.lower(step, fz.AbstractMesh(data=1), params, x)
    with pytest.raises(errors.FzeroValueError, match=r"fzero.plan: unknown backend 'c'"):
        lowered.plan_on("h100", "c")


def test_values_show_themselves_briefly_and_in_notebooks_as_tables():
    layer = fz.block(lambda w, x: torch.tanh(x @ w))
    step = fz.shard_params(fz.train_step(lambda p, x: layer(p["w"], x).square().mean(), optim.sgd(0.1)))
    params, x = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
    lowered = fz.lower(step, MESH, params, x, device="h100")
    found = lowered.plan
    text = f"<Plan of <lambda> on mesh data=2 of h100: {duration(found.step_seconds)} a step, {size(found.peak_bytes)} "
    assert repr(found) == text + "at the peak>"
    html = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    cells = [cell.text for cell in html.iter("td")]
    rows = [cell for table in tables(found) for row in table.rows for cell in row]
    assert cells == [cell or None for cell in rows] and size(found.peak_bytes) in cells
    assert [x.text for x in html.iter("caption")] == [table.title for table in tables(found)]
    for value in (lowered, lowered.program):
        assert ElementTree.fromstring(value._repr_html_()).text == str(lowered.program)
    report = fz.testing.check_equivalent(
        fz.accumulate(2)(fz.train_step(lambda p, x: (p["w"] * x).sum(), optim.sgd(0.1))),
        {"w": torch.ones(3)},
        torch.ones(4, 3),
        fz.make_mesh(data=1),
        raises=False,
    )
    html = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    assert [x.text for x in html.iter("p")] == report.remarks()
