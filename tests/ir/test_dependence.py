"""The dependence graph: each kind of edge, and that every order it allows keeps the rules and computes the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import OPTIMIZERS, gpt_init, gpt_loss, meta, meta_part
from models import batches as gpt_batches
from replaced_passes import replace_pass

import fzero as fz
from fzero.errors import VerifyError
from fzero.ir import dependencies
from fzero.ir.aliases import Views
from fzero.ir.attributes import CopyAttrs
from fzero.ir.dependencies import dependences, scheduled
from fzero.ir.program import Instruction, Program, Value
from fzero.sharding.layout import Layout, Leaf
from fzero.sharding.placements import IN_FLIGHT

# --- each kind of edge ---


def value(name: str) -> Value:
    return Value(name, (4,), torch.float32)


def copy(source: str, target: str, handle: str, *args: str, writes: Sequence[str] = ()) -> Instruction:
    out = (Value(handle, (), torch.uint8, IN_FLIGHT),)
    return Instruction("copy_start", args, out, attrs=CopyAttrs(source=source, target=target), writes=tuple(writes))


def wait(handle: str, *out: str) -> Instruction:
    return Instruction("wait", (handle,), tuple(map(value, out)))


def cast(source: str, out: str) -> Instruction:
    return Instruction("cast", (source,), (value(out),))


def assign(target: str, source: str) -> Instruction:
    return Instruction("assign", (target, source), writes=(target,))


def graph(*ops: Instruction, unified: bool = False) -> list[set[int]]:
    """Of lines over two leaves, `p` and `q`; whose edges are all of them, also those that follow from others."""
    leaves = {name: Leaf(name, "params", (4,), Layout(torch.float32)) for name in ("p", "q")}
    mesh = fz.AbstractMesh(data=2, unified_memory=unified)
    program = Program("step", mesh, tuple(map(value, leaves)), leaves, ops, (), {})
    before = dependences(ops, Views(program))
    for numbers in before:
        for i in sorted(numbers, reverse=True):
            numbers |= before[i]
    return before


def test_what_is_read_is_made_before() -> None:
    assert graph(cast("p", "a"), cast("q", "b"), cast("a", "c")) == [set(), set(), {0}]


def test_a_leaf_is_overwritten_after_its_readers_and_read_again_after_that() -> None:
    assert graph(cast("p", "a"), cast("p", "b"), assign("p", "a"), cast("p", "c"), assign("p", "c")) == [
        set(),
        set(),
        {0, 1},
        {0, 1, 2},
        {0, 1, 2, 3},
    ]


def test_a_view_is_read_before_what_it_lies_in_is_overwritten() -> None:
    part = Instruction("take_shard", ("p",), (value("part"),))
    assert graph(part, cast("part", "a"), cast("q", "b"), assign("p", "b"))[3] == {0, 1, 2}


def test_a_transfer_reads_and_writes_until_its_wait() -> None:
    brought = graph(copy("device", "host", "h", "p"), wait("h", "a"), cast("q", "b"), assign("p", "b"))
    assert brought[3] == {0, 1, 2}
    stored = graph(cast("q", "a"), copy("device", "host", "h", "p", "a", writes=["p"]), wait("h"), cast("p", "b"))
    assert stored[3] == {0, 1, 2}


def test_a_copy_that_moves_nothing_is_what_it_is_copied_from() -> None:
    ops = copy("device", "host", "h", "p"), wait("h", "a"), cast("a", "b"), cast("q", "c"), assign("p", "c")
    assert graph(*ops, unified=True)[4] == {0, 1, 2, 3}
    assert graph(*ops)[4] == {0, 1, 3}


def test_who_writes_a_copy_writes_its_leaf() -> None:
    fetched = copy("host", "device", "h", "p"), wait("h", "a"), cast("p", "kept"), assign("a", "q"), cast("p", "b")
    assert graph(*fetched)[3:] == [{0, 1, 2}, {0, 1, 2, 3}]


def test_totals_are_added_to_in_place() -> None:
    add = Instruction("add", ("total", "part"), (value("sum"),))
    assert graph(cast("p", "total"), cast("q", "part"), cast("total", "seen"), add)[3] == {0, 1, 2}


def test_lines_with_a_body_do_what_that_does() -> None:
    rollback = Instruction("rollback", ("s", "t"), body=(cast("q", "new"), assign("p", "new")))
    ops = cast("q", "s"), cast("q", "t"), cast("p", "a"), rollback, cast("p", "b")
    assert graph(*ops)[3:] == [{0, 1, 2}, {0, 1, 2, 3}]


def test_the_least_of_what_may_come_next_comes_next() -> None:
    ops = [cast("p", name) for name in "abcd"]
    assert scheduled(ops, [{3}, set(), set(), set()], [0, 3, 2, 1]) == [ops[3], ops[0], ops[2], ops[1]]


# --- every order ---

STEPS = {
    "zero-1": [fz.shard_opt_state(), fz.mixed_precision("bf16")],
    "zero-3, clipped": [fz.shard_params(), fz.data_parallel(axis="replica"), fz.remat("full")],
    "loop": [fz.shard_params(), fz.accumulate(2)],
    "layerwise": [fz.shard_params(), fz.accumulate(2, schedule="layerwise")],
    "host": [fz.offload("cpu", ("opt_state", "params", "activations")), fz.shard_params()],
    "device": [fz.offload("cpu", "opt_state", update_on="device")],
    "disk": [fz.offload("nvme", ("opt_state", "params"), path="/scratch")],
}


def shuffled(program: Program, seed: int) -> Program:
    """The lines in an order drawn from all that the graph allows."""
    draw, views = random.Random(seed), Views(program)

    def visit(ops: Sequence[Instruction]) -> tuple[Instruction, ...]:
        ops = [replace(x, body=visit(x.body)) if x.body else x for x in ops]
        return tuple(scheduled(ops, dependences(ops, views), draw.sample(range(len(ops)), len(ops))))

    return replace(program, instructions=visit(program.instructions))


def any_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Puts the lines of every program that is lowered in any order that their dependences allow."""
    replace_pass(monkeypatch, "overlap", rewrite=lambda program, _: shuffled(program, seed))


