"""Experts without a capacity: every choice has a row, and ranks exchange as many rows as their experts were chosen."""

from __future__ import annotations

from typing import Any

import pytest
import tensor
import torch
import torch.nn.functional as F

import fzero as fz
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.attributes import RowsAttrs
from fzero.mesh import AbstractMesh
from fzero.ops.grouped_matmul import GROUPED_MM, GROUPED_OUTER, grouped_mm_on_gpu, grouped_outer_on_gpu

EXPERTS, K, WIDTH, HIDDEN, LENGTH = 4, 2, 16, 24, 6
BOTH = ("expert", "data")


def dense(p: Any, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mixture as a sum over all experts, without rows."""
    out = torch.zeros_like(h)
    for i in range(EXPERTS):
        gate, up = (h @ p["up"][i]).chunk(2, -1)
        y = (F.silu(gate) * up) @ p["down"][i] + p["bias"][i]
        out = out + y * ((chosen == i) * weights).sum(-1, keepdim=True)
    return out


def by_rows(p: Any, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS)
    gate, up = fz.experts.matmul(rows, p["up"], back).chunk(2, -1)
    bias = fz.experts.matmul(rows.new_ones(rows.shape[0], 1), p["bias"][:, None], back)
    return fz.experts.combine(fz.experts.matmul(F.silu(gate) * up, p["down"], back) + bias, back)


def loss_of(mixture: Any = by_rows) -> Any:
    @fz.block
    def layer(p: Any, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (WIDTH,), p["norm"]).flatten(0, 1)
        q, k, v = (h.view_as(x) @ p["qkv"]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        weights, chosen = (h @ p["router"] + shift).softmax(-1).topk(K, -1)
        return x + mixture(p, h, chosen, weights).view_as(x)

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = batch["x"]
        for block in p["layers"]:
            x = layer(block, x, batch["shift"][0])
        return x.square().mean()

    return loss


def params(layers: int = 2) -> Any:
    g = torch.Generator().manual_seed(1)
    shapes = {"norm": (WIDTH,), "qkv": (WIDTH, 3 * WIDTH), "router": (WIDTH, EXPERTS), "bias": (EXPERTS, WIDTH)}
    shapes |= {"up": (EXPERTS, WIDTH, 2 * HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    make = lambda: {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}  # noqa: E731
    return {"layers": [make() for _ in range(layers)]}


def batch(shift: tuple[float, ...] = (0, 0, 0, 0), samples: int = 8, length: int = LENGTH) -> Any:
    x = torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(2))
    return {"x": x, "shift": torch.tensor([shift] * samples, dtype=torch.float32)}


def of_experts(path: str, leaf: torch.Tensor) -> bool:
    return path.endswith(("['up']", "['down']", "['bias']"))


def step(*transforms: Any, loss: Any = None, **options: Any) -> Any:
    made = fz.expert_parallel(fz.train_step(loss or loss_of(), tensor.OPTIMIZER), where=of_experts, **options)
    return fz.compose(*transforms)(made)


CHOICES = {
    "as the router says": batch(),
    "all tokens choose the experts of one rank": batch((40, 39, 0, 0)),
    "all tokens choose one expert of each rank": batch((40, 0, 39, 0)),
    "one token per rank": batch(samples=2, length=1),
}


@pytest.mark.parametrize("choices", CHOICES)
def test_the_rows_of_ranks_train_as_a_dense_sum_over_experts(choices: str) -> None:
    # SGD, because AdamW divides rounding errors by themselves where gradients are 0: attention over one token has none
    # for queries and keys.
    given, sgd = CHOICES[choices], fz.optim.sgd(0.1)
    plain = fz.train_step(loss_of(dense), sgd)
    expected, metrics = plain(plain.init(params()), given)
    mesh = AbstractMesh(expert=2)
    experts = fz.expert_parallel(fz.train_step(loss_of(), sgd), where=of_experts)
    state, found = fz.testing.simulate(experts, mesh, params(), given)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["loss"], metrics["loss"], rtol=1e-5, atol=0)
    fz.testing.check_equivalent(experts, params(), given, mesh, steps=2)


WAYS = {
    "four ranks": ({"expert": 4}, []),
    "ZeRO-3": ({"data": 2, "expert": 2}, [fz.shard_params(axis=BOTH)]),
    "ZeRO-3, layerwise": (
        {"data": 2, "expert": 2},
        [fz.shard_params(axis=BOTH), fz.accumulate(2, schedule="layerwise")],
    ),
    "ZeRO-2, accumulation, remat": (
        {"data": 2, "expert": 2},
        [fz.shard_grads(axis=BOTH), fz.accumulate(2), fz.remat(policy="full")],
    ),
    "nothing recomputed": ({"expert": 2}, [fz.remat(policy="none")]),
    "bf16": ({"expert": 2}, [fz.mixed_precision("bf16"), fz.shard_params(axis="expert")]),
    "state in host memory": ({"data": 2, "expert": 2}, [fz.shard_params(axis=BOTH), fz.offload("cpu")]),
    "matrices over another axis": (
        {"expert": 2, "model": 2},
        [fz.tensor_parallel(rules={"up": (2, 2), "down": 1})],
    ),
    "stages": ({"expert": 2, "pipe": 2}, [fz.pipeline(), fz.accumulate(2, schedule="layerwise")]),
}


@pytest.mark.full(keep=["ZeRO-3, layerwise"])
@pytest.mark.parametrize("way", WAYS)
def test_every_combination_trains_as_the_plain_step(way: str) -> None:
    axes, transforms = WAYS[way]
    program = fz.lower(step(*transforms), AbstractMesh(**axes), *meta()).program
    assert any(x.op == "all_to_all_v_start" for x, _ in program.walk()) and "unsharded" not in str(program.notes)
    fz.testing.check_equivalent(step(*transforms), params(), batch((3, 0, 0, 0)), AbstractMesh(**axes), steps=2)


def meta(layers: int = 2) -> Any:
    return fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (params(layers), batch()))


def test_counts_are_exchanged_before_rows() -> None:
    ops = fz.lower(step(fz.remat("none")), AbstractMesh(expert=2), *meta(2)).program.instructions
    starts = [x for x in ops if x.op in ("all_gather_start", "all_to_all_v_start")]
    # One block's forward and its backward exchange counts once each; those of the last block are one subgraph.
    there_and_back = ["all_to_all_v_start"] * 2
    one = ["all_gather_start", *there_and_back]
    assert [x.op for x in starts] == [*one, *one, *there_and_back, *one]
    rows = 8 * LENGTH * K  # one for each choice of a rank; as many come from the other rank at most
    assert [x.attrs.rows for x in starts if isinstance(x.attrs, RowsAttrs)] == [2 * rows, rows] * 4


def test_positions_over_another_axis_are_named_or_gathered() -> None:
    """Each rank along `seq` computes the rows of all positions."""
    at = AbstractMesh(expert=2, seq=2)
    with pytest.raises(FzeroValueError, match=r"(?s)would be computed unsharded.*aten.sort.*rows, back ="):
        fz.lower(fz.sequence_parallel(step(), max_replicated_bytes=0), at, *meta())
    made = fz.sequence_parallel(step())
    assert "computed unsharded on every rank of seq" in str(fz.lower(made, at, *meta()).program.notes)
    fz.testing.check_equivalent(made, params(), batch(), at, steps=2)


def on_ranks(transforms: list[Any], axes: dict[str, int], backend: str, shift: Any, **options: Any) -> None:
    mesh = fz.make_mesh(**axes, **options)
    given = {name: x.chunk(mesh.size)[mesh.rank] for name, x in batch(shift).items()}
    fz.testing.check_equivalent(step(*transforms), params(), given, mesh, backend=backend, steps=2)


@pytest.mark.full(keep=["True"])
@pytest.mark.parametrize("shared", [True, False])
def test_on_ranks(run_ranks: Any, shared: bool) -> None:
    run_ranks(2, on_ranks, [fz.accumulate(2)], {"expert": 2}, "eager", (0, 0, 0, 0), shared_memory=shared)
    more = [fz.shard_params(axis=BOTH), fz.remat("full")]
    run_ranks(4, on_ranks, more, {"data": 2, "expert": 2}, "eager", (40, 39, 0, 0), shared_memory=shared)


@pytest.mark.full
def test_compiled(run_ranks: Any) -> None:
    run_ranks(2, on_ranks, [], {"expert": 2}, "inductor", (0, 0, 0, 0), timeout=300)


def too_many() -> str:
    mesh = fz.make_mesh(expert=2)
    given = {name: x.chunk(mesh.size)[mesh.rank] for name, x in batch((40, 39, 0, 0)).items()}
    train = fz.compile(step(max_rows=1.5), mesh, backend="eager")
    with pytest.raises(FzeroValueError) as found:
        train(train.init(params()), given)
    return str(found.value)


def test_rows_that_exceed_the_memory_are_an_error_on_every_rank(run_ranks: Any) -> None:
    one, other = run_ranks(2, too_many)
    assert one == other and "rank 0 of 'expert': 96 rows" in one and "max_rows=None" in one


def test_bounded_rows_train_as_the_plain_step() -> None:
    at = AbstractMesh(expert=2)
    fz.testing.check_equivalent(step(max_rows=1.8), params(), batch(), at, steps=2)
    bounded, worst = (fz.lower(step(max_rows=n), at, *meta()).plan.peak_bytes for n in (1.25, None))
    assert bounded < worst
    for wrong in (0.5, True, "2"):
        with pytest.raises(FzeroTypeError, match=r"max_rows=.*at least 1"):
            step(max_rows=wrong)


def test_what_needs_the_rows_of_one_rank_is_named() -> None:
    def mixed(p: Any, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS)
        rows = fz.experts.matmul(rows, p["up"], back)[:, :HIDDEN]
        return fz.experts.combine(fz.experts.matmul(rows.softmax(0), p["down"], back), back)

    with pytest.raises(FzeroValueError, match=r"(?s)needs the rows of one rank.*test_dropless_experts.py:\d+: return"):
        fz.lower(step(loss=loss_of(mixed)), AbstractMesh(expert=2), *meta())
    with pytest.raises(FzeroValueError, match=r"(?s)`where` does not match.*all parameters"):
        only = fz.expert_parallel(fz.train_step(loss_of(), tensor.OPTIMIZER), where=lambda path, leaf: "down" in path)
        fz.lower(only, AbstractMesh(expert=2), *meta())
    h, chosen = torch.ones(2, WIDTH), torch.zeros(2, 1, dtype=torch.int64)
    rows, back = fz.experts.dispatch(h, chosen, torch.ones(2, 1), num_experts=EXPERTS)
    with pytest.raises(FzeroValueError, match=r"shapes or dtypes do not match\n.*for 4 experts and 2 choices"):
        fz.experts.matmul(rows, torch.ones(3, WIDTH, 1), back)


CHANGED = {
    "scaled": lambda w, p: w * 0.5,
    "divided by a number that is computed": lambda w, p: w / torch.linspace(1, 2, 4).sum(),
    "penalized": lambda w, p: w,
}


@pytest.mark.parametrize("change", CHANGED)
def test_parameters_that_are_changed_before_the_product(change: str) -> None:
    def changed(p: Any, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = by_rows({**p, "up": CHANGED[change](p["up"], p)}, h, chosen, weights)
        return out + 1e-3 * p["up"].square().sum() if change == "penalized" else out

    fz.testing.check_equivalent(step(loss=loss_of(changed)), params(), batch(), AbstractMesh(expert=2), steps=2)


def test_a_parameter_that_is_multiplied_by_another_is_named_with_a_way_out() -> None:
    def scaled(p: Any, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return by_rows({**p, "up": p["up"] * p["norm"][None, :, None]}, h, chosen, weights)

    with pytest.raises(FzeroValueError, match=r"(?s)gradient of an expert.*: return by_rows.*apply it to the rows"):
        fz.lower(step(loss=loss_of(scaled)), AbstractMesh(expert=2), *meta())


@pytest.mark.parametrize("masked", [False, True])
def test_the_balance_loss_is_that_of_transformers(masked: bool) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = [torch.randn(12, EXPERTS, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    mask = (torch.arange(12) % 5 > 0).view(3, 4).float() if masked else None

    def ours(*layers: torch.Tensor) -> torch.Tensor:
        probabilities = torch.cat(layers).softmax(-1)
        every = None if mask is None else mask.flatten().repeat(len(layers))
        return fz.experts.balance_loss(probabilities, probabilities.topk(K).indices, every)

    found = torch.func.grad_and_value(ours, (0, 1, 2))(*logits)
    expected = torch.func.grad_and_value(
        lambda *layers: mixtral.load_balancing_loss_func(layers, EXPERTS, K, mask), (0, 1, 2)
    )(*logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mask": torch.ones(6, 1)}, r"mask \[tokens\]: got float32\[6, 1\]"),
        ({"mask": torch.ones(1)}, r"mask \[tokens\]: got float32\[1\]"),
        ({"mask": torch.ones(2, 3)}, r"mask \[tokens\]: got float32\[2, 3\].*mask.flatten\(\)"),
        ({"mask": [True] * 6}, "mask: a tensor, got list"),
        ({"experts": torch.zeros(5, 2, dtype=torch.int64)}, r"experts \[tokens, k\]: got int64\[5, 2\]"),
        ({"experts": torch.zeros(6, dtype=torch.int64)}, r"experts \[tokens, k\]: got int64\[6\]"),
        ({"experts": torch.zeros(6, 5, dtype=torch.int64)}, r"got int64\[6, 5\]"),
        ({"probabilities": torch.rand(2, 3, 4)}, r"got float32\[2, 3, 4\]"),
        ({"probabilities": torch.ones(6, 4).long()}, "probabilities: of a floating dtype, got int64"),
        ({"experts": torch.rand(6, 2)}, r"experts: int64, the numbers of experts, got float32"),
    ],
)
def test_what_is_no_choice_of_tokens_is_rejected(change: dict[str, Any], says: str) -> None:
    given = {"probabilities": torch.rand(6, 4), "experts": torch.zeros(6, 2, dtype=torch.int64)} | change
    with pytest.raises((FzeroTypeError, FzeroValueError), match=r"(?s)experts\.balance_loss: .*" + says):
        fz.experts.balance_loss(**given)
    if change.keys() == {"mask"}:
        with pytest.raises((FzeroTypeError, FzeroValueError), match=r"(?s)experts\.load: .*" + says):
            fz.experts.load(given["experts"], 4, **change)


def test_no_tokens_have_no_load_and_no_gradient() -> None:
    for tokens, mask in ((6, torch.zeros(6)), (6, torch.zeros(6, dtype=torch.bool)), (0, None), (0, torch.ones(0))):
        logits = torch.randn(tokens, 4)
        chosen = logits.topk(2, -1).indices
        ours = lambda x: fz.experts.balance_loss(x.softmax(-1), chosen, mask)  # noqa: E731, B023
        grad, loss = torch.func.grad_and_value(ours)(logits)
        assert torch.equal(loss, torch.zeros(())) and torch.equal(grad, torch.zeros_like(logits))
        assert torch.equal(fz.experts.load(chosen, 4, mask), torch.zeros(4))
    # a number of no expert counts as a choice; fractions count as such
    chosen = torch.tensor([[0, -1], [1, 4]])
    assert fz.experts.load(chosen, 4).tolist() == [0.25, 0.25, 0.0, 0.0]
    assert fz.experts.load(chosen, 4, torch.tensor([0.25, 0.0])).tolist() == [0.5, 0.0, 0.0, 0.0]
    with pytest.raises(FzeroValueError, match="num_experts=0: must be at least 1"):
        fz.experts.load(chosen, 0)


def test_a_router_bias_by_the_load_is_that_of_all_tokens() -> None:
    """The load is averaged over ranks and micro-batches; the next step computes the bias from it."""

    def loss(p: Any, given: Any) -> Any:
        h = given["x"].flatten(0, 1)
        bias = p["bias"] + 0.1 * (p["load"].mean() - p["load"]).sign()
        scores = (h @ p["router"]).sigmoid()
        chosen = (scores + bias).topk(K, -1).indices
        out = by_rows(p["mixture"], h, chosen, scores.gather(1, chosen))
        return out.square().mean(), {"bias": bias, "load": fz.experts.load(chosen, EXPERTS)}

    start = {
        "mixture": params(1)["layers"][0],
        "router": params(1)["layers"][0]["router"],
        "bias": torch.zeros(EXPERTS),
    }
    start |= {"load": torch.full((EXPERTS,), 1 / EXPERTS)}
    plain = fz.train_step(
        loss, fz.optim.sgd(0.1), mutable=lambda path, leaf: path in ("params['bias']", "params['load']")
    )
    made = fz.expert_parallel(plain, where=lambda path, leaf: "mixture" in path and of_experts(path, leaf))
    many = fz.compose(fz.shard_params(axis=BOTH), fz.accumulate(2))(made)
    fz.testing.check_equivalent(many, start, batch(), AbstractMesh(data=2, expert=2), steps=4)
    state, _ = fz.testing.simulate(many, AbstractMesh(data=2, expert=2), start, batch(), steps=4)
    assert state.params["bias"].abs().max() > 0.05


def test_norms_of_rows_with_weights() -> None:
    """The gradient of a weight that all experts share is a sum over the rows of all ranks."""

    def normed(p: Any, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS)
        rows = fz.experts.matmul(rows * p["norm"], p["up"], back)[:, :HIDDEN]
        rows = F.layer_norm(fz.experts.matmul(rows, p["down"], back), (WIDTH,), p["norm"])
        return fz.experts.combine(rows, back)

    fz.testing.check_equivalent(step(loss=loss_of(normed)), params(), batch(), AbstractMesh(expert=2), steps=2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch.func.jvp itself
def test_derivatives_of_torch_func_are_those_of_every_token_by_itself() -> None:
    x, w = torch.linspace(-1, 1, 8).view(4, 2).double(), torch.linspace(-2, 2, 8).view(2, 2, 2).double()
    chosen, weights = torch.tensor([[0], [1], [0], [0]]), torch.full((4, 1), 0.5).double()

    def by_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2)
        return fz.experts.combine(torch.tanh(fz.experts.matmul(rows, w, back)), back).square().sum()

    def by_tokens(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = torch.tanh(torch.einsum("ti,tkio->tko", x, w[chosen]))
        return (products * weights[..., None]).sum(1).square().sum()

    for differentiated in (
        lambda fn: torch.func.jvp(fn, (x, w), (2 * x + 1, w - 1)),
        lambda fn: torch.func.grad(fn, (0, 1))(x, w),
        lambda fn: torch.func.hessian(fn, (0, 1))(x, w),
    ):
        torch.testing.assert_close(differentiated(by_experts), differentiated(by_tokens))


def test_what_a_gpu_runs_gives_the_same_products() -> None:
    g = torch.Generator().manual_seed(0)
    rows, grad, w = (torch.randn(*shape, generator=g) for shape in ((9, 8), (9, 16), (3, 8, 16)))
    for ends in (torch.tensor([4, 4, 7]), torch.tensor([0, 0, 9]), torch.tensor([0, 0, 0])):
        torch.testing.assert_close(grouped_mm_on_gpu(ends, rows, w, 9, 1), GROUPED_MM(ends, rows, w, 9, 1))
        found, expected = grouped_outer_on_gpu(ends, rows, grad, 9, 1), GROUPED_OUTER(ends, rows, grad, 9, 1)
        torch.testing.assert_close(found, expected)
