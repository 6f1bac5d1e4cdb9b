"""Runs that lose ranks (fz.run): processes that are killed, stopped, told to stop or fail, and what memory keeps of a
state."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import survivor
import torch
import torch.distributed as dist
from forks import children
from safetensors.torch import save_file
from scripts import ROOT, environment

import fzero as fz
from fzero.elastic import host_directory, supervisor
from fzero.elastic.memory_checkpoint import MemoryCheckpoint
from fzero.elastic.memory_slots import examine
from fzero.elastic.recovery_source import is_whole

pytestmark = pytest.mark.forks
LIMIT = 150.0  # seconds for a run of several lives on a loaded machine


@contextlib.contextmanager
def supervisors(
    out: Path,
    steps: int | str,
    *faults: str,
    flags: tuple[str, ...] = (),
    ranks: int = 2,
    hosts: int = 1,
    env: Mapping[str, str] | None = None,
    script: Path = ROOT / "tests" / "survivor.py",
) -> Iterator[list[subprocess.Popen[str]]]:
    """Keepers of some ranks as torchrun starts them, on one host or as if on several, a host's ranks one behind the
    other; the store is this process's, as it is the agent's there."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    usual = {
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "fzero.run", *flags, "--memory"]
    arguments = [str(script), str(out), *([str(steps)] if steps != "" else []), *faults]
    at = [rank * hosts // ranks for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [*command, str(out / f"memory-{at[rank]}"), *arguments],
            env={
                **environment(),
                **usual,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - at.index(at[rank])),
                "LOCAL_WORLD_SIZE": str(at.count(at[rank])),
                "PYTHONPATH": str(ROOT),
                **({"SURVIVOR_HOST": str(at[rank])} if hosts > 1 else {}),
                **(env or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=out,
        )
        for rank in range(ranks)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=LIMIT)
    return process.returncode, text


def logged(out: Path) -> list[Any]:
    return [json.loads(line) for line in (out / "log").read_text().splitlines()]


def plainly(out: str, steps: int) -> int:
    return fz.run(lambda run: survivor.train(run, Path(out), steps, {}))


def test_ranks_that_die_one_by_one_and_together(run_ranks: Any, tmp_path: Path) -> None:
    """Rank 1 is killed; then both; rank 0 is stopped, and found by its supervisor; then rank 1 fails by itself, which
    ends the run. Every step is there once, to the bit as without faults."""
    faults = ["1.0.2:kill", "0.0.4.after:kill", "1.1.4.after:kill", "0.1.6:stop", "1.2.8:raise"]
    out, calm = tmp_path / "struck", tmp_path / "calm"
    out.mkdir()
    calm.mkdir()
    run_ranks(2, plainly, str(calm), 8)
    with supervisors(out, 9, *faults, flags=("--hang-timeout", "5")) as (zero, one):
        code, text = ended(one)
        assert code == 1 and "a user's own error" in text, text
        code, other = ended(zero)
        assert code == 1, other
    assert "fzero.run: rank 1 died of SIGKILL in step 2; it is restarted" in text
    assert "rank 0 has made no progress for 5 s in step 6; its stacks:" in other
    assert "fzero.run: rank 1 has raised ValueError: a user's own error, which ends the run" in other
    assert logged(out) == logged(calm)
    assert (out / "sources-1").read_text().split("\n")[:-1] == ["init 0", "memory 2", "memory 4", "memory 6"]
    assert [len((out / f"lives-{rank}").read_text()) for rank in range(2)] == [3, 3]


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "faults"),
    [(False, ["1.0.5:goner"]), (True, ["1.0.5:goner"]), (True, ["1.0.3:gone", "1.0.5:kill"])],
)
def test_a_memory_that_is_removed_before_a_rank_is_lost_is_named(tmp_path: Path, path: bool, faults: list[str]) -> None:
    """With the rank or before it. The others know how far they were: it is no first start."""
    env = {"SURVIVOR_SAVES": ""} if path else {"SURVIVOR_NOWHERE": ""}
    with supervisors(tmp_path, 6, *faults, env=env) as started:
        texts = [ended(one) for one in started]
    text = "\n".join(text for _, text in texts)
    lost = re.search(
        r"of the state after 5 batches no host's memory has the shards of ranks? (0, )?1 \(its files may have", text
    )
    assert lost and [code for code, _ in texts] == ([0, 0] if path else [1, 1]), text
    if path:
        back = re.search(r"the run goes back to .*/step-0000000([24]), and does ([31]) batch(es)? again", text)
        assert back and int(back[1]) + int(back[2]) == 5, text
        assert (tmp_path / "sources-0").read_text().split("\n")[:-1] == ["init 0", f"disk {back[1]}"]
    else:
        assert "run.state: the state of this run is lost" in text, text
    assert not [*tmp_path.glob("memory-*/*")]


