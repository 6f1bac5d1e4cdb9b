"""The pool: what is planned is small, and every way to break a schedule that the design names is found in a finished program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from models import MODELS, OPTIMIZERS, STAGES

import fzero as fz
from fzero import compat
from fzero.comm.transport import transport
from fzero.errors import VerifyError
from fzero.program.ir import COLLECTIVES, Line, Program
from fzero.program.verify import verify
from fzero.schedule.check import check


def lowered(*transforms: Any, layers: int = 4, shared_memory: bool = True) -> Program:
    step = fz.compose(*transforms)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    batch = fz.tree.map(lambda x: x[: x.shape[0] // 2], next(iter(models.batches(1))))
    return fz.lower(step, fz.AbstractMesh(data=2, shared_memory=shared_memory), lambda key: models.gpt_init(key, layers), batch).program


@pytest.fixture(scope="module")
def stage3() -> Program:
    return lowered(fz.shard_params())


@pytest.fixture(scope="module")
def looped() -> Program:
    return lowered(fz.shard_params(), fz.accumulate(3), fz.mixed_precision("bf16"))


def edit(program: Program, change: Callable[[Line], list[Line]]) -> Program:
    changed = program.map_lines(change)
    assert changed.lines != program.lines, "the mutation changes nothing"
    return changed


def only(which: Line, new: Callable[[Line], list[Line]]) -> Callable[[Line], list[Line]]:
    return lambda line: new(line) if line.op == which.op and line.out == which.out and line.args == which.args else [line]


def rejects(program: Program, *words: str) -> None:
    with pytest.raises(VerifyError) as caught:
        check(verify(program))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def transfers(program: Program, op: str) -> list[tuple[Line, Line]]:
    """Each start of a kind with its wait, in order."""
    lines = [line for line, _ in program.walk()]
    waits = {line.args[0]: line for line in lines if line.op == "wait"}
    return [(line, waits[line.out[0].name]) for line in lines if line.op == op]


def test_finished_programs_keep_the_rules(stage3: Program, looped: Program) -> None:
    check(stage3)
    check(looped)


def places(program: Program, which: Callable[[Line, str], bool]) -> dict[str, int]:
    """Bytes in the pool of the results that are asked for, by name."""
    found = {}
    for line, _ in program.walk():
        for value, place in zip(line.out, line.into, strict=False):
            if place is not None and which(line, value.name):
                found[value.name] = place.nbytes
    return found


def test_blocks_share_few_places() -> None:
    """Gathered leaves of alike blocks lie in the same few places, however many blocks there are."""
    for layers in (6, 12):
        gathers = [start for start, _ in transfers(lowered(fz.shard_params(), layers=layers), "all_gather_start") if "params['layers']" in str(start.args)]
        assert len(gathers) == 2 * layers and len({start.into for start in gathers}) <= 8


def test_gradients_lie_where_what_was_kept_for_them_lay() -> None:
    """A layer more adds less than what is kept of it and its gradients' shards: they are not alive at once."""
    six, twelve = lowered(fz.shard_params(), layers=6), lowered(fz.shard_params(), layers=12)
    added = [sum(places(p, lambda line, name: name.startswith("saved") or (line.op == "wait" and name.endswith("_shard"))).values()) for p in (six, twelve)]
    assert 0 < twelve.pool_bytes - six.pool_bytes < 0.9 * (added[1] - added[0])


def test_a_gather_into_bytes_still_read(stage3: Program) -> None:
    (first, wait), (second, later) = transfers(stage3, "all_gather_start")[1:3]

    def onto(line: Line) -> list[Line]:
        if line.out == second.out and line.op == second.op:
            return [replace(line, into=first.into)]
        return [replace(line, into=wait.into)] if line.op == "wait" and line.args == later.args else [line]

    rejects(edit(stage3, onto), "is written over the buffers of gather_1")


def test_a_value_read_after_its_bytes_were_reused(stage3: Program) -> None:
    lines = list(stage3.lines)
    starts = transfers(stage3, "all_gather_start")
    reused = next((a, b) for i, a in enumerate(starts) for b in starts[i + 2 :] if set(a[0].into) & set(b[0].into))
    (_, wait), (start, _) = reused
    reader = next(i for i, x in enumerate(lines) if wait.out[0].name in x.args)
    moved = replace(lines[reader], out=(), writes=(), op="cast", args=(wait.out[0].name,), attrs={"dtype": wait.out[0].dtype}, into=())
    moved = replace(moved, out=(replace(wait.out[0], name="late"),))
    at = next(i for i, x in enumerate(lines) if x is start) + 1
    rejects(replace(stage3, lines=(*lines[:at], moved, *lines[at:])), f"{wait.out[0].name} is read, but")


