"""pipeline: blocks divided among the ranks along an axis train as accumulate(m, schedule="layerwise") alone does."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import whitening
from replaced_passes import pass_named, replace_pass

import fzero as fz
from fzero import optim
from fzero.comm.collectives import ProcessGroups
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.ir.attributes import SendAttrs
from fzero.ir.program import Instruction, Program
from fzero.ir.stage_verifier import meeting
from fzero.ir.verifier import verify
from fzero.mesh import AbstractMesh
from fzero.plan.memory import resting_bytes
from fzero.plan.timeline import simulate
from fzero.sharding.layout import leaf_of
from fzero.transforms.pipeline import table, when

choose_stages = importlib.import_module("fzero.compiler.auto_stages")
WIDTH, WORDS, ROWS, LENGTH = 8, 12, 16, 4


@fz.block
def layer(p, x):
    return x + torch.tanh(x @ p["w"] + p["b"]) * p.get("by", 1.0)


def loss_fn(params, batch, *, key):
    """Glue before, between and behind the blocks; a value that skips stages; a mask of the batch that all blocks read;
    draws; the embedding, where it is tied, is the head's too."""
    mask = (batch["x"] > 0).unsqueeze(-1).float()
    x = first = params["emb"][batch["x"]]
    x = fz.random.dropout(key, x, 0.1)
    for i, p in enumerate(params["layers"]):
        x = layer(p, x) * mask.to(x.dtype)
        if i == 2:
            x = x * params["gate"]
    logits = (x + first) @ params.get("head", params["emb"]).T
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    counted = (batch["y"] > 0).flatten().float()
    return fz.weighted((loss * counted).sum(), counted.sum()), {"largest": logits.square().mean()}


def params(layers: int = 5, tied: bool = True) -> Any:
    g = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(shape, generator=g) * 0.4  # noqa: E731
    out = {
        "emb": made(WORDS, WIDTH),
        "layers": [{"w": made(WIDTH, WIDTH), "b": made(WIDTH), "by": made(WIDTH)} for _ in range(layers)],
        "gate": made(WIDTH),
    }
    return out if tied else {**out, "head": made(WORDS, WIDTH)}


def batch(parts: int = 1, index: int = 0) -> Any:
    g = torch.Generator().manual_seed(1)
    return {k: torch.randint(0, WORDS, (ROWS, LENGTH), generator=g).chunk(parts)[index] for k in "xy"}


def plain(optimizer: Any = None) -> Any:
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05))
    trained = lambda path, leaf: "by" not in path  # noqa: E731
    return fz.train_step(loss_fn, optimizer or clipped, has_aux=True, trainable=trained)


def pipelined(m: int, *more: Any, optimizer: Any = None, **how: Any) -> Any:
    return fz.compose(*more, fz.accumulate(m, schedule="layerwise"), fz.pipeline(**how))(plain(optimizer))


def equal(got: Any, want: Any, tolerance: float = 0.0) -> None:
    for path, x, y in zip(fz.tree.paths(got), fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, path=path: f"{path}: {text}")


OWN = [["F0", "F1", "F0.1", "B0.1", "B0", "F1.1", "B1.1", "B1"]] * 2
WEIGHTS = [["F0", "F1", "F0.1", "B0.1", "W0.1", "B0", "F1.1", "B1.1", "W0", "B1", "W1", "W1.1"]] * 2
ALONE = [
    *((p, m, {}) for p, m in ((2, 2), (2, 8), (4, 2), (4, 8))),
    *((p, m, {"schedule": "gpipe"}) for p, m in ((3, 4), (2, 4))),
    *((p, m, {"schedule": "interleaved", "chunks": 2}) for p, m in ((2, 2), (2, 4))),
    (2, 2, {"schedule": OWN, "chunks": 2}),
    (2, 2, {"schedule": WEIGHTS, "chunks": 2}),
    *((p, m, {"schedule": "zb"}) for p, m in ((2, 4), (4, 4))),
]


@pytest.mark.full
def test_alone_it_has_the_bits_of_accumulate() -> None:
    want: dict[tuple[int, bool], Any] = {}
    for p, m, how in ALONE:
        for tied in (True, False) if p == 2 else (p == 4,):
            mesh, one = AbstractMesh(pipe=p), AbstractMesh(data=1)
            if (m, tied) not in want:
                whole = fz.compose(fz.accumulate(m, schedule="layerwise"))(plain())
                want[m, tied] = fz.testing.simulate(whole, one, params(tied=tied), batch(), steps=2)
            equal(fz.testing.simulate(pipelined(m, **how), mesh, params(tied=tied), batch(), steps=2), want[m, tied])


