"""check_equivalent passes what is right and finds what is wrong: faults planted in rewrites, in functions and in what
carries values, each named."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar

import models
import pytest
import torch
import torch.nn.functional as F
from replaced_passes import pass_named, replace_pass

import fzero as fz
from fzero import optim, tree
from fzero.cli import main
from fzero.comm import shared_memory
from fzero.compiler import traced_step, update_graph
from fzero.compiler.traced_step import base_program
from fzero.errors import EquivalenceError, FzeroTypeError, FzeroValueError, VerifyError
from fzero.ir.ops import OPS
from fzero.ir.program import Program
from fzero.memory.simulated_copies import LateCopies
from fzero.optim import apply_updates
from fzero.plan import cost
from fzero.runtime import program_buffers, program_build
from fzero.runtime.build import build
from fzero.state import initial_state
from fzero.testing import check_equivalent
from fzero.testing.comparison_setting import setting_of
from fzero.testing.differing_op import first_differing
from fzero.testing.tolerance import longest_chain, unit
from fzero.transforms import remat, zero_pass
from fzero.transforms.transform import Transform

WIDTH, ROWS = 48, 24  # large enough for places in the pool


@fz.block
def dense(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"])


@fz.block
def head(p, x, y):
    return ((x @ p["w"]).squeeze(-1) - y).square().mean()


def loss(params, batch):
    x = batch["x"]
    for p in params["layers"]:
        x = dense(p, x)
    return head(params["head"], x, batch["y"])


def dropped_loss(params, batch, *, key):
    return loss(params, {**batch, "x": fz.random.dropout(key, batch["x"], 0.5)})


def summed_loss(params, batch):
    return loss(params, batch) * batch["y"].shape[0]


def init(key):
    keys = fz.random.split(key, 4)
    layers = [{"w": fz.random.normal(k, (WIDTH, WIDTH)) * 0.1, "b": torch.zeros(WIDTH)} for k in keys[:3]]
    return {"layers": layers, "head": {"w": fz.random.normal(keys[3], (WIDTH, 1))}}


def batch(mesh: fz.Mesh | None = None) -> Any:
    keys = fz.random.split(fz.random.key(5), 2)
    whole = {"x": fz.random.normal(keys[0], (ROWS, WIDTH)), "y": fz.random.normal(keys[1], (ROWS,))}
    return whole if mesh is None else models.part(whole, mesh)


OPTIMIZER = lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))  # noqa: E731


# --- faults: each takes a monkeypatch ---


def maximum_for_sum(patch):
    patch.setitem(shared_memory.COMBINE, "sum", torch.maximum)


def run_as(patch, op, wrong):
    """Has an op run as `wrong` makes of what its row says, by the interpreter too."""
    runs = OPS[op].runs
    patch.setattr(OPS[op], "runs", lambda on: wrong(runs(on)))


def mean_for_sum(patch):
    wait = shared_memory.SharedMemory.wait

    def halved(self, moving, into, together=False):
        out = wait(self, moving, into, together)
        return [x.div_(2) for x in out] if moving.kind == "scatter" else out

    patch.setattr(shared_memory.SharedMemory, "wait", halved)


def gather_not_waited_for(patch):
    patch.setattr(shared_memory.SharedMemory, "_gather", lambda self, whole, along: None)


def stale_cast(patch):
    run_as(patch, "cast", lambda cast: lambda x, dtype, into=None: cast(x, dtype) if into is None else into[0])


def buffer_of_another(patch):
    tensors, first = program_buffers._tensors, {}

    def overlapping(op, mesh, arenas, rooms):
        if op.fn == "dense":  # all calls of a program have the places of its first
            _, op = first.setdefault(id(arenas), (arenas, op))
        return tensors(op, mesh, arenas, rooms)

    patch.setattr(program_buffers, "_tensors", overlapping)


def leaves_swapped(patch):
    update = zero_pass._Rewrite._update
    other = {f"layers[{i}].{x}_shard": f"layers[{1 - i}].{x}_shard" for i in (0, 1) for x in "bw"}

    def swapped(self, op):
        return [
            dataclasses.replace(x, args=tuple(other.get(a, a) for a in x.args)) if x.op == "update" else x
            for x in update(self, op)
        ]

    patch.setattr(zero_pass._Rewrite, "_update", swapped)


def micro_batch_dropped(patch):
    run_as(patch, "accumulate", lambda _: lambda total, part, into: into[0].copy_(part) if total is None else total)


def sum_rounded(patch):
    run_as(
        patch,
        "accumulate",
        lambda _: lambda total, part, into: into[0].copy_(part) if total is None else total.add_(part.bfloat16()),
    )


def first_micro_batch_only(patch):
    run_as(patch, "take_part", lambda _: lambda whole, index, count: whole[: whole.shape[0] // count])


def offset_off_by_one(patch):
    run_as(patch, "take_shard", lambda take: lambda whole, axis: take(whole.reshape(-1).roll(1), axis))


def update_twice(patch):
    as_called = build.as_called

    def twice(function, run):
        call = as_called(function, run)
        return (lambda *args: (call(*args), call(*args))[0]) if function.name == "update_v2" else call

    patch.setattr(build, "as_called", twice)


def update_skipped(patch):
    as_called = build.as_called
    patch.setattr(
        build,
        "as_called",
        lambda function, run: (lambda *args: ()) if function.name == "update_v2" else as_called(function, run),
    )


def clipping_lost(patch):
    def unclipped(optimizer, grads, opt_state, params, key):
        updates, state = optim.adamw(1e-2).update(grads, opt_state[1], params)
        return apply_updates(params, updates, key), (opt_state[0], state), updates

    patch.setattr(update_graph, "apply_optimizer", unclipped)


def scale_wrong(patch):
    whole = traced_step.lower_train
    patch.setattr(traced_step, "lower_train", lambda t: whole(dataclasses.replace(t, num_parts=1)))


def key_of_the_first(patch):
    run_as(patch, "rank_index", lambda rank_index: lambda micro=0, count=1, axis=(): rank_index(axis=axis))


def update_not_assigned(patch):
    run_as(
        patch,
        "assign",
        lambda assign: lambda targets, sources: assign(targets, sources) if targets[0].dim() == 0 else None,
    )


def saved_swapped(patch):
    rewrite = pass_named("remat").rewrite

    def swapped(program: Program, options: remat.RematOptions) -> Program:
        program = rewrite(program, options)
        if options.policy != "none":
            return program
        ops = list(program.instructions)
        (at,) = [i for i, x in enumerate(ops) if "layers'][1]" in str(x.args) and x.fn.startswith("dense_vjp")]
        *rest, a, b = ops[at].args
        ops[at] = dataclasses.replace(ops[at], args=(*rest, b, a))
        return dataclasses.replace(program, instructions=tuple(ops))

    replace_pass(patch, "remat", rewrite=swapped)


def copy_not_made(patch):
    start = LateCopies.to_device_start
    patch.setattr(
        LateCopies,
        "to_device_start",
        lambda self, sources, into=None: start(self, [torch.zeros_like(x) for x in sources], into),
    )


def wait_dropped(patch):
    whole = pass_named("shard").rewrite

    def without(*args: Any) -> Program:
        program = whole(*args)
        first = next(x for x in program.instructions if x.op == "wait")
        return dataclasses.replace(program, instructions=tuple(x for x in program.instructions if x is not first))

    replace_pass(patch, "shard", rewrite=without)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the step it is planted in, and what the report has to name."""

    plant: Callable[[pytest.MonkeyPatch], None]
    transforms: tuple[Any, ...]
    transform: str | None
    line: str
    why: str = "is not what the program says"
    loss: Callable[..., Any] = loss

    def found(self, mesh: fz.Mesh) -> Any:
        step = fz.compose(*self.transforms)(fz.train_step(self.loss, OPTIMIZER()))
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            return check_equivalent(step, init, batch(mesh), mesh, steps=2, raises=False)

    def check(self, report: fz.testing.Report) -> None:
        text = f"{self.plant.__name__}\n{report}"
        assert not report.equivalent and report.blame is not None and report.blame.line is not None, text
        assert (report.blame.transform or "none").split("(")[0] == (self.transform or "none"), text
        assert self.line in report.blame.line.text and self.why in report.blame.line.why, text
        assert all(
            x in str(report)
            for x in ("where the difference starts", f"line {report.blame.line.number}", report.blame.line.why[:40])
        ), text


