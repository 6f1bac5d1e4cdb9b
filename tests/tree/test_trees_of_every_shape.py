"""Trees of every shape through the whole machine: parameters and batches as users have them, whole on 2 ranks and as
shards on 1 and on 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import STAGES, part

import fzero as fz
from fzero import optim

NUM_STEPS = 4


class Pair(NamedTuple):
    w: Any
    b: Any


@dataclasses.dataclass
class Dense:
    w: torch.Tensor
    b: torch.Tensor | None
    extra: Any = None


@dataclasses.dataclass
class Case:
    """`make()` gives params; `batch(step)` a global batch of 6 rows."""

    make: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Callable[[int], Any]
    trainable: Callable[[str, torch.Tensor], bool] | None = None


def rand(*shape: int, seed: int = 0, scale: float = 0.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))) * scale


def rows(step: int, width: int = 4) -> torch.Tensor:
    return rand(6, width, seed=100 + step, scale=1.0)


@fz.block
def dense(p, x):
    return torch.tanh(x @ p["w"].T + p["b"])


def tied_params() -> Any:
    shared, inner = rand(4, 4), rand(4, seed=3)
    return {"a": shared, "z": [{"w": shared, "b": inner}, {"w": rand(4, 4, seed=5), "b": inner}]}


def tied_loss(p, x):
    x = x @ p["a"]
    for q in p["z"]:
        x = dense(q, x)
    return (x * p["a"].sum(0)).pow(2).mean()


def unused_loss(p, x):
    return dense({"w": p["used"], "b": p["also"]}, x).pow(2).mean()


def frozen_loss(p, x):
    for q in p["layers"]:
        x = dense(q, x)
    return (x * p["gain"]).pow(2).mean()


def scalar_loss(p, x):
    return ((x * p["gain"] + p["shift"]).sin() * p["deep"]["temperature"].exp()).pow(2).mean() + p["one"].sum() ** 2


def odd_loss(p, x):
    x = torch.cat([x, x[:, :3]], 1) * p["seven"] + p["two"].sum() * p["one"]
    return torch.tanh(x @ p["w"]).pow(2).mean() + p["empty"].sum()


def integer_loss(p, x):
    return (x[:, p["order"]] @ p["w"] + p["table"][p["order"]].sum() + p["flags"].sum()).pow(2).mean()


def containers_loss(p, x):
    x = torch.tanh(x @ p.w["first"].w + p.w["first"].b)
    x = x @ p.b[0].w
    assert p.b[0].b is None and p.b[1] is None and p.b[0].extra == {}
    return (x + p.b[2][0]).pow(2).mean()


def dtypes_loss(p, x):
    return (x.double() @ p["double"] + p["single"]).pow(2).mean().float()


def order_loss(p, x):
    return (x @ p["a"] + p["c"] * p["b"]).pow(2).mean()


def strided_loss(p, batch):
    return (batch["x"] @ p["w"] + p["b"] + batch["y"]).pow(2).mean() + (p["v"] * p["v"]).mean()


def same_loss(p, batch):
    return ((batch["x"] @ p["w"]) * batch["z"]["x"].sin()[:, :3]).pow(2).mean() + batch["n"] * p["w"].mean()


def tuple_loss(p, batch):
    x, (y, nothing) = batch
    assert nothing is None
    return (x @ p - y).pow(2).mean()


def strided_params() -> Any:
    return {"w": rand(3, 4).T, "b": rand(6)[::2], "v": rand(2, 5, 4).permute(2, 0, 1)}


def strided_batch(step: int) -> Any:
    return {"x": rand(4, 6, seed=step).T, "y": rand(6, 6, seed=step)[:, ::2]}


def same_batch(step: int) -> Any:
    x = rows(step)
    return {"x": x, "z": {"x": x}, "n": torch.tensor(float(step))}


def w_only(path: str, leaf: torch.Tensor) -> bool:
    return path.endswith("['w']") and "[1]" in path


CASES = {
    "tied": Case(tied_params, tied_loss, rows),
    "unused": Case(
        lambda: {"used": rand(4, 4), "also": rand(4), "never": rand(5, 3), "nor": [rand(2)]}, unused_loss, rows
    ),
    "frozen": Case(
        lambda: {"layers": [{"w": rand(4, 4, seed=i), "b": rand(4, seed=i)} for i in range(3)], "gain": rand(4)},
        frozen_loss,
        rows,
        w_only,
    ),
    "tied and frozen": Case(tied_params, tied_loss, rows, lambda path, leaf: path != "params['z'][1]['w']"),
    "scalars": Case(
        lambda: {
            "gain": torch.tensor(0.7),
            "shift": torch.tensor(0.1),
            "deep": {"temperature": torch.tensor(-0.2)},
            "one": torch.tensor([0.3]),
        },
        scalar_loss,
        rows,
    ),
    "odd": Case(
        lambda: {"seven": rand(7), "two": rand(2), "one": rand(1), "w": rand(7, 5), "empty": torch.zeros(0, 3)},
        odd_loss,
        rows,
    ),
    "integers": Case(
        lambda: {
            "order": torch.tensor([2, 0, 3, 1]),
            "table": rand(4),
            "w": rand(4, 3),
            "flags": torch.tensor([True, False, True]),
        },
        integer_loss,
        rows,
    ),
    "containers": Case(
        lambda: Pair({"first": Dense(rand(4, 5), rand(5))}, [Dense(rand(5, 3), None, {}), None, (rand(3),)]),
        containers_loss,
        rows,
    ),
    "dtypes": Case(lambda: {"double": rand(4, 3).double(), "single": rand(3)}, dtypes_loss, rows),
    "insertion order": Case(lambda: {"c": rand(3, seed=1), "a": rand(4, 3), "b": rand(3, seed=2)}, order_loss, rows),
    "strides": Case(strided_params, strided_loss, strided_batch),
    "shared batch": Case(lambda: {"w": rand(4, 3)}, same_loss, same_batch),
    "tuple batch": Case(lambda: rand(4, 3), tuple_loss, lambda step: (rows(step), (rows(step, 3), None))),
}


def optimizer() -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-2))


def run_trees(names: list[str], stage: int) -> list[Any]:
    return [run_tree(fz.make_mesh(data=-1), CASES[name], stage) for name in names]


def run_tree(mesh: fz.Mesh, case: Case, stage: int) -> Any:
    train = fz.compile(
        STAGES[stage](fz.train_step(case.loss, optimizer(), trainable=case.trainable)), mesh, backend="eager"
    )
    state = train.init(case.make())
    resting = [tuple(x.shape) for x in fz.tree.leaves(state.params)]
    losses = []
    for step in range(NUM_STEPS):
        state, metrics = train(state, part(case.batch(step), mesh))
        losses.append(metrics["loss"])
    whole = train.gather(state)
    return torch.stack(losses), whole, _ties(state.params), _ties(whole.params), resting


def _ties(tree: Any) -> list[int]:
    leaves = fz.tree.leaves(tree)
    return [next(j for j, y in enumerate(leaves) if y is x) for x in leaves]


def run_plain(case: Case) -> Any:
    step = fz.train_step(case.loss, optimizer(), trainable=case.trainable)
    state, losses = step.init(case.make()), []
    for i in range(NUM_STEPS):
        state, metrics = step(state, case.batch(i))
        losses.append(metrics["loss"])
    return torch.stack(losses), state


@pytest.mark.full(keep=["1-3"])
@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 3), (3, 0), (3, 3)])
def test_any_tree(run_or_call, num_ranks, stage):
    names = list(CASES)
    for results in run_or_call(num_ranks, run_trees, names, stage):
        for name, (losses, whole, ties, whole_ties, resting) in zip(names, results, strict=True):
            want, state = run_plain(CASES[name])
            torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
            assert fz.tree.paths(whole) == fz.tree.paths(state), name
            for path, a, b in zip(fz.tree.paths(state), fz.tree.leaves(whole), fz.tree.leaves(state), strict=True):
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name, path=path: f"{name} {path}: {m}"
                )
            assert ties == whole_ties == _ties(state.params) == _ties(CASES[name].make()), name
            for shape, leaf in zip(resting, fz.tree.leaves(state.params), strict=True):
                sharded = stage == 3 and num_ranks > 1 and leaf.numel() >= num_ranks
                assert shape == ((-(-leaf.numel() // num_ranks),) if sharded else tuple(leaf.shape)), name


def test_the_gradient_of_a_tied_leaf_is_the_sum_over_its_places():
    params, step = tied_params(), fz.train_step(tied_loss, optim.sgd(1.0))
    state, _ = step(step.init(params), rows(0))
    shared = params["a"].clone().requires_grad_()
    inner = params["z"][0]["b"].clone().requires_grad_()
    tied_loss(
        {"a": shared, "z": [{"w": shared, "b": inner}, {"w": params["z"][1]["w"], "b": inner}]}, rows(0)
    ).backward()
    torch.testing.assert_close(state.params["a"], (shared - shared.grad).detach())
    torch.testing.assert_close(state.params["z"][1]["b"], (inner - inner.grad).detach())
    assert state.params["a"] is state.params["z"][0]["w"]


def test_a_frozen_leaf_has_no_state_and_does_not_move():
    case = CASES["frozen"]
    step = fz.shard_params(fz.train_step(case.loss, optimizer(), trainable=case.trainable))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    params = case.make()
    state = train.init(params)
    moments = [p for p in fz.tree.paths(state.opt_state) if p.endswith(("['w']", "['b']", "['gain']"))]
    # mu and nu of the one trained leaf
    assert len(moments) == 2 and all(p.endswith("['layers'][1]['w']") for p in moments)
    state, _ = train(state, rows(0))
    moved = [
        p
        for p, a, b in zip(fz.tree.paths(params), fz.tree.leaves(params), fz.tree.leaves(state.params), strict=True)
        if not torch.equal(a, b)
    ]
    assert moved == ["['layers'][1]['w']"]
    assert not [line for line in str(train.program).splitlines() if "d_layers[0].w" in line]


def test_insertion_order_does_not_matter():
    lowered = [
        str(
            fz.lower(
                fz.shard_params(fz.train_step(order_loss, optimizer())), fz.AbstractMesh(data=2), params, rows(0)
            ).program
        )
        for params in ({"c": rand(3), "a": rand(4, 3), "b": rand(3)}, {"a": rand(4, 3), "b": rand(3), "c": rand(3)})
    ]
    assert lowered[0] == lowered[1]


def test_the_caller_keeps_its_tensors():
    """Donation is of the state, never of the parameters or the batch that were given."""
    params, batch = CASES["odd"].make(), rows(0)
    before, batch_before = fz.tree.map(torch.clone, params), batch.clone()
    train = fz.compile(fz.shard_params(fz.train_step(odd_loss, optimizer())), fz.make_mesh(data=1), backend="eager")
    state = train.init(params)
    for _ in range(2):
        state, _ = train(state, batch)
    assert all(torch.equal(a, b) for a, b in zip(fz.tree.leaves(before), fz.tree.leaves(params), strict=True))
    assert torch.equal(batch, batch_before)
    assert not torch.equal(state.params["seven"], params["seven"])
