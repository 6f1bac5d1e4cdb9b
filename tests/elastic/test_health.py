"""The health of runs (fz.run): which batch comes next, wherever a state comes from."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import staged
import survivor
import torch
from test_run import ended, keepers, logged, plainly

import fzero as fz
from fzero.elastic import health, host, replay
from fzero.elastic.vault import Damage, Vault, held, let_go_of_damaged

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
            state, _ = train(state, data.batch_at(number, **run.place))
            run.keep(state)
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


# --- ranks that are slow ---


def paced(slow: int | None, shared: bool) -> list[Any]:
    """By a clock in which each step takes a rank ten seconds, and the slow one fifteen."""
    clock = [0.0]

    def main(run: Any) -> list[Any]:
        train = fz.compile(survivor.STEP, run.mesh, backend="eager")
        state = run.state(train, survivor.init)
        for number in run.steps(state, 24):
            clock[0] += 15.0 if run.mesh.rank == slow else 10.0
            if run.mesh.rank == slow:
                time.sleep(0.005)  # for which the others wait
            state, _ = train(state, survivor.batch_at(number, **run.place))
        return run.health

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        return fz.run(main, health=fz.Health(stragglers=4), shared_memory=shared)


def of_stages(shared: bool) -> list[Any]:
    """By a clock in which the last stage has twice the work, and the second pipeline's first stage is slow."""
    clock = [0.0]

    def main(run: Any) -> list[Any]:
        at = run.mesh.coordinate
        batch = staged.batch_at(0, at["data"], 2)
        train = fz.compile(staged.step_on(run.mesh), run.mesh, backend="eager", batch=batch)
        state = run.state(train, staged.init)
        for _ in run.steps(state, 24):
            clock[0] += 20.0 if at["pipe"] else 15.0 if at["data"] else 10.0
            state, _ = train(state, batch)
        return run.health

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        return fz.run(main, health=fz.Health(stragglers=4), shared_memory=shared, data=2, pipe=2)


@pytest.mark.full
def test_a_rank_is_compared_with_those_of_its_stage(run_ranks: Any) -> None:
    found = run_ranks(4, of_stages, True)
    assert [finding[:3] for finding in found[0]] == [("straggler", 17, (2,))] and found[1] == found[0], found[0]


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_a_slow_rank_is_named(run_ranks: Any, shared: bool) -> None:
    """On every rank alike; and who waited for it, where that is known."""
    found = run_ranks(3, paced, 1, shared)
    assert found[0] == found[1] == found[2]
    assert [finding[:3] for finding in found[0]] == [("straggler", 17, (1,))], found[0]
    text = found[0][0].text
    assert re.match(r"rank 1 \(.+\) works 1\.\d+ times as long as the median rank, 1\d\S* s a step", text), text
    waited = float(text.rpartition("waited ")[2].partition(" s")[0])
    assert (waited > 0) == shared


# --- memory that changes ---


