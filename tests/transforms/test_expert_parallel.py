"""expert_parallel: experts and the batch are cut over one axis, and train as the plain step does."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import tensor
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.ir.ops import COLLECTIVES
from fzero.ir.verifier import verify
from fzero.mesh import AbstractMesh
from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER, mm_on_gpu, outer_on_gpu
from fzero.sharding.placements import Shard

EXPERTS, WIDTH, HIDDEN, WORDS, LENGTH = 4, 16, 24, 32, 8
BOTH = ("expert", "data")


def loss_of(capacity: float = EXPERTS / 2, regularized: float = 0.0, ranks: int = 0) -> Any:
    """A GPT whose feed-forward is a mixture of experts, each token's two best; a capacity that drops nothing. `ranks`:
    the rows of so many groups of experts together."""
    of: dict[str, Any] = {"capacity": ("rank", 2.0), "ranks": ranks} if ranks else {"capacity": capacity}

    @fz.block
    def layer(p, x):
        h = F.layer_norm(x, (WIDTH,), p["norm"])
        q, k, v = (h @ p["qkv"]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ p["out"]
        h = F.layer_norm(x, (WIDTH,), p["norm2"]).flatten(0, 1)
        weights, chosen = (h @ p["router"]).softmax(-1).topk(2, -1)
        rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS, **of)
        gate, up = fz.experts.matmul(rows, p["up"], back).chunk(2, -1)
        bias = fz.experts.matmul(rows.new_ones(*rows.shape[:2], 1), p["bias"][:, None], back)
        rows = fz.experts.matmul(F.silu(gate) * up, p["down"], back) + (bias if ranks else p["bias"][:, None])
        return x + fz.experts.combine(rows, back).view_as(x)

    def loss(p, batch):
        x = p["emb"][batch["x"]]
        for block in p["layers"]:
            x = layer(block, x)
        labels = F.pad(batch["x"][:, 1:], (0, 1), value=-100)
        found = F.cross_entropy((x @ p["head"]).flatten(0, 1), labels.flatten())
        return found + regularized * p["layers"][0]["up"].square().mean() if regularized else found

    return loss


def params(layers: int = 2) -> Any:
    g = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=g) * 0.3  # noqa: E731
    block = lambda: {  # noqa: E731
        "norm": make(WIDTH) + 1,
        "norm2": make(WIDTH) + 1,
        "qkv": make(WIDTH, 3 * WIDTH),
        "out": make(WIDTH, WIDTH),
        "router": make(WIDTH, EXPERTS),
        "up": make(EXPERTS, WIDTH, 2 * HIDDEN),
        "down": make(EXPERTS, HIDDEN, WIDTH),
        "bias": make(EXPERTS, WIDTH),
    }
    return {"emb": make(WORDS, WIDTH), "head": make(WIDTH, WORDS), "layers": [block() for _ in range(layers)]}


def batch(part: int = 0, parts: int = 1) -> Any:
    x = torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(2))
    return {"x": x.chunk(parts)[part].contiguous()}


def of_experts(path: str, leaf: torch.Tensor) -> bool:
    return path.endswith(("['up']", "['down']", "['bias']"))


def step(*transforms: Any, loss: Any = None, where: Any = of_experts, **options: Any) -> Any:
    made = fz.expert_parallel(fz.train_step(loss or loss_of(), tensor.OPTIMIZER), where=where, **options)
    return fz.compose(*transforms)(made)


def lowered(mesh: AbstractMesh, *transforms: Any, layers: int = 2, **more: Any) -> Any:
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(layers), batch()))
    return fz.lower(step(*transforms, **more), mesh, *shapes)


def moved(program: Any) -> Counter[tuple[str, str]]:
    """The values that each kind of collective moves."""
    found: Counter[tuple[str, str]] = Counter()
    for x, _ in program.walk():
        if x.op in COLLECTIVES:
            found[x.op, *x.axes] += len(x.args)
    return found


WAYS = {
    "parameters over experts": ({"expert": 2}, [fz.shard_params(axis="expert")]),
    "layerwise": ({"data": 2, "expert": 2}, [fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")]),
    "gradients": ({"data": 2, "expert": 2}, [fz.shard_grads(axis=BOTH), fz.accumulate(2), fz.remat(policy="full")]),
    "data first": ({"data": 2, "expert": 2}, [fz.shard_opt_state(axis=("data", "expert"))]),
    "hosts": (
        {"node": 2, "data": 2, "expert": 2},
        [fz.shard_params(axis=("expert", "data")), fz.data_parallel(axis="node")],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_every_stage_trains_as_the_plain_step(way):
    axes, transforms = WAYS[way]
    fz.testing.check_equivalent(step(*transforms), params(), batch(), AbstractMesh(**axes), steps=2)


@pytest.mark.parametrize("axes", [{"expert": 4}, {"data": 2, "expert": 2}, {"expert": 2, "seq": 2}])
def test_an_evaluation_returns_means_over_the_mesh_and_values_of_its_rows(axes):
    def scored(p, batch):
        total = loss_of()(p, batch) * len(batch["x"])
        return {
            "loss": fz.weighted(total, len(batch["x"])),
            "total": total,
            "weights": fz.weighted(p["layers"][0]["up"].square().sum(), 2),
        }

    plain, p = fz.eval_step(scored), params(1)
    more = [fz.shard_params(axis=BOTH)] if "data" in axes else [fz.sequence_parallel()] if "seq" in axes else []
    evaluation = fz.expert_parallel(fz.compose(*more)(plain), where=of_experts)
    parts = axes["expert"] * axes.get("data", 1)
    for rank, found in enumerate(tensor.evaluated(evaluation, AbstractMesh(**axes), p, batch())):
        mine = plain(p, batch(rank * parts // math.prod(axes.values()), parts))
        torch.testing.assert_close(found, plain(p, batch()) | {"total": mine["total"]})


STAGED = {
    "weights apart": ({"pipe": 2}, [fz.pipeline(schedule="zb")]),
    "interleaved": (
        {"data": 2, "pipe": 2},
        [fz.pipeline(schedule="interleaved", chunks=2), fz.shard_params(axis=BOTH), fz.remat("none")],
    ),
    "positions": ({"seq": 2, "pipe": 2}, [fz.pipeline(), fz.sequence_parallel()]),
}


@pytest.mark.full
@pytest.mark.parametrize("way", STAGED)
def test_stages_with_experts(way):
    axes, transforms = STAGED[way]
    made = step(fz.accumulate(2, schedule="layerwise"), *transforms, loss=loss_of(ranks=2))
    mesh = AbstractMesh(expert=2, **axes)
    twice = {"x": torch.cat([batch()["x"]] * 2)}
    fz.testing.check_equivalent(made, params(4), twice, mesh, steps=1)


def staged(schedule: str | None) -> Any:
    """The parameters of a few steps, on stages or on none."""
    mesh = fz.make_mesh(expert=2) if schedule is None else fz.make_mesh(expert=2, pipe=2)
    stages = [] if schedule is None else [fz.pipeline(schedule=schedule)]
    made = step(fz.accumulate(2, schedule="layerwise"), *stages, loss=loss_of(ranks=2))
    part = batch(mesh.index("expert"), 2)
    train = fz.compile(made, mesh, backend="eager", batch=part)
    state = train.init(params())
    for _ in range(2):
        state, _ = train(state, part)
    return fz.tree.leaves(train.gather(state))


@pytest.mark.full
def test_stages_with_experts_have_the_bits_of_micro_batches_alone(run_ranks):
    want = run_ranks(2, staged, None)[0]
    assert all(map(torch.equal, run_ranks(4, staged, "zb")[0], want))


TWO = {
    "alone": ({"expert": 2, "seq": 2}, []),
    "everything": (
        {"data": 2, "expert": 2, "seq": 2},
        [
            fz.shard_params(axis=("expert", "data", "seq")),
            fz.accumulate(2, schedule="layerwise"),
            fz.remat(policy="none"),
        ],
    ),
}


@pytest.mark.full(keep=["alone"])
@pytest.mark.parametrize("way", TWO)
def test_positions_are_cut_over_another_axis(way):
    """Each rank numbers the rows of its positions: no operation has all of them."""
    axes, transforms = TWO[way]
    made, at = fz.sequence_parallel(step(*transforms)), AbstractMesh(**axes)
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(), batch()))
    program = fz.lower(made, at, *shapes).program
    found = moved(program)
    times = 2 if transforms else 1
    assert found["all_to_all_start", "expert"] == 8 * times and not program.notes
    assert found["all_to_all_start", "seq"] == 16 * times
    rows = [v for x, _ in program.walk() if x.op == "all_to_all_start" for v in x.args]
    assert all(program.values_by_name[a].numel <= EXPERTS * 2 * 4 * LENGTH * WIDTH for a in rows)
    fz.testing.check_equivalent(made, params(), batch(), at, steps=2)


RULES = {"emb": 0, "qkv": (1, 3), "out": 0, "head": 1}
TENSOR = {
    "attention": ({"expert": 2, "model": 2}, [], RULES, False),
    "experts too": ({"expert": 2, "model": 2}, [], {**RULES, "up": (2, 2), "down": 1}, False),
    "everything": (
        {"data": 2, "expert": 2, "model": 2},
        [fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")],
        {**RULES, "up": (2, 2), "down": 1},
        True,
    ),
}


@pytest.mark.full(keep=["experts too"])
@pytest.mark.parametrize("way", TENSOR)
def test_another_axis_shards_matrices(way):
    """Tensor parallelism of attention, and of the matrices of each expert."""
    axes, transforms, rules, sequence = TENSOR[way]
    made = fz.tensor_parallel(step(*transforms), rules=rules, sequence=sequence)
    at = AbstractMesh(**axes)
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(), batch()))
    program = fz.lower(made, at, *shapes).program
    assert moved(program)["all_to_all_start", "expert"] == 8 * (2 if transforms else 1) and not program.notes
    fz.testing.check_equivalent(made, params(), batch(), at, steps=2)


RANKS = {
    "groups": ({"data": 2, "expert": 2}, [fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")], 4),
    "positions": ({"expert": 2, "seq": 2}, [fz.sequence_parallel()], 2),
}


@pytest.mark.full
@pytest.mark.parametrize("way", RANKS)
def test_rows_of_a_rank_are_of_all_its_experts(way):
    """The numbers of their experts are exchanged once. A bias multiplies ones, which all ranks have."""
    axes, transforms, ranks = RANKS[way]
    made, at = step(*transforms, loss=loss_of(ranks=ranks)), AbstractMesh(**axes)
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(), batch()))
    program = fz.lower(made, at, *shapes).program
    times = 2 if way == "groups" else 1
    assert moved(program)["all_to_all_start", "expert"] == 10 * times and not program.notes
    sent = [program.values_by_name[a] for x, _ in program.walk() if x.op == "all_to_all_start" for a in x.args]
    assert sum(v.dtype == torch.int64 for v in sent) == 2 * times
    fz.testing.check_equivalent(made, params(), batch(), at, steps=2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch.func.jvp itself
@pytest.mark.parametrize("of_rank", [False, True])
def test_derivatives_of_torch_func_are_those_of_every_token_by_itself(of_rank):
    x, w = torch.linspace(-1, 1, 8).view(4, 2).double(), torch.linspace(-2, 2, 8).view(2, 2, 2).double()
    chosen, weights = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]]), torch.full((4, 2), 0.5).double()
    capacity = {"capacity": ("rank", 2.0), "ranks": 1, "overflow": "error"} if of_rank else {"capacity": 2.0}

    def by_experts(x, w):
        rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2, **capacity)
        return fz.experts.combine(torch.tanh(fz.experts.matmul(rows, w, back)), back).square().sum()

    def by_tokens(x, w):
        products = torch.tanh(torch.einsum("ti,tkio->tko", x, w[chosen]))
        return (products * weights[..., None]).sum(1).square().sum()

    for differentiated in (
        lambda fn: torch.func.jvp(fn, (x, w), (2 * x + 1, w - 1)),
        lambda fn: torch.func.grad(fn, (0, 1))(x, w),
        lambda fn: torch.func.hessian(fn, (0, 1))(x, w),
    ):
        torch.testing.assert_close(differentiated(by_experts), differentiated(by_tokens))


def test_groups_that_do_not_divide_are_named():
    with pytest.raises(FzeroValueError, match=r"(?s)would be computed unsharded.*fzero.expert_mm.*multiple"):
        lowered(AbstractMesh(expert=4), loss=loss_of(ranks=2), max_replicated_bytes="1KiB")


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "min_cut"])
def test_a_layer_exchanges_rows_twice_each_way(remat):
    few, many = (lowered(AbstractMesh(expert=2), fz.remat(policy=remat), layers=n).program for n in (2, 6))
    each = {key: n / 4 for key, n in (moved(many) - moved(few)).items()}
    # gradients of 5 leaves and a norm are reduced; a bias is added behind the last product: its gradient is scattered
    assert each == {
        ("all_to_all_start", "expert"): 4,
        ("all_reduce_start", "expert"): 6,
        ("reduce_scatter_start", "expert"): 1,
    }
    assert not many.notes and len(few.functions) == len(many.functions)


def test_experts_rest_over_data_and_all_else_over_both():
    leaves = lowered(AbstractMesh(data=2, expert=2), fz.shard_params(axis=BOTH)).program.leaves
    up, qkv = (leaves[f"params['layers'][0]['{name}']"].layout for name in ("up", "qkv"))
    assert up.axes == qkv.axes == BOTH and up.dims == (Shard(0),) and not qkv.dims


@pytest.mark.parametrize("mesh", [{"expert": 2}, {"data": 2, "expert": 2}])
def test_a_reduction_that_is_left_out_is_found(mesh):
    program = lowered(AbstractMesh(**mesh), *([fz.shard_params()] if "data" in mesh else [])).program
    starts = [x for x in program.instructions if x.op == "all_reduce_start" and x.axes == ("expert",)]
    for start in starts:
        wait = next(x for x in program.instructions if x.op == "wait" and x.args == (start.out[0].name,))
        names = {v.name: a for v, a in zip(wait.out, start.args, strict=True)}
        left = tuple(x.rename(names) for x in program.instructions if x not in (start, wait))
        with pytest.raises(VerifyError, match=r"of which each rank|partial\(expert"):
            verify(replace(program, instructions=left))
    assert len(starts) > 4


class Mixture(nn.Module):
    """Products with a bias in one operation, a norm of rows, a number for each expert."""

    def __init__(self, norm: bool):
        super().__init__()
        self.norm, self.router = norm, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.scale = nn.Parameter(torch.ones(EXPERTS))

    def forward(self, x):
        h = x.flatten(0, -2)
        weights, chosen = self.router(h).softmax(-1).topk(2, -1)
        rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS, capacity=EXPERTS / 2)
        y = torch.tanh(torch.baddbmm(self.bias, rows, self.up))
        y = F.layer_norm(y, y.shape[-1:]) if self.norm else y
        y = torch.einsum("ecf,edf->ecd", y, self.down) * self.scale[:, None, None]
        return x + fz.experts.combine(y, back).view_as(x)


@pytest.mark.full(keep=["False"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_module_with_experts(norm):
    torch.manual_seed(0)
    model = fz.functionalize(nn.Sequential(Mixture(norm), Mixture(norm), nn.Linear(WIDTH, 1)))
    names = ("['up']", "['down']", "['bias']", "['scale']")
    plain = fz.train_step(lambda p, x: model.apply(p, x).square().mean(), tensor.OPTIMIZER)
    where = lambda path, leaf: path.endswith(names) and "router" not in path and "[2]" not in path  # noqa: E731
    experts = fz.expert_parallel(plain, where=where)
    made = fz.compose(fz.shard_params(axis=BOTH), fz.accumulate(2))(experts)
    x, at = torch.randn(8, 3, WIDTH), AbstractMesh(data=2, expert=2)
    assert not fz.lower(made, at, model.params, x).program.notes
    fz.testing.check_equivalent(made, model.params, x, at, steps=2)


def test_a_loss_that_reads_experts_besides():
    """The gradient of a term of the parameters alone adds to that of rows: each rank has the whole of it."""
    made = step(fz.shard_params(axis=BOTH), loss=loss_of(regularized=0.3))
    fz.testing.check_equivalent(made, params(1), batch(), AbstractMesh(data=2, expert=2), steps=2)


def test_draws_on_rows_are_those_of_each_rank():
    """Dropout of rows that met: what a rank drops of its rows is what it drops without experts."""

    @fz.block
    def layer(p, x, key):
        h = x.flatten(0, 1)
        weights, chosen = (h @ p["router"]).softmax(-1).topk(2, -1)
        rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS, capacity=2.0)
        rows = fz.random.dropout(key, torch.tanh(rows @ p["up"]), 0.25) @ p["down"]
        return x + fz.experts.combine(rows, back).view_as(x)

    def loss(p, x, *, key):
        return layer(p, fz.random.dropout(fz.random.fold_in(key, 1), x, 0.25), key).square().mean()

    g = torch.Generator().manual_seed(3)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    given = {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}
    where, at, x = lambda path, leaf: leaf.ndim == 3, AbstractMesh(expert=2), torch.randn(8, 4, WIDTH, generator=g)
    plain = fz.train_step(loss, tensor.OPTIMIZER)
    key = fz.random.key(0)
    cut = fz.testing.simulate(fz.expert_parallel(plain, where=where), at, given, x, key=key)[1]
    spread = fz.testing.simulate(fz.data_parallel(plain, axis="expert"), at, given, x, key=key)[1]
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(cut[name], spread[name], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "of"),
    [
        ("mixtral", {"capacity": 2.0}),
        ("gpt_oss", {"capacity": ("rank", 2.0), "ranks": 2}),
        *((family, {}) for family in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")),
    ],
)
def test_mixtures_of_transformers(family, of):
    """Their losses are those of the library's own way, and they train as the plain step does."""
    pytest.importorskip("transformers")
    import architectures

    made = architectures.MODELS[family]()
    before = made.module(**made.inputs).loss
    made.module.set_experts_implementation(fz.hf.experts_implementation(**of))
    torch.testing.assert_close(made.module(**made.inputs).loss, before)
    model = fz.functionalize(made.module)
    rows = torch.randint(0, architectures.VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(4))
    plain = model.train_step(tensor.OPTIMIZER)
    experts = fz.expert_parallel(plain, where=lambda path, leaf: "['experts']" in path)
    made = fz.shard_params(axis=BOTH)(experts)
    at, given = AbstractMesh(data=2, expert=2), {"input_ids": rows, "labels": rows.clone()}
    assert not fz.lower(made, at, model.params, given).program.notes
    fz.testing.check_equivalent(made, model.params, given, at, steps=2)