MEANT = "differs from its value in the plain step"
ALONE = [
    Fault(buffer_of_another, (), None, "dense_vjp", "which differs from the value that was produced"),
    Fault(micro_batch_dropped, (fz.remat("full"), fz.accumulate(2)), "accumulate", "accumulate(", MEANT),
    Fault(sum_rounded, (fz.accumulate(3),), "accumulate", "accumulate(", MEANT),
    Fault(first_micro_batch_only, (fz.accumulate(2, schedule="layerwise"),), "accumulate", "take_part(", MEANT),
    Fault(update_twice, (fz.accumulate(2),), None, "update_v2("),
    Fault(update_skipped, (), None, "update_v2("),
    Fault(clipping_lost, (), None, "update", MEANT),
    Fault(scale_wrong, (fz.accumulate(2),), "accumulate", "metric_grad_norm", MEANT),
    Fault(key_of_the_first, (fz.accumulate(2),), "accumulate", "rank_index(", MEANT, loss=dropped_loss),
    Fault(stale_cast, (fz.mixed_precision("bf16"),), "mixed_precision", "cast(", MEANT),
    Fault(saved_swapped, (fz.remat("none"),), "remat", "dense_vjp", MEANT),
    Fault(copy_not_made, (fz.offload("cpu", "params"),), "offload", "wait("),
]
TOGETHER = [
    Fault(maximum_for_sum, (fz.data_parallel(), fz.remat("full")), "data_parallel", "wait(reduce_"),
    Fault(mean_for_sum, (fz.shard_grads(), fz.mixed_precision("bf16")), "shard_grads", "wait(scatter_"),
    Fault(gather_not_waited_for, (fz.shard_params(), fz.accumulate(2)), "shard_params", "wait(gather_"),
    Fault(leaves_swapped, (fz.shard_opt_state(),), "shard_opt_state", "update(", MEANT),
    Fault(offset_off_by_one, (fz.shard_opt_state(),), "shard_opt_state", "take_shard(", MEANT),
    Fault(update_not_assigned, (fz.shard_opt_state(), fz.accumulate(2)), "shard_opt_state", "assign(", MEANT),
]


