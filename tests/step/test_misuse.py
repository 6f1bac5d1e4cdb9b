"""Arguments of the wrong kind or in the wrong order, names that do not exist, ranks that stay away: refused by name,
with a way out."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import ending

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError
from fzero.optim import GradientTransformation


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).square().mean()


def _predict(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] - y).square().mean()


X, META = torch.ones(2, 4), {"w": torch.empty(4, 4, device="meta")}


@pytest.fixture(scope="module")
def made() -> Any:
    mesh = fz.make_mesh()
    train = fz.compile(fz.train_step(_loss, optim.adam(0.1)), mesh, backend="eager")
    return train, train.init({"w": torch.eye(4)}), fz.compile(fz.eval_step(_predict), mesh, backend="eager")


CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "an int for a key": (
        lambda train, state, run: train.init(lambda key: META, 0),
        "fzero.init: a key is a tensor, not int",
    ),
    "parameters on meta": (
        lambda train, state, run: train.init(META),
        "fzero.init: .*\n  params['w']: float32[4, 4] on the meta device",
    ),
    "a state on meta": (
        lambda train, state, run: train(state._replace(params=META), X),
        "fzero.step: .*\n  params['w']: float32[4, 4] on the meta device",
    ),
    "an evaluation on meta": (
        lambda train, state, run: run(META, X, X),
        "fzero.eval_step: .*\n  params['w']: float32[4, 4] on the meta device",
    ),
    "gather of no state": (
        lambda train, state, run: train.gather(3),
        "fzero.gather: the first argument is a State, not int",
    ),
    "replicas of no state": (
        lambda train, state, run: train.check_replicas(3),
        "fzero.check_replicas: the first argument is a State, not int",
    ),
    "show of no program": (
        lambda train, state, run: fz.show(3),
        "fzero.show: prints a program, not int\nFix: fz.show(train.program)",
    ),
    "restore of no path": (lambda train, state, run: train.restore(3), "fzero.checkpoint: 3 is not a path"),
    "an evaluation of a state": (
        lambda train, state, run: run(state, X, X),
        "fzero.eval_step: takes parameters, not the State .*\nFix: give state.params",
    ),
    "a nested tensor in a batch": (
        lambda train, state, run: train(state, {"x": torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)}),
        "a batch is a pytree of dense tensors\n  batch['x']: a nested tensor",
    ),
    "a profile of no steps": (
        lambda train, state, run: train.profile(state, X, steps=0),
        "fzero.profile: .*\n  steps=0: must be at least 1",
    ),
    "1.5 micro-batches": (
        lambda train, state, run: fz.accumulate(1.5),
        "fzero.accumulate: cannot cut a batch into 1.5 micro-batches",
    ),
    "'2' micro-batches": (
        lambda train, state, run: fz.accumulate("2"),
        "fzero.accumulate: cannot cut a batch into '2' micro-batches",
    ),
    "an update without params": (
        lambda train, state, run: fz.train_step(
            _loss, GradientTransformation(lambda params: (), lambda grads, state: (grads, state))
        ),
        "optimizer.update=<lambda>(grads, state): must be a function of (grads, opt_state, params)",
    ),
    "save to no path": (lambda train, state, run: fz.checkpoint.save(3, state), "fzero.checkpoint: 3 is not a path"),
    "save to a file": (
        lambda train, state, run: fz.checkpoint.save(__file__, state),
        f"fzero.checkpoint.save: {__file__} is not a directory",
    ),
    "too few arguments": (lambda train, state, run: run(state.params, (X, X)), "fzero.eval_step: _predict(p: "),
    "too many arguments": (
        lambda train, state, run: run(state.params, X, X, X),
        "and 3 more arguments\n  too many positional arguments\nFix: ",
    ),
    "a batch in parts": (
        lambda train, state, run: train(state, X, X),
        "fzero.step: takes a state and one batch, not 1 argument more",
    ),
    "the state forgotten": (
        lambda train, state, run: train((X, X)),
        "fzero.step: takes a state and a batch, not tuple alone\nFix: .* state, metrics = train(state, batch)",
    ),
    "a pickled state": (
        lambda train, state, run: pickle.dumps(state),
        "fzero.mesh: .* is not pickled, .*\nFix: fz.checkpoint.save(path, state)",
    ),
    "torch.save of a leaf": (
        lambda train, state, run: torch.save(state.params, io.BytesIO()),
        "Fix: fz.checkpoint.save(path, state)",
    ),
    "too few, uncompiled": (
        lambda train, state, run: fz.eval_step(_predict)(state.params, X),
        "1 more argument\n  missing a required argument: 'y'",
    ),
    "too few, lowered": (
        lambda train, state, run: fz.lower(fz.eval_step(_predict), train.mesh, META, (X,)),
        "missing a required argument: 'y'",
    ),
}
DRAWS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a negative size": (lambda key: fz.random.normal(key, (-3,)), "fzero.random.normal: (-3,) is not a shape"),
    "a size": (lambda key: fz.random.uniform(key, 3), "fzero.random.uniform: 3 is not a shape"),
    "a dtype for a shape": (
        lambda key: fz.random.bits(key, torch.float32),
        "fzero.random.bits: torch.float32 is not a shape",
    ),
    "a text": (lambda key: fz.random.normal(key, "34"), "'34' is not a shape"),
    "p before the shape": (
        lambda key: fz.random.bernoulli(key, 2.0, (3,)),
        "fzero.random.bernoulli: 2.0 is not a shape",
    ),
    "a tensor for p": (lambda key: fz.random.bernoulli(key, (3,), X), "p=float32[2, 4]"),
    "a number for a dtype": (lambda key: fz.random.normal(key, (3,), 3.0), "3.0 is not a dtype"),
    "a text for a bound": (lambda key: fz.random.uniform(key, (3,), maxval="1"), "maxval='1'"),
    "rate before x": (lambda key: fz.random.dropout(key, 0.1, X), "rate=float32[2, 4]"),
    "dropout of a number": (lambda key: fz.random.dropout(key, 1.0, 0.1), "not of float"),
}


def _raises(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(FzeroError) as caught:
        run()
    text = str(caught.value)
    assert re.search(re.escape(words).replace(re.escape(".*"), ".*"), text), text
    assert text.splitlines()[-1].startswith("Fix: ")


def test_calls(made: Any) -> None:
    for call, words in CASES.values():
        _raises(lambda call=call: call(*made), words)
    train, state, run = made
    whole = io.BytesIO()
    torch.save(train.gather(state).params, whole)
    assert torch.equal(torch.load(io.BytesIO(whole.getvalue()))["w"], state.params["w"]), (
        "what is gathered is plain tensors"
    )
    assert int(train(state, X)[0].step) == 1 and run(state.params, X, X).isfinite(), "nothing of it has done harm"


def test_a_backward_by_hand() -> None:
    """It names the fix; elsewhere the loss is a tensor like any other."""
    step = fz.train_step(_loss, fz.optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    for run, state in ((step, step.init({"w": torch.eye(4)})), (train, train.init({"w": torch.eye(4)}))):
        loss = run(state, X)[1]["loss"]
        _raises(loss.backward, "metrics['loss'] has no graph: .*\nFix: leave out loss.backward(), optimizer.step()")
        file = io.BytesIO()
        torch.save({"loss": loss}, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["loss"]
        for other in (again, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), torch.stack([loss])[0], loss + 0):
            assert torch.equal(other, loss) and type(other) is torch.Tensor and float(other) == loss.item()
        assert not vars(again)


def _put(tree: Any, name: str, x: Any) -> None:
    tree[name] = x


REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shape": (
        lambda s: _put(s.params, "w", torch.eye(5)),
        "laid out for another step\n  opt_state.mu['w']: float32[4, 4] whole in the state, float32[5, 5]",
    ),
    "another dtype": (
        lambda s: _put(s.params, "w", torch.eye(4).double()),
        "laid out for another step\n  opt_state.mu['w']: float32[4, 4] whole in the state, f",
    ),
    "no leaf": (
        lambda s: s.params.pop("w"),
        "laid out for another step\n  opt_state.mu['w']: in the state, not in this step",
    ),
    "None": (
        lambda s: _put(s.params, "w", None),
        "laid out for another step\n  opt_state.mu['w']: in the state, not in this step",
    ),
    "a number": (lambda s: _put(s.params, "w", 1.0), "parameters are tensors\n  params['w']: float"),
    "a leaf more": (
        lambda s: _put(s.params, "z", X),
        "laid out for another step\n  opt_state.mu['z']: not in the state",
    ),
    "no values": (
        lambda s: _put(s.params, "w", META["w"]),
        "these leaves have no values\n  params['w']: float32[4, 4] on the meta device",
    ),
    "expanded": (
        lambda s: _put(s.params, "w", torch.ones(1, 4).expand(4, 4)),
        "no memory of their own\n  params['w']: float32[4, 4], expanded\nFix: give x.clone()",
    ),
    "overlapping": (
        lambda s: _put(s.params, "w", s.params["v"].view(2, 4, 4)[1]),
        "no memory of their own\n  params['v'] and params['w'] share memory",
    ),
    "a moment of another shape": (
        lambda s: _put(s.opt_state.mu, "w", X),
        "opt_state.mu['w']: float32[2, 4] without a layout",
    ),
}


def test_leaves_of_a_state_that_were_replaced(made: Any) -> None:
    """In place, between two steps: what the step has found of the state before does not hold any more."""
    train = made[0]
    for name, (replace, words) in REPLACED.items():
        state, _ = train(train.init({"w": torch.eye(4), "v": torch.ones(8, 4)}), X)
        replace(state)
        with pytest.raises(FzeroError) as caught:
            train(state, X)
        text = str(caught.value)
        assert words in text and text.splitlines()[-1].startswith("Fix: "), f"{name}: {text}"
    state, _ = train(train.init({"w": torch.eye(4)}), X)
    state.params["w"] = torch.full((4, 4), 0.5)
    assert train(state, X)[1]["loss"] == 4.0, "a value of the same kind is what it trains on with"


def test_draws() -> None:
    for call, words in DRAWS.values():
        _raises(lambda call=call: call(fz.random.key(0)), words)
    assert fz.random.normal(fz.random.key(0), torch.Size([2, 0])).shape == (2, 0)


def test_names_that_do_not_exist() -> None:
    for module, name, words in [
        (fz, "shard_param", "did you mean shard_params"),
        (fz, "fsdp", "shard_params"),
        (fz.optim, "RMSprop", "did you mean rmsprop"),
        (fz.checkpoint, "nothing_such", "there are Index, Saving, Url, check, describe, export, "),
    ]:
        with pytest.raises(
            AttributeError, match=f"module '{module.__name__}' has no attribute '{name}'\nFix: .*{words}"
        ):
            getattr(module, name)
    for name, words in {"LBFGS": "evaluates the loss several times", "SparseAdam": "gradients are dense"}.items():
        with pytest.raises(AttributeError, match=rf"'fzero.optim' has no attribute '{name}': .*{words}.*\nFix: "):
            getattr(fz.optim, name)
    assert not hasattr(fz, "fsdp") and fz.tree is not None


def test_a_norm_of_order_0_counts_on_shards_too(run_ranks: Any) -> None:
    """Elements that are not zero: padding is none of them."""
    want = _counted(fz.make_mesh())
    for got in run_ranks(2, _counted):
        assert torch.equal(got, want)


def _counted(mesh: Any = None) -> torch.Tensor:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g: g / (1 + torch.linalg.vector_norm(g, 0)), grads), state

    step = fz.train_step(lambda p, x: (p["w"] * x.sum()).square().sum(), GradientTransformation(lambda p: (), update))
    train = fz.compile(fz.shard_params(step), mesh or fz.make_mesh(), backend="eager")
    w = torch.arange(5.0)  # one element is zero, and so is its gradient
    return train.gather(train(train.init({"w": w}), torch.ones(2, 1))[0]).params["w"]


def _averaged() -> str:
    """What an evaluation says of leaves that were computed from shards, one by one."""
    mesh = fz.make_mesh()
    train = fz.compile(fz.shard_params(fz.train_step(_loss, optim.sgd(0.1))), mesh, backend="eager")
    evaluate = fz.compile(fz.shard_params(fz.eval_step(_loss)), mesh, backend="eager")
    state = train.init({"w": torch.eye(4)})
    with pytest.raises(FzeroError) as caught:
        evaluate(fz.tree.map(lambda x: 0.5 * x, state.params), X)
    evaluate({"w": state.params["w"]}, X)
    return str(caught.value)


def test_what_is_computed_from_shards_has_no_layout(run_ranks: Any) -> None:
    for text in run_ranks(2, _averaged):
        assert (
            "params['w']: float32[8] without a layout, which is then taken to be whole, in the state, float32[8] "
            "sharded over data in this step" in text
        )
        assert "\nFix: give the trees of the state as they are: what is computed from their leaves" in text


def _gathers_alone(folder: str, stage: int) -> str:
    """Rank 0 gathers, the other does something else."""
    mesh = fz.make_mesh(timeout=2)
    train = fz.compile(
        [fz.data_parallel, fz.shard_params][stage](fz.train_step(_loss, optim.sgd(0.1))), mesh, backend="eager"
    )
    state = train.init({"w": torch.eye(4)})
    with ending(folder, last=mesh.rank == 1):
        if mesh.rank == 0:
            began = time.monotonic()
            try:
                train.gather(state)
            except fz.errors.DivergenceError as error:
                assert time.monotonic() - began < 60
                return str(error)
    return ""


@pytest.mark.full
def test_a_gather_that_a_rank_does_not_join_names_it(run_ranks: Any, tmp_path: Path) -> None:
    for stage in (0, 1):
        (folder := tmp_path / str(stage)).mkdir()
        text, _ = run_ranks(2, _gathers_alone, str(folder), stage)
        if stage == 0:
            assert text == "", "whole leaves are on every rank"
        else:
            assert (
                "rank 1 timed out after 2 s" in text
                and text.startswith("fzero.gather: ")
                and "Fix: call gather on every rank" in text
            )


def _saves_alone(folder: str) -> str:
    """Rank 0 saves, as scripts of other libraries do; the other goes on."""
    mesh = fz.make_mesh(timeout=2)
    train = fz.compile(fz.shard_params(fz.train_step(_loss, optim.sgd(0.1))), mesh, backend="eager")
    state = train.init({"w": torch.eye(4)})
    fz.checkpoint.save(f"{folder}/run", state)
    fz.checkpoint.save(f"{folder}/run", state)
    (waits := Path(folder) / "waits").mkdir(exist_ok=True)
    with ending(str(waits), last=mesh.rank == 1):
        if mesh.rank == 0:
            try:
                fz.checkpoint.save(f"{folder}/alone", state)
            except fz.errors.DivergenceError as error:
                return str(error)
    return ""


@pytest.mark.full
def test_a_save_that_a_rank_does_not_join_names_it(run_ranks: Any, tmp_path: Path) -> None:
    text, _ = run_ranks(2, _saves_alone, str(tmp_path))
    assert (
        "rank 1 timed out after 2 s" in text
        and text.startswith("fzero.checkpoint: ")
        and "make the call on every rank, outside of `if rank == 0`" in text
    )
    assert fz.checkpoint.find(tmp_path / "alone") is None and fz.checkpoint.latest(tmp_path / "run") is not None


def _evaluates() -> list[str]:
    """What the log says of evaluations of a mean over a rank's part, and of one over all of them."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fzero").addHandler(handler)
    mesh = fz.make_mesh()
    x = torch.full((2, 4), float(mesh.rank))

    def mean(p: Any, x: torch.Tensor) -> Any:
        return (x @ p["w"]).mean(), x

    def of_all(p: Any, x: torch.Tensor) -> Any:
        return fz.weighted((x @ p["w"]).sum(), x.numel()), x

    for fn, want in ((of_all, 0.5), (mean, float(mesh.rank))):
        evaluate = fz.compile(fz.data_parallel(fz.eval_step(fn)), mesh, backend="eager")
        for _ in range(2):
            assert evaluate({"w": torch.eye(4)}, x)[0] == want
    logging.getLogger("fzero").removeHandler(handler)
    return said


