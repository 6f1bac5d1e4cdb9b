"""A mesh simulated in one process does what the plain step does, and what processes do."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import re
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from replaced_passes import pass_named, replace_pass

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.runtime.execute import Environment
from fzero.testing.interpreter import Interpreter, PlainTransfers
from fzero.trace.recorder import Recorded
from fzero.transforms.transform import Transform, applied

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "extending.md"

PARAMS = {
    "layers": [{"w": fz.random.normal(fz.random.key(i), (7, 7)) * 0.5, "b": torch.zeros(7)} for i in range(2)],
    "scale": torch.ones(()),
}
X = fz.random.normal(fz.random.key(9), (16, 7))


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, batch: Any, *, key: torch.Tensor) -> torch.Tensor:
    x = batch
    for p in params["layers"]:
        x = layer(p, x)
    return (x * params["scale"] - 1).square().mean()


def plain() -> Any:
    return fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)))


STEPS = {
    "zero-1": [fz.shard_opt_state(), fz.data_parallel(axis="replica")],
    "zero-3": [fz.shard_params(), fz.data_parallel(axis="replica"), fz.remat("full")],
}


@pytest.mark.parametrize("name", STEPS)
def test_a_simulated_mesh_equals_the_plain_step(name: str) -> None:
    step = fz.compose(*STEPS[name])(plain())
    got, metrics = fz.testing.simulate(step, fz.AbstractMesh(replica=2, data=2), PARAMS, X, steps=3)
    want = plain().init(PARAMS)
    for _ in range(3):
        want, expected = plain()(want, X)
    assert [*fz.tree.paths(got)] == [*fz.tree.paths(want)] and int(got.step) == 3
    for path, x, y in zip(fz.tree.paths(got), fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6, msg=lambda text, path=path: f"{path}: {text}")
    torch.testing.assert_close(metrics["loss"], expected["loss"])
    torch.testing.assert_close(metrics["grad_norm"], expected["grad_norm"])


def _processes() -> dict[str, torch.Tensor]:
    mesh = fz.make_mesh(replica=2, data=2)
    train = fz.compile(fz.compose(*STEPS["zero-3"])(plain()), mesh, backend="eager")
    state = train.init(PARAMS)
    for _ in range(2):
        state, _ = train(state, X.chunk(4)[mesh.rank])
    whole = train.gather(state)
    return dict(zip(fz.tree.paths(whole), fz.tree.leaves(whole), strict=True))


@pytest.mark.full
def test_it_does_what_processes_do(run_ranks: Any) -> None:
    got, _ = fz.testing.simulate(
        fz.compose(*STEPS["zero-3"])(plain()), fz.AbstractMesh(replica=2, data=2), PARAMS, X, steps=2
    )
    for ranks in run_ranks(4, _processes):
        for path, x in zip(fz.tree.paths(got), fz.tree.leaves(got), strict=True):
            torch.testing.assert_close(x, ranks[path], rtol=1e-6, atol=1e-7)


def _page() -> dict[str, Any]:
    """The toy transform, op and optimizer of docs/internals/extending.md, and its step."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
            if "simulate(" in code:
                break
            exec(compile(code, "extending.md", "exec", dont_inherit=True), namespace)
    return namespace


def _votes() -> dict[str, torch.Tensor]:
    page, mesh = _page(), fz.make_mesh(replica=2, data=2)
    train = fz.compile(page["step"], mesh, backend="eager")
    state = train.init(page["params"])
    state, _ = train(state, tuple(x.chunk(4)[mesh.rank] for x in page["batch"]))
    assert any(op.op == "signs" for op, _ in train.program.walk())
    return train.gather(state).params


@pytest.mark.usefixtures("ops")
def test_what_the_page_adds_runs_on_processes(run_ranks: Any) -> None:
    page = _page()
    got, _ = fz.testing.simulate(page["step"], page["mesh"], page["params"], page["batch"])
    for params in run_ranks(4, _votes):
        assert all(torch.equal(params[name], got.params[name]) for name in params)
        assert not any(torch.equal(params[name], page["params"][name]) for name in params)


