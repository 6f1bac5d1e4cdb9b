"""Strikes a run under `python -m fzero.run` with faults of every kind, and checks that it goes on as if there were
none.

    python tests/chaos.py --ranks 3 --kills 100 --seed 0

A plan, drawn from the seed, says which fault strikes which rank in which step: the ranks carry it out on themselves,
at a random moment of that step or at the line that the kind names. There are three runs:

- disk: of 400 steps, started by torchrun as a user starts it, on one host, with checkpoints. Where torchrun itself is
  ended, it is started again, as a scheduler does.
- hosts: of a quarter of the steps, by torchrun too, each rank on a host of its own: with a supervisor and a memory that
  the other ranks do not know, and sockets between them. The step has `fz.redundant`, and no checkpoint is ever written.
- resized: the same on one rank less and again on all, over and over. Its supervisors are started as torchrun starts
  them when hosts leave and come: all are ended, the memory of a host is lost, the others begin anew on fewer ranks.

Afterwards each is compared with one without faults, and what docs/guides/fault-tolerance.md promises is checked,
condition by condition: how it was judged, and how many faults of these runs it was judged by. With `--checks`, tests
of faults that need another setting follow. The log, and a summary as Markdown and JSON, are written to `--results`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
SAVE_EVERY = 10  # steps
GONE = {"torchrun": 5.0, "term": 30.0, "fullterm": 30.0}  # seconds in which all processes have ended
IDLE = 60.0  # seconds a fault may cost on an idle machine
STUCK = 240.0  # seconds without a step after which the run is taken to hang
CLOSE = 1e-5  # by which losses on other numbers of ranks may differ
CPU = {"replacement": 10.0, "survivor": 2.0}  # seconds to the next step, the median
RESIZED = 5  # steps on one rank less
HOST = "FZERO_CHAOS_HOST"
NOT_SAVED = "fzero.checkpoint.save: cannot save step "
GOES_ON, ENDS = rf"without this checkpoint: {NOT_SAVED}(\d+)", rf"\[rank\d+\]: {NOT_SAVED}(\d+)"

KINDS = {
    "trainer": "a rank is killed, at any moment of a step",
    "transfer": "a rank is killed in a transfer",
    "first": "a rank is killed in the first step",
    "last": "a rank is killed in the last step",
    "two": "two ranks are killed at once",
    "all": "all ranks are killed at once",
    "mesh": "a rank is killed, and while all come together again another, in the rendezvous of make_mesh",
    "init": "a rank is killed, and another one while the state is restored",
    "build": "a rank is killed, and another one while it builds the step",
    "save": "a rank is killed while it writes a checkpoint",
    "commit": "rank 0 is killed while it makes a checkpoint the latest",
    "supervisor": "a supervisor is killed",
    "torchrun": "torchrun is killed",
    "term": "torchrun gets SIGTERM",
    "stop": "a rank is stopped (SIGSTOP)",
    "raise": "the script raises on one rank",
    "disk": "there is no room for a checkpoint",
    "fullterm": "torchrun gets SIGTERM, and there is no room for the last checkpoint",
    "memory": "a rank is killed, and when it comes back the host's memory is full",
    "slot": "a bit of what a rank kept is flipped, and the rank is killed",
    "host": "a host is lost: its rank, its supervisor and its memory",
    "replica": "a bit of what another host sent is flipped, and the rank that has it is killed",
    "resize": "all ranks are ended, a host is lost; the run goes on with one rank less, and then with all",
}
CHECKS = {
    "a save that is killed, at any system call, leaves the checkpoint before it valid": [
        "tests/checkpoint/test_checkpoints.py::test_a_kill_at_any_system_call_leaves_a_valid_checkpoint",
        "tests/checkpoint/test_checkpoints.py::test_a_kill_at_any_moment_leaves_a_valid_checkpoint",
    ],
    "of two runs that save to one directory, the second is rejected, and checkpoints of neither are lost": [
        "tests/checkpoint/test_checkpoint_manager.py::test_two_runs_in_lockstep_in_one_directory",
        "tests/checkpoint/test_checkpoints.py::test_two_jobs_in_one_directory_are_rejected_and_keep_their_own_checkpoints",
        "tests/checkpoint/test_object_stores.py::test_two_jobs_that_save_one_step_delete_only_what_they_replace",
    ],
    "300 random corruptions of a checkpoint are rejected, or do not change what is read": [
        "tests/checkpoint/test_checkpoints.py::test_random_damage_is_rejected_or_loads_the_same_numbers[300]",
    ],
    "a second account without privileges opens nothing of a run, and no private checkpoint": [
        "tests/runtime/test_private_directories.py::test_another_account_opens_nothing_of_a_run",
    ],
    "a host is lost and another one comes, with stock launchers (1, 3, 2 and 3 hosts) and the default times": [
        "tests/elastic/test_changing_hosts.py::test_hosts_come_and_one_is_lost_and_another_comes",
    ],
}
"""What is promised of faults that need another setting than the three runs, and the tests that show it."""
FLIPS = ("slot", "replica")
LEGS = {
    "disk": [k for k in KINDS if k not in ("host", "replica", "resize")],
    "hosts": ["trainer", "transfer", "first", "last", "two", "all", "mesh", "init", "build", "supervisor", "stop",
              "raise", "memory", "slot", "host", "replica"],
    "resized": ["resize"],
}  # fmt: skip
ENDS_ALL = ("all", "supervisor", "torchrun", "term", "fullterm", "raise", "host", "resize")
RARE = {"stop": 0.5, "torchrun": 0.5, "fullterm": 0.5}  # each costs tens of seconds
ONCE = {"first": 0, "last": -1}  # of each run, with their steps


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
    if kills >= len(kinds):
        weights = [0.0 if k in ONCE else RARE.get(k, 1.0) for k in kinds]
        drawn = kinds + (chance.choices(kinds, weights, k=kills - len(kinds)) if any(weights) else [])
    else:
        drawn = chance.sample(kinds, kills)
    chance.shuffle(drawn)
    at = [ONCE[kind] % steps if kind in ONCE else step
          for step, kind in zip(chance.sample(range(2, steps - 2), len(drawn)), drawn, strict=True)]  # fmt: skip
    for fault, (step, kind) in enumerate(sorted(zip(at, drawn, strict=True))):
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
    elif kind == "fullterm":
        add(other, "save", "full", add(one, "step", "term"), late=False)
    elif kind == "commit":
        add(0, "commit", "kill", late=False, nth=chance.randrange(2))
    else:
        add(one, "step", {"trainer": "kill", "first": "kill", "last": "kill"}.get(kind, kind),
            late=kind not in ("last", "raise", "slot", "replica", "host"))  # fmt: skip
    return made


# --- a rank ---


class Struck:
    """The faults that strike this rank, and its notes."""

    def __init__(self, out: Path):
        self._out, self._waits, self.step, self.run = out, 0, -1, None
        self._all = [Strike(**given) for given in json.loads((out / "plan.json").read_text())]

    @property
    def _rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def _mine(self) -> list[Strike]:
        return [s for s in self._all if s.rank == self._rank]

    def note(self, *what: Any) -> None:
        with (self._out / f"notes-{self._rank}").open("a") as f:
            f.write(json.dumps([time.monotonic(), os.getpid(), time.process_time(), *what]) + "\n")

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
            if strike.kind == "fullterm" and not (self.run and self.run.stopping):
                continue  # a checkpoint that is due before the signal has come
            if strike.where == where and strike.nth == nth and (strike.after or strike.step <= self.step):
                full |= self._act(strike)
        return full

    def _takes(self, strike: Strike) -> bool:
        """Whether a strike that is due comes now: once."""
        taken = self._out / "taken"
        if strike.after and not (taken / strike.after).exists():
            return False
        try:
            with (taken / strike.id).open("x") as f:
                f.write(str(time.monotonic()))
        except FileExistsError:
            return False
        return True

    def _act(self, strike: Strike) -> bool:
        if (self._out / "taken" / strike.id).exists():
            return False
        memory = Path(os.environ["FZERO_RUN_MEMORY"])
        if strike.action in ("slot", "replica") and newest_kept(memory, strike.action, self._rank) is None:
            return False  # nothing has come yet
        if not self._takes(strike):
            return False
        if strike.action == "full":
            if strike.where == "save":
                self.note("full", self.step, self.run is not None and self.run.stopping)
            return True
        if strike.action == "raise":
            raise ValueError("a user's own error")
        if strike.action in ("slot", "replica"):
            self.note("flipped", strike.kind, *flip_kept(memory, strike.action, self._rank))
        if strike.action == "host":
            shutil.rmtree(memory)
            os.kill(int(os.environ["FZERO_RUN_SUPERVISOR"]), signal.SIGKILL)
        supervisor = int(os.environ["FZERO_RUN_SUPERVISOR"])
        torchrun = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
        whom, number = {
            **dict.fromkeys(("kill", "slot", "replica", "host"), (os.getpid(), signal.SIGKILL)),
            "stop": (os.getpid(), signal.SIGSTOP),
            "supervisor": (supervisor, signal.SIGKILL),
            "torchrun": (torchrun, signal.SIGKILL),
            "term": (torchrun, signal.SIGTERM),
        }[strike.action]
        if strike.delay:
            threading.Timer(strike.delay, os.kill, (whom, number)).start()
        else:
            os.kill(whom, number)
        return False


def newest_kept(memory: Path, kind: str, rank: int) -> tuple[int, Path, int] | None:
    """Whose the newest state is that is kept here, its file and how many batches it has seen: this rank's own ("slot"),
    or what was sent here ("replica")."""
    name = f"rank-{rank:05d}" if kind == "slot" else "replica-*"
    found = []
    for note in memory.glob(f"of-*/{name}.json"):
        content = json.loads(note.read_text())
        for slot in range(content["slots"]):
            path = note.with_name(f"{note.stem}.{slot}.safetensors")
            if sealed := int.from_bytes(path.read_bytes()[content["sealed"] :][:8], "little"):
                found.append((sealed, int(note.stem.partition("-")[2]), path))
    return (lambda sealed, owner, path: (owner, path, sealed - 1))(*max(found)) if found else None


def flip_kept(memory: Path, kind: str, rank: int) -> tuple[int, int]:
    """Flips a bit of that, as the memory's cells or a stray write would: whose, and how many batches it has seen."""
    found = newest_kept(memory, kind, rank)
    assert found is not None
    owner, path, seen = found
    content = json.loads((path.parent / f"{path.name.partition('.')[0]}.json").read_text())
    with path.open("r+b") as f:
        f.seek(offset := content["leaves"]["params.w"]["parts"][0]["offset"] + 7)
        was = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([was ^ 16]))
    return owner, seen


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def plant(struck: Struck) -> None:
    """Has fzero's own functions ask, at the lines that the kinds name, whether a fault strikes there."""
    import fzero.mesh
    from fzero.checkpoint import safetensors_format as format
    from fzero.checkpoint import saving
    from fzero.comm.collectives import ProcessGroups
    from fzero.comm.shared_memory import SharedMemory
    from fzero.elastic.memory_checkpoint import MemoryCheckpoint
    from fzero.runtime import program_build
    from fzero.runtime.compiled_step import CompiledStep

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
    around(program_build, "build", "build")
    around(format, "write", "save", lambda before, *args, **kwargs: no_room())
    around(saving, "commit", "commit")
    around(SharedMemory, "wait", "transfer")
    around(ProcessGroups, "wait", "transfer")
    around(MemoryCheckpoint, "__init__", "memory", in_full_memory)


