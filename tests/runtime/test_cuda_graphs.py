"""Steps captured as CUDA graphs: the same bits as uncaptured ones, on a double that carries nothing out while it
captures (captured.py); and what cannot be captured, by name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from captured import Device, Graph, captured
from models import MODELS, OPTIMIZERS
from offloads import OFFLOADS
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero.errors import FzeroValueError
from fzero.ir.ops import OPS
from fzero.runtime import cuda_graphs

STEPS = cuda_graphs.WARM_UP + 4
CASES: dict[str, tuple[Any, str, str]] = {
    "plain": ((), "gpt", "adamw"),
    "bf16, clipped": ((fz.mixed_precision("bf16"),), "gpt", "clipped"),
    "fp16 with a loss scale": ((fz.mixed_precision("fp16"),), "mixed", "clipped"),
    "bf16 parameters, accumulate": ((fz.mixed_precision("bf16", params="bf16"), fz.accumulate(2)), "gpt", "sgd"),
    "remat, lion": ((fz.remat("full"),), "bare", "lion"),
    "layerwise": ((fz.accumulate(3, schedule="layerwise"),), "gpt", "lamb"),
}


def run(mesh: fz.Mesh, transforms: Any, model: str, optimizer: str, batches: Any = None, **options: Any) -> Any:
    """Metrics of every step, all kept to the end, and the last state; the compiled step."""
    step = fz.compose(*transforms)(fz.train_step(MODELS[model].loss, OPTIMIZERS[optimizer]()))
    train = fz.compile(step, mesh, backend="eager", **options)
    state, metrics = train.init(MODELS[model].init, fz.random.key(1)), []
    for batch in models.batches(STEPS) if batches is None else batches:
        state, found = train(state, models.part(batch, mesh))
        metrics.append(found)
    return (metrics, train.gather(state)), train, state


def same(one: Any, other: Any) -> bool:
    """To the bit, numbers that are none too."""
    pairs = zip(fz.tree.leaves(one), fz.tree.leaves(other), strict=True)
    return fz.tree.structure(one) == fz.tree.structure(other) and all(
        a.dtype == b.dtype and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b))) for a, b in pairs
    )


def wanted(case: str, batches: Any = None) -> Any:
    if case == "plain" and batches is None:
        return plain()
    return run(fz.make_mesh(data=1), *CASES[case], batches, cuda_graphs=False)[0]


@functools.cache
def plain() -> Any:
    return run(fz.make_mesh(data=1), *CASES["plain"], cuda_graphs=False)[0]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[fz.Mesh, Device]]:
    mesh = fz.make_mesh(data=1)
    yield mesh, captured(mesh, monkeypatch.setattr)
    cuda_graphs._drop_all()


@pytest.mark.full(keep=["remat, lion", "fp16 with a loss scale"])
@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_is_the_step(case: str, on_gpu: Any) -> None:
    mesh, device = on_gpu
    found, _, _ = run(mesh, *CASES[case])
    (graph,) = device.graphs
    assert graph.num_replays == STEPS - cuda_graphs.WARM_UP
    assert same(found, wanted(case))
    ordinary = ["side waits for main", "on side", "on main", "main waits for side"]
    assert device.said[:4] == ordinary and device.said.count("on side") == cuda_graphs.WARM_UP + 1


def test_the_double_finds_what_is_left_out(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault gives other numbers, or an error."""
    mesh, device = on_gpu
    want, faults = wanted("plain"), dict[str, Any]()
    real, prepare = cuda_graphs.Replayed.__call__, cuda_graphs.Replayed.prepare

    def uncloned(self: Any, *trees: Any) -> Any:
        found = real(self, *trees)
        return self._outputs if self._graph is not None else found

    def stale(self: Any, *trees: Any) -> Any:
        if self._graph is None:
            return real(self, *trees)
        self._graph.replay()
        return tuple(x.clone() for x in self._outputs)

    def careless(self: Any, *trees: Any) -> None:
        if self._graph is not None:  # wherever the state is
            return
        prepare(self, *trees)
        for x in fz.tree.leaves(trees[:-1]) if self._graph is not None else ():
            x.data = x.data.clone()

    faults["a state that has moved"] = ("prepare", careless)
    faults["results are not copied"] = ("__call__", uncloned)
    faults["the batch is not copied"] = ("__call__", stale)
    for name, (attribute, fault) in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(cuda_graphs.Replayed, attribute, fault)
            assert not same(run(mesh, *CASES["plain"])[0], want), name
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "WARM_UP", 0)
        device.begun.clear()
        with pytest.raises(FzeroValueError, match="begins"):
            run(mesh, *CASES["plain"], cuda_graphs=True)
    assert same(run(mesh, *CASES["plain"])[0], want)


