"""The pool: what is planned is small, and every way to break a schedule that the design names is found in a finished
program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from models import MODELS, OPTIMIZERS, STAGES
from test_mutations import program_of

import fzero as fz
from fzero._compat import compat
from fzero.comm.transport import transport
from fzero.errors import VerifyError
from fzero.ir.attributes import CastAttrs
from fzero.ir.ops import COLLECTIVES, OPS
from fzero.ir.pool_verifier import check
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import verify


def lowered(*transforms: Any, layers: int = 4, shared_memory: bool = True) -> Program:
    step = fz.compose(*transforms)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    batch = fz.tree.map(lambda x: x[: x.shape[0] // 2], next(iter(models.batches(1))))
    return fz.lower(
        step, fz.AbstractMesh(data=2, shared_memory=shared_memory), lambda key: models.gpt_init(key, layers), batch
    ).program


@pytest.fixture(scope="module")
def stage3() -> Program:
    return lowered(fz.shard_params())


@pytest.fixture(scope="module")
def looped() -> Program:
    return lowered(fz.shard_params(), fz.accumulate(3), fz.mixed_precision("bf16"))


def edit(program: Program, change: Callable[[Instruction], list[Instruction]]) -> Program:
    changed = program.map_instructions(change)
    assert changed.instructions != program.instructions, "the mutation changes nothing"
    return changed


def only(
    which: Instruction, new: Callable[[Instruction], list[Instruction]]
) -> Callable[[Instruction], list[Instruction]]:
    return lambda op: new(op) if op.op == which.op and op.out == which.out and op.args == which.args else [op]


def rejects(program: Program, *words: str) -> None:
    with pytest.raises(VerifyError) as caught:
        check(verify(program))
    for word in words:
        assert word in str(caught.value), str(caught.value)


TO_DEVICE, TO_HOST, READ, WRITE = ("host", "device"), ("device", "host"), ("disk", "host"), ("host", "disk")


def transfers(program: Program, kind: str | tuple[str, ...]) -> list[tuple[Instruction, Instruction]]:
    """Each start of a kind, or each copy between two tiers, with its wait, in order."""
    ops = [op for op, _ in program.walk()]
    waits = {op.args[0]: op for op in ops if op.op == "wait"}
    return [(op, waits[op.out[0].name]) for op in ops if kind in (op.op, op.tiers)]


def test_finished_programs_keep_the_rules(stage3: Program, looped: Program) -> None:
    check(stage3)
    check(looped)


def places(program: Program, which: Callable[[Instruction, str], bool]) -> dict[str, int]:
    """Bytes in the pool of the results that are asked for, by name."""
    found = {}
    for op, _ in program.walk():
        for value, place in zip(op.out, op.into, strict=False):
            if place is not None and which(op, value.name):
                found[value.name] = place.nbytes
    return found


@pytest.mark.full
def test_blocks_share_few_places() -> None:
    """Gathered leaves of alike blocks lie in the same few places, however many blocks there are. A pool that is too
    large by the first order of packing takes another, with more places."""
    for layers in (6, 48):
        gathers = [
            start
            for start, _ in transfers(lowered(fz.shard_params(), layers=layers), "all_gather_start")
            if "params['layers']" in str(start.args)
        ]
        assert len(gathers) == 2 * layers and len({start.into for start in gathers}) <= 8


def test_gradients_lie_where_what_was_kept_for_them_lay() -> None:
    """A layer more adds less than what is kept of it and its gradients' shards: they are not alive at once."""
    six, twelve = lowered(fz.shard_params(), layers=6), lowered(fz.shard_params(), layers=12)
    added = [
        sum(
            places(
                p, lambda op, name: name.startswith("saved") or (op.op == "wait" and name.endswith("_shard"))
            ).values()
        )
        for p in (six, twelve)
    ]
    assert 0 < twelve.pool_bytes - six.pool_bytes < 0.9 * (added[1] - added[0])