@pytest.mark.full
def test_a_rank_that_dies_while_a_checkpoint_is_written_behind_the_steps(run_ranks: Any, tmp_path: Path) -> None:
    """The one under way is not made, or made whole; the next save follows, and the end of the run waits for the
    last."""
    out, calm = tmp_path / "struck", tmp_path / "calm"
    out.mkdir()
    calm.mkdir()
    run_ranks(2, plainly, str(calm), 8)
    with supervisors(out, 8, "1.0.4:kill", "0.0.6:kill", env={"SURVIVOR_SAVES": ""}) as started:
        for code, text in map(ended, started):
            assert code == 0 and "returned 8" in text, text
    assert logged(out) == logged(calm)
    kept = sorted(x.name for x in (out / "saved").iterdir() if not x.name.startswith(".tmp-"))  # which a kill left
    assert kept[0] == "latest" and kept[-1] == "step-00000008", kept
    assert all(fz.checkpoint.verify(out / "saved" / name) for name in kept if name.startswith("step-")), kept


TWICE = """
import os, signal, sys, time
from pathlib import Path
import torch, fzero as fz
step = fz.data_parallel(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5)))
def train(run, name, fault):
    compiled = fz.compile(step, run.mesh, backend="eager")
    state = run.state(compiled, {"w": torch.ones(4)}, path=f"{name}-saved")
    print(name, run.source, int(state.step), flush=True)
    for index in run.steps(state, 4):
        once = Path(f"{name}-once")
        if fault and index == 2 and run.mesh.rank == run.mesh.size - 1 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state, _ = compiled(state, torch.ones(4))
        run.commit(state)
    run.save(state)
    if name == "second":
        print("ended", state.params["w"].tolist(), [x.name for x in Path(os.environ["FZERO_RUN_MEMORY"]).glob("of-*")])
fz.run(lambda run: train(run, "first", sys.argv[2] == "first"))
fz.run(lambda run: train(run, "second", sys.argv[2] == "second"))
"""


@pytest.mark.full(keep=["second"])
@pytest.mark.parametrize("fault", [pytest.param("first", marks=pytest.mark.fresh), "second"])
def test_a_second_run_of_a_script_does_not_go_on_from_the_first(tmp_path: Path, fault: str) -> None:
    """A rank that is lost in the first is restarted. One that is lost in the second would begin with the first: it is
    not restarted, and the run ends."""
    (script := tmp_path / "script.py").write_text(TWICE)
    with supervisors(tmp_path, fault, script=script) as started:
        codes, texts = zip(*map(ended, started), strict=True)
    assert "second init 0" in texts[0], texts
    if fault == "second":
        assert codes == (1, 128 + signal.SIGKILL) and "rank 1 has left" in texts[0], texts
        assert "restarted" not in texts[1] and "joining again" not in texts[0], texts
        return
    assert codes == (0, 0) and "ended [-1.0, -1.0, -1.0, -1.0] []" in texts[0], texts
    assert "first memory 2" in texts[0], texts


