"""Shards the values that pass between blocks by position, over a mesh axis: sequence_parallel.

Acts on the program, in transforms/dim_sharding.py. Around attention, ranks exchange positions for heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fzero._utils.arguments import keywords
from fzero._utils.deprecation import keyword_aliases
from fzero._utils.units import parse_bytes
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.sharding.operations import Attention
from fzero.sharding.placements import Shard, nearest
from fzero.transforms.dim_sharding import DimSharding, problems_of
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import DataParallel

_WAYS = ("auto", "heads", "keys")


@dataclass(frozen=True)
class SequenceParallel(DimSharding):
    """The configuration of `sequence_parallel`."""

    axis: str = "seq"
    attention: Attention = "auto"
    order: ClassVar[int] = 46
    name: ClassVar[str] = "sequence_parallel"
    way_out: ClassVar[str] = (
        "use operations that keep positions separate (to shift labels, not logits: F.pad(y[:, 1:], (0, 1), value=-100))"
    )

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, DataParallel) and other.axis == self.axis:
            return f"along {self.axis!r} every rank has the same samples: let {other.name} name another axis"
        if isinstance(other, DimSharding) and other.stream is not None and not isinstance(other, SequenceParallel):
            return "two axes would shard positions: leave sequence=True out"
        return super().conflict(other)

    @property
    def stream(self) -> Shard | None:
        return Shard(1)

    def check_passing(self, shapes: Sequence[Sequence[int]], n: int) -> None:
        """Raises if no values with positions pass between blocks, or their number of positions is not divisible by the
        axis."""
        if not shapes:
            what = "does nothing: no values [batch, positions, ...] pass between blocks"
            fix = "mark the function of a layer with fz.block; of a module, its layers are blocks"
            raise FzeroValueError(self.name, what, fix=fix)
        # The largest value is taken for the residual stream. Smaller ones, such as a mask, may have another second dim.
        largest = max(shapes, key=math.prod)
        if (length := largest[1]) % n:
            near = " or ".join(str(x) for x in nearest(length, n))
            problems = [f"values {list(largest)} between blocks: dim 1 of {length} is not a multiple of {n}"]
            fix = f"a sequence of {near} positions, or another size of {self.axis!r}"
            raise FzeroValueError(self.name, f"cannot shard positions over {self.axis!r}", problems, fix)

    def __str__(self) -> str:
        return self.shown(*([] if self.attention == "auto" else [f"attention={self.attention!r}"]))


@keyword_aliases("fz.sequence_parallel", whole_bytes="max_replicated_bytes")
@keywords
def sequence_parallel(
    step: Any = None, *, axis: str = "seq", attention: Attention = "auto", max_replicated_bytes: int | str = "1MiB"
) -> Any:
    """Shards the values that pass between blocks by position over `axis`; around attention, ranks exchange positions
    for heads.

    Equal to the untransformed step, up to the order of summation. Every rank along `axis` gets the same complete
    samples; their tokens are sharded inside the step, along dim 1 of the values that blocks return. The trace sees the
    complete sequence, so that shifts, masks and positions are correct. Parameters are replicated over `axis`, unless a
    ZeRO stage names it together with its other axes: `fz.shard_params(axis=("data", "seq"))`. The axis does not shard
    the batch.

    Args:
        step: a training or evaluation step; without one a transform is returned.
        axis: the mesh axis.
        attention: how `scaled_dot_product_attention` gets all positions. "heads": ranks exchange positions for heads,
            and back; if keys have too few heads, they are sent to each rank that reads them. "keys": keys and values
            are gathered, queries stay sharded. "auto": "heads" if the number of heads of the queries is divisible by
            the axis, otherwise "keys". Attention that is written as matrix products gathers keys and values.
        max_replicated_bytes: the largest operation that every rank may compute on unsharded inputs, in bytes of these
            inputs. A larger one is an error.

    Communication: "heads": an attention exchanges 4 values of its size (queries, keys, values, results) in the forward
        and 4 in the backward: (S-1)/S of a rank's shard each, less for keys with fewer heads. "keys": it gathers 2 in
        the forward and 2 in the backward, and scatters 2 sums: (S-1)/S of the unsharded values each. Gradients are
        reduced over `axis` as over a batch axis.
    Memory: 1/S of activations. "heads" keeps the results of attention by position and by head; "keys" has the unsharded
        keys and values of a layer, and a mask of [T/S, T] if it is causal.

    Raises:
        FzeroTypeError: `axis` is not a name; an unknown `attention`.
        FzeroValueError: when the program is built, the number of positions, or that of heads with "heads", is not
            divisible by the axis; a step without blocks; an operation above `max_replicated_bytes`.
        TransformError: `data_parallel` over `axis`; `tensor_parallel(sequence=True)`.

    Paper: Jacobs et al., DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence
        transformer models, 2023. "keys": Grattafiori et al., The Llama 3 herd of models, 2024, section 3.3.2.

    Example:
        >>> import torch, fzero as fz
        >>> import torch.nn.functional as F
        >>> @fz.block
        ... def layer(p, x):
        ...     q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (x @ p["qkv"]).chunk(3, -1))
        ...     return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
        >>> def loss(params, x):
        ...     return layer(params, x).square().mean()
        >>> step = fz.sequence_parallel(fz.eval_step(loss))
        >>> params = {"qkv": torch.empty(32, 96, device="meta"), "out": torch.empty(32, 32, device="meta")}
        >>> lowered = fz.lower(step, fz.AbstractMesh(seq=4), params, (torch.empty(2, 64, 32, device="meta"),))
        >>> [(op.op, len(op.args)) for op in lowered.program.instructions if op.op.startswith("all_to_all")]
        [('all_to_all_start', 3), ('all_to_all_start', 1)]
    """
    problems = problems_of(axis, max_replicated_bytes)
    problems += [] if attention in _WAYS else [f"attention={attention!r}: one of {', '.join(map(repr, _WAYS))}"]
    if problems:
        raise FzeroTypeError("sequence_parallel", "invalid arguments", problems, "e.g. axis='seq'")
    return applied(
        SequenceParallel(axis=axis, attention=attention, max_replicated_bytes=parse_bytes(max_replicated_bytes)), step
    )
