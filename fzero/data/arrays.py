"""Takes batches from arrays, or from a map-style PyTorch dataset, as a pure function of the step."""

from __future__ import annotations

import random as builtin_random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fzero import random, tree
from fzero._compat import compat
from fzero._utils.arguments import count, function, python_numbers
from fzero.data.packed_documents import PackedDocuments
from fzero.data.sample_order import Steps, digest
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.trace.guards.unsupported_operations import draws
from fzero.trace.guards.user_frames import line, user_place
from fzero.tree import describe

_WHERE = "data.ArrayDataset"


class ArrayDataset(Steps):
    """Samples in arrays. The batch of any step can be read at any time, on any mesh.

    Args:
        arrays: tensors or arrays with one row per sample, given one by one, `ArrayDataset(x, y, ...)`, or as a
            pytree, `ArrayDataset({"image": x, "label": y}, ...)`. Or one map-style dataset (`__len__` and
            `__getitem__`, including those of the library `datasets`); its samples are collated as by a `DataLoader`.
        batch: number of samples in the *global* batch of a step.
        seed: seed for the order of the samples, and for the keys that `transform` gets.
        shuffle: whether every epoch has its own random order; otherwise every epoch is in the order of the data.
        transform: `transform(batch, key)` returns the batch to train on. The key is that of the step, for this rank's
            part of the batch: random numbers that `fz.random` draws with it for a batch are the same on every mesh.
        collate: makes a batch from a list of samples of a dataset; by default `torch.utils.data.default_collate`.
        skip: half-open ranges of data steps to leave out, as for `TokenDataset`.

    Memory: the given arrays, and a copy of the samples of a batch.

    Raises:
        FzeroValueError, FzeroTypeError: listing everything that is wrong: no samples, arrays of different lengths,
            leaves that are not arrays, overlapping ranges to skip. From `batch_at`: if samples cannot be collated to
            a batch of tensors, or were made with draws from the global generators of torch, Python or NumPy.

    Example:
        >>> data = ArrayDataset(torch.arange(12.).reshape(6, 2), torch.arange(6), batch=4)
        >>> x, y = data.batch_at(0)
        >>> x.shape, bool((x[:, 0] == 2 * y).all()), data.steps_per_epoch
        (torch.Size([4, 2]), True, 1.5)
    """

    def __init__(
        self,
        *arrays: Any,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        transform: Callable[[Any, torch.Tensor], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        skip: Iterable[tuple[int, int]] = (),
    ):
        super().__init__(_WHERE, *python_numbers((batch, seed, skip)))
        problems = [] if transform is None else function("transform", transform, "batch", "key")
        problems += [] if collate is None else function("collate", collate, "samples")
        if problems:
            fix = "e.g. transform=lambda batch, key: batch"
            raise FzeroTypeError(_WHERE, "takes functions with different arguments", problems, fix)
        self.shuffle, self.transform = shuffle, transform
        given = arrays[0] if len(arrays) == 1 else arrays
        self.arrays = None if _is_dataset(given) else _rows_of(given)
        self.dataset: Any = given if self.arrays is None else None
        if collate is not None and self.dataset is None:
            fix = "leave collate out, or change batches by transform=fn(batch, key)"
            raise FzeroTypeError(_WHERE, "collate is for data sets of samples; these are arrays", fix=fix)
        if (
            self.dataset is not None
            and hasattr(given, "with_format")
            and getattr(given, "format", {}).get("type") is None
        ):
            # for the library `datasets`, whose samples would otherwise be lists
            self.dataset = self.dataset.with_format("torch")
        self._collate = collate or torch.utils.data.default_collate
        self.num_samples = len(given) if self.arrays is None else len(tree.leaves(self.arrays)[0])
        if not self.num_samples:
            raise FzeroValueError(_WHERE, "there are no samples", fix="give arrays of at least one row")

    @classmethod
    def from_loader(cls, loader: torch.utils.data.DataLoader[Any], *, seed: int = 0, ranks: int = 1) -> ArrayDataset:
        """Makes the dataset of a `DataLoader`, with its batch size and its collate function, shuffled if the loader
        shuffles.

        The order is determined by `seed`; the loader's own order could not be resumed. Samples are made in the
        process that asks for them (`prefetch` does so in a thread), not by the loader's workers. An epoch has no
        smaller batch at its end: samples of the next epoch fill it.

        Args:
            loader: the loader of one process, without a sampler that splits the data.
            ranks: number of processes that had such a loader, with `loader.batch_size` samples each: the global batch
                is that of all of them.

        Raises:
            FzeroTypeError: if the batch of a step cannot be determined: for an iterable dataset or a custom sampler.
        """
        ranks = python_numbers(ranks)
        problems = count("ranks", ranks)
        if not isinstance(loader, torch.utils.data.DataLoader):
            problems.append(f"{describe(loader)} is not a torch.utils.data.DataLoader")
        else:
            problems += _not_by_step(loader)
        if problems:
            fix = (
                "give ArrayDataset(dataset, batch=...) the data set itself, "
                "or an object with batch_at(step, rank, size)"
            )
            raise FzeroTypeError("data.from_loader", "the batch of a step is not known", problems, fix)
        # it also exists if none was passed; a loader that was given one has no batch_size
        batches: Any = loader.batch_sampler
        return cls(
            loader.dataset,
            batch=batches.batch_size * ranks,
            seed=seed,
            shuffle=type(batches.sampler) is torch.utils.data.RandomSampler,
            collate=loader.collate_fn,
        )

    def _in_epoch(self, positions: torch.Tensor, epoch: int) -> torch.Tensor:
        return super()._in_epoch(positions, epoch) if self.shuffle else positions

    def _rows(self, samples: list[int], step: int, rank: int) -> Any:
        if self.dataset is None and self.transform is None:
            return self._made(samples, step, rank)
        # Comparing the states of generators is cheap. The draws are traced only if a state has changed.
        before, others = torch.random.get_rng_state(), _generators()
        made = self._made(samples, step, rank)
        if not torch.equal(before, torch.random.get_rng_state()):
            with _Drawn() as found:  # only draws of this thread: draws of other threads do not belong to the batch
                self._made(samples, step, rank)
            if found.calls:
                what = "a batch uses random numbers from torch's global generator: it is not a function of its step"
                fix = "draw in transform=fn(batch, key), with fz.random (normal, uniform, bernoulli, dropout)"
                raise FzeroValueError("data.batch_at", what, list(dict.fromkeys(found.calls))[:8], fix)
        if _generators() != others:
            self._check_drawn(made, samples, step, rank)
        return made

    def _check_drawn(self, made: Any, samples: list[int], step: int, rank: int) -> None:
        """Raises an error if a batch was made with draws from the global generators of Python or NumPy. The batch is
        made again until the generators stay unchanged, because another thread may have drawn, or until the batch
        differs.
        """
        for _ in range(_TRIES):
            before = _generators()
            again = self._made(samples, step, rank)
            drawn = [name for name, state in _generators().items() if state != before[name]]
            if not drawn:
                return
            if not _equal(made, again):
                break
        where = type(self.dataset).__name__ if self.dataset is not None else "transform"
        what = "a batch uses random numbers from a global generator: it is not a function of its step"
        fix = "give each sample its own generator, numpy.random.default_rng((seed, index)) or random.Random(index)"
        fix += "; or draw in transform=fn(batch, key), with fz.random"
        raise FzeroValueError("data.batch_at", what, [f"{name}: used in {where}" for name in drawn], fix)

    def _made(self, samples: list[int], step: int, rank: int) -> Any:
        if self.arrays is not None:
            index = torch.tensor(samples)
            batch = tree.map(lambda leaf: leaf[index], self.arrays)
        else:
            many = getattr(self.dataset, "__getitems__", None)  # as a DataLoader reads them
            found = many(samples) if many is not None else [self.dataset[i] for i in samples]  # pyright: ignore
            batch = self._collated(found, samples)
            tree.map_with_path(_check_tensor, batch, root="batch")
        if self.transform is None:
            return batch
        key = random.fold_in(random.key(self.seed), self.data_step(step))
        return self.transform(batch, random.with_part(key, rank))

    def _collated(self, found: list[Any], samples: list[int]) -> Any:
        if self._collate is not torch.utils.data.default_collate:
            return self._collate(found)
        try:
            return self._collate(found)
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            kinds: dict[str, int] = {}
            for number, sample in zip(samples, found, strict=True):
                kinds.setdefault(_kind(sample), number)
            problems = [f"sample {number}: {kind}" for kind, number in list(kinds.items())[:8]]
            kind = FzeroTypeError if isinstance(error, TypeError) else FzeroValueError
            fix = "make them alike, or give collate=fn(samples), which makes a batch of a list of them (padding)"
            raise kind("data.batch_at", "samples cannot be collated into a batch of tensors", problems, fix) from error

    def _identity(self) -> dict[str, Any]:
        leaves = tree.leaves(self.arrays) if self.arrays is not None else []
        leaves += self.dataset.identity() if isinstance(self.dataset, PackedDocuments) else []
        return {
            "batch": self.batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.num_samples,
            "digest": [digest(leaf) for leaf in leaves],
        }

    def __repr__(self) -> str:
        leaves = map(describe, tree.leaves(self.arrays))
        what = ", ".join(leaves) if self.dataset is None else type(self.dataset).__name__
        return f"ArrayDataset({what}, batch={self.batch}, seed={self.seed}, num_samples={self.num_samples})"


def _is_dataset(value: Any) -> bool:
    """Returns whether a value is an object whose samples are read by index."""
    able = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return able and not isinstance(value, (list, tuple, dict, torch.Tensor)) and not hasattr(value, "__array__")


def _not_by_step(loader: torch.utils.data.DataLoader[Any]) -> list[str]:
    """Returns the problems of a loader whose batches are not consecutive samples of its dataset, in order or in a
    random order per epoch.
    """
    data, batches = loader.dataset, loader.batch_sampler
    problems = [] if _is_dataset(data) else [f"{type(data).__name__} is iterable, and cannot be indexed"]
    if batches is None:
        return [*problems, "batch_size=None: samples are not collated into batches"]
    if type(batches) is not torch.utils.data.BatchSampler:
        return [*problems, f"batches are made by {type(batches).__name__}"]
    sampler: Any = batches.sampler
    name = type(sampler).__name__
    if type(sampler) not in (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler):
        return problems if problems else [f"samples are chosen by a custom {name}"]
    if sampler.data_source is not data:
        problems.append(f"{name} is of {type(sampler.data_source).__name__}, not of the loader's own data set")
    if getattr(sampler, "replacement", False):
        problems.append(f"samples are chosen by {name} with replacement")
    elif len(sampler) != len(sampler.data_source):
        problems.append(
            f"{name}(num_samples={len(sampler)}) takes a number of samples "
            f"other than all {len(sampler.data_source)} samples"
        )
    return problems


_TRIES = 8
"""How often a batch is made again while some thread draws from a global generator, before the draw is attributed to
the batch.
"""


def _generators() -> dict[str, Any]:
    """Returns the states of the global generators of Python and, if it is imported, of NumPy."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state(legacy=False) if numpy is not None else None
    found = None if state is None else (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"])
    return {"random": builtin_random.getstate(), "numpy.random": found}


def _equal(a: Any, b: Any) -> bool:
    """Returns whether two batches are identical bit for bit."""
    one, other = tree.leaves(a), tree.leaves(b)
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(x.shape == y.shape and torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


class _Drawn(compat.TorchDispatchMode):
    """Records the calls inside that draw from torch's global generator, with the user's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs) and kwargs.get("generator") is None:
            place = user_place(None)
            self.calls.append(f"{func} in {line(place)}" if place else str(func))
        return func(*args, **kwargs)


