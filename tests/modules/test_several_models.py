"""Several models in one run, as docs/guides/several-models.md has it, compared with plain loops of PyTorch on the
complete batch. tests/hf/test_preference_optimization.py does the same for DPO."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError

Found = tuple[list[float], dict[str, torch.Tensor]]
"""The losses of a run, and tensors after it."""


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        teacher = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 2))
        self.teacher = teacher.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            targets = self.teacher(x)
        return self.student(x), targets


def distillation_loss(out: Any, batch: Any) -> torch.Tensor:
    logits, targets = out
    soft = F.kl_div(logits.log_softmax(-1), targets.log_softmax(-1), reduction="batchmean", log_target=True)
    return 0.5 * soft + 0.5 * F.cross_entropy(logits, batch["y"])


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fake = self.generator(noise)
        frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
        fooled = torch.func.functional_call(self.critic, frozen, (fake,))
        return self.critic(real), self.critic(fake.detach()), fooled


def critic_loss(out: Any, batch: Any) -> torch.Tensor:
    return F.softplus(-out[0]).mean() + F.softplus(out[1]).mean()


def generator_loss(out: Any, batch: Any) -> torch.Tensor:
    return F.softplus(-out[2]).mean()


def label(path: str, leaf: torch.Tensor) -> str:
    return "generator" if "generator" in path else "critic"


def paused(optimizer: optim.GradientTransformation) -> optim.GradientTransformation:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(torch.zeros_like, grads), state

    return optim.GradientTransformation(optimizer.init, update)


def ema(decay: float) -> optim.GradientTransformation:
    def init(params: Any) -> Any:
        return {"ema": fz.tree.map(torch.clone, params)}

    def update(updates: Any, state: Any, params: Any) -> Any:
        averages = fz.tree.map(lambda a, p, u: decay * a + (1 - decay) * (p + u), state["ema"], params, updates)
        return updates, {"ema": averages}

    return optim.GradientTransformation(init, update)


def averaged(state: Any) -> Any:
    average = state.opt_state[1]["ema"]
    by_path = dict(zip(fz.tree.paths(average), fz.tree.leaves(average), strict=True))
    return fz.tree.map_with_path(lambda path, p: by_path.get(path, p), state.params)


def classes() -> dict[str, torch.Tensor]:
    x = torch.randn(8, 8)
    return {"x": x, "y": (x.sum(1) > 0).long()}


def setting(module: type[nn.Module]) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The module and nine batches, the same on every rank."""
    torch.manual_seed(0)
    net = module()
    points = lambda: {"real": torch.randn(8, 2) * 0.3 + 1, "noise": torch.randn(8, 4)}  # noqa: E731
    return net, [points() if module is GAN else classes() for _ in range(9)]


def compiled(step: Any) -> Any:
    return fz.compile(fz.shard_params(step), fz.make_mesh(data=-1), backend="eager")