def test_a_gather_into_bytes_still_read(stage3: Program) -> None:
    (first, wait), (second, later) = transfers(stage3, "all_gather_start")[1:3]

    def onto(op: Instruction) -> list[Instruction]:
        if op.out == second.out and op.op == second.op:
            return [replace(op, into=first.into)]
        return [replace(op, into=wait.into)] if op.op == "wait" and op.args == later.args else [op]

    rejects(edit(stage3, onto), "is written over the buffers of gather_1")


def test_a_value_read_after_its_bytes_were_reused(stage3: Program) -> None:
    ops = list(stage3.instructions)
    starts = transfers(stage3, "all_gather_start")
    reused = next((a, b) for i, a in enumerate(starts) for b in starts[i + 2 :] if set(a[0].into) & set(b[0].into))
    (_, wait), (start, _) = reused
    reader = next(i for i, x in enumerate(ops) if wait.out[0].name in x.args)
    moved = replace(
        ops[reader],
        out=(),
        writes=(),
        op="cast",
        fn="",
        args=(wait.out[0].name,),
        attrs=CastAttrs(dtype=wait.out[0].dtype),
        into=(),
    )
    moved = replace(moved, out=(replace(wait.out[0], name="late"),))
    at = next(i for i, x in enumerate(ops) if x is start) + 1
    rejects(replace(stage3, instructions=(*ops[:at], moved, *ops[at:])), f"{wait.out[0].name} is read, but")


def test_a_buffer_written_while_other_ranks_read_it(stage3: Program) -> None:
    (first, _), (second, _) = transfers(stage3, "reduce_scatter_start")[:2]
    maker = next(x for x in stage3.instructions if second.args[0] in {v.name for v in x.out})
    places = {v.name: p for v, p in zip(maker.out, maker.into, strict=True)}
    place = replace(places[second.args[0]], offset=first.into[0].offset)

    def onto(op: Instruction) -> list[Instruction]:
        return [
            replace(
                op,
                into=tuple(place if v.name == second.args[0] else p for v, p in zip(op.out, op.into, strict=True)),
            )
        ]

    rejects(edit(stage3, only(maker, onto)), "written over the buffers of scatter_0")


def test_turns_of_a_loop_that_do_not_end_together(looped: Program) -> None:
    def apart(op: Instruction) -> list[Instruction]:
        return [op.saying(together=False) if op.op == "wait" else op]

    loop = next(x for x in looped.instructions if x.op == "loop")
    assert any(x.op == "wait" and x.attrs.together for x in loop.body)
    rejects(edit(looped, apart), "other ranks may still be reading it")


@pytest.mark.parametrize(
    "transforms", [(fz.shard_params(),), (fz.shard_params(), fz.accumulate(3))], ids=["stage 3", "in a loop"]
)
def test_ranks_that_share_no_memory_wait_for_no_reader(transforms: Any) -> None:
    apart, shared = lowered(*transforms, shared_memory=False), lowered(*transforms)
    assert apart.pool_bytes <= 1.02 * shared.pool_bytes  # as packing leaves
    assert not any(op.attrs.together for op, _ in apart.walk() if op.op == "wait")
    check(replace(shared, mesh=apart.mesh))
    rejects(replace(apart, mesh=shared.mesh), "other ranks may still be reading it")


def test_a_pool_that_is_too_small(stage3: Program) -> None:
    rejects(replace(stage3, pool_bytes=stage3.pool_bytes - 1), f"of an arena of {stage3.pool_bytes - 1}")


def test_donated_state_read_late(stage3: Program) -> None:
    update = next(x for x in reversed(stage3.instructions) if x.op == "call" and x.writes)
    late = Instruction(
        "cast",
        (update.writes[0],),
        (replace(stage3.values()[update.writes[0]], name="late"),),
        attrs=CastAttrs(dtype=torch.float32),
    )
    rejects(replace(stage3, instructions=(*stage3.instructions, late)), "has been overwritten")


