"""Models as people write them in PyTorch alone, each with an idiom that no model of architectures.py has: recurrence,
skip connections by a list, parametrised weights, statistics in layers, loops over time. Their forwards return a loss.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from architectures import BATCH, LENGTH, VOCABULARY, Model, model, tokens
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Out(NamedTuple):
    loss: torch.Tensor
    output: torch.Tensor


def next_token(logits: torch.Tensor, x: torch.Tensor) -> Out:
    return Out(F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()), logits)


def classified(logits: torch.Tensor, labels: torch.Tensor) -> Out:
    return Out(F.cross_entropy(logits, labels), logits)


def perturbed(module: nn.Module) -> nn.Module:
    """No parameter at a special value."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return module.train()


def on_text(cls: type[nn.Module]) -> None:
    model(_name(cls))(lambda: Model(perturbed(cls()), {"x": tokens()}))


def on_images(cls: type[nn.Module], size: int = 32) -> None:
    def make() -> Model:
        inputs = {"x": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 5, (BATCH,))}
        return Model(perturbed(cls()), inputs)

    model(_name(cls))(make)


def _name(cls: type) -> str:
    return str(cls.__doc__).rstrip(".").lower()


# --- text ---


class Recurrent(nn.Module):
    """LSTM language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.lstm, self.drop = nn.LSTM(24, 24, num_layers=2, batch_first=True), nn.Dropout(0.0)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y, _ = self.lstm(self.embed(x))
        return next_token(self.head(self.drop(y)), x)


class Attending(nn.Module):
    """GRU cells with attention over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, 16), nn.GRUCell(32, 16)
        self.encode = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.ask, self.head = nn.Linear(16, 16, bias=False), nn.Linear(32, VOCABULARY)

    def forward(self, x):
        memory, _ = self.encode(self.embed(x))
        state, outputs = x.new_zeros((x.shape[0], 16), dtype=torch.float32), []
        for token in self.embed(x).unbind(1):
            weights = (memory @ self.ask(state)[..., None]).softmax(1)
            context = (weights * memory).sum(1)
            state = self.cell(torch.cat([token, context], -1), state)
            outputs.append(torch.cat([state, context], -1))
        return next_token(self.head(torch.stack(outputs, 1)), x)


class Translating(nn.Module):
    """nn.Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.position = nn.Parameter(torch.randn(LENGTH, 32) / 8)
        self.inner = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        y = self.embed(x) * math.sqrt(32) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return next_token(self.head(self.inner(y, y, tgt_mask=mask, tgt_is_causal=True)), x)


class Gated(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.pad = dilation
        self.filter = weight_norm(nn.Conv1d(24, 48, 2, dilation=dilation))
        self.out = weight_norm(nn.Conv1d(24, 24, 1))

    def forward(self, x):
        a, b = self.filter(F.pad(x, (self.pad, 0))).chunk(2, 1)
        y = self.out(a.tanh() * b.sigmoid())
        return x + y, y


class Dilated(nn.Module):
    """WaveNet of weight-normed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 24), nn.Conv1d(24, VOCABULARY, 1)
        self.layers = nn.ModuleList(Gated(2**i) for i in range(4))

    def forward(self, x):
        y, skips = self.embed(x).mT, []
        for layer in self.layers:
            y, skip = layer(y)
            skips.append(skip)
        return next_token(self.head(torch.relu(sum(skips))).mT, x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(24), nn.Linear(24, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 24, 32) / 5), nn.Parameter(torch.randn(4, 32, 24) / 5)
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x):
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(2)
        shares = torch.zeros_like(self.router(y)).scatter(-1, chosen, weights)
        self.load = 0.9 * self.load + 0.1 * (shares.detach() > 0).float().mean((0, 1))
        each = F.silu(torch.einsum("btd,edh->bteh", y, self.up))
        return x + torch.einsum("bteh,ehd,bte->btd", each, self.down, shares), shares.mean((0, 1)).square().sum()


