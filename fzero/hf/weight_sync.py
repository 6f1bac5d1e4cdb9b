"""Gives the current weights of a Trainer's state to the code that is declared to use them, and rejects other code that
accesses them.

During training the current weights are in the sharded state, and those of the module are old. Declared code
(`Trainer(sync=[...])`) gets the current weights before it runs, and its changes are copied to the state. Callbacks,
metrics, overridden methods and data sets that are not declared raise an error at their first operation on one of the
module's tensors. Threads that they start are not watched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

from fzero._utils.arguments import shown
from fzero.checkpoint import tensor_digests
from fzero.checkpoint.tensor_digests import digest
from fzero.comm import agreement
from fzero.errors import FzeroValueError
from fzero.hf.data_parallel_ranks import Exchange
from fzero.modules.captured_tensors import OwnTensors
from fzero.state import gather
from fzero.state.overwrite import overwrite
from fzero.trace.guards.user_frames import own_line

logger = logging.getLogger("fzero")

Callback: Any = transformers.TrainerCallback
EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The events of transformers' callbacks."""
OWN = "log, evaluate or save"
"""The name for all user code, other than callbacks, that runs where a Trainer logs, evaluates and saves."""
DATA = "loading a batch"
_AFTER = "_maybe_log_save_evaluate"
"""A method that runs after each step."""
_METHODS = {_AFTER: OWN, "_evaluate": OWN, "evaluation_loop": OWN, "get_batch_samples": DATA, "_prepare_inputs": DATA}

Rule = Callable[[Any, list[str]], None]
"""Called with an operation on tensors of the module and the names of these tensors. Raises an error if it is not
allowed."""


def problems(declared: Any) -> list[str]:
    """Returns a message for each item of `sync=` that is neither a callback, nor a Trainer, nor a function."""
    if not isinstance(declared, Sequence) or isinstance(declared, str):
        return [f"sync={shown(declared)}: write a list, sync=[MyCallback]"]
    kinds = (Callback, transformers.Trainer)
    ok = lambda x: issubclass(x, kinds) if isinstance(x, type) else isinstance(x, Callback) or callable(x)  # noqa: E731
    text = "is not a callback, a class of callbacks or of a Trainer, or a function of metrics"
    return [f"sync: {shown(x)} {text}" for x in declared if not ok(x)]


