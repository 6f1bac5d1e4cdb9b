"""Evaluates a Trainer's model from its sharded state, batch by batch, as the library's `prediction_step` does with a
module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fzero import tree
from fzero.errors import BusyError, DivergenceError
from fzero.hf import padding, proof, traced
from fzero.hf.watched import Watched
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
        held: Watched,
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
        self._prover: Any = None
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
        if trainer._padding is not None:  # what training has found, by more than the loss
            self._padding.refuted.update(trainer._padding.refuted)
        (part,), shape = self._padding([tensors], partial(self._prove, params))
        odd = self._padding.refuted and shape is not self._padding.shapes[0]
        found, out = self._run(self._odd if odd else self._usual, params, part, items)
        return found, self._cut(out, part, tensors)

    def _run(self, run: Any, params: Any, part: Any, items: Any) -> Any:
        found, out = run(params, self._batch(part, items))
        return None if found is None else found[0], out

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

    def _prove(self, params: Any, rows: Any, padded: Any) -> str | None:
        """The difference between loss and outputs of rows as they are and padded; as of `proof.Training`."""
        if self._prover is None:
            self._prover = proof.runner(self._step, params, self._model, self._transforms, self._mesh)
        run, tolerance = self._prover
        try:
            (loss, out), (other, more) = (self._run(run, params, part, 16) for part in (rows, padded))
            more = self._cut(more, padded, rows)
        except (DivergenceError, BusyError):
            raise
        except Exception as error:  # whatever it is, padding is not proven
            return proof.first_line(error)
        if loss is not None and not loss.isfinite():
            return ""
        if loss is not None and not abs(other - loss) <= tolerance * abs(loss):
            return f"a loss of {other:.6g}, and of {loss:.6g} as they are"
        return None if out is None else proof.outputs_apart(out, more, tolerance)
