"""`model.loss("chunked")`: the model's own loss, computed without all logits, or an error that names the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError
from fzero.testing.simulate import parts_of

WORDS, WIDTH = 40, 8


class Model(nn.Module):
    """A language model whose loss is `fn(logits, labels)`."""

    def __init__(self, fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.fn = fn

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)))
        return {"loss": self.fn(logits, labels), "logits": logits}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(24).view(3, 8) * 7 % WORDS
    labels = (ids * 3 + 1) % WORDS
    labels[1, 2:] = -100
    return {"ids": ids, "labels": labels}


def gradients(model: Any, how: Any, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    params = fz.tree.map(lambda x: x.clone().requires_grad_(x.is_floating_point()), model.params)
    loss = model.loss(how)(params, batch, key=fz.random.key(0))
    loss = loss.total / loss.count if isinstance(loss, fz.loss.Weighted) else loss
    return loss.detach(), [*torch.autograd.grad(loss, fz.tree.leaves(params), allow_unused=True)]


def equal(model: Any, batch: Any) -> None:
    """The loss and gradients in chunks are those from all logits."""
    expected, grads = gradients(model, None, batch)
    found, own = gradients(model, "chunked", batch)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, grads, rtol=1e-4, atol=1e-6)


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, WORDS)


def softcapped(logits: torch.Tensor) -> torch.Tensor:
    return 0.7 * torch.tanh(logits.float() / 0.5 * 3)


def in_place(logits: torch.Tensor) -> torch.Tensor:
    logits *= 3
    logits.view(-1, WORDS).detach()  # a view that is read changes nothing
    return logits.div_(0.5).tanh_() * 2.0


LOSSES: Any = {
    "mean": lambda x, y: F.cross_entropy(flat(x), y.view(-1)),
    "sum": lambda x, y: F.cross_entropy(flat(x.float()), y.view(-1), reduction="sum") / 7,
    "shifted": lambda x, y: F.cross_entropy(flat(x[..., :-1, :].contiguous()), y[..., 1:].reshape(-1)),
    "shifted_labels": lambda x, y: F.cross_entropy(flat(x), F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1)),
    "scaled": lambda x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(flat(-3 * x / 2), y.view(-1)),
    "softcapped": lambda x, y: F.cross_entropy(flat(softcapped(x)), y.view(-1).clamp(0), ignore_index=0),
    "in_place": lambda x, y: F.cross_entropy(in_place(x).reshape(-1, WORDS), y.view(-1)),
    "with_another_term": lambda x, y: F.cross_entropy(flat(x), y.view(-1)) + 1e-2 * x.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_loss_of_all_logits(name: str, bias: bool) -> None:
    equal(fz.functionalize(Model(LOSSES[name], bias)), tokens())


def written(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits[..., :3] = -1.0
    return F.cross_entropy(flat(logits), labels.view(-1))


def written_through_a_view(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits.detach().view(-1)[:5].zero_()
    return F.cross_entropy(flat(logits), labels.view(-1))


def without_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        doubled = flat(logits * 2)
    return F.cross_entropy(doubled, labels.view(-1)) + logits.sum()


REJECTED: Any = {
    "sum": (lambda x, y: F.cross_entropy(flat(x + 1), y.view(-1)), "go through add, which makes float32[3, 8, 40]"),
    "of_a_tensor": (lambda x, y: F.cross_entropy(flat(x * torch.ones(())), y.view(-1)), "go through mul"),
    "detached": (lambda x, y: F.cross_entropy(flat(x.detach()), y.view(-1)) + x.sum(), "go through detach"),
    "masked": (lambda x, y: F.cross_entropy(flat(x.masked_fill(x > 1, 0)).float(), y.view(-1)), "masked_fill"),
    "of_fewer_words": (lambda x, y: F.cross_entropy(x[..., :20].reshape(-1, 20), y.view(-1) % 20), "getitem"),
    "reversed": (lambda x, y: F.cross_entropy(flat(x).flip(0), y.view(-1)), "go through flip"),
    "transposed": (lambda x, y: F.cross_entropy(x.transpose(1, 2), y), "go through transpose"),
    "as_rows_of_others": (lambda x, y: F.cross_entropy(x.view(-1, 20), y.view(-1).repeat(2) % 20), "go through view"),
    "capped_twice": (lambda x, y: F.cross_entropy(flat(x.tanh().tanh()), y.view(-1)), "go through tanh"),
    "negative_cap": (lambda x, y: F.cross_entropy(flat(-2 * x.tanh()), y.view(-1)), "multiplied by -2"),
    "a_number_over_them": (lambda x, y: F.cross_entropy(flat(1 / x), y.view(-1)), "go through rdiv"),
    "written": (written, "go through setitem"),
    "written_through_a_view": (written_through_a_view, "an operation in place on a view of them"),
    "by_row": (lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="none").mean(), "reduction='none'"),
    "class_weights": (lambda x, y: F.cross_entropy(flat(x), y.view(-1), weight=torch.ones(WORDS)), "weight="),
    "probabilities": (lambda x, y: F.cross_entropy(flat(x), flat(x).softmax(-1)), "targets float32[24, 40]"),
    "other_logits": (lambda x, y: F.cross_entropy(torch.ones(24, WORDS), y.view(-1)) + x.sum(), "a linear layer"),
    "no_gradient": (without_gradient, "computed without a gradient"),
    "no_cross_entropy": (lambda x, y: F.nll_loss(flat(x).log_softmax(-1), y.view(-1)), "is not computed by"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_any_other_operation_on_the_logits_is_an_error_that_names_it(name: str) -> None:
    fn, says = REJECTED[name]
    model = fz.functionalize(Model(fn))
    with pytest.raises(FzeroTypeError) as error:
        gradients(model, "chunked", tokens())
    assert says in str(error.value) and 'Fix: leave out loss="chunked"' in str(error.value)


def test_a_cross_entropy_inside_a_block_is_an_error() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(flat(self.head(x)), labels.view(-1))

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.heads = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Layer(), Layer()])

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.heads[0](self.embed(ids), labels) + self.heads[1](self.embed(ids), labels)

    with pytest.raises(FzeroTypeError, match="outside of blocks"):
        gradients(fz.functionalize(Heads()), "chunked", tokens())


def test_what_is_not_a_loss() -> None:
    model = fz.functionalize(Model(LOSSES["mean"]))
    with pytest.raises(FzeroTypeError, match=r"model.loss\('chunked'\)"):
        model.loss("chunky")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FzeroTypeError, match="own loss has no aux"):
        model.train_step(optim.sgd(0.1), "chunked", has_aux=True)


# --- models of transformers ---

TINY = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: Any = {
    "Llama": {},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 3.0},  # divides, tanh, multiplies
    "Granite": {"logits_scaling": 8.0},  # divides
    "Cohere": {"logit_scale": 0.5, "bos_token_id": 1, "eos_token_id": 2},  # multiplies, a tied head
    "Phi": {},  # a bias
}


def model_of(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**TINY, **MODELS[name], **more})
    return fz.functionalize(getattr(transformers, f"{name}ForCausalLM")(config))


def sentences(rows: int = 4, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).view(rows, length) * 11 % 96
    labels = ids.clone()
    labels[: rows // 2, 3:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    model, batch = model_of(name), sentences()
    equal(model, batch)
    equal(model, {**batch, "num_items_in_batch": torch.tensor(5)})


COMPOSITIONS: Any = {
    "zero_3": ({"data": 2}, lambda model: [fz.shard_params(), fz.accumulate(2)]),
    "vocabulary": (
        {"model": 2},
        lambda model: [fz.tensor_parallel(rules=fz.hf.tensor_rules(model), max_replicated_bytes=0)],
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_under_transforms(name: str) -> None:
    """Two steps equal those with the loss of all logits; ragged labels are averaged exactly."""
    axes, transforms = COMPOSITIONS[name]
    model, batch, found = model_of("Gemma2", num_hidden_layers=1), sentences(), []
    for how in (None, "chunked"):
        step = fz.compose(*transforms(model) if how else ())(model.train_step(optim.sgd(0.5), how))
        mesh = fz.AbstractMesh(**axes) if how else fz.AbstractMesh()
        state, metrics = fz.testing.simulate(step, mesh, model.params, batch, steps=2)
        found.append((metrics["loss"], fz.tree.leaves(state.params)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(precision: str) -> None:
    model, batch, found = model_of("Cohere", num_hidden_layers=1), sentences(), []
    for how in (None, "chunked"):
        step = fz.mixed_precision(precision)(model.train_step(optim.sgd(0.1), how))
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        state, metrics = train(train.init(model.params), batch)
        assert metrics["finite"]
        found.append((metrics["loss"], metrics["grad_norm"], fz.tree.leaves(state.params)))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=1e-3)


def test_an_evaluation() -> None:
    model, batch = model_of("Cohere"), sentences()
    evaluate = fz.compile(model.eval_step("chunked"), fz.make_mesh(), backend="eager")
    expected = gradients(model, None, batch)[0]
    torch.testing.assert_close(evaluate(model.params, batch), expected)
    with torch.inference_mode():
        torch.testing.assert_close(evaluate(model.params, batch), expected)
        with pytest.raises(FzeroTypeError, match=r"use torch\.no_grad"):  # without a trace, writes are not seen
            model.eval_step("chunked").fn(model.params, batch)


@pytest.mark.parametrize("name", ["one_process", "zero_3", "vocabulary", "evaluation"])
def test_no_value_of_a_program_is_all_logits(name: str) -> None:
    """4096 positions of each rank and a vocabulary of 1000 are computed in chunks of 1024 positions."""
    words, positions = 1000, 4096
    axes, transforms = COMPOSITIONS.get(name, ({}, lambda model: []))
    model, mesh = model_of("Llama", vocab_size=words, num_hidden_layers=1), fz.AbstractMesh(**axes)
    batch: Any = sentences(positions // 32 * (4 if name == "zero_3" else 1), 32)
    most, peaks = [], []
    for how in (None, "chunked"):
        if name == "evaluation":
            step, given = model.eval_step(how or (lambda out, batch: out.loss)), (batch,)
        else:
            step = fz.compose(*transforms(model))(model.train_step(optim.sgd(0.5), how))
            given = parts_of(step, mesh, batch)[0]
        lowered = fz.lower(step, mesh, model.params, given, backend="eager")
        most.append(max(map(torch.Tensor.numel, logits_of(lowered.program, words // axes.get("model", 1)))))
        peaks.append(lowered.plan.peak_bytes)
    words //= axes.get("model", 1)
    assert most == [positions * words, 1024 * words]
    assert peaks[0] - peaks[1] > positions * words * 4


def logits_of(program: Any, words: int) -> list[torch.Tensor]:
    """The values with a last dimension of this length in the functions of a program."""
    nodes = [node for fn in program.functions.values() for node in fn.graph.graph.nodes]
    values = [x for node in nodes if isinstance(x := node.meta.get("val"), torch.Tensor)]
    return [x for x in values if x.dim() > 1 and x.shape[-1] == words]
