"""Averages losses and metrics exactly, however the batch is divided: represents the results of a function as sums
that add up over ranks and micro-batches, and builds the tree of means from them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fzero import tree
from fzero._compat import compat
from fzero._utils.arguments import count as whole_number
from fzero._utils.arguments import number, plain_numbers, shown
from fzero.errors import FzeroTypeError, TraceError
from fzero.sharding.layout import ties
from fzero.trace.block import block
from fzero.trace.recorder import line_of


class Weighted(NamedTuple):
    """A sum and the number of its terms, made by `weighted`. The mean `total / count` is exact, however the batch is
    divided among ranks and micro-batches.

    Attributes:
        total: 0-dim, the sum.
        count: 0-dim, the number of terms.
    """

    total: torch.Tensor
    count: torch.Tensor

    def __add__(self, other: Any) -> Any:
        """Raises an error, as the other operators do: the `+` of a tuple would concatenate."""
        raise FzeroTypeError(
            "weighted",
            "a fz.weighted result does not support arithmetic",
            [f"it is a sum and its count, averaged by the step; the other operand is {_operand(other)}"],
            "compute with the totals, scaled to the same count, before: fz.weighted(total + 0.1 * penalty * count, "
            "count)",
        )

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__


class Loss(NamedTuple):
    """The checked loss of a step: its total and, if it is a `weighted` loss, its count."""

    total: torch.Tensor
    count: torch.Tensor | None


def split_loss(result: Any, has_aux: bool, mutates: bool) -> tuple[Loss, Any, Any]:
    """Checks the result of a loss function and splits it into the loss, the auxiliary values and the tree of new
    values; None for those that it does not return.
    """
    asked = {"aux": "has_aux=True"} if has_aux else {}
    asked |= {"new": "mutable"} if mutates else {}
    parts = list(result) if isinstance(result, tuple) and not isinstance(result, Weighted) else [result]
    if len(parts) != 1 + len(asked) or (asked and parts[0] is result):
        got = f"a tuple of {len(parts)}" if parts[0] is not result else tree.describe(result)
        what = (
            f"{' and '.join(asked.values())}, but the loss function returned {got}"
            if asked
            else f"the loss function returned {got}"
        )
        fix = (
            f"return ({', '.join(['loss', *asked])})"
            if asked
            else "pass has_aux=True to return (loss, aux), or mutable=predicate to return (loss, new)"
        )
        if mutates and not has_aux and len(parts) == 3:
            fix += ", or pass has_aux=True to return (loss, aux, new)"
        raise FzeroTypeError("train_step", what, fix=fix)
    result, found = parts[0], dict(zip(asked, parts[1:], strict=True))
    loss = Loss(*result) if isinstance(result, Weighted) else Loss(result, None)
    problems = []
    for what, x in (
        (("total", loss.total), ("count", loss.count)) if loss.count is not None else (("loss", loss.total),)
    ):
        if not isinstance(x, torch.Tensor):
            problems.append(f"{what} is {type(x).__name__}")
        elif x.dim() != 0:
            problems.append(f"{what} is {tree.describe(x)}, not a scalar")
    if isinstance(loss.total, torch.Tensor) and not loss.total.is_floating_point():
        problems.append(
            f"{'loss' if loss.count is None else 'total'} is {tree.describe(loss.total)}, not floating point"
        )
    if problems:
        raise FzeroTypeError(
            "train_step",
            "the loss is not a scalar tensor",
            problems,
            _fix_of(result),
        )
    if loss.count is not None and loss.count.requires_grad:
        raise TraceError(
            "train_step",
            "the count of a weighted loss depends on trainable parameters",
            [
                "count: ranks and micro-batches add up totals and counts separately, so there is no gradient of their "
                "quotient through it"
            ],
            (
                "detach it: fz.weighted(total, count.detach()); or return "
                "total / count, a mean of the micro-batches' means"
            ),
        )
    if not loss.total.requires_grad:
        raise TraceError(
            "train_step",
            "the loss does not depend on any trainable parameter",
            fix="use the params argument (not a closure), and check `trainable` and .detach()",
        )
    return loss, found.get("aux"), found.get("new")


def _fix_of(result: Any) -> str:
    """Returns the fix for a loss function that did not return a scalar tensor."""
    if result is None:
        return (
            "return the loss at the end of the loss function; if it comes from the model, as from forward(idx, "
            "targets=None), check that the batch contains the targets"
        )
    if isinstance(result, dict):
        return "return only the loss; or (loss, metrics), with fz.train_step(..., has_aux=True)"
    return "reduce it with .mean(), or return fz.weighted(total, count)"


def new_values(new: Any, params: Any, mutable: Sequence[bool]) -> dict[int, torch.Tensor]:
    """Returns the new value of each mutable leaf that a loss function returned, by the position of the first leaf
    that is the same tensor.

    Args:
        new: the result: a tree like `params`, in which leaves that are not mutable are absent, None, or unchanged.
        params: the parameters that the loss function was given.
        mutable: for each leaf of `params`, whether it is mutable.

    Raises:
        FzeroTypeError: listing the leaves without a new value, or with one of another shape or dtype, and values for
            other leaves.
    """
    flat, paths = tree.leaves(params), tree.paths(params, "params")
    at, tied = {p: i for i, p in enumerate(paths)}, ties(flat)
    problems, found = [], dict[int, torch.Tensor]()
    for path, x in tree.with_paths(new, "params"):
        i = at.get(path)
        if i is None:
            problems.append(f"{path}: params has no such tensor")
        elif not mutable[i]:
            if x is not flat[i]:
                problems.append(
                    f"{path}: a new value, but `mutable` does not match it: leave it out, or match it in `mutable`"
                )
        elif not isinstance(x, torch.Tensor) or (x.shape, x.dtype) != (flat[i].shape, flat[i].dtype):
            problems += [where] if (where := line_of(x)) is not None else []
            problems.append(f"{path}: {tree.describe(x)} for a leaf that is {tree.describe(flat[i])}")
        elif found.setdefault(tied[i], x) is not x:
            problems.append(f"{path}: differs from {paths[tied[i]]}, which is the same tensor")
    asked = {tied[i] for i, wanted in enumerate(mutable) if wanted}
    named = {tied[at[p]] for p in tree.paths(new, "params") if p in at}
    problems += [f"{paths[i]}: no new value" for i in sorted(asked - named)]
    if problems:
        fix = (
            "return a tree like params that has a value for each tensor that `mutable` matches, e.g. {'mean': "
            "mean.to(params['mean'].dtype)}"
        )
        raise FzeroTypeError("train_step", "these new values of mutable tensors cannot be assigned", problems, fix)
    return found


def is_empty(loss: torch.Tensor, count: torch.Tensor | None, norm: torch.Tensor | None = None) -> torch.Tensor | None:
    """Returns whether the loss of a step is a mean over nothing, so that its update is skipped: bool[]; None if
    updates are never skipped.

    A weighted loss is a mean over nothing if its count is 0. The count of any other loss is not known, but a mean
    over nothing is NaN, and its gradients are often zeros instead of NaN.

    Args:
        loss: the mean over the complete batch.
        count: the count of the complete batch, if the loss is weighted.
        norm: the norm of all gradients; None if an update is not skipped for a NaN loss.
    """
    reasons = [] if count is None else [count == 0]
    if norm is not None:
        reasons.append(torch.isnan(loss) & torch.isfinite(norm))
    return functools.reduce(torch.logical_or, reasons) if reasons else None


def summable(x: torch.Tensor) -> torch.Tensor:
    """Returns a value in the dtype in which it is summed over ranks and micro-batches: float32, or float64."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def both_ends(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns integers as one vector, int64[2 * numel], whose maximum over ranks and micro-batches gives both the
    largest and the smallest value of each: ~x decreases as x increases.
    """
    flat = torch.cat([x.detach().reshape(-1).to(torch.int64) for x in values])
    return torch.cat([flat, ~flat])


def agreeing(ends: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the values that `both_ends` encoded, the largest of each, and for each whether all were the same,
    bool[len(like)].
    """
    number = ends.numel() // 2
    same = ends[:number] == ~ends[number:]
    values, agree, start = [], [], 0
    for x in like:
        part = slice(start, start := start + x.numel())
        values.append(ends[:number][part].reshape(x.shape).to(x.dtype))
        agree.append(same[part].all())
    return values, torch.stack(agree)


