"""The verifier finds what a broken rewrite would do: each rule is broken by hand in a lowered program, and the line is
named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import VerifyError
from fzero.ir.attributes import CastAttrs, Over, ReduceAttrs, TakeShardAttrs
from fzero.ir.program import Instruction, Program, Value
from fzero.ir.verifier import verify
from fzero.sharding.placements import IN_FLIGHT, REPLICATED, flat_shard, varying


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        x = layer(p, x)
    return (x * params["scale"]).pow(2).mean()


PARAMS = {"layers": [{"w": torch.eye(4), "b": torch.zeros(4)} for _ in range(2)], "scale": torch.ones(4)}


def lowered(*transforms: Any) -> Program:
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)))
    return fz.lower(fz.compose(*transforms)(step), fz.AbstractMesh(data=2), PARAMS, torch.ones(4, 4)).program


@pytest.fixture(scope="module")
def stage3() -> Program:
    return lowered(fz.shard_params())


@pytest.fixture(scope="module")
def stage1() -> Program:
    return lowered(fz.shard_opt_state())


@pytest.fixture(scope="module")
def looped() -> Program:
    return lowered(fz.shard_params(), fz.accumulate(2))


def first(program: Program, found: Callable[[Instruction], bool]) -> int:
    return next(i for i, op in enumerate(program.instructions) if found(op))


def of_kind(name: str) -> Callable[[Instruction], bool]:
    return lambda op: op.op == name


def is_block(op: Instruction) -> bool:
    return op.op == "call" and op.block is not None


def is_update(op: Instruction) -> bool:
    return op.op == "call" and bool(op.writes)


def with_instructions(program: Program, *ops: Instruction) -> Program:
    """A new program: nothing cached of the old one."""
    fields = {f: getattr(program, f) for f in Program.__dataclass_fields__}
    return Program(**{**fields, "instructions": tuple(ops)})


def changed(program: Program, at: int, *new: Instruction) -> Program:
    return with_instructions(program, *program.instructions[:at], *new, *program.instructions[at + 1 :])


def rejects(program: Program, *words: str) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(program)
    text = str(caught.value)
    assert text.startswith("fzero.verify: ") and text.splitlines()[-1].startswith("Fix: ")
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"
    return text


def test_what_lowering_makes_is_right(stage3: Program, stage1: Program, looped: Program) -> None:
    for program in (stage3, stage1, looped):
        assert verify(program) is program


def test_every_broken_rule_is_listed(stage3: Program) -> None:
    wait, last = first(stage3, of_kind("wait")), len(stage3.instructions) - 1
    broken = with_instructions(
        stage3,
        *stage3.instructions[:wait],
        *stage3.instructions[wait + 1 : last],
        replace(stage3.instructions[last], args=("nothing", "nowhere")),
    )
    text = rejects(
        broken, "is never waited for", "nothing is read before it is made", "nowhere is read before it is made"
    )
    assert len(text.splitlines()) > 5


# --- starts and waits ---


@pytest.mark.parametrize("kind", ["all_gather_start", "reduce_scatter_start", "all_reduce_start"])
def test_missing_wait(stage3: Program, kind: str) -> None:
    start = stage3.instructions[first(stage3, of_kind(kind))]
    wait = first(stage3, lambda op: op.op == "wait" and op.args == (start.out[0].name,))
    rejects(changed(stage3, wait), f"{kind}  -> {start.out[0].name}: {start.out[0].name} is never waited for")


def test_double_wait(stage3: Program) -> None:
    at = first(stage3, of_kind("wait"))
    wait = stage3.instructions[at]
    again = replace(wait, out=tuple(replace(v, name=f"{v.name}_again") for v in wait.out))
    rejects(
        changed(stage3, at, wait, again),
        f"{wait.args[0]} was not started, or is waited for twice",
        f"wait  -> {again.out[0].name}",
    )


def test_wait_for_what_was_not_started(stage3: Program) -> None:
    at = first(stage3, of_kind("wait"))
    rejects(
        changed(stage3, at, replace(stage3.instructions[at], args=("params['scale']",))),
        "params['scale'] was not started",
    )


def test_read_while_moving(stage3: Program) -> None:
    at = first(stage3, of_kind("all_gather_start"))
    handle = stage3.instructions[at].out[0]
    read = Instruction(
        "cast",
        (handle.name,),
        (replace(handle, name="early", placement=REPLICATED),),
        attrs=CastAttrs(dtype=handle.dtype),
    )
    rejects(changed(stage3, at, stage3.instructions[at], read), "cast  -> early", f"{handle.name} is still moving")


def test_gathered_values_before_their_wait(stage3: Program) -> None:
    at = first(stage3, is_block)
    wait = first(
        stage3, lambda op: op.op == "wait" and bool({v.name for v in op.out} & set(stage3.instructions[at].args))
    )
    late = with_instructions(
        stage3,
        *(x for i, x in enumerate(stage3.instructions[: at + 1]) if i != wait),
        stage3.instructions[wait],
        *stage3.instructions[at + 1 :],
    )
    rejects(
        late, f"call {stage3.instructions[at].fn} -> {stage3.instructions[at].out[0].name}", "is read before it is made"
    )


def test_wait_that_hands_back_something_else(stage3: Program) -> None:
    at = first(stage3, of_kind("wait"))
    wait = stage3.instructions[at]
    for out in (replace(wait.out[0], dtype=torch.float16), replace(wait.out[0], shape=(7,))):
        rejects(
            changed(stage3, at, replace(wait, out=(out, *wait.out[1:]))),
            f"wait  -> {out.name}",
            "different shapes or dtypes",
        )


def test_wait_that_hands_back_another_placement(stage3: Program) -> None:
    gather = first(stage3, lambda op: op.op == "wait" and op.args[0].startswith("gather"))
    wait = stage3.instructions[gather]
    as_shard = tuple(replace(v, placement=flat_shard(["data"])) for v in wait.out)
    rejects(changed(stage3, gather, replace(wait, out=as_shard)), f"wait  -> {wait.out[0].name}", "shard(data)")
    scatter = first(stage3, lambda op: op.op == "wait" and op.args[0].startswith("scatter"))
    wait = stage3.instructions[scatter]
    as_replicated = tuple(replace(v, placement=REPLICATED) for v in wait.out)
    rejects(changed(stage3, scatter, replace(wait, out=as_replicated)), f"wait  -> {wait.out[0].name}", "replicated")


# --- names ---


def test_read_before_made(stage3: Program) -> None:
    at = first(stage3, is_block)
    rejects(
        changed(stage3, at, replace(stage3.instructions[at], args=("nobody", *stage3.instructions[at].args[1:]))),
        f"call {stage3.instructions[at].fn}",
        "nobody is read before it is made",
    )


def test_made_twice(stage3: Program) -> None:
    at = first(stage3, is_block)
    rejects(
        changed(stage3, at, stage3.instructions[at], stage3.instructions[at]),
        f"{stage3.instructions[at].out[0].name} is made twice",
    )


def test_a_leaf_made_again(stage3: Program) -> None:
    at = first(stage3, is_block)
    out = (replace(stage3.instructions[at].out[0], name="params['scale']"), *stage3.instructions[at].out[1:])
    rejects(changed(stage3, at, replace(stage3.instructions[at], out=out)), "params['scale'] is made twice")


def test_what_a_loop_makes_stays_in_it(looped: Program) -> None:
    loop = looped.instructions[first(looped, of_kind("loop"))]
    inner = next(op.out[0] for op in loop.body if is_block(op))
    copy = Instruction(
        "cast",
        (inner.name,),
        (replace(inner, name="leaked", placement=REPLICATED),),
        attrs=CastAttrs(dtype=inner.dtype),
    )
    rejects(
        with_instructions(looped, *looped.instructions, copy),
        "cast  -> leaked",
        f"{inner.name} is read before it is made",
    )


def test_rules_hold_inside_a_loop(looped: Program) -> None:
    at = first(looped, of_kind("loop"))
    loop = looped.instructions[at]
    wait = next(i for i, op in enumerate(loop.body) if op.op == "wait")
    rejects(changed(looped, at, replace(loop, body=(*loop.body[:wait], *loop.body[wait + 1 :]))), "is never waited for")


# --- functions ---


def test_unknown_function(stage3: Program) -> None:
    at = first(stage3, is_block)
    rejects(changed(stage3, at, replace(stage3.instructions[at], fn="nothing")), "call nothing", "no function nothing")


def test_wrong_number_of_arguments(stage3: Program) -> None:
    at = first(stage3, is_block)
    op = stage3.instructions[at]
    rejects(
        changed(stage3, at, replace(op, args=op.args[:-1])),
        f"{op.fn} takes {len(op.args)} arguments, gets {len(op.args) - 1}",
    )


def test_wrong_number_of_results(stage3: Program) -> None:
    at = first(stage3, is_block)
    op = stage3.instructions[at]
    more = replace(op, out=(*op.out, replace(op.out[0], name="one_more")))
    rejects(changed(stage3, at, more), f"{op.fn} returns {len(op.out)} values, {len(op.out) + 1} are named")
    rejects(changed(stage3, at, replace(op, out=())), f"{op.fn} returns {len(op.out)} values, 0 are named")


def test_arguments_of_other_shapes_and_dtypes(stage3: Program) -> None:
    at = first(stage3, is_block)
    op = stage3.instructions[at]
    swapped = replace(op, args=tuple(reversed(op.args)))
    rejects(changed(stage3, at, swapped), f"{op.fn} takes float32[")
    for out in (replace(op.out[0], dtype=torch.float64), replace(op.out[0], shape=(5, 4))):
        rejects(
            changed(stage3, at, replace(op, out=(out, *op.out[1:]))),
            f"{op.fn} returns float32[",
            f"{out.name} is",
        )


def test_a_block_gets_no_shards(stage3: Program) -> None:
    at = first(stage3, is_block)
    op = stage3.instructions[at]
    names = [v.name for w in stage3.instructions[:at] if w.op == "wait" for v in w.out if v.name in op.args]
    leaf = next(n for n in stage3.leaves if n.startswith("params['layers'][0]"))
    rejects(
        changed(stage3, at, replace(op, args=tuple(leaf if a == names[0] else a for a in op.args))),
        f"{leaf} is shard(data), a block takes replicated or varying values",
    )


def test_a_block_gets_no_summands(stage3: Program) -> None:
    values = stage3.values()
    partial = next(v for v in values.values() if v.placement.partial and v.shape == (4,))
    at = max(i for i, op in enumerate(stage3.instructions) if any(v.name == partial.name for v in op.out))
    block = next(op for op in stage3.instructions if is_block(op))
    args = tuple(partial.name if values[a].shape == (4,) else a for a in block.args)
    again = replace(block, args=args, out=tuple(replace(v, name=f"{v.name}_again") for v in block.out))
    rejects(changed(stage3, at, stage3.instructions[at], again), f"{partial.name} is partial(data)")


def test_what_is_computed_from_a_varying_value_is_not_replicated(stage3: Program) -> None:
    at = first(stage3, is_block)
    op = stage3.instructions[at]
    whole = tuple(replace(v, placement=REPLICATED) for v in op.out)
    rejects(changed(stage3, at, replace(op, out=whole)), f"{whole[0].name} is replicated, but reads batch")


def test_casts(stage3: Program) -> None:
    source = stage3.instructions[first(stage3, is_block)].out[0]
    at = first(stage3, is_block) + 1
    for out, dtype in (
        (replace(source, name="c"), torch.bfloat16),
        (replace(source, name="c", dtype=torch.bfloat16, shape=(1,)), torch.bfloat16),
    ):
        cast = Instruction("cast", (source.name,), (out,), attrs=CastAttrs(dtype=dtype))
        rejects(
            with_instructions(stage3, *stage3.instructions[:at], cast, *stage3.instructions[at:]),
            "cast  -> c",
            "becomes",
        )


def test_a_cast_keeps_the_placement(stage3: Program) -> None:
    at = first(stage3, of_kind("all_gather_start"))
    shard = stage3.instructions[at].args[0]
    value = stage3.values()[shard]
    cast = Instruction(
        "cast", (shard,), (Value("c", value.shape, torch.bfloat16),), attrs=CastAttrs(dtype=torch.bfloat16)
    )
    rejects(changed(stage3, at, cast, stage3.instructions[at]), "cast  -> c", "becomes")


# --- placements ---


def test_gather_of_a_replicated_value(stage1: Program) -> None:
    at = first(stage1, of_kind("all_gather_start"))
    op = stage1.instructions[at]
    rejects(
        changed(stage1, at, replace(op, args=("params['scale']", *op.args[1:]))),
        f"all_gather_start  -> {op.out[0].name}",
        "params['scale'] is replicated",
    )


def test_gather_of_a_local_value(stage3: Program) -> None:
    at = first(stage3, is_block) + 1
    local = stage3.instructions[at - 1].out[0]
    handle, out = Value("g", (), torch.uint8, IN_FLIGHT), replace(local, name="all_of_it", placement=REPLICATED)
    ops = (
        Instruction("all_gather_start", (local.name,), (handle,), attrs=Over(axes=("data",))),
        Instruction("wait", ("g",), (out,)),
    )
    rejects(
        with_instructions(stage3, *stage3.instructions[:at], *ops, *stage3.instructions[at:]),
        "all_gather_start  -> g",
        f"{local.name} is varying(data)",
    )


@pytest.mark.parametrize("kind", ["reduce_scatter_start", "all_reduce_start"])
def test_reduction_of_what_is_no_summand(stage1: Program, kind: str) -> None:
    at = first(stage1, of_kind(kind))
    op = stage1.instructions[at]
    rejects(
        changed(stage1, at, replace(op, args=("params['scale']",))),
        f"{kind}  -> {op.out[0].name}",
        "params['scale'] is replicated",
    )


def test_reduction_that_the_optimizer_makes_of_no_summand(stage3: Program) -> None:
    at = first(stage3, lambda op: op.op == "all_reduce_start" and op.by == "optimizer")
    op = stage3.instructions[at]
    rejects(changed(stage3, at, replace(op, args=("step",))), "all_reduce_start", "step is replicated")


def test_a_sum_is_reduced_once(stage3: Program) -> None:
    """The result of a reduction is no summand any more."""
    at = first(stage3, lambda op: op.op == "wait" and op.args[0].startswith("reduce_0"))
    out = stage3.instructions[at].out[0]
    handle = Value("twice", (), torch.uint8, IN_FLIGHT)
    ops = (
        Instruction(
            "all_reduce_start",
            (out.name,),
            (handle,),
            attrs=ReduceAttrs(axes=("data",), reduction="sum"),
            by="data_parallel",
        ),
        Instruction("wait", ("twice",), (replace(out, name="doubled"),)),
    )
    rejects(
        changed(stage3, at, stage3.instructions[at], *ops), "all_reduce_start  -> twice", f"{out.name} is replicated"
    )


def test_take_shard_of_a_shard(stage3: Program) -> None:
    leaf = stage3.values()["params['scale']"]
    take = Instruction("take_shard", (leaf.name,), (replace(leaf, name="s"),), attrs=TakeShardAttrs(axes=("data",)))
    rejects(
        with_instructions(stage3, take, *stage3.instructions),
        "take_shard  -> s",
        "takes a shard of float32[4] shard(data)",
    )


def test_accumulate_keeps_shape_and_placement(looped: Program) -> None:
    at = first(looped, of_kind("loop"))
    loop = looped.instructions[at]
    inner = next(i for i, op in enumerate(loop.body) if op.op == "accumulate")
    op = loop.body[inner]
    for out in (replace(op.out[0], shape=(9,)), replace(op.out[0], placement=varying(["data"]))):
        body = (*loop.body[:inner], replace(op, out=(out,)), *loop.body[inner + 1 :])
        rejects(changed(looped, at, replace(loop, body=body)), f"accumulate  -> {out.name}", "accumulates to")


# --- outputs and writes ---


def test_outputs_are_made_and_replicated(stage3: Program) -> None:
    values = stage3.values()
    partial = next(n for n, v in values.items() if v.placement.partial and not v.shape)
    shard = next(n for n, v in values.items() if v.placement.is_flat_shard and n not in stage3.leaves)
    rejects(replace(stage3, outputs=("nowhere",)), "output nowhere is never made")
    rejects(replace(stage3, outputs=(partial,)), f"output {partial} is partial(data)")
    rejects(replace(stage3, outputs=(shard,)), f"output {shard} is shard(data)")
    rejects(replace(stage3, outputs=("params['scale']",)), "output params['scale'] is shard(data)")
    moving = next(n for n, v in values.items() if v.placement == IN_FLIGHT)
    rejects(replace(stage3, outputs=(moving,)), f"output {moving} is moving")


def test_an_output_is_not_a_buffer_that_was_overwritten(stage1: Program) -> None:
    rejects(replace(stage1, outputs=(*stage1.outputs, "step")), "output step has been overwritten")


def test_writes_of_other_things(stage3: Program) -> None:
    at = first(stage3, is_update)
    op = stage3.instructions[at]
    rejects(
        changed(stage3, at, replace(op, writes=("batch", *op.writes[1:]))),
        "batch is written, but is not a tensor of the state",
    )
    rejects(changed(stage3, at, replace(op, writes=("nowhere",))), "writes nowhere, which does not exist")


def test_written_twice(stage3: Program) -> None:
    at = first(stage3, is_update)
    rejects(
        changed(stage3, at, stage3.instructions[at], stage3.instructions[at]),
        f"{stage3.instructions[at].writes[0]} is written twice",
    )


def test_assigned_twice(stage3: Program) -> None:
    at = first(stage3, of_kind("assign"))
    rejects(
        changed(stage3, at, stage3.instructions[at], stage3.instructions[at]),
        f"{stage3.instructions[at].writes[0]} is written twice",
    )


def test_read_after_overwritten(stage3: Program, stage1: Program) -> None:
    at = first(stage3, is_update)
    leaf = next(w for w in stage3.instructions[at].writes if w.startswith("params"))
    value = stage3.values()[leaf]
    cast = Instruction("cast", (leaf,), (replace(value, name="late"),), attrs=CastAttrs(dtype=value.dtype))
    rejects(with_instructions(stage3, *stage3.instructions, cast), "cast  -> late", f"{leaf} has been overwritten")
    # a shard taken of a whole leaf is a view of it: overwritten with it
    taken = next(op for op in stage1.instructions if op.op == "take_shard")
    shard = taken.out[0]
    cast = Instruction("cast", (shard.name,), (replace(shard, name="late"),), attrs=CastAttrs(dtype=shard.dtype))
    rejects(
        with_instructions(stage1, *stage1.instructions, cast), "cast  -> late", f"{shard.name} has been overwritten"
    )


def test_a_parameter_is_not_gathered_after_its_update(stage3: Program) -> None:
    """A gather that slips behind the update would read tomorrow's parameters."""
    gather = stage3.instructions[first(stage3, of_kind("all_gather_start"))]
    again = replace(gather, out=(replace(gather.out[0], name="late"),))
    waits = Instruction(
        "wait",
        ("late",),
        tuple(Value(f"late_{i}", stage3.values()[a].shape, stage3.values()[a].dtype) for i, a in enumerate(again.args)),
    )
    rejects(
        with_instructions(stage3, *stage3.instructions, again, waits),
        "all_gather_start  -> late",
        "has been overwritten",
    )


