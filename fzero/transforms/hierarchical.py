"""Limits what crosses a slow axis to once a step, however many micro-batches there are. Acts on the program, in
transforms/zero_pass.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fzero._utils.arguments import flag, keywords, number
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied


@dataclass(frozen=True)
class Hierarchical(Transform):
    axis: str = "node"
    gathers: float | str = "auto"
    reductions: bool = True
    order: ClassVar[int] = 61
    name: ClassVar[str] = "hierarchical"

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation gathers each parameter once, and reduces no gradient"

    def before(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of a leaf that cut before this one; all axes if none does, as on a mesh with one rank along each of
        them. Gathered over this axis, such a leaf would be whole."""
        return axes[: axes.index(self.axis)] if self.axis in axes[1:] else axes

    @property
    def least(self) -> float:
        """The share of blocks whose gathered parts stay at least."""
        return 0.0 if isinstance(self.gathers, str) else float(self.gathers)

    @property
    def most(self) -> float:
        """The share of blocks whose gathered parts stay at most."""
        return 1.0 if isinstance(self.gathers, str) else float(self.gathers)


@keywords
def hierarchical(
    step: Any = None, *, axis: str = "node", gathers: float | str = "auto", reductions: bool = True
) -> Any:
    """Lets what crosses a slow axis cross it once a step: parameters, gathered over it, stay until the step ends, and
    gradients are reduced over it last.

    For a step whose leaves are sharded over several axes, such as `shard_params(axis=("data", "node"))`. Equal to that
    step without it: to the bit where only gathers stay; with `reductions` up to the order in which the gradients of
    micro-batches are summed.

    Args:
        step: a step; without one a transform is returned.
        axis: the slow axis: one that leaves are sharded over, but not the one that cuts first. On a mesh with one rank
            along those that cut before it nothing changes.
        gathers: the share of blocks, counted from the last, whose parameters stay gathered over this axis, as shards
            over the axes that cut before it. Their other gathers, in each micro-batch, are over those axes alone.
            "auto": as many as a memory budget has room for, and all without a budget. 0: none.
        reductions: whether the gradients of micro-batches add up as shards over the axes that cut before this one, and
            are reduced over it after the last micro-batch. Otherwise once a micro-batch.

    Communication: over `axis` with M ranks, and L ranks along the axes that cut before it, (M-1)/M x (2P + 4P)/L bytes
        sent per rank and step with bf16 compute and fp32 reductions. The number of micro-batches does not matter;
        without `hierarchical` each costs 2 x 2P + 4P. Over the other axes as without it.
    Memory: 2P/L bytes per rank for what stays gathered (4P/L in fp32), during the step, and with `accumulate` 4P/L for
        the sums instead of 4P/(L M).

    Raises:
        FzeroTypeError: an `axis` that is not a name, `reductions` that is no flag.
        FzeroValueError: an invalid share. When the program is built: an axis missing from the mesh, without a sharded
            leaf, or cutting first.
        TransformError: a second, different `hierarchical`; an evaluation.

    Paper: Wang et al., ZeRO++: extremely efficient collective communication for giant model training, 2023 (the
        secondary partition of parameters).

    Example:
        >>> import fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> step = fz.compose(fz.shard_params(axis=("data", "node")), hierarchical(axis="node"), fz.accumulate(4))(step)
        >>> print(step.transforms[-1])
        hierarchical(axis='node', gathers='auto', reductions=True)
    """
    problems = [] if isinstance(axis, str) and axis else [f"axis={axis!r}: the name of one axis"]
    problems += flag("reductions", reductions)
    if problems:
        raise FzeroTypeError("hierarchical", "invalid arguments", problems, "e.g. fz.hierarchical(axis='node')")
    if gathers != "auto" and (isinstance(gathers, str) or number("gathers", gathers, at_least=0) or gathers > 1):
        fix = 'gathers="auto", or a share of the blocks between 0 and 1'
        raise FzeroValueError("hierarchical", f"gathers={gathers!r} is not a share of the blocks", fix=fix)
    if gathers == 0 and not reductions:
        raise FzeroValueError(
            "hierarchical", "gathers=0 and reductions=False leave nothing to do", fix="leave it out, or one of the two"
        )
    return applied(Hierarchical(axis, gathers, reductions), step)
