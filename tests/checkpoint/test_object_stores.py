"""Checkpoints behind URLs: as on a filesystem, whatever a store does, and wherever a save stops."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from objects import Gone, Objects
from test_checkpoints import (
    State,
    as_ranks,
    meshes,
    on_rank,
    raises,
    read_whole,
    same,
    save_as,
    whole_leaves,
    whole_state,
)

import fzero as fz
from fzero import checkpoint, optim
from fzero.checkpoint import run_record, saving, storage
from fzero.checkpoint.storage_paths import Url, as_path
from fzero.comm.control_group import world
from fzero.errors import CheckpointError, StorageError
from fzero.sharding.layout import Layout, Leaf

RUN = "objects://bucket/run"


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    Objects.reset()
    memory = fsspec.filesystem("memory")  # of the process: the examples of the pages write there too
    memory.store.clear(), memory.pseudo_dirs.clear()
    yield
    Objects.reset()


def saved(root: Any, step: int, seed: int | None = None, ranks: int = 2) -> list[Any]:
    """What each of two ranks got of a save."""
    mesh, whole = meshes(data=ranks), whole_state(step, step if seed is None else seed)
    return as_ranks(ranks, lambda r: save_as(r, root, on_rank(whole, mesh[r.rank], ("data",))))


def holds(root: Any, step: int, seed: int | None = None) -> bool:
    want, found = whole_leaves(whole_state(step, step if seed is None else seed)), read_whole(root)
    return checkpoint.verify(root).step == step and all(same(want[n], x) for n, x in found.items())


@pytest.mark.parametrize("root", ["memory://bucket/run", RUN, "file"])
def test_it_is_what_a_directory_is(root: str, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/run" if root == "file" else root
    assert checkpoint.find(root) is None
    raises(lambda: checkpoint.latest(root), "run does not exist")
    for step in (3, 4, 5):
        done = saved(root, step, ranks=3)
        assert [str(d) for d in done] == [str(as_path(root) / f"step-{step:08d}")] * 3, done
    assert (
        holds(root, 5)
        and checkpoint.find(root) == checkpoint.latest(root) == done[0]
        and done[0].name == "step-00000005"
    )
    assert holds(f"{root}/step-00000003/", 3)
    mesh = meshes(data=2)[1]
    wanted = {"params.embed": Leaf("params['embed']", "params", (7, 5), Layout(torch.float32, ("data",)))}
    assert same(
        checkpoint.read(root, wanted, mesh)["params.embed"].reshape(-1)[:17],
        whole_state(5, 5).params["embed"].reshape(-1)[18:],
    )
    state = State(torch.tensor(6), {"a": torch.ones(3)})
    assert checkpoint.save(root, state, keep=2, meta={"lr": 1}).name == "step-00000006"
    assert checkpoint.describe(root).meta == {"lr": 1}
    names = ["latest", *(f"step-{step:08d}" for step in (3, 4, 5, 6))]  # `keep` leaves those of the other model
    assert sorted(storage.storage_of(as_path(root)).names(as_path(root))) == names
    behind = checkpoint.save(root, State(torch.tensor(7), {"a": torch.full((3,), 7.0)}), keep=1, wait=False)
    assert behind.wait() == checkpoint.latest(root) == as_path(root) / "step-00000007"
    assert read_whole(root)["params.a"].tolist() == [7.0] * 3
    raises(lambda: read_whole(f"{root}/step-00000006"), "step-00000006", "does not exist")
    assert holds(f"{root}/step-00000005", 5)


class Stop:
    """From the `number`th act on that changes something, a store is out of reach, as for processes that were killed."""

    def __init__(self, number: int):
        self.left, self.came = number, False

    def __call__(self, act: str, path: str) -> Exception | None:
        if act in ("put", "part", "delete", "abort"):
            self.left -= 1
            self.came |= self.left < 0
        return Gone("killed") if self.came else None


@pytest.mark.full
def test_a_save_that_stops_anywhere_is_no_checkpoint() -> None:
    before = dict(Objects.store)
    # the first of a run, another one, and one in another's place: what was there, and what is saved, as (step, seed)
    for had, new in ((None, (1, 1)), ((1, 1), (2, 2)), ((2, 2), (2, 20))):
        for number in range(40):
            Objects.store, Objects.calls = dict(before), []
            Objects.refuse = stop = Stop(number)
            done = saved(RUN, *new)
            Objects.refuse = None
            found = checkpoint.find(RUN)
            if any(isinstance(d, Url) for d in done):
                assert holds(RUN, *new)
            elif found is None:
                assert had is None
            else:
                assert any(found.name.endswith(f"-{x[0]:08d}") and holds(RUN, *x) for x in (had, new) if x)
            Objects.age = 7200.0  # seconds
            assert all(isinstance(d, Url) for d in saved(RUN, 3)) and holds(RUN, 3)
            Objects.age = 0.0
            left = {k.split("/")[2] for k in Objects.store if k.startswith("bucket/run/step-")}
            assert left <= {f"step-{n:08d}" for n in (1, 2, 3)}
            for name in left:  # what was begun and did not end is gone
                assert checkpoint.verify(f"{RUN}/{name}").step == int(name[5:])
            if not stop.came:
                break
        else:
            pytest.fail("it never ends")
        Objects.store = dict(before)
        saved(RUN, *new)
        before = dict(Objects.store)


def test_a_listing_that_lags_behind_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Objects.lags = True
    mesh = meshes(data=2)

    def save(ranks: Any, step: int) -> Any:
        state = on_rank(whole_state(step, step), mesh[ranks.rank], ("data",))
        return saving.carry_out(saving.begin(ranks, RUN, state, saving.SaveOptions(keep=2)))

    assert checkpoint.find(RUN) is None and caplog.text == ""
    for step in range(1, 8):
        done = as_ranks(2, functools.partial(save, step=step))
        assert checkpoint.find(RUN) == done[0] and holds(RUN, step)
    left = sorted({k.split("/")[2] for k in Objects.store if "/run/step-" in k})
    assert len(left) <= 3 and left[-2:] == ["step-00000006", "step-00000007"]
    for key in [k for k in Objects.store if k.endswith(("latest", "index.json"))]:
        del Objects.store[key]
    assert checkpoint.find(RUN) is None and "has no file latest and no complete" in caplog.text


def test_the_same_step_again_and_who_reads_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    saved(RUN, 1, 1)
    index = checkpoint.describe(RUN)
    number = len(Objects.store)
    saved(RUN, 1, 2)
    assert holds(RUN, 1, 2) and len(Objects.store) == number
    wanted = {"params.embed": Leaf("params['embed']", "params", (7, 5), Layout(torch.float32))}
    raises(lambda: checkpoint.read(index, wanted, meshes(data=1)[0]), "was deleted or replaced while it was read")
    file = next(k for k in Objects.store if k.endswith(".safetensors"))
    Objects.store[file] = Objects.store[file][:-5] + bytes([Objects.store[file][-5] ^ 1]) + Objects.store[file][-4:]
    raises(lambda: checkpoint.verify(RUN), "is damaged", "damaged between bytes 0 and")
    del Objects.store[file]
    raises(lambda: read_whole(RUN), "is damaged", "missing")
    saved(RUN, 2)
    del Objects.store["bucket/run/step-00000002/index.json"]  # as a job does first that deletes it
    assert (
        str(checkpoint.find(RUN)) == f"{RUN}/step-00000001" and "names step-00000002, which was deleted" in caplog.text
    )


def test_a_rank_reads_its_ranges_and_writes_in_parts() -> None:
    rows, mib = 48, 1 << 20
    big = torch.arange(rows * mib // 4, dtype=torch.float32).view(rows, -1)
    mesh = meshes(data=2)
    state = State(torch.tensor(1), {"w": big})
    done = as_ranks(2, lambda r: save_as(r, RUN, on_rank(state, mesh[r.rank], ("data",))))
    assert all(isinstance(d, Url) for d in done), done
    assert max(Objects.parts) <= 16 * mib and sum(Objects.parts) > rows * mib
    Objects.calls = []
    wanted = {"params.w": Leaf("params['w']", "params", (rows, mib // 4), Layout(torch.float32, ("data",)))}
    got = checkpoint.read(RUN, wanted, meshes(data=4)[2])["params.w"]
    assert torch.equal(got, big.reshape(-1)[rows // 2 * mib // 4 :][: rows // 4 * mib // 4])
    gets = [(b - a, path) for act, path, a, b in Objects.calls if act == "get" and path.endswith(".safetensors")]
    assert rows // 4 * mib <= sum(n for n, _ in gets) <= (rows // 4 + 2) * mib
    assert {path.split("/")[-1].split(".")[0] for _, path in gets} == {"rank-00001-of-00002"} and len(gets) <= 2
    Objects.calls = []
    checkpoint.verify(RUN)
    assert sum(act == "get" for act, *_ in Objects.calls) < 10


class NoCredentials(Exception):
    """A class of a client's own."""


