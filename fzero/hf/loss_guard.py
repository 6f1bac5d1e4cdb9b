"""Finds the values that a Trainer's loss reads in addition to its batch, and rejects changes to them.

A loss is traced once, so these values are constants of the program. Most attributes of a Trainer change all the time;
only those are compared that the user's own methods name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_to_fp32  # pyright: ignore[reportMissingImports] - of the extra `hf`
from transformers.trainer_pt_utils import LabelSmoother  # pyright: ignore[reportMissingImports]

from fzero._compat import compat
from fzero.checkpoint.tensor_digests import digest
from fzero.errors import FzeroValueError, TraceError
from fzero.modules.captured_tensors import version_of
from fzero.modules.chunked_loss import Chunked
from fzero.trace.guards.bytecode import names_in
from fzero.trace.guards.captured_settings import Settings, changes, settings
from fzero.tree import describe

_LARGE = 4096
"""The number of elements above which only the number of writes to a tensor is compared."""
_READ = ("compute_loss_func", "label_smoother", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs")
"""The attributes that transformers' own loss reads."""


class LossInputs:
    """Stands for a Trainer in the functions of a program.

    Args:
        base: the class whose methods are not the user's own.

    Attributes:
        code: the user's methods that compute the loss, by name.
    """

    def __init__(self, trainer: Any, base: type):
        self.trainer = trainer
        mro = type(trainer).__mro__
        # Reversed, so that an attribute of a subclass replaces that of its base.
        self._own = {n: x for c in reversed(mro[: mro.index(base)]) for n, x in vars(c).items()}
        self.code = _reached("compute_loss", self._own)
        self._names = {name for f in self.code.values() for name in names_in(f.__code__).attributes}
        self._traced: Settings | None = None
        self._captured: dict[int, tuple[torch.Tensor, str]] = {}
        self._fingerprint = ""
        self._fixed = self._of_library()

    def changed(self) -> list[str]:
        """Returns how the values differ from those with which programs were traced."""
        found = [] if self._traced is None else changes(self._traced, self._settings())
        if _fingerprint([x for x, _ in self._captured.values()]) != self._fingerprint:
            found += [f"{self._name(x)}: {describe(x)}" for x, known in self._captured.values() if _one(x) != known]
        return found + [n for n, x in self._of_library().items() if x != self._fixed[n]]

    def check(self) -> None:
        """Raises an error if a value that a step was made with has changed.

        Raises:
            FzeroValueError: naming the value.
        """
        if changed := self.changed():
            what = "values that the loss or the step reads were changed during training"
            fix = (
                "set them before train(); pass what changes in the batch, or put it into the model, as a buffer that "
                "its forward overwrites"
            )
            raise FzeroValueError("hf.Trainer", what, changed, fix)

    def prepare(self, forward: Any) -> None:
        """Under bf16 or fp16, makes the substitute for the module convert its outputs to fp32, as transformers does for
        autocast."""
        if self.trainer.args.bf16 or self.trainer.args.fp16:
            forward.finish = convert_to_fp32

    @contextmanager
    def tracing(self, forward: Any) -> Iterator[Any]:
        """A context for a call of the trainer's `compute_loss`, in which `self.model` is the substitute for the module.

        Yields: the object that counts the cross entropies in the calls.

        Raises:
            TraceError: `compute_loss` changes values that outlive the call.
        """
        trainer, before = self.trainer, self._settings()
        during = {"model": forward, "model_wrapped": forward, "log": _log}
        chunked = Chunked() if trainer._chunked else None
        if chunked is not None and type(trainer.label_smoother) is LabelSmoother:
            during["label_smoother"] = functools.partial(_smoothed, trainer.label_smoother)
        real = {n: vars(trainer)[n] for n in during if n in vars(trainer)}
        vars(trainer).update(during)
        self.prepare(forward)
        try:
            with chunked or nullcontext(), forward.counting as counting:
                yield counting
            if chunked is not None:
                chunked.check(type(trainer.model).__name__)
        finally:
            for name in during:
                vars(trainer).pop(name)
            vars(trainer).update(real)
        now = self._settings()
        if wrote := changes(before, now):
            what = "compute_loss changes values that it reads: it is traced once, and would not do so in each step"
            fix = (
                "set constants before train() (in __init__); count and record in a callback (on_step_end, on_log), "
                "or by compute_metrics"
            )
            raise TraceError("hf.Trainer", what, wrote, fix)
        self._traced = self._traced or now
        self._captured.update({id(x): (x, _one(x)) for x in forward.outside.read.values()})
        self._fingerprint = _fingerprint([x for x, _ in self._captured.values()])

    def _of_library(self) -> dict[str, Any]:
        """Returns the values that transformers itself reads in each step."""
        trainer = self.trainer
        held = {f"self.{n}": getattr(trainer, n, None) for n in _READ}
        return held | {f"args.{n}": getattr(trainer.args, n) for n in ("max_grad_norm", "gradient_accumulation_steps")}

    def _settings(self) -> Settings:
        """Returns what the methods read from the trainer, its state, arguments and configuration, and their globals."""
        trainer, names = self.trainer, self._names
        values = {n: x for n, x in (self._own | vars(trainer)).items() if n in names and x is not trainer}
        for name, holder in (("state", trainer.state), ("args", trainer.args), ("config", self._config)):
            if name in names and holder is not None:
                values[name] = SimpleNamespace(**{n: x for n, x in vars(holder).items() if n in names})
        for name in ("model", "model_wrapped", "accelerator", "callback_handler", "log", *self.code):
            values.pop(name, None)
        objects = {f"self.{n}": id(x) for n, x in values.items() if _is_large(x)}
        read = SimpleNamespace(**values)
        with compat.no_modes(), compat.no_function_modes():
            return settings(read, objects, self.code, trainer.compute_loss_func, without=_is_large)

    @property
    def _config(self) -> Any:
        return getattr(vars(self.trainer).get("model"), "config", None)

    def _name(self, x: torch.Tensor) -> str:
        """Returns the path that leads to a tensor from the trainer, if there is one."""
        at = compat.memory_of(x)
        for name, value in vars(self.trainer).items():
            if isinstance(value, torch.nn.Module):
                held = {**dict(value.named_parameters(name)), **dict(value.named_buffers(name))}
            else:
                held = {name: value} if isinstance(value, torch.Tensor) else {}
            if found := [n for n, y in held.items() if compat.memory_of(y) == at]:
                return f"self.{found[0]}"
        return "a tensor that the loss reads"


