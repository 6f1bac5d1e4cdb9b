"""What a module draws is the same however the batch is cut, or it is refused with the line that draws."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import fzero as fz
from fzero.errors import TraceError

Rows = torch.Tensor
ROWS, TIME, WIDTH = 12, 3, 4


def of_rows(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tensor (rows, ...) as one number a row, which tells rows apart."""
    return y.reshape(len(x), -1).float().mean(1) * x.reshape(len(x), -1).mean(1)


def two_views(x: Rows) -> Rows:
    both = F.dropout(torch.cat([x, 2 * x]), 0.5)
    return both[: len(x)] - 3 * both[len(x) :].flip(1)


def heads_first(x: Rows) -> Rows:
    heads = F.dropout(x.permute(2, 0, 1).reshape(WIDTH * len(x), TIME), 0.5)
    return heads.view(WIDTH, len(x), TIME).transpose(0, 1)


def mixed_heads(x: Rows) -> Rows:
    """Rows between two other sizes of one dim."""
    y = torch.rand_like(x.transpose(0, 1).reshape(TIME * len(x) * WIDTH))
    return y.view(TIME, len(x), WIDTH).transpose(0, 1)


def chunks(x: Rows) -> Rows:
    first, second = torch.rand_like(x.repeat(2, 1, 1)).chunk(2)
    return first * second + F.dropout(x.repeat_interleave(2, 0), 0.5)[1::2]


def swapped_views(x: Rows) -> Rows:
    """Through an attention over rows and time, which keeps neither's dim."""
    y = x.transpose(0, 1).reshape(-1, WIDTH)
    return F.dropout(y @ torch.ones(WIDTH, 5), 0.5).unflatten(0, (TIME, -1)).transpose(0, 1)


def windows(x: Rows) -> Rows:
    """As vision transformers cut images."""
    y = F.dropout(x[:, :2].reshape(-1, 2, 2).permute(0, 2, 1).reshape(-1, 2), 0.5)
    return y.view(len(x), -1)


def attention(x: Rows) -> Rows:
    """Time first, its heads folded into the rows."""
    q = x.transpose(0, 1).reshape(TIME, len(x) * 2, WIDTH // 2).transpose(0, 1)
    y = torch.bmm(F.dropout(torch.softmax(q @ q.mT, -1), 0.5), q).transpose(0, 1)
    return y.reshape(TIME, len(x), WIDTH).transpose(0, 1)


KINDS: dict[str, Callable[[Rows], Rows]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "of time first": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1),
    "of channels": lambda x: F.dropout1d(x, 0.5) + F.dropout2d(x[:, :, :, None], 0.5)[..., 0],
    "alpha": lambda x: F.alpha_dropout(x, 0.5) + F.feature_alpha_dropout(x, 0.5),
    "drop path": lambda x: x * (torch.rand((x.shape[0],) + (1,) * (x.ndim - 1)) < 0.5),
    "new_empty": lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5),
    "weight noise": lambda x: x * torch.empty(WIDTH).uniform_(0.1, 4.0),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "categorical": lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample()[..., None] * x,
    "multinomial": lambda x: torch.multinomial(x.flatten(0, 1).exp(), 2, replacement=True).view(len(x), -1),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True) + F.gumbel_softmax(x.flatten(0, 1)).view_as(x),
    "normal": lambda x: torch.normal(x, 1.0) + torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "integers": lambda x: torch.randint(0, 9, (len(x), 1)) + torch.randint_like(x, 9)[:, :, 0],
    "flattened": lambda x: F.dropout(x.flatten(0, 1), 0.5).view_as(x),
    "two views": two_views,
    "heads first": heads_first,
    "mixed": mixed_heads,
    "chunks": chunks,
    "through a product": swapped_views,
    "windows": windows,
    "attention": attention,
    "repeated for each row": lambda x: F.dropout(torch.ones(TIME, WIDTH).repeat(len(x), 1), 0.5).view_as(x),
    "into zeros": lambda x: F.dropout(torch.zeros(TIME * len(x), 4).add_(x.flatten(0, 1)), 0.5).view_as(x),
}


class Layer(nn.Module):
    """One layer of each kind that rehearsals take for another's."""

    def __init__(self, first: str):
        super().__init__()
        self.w, self.first = nn.Linear(WIDTH, WIDTH), first
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        if self.first == "weights":
            return x + torch.tanh(F.linear(x, self.w.weight + 0.1 * torch.randn_like(self.w.weight)))
        if self.first == "time":
            return x + F.dropout(torch.tanh(self.w(x.transpose(0, 1))), 0.3).transpose(0, 1)
        for inner in self.inner:
            x = x + F.dropout(torch.tanh(inner(x)), 0.3)
        return x


class Noisy(nn.Module):
    def forward(self, w):
        return w + 0.1 * torch.randn_like(w)


