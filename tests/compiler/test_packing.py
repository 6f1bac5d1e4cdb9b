"""Places in an arena: nothing that is taken at the same time overlaps, and the arena is hardly larger than what is
taken at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, OPTIMIZERS

import fzero as fz
from fzero.compiler import arena
from fzero.compiler.packing import SLACK, Item, pack

spans = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda x: (x[0], x[0] + x[1]))
lists_of_items = st.lists(
    st.builds(
        Item, st.integers(1, 5000), st.lists(spans, min_size=1, max_size=3).map(tuple), st.sampled_from([1, 64, 512])
    ),
    max_size=16,
)


def least(items: Sequence[Item]) -> int:
    """The bytes that any arena for these items has at least: those that are taken at once, which are most where some
    item begins to be taken."""
    times = {a for x in items for a, _ in x.times}
    return max((sum(x.nbytes for x in items if any(a <= t <= b for a, b in x.times)) for t in times), default=0)


@settings(max_examples=60)
@given(lists_of_items)
def test_what_is_taken_at_once_does_not_overlap(items: list[Item]) -> None:
    found = pack(items)
    assert found == pack(items) and all(
        at >= 0 and at % x.align == 0 for at, x in zip(found.offsets, items, strict=True)
    )
    placed = [(x, at, at + x.nbytes) for at, x in zip(found.offsets, items, strict=True)]
    for (one, begin, end), (other, first, last) in itertools.combinations(placed, 2):
        at_once = any(a <= d and c <= b for (a, b), (c, d) in itertools.product(one.times, other.times))
        assert not at_once or end <= first or last <= begin
    assert found.nbytes == max((end for _, _, end in placed), default=0)
    assert least(items) <= found.nbytes


def test_where_the_largest_first_leaves_gaps_another_order_is_taken() -> None:
    """Both of 2 bytes lie at the bottom if they come first, so that the two of 1 byte, taken at once, lie on either of
    them and one on the other."""
    early, late, first, second = Item(2, ((0, 0),)), Item(2, ((3, 4),)), Item(1, ((0, 2),)), Item(1, ((2, 3),))
    assert pack([early, late, first, second]) == ((1, 0, 0, 2), 3) and least([early, late, first, second]) == 3


OFFLOADED = {
    "disk": (fz.offload("nvme", ("opt_state", "params"), path="/scratch"),),
    "disk and host": (fz.offload("nvme", "params", path="/scratch"), fz.offload("cpu", "opt_state")),
    "host": (fz.offload("cpu", ("opt_state", "params", "activations")),),
    "shards": (fz.shard_params(),),
}


@pytest.mark.full(keep=["host"])
@pytest.mark.parametrize("name", sorted(OFFLOADED))
def test_pools_of_programs_are_hardly_larger_than_what_lies_in_them_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[Any, int]] = []

    def packed(items: Any) -> Any:
        found = pack(items)
        pools.append((items, found.nbytes))
        return found

    monkeypatch.setattr(arena, "pack", packed)
    step = fz.compose(*OFFLOADED[name])(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    mesh = fz.AbstractMesh(data=2 if name == "shards" else 1, unified_memory=name == "shards")
    for layers in (4, 12):
        fz.lower(
            step, mesh, functools.partial(models.gpt_init, layers=layers, width=64), models.meta(models.batches(1)[0])
        )
    assert len(pools) >= 4 and all(nbytes <= 1.06 * least(items) for items, nbytes in pools)
    assert sum(nbytes for _, nbytes in pools) <= (1 + SLACK) * sum(least(items) for items, _ in pools)