def test_a_filesystem_that_gives_little_at_a_time_is_read_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"abcdefg")
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:2]], offset))
    out = bytearray(5)
    with storage.storage_of(tmp_path / "file").reader(tmp_path / "file") as read:
        assert read(memoryview(out), 1) == 5 and bytes(out) == b"bcdef"
        assert read(memoryview(out), 4) == 3 and bytes(out[:3]) == b"efg"
        assert read(memoryview(out)[:0], 0) == 0


def test_errors_are_said_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, Objects.age = State(torch.tensor(1), {"a": torch.ones(3)}), 7200.0  # what a save has left is swept
    save = lambda path: lambda: checkpoint.save(path, state)  # noqa: E731
    raises(save("nosuch://bucket/run"), "cannot open nosuch://bucket", "Protocol not known: nosuch")
    raises(save("simplecache::s3://bucket/run"), "chains of protocols")
    raises(save(Path("s3://bucket/run")), "'s3:/bucket/run' is not a path, and no longer a URL", "as a str")
    raises(lambda: checkpoint.find("objects:///"), "has no path", "the bucket and a name in it")
    raises(lambda: checkpoint.find(3), "3 is not a path")  # type: ignore[arg-type]
    raises(save("objects://typo/run"), "cannot write objects://typo/run", "make the bucket or container first")
    for error, fix in (
        (PermissionError("Access Denied"), "check that the store can be reached"),
        (NoCredentials("Unable to locate them"), "that the credentials may read, write, list and delete there"),
        (Gone("connection reset"), "check that the store can be reached"),
    ):
        for acts in (("put", "part"), ("part",), ("get",), ("head",), ("list",)):
            Objects.refuse = lambda act, path: error if act in acts else None  # noqa: B023
            done = saved(RUN, 1)
            assert all(isinstance(d, StorageError) for d in done if "get" not in acts), done
            assert all(str(error) in str(d) and "Gone" not in type(d).__name__ for d in done), (acts, done)
            assert all("fzero.checkpoint" in str(d) and fix in str(d) for d in done), done
            Objects.refuse = None
            assert checkpoint.find(RUN) is None
            assert "part" not in acts or not [k for k in Objects.store if "step-" in k]
    Objects.refuse = None
    saved(RUN, 1)
    saved(RUN, 2)
    Objects.refuse = lambda act, path: PermissionError("no") if act == "delete" and "00000003" in path else None
    for number in (3, 4, 5):  # nothing is wrong with what was saved
        assert checkpoint.save(RUN, state._replace(step=torch.tensor(number)), keep=1).name == f"step-0000000{number}"
    assert sum("could not be deleted" in r.message and "cannot delete" in r.message for r in caplog.records) == 1
    Objects.refuse = lambda act, path: TypeError("an option of the store") if act == "put" else None
    with pytest.raises(CheckpointError, match="TypeError: an option") as caught:
        checkpoint.save(RUN, state._replace(step=torch.tensor(6)))
    assert not isinstance(caught.value, StorageError)
    Objects.refuse = lambda act, path: PermissionError("no") if act == "get" else None
    raises(lambda: read_whole(RUN), "cannot read", "that the credentials may read")
    Objects.refuse = None
    monkeypatch.setitem(sys.modules, "fsspec", None)
    raises(save("other://bucket/run"), "needs a package that is not installed", "pip install fsspec")
    raises(save("s3://elsewhere/run"), "pip install fsspec, and its package for this protocol (s3fs")
    monkeypatch.undo()
    raises(lambda: checkpoint.export(RUN, RUN + "/out"), "give a local directory")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_behind_the_steps_and_one_after_it() -> None:
    state = State(torch.tensor(1), {"a": torch.ones(3)})
    Objects.refuse = lambda act, path: Gone("lost") if act == "part" else None
    behind = checkpoint.save(RUN, state, wait=False)
    raises(behind.wait, "cannot write objects://bucket/run/step-00000001/rank-00000-of-00001", "lost")
    Objects.refuse = None
    assert [k for k in Objects.store if "step-" in k] == []
    assert checkpoint.save(RUN, state, wait=False).wait().name == "step-00000001"


