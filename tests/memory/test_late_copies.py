"""Programs whose copies and collectives are all late: they train and evaluate to the same bits, and a host that does
not settle is found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from late import LateCopies, late
from models import MODELS
from offloads import EXTRAS, OFFLOADS, same, trained

import fzero as fz

pytestmark = pytest.mark.filterwarnings("ignore:fzero.step. .*parameters.* are not finite:RuntimeWarning")

KINDS = [
    ("cpu all", "bf16", "gpt"),
    ("cpu params", "accumulate", "mixed"),
    ("cpu half", "remat full", "gpt"),
    ("cpu on device", "bf16", "bare"),
    ("nvme both", "none", "gpt"),
    ("mix", "bf16, accumulate", "gpt"),
]


def _late_mesh(monkeypatch: pytest.MonkeyPatch) -> tuple[fz.Mesh, Any]:
    mesh = fz.make_mesh(data=1, unified_memory=False)
    return mesh, late(mesh, monkeypatch.setattr)


@pytest.mark.full
def test_training_waits_for_every_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra, model in KINDS:
        with monkeypatch.context() as patch:
            mesh, copies = _late_mesh(patch)
            (found, _), train, state = trained(mesh, (*OFFLOADS[name](tmp_path), *EXTRAS[extra]), model)
            assert not copies.races, (name, extra, model)
            copies.finish()
            want = trained(fz.make_mesh(data=1), EXTRAS[extra], model)[0]
            assert same((found, train.gather(state)), want), (name, extra, model)


def test_a_wait_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy either way: the numbers are others."""
    want = trained(fz.make_mesh(data=1), ())[0]
    for away in ("to_host_start", "to_device_start"):
        with monkeypatch.context() as patch:
            mesh, copies = _late_mesh(patch)
            start = getattr(copies, away)
            patch.setattr(copies, away, lambda *args, start=start: replace(start(*args), done=lambda: None))
            (found, _), _, _ = trained(mesh, OFFLOADS["cpu all"](""))
        assert not same(found, want[0]), away


def _evaluations(patch: pytest.MonkeyPatch, is_late: bool) -> tuple[list[torch.Tensor], Any]:
    """Losses of one evaluation after another, of parameters that rest on the host in float32 and are computed with in
    bfloat16."""
    mesh, copies = _late_mesh(patch) if is_late else (fz.make_mesh(data=1), None)
    transforms = (fz.mixed_precision("bf16"), *(OFFLOADS["cpu params"]("") if is_late else ()))
    step = fz.compose(*transforms)(fz.train_step(MODELS["gpt"].loss, fz.optim.sgd(0.1)))
    state = fz.compile(step, mesh, backend="eager").init(lambda key: models.gpt_init(key, 6), fz.random.key(1))
    evaluate = fz.compile(fz.compose(*transforms)(fz.eval_step(MODELS["gpt"].loss)), mesh, backend="eager")
    return [evaluate(state.params, batch) for batch in models.batches(3)], copies


def test_an_evaluation_settles_before_it_casts_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host casts a block's parameters into the bytes that another's are copied from: the device may not have come
    to that copy yet."""
    want, _ = _evaluations(monkeypatch, False)
    found, copies = _evaluations(monkeypatch, True)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert copies.num_settled > 0 and not copies.races
    monkeypatch.setattr(type(copies), "settle", lambda self, written: None)
    assert "cast" in _evaluations(monkeypatch, True)[1].races


def _deep(mesh: fz.Mesh, *transforms: Any) -> Any:
    """Losses and the state of some steps of six blocks, of which four keep what they need on the host."""
    step = fz.compose(*transforms)(fz.train_step(MODELS["gpt"].loss, fz.optim.adamw(0.1)))
    train = fz.compile(step, mesh, backend="eager")
    state, losses = train.init(lambda key: models.gpt_init(key, 6), fz.random.key(1)), []
    for batch in models.batches(3, size=48):
        state, metrics = train(state, batch)
        losses.append(metrics["loss"])
    return losses, train.gather(state)


MOVED: list[tuple[Any, ...]] = [
    (fz.offload("cpu", "activations"),),
    (fz.offload("cpu", "activations"), fz.accumulate(2)),
    (fz.offload("cpu", ("opt_state", "params", "activations")), fz.accumulate(2)),
    # the host writes copies to compute with, where those of the block before are on their way
    (
        fz.offload("cpu", "activations"),
        fz.offload("cpu", "opt_state", fraction=0.5),
        fz.mixed_precision("bf16"),
        fz.remat("none"),
    ),
]


@pytest.mark.full
def test_the_host_waits_for_no_copy_that_it_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of activations, that is: the device alone does, and the host settles where it writes next. With the double that
    users have, too."""
    for moved in MOVED:
        want = _deep(fz.make_mesh(data=1), *moved[1:])
        with monkeypatch.context() as patch:
            mesh, copies = _late_mesh(patch)
            found = _deep(mesh, *moved)
            assert not copies.races and copies.num_held >= 3 * 4, moved
            copies.finish()
            assert same(found, want), moved
        assert same(_deep(fz.make_mesh(data=1, unified_memory=False), *moved), want), moved


