"""The programs that the gate freezes: about fifty small steps which together use every transform.

Each entry of `PROGRAMS` is a function without arguments that returns a `Case`. The models are as small as they can be
while still having every kind of operation: two or three layers of width 16. They are written here, not imported from
other tests, because changing a model changes what is frozen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim

WIDTH, HEADS, WORDS, LENGTH, ROWS = 16, 4, 24, 8, 16
DISK = "/tmp"  # only named in a program: the simulator keeps the values of every tier in memory


@dataclass(frozen=True)
class Case:
    """A step on a mesh, its first parameters, and the batches of all ranks together.

    Attributes:
        step: a training or evaluation step with its transforms.
        mesh: the mesh it is simulated on; `lower` and the plan use the same.
        params: a tree of tensors with their first values.
        batch: the global batch: all rows of all ranks.
        options: keyword arguments of `fz.lower`, such as a memory budget.
    """

    step: Any
    mesh: fz.AbstractMesh
    params: Any
    batch: Any
    options: dict[str, Any]


def case(step: Any, params: Any, batch: Any, mesh: dict[str, int], **options: Any) -> Case:
    return Case(step, fz.AbstractMesh(unified_memory=False, **mesh), params, batch, options)


# Models


def drawn(seed: int = 1) -> Callable[..., torch.Tensor]:
    """A function that draws parameters of a given shape."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator) * 0.2


def tokens(*names: str, rows: int = ROWS, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randint(0, WORDS, (rows, length), generator=generator) for name in names}


@fz.block
def gpt_layer(p: Any, x: torch.Tensor) -> torch.Tensor:  # float32[batch, seq, width]
    h = F.layer_norm(x, (WIDTH,), p["norm"])
    q, k, v = ((h @ p[n]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for n in ("query", "key", "value"))
    grouped = k.shape[1] != q.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    x = x + y.transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(F.layer_norm(x, (WIDTH,), p["norm2"]) @ p["up"] + p["bias"]) @ p["down"]


def gpt_loss(p: Any, batch: Any) -> torch.Tensor:
    x = p["embedding"][batch["x"]]
    for layer in p["layers"]:
        x = gpt_layer(layer, x)
    head = p["head"] if "head" in p else p["embedding"].T
    logits = F.layer_norm(x, (WIDTH,), p["norm"]) @ head
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())


def gpt(layers: int = 2, keys: int = HEADS, tied: bool = False) -> Any:
    """Parameters of the GPT. `keys`: heads of keys and values; `tied`: the head is the embedding."""
    make = drawn()
    narrow = keys * WIDTH // HEADS

    def layer() -> dict[str, torch.Tensor]:
        return {
            "norm": make(WIDTH) + 1,
            "norm2": make(WIDTH) + 1,
            "query": make(WIDTH, WIDTH),
            "key": make(WIDTH, narrow),
            "value": make(WIDTH, narrow),
            "out": make(WIDTH, WIDTH),
            "up": make(WIDTH, 2 * WIDTH),
            "bias": make(2 * WIDTH),
            "down": make(2 * WIDTH, WIDTH),
        }

    out = {"embedding": make(WORDS, WIDTH), "norm": make(WIDTH) + 1, "layers": [layer() for _ in range(layers)]}
    return out if tied else {**out, "head": make(WIDTH, WORDS)}


TENSOR_RULES: dict[str, Any] = {
    "embedding": 0,
    "query": 1,
    "key": 1,
    "value": 1,
    "out": 0,
    "up": 1,
    "bias": 0,
    "down": 0,
    "head": 1,
}

ADAMW = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))


def train_gpt(
    *transforms: Any, optimizer: Any = ADAMW, mesh: dict[str, int] | None = None, model: Any = None, **options: Any
) -> Case:
    step = fz.compose(*transforms)(fz.train_step(gpt_loss, optimizer))
    params = gpt() if model is None else model
    return case(step, params, tokens("x", "y"), mesh or {"data": 2}, **options)


# A mixture of experts: of each token the two best, with room for all rows.

EXPERTS = 4


