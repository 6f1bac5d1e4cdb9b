"""Defines training steps, made from a loss and an optimizer, and their reference semantics.

A step is a value: its functions, and the records of the transforms applied to it. Called directly, it runs its
functions eagerly through autograd, whatever its transforms: they change how a step is computed, not what it computes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero._compat import compat
from fzero._utils.arguments import Predicate, accepts, accepts_none, flag, function, keywords, predicate
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.loss import flatten_means, is_empty, means, new_values, split_loss
from fzero.ops.weight_quantization import scales_among
from fzero.optim import GradientTransformation, global_norm
from fzero.optim.apply import apply_optimizer, passed_on, reject_passed_on
from fzero.optim.gradient_transformation import is_transformation
from fzero.optim.nonfinite import SkipsNonfinite
from fzero.sharding.layout import ties, torn_ties
from fzero.step.checks import (
    check_bare,
    check_batch,
    check_init,
    check_one_batch,
    check_params,
    check_state,
    check_tree,
    no_backward,
    no_trainable,
    state_and_batch,
    takes,
    wants_key,
)
from fzero.trace.guards.rejections import plainly
from fzero.trace.guards.write_guard import Untouched, without_gradients
from fzero.train_state import INIT_STREAM, State


@dataclass(frozen=True)
class Step:
    """A training step. Made by `train_step`.

    Attributes:
        loss_fn, optimizer, has_aux, trainable, mutable: the arguments of `train_step`.
        transforms: the transforms that were applied, in the order of their application.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> state.params["w"], metrics["loss"].item()
        (tensor([0.5000, 0.5000]), 2.0)
    """

    loss_fn: Callable[..., Any]
    optimizer: GradientTransformation
    has_aux: bool = False
    trainable: Predicate | None = None
    mutable: Predicate | None = None
    transforms: tuple[Any, ...] = ()

    @property
    def exact(self) -> Callable[[str, str], bool] | None:
        """Predicate `(path, compute)` of the tensors that stay in their dtype whatever the compute dtype is, such as
        the buffers of a module. It is an attribute of the loss function.
        """
        return getattr(self.loss_fn, "exact", None)

    @property
    def name(self) -> str:
        """The name of the loss function, which programs and errors print."""
        return getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)

    def trains(self, params: Any) -> list[bool]:
        """Returns for each leaf of the parameters whether it is trained: whether it is floating-point, and
        `trainable` accepts it and `mutable` does not. Without `trainable`, these are all except scales of quantized
        tensors.

        Raises:
            FzeroTypeError: if complex leaves would be trained, or scales of quantized tensors.
            FzeroValueError: if `trainable` accepts only some of the paths of a tied leaf.
        """
        check_tree(self.loss_fn, params)
        meta, paths = _meta_leaves(params), tree.paths(params, "params")
        asked = [
            not kept and (x.is_floating_point() or x.is_complex())
            for kept, x in zip(self.mutates(params), meta, strict=True)
        ]
        scales = scales_among(params)
        if self.trainable is None:
            asked = [a and not scale for a, scale in zip(asked, scales, strict=True)]
        accepted = [
            a and accepts("train_step", "trainable", self.trainable, p, x)
            for a, p, x in zip(asked, paths, meta, strict=True)
        ]
        if wrong := [p for p, scale, trained in zip(paths, scales, accepted, strict=True) if scale and trained]:
            fix = "trainable=lambda path, leaf: ... and not path.endswith('.absmax')"
            raise FzeroTypeError("train_step", "a quantized tensor is not trained, nor are its scales", wrong, fix)
        if wrong := [
            f"{p}: {tree.describe(x)}"
            for p, x, trained in zip(paths, meta, accepted, strict=True)
            if trained and x.is_complex()
        ]:
            freeze = "or freeze it: trainable=lambda path, leaf: not leaf.is_complex()"
            fix = f"give torch.view_as_real(leaf) and use torch.view_as_complex in the loss; {freeze}"
            if hasattr(self.loss_fn, "model"):
                trained = zip(tree.names(params), meta, accepted, strict=True)
                names = [name for name, x, trains in trained if trains and x.is_complex()]
                fix = f"train real and imaginary parts, before fz.functionalize(module), by these lines; {freeze}"
                fix += _as_complex(names)
            raise FzeroTypeError("train_step", "complex parameters cannot be trained", wrong, fix)
        _check_ties("trainable", "trained", params, paths, accepted)
        return accepted

    def mutates(self, params: Any) -> list[bool]:
        """Returns for each leaf of the parameters whether the loss function returns its new value: whether `mutable`
        accepts it.

        Raises:
            FzeroTypeError: if complex leaves are among them.
            FzeroValueError: if `mutable` accepts only some of the paths of a tied leaf, or no path at all.
        """
        meta, paths = _meta_leaves(params), tree.paths(params, "params")
        accepted = [
            self.mutable is not None and accepts("train_step", "mutable", self.mutable, p, x)
            for p, x in zip(paths, meta, strict=True)
        ]
        if self.mutable is not None and not any(accepted) and (missed := accepts_none("mutable", self.mutable, paths)):
            raise FzeroValueError(
                "train_step",
                "no tensor is mutable",
                missed,
                "give part of a path as it is printed here, or leave `mutable` out",
            )
        if wrong := [
            f"{p}: {tree.describe(x)}"
            for p, x, kept in zip(paths, meta, accepted, strict=True)
            if kept and x.is_complex()
        ]:
            raise FzeroTypeError(
                "train_step",
                "complex tensors are not averaged over ranks",
                wrong,
                "give torch.view_as_real(leaf) in its place",
            )
        _check_ties("mutable", "mutable", params, paths, accepted)
        return accepted

    def optimized(self, params: Any) -> Any:
        """Returns the parameters as the optimizer sees them: None for a leaf that is not trained, and for every tied
        leaf but the first.
        """
        flat, structure = tree.flatten(params)
        first = ties(flat)
        return tree.unflatten(
            structure,
            [
                x if keep and first[i] == i else None
                for i, (x, keep) in enumerate(zip(flat, self.trains(params), strict=True))
            ],
        )

    def init(self, params: Any, key: torch.Tensor | None = None) -> State:
        """Returns the initial state.

        Args:
            params: a pytree of tensors, or a function of a key that returns one.
            key: int64[3]; the state's key is derived from it. By default `fz.random.key(0)`.

        Raises:
            FzeroTypeError: if a leaf is not a tensor.
        """
        key = fzrandom.key(0) if key is None else key
        if callable(params):
            check_init(params)
            params = params(key)
        check_params(params)
        leaves, structure = tree.flatten(params)
        copies: dict[int, torch.Tensor] = {}
        # Tied leaves stay tied: each of them gets the copy of the first.
        params = tree.unflatten(structure, [copies.setdefault(i, leaves[i].detach().clone()) for i in ties(leaves)])
        return State(
            torch.zeros((), dtype=torch.int64),
            params,
            self.optimizer.init(self.optimized(params)),
            fzrandom.fold_in(key, INIT_STREAM),
            {},
        )

    @state_and_batch
    def __call__(self, state: State, batch: Any, *more: Any) -> tuple[State, dict[str, Any]]:
        """Runs one step eagerly, on one device, with the complete batch at once. Every transform of the step must
        give an equal result.

        Returns:
            The new state, and the metrics `loss`, `grad_norm` (before clipping), `finite` and, with `has_aux`, `aux`.
        """
        check_one_batch(more)
        check_state(state, "make one with step.init")
        check_batch(batch)
        check_bare(batch, tree.leaves(batch))
        # by identity: leaves that are one tensor stay one tensor
        batch = tree.map(functools.cache(torch.Tensor.detach), batch)
        leaves, structure = tree.flatten(state.params)
        first = ties(leaves)
        trained = [i for i, x in enumerate(self.trains(state.params)) if x and first[i] == i]
        kwargs = {"key": fzrandom.fold_in(state.key, state.step)} if wants_key(self.loss_fn) else {}

        mutable = self.mutates(state.params)
        if not trained:
            raise no_trainable(state.params, self.loss_fn)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            plainly("train_step"),
            Untouched("train_step", params=state.params, batch=batch),
        ):
            values = [leaves[i].detach().requires_grad_() for i in trained]
            # Tied leaves share one tensor, so that its gradient is the sum over all its uses.
            at = dict(zip(trained, values, strict=True))
            params = tree.unflatten(structure, [at.get(t, leaves[t]) for t in first])
            paths = tree.paths(state.params, "params")
            with without_gradients("train_step", [(paths[i], x) for i, x in at.items()]):
                result = self.loss_fn(params, batch, **kwargs)
            parts, aux, new = split_loss(result, self.has_aux, self.mutable is not None)
            flatten_means(aux)
            changed = {i: x.detach().clone() for i, x in new_values(new, params, mutable).items()}
            value = parts.total if parts.count is None else parts.total / parts.count
            # A parameter that the loss does not read has no gradient. The optimizer gets zeros for it, and below it
            # keeps its value.
            found = torch.autograd.grad(value, values, allow_unused=True)
        value, aux = value.detach(), tree.map(torch.Tensor.detach, aux)
        by_index = {i: torch.zeros_like(leaves[i]) if g is None else g for i, g in zip(trained, found, strict=True)}
        grads = tree.unflatten(structure, [by_index.get(i) for i in range(len(leaves))])
        norm = global_norm(grads)
        optimized = self.optimized(state.params)
        with (
            plainly("optimizer"),
            Untouched("optimizer", **{"the gradient of params": grads}, opt_state=state.opt_state, params=optimized),
        ):
            new_params, opt_state, updates = apply_optimizer(self.optimizer, grads, state.opt_state, optimized)
        used = {paths[i]: by_index[i] for i, g in zip(trained, found, strict=True) if g is not None}
        reject_passed_on(passed_on(updates, used))
        watched = norm if isinstance(self.optimizer, SkipsNonfinite) else None
        # A mean over nothing has no meaningful gradient: parameters and optimizer state stay as they are.
        if (empty := is_empty(value, parts.count, watched)) is not None:
            keep = functools.partial(torch.where, empty)
            new_params = tree.map(keep, optimized, new_params)
            opt_state = tree.map(keep, state.opt_state, opt_state)
        trains = zip(trained, found, tree.leaves(new_params), strict=True)
        # parameters without a gradient keep their value, as in torch.optim
        new = {i: x for i, g, x in trains if g is not None} | changed
        params = tree.unflatten(structure, [new.get(t, leaves[t]) for t in first])
        metrics: dict[str, Any] = {
            "loss": value,
            "grad_norm": norm,
            "finite": torch.isfinite(value) & torch.isfinite(norm),
        }
        no_backward(value)
        if tree.leaves(aux):
            metrics["aux"] = means(aux)
        return State(state.step + 1, params, opt_state, state.key, state.extras), metrics


@keywords
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    *,
    has_aux: bool = False,
    trainable: Predicate | None = None,
    mutable: Predicate | None = None,
) -> Step:
    """Makes a training step from a loss and an optimizer.

    Args:
        loss_fn: `(params, batch) -> loss`, a 0-dim floating-point tensor, the mean over the batch; or
            `fz.weighted(total, count)`; or `(loss, aux)` with `has_aux`. A keyword-only parameter `key` receives the
            step's PRNG key.
        optimizer: a pair `init(params)`, `update(grads, opt_state, params)`: see `fzero.optim`.
        has_aux: whether the loss function also returns a pytree of tensors for the metrics. They are averaged over
            ranks and micro-batches, `fz.weighted` ones exactly.
        trainable: predicate `(path, leaf)`. A leaf that it rejects gets no gradient and no optimizer state. Integer
            leaves are never trained; complex leaves, and scales of quantized tensors (`.absmax`), must be rejected. It
            must accept all paths of a tied leaf, or none. None: all other floating-point leaves; for `model.loss` and
            `model.calling`, those of `model.trainable`.
        mutable: predicate `(path, leaf)` of the leaves whose new values the loss function returns, such as the
            running statistics of a batch norm: it returns `(loss, new)`, or `(loss, aux, new)` with `has_aux`. `new`
            is a tree like `params` with a value for each of these leaves, in its shape and dtype; other leaves are
            left out, None, or unchanged. The values are assigned at the end of the step. Floating-point values are
            averaged over ranks and micro-batches, others must be the same on all of them. Mutable leaves get no
            gradient and no optimizer state, and are stored unsharded and in their own dtype. None: no leaf; for
            `model.loss` and `model.calling`, those of `model.mutable`. See docs/guides/buffers.md.

    Memory and communication: none until it is compiled; each transform says what it adds.

    Raises:
        FzeroTypeError: for an optimizer without `init` and `update`, or whose functions take other arguments. From
            the step: for a complex leaf, or new values that are missing, have another shape or dtype, or belong to
            leaves that `mutable` rejects.
        FzeroValueError: from the step, if `trainable` or `mutable` accepts only some of the paths of a tied leaf; or
            if new values are not floating point and differ between ranks or micro-batches, on every rank alike.
        TraceError: from the step, for a `weighted` loss whose count depends on trainable parameters.

    Example:
        >>> import torch
        >>> from fzero import optim
        >>> step = train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), optim.sgd(0.1))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(4, 2))
        >>> metrics["loss"], state.params["w"]
        (tensor(4.), tensor([0.6000, 0.6000]))
    """
    is_model = hasattr(loss_fn, "train_step")
    is_function = callable(loss_fn) and not is_model
    problems = [] if is_function else [f"loss_fn is {type(loss_fn).__name__}, not a function"]
    fix = (
        "write loss_fn(params, batch) or loss_fn(params, batch, *, key), trainable=lambda path, leaf: 'frozen' not in "
        "path"
    )
    if is_model:
        fix = "a model makes its own step: model.train_step(optimizer)"
    if is_function and not takes(loss_fn):
        if isinstance(loss_fn, torch.nn.Module):
            problems.append(
                f"loss_fn is the module {type(loss_fn).__name__}{inspect.signature(loss_fn.forward)}, which does not "
                f"take (params, batch)"
            )
            fix = (
                "model = fz.functionalize(module); step = model.train_step(optimizer, lambda out, batch: ...), of the "
                "loss of its outputs; train.init(model.params)"
            )
        else:
            problems.append(f"loss_fn{inspect.signature(loss_fn)} does not take (params, batch)")
    # The loss of a functionalized module knows its frozen parameters and its buffers: without these defaults they
    # would be trained with all other floating-point leaves.
    model: Any = getattr(loss_fn, "model", None)
    if hasattr(model, "train_step"):
        trainable = model.trainable if trainable is None else trainable
        mutable = model.mutable if mutable is None else mutable
    problems += flag("has_aux", has_aux) + predicate("trainable", trainable) + predicate("mutable", mutable)
    if problems:
        raise FzeroTypeError("train_step", "invalid arguments", problems, fix)
    if not is_transformation(optimizer):
        fix = "pass a pair of init and update as optim.GradientTransformation(init, update), e.g. optim.adamw(3e-4)"
        what = f"{type(optimizer).__name__} is not an optimizer"
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        if issubclass(kind, torch.optim.Optimizer):
            what = f"{kind.__name__} is an optimizer of PyTorch's, which writes to parameters"
            fix = "take a pair of init and update, pure functions, of fz.optim: optim.adamw(3e-4)"
        raise FzeroTypeError("train_step", what, fix=fix)
    if problems := function("optimizer.init", optimizer.init, "params") + function(
        "optimizer.update", optimizer.update, "grads", "opt_state", "params"
    ):
        fix = "write init(params) -> opt_state and update(grads, opt_state, params) -> (updates, opt_state)"
        raise FzeroTypeError("train_step", "this optimizer cannot be called", problems, fix)
    return Step(loss_fn, optimizer, has_aux, trainable, mutable)


def _as_complex(names: list[str]) -> str:
    """Returns code, for an error message, that stores each complex parameter of a module as two real ones.
    Elementwise optimizers then do the same as those of torch.optim, which view complex parameters as real.
    """
    return f"""
  class AsComplex(torch.nn.Module):
      forward = lambda self, real, imag: torch.complex(real, imag)
      right_inverse = lambda self, z: (z.real.clone(), z.imag.clone())
  for name in {names!r}:
      path, _, leaf = name.rpartition(".")
      torch.nn.utils.parametrize.register_parametrization(module.get_submodule(path), leaf, AsComplex())"""


def _meta_leaves(params: Any) -> list[torch.Tensor]:
    """Returns the arguments of a predicate: the leaves, without values."""
    with compat.no_modes():  # during a trace, these are not part of the traced code
        return [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tree.leaves(params)]


def _check_ties(kind: str, verb: str, params: Any, paths: list[str], accepted: list[bool]) -> None:
    """Raises an error if a predicate, `trainable` or `mutable`, accepts only some of the paths of a tied leaf."""
    if torn := torn_ties(paths, ties(tree.leaves(params)), accepted, kind):
        problem = f"tied parameters are {verb} by only some of their paths"
        raise FzeroValueError("train_step", problem, torn, "match all their paths, or none")