def test_told_to_stop_and_started_again(tmp_path: Path) -> None:
    """On two hosts a rank goes on from its own host's memory. SIGTERM at one stops both after the same step, with what
    the next start continues from."""
    with supervisors(tmp_path, 100_000, "1.0.2:kill", hosts=2) as both:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and not ((tmp_path / "log").exists() and len(logged(tmp_path)) > 4):
            time.sleep(0.05)
        both[1].send_signal(signal.SIGTERM)
        assert [ended(process)[0] for process in both] == [143, 143]
    saved = fz.checkpoint.describe(tmp_path / "saved").step
    assert 0 < saved == logged(tmp_path)[-1][0]
    assert (tmp_path / "sources-1").read_text().split("\n")[:2] == ["init 0", "memory 2"]
    assert not [*tmp_path.glob("memory-*/*/*")]
    assert fz.run(lambda run: survivor.train(run, tmp_path, saved + 2, {})) == saved + 2
    assert [step for step, _ in logged(tmp_path)] == [*range(1, saved + 3)]


@pytest.mark.full
def test_a_rank_that_is_lost_after_the_run_was_told_to_stop(tmp_path: Path) -> None:
    """Both ranks end, the other one says that its steps are not saved, and what was saved before is whole."""
    with supervisors(tmp_path, 10**6, env={"SURVIVOR_SAVES": ""}) as both:
        deadline = time.monotonic() + LIMIT
        while not (tmp_path / "log").exists() or len(logged(tmp_path)) < 8:
            assert time.monotonic() < deadline and both[0].poll() is None
            time.sleep(0.05)
        for one in both:
            one.send_signal(signal.SIGTERM)
        (rank,) = children(both[0].pid)
        os.kill(rank, signal.SIGKILL)
        (code, text), (other_code, other) = map(ended, both)
    assert code in (128 + signal.SIGKILL, 143) and other_code == 143, text + other
    assert "it is started again" not in text and "a stop was requested, and a rank was lost" in other, text + other
    saved = fz.checkpoint.find(tmp_path / "saved")
    assert saved is not None and fz.checkpoint.verify(saved)
    assert not [*tmp_path.glob("memory-*/*")]


def test_a_script_that_ends_early_ends_the_run(tmp_path: Path) -> None:
    """With code 0 too, for which torchrun would wait for the others."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import sys, fzero as fz, torch\n"
        "step = fz.train_step(lambda p, x: (p['w'] * x).sum(), fz.optim.sgd(0.5))\n"
        "def main(run):\n"
        "    state = run.state(fz.compile(step, run.mesh, backend='eager'), {'w': torch.ones(2)})\n"
        "    for index in run.steps(state, 3):\n"
        "        sys.exit(0)\n"
        "fz.run(main)\n"
    )
    command = [sys.executable, "-m", "fzero.run", "--memory", str(tmp_path), str(script)]
    done = subprocess.run(command, env={**environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and "rank 0 ended in step 0, before the end of the run" in done.stderr, done.stderr


WITH_OWN_COLLECTIVE = """
import os, signal, sys, torch, fzero as fz
step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1)))
def main(run):
    train = fz.compile(step, run.mesh, backend="eager")
    state = run.state(train, load=sys.argv[1] + "/model.safetensors")
    for index in run.steps(state, 6):
        state, metrics = train(state, torch.ones(2, 4))
        if run.mesh.rank == 1 and run.source == "init":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(metrics["loss"])
        run.commit(state)
    print("ended", run.source, int(state.step), train.gather(state).params["w"].sum().item())