class Routed(nn.Module):
    """Mixture of experts, loads in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 24), nn.Linear(24, VOCABULARY)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x):
        y, balance = self.embed(x), 0.0
        for layer in self.layers:
            y, one = layer(y)
            balance = balance + one
        loss, logits = next_token(self.head(y), x)
        return Out(loss + 0.01 * balance, logits)


# --- images ---


class Residual(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, given), nn.GroupNorm(4, width)
        self.conv_1, self.conv_2 = nn.Conv2d(given, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.skip = nn.Linear(32, width), nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x, time):
        y = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(y)))


class Spatial(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(4, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x).flatten(2).mT).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)).mT.unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """UNet2D."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(16, 16), Residual(16, 16), Residual(16, 32), Residual(32, 32)])
        self.middle = nn.ModuleList([Residual(32, 32), Residual(32, 32)])
        self.attention, self.norm = Spatial(32), nn.GroupNorm(4, 16)
        self.up = nn.ModuleList([Residual(64, 32), Residual(64, 16), Residual(32, 16), Residual(32, 16)])

    def forward(self, x, noise, t):
        angles = t[:, None] * torch.exp(-torch.arange(8) * (math.log(1e4) / 8))
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        share = torch.cos(t)[:, None, None, None]
        y, skips = self.first(share * x + (1 - share.square()).sqrt() * noise), []
        for i, block in enumerate(self.down):
            y = block(y, time)
            skips.append(y)
            y = F.avg_pool2d(y, 2) if i == 1 else y
        y = self.middle[1](self.attention(self.middle[0](y, time)), time)
        for i, block in enumerate(self.up):
            y = F.interpolate(y, scale_factor=2.0, mode="nearest") if i == 2 else y
            y = block(torch.cat([y, skips.pop()], 1), time)
        y = self.last(F.silu(self.norm(y)))
        return Out(F.mse_loss(y, noise), y)


@model("unet2d")
def _unet() -> Model:
    shape = (BATCH, 3, 16, 16)
    return Model(perturbed(UNet()), {"x": torch.randn(shape), "noise": torch.randn(shape), "t": torch.rand(BATCH)})


class Standardized(nn.Conv2d):
    def forward(self, x):
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) * torch.rsqrt(var + 1e-5), self.bias, self.stride, self.padding)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Standardized(12, 24, 3, padding=1), Standardized(24, 12, 1)
        self.gain = nn.Parameter(torch.full((), 0.2))

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x))) * self.gain


class Unnormalized(nn.Module):
    """Network without norms, standardised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = Standardized(3, 12, 4, stride=4), nn.Sequential(*(Scaled() for _ in range(3)))
        self.head = nn.Linear(12, 5)

    def forward(self, x, labels):
        return classified(self.head(self.layers(self.stem(x)).mean((2, 3))), labels)


class Inverted(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, 24, 1, bias=False), nn.BatchNorm2d(24), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24), nn.SiLU()
        )
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 6, 1), nn.SiLU(), nn.Conv2d(6, 24, 1))
        self.project = nn.Sequential(nn.Conv2d(24, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.depth(self.expand(x))
        return x + self.project(y * self.squeeze(y).sigmoid())


class Mobile(nn.Module):
    """Inverted bottlenecks, squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.SiLU())
        self.layers, self.head = nn.Sequential(*(Inverted() for _ in range(3))), nn.Linear(12, 5)

    def forward(self, x, labels):
        return classified(self.head(self.layers(self.stem(x)).mean((2, 3))), labels)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.along = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.across = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, x):
        x = x + self.along(self.norm_1(x).mT).mT
        return x + self.across(self.norm_2(x))