def worker(args: argparse.Namespace) -> None:
    import survivor

    import fzero as fz
    from fzero._utils import procfs

    out = Path(args.out)
    struck = Struck(out)
    plant(struck)
    if (here := os.environ.get(HOST)) is not None:  # as if it knew no process of the other hosts
        procfs.host_id = lambda: (here, "")
    path = out / "saved" if here is None else None

    def main(run: Any) -> None:
        struck.run = run
        sends = here is not None and run.mesh.size > 1
        train = fz.compile(fz.redundant(survivor.STEP) if sends else survivor.STEP, run.mesh, backend="eager")
        state = run.state(train, survivor.init, fz.random.key(0), path=path)
        struck.note("from", run.source, int(state.step), run.mesh.size)
        for step in run.steps(state, args.steps):
            struck.begin(step)
            batch = survivor.batch_at(step, **run.data_shard)
            state, metrics = train(state, batch)
            run.commit(state)
            struck.note("done", step + 1, float(metrics["loss"]))
            struck.note("kept", step + 1)
            if path is not None and (step + 1) % SAVE_EVERY == 0 and run.save(state, keep=2) is not None:
                struck.note("saved", step + 1)
        if not run.stopping:
            whole = fz.tree.leaves(train.gather(state))
            struck.note("end", hashlib.sha256(b"".join(x.numpy().tobytes() for x in whole)).hexdigest())

    fz.run(main, timeout=120)