BESIDE = {
    "zero-1": ({"data": 2, "pipe": 2}, [fz.shard_opt_state()], {"schedule": "gpipe"}),
    "interleaved": ({"data": 2, "pipe": 2}, [fz.shard_params()], {"schedule": "interleaved", "chunks": 2}),
    "zero-2": ({"pipe": 3, "data": 2}, [fz.shard_grads()], {}),
    "zero-3": ({"pipe": 2, "data": 2}, [fz.shard_params(), fz.remat("full")], {"stages": [1, 4]}),
    "gathered anew": ({"pipe": 2, "data": 2}, [fz.shard_params(), fz.mixed_precision("bf16")], {"gather": "micro"}),
    "weights": (
        {"pipe": 2, "data": 2, "model": 2},
        [fz.shard_params(), fz.tensor_parallel(rules={"w": 1, "b": 0, "by": 0})],
        {"schedule": "zb", "gather": "micro"},
    ),
    "recomputed": ({"pipe": 2}, [fz.remat("full")], {"schedule": "zb"}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BESIDE)
def test_beside_others_it_equals_the_plain_step(name: str) -> None:
    axes, more, how = BESIDE[name]
    fz.testing.check_equivalent(pipelined(4, *more, **how), params(), batch(), AbstractMesh(**axes), steps=2)


@fz.block
def gated(p, x):
    """A layer with parameters of one element."""
    return x + F.prelu(x @ p["w"], p["slope"]) * p["gate"] * p["scale"]


@fz.block
def normed(p, x):
    return x + torch.tanh(F.layer_norm(x, (WIDTH,), p["norm"]) @ p["w"]) @ p["v"]


def made(block: Any, num_own: int, decay: float = 0.0, **shapes: tuple[int, ...]) -> tuple[Any, Any, torch.Tensor]:
    """The loss of four layers with so many sets of parameters, those parameters, and a batch. `decay`: weight decay in
    the loss."""

    def loss(p, x):
        for i in range(4):
            x = block(p["layers"][i % num_own], x)
        found = (x @ p["head"]).square().mean()
        return found + decay * sum(w.square().sum() for q in p["layers"] for w in q.values()) if decay else found

    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g) * 0.4  # noqa: E731
    layers = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(num_own)]
    return loss, {"layers": layers, "head": draw(WIDTH, 2)}, draw(8, WIDTH)


SMALL_LEAVES = {
    "sgd": (optim.sgd(0.1), {}),
    "clipped": (optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05)), {}),
    "lamb": (optim.lamb(1e-2), {"schedule": "zb"}),
    "lion": (optim.lion(1e-2), {"schedule": "interleaved", "chunks": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL_LEAVES)
def test_parameters_of_one_element(name: str) -> None:
    optimizer, how = SMALL_LEAVES[name]
    loss, given, x = made(gated, 4, w=(WIDTH, WIDTH), slope=(1,), gate=(), scale=(1, 1))
    axes, more = ({"pipe": 2}, []) if name == "sgd" else ({"data": 2, "pipe": 2}, [fz.shard_params()])
    step = fz.compose(*more, fz.accumulate(2), fz.pipeline(**how))(fz.train_step(loss, optimizer))
    fz.testing.check_equivalent(step, given, x, AbstractMesh(**axes), steps=2)


@pytest.mark.full(keep=["1-0.0"])
@pytest.mark.parametrize(("num_own", "decay"), [(1, 0.0), (4, 0.01), (2, 0.01)])
def test_shared_layers_and_weight_decay_beside_tensor_parallel(num_own: int, decay: float) -> None:
    loss, given, x = made(normed, num_own, decay, w=(WIDTH, 2 * WIDTH), v=(2 * WIDTH, WIDTH), norm=(WIDTH,))
    rules = {"w": 1, "v": 0, "norm": 0} if num_own < 4 else {"w": 1, "v": 0}
    step = fz.train_step(loss, optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05)))
    step = fz.compose(fz.tensor_parallel(rules=rules), fz.accumulate(2), fz.pipeline())(step)
    fz.testing.check_equivalent(step, given, x, AbstractMesh(pipe=2, model=2), steps=2)


@pytest.mark.full(keep=["unclipped"])
@pytest.mark.parametrize("name", ["sgd", "lion", "lamb", "unclipped"])
def test_other_optimizers(name: str) -> None:
    made = {"sgd": optim.sgd(0.3, momentum=0.9), "lion": optim.lion(1e-2), "lamb": optim.lamb(1e-2)}
    optimizer = made.get(name, optim.adamw(0.05))
    want = fz.testing.simulate(
        fz.accumulate(4, schedule="layerwise")(plain(optimizer)), AbstractMesh(data=1), params(), batch(), steps=2
    )
    equal(
        fz.testing.simulate(pipelined(4, optimizer=optimizer), AbstractMesh(pipe=2), params(), batch(), steps=2), want
    )


@pytest.mark.full
def test_whole_matrices_are_dealt_on_each_stage() -> None:
    """Of two layers a pair on the first; of three one is left over on the second. No stage computes another's."""
    other = optim.adamw(0.01)
    muon = pipelined(4, fz.shard_params(), optimizer=optim.muon(0.02, ns_dtype="fp32", other=other), stages=[2, 3])
    mesh = AbstractMesh(pipe=2, data=2)
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(), batch(2)))
    programs = fz.lower(muon, mesh, *shapes).programs
    found = [[x.fn for x in p.instructions if x.by == "optimizer" and x.fn.startswith("whole")] for p in programs]
    assert [len(x) for x in found] == [2, 2]  # with that of the embedding
    label = lambda path, leaf: "matrices" if leaf.dim() == 2 else "other"  # noqa: E731
    whitened = optim.partition({"matrices": whitening(0.01), "other": other}, label)
    step = pipelined(4, fz.shard_opt_state(), optimizer=whitened)
    fz.testing.check_equivalent(step, params(), batch(), mesh, steps=2)


# --- on processes ---


