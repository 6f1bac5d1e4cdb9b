"""What cannot be trained as it was written, or says nothing: refused by name, with a way out, before anything runs."""

from __future__ import annotations

import enum
import io
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from test_errors import raises

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, TraceError, TransformError

MESH = fz.AbstractMesh(data=1)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": torch.ones(4)}


def plain(p, x):
    return (x @ p["w"]).square().mean()


def test_a_count_with_a_gradient():
    def gated(detach):
        def loss(p, x):
            w = torch.sigmoid(x @ p["gate"])
            return fz.weighted((w * (x @ p["w"]).square()).sum(), w.detach().sum() if detach else w.sum())

        return loss

    params = {"gate": X[0].clone(), "w": X[1].clone()}
    step = fz.train_step(gated(detach=False), optim.sgd(0.1))
    for act in (lambda: step(step.init(params), X), lambda: fz.lower(step, MESH, params, X)):
        raises(TraceError, act, "the count of a weighted loss depends on trainable parameters", "count.detach()")
    step = fz.train_step(gated(detach=True), optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    (want, said), (got, heard) = step(step.init(params), X), train(train.init(params), X)
    assert torch.allclose(said["grad_norm"], heard["grad_norm"]) and all(
        torch.allclose(want.params[n], got.params[n]) for n in params
    )


def test_complex_leaves_that_would_be_trained():
    params = {"w": torch.ones(4, 3, dtype=torch.complex64), "b": torch.zeros(3)}
    loss = lambda p, x: ((x.to(torch.complex64) @ p["w"]).abs() + p["b"]).square().mean()  # noqa: E731
    step = fz.train_step(loss, optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for act in (lambda: step.init(params), lambda: train.init(params), lambda: fz.lower(step, MESH, params, X)):
        raises(
            FzeroTypeError,
            act,
            "complex leaves are not trained",
            "params['w']: complex64[4, 3]",
            "view_as_real",
            "not leaf.is_complex()",
        )

    frozen = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: not leaf.is_complex())
    real = fz.train_step(lambda p, x: loss({**p, "w": torch.view_as_complex(p["w"])}, x), optim.sgd(0.1))
    for step, given in ((frozen, params), (real, {**params, "w": torch.view_as_real(params["w"]).clone()})):
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        want, got = step(step.init(given), X)[0].params, train(train.init(given), X)[0].params
        assert all(torch.allclose(want[n], got[n], atol=1e-6) for n in given) and torch.equal(
            want["w"], given["w"]
        ) == (step is frozen)


def test_a_tied_leaf_of_which_a_predicate_accepts_some_paths():
    w = torch.ones(4, 4)
    params, loss = {"a": w, "b": w, "c": torch.ones(4, 4)}, lambda p, x: (x @ p["a"] @ p["b"] @ p["c"]).mean()
    torn = (
        "params['a'] and params['b'] are one tensor: `trainable` accepts params['b'], not params['a']",
        "Fix: accept all",
    )
    step = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: path != "params['a']")
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for act in (lambda: step.init(params), lambda: train.init(params), lambda: fz.lower(step, MESH, params, X)):
        raises(FzeroValueError, act, *torn)
    only_b = lambda path, leaf: path == "params['b']"  # noqa: E731
    for transform in (
        fz.shard_params(where=only_b),
        fz.shard_opt_state(where=only_b),
        fz.offload("cpu", "params", where=only_b),
    ):
        step = fz.data_parallel(transform(fz.train_step(loss, optim.sgd(0.1))))
        raises(
            TransformError,
            lambda step=step: fz.lower(step, fz.AbstractMesh(data=2), params, X),
            torn[0].replace("trainable", "where"),
        )
    both = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: path != "params['c']")
    state, _ = both(both.init(params), X)
    assert not torch.equal(state.params["a"], w) and torch.equal(state.params["c"], params["c"])


