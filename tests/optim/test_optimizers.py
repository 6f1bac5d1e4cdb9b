"""Optimizers against torch.optim, formulas written out from their papers, and the rules that let `update` be traced and
sharded."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rejections import BATCH, ONE, PARAMS, loss_fn, raises
from torch.fx.experimental.proxy_tensor import make_fx

import fzero as fz
from fzero import optim, tree
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.optim import torch_classes

NUM_STEPS = 20


@dataclass
class Layer:
    w: torch.Tensor
    bias: torch.Tensor | None


def make_params(dtype=torch.float32):
    """Odd containers, a 0-dim leaf, an empty list, and a frozen leaf."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    return {
        "embed": draw(7, 3),
        "layers": [Layer(draw(3, 5), draw(5)), Layer(draw(5, 3), None)],
        "none": [],
        "scale": (draw(),),
    }


def make_grads(params, step):
    gen = torch.Generator().manual_seed(100 + step)
    return tree.map(
        lambda p: torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype) * (step % 3 + 0.1), params
    )


def run(opt, params, num_steps=NUM_STEPS):
    state = opt.init(params)
    for step in range(num_steps):
        updates, state = opt.update(make_grads(params, step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def run_torch(make_opt, params, num_steps=NUM_STEPS, max_norm=None, make_scheduler=None):
    leaves = [p.clone().requires_grad_() for p in tree.leaves(params)]
    opt = make_opt(leaves)
    scheduler = make_scheduler(opt) if make_scheduler else None
    for step in range(num_steps):
        for p, g in zip(leaves, tree.leaves(make_grads(params, step)), strict=True):
            p.grad = g.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(leaves, max_norm)
        opt.step()
        if scheduler:
            scheduler.step()
    return tree.unflatten(tree.structure(params), [p.detach() for p in leaves])


def assert_close(actual, expected, tol=1e-6):
    assert tree.structure(actual) == tree.structure(expected)
    for path, a, e in zip(tree.paths(actual), tree.leaves(actual), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=tol, atol=tol, msg=lambda m, path=path: f"{path}: {m}")


TORCH = {
    "sgd": (optim.sgd(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "sgd_decay": (optim.sgd(0.05, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1)),
    "momentum": (optim.sgd(0.05, 0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        optim.sgd(0.05, 0.9, True, 0.1),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (optim.adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "adam_l2": (
        optim.chain(optim.add_decayed_weights(0.1), optim.adam(0.01)),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    ),
    "adamw": (optim.adamw(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    "adamw_betas": (
        optim.adamw(0.01, 0.8, 0.95, 1e-3, 0.3),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.95), 1e-3, 0.3),
    ),
    "adafactor": (optim.adafactor(0.3), lambda p: torch.optim.Adafactor(p, 0.3)),
    "adafactor_clipped": (
        optim.adafactor(0.3, -0.5, 1e-5, 0.1, 2.0, 0.1),
        lambda p: torch.optim.Adafactor(p, 0.3, -0.5, (1e-5, 0.1), 2.0, 0.1),
    ),
    "scale_by_adam": (
        optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.01)),
        lambda p: torch.optim.Adam(p, 0.01),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_equal_to_torch(name, dtype):
    ours, theirs = TORCH[name]
    params = make_params(dtype)
    expected = run_torch(functools.partial(theirs), params)
    assert (expected["embed"] - params["embed"]).abs().max() > 0.05  # it went somewhere
    # In float64 the two differ by the order of operations alone, so the tolerance can be that of float64.
    assert_close(run(ours, params)[0], expected, tol=1e-12 if dtype == torch.float64 else 1e-6)


def database():
    """The arguments with which PyTorch tests each of its optimizers, its private database."""
    pytest.importorskip("expecttest", reason="PyTorch's databases of samples need expecttest")
    common = pytest.importorskip("torch.testing._internal.common_optimizers")
    return [
        (info.optim_cls, sample.kwargs)
        for info in common.optim_db
        for sample in info.optim_inputs_func("cpu")
        if info.optim_cls not in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon)  # test_whole_matrices.py
    ]


@pytest.fixture
def float64_scalars():
    """PyTorch keeps the numbers of NAdam and ASGD that depend on the step in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.full
def test_equal_to_torch_over_its_database(float64_scalars):
    """In float64 with every argument of PyTorch's own tests, by a constant rate and by one that a scheduler changes."""
    params, wrong, cases = make_params(torch.float64), [], database()
    assert len({cls for cls, _ in cases}) == 12 and len(cases) > 70
    for cls, kwargs in cases:
        options = {name: x for name, x in kwargs.items() if name != "lr"}
        lr = float(kwargs.get("lr", torch_classes.defaults(cls)["lr"]))
        rates = {
            "constant": (lr, None),
            "scheduled": (
                lambda step, lr=lr: lr * (1 - 0.03 * step.double()),
                lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 - 0.03 * k),
            ),
        }
        for name, (rate, make_scheduler) in rates.items():
            make = lambda leaves, cls=cls, lr=lr, options=options: cls(leaves, lr=lr, **options)  # noqa: E731
            expected = run_torch(make, params, make_scheduler=make_scheduler)
            ours, _ = run(torch_classes.of_torch(cls, rate, options), params)
            assert any(not torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(expected), strict=True))
            try:
                assert_close(ours, expected, tol=1e-12)
            except AssertionError as error:
                wrong.append(f"{cls.__name__}({kwargs}), {name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.5, 4.0, 1e6])  # always, sometimes, never clips
def test_clipping_is_torchs(max_norm, dtype):
    params = make_params(dtype)
    norms = [optim.global_norm(make_grads(params, step)).item() for step in range(NUM_STEPS)]
    assert min(norms) < 4.0 < max(norms)
    opt = optim.chain(optim.clip_by_global_norm(max_norm), optim.sgd(0.05, 0.9))
    assert_close(
        run(opt, params)[0], run_torch(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), params, max_norm=max_norm)
    )


def test_global_norm():
    grads = make_grads(make_params(), 1)
    flat = torch.cat([g.reshape(-1) for g in tree.leaves(grads)])
    torch.testing.assert_close(optim.global_norm(grads), flat.norm())
    assert optim.global_norm({"a": None}).item() == 0.0
    many = [torch.full((), 2.0) for _ in range(401)]
    torch.testing.assert_close(optim.global_norm(many), torch.tensor(2 * math.sqrt(401)))
    # 300 squared overflows float16
    assert optim.global_norm([torch.full((4,), 300.0, dtype=torch.float16)]).item() == 600.0
    assert optim.global_norm([torch.ones(1), torch.ones(1, dtype=torch.float64)]).dtype == torch.float64


def test_scheduled_learning_rate_follows_torchs_scheduler():
    params = make_params()
    ours = optim.adamw(optim.cosine(0.01, 0.001, 15))

    def scheduler(opt):
        return torch.optim.lr_scheduler.LambdaLR(
            opt, lambda k: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(k, 15) / 15))
        )

    expected = run_torch(lambda p: torch.optim.AdamW(p, 0.01), params, make_scheduler=scheduler)
    assert_close(run(ours, params)[0], expected)
    sgd = optim.sgd(optim.linear(0.1, 0.0, 10))
    expected = run_torch(
        lambda p: torch.optim.SGD(p, 0.1),
        params,
        make_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 - min(k, 10) / 10),
    )
    assert_close(run(sgd, params)[0], expected)


def lion_reference(params, lr, b1, b2, weight_decay):
    """Algorithm 2 of arXiv:2302.06675."""
    theta, m = [p.double() for p in tree.leaves(params)], [torch.zeros_like(p).double() for p in tree.leaves(params)]
    for step in range(NUM_STEPS):
        for i, g in enumerate(tree.leaves(make_grads(params, step))):
            c = b1 * m[i] + (1 - b1) * g
            theta[i] = theta[i] - lr * (torch.sign(c) + weight_decay * theta[i])
            m[i] = b2 * m[i] + (1 - b2) * g
    return tree.unflatten(
        tree.structure(params), [p.to(q.dtype) for p, q in zip(theta, tree.leaves(params), strict=True)]
    )


def lamb_reference(params, lr, b1, b2, eps, weight_decay):
    """Algorithm 2 of arXiv:1904.00962 with phi(z) = z."""
    x, m, v = ([f(p).double() for p in tree.leaves(params)] for f in (torch.clone, torch.zeros_like, torch.zeros_like))
    for step in range(NUM_STEPS):
        for i, g in enumerate(tree.leaves(make_grads(params, step))):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            r = m[i] / (1 - b1 ** (step + 1)) / ((v[i] / (1 - b2 ** (step + 1))).sqrt() + eps) + weight_decay * x[i]
            x[i] = x[i] - lr * x[i].norm() / r.norm() * r
    return tree.unflatten(tree.structure(params), [p.to(q.dtype) for p, q in zip(x, tree.leaves(params), strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_and_lamb_follow_their_papers(dtype):
    params = make_params(dtype)
    tol = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(run(optim.lion(0.01, 0.8, 0.9, 0.3), params)[0], lion_reference(params, 0.01, 0.8, 0.9, 0.3), tol)
    assert_close(
        run(optim.lamb(0.01, 0.8, 0.9, 1e-6, 0.3), params)[0], lamb_reference(params, 0.01, 0.8, 0.9, 1e-6, 0.3), tol
    )


def test_adafactor_of_odd_leaves():
    """Frozen ones, vectors, stacks of matrices and no elements at all; a state of other params is refused."""
    params = {
        "x": None,
        "b": torch.ones(3),
        "w": torch.ones(2, 4, 3),
        "none": torch.ones(4, 0),
        "neither": torch.ones(0, 4),
    }
    opt = optim.adafactor(optim.constant(0.1))
    state = opt.init(params)
    assert [tuple(m.shape) for m in tree.leaves(state.rows)] == [(0,), (4,), (2, 4)]
    updates, state = opt.update(params, state, params)
    assert updates["x"] is None and all(x.isfinite().all() for x in tree.leaves((updates, state)))
    for other in ({"b": torch.ones(3)}, {**params, "w": torch.ones(2, 5, 3)}):
        with pytest.raises(FzeroValueError, match="the state belongs to other params"):
            opt.update(other, state, other)
    with pytest.raises(FzeroValueError, match=r"clip=0.5: must be at least 1\n  beta2_decay=0.1: must be at most 0"):
        optim.adafactor(0.1, 0.1, clip=0.5)


def test_trust_ratio_is_one_where_a_norm_is_zero():
    opt = optim.scale_by_trust_ratio()
    params = {"both": torch.tensor([3.0, 4.0]), "no_grad": torch.ones(2), "no_param": torch.zeros(2)}
    grads = {"both": torch.tensor([0.6, 0.8]), "no_grad": torch.zeros(2), "no_param": torch.ones(2)}
    updates, _ = opt.update(grads, opt.init(params), params)
    assert_close(updates, {"both": torch.tensor([3.0, 4.0]), "no_grad": torch.zeros(2), "no_param": torch.ones(2)})


# dtypes and state


@pytest.mark.parametrize(
    "opt",
    [optim.adamw(0.01), optim.lion(0.01), optim.lamb(0.01), optim.sgd(0.01, 0.9)],
    ids=["adamw", "lion", "lamb", "sgd"],
)
def test_moments_are_float32_and_params_keep_their_dtype(opt):
    params = make_params(torch.bfloat16)
    after, state = run(opt, params, 2)
    assert {p.dtype for p in tree.leaves(after)} == {torch.bfloat16}
    assert {s.dtype for s in tree.leaves(state)} <= {torch.float32, torch.int64}
    assert sum(s.numel() for s in tree.leaves(state)) >= sum(p.numel() for p in tree.leaves(params))


def test_low_precision_gradients_are_computed_with_in_float32():
    """bf16 gradients of float32 parameters: the same as the same gradients given in float32, to the bit."""
    params = make_params()
    opt = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.01))
    low = tree.map(lambda g: g.bfloat16(), make_grads(params, 0))
    one, two = (opt.update(g, opt.init(params), params)[0] for g in (low, tree.map(lambda g: g.float(), low)))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True))