@pytest.mark.parametrize("op", sorted(COLLECTIVES))
def test_a_wait_before_its_start(stage3: Program, op: str) -> None:
    """What would be a deadlock: the rank waits for the others, who wait for it to start."""
    other = {
        "replicate_start": lambda: lowered(fz.shard_params(), fz.redundant()),
        "all_to_all_start": lambda: program_of("tensor"),
        "all_to_all_v_start": lambda: program_of("experts"),
        "send_start": lambda: program_of("pipeline"),
        "recv_start": lambda: program_of("pipeline"),
    }
    program = other[op]() if op in other else stage3
    start, wait = transfers(program, op)[0]
    ops = [x for x in program.instructions if x is not start]
    at = next(i for i, x in enumerate(ops) if x is wait) + 1
    rejects(
        replace(program, instructions=(*ops[:at], start, *ops[at:])), f"{start.out[0].name} is read before it is made"
    )


class Allocations(compat.TorchDispatchMode):
    """Counts results of operations that are not views of, or written into, what the operations were given."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr() for x in fz.tree.leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)
        }
        self.count += any(
            isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given for x in fz.tree.leaves([out])
        )
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
        train = fz.compile(
            STAGES[stage](fz.train_step(MODELS["mixed"].loss, OPTIMIZERS["adamw"]())), mesh, backend="eager"
        )
        state = train.init(MODELS["mixed"].init)
        for batch in models.batches(3):
            counts.append(0)
            state, _ = train(state, models.part(batch, mesh))
    finally:
        for name, fn in before.items():
            setattr(carrier, name, fn)
    return counts, sum(op.op in COLLECTIVES for op, _ in train.program.walk())


@pytest.mark.full(keep=["3-True"])
@pytest.mark.parametrize(("stage", "shared"), [(0, True), (1, False), (3, True), (3, False)])
def test_transfers_allocate_nothing(run_ranks: Any, stage: int, shared: bool) -> None:
    for counts, transfers_of_a_step in run_ranks(2, allocations_of_transfers, stage, shared):
        assert transfers_of_a_step > 3
        assert counts[-1] == 0


def trained_through(shared: bool) -> list[torch.Tensor]:
    """Leaves of a few steps: one that gloo gathers by broadcasts, one that is padded and one without elements."""
    mesh, rows = fz.make_mesh(data=-1, shared_memory=shared), torch.Generator().manual_seed(1)
    params = {"w": torch.randn(700, 601, generator=rows), "b": torch.zeros(1), "none": torch.zeros(0, 3)}
    x = torch.randn(mesh.size * 2, 700, generator=rows).chunk(mesh.size)[mesh.rank]
    plain = fz.train_step(
        lambda p, x: ((x @ p["w"]).sum(-1) + p["b"] + p["none"].sum()).square().mean(), OPTIMIZERS["adamw"]()
    )
    train = fz.compile(fz.shard_params(plain), mesh, backend="eager")
    state = train.init(params)
    for _ in range(3):
        state, _ = train(state, x)
    return fz.tree.leaves(train.gather(state).params)


def test_gloo_and_shared_memory_sum_in_the_same_order(run_ranks: Any) -> None:
    for one, other in zip(run_ranks(3, trained_through, True), run_ranks(3, trained_through, False), strict=True):
        assert all(map(torch.equal, one, other)) and len(one) == 3


# --- copies between tiers ---


def offloaded(**mesh: Any) -> Program:
    """A program with every kind of copy: parameters in host memory, the optimizer's state on disk."""
    records = (fz.offload("cpu", "params"), fz.offload("nvme", "opt_state", path="/scratch", update_on="host"))
    step = fz.compose(*records)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]()))
    return fz.lower(
        step, fz.AbstractMesh(data=1, **mesh), lambda key: models.gpt_init(key, 4), next(iter(models.batches(1)))
    ).program


@pytest.fixture(scope="module")
def tiered() -> Program:
    return offloaded(unified_memory=False)


@pytest.fixture(scope="module")
def unified() -> Program:
    return offloaded()


def without(program: Program, *ops: Instruction) -> Program:
    return edit(program, lambda op: [] if any(op is x for x in ops) else [op])


@pytest.mark.parametrize("tiers", [TO_DEVICE, TO_HOST, READ, WRITE], ids="-".join)
def test_a_copy_nobody_waits_for(tiered: Program, tiers: tuple[str, str]) -> None:
    start, wait = transfers(tiered, tiers)[1]
    rejects(without(tiered, wait), f"copy_start  -> {start.out[0].name}: {start.out[0].name} is never waited for")
    for out in wait.out[:1]:
        rejects(without(tiered, wait), f"{out.name} is read before it is made")