class Sync:
    """Tracks whether a Trainer's module has the weights of its sharded state, which is what steps update.

    Args:
        base: the class whose methods are not the user's own.
        declared: the code that uses weights: callbacks, their classes, the class of the trainer, its metrics
            functions.
    """

    def __init__(self, trainer: Any, base: type, declared: Sequence[Any]):
        self._trainer, self._base, self._declared = trainer, base, tuple(declared)
        self._guard = _WeightGuard(trainer.model)
        self._fresh, self._ended, self._said = True, False, False
        self._module: Any = None
        self._open: list[tuple[str, list[str]]] = []  # the declared code that is running, by event and names
        self._agreed: dict[str, bool] = {}
        trainer.callback_handler.call_event = self._call
        for name, event in _METHODS.items():
            setattr(trainer, name, self._watched(name, event))

    # --- module and state ---

    def begin(self, fresh: bool) -> None:
        """Called at the beginning of a training, on every rank. `fresh`: whether the module has the weights of the
        state."""
        module = self._module = self._trainer.model
        self._parameters = list(module.named_parameters(remove_duplicate=False))
        self._trained = [p.requires_grad for _, p in self._parameters]
        self._note()
        self._fresh, self._ended, self._open = fresh, False, []
        wanted = {event: [int(bool(self._wanting(event)))] for event in (*EVENTS, OWN)}
        most, _ = Exchange(self._trainer).bounds(wanted)
        self._agreed = {event: bool(n) for event, n in most.items()}

    def end(self) -> None:
        """Called after the last step: copies the trained weights to the module, for all code. Every rank calls it."""
        self.refresh()
        self._ended = True

    def broken_off(self) -> None:
        """Called after a training that raised an error. On a single rank, the module gets the weights of its last step,
        as in transformers."""
        trainer = self._trainer
        if not self._training:
            return
        with contextlib.suppress(Exception):
            if trainer.args.world_size == 1:
                self.end()
                trainer.is_in_train = False
                return
        text = (
            "fzero.hf.Trainer: training was interrupted, and the weights of the "
            "model are stale: save_model() writes the current ones"
        )
        logger.warning(text)

    def stepping(self) -> None:
        """Called before a step, after which the weights of the module will be old.

        Raises:
            FzeroValueError: parameters were frozen, unfrozen, replaced or changed by code that is not declared.
        """
        self.check_trained()
        pairs = zip(self._parameters, self._versions, strict=True)
        changed = [name for (name, p), was in pairs if p._version != was] + self._replaced()
        if changed:
            self._refuse_unseen(changed)
        self._fresh = False

    def check_trained(self) -> None:
        """Raises an error if the trainable parameters are not those for which the optimizer has a state."""
        frozen = [
            f"{name}: requires_grad={p.requires_grad}, the step was made with {was}"
            for (name, p), was in zip(self._parameters, self._trained, strict=True)
            if p.requires_grad != was
        ]
        if frozen:
            what = "parameters were frozen or unfrozen since training began"
            fix = (
                "choose trainable parameters before train(); with trainer.optimizer "
                "= None, train() starts again with others"
            )
            raise FzeroValueError("hf.Trainer", what, frozen, fix)

    def refresh(self) -> None:
        """Copies the current weights to the module's tensors. Every rank calls it.

        Communication: one all-gather per sharded parameter. Memory: all parameters, in host memory.
        """
        trainer = self._trainer
        if self._fresh or trainer._pretrained is not None or trainer.train_state is None:
            return
        if trainer.model is not self._module:  # another one, made by `model_init`
            return
        if changed := _differing(self._digests, digests(trainer.model)):
            self._refuse_unseen(changed)
        mesh = trainer._mesh()
        with ExitStack() as stack:
            stack.enter_context(mesh.alone("gather"))
            stack.enter_context(agreement.unbroken(mesh))
            whole = gather.whole(trainer.train_state.params, mesh)
        trainer.functional.write_back(whole)
        self._note()

    def behind(self) -> None:
        """Records that the state has changed, so that the module's weights are old."""
        self._fresh = False

    def same(self) -> bool:
        """Whether the module's tensors have not changed since they were those of the state."""
        return not _differing(self._digests, digests(self._trainer.model))

    def take(self) -> None:
        """Copies the changes that running declared code has made so far to the state, before the state is read."""
        if self._open:
            with self.paused():
                self._take(*self._open[-1])

    # --- user code ---

    def _call(self, event: str, args: Any, state: Any, control: Any, **settings: Any) -> Any:
        """Replaces transformers' `call_event`: a callback runs with the current weights if it is declared, and without
        them otherwise."""
        handler = self._trainer.callback_handler
        plain = type(handler).call_event
        if not self._training:
            return plain(handler, event, args, state, control, **settings)
        with self._with_weights(event):
            for callback in handler.callbacks:
                one = copy.copy(handler)
                one.callbacks = [callback]
                name = type(callback).__name__
                declared = event != "on_pre_optimizer_step" and self._is_declared(callback)
                with self._guarded(f"{name}, in {event},", f"sync=[{name}]", declared):
                    control = plain(one, event, args, state, control, **settings)
        return control

    def _watched(self, name: str, event: str) -> Callable[..., Any]:
        """Wraps a method of the trainer that runs user code other than callbacks, or that the user overrides."""
        trainer, fn = self._trainer, getattr(self._trainer, name)
        always = name != _AFTER or getattr(type(trainer), name) is not getattr(self._base, name)

        @functools.wraps(fn)
        def run(*args: Any, **settings: Any) -> Any:
            if not self._training:
                return fn(*args, **settings)
            now = trainer.control
            with self._own(event, always or now.should_log or now.should_evaluate or now.should_save):
                return fn(*args, **settings)

        return run

    @contextmanager
    def _own(self, event: str, comes: bool) -> Iterator[None]:
        """A context for methods of a user's own Trainer, metrics functions and data sets.

        Args:
            comes: whether such code runs now, if there is any.
        """
        trainer, cls = self._trainer, type(self._trainer)
        names = [cls.__name__] if cls is not self._base else []
        names += ["compute_metrics"] if trainer.compute_metrics is not None else []
        who = f"code of {' or '.join(names) or cls.__name__}, in {event},"
        way = f"sync=[{' or '.join(names) or '...'}]" if event == OWN else ""
        with self._with_weights(event if comes else ""), self._guarded(who, way, comes and self._wanting(event)):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for fzero's own code, which may access the module's tensors."""
        was, self._guard.rule = self._guard.rule, None
        try:
            yield
        finally:
            self._guard.rule = was

    @property
    def _training(self) -> bool:
        return self._trainer.is_in_train and self._trainer.train_state is not None

    @contextmanager
    def _with_weights(self, event: str) -> Iterator[None]:
        """A context for the code of an event, some of which may be declared on this rank or another one."""
        trainer, names = self._trainer, self._wanting(event)
        inside = any(event == OWN == known for known, _ in self._open)
        if trainer._pretrained is not None or inside or not (names or self._agreed.get(event)):
            yield
            return
        if not self._agreed.get(event) and trainer.args.world_size > 1:
            fix = "add it before train(), on every rank"
            raise FzeroValueError("hf.Trainer", f"{names[0]} is in sync=, but was added later", fix=fix)
        if not self._said and trainer.is_world_process_zero() and not self._fresh:
            self._said = True
            text = "fzero.hf.Trainer: %s is in sync=: in %s all weights are gathered for it, each time"
            logger.info(text, " and ".join(names) or "a callback of another rank", event)
        self.take()
        with self.paused():
            self.refresh()
        self._open.append((event, names))
        try:
            yield
        finally:
            self._open.pop()
        with self.paused():
            self._take(event, names)

    def _wanting(self, event: str) -> list[str]:
        """Returns the names of the declared code of an event: callbacks that have a method for it, or what a Trainer
        runs itself."""
        trainer, base = self._trainer, vars(Callback)
        if event == OWN:
            given = [(type(trainer).__name__, trainer)] if type(trainer) is not self._base else []
            given += [(n, getattr(trainer, n)) for n in ("compute_metrics", "preprocess_logits_for_metrics")]
            return [name for name, x in given if x is not None and self._is_declared(x)]
        if event not in base or event == "on_pre_optimizer_step":
            return []
        found = [c for c in trainer.callback_handler.callbacks if self._is_declared(c)]
        return [type(c).__name__ for c in found if inspect.getattr_static(c, event, None) is not base[event]]

    def _is_declared(self, x: Any) -> bool:
        return any(x == y or (isinstance(y, type) and isinstance(x, y)) for y in self._declared)

    @contextmanager
    def _guarded(self, who: str, way: str, declared: Any) -> Iterator[None]:
        """A context for code of this name. It must not read or write weights unless it is declared, and never
        gradients."""
        pretrained = self._trainer._pretrained is not None
        free = self._ended and not pretrained
        refused: list[FzeroValueError] = []

        def rule(func: Any, names: list[str]) -> None:
            # `__torch_function__` is called with the `__get__` of an attribute's descriptor.
            if getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ == "grad":
                what = "looks at gradients"
                fix = (
                    "a step is one program, whose gradients never are in the module: their norm is in the logs "
                    "(grad_norm), optimizers of fzero transform them"
                )
            elif pretrained:
                what = "reads or writes weights of a model of fz.hf.from_pretrained, which exists only as shards"
                fix = (
                    "give the module itself; or trainer.compiled.gather(trainer.train_state), "
                    "on every rank, to inspect them"
                )
            elif "on_pre_optimizer_step" in who:
                what = "looks at the model before its update"
                fix = "a step is one program: look in on_step_begin or on_step_end"
            elif declared or free:
                return
            else:
                what = "reads or writes weights, which are in the sharded state: the module's are stale"
                fix = "read them in on_epoch_begin of a callback: Trainer(..., sync=[MyCallback])"
                if way:
                    fix = f"Trainer(..., {way}): it has the weights whenever it runs, and its changes go into the state"
            found = ", ".join(dict.fromkeys(names))
            lines = [f"{found}: {place}" for place in own_line()] or [found]
            refused.append(FzeroValueError("hf.Trainer", f"{who} {what}", lines, fix))
            raise refused[0]

        was, self._guard.rule = self._guard.rule, rule
        try:
            with self._guard:
                yield
        except Exception as error:
            if refused and error is not refused[0]:
                raise refused[0] from error
            raise
        finally:
            self._guard.rule = was
        if refused:  # the code has caught the error
            raise refused[0]

    # --- changes ---

    def _note(self) -> None:
        """Records the present values of the module's tensors as those of the state."""
        self._digests, self._fresh = digests(self._trainer.model), True
        self._versions = [p._version for _, p in self._parameters]
        self._guard.look(self._trainer.model)

    def _replaced(self) -> list[str]:
        """Returns the parameters of the module that are not the same objects as when training began."""
        ids = {id(p) for _, p in self._parameters}
        return [n for n, p in self._trainer.model.named_parameters(remove_duplicate=False) if id(p) not in ids]

    def _take(self, event: str, names: list[str]) -> None:
        """Copies changes of the module's weights to the state.

        Raises:
            FzeroValueError: changes that a step would not see.
        """
        trainer, module = self._trainer, self._trainer.model
        who = f"{' or '.join(names)}, in {event},"
        if odd := trainer.functional.changes():
            fix = "set it before train(): the step is made from the module at that time"
            raise FzeroValueError("hf.Trainer", f"{who} changes attributes or hooks of the model", odd, fix)
        if made := self._replaced():
            fix = "write to the existing ones, in place: p.copy_(...)"
            raise FzeroValueError("hf.Trainer", f"{who} replaces parameters of the model", made, fix)
        now = digests(module)
        changed = _differing(self._digests, now)
        self._versions = [p._version for _, p in self._parameters]
        if not changed and trainer.args.world_size == 1:
            return
        held = {name: (x, ()) for name, x in now.items()}
        tensor_digests.same(
            trainer._mesh(), "hf.Trainer", lambda: held, f"{who} must change the weights in the same way on every rank"
        )
        if not changed:
            return
        if event == "on_substep_end":
            what = f"{who} changes weights"
            fix = "change them in on_step_end: a step processes all of its micro-batches at once"
            raise FzeroValueError("hf.Trainer", what, changed, fix)
        slots = trainer.functional.slots(module)
        moved = {slots[n].name: slots[n].get().detach() for n in changed}
        overwrite(trainer.train_state, moved, trainer._mesh())
        self._note()

    def _refuse_unseen(self, changed: list[str]) -> None:
        what = "weights of the module were changed in training, when its state was newer than the module"
        fix = "change them in a callback, in place: Trainer(..., sync=[MyCallback])"
        raise FzeroValueError("hf.Trainer", what, changed, fix)


class _WeightGuard(OwnTensors):
    """Applies a rule to each operation on the tensors of a module.

    Attributes:
        rule: the rule, or None to allow everything.
    """

    rule: Rule | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.rule is not None and (own := self.own(func, args, kwargs)):
            self.rule(func, own)
        return func(*args, **kwargs)


def digests(module: torch.nn.Module) -> dict[str, str]:
    """Returns a digest of each of a module's tensors. It also detects changes that PyTorch's version counter misses
    (`.data`)."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {n: digest(x) if x.layout is torch.strided and not x.is_meta else str(x._version) for n, x in named}


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]
