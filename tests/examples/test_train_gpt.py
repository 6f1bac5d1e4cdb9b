"""The example: its flags, what it prints and leaves behind, and how it goes on."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from forks import children
from scripts import ROOT, Script, as_main, environment, fresh_modules, losses, records

import fzero as fz

pytestmark = pytest.mark.forks

TINY = (
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--seq",
    "32",
    "--batch",
    "12",
    "--accumulate",
    "2",
    "--backend",
    "eager",
    "--dtype",
    "fp32",
)
EXAMPLE = Script("train_gpt.py", TINY)
KEYS = {"step", "loss", "grad_norm", "finite", "entropy", "accuracy", "lr", "tokens_per_s", "step_s", "peak_bytes"}


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory):
    """Eight deterministic steps without a pause on 2 ranks under ZeRO-3, with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("straight")
    done = EXAMPLE.on(
        pool.run,
        "--steps",
        8,
        "--save-every",
        4,
        "--deterministic",
        "--out",
        folder / "out",
        "--json",
        folder / "log",
        ranks=2,
    )
    return folder, done.stdout


def at_step_4(straight: Path, folder: Path) -> Path:
    """The directory of a run that was killed between steps 4 and 8."""
    shutil.copytree(straight / "out", folder / "out", ignore=shutil.ignore_patterns("step-00000008", "latest"))
    shutil.copy(straight / "log", folder / "log")  # its last lines are of steps that were not saved
    return folder / "out"


@pytest.mark.full
def test_what_a_run_prints_and_writes(straight):
    folder, printed = straight
    log = records(folder / "log")
    assert [r["step"] for r in log] == list(range(1, 9))
    assert all(
        set(r) == KEYS
        and r["step_s"] > 0
        and r["tokens_per_s"] == pytest.approx(12 * 32 / r["step_s"])
        and r["peak_bytes"] > 1 << 20
        for r in log
    )
    assert 5.4 < log[0]["loss"] < 5.7 and log[-1]["loss"] < log[0]["loss"] - 0.3, "log(256) is 5.545"
    lines = re.findall(
        r"^step (\d)/8  loss ([\d.]+)  grad_norm [\d.]+  lr [\de.-]+  [\d,]+ tokens/s  [\d,]+ MiB$",
        printed,
        re.MULTILINE,
    )
    assert [(int(step), loss) for step, loss in lines] == [(r["step"], f"{r['loss']:.4f}") for r in log], (
        "once each: only rank 0 prints"
    )
    validation = re.search(r"^validation loss ([\d.]+); checkpoint of step 8 in (.*)$", printed, re.MULTILINE)
    assert validation and 3 < float(validation[1]) < 5.5 and Path(validation[2]) == folder / "out"
    assert "a sample:\n\n    def " in printed and "\x1b[" not in printed, "no terminal: no control characters"
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["latest", "step-00000004", "step-00000008"]


@pytest.mark.full
def test_resume_on_the_same_mesh_is_exact(run_ranks, straight, tmp_path):
    folder, _ = straight
    out = at_step_4(folder, tmp_path)
    done = EXAMPLE.on(
        run_ranks, "--steps", 8, "--save-every", 4, "--out", out, "--json", tmp_path / "log", "--resume", ranks=2
    )
    assert "resuming at step 4" in done.stdout
    assert losses(tmp_path / "log") == losses(folder / "log"), "to the last bit, and each step once"


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "zero"), [(1, 3), (3, 1)])
def test_resume_on_another_mesh_and_stage(run_ranks, straight, tmp_path, ranks, zero):
    folder, _ = straight
    out = at_step_4(folder, tmp_path)
    EXAMPLE.on(
        run_ranks, "--steps", 8, "--out", out, "--json", tmp_path / "log", "--resume", "--zero", zero, ranks=ranks
    )
    assert losses(tmp_path / "log") == pytest.approx(losses(folder / "log"), rel=1e-5)