@pytest.mark.full(keep=["clipping_lost"])
@pytest.mark.parametrize("fault", ALONE, ids=lambda f: f.plant.__name__)
def test_a_planted_fault_is_named(fault):
    fault.check(fault.found(fz.make_mesh(data=1, unified_memory=False if fault.transform == "offload" else None)))


def find(number: int) -> fz.testing.Report:
    return TOGETHER[number].found(fz.make_mesh(data=2))


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(TOGETHER)), ids=lambda i: TOGETHER[i].plant.__name__)
def test_a_fault_between_ranks_is_named_on_every_rank(run_ranks, number):
    found, other = run_ranks(2, find, number)
    assert found == other
    TOGETHER[number].check(found)


# --- what is right ---

STEPS = {
    "gpt": (fz.shard_params(), fz.accumulate(2), fz.remat("full"), fz.mixed_precision("bf16")),
    "bare": (fz.shard_opt_state(), fz.accumulate(3, schedule="layerwise")),
    "mixed": (fz.shard_grads(), fz.remat("none"), fz.mixed_precision("bf16", params="bf16")),
}


def equivalent_steps(disk: str) -> list[tuple[fz.testing.Report, str | None]]:
    """The reports of steps that are right, and what is said of their lines."""
    mesh, out = fz.make_mesh(data=2, unified_memory=False), []
    for name, transforms in STEPS.items():
        offload = (
            fz.offload("nvme", ("opt_state", "params"), path=disk) if name == "gpt" else fz.offload("cpu", "opt_state")
        )
        step = fz.compose(*transforms, offload)(fz.train_step(models.MODELS[name].loss, models.OPTIMIZERS["adamw"]()))
        init = functools.partial(models.gpt_init, layers=1) if name == "gpt" else models.MODELS[name].init
        part = models.part(models.batches(1)[0], mesh)
        found = check_equivalent(step, init, part, mesh, steps=2)
        line, _ = first_differing(setting_of(step, init, part, mesh, 1, None, "eager", {}), None)
        out.append((found, line and str(line)))
    return out


