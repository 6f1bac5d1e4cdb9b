"""Checks that the documents of packed rows do not influence each other (`check_isolation`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._utils.arguments import number, plain_numbers
from fzero.errors import EquivalenceError, FzeroTypeError, FzeroValueError, message
from fzero.mesh import AbstractMesh
from fzero.optim import sgd
from fzero.step import Step, train_step
from fzero.testing.simulate import simulator

_IGNORED = -100


@plain_numbers
def check_isolation(
    step: Step | Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: AbstractMesh | None = None,
    *,
    documents: torch.Tensor | None = None,
    tokens: str = "input_ids",
    labels: str = "labels",
    tolerance: float = 1e-5,
) -> float:
    """Proves that no document of a packed batch influences the loss or a gradient of another document.

    For each document the loss is restricted to its targets (all other labels are -100), and the tokens of all other
    documents are replaced by other tokens of the batch. Neither the loss nor any gradient may change. If one does,
    the other documents are replaced one by one, to find those that it depends on. Each step runs with its transforms
    on the mesh, as by `simulate`.

    Args:
        step: a training step with its transforms, or a loss function. The optimizer is not used.
        params: a pytree of unsharded tensors, or a function of a key that returns one. They are not written. Random
            initial parameters are best: in a trained model, attention may hide a small influence.
        batch: the global batch, a dict, of at least two documents. Targets of -100 must be left out of
            the loss, as in `cross_entropy`.
        mesh: an `AbstractMesh`; by default one device.
        documents: int64[rows, seq], the number of each token's document within its row; by default a document begins
            wherever `batch["position_ids"]` do not count up by 1.
        tokens, labels: names of the tokens and of their labels in the batch, both [rows, seq].
        tolerance: largest allowed change, relative to the loss of the document or to the largest element of all its
            gradients.

    Returns:
        The largest change that was found; 0.0 unless an operation rounds differently when other tokens change.

    Communication: none; the ranks of the mesh are threads.
    Memory and time: that of `simulate`, two steps for each document that has targets.

    Raises:
        EquivalenceError: naming the documents that depend on others, and by how much.
        FzeroTypeError, FzeroValueError: a batch without these entries, with fewer than two documents, or on whose
            tokens the loss does not depend; gradients that are all zero; a step that `simulate` cannot run.

    Example:
        >>> import torch, fzero as fz
        >>> packed = fz.data.pack([[1, 2, 3], [4, 1, 2]], seq=6)
        >>> batch = fz.data.ArrayDataset(packed, batch=1).batch_at(0)
        >>> def loss(params, batch):
        ...     logits = params["table"][batch["input_ids"]]  # each token predicts the next one, without attention
        ...     return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        >>> fz.testing.check_isolation(loss, {"table": torch.randn(5, 5)}, batch)
        0.0
    """
    step = step if isinstance(step, Step) else train_step(step, sgd(0.0))
    problems = number("tolerance", tolerance, at_least=0)
    if problems:
        raise FzeroValueError("check_isolation", "invalid arguments", problems, "e.g. tolerance=1e-5")
    number_of = _numbered(batch, documents, tokens, labels)
    # The first momentum of this optimizer is the gradient, before any clipping.
    step = Step(step.loss_fn, sgd(0.0, momentum=0.5), step.has_aux, step.trainable, step.mutable, step.transforms)
    run = _run(step, params, batch, AbstractMesh(data=1) if mesh is None else mesh)
    targets = batch[labels] != _IGNORED
    with_targets = [int(n) for n in number_of[targets].unique()]
    replaced = _others(batch[tokens])
    worst, problems = 0.0, list[str]()

    def change(of: int, replace: torch.Tensor, first: dict[str, torch.Tensor]) -> tuple[float, str]:
        one = {labels: batch[labels].where(number_of == of, _IGNORED), tokens: batch[tokens].where(~replace, replaced)}
        return _largest(first, run({**batch, **one}))

    depends = trains = False
    for document in with_targets:
        first = run({**batch, labels: batch[labels].where(number_of == document, _IGNORED)})
        if not any(bool(x.any()) for name, x in first.items() if name != "the loss"):
            continue  # no gradient: the only target is a first token, which the loss ignores
        trains = True
        if not depends:
            depends = change(document, number_of == document, first)[0] > 0
            if not depends:
                break
        largest, _ = change(document, number_of != document, first)
        worst = max(worst, largest)
        if largest > tolerance:
            for other in number_of.unique().tolist():
                found, where = change(document, number_of == other, first) if other != document else (0.0, "")
                if found > tolerance:
                    names = f"{_name(number_of, document)} depends on {_name(number_of, other)}"
                    problems.append(f"{names}: {where} changes by {found:.1e}")
    if not trains:
        what = "all gradients of every document are zero, so nothing would be proved"
        fix = "give random parameters, instead of zeros"
        raise FzeroValueError("check_isolation", what, fix=fix)
    if not depends:
        what = f"the loss of a document does not depend on its own batch[{tokens!r}], so nothing would be proved"
        raise FzeroValueError("check_isolation", what, fix="name the inputs of the model with tokens=")
    if problems:
        fix = (
            "attend only within a document, e.g. with position_ids and without an attention_mask for models of "
            "transformers, and ignore the first label of each document (docs/guides/packing.md)"
        )
        raise EquivalenceError(
            message("check_isolation", "documents of a packed row influence each other", problems, fix)
        )
    return worst


def _numbered(batch: Any, given: torch.Tensor | None, tokens: str, labels: str) -> torch.Tensor:
    """Returns the number of each token's document in the batch: int64[rows, seq]."""
    names = [tokens, labels] + ([] if given is not None else ["position_ids"])
    problems = [f"no {name!r} in the batch" for name in names if not isinstance(batch, dict) or name not in batch]
    fix = "give a batch of fz.data.pack, or documents=, tokens= and labels="
    if problems:
        raise FzeroTypeError("check_isolation", "the documents of the batch are not known", problems, fix)
    if no_values := [name for name in names if batch[name].is_meta]:
        fix = "give a batch with values: the check computes with it"
        raise FzeroTypeError("check_isolation", "the batch is on the meta device", no_values, fix)
    documents = given if given is not None else _from_positions(batch["position_ids"])
    shapes = {name: batch[name].shape for name in (tokens, labels)} | {"documents": documents.shape}
    if len(set(shapes.values())) > 1 or documents.dim() != 2:
        problems = [f"{name}: {list(shape)}" for name, shape in shapes.items()]
        raise FzeroValueError("check_isolation", "tokens, labels and documents are [rows, seq] alike", problems, fix)
    rows = torch.arange(len(documents))[:, None].expand_as(documents)
    distinct, found = torch.stack([rows, documents], 2).flatten(0, 1).unique(dim=0, return_inverse=True)
    found = found.view_as(documents)
    counts = [len(distinct), len(batch[tokens].unique()), len(found[batch[labels] != _IGNORED])]
    if counts[0] < 2 or counts[1] < 2 or not counts[2]:
        what = "the batch has {} documents, {} different tokens and {} targets".format(*counts)
        raise FzeroValueError("check_isolation", what, fix="give two documents, two different tokens and a target")
    return found