class Mixer(nn.Module):
    """MLP mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 16, 8, stride=8), nn.Sequential(*(Mixing() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x, labels):
        y = self.layers(self.stem(x).flatten(2).mT)
        return classified(self.head(self.norm(y).mean(1)), labels)


class Growing(nn.Sequential):
    def __init__(self, given: int) -> None:
        super().__init__(nn.BatchNorm2d(given), nn.ReLU(inplace=True), nn.Conv2d(given, 6, 3, padding=1, bias=False))

    def forward(self, x):
        return torch.cat([x, super().forward(x)], 1)


class Dense(nn.Module):
    """DenseNet, ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.first, self.second = (nn.Sequential(*(Growing(w + 6 * i) for i in range(2))) for w in (8, 10))
        self.between, self.head = nn.Sequential(nn.Conv2d(20, 10, 1), nn.AvgPool2d(2)), nn.Linear(22, 5)

    def forward(self, x, labels):
        y = self.second(self.between(self.first(self.stem(x))))
        return classified(self.head(y.relu().mean((2, 3))), labels)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.norm_1, self.norm_2, self.norm_q = nn.LayerNorm(32), nn.LayerNorm(32), nn.RMSNorm(8)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.scale_1, self.scale_2 = nn.Parameter(torch.full((32,), 0.1)), nn.Parameter(torch.full((32,), 0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_q(k), v).transpose(1, 2).flatten(2)
        x = x + self.scale_1 * self.out(y)
        return x + self.scale_2 * self.mlp(self.norm_2(x))


class Registers(nn.Module):
    """ViT with registers and layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 32, 8, stride=8), nn.ModuleList(Normalized() for _ in range(3))
        self.extra, self.position = nn.Parameter(torch.randn(1, 3, 32)), nn.Parameter(torch.randn(1, 16, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x, labels):
        y = self.stem(x).flatten(2).mT + self.position
        y = torch.cat([self.extra.expand(len(x), -1, -1), y], 1)
        for layer in self.layers:
            y = layer(y)
        return classified(self.head(self.norm(y)[:, 0]), labels)


class Discriminator(nn.Module):
    """Spectral norms, written in each forward."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 16]
        self.layers = nn.ModuleList(
            nn.Sequential(spectral_norm(nn.Conv2d(a, b, 4, stride=2, padding=1)), nn.LeakyReLU(0.2))
            for a, b in itertools.pairwise(widths)
        )
        self.head = spectral_norm(nn.Linear(16, 5))

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(x.mean((2, 3))), labels)


class Latents(nn.Module):
    """Perceiver with shared layers."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.bring = nn.Parameter(torch.randn(4, 16)), nn.Linear(3, 16)
        self.read = nn.MultiheadAttention(16, 2, batch_first=True)
        self.think = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x, labels):
        seen, y = self.bring(F.avg_pool2d(x, 4).flatten(2).mT), self.latents.expand(len(x), -1, -1)
        for _ in range(3):
            y = self.think(y + self.read(y, seen, seen, need_weights=False)[0])
        return classified(self.head(y.mean(1)), labels)


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others, self.norm = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)

    def forward(self, x, adjacency):
        y = self.own(x) + self.others(torch.bmm(adjacency, x))
        return x + self.norm(y.flatten(0, 1)).view_as(y).relu()


class Graph(nn.Module):
    """Graph network, node and edge features."""

    def __init__(self) -> None:
        super().__init__()
        self.bring, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Convolving() for _ in range(3))

    def forward(self, nodes, edges, labels):
        adjacency = edges / edges.sum(-1, keepdim=True).clamp_min(1.0)
        x = self.bring(nodes)
        for layer in self.layers:
            x = layer(x, adjacency)
        return classified(self.head(x.amax(1)), labels)


@model("graph network")
def _graph() -> Model:
    edges = (torch.rand(BATCH, 6, 6) > 0.5).float()
    inputs = {"nodes": torch.randn(BATCH, 6, 4), "edges": edges, "labels": torch.randint(0, 3, (BATCH,))}
    return Model(perturbed(Graph()), inputs)


for _cls in (Recurrent, Attending, Translating, Dilated, Routed):
    on_text(_cls)
for _cls in (Unnormalized, Mobile, Mixer, Dense, Registers, Discriminator, Latents):
    on_images(_cls)


def settings_of(module: nn.Module) -> Any:
    """All that tells two kinds of layer apart: classes, shapes, numbers and texts, but what counts layers."""
    return tuple(
        (
            name,
            type(m).__qualname__,
            tuple(
                (n, tuple(p.shape)) for n, p in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
            ),
            tuple(
                (k, x)
                for k, x in vars(m).items()
                if isinstance(x, (bool, int, float, str, tuple)) and not k.endswith(("_idx", "index", "_id"))
            ),
        )
        for name, m in module.named_modules()
    )