@pytest.mark.full
def test_resume_on_another_tensor(run_ranks, straight, tmp_path):
    """Matrices are cut in two from step 5 on, whole from step 7 on, and cut again in step 8."""
    out = at_step_4(straight[0], tmp_path)
    for start, tensor, every in ((4, 2, 2), (6, 1, 1), (7, 2, 1)):
        for later in range(start + 1, 9):
            shutil.rmtree(out / f"step-{later:08d}", ignore_errors=True)
        flags = ("--save-every", every, "--out", out, "--json", tmp_path / "log", "--resume", "--tensor", tensor)
        done = EXAMPLE.on(run_ranks, "--steps", 8, *flags, ranks=tensor)
        assert f"resuming at step {start}" in done.stdout
        assert losses(tmp_path / "log") == pytest.approx(losses(straight[0] / "log"), rel=1e-5)


def test_resume_of_a_finished_run_only_samples(run_ranks, straight, tmp_path):
    shutil.copytree(straight[0] / "out", tmp_path / "out")
    done = EXAMPLE.on(run_ranks, "--steps", 8, "--out", tmp_path / "out", "--resume")
    assert "resuming at step 8" in done.stdout and "a sample:" in done.stdout and "step 8/8" not in done.stdout


@pytest.mark.full
def test_printed_program(run_ranks, tmp_path):
    done = EXAMPLE.on(
        run_ranks, "--steps", 1, "--zero", 2, "--dtype", "bf16", "--print-program", "--out", tmp_path / "out", ranks=2
    )
    assert (
        "shard_grads(axis='data')" in done.stdout
        and "mixed_precision(compute='bf16', params='fp32', reduce='fp32')" in done.stdout
    )
    assert (
        done.stdout.count("reduce_scatter_start(") >= 3
        and done.stdout.count("(step, params, opt_state, key, extras, batch):") == 1
    )


@pytest.mark.full
def test_products_in_8_bits(run_ranks, straight, tmp_path):
    flags = ("--steps", 8, "--fp8", "tensor", "--print-program", "--out", tmp_path / "out", "--json", tmp_path / "log")
    done = EXAMPLE.on(run_ranks, *flags, ranks=2)
    assert "fp8(scales='tensor'" in done.stdout
    (*_, last), (*_, want) = losses(tmp_path / "log"), losses(straight[0] / "log")
    assert last != want and last == pytest.approx(want, rel=0.01)


@pytest.mark.full
def test_without_a_compiler_nothing_is_compiled(run_ranks, tmp_path, parse):
    script = Script("train_gpt.py", tuple(f for f in TINY if f not in ("--backend", "eager")))
    (tmp_path / "bin").mkdir()
    done = script.on(
        run_ranks, "--layers", 1, "--steps", 1, "--out", tmp_path / "out", PATH=str(tmp_path / "bin"), CXX=""
    )
    assert done.stdout.startswith("note: there is no C++ compiler") and ", eager, " in done.stdout
    assert parse("--backend", "inductor").backend == "inductor"
    if fz.has_compiler():
        assert parse().backend == "inductor"


@pytest.fixture
def parse(monkeypatch):
    """What the script makes of flags, in this process."""
    with fresh_modules():
        console = importlib.import_module("console")

    def parse(*flags):
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *map(str, flags)])
        return console.parse_args(None)

    parse.to_try_next = console.to_try_next
    return parse


def test_batch_divides_on_one_to_three_processes_by_default(parse):
    args = parse()
    assert args.batch % (args.accumulate * 1 * 2 * 3) == 0, "so that a run can be resumed on any of them"


