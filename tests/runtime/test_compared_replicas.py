"""What all ranks must hold alike is compared: what `init` is given, what a first step gets, what a checkpoint stores. A
difference names leaf and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero import optim
from fzero.checkpoint.tensor_digests import differing, digest


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().mean()


def _params(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(6, 6, generator=g), "b": torch.zeros(6)}


def _compiled(stage: Any = fz.data_parallel, **axes: int) -> Any:
    return fz.compile(stage(fz.train_step(_loss, optim.adamw(0.1))), fz.make_mesh(**axes), backend="eager")


def _begins(kind: str) -> None:
    train = _compiled(fz.shard_params)
    rank = train.mesh.rank
    scale = 1.0 + rank
    if kind == "parameters":
        train.init(_params(rank))
    elif kind == "key":
        train.init(lambda key: {"w": fz.random.normal(key, (6, 6)), "b": torch.zeros(6)}, fz.random.key(rank))
    elif kind == "function":
        train.init(lambda key: {"w": fz.random.normal(key, (6, 6)) * scale, "b": torch.zeros(6)})
    elif kind == "shape":
        train.init({**_params(), **({"c": torch.ones(1)} if rank else {})})
    elif kind == "dtype":
        train.init(
            {**_params(), **({"b": torch.zeros(6, dtype=torch.float64), "w": torch.zeros(5, 6)} if rank else {})}
        )
    elif kind == "not tensors":
        train.init({**_params(), "b": "zero"} if rank else _params())


@pytest.mark.full(keep=["shape-words3", "not tensors-words5"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("parameters", ["params['w']: not the same on rank 1 as on rank 0", "torch before"]),
        ("key", ["key: not the same on rank 1 as on rank 0"]),
        ("function", ["the init function: not the same on rank 1 as on rank 0"]),
        ("shape", ["params['c']: float32[1] on rank 1, no such leaf on rank 0"]),
        (
            "dtype",
            [
                "params['w']: float32[5, 6] on rank 1, float32[6, 6] on rank 0",
                "params['b']: float64[6] on rank 1, float32[6] on rank 0",
            ],
        ),
        ("not tensors", ["params['b']"]),
    ],
)
def test_ranks_that_begin_differently_do_not_begin(run_ranks: Any, kind: str, words: list[str]) -> None:
    for rank, r in enumerate(run_ranks(2, _begins, kind, expect_error=True, timeout=60)):
        assert r.type == ("FzeroTypeError" if kind == "not tensors" and rank else "DivergenceError"), r
        assert (
            r.message.startswith(("fzero.init: ", "fzero.step: ", "fzero.train_step: ")) and "\nFix: " in r.message
        ), r
        assert all(word in r.message for word in words), r
        assert "params['b']" not in r.message or kind in ("not tensors", "dtype"), r.message


def _drifts(folder: str, kind: str) -> Any:
    """What a state of which one rank's replica has changed says where it is used; four ranks, every leaf twice."""
    train = _compiled(lambda step: fz.shard_params(fz.data_parallel(step, axis="replica")), replica=2, data=2)
    batch, said = torch.ones(4, 6), []
    state = train.init(_params())
    if kind == "before the first step of a second state":
        train(state, batch)
        train(state, batch)
        state = train.init(_params())
    if kind == "later":
        state, _ = train(state, batch)
        train.check_replicas(state)
        fz.checkpoint.save(folder, state)
    if train.mesh.rank == 3:
        state.params["w"][-1] += 1e-6
    later: list[Any] = [lambda: train.check_replicas(state), lambda: fz.checkpoint.save(folder, state)]
    acts = later if kind == "later" else [lambda: train(state, batch)]
    for act in acts:
        with pytest.raises(fz.errors.FzeroError) as caught:
            act()
        said.append((type(caught.value).__name__, str(caught.value)))
    kept = sorted(p.name for p in Path(folder).iterdir())
    if kind == "later":
        train(state, batch)
        fz.checkpoint.save(folder, state, check_replicas=False)
    return said, kept, int(state.step)


