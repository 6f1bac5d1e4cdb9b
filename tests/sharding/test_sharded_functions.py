"""Functions on the parts of n ranks, run in lock step, equal the whole function: single operations, PyTorch's database
of operators, transformer blocks, random compositions."""

from __future__ import annotations

import itertools
import operator
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from lockstep import choices, collectives, cuts_of, halves, recorded, run, run_cut, run_halves, with_gradients
from torch_db import databases, operator_cases

import fzero as fz
from fzero._compat.compat import FakeTensorMode
from fzero.ops.scaled_matmul import E4M3, quantized, scaled_mm
from fzero.sharding.graph_writer import all_reduce
from fzero.sharding.placements import REPLICATE, Placement, Shard
from fzero.sharding.propagation import propagate
from fzero.sharding.sharded_graph import OutputPlacement, ShardedGraph
from fzero.trace.recorder import Recorded

Case = tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def in_8_bits(a: torch.Tensor, b: torch.Tensor, *dims: int) -> torch.Tensor:
    """A product in 8 bits, without gradients. `dims`: of scales by row and column."""
    over = dims or (None, None)
    (a, scale_a), (b, scale_b) = (quantized(x.detach(), E4M3, d) for x, d in zip((a, b), over, strict=True))
    return scaled_mm(a, b, scale_a, scale_b, torch.float32)


TARGETS = torch.tensor([1, 2, 3, -100, 5, 11, 0, 7])

