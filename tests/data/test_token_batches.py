"""The data of a step is one and the same however it is shared, and reading it ahead changes nothing."""

import gc
import itertools
import json
import threading
import time

import pytest
import torch
from rejections import raises

from fzero.data import TokenDataset, prefetch, python_source, write_tokens
from fzero.data import sample_order as steps_file
from fzero.data.sample_order import _permute, _round_keys, digest
from fzero.errors import FzeroTypeError, FzeroValueError


def corpus(n=1001):
    return torch.arange(n, dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(size):
    data = TokenDataset(corpus(), seq=10, batch=12, seed=3)
    for step in (0, 7, 8, 9, 1000):  # of 100 windows: step 8 crosses into the next epoch
        whole = data.batch_at(step)
        assert whole[0].shape == (12, 10) and whole[0].dtype == whole[1].dtype == torch.int64
        parts = [data.batch_at(step, rank, size) for rank in range(size)]
        for i in range(2):
            assert parts[0][i].is_contiguous()
            assert torch.equal(torch.cat([p[i] for p in parts]), whole[i])


def test_targets_are_the_next_tokens():
    tokens, targets = TokenDataset(corpus(), seq=10, batch=12).batch_at(4)
    assert torch.equal(targets, tokens + 1) and not (tokens[:, 0] % 10).any()


@pytest.mark.parametrize("num_windows", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_every_epoch_visits_every_window_once_in_its_own_order(num_windows):
    data = TokenDataset(corpus(num_windows * 4 + 3), seq=4, batch=1, seed=1)
    assert data.num_windows == num_windows
    epochs = [data.windows(e * num_windows, num_windows) for e in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(num_windows))
    if num_windows >= 16:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert epochs[0] != TokenDataset(corpus(num_windows * 4 + 3), seq=4, batch=1, seed=2).windows(0, num_windows)
    assert (
        data.windows(num_windows // 2, 2 * num_windows)
        == list(itertools.chain(*epochs))[num_windows // 2 :][: 2 * num_windows]
    )


def test_one_epoch_of_batches_covers_the_corpus():
    data = TokenDataset(corpus(), seq=10, batch=10)
    assert data.steps_per_epoch == 10
    seen = torch.cat([data.batch_at(step)[1].flatten() for step in range(10)])
    assert torch.equal(seen.sort().values, torch.arange(1, 1001))


def test_a_batch_larger_than_the_corpus_flows_over_epochs():
    data = TokenDataset(corpus(31), seq=10, batch=8)
    firsts = torch.cat([data.batch_at(step)[0][:, 0] for step in range(3)]).reshape(8, 3)
    assert torch.equal(firsts.sort(dim=1).values, torch.tensor([[0, 10, 20]] * 8))


def test_order_looks_random():
    """Windows neither stay in place, nor keep their neighbours, nor prefer a region: against what chance would do."""
    n = 4000
    order = _permute(torch.arange(n), n, _round_keys(0, 0)).double()
    steps = order.diff().abs()
    assert int((order == torch.arange(n)).sum()) <= 6 and int((steps == 1).sum()) <= 12  # Poisson, means 1 and 2
    assert float(steps.mean()) == pytest.approx(n / 3, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([order, torch.arange(n).double()]))[0, 1])) < 0.08
    firsts = torch.tensor([_permute(torch.tensor([0]), 10, _round_keys(seed, 0)).item() for seed in range(1000)])
    assert int((torch.bincount(firsts.long(), minlength=10) - 100).abs().max()) < 45


def test_same_arguments_same_batches():
    for seed in (0, 5):
        a, b = (TokenDataset(corpus(), seq=8, batch=4, seed=seed) for _ in range(2))
        b.batch_at(77)  # what was asked before does not matter
        assert torch.equal(a.batch_at(9)[0], b.batch_at(9)[0])
    assert not torch.equal(a.batch_at(9)[0], TokenDataset(corpus(), seq=8, batch=4, seed=6).batch_at(9)[0])


def test_order_is_pinned():
    """A run that resumes under a later release must see the same data."""
    assert TokenDataset(corpus(), seq=10, batch=6, seed=11).windows(97, 6) == [23, 50, 76, 72, 92, 64]


def test_skip():
    plain, data = (
        TokenDataset(corpus(), seq=10, batch=4),
        TokenDataset(corpus(), seq=10, batch=4, skip=[(20, 21), (5, 8)]),
    )
    steps = [data.data_step(s) for s in range(19)]
    assert steps == [0, 1, 2, 3, 4, *range(8, 20), 21, 22]
    for step in (4, 5, 18):
        assert torch.equal(data.batch_at(step)[0], plain.batch_at(steps[step])[0])


def test_split_is_disjoint():
    data = TokenDataset(corpus(), seq=10, batch=4, seed=2, skip=[(1, 2)])
    train, validation = data.split(0.1)
    assert (train.num_windows, train.seed, train.skip, validation.skip) == (90, 2, ((1, 2),), ())
    assert validation.num_windows == 9  # its first token is not train's last target
    assert int(train.tokens[-1]) == 900 and int(validation.tokens[0]) == 901 and int(validation.tokens[-1]) == 1000


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64])
def test_a_file_is_the_same_as_a_tensor(tmp_path, dtype):
    tokens = (corpus() * 7919) % min(torch.iinfo(dtype).max + 1, 50_000)
    write_tokens(tmp_path / "tokens.bin", tokens, dtype)
    assert (tmp_path / "tokens.bin").stat().st_size == 1001 * dtype.itemsize and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "tokens.bin").chmod(0o444)
    mapped = TokenDataset(str(tmp_path / "tokens.bin"), seq=16, batch=6, dtype=dtype)
    for a, b in zip(mapped.batch_at(5, 1, 2), TokenDataset(tokens, seq=16, batch=6).batch_at(5, 1, 2), strict=True):
        assert torch.equal(a, b)
    for part in mapped.split(0.2):
        part.batch_at(0)


