"""Defines evaluation steps: a function of parameters and batch, forward only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fzero._utils.arguments import function
from fzero.errors import FzeroTypeError
from fzero.loss import means
from fzero.step.checks import check_arguments, check_params, wants_key
from fzero.trace.guards.rejections import plainly
from fzero.trace.guards.write_guard import Untouched


@dataclass(frozen=True)
class EvalStep:
    """A forward-only step. Made by `eval_step`.

    Attributes:
        fn: the function of the parameters and the batch.
        transforms: the transforms that were applied, in the order of their application.

    Example:
        >>> import torch, fzero as fz
        >>> fz.eval_step(lambda p, x: x @ p["w"])({"w": torch.eye(2)}, torch.ones(1, 2))
        tensor([[1., 1.]])
    """

    fn: Callable[..., Any]
    transforms: tuple[Any, ...] = ()

    @property
    def exact(self) -> Callable[[str, str], bool] | None:
        """Predicate `(path, compute)` of the tensors that stay in their dtype whatever the compute dtype is, as for a
        training step."""
        return getattr(self.fn, "exact", None)

    @property
    def name(self) -> str:
        """The name of the function, which programs and errors print."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, params: Any, *batch: Any) -> Any:
        """Runs the function eagerly on one device, without gradients. The transforms change nothing here.

        Args:
            params: a pytree of unsharded tensors.
            *batch: the remaining arguments of the function.

        Returns:
            The outputs of the function; each `fz.weighted` output is replaced by its mean.

        Raises:
            FzeroTypeError: if the function cannot be called with so many arguments, or if a parameter is not a tensor.
        """
        check_arguments(self.fn, len(batch))
        check_params(params, "eval_step")
        with torch.no_grad(), plainly("eval_step"), Untouched("eval_step", params=params, batch=batch):
            result = self.fn(params, *batch)
        return means(result)


def eval_step(fn: Callable[..., Any]) -> EvalStep:
    """Makes a forward-only step: `fn(params, *batch) -> outputs` under the same transforms as training.

    Outputs that are `fz.weighted` are returned as `total / count` over the complete mesh; all others are those of
    this rank. See docs/guides/losses-metrics.md, Evaluation.

    Args:
        fn: a function of the parameters and of any number of further pytrees of tensors, all passed by position.
            Returns a pytree of tensors; no gradient is computed. It gets no key: random numbers in an evaluation come
            from a key that is one of its arguments.

    Raises:
        FzeroTypeError: if the function cannot be called in this way.

    Example:
        >>> import torch
        >>> eval_step(lambda p, x: x @ p)(torch.ones(2), torch.ones(3, 2))
        tensor([2., 2., 2.])
    """
    is_model = hasattr(fn, "train_step")
    problems = (
        [f"fn is {type(fn).__name__}, a {'model' if is_model else 'step'}"]
        if is_model or hasattr(fn, "transforms")
        else function("fn", fn, "params", more=True)
    )
    fix = "model.eval_step(fn)" if is_model else "write fn(params, *batch), e.g. the loss function"
    if not problems and wants_key(fn) and inspect.signature(fn).parameters["key"].default is inspect.Parameter.empty:
        problems = [f"{getattr(fn, '__name__', type(fn).__name__)}{inspect.signature(fn)}: an evaluation has no key"]
        fix = (
            "evaluate a function without dropout, or give a key as an argument: fz.eval_step(lambda params, batch, "
            "key: loss_fn(params, batch, key=key))"
        )
    if problems:
        raise FzeroTypeError("eval_step", "takes a function of parameters and batch", problems, fix)
    return EvalStep(fn)
