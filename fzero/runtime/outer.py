"""Meets replicas that train by themselves (`fz.local_sgd`): a step of its own for each fragment of the
parameters, compiled for the ranks that lie along the axis of the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import random as fzrandom
from fzero import tree
from fzero.comm.collectives import gather
from fzero.layout import ANCHOR, Leaf, leaf_of
from fzero.mesh import Mesh, along, ranks_along
from fzero.ranks import agreement
from fzero.runtime.between_steps import BetweenSteps
from fzero.state import storage
from fzero.step import State, Step
from fzero.transforms.local_sgd import OUTER, LocalSGD

_TURNS = WeakTensorKeyDictionary()
"""By the number of a state: who has looked at it last, for another step may carry it on in between."""


@dataclass(frozen=True)
class Wandered:
    """A trained parameter as it rests on this rank, its copy to compute with, and its anchor, which is as finely cut or
    finer."""

    param: torch.Tensor
    copy: torch.Tensor | None
    anchor: torch.Tensor

    def part(self, mesh: Mesh) -> torch.Tensor:
        """The parameter where this rank's part of the anchor is, flat."""
        flat, size = storage.load(self.param, mesh.device).reshape(-1), math.prod(self.anchor.shape)
        if not (axes := self._finer()):
            return flat
        start = mesh.index(axes) * size
        part = flat[start : start + size]
        return torch.nn.functional.pad(part, (0, size - part.numel()))

    def put(self, anchor: torch.Tensor, mesh: Mesh) -> None:
        """Sets the parameter, and its copy, to the anchor, of which this is the rank's part."""
        value = anchor.reshape(-1).to(self.param.dtype)
        for axis in reversed(self._finer()):
            value = gather(mesh, value, axis)
        storage.copy(value[: self.param.numel()].view(self.param.shape), self.param)
        if self.copy is not None:
            storage.fill(self.copy, storage.cast(self.param, self.copy.dtype))

    def _finer(self) -> tuple[str, ...]:
        """The axes over which the anchor is cut besides."""
        return _leaf(self.anchor).layout.axes[len(_leaf(self.param).layout.axes) :]


