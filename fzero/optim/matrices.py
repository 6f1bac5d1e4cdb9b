"""Gives an optimizer of matrices the leaves that are matrices, and another one the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero.arguments import function, python_numbers, shown
from fzero.errors import FzeroValueError
from fzero.optim.base import GradientTransformation, is_transformation
from fzero.optim.leaves import reject
from fzero.optim.masking import partition

Where = Callable[[str, torch.Tensor], int]
"""`where(path, leaf)`: the number of equal matrices that a leaf has along dim 0; True is 1, False is none."""


def is_matrix(path: str, leaf: torch.Tensor) -> int:
    """The number of matrices of a leaf where nobody says it: 1 of a leaf of two dims."""
    return leaf.dim() == 2


def num_matrices(owner: str, where: Where, path: str, leaf: torch.Tensor) -> int:
    """The number of matrices of a leaf, as `where` says.

    Raises:
        FzeroValueError: it says no whole number.
    """
    num = python_numbers(where(path, leaf))
    if not isinstance(num, int):
        fix = "return the number of equal matrices along dim 0: True of one matrix, 0 of a leaf for `other`"
        raise FzeroValueError(owner, "`where` returns no whole number", [f"{path}: {shown(num)}"], fix)
    return int(num)


def for_matrices(
    owner: str, made: GradientTransformation, where: Where, other: GradientTransformation | None, several: bool = False
) -> GradientTransformation:
    """`made` for the leaves that `where` accepts, as "matrices", and `other` for the rest, as "other".

    Args:
        owner: the public name, for errors.
        several: whether `made` takes leaves of several matrices.

    Raises:
        FzeroValueError: when it is called: an argument of another kind. In `init`: a leaf that is not as many matrices
            as `where` says, or that nothing updates; no whole number.
    """
    problems = function("where", where, "path", "leaf")
    problems += [] if other is None or is_transformation(other) else [f"other={shown(other)}: no optimizer"]
    reject(owner, problems)

    def label(path: str, leaf: torch.Tensor) -> str:
        num = num_matrices(owner, where, path, leaf)
        if not num and other is None:
            fix = "other=optim.adamw(3e-4), say, for biases, norms and embeddings"
            raise FzeroValueError(owner, "nothing updates a leaf", [f"{path} {list(leaf.shape)}"], fix)
        if num and not _are_matrices(leaf.shape, num, several):
            fix = "give the number of equal matrices along dim 0: True of one matrix, 0 of a leaf for `other`"
            raise FzeroValueError(owner, "a leaf is not so many matrices", [f"{path} {list(leaf.shape)}: {num}"], fix)
        return "matrices" if num else "other"

    return partition({"matrices": made, **({} if other is None else {"other": other})}, label)


def _are_matrices(shape: torch.Size, num: int, several: bool) -> bool:
    """Whether a leaf of this shape can be so many equal matrices along dim 0."""
    if len(shape) == 2:
        return num > 0 and shape[0] % num == 0 and (several or num == 1)
    return len(shape) == 3 and shape[0] == num and several