def on_ranks(axes: dict[str, int], more: list[Any], how: Any, path: str, backend: str = "eager") -> Any:
    mesh = fz.make_mesh(**axes)
    index, parts = (mesh.index("data"), axes["data"]) if "data" in axes else (0, 1)
    rows = batch(parts, index)
    train = fz.compile(pipelined(4, *more, **how), mesh, backend=backend, batch=rows)
    state = train.init(params())
    metrics: Any = {}
    for _ in range(2):
        state, metrics = train(state, rows)
    held = {p: x.numel() for p, x in fz.tree.with_paths(state.params, "params")}
    there = {p: leaf_of(x)[0].is_on(mesh) for p, x in fz.tree.with_paths(state.params, "params")}
    assert all((held[p] > 0) == there[p] for p in held) and not all(there.values())
    programs = train._lowered.programs
    assert {p for p, x in train.program.leaves.items() if x.role == "params"} == {p for p in there if there[p]}
    assert len({len(x.leaves) for x in programs}) >= 1
    fz.checkpoint.save(path, state)
    state, metrics = train(state, rows)
    train.check_replicas(state)
    assert len(train.plan.stages) == axes["pipe"] and train.plan.bubble > 0
    return train.gather(state), {k: metrics[k] for k in ("loss", "grad_norm")}, held


def expected(m: int = 4, steps: int = 3) -> Any:
    return fz.testing.simulate(
        fz.accumulate(m, schedule="layerwise")(plain()), AbstractMesh(data=1), params(), batch(), steps=steps
    )


