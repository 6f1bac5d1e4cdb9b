"""Keeps the module of a Trainer and its sharded state together: where a callback looks at the module it has the weights
of the state, and what the callback changes of them goes into the state.

Between such events the module is behind, and is not looked at.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from fzero import tree
from fzero.comm import replicas
from fzero.comm.replicas import digest
from fzero.errors import FzeroValueError, message
from fzero.hf.exchange import Exchange
from fzero.hf.looking import Looking
from fzero.modules.outside import OwnTensors
from fzero.ranks import agreement
from fzero.state import gather
from fzero.state.overwrite import overwrite

logger = logging.getLogger("fzero")

EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step",
    "on_optimizer_step", "on_step_end", "on_log", "on_evaluate", "on_predict", "on_prediction_step", "on_save",
    "on_push_begin", "on_epoch_end", "on_train_end",
)  # fmt: skip
"""The library's events in a training."""
OWN = "log, evaluate or save"
"""A name for the methods of a user's own Trainer that run where it logs, evaluates and saves."""
_METHODS = ("log", "evaluate", "evaluation_loop", "prediction_step", "predict", "save_model", "compute_metrics")
_METHODS += ("preprocess_logits_for_metrics", "_save_checkpoint", "_maybe_log_save_evaluate")


class Following:
    """Tracks whether a Trainer's module has the weights of its sharded state, which steps write first.

    Args:
        base: the class whose methods are not a user's own.
    """

    def __init__(self, trainer: Any, base: type):
        self._trainer, self._base = trainer, base
        self._fresh = True
        self._module: Any = None
        self._said = False
        self._own: list[str] | None = None  # the lookers, while such methods run
        self._agreed: dict[str, bool] = {}
        self._known: dict[str, tuple[Any, list[str]]] = {}

    def begin(self, fresh: bool) -> None:
        """At the beginning of a training, on every rank. `fresh`: the state is of the module."""
        module = self._module = self._trainer.model
        self._parameters = list(module.named_parameters(remove_duplicate=False))
        self._ids = {id(p) for _, p in self._parameters}
        self._trained = [p.requires_grad for _, p in self._parameters]
        self.note()
        self._fresh, self._known = fresh, {}
        look = lambda: [bool(self._lookers(event)) for event in (*EVENTS, OWN)]  # noqa: E731
        looks = agreement.everywhere(self._trainer._mesh(), "hf.Trainer", look)
        numbers = {event: [int(x)] for event, x in zip((*EVENTS, OWN), looks, strict=True)}
        most, _ = Exchange(self._trainer).bounds(numbers)
        self._agreed = {event: bool(n) for event, n in most.items()}

    def stepping(self) -> None:
        """Before a step, behind which the module will be.

        Raises:
            FzeroValueError: parameters that were frozen, made trainable or changed since the module was last looked
                at.
        """
        self.check_trained()
        pairs = zip(self._parameters, self._versions, strict=True)
        if changed := [name for (name, p), was in pairs if p._version != was]:
            self._refuse_unseen(changed)
        self._fresh = False

    def check_trained(self) -> None:
        """Raises if other parameters are trained than those that the optimizer has a state of."""
        frozen = [
            f"{name}: requires_grad={p.requires_grad}, the step was made with {was}"
            for (name, p), was in zip(self._parameters, self._trained, strict=True)
            if p.requires_grad != was
        ]
        if frozen:
            what = "parameters were frozen or unfrozen since training began"
            fix = "say before train() what is trained; trainer.optimizer = None and train() begin anew with others"
            raise FzeroValueError(message("hf.Trainer", what, frozen, fix))

    def refresh(self) -> None:
        """Brings the module's tensors up to date. Every rank calls it.

        Communication: one all_gather of each sharded parameter. Memory: all parameters, in host memory.
        """
        trainer = self._trainer
        if self._fresh or trainer._pretrained is not None or trainer.train_state is None:
            return
        if trainer.model is not self._module:  # another, of `model_init`
            return
        if changed := _differing(self._digests, digests(trainer.model)):
            self._refuse_unseen(changed)
        mesh = trainer._mesh()
        with ExitStack() as stack:
            stack.enter_context(mesh.alone("gather"))
            stack.enter_context(agreement.unbroken(mesh))
            whole = gather.whole(trainer.train_state.params, mesh)
        trainer.functional.write_back(whole)
        self.note()

    def note(self) -> None:
        """Writes down what the module's tensors are: those of the state."""
        self._digests, self._fresh = digests(self._trainer.model), True
        self._versions = [p._version for _, p in self._parameters]

    def behind(self) -> None:
        """The state has become another."""
        self._fresh = False

    def same(self) -> bool:
        """Whether the module's tensors are what they were when they were those of the state."""
        return not _differing(self._digests, digests(self._trainer.model))

    @contextmanager
    def event(self, event: str) -> Iterator[None]:
        """Around what may look at the module in training, and change it."""
        trainer, seen = self._trainer, self._agreed.get(event, False)
        training = trainer.is_in_train and trainer.train_state is not None
        names = self._lookers(event) if training else []
        if not training or not (seen or names) or (event == OWN and self._own is not None):  # `take` is theirs
            yield
            return
        if not seen and trainer.args.world_size > 1:
            fix = "add it before train(), on every rank"
            raise FzeroValueError(message("hf.Trainer", f"{names[0]} looks at the model, and came later", fix=fix))
        if not self._said and trainer.is_world_process_zero() and not self._fresh:
            self._said = True
            text = "fzero.hf.Trainer: %s looks at the model in %s: each time all weights are gathered for it"
            logger.info(text, " and ".join(names) or "a callback of another rank", event)
        self.refresh()
        refusing = _WithoutWeights(trainer.model, f"{' or '.join(names)}, in {event},")
        self._own = names if event == OWN else self._own
        try:
            with refusing if trainer._pretrained else nullcontext():
                yield
        finally:
            self._own = None if event == OWN else self._own
        self._take(event, names)

    def take(self) -> None:
        """Takes over what the methods of a user's own Trainer have changed so far, before the state is read."""
        if self._own is not None:
            self._take(OWN, self._own)

    def _take(self, event: str, names: list[str]) -> None:
        """Takes over into the state what was changed of the module.

        Raises:
            FzeroValueError: changes that a step does not see.
        """
        trainer, module = self._trainer, self._trainer.model
        who = f"{' or '.join(names)}, in {event},"
        if odd := trainer.functional.changes():
            fix = "set it before train(): the step is made of the module as it is then"
            raise FzeroValueError(message("hf.Trainer", f"{who} changes attributes or hooks of the model", odd, fix))
        made = [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in self._ids]
        if made:
            fix = "write to those that there are, in place: p.copy_(...)"
            raise FzeroValueError(message("hf.Trainer", f"{who} puts other parameters into the model", made, fix))
        now = digests(module)
        changed = _differing(self._digests, now)
        self._versions = [p._version for _, p in self._parameters]
        if not changed and trainer.args.world_size == 1:
            return
        held = {name: (x, ()) for name, x in now.items()}
        replicas.same(trainer._mesh(), "hf.Trainer", lambda: held, f"{who} must change the weights alike on every rank")
        if not changed:
            return
        if event == "on_substep_end":
            what = f"{who} changes weights"
            fix = "change them in on_step_end: a step is all of its micro-batches at once"
            raise FzeroValueError(message("hf.Trainer", what, changed, fix))
        slots = trainer.functional.slots(module)
        moved = {slots[n].name: slots[n].get().detach() for n in changed}
        overwrite(trainer.train_state, moved, trainer._mesh())
        self.note()

    def _refuse_unseen(self, changed: list[str]) -> None:
        what = "weights of the module were changed in training, where its state was ahead of it"
        fix = (
            "change them in a callback that takes them of its argument (def on_step_end(self, args, state, control, "
            "model, **kwargs))"
        )
        raise FzeroValueError(message("hf.Trainer", what, changed, fix))

    def _lookers(self, event: str) -> list[str]:
        """The callbacks, or the trainer's own methods, that look at the module in an event, by name.

        Raises:
            FzeroValueError: one that cannot be given what it looks at.
        """
        trainer = self._trainer
        callbacks = tuple(map(id, trainer.callback_handler.callbacks)) if event != OWN else ()
        if event in self._known and self._known[event][0] == callbacks:
            return self._known[event][1]
        if event == OWN:
            found = [(n, Looking(f, trainer, trainer.model, keywords=False)) for n, f in self._own_methods()]
        else:
            given = [(c, inspect.getattr_static(c, event, None)) for c in trainer.callback_handler.callbacks]
            found = [(type(c).__name__, Looking(f, c, trainer.model, keywords=True)) for c, f in given]
        looks = list(dict.fromkeys(name for name, x in found if x.looks))
        early = looks if event == "on_pre_optimizer_step" else []
        if wrong := early or [name for name, x in found if x.graded]:
            what = f"{' and '.join(wrong)} looks at gradients, or at the model before its update, in {event}"
            fix = (
                "a step is one program, whose gradients never are in the module: their norm is in the logs "
                "(grad_norm), optimizers of fzero transform them; weights are seen in on_step_end"
            )
            raise FzeroValueError(message("hf.Trainer", what, fix=fix))
        self._known[event] = callbacks, looks
        return looks

    def _own_methods(self) -> list[tuple[str, Any]]:
        trainer, cls = self._trainer, type(self._trainer)
        own = cls.__mro__[: cls.__mro__.index(self._base)]
        found = [(f"{cls.__name__}.{n}", next((vars(c)[n] for c in own if n in vars(c)), None)) for n in _METHODS]
        given = [(n, vars(trainer).get(n)) for n in ("compute_metrics", "preprocess_logits_for_metrics")]
        return [(n, f) for n, f in (*found, *given) if f is not None]


class _WithoutWeights(OwnTensors):
    """Refuses operations on the tensors of a module that has no weights."""

    def __init__(self, module: torch.nn.Module, who: str):
        super().__init__(module)
        self._who = who

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if own := self.own(func, (x for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor))):
            what = f"{self._who} reads or writes weights of a model of fz.hf.from_pretrained, which is only in shards"
            fix = "give the module itself; or trainer.compiled.gather(trainer.train_state), on every rank, for a look"
            raise FzeroValueError(message("hf.Trainer", what, own, fix))
        return func(*args, **kwargs)


def digests(module: torch.nn.Module) -> dict[str, str]:
    """A digest of each of a module's tensors, so that changes are seen that PyTorch does not count (`.data`)."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: str(x._version) if x.is_meta else digest(x) for name, x in named}


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]