@pytest.mark.full
def test_what_is_right_passes_line_by_line(run_ranks, tmp_path):
    """Tolerances hold where the order of summation, the dtype and the tier differ, and no line is suspected."""
    results = run_ranks(2, equivalent_steps, str(tmp_path))
    assert results[0] == results[1]
    for found, line in results[0]:
        assert found.equivalent and found.blame is None and line is None, f"{line}\n{found}"
        assert {re.split(r"[.\[]", d.path)[0] for d in found.differences} == {
            "params",
            "opt_state",
            "metrics",
            "step",
            "key",
        }
        exact = found.exact or found
        # leaves of which the sign of one element's gradient is rounding
        loose = [d for d in exact.differences if d.tolerance >= 2e-3]
        assert len(loose) <= 3 and all(d.tolerance < 2e-2 for d in loose), exact  # and so they are worth something
        assert any(0 < d.difference for d in exact.differences)
    assert results[0][0][0].exact is not None and results[0][1][0].exact is None


@pytest.mark.full(keep=["lion"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "lamb"])
def test_bf16_is_within_its_tolerance_where_signs_flip(optimizer):
    """The update of an element whose gradient is near 0 may go the other way in bf16: its leaf has the room for that,
    and no more."""
    step = fz.compose(fz.mixed_precision("bf16"), fz.accumulate(3))(
        fz.train_step(models.bare_loss, models.OPTIMIZERS[optimizer]())
    )
    found = check_equivalent(step, models.bare_init, models.batches(1)[0], fz.make_mesh(data=1))
    assert all(
        d.tolerance < 0.3 for d in found.differences if d.path.startswith("params['layers']") and d.path.endswith("[0]")
    )


def test_the_sign_of_noise_is_no_difference():
    """Adam's first update is the sign of the gradient. One element's gradient is noise in bf16 here, and two random
    runs do not show that it may turn."""
    draw = torch.Generator().manual_seed(48)
    params = {
        "norm": torch.ones(32),
        "w": torch.randn(32, 16, generator=draw) * 0.2,
        "v": torch.randn(16, 4, generator=draw) * 0.2,
    }
    x = torch.randn(32, 32, generator=draw)

    def off(p, x):
        return (torch.tanh(F.layer_norm(x, (32,), p["norm"]) @ p["w"]) @ p["v"]).square().mean()

    report = check_equivalent(
        fz.mixed_precision("bf16")(fz.train_step(off, optim.adamw(1e-3))), params, x, fz.make_mesh(data=1), steps=1
    )
    norm = next(d for d in report.differences if d.path == "params['norm']")
    assert norm.difference > 3e-4 and norm.tolerance < 2e-3  # of an update of 1e-3 for each element


def test_what_diverges_is_compared_as_long_as_it_is_finite():
    step = fz.accumulate(2)(fz.train_step(lambda p, x: (x * p["w"]).pow(4).mean(), optim.sgd(1e12)))
    report = check_equivalent(step, {"w": torch.ones(4)}, torch.ones(4, 4), fz.make_mesh(data=1), steps=5)
    assert 1 <= report.steps < report.wanted == 5
    assert "not finite" in str(report) and "lower learning rate" in str(report)