fz.run(main)
"""


def test_a_rank_that_is_lost_while_others_wait_in_a_collective_of_the_script(tmp_path: Path) -> None:
    """Gloo raises a plain RuntimeError there. The weights of the first state, which nobody has committed, come from a
    file."""
    (script := tmp_path / "script.py").write_text(WITH_OWN_COLLECTIVE)
    save_file({"w": torch.full((4, 4), 2.0)}, tmp_path / "model.safetensors")
    with supervisors(tmp_path, "", script=script) as started:
        codes, texts = zip(*map(ended, started), strict=True)
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1))
    state = step.init({"w": torch.full((4, 4), 2.0)})
    for _ in range(6):
        state, _ = step(state, torch.ones(2, 4))
    assert codes == (0, 0) and "joining again" in texts[0] and "it is restarted" in texts[1], texts
    line = next(line for line in texts[0].splitlines() if line.startswith("ended"))
    assert line.split()[:3] == ["ended", "memory", "6"]
    assert float(line.split()[3]) == pytest.approx(state.params["w"].sum().item(), rel=1e-5)


TRAINER = """
import os, signal, sys, transformers, fzero as fz
from fzero.hf import Trainer
from transformers.trainer_utils import get_last_checkpoint
rows = [{"input_ids": [i, 1, 2, 3], "labels": [i, 1, 2, 3]} for i in range(16)]
sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
class Kills(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        at = os.path.join(args.output_dir, f"killed-{state.global_step}")
        kills = len(sys.argv) > 2 and os.environ["RANK"] == "1" and state.global_step in (2, 3, 4)
        if kills and not os.path.exists(at):
            open(at, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
def main(run):
    transformers.set_seed(0)
    args = transformers.TrainingArguments(sys.argv[1] + "/trainer", max_steps=6, save_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, save_total_limit=2, logging_steps=1, per_device_train_batch_size=2)
    os.makedirs(args.output_dir, exist_ok=True)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    trainer = Trainer(model, args, train_dataset=rows, backend="eager", mesh=run.mesh, callbacks=[Kills])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    print("losses", [x["loss"] for x in trainer.state.log_history if "loss" in x], flush=True)
fz.run(main)
"""


@pytest.mark.full
def test_a_trainer_whose_ranks_are_lost(tmp_path: Path) -> None:
    """More often than --max-failures, which counts failures in one step: from its checkpoints, to the same losses."""
    pytest.importorskip("transformers")
    (script := tmp_path / "script.py").write_text(TRAINER)
    found = []
    for name, more in (("calm", ""), ("killed", "kill")):
        (out := tmp_path / name).mkdir()
        with supervisors(out, more, script=script) as started:
            codes, texts = zip(*map(ended, started), strict=True)
        assert codes == (0, 0) and texts[1].count("it is restarted") == (3 if more else 0), texts
        found.append(next(line for line in texts[0].splitlines() if line.startswith("losses")))
    assert found[0] == found[1], found


@pytest.mark.full
def test_a_rank_that_raises_later_what_another_has_left_with_ends_too(tmp_path: Path) -> None:
    """With the same error, rather than wait for the other to come back."""
    script = tmp_path / "raises.py"
    script.write_text(
        "import time, fzero as fz\n"
        "def main(run):\n"
        "    time.sleep(3 * run.mesh.rank)\n"
        "    raise fz.errors.FzeroValueError('no such thing')\n"
        "fz.run(main)\n"
    )
    with supervisors(tmp_path, "", script=script) as started:
        codes, texts = zip(*map(ended, started), strict=True)
    assert codes == (1, 1) and "no such thing" in texts[0] and "joining" not in texts[1], texts


@pytest.mark.full
def test_sigterm_to_all_processes_of_a_rank(tmp_path: Path) -> None:
    """As torchrun sends it, and whoever the rank has started gets it too: the workers of a DataLoader do not end before
    the rank has saved. While the first program is built there is nothing to save, and nothing is waited for."""
    script = tmp_path / "loads.py"
    script.write_text(
        "import sys, time, torch, fzero as fz\n"
        "def loss_fn(p, x):\n"
        "    if sys.argv[1] == 'building': print('here', flush=True), time.sleep(100)\n"
        "    return (p['w'] * x).mean()\n"
        "def main(run):\n"
        "    train = fz.compile(fz.train_step(loss_fn, fz.optim.sgd(0.5)), run.mesh, backend='eager')\n"
        "    state = run.state(train, {'w': torch.ones(2)}, path=sys.argv[1])\n"
        "    batches = iter(torch.utils.data.DataLoader(torch.ones(100000, 2), batch_size=2, num_workers=1))\n"
        "    for index in run.steps(state, 40000):\n"
        "        state, _ = train(state, next(batches))\n"
        "        run.commit(state)\n"
        "        if index == 5: print('here', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    fz.run(main)\n"
    )
    command = [sys.executable, "-X", "dev", "-m", "fzero.run", "--memory", "memory", "-m", "loads"]
    env = {**environment(), "TORCHELASTIC_RUN_ID": "test"}
    both = {
        at: subprocess.Popen([*command, at], env=env, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True)
        for at in ("building", "loading")
    }
    for at, process in both.items():
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 143
        process.stdout.close()
        assert (tmp_path / at).exists() == (at == "loading")
    assert fz.checkpoint.describe(tmp_path / "loading").step >= 6


def test_losses_in_a_row_end_a_run(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os; os.kill(os.getpid(), 9)")
    command = [sys.executable, "-m", "fzero.run", "--memory", str(tmp_path), "--max-failures", "2", str(script)]
    done = subprocess.run(command, env={**environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 died of SIGKILL 2 times before it called fz.run: the run ends here" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hang-timeout", "0", "x.py"], "--hang-timeout and --heartbeat-timeout must be greater than 0"),
        (["--heartbeat-timeout", "inf", "x.py"], "--heartbeat-timeout must be greater than 0 and finite"),
        (["--hang-timeout", "nan", "x.py"], "--hang-timeout and --heartbeat-timeout must be greater than 0 and finite"),
        (["--memory", "s3://a/b", "x.py"], "must be a directory of this host, not a URL"),
        (["--memory", "", "x.py"], "is not a directory"),
        (["--max", "2", __file__], "unrecognized arguments: --max"),  # --max-failures is not guessed
        (["nowhere.py"], "the file nowhere.py"),
        ([], "the following arguments are required: script"),
    ],
)
def test_wrong_commands(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        supervisor.main(flags)
    assert words in capsys.readouterr().err


def test_a_module_is_named_as_python_takes_it() -> None:
    assert supervisor._normalized(["--memory", "-mb", "--hang-timeout=3", "-mtrain", "-mx"])[3:] == [
        "-m",
        "train",
        "-mx",
    ]
    assert supervisor._normalized(["train.py", "-mx"]) == ["train.py", "-mx"]


def test_importing_the_module_of_the_command_gives_the_function() -> None:
    function = fz.run
    assert importlib.import_module("fzero.run") is function is fz.run


# --- what memory keeps ---


def kept(memory: str, stage: str) -> list[Any]:
    """Two states kept by each of two ranks, and what a third, lost half way, leaves."""
    mesh = fz.make_mesh()
    step = getattr(fz, stage)(fz.train_step(survivor.loss_fn, fz.optim.adamw(1e-2)))
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(survivor.init, fz.random.key(0))
    memory_checkpoint = MemoryCheckpoint(Path(memory), mesh.rank, mesh.size, range(mesh.size), state, 0)
    memory_checkpoint.keep(state, 0)
    for index in range(2):
        state, _ = train(state, survivor.batch_at(index, mesh.rank, mesh.size))
        memory_checkpoint.keep(state, index + 1)
    if mesh.rank == 1:  # killed while it keeps the next
        memory_checkpoint._slots.sealed[0].fill_(0)
    whole = train.gather(state)
    fz.close_mesh()
    return [x.clone() for x in fz.tree.leaves(whole)]


@pytest.mark.parametrize("stage", ["shard_params", "shard_opt_state", "data_parallel"])
def test_states_kept_by_two_ranks_are_read_by_any_number(run_ranks: Any, tmp_path: Path, stage: str) -> None:
    before = run_ranks(2, kept, str(tmp_path), stage)[0]
    found = survivor.held(tmp_path)
    steps = sorted(step for step, _ in found)
    assert steps[0] in (1, 2) and all(size == 2 for _, size in found)
    whole = {step: is_whole(index) for (step, _), index in found.items()}
    assert sum(whole.values()) == 1, "the slot that rank 1 did not seal is of no use"
    ((step, _),) = [key for key, index in found.items() if is_whole(index)]
    train = fz.compile(fz.train_step(survivor.loss_fn, fz.optim.adamw(1e-2)), fz.make_mesh(), backend="eager")
    state = train.restore(found[step, 2], survivor.init)
    for index in range(step, 2):
        state, _ = train(state, survivor.batch_at(index, 0, 1))
    for x, y in zip(fz.tree.leaves(state), before, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_slot_whose_number_is_damaged_is_let_go(tmp_path: Path) -> None:
    train = fz.compile(PLAIN, fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.ones(3)})
    memory_checkpoint = MemoryCheckpoint(tmp_path, 0, 1, [0], state, 4)
    for number in (4, 5):
        memory_checkpoint.keep(state, number)
    memory_checkpoint._slots.sealed[1].fill_(-7202199355712626690)
    assert examine(tmp_path).damaged == [(0, -1, ["sealed"], False)]
    assert sorted(survivor.held(tmp_path)) == [(4, 1)]


def test_what_was_later_than_where_a_run_goes_on_is_let_go(tmp_path: Path) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.ones(3)})
    memory_checkpoint = MemoryCheckpoint(tmp_path, 0, 1, [0], state, 0)
    for number in (4, 5):
        memory_checkpoint.keep(state, number)
    again = MemoryCheckpoint(tmp_path, 0, 1, [0], state, 4)
    assert sorted(survivor.held(tmp_path)) == [(4, 1)]
    again.keep(state, 5)
    assert sorted(survivor.held(tmp_path)) == [(4, 1), (5, 1)]


def test_what_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.adamw(0.5))
    params = {"w": torch.ones(1 << 16)}
    (tmp_path / "disk").mkdir()

    def main(run: Any, transform: Any = lambda step: step) -> None:
        run.commit(run.state(fz.compile(transform(step), run.mesh, backend="eager"), params))

    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)run.commit: 2 tensors are stored on disk.*run.save"):
        fz.run(lambda run: main(run, fz.offload("nvme", "opt_state", path=tmp_path / "disk")), memory=tmp_path)

    def train_state(params: Any) -> Any:
        return fz.compile(step, fz.make_mesh(), backend="eager").init(params)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    whole = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)has no room for.*No space left.*fz.run\(memory=DIR\)"):
        fz.run(main, memory=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", whole)
    monkeypatch.setenv(host_directory.SUPERVISOR, "1")
    with pytest.raises(fz.errors.FzeroValueError, match=r"python -m fzero.run --memory DIR"):
        fz.run(main, memory=tmp_path)
    monkeypatch.delenv(host_directory.SUPERVISOR)
    other = train_state({"w": torch.ones(3)})
    wrongs: Any = (
        (other, r"(?s)not the run's state.*params.w: float32\[3\].*params.w: float32\[65536\] is missing"),
        (None, "NoneType is not a state"),
    )
    for wrong, words in wrongs:
        with pytest.raises(fz.errors.FzeroValueError, match=words):
            fz.run(lambda run, wrong=wrong: (main(run), run.commit(wrong)), memory=tmp_path / "roomy")
    (tmp_path / "file").write_text("")
    with pytest.raises(fz.errors.FzeroValueError, match=r"memory cannot be used\n.*file.*\nFix: fz.run\(memory=DIR\)"):
        fz.run(main, memory=tmp_path / "file")
    monkeypatch.setenv(host_directory.SUPERVISOR, "1")
    monkeypatch.setenv(host_directory.MEMORY, str(tmp_path / "file"))
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"cannot be used\n.*file.*\nFix: python -m fzero.run --memory DIR"
    ):
        fz.run(main)
    monkeypatch.delenv(host_directory.SUPERVISOR)
    monkeypatch.delenv(host_directory.MEMORY)
    with pytest.raises(fz.errors.FzeroValueError, match=r"every=0: must be a whole number"):
        fz.run(main, every=0)
    with pytest.raises(fz.errors.FzeroValueError, match=r"main=3: must be a function"):
        fz.run(3)  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    async def later(run: Any) -> None: ...

    start: Any = fz.run
    care: Any = fz.Health
    wrong: Any = [
        *((lambda a=a: start(dir, stop_on=a), "stop_on=.*can be caught") for a in (15, None, "SIGTERM", (9,), (999,))),
        *((lambda a=a: start(dir, memory=a), "memory=") for a in (3, "", "s3://a/b", "file:///tmp/x")),
        *((lambda a=a: start(a), r"must be a function of \(run\)") for a in (lambda: 1, lambda a, b: 1)),
        (lambda: start(later, every=0), r"(?s)every=0.*main=.*an async function"),
        (
            lambda: start(lambda run: run.state(PLAIN, None, data=[1])),
            r"(?s)train=Step: must be.*data, private: .* need a path",
        ),
        *(
            (lambda a=a: looped(lambda run, step, state: list(run.steps(state, a))), "stop=.*whole number")
            for a in ("5", 5.0, True)
        ),
        (lambda: looped(lambda run, step, state: list(run.steps(None, 5))), "state=None: must be what run.state"),
        (
            lambda: looped(lambda run, step, state: run.save(None, meta=[1]), path=Path("x")),
            "state=None: must be the run's",
        ),
        (
            lambda: looped(lambda run, step, state: run.save(state, meta={"fzero.run": 1}), path=Path("x")),
            "reserved for the run",
        ),
        (
            lambda: looped(lambda run, step, state: 1, health=care(check_replicas_every=True)),
            "check_replicas_every=True: must be a whole number",
        ),
    ]
    for call, words in wrong:
        with pytest.raises(fz.errors.FzeroValueError, match=words):
            call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "a")
        with pytest.raises(fz.errors.FzeroValueError, match="no integers in\n  RANK='a'"):
            fz.run(dir)


PLAIN = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))


NUMBERS: Any = list(range(9))


def looped(loop: Any, *, told: bool = False, path: Path | None = None, **on: Any) -> Any:
    """The run after such a loop over (run, train, state), and the code that it ended with."""
    seen: list[Any] = []

    def main(run: Any) -> None:
        train = fz.compile(PLAIN, run.mesh, backend="eager")
        state = run.state(train, {"w": torch.ones(2)}, path=path)
        seen.append(run)
        loop(run, lambda: train(state, torch.ones(2)), state)

    try:
        fz.run(main, **on)
    except SystemExit as error:
        assert told
        return seen[0], error.code
    return seen[0], 0


def test_loops_that_count_otherwise_than_the_run(tmp_path: Path) -> None:
    """What ranks keep goes by batches: a state that moves on without them, or batches without it, are refused."""

    def own(run: Any, step: Any, state: Any) -> None:
        for _ in range(3):
            step()
            run.commit(state)

    def twice(run: Any, step: Any, state: Any) -> None:
        for _ in run.steps(state, 4):
            step()
            run.commit(state)
            step()
            run.commit(state)

    def saved(run: Any, step: Any, state: Any) -> None:
        step()
        run.save(state)

    def listed(run: Any, step: Any, state: Any) -> None:
        for _ in list(run.steps(state, 4)):
            step()
            run.commit(state)

    def short(run: Any, step: Any, state: Any) -> None:
        for _ in list(run.steps(state, 2)):
            step()
            run.commit(state)

    def loaded(run: Any, step: Any, state: Any) -> None:
        data = torch.utils.data.DataLoader(NUMBERS, batch_size=None, sampler=run.steps(state, 8), num_workers=1)
        for _ in data:
            step()
            run.commit(state)

    def again(run: Any, step: Any, state: Any) -> None:
        run.state(fz.compile(PLAIN, run.mesh, backend="eager"), {"w": torch.ones(2)})

    counts, ahead = (
        r"run\.(commit|save): the step was called 1 times more, after the same \d batches",
        r"(?s)run.steps: the iterator is read in advance.*skip=",
    )
    words = {own: counts, twice: counts, saved: counts, short: ahead, listed: ahead, loaded: ahead, again: "one state"}
    for loop, said in words.items():
        with pytest.raises(fz.errors.FzeroValueError, match=said):
            looped(loop, path=tmp_path / loop.__name__)
        assert not (tmp_path / loop.__name__).exists()

    def fine(run: Any, step: Any, state: Any) -> None:
        for index in run.steps(state, 6):
            if index == 2:  # a batch that is left out
                continue
            step()
            if index % 2:
                step()
            run.commit(state)
            run.commit(state)
        run.save(state)
        run.commit(state)
        for _ in torch.utils.data.DataLoader(NUMBERS, batch_size=None, sampler=run.steps(state, 9)):
            step()
            run.save(state)

    looped(fine, path=tmp_path / "fine")
    assert fz.checkpoint.describe(tmp_path / "fine").meta["fzero.run"] == {"seen": 9}


@pytest.mark.parametrize("leaves", ["break", "last", "after", "saved", "behind"])
def test_a_signal_that_no_turn_of_the_loop_has_seen(tmp_path: Path, leaves: str) -> None:
    def loop(run: Any, step: Any, state: Any) -> None:
        for index in run.steps(state, 3):
            step()
            run.commit(state)
            if leaves == "break" and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                break
            if leaves == "last" and index == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        if leaves in ("saved", "behind"):
            run.save(state, meta={"by": "me"}, wait=leaves == "saved")
        if leaves in ("after", "saved", "behind"):
            os.kill(os.getpid(), signal.SIGTERM)

    run, code = looped(loop, told=True, path=tmp_path)
    assert (code, run.stopping) == (143, True)
    found = fz.checkpoint.describe(tmp_path)
    assert found.step == (2 if leaves == "break" else 3) == found.meta["fzero.run"]["seen"]
    assert ("by" in found.meta) == (leaves in ("saved", "behind")), "what is on disk already is not saved again"


def test_memory_is_the_users_alone_and_swept(tmp_path: Path) -> None:
    found = host_directory.memory(tmp_path)
    assert found.stat().st_mode & 0o777 == 0o700 and found.parent.name == f"fzero-{os.getuid()}"
    dead, other, strange = (found.parent / name for name in (found.name.partition("-")[0] + "-1-0", "7-1-0", "notes"))
    for directory in (dead, other, strange):
        directory.mkdir()
    assert host_directory.memory(tmp_path) == found and not dead.exists()
    assert strange.exists() and other.exists(), "another container's processes are not known here"
    found.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="is open to other users"):
        host_directory.memory(tmp_path)


@pytest.mark.parametrize(
    ("removes", "lingers", "user", "warned"),
    [("yes", "no", 1000, True), ("no", "no", 1000, False), ("yes", "yes", 1000, False), ("yes", "no", 999, False)],
)
def test_a_logout_that_removes_kept_states_is_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: str, lingers: str, user: int, warned: bool
) -> None:
    script = tmp_path / "loginctl"
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$*" = "show-session --property=RemoveIPC" ]; then echo RemoveIPC={removes}\n'
        f'elif [ "$*" = "show-user {user} --property=Linger" ]; then echo Linger={lingers}\n'
        "else exit 1; fi\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert host_directory.logout_removes(Path("/dev/shm/fzero-1000/run")) == warned
    assert not host_directory.logout_removes(tmp_path), "only what is in /dev/shm"
    monkeypatch.setenv("PATH", "")
    assert not host_directory.logout_removes(Path("/dev/shm/fzero-1000/run"))


def test_a_store_that_is_gone_ends_the_run_by_name() -> None:
    def main(run: Any) -> None:
        raise torch.distributed.DistNetworkError("Failed to recv, got 0 bytes.")

    with pytest.raises(fz.errors.DivergenceError, match=r"(?s)run: the store is gone.*Failed to recv.*rdzv-endpoint"):
        fz.run(main)