def test_rows_meet_for_a_gradient_that_is_narrower():
    """Experts narrower than the model: the gradient of a result is exchanged, not kept rows brought back."""
    pytest.importorskip("transformers")
    import architectures

    module = architectures.MODELS["qwen3_moe"]().module
    config = module.config
    module.set_experts_implementation(fz.hf.experts_implementation(config.num_experts / config.num_experts_per_tok))
    model, tokens = fz.functionalize(module), torch.empty(4, LENGTH, dtype=torch.int64, device="meta")
    made = fz.expert_parallel(model.train_step(tensor.OPTIMIZER), where=lambda path, leaf: "['experts']" in path)
    program = fz.lower(made, AbstractMesh(expert=2), model.params, {"input_ids": tokens, "labels": tokens}).program
    found = moved(program)
    assert found["all_to_all_start", "expert"] == 8 and not found["reduce_scatter_start", "expert"]


def test_a_capacity_of_transformers_is_a_factor():
    pytest.importorskip("transformers")
    assert fz.hf.experts_implementation(1.25) == "fzero_rows_1.25"
    assert fz.hf.experts_implementation(("rank", 1.5), ranks=4) == "fzero_rows_rank_4_1.5"
    with pytest.raises(FzeroValueError, match=r"capacity=-1: (.|\n)*Fix: a factor above 0"):
        fz.hf.experts_implementation(-1)