def supervisor(args: list[str]) -> None:
    """Becomes the supervisor of a rank that torchrun has started, on a host of its own: with a memory of its own."""
    host = os.environ["RANK"]
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", HOST: host})
    os.execv(sys.executable, [sys.executable, "-m", "fzero.run", "--memory", f"memory-{host}", *args])


# --- the driver ---


@dataclass
class Condition:
    """What is promised, how it was judged of these runs, by how many faults of theirs, and what was not as promised."""

    number: int
    promise: str
    how: str
    times: int
    problems: list[str]

    @property
    def verdict(self) -> str:
        return "failed" if self.problems else "verified" if self.times else "not exercised"


class Driver:
    """One run, started again where a fault has ended it whole.

    Attributes:
        ended: "whole", or what has ended it.
        named: when a supervisor said that its rank had stopped.
    """

    def __init__(self, args: argparse.Namespace, leg: str, steps: int, plan: list[Strike], calm: bool = False):
        self._args, self.leg, self.steps, self.plan = args, leg, steps, plan
        self._out = Path(args.out) / (leg + "-calm" * calm)
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.lines, self.slow = list[str](), list[str]()
        self.ended, self.seconds, self.named = "", 0.0, list[float]()
        self._pids: list[int] = []  # of torchrun
        self._out.mkdir(parents=True)
        self.taken.mkdir()
        (self._out / "tmp").mkdir()
        (self._out / "plan.json").write_text(json.dumps([asdict(s) for s in plan]))

    def say(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def run(self) -> Driver:
        begin = time.monotonic()
        while not self.ended:
            self._life()
        self.seconds = time.monotonic() - begin
        self.say(f"{self._out.name}: {self.ended}, {self.seconds:.0f} s")
        return self

    def _worker(self) -> list[str]:
        return [__file__, "--worker", "--out", str(self._out), "--steps", str(self.steps)]

    def _environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        env |= {"FZERO_CHAOS": self._mark, "TMPDIR": str(self._out / "tmp"), "OMP_NUM_THREADS": "1"}
        return env | {"PYTHONPATH": str(TESTS.parent)}

    def _life(self) -> None:
        """torchrun from its start to its end."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=10000"]
        command += [f"--nproc-per-node={self._args.ranks}"]
        command += ["-m", "fzero.run"] if self.leg == "disk" else [__file__, "--supervisor"]
        command += ["--hang-timeout", str(self._args.hang), *self._args.flags.split(), *self._worker()]
        before = self._taken()
        with (self._out / "output").open("ab") as output:
            process = subprocess.Popen(
                command, env=self._environment(), stdout=output, stderr=output, cwd=self._out, start_new_session=True
            )
        self._pids.append(process.pid)
        try:
            self._watch(process, before)
        finally:
            self._kill()
            process.wait()

    def _kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _watch(self, process: subprocess.Popen[bytes], seen: set[str]) -> None:
        at, since, steps = time.monotonic(), time.monotonic(), -1
        struck_at = {}
        with (self._out / "output").open(errors="replace") as output:
            output.seek(0, os.SEEK_END)
            while process.poll() is None:
                time.sleep(0.1)
                now, done = time.monotonic(), self.newest()
                self.named += [now] * output.read().count("has made no progress for")
                for name in sorted(self._taken() - seen):
                    seen.add(name)
                    struck_at[name] = now
                    self.say(f"{now - at:8.1f} s  step {done:4d}  {name}")
                if done != steps:
                    steps, since = done, now
                if now - since > STUCK:
                    self._stacks()
                    self.ended = f"no step for {STUCK:g} s after step {done}"
                    return
        ending = [name for name in struck_at if name.split("-")[1] in GONE]
        last = max(ending, key=struck_at.__getitem__, default=None)
        if process.returncode == 0 and self.newest() >= self.steps:
            self.ended = "whole"
        elif last is None:
            self.ended = f"torchrun ended with code {process.returncode} after step {self.newest()}"
        self.say(f"torchrun ended with code {process.returncode} in step {self.newest()}, {len(seen)} strikes")
        begin, limit = time.monotonic(), GONE[last.split("-")[1]] if last else 5.0
        while self.processes() and time.monotonic() - begin < limit:
            time.sleep(0.05)
        if left := self.processes():
            still = sorted(left.values())
            self.slow.append(f"{limit:g} s after torchrun's end ({last}) there are still {still}")

    @property
    def starts(self) -> int:
        return len(self._pids)

    def output(self) -> str:
        return (self._out / "output").read_text(errors="replace")

    @property
    def saved(self) -> Path:
        return self._out / "saved"

    def left(self) -> list[str]:
        """What is there of this run after its end."""
        owned = tuple(f"-{pid}-" for pid in self._pids)
        memory = [str(p) for p in Path("/dev/shm").glob("fzero-*/*") if any(pid in p.name for pid in owned)]
        memory += [str(p) for p in self._out.glob("memory-*/fzero-*/*")]
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

    def struck(self, *kinds: str) -> list[tuple[float, str]]:
        """When strikes of these kinds came, of all if none is given, and what they are."""
        found = [(float((self.taken / name).read_text() or 0), name) for name in self._taken()]
        return sorted(x for x in found if not kinds or x[1].split("-")[1] in kinds)

    def ended_all(self, begin: float, end: float) -> bool:
        """Whether all ranks were ended at once between two moments: torchrun does so when it loses a supervisor."""
        return any(begin < at < end for at, _ in self.struck(*ENDS_ALL))

    def faults(self, *kinds: str) -> int:
        """How many faults of these kinds have struck."""
        return len({name.split("-")[0] for _, name in self.struck(*kinds)})

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
        done = [json.loads(x)[4] for x in lines if x.startswith("[") and x.endswith("]") and ' "kept"' in x]
        return done[-1] if done else -1


class Resized(Driver):
    """One run on all ranks, on one less and on all again, each time with the memory of a host lost. Its supervisors are
    children of this process, as they are torchrun's, and its store is here."""

    def _life(self) -> None:
        import torch.distributed as dist

        hosts, chance = [str(i) for i in range(self._args.ranks)], random.Random(self._args.seed)
        turns = [(s.step + i * RESIZED, s.id) for s in self.plan for i in (0, 1)]
        for step, strike in [*turns, (self.steps, "")]:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            supervisors = self._start(hosts, store.port)
            try:
                if not self._until(step, supervisors):
                    return
            finally:
                for one in supervisors:
                    if strike or not self.ended:
                        one.kill()
                self._gone()
                for one in supervisors:
                    one.wait()
            if strike and len(hosts) == self._args.ranks:
                lost = chance.choice(hosts)
                shutil.rmtree(self._out / f"memory-{lost}")
                hosts.remove(lost)
                (self.taken / strike).write_text(str(time.monotonic()))
                self.say(f"{strike}: host {lost} is lost in step {self.newest()}")
            elif strike:
                hosts.append(lost)
                self.say(f"{strike}: host {lost} is there again in step {self.newest()}")

    def _start(self, hosts: list[str], port: int) -> list[subprocess.Popen[bytes]]:
        usual = self._environment() | {
            "TORCHELASTIC_RUN_ID": self._mark, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "fzero.run", "--hang-timeout", str(self._args.hang), "--memory"]
        with (self._out / "output").open("ab") as out:
            return [
                subprocess.Popen([*command, f"memory-{host}", *self._worker()], stdout=out, stderr=out, cwd=self._out,
                                 env={**usual, "RANK": str(rank), HOST: host})
                for rank, host in enumerate(hosts)
            ]  # fmt: skip

    def _until(self, step: int, supervisors: list[subprocess.Popen[bytes]]) -> bool:
        """Whether the run has come to a step; to the last one: whether it has ended."""
        steps, since = -1, time.monotonic()
        while step == self.steps or self.newest() < step:
            time.sleep(0.05)
            if self.newest() != steps:
                steps, since = self.newest(), time.monotonic()
            codes = [one.poll() for one in supervisors]
            if all(code == 0 for code in codes) and steps >= self.steps:
                self.ended = "whole"
                return True
            if any(codes) or time.monotonic() - since > STUCK:
                self._stacks()
                self.ended = f"supervisors ended with {codes} after step {steps}"
                return False
        return True

    def _gone(self) -> None:
        begin = time.monotonic()
        while self.processes() and time.monotonic() - begin < GONE["torchrun"]:
            time.sleep(0.05)
        if left := self.processes():
            self.slow.append(f"after the end of their supervisors there are still {sorted(left.values())}")
            self._kill()


Notes = dict[int, list[list[Any]]]


def curve(notes: Notes) -> dict[int, set[float]]:
    """By step, the losses that any rank has seen."""
    found: dict[int, set[float]] = {}
    for lines in notes.values():
        for _, _, _, what, *more in lines:
            if what == "done":
                found.setdefault(more[0], set()).add(more[1])
    return found


def redone(notes: Notes) -> list[tuple[float, str, int, int]]:
    """Where the run went on: when, from what, the step, and how many steps that all had kept it does again."""
    found, size = [], len(notes)
    for at, source, step, now in [(x[0], x[4], x[5], x[6]) for x in notes.get(0, ()) if x[3] == "from"]:
        before = [notes.get(rank, []) for rank in range(size)]
        kept = [[0, *(x[4] for x in lines if x[3] == "kept" and x[0] < at)][-1] for lines in before]
        found.append((at, source, step, max(0, min(kept) - step)))
        size = now
    return found


def needless(driver: Driver, notes: Notes) -> list[str]:
    """Steps that were done again without need: what was in memory is lost with torchrun, and what was on disk never. If
    a rank is lost after the run was told to stop, nothing is saved any more. One step more is done again for a state
    that was damaged, or was in the memory of a lost host alone."""
    struck, problems, last = driver.struck(), [], 0.0
    for at, source, step, num in redone(notes):
        saved = max([x[4] for lines in notes.values() for x in lines if x[3] == "saved" and x[0] < at], default=0)
        ends = [(t, name.split("-")[1]) for t, name in driver.struck(*GONE) if t < at][-1:]
        alone = not [t for t, _ in struck if ends and ends[0][0] - 1 < t < at and t != ends[0][0]]
        dear = [name for t, name in driver.struck("slot", "host", "resize") if last < t < at]
        if num > len(dear) and source == "memory":
            problems.append(f"{num} steps done again from memory at step {step}")
        elif source != "memory" and step < saved:
            problems.append(f"continues from {source} at step {step}, though step {saved} is saved")
        elif num and source != "memory" and (not ends or (ends[0][1] == "term" and alone)):
            problems.append(f"{num} steps done again from {source} at step {step}")
        last = at
    return [f"{driver.leg}: {text}" for text in problems]


def unlike(driver: Driver, calm: Driver) -> list[str]:
    """How the losses and the state of a run differ from those of one without faults."""
    notes, still = driver.notes(), calm.notes()
    mine, theirs = curve(notes), {s: x for s, x in curve(still).items() if s <= driver.steps}
    if driver.leg == "resized":
        off = {s: max(abs(x - y) for x in mine.get(s, [float("inf")]) for y in theirs[s]) for s in theirs}
        return [f"resized: step {s}: the loss is off by {x:.2g}" for s, x in off.items() if not x <= CLOSE]
    odd = [f"step {s}: {sorted(mine.get(s, ()))} for {sorted(theirs[s])}" for s in theirs if mine.get(s) != theirs[s]]
    ends = [{x[4] for lines in n.values() for x in lines if x[3] == "end"} for n in (notes, still)]
    odd += [] if ends[0] == ends[1] and len(ends[0]) == 1 else [f"digests {ends[0]} for {ends[1]}"]
    return [f"{driver.leg}: {text}" for text in odd]


def found_flips(driver: Driver) -> tuple[int, list[str]]:
    """The bits that were flipped, and those that were not named with their rank."""
    named = {
        "slot": "what rank {0} kept after {1} batches has changed in memory",
        "replica": "what rank {0} sent of its state after {1} batches has changed in memory",
    }
    flips, output = [x[4:] for lines in driver.notes().values() for x in lines if x[3] == "flipped"], driver.output()
    silent = [f"{driver.leg}: nobody said: {text}" for kind, *whose in flips
              if (text := named[kind].format(*whose)) not in output]  # fmt: skip
    if len(flips) != driver.faults(*FLIPS):
        silent.append(f"{driver.leg}: {len(flips)} bits were flipped of {driver.faults(*FLIPS)}")
    return len(flips), silent


def seconds(drivers: list[Driver]) -> dict[str, list[float]]:
    """The CPU seconds from a loss to the next step: of who takes the place, from its start, and of who stays."""
    found: dict[str, list[float]] = {"replacement": [], "survivor": []}
    for lines in (lines for driver in drivers for lines in driver.notes().values()):
        for before, at, then in zip(lines, lines[1:], lines[2:], strict=False):
            if at[3] == "from" and then[3] == "done" and at[1] == then[1]:
                same = before[1] == at[1]
                found["survivor" if same else "replacement"].append(then[2] - same * before[2])
    return found


def judge(runs: list[tuple[Driver, Driver]], args: argparse.Namespace) -> list[Condition]:
    """Checks what docs/guides/fault-tolerance.md promises, of runs and those without faults."""
    import fzero as fz

    drivers = [one for one, _ in runs]
    faults = lambda *kinds: sum(d.faults(*kinds) for d in drivers)  # noqa: E731
    every = faults()

    def ended(driver: Driver) -> list[str]:
        problems = [] if driver.ended == "whole" else [driver.ended]
        problems += [f"{s.id} has not struck" for s in driver.plan if not (driver.taken / s.id).exists()]
        return [f"{driver.leg}: {text}" for text in problems]

    problems = [text for one in drivers for text in ended(one)]
    ends = every + faults("resize")  # all ranks are ended twice for one
    took, limit = sum(d.seconds for d in drivers), sum(calm.seconds for _, calm in runs) + IDLE * ends
    problems += [f"it took {took:.0f} s, more than {limit:.0f}"] if took > limit else []
    made = list[Condition]()

    def condition(promise: str, how: str, times: int, problems: Iterable[str]) -> None:
        made.append(Condition(len(made) + 1, promise, how, times, list(problems)))

    condition(
        "the run ends by itself, with code 0, and nobody helps",
        f"code and last step of each run; all planned strikes struck; {took:.0f} s of at most {limit:.0f}",
        every,
        problems,
    )
    odd = {driver.leg: unlike(driver, calm) for driver, calm in runs}
    condition(
        "losses and the final state are those of the run without faults, bit for bit; after another number of ranks "
        f"losses within {CLOSE:g}",
        "losses of all ranks and steps, and a digest of the state, against a run without faults",
        every,
        chain.from_iterable(odd.values()),
    )
    missing = [
        f"{d.leg}: step {s} is in no rank's notes"
        for d in drivers
        for s in set(range(1, d.steps + 1)) - curve(d.notes()).keys()
    ]
    again = {driver.leg: needless(driver, driver.notes()) for driver in drivers}
    condition(
        "every step is logged; after the loss of processes none is done again, of a host or a damaged state one, of "
        "torchrun those since the last checkpoint",
        "the notes of all ranks",
        every,
        chain(missing, *again.values()),
    )
    bare = [d for d in drivers if d.leg != "disk"]
    problems = [text for d in bare for text in ended(d) + odd[d.leg] + again[d.leg]]
    for d in bare:
        problems += [f"{d.leg}: there is a checkpoint"] * d.saved.exists()
        problems += [f"{d.leg}: went on from {how}" for _, how, _, n in redone(d.notes()) if n and how != "memory"]
    condition(
        "the same without any checkpoint, but where torchrun ends, or the memories of two hosts of which one sends to "
        "the other are lost",
        "conditions 1 to 3 of the runs on hosts of their own, which went on from memory alone",
        sum(d.faults() for d in bare),
        problems,
    )
    in_time = lambda d, at: any(at < t < at + args.hang + 10 for t in d.named)  # noqa: E731
    stopped = [(d, at, name) for d in drivers for at, name in d.struck("stop")]
    # one that has ended meanwhile, with all others, is no stopped rank any more
    stopped = [(d, at, name) for d, at, name in stopped if in_time(d, at) or not d.ended_all(at, at + args.hang + 10)]
    late = [
        f"{d.leg}: {name} was not named within {args.hang + 10:g} s" for d, at, name in stopped if not in_time(d, at)
    ]
    condition(
        f"a stopped rank is named within --hang-timeout ({args.hang:g} s) and 10, and replaced",
        "the time from SIGSTOP to its supervisor's line; the run went on",
        len(stopped),
        late,
    )
    condition(
        "SIGTERM, and the end of torchrun: nobody is left after 30 and 5 s; the next start continues from the state of "
        "that step, and of the last checkpoint",
        "processes by their environment; the notes",
        faults(*GONE),
        [text for d in drivers for text in d.slow] + again.get("disk", []),
    )
    problems = []
    for d in (d for d in drivers if d.leg == "disk"):
        # Several disks may be full in one save, and a disk that was to be full in a step may be so when the run stops.
        full = {tuple(x[4:]) for lines in d.notes().values() for x in lines if x[3] == "full"}
        for stops, how in ((False, GOES_ON), (True, ENDS)):
            due, said = len({step for step, stop in full if stop is stops}), len({*re.findall(how, d.output())})
            what = "errors of stops" if stops else "warnings of saves"
            problems += [f"{said} {what} on a full disk, which were {due}"] * (said != due)
        try:
            fz.checkpoint.verify(d.saved)
        except fz.errors.FzeroError as error:
            problems.append(str(error))
    condition(
        "no room for a checkpoint: the run goes on and says so, and ends with an error if it was the last one; the one "
        "before is whole",
        "a warning each; an error of each rank; fz.checkpoint.verify",
        faults("disk", "fullterm"),
        problems,
    )
    everyone = {d for pair in runs for d in pair}
    condition(
        "afterwards there is no process, and nothing of it in /dev/shm or /tmp",
        "processes by their environment, and so their ports; the folders",
        len(everyone),
        [text for d in everyone for text in d.left()],
    )
    spent = seconds(drivers)
    median = {who: statistics.median(x) for who, x in spent.items() if x}
    told = ", ".join(f"{who} {x:.1f} (of {len(spent[who])})" for who, x in median.items())
    condition(
        "CPU seconds to the next step: at most 10 of who takes the place, 2 of who stays",
        f"medians of the notes: {told}; not here: what keeping costs at 57 M parameters (recovery.py commit)",
        sum(map(len, spent.values())),
        [f"{who}: {x:.1f}" for who, x in median.items() if x > CPU[who]],
    )
    flips = [found_flips(d) for d in drivers]
    condition(
        "a flipped bit in what was kept or sent is found, and its rank named",
        "the line of the log with the rank and the batch of each",
        sum(n for n, _ in flips),
        [text for _, texts in flips for text in texts],
    )
    return made


@dataclass
class Check:
    """What tests have shown of a promise: the last line of pytest, and whether all have passed."""

    promise: str
    tests: list[str]
    passed: bool
    summary: str


def run_checks() -> list[Check]:
    found = []
    for promise, tests in CHECKS.items():
        command = [sys.executable, "-m", "pytest", "--full", "-q", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "FZERO_TEST_DEFAULT_TIMES": "1"}
        done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, check=False)
        summary = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else done.stderr[-200:]
        passed = done.returncode == 0 and "skipped" not in summary
        print(f"{promise}: {summary}" + ("" if passed else "\n" + done.stdout[-4000:]), flush=True)
        found.append(Check(promise, tests, passed, summary))
    return found


