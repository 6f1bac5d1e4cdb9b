"""Limits communication over a slow mesh axis to once per step, however many micro-batches there are.

Acts on the program, in transforms/zero_pass.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fzero._utils.arguments import flag, keywords, number
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.step import EvalStep
from fzero.transforms.transform import Transform, applied


@dataclass(frozen=True)
class Hierarchical(Transform):
    """The configuration of `hierarchical`."""

    axis: str = "node"
    gathers: float | str = "auto"
    reductions: bool = True
    order: ClassVar[int] = 61
    name: ClassVar[str] = "hierarchical"

    def idle(self, step: EvalStep) -> str | None:
        return "an evaluation gathers each parameter once, and reduces no gradient"

    def before(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that shard a parameter before this axis does.

        Returns all axes if none does, for example on a mesh with one rank along each of them: gathered over this axis,
        such a parameter would be unsharded.
        """
        # As the first axis it would leave nothing before it to gather over. That is reported elsewhere, when the
        # program is built.
        return axes[: axes.index(self.axis)] if self.axis in axes[1:] else axes

    @property
    def least(self) -> float:
        """The smallest share of blocks whose gathered parameters are kept."""
        return 0.0 if isinstance(self.gathers, str) else float(self.gathers)

    @property
    def most(self) -> float:
        """The largest share of blocks whose gathered parameters are kept."""
        return 1.0 if isinstance(self.gathers, str) else float(self.gathers)


@keywords
def hierarchical(
    step: Any = None, *, axis: str = "node", gathers: float | str = "auto", reductions: bool = True
) -> Any:
    """Communicates over a slow mesh axis only once per step.

    Parameters are gathered over the slow axis once and kept until the step ends, and gradients are reduced over it
    last. Use it for a step whose parameters are sharded over several axes, such as `shard_params(axis=("data",
    "node"))`. The result equals that of the same step without it: bitwise if only gathers are affected; with
    `reductions`, up to the order in which the gradients of micro-batches are summed.

    Args:
        step: a step; without one a transform is returned.
        axis: the slow axis: one over which parameters are sharded, but not the first one that shards them. If the mesh
            has only one rank along the axes before it, nothing changes.
        gathers: the share of blocks, counted from the last, whose parameters stay gathered over this axis, as shards
            over the axes before it. Their other gathers, in each micro-batch, are over those axes only. "auto": as many
            as the memory budget allows, or all without a budget. 0: none.
        reductions: whether the gradients of micro-batches are accumulated as shards over the axes before this one, and
            reduced over it after the last micro-batch. Otherwise they are reduced over it once per micro-batch.

    Communication: for P parameters, over `axis` with M ranks, and L ranks along the axes before it, (M-1)/M x
        (2P + 4P)/L bytes sent per rank and step with bf16 compute and fp32 reductions. This does not depend on the
        number of micro-batches; without `hierarchical` each of them costs 2 x 2P + 4P. The communication over the other
        axes is unchanged.
    Memory: 2P/L bytes per rank for the parameters that stay gathered (4P/L in fp32), during the step, and with
        `accumulate` 4P/L for the accumulated gradients instead of 4P/(L M).

    Raises:
        FzeroTypeError: `axis` is not a name; `reductions` is not a bool.
        FzeroValueError: an invalid share. When the program is built: the axis is missing from the mesh, shards no
            parameter, or is the first axis that shards them.
        TransformError: a different `hierarchical` of the same step; an evaluation.

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