@pytest.mark.parametrize("tiers", [TO_HOST, WRITE], ids="-".join)
def test_a_store_that_is_missing(tiered: Program, tiers: tuple[str, str]) -> None:
    """What was updated in a copy never comes to rest."""
    program = lowered_on_device() if tiers == TO_HOST else tiered
    start, wait = next((start, wait) for start, wait in transfers(program, tiers) if start.writes)
    rejects(
        without(program, start, wait), "is written, but", f"{start.writes[0]}, of which it is a shard or a copy, is not"
    )


def lowered_on_device() -> Program:
    """Optimizer state that is brought to the device, and stored from there."""
    step = fz.offload("cpu", ("opt_state", "params"), update_on="device")(
        fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())
    )
    return fz.lower(
        step, fz.AbstractMesh(data=1, unified_memory=False), MODELS["gpt"].init, next(iter(models.batches(1)))
    ).program


@pytest.mark.parametrize("tiers", [READ, TO_DEVICE, TO_HOST], ids="-".join)
def test_a_copy_read_before_its_wait(tiered: Program, tiers: tuple[str, str]) -> None:
    """By its name: of what is not there yet. By the bytes it is being copied to: of what lay there before."""
    start, wait = next((s, w) for s, w in transfers(tiered, tiers) if w.out)
    ops = list(tiered.instructions)
    reader = next(x for x in ops if wait.out[0].name in x.args)
    at = next(i for i, x in enumerate(ops) if x is start) + 1
    moved = [*ops[:at], reader, *(x for x in ops[at:] if x is not reader)]
    rejects(
        replace(tiered, instructions=tuple(moved)),
        f"{reader.op} {reader.fn}",
        f"{wait.out[0].name} is read before it is made",
    )
    early = Instruction(
        "cast", (start.out[0].name,), (replace(wait.out[0], name="early"),), attrs=CastAttrs(dtype=wait.out[0].dtype)
    )
    rejects(
        replace(tiered, instructions=(*ops[:at], early, *ops[at:])),
        "cast  -> early",
        f"{start.out[0].name} is still moving",
    )


def under_way(
    program: Program, kind: str | tuple[str, ...], during: tuple[str, ...]
) -> tuple[Instruction, Instruction, Instruction]:
    """A start, and another one with its wait that begins before the first is waited for."""
    ops = list(program.instructions)
    position = {id(x): i for i, x in enumerate(ops)}
    others = [(t, u) for t, u in transfers(program, during) if u.out and t.into]
    pairs = ((s, w, t, u) for s, w in transfers(program, kind) for t, u in others)
    return next((s, t, u) for s, w, t, u in pairs if position[id(s)] < position[id(t)] < position[id(w)] and s is not t)


def moved_to(program: Program, start: Instruction, wait: Instruction, offset: int) -> Program:
    """With the first thing a copy makes at another place."""

    def there(op: Instruction) -> list[Instruction]:
        if op is not start and op is not wait:
            return [op]
        assert op.into[0] is not None
        return [replace(op, into=(replace(op.into[0], offset=offset), *op.into[1:]))]

    return edit(program, there)


@pytest.mark.parametrize("memory", ["tiered", "unified"])
def test_a_ring_overwritten_while_it_is_written_out(memory: str, request: pytest.FixtureRequest) -> None:
    """A read of the next block's state into the region that the disk is still taking the last one's from."""
    program: Program = request.getfixturevalue(memory)
    write, start, wait = under_way(program, WRITE, READ)
    places = {v.name: p for op in program.instructions for v, p in zip(op.out, op.into, strict=False) if p is not None}
    source = next(places[a] for a in write.args[len(write.writes) :] if a in places)
    rejects(
        moved_to(program, start, wait, source.offset),
        f"is written over the buffers of {write.out[0].name}: it has not been waited for",
    )