def test_parameters_that_no_product_reads_are_gathered_and_named():
    @fz.block
    def layer(p, x):
        y = torch.einsum("bte,ef->btf", (x @ p["router"]).softmax(-1), p["table"])
        return x + y * p["scale"].sum()

    def loss(p, batch):
        return layer(p, batch["x"]).square().mean()

    given = {"router": torch.randn(WIDTH, 4), "table": torch.randn(4, WIDTH) * 0.3, "scale": torch.randn(4) * 0.3}
    made = step(loss=loss, where=lambda path, leaf: "router" not in path)
    at = AbstractMesh(expert=2)
    fz.testing.check_equivalent(made, given, {"x": torch.randn(8, LENGTH, WIDTH)}, at, steps=2)
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (given, {"x": torch.randn(8, LENGTH, WIDTH)}))
    assert "is computed unsharded on every rank of expert" in str(fz.lower(made, at, *shapes).program.notes)
    made = step(loss=loss, where=lambda path, leaf: "router" not in path, max_replicated_bytes="16B")
    with pytest.raises(FzeroValueError, match=r"(?s)would be computed unsharded.*matrix products"):
        fz.lower(made, at, *shapes)


class Shifted(torch.autograd.Function):
    """A value as it is, whose gradient has a number added."""

    @staticmethod
    def forward(ctx, w):
        return w.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.25


