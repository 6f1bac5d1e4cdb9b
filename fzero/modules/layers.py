"""Finds the layers of a module, which are its repeated submodules, and makes each a block.

Equal layers are traced once: a block's signature is everything that its code reads, by value
(trace/guards/captured_settings.py), so two layers are one subgraph exactly if their classes, attributes and shapes
are equal. One attribute always differs between layers: their number. While a block is traced, a symbolic `_Number`
takes its place. A layer whose code asks for the value is traced separately.
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fzero import tree
from fzero.errors import FzeroValueError, TraceError
from fzero.modules import hook_capture
from fzero.modules.buffers import written_names
from fzero.modules.meta_module import TensorSlot, holding, named, settled
from fzero.modules.rng_mode import Dims, Draws, Rehearsal
from fzero.trace.block import attempt, block
from fzero.trace.block_body import COMPUTES, RUNS
from fzero.trace.guards.exact_types import asks_types
from fzero.trace.guards.user_frames import line
from fzero.trace.recorder import line_of

Blocks = Sequence[str | type[nn.Module]]


def find_layers(module: nn.Module) -> list[str]:
    """Returns the names of repeated submodules: the outermost members of a list that has two or more of their class.
    If no two of the members have the same shapes, they are stages, and the layers inside them are taken instead.
    Layers of torch.nn that contain no other layers, such as `Linear`, and layers without parameters are not taken.
    """
    return [name for name, _ in _layers(module, "")]


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    members = list(module.named_children())
    kinds: dict[type, list[nn.Module]] = {}
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for _, m in members:
            own = not type(m).__module__.startswith("torch.nn.")
            if any(True for _ in m.parameters()) and (own or any(True for _ in m.children())):
                kinds.setdefault(type(m), []).append(m)
    for name, m in members:
        path, alike = f"{prefix}.{name}" if prefix else name, kinds.get(type(m), [])
        inner = list(_layers(m, path))
        repeated = len(alike) > 1 and (not inner or len({_shapes(x) for x in alike}) < len(alike))
        yield from [(path, m)] if repeated else inner


def _shapes(m: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(slot.get().shape)) for name, slot in named(m))


def chosen(module: nn.Module, blocks: Blocks) -> list[str]:
    """Returns the names of the submodules that `blocks` names or whose classes it lists, only the outermost.

    Raises:
        FzeroValueError: listing entries that match no submodule.
    """
    found, names = dict[str, None](), [name for name, _ in module.named_modules() if name]
    missed = []
    for b in blocks:
        if isinstance(b, str):
            hits = [name for name in names if fnmatch.fnmatchcase(name, b)]
        elif isinstance(b, type):
            hits = [name for name, m in module.named_modules() if name and isinstance(m, b)]
        else:
            hits = []
        missed += [] if hits else [b.__name__ if isinstance(b, type) else repr(b)]
        found |= dict.fromkeys(hits)
    if missed:
        fix = f"name submodules ({', '.join(map(repr, names[:4]))}, ...; 'layers.*' for all of a list) or their classes"
        raise FzeroValueError("functionalize", "no submodule matches `blocks`", missed, fix)
    return [name for name in names if name in found and not any(name.startswith(f"{o}.") for o in found)]


# --- a layer as a block ---


@dataclass(eq=False)
class LayerCall:
    """One call of a complete module: what draws random numbers in it, the draws of each layer in the order in which
    layers are called, and whether a block is running. A dry run fills in the draws.
    """

    draws: Draws | Rehearsal
    layers: list[Dims]
    inside: bool = False


_call: ContextVar[LayerCall] = ContextVar("fzero_module_call")


@contextmanager
def _within(call: LayerCall) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def in_block() -> bool:
    """Returns whether the caller is running inside a layer that is a block."""
    call = _call.get(None)
    return call is not None and call.inside


@contextmanager
def as_blocks(layers: Sequence[Layer], call: LayerCall) -> Iterator[None]:
    """Makes calls of these layers inside the context calls of blocks."""
    for layer in layers:
        # An attribute of the instance, which `nn.Module.__call__` finds before the method of the class.
        vars(layer.module)["forward"] = layer
    try:
        with _within(call), call.draws:
            yield
    finally:
        for layer in layers:
            layer.restore()


class Layer:
    """A layer of a meta module, whose forward is a call of a block inside `as_blocks`.

    Args:
        name: name of the layer in the meta module.
        module: the layer.
        mutable: names of the buffers that the forward overwrites.
        kept: a pattern for the names of parameters that stay in float32.
    """

    def __init__(self, name: str, module: nn.Module, mutable: frozenset[str], kept: re.Pattern[str] | None):
        self.name, self.module = name, module
        self.numbers: dict[tuple[nn.Module, str], _Number] = {}
        self._forward = vars(module).get("forward")
        self._tensors = list(named(module))
        # Reversed, so that a slot with several names gets the first one.
        places = {(id(s.owner), s.of, s.attribute): s for _, s in reversed(self._tensors)}
        self._slots = list(places.values())
        overwritten = tuple(sorted(s.name for s in self._slots if f"{name}.{s.name}" in mutable))
        body = _body(module, self._slots, overwritten)
        parameters = (s.name for s in self._slots if s.of == "_parameters")
        vars(body)[COMPUTES] = tuple(n for n in parameters if kept is None or not kept.search(f"{name}.{n}"))
        vars(body)[RUNS] = type(module).forward
        self._block = block(body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        # A layer inside another block runs as plain code.
        if call.inside:
            with self._itself():
                return self.module.forward(*args, **kwargs)
        if isinstance(call.draws, Rehearsal):
            return self._tried(lambda: self._rehearsed(call, args, kwargs))
        given = {name: slot.get() for name, slot in self._tensors}
        captures, dims = hook_capture.wanted(), call.layers.pop(0) if call.layers else ()
        # A layer that draws nothing needs no key.
        key = call.draws.next() if dims else None
        made = self._tried(lambda: self._block(given, key, dims, args, kwargs, captures))
        (out, captured), new = made.whole()
        hook_capture.put(captured)
        for slot in self._slots:
            if slot.name in new:
                slot.put(new[slot.name])
        return out

    def _rehearsed(self, call: LayerCall, args: Any, kwargs: Any) -> Any:
        assert isinstance(call.draws, Rehearsal)
        with _within(LayerCall(call.draws, [], inside=True)), call.draws.aside() as drawn:
            out = self.module.forward(*args, **kwargs)
        call.layers.append(tuple(drawn))
        return out

    def _tried(self, run: Callable[[], Any]) -> Any:
        """Runs with symbolic layer numbers; if the code does not work with those, runs again with plain ones."""
        standing = [number for number in self.numbers.values() if not number.asked]
        try:
            with self._itself(), attempt() if standing else nullcontext():
                return run()
        except Exception:
            if not standing:
                raise
            for number in standing:
                number.asked = True
        with self._itself():
            return run()

    def restore(self) -> None:
        """Restores the layer's own forward."""
        vars(self.module).pop("forward", None)
        if self._forward is not None:
            vars(self.module)["forward"] = self._forward

    @contextmanager
    def _itself(self) -> Iterator[None]:
        """Runs the layer with its own forward, and with symbolic layer numbers unless their values have been asked
        for.
        """
        self.restore()
        asked = {at: n for at, n in self.numbers.items() if not n.asked}
        for (m, name), number in asked.items():
            number.value = vars(m)[name]
            vars(m)[name] = number
        try:
            yield
        finally:
            for (m, name), number in asked.items():
                vars(m)[name] = number.value
            vars(self.module)["forward"] = self