@pytest.mark.full
def test_fp16_is_within_its_tolerance_and_what_overflows_is_named():
    """With parameters that are rounded at random, too. A skipped step is taken again with a lower scale; under one that
    does not move the line is found where gradients are made that overflow."""
    plain, batch, mesh = (
        fz.train_step(models.bare_loss, models.OPTIMIZERS["adamw"]()),
        models.batches(1)[0],
        fz.make_mesh(data=1),
    )
    scales = fz.LossScale(initial=2.0**10), fz.LossScale(initial=2.0**40), 2.0**40
    small, falling, large = (fz.mixed_precision("fp16", params="bf16", loss_scale=scale) for scale in scales)
    assert check_equivalent(small(plain), models.bare_init, batch, mesh).skipped == 0
    report = check_equivalent(falling(plain), models.bare_init, batch, mesh, steps=1)
    assert report.equivalent and report.skipped > 10
    assert f"{report.skipped} steps overflowed" in str(report)
    with pytest.warns(RuntimeWarning, match="minimum loss scale"):
        blame = check_equivalent(large(plain), models.bare_init, batch, mesh, steps=1, raises=False).blame
    assert blame is not None and blame.line is not None
    assert blame.transform.startswith("mixed_precision") and "d_out" in blame.line.text


# --- what is not a transform's fault ---


def test_a_loss_that_is_no_mean_is_the_users():
    step = fz.accumulate(2)(fz.train_step(summed_loss, OPTIMIZER()))
    with pytest.raises(EquivalenceError, match=r"fz\.weighted") as error:
        check_equivalent(step, init, batch(), fz.make_mesh(data=1))
    report = error.value.report
    assert isinstance(report, fz.testing.Report) and report.blame is not None
    assert report.blame.transform == "accumulate(num_micro_batches=2)" and report.blame.line is None
    assert json.loads(report.to_json())["blame"]["transform"] == "accumulate(num_micro_batches=2)"


def test_a_first_state_that_differs(monkeypatch):
    whole = initial_state.shard
    monkeypatch.setattr(initial_state, "shard", lambda x, leaf, mesh: whole(x.flip(0), leaf, mesh))
    report = check_equivalent(fz.train_step(loss, OPTIMIZER()), init, batch(), fz.make_mesh(data=1), raises=False)
    assert report.blame is not None and report.blame.step == 0 and "init" in report.blame.note
    assert {d.path for d in report.differences if not d.ok and d.step == 0} >= {"params['head']['w']"}


def test_what_only_the_compiler_does_wrong(monkeypatch):
    as_called = build.as_called

    def wrong(function, run):
        call = as_called(function, run)
        return (
            (lambda *args, **kwargs: [x * 1.01 for x in call(*args, **kwargs)])
            if function.name == "head_value_and_grad"
            else call
        )

    monkeypatch.setattr(cost, "BACKENDS", ("inductor", "eager", "other"))
    real = build.build

    def built(functions, backend, mesh, title):
        with pytest.MonkeyPatch.context() as patch:
            if backend == "other":
                patch.setattr(build, "as_called", wrong)
            return real(functions, "eager", mesh)

    monkeypatch.setattr(program_build, "build", built)
    report = check_equivalent(
        fz.train_step(loss, OPTIMIZER()), init, batch(), fz.make_mesh(data=1), backend="other", raises=False
    )
    assert report.blame is not None and report.blame.transform is None and "'other'" in report.blame.note
    assert report.blame.line is not None and "head_value_and_grad(" in report.blame.line.text


def verify_says() -> str:
    with pytest.MonkeyPatch.context() as patch:
        wait_dropped(patch)
        with pytest.raises(VerifyError) as error:
            check_equivalent(
                fz.shard_params(fz.train_step(loss, OPTIMIZER())), init, batch(mesh := fz.make_mesh(data=2)), mesh
            )
    return str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"data": 4}, {"replica": 2, "data": 3}], ids=str)
def test_a_mesh_that_one_does_not_have_is_simulated(axes):
    mesh, transforms = fz.AbstractMesh(**axes), [fz.shard_params(), fz.accumulate(2), fz.mixed_precision("bf16")]
    transforms += [fz.data_parallel(axis="replica")] if "replica" in axes else []
    step = fz.compose(*transforms)(fz.train_step(loss, OPTIMIZER()))
    report = check_equivalent(step, init, batch(), mesh, steps=2)
    assert report.equivalent and report.exact is not None and f"on mesh {mesh}, 2 steps, simulated" in str(report)

    wrong = check_equivalent(fz.compose(Exchanged())(step), init, batch(), mesh, steps=2, raises=False)
    assert not wrong.equivalent and wrong.blame is None and "params['layers'][0]['b']" in str(wrong)


