"""Exchanges of the control group: what each rank raises if some of them fail, make another call, or leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import fzero as fz
from fzero.comm.collective_sequence import CollectiveSequence
from fzero.comm.control_group import ALONE, all_gather_values, broadcast_from_rank0, run_on_all_ranks
from fzero.errors import CheckpointError, DivergenceError, FzeroValueError


def said(act: Callable[[], Any]) -> str:
    try:
        return repr(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failures() -> dict[str, Any]:
    """What each rank gets of functions that fail on some ranks, and which ranks undo what they have done."""
    mesh = fz.make_mesh(data=-1, timeout=60)
    group, rank, undone = mesh.control, mesh.rank, list[str]()

    def fails(error: Callable[[], Exception], *ranks: int) -> Callable[[], int]:
        def act() -> int:
            if rank in ranks:
                raise error()
            return rank

        return act

    def run(name: str, act: Callable[[], Any], **more: Any) -> str:
        return said(lambda: run_on_all_ranks(group, name, act, lambda: undone.append(name), **more))

    checkpoint: dict[str, Any] = {"what": "cannot save", "failure": CheckpointError}
    found = {
        "own result": run("a", lambda: f"rank {rank}"),
        "one": run("b", fails(lambda: KeyError("lost"), 1)),
        "two": run("c", fails(lambda: FzeroValueError("here", f"wrong on {rank}", fix=f"fix {rank}"), 0, 2)),
        "alike": run("d", fails(lambda: KeyError("all"), 0, 1, 2)),
        "storage": run("e", fails(lambda: OSError(28, "No space left"), 0, 1, 2), **checkpoint),
        "not only storage": run("f", fails(lambda: OSError(28, "x") if rank else ValueError("y"), 0, 1), **checkpoint),
        "cause": run("g", fails(lambda: KeyError("mine"), 1), failure=DivergenceError),
        "values": said(lambda: all_gather_values(group, "h", lambda: {"rank": rank})),
        "long": said(lambda: [len(text) for text in all_gather_values(group, "i", lambda: "ab" * 10**5 * rank)]),
        "first": said(lambda: broadcast_from_rank0(group, "j", lambda: rank + 5)),
    }
    return found | {"undone": "".join(undone)}


def test_an_error_of_one_rank_is_raised_on_all(run_ranks: Any) -> None:
    for rank, found in enumerate(run_ranks(3, failures)):
        assert found["own result"] == f"'rank {rank}'"
        assert found["one"].startswith("FzeroValueError: fzero.b: the work of some ranks failed\n  rank 1: KeyError: ")
        assert "rank 0: fzero.here: wrong on 0\n  rank 2: fzero.here: wrong on 2\nFix: fix 0; fix 2" in found["two"]
        assert found["alike"] == "KeyError: 'all'"
        assert found["storage"].startswith("StorageError: fzero.e: cannot save\n  rank 0: OSError: [Errno 28]")
        assert found["not only storage"].startswith("CheckpointError: fzero.f: cannot save\n  rank 0: ValueError: y")
        assert found["cause"].startswith("KeyError: 'mine'" if rank == 1 else "DivergenceError: fzero.g: "), found
        assert found["values"] == "[{'rank': 0}, {'rank': 1}, {'rank': 2}]" and found["long"] == "[0, 200000, 400000]"
        assert found["first"] == "5" and found["undone"] == "bcdefg"


def partings() -> list[str]:
    """What ranks get that make different calls, and one that is left alone by another that took part before."""
    CollectiveSequence.pause, texts = 0.2, []
    try:
        for _ in range(2):
            mesh = fz.make_mesh(data=-1, timeout=60)
            name = "save" if mesh.rank else "gather"
            texts.append(said(lambda mesh=mesh, name=name: mesh.control.all_gather(1, int, name, f"calls {name}")))
            texts.append(said(lambda mesh=mesh: mesh.control.all_gather(1, int, "later")))
            fz.close_mesh()
        mesh = fz.make_mesh(data=-1, timeout=60)
        texts.append(said(lambda: mesh.control.all_gather(mesh.rank, int, "together")))
        if mesh.rank == 0:
            began = time.monotonic()
            texts.append(said(lambda: mesh.control.all_gather(1, int, "alone")))
            assert time.monotonic() - began < 30
        fz.close_mesh()
    finally:
        CollectiveSequence.pause = 1.0
    return texts


def test_ranks_that_make_different_calls_or_leave_are_named(run_ranks: Any) -> None:
    for rank, texts in enumerate(run_ranks(2, partings, timeout=60)):
        for parted, later in (texts[:2], texts[2:4]):
            assert parted.startswith("DivergenceError: ") and "the ranks make different calls" in parted
            assert "rank 0: calls gather" in parted and "rank 1: calls save" in parted
            assert "a call on this mesh ended in the middle" in later
        assert texts[4] == "[0, 1]"
        if rank == 0:
            assert texts[5].startswith("RankLost: fzero.alone: ") and "rank 1 has left" in texts[5], texts[5]


def test_one_process_exchanges_with_itself() -> None:
    assert fz.make_mesh(device="cpu").control is ALONE
    assert ALONE.all_gather((1, "a"), tuple[int, str]) == [(1, "a")]
    assert run_on_all_ranks(ALONE, "a", lambda: object) is object
    assert said(lambda: run_on_all_ranks(ALONE, "a", lambda: 1 // 0)).startswith("ZeroDivisionError")
