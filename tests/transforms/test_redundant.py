"""`fz.redundant`: what it sends is in the program, planned and verified; it changes no number; what arrives is the
owner's, to the bit."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from survivor import held
from test_run import ended, logged, plainly, supervisors

import fzero as fz
from fzero import optim
from fzero.checkpoint.index import Index
from fzero.comm.transport import transport
from fzero.elastic.memory_checkpoint import MemoryCheckpoint
from fzero.elastic.recovery_source import is_whole
from fzero.errors import FzeroValueError, VerifyError
from fzero.ir.verifier import verify
from fzero.testing import simulate

pytestmark = pytest.mark.forks


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, x: torch.Tensor) -> Any:
    for p in params["layers"]:
        x = layer(p, x)
    return fz.weighted((x * params["scale"]).pow(2).sum(), x.numel())


def init(key: torch.Tensor) -> Any:
    draw = lambda i, *shape: fz.random.normal(fz.random.fold_in(key, i), shape)  # noqa: E731
    return {"layers": [{"w": draw(i, 33, 33), "b": draw(9 + i, 33)} for i in range(3)], "scale": draw(20, 33)}


def adamw() -> Any:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


CASES: dict[str, Any] = {
    "stage_3": fz.shard_params(),
    "stage_2": fz.shard_grads(),
    "stage_1": fz.shard_opt_state(),
    "accumulate": fz.compose(fz.shard_params(), fz.accumulate(2)),
    "bf16": fz.compose(fz.shard_params(), fz.mixed_precision("bf16")),
    "fp16": fz.compose(fz.shard_params(), fz.mixed_precision("fp16")),
    "offload": fz.compose(fz.shard_params(), fz.offload("cpu", ("opt_state", "params"))),
    "offload_some": fz.compose(fz.shard_params(), fz.offload("cpu", "opt_state", fraction=0.5)),
}


def batch_at(step: int, mesh: fz.Mesh) -> torch.Tensor:
    x = fz.random.normal(fz.random.fold_in(fz.random.key(1), step), (12, 33))
    return x.chunk(mesh.size)[mesh.rank]


def trained(step: Any, mesh: fz.Mesh, memory: Path | None, every: int = 1, steps: int = 4) -> tuple[Any, int, int]:
    """The whole state after some steps, the bytes that a rank has sent to its buddy, and those that its plan says."""
    train = fz.compile(step, mesh, backend="eager")
    state, carrier = train.init(init, fz.random.key(0)), transport(mesh)
    spec: Any = step.transforms[-1]
    sent, replicate_start = [0], carrier.replicate_start
    memory_checkpoint = None
    if memory is not None:
        (here := memory / f"host-{mesh.rank}").mkdir()
        memory_checkpoint = MemoryCheckpoint(here, mesh.rank, mesh.size, [mesh.rank], state, 0, 1, mesh, spec)
        mesh.context.peer_replicas = memory_checkpoint.peer_replicas

        def counted(values: Any, *rest: Any) -> Any:
            sent[0] += sum(x.nbytes for x in values)
            return replicate_start(values, *rest)

        carrier.replicate_start = counted  # type: ignore[method-assign]
    for index in range(steps):
        if memory_checkpoint is not None and memory_checkpoint.peer_replicas is not None:
            memory_checkpoint.peer_replicas.begin(index)
        state, _ = train(state, batch_at(index, mesh))
        if memory_checkpoint is not None:
            assert memory_checkpoint.peer_replicas is not None
            memory_checkpoint.peer_replicas.seal(index + 1)
            memory_checkpoint.keep(state, index + 1)
    if memory_checkpoint is not None:
        carrier.replicate_start = replicate_start  # type: ignore[method-assign]
        mesh.context.peer_replicas = None
    planned = 0 if memory_checkpoint is None else train.plan.channels[f"replicate:{spec.axis}"].bytes
    return train.gather(state), sent[0], planned


def sends_and_changes_nothing(memory: str, axes: Any, names: Any, options: Any) -> list[str]:
    mesh = fz.make_mesh(**axes, **options)
    axis, bad = list(axes)[-1], []
    for name in names:
        step = CASES[name](fz.train_step(loss_fn, adamw()))
        here = Path(memory) / name
        here.mkdir(exist_ok=True)
        plain, _, _ = trained(step, mesh, None)
        kept, sent, planned = trained(fz.redundant(step, axis=axis), mesh, here)
        same = all(torch.equal(a, b) for a, b in zip(fz.tree.leaves(plain), fz.tree.leaves(kept), strict=True))
        bad += [] if same else [f"{name}: another state"]
        bad += [] if 0 < sent == 4 * planned else [f"{name}: {sent} sent, {planned} planned"]
    fz.close_mesh()
    return bad


def values_of(index: Index, files: str) -> dict[tuple[str, int, int], bytes]:
    """The bytes of each part of a state that lies in files whose names begin so."""
    found = {}
    for name, parts in index.parts.items():
        for p in parts:
            if p.file.startswith(files):
                raw = (Path(str(index.directory)) / p.file).read_bytes()
                numel, size = p.boxes.numel, index.leaves[name][1].itemsize
                found[name, p.boxes.start, p.boxes.stop] = raw[p.offset : p.offset + numel * size]
    return found


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_numbers_stay_and_what_arrives_is_the_owners(run_ranks: Any, tmp_path: Path, shared: bool) -> None:
    """Over shared memory and over gloo, where host and device are one memory and where they are not."""
    options = {"shared_memory": shared, "unified_memory": None if shared else False}
    names = [n for n in CASES if n != "offload_some"] if shared else ["stage_3", "accumulate", "offload_some"]
    assert run_ranks(2, sends_and_changes_nothing, str(tmp_path), {"data": 2}, names, options) == [[], []]
    for name in names:
        mine, other = (held(tmp_path / name / f"host-{rank}") for rank in range(2))
        assert sorted(mine) == [(2, 2), (3, 2), (4, 2)]
        # what rank 1 has sent of state 3 lies on rank 0's host, and with rank 0's own it is the whole
        assert is_whole(mine[3, 2]) and not is_whole(mine[4, 2]), name
        sent, owners = values_of(mine[3, 2], "replica-00001"), values_of(other[3, 2], "rank-00001")
        assert sent and sent.items() <= owners.items(), name
        assert set(values_of(other[3, 2], "replica-00000")) and len(sent) >= 7


def over_two_axes(memory: str) -> list[str]:
    mesh = fz.make_mesh(node=2, data=2)
    step = fz.shard_params(fz.train_step(loss_fn, adamw()), axis=("data", "node"))
    plain, _, _ = trained(step, mesh, None, steps=2)
    kept, sent, planned = trained(fz.redundant(step, axis="node", every=2), mesh, Path(memory), every=2, steps=2)
    same = all(torch.equal(a, b) for a, b in zip(fz.tree.leaves(plain), fz.tree.leaves(kept), strict=True))
    fz.close_mesh()
    return [] if same and 0 < sent == 2 * planned else [f"{same}, {sent} sent, {planned} planned"]


@pytest.mark.full
def test_over_an_axis_of_two(run_ranks: Any, tmp_path: Path) -> None:
    """Every other step, to the rank of the other node, of leaves that are cut over both axes."""
    assert run_ranks(4, over_two_axes, str(tmp_path)) == [[]] * 4
    for rank in range(4):
        mine, owner = held(tmp_path / f"host-{rank}"), (rank + 2) % 4
        sent = values_of(mine[0, 4], f"replica-{owner:05d}")
        assert sorted(mine) == [(0, 4), (1, 4), (2, 4)] and len(sent) >= 7
        assert sent.keys() <= values_of(held(tmp_path / f"host-{owner}")[1, 4], f"rank-{owner:05d}").keys()


@pytest.mark.full
def test_a_host_is_lost_and_then_another(run_ranks: Any, tmp_path: Path) -> None:
    """With its memory: the run goes on from what it had sent, the curve to the bit as without faults, and a step is
    done again at most for each."""
    out, calm = tmp_path / "struck", tmp_path / "calm"
    out.mkdir()
    calm.mkdir()
    run_ranks(2, plainly, str(calm), 8)
    faults = ["1.0.3:node", "0.0.5.after:node"]
    with supervisors(out, 8, *faults, hosts=2, env={"SURVIVOR_SENDS": "1"}) as processes:
        texts = [ended(process) for process in processes]
    assert all(code == 0 and "is not what it kept" not in text for code, text in texts), texts
    steps = logged(out)
    assert sorted({tuple(line) for line in steps}) == [tuple(line) for line in logged(calm)]
    assert len(steps) - 8 <= 2, [step for step, _ in steps]
    # rank 1 has kept state 6, and with it what it was sent of state 5, or not yet
    assert (out / "sources-1").read_text().split("\n")[:-1] in (["init 0", "memory 2", f"memory {s}"] for s in (4, 5))


@pytest.mark.full
def test_a_run_whose_state_is_lost_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    with supervisors(tmp_path, 8, "1.0.3:node", hosts=2, env={"SURVIVOR_NOWHERE": ""}) as processes:
        texts = [ended(process) for process in processes]
    text = "\n".join(text for _, text in texts)  # an error of all ranks is printed by one
    assert [code for code, _ in texts] == [1, 1] and "run.state: the state of this run is lost" in text, text
    assert "of the state after 3 batches no host's memory has the shards of rank 1\n" in text, text
    assert not re.search(r"\[rank\d\]: \[rank", text), "ranks that joined twice say once who they are"


def turn_by_turn(memory: str) -> tuple[list[int], list[str]]:
    """How many sends each turn has, of which the fourth has two steps, and what is said of one that nobody keeps."""
    mesh, said = fz.make_mesh(data=2), list[str]()

    def heard(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    log = logging.getLogger("fzero")
    log.addFilter(heard)
    frozen = fz.train_step(loss_fn, adamw(), trainable=lambda path, x: "scale" not in path)
    step = fz.redundant(fz.shard_params(frozen), every=3)
    train, carrier, counts = fz.compile(step, mesh, backend="eager"), transport(mesh), [0] * 10
    state = train.init(init, fz.random.key(0))
    replicate_start, turn = carrier.replicate_start, 0

    def counted(*args: Any) -> Any:
        counts[turn] += 1
        return replicate_start(*args)

    carrier.replicate_start = counted  # type: ignore[method-assign]
    here = Path(memory) / f"host-{mesh.rank}"
    here.mkdir()
    peer_replicas: Any = None
    for turn in range(10):
        if turn in (0, 7):  # a run that begins, and one that goes on
            memory_checkpoint = MemoryCheckpoint(
                here, mesh.rank, mesh.size, [mesh.rank], state, turn, 1, mesh, step.transforms[-1]
            )
            memory_checkpoint.keep(state, turn)
            mesh.context.peer_replicas = peer_replicas = memory_checkpoint.peer_replicas
        peer_replicas.begin(turn)
        state, _ = train(state, batch_at(turn, mesh))
        if turn == 3:
            state, _ = train(state, batch_at(turn, mesh))
        if turn < 9:
            peer_replicas.seal(turn + 1)
            memory_checkpoint.keep(state, turn + 1)
        if turn == 8:
            shutil.copytree(here, Path(memory) / f"then-{mesh.rank}")
    peer_replicas.begin(10)
    fz.close_mesh()
    log.removeFilter(heard)
    return counts, said


def test_of_a_turn_its_first_state_is_sent_whole_or_not_at_all(run_ranks: Any, tmp_path: Path) -> None:
    """Every third, with a leaf that is never trained; of two steps in a turn the first; of a run that goes on none but
    that; and what is not kept is said."""
    (counts, said), (others, silent) = run_ranks(2, turn_by_turn, str(tmp_path))
    num = counts[0]
    assert counts == others == [num, 0, 0, num, 0, 0, num - 1, 0, 0, num] and num > 1
    assert "state after 9 batches" in said[0] and len(said) == 1 and not silent
    mine, other = (held(tmp_path / f"then-{rank}") for rank in range(2))
    assert is_whole(mine[3, 2]) and is_whole(mine[6, 2]) and not is_whole(mine[9, 2])
    for seen in (3, 6):
        sent, owners = values_of(mine[seen, 2], "replica-00001"), values_of(other[seen, 2], "rank-00001")
        assert sent and sent.items() <= owners.items() and any("scale" in name for name, *_ in sent)


# --- without processes ---

PARAMS = {"layers": [{"w": torch.eye(4), "b": torch.zeros(4)} for _ in range(2)], "scale": torch.ones(4)}


def lowered(mesh: fz.AbstractMesh, *transforms: Any, optimizer: Any = None) -> Any:
    step = fz.train_step(loss_fn, optimizer or adamw())
    return fz.lower(fz.compose(*transforms)(step), mesh, PARAMS, torch.ones(6, 4))


def test_what_is_sent_is_what_the_ranks_do_not_share() -> None:
    """12P/N bytes under stage 3, 8P/N under stage 1, whose parameters every rank has; every k steps a k-th of it."""
    mesh = fz.AbstractMesh(data=2)
    num = 2 * (16 + 4) + 4
    sent = lambda *ts: lowered(mesh, *ts).plan.channels["replicate:data"].bytes  # noqa: E731
    assert sent(fz.shard_params(), fz.redundant()) == 12 * num // 2
    assert sent(fz.shard_opt_state(), fz.redundant()) == 8 * num // 2
    assert lowered(mesh, fz.shard_opt_state(), fz.redundant(every=3)).plan.peer_replica_bytes == 2 * 8 * num // 2
    assert lowered(mesh, fz.shard_params()).plan.peer_replica_bytes == 0
    assert sent(fz.shard_params(), fz.redundant(every=3)) == sum(12 * n // 2 // 3 for n in (20, 20, 4))
    frozen = fz.train_step(loss_fn, adamw(), trainable=lambda path, x: "scale" in path)
    program = fz.lower(fz.redundant(fz.shard_params(frozen)), mesh, PARAMS, torch.ones(6, 4))
    assert "once=True" in str(program.program)
    assert program.plan.channels["replicate:data"].bytes == 12 * 4 // 2


def test_sends_start_first_and_are_waited_for_before_their_own_update() -> None:
    program = lowered(fz.AbstractMesh(data=2), fz.shard_params(), fz.redundant(), optimizer=optim.adamw(0.1)).program
    ops = [op.op for op in program.instructions]
    num = ops.count("replicate_start")
    assert num == 3 and ops[:num] == ["replicate_start"] * num
    waits = [i for i, op in enumerate(program.instructions) if op.op == "wait" and op.args[0].startswith("replicate")]
    assert all(program.instructions[i + 1].writes for i in waits)
    backwards = [i for i, op in enumerate(program.instructions) if op.is_backward]
    assert waits[0] < backwards[-1], "the first updates come before the last backward, and the others' sends go on"
    late = list(program.instructions)
    for i in waits:  # each behind the update
        late[i], late[i + 1] = late[i + 1], late[i]
    problem = r"params\['layers'\]\[1\]\['w'\] is written while replicate_\d still reads it"
    with pytest.raises(VerifyError, match=problem):
        verify(replace(program, instructions=tuple(late)))


def test_a_step_in_one_process_means_the_same() -> None:
    params, batch = init(fz.random.key(0)), torch.ones(6, 33)
    step = fz.shard_params(fz.train_step(loss_fn, adamw()))
    plain, _ = simulate(step, fz.AbstractMesh(data=3), params, batch)
    sends, _ = simulate(fz.redundant(step), fz.AbstractMesh(data=3), params, batch)
    assert all(torch.equal(a, b) for a, b in zip(fz.tree.leaves(plain), fz.tree.leaves(sends), strict=True))
    alone = fz.compile(fz.redundant(step), fz.make_mesh(), backend="eager")
    alone(alone.init(params), batch)
    assert "replicate_start" not in str(alone.program)


def test_one_rank_along_the_axis_sends_nothing() -> None:
    mesh, zero = fz.AbstractMesh(node=1, data=2), fz.shard_params(axis=("data", "node"))
    sends, plain = (str(lowered(mesh, *ts).program) for ts in ((zero, fz.redundant(axis="node")), (zero,)))
    assert sends.partition("\ndef ")[2] == plain.partition("\ndef ")[2] != ""


@pytest.mark.parametrize(
    ("mesh", "transforms", "words"),
    [
        ({"data": 2}, [fz.data_parallel(), fz.redundant()], r"does nothing: no tensor is sharded over axis 'data'"),
        (
            {"data": 2},
            [fz.shard_params(), fz.redundant(axis="node")],
            r"unknown mesh axis\n  'node': the mesh has data=2",
        ),
        (
            {"data": 2},
            [fz.shard_params(), fz.offload("nvme", "opt_state", path="/scratch"), fz.redundant()],
            r"(?s)\d+ tensors are stored on disk, and are not sent.*opt_state",
        ),
    ],
)
def test_what_cannot_be_sent(mesh: Any, transforms: Any, words: str) -> None:
    with pytest.raises(FzeroValueError, match=words):
        lowered(fz.AbstractMesh(**mesh), *transforms)


def test_wrong_arguments() -> None:
    step = fz.shard_params(fz.train_step(loss_fn, adamw()))
    with pytest.raises(fz.errors.FzeroTypeError, match=r"axis=\('data',\): the name of one axis"):
        fz.redundant(step, axis=("data",))  # type: ignore[arg-type]
    with pytest.raises(fz.errors.FzeroTypeError, match="no argument 'scheme'"):
        fz.redundant(step, scheme="parity")  # type: ignore[call-arg]
    for every in (0, 1.5, True):
        with pytest.raises(FzeroValueError, match="every="):
            fz.redundant(step, every=every)  # type: ignore[arg-type]
    with pytest.raises(fz.errors.TransformError, match="two different redundant"):
        fz.redundant(fz.redundant(step), every=2)
    with pytest.raises(fz.errors.TransformError, match="an evaluation changes no state"):
        fz.redundant(fz.eval_step(loss_fn))


def test_it_goes_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest rank along the axis that is on another host for every rank; of as many as a host has they follow
    each other."""
    spec: Any = fz.redundant(fz.shard_params(fz.train_step(loss_fn, adamw()))).transforms[-1]
    on = lambda axis: replace(spec, axis=axis)  # noqa: E731

    def mesh(**axes: int) -> Any:
        size = torch.Size(axes.values()).numel()
        return fz.Mesh(axes, 0, torch.device("cpu")) if size else None

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert spec.shift(mesh(data=4)) == 1, "one host"
    assert spec.shift(mesh(data=16)) == 4
    assert on("node").shift(mesh(node=4, data=4)) == 1
    assert spec.shift(mesh(node=4, data=4)) == 0
    with pytest.raises(
        FzeroValueError, match=r"(?s)axis 'data' does not cross hosts.*4 consecutive ranks on each host"
    ):
        spec.check([], mesh(node=4, data=4))
    assert spec.shift(mesh(data=8, model=2)) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert spec.shift(mesh(data=3)) == 1
