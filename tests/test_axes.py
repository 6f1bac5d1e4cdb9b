"""ZeRO over two axes, hop by hop: equal to one process, to ZeRO over one axis, and, where nothing but where bytes lie differs, to the bit."""

from __future__ import annotations

from typing import Any

import torch

import fzero as fz
from fzero import optim

AXES = {"node": 2, "data": 2}
BOTH = ("data", "node")


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"] + p["bias"]) @ p["down"]


def loss_fn(params, batch):
    for p in params["layers"]:
        batch = layer(p, batch)
    return (batch * params["scale"]).square().sum(1).mean()


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers: what they add up to is exact, whatever the order."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def params(width: int = 5) -> Any:
    """Nothing divides by 4: 55, 11 and 5 elements."""
    hidden = 2 * width + 1
    make = lambda i: {"up": whole((width, hidden), i), "bias": whole((hidden,), i + 3), "down": whole((hidden, width), i + 7)}  # noqa: E731
    return {"layers": [make(i) for i in range(2)], "scale": torch.full((width,), 0.5)}


def drawn(key: torch.Tensor) -> Any:
    """Leaves of which some have blocks of 256 elements, and one fewer than there are ranks."""
    keys = fz.random.split(key, 3)
    return {
        "layers": [{"up": fz.random.normal(keys[0], (72, 70)) / 8, "bias": torch.zeros(70), "down": fz.random.normal(keys[1], (70, 72)) / 8}],
        "scale": fz.random.normal(keys[2], (1,)),
    }


def clipped() -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def weights(path: str, leaf: Any) -> bool:
    return "bias" not in path


WAYS: dict[str, list[Any]] = {
    "params": [fz.shard_params(axis=BOTH)],
    "grads": [fz.shard_grads(axis=BOTH)],
    "opt_state": [fz.shard_opt_state(axis=BOTH)],
    "node first": [fz.shard_params(axis=("node", "data"))],
    "params by data": [fz.shard_params(axis="data"), fz.shard_opt_state(axis=BOTH)],
    "grads by data": [fz.shard_grads(axis="data"), fz.shard_opt_state(axis=BOTH)],
    "params and grads": [fz.shard_params(axis="data"), fz.shard_grads(axis=BOTH)],
    "some by data": [fz.shard_params(axis="data", where=weights), fz.shard_opt_state(axis=BOTH, where=lambda path, leaf: "down" in path)],
}


def step(way: str, num_micro: int = 1, optimizer: Any = None, *more: Any) -> fz.Step:
    out = fz.compose(*WAYS[way], *more)(fz.train_step(loss_fn, optimizer or clipped()))
    return fz.accumulate(num_micro)(out) if num_micro > 1 else out


def trained(mesh: fz.Mesh, step: fz.Step, batches: list[torch.Tensor], init: Any = None) -> tuple[list[float], Any]:
    train = fz.compile(step, mesh, backend="eager")
    state, losses = train.init(init or params()), []
    for batch in batches:
        state, metrics = train(state, batch[mesh.rank * 4 :][:4])
        losses.append(metrics["loss"].item())
    return losses, train.gather(state)


def wrong(cases: list[tuple[str, int]]) -> list[Any]:
    """On every rank: the cases that are not what one process does with the whole batch. Sums of whole numbers to the bit, training to 1e-6."""
    mesh, out = fz.make_mesh(**AXES), []
    for optimizer, tolerance, batches in ((optim.sgd(0.25), 0.0, [whole((16, 5), 100)]), (clipped(), 1e-6, [whole((16, 5), s) for s in range(3)])):
        plain = fz.train_step(loss_fn, optimizer)
        want = plain.init(params())
        for batch in batches:
            want, metrics = plain(want, batch)
        for case in cases:
            losses, got = trained(mesh, step(*case, optimizer), batches)
            pairs = zip(fz.tree.leaves((got.params, got.opt_state)), fz.tree.leaves((want.params, want.opt_state)), strict=True)
            off = max((a - b).norm().item() / max(b.norm().item(), 1e-9) for a, b in pairs if a.is_floating_point())
            if off > 10 * tolerance or abs(losses[-1] - metrics["loss"].item()) > tolerance * abs(losses[-1]):
                out.append((*case, tolerance, off, losses[-1], metrics["loss"].item()))
    return out


def test_training_is_that_of_one_process(run_ranks):
    cases = [(way, num_micro) for way in WAYS for num_micro in (1, 2)]
    assert run_ranks(4, wrong, cases) == [[]] * 4
