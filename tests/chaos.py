"""Strikes a run under `python -m fzero.run` with faults of every kind, and checks that it goes on as if there were
none.

    python tests/chaos.py --ranks 3 --kills 100 --seed 0

A run of 400 steps is started by torchrun, as a user starts it. A plan, drawn from the seed, says which fault strikes
which rank in which step: the ranks carry it out on themselves, at a random moment of that step or at the line that the
kind names. Where torchrun itself is ended, it is started again, as a scheduler does. Afterwards the run is compared
with one without faults, and what docs/elastic.md promises is checked, condition by condition. The log, and a summary
as Markdown and JSON, are written to `--results`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
SAVE_EVERY = 10  # steps
GONE = {"torchrun": 5.0, "term": 30.0}  # seconds in which all processes have ended
IDLE = 60.0  # seconds a fault may cost on an idle machine
STUCK = 240.0  # seconds without a step after which the run is taken to hang

KINDS = {
    "trainer": "a rank is killed, at any moment of a step",
    "transfer": "a rank is killed in a transfer",
    "two": "two ranks are killed at once",
    "all": "all ranks are killed at once",
    "mesh": "a rank is killed, and while all come together again another, in make_mesh",
    "init": "a rank is killed, and another one while the state is restored",
    "build": "a rank is killed, and another one while it builds the step",
    "save": "a rank is killed while it writes a checkpoint",
    "commit": "rank 0 is killed while it makes a checkpoint the latest",
    "keeper": "a keeper is killed",
    "torchrun": "torchrun is killed",
    "term": "torchrun gets SIGTERM",
    "stop": "a rank is stopped (SIGSTOP)",
    "raise": "the script raises on one rank",
    "disk": "there is no room for a checkpoint",
    "memory": "a rank is killed, and when it comes back the host's memory is full",
}
RARE = {"stop": 0.5, "torchrun": 0.5}  # each costs tens of seconds
ON_DISK = ("save", "commit", "disk", "torchrun", "term")  # which only a run with checkpoints takes


@dataclass
class Strike:
    """What a rank does to itself. `after`: the strike of the same fault that comes before it."""

    id: str
    fault: int
    kind: str
    rank: int
    where: str
    action: str
    step: int
    delay: float = 0.0
    nth: int = 0
    after: str = ""


def draw(kills: int, ranks: int, steps: int, seed: int, kinds: list[str]) -> list[Strike]:
    """The plan: faults at different steps, each kind about as often as the others."""
    chance, strikes = random.Random(seed), list[Strike]()
    at = sorted(chance.sample(range(2, steps - 2), kills))
    if steps >= 100 and kills >= len(kinds):
        drawn = kinds + chance.choices(kinds, [RARE.get(k, 1.0) for k in kinds], k=kills - len(kinds))
        chance.shuffle(drawn)
    else:
        drawn = chance.sample(kinds, kills) if kills <= len(kinds) else chance.choices(kinds, k=kills)
    for fault, (step, kind) in enumerate(zip(at, drawn, strict=True)):
        strikes += _strikes(chance, fault, kind, step, ranks)
    return strikes


def _strikes(chance: random.Random, fault: int, kind: str, step: int, ranks: int) -> list[Strike]:
    """What a fault of a kind does to whom."""
    one, other = chance.sample(range(ranks), 2)
    made: list[Strike] = []

    def add(rank: int, where: str, action: str, after: str = "", late: bool = True, nth: int = 0) -> str:
        name, delay = f"{fault:03d}-{kind}-{len(made)}", chance.random() * 0.02 if late else 0.0
        made.append(Strike(name, fault, kind, rank, where, action, step, delay, nth, after))
        return name

    if kind in ("mesh", "init", "build", "memory"):
        first, whom = add(one, "step", "kill"), chance.choice([one, other])
        full = kind == "memory"
        add(one if full else whom, kind, "full" if full else "kill", first, False, 0 if full else chance.randrange(2))
    elif kind == "transfer":
        add(one, "transfer", "kill", late=False, nth=chance.randrange(6))
    elif kind in ("two", "all"):
        for rank in (one, other) if kind == "two" else range(ranks):
            add(rank, "step", "kill")
    elif kind in ("save", "disk"):
        add(one, "save", "kill" if kind == "save" else "full", late=False)
    elif kind == "commit":
        add(0, "commit", "kill", late=False, nth=chance.randrange(2))
    else:
        add(one, "step", {"trainer": "kill"}.get(kind, kind), late=kind != "raise")
    return made


# --- a rank ---


class Struck:
    """The faults that strike this rank, and its notes."""

    def __init__(self, out: Path):
        self._out, self._waits, self.step = out, 0, -1
        self._all = [Strike(**given) for given in json.loads((out / "plan.json").read_text())]

    @property
    def _rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def _mine(self) -> list[Strike]:
        return [s for s in self._all if s.rank == self._rank] if "FZERO_RUN_SPARE" not in os.environ else []

    def note(self, *what: Any) -> None:
        with (self._out / f"notes-{self._rank}").open("a") as f:
            f.write(json.dumps([time.monotonic(), *what]) + "\n")

    def begin(self, step: int) -> None:
        """What was not taken in its step because that was over is now."""
        self.step, self._waits = step, 0
        for strike in self._mine:
            if strike.where in ("step", "transfer") and (
                strike.step < step or (strike.step == step and strike.where == "step")
            ):
                self._act(strike)

    def at(self, where: str, nth: int = 0) -> bool:
        """At a line of another kind; whether there is no room there."""
        if where == "transfer":
            self._waits, nth = self._waits + 1, self._waits
        full = False
        for strike in self._mine:
            if strike.where == where and strike.nth == nth and (strike.after or strike.step <= self.step):
                full |= self._act(strike)
        return full

    def _act(self, strike: Strike) -> bool:
        taken = self._out / "taken"
        if strike.after and not (taken / strike.after).exists():
            return False
        try:
            with (taken / strike.id).open("x") as f:
                f.write(str(time.monotonic()))
        except FileExistsError:
            return False
        if strike.action == "full":
            return True
        if strike.action == "raise":
            raise ValueError("a user's own error")
        keeper = int(os.environ["FZERO_RUN_KEEPER"])
        torchrun = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        whom, number = {
            "kill": (os.getpid(), signal.SIGKILL),
            "stop": (os.getpid(), signal.SIGSTOP),
            "keeper": (keeper, signal.SIGKILL),
            "torchrun": (torchrun, signal.SIGKILL),
            "term": (torchrun, signal.SIGTERM),
        }[strike.action]
        if strike.delay:
            threading.Timer(strike.delay, os.kill, (whom, number)).start()
        else:
            os.kill(whom, number)
        return False


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def plant(struck: Struck) -> None:
    """Has fzero's own functions ask, at the lines that the kinds name, whether a fault strikes there."""
    import fzero.mesh
    from fzero.checkpoint import format, saving
    from fzero.comm.shared import SharedMemory
    from fzero.elastic.vault import Vault
    from fzero.runtime import compiled
    from fzero.runtime.training import CompiledStep

    def around(holder: Any, name: str, where: str, instead: Any = None) -> None:
        before = getattr(holder, name)

        def asking(*args: Any, **kwargs: Any) -> Any:
            if struck.at(where) and instead is not None:
                return instead(before, *args, **kwargs)
            result = before(*args, **kwargs)
            struck.at(where, 1)
            return result

        setattr(holder, name, asking)

    def in_full_memory(before: Any, *args: Any, **kwargs: Any) -> Any:
        allocate, write = os.posix_fallocate, Path.write_text
        os.posix_fallocate, Path.write_text = no_room, no_room
        try:
            return before(*args, **kwargs)
        finally:
            os.posix_fallocate, Path.write_text = allocate, write

    around(fzero.mesh, "meet", "mesh")
    around(CompiledStep, "restore", "init")
    around(compiled, "build", "build")
    around(format, "write", "save", lambda before, *args, **kwargs: no_room())
    around(saving, "commit", "commit")
    around(SharedMemory, "wait", "transfer")
    around(Vault, "open", "memory", in_full_memory)


