"""Takes batches from arrays, or from a map-style torch data set, as a pure function of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fzero import random, tree
from fzero.data.steps import Steps, digest
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.tree import describe

_WHERE = "data.ArrayDataset"


class ArrayDataset(Steps):
    """Samples in arrays, of which the batch of any step can be asked for at any time, on any mesh.

    Args:
        arrays: the data: tensors or arrays with one row a sample, given one by one, `ArrayDataset(x, y, ...)`, or as
            one pytree of them, `ArrayDataset({"image": x, "label": y}, ...)`; or one map-style data set (`__len__` and
            `__getitem__`, also that of the library `datasets`), whose samples are collated as a `DataLoader` does.
        batch: rows of the *global* batch of a step.
        seed: of the order of the samples, and of the keys that `transform` gets.
        shuffle: every epoch in an order of its own; without it every epoch is in the order of the data.
        transform: `transform(batch, key)` gives what is to be trained on. The key is the step's, with this rank's part:
            what `fz.random` draws with it for a batch is the same on every mesh.
        collate: makes a batch of a list of samples of a data set; by default `torch.utils.data.default_collate`.
        skip: half-open ranges of steps of data to leave out, as for `TokenDataset`.

    Memory: the arrays given, and a copy of the rows of a batch.

    Raises:
        FzeroValueError, FzeroTypeError: with everything that is wrong: no samples, arrays of different lengths, leaves
            that are no arrays, overlapping ranges to skip.

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
        super().__init__(_WHERE, batch, seed, skip)
        self.shuffle, self.transform = shuffle, transform
        given = arrays[0] if len(arrays) == 1 else arrays
        self.arrays = None if _is_dataset(given) else _rows_of(given)
        self.dataset: Any = given if self.arrays is None else None
        if collate is not None and self.dataset is None:
            fix = "leave collate out, or change batches by transform=fn(batch, key)"
            raise FzeroTypeError(message(_WHERE, "collate is for data sets of samples; these are arrays", fix=fix))
        if (
            self.dataset is not None
            and hasattr(given, "with_format")
            and getattr(given, "format", {}).get("type") is None
        ):
            self.dataset = self.dataset.with_format("torch")  # of the library `datasets`: else its samples are lists
        self._collate = collate or torch.utils.data.default_collate
        self.num_samples = len(given) if self.arrays is None else len(tree.leaves(self.arrays)[0])
        if not self.num_samples:
            raise FzeroValueError(message(_WHERE, "there are no samples", fix="give arrays of at least one row"))

    @classmethod
    def from_loader(cls, loader: torch.utils.data.DataLoader[Any], *, seed: int = 0, ranks: int = 1) -> ArrayDataset:
        """The data set of a `DataLoader`, with its batch size, its way to collate, and shuffled where it is.

        The order is that of `seed`, not the loader's own, which nothing can resume. Samples are made in the process
        that asks (`read_ahead` does so in a thread), not by the loader's workers; an epoch has no batch of fewer rows
        at its end, the next epoch's rows fill it.

        Args:
            loader: of one process: without a sampler that splits the data.
            ranks: processes whose loaders these were, of `loader.batch_size` rows each: the global batch is of all.

        Raises:
            FzeroTypeError: what cannot be asked for a step: an iterable data set, a sampler of one's own.
        """
        samplers = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
        problems = []
        if not _is_dataset(loader.dataset):
            problems.append(f"{type(loader.dataset).__name__} gives its samples one after the other, not by number")
        if type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
            problems.append(f"batches are made by {type(loader.batch_sampler).__name__}")
        elif type(loader.sampler) not in samplers or getattr(loader.sampler, "replacement", False):
            problems.append(f"samples are chosen by {type(loader.sampler).__name__} of its own")
        if problems:
            fix = "give what has batch_at(step, rank, size), made a function of the step"
            raise FzeroTypeError(message("data.from_loader", "the batch of a step is not known", problems, fix))
        return cls(
            loader.dataset,
            batch=(loader.batch_size or 1) * ranks,
            seed=seed,
            shuffle=type(loader.sampler) is torch.utils.data.RandomSampler,
            collate=loader.collate_fn,
        )

    def _in_epoch(self, positions: torch.Tensor, epoch: int) -> torch.Tensor:
        return super()._in_epoch(positions, epoch) if self.shuffle else positions

    def _rows(self, samples: list[int], step: int, rank: int) -> Any:
        if self.arrays is not None:
            index = torch.tensor(samples)
            batch = tree.map(lambda leaf: leaf[index], self.arrays)
        else:
            many = getattr(self.dataset, "__getitems__", None)  # as a DataLoader asks for them
            found = many(samples) if many is not None else [self.dataset[i] for i in samples]  # pyright: ignore
            batch = self._collate(found)
            tree.map_with_path(_check_tensor, batch, root="batch")
        if self.transform is None:
            return batch
        key = random.fold_in(random.key(self.seed), self.data_step(step))
        return self.transform(batch, random.with_part(key, rank))

    def _identity(self) -> dict[str, Any]:
        leaves = tree.leaves(self.arrays) if self.arrays is not None else []
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
    """Whether samples are asked for by number, of an object of its own."""
    able = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return able and not isinstance(value, (list, tuple, dict, torch.Tensor)) and not hasattr(value, "__array__")


def _rows_of(arrays: Any) -> Any:
    """The arrays as tensors on the host, of as many rows each."""
    problems: list[str] = []

    def tensor(path: str, leaf: Any) -> torch.Tensor:
        if isinstance(leaf, torch.Tensor) or hasattr(leaf, "__array__"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore", UserWarning
                    )  # of arrays that are read-only: they are not written to
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
        raise FzeroTypeError(message(_WHERE, "samples are rows of arrays", problems or ["there are no arrays"], fix))
    lengths = {path: len(leaf) for path, leaf in zip(tree.paths(made, "arrays"), tree.leaves(made), strict=True)}
    if len(set(lengths.values())) > 1:
        problems = [f"{path}: {n} rows" for path, n in lengths.items()]
        raise FzeroValueError(message(_WHERE, "arrays have different lengths", problems, "give each one row a sample"))
    return made


def _check_tensor(path: str, leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor):
        fix = "leave it out of the samples, or make a tensor of it by collate="
        raise FzeroTypeError(message("data.batch_at", "batches are of tensors", [f"{path}: {describe(leaf)}"], fix))
