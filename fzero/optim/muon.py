"""Defines Muon: momentum whose singular values are moved close to 1 (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import count, function, keywords, python_numbers, shown
from fzero.errors import FzeroValueError
from fzero.optim.gradient_transformation import GradientTransformation, is_transformation
from fzero.optim.masking import partition
from fzero.optim.quantized import SIGNED, Coded, new_codes
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, need_params, new_count, new_moment, rate, reject, scalars
from fzero.optim.unsharded import unsharded
from fzero.tree import Tree

# Chosen for the steepest slope at 0, so that small singular values grow fast. They end near 1, not at 1.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_WHERE = "optim.muon"
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(1, rows / max(1, columns))),
    "match_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factors for the learning rate of a matrix: "original" and "match_rms_adamw" of `torch.optim.Muon`."""
Where = Callable[[str, torch.Tensor], int]
"""`where(path, leaf)`: the number of matrices of equal shape that a parameter contains along dim 0. True is 1, False
is none.
"""


class MuonState(NamedTuple):
    """The state of `muon`: the number of updates, and the mean of gradients.

    Attributes:
        count: int64[], the number of updates done.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.

    Example:
        >>> state = muon(0.1).init({"w": torch.ones(1, 2)})
        >>> state.inner_states["matrices"]
        MuonState(count=tensor(0), mu={'w': tensor([[0., 0.]])})
    """

    count: torch.Tensor
    mu: Tree


class QuantizedMuonState(NamedTuple):
    """The state of `muon` with `state_dtype="int8"`: the mean of gradients as 8-bit codes, with a scale for each
    block.
    """

    count: torch.Tensor  # int64[], updates done
    mu: Tree  # like params, int8 codes; float32 numbers for parameters with fewer than 4096 elements
    mu_scale: Tree  # float32[num_blocks, 1] for each parameter with codes, None for the others


