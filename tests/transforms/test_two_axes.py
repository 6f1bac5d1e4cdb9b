"""ZeRO over two axes, hop by hop: equal to one process, to ZeRO over one axis, and, where nothing but where bytes lie
differs, to the bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import BudgetError, FzeroError, FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.ops import transfer_bytes

AXES = {"node": 2, "data": 2}
BOTH = ("data", "node")


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"] + p["bias"]) @ p["down"]


def loss_fn(params, batch):
    for p in params["layers"]:
        batch = layer(p, batch)
    return (batch * params["scale"]).square().sum(1).mean()


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers: what they add up to is exact, whatever the order."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def params(width: int = 5) -> Any:
    """Nothing divides by 4: 55, 11 and 5 elements."""
    hidden = 2 * width + 1

    def make(i: int) -> dict[str, torch.Tensor]:
        return {"up": whole((width, hidden), i), "bias": whole((hidden,), i + 3), "down": whole((hidden, width), i + 7)}

    return {"layers": [make(i) for i in range(2)], "scale": torch.full((width,), 0.5)}


def drawn(key: torch.Tensor) -> Any:
    """Leaves of which some have blocks of 256 elements, and one fewer than there are ranks."""
    keys = fz.random.split(key, 3)
    return {
        "layers": [
            {
                "up": fz.random.normal(keys[0], (72, 70)) / 8,
                "bias": torch.zeros(70),
                "down": fz.random.normal(keys[1], (70, 72)) / 8,
            }
        ],
        "scale": fz.random.normal(keys[2], (1,)),
    }


def clipped() -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def weights(path: str, leaf: Any) -> bool:
    return "bias" not in path


WAYS: dict[str, list[Any]] = {
    "params": [fz.shard_params(axis=BOTH)],
    "grads": [fz.shard_grads(axis=BOTH)],
    "opt_state": [fz.shard_opt_state(axis=BOTH)],
    "node first": [fz.shard_params(axis=("node", "data"))],
    "params by data": [fz.shard_params(axis="data"), fz.shard_opt_state(axis=BOTH)],
    "grads by data": [fz.shard_grads(axis="data"), fz.shard_opt_state(axis=BOTH)],
    "params and grads": [fz.shard_params(axis="data"), fz.shard_grads(axis=BOTH)],
    "some by data": [
        fz.shard_params(axis="data", where=weights),
        fz.shard_opt_state(axis=BOTH, where=lambda path, leaf: "down" in path or "head" in path),
    ],
    "once": [fz.shard_params(axis=BOTH), fz.hierarchical()],
    "gathers once": [fz.shard_params(axis=BOTH), fz.hierarchical(reductions=False)],
    "some gathers once": [fz.shard_params(axis=BOTH), fz.hierarchical(gathers=0.5)],
    "reductions once": [fz.shard_params(axis=BOTH), fz.hierarchical(gathers=0.0)],
    "grads once": [fz.shard_grads(axis=BOTH), fz.hierarchical()],
}


def step(way: str, num_micro: int = 1, optimizer: Any = None, *more: Any) -> fz.Step:
    out = fz.compose(*WAYS[way], *more)(fz.train_step(loss_fn, optimizer or clipped()))
    return fz.accumulate(num_micro)(out) if num_micro > 1 else out


def trained(mesh: fz.Mesh, step: fz.Step, batches: list[torch.Tensor], init: Any = None) -> tuple[list[float], Any]:
    train = fz.compile(step, mesh, backend="eager")
    state, losses = train.init(init or params()), []
    for batch in batches:
        state, metrics = train(state, batch[mesh.rank * 4 :][:4])
        losses.append(metrics["loss"].item())
    return losses, train.gather(state)


def wrong(exact: list[tuple[str, int]], close: list[tuple[str, int]]) -> list[Any]:
    """On every rank: the cases that are not what one process does with the whole batch. Sums of whole numbers to the
    bit, training to 1e-6."""
    mesh, out = fz.make_mesh(**AXES), []
    for cases, optimizer, tolerance, batches in (
        (exact, optim.sgd(0.25), 0.0, [whole((16, 5), 100)]),
        (close, clipped(), 1e-6, [whole((16, 5), s) for s in range(3)]),
    ):
        plain = fz.train_step(loss_fn, optimizer)
        want = plain.init(params())
        for batch in batches:
            want, metrics = plain(want, batch)
        for case in cases:
            losses, got = trained(mesh, step(*case, optimizer), batches)
            pairs = zip(
                fz.tree.leaves((got.params, got.opt_state)), fz.tree.leaves((want.params, want.opt_state)), strict=True
            )
            off = max((a - b).norm().item() / max(b.norm().item(), 1e-9) for a, b in pairs if a.is_floating_point())
            if off > 10 * tolerance or abs(losses[-1] - metrics["loss"].item()) > tolerance * abs(losses[-1]):
                out.append((*case, tolerance, off, losses[-1], metrics["loss"].item()))
    return out


@pytest.mark.full
def test_training_is_that_of_one_process(run_ranks):
    """Each way whole and in micro-batches, one with each optimizer."""
    exact = [(way, 2 if "once" in way else 1 + i % 2) for i, way in enumerate(WAYS)]
    assert run_ranks(4, wrong, exact, [(way, 3 - num_micro) for way, num_micro in exact]) == [[]] * 4


# --- what moves ---


def moved(program: Any) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind and axis; those of scalars left out."""
    found: Counter[str] = Counter()
    for op, times in program.walk():
        if op.op.endswith("_start") and op.op != "all_reduce_start":
            (axis,) = op.axes
            found[f"{op.op.removesuffix('_start')}:{axis}"] += times * transfer_bytes(
                op, program.values_by_name, program.mesh
            )
    return dict(found)