def every_expert(p, x, reads=lambda w: w):
    """Every token with every expert; a rank has as many tokens as there are experts."""
    y = torch.tanh(x.expand(EXPERTS, *x.shape) @ reads(p["up"])) @ p["down"].mT
    return (y * (x @ p["router"]).softmax(-1).mT[..., None]).sum(0)


def tied(p, x):
    """The gradient of one term is added to those of both parameters."""
    return every_expert(p, x) + 0.3 * (p["up"] + p["down"]).square().mean()


def gradient_with_a_number(p, x):
    return every_expert(p, x, Shifted.apply)


def of_every_expert() -> Any:
    g = torch.Generator().manual_seed(3)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, WIDTH, HIDDEN)}
    given = {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}
    return given, torch.randn(2 * EXPERTS, WIDTH, generator=g)


@pytest.mark.parametrize("function", [every_expert, tied])
def test_rows_that_are_expanded_and_a_value_of_two_gradients(function):
    layer = fz.block(function)
    made = step(loss=lambda p, x: layer(p, x).square().mean(), where=lambda path, leaf: leaf.ndim == 3)
    fz.testing.check_equivalent(made, *of_every_expert(), AbstractMesh(expert=2), steps=2)


def test_a_number_added_to_a_gradient_of_experts():
    """Each rank adds it, as it does without experts."""
    layer = fz.block(gradient_with_a_number)
    given, x = of_every_expert()
    plain = fz.train_step(lambda p, x: layer(p, x).square().mean(), tensor.OPTIMIZER)
    at, where = AbstractMesh(expert=2), lambda path, leaf: leaf.ndim == 3
    cut = fz.testing.simulate(fz.expert_parallel(plain, where=where), at, given, x)[1]
    spread = fz.testing.simulate(fz.data_parallel(plain, axis="expert"), at, given, x)[1]
    torch.testing.assert_close(cut["grad_norm"], spread["grad_norm"], rtol=1e-5, atol=1e-6)


