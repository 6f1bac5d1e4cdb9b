"""Makes meta modules (skeletons): modules on the meta device, whose tensors are given for each call.

A meta module computes only with the tensors that it is given: if it used the module's own weights, it would read a
meta tensor. This file must not know about blocks or steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroTypeError, TraceError
from fzero.modules import hook_capture
from fzero.trace.guards.captured_settings import Settings, settings
from fzero.trace.guards.user_frames import own_line


class TensorSlot(NamedTuple):
    """A slot of a module that holds a tensor: `_parameters` or `_buffers` of `owner`, under `attribute`. Tied slots
    share one `name`, under which the tree has their tensor.
    """

    owner: nn.Module
    of: str
    attribute: str
    name: str

    def get(self) -> Any:
        """Returns the tensor; None if it has been deleted."""
        return getattr(self.owner, self.of).get(self.attribute)

    def put(self, value: Any) -> None:
        getattr(self.owner, self.of)[self.attribute] = value
        flat = vars(self.owner).get("_flat_weights_names")  # for recurrent layers, which read a separate list
        if flat and self.attribute in flat:
            self.owner._flat_weights[flat.index(self.attribute)] = value  # type: ignore[operator,index]


def skeleton_of(module: nn.Module) -> nn.Module:
    """Returns a copy of a module on the meta device, with its ties. Tensors that are plain attributes become buffers
    that are not in the state dict.

    Raises:
        FzeroTypeError: if the module cannot be copied, or if a tensor has the name of an attribute of its class.
    """
    memo: dict[int, Any] = {}
    tied: dict[Any, Any] = {}  # parameters with the same elements are one parameter, and likewise buffers
    for m in module.modules():
        held = [*m._parameters.values(), *m._buffers.values(), *vars(m).values()]
        for x in held:
            if isinstance(x, torch.Tensor) and id(x) not in memo:
                meta = torch.empty_like(x, device="meta")
                meta = nn.Parameter(meta, x.requires_grad) if isinstance(x, nn.Parameter) else meta
                # `deepcopy` looks here first, so it takes the meta tensors instead of copying tensors.
                memo[id(x)] = tied.setdefault(_elements(x), meta)
    try:
        found = copy.deepcopy(module, memo)
    except Exception as error:
        problems = [f"{type(module).__name__}: {type(error).__name__}: {error}"]
        fix = "keep locks, files and generators out of the module, or give it a __deepcopy__"
        raise FzeroTypeError("functionalize", "the module cannot be copied", problems, fix) from error
    problems = [
        f"{prefix}.{name}".lstrip(".") + f": {tree.describe(vars(m)[name])}, hides {type(m).__name__}.{name}"
        for prefix, m in found.named_modules()
        for name in plain_tensors(m)
        if hasattr(type(m), name)
    ]
    if problems:
        what = "tensors are attributes with the name of a method or another attribute of the module's class"
        fix = "give them another name, or register them: self.register_buffer(name, x)"
        raise FzeroTypeError("functionalize", what, problems, fix)
    for m in found.modules():
        for name in plain_tensors(m):
            x = vars(m).pop(name)
            m.register_buffer(name, x.detach(), persistent=False)
    for prefix, m in found.named_modules():
        for name, x in list(m._buffers.items()):
            if x is not None and x.layout is not torch.strided:
                del m._buffers[name]
                vars(m)[name] = SparseBuffer(f"{prefix}.{name}" if prefix else name, str(x.layout))
    return found


class SparseBuffer:
    """Replaces a sparse buffer in a meta module, because a state cannot hold one. The forward must not read it."""

    def __init__(self, name: str, layout: str):
        self._name, self._layout = name, layout

    def _refused(self) -> TraceError:
        what = f"the forward reads {self._name}, a buffer of layout {self._layout}"
        fix = "keep it dense: register_buffer(name, x.to_dense()); only buffers that are not read may be sparse"
        return TraceError("functionalize", what, list(own_line()), fix)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):  # queried when a module is copied or compared
            raise AttributeError(name)
        raise self._refused()

    def __torch_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refused()


def _elements(x: torch.Tensor) -> Any:
    """Returns a key for the elements of memory that a tensor covers and how it is used; for a tensor without memory,
    its identity.
    """
    if x.is_meta or not x.numel() or x.layout is not torch.strided:
        return id(x)
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x.device, isinstance(x, nn.Parameter), x.requires_grad


def check_hooks(module: nn.Module) -> None:
    """Raises an error if hooks of PyTorch itself recompute a parameter from others in each forward."""
    found = [
        f"{name or type(module).__name__}: {type(hook).__module__} sets {_set_by(hook)}"
        for name, m in module.named_modules()
        for hook in m._forward_pre_hooks.values()
        if type(hook).__module__ in _SETTERS
    ]
    if found:
        fix = (
            "torch.nn.utils.parametrizations has weight_norm and spectral_norm that compute it, and parametrize others"
        )
        raise FzeroTypeError("functionalize", "hooks recompute parameters in each forward", found, fix)


def _set_by(hook: Any) -> str:
    return getattr(hook, "name", None) or getattr(hook, "_tensor_name", "a parameter")


_SETTERS = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm", "torch.nn.utils.prune")


def check_plain(own: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor], written: Collection[str]) -> None:
    """Raises an error if tensors of a module are more than their values: if they have hooks, or share memory with
    others.

    Args:
        own: the tensors by all of their names.
        leaves: each tensor once, by its name in `params`.
        written: the names of those that the forward overwrites.
    """
    by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    problems = [
        f"{name}: has hooks for its gradient (register_hook), which would not be called"
        for name, x in own.items()
        if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None)
    ]
    for name, x in leaves.items():
        if not x.is_meta and x.numel() and x.layout is torch.strided:
            # One more than the offset of the last element. A view with gaps reaches farther than it has elements.
            reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
            if reach < x.numel() and (x.requires_grad or name in written):
                problems.append(f"{name}: several of its elements share memory, as after expand(), and it changes")
            first, last = x.data_ptr(), x.data_ptr() + reach * x.itemsize
            by_storage.setdefault(x.untyped_storage().data_ptr(), []).append((first, last, name, x))
    for group in by_storage.values():
        for i, (first, last, name, x) in enumerate(group):
            for begin, end, other, y in group[i + 1 :]:
                changes = [n for n, t in ((name, x), (other, y)) if t.requires_grad or n in written]
                if changes and max(first, begin) < min(last, end):
                    problems.append(f"{name}, {other}: share memory, and {changes[0]} changes")
    if problems:
        fix = (
            "change gradients in the optimizer: fz.optim.chain(fz.optim.GradientTransformation(init, update), "
            "fz.optim.adamw(...)), whose update calls fz.optim.unsharded(hook) for this leaf (a hook makes the "
            "tensors it uses); tie parameters by binding "
            "one to both names (b.weight = a.weight), and take views of them in the forward; copy an expanded tensor, "
            "nn.Parameter(x.contiguous()), or expand it in the forward"
        )
        raise FzeroTypeError("functionalize", "tensors of the module have hooks or share memory", problems, fix)


def renumber_hooks(module: nn.Module) -> None:
    """Numbers the hooks of each module from its own first one, so that equal modules have equal hooks."""
    for m in module.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = vars(m)[kind]
            # PyTorch numbers the hooks of all modules of a process with one counter, so equal modules have different
            # numbers.
            new = {old: at - len(hooks) for at, old in enumerate(hooks)}  # numbers that no later hook can get
            for name, held in vars(m).items():
                if name.startswith(kind) and name.removeprefix(kind) in ("", "_with_kwargs", "_always_called"):
                    items = [(new.get(k, k), x) for k, x in held.items()]
                    held.clear()
                    held.update(items)


def plain_tensors(module: nn.Module) -> list[str]:
    """Returns the attributes of a module that are tensors but neither parameters nor buffers."""
    return [name for name, x in vars(module).items() if isinstance(x, torch.Tensor)]


def named(module: nn.Module) -> Iterator[tuple[str, TensorSlot]]:
    """Yields every tensor slot, by the name that `state_dict()` has for it, in its order. A module that occurs
    several times has several names. `TensorSlot.name` is this name. Sparse buffers are left out.
    """
    for prefix, m in module.named_modules(remove_duplicate=False):
        for of in ("_parameters", "_buffers"):
            for attribute, x in getattr(m, of).items():
                if x is not None and (of == "_parameters" or x.layout is torch.strided):
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    yield name, TensorSlot(m, of, attribute, name)


def slots_of(module: nn.Module) -> list[TensorSlot]:
    """Returns the slots of all tensors of a module. For tied tensors the model's own name is used: the source in
    `all_tied_weights_keys` if there is one, otherwise the first name.
    """
    tied_to: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    aliases: dict[int, list[str]] = {}
    found = list(named(module))
    for name, slot in found:
        aliases.setdefault(id(slot.get()), []).append(name)
    own = {at: next((n for n in names if n not in tied_to), names[0]) for at, names in aliases.items()}
    places = {(id(slot.owner), slot.of, slot.attribute): slot for _, slot in reversed(found)}
    return [slot._replace(name=own[id(slot.get())]) for slot in reversed(places.values())]


def nested(flat: Mapping[str, Any]) -> Any:
    """Returns the tree with these dotted names, with lists where the keys are 0, 1, 2, ..."""
    root: dict[str, Any] = {}
    for name, x in flat.items():
        *outer, last = name.split(".")
        node = root
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = x
    return tree.listed(root)


@contextmanager
def holding(slots: Sequence[TensorSlot], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Puts these tensors into the slots of a meta module. Afterwards the slots are as before, including those that
    the body has rebound.

    Raises:
        TraceError: if the body permanently casts or moves tensors of a module by `self.part.to(dtype)`.
    """
    before = [slot.get() for slot in slots]
    try:
        for slot in slots:
            slot.put(tensors[slot.name])
        with compat.module_conversions({slot.owner for slot in slots}, _check_unchanged):
            yield
    finally:
        for slot, x in zip(slots, before, strict=True):
            slot.put(x)