def lowered(way: str, num_micro: int = 1, *more: Any, **budgets: Any) -> fz.Lowered:
    meta = fz.tree.map(lambda x: x.to("meta"), params(8))
    return fz.lower(
        step(way, num_micro, None, *more), fz.AbstractMesh(**AXES), meta, torch.empty(8, 8, device="meta"), **budgets
    )


P = 4 * (2 * 2 * 8 * 17 + 2 * 17 + 8)  # bytes of all parameters


def near(nbytes: float) -> Any:
    """That many bytes, but for those that whole numbers of elements round off."""
    return pytest.approx(nbytes, abs=64)


def test_each_byte_crosses_nodes_once():
    """Over `node` goes half of half: what a rank has of its node's part. Over one axis of all ranks half of three
    quarters would cross nodes."""
    found = moved(lowered("params").program)
    assert (found["reduce_scatter:data"], found["reduce_scatter:node"]) == (near(P / 2), near(P / 4))
    assert found["all_gather:data"] == near(2 * found["all_gather:node"])
    assert P / 2 < found["all_gather:data"] < P, "a backward may lack some"
    by_axis = {"node": near(P / 4), "data": near(P / 2)}
    kinds = ("all_gather", "reduce_scatter")
    assert moved(lowered("opt_state").program) == {f"{kind}:{axis}": n for kind in kinds for axis, n in by_axis.items()}


def test_stages_over_prefixes_move_between_the_places_where_each_rests():
    """Parameters by `data` are gathered over it alone; new ones over `node`, once a step; gradients add up by
    `data`."""
    for num_micro in (1, 4):
        found = moved(lowered("params by data", num_micro).program)
        assert found.pop("all_gather:data") == num_micro * moved(lowered("params").program)["all_gather:data"]
        assert found == {
            "all_gather:node": near(P / 4),
            "reduce_scatter:data": near(num_micro * P / 2),
            "reduce_scatter:node": near(P / 4),
        }


def test_masters_rest_as_their_state_and_their_copies_are_gathered_once():
    found = lowered("params by data", 4, fz.mixed_precision("bf16"))
    assert {leaf.layout.axes for leaf in found.program.leaves.values() if leaf.role == "params" and leaf.numel > 3} == {
        BOTH
    }
    assert moved(found.program)["all_gather:node"] == near(P / 8), "in bf16, once a step"