BAD_FLAGS = {
    "--batch 10 is not a multiple of 4: 1 processes x --accumulate 4": ("--batch", 10, "--accumulate", 4),
    "--width 33 is not a multiple of --heads 2": ("--width", 33, "--heads", 2),
    "--width 66 / --heads 2 is odd": ("--width", 66, "--heads", 2),
    "--steps 0 is less than 1; --heads -1 is less than 1": ("--steps", 0, "--heads", -1),
    "argument --zero: invalid choice": ("--zero", 4),
    "unrecognized arguments: --accumlate": ("--accumlate", 2),
    "--lr -1 is not from 0 to 1e+39; --label-smoothing 2 is not from 0 to 1": ("--lr", -1, "--label-smoothing", 2),
    "--z-loss nan is not from 0 to 1e+39; --timeout inf is not from 1 to 1e+39": (
        "--z-loss",
        "nan",
        "--timeout",
        "inf",
    ),
    "--json no/where.json is not a file in a folder that exists": ("--json", "no/where.json"),
    "--text no/where is not a file that can be read": ("--text", "no/where"),
    f"--text {__file__} has": ("--text", __file__, "--seq", 100_000),
    f"--out {__file__}/runs: {__file__} is not a folder that can be written": ("--out", f"{__file__}/runs"),
}


