"""Packs documents of different lengths into rows of one length, in which every document stays by itself."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from fzero._utils.arguments import count, python_numbers
from fzero.data.tokens import as_tensor
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.tree import describe

IGNORED = -100
"""Label of a position that is no target, as in torch's `cross_entropy`."""
_MASKS = ("completion_mask", "assistant_masks")


def pack(documents: Any, *, seq: int, end: int | None = None) -> PackedDocuments:
    """Packs documents into rows of `seq` tokens, with little padding. The rows are a map-style dataset: for
    `fz.data.ArrayDataset`, which makes batches that are a pure function of the step, or for a `DataLoader`.

    Documents are placed in the order of decreasing length, each into the row with the least free space that is
    sufficient (best-fit decreasing). A document that is longer than a row is split, and its pieces become separate
    documents. The packing depends only on the lengths of the documents, so it is the same on every mesh and in every
    epoch.

    Args:
        documents: a sequence of documents, each a 1-D sequence of tokens, or a mapping with `input_ids` and
            optionally `labels`; columns and datasets of the library `datasets` are such sequences. Without `labels`,
            tokens whose `completion_mask` or `assistant_masks` (as TRL names them) is 0 are no targets. With `end`,
            one 1-D integer tensor or array, for example a memory map.
        seq: number of tokens in a row.
        end: the token that ends each document, and belongs to it.

    Memory: 32 bytes per document, and the documents as they are given. Packing reads every document once and takes
        about 2 µs for each.

    Returns:
        The rows. A row is a dict of int64[seq] with the arguments of a model of transformers: `input_ids` (padded
        with 0), `position_ids` (begin at 0 in each document and in the padding), and `labels`, which are -100 in the
        padding and at the first token of each document, because nothing of its own document predicts it.

    Raises:
        FzeroValueError: there are no tokens, `seq` is not an integer of at least 1, `labels` or a mask have another
            length than `input_ids`, or an `attention_mask` marks padding.
        FzeroTypeError: documents that cannot be indexed, or are not a sequence of documents; tokens that are not
            integers, with `end` at once, otherwise when their row is read.

    Example:
        >>> import fzero as fz
        >>> rows = pack([[5, 6, 7], [8, 9], [1, 2, 3, 4]], seq=5)
        >>> rows
        PackedDocuments(3 documents in 2 rows of 5 tokens, 10.0% padding, 0 documents split)
        >>> [x.tolist() for x in rows[1].values()]
        [[5, 6, 7, 8, 9], [0, 1, 2, 0, 1], [-100, 6, 7, -100, 9]]
        >>> batch = fz.data.ArrayDataset(rows, batch=2).batch_at(0)
        >>> batch["input_ids"].shape
        torch.Size([2, 5])
    """
    seq, end = python_numbers((seq, end))  # documents may be a long list
    if problems := count("seq", seq):
        raise FzeroValueError("data.pack", "cannot make rows", problems, "e.g. seq=2048")
    if not hasattr(documents, "__getitem__") or not hasattr(documents, "__len__"):
        what = f"documents of a row are read when it is needed, which a {type(documents).__name__} does not allow"
        raise FzeroTypeError("data.pack", what, fix="pass a list, a column of a data set, or one array with end=")
    if isinstance(documents, Mapping):
        what = f"a dict of {', '.join(map(repr, documents))} is no sequence of documents"
        fix = "pass one split, pack(data['train'], ...), or the lists of a tokenizer, pack(tokenized['input_ids'], ...)"
        raise FzeroTypeError("data.pack", what, fix=fix)
    if end is None:
        return PackedDocuments(documents, None, _lengths(documents), seq)
    tokens = as_tensor(documents, None)
    # In parts, because a memory map may be larger than the memory.
    found = [(part.to(torch.int64) == end).nonzero()[:, 0] + (i << 24) for i, part in enumerate(tokens.split(1 << 24))]
    stops = torch.cat([*found, torch.tensor([len(tokens) - 1])]).unique() + 1
    return PackedDocuments(tokens, stops, stops.diff(prepend=torch.zeros(1, dtype=torch.int64)), seq)