def on_ranks(
    axes: dict[str, int],
    transforms: list[Any],
    backend: str,
    tolerance: float = 1e-5,
    ranks: int = 0,
    **options: Any,
) -> str:
    mesh = fz.make_mesh(**axes, **options)
    batch_axes = tuple(axis for axis in axes if axis not in ("seq", "model"))
    part = (mesh.index(batch_axes), mesh.axis_size(batch_axes))
    loss_fn = loss_of(ranks=ranks)
    made = step(*transforms, loss=loss_fn)
    report = fz.testing.check_equivalent(made, params(), batch(*part), mesh, backend=backend, steps=2)
    evaluation = fz.compose(*transforms)(fz.expert_parallel(fz.eval_step(loss_fn), where=of_experts))
    state = fz.compile(made, mesh, backend=backend).init(params())
    loss = fz.compile(evaluation, mesh, backend=backend)(state.params, batch(*part))
    torch.testing.assert_close(loss, loss_fn(params(), batch(*part)), rtol=tolerance, atol=tolerance)
    return str(report)


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_on_ranks(run_ranks, shared):
    both = [fz.shard_params(axis=BOTH)]
    if not shared:
        run_ranks(4, on_ranks, {"data": 2, "expert": 2}, both, "eager", shared_memory=shared)
        run_ranks(4, on_ranks, {"expert": 2, "seq": 2}, [fz.sequence_parallel()], "eager", shared_memory=shared)
        tensor_of = fz.tensor_parallel(rules={**RULES, "up": (2, 2), "down": 1})
        run_ranks(4, on_ranks, {"expert": 2, "model": 2}, [tensor_of], "eager", shared_memory=shared)
    else:
        run_ranks(2, on_ranks, {"expert": 2}, [fz.accumulate(2)], "eager")
        more = [*both, fz.mixed_precision("bf16"), fz.accumulate(2)]
        run_ranks(4, on_ranks, {"data": 2, "expert": 2}, more, "eager", 3e-2, 4)
        run_ranks(4, on_ranks, {"data": 2, "expert": 2}, [*both, fz.offload("cpu")], "eager")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_compiled(run_ranks, ranks):
    run_ranks(2, on_ranks, {"expert": 2}, [], "inductor", ranks=ranks, timeout=300)