def _check_unchanged(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises an error if `fn`, by which `module.to(...)` or a similar method converts tensors, changes any of a
    module's tensors.
    """
    found = []
    for name, x in (*module._parameters.items(), *module._buffers.items()):
        if x is None:
            continue
        converted = fn(x)
        if converted is not x:
            change = f"from {x.dtype} on {x.device} to {converted.dtype} on {converted.device}"
            found.append(f"{type(module).__name__}.{name}: {change}")
    if found:
        fix = (
            "cast where they are used: F.linear(x, self.part.weight.to(x.dtype)); or cast the input: "
            "x.to(self.part.weight.dtype); mixed_precision(where=...) leaves parameters in float32"
        )
        what = "the forward converts the tensors of a module (module.to, float, half)"
        raise TraceError("functionalize", what, [*own_line(), *found], fix)


def settled(module: nn.Module, prefix: str, run: Callable[[], Any]) -> Any:
    """Returns the result of `run()`, which runs a forward of this module. An attribute may change in the first call,
    for example a size that depends on the input's; then the second call counts.

    Raises:
        TraceError: listing attributes that change again, or that hold tensors, and hooks that keep what they see:
            when a step runs, nothing would change them. The attributes are restored.
    """
    for again in (False, True):
        before, hooks = _Attributes(module), _hooks(module)
        out = run()
        changes = before.changes(prefix)
        if again or not all(change.plain for change in changes):
            _refuse(changes)
        if kept := [place for place, facts in hooks.items() if settings(facts[0], strict=False) != facts[1]]:
            fix = "return it from the forward, or have transformers collect it: output_hidden_states=True"
            raise TraceError("functionalize", "hooks store inputs or outputs of modules", kept, fix)
        if not changes:
            break
    return out


def _hooks(module: nn.Module) -> dict[str, tuple[Any, Settings]]:
    """Returns the user's own forward hooks, by module and source location, and what they hold."""
    found = {}
    for name, m in module.named_modules():
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()):
            if getattr(hook, "__module__", "") != hook_capture.LIBRARY:
                code = getattr(hook, "__code__", None)
                place = f"{code.co_filename}:{code.co_firstlineno}" if code else type(hook).__name__
                found[f"{name or type(m).__name__}: {place}"] = (hook, settings(hook, strict=False))
    return found


