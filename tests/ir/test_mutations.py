"""Programs broken by hand in every way that a rewrite could break them: each mutation of each line is refused, or
changes nothing that is read.

Most of these break a rule that fzero/ir/verifier.py names; some break none (an op that does not exist, an attribute
nobody reads, an axis that the mesh lacks), and are refused because what is not allowed is forbidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields, make_dataclass, replace
from typing import Any

import pytest
import torch
from cuts import cut_dims

import fzero as fz
from fzero import optim
from fzero.errors import VerifyError
from fzero.ir.attributes import Attrs, BlockCall, JoinAttrs, required
from fzero.ir.ops import OPS
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import verify
from fzero.sharding.placements import REPLICATED, Shard, flat_shard


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, x: torch.Tensor, *, key: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        x = layer(p, x)
    return fz.weighted((fz.random.dropout(key, x, 0.1) * params["scale"]).pow(2).sum(), x.numel())


def params_of(size: int) -> Any:
    layers = [{"w": torch.eye(size), "b": torch.zeros(size)} for _ in range(2)]
    return {"layers": layers, "scale": torch.ones(size)}


PARAMS = params_of(4)
APART = fz.AbstractMesh(data=2, unified_memory=False)
PROGRAMS: dict[str, tuple[Any, fz.AbstractMesh]] = {
    "stage_0": (fz.data_parallel(), fz.AbstractMesh(data=2)),
    "stage_1": (fz.shard_opt_state(), fz.AbstractMesh(data=2)),
    "stage_2_accumulate": (fz.compose(fz.shard_grads(), fz.accumulate(2)), fz.AbstractMesh(data=2)),
    "stage_3_bf16": (fz.compose(fz.shard_params(), fz.mixed_precision("bf16")), fz.AbstractMesh(data=2)),
    "stage_3_stochastic": (
        fz.compose(fz.shard_params(), fz.mixed_precision("bf16", params="bf16")),
        fz.AbstractMesh(data=3),
    ),
    "stage_3_layerwise": (
        fz.compose(fz.shard_params(), fz.accumulate(3, schedule="layerwise")),
        fz.AbstractMesh(data=2),
    ),
    "hsdp_fp16": (
        fz.compose(fz.shard_params(), fz.data_parallel(axis="replica"), fz.mixed_precision("fp16")),
        fz.AbstractMesh(replica=2, data=2),
    ),
    "two_axes": (
        fz.compose(fz.shard_params(axis="data"), fz.shard_opt_state(axis=("data", "node")), fz.accumulate(2)),
        fz.AbstractMesh(node=2, data=2),
    ),
    "two_axes_once": (
        fz.compose(fz.shard_params(axis=("data", "node")), fz.hierarchical(), fz.mixed_precision("bf16")),
        fz.AbstractMesh(node=2, data=2),
    ),
    "cut_dims": (
        fz.compose(cut_dims("model", w=Shard(1, 2), b=Shard(0)), fz.shard_opt_state(), fz.data_parallel(axis="model")),
        fz.AbstractMesh(data=2, model=2),
    ),
    "cut_twice": (
        fz.compose(
            cut_dims("model", w=Shard(1)),
            cut_dims("data", w=Shard(0), b=Shard(0)),
            fz.shard_params(axis=("data", "model")),
        ),
        fz.AbstractMesh(data=2, model=2),
    ),
    "tensor": (
        fz.compose(fz.tensor_parallel(rules={"w": 0, "b": 0}), fz.shard_params()),
        fz.AbstractMesh(data=2, model=2),
    ),
    "experts": (fz.expert_parallel(where=lambda path, leaf: leaf.ndim == 3), fz.AbstractMesh(expert=2)),
    "whole": (fz.shard_params(axis=("data", "node")), fz.AbstractMesh(node=2, data=2)),
    "pipeline": (
        fz.compose(fz.accumulate(2, schedule="layerwise"), fz.pipeline(stages=[1, 1]), fz.shard_opt_state()),
        fz.AbstractMesh(data=2, pipe=2),
    ),
    "offload_cpu": (fz.compose(fz.shard_params(), fz.offload("cpu", ("opt_state", "params"))), APART),
    "redundant": (fz.compose(fz.shard_params(), fz.redundant(every=2), fz.offload("cpu", "opt_state")), APART),
    "codes": (fz.compose(fz.shard_params(), fz.compress()), fz.AbstractMesh(data=2)),
    "codes_replica": (
        fz.compose(fz.shard_grads(), fz.data_parallel(axis="replica"), fz.compress(grads={"replica": "int4"})),
        fz.AbstractMesh(replica=2, data=2),
    ),
    "offload_nvme": (
        fz.compose(fz.mixed_precision("bf16"), fz.offload("nvme", ("opt_state", "params"), path="/scratch")),
        fz.AbstractMesh(data=1, unified_memory=False),
    ),
}


def experts_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = (x @ params["router"]).softmax(-1).topk(1, -1)
    rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2)
    return fz.experts.combine(fz.experts.matmul(rows, params["experts"], back), back).square().mean()


@functools.cache
def program_of(name: str) -> Program:
    transform, mesh = PROGRAMS[name]
    if name == "experts":
        params = {"router": torch.eye(4)[:, :2], "experts": torch.ones(2, 4, 4)}
        return fz.lower(transform(fz.train_step(experts_loss, optim.sgd(0.1))), mesh, params, torch.ones(6, 4)).program
    last = optim.muon(0.1, other=optim.adamw(0.1)) if name == "whole" else optim.adamw(0.1)
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), last))
    size = 64 if name.startswith("codes") else 4
    return fz.lower(transform(step), mesh, params_of(size), torch.ones(6, size)).program


def spliced(
    ops: tuple[Instruction, ...], path: tuple[int, ...], new: tuple[Instruction, ...]
) -> tuple[Instruction, ...]:
    """The lines with others in place of the one at this path."""
    at, *rest = path
    op = ops[at]
    inside = new if not rest else (replace(op, body=spliced(op.body, tuple(rest), new)),)
    return (*ops[:at], *inside, *ops[at + 1 :])


def every_op(ops: tuple[Instruction, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Instruction]]:
    for i, op in enumerate(ops):
        yield (*path, i), op
        yield from every_op(op.body, (*path, i))


def mutations(program: Program, op: Instruction) -> Iterator[tuple[str, tuple[Instruction, ...]]]:
    """What a line is broken to, with a name for how. Which of the leaves a line is about, the types cannot know: such
    swaps are left to `check_equivalent`."""
    row = OPS[op.op]
    read = {a for x, _ in program.walk() for a in x.args} | {*program.outputs}
    if op.writes or op.body or any(v.name in read for v in op.out):
        yield "dropped", ()
    if op.out or op.writes:
        yield "twice", (op, op)
    yield "another op", (replace(op, op="nothing"),)
    more = make_dataclass("Surprise", [("surprise", int, 1)], bases=(row.attrs,), frozen=True, kw_only=True)
    said = {f.name: getattr(op.attrs, f.name) for f in fields(op.attrs)}
    yield "an attribute nobody knows", (replace(op, attrs=more(**said)),)
    for name in required(row.attrs):
        yield f"without {name}", (op.saying(**{name: None}),)
        yield "without attributes", (replace(op, attrs=Attrs()),)
    for name in said:
        yield f"{name} of another type", (op.saying(**{name: 1.5j}),)
    for name in (f.name for f in fields(BlockCall) if op.block is not None):
        yield f"{name} of another type", (op.saying(block=replace(op.block, **{name: 1.5j})),)
    if op.axes:
        yield "an axis that the mesh lacks", (op.saying(axes=("nowhere",)),)
        yield "no axes", (op.saying(axes=()),)
    if isinstance(op.attrs, JoinAttrs):
        yield "an unknown reduction", (op.saying(reduction="mean"),)
        # of a shard that is already summed over ranks its type does not say how it adds up over micro-batches: left to
        # `check_equivalent`
        told = all(program.values_by_name[a].placement.partial for a in op.args)
        for kind in {"sum", "max", "min"} - {op.attrs.reduction} if told else ():
            yield f"a reduction by {kind}", (op.saying(reduction=kind),)
    if said.get("count") is not None:
        yield "another count", (op.saying(count=op.count + 5),)
    if op.micro is not None and op.op in ("take_part", "rank_index"):
        yield "a micro-batch too far", (op.saying(micro=(9, op.micro[1])),)
    for i, arg in enumerate(op.args):
        yield f"argument {i} that is not made", (replace(op, args=(*op.args[:i], "nobody", *op.args[i + 1 :])),)
        if op.op not in ("all_gather_start", "reduce_scatter_start", "all_reduce_start") or len(op.args) == 1:
            yield f"argument {i} missing", (replace(op, args=(*op.args[:i], *op.args[i + 1 :])),)
        if arg in program.leaves and op.op != "take_part":
            yield f"argument {i} is the batch", (replace(op, args=(*op.args[:i], "batch", *op.args[i + 1 :])),)
    yield "one argument more", (replace(op, args=(*op.args, "step")),)
    for i, v in enumerate(op.out):
        other = torch.float64 if v.dtype != torch.float64 else torch.float32
        changes = {"shape": (*v.shape, 7), "placement": flat_shard(["nowhere"]), "tier": "disk"} | (
            {"dtype": other} if not row.args else {}
        )
        changes |= {} if v.placement.in_flight else {"dtype": other}
        if v.placement.in_flight:
            changes = {"placement": REPLICATED}
        if v.placement != REPLICATED:
            yield (
                f"result {i} taken for replicated",
                (replace(op, out=(*op.out[:i], replace(v, placement=REPLICATED), *op.out[i + 1 :])),),
            )
        if v.placement.grid:
            for how, grid in {
                "no finer cut": (),
                "another": ("node", "data"),
                "an unknown": ("data", "nowhere"),
            }.items():
                placement = replace(v.placement, grid=grid)
                out = (*op.out[:i], replace(v, placement=placement), *op.out[i + 1 :])
                yield f"result {i} padded for {how}", (replace(op, out=out),)
        if v.placement.dims:
            *before, (dim, groups) = v.placement.dims
            for how, dims in {"no dim": before, "another dim": [*before, Shard(1 - dim, groups)]}.items():
                at = v.placement
                placement = replace(at, axes=()).sharded(at.flat_axes, at.grid, dims)
                out = (*op.out[:i], replace(v, placement=placement), *op.out[i + 1 :])
                yield f"result {i} cut along {how}", (replace(op, out=out),)
        for what, x in changes.items():
            yield (
                f"result {i} of another {what}",
                (replace(op, out=(*op.out[:i], replace(v, **{what: x}), *op.out[i + 1 :])),),
            )
    if op.out:
        yield "a result missing", (replace(op, out=op.out[:-1]),)
        yield "one result more", (replace(op, out=(*op.out, replace(op.out[0], name="more"))),)
    if op.writes:
        yield "writes nothing", (replace(op, writes=()),)
        yield "writes one less", (replace(op, writes=op.writes[:-1]),)
        yield "writes the batch", (replace(op, writes=("batch", *op.writes[1:])),)
    else:
        yield "writes a leaf", (replace(op, writes=("step",)),)
    if op.body:
        yield "an empty body", (replace(op, body=()),)
    else:
        yield "a body", (replace(op, body=(Instruction("zeros", (), (replace(program.inputs[0], name="inside"),)),)),)


@pytest.mark.full(keep=["stage_0"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_mutation_is_accepted(name: str) -> None:
    program = program_of(name)
    tried, accepted = 0, []
    for path, op in every_op(program.instructions):
        for how, new in mutations(program, op):
            tried += 1
            try:
                verify(replace(program, instructions=spliced(program.instructions, path, new)))
            except VerifyError:
                continue
            accepted.append(f"{op.op} {op.fn} -> {', '.join(v.name for v in op.out)}: {how}")
    assert tried > 200
    assert not accepted, f"{len(accepted)} of {tried}:\n" + "\n".join(accepted[:40])


def test_the_programs_have_every_op() -> None:
    """Or an op's rule would be broken by nothing here."""
    seen = {op.op for name in PROGRAMS for op, _ in program_of(name).walk()}
    # of programs that are not cut, and of speculative updates: in test_verify.py and test_speculative_updates.py
    assert {*OPS} - seen == {"update", "rollback", "zeros"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_leaf_that_is_not_assigned_is_missed(name: str) -> None:
    """Deleting the assignment of a leaf by hand, whatever kind of line makes it."""
    program = program_of(name)
    for path, op in every_op(program.instructions):
        if op.writes and op.op in ("assign", "call"):
            with pytest.raises(
                VerifyError,
                match=r"is never written, but the step assigns it|that no line has written, is stored in it",
            ):
                verify(replace(program, instructions=spliced(program.instructions, path, ())))


def test_what_the_step_does_not_assign_is_not_written() -> None:
    program = program_of("stage_0")
    with pytest.raises(VerifyError, match=r"step is written, but the step does not assign it"):
        verify(replace(program, assigns=tuple(a for a in program.assigns if a != "step")))
