"""The list of passes: what runs, what may be skipped, what each changed, the rules between passes, and where rewrites
of transforms stand."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import test_expert_parallel as experts
import torch
from replaced_passes import replace_pass
from test_mutations import APART, PARAMS, loss_fn, params_of

import fzero as fz
from fzero import optim
from fzero._utils.units import size
from fzero.compiler import buffer_allocation, passes
from fzero.compiler import pass_invariants as rules
from fzero.compiler.lowered import Lowered
from fzero.compiler.passes import PASSES
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.ir.ops import STARTS, transfer_bytes
from fzero.ir.ops.op import Op
from fzero.ir.printer import show
from fzero.ir.program import Instruction, Program
from fzero.ir.verifier import verify
from fzero.transforms import offload
from fzero.transforms.transform import Transform

candidates_file = importlib.import_module("fzero.compiler.candidate_programs")

STEPS = {
    "plain": (fz.compose(), fz.AbstractMesh(data=1)),
    "zero-3": (fz.shard_params(), fz.AbstractMesh(data=2)),
    "whole": (fz.shard_params(), fz.AbstractMesh(data=2)),
    "codes": (fz.compose(fz.shard_params(), fz.compress()), fz.AbstractMesh(data=2)),
    "cpu": (
        fz.compose(fz.shard_params(), fz.mixed_precision("bf16"), fz.offload("cpu", ("opt_state", "params"))),
        APART.of_type("cuda"),
    ),
    "nvme": (
        fz.compose(fz.shard_params(), fz.offload("nvme", ("opt_state", "params", "gradients"), path="/s")),
        APART,
    ),
    "all": (
        fz.compose(fz.shard_params(), fz.accumulate(2), fz.redundant(), fz.offload("cpu", "opt_state")),
        APART,
    ),
    "stages": (
        fz.compose(fz.accumulate(2, schedule="layerwise"), fz.pipeline(schedule="zb")),
        fz.AbstractMesh(pipe=2),
    ),
}
"""Steps, with their meshes."""


def lower(name: str, *more: Any, **kwargs: Any) -> Lowered:
    if name == "experts":
        step = fz.compose(*more)(experts.step())
        return fz.lower(step, fz.AbstractMesh(expert=2), experts.params(), experts.batch(), **kwargs)
    transform, mesh = STEPS[name]
    last = optim.muon(0.1, other=optim.adamw(0.1)) if name == "whole" else optim.adamw(0.1)
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), last))
    size = 64 if name == "codes" else 4
    return fz.lower(fz.compose(transform, *more)(step), mesh, params_of(size), torch.ones(6, size), **kwargs)


RAN = {
    "experts": "fuse remat dim_sharding shard partition_update hoist_updates overlap pool",
    "plain": "fuse remat partition_update hoist_updates pool",
    "zero-3": "fuse remat shard partition_update hoist_updates overlap pool",
    "whole": "fuse remat shard partition_update deal hoist_updates overlap pool",
    "codes": "fuse remat shard compress partition_update hoist_updates overlap pool",
    "cpu": "fuse copies remat shard partition_update hoist_updates tiers overlap pool batch device_waits",
    "nvme": "fuse remat shard partition_update gradients hoist_updates tiers overlap pool device_waits",
    "stages": "fuse remat split_backward accumulate partition_update hoist_updates stages overlap pool",
    "all": "fuse remat accumulate shard partition_update hoist_updates tiers overlap redundant pool device_waits",
}


@pytest.mark.full(keep=["plain", "zero-3"])
@pytest.mark.parametrize("name", RAN)
def test_the_passes_that_are_wanted_run(name: str) -> None:
    lowered = lower(name)
    assert [*lowered.stages()] == ["trace", *RAN[name].split()]
    assert [x.name for x in PASSES if x.name in lowered.stages()] == RAN[name].split()
    texts = [show(program, fold=False) for program in lowered.stages().values()]
    for number, passed in enumerate(RAN[name].split()):
        changed = [x for x in lowered.diff(passed, fold=False).splitlines() if not x.startswith(("---", "+++", "@@"))]
        removed, added = ([x[1:] for x in changed if x[0] in (sign, " ")] for sign in "-+")
        before, after = (texts[i].splitlines() for i in (number, number + 1))
        assert {*removed} <= {*before} and {*added} <= {*after} and bool(changed) == (before != after)


def test_an_evaluation_goes_through_the_same_list() -> None:
    fn = lambda p, x: (x @ p["scale"]).mean()  # noqa: E731
    step = fz.shard_params(fz.eval_step(fn))
    lowered = fz.lower(step, fz.AbstractMesh(data=2), PARAMS, (torch.ones(6, 4),))
    assert [*lowered.stages()] == ["trace", "shard", "overlap", "pool"]
    assert [*fz.lower(step, fz.AbstractMesh(data=1), PARAMS, (torch.ones(6, 4),)).stages()] == ["trace", "pool"]


@pytest.mark.full(keep=["rename", "redundant", "copies"])
@pytest.mark.parametrize("passed", PASSES, ids=lambda passed: passed.name)
def test_a_pass_is_skipped_or_refused_by_name(passed: passes.Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is verified, and has all that the other passes make."""
    name = next((name for name, ran in RAN.items() if passed.name in ran.split()), "zero-3")
    if passed.needed:
        with pytest.raises(
            FzeroValueError,
            match=f"(?s)cannot be skipped.*{passed.name}: .*Fix: one of fuse, remat, deal",
        ):
            lower(name, skip=(passed.name,))
    elif passed.name == "speculate":
        with pytest.raises(
            FzeroValueError, match=r"(?s)speculate: has nothing to do for this step.*these run: fuse, remat"
        ):
            lower(name, skip=("speculate",))
        initial_options = candidates_file.initial_options
        chosen = lambda *args: replace(initial_options(*args), speculative=("disk", "host"))  # noqa: E731
        monkeypatch.setattr(candidates_file, "initial_options", chosen)
        assert "speculate" in lower("cpu").stages() and "speculate" not in lower("cpu", skip="speculate").stages()
    else:
        assert [*lower(name, skip=(passed.name,)).stages()] == [
            "trace",
            *(x for x in RAN[name].split() if x != passed.name),
        ]


