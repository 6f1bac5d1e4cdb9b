"""Gives the current weights of a Trainer's state to the code that is declared to use them, and rejects other code that
accesses them.

During training the current weights are in the sharded state, and the module has none (`stale_weights.py`). Declared
code (`Trainer(sync=[...])`) runs with the current weights in the module, and its changes are copied to the state. In
all other code, such as callbacks, metrics, overridden methods, data sets and threads, an operation on one of the
module's tensors raises an error at its line.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

from fzero import tree
from fzero._utils.arguments import shown
from fzero.comm import control_group
from fzero.errors import FzeroValueError
from fzero.hf.data_parallel_ranks import Exchange
from fzero.hf.stale_weights import GRADIENT, StaleWeights
from fzero.state import gather
from fzero.state.overwrite import overwrite
from fzero.trace.guards.user_frames import own_line

logger = logging.getLogger("fzero")

Callback: Any = transformers.TrainerCallback
EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The events of transformers' callbacks."""
USER_METHODS = "log, evaluate or save"
"""The name for all user code, other than callbacks, that runs where a Trainer logs, evaluates and saves."""
_AFTER = "_maybe_log_save_evaluate"
"""A method that runs after each step."""
_WITHIN = ("on_substep_end", "on_pre_optimizer_step")
"""The events within a step, at which a module has no weights: a step is one program, which reads them at its begin."""
_FREEZES: Any = (torch.Tensor.requires_grad_, getattr(torch.Tensor, "requires_grad").__set__)  # noqa: B009
_FREEZE_BEFORE = (
    "choose trainable parameters before train(); with trainer.optimizer = None, train() starts again with others"
)
_WITH_GRADIENTS = ("on_pre_optimizer_step", "on_optimizer_step")
"""The events at which a module has gradients in transformers."""


def problems(declared: Any) -> list[str]:
    """Returns a message for each item of `sync=` that is neither a callback, nor a Trainer, nor a function."""
    if not isinstance(declared, Sequence) or isinstance(declared, str):
        return [f"sync={shown(declared)}: write a list, sync=[MyCallback]"]
    kinds = (Callback, transformers.Trainer)
    ok = lambda x: issubclass(x, kinds) if isinstance(x, type) else isinstance(x, Callback) or callable(x)  # noqa: E731
    text = "is not a callback, a class of callbacks or of a Trainer, or a function of metrics"
    return [f"sync: {shown(x)} {text}" for x in declared if not ok(x)]


