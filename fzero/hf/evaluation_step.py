"""Evaluates a Trainer's model from its sharded state, batch by batch, as transformers' `prediction_step` does with a
module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fzero import compile, compose, eval_step, tree
from fzero.hf import padding, traced_loss
from fzero.hf.batch_signatures import Entries, Kind, Kinds, kind_of, tensors_of
from fzero.hf.data_parallel_ranks import Exchange
from fzero.hf.loss_guard import LossInputs
from fzero.modules.functionalize import Functional
from fzero.transforms.fp8 import Fp8
from fzero.transforms.precision import MixedPrecision

Named = tuple[str, torch.Tensor]
"""A name for messages, and a tensor."""


class Evaluation:
    """One kind of evaluation. It is valid as long as the values that the loss reads from the trainer do not change.

    Args:
        held: the trainer, with the values that its loss reads.
        constants: the values in its batches that are not tensors.
        transforms: the transforms of its step that also apply to an evaluation.
        compiling: arguments of `fz.compile`.

    Batches are padded to a few shapes, if padding does not change the results. If it does, batches keep their own
    shapes: the first shape is compiled, and all others run operation by operation.
    """

    def __init__(
        self,
        held: LossInputs,
        model: Functional,
        kind: traced_loss.Kind,
        constants: traced_loss.Constants,
        transforms: Any,
        mesh: Any,
        compiling: Any,
    ):
        self.held, self._kind, self._constants = held, kind, constants
        self._model = model
        self._kinds = Kinds(Exchange(held.trainer))
        self._paddings: dict[Kind, tuple[traced_loss.Losses, padding.Padding]] = {}
        fn = partial(traced_loss.outputs, held, constants, kind)
        self._fn = model.calling(fn, train=False)
        step = eval_step(model.marked(lambda params, batch, key: self._fn(params, batch, key=key), "eval"))
        self._usual = _compiled(step, transforms, mesh, **compiling)
        self._odd = _compiled(step, transforms, mesh, backend="eager")
        exact = [t for t in transforms or () if not isinstance(t, (MixedPrecision, Fp8))]
        in_float32 = lambda params, batch, key: self._compared_numbers(params, batch, key)  # noqa: E731
        compared = eval_step(model.marked(in_float32, "padding"))
        self._exact = _compiled(compared, exact, mesh, backend="eager")
        self._shapes: dict[Any, list[tuple[int, ...]]] = {}

    def __call__(self, params: Any, entries: Entries, items: Any, key: torch.Tensor) -> Any:
        """Returns the loss of a batch and its outputs, in the shapes that they have without padding.

        A forward pass that draws random numbers draws them from `key`.
        """
        device, own = self.held.trainer.args.device, kind_of(entries)
        found: dict[Kind, Any] = {}
        for kind in self._kinds.of_step([entries]):  # all ranks run the program of each kind that any rank has
            batch = self._kinds.stand_in(kind, [entries], device)
            found[kind] = self._evaluated(params, kind, batch, items, key)
        return found[own]

    def _evaluated(self, params: Any, kind: Kind, entries: Entries, items: Any, key: torch.Tensor) -> Any:
        """Evaluates a batch of one kind, padded to one of the known shapes if that changes nothing."""
        trainer, tensors = self.held.trainer, tensors_of(entries)
        if kind not in self._paddings:
            losses = traced_loss.Losses(ignores=self._model.mutable is None)
            if self._kind.losing:
                losses = traced_loss.probe(self.held, self._model, entries, self._constants, items is not None)
            made = padding.of(trainer, self._model, "evaluation", losses, trainer.args.eval_batch_size, strict=False)
            self._paddings[kind] = losses, made
        losses, pad = self._paddings[kind]
        (part,), shape = pad([tensors], partial(self.compared, params, kind, losses.reads, key))
        odd = any(map(pad.kept, shape)) and shape is not pad.shapes[0]
        nones = {n: None for n, x in entries.items() if x is None}
        batch = self._batch({**part, **nones}, items, losses.reads)
        found, out = (self._odd if odd else self._usual)(params, batch, key)
        own_shapes = partial(self._own_shapes, {**tensors, **nones}, losses.reads)
        return None if found is None else found[0], self._cut(out, part, tensors, own_shapes)

    def compared(
        self, params: Any, kind: Kind, reads: bool, key: torch.Tensor, one: padding.Tensors, two: padding.Tensors
    ) -> tuple[bool, str]:
        """Evaluates a batch and the same batch padded.

        Returns whether the results of the first are finite, and how those of the second differ ("" if they do not).

        Args:
            reads: whether the loss depends on the number of items in a step.
        """
        nones = {name: None for name, form in kind if form == "None"}
        own_shapes = partial(self._own_shapes, {**one, **nones}, reads)
        values, gradients = list[list[Named]](), list[list[Named]]()
        for part in (one, two):
            # Any number of items, but the same one for both batches.
            loss, out, grads = self._exact(params, self._batch({**part, **nones}, 16, reads), key)
            out = None if out is None else self._cut(out, part, one, own_shapes)
            values.append([] if loss is None else [("the loss", loss)])
            values[-1] += zip(map("outputs{}".format, tree.names(out)), tree.leaves(out), strict=True)
            gradients.append([(f"the gradient of {name}", x) for name, x in grads.items()])
        exact = torch.get_float32_matmul_precision() == "highest"
        finite, differs = zip(*(_difference(*of, exact=exact) for of in (values, gradients)), strict=True)
        return all(finite), next(filter(None, differs), "")

    def _compared_numbers(self, params: Any, batch: Any, key: torch.Tensor) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """Returns the loss of a batch, its outputs and, if only the loss is wanted, gradients by name.

        They are computed in float32, because rounding in bfloat16 would hide the effect of padding, and in
        evaluation mode, which draws no random numbers. A convolution that reads the padding may change the loss by less
        than the rounding error, but it changes gradients of its own block by much more. Only the gradients of vectors
        (biases, norms) are computed: they take almost no memory, and each block has some.
        """
        leaves, structure = tree.flatten(params)
        leaves = [_widened(x) for x in leaves]
        if not (self._kind.losing and self._kind.loss_only):
            return *self._fn(tree.unflatten(structure, leaves), batch, key=key), {}
        floats = [i for i, x in enumerate(leaves) if x.is_floating_point()]
        fewest = min((leaves[i].numel() for i in floats), default=0)  # for models without vectors
        vectors = [i for i in floats if leaves[i].dim() == 1] or [i for i in floats if leaves[i].numel() == fewest]
        for i in vectors:
            leaves[i] = leaves[i].detach().requires_grad_()
        with torch.enable_grad():
            loss, _ = self._fn(tree.unflatten(structure, leaves), batch, key=key)
            total = loss.sum()
        if not loss.requires_grad:
            return loss, None, {}
        wanted, names = [leaves[i] for i in vectors], tree.names(params)
        grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        return loss.detach(), None, dict(zip([names[i] for i in vectors], grads, strict=True))

    def _batch(self, entries: Entries, items: Any, reads: bool) -> dict[str, Any]:
        batch: dict[str, Any] = {"inputs": entries}
        if reads:
            first = next(iter(tensors_of(entries).values()))
            batch["num_items"] = torch.as_tensor(items, device=first.device).expand(len(first)).clone()
        return batch

    def _cut(self, out: Any, part: Any, tensors: Any, own_shapes: Any) -> Any:
        """Cuts the outputs of a padded batch to those of the batch itself."""
        if out is None or all(part[n].shape == x.shape for n, x in tensors.items()):
            return out
        sizes = iter(own_shapes())
        return tree.map(lambda x: x[tuple(slice(0, n) for n in next(sizes))], out)

    def _own_shapes(self, entries: Entries, reads: bool) -> list[tuple[int, ...]]:
        """Returns the shapes of the outputs for a batch that is not padded."""
        kind = kind_of(entries), tuple(tuple(x.shape) for _, x in sorted(tensors_of(entries).items()))
        if kind not in self._shapes:
            made = self._model.shapes(self._fn, self._batch(entries, 16, reads))[1]
            self._shapes[kind] = [tuple(x.shape) for x in tree.leaves(made)]
        return self._shapes[kind]


def _compiled(step: Any, transforms: Any, mesh: Any, **how: Any) -> Any:
    return compile(compose(*transforms)(step) if transforms else step, mesh, **how)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def _difference(one: Sequence[Named], two: Sequence[Named], *, exact: bool) -> tuple[bool, str]:
    """Returns whether tensors are finite, and how others of the same names differ from them ("" if by no more than
    rounding).

    A number may differ by 5e-6 of itself, and an element of a larger tensor by 5e-5 of the tensor's largest element.
    A tensor much smaller than the others may consist of rounding errors only, such as the gradient of the bias of
    attention's keys, which is 0. So 1e-4 of the largest element of all tensors is added to its largest element.

    Args:
        exact: whether products are computed in float32, and not in a narrower format.
    """
    largest = max((float(x.detach().abs().max()) for _, x in one if x.numel()), default=0.0)
    finite, differs = True, ""
    for (name, x), (_, y) in zip(one, two, strict=True):
        x, y = x.detach().double(), y.detach().double()
        if not x.numel():
            continue
        finite = finite and bool(x.isfinite().all())
        size, away = float(x.abs().max()), float((x - y).abs().max())
        size += 1e-4 * largest if x.numel() > 1 else 0.0
        limit = (5e-6 if x.numel() == 1 else 5e-5) if exact else 5e-2
        # Not `away > …`, which is False if the results are NaN.
        if not away <= limit * size and not differs:
            how = f"{x.item():g} unpadded, {y.item():g} padded" if x.numel() == 1 else f"differs by {away / size:.2g}"
            differs = f"{name}: {how}"
    return finite, differs