class Means(NamedTuple):
    """Builds a tree of means from a flat list of sums: knows for each result whether it is a total and a count, and
    for each flat value whether it is summed.
    """

    structure: tree.TreeSpec
    weighted: tuple[bool, ...]
    summed: tuple[bool, ...]


def flatten_means(result: Any) -> tuple[list[torch.Tensor], Means]:
    """Returns the tensors of a result as a flat list, with totals and counts separate, and the `Means` that rebuilds
    the tree.
    """
    is_pair = lambda x: isinstance(x, Weighted)  # noqa: E731
    leaves, structure = tree.flatten(result, is_leaf=is_pair)
    flat: list[Any] = [y for x in leaves for y in (x if is_pair(x) else (x,))]
    wrong = [
        f"{p}: {type(x).__name__}" for p, x in tree.with_paths(result, "result") if not isinstance(x, torch.Tensor)
    ]
    if wrong:
        raise FzeroTypeError(
            "step", "the function returned something other than tensors", wrong, "return a pytree of tensors"
        )
    return flat, Means(
        structure, tuple(map(is_pair, leaves)), tuple(is_pair(x) for x in leaves for _ in (x if is_pair(x) else (x,)))
    )


def means(result: Any) -> Any:
    """Returns the tree with each `Weighted` averaged."""
    is_pair = lambda x: isinstance(x, Weighted)  # noqa: E731
    return tree.map(lambda x: x.total / x.count if is_pair(x) else x, result, is_leaf=is_pair)