def publish(args: argparse.Namespace, made: list[Condition], drivers: list[Driver], checks: list[Check]) -> None:
    again = {d.leg: redone(d.notes()) for d in drivers}
    given = [f"--{name} {getattr(args, name)}" for name in ("ranks", "kills", "steps", "seed")]
    given += [f"--kinds {args.kinds}"] if args.kinds else []
    given += ["--checks"] if checks else []
    text = ["# Chaos", "", f"`python tests/chaos.py {' '.join(given)}`", "",
            "| | promise | | judged by | times | |", "|---|---|---|---|---|---|"]  # fmt: skip
    text += [
        f"| {c.number} | {c.promise} | {c.verdict} | {c.how} | {c.times} | {'; '.join(c.problems[:5])} |" for c in made
    ]
    text += ["", f"| fault | {' | '.join(again)} |", f"|---|{'---|' * len(again)}"]
    counts = {kind: [d.faults(kind) for d in drivers] for kind in KINDS}
    text += [f"| {KINDS[kind]} | {' | '.join(str(n or '') for n in c)} |" for kind, c in counts.items() if any(c)]
    text += ["", "| run | steps | faults | seconds | starts of torchrun | went on | from memory | steps done again |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    text += [f"| {d.leg} | {d.steps} | {d.faults()} | {d.seconds:.0f} | {d.starts or '-'} | {len(a)} | "
             f"{sum(x[1] == 'memory' for x in a)} | {sum(x[3] for x in a)} |"
             for d, a in zip(drivers, again.values(), strict=True)]  # fmt: skip
    if checks:
        text += ["", "| faults in another setting | tests | pytest |", "|---|---|---|"]
        names = [", ".join(f"`{name.rpartition('::')[2]}`" for name in c.tests) for c in checks]
        text += [f"| {c.promise} | {n} | {c.summary} |" for c, n in zip(checks, names, strict=True)]
    sys.path.insert(0, str(TESTS.parent / "benchmarks"))
    where = importlib.import_module("common").environment()
    versions = f"fzero {where['fzero']} ({where['commit']}), torch {where['torch']}, Python {where['python']}"
    machine = f"{where['system']}, {where['cores']} cores of {where['cpu']}, {where['memory_gib']} GiB"
    text += ["", f"Measured {where['when']}: {versions}, {machine}, while other processes ran."]
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{args.name}.md").write_text("\n".join(text) + "\n")
    data = {
        "ranks": args.ranks, "kills": args.kills, "seed": args.seed, "checks": [asdict(c) for c in checks],
        "conditions": [{**asdict(c), "verdict": c.verdict} for c in made], "kinds": counts,
        "runs": {d.leg: {"steps": d.steps, "seconds": round(d.seconds), "starts": d.starts} for d in drivers},
        "went_on": {leg: [{"source": s, "step": step, "redone": n} for _, s, step, n in a] for leg, a in again.items()},
    }  # fmt: skip
    (folder / f"{args.name}.json").write_text(json.dumps(data) + "\n")
    (folder / f"{args.name}.log").write_text("\n".join(x for d in drivers for x in d.lines) + "\n")


