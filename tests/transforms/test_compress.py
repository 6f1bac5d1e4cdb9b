"""Parameters and gradients that travel in codes (`fz.compress`): the codes, what a step with them means, what it sends,
and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ops.block_quantization import BLOCK
from fzero.sharding.layout import shard_numel
from fzero.transforms import compress
from fzero.transforms.compress import GRADS, PARAMS, Format, Wire, packed, rows_of, total, unpacked, values_of

FORMATS = [PARAMS["int8"], GRADS["int8"], GRADS["int4"]]
NOT_A_NUMBER = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
"""The NaN of all ones, of whose bits a sum overflows."""


def draw(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Numbers over some orders of magnitude, as gradients have them."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made) * (torch.randn(shape, generator=made) * spread).exp()


# --- codes ---


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_value_comes_back_within_half_a_step(form: Format) -> None:
    x = draw(40, BLOCK)
    rows = rows_of(x, form)
    assert rows.dtype == torch.uint8 and rows.shape == (40, {8: 258, 4: 130}[form.bits]) and form.row == rows.shape[1]
    scale = (rows[:, -2:].int() * torch.tensor([1 << 8, 1])).sum(1).short().view(torch.bfloat16).float()
    largest = x.abs().amax(1)
    assert (scale >= largest).all() and (scale <= largest * (1 + 2**-7)).all()
    back = values_of(rows, form)
    share, got = ((y / scale[:, None]).abs() for y in (x, back))
    if form.root:
        share, got = share.sqrt(), got.sqrt()
    assert (got - share).abs().max() <= 0.5 / form.top + 1e-6 and torch.equal(back.sign() * x.sign(), back.sign().abs())


def test_steps_of_the_square_root_keep_small_numbers() -> None:
    x = draw(400, BLOCK, spread=1.0)
    vanished = {form: (values_of(rows_of(x, form), form) == 0).float().mean().item() for form in FORMATS}
    assert vanished[GRADS["int8"]] < 1e-3 < 20 * vanished[GRADS["int8"]] < vanished[PARAMS["int8"]]


def test_the_share_of_normal_elements_that_become_0() -> None:
    """Of 256 normal elements the largest is about 2.8: what is below a 196th of it has the code 0 in 4 bits."""
    x = torch.randn(4000, BLOCK, generator=torch.Generator().manual_seed(0))
    vanished = {n: (values_of(rows_of(x, GRADS[n]), GRADS[n]) == 0).float().mean().item() for n in ("int8", "int4")}
    assert vanished["int4"] == pytest.approx(0.0125, rel=0.05) and vanished["int8"] < 1e-4


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_block_that_is_not_finite_stays_so_and_touches_no_other(form: Format) -> None:
    for bad in (torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.tensor(torch.nan), NOT_A_NUMBER):
        x = draw(3, BLOCK)
        before, x[1, 7] = rows_of(x, form), bad
        rows = rows_of(x, form)
        assert not values_of(rows, form)[1].isfinite().any()
        assert torch.equal(rows[::2], before[::2]) and values_of(rows, form)[::2].isfinite().all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39, 3.4e38], ids=str)
def test_the_smallest_and_the_largest_numbers(form: Format, size: float) -> None:
    x = torch.full((1, BLOCK), size)
    assert torch.allclose(values_of(rows_of(x, form), form), x, rtol=2**-7, atol=1e-40)


@pytest.mark.parametrize("shape", [(100, 100), (64, 70), (4097,)], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_codes_are_the_same_bytes_on_every_mesh(shape: tuple[int, ...], form: Format) -> None:
    x, found = draw(*shape), {}
    for ranks in (1, 2, 3, 5):
        num = -(-shard_numel(shape, ranks) // BLOCK) * BLOCK
        wire = Wire(form, num, x.dtype)
        sent = packed(x, wire, ranks)
        shards = [
            packed(part, wire)[0]
            for part in torch.nn.functional.pad(x.flatten(), (0, ranks * num - x.numel())).split(num)
        ]
        assert torch.equal(sent, torch.stack(shards))  # of the whole as of each rank's shard
        found[ranks] = sent.flatten()[: -(-x.numel() // BLOCK) * form.row]
        assert torch.equal(unpacked(sent, wire).flatten()[: x.numel()], unpacked(found[ranks], wire)[: x.numel()])
    assert all(torch.equal(found[1], other) for other in found.values())


@pytest.mark.parametrize("ranks", [2, 3, 33, 100])
def test_sums_are_in_the_order_of_the_ranks(ranks: int) -> None:
    parts = draw(ranks, 300)
    want = parts[0]
    for part in parts[1:]:
        want = want + part
    got = total(parts, Wire(None, 300, torch.float32))
    assert torch.equal(got, want) if ranks < 33 else torch.allclose(got, want, rtol=1e-4, atol=1e-2)


def test_a_sum_of_a_thousand_ranks_is_a_small_function() -> None:
    wire, made = Wire(GRADS["int8"], 512, torch.float32), compress.Form((512,), torch.float32)
    given = compress.buffers((wire,), 1000)
    graph = compress.traced(compress.decode_sum, given, torch.device("cpu"), (wire,), 1000, (made,))
    assert len(graph.graph.nodes) < 300


# --- what a step means ---


def coded(x: torch.Tensor, form: Format) -> torch.Tensor:
    """A value as it comes back, if it travels in codes."""
    if form.bits == 16:
        return x.bfloat16().float()
    if x.numel() < 16 * BLOCK:
        return x
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    return values_of(rows_of(flat, form), form).flatten()[: x.numel()].view(x.shape)


SIZES = (0, 1, 255, 4095, 4096, 4097)


def params() -> dict[str, Any]:
    made = {f"x{n}": draw(n, seed=n, spread=0.1) / 8 for n in SIZES}
    tied = draw(64, 96, seed=7, spread=0.1) / 8
    return {**made, "tied": tied, "again": tied, "frozen": draw(96, 64, seed=8, spread=0.1) / 8}


def loss_fn(p: Any, batch: torch.Tensor) -> torch.Tensor:
    out = torch.tanh(batch @ p["tied"]) @ p["frozen"] + batch @ p["again"] @ p["frozen"]
    for n in SIZES:
        out = out + (p[f"x{n}"] * batch.mean(1, keepdim=True)).sin().sum(1, keepdim=True) * (n > 0) / max(n, 1)
    return out.square().mean()


BATCH = draw(24, 64, seed=9, spread=0.1)
TRAINABLE = lambda path, leaf: "frozen" not in path  # noqa: E731


def reference(parts: list[torch.Tensor], params_in: Format | None, grads_in: Format | None, zero: str) -> Any:
    """Two steps of SGD with codes, written by hand: a part of the batch a rank."""
    p = params()
    for _ in range(2):
        rests_whole = zero != "shard_params"  # what is not trained
        read = {k: x if params_in is None else coded(x, params_in) for k, x in p.items()}
        read |= {"frozen": p["frozen"]} if rests_whole else {}
        summed: dict[str, torch.Tensor] = {}
        for part in parts:
            at = {k: x.clone().requires_grad_() for k, x in read.items()}
            at["again"] = at["tied"]
            names = [k for k in at if k not in ("frozen", "again")]
            loss = loss_fn(at, part) / len(parts)
            for k, g in zip(names, torch.autograd.grad(loss, [at[k] for k in names], allow_unused=True), strict=True):
                g = torch.zeros_like(at[k]) if g is None else g
                g = g if grads_in is None or (grads_in.bits == 16 and g.numel() < 16 * BLOCK) else coded(g, grads_in)
                summed[k] = summed[k] + g if k in summed else g
        for k, g in summed.items():
            if grads_in is not None and zero == "data_parallel" and g.numel() >= 16 * BLOCK:
                g = coded(g, grads_in)
            p[k] = p[k] - 0.1 * g
        p["again"] = p["tied"]
    return p


CASES = [
    ("shard_params", "int8", "int8", 2),
    ("shard_params", "int8", "int4", 3),
    ("shard_opt_state", "int8", "bf16", 2),
    ("shard_opt_state", None, "int8", 3),
    ("data_parallel", "int8", "int8", 3),
    ("shard_params", "int8", None, 3),
]


@pytest.mark.full(keep=["shard_params-int8-None-3", "shard_opt_state-None-int8-3"])
@pytest.mark.parametrize(("zero", "params_in", "grads_in", "ranks"), CASES)
def test_a_step_means_what_is_written_by_hand(zero: str, params_in: Any, grads_in: Any, ranks: int) -> None:
    """Sizes around a block, a tied leaf, a frozen one, and ranks that divide nothing. Codes may differ by a step where
    a sum of another order lies on its edge."""
    step = fz.train_step(loss_fn, optim.sgd(0.1), trainable=TRAINABLE)
    step = fz.compose(getattr(fz, zero)(), fz.compress(params=params_in, grads=grads_in))(step)
    state, _ = fz.testing.simulate(step, fz.AbstractMesh(data=ranks), params(), BATCH, steps=2)
    given = None if zero == "data_parallel" or params_in is None else PARAMS[params_in]
    asked = None if grads_in is None else GRADS[grads_in]
    want = reference(list(BATCH.chunk(ranks)), given, asked, zero)
    plain = reference(list(BATCH.chunk(ranks)), None, None, zero)
    assert state.params["again"] is state.params["tied"] and torch.equal(state.params["frozen"], params()["frozen"])
    for name, x in state.params.items():
        off, moved = (x - want[name]).abs(), (want[name] - params()[name]).abs().max() if x.numel() else 0.0
        assert (off > 1e-6 + 1e-5 * moved).float().mean() <= 5e-3 if x.numel() else True, name
        if name in ("tied", "x4096", "x4097"):
            assert (x - plain[name]).norm() > 20 * off.norm(), name


# --- as it runs ---

STEPS: dict[str, Any] = {
    "zero-3": fz.compose(fz.shard_params(), fz.compress()),
    "zero-1": fz.compose(fz.shard_opt_state(), fz.accumulate(2), fz.compress(grads="int4")),
    "whole": fz.compose(fz.data_parallel(), fz.compress(grads="int8")),
    "plain": fz.shard_params(),
    "other": fz.compose(fz.shard_grads(), fz.compress(params=None, grads="bf16")),
}
CODED = ["zero-3", "zero-1", "whole"]


def step_of(transform: Any) -> Any:
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    return transform(fz.train_step(loss_fn, optimizer, trainable=TRAINABLE))


def trained(names: list[str], shared: bool) -> dict[str, Any]:
    """Of each step the whole state after two, and the losses, on this rank."""
    mesh, found = fz.make_mesh(shared_memory=shared), {}
    for name in names:
        train = fz.compile(step_of(STEPS[name]), mesh, backend="eager")
        state = train.init(params())
        for _ in range(2):
            state, metrics = train(state, BATCH.chunk(mesh.size)[mesh.rank])
        found[name] = [x.clone() for x in fz.tree.leaves((train.gather(state), metrics))]
    return found


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "shared"), [(3, True), (2, False)], ids=["shared", "gloo"])
def test_ranks_come_to_what_the_program_says(run_ranks: Any, ranks: int, shared: bool) -> None:
    """To the bit; gloo adds norms of more than two ranks up in another order."""
    mesh = fz.AbstractMesh(data=ranks)
    wanted = {n: fz.testing.simulate(step_of(STEPS[n]), mesh, params(), BATCH, steps=2) for n in CODED}
    for found in run_ranks(ranks, trained, CODED, shared):
        for name, leaves in found.items():
            assert all(torch.equal(x, y) for x, y in zip(leaves, fz.tree.leaves(wanted[name]), strict=True)), name


def checked() -> list[Any]:
    mesh = fz.make_mesh()
    own = BATCH.chunk(mesh.size)[mesh.rank]
    return [fz.testing.check_equivalent(step_of(STEPS[name]), params(), own, mesh).equivalent for name in CODED[1:]]


@pytest.mark.full
def test_a_step_is_near_the_plain_one_and_equal_without_codes(run_ranks: Any) -> None:
    assert run_ranks(2, checked) == [[True, True]] * 2


def blamed() -> str:
    """The transform to blame for gradients that come back too small."""
    mesh, right = fz.make_mesh(), compress.values_of
    compress.values_of = lambda rows, form: right(rows, form) * (0.5 if form.root else 1)
    compress.traced.cache_clear()
    try:
        own = BATCH.chunk(mesh.size)[mesh.rank]
        step = fz.compose(fz.shard_params(), fz.compress())(fz.train_step(loss_fn, optim.sgd(1.0), trainable=TRAINABLE))
        report = fz.testing.check_equivalent(step, params(), own, mesh, raises=False)
    finally:
        compress.values_of = right
        compress.traced.cache_clear()
    return "equivalent" if report.blame is None else str(report.blame.transform)


@pytest.mark.full
def test_a_fault_in_the_codes_is_blamed_on_the_transform(run_ranks: Any) -> None:
    assert run_ranks(2, blamed) == ["compress(params='int8', grads='int8')"] * 2


def overflowed() -> list[Any]:
    """Steps in fp16, with an infinite number in one rank's part of the second batch."""
    mesh = fz.make_mesh()
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean() + (x @ p["w"]).sum() * 0, optim.sgd(0.1))
    found = []
    for zero in (fz.shard_params(), fz.data_parallel()):
        made = fz.compose(zero, fz.mixed_precision("fp16"), fz.compress())(step)
        train = fz.compile(made, mesh, backend="eager")
        state = train.init({"w": torch.eye(64)})
        for bad in (False, True, False):
            x = torch.ones(4, 64)
            x[0, 0] = torch.inf if bad and mesh.rank == 1 else 1.0
            state, metrics = train(state, x)
            found.append((bool(metrics["skipped"]), bool(metrics["finite"])))
        assert all(x.isfinite().all() for x in fz.tree.leaves(train.gather(state).params))
    return found


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(run_ranks: Any) -> None:
    assert run_ranks(3, overflowed) == [[(False, True), (True, False), (False, True)] * 2] * 3