@pytest.mark.parametrize("says", BAD_FLAGS)
def test_bad_flags(says, parse, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*BAD_FLAGS[says])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_bad_flags_are_an_error_under_torchrun(parse, capsys, monkeypatch):
    """torchrun prints it last, below its own report."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"train_gpt.py: unrecognized arguments: --stepz 3\nFix: .*--help"
    ):
        parse("--stepz", 3)
    assert capsys.readouterr().err == ""


NEXT = {
    ("--steps", 20): ["--resume --steps 70 --zero 1", "fzero plan", "fzero show"],
    ("--out", "my runs", "--seed", 3): [
        "--seed 3 --out 'my runs' --resume --steps 200 --zero 1",
        "fzero plan",
        "fzero show",
    ],
    ("--width", 64, "--zero", 1, "--resume"): ["--width 64 --resume --steps 200 --zero 3"],
    ("--dtype", "fp32", "--stop-on-nan"): ["--dtype fp32 --stop-on-nan --resume --steps 200 --zero 1"],
    ("--batch", 3, "--accumulate", 1): ["--batch 3 --accumulate 1 --resume --steps 200 --zero 1"],
}


@pytest.mark.parametrize("given", NEXT, ids=lambda flags: " ".join(map(str, flags)))
def test_what_to_try_next_has_the_flags_that_were_given(given, parse):
    lines = parse.to_try_next(parse(*given)).splitlines()
    assert len(lines) == len(NEXT[given]) and all(says in line for says, line in zip(NEXT[given], lines, strict=True))
    assert ("torchrun --nproc-per-node 2" in lines[0]) == ("--batch" not in given), "3 rows are for one process"
    again = shlex.split(lines[0].partition("train_gpt.py")[2], comments=True)
    assert parse(*again).out == parse(*given).out


def digest(printed):
    (found,) = re.findall(r"^sha256 of the parameters: ([0-9a-f]{64})$", printed, re.MULTILINE)
    return found


def test_one_command_starts_and_goes_on(run_ranks, straight, tmp_path):
    """Where nothing is saved yet, or a first save was killed, `--resume` starts anew. Deterministic runs have one
    digest."""
    (tmp_path / "out" / ".tmp-step-00000004").mkdir(parents=True)
    command = ("--save-every", 4, "--deterministic", "--out", tmp_path / "out", "--json", tmp_path / "log", "--resume")
    done = EXAMPLE.on(run_ranks, "--steps", 8, *command, ranks=2)
    assert ": training\n" in done.stdout and "resuming" not in done.stdout
    assert losses(tmp_path / "log") == losses(straight[0] / "log")
    on = EXAMPLE.on(run_ranks, "--steps", 9, *command, ranks=2).stdout
    assert "resuming at step 8" in on and digest(done.stdout) == digest(straight[1]) != digest(on)


DAMAGES = (
    lambda out: (out / "step-00000004" / "index.json").unlink(),
    lambda out: (out / "latest").write_text("not a step"),
    lambda out: (out / "step-00000004" / "index.json").write_text("{}"),
)


@pytest.mark.full
def test_a_damaged_checkpoint_is_not_started_over(run_ranks, straight, tmp_path):
    for i, damage in enumerate(DAMAGES):
        damage(out := at_step_4(straight[0], tmp_path / str(i)))
        done = EXAMPLE.on(run_ranks, "--steps", 8, "--resume", "--out", out, ranks=2, code=2)
        assert done.stderr.count("Fix: ") == 1 and str(out) in done.stderr and "training" not in done.stdout, (
            done.stderr
        )
    (file := tmp_path / "file").write_text("not a directory")
    done = EXAMPLE.on(run_ranks, "--steps", 8, "--resume", "--out", file, ranks=2, code=2)
    assert done.stderr.count(f"{file} is not a folder that can be written") == 1 and "training" not in done.stdout, (
        done.stderr
    )


@pytest.mark.full
def test_a_text_of_the_users_own(run_ranks, tmp_path):
    """As short as can be: the loss falls, the sample is of its bytes; another text is refused on resume."""
    mine, out = tmp_path / "mine.txt", ("--out", tmp_path / "out", "--json", tmp_path / "log", "--lr", 2e-2)
    mine.write_text("ab\n" * 1100)
    EXAMPLE.on(run_ranks, "--text", mine, "--steps", 60, *out, ranks=2)
    found = records(tmp_path / "log")
    assert found[-1]["loss"] < 0.5 < 5 < found[0]["loss"]
    again = EXAMPLE.on(run_ranks, "--text", mine, "--steps", 60, *out, "--resume", ranks=2)
    assert again.stdout.partition("a sample:\n")[2].count("ab\n") > 20
    mine.write_text("ba\n" * 1100)
    refused = EXAMPLE.on(run_ranks, "--text", mine, "--steps", 61, *out, "--resume", ranks=2, code=2)
    assert "digest: saved with" in refused.stderr


def test_other_data_is_refused_on_resume(run_ranks, straight, tmp_path):
    done = EXAMPLE.on(
        run_ranks,
        "--steps",
        9,
        "--out",
        straight[0] / "out",
        "--resume",
        "--seed",
        1,
        "--batch",
        24,
        "--seq",
        16,
        ranks=2,
        code=2,
    )
    for text in ("seq: saved with 32, now 16", "batch: saved with 12, now 24", "seed: saved with 0, now 1"):
        assert done.stderr.count(text) == 1, done.stderr
    assert "digest: " not in done.stderr, "the corpus is the same"


@pytest.mark.full
def test_batches_that_were_no_step_count_as_seen(run_ranks, tmp_path):
    """In fp16, with parameters that a wild first step has made too large: a resumed run goes on with the next batch,
    not with the next step's number."""
    script = Script("train_gpt.py", (*EXAMPLE.tiny[:-1], "fp16", "--lr", "1e6", "--out", str(tmp_path / "out")))
    script.on(run_ranks, "--steps", 3)
    saved = fz.checkpoint.describe(tmp_path / "out")
    assert saved.meta["fzero.run"]["data"]["next"] == 3 > saved.step, "not every batch was a step"
    done = script.on(run_ranks, "--steps", 4, "--json", tmp_path / "log", "--resume")
    assert "resuming at step 3" in done.stdout and [r["step"] for r in records(tmp_path / "log")] == [4]


@pytest.mark.fresh
def test_bad_flags_are_told_by_one_rank(run_ranks, tmp_path):
    done = EXAMPLE.on(run_ranks, "--batch", 6, "--accumulate", 2, "--out", tmp_path / "out", ranks=2, code=2)
    assert done.stderr.count("--batch 6 is not a multiple of 4: 2 processes x --accumulate 2") == 1


