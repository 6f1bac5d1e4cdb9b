"""Updates on a guess: bit for bit what the step does that waits for the norm, whether guesses are right or wrong; what
they cost; and where there are none."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from offloads import BOTH, same

import fzero as fz
from fzero import optim, tree
from fzero.compiler.search import Search
from fzero.errors import FzeroValueError, VerifyError
from fzero.ir.ops import Attempt
from fzero.ir.pool_verifier import check
from fzero.ir.verifier import verify
from fzero.sharding.layout import extent_of

WIDTH = 48
SCALES = (0.1, 0.1, 9.0, 9.0, 0.1, 0.1, 9.0, 0.1)  # of the batch, and of the gradients: below the clip and above it
# passes over the state: a step guesses if the one before would have been right, and the first does not
MOVED = (1, 1, 2, 1, 1, 1, 2, 1)
REDONE = [True, False, True, True, True, False, True, True]  # so of these steps two are right at once


@fz.block
def layer(p, x):
    return x @ p["w"] * p["scale"]


def loss(params, batch):
    """Linear in the last layer and bounded below by nothing: its gradients have the scale of the batch."""
    x = batch
    for p in params["layers"]:
        x = layer(p, x)
    return x.mean()


def init(key):
    keys = fz.random.split(key, 3)
    return {
        "layers": [
            {"w": fz.random.normal(k, (WIDTH, WIDTH)) / math.sqrt(WIDTH), "scale": torch.ones(WIDTH)} for k in keys
        ]
    }


def clipped(max_norm: float = 0.5) -> Any:
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.adamw(1e-3))


def batches(scales: tuple[float, ...] = SCALES) -> list[torch.Tensor]:
    return [
        scale * fz.random.normal(fz.random.fold_in(fz.random.key(5), i), (4, WIDTH)) for i, scale in enumerate(scales)
    ]


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the plan says of models as small as these."""
    monkeypatch.setattr(Search, "best", lambda self, starts: starts[-1])


def run(
    mesh: fz.Mesh, transforms: Any, optimizer: Any = None, scales: tuple[float, ...] = SCALES, **options: Any
) -> tuple[Any, list[int], Any]:
    """The metrics and the state after steps on these batches; of each step the bytes of disk; the compiled step."""
    train = fz.compile(
        fz.compose(*transforms)(fz.train_step(loss, optimizer or clipped())), mesh, **{"backend": "eager", **options}
    )
    state, found, moved = train.init(init, fz.random.key(0)), [], []
    extents = [extent for x in fz.tree.leaves(state) if (extent := extent_of(x)) is not None]
    files: list[Any] = [*{id(extent.files): extent.files for extent in extents}.values()]
    transferred = lambda: sum(file.bytes_read + file.bytes_written for file in files)  # noqa: E731
    before = transferred()  # `init` has written the state
    for whole in batches(scales):
        state, metrics = train(state, models.part(whole, mesh))
        found.append((metrics["loss"], metrics["grad_norm"]))
        now = transferred()
        moved.append(now - before)
        before = now
    return (found, train.gather(state)), moved, train


@functools.cache
def waited(*transforms: Any) -> Any:
    """The same without offload, on one process."""
    return run(fz.make_mesh(data=1), transforms)[0]


def guesses(program: Any) -> bool:
    return any(op.op == "rollback" for op in program.instructions)


OFFLOADS = {
    "opt_state": lambda d: (fz.offload("nvme", "opt_state", path=d),),
    "both": lambda d: (fz.offload("nvme", BOTH, path=[d, d]),),
    "on device": lambda d: (fz.offload("nvme", BOTH, path=d, update_on="device"),),
    "half": lambda d: (fz.offload("nvme", "opt_state", path=d, fraction=0.5),),
    "bf16": lambda d: (fz.mixed_precision("bf16"), fz.offload("nvme", BOTH, path=d)),
    "rounded": lambda d: (fz.mixed_precision("bf16", params="bf16"), fz.offload("nvme", BOTH, path=d)),
    "layerwise": lambda d: (fz.accumulate(2, schedule="layerwise"), fz.offload("nvme", BOTH, path=d)),
}


