"""tensor_parallel without rules: the chosen ones cut as those written by hand do, and can be pasted back."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensor
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero.compiler.abstract_values import abstract
from fzero.errors import FzeroValueError, TransformError
from fzero.ir.ops import COLLECTIVES
from fzero.mesh import AbstractMesh
from fzero.sharding.matmul_chains import chains, pieces
from fzero.sharding.placements import Shard
from fzero.trace.graph_capture import record
from fzero.transforms.tensor import TensorParallel, rules_for

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_gpt

MESH = AbstractMesh(model=2)
WIDTH, HEADS, KEYS, HIDDEN = 32, 4, 2, 80


def meta(tree: Any) -> Any:
    return fz.tree.map(lambda x: torch.empty_like(x, device="meta"), tree)


def chosen(step: Any, params: Any, batch: Any, mesh: AbstractMesh = MESH, **options: Any) -> Any:
    return fz.lower(fz.tensor_parallel(step, **options), mesh, meta(params), meta(batch))


def rules_of(lowered: Any) -> dict[str, Any]:
    (spec,) = (t for t in lowered.program.transforms if isinstance(t, TensorParallel))
    return {glob: tuple(dim) if dim else None for glob, dim in spec.rules}


def in_a_layer(make: Any, **options: Any) -> dict[Any, float]:
    """The collectives of a layer. `make`: step, parameters and batch of so many layers."""
    few, many = (chosen(*make(n), **options).program for n in (2, 4))
    count = lambda program: Counter((x.op, *x.axes) for x, _ in program.walk() if x.op in COLLECTIVES)  # noqa: E731
    return {key: n / 2 for key, n in (count(many) - count(few)).items()}


FOUR = {("all_reduce_start", "model"): 4}
"""Megatron's: two forward, two backward."""


def small(layers: int) -> Any:
    return fz.train_step(tensor.loss_fn, tensor.OPTIMIZER), tensor.params(layers), tensor.batch()


def example(layers: int) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        return train_gpt.gpt(params, *batch, heads=4)

    params = abstract(lambda key: train_gpt.init_gpt(key, layers=layers, width=128))
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    return fz.train_step(loss_fn, optim.adamw(1e-3), has_aux=True), params, (tokens, tokens)


@fz.block
def llama(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.rms_norm(x, (WIDTH,), p["norm"])
    q, k, v = ((h @ p[name].T).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in "qkv")
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    x = x + h @ p["o"].T
    h = F.rms_norm(x, (WIDTH,))
    return x + (F.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"].T


def llama_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        x = llama(p, x)
    return x.square().mean()


def gated(layers: int) -> Any:
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g) * 0.2  # noqa: E731
    of_keys = KEYS * WIDTH // HEADS
    shapes = {"q": (WIDTH, WIDTH), "k": (of_keys, WIDTH), "v": (of_keys, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "norm": (WIDTH,)}
    layer = lambda: {name: make(*shape) for name, shape in shapes.items()}  # noqa: E731
    x = torch.randn(4, 16, WIDTH, generator=g)
    return fz.train_step(llama_loss, optim.adamw(1e-2)), {"layers": [layer() for _ in range(layers)]}, x


@pytest.mark.full
def test_a_layer_has_two_reductions_each_way():
    assert in_a_layer(small) == in_a_layer(example) == in_a_layer(gated) == FOUR
    assert rules_of(chosen(*example(2))).items() >= {"qkv": (1, 3), "out": (0, 1), "up": (1, 1), "down": (0, 1)}.items()
    expected = dict.fromkeys(("q", "k", "v", "gate", "up"), (0, 1)) | dict.fromkeys(("o", "down"), (1, 1))
    assert rules_of(chosen(*gated(2))) == expected
    # vectors follow, and what passes between blocks may be cut by position
    assert rules_of(chosen(*small(2)))["bias"] == (0, 3)
    assert rules_of(chosen(*gated(2), sequence=True)) == expected


@pytest.mark.full
def test_beside_other_transforms():
    step, params, batch = small(2)
    others = fz.compose(fz.shard_params(), fz.accumulate(2), fz.mixed_precision("bf16"), fz.remat("full"))
    mesh = AbstractMesh(data=2, model=2)
    fz.testing.check_equivalent(fz.tensor_parallel(others(step)), params, batch, mesh, steps=2)
    assert (
        rules_of(chosen(others(step), params, tensor.batch(4), mesh)).items() >= {"qkv": (1, 3), "out": (0, 1)}.items()
    )


@pytest.mark.full
@pytest.mark.parametrize("make", [small, pytest.param(gated, marks=pytest.mark.exhaustive)])
def test_it_trains_as_the_plain_step_and_its_rules_can_be_pasted_back(make):
    step, params, batch = make(2)
    fz.testing.check_equivalent(fz.tensor_parallel(step), params, batch, MESH, steps=2)
    lowered = chosen(step, params, batch)
    header = next(x for x in str(lowered).splitlines() if x.startswith("# transforms: "))
    pasted = eval(header.removeprefix("# transforms: "), {"tensor_parallel": fz.tensor_parallel})
    again = fz.lower(pasted(step), MESH, meta(params), meta(batch))
    assert str(again) == str(lowered)
    (decision,) = lowered.plan.decisions
    assert decision.what == "tensor_parallel" and decision.chosen in header and "assignments" in decision.why


def model_of(kind: str, layers: int) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes)
    else:
        sizes = {"n_positions": 32, "n_embd": 32, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        drop = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=64, n_layer=layers, **sizes, **drop)
    torch.manual_seed(0)
    return fz.functionalize(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_models_of_the_library_are_cut_as_its_own_plan_cuts_them(kind):
    def make(layers: int) -> Any:
        model = model_of(kind, layers)
        tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
        step = model.train_step(optim.adamw(1e-3))
        return step, model.params, {"input_ids": tokens, "labels": tokens}

    own = fz.hf.tensor_rules(model_of(kind, 2), ranks=2)
    assert in_a_layer(make) == in_a_layer(make, rules=own) == FOUR
    step, *given = make(1)
    fz.testing.check_equivalent(fz.tensor_parallel(step), *given, MESH, steps=2)


def test_a_size_that_does_not_divide_stays_whole():
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g) * 0.2  # noqa: E731

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ p["odd"]) @ p["odder"] + torch.tanh(x @ p["up"]) @ p["down"]).square().mean()

    params = {"odd": make(7, 9), "odder": make(9, 7), "up": make(7, 64), "down": make(64, 7)}
    lowered = chosen(fz.train_step(loss_fn, optim.sgd(0.1)), params, make(16, 7))
    assert rules_of(lowered) == {"up": (1, 1), "down": (0, 1)}


