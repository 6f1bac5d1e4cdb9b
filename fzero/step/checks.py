"""Checks what a step is given: parameters, state and batch, and how its functions are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from fzero import tree
from fzero._compat import compat
from fzero._utils.arguments import function
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.train_state import State, check_whole

P = ParamSpec("P")
R = TypeVar("R")


def wants_key(loss_fn: Callable[..., Any]) -> bool:
    """Returns whether a loss function has a keyword-only parameter `key`."""
    parameter = inspect.signature(loss_fn).parameters.get("key")
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def takes(loss_fn: Callable[..., Any]) -> bool:
    """Returns whether a function can be called as a loss; True if Python cannot tell."""
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
    """Raises an error if the function of an evaluation does not take the parameters and `num` more arguments. If
    Python cannot tell, it is accepted.
    """
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
            "eval_step", what, [str(error)], "give each of its arguments separately: evaluate(params, inputs, labels)"
        ) from None


def no_step(component: str, verb: str, given: Any, fix: str = "") -> FzeroTypeError:
    """Returns the error for something that should be a step, with a fix for modules, models and other objects."""
    fix = fix or "wrap the loss: fz.train_step(loss_fn, optimizer)"
    if isinstance(given, torch.nn.Module):
        fix = "fz.functionalize(module).train_step(optimizer, lambda out, batch: ...) is the step of a module"
    elif hasattr(given, "train_step"):
        fix = "a model makes its own step: model.train_step(optimizer)"
    return FzeroTypeError(component, f"{verb} a step, not {type(given).__name__}", fix=fix)


def check_init(init_fn: Any) -> None:
    """Raises an error if what should be an init function is a module or a model of `functionalize`, or takes no key."""
    is_model = hasattr(init_fn, "train_step")
    if is_model or isinstance(init_fn, torch.nn.Module):
        fix = "model.params are its tensors, model.train_step(optimizer) is its step"
        fix, what = (fix, "model") if is_model else (f"model = fz.functionalize(module); {fix}", "module")
        raise FzeroTypeError("init", f"parameters are tensors, {type(init_fn).__name__} is a {what}", fix=fix)
    if callable(init_fn) and (problems := function("params", init_fn, "key")):
        fix = "write init(key), e.g. lambda key: params"
        raise FzeroTypeError("init", "parameters are a tree of tensors, or a function that makes one", problems, fix)


def check_tree(loss_fn: Any, params: Any) -> None:
    """Raises an error if the parameters of a model's step are its tensors in another tree, such as a state dict:
    `trainable` and `mutable` go by paths, and would match none of them.
    """
    own = getattr(getattr(loss_fn, "model", None), "params", None)
    if own is None or tree.structure(own) == tree.structure(params):
        return
    mine, given = (dict(zip(tree.names(p), tree.paths(p, "params"), strict=True)) for p in (own, params))
    # The same dotted names under other paths, as in a state dict, whose keys contain dots.
    moved = [f"{given[name]}, not {path}" for name, path in mine.items() if given.get(name, path) != path]
    if moved:
        what = "these are the tensors of a module, but not in the tree of model.params"
        problems = moved if len(moved) <= 4 else [*moved[:3], f"... {len(moved) - 3} more"]
        fix = (
            "give model.params; a state dict is loaded before: module.load_state_dict(values), then "
            "fz.functionalize(module)"
        )
        raise FzeroTypeError("init", what, problems, fix)


def no_trainable(params: Any, loss_fn: Any) -> FzeroValueError:
    """Returns the error for a step that has nothing to train."""
    if (model := getattr(loss_fn, "model", None)) is not None:
        fix = "call module.requires_grad_(True), or p.requires_grad_(True) for some parameters, before fz.functionalize"
        if getattr(model, "directory", None) is not None:  # of a quantized directory, whose parameters are all frozen
            fix = (
                "train adapters: fz.hf.from_pretrained(..., adapter=peft.LoraConfig(r=8)); or parameters that are not "
                "quantized: fz.train_step(model.loss(), optimizer, trainable=lambda path, leaf: 'norm' in path)"
            )
        problems = ["no floating-point parameter of the module requires gradients"]
        return FzeroValueError("train_step", "no trainable parameters", problems, fix)
    named = tree.with_paths(params, "params")
    floats = [f"{path}: {tree.describe(x)}" for path, x in named if x.is_floating_point()]
    problems = ["no tensor is floating point"] if not floats else ["`trainable` matches none of these:", *floats[:5]]
    problems += [f"... {len(floats) - 5} more"] if len(floats) > 5 else []
    fix = "trainable=lambda path, leaf: ... returns True for the parameters to train; its paths are as above"
    fix = fix if floats else "give floating-point parameters, e.g. x.float()"
    return FzeroValueError("train_step", "no trainable parameters", problems, fix)


def _not_dense(value: Any, root: str) -> list[str]:
    """Returns the problems of a tree whose leaves should be dense tensors."""
    named = tree.with_paths(value, root)
    kinds = [(p, _kind(x)) for p, x in named]
    odd = [f"{p}: a key that is neither a text nor a number" for p in tree.unnamed(value, root)]
    return [f"{p}: {kind}" for p, kind in kinds if kind] + odd


def _kind(x: Any) -> str:
    """Returns the kind of a leaf that is not a dense tensor; empty for a dense tensor."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return "a nested tensor" if x.is_nested else "" if x.layout is torch.strided else str(x.layout)


