"""A program is a function of the code and the shapes: not of the hash seed, of addresses, of what was lowered before,
of the rank's device or directories."""

from __future__ import annotations

import gc
import linecache
import os
from pathlib import Path
from typing import Any

import pytest
import texts
import torch
from offloads import open_files

import fzero as fz
from fzero import optim
from fzero._compat import compat
from fzero.ir.program import Function
from fzero.runtime import program_cache, read_values
from fzero.runtime.build import artifact_cache, inductor
from fzero.runtime.build.tracebacks import forget_dead
from fzero.trace.graph_capture import record
from fzero.trace.subgraph import signature

PARAMS, BATCH = {"w": torch.eye(4)}, torch.ones(2, 4)


def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).square().mean()


def digests(folder: str) -> dict[str, list[str]]:
    rank = os.environ["RANK"]
    return texts.digests(rank, f"{folder}/scratch-{rank}")


@pytest.mark.full
def test_interpreters_make_the_same_programs(run_ranks: Any, tmp_path: Path) -> None:
    """Every golden program and some of the parity table, with another hash seed, order, rank and directory in each
    process."""
    first, second = run_ranks(2, digests, str(tmp_path), timeout=240)
    assert first.keys() == second.keys() and len(first) >= 20
    differ = {
        name: [i for i, (a, b) in enumerate(zip(first[name], second[name], strict=False)) if a != b][:3]
        for name in first
        if first[name] != second[name]
    }
    assert not differ  # the numbers of lines


def test_two_devices_of_a_host_have_one_program_and_a_key_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes the index of the device into its code."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a device")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    graphs = []
    for index in (0, 1):
        monkeypatch.setattr("torch.cuda.current_device", lambda index=index: index)
        mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
        x = compat.new_fake(mode, (4, 8), torch.float32, "cuda")
        with mode:
            graphs.append(record(lambda x: [x * 2 + torch.arange(8, device=x.device)], [x], owner="test", names=["x"]))
        assert graphs[-1].outputs[0].meta["val"].device == torch.device("cuda", index)
    assert signature(graphs[0]) == signature(graphs[1])
    keys = {artifact_cache.key(g, Function("f", g), torch.device("cuda", i)) for i, g in enumerate(graphs)}
    assert len(keys) == 2
    monkeypatch.setattr(artifact_cache, "_triton", lambda: "another")
    artifact_cache._hardware.cache_clear()
    assert artifact_cache.key(graphs[0], Function("f", graphs[0]), torch.device("cuda", 0)) not in keys
    monkeypatch.undo()
    artifact_cache._hardware.cache_clear()


def test_signed_zeros_are_two_functions() -> None:
    x = compat.new_fake(compat.FakeTensorMode(), (4,), torch.float32, "cpu")
    with x.fake_mode:
        a, b, c = (
            signature(record(lambda x, by=by: [x * by], [x], owner="test", names=["x"])) for by in (0.0, -0.0, 0.0)
        )
    assert a == c != b


def test_the_names_of_directories_are_no_part_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(path: Any) -> str:
        return str(
            fz.lower(
                fz.offload(fz.train_step(loss_fn, optim.sgd(0.1, momentum=0.9)), "nvme", path=path),
                fz.AbstractMesh(data=1),
                PARAMS,
                BATCH,
            ).program
        )

    assert text(tmp_path / "a") == text(tmp_path / "b") != text([tmp_path / "a", tmp_path / "b"])
    assert "offload('nvme', 'opt_state', path=...)" in text(tmp_path)

    (tmp_path / "first").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    step = fz.offload(fz.train_step(loss_fn, optim.sgd(0.1, momentum=0.9)), "nvme", path=".")
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    monkeypatch.chdir(tmp_path / "other")
    state = train.init({"w": torch.ones(64, 64)})
    assert open_files(tmp_path / "first") and not open_files(tmp_path / "other")
    del state


# --- what a step keeps ---