def test_what_cannot_be_chosen():
    step, params, batch = small(2)
    without = fz.lower(
        fz.compose(fz.tensor_parallel(), fz.shard_params())(step),
        AbstractMesh(data=2, model=1),
        meta(params),
        meta(batch),
    )
    assert not any("model" in x.axes for x, _ in without.program.walk())
    with pytest.raises(TransformError, match=r"give an evaluation those of the compiled step"):
        fz.tensor_parallel(fz.eval_step(tensor.loss_fn))
    with pytest.raises(FzeroValueError, match=r"unknown mesh axis\n  'model'"):
        chosen(step, params, batch, AbstractMesh(data=2))

    def nothing(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * p["w"]).square().mean()

    with pytest.raises(FzeroValueError, match="does nothing: no parameter is sharded"):
        chosen(fz.train_step(nothing, optim.sgd(0.1)), {"w": torch.ones(8)}, torch.ones(4, 8))


def on_two_ranks() -> list[Any]:
    mesh = fz.make_mesh(model=2)
    step, params, batch = small(2)
    try:
        fz.compile(fz.tensor_parallel(step), mesh, backend="eager")
        refused = ""
    except FzeroValueError as error:
        refused = str(error)
    train = fz.compile(fz.tensor_parallel(step), mesh, backend="eager", batch=meta(batch))
    state, metrics = train(train.init(params), batch)
    evaluate = fz.compile(fz.compose(*train.resolved.transforms)(fz.eval_step(tensor.loss_fn)), mesh, backend="eager")
    return [refused, metrics["loss"].item(), evaluate(state.params, batch).item(), str(train.resolved.transforms[0])]


@pytest.mark.full
def test_ranks_choose_alike_before_the_first_batch(run_ranks):
    step, params, batch = small(2)
    state, metrics = step(step.init(params), batch)
    for refused, loss, after, spec in run_ranks(2, on_two_ranks):
        assert "rules are chosen for a batch" in refused and "batch=batch" in refused
        assert loss == pytest.approx(metrics["loss"].item(), abs=1e-5)
        assert after == pytest.approx(tensor.loss_fn(state.params, batch).item(), abs=1e-5)
        assert "'qkv': (1, 3)" in spec


def test_rules_are_as_short_as_names_allow():
    cut, other = Shard(0), Shard(1)
    names = {f"h.{i}.{name}": dim for i in range(2) for name, dim in (("a.w", cut), ("b.w", other), ("n.w", None))}
    assert rules_for(names) == (("a.w", cut), ("b.w", other))
    # the numbers of a sequence's modules tell them apart, those of layers do not
    names = {f"h.{i}.{k}.w": dim for i in range(2) for k, dim in enumerate((cut, other))}
    assert rules_for(names) == (("0.w", cut), ("1.w", other))
    # a name that ends in another's comes first
    assert rules_for({"w": cut, "a.w": other, "b.w": None}) == (("a.w", other), ("b.w", None), ("w", cut))


def test_chains_and_pieces_of_a_function():
    def fn(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        a, b = (x @ up.T).chunk(2, -1)
        return [torch.relu(a) * b @ down]

    graph = record(
        fn, [torch.empty(16, 4), torch.empty(8, 4), torch.empty(3, 4)], owner="test", names=["up", "down", "x"]
    )
    first, second = chains(graph, [0, 1])
    assert (first.last.matrix, first.last.summed, first.before) == (0, 1, ())
    assert (second.last.matrix, second.last.summed, [(p.matrix, p.kept) for p in second.before]) == (1, 0, [(0, 0)])
    assert pieces(graph, 16) == [1, 2] and pieces(graph, 8) == [1]
