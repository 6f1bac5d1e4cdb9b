"""Casts and sums of micro-batches in one line: as many as a GPU needs, with the bits of one each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import models
import pytest
from late import late
from models import MODELS, OPTIMIZERS
from offloads import OFFLOADS, same, trained
from replaced_passes import replace_pass

import fzero as fz
from fzero.compiler import batched_ops, candidate_programs
from fzero.compiler.overlap import sharable
from fzero.compiler.pass_cache import few_launches, initial_options
from fzero.ir.pool_verifier import check
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import verify

BF16 = fz.mixed_precision("bf16")
CASES: dict[str, Any] = {
    "alone": (1, (BF16,)),
    "stage 2": (8, (BF16, fz.shard_grads(), fz.accumulate(2))),
    "stage 3": (8, (BF16, fz.shard_params())),
    "stage 3, accumulate": (8, (BF16, fz.shard_params(), fz.accumulate(3))),
    "layerwise": (8, (BF16, fz.shard_params(), fz.accumulate(2, schedule="layerwise"))),
    "offload": (8, (BF16, fz.shard_params(), fz.offload("cpu", ("opt_state", "params", "activations")))),
    "offload, accumulate": (8, (BF16, fz.shard_params(), fz.accumulate(2), fz.offload("cpu", ("opt_state", "params")))),
}


def lowered(name: str, device: str = "cuda", num_layers: int = 4, **budget: str) -> Program:
    size, transforms = CASES[name]
    step = fz.compose(*transforms)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    mesh = fz.AbstractMesh(data=size, device_type=device)
    init = lambda key: models.gpt_init(key, num_layers)  # noqa: E731
    return fz.lower(step, mesh, init, next(iter(models.batches(1))), **budget).program  # type: ignore[arg-type]


def every(program: Program) -> Iterator[Instruction]:
    for op, _ in program.walk():
        yield op


@pytest.mark.full(keep=["alone"])
@pytest.mark.parametrize("name", ["alone", "stage 3, accumulate", "layerwise"])
def test_a_block_has_few_of_them(name: str) -> None:
    """However many leaves it has: at most three casts and one sum."""
    four, eight = (Counter(op.op for op in every(lowered(name, num_layers=n))) for n in (4, 8))
    turns = 2 if name == "layerwise" else 1
    assert (eight["cast"] - four["cast"]) / 4 <= 3 * turns
    assert (eight["accumulate"] - four["accumulate"]) / 4 <= 1


def test_shards_are_cast_once() -> None:
    """Over micro-batches; within a budget, and on a CPU, as ever."""
    name = "stage 3, accumulate"

    def inside(program: Program) -> list[int]:
        loop = next(op for op in program.instructions if op.op == "loop")
        leaves = [x for x in loop.body if x.op == "cast" and x.args[0] in program.leaves]
        return [len(leaves), sum(x.op == "accumulate" and x.args[0].startswith("d_") for x in loop.body)]

    few, fitted = lowered(name), lowered(name, memory_budget="1GB")
    blocks = inside(fitted)[1]
    assert inside(few) == [0, blocks] and blocks == 6
    assert inside(fitted)[0] >= blocks
    once = [x for x in few.instructions if x.op == "cast" and x.args[0] in few.leaves]
    assert len(once) == 1 and len(once[0].out) == len({*once[0].args}) == sum(
        x.role == "params" for x in few.leaves.values()
    )
    offloaded = [x for x in lowered("offload, accumulate").instructions if x.op == "cast"]
    assert not any(v.name.endswith("_shard") for x in offloaded for v in x.out)  # they would be there all along


def test_a_budget_finds_the_gathers_that_may_serve_twice() -> None:
    """Behind casts that are one line: the search asks a finished program (overlap.sharable)."""
    assert len(sharable(lowered("stage 3"))) == len(sharable(lowered("stage 3", "cpu"))) > 3


@pytest.mark.full(keep=["alone"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_done_is_the_same(name: str) -> None:
    """As much of it, of the same values, in the same places; and on a CPU nothing changes."""
    program = lowered(name)
    with pytest.MonkeyPatch.context() as patch:
        replace_pass(patch, "batch", options=lambda at: None)
        apart = lowered(name)
    assert str(check(verify(batched_ops.rewrite(apart)))) == str(program)

    def done(program: Program) -> Counter[Any]:
        return Counter(
            (op.op, op.by, op.attrs if op.op in ("cast", "accumulate") else None, v, *op.into[i : i + 1])
            for op in every(program)
            for i, v in enumerate(op.out)
        )

    assert done(program) == done(apart)
    assert (program.pool_bytes, program.host_pool_bytes) == (apart.pool_bytes, apart.host_pool_bytes)
    on_cpu = lowered(name, "cpu")
    assert str(batched_ops.rewrite(on_cpu)) != str(on_cpu)


def _runs(together: bool) -> list[Any]:
    """What runs come to whose lines are batched, and as few as on a GPU, or not, under copies and collectives that are
    late."""
    found = []
    least = lambda *args: few_launches(initial_options(*args))  # noqa: E731
    for name in ("stage 2", "stage 3, accumulate", "layerwise", "offload"):
        mesh = fz.make_mesh(shared_memory=False, unified_memory=False)
        with pytest.MonkeyPatch.context() as patch:
            replace_pass(patch, "batch", options=lambda at: together or None)
            if together:
                patch.setattr(candidate_programs, "initial_options", least)
            copies = late(mesh, patch.setattr)
            (metrics, _), train, state = trained(mesh, CASES[name][1])
            assert not copies.races
            copies.finish()
            several = [x for x in every(train.program) if x.op in ("cast", "accumulate") and len(x.out) > 1]
            assert bool(several) == together, name
            found.append((metrics, train.gather(state)))
    return found


@pytest.mark.full
def test_bits_are_the_same(run_ranks: Any) -> None:
    for one, other in zip(*(run_ranks(2, _runs, together) for together in (True, False)), strict=True):
        assert same(one, other)


def test_of_one_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    want = trained(fz.make_mesh(data=1), (BF16,))[0]
    replace_pass(monkeypatch, "batch", options=lambda at: True)
    found, train, _ = trained(fz.make_mesh(data=1), (BF16,))
    assert same(found, want) and any(len(x.out) > 1 for x in every(train.program) if x.op == "cast")
    assert same(trained(fz.make_mesh(data=1), (*OFFLOADS["cpu all"](""), BF16))[0], want)


def test_none_is_written_over_another() -> None:
    """A sum that lies where another part of it is read is found."""
    program = lowered("stage 3, accumulate")
    places = {v.name: p for op in every(program) for v, p in zip(op.out, op.into, strict=False) if op.op == "wait"}
    wrong = []

    def mutated(op: Instruction) -> list[Instruction]:
        if op.op != "accumulate" or len(op.out) < 2 or wrong or op.args[1] not in places:
            return [op]
        place, own = places[op.args[1]], op.into[0]
        assert place is not None and own is not None
        wrong.append(replace(op, into=(replace(place, numel=own.numel), *op.into[1:])))
        return wrong[:]

    broken = program.map_instructions(mutated)
    assert wrong
    with pytest.raises(fz.errors.VerifyError, match="which it reads meanwhile"):
        check(broken)