def test_alike_trees_share_a_program_and_programs_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train = fz.compile(fz.train_step(loss_fn, optim.adamw(0.1)), fz.make_mesh(data=1), backend="eager")
    states = []
    for i in range(3):
        states.append(train.init({"w": torch.eye(4) * (i + 1)}))
        states[i], _ = train(states[i], BATCH)
        assert len(train._runs) == 1
    for state in states:
        train(state, BATCH)
    assert len(train._runs) == 1
    other, _ = train(train.init({"w": torch.ones(4, 2)}), BATCH)  # other shapes
    tied = torch.eye(4)
    train(train.init({"w": tied, "v": tied}), BATCH)  # another structure
    assert len(train._runs) == 3
    assert other.params["w"].shape == (4, 2)

    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", 4)
    program = train._runs[next(iter(train._runs))].lowered.program
    with caplog.at_level("WARNING", "fzero"):
        state, expected = states[0], []
        for rows in (1, 2, 3, 4, 5, 6):
            state, metrics = train(state, torch.ones(rows, 4))
            expected.append(metrics["loss"])
    assert len(train._runs) == 4 and caplog.text.count("pad them") == 1
    assert all(kept.lowered.program is not program for kept in train._runs.values())
    train(state, torch.ones(1, 4))  # made again
    assert len(train._runs) == 4


def test_a_step_that_is_dropped_leaves_no_text() -> None:
    def texts() -> int:
        gc.collect()
        forget_dead()
        return sum(name.startswith("<fzero") for name in linecache.cache)

    before = texts()
    train = fz.compile(fz.train_step(loss_fn, optim.adamw(0.1)), fz.make_mesh(data=1), backend="eager")
    train(train.init(PARAMS), BATCH)
    assert texts() > before
    del train
    assert texts() == before


@pytest.mark.full
@pytest.mark.usefixtures("compiled_here")
def test_an_entry_that_cannot_be_loaded_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, by its digest, and of no use: what an artifact of another build of PyTorch is."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    step, params, x = fz.train_step(loss_fn, optim.sgd(0.1)), {"w": torch.eye(64)}, torch.ones(64, 64)

    def run() -> torch.Tensor:
        train = fz.compile(step, fz.make_mesh(data=1))
        return train(train.init(params), x)[0].params["w"]

    expected = run()
    files = list((tmp_path / "functions").glob("*.so"))
    assert files
    for file in files:
        artifact_cache.Cache(file.parent).write(file.stem, artifact_cache.CacheEntry("", b"no artifact"))

    def load(data: bytes) -> Any:
        assert data == b"kept by this release", "result is not None"  # as PyTorch says it

    monkeypatch.setattr(inductor.compat, "load_artifact", load)
    with caplog.at_level("INFO", "fzero"):
        assert torch.equal(run(), expected)
    assert "cannot be loaded and will be compiled again: AssertionError" in caplog.text
    assert torch.equal(run(), expected)  # from what was written in its place


# --- values outside the arguments ---

temperature = 1.0
schedule = {"weights": [1.0, 2.0]}