def shares(kills: int, steps: int, kinds: list[str]) -> dict[str, tuple[int, int, list[str]]]:
    """For each run its faults, its steps, and the kinds that it draws of: the run with checkpoints has what the others
    leave."""
    of = {leg: [k for k in those if k in kinds] for leg, those in LEGS.items()}
    num = {"resized": max(1, kills // 25), "hosts": max(1, kills // 4)}
    num = {leg: n if of[leg] else 0 for leg, n in num.items()}
    num["disk"] = kills - sum(num.values()) if of["disk"] else 0
    if not of["disk"]:
        leg = "hosts" if of["hosts"] else "resized"
        num[leg] += kills - sum(num.values())
    return {leg: (num[leg], steps if leg == "disk" else max(steps // 4, 40), of[leg]) for leg in LEGS if num[leg] > 0}


def planned(args: argparse.Namespace, leg: str, num: int, steps: int, kinds: list[str]) -> list[Strike]:
    if leg != "resized":
        return draw(num, args.ranks, steps, args.seed, kinds)
    apart = steps // num
    return [Strike(f"{i:03d}-resize-0", i, "resize", 0, "resize", "resize", apart // 4 + i * apart) for i in range(num)]


def main() -> int:
    if sys.argv[1:2] == ["--supervisor"]:
        supervisor(sys.argv[2:])
    text = "\n".join([*(__doc__ or "").splitlines()[2:], "faults:", *(f"  {k:9s} {v}" for k, v in KINDS.items())])
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100, help="faults")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="of faults, by comma; by default all")
    parser.add_argument("--hang", type=float, default=10.0, help="of python -m fzero.run")
    parser.add_argument("--checks", action="store_true", help="also run the tests of faults in another setting")
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
    if wrong := [k for k in kinds if k not in KINDS]:
        parser.error(f"--kinds: {', '.join(wrong)}: of {', '.join(KINDS)}")
    if args.ranks < 2 or args.steps < 40 or not 0 < args.kills <= args.steps // 4:
        parser.error("--ranks must be at least 2, --steps at least 40, and --kills between 1 and a quarter of --steps")
    args.out = str(Path(args.out).resolve()) if args.out else tempfile.mkdtemp(prefix="chaos-")
    runs, calm = list[tuple[Driver, Driver]](), dict[str, Driver]()
    for leg, (num, steps, of) in shares(args.kills, args.steps, kinds).items():
        like = "disk" if leg == "disk" else "hosts"
        if like not in calm:
            calm[like] = Driver(args, like, steps, [], calm=True).run()
        made = Resized if leg == "resized" else Driver
        runs.append((made(args, leg, steps, planned(args, leg, num, steps, of)).run(), calm[like]))
    conditions = judge(runs, args)
    for c in conditions:
        print(
            f"{c.number:2d}  {c.promise}: {c.verdict} ({'; '.join(c.problems[:5]) or f'{c.how}: {c.times}'})",
            flush=True,
        )
    checks = run_checks() if args.checks else []
    if args.results:
        publish(args, conditions, [one for one, _ in runs], checks)
    broken = any(c.problems for c in conditions) or not all(c.passed for c in checks)
    if broken:
        print(f"the runs' folder: {args.out}", flush=True)
    else:
        shutil.rmtree(args.out, ignore_errors=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
