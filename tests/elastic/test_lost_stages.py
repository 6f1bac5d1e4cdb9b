"""Pipelines that lose ranks (fz.run): one that dies in the middle of a step, or with its host. Runs go on with fewer
pipelines, or fewer stages, and grow again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import staged
import torch
from scripts import ROOT
from test_resize import until
from test_run import ended, logged, supervisors

import fzero as fz
from fzero.errors import FzeroValueError, TransformError
from fzero.mesh import AbstractMesh, unjoined

pytestmark = pytest.mark.forks
SCRIPT = ROOT / "tests" / "staged.py"


def plainly(out: str, steps: int) -> int:
    Path(out).mkdir(exist_ok=True)
    return fz.run(lambda run: staged.train(run, Path(out), steps), **staged.AXES)


def sources(out: Path, rank: int) -> list[str]:
    return (out / f"sources-{rank}").read_text().splitlines()


@pytest.mark.full
def test_a_rank_that_dies_in_the_middle_of_a_step(run_ranks: Any, tmp_path: Path) -> None:
    """The last stage of the second pipeline in its third transfer; then the first of the first. All others stay, and
    every step is there once, to the bit."""
    out = tmp_path / "struck"
    out.mkdir()
    run_ranks(4, plainly, str(tmp_path / "calm"), 6)
    with supervisors(out, 6, "3.0.2:3", "0.0.4:6", ranks=4, script=SCRIPT) as started:
        texts = [ended(one) for one in started]
    text = "\n".join(text for _, text in texts)
    assert [code for code, _ in texts] == [0] * 4, text
    assert "rank 3 died of SIGKILL in step 2; it is restarted" in text
    assert logged(out) == logged(tmp_path / "calm")
    for rank in range(4):
        assert sources(out, rank) == [f"{at} data=2, pipe=2" for at in ("init 0", "memory 2", "memory 4")]


@pytest.mark.full
def test_a_lost_host_takes_its_pipeline_along(run_ranks: Any, tmp_path: Path) -> None:
    """Two hosts with a pipeline each. One is lost with its memory: the other goes on with its pipeline, from its shards
    and those that were sent. Then with one stage, then on three ranks, and on two hosts again. Nothing is saved."""
    out, hosts = tmp_path / "struck", {"ranks": 4, "hosts": 2}
    out.mkdir()

    def more(steps: int, **on: int) -> None:
        before = logged(out)[-1][0] if (out / "log").exists() else 0
        with supervisors(out, 1000, script=SCRIPT, env={"STAGED_NAP": "0.2"}, **on) as started:
            until(out, before + steps)
            early = [one for one in started if one.poll() is not None]
            assert not early, early[0].communicate()

    more(3, **hosts)
    shutil.rmtree(out / "memory-1")
    for ranks in (2, 1, 3):
        more(2, ranks=ranks, hosts=1)
    more(2, **hosts)
    first = [line.split(" ", 2) for line in sources(out, 0)]
    assert [source for source, _, _ in first] == ["init"] + ["memory"] * 4
    axes = ["data=2, pipe=2", "data=1, pipe=2", "data=1, pipe=1", "data=3, pipe=1", "data=2, pipe=2"]
    assert [mesh for _, _, mesh in first] == axes
    last = logged(out)[-1][0]
    run_ranks(4, plainly, str(tmp_path / "calm"), last)
    calm = {step: loss for step, loss, _ in logged(tmp_path / "calm")}
    assert {step for step, *_ in logged(out)} == {*calm}
    assert max(abs(loss - calm[step]) for step, loss, _ in logged(out)) < 1e-5


@pytest.mark.full
@pytest.mark.fresh
def test_stages_of_a_lost_host_come_from_a_checkpoint(tmp_path: Path) -> None:
    """Two stages, on two hosts. What the second one had is on disk alone: the other goes on from there, with all
    blocks. Fresh interpreters."""
    env = {"STAGED_ALONE": ""}
    with supervisors(tmp_path, 1000, script=SCRIPT, ranks=2, hosts=2, env=env):
        until(tmp_path, 5)
    before = logged(tmp_path)
    shutil.rmtree(tmp_path / "memory-1")
    with supervisors(tmp_path, before[-1][0] + 3, script=SCRIPT, ranks=1, env=env) as (one,):
        code, text = ended(one)
    assert code == 0 and "returned" in text, text
    assert "no host's memory has the shards of rank 1: the run goes back to" in text
    source, step, mesh = sources(tmp_path, 0)[-1].split(" ", 2)
    assert (source, int(step) % 2, mesh) == ("disk", 0, "data=1, pipe=1")
    again = {step: numbers for step, *numbers in logged(tmp_path)[len(before) :]}
    twice = [(numbers, again[step]) for step, *numbers in before if step in again]
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in twice) and min(again) == int(step) + 1


def moved(path: str) -> list[Any]:
    """A checkpoint of two pipelines of two stages, laid out while it lives for four stages, and for no stages."""
    two, four, none = (fz.make_mesh(**axes) for axes in ({"data": 2, "pipe": 2}, {"data": 1, "pipe": 4}, {"data": 4}))
    plain = fz.shard_params(fz.train_step(staged.loss_fn, fz.optim.adamw(1e-2)))
    made = fz.compose(fz.accumulate(4, schedule="layerwise"), fz.pipeline())(plain)
    batch = lambda mesh: staged.batch_at(0, mesh.index("data"), mesh.axes["data"])  # noqa: E731
    first, then = (fz.compile(made, mesh, backend="eager", batch=batch(mesh)) for mesh in (two, four))
    last = fz.compile(plain, none, backend="eager")
    state, _ = first(first.init(staged.init), batch(two))
    fz.checkpoint.save(path, state)
    before = fz.tree.leaves(first.gather(state))
    states = [fz.reshard(state, then)]
    bad = [] if alike(before, then.gather(states[0])) else ["four stages"]
    states[0], _ = then(states[0], batch(four))
    after = fz.tree.leaves(then.gather(states[0]))
    states[0] = fz.reshard(states[0], last)
    bad += [] if alike(after, last.gather(states[0])) else ["no stages"]
    bad += [] if alike(before, last.gather(last.restore(path, staged.init))) else ["of the checkpoint"]
    states[0] = fz.reshard(states[0], first)
    return bad + ([] if alike(after, first.gather(states[0])) else ["two stages"])


def alike(one: list[torch.Tensor], other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, fz.tree.leaves(other), strict=True))


@pytest.mark.full
def test_a_live_state_is_laid_out_for_other_stages(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(4, moved, str(tmp_path)) == [[]] * 4


def test_what_is_sent_is_of_the_stage() -> None:
    """Each rank sends its shards of the leaves of its stage, and nobody sends the same twice."""
    params = fz.tree.map(lambda x: x.to("meta"), staged.init(fz.random.key(0)))
    step = staged.step_on(AbstractMesh(data=2, pipe=2))  # type: ignore[arg-type]
    lowered = fz.lower(step, AbstractMesh(data=2, pipe=2), params, staged.batch_at(0, 0, 2))
    sent = [
        {leaf for op in program.instructions if op.op == "replicate_start" for leaf in op.attrs.leaves}  # type: ignore[union-attr]
        for program in lowered.programs
    ]
    assert sent[0].isdisjoint(sent[1]) and "params['head']" in sent[1]
    leaves = {x.path for program in lowered.programs for x in program.leaves.values() if "data" in x.layout.axes}
    assert sent[0] | sent[1] == leaves and len(leaves) == 3 * len(fz.tree.leaves(params))
    with pytest.raises(
        TransformError, match="along 'pipe' ranks have different parameters: let redundant name an axis"
    ):
        fz.compose(fz.pipeline(), fz.redundant(axis="pipe"))(fz.train_step(staged.loss_fn, fz.optim.sgd(0.1)))


def test_an_axis_takes_the_first_of_its_sizes_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, Any] = {}
    for world in range(1, 9):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("RANK", "0")
        found[world] = [*staged_axes(data=-1, pipe=(4, 2)).values()] if world % 2 == 0 else None
        assert staged_axes(data=-1, pipe=[4, 2, 1])["pipe"] == {0: 4, 2: 2}.get(world % 4, 1)
    assert {n: sizes for n, sizes in found.items() if sizes} == {2: [1, 2], 4: [1, 4], 6: [3, 2], 8: [2, 4]}
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        FzeroValueError, match=r"(?s)3 processes are not divisible.*4\n.*pipe=4.*the best first: pipe=\(2, 1\)"
    ):
        staged_axes(data=-1, pipe=(4, 2))
    for wrong in ((), (2, 0), (2, "1"), [2.0]):
        with pytest.raises(FzeroValueError, match="a size is a whole number of at least 1"):
            staged_axes(data=-1, pipe=wrong)


def staged_axes(**axes: Any) -> dict[str, int]:
    return unjoined(device="cpu", axes=axes).axes