RANKS = {
    "alone": (2, {"pipe": 2}, [], {"schedule": "interleaved", "chunks": 2}, "eager"),
    "four": (4, {"pipe": 4}, [], {"schedule": "gpipe"}, "eager"),
    "zero-3": (4, {"pipe": 2, "data": 2}, [fz.shard_params()], {}, "eager"),
    "compiled": (2, {"pipe": 2}, [], {}, "inductor"),
    "weights": (2, {"pipe": 2}, [], {"schedule": "zb"}, "inductor"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RANKS)
def test_processes(run_ranks: Any, tmp_path: Path, name: str) -> None:
    size, axes, more, how, backend = RANKS[name]
    state, metrics = expected()
    tolerance = 0.0 if name in ("alone", "four") else 2e-5
    found = run_ranks(size, on_ranks, axes, more, how, str(tmp_path), backend, timeout=300)
    for got, told, _ in found:
        equal(got, state, tolerance)
        equal(told, {k: metrics[k] for k in told}, max(tolerance, 1e-7))
    if len(axes) == 1:
        total = sum(x.numel() for x in fz.tree.leaves(params()))
        assert sum(sum(held.values()) for *_, held in found) == total  # each leaf once
    # what it has saved goes on without stages
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    restored = train.restore(tmp_path, params())
    equal(fz.tree.leaves(restored), fz.tree.leaves(expected(steps=2)[0]), tolerance)


def checked(axes: dict[str, int]) -> str:
    step = pipelined(4, fz.mixed_precision("fp16"), schedule="zb")
    return str(fz.testing.check_equivalent(step, params(), batch(), fz.make_mesh(**axes), steps=2))


@pytest.mark.full
def test_equivalence_is_checked_on_ranks(run_ranks: Any) -> None:
    assert all("eager: equivalent in all" in text for text in run_ranks(2, checked, {"pipe": 2}, timeout=300))


def at_the_first_batch(axes: dict[str, int], more: list[Any]) -> Any:
    """The state after two steps of a pipeline compiled without a batch, and how many numbers this rank had of it."""
    mesh = fz.make_mesh(**axes)
    step = fz.compose(*more, fz.accumulate(4), fz.pipeline())(plain())
    train = fz.compile(step, mesh, backend="eager")
    state, given = train.init(params()), batch(axes.get("data", 1), mesh.index("data") if "data" in axes else 0)
    sizes = [sum(x.numel() for x in fz.tree.leaves(state.opt_state))]
    for _ in range(2):
        state, _ = train(state, given)
        sizes.append(sum(x.numel() for x in fz.tree.leaves(state.opt_state)))
    return train.gather(state), sizes


@pytest.mark.full
@pytest.mark.parametrize("data", [1, 2])
def test_stages_are_laid_out_at_the_first_batch(run_ranks: Any, data: int) -> None:
    axes, more = (
        ({"pipe": 2}, [fz.mixed_precision("fp16")]) if data == 1 else ({"pipe": 2, "data": 2}, [fz.shard_params()])
    )
    want = fz.accumulate(4)(plain())
    want, _ = fz.testing.simulate(want, AbstractMesh(data=1), params(), batch(), steps=2)
    found = run_ranks(2 * data, at_the_first_batch, axes, more)
    for state, (whole, first, then) in found:
        equal(state.params, want.params, 2e-2 if data == 1 else 2e-5)
        assert first == then < whole


def moved(path: str, axes: dict[str, int]) -> Any:
    """A checkpoint of other stages read, and the state laid out for others while it lives."""
    mesh = fz.make_mesh(**axes)
    train = fz.compile(pipelined(4, stages=[1, 4] if axes["pipe"] == 2 else None), mesh, backend="eager", batch=batch())
    state = train.restore(path, params())
    before = train.gather(state)
    other = fz.compile(
        pipelined(4, stages=[3, 2] if axes["pipe"] == 2 else [2, 1, 1, 1]), mesh, backend="eager", batch=batch()
    )
    again = other.gather(fz.reshard(state, other))
    equal(again, before)
    return before


@pytest.mark.full
def test_checkpoints_of_other_stages(run_ranks: Any, tmp_path: Path) -> None:
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    state = train.init(params())
    fz.checkpoint.save(tmp_path, state)
    for got in run_ranks(2, moved, str(tmp_path), {"pipe": 2}):
        equal(got, train.gather(state))


# --- the programs together ---


def programs(p: int = 2, m: int = 2, **how: Any) -> tuple[Program, ...]:
    return fz.lower(pipelined(m, **how), AbstractMesh(pipe=p), params(), batch()).programs


def broken(program: Program) -> Iterator[tuple[str, Program]]:
    """A program with a hand, a take or the wait for one dropped, doubled, or put in place of the next of its kind."""
    ops = program.instructions
    moves = [i for i, op in enumerate(ops) if op.op in ("send_start", "recv_start")]
    ends = {op.args[0]: i for i, op in enumerate(ops) if op.op == "wait"}
    put = lambda new: replace(program, instructions=tuple(new))  # noqa: E731
    for i in moves:
        end = ends[ops[i].out[0].name]
        yield f"{i} dropped", put(x for j, x in enumerate(ops) if j not in (i, end))
        yield f"{i} alone dropped", put(x for j, x in enumerate(ops) if j != i)
        yield f"{i} not awaited", put(x for j, x in enumerate(ops) if j != end)
        yield f"{i} doubled", put([*ops[: i + 1], *ops[i:]])
        yield f"{i} renumbered", put([*ops[:i], ops[i].saying(number=ops[i].attrs.number + 1), *ops[i + 1 :]])
        yield f"{i} to another", put([*ops[:i], ops[i].saying(peer=(ops[i].attrs.peer + 1) % 3), *ops[i + 1 :]])
    for kind in ("send_start", "recv_start"):
        own = [i for i in moves if ops[i].op == kind]
        for i, j in itertools.pairwise(own):
            if ops[i].attrs.peer == ops[j].attrs.peer:
                new = [*ops]
                new[i], new[j] = ops[j], ops[i]
                yield f"{i} and {j} swapped", put(new)


def test_every_broken_send_or_recv_is_found() -> None:
    made = programs(p=3)
    meeting(made)
    missed, tried = [], 0
    for stage, program in enumerate(made):
        for how, other in broken(program):
            tried += 1
            try:
                verify(other)
                meeting((*made[:stage], other, *made[stage + 1 :]))
            except VerifyError:
                continue
            missed.append((stage, how))
    assert tried > 100 and not missed


def chain(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        x = layer(p, x)
    return x.square().mean()


def chained(optimizer: Any) -> tuple[Program, ...]:
    step = fz.compose(fz.accumulate(2, schedule="layerwise"), fz.pipeline())(fz.train_step(chain, optimizer))
    given = {"layers": [{"w": torch.eye(4), "b": torch.zeros(4)} for _ in range(2)]}
    return fz.lower(step, AbstractMesh(pipe=2), given, torch.ones(4, 4)).programs


def test_stages_that_wait_for_each_other_are_refused() -> None:
    """Each stage waits at once for what it hands, and takes what it needs next: with buffers in between it went on."""

    def at_once(program: Program) -> Program:
        starts = {x.out[0].name: x for x in program.instructions if x.op in ("send_start", "recv_start")}
        ends = {x.args[0]: x for x in program.instructions if x.op == "wait"}
        out: list[Instruction] = []
        for op in program.instructions:
            if op.op == "send_start":
                out += [op, ends[op.out[0].name]]
            elif op.op == "wait" and starts[op.args[0]].op == "recv_start":
                out += [starts[op.args[0]], op]
            elif op.op not in ("recv_start", "wait"):
                out.append(op)
        return replace(program, instructions=tuple(out))

    first, last = meeting(chained(optim.sgd(0.1)))
    meeting((at_once(first), last))
    meeting((first, at_once(last)))
    verify(at_once(first)), verify(at_once(last))
    with pytest.raises(VerifyError, match=r"(?s)stages wait for each other.*stage 0 waits for send.*stage 1 waits"):
        meeting((at_once(first), at_once(last)))


@pytest.mark.parametrize("rank", range(3))
def test_a_violation_of_any_stage_is_found_with_the_pass_that_made_it(rank: int, monkeypatch: Any) -> None:
    project, stages = pass_named("stages").rewrite, iter(range(99))

    def broken(program: Program, stage: Any) -> Program:
        made, at = project(program, stage), next(stages)
        wait = next(i for i, op in enumerate(made.instructions) if op.op == "wait" and op.out)
        return (
            replace(made, instructions=made.instructions[:wait] + made.instructions[wait + 1 :]) if at == rank else made
        )

    replace_pass(monkeypatch, "stages", rewrite=broken)
    with pytest.raises(VerifyError, match=r"(?s)never waited for.*after the pass 'stages'"):
        fz.lower(pipelined(2), AbstractMesh(pipe=3), params(), batch())


def test_units_in_flight() -> None:
    """On stage s at most p - s micro-batches are between their forward and backward; with "gpipe" all."""
    for p, m in ((2, 4), (4, 8), (4, 2)):
        for how in ("1f1b", "gpipe"):
            for stage, order in enumerate(table(how, p, 1, m)):
                most, flying, largest = m if how == "gpipe" else min(p - stage, m), 0, 0
                for unit in order:
                    flying += (1, -1)[unit.kind]
                    largest = max(largest, flying)
                assert (largest, len(order)) == (most, 2 * m)
        for order in table("zb", p, 1, m):  # until their weights, on no stage more than on the first under 1F1B
            flying = list(itertools.accumulate((1, 0, -1)[unit.kind] for unit in order))
            assert (max(flying), len(order)) == (min(p, m), 3 * m)


@pytest.mark.full
def test_the_plan_of_all_stages() -> None:
    """Where stages are equal each waits for (p - 1) / (m + p - 1) of the step. A budget holds for every stage."""
    parts = {"forward": 1.0, "backward": 2.0, "both": 3.0}
    one = lambda op, program: parts[op.block.part] if op.block else 0.0  # noqa: E731
    for p, m, how in ((2, 4, "1f1b"), (4, 8, "1f1b"), (4, 4, "1f1b")):
        step = fz.compose(fz.accumulate(m, schedule="layerwise"), fz.pipeline(schedule=how))(
            fz.train_step(chain, optim.sgd(0.1))
        )
        given = {"layers": [{"w": torch.eye(4), "b": torch.zeros(4)} for _ in range(8)]}
        lowered = fz.lower(step, AbstractMesh(pipe=p), given, torch.ones(2 * m, 4), device="h100")
        found = simulate(lowered.programs, one, asynchronous=True)
        seconds = max(x.step_seconds for x in found)
        assert [1 - x.compute_seconds / seconds for x in found] == pytest.approx([(p - 1) / (m + p - 1)] * p), how
    zb = fz.compose(fz.accumulate(4, schedule="layerwise"), fz.pipeline(schedule="zb"))(
        fz.train_step(chain, optim.sgd(0.1))
    )
    rows = torch.empty(4 * 8192, 4, device="meta")
    seconds, filled = (fz.lower(x, AbstractMesh(pipe=4), given, rows, device="h100").plan.bubble for x in (step, zb))
    assert filled < 0.8 * seconds
    plan = lowered.plan
    assert [x.num_blocks for x in plan.stages] == [2] * 4 and plan.peak_bytes == plan.stages[0].peak_bytes
    assert [x.persistent_bytes for x in plan.stages] == [resting_bytes(x) for x in lowered.programs]
    assert plan.step_seconds >= max(x.compute_seconds for x in plan.stages) and 0 < plan.bubble < 1
    highest = max(x.peak_bytes for x in plan.stages)
    assert fz.fits(plan, highest) and not fz.fits(plan, highest - 1)
    assert "bubble" in str(plan) and '"stages"' in plan.to_json()


def test_no_stage_gets_the_leaves_and_gradients_of_another() -> None:
    """Parts of leaves stay on their stage, but for a tied embedding's; gradients too, and what is made of them."""
    more = [fz.shard_params(), fz.tensor_parallel(rules={"w": 1, "b": 0, "emb": 0})]
    lowered = fz.lower(pipelined(2, *more), AbstractMesh(pipe=2, data=2, model=2), params(), batch())
    for program in lowered.programs:
        hands = [op for op in program.instructions if op.op == "send_start"]
        large = {a for op in hands for a in op.args if program.values_by_name[a].local_shape(program.mesh)}
        assert not [a for a in large if "layers" in a or "gate" in a or "total" in a], large


def of_numbers(program: Program) -> list[Instruction]:
    """The hands of a stage that have numbers alone, such as norms."""
    hands = [op for op in program.instructions if op.op == "send_start"]
    return [x for x in hands if max(len(program.values_by_name[a].shape) for a in x.args) < 2]


def cut_step(parallel: Any, optimizer: Any, tensor: bool) -> Any:
    rules = [fz.tensor_parallel(rules={"w": 1})] if tensor else []
    made = fz.compose(parallel(), *rules, fz.accumulate(2, schedule="layerwise"), fz.pipeline())
    return made(fz.train_step(chain, optimizer))


@pytest.mark.full(keep=["shard_grads-False"])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("parallel", [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params])
def test_numbers_of_one_level_are_one_message(parallel: Any, tensor: bool) -> None:
    """The norms of eight blocks and the loss go to each other stage at once; the norms of what is clipped by those
    behind them."""
    given = {"layers": [{"w": torch.empty(8, 8, device="meta"), "b": torch.zeros(8)} for _ in range(8)]}
    once, twice = optim.clip_by_global_norm(0.1), optim.clip_by_global_norm(0.05)
    axes = {"data": 2, "pipe": 2, **({"model": 2} if tensor else {})}
    for levels, clips in ((1, [once]), (2, [once, twice])):
        step = cut_step(parallel, optim.chain(*clips, optim.adamw(0.05)), tensor)
        programs = fz.lower(step, AbstractMesh(**axes), given, torch.empty(4, 8, device="meta")).programs
        assert [len(of_numbers(program)) for program in programs] == [levels] * 2
        assert all(len(op.args) >= 4 for program in programs for op in of_numbers(program))


def test_values_of_a_unit_for_one_rank_are_one_message() -> None:
    """A hidden state and a value that skips stages; gradients of both, and of a tied embedding. Each other stage gets
    the numbers once."""
    for p in (2, 4):
        programs = fz.lower(pipelined(4), AbstractMesh(pipe=p), params(), batch()).programs
        for stage, program in enumerate(programs):
            numbers = of_numbers(program)
            assert [op.says(SendAttrs).peer for op in numbers] == [n for n in range(p) if n != stage]
            to = set[int]()  # whom it has handed something since it last computed
            for op in program.instructions:
                if isinstance(op.attrs, SendAttrs) and op.op == "send_start":
                    assert op.attrs.peer not in to, op
                    to.add(op.attrs.peer)
                to = set() if op.op == "call" else to
            units = [op for op in program.instructions if op.op == "send_start" and op not in numbers]
            assert p > 2 or len(units) == 4 + (stage == 0)  # a micro-batch's each, and the embedding
            if p == 2 or stage == p - 1:
                assert max(len(op.args) for op in units) > 1


@pytest.mark.full
def test_levels_of_numbers_train_alike() -> None:
    twice = optim.chain(optim.clip_by_global_norm(0.1), optim.clip_by_global_norm(0.05), optim.adamw(0.05))
    step = pipelined(2, fz.shard_params(), optimizer=twice)
    fz.testing.check_equivalent(step, params(), batch(), AbstractMesh(data=2, pipe=2), steps=2)


def message(sizes: list[int]) -> bool:
    """Whether values of several dtypes come as they were handed."""
    mesh = fz.make_mesh(pipe=2)
    carrier = ProcessGroups(mesh)
    carrier.connect_pairs([("pipe", 0, 1)])
    values = [
        torch.arange(n).to(dtype) for n, dtype in zip(sizes, (torch.int8, torch.float64, torch.bfloat16), strict=True)
    ]
    values = [torch.tensor(True), *values, torch.arange(6.0).view(2, 3).T]
    if mesh.rank == 0:
        carrier.wait(carrier.send_start(values, "pipe", 1), ())
        return True
    comes = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in values]
    came = carrier.wait(carrier.recv_start(comes, "pipe", 0), ())
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(came, values, strict=True))


