"""Gathers finer than a block: equal to those of whole blocks, bit for bit, and never more at once than asked for."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import compat, optim
from fzero.errors import BudgetError, FzeroValueError
from fzero.program.ir import local_bytes
from fzero.testing import check_equivalent
from fzero.trace.record import record
from fzero.trace.recorder import Recorded
from fzero.trace.segments import by_leaves

ROWS, WIDTH, HIDDEN, VOCAB = 8, 16, 64, 24
LARGEST = 4 * WIDTH * HIDDEN  # bytes


@fz.block
def layer(p, x, key):
    h = F.layer_norm(x, (WIDTH,), p["norm"])
    h = F.silu(h @ p["gate"]) * F.linear(h, p["up"], p["bias"])
    return x + fz.random.dropout(key, h, 0.2) @ (p["down"] * 2)  # made of a leaf alone


def hidden(params, tokens, key):
    x = params["embed"][tokens]
    for i, p in enumerate(params["layers"]):
        x = layer(p, x, fz.random.fold_in(key, i))
    return x


def loss_fn(params, tokens, *, key):
    logits = hidden(params, tokens, key) @ params["embed"].T  # tied
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()), {"mean": logits.detach().mean()}


def parameters() -> Any:
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g) / shape[-1] ** 0.5  # noqa: E731
    layers = [
        {"norm": torch.ones(WIDTH), "gate": draw(WIDTH, HIDDEN), "up": draw(HIDDEN, WIDTH), "bias": torch.zeros(HIDDEN),
         "down": draw(HIDDEN, WIDTH)}
        for _ in range(2)
    ]  # fmt: skip
    return {"embed": draw(VOCAB, WIDTH), "layers": layers}


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, 6), generator=torch.Generator().manual_seed(2))


def make(*transforms: Any, frozen: str | None = None) -> Any:
    trainable = None if frozen is None else lambda path, leaf: frozen not in path
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    return fz.compose(*transforms)(fz.train_step(loss_fn, optimizer, has_aux=True, trainable=trainable))


def pieces(program: Any) -> list[Any]:
    return [line for line, _ in program.walk() if line.segment.alone]


def most_at_once(program: Any) -> int:
    """The most bytes of parameters that one call reads whole."""
    values, waits = program.values_by_name, [line for line, _ in program.walk() if line.op == "wait"]
    gathers = {line.out[0].name for line, _ in program.walk() if line.op == "all_gather_start"}
    whole = {v.name for line in waits if line.args[0] in gathers for v in line.out}
    whole |= {v.name for line, _ in program.walk() if line.op == "unflatten" for v in line.out}
    calls = [line for line, _ in program.walk() if line.op == "call"]
    return max(sum(local_bytes(values[a], program.mesh) for a in line.args if a in whole) for line in calls)


SMALL = 4 * (WIDTH + HIDDEN)  # norm and bias, which do not count
IN_PARTS = {
    "full": ({"data": 2}, [fz.remat("full")]),
    "everything kept": ({"data": 2}, [fz.remat("none")]),
    "bf16": ({"data": 2}, [fz.mixed_precision("bf16"), fz.remat("full")]),
    "loop": ({"data": 2}, [fz.accumulate(2), fz.remat("full")]),
    "vertical": ({"data": 2}, [fz.accumulate(2, vertical=True), fz.mixed_precision("bf16"), fz.remat("full")]),
    "host": ({"data": 2}, [fz.offload("cpu", ("params", "opt_state")), fz.remat("full")]),
    "disk": ({"data": 2}, [fz.offload("nvme", ("params", "opt_state"), path=tempfile.gettempdir())]),
    "tensor": ({"data": 2, "model": 2}, [fz.tensor_parallel(axis="model", rules={"gate": 1, "up": 0, "down": 0})]),
    "positions": ({"data": 1, "seq": 2}, [fz.sequence_parallel(axis="seq")]),
    "stages": ({"data": 2, "pipe": 2}, [fz.accumulate(2, vertical=True), fz.pipeline(gather="micro")]),
    "weights apart": (
        {"data": 2, "pipe": 2},
        [fz.accumulate(2, vertical=True), fz.pipeline(gather="micro", schedule="zb")],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_among_other_transforms(name):
    axes, transforms = IN_PARTS[name]
    mesh: Any = fz.AbstractMesh(unified_memory=False, **axes)  # type: ignore[arg-type]
    over = "data" if mesh.axes["data"] > 1 else "seq"
    limit = LARGEST // 2 if any("bf16" in str(t) for t in transforms) else LARGEST
    limit = limit // 2 if "model" in axes else limit
    step = make(fz.shard_params(axis=over, gather_bytes=limit), *transforms)
    report = check_equivalent(step, parameters(), batch(), mesh, steps=1)
    program = fz.lower(step, mesh, parameters(), batch(ROWS // mesh.axes["data"])).program
    assert report.equivalent and pieces(program)
    assert limit <= most_at_once(program) <= limit + SMALL


def test_parts_over_two_axes_that_are_crossed_once_a_step():
    mesh = fz.AbstractMesh(data=2, node=2)
    sharded = fz.shard_params(axis=("data", "node"), gather_bytes=LARGEST)
    step = make(sharded, fz.accumulate(2), fz.once_a_step(axis="node"), fz.remat("full"))
    assert check_equivalent(step, parameters(), batch(), mesh, steps=1).equivalent
    assert pieces(fz.lower(step, mesh, parameters(), batch(2)).program)


def on_ranks(backend: str, frozen: str | None) -> list[Any]:
    mesh, found = fz.make_mesh(), []
    for nbytes in (None, LARGEST):
        step = make(fz.shard_params(gather_bytes=nbytes), fz.remat("full"), frozen=frozen)
        train = fz.compile(step, mesh, backend=backend)
        state = train.init(parameters(), key=fz.random.key(3))
        for _ in range(3):
            state, metrics = train(state, batch().chunk(2)[mesh.rank])
        leaves = [*fz.tree.leaves(train.gather(state).params), metrics["loss"], metrics["grad_norm"]]
        found.append(([x.clone() for x in leaves], len(pieces(train.program)), len(train.program.functions)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("backend", "frozen"), [("eager", None), ("eager", "up"), ("inductor", None)])
def test_two_processes_have_the_bits_of_whole_blocks(run_ranks, backend, frozen):
    """With dropout, a tied leaf, a cast one, metrics; and without gradients of some. Compiled up to fused sums."""
    for (want, no, _), (got, some, _) in run_ranks(2, on_ranks, backend, frozen):
        assert (no, some) == (0, 2 * (3 + 5) if frozen is None else some) and some
        for a, b in zip(want, got, strict=True):
            if backend == "eager":
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def grown(nbytes: int | None) -> tuple[float, float]:
    """MiB that a rank's process grows by in steps, and that it should by plan; of three products of 16 MiB a block."""

    def status(name: str) -> float:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{name}:")[1].split()[0]) / 1024

    @fz.block
    def wide(p, x):
        return x + (torch.relu(x @ p["a"]) * (x @ p["b"])) @ p["c"]

    def loss(params, x):
        for p in params:
            x = wide(p, x)
        return x.square().mean()

    def init(key):
        shapes = {"a": (256, 16384), "b": (256, 16384), "c": (16384, 256)}
        return [{n: torch.full(shape, 1e-3) for n, shape in shapes.items()} for _ in range(3)]

    step = fz.compose(fz.shard_params(gather_bytes=nbytes), fz.remat("full"))(fz.train_step(loss, optim.sgd(0.1)))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state, x = train.init(init), torch.ones(4, 256)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would hide what the step takes
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        state, _ = train(state, x)
    return status("VmHWM") - before, (train.plan.peak_bytes - train.plan.resting_bytes) / 2**20


