"""The op table: every op is one row, few files name ops besides, and a made-up op takes one row and the pass that emits
it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.compiler import passes
from fzero.compiler.passes import Pass
from fzero.errors import VerifyError
from fzero.ir.attributes import Attrs
from fzero.ir.ops import OPS
from fzero.ir.ops.op import Op, Rules, Running, Text
from fzero.ir.program import Instruction, Program, Value, local_bytes
from fzero.ir.value_names import Names
from fzero.ir.verifier import verify
from fzero.mesh import AbstractMesh
from fzero.plan import cost
from fzero.plan.device_lookup import get_device
from fzero.plan.memory import memory_of

PACKAGE = Path(fz.__file__).parent


# --- a row: gradients clamped, element by element ---


@dataclass(frozen=True, kw_only=True)
class ClampAttrs(Attrs):
    bound: float


class Clamp(Op[ClampAttrs]):
    """A gradient with each element between two bounds."""

    name = "clamp"
    args, out = 1, 1
    attrs = ClampAttrs
    computes = "there"
    settles = True
    makes_own = True
    pool = "results"

    def check(self, op: Instruction, args: list[Value], rules: Rules) -> None:
        if replace(op.out[0], name=args[0].name) != args[0] or args[0].placement.partial:
            rules.bad(op, f"{args[0]} is clamped to {op.out[0]}")

    def touched(self, op: Instruction, values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return 2 * local_bytes(op.out[0], mesh)

    def text(self, op: Instruction, program: Program) -> Text:
        return Text(
            f"clamp({op.args[0]}, "
            f"{op.attrs.bound!r}{''.join(f', into=pool[{program.pool_index[id(op)]}]' for _ in op.into[:1])})"
        )

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda x, bound, into=(None,): torch.clamp(x, -bound, bound, out=into[0])


def clamp_gradients(program: Program, bound: float) -> Program:
    """The pass: what an update reads of the backward is clamped before."""
    ops: list[Instruction] = []
    for op in program.instructions:
        grads = [a for a in op.args if a.startswith("d_")] if op.by == "optimizer" and op.writes else []
        names = {a: f"{a}_clamped" for a in grads}
        values = program.values_by_name
        ops += [
            Instruction("clamp", (a,), (replace(values[a], name=names[a]),), attrs=ClampAttrs(bound=bound), by="clamp")
            for a in grads
        ]
        ops.append(op.rename(names))
    return replace(program, instructions=tuple(ops))


@pytest.fixture
def clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "clamp", Clamp())
    add(monkeypatch, "clamp", lambda program: clamp_gradients(program, 0.01))


def add(monkeypatch: pytest.MonkeyPatch, name: str, rewrite: Callable[[Program], Program]) -> None:
    """Adds a pass behind the cut of the update."""
    at = 1 + next(i for i, x in enumerate(passes.PASSES) if x.name == "partition_update")
    more = Pass(name, rewrite, lambda at: True)
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:at], more, *passes.PASSES[at:]))


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = layer(p, x)
    return (x - 1).square().mean()


PARAMS = [{"w": torch.linspace(-0.5, 0.5, 64 * 64).reshape(64, 64), "b": torch.zeros(64)} for _ in range(2)]
BATCH = torch.linspace(-1, 1, 4 * 64).reshape(4, 64)


def step(optimizer: Any) -> Any:
    return fz.shard_params(fz.train_step(loss_fn, optimizer))


@pytest.mark.usefixtures("clamped")
def test_a_made_up_op_is_one_row_and_the_pass_that_emits_it() -> None:
    lowered = fz.lower(step(optim.sgd(0.1)), fz.AbstractMesh(data=2), PARAMS, BATCH)
    program = lowered.program
    ops = [op for op, _ in program.walk() if op.op == "clamp"]
    assert len(ops) == 4 and all(op.args[0].startswith("d_") for op in ops)
    assert (
        "clamp(" in str(program)
        and "clamp(" in str(lowered.after("clamp"))
        and "clamp(" not in str(lowered.after("partition_update"))
    )
    device = get_device("h100", "cuda")
    assert all(
        cost.seconds(op, program, device) == 2 * local_bytes(op.out[0], program.mesh) / device.memory_bandwidth
        for op in ops
    )
    assert any(op.into for op in ops)  # in the pool
    number = {id(op): i for i, (op, _) in enumerate(program.walk())}
    sampled = {sample.line for sample in memory_of(program, lambda f: 0)}
    assert sampled >= {number[id(op)] for op in ops} and lowered.plan.peak_bytes > 0
    wrong = ops[0].saying(bound="1")
    with pytest.raises(VerifyError, match="bound = '1' is not a float"):
        verify(program.map_instructions(lambda op: [wrong if op is ops[0] else op]))
    with pytest.raises(VerifyError, match="is clamped to"):
        other = replace(ops[0], out=(replace(ops[0].out[0], shape=(3,)),))
        verify(program.map_instructions(lambda op: [other if op is ops[0] else op]))


@pytest.mark.usefixtures("clamped")
def test_a_made_up_op_runs_and_is_interpreted() -> None:
    train = fz.compile(step(optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    state = train.init(PARAMS)
    got, _ = train(state, BATCH)
    assert any(op.op == "clamp" for op, _ in train.program.walk())
    params = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in PARAMS]
    loss_fn(params, BATCH).backward()
    for p, q in zip(params, got.params, strict=True):
        for k in p:
            want = p[k].detach() - 0.1 * p[k].grad.clamp(-0.01, 0.01)
            torch.testing.assert_close(q[k].reshape(want.shape), want, rtol=1e-6, atol=1e-7)
    report = fz.testing.check_equivalent(step(optim.sgd(0.1)), PARAMS, BATCH, fz.make_mesh(data=1), raises=False)
    assert not report.equivalent  # the plain step has no pass
    # not what its function makes, nor what moves
    assert "clamp(" in report.blame.line.text and report.blame.line.value == "d_p[1].b_clamped"
    assert "differs from its value in the plain step" in str(report)


def test_a_violation_names_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    without = lambda program: replace(program, instructions=tuple(x for x in program.instructions if x.op != "wait"))  # noqa: E731
    add(monkeypatch, "drop_waits", without)
    with pytest.raises(VerifyError, match="found after the pass 'drop_waits'"):
        fz.lower(step(optim.sgd(0.1)), fz.AbstractMesh(data=2), PARAMS, BATCH)


def test_the_passes_that_run_are_listed_and_their_programs_can_be_had() -> None:
    lowered = fz.lower(step(optim.sgd(0.1)), fz.AbstractMesh(data=2), PARAMS, BATCH)
    ran = ["trace", "fuse", "remat", "shard", "partition_update", "hoist_updates", "overlap", "pool"]
    assert [*lowered.stages()] == ran
    assert str(lowered.after("pool")) == str(lowered.program)
    assert {*ran[1:]} < {x.name for x in passes.PASSES}
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"(?s)'batch' does not run for this step.*one of trace, fuse, remat"
    ):
        lowered.after("batch")
    assert any(op.op == "update" for op in lowered.after("shard").instructions) and not any(
        op.op == "update" for op in lowered.after("partition_update").instructions
    )
    with pytest.raises(fz.errors.FzeroValueError, match="no pass 'inline'"):
        lowered.after("inline")


def test_ops_are_named_where_they_are_emitted() -> None:
    """Beside the table ten files name four ops or more: the passes that emit them."""
    named = {}
    for path in PACKAGE.rglob("*.py"):
        found = {
            x.value for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Constant) and x.value in {*OPS}
        }
        if len(found) >= 4 and "ops" not in path.parts:
            named[path.relative_to(PACKAGE).as_posix()] = sorted(found)
    assert len(named) <= 10 and all(path.startswith(("compiler/", "transforms/")) for path in named), named


def test_each_row_is_complete() -> None:
    """Whatever a line can be asked is answered by its row, or is never asked of it."""
    for name, row in OPS.items():
        assert row.name == name and type(row).__doc__
        assert type(row).check is not Op.check
        # A call runs a subgraph, a loop is Python's, and an update is partitioned before it runs.
        if name not in ("call", "loop", "update"):
            assert type(row).runs is not Op.runs or type(row).names is not Op.names, name


def test_a_row_is_checked_when_it_is_defined() -> None:
    wrong = {"computes": "moon", "pool": "lake", "args": 1.5, "writes": "twice", "settles": "no", "attrs": int}
    with pytest.raises(fz.errors.FzeroTypeError, match="the row Wrong is invalid") as found:
        type("Wrong", (Op,), {"name": "a b", **wrong})
    assert all(f"{field}={value!r}: must be " in str(found.value) for field, value in wrong.items())
    assert "name='a b'" in str(found.value) and "\nFix: " in str(found.value)


def test_an_op_added_later_hides_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Names()("clamp") == "clamp"
    monkeypatch.setitem(OPS, "clamp", Clamp())
    assert Names()("clamp") == "clamp_"