class PackedDocuments(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of packed documents. Made by `pack`.

    Attributes:
        num_documents, num_split: the number of documents, and of those that are longer than a row.
        padding: fraction of the rows' tokens that is padding.
        documents_per_row: the largest number of documents in a row, pieces of split ones included.
        pieces: int64[pieces, 4], the row, document, first token in the document, and size of each piece.

    Example:
        >>> rows = pack([[5, 6, 7], [8, 9, 1]], seq=4)
        >>> len(rows), rows.num_documents, rows.padding, rows.documents_per_row
        (2, 2, 0.25, 1)
        >>> rows[-1]["input_ids"].tolist()
        [8, 9, 1, 0]
    """

    def __init__(self, documents: Any, stops: torch.Tensor | None, lengths: torch.Tensor, seq: int):
        if not int(lengths.sum()):
            raise FzeroValueError("data.pack", "there are no tokens", fix="give at least one document with a token")
        self._documents, self._stops, self.seq = documents, stops, seq
        self.num_documents, self.num_split = len(lengths), int((lengths > seq).sum())
        of_each = (lengths + seq - 1) // seq
        document = torch.arange(len(lengths)).repeat_interleave(of_each)
        first = (torch.arange(len(document)) - (of_each.cumsum(0) - of_each)[document]) * seq
        size = (lengths[document] - first).clamp(max=seq)
        row = _best_fit(size, seq)
        # Stable, so that the pieces of a row are in the order of the documents.
        self.pieces = torch.stack([row, document, first, size], 1)[row.argsort(stable=True)]
        per_row = self.pieces[:, 0].bincount()
        self._starts = torch.cat([torch.zeros(1, dtype=torch.int64), per_row.cumsum(0)]).tolist()
        self.documents_per_row = int(per_row.max())
        self.padding = 1 - int(lengths.sum()) / (len(self) * seq)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def identity(self) -> list[torch.Tensor]:
        """Returns tensors that identify the rows: the places of all documents, and 64 evenly spaced rows."""
        rows = [self[i * (len(self) - 1) // 63] for i in range(64)]
        return [self.pieces, *(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))]

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        row = range(len(self))[operator.index(row)]
        ids, labels = torch.zeros(self.seq, dtype=torch.int64), torch.full((self.seq,), IGNORED)
        positions, at = torch.zeros(self.seq, dtype=torch.int64), 0
        for _, document, first, size in self.pieces[self._starts[row] : self._starts[row + 1]].tolist():
            tokens, targets = self._document(document, first, first + size)
            ids[at : at + size] = tokens
            labels[at + 1 : at + size] = targets[1:]
            positions[at : at + size] = torch.arange(size)
            at += size
        positions[at:] = torch.arange(self.seq - at)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    def _document(self, document: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stops is not None:
            start = int(self._stops[document - 1]) if document else 0
            tokens = self._documents[start + first : start + stop].to(torch.int64)
            return tokens, tokens
        given = self._documents[document]
        if not isinstance(given, Mapping):
            given = {"input_ids": given}
        tokens = as_tensor(given["input_ids"][first:stop], None)
        if given.get("labels") is not None:
            return tokens, as_tensor(given["labels"][first:stop], None)
        targets = tokens.to(torch.int64)  # the stored dtype may not have -100
        for name in _MASKS:
            if given.get(name) is not None:
                targets = targets.where(torch.as_tensor(given[name][first:stop]) != 0, IGNORED)
        return tokens, targets

    def __repr__(self) -> str:
        return (
            f"PackedDocuments({self.num_documents} documents in {len(self)} rows of {self.seq} tokens, "
            f"{self.padding:.1%} padding, {self.num_split} documents split)"
        )


def _lengths(documents: Any) -> torch.Tensor:
    """Returns the number of tokens of each document: int64[documents]."""
    sizes = []
    problems = []
    for i, document in enumerate(documents):
        given = document if isinstance(document, Mapping) else {"input_ids": document}
        tokens: Any = given.get("input_ids")
        if not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0:
            what = f"documents[{i}] is {describe(document)}, not a document"
            fix = "pass a list of lists of tokens, rows with input_ids, or all tokens in one array with end="
            raise FzeroTypeError("data.pack", what, fix=fix)
        sizes.append(len(tokens))
        for name in ("labels", "attention_mask", *_MASKS):
            if given.get(name) is not None and len(given[name]) != sizes[-1]:
                problems.append(f"documents[{i}]: {sizes[-1]} input_ids, {len(given[name])} {name}")
        if given.get("attention_mask") is not None and 0 in given["attention_mask"]:
            problems.append(f"documents[{i}]: its attention_mask marks padding")
    if problems:
        problems = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
        fix = "tokenize without padding; give each token a label, -100 where the token is no target"
        raise FzeroValueError("data.pack", "documents do not fit their labels or masks", problems, fix)
    return torch.tensor(sizes, dtype=torch.int64)


def _best_fit(sizes: torch.Tensor, capacity: int) -> torch.Tensor:
    """Returns the row of each piece: int64[pieces]."""
    rows, num_rows = torch.empty_like(sizes), 0
    with_space: dict[int, list[int]] = defaultdict(list)  # rows by their number of free tokens
    spaces: list[int] = []  # the keys of `with_space` that have rows, in increasing order
    order = sizes.argsort(descending=True, stable=True)
    placed: list[int] = []
    for size in sizes[order].tolist():
        at = bisect_left(spaces, size)
        if at == len(spaces):
            row, space, num_rows = num_rows, capacity, num_rows + 1
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[at]
        placed.append(row)
        if left := space - size:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(row)
    rows[order] = torch.tensor(placed)
    return rows