def test_an_evaluation_of_each_ranks_own_mean_says_so_once(run_ranks: Any) -> None:
    first, other = run_ranks(2, _evaluates)
    assert first == [
        "mean: 1 of its results are numbers of each rank's part of the batch alone; fz.weighted(total, count) is the "
        "mean over all ranks"
    ]
    assert other == []


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[], Any]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "cpu:0": lambda: torch.device("cpu:0"),
    "deterministic": deterministic,
}


def _trained(backend: str) -> list[torch.Tensor]:
    """A step of a module that draws and of a function that is drawn, their losses and states."""
    torch.manual_seed(0)
    linear, dropout = torch.nn.Linear(4, 4, dtype=torch.float32, device="cpu"), torch.nn.Dropout(0.5)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(4, dtype=torch.float32))
        linear.bias.zero_()
    model = fz.functionalize(torch.nn.Sequential(linear, dropout))
    steps = {
        model.train_step(optim.adamw(0.1), lambda out, batch: out.square().mean()): model.params,
        fz.train_step(_loss, optim.adamw(0.1)): lambda key: {"w": fz.random.normal(key, (4, 4))},
    }
    found = list[torch.Tensor]()
    for step, params in steps.items():
        train = fz.compile(fz.shard_params(step), fz.make_mesh(), backend=backend)
        state, metrics = train(train.init(params), X)
        found += [metrics["loss"], *fz.tree.leaves((state.params, state.opt_state))]
    return [x.clone() for x in found]