class Net(nn.Module):
    """Every kind of draw, outside of layers that draw otherwise; a parameter for each, whose gradient is its mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stacks = nn.ModuleDict(
            {first: nn.ModuleList(Layer(first) for _ in range(2)) for first in ("rows", "time", "weights")}
        )
        self.of = nn.ParameterDict({kind.replace(" ", "_"): nn.Parameter(torch.ones(())) for kind in KINDS})
        self.head = parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Noisy())
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5)
        hooked = self.get_submodule("stacks.rows.0")
        hooked.register_forward_hook(lambda module, args, out: torch.rand(len(out), 1, 1).mul(out))

    def forward(self, x):
        out = 0.0
        for stack in self.stacks.children():
            for layer in stack.children():
                x = layer(x)
            out = out + of_rows(KINDS["dropout"](x) + KINDS["weight noise"](x), x)
        for kind, weight in zip(KINDS.values(), self.of.values(), strict=True):
            out = out + weight * of_rows(kind(x.detach()), x)
        y = self.attention(*(x.transpose(0, 1),) * 3)[0].transpose(0, 1)
        return out + of_rows(self.head(x) + y, x)


def trained(make: Callable[[], nn.Module], batch: Any, *transforms: Any) -> dict[str, torch.Tensor]:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model = fz.functionalize(make())
    step = model.train_step(fz.optim.sgd(1.0), lambda out, batch: out.mean())
    train = fz.compile(fz.compose(fz.data_parallel(), *transforms)(step), fz.make_mesh(), backend="eager")
    part = fz.tree.map(lambda x: x.chunk(ranks)[rank].contiguous(), batch)
    state, _ = train(train.init(model.params, fz.random.key(3)), part)
    return dict(zip(fz.tree.names(state.params), fz.tree.leaves(state.params), strict=True))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, TIME, WIDTH, generator=torch.Generator().manual_seed(1))


def every_kind(*parts: int) -> list[dict[str, torch.Tensor]]:
    return [trained(Net, batch(), *([fz.accumulate(n)] if n > 1 else [])) for n in parts]


@pytest.mark.full
def test_draws_are_the_same_however_a_batch_is_cut(run_ranks):
    whole, *others = every_kind(1, 2, 3)
    others += run_ranks(2, every_kind, 1)[0]
    assert len({round(float(x), 5) for name, x in whole.items() if name.startswith("of.")}) == len(KINDS)
    for other in others:
        differ = [n for n, x in whole.items() if not torch.allclose(x, other[n], rtol=1e-4, atol=1e-5)]
        assert not differ


REFUSED: dict[str, Callable[[Rows], Rows]] = {
    "one more": lambda x: torch.rand(len(x) + 1, 8)[1:],
    "a half": lambda x: torch.cat([x[: len(x) // 2] * torch.rand(len(x) // 2, 1, 1), x[len(x) // 2 :]]),
    "twice": lambda x: torch.rand(2 * len(x), 8)[: len(x)],
    "filled": lambda x: torch.empty(2 * len(x), 8).normal_()[: len(x)],
    "a half of pairs": lambda x: F.dropout(x.flatten(0, 1)[: len(x)], 0.5),
    "only of many": lambda x: x * torch.rand(4, 1, 1).mean() if len(x) < 100 else x,
}


class Odd(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.w, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        return of_rows(self.w(x), x) + of_rows(REFUSED[self.kind](x), x)


@pytest.mark.parametrize("kind", REFUSED)
def test_draws_of_other_sizes_are_refused_with_their_line(kind):
    with pytest.raises(TraceError, match=r"(?s)(batch size).*test_random_draws.py:\d+.*Fix: draw .*rand\(len\(x\)"):
        trained(lambda: Odd(kind), batch(), fz.accumulate(2))


class Wrong(nn.Module):
    """Draws, and fails on every batch: by its width, or by a branch on a value."""

    def __init__(self, branches: bool):
        super().__init__()
        self.branches, self.drop, self.out = branches, nn.Dropout(0.5), nn.Linear(WIDTH + 1 - branches, 1)

    def forward(self, x: Rows) -> torch.Tensor:
        x = self.drop(x)
        if self.branches and x.sum() > 0:
            x = 2 * x
        return self.drop(self.out(x))


@pytest.mark.parametrize("branches", [False, True], ids=["width", "branch"])
def test_a_module_that_fails_on_its_batch_too_is_not_said_to_fail_for_its_draws(branches: bool) -> None:
    model = fz.functionalize(Wrong(branches))
    step = model.train_step(fz.optim.sgd(0.1), lambda out, batch: out.sum())
    train = fz.compile(step, fz.make_mesh(data=1, device="cpu"), backend="eager")
    state = train.init(model.params)
    with pytest.raises(TraceError) as raised:
        train(state, (torch.ones(ROWS, WIDTH),))
    said = str(raised.value)
    assert ("needs the value of a tensor" if branches else "same reduction dim") in said
    assert "test_random_draws.py" in said and "dropout" not in said and "10007" not in said