def test_a_flipped_bit_in_what_was_kept_is_found(tmp_path: Path) -> None:
    """Every bit of a slot: the sums, and leaves of all widths, odd lengths among them."""
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    params = {str(i): torch.arange(1, 2 * i + 4).to(dtype) for i, dtype in enumerate(kinds)}
    state = fz.State(torch.tensor(4), params, {}, fz.random.key(0), {})
    vault = Vault(tmp_path, 0, 1, [0])
    vault.open(state, 0)
    for number in (3, 4):
        vault.keep(state, number)
    assert let_go_of_damaged(tmp_path) == [] and sorted(held(tmp_path)) == [(3, 1), (4, 1)]
    newest = next(tmp_path.glob("of-*/*.1.safetensors"))
    whole, index = newest.read_bytes(), held(tmp_path)[4, 1]
    for name, (part,) in index.parts.items():
        for bit in (0, 8 * index.leaves[name][1].itemsize * part.boxes.numel - 1):
            struck = bytearray(whole)
            struck[part.offset + bit // 8] ^= 1 << bit % 8
            newest.write_bytes(struck)
            assert let_go_of_damaged(tmp_path) == [Damage(0, 4, [name])], (name, bit)
            assert sorted(held(tmp_path)) == [(3, 1)]
    for path in list(newest.parent.iterdir()):  # as if another rank had sent it
        path.with_name(path.name.replace("rank-00000", "ward-00003")).write_bytes(path.read_bytes())
    newest.with_name(newest.name.replace("rank-00000", "ward-00003")).write_bytes(struck)
    assert let_go_of_damaged(tmp_path, 1, 2) == [Damage(3, 4, [name], sent=True)], "the second file of two"
    newest.write_bytes(whole)
    assert let_go_of_damaged(tmp_path) == [] and sorted(held(tmp_path)) == [(3, 1), (4, 1)]


@pytest.mark.full
def test_a_run_goes_on_from_the_state_before_a_damaged_one(tmp_path: Path, run_ranks: Any) -> None:
    """Rank 1 flips a bit of what it kept and dies: all go back one step more, to the numbers of a run without
    faults."""
    calm = tmp_path / "calm"
    calm.mkdir()
    run_ranks(2, plainly, str(calm), 6)
    with keepers(tmp_path, 6, "1.0.5:flip") as both:
        texts = [ended(process) for process in both]
        assert [code for code, _ in texts] == [0, 0], texts
    assert "what rank 1 kept after 5 batches has changed in memory, and is not used: params.w" in texts[0][1]
    assert (tmp_path / "sources-1").read_text().split("\n")[:-1] == ["init 0", "memory 4"]
    assert sorted(set(map(tuple, logged(tmp_path)))) == [*map(tuple, logged(calm))]


# --- steps that are done again ---


def dropping(p: Any, batch: Any, *, key: torch.Tensor) -> torch.Tensor:
    x, y = batch
    hidden = fz.random.dropout(key, torch.tanh(x @ p["w"]), 0.1)
    return torch.nn.functional.cross_entropy(hidden @ p["v"], y)


STEPS = {
    name: transform(fz.train_step(dropping, fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-2))))
    for name, transform in {
        "zero3": fz.shard_params,
        "replicas": fz.data_parallel,
        "micro": fz.compose(fz.accumulate(2), fz.shard_params),
    }.items()
}


def nursed(
    memory: str, step: str, care: fz.Health, fault: str = "", rank: int = 0, at: int = 5, stop: int = 8, **on: Any
) -> Any:
    """A run in which a fault strikes one rank at one batch; what was found, and the state."""
    os.environ.update({host.KEEPER: "1", host.MEMORY: memory})
    Path(memory).mkdir(exist_ok=True)

    def main(run: Any) -> Any:
        train = fz.compile(STEPS[step], run.mesh, backend="eager")
        state = run.state(train, survivor.init)
        for number in run.steps(state, stop):
            batch = tuple(x.clone() for x in survivor.batch_at(number, **run.place))
            here, restore = number == at and run.mesh.rank == rank, None
            if here and fault in ("params", "opt_state"):
                flip(max(fz.tree.leaves(getattr(state, fault)), key=torch.Tensor.numel))
            if number == at and fault == "once":
                built = train.built(state, batch)  # which all ranks do together
                if here:
                    restore = err(built)
            state, _ = run.step(train, state, batch)
            if restore is not None:
                restore()
        found = [(f.kind, f.batch, f.ranks, f.text) for f in run.health]
        return found, [x.clone() for x in fz.tree.leaves(train.gather(state))]

    try:
        return fz.run(main, health=care, **on)
    finally:
        del os.environ[host.KEEPER], os.environ[host.MEMORY]


def flip(x: torch.Tensor) -> None:
    x.view(torch.int32)[3] ^= 1 << 22


def err(built: Any) -> Any:
    """Has what makes this rank's gradients give something else once."""
    lowered, run = built
    lines = [line for line, _ in lowered.program.walk()]
    summed = next((line.args for line in lines if line.op == "reduce_scatter_start"), ())
    name = next(x.fn for x in lines if x.fn and (not summed or {v.name for v in x.out} & {*summed}))
    right, left = run.namespace[name], [1]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if left[0] > 0:
            left[0] -= 1
            largest = max(fz.tree.leaves(out), key=torch.Tensor.numel)
            largest.view(-1)[5] += 0.5
        return out

    run.namespace[name] = wrong
    return lambda: run.namespace.update({name: right})