def test_other_batches_have_graphs_of_their_own(on_gpu: Any) -> None:
    mesh, device = on_gpu
    short = models.batches(2 * STEPS, size=models.BATCH // 2)
    mixed = [x for pair in zip(models.batches(2 * STEPS), short, strict=True) for x in pair]
    found, _, _ = run(mesh, *CASES["plain"], mixed)
    assert same(found, wanted("plain", mixed))
    assert [g.num_replays for g in device.graphs] == [2 * STEPS - cuda_graphs.WARM_UP] * 2


def test_another_state_begins_anew(on_gpu: Any) -> None:
    """Two states in turns are never captured; one that stays is, and one whose leaves have new memory is again."""
    mesh, device = on_gpu
    step = fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())

    def both(train: Any, moved: bool) -> Any:
        one, other = (train.init(MODELS["gpt"].init, fz.random.key(i)) for i in range(2))
        seen = []
        for batch in models.batches(STEPS):
            one, a = train(one, batch)
            other, b = train(other, batch)
            seen += [a, b]
        assert not moved or not device.graphs
        for i, batch in enumerate(models.batches(2 * STEPS)):
            if moved and i == STEPS:
                for x in fz.tree.leaves(one):
                    x.data = x.data.clone()
            one, a = train(one, batch)
            seen.append(a)
        return seen, train.gather(one), train.gather(other)

    found = both(fz.compile(step, mesh, backend="eager"), True)
    plain = both(fz.compile(step, fz.make_mesh(data=1), backend="eager", cuda_graphs=False), False)
    assert same(found, plain) and [g.num_replays for g in device.graphs] == [STEPS - cuda_graphs.WARM_UP] * 2


def test_what_looks_at_a_run_sees_it(on_gpu: Any) -> None:
    """A profile, and a mode that sees operations, look at ordinary runs; the graph is replayed behind them."""
    mesh, device = on_gpu
    _, train, state = run(mesh, *CASES["plain"])
    replays, batch = device.graphs[0].num_replays, models.batches(1)[0]
    state, events = train.profile(state, batch, steps=1)
    assert device.graphs[0].num_replays == replays + 1  # of the step before those that are timed
    assert {e.name for e in events} >= {"update", "_layer"} or len(events) > 10
    with _Counts() as seen:
        train(state, batch)
    assert seen.num > 50 and device.graphs[0].num_replays == replays + 1
    train(state, batch)
    assert device.graphs[0].num_replays == replays + 2


