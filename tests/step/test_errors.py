"""Bad input: one clear error, of this package's own, on every rank and before any collective, that says where it is and
ends with a fix."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero.data import TokenDataset
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError, TraceError, TransformError

MESH = fz.AbstractMesh(data=2)
PARAMS = {"b": torch.zeros(3), "w": torch.arange(12.0).reshape(4, 3) / 12}
BATCH = torch.arange(24.0).reshape(6, 4) / 24
GLOBAL = torch.ones(3)


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["w"] + params["b"]) ** 2).mean()


def make(loss: Callable[..., Any] = loss_fn, optimizer: Any = None, **kwargs: Any) -> fz.Step:
    return fz.train_step(loss, optimizer or optim.sgd(0.1), **kwargs)


def lower(step: Any, params: Any = PARAMS, batch: Any = BATCH, mesh: Any = MESH) -> fz.Lowered:
    return fz.lower(fz.shard_params(step), mesh, params, batch)


def compiled(step: Any) -> fz.CompiledStep:
    return fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")


def raises(kind: type[FzeroError], run: Callable[[], Any], *words: str) -> str:
    """The text of the one error that `run` raises: of `kind`, in the house's layout, naming `words`, a fix at its
    end."""
    with pytest.raises(FzeroError) as caught:
        run()
    text = str(caught.value)
    assert isinstance(caught.value, kind), f"{type(caught.value).__name__}: {text}"
    assert text.startswith("fzero."), text
    assert text.splitlines()[-1].startswith("Fix: "), text
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"
    return text


def everywhere(
    kind: type[FzeroError], step: fz.Step, *words: str, params: Any = PARAMS, batch: Any = BATCH, plain: bool = True
) -> None:
    """Lowered for a mesh one does not have, compiled for one rank, and (if it is not the trace's own rule) eagerly: the
    same error."""

    def train() -> None:
        run = compiled(step)
        run(run.init(params), batch)

    raises(kind, lambda: lower(step, params, batch), *words)
    raises(kind, train, *words)
    if plain:
        raises(kind, lambda: step(step.init(params), batch), *words)


# --- meshes and transforms ---


@pytest.mark.parametrize("make_it", [fz.make_mesh, fz.AbstractMesh])
def test_unknown_axis(make_it: Any) -> None:
    raises(FzeroValueError, lambda: make_it(dta=1), "'dta'", "data")


@pytest.mark.parametrize("size", [0, -3, 2.0, True, "2"])
def test_axis_sizes(size: Any) -> None:
    raises(FzeroValueError, lambda: fz.AbstractMesh(data=size), f"data={size!r}")


def test_mesh_of_another_number_of_processes() -> None:
    raises(FzeroValueError, lambda: fz.make_mesh(data=2), "WORLD_SIZE: 1", "--nproc-per-node 2")


def test_devices_and_timeouts_that_cannot_be() -> None:
    raises(FzeroValueError, lambda: fz.make_mesh(data=1, device="gpu"), "'gpu'", "'cuda'")
    raises(FzeroValueError, lambda: fz.make_mesh(data=1, timeout=0), "timeout=0")
    if not torch.cuda.is_available():
        raises(FzeroValueError, lambda: fz.make_mesh(data=1, device="cuda"), "0 CUDA devices")


@pytest.mark.parametrize(
    "transform", [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params], ids=lambda t: t.__name__
)
def test_axis_that_the_mesh_has_not(transform: Any) -> None:
    step = transform(make(), axis="dta")
    raises(FzeroValueError, lambda: fz.lower(step, MESH, PARAMS, BATCH), f"{transform.__name__}(axis='dta')", "data=2")
    raises(FzeroValueError, lambda: fz.compile(step, fz.make_mesh(data=1)), f"{transform.__name__}(axis='dta')")
    evaluate = transform(fz.eval_step(loss_fn), axis="dta")
    raises(FzeroValueError, lambda: fz.lower(evaluate, MESH, PARAMS, (BATCH,)), "axis='dta'")
    raises(FzeroTypeError, lambda: transform(make(), axis=3), "axis=3", transform.__name__)
    raises(FzeroTypeError, lambda: transform(make(), axis=["data"]), "axis=['data']")


def test_axis_that_no_transform_uses() -> None:
    raises(FzeroValueError, lambda: fz.lower(make(), MESH, PARAMS, BATCH), "data=2", "fz.data_parallel(axis='data')")
    raises(FzeroValueError, lambda: lower(make(), mesh=fz.AbstractMesh(data=2, model=3)), "model=3")
    raises(FzeroValueError, lambda: fz.lower(fz.eval_step(loss_fn), MESH, PARAMS, (BATCH,)), "data=2")


CONFLICTS = {
    "precision": (fz.mixed_precision("bf16", reduce="bf16"), fz.mixed_precision("fp32"), "compute='fp32'"),
    "accumulate": (fz.accumulate(2), fz.accumulate(4), "num_micro_batches=4"),
    "remat": (fz.remat("full"), fz.remat("none"), "policy='none'"),
    "axes": (fz.shard_params(axis="data"), fz.shard_params(axis="replica"), "'replica'"),
    "stages on two axes": (fz.shard_opt_state(axis="data"), fz.shard_params(axis="replica"), "'replica'"),
    "stages of which one does all": (
        fz.shard_grads(),
        fz.shard_params(axis=("data", "node")),
        "shard_params (ZeRO-3) does all that shard_grads (ZeRO-2) does",
    ),
    "where": (
        fz.shard_params(where=lambda path, leaf: True),
        fz.shard_params(where=lambda path, leaf: False),
        "where=<lambda>",
    ),
}


@pytest.mark.parametrize("stage", [fz.shard_opt_state, fz.shard_grads, fz.shard_params])
def test_data_parallel_together_with_a_stage_over_its_axis_changes_nothing(stage: Any) -> None:
    mesh, axis = fz.AbstractMesh(data=2, node=2), ("data", "node")
    lines = lambda *transforms: fz.lower(fz.compose(*transforms)(make()), mesh, PARAMS, BATCH).program.lines  # noqa: E731
    for transforms in ((fz.data_parallel(axis="node"), stage(axis=axis)), (stage(axis=axis), fz.data_parallel())):
        assert lines(*transforms) == lines(stage(axis=axis))


def test_a_lower_stage_may_go_further_than_a_higher_one() -> None:
    some = lambda path, leaf: leaf.numel() > 8  # noqa: E731
    of_some = [(fz.shard_params(where=some), fz.shard_grads()), (fz.shard_grads(where=some), fz.shard_opt_state())]
    of_some.append((fz.shard_params(where=some), fz.data_parallel()))
    for one, two in [*of_some, (fz.shard_params(), fz.shard_grads(axis=("data", "node")))]:
        assert {*fz.compose(one, two)(make()).transforms} == {one, two}
    with pytest.raises(TransformError, match="does all"):
        fz.compose(fz.shard_params(where=some), fz.shard_opt_state(where=some))(make())


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_name_both_in_either_order(name: str) -> None:
    one, two, word = CONFLICTS[name]
    raises(TransformError, lambda: two(one(make())), str(one), str(two), word)
    raises(TransformError, lambda: fz.compose(two, one)(make()), str(one), str(two))


def test_the_same_transform_twice_is_none() -> None:
    once = fz.accumulate(fz.shard_params(make()), 2)
    assert fz.shard_params(fz.accumulate(once, 2)).transforms == once.transforms


@pytest.mark.parametrize(
    "transform",
    [fz.data_parallel(), fz.shard_params(), fz.accumulate(2), fz.mixed_precision("bf16"), fz.remat("full")],
    ids=str,
)
def test_transforms_of_what_is_no_step(transform: Any) -> None:
    raises(FzeroTypeError, lambda: transform(loss_fn), "not function", "train_step")
    raises(FzeroTypeError, lambda: fz.compose(transform)(PARAMS), "not dict")


def test_compose_and_compile_of_other_things() -> None:
    raises(FzeroTypeError, lambda: fz.compose(fz.shard_params(), 3), "argument 1: int")
    raises(FzeroTypeError, lambda: fz.compose(make()), "argument 0: Step")
    raises(FzeroTypeError, lambda: fz.compile(loss_fn, fz.make_mesh(data=1)), "not function")
    raises(FzeroTypeError, lambda: fz.compile(make(), fz.AbstractMesh(data=1)), "AbstractMesh", "fz.lower")
    raises(FzeroTypeError, lambda: fz.lower(make(), 8, PARAMS, BATCH), "not int")
    raises(FzeroTypeError, lambda: fz.lower(loss_fn, MESH, PARAMS, BATCH), "not function")
    raises(FzeroTypeError, lambda: fz.lower(fz.eval_step(loss_fn), fz.AbstractMesh(data=1), PARAMS, BATCH), "tuple")


@pytest.mark.parametrize("number", [0, -1, True, False, 2.0, "4"])
def test_micro_batch_numbers(number: Any) -> None:
    raises(FzeroValueError, lambda: fz.accumulate(make(), number), repr(number))


def test_a_missing_number_of_micro_batches() -> None:
    raises(FzeroValueError, lambda: fz.accumulate(make()), "num_micro_batches is missing")


def test_unknown_names() -> None:
    raises(FzeroValueError, lambda: fz.mixed_precision("fp8"), "compute='fp8'", "'bf16'")
    raises(FzeroValueError, lambda: fz.mixed_precision("bf16", params="x", reduce="y"), "params='x'", "reduce='y'")
    raises(FzeroValueError, lambda: fz.mixed_precision(make(), torch.float64), "torch.float64")
    raises(FzeroValueError, lambda: fz.remat("ful"), "'ful'", "'full'")
    raises(FzeroValueError, lambda: fz.remat(make(), True), "True")
    raises(FzeroValueError, lambda: fz.compile(make(), fz.make_mesh(data=1), backend="xla"), "'xla'", "'eager'")
    raises(FzeroTypeError, lambda: fz.shard_params(where="w"), "where='w'")


def test_program_before_a_call() -> None:
    raises(FzeroValueError, lambda: compiled(make()).program, "fz.lower")


# --- batches ---


def test_batch_that_micro_batches_do_not_divide() -> None:
    step, batch = (
        fz.accumulate(make(lambda p, b: loss_fn(p, b["x"]) + b["y"].sum()), 4),
        {"x": BATCH, "y": torch.ones(6), "z": torch.ones(())},
    )
    text = raises(
        FzeroValueError, lambda: lower(step, batch=batch), "batch['x'] [6, 4]", "batch['y'] [6]", "4 micro-batches"
    )
    assert "batch['z']" not in text


def test_batch_that_the_mesh_does_not_divide() -> None:
    data = TokenDataset(torch.arange(100), seq=4, batch=8)
    raises(FzeroValueError, lambda: data.batch_at(0, rank=1, size=3), "8 rows", "3 ranks", "9")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (1.0, ["batch: float"]),
        ({"x": BATCH, "n": 3, "s": "text"}, ["batch['n']: int", "batch['s']: str"]),
        ((BATCH, [BATCH.numpy()]), ["batch[1][0]: ndarray"]),
        (BATCH.to_sparse(), ["torch.sparse_coo"]),
    ],
    ids=["number", "mixed", "numpy", "sparse"],
)
def test_batches_that_are_not_dense_tensors(batch: Any, words: list[str]) -> None:
    everywhere(FzeroTypeError, make(lambda p, b: p["w"].sum()), *words, batch=batch)
    evaluate = fz.compile(fz.eval_step(lambda p, b: p["w"]), fz.make_mesh(data=1), backend="eager")
    raises(FzeroTypeError, lambda: evaluate(PARAMS, batch))


@pytest.mark.parametrize("batch", [None, (), {}, {"x": None}], ids=repr)
def test_a_loss_may_need_no_batch(batch: Any) -> None:
    step = make(lambda p, b: (p["w"] ** 2).sum())
    train = compiled(step)
    state, metrics = train(train.init(PARAMS), batch)
    expected, expected_metrics = step(step.init(PARAMS), batch)
    assert torch.equal(state.params["w"], expected.params["w"]) and torch.equal(
        metrics["loss"], expected_metrics["loss"]
    )


def test_an_empty_batch_is_no_number_and_says_so() -> None:
    train = compiled(make())
    _, metrics = train(train.init(PARAMS), torch.ones(0, 4))
    assert not metrics["finite"]


# --- losses ---

LOSSES = {
    "vector": (lambda p, x: x @ p["w"], FzeroTypeError, "loss is float32[6, 3]"),
    "one element": (lambda p, x: loss_fn(p, x)[None], FzeroTypeError, "loss is float32[1]"),
    "number": (lambda p, x: 1.0, FzeroTypeError, "loss is float"),
    "integer": (lambda p, x: loss_fn(p, x).long(), FzeroTypeError, "int64[]"),
    "complex": (lambda p, x: loss_fn(p, x).to(torch.complex64), FzeroTypeError, "complex64[]"),
    "none": (lambda p, x: None, FzeroTypeError, "NoneType"),
    "dict": (lambda p, x: {"loss": loss_fn(p, x)}, FzeroTypeError, "dict"),
    "tuple": (lambda p, x: (loss_fn(p, x), x), FzeroTypeError, "has_aux=True"),
    "batch only": (lambda p, x: x.sum(), TraceError, "does not depend"),
    "detached": (lambda p, x: loss_fn(p, x).detach(), TraceError, "does not depend"),
    "no_grad": (torch.no_grad()(loss_fn), TraceError, "does not depend"),
    "weighted vector": (lambda p, x: fz.weighted((x @ p["w"]).sum(0), 6), FzeroTypeError, "total is float32[3]"),
    "weighted count": (lambda p, x: fz.weighted((x @ p["w"]).sum(), x), FzeroTypeError, "count is float32[6, 4]"),
    "weighted number": (lambda p, x: fz.weighted(3.0, 6), FzeroTypeError, "total is float"),
    "weighted string": (lambda p, x: fz.weighted((x @ p["w"]).sum(), "6"), FzeroTypeError, "count='6'"),
    "weighted constant": (lambda p, x: fz.weighted(x.sum(), 6), TraceError, "does not depend"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, kind, word = LOSSES[name]
    everywhere(kind, make(loss), word)


AUXES = {
    "missing": (loss_fn, "float32[]"),
    "three": (lambda p, x: (loss_fn(p, x), 1, 2), "tuple"),
    "list": (lambda p, x: [loss_fn(p, x), x], "list"),
    "weighted": (lambda p, x: fz.weighted(loss_fn(p, x), 1), "has_aux"),
    "string": (lambda p, x: (loss_fn(p, x), {"a": {"name": "x"}}), "result['a']['name']: str"),
    "number": (lambda p, x: (loss_fn(p, x), {"a": 1.0}), "result['a']: float"),
}


@pytest.mark.parametrize("name", AUXES)
def test_auxiliary_values(name: str) -> None:
    loss, word = AUXES[name]
    everywhere(FzeroTypeError, make(loss, has_aux=True), word)


def test_signatures() -> None:
    raises(FzeroTypeError, lambda: make(3), "loss_fn is int")
    raises(FzeroTypeError, lambda: make(lambda params: 0), "(params) does not take (params, batch)")
    raises(FzeroTypeError, lambda: make(lambda p, x, key: 0), "(p, x, key)", "*, key")
    raises(FzeroTypeError, lambda: make(trainable="w"), "trainable='w': a predicate is a function of (path, leaf)")


# --- parameters ---

TREES = {
    "number": ({"w": 1.0}, "params['w']: float"),
    "string": ({"w": PARAMS["w"], "b": [PARAMS["b"], "text"]}, "params['b'][1]: str"),
    "numpy": ({"w": PARAMS["w"].numpy()}, "params['w']: ndarray"),
    "sparse": ({"w": PARAMS["w"].to_sparse()}, "params['w']: torch.sparse_coo"),
    "none": ({"w": None}, "there are none"),
    "empty": ({}, "there are none"),
    "function of": (lambda key: {"w": 1.0, "b": {"c": "x"}}, "params['b']['c']: str"),
    "module": (torch.nn.Linear(2, 2), "Linear is a module"),
}


@pytest.mark.parametrize("name", TREES)
def test_parameters_that_are_not_tensors(name: str) -> None:
    params, word = TREES[name]
    everywhere(FzeroTypeError, make(), word, params=params)


def test_nothing_to_train() -> None:
    everywhere(FzeroValueError, make(trainable=lambda path, leaf: False), "no trainable parameters", "trainable")
    everywhere(
        FzeroValueError,
        make(lambda p, x: p["w"].sum()),
        "no trainable parameters",
        params={"w": torch.ones(3, dtype=torch.int64)},
    )
    frozen = make(lambda p, x: (x @ p["w"]).mean(), trainable=lambda path, leaf: path == "params['b']")
    everywhere(TraceError, frozen, "does not depend on any trainable parameter")


def test_an_init_function_that_draws_elsewhere() -> None:
    def init(key: torch.Tensor) -> Any:
        return {"w": torch.randn(4, 3)}

    raises(TraceError, lambda: lower(make(lambda p, x: (x @ p["w"]).mean()), params=init), "fzero.init", "fz.random")
    raises(TraceError, lambda: compiled(make()).init(init), "aten.randn", "fz.random")
    raises(
        TraceError, lambda: compiled(make()).init(lambda key: {"w": GLOBAL * 2}), "global variable GLOBAL", "float32[3]"
    )


# --- blocks ---


def blocked(fn: Callable[..., Any], of: Callable[..., Any] = torch.mean) -> fz.Step:
    run = fz.block(fn)
    return make(lambda p, x: of(run(p, x)))


def add_in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x @ p["w"]


def set_item(p: Any, x: torch.Tensor) -> torch.Tensor:
    x[0] = 0
    return x @ p["w"]


def through_a_view(p: Any, x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[2:].mul_(2)
    return x @ p["w"]


def scale_weight(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["w"].mul_(2)
    return x @ p["w"]


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (add_in_place, "x.add_(1)"),
        (set_item, "x[0] = 0"),
        (through_a_view, "x.view(-1)[2:].mul_(2)"),
        (scale_weight, 'p["w"].mul_(2)'),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_mutated_arguments(fn: Any, word: str) -> None:
    step = blocked(fn)
    everywhere(TraceError, step, f"block {fn.__name__}", word, plain=False)
    raises(
        TraceError,
        lambda: step(step.init(PARAMS), BATCH),
        "changes its arguments in place",
        word if fn is not scale_weight else "test_errors.py",
    )
    everywhere(TraceError, make(lambda p, x: fn(p, x).mean()), "in place")  # outside a block


RETURNS = {
    "number": (lambda p, x: 1.0, "result is float"),
    "string": (lambda p, x: (x @ p["w"], {"note": "text"}), "result[1]['note'] is str"),
    "none": (lambda p, x: None, "no tensor at all"),
}


@pytest.mark.parametrize("name", RETURNS)
def test_blocks_that_return_other_things(name: str) -> None:
    fn, word = RETURNS[name]
    run = fz.block(fn)
    everywhere(TraceError, make(lambda p, x: loss_fn(p, x) + 0 * (run(p, x) is None)), "block", word, plain=False)


def test_tensors_from_elsewhere_are_named() -> None:
    scale, holder, listed = torch.ones(3), SimpleNamespace(t=torch.ones(3)), {"a": [torch.ones(3)]}

    def default(p: Any, x: Any, t: torch.Tensor = scale) -> Any:
        return x @ p["w"] + t

    def helper(y: torch.Tensor) -> torch.Tensor:
        return y + GLOBAL

    module = torch.nn.Linear(3, 3)
    cases = {
        "closure variable scale": lambda p, x: x @ p["w"] * scale,
        "global variable GLOBAL": lambda p, x: x @ p["w"] + GLOBAL,
        "closure variable holder.t": lambda p, x: x @ p["w"] + holder.t,
        "closure variable listed['a'][0]": lambda p, x: x @ p["w"] + listed["a"][0],
        "closure variable module.weight": lambda p, x: module(x @ p["w"]),
        "default of t": default,
        "global variable GLOBAL of helper": lambda p, x: helper(x @ p["w"]),
        "argument 0 of the partial": functools.partial(lambda t, p, x: x @ p["w"] + t, scale),
    }
    for name, fn in cases.items():
        raises(TraceError, lambda fn=fn: lower(blocked(fn)), "fzero.block", name, "float32[3")
    text = raises(
        TraceError,
        lambda: lower(make(lambda p, x: loss_fn(p, x) * scale.sum())),
        "fzero.train_step",
        "closure variable scale: float32[3]",
    )
    assert "block" not in text


def test_tensors_of_the_loss_function_are_named_in_a_block() -> None:
    """Also a parameter that is a leaf of autograd: an error while autograd asks for its device used to end the
    process."""
    raises(
        TraceError,
        lambda: lower(make(lambda p, x: fz.block(lambda q, z: z @ q["w"] + p["b"])({"w": p["w"]}, x).mean())),
        "closure variable p['b']",
    )

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return fz.block(lambda q, z: z @ q["w"] + y.sum())(p, x).mean()

    raises(TraceError, lambda: lower(make(loss)), "closure variable y: float32[6, 4]")


DRAWS = {
    "rand": lambda p, x: x @ p["w"] + torch.rand(3),
    "dropout": lambda p, x: F.dropout(x @ p["w"], 0.5),
    "generator": lambda p, x: x @ p["w"] + torch.rand(3, generator=torch.Generator()),
    "randperm": lambda p, x: (x @ p["w"])[torch.randperm(6)],
    "normal_": lambda p, x: x @ p["w"] + torch.empty(3).normal_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_from_the_global_generator(name: str) -> None:
    raises(TraceError, lambda: lower(blocked(DRAWS[name])), "block", "aten.", "fz.random")
    raises(TraceError, lambda: lower(make(lambda p, x: DRAWS[name](p, x).mean())), "fzero.train_step", "fz.random")


def test_dropout_of_nothing_draws_nothing() -> None:
    assert lower(blocked(lambda p, x: F.dropout(x @ p["w"], 0.0))).program.lines


def if_positive(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] if x.sum() > 0 else -(x @ p["w"])


VALUES = {
    "item": lambda p, x: x @ p["w"] * x.sum().item(),
    "if": if_positive,
    "float": lambda p, x: x @ p["w"] * float(x.sum()),
    "boolean index": lambda p, x: (x @ p["w"])[x.sum(1) > 0],
    "tolist": lambda p, x: x @ p["w"] * x.tolist()[0][0],
    "numpy": lambda p, x: x @ p["w"] * float(x.detach().numpy()[0, 0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_control_flow_on_values(name: str) -> None:
    raises(TraceError, lambda: lower(blocked(VALUES[name])), "block", "needs the value of a tensor")
    raises(
        TraceError,
        lambda: lower(make(lambda p, x: VALUES[name](p, x).mean())),
        "fzero.train_step",
        "needs the value of a tensor",
    )


# --- blocks that are fine ---


def own_intermediates(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), 3)
    y.copy_(x @ p["w"])
    y[1:].add_(1)
    y[0] = 0
    z = y * 2 + p["b"]
    z += p["b"]
    return F.relu(z, inplace=True)


def nested(p: Any, x: torch.Tensor) -> torch.Tensor:
    return fz.block(lambda q, z: torch.tanh(z @ q))(p["w"], x) + fz.block(lambda q, z: z.sum() * q)(p["b"], x)


@functools.partial(fz.block)
def linear(p: Any, x: torch.Tensor, heads: int = 2, *, mode: str = "a", twice: Any = None) -> Any:
    y = x @ p["w"] * heads + p["b"]
    return y if mode == "a" else (y, {"index": y.argmax(-1), "pair": [x, y * twice]})


def pieces(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, more = linear(p, x, heads=4, mode="b", twice=torch.ones(()))
    return (y * F.one_hot(more["index"], 3)).sum() + more["pair"][1].mean() + more["pair"][0].sum() * 0


def methods(p: Any, x: torch.Tensor) -> torch.Tensor:
    class Scale:
        def __init__(self, by: float):
            self.by = by

        def apply(self, q: Any, z: torch.Tensor) -> torch.Tensor:
            return z @ q["w"] * self.by

    return sum((fz.block(Scale(by).apply)(p, x).mean() for by in (1.0, 2.0, 3.0)), torch.zeros(()))


def settings(p: Any, x: torch.Tensor) -> torch.Tensor:
    total, one = torch.zeros(()), [0.0]
    for by in range(4):
        one[0] = float(by)  # the same list, another value
        total = total + fz.block(lambda q, z: (z @ q["w"]).mean() * one[0])(p, x)
        options = {"by": by}  # another dict, perhaps where the last one was
        total = total + fz.block(lambda q, z, options=options: (z @ q["w"]).mean() * options["by"])(p, x)
    return total


def unused(p: Any, x: torch.Tensor) -> torch.Tensor:
    fz.block(lambda q, z: z @ q["w"] * 100)(p, x)
    fz.block(lambda q, z: (z, q["w"]))(p, x)
    return loss_fn(p, x)


FINE: dict[str, Callable[..., torch.Tensor]] = {
    "in place on its own": lambda p, x: fz.block(own_intermediates)(p, x).mean(),
    "nested": lambda p, x: fz.block(nested)(p, x).mean(),
    "under vmap": lambda p, x: torch.func.vmap(lambda row: linear(p, row[None]).mean())(x).sum(),
    "under grad": lambda p, x: (
        torch.func.grad(lambda w: (linear({"w": w, "b": p["b"]}, x) ** 2).mean())(p["w"]).pow(2).sum()
    ),
    "constants": lambda p, x: (linear(p, x, 3) * linear(p, x, heads=4, mode="a")).mean(),
    "partial": lambda p, x: (
        fz.block(functools.partial(lambda by, q, z: z @ q["w"] * by, 3))(p, x)
        + fz.block(functools.partial(lambda by, q, z: z @ q["w"] * by, 4))(p, x)
    ).mean(),
    "the same tensor twice": lambda p, x: fz.block(lambda q, a, b: (a @ q["w"]) * (b @ q["w"]))(p, x, x).mean(),
    "the same weight twice": lambda p, x: fz.block(lambda q, z: z @ q[0] + z @ q[1] * 2)((p["w"], p["w"]), x).mean(),
    "its input back": lambda p, x: (
        fz.block(lambda q, z: z)(p, x @ p["w"]).mean() + fz.block(lambda q, z: (z, q["w"], z))(p, x)[1].sum()
    ),
    "its input and a view": lambda p, x: fz.block(lambda q, z: (z, z.T, z[0]))(p, x @ p["w"])[1].pow(2).mean(),
    "trees and integers": pieces,
    "None in a tree": lambda p, x: fz.block(lambda q, z: (z @ q["w"], None))(p, x)[0].mean(),
    "methods": methods,
    "settings that change": settings,
    "unused": unused,
    "no_grad inside": lambda p, x: fz.block(lambda q, z: z @ q["w"] * (z @ q["w"]).detach())(p, x).mean(),
    "params alone": lambda p, x: fz.block(lambda q: (q["w"] ** 2).sum())(p),
}


@pytest.mark.full(keep=["params alone", "None in a tree", "no_grad inside"])
@pytest.mark.parametrize("name", FINE)
def test_what_blocks_may_do(name: str) -> None:
    """Equal to the plain step, whole and in micro-batches, and lowered for two ranks."""
    step = make(FINE[name])
    expected, metrics = step(step.init(PARAMS), BATCH)
    train = compiled(step)
    state, got = train(train.init(PARAMS), BATCH)
    torch.testing.assert_close(
        (state.params, got["loss"], got["grad_norm"]),
        (expected.params, metrics["loss"], metrics["grad_norm"]),
        rtol=1e-6,
        atol=1e-7,
    )
    assert lower(step).program.lines


def test_results_do_not_alias_the_state() -> None:
    """A metric that is a parameter, or a view of one, is what it was before the update overwrote the parameter."""
    step = make(lambda p, x: (loss_fn(p, x), {"w": p["w"], "row": p["w"][0], "t": p["w"].T, "b": p["b"]}), has_aux=True)
    _, expected = step(step.init(PARAMS), BATCH)
    for transform in (fz.remat("full"), fz.accumulate(2)):
        train = compiled(transform(step))
        state, metrics = train(train.init(PARAMS), BATCH)
        torch.testing.assert_close(metrics["aux"], expected["aux"])
        assert not torch.equal(state.params["w"], metrics["aux"]["w"])


@pytest.mark.full(keep=["f_0-names4", "f_0-names0", "scalars_0-names4"])
@pytest.mark.parametrize(
    "names",
    [
        ("class", "lambda", "None"),
        ("step", "params", "batch", "key"),
        ("wait", "cast", "micro", "train"),
        ("0", "a b", "a-b", "a_b", "²"),
        ("f", "f_0", "d_f_0"),
    ],
)
@pytest.mark.parametrize("block", ["f", "wait", "train", "scalars_0", "f_0"])
def test_any_name_is_a_name(names: tuple[str, ...], block: str) -> None:
    """Leaves and blocks may be called like keywords, like each other, or like what a program is made of."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p

    f.__name__ = block
    run = fz.block(f)
    params = {name: PARAMS["w"] + i for i, name in enumerate(names)}
    step = make(lambda p, x: sum((run(q, x).mean() for q in p.values()), torch.zeros(())))
    expected, _ = step(step.init(params), BATCH)
    train = compiled(fz.accumulate(step, 2))
    state, _ = train(train.init(params), BATCH)
    torch.testing.assert_close(state.params, expected.params)
    program = lower(fz.accumulate(step, 2), params=params).program
    made = [v.name for line, _ in program.walk() for v in line.out]
    assert all(n.isidentifier() for n in (*made, *program.functions)) and not set(made) & set(program.functions)
    compile(fz.show(program, fold=False), "program", "exec")


# --- optimizers and states ---


def test_what_is_no_optimizer() -> None:
    for wrong in (
        3,
        torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1),
        (lambda p: None, lambda g, s, p: None),
        SimpleNamespace(init=1, update=2),
    ):
        raises(
            FzeroTypeError, lambda wrong=wrong: fz.train_step(loss_fn, wrong), type(wrong).__name__, "init and update"
        )