def test_apply_updates_rounds_once():
    p, u = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.00391], dtype=torch.float32)
    # bf16 has 1 + 2**-7 after 1: the sum is just above half way and must round up, while bf16(u) = 2**-8 ties to even,
    # down.
    assert u.bfloat16().item() == 2**-8
    assert optim.apply_updates([p], [u])[0].item() == 1 + 2**-7


def test_count_and_state_shapes():
    params = make_params()
    state = optim.adamw(0.01).init(params)
    assert state.count.dtype == torch.int64 and state.count.shape == () and state.count.item() == 0
    assert tree.structure(state.mu) == tree.structure(params)
    _, state = run(optim.adamw(0.01), params, 3)
    assert state.count.item() == 3
    meta = tree.map(lambda p: p.to("meta"), params)
    assert {s.device.type for s in tree.leaves(optim.adamw(0.01).init(meta))} == {"meta"}
    transposed = optim.lion(0.1).init({"w": torch.zeros(3, 4).t()})
    assert transposed.mu["w"].is_contiguous()


def test_nothing_is_changed_in_place():
    params, opt = (
        make_params(),
        optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(0.1, weight_decay=0.1), optim.trace(0.9)),
    )
    grads, state = make_grads(params, 0), opt.init(params)
    before = tree.map(torch.clone, (params, grads, state))
    updates, _ = opt.update(grads, state, params)
    optim.apply_updates(params, updates)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves((params, grads, state)), tree.leaves(before), strict=True))


