"""Evaluates a Trainer's model from its sharded state, batch by batch, as the library's `prediction_step` does with a
module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fzero import tree
from fzero.hf import padding, traced
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
        self._padding: padding.Padding | None = None
        self._shapes: dict[Any, list[tuple[int, ...]]] = {}

    def __call__(self, params: Any, tensors: Any, items: Any) -> Any:
        """The loss of a batch and its outputs, in the shapes that it has by itself."""
        trainer = self.held.trainer
        if self._padding is None:
            losses = traced.Losses(ignores=self._model.mutable is None)
            if self._kind.losing:
                losses = traced.probe(self.held, self._model, tensors, self._constants, items is not None)
            fn = partial(traced.outputs, self.held, self.held.visible, self._constants, self._kind)
            self._step = eval_step(self._model.calling(fn, train=False))
            self._usual, self._odd = (self._compile(self._step, **x) for x in (self._compiling, {"backend": "eager"}))
            self._reads = losses.reads
            self._padding = padding.of(trainer, "evaluation", losses, trainer.args.eval_batch_size, most=None)
        (part,), shape = self._padding([tensors])
        odd = any(map(self._padding.kept, shape)) and shape is not self._padding.shapes[0]
        found, out = (self._odd if odd else self._usual)(params, self._batch(part, items))
        return None if found is None else found[0], self._cut(out, part, tensors)

    def _batch(self, part: Any, items: Any) -> dict[str, Any]:
        batch: dict[str, Any] = {"inputs": part}
        if self._reads:
            first = next(iter(part.values()))
            batch["num_items"] = torch.as_tensor(items, device=first.device).expand(len(first)).clone()
        return batch

    def _cut(self, out: Any, part: Any, tensors: Any) -> Any:
        """The outputs of a batch, of those of the padded one."""
        if out is None or all(part[n].shape == x.shape for n, x in tensors.items()):
            return out
        sizes = iter(self._own_shapes(tensors))
        return tree.map(lambda x: x[tuple(slice(0, n) for n in next(sizes))], out)

    def _own_shapes(self, tensors: Any) -> list[tuple[int, ...]]:
        """The shapes of outputs for a batch that is not padded."""
        kind = tuple((n, tuple(x.shape)) for n, x in sorted(tensors.items()))
        if kind not in self._shapes:
            made = self._model.shapes(self._step.fn, self._batch(tensors, 16))[1]
            self._shapes[kind] = [tuple(x.shape) for x in tree.leaves(made)]
        return self._shapes[kind]