def saved(path: str) -> list[torch.Tensor]:
    mesh = fz.make_mesh()
    train = fz.compile(step_of(STEPS["zero-1"]), mesh, backend="eager")
    state, _ = train(train.init(params()), BATCH.chunk(2)[mesh.rank])
    fz.checkpoint.save(path, state)
    return fz.tree.leaves(train.gather(state).params)


def restored(path: str, name: str) -> list[torch.Tensor]:
    mesh = fz.make_mesh()
    train = fz.compile(step_of(STEPS[name]), mesh, backend="eager")
    state = train.restore(path)
    params = fz.tree.leaves(train.gather(state).params)
    train(state, BATCH.chunk(mesh.size)[mesh.rank])
    return params


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_formats_and_ranks(run_ranks: Any, tmp_path: Any) -> None:
    want = run_ranks(2, saved, str(tmp_path))[0]
    for ranks, name in ((1, "plain"), (3, "other")):
        for got in run_ranks(ranks, restored, str(tmp_path), name):
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def wide(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] + p["b"]).square().mean()


def compiled() -> list[float]:
    """How far a compiled step is off an interpreted one."""
    step = fz.compose(fz.shard_params(), fz.compress(grads="int4"))(fz.train_step(wide, optim.sgd(0.1)))
    mesh, given = fz.make_mesh(), {"w": draw(64, 96, spread=0.1), "b": draw(96)}
    train = fz.compile(step, mesh)
    state, _ = train(train.init(given), BATCH.chunk(2)[mesh.rank])
    want, _ = fz.testing.simulate(step, fz.AbstractMesh(data=2), given, BATCH)
    pairs = zip(*(fz.tree.leaves(x.params) for x in (train.gather(state), want)), strict=True)
    return [float((x - y).norm() / y.norm()) for x, y in pairs]