# masks, labels, frozen leaves

EVERY = {
    "sgd": optim.sgd(0.1, 0.9, True, 0.1),
    "adamw": optim.adamw(0.1, mask=lambda path, p: p.ndim >= 2),
    "adamw_schedule": optim.adamw(optim.warmup_cosine(0.1, 2, 10)),
    "amsgrad": optim.adamw(0.1, optim.linear(0.8, 0.9, 5), amsgrad=True, maximize=True),
    "damped": optim.sgd(0.1, 0.9, weight_decay=0.1, dampening=0.5, maximize=True),
    "rmsprop": optim.rmsprop(0.1, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": optim.adagrad(optim.constant(0.1), lr_decay=0.1, initial_accumulator_value=0.1),
    "nadam": optim.nadam(optim.linear(0.1, 0.0, 10), weight_decay=0.1, decoupled_weight_decay=True),
    "radam": optim.radam(0.1, b2=0.9, weight_decay=0.1),
    "adamax": optim.adamax(0.1, maximize=True),
    "adadelta": optim.adadelta(0.1, weight_decay=0.1),
    "asgd": optim.asgd(optim.linear(0.1, 0.0, 10), 0.1, t0=0, weight_decay=0.1),
    "rprop": optim.rprop(0.1),
    "lion": optim.lion(optim.constant(0.1), weight_decay=0.1),
    "lamb": optim.lamb(optim.warmup_decay_lr(10, 0.0, 0.1, 4), weight_decay=0.1),
    "skip": optim.skip_nonfinite(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))),
    "clip": optim.chain(optim.clip_by_global_norm(0.1), optim.identity(), optim.scale(2.0)),
    "masked": optim.masked(optim.sgd(optim.warmup_stable_decay(0.1, 2, 2, 8), 0.9), lambda path, p: "bias" not in path),
    "partition": optim.partition({"a": optim.adamw(0.1), "b": optim.lion(optim.warmup_lr(0.0, 0.1, 3, "linear")),
                                  "c": optim.set_to_zero()},
                                 lambda path, p: "a" if "embed" in path else "b" if p.ndim else "c"),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_frozen_leaves_are_as_if_absent(name):
    opt, params = EVERY[name], make_params()
    frozen = {"x": None, **params, "layers": [Layer(None, params["layers"][0].bias), None]}
    without = {k: v for k, v in frozen.items() if v is not None}
    without["layers"] = [Layer(None, params["layers"][0].bias)]
    after, _ = run(opt, frozen, 3)
    expected, _ = run(opt, without, 3)
    assert after["x"] is None and after["layers"][1] is None and after["layers"][0].w is None
    assert all(torch.equal(a, e) for a, e in zip(tree.leaves(after), tree.leaves(expected), strict=True))
    everything = {"x": None, "y": [None]}
    assert optim.apply_updates(everything, opt.update(everything, opt.init(everything), everything)[0]) == everything