def test_what_cannot_be_cut():
    with pytest.raises(FzeroValueError, match=r"cannot shard tensors along a dim"):
        lowered(AbstractMesh(expert=3))
    with pytest.raises(FzeroValueError, match=r"matches no parameter\nFix: let `where` match"):
        lowered(AbstractMesh(expert=2), where=lambda path, leaf: "moe" in path)
    with pytest.raises(FzeroValueError, match=r"unknown mesh axis\n  'expert': the mesh has data=2"):
        lowered(AbstractMesh(data=2), fz.data_parallel())
    with pytest.raises(TransformError, match="both shard along 'expert': let one of them name another axis"):
        fz.expert_parallel(tensor.step(axis="expert"), where=of_experts)
    with pytest.raises(FzeroTypeError, match=r"where='up': a predicate"):
        fz.expert_parallel(where="up")
    with pytest.raises(FzeroTypeError, match=r"where"):
        fz.expert_parallel()  # type: ignore[call-arg]


def test_a_mesh_with_one_rank_along_the_axis_is_the_plain_one():
    program = lowered(AbstractMesh(data=2, expert=1), fz.shard_params(axis=BOTH)).program
    assert not [x for x, _ in program.walk() if "expert" in x.axes]


# --- dispatch ---


def by_hand(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
    """The sum of each token's experts, of which number e multiplies by e + 1; how many choices no row was left for."""
    out, taken, dropped = torch.zeros_like(x), Counter[int](), 0
    for choice in range(chosen.shape[1]):
        for token in range(x.shape[0]):
            expert = int(chosen[token, choice])
            if taken[expert] < size:
                taken[expert] += 1
                out[token] += weights[token, choice] * x[token] * (expert + 1)
            else:
                dropped += 1
    return out, dropped


@pytest.mark.parametrize(
    ("tokens", "k", "num", "capacity"), [(20, 2, 4, 1.0), (20, 2, 4, 1.25), (7, 1, 3, 0.5), (9, 3, 3, 1)]
)
def test_what_has_no_row_is_dropped(tokens, k, num, capacity):
    g = torch.Generator().manual_seed(tokens)
    x, scores = torch.randn(tokens, 5, generator=g), torch.randn(tokens, num, generator=g)
    weights, chosen = scores.softmax(-1).topk(k, -1)
    rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=num, capacity=capacity)
    size = math.ceil(capacity * tokens * k / num)
    assert rows.shape == (num, min(size, tokens), 5)
    made = fz.experts.combine(rows * torch.arange(1.0, num + 1)[:, None, None], back)
    wanted, dropped = by_hand(x, chosen, weights, size)
    torch.testing.assert_close(made, wanted)
    assert back.dropped.item() == pytest.approx(dropped / (tokens * k))