def step() -> Any:
    loss = lambda p, x: torch.tanh(x @ p["layers"][0]["w"]).square().mean()  # noqa: E731
    return fz.shard_params(fz.train_step(loss, optim.adamw(1e-2)))


def init(key: torch.Tensor) -> Any:
    return {"layers": [{"w": fz.random.normal(key, (8, 4))}]}


def test_training_goes_on_from_a_url(tmp_path: Path) -> None:
    def main(run: Any) -> tuple[str, int]:
        train = fz.compile(step(), run.mesh, backend="eager")
        state = run.state(train, init, fz.random.key(0), path=RUN)
        for _ in run.steps(state, stop):
            state, _ = train(state, fz.random.normal(fz.random.key(1), (6, 8)))
        Objects.refuse = lambda act, path: Gone("out of reach") if act == "part" else None
        assert run.save(state, keep=1) is None
        behind = run.save(state, wait=False)
        raises(behind.wait, "out of reach")
        assert run.save(state, keep=1) is None, "this one failed too, and the run goes on after the one before it"
        Objects.refuse = None
        assert run.save(state, keep=1) == Url(f"{RUN}/step-{stop:08d}")
        return run.source, int(state.step)

    stop = 2
    assert fz.run(main) == ("init", 2)
    stop = 4
    assert fz.run(main) == ("disk", 4)
    train = fz.compile(step(), fz.make_mesh(), backend="eager")
    state = train.restore(RUN)
    assert int(state.step) == 4
    file, *_ = checkpoint.export(RUN, tmp_path / "out")
    for name in ("model.safetensors",):
        Objects.store[f"bucket/model/{name}"] = (tmp_path / "out" / name).read_bytes()
    for given in ("objects://bucket/model", "objects://bucket/model/model.safetensors", file):
        loaded = train.load(given, init)
        assert torch.equal(train.gather(loaded).params["layers"][0]["w"], train.gather(state).params["layers"][0]["w"])
    Objects.store["bucket/model/model.safetensors"] = Objects.store["bucket/model/model.safetensors"][:-3]
    raises(lambda: train.load("objects://bucket/model", init), "model.safetensors", "truncated")
    raises(lambda: train.load("objects://bucket/nothing", init), "objects://bucket/nothing does not exist")
    fz.close_mesh()