def test_a_buffer_written_while_other_ranks_read_it(stage3: Program) -> None:
    (first, _), (second, _) = transfers(stage3, "reduce_scatter_start")[:2]
    maker = next(x for x in stage3.lines if second.args[0] in {v.name for v in x.out})
    places = {v.name: p for v, p in zip(maker.out, maker.into, strict=True)}
    place = replace(places[second.args[0]], offset=first.into[0].offset)

    def onto(line: Line) -> list[Line]:
        return [replace(line, into=tuple(place if v.name == second.args[0] else p for v, p in zip(line.out, line.into, strict=True)))]

    rejects(edit(stage3, only(maker, onto)), "written over the buffers of scatter_0")


def test_turns_of_a_loop_that_do_not_end_together(looped: Program) -> None:
    def apart(line: Line) -> list[Line]:
        return [replace(line, attrs={k: v for k, v in line.attrs.items() if k != "together"})]

    loop = next(x for x in looped.lines if x.op == "loop")
    assert sum(bool(x.attrs.get("together")) for x in loop.body) == 1
    rejects(edit(looped, apart), "other ranks may still be reading it")


@pytest.mark.parametrize("transforms", [(fz.shard_params(),), (fz.shard_params(), fz.accumulate(3))], ids=["stage 3", "in a loop"])
def test_ranks_that_share_no_memory_wait_for_no_reader(transforms: Any) -> None:
    apart, shared = lowered(*transforms, shared_memory=False), lowered(*transforms)
    assert apart.pool_bytes < shared.pool_bytes
    assert not any(line.attrs.get("together") for line, _ in apart.walk())
    check(replace(shared, mesh=apart.mesh))
    rejects(replace(apart, mesh=shared.mesh), "other ranks may still be reading it")


def test_a_pool_that_is_too_small(stage3: Program) -> None:
    rejects(replace(stage3, pool_bytes=stage3.pool_bytes - 1), f"of a pool of {stage3.pool_bytes - 1}")


def test_donated_state_read_late(stage3: Program) -> None:
    update = next(x for x in reversed(stage3.lines) if x.op == "call" and x.writes)
    late = Line("cast", (update.writes[0],), (replace(stage3.values()[update.writes[0]], name="late"),), attrs={"dtype": torch.float32})
    rejects(replace(stage3, lines=(*stage3.lines, late)), "has been overwritten")


@pytest.mark.parametrize("op", sorted(COLLECTIVES))
def test_a_wait_before_its_start(stage3: Program, op: str) -> None:
    """What would be a deadlock: the rank waits for the others, who wait for it to start."""
    start, wait = transfers(stage3, op)[0]
    lines = [x for x in stage3.lines if x is not start]
    at = next(i for i, x in enumerate(lines) if x is wait) + 1
    rejects(replace(stage3, lines=(*lines[:at], start, *lines[at:])), f"{start.out[0].name} is read before it is made")


class Allocations(compat.TorchDispatchMode):
    """Counts results of operations that are not views of, or written into, what the operations were given."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in fz.tree.leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
        self.count += any(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given for x in fz.tree.leaves([out]))
        return out


def allocations_of_transfers(stage: str, shared: bool) -> tuple[list[int], int]:
    """Per step: allocations while transfers start and are waited for; and how many transfers there are."""
    mesh = fz.make_mesh(data=-1, shared_memory=shared)
    carrier = type(transport(mesh))
    names = ("all_gather_start", "reduce_scatter_start", "all_reduce_start", "wait")
    before, counts = {n: getattr(carrier, n) for n in names}, []

    def watched(fn: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with Allocations() as seen:
                out = fn(*args, **kwargs)
            counts[-1] += seen.count
            return out

        return run

    try:
        for name, fn in before.items():
            setattr(carrier, name, watched(fn))
        train = fz.compile(STAGES[stage](fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())), mesh, backend="eager")
        state = train.init(MODELS["gpt"].init)
        for batch in models.batches(3):
            counts.append(0)
            state, _ = train(state, models.part(batch, mesh))
    finally:
        for name, fn in before.items():
            setattr(carrier, name, fn)
    return counts, sum(line.op in COLLECTIVES for line, _ in train.program.walk())


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_transfers_allocate_nothing(run_ranks: Any, stage: int, shared: bool) -> None:
    for counts, transfers_of_a_step in run_ranks(2, allocations_of_transfers, stage, shared):
        assert transfers_of_a_step > 3
        assert counts[-1] == 0