def test_what_is_copied_to_the_device_is_overwritten_on_the_host() -> None:
    """The host's buffer of a fetch is given to a read from disk before the fetch has left it."""
    step = fz.offload("nvme", ("opt_state", "params"), path="/scratch")(
        fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())
    )
    program = fz.lower(
        step,
        fz.AbstractMesh(data=1, unified_memory=False),
        lambda key: models.gpt_init(key, 4),
        next(iter(models.batches(1))),
    ).program
    places = {v.name: p for op in program.instructions for v, p in zip(op.out, op.into, strict=False) if p is not None}
    fetch, start, wait = under_way(program, TO_DEVICE, READ)
    rejects(
        moved_to(program, start, wait, places[fetch.args[0]].offset),
        f"is written over the buffers of {fetch.out[0].name}: it has not been waited for",
    )


def test_what_the_host_writes_where_the_device_copies_from_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation casts parameters on the host into bytes of which a copy was waited for by the device alone: only a
    line that settles may."""
    step = fz.compose(fz.offload("cpu", "params"), fz.mixed_precision("bf16"))(fz.eval_step(MODELS["gpt"].loss))
    mesh = fz.AbstractMesh(data=1, unified_memory=False)
    program = fz.lower(step, mesh, lambda key: models.gpt_init(key, 6), (next(iter(models.batches(1))),)).program
    check(program)
    monkeypatch.setattr(OPS["cast"], "settles", False)
    rejects(program, "may still read or fill on the host")


def test_a_leaf_on_the_host_that_the_device_copies_from(monkeypatch: pytest.MonkeyPatch, tiered: Program) -> None:
    """Parameters rest on the host: what updates them there settles before it does."""
    check(tiered)
    monkeypatch.setattr(type(OPS["call"]), "settles", False)
    rejects(tiered, "may still read on the host")


def test_what_writes_where_a_copy_to_the_host_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device alone waits for copies of activations: the next of them goes to the same bytes in the device's order,
    and what did not keep that order would have to settle."""
    step = fz.offload("cpu", "activations")(fz.train_step(MODELS["gpt"].loss, fz.optim.adamw(0.1)))
    mesh = fz.AbstractMesh(data=1, unified_memory=False)
    (batch,) = models.batches(1, size=48)
    program = fz.lower(fz.accumulate(2)(step), mesh, lambda key: models.gpt_init(key, 6), batch).program
    check(program)
    monkeypatch.setattr(OPS["copy_start"], "settles", False)
    rejects(program, "is written over memory that to_host_")


def test_a_value_in_the_bytes_of_another_tier_is_apart(tiered: Program) -> None:
    """Equal offsets of two arenas are not the same bytes."""
    assert tiered.pool_bytes > 0 and tiered.host_pool_bytes > 0
    begins = {(p.arena, p.offset) for op, _ in tiered.walk() for p in op.into if p is not None}
    assert {offset for arena, offset in begins if arena == "host"} & {
        offset for arena, offset in begins if arena == "device"
    }
    check(tiered)
    rejects(replace(tiered, host_pool_bytes=tiered.host_pool_bytes - 4096), "ends at byte")


