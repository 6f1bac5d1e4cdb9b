"""Shards experts' parameters and the batch over one mesh axis: expert_parallel.

Acts on the program, in transforms/dim_sharding.py. Around matrix products with these parameters, ranks exchange
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fzero._utils.arguments import keywords
from fzero._utils.deprecation import keyword_aliases
from fzero._utils.units import parse_bytes
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import Shard
from fzero.transforms.dim_sharding import DimSharding, problems_of
from fzero.transforms.transform import applied
from fzero.tree import dotted


@dataclass(frozen=True)
class ExpertParallel(DimSharding):
    """The configuration of `expert_parallel`."""

    axis: str = "expert"
    where: Callable[[str, torch.Tensor], bool] = lambda path, leaf: False
    max_rows: float | None = None
    order: ClassVar[int] = 43
    name: ClassVar[str] = "expert_parallel"
    shards_batch: ClassVar[bool] = True
    way_out: ClassVar[str] = (
        "let `where` match only the parameters of matrix products: "
        "torch.bmm(rows, w), w [experts, ...]; let `ranks` of "
        "dispatch be a multiple of the axis"
    )

    @property
    def routed_rows(self) -> float | None:
        return self.max_rows

    def sharded_dim(self, leaf: Leaf) -> Shard | None:
        return Shard(0) if leaf.shape and self.where(leaf.path, leaf.meta) else None

    def check(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Raises if no parameter belongs to experts, or only one of two tied names does."""
        dims = [leaf.role != "mutable" and self.sharded_dim(leaf) is not None for leaf in leaves]
        if not any(dims):
            names = ", ".join(dotted(leaf.path) for leaf in leaves[:5])
            fix = f"let `where` match parameters [experts, ...] by their path; the parameters are {names}"
            raise FzeroValueError(self.name, "does nothing: `where` matches no parameter", fix=fix)
        torn = [
            f"{dotted(leaves[i].path)} and {dotted(leaves[t].path)}" for i, t in enumerate(tied) if dims[i] != dims[t]
        ]
        if torn:
            fix = "match both names, or none: they are one tensor"
            raise TransformError(self.name, "`where` matches one of two tied names", torn, fix)

    def __str__(self) -> str:
        where = getattr(self.where, "__name__", repr(self.where))
        return self.shown(f"where={where}", *([] if self.max_rows is None else [f"max_rows={self.max_rows}"]))


@keyword_aliases("fz.expert_parallel", whole_bytes="max_replicated_bytes")
@keywords
def expert_parallel(
    step: Any = None,
    *,
    where: Callable[[str, torch.Tensor], bool],
    axis: str = "expert",
    max_rows: float | None = None,
    max_replicated_bytes: int | str = "1MiB",
) -> Any:
    """Shards experts' parameters and the batch over `axis`; ranks exchange tokens around products with these
    parameters.

    Equal to the untransformed step, up to the order of summation, as long as no token is dropped for lack of capacity.
    Each rank has its own samples of the batch, and its share of the experts in each parameter [experts, ...] that
    `where` accepts. `fz.experts.dispatch` without a capacity sends each row to the rank that has its expert, and
    `fz.experts.combine` returns the results. With a capacity, a product `torch.bmm(rows, w)` of rows [experts, rows,
    features] sends each expert's rows. Pointwise operations between two products are computed there. A ZeRO stage may
    name the axis together with others: `fz.shard_params(axis=("expert", "data"))` shards experts over data, and
    everything else over both axes. `tensor_parallel` over another axis shards parameters, those of experts included,
    along further dims.

    Args:
        step: a training or evaluation step; without one a transform is returned.
        where: predicate `(path, leaf)` that selects the parameters of experts, whose first dim is the expert. `leaf` is
            a meta tensor.
        axis: the mesh axis. It shards the batch.
        max_rows: without a capacity, the number of rows that a rank has memory for, as a multiple of those that it
            receives if all experts are chosen equally often; at least 1. None: as many as it can receive at most,
            which are E times as many.
        max_replicated_bytes: an operation for which more bytes of experts than this would be gathered is an error.

    Communication: a block with two products has 2 all_to_alls of its rows in the forward and 2 in the backward; each
        sends (E-1)/E of them. Gradients of experts are not reduced over `axis`, because the rows of all ranks are
        processed by the rank that has the expert.
    Memory: 1/E of the experts' parameters, gradients and optimizer state. With a capacity, the number of rows is the
        same as without this transform: E times the rows, for 1/E of the experts. Without one, see `max_rows`.

    Raises:
        FzeroTypeError: `where` cannot be called; `axis` is not a name.
        FzeroValueError: when the program is built, the number of experts is not divisible by the axis; `where` accepts
            no parameter; an operation exceeds `max_replicated_bytes`; without a capacity, an operation between dispatch
            and combine needs the rows of one rank. When the step runs, on every rank along the axis: a rank would
            receive more than `max_rows`.
        TransformError: `tensor_parallel` or `sequence_parallel` over `axis`; `where` accepts one of two tied names.

    Paper: Lepikhin et al., GShard: scaling giant models with conditional computation and automatic sharding, 2020.

    Example:
        >>> import torch, fzero as fz
        >>> @fz.block
        ... def layer(p, x):
        ...     weights, chosen = (x @ p["router"]).softmax(-1).topk(2, -1)
        ...     rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=8, capacity=1.25)
        ...     return x + fz.experts.combine(torch.relu(rows @ p["up"]) @ p["down"], back)
        >>> def loss(params, x):
        ...     return layer(params, x).square().mean()
        >>> step = fz.expert_parallel(fz.eval_step(loss), where=lambda path, leaf: leaf.ndim == 3)
        >>> shapes = {"router": (32, 8), "up": (8, 32, 64), "down": (8, 64, 32)}
        >>> params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        >>> lowered = fz.lower(step, fz.AbstractMesh(expert=4), params, (torch.empty(256, 32, device="meta"),))
        >>> [op.op for op in lowered.program.instructions if op.by == "expert_parallel" and op.op.endswith("start")]
        ['all_to_all_start', 'all_to_all_start']
    """
    problems = problems_of(axis, max_replicated_bytes)
    if max_rows is not None and (isinstance(max_rows, bool) or not isinstance(max_rows, (int, float)) or max_rows < 1):
        problems.append(f"max_rows={max_rows!r}: at least 1, or None")
    problems += [] if callable(where) else [f"where={where!r}: a predicate (path, leaf) -> bool"]
    if problems:
        fix = "e.g. fz.expert_parallel(where=lambda path, leaf: 'experts' in path)"
        raise FzeroTypeError("expert_parallel", "invalid arguments", problems, fix)
    limit = parse_bytes(max_replicated_bytes)
    return applied(ExpertParallel(axis=axis, max_replicated_bytes=limit, where=where, max_rows=max_rows), step)
