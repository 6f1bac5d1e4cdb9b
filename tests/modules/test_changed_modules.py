"""A module that changes after `fz.functionalize` is refused by name; what changes nothing of a step is not."""

from __future__ import annotations

import copy
import dataclasses
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError

RATE = 1.0


class Config:
    def __init__(self) -> None:
        self.slope, self.note, self.widths = 1.0, "", [8, 8]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn, self.drop, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 3)
        self.temperature, self.config, self.act, self.seen = 1.0, Config(), torch.tanh, 0
        self.window, self.bias = 100, torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.window = min(self.window, x.shape[1])
        y = self.act(self.bn(self.a(x))) * self.config.slope * sum(self.config.widths) / 16
        return self.b(self.drop(y)) / self.temperature * RATE + self.bias


def loss(out: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(out, batch[1])


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def started(net: nn.Module, *transforms: Any) -> tuple[Any, Any, Any]:
    model = fz.functionalize(net)
    step = model.train_step(optim.sgd(0.1), loss)
    train = fz.compile(fz.compose(*transforms)(step) if transforms else step, fz.make_mesh(), backend="eager")
    return model, train, train.init(model.params)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def half(_m: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
    return out / 2


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frozen": (lambda n: n.a.requires_grad_(False), "a.weight.requires_grad: True then, False now\n"),
    "attribute": (lambda n: setattr(n, "temperature", 2.0), "temperature: 1.0 then, 2.0 now\n"),
    "plain tensor": (lambda n: setattr(n, "bias", torch.ones(3)), "bias: a tensor float32[3] then, another tensor"),
    "attribute of a layer": (lambda n: setattr(n.drop, "p", 0.9), "drop.p: 0.0 then, 0.9 now\n"),
    "attribute of a configuration": (lambda n: setattr(n.config, "slope", 3.0), "config.slope: 1.0 then, 3.0 now\n"),
    "item of a list": (lambda n: n.config.widths.append(8), "config.widths: a list of 2 then, a list of 3 now\n"),
    "function": (lambda n: setattr(n, "act", torch.relu), "act: tanh then, relu now\n"),
    "another layer": (lambda n: setattr(n, "b", nn.Linear(8, 3)), "b: a Linear then, another Linear now\n"),
    "wider layer": (lambda n: setattr(n, "b", nn.Linear(8, 5)), "b: a Linear then, another Linear now\n"),
    "other class": (
        lambda n: setattr(n.drop, "__class__", nn.Identity),
        "drop.__class__: Dropout then, Identity now\n",
    ),
    "forward hook": (lambda n: n.b.register_forward_hook(half), "b._forward_hooks: none then, half now\n"),
    "backward hook": (lambda n: n.b.register_full_backward_hook(half), "b._backward_hooks: none then, half now\n"),
    "gradient hook": (lambda n: n.b.weight.register_hook(half), "b.weight.hooks: none then, 1 hooks"),
    "statistics": (lambda n: n.bn.eval(), "bn.training: True then, False now\n"),
    "part in evaluation mode": (lambda n: n.eval().drop.train(), "bn.training: True then, False now\n"),
    "dtype": (lambda n: n.double(), "a.weight: a parameter float32[8, 6] then, a parameter float64[8, 6] now\n"),
    "tie": (
        lambda n: setattr(n.a, "bias", n.bn.bias),
        "bn.bias: a parameter float32[8] then, a parameter float32[8], tied",
    ),
    "parametrization": (lambda n: parametrize.register_parametrization(n.b, "weight", Double()), "b.__class__: Linear"),
    "forward": (lambda n: setattr(n.b, "forward", lambda x: x[:, :3]), "b.forward: none then, <lambda>"),
    "no bias": (lambda n: setattr(n.b, "bias", None), "b.bias: a parameter float32[3] then, None now\n"),
}


@pytest.mark.full(keep=["part in evaluation mode", "gradient hook", "other class"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_refused_by_name(what: str) -> None:
    change, says = CHANGES[what]
    net = Net()
    model, train, state = started(net)
    state, _ = train(state, batch())
    change(net)
    evaluate = fz.compile(model.eval_step(), fz.make_mesh(), backend="eager")
    for act in (
        lambda: train(state, batch()),
        lambda: evaluate(state.params, batch()[0]),
        lambda: model.apply(state.params, batch()[0], key=fz.random.key(0)),
        lambda: train.init(state.params),
    ):
        with pytest.raises(FzeroValueError, match=re.escape(says)) as error:
            act()
        assert "Net has changed since it was given to functionalize" in str(error.value)


class Slotted:
    __slots__ = ("note", "scale")

    def __init__(self) -> None:
        self.scale, self.note = 1.0, ""


class Fixed:
    scale = 1.0


class Named:
    def __init__(self) -> None:
        self._values, self.note = {"scale": 1.0}, ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return self._values[name]


@dataclasses.dataclass
class Data:
    of: float = 1.0
    note: str = ""

    @property
    def scale(self) -> float:
        return self.of


class Scaled(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.a, self.config = nn.Linear(6, 3), config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.config.scale


def set_scale(config: Any) -> None:
    config.scale = 3.0


CONFIGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "namespace": (lambda: types.SimpleNamespace(scale=1.0), set_scale, "config.scale: 1.0 then, 3.0 now\n"),
    "slots": (Slotted, set_scale, "config.scale: 1.0 then, 3.0 now\n"),
    "class": (lambda: Fixed, set_scale, "scale: 1.0 before, 3.0 now\n"),
    "class of an object": (Fixed, lambda c: set_scale(type(c)), "scale: 1.0 before, 3.0 now\n"),
    "set over its class": (Fixed, set_scale, "config.scale: none then, 3.0 now\n"),
    "__getattr__": (Named, lambda c: c._values.update(scale=3.0), "config._values['scale']: 1.0 then, 3.0 now\n"),
    "property": (Data, lambda c: setattr(c, "of", 3.0), "config.of: 1.0 then, 3.0 now\n"),
    "array": (
        lambda: types.SimpleNamespace(scale=np.ones(3, dtype=np.float32)),
        lambda c: c.scale.fill(3.0),
        "config.scale: a ndarray then, another ndarray now\n",
    ),
}


class Arrays(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * float(self.config.scale[0])


@pytest.mark.parametrize("what", CONFIGS)
def test_a_change_inside_an_attribute_is_refused(what: str) -> None:
    make, change, says = CONFIGS[what]
    config = make()
    try:
        _, train, state = started((Arrays if what == "array" else Scaled)(config))
        state, _ = train(state, batch())
        if not isinstance(config, (type, Fixed)):
            config.note = "nothing reads it"
            state, _ = train(state, batch())
        change(config)
        with pytest.raises(FzeroValueError, match=re.escape(says)):
            train(state, batch())
    finally:
        Fixed.scale = 1.0


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)


class Asking(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) if self.a.training else 3 * self.a(x))


class AskingItself(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) if self.training else 3 * self.a(x))


def test_the_mode_of_a_part_that_another_reads() -> None:
    for net, refused in ((Asking(), True), (AskingItself(), False)):
        _, train, state = started(net)
        state, _ = train(state, batch())
        net.a.eval()
        if refused:
            with pytest.raises(FzeroValueError, match=r"a\.training: True then, False now\n"):
                train(state, batch())
            net.a.train()
        train(state, batch())


@pytest.mark.parametrize("what", ["tie", "another layer", "wider layer", "no bias", "dtype"])
def test_write_back_into_a_changed_module_is_refused_alike(what: str) -> None:
    change, says = CHANGES[what]
    net = Net()
    model = fz.functionalize(net)
    params = fz.tree.map(torch.clone, model.params)
    change(net)
    before = {name: x.clone() for name, x in net.state_dict().items()}
    with pytest.raises(FzeroValueError, match=re.escape(says)):
        model.write_back(params)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_what_a_forward_reads_besides_is_refused_when_it_changes() -> None:
    global RATE
    try:
        _, train, state = started(Net())
        state, _ = train(state, batch())
        RATE = 2.0
        with pytest.raises(FzeroValueError, match=r"RATE: 1\.0 before, 2\.0 now"):
            train(state, batch())
    finally:
        RATE = 1.0


def test_what_changes_nothing_of_a_step_is_none() -> None:
    net = Net()
    model, train, state = started(net)
    losses = []
    for number in range(6):
        state, metrics = train(state, batch(number))
        losses.append(metrics["loss"].item())
        net.seen, net.config.note = number, f"step {number}"  # nothing reads them
        model.write_back(train.gather(state).params)
        with torch.no_grad():
            net.eval()(batch()[0][:, :6])
            net.a.weight.mul_(0.5)  # the state is a value
        handle = net.b.register_forward_hook(lambda m, x, out: None)
        net(batch()[0]).sum().backward()  # gradients are the module's own
        handle.remove()
        net.requires_grad_(False).requires_grad_(True)
        net.state_dict()
        net.zero_grad(set_to_none=False)
        net.float()
        if number % 2:
            net.train()
        net.load_state_dict(net.state_dict())
        net.a.weight = nn.Parameter(net.a.weight.detach().clone())
    _, train, state = started(Net())
    again = []
    for number in range(6):
        state, metrics = train(state, batch(number))
        again.append(metrics["loss"].item())
    assert losses == again


def test_the_ways_out_are_ways_out() -> None:
    """A state with the same leaves goes on in a step of the changed module; with others its weights do."""
    net, plain = Net(), Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, train, state = started(net)

    def stepped(number: int) -> tuple[float, float]:
        nonlocal state
        state, metrics = train(state, batch(number))
        value = loss(plain(batch(number)[0]), batch(number))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return metrics["loss"].item(), value.item()

    pairs = [stepped(0)]
    net.temperature = plain.temperature = 2.0
    model = fz.functionalize(net)
    train = fz.compile(model.train_step(optim.sgd(0.1), loss), fz.make_mesh(), backend="eager")
    pairs.append(stepped(1))
    model.write_back(train.gather(state).params)
    for x in (net, plain):
        x.a.requires_grad_(False)
    model, train, state = started(net)
    pairs += [stepped(2), stepped(3)]
    torch.manual_seed(1)
    model.write_back(train.gather(state).params)
    net.b = plain.b = nn.Linear(8, 3)
    net.b = copy.deepcopy(plain.b)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    model, train, state = started(net)
    pairs += [stepped(4), stepped(5)]
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_params_are_those_that_the_module_has_now() -> None:
    """Weights that are bound anew, or moved, before a state is made of them."""
    net, other = Net(), Net()
    model = fz.functionalize(net)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3.0)
    net.load_state_dict(other.state_dict(), assign=True)
    net.a.weight.data = other.a.weight.detach() * 2
    torch.testing.assert_close(model.params["b"]["weight"], other.b.weight.detach())
    torch.testing.assert_close(model.params["a"]["weight"], other.a.weight.detach() * 2)


def test_a_change_on_one_rank_is_every_rank_s_error(run_ranks: Any) -> None:
    assert run_ranks(2, changed_on_one) == [True, True]


def changed_on_one() -> bool:
    net = Net()
    _, train, state = started(net, fz.shard_params())
    state, _ = train(state, batch())
    if fz.make_mesh().rank == 1:
        net.temperature = 2.0
    with pytest.raises(fz.errors.FzeroError, match=r"temperature: 1\.0 then, 2\.0 now"):
        train(state, batch())
    return True


def test_a_look_costs_little() -> None:
    """A microsecond a submodule, and no more after a change that means nothing."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)) for _ in range(75)))
    model = fz.functionalize(net)
    worked_out: list[int] = []
    facts = model._original._facts

    def counted() -> Any:
        worked_out.append(1)
        return facts()

    model._original._facts = counted  # type: ignore[method-assign]
    for _ in range(5):
        assert not model.changes()
    assert not worked_out
    net.eval()
    for _ in range(5):
        assert not model.changes()
    assert len(worked_out) == 1