def worker(args: argparse.Namespace) -> None:
    import survivor

    import fzero as fz

    out = Path(args.out)
    struck = Struck(out)
    plant(struck)

    def main(run: Any) -> None:
        train = fz.compile(survivor.STEP, run.mesh, backend="eager")
        state = run.state(train, survivor.init, fz.random.key(0), path=None if args.no_disk else out / "saved")
        struck.note("from", run.source, int(state.step))
        for step in run.steps(state, args.steps):
            struck.begin(step)
            state, metrics = train(state, survivor.batch_at(step, **run.place))
            struck.note("done", step + 1, float(metrics["loss"]))
            run.keep(state)
            struck.note("kept", step + 1)
            if not args.no_disk and (step + 1) % SAVE_EVERY == 0 and run.save(state, keep=2) is not None:
                struck.note("saved", step + 1)
        if not run.stopping:
            whole = fz.tree.leaves(train.gather(state))
            struck.note("end", hashlib.sha256(b"".join(x.numpy().tobytes() for x in whole)).hexdigest())

    fz.run(main, timeout=120)


# --- the driver ---


@dataclass
class Report:
    """What came of a run."""

    lines: list[str] = field(default_factory=list)
    conditions: list[tuple[int, str, str, str]] = field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0
    slow: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def check(self, number: int, promise: str, problems: list[str], unless: str = "") -> None:
        verdict = "not checked" if unless else "no" if problems else "yes"
        self.conditions.append((number, promise, verdict, unless or "; ".join(problems[:5])))