@pytest.mark.parametrize("transform", [fz.data_parallel(), fz.shard_params()])
def test_ranks_that_hold_different_values_are_seen(monkeypatch: Any, transform: Any) -> None:
    """As without the reductions over `replica`."""
    reduced = PlainTransfers.reduced
    monkeypatch.setattr(
        PlainTransfers, "reduced", lambda self, x, axis, op: x if axis == "replica" else reduced(self, x, axis, op)
    )
    step = fz.compose(transform, fz.data_parallel(axis="replica"))(plain())
    with pytest.raises(fz.errors.DivergenceError, match="replica=2, data=2") as found:
        fz.testing.simulate(step, fz.AbstractMesh(replica=2, data=2), PARAMS, X)
    assert "params['layers'][0]['w']: not the same on rank 2 as on rank 0" in str(found.value)


def test_metrics_that_are_not_the_same_are_seen(monkeypatch: Any) -> None:
    """As without the reductions of what is one number."""
    reduced = PlainTransfers.reduced
    monkeypatch.setattr(
        PlainTransfers, "reduced", lambda self, x, axis, op: x if x.numel() == 1 else reduced(self, x, axis, op)
    )
    with pytest.raises(fz.errors.DivergenceError, match="simulate") as found:
        fz.testing.simulate(fz.shard_params(plain()), fz.AbstractMesh(data=2), PARAMS, X)
    assert "metrics['loss']: not the same on rank 1 as on rank 0" in str(found.value)
    assert "params" not in str(found.value)


@pytest.mark.parametrize("name", ["fuse", "copies", "shard"])
def test_a_pass_before_the_choices_is_named(monkeypatch: Any, name: str) -> None:
    rewrite = pass_named(name).rewrite

    def dropping(*args: Any) -> Any:
        program = rewrite(*args)
        return dataclasses.replace(program, instructions=program.instructions[1:])

    replace_pass(monkeypatch, name, rewrite=dropping)
    params, batch = {"w": torch.ones(4)}, torch.ones(2, 4)
    batch = (batch,) if name == "shard" else batch
    fn = lambda p, x: (x @ p["w"]).mean()  # noqa: E731
    step = fz.shard_params(fz.eval_step(fn) if name == "shard" else fz.train_step(fn, fz.optim.sgd(0.1)))
    step = fz.compose(fz.mixed_precision("bf16"), fz.offload("cpu", "params"))(step) if name == "copies" else step
    with pytest.raises(VerifyError, match=f"found after the pass {name!r}"):
        fz.lower(step, fz.AbstractMesh(data=2), params, batch)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ((plain(), fz.AbstractMesh(data=2), PARAMS, X), "FzeroValueError", "no transform uses a mesh axis"),
        ((fz.data_parallel(plain()), fz.AbstractMesh(data=3), PARAMS, X), "FzeroValueError", "batch [16, 7]"),
        ((loss_fn, fz.AbstractMesh(data=2), PARAMS, X), "FzeroTypeError", "step: function, not a step"),
        (
            (fz.mixed_precision("fp16")(fz.data_parallel(plain())), fz.AbstractMesh(data=2), PARAMS, X),
            "FzeroValueError",
            "extras['loss_scale']",
        ),
    ],
)
def test_what_cannot_be_simulated(arguments: Any, kind: str, says: str) -> None:
    with pytest.raises(fz.errors.FzeroError) as found:
        fz.testing.simulate(*arguments)
    assert type(found.value).__name__ == kind and says in str(found.value) and "\nFix: " in str(found.value)


@dataclasses.dataclass(frozen=True)
class Rewriting(Transform):
    """A transform whose rewrite is what a user got wrong."""

    rewrites: Any = None
    order: ClassVar[int] = 60
    name: ClassVar[str] = "mine"

    def rewrite(self, program: Any) -> Any:
        return self.rewrites(program)


def test_a_rewrite_that_is_wrong_is_named() -> None:
    params, batch = {"w": torch.ones(4)}, torch.ones(2, 4)
    step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1))

    def lowered(rewrites: Any) -> Any:
        return fz.lower(applied(Rewriting(rewrites), step), fz.AbstractMesh(data=1), params, batch)

    for wrong in (lambda program: None, lambda program: dataclasses.replace(program, instructions=("x",))):
        with pytest.raises(FzeroTypeError, match=r"(?s)fzero.mine: the rewrite of mine.*does not return a program"):
            lowered(wrong)
    with pytest.raises(VerifyError, match=r"(?s)the rewrite of 'mine' caused it.*after the pass 'mine'"):
        lowered(lambda program: dataclasses.replace(program, instructions=program.instructions[:-1]))