def annealed(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] / temperature).square().mean() * schedule["weights"][0]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "temperature", 1.0)
    monkeypatch.setitem(schedule, "weights", [1.0, 2.0])


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("change", ["global", "item", "closure", "optimizer", "method", "training"])
def test_a_value_that_changes_between_steps_is_an_error(change: str) -> None:
    """Named, with both values, at the second call at the latest if it changed right away, else within so many steps;
    also in an evaluation."""
    weight, rates = 1.0, {"lr": 0.1}
    layer = Halved()

    class Model:
        scale, steps = 1.0, 0

        def loss(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            return layer(x @ p["w"]).square().mean() * self.scale * weight

    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g: -rates["lr"] * g, grads), state

    model = Model()
    step = fz.train_step(
        annealed if change in ("global", "item") else model.loss,
        optim.GradientTransformation(lambda params: (), update),
    )
    train, state = fz.compile(step, fz.make_mesh(data=1), backend="eager"), None

    def turn() -> None:
        nonlocal weight
        if change == "global":
            globals()["temperature"] = 2.0
        elif change == "item":
            schedule["weights"][0] = 3.0
        elif change == "closure":
            weight = 2.0
        elif change == "optimizer":
            rates["lr"] = 0.2
        elif change == "method":
            model.scale = 2.0
        else:
            layer.eval()

    where = {
        "global": "temperature: 1.0 before, 2.0 now",
        "item": r"schedule\['weights'\]\[0\]: 1.0 before, 3.0 now",
        "closure": "weight: 1.0 before, 2.0 now",
        "optimizer": r"rates\['lr'\]: 0.1 before, 0.2 now",
        "method": "self.scale: not set before, 2.0 now",
        "training": "layer.training: True before, False now",
    }[change]
    state, _ = train(train.init(PARAMS), BATCH)
    for _ in range(40):
        model.steps += 1  # that nothing reads: no error
        state, _ = train(state, BATCH)
    turn()
    with pytest.raises(fz.errors.FzeroValueError, match=rf"(?s)fzero\.gather: .*{where}.*before: .*now: "):
        train.gather(state)
    with pytest.raises(
        fz.errors.FzeroValueError,
        match=rf"(?s)computes something different.*{where}.*before: .*now: .*Fix: pass what changes from step",
    ):
        for _ in range(read_values.LOOKED_AT_EVERY):
            state, _ = train(state, BATCH)
    if change == "global":
        again = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        state, _ = again(again.init(PARAMS), BATCH)
        globals()["temperature"] = 4.0
        with pytest.raises(fz.errors.FzeroValueError, match=r"temperature: 2\.0 before, 4\.0 now"):
            again(state, BATCH)
        evaluate = fz.compile(fz.eval_step(annealed), fz.make_mesh(data=1), backend="eager")
        evaluate(PARAMS, BATCH)
        globals()["temperature"] = 8.0
        with pytest.raises(
            fz.errors.FzeroValueError, match=r"(?s)fzero\.eval_step: .*temperature: 4\.0 before, 8\.0 now"
        ):
            evaluate(PARAMS, BATCH)


class Halved(torch.nn.Module):
    """Half of its input, while it is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if self.training else x


def test_a_changed_value_that_makes_no_difference() -> None:
    """A new trace decides, and rarely: the value may change before every step."""

    class Model:
        epoch, traces = 0, 0

        def loss(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            traces.append(self.epoch)
            return (x @ p["w"]).square().mean() * (2.0 if self.epoch > 90 else 1.0)

    traces: list[int] = []
    model = Model()
    train = fz.compile(fz.train_step(model.loss, optim.sgd(0.01)), fz.make_mesh(data=1), backend="eager")
    state = train.init(PARAMS)
    for _ in range(80):
        state, _ = train(state, BATCH)
        model.epoch += 1
    assert len(traces) < 10
    train.gather(state)
    model.epoch = 91
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)loss computes something different.*before: .*now: "):
        for _ in range(80):
            state, _ = train(state, BATCH)


def test_a_loss_that_counts_its_calls_is_refused() -> None:
    """The first trace shows that a number has changed, a second one whether it changes each time: what is kept, or only
    written down, is let be."""

    class Model:
        calls, width = 0, None

        def counts(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (x @ p["w"]).mean() * self.calls

        def keeps(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            self.width = self.width or x.shape[1]
            return (x @ p["w"]).mean() * self.width

        def writes_down(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return (x @ p["w"]).mean() + 0 * len(seen)

    seen: list[int] = []
    params, batches = {"w": torch.ones(4, 4)}, [torch.ones(n, 4) for n in (2, 3, 2)]
    for name in ("keeps", "writes_down"):
        train = fz.compile(fz.train_step(getattr(Model(), name), optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
        state = train.init(params)
        for batch in batches:
            state, _ = train(state, batch)
    train = fz.compile(fz.train_step(Model().counts, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(params), batches[0])
    says = r"(?s)computes something different than when it was traced.*self\.calls.*before: .*, 1\).*now: .*, 2\)"
    with pytest.raises(fz.errors.FzeroValueError, match=says):
        train(state, batches[0])