class _Attributes:
    """The attributes of all modules of a meta module, and what their containers hold, to detect what a forward
    changes.
    """

    def __init__(self, module: nn.Module):
        self._names = {m: name for name, m in module.named_modules()}
        self._before = {m: _attributes(m) for m in module.modules()}

    def changes(self, prefix: str) -> list[Change]:
        """Returns the changes since the object was created."""
        found = []
        for m, old in self._before.items():
            new = _attributes(m)
            for key in {**old, **new}:
                if key not in old or key not in new or not _same(old[key], new[key]):
                    path = ".".join(x for x in (prefix, self._names[m], key) if x)
                    found.append(Change(m, key, path, old.get(key), new.get(key)))
        return found


class Change(NamedTuple):
    """A change that a forward has made to an attribute of a module."""

    owner: nn.Module
    attribute: str
    path: str
    old: Any
    new: Any

    @property
    def plain(self) -> bool:
        """Whether a plain value replaced another plain value, or a missing one."""
        return all(pair is None or isinstance(pair[0], (*_PLAIN, type(None))) for pair in (self.old, self.new))

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.old)} before, {_shown(self.new)} now"

    def undo(self) -> None:
        _undo(self.owner, self.attribute, self.old)


def _refuse(changes: Sequence[Change]) -> None:
    if changes:
        for change in changes:
            change.undo()
        fix = (
            "return it from the forward, or register it as a buffer that the forward overwrites: "
            "self.register_buffer(name, torch.zeros(()))"
        )
        if any(_holds_tensors(change.new) for change in changes):
            fix += (
                "; a constant that is computed once (a cache): compute it in each forward, by a function with "
                "functools.lru_cache if you like, or in __init__: self.register_buffer(name, x, persistent=False)"
            )
        found = list(map(str, changes))
        raise TraceError("functionalize", "the forward changes attributes of modules", found, fix)