@dataclasses.dataclass(frozen=True)
class Idle(Rewriting):
    """One that says when it may change nothing."""

    def idle_in(self, program: Any) -> str | None:
        return "a mesh of one rank" if program.mesh.size == 1 else super().idle_in(program)


@pytest.mark.usefixtures("ops")
def test_a_rewrite_that_changes_nothing_is_named() -> None:
    page = _page()
    params, batch, step = page["params"], page["batch"], page["step"]
    with pytest.raises(TransformError, match=r"(?s)vote\(axis='replica'\) on mesh replica=2, data=1: .*idle_in"):
        fz.lower(step, fz.AbstractMesh(replica=2, data=1), params, batch)
    for alone in (fz.AbstractMesh(replica=1, data=2), fz.AbstractMesh(replica=1, data=1)):
        assert fz.lower(step, alone, params, batch).after("vote")

    plain = fz.train_step(page["loss_fn"], fz.optim.sgd(0.1))
    same = lambda program: dataclasses.replace(program, instructions=tuple(program.instructions))  # noqa: E731
    for kind, sizes in ((Rewriting, (1, 2)), (Idle, (2,))):
        for size in sizes:
            with pytest.raises(TransformError, match=rf"mine.* on mesh data={size}: its rewrite leaves the program"):
                fz.lower(applied(kind(same), fz.data_parallel(plain)), fz.AbstractMesh(data=size), params, batch)
    assert fz.lower(applied(Idle(same), fz.data_parallel(plain)), fz.AbstractMesh(data=1), params, batch)
    evaluation = fz.eval_step(lambda p, b: page["loss_fn"](p, b))
    assert fz.lower(applied(Rewriting(same), evaluation), fz.AbstractMesh(data=1), params, (batch,))


def test_arguments_that_simulate_refuses() -> None:
    step = fz.train_step(lambda p, x: (x[0] @ p["w"]).mean() + x[1].mean(), fz.optim.sgd(0.1))
    mesh, params = fz.AbstractMesh(data=2), {"w": torch.ones(4)}
    step = fz.shard_params(step)
    with pytest.raises(FzeroTypeError, match=r"(?s)steps=1.5: must be a whole number"):
        fz.testing.simulate(step, mesh, params, (torch.ones(4, 4), torch.ones(4)), steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(FzeroTypeError, match=r"(?s)params\['w'\]: a meta tensor"):
        fz.testing.simulate(step, mesh, {"w": torch.ones(4, device="meta")}, (torch.ones(4, 4), torch.ones(4)))
    says = r"(?s)differ in dim 0.*batch\[0\] \[8, 4\].*batch\[1\] \[4\].*accumulate\(1, replicated=.*batch\[1\]"
    with pytest.raises(FzeroValueError, match=says):
        fz.testing.simulate(step, mesh, params, (torch.ones(8, 4), torch.ones(4)))


def alive() -> int:
    """The functions that are held, and what ran them."""
    gc.collect()
    return sum(issubclass(type(x), (Recorded, Environment, Interpreter)) for x in gc.get_objects())


def test_nothing_holds_what_has_run():
    product = fz.block(lambda p, x: x @ p["w"])
    step = fz.shard_params(fz.train_step(lambda p, x: product(p, product(p, x)).square().mean(), optim.sgd(0.1)))
    params = {"w": torch.ones(7, 7)}
    counts = []
    for _ in range(3):
        fz.testing.simulate(step, fz.AbstractMesh(data=2), params, X)
        train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        train(train.init(params), X)
        del train
        counts.append(alive())
    assert counts[0] == counts[1] == counts[2], counts


class Training:
    """A user's own class: its step refers to it, and it refers to the state."""

    def __init__(self) -> None:
        self.train = fz.compile(fz.train_step(self.loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
        self.state, _ = self.train(self.train.init({"w": torch.ones(7, 7)}), X)

    def loss(self, p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean()


def test_a_state_that_its_own_step_refers_to_is_freed():
    training = Training()
    held = weakref.ref(training.state.params["w"])
    assert copy.deepcopy(training.state).params["w"].equal(training.train.gather(training.state).params["w"])
    del training
    gc.collect()
    assert held() is None
