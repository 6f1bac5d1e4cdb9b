"""Arrays, data sets of torch, loaders and the library `datasets`: a step has the same data however it is shared."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import fzero as fz
from fzero.data import ArrayDataset, prefetch
from fzero.errors import FzeroTypeError, FzeroValueError

X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20)


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.tensor([i, i * i]), "y": i}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(size: int) -> None:
    noise = lambda b, key: (b[0] + fz.random.normal(key, b[0].shape), b[1])  # noqa: E731
    data = ArrayDataset(X, Y, batch=6, seed=3, transform=noise)
    for step in (0, 3, 100):
        whole = data.batch_at(step)
        parts = [data.batch_at(step, rank, size) for rank in range(size)]
        assert all(torch.equal(torch.cat([p[i] for p in parts]), whole[i]) for i in range(2))


def test_every_epoch_visits_every_row_once_in_its_own_order_or_in_that_of_the_data() -> None:
    data, plain = ArrayDataset(X, Y, batch=5), ArrayDataset(X, Y, batch=5, shuffle=False)
    epochs = [torch.cat([data.batch_at(4 * e + i)[1] for i in range(4)]) for e in range(2)]
    assert all(torch.equal(e.sort().values, Y) for e in epochs) and not torch.equal(*epochs)
    assert torch.equal(torch.cat([plain.batch_at(i)[1] for i in range(4, 8)]), Y) and data.steps_per_epoch == 4
    x, y = data.batch_at(2)
    assert torch.equal(x, X[y])


def test_trees_of_arrays_of_any_kind() -> None:
    frozen = np.arange(20, dtype=np.uint8)
    frozen.flags.writeable = False
    data = ArrayDataset({"image": X.requires_grad_(), "label": (frozen, Y.bfloat16())}, batch=4)
    batch = data.batch_at(0)
    assert not batch["image"].requires_grad and batch["label"][0].dtype == torch.uint8
    assert torch.equal(batch["label"][0].long(), batch["label"][1].long())
    assert repr(data).startswith("ArrayDataset(float32[20, 3], uint8[20], bfloat16[20], batch=4")


def test_a_run_goes_on_where_it_was_and_with_the_same_data_alone() -> None:
    data = ArrayDataset(X, Y, batch=6, seed=3)
    cursor = data.cursor(7)
    assert data.resume(cursor) == 7
    with pytest.raises(FzeroValueError, match=r"(?s)shuffle: saved with True, now False.*digest: saved with"):
        ArrayDataset(X + 1, Y, batch=6, seed=3, shuffle=False).resume(cursor)
    with prefetch(data, 3, 5) as batches:
        assert all(torch.equal(batch[0], data.batch_at(step)[0]) for step, batch in batches)
    skipped = ArrayDataset(X, Y, batch=6, seed=3, skip=[(2, 4)])
    assert torch.equal(skipped.batch_at(2)[0], data.batch_at(4)[0]) and skipped.resume(cursor) == 5


def test_data_sets_and_loaders_of_torch() -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=5, shuffle=True)
    data = ArrayDataset.from_loader(loader, ranks=2)
    batch = data.batch_at(0)
    assert data.batch == 10 and torch.equal(batch["x"][:, 1], batch["y"] ** 2)
    plain = ArrayDataset.from_loader(torch.utils.data.DataLoader(Squares(), batch_size=5))
    assert [b["y"].tolist() for b in torch.utils.data.DataLoader(Squares(), batch_size=5)] == [
        plain.batch_at(i)["y"].tolist() for i in range(2)
    ]
    pairs = torch.utils.data.TensorDataset(X.detach(), Y)
    x, y = ArrayDataset(pairs, batch=4).batch_at(0)
    assert torch.equal(x, X[y])
    assert ArrayDataset(Squares(), batch=2, collate=lambda rows: torch.stack([r["x"] for r in rows])).batch_at(
        0
    ).shape == (2, 2)


def test_loaders_whose_batches_do_not_follow_from_the_step() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(FzeroTypeError, match="Endless is iterable, and cannot be indexed"):
        ArrayDataset.from_loader(torch.utils.data.DataLoader(Endless()))
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 10, 10)
    with pytest.raises(FzeroTypeError, match="WeightedRandomSampler"):
        ArrayDataset.from_loader(torch.utils.data.DataLoader(Squares(), sampler=weighted))
    with pytest.raises(FzeroTypeError, match="batches are made by list"):
        ArrayDataset.from_loader(torch.utils.data.DataLoader(Squares(), batch_sampler=[[0, 1]]))  # pyright: ignore
    with pytest.raises(FzeroTypeError, match=r"batch\['name'\]\[0\]: str"):
        ArrayDataset(Named(), batch=1).batch_at(0)


def test_loaders_of_samplers() -> None:
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

    squares = Squares()
    given = [BatchSampler(kind(squares), 3, False) for kind in (RandomSampler, SequentialSampler)]
    made = [ArrayDataset.from_loader(DataLoader(squares, batch_sampler=sampler), ranks=2) for sampler in given]
    assert [(m.batch, m.shuffle) for m in made] == [(6, True), (6, False)]
    part = Subset(squares, [1, 2, 3])
    refused: list[tuple[Any, str]] = [
        (
            DataLoader(squares, sampler=RandomSampler(squares, num_samples=4)),
            r"num_samples=4\) takes a number of samples other than all 10",
        ),
        (DataLoader(squares, sampler=RandomSampler(squares, replacement=True)), "with replacement"),
        (
            DataLoader(squares, sampler=SequentialSampler(part)),
            "SequentialSampler is of Subset, not of the loader's own",
        ),
        (DataLoader(squares, batch_sampler=BatchSampler(RandomSampler(part), 2, True)), "RandomSampler is of Subset"),
        (DataLoader(squares, batch_size=None), "batch_size=None"),
        ([1, 2], "list is not a torch.utils.data.DataLoader"),
    ]
    for loader, says in refused:
        with pytest.raises(FzeroTypeError, match=says):
            ArrayDataset.from_loader(loader)
    with pytest.raises(FzeroTypeError, match="ranks=0: must be at least 1"):
        ArrayDataset.from_loader(DataLoader(squares), ranks=0)
    assert ArrayDataset.from_loader(DataLoader(part, batch_size=2)).num_samples == 3


@pytest.mark.parametrize(
    ("sample", "error", "says"),
    [
        (
            lambda i: torch.zeros(i + 1),
            FzeroValueError,
            r"sample 0: float32\[1\]\n  sample 1: float32\[2\]\n(.*\n)*Fix: .*collate=",
        ),
        (lambda i: {"x": None}, FzeroTypeError, r"sample 0: {'x': NoneType}\n.*collate="),
        (lambda i: {"x": 1} if i else {"y": [np.zeros(2)]}, FzeroValueError, r"{'y': list\(float64\[2\]\)}"),
    ],
)
def test_samples_that_make_no_batch(sample: Any, error: type[Exception], says: str) -> None:
    class Odd(Squares):
        def __getitem__(self, i: int) -> Any:
            return sample(i)

    with pytest.raises(error, match=says):
        ArrayDataset(Odd(), batch=3, shuffle=False).batch_at(0)
    own = ArrayDataset(Odd(), batch=3, collate=lambda samples: samples[0].missing)
    with pytest.raises(AttributeError):  # what a function of the user's raises passes
        own.batch_at(0)


def test_functions_of_other_arguments() -> None:
    with pytest.raises(FzeroTypeError, match=r"transform=.*\(batch\).*must be a function of \(batch, key\)"):
        ArrayDataset(X, batch=2, transform=lambda batch: batch)  # pyright: ignore
    with pytest.raises(FzeroTypeError, match="collate=3: must be a function"):
        ArrayDataset(Squares(), batch=2, collate=3)  # pyright: ignore


def test_draws_from_the_global_generator() -> None:
    class Noisy(Squares):
        def __getitem__(self, i: int) -> Any:
            return torch.randn(2)  # here

    says = r"(?s)global generator.*aten.randn.default in .*test_array_batches.py:\d+: return .*  # here.*fz.random"
    with pytest.raises(FzeroValueError, match=says):
        ArrayDataset(Noisy(), batch=2).batch_at(0)
    with pytest.raises(FzeroValueError, match=r"aten\.rand_like"):
        ArrayDataset(X, batch=2, transform=lambda batch, key: torch.rand_like(batch)).batch_at(0)
    with (
        pytest.raises(FzeroValueError, match="global generator"),
        prefetch(ArrayDataset(Noisy(), batch=2), 0) as ahead,
    ):
        next(iter(ahead))


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("numpy.random", lambda i: torch.from_numpy(np.random.rand(2))),
        ("random", lambda i: torch.tensor(random.random() < 1e-9)),
        ("random", lambda i: torch.tensor(random.choice([1, 2, 3]))),
    ],
)
def test_draws_from_the_global_generators_of_python_and_numpy(name: str, draw: Any) -> None:
    class Noisy(Squares):
        def __getitem__(self, i: int) -> Any:
            return draw(i)

    says = rf"(?s)a global generator.*\n  {name}: used in Noisy\n.*default_rng\(\(seed, index\)\).*fz.random"
    for data in (
        ArrayDataset(Noisy(), batch=2),
        ArrayDataset.from_loader(torch.utils.data.DataLoader(Noisy(), batch_size=2)),
    ):
        with pytest.raises(FzeroValueError, match=says):
            data.batch_at(0)
    with pytest.raises(FzeroValueError, match=rf"  {name}: used in transform\n"):
        ArrayDataset(X, batch=2, transform=lambda batch, key: draw(0)).batch_at(0)


def test_samples_with_generators_of_their_own() -> None:
    def seeded(i: int) -> torch.Tensor:
        random.seed(i)  # and so the same each time
        return torch.tensor([random.random(), np.random.default_rng(i).random(), random.Random(i).random()])

    class Own(Squares):
        def __getitem__(self, i: int) -> Any:
            if meanwhile := [thread for thread in threads if thread.ident is None]:  # a draw of another thread's
                meanwhile[0].start()
                meanwhile[0].join()
            return seeded(i)

    threads = [threading.Thread(target=np.random.rand)]
    data, state = ArrayDataset(Own(), batch=2), random.getstate()
    first = data.batch_at(0)
    assert torch.equal(first, data.batch_at(0)) and not threads[0].is_alive()
    random.setstate(state)


def test_draws_of_another_thread_meanwhile() -> None:
    def drawn_elsewhere(batch: Any, key: Any) -> Any:
        thread = threading.Thread(target=torch.rand, args=(1,))
        thread.start()
        thread.join()
        return batch

    assert ArrayDataset(Y, batch=2, shuffle=False, transform=drawn_elsewhere).batch_at(0).tolist() == [0, 1]
    own = torch.Generator().manual_seed(0)
    kept = ArrayDataset(Y, batch=2, transform=lambda batch, key: torch.rand(1, generator=own.manual_seed(0)))
    assert torch.equal(kept.batch_at(0), kept.batch_at(1))


class Named(Squares):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"name": "a"}


@pytest.mark.parametrize(
    ("arrays", "error", "says"),
    [
        ((), FzeroTypeError, "there are no arrays"),
        ((X, Y[:5]), FzeroValueError, r"arrays\[0\]: 20 rows\n.*arrays\[1\]: 5 rows"),
        ((X, 3), FzeroTypeError, r"arrays\[1\]: int"),
        ((torch.tensor(1.0),), FzeroTypeError, r"arrays: float32\[\]"),
        ((X[:0],), FzeroValueError, "there are no samples"),
        ((["a", "b"],), FzeroTypeError, "give tensors or arrays"),
        ((np.array(["a", "b"]),), FzeroTypeError, "give tensors or arrays"),
    ],
)
def test_what_holds_no_samples(arrays: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ArrayDataset(*arrays, batch=2)


def test_what_cannot_be_shared_or_asked_for() -> None:
    with pytest.raises(FzeroValueError, match="a batch of 4 samples is not divisible by 3 ranks"):
        ArrayDataset(X, batch=4).batch_at(0, 1, 3)
    with pytest.raises(FzeroTypeError, match="collate is for data sets"):
        ArrayDataset(X, batch=4, collate=torch.stack)  # pyright: ignore
    with pytest.raises(FzeroValueError, match="batch=0"):
        ArrayDataset(X, batch=0)


def test_the_library_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"tokens": [[i, i + 1, i + 2] for i in range(8)], "label": list(range(8))})
    batch = ArrayDataset(made, batch=4).batch_at(0)
    assert torch.equal(batch["tokens"][:, 0], batch["label"]) and batch["tokens"].shape == (4, 3)
    named = datasets.Dataset.from_dict({"text": ["a", "b"]})
    with pytest.raises(FzeroTypeError, match=r"batch\['text'\]\[0\]: str"):
        ArrayDataset(named, batch=2).batch_at(0)


def test_training_on_arrays() -> None:
    """A regression finds its weights, on one process and in micro-batches."""
    weights = torch.tensor([[1.0], [-2.0], [0.5]])
    x = fz.random.normal(fz.random.key(0), (64, 3))
    data = ArrayDataset(x, x @ weights, batch=16)
    step = fz.accumulate(2)(
        fz.train_step(lambda p, b: (b[0] @ p["w"] - b[1]).square().mean(), fz.optim.adamw(0.1, weight_decay=0.0))
    )
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.zeros(3, 1)})
    for i in range(200):
        state, metrics = train(state, data.batch_at(i))
    assert float(metrics["loss"]) < 1e-4