def _body(layer: nn.Module, slots: Sequence[TensorSlot], overwritten: Sequence[str]) -> Callable[..., Any]:
    """Returns the function of a block: the layer's own forward on the tensors that it is given."""

    name = type(layer).__name__

    def run(p: Any, key: Any, dims: Dims, args: Any, kwargs: Any, captures: Any) -> Any:
        def once() -> Returned:
            # A block must not write its arguments, so buffers that the forward overwrites are copied.
            given = {name: x.clone() if name in overwritten else x for name, x in p.items()}
            call = LayerCall(Draws(key, dims), [], inside=True)
            with (
                _within(call),
                _asked(layer),
                hook_capture.aside(captures) as captured,
                holding(slots, given),
                call.draws,
            ):
                out = layer.forward(*args, **kwargs)
                check_bound(slots, given, overwritten, layer)
                new = {s.name: s.get() for s in slots if s.name in overwritten}
            return Returned.of(name, (out, captured), new)

        return settled(layer, name, once)

    run.__name__ = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return run


def check_bound(
    slots: Sequence[TensorSlot], given: Mapping[str, Any], overwritten: Collection[str], module: nn.Module
) -> None:
    """Raises an error if a forward has rebound or deleted a parameter, or a buffer that is not known to be overwritten,
    or if it has given a buffer another shape or dtype. The error names the user's line.
    """
    bound = [s for s in slots if s.name not in overwritten and s.get() is not given[s.name]]
    if bound:
        fix = "overwrite buffers by name: fz.functionalize(module, mutable=['*.ema']); parameters are the optimizer's"
        found = [f"{type(s.owner).__name__}.{s.attribute} ({s.name})" for s in bound]
        what = f"the forward of {type(module).__name__} assigns new tensors to attributes"
        raise TraceError("functionalize", what, [*_written_lines(module, bound), *found], fix)
    other = [s for s in slots if s.name in overwritten and _form(s.get()) != _form(given[s.name])]
    if other:
        fix = "assign a tensor of the same shape and dtype: self.mean = mean.to(self.mean.dtype)"
        found = [f"{s.name}: {_described(s.get())}, and before {_described(given[s.name])}" for s in other]
        what = f"the forward of {type(module).__name__} changes the shape or dtype of buffers"
        raise TraceError("functionalize", what, [*_written_lines(module, other), *found], fix)


