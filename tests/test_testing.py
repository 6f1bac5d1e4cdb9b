"""check_equivalent passes what is right and finds what is wrong: faults planted in rewrites, in functions and in what carries values, each named."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.comm import shared
from fzero.comm.host import Copies
from fzero.errors import EquivalenceError, FzeroTypeError, FzeroValueError, VerifyError
from fzero.optim import apply_updates
from fzero.program import base
from fzero.program.ir import Program
from fzero.runtime import build, compile, execute
from fzero.testing import check_equivalent
from fzero.testing.tolerance import longest_chain, unit
from fzero.transforms import remat, spread

WIDTH, ROWS = 48, 24  # large enough for places in the pool


@fz.block
def dense(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"])


@fz.block
def head(p, x, y):
    return ((x @ p["w"]).squeeze(-1) - y).square().mean()


def loss(params, batch):
    x = batch["x"]
    for p in params["layers"]:
        x = dense(p, x)
    return head(params["head"], x, batch["y"])


def dropped_loss(params, batch, *, key):
    return loss(params, {**batch, "x": fz.random.dropout(key, batch["x"], 0.5)})


def summed_loss(params, batch):
    return loss(params, batch) * batch["y"].shape[0]


def init(key):
    keys = fz.random.split(key, 4)
    layers = [{"w": fz.random.normal(k, (WIDTH, WIDTH)) * 0.1, "b": torch.zeros(WIDTH)} for k in keys[:3]]
    return {"layers": layers, "head": {"w": fz.random.normal(keys[3], (WIDTH, 1))}}


def batch(mesh: fz.Mesh | None = None) -> Any:
    keys = fz.random.split(fz.random.key(5), 2)
    whole = {"x": fz.random.normal(keys[0], (ROWS, WIDTH)), "y": fz.random.normal(keys[1], (ROWS,))}
    return whole if mesh is None else models.part(whole, mesh)


OPTIMIZER = lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))  # noqa: E731


# --- faults: each takes a monkeypatch ---


def maximum_for_sum(patch):
    patch.setitem(shared._COMBINE, "sum", torch.maximum)


def mean_for_sum(patch):
    wait = shared.SharedMemory.wait

    def halved(self, moving, into, together=False):
        out = wait(self, moving, into, together)
        return [x.div_(2) for x in out] if moving.kind == "scatter" else out

    patch.setattr(shared.SharedMemory, "wait", halved)


def gather_not_waited_for(patch):
    patch.setattr(shared.SharedMemory, "_gather", lambda self, whole, along: None)


def stale_cast(patch):
    cast = execute._cast
    patch.setattr(execute, "_cast", lambda x, dtype, into=None: cast(x, dtype) if into is None else into[0])


def buffer_of_another(patch):
    tensors = execute._tensors

    def overlapping(line, program, mesh, arenas):
        calls = [x for x in program.pooled if x.fn == "dense"]
        return tensors(calls[0] if line in calls else line, program, mesh, arenas)

    patch.setattr(execute, "_tensors", overlapping)


def leaves_swapped(patch):
    update = spread._Rewrite._update

    def swapped(self, line):
        lines = update(self, line)
        assigns = [i for i, x in enumerate(lines) if x.op == "assign" and "layers" in x.args[0]]
        a, b = (lines[i] for i in assigns[:2])
        half = len(a.writes)
        lines[assigns[0]] = dataclasses.replace(a, args=(*a.args[:half], *b.args[half:]))
        lines[assigns[1]] = dataclasses.replace(b, args=(*b.args[:half], *a.args[half:]))
        last = lines.pop(assigns[0])
        return [*lines, last]

    patch.setattr(spread._Rewrite, "_update", swapped)


def micro_batch_dropped(patch):
    patch.setattr(execute, "_accumulate", lambda total, part, into: into[0].copy_(part) if total is None else total)


def sum_rounded(patch):
    patch.setattr(execute, "_accumulate", lambda total, part, into: into[0].copy_(part) if total is None else total.add_(part.bfloat16()))


def first_micro_batch_only(patch):
    patch.setattr(execute, "_take_part", lambda whole, index, count: whole[: whole.shape[0] // count])


def offset_off_by_one(patch):
    take = execute._take_shard
    patch.setattr(execute, "_take_shard", lambda part_of, whole, axis: take(part_of, whole.reshape(-1).roll(1), axis))


def update_twice(patch):
    as_called = build.as_called

    def twice(function, run):
        call = as_called(function, run)
        return (lambda *args: (call(*args), call(*args))[0]) if function.name == "update_v2" else call

    patch.setattr(build, "as_called", twice)


def update_skipped(patch):
    as_called = build.as_called
    patch.setattr(build, "as_called", lambda function, run: (lambda *args: ()) if function.name == "update_v2" else as_called(function, run))


def clipping_lost(patch):
    def unclipped(optimizer, grads, opt_state, params):
        updates, state = optim.adamw(1e-2).update(grads, opt_state[1], params)
        return apply_updates(params, updates), (opt_state[0], state)

    patch.setattr(base, "apply_optimizer", unclipped)


def scale_wrong(patch):
    lower = sys.modules["fzero.lower"]  # fz.lower is the function
    whole = lower.lower_train
    patch.setattr(lower, "lower_train", lambda t: whole(dataclasses.replace(t, num_parts=1)))


def key_of_the_first(patch):
    part_index = execute._part_index
    patch.setattr(execute, "_part_index", lambda mesh, axes, micro=0, count=1: part_index(mesh, axes))


def update_not_assigned(patch):
    assign = execute._assign
    patch.setattr(execute, "_assign", lambda targets, sources: assign(targets, sources) if targets[0].dim() == 0 else None)


def saved_swapped(patch):
    rewrite = remat.rewrite

    def swapped(program: Program, policy: Any, *args: Any) -> Program:
        program = rewrite(program, policy, *args)
        if policy != "none":
            return program
        lines = list(program.lines)
        (at,) = [i for i, x in enumerate(lines) if "layers'][1]" in str(x.args) and x.fn.endswith("vjp")]
        *rest, a, b = lines[at].args
        lines[at] = dataclasses.replace(lines[at], args=(*rest, b, a))
        return dataclasses.replace(program, lines=tuple(lines))

    patch.setattr(remat, "rewrite", swapped)


def copy_not_made(patch):
    start = Copies.to_device_start
    patch.setattr(Copies, "to_device_start", lambda self, sources, into=None: start(self, [torch.zeros_like(x) for x in sources], into))


def wait_dropped(patch):
    whole = spread.rewrite

    def without(*args: Any) -> Program:
        program = whole(*args)
        first = next(x for x in program.lines if x.op == "wait")
        return dataclasses.replace(program, lines=tuple(x for x in program.lines if x is not first))

    patch.setattr(spread, "rewrite", without)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the step it is planted in, and what the report has to name."""

    plant: Callable[[pytest.MonkeyPatch], None]
    transforms: tuple[Any, ...]
    transform: str | None
    line: str
    why: str = "is not what the program says"
    loss: Callable[..., Any] = loss

    def found(self, mesh: fz.Mesh) -> Any:
        step = fz.compose(*self.transforms)(fz.train_step(self.loss, OPTIMIZER()))
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            return check_equivalent(step, init, batch(mesh), mesh, raises=False)

    def check(self, report: Any) -> None:
        name = self.plant.__name__
        assert not report.equivalent, name
        blame = report.blame
        assert (blame.transform or "none").split("(")[0] == (self.transform or "none"), f"{name}\n{report}"
        assert blame.line is not None and self.line in blame.line.text and self.why in blame.line.why, f"{name}\n{report}"