class Driver:
    """One run, started again where a fault has ended it whole."""

    def __init__(self, args: argparse.Namespace, out: Path, plan: list[Strike]):
        self._args, self._out, self._plan = args, out, plan
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.report = Report()
        self._pids: list[int] = []  # of torchrun
        out.mkdir(parents=True)
        self.taken.mkdir()
        (out / "tmp").mkdir()
        (out / "plan.json").write_text(json.dumps([asdict(s) for s in plan]))

    def run(self) -> None:
        begin = time.monotonic()
        while not self.report.ended:
            self._life()
        self.report.seconds = time.monotonic() - begin

    def _life(self) -> None:
        """torchrun from its start to its end."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=10000"]
        command += [f"--nproc-per-node={self._args.ranks}", "-m", "fzero.run", "--hang", str(self._args.hang)]
        command += self._args.flags.split()
        command += [__file__, "--worker", "--out", str(self._out), "--steps", str(self._args.steps)]
        command += ["--no-disk"] if self._args.no_disk else []
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        env |= {"FZERO_CHAOS": self._mark, "TMPDIR": str(self._out / "tmp"), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": str(TESTS.parent)}
        before = self._taken()
        with (self._out / "output").open("ab") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, cwd=self._out, start_new_session=True
            )
        self._pids.append(process.pid)
        try:
            self._watch(process, before)
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes], seen: set[str]) -> None:
        at, since, steps = time.monotonic(), time.monotonic(), -1
        struck_at = {}
        while process.poll() is None:
            time.sleep(0.1)
            now, done = time.monotonic(), self.newest()
            for name in sorted(self._taken() - seen):
                seen.add(name)
                struck_at[name] = now
                self.report.say(f"{now - at:8.1f} s  step {done:4d}  {name}")
            if done != steps:
                steps, since = done, now
            if now - since > STUCK:
                self._stacks()
                self.report.ended = f"no step for {STUCK:g} s after step {done}"
                return
        kinds = [name.split("-")[1] for name in seen]
        ending = [name for name in struck_at if name.split("-")[1] in GONE]
        last = max(ending, key=struck_at.__getitem__, default=None)
        if process.returncode == 0 and self.newest() >= self._args.steps:
            self.report.ended = "whole"
        elif last is None:
            self.report.ended = f"torchrun ended with code {process.returncode} after step {self.newest()}"
        self.report.say(f"torchrun ended with code {process.returncode} in step {self.newest()}, {len(kinds)} strikes")
        begin, limit = time.monotonic(), GONE[last.split("-")[1]] if last else 5.0
        while self.processes() and time.monotonic() - begin < limit:
            time.sleep(0.05)
        if left := self.processes():
            still = sorted(left.values())
            self.report.slow.append(f"{limit:g} s after torchrun's end ({last}) there are still {still}")

    @property
    def starts(self) -> int:
        return len(self._pids)

    def left(self) -> list[str]:
        """What is there of this run after its end."""
        owned = tuple(f"-{pid}-" for pid in self._pids)
        memory = [str(p) for p in Path("/dev/shm").glob("fzero-*/*") if any(pid in p.name for pid in owned)]
        theirs = ("torchelastic_", "torchinductor_")
        files = [p.name for p in (self._out / "tmp").iterdir() if not p.name.startswith(theirs)]
        return memory + files + sorted(self.processes().values())

    def _stacks(self) -> None:
        for pid, name in self.processes().items():
            if "--worker" in name and "fzero.run" not in name:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(2)

    def processes(self) -> dict[int, str]:
        """Those of this run that live, by number."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"FZERO_CHAOS={self._mark}".encode() not in (path / "environ").read_bytes():
                    continue
                if (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(path.name)] = command
        return found

    @property
    def taken(self) -> Path:
        return self._out / "taken"

    def _taken(self) -> set[str]:
        return {path.name for path in self.taken.iterdir()}

    def notes(self) -> dict[int, list[list[Any]]]:
        return {
            int(path.name.removeprefix("notes-")): [
                json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")
            ]
            for path in sorted(self._out.glob("notes-*"))
        }

    def newest(self) -> int:
        """The newest step that rank 0 has done."""
        path = self._out / "notes-0"
        if not path.exists():
            return -1
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - 4096))
            lines = f.read().decode().splitlines()
        done = [json.loads(x)[2] for x in lines if x.startswith("[") and x.endswith("]") and ' "kept"' in x]
        return done[-1] if done else -1


