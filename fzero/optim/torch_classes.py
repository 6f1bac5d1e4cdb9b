"""Makes optimizers from classes of torch.optim and their arguments, for front ends that are given these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero.optim.adadelta import adadelta
from fzero.optim.adafactor import adafactor
from fzero.optim.adagrad import adagrad
from fzero.optim.adam import adam, adamw
from fzero.optim.adamax import adamax
from fzero.optim.asgd import asgd
from fzero.optim.gradient_transformation import GradientTransformation, chain
from fzero.optim.muon import muon
from fzero.optim.nadam import nadam
from fzero.optim.radam import radam
from fzero.optim.rmsprop import rmsprop
from fzero.optim.rprop import rprop
from fzero.optim.scaling_and_clipping import first_links
from fzero.optim.schedules import Schedule
from fzero.optim.sgd import sgd

Options = Mapping[str, Any]


def _adam(lr: float | Schedule, o: Options) -> GradientTransformation:
    b1, b2 = o["betas"]
    options = {"amsgrad": o["amsgrad"], "maximize": o["maximize"]}
    if o["decoupled_weight_decay"]:
        return adamw(lr, b1, b2, o["eps"], o["weight_decay"], **options)
    if not o["weight_decay"]:
        return adam(lr, b1, b2, o["eps"], **options)
    links = first_links(o["weight_decay"], o["maximize"])
    return chain(*links, adam(lr, b1, b2, o["eps"], amsgrad=o["amsgrad"]))


def _adafactor(lr: float | Schedule, o: Options) -> GradientTransformation:
    eps1, eps2 = o["eps"]
    return adafactor(lr, o["beta2_decay"], eps1, eps2, o["d"], o["weight_decay"], o["maximize"])


def _muon(lr: float | Schedule, o: Options) -> GradientTransformation:
    scale = "match_rms" if o["adjust_lr_fn"] == "match_rms_adamw" else "spectral"
    numbers = o["momentum"], o["nesterov"], o["ns_steps"], o["weight_decay"]
    # torch's Muon accepts only parameters with two dims.
    return muon(lr, *numbers, scale, lambda path, leaf: True, eps=o["eps"])


def _of(make: Callable[..., GradientTransformation], names: str) -> Callable[..., GradientTransformation]:
    """Makes an optimizer whose arguments have torch's names, except `betas`, which are `b1` and `b2`.

    Args:
        make: the function of fzero.optim.
        names: the arguments besides `lr` and `betas`, separated by spaces.
    """

    def made(lr: float | Schedule, o: Options) -> GradientTransformation:
        betas = dict(zip(("b1", "b2"), o["betas"], strict=True)) if "betas" in o else {}
        return make(lr, **betas, **{name: o[name] for name in names.split()})

    return made


_TABLE: dict[type, Callable[[float | Schedule, Options], GradientTransformation]] = {
    torch.optim.AdamW: _adam,
    torch.optim.Adam: _adam,
    torch.optim.SGD: _of(sgd, "momentum nesterov weight_decay dampening maximize"),
    torch.optim.Muon: _muon,
    torch.optim.RMSprop: _of(rmsprop, "alpha eps weight_decay momentum centered maximize"),
    torch.optim.Adagrad: _of(adagrad, "lr_decay weight_decay initial_accumulator_value eps maximize"),
    torch.optim.NAdam: _of(nadam, "eps weight_decay momentum_decay decoupled_weight_decay maximize"),
    torch.optim.RAdam: _of(radam, "eps weight_decay decoupled_weight_decay maximize"),
    torch.optim.Adamax: _of(adamax, "eps weight_decay maximize"),
    torch.optim.Adadelta: _of(adadelta, "rho eps weight_decay maximize"),
    torch.optim.ASGD: _of(asgd, "lambd alpha t0 weight_decay maximize"),
    torch.optim.Rprop: _of(rprop, "etas step_sizes maximize"),
    torch.optim.Adafactor: _adafactor,
}
CLASSES = tuple(_TABLE)
"""The classes of torch.optim that have an equivalent here."""

_NEUTRAL = {"differentiable": False, "ns_coefficients": (3.4445, -4.7750, 2.0315)}
"""Arguments without an equivalent, with the values at which they have no effect."""


def defaults(cls: type) -> dict[str, Any]:
    """Returns the default values of a class's arguments."""
    return {n: p.default for n, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}


def unsupported(options: Options) -> dict[str, Any]:
    """Returns the arguments that have no equivalent here and would change numbers."""
    return {name: options[name] for name, neutral in _NEUTRAL.items() if options.get(name, neutral) != neutral}


def of_torch(cls: type, lr: float | Schedule, options: Options) -> GradientTransformation:
    """Returns the optimizer that equals a class of torch.optim with these arguments, and its defaults for all
    others.
    """
    decoupled = {"decoupled_weight_decay": cls is torch.optim.AdamW}
    # Options come last. In older releases AdamW has no argument `decoupled_weight_decay`, so it is added for the row
    # that it shares with Adam.
    return _TABLE[cls](lr, decoupled | defaults(cls) | dict(options))