@pytest.mark.full
def test_a_message_of_several_values(run_ranks: Any) -> None:
    """Small ones are packed, also where none has elements; large ones are not."""
    for sizes in ([3, 5, 7], [0, 0, 0], [1 << 16, 3, 1 << 12]):
        assert run_ranks(2, message, sizes) == [True, True]


@pytest.mark.full
def test_parameters_are_gathered_once_a_step_or_for_each_micro_batch() -> None:
    peaks, moved = [], []
    given = {"layers": [{"w": torch.empty(64, 64, device="meta"), "b": torch.zeros(64)} for _ in range(16)]}
    for gather in ("step", "micro"):
        step = fz.compose(fz.shard_params(), fz.accumulate(4, schedule="layerwise"), fz.pipeline(gather=gather))
        step = step(fz.train_step(chain, optim.sgd(0.1)))
        rows = torch.empty(4 * 8, 64, device="meta")
        plan = fz.lower(step, AbstractMesh(data=2, pipe=2), given, rows, device="h100").plan
        peaks.append([stage.peak_bytes for stage in plan.stages])
        moved.append(plan.channels["gather:data"].bytes)
    assert 7 < moved[1] / moved[0] <= 2 * 4  # forward and backward of four; a backward reads no biases
    assert all(x - y > 4 * 64 * 64 * 4 for x, y in zip(*peaks, strict=True)), peaks  # four blocks of the stage's eight


