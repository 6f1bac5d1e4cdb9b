"""Defines optimizers, which are pairs of pure functions, and learning-rate schedules.

    from fzero import optim

    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(3e-4, 2_000, 100_000))
    )
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optim.apply_updates(params, updates)

Names and semantics are those of optax.

[Note: optimizers on shards] `update` combines the tensors of a parameter and 0-dim tensors
pointwise, and sums over whole parameters. So it means the same on a flat shard, if each sum is
followed by an all-reduce, and nothing in this folder knows about meshes. A function marked with
`unsharded` gets unsharded tensors. Whatever depends only on the step (learning rate, bias
corrections) is computed once per update as a 0-dim tensor, never inside a parameter's arithmetic.

Arithmetic and state are float32, or float64 for float64 parameters, whatever the dtypes of
gradients and parameters. `None` in place of a parameter (a frozen one) must appear in params, grads
and updates alike, and is passed through.

| file | what it does |
|---|---|
| `gradient_transformation.py` | `GradientTransformation`, `chain`, `apply_updates` and `global_norm` |
| `scaling_and_clipping.py` | transformations that scale, clip or decay, such as `clip_by_global_norm` |
| `schedules.py` | learning-rate schedules, as pure functions of the step |
| `masking.py` | `masked` and `partition`: different transformations for different parameters |
| `sgd.py` | SGD with momentum |
| `adam.py` | Adam and AdamW |
| `lamb.py` | LAMB: Adam with a trust ratio per parameter, for very large batches |
| `adafactor.py` | Adafactor: factored second moments of matrices |
| `lion.py` | Lion: the sign of an interpolated momentum |
| `muon.py` | Muon: orthogonalized momentum for matrices, another optimizer for all other parameters |
| `rmsprop.py` | RMSprop |
| `adagrad.py` | Adagrad |
| `adadelta.py` | Adadelta |
| `adamax.py` | Adamax: Adam with the infinity norm |
| `nadam.py` | NAdam: Adam with Nesterov momentum |
| `radam.py` | RAdam: Adam with a rectified variance |
| `asgd.py` | averaged stochastic gradient descent |
| `rprop.py` | resilient backpropagation |
| `torch_classes.py` | makes the equivalent of a `torch.optim` class and its arguments, for front ends |
| `unsharded.py` | `unsharded`: lets a function of an optimizer read unsharded tensors, such as matrices |
| `quantized.py` | quantizes moments to 8 bits, with a scale for each block of 256 elements |
| `rounding.py` | rounds stochastically, for parameters stored in bfloat16 without float32 masters |
| `loss_scale.py` | `LossScale`: updates the dynamic loss scale of float16 training |
| `nonfinite.py` | `skip_nonfinite`: skips updates whose gradients are not finite |
| `apply.py` | applies an optimizer's update to parameters, and checks that it keeps its contract |
| `tree_updates.py` | helpers that all optimizers share: walks over trees, initial state, dtypes and checks |
"""

from typing import Any

from fzero._utils.deprecation import warn
from fzero.errors import no_attribute

# The public names of the folder: users write `optim.adamw`, not `optim.adam.adamw`.
from fzero.optim.adadelta import AdadeltaState, adadelta
from fzero.optim.adafactor import AdafactorState, adafactor
from fzero.optim.adagrad import AdagradState, adagrad
from fzero.optim.adam import ScaleByAdamState, ScaleByAmsgradState, adam, adamw, scale_by_adam
from fzero.optim.adamax import AdamaxState, adamax
from fzero.optim.asgd import ASGDState, asgd
from fzero.optim.gradient_transformation import (
    EmptyState,
    GradientTransformation,
    apply_updates,
    chain,
    global_norm,
    identity,
)
from fzero.optim.lamb import lamb, scale_by_trust_ratio
from fzero.optim.lion import LionState, lion
from fzero.optim.masking import MaskedState, PartitionState, masked, partition
from fzero.optim.muon import MuonState, muon
from fzero.optim.nadam import NAdamState, nadam
from fzero.optim.nonfinite import skip_nonfinite
from fzero.optim.radam import RAdamState, radam
from fzero.optim.rmsprop import RMSpropState, rmsprop
from fzero.optim.rounding import stochastic_round
from fzero.optim.rprop import RpropState, rprop
from fzero.optim.scaling_and_clipping import (
    ScaleByScheduleState,
    add_decayed_weights,
    clip_by_global_norm,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    set_to_zero,
)
from fzero.optim.schedules import (
    Schedule,
    constant,
    cosine,
    linear,
    lr_range_test,
    one_cycle,
    warmup_cosine,
    warmup_decay_lr,
    warmup_lr,
    warmup_stable_decay,
)
from fzero.optim.sgd import DampedTraceState, TraceState, sgd, trace
from fzero.optim.unsharded import unsharded

__all__ = [
    "ASGDState",
    "AdadeltaState",
    "AdafactorState",
    "AdagradState",
    "AdamaxState",
    "DampedTraceState",
    "EmptyState",
    "GradientTransformation",
    "LionState",
    "MaskedState",
    "MuonState",
    "NAdamState",
    "PartitionState",
    "RAdamState",
    "RMSpropState",
    "RpropState",
    "ScaleByAdamState",
    "ScaleByAmsgradState",
    "ScaleByScheduleState",
    "Schedule",
    "TraceState",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "asgd",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "global_norm",
    "identity",
    "lamb",
    "linear",
    "lion",
    "lr_range_test",
    "masked",
    "muon",
    "nadam",
    "one_cycle",
    "partition",
    "radam",
    "rmsprop",
    "rprop",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "set_to_zero",
    "sgd",
    "skip_nonfinite",
    "stochastic_round",
    "trace",
    "unsharded",
    "warmup_cosine",
    "warmup_decay_lr",
    "warmup_lr",
    "warmup_stable_decay",
]


_ABSENT = {
    "lbfgs": (
        "L-BFGS evaluates the loss several times in one update, and a step evaluates it once",
        "optim.adamw or optim.sgd; torch.optim.LBFGS in plain PyTorch, if the model fits on one device",
    ),
    "sparseadam": ("gradients are dense", "optim.adam, which updates the rows without a gradient too"),
}
"""Optimizers of torch.optim that are absent, in lower case: why, and what to use instead."""


def __getattr__(name: str) -> Any:
    if name == "whole":
        warn("fz.optim.whole", "fz.optim.unsharded")
        return unsharded
    if absent := _ABSENT.get(name.lower()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {absent[0]}\nFix: {absent[1]}")
    raise no_attribute(__name__, name, __all__)
