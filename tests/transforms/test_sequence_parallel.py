"""sequence_parallel: what passes between blocks is cut by position, and trains as the plain step does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tensor
import torch
import torch.nn.functional as F

import fzero as fz
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.ops import COLLECTIVES
from fzero.mesh import AbstractMesh
from fzero.sharding.placements import Shard

HEADS, WIDTH, WORDS, LENGTH = 4, 16, 24, 8
BOTH = ("data", "seq")


def shifted(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    labels = F.pad(x[:, 1:], (0, 1), value=-100)  # a shift over parts
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sliced(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def loss_of(masked: bool = False, causal: bool = True, last: Any = shifted) -> Any:
    """The loss of a GPT with as many heads of keys as its parameters have. `masked`: tokens attend to their document
    alone, by a mask that the model makes."""

    @fz.block
    def layer(p, x, mask):
        h = F.layer_norm(x, (WIDTH,), p["norm"])
        q, k, v = (
            (h @ p[name]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in ("query", "key", "value")
        )
        gqa = k.shape[1] != HEADS
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=gqa)
        x = x + y.transpose(1, 2).flatten(2) @ p["out"]
        return x + F.gelu(F.layer_norm(x, (WIDTH,), p["norm2"]) @ p["up"]) @ p["down"]

    def loss(p, batch):
        x, mask = p["emb"][batch["x"]], None
        if masked:
            document = (batch["x"] == 0).cumsum(1)
            mask = (document[:, None, :, None] == document[:, None, None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
        for block in p["layers"]:
            x = layer(block, x, mask)
        logits = F.layer_norm(x, (WIDTH,), p["norm"]) @ p["head"]
        return last(logits, batch["x"])

    return loss


def params(layers: int = 2, keys: int = HEADS) -> Any:
    g = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=g) * 0.2  # noqa: E731
    narrow = keys * WIDTH // HEADS
    block = lambda: {  # noqa: E731
        "norm": make(WIDTH) + 1,
        "norm2": make(WIDTH) + 1,
        "query": make(WIDTH, WIDTH),
        "key": make(WIDTH, narrow),
        "value": make(WIDTH, narrow),
        "out": make(WIDTH, WIDTH),
        "up": make(WIDTH, 4 * WIDTH),
        "down": make(4 * WIDTH, WIDTH),
    }
    blocks = [block() for _ in range(layers)]
    return {"emb": make(WORDS, WIDTH), "head": make(WIDTH, WORDS), "norm": make(WIDTH) + 1, "layers": blocks}


def batch(part: int = 0, parts: int = 1, length: int = LENGTH) -> Any:
    x = torch.randint(0, WORDS, (8, length), generator=torch.Generator().manual_seed(2))
    x[:, 3] = 0
    return {"x": x.chunk(parts)[part].contiguous()}


def step(*transforms: Any, loss: Any = None, **options: Any) -> Any:
    return fz.compose(*transforms)(fz.sequence_parallel(fz.train_step(loss or loss_of(), tensor.OPTIMIZER), **options))


def lowered(mesh: AbstractMesh, *transforms: Any, layers: int = 2, length: int = LENGTH, **more: Any) -> Any:
    shapes = (params(layers), batch(length=length))
    return fz.lower(step(*transforms, **more), mesh, *fz.tree.map(lambda x: torch.empty_like(x, device="meta"), shapes))


def moved(program: Any) -> Counter[tuple[str, str]]:
    """The values that each kind of collective moves."""
    found: Counter[tuple[str, str]] = Counter()
    for x, _ in program.walk():
        if x.op in COLLECTIVES:
            found[x.op, *x.axes] += len(x.args)
    return found


WAYS = {
    "state over both axes": (fz.shard_opt_state(axis=BOTH), fz.remat(policy="none")),
    "gradients over both axes": (fz.shard_grads(axis=BOTH), fz.accumulate(2), fz.remat(policy="full")),
    "parameters over both axes": (fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")),
}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_every_stage_trains_as_the_plain_step(way):
    made = step(*WAYS[way], attention="heads")
    fz.testing.check_equivalent(made, params(), batch(), AbstractMesh(data=2, seq=2), steps=2)


RULES = {"emb": 0, "query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0, "head": 1}
TWO = {
    "alone": ({"seq": 2, "model": 2}, [], "heads"),
    "state over positions": ({"seq": 2, "model": 2}, [fz.shard_opt_state(axis="seq"), fz.accumulate(2)], "heads"),
    "parameters": (
        {"data": 2, "seq": 2, "model": 2},
        [fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")],
        "keys",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("way", TWO)
def test_positions_and_parameters_are_cut_over_two_axes(way):
    axes, transforms, attention = TWO[way]
    made = fz.tensor_parallel(step(*transforms, attention=attention), rules=RULES)
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(), batch()))
    program = fz.lower(made, AbstractMesh(**axes), *shapes).program
    found = moved(program)
    exchanged = "all_to_all_start" if attention == "heads" else "all_gather_start"
    assert found[exchanged, "seq"] >= 16 and found["all_reduce_start", "model"] >= 8 and not program.notes
    fz.testing.check_equivalent(made, params(), batch(), AbstractMesh(**axes), steps=2)


def test_what_one_axis_scatters_the_other_has_cut_before():
    """Blocks read parts of the features, so what `out` makes is scattered over the model axis."""
    made = step(fz.tensor_parallel(rules={"emb": 1, "out": 0}), attention="keys")
    fz.testing.check_equivalent(made, params(1), batch(), AbstractMesh(seq=2, model=2), steps=1)


@pytest.mark.full
@pytest.mark.parametrize(("keys", "masked"), [(2, True), (1, False)])
def test_fewer_heads_of_keys_than_ranks_and_documents(keys, masked):
    made = step(loss=loss_of(masked))
    fz.testing.check_equivalent(made, params(1, keys), batch(), AbstractMesh(seq=4), steps=2)


@pytest.mark.full
def test_heads_that_do_not_divide_gather_keys():
    """Of 4 heads over 8 ranks each rank has its queries, and all keys."""
    program = lowered(AbstractMesh(seq=8)).program
    assert not moved(program)["all_to_all_start", "seq"] and not program.notes
    fz.testing.check_equivalent(step(loss=loss_of(causal=False)), params(1), batch(), AbstractMesh(seq=8), steps=2)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "min_cut"])
def test_a_layer_exchanges_four_values_each_way(remat):
    few, many = (lowered(AbstractMesh(seq=2), fz.remat(policy=remat), layers=n).program for n in (2, 6))
    gradients = {("all_reduce_start", "seq"): 8}
    each = {key: n / 4 for key, n in (moved(many) - moved(few)).items()}
    assert each == gradients | {("all_to_all_start", "seq"): 8}
    few, many = (
        lowered(AbstractMesh(seq=2), fz.remat(policy=remat), layers=n, attention="keys").program for n in (2, 6)
    )
    each = {key: n / 4 for key, n in (moved(many) - moved(few)).items()}
    assert each == gradients | {("all_gather_start", "seq"): 4, ("reduce_scatter_start", "seq"): 2}
    assert not many.notes and len(few.functions) == len(many.functions)
    passing = [many.values_by_name[f"layer_{number}"] for number in range(5)]
    assert all(v.placement.dim_shards == (("seq", Shard(1)),) for v in passing)


def test_gradients_are_reduced_once_over_data_and_positions():
    program = lowered(
        AbstractMesh(data=2, seq=2), fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")
    ).program
    scattered = [x.axes for x in program.instructions if x.op == "reduce_scatter_start"]
    leaves = sum(x.role == "params" and bool(x.layout.axes) for x in program.leaves.values())
    assert {*scattered} == {("data",), ("seq",)}
    assert moved(program)["reduce_scatter_start", "data"] == moved(program)["reduce_scatter_start", "seq"] == leaves
    assert all(x.layout.axes == BOTH for x in program.leaves.values() if x.role == "params" and x.numel > 100)


def on_ranks(
    axes: dict[str, int],
    transforms: list[Any],
    backend: str,
    attention: Any = "auto",
    tolerance: float = 1e-5,
    **options: Any,
) -> str:
    mesh = fz.make_mesh(**axes, **options)
    part = (mesh.index("data"), axes["data"]) if "data" in axes else (0, 1)
    made = step(*transforms, attention=attention)
    report = fz.testing.check_equivalent(made, params(), batch(*part), mesh, backend=backend, steps=2)
    evaluation = fz.compose(*transforms)(fz.sequence_parallel(fz.eval_step(loss_of()), attention=attention))
    state = fz.compile(made, mesh, backend=backend).init(params())
    loss = fz.compile(evaluation, mesh, backend=backend)(state.params, batch(*part))
    torch.testing.assert_close(loss, loss_of()(params(), batch(*part)), rtol=tolerance, atol=tolerance)
    return str(report)


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_on_ranks(run_ranks, shared):
    run_ranks(2, on_ranks, {"seq": 2}, [fz.accumulate(2)], "eager", "heads", shared_memory=shared)
    both = [fz.shard_params(axis=BOTH)]
    two = [fz.tensor_parallel(rules=RULES), fz.shard_opt_state(axis="seq")]
    if not shared:
        run_ranks(4, on_ranks, {"data": 2, "seq": 2}, both, "eager", "auto", shared_memory=shared)
        run_ranks(4, on_ranks, {"seq": 2, "model": 2}, two, "eager", "heads", shared_memory=shared)
        return
    run_ranks(4, on_ranks, {"seq": 2, "model": 2}, [*two, fz.mixed_precision("bf16")], "eager", "keys", 2e-2)
    more = [fz.shard_params(axis=BOTH), fz.mixed_precision("bf16"), fz.accumulate(2)]
    run_ranks(4, on_ranks, {"data": 2, "seq": 2}, more, "eager", "keys", 2e-2)
    away = [fz.shard_params(axis=BOTH), fz.offload("cpu")]
    run_ranks(4, on_ranks, {"data": 2, "seq": 2}, away, "eager", "auto")


@pytest.mark.full
def test_compiled(run_ranks):
    run_ranks(2, on_ranks, {"seq": 2}, [], "inductor", "auto", timeout=300)


@pytest.mark.exhaustive
def test_compiled_over_two_axes(run_ranks):
    two = [fz.tensor_parallel(rules=RULES), fz.shard_grads(axis="seq")]
    run_ranks(4, on_ranks, {"seq": 2, "model": 2}, two, "inductor", "heads", timeout=300)


def scored(p: Any, x: torch.Tensor) -> Any:
    """What an evaluation may return: means over the mesh, sums, a maximum, values of each sample and each token."""
    kept = []
    loss_of(last=lambda logits, _: kept.append(logits) or logits.sum())(p, {"x": x})
    (logits,), labels = kept, F.pad(x[:, 1:], (0, 1), value=-100)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(x)
    count, right = (labels != -100).sum(), (logits.argmax(-1) == labels).sum().float()
    total = each.sum()
    return {
        "loss": fz.weighted(total, count),
        "accuracy": fz.weighted(right, count),
        "both": (fz.weighted(total, x.numel()), total),
        "weights": fz.weighted(p["head"].square().sum(), 2),
        "largest": each.max(),
        "sample": each.mean(1),
        "logits": logits,
    }


EVALUATIONS: dict[str, tuple[dict[str, int], list[Any]]] = {
    "positions": ({"seq": 2}, [fz.sequence_parallel()]),
    "keys and data": ({"data": 2, "seq": 2}, [fz.sequence_parallel(attention="keys"), fz.shard_params(axis=BOTH)]),
    "parameters": ({"data": 2, "model": 2}, [fz.tensor_parallel(rules=RULES), fz.shard_params()]),
    "positions between parameters": ({"model": 2}, [fz.tensor_parallel(rules=RULES, sequence=True)]),
    "both": ({"seq": 2, "model": 2}, [fz.sequence_parallel(), fz.tensor_parallel(rules=RULES)]),
}


@pytest.mark.full(keep=["positions between parameters", "positions", "parameters"])
@pytest.mark.parametrize("way", EVALUATIONS)
def test_an_evaluation_returns_means_over_the_mesh_and_values_of_its_rows(way):
    axes, transforms = EVALUATIONS[way]
    x, p = batch()["x"], params(1)
    plain = fz.eval_step(scored)
    over_mesh, parts = plain(p, x), x.chunk(axes.get("data", 1))
    for rank, found in enumerate(tensor.evaluated(fz.compose(*transforms)(plain), AbstractMesh(**axes), p, x)):
        wanted = plain(p, parts[rank * len(parts) // AbstractMesh(**axes).size])
        wanted |= {name: over_mesh[name] for name in ("loss", "accuracy", "weights")}
        wanted["both"] = over_mesh["both"][0], wanted["both"][1]
        torch.testing.assert_close(found, wanted)


def test_an_evaluation_of_nothing_with_positions():
    found = tensor.evaluated(
        fz.sequence_parallel(fz.eval_step(lambda p: p["head"].norm())), AbstractMesh(seq=2), params(1)
    )
    torch.testing.assert_close(found, [params(1)["head"].norm()] * 2)


def given_other_rows() -> None:
    mesh = fz.make_mesh(seq=2)
    train = fz.compile(step(), mesh, backend="eager")
    train(train.init(params()), batch(mesh.rank, 2))


def test_ranks_along_the_axis_have_one_batch(run_ranks):
    for rank in run_ranks(2, given_other_rows, expect_error=True):
        assert rank.type == "DivergenceError" and "batch['x']: not the same on rank 1 as on rank 0" in rank.message


def test_what_cannot_be_cut():
    with pytest.raises(FzeroValueError, match=r"dim 1 of 6 is not a multiple of 4\n.*4 or 8 positions"):
        lowered(AbstractMesh(seq=4), length=6)
    with pytest.raises(
        FzeroValueError,
        match=r"4 heads over 8 ranks\n.*\(8\), fewer ranks, or fz.sequence_parallel\(attention='keys'\)",
    ):
        lowered(AbstractMesh(seq=8), attention="heads")
    with pytest.raises(FzeroValueError, match=r"unknown mesh axis\n  'seq': the mesh has data=2"):
        lowered(AbstractMesh(data=2), fz.data_parallel())
    with pytest.raises(TransformError, match="let data_parallel name another axis"):
        step(fz.data_parallel(axis="seq"))
    with pytest.raises(TransformError, match="two axes would shard positions: leave sequence=True out"):
        step(fz.tensor_parallel(rules={"up": 1}, sequence=True))
    with pytest.raises(TransformError, match="tensor_parallel and sequence_parallel both shard along 'seq'"):
        step(fz.tensor_parallel(rules={"up": 1}, axis="seq"))
    with pytest.raises(TransformError, match="expert_parallel and sequence_parallel both shard along 'seq'"):
        step(fz.expert_parallel(where=lambda path, leaf: True, axis="seq"))
    with pytest.raises(FzeroTypeError, match=r"attention='ring': one of 'auto', 'heads', 'keys'"):
        fz.sequence_parallel(attention="ring")  # type: ignore[arg-type]
    flat = fz.sequence_parallel(fz.train_step(lambda p, x: (x @ p).square().mean(), fz.optim.sgd(0.1)))
    with pytest.raises(FzeroValueError, match=r"pass between blocks\nFix: mark"):
        fz.lower(flat, AbstractMesh(seq=2), torch.zeros(4, 4), torch.zeros(2, 8, 4))


@pytest.mark.full
def test_what_reads_all_positions_is_equal_and_named():
    made = step(loss=loss_of(last=sliced))
    fz.testing.check_equivalent(made, params(1), batch(), AbstractMesh(seq=2), steps=2)
    (note,) = lowered(AbstractMesh(seq=2), loss=loss_of(last=sliced)).program.notes
    assert "aten.slice.Tensor of" in note and "is computed unsharded on every rank of seq: 6.0 KiB" in note
    with pytest.raises(FzeroValueError, match=r"(?s)would be computed unsharded.*slice.*shift labels, not logits"):
        lowered(AbstractMesh(seq=2), loss=loss_of(last=sliced), max_replicated_bytes="1KiB")


@fz.block
def mixing(p, x):
    """Operations that read all positions: a causal convolution of each channel, a running mean."""
    kept = F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), p["conv"], groups=WIDTH).transpose(1, 2)
    return x + kept @ p["out"] + p["scale"] * x.cumsum(1) / LENGTH


def mixed(p, batch):
    x = p["emb"][batch["x"]] + p["position"]
    for block in p["layers"]:
        x = mixing(block, x)
    return shifted(x @ p["head"], batch["x"])


MIXED = {
    "parameters over both axes": [fz.shard_params(axis=BOTH)],
    "positions first": [fz.shard_params(axis=("seq", "data")), fz.accumulate(2)],
    "gradients": [fz.shard_grads(axis=BOTH), fz.accumulate(2, schedule="layerwise")],
    "data alone": [fz.shard_opt_state()],
}


@pytest.mark.full(keep=["parameters over both axes"])
@pytest.mark.parametrize("way", MIXED)
def test_gradients_of_what_reads_all_positions(way):
    """They are whole on every rank along the axis: the reduction over it has one summand of each."""
    g = torch.Generator().manual_seed(3)
    whole = {"emb": (WORDS, WIDTH), "head": (WIDTH, WORDS), "position": (LENGTH, WIDTH)}
    layer = {"conv": (WIDTH, 1, 3), "out": (WIDTH, WIDTH), "scale": (WIDTH,)}
    make = lambda shapes: {k: torch.randn(s, generator=g) * 0.3 for k, s in shapes.items()}  # noqa: E731
    made = step(*MIXED[way], loss=mixed)
    where = AbstractMesh(data=2, seq=2)
    fz.testing.check_equivalent(made, make(whole) | {"layers": [make(layer), make(layer)]}, batch(), where, steps=2)


@pytest.mark.full
def test_a_mesh_with_one_rank_along_the_axis_is_the_plain_one():
    program = lowered(AbstractMesh(data=2, seq=1), fz.shard_params(axis=BOTH)).program
    assert not any("seq" in x.axes for x, _ in program.walk())