@pytest.mark.full(keep=["before the first step"])
@pytest.mark.parametrize("kind", ["before the first step", "before the first step of a second state", "later"])
def test_replicas_that_drift_apart_are_named(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    ranks = run_ranks(4, _drifts, str(tmp_path), kind)
    for said, _, steps in ranks:
        assert [type_ for type_, _ in said] == ["DivergenceError", "CheckpointError"][: len(said)]
        for _, text in said:
            (line,) = [x.strip() for x in text.splitlines() if x.startswith("  ")]
            assert line.removesuffix("on rank 1").startswith(
                ("params['w']: not the same on rank 3 as ", "params.w: not the same on rank 3 as ")
            ), text
            assert "\nFix: " in text
        if kind == "later":
            assert len(said) == 2 and steps == 2
            assert ranks[0][1] == ["latest", "step-00000001"], (
                "the checkpoint of before is the latest, and nothing else is left"
            )


def test_ranks_that_hold_the_same_say_so_in_one_exchange() -> None:
    """Digests of leaves travel only if something differs."""
    sent: list[Any] = []

    def gather(make: Any, form: Any) -> list[Any]:
        sent.append(make())
        return [sent[-1]] * 2

    assert differing(lambda: {"w": (torch.ones(3), ()), "text": ("a", ())}, {"data": 2}, 2, gather) == []
    assert len(sent) == 1 and len(str(sent[0])) < 100


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40_000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]),
    st.data(),
)
def test_one_bit_makes_another_digest(numel: int, dtype: torch.dtype, data: st.DataObject) -> None:
    x = torch.zeros(numel + 1, dtype=dtype)[1:] if data.draw(st.booleans()) else torch.zeros(numel, dtype=dtype)
    first = digest(x)
    assert digest(x.clone()) == first
    assert digest(x.view(1, -1)) != first, "the shape counts"
    if numel:
        x[data.draw(st.integers(0, numel - 1))] = 1
        assert digest(x) != first


def test_rows_that_change_places_make_another_digest() -> None:
    for width in (16, 256, 1024, 4096):
        x = torch.arange(64.0 * width).view(64, width)
        assert digest(x.roll(1, 0)) != digest(x) and digest(x.view(width, 64).T.contiguous().view(64, width)) != digest(
            x
        )


SIGNED = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 4, torch.float8_e4m3fn: 8}
"""And how many there are in a word of the digest."""


@settings(max_examples=40)
@given(st.sampled_from([*SIGNED]), st.integers(2, 67), st.integers(0, 3), st.data())
def test_signs_and_places_make_another_digest(dtype: torch.dtype, rows: int, odd: int, data: st.DataObject) -> None:
    """Patterns that sums of words lose: each second number negated, all of them, two rows of the digest, two numbers a
    row apart in each other's place."""
    row = 4093 * SIGNED[dtype]
    x = (torch.rand(rows * row + odd, generator=torch.Generator().manual_seed(rows)) + 0.5).to(dtype)
    bits = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()])
    kind = data.draw(st.sampled_from(["every", "rows", "moved", "rolled", "complement"]))
    y = bits.clone()
    if kind == "every":
        period = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 4093, row, 2 * row]))
        part = y[data.draw(st.integers(0, period - 1)) :: period]
        part ^= torch.iinfo(bits.dtype).min
    elif kind == "rows":
        for i in data.draw(st.sets(st.integers(0, rows - 1), min_size=1)):
            y[i * row : (i + 1) * row] ^= torch.iinfo(bits.dtype).min
    elif kind == "moved":
        i, j = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
        at, num = data.draw(st.integers(0, row - 8)), data.draw(st.integers(1, 8))
        y[i * row + at : i * row + at + num], y[j * row + at : j * row + at + num] = (
            bits[j * row + at : j * row + at + num],
            bits[i * row + at : i * row + at + num],
        )
    elif kind == "rolled":
        y = bits.roll(row * data.draw(st.integers(1, rows - 1)))
    else:
        y = ~bits
    assert torch.equal(y, bits) == (digest(x) == digest(y.view(dtype)))


class Largest(TorchDispatchMode):
    """How many bytes the largest tensor has that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


def test_a_digest_takes_little_memory_whatever_the_strides() -> None:
    x = torch.randn(2, 32, 180, 181)
    expected = digest(x)
    shifted = torch.cat([torch.zeros(1), x.view(-1)])[1:].view(x.shape)
    for same in (
        x,
        shifted,
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(1, 3).contiguous().transpose(1, 3),
        x.expand(1, *x.shape)[0],
    ):
        with Largest() as largest:
            assert digest(same) == expected
        assert 0 < largest.nbytes < x.nbytes / 3, "2 MB of 8"
    assert digest(torch.complex(x, x).conj()) == digest(torch.complex(x, -x)) != digest(torch.complex(x, x))
