"""The sharding rules of scaled dot-product attention: by samples, by heads, or by position.

Inputs that are sharded by position (dim 2) are either exchanged for a sharding by heads, or the keys and values are
gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.sharding.factors import Factors, along, custom, factors_of, labelled
from fzero.sharding.operations import Operation, Strategy, shape_of
from fzero.sharding.placements import REPLICATE, SUM, Placement, Shard, lined_up, nearest

aten = torch.ops.aten

POSITIONS = Shard(2)


_NAMES = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
          "fused_attention_overrideable")  # fmt: skip
ATTENTION = [getattr(aten, f"_scaled_dot_product_{name}{way}").default for name in _NAMES for way in ("", "_backward")]
ATTENTION_OPERANDS = {
    "grad_out": "bhqv",
    "grad_out_": "bhqv",
    "query": "bhqd",
    "key": "bhkd",
    "value": "bhkv",
    "out": "bhqv",
    "logsumexp": "bhq.",
    "attn_mask": "bhqk",
    "attn_bias": "bhqk",
}
"""The labels of the operands of attention: samples, heads, queries, keys, and the widths of keys and values."""


@labelled(*ATTENTION)
def attention_factors(op: Operation) -> Factors | None:
    """Attention is sharded by samples (b) or by heads (h). If there are fewer heads of keys than of queries, both are
    sharded alike; a single head of keys is replicated, and its gradient is partial."""
    if op["dropout_p"] or (op["grad_input_mask"] or [False])[-1] or op["bias_requires_grad"]:
        return None
    operands = [
        (x, tuple(of)[: len(shape_of(x))])
        for name, of in ATTENTION_OPERANDS.items()
        if isinstance(x := op[name], fx.Node)
    ]
    operands = [(x, tuple(of)[4 - len(shape_of(x)) :] if of == tuple("bhqk") else of) for x, of in operands]
    backward = op["grad_out"] is not None or op["grad_out_"] is not None
    out: list[str] = ["bhqd", "bhkd", "bhkv"] if backward else ["bhqv", "bhq."]
    given = [i < len(out) and isinstance(v, torch.Tensor) and v.dim() > 2 for i, v in enumerate(op.results)]
    results = [tuple(out[i])[: op.results[i].dim()] if k else None for i, k in enumerate(given)]
    main = [i for i, (x, _) in enumerate(operands) if x is not op["attn_mask"] and x is not op["attn_bias"]]
    return factors_of(op, operands, results, blocked="qkdv", seeds=main, local=None)


def gathers_keys(op: Operation) -> bool:
    """Whether attention on inputs that are sharded by position gathers the keys and values, instead of exchanging
    positions for heads.

    Raises:
        FzeroValueError: heads are requested, and the number of ranks does not divide them.
    """
    heads = shape_of(op["query"])[1]
    if op.attention == "heads" and heads % op.n:
        near = ", ".join(str(x) for x in nearest(heads, op.n))
        problems = [f"{op.target}: {heads} heads over {op.n} ranks"]
        fix = f"heads that divide ({near}), fewer ranks, or fz.sequence_parallel(attention='keys')"
        raise FzeroValueError("sequence_parallel", "cannot shard the heads of an attention", problems, fix)
    return op.attention == "keys" or heads % op.n != 0


def by_position(op: Operation) -> bool:
    """Whether an input of attention is sharded by position."""
    main = [op[name] for name in ATTENTION_OPERANDS if not name.startswith("attn") and isinstance(op[name], fx.Node)]
    return op.attention is not None and any(p == POSITIONS for _, p in op.sharded(*main))


@custom(*ATTENTION)
def _attention(op: Operation) -> Iterator[Strategy]:
    factors = attention_factors(op)
    if factors is None or not by_position(op):
        return
    if gathers_keys(op):
        yield from _by_queries(op)
    elif (s := along(op, factors, "h")) is not None:
        yield Strategy(s.want, s.out, s.write, back=POSITIONS)


def _by_queries(op: Operation) -> Iterator[Strategy]:
    """Each rank computes its own queries against all keys. Causal attention then needs a mask, which is computed from
    the rank's index."""
    query, keys = op["query"], (op["key"], op["value"])
    bias = op["attn_mask"] if op["attn_mask"] is not None else op["attn_bias"]
    backward = op["grad_out"] is not None or op["grad_out_"] is not None
    causal, length = op["is_causal"], shape_of(query)[2]
    rows = [x for name in ATTENTION_OPERANDS if not name.startswith("attn") and isinstance(x := op[name], fx.Node)]
    rows = [x for x in rows if x not in keys]
    if (causal and "for_cpu" not in str(op.target)) or any(shape_of(a)[2:3] != [length] for a in rows):
        return
    want: dict[fx.Node, Placement] = op.at(dict.fromkeys(rows, POSITIONS))
    if isinstance(bias, fx.Node):
        want[bias] = lined_up(shape_of(bias), POSITIONS, 4)
    of_rows = [isinstance(v, torch.Tensor) and v.dim() > 2 for v in op.results]
    out: list[Placement] = [POSITIONS if k else REPLICATE for k in of_rows]
    if backward:  # each rank has the contributions of its own queries to the gradients of keys and values
        out[1:3] = SUM, SUM
    part, like, count = length // op.n, query.meta["val"], shape_of(keys[0])[2]

    def mask(rank: torch.Tensor) -> torch.Tensor:
        row = torch.arange(part, device=like.device) + rank * part
        seen = torch.arange(count, device=like.device).view(1, 1, 1, -1) <= row.view(1, 1, part, 1)
        value = torch.full([], 0, dtype=like.dtype, device=like.device)
        return torch.where(seen, value, torch.full([], -math.inf, dtype=like.dtype, device=like.device))

    def write(w: Any, a: dict[str, Any]) -> Any:
        return w.named(op.target, a | {"attn_mask": w.trace(mask, w.index()), "is_causal": False})

    yield Strategy(want, tuple(out), write if causal else None)
