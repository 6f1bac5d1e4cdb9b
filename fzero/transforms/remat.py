"""Rematerialization: chooses what a block saves in its forward for its backward. Acts on the program.

In the base program, a block's vjp recomputes its forward from the block's inputs. To save more, the block's joint graph
is split in two (fzero/transforms/joint_split.py): the forward returns saved values in addition to its outputs, and the
vjp takes them. A view of a parameter is never saved, whatever the policy: it would keep the gathered parameter alive.
The last block is not split: its vjp directly follows its forward, and both are one subgraph
(fzero/compiler/fuse_last_block.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fzero._utils.arguments import keywords
from fzero.errors import FzeroValueError
from fzero.transforms.transform import Transform, applied

POLICIES = ("full", "min_cut", "none", "auto")


@dataclass(frozen=True)
class Remat(Transform):
    """The configuration of `remat`."""

    policy: str | float = "min_cut"
    order: ClassVar[int] = 40
    name: ClassVar[str] = "remat"


@keywords
def remat(step: Any = None, policy: str | float = "min_cut") -> Any:
    """Chooses what each block recomputes in its backward.

    The result equals that of the untransformed step, bit for bit on the eager backend: recomputation repeats the same
    operations.

    Args:
        step: a step, or the policy when called without one: `remat("full")`, `remat(0.5)`.
        policy: "full" saves only the inputs of a block and recomputes the rest; "none" saves everything the backward
            reads. "min_cut", also the default of a step without `remat`, saves the cut of the block's graph with the
            fewest bytes whose recomputation is cheap (no matrix product is repeated). A number from 0.0 to 1.0 is a
            share of the bytes (on one rank) that "none" saves in addition to a block's inputs: among the choices that
            save no more than that, the one that recomputes the fewest FLOPs is taken, for each distinct block. 1.0 is
            "none", 0.0 is "full". A larger number never recomputes more. "auto" chooses the share according to the
            memory budget of `fz.compile`, in steps of 1/16; without a budget it is "min_cut".

    Communication: none in addition. With `shard_params`, parameters are gathered again for the backward under any
        policy, except for the last block.
    Memory: "full" holds each block's inputs, and one block's intermediates while its backward runs; a fraction f
        additionally holds at most f times what "none" does. The last block saves nothing under any policy: its forward
        and backward are one subgraph.

    Raises:
        FzeroValueError: an unknown policy, or a number that is not a fraction.

    Papers: Chen et al., Training deep nets with sublinear memory cost, 2016. Kirisame et al., Dynamic tensor
        rematerialization, ICLR 2021, for choosing by cost and size. He and Yu, Transcending runtime-memory tradeoffs in
        checkpointing by being fusion aware, MLSys 2023, for the cut.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*remat("full")(step).transforms)
        remat(policy='full')
    """
    if isinstance(step, (str, int, float)):
        step, policy = None, step
    # True and False are numbers in Python, but no shares.
    if isinstance(policy, (int, float)) and not isinstance(policy, bool):
        if not 0.0 <= policy <= 1.0:
            raise FzeroValueError(
                "remat", f"keeps a share of activation memory, from 0.0 to 1.0, not {policy}", fix="e.g. remat(0.5)"
            )
        policy = float(policy)
    elif policy not in POLICIES:
        raise FzeroValueError(
            "remat",
            f"unknown policy {policy!r}",
            fix=f"one of {', '.join(map(repr, POLICIES))}, or a fraction: remat(0.5)",
        )
    return applied(Remat(policy), step)