@pytest.mark.full(keep=["both-one memory", "half-one memory", "on device-one memory"])
@pytest.mark.parametrize("unified", [True, False], ids=["one memory", "apart"])
@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.usefixtures("guessing")
def test_right_and_wrong_guesses_come_to_what_waiting_comes_to(tmp_path: Path, name: str, unified: bool) -> None:
    mesh = fz.make_mesh(data=1, unified_memory=unified)
    offloaded = OFFLOADS[name](tmp_path)
    plain = [t for t in offloaded if "offload" not in str(t(fz.train_step(loss, clipped())).transforms[-1])]
    plain = [fz.accumulate(2)] if name == "layerwise" else plain
    want = waited(*plain)
    found, moved, train = run(mesh, offloaded)
    assert guesses(train.program)
    assert same(found, want)
    assert len(set(moved)) > 1, "some guesses were wrong, and some were right"
    norms = [float(norm) for _, norm in want[0]]
    assert [norm > 0.5 for norm in norms] == [scale > 1 for scale in SCALES]


ON_HOST = {
    "opt_state": lambda d: (fz.offload("cpu", "opt_state"),),
    "both": lambda d: (fz.offload("cpu", BOTH),),
    "on device": lambda d: (fz.offload("cpu", BOTH, update_on="device"),),
    "half": lambda d: (fz.offload("cpu", "opt_state", fraction=0.5),),
    "bf16": lambda d: (fz.mixed_precision("bf16"), fz.offload("cpu", BOTH)),
    "rounded": lambda d: (fz.mixed_precision("bf16", params="bf16"), fz.offload("cpu", "opt_state")),
    "and disk": lambda d: (fz.offload("cpu", "params"), fz.offload("nvme", "opt_state", path=d)),
    "layerwise": lambda d: (fz.accumulate(2, schedule="layerwise"), fz.offload("cpu", BOTH)),
}


