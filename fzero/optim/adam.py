"""Defines Adam (Kingma & Ba 2015, arXiv:1412.6980) and AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import function, keywords, plain_numbers
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.masking import Mask, check_mask, resolve_mask
from fzero.optim.quantized import POSITIVE, SIGNED, Coded, new_codes
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, need_params, new_count, new_moment, rate, reject, scalars
from fzero.tree import Tree


class ScaleByAdamState(NamedTuple):
    """The state of `adam`: the number of updates, and the means of gradients and of their squares.

    Attributes:
        count: int64[], the number of updates done.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.
        nu: like mu: running mean of squared gradients.

    Example:
        >>> state = adam(0.1).init({"w": torch.ones(2)})
        >>> state.count.item(), state.mu, state.nu
        (0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    mu: Tree
    nu: Tree


class ScaleByAmsgradState(NamedTuple):
    """The state of `adam` with `amsgrad=True`.

    Attributes:
        count: int64[], the number of updates done.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.
        nu: like mu: running mean of squared gradients.
        nu_max: like mu: the largest nu of each element.

    Example:
        >>> adam(0.1, amsgrad=True).init({"w": torch.ones(2)}).nu_max
        {'w': tensor([0., 0.])}
    """

    count: torch.Tensor
    mu: Tree
    nu: Tree
    nu_max: Tree


class QuantizedAdamState(NamedTuple):
    """The state of `adam` with `state_dtype="int8"`: moments as 8-bit codes, with a scale for each block."""

    count: torch.Tensor  # int64[], updates done
    mu: Tree  # like params, int8 codes; float32 numbers for parameters with fewer than 4096 elements
    nu: Tree  # like mu, uint8 codes
    mu_scale: Tree  # float32[num_blocks, 1] for each parameter with codes, None for the others
    nu_scale: Tree  # like mu_scale


@keywords
def adamw(
    lr: float | Schedule,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask | None = None,
    state_dtype: str = "fp32",
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay, equal to `torch.optim.AdamW`.

    `updates = -lr * (mu / (1 - b1**t)) / (sqrt(nu) / sqrt(1 - b2**t) + eps) - lr * weight_decay * params` in update
    number t = 1, 2, ... All parameters share one t; torch counts the updates of each parameter
    (docs/guides/optimizers.md).

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        b1: decay of the mean of gradients, at least 0 and less than 1; or a schedule of it, as in a one-cycle policy.
        b2: decay of the mean of squared gradients, at least 0 and less than 1.
        eps: greater than 0, because a gradient may be 0 (in the padding of a shard it always is).
        weight_decay: at least 0. Multiplied by the learning rate, as in torch.
        mask: which parameters decay, as in `masked`; None: all. Often `lambda path, p: p.ndim >= 2`.
        state_dtype: "fp32", or "int8": both means are stored with 8 bits per element and 4 bytes per block of 256,
            except those of parameters with fewer than 4096 elements (fzero/optim/quantized.py).
        amsgrad: divide by the root of the largest `nu` so far (Reddi et al., On the convergence of Adam and beyond,
            ICLR 2018).
        maximize: ascend instead of descend.

    Memory: 8 bytes per parameter (16 for float64); 2.03 with `state_dtype="int8"`; 12 with `amsgrad`.

    Raises:
        FzeroValueError: if a number is out of range, if the mask has another structure, or if update is called
            without params although there is decay.

    Paper: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.

    Example:
        >>> opt = adamw(0.1, weight_decay=0.5)
        >>> params = {"w": torch.tensor([1.0, -1.0])}
        >>> updates, state = opt.update({"w": torch.tensor([4.0, 4.0])}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.1500, -0.0500])}
    """
    return _adam(
        "optim.adamw",
        lr,
        b1,
        b2,
        eps,
        weight_decay,
        mask,
        state_dtype=state_dtype,
        amsgrad=amsgrad,
        maximize=maximize,
    )


@keywords
def adam(
    lr: float | Schedule,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    state_dtype: str = "fp32",
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """`adamw` without weight decay, equal to `torch.optim.Adam`, with one count for all parameters as in `adamw`.

    For torch's L2 regularization: `chain(add_decayed_weights(l2), adam(lr))`, and with `maximize`:
    `chain(scale(-1), add_decayed_weights(l2), adam(lr))`.

    Args, memory and errors: as for `adamw`.

    Paper: Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015.

    Example:
        >>> from fzero import optim
        >>> params, optimizer = {"w": torch.ones(2)}, adam(0.1)
        >>> updates, state = optimizer.update({"w": torch.tensor([1.0, -2.0])}, optimizer.init(params), params)
        >>> optim.apply_updates(params, updates)
        {'w': tensor([0.9000, 1.1000])}
    """
    return _adam("optim.adam", lr, b1, b2, eps, state_dtype=state_dtype, amsgrad=amsgrad, maximize=maximize)


@plain_numbers
def scale_by_adam(
    b1: float | Schedule = 0.9, b2: float = 0.999, eps: float = 1e-8, state_dtype: str = "fp32"
) -> GradientTransformation:
    """Returns updates `mu_hat / (sqrt(nu_hat) + eps)`: `adam` before the learning rate is applied. Arguments and
    memory as in `adamw`.

    Example:
        >>> params, optimizer = {"w": torch.ones(2)}, scale_by_adam()
        >>> optimizer.update({"w": torch.tensor([1.0, -2.0])}, optimizer.init(params), params)[0]
        {'w': tensor([ 1.0000, -1.0000])}
    """
    return _adam("optim.scale_by_adam", 1.0, b1, b2, eps, sign=1, state_dtype=state_dtype)


def _adam(
    where: str,
    lr: float | Schedule,
    b1: float | Schedule,
    b2: float,
    eps: float,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    sign: int = -1,
    state_dtype: str = "fp32",
    amsgrad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Makes Adam and its variants: with decoupled weight decay, AMSGrad, and moments quantized to 8 bits."""
    betas, flags = {"b2": b2} if callable(b1) else {"b1": b1, "b2": b2}, {"amsgrad": amsgrad, "maximize": maximize}
    check(where, lr, positive={"eps": eps}, not_negative={"weight_decay": weight_decay}, betas=betas, flags=flags)
    check_mask(where, mask)
    wrong = function("b1", b1, "step") if callable(b1) else []
    wrong += [] if state_dtype in ("fp32", "int8") else [f"state_dtype={state_dtype!r}: one of 'fp32', 'int8'"]
    wrong += ["amsgrad=True: needs state_dtype='fp32'"] if amsgrad and state_dtype == "int8" else []
    reject(where, wrong)
    fp32_state = ScaleByAmsgradState if amsgrad else ScaleByAdamState

    def init(params: Tree) -> Any:
        if state_dtype == "fp32":
            return fp32_state(new_count(params), *(new_moment(where, params) for _ in fp32_state._fields[1:]))
        return QuantizedAdamState(new_count(params), *new_codes(where, params, (SIGNED, POSITIVE)))

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        count = state.count + 1
        t, size = count.to(torch.float64), sign * rate(where, lr, state.count)
        beta = rate(where, b1, state.count)
        # Outside of `leaf`: with a power per element, the compiled update takes three times as long.
        at = scalars(size / (1 - beta**t), (1 - b2**t).sqrt(), size * weight_decay, 1 - beta)

        # `others`: the largest `nu` with amsgrad, then the parameter and whether it decays with weight decay
        def leaf(g: Any, m: Any, v: Any, *others: Any) -> tuple[Any, ...]:
            step, root, decay, share = at(m.dtype)
            g = -g.to(m.dtype) if maximize else g.to(m.dtype)
            m = torch.lerp(m, g, share)
            v = torch.addcmul(v * b2, g, g, value=1 - b2)
            largest = torch.maximum(others[0], v) if amsgrad else v
            u = m * step / (largest.sqrt() / root + eps)
            if weight_decay:
                p, decayed = others[-2:]
                u = u + p.to(m.dtype) * decay if decayed else u
            return (u, m, v, largest) if amsgrad else (u, m, v)

        decaying = {}
        if weight_decay:
            need_params(where, grads, params)
            decaying = {"params": params, "mask": resolve_mask(where, mask, params)}
        if state_dtype == "fp32":
            moments = {name: getattr(state, name) for name in fp32_state._fields[1:]}
            updates, *new = leafwise(where, 1 + len(moments), leaf, grads=grads, **moments, **decaying)
            return updates, fp32_state(count, *new)
        coded = Coded((SIGNED, POSITIVE), (state.mu_scale, state.nu_scale))
        updates, mu, nu = leafwise(where, 3, coded.around(leaf), grads=grads, mu=state.mu, nu=state.nu, **decaying)
        return updates, QuantizedAdamState(count, mu, nu, *coded.scales())

    return GradientTransformation(init, update)