def curve(notes: dict[int, list[list[Any]]]) -> dict[int, set[float]]:
    """By step, the losses that any rank has seen."""
    found: dict[int, set[float]] = {}
    for lines in notes.values():
        for _, what, *more in lines:
            if what == "done":
                found.setdefault(more[0], set()).add(more[1])
    return found


def redone(notes: dict[int, list[list[Any]]]) -> list[tuple[float, str, int, int]]:
    """Where the run went on: when, from what, the step, and how many steps that all had kept it does again."""
    found = []
    for at, source, step in [(x[0], x[2], x[3]) for x in notes[0] if x[1] == "from"]:
        kept = [[0, *(x[2] for x in lines if x[1] == "kept" and x[0] < at)][-1] for lines in notes.values()]
        found.append((at, source, step, max(0, min(kept) - step)))
    return found


def needless(driver: Driver, again: list[tuple[float, str, int, int]], notes: dict[int, list[list[Any]]]) -> list[str]:
    """Steps that were done again without need: what was in memory is lost with torchrun, and what was on disk never. A
    rank that is lost while the run is told to stop leaves nobody who could save."""
    struck = {float((driver.taken / name).read_text() or 0): name.split("-")[1] for name in driver._taken()}
    problems = []
    for at, source, step, num in again:
        saved = max([x[2] for lines in notes.values() for x in lines if x[1] == "saved" and x[0] < at], default=0)
        ends = [(t, kind) for t, kind in sorted(struck.items()) if kind in GONE and t < at][-1:]
        alone = not [t for t in struck if ends and ends[0][0] - 1 < t < at and t != ends[0][0]]
        if num and source == "memory":
            problems.append(f"{num} steps done again from memory at step {step}")
        elif source != "memory" and step < saved:
            problems.append(f"goes on from {source} at step {step}, though step {saved} is saved")
        elif num and (not ends or (ends[0][1] == "term" and alone)):
            problems.append(f"{num} steps done again from {source} at step {step}")
    return problems


def judge(driver: Driver, calm: Driver, args: argparse.Namespace, plan: list[Strike]) -> None:
    """Checks what docs/elastic.md promises."""
    report, notes, still = driver.report, driver.notes(), calm.notes()
    output = (Path(args.out) / "struck" / "output").read_text(errors="replace")
    kinds = Counter(s.kind for s in {s.fault: s for s in plan}.values())
    taken = driver._taken()
    limit = calm.report.seconds + IDLE * args.kills
    problems = [] if report.ended == "whole" else [report.ended]
    problems += [f"{s.id} has not struck" for s in plan if s.id not in taken]
    problems += [f"it took {report.seconds:.0f} s, more than {limit:.0f}"] if report.seconds > limit else []
    report.check(1, "the run ends by itself, with code 0, nobody helps", problems)
    mine, theirs = curve(notes), curve(still)
    odd = [f"step {s}: {sorted(mine.get(s, ()))} for {sorted(theirs[s])}" for s in theirs if mine.get(s) != theirs[s]]
    ends = [{x[2] for lines in n.values() for x in lines if x[1] == "end"} for n in (notes, still)]
    odd += [] if ends[0] == ends[1] and len(ends[0]) == 1 else [f"digests {ends[0]} for {ends[1]}"]
    report.check(2, "all losses and the final state are those of the run without faults, bit for bit", odd)
    missing = [f"step {s} is in no rank's notes" for s in range(1, args.steps + 1) if s not in mine]
    again = redone(notes)
    missing += needless(driver, again, notes)
    report.check(3, "every step is in the notes; after the loss of processes none is done again, after torchrun's "
                 "those since the last checkpoint", missing)  # fmt: skip
    report.check(4, "the same without any checkpoint", [], "" if args.no_disk else "run with --no-disk")
    unnamed = output.count("has done nothing for") < kinds["stop"]
    report.check(5, "a stopped rank is named and replaced", ["not every stopped rank was named"] if unnamed else [],
                 "" if kinds["stop"] else "none was")  # fmt: skip
    report.check(6, "SIGTERM, and the end of torchrun: nobody is left after 30 and 5 s; the next start goes on from "
                 "there", report.slow, "" if kinds["term"] + kinds["torchrun"] else "none came")  # fmt: skip
    warned = output.count("No space left on device") >= kinds["disk"]
    report.check(7, "no room for a checkpoint: the run goes on and says so, and the last one is whole",
                 [] if warned else ["nobody said so"], "" if kinds["disk"] else "there was room")  # fmt: skip
    if not args.no_disk:
        import fzero as fz

        with contextlib.suppress(IndexError):
            saved = Path(args.out) / "struck" / "saved"
            try:
                fz.checkpoint.verify(saved)
            except fz.errors.FzeroError as error:
                report.check(7, "the last checkpoint is whole", [str(error)])
    report.check(8, "afterwards there is no process, and nothing of it in /dev/shm or /tmp", driver.left())
    report.check(9, "what keeping and recovering cost", [], "benchmarks/elastic.py")
    report.check(10, "flipped bits are found", [], "not planted here")


