"""Defines what is decided between the steps of a run: formats on the wire (formats.py).

A `CompiledStep` has a list of such decisions, and tells each of them alike of every step.
"""

from __future__ import annotations

import abc

import torch

from fzero.passes.choice import Choice
from fzero.step import State


class BetweenSteps(abc.ABC):
    """A decision between steps, alike on every rank. Whatever it knows of a run it can read from the state."""

    @abc.abstractmethod
    def before(self, state: State, is_new: bool) -> bool:
        """Decides before a step, for which its program is chosen next.

        Args:
            state: that the step is taken with.
            is_new: whether no step of this process has begun with it.

        Returns: whether the program will be another.
        """

    @abc.abstractmethod
    def after(self, state: State) -> dict[str, torch.Tensor]:
        """Acts behind a step that was taken. Metrics of that."""

    def lowered(self, choice: Choice, state: State) -> None:  # noqa: B027
        """Notes the choice of the program that the next step runs."""


__all__ = ["BetweenSteps"]