_PLAIN = (bool, int, float, str)


def _attributes(m: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns attributes and what they hold: a shallow copy of containers."""
    own = {k: x for k, x in vars(m).items() if k not in _OF_TORCH}
    own |= {f"_buffers[{k!r}]": x for k, x in m._buffers.items() if x is None}
    return {k: (x, _items(x)) for k, x in own.items()}


_OF_TORCH = ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "training")


def _items(x: Any) -> Any:
    if isinstance(x, dict):
        return dict(x)
    return list(x) if isinstance(x, (list, set)) else None


def _same(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    (a, inside), (b, now) = old, new
    if type(a) in (*_PLAIN, tuple) and type(a) is type(b) and not _tensors(a) and a == b:
        return True
    if a is not b:
        return False
    if isinstance(inside, dict):
        return inside.keys() == now.keys() and all(inside[k] is now[k] for k in inside)
    return inside is None or (len(inside) == len(now) and all(p is q for p, q in zip(inside, now, strict=True)))


def _holds_tensors(pair: Any) -> bool:
    """Returns whether an attribute is a tensor, or a container of tensors."""
    if pair is None:
        return False
    x, inside = pair
    held = inside.values() if isinstance(inside, dict) else inside if inside is not None else [x]
    return any(isinstance(y, torch.Tensor) or _tensors(y) for y in held)


def _tensors(x: Any) -> bool:
    return isinstance(x, tuple) and any(isinstance(y, torch.Tensor) for y in x)


def _shown(pair: Any) -> str:
    if pair is None:
        return "absent"
    x, inside = pair
    if isinstance(x, (*_PLAIN, type(None))):
        return repr(x)
    kind = "tensor" if isinstance(x, torch.Tensor) else type(x).__name__
    return f"a {kind}" + (f" of {len(inside)}" if inside is not None else "")


def _undo(m: nn.Module, key: str, old: Any) -> None:
    """Restores an attribute of a module, and the contents of its container, to what they were."""
    if key.startswith("_buffers["):
        m._buffers[key[len("_buffers['") : -2]] = None
    elif old is None:
        vars(m).pop(key, None)
    else:
        value, inside = old
        vars(m)[key] = value
        if isinstance(inside, dict):
            value.clear()
            value.update(inside)
        elif isinstance(value, list):
            value[:] = inside
        elif isinstance(value, set):
            value.clear()
            value.update(inside)


def check_kinds(module: nn.Module) -> None:
    """Raises an error if tensors of a module have no shape yet, or if TorchScript runs a part of it."""
    lazy, scripted = [], []
    for name, m in module.named_modules():
        unmade = [
            k
            for k, x in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
            if nn.parameter.is_lazy(x)
        ]
        if unmade:
            lazy.append(f"{name or 'the module'} ({type(m).__name__}): {', '.join(unmade)}")
        if isinstance(m, torch.jit.ScriptModule):
            kind = getattr(m, "original_name", type(m).__name__)
            scripted.append(f"{name or 'the module'} ({kind})")
    if lazy:
        fix = "run one forward before: module(inputs) gives them their shapes"
        raise FzeroTypeError("functionalize", "lazy modules have no shapes yet", lazy, fix)
    if scripted:
        fix = "give the module before torch.jit.script or torch.jit.trace; a step is compiled by fz.compile"
        what = "TorchScript runs these modules, and keeps its own tensors"
        raise FzeroTypeError("functionalize", what, scripted, fix)
