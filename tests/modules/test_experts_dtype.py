"""Mixtures of experts of transformers compute one row for each choice, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim

transformers = pytest.importorskip("transformers")


def mixtral(dtype: torch.dtype, hidden: int = 16, **settings: Any) -> torch.nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": hidden, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **settings)).to(dtype)


def step(module: torch.nn.Module, compute: str | None, backend: str = "eager") -> tuple[float, float]:
    """The loss and the norm of the gradients in one step."""
    model = fz.functionalize(module)
    train_step = model.train_step(optim.sgd(1e-2))
    if compute is not None:
        train_step = fz.compose(fz.mixed_precision(compute))(train_step)
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    train = fz.compile(train_step, fz.make_mesh(), backend=backend)
    _, metrics = train(train.init(model.params), {"input_ids": tokens, "labels": tokens})
    return float(metrics["loss"]), float(metrics["grad_norm"])


def products(module: torch.nn.Module, *transforms: Any) -> set[str]:
    """The operators with which a step multiplies the experts' weights."""
    model = fz.functionalize(module)
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    made = fz.compose(*transforms)(model.train_step(optim.sgd(1e-2)))
    mesh = fz.AbstractMesh(expert=2) if transforms else fz.AbstractMesh(data=1)
    program = fz.lower(made, mesh, model.params, {"input_ids": tokens, "labels": tokens}).program
    assert not program.notes
    nodes = (n for function in program.functions.values() for n in function.graph.graph.nodes)
    return {str(n.target) for n in nodes if "grouped" in str(n.target) or "bmm" in str(n.target)}


GROUPED = {"fzero.grouped_mm.default", "fzero.grouped_outer.default"}


def test_compiled_with_inductor() -> None:
    """The gradients of matrices that are read transposed are contiguous, as later functions expect them."""
    assert step(mixtral(torch.float32), None, "inductor") == pytest.approx(step(mixtral(torch.float32), None), rel=1e-5)


@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16", None])
def test_a_model_in_bfloat16_computes_in_any_dtype(compute: str | None) -> None:
    """PyTorch's function of the shapes of grouped products rejects other dtypes than bfloat16."""
    loss, norm = step(mixtral(torch.bfloat16), compute)
    module = mixtral(torch.bfloat16).float()  # the same weights
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = module(input_ids=tokens, labels=tokens).loss
    expected.backward()
    squares = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
    rel = 1e-5 if compute == "fp32" else 2e-2
    assert (loss, norm) == (pytest.approx(expected.item(), rel=rel), pytest.approx(squares**0.5, rel=rel))


def test_dimensions_that_the_kernel_does_not_take() -> None:
    """Rows of 12 numbers of bfloat16 are not a multiple of 16 bytes."""
    loss, _ = step(mixtral(torch.bfloat16, hidden=12), None)
    assert loss == pytest.approx(4.16, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_multiplied_row_by_row_and_stay_sharded(dtype: torch.dtype) -> None:
    assert products(mixtral(dtype)) >= GROUPED
    sharded = fz.expert_parallel(where=lambda path, leaf: "['experts']" in path, max_replicated_bytes=0)
    assert products(mixtral(dtype), sharded) >= GROUPED


def test_an_implementation_that_was_chosen_stays() -> None:
    assert not products(mixtral(torch.bfloat16, experts_implementation="batched_mm")) & GROUPED