class _Counts(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _waiting(patch: pytest.MonkeyPatch) -> None:
    """Has a line of the program wait for the device."""
    row, made = OPS["assign"], OPS["assign"].runs

    def runs(on: Any) -> Any:
        assign = made(on)

        def waits(targets: Any, sources: Any) -> None:
            assert sources[0].sum().item() is not None
            assign(targets, sources)

        return waits

    patch.setattr(type(row), "runs", lambda self, on: runs(on))


def test_a_capture_that_fails(on_gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mesh, device = on_gpu
    want = wanted("plain")
    _waiting(monkeypatch)
    with caplog.at_level(logging.WARNING, "fzero"):
        found, _, _ = run(mesh, *CASES["plain"])
    assert same(found, want) and not device.graphs and device.current is device.main
    (record,) = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "not permitted when stream is capturing: _local_scalar_dense" in record.message
    step = fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())
    train = fz.compile(step, mesh, backend="eager", cuda_graphs=True)
    state, given = train.init(MODELS["gpt"].init, fz.random.key(1)), models.batches(STEPS)
    for batch in given[: cuda_graphs.WARM_UP]:
        state, _ = train(state, batch)
    before = train.gather(state)
    with pytest.raises(FzeroValueError, match=r"cannot be captured as a CUDA graph\n  RuntimeError.*\nFix: leave out"):
        train(state, given[cuda_graphs.WARM_UP])
    assert same(train.gather(state), before)


def test_a_capture_that_fails_where_it_begins_is_ended(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.graph` does not: the stream would go on capturing, and refuse the ordinary run that follows."""
    mesh, device = on_gpu
    begin = Graph.capture_begin

    def fails(self: Graph, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.refuse("cudaStreamBeginCapture")

    monkeypatch.setattr(Graph, "capture_begin", fails)
    want = wanted("plain")
    found, _, _ = run(mesh, *CASES["plain"])
    assert same(found, want) and device.capturing is None and device.current is device.main and not device.graphs


def test_what_touches_the_host_is_refused_by_name(on_gpu: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = fz.make_mesh(data=1, unified_memory=False)
    device = captured(apart, monkeypatch.setattr)
    for name, said in (("cpu opt_state", "copy_start: moves values from host to device"),
                       ("nvme both", "copy_start: moves values from disk to"),):  # fmt: skip
        case = (OFFLOADS[name](tmp_path), "gpt", "adamw")
        with pytest.raises(FzeroValueError) as error:
            run(apart, *case, cuda_graphs=True)
        assert said in str(
            error.value
        ) and "Fix: leave out cuda_graphs=True, or the transforms that move values" in str(error.value)
        found, _, _ = run(apart, *case)
        assert not device.graphs and same(found[0][0]["loss"], wanted("plain")[0][0]["loss"])


def test_where_there_are_none() -> None:
    mesh, step = fz.make_mesh(data=1), fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())
    with pytest.raises(FzeroValueError, match="cuda_graphs=True: the mesh is of cpu devices"):
        fz.compile(step, mesh, backend="eager", cuda_graphs=True)
    with pytest.raises(FzeroValueError, match="cuda_graphs=1: must be True or False"):
        fz.compile(step, mesh, backend="eager", cuda_graphs=1)


def test_an_evaluation_is_captured_if_it_is_told_to(on_gpu: Any) -> None:
    mesh, device = on_gpu
    state = run(mesh, *CASES["plain"], cuda_graphs=False)[-1]
    step = fz.eval_step(lambda p, batch: {"loss": MODELS["gpt"].loss(p, batch), "first": batch["tokens"][0]})
    batches = models.batches(STEPS)
    outputs = []
    for asked in (None, True):
        evaluate = fz.compile(step, mesh, backend="eager", cuda_graphs=asked)
        outputs.append([evaluate(state.params, batch) for batch in batches])
        assert len(device.graphs) == bool(asked)
    assert same(*outputs)


def test_graphs_are_gone_before_a_rank_leaves(on_gpu: Any) -> None:
    mesh, device = on_gpu
    _, train, state = run(mesh, *CASES["plain"])
    (kept,) = train._runs.values()
    assert kept.run.replayed._graph is not None
    fz.close_mesh()
    assert kept.run.replayed._graph is None and len(device.graphs) == 1
    train(state, models.batches(1)[0])  # a mesh of one device has nothing to leave


SHARDED = {
    "stage 2, accumulate": (fz.shard_grads(), fz.accumulate(2)),
    "stage 3, bf16": (fz.shard_params(), fz.mixed_precision("bf16")),
}


def _on_ranks() -> list[Any]:
    out = []
    for transforms in SHARDED.values():
        mesh = fz.make_mesh(shared_memory=False)
        with pytest.MonkeyPatch.context() as patch:
            device = captured(mesh, patch.setattr)
            plain, _, _ = run(mesh, transforms, "gpt", "clipped")
            assert not device.graphs  # by default several ranks capture nothing
            found, _, _ = run(mesh, transforms, "gpt", "clipped", cuda_graphs=True)
            out.append((same(plain, found), [g.num_replays for g in device.graphs]))
            cuda_graphs._drop_all()
    return out


@pytest.mark.full
def test_ranks_capture_together_when_told_to(run_ranks: Any) -> None:
    assert run_ranks(2, _on_ranks) == [[(True, [STEPS - cuda_graphs.WARM_UP])] * 2] * 2


def _one_rank_cannot() -> str:
    mesh = fz.make_mesh(shared_memory=False)
    with pytest.MonkeyPatch.context() as patch:
        captured(mesh, patch.setattr)
        if mesh.rank == 1:
            _waiting(patch)
        try:
            run(mesh, (fz.shard_params(),), "gpt", "adamw", cuda_graphs=True)
        except FzeroValueError as error:
            return str(error)
    return "captured"


def test_what_one_rank_cannot_capture_none_does(run_ranks: Any) -> None:
    first, second = run_ranks(2, _one_rank_cannot)
    assert first == second
    assert "rank 1: RuntimeError: CUDA error: operation not permitted" in first and "rank 0" not in first