@pytest.mark.parametrize("way", ["once", "grads once", "gathers once", "reductions once"])
def test_hierarchical_parameters_are_gathered_once_per_step(way):
    """Whatever the number of micro-batches; what is not asked for crosses once a micro-batch, or twice."""
    one = moved(lowered(way, 1).program)
    for num_micro in (2, 4):
        found = moved(lowered(way, num_micro).program)
        gathers = found["all_gather:data"] / 2 if way == "reductions once" else P / 4  # as often as over the fast axis
        assert (found["all_gather:node"], found["reduce_scatter:node"]) == (
            near(gathers),
            near((num_micro if way == "gathers once" else 1) * P / 4),
        )
        assert found["reduce_scatter:data"] == num_micro * one["reduce_scatter:data"], "over the fast axis as ever"


def test_a_budget_decides_how_much_stays_gathered():
    """As much as fits: all with room, less with less, and never more than asked for."""
    most = lowered("once", 4)
    roomy = lowered("once", 4, memory_budget="1GB")
    assert roomy.options.secondary_shard == most.options.secondary_shard == 1.0
    least = min(lowered("reductions once", 4).plan.peak_bytes, most.plan.peak_bytes)
    tight = lowered("once", 4, memory_budget=least + 64)
    assert tight.options.secondary_shard < 1.0 and tight.plan.peak_bytes <= least + 64
    assert moved(tight.program)["all_gather:node"] > moved(most.program)["all_gather:node"]
    assert lowered("some gathers once", 4, memory_budget="1GB").options.secondary_shard == 0.5


def test_a_plan_prices_each_axis_on_its_link():
    """Of hosts of 2 devices `data` is within one, `node` between two."""
    from dataclasses import replace

    from fzero.plan.cost import seconds
    from fzero.plan.device_lookup import get_device

    found = lowered("params")
    device = replace(get_device("h100"), devices_per_host=2)
    for op, _ in found.program.walk():
        if op.op == "all_gather_start":
            sent, within = (
                transfer_bytes(op, found.program.values_by_name, found.program.mesh),
                op.axes == ("data",),
            )
            link = device.links["intra" if within else "inter"]
            assert seconds(op, found.program, device) == pytest.approx(
                (1 if within else 2) * link.latency + sent / link.bandwidth
            )
    assert {c.partition(":")[2] for c in found.plan_on(device).channels} >= {"data", "node"}


@pytest.mark.full
def test_advice_of_a_budget_is_to_shard_over_every_axis():
    """Over those that something is sharded over already, and over the others too, the fastest first."""
    meta = fz.tree.map(lambda x: x.to("meta"), params(64))
    plain = fz.train_step(loss_fn, optim.adamw(1e-3))
    for transforms in ([fz.shard_opt_state(), fz.data_parallel(axis="node")], [fz.data_parallel(axis=a) for a in AXES]):
        with pytest.raises(BudgetError) as error:
            fz.lower(
                fz.compose(*transforms)(plain),
                fz.AbstractMesh(**AXES),
                meta,
                torch.empty(4, 64, device="meta"),
                memory_budget="10KB",
            )
        assert "fz.shard_params(axis=('data', 'node'))" in str(error.value)


def test_the_text_says_over_which_axis_and_of_what():
    text = str(lowered("params", 2).program)
    assert "shard(data, node)" in text and "shard(data of data, node)" in text and "axis='node'" in text
    # whole, then cut
    assert "axis=('data', 'node')" in str(
        fz.lower(step("opt_state"), fz.AbstractMesh(**AXES), params(5), torch.empty(4, 5)).program
    )


# --- on ranks ---


def measured(ways: list[str]) -> list[Any]:
    """On every rank: by way and number of micro-batches, the bytes handed to gloo for gathers and reductions over each
    axis, by step; and the losses."""
    import torch.distributed as dist

    from fzero._compat import compat
    from fzero.comm import collectives

    mesh, out, sent = fz.make_mesh(shared_memory=False, **AXES), [], Counter[str]()
    groups = {id(mesh.group(axis)): axis for axis in AXES}

    def counted(kind: str, call: Any) -> Any:
        def run(whole: Any, *args: Any, **settings: Any) -> Any:
            group = settings["group"] if settings else args[-1]
            sent[f"{kind}:{groups[id(group)]}"] += whole.nbytes // 2  # to one other rank
            return call(whole, *args, **settings)

        return run

    kept = compat.all_gather, dist.all_to_all_single
    collectives.compat.all_gather = counted("all_gather", kept[0])
    collectives.dist.all_to_all_single = counted("reduce_scatter", kept[1])
    try:
        for way in ways:
            for num_micro in (1, 4):
                train = fz.compile(step(way, num_micro), mesh, backend="eager")
                state, losses, seen = train.init(params(8)), [], []
                for seed in range(3):
                    sent.clear()
                    state, metrics = train(state, whole((16, 8), seed)[mesh.rank * 4 :][:4])
                    losses.append(metrics["loss"].item())
                    seen.append(dict(sent))
                out.append((way, num_micro, losses, seen))
    finally:
        collectives.compat.all_gather, collectives.dist.all_to_all_single = kept
    return out


