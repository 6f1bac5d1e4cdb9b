"""Draws are those of the published generator, well distributed, and functions of (key, global index) alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rejections import ONES, raises
from torch.fx.experimental.proxy_tensor import make_fx

import fzero as fz
import fzero.random as fzr
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError

# Key words, counter words, expected words: the known-answer file of Random123, threefry 2x32 with 20 rounds.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
KINDS = ["bits", "uniform", "normal"]


def same(kind, a, b):
    """Bitwise for words; normals up to the rounding of log and cos, whose vector forms may treat the ends of a tensor
    apart."""
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6 if kind == "normal" else 0)


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_known_answers(key, counter, expected):
    (k0, k1), (c0, c1) = key, counter
    assert fzr._threefry(k0, k1, c0, c1) == expected
    x0, x1 = fzr._threefry(k0, k1, torch.full((37,), c0), torch.full((37,), c1))
    assert x0.unique().tolist() + x1.unique().tolist() == list(expected)
    x0, x1 = (torch.full((37,), fzr._signed(v), dtype=torch.int32) for v in counter)
    fzr._threefry_(k0, k1, x0, x1, torch.empty_like(x0))
    assert [int(x) & 0xFFFFFFFF for x in (*x0.unique(), *x1.unique())] == list(expected)
    x0, x1 = (torch.full((37,), fzr._signed(v), dtype=torch.int32) for v in counter)
    # the key as tensors: what an accelerator runs
    fzr._threefry_(torch.tensor(k0), torch.tensor(k1), x0, x1, torch.empty_like(x0))
    assert [int(x) & 0xFFFFFFFF for x in (*x0.unique(), *x1.unique())] == list(expected)


def test_draw_counts_from_part_times_size_through_both_counter_words():
    key = fzr.with_part(fzr.key(0xDEADBEEF_00000007), (1 << 30) - 1)
    drawn = fzr.bits(key, (8,)).tolist()
    counters = [((1 << 30) - 1) * 8 + i for i in range(8)]  # around 2**33
    assert drawn == [fzr._threefry(7, 0xDEADBEEF, c & 0xFFFFFFFF, c >> 32)[0] for c in counters]
    assert fzr.bits(fzr.key(0), (1,)).item() == 0x6B200159


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_show(kind, monkeypatch):
    key = fzr.key(3)
    whole = fzr.DRAW(key, [1000], 1000, 0, kind)
    monkeypatch.setattr(fzr, "_CPU_BLOCK", 7)
    same(kind, fzr.DRAW(key, [1000], 1000, 0, kind), whole)


def moments_and_ks(x, cdf):
    x = x.double().sort().values
    n = x.numel()
    grid = torch.arange(n + 1, dtype=torch.float64) / n
    ks = max(float((grid[1:] - cdf(x)).max()), float((cdf(x) - grid[:-1]).max()))
    return float(x.mean()), float(x.var()), ks * math.sqrt(n)


def test_uniform_is_uniform():
    x = fzr.uniform(fzr.key(1), (500, 400))
    mean, var, ks = moments_and_ks(x.flatten(), lambda v: v)
    # ks: the 0.1 % level
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / x.numel()) and abs(var - 1 / 12) < 1e-3 and ks < 1.95
    assert float(x.min()) >= 0 and float(x.max()) < 1
    y = fzr.uniform(fzr.key(1), (500, 400), minval=-3, maxval=5)
    torch.testing.assert_close(y, x * 8 - 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_uniform_of_any_dtype_stays_below_one(dtype):
    x, full = fzr.uniform(fzr.key(1), (100_000,), dtype), fzr.uniform(fzr.key(1), (100_000,))
    assert x.dtype == dtype and float(x.max()) < 1 and float(x.min()) >= 0
    assert float(full.max()) > 1 - torch.finfo(torch.bfloat16).eps / 4  # which rounding to nearest would have made 1
    assert float((full - x.float()).abs().max()) < torch.finfo(dtype).eps + 1e-12


def test_normal_is_normal():
    x = fzr.normal(fzr.key(2), (500, 400))
    mean, var, ks = moments_and_ks(x.flatten(), torch.special.ndtr)
    assert abs(mean) < 5 / math.sqrt(x.numel()) and abs(var - 1) < 0.02 and ks < 1.95
    assert bool(x.isfinite().all()) and float(x.abs().max()) > 4
    assert abs(float(torch.corrcoef(torch.stack([x[:, :-1].flatten(), x[:, 1:].flatten()]))[0, 1])) < 0.01
    torch.testing.assert_close(fzr.normal(fzr.key(2), (500, 400), torch.bfloat16), x.bfloat16())


def test_normal_is_finite_at_the_ends_of_its_words():
    ends = torch.tensor([0, 1, -1, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    out = torch.empty(5)
    fzr._finish_("normal", ends.clone(), torch.zeros_like(ends), torch.empty_like(ends), out)
    assert bool(out.isfinite().all())
    # the least and the greatest radius word
    assert out[0] == pytest.approx(math.sqrt(62 * math.log(2)), rel=1e-6) and out[2] == 0


def test_bernoulli():
    assert float(fzr.bernoulli(fzr.key(0), (100_000,), 0.3).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert not fzr.bernoulli(fzr.key(0), (1000,), 0.0).any() and fzr.bernoulli(fzr.key(0), (1000,), 1.0).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_are_chunks_of_the_global_draw(parts):
    key = fzr.fold_in(fzr.key(5), 11)
    x = fzr.normal(fzr.key(6), (12, 5, 7))
    for fn in (fzr.bits, fzr.uniform, fzr.normal):
        pieces = [fn(fzr.with_part(key, p), (12 // parts, 5, 7)) for p in range(parts)]
        same(fn.__name__, torch.cat(pieces), fn(key, (12, 5, 7)))
    pieces = [fzr.dropout(fzr.with_part(key, torch.tensor(p)), piece, 0.4) for p, piece in enumerate(x.chunk(parts))]
    assert torch.equal(torch.cat(pieces), fzr.dropout(key, x, 0.4))


def test_derived_keys_keep_the_part_and_do_not_hash_it():
    key = fzr.key(9)
    for derive in (lambda k: fzr.split(k, 3)[1], lambda k: fzr.fold_in(k, 4)):
        assert torch.equal(derive(fzr.with_part(key, 17)), fzr.with_part(derive(key), 17))
        assert torch.equal(fzr.replicated(derive(fzr.with_part(key, 17))), derive(key))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lo", "hi"), [(0, 60), (0, 17), (17, 34), (51, 68), (60, 64)])
def test_sub_ranges_are_slices_of_the_whole(kind, lo, hi):
    for part in (0, 3):
        args = (fzr.with_part(fzr.key(4), part), [3, 4, 5], 60, 0, kind)
        whole = fzr.DRAW(*args).reshape(-1)
        piece = fzr.DRAW(*fzr.sub_range(args, lo, hi))
        assert piece.shape == (hi - lo,)
        same(kind, piece[: 60 - lo], whole[lo:hi])
        again = fzr.DRAW(*fzr.sub_range(fzr.sub_range(args, lo, hi), 1, 3))
        same(kind, again, piece[1:3])


def test_a_shard_of_a_replicated_draw_is_also_a_part():
    """The same program on every rank draws its shard if the rank's index comes in as the key's part."""
    whole = fzr.bits(fzr.key(4), (4, 6))
    for rank in range(3):
        assert torch.equal(
            fzr.DRAW(fzr.with_part(fzr.key(4), rank), [8], 8, 0, "bits"), whole.reshape(-1)[8 * rank : 8 * rank + 8]
        )


def test_keys_are_independent():
    keys = [
        tuple(k.tolist())
        for k in (
            fzr.key(0),
            *fzr.split(fzr.key(0), 100),
            *(fzr.fold_in(fzr.key(0), i) for i in (0, 1, 2, 1 << 32, (1 << 62) - 1)),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert keys[1:3] == [tuple(k.tolist()) for k in fzr.split(fzr.key(0))]  # the i-th does not depend on how many
    draws = torch.stack(
        [
            fzr.normal(k, (20_000,))
            for k in (fzr.key(0), *fzr.split(fzr.key(0), 3), fzr.fold_in(fzr.key(0), 0), fzr.key(1))
        ]
    )
    assert float((torch.corrcoef(draws) - torch.eye(6)).abs().max()) < 0.03
    assert not set(fzr.bits(fzr.key(0), (4096,)).tolist()) & {word for key in keys[1:] for word in key[:2]}


def test_fold_in_takes_a_tensor():
    assert torch.equal(fzr.fold_in(fzr.key(3), torch.tensor(1 << 40)), fzr.fold_in(fzr.key(3), 1 << 40))
    assert torch.equal(fzr.fold_in(fzr.key(3), torch.tensor(7, dtype=torch.int32)), fzr.fold_in(fzr.key(3), 7))


@pytest.mark.parametrize("kind", KINDS)
def test_decomposition_of_draw(kind):
    for args in ([30, 50], 1500, 0), ([33], 1500, 1490), ([0, 4], 0, 0), ([], 1, 0):
        key = fzr.with_part(fzr.key((1 << 64) - 2), 5)
        want, got = fzr.DRAW(key, *args, kind), fzr.DECOMPOSITIONS[fzr.DRAW](key, *args, kind)
        assert want.dtype == got.dtype and want.shape == got.shape
        same(kind, got, want)


def test_decomposition_of_derive():
    key = fzr.with_part(fzr.key(12), 3)
    for data in (torch.arange(5), torch.tensor(1 << 61), torch.arange(40)):  # few keys and many take different ways
        want = torch.stack([fzr.DERIVE(key, d, 3 << 30) for d in data.reshape(-1)]).reshape([*data.shape, 3])
        assert torch.equal(fzr.DERIVE(key, data, 3 << 30), want)
        assert torch.equal(fzr.DECOMPOSITIONS[fzr.DERIVE](key, data, 3 << 30), want)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_draw_is_one_node(mode):
    def fn(key, x, part):
        key = fzr.with_part(fzr.fold_in(key, part), part)
        a, b = fzr.split(key)
        return fzr.dropout(a, x, 0.5) + fzr.normal(b, x.shape)

    inputs = (fzr.key(1), torch.ones(4, 6), torch.tensor(2))
    graph = make_fx(fn, tracing_mode=mode)(*inputs)
    ours = [n.target for n in graph.graph.nodes if n.target in fzr.DECOMPOSITIONS]
    assert ours == [fzr.DERIVE, fzr.DERIVE, fzr.DRAW, fzr.DRAW]
    assert len(graph.graph.nodes) < 30
    others = (fzr.key(8), torch.rand(4, 6), torch.tensor(0))
    assert torch.equal(graph(*others), fn(*others))  # nothing of the key was baked in
    flat = make_fx(fn, decomposition_table=fzr.DECOMPOSITIONS, tracing_mode=mode)(*inputs)
    assert not [n for n in flat.graph.nodes if n.target in fzr.DECOMPOSITIONS]
    torch.testing.assert_close(flat(*others), fn(*others))


def test_dropout_scales_and_differentiates():
    x, key = fzr.normal(fzr.key(0), (300, 100)), fzr.key(1)
    y = fzr.dropout(key, x, 0.25)
    kept = y != 0
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    mask = kept / 0.75
    torch.testing.assert_close(torch.func.grad(lambda v: fzr.dropout(key, v, 0.25).sum())(x), mask)
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(fzr.dropout(key, x, 0.25).sum(), x)[0], mask)
    assert fzr.dropout(key, x, 0.0) is x
    assert fzr.dropout(key, torch.full((64,), torch.inf, dtype=torch.bfloat16), 0.5).isnan().sum() == 0


def test_under_vmap():
    keys, x = fzr.split(fzr.key(0), 3), torch.ones(3, 50)
    apart = torch.stack([fzr.dropout(k, row, 0.5) for k, row in zip(keys, x, strict=True)])
    assert torch.equal(torch.vmap(lambda k, row: fzr.dropout(k, row, 0.5))(keys, x), apart)
    assert torch.equal(torch.vmap(torch.func.grad(lambda row, k: fzr.dropout(k, row, 0.5).sum()))(x, keys), apart)
    shared = torch.vmap(lambda row: fzr.dropout(keys[0], row, 0.5))(x)
    assert torch.equal(shared, apart[0].expand(3, 50))
    steps = torch.vmap(lambda step: fzr.fold_in(keys[0], step))(torch.arange(3))
    assert torch.equal(steps, torch.stack([fzr.fold_in(keys[0], i) for i in range(3)]))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fzr.key(-1), FzeroValueError, "seed -1 does not fit"),
        (lambda: fzr.key(1.5), FzeroTypeError, "not float"),
        (lambda: fzr.normal(0, (2,)), FzeroTypeError, "a key is a tensor, not int"),
        (lambda: fzr.normal(torch.zeros(2), (2,)), FzeroTypeError, r"this is float32\[2\]"),
        (lambda: fzr.normal(fzr.split(fzr.key(0)), (2,)), FzeroTypeError, r"int64\[2, 3\]\nFix: take one of the keys"),
        (lambda: fzr.split(fzr.key(0), 0), FzeroValueError, "into 0"),
        (lambda: fzr.fold_in(fzr.key(0), -1), FzeroValueError, "cannot fold in -1"),
        (lambda: fzr.fold_in(fzr.key(0), torch.zeros(2)), FzeroTypeError, r"data is float32\[2\]"),
        (lambda: fzr.with_part(fzr.key(0), -2), FzeroValueError, "not -2"),
        (lambda: fzr.normal(fzr.key(0), (2,), torch.int64), FzeroTypeError, "fz.random.bits draws integers"),
        (lambda: fzr.uniform(fzr.key(0), (2,), minval=1.0), FzeroValueError, r"\[1.0, 1.0\) is not an interval"),
        (lambda: fzr.bernoulli(fzr.key(0), (2,), 1.5), FzeroValueError, "p=1.5"),
        (lambda: fzr.dropout(fzr.key(0), torch.ones(2), 1.0), FzeroValueError, r"rate=1.0 is outside \[0, 1\)"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "Fix: " in str(caught.value)


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a negative size": (lambda key: fz.random.normal(key, (-3,)), "fzero.random.normal: (-3,) is not a shape"),
    "a size": (lambda key: fz.random.uniform(key, 3), "fzero.random.uniform: 3 is not a shape"),
    "a dtype for a shape": (
        lambda key: fz.random.bits(key, torch.float32),
        "fzero.random.bits: torch.float32 is not a shape",
    ),
    "a text": (lambda key: fz.random.normal(key, "34"), "'34' is not a shape"),
    "p before the shape": (
        lambda key: fz.random.bernoulli(key, 2.0, (3,)),
        "fzero.random.bernoulli: 2.0 is not a shape",
    ),
    "a tensor for p": (lambda key: fz.random.bernoulli(key, (3,), ONES), "p=float32[2, 4]"),
    "a number for a dtype": (lambda key: fz.random.normal(key, (3,), 3.0), "3.0 is not a dtype"),
    "a text for a bound": (lambda key: fz.random.uniform(key, (3,), maxval="1"), "maxval='1'"),
    "rate before x": (lambda key: fz.random.dropout(key, 0.1, ONES), "rate=float32[2, 4]"),
    "dropout of a number": (lambda key: fz.random.dropout(key, 1.0, 0.1), "not of float"),
}


def test_wrong_arguments_are_named() -> None:
    for call, words in WRONG.values():
        raises(FzeroError, lambda call=call: call(fz.random.key(0)), words)
    raises(FzeroError, lambda: fz.random.split(fz.random.key(0), True), "cannot split a key into True")
    assert fz.random.normal(fz.random.key(0), torch.Size([2, 0])).shape == (2, 0)