def moe_loss(capacity: Any) -> Callable[..., torch.Tensor]:
    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (WIDTH,), p["norm"]).flatten(0, 1)
        weights, chosen = (h @ p["router"]).softmax(-1).topk(2, -1)
        rows, back = fz.experts.dispatch(h, chosen, weights, num_experts=EXPERTS, **capacity)
        rows = fz.experts.matmul(F.silu(fz.experts.matmul(rows, p["expert_up"], back)), p["expert_down"], back)
        return x + fz.experts.combine(rows, back).view_as(x)

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = p["embedding"][batch["x"]]
        for block in p["layers"]:
            x = layer(block, x)
        return F.cross_entropy((x @ p["head"]).flatten(0, 1), batch["y"].flatten())

    return loss


def moe() -> Any:
    make = drawn()

    def layer() -> dict[str, torch.Tensor]:
        return {
            "norm": make(WIDTH) + 1,
            "router": make(WIDTH, EXPERTS),
            "expert_up": make(EXPERTS, WIDTH, 24),
            "expert_down": make(EXPERTS, 24, WIDTH),
        }

    return {"embedding": make(WORDS, WIDTH), "head": make(WIDTH, WORDS), "layers": [layer() for _ in range(2)]}


def train_moe(*transforms: Any, mesh: dict[str, int], **capacity: Any) -> Case:
    experts = fz.expert_parallel(where=lambda path, leaf: "expert_" in path)
    step = fz.compose(experts, *transforms)(fz.train_step(moe_loss(capacity), ADAMW))
    return case(step, moe(), tokens("x", "y"), mesh)


# A convolutional model with batch norms, whose running statistics the forward updates.


class ConvolutionalModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The norms subtract biases again, so that their gradients would be rounding errors, which Adam makes large.
        conv1 = torch.nn.Conv2d(1, 4, 3, bias=False)
        conv2 = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.stem = torch.nn.Sequential(conv1, torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.body = torch.nn.Sequential(conv2, torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head((x + self.body(x)).mean((2, 3)))


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """The module with parameters drawn by `drawn`, so that they do not depend on PyTorch's initialization."""
    make = drawn(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(make(*parameter.shape) + (1.0 if parameter.dim() == 1 else 0.0))
    return module


def convolutional() -> Case:
    model = fz.functionalize(filled(ConvolutionalModel()))
    step = model.train_step(ADAMW, lambda out, batch: F.cross_entropy(out, batch[1]))
    generator = torch.Generator().manual_seed(4)
    batch = (torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator))
    return case(fz.compose(fz.shard_grads(), fz.accumulate(2))(step), model.params, batch, {"data": 2})


class RecurrentModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.recurrent = torch.nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(x))[0])


def recurrent() -> Case:
    model = fz.functionalize(filled(RecurrentModel()))
    step = model.train_step(ADAMW, lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch[1].flatten()))
    return case(fz.shard_params(step), model.params, tuple(tokens("x", "y", rows=4).values()), {"data": 2})


class EncoderDecoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.transformer = torch.nn.Transformer(
            WIDTH,
            2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=2 * WIDTH,
            dropout=0.1,
            batch_first=True,
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


def encoder_decoder() -> Case:
    model = fz.functionalize(filled(EncoderDecoder()))
    step = model.train_step(ADAMW, lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["target"].flatten()))
    step = fz.compose(fz.shard_params(), fz.accumulate(2))(step)
    return case(step, model.params, tokens("source", "target", rows=4), {"data": 2})


def evaluation(*transforms: Any, mesh: dict[str, int], model: Any = None) -> Case:
    def evaluate(p: Any, batch: Any) -> Any:
        count = torch.tensor(float(batch["y"].numel()))
        return {"loss": fz.weighted(gpt_loss(p, batch) * batch["y"].numel(), count)}

    step = fz.compose(*transforms)(fz.eval_step(evaluate))
    return case(step, gpt() if model is None else model, tokens("x", "y"), mesh)


def muon() -> Any:
    return optim.partition(
        {"matrices": optim.muon(0.02), "others": optim.adamw(1e-2)},
        lambda path, leaf: "matrices" if "layers" in path and leaf.dim() == 2 else "others",
    )


# A multi-layer perceptron whose matrices are large enough (4096 elements) to be compressed.