class Sync:
    """Moves weights between a Trainer's module and its sharded state, which is what steps update.

    Args:
        base: the class whose methods are not the user's own.
        declared: the code that uses weights: callbacks, their classes, the class of the trainer, its metrics
            functions.
    """

    def __init__(self, trainer: Any, base: type, declared: Sequence[Any]):
        self._trainer, self._base, self._declared = trainer, base, tuple(declared)
        self._weights: StaleWeights | None = None  # once training has begun
        self._internal = False  # whether the code that is running is fzero's, which may use the module's tensors
        self._open = ""  # the names of the declared code that is running
        self._agreed: set[str] = set()  # the events with declared code on some rank
        self._said = False
        trainer.callback_handler.call_event = self._call
        for name in (_AFTER, "_evaluate", "evaluation_loop"):
            setattr(trainer, name, self._with_user_code(name))

    # --- module and state ---

    @property
    def out(self) -> bool:
        """Whether the module has no weights at present."""
        return self._weights is not None and self._weights.are_out

    def begin(self, fresh: bool) -> None:
        """Called at the beginning of a training, on every rank. Takes the weights out of the module.

        Args:
            fresh: whether they are those of the state.
        """
        trainer, module = self._trainer, self._trainer.model
        self._module, self._parameters = module, list(module.named_parameters(remove_duplicate=False))
        self._trained = [p.requires_grad for _, p in self._parameters]
        wanted = {event: [int(bool(self._wanting(event)))] for event in (*EVENTS, USER_METHODS)}
        most, _ = Exchange(trainer).bounds(wanted)
        self._agreed = {event for event, n in most.items() if n}
        state, slots = dict(tree.with_names(trainer.train_state.params)), trainer.functional.slots(module)
        rounded = {n for n, s in slots.items() if not s.get().requires_grad and s.get().dtype != state[s.name].dtype}
        self._weights = StaleWeights(module, self._refuse, rounded)
        self._weights.empty_module()
        if not fresh:
            self._free_values()

    def leave(self) -> None:
        """Called when `train()` returns. A model that exists only as shards gets its empty tensors back."""
        if self._weights is not None and self.out and self._trainer._pretrained is not None:
            self._weights.refill_module()

    def broken_off(self) -> None:
        """Called after a training that raised an error. On a single rank, the module gets the weights of its last step,
        as in transformers."""
        trainer = self._trainer
        if not self.out or trainer._pretrained is not None:
            return
        with contextlib.suppress(Exception):
            if trainer.args.world_size == 1:
                self.fill_module()
                trainer.is_in_train = False
                return
        text = "training was interrupted, and the model has no weights: save_model() writes the current ones"
        logger.warning("fzero.hf.Trainer: %s", text)

    def stepping(self) -> None:
        """Called before a step, after which the weights that the module had last are old.

        Raises:
            FzeroValueError: parameters were frozen, unfrozen or replaced.
        """
        self.check_trained()
        if replaced := self._replaced():
            what = "parameters of the module were replaced in training"
            fix = "change them in a callback, in place: Trainer(..., sync=[MyCallback])"
            raise FzeroValueError("hf.Trainer", what, replaced, fix)
        self._free_values()

    def check_trained(self) -> None:
        """Raises an error if the trainable parameters are not those for which the optimizer has a state."""
        frozen = [
            f"{name}: requires_grad={p.requires_grad}, the step was made with {was}"
            for (name, p), was in zip(self._parameters, self._trained, strict=True)
            if p.requires_grad != was
        ]
        if frozen:
            what = "parameters were frozen or unfrozen since training began"
            raise FzeroValueError("hf.Trainer", what, frozen, _FREEZE_BEFORE)

    def fill_module(self, outdated: bool = False) -> None:
        """Puts the current weights into the module. Every rank calls it.

        Args:
            outdated: whether the module's weights, if it has any, are older than the state.

        Communication: one all-gather per sharded parameter. Memory: all parameters, in host memory.
        """
        trainer, weights = self._trainer, self._weights
        # The model is another one if `model_init` has made it.
        if weights is None or trainer.model is not self._module or trainer._pretrained is not None:
            return
        if outdated and not weights.are_out:
            weights.empty_module()
        if not weights.are_out:
            return
        if weights.are_known and not outdated:
            weights.refill_module()
            return
        mesh, slots = trainer._mesh(), trainer.functional.slots(trainer.model)
        with mesh.alone("gather"), control_group.unbroken(mesh):
            whole = dict(tree.with_names(gather.whole(trainer.train_state.params, mesh)))
        weights.refill_module({name: whole[slot.name] for name, slot in slots.items()})

    def copy_to_state(self) -> None:
        """Copies the module's weights to the state, if the module has weights. Every rank calls it.

        Raises:
            FzeroValueError: the module has changed in another way, which a step would not see.
        """
        trainer = self._trainer
        if self.out or trainer._pretrained is not None or trainer.train_state is None:
            return
        who = self._open or "code"
        if self._open and (odd := trainer.functional.changes()):
            fix = "set it before train(): the step is made from the module at that time"
            raise FzeroValueError("hf.Trainer", f"{who} changes attributes or hooks of the model", odd, fix)
        if self._open and (made := self._replaced()):
            fix = "write to the existing ones, in place: p.copy_(...)"
            raise FzeroValueError("hf.Trainer", f"{who} replaces parameters of the model", made, fix)
        overwrite(trainer.train_state, trainer.functional.named_params, trainer._mesh())

    @contextmanager
    def filled_module(self) -> Iterator[None]:
        """A context in which the module has the current weights. Every rank enters it."""
        out = self.out
        self.fill_module()
        try:
            yield
        finally:
            if self._weights is not None and out and not self.out:
                self._weights.empty_module()

    @contextmanager
    def internal(self) -> Iterator[None]:
        """A context for fzero's own code, which may use the tensors of the module as they are."""
        was, self._internal = self._internal, True
        try:
            yield
        finally:
            self._internal = was

    def _free_values(self) -> None:
        assert self._weights is not None
        if held := self._weights.free_values():
            text = "fzero.hf.Trainer: other code holds memory of %s: it is NaN until the weights are there again"
            logger.warning(text, ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else ""))

    def _replaced(self) -> list[str]:
        """Returns the parameters of the module that are not the same objects as when training began."""
        ids = {id(p) for _, p in self._parameters}
        return [n for n, p in self._trainer.model.named_parameters(remove_duplicate=False) if id(p) not in ids]

    # --- user code ---

    def _call(self, event: str, *args: Any, **settings: Any) -> Any:
        """Replaces transformers' `call_event`."""
        handler = self._trainer.callback_handler
        weights = self._weights if event in _WITH_GRADIENTS else None
        with self._with_weights(event), weights.hidden_gradients() if weights is not None else nullcontext():
            return type(handler).call_event(handler, event, *args, **settings)

    def _with_user_code(self, name: str) -> Callable[..., Any]:
        """Wraps a method of the trainer that runs user code other than callbacks, or that the user overrides."""
        trainer, fn = self._trainer, getattr(self._trainer, name)
        always = name != _AFTER or getattr(type(trainer), name) is not getattr(self._base, name)

        @functools.wraps(fn)
        def run(*args: Any, **settings: Any) -> Any:
            now = trainer.control
            comes = always or now.should_log or now.should_evaluate or now.should_save
            with self._with_weights(USER_METHODS if comes else ""):
                return fn(*args, **settings)

        return run

    @contextmanager
    def _with_weights(self, event: str) -> Iterator[None]:
        """A context for the code of an event, some of which may be declared on this rank or another one."""
        trainer, names, weights = self._trainer, self._wanting(event), self._weights
        given = not trainer.is_in_train or not self.out or trainer._pretrained is not None
        if weights is None or given or not (names or event in self._agreed):
            yield
            return
        if event not in self._agreed and trainer.args.world_size > 1:
            fix = "add it before train(), on every rank"
            raise FzeroValueError("hf.Trainer", f"{names[0]} is in sync=, but was added later", fix=fix)
        if not self._said and trainer.is_world_process_zero() and not weights.are_known:
            self._said = True
            text = "fzero.hf.Trainer: %s is in sync=: in %s all weights are gathered for it, each time"
            logger.info(text, " and ".join(names) or "a callback of another rank", event)
        with self.filled_module():
            self._open = f"{' or '.join(names)}, in {event},"
            try:
                yield
                self.copy_to_state()
            finally:
                self._open = ""

    def _wanting(self, event: str) -> list[str]:
        """Returns the names of the declared code of an event: callbacks that have a method for it, or what a Trainer
        runs itself."""
        trainer, base = self._trainer, vars(Callback)
        if event == USER_METHODS:
            given = [(type(trainer).__name__, trainer)] if type(trainer) is not self._base else []
            given += [(n, getattr(trainer, n)) for n in ("compute_metrics", "preprocess_logits_for_metrics")]
            return [name for name, x in given if x is not None and self._is_declared(x)]
        if event not in base or event in _WITHIN:
            return []
        found = [c for c in trainer.callback_handler.callbacks if self._is_declared(c)]
        return [type(c).__name__ for c in found if inspect.getattr_static(c, event, None) is not base[event]]

    def _is_declared(self, x: Any) -> bool:
        return any(x == y or (isinstance(y, type) and isinstance(x, y)) for y in self._declared)

    def _refuse(self, func: Any, names: list[str]) -> None:
        """Raises an error about an operation on weights that are not there, unless it is fzero's own."""
        if self._internal:
            return
        if func == GRADIENT:
            what = "this code uses gradients"
            fix = (
                "a step is one program, whose gradients never are in the module: their norm is in the logs "
                "(grad_norm), optimizers of fzero transform them"
            )
        elif func in _FREEZES:
            what, fix = "this code freezes or unfreezes parameters in training", _FREEZE_BEFORE
        elif self._trainer._pretrained is not None:
            what = "this code uses the weights of a model of fz.hf.from_pretrained, which exists only as shards"
            fix = "give the module itself; or inspect trainer.compiled.gather(trainer.train_state), on every rank"
        else:
            what = "this code uses weights, which are in the sharded state and not in the module while it is trained"
            fix = (
                "Trainer(..., sync=[...]) with this callback, metrics function or your Trainer class: it then runs "
                f"with the weights, and its changes go into the state (not in {' or '.join(_WITHIN)})"
            )
        found = ", ".join(dict.fromkeys(names))
        raise FzeroValueError("hf.Trainer", what, [f"{found}: {place}" for place in own_line()] or [found], fix)