def test_weight_decay_mask():
    params = {"b": torch.ones(3), "w": torch.ones(3, 3)}
    zero = tree.map(torch.zeros_like, params)
    for mask in (lambda path, p: p.ndim >= 2, lambda path, p: path == "params['w']", {"b": False, "w": True}):
        for opt in (optim.adamw(0.1, weight_decay=0.5, mask=mask), optim.lion(0.1, weight_decay=0.5, mask=mask)):
            updates, _ = opt.update(zero, opt.init(params), params)
            assert_close(updates, {"b": torch.zeros(3), "w": torch.full((3, 3), -0.05)})


def test_masked_holds_no_state_for_other_leaves_and_passes_their_gradients():
    params = make_params()
    # a prefix: one bool a layer
    opt = optim.masked(optim.adamw(0.1), {"embed": True, "layers": [False, True], "none": [], "scale": (False,)})
    state = opt.init(params)
    assert tree.names(state.inner_state.mu) == ["embed", "layers.1.w"]
    grads = make_grads(params, 0)
    updates, state = opt.update(grads, state, params)
    assert torch.equal(updates["layers"][0].bias, grads["layers"][0].bias)
    alone = optim.adamw(0.1)
    expected, _ = alone.update([grads["embed"]], alone.init([params["embed"]]), [params["embed"]])
    assert torch.equal(updates["embed"], expected[0])
    assert optim.masked(optim.adamw(0.1), False).init(params) == optim.MaskedState(None)
    inner_needs_none = optim.masked(optim.scale(3.0), True)
    # params are optional here too
    assert torch.equal(inner_needs_none.update(grads, inner_needs_none.init(params))[0]["embed"], grads["embed"] * 3.0)


def test_partition_equals_torch_parameter_groups():
    params = make_params()
    flat, names = tree.leaves(params), tree.names(params)

    def label(path, leaf):
        return "decay" if leaf.ndim >= 2 else "plain"

    ours = optim.partition(
        {"decay": optim.adamw(0.01, weight_decay=0.2), "plain": optim.sgd(0.1, 0.9), "unused": optim.lion(1.0)}, label
    )
    after, state = run(ours, params)
    assert state.inner_states["unused"] is None
    assert tree.names(state.inner_states["decay"].mu) == [n for n, p in zip(names, flat, strict=True) if p.ndim >= 2]
    decayed = run_torch(lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.2), params)
    plain = run_torch(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), params)
    assert_close(after, tree.map(lambda d, p: d if d.ndim >= 2 else p, decayed, plain))


def test_set_to_zero_freezes():
    params = make_params()
    labels = {"embed": "frozen", "layers": "train", "none": "train", "scale": "train"}
    after, _ = run(optim.partition({"frozen": optim.set_to_zero(), "train": optim.adamw(0.1)}, labels), params, 3)
    assert torch.equal(after["embed"], params["embed"])
    assert not torch.equal(after["layers"][0].w, params["layers"][0].w)


def test_a_callable_dataclass_is_a_tree_of_bools():
    @dataclass
    class Model:
        w: object
        b: object

        def __call__(self, x):
            return x

    params = Model(torch.ones(2), torch.ones(2))
    opt = optim.masked(optim.scale(0.0), Model(True, False))
    updates, _ = opt.update(params, opt.init(params), params)
    assert updates.w.sum() == 0 and updates.b.sum() == 2


# schedules


def values(schedule, steps):
    out = []
    for step in steps:
        from_int, from_tensor = schedule(step), schedule(torch.tensor(step))
        assert from_tensor.dtype == torch.float32 and from_tensor.shape == ()
        assert torch.equal(from_int, from_tensor)
        assert torch.equal(schedule(torch.tensor(step, dtype=torch.int32)), from_tensor)
        out.append(from_tensor.item())
    return out


def torch_schedule(make, num_steps, lr):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)
    scheduler, out = make(opt), []
    for _ in range(num_steps):
        out.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return out


def test_schedules_equal_torchs():
    s = torch.optim.lr_scheduler
    assert values(optim.constant(3e-4), [0, 5, 10**9]) == pytest.approx([3e-4] * 3, rel=1e-6)
    expected = torch_schedule(lambda o: s.LinearLR(o, 1.0, 0.1, total_iters=12), 20, 0.5)
    assert values(optim.linear(0.5, 0.05, 12), range(20)) == pytest.approx(expected, rel=1e-6)
    expected = torch_schedule(lambda o: s.CosineAnnealingLR(o, T_max=12, eta_min=0.05), 13, 0.5)
    assert values(optim.cosine(0.5, 0.05, 12), range(13)) == pytest.approx(expected, rel=1e-6)
    assert values(optim.cosine(0.5, 0.05, 12), [13, 100]) == pytest.approx([0.05, 0.05])
    # A very long run: step / total must not be computed from a float32 step.
    assert values(optim.linear(0.0, 2.0**30, 2**30), [2**29 + 64]) == [2.0**29 + 64]


