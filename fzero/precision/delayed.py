"""Scales operands of 8-bit products by their largest magnitudes of the last steps (delayed scaling), which are a part
of the state.

A slot is what the products with one parameter read besides it: its input, or the gradient of its output. Slots are kept
for all parameters, for how many those are is known before the step is traced; what shares a slot, such as two calls of
a block with the same parameters, shares its scale.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.fx as fx

from fzero import compat
from fzero.operators.scaled_matmul import E4M3, E5M2, scale_of
from fzero.trace.record import record
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import inlined

FORMATS = (E4M3, E5M2)
"""Formats of a parameter's input, and of the gradient of its output."""


class Slot(NamedTuple):
    """The slot of an operand: of the products with the parameter at a position, the gradient or the input."""

    param: int
    is_gradient: bool

    def number(self, num_params: int) -> int:
        """Its place in a step of the history, flat."""
        return self.is_gradient * num_params + self.param


class Fp8State(NamedTuple):
    """The history of 8-bit operands in a state."""

    # float32[steps, 2, number of parameters]: largest magnitudes of inputs and gradients, the latest step first;
    # 0 is none
    history: torch.Tensor


def advanced(state: Fp8State, slots: Sequence[Slot], largest: torch.Tensor) -> Fp8State:
    """The state after a step.

    Args:
        state: before it.
        slots: m of them, of which some may be the same.
        largest: float32[m], their largest magnitudes in this step. One that is not finite is left out.
    """
    _, kinds, params = state.history.shape
    place = torch.tensor(range(kinds * params), device=largest.device)
    own = place[:, None] == torch.tensor([s.number(params) for s in slots], device=largest.device)
    latest = torch.where(torch.logical_and(own, torch.isfinite(largest)), largest, 0.0).amax(1)
    return Fp8State(torch.cat([latest.reshape(1, kinds, params), state.history[:-1]]))


@functools.lru_cache(maxsize=64)
def scales(shape: tuple[int, int, int], slots: tuple[tuple[Slot, ...], ...], device: torch.device) -> Recorded:
    """The function from a history of a shape to the scales of some slots: a float32 vector for each group of them. The
    scale of what has no history is 1."""
    mode = compat.FakeTensorMode()
    with mode:
        fake = compat.new_fake(mode, shape, torch.float32, device)

        def run(history: torch.Tensor) -> list[torch.Tensor]:
            largest = history.amax(0)
            both = torch.stack([scale_of(x, dtype) for x, dtype in zip(largest, FORMATS, strict=True)])
            known = torch.where(largest > 0, both, 1.0).reshape(-1)
            return [known[torch.tensor([s.number(shape[2]) for s in group], device=device)] for group in slots]

        return record(run, [fake], owner="fp8", names=["history"])


class Operands:
    """The operands multiplied with some parameters in one function, as its products are replaced (precision/fp8.py).

    Attributes:
        vector: the input with the scales, float32[2 n]: of each parameter those of its input and of the gradient of its
            output.
        weights: the n parameters.
        largest: once `close`d the largest magnitude of what each scale is for, float32[2 n], 0 where that is nothing;
            None if no product is replaced.
    """

    EACH: ClassVar[int] = len(FORMATS)

    def __init__(self, vector: fx.Node, weights: Collection[fx.Node]):
        self.vector, self.weights = vector, tuple(weights)
        self.largest: fx.Node | None = None
        self._number: dict[fx.Node, int] = {}
        self._largest: dict[int, list[fx.Node]] = defaultdict(list)

    def __contains__(self, operand: fx.Node) -> bool:
        return operand in self._number

    def number(self, operand: fx.Node, weight: fx.Node, dtype: torch.dtype) -> int:
        """The number of the scale that an operand is rounded by: that of the first parameter that it is multiplied
        with."""
        return self._number.setdefault(operand, self.EACH * self.weights.index(weight) + FORMATS.index(dtype))

    def found(self, largest: Mapping[int, fx.Node]) -> None:
        """Takes the largest magnitudes of operands, by number."""
        for number, node in largest.items():
            self._largest[number].append(node)

    def close(self, graph: fx.Graph) -> None:
        """Computes `largest` at the end of the function."""
        value, given = self.vector.meta["val"], [n for i in sorted(self._largest) for n in self._largest[i]]
        if not given:
            return

        def run(*xs: torch.Tensor) -> list[torch.Tensor]:
            left = iter(xs)
            of = [[next(left) for _ in self._largest.get(i, ())] for i in range(len(value))]
            return [
                torch.stack([functools.reduce(torch.maximum, found) if found else xs[0].new_zeros(()) for found in of])
            ]

        with value.fake_mode:
            fakes = [compat.new_fake(value.fake_mode, (), torch.float32, value.device) for _ in given]
            made = record(run, fakes, owner="fp8", names=[f"x_{i}" for i in range(len(fakes))])
        _, (self.largest,) = inlined(graph, graph.output_node(), made, given)