@pytest.mark.parametrize(("ranks", "factor", "dropped"), [(1, 1.0, 0), (2, 2.0, 0), (4, 4, 0), (2, 0.5, 20)])
def test_rows_of_ranks_by_hand(ranks, factor, dropped):
    """Those of first choices, of tokens in their order; products and gradients are those of each choice alone."""
    g = torch.Generator().manual_seed(5)
    x, w = (torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((20, 6), (EXPERTS, 6, 3)))
    weights, chosen = torch.randn(20, EXPERTS, generator=g, dtype=torch.float64).softmax(-1).topk(2, -1)
    given: dict[str, Any] = {"num_experts": EXPERTS, "capacity": ("rank", factor), "ranks": ranks}
    rows, back = fz.experts.dispatch(x, chosen, weights, **given)
    made = fz.experts.combine(fz.experts.matmul(rows, w, back).tanh(), back)
    size, taken, kept = math.ceil(factor * 40 / ranks), Counter[int](), torch.zeros(20, 2)
    for choice, token in itertools.product(range(2), range(20)):
        taken[group := int(chosen[token, choice]) * ranks // EXPERTS] += 1
        kept[token, choice] = taken[group] <= size
    each = torch.einsum("tf,tkfh->tkh", x, w[chosen]).tanh() * (weights * kept)[..., None]
    torch.testing.assert_close(made, each.sum(1))
    assert back.dropped.item() == pytest.approx(dropped / 40) == 1 - kept.mean().item()
    gradients = [torch.autograd.grad(y.square().sum(), (x, w), retain_graph=True) for y in (made, each.sum(1))]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.bfloat16, 16), (torch.bfloat16, 6)])
def test_what_a_gpu_multiplies(dtype, width):
    """By a kernel in bfloat16, else all rows by all matrices of their group: as a CPU does expert by expert."""
    g = torch.Generator().manual_seed(6)
    expert = torch.tensor([[-1, 0, 2, 0, -1], [1] * 5, [-1] * 5])
    rows, grad = (torch.randn(3, 5, n, generator=g).to(dtype) for n in (width, width + 8))
    w = torch.randn(9, width, width + 8, generator=g).to(dtype)
    for a, b in ((rows, w), (grad, w.mT)):
        torch.testing.assert_close(mm_on_gpu(expert, a, b), EXPERT_MM(expert, a, b))
    torch.testing.assert_close(outer_on_gpu(expert, rows.mT, grad, 3), EXPERT_OUTER(expert, rows.mT, grad, 3))


