"""mixed_precision("auto"): what is counted, which blocks move to a safer dtype when a step is built, and who says
so."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from models import part
from offloads import same

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError
from fzero.transforms import precision
from fzero.transforms.precision import LIMIT, OVERFLOW, PrecisionState, Watched

# what is counted

WATCHED = Watched(("a", "b", "c", "loss"), ((0, 1), (2,), (1, 3), (4,)), (0, 0, 1, 0, 3))  # a and c share parameter 1


def reference(counts: list[list[int]], numbers: dict[str, list[float]]) -> None:
    """As `counted`, in plain Python."""
    finite = [abs(x) < float("inf") for x in numbers["output_max"]]
    grads = [i for i in range(3) if not abs(numbers["grad_norm"][i]) < float("inf")]
    begins = finite.index(False) if False in finite else grads[-1] if grads else None
    lost = [n for n in range(3) if numbers["underflow"][n] - numbers["zero"][n] > 0.5 * (1 - numbers["zero"][n])]
    family = {0: (0, 1, 3), 1: (2,), 2: (0, 1, 3), 3: (), None: ()}
    hit = [family[begins], {i for n in lost for i in family[n]}]
    for row, here, rise in zip(counts, hit, (OVERFLOW, 1), strict=True):
        for i in range(5):
            row[i] = row[i] if row[i] >= LIMIT else min(max(row[i] + (rise if i in here else -1), 0), LIMIT)


def test_counts_are_what_the_reference_says():
    rng, state, counts = (
        random.Random(0),
        PrecisionState(torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)),
        [[0] * 5, [0] * 5],
    )

    def numbers(bad: float) -> list[float]:
        return [rng.choice([float("inf"), float("nan")]) if rng.random() < bad else rng.random() for _ in range(4)]

    for step in range(1500):
        bad = 0.25 if step > 500 else 0.02
        zero = [rng.choice([0.0, 0.5, 1.0]) for _ in range(4)]
        lost = [z + (1 - z) * rng.random() ** (0.3 if n == 1 else 3) for n, z in enumerate(zero)]
        said = {"output_max": numbers(bad / 4), "grad_norm": numbers(bad), "zero": zero, "underflow": lost}
        state = precision.counted(state, WATCHED, {k: torch.tensor(v) for k, v in said.items()})
        reference(counts, said)
        assert [x.tolist() for x in state] == counts and all(x.dtype == torch.int32 for x in state), step
        if step == 500:
            assert max(counts[0]) < LIMIT  # now and then an overflow is nothing
    assert counts[0][0] == LIMIT and counts[0][4] == 0 and counts[1][2] == LIMIT > counts[1][0]


# a block that float16 is too small for


@fz.block
def scaled(p, x):
    return x * p["w"]


@fz.block
def rms(p, x):
    return x.square().mean(-1, keepdim=True).sqrt() * p["w"]  # 65504 is 256 squared


def rms_loss(params, batch):
    x = scaled(params["first"], batch["x"])
    x = rms(params["rms"], x)
    return (scaled(params["last"], x).float() - batch["y"]).square().mean()


def rms_params():
    return {"first": {"w": torch.ones(6)}, "rms": {"w": torch.full((6,), 0.01)}, "last": {"w": torch.ones(6)}}


def batch_of(rows: int = 8, value: float = 300.0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((rows, 6), value), "y": torch.zeros(rows, 6)}


SCALE = fz.LossScale(initial=8.0, growth_interval=10_000, minimum=2.0**-40)


def make(*transforms: Any, start: str | None = "fp16", **keywords: Any) -> Any:
    keywords = {**({"loss_scale": SCALE} if start == "fp16" else {}), **keywords}
    return fz.compose(*transforms)(
        fz.mixed_precision(fz.train_step(rms_loss, optim.adamw(1e-3)), "auto", start=start, **keywords)
    )


def compiled(step: Any, mesh: Any = None) -> Any:
    return fz.compile(step, mesh or fz.make_mesh(data=1), backend="eager")


def casts(program: Any) -> set[str]:
    """The parameters that a program casts to a half."""
    return {
        op.args[0]
        for op, _ in program.walk()
        if op.op == "cast" and op.args[0].startswith("params") and op.attrs.dtype != torch.float32
    }


ALL = {"params['first']['w']", "params['rms']['w']", "params['last']['w']"}


def moved_at_a_restore(directory: Any, name: str) -> Any:
    transforms = {
        "plain": (fz.data_parallel,),
        "zero 1": (fz.shard_opt_state, fz.accumulate(2)),
        "zero 3": (fz.shard_params, fz.accumulate(2)),
        "offload": (fz.shard_params, fz.offload("cpu", "opt_state")),
    }[name]
    mesh = fz.make_mesh(data=-1)
    train = compiled(make(*transforms), mesh)
    state, batch = train.init(rms_params()), part(batch_of(), mesh)
    before, said = train.gather(state), []
    for _ in range(LIMIT // OVERFLOW):
        state, last = train(state, batch)
        said.append(last["skipped"].item())
    unmoved = same(train.gather(state).params, before.params)
    counts = [x.tolist() for x in state.extras["precision"]]
    fz.checkpoint.save(directory, state)
    again = compiled(make(*transforms), mesh)
    other = again.restore(directory)
    equal = same(*(t.gather(s)._replace(extras={}) for t, s in ((train, state), (again, other))))
    other, metrics = again(other, batch)
    decisions = [d for d in again.plan.decisions if d.what.startswith("mixed_precision")]
    fz.checkpoint.save(directory, other)
    third = compiled(make(*transforms), mesh)
    kept, _ = third(third.restore(directory), batch)
    return {
        "said": said,
        "unmoved": unmoved,
        "scales": [float(last["loss_scale"]), float(metrics["loss_scale"])],
        "after": [x.tolist() for x in kept.extras["precision"]],
        "counts": counts,
        "equal": equal,
        "casts": (casts(train.program), casts(again.program), casts(third.program)),
        "metrics": metrics,
        "decisions": decisions,
        "step": int(kept.step),
        "compute": sorted(fz.tree.paths(other.extras.get("compute"))),
        "blocks": again.blocks,
        "text": str(again.program),
    }


@pytest.mark.full
@pytest.mark.parametrize(("name", "num_ranks"), [("plain", 1), ("zero 1", 2), ("zero 3", 2), ("offload", 2)])
def test_a_block_that_overflows_moves_when_its_state_is_restored(run_or_call, num_ranks, name, tmp_path):
    for got in run_or_call(num_ranks, moved_at_a_restore, tmp_path / "run", name):
        assert all(got["said"]) and got["unmoved"] and got["equal"]
        assert got["blocks"] == ("first", "rms", "last", "rms_loss")
        # lowered for nothing, and begun anew with the blocks that it was lowered for
        assert got["scales"] == [8.0 / 2**31, 8.0]
        # the leaves in their order: first, last, rms
        assert got["counts"] == [[0, 0, LIMIT], [0, 0, 0]] and got["after"] == [[0, 0, LIMIT + 1], [0, 0, 0]]
        if name == "offload":  # the copies to compute with are leaves of the state: those of what was moved are gone
            assert got["compute"] == ["['first']['w']", "['last']['w']"]
        else:
            assert got["casts"] == (ALL, ALL - {"params['rms']['w']"}, ALL - {"params['rms']['w']"})
        assert (
            not got["metrics"]["skipped"] and got["metrics"]["precision"]["output_max"][1] == 3.0 and got["step"] == 2
        )
        ((what, chosen, why),) = got["decisions"]
        assert (what, chosen) == ("mixed_precision: rms", "fp32") and f"overflows: {LIMIT} of {LIMIT}" in why
        assert "compute='fp16', params='fp32', reduce='fp32', auto=True, safer=1 leaves" in got["text"]


def test_a_batch_of_another_shape_builds_a_safer_step(caplog):
    train = compiled(make())
    state = train.init(rms_params())
    for _ in range(LIMIT // OVERFLOW):
        state, metrics = train(state, batch_of())
    assert metrics["skipped"] and casts(train.program) == ALL and not caplog.records
    with caplog.at_level(logging.WARNING, "fzero"):
        for rows in (4, 2):
            state, metrics = train(state, batch_of(rows))
            assert not metrics["skipped"] and casts(train.program) == ALL - {"params['rms']['w']"}
    (record,) = caplog.records  # said once
    assert "these blocks compute in fp32 from here on\n  rms: it overflows: 256 of 256 counts" in record.getMessage()
    state, metrics = train(state, batch_of())
    assert metrics["skipped"]  # what was built before runs on as it was
    evaluate = compiled(fz.compose(*train.resolved.transforms)(fz.eval_step(lambda p, batch: rms_loss(p, batch))))
    low = compiled(fz.mixed_precision("auto", start="fp16")(fz.eval_step(lambda p, batch: rms_loss(p, batch))))
    assert evaluate(state.params, batch_of()).isfinite() and not low(state.params, batch_of()).isfinite()


def test_with_masters_off_the_device_a_run_goes_on_as_it_was_laid_out():
    train = compiled(make(fz.offload("cpu", "opt_state")))
    state = train.init(rms_params())
    state.extras["precision"].overflows[2] = LIMIT
    state, _ = train(state, batch_of(value=1.0))
    assert (
        len(fz.tree.leaves(state.extras["compute"])) == 3
        and train.resolved.transforms == make(fz.offload("cpu", "opt_state")).transforms
    )


def test_gradients_that_underflow_are_counted_and_move():
    train = compiled(make(loss_scale=1.0))
    state = train.init(rms_params())
    state.extras["precision"].underflows.fill_(LIMIT - 2)
    state.extras["precision"].underflows[0] = 0
    for _ in range(2):
        state, metrics = train(state, batch_of(value=0.1))  # gradients of about 1e-6: below 6e-5
    found = metrics["precision"]
    assert (found["underflow"] - found["zero"])[2] == 1.0
    assert state.extras["precision"].underflows[1] == LIMIT
    state, _ = train(state, batch_of(4))
    assert "params['last']['w']" not in casts(train.program)
    assert [d.why for d in train.plan.decisions if "last" in d.what] == ["it underflows: 256 of 256 counts"]


def test_bfloat16_moves_to_float32_and_what_rests_stays():
    for params in ("fp32", "bf16"):
        train = compiled(make(start=None, params=params))
        state = train.init(rms_params())
        assert "loss_scale" not in state.extras and all(
            x.dtype == torch.int32 and x.shape == (3,) for x in state.extras["precision"]
        )
        state.extras["precision"].overflows[2] = LIMIT
        state, _ = train(state, batch_of())
        dtypes = {op.args[0]: op.attrs.dtype for op, _ in train.program.walk() if op.op == "cast" and op.args[0] in ALL}
        wanted = (
            dict.fromkeys(ALL - {"params['rms']['w']"}, torch.bfloat16)
            if params == "fp32"
            else {"params['rms']['w']": torch.float32}
        )
        assert dtypes == wanted
        assert all(x.dtype == precision.DTYPES[params] for x in fz.tree.leaves(state.params))


def test_unless_a_block_is_moved_it_is_the_step_in_its_first_dtype():
    batches = [batch_of(value=v) for v in (1.0, 2.0, 300.0, 3.0)]
    ends = []
    for transform in (
        fz.mixed_precision("auto", start="fp16", loss_scale=SCALE),
        fz.mixed_precision("fp16", loss_scale=SCALE),
    ):
        train = compiled(transform(fz.train_step(rms_loss, optim.adamw(1e-3))))
        state = train.init(rms_params())
        for batch in batches:
            state, _ = train(state, batch)
        ends.append(state._replace(extras={"loss_scale": state.extras["loss_scale"]}))
    assert same(*ends)


def test_it_begins_in_what_the_device_has(monkeypatch):
    for has, dtype in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(precision, "computes_in", lambda device, dtype, has=has: has or dtype is not torch.bfloat16)
        train = compiled(fz.mixed_precision(fz.train_step(rms_loss, optim.adamw(1e-3)), "auto"))
        (record,) = train.resolved.transforms
        assert record.compute == dtype and (record.scaling is None) == has
        state, metrics = train(train.init(rms_params()), batch_of(value=1.0))
        assert ("loss_scale" in state.extras) == ("skipped" in metrics) == (not has)
    program = fz.lower(make(fz.shard_params, start=None), fz.AbstractMesh(data=2), rms_params(), batch_of()).program
    assert "compute='bf16'" in str(program)


def test_checkpoints_with_and_without_counts(tmp_path):
    plain = compiled(fz.mixed_precision(fz.train_step(rms_loss, optim.adamw(1e-3)), "fp16", loss_scale=SCALE))
    auto = compiled(make())
    state, _ = plain(plain.init(rms_params()), batch_of())
    fz.checkpoint.save(tmp_path / "plain", state)
    begun = auto.restore(tmp_path / "plain")
    assert same(begun.extras["precision"], PrecisionState(*torch.zeros(2, 3, dtype=torch.int32)))
    begun, _ = auto(begun, batch_of())
    fz.checkpoint.save(tmp_path / "auto", begun)
    assert auto.restore(tmp_path / "auto").extras["precision"].overflows.tolist() == [0, 0, OVERFLOW]
    assert plain.restore(tmp_path / "auto").extras.keys() == {"loss_scale"}
    with pytest.raises(FzeroValueError, match=r"extras\['precision'\].overflows: not in the state"):
        auto(state, batch_of())


def test_arguments_that_cannot_work():
    step = fz.train_step(rms_loss, optim.adamw(1e-3))
    for keywords, parts in (
        ({"start": "fp16"}, ["start='fp16': compute='auto' is the only option"]),
        (
            {"compute": "auto", "start": "fp32", "watch": 1},
            ["watch=1: must be True or False", "start='fp32': neither 'bf16' nor 'fp16'"],
        ),
        (
            {"compute": "auto", "start": "", "rounding": "nearest"},
            ["start='': neither", "params='fp32': nothing is rounded"],
        ),
        ({"compute": "auto", "start": "fp8"}, ["compute='fp8'"]),
        ({"compute": "auto", "start": "bf16", "loss_scale": 8.0}, ["loss_scale=8.0: neither compute='bf16'"]),
    ):
        with pytest.raises(FzeroValueError) as error:
            fz.mixed_precision(step, **keywords)
        assert all(p in str(error.value) for p in parts) and "Fix:" in str(error.value), error.value