def test_what_is_no_optimizer_state_or_budget():
    raises(
        FzeroTypeError,
        lambda: optim.chain(optim.adamw(1e-3), 3, "sgd"),
        "argument 1: int",
        "argument 2: str",
        "clip_by_global_norm",
    )
    step = fz.train_step(plain, optim.sgd(0.1))
    for act in (
        lambda: fz.compile(step, fz.make_mesh(), memory_budget="0GB"),
        lambda: fz.lower(step, MESH, PARAMS, X, memory_budget=0),
    ):
        raises(FzeroValueError, act, "memory_budget=", "nothing runs in no memory")
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for make, run in ((step.init, step), (train.init, train)):
        state = make(PARAMS)
        for wrong, said in (
            ({"step": torch.tensor(1.5)}, "state.step: float32[], not int64[]"),
            ({"step": 3}, "state.step: int"),
            ({"key": None}, "state.key: NoneType, not int64[3]"),
            ({"extras": None}, "state.extras: NoneType, not a dict"),
        ):
            broken = state._replace(**wrong)
            raises(FzeroTypeError, lambda run=run, broken=broken: run(broken, X), said, "init")


def test_a_transform_that_does_nothing_to_an_evaluation():
    evaluate = fz.eval_step(plain)
    for act, said in (
        (lambda: fz.accumulate(evaluate, 2), "each part of the batch"),
        (lambda: fz.offload(evaluate, "cpu", "opt_state"), "no optimizer state"),
        (lambda: fz.offload(evaluate, "cpu", ("opt_state", "activations")), "no optimizer state"),
    ):
        raises(
            TransformError,
            act,
            "does nothing to an evaluation",
            said,
            "fz.compose(*train.resolved.transforms)(fz.eval_step(fn))",
        )
    assert (
        fz.offload(evaluate, "cpu", "params").transforms
        and fz.offload(fz.mixed_precision(evaluate), "cpu", "opt_state").transforms
    )
    taken = fz.compose(fz.accumulate(2), fz.offload("cpu", "opt_state"))(evaluate)
    params, x = {"w": torch.ones(4)}, torch.ones(3, 4)
    assert torch.equal(fz.compile(taken, fz.make_mesh(), backend="eager")(params, x), plain(params, x))


def columns(p, batch):
    return (batch["x"] @ p["w"])[:, batch["columns"]].mul(batch["scale"]).square().mean()


BATCH = {"x": torch.arange(32.0).view(8, 4), "columns": torch.tensor([0, 3]), "scale": torch.tensor(0.5)}
WIDE = {"w": torch.arange(16.0).view(4, 4) / 100}


@pytest.mark.parametrize("vertical", [False, True])
def test_a_batch_whose_leaves_have_different_numbers_of_rows(vertical):
    step, mesh = fz.train_step(columns, optim.sgd(0.1)), fz.make_mesh()
    lost = fz.accumulate(step, 2, vertical=vertical)
    raises(
        FzeroValueError,
        lambda: fz.lower(lost, MESH, WIDE, BATCH),
        "batch['columns'] [2]: other leaves have 8 rows",
        "whole=lambda path, leaf:",
    )
    wrong = fz.accumulate(step, 3, vertical=vertical, whole=lambda path, leaf: "columns" in path)
    raises(
        FzeroValueError,
        lambda: fz.lower(wrong, MESH, WIDE, BATCH),
        "batch['x'] [8, 4]: dim 0 of 8 is not a multiple of 3",
    )
    raises(FzeroTypeError, lambda: fz.accumulate(2, whole=["columns"]), "a predicate is a function of (path, leaf)")

    right = fz.accumulate(step, 2, vertical=vertical, whole=lambda path, leaf: "columns" in path)
    train = fz.compile(right, mesh, backend="eager")
    (want, said), (got, heard) = step(step.init(WIDE), BATCH), train(train.init(WIDE), BATCH)
    assert torch.allclose(said["loss"], heard["loss"]) and torch.allclose(want.params["w"], got.params["w"])
    fz.testing.check_equivalent(right, WIDE, BATCH, mesh, backend="eager", steps=2)
    assert "whole=<lambda>" in str(right.transforms[0])


SWALLOWED = {
    "item": (lambda y: y.sum().item(), "needs the value of a tensor"),
    "bool": (lambda y: 1.0 if y.sum() > 0 else 3.0, "needs the value of a tensor"),
    "numpy": (lambda y: float(y.detach().numpy().sum()), "needs the value of a tensor while being traced (.numpy())"),
    "draw": (lambda y: torch.rand(()), "draws from torch's global generator"),
    "data": (lambda y: setattr(y, "data", y * 2), "assigns to .data"),
    "in a block": (lambda y: fz.block(lambda a: a * a.sum().item())(y), "needs the value of a tensor"),
}