def test_warmup_cosine_and_warmup_stable_decay():
    def expected(k):
        if k < 4:
            return 0.1 + (1.0 - 0.1) * k / 4
        return 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * min(1.0, (k - 4) / 10)))

    assert values(optim.warmup_cosine(1.0, 4, 14, 0.2, 0.1), range(20)) == pytest.approx(
        [expected(k) for k in range(20)], rel=1e-6
    )
    assert values(optim.warmup_cosine(1.0, 0, 10), [0, 5, 10]) == pytest.approx([1.0, 0.5, 0.0])
    wsd = [0.0, 0.25, 0.5, 0.75] + [1.0] * 7 + [0.775, 0.55, 0.325, 0.1, 0.1, 0.1]
    assert values(optim.warmup_stable_decay(1.0, 4, 4, 14, 0.1), range(17)) == pytest.approx(wsd, rel=1e-6)
    assert values(optim.warmup_stable_decay(1.0, 0, 2, 2), range(4)) == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_deepspeeds_schedules(kind, warmup):
    """gamma(i) of WarmupLR and WarmupDecayLR at last_batch_iteration i; before the first, min_lr."""
    low, high, total, steps = 1e-4, 1e-2, 30, max(2, warmup)

    def warm(i):
        return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps

    def decay(i):
        return max(0.0, (total - i) / (total - steps))

    def lr(i, after):
        return low if i < 0 else low + (high - low) * (warm(i) if i < steps else after(i))

    assert values(optim.warmup_lr(low, high, warmup, kind), range(-1, 40)) == pytest.approx(
        [lr(i, lambda _: 1.0) for i in range(-1, 40)], rel=1e-6
    )
    assert values(optim.warmup_decay_lr(total, low, high, warmup, kind), range(-1, 40)) == pytest.approx(
        [lr(i, decay) for i in range(-1, 40)], rel=1e-6
    )


def test_deepspeeds_values_by_hand():
    # warmup_num_steps=1000 at iteration 99: log(100) / log(1000) = 2 / 3
    assert values(optim.warmup_lr(0.0, 0.003, 1000), [0, 9, 99, 999, 5000]) == pytest.approx(
        [0.0, 0.001, 0.002, 0.003, 0.003], rel=1e-6
    )
    assert values(optim.warmup_decay_lr(3000, 0.0, 0.003, 1000), [99, 1000, 2000, 3000, 4000]) == pytest.approx(
        [0.002, 0.003, 0.0015, 0.0, 0.0], rel=1e-6
    )


def test_one_cycle_and_range_test():
    """DeepSpeed's values by hand; those of its package: tests/deepspeed_config/test_deepspeed_config.py."""
    s = torch.optim.lr_scheduler
    make = lambda o: s.CyclicLR(o, 0.1, 0.5, 4, 8, cycle_momentum=False)  # noqa: E731
    assert values(optim.one_cycle(0.1, 0.5, 4, 8), range(13)) == pytest.approx(torch_schedule(make, 13, 0.1), rel=1e-6)
    assert values(optim.one_cycle(0.1, 0.5, 4, 8), [13, 100]) == pytest.approx([0.1, 0.1])
    decayed = optim.one_cycle(0.1, 0.5, 2, decay_rate=0.5, decay_steps=2)
    assert values(decayed, range(9)) == pytest.approx(
        [0.1, 0.3, 0.5, 0.3, 0.1, 0.1 / 1.25, 0.1 / 1.5, 0.1 / 1.75, 0.05], rel=1e-6
    )
    # two stairs up (0 and 1/2, the top at its end), three down
    stairs = [0.0, 0.0, 0.5, 0.5, 1.0, 2 / 3, 1 / 3, 0.0, 0.0]
    found = values(optim.one_cycle(1.0, 2.0, 4, 3, 2, 3), range(9))
    assert found == pytest.approx([1 + x for x in stairs], rel=1e-6)
    assert values(optim.one_cycle(1.0, 2.0, 4, 0), range(6)) == pytest.approx([1.0, 1.25, 1.5, 1.75, 1.0, 1.0])

    make = lambda o: s.LambdaLR(o, lambda k: 1 + 3 * k / 5)  # noqa: E731
    rises = optim.lr_range_test(1e-3, 5, 3.0)
    assert values(rises, range(20)) == pytest.approx(torch_schedule(make, 20, 1e-3), rel=1e-6)
    rises = optim.lr_range_test(0.5, 3, 2.0, staircase=True)
    assert values(rises, range(8)) == pytest.approx([0.5] * 3 + [1.5] * 3 + [2.5] * 2)


# what makes it traceable and shardable


def trace_update(opt, params):
    """The graph of update and apply_updates, traced on fake tensors: whatever depends on a value raises there."""
    flat, spec = tree.flatten((params, opt.init(params), params))

    def step(*args):
        grads, state, params = tree.unflatten(spec, args)
        updates, state = opt.update(grads, state, params)
        return tree.leaves((optim.apply_updates(params, updates), state))

    # clones: one tensor given twice would be one input
    return make_fx(step, tracing_mode="fake")(*[x.clone() for x in flat])


@pytest.mark.parametrize("name", EVERY)
def test_only_pointwise_operations_and_full_sums_on_leaves(name):
    aten = torch.ops.aten
    # sizes that no broadcast can confuse; no 0-dim leaf, so 0-dim means scalar
    params = {
        "embed": torch.ones(7, 3),
        "layers": [Layer(torch.ones(3, 5), torch.ones(11)), Layer(torch.ones(5, 3), None)],
    }
    graph = trace_update(EVERY[name], params)
    num_sums = 0
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        tensors = [a.meta["val"] for a in node.all_input_nodes]
        shapes = {t.shape for t in tensors if t.ndim}
        if not shapes:
            continue  # scalar arithmetic
        assert len(shapes) == 1, f"{node.format_node()} mixes leaves"
        if node.target == aten.sum.default:
            num_sums += 1
            continue
        assert torch.Tag.pointwise in node.target.tags or node.target in (
            aten._to_copy.default,
            aten.zeros_like.default,
        ), node.format_node()
        assert node.meta["val"].shape in shapes, node.format_node()
    assert not [n for n in graph.graph.nodes if n.op == "get_attr"], "a tensor was baked into the graph"
    # 4 leaves: two norms each for lamb, one each for clipping; adamw, lion and sgd need no communication at all
    assert num_sums == {"lamb": 8, "clip": 4, "skip": 8}.get(name, 0)