# --- rules between passes ---


def moved_off(program: Program) -> Program:
    """With the copies that belong to a later pass."""
    return offload.rewrite(program, offload.UpdatePlacement())


def without_a_place(program: Program, options: Any) -> Program:
    placed = buffer_allocation.rewrite(program, options)
    at = next(op for op in placed.instructions if op.op == "all_gather_start")
    return replace(placed, instructions=tuple(replace(x, into=()) if x is at else x for x in placed.instructions))


BROKEN: dict[str, tuple[Callable[..., Program], str, str]] = {
    "partition_update": (lambda program, _: program, "update", "the update is not yet partitioned"),
    "hoist_updates": (moved_off, "copy_start", "a copy between tiers, before copies"),
    "pool": (without_a_place, "all_gather_start", "it is communicated without a buffer in the arena"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_program_that_breaks_the_rules_of_its_stage_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite, op, text = BROKEN[name]
    replace_pass(monkeypatch, name, rewrite=rewrite)
    with pytest.raises(VerifyError, match=rf"(?s){op} .*: {text}.*found after the pass '{name}'"):
        lower("cpu" if name == "hoist_updates" else "zero-3")


@pytest.mark.parametrize("rule", [rules.update_is_partitioned, rules.on_device, rules.placed])
def test_a_rule_holds_on_its_side_of_a_pass_alone(rule: Callable[[Program], None]) -> None:
    stages = lower("all").stages()
    at = {rules.update_is_partitioned: "partition_update", rules.on_device: "tiers", rules.placed: "pool"}[rule]
    for name, program in stages.items():
        behind = [*stages].index(name) >= [*stages].index(at)
        moves = any(op.op.endswith("_start") for op, _ in program.walk())
        if behind == (rule is not rules.on_device) or (rule is rules.placed and not moves):
            rule(program)
        else:
            with pytest.raises(VerifyError):
                rule(program)


# --- where a transform's own rewrite stands ---


def guest(name_: str, after_: str, order_: int = 60) -> Transform:
    """A transform that notes which passes are behind it."""

    @dataclass(frozen=True)
    class Guest(Transform):
        order: ClassVar[int] = order_
        name: ClassVar[str] = name_
        after: ClassVar[str] = after_

        def rewrite(self, program: Program) -> Program:
            return program

        def idle_in(self, program: Program) -> str:
            return "it looks, and changes nothing"

    return Guest()


@pytest.mark.full(keep=["deal", "overlap", "speculate"])
@pytest.mark.parametrize("after", ["trace", *(x.name for x in PASSES)])
def test_a_rewrite_stands_where_it_says(after: str) -> None:
    ran = [*lower("all", guest("look", after)).stages()]
    order = ["trace", *(x.name for x in PASSES)]
    assert [x for x in ran if x != "look"] == ["trace", *RAN["all"].split()]
    at = ran.index("look")
    assert all(order.index(x) <= order.index(after) for x in ran[:at])
    assert all(order.index(x) > order.index(after) for x in ran[at + 1 :])


def test_rewrites_behind_one_another() -> None:
    guests = guest("b", "c", 61), guest("a", "shard", 60), guest("c", "shard", 62), guest("d", "shard", 63)
    ran = " ".join(lower("zero-3", *guests).stages())
    assert "shard a c b d partition_update" in ran
    named = " ".join(lower("zero-3", guest("overlap", "trace")).stages())  # a name that is taken
    assert named.startswith("trace overlap() fuse") and named.endswith(
        "hoist_updates overlap pool"
    )  # a name that is taken
    with pytest.raises(TransformError, match=r"(?s)a: after 'b'.*b: after 'a'.*one of trace, fuse"):
        lower("zero-3", guest("a", "b"), guest("b", "a", 61))
    with pytest.raises(FzeroValueError, match="look: it carries out look"):
        lower("zero-3", guest("look", "pool"), skip=["look"])


# --- what a guest finds, and brings ---


@pytest.mark.parametrize("name", RAN)
def test_every_program_knows_the_gradients(name: str) -> None:
    """By the names under which updates read them, or copies for these."""
    for passed, program in lower(name).stages().items():
        assert [*program.grads] == [n for n, leaf in program.leaves.items() if leaf.role == "params"]
        read = {a for op, _ in program.walk() for a in op.args}
        assert read.issuperset(program.grads.values()), passed
        values = program.values_by_name
        assert (
            all(not values[g].placement.partial for g in program.grads.values())
            or passed in "trace fuse halves copies remat dim_sharding"
        )
    with pytest.raises(VerifyError, match=r"nothing, the gradient of params\['w'\], is never made"):
        verify(replace(program, grads={"params['w']": "nothing"}))


def test_specs_of_one_kind_have_their_own_numbers() -> None:
    step = fz.compose(fz.data_parallel(axis="replica"), fz.data_parallel(axis="data"))(
        fz.train_step(loss_fn, optim.sgd(0.1))
    )
    lowered = fz.lower(step, fz.AbstractMesh(replica=2, data=4), PARAMS, torch.ones(8, 4))
    sent = {
        axis: sum(
            transfer_bytes(x, lowered.program.values_by_name, lowered.program.mesh)
            for x in lowered.program.instructions
            if x.axes == (axis,) and x.op in STARTS
        )
        for axis in ("replica", "data")
    }
    for axis, nbytes in sent.items():
        (line,) = [x for x in str(lowered).splitlines() if x.startswith("# sent per step: ")]
        assert f"data_parallel(axis='{axis}') {size(nbytes)} in " in line
    assert sent["replica"] != sent["data"]


@pytest.mark.usefixtures("ops")
def test_a_transform_brings_its_ops() -> None:
    class Twice(Op):
        """A value times two."""

        name = "twice"
        args, out = 1, 1
        computes = "there"
        makes_own = True

        def check(self, op: Any, args: Any, rules: Any) -> None:
            pass

    @dataclass(frozen=True)
    class Doubling(Transform):
        order: ClassVar[int] = 60
        name: ClassVar[str] = "doubling"
        ops: ClassVar[tuple[Op[Any], ...]] = (Twice(),)

        def rewrite(self, program: Program) -> Program:
            (first, *_) = program.grads.values()
            value = replace(program.values_by_name[first], name="doubled")
            at = next(i for i, x in enumerate(program.instructions) if x.writes and first in x.args)
            ops = (
                Instruction("twice", (first,), (value,), by=self.name),
                program.instructions[at].rename({first: "doubled"}),
            )
            return replace(program, instructions=(*program.instructions[:at], *ops, *program.instructions[at + 1 :]))

    program = lower("zero-3", Doubling()).after("doubling")
    assert [x.op for x, _ in program.walk()].count("twice") == 1
    with pytest.raises(VerifyError, match="twice is an op of doubling, which is not a transform of this step"):
        verify(replace(program, transforms=()))
    for taken, of in (("twice", "doubling"), ("wait", "fzero")):
        row = type("Row", (Twice,), {"name": taken, "__doc__": "Another."})()
        with pytest.raises(FzeroTypeError, match=f"other: ops of these names exist already\n  {taken}: of {of}"):
            type("Other", (Transform,), {"name": "other", "ops": (row,)})


def test_a_rewrite_of_functions_alone_is_one() -> None:
    @dataclass(frozen=True)
    class Called(Transform):
        order: ClassVar[int] = 60
        name: ClassVar[str] = "called"

        def rewrite(self, program: Program) -> Program:
            functions = {name: replace(f, on="device") for name, f in program.functions.items()}
            return replace(program, functions=functions)

    assert "called" in lower("zero-3", Called()).stages()