CROWDED, EVEN = torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 2)
"""Rows that all choose one of two experts, and rows of which each chooses half."""
ROUTED = {"router": torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "w": torch.ones(2, 2, 2)}


def routed(capacity: float, overflow: Any = "drop") -> Any:
    @fz.block
    def layer(p, x):
        weights, chosen = (x @ p["router"]).softmax(-1).topk(1, -1)
        rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2, capacity=capacity, overflow=overflow)
        return fz.experts.combine(rows @ p["w"], back), back.dropped

    def loss(p, x):
        y, dropped = layer(p, x)
        return y.square().mean(), {"dropped": dropped}

    made = fz.train_step(loss, fz.optim.sgd(0.1), has_aux=True)
    return fz.expert_parallel(made, where=lambda path, leaf: leaf.ndim == 3)


@pytest.mark.parametrize(("capacity", "dropped"), [(1.0, 2), (1.25, 1), (2.0, 0)])
def test_what_is_dropped_is_a_metric(capacity, dropped):
    """Of every rank: the mean of the shares. An expert takes 2, 3 or 4 of the 4 rows of rank 0."""
    x = torch.cat([CROWDED, EVEN])
    _, metrics = fz.testing.simulate(routed(capacity), AbstractMesh(expert=2), ROUTED, x)
    assert metrics["aux"]["dropped"].item() == pytest.approx(dropped / 8)


def overflowing() -> str:
    mesh = fz.make_mesh(expert=2)
    train = fz.compile(routed(1.25, "error"), mesh, backend="eager")
    state, metrics = train(train.init(ROUTED), EVEN)
    assert metrics.keys() == {"loss", "grad_norm", "finite", "aux"} and metrics["finite"]
    with pytest.raises(FzeroValueError, match="the loss function raises, on some rank") as error:
        train(state, EVEN if mesh.rank else CROWDED)
    with pytest.raises(FzeroValueError, match="the loss function raises"):
        train(state, EVEN)
    return str(error.value)


def test_an_overflow_stops_every_rank_at_one_step(run_ranks):
    one, other = run_ranks(2, overflowing)
    assert one == other and "fz.experts.dispatch(" in one
    with pytest.raises(FzeroValueError, match=r"exceed the capacity of an expert\n  3 rows\nFix: raise capacity"):
        plain = routed(1.25, "error")
        plain(plain.init(ROUTED), CROWDED)


def test_dispatch_says_what_is_wrong():
    x, chosen, weights = torch.randn(6, 2), torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    good: dict[str, Any] = {"num_experts": 2, "capacity": 1.0}
    with pytest.raises(FzeroTypeError, match=r"experts: int64"):
        fz.experts.dispatch(x, chosen.float(), weights, **good)
    with pytest.raises(FzeroValueError, match=r"(?s)capacity=0.*x \[tokens, features\].*\[6, 2\]"):
        fz.experts.dispatch(x, chosen[:3], weights[:3], num_experts=2, capacity=0)
    with pytest.raises(FzeroValueError, match=r"capacity=\('host', 1.25\): a factor(.|\n)*overflow='stop': 'drop' or"):
        fz.experts.dispatch(x, chosen, weights, num_experts=2, capacity=("host", 1.25), overflow="stop")  # type: ignore
    of_ranks: dict[str, Any] = {"num_experts": 2, "capacity": ("rank", 0.5), "overflow": "error"}
    for wrong, said in (({}, "ranks=None: "), ({"ranks": 3}, "ranks=3: 2 experts are not divisible among them")):
        with pytest.raises(FzeroValueError, match=said):
            fz.experts.dispatch(x, chosen, weights, **of_ranks, **wrong)
    with pytest.raises(FzeroValueError, match=r"ranks=2: only with capacity=\('rank', factor\)"):
        fz.experts.dispatch(x, chosen, weights, **good, ranks=2)
    with pytest.raises(FzeroValueError, match=r"exceed the capacity of a rank\n  3 rows"):
        fz.experts.dispatch(x, chosen, weights, **of_ranks, ranks=1)
    rows, back = fz.experts.dispatch(x, chosen, weights, **good)
    with pytest.raises(FzeroValueError, match=r"rows float32\[2, 3, 2\], w float32\[2, 3, 2\], for 2 groups"):
        fz.experts.matmul(rows, torch.zeros(2, 3, 2), back)
    with pytest.raises(FzeroValueError, match=r"num_experts=0: must be at least 1"):
        fz.experts.dispatch(x, chosen, weights, num_experts=0, capacity=1.0)
