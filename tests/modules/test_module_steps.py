"""Steps made of modules: what is given for a module, its parameters and its batches, and unusual modules, which train
as in PyTorch."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rejections import FEATURES, LABELS, Net, of_labels, own_loss
from torch import nn

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.masks = {"x": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.masks["x"])


def _trained(module: nn.Module, *batches: Any, loss: Any = of_labels, **settings: Any) -> tuple[list[float], Any]:
    """The losses of a step for each batch, and the parameters behind them, by name."""
    model = fz.functionalize(module, **settings)
    train = fz.compile(fz.shard_params()(model.train_step(optim.sgd(0.1), loss)), fz.make_mesh(), backend="eager")
    state, losses = train.init(model.params), []
    for batch in batches:
        state, metrics = train(state, batch)
        losses.append(metrics["loss"].item())
    return losses, model._calls.flat(train.gather(state).params)


def _scripted() -> nn.Module:
    net = Net()
    net.a = torch.jit.script(net.a)
    return net


def _train(batch: Any) -> Any:
    return lambda: _trained(Net(), batch)


def _init_of_a_state_dict() -> None:
    net = Net()
    step = fz.functionalize(net).train_step(optim.sgd(0.1), of_labels)
    fz.compile(step, fz.make_mesh(), backend="eager").init(net.state_dict())


def _plain_init_of_a_state_dict() -> None:
    net = Net()
    step = fz.functionalize(net).train_step(optim.sgd(0.1), of_labels)
    step(step.init(net.state_dict()), (FEATURES, LABELS))


def _anomaly() -> None:
    with torch.autograd.set_detect_anomaly(True):
        _trained(Net(), (FEATURES, LABELS))


SAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a module for a step": (
        lambda: fz.compile(Net(), fz.make_mesh()),  # type: ignore[arg-type]
        ("fzero.compile: compiles a step, not Net", "Fix: fz.functionalize(module).train_step(optimizer"),
    ),
    "a model for a step": (
        lambda: fz.shard_params(fz.functionalize(Net())),
        ("transforms a step, not Functional", "Fix: a model makes its own step: model.train_step(optimizer)"),
    ),
    "init of a state dict": (
        _init_of_a_state_dict,
        ("params['a.bias']: float32[8], not in the model", "give model.params"),
    ),
    "the plain step's": (
        _plain_init_of_a_state_dict,
        ("these are the tensors of a module", "params['a.bias'], not params['a']['bias']", "give model.params"),
    ),
    "a mapping": (_train(UserDict({"x": FEATURES})), ("batch: UserDict\nFix: give dict(batch) for a UserDict",)),
    "an array": (_train((FEATURES.numpy(), LABELS)), ("batch[0]: ndarray\nFix: give torch.as_tensor(x) for an array",)),
    "numbers": (_train((FEATURES, [0, 1, 2.5])), ("batch[1][2]: float\nFix: give torch.as_tensor(x) for a number",)),
    "an array and a sparse tensor": (
        _train((np.ones(3), FEATURES.to_sparse())),
        ("Fix: give torch.as_tensor(x) for an array, x.to_dense();",),
    ),
    "no rows": (
        lambda: _trained(Net(), (FEATURES[:0], FEATURES[:0, :3]), loss=lambda out, batch: F.mse_loss(out, batch[1])),
        ("an empty batch\n", "batch[0]: float32[0, 4]\n  batch[1]: float32[0, 3]"),
    ),
    "a label that no class has": (
        lambda: _trained(Net(), (FEATURES, LABELS + 1)),
        ("Target 3 is out of bounds", "\n  batch[1]: int64[6], from 1 to 3\nFix: labels are from 0"),
    ),
    "an id that no row has": (
        lambda: _trained(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3)), (LABELS + 1, LABELS)),
        ("index out of range", "\n  batch[0]: int64[6], from 1 to 3\n  batch[1]: int64[6], from 0 to 2\n"),
    ),
    "a tensor in a dict of a module": (
        lambda: _trained(Masked(), (FEATURES, LABELS)),
        ("reads a tensor that is not one of its arguments", "one in a list or dict: self.register_buffer(name, x)"),
    ),
    "anomaly mode": (_anomaly, ("anomaly mode (torch.autograd.set_detect_anomaly)",)),
    "TorchScript": (lambda: fz.functionalize(_scripted()), ("TorchScript runs", "  a (Linear)\n")),
    "a lazy module": (
        lambda: fz.functionalize(nn.Sequential(nn.LazyLinear(5), nn.ReLU())),
        ("lazy modules", "  0 (LazyLinear): weight, bias\nFix: run one forward before"),
    ),
    "a trained parameter is mutable": (
        lambda: fz.functionalize(Net(), mutable=["a.*"]),
        ("'a", "'\n  a.weight: requires a gradient,", "requires_grad_(False) freezes"),
    ),
}


@pytest.mark.parametrize("name", SAYS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_an_error_names_the_cause_and_a_way_out(name: str) -> None:
    act, says = SAYS[name]
    with pytest.raises(FzeroError) as raised:
        act()
    assert all(text in str(raised.value) for text in says), str(raised.value)


def _in_pytorch(module: nn.Module, *batches: Any, loss: Any = of_labels) -> tuple[list[float], dict[str, torch.Tensor]]:
    sgd, losses = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1), []
    for batch in batches:
        value = loss(module(batch[0] if isinstance(batch, tuple) else batch), batch)
        sgd.zero_grad()
        value.backward()
        sgd.step()
        losses.append(value.item())
    return losses, module.state_dict()


def _same(module: nn.Module, *batches: Any, loss: Any = of_labels, **settings: Any) -> None:
    ours, params = _trained(copy.deepcopy(module), *batches, loss=loss, **settings)
    theirs, want = _in_pytorch(module, *batches, loss=loss)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for name, x in want.items():
        torch.testing.assert_close(params[name], x, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_lazy_module_trains_once_it_has_run() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 3))
    net(FEATURES)
    _same(net, (FEATURES, LABELS), (FEATURES, LABELS))


def test_the_plain_step_runs_in_anomaly_mode() -> None:
    step = fz.functionalize(Net()).train_step(optim.sgd(0.1), of_labels)
    with torch.autograd.set_detect_anomaly(True):
        _, metrics = step(step.init(fz.functionalize(Net()).params), (FEATURES, LABELS))
    assert metrics["finite"]


class Byol(nn.Module):
    """A student and its average, which the forward itself updates."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            target = self.teacher(x + 0.5)
        return (self.student(x) - target).square().mean()


