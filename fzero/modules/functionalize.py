"""Defines `functionalize`: represents a module as a pytree of tensors and pure functions of it."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import nn

from fzero import tree
from fzero._compat import compat
from fzero._utils.arguments import Predicate, function, keywords
from fzero.errors import FzeroTypeError, FzeroValueError, TraceError, attribute_of
from fzero.loss import Weighted
from fzero.modules.bound_module import Forward
from fzero.modules.buffers import written_names
from fzero.modules.layers import Blocks, chosen, find_layers
from fzero.modules.loss_weighting import Counting
from fzero.modules.meta_module import (
    TensorSlot,
    check_hooks,
    check_kinds,
    check_plain,
    named,
    nested,
    skeleton_of,
    slots_of,
)
from fzero.modules.module_calls import Loss, ModuleCalls, empty_like, num_rows
from fzero.modules.module_guard import Original
from fzero.modules.module_init import initialized
from fzero.modules.module_mode import Given, Mode
from fzero.modules.module_preparation import kept_in_fp32, prepared
from fzero.optim import GradientTransformation
from fzero.step import EvalStep, Step, eval_step, train_step
from fzero.trace.guards.function_caches import emptied
from fzero.trace.guards.settings_walk import SelfChecked
from fzero.train_state import check_computed, check_whole
from fzero.transforms.remat import remat

_log = logging.getLogger("fzero")


@keywords
def functionalize(module: nn.Module, *, blocks: Blocks | None = None, mutable: Sequence[str] = ()) -> Functional:
    """Returns a module as a pytree of its tensors and pure functions of it.

    The module is not changed. Its forward runs, as it is written, on tensors that are given for each call, and its
    repeated layers become blocks. An error names everything that is not supported: an attribute that the forward
    changes, a buffer that it unexpectedly overwrites, a branch on a tensor's value.

    Args:
        module: any module, real or on the meta device. Its training mode is the mode of `apply`.
        blocks: names of submodules ("model.layers.*": `*` matches any text) and classes of submodules that become
            blocks; by default the repeated ones: members of a `ModuleList` or `Sequential` that has two or more of
            their class, except single layers of `torch.nn` (`Linear`). Of nested matches, the outermost is the block.
            `()`: none.
        mutable: names of tensors that the forward overwrites ("teacher.*"): buffers, in addition to those found in
            its code, and parameters without a gradient, such as those of a teacher.

    Raises:
        FzeroTypeError: if `module` is not a module, or cannot be copied; if parts of it are scripted, or lazy and
            have not run.
        FzeroValueError: if `blocks` or `mutable` match nothing, or match a parameter that requires a gradient.

    Example:
        >>> import torch, fzero as fz
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = fz.functionalize(net)
        >>> fz.tree.names(model.params)
        ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> x = torch.randn(3, 4)
        >>> torch.equal(model.apply(model.params, x), net(x))
        True
    """
    if not isinstance(module, nn.Module):
        what = f"takes a module, not {type(module).__name__}"
        raise FzeroTypeError("functionalize", what, fix="a function can be used directly: fz.train_step(loss_fn, ...)")
    return Functional(module, blocks, mutable)


class Functional(SelfChecked):
    """A module as functions of its tensors. Made by `functionalize`.

    Attributes:
        params: its parameters and buffers as they are now: a tree whose dotted names are those of `state_dict()`.
            Tied tensors occur once, under the name that `_tied_weights_keys` ties to, or otherwise the first name.
            They share memory with the module.
        blocks: the names of the submodules that are blocks.
        trainable: predicate `(path, leaf)` of the parameters that require a gradient, for `train_step`.
        mutable: predicate `(path, leaf)` of the tensors that the forward overwrites in training, for `train_step`;
            None if there are none.
    """

    if not TYPE_CHECKING:
        __getattr__ = attribute_of

    def __init__(self, module: nn.Module, blocks: Blocks | None, mutable: Sequence[str]):
        check_hooks(module)
        check_kinds(module)
        self._module, self._name = module, type(module).__name__
        self._still = prepared(skeleton_of(module))
        slots, own = slots_of(self._still), dict(named(module))
        self._places = {s.name: own.get(s.name) for s in slots}
        self._names, self._structure = tree.names(self.params), tree.structure(self.params)
        path_of = dict(zip(self._names, tree.paths(self.params, "params"), strict=True))
        self.blocks = find_layers(self._still) if blocks is None else chosen(self._still, blocks)
        # Training and evaluation mode run on separate copies; `_eval` makes the other one.
        still = copy.deepcopy(self._still)
        training = still if module.training else still.train()
        self._extra = mutable
        self._train = Mode(training, self.blocks, mutable)
        check_plain({n: x.get() for n, x in own.items()}, self._own(), self._train.overwritten)
        self._original = Original(module, {*written_names(module)}, [m.training for m in training.modules()])
        if not module.training:
            self._eval  # noqa: B018 created here, before any trace runs
        trained = {path_of[s.name] for s in slots if s.of == "_parameters" and s.get().requires_grad}
        changes = {path_of[name] for name in self._train.overwritten}
        self._untrained, self._warned = {name for name in self._names if path_of[name] not in trained}, False
        self.trainable: Predicate = lambda path, leaf: path in trained
        self.mutable: Predicate | None = (lambda path, leaf: path in changes) if changes else None
        shapes = {s.name: s.get().shape for s in slots}
        dtypes = {s.name: s.get().dtype for s in slots if s.of == "_buffers"}
        params = lambda: self.params  # noqa: E731 - as they are at a call
        self._calls = ModuleCalls(module, self.check, params, self._names, self._structure, shapes, dtypes)
        buffers, kept = {path_of[name] for name in dtypes}, kept_in_fp32(self._still)
        fp32 = {dtype: {path_of[n] for n in self._names if has.search(n)} for dtype, has in kept.items()}
        self._exact = lambda path, compute: path in buffers or path in fp32.get(compute, ())

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        fix = "model.apply(params, *inputs) has the outputs, with params = model.params or state.params"
        raise FzeroTypeError("functionalize", "a model is not a function: it needs parameters", fix=fix)

    def __repr__(self) -> str:
        return f"functionalize({self._name}, {len(self._names)} tensors, {len(self.blocks)} blocks)"

    @functools.cached_property
    def classes(self) -> list[type]:
        """The classes of its modules. Their code may read more than the module."""
        return [*{type(m): None for m in self._still.modules()}]

    @property
    def params(self) -> Any:
        """The module's tensors as they are now, as a tree."""
        with compat.no_modes(), compat.no_function_modes():  # whoever calls this, and whatever is being traced
            return nested({name: x.detach() for name, x in self._own().items()})

    @property
    def named_params(self) -> dict[str, torch.Tensor]:
        """The tensors of `params` by their dotted names."""
        return dict(zip(self._names, tree.leaves(self.params), strict=True))

    @property
    def unstored(self) -> set[str]:
        """The names of tensors that `state_dict()` does not contain: buffers that are not persistent."""
        return {*self._names} - self._still.state_dict().keys()

    @functools.cached_property
    def aliases(self) -> dict[str, list[str]]:
        """The other names that `state_dict()` has for tied tensors, by the name under which `params` has the tensor."""
        found: dict[str, list[str]] = {}
        for name, leaf in self._leaf_of.items():
            if leaf != name:
                found.setdefault(leaf, []).append(name)
        return found

    @functools.cached_property
    def _eval(self) -> Mode:
        return Mode(copy.deepcopy(self._still).eval(), self.blocks, self._extra)

    def apply(self, params: Any, *args: Any, key: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Returns the module's outputs for these tensors, in the mode that the module was given in.

        Args:
            params: a tree like `self.params`.
            args, kwargs: arguments of its forward.
            key: int64[3], the key for its random numbers (dropout).

        Raises:
            FzeroTypeError: if the tree has other leaves.
            TraceError: if it draws random numbers and no key is given; if it overwrites buffers (`apply_mutable`
                returns their new values).
        """
        out, new = self.apply_mutable(params, *args, key=key, **kwargs)
        if new is not None:
            fix = "model.apply_mutable(...) returns (outputs, new values); or give the module in its evaluation mode"
            found = tree.names(new)
            raise TraceError("functionalize", "apply cannot return the buffers that the forward writes", found, fix)
        return out

    def apply_mutable(self, params: Any, *args: Any, key: torch.Tensor | None = None, **kwargs: Any) -> tuple[Any, Any]:
        """Returns the outputs as `apply` does, and the new values of the buffers that the forward overwrites: a tree
        like `params` without the other leaves, or None if it overwrites none.
        """
        mode = self._train if self._module.training else self._eval
        flat = self._calls.flat(params)
        # A loss that calls `apply` does not tell `fz.train_step` which tensors the module itself would train.
        # Gradients of the other tensors may be wanted, as with `torch.func.functional_call`, so this is a warning and
        # not an error.
        kept = sorted(name for name, x in flat.items() if x.requires_grad and name in self._untrained)
        if kept and not self._warned:
            self._warned = True
            some = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
            _log.warning(
                "%s: gradients are computed for %s, which the module does not train (buffers, or requires_grad=False). "
                "If this is the loss of a training step, use fz.train_step(..., trainable=model.trainable).",
                self._name,
                some,
            )
        return self._calls.call(mode, Given(flat, key, num_rows((args, kwargs)), args, kwargs))

    def init(self, key: torch.Tensor) -> Any:
        """Returns initial values of the tensors, drawn from a key by the module's own initialization.
        `train.init(model.init)` calls it shard by shard. A module on the meta device is initialized in this way.

        Raises:
            TraceError: if nothing in the module initializes some of the tensors.
        """
        made = initialized(self._still, self._own(), key)
        return tree.unflatten(self._structure, [made[name] for name in self._names])

    def loss(self, fn: Loss | Literal["chunked"] | None = None, **settings: Any) -> Callable[..., Any]:
        """Returns a loss function `(params, batch, *, key)` for `fz.train_step`, of the module in training mode.

        Args:
            fn: `(outputs, batch) -> loss`, a scalar or `fz.weighted`, or `(loss, aux)` for `has_aux`. None: the
                model's own loss, the `loss` among its outputs. If one cross entropy is computed for it, it is
                averaged exactly over the targets that are not ignored, however they are distributed over the parts of
                the batch. "chunked": like None, but cross entropies are computed by `fz.chunked_cross_entropy` from
                the input of the linear layer that computes the logits, so that a compiled step never holds all
                logits. The model may scale the logits by numbers, cap them by tanh, cast, reshape and shift them.
                Anything else that it does between the layer and the cross entropy is an error that names the
                operation.
            settings: further arguments of the forward, the same in each call.

        `batch` is a dict of the forward's arguments (with `fn`, entries that the forward has no parameter for are
        passed only to `fn`), a tuple that begins with the forward's arguments without defaults, or the forward's only
        argument. If `fn` has no result (None or an error) and leaves entries of a tuple unread, the forward gets
        these too, for its arguments with defaults: for example a batch `(x, y)` for `forward(idx, targets=None)` with
        `lambda out, batch: out[1]`. An entry that neither the forward gets nor `fn` reads is an error.

        Returns:
            The loss function. If the forward overwrites buffers, it returns `(loss, new values)`.
        """
        reduce, chunked = _own(fn)
        if reduce is not None and (problems := function("fn", reduce, "outputs", "batch")):
            fix = "model.loss(lambda out, batch: F.cross_entropy(out, batch['y'])), or model.loss('chunked')"
            raise FzeroTypeError("functionalize", "takes a function of outputs and batch", problems, fix)

        counts: dict[Any, int] = {}

        def loss_fn(params: Any, batch: Any, *, key: torch.Tensor) -> Any:
            found = self._calls.bound(reduce, self._train, batch, settings, counts)
            given = Given(self._calls.flat(params), key, num_rows(batch), found.args, found.kwargs)
            if reduce is None:
                loss, new = self._calls.own_loss(self._train, given, chunked)
            else:
                out, new = self._calls.call(self._train, given)
                loss = self._calls.read(reduce, out, batch, found, False)
            if new is None:
                return loss
            with_aux = isinstance(loss, tuple) and not isinstance(loss, Weighted)
            return (*loss, new) if with_aux else (loss, new)

        return self.marked(loss_fn, "loss")

    def train_step(
        self,
        optimizer: GradientTransformation,
        loss: Loss | Literal["chunked"] | None = None,
        *,
        has_aux: bool = False,
        **settings: Any,
    ) -> Step:
        """Returns `fz.train_step(self.loss(loss, **settings), optimizer, has_aux=has_aux, trainable=self.trainable,
        mutable=self.mutable)`, with `fz.remat("full")` if gradient checkpointing was enabled in the module.

        `loss` may be "chunked", as for `self.loss`. With `has_aux`, it returns `(loss, aux)`. If the forward itself
        has an argument `has_aux`, pass that through `self.loss`.
        """
        if has_aux and _own(loss)[0] is None:
            fix = "model.train_step(optimizer, lambda out, batch: (out.loss, {'metric': ...}), has_aux=True)"
            raise FzeroTypeError("functionalize", "has_aux=True, but the model's own loss has no aux", fix=fix)
        loss_fn = self.loss(loss, **settings)
        step = train_step(loss_fn, optimizer, has_aux=has_aux, trainable=self.trainable, mutable=self.mutable)
        if any(getattr(m, "gradient_checkpointing", False) is True for m in self._module.modules()):
            _log.info("gradient checkpointing of %s: fz.remat('full')", self._name)
            return remat(step, "full")
        return step

    def eval_step(self, fn: Loss | Literal["chunked"] | None = None, **settings: Any) -> EvalStep:
        """Returns `fz.eval_step` of the module in evaluation mode, with the same params: `(params, batch) ->
        outputs`, or the result of `fn(outputs, batch)`. With "chunked" the result is the model's own loss, computed
        as by `model.loss("chunked")`. It changes no state: values that the forward writes to buffers are dropped.

        """

        reduce, chunked = _own(fn)
        mode, counts = self._eval, dict[Any, int]()

        def evaluate(params: Any, batch: Any) -> Any:
            found = self._calls.bound(reduce, mode, batch, settings, counts)
            given = Given(self._calls.flat(params), None, None, found.args, found.kwargs)
            if chunked:
                return self._calls.own_loss(mode, given, chunked)[0]
            out, _ = self._calls.call(mode, given)
            return out if reduce is None else self._calls.read(reduce, out, batch, found, True)

        return eval_step(self.marked(evaluate, "eval"))

    def calling(self, fn: Callable[..., Any], *, train: bool) -> Callable[..., Any]:
        """Returns a function `(params, batch, *, key)` that computes `fn(forward, batch)`, for `fz.train_step`, or,
        in evaluation mode, for `fz.eval_step`. `forward` is called like the module, and has its attributes. If the
        forward overwrites buffers, with `train` the function returns `(result, new values)`.
        """
        mode = self._train if train else self._eval

        def run(params: Any, batch: Any, *, key: torch.Tensor | None = None) -> Any:
            flat = self._calls.flat(params)

            def forward(args: Any, kwargs: Any, key: torch.Tensor | None, counting: Counting) -> tuple[Any, Any]:
                if not args:
                    args, kwargs, *_ = self._calls.arguments(kwargs, {}, alone=True)
                return self._calls.call(mode, Given(flat, key, num_rows((args, kwargs)), args, kwargs), counting)

            called = Forward(self._module, forward, key)
            traced = any(isinstance(x, compat.FakeTensor) for x in flat.values())
            with called.outside if traced else nullcontext():  # when values are available, no tensor becomes a literal
                result = fn(called, batch)
            new = called.overwritten() if train else None
            return result if new is None else (result, new)

        return self.marked(run, "loss" if train else "eval")

    def shapes(self, fn: Callable[..., Any], batch: Any) -> Any:
        """Returns the results of a function made by `calling` for such a batch, without values: it runs on fake
        tensors, and draws from a fake key.
        """
        with emptied(), compat.FakeTensorMode(), torch.no_grad():
            params, batch = tree.map(empty_like, (self.params, batch))
            return fn(params, batch, key=torch.empty(3, dtype=torch.int64))

    def write_back(self, params: Any) -> None:
        """Copies unsharded tensors into the original module. A module on the meta device gets them as its own
        tensors.

        Raises:
            FzeroTypeError: if the tree has other leaves.
            FzeroValueError: listing tensors of another shape, such as shards; or what has changed in the module; or the
                code of the step has come to compute something different since it was traced.
        """
        check_whole(params, "write_back")
        check_computed(params, "write_back")
        given = self._calls.flat(params, whole=False)
        self.check()  # otherwise weights would be lost if the module has other tensors now
        slots = list(self.slots(self._module).values())
        wrong = [
            f"{s.name}: {tree.describe(given[s.name])}, not {list(s.get().shape)}"
            for s in slots
            if given[s.name].shape != s.get().shape
        ]
        if wrong:
            fix = "gather them first: model.write_back(train.gather(state).params)"
            raise FzeroValueError("write_back", "these are not full tensors", wrong, fix)
        made: dict[str, Any] = {}
        with torch.no_grad():
            for s in slots:
                old, new = s.get(), given[s.name]
                if not old.is_meta:
                    # otherwise it is frozen, and differs only by rounding
                    if not torch.equal(old.to(new.dtype), new.to(old.device)):
                        old.copy_(new)
                elif isinstance(old, nn.Parameter):
                    s.put(made.setdefault(s.name, nn.Parameter(new.clone().to(old.dtype), old.requires_grad)))
                else:
                    s.put(made.setdefault(s.name, new.clone().to(old.dtype)))

    def slots(self, module: nn.Module) -> dict[str, TensorSlot]:
        """Returns the tensor slots of a copy of the module, by the names of its `state_dict()`, each with the name of
        its leaf in `params`.
        """
        return {name: slot._replace(name=self._leaf_of[name]) for name, slot in named(module)}

    @functools.cached_property
    def _leaf_of(self) -> dict[str, str]:
        """The name in `params` of each name in `state_dict()`."""
        leaves = {id(s.get()): s.name for s in slots_of(self._still)}
        return {name: leaves[id(slot.get())] for name, slot in named(self._still)}

    def marked(self, fn: Any, what: str) -> Any:
        """Marks a step's function with its name, the tensors that it gets in their own dtype, and the model that it
        belongs to, which `fz.train_step` and `CompiledStep.load` read.
        """
        fn.__name__, fn.exact, fn.model = f"{_snake(self._name)}_{what}", self._exact, self
        return fn

    def stands_for(self) -> tuple[Any, tuple[Any, ...]]:
        """Returns the changes of the module, and the code that it runs besides PyTorch's."""
        return tuple(self._original.changes()), self._original.read

    def check(self) -> None:
        """Raises an error if the module has changed since it was functionalized, other than in the values of its
        tensors.

        Raises:
            FzeroValueError: listing what has changed, by name.
        """
        self._original.check()

    def changes(self) -> list[str]:
        """Returns the differences between the module now and when it was functionalized, other than in the values of
        its tensors.
        """
        return self._original.changes()

    def _own(self) -> dict[str, torch.Tensor]:
        """Returns the module's own tensors, by the names that they have in `params`."""
        try:
            read = operator.attrgetter
            own = {n: read(n)(self._module) if slot is None else slot.get() for n, slot in self._places.items()}
            if any(x is None for x in own.values()):
                raise KeyError
            return own
        except (KeyError, AttributeError):
            self.check()  # the tensors are gone
            raise


def _own(fn: Loss | Literal["chunked"] | None) -> tuple[Loss | None, bool]:
    """Returns the function of a loss (None for the model's own), and whether the model's own loss is computed in
    chunks.
    """
    return (None, True) if isinstance(fn, str) and fn == "chunked" else (cast("Loss | None", fn), False)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