def _kind(sample: Any) -> str:
    """Describes a sample in an error, by the shapes of its tensors and arrays."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name!r}: {_kind(x)}" for name, x in sample.items()) + "}"
    if type(sample) in (tuple, list):
        return f"{type(sample).__name__}({', '.join(map(_kind, sample[:8]))}{', ...' if len(sample) > 8 else ''})"
    shape = getattr(sample, "shape", None) if hasattr(sample, "__array__") else None
    return describe(sample) if shape is None or isinstance(sample, torch.Tensor) else f"{sample.dtype}{list(shape)}"


def _rows_of(arrays: Any) -> Any:
    """Returns the arrays as tensors on the host, after checking that they all have the same number of rows."""
    problems: list[str] = []

    def tensor(path: str, leaf: Any) -> torch.Tensor:
        if isinstance(leaf, torch.Tensor) or hasattr(leaf, "__array__"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore", UserWarning
                    )  # the warning is about read-only arrays, which are not written to
                    made = torch.as_tensor(leaf)
                if made.dim():
                    return made.detach().cpu()
            except (TypeError, ValueError, RuntimeError):
                pass
        problems.append(f"{path}: {describe(leaf)}")
        return torch.empty(0)

    made = tree.map_with_path(tensor, arrays, root="arrays")
    if problems or not tree.leaves(made):
        fix = "give tensors or arrays with one row a sample, or a data set with __len__ and __getitem__"
        raise FzeroTypeError(_WHERE, "samples are rows of arrays", problems or ["there are no arrays"], fix)
    lengths = {path: len(leaf) for path, leaf in tree.with_paths(made, "arrays")}
    if len(set(lengths.values())) > 1:
        problems = [f"{path}: {n} rows" for path, n in lengths.items()]
        raise FzeroValueError(_WHERE, "arrays have different lengths", problems, "give each one row a sample")
    return made


def _check_tensor(path: str, leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor):
        fix = "leave it out of the samples, or make a tensor of it by collate="
        raise FzeroTypeError("data.batch_at", "batches are of tensors", [f"{path}: {describe(leaf)}"], fix)