def state_and_batch(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates the call of a training step with an error that explains the call if the state or the batch is
    missing.
    """

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (*args[1:], *kwargs.values())
        if len(given) < 2:
            alone = "nothing" if not given else "a state" if isinstance(given[0], State) else type(given[0]).__name__
            what = f"takes a state and a batch, not {alone}{' only' if given else ''}"
            fix = "once state = train.init(params), and in each step state, metrics = train(state, batch)"
            raise FzeroTypeError("step", what, fix=fix)
        return fn(*args, **kwargs)

    return called


def no_backward(loss: torch.Tensor) -> None:
    """Makes `loss.backward()` raise an error which says that the step is already done. A copy, or a pickled loss, is
    a plain tensor.
    """
    # Attributes of this tensor only: a subclass of torch.Tensor would change how every operation on the loss
    # dispatches.
    vars(loss).update(backward=_backward, __getstate__=_no_attributes)


def _backward(*args: Any, **kwargs: Any) -> None:
    what = "metrics['loss'] has no graph: train(state, batch) has computed the gradients and updated the parameters"
    fix = "leave out loss.backward(), optimizer.step() and zero_grad(): the returned state has the new parameters"
    raise FzeroTypeError("step", what, fix=fix)


def _no_attributes() -> None:
    return None


def check_one_batch(more: tuple[Any, ...]) -> None:
    """Raises an error if a training step is given more than a state and a batch."""
    if more:
        what = f"takes a state and one batch, not {len(more)} argument{'s' * (len(more) != 1)} more"
        raise FzeroTypeError(
            "step",
            what,
            fix="give the batch as one pytree, which is loss_fn's second argument: train(state, (inputs, labels))",
        )


def check_batch(batch: Any) -> None:
    """Raises an error that names every leaf that is not a dense tensor."""
    wrong = _not_dense(batch, "batch")
    if wrong:
        fixes = dict.fromkeys(_densely(x, x is batch) for x in tree.leaves(batch) if _kind(x))
        fix = ", ".join(fixes) or "texts or numbers as keys"
        fix = f"give {fix}; a loss may close over values that are not data: model.train_step(..., name=value)"
        raise FzeroTypeError("step", "a batch is a pytree of dense tensors", wrong, fix)


def _densely(x: Any, alone: bool) -> str:
    """Returns the dense tensors to give in place of a leaf of a batch."""
    if isinstance(x, torch.Tensor):
        return "torch.nested.to_padded_tensor(x, 0.0)" if x.is_nested else "x.to_dense()"
    if isinstance(x, Mapping):
        return f"dict({'batch' if alone else 'x'}) for a {type(x).__name__}"
    if hasattr(x, "__array__") or isinstance(x, (bool, int, float)):
        return f"torch.as_tensor(x) for {'an array' if hasattr(x, '__array__') else 'a number'}"
    return f"tensors for the contents of a {type(x).__name__}"


def check_bare(batch: Any, flat: list[Any]) -> None:
    """Raises an error if the leaves of a batch are more than values: if they have attributes that someone has set,
    methods of the user's own class, or an autograd graph.
    """
    # The usual case, decided quickly because every step comes here.
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
            "step", "the tensors of a batch are plain values: a program does not see other properties", found, fix
        )


def check_state(state: Any, fix: str, owner: str = "step") -> None:
    """Raises an error if a value is not the state of a step. The params and the optimizer state are not checked: they
    belong to the user and to the optimizer.
    """
    if not isinstance(state, State):
        raise FzeroTypeError(owner, f"the first argument is a State, not {type(state).__name__}", fix=fix)
    check_whole(state, owner)
    wrong = [
        f"state.{name}: {tree.describe(x)}, not int64{list(shape)}"
        for name, x, shape in (("step", state.step, ()), ("key", state.key, (3,)))
        if not isinstance(x, torch.Tensor)
        or x.dtype != torch.int64
        or x.shape not in (shape, (0,))  # a state that was moved elsewhere is empty, and has its own error
    ]
    if not isinstance(state.extras, dict):
        wrong.append(f"state.extras: {tree.describe(state.extras)}, not a dict")
    if wrong:
        raise FzeroTypeError(owner, "this is not a state of a step", wrong, fix)


def check_params(params: Any, owner: str = "init") -> None:
    """Raises an error that names every leaf that is not a dense tensor, or if a complete state is given instead of
    parameters.
    """
    if isinstance(params, State):
        fix = "give state.params, or also the other trees that the function reads: (state.params, state.opt_state)"
        raise FzeroTypeError(owner, "takes parameters, not the State that holds them", fix=fix)
    leaves, wrong = tree.leaves(params), _not_dense(params, "params")
    if wrong or not leaves:
        raise FzeroTypeError(
            owner,
            "parameters are tensors",
            wrong or ["there are none"],
            "put settings in the function (or close over them), tensors in params",
        )
