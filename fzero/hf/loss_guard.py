"""Finds the values that a Trainer's loss reads in addition to its batch, and rejects changes to them.

Most attributes of a Trainer change all the time. The settings of a program include only the values that the user's
own methods read. If such a value changes between steps, an error is raised, because otherwise its old value would be
frozen into the program.
"""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType, SimpleNamespace
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
from fzero.trace.guards.value_keys import PLAIN_TYPES, contents
from fzero.tree import describe

_LARGE = 4096
"""The number of elements above which only `_SAMPLE` elements of a tensor are compared from step to step."""
_SAMPLE = 256
_MANY = 1000
"""The largest number of items of a container that are compared, and of submodules of a module."""
_READ = ("compute_loss_func", "label_smoother", "loss_is_scaled_for_ga", "model_accepts_loss_kwargs")
"""The attributes that transformers' own loss reads."""
_NOTHING = object()
_KEPT = (
    "set constants before train() (in __init__); count and record in a callback (on_step_end, on_log), "
    "or by compute_metrics"
)


class LossInputs:
    """Stands for a Trainer in a program's settings. `visible` has the values that the user's own loss methods read.

    All other attributes of the trainer change during training, and are left out.

    Args:
        base: the class whose methods are not the user's own.
    """

    def __init__(self, trainer: Any, base: type):
        self.trainer, self._base = trainer, base
        self.code, self.read = _methods(type(trainer), base), SimpleNamespace()
        self._names = {name for f in self.code.values() for name in names_in(f.__code__).attributes}
        self._captured: dict[int, tuple[torch.Tensor, str]] = {}
        self._fingerprint = _fingerprint_of_all({})
        self._fixed, self._first = self._of_library(), self._values()
        self.look()

    @property
    def visible(self) -> tuple[Any, ...]:
        """The values that become part of a program's settings."""
        return self.read, self.code, self.trainer.compute_loss_func, self.trainer._chunked

    def look(self) -> None:
        """Records the present values that the methods read from the trainer, its state, arguments and configuration."""
        vars(self.read).clear()
        vars(self.read).update(self._values())

    def changed(self) -> bool:
        """Whether any value differs from when this object was made. Programs traced since then are not valid for the
        new values."""
        if _fingerprint_of_all(self._captured) != self._fingerprint:
            return True
        return self._values() != self._first or self._of_library() != self._fixed

    def check(self) -> None:
        """Raises an error if anything that a step was made of has changed during training, except the values that
        `look` records.

        Raises:
            FzeroValueError: a tensor that was traced as a constant of a program, or a value that transformers reads,
                has changed.
        """
        if _fingerprint_of_all(self._captured) != self._fingerprint:
            changed = [self._named(x) for x, known in self._captured.values() if _fingerprint(x) != known]
            what = "a tensor that the loss reads has changed since the step was traced"
            fix = "pass changing values in the batch, or put it into the model, as a buffer that its forward overwrites"
            raise FzeroValueError("hf.Trainer", what, changed, fix)
        if changed := [n for n, x in self._of_library().items() if x != self._fixed[n]]:
            fix = "set them before train()"
            raise FzeroValueError("hf.Trainer", "the functions of a step were changed during training", changed, fix)

    def _of_library(self) -> dict[str, Any]:
        """Returns the values that transformers itself reads in each step."""
        trainer = self.trainer
        held = {f"self.{n}": getattr(trainer, n, None) for n in _READ}
        return held | {f"args.{n}": getattr(trainer.args, n) for n in ("max_grad_norm", "gradient_accumulation_steps")}

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
            TraceError: `compute_loss` keeps tensors beyond the call, or changes attributes.
        """
        trainer = self.trainer
        before, values = {id(x) for x in self._fakes()}, self._values()
        real = {n: vars(trainer)[n] for n in ("model", "model_wrapped") if n in vars(trainer)}
        during: dict[str, Any] = dict.fromkeys(real, forward)
        chunked = Chunked() if trainer._chunked else None
        if chunked is not None and type(trainer.label_smoother) is LabelSmoother:
            real["label_smoother"] = trainer.label_smoother
            during["label_smoother"] = functools.partial(_smoothed, trainer.label_smoother)
        vars(trainer).update(during, _tracing=True)
        self.prepare(forward)
        try:
            with chunked or nullcontext(), forward.counting as counting:
                yield counting
            if chunked is not None:
                chunked.check(type(trainer.model).__name__)
        finally:
            vars(trainer).update(real, _tracing=False)
        if kept := [path for x, path in self._fakes().items() if id(x) not in before]:
            what = "compute_loss keeps tensors: traced once, they have no values, and those of later steps are not kept"
            raise TraceError("hf.Trainer", what, kept, _KEPT)
        now = self._values()
        if wrote := [f"self.{n}" for n in {**values, **now} if values.get(n) != now.get(n)]:
            what = "compute_loss changes attributes: it is traced once, and would not do so in each step"
            raise TraceError("hf.Trainer", what, wrote, _KEPT)
        self._captured.update({id(x): (x, _fingerprint(x)) for x in forward.outside.read.values()})
        self._fingerprint = _fingerprint_of_all(self._captured)

    def _named(self, x: torch.Tensor) -> str:
        """Describes a tensor, with the path that leads to it from the trainer if there is one."""
        at = compat.memory_of(x)
        shape = describe(x)
        for name, value in vars(self.trainer).items():
            if isinstance(value, torch.nn.Module):
                held = {**dict(value.named_parameters(name)), **dict(value.named_buffers(name))}
            else:
                held = {path: y for y, path in _tensors(value, name).items()}
            if found := [n for n, y in held.items() if compat.memory_of(y) == at]:
                return f"self.{found[0]}: {shape}"
        return f"a tensor of its closure or globals: {shape}"

    def _values(self) -> dict[str, Any]:
        """Returns the present values that the methods read from the trainer, its state, arguments and configuration, by
        name."""
        trainer, named = self.trainer, self._names
        mro = type(trainer).__mro__
        # Reversed, so that an attribute of a subclass replaces that of its base.
        own = {n: x for c in reversed(mro[: mro.index(self._base)]) for n, x in vars(c).items()}
        values = {n: x for n, x in (own | vars(trainer)).items() if n in named}
        found = {n: y for n, x in values.items() if (y := _shown(x, trainer, named)) is not _NOTHING}
        for name, holder in (("state", trainer.state), ("args", trainer.args), ("config", _config(trainer))):
            if name in named and holder is not None:
                found[name] = _attributes(holder, trainer, named)
        return found

    def _fakes(self) -> dict[torch.Tensor, str]:
        """Returns the fake tensors that can be reached by names in the methods, with their paths."""
        found: dict[torch.Tensor, str] = {}
        for name in sorted(self._names & vars(self.trainer).keys()):
            found |= _tensors(vars(self.trainer)[name], f"self.{name}")
        for f in [*self.code.values(), self.trainer.compute_loss_func]:
            for name, x in _variables(f):
                found |= _tensors(x, name)
        return {x: path for x, path in found.items() if isinstance(x, compat.FakeTensor)}


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


def _config(trainer: Any) -> Any:
    return getattr(vars(trainer).get("model"), "config", None)


def _variables(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of the globals and the closure that a function uses, by name."""
    fn = getattr(fn, "__func__", fn)
    if isinstance(fn, FunctionType):
        yield from ((n, fn.__globals__[n]) for n in names_in(fn.__code__).globals if n in fn.__globals__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue


def _tensors(x: Any, path: str, depth: int = 3) -> dict[torch.Tensor, str]:
    """Returns the tensors in a value, and in its containers and objects of the user's classes, with their paths."""
    if isinstance(x, torch.Tensor):
        return {x: path}
    items: list[tuple[str, Any]] = []
    if depth and isinstance(x, dict):
        # The last items, because tensors that a method keeps are appended.
        items = [(f"{path}[{k!r}]", y) for k, y in list(x.items())[-_MANY:]]
    elif depth and isinstance(x, (list, tuple, set, collections.deque)):
        items = [(f"{path}[{i}]", y) for i, y in list(enumerate(x))[-_MANY:]]
    elif depth and _users(x):
        items = [(f"{path}.{n}", y) for n, y in vars(x).items()]
    return {y: at for p, value in items for y, at in _tensors(value, p, depth - 1).items()}


def _users(x: Any) -> bool:
    """Whether an object is an instance of a class of the user's."""
    plain = not isinstance(x, (type, FunctionType, MethodType, torch.nn.Module))
    package = type(x).__module__.partition(".")[0]
    return plain and hasattr(x, "__dict__") and package not in _LIBRARIES and package != "builtins"


_LIBRARIES = {"transformers", "accelerate", "torch", "datasets", "tokenizers", "peft", "numpy", "fzero"}


def _shown(x: Any, trainer: Any, named: set[str], depth: int = 4) -> Any:
    """Returns a value in the form in which it is compared from step to step, or `_NOTHING` if it is not compared.

    Args:
        named: the attributes of objects that are read.
    """
    again = functools.partial(_shown, trainer=trainer, named=named, depth=depth - 1)
    if type(x) in PLAIN_TYPES or isinstance(x, enum.Enum):
        return x
    if isinstance(x, torch.Tensor):
        return _NOTHING if isinstance(x, compat.FakeTensor) else _fingerprint(x)
    if (numbers := contents(x)) is not None:
        return str(numbers)
    if not depth or x is trainer:
        return _NOTHING
    if isinstance(x, (dict, list, tuple, set, frozenset, collections.deque)) and len(x) > _MANY:
        return len(x)
    if isinstance(x, dict):
        return {k: y for k, v in x.items() if type(k) in PLAIN_TYPES and (y := again(v)) is not _NOTHING}
    if isinstance(x, (list, tuple, collections.deque)):
        return [y for v in x if (y := again(v)) is not _NOTHING]
    if isinstance(x, (set, frozenset)):
        return {v for v in x if type(v) in PLAIN_TYPES}
    if isinstance(x, functools.partial):
        return [again(x.func), again(x.args), again(x.keywords)]
    if isinstance(x, (FunctionType, MethodType)):
        # A bound method is a new object each time it is read; its function is not.
        return f"{x.__qualname__}, at {id(getattr(x, '__func__', x))}"
    if isinstance(x, torch.nn.Module):  # a small one; of others, the tensors that are read are compared
        few = sum(1 for _ in x.modules()) < 16
        held = {n: y for n, y in vars(x).items() if n[0] != "_"} | dict(x.named_buffers()) if few else {}
        return [(n, y) for n, v in held.items() if (y := again(v)) is not _NOTHING]
    return _attributes(x, trainer, named, depth - 1) if _users(x) else _NOTHING


def _attributes(x: Any, trainer: Any, named: set[str], depth: int = 3) -> SimpleNamespace:
    held = {n: _shown(y, trainer, named, depth) for n, y in vars(x).items() if n in named}
    return SimpleNamespace(**{n: y for n, y in held.items() if y is not _NOTHING})


def _fingerprint(x: torch.Tensor) -> str:
    """Returns a text that changes when a tensor changes."""
    with _untraced():
        return f"{_kind(x)} {digest(_part(x))}"


def _fingerprint_of_all(captured: dict[int, tuple[torch.Tensor, str]]) -> str:
    """Returns one fingerprint of all these tensors, with one transfer per device and dtype."""
    parts: dict[Any, list[torch.Tensor]] = {}
    with _untraced():
        for x, _ in captured.values():
            parts.setdefault((x.device, x.dtype), []).append(_part(x))
        kinds = [_kind(x) for x, _ in captured.values()]
        return " ".join([*kinds, *(digest(torch.cat(some)) for some in parts.values())])


@contextmanager
def _untraced() -> Iterator[None]:
    with compat.no_modes(), compat.no_function_modes(), torch.no_grad():
        yield


def _kind(x: torch.Tensor) -> str:
    # Of a large tensor only a sample is compared, so its number of writes is compared too.
    return f"{list(x.shape)} {version_of(x) if x.numel() > _LARGE else ''}"


def _part(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor that are compared: for a large tensor a sample, which shows a change of most
    elements."""
    flat = x.detach().reshape(-1) if not x.is_meta and x.layout is torch.strided else x.new_zeros(0, device="cpu")
    return flat if flat.numel() <= _LARGE else flat[:: flat.numel() // _SAMPLE].clone()


def _methods(cls: type, base: type) -> dict[str, FunctionType]:
    """Returns the methods of subclasses of `base` that compute the loss, by name."""
    own: dict[str, Any] = {}
    for c in reversed(cls.__mro__[: cls.__mro__.index(base)]):
        plain = {n: getattr(f, "__func__", getattr(f, "fget", None) or f) for n, f in vars(c).items()}
        own |= {name: f for name, f in plain.items() if isinstance(f, FunctionType)}
    found, todo = {}, ["compute_loss"]
    while todo:
        name = todo.pop()
        if name in own and name not in found:
            found[name] = own[name]
            todo += names_in(own[name].__code__).attributes
    return found
