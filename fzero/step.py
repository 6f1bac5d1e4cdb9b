"""Defines steps, made of a loss and an optimizer, and the plain step: the reference semantics.

A step is a value: its functions, and the records of the transforms applied to it. Called directly it runs its functions
eagerly through autograd, whatever its transforms: they change how a step is carried out, not what it means.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import compat, tree
from fzero import random as fzrandom
from fzero.arguments import Predicate, accepts, accepts_none, flag, function, number, predicate, shown
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.layout import ties, torn_ties
from fzero.loss import Weighted, flatten_means, new_values, split_loss
from fzero.optim import GradientTransformation, global_norm
from fzero.optim.apply import apply_optimizer
from fzero.optim.base import is_transformation
from fzero.trace.refusals import plainly
from fzero.trace.untouched import Untouched, without_gradients

INIT_STREAM = 0x1717
"""Folded into the key given to `init` to make the state's key, so that no step draws what the init function drew."""


MADE_ANEW = frozenset({"compute", "gradients"})
"""Roles of a state's extras that follow from the rest of it, or are written in each step before they are read: no
checkpoint has them."""


class State(NamedTuple):
    """Everything a step carries over. A pytree.

    Example:
        >>> import torch, fzero as fz
        >>> state = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1)).init({"w": torch.ones(2)})
        >>> state.step, state.params
        (tensor(0), {'w': tensor([1., 1.])})
    """

    step: torch.Tensor  # int64[]: how many steps have been taken
    params: Any
    opt_state: Any
    key: torch.Tensor  # int64[3]: step t draws from fold_in(key, t)
    extras: dict[str, Any]  # what transforms carry


def lasting(state: Any) -> Any:
    """A state without what is made anew: the copies of masters that a model computes with, and where gradients wait.
    Anything else as it is."""
    if not isinstance(state, State) or MADE_ANEW.isdisjoint(state.extras):
        return state
    return state._replace(extras={name: x for name, x in state.extras.items() if name not in MADE_ANEW})