def test_resume_from_another_model(run_ranks, straight):
    done = EXAMPLE.on(
        run_ranks, "--steps", 8, "--out", straight[0] / "out", "--resume", "--width", 64, "--layers", 3, code=2
    )
    assert "params.layers.2.qkv" in done.stderr and "params.head.vocab" in done.stderr


def test_stop_on_nan(run_ranks, tmp_path):
    done = EXAMPLE.on(run_ranks, "--steps", 20, "--lr", 1e38, "--stop-on-nan", "--out", tmp_path / "out", code=2)
    assert re.search(r"step \d+: loss .*, grad_norm .*: stopped", done.stderr)


@pytest.mark.exhaustive
def test_ctrl_c_saves_and_resumes(run_ranks, tmp_path):
    """On one process test_train_big.py has it, and SIGTERM under torchrun the last test here."""
    out, log = tmp_path / "out", tmp_path / "log"
    done = EXAMPLE.interrupted(log, "--steps", 2000, "--out", out, ranks=2)
    stopped = re.search(r"^stopped at step (\d+); continue with --resume$", done.stdout, re.MULTILINE)
    assert stopped, done.stdout + done.stderr
    step = int(stopped[1])
    assert len(losses(log)) == step
    assert 'train_gpt.py", line' not in done.stderr, "torchrun tells of the signal; the ranks have nothing to tell"
    EXAMPLE.on(run_ranks, "--steps", step + 2, "--out", out, "--json", log, "--resume")
    assert [r["step"] for r in records(log)] == list(range(1, step + 3))


@pytest.mark.full
def test_the_readmes_starts_run(tmp_path, monkeypatch, compiled_here):
    """Run on the default backend. The lines of README's program are lines of the second start's program."""
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    *starts, program = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    names: dict = {}
    for kind, start in zip(("module", "functions"), starts, strict=True):
        assert "backend" not in start, kind
        names.pop("metrics", None)
        exec(start, names)
        assert names["metrics"]["finite"], kind
    (call,) = re.findall(r"`(fz\.lower\(.*?\.program)`", readme)
    real = str(eval(call, names))
    shown = [line for line in program.splitlines() if line.strip() not in ("...", "")]
    missing = [line for line in shown if line not in real.splitlines()]
    assert not missing, "lines of the README that the program does not have (any more)"


def test_the_readmes_figures_are_those_measured():
    """Each row of the table, the two plans, and the recovery of a lost rank."""
    readme = (ROOT / "README.md").read_text()

    def measured(file: str) -> dict[str, list[str]]:
        rows = (ROOT / "docs" / "results" / file).read_text().splitlines()
        return {cells[0]: cells[1:] for row in rows if row.startswith("| ") and (cells := row.strip("| ").split(" | "))}

    peers = measured("peers.md")
    table = readme.partition("| | s per step |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 5
    for row in table:
        name, *figures = (cell.strip() for cell in row.strip("|").split("|"))
        assert figures == [peers[name][i] for i in (0, 5, 3)], name
    plan = (ROOT / "docs" / "reference" / "cli.md").read_text().partition("--hf examples/llama_3_8b.json")[2]
    rows = (r"step\s+([\d.]+) ms", r"([\d,]+) tokens/s", r"device memory\s+([\d.]+ GiB)")
    step, rate, whole = (re.search(row, plan)[1] for row in rows)
    assert f"{float(step):.0f} ms per step, {rate} tokens/s, {whole} per process" in readme
    seconds, tokens, share = measured("headline.md")["4, layerwise"][1:4]
    said = f"**{float(seconds):.0f} s per step of 65,536 tokens, {tokens} million tokens per day**, at {share[:-1]} %"
    assert said in readme
    lost = measured("elastic_peers.md")
    ours, theirs = lost["fz.run: memory, and a checkpoint"], lost["torchrun, FSDP2, DCP save"]
    assert f"{ours[1]} CPU seconds" in readme and ours[0] == "0 and 0"
    assert f"{theirs[1]} CPU seconds" in readme and f"{theirs[0].replace(' and ', ' to ')} steps" in readme


def terminated(rank: int, log: str, *flags: str) -> tuple[int, str]:
    """On this rank a run whose rank `rank` alone gets SIGTERM, once three steps are in the log."""

    def send() -> None:
        while not Path(log).exists() or Path(log).read_text().count("\n") < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=send, daemon=True).start()
    done = as_main(EXAMPLE.name, [*EXAMPLE.tiny, *flags, "--json", log], {})
    return done.code, done.stdout