def mine(batch: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    return {name: x.chunk(mesh.size)[mesh.rank] for name, x in batch.items()}


def run(steps: Callable[[Any], list[Any]], net: nn.Module, batches: list[Any]) -> tuple[list[float], Any, Any]:
    """The losses of compiled steps that take turns, and the last state, with the last step."""
    model = fz.functionalize(net)
    trains = [compiled(step) for step in steps(model)]
    state, losses = trains[0].init(model.params), []
    for i, batch in enumerate(batches):
        state, metrics = trains[i % len(trains)](state, mine(batch, trains[0].mesh))
        losses.append(float(metrics["loss"]))
    model.write_back(trains[0].gather(state).params)
    return losses, state, trains[0]


def plain(net: nn.Module, batches: list[Any], turns: list[tuple[Any, torch.optim.Optimizer]]) -> list[float]:
    losses = []
    for i, batch in enumerate(batches):
        fn, optimizer = turns[i % len(turns)]
        inputs = (batch["real"], batch["noise"]) if isinstance(net, GAN) else (batch["x"],)
        loss = fn(net(*inputs), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def distillation() -> Found:
    net, batches = setting(Distillation)
    losses, _, _ = run(lambda m: [m.train_step(optim.adamw(1e-2, eps=1e-5), distillation_loss)], net, batches)
    return losses, net.state_dict()


def plain_distillation() -> Found:
    net, batches = setting(Distillation)
    adamw = torch.optim.AdamW(net.student.parameters(), 1e-2, eps=1e-5)
    return plain(net, batches, [(distillation_loss, adamw)]), net.state_dict()


def turns_of(model: Any) -> list[Any]:
    generator, critic = optim.adam(1e-3, eps=1e-5), optim.adam(4e-3, eps=1e-5)
    of_critic = optim.partition({"generator": paused(generator), "critic": critic}, label)
    of_generator = optim.partition({"generator": generator, "critic": paused(critic)}, label)
    step = model.train_step(of_critic, critic_loss)
    return [step, step, model.train_step(of_generator, generator_loss)]


def gan_in_turns() -> Found:
    net, batches = setting(GAN)
    losses, state, train = run(turns_of, net, batches)
    moments = {name: part.mu[name] for name, part in train.gather(state).opt_state.inner_states.items()}
    return losses, net.state_dict() | {f"moments.{n}": x for n, x in fz.tree.with_names(moments)}


def plain_gan_in_turns() -> Found:
    net, batches = setting(GAN)
    generator = torch.optim.Adam(net.generator.parameters(), 1e-3, eps=1e-5)
    critic = torch.optim.Adam(net.critic.parameters(), 4e-3, eps=1e-5)
    turns = [(critic_loss, critic), (critic_loss, critic), (generator_loss, generator)]
    losses = plain(net, batches, turns)
    states = {**generator.state, **critic.state}
    moments = {f"moments.{name}": states[p]["exp_avg"] for name, p in net.named_parameters()}
    return losses, net.state_dict() | moments


def gan_at_once() -> Found:
    net, batches = setting(GAN)
    parts = {"generator": optim.adam(1e-3, eps=1e-5), "critic": optim.adam(4e-3, eps=1e-5)}
    both = lambda out, batch: critic_loss(out, batch) + generator_loss(out, batch)  # noqa: E731
    losses, _, _ = run(lambda m: [m.train_step(optim.partition(parts, label), both)], net, batches)
    return losses, net.state_dict()


def plain_gan_at_once() -> Found:
    net, batches = setting(GAN)
    groups = [{"params": net.generator.parameters(), "lr": 1e-3}, {"params": net.critic.parameters(), "lr": 4e-3}]
    both = lambda out, batch: critic_loss(out, batch) + generator_loss(out, batch)  # noqa: E731
    return plain(net, batches, [(both, torch.optim.Adam(groups, eps=1e-5))]), net.state_dict()


def average() -> Found:
    net, batches = setting(Distillation)
    model = fz.functionalize(net)
    optimizer = optim.chain(optim.adamw(1e-2, eps=1e-5), ema(0.8))
    losses, state, train = run(lambda m: [m.train_step(optimizer, distillation_loss)], net, batches)
    evaluate = compiled(
        model.eval_step(lambda out, b: fz.weighted(distillation_loss(out, b) * len(b["y"]), len(b["y"])))
    )
    losses.append(float(evaluate(averaged(state), mine(batches[0], train.mesh))))
    model.write_back(train.gather(state._replace(params=averaged(state))).params)
    return losses, net.state_dict()


def plain_average() -> Found:
    net, batches = setting(Distillation)
    averages, losses = copy.deepcopy(net), []
    adamw = torch.optim.AdamW(net.student.parameters(), 1e-2, eps=1e-5)
    for batch in batches:
        losses += plain(net, [batch], [(distillation_loss, adamw)])
        with torch.no_grad():
            for a, p in zip(averages.student.parameters(), net.student.parameters(), strict=True):
                a.lerp_(p, 0.2)
    with torch.no_grad():
        losses.append(float(distillation_loss(averages(batches[0]["x"]), batches[0])))
    return losses, averages.state_dict()


RUNS = {
    "distillation": (distillation, plain_distillation),
    "GAN in turns": (gan_in_turns, plain_gan_in_turns),
    "GAN at once": (gan_at_once, plain_gan_at_once),
    "average": (average, plain_average),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_tensors_are_those_of_a_plain_loop(run_ranks: Any, name: str, ranks: int) -> None:
    ours, theirs = RUNS[name]
    want_losses, want = theirs()
    for losses, tensors in [ours()] if ranks == 1 else run_ranks(2, ours):
        torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-5)
        assert tensors.keys() == want.keys()
        for path, x in want.items():
            torch.testing.assert_close(tensors[path], x, rtol=1e-5, atol=1e-5, msg=path)


def test_a_model_whose_optimizer_is_paused_keeps_its_tensors() -> None:
    net, batches = setting(GAN)
    model = fz.functionalize(net)
    step, _, other = turns_of(model)
    for turn, rests in ((step, "generator"), (other, "critic")):
        train = compiled(turn)
        state = train.gather(train(train.init(model.params), batches[0])[0])
        old, new = (dict(fz.tree.with_names(params)) for params in (model.params, state.params))
        assert {name.split(".")[0] for name in old if torch.equal(old[name], new[name])} == {rests}
        assert not any(x.any() for x in fz.tree.leaves(state.opt_state.inner_states[rests]))


@pytest.mark.parametrize("after", [(), (ema(0.9),)])
def test_a_mask_that_passes_gradients_on_is_an_error(after: Any) -> None:
    """The gradients of the other model would be added to its parameters."""
    net, batches = setting(GAN)
    model = fz.functionalize(net)
    masked = optim.masked(optim.adam(1e-3), lambda path, leaf: "generator" in path)
    optimizer = optim.chain(masked, *after) if after else masked
    both = lambda out, batch: critic_loss(out, batch) + generator_loss(out, batch)  # noqa: E731
    step = model.train_step(optimizer, both)
    said = r"(?s)unchanged gradient.*params\['critic'\]\['0'\]\['bias'\].*Fix: .*optim.partition"
    for run_it in (
        lambda: fz.lower(step, fz.AbstractMesh(data=1), model.params, batches[0]),
        lambda: step(step.init(model.params), batches[0]),
    ):
        with pytest.raises(FzeroValueError, match=said) as caught:
            run_it()
        assert "generator" not in str(caught.value).split("Fix:")[0]
    # no gradient reaches the generator: there is nothing to pass on
    masked = optim.masked(optim.adam(1e-3), lambda path, leaf: "critic" in path)
    fz.lower(model.train_step(masked, critic_loss), fz.AbstractMesh(data=1), model.params, batches[0])