@fz.block
def dense(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def dense_loss(p: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for layer in p["layers"]:
        x = dense(layer, x)
    return (x - batch["y"]).square().mean()


def train_dense(*transforms: Any, mesh: dict[str, int], optimizer: Any = ADAMW) -> Case:
    make = drawn()
    params = {"layers": [{"w": make(64, 64), "b": make(64)} for _ in range(2)]}
    batch = {"x": make(8, 64) * 5, "y": make(8, 64) * 5}
    return case(fz.compose(*transforms)(fz.train_step(dense_loss, optimizer)), params, batch, mesh)


OWN_TABLE = [["F0", "F1", "F0.1", "B0.1", "B0", "F1.1", "B1.1", "B1"]] * 2
"""A pipeline's action table as a user would write it: two ranks with two chunks each, two micro-batches."""
BOTH = ("data", "node")
TWO_AXES = {"node": 2, "data": 2}
DEEP = functools.partial(gpt, layers=4)


def pipelined(*transforms: Any, micro_batches: int = 2, mesh: dict[str, int] | None = None, **how: Any) -> Case:
    pieces = (*transforms, fz.accumulate(micro_batches, schedule="layerwise"), fz.pipeline(**how))
    return train_gpt(*pieces, mesh=mesh or {"pipe": 2}, model=DEEP())


PROGRAMS: dict[str, Callable[[], Case]] = {
    # ZeRO
    "zero_0": lambda: train_gpt(fz.data_parallel()),
    "zero_1": lambda: train_gpt(fz.shard_opt_state(), mesh={"data": 4}),
    "zero_2": lambda: train_gpt(fz.shard_grads(), fz.accumulate(2)),
    "zero_3": lambda: train_gpt(fz.shard_params()),
    "zero_3_two_axes": lambda: train_gpt(fz.shard_params(axis=BOTH), mesh=TWO_AXES),
    "zero_3_hierarchical": lambda: train_gpt(
        fz.shard_params(axis=BOTH), fz.accumulate(2), fz.hierarchical(axis="node"), mesh=TWO_AXES
    ),
    "redundant": lambda: train_gpt(fz.shard_params(), fz.redundant()),
    # accumulation and rematerialization
    "accumulate_loop": lambda: train_gpt(fz.shard_params(), fz.accumulate(4)),
    "accumulate_layerwise": lambda: train_gpt(fz.shard_params(), fz.accumulate(4, schedule="layerwise")),
    "remat_full": lambda: train_gpt(fz.shard_params(), fz.remat("full")),
    "remat_min_cut": lambda: train_gpt(fz.shard_params(), fz.remat("min_cut"), model=gpt(3)),
    "remat_fraction": lambda: train_gpt(fz.shard_params(), fz.remat(0.5), model=gpt(3)),
    "remat_auto": lambda: train_gpt(fz.shard_params(), fz.remat("auto"), model=gpt(3), memory_budget="1GB"),
    # precision
    "bf16": lambda: train_gpt(fz.shard_params(), fz.mixed_precision("bf16")),
    "bf16_stored": lambda: train_gpt(fz.shard_grads(), fz.mixed_precision("bf16", params="bf16", reduce="bf16")),
    "fp16_loss_scale": lambda: train_gpt(fz.shard_params(), fz.mixed_precision("fp16"), fz.accumulate(2)),
    "precision_auto": lambda: train_gpt(fz.shard_params(), fz.mixed_precision("auto", start="fp16")),
    "fp8": lambda: train_gpt(fz.shard_params(), fz.mixed_precision("bf16"), fz.fp8()),
    "compress_int8": lambda: train_dense(fz.shard_params(), fz.compress(), mesh={"data": 2}),
    "compress_int4": lambda: train_dense(fz.data_parallel(), fz.compress(grads="int4"), mesh={"data": 2}),
    # tensor, sequence, expert and pipeline parallelism
    "tensor": lambda: train_gpt(fz.tensor_parallel(rules=TENSOR_RULES), mesh={"model": 2}),
    "tensor_sequence": lambda: train_gpt(
        fz.tensor_parallel(rules=TENSOR_RULES, sequence=True), fz.shard_params(), mesh={"data": 2, "model": 2}
    ),
    "tensor_tied_gqa": lambda: train_gpt(
        fz.tensor_parallel(rules={name: dim for name, dim in TENSOR_RULES.items() if name != "head"}),
        fz.shard_grads(),
        mesh={"data": 2, "model": 2},
        model=gpt(keys=2, tied=True),
    ),
    "tensor_chosen_rules": lambda: train_gpt(fz.tensor_parallel(), mesh={"model": 2}),
    "sequence_heads": lambda: train_gpt(fz.sequence_parallel(attention="heads"), fz.accumulate(2), mesh={"seq": 2}),
    "sequence_keys": lambda: train_gpt(
        fz.sequence_parallel(attention="keys"),
        fz.shard_params(axis=("data", "seq")),
        mesh={"data": 2, "seq": 2},
        model=gpt(keys=1),
    ),
    "expert_dense": lambda: train_moe(
        fz.shard_params(axis=("expert", "data")), mesh={"data": 2, "expert": 2}, capacity=EXPERTS / 2
    ),
    "expert_per_rank": lambda: train_moe(fz.accumulate(2), mesh={"expert": 2}, capacity=("rank", 2.0), ranks=2),
    "expert_without_capacity": lambda: train_moe(
        fz.shard_params(axis=("expert", "data")), fz.accumulate(2), mesh={"data": 2, "expert": 2}
    ),
    "pipeline_1f1b": lambda: pipelined(micro_batches=4),
    "pipeline_interleaved": lambda: pipelined(schedule="interleaved", chunks=2),
    "pipeline_zero_bubble": lambda: pipelined(fz.shard_params(), schedule="zb", mesh={"data": 2, "pipe": 2}),
    "pipeline_own_table": lambda: pipelined(schedule=OWN_TABLE, chunks=2),
    # offload
    "offload_host_clipped": lambda: train_gpt(
        fz.shard_params(), fz.mixed_precision("bf16"), fz.offload("cpu", ("opt_state", "params", "activations"))
    ),
    "offload_host": lambda: train_gpt(fz.shard_params(), fz.offload("cpu", "opt_state"), optimizer=optim.adamw(1e-2)),
    "offload_disk": lambda: train_gpt(fz.offload("nvme", ("opt_state", "params"), path=DISK), mesh={"data": 1}),
    "offload_disk_unclipped": lambda: train_gpt(
        fz.offload("nvme", ("opt_state", "params"), path=DISK), optimizer=optim.adamw(1e-2), mesh={"data": 1}
    ),
    "offload_auto": lambda: train_gpt(
        fz.shard_params(),
        fz.mixed_precision("bf16"),
        fz.offload("auto", path=DISK),
        memory_budget="120KB",
        host_budget="10MB",
    ),
    # optimizers
    "muon": lambda: train_gpt(fz.shard_params(), optimizer=muon()),
    "lamb": lambda: train_gpt(fz.shard_grads(), optimizer=optim.lamb(1e-2)),
    "adafactor": lambda: train_gpt(fz.shard_params(), optimizer=optim.adafactor(1e-2)),
    "int8_moments": lambda: train_dense(
        fz.shard_opt_state(), mesh={"data": 2}, optimizer=optim.adamw(1e-2, state_dtype="int8")
    ),
    # evaluation and other models
    "evaluate": lambda: evaluation(fz.shard_params(), fz.mixed_precision("bf16"), mesh={"data": 2}),
    "evaluate_tensor": lambda: evaluation(fz.tensor_parallel(rules=TENSOR_RULES), mesh={"model": 2}),
    "convolutional": convolutional,
    "recurrent": recurrent,
    "encoder_decoder": encoder_decoder,
    # compositions of four
    "tensor_zero_3_bf16_offload": lambda: train_gpt(
        fz.tensor_parallel(rules=TENSOR_RULES),
        fz.shard_params(),
        fz.mixed_precision("bf16"),
        fz.offload("cpu", "opt_state"),
        mesh={"data": 2, "model": 2},
    ),
    "pipeline_tensor_zero_1_remat": lambda: pipelined(
        fz.tensor_parallel(rules=TENSOR_RULES),
        fz.shard_opt_state(),
        fz.remat("full"),
        mesh={"data": 2, "pipe": 2, "model": 2},
    ),
}
