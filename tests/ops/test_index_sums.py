"""Sums at indices: the values that PyTorch's operators give, and the same bits every time, with as many threads as
there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero._compat import compat
from fzero.ops.index_sums import IN_ORDER, add_at
from fzero.trace.device_decompositions import by_operation, on_device
from fzero.trace.graph_capture import record
from fzero.trace.subgraph import into_buffers

aten = torch.ops.aten
ROWS, TOKENS, WIDTH = 3, 4096, 64  # few rows and many tokens: threads meet at every one of them


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int) -> torch.Tensor:
    return fz.random.normal(fz.random.key(3), shape)


def test_values_are_those_of_index_put() -> None:
    x, i, j = drawn(5, 4, 6), torch.tensor([[0, -1], [4, 0], [2, 2]]), torch.tensor([[1, 1], [1, 0], [3, -4]])
    cases = [
        ([i], drawn(3, 2, 4, 6)),
        ([i], drawn(6)),  # broadcast
        ([i, j], drawn(3, 2, 6)),
        ([None, j], drawn(5, 3, 2, 6)),
        ([torch.tensor([True, False, True, True, False])], drawn(3, 4, 6)),
        ([torch.tensor(2)], drawn(4, 6)),
        ([torch.empty(0, dtype=torch.int64)], drawn(0, 4, 6)),
    ]
    for indices, values in cases:
        places = tuple(
            torch.arange(n)[:, None, None] if k is None else k for k, n in zip(indices, x.shape, strict=False)
        )
        want = x.double().index_put(places, values.double(), accumulate=True)
        torch.testing.assert_close(add_at(x, indices, values).double(), want, rtol=1e-6, atol=1e-6)
    put = IN_ORDER[aten.index_put.default]
    assert torch.equal(put(x, [i], drawn(3, 2, 4, 6), False), aten.index_put(x, [i], drawn(3, 2, 4, 6)))


@pytest.mark.parametrize("padding", [-1, 1])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_values_are_those_of_an_embeddings_gradient(padding: int, by_frequency: bool) -> None:
    grad, tokens = drawn(7, 3, 8), torch.arange(21).reshape(7, 3) % 5
    for dtype in (torch.int64, torch.int32):
        found = IN_ORDER[aten.embedding_dense_backward.default](grad, tokens.to(dtype), 6, padding, by_frequency)
        torch.testing.assert_close(found, aten.embedding_dense_backward(grad, tokens, 6, padding, by_frequency))


@pytest.mark.usefixtures("threads")
def test_the_same_bits_every_time() -> None:
    x, values, tokens = torch.zeros(ROWS, WIDTH), drawn(TOKENS, WIDTH), torch.arange(TOKENS) % ROWS
    pairs = [tokens, torch.arange(TOKENS) % 2]
    for indices, source in (([tokens], values), (pairs, values[:, 0])):
        first = add_at(x, indices, source)
        assert all(torch.equal(add_at(x, indices, source), first) for _ in range(20))
    one_by_one = x.clone()
    for token, row in zip(tokens.tolist(), values, strict=True):
        one_by_one[token] += row
    assert torch.equal(add_at(x, [tokens], values), one_by_one)


@pytest.mark.parametrize(("shape", "dim", "places"), [((5,), 0, 4), ((5, 3), 0, 7), ((3, 5, 2), 1, 7), ((3, 5), -1, 1)])
def test_values_are_those_of_index_add(shape: tuple[int, ...], dim: int, places: int) -> None:
    x, index = drawn(*shape), torch.arange(places) * 2 % 5
    source = drawn(*(places if n == 5 else n for n in shape))
    for alpha, dtype in ((1, torch.int64), (2.5, torch.int32)):
        found = IN_ORDER[aten.index_add.default](x, dim, index.to(dtype), source, alpha=alpha)
        torch.testing.assert_close(found, x.index_add(dim, index, source, alpha=alpha))


def test_an_index_add_to_a_scalar() -> None:
    assert IN_ORDER[aten.index_add.default](torch.tensor(1.0), 0, torch.tensor([0]), torch.tensor(2.0)) == 3


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "indexing": lambda table, tokens: table[tokens],
    "index_select": lambda table, tokens: table.index_select(0, tokens.flatten()),
    "gather": lambda table, tokens: table.gather(0, tokens.flatten().unsqueeze(1).expand(-1, WIDTH)),
    "by frequency": lambda table, tokens: F.embedding(tokens, table, scale_grad_by_freq=True),
}


@pytest.mark.full(keep=["eager"])
@pytest.mark.usefixtures("threads", "compiled_here")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_is_the_same_bits_every_time(backend: str) -> None:
    def loss(params, tokens):
        return sum((read(params[name], tokens) @ params["out"]).square().mean() for name, read in READS.items())

    params, tokens = (
        {"out": drawn(WIDTH, 8)} | {name: drawn(ROWS, WIDTH) for name in READS},
        torch.arange(TOKENS).reshape(8, -1) % ROWS,
    )
    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend=backend)
    found = []
    for _ in range(10):
        state, _ = train(train.init(params), tokens)
        found.append(state.params)
    assert not [name for name in READS for x in found if not torch.equal(x[name], found[0][name])]


def test_the_setting_is_as_it_was() -> None:
    add_at(torch.zeros(2, 2), [torch.tensor([0]), torch.tensor([1])], torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_sums_at_indices_are_written_into_a_buffer():
    """The operator that adds in place makes no value that anything reads: it is not left out."""
    x, tokens = torch.randn(6, 4), torch.tensor([2, 0, 2, 5, 1, 2])
    with compat.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x), mode.from_tensor(tokens)]
        put = lambda x, i: [aten.index_put(x.new_zeros(8, 4), [i], x, True), x + 1]  # noqa: E731
        graph = record(put, fakes, owner="put", names=["x", "tokens"])
    run = by_operation(into_buffers(on_device(graph, torch.device("cpu")), (0,)))
    buffer = torch.full((8, 4), 7.0)
    run(x, tokens, buffer)
    torch.testing.assert_close(buffer, torch.zeros(8, 4).index_add(0, tokens, x))