@pytest.mark.full
@pytest.mark.skipif(not fz.has_compiler(), reason="no C++ compiler")
def test_inductor_makes_the_same_codes(run_ranks: Any) -> None:
    assert max(map(max, run_ranks(2, compiled, timeout=240))) < 1e-5


# --- beside other transforms, bytes, and what is refused ---


DATA, NODE = fz.AbstractMesh(data=2), fz.AbstractMesh(node=2, data=2)
APART = fz.AbstractMesh(data=2, unified_memory=False)
BOTH = ("data", "node")
BESIDE: dict[str, tuple[Any, fz.AbstractMesh]] = {
    "loop": (fz.compose(fz.shard_params(), fz.accumulate(2)), DATA),
    "once": (fz.compose(fz.shard_params(axis=BOTH), fz.hierarchical(), fz.accumulate(2)), NODE),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_transforms_parameters_are_encoded_once_a_step(name: str) -> None:
    transform, mesh = BESIDE[name]
    program = fz.lower(step_of(fz.compose(transform, fz.compress())), mesh, params(), BATCH).program
    inside = [x for op in program.instructions for x in op.body if x.of_codes and x.args[0] in program.leaves]
    assert not inside


OFFLOADED = {
    "cpu": fz.offload("cpu", ("opt_state", "params")),
    "nvme": fz.offload("nvme", ("opt_state", "params", "gradients"), path="/s"),
}


@pytest.mark.full(keep=["bf16-nvme", "bf16-cpu"])
@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("precision", [fz.compose(), fz.mixed_precision("bf16")], ids=["fp32", "bf16"])
def test_offloaded_leaves_send_as_much(name: str, precision: Any) -> None:
    def sent(*more: Any) -> dict[str, int]:
        step = step_of(fz.compose(fz.shard_params(), precision, fz.compress(), *more))
        channels = fz.lower(step, APART.of_type("cuda"), params(), BATCH).plan.channels
        return {k: v.bytes for k, v in channels.items() if ":" in k and not k.startswith("reduce")}

    assert sent(OFFLOADED[name]) == sent()


def test_bytes_by_axis() -> None:
    """1.008 or 0.508 bytes an element, the first hop and the second each in its own format."""
    wide = {"w": torch.empty(512, 512, device="meta"), "b": torch.empty(512, device="meta")}
    step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"] + p["b"]).square().mean(), optim.adamw(1e-3))
    step = fz.shard_params(step, axis=BOTH)
    batch = torch.empty(8, 512, device="meta")

    def sent(transform: Any) -> dict[str, int]:
        return {k: v.bytes for k, v in fz.lower(transform(step), NODE, wide, batch).plan.channels.items()}

    rows, small = 512 * 512 // BLOCK, 512 * 4
    assert sent(fz.compress(grads={"data": "int8", "node": "int4"})) == {
        "gather:node": (rows // 2 * 258 + small // 2) // 2,
        "gather:data": (rows * 258 + small) // 2,
        "exchange:data": (rows * 258 + small) // 2,
        "exchange:node": (rows // 2 * 130 + small // 2) // 2,
        **{k: v for k, v in sent(fz.compress()).items() if k.startswith("reduce")},
    }
    plain, only = sent(fz.compose()), sent(fz.compress(params=None, grads="bf16", axis="node"))
    assert {k: plain[k] for k in ("gather:node", "gather:data", "reduce:data")} == {
        k: only[k] for k in ("gather:node", "gather:data", "reduce:data")
    }
    assert only["exchange:node"] == (512 * 512 + 512 * 2) // 2 * 2 // 2


def test_an_evaluation_computes_with_the_decoded_codes() -> None:
    evaluate = fz.compose(fz.shard_opt_state(), fz.compress())(fz.eval_step(loss_fn))
    program = fz.lower(evaluate, DATA, params(), (BATCH,)).program
    assert [op.fn for op in program.instructions if op.of_codes] == ["encode", "decode"]
    with pytest.raises(TransformError, match=r"does nothing to an evaluation(?s:.*)reduces no gradient"):
        fz.compress(params=None)(fz.eval_step(loss_fn))


def lowered(*transforms: Any, mesh: fz.AbstractMesh = DATA) -> Any:
    return fz.lower(step_of(fz.compose(*transforms)), mesh, params(), BATCH)


def test_wrong_arguments_are_all_named() -> None:
    with pytest.raises(FzeroTypeError) as error:
        fz.compress(params=8, grads={"data": 4}, axis=1, where="w")  # type: ignore[arg-type]
    assert all(x in str(error.value) for x in ("params=8", "grads={'data': 4}", "axis=1", "a predicate is a function"))
    with pytest.raises(FzeroValueError, match=r"params: 'int4'(?s:.*)grads: 'fp8' is not one of int8, int4, bf16"):
        fz.compress(params="int4", grads="fp8")
    with pytest.raises(FzeroValueError, match="axis='node': the mapping already names the axes"):
        fz.compress(grads={"node": "int4"}, axis="node")
    with pytest.raises(FzeroValueError, match="nothing is sent encoded"):
        fz.compress(params=None, grads={"node": None})


NODES = fz.shard_params(axis=("data", "node"))
ALONE = {
    "zero": (fz.AbstractMesh(data=1), fz.shard_params(), fz.compress()),
    "data_parallel": (fz.AbstractMesh(data=1), fz.data_parallel(), fz.compress(grads="int4")),
    "two axes": (fz.AbstractMesh(node=1, data=1), NODES, fz.compress(grads={"data": "int8", "node": "int4"})),
    "one named": (fz.AbstractMesh(node=1, data=2), NODES, fz.compress(axis="node")),
}


@pytest.mark.parametrize("name", ALONE)
def test_over_an_axis_of_one_rank_it_is_the_step_without_it(name: str) -> None:
    mesh, zero, coded = ALONE[name]
    assert lowered(zero, coded, mesh=mesh).program.instructions == lowered(zero, mesh=mesh).program.instructions


def shrunk(path: str, coded: bool) -> tuple[str, float, list[torch.Tensor]]:
    """A step of an elastic run, on however many ranks there are now, from what the run before saved."""

    def main(run: Any) -> tuple[str, float, list[torch.Tensor]]:
        transforms = [fz.shard_params(), *([fz.compress()] if coded else [])]
        train = fz.compile(step_of(fz.compose(*transforms)), run.mesh, backend="eager")
        state = run.state(train, params(), path=path)
        batch, loss = BATCH.chunk(run.mesh.size)[run.mesh.rank], 0.0
        for _ in run.steps(state, int(state.step) + 1):
            state, metrics = train(state, batch)
            run.commit(state)
            loss = float(metrics["loss"])
        run.save(state)
        return run.source, loss, [x.clone() for x in fz.tree.leaves(train.gather(state).params)]

    return fz.run(main, device="cpu")


@pytest.mark.full
def test_a_run_shrinks_to_one_rank_and_grows_again(run_ranks: Any, tmp_path: Path) -> None:
    path, found = str(tmp_path / "run"), list[Any]()
    for ranks in (2, 1, 2):
        if ranks == 1:
            shutil.copytree(path, tmp_path / "plain")
            plain = run_ranks(1, shrunk, str(tmp_path / "plain"), False)[0]
        found += [run_ranks(ranks, shrunk, path, True)[0]]
    assert [source for source, _, _ in found] == ["init", "disk", "disk"]
    assert found[1][1] == plain[1] and all(map(torch.equal, found[1][2], plain[2]))
    assert found[2][1] < found[1][1] < found[0][1]


def test_what_nothing_would_compress_is_refused_by_name() -> None:
    zero = fz.shard_params()
    with pytest.raises(
        FzeroValueError, match=r"does nothing(?s:.*)no transform shards parameters or divides the batch"
    ):
        lowered(fz.compress(), mesh=fz.AbstractMesh(data=1))
    with pytest.raises(FzeroValueError, match=r"does nothing(?s:.*)not selected by `where`"):
        lowered(zero, fz.compress(where=lambda path, leaf: leaf.numel() > 1_000_000))
    with pytest.raises(FzeroValueError, match=r"unknown mesh axis(?s:.*)'node': the mesh has data=2"):
        lowered(zero, fz.compress(grads={"node": "int8"}))
    with pytest.raises(FzeroValueError, match="nothing would be sent encoded over 'replica'"):
        lowered(
            zero,
            fz.data_parallel(axis="replica"),
            fz.compress(params={"replica": "int8", "data": "int8"}, grads=None),
            mesh=fz.AbstractMesh(replica=2, data=2),
        )
    with pytest.raises(TransformError, match=r"conflicts with pipeline(?s:.*)stages split transfers"):
        step_of(fz.compose(zero, fz.pipeline(axis="pipe"), fz.compress()))
    with pytest.raises(TransformError, match=r"tied(?s:.*)`where` matches params\['tied'\], not"):
        lowered(zero, fz.compress(where=lambda path, leaf: "tied" in path))


def test_the_order_of_transforms_does_not_matter() -> None:
    one = lowered(fz.shard_params(), fz.accumulate(2), fz.compress()).program
    other = lowered(fz.compress(), fz.accumulate(2), fz.shard_params()).program
    assert str(one) == str(other) and "compress(params='int8', grads='int8')" in str(one)