@pytest.mark.full
def test_a_process_grows_by_the_bytes_of_a_part(run_ranks):
    parts, whole = (run_ranks(2, grown, nbytes) for nbytes in (16 << 20, None))
    for (few, planned), (many, planned_whole) in zip(parts, whole, strict=True):
        assert planned < 0.6 * planned_whole and few < 0.85 * many, (few, planned, many, planned_whole)


def test_functions_are_shared_by_layers_and_gradients_leave_behind_their_part():
    step = make(fz.shard_params(gather_bytes=LARGEST), fz.remat("full"))
    lowered = fz.lower(step, fz.AbstractMesh(data=2), parameters(), batch())
    program = lowered.program
    assert {line.fn for line in pieces(program)} == {
        *(f"layer_part{i}" for i in range(3)),
        *(f"layer_vjp_part{i}" for i in range(5)),
    }
    assert any(note.startswith("gathers: at most 4.0 KiB") and "layer in 3 parts" in note for note in program.notes)
    assert "gathers" in [x.what for x in lowered.plan.decisions]
    scatters = [line for line, _ in program.walk() if line.op == "reduce_scatter_start"]
    assert max(sum(program.values_by_name[a].nbytes for a in x.args) for x in scatters) <= LARGEST + SMALL


def test_an_evaluation_gathers_in_parts_too():
    step = fz.eval_step(lambda p, tokens: hidden(p, tokens, fz.random.key(0)).square().mean())
    step = fz.shard_params(gather_bytes=LARGEST)(step)
    program = fz.lower(step, fz.AbstractMesh(data=2), parameters(), (batch(),)).program
    assert most_at_once(program) <= LARGEST + SMALL and len(pieces(program)) == 6