@pytest.mark.parametrize("name", EVERY)
def test_traced_equals_eager(name):
    """The traced graph run on real values, three updates: nothing depended on the values it was traced with."""
    opt, params = EVERY[name], {"embed": torch.randn(7, 3), "layers": [Layer(torch.randn(3, 5), torch.randn(11))]}
    graph, state = trace_update(opt, params), opt.init(params)
    spec = tree.structure((params, state))
    traced, traced_state = params, state
    for step in range(3):
        grads = make_grads(params, step)
        updates, state = opt.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        traced, traced_state = tree.unflatten(
            spec, graph(*tree.leaves((make_grads(traced, step), traced_state, traced)))
        )
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves((params, state)), tree.leaves((traced, traced_state)), strict=True)
    )


@pytest.mark.parametrize("name", EVERY)
def test_init_can_be_traced(name):
    flat, spec = tree.flatten(make_params())
    graph = make_fx(lambda *args: tree.leaves(EVERY[name].init(tree.unflatten(spec, args))), tracing_mode="fake")(*flat)
    expected = tree.leaves(EVERY[name].init(make_params()))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(graph(*flat), expected, strict=True))


def test_operations_per_leaf():
    """What a leaf costs in the trace of AdamW; scalars do not depend on the number of leaves."""
    one, two = (len(trace_update(optim.adamw(0.1), [torch.ones(3) for _ in range(n)]).graph.nodes) for n in (1, 2))
    placeholders, apply = 4, 1
    assert two - one - placeholders - apply == 10


def test_padding_stays_zero():
    """Zeros at the end of a flat shard, as parameters and gradients: they stay zero and change no norm."""
    clipped = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, 0.9))
    new = ("amsgrad", "damped", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop")
    others = optim.adamw(0.1), optim.lion(0.1, weight_decay=0.1), optim.lamb(0.1, weight_decay=0.1), clipped
    for opt in (*others, *(EVERY[name] for name in new)):
        whole = torch.arange(1.0, 6.0)
        padded = torch.cat([whole, torch.zeros(3)])
        state, padded_state = opt.init(whole), opt.init(padded)
        for step in range(3):
            grads = make_grads(whole, step)
            updates, state = opt.update(grads, state, whole)
            padded_updates, padded_state = opt.update(torch.cat([grads, torch.zeros(3)]), padded_state, padded)
            torch.testing.assert_close(padded_updates[:5], updates)
            assert not padded_updates[5:].any()
            whole, padded = optim.apply_updates(whole, updates), optim.apply_updates(padded, padded_updates)


# errors


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            lambda: optim.adamw(-1e-3, b1=1.0, b2=-0.1, eps=0.0, weight_decay=-1.0),
            ["lr=-0.001", "b1=1.0", "b2=-0.1", "eps=0.0", "weight_decay=-1.0"],
        ),
        (lambda: optim.adam(float("nan")), ["lr=nan"]),
        (lambda: optim.lion(0.1, b1=1.5, b2=2.0), ["b1=1.5", "b2=2.0"]),
        (lambda: optim.lamb(-0.1, weight_decay=-0.1), ["lr=-0.1", "weight_decay=-0.1"]),
        (lambda: optim.sgd(-0.1, momentum=1.0), ["lr=-0.1", "momentum=1.0"]),
        (lambda: optim.sgd(0.1, nesterov=True), ["nesterov"]),
        (lambda: optim.trace(-0.5), ["decay=-0.5"]),
        (lambda: optim.sgd(0.1, 0.9, True, dampening=0.5), ["nesterov=True: needs dampening=0"]),
        (lambda: optim.adamw(0.1, state_dtype="int8", amsgrad=True), ["amsgrad=True: needs state_dtype='fp32'"]),
        (lambda: optim.adamw(0.1, lambda: 0.9), ["b1="]),
        (
            lambda: optim.rmsprop(-1.0, alpha=1.0, eps=0.0, momentum=2.0, centered=3),  # type: ignore[arg-type]
            ["lr=-1.0", "alpha=1.0", "eps=0.0", "momentum=2.0", "centered=3"],
        ),
        (lambda: optim.adagrad(0.1, -1.0, -2.0, -3.0), ["lr_decay=-1.0", "weight_decay=-2.0", "_value=-3.0"]),
        (lambda: optim.nadam(0.1, momentum_decay=-1.0, b2=1.0), ["momentum_decay=-1.0", "b2=1.0"]),
        (lambda: optim.radam(0.1, weight_decay=-1.0, maximize=1), ["weight_decay=-1.0", "maximize=1"]),  # type: ignore[arg-type]
        (lambda: optim.adamax(0.1, eps=-1.0), ["eps=-1.0"]),
        (lambda: optim.adadelta(rho=1.0), ["rho=1.0"]),
        (lambda: optim.asgd(0.1, lambd=-1.0, weight_decay=-1.0), ["lambd=-1.0", "weight_decay=-1.0"]),
        (lambda: optim.rprop(0.1, (0.5, 0.9), (2.0, 1.0)), ["etas=(0.5, 0.9)", "step_sizes=(2.0, 1.0)"]),
        (lambda: optim.rprop(0.1, 0.5), ["etas=0.5: must be two numbers"]),  # type: ignore[arg-type]
        (lambda: optim.one_cycle(0.1, 0.2, 0, -1), ["first_steps=0", "second_steps=-1"]),
        (lambda: optim.lr_range_test(0.1, 0), ["steps=0"]),
        (lambda: optim.scale_by_adam(b1=7.0), ["b1=7.0"]),
        (lambda: optim.scale_by_learning_rate(-1.0), ["lr=-1.0"]),
        (lambda: optim.clip_by_global_norm(0.0), ["max_norm=0.0"]),
        (lambda: optim.add_decayed_weights(-0.1), ["weight_decay=-0.1"]),
        (lambda: optim.linear(1.0, 0.0, 0), ["steps=0"]),
        (lambda: optim.cosine(1.0, 0.0, -3), ["steps=-3"]),
        (lambda: optim.warmup_cosine(1.0, 10, 10), ["warmup_steps=10", "total_steps=10"]),
        (lambda: optim.warmup_stable_decay(1.0, 8, 0, 7), ["decay_steps=0", "warmup_steps=8"]),
        (lambda: optim.warmup_lr(0.0, 1.0, 0, "exp"), ["warmup_steps=0", "'exp'"]),
        (lambda: optim.warmup_decay_lr(10, 0.0, 1.0, 20), ["total_steps=10", "warmup_steps=20"]),
    ],
)
def test_bad_arguments_are_all_named(make, names):
    with pytest.raises(FzeroValueError) as error:
        make()
    assert all(n in str(error.value) for n in names) and "Fix: " in str(error.value)


