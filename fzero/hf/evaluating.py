"""Evaluates a Trainer's model from its sharded state, batch by batch, as the library's `prediction_step` does with a
module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fzero import tree
from fzero.hf import padding, traced
from fzero.hf.batch_kinds import Entries, Kind, Kinds, kind_of, tensors_of
from fzero.hf.data_parts import Exchange
from fzero.hf.loss_inputs import LossInputs
from fzero.modules.functionalize import Functional
from fzero.runtime.compile import compile
from fzero.step import compose, eval_step


class Evaluation:
    """One kind of evaluation, as long as the trainer stays as it is.

    Args:
        held: the trainer.
        constants: what its batches have besides tensors.
        transforms: those of its step that concern an evaluation.
        compiling: arguments of `fz.compile`.

    Batches are padded to a few shapes, if that changes nothing. If it does each shape runs by itself, all but the first
    operation by operation.
    """

    def __init__(
        self,
        held: LossInputs,
        model: Functional,
        kind: traced.Kind,
        constants: traced.Constants,
        transforms: Any,
        mesh: Any,
        compiling: Any,
    ):
        self.held, self._kind, self._constants = held, kind, constants
        self._model, self._transforms, self._mesh = model, transforms, mesh
        self._compile = lambda step, **how: compile(compose(*transforms)(step) if transforms else step, mesh, **how)
        self._compiling = compiling
        self._kinds = Kinds(Exchange(held.trainer))
        self._paddings: dict[Kind, tuple[traced.Losses, padding.Padding]] = {}
        self._step: Any = None
        self._shapes: dict[Any, list[tuple[int, ...]]] = {}

    def __call__(self, params: Any, entries: Entries, items: Any, key: torch.Tensor) -> Any:
        """The loss of a batch and its outputs, in the shapes that it has by itself. A forward that draws random numbers
        draws them from `key`."""
        device, own = self.held.trainer.args.device, kind_of(entries)
        found: dict[Kind, Any] = {}
        for kind in self._kinds.of_step([entries]):  # all ranks run the program of each kind that one of them has
            batch = self._kinds.stand_in(kind, [entries], device)
            found[kind] = self._evaluated(params, kind, batch, items, key)
        return found[own]

    def _evaluated(self, params: Any, kind: Kind, entries: Entries, items: Any, key: torch.Tensor) -> Any:
        trainer, tensors = self.held.trainer, tensors_of(entries)
        if self._step is None:
            fn = partial(traced.outputs, self.held, self.held.visible, self._constants, self._kind)
            self._fn = self._model.calling(fn, train=False)
            with_key = self._model.marked(lambda params, batch, key: self._fn(params, batch, key=key), "eval")
            self._step = eval_step(with_key)
            self._usual, self._odd = (self._compile(self._step, **x) for x in (self._compiling, {"backend": "eager"}))
        if kind not in self._paddings:
            losses = traced.Losses(ignores=self._model.mutable is None)
            if self._kind.losing:
                losses = traced.probe(self.held, self._model, entries, self._constants, items is not None)
            made = padding.of(trainer, "evaluation", losses, trainer.args.eval_batch_size, most=None)
            self._paddings[kind] = losses, made
        losses, pad = self._paddings[kind]
        (part,), shape = pad([tensors])
        odd = any(map(pad.kept, shape)) and shape is not pad.shapes[0]
        nones = {n: None for n, x in entries.items() if x is None}
        batch = self._batch({**part, **nones}, items, losses.reads)
        found, out = (self._odd if odd else self._usual)(params, batch, key)
        own_shapes = partial(self._own_shapes, {**tensors, **nones}, losses.reads)
        return None if found is None else found[0], self._cut(out, part, tensors, own_shapes)

    def _batch(self, entries: Entries, items: Any, reads: bool) -> dict[str, Any]:
        batch: dict[str, Any] = {"inputs": entries}
        if reads:
            first = next(iter(tensors_of(entries).values()))
            batch["num_items"] = torch.as_tensor(items, device=first.device).expand(len(first)).clone()
        return batch

    def _cut(self, out: Any, part: Any, tensors: Any, own_shapes: Any) -> Any:
        """The outputs of a batch, of those of the padded one."""
        if out is None or all(part[n].shape == x.shape for n, x in tensors.items()):
            return out
        sizes = iter(own_shapes())
        return tree.map(lambda x: x[tuple(slice(0, n) for n in next(sizes))], out)

    def _own_shapes(self, entries: Entries, reads: bool) -> list[tuple[int, ...]]:
        """The shapes of outputs for a batch that is not padded."""
        kind = kind_of(entries), tuple(tuple(x.shape) for _, x in sorted(tensors_of(entries).items()))
        if kind not in self._shapes:
            made = self._model.shapes(self._fn, self._batch(entries, 16, reads))[1]
            self._shapes[kind] = [tuple(x.shape) for x in tree.leaves(made)]
        return self._shapes[kind]