def _from_positions(positions: torch.Tensor) -> torch.Tensor:
    return (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)


def _others(tokens: torch.Tensor) -> torch.Tensor:
    """Returns another token that is in the batch, and so in the vocabulary, for each token."""
    values = tokens.unique()
    return values[(torch.searchsorted(values, tokens) + 1) % len(values)]


def _run(step: Step, params: Any, batch: Any, mesh: AbstractMesh) -> Callable[[Any], dict[str, torch.Tensor]]:
    """Returns a function that computes the loss and the gradients of a batch."""
    state, simulate = simulator(step, mesh, params, batch, None)

    def run(batch: Any) -> dict[str, torch.Tensor]:
        after, metrics = simulate(state, batch)
        momentum = tree.with_paths(after.opt_state[0].trace, "params")
        return {"the loss": metrics["loss"], **{f"the gradient of {path}": x for path, x in momentum}}

    return run


def _largest(first: dict[str, torch.Tensor], then: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Returns the largest relative change of the loss or of a gradient, and its name."""
    largest = max(float(x.abs().max()) for name, x in first.items() if name != "the loss")
    changes = {
        name: float((then[name] - x).abs().max()) / ((float(x.abs()) if name == "the loss" else largest) or 1.0)
        for name, x in first.items()
    }
    where = max(changes, key=lambda name: changes[name])
    return changes[where], where


def _name(number_of: torch.Tensor, document: int) -> str:
    row, first = (number_of == document).nonzero()[0].tolist()
    last = int((number_of[row] == document).nonzero()[-1])
    return f"row {row} tokens {first} to {last}"