def test_a_read_only_array_will_do(tmp_path):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(1001, dtype=numpy.uint16)
    array.flags.writeable = False
    assert torch.equal(
        TokenDataset(array, seq=10, batch=4).batch_at(3)[0], TokenDataset(corpus(), seq=10, batch=4).batch_at(3)[0]
    )


def test_python_source():
    text = python_source(limit_bytes=300_000)
    assert text.dtype == torch.uint8 and text.shape == (300_000,)
    assert torch.equal(python_source(limit_bytes=1000), text[:1000])
    assert b"def " in bytes(text.tolist()) and int(text.max()) < 256
    TokenDataset(text, seq=128, batch=4).batch_at(0)


def readers():
    return [t for t in threading.enumerate() if t.name == "fzero-prefetch"]


def test_read_ahead_gives_every_step_in_order():
    data = TokenDataset(corpus(), seq=10, batch=4)
    for depth in (1, 2, 50):
        steps = []
        for step, (tokens, targets) in prefetch(data, 5, 30, rank=1, size=2, depth=depth, device="cpu"):
            steps.append(step)
            assert torch.equal(tokens, data.batch_at(step, 1, 2)[0]) and torch.equal(targets, tokens + 1)
        assert steps == list(range(5, 30))
    assert list(prefetch(data, 3, 3)) == []
    batches = prefetch(data, 0, 1)
    assert [s for s, _ in batches] == [0] and list(batches) == []  # an iterator that is at its end stays there
    assert not readers()


class Source:
    def __init__(self, fail_at=None, error=ValueError):
        self.made, self.fail_at, self.error = 0, fail_at, error

    def batch_at(self, step, rank=0, size=1):
        if step == self.fail_at:
            raise self.error(f"no step {step}")
        self.made += 1
        return {"tokens": torch.full((2,), step), "name": f"step {step}"}


def test_read_ahead_is_ahead_but_not_further_than_its_depth():
    source = Source()
    batches = prefetch(source, 0, depth=3)
    assert next(batches)[0] == 0
    deadline = time.monotonic() + 5
    while source.made < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert source.made == 5  # one taken, three that wait, one in the thread's hands
    batches.close()
    assert not readers() and list(batches) == []
    batches.close()


def test_read_ahead_ends_when_its_consumer_does():
    for step, batch in prefetch(Source(), 0):
        if step == 3:
            assert batch["name"] == "step 3"
            break

    def interrupted():
        with prefetch(Source(), 0) as batches:
            for _ in batches:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    dropped = prefetch(Source(), 0)
    del dropped
    gc.collect()
    for thread in readers():
        thread.join(5)
    assert not readers()