@dataclasses.dataclass(frozen=True)
class Exchanged(Transform):
    """One that exchanges the gradients of two parameters."""

    order: ClassVar[int] = 60
    name: ClassVar[str] = "exchanged"

    def rewrite(self, program: Program) -> Program:
        one, other = (program.grads[f"params['layers'][{i}]['b']"] for i in (0, 1))
        names = {one: other, other: one}
        return program.map_instructions(lambda op: [op.rename(names) if op.writes else op])


def test_what_verify_finds_is_said_as_it_is(run_ranks):
    for text in run_ranks(2, verify_says):
        assert text.startswith("fzero.verify: ") and "gather_0" in text


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"step": fz.eval_step(lambda p, x: x)}, FzeroTypeError, "fz.train_step"),
        ({"steps": 0}, FzeroValueError, "steps=0"),
        ({"mesh": 2}, FzeroTypeError, "fz.make_mesh, or fz.AbstractMesh"),
        ({"mesh": fz.AbstractMesh(data=1), "backend": "inductor"}, FzeroValueError, "simulation does not take backend"),
        (
            {"mesh": fz.AbstractMesh(data=5), "step": fz.shard_params(fz.train_step(loss, optim.sgd(0.1)))},
            FzeroValueError,
            "does not divide among 5 ranks",
        ),
        ({"batch": models.meta(batch())}, FzeroValueError, r"\['x'\]: float32\[24, 48\]"),
    ],
)
def test_what_cannot_be_compared(arguments, kind, says):
    given = {
        "step": fz.train_step(loss, OPTIMIZER()),
        "params": init,
        "batch": batch(),
        "mesh": fz.make_mesh(data=1),
        **arguments,
    }
    with pytest.raises(kind, match=says):
        check_equivalent(**given)


def other_rows() -> list[str]:
    """What is said of a batch of which a leaf has rows of its own, and of one of which it is said what it is."""
    mesh, x = fz.make_mesh(), torch.linspace(-1, 1, 16).view(8, 2)
    step = fz.shard_params(fz.train_step(lambda p, b: ((b[0] @ p["w"]) * b[1]).square().mean(), optim.sgd(0.1)))
    found = []
    for one in (step, fz.accumulate(step, 1, replicated=lambda path, leaf: path == "batch[1]")):
        try:
            found.append(
                str(check_equivalent(one, {"w": torch.eye(2)}, (x + mesh.rank, torch.ones(2)), mesh).equivalent)
            )
        except FzeroValueError as error:
            found.append(str(error))
    return found


def test_a_leaf_with_other_rows_is_asked_about(run_ranks):
    """On several ranks the plain step would get all ranks' rows of it, one behind the other."""
    for said, right in run_ranks(2, other_rows):
        assert (
            "batch[0] [8, 2]" in said
            and "batch[1] [2]" in said
            and "accumulate(1, replicated=" in said.splitlines()[-1]
        )
        assert right == "True"


def test_tolerances_follow_from_dtypes_and_lengths():
    assert [
        unit(d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    ] == [2**-53, 2**-24, 2**-11, 2**-8, 0, 0]
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), optim.sgd(0.1))

    def chain(rows: int, width: int) -> int:
        params, x = {"w": torch.empty(width, 7, device="meta")}, torch.empty(rows, width, device="meta")
        return longest_chain(base_program(step, fz.AbstractMesh(data=1), params, x))

    assert chain(8, 1000) - chain(8, 500) == 500 + 7 * 500  # the inner dim of the product, and the norm of the gradient
    assert chain(80, 30) - chain(8, 30) == 72 + 7 * 72  # that of the gradient, and the mean of the loss

    def tolerance(rate: float, *transforms: Any) -> float:
        step = fz.compose(*transforms)(fz.train_step(loss, optim.sgd(rate)))
        (found,) = (
            d
            for d in check_equivalent(step, init, batch(), fz.make_mesh(data=1), steps=1).differences
            if d.path == "params['head']['w']"
        )
        return found.tolerance

    assert tolerance(1e-1) > 5 * tolerance(1e-3) > 5 * 2 * 2**-24  # a small step is held to more
    assert tolerance(1e-1, fz.mixed_precision("bf16")) > 100 * tolerance(1e-1)