@pytest.mark.parametrize("case", SWALLOWED)
def test_a_refusal_that_the_loss_swallows(case):
    """In PyTorch nothing would have been raised there, and its `except` not be run."""
    body, says = SWALLOWED[case]

    def loss(p, x):
        y = p["w"] * x
        try:
            scale = body(y)
        except Exception:
            scale = 2.0
        return (y * scale).square().mean()

    raises(TraceError, lambda: fz.lower(fz.train_step(loss, optim.sgd(0.1)), MESH, PARAMS, X), says)


def test_what_fails_in_pytorch_too_may_be_swallowed():
    def loss(p, x):
        try:
            return (torch.ones(3) @ torch.ones(4)) * p["w"].sum()
        except RuntimeError:
            return (x @ p["w"]).square().mean()

    assert fz.lower(fz.train_step(loss, optim.sgd(0.1)), MESH, PARAMS, X).program.lines


def test_what_the_loss_raises_itself_passes_whatever_it_says():
    def loss(p, x):
        raise TypeError("scale(): argument 'rate' is missing")

    with pytest.raises(TypeError, match=r"^scale\(\): argument 'rate' is missing$"):
        fz.lower(fz.train_step(loss, optim.sgd(0.1)), MESH, PARAMS, X)


TYPOS = [
    lambda p, x: "ww" in p,
    lambda p, x: p == "params['x']",
    lambda p, x: p.endswith("kernel"),
    lambda p, x: p in {"a", "b"},
]
MEANT = [lambda p, x: x.numel() > 1000, lambda p, x: False, lambda p, x: "w" in p]


def test_a_predicate_of_paths_that_accepts_none():
    step, mesh = fz.train_step(plain, optim.sgd(0.1)), fz.make_mesh()
    of_where = [
        fz.shard_params,
        lambda where: fz.mixed_precision("bf16", where=where),
        lambda where: fz.offload("cpu", "params", where=where),
    ]
    for i, transform in enumerate(of_where):
        for where in TYPOS:
            act = lambda transform=transform, where=where: fz.compile(  # noqa: E731
                transform(where=where)(step), mesh, backend="eager"
            ).init(PARAMS)
            raises(
                TransformError,
                act,
                "does nothing",
                "`where` accepts none of 1 leaves; the nearest:\n  params['w']",
                "leave `where` out",
            )
        assert i or all(fz.compile(transform(where=where)(step), mesh, backend="eager").init(PARAMS) for where in MEANT)
    running = fz.train_step(lambda p, x: (plain(p, x), {}), optim.sgd(0.1), mutable=lambda path, leaf: "runing" in path)
    params = {"w": PARAMS["w"], **{name: torch.ones(1) for name in ("a", "b", "c", "d", "e", "running_mean")}}
    raises(
        FzeroValueError,
        lambda: running(running.init(params), X),
        "no leaf is mutable",
        "none of 7 leaves; the nearest:\n  params['running_mean']",
    )

    def traced(p, x):
        raise AssertionError("checked before the trace, which may take minutes")

    step = fz.train_step(traced, optim.sgd(0.1))
    cut = fz.accumulate(step, 2, whole=lambda path, leaf: "mask" in path)
    refused = lambda x, *words: raises(FzeroValueError, lambda: fz.lower(cut, MESH, PARAMS, x), *words)  # noqa: E731
    refused(X, "all leaves of the batch are cut", "none of 1 leaves")
    tied = "batch['mask'] and batch['rows'] are one tensor: `whole` accepts batch['mask'], not batch['rows']"
    refused({"mask": X, "rows": X}, "`whole` accepts some of its paths", tied, "give x.clone()")


OWN, NUMPY, COUNT, VALUES, MADE = (
    random.Random(0),
    np.random.default_rng(0),
    itertools.count(),
    iter([1.0] * 100),
    (float(i) for i in range(100)),
)
WRITTEN = io.StringIO()
SEEN, LEFT, ARRAY, FLAG = [], [*range(100)], np.zeros(1), {"first": True}


def first_time():
    first, FLAG["first"] = FLAG["first"], False
    return 5.0 if first else 1.0


DRAWS = {
    "random (Python's generator): drawn from": lambda: random.random(),
    "numpy.random: drawn from": lambda: np.random.rand(),
    "OWN: drawn from": lambda: OWN.random(),
    "NUMPY: drawn from": lambda: NUMPY.random(),
    "COUNT: drawn from": lambda: next(COUNT),
    "VALUES: drawn from": lambda: next(VALUES),
    "MADE: drawn from": lambda: next(MADE),
    "WRITTEN: a file that is written to or read from": lambda: print("once", file=WRITTEN) or 1.0,
    "SEEN: a list of 0 before, a list of 1 now": lambda: SEEN.append(1) or len(SEEN),
    "LEFT: ": lambda: LEFT.pop(),
    "ARRAY: ": lambda: float(ARRAY.__iadd__(1)[0]),
    "FLAG['first']: ": first_time,
}