@pytest.mark.full(keep=["inference", "no gradients", "bfloat16"])
@pytest.mark.parametrize("around", AROUND)
def test_a_step_trains_whatever_is_around_it(around: str) -> None:
    plain = _trained("eager")
    with AROUND[around]():
        found = _trained("eager")
    assert [x.dtype for x in found] == [x.dtype for x in plain] and all(map(torch.equal, found, plain))


def test_a_default_device_that_the_mesh_has_not(made: Any) -> None:
    """Before anything is made; what `fz.lower` plans needs no values."""
    train, state, run = made
    step = fz.train_step(_loss, optim.adam(0.1))
    for device in ("meta", "cuda"):
        said = rf"the default device is '{device}', and the mesh has 'cpu'(?s:.*)Fix: torch.set_default_device\(None\)"
        with torch.device(device):
            for call in (
                lambda: train.init({"w": state.params["w"]}),
                lambda: train(state, X),
                lambda: run(state.params, X, X),
                lambda: fz.testing.check_equivalent(step, {"w": X}, X, fz.AbstractMesh(data=1)),
            ):
                with pytest.raises(fz.errors.FzeroValueError, match=said):
                    call()
    with torch.device("meta"):
        assert fz.lower(step, fz.AbstractMesh(data=1), {"w": torch.empty(4, 4)}, torch.empty(2, 4)).program.lines


def test_a_module_given_to_a_block_names_functional_call() -> None:
    class Layer(torch.nn.Linear):
        forward = fz.block(torch.nn.Linear.forward)

    layer = Layer(4, 4)
    step = fz.train_step(lambda p, x: torch.func.functional_call(layer, p, (x,)).square().mean(), optim.sgd(0.1))
    params = {name: x.detach() for name, x in layer.named_parameters()}
    _raises(
        lambda: fz.lower(step, fz.AbstractMesh(data=1), params, X),
        "params: Layer\nFix: give the layer's tensors: fz.block(",
    )