@dataclass(frozen=True)
class Step:
    """A training step. Made by `train_step`.

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
        """Predicate `(path, compute)` of the leaves that stay in their dtype whatever is computed in, such as the
        buffers of a module: an attribute of the loss function."""
        return getattr(self.loss_fn, "exact", None)

    @property
    def name(self) -> str:
        return getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)

    def trains(self, params: Any) -> list[bool]:
        """For each leaf whether it is trained: a floating-point leaf that `trainable` accepts and `mutable` does not.

        Raises:
            FzeroTypeError: complex leaves that would be.
            FzeroValueError: a tied leaf of which `trainable` accepts some paths alone.
        """
        meta, paths = _meta_leaves(params), tree.paths(params, "params")
        asked = [
            not kept and (x.is_floating_point() or x.is_complex())
            for kept, x in zip(self.mutates(params), meta, strict=True)
        ]
        ask = self.trainable
        accepted = [
            a and (ask is None or accepts("train_step", "trainable", ask, p, x))
            for a, p, x in zip(asked, paths, meta, strict=True)
        ]
        if wrong := [
            f"{p}: {tree.describe(x)}"
            for p, x, trained in zip(paths, meta, accepted, strict=True)
            if trained and x.is_complex()
        ]:
            fix = (
                "give torch.view_as_real(leaf) and use torch.view_as_complex in the loss; or freeze it: "
                "trainable=lambda path, leaf: not leaf.is_complex()"
            )
            raise FzeroTypeError(message("train_step", "complex leaves are not trained", wrong, fix))
        if torn := torn_ties(paths, ties(tree.leaves(params)), accepted, "trainable"):
            raise FzeroValueError(
                message(
                    "train_step",
                    "tied leaves are trained by some of their paths alone",
                    torn,
                    "accept all their paths, or none",
                )
            )
        return accepted

    def mutates(self, params: Any) -> list[bool]:
        """For each leaf whether the loss function returns its new value: one that `mutable` accepts.

        Raises:
            FzeroTypeError: complex leaves among them.
            FzeroValueError: a tied leaf of which `mutable` accepts some paths alone; paths of which it accepts none.
        """
        meta, paths = _meta_leaves(params), tree.paths(params, "params")
        accepted = [
            self.mutable is not None and accepts("train_step", "mutable", self.mutable, p, x)
            for p, x in zip(paths, meta, strict=True)
        ]
        if self.mutable is not None and not any(accepted) and (missed := accepts_none("mutable", self.mutable, paths)):
            raise FzeroValueError(
                message(
                    "train_step",
                    "no leaf is mutable",
                    missed,
                    "give a part of a path as it stands here, or leave `mutable` out",
                )
            )
        if wrong := [
            f"{p}: {tree.describe(x)}"
            for p, x, kept in zip(paths, meta, accepted, strict=True)
            if kept and x.is_complex()
        ]:
            raise FzeroTypeError(
                message(
                    "train_step",
                    "complex leaves are not averaged over ranks",
                    wrong,
                    "give torch.view_as_real(leaf) in its place",
                )
            )
        if torn := torn_ties(paths, ties(tree.leaves(params)), accepted, "mutable"):
            raise FzeroValueError(
                message(
                    "train_step",
                    "tied leaves are mutable by some of their paths alone",
                    torn,
                    "accept all their paths, or none",
                )
            )
        return accepted

    def optimized(self, params: Any) -> Any:
        """The parameters as the optimizer sees them: None for a leaf that is not trained, and for every tie but the
        first."""
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
        """The first state.

        Args:
            params: a pytree of tensors, or a function of a key that returns one.
            key: int64[3]; the state's key derives from it. By default `fz.random.key(0)`.

        Raises:
            FzeroTypeError: a leaf that is not a tensor.
        """
        key = fzrandom.key(0) if key is None else key
        if callable(params):
            check_init(params)
            params = params(key)
        check_params(params)
        leaves, structure = tree.flatten(params)
        copies: dict[int, torch.Tensor] = {}
        params = tree.unflatten(structure, [copies.setdefault(i, leaves[i].detach().clone()) for i in ties(leaves)])
        return State(
            torch.zeros((), dtype=torch.int64),
            params,
            self.optimizer.init(self.optimized(params)),
            fzrandom.fold_in(key, INIT_STREAM),
            {},
        )

    def __call__(self, state: State, batch: Any, *more: Any) -> tuple[State, dict[str, Any]]:
        """One step, eagerly, on one device, the whole batch at once: what every transform of it must equal.

        Returns: the new state, and the metrics `loss`, `grad_norm` (before clipping), `finite` and, with `has_aux`,
            `aux`.
        """
        check_one_batch(more)
        check_state(state, "make one with step.init")
        check_batch(batch)
        check_bare(batch, tree.leaves(batch))
        batch = tree.map(functools.cache(torch.Tensor.detach), batch)  # by identity: leaves that are one tensor stay so
        leaves, structure = tree.flatten(state.params)
        first = ties(leaves)
        trained = [i for i, x in enumerate(self.trains(state.params)) if x and first[i] == i]
        kwargs = {"key": fzrandom.fold_in(state.key, state.step)} if wants_key(self.loss_fn) else {}

        mutable = self.mutates(state.params)
        if not trained:
            raise FzeroValueError(
                message(
                    "train_step",
                    "no trainable parameters",
                    fix="check `trainable`, and that parameters are floating point",
                )
            )
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            plainly("train_step"),
            Untouched("train_step", params=state.params, batch=batch),
        ):
            values = [leaves[i].detach().requires_grad_() for i in trained]
            at = dict(zip(trained, values, strict=True))
            params = tree.unflatten(structure, [at.get(t, leaves[t]) for t in first])
            paths = tree.paths(state.params, "params")
            with without_gradients("train_step", [(paths[i], x) for i, x in at.items()]):
                result = self.loss_fn(params, batch, **kwargs)
            parts, aux, new = split_loss(result, self.has_aux, self.mutable is not None)
            flatten_means(aux)
            changed = {i: x.detach().clone() for i, x in new_values(new, params, mutable).items()}
            value = parts.total if parts.count is None else parts.total / parts.count
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
            new_params, opt_state = apply_optimizer(self.optimizer, grads, state.opt_state, optimized)
        trains = zip(trained, found, tree.leaves(new_params), strict=True)
        new = {i: x for i, g, x in trains if g is not None} | changed  # as torch.optim leaves those without a gradient
        params = tree.unflatten(structure, [new.get(t, leaves[t]) for t in first])
        metrics: dict[str, Any] = {
            "loss": value,
            "grad_norm": norm,
            "finite": torch.isfinite(value) & torch.isfinite(norm),
        }
        if tree.leaves(aux):
            metrics["aux"] = tree.map(
                lambda x: x.total / x.count if isinstance(x, Weighted) else x,
                aux,
                is_leaf=lambda x: isinstance(x, Weighted),
            )
        return State(state.step + 1, params, opt_state, state.key, state.extras), metrics


@dataclass(frozen=True)
class EvalStep:
    """A forward-only step. Made by `eval_step`.

    Example:
        >>> import torch, fzero as fz
        >>> fz.eval_step(lambda p, x: x @ p["w"])({"w": torch.eye(2)}, torch.ones(1, 2))
        tensor([[1., 1.]])
    """

    fn: Callable[..., Any]
    transforms: tuple[Any, ...] = ()

    @property
    def exact(self) -> Callable[[str, str], bool] | None:
        """As of a training step."""
        return getattr(self.fn, "exact", None)

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, params: Any, *batch: Any) -> Any:
        """The function, eagerly, without gradients."""
        check_arguments(self.fn, len(batch))
        check_params(params, "eval_step")
        with torch.no_grad(), plainly("eval_step"), Untouched("eval_step", params=params, batch=batch):
            result = self.fn(params, *batch)
        return tree.map(
            lambda x: x.total / x.count if isinstance(x, Weighted) else x,
            result,
            is_leaf=lambda x: isinstance(x, Weighted),
        )


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    *,
    has_aux: bool = False,
    trainable: Predicate | None = None,
    mutable: Predicate | None = None,
) -> Step:
    """A training step from a loss and an optimizer.

    Args:
        loss_fn: `(params, batch) -> loss`, a 0-dim floating-point tensor, the mean over the batch; or
            `fz.weighted(total, count)`; or `(loss, aux)` with `has_aux`. A keyword-only parameter `key` receives the
            step's PRNG key.
        optimizer: a pair `init(params)`, `update(grads, opt_state, params)`: see `fzero.optim`.
        has_aux: whether the loss function also returns a pytree of tensors for the metrics. They are averaged over
            ranks and micro-batches, `fz.weighted` ones exactly.
        trainable: predicate `(path, leaf)`; a leaf it refuses gets no gradient and no optimizer state. Integer leaves
            are never trained, and complex ones are to be refused. Of a tied leaf it accepts all paths, or none.
        mutable: predicate `(path, leaf)` of the leaves whose new values the loss function returns, such as the running
            statistics of a batch norm: it returns `(loss, new)`, or `(loss, aux, new)` with `has_aux`. `new` is a tree
            like `params` with a value for each of these leaves, in its shape and dtype; other leaves are left out,
            None, or as they came. They are assigned at the end of the step. Floating-point values are averaged over
            ranks and micro-batches, others must be the same on all of them. They get no gradient and no optimizer
            state, rest whole and in their own dtype. See docs/mutable.md.

    Memory and communication: none until it is compiled; each transform says what it adds.

    Raises:
        FzeroTypeError: an optimizer without `init` and `update`, or that takes other arguments; from the step, a
            complex leaf that is not refused; new values that are missing, of another shape or dtype, or of leaves that
            `mutable` does not accept.
        FzeroValueError: from the step, a tied leaf that `trainable` or `mutable` accepts by some of its paths alone;
            new values that are not floating point and differ between ranks or micro-batches, on every rank alike.
        TraceError: from the step, a `weighted` loss whose count depends on trainable parameters.

    Example:
        >>> import torch
        >>> from fzero import optim
        >>> step = train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), optim.sgd(0.1))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(4, 2))
        >>> metrics["loss"], state.params["w"]
        (tensor(4.), tensor([0.6000, 0.6000]))
    """
    problems = [] if callable(loss_fn) else [f"loss_fn is {type(loss_fn).__name__}, not a function"]
    fix = (
        "write loss_fn(params, batch) or loss_fn(params, batch, *, key), trainable=lambda path, leaf: 'frozen' not in "
        "path"
    )
    if callable(loss_fn) and not _takes(loss_fn):
        if isinstance(loss_fn, torch.nn.Module):
            problems.append(
                f"loss_fn is the module {type(loss_fn).__name__}{inspect.signature(loss_fn.forward)}, which does not "
                f"take (params, batch)"
            )
            fix = (
                "write a loss_fn(params, batch) with torch.func.functional_call(module, params, inputs); params: "
                "dict(module.named_parameters())"
            )
        else:
            problems.append(f"loss_fn{inspect.signature(loss_fn)} does not take (params, batch)")
    problems += flag("has_aux", has_aux) + predicate("trainable", trainable) + predicate("mutable", mutable)
    if problems:
        raise FzeroTypeError(message("train_step", "invalid arguments", problems, fix))
    if not is_transformation(optimizer):
        fix = "pass a pair of init and update as optim.GradientTransformation(init, update), e.g. optim.adamw(3e-4)"
        raise FzeroTypeError(message("train_step", f"{type(optimizer).__name__} is not an optimizer", fix=fix))
    if problems := function("optimizer.init", optimizer.init, "params") + function(
        "optimizer.update", optimizer.update, "grads", "opt_state", "params"
    ):
        fix = "write init(params) -> opt_state and update(grads, opt_state, params) -> (updates, opt_state)"
        raise FzeroTypeError(message("train_step", "this optimizer cannot be called", problems, fix))
    return Step(loss_fn, optimizer, has_aux, trainable, mutable)


def eval_step(fn: Callable[..., Any]) -> EvalStep:
    """A forward-only step: `fn(params, *batch) -> outputs` under the same transforms as training.

    Outputs that are `fz.weighted` come back as `total / count` over the whole mesh; all others are this rank's own. See
    docs/evaluation.md.

    Args:
        fn: a function of the parameters and of any number of further pytrees of tensors, all by position. Returns a
            pytree of tensors: no gradient is taken. It gets no key: what is drawn in an evaluation comes from a key
            that is one of its arguments.

    Raises:
        FzeroTypeError: a function that cannot be called so.

    Example:
        >>> import torch
        >>> eval_step(lambda p, x: x @ p)(torch.ones(2), torch.ones(3, 2))
        tensor([2., 2., 2.])
    """
    problems = (
        [f"fn is {type(fn).__name__}, a step"] if hasattr(fn, "transforms") else function("fn", fn, "params", more=True)
    )
    fix = "write fn(params, *batch), e.g. the loss function"
    if not problems and wants_key(fn) and inspect.signature(fn).parameters["key"].default is inspect.Parameter.empty:
        problems = [
            f"{getattr(fn, '__name__', type(fn).__name__)}{inspect.signature(fn)}: an evaluation has no key of its own"
        ]
        fix = (
            "evaluate a function without dropout, or give a key as an argument: fz.eval_step(lambda params, batch, "
            "key: loss_fn(params, batch, key=key))"
        )
    if problems:
        raise FzeroTypeError(message("eval_step", "takes a function of parameters and batch", problems, fix))
    return EvalStep(fn)


def weighted(total: torch.Tensor, count: torch.Tensor | int | float) -> Weighted:
    """A loss that is a mean of `count` things whose sum is `total`, averaged exactly over ranks and micro-batches of
    any size.

    A mean of means is wrong when ranks hold different counts (tokens that are not padding, say); this is not.

    Args:
        total: 0-dim floating-point tensor, the sum.
        count: how many were summed: a number or a 0-dim tensor, which must not depend on trainable parameters.

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
            message(
                "weighted",
                "takes a sum and what it is a sum over",
                problems,
                "fz.weighted(losses.sum(), losses.numel())",
            )
        )
    if not isinstance(count, torch.Tensor):
        count = torch.full((), float(count), dtype=torch.float32, device=total.device)
    return Weighted(total, count)


