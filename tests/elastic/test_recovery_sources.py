"""States that lie in the memories of several hosts (elastic/recovery_source.py), on any number of ranks and hosts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import survivor
import torch

import fzero as fz
from fzero.checkpoint import peer_reads
from fzero.checkpoint.index import Index, StoredPart
from fzero.elastic import recovery_source
from fzero.elastic.memory_checkpoint import MemoryCheckpoint
from fzero.elastic.recovery_source import is_whole
from fzero.sharding.shard_regions import Boxes, DimShard, claimed, whole

STAGES = ("shard_params", "shard_opt_state", "data_parallel")


def compiled(stage: str, mesh: Any) -> Any:
    step = fz.train_step(survivor.loss_fn, fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-2)))
    return fz.compile(getattr(fz, stage)(step), mesh, backend="eager")


def kept(root: str, hosts: Sequence[int]) -> dict[str, list[torch.Tensor]]:
    """Each stage's state after two steps, as it is whole and as each host has it. The last rank is killed while it
    keeps that of a third."""
    mesh, whole_states = fz.make_mesh(), {}
    for stage in STAGES:
        train = compiled(stage, mesh)
        state = train.init(survivor.init, fz.random.key(0))
        memory = Path(root) / stage / f"host-{hosts[mesh.rank]}"
        memory.mkdir(parents=True, exist_ok=True)
        memory_checkpoint = MemoryCheckpoint(
            memory, mesh.rank, mesh.size, [r for r, h in enumerate(hosts) if h == hosts[mesh.rank]], state, 0
        )
        for index in range(3):
            state, _ = train(state, survivor.batch_at(index, mesh.rank, mesh.size))
            if index == 2 and mesh.rank == mesh.size - 1:
                memory_checkpoint._slots.sealed[0].fill_(0)
            else:
                memory_checkpoint.keep(state, index + 1)
            if index == 1:
                whole_states[stage] = [x.clone() for x in fz.tree.leaves(train.gather(state))]
    fz.close_mesh()
    return whole_states


def found(root: str, hosts: Sequence[int], reading: str, window: int) -> dict[str, tuple[int, list[torch.Tensor]]]:
    """The state of each stage, as a step of another stage goes on from it."""
    mesh, out = fz.make_mesh(), {}
    usual, peer_reads.WINDOW = peer_reads.WINDOW, window
    for stage in STAGES:
        memory = Path(root) / stage / f"host-{hosts[mesh.rank]}"
        memory.mkdir(parents=True, exist_ok=True)
        index = recovery_source.newest(memory, mesh).kept
        if index is None:
            out[stage] = (-1, [])
            continue
        train = compiled(reading, mesh)
        state = train.restore(index, survivor.init)
        out[stage] = index.step, [x.clone() for x in fz.tree.leaves(train.gather(state))]
    peer_reads.WINDOW = usual
    fz.close_mesh()
    return out


@pytest.mark.full
def test_states_of_three_hosts_on_any_ranks_and_hosts(run_ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "all"
    before = run_ranks(3, kept, str(root), [0, 1, 2])[0]
    lost = tmp_path / "lost"  # host 2, whose part lies in the memory of host 1 too
    shutil.copytree(root, lost)
    for stage in STAGES:
        for file in (lost / stage / "host-2" / "of-00003").iterdir():
            shutil.move(file, lost / stage / "host-1" / "of-00003" / file.name)
        shutil.rmtree(lost / stage / "host-2")
    for at, hosts, reading, window in (
        (root, [0, 1, 2], "shard_params", 1000),
        (lost, [0, 1], "shard_opt_state", 1 << 20),
        (lost, [3, 0, 1, 1], "shard_params", 64),
    ):
        for result in run_ranks(len(hosts), found, str(at), hosts, reading, window):
            for stage in STAGES:
                step, leaves = result[stage]
                assert step == (3 if stage == "data_parallel" else 2), (at, hosts, stage)
                if step == 2:
                    assert all(torch.equal(x, y) for x, y in zip(leaves, before[stage], strict=True))
    only = run_ranks(2, found, str(root), [0, 2], "shard_params", 1 << 20)[0]
    assert only["shard_params"][0] == -1, "host 1 has what nobody else has"
    assert only["data_parallel"][0] == 3


def failing(root: str, how: str) -> tuple[str, str, bool]:
    """The error of a restore in which something fails on rank 1, and whether the mesh can be used afterwards."""
    mesh = fz.make_mesh(timeout=30)
    index = recovery_source.newest(Path(root) / STAGES[0] / f"host-{mesh.rank}", mesh).kept
    assert index is not None and index.peer_reads is not None
    if mesh.rank == 1 and how == "truncated":
        for file in index.files:
            (Path(index.directory) / file).write_bytes(b"")
    elif mesh.rank == 1:
        index.peer_reads._take = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
    train, kind, text = compiled("data_parallel", mesh), "", ""
    try:
        train.restore(index, survivor.init)
    except fz.errors.FzeroError as error:
        kind, text = type(error).__name__, str(error)
    except MemoryError as error:
        kind, text = "MemoryError", str(error)
    try:
        train.init(survivor.init, fz.random.key(0))
        usable = True
    except fz.errors.DivergenceError:
        usable = False
    fz.close_mesh()
    return kind, text, usable


def test_what_fails_on_the_way_fails_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(3, kept, str(tmp_path), [0, 1, 2])
    for rank, (kind, text, usable) in enumerate(run_ranks(3, failing, str(tmp_path), "fails")):
        assert kind == ("MemoryError" if rank == 1 else "DivergenceError") and not usable
        assert rank == 1 or "rank 1: MemoryError: no room" in text
    for kind, text, usable in run_ranks(3, failing, str(tmp_path), "truncated"):
        assert kind == "CheckpointError" and usable
        assert "fzero.run: cannot read the state in the hosts' memory of step 2" in text
        assert "rank 1: " in text and "rank-00001" in text and "inside a tensor" in text


def test_a_damaged_memory_is_named_and_counts_as_lost(
    run_ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(1, kept, str(tmp_path / "fine"), [0])
    mesh = fz.make_mesh()

    def look(damage: Any) -> str:
        memory = tmp_path / "damaged"
        shutil.rmtree(memory, ignore_errors=True)
        shutil.copytree(tmp_path / "fine" / STAGES[0] / "host-0", memory)
        damage(memory / "of-00001")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fzero"):
            assert (recovery_source.newest(memory, mesh).kept is None) == bool(caplog.messages)
        return "".join(caplog.messages)

    def flip(path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    slot, note = "rank-00000.1.safetensors", "rank-00000.json"
    assert look(lambda d: None) == ""
    assert "has 100 bytes where" in look(lambda d: (d / slot).write_bytes((d / slot).read_bytes()[:100]))
    header = (tmp_path / "fine" / STAGES[0] / "host-0" / "of-00001" / slot).read_bytes()
    for at in (0, 2, 7, header.index(b"params.w"), header.index(b"data_offsets", header.index(b"params.v")) + 16):
        assert look(lambda d, at=at: flip(d / slot, at)) == "", "the header is not read"
    assert "counts as lost" in look(lambda d: (d / note).write_text("{"))


def test_claims_of_ranges() -> None:
    """Against sets of elements."""
    shape = (4, 6)
    leaf = torch.arange(24).view(shape)

    def index(*parts: Boxes) -> Index:
        found = {"x": tuple(StoredPart("", "x", b, 0) for b in parts)}
        return Index(Path(), 0, {"x": (shape, torch.float32)}, {}, None, {}, {}, found)

    cuts: list[tuple[DimShard, ...]] = [(), (DimShard(1, 1, 2),), (DimShard(0, 1, 2), DimShard(1, 3, 2))]
    boxes = [Boxes(shape, a, place, start, stop) for a in cuts for place in (0, 1) for start, stop in ((0, 5), (3, 6))]
    boxes = [b for b in boxes if b.along or not b.place]
    for first in boxes:
        for second in boxes:
            left, seen = [(0, 24)], set[int]()
            for box in (first, second, first):
                runs, left = claimed(left, whole(shape).runs(box))
                new = {i + k for i, _, n in runs for k in range(n)}
                assert new == set(box.take(leaf).tolist()) - seen
                seen |= new
                assert {i for a, b in left for i in range(a, b)} == set(range(24)) - seen
            assert is_whole(index(first, second)) == (not left)
    assert is_whole(index(*boxes, whole(shape, 2)))
    assert not is_whole(index())