class Slow(Source):
    def batch_at(self, step, rank=0, size=1):
        if step == 1:
            self.began.set()
            time.sleep(0.3)
        return super().batch_at(step, rank, size)

    began = threading.Event()


def test_read_ahead_waits_for_the_batch_under_way():
    """With the iterator, and so with the process, which a thread in the middle of an operation would take along."""
    dropped = prefetch(Slow(), 0)
    assert Slow.began.wait(5) and readers() and dropped._close.atexit
    del dropped
    gc.collect()
    assert not readers()


@pytest.mark.parametrize(
    ("error", "seen"), [(ValueError, ValueError), (StopIteration, RuntimeError), (FzeroValueError, FzeroValueError)]
)
def test_read_ahead_raises_where_the_batch_would_have_come(error, seen):
    batches, steps = prefetch(Source(fail_at=2, error=error), 0), []
    with pytest.raises(seen, match=r"no step 2|StopIteration"):
        for step, _ in batches:
            steps.append(step)
    assert steps == [0, 1] and not readers() and list(batches) == []


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: TokenDataset(corpus(), seq=0, batch=-1), FzeroValueError, "seq=0 is not .*\n.*batch=-1 is not"),
        (lambda: TokenDataset(corpus(), seq=4, batch=1, skip=[(3, 3)]), FzeroValueError, r"\(3, 3\) is not a range"),
        (
            lambda: TokenDataset(corpus(), seq=4, batch=1, skip=[(5, 9), (3, 6)]),
            FzeroValueError,
            r"\(3, 6\) and \(5, 9\) overlap",
        ),
        (
            lambda: TokenDataset(corpus(10), seq=10, batch=1),
            FzeroValueError,
            "10 tokens, a window is seq . 1 = 11\nFix: use at least 11 tokens or seq=9",
        ),
        (lambda: TokenDataset(torch.ones(8), seq=2, batch=1), FzeroTypeError, r"cannot be float32\[8\]"),
        (
            lambda: TokenDataset(torch.ones(8, 2, dtype=torch.int64), seq=2, batch=1),
            FzeroTypeError,
            r"cannot be int64\[8, 2\]",
        ),
        (lambda: TokenDataset({"a": 1}, seq=2, batch=1), FzeroTypeError, "cannot be dict"),
        (lambda: TokenDataset(corpus(), seq=2, batch=1, seed=-1), FzeroValueError, "seed=-1"),
        (lambda: TokenDataset(corpus(), seq=2, batch=1, dtype=torch.int32), FzeroTypeError, "dtype is for files"),
        (
            lambda: TokenDataset("tokens.bin", seq=2, batch=1),
            FzeroTypeError,
            "tokens.bin does not contain .*\nFix: pass the dtype",
        ),
        (
            lambda: TokenDataset("missing.bin", seq=2, batch=1, dtype=torch.uint16),
            FzeroValueError,
            "missing.bin is not a file",
        ),
        (
            lambda: TokenDataset("missing.bin", seq=2, batch=1, dtype=torch.float32),
            FzeroTypeError,
            "stored as torch.float32",
        ),
        (
            lambda: TokenDataset(corpus(), seq=4, batch=8).batch_at(0, 0, 3),
            FzeroValueError,
            "a batch of 8 samples is not divisible by 3 .*\n.* e.g. 9",
        ),
        (
            lambda: TokenDataset(corpus(), seq=4, batch=8).batch_at(-1, 4, 4),
            FzeroValueError,
            "step=-1 .*\n.*rank=4 is not one of 0 to 3",
        ),
        (lambda: TokenDataset(corpus(), seq=4, batch=8).batch_at(0, 0, 0), FzeroValueError, "size=0"),
        (
            lambda: TokenDataset(corpus(), seq=300, batch=8).split(0.01),
            FzeroValueError,
            "fraction=0.01 leaves .*\n.*3 windows",
        ),
        (lambda: TokenDataset(corpus(), seq=4, batch=8).split(1.0), FzeroValueError, "fraction=1.0"),
        (lambda: prefetch(Source(), 0, depth=0), FzeroValueError, "depth=0"),
        (lambda: python_source(limit_bytes=0), FzeroValueError, "limit_bytes=0"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\nFix: " in str(caught.value)


SKIPS = ((), ((3, 5),), ((0, 2), (4, 9)), ((7, 8), (8, 12), (20, 21)))


@pytest.mark.parametrize("skip", SKIPS, ids=str)
def test_a_cursor_leads_to_the_batch_that_is_next(skip):
    data = TokenDataset(corpus(), seq=10, batch=4, seed=3, skip=skip)
    for step in range(25):
        assert data.resume(json.loads(json.dumps(data.cursor(step)))) == step


@pytest.mark.parametrize("skip", SKIPS, ids=str)
def test_what_is_skipped_may_change_between_runs(skip):
    """The next batch is the first not seen that is not to be skipped; a stretch that has been seen does not come again
    when it is skipped no more."""
    before = TokenDataset(corpus(), seq=10, batch=4, seed=3, skip=[(2, 6)])
    after = TokenDataset(corpus(), seq=10, batch=4, seed=3, skip=skip)
    skipped = {i for first, stop in skip for i in range(first, stop)}
    for step in range(20):
        seen_up_to = before.data_step(step)
        wanted = next(i for i in itertools.count(seen_up_to) if i not in skipped)
        assert after.data_step(after.resume(before.cursor(step))) == wanted


def test_a_cursor_of_other_data_is_refused_with_all_differences():
    data = TokenDataset(corpus(), seq=10, batch=12, seed=3)
    other = corpus()
    other[500] += 1
    for changed, said in (
        (TokenDataset(other, seq=10, batch=12, seed=3), ["digest"]),
        (TokenDataset(corpus().long(), seq=10, batch=12, seed=3), ["digest"]),
        (TokenDataset(corpus(), seq=20, batch=6, seed=4), ["seq", "batch", "seed"]),
        (TokenDataset(corpus(900), seq=10, batch=12, seed=3), ["tokens", "digest"]),
    ):
        with pytest.raises(FzeroValueError, match="with different data, or data in a different order") as caught:
            changed.resume(data.cursor(7))
        assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]] == said
    for nothing in (None, {}, 7, {"next": 3}):
        with pytest.raises(FzeroValueError, match="does not say which batch is next\nFix: save one with the state"):
            data.resume(nothing)
    for wrong in ("5", 2.5, -1, None, True, torch.tensor(3)):
        with pytest.raises(FzeroValueError, match="not the number of a batch\nFix: give a cursor"):
            data.resume({**data.cursor(7), "next": wrong})
    for wrong in ("10", torch.tensor([10, 11])):
        with pytest.raises(FzeroValueError, match=r"seq: saved with .*, now 10\n"):
            data.resume({**data.cursor(7), "seq": wrong})