def optimizer(update: Any, init: Any = lambda params: {"mu": fz.tree.map(torch.zeros_like, params)}) -> Any:
    return optim.GradientTransformation(init, update)


UPDATES = {
    "no pair": (lambda g, s, p: g, "dict"),
    "other structure": (lambda g, s, p: ({"w": g["w"]}, s), "params['b']"),
    "other shape": (lambda g, s, p: ({"w": g["w"].sum(0), "b": g["b"]}, s), "params['w']"),
    "numbers": (lambda g, s, p: ({"w": 0.0, "b": g["b"]}, s), "updates['w']: float"),
    "state of other structure": (lambda g, s, p: (g, {"mu": s["mu"], "nu": s["mu"]}), "structure of opt_state"),
    "state of other shape": (
        lambda g, s, p: (g, {"mu": {"w": s["mu"]["w"][0], "b": s["mu"]["b"]}}),
        "opt_state['mu']['w']: float32[4, 3] before, float32[3] after",
    ),
    "state of other dtype": (
        lambda g, s, p: (g, {"mu": {"w": s["mu"]["w"], "b": s["mu"]["b"].double()}}),
        "opt_state['mu']['b']: float32[3] before, float64[3] after",
    ),
    "state of numbers": (lambda g, s, p: (g, {"mu": {"w": s["mu"]["w"], "b": 0}}), "opt_state['mu']['b']: int"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name: str) -> None:
    update, word = UPDATES[name]
    everywhere(FzeroError, make(optimizer=optimizer(update)), word)


def test_inits() -> None:
    step = make(optimizer=optimizer(lambda g, s, p: (g, s), lambda params: {"count": 0, "mu": params}))
    everywhere(FzeroTypeError, step, "opt_state['count']: int", "not tensors")


def test_updates_that_cannot_run_on_shards() -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return {"b": grads["b"], "w": grads["w"] @ torch.eye(3)}, state

    raises(FzeroTypeError, lambda: lower(make(optimizer=optimizer(update))), "aten.mm", "w", "where=")


def test_states_of_other_steps() -> None:
    mesh = fz.make_mesh(data=1)
    train = fz.compile(make(), mesh, backend="eager")
    for wrong in (PARAMS, (1, 2, 3, 4, 5), None):
        raises(FzeroTypeError, lambda wrong=wrong: train(wrong, BATCH), type(wrong).__name__, "train.init")
        raises(FzeroTypeError, lambda wrong=wrong: make()(wrong, BATCH), type(wrong).__name__, "init")
    other = fz.compile(make(optimizer=optim.adamw(0.1)), mesh, backend="eager")
    train.init(PARAMS)
    raises(FzeroError, lambda: train(other.init(PARAMS), BATCH), "opt_state")
    half = {k: v.double() for k, v in PARAMS.items()}
    raises(
        FzeroError,
        lambda: fz.compile(fz.mixed_precision(make(), "bf16"), mesh, backend="eager")(train.init(half), BATCH),
        "params['w']",
        "float64",
    )


def test_a_plain_state_is_given_to_a_compiled_step() -> None:
    """Whole tensors are what a step without shards expects; moments must be those of the optimizer."""
    step = make(optimizer=optim.adamw(0.1))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    expected, _ = step(step.init(PARAMS), BATCH)
    state, _ = train(step.init(PARAMS), BATCH)
    torch.testing.assert_close(state.params, expected.params)


@pytest.mark.filterwarnings("ignore:fzero.step. parameters are not finite:RuntimeWarning")
def test_a_loss_that_is_not_a_number() -> None:
    step = make(lambda p, x: loss_fn(p, x).sub(1e9).sqrt())
    train = compiled(step)
    for run in (step, train):
        _, metrics = run(run.init(PARAMS), BATCH)
        assert not metrics["finite"] and metrics["loss"].isnan()


# --- two real ranks: every rank raises the same error, none hangs ---


def _layouts(stages: tuple[int, int]) -> None:
    mesh = fz.make_mesh(data=2)
    kinds = [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params]
    have, want = (fz.compile(kinds[s](make(optimizer=optim.adamw(0.1))), mesh, backend="eager") for s in stages)
    want(have.init(PARAMS), BATCH)


@pytest.mark.full(keep=["stages2", "stages3"])
@pytest.mark.parametrize("stages", [(0, 3), (3, 0), (0, 1), (1, 0)])
def test_state_of_another_layout(run_ranks: Any, stages: tuple[int, int]) -> None:
    ranks = run_ranks(2, _layouts, stages, expect_error=True)
    leaf = "params['w']" if 3 in stages else "opt_state"
    for r in ranks:
        assert (
            r.type == "FzeroValueError"
            and leaf in r.message
            and "sharded over data" in r.message
            and "Fix: " in r.message
        ), r
        assert "float32[4, 3] whole" in r.message


def _plain_state() -> None:
    train = fz.compile(fz.shard_params(make(optimizer=optim.adamw(0.1))), fz.make_mesh(data=2), backend="eager")
    train(make(optimizer=optim.adamw(0.1)).init(PARAMS), BATCH)


def _evaluates() -> None:
    mesh = fz.make_mesh(data=2)
    train = fz.compile(fz.shard_params(make()), mesh, backend="eager")
    fz.compile(fz.data_parallel(fz.eval_step(loss_fn)), mesh, backend="eager")(train.init(PARAMS).params, BATCH)


def _evaluates_whole() -> None:
    fz.compile(fz.shard_params(fz.eval_step(loss_fn)), fz.make_mesh(data=2), backend="eager")(PARAMS, BATCH)


@pytest.mark.parametrize("fn", [_plain_state, _evaluates, _evaluates_whole], ids=lambda f: f.__name__)
def test_layouts_that_do_not_fit(run_ranks: Any, fn: Any) -> None:
    for r in run_ranks(2, fn, expect_error=True):
        assert (
            r.type == "FzeroValueError"
            and "params['w']" in r.message
            and "sharded over data" in r.message
            and "Fix: " in r.message
        ), r


def _bad(kind: str) -> None:
    mesh = fz.make_mesh(data=2)
    loss = {"vector": LOSSES["vector"][0], "closure": lambda p, x: loss_fn(p, x) * GLOBAL.sum()}.get(kind, loss_fn)
    transform = fz.accumulate(4) if kind == "micro" else fz.remat("full")
    train = fz.compile(transform(fz.shard_params(make(loss))), mesh, backend="eager")
    train(train.init({"w": "x"} if kind == "params" else PARAMS), BATCH)


@pytest.mark.parametrize(
    ("kind", "type_", "word"),
    [
        ("vector", "FzeroTypeError", "float32[6, 3]"),
        ("closure", "TraceError", "GLOBAL"),
        ("micro", "FzeroValueError", "batch [6, 4]"),
        ("params", "FzeroTypeError", "params['w']"),
    ],
)
def test_every_rank_raises_its_own_error(run_ranks: Any, kind: str, type_: str, word: str) -> None:
    for r in run_ranks(2, _bad, kind, expect_error=True, timeout=60):
        assert r.type == type_ and word in r.message, r
        assert re.search(r"^Fix: .+\Z", r.message, re.MULTILINE), r.message


def _auxiliary() -> Any:
    mesh = fz.make_mesh(data=2)
    step = make(
        lambda p, x: (loss_fn(p, x), {"a": x.mean(0), "w": p["w"], "n": fz.weighted(x.sum(), x.numel())}), has_aux=True
    )
    out = []
    for transform in (fz.remat("full"), fz.accumulate(3)):
        train = fz.compile(transform(fz.shard_params(step)), mesh, backend="eager")
        _, metrics = train(train.init(PARAMS), BATCH.chunk(2)[mesh.rank])
        out.append(metrics["aux"])
    return out, step(step.init(PARAMS), BATCH)[1]["aux"]


def test_auxiliary_values_of_any_shape(run_ranks: Any) -> None:
    for got, expected in run_ranks(2, _auxiliary):
        for aux in got:
            torch.testing.assert_close(aux, expected)