def test_a_gather_reads_its_shards_until_its_wait() -> None:
    """Shards that came from the host lie in the pool: nothing is copied there before they have been sent."""
    step = fz.compose(fz.offload("cpu", "params"), fz.shard_params())(
        fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())
    )
    batch = fz.tree.map(lambda x: x[: x.shape[0] // 2], next(iter(models.batches(1))))
    mesh = fz.AbstractMesh(data=2, shared_memory=False, unified_memory=False)
    program = fz.lower(step, mesh, lambda key: models.gpt_init(key, 4), batch).program
    gather, start, wait = under_way(program, "all_gather_start", TO_DEVICE)
    places = {v.name: p for op in program.instructions for v, p in zip(op.out, op.into, strict=False) if p is not None}
    rejects(
        moved_to(program, start, wait, places[gather.args[0]].offset),
        f"is written over the buffers of {gather.out[0].name}: it has not been waited for",
    )


def test_a_shard_lies_where_it_was_taken_from() -> None:
    """A whole leaf is read from disk, this rank's part of it is updated: in between nothing is read into its region."""
    step = fz.compose(fz.offload("nvme", ("opt_state", "params"), path="/scratch"), fz.shard_opt_state())
    batch = fz.tree.map(lambda x: x[: x.shape[0] // 2], next(iter(models.batches(1))))
    program = fz.lower(
        step(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["adamw"]())),
        fz.AbstractMesh(data=2),
        MODELS["gpt"].init,
        batch,
    ).program
    ops = list(program.instructions)
    taken = next(x for x in ops if x.op == "take_shard")
    update = next(i for i, x in enumerate(ops) if taken.out[0].name in x.writes)
    places = {v.name: p for op in ops for v, p in zip(op.out, op.into, strict=False) if p is not None}
    whole, at = places[taken.args[0]], ops.index(taken)
    start, wait = next(
        (s, w) for s, w in transfers(program, READ) if at < ops.index(w) < update or at < ops.index(s) < update
    )
    rejects(moved_to(program, start, wait, whole.offset), f"{taken.args[0]} is read, but")


def test_a_value_on_the_wrong_tier(tiered: Program) -> None:
    update = next(x for x in tiered.instructions if x.op == "call" and x.on_host and x.writes)
    here = update.saying(on="device")
    rejects(
        edit(tiered, lambda op: [here] if op is update else [op]),
        f"call {update.fn}",
        f"{update.writes[0]} is on the host, not on the device",
    )
    block = next(x for x in tiered.instructions if x.op == "call" and x.block is not None)
    leaf = next(n for n in tiered.leaves if n.startswith("params['embed']"))
    direct = replace(block, args=(leaf, *block.args[1:]))
    rejects(
        edit(tiered, lambda op: [direct] if op is block else [op]),
        f"call {block.fn}",
        f"{leaf} is on the host, not on the device",
    )
    _, wait = transfers(tiered, TO_DEVICE)[0]
    wrong = replace(wait, out=(replace(wait.out[0], tier="host"), *wait.out[1:]))
    rejects(edit(tiered, lambda op: [wrong] if op is wait else [op]), "wait", f"{wait.out[0].name} is ")
    read, _ = transfers(tiered, READ)[0]
    from_host = replace(read, args=(leaf, *read.args[1:]))
    rejects(
        edit(tiered, lambda op: [from_host] if op is read else [op]),
        "copy_start",
        f"{leaf} is on the host, not on the disk",
    )


def alike(start: Instruction, program: Program) -> tuple[int, int]:
    """Two leaves of one shape that a store writes."""
    shapes = [program.leaves[w].shape for w in start.writes]
    return next((i, j) for i in range(len(shapes)) for j in range(i + 1, len(shapes)) if shapes[i] == shapes[j])


def test_a_store_to_the_wrong_leaf(tiered: Program) -> None:
    """Of the same shape, so that nothing but the name is wrong; each in the other's place, so that all leaves are
    written."""
    start, _ = next(p for p in transfers(tiered, WRITE) if len(p[0].writes) > 3)
    num, (i, j) = len(start.writes), alike(start, tiered)
    targets = list(start.writes)
    targets[i], targets[j] = targets[j], targets[i]
    swapped = replace(start, args=(*targets, *start.args[num:]), writes=tuple(targets))
    rejects(
        edit(tiered, lambda op: [swapped] if op is start else [op]),
        "copy_start",
        f"{start.args[num + i]}",
        f"{start.writes[i]}",
    )
    sources = list(start.args[num:])
    sources[j] = sources[i]
    twice = replace(start, args=(*start.writes, *sources))
    rejects(
        edit(tiered, lambda op: [twice] if op is start else [op]),
        "copy_start",
        f"updated, is stored in {start.writes[j]}",
    )


@pytest.mark.parametrize("tiers", [WRITE, TO_HOST], ids="-".join)
def test_two_stores_to_one_leaf(tiered: Program, tiers: tuple[str, str]) -> None:
    program = lowered_on_device() if tiers == TO_HOST else tiered
    start, wait = next(p for p in transfers(program, tiers) if p[0].writes)
    again = replace(start, out=(replace(start.out[0], name="again"),))
    ops = [
        x for op in program.instructions for x in ((op, again, replace(wait, args=("again",))) if op is wait else (op,))
    ]
    rejects(replace(program, instructions=tuple(ops)), f"copy_start  -> again: {start.writes[0]} is written twice")