def _log(*args: Any, **settings: Any) -> None:
    """Stands for the trainer's `log` while its loss is traced."""
    what = "compute_loss logs: it is traced once, and would not log in each step"
    raise TraceError("hf.Trainer", what, fix="log in a callback; what is logged of a loss goes through compute_metrics")


def _smoothed(
    smoother: LabelSmoother, outputs: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Computes the loss of transformers' LabelSmoother as a cross entropy, which can be computed in chunks.

    LabelSmoother itself computes it from the logarithms of all probabilities.
    """
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if shift_labels:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=smoother.ignore_index,
        label_smoothing=smoother.epsilon,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _is_large(x: Any) -> bool:
    """Whether a value is a module that is only compared by identity. Its tensors are compared if the loss uses them."""
    return isinstance(x, torch.nn.Module) and sum(1 for _ in x.modules()) > 16


def _one(x: torch.Tensor) -> str:
    return _fingerprint([x])


def _fingerprint(tensors: Sequence[torch.Tensor]) -> str:
    """Returns a text that changes when one of these tensors changes, with one transfer per device and dtype."""
    with compat.no_modes(), compat.no_function_modes(), torch.no_grad():
        plain = [x for x in tensors if x.layout is torch.strided and not x.is_meta and x.numel() <= _LARGE]
        kinds = dict.fromkeys((x.device, x.dtype) for x in plain)
        joined = (torch.cat([x.reshape(-1) for x in plain if (x.device, x.dtype) == kind]) for kind in kinds)
        versions = (f"{list(x.shape)} {version_of(x) if x.numel() > _LARGE else ''}" for x in tensors)
        return " ".join([*versions, *map(digest, joined)])


def _reached(first: str, own: dict[str, Any]) -> dict[str, FunctionType]:
    """Returns the functions among these that a function names, directly or through others."""
    plain = {n: getattr(f, "__func__", getattr(f, "fget", None) or f) for n, f in own.items()}
    found, todo = {}, [first]
    while todo:
        name = todo.pop()
        if isinstance(plain.get(name), FunctionType) and name not in found:
            found[name] = plain[name]
            todo += names_in(plain[name].__code__).attributes
    return found