@pytest.mark.full(keep=["layerwise-one memory", "bf16-one memory", "half-one memory"])
@pytest.mark.parametrize("unified", [True, False], ids=["one memory", "apart"])
@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.usefixtures("guessing")
def test_on_the_host_with_room_for_copies(
    tmp_path: Path, name: str, unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    redone: list[bool] = []
    rollback = Attempt.rollback
    monkeypatch.setattr(Attempt, "rollback", lambda *args: redone.append(rollback(*args)) or redone[-1])
    offloaded = ON_HOST[name](tmp_path)
    plain = [t for t in offloaded if "offload" not in str(t(fz.train_step(loss, clipped())).transforms[-1])]
    plain = [fz.accumulate(2)] if name == "layerwise" else plain
    want = waited(*plain)
    found, _, _ = run(fz.make_mesh(data=1, unified_memory=unified), offloaded, host_budget="1GB")
    assert redone == REDONE
    assert same(found, want)


def test_a_host_budget_decides() -> None:
    """Its room is used for a copy of what rests there; where there is none, or nothing is said, updates wait."""
    step = fz.offload("cpu", "opt_state", update_on="host")(fz.mixed_precision("bf16")(fz.train_step(loss, clipped())))
    mesh, batch = fz.AbstractMesh(data=1, device_type="cuda"), torch.empty(1 << 16, 1 << 12, device="meta")
    wide = {
        "layers": [
            {"w": torch.empty(1 << 12, 1 << 12, device="meta"), "scale": torch.empty(1 << 12, device="meta")}
            for _ in range(16)
        ]
    }
    lower = lambda budget: fz.lower(step, mesh, wide, batch, device="h100", host_budget=budget)  # noqa: E731
    unsaid, roomy = lower(None), lower("64GB")
    num = sum(x.numel() for x in tree.leaves(wide))
    assert not guesses(unsaid.program)
    assert guesses(roomy.program)
    assert 12 * num < roomy.plan.host_peak_bytes - unsaid.plan.host_peak_bytes < 13 * num, (
        "12 bytes of copies; gradients wait there for a rollback, too"
    )
    assert roomy.plan.step_seconds < unsaid.plan.step_seconds
    assert [d.chosen for d in roomy.plan.decisions if d.what == "update"] == ["speculative"]
    assert not guesses(lower(roomy.plan.host_peak_bytes - 1).program)


def test_a_wrong_guess_reads_and_writes_the_state_twice(tmp_path: Path) -> None:
    """And the step after it waits, so that a run that always clips pays once."""
    _, moved, _ = run(fz.make_mesh(data=1), OFFLOADS["opt_state"](tmp_path))
    sectors = sum(-(-4 * numel // 4096) * 4096 for numel in (WIDTH * WIDTH, WIDTH))
    once = 2 * 2 * 3 * sectors  # two moments, read and written
    assert moved == [once * n for n in MOVED]


def on_ranks(path: str, cases: list[tuple[int, bool]]) -> list[tuple[int, bool, bool]]:
    """Of each stage, in shared memory or not: whether the program guesses, and whether it comes to what the step
    without offload does."""
    Search.best = lambda self, starts: starts[-1]  # type: ignore[method-assign]
    out = []
    for stage, shared in cases:
        mesh = fz.make_mesh(data=-1, shared_memory=shared)
        want, _, _ = run(mesh, (models.STAGES[stage](),))
        found, _, train = run(mesh, (models.STAGES[stage](), *OFFLOADS["both"](path)))
        out.append((stage, guesses(train.program), same(found, want)))
    return out


@pytest.mark.full
def test_over_ranks(run_ranks: Any, tmp_path: Path) -> None:
    """Where an update writes parts of leaves that rest whole, which are gathered after it, it waits."""
    want = [(3, True, True), (3, True, True), (0, True, True), (2, False, True)]
    assert run_ranks(2, on_ranks, str(tmp_path), [(3, True), (3, False), (0, False), (2, True)]) == [want, want]


@pytest.mark.filterwarnings("ignore:fzero.step. .*parameters.* are not finite:RuntimeWarning")
def test_gradients_that_are_no_numbers(tmp_path: Path) -> None:
    scales = (0.1, 0.1, math.inf, 0.1)
    want, _, _ = run(fz.make_mesh(data=1), (), scales=scales)
    found, _, _ = run(fz.make_mesh(data=1), OFFLOADS["both"](tmp_path), scales=scales)
    bits = lambda run: [x.reshape(-1).view(torch.uint8) for x in tree.leaves(run[1].params)]  # noqa: E731
    assert any(x.isnan().any() for x in tree.leaves(want[1].params))
    assert all(torch.equal(a, b) for a, b in zip(bits(found), bits(want), strict=True))


@pytest.mark.usefixtures("guessing")
def test_a_state_is_saved_moved_and_restored_between_its_extents(tmp_path: Path) -> None:
    """An odd number of right guesses: leaves lie where they did not at first."""
    mesh, (one, two, *rest) = fz.make_mesh(data=1), batches((0.1, 0.1, 0.1, 9.0))
    step = fz.compose(*OFFLOADS["both"](tmp_path))(fz.train_step(loss, clipped()))
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(init, fz.random.key(0))
    first = [extent_of(x).offset for x in tree.leaves(state.params)]
    for batch in (one, two):
        state, _ = train(state, batch)
    assert all(extent_of(x).offset != at for x, at in zip(tree.leaves(state.params), first, strict=True))
    fz.checkpoint.save(tmp_path / "saved", state)
    state = fz.move(fz.move(state, "cpu"), "home")
    for batch in rest:
        state, _ = train(state, batch)
    found = train.gather(state)
    state = train.restore(tmp_path / "saved")
    for batch in rest:
        state, _ = train(state, batch)
    want, _, _ = run(mesh, (), scales=(0.1, 0.1, 0.1, 9.0))
    assert same(found, want[1])
    assert same(train.gather(state), want[1])


@pytest.mark.usefixtures("guessing")
def test_without_room_for_a_second_extent_updates_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fzero.memory import scratch_allocation as scratch

    def full(parts: Any, before: int, nbytes: int) -> None:
        raise FzeroValueError(f"{nbytes - before} bytes more needed")

    want = waited()
    monkeypatch.setattr(scratch, "extend", full)
    with caplog.at_level(logging.WARNING, "fzero"):
        found, moved, _ = run(fz.make_mesh(data=1), OFFLOADS["both"](tmp_path))
    assert same(found, want)
    assert len(set(moved)) == 1, "nothing is done twice"
    assert sum("wait for the norm" in r.getMessage() for r in caplog.records) == 1


def test_budgets_decide(tmp_path: Path) -> None:
    """Twice the bytes on disk must be allowed."""
    step = fz.compose(*OFFLOADS["both"](tmp_path))(fz.train_step(loss, clipped()))
    batch = torch.empty(1 << 12, WIDTH, device="meta")
    free, once = (fz.lower(step, fz.AbstractMesh(data=1), init, batch, disk_budget=n) for n in (None, 200_000))
    assert free.plan.disk_bytes > 200_000 >= once.plan.disk_bytes == free.plan.disk_bytes // 2
    assert guesses(free.program)
    assert not guesses(once.program)
    assert [d.chosen for d in free.plan.decisions if d.what == "update"] == ["speculative"]


def test_no_guess_where_it_could_not_be_right(tmp_path: Path) -> None:
    """LAMB's trust ratios are reductions of the moments; without a clip nothing waits."""
    for optimizer in (optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(1e-3)), optim.adamw(1e-3)):
        step = fz.compose(*OFFLOADS["both"](tmp_path))(fz.train_step(loss, optimizer))
        assert not guesses(fz.lower(step, fz.AbstractMesh(data=1), init, torch.empty(4, WIDTH, device="meta")).program)


def test_profile_has_an_event_for_what_ran(tmp_path: Path) -> None:
    train = fz.compile(
        fz.compose(*OFFLOADS["opt_state"](tmp_path))(fz.train_step(loss, clipped())),
        fz.make_mesh(data=1),
        backend="eager",
    )
    state = train.init(init, fz.random.key(0))
    counts = {}
    for scale in (9.0, 0.1):
        batch = scale * torch.ones(4, WIDTH)
        state, events = train.profile(state, batch, steps=1)
        counts[scale] = sum(e.name.startswith("update") for e in events)
        assert {e.queue for e in events} == {"compute", "disk", "to_host", "to_device"}
    assert counts == {9.0: 3, 0.1: 3}  # as the rollback, and speculative: each update once


# --- what would break a guess is found ---


def lowered(path: Path) -> Any:
    step = fz.compose(*OFFLOADS["opt_state"](path))(fz.train_step(loss, clipped()))
    return fz.lower(step, fz.AbstractMesh(data=1), init, torch.empty(4, WIDTH, device="meta")).program


def mutated(program: Any, what: str) -> Any:
    rollback = next(op for op in program.instructions if op.op == "rollback")
    at = program.instructions.index(rollback)
    match what:
        case "one leaf is not written again":
            gone = next(op for op in rollback.body if op.tiers == ("host", "disk"))
            body = [
                x for x in rollback.body if x is not gone and not (x.op == "wait" and x.args[0] == gone.out[0].name)
            ]
        case "what is not on disk is not put back":
            body = [x for x in rollback.body if not (x.op == "assign" and x.attrs.restores)]
        case "nothing is done again":
            return replace(program, instructions=(*program.instructions[:at], *program.instructions[at + 1 :]))
        case "has not been waited for":
            start = next(x for x in reversed(program.instructions[:at]) if x.tiers == ("host", "disk"))
            wait = next(x for x in program.instructions if x.op == "wait" and x.args[0] == start.out[0].name)
            ops = [x for x in program.instructions if x is not wait]
            return replace(
                program, instructions=(*ops[: ops.index(rollback) + 1], wait, *ops[ops.index(rollback) + 1 :])
            )
    return replace(
        program,
        instructions=(*program.instructions[:at], replace(rollback, body=tuple(body)), *program.instructions[at + 1 :]),
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one leaf is not written again", "was written speculatively, and is not written again"),
        ("what is not on disk is not put back", "has been overwritten"),
        ("nothing is done again", "was written speculatively"),
        ("has not been waited for", "has not been waited for"),
    ],
)
def test_the_verifier_finds(tmp_path: Path, what: str, said: str) -> None:
    program = lowered(tmp_path)
    check(verify(program))
    with pytest.raises(VerifyError, match=said):
        verify(mutated(program, what))