@plain_numbers
def weighted(total: torch.Tensor, count: torch.Tensor | int | float) -> Weighted:
    """Represents a loss that is the mean of `count` terms whose sum is `total`, averaged exactly over ranks and
    micro-batches of any size.

    The mean over ranks of each rank's mean is wrong if the counts differ between ranks, for example counts of tokens
    that are not padding. With `weighted`, the totals and the counts are summed first, and divided once.
    If the count of the complete batch is 0, the update of the step is skipped: parameters and optimizer state stay as
    they are, the loss is NaN, and the metric `finite` is False.

    Args:
        total: 0-dim floating-point tensor, the sum.
        count: the number of terms in the sum: a number or a 0-dim tensor, which must not depend on trainable
            parameters.

    Example:
        >>> import torch
        >>> weighted(torch.tensor(6.0), 3).count
        tensor(3.)
    """
    problems = [] if isinstance(total, torch.Tensor) else [f"total is {type(total).__name__}, not a tensor"]
    if isinstance(total, torch.Tensor) and (total.dim() or not total.is_floating_point()):
        problems.append(f"total is {shown(total)}, not one floating-point number")
    if isinstance(count, torch.Tensor):
        problems += [f"count is {shown(count)}, not one number"] if count.dim() else []
    else:
        problems += number("count", count, at_least=0, below=math.inf)
    if problems:
        raise FzeroTypeError(
            "weighted", "takes a sum and the number of summands", problems, "fz.weighted(losses.sum(), losses.numel())"
        )
    if not isinstance(count, torch.Tensor):
        count = torch.full((), float(count), dtype=torch.float32, device=total.device)
    return Weighted(total, count)