def compose(*transforms: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several transforms as one. Their order does not matter: transforms commute.

    Example:
        >>> import fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> a, b = fz.shard_params(), fz.accumulate(2)
        >>> compose(a, b)(step) == compose(b, a)(step)
        True
    """

    wrong = [
        f"argument {i}: {type(t).__name__}"
        for i, t in enumerate(transforms)
        if not callable(t) or isinstance(t, (Step, EvalStep))
    ]
    fix = "fz.compose(fz.shard_params(axis='data'), ...)(step)"
    if wrong:
        raise FzeroTypeError(message("compose", "takes transforms", wrong, fix))

    def apply(step: Any) -> Any:
        for i, transform in enumerate(transforms):
            # one that does nothing to an evaluation is taken along
            step = transform.add(step) if hasattr(transform, "add") else transform(step)
            if not hasattr(step, "transforms"):
                raise FzeroTypeError(
                    message(
                        "compose", "takes transforms", [f"argument {i} returns {type(step).__name__}, not a step"], fix
                    )
                )
        return step

    return apply


def wants_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function has a keyword-only parameter `key`."""
    parameter = inspect.signature(loss_fn).parameters.get("key")
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _takes(loss_fn: Callable[..., Any]) -> bool:
    """Whether a function can be called as a loss; where Python cannot tell, yes."""
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None, None, **({"key": None} if wants_key(loss_fn) else {}))
    except TypeError:
        return False
    return True


