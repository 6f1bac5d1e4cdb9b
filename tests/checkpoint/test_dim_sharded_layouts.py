"""Leaves that rest cut along dims: the boxes of a rank, states initialised, saved, restored, gathered and trained."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from cuts import cut_dims
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.ops import transfer_bytes
from fzero.mesh import Mesh
from fzero.sharding.layout import Layout, Leaf, shard
from fzero.sharding.layout import place as place_on
from fzero.sharding.placements import Shard
from fzero.sharding.shard_regions import Boxes, DimShard, part_shape, parts_of, uneven

# --- boxes ---


@st.composite
def _cuts(draw: Any, shape: tuple[int, ...]) -> Boxes:
    """Any elements of a part."""
    along: list[DimShard] = []
    for _ in range(draw(st.integers(0, 2)) if shape else 0):
        one = DimShard(*(draw(st.integers(*n)) for n in ((0, len(shape) - 1), (1, 3), (1, 3))))
        along += [one] * (uneven(shape, [*along, one]) is None)
    numel, place = math.prod(part_shape(shape, along)), draw(st.integers(0, math.prod(a.size for a in along) - 1))
    start = draw(st.integers(0, numel))
    return Boxes(shape, tuple(along), place, start, draw(st.integers(start, numel)))


_pairs = st.lists(st.sampled_from([1, 2, 4, 6, 12]), max_size=3).flatmap(
    lambda shape: st.tuples(_cuts(tuple(shape)), _cuts(tuple(shape)))
)


def cut_by_hand(whole: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """A part by PyTorch's `chunk`: a group after the other, of each the run of this rank."""
    left, place = math.prod(a.size for a in boxes.along), boxes.place
    for dim, groups, size in boxes.along:
        left //= size
        index, place = divmod(place, left)
        whole = torch.cat([group.chunk(size, dim)[index] for group in whole.chunk(groups, dim)], dim)
    return whole.reshape(-1)[boxes.start : boxes.stop]


@given(_pairs)
def test_boxes_are_what_chunks_are_and_have_in_common_what_these_have(pair):
    one, other = pair
    whole = torch.arange(math.prod(one.shape)).view(one.shape)
    here, there = one.take(whole), other.take(whole)
    assert torch.equal(here, cut_by_hand(whole, one))
    runs = one.runs(other)
    assert all(torch.equal(here[a : a + n], there[b : b + n]) for a, b, n in runs)
    common = [x for a, _, n in runs for x in here[a : a + n].tolist()]
    assert common == [x for x in here.tolist() if x in {*there.tolist()}] and one.meets(other) == bool(common)
    out = torch.full(one.shape, -1)
    for part in parts_of(one.shape, one.along):
        part.put(part.take(whole), out)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("axes", [("model",), ("model", "data"), ("data",), ("model", "expert", "data"), ()])
def test_the_shards_of_a_leaf_make_it_up(axes):
    dims = (Shard(1, 3), Shard(0)) if "expert" in axes else (Shard(1, 3),) if "model" in axes else ()
    leaf = Leaf("params['w']", "params", (70, 36), Layout(torch.float32, axes, grid=("model", "data"), dims=dims))
    mesh, whole = {"data": 2, "model": 2, "expert": 5}, torch.arange(1.0, 70 * 36 + 1).view(70, 36)
    ranks = [Mesh(mesh, rank, torch.device("cpu")) for rank in range(20)]
    seen = []
    for place in range(ranks[0].axis_size(axes)):
        mine = next(m for m in ranks if m.index(axes) == place)
        part = shard(whole, leaf, mine)
        boxes = leaf.boxes(mine)
        assert tuple(part.shape) == leaf.stored_shape(mine)
        assert (
            torch.equal(part.reshape(-1)[: boxes.numel], boxes.take(whole))
            and not part.reshape(-1)[boxes.numel :].any()
        )
        seen += boxes.take(whole).tolist()
    assert sorted(seen) == whole.reshape(-1).tolist()


# --- on ranks ---


@fz.block
def layer(p, x):
    q, k, v = (x @ p["qkv"] + p["bias"]).chunk(3, -1)
    return x + (torch.sigmoid(q) * k + v) @ p["out"]


def loss_fn(params, batch):
    for p in params["layers"]:
        batch = layer(p, batch)
    return (batch * params["scale"]).square().sum(1).mean()


def init(key: torch.Tensor) -> Any:
    keys = fz.random.split(key, 5)
    make = lambda i: {  # noqa: E731
        "qkv": fz.random.normal(keys[i], (10, 36)) / 4,
        "bias": torch.zeros(36) + 0.125,
        "out": fz.random.uniform(keys[i + 2], (12, 10)) / 8,
    }
    return {"layers": [make(0), make(1)], "scale": fz.random.normal(keys[4], (10,))}


RULES = {
    "columns": {"qkv": Shard(1), "bias": Shard(0), "out": Shard(0)},
    "groups": {"qkv": Shard(1, 3), "bias": Shard(0, 3), "out": Shard(0)},
    "rows": {"qkv": Shard(0), "out": Shard(1)},
}