class Outer(BetweenSteps):
    """The outer steps of a step with `fz.local_sgd`.

    Attributes:
        steps: the compiled outer steps, one for each fragment that has parameters on this rank, by number; each from
            its first sync on.
    """

    def __init__(self, spec: LocalSGD, mesh: Mesh, make: Callable[[Step, Mesh], Any]):
        self.spec, self.mesh, self._make = spec, mesh, make
        self.steps: dict[int, Any] = {}
        self._line: Mesh | None = None
        # of the state that was carried on last: its steps, those behind which each fragment met, and its look
        self._step, self._met, self._turn = 0, list[int](), object()

    def before(self, state: State, is_new: bool) -> bool:
        self._begin(state)
        return False

    def _begin(self, state: State) -> None:
        """Looks at a state before it is carried on: at its number of steps, and whether replicas have left their
        anchor."""
        if _TURNS.get(state.step) is self._turn:
            return
        self._step = int(state.step)
        _TURNS[state.step] = self._turn = object()

        def moved() -> list[bool]:
            return [
                any(
                    not torch.equal(x.part(self.mesh), anchor.reshape(-1).to(x.param.dtype))
                    for x in self._moved(state, i)
                    for anchor in [storage.load(x.anchor, self.mesh.device)]
                )
                for i in range(self.spec.fragments)
            ]

        everyones = agreement.everyones(self.mesh, "local_sgd", moved)
        self._met = [-1 if any(parts) else self._step for parts in zip(*everyones, strict=True)]

    def after(self, state: State) -> dict[str, torch.Tensor]:
        self._step += 1
        if not (due := self.spec.due(self._step)):
            return {}
        self._together()
        with agreement.unbroken(self.mesh):
            return self._meet(state, due)

    def sync(self, state: State) -> None:
        """Meets every fragment that was trained since it met last. Then all replicas have what else the first has."""
        self._begin(state)
        self._together()
        with agreement.unbroken(self.mesh):
            self._meet(state, [i for i, met in enumerate(self._met) if met != self._step])
            self._share(state)

    def _share(self, state: State) -> None:
        """Gives all replicas the leaves of the first that no outer step has made."""
        axis = self.spec.axis
        if self.mesh.axes[axis] == 1:
            return
        done = {id(x.param) for x in self._moved(state)}
        for x in tree.tensors((state.params, state.opt_state, state.extras)):
            if id(x) not in done and _leaf(x).role not in (ANCHOR, OUTER):
                done.add(id(x))
                value = storage.load(x, self.mesh.device).contiguous()
                if value.numel():
                    dist.broadcast(value, ranks_along(self.mesh, axis)[0], self.mesh.group(axis))
                    storage.copy(value, x)

    def _together(self) -> None:
        """Has all ranks see that all meet now: outer steps have notes of their own, which a rank that goes on with its
        next batch never reads."""
        agreement.everywhere(self.mesh, "local_sgd", lambda: None, f"meets replicas behind {self._step} steps")

    def _meet(self, state: State, fragments: list[int]) -> dict[str, torch.Tensor]:
        losses = [loss for i in fragments for loss in self._carry_on(state, i)]
        for i in fragments:
            self._met[i] = self._step
        return {"outer_loss": torch.stack(losses).sum()} if losses else {}

    def _carry_on(self, state: State, fragment: int) -> list[torch.Tensor]:
        """The outer step of a fragment. Its loss, if it has parameters on this rank."""
        anchors = state.extras[ANCHOR][fragment]
        held = self._moved(state, fragment)
        if not any(x.anchor.numel() for x in held):
            return []
        with torch.no_grad(), self._loaded((anchors, self._moments(state, fragment))) as (anchor, moments):
            number, key = torch.zeros((), dtype=torch.int64), fzrandom.key(0)
            outer = State(number.to(self.mesh.device), anchor, moments, key.to(self.mesh.device), {})
            batch = tree.unflatten(tree.structure(anchor), [x.part(self.mesh) for x in held])
            _, metrics = self._outer(fragment, anchor)(outer, batch)
            for x, value in zip(held, tree.leaves(anchor), strict=True):
                x.put(value, self.mesh)
        return [self._whole(held, metrics["aux"])]

    def _whole(self, held: list[Wandered], distances: torch.Tensor) -> torch.Tensor:
        """The sum of distances over parameters, and over the ranks of a replica that hold parts of one."""
        by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for x, part in zip(held, distances, strict=True):
            axes = tuple(axis for axis in _leaf(x.anchor).layout.axes if self.mesh.axes[axis] > 1)
            by_axes.setdefault(axes, []).append(part)
        sums = []
        for axes, parts in by_axes.items():
            found = torch.stack(parts).sum().reshape(1)
            for axis in axes:
                found = gather(self.mesh, found, axis).sum().reshape(1)
            sums.append(found)
        return torch.cat(sums).sum()

    def _moments(self, state: State, fragment: int) -> Any:
        """The outer optimizer's state, of a fragment. One without leaves is in no state."""
        if OUTER in state.extras:
            return state.extras[OUTER][fragment]
        return self.spec.optimizer.init(state.extras[ANCHOR][fragment])

    def _outer(self, fragment: int, anchor: Any) -> Any:
        if fragment not in self.steps:
            self._line = self._line or along(self.mesh, self.spec.axis)
            step = self.spec.outer_step(anchor, self._line.size)
            self.steps[fragment] = self._make(step, self._line)
        return self.steps[fragment]

    @contextmanager
    def _loaded(self, values: Any) -> Iterator[Any]:
        """These trees with flat leaves on the device, none of them a leaf's own tensor. What is written to them is
        written back."""
        flat, structure = tree.flatten(values)
        found = [storage.load(x, self.mesh.device) for x in flat]
        found = [x.reshape(-1) if _leaf(of).shape else x for x, of in zip(found, flat, strict=True)]
        yield tree.unflatten(structure, found)
        for x, of in zip(found, flat, strict=True):
            if of.is_meta or x.device != of.device:
                storage.copy(x.view(of.shape), of)

    def _moved(self, state: State, fragment: int | None = None) -> list[Wandered]:
        """The trained parameters, of all fragments or of one, in order."""
        anchors = state.extras[ANCHOR]
        params, copies = dict(tree.with_paths(state.params)), dict(tree.with_paths(state.extras.get("compute", ())))
        chosen = anchors if fragment is None else [anchors[fragment]]
        named = [(path, x) for tree_ in chosen for path, x in tree.with_paths(tree_)]
        return [Wandered(params[path], copies.get(path), x) for path, x in named]


def _leaf(tensor: torch.Tensor) -> Leaf:
    found = leaf_of(tensor)
    assert found is not None
    return found[0]