def test_a_learning_rate_that_is_a_tensor_is_refused():
    with pytest.raises(FzeroTypeError, match="schedule"):
        optim.adamw(torch.tensor(0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "opt", [optim.adamw(0.1), optim.lion(0.1, weight_decay=0.1), optim.add_decayed_weights(0.1), optim.lamb(0.1)]
)
def test_update_without_params(opt):
    params = {"w": torch.ones(2)}
    with pytest.raises(FzeroValueError, match="without params"):
        opt.update(params, opt.init(params))


def test_trees_of_different_structure():
    opt, params = optim.adamw(0.1), {"a": torch.ones(2), "b": {"c": torch.ones(2)}, "d": torch.ones(2)}
    state = opt.init(params)
    with pytest.raises(FzeroValueError) as error:
        opt.update({"a": torch.ones(2), "b": {"c": None}, "e": torch.ones(2)}, state, params)
    text = str(error.value)
    assert "params['b']['c']: in params, not in grads" in text and "params['d']: in params, not in grads" in text
    assert "params['e']: in grads, not in params" in text and "params['a']" not in text and "Fix: " in text
    with pytest.raises(FzeroValueError, match=r"params\['d'\]: grads float32\[1\], mu float32\[2\]"):
        opt.update({**params, "d": torch.ones(1)}, state, params)
    with pytest.raises(FzeroValueError, match=r"params\[0\]: updates float32\[1\], params float32\[2\]"):
        optim.apply_updates([torch.ones(2)], [torch.ones(1)])
    with pytest.raises(FzeroValueError, match="PyTreeSpec"):
        optim.apply_updates([torch.ones(2)], (torch.ones(2),))


def test_leaves_that_are_not_floating_point():
    with pytest.raises(FzeroTypeError) as error:
        optim.adamw(0.1).init({"a": torch.ones(2), "ids": torch.arange(3), "n": 3})
    assert (
        "params['ids'] (int64[3])" in str(error.value)
        and "params['n'] (int)" in str(error.value)
        and "params['a']" not in str(error.value)
    )


def test_masks_and_labels_that_do_not_fit():
    params = {"a": torch.ones(2), "b": {"c": torch.ones(2), "d": torch.ones(2)}}
    for make in (
        lambda m: optim.masked(optim.adam(0.1), m).init(params),
        lambda m: optim.partition({True: optim.adam(0.1)}, m).init(params),
    ):
        with pytest.raises(FzeroValueError) as error:
            make({"b": {"c": True, "x": True}})
        text = str(error.value)
        assert (
            "params['a']: in params" in text
            and "params['b']['d']: in params" in text
            and "params['b']['x']: in " in text
            and "['c']:" not in text
        )
    with pytest.raises(FzeroTypeError, match=r"params\['b'\]\['c'\]: str"):
        optim.masked(optim.adam(0.1), {"a": True, "b": {"c": "yes", "d": False}}).init(params)
    opt = optim.adamw(0.1, mask={"a": True})
    with pytest.raises(FzeroValueError, match=r"params\['b'\]\['c'\]: in params, not in mask"):
        opt.update(params, opt.init(params), params)
    with pytest.raises(FzeroValueError) as error:
        optim.partition({"x": optim.adam(0.1)}, lambda path, leaf: "x" if "a" in path[6:] else "y").init(params)
    text = str(error.value)
    assert (
        "params['b']['c']: 'y'" in text
        and "params['b']['d']: 'y'" in text
        and "params['a']" not in text
        and "Fix: " in text
        and "'x'" in text
    )
    masked = optim.masked(optim.adam(0.1), {"a": True, "b": False})
    with pytest.raises(FzeroValueError, match=r"params\['b'\]\['d'\]: in params, not in grads"):
        masked.update({"a": torch.ones(2), "b": {"c": torch.ones(2), "d": None}}, masked.init(params), params)


def test_a_chain_given_another_chains_state():
    with pytest.raises(FzeroValueError, match="tuple of 1"):
        optim.chain(optim.scale(1.0), optim.trace(0.9)).update([torch.ones(1)], (optim.EmptyState(),), None)


@pytest.mark.parametrize(
    "rate", [lambda step: 1e-3 * min(1.0, step / 10), lambda step: 1e-3 * math.cos(step / 10)], ids=["min", "math.cos"]
)
def test_a_schedule_of_python_numbers_is_told_what_to_write(rate):
    with pytest.raises(fz.errors.TraceError) as caught:
        fz.lower(
            fz.train_step(lambda p, x: (x @ p["w"]).mean(), optim.sgd(rate)),
            fz.AbstractMesh(data=1),
            {"w": torch.zeros(4, 4)},
            torch.zeros(2, 4),
        )
    fix = str(caught.value).splitlines()[-1]
    assert (
        "test_optimizers.py" in str(caught.value)
        and "torch.clamp(step / 100, max=1)" in fix
        and "torch.cos for math.cos" in fix
        and "momentum" not in fix
    )


NAN = math.nan
KEY = fz.random.key(0)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: optim.clip_by_global_norm("1"), "max_norm='1': must be a Python number"),
    (lambda: optim.clip_by_global_norm(torch.ones(())), "max_norm=float32[]"),
    (lambda: optim.clip_by_global_norm(True), "max_norm=True"),
    (lambda: optim.clip_by_global_norm(NAN), "max_norm=nan: must be greater than 0"),
    (lambda: optim.clip_by_global_norm(-1.0), "max_norm=-1.0: must be greater than 0"),
    (lambda: optim.sgd(math.inf), "lr=inf: must be at least 0 and finite"),
    (lambda: optim.sgd(0.1, momentum=None), "momentum=None: must be a Python number"),
    (lambda: optim.sgd(0.1, 0.9, nesterov="yes"), "nesterov='yes': must be True or False"),
    (lambda: optim.trace(0.9, nesterov=1), "nesterov=1"),
    (lambda: optim.adamw(1e-3, b1="x", eps=None, weight_decay=NAN), "b1='x'"),
    (lambda: optim.adamw(lambda: 1e-3), "must be a function of (step)"),
    (lambda: optim.lion(1e-3, mask="no"), "mask='no': a tree of bools, or a function of (path, leaf)"),
    (lambda: optim.lamb(1e-3, eps="a"), "eps='a'"),
    (lambda: optim.scale("2"), "factor='2'"),
    (lambda: optim.scale_by_schedule(3), "schedule=3: must be a function of (step)"),
    (
        lambda: optim.add_decayed_weights(0.1, mask=lambda p: True),
        "mask=<lambda>(p): must be a function of (path, leaf)",
    ),
    (lambda: optim.masked(3, True), "inner=3: not an optimizer"),
    (lambda: optim.masked(optim.sgd(0.1), 3), "mask=3"),
    (lambda: optim.partition([optim.sgd(0.1)], lambda path, leaf: 0), "a dict of label -> optimizer"),
    (lambda: optim.partition({"a": 3}, lambda path, leaf: "a"), "transformations['a']=3: not an optimizer"),
    (lambda: optim.constant(None), "value=None"),
    (lambda: optim.linear("a", 0, "10"), "steps='10': must be a Python number"),
    (lambda: optim.cosine(1, NAN, 3), "end=nan"),
    (lambda: optim.warmup_cosine(1, "10", 100), "warmup_steps='10'"),
    (lambda: optim.warmup_stable_decay(1, 10, None, 100), "decay_steps=None"),
    (lambda: optim.warmup_lr(0, 1, "x"), "warmup_steps='x'"),
    (lambda: optim.warmup_decay_lr("x"), "total_steps='x'"),
    (lambda: optim.stochastic_round(3, torch.ones(2)), "a key is a tensor, not int"),
    (lambda: optim.stochastic_round(KEY, 3), "rounds float32, not int"),
]