# --- on the command line ---

TARGET = """
import torch
import fzero as fz
from fzero import optim

def loss(p, x):
    return torch.tanh(x["ids"].float() @ p["w"] + x["bias"]).square().mean()

def target(loss=loss):
    step = fz.compose(fz.shard_grads(), fz.accumulate(2))(fz.train_step(loss, optim.adamw(1e-2)))
    batch = {"ids": torch.empty(8, 6, dtype=torch.int64, device="meta"), "bias": torch.ones(8, 1)}
    return step, {"w": torch.empty(6, 5, device="meta")}, batch

def summed():
    return target(lambda p, x: loss(p, x) * x["ids"].shape[0])

def evaluation():
    step, params, batch = target()
    return fz.eval_step(loss), params, (batch,)
"""


def command(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", *args])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def target(tmp_path):
    (tmp_path / "checked.py").write_text(TARGET)
    return f"{tmp_path}/checked.py"


@pytest.mark.full
def test_the_command_on_every_rank(run_ranks, target):
    (code, out, err), other = run_ranks(2, command, f"{target}:target", "--json")
    found = json.loads(out)
    assert code == 0 and found["equivalent"] and found["mesh"] == "data=2" and found["steps"] == 3
    assert err == f"2 leaves of {target}:target have no values: they are initialized at random\n"
    assert other == (0, "", "")  # rank 0 speaks for all


def test_the_command_on_one(target, monkeypatch):
    code, out, _ = command(f"{target}:target", "--steps", "1")
    assert code == 0 and "loss on mesh data=1, 1 steps, eager: equivalent in all" in out
    code, out, _ = command(f"{target}:summed")
    assert code == 1 and "accumulate(num_micro_batches=2)" in out and "fz.weighted" in out
    for flags, says in {
        ("--steps", "0"): "--steps 0",
        ("--mesh", "data=2"): "1 processes",
        ("--mesh", "data"): "whole number",
    }.items():
        code, out, err = command(f"{target}:target", *flags)
        assert (code, out) == (2, "") and says in err, err
    code, _, err = command(f"{target}:evaluation")
    assert code == 2 and "training step" in err


def test_a_loss_or_an_optimizer_that_does_something_else_each_time_is_told() -> None:
    """Draws, iterators and generators are in no settings: the plain step would move as much as its tolerance."""
    numbers = iter(range(1, 1000))
    wheel = itertools.cycle([0.1, 0.2])
    plain = optim.sgd(0.1)

    def update(grads: Any, state: Any, params: Any) -> Any:
        rate = next(wheel)
        return plain.update(tree.map(lambda g: g * rate, grads), state, params)

    steps = [
        fz.train_step(lambda p, x: (x @ p["w"]).square().mean() * random.random(), plain),
        fz.train_step(lambda p, x: (x @ p["w"]).square().mean() * next(numbers), plain),
        fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), plain._replace(update=update)),
    ]
    for step in steps:
        with pytest.raises(
            fz.errors.TraceError,
            match=(
                r"(?s)lambda> computes a different result each time it is "
                r"called\n.*the first time: .*the second: .*Fix:"
            ),
        ):
            fz.testing.check_equivalent(step, {"w": torch.ones(4)}, torch.ones(2, 4), fz.make_mesh(data=1), steps=1)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 1.0009765625))  # which bfloat16 does not have

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_a_module_in_bf16_keeps_its_buffers() -> None:
    """Its runs with moved values cast no buffer, as the step itself does not."""
    torch.manual_seed(0)
    model, x = fz.functionalize(Scaled()), torch.randn(4, 6)
    step = model.train_step(optim.adamw(1e-3), lambda out, batch: out.square().mean())
    step = fz.compose(fz.shard_params(), fz.mixed_precision("bf16"))(step)
    assert check_equivalent(step, model.params, x, fz.AbstractMesh(data=2), steps=2).equivalent