MEANT = "is not what the step means"
ALONE = [
    Fault(buffer_of_another, (), None, "vjp(", "which is not what was made"),
    Fault(micro_batch_dropped, (fz.remat("full"), fz.accumulate(2)), "accumulate", "accumulate("),
    Fault(sum_rounded, (fz.accumulate(3), fz.mixed_precision("fp32")), "accumulate", "accumulate("),
    Fault(first_micro_batch_only, (fz.accumulate(2, vertical=True),), "accumulate", "take_part("),
    Fault(update_twice, (fz.accumulate(2),), None, "update_v2("),
    Fault(update_skipped, (), None, "update_v2("),
    Fault(clipping_lost, (), None, "update", MEANT),
    Fault(scale_wrong, (fz.accumulate(2), fz.remat("full")), "accumulate", "scalars_0(", MEANT),
    Fault(key_of_the_first, (fz.accumulate(2),), "accumulate", "part_index(", loss=dropped_loss),
    Fault(stale_cast, (fz.mixed_precision("bf16"),), "mixed_precision", "cast("),
    Fault(saved_swapped, (fz.remat("none"), fz.accumulate(2)), "remat", "vjp(", MEANT),
]
TOGETHER = [
    Fault(maximum_for_sum, (fz.data_parallel(), fz.remat("full")), "data_parallel", "wait(reduce_"),
    Fault(mean_for_sum, (fz.shard_grads(),), "shard_grads", "wait(scatter_"),
    Fault(gather_not_waited_for, (fz.shard_params(), fz.accumulate(2)), "shard_params", "wait(gather_"),
    Fault(leaves_swapped, (fz.shard_opt_state(),), "shard_opt_state", "assign(", MEANT),
    Fault(offset_off_by_one, (fz.shard_opt_state(),), "shard_opt_state", "take_shard("),
    Fault(update_not_assigned, (fz.shard_opt_state(), fz.accumulate(2)), "shard_opt_state", "assign("),
]


@pytest.mark.parametrize("fault", ALONE, ids=lambda f: f.plant.__name__)
def test_a_planted_fault_is_named(fault):
    fault.check(fault.found(fz.make_mesh(data=1)))


def find_all(number: int) -> list[Any]:
    """On every rank: the reports of faults, and whether the same steps without them are equivalent."""
    mesh = fz.make_mesh(data=2)
    fault = TOGETHER[number]
    clean = dataclasses.replace(fault, plant=lambda patch: None).found(mesh)
    return [fault.found(mesh), clean]


@pytest.mark.parametrize("number", range(len(TOGETHER)), ids=lambda i: TOGETHER[i].plant.__name__)
def test_a_fault_between_ranks_is_named_on_every_rank(run_ranks, number):
    (found, clean), (other, _) = run_ranks(2, find_all, number)
    assert clean.equivalent
    assert found == other
    TOGETHER[number].check(found)