def publish(args: argparse.Namespace, report: Report, plan: list[Strike], calm: Driver, driver: Driver) -> None:
    kinds = Counter(s.kind for s in {s.fault: s for s in plan}.values())
    again = redone(driver.notes())
    text = ["# Chaos", "", f"`python tests/chaos.py --ranks {args.ranks} --kills {args.kills} --seed {args.seed}"
            f"{' --no-disk' if args.no_disk else ''}`: one run of {args.steps} steps.", "",
            "| | promise | kept | |", "|---|---|---|---|"]  # fmt: skip
    text += [f"| {n} | {promise} | {verdict} | {more} |" for n, promise, verdict, more in report.conditions]
    text += ["", "| fault | times |", "|---|---|"]
    text += [f"| {KINDS[kind]} | {kinds[kind]} |" for kind in KINDS if kinds[kind]]
    text += ["", f"torchrun was started {driver.starts} times. The run went on {len(again)} times, "
             f"{sum(x[1] == 'memory' for x in again)} of them from memory; {sum(x[3] for x in again)} completed steps "
             "were done again."]  # fmt: skip
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{args.name}.md").write_text("\n".join(text) + "\n")
    data = {
        "ranks": args.ranks, "kills": args.kills, "seed": args.seed, "steps": args.steps, "no_disk": args.no_disk,
        "conditions": report.conditions, "kinds": kinds, "starts": driver.starts,
        "went_on": [{"source": s, "step": step, "redone": n} for _, s, step, n in again],
    }  # fmt: skip
    (folder / f"{args.name}.json").write_text(json.dumps(data) + "\n")
    (folder / f"{args.name}.log").write_text("\n".join(report.lines) + "\n")


def main() -> int:
    text = "\n".join([*(__doc__ or "").splitlines()[2:], "faults:", *(f"  {k:9s} {v}" for k, v in KINDS.items())])
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100, help="faults")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="of faults, by comma; by default all")
    parser.add_argument("--no-disk", action="store_true", help="no checkpoint is ever written")
    parser.add_argument("--hang", type=float, default=10.0, help="of python -m fzero.run")
    parser.add_argument("--flags", default="", help="further ones of python -m fzero.run")
    parser.add_argument("--out", help="an empty folder for the run; by default one that is removed when all is well")
    parser.add_argument("--results", help="where the summary is written; by default nowhere")
    parser.add_argument("--name", default="chaos", help="of the summary")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    kinds = args.kinds.split(",") if args.kinds else list(KINDS)
    kinds = [k for k in kinds if not (args.no_disk and k in ON_DISK)]
    if wrong := [k for k in kinds if k not in KINDS]:
        parser.error(f"--kinds: {', '.join(wrong)}: of {', '.join(KINDS)}")
    if args.ranks < 2 or not 0 < args.kills <= args.steps - 4:
        parser.error("--ranks must be at least 2, and --kills between 1 and --steps - 4")
    args.out = str(Path(args.out).resolve()) if args.out else tempfile.mkdtemp(prefix="chaos-")
    plan = draw(args.kills, args.ranks, args.steps, args.seed, kinds)
    calm = Driver(args, Path(args.out) / "calm", [])
    calm.run()
    driver = Driver(args, Path(args.out) / "struck", plan)
    driver.run()
    report = driver.report
    judge(driver, calm, args, plan)
    for number, promise, verdict, more in report.conditions:
        report.say(f"{number:2d}  {promise}: {verdict}{f' ({more})' if more else ''}")
    if args.results:
        publish(args, report, plan, calm, driver)
    broken = [c for c in report.conditions if c[2] == "no"]
    if broken:
        print(f"the run's folder: {args.out}", flush=True)
    else:
        shutil.rmtree(args.out, ignore_errors=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