WAYS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "one rank": ({"data": 1}, []),
    "flat": ({"data": 2}, [fz.shard_params()]),
    **{rules: ({"model": 2}, [cut_dims("model", **RULES[rules]), fz.data_parallel(axis="model")]) for rules in RULES},
    **{
        f"{rules} x {name}": ({"data": 2, "model": 2}, [cut_dims("model", **RULES[rules]), *zero])
        for rules, name, zero in (
            ("columns", "both", [fz.shard_params(axis=("data", "model"))]),
            ("groups", "params", [fz.shard_params(), fz.data_parallel(axis="model")]),
            ("rows", "grads", [fz.shard_grads(), fz.data_parallel(axis="model")]),
        )
    },
    "model outside": (
        {"model": 2, "data": 2},
        [cut_dims("model", **RULES["groups"]), fz.shard_opt_state(), fz.data_parallel(axis="model")],
    ),
    "two cuts": (
        {"data": 2, "model": 2},
        [
            cut_dims("model", **RULES["groups"]),
            cut_dims("data", qkv=Shard(1, 3)),
            fz.shard_params(axis=("data", "model")),
        ],
    ),
    "blocks": ({"model": 4}, [cut_dims("model", **RULES["columns"]), fz.data_parallel(axis="model")]),
}


def step(way: str, *more: Any) -> fz.Step:
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    return fz.compose(*WAYS[way][1], *more)(fz.train_step(loss_fn, optimizer))


def batches(num: int = 3) -> list[torch.Tensor]:
    return [torch.randn(16, 10, generator=torch.Generator().manual_seed(i)) for i in range(num)]