CASES: dict[str, Case] = {
    "sum of a dim": (lambda x: x.sum(1), lambda: [r(4, 6, 8)]),
    "pad to an even size": (lambda x: F.pad(x, (1, 1)), lambda: [r(4, 6)]),
    "mm": (lambda a, b: a @ b, lambda: [r(12, 8), r(8, 12)]),
    "mv": (lambda a, b: a @ b, lambda: [r(12, 8), r(8)]),
    "bmm": (lambda a, b: a @ b, lambda: [r(4, 12, 8), r(4, 8, 12)]),
    "linear": (F.linear, lambda: [r(2, 4, 8), r(12, 8), r(12)]),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=0.5), lambda: [r(12), r(4, 8), r(8, 12)]),
    "einsum": (lambda x, y: torch.einsum("bthd,bshd->bhts", x, y), lambda: [r(2, 4, 4, 6), r(2, 4, 4, 6)]),
    "scaled_mm": (lambda a, b: (a @ b, in_8_bits(a, b)), lambda: [r(64, 64), r(64, 64)]),
    "scaled_mm by row": (lambda a, b: (a @ b, in_8_bits(a, b, 1, 0)), lambda: [r(64, 64), r(64, 64)]),
    "gelu": (lambda a, b: F.gelu(a) * b, lambda: [r(4, 12), r(12)]),
    "where": (lambda x: torch.where(x > 0, x, 0.0).masked_fill(x < -1, 3.0), lambda: [r(4, 12)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (12,), w, b), lambda: [r(2, 4, 12), r(12), r(12)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (12,), w), lambda: [r(2, 4, 12), r(12)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda: [r(4, 8, 4), r(8), r(8)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), lambda: [r(4, 12)]),
    "softmax": (lambda x: x.softmax(-1), lambda: [r(4, 12)]),
    "log_softmax": (lambda x: x.log_softmax(0), lambda: [r(4, 12)]),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda: [r(4, 12)]),
    "argmax": (lambda x: x.argmax(-1), lambda: [i(3, 8, 12).float()]),
    "max": (lambda x: x.max(1), lambda: [r(4, 12)]),
    "cross_entropy": (F.cross_entropy, lambda: [r(8, 12), TARGETS]),
    "cross_entropy, none": (lambda x, t: F.cross_entropy(x, t, reduction="none"), lambda: [r(8, 12), TARGETS]),
    "cross_entropy, sum": (
        lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=3),
        lambda: [r(8, 12), i(12, 8)],
    ),
    "cross_entropy, smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), lambda: [r(8, 12), TARGETS]),
    "mse_loss": (F.mse_loss, lambda: [r(4, 12), r(4, 12)]),
    "embedding": (lambda w, i: F.embedding(i, w), lambda: [r(12, 8), i(12, 4, 6)]),
    "embedding, padding": (lambda w, i: F.embedding(i, w, padding_idx=3), lambda: [r(12, 8), i(12, 4, 6)]),
    "index": (lambda w, i: w[i], lambda: [r(12, 8), i(24, 4, 6) - 12]),
    "index, second dim": (lambda w, i: w[:, i], lambda: [r(12, 8, 4), i(16, 4) - 8]),
    "index, two": (lambda w, i, j: w[i, :, j], lambda: [r(4, 8, 4), i(4, 6, 1), i(4, 4)]),
    "index_select": (lambda w, i: w.index_select(1, i), lambda: [r(12, 8), i(8, 4)]),
    "gather": (lambda w, i: w.gather(1, i), lambda: [r(12, 8), i(8, 12, 4)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: [r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)],
    ),
    "attention, mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda: [r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8), torch.ones(2, 1, 6, 6).tril() > 0],
    ),
    "attention, fewer keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda: [r(2, 8, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)],
    ),
    "attention, trained mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda: [r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8), r(4, 6, 6)],
    ),
    "chunk": (lambda x: torch.cat([a * (k + 1) for k, a in enumerate(x.chunk(3, -1))]), lambda: [r(4, 12)]),
    "unflatten": (lambda x: x.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1).sum(0), lambda: [r(4, 24)]),
    "slice": (lambda x: x[:, 4:8] * x[:, -4:], lambda: [r(4, 12)]),
    "select": (lambda x: x[:, 1] * 2, lambda: [r(4, 12)]),
    "stack": (lambda x, y: torch.stack([x, y], 1).sum(2), lambda: [r(4, 12), r(4, 12)]),
    "cat": (lambda x, y: torch.cat([x, y], 1).tanh(), lambda: [r(4, 12), r(4, 12)]),
    "squeeze": (lambda x: x[:, None].squeeze().squeeze(1) * 2, lambda: [r(4, 12)]),
    "expand": (lambda x: x[:, None].expand(4, 3, 12) * 2, lambda: [r(4, 12)]),
    "reductions": (
        lambda x: (x.mean(), x.mean(-1), x.sum(0), x.amax(1), x.var(1), x.std(), x.norm(), x.prod(1), (x > 1).any()),
        lambda: [r(4, 12)],
    ),
    "cumsum": (lambda x: x.cumsum(1), lambda: [r(4, 12)]),
    "tril": (lambda x: x.tril(), lambda: [r(4, 4, 4)]),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda: [r(4, 4, 4)]),
    "roll": (lambda x: x.roll(1, 0).flip(1), lambda: [r(4, 4)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), lambda: [r(4, 8, 5, 5), r(12, 8, 3, 3), r(12)]),
    "conv_transpose1d": (F.conv_transpose1d, lambda: [r(4, 8, 5), r(8, 4, 3), r(4)]),
    "conv1d by channel": (lambda x, w, b: F.conv1d(x, w, b, groups=8), lambda: [r(4, 8, 6), r(16, 1, 3), r(16)]),
    "repeat": (lambda x: x.repeat(2, 1, 3), lambda: [r(4, 4)]),
    "index_add": (lambda i, y: torch.zeros(4, 4).index_add(0, i, y * 2), lambda: [i(4, 8), r(8, 4)]),
    "attention, one key": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda: [r(2, 8, 6, 8), r(2, 1, 6, 8), r(2, 1, 6, 8)],
    ),
    "pools": (lambda x: F.max_pool2d(F.avg_pool2d(x, 2), 2), lambda: [r(4, 4, 8, 8)]),
    "swiglu": (lambda x, a, b, c: (F.silu(x @ a) * (x @ b)) @ c, lambda: [r(4, 12), r(12, 8), r(12, 8), r(8, 12)]),
    "as_strided": (lambda x: x.tanh().as_strided((3, 4), (1, 12)) * 2, lambda: [r(4, 12)]),
}


def equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], said: str) -> None:
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (said, k)
        if b.is_floating_point() or b.is_complex():
            finite = b[b.isfinite()]
            scale = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
            assert torch.allclose(a, b, rtol=1e-5, atol=5e-6 * scale, equal_nan=True), (
                said,
                k,
                float((a - b).abs().max()),
            )
        else:
            assert torch.equal(a, b), (said, k)


