"""The health of runs (fz.run): which batch comes next, wherever a state comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import survivor
import torch
from survivor import held
from test_run import ended, logged, plainly, supervisors

import fzero as fz
from fzero.elastic.memory_checkpoint import MemoryCheckpoint
from fzero.elastic.memory_slots import Damage, examine
from fzero.elastic.recovery_source import is_whole

pytestmark = pytest.mark.forks

SCALE = fz.LossScale(initial=2.0**40)


def loss_fn(p: Any, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    return torch.nn.functional.cross_entropy(p["table"][tokens].flatten(0, 1), targets.flatten())


def init(key: torch.Tensor) -> Any:
    return {"table": fz.random.normal(key, (16, 16))}


def text(seed: int = 0) -> fz.data.TokenDataset:
    return fz.data.TokenDataset(torch.arange(400) * 7 % 16, seq=4, batch=4, seed=seed)


# --- which batch is next ---


@pytest.mark.full(keep=["memory"])
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_no_batch_is_seen_twice_where_steps_are_skipped(tmp_path: Path, source: str) -> None:
    """In fp16 the first steps overflow, and are none: the run goes on with the batch after the last that it has seen,
    and the numbers are those of a run that nothing interrupts."""
    step = fz.mixed_precision(fz.train_step(loss_fn, fz.optim.adamw(1e-2)), "fp16", loss_scale=SCALE)
    data, seen = text(), list[int]()

    def main(run: Any, fails: int | None, path: Path) -> Any:
        train = fz.compile(step, run.mesh, backend="eager")
        state = run.state(train, init, fz.random.key(0), path=path, data=data)
        for number in run.steps(state, 40):
            if number == fails:
                raise KeyboardInterrupt
            seen.append(number)
            state, _ = train(state, data.batch_at(number, **run.data_shard))
            run.commit(state)
            if source == "disk" and number % 5 == 0:
                run.save(state, keep=2)
        return [x.clone() for x in fz.tree.leaves(state)], int(state.step), run.source

    calm, steps, _ = fz.run(lambda run: main(run, None, tmp_path / "calm"))
    assert seen == [*range(40)] and 0 < steps < 40
    seen.clear()
    memory: Any = {"memory": tmp_path / "memory"} if source == "memory" else {}
    with pytest.raises(KeyboardInterrupt):
        fz.run(lambda run: main(run, 31, tmp_path / "struck"), **memory)
    found, again, come = fz.run(lambda run: main(run, None, tmp_path / "struck"), **memory)
    assert (seen, again, come) == ([*range(40)], steps, source)
    assert all(torch.equal(x, y) for x, y in zip(found, calm, strict=True))


def test_a_checkpoint_is_of_one_data_set(tmp_path: Path) -> None:
    step = fz.train_step(loss_fn, fz.optim.adamw(1e-2))

    def main(run: Any, data: fz.data.TokenDataset, stop: int) -> int:
        train = fz.compile(step, run.mesh, backend="eager")
        state = run.state(train, init, path=tmp_path, data=data)
        first = next(run.steps(state, stop))
        for number in run.steps(state, stop):
            if number == 2:  # before the step: its batch is not seen
                run.save(state)
            state, _ = train(state, data.batch_at(number))
        return first

    assert fz.run(lambda run: main(run, text(), 4)) == 0
    assert fz.checkpoint.describe(tmp_path).meta["fzero.run"]["seen"] == 2
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)data.resume.*seed: saved with 0, now 1"):
        fz.run(lambda run: main(run, text(1), 4))
    skipping = fz.data.TokenDataset(text().tokens, seq=4, batch=4, skip=[(0, 1)])
    assert fz.run(lambda run: main(run, skipping, 4)) == 1, "the same batch is the second now"


# --- memory that changes ---


def test_a_flipped_bit_in_what_was_kept_is_found(tmp_path: Path) -> None:
    """Every bit of a slot: the sums, and leaves of all widths, odd lengths among them."""
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    params = {str(i): torch.arange(1, 2 * i + 4).to(dtype) for i, dtype in enumerate(kinds)}
    state = fz.State(torch.tensor(4), params, {}, fz.random.key(0), {})
    memory_checkpoint = MemoryCheckpoint(tmp_path, 0, 1, [0], state, 0)
    for number in (3, 4):
        memory_checkpoint.keep(state, number)
    assert examine(tmp_path).damaged == [] and sorted(held(tmp_path)) == [(3, 1), (4, 1)]
    newest = next(tmp_path.glob("of-*/*.1.safetensors"))
    whole, index = newest.read_bytes(), held(tmp_path)[4, 1]
    for name, (part,) in index.parts.items():
        for bit in (0, 8 * index.leaves[name][1].itemsize * part.boxes.numel - 1):
            struck = bytearray(whole)
            struck[part.offset + bit // 8] ^= 1 << bit % 8
            newest.write_bytes(struck)
            assert examine(tmp_path).damaged == [Damage(0, 4, [name])], (name, bit)
            assert sorted(held(tmp_path)) == [(3, 1)]
    for path in list(newest.parent.iterdir()):  # as if another rank had sent it
        path.with_name(path.name.replace("rank-00000", "replica-00003")).write_bytes(path.read_bytes())
    newest.with_name(newest.name.replace("rank-00000", "replica-00003")).write_bytes(struck)
    assert examine(tmp_path, 1, 2).damaged == [Damage(3, 4, [name], sent=True)], "the second file of two"
    newest.write_bytes(whole)
    assert examine(tmp_path).damaged == [] and sorted(held(tmp_path)) == [(3, 1), (4, 1)]


def test_a_flipped_bit_of_what_describes_a_slot_is_found(tmp_path: Path) -> None:
    """The number of batches, by which shards of different ranks are put together, and the JSON file, which says where
    the elements belong."""
    state = fz.State(torch.tensor(4), {"w": torch.ones(8), "v": torch.ones(3)}, {}, fz.random.key(0), {})
    memory_checkpoint = MemoryCheckpoint(tmp_path, 0, 1, [0], state, 0)
    for bit in range(63):
        for number in (3, 4):
            memory_checkpoint.keep(state, number)
        memory_checkpoint._slots.sealed[1] ^= 1 << bit
        assert examine(tmp_path).damaged == [Damage(0, -1, ["sealed"])], bit
        assert sorted(held(tmp_path)) == [(3, 1)], bit
    (note,) = tmp_path.glob("of-*/*.json")
    text = note.read_text()
    digits = [at for at, character in enumerate(text) if character.isdigit()]
    assert len(digits) > 50
    for at in digits:
        note.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        assert examine(tmp_path).stored == [] and note.name in examine(tmp_path).problems[0]


def test_damaged_files_of_one_rank_leave_those_of_the_others(tmp_path: Path) -> None:
    state = fz.State(torch.tensor(4), {"w": torch.ones(8), "v": torch.ones(6)}, {}, fz.random.key(0), {})
    for rank in range(2):
        memory_checkpoint = MemoryCheckpoint(tmp_path, rank, 2, [0, 1], state, 0)
        memory_checkpoint.keep(state, 4)
    assert is_whole(held(tmp_path)[4, 2])
    (tmp_path / "of-00002" / "rank-00001.json").write_text("{")
    (problem,) = examine(tmp_path).problems
    assert "rank-00001.json" in problem and not is_whole(held(tmp_path)[4, 2])
    assert {part.file for parts in held(tmp_path)[4, 2].parts.values() for part in parts} == {
        "rank-00000.0.safetensors"
    }


@pytest.mark.full
def test_a_run_goes_on_from_the_state_before_a_damaged_one(tmp_path: Path, run_ranks: Any) -> None:
    """Rank 1 flips a bit of what it kept and dies: all go back one step more, to the numbers of a run without
    faults."""
    calm = tmp_path / "calm"
    calm.mkdir()
    run_ranks(2, plainly, str(calm), 6)
    with supervisors(tmp_path, 6, "1.0.5:flip") as both:
        texts = [ended(process) for process in both]
        assert [code for code, _ in texts] == [0, 0], texts
    assert "what rank 1 kept after 5 batches has changed in memory, and is not used: params.w" in texts[0][1]
    assert (tmp_path / "sources-1").read_text().split("\n")[:-1] == ["init 0", "memory 4"]
    assert sorted(set(map(tuple, logged(tmp_path)))) == [*map(tuple, logged(calm))]


# --- values that ranks hold in common ---


def drifting(replicas: int | None) -> str:
    """Two replicas, of which rank 1 has another parameter from batch 3 on; what the run ends with."""
    seen = []

    def main(run: Any) -> None:
        step = fz.data_parallel(fz.train_step(survivor.loss_fn, fz.optim.adamw(1e-2)))
        train = fz.compile(step, run.mesh, backend="eager")
        state = run.state(train, survivor.init)
        for number in run.steps(state, 6):
            state, _ = train(state, survivor.batch_at(number, **run.data_shard))
            if number == 3 and run.mesh.rank == 1:
                state.params["w"].view(-1)[0] += 1
            run.commit(state)
            seen.append(number)

    try:
        fz.run(main, health=fz.Health(check_replicas_every=replicas))
    except fz.errors.DivergenceError as error:
        return f"{seen[-1]}: {error}"
    return "whole"


@pytest.mark.parametrize("replicas", [5, None])
def test_a_replica_that_has_drifted_is_named_when_it_is_kept(run_ranks: Any, replicas: int | None) -> None:
    zero, one = run_ranks(2, drifting, replicas)
    assert zero == one and (
        re.search(r"(?s)^3: .*params\['w'\]: not the same on rank 1", zero) if replicas else zero == "whole"
    ), zero


def test_wrong_health() -> None:
    for words, care in {
        "health=3: must be fz.Health": 3,
        r"check_replicas_every=0\.5": fz.Health(check_replicas_every=0.5),
    }.items():  # type: ignore[arg-type]
        with pytest.raises(fz.errors.FzeroValueError, match=words):
            fz.run(lambda run: None, health=care)  # type: ignore[arg-type]