def same(a: Any, b: Any) -> bool:
    pairs = zip(fz.tree.leaves((a.params, a.opt_state)), fz.tree.leaves((b.params, b.opt_state)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def off(a: Any, b: Any) -> float:
    """The largest relative difference of a leaf."""
    pairs = zip(fz.tree.leaves((a.params, a.opt_state)), fz.tree.leaves((b.params, b.opt_state)), strict=True)
    return max((x - y).norm().item() / max(y.norm().item(), 1e-9) for x, y in pairs if x.is_floating_point())


def went(ways: list[str], weights: str) -> list[Any]:
    """On every rank, by way: whether the state that it begins with is the plain step's to the bit, made by a function,
    cut from whole values and read from files; and whether it trains as that does."""
    mesh, plain, out = fz.make_mesh(**WAYS[ways[0]][0]), step("one rank"), []
    begun, want = plain.init(init, fz.random.key(5)), plain.init(init, fz.random.key(5))
    for batch in batches():
        want, metrics = plain(want, batch)
    for way in ways:
        train = fz.compile(step(way), mesh, backend="eager")
        state = train.init(init, fz.random.key(5))
        right = same(train.gather(state), begun) and same(train.gather(train.init(begun.params)), begun)
        right = right and same(train.gather(train.load(weights, init)), begun)
        rows = 16 // mesh.size
        for batch in batches():
            state, seen = train(state, batch[mesh.rank * rows :][:rows])
        found = train.gather(state)
        close = off(found, want) < 1e-5 and abs(seen["loss"].item() - metrics["loss"].item()) < 1e-5
        out.append((way, right, close))
    return out


def on(axes: dict[str, int]) -> list[str]:
    return [way for way, (mesh, _) in WAYS.items() if mesh == axes]


ALL = [{"data": 1}, {"data": 2}, {"model": 2}, {"data": 2, "model": 2}, {"model": 2, "data": 2}, {"model": 4}]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("axes", ALL[1:], ids=str)
def test_a_state_begins_and_trains_as_that_of_one_process(run_ranks, tmp_path, axes):
    params, weights = init(fz.random.key(5)), str(tmp_path / "model.safetensors")
    save_file(dict(zip(fz.tree.names(params), fz.tree.leaves(params), strict=True)), weights)
    for found in run_ranks(math.prod(axes.values()), went, on(axes), weights):
        assert found == [(way, True, True) for way in on(axes)]


# --- beside other transforms ---


def beside(way: str, path: str) -> list[Any]:
    """By other transforms, on every rank: how far three steps are from those of the same step on flat shards alone."""
    axes, transforms = WAYS[way]
    mesh, out = fz.make_mesh(unified_memory=False, **axes), []
    flat = fz.make_mesh(unified_memory=False, **axes), [fz.shard_params(axis=("data", "model"))]
    for more in (
        [fz.mixed_precision("bf16"), fz.accumulate(2)],
        [fz.offload("cpu", ("opt_state", "params")), fz.accumulate(2, schedule="layerwise")],
        [fz.mixed_precision("bf16"), fz.offload("nvme", ("opt_state", "gradients"), path=path)],
        [fz.mixed_precision("fp16"), fz.remat("none")],
    ):
        ends = []
        for on, spread in ((mesh, transforms), flat):
            made = fz.compose(*spread, *more)(fz.train_step(loss_fn, optim.adamw(1e-2)))
            train = fz.compile(made, on, backend="eager")
            state = train.init(init, fz.random.key(2))
            for batch in batches():
                state, _ = train(state, batch[on.rank * 4 :][:4])
            ends.append(train.gather(state))
        out.append(off(*ends))
    return out


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way",
    ["groups x params", *(pytest.param(w, marks=pytest.mark.exhaustive) for w in ("rows x grads", "model outside"))],
)
def test_beside_other_transforms_it_is_as_on_flat_shards(run_ranks, tmp_path, way):
    for found in run_ranks(4, beside, way, str(tmp_path), timeout=240):
        assert max(found) < 1e-4, found


def lowered(transform: Any, optimizer: Any = None, **axes: Any) -> fz.Lowered:
    meta = fz.tree.map(lambda x: x.to("meta"), init(fz.random.key(0)))
    made = transform(fz.train_step(loss_fn, optimizer or optim.adamw(1e-3)))
    return fz.lower(made, fz.AbstractMesh(**(axes or {"data": 2, "model": 2})), meta, torch.empty(4, 10, device="meta"))


def test_each_byte_moves_once_over_each_axis():
    """Gradients leave a rank as over axes that cut flat: half over `model`, of which half over `data`."""
    program = lowered(fz.compose(cut_dims("model", **RULES["groups"]), fz.shard_params(axis=("data", "model")))).program
    sent: Counter[str] = Counter()
    for op, times in program.walk():
        if op.op == "reduce_scatter_start":
            sent[op.axes[0]] += times * transfer_bytes(op, program.values_by_name, program.mesh)
    parameters, uncut = 4 * (2 * (360 + 36 + 120) + 10), 4 * 10
    assert sent == {"model": pytest.approx(parameters / 2, abs=uncut), "data": pytest.approx(parameters / 4, abs=uncut)}
    assert "permuted(model along 1 in 3 groups of model, data) partial(data, model)" in str(program)


def test_a_size_of_one_is_no_cut():
    text = str(lowered(fz.compose(cut_dims("model", qkv=Shard(1)), fz.shard_params()), data=2, model=1).program)
    assert "along" not in text and "join_parts" not in text


def test_what_cannot_be_cut_is_refused_by_name():
    over = fz.compose(fz.shard_params(), fz.data_parallel(axis="model"))
    with pytest.raises(FzeroValueError) as error:
        lowered(fz.compose(cut_dims("model", qkv=Shard(1, 5), out=Shard(2), scale=Shard(0)), over), data=2, model=4)
    text = " ".join(str(error.value).split())
    assert (
        "params['layers'][0]['qkv'] (float32[10, 36]): dim 1 of 36 is not a multiple of 20: 4 shards of 5 groups"
        in text
    )
    assert "params['layers'][1]['out'] (float32[12, 10]): it has no dim 2" in text
    assert "params['scale'] (float32[10]): dim 0 of 10 is not a multiple of 4: 4 shards" in text and "Fix:" in text
    with pytest.raises(FzeroValueError, match="the mesh has no axis 'expert'"):
        lowered(fz.compose(cut_dims("expert", qkv=Shard(1)), over))
    with pytest.raises(TransformError, match=r"over axis 'model' already"):
        lowered(fz.compose(cut_dims("model", qkv=Shard(1)), cut_dims("model", qkv=Shard(0)), over))
    with pytest.raises(FzeroValueError, match=r"no transform uses a mesh axis"):
        lowered(fz.compose(cut_dims("model", qkv=Shard(1)), fz.shard_params()))


def test_what_does_not_run_on_parts_is_refused_by_name():
    cut = fz.compose(cut_dims("model", out=Shard(1)), fz.shard_params(), fz.data_parallel(axis="model"))

    def turned(transform: Any) -> optim.GradientTransformation:
        return optim.GradientTransformation(
            lambda params: {}, lambda grads, state, params: (fz.tree.map(transform, grads), state)
        )

    with pytest.raises(FzeroTypeError, match=r"aten.view.* on the gradient of params\['layers'\]\[0\]\['out'\]"):
        lowered(cut, turned(lambda g: g.reshape(-1).mul(2).reshape(g.shape)))
    with pytest.raises(FzeroTypeError, match=r"random numbers for a tensor that is sharded over model along 1, data"):
        lowered(fz.compose(cut, fz.mixed_precision("bf16", params="bf16")))


def test_a_state_that_is_cut_otherwise_is_refused_with_both_sides():
    mesh = fz.make_mesh(data=1)
    state = fz.compile(step("one rank"), mesh, backend="eager").init(init, fz.random.key(0))
    leaf, _ = state.params["layers"][0]["qkv"]._fzero
    other = leaf.with_layout(axes=("data",), dims=(Shard(1, 3),))
    state.params["layers"][0]["qkv"] = place_on(torch.zeros(360), other, mesh)
    with pytest.raises(FzeroValueError, match=r"float32\[10, 36\] sharded over data along 1 in 3 groups in the state"):
        fz.compile(step("one rank"), mesh, backend="eager")(state, batches()[0])