@keywords
def muon(
    lr: float | Schedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.1,
    scale: Literal["spectral", "match_rms"] = "spectral",
    where: Where | None = None,
    other: GradientTransformation | None = None,
    ns_dtype: Literal["bf16", "fp32"] = "bf16",
    eps: float = 1e-7,
    state_dtype: Literal["fp32", "int8"] = "fp32",
) -> GradientTransformation:
    """Muon, equal to `torch.optim.Muon`: `updates = -lr * (factor * orthogonal(mu) + weight_decay * params)`.

    `mu = momentum * mu + (1 - momentum) * grads`; with Nesterov momentum, `momentum * mu + (1 - momentum) * grads` of
    the new `mu` is used in its place. `orthogonal` divides by the Frobenius norm, then iterates `X = a X + (b A + c A
    A) X` with `A = X X^T`.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        momentum: decay of the mean of gradients, at least 0 and less than 1.
        nesterov: look one step ahead.
        ns_steps: number of iterations, from 1 to 99.
        weight_decay: at least 0, multiplied by the learning rate.
        scale: the factor. "spectral": `sqrt(max(1, rows / columns))`; "match_rms": `0.2 * sqrt(max(rows, columns))`,
            for a learning rate and a weight decay tuned for AdamW.
        where: `where(path, leaf)`, the number of matrices of equal shape that a parameter contains one after another
            along dim 0: 3 for a fused qkv, the number of experts for their weights. True is 1; 0 and False leave the
            parameter to `other`. By default, True for parameters with two dims.
        other: updates the other parameters, with its own learning rate.
        ns_dtype: the dtype of the iterations. "bf16" as in torch.
        eps: lower bound for the Frobenius norm that is divided by.
        state_dtype: dtype of the mean of gradients, as in `adamw`.

    For five iterations, the products cost `m (20 + 10 m / n) / 6T` of the model's products, for matrices [m, n] with
    m at most n and T tokens per step. According to the plan, 64 layers of width 1,024 with 65,536 tokens on 8 H100
    take 115 ms per step, and with `adamw` 108: 4.0 of the 6.8 ms are products in bf16, 2 are launches.

    Communication: on shards as for `optim.unsharded`, with 2 bytes per element in each direction ("fp32": 4).

    Memory: 4 bytes per parameter (8 for float64); 1.02 with `state_dtype="int8"`.

    Raises:
        FzeroValueError: if an argument is out of range, if a parameter cannot be divided into as many matrices as
            `where` says, or if `other` is missing for a parameter that needs it.

    Paper: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024. Liu et al., Muon is scalable
        for LLM training, 2025, for "match_rms".

    Example:
        >>> opt = muon(0.1, weight_decay=0.0, ns_dtype="fp32")
        >>> params = {"w": torch.zeros(2, 2)}
        >>> opt.update({"w": 5 * torch.eye(2)}, opt.init(params), params)[0]["w"].round(decimals=2)
        tensor([[-0.1100, -0.0000],
                [-0.0000, -0.1100]])
    """
    check(
        _WHERE,
        lr,
        positive={"eps": eps},
        not_negative={"weight_decay": weight_decay},
        betas={"momentum": momentum},
        flags={"nesterov": nesterov},
    )
    problems = count("ns_steps", ns_steps)
    problems += [] if problems or ns_steps < 100 else [f"ns_steps={ns_steps}: must be less than 100"]
    problems += [] if scale in SCALES else [f"scale={shown(scale)}: must be one of {', '.join(map(repr, SCALES))}"]
    problems += [] if ns_dtype in ("bf16", "fp32") else [f"ns_dtype={shown(ns_dtype)}: must be 'bf16' or 'fp32'"]
    problems += [] if state_dtype in ("fp32", "int8") else [f"state_dtype={shown(state_dtype)}: one of 'fp32', 'int8'"]
    reject(_WHERE, problems)

    where = where or (lambda path, leaf: leaf.dim() == 2)

    def init(params: Tree) -> MuonState | QuantizedMuonState:
        if state_dtype == "fp32":
            return MuonState(new_count(params), new_moment(_WHERE, params))
        return QuantizedMuonState(new_count(params), *new_codes(_WHERE, params, (SIGNED,)))

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        need_params(_WHERE, grads, params)
        size = -rate(_WHERE, lr, state.count)
        at = scalars(size, size * weight_decay)
        numbers = tree.map_with_path(lambda *leaf: _num_matrices(where, *leaf), params, root="params")

        def leaf(g: torch.Tensor, m: torch.Tensor, p: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
            step, decay = at(m.dtype)
            g = g.to(m.dtype)
            m = torch.lerp(m, g, 1 - momentum)
            # lerp(g, m, momentum) is momentum * m + (1 - momentum) * g.
            u = torch.lerp(g, m, momentum) if nesterov else m
            # A fused parameter [num * rows, columns] and a stack [num, rows, columns] have the same matrices.
            rows, columns = p.shape[-2] // (num if p.dim() == 2 else 1), p.shape[-1]
            o = _orthogonal(u.to(torch.bfloat16 if ns_dtype == "bf16" else u.dtype), num, ns_steps, eps)
            u = o.to(m.dtype) * (step * SCALES[scale](rows, columns))
            return (u + p.to(m.dtype) * decay if weight_decay else u), m

        coded = Coded((SIGNED,), (state.mu_scale,)) if state_dtype == "int8" else None
        leaf_fn = coded.around(leaf) if coded else leaf
        updates, mu = leafwise(_WHERE, 2, leaf_fn, grads=grads, mu=state.mu, params=params, num=numbers)
        count = state.count + 1
        return updates, QuantizedMuonState(count, mu, *coded.scales()) if coded else MuonState(count, mu)

    return _for_matrices(GradientTransformation(init, update), where, other)


def _for_matrices(
    made: GradientTransformation, where: Where, other: GradientTransformation | None
) -> GradientTransformation:
    """Applies `made` to the parameters that `where` accepts, as "matrices", and `other` to the rest, as "other".

    Raises:
        FzeroValueError: when it is called: if an argument has another kind. In `init`: if a parameter cannot be
            divided into as many matrices as `where` says, if nothing updates it, or if `where` returns no integer.
    """
    problems = function("where", where, "path", "leaf")
    problems += [] if other is None or is_transformation(other) else [f"other={shown(other)}: not an optimizer"]
    reject(_WHERE, problems)

    def label(path: str, leaf: torch.Tensor) -> str:
        num = _num_matrices(where, path, leaf)
        if not num and other is None:
            fix = "other=optim.adamw(3e-4), say, for biases, norms and embeddings"
            raise FzeroValueError(_WHERE, "some tensors are not updated", [f"{path} {list(leaf.shape)}"], fix)
        if num and not _are_matrices(leaf.shape, num):
            fix = (
                "give the number of equal matrices along dim 0: True for "
                "one matrix, 0 for a tensor that `other` updates"
            )
            raise FzeroValueError(
                _WHERE,
                "a tensor does not consist of that number of matrices",
                [f"{path} {list(leaf.shape)}: {num}"],
                fix,
            )
        return "matrices" if num else "other"

    return partition({"matrices": made, **({} if other is None else {"other": other})}, label)


def _num_matrices(where: Where, path: str, leaf: torch.Tensor) -> int:
    """Returns the number of matrices of a parameter, as `where` says.

    Raises:
        FzeroValueError: if `where` returns no integer.
    """
    num = python_numbers(where(path, leaf))
    if not isinstance(num, int):
        fix = (
            "return the number of equal matrices along dim 0: True for one matrix, 0 for a tensor that `other` updates"
        )
        raise FzeroValueError(_WHERE, "`where` does not return an integer", [f"{path}: {shown(num)}"], fix)
    return int(num)


def _are_matrices(shape: torch.Size, num: int) -> bool:
    """Returns whether a parameter of this shape can be `num` matrices of equal shape along dim 0."""
    if len(shape) == 2:
        return num > 0 and shape[0] % num == 0
    return len(shape) == 3 and shape[0] == num


@unsharded
def _orthogonal(u: torch.Tensor, num: int, steps: int, eps: float) -> torch.Tensor:
    """Moves the singular values of each of `num` matrices close to 1, by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    x = u if num == 1 and u.dim() == 2 else u.reshape(num, -1, u.shape[-1])
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    # The Gram matrix of the wide form is the smaller one.
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        # x: [..., m, n] with m <= n; gram: [..., m, m]
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(u.shape)