@pytest.mark.full
def test_sigterm_to_any_rank_saves_the_step_on_all(run_ranks, tmp_path):
    out = tmp_path / "out"
    ended = run_ranks(
        2,
        terminated,
        1,
        str(tmp_path / "log"),
        "--steps",
        "2000",
        "--save-every",
        "1500",
        "--out",
        str(out),
        timeout=200,
    )
    assert [code for code, _ in ended] == [143, 143]
    stopped = re.search(r"^stopped at step (\d+); continue with --resume$", ended[0][1], re.MULTILINE)
    assert (
        stopped and fz.checkpoint.describe(out).step == int(stopped[1]) == records(tmp_path / "log")[-1]["step"] < 1500
    )


@pytest.mark.full
def test_killed_restarted_and_preempted_under_torchrun(tmp_path, monkeypatch):
    """One command: it starts, a rank is killed, torchrun starts both again, they go on from the last save, and SIGTERM
    loses nothing."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    out, log = tmp_path / "out", tmp_path / "log"
    command = EXAMPLE.command(
        "--steps", 3000, "--save-every", 3, "--timeout", 60, "--out", out, "--json", log, "--resume", ranks=2
    )
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )

    def until(condition) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)

    def steps() -> int:
        return len(records(log)) if log.exists() else 0

    def ranks() -> list[int]:
        return children(process.pid)

    try:
        until(lambda: steps() >= 4)
        first = ranks()
        os.kill(first[0], signal.SIGKILL)  # rank 0, which else tells errors
        until(lambda: len(ranks()) == 2 and not set(ranks()) & set(first))
        killed_at = steps()
        until(lambda: steps() > killed_at)  # by others
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    resumed = re.search(r"resuming at step (\d+)$", printed, re.MULTILINE)
    assert resumed and 3 <= int(resumed[1]) <= killed_at, printed + errors
    stopped = re.search(r"^stopped at step (\d+); continue with --resume$", printed, re.MULTILINE)
    assert stopped and fz.checkpoint.describe(out).step == int(stopped[1]), printed + errors
    assert [r["step"] for r in records(log)] == list(range(1, int(stopped[1]) + 1)), "each step once"
    assert errors.count("rank 0 has left") == 1 and errors.count("Fix: ") == 1, errors
    assert "wait timeout" not in errors, "c10d warns of every wait in vain"


@pytest.mark.full
@pytest.mark.fresh
def test_nobody_reads_on(tmp_path):
    """`| head -1`: a run stops after the running step, which is saved, without a word."""
    command = EXAMPLE.command("--steps", 3000, "--out", tmp_path / "out")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as run:
        assert run.stdout is not None and run.stderr is not None
        assert "training" in run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait(60) == 128 + signal.SIGPIPE and fz.checkpoint.find(tmp_path / "out") is not None


@pytest.mark.parametrize("script", ["train_gpt.py", "train_big.py"])
def test_help_shows_defaults(run_ranks, script: str) -> None:
    text = " ".join(Script(script, ()).on(run_ranks, "--help").stdout.split())
    assert "--seed N seed of parameters and data (default: 0)" in text and "(default: None)" not in text
    assert "bytes per sequence (default: 128)" in text and "(default: False)" not in text