def test_a_schedule_returns_one_number() -> None:
    for schedule in (lambda step: torch.ones(2) * step, lambda step: None, lambda step: "1"):
        for make in (optim.sgd, optim.adamw, optim.lion, optim.lamb, optim.scale_by_schedule):
            step = fz.train_step(loss_fn, make(schedule))
            for act in (
                lambda step=step: step(step.init(PARAMS), BATCH),
                lambda step=step: fz.lower(step, ONE, PARAMS, BATCH),
            ):
                raises(
                    FzeroError,
                    act,
                    f"fzero.optim.{'scale_by_learning_rate' if make in (optim.sgd, optim.lamb) else make.__name__}",
                    "<lambda>(step): ",
                )
    scheduled, constant = (fz.train_step(loss_fn, optim.sgd(rate)) for rate in (lambda step: 0.05, 0.05))
    found, want = (step(step.init(PARAMS), BATCH)[0].params["w"] for step in (scheduled, constant))
    assert torch.equal(found, want) and not torch.equal(found, PARAMS["w"])


def test_wrong_kinds_of_arguments_are_named() -> None:
    for call, words in WRONG:
        raises(FzeroError, call, words)
    three = raises(FzeroError, lambda: optim.adamw(1e-3, b1="x", eps=None, weight_decay=NAN), "b1='x'")  # type: ignore[arg-type]
    assert three.count("\n  ") == 3, "all at once"
    optim.clip_by_global_norm(math.inf)
    optim.warmup_cosine(1.0, 0.5, 9.5)
