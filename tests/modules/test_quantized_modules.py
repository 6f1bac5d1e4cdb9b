"""Modules with quantized, frozen linear layers and adapters, compared with a plain loop of the module whose weights are
dequantized."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.modules.quantized_linear import QuantizedLinear

WIDTH, VOCABULARY = 32, 64


class Adapted(nn.Module):
    """A linear layer with an adapter that a user might write."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(nn.Linear(WIDTH, 2 * WIDTH)), Adapted(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "own adapters":
        return Net()
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    if kind.startswith("qwen"):
        base = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **sizes)
        )
    else:
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))
    if kind in ("loha", "lokr"):
        config = {"loha": peft.LoHaConfig, "lokr": peft.LoKrConfig}[kind]
        products = config(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_weights=False)
        return peft.get_peft_model(base, products)
    lora = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, use_dora=kind == "dora"
    )
    if kind == "qwen, quantized first":
        return peft.get_peft_model(fz.quantize_frozen(base.requires_grad_(False)), lora)
    return peft.get_peft_model(base, lora)


def quantized(kind: str, format: str) -> nn.Module:
    net = net_of(kind)
    return net if kind == "qwen, quantized first" else fz.quantize_frozen(net, format)


def dequantized(net: nn.Module) -> nn.Module:
    """Returns a copy with plain linear layers in place of quantized ones."""
    net = copy.deepcopy(net)
    for name, m in [*net.named_modules()]:
        if isinstance(m, QuantizedLinear):
            linear = nn.Linear(m.in_features, m.out_features, bias=m.bias is not None)
            linear.weight = nn.Parameter(fz.dequantize(m.quantized), requires_grad=False)
            linear.bias = m.bias
            owner, _, attribute = name.rpartition(".")
            setattr(net.get_submodule(owner), attribute, linear)
    return net


def tokens_of() -> torch.Tensor:
    return torch.randint(VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(1))


def mean_loss(out: Any, batch: Any) -> torch.Tensor:
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def losses_of_a_rank(
    kind: str, format: str, transforms: tuple[Any, ...]
) -> tuple[list[float], dict[str, Any], set[str]]:
    net = quantized(kind, format)
    model = fz.functionalize(net)
    plain = model.train_step(fz.optim.adamw(1e-2, eps=1e-4, weight_decay=0.0), lambda out, b: mean_loss(out, b[0]))
    train = fz.compile(fz.compose(*transforms)(plain), fz.make_mesh(data=-1), backend="eager")
    tokens = tokens_of().chunk(train.mesh.size)[train.mesh.rank]
    state, losses = train.init(model.params), []
    for _ in range(4):
        state, metrics = train(state, (tokens,))
        losses.append(float(metrics["loss"]))
    before = {name: x.clone() for name, x in net.state_dict().items()}
    model.write_back(train.gather(state).params)
    after = net.state_dict()
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    return losses, after, changed


TRANSFORMS = {
    "shard_params": (fz.shard_params(),),
    "accumulate, remat": (fz.shard_params(), fz.remat("full"), fz.accumulate(2)),
    "offload": (fz.shard_params(), fz.remat("none"), fz.offload("cpu", ("params", "opt_state"))),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "format", "name"),
    [
        ("own adapters", "nf4", "shard_params"),
        ("own adapters", "int8", "accumulate, remat"),
        ("llama", "nf4", "accumulate, remat"),
        ("llama", "int8", "shard_params"),
        ("llama", "nf4", "offload"),
        ("qwen, quantized first", "nf4", "shard_params"),
        ("dora", "nf4", "accumulate, remat"),
        ("loha", "nf4", "shard_params"),
        ("lokr", "int8", "accumulate, remat"),
    ],
)
def test_losses_are_those_of_the_dequantized_module(
    run_or_call: Any, kind: str, format: str, name: str, ranks: int
) -> None:
    net = quantized(kind, format)
    plain = dequantized(net)
    assert any(isinstance(m, QuantizedLinear) for m in net.modules())
    adapters = [p for p in plain.parameters() if p.requires_grad]
    adam, want = torch.optim.AdamW(adapters, lr=1e-2, eps=1e-4, weight_decay=0.0), []
    for _ in range(4):
        loss = mean_loss(plain(tokens_of()), tokens_of())
        adam.zero_grad()
        loss.backward()
        adam.step()
        want.append(float(loss.detach()))
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    for losses, after, changed in run_or_call(ranks, losses_of_a_rank, kind, format, TRANSFORMS[name]):
        torch.testing.assert_close(losses, want, rtol=1e-6, atol=1e-6)
        assert changed == trained
        for key in trained:
            torch.testing.assert_close(after[key], plain.state_dict()[key], rtol=1e-4, atol=1e-5)


def test_equal_layers_are_one_block_and_scales_stay_exact_in_bf16() -> None:
    model = fz.functionalize(fz.quantize_frozen(net_of("llama")))
    step = fz.compose(fz.shard_params(), fz.mixed_precision("bf16"))(
        model.train_step(fz.optim.adamw(1e-2), lambda out, b: mean_loss(out, b["input_ids"]))
    )
    lowered = fz.lower(step, fz.AbstractMesh(data=2), model.params, {"input_ids": tokens_of()})
    leaves = lowered.program.leaves.values()
    assert {leaf.dtype for leaf in leaves if "absmax" in leaf.path} == {torch.float32}
    codes = [leaf for leaf in leaves if leaf.dtype == torch.uint8]
    assert len(codes) == 14
    assert all("base_layer" in leaf.path and leaf.path.startswith("params") for leaf in codes)
    forwards = {op.fn for op, _ in lowered.program.walk() if op.block is not None and op.is_forward}
    assert len(forwards) <= 2, "two equal layers share their code"