def test_assigned_something_else(stage1: Program) -> None:
    at = first(stage1, lambda op: op.op == "assign" and op.args[0].startswith("params"))
    op = stage1.instructions[at]
    num = len(op.writes)
    other = replace(op, args=(*op.args[:num], "metric_loss", *op.args[num + 1 :]))
    rejects(changed(stage1, at, other), f"assign  -> : float32[] is assigned to {stage1.values()[op.args[0]]}")
    rejects(changed(stage1, at, replace(op, args=op.args[:-1])), f"assigns {num - 1} values to {num} leaves")


def test_waited_for_by_the_device_alone(stage3: Program) -> None:
    """What is no copy to the host; what the host reads; what is handed out."""
    at = first(stage3, lambda op: op.op == "wait" and bool(op.out))
    rejects(
        changed(stage3, at, stage3.instructions[at].saying(host=False)), "which is not a copy of values to the host"
    )
    step = fz.offload("cpu")(fz.train_step(loss_fn, optim.adamw(0.1)))
    mesh = fz.AbstractMesh(data=1, unified_memory=False)
    program = fz.lower(step, mesh, PARAMS, torch.ones(4, 4)).program
    starts = {op.out[0].name for op in program.instructions if op.tiers == ("device", "host") and not op.writes}
    at = first(program, lambda op: op.op == "wait" and op.args[0] in starts)
    op = program.instructions[at].saying(host=False)
    name = op.out[0].name
    rejects(changed(program, at, op), f"{name} is read on the host, and only the device has waited for it")
    handed_out = replace(changed(program, at, op), outputs=(*program.outputs, name))
    rejects(handed_out, f"output {name} is returned, and only the device has waited for it")