def test_a_memory_budget_is_for_every_stage() -> None:
    """The search keeps what fits on the stage that takes most, and an error names that stage."""
    given = {"layers": [{"w": torch.empty(64, 64, device="meta"), "b": torch.zeros(64)} for _ in range(6)]}
    step = fz.compose(fz.accumulate(4, schedule="layerwise"), fz.pipeline(), fz.remat("auto"))(
        fz.train_step(chain, optim.sgd(0.1))
    )
    rows = torch.empty(4 * 256, 64, device="meta")
    lower = lambda **budget: fz.lower(step, AbstractMesh(pipe=2), given, rows, device="h100", **budget)  # noqa: E731
    peak = lambda lowered: max(x.peak_bytes for x in lowered.plan.stages)  # noqa: E731
    free, least = (
        peak(lower()),
        peak(fz.lower(step, AbstractMesh(pipe=2), given, rows, device="h100", memory_budget=10**9)),
    )
    assert free == least
    tight = int(0.8 * free)
    found = lower(memory_budget=tight)
    assert peak(found) <= tight and [d.what for d in found.plan.decisions][:2] == ["pipeline", "remat"]
    with pytest.raises(fz.errors.BudgetError, match=r"of a pipeline: stage [01] of 2"):
        lower(memory_budget="200KiB")