def test_a_teacher_that_the_forward_updates_is_named() -> None:
    with pytest.raises(
        FzeroError, match=r"params\['teacher'\]\['0'\]\['weight'\]: (.|\n)*functionalize\(mutable=\['tea"
    ):
        _trained(Byol(), FEATURES, loss=own_loss)


def _byol() -> tuple[list[float], Any]:
    torch.manual_seed(0)
    rows = 6 // fz.make_mesh().size
    part = slice(fz.make_mesh().rank * rows, (fz.make_mesh().rank + 1) * rows)
    return _trained(Byol(), *(FEATURES[part] + i for i in range(3)), loss=own_loss, mutable=["teacher.*"])


@pytest.mark.full(keep=["1"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_teacher_that_the_forward_updates_trains_as_in_pytorch(run_or_call: Any, ranks: int) -> None:
    torch.manual_seed(0)
    want, params = _in_pytorch(Byol(), *(FEATURES + i for i in range(3)), loss=own_loss)
    for losses, found in run_or_call(ranks, _byol):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-6)
        for name, x in params.items():
            torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-6)


def _observed(settings: str) -> nn.Module:
    from torch.ao import quantization

    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).train()
    net.qconfig = quantization.get_default_qat_qconfig(settings)
    return quantization.prepare_qat(net)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")
def test_observers_that_have_no_sizes_yet_are_refused_and_train_once_they_have() -> None:
    with pytest.raises(
        FzeroError, match=r"changes the size of its arguments (.|\n)*running_min: float32\[0\](.|\n)*qnn"
    ):
        _trained(_observed("fbgemm"), (FEATURES, LABELS))
    _same(_observed("qnnpack"), (FEATURES, LABELS), (FEATURES + 1, LABELS))
    net = _observed("fbgemm")
    net(FEATURES)
    _same(net, (FEATURES, LABELS), (FEATURES + 1, LABELS))


class Curvature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def value(v: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(v).tanh().pow(2)).squeeze()

        return torch.func.vmap(torch.func.hessian(value))(x).square().mean()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated", "ignore:The .grad attribute of a Tensor that")
def test_a_hessian_of_each_row_trains_as_in_pytorch() -> None:
    torch.manual_seed(0)
    _same(Curvature(), FEATURES, FEATURES + 1, loss=own_loss)


def _norms() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.BatchNorm1d(4, momentum=None, affine=False), *layers, nn.Linear(4, 3))


def test_batch_norms_that_average_over_all_batches_train_as_in_pytorch() -> None:
    _same(_norms(), (FEATURES, LABELS), (2 * FEATURES - 1, LABELS), (FEATURES + 1, LABELS))


def test_batch_norms_that_average_evaluate_as_in_pytorch() -> None:
    net, model = _norms(), fz.functionalize(_norms())
    train = fz.compile(model.train_step(optim.sgd(0.1), of_labels), fz.make_mesh(), backend="eager")
    evaluate = fz.compile(model.eval_step(), fz.make_mesh(), backend="eager")
    state = train.init(model.params)
    for batch in ((FEATURES, LABELS), (FEATURES + 1, LABELS)):
        state, _ = train(state, batch)
        _in_pytorch(net, batch)
    torch.testing.assert_close(evaluate(state.params, FEATURES), net.eval()(FEATURES), rtol=1e-5, atol=1e-6)