def test_a_copy_that_the_host_reads_and_the_device_alone_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its numbers, of both doubles: gradients that the host updates with."""
    want = trained(fz.make_mesh(data=1), ())[0]
    tiers = importlib.import_module("fzero.memory.tier_copies")
    wait = tiers.TierCopy.wait
    monkeypatch.setattr(tiers.TierCopy, "wait", lambda moving, into, host=True: wait(moving, into, False))
    for is_late in (True, False):
        with monkeypatch.context() as patch:
            mesh = _late_mesh(patch)[0] if is_late else fz.make_mesh(data=1, unified_memory=False)
            assert not same(trained(mesh, OFFLOADS["cpu all"](""))[0][0], want[0]), is_late


def test_a_host_that_writes_where_a_copy_is_still_to_arrive_is_found() -> None:
    for settles in (True, False):
        copies, rest = LateCopies(), torch.zeros(4)
        hold = copies.to_host_start([torch.ones(4)], [rest]).hold
        assert hold is not None
        hold()
        copies.touched("elsewhere", torch.Tensor.zero_)(torch.ones(4))
        if settles:
            copies.settle([rest])
        copies.touched("update", torch.Tensor.zero_)(rest)
        assert copies.races == ([] if settles else ["update"])


STAGES: dict[str, Any] = {
    "stage 0": (fz.data_parallel(),),
    "stage 2, accumulate": (fz.shard_grads(), fz.accumulate(2)),
    "stage 3, bf16, accumulate": (fz.shard_params(), fz.mixed_precision("bf16"), fz.accumulate(3)),
    "stage 3, offload": (
        fz.shard_params(),
        fz.mixed_precision("bf16"),
        fz.offload("cpu", ("opt_state", "params", "activations")),
    ),
}


def _on_ranks(is_late: bool, late_sums: bool = False) -> list[Any]:
    overlap, out = importlib.import_module("fzero.compiler.overlap"), []
    sink = overlap._sink_waits
    for transforms in STAGES.values():
        mesh = fz.make_mesh(shared_memory=False, unified_memory=False)
        with pytest.MonkeyPatch.context() as patch:
            copies = late(mesh, patch.setattr) if is_late else None
            if late_sums:  # which a budget chooses where transfers and functions overlap
                patch.setattr(overlap, "_sink_waits", lambda ops, _: sink(ops, True))
            (metrics, _), train, state = trained(mesh, transforms)
            if copies is not None:
                assert not copies.races
                copies.finish()
            out.append((metrics, train.gather(state)))
    return out


@pytest.mark.full
def test_ranks_wait_for_every_collective(run_ranks: Any) -> None:
    runs = [run_ranks(2, _on_ranks, *how) for how in ((False,), (True,), (True, True))]
    for wanted, found, later in zip(*runs, strict=True):
        for name, a, b, c in zip(STAGES, wanted, found, later, strict=True):
            assert same(a, b) and same(a, c), name


def _read_before_the_wait() -> list[tuple[bool, bool]]:
    """For each collective: whether what it makes is there before its wait, and after it."""
    mesh = fz.make_mesh(shared_memory=False)
    late(mesh)
    carrier, out = mesh.context.transport, []
    shard, whole = torch.full((2,), 1.0 + mesh.rank), torch.zeros(4)
    moving = carrier.all_gather_start([shard], "data", [whole])
    out.append(
        (not whole.isnan().any(), torch.equal(carrier.wait(moving, [whole])[0], torch.tensor([1.0, 1.0, 2.0, 2.0])))
    )
    for start, flats in (
        (carrier.all_reduce_start, [torch.ones(4)]),
        (carrier.reduce_scatter_start, [torch.ones(4), torch.zeros(2)]),
    ):
        moving = start(flats[:1], "data", "sum", flats)
        out.append((not flats[-1].isnan().any(), bool((carrier.wait(moving, [flats[-1]])[0] == 2).all())))
    return [(bool(a), bool(b)) for a, b in out]


def test_a_late_collective_is_not_there_before_its_wait(run_ranks: Any) -> None:
    assert run_ranks(2, _read_before_the_wait) == [[(False, True)] * 3] * 2