@pytest.mark.full
def test_tables_of_units() -> None:
    """Every named one is run through, with the bubble of its paper; a rank has units of all its chunks."""
    for p, chunks, m in itertools.product((2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 5, 8, 12)):
        for how in ("gpipe", "1f1b") if chunks == 1 else ("interleaved",):
            orders = table(how, p, chunks, m)
            seconds = max(end for _, end in when(orders, p * chunks).values())
            assert [len({*order}) for order in orders] == [2 * m * chunks] * p == [len(order) for order in orders]
            if chunks == 1 and m >= p:
                assert max(end for _, end in when(table("zb", p, 1, m), p).values()) == 3 * m + p - 1
            if m % p == 0:
                assert 1 - 3 * m * chunks / seconds == pytest.approx((p - 1) / (m * chunks + p - 1))
    wrong = {
        "rank 0 lacks B1": [["F0", "F1", "B0"], ["F0", "B0", "F1", "B1"]],
        "rank 1 has besides F2": [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "F2", "B1"]],
        "rank 0 repeats F0": [["F0", "F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]],
        "1 orders, and 2 ranks": [["F0", "F1", "B0", "B1"]],
        "rank 1 has after a later micro-batch of its kind and chunk B0": [
            ["F0", "F1", "B0", "B1"],
            ["F0", "F1", "B1", "B0"],
        ],
        "runs the actions F0 to F1, B0 to B1 and W0 to W1 once": [
            ["F0", "B0", "W0", "F1", "B1"],
            ["F0", "B0", "F1", "B1"],
        ],
        "rank 0 waits at W0 for B0 of stage 0": [
            ["F0", "F1", "W0", "B0", "B1", "W1"],
            ["F0", "B0", "F1", "B1", "W0", "W1"],
        ],
        "rank 0 waits at B0 for B0 of stage 1": [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]],
    }
    for text, orders in wrong.items():
        with pytest.raises(FzeroValueError) as found:
            fz.lower(pipelined(2, schedule=orders), AbstractMesh(pipe=2), params(), batch())
        assert text in str(found.value)
    for given in ([["F0", "X"]], [3], 3, [["F0", 1]]):
        with pytest.raises(FzeroTypeError, match="a schedule is a name, or a list of actions for each rank"):
            fz.pipeline(schedule=given)
    for how, chunks in (("interleaved", 1), ("1f1b", 2)):
        with pytest.raises(FzeroValueError, match=f"schedule='{how}' with chunks={chunks}"):
            fz.pipeline(schedule=how, chunks=chunks)


def test_by_default_the_slowest_stage_does_as_little_as_in_any_cut() -> None:
    draw = random.Random(0)
    for _ in range(40):
        work = [draw.choice((1.0, 1.0, 1.0, 5.0, 20.0)) for _ in range(draw.randint(3, 8))]
        n = draw.randint(2, min(4, len(work)))
        cuts = [(0, *at, len(work)) for at in itertools.combinations(range(1, len(work)), n - 1)]
        slowest = lambda ends: max(sum(work[i:j]) for i, j in itertools.pairwise(ends))  # noqa: B023, E731
        found = [0, *itertools.accumulate(choose_stages.even(work, n))]
        assert slowest(found) == min(map(slowest, cuts)) and len(found) == n + 1


def test_code_between_blocks_counts_with_the_stage_that_runs_it() -> None:
    block = fz.block(lambda p, x: x + torch.tanh(x @ p["w"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in p:
            x = torch.tanh(block({"w": layer["w"]}, x) @ layer["between"])
        return x.square().mean()

    made = [{name: torch.ones(64, 64) for name in ("w", "between")} for _ in range(8)]
    step = fz.compose(fz.accumulate(4), fz.pipeline())(fz.train_step(loss, optim.sgd(0.1)))
    plan = fz.lower(step, AbstractMesh(pipe=2), made, torch.ones(16, 64)).plan
    assert [decision.chosen for decision in plan.decisions] == ["stages=[4, 4]"]


def test_what_cannot_be_divided() -> None:
    lower = lambda step, **axes: fz.lower(step, AbstractMesh(**axes), params(), batch())  # noqa: E731
    with pytest.raises(FzeroValueError, match=r"stages pass on micro-batches\nFix: add fz.accumulate"):
        lower(fz.pipeline()(plain()), pipe=2)
    with pytest.raises(FzeroValueError, match=r"more stages than blocks\n  8 stages, 5 blocks"):
        lower(pipelined(2), pipe=8)
    alone = fz.compose(fz.accumulate(2), fz.pipeline())(fz.train_step(lambda p, x: (p * x).mean(), optim.sgd(0.1)))
    with pytest.raises(FzeroValueError, match=r"more stages than blocks\n  2 stages, 0 blocks\nFix: mark the function"):
        fz.lower(alone, AbstractMesh(pipe=2), torch.ones(4), torch.ones(8, 4))
    with pytest.raises(FzeroValueError, match=r"do not add up\n.*the step 5 blocks\nFix: give 2 numbers .* \[\d, \d\]"):
        lower(pipelined(2, stages=[2, 2]), pipe=2)
    with pytest.raises(FzeroValueError, match="unknown mesh axis"):
        lower(pipelined(2, fz.data_parallel()), data=2)
    with pytest.raises(FzeroValueError, match="unknown schedule 'dualpipe'"):
        fz.pipeline(schedule="dualpipe")
    with pytest.raises(FzeroValueError, match="unknown gather 'once'\nFix: one of 'step', 'micro'"):
        fz.pipeline(gather="once")
    with pytest.raises(FzeroValueError, match="gather='micro' does nothing: parameters are not sharded"):
        lower(pipelined(2, fz.shard_grads(), gather="micro"), pipe=2, data=2)
    with pytest.raises(FzeroTypeError, match=r"stages=\[0, 2\]"):
        fz.pipeline(stages=[0, 2])
    with pytest.raises(TransformError, match="let data_parallel name another axis"):
        pipelined(2, fz.data_parallel(axis="pipe"))
    with pytest.raises(TransformError, match="offload does not support parameters that a rank does not have"):
        pipelined(2, fz.offload("cpu"))
    with pytest.raises(TransformError, match="statistics of all blocks are one value"):
        pipelined(2, fz.mixed_precision("bf16", watch=True))
    with pytest.raises(TransformError, match="does nothing to an evaluation"):
        fz.pipeline(fz.eval_step(chain))


class Normed(torch.nn.Module):
    def __init__(self, norm: Any):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 16), norm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x)).relu()


