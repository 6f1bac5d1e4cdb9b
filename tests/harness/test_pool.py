"""The harness itself: results, errors and hangs of real ranks."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from pool import RankError

from fzero.mesh import make_mesh


def _sum_of_ranks(scale: float) -> tuple[int, torch.Tensor]:
    mesh = make_mesh(data=-1)
    total = torch.tensor([scale * (mesh.rank + 1)])
    if mesh.size > 1:
        dist.all_reduce(total, group=mesh.group("data"))
    return mesh.rank, total


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_reduce_and_rank_order(run_ranks, num_ranks):
    results = run_ranks(num_ranks, _sum_of_ranks, 0.5)
    assert [rank for rank, _ in results] == list(range(num_ranks))
    expected = torch.tensor([0.5 * num_ranks * (num_ranks + 1) / 2])
    assert all(torch.equal(total, expected) for _, total in results)


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} | {
        "threads": str(torch.get_num_threads())
    }


def _sets_a_variable() -> str | None:
    found = os.environ.get("FZERO_TEST_OF_POOL")
    os.environ["FZERO_TEST_OF_POOL"] = "set"
    return found


def test_variables_that_a_job_sets_end_with_it(run_ranks):
    assert [run_ranks(2, _sets_a_variable) for _ in range(2)] == [[None, None]] * 2


def test_environment_is_torchruns_and_one_thread(run_ranks):
    expected = [{"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "threads": "1"} for r in "01"]
    assert run_ranks(2, _environment) == expected


def _in_a_group() -> bool:
    make_mesh(data=-1)
    return dist.is_initialized()


def test_one_rank_needs_no_process_group_and_none_is_left_over(run_ranks):
    assert run_ranks(2, _in_a_group) == [True, True]
    assert run_ranks(1, dist.is_initialized) == [False]
    assert run_ranks(1, _in_a_group) == [False]


def _two_axes() -> tuple[dict[str, int], int]:
    mesh = make_mesh(replica=1, data=2)
    total = torch.ones(())
    dist.all_reduce(total, group=mesh.group("data"))
    dist.all_reduce(total, group=mesh.group("replica"))
    return mesh.coordinate, int(total)


def test_mesh_of_two_axes(run_ranks):
    assert run_ranks(2, _two_axes) == [({"replica": 0, "data": 0}, 2), ({"replica": 0, "data": 1}, 2)]


def _send_back(x: torch.Tensor) -> dict:
    x.note = "attributes stay behind"  # type: ignore[attr-defined]
    return {"same": (x, x), "requires_grad": x.requires_grad}


def test_tensors_travel_by_value_and_stay_one(run_ranks):
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T.requires_grad_()
    for back in run_ranks(2, _send_back, x):
        first, second = back["same"]
        assert first is second and not hasattr(first, "note")
        assert first.dtype == x.dtype and first.requires_grad and back["requires_grad"]
        assert torch.equal(first, x)


def _process() -> int:
    return os.getpid()


def test_the_same_processes_run_every_job(run_ranks):
    assert run_ranks(3, _process)[:2] == run_ranks(2, _process)


def _raise_on(bad: tuple[int, ...]) -> str:
    rank = int(os.environ["RANK"])
    if rank in bad:
        print(f"rank {rank} says why")
        raise KeyError(f"leaf-{rank}")
    return f"fine-{rank}"


def test_errors_come_back_from_every_rank(run_ranks):
    with pytest.raises(RankError) as caught:
        run_ranks(3, _raise_on, (0, 2))
    text = str(caught.value)
    assert "_raise_on failed on ranks 0, 2 of 3" in text
    assert "KeyError: 'leaf-0'" in text and "KeyError: 'leaf-2'" in text and 'raise KeyError(f"leaf-{rank}")' in text
    assert "--- rank 1: finished" in text
    assert "rank 2 says why" in text and "rank 1 says why" not in text
    assert [o.type for o in caught.value.ranks] == ["KeyError", None, "KeyError"]


def test_expected_errors_are_returned(run_ranks, pool):
    before = run_ranks(2, _process)
    outcomes = run_ranks(2, _raise_on, (1,), expect_error=True)
    assert [(o.type, o.message, o.result) for o in outcomes] == [(None, "", "fine-0"), ("KeyError", "'leaf-1'", None)]
    assert run_ranks(2, _process) == before, "a rank that raises keeps its process"


def _raise_while_the_other_waits() -> None:
    mesh = make_mesh(data=-1)
    if mesh.rank == 0:
        raise RuntimeError("rank 0 leaves")
    dist.all_reduce(torch.ones(1))


def test_a_rank_left_waiting_ends_soon(run_ranks):
    start = time.monotonic()
    outcomes = None
    try:
        outcomes = run_ranks(2, _raise_while_the_other_waits, expect_error=True)
    except RankError as e:
        outcomes = e.ranks
    assert time.monotonic() - start < 30
    assert outcomes[0].message == "rank 0 leaves" and outcomes[1].type is not None


def _warn() -> None:
    warnings.warn("this must not pass in silence", UserWarning, stacklevel=1)


def test_warnings_are_errors_on_ranks_too(run_ranks):
    assert [o.type for o in run_ranks(2, _warn, expect_error=True)] == ["UserWarning", "UserWarning"]


def _unsendable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error(run_ranks):
    (outcome,) = run_ranks(1, _unsendable, expect_error=True)
    assert outcome.type == "TypeError" and "cannot be sent" in outcome.message


def _sleep_on(rank: int, seconds: float) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(seconds)


@pytest.mark.full
def test_a_hang_is_reported_with_stacks_and_the_pool_recovers(run_ranks):
    before = run_ranks(2, _process)
    with pytest.raises(RankError) as caught:
        run_ranks(2, _sleep_on, 1, 60.0, timeout=5.0)
    text = str(caught.value)
    assert "--- rank 0: finished" in text
    assert "--- rank 1: Timeout: did not finish within 5 s" in text
    assert "in _sleep_on" in text, "the stack names the function that hangs"
    assert [rank for rank, _ in run_ranks(3, _sum_of_ranks, 1.0)] == [0, 1, 2]
    assert not set(run_ranks(2, _process)) & set(before)


def _die_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_reported_and_the_pool_recovers(run_ranks):
    with pytest.raises(RankError) as caught:
        run_ranks(2, _die_on, 1)
    assert "--- rank 1: WorkerDied: the process ended with exit code -9" in str(caught.value)
    assert run_ranks(2, _raise_on, ()) == ["fine-0", "fine-1"]


def test_rank_counts_are_checked(run_ranks):
    with pytest.raises(ValueError) as caught:
        run_ranks(5, _process)
    assert "1 to 4" in str(caught.value)
