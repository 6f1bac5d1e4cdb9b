"""Checkpoints at regular intervals: when a save is due, what a restart continues from, and a save that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import checkpoint
from fzero.checkpoint import CheckpointManager, checkpoint_manager, run_record
from fzero.errors import CheckpointError, FzeroTypeError, FzeroValueError, StorageError

STEP = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
ONES = torch.ones(2)


def compiled() -> Any:
    return fz.compile(STEP, fz.make_mesh(data=1), backend="eager")


def steps_in(root: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in root.glob("step-*"))


def loop(saves: CheckpointManager, stop: int) -> Any:
    train = compiled()
    state = saves.restore(train, {"w": torch.ones(2)})
    for _ in range(saves.seen, stop):
        state, _ = train(state, ONES)
        saves.step(state)
    return state


@pytest.mark.parametrize("wait", [True, False])
def test_a_loop_that_saves_at_intervals_and_continues(tmp_path: Path, wait: bool) -> None:
    with CheckpointManager(tmp_path, every=3, keep=2, meta={"by": "me"}, wait=wait) as saves:
        loop(saves, 10)
        assert saves.seen == 10
    assert steps_in(tmp_path) == [9, 10]
    assert checkpoint.describe(tmp_path).meta == {"by": "me", "fzero.run": {"seen": 10}}
    with CheckpointManager(tmp_path, every=3, keep=2) as saves:
        state = loop(saves, 13)
    assert int(state.step) == 13 and steps_in(tmp_path) == [12, 13]
    with CheckpointManager(tmp_path, every=1, keep=2) as saves:
        loop(saves, 13)
    assert steps_in(tmp_path) == [12, 13], "nothing was left to train, so nothing is saved"


def test_a_run_that_is_started_again_after_latest_was_deleted_is_the_same_run(tmp_path: Path) -> None:
    """Its earlier checkpoints count for `keep`, also for saves without a manager."""
    with CheckpointManager(tmp_path, every=1, keep=3) as saves:
        loop(saves, 3)
    run = checkpoint.describe(tmp_path).run
    (tmp_path / "latest").unlink()
    with CheckpointManager(tmp_path, every=1, keep=3) as saves:
        state = loop(saves, 5)
    assert steps_in(tmp_path) == [3, 4, 5] and checkpoint.describe(tmp_path).run == run
    (tmp_path / "latest").unlink()
    run_record._runs.clear()  # as in another process
    checkpoint.save(tmp_path, state._replace(step=state.step + 1), keep=3)
    assert steps_in(tmp_path) == [4, 5, 6] and checkpoint.describe(tmp_path).run == run


@pytest.mark.parametrize("restored", [False, True])
def test_two_runs_in_lockstep_in_one_directory(tmp_path: Path, restored: bool) -> None:
    """Both begin from scratch, or both from the same checkpoint. The one that saves second is rejected."""
    if restored:
        with CheckpointManager(tmp_path, every=1) as saves:
            loop(saves, 1)
    train = compiled()
    first, second = (CheckpointManager(tmp_path, every=1) for _ in range(2))
    states = [saves.restore(train, {"w": torch.ones(2)}) for saves in (first, second)]
    ours, _ = train(states[0], ONES)
    first.step(ours)
    index = checkpoint.describe(tmp_path)
    said = rf"{index.directory.name} was saved by the run {index.run}\nFix: give each run a directory of its own"
    with pytest.raises(CheckpointError, match=said):
        second.step(train(states[1], 3 * ONES)[0])
    assert checkpoint.verify(tmp_path) == index
    first.step(train(ours, ONES)[0])
    assert steps_in(tmp_path)[-1] == index.step + 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_after_an_exception_nothing_more_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path, every=2) as saves:
        loop(saves, 3)
        1 / 0  # noqa: B018
    assert steps_in(tmp_path) == [2]


def test_minutes_by_the_clock_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], list[float]()
    monkeypatch.setattr(checkpoint_manager, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    real = checkpoint_manager.control_group.broadcast_from_rank0

    def broadcast(*args: Any) -> Any:
        asked.append(clock[0])
        return real(*args)

    monkeypatch.setattr(checkpoint_manager.control_group, "broadcast_from_rank0", broadcast)
    train, saves = compiled(), CheckpointManager(tmp_path, minutes=10)
    state = saves.restore(train, {"w": torch.ones(2)})
    saved = []
    for _ in range(1000):
        clock[0] += 2.0
        state, _ = train(state, ONES)
        saves.step(state)
        if saves.saved == saves.seen:
            saved.append(clock[0])
    assert saved == [600.0, 1200.0, 1800.0] == [2.0 * s for s in steps_in(tmp_path)]
    assert len(asked) < 40, "ranks exchange the clock a few times between two saves"


def test_steps_that_are_skipped_have_seen_their_batch(tmp_path: Path) -> None:
    data = fz.data.TokenDataset(torch.arange(1001) % 7, seq=10, batch=4)
    train, saves = compiled(), CheckpointManager(tmp_path, every=2, data=data)
    state = saves.restore(train, {"w": torch.ones(2)})
    for _ in range(4):
        saves.step(state)  # its number of steps stays the same
    assert steps_in(tmp_path) == [0]
    again = CheckpointManager(tmp_path, data=data)
    again.restore(train, {"w": torch.ones(2)})
    assert again.seen == again.saved == 4
    other = CheckpointManager(tmp_path, data=fz.data.TokenDataset(torch.arange(1001) % 7, seq=20, batch=4))
    with pytest.raises(FzeroValueError, match="seq: saved with 10, now 20"):
        other.restore(train, {"w": torch.ones(2)})


def test_a_checkpoint_of_a_script_that_saved_its_cursor_itself(tmp_path: Path) -> None:
    data = fz.data.TokenDataset(torch.arange(1001) % 7, seq=10, batch=4)
    train = compiled()
    checkpoint.save(tmp_path, train.init({"w": torch.ones(2)}), meta={"data": data.cursor(5)})
    saves = CheckpointManager(tmp_path, data=data)
    saves.restore(train, {"w": torch.ones(2)})
    assert saves.seen == 5


def test_a_full_disk_is_a_warning_until_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise StorageError("checkpoint.save", "no space is left")

    saves, real = CheckpointManager(tmp_path, every=2), checkpoint_manager.save_as
    monkeypatch.setattr(checkpoint_manager, "save_as", full)
    state = loop(saves, 5)
    assert caplog.text.count("the run continues without this checkpoint") == 2 and not steps_in(tmp_path)
    with pytest.raises(CheckpointError, match="no space is left"):
        saves.close()
    monkeypatch.setattr(checkpoint_manager, "save_as", real)
    saves.close()
    assert steps_in(tmp_path) == [5] == [int(state.step)]


def test_a_run_saves_when_it_commits(tmp_path: Path) -> None:
    sources = []

    def main(run: Any) -> None:
        train = fz.compile(STEP, run.mesh, backend="eager")
        state = run.state(train, {"w": torch.ones(2)}, path=CheckpointManager(tmp_path, every=2, keep=2))
        sources.append((run.source, int(state.step)))
        for index in run.steps(state, 7 + 2 * len(sources)):
            state, _ = train(state, ONES)
            run.commit(state)
            run.commit(state)  # once more: it is saved once
            if index == 6:
                run.save(state)

    fz.run(main)
    assert steps_in(tmp_path) == [7, 8]
    fz.run(main)
    assert sources == [("init", 0), ("disk", 8)] and steps_in(tmp_path) == [8, 10]


def two_ranks(path: str) -> tuple[int, list[int]]:
    """Rank 1 has another clock: it would save at once."""
    mesh = fz.make_mesh(device="cpu")
    train = fz.compile(fz.shard_params(STEP), mesh, backend="eager")
    saves = CheckpointManager(path, minutes=1e6 if mesh.rank == 0 else 1e-9, every=4, keep=2)
    state = saves.restore(train, {"w": torch.ones(2)})
    for _ in range(saves.seen, saves.seen + 5):
        state, _ = train(state, ONES)
        saves.step(state)
    saves.close()
    return saves.seen, steps_in(Path(path))


def test_ranks_decide_together(tmp_path: Path, run_ranks: Any) -> None:
    assert run_ranks(2, two_ranks, str(tmp_path)) == [(5, [4, 5])] * 2
    assert run_ranks(2, two_ranks, str(tmp_path)) == [(10, [8, 10])] * 2


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(FzeroValueError) as error:
        CheckpointManager(tmp_path, every=0, minutes=-1, keep=True, data=[1], meta={"fzero.run": 1})  # type: ignore
    for words in ("every=0", "minutes=-1", "keep=True", "data=[1]", "meta['fzero.run']", "Fix: "):
        assert words in str(error.value)
    with pytest.raises(FzeroValueError, match="state=None: must be the run's"):
        CheckpointManager(tmp_path).save(None)  # type: ignore[arg-type]

    def both(run: Any) -> None:
        train = fz.compile(STEP, run.mesh, backend="eager")
        run.state(train, {"w": torch.ones(2)}, path=CheckpointManager(tmp_path), private=True)

    with pytest.raises(FzeroValueError, match="are arguments of the CheckpointManager"):
        fz.run(both)


def test_what_cannot_be_restored_says_what_to_do(tmp_path: Path) -> None:
    train, manager = compiled(), CheckpointManager(tmp_path)
    with pytest.raises(FzeroTypeError, match=r"None is not a compiled training step\nFix: train = fz.compile"):
        manager.restore(None)  # type: ignore[arg-type]
    evaluate = fz.compile(fz.eval_step(lambda p, x: {"y": p["w"] * x}), fz.make_mesh(data=1), backend="eager")
    with pytest.raises(FzeroTypeError, match="is not a compiled training step"):
        manager.restore(evaluate, {"w": torch.ones(2)})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"nothing has been saved in .* yet\nFix: give parameters"):
        manager.restore(train)
    loop(CheckpointManager(tmp_path / "other", every=1), 1)
    for params in (3, {"w": 3}):
        with pytest.raises(FzeroTypeError, match=r"restore: parameters are tensors\n.*: int"):
            CheckpointManager(tmp_path / "other").restore(train, params)
    (tmp_path / "latest").write_text("step-00000004")  # as if all checkpoints had been deleted
    with pytest.raises(CheckpointError, match=r"complete: none\nFix: to start again, delete that file"):
        manager.restore(train, {"w": torch.ones(2)})
