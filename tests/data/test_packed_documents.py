"""Documents packed into rows: nothing is lost, little is padded, and every mesh reads the same batches."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fzero.data import ArrayDataset, pack
from fzero.errors import FzeroTypeError, FzeroValueError


def documents(lengths: list[int]) -> list[list[int]]:
    """Documents of tokens that occur once, so that every token can be found again."""
    ids = iter(range(1, 1 + sum(lengths)))
    return [[next(ids) for _ in range(n)] for n in lengths]


def unpacked(rows: Any) -> list[list[tuple[int, int]]]:
    """The documents of all rows as (token, label) pairs, found by their positions; the padding is left out."""
    out = []
    for i in range(len(rows)):
        for token, position, label in zip(*(x.tolist() for x in rows[i].values()), strict=True):
            if position == 0:
                out.append([])
            out[-1].append((token, label))
    return [d for d in out if d[0][0]]


def test_every_token_is_in_one_row_with_its_document_and_is_a_target_except_the_first() -> None:
    lengths = torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    given = documents(lengths)
    found = unpacked(pack(given, seq=64))
    assert sorted([t for t, _ in d] for d in found) == given
    assert all([label for _, label in d] == [-100, *(t for t, _ in d[1:])] for d in found)


def test_best_fit_leaves_little_padding_and_says_how_much() -> None:
    lengths = torch.randint(1, 60, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = pack(documents(lengths), seq=64)
    assert len(rows) <= math.ceil(1.02 * sum(lengths) / 64)
    padding = sum(int((rows[i]["input_ids"] == 0).sum()) for i in range(len(rows)))
    assert rows.padding == pytest.approx(padding / (64 * len(rows))) and rows.num_split == 0
    most = max(int((rows[i]["position_ids"][rows[i]["input_ids"] > 0] == 0).sum()) for i in range(len(rows)))
    assert rows.documents_per_row == most


def test_a_document_longer_than_a_row_is_split_into_documents() -> None:
    rows = pack(documents([23, 3]), seq=10)
    assert sorted(len(d) for d in unpacked(rows)) == [3, 3, 10, 10] and rows.num_split == 1
    assert sorted(t for d in unpacked(rows) for t, _ in d) == list(range(1, 27))


def test_a_flat_corpus_is_divided_after_each_end_token(tmp_path: Path) -> None:
    """A memory map of uint16, with an empty document, and a last document without its end."""
    flat = [5, 6, 9, 7, 9, 9, 1, 2, 3]
    np.array(flat, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    for tokens in (mapped, torch.tensor(flat)):
        rows = pack(tokens, seq=8, end=9)
        assert sorted([t for t, _ in d] for d in unpacked(rows)) == [[1, 2, 3], [5, 6, 9], [7, 9], [9]]


def test_labels_of_documents_are_kept_and_the_first_is_masked() -> None:
    given = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    assert pack(given, seq=5)[0]["labels"].tolist() == [-100, -100, 3, -100, 5]


def test_masks_of_trl_say_which_tokens_are_targets() -> None:
    ids, completion, assistant = [1, 2, 3, 4, 5], [0, 0, 1, 1, 1], [1, 1, 1, 0, 1]
    for masks, labels in [
        ({"completion_mask": completion}, [-100, -100, 3, 4, 5]),
        ({"assistant_masks": torch.tensor(assistant), "labels": None}, [-100, 2, 3, -100, 5]),
        ({"completion_mask": completion, "assistant_masks": assistant}, [-100, -100, 3, -100, 5]),
        ({"completion_mask": completion, "labels": ids}, [-100, 2, 3, 4, 5]),
    ]:
        for given in (ids, torch.tensor(ids, dtype=torch.uint8)):
            document = {"input_ids": given, **masks, "attention_mask": [1] * 5}
            assert pack([document], seq=5)[0]["labels"].tolist() == labels


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_depend_on_the_step_only(size: int) -> None:
    make = lambda: ArrayDataset(pack(documents([3, 7, 2, 5, 9, 4, 6] * 6), seq=12), batch=4, seed=5)  # noqa: E731
    one, other = make(), make()
    for step in (0, 7):
        whole = one.batch_at(step)
        parts = [other.batch_at(step, rank, size) for rank in range(size)]
        assert all(torch.equal(torch.cat([p[name] for p in parts]), x) for name, x in whole.items())


def test_a_cursor_of_other_documents_is_rejected() -> None:
    given = documents([11] * 8)
    one = ArrayDataset(pack(given, seq=12), batch=4)
    assert one.resume(one.cursor(3)) == 3
    labels = [{"input_ids": x, "labels": [-100] * 11} for x in given]
    for other, seq in ((documents([12] * 8), 12), (given, 13), (given[::-1], 12), (labels, 12)):
        with pytest.raises(FzeroValueError, match="digest: saved with"):
            ArrayDataset(pack(other, seq=seq), batch=4).resume(one.cursor(3))


def test_invalid_documents() -> None:
    with pytest.raises(FzeroValueError, match="seq=0: must be at least 1"):
        pack([[1]], seq=0)
    with pytest.raises(FzeroValueError, match="there are no tokens"):
        pack([[]], seq=4)
    with pytest.raises(FzeroValueError, match=r"documents\[1\]: 2 input_ids, 1 labels"):
        pack([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1]}], seq=4)
    with pytest.raises(FzeroTypeError, match=r"float32\[2\]"):
        pack([[1, 2], [0.5, 0.5]], seq=4)[0]
    with pytest.raises(FzeroValueError, match=r"documents\[1\]: its attention_mask marks padding"):
        pack([{"input_ids": [1]}, {"input_ids": [1, 0], "attention_mask": [1, 0]}], seq=4)
    for columns in ({"input_ids": [[1, 2]]}, {"train": [[1, 2]]}):
        with pytest.raises(FzeroTypeError, match=r"is no sequence of documents\nFix: pass one split"):
            pack(columns, seq=4)
    for flat in (torch.arange(3), [1, 2], [{"text": "a"}]):
        with pytest.raises(FzeroTypeError, match=r"documents\[0\] is .*, not a document\nFix: .*end="):
            pack(flat, seq=4)


def test_documents_of_a_generator_are_rejected() -> None:
    with pytest.raises(FzeroTypeError, match=r"fzero\.data\.pack: .*generator.*\nFix: pass a list"):
        pack(([i] for i in range(3)), seq=4)


def test_rows_are_counted_from_the_end_too() -> None:
    rows = pack([[5, 6, 7], [8, 9, 1]], seq=4)
    assert rows[-1]["input_ids"].tolist() == rows[1]["input_ids"].tolist()
    with pytest.raises(IndexError):
        rows[2]