@pytest.mark.full(keep=["repeat", "cumsum", "roll"])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_and_its_gradients(name: str) -> None:
    fn, make = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    graph, tangents = with_gradients(fn, inputs)
    everything = [*inputs, *tangents]
    expected = run(graph, [everything])[0]
    for n, most in ((2, 9), (4, 4)):
        for k, places in enumerate(choices(inputs, n, most)):
            places = (*places, *[REPLICATE] * len(tangents))
            wanted = [[OutputPlacement.FREE, OutputPlacement.SUMMAND, REPLICATE][k % 3]] * len(expected)
            cut = propagate(graph, n, places, wanted)
            equal(run_cut(cut, everything, places, n), expected, f"{name} by {n}: {places}")


# --- blocks ---

WIDTH = 32


def gpt(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    norm1, qkv, out, norm2, up, down = params
    heads = (F.layer_norm(x, (WIDTH,), norm1) @ qkv).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ out
    return x + F.gelu(F.layer_norm(x, (WIDTH,), norm2) @ up, approximate="tanh") @ down


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def llama(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    norm1, wq, wk, wv, wo, norm2, gate, up, down = params
    h = F.rms_norm(x, (WIDTH,), norm1)
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (wq, wk, wv))
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), wo)
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm2
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def w(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / WIDTH**0.5


COLUMN, ROW = Shard(1), Shard(0)
BLOCKS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]], list[Placement]]] = {
    "gpt": (
        gpt,
        lambda: [r(2, 8, 32), r(32), w(32, 96), w(32, 32), r(32), w(32, 128), w(128, 32)],
        [REPLICATE, REPLICATE, Shard(1, 3), ROW, REPLICATE, COLUMN, ROW],
    ),
    "llama": (
        llama,
        lambda: [
            *(r(2, 8, 32), r(8, 4), r(8, 4), r(32), w(32, 32), w(16, 32), w(16, 32), w(32, 32)),
            *(r(32), w(64, 32), w(64, 32), w(32, 64)),
        ],
        [*[REPLICATE] * 4, ROW, ROW, ROW, COLUMN, REPLICATE, ROW, ROW, COLUMN],
    ),
}