def test_leaves_that_the_step_writes_are_named_and_the_ways_out_are_taken() -> None:
    mesh, batch = AbstractMesh(pipe=2), {"input": torch.empty(8, 16, device="meta")}

    def lowered(norm: Any, freeze: bool = False) -> Any:
        layers = [Normed(norm) for _ in range(4)]
        for x in layers:
            x.norm.train(not freeze)
        model = fz.functionalize(torch.nn.Sequential(*layers), blocks=[Normed])
        step = model.train_step(optim.sgd(0.1), lambda out, batch: out.square().mean())
        step = fz.compose(fz.accumulate(2, schedule="layerwise"), fz.pipeline())(step)
        return fz.lower(step, mesh, model.params, batch)

    with pytest.raises(FzeroValueError) as caught:
        lowered(torch.nn.BatchNorm1d)
    said = str(caught.value)
    assert "the step writes 12 tensors" in said and "params[0]['norm']['running_mean']: float32[16]" in said
    assert "... 7 more" in said and "torch.nn.GroupNorm" in said and "norm.eval() before fz.functionalize" in said
    for given in ((lambda width: torch.nn.GroupNorm(4, width), False), (torch.nn.BatchNorm1d, True)):
        assert len(lowered(*given).programs) == 2


def together(grads: Any, state: Any, params: Any) -> Any:
    """An update of each leaf by another one."""
    layers = grads["layers"]
    mixed = [{"w": -0.1 * (x["w"] + y["w"]), "b": -0.1 * x["b"]} for x, y in zip(layers, layers[::-1], strict=True)]
    return {"layers": mixed}, state


def test_an_update_of_leaves_of_two_stages_is_refused() -> None:
    with pytest.raises(FzeroValueError, match=r"reads tensors of several stages at once\n.*: stage 0"):
        chained(optim.GradientTransformation(lambda params: {}, together))


def test_on_one_rank_along_the_axis_it_is_the_plain_step() -> None:
    program = fz.lower(pipelined(2), AbstractMesh(pipe=1, data=1), params(), batch()).program
    assert not any(op.op in ("send_start", "recv_start") for op in program.instructions)


@fz.block
def turned(p, x):
    return torch.tanh(x @ p["w"]).transpose(1, 2)


def of_turned_values(stages: list[int]) -> tuple[float, float]:
    """The losses of a pipeline whose stages hand transposed values to each other, compiled, and of the plain step."""
    g = torch.Generator().manual_seed(0)
    given = [{"w": torch.randn(n, n, generator=g) * 0.4} for n in (8, 6, 8)]
    x = torch.randn(8, 6, 8, generator=g)

    def loss(params, x):
        for p in params:
            x = turned(p, x)
        return x.square().mean()

    step = fz.train_step(loss, optim.adamw(1e-2))
    made = fz.compose(fz.accumulate(4, schedule="layerwise"), fz.pipeline(stages=stages))(step)
    train = fz.compile(made, fz.make_mesh(pipe=2), batch=x)
    state, alone = train.init(given), step.init(given, fz.random.key(0))
    for _ in range(2):
        state, metrics = train(state, x)
        alone, plainly = step(alone, x)
    return float(metrics["loss"]), float(plainly["loss"])


@pytest.mark.full
def test_values_that_lie_transposed(run_ranks: Any) -> None:
    for got, want in run_ranks(2, of_turned_values, [1, 2], timeout=300):
        assert got == pytest.approx(want, rel=1e-6)


def test_a_reduced_value_is_sent_to_the_stage_that_reads_it_at_once() -> None:
    """The decoder's embedding is looked up on the first stage, where the vocabulary is sharded over `model`, and only
    the last stage reads it. Sent a block later, stages waited for each other."""

    @fz.block
    def decode(p: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y + torch.tanh((x + y) @ p["w"] + p["b"])

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x = params["emb"][batch["x"]]
        for p in params["layers"][:-1]:
            x = layer(p, x)
        logits = decode(params["layers"][-1], params["emb"][batch["y"]], x) @ params["emb"].T
        return F.cross_entropy(logits.flatten(0, 1), batch["x"].flatten())

    pieces = (fz.accumulate(2), fz.pipeline(), fz.tensor_parallel(rules={"emb": 0}))
    step = fz.compose(*pieces)(fz.train_step(loss, optim.sgd(0.1)))
    fz.testing.check_equivalent(step, params(4), batch(), AbstractMesh(pipe=3, model=2), steps=2)