def check_arguments(fn: Callable[..., Any], num: int) -> None:
    """Raises if a function of an evaluation does not take the parameters and so many arguments more; where Python
    cannot tell it does."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *[None] * num)
    except TypeError as error:
        what = (
            f"{getattr(fn, '__name__', type(fn).__name__)}{signature} is called with the parameters and {num} more "
            f"argument{'s' * (num != 1)}"
        )
        raise FzeroTypeError(
            message(
                "eval_step",
                what,
                [str(error)],
                "give each of its arguments by itself: evaluate(params, inputs, labels)",
            )
        ) from None


def check_init(init_fn: Any) -> None:
    """Raises if what should be an init function is a module, or takes no key."""
    if isinstance(init_fn, torch.nn.Module):
        fix = "model = fz.functionalize(module); model.params are its tensors, model.train_step(optimizer) is its step"
        raise FzeroTypeError(message("init", f"parameters are tensors, {type(init_fn).__name__} is a module", fix=fix))
    if callable(init_fn) and (problems := function("params", init_fn, "key")):
        fix = "write init(key), e.g. lambda key: params"
        raise FzeroTypeError(
            message("init", "parameters are a tree of tensors, or a function that makes one", problems, fix)
        )


def _meta_leaves(params: Any) -> list[torch.Tensor]:
    """The arguments of a predicate: the leaves, without values."""
    with compat.no_modes():  # in a trace they are not part of what is traced
        return [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tree.leaves(params)]


def _not_dense(value: Any, root: str) -> list[str]:
    """Problems of a tree whose leaves should be dense tensors."""
    named = zip(tree.paths(value, root), tree.leaves(value), strict=True)
    kinds = [(p, _kind(x)) for p, x in named]
    odd = [f"{p}: a key that is neither a text nor a number" for p in tree.unnamed(value, root)]
    return [f"{p}: {kind}" for p, kind in kinds if kind] + odd


def _kind(x: Any) -> str:
    """The kind of a leaf that is not a dense tensor; empty for one that is."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return "a nested tensor" if x.is_nested else "" if x.layout is torch.strided else str(x.layout)