def test_a_larger_leaf_is_gathered_by_itself():
    step = make(fz.shard_params(gather_bytes=LARGEST // 2), fz.remat("full"))
    program = fz.lower(step, fz.AbstractMesh(data=2), parameters(), batch()).program
    assert any("no fewer than params['layers']" in note and "alone takes, 4.0 KiB" in note for note in program.notes)
    assert most_at_once(program) <= LARGEST + SMALL


@pytest.mark.full
def test_one_device_brings_parts_from_its_host():
    """Whatever is asked for by a budget: nothing is sharded there."""
    mesh = fz.AbstractMesh(data=1, device_type="cuda")
    params = {"layers": [{n: torch.empty(512, 2048, device="meta") for n in "abcdef"} for _ in range(4)]}

    @fz.block
    def mlp(p, x):
        for n in "ace":
            x = x + torch.relu(x @ p[n]) @ p[chr(ord(n) + 1)].T
        return x

    def loss(params, x):
        for p in params["layers"]:
            x = mlp(p, x)
        return x.square().mean()

    step = fz.compose(fz.offload("cpu", ("params", "opt_state")), fz.remat("full"))(
        fz.train_step(loss, optim.adamw(1e-3))
    )
    x = torch.empty(4, 512, device="meta")
    lower = lambda budget: fz.lower(step, mesh, params, x, device="h100", memory_budget=budget)  # noqa: E731
    whole = lower("100MiB")
    assert not whole.choice.gather_bytes
    assert [lower(n).choice.gather_bytes for n in ("80MiB", "70MiB")] == [12 << 20, 4 << 20]
    with pytest.raises(
        BudgetError,
        match=r"(?s)gathers are in parts already: at most 4\.0 MiB.*no fewer than params\[.*alone takes, 4\.0 MiB",
    ):
        lower("8MiB")


def test_a_budget_takes_parts_where_nothing_else_fits():
    mesh, params = fz.AbstractMesh(data=8), parameters()
    wide = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    params["layers"] = [
        {"norm": wide(WIDTH), "bias": wide(2**14)} | {n: wide(WIDTH, 2**14) for n in ("gate",)}
        | {n: wide(2**14, WIDTH) for n in ("up", "down")} for _ in range(3)
    ]  # fmt: skip
    step = make(fz.shard_params(), fz.remat("full"))
    tokens = batch(2)[:, :2]
    lower = lambda budget: fz.lower(step, mesh, params, tokens, memory_budget=budget, device="h100")  # noqa: E731
    whole = lower("64MiB")
    assert not whole.choice.gather_bytes and not pieces(whole.program)
    least = int(0.6 * whole.plan.peak_bytes)
    found = lower(least)
    assert found.choice.gather_bytes and pieces(found.program) and found.plan.peak_bytes <= least
    decision = next(x for x in found.plan.decisions if x.what == "gathers")
    assert "in 3 parts" in decision.chosen and "no other fits" in decision.why


def test_stages_that_keep_what_they_gather_refuse_parts():
    step = make(fz.shard_params(gather_bytes=LARGEST), fz.accumulate(2, vertical=True), fz.pipeline(gather="step"))
    with pytest.raises(FzeroValueError, match=r'(?s)gather_bytes does nothing.*gather="micro"'):
        fz.lower(step, fz.AbstractMesh(data=2, pipe=2), parameters(), batch())


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, "4 pounds"])
def test_bytes_that_are_no_amount_of_memory(nbytes):
    with pytest.raises(FzeroValueError, match="must be a number of bytes"):
        fz.shard_params(gather_bytes=nbytes)
    with pytest.raises(FzeroValueError, match="nothing could be gathered"):
        fz.shard_params(gather_bytes="0GB")


# --- the cut itself ---


def recorded(fn: Any, inputs: Sequence[torch.Tensor]) -> Recorded:
    with compat.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        return record(lambda *xs: [*fn(*xs)], fakes, owner="test", names=[f"x_{i}" for i in range(len(inputs))])


def test_what_is_made_of_leaves_alone_is_made_again_by_each_piece():
    def fn(a, b, x):
        w = a.exp()
        return (x @ w) @ b, x @ w.T, w * 2

    inputs = [torch.randn(4, 4) for _ in range(3)]
    graph = recorded(fn, inputs)
    made = by_leaves(graph, {0: 64, 1: 64}, {}, 64)
    assert made is not None and [len(x.inputs) for x in made.steps] == [2, 2, 2]
    values = dict(zip(made.inputs, inputs, strict=True))
    for step in made.steps:
        found = torch.fx.GraphModule({}, step.graph.graph)(*(values[x] for x in step.inputs))
        values.update(zip(step.outputs, found, strict=True))
    for x, want in zip(made.outputs, fn(*inputs), strict=True):
        assert torch.equal(values[x], want)


def test_a_function_that_reads_few_leaves_is_left_whole():
    graph = recorded(lambda a, b, x: [(x @ a) @ b], [torch.randn(4, 4) for _ in range(3)])
    assert by_leaves(graph, {0: 64, 1: 64}, {}, 128) is None
    assert by_leaves(graph, {0: 64}, {}, 1) is None