@plain_numbers
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Any:
    """Cross entropy of the linear head of a language model, computed without ever holding the logits of all rows.

    Equal, up to the order of sums, to::

        logits = F.linear(hidden, weight, bias)                       # [..., vocabulary]
        logits = softcap * torch.tanh(logits / softcap)               # if softcap is given
        F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ...)

    The rows (positions) are divided into chunks. For each chunk in turn the forward computes the logits, the loss and
    the gradients of the loss with respect to `hidden`, `weight` and `bias`, and then frees the logits. The backward
    multiplies these gradients by the gradient of the result. No product is computed twice.

    Args:
        hidden: floating point [..., features], the input of the head. At least two dimensions.
        weight: floating point [vocabulary, features], as in `torch.nn.Linear` and `torch.nn.Embedding`.
        targets: int64 [...], the index of the right word for each row, or `ignore_index`.
        bias: floating point [vocabulary].
        chunks: the number of chunks. By default chunks have about as many rows as there are features, and at least
            1024, so that the logits of a chunk are about as large as `weight`.
        ignore_index: rows with this target do not contribute to the loss, the gradient or the count.
        label_smoothing: between 0.0 and 1.0, as in `torch.nn.functional.cross_entropy`.
        softcap: logits are limited to the range from -softcap to softcap, as in Gemma 2.
        reduction: "mean", over the targets that are not ignored (if there is none, NaN with gradients of 0); "sum";
            or "weighted", which returns `fz.weighted(sum, count)`: the loss of a step whose micro-batches and ranks
            have different numbers of such targets.

    Returns: float32[], float64[] if the logits are float64; or a `fz.weighted` result.

    Communication: none in addition. If `tensor_parallel` shards the vocabulary of `weight`, each chunk sends what the
        unchunked loss would send for its rows. With `sequence_parallel`, `chunks` must divide the positions of a rank.
    Memory: the logits of one chunk and their gradient, in the dtype of `hidden` and in float32; the gradient of
        `hidden`; a copy of `weight`; and, in float32, the sum of the gradients of `weight` before and after a chunk.

    Raises:
        FzeroTypeError: arguments that are not such tensors and numbers, all of them listed. From the backward, if the
            gradient of the gradient is asked for (`create_graph=True`).

    Under the transforms of `torch.func` and in forward mode, all logits are held: `torch.func.grad` and the others
    differentiate the computation above.

    In float16 the gradients of a chunk are computed for a loss scale of 1 per target, and scaled in float32. They are
    finite, however many rows a chunk has, if the elements of `hidden` are below 4096.

    References: Hsu et al., Liger Kernel: Efficient Triton kernels for LLM training, 2024; Wijmans et al., Cut your
        losses in large-vocabulary language models, ICLR 2025, which never materialize logits at all.

    Example:
        >>> import torch
        >>> hidden, head = torch.zeros(6, 4), torch.zeros(10, 4)
        >>> chunked_cross_entropy(hidden, head, torch.arange(6), chunks=3)
        tensor(2.3026)
    """
    _check_head(hidden, weight, targets, bias, chunks, ignore_index, label_smoothing, softcap, reduction)
    rows, length = targets.numel(), targets.shape[-1]
    if chunks is None:
        least = max(1, -(-rows // max(hidden.shape[-1], 1024)))
        chunks = next((n for n in range(least, 2 * least) if length % n == 0), least)
    options = (softcap, ignore_index, label_smoothing)
    head = (weight,) if bias is None else (weight, bias)
    if not torch.is_grad_enabled():  # otherwise gradients would be computed that are not needed
        hidden, *head = (x.detach() for x in (hidden, *head))
    if compat.functorch_active() or compat.forward_ad_active():
        # The gradients that the forward computes ahead would be invisible to these transforms.
        total: Any = _sum_of_losses(F.linear(hidden, *head), targets, options)
    else:
        total = _ChunkedSum.apply(hidden, targets, (max(1, min(chunks, rows)), options), *head)
    if reduction == "sum":
        return total
    count = (targets != ignore_index).sum()
    if reduction == "weighted":
        return weighted(total, count)
    # The gradient of a mean over nothing is 0, as in F.cross_entropy, and not 0 / 0.
    return torch.where(count > 0, total, total.detach()) / count


class _ChunkedSum(torch.autograd.Function):
    """The sum of the losses of all rows. Its gradient is linear in the gradient of the sum, so the forward computes
    it chunk by chunk, for a gradient of 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [..., length, features]
        targets: torch.Tensor,  # int64[..., length]
        settings: tuple[int, tuple[Any, ...]],
        *head: torch.Tensor,  # the weight, and the bias if there is one
    ) -> torch.Tensor:
        chunks, options = settings
        of_hidden, _, _, *of_head = ctx.needs_input_grad
        # A copy is a value of the step: a sharded parameter is gathered once, and not again for each chunk.
        copies = [x.clone() for x in head] if chunks > 1 else [*head]
        total = torch.zeros((), dtype=_summed(hidden.dtype), device=hidden.device)
        sums = [torch.zeros_like(x, dtype=_summed(x.dtype)) for x, need in zip(head, of_head, strict=True) if need]
        rows: list[torch.Tensor] = []
        for h, t in zip(_divided(hidden, -2, chunks), _divided(targets, -1, chunks), strict=True):
            total, grads, sums = _chunk((), h, t, copies, total, sums, (of_hidden, *of_head), options)
            rows += grads
        ctx.save_for_backward(*([_joined(rows, hidden)] if rows else []), *sums)
        given = (hidden, targets, targets, *head)
        ctx.given = [(i, x.dtype) for i, x in enumerate(given) if ctx.needs_input_grad[i]]
        return total

    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            what, fix = (
                "has no gradient of its gradient",
                "compute all logits, and use F.cross_entropy, whose gradient has one",
            )
            raise FzeroTypeError("chunked_cross_entropy", what, fix=fix)
        grads: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for x, (i, dtype) in zip(ctx.saved_tensors, ctx.given, strict=True):
            # in float32: a loss scale may be larger than the largest float16
            grads[i] = (x.to(_summed(dtype)) * seed).to(dtype)
        return tuple(grads)


@block
def _chunk(
    params: tuple[()],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Sequence[torch.Tensor],
    total: torch.Tensor,
    sums: Sequence[torch.Tensor],
    needs: tuple[bool, ...],
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns the total including the loss of a chunk, the gradient of that loss with respect to `hidden` (if
    needed), and `sums` including its gradients with respect to `head`. It is a block so that a compiled step frees
    the logits of a chunk before it computes the next.
    """
    logits = F.linear(hidden, *head).detach().requires_grad_(any(needs))
    with torch.enable_grad():
        loss = _sum_of_losses(logits, targets, options)
    total = total + loss.detach()
    if not any(needs):
        return total, [], []
    (grad,) = torch.autograd.grad(loss, logits)  # [..., vocabulary]
    of_hidden, of_weight, *of_bias = needs
    flat, made = grad.flatten(0, -2), []
    if of_weight:
        # Each row adds at most its largest element to an element of this product, so in float16 the sum of many rows
        # overflows. The rows are divided by a power of two, which changes none of them significantly, and the product
        # is multiplied by it.
        divisor = 2 ** (targets.numel() // 16).bit_length() if hidden.dtype == torch.float16 else 1
        rows = hidden if divisor == 1 else hidden / divisor
        product = flat.T @ rows.flatten(0, -2)
        made.append(product if divisor == 1 else product.to(torch.float32) * divisor)
    if of_bias and of_bias[0]:
        made.append(flat.sum(0, dtype=_summed(flat.dtype)))
    return total, [grad @ head[0]] if of_hidden else [], [x + g for x, g in zip(sums, made, strict=True)]


def _sum_of_losses(logits: torch.Tensor, targets: torch.Tensor, options: tuple[Any, ...]) -> torch.Tensor:
    """Returns the sum of the losses of these rows. `logits`: [..., vocabulary], before the softcap."""
    softcap, ignore_index, label_smoothing = options
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(
        capped.to(_summed(logits.dtype)).flatten(0, -2),
        targets.flatten(),
        reduction="sum",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _divided(x: torch.Tensor, dim: int, chunks: int) -> Sequence[torch.Tensor]:
    """Returns the rows of each chunk. If `chunks` divides the length of the sequences, a chunk contains every
    `chunks`-th position of each sequence, so that with `sequence_parallel` every rank has some of its
    positions.
    """
    if x.shape[dim] % chunks == 0:
        return x.unflatten(dim, (-1, chunks)).unbind(dim)
    return x.flatten(0, dim).tensor_split(chunks)


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if like.shape[-2] % len(parts) == 0:
        return torch.stack([*parts], -2).flatten(-3, -2)
    return torch.cat([*parts]).view_as(like)


def _operand(x: Any) -> str:
    return "fz.weighted too" if isinstance(x, Weighted) else shown(x)


def _check_head(
    hidden: Any,
    weight: Any,
    targets: Any,
    bias: Any,
    chunks: Any,
    ignore_index: Any,
    label_smoothing: Any,
    softcap: Any,
    reduction: Any,
) -> None:
    """Raises FzeroTypeError listing the arguments of `chunked_cross_entropy` that it cannot use."""
    problems = [
        f"{name}: {type(x).__name__}, not a tensor"
        for name, x in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias))
        if not isinstance(x, torch.Tensor) and (name != "bias" or x is not None)
    ]
    if not problems:
        problems += [
            f"{name}: {shown(x)}, not floating point"
            for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias))
            if x is not None and not x.is_floating_point()
        ]
        if hidden.dim() < 2:
            problems.append(f"hidden: {shown(hidden)}, not [..., features] of at least two dimensions")
        elif weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            problems.append(f"weight: {shown(weight)}, not [vocabulary, {hidden.shape[-1]}] as hidden {shown(hidden)}")
        elif bias is not None and bias.shape != weight.shape[:1]:
            problems.append(f"bias: {shown(bias)}, not [{weight.shape[0]}]")
        others = [(n, x) for n, x in (("weight", weight), ("bias", bias)) if x is not None and x.dtype != hidden.dtype]
        if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # autocast would cast them
            problems += [f"{n}: {shown(x)}, not of the dtype of hidden, {shown(hidden)}" for n, x in others]
        if targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]:
            problems.append(f"targets: {shown(targets)}, not int64{list(hidden.shape[:-1])} as the rows of hidden")
    problems += whole_number("chunks", chunks) if chunks is not None else []
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        problems.append(f"ignore_index={shown(ignore_index)}: must be a whole number")
    problems += number("label_smoothing", label_smoothing, at_least=0) or (
        [f"label_smoothing={label_smoothing}: must be at most 1"] if label_smoothing > 1 else []
    )
    problems += number("softcap", softcap, above=0, below=math.inf) if softcap is not None else []
    if reduction not in ("mean", "sum", "weighted"):
        problems.append(f"reduction={shown(reduction)}: must be 'mean', 'sum' or 'weighted'")
    if problems:
        fix = "fz.chunked_cross_entropy(hidden, head.weight, targets), of the input of the head and not of its logits"
        raise FzeroTypeError("chunked_cross_entropy", "invalid arguments", problems, fix)