def lowered(name: str, unified: bool) -> Program:
    clipped = "clipped" if name in ("zero-3, clipped", "host", "disk") else "adamw"
    step = fz.compose(*STEPS[name])(fz.train_step(gpt_loss, OPTIMIZERS[clipped]()))
    axes = {"replica": 2, "data": 2} if name == "zero-3, clipped" else {"data": 1 if name in ("device", "disk") else 2}
    mesh = fz.AbstractMesh(unified_memory=unified, **axes)
    return fz.lower(step, mesh, meta(gpt_init(fz.random.key(0))), meta_part(gpt_batches(1)[0], mesh.size)).program


@pytest.mark.full(keep=["device-two"])
@pytest.mark.parametrize("unified", [True, False], ids=["one memory", "two"])
@pytest.mark.parametrize("name", STEPS)
def test_every_order_keeps_the_rules(name: str, unified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of programs after every pass, and those of the pool."""
    orders = {tuple(op.op for op in lowered(name, unified).instructions)}
    for seed in range(3):
        with monkeypatch.context() as patch:
            any_order(patch, seed)
            orders.add(tuple(op.op for op in lowered(name, unified).instructions))
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("owner", "known", "left", "name"), [(dependencies, "_writes", 0, "disk"), (Instruction, "with_body", 1, "loop")]
)
def test_a_graph_that_knows_less_breaks_them(
    owner: Any, known: str, left: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, known, lambda op: [op][:left])
    with pytest.raises(VerifyError, match="found after the pass"):
        for seed in range(6):
            any_order(monkeypatch, seed)
            lowered(name, True)


@pytest.mark.parametrize(
    "transforms", [STEPS["zero-1"][:1], STEPS["loop"], STEPS["layerwise"]], ids=["zero-1", "loop", "layerwise"]
)
def test_every_order_computes_the_same(transforms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"layers": [{"w": fz.random.normal(fz.random.key(i), (5, 5))} for i in range(2)]}
    batch = fz.random.normal(fz.random.key(7), (8, 5))

    def run() -> list[torch.Tensor]:
        step = fz.compose(*transforms)(fz.train_step(_loss, OPTIMIZERS["clipped"]()))
        return fz.tree.leaves(fz.testing.simulate(step, fz.AbstractMesh(data=2), params, batch, steps=2))

    expected = run()
    for seed in range(2):
        any_order(monkeypatch, seed)
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


@fz.block
def _layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def _loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        batch = _layer(p, batch)
    return batch.square().mean()