def check_one_batch(more: tuple[Any, ...]) -> None:
    """Raises if a training step is given more than a state and a batch."""
    if more:
        what = f"takes a state and one batch, not {len(more)} argument{'s' * (len(more) != 1)} more"
        raise FzeroTypeError(
            message(
                "step",
                what,
                fix="give the batch as one pytree, which is loss_fn's second argument: train(state, (inputs, labels))",
            )
        )


def check_batch(batch: Any) -> None:
    """Raises naming every leaf that is not a dense tensor."""
    wrong = _not_dense(batch, "batch")
    if wrong:
        fix = "convert with torch.as_tensor, .to_dense() or torch.nested.to_padded_tensor(x, 0.0); close over settings"
        raise FzeroTypeError(message("step", "a batch is a pytree of dense tensors", wrong, fix))


def check_bare(batch: Any, flat: list[Any]) -> None:
    """Raises if a loss could read of the leaves of a batch what a program cannot: attributes that someone has set, the
    methods of a class of the user's own, the graph that they come from, which a gradient would go on into."""
    if all(type(x) is torch.Tensor and not x.__dict__ and not x.requires_grad and not x.is_nested for x in flat):
        return
    check_batch(batch)
    found = []
    for path, x in zip(tree.paths(batch, "batch"), flat, strict=True):
        if isinstance(x, torch.Tensor):
            found += [] if type(x).__module__.partition(".")[0] == "torch" else [f"{path} is a {type(x).__name__}"]
            found += [f"{path} requires a gradient"] if x.requires_grad and torch.is_grad_enabled() else []
            found += [f"{path}.{name}" for name in compat.attributes(x) if not name.startswith("_fzero")]
    if found:
        fix = (
            "x.detach().clone().as_subclass(torch.Tensor) is the value alone; pass what else the loss reads as leaves "
            "of their own"
        )
        raise FzeroTypeError(
            message("step", "the leaves of a batch are values: a program does not see what else these are", found, fix)
        )