def test_a_url() -> None:
    url = Url("s3://bucket/run/")
    assert (str(url), url.name, str(url / "a"), url.parent) == (
        "s3://bucket/run",
        "run",
        "s3://bucket/run/a",
        Url("s3://bucket"),
    )
    assert (
        url.with_name("b") == Url("s3://bucket/b") and len({url, Url("s3://bucket/run")}) == 1 and as_path(url) is url
    )
    assert as_path("file:///tmp/a%20b") == Path("/tmp/a b") and as_path("C:/x") == Path("C:/x")
    assert as_path("file://localhost/tmp/a") == Path("/tmp/a")
    for text in ("", "file://", "file:///", "file://localhost", "file://localhost/"):
        raises(lambda text=text: as_path(text), "has no path")
    raises(lambda: as_path("file://other/tmp/a"), "names the host 'other'")


@pytest.mark.parametrize("root", ["file", RUN])
def test_a_checkpoint_is_no_place_for_checkpoints(root: str, tmp_path: Path) -> None:
    state = State(torch.tensor(6), {"a": torch.ones(3)})
    done = checkpoint.save(tmp_path if root == "file" else root, state)
    raises(
        lambda: checkpoint.save(done, state), "is a checkpoint, not a directory of checkpoints", f"is in: {done.parent}"
    )
    assert checkpoint.verify(done).step == 6


def test_two_jobs_that_save_one_step_delete_only_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job saves step 6 while this one writes its objects: the index that is written last counts."""
    ours, theirs = (State(torch.tensor(6), {"a": torch.full((3,), value)}) for value in (1.0, 2.0))
    checkpoint.save(RUN, State(torch.tensor(6), {"a": torch.zeros(3)}))
    run_record._runs.clear()  # both jobs start from it
    number, commit = len(Objects.store), saving.commit

    def after_the_other(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(saving, "commit", commit)
        saving.carry_out(saving.begin(world(), RUN, theirs, saving.SaveOptions(), run_record.RunRecord()))
        assert read_whole(RUN)["params.a"].tolist() == [2.0] * 3
        return commit(*args, **kwargs)

    monkeypatch.setattr(saving, "commit", after_the_other)
    checkpoint.save(RUN, ours)
    assert read_whole(RUN)["params.a"].tolist() == [1.0] * 3 and len(Objects.store) == number


def test_only_unpublished_objects_older_than_an_hour_are_deleted() -> None:
    names = [f"bucket/run/step-00000007/rank-0000{i}.5c1ab3f0.json" for i in range(2)]
    Objects.store |= dict.fromkeys(names, b"{}")
    for age, left in ((1800.0, True), (7200.0, False)):
        Objects.age = age
        checkpoint.save(RUN, State(torch.tensor(1), {"a": torch.ones(3)}))
        assert all((name in Objects.store) == left for name in names)