def test_layers_that_stay_as_they_are() -> None:
    net = fz.quantize_frozen(net_of("llama"), skip=["*.down_proj.base_layer"])
    kinds = {name.partition("base_model.model.")[2]: type(m) for name, m in net.named_modules()}
    assert kinds["lm_head"] is nn.Linear
    assert kinds["model.layers.0.mlp.down_proj.base_layer"] is nn.Linear
    assert kinds["model.layers.0.mlp.up_proj.base_layer"] is QuantizedLinear
    assert kinds["model.layers.0.mlp.up_proj.lora_A.default"] is nn.Linear
    tied = Net()
    tied.head.weight = tied.embed.weight
    fz.quantize_frozen(tied)
    assert type(tied.head) is nn.Linear


def test_what_cannot_be_quantized_is_rejected_by_name() -> None:
    with pytest.raises(FzeroTypeError, match=r"(?s)not trained\n  0\.weight requires a gradient.*Fix: freeze it"):
        fz.quantize_frozen(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(FzeroTypeError, match="not Linear"):
        fz.quantize_frozen(nn.Linear(4, 4))
    with pytest.raises(FzeroValueError, match=r"0\.weight: float32\[4, 3\] has an odd number of columns"):
        fz.quantize_frozen(nn.Sequential(nn.Linear(3, 4)).requires_grad_(False))
    with pytest.raises(FzeroValueError, match=r"no linear layer matches `skip`\n  'x\*'"):
        fz.quantize_frozen(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False), skip=["x*"])
    broken = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    broken.get_parameter("0.weight")[0, 0] = float("inf")
    with pytest.raises(FzeroValueError, match=r"0\.weight.*not finite"):
        fz.quantize_frozen(broken)


def test_modules_that_cast_scales_or_activations_are_rejected() -> None:
    net = fz.quantize_frozen(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)).bfloat16()
    with pytest.raises(FzeroValueError, match=r"converted from float32 to torch\.bfloat16"):
        net(torch.ones(1, 4, dtype=torch.bfloat16))
    net = fz.quantize_frozen(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False))
    with pytest.raises(FzeroTypeError, match=r"(?s)is uint8\[1, 4\].*skip="):
        net(torch.ones(1, 4, dtype=torch.uint8))


@pytest.mark.parametrize(("kind", "format"), [("llama", "int8"), ("dora", "nf4"), ("loha", "nf4")])
def test_streams_merge_adapters_into_dequantized_weights(kind: str, format: str) -> None:
    net = quantized(kind, format)
    model = fz.functionalize(net)
    stream = fz.hf.stream(model, model.params, merge=True)
    got = dict(stream)
    want: Any = dequantized(net).merge_and_unload().state_dict()  # type: ignore[operator]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert stream.total_bytes == sum(x.nbytes for x in want.values())


def test_a_quantized_model_without_adapters_is_streamed_as_numbers() -> None:
    net = fz.quantize_frozen(Net())
    model = fz.functionalize(net)
    got, want = dict(fz.hf.stream(model, model.params, dtype=torch.bfloat16)), dequantized(net).state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name].bfloat16()) for name in want)


def test_code_that_uses_the_weight_of_a_quantized_layer_gets_an_error() -> None:
    peft = pytest.importorskip("peft")
    net = quantized("llama", "int8")
    for safe in (False, True):  # the safe one would round what it adds to the codes' dtype
        with pytest.raises(FzeroError, match=r"(?s)`weight` of a quantized layer has no values.*merge=True"):
            net.merge_and_unload(safe_merge=safe)  # type: ignore[operator]
    model = fz.functionalize(net)
    assert all("lora_" in name for name, _ in fz.hf.stream(model, model.params))
    layer = next(m for m in net.modules() if isinstance(m, QuantizedLinear))
    with pytest.raises(FzeroError, match="has no values"):
        F.linear(torch.ones(1, WIDTH), layer.weight)
    vera = peft.get_peft_model(net_of("llama").unload(), peft.VeraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[operator]
    shared = fz.functionalize(fz.quantize_frozen(vera))
    with pytest.raises(FzeroError, match=r"(?s)cannot be merged layer by layer.*without merge=True"):
        fz.hf.stream(shared, shared.params, merge=True)


def test_a_weight_with_an_adapter_of_its_own_stays() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))
    lora = peft.LoraConfig(r=4, target_modules=["v_proj"], target_parameters=["q_proj.weight"])
    net = fz.quantize_frozen(peft.get_peft_model(base, lora))
    quantized = {name.split(".")[-2 if "base_layer" in name else -1] for name, m in net.named_modules()
                 if isinstance(m, QuantizedLinear)}  # fmt: skip
    assert quantized == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    model, tokens = fz.functionalize(net), tokens_of()
    train = fz.compile(model.train_step(fz.optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    _, metrics = train(train.init(model.params), {"input_ids": tokens, "labels": tokens})
    assert metrics["loss"].isfinite()