def _described(value: Any) -> str:
    return tree.describe(value) if isinstance(value, torch.Tensor) else "None, or deleted"


def _form(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _written_lines(module: nn.Module, slots: Sequence[TensorSlot]) -> list[str]:
    """Returns the user's lines that computed the new tensors of these attributes or, if these are not known, the lines
    that write to the attributes, at most three.
    """
    if made := [where for s in slots if (where := line_of(s.get())) is not None]:
        return list(dict.fromkeys(made))[:3]
    places = written_names(module)
    found = dict.fromkeys(place for s in slots for place in places.get(s.attribute, ()))
    return [line(place) for place in [*found][:3]]


# --- results of blocks ---

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)


class Returned:
    """The results of a block: its tensors, the new values of buffers, and everything else as part of the tree's
    structure.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], new: Mapping[str, torch.Tensor], rest: Any):
        self.tensors, self.new, self.rest = tensors, new, rest

    @classmethod
    def of(cls, owner: str, out: Any, new: Mapping[str, torch.Tensor]) -> Returned:
        """Makes the results of a block. Raises an error if something is returned that is neither a tensor nor a plain
        value.
        """
        flat, spec = tree.flatten(out)
        flat = [_value(x) if type(x) is _Number else x for x in flat]
        wrong = [
            f"{path}: {type(x).__name__}"
            for path, x in zip(tree.paths(out[0], "output"), flat, strict=False)
            if not isinstance(x, (torch.Tensor, *_PLAIN))
        ]
        if wrong:
            fix = "return tensors, containers of them, and plain values; turn caches off (use_cache=False)"
            raise TraceError("functionalize", f"the forward of {owner} returns other objects", wrong, fix)
        constants = tuple(None if isinstance(x, torch.Tensor) else (x,) for x in flat)
        return cls([x for x in flat if isinstance(x, torch.Tensor)], dict(new), (spec, constants))

    def whole(self) -> tuple[Any, Mapping[str, torch.Tensor]]:
        """Returns the forward's outputs, and the new values of buffers."""
        (spec, constants), tensors = self.rest, iter(self.tensors)
        return tree.unflatten(spec, [next(tensors) if c is None else c[0] for c in constants]), self.new


tree.register(Returned, lambda x: ((x.tensors, x.new), x.rest), lambda rest, parts: Returned(parts[0], parts[1], rest))


# --- numbers of layers ---


def layers_of(
    meta_module: nn.Module, names: Sequence[str], mutable: frozenset[str], kept: re.Pattern[str] | None
) -> list[Layer]:
    """Returns the layers with these names. Layers of one class in one list share symbolic layer numbers, unless their
    code distinguishes types: the symbolic number has a class of its own.
    """
    layers = [Layer(name, meta_module.get_submodule(name), mutable, kept) for name in names]
    kinds: dict[tuple[type, str], list[Layer]] = {}
    for layer in layers:
        kinds.setdefault((type(layer.module), layer.name.rpartition(".")[0]), []).append(layer)
    for alike in (layers for layers in kinds.values() if not asks_types(layers[0].module)):
        shared: dict[tuple[str, str], _Number] = {}
        for layer in alike:
            for path, m in layer.module.named_modules():
                for name, value in vars(m).items():
                    if type(value) is int and _COUNTS.search(name):
                        layer.numbers[m, name] = shared.setdefault((path, name), _Number())
    return layers


_COUNTS = re.compile(r"(^|_)(idx|index|id|number|depth)$")


class _Number:
    """A symbolic layer number, used while one subgraph is traced for many layers. If code asks for its value, it gets
    that of the current layer, and the subgraph is used for this layer only.
    """

    def __init__(self) -> None:
        self.value, self.live, self.asked = 0, False, False

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return int

    def __repr__(self) -> str:  # the repr determines whether subgraphs are equal
        return repr(_value(self)) if self.live else "the number of a layer"

    __hash__: Any = lambda self: hash(_value(self))


def _value(x: Any) -> Any:
    if type(x) is not _Number:
        return x
    x.asked = True
    return x.value


def _asking(name: str) -> Any:
    return lambda self, *others: getattr(int, name)(_value(self), *map(_value, others))


# Arithmetic and conversions ask for the value.
for _name in dir(int):
    if _name.startswith("__") and callable(getattr(int, _name)) and _name not in vars(object):
        setattr(_Number, _name, _asking(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__str__", "__format__"):
    setattr(_Number, _name, _asking(_name))


@contextmanager
def _asked(layer: nn.Module) -> Iterator[None]:
    numbers = [x for m in layer.modules() for x in vars(m).values() if type(x) is _Number]
    for number in numbers:
        number.live = True
    try:
        yield
    finally:
        for number in numbers:
            number.live = False