def check_state(state: Any, fix: str, owner: str = "step") -> None:
    """Raises if a value is not the state of a step: params and optimizer state aside, which are the user's and the
    optimizer's."""
    if not isinstance(state, State):
        raise FzeroTypeError(message(owner, f"the first argument is a State, not {type(state).__name__}", fix=fix))
    wrong = [
        f"state.{name}: {tree.describe(x)}, not int64{list(shape)}"
        for name, x, shape in (("step", state.step, ()), ("key", state.key, (3,)))
        if not isinstance(x, torch.Tensor)
        or x.dtype != torch.int64
        or x.shape not in (shape, (0,))  # what has moved away is empty, and has its own error
    ]
    if not isinstance(state.extras, dict):
        wrong.append(f"state.extras: {tree.describe(state.extras)}, not a dict")
    if wrong:
        raise FzeroTypeError(message(owner, "this is not a state of a step", wrong, fix))


def check_params(params: Any, owner: str = "init") -> None:
    """Raises naming every leaf that is not a dense tensor; a whole state is no parameters."""
    if isinstance(params, State):
        fix = "give state.params, or what the function reads beside them too: (state.params, state.opt_state)"
        raise FzeroTypeError(message(owner, "takes parameters, not the State that holds them", fix=fix))
    leaves, wrong = tree.leaves(params), _not_dense(params, "params")
    if wrong or not leaves:
        raise FzeroTypeError(
            message(
                owner,
                "parameters are tensors",
                wrong or ["there are none"],
                "put settings in the function (or close over them), tensors in params",
            )
        )