def nursing(folder: str, cases: Any, shared: bool = True) -> dict[str, Any]:
    return {
        name: nursed(f"{folder}/{name.replace(' ', '-')}", *args, shared_memory=shared, **keywords)
        for name, (args, keywords) in cases.items()
    }


REPLAY = fz.Health(replay=3, stragglers=None)
CASES: dict[str, Any] = {
    "calm": (("zero3", fz.Health()), {}),
    "nothing found": (("zero3", REPLAY), {}),
    "nothing found in micro-batches": (("micro", REPLAY), {"stop": 3}),
    "params": (("zero3", REPLAY, "params", 1), {}),
    "opt_state": (("zero3", REPLAY, "opt_state", 1), {}),
    "once": (("zero3", REPLAY, "once", 2), {}),
    "calm replicas": (("replicas", fz.Health()), {}),
    "params of a replica": (("replicas", REPLAY, "params", 2), {}),
}


@pytest.mark.full
def test_what_strikes_a_step_is_found_and_mended(run_ranks: Any, tmp_path: Path) -> None:
    """Each fault is named with its rank, and the run goes on as if it had not been. Nothing is found where nothing is
    wrong."""
    ranks = run_ranks(3, nursing, str(tmp_path), CASES, timeout=300)
    assert all(rank[name][0] == ranks[0][name][0] for rank in ranks for name in CASES), "found alike on all ranks"
    found = {name: found for name, (found, _) in ranks[0].items()}
    states = {name: state for name, (_, state) in ranks[0].items()}
    quiet = ("calm", "nothing found", "nothing found in micro-batches", "calm replicas")
    assert all(found[name] == [] for name in quiet), [found[name] for name in quiet]

    def same(one: str, other: str) -> bool:
        return all(torch.equal(x, y) for x, y in zip(states[one], states[other], strict=True))

    wanted = {
        "params": (1, r"in what is given to all_gather_start\(.*\); two more runs agree"),
        "opt_state": (1, r"in .*opt_state.*; two more runs agree"),
        "once": (2, r"in what is given to reduce_scatter_start\(.*\); two more runs agree"),
        "params of a replica": (2, r"in what is given to .*; two more runs agree"),
    }
    for name, (rank, words) in wanted.items():
        ((kind, batch, who, text),) = found[name]
        assert (kind, batch, who) == ("replay", 5, (rank,)) and re.search(words, text), (name, found[name])
        assert same(name, "calm replicas" if "replica" in name else "calm"), name


def test_wrong_arguments_and_what_cannot_be_done_again(tmp_path: Path) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum().square(), fz.optim.sgd(0.01))

    def main(run: Any, keeps: bool = True) -> Any:
        train = fz.compile(step, run.mesh, backend="eager")
        state = run.state(train, {"w": torch.ones(2)})
        for _ in run.steps(state, 2):
            state, _ = train(state, torch.ones(2))
            if keeps:
                run.keep(state)
        for _ in run.steps(state, 30):
            state, _ = run.step(train, state, torch.ones(2))

    wrong: Any = {
        r"health=3: must be fz.Health": 3,
        r"(?s)replay=0: must be a whole number.*replicas=0.5": fz.Health(replay=0, replicas=0.5),  # type: ignore[arg-type]
        r"which nothing keeps here: give memory=DIR": fz.Health(replay=3),
    }
    for words, care in wrong.items():
        with pytest.raises(fz.errors.FzeroValueError, match=words):
            fz.run(main, health=care)
    with pytest.raises(fz.errors.FzeroValueError, match=r"every=2: health goes back"):
        fz.run(main, health=fz.Health(replay=2), memory=tmp_path, every=2)
    fz.run(lambda run: main(run, keeps=False), health=fz.Health(replay=3), memory=tmp_path / "a")
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)state before this step was not kept.*after 3 batches"):
        replay.twice(train, train.init({"w": torch.ones(2)}), torch.ones(2), 3, None, [0])