def test_the_digest_of_a_large_corpus_is_of_pieces_from_end_to_end(monkeypatch):
    monkeypatch.setattr(steps_file, "_DIGESTED", (8, 5))
    whole, changed = digest(corpus(40)), set()
    for n in (40, 1001):
        for i in range(n):
            other = corpus(n)
            other[i] += 1
            if digest(other) != digest(corpus(n)):
                changed.add((n, i))
    assert {i for n, i in changed if n == 40} == set(range(40)), "all of a small one"
    found = {i for n, i in changed if n == 1001}
    assert len(found) == 40 and {0, 1000} <= found and len({i // 201 for i in found}) == 5
    assert whole != digest(corpus(41))


def test_write_tokens_refuses_what_does_not_fit(tmp_path):
    path = tmp_path / "tokens.bin"
    with pytest.raises(
        FzeroValueError, match=r"tokens are 0 to 69999, uint16 holds 0 to 65535\nFix: store them as int32 or int64"
    ):
        write_tokens(path, torch.arange(70_000), torch.uint16)
    with pytest.raises(FzeroValueError, match="store them as int16 or int32 or int64"):
        write_tokens(path, torch.tensor([-1, 3]), torch.uint8)
    assert not list(tmp_path.iterdir())
    write_tokens(path, torch.arange(3, dtype=torch.uint8))
    with pytest.raises(FzeroValueError, match="3 bytes are not a positive multiple of uint16 tokens of 2 bytes"):
        TokenDataset(path, seq=2, batch=1, dtype=torch.uint16)


def test_batch_that_the_mesh_does_not_divide() -> None:
    data = TokenDataset(torch.arange(100), seq=4, batch=8)
    raises(FzeroValueError, lambda: data.batch_at(0, rank=1, size=3), "8 samples", "3 ranks", "9")