@pytest.mark.parametrize("says", DRAWS)
def test_a_loss_that_draws_or_counts_in_python(says):
    draw = DRAWS[says]
    train = fz.compile(
        fz.train_step(lambda p, x: (x @ p["w"]).square().mean() * draw(), optim.sgd(0.1)),
        fz.make_mesh(data=1),
        backend="eager",
    )
    raises(
        FzeroValueError,
        lambda: train(train.init(PARAMS), X),
        "counts, draws or uses something up each time it is called",
        says,
        "fz.random",
    )


def test_draws_of_another_thread_are_not_put_on_the_loss_alone():
    stop = threading.Event()

    def augments():
        while not stop.is_set():
            random.random()

    thread = threading.Thread(target=augments, name="loader", daemon=True)
    thread.start()
    train = fz.compile(fz.train_step(plain, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    try:
        says = (
            "random (Python's generator): drawn from",
            "by a thread that runs beside",
            "loader",
            "random.Random(seed)",
        )
        raises(FzeroValueError, lambda: train(train.init(PARAMS), X), *says)
    finally:
        stop.set()
        thread.join()
    assert train(train.init(PARAMS), X)


def doubled(grads, state, params):
    grads["w"].mul_(2)
    return grads, state


def counted(grads, state, params):
    state["n"].add_(1)
    return grads, state


def decayed(grads, state, params):
    params["w"] *= 0.9
    return grads, state


def misshapen(grads, state, params):
    return {"w": grads["w"] @ torch.ones(3)}, state


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (doubled, "the gradient of params['w']: "),
        (counted, "opt_state['n']: "),
        (decayed, "params['w']: "),
        (misshapen, "the gradient of params['w']: float32[4]"),
    ],
)
def test_an_optimizer_s_mistake_names_the_leaf(update, says):
    step = fz.train_step(plain, optim.GradientTransformation(lambda params: {"n": torch.zeros(())}, update))
    state = step.init(PARAMS)
    raises(TraceError, lambda: fz.lower(step, MESH, PARAMS, X), "test_rejected_steps.py:", says)
    if update is not misshapen:
        raises(TraceError, lambda: step(state, X), "test_rejected_steps.py:", says)
        assert torch.equal(state.params["w"], PARAMS["w"]) and not state.opt_state["n"]


def test_a_tensor_that_the_loss_keeps():
    """A cache, filled while traced, would hold a tensor without values."""
    kept = {}

    def loss(p, x):
        if "scale" not in kept:
            kept["scale"] = x.square().mean()
        return (x @ p["w"]).square().mean() * kept["scale"]

    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    raises(
        TraceError,
        lambda: train(train.init(PARAMS), X),
        "reads a tensor that is not one of its arguments, but was kept from an earlier trace (a cache)",
        "closure variable kept['scale']: float32[]",
        "Fix: compute it in each call",
    )


def test_keys_that_cannot_be_written_down():
    class Kind(enum.Enum):
        A = 1

    train = fz.compile(
        fz.train_step(lambda p, x: (x @ p[Kind.A]).square().mean(), optim.sgd(0.1)),
        fz.make_mesh(data=1),
        backend="eager",
    )
    raises(FzeroTypeError, lambda: train.init({Kind.A: torch.ones(4)}), "a key that is neither a text nor a number")


def test_a_batch_that_is_a_conjugate_view():
    z = torch.complex(X, X + 1)

    def loss(p, z):
        return (z.imag @ p["w"]).square().mean()

    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    _, metrics = train(train.init(PARAMS), z.conj())
    torch.testing.assert_close(metrics["loss"], loss(PARAMS, z.conj()))


def test_a_step_under_no_grad_is_a_step():
    train = fz.compile(fz.train_step(plain, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    want, _ = train(train.init(PARAMS), X)
    for around in (torch.no_grad(), torch.inference_mode()):
        with around:
            train = fz.compile(fz.train_step(plain, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
            state, _ = train(train.init(PARAMS), X)
        state, _ = train(state, X)
        assert int(state.step) == 2 and int(want.step) == 1