@pytest.mark.full
def test_what_is_handed_to_the_network_is_what_the_program_says(run_ranks):
    """Over gloo, every step alike; over `node` once a step, however many micro-batches. Padding is sent too: of 8 x 17
    elements for 4 shards none."""
    ranks = run_ranks(4, measured, ["params", "once"])
    for way, num_micro, _, seen in [entry for found in ranks for entry in found]:
        told = moved(lowered(way, num_micro).program)
        assert seen[0] == seen[1] == seen[2]
        assert seen[0] == {kind: pytest.approx(n, rel=0.1) for kind, n in told.items()}, (way, num_micro)
    over_node = {(w, n): sum(v for k, v in seen[0].items() if k.endswith("node")) for w, n, _, seen in ranks[0]}
    assert over_node["once", 1] == over_node["once", 4]
    assert over_node["params", 4] == 4 * over_node["params", 1] > 4 * over_node["once", 4]
    losses = {(w, n): x for w, n, x, _ in ranks[0]}
    for num_micro in (1, 4):
        assert losses["once", num_micro] == pytest.approx(losses["params", num_micro], rel=1e-6)


def compared(pairs: list[tuple[str, str, int]]) -> list[Any]:
    """On every rank: what differs between two ways of one step, after some steps."""
    mesh, out = fz.make_mesh(**AXES), []
    batches = [torch.randn(16, 5, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    found = {
        (way, n): trained(mesh, step(way, n), batches)
        for way, n in dict.fromkeys((way, n) for *ways, n in pairs for way in ways)
    }
    for one, other, num_micro in pairs:
        (a, x), (b, y) = found[one, num_micro], found[other, num_micro]
        same = all(
            torch.equal(p, q)
            for p, q in zip(
                fz.tree.leaves((x.params, x.opt_state)), fz.tree.leaves((y.params, y.opt_state)), strict=True
            )
        )
        out.append((a == b and same, max(abs(p - q) / abs(q) for p, q in zip(a, b, strict=True))))
    return out


@pytest.mark.full
def test_kept_gathers_are_equal_to_the_bit_and_hops_to_one_axis(run_ranks):
    pairs = [
        ("params", "gathers once", 1),
        ("params", "gathers once", 2),
        ("params", "once", 1),
        ("reductions once", "once", 2),
        ("params", "once", 2),
    ]
    pairs += [("params", "some gathers once", 1)]
    for found in run_ranks(4, compared, pairs):
        assert [same for same, _ in found[:4]] == [True] * 4, found
        assert max(off for _, off in found) < 1e-6 and found[5][0], found


def of_another_step() -> str:
    """What a step says of a state that is cut alike, but not in parts of a finer cut."""
    mesh = fz.make_mesh(**AXES)
    spread = fz.compose(fz.shard_params(axis="data"), fz.data_parallel(axis="node"))
    state = fz.compile(spread(fz.train_step(loss_fn, clipped())), mesh, backend="eager").init(params())
    with pytest.raises(FzeroValueError) as error:
        fz.compile(step("params by data"), mesh, backend="eager")(state, whole((4, 5), 1))
    return str(error.value)


def test_a_state_that_is_padded_otherwise_is_refused_with_both_sides(run_ranks):
    for text in run_ranks(4, of_another_step):
        assert "['up']: float32[5, 11] sharded over data in the state" in text
        assert "float32[5, 11] sharded over data (chunks of shards over data, node) in this step" in text


def mean_loss(params: Any, batch: torch.Tensor) -> Any:
    return fz.weighted(loss_fn(params, batch) * len(batch), len(batch))


def saved(directory: str, way: str) -> Any:
    """A state that was born, trained and saved on two axes; and what an evaluation of it gives."""
    mesh = fz.make_mesh(**AXES)
    train = fz.compile(step(way), mesh, backend="eager")
    state = train.init(drawn, fz.random.key(3))
    for seed in range(2):
        state, _ = train(state, whole((16, 72), seed)[mesh.rank * 4 :][:4])
    fz.checkpoint.save(directory, state)
    evaluate = fz.compile(fz.compose(*train.resolved.transforms)(fz.eval_step(mean_loss)), mesh, backend="eager")
    return evaluate(state.params, whole((16, 72), 9)[mesh.rank * 4 :][:4]).item(), train.gather(state)


def restored(directory: str, axes: dict[str, int], way: str) -> Any:
    mesh = fz.make_mesh(**axes)
    transforms = WAYS[way] if len(axes) > 1 else [fz.shard_params()]
    train = fz.compile(fz.compose(*transforms)(fz.train_step(loss_fn, clipped())), mesh, backend="eager")
    born = train.gather(train.init(drawn, fz.random.key(3)))
    state = train.restore(directory)
    return born, train.gather(state)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(fz.tree.leaves(one), fz.tree.leaves(other), strict=True))


@pytest.mark.full
def test_a_checkpoint_goes_between_meshes(run_ranks, tmp_path):
    """And the same leaves are drawn on each of them."""
    found = run_ranks(4, saved, str(tmp_path), "some by data")
    want = found[0][1]
    evaluated = loss_fn(want.params, whole((16, 72), 9)).item()
    assert all(value == pytest.approx(evaluated, rel=1e-6) for value, _ in found)
    assert all(same(state, want) for _, state in found)
    births = []
    for axes, other in (
        (AXES, "params by data"),
        ({"data": 3}, "params"),
    ):
        size = 4 if len(axes) > 1 else axes["data"]
        for born, state in run_ranks(size, restored, str(tmp_path), axes, other):
            assert same(state, want), axes
            births.append(born)
    assert all(same(born.params, births[0].params) for born in births)


def with_and_without_shared_memory() -> list[list[float]]:
    batches = [whole((16, 5), i) for i in range(3)]
    return [
        trained(fz.make_mesh(shared_memory=shared, **AXES), step("once", 2), batches)[0] for shared in (True, False)
    ]


def test_shared_memory_changes_no_bit(run_ranks):
    (want, _), *_ = found = run_ranks(4, with_and_without_shared_memory)
    assert found == [[want, want]] * 4


# --- what cannot work is refused by name ---


def built(*transforms: Any, axes: dict[str, int] = AXES) -> Any:
    meta = fz.tree.map(lambda x: x.to("meta"), params())
    return fz.lower(
        fz.compose(*transforms)(fz.train_step(loss_fn, clipped())),
        fz.AbstractMesh(**axes),
        meta,
        torch.empty(4, 5, device="meta"),
    )


REFUSED: dict[str, tuple[Any, type[FzeroError], str]] = {
    "twice": (lambda: fz.shard_params(axis=("data", "data")), FzeroTypeError, "named twice"),
    "empty": (lambda: fz.shard_params(axis=()), FzeroTypeError, "a tuple of names"),
    "no name": (lambda: fz.shard_grads(axis=("data", 3)), FzeroTypeError, "a tuple of names"),
    "data_parallel": (lambda: fz.data_parallel(axis=("data", "node")), FzeroTypeError, "takes the name of one axis"),
    "unknown": (lambda: built(fz.shard_params(axis=("data", "rack"))), FzeroValueError, "the mesh has node=2, data=2"),
    "no prefix": (
        lambda: built(fz.shard_params(axis="node"), fz.shard_opt_state(axis=BOTH)),
        TransformError,
        "is not how ('data', 'node') begins",
    ),
    "other order": (
        lambda: built(fz.shard_params(axis=BOTH), fz.shard_grads(axis=("node", "data"))),
        TransformError,
        "is not how",
    ),
    "idle": (lambda: built(fz.shard_params(axis="data")), FzeroValueError, "no transform uses a mesh axis"),
    "once of one": (
        lambda: built(fz.shard_params(axis="data"), fz.data_parallel(axis="node"), fz.hierarchical()),
        FzeroValueError,
        "sharded over 'node'",
    ),
    "once of the first": (
        lambda: built(fz.shard_params(axis=BOTH), fz.hierarchical(axis="data")),
        FzeroValueError,
        "'data' shards first",
    ),
    "once of nothing": (
        lambda: built(fz.shard_opt_state(axis=BOTH), fz.hierarchical()),
        FzeroValueError,
        "once per step",
    ),
    "once unknown": (
        lambda: built(fz.shard_params(), fz.hierarchical(), axes={"data": 4}),
        FzeroValueError,
        "no axis 'node'",
    ),
    "once no leaf": (
        lambda: built(fz.shard_params(axis=BOTH, where=lambda path, leaf: leaf.numel() > 10**6), fz.hierarchical()),
        FzeroValueError,
        "does nothing over axis 'node': no parameter is sharded over it",
    ),
    "once small leaves": (
        lambda: built(fz.shard_params(axis=BOTH), fz.hierarchical(), axes={"node": 50, "data": 50}),
        FzeroValueError,
        "['up'] (float32[5, 11]): fewer elements than the 2500 shards",
    ),
    "a list": (
        lambda: fz.shard_params(axis=["data", "node"]),  # type: ignore[arg-type]
        FzeroTypeError,
        "Fix: e.g. axis=('data', 'node')",
    ),
    "once nothing": (lambda: fz.hierarchical(gathers=0, reductions=False), FzeroValueError, "leave nothing to do"),
    "share": (lambda: fz.hierarchical(gathers=1.5), FzeroValueError, "not a share of the blocks"),
    "text": (lambda: fz.hierarchical(gathers="all"), FzeroValueError, "not a share of the blocks"),
    "nan": (lambda: fz.hierarchical(gathers=float("nan")), FzeroValueError, "not a share of the blocks"),
    "axis": (lambda: fz.hierarchical(axis=("data", "node")), FzeroTypeError, "the name of one axis"),
    "evaluation": (lambda: fz.hierarchical()(fz.eval_step(loss_fn)), TransformError, "gathers each parameter once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    make, kind, text = REFUSED[case]
    with pytest.raises(kind, match="Fix: ") as error:
        make()
    assert text in str(error.value)


def test_a_plan_says_over_which_axes_gradients_are_reduced_when():
    said = {way: str(lowered(way, 4).plan) for way in ("once", "params")}
    assert "reduced over data after every micro-batch, over node once a step" in " ".join(said["once"].split())
    assert "reduced after every micro-batch" in " ".join(said["params"].split())


def test_an_axis_of_one_device_is_no_axis():
    """So that a script runs on one host as on many."""
    for axes in ({"node": 1, "data": 2}, {"node": 2, "data": 1}, {"node": 1, "data": 1}):
        found = built(fz.shard_params(axis=BOTH), fz.hierarchical(), axes=axes)
        cut = tuple(a for a in BOTH if axes[a] > 1)
        assert {leaf.layout.axes for leaf in found.program.leaves.values() if leaf.role == "params"} == {cut}


def test_a_tuple_of_one_axis_is_that_axis():
    assert fz.shard_params(axis=("data",)) == fz.shard_params(axis="data")


def test_with_one_rank_along_the_faster_axes_nothing_stays_whole() -> None:
    meta, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(2, 64, device="meta")
    for axes in ({"node": 8, "data": 1}, {"node": 1, "data": 8}):
        step = fz.shard_params(axis=("data", "node"))(fz.train_step(_square, optim.sgd(0.1)))
        plain, once = (
            fz.lower(fz.accumulate(s, 2), fz.AbstractMesh(**axes), meta, batch).program
            for s in (step, fz.hierarchical(step))
        )
        assert once.instructions == plain.instructions


def test_decisions_name_kept_gathers_only_where_there_are_some() -> None:
    meta, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(2, 64, device="meta")
    for stage, told in ((fz.shard_params, True), (fz.shard_grads, False)):
        step = fz.compose(stage(axis=("data", "node")), fz.hierarchical())(fz.train_step(_square, optim.sgd(0.1)))
        plan = fz.lower(step, fz.AbstractMesh(node=2, data=2), meta, batch).plan
        assert ("gathered once a step" in [d.what for d in plan.decisions]) is told


def _square(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().mean()