@pytest.mark.parametrize("keep", ["none", "min_cut", "full"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_reduces_twice_each_way(name: str, keep: str) -> None:
    fn, make, places = BLOCKS[name]
    torch.manual_seed(0)
    inputs = make()
    graph, _ = with_gradients(fn, inputs)
    both, tangents = halves(fn, inputs, keep)
    expected = run(graph, [[*inputs, *tangents]])[0]
    for n in (2, 4):
        forward, backward, results, grads = run_halves(both, inputs, tangents, places, n)
        equal([*results, *grads], expected, f"{name} by {n}")
        assert collectives(forward) == ["all_reduce"] * 2
        # one product more is computed again, with its reduction, where it is not kept
        assert collectives(backward) == ["all_reduce"] * (2 if keep == "none" else 3)
        assert not forward.whole and not backward.whole


@pytest.mark.parametrize("name", BLOCKS)
def test_a_stream_that_is_cut_by_position(name: str) -> None:
    """Megatron's sequence parallelism: what is normed is gathered, what is summed is scattered. The backward gathers
    once more for the gradients of each weight that reads a norm."""
    fn, make, places = BLOCKS[name]
    torch.manual_seed(0)
    inputs = make()
    graph, _ = with_gradients(fn, inputs)
    both, tangents = halves(fn, inputs, "none")
    expected = run(graph, [[*inputs, *tangents]])[0]
    stream = Shard(1)
    for n in (2, 4):
        forward, backward, results, grads = run_halves(both, inputs, tangents, [stream, *places[1:]], n, stream)
        equal([*results, *grads], expected, f"{name} by {n}")
        assert collectives(forward) == ["all_gather", "reduce_scatter"] * 2
        assert sorted(collectives(backward)) == ["all_gather"] * 4 + ["reduce_scatter"] * 2
        assert not forward.whole and not backward.whole


def text(cut: ShardedGraph) -> str:
    return f"{cut.graph.graph}\n{cut.places}\n{cut.whole}\n{[x in cut.varies for x in cut.graph.graph.nodes]}"


def test_the_same_graph_each_time() -> None:
    fn, make, places = BLOCKS["llama"]
    inputs = make()

    def once() -> str:
        graph, tangents = with_gradients(fn, inputs)
        wanted = [OutputPlacement.FREE] * len(graph.outputs)
        return text(propagate(graph, 2, [*places, *[REPLICATE] * len(tangents)], wanted))

    assert once() == once()


# --- a cut vocabulary ---


@pytest.mark.parametrize(
    "lookup", [lambda table, tokens: F.embedding(tokens, table), lambda table, tokens: table[tokens]]
)
def test_an_embedding_with_a_cut_vocabulary(lookup: Callable[..., Any]) -> None:
    """One sum forward; the gradient is a rank's own rows, of the whole gradient."""
    inputs = [r(24, 16), i(24, 2, 8)]
    graph, tangents = with_gradients(lookup, inputs)
    everything, places = [*inputs, *tangents], [ROW, REPLICATE, REPLICATE]
    cut = propagate(graph, 4, places, [REPLICATE, ROW], leaves=frozenset({0}))
    equal(run_cut(cut, everything, places, 4), run(graph, [everything])[0], "embedding")
    assert collectives(cut) == ["all_reduce"] and not cut.whole
    shapes = {tuple(x.meta["val"].shape) for x in cut.graph.graph.nodes if x.op == "call_function"}
    assert (24, 16) not in shapes  # nothing is as large as the table


def test_a_head_with_a_cut_vocabulary() -> None:
    """Logits are never whole."""

    def head(x: torch.Tensor, norm: torch.Tensor, vocab: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        logits = (F.layer_norm(x, (16,), norm) @ vocab).flatten(0, 1)
        targets = targets.flatten()
        loss = F.cross_entropy(logits, targets, label_smoothing=0.1) + logits.logsumexp(-1).square().mean()
        return [loss, F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()]

    inputs = [r(2, 8, 16), r(16), r(16, 24), i(24, 2, 8)]
    graph, tangents = with_gradients(head, inputs)
    everything = [*inputs, *tangents]
    places = [REPLICATE, REPLICATE, COLUMN, *[REPLICATE] * (len(everything) - 3)]
    wanted = [*[OutputPlacement.SUMMAND] * 3, REPLICATE, OutputPlacement.SUMMAND, COLUMN]
    cut = propagate(graph, 4, places, wanted, leaves=frozenset({1, 2}))
    equal(run_cut(cut, everything, places, 4), run(graph, [everything])[0], "head")
    assert {*collectives(cut)} == {"all_reduce"} and not cut.whole
    assert max(x.meta["val"].numel() for x in cut.graph.graph.nodes if x.target is all_reduce) == 2 * 8 * 16


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Shard(2), Shard(1, 2)])
def test_draws_are_those_of_the_whole(place: Shard) -> None:
    inputs = [r(4, 8, 6), fz.random.key(3)]
    graph, tangents = with_gradients(lambda x, key: fz.random.dropout(key, x, 0.3), inputs)
    places: list[Placement] = [place, REPLICATE, REPLICATE]
    cut = propagate(graph, 2, places, [OutputPlacement.FREE] * 2)
    expected = run(graph, [[*inputs, *tangents]])[0]
    for a, b in zip(run_cut(cut, [*inputs, *tangents], places, 2), expected, strict=True):
        assert torch.equal(a, b)
    assert not collectives(cut)


# --- random compositions ---


def composed(seed: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function of three matrices, of a dozen steps."""
    rng = random.Random(seed)
    steps = [(rng.randrange(12), rng.random(), rng.random()) for _ in range(rng.randint(4, 10))]

    def fn(*xs: torch.Tensor) -> list[torch.Tensor]:
        values = list(xs)
        for kind, first, second in steps:
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            out = [
                lambda a, b: a @ b / 8,
                lambda a, b: a + b,
                lambda a, b: a * b.sum(0),
                lambda a, b: a.t() - b,
                lambda a, b: torch.cat([a[:4], b[4:]]),
                lambda a, b: a.view(2, 4, 8).transpose(1, 2).reshape(8, 8).tanh(),
                lambda a, b: a.softmax(-1) * b.mean(1, keepdim=True),
                lambda a, b: torch.cat(a.chunk(2, -1)[::-1], -1) + b.amax(),
                lambda a, b: torch.stack([a, b], 1).view(8, 16)[:, :8].contiguous(),
                lambda a, b: a.unflatten(1, (4, 2)).sum(2).repeat_interleave(2, 1) * 0.5 - b,
                lambda a, b: (a - a.mean(-1, keepdim=True)) * torch.rsqrt(a.var(-1, keepdim=True) + 1) + b[0],
                lambda a, b: -a.t().contiguous().view(4, 16).repeat(2, 1)[:, ::2] * b,
            ][kind](a, b)
            values.append(out)
        return [values[-1], values[-2].sum(0)]

    torch.manual_seed(seed)
    return fn, [r(8, 8), r(8, 8), r(8, 8)]


def test_random_compositions() -> None:
    for seed in range(14):
        rng = random.Random(seed)
        fn, inputs = composed(seed)
        graph, tangents = with_gradients(fn, inputs)
        everything = [*inputs, *tangents]
        expected = run(graph, [everything])[0]
        for n in (2, 4)[seed % 2 :][:1]:
            places = [rng.choice([REPLICATE, *cuts_of(x.shape, n)]) for x in everything]
            wanted = [
                rng.choice([OutputPlacement.FREE, OutputPlacement.SUMMAND, REPLICATE, *cuts_of(y.shape, n)])
                for y in expected
            ]
            leaves = frozenset(k for k in range(3) if rng.random() < 0.3)
            cut = propagate(graph, n, places, wanted, leaves=leaves)
            equal(run_cut(cut, everything, places, n), expected, f"{seed} by {n}: {places}")
            assert all(p == w for p, w in zip(cut.places, wanted, strict=True) if not isinstance(w, OutputPlacement))


# --- PyTorch's operators ---


def operator_case(case: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A sample of PyTorch's database, as a function of all its tensors."""
    leaves, structure = torch.utils._pytree.tree_flatten((case.params, case.batch))
    at = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def fn(*xs: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(at, xs, strict=True))
        params, batch = torch.utils._pytree.tree_unflatten([given.get(k, x) for k, x in enumerate(leaves)], structure)
        outputs, _ = case.fn(params, batch)
        return [y for y in torch.utils._pytree.tree_leaves(outputs) if isinstance(y, torch.Tensor)]

    return fn, [leaves[k].detach().clone() for k in at]


@pytest.mark.full
def test_pytorchs_operators() -> None:
    """Of a sample of the database each is right, cut or made whole."""
    names = random.Random(0).sample(sorted(databases().operators), 70)
    outcomes: Counter[str] = Counter()
    for name in names:
        rng = random.Random(name)
        found = map(operator_case, itertools.islice(operator_cases(name), 4))
        sizes = ((fn, xs, [n for n in (2, 3, 5) if any(cuts_of(x.shape, n) for x in xs)]) for fn, xs in found)
        fn, inputs, of = next((x for x in sizes if x[2]), (None, [], []))
        if fn is None:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                graph, tangents = with_gradients(fn, inputs)
                everything = [*inputs, *tangents]
                expected = run(graph, [everything])[0]
        except Exception:  # what fzero refuses, or PyTorch does not differentiate
            outcomes["refused"] += 1
            continue
        n = rng.choice(of)
        places = [rng.choice([*cuts_of(x.shape, n), REPLICATE][: 1 + (k > 0)]) for k, x in enumerate(everything)]
        cut = propagate(
            graph, n, places, [rng.choice([OutputPlacement.FREE, OutputPlacement.SUMMAND, REPLICATE]) for _ in expected]
        )
        with warnings.catch_warnings(action="ignore"):
            equal(run_cut(cut, everything, places, n), expected, f"{name} by {n}: {places}")
        outcomes["whole" if cut.whole else "cut" if any(p != REPLICATE for p in places) else "uncut"] += 1
    assert outcomes["cut"] > 20 and outcomes["whole"] < 2 * outcomes["cut"], outcomes


FAKE_ATTENTION: dict[str, Callable[..., Any]] = {
    "flash": lambda op, q, k, v, g: (
        y := op("_scaled_dot_product_flash_attention", q, k, v, 0.0, True),
        op(
            "_scaled_dot_product_flash_attention_backward",
            g,
            q,
            k,
            v,
            y[0],
            y[1],
            None,
            None,
            16,
            16,
            0.0,
            True,
            *y[6:8],
        ),
    ),
    "efficient": lambda op, q, k, v, g, bias: (
        y := op("_scaled_dot_product_efficient_attention", q, k, v, bias, True, 0.0, True),
        op(
            "_scaled_dot_product_efficient_attention_backward",
            *(g, q, k, v, bias, *y[:4], 0.0, [True, True, True, False], True),
        ),
    ),
    "cudnn": lambda op, q, k, v, g: (
        y := op("_scaled_dot_product_cudnn_attention", q, k, v, None, True, 0.0, True),
        op(
            "_scaled_dot_product_cudnn_attention_backward",
            *(g, q, k, v, *y[:2], *y[6:8], None, None, None, 16, 16, 0.0, True),
        ),
    ),
}


@pytest.mark.parametrize("name", FAKE_ATTENTION)
def test_attention_of_accelerators(name: str) -> None:
    """These have no kernel here: shapes and places alone."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def value(node: fx.Node, made: Any) -> fx.Node:
        node.meta["val"] = made
        return node

    def op(name: str, *args: Any) -> list[fx.Node]:
        target = getattr(torch.ops.aten, name).default
        node = graph.call_function(target, args)
        with mode:
            made = target(*fx.map_arg(args, lambda x: x.meta["val"]))
        value(node, made)
        return [value(graph.call_function(operator.getitem, (node, k)), y) for k, y in enumerate(made)]

    with mode:
        inputs = [torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        inputs += [torch.empty(2, 1, 16, 16, dtype=torch.bfloat16, device="cuda")] * (name == "efficient")
    y, grads = FAKE_ATTENTION[name](op, *(value(graph.placeholder(f"x_{k}"), x) for k, x in enumerate(inputs)))
    state = y[6] if name != "efficient" else y[2]
    graph.output((y[0], y[1], state, *grads[:3]))
    for place in (Shard(1), Shard(0)):
        places = [place] * 4 + [REPLICATE] * (len(inputs) - 4)
        cut = propagate(Recorded(graph), 2, places, [OutputPlacement.FREE] * 6)
        assert cut.places == (place, place, REPLICATE, place, place, place)
        assert not cut.whole and not collectives(cut) and cut.graph.outputs[2] not in cut.varies


def test_wrong_rules_are_listed() -> None:
    """A packed matrix without its groups, a matrix by columns for rows, a norm that is cut: right, and named."""
    fn, make, places = BLOCKS["gpt"]
    torch.manual_seed(0)
    inputs = make()
    graph, _ = with_gradients(fn, inputs)
    both, tangents = halves(fn, inputs, "none")
    expected = run(graph, [[*inputs, *tangents]])[0]
    for at, wrong, op in ((2, COLUMN, "view"), (3, COLUMN, "native_layer_norm"), (1, ROW, "native_layer_norm")):
        wrongly = [wrong if k == at else p for k, p in enumerate(places)]
        forward, _, results, grads = run_halves(both, inputs, tangents, wrongly, 2)
        equal([*results, *grads], expected, f"{at} at {wrong}")
        assert [m.op for m in forward.whole] == [f"aten.{op}.default"] and at in forward.whole[0].inputs


def test_what_has_no_rule_is_made_whole_and_listed() -> None:
    x = r(4, 12)
    cut = propagate(
        recorded(lambda x, y: (x * 2).cumsum(1) + y, [x, x]), 2, [Shard(1), REPLICATE], [OutputPlacement.FREE]
    )
    assert [(m.op, m.nbytes, m.inputs) for m in cut.whole] == [("aten.cumsum.default", 4 * 12 * 4, (0,))]
    assert cut.places == (REPLICATE,) and collectives(cut) == ["all_gather"]
