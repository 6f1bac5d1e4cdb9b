"""Watches one rank of a run and starts it again when it dies: `python -m fzero.run script.py`, between torchrun and the
script.

    torchrun --nproc-per-node 8 -m fzero.run train.py --its --flags

The other ranks keep their processes, their memory and what they have compiled: torchrun, which would stop them all,
sees this process alone. A script that ends by itself, with an error too, ends the run with its exit code. Imports no
PyTorch.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fzero._utils.deprecation import renamed_flags
from fzero.comm.launcher_environment import restarts_left
from fzero.elastic import host_directory, node_heartbeat

_LOOK = 0.05  # seconds between two looks at the process
_STACKS = 1.0  # seconds for a process to print its stacks
_VALUED = ("--hang-timeout", "--heartbeat-timeout", "--max-failures", "--memory")
_RENAMED = {
    "--hang": "--hang-timeout",
    "--lost-host": "--heartbeat-timeout",
    "--max-losses": "--max-failures",
}
_HEARTBEAT_TIMEOUT = 45.0  # seconds
_AGAIN = 1  # the exit code with which torchrun is asked to start again
_FRESH = 5.0  # seconds for which a rank that waited for others is taken to wait still


class Keeper:
    """A rank's process, and what is known of it.

    Args:
        command: what starts it.
        hang_timeout: seconds without progress that fzero can see, from the second step on, after which it is killed.
        heartbeat_timeout: seconds without a heartbeat from another host, after which a rank that makes no progress
            exits.
        max_failures: failures in a row, without a step between them, after which the run ends.
        memory: where the run keeps its states on this host.
    """

    def __init__(
        self,
        command: list[str],
        hang_timeout: float,
        heartbeat_timeout: float,
        max_failures: int,
        memory: Path,
    ):
        self._command, self._memory, self._max_failures = command, memory, max_failures
        self._hang_timeout, self._heartbeat_timeout = hang_timeout, heartbeat_timeout
        self._hosts, self._is_alone = node_heartbeat.Watch(memory), False
        self._rank = int(os.environ.get("RANK", "0"))
        self._progress = host_directory.RankProgress(memory, self._rank)
        self._progress.say(host_directory.STARTING, 0)
        self._parent, self._told = os.getppid(), False
        self._process: subprocess.Popen[bytes] | None = None
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        self._here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def run(self) -> int:
        """The exit code of the rank."""
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            host_directory.die_with_parent(signal.SIGTERM)
            if os.getppid() != self._parent:
                host_directory.remove(self._memory)
                return 1
        if os.environ.get("LOCAL_RANK", "0") == "0" and host_directory.logout_removes(self._memory):
            self._say(host_directory.LOGOUT)
        if host_directory.elastic() and os.environ.get("LOCAL_RANK", "0") == "0" and not node_heartbeat.environment():
            self._say(
                "cannot be started on another number of hosts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun "
                "is started, on each host; without it PyTorch waits for a store of the first start"
            )
        code = self._lives()
        self._hosts.close(at_once=self._is_alone)
        # another number of hosts is no restart that counts: torchrun tells the ranks to stop, as it does at the end
        again = restarts_left() or (code == 128 + signal.SIGTERM and host_directory.elastic())
        if code == 0 or not again:  # the last of the host removes what it has made anew, too
            last = self._progress.leave()
            if last or os.environ.get("LOCAL_RANK", "0") == "0":
                host_directory.remove(self._memory)
        return code

    def _lives(self) -> int:
        """The exit code of the last process that is the rank. Steps are counted from 0, as by `run.steps`: in step 19
        a rank has done 19 of them."""
        losses, last = 0, -1
        while True:
            code = self._watch()
            step, phase = self._progress.read().step, self._progress.read().phase
            finished = phase == host_directory.FINISHED
            if code == 0 and phase == host_directory.STARTING:
                return self._does_not_come()
            if code == 0 and not finished:
                self._say(f"ended in step {step}, before the run had: the others wait for it, and the run ends here")
                return 1
            if code >= 0 or self._told or finished:
                return code if code >= 0 else 128 - code
            losses = 1 if step > last else losses + 1
            last, name = step, signal.Signals(-code).name
            where = f"in step {step}" if phase != host_directory.STARTING else "before it called fz.run"
            if losses >= self._max_failures:
                self._say(f"died of {name} {losses} time{'s' * (losses > 1)} {where}: the run ends here")
                return 128 - code
            self._say(f"died of {name} {where}; it is started again")

    def _watch(self) -> int:
        """Starts the rank and returns its exit code; that of a signal is negative."""
        self._progress.begin()
        own = {host_directory.MEMORY: str(self._memory), host_directory.KEEPER: str(os.getpid())}
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **own, **node_heartbeat.environment()},
            preexec_fn=host_directory.die_with_parent,
            process_group=host_directory.own_group(),
        )
        if self._told:  # since the process before has ended
            self._process.send_signal(signal.SIGTERM)
        beats, since = -1, time.monotonic()
        while self._process.poll() is None:
            time.sleep(_LOOK)
            seen = self._progress.read()
            if seen.beats != beats:
                beats, since = seen.beats, time.monotonic()
            if seen.phase != host_directory.FINISHED and (why := self._alone(time.monotonic() - since)):
                again = "torchrun starts the ranks on the hosts that are left"
                self._say(f"ends: {why}; {again if restarts_left() else 'there is no restart left: --max-restarts'}")
                self._process.kill()
                self._process.wait()
                self._is_alone = True
                return _AGAIN
            waits = time.monotonic() - seen.waited < _FRESH and seen.phase == host_directory.STEPPING
            watched = seen.phase == host_directory.JOINING or seen.has_stepped
            if watched and time.monotonic() - since > self._hang_timeout * (2 if waits else 1):
                self._end(seen.step)
        return self._process.wait()

    def _end(self, step: int) -> None:
        """Kills a process that hangs, which says where if it can."""
        assert self._process is not None
        self._say(f"has done nothing for {self._hang_timeout:g} s in step {step}; its stacks:")
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS)
        self._process.kill()
        self._process.wait()

    def _alone(self, idle: float) -> str:
        """Why this rank waits in vain, "" if it does not. It has taken no turn with others for a while. torchrun starts
        ranks again when one of its own ends, and nobody else could start those of a lost host."""
        if not self._hosts.look():
            return "the process that kept the store of the ranks is gone"
        found = node_heartbeat.silent(self._memory) if idle > _FRESH else None
        if found is None or (silence := time.monotonic() - found.since) < self._heartbeat_timeout:
            return ""
        who = (
            "the store of the ranks has not answered"
            if found.host == node_heartbeat.STORE
            else f"host {found.host} (GROUP_RANK) has given no sign of life"
        )
        return f"{who} for {silence:.0f} s (--heartbeat-timeout)"

    def _does_not_come(self) -> int:
        """The exit code of a rank that has ended with 0 and no call of `fz.run`: 1 if any other one calls it, which
        then waits for this one."""
        others = [host_directory.RankProgress(self._memory, rank) for rank in self._here if rank != self._rank]
        known = node_heartbeat.number("WORLD_SIZE", 1) if node_heartbeat.several() else len(self._here)
        if known > 1:
            self._say("has ended with code 0, before it called fz.run: if another rank calls it, the run ends here")
        host_directory.is_absent(self._memory, self._rank)
        # the first keeper that has seen all of them removes the directory, with their notes
        while self._memory.is_dir() and len(host_directory.absent(self._memory)) < known and not self._told:
            time.sleep(_STACKS)  # of an earlier start, what the others have said before that
            self._hosts.look()
            found = node_heartbeat.silent(self._memory)
            if (found is not None and found.called) or any(x.read().phase != host_directory.STARTING for x in others):
                time.sleep(_STACKS)  # in which they say why they end
                return 1
        return 0

    def _hear(self, number: int, _: Any) -> None:
        if os.getppid() != self._parent and "TORCHELASTIC_RUN_ID" in os.environ:  # nobody owns the run any more
            if self._process is not None:
                self._process.kill()
            host_directory.remove(self._memory)
            os._exit(128 + number)
        self._told = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _say(self, text: str) -> None:
        print(f"fzero.run: rank {self._rank} {text}", file=sys.stderr, flush=True)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fzero.run",
        description="Starts a script, one rank of a run, and starts it again when it dies.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=600.0,
        help="seconds without progress that fzero can see, after which a rank is killed",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=_HEARTBEAT_TIMEOUT,
        help="seconds without a heartbeat from another host, after which a rank that makes no progress exits, so "
        "that torchrun restarts the ranks on the remaining hosts",
    )
    parser.add_argument(
        "--max-failures", type=int, default=3, help="failures of a rank in one step, after which the run ends"
    )
    parser.add_argument("--memory", help="where states are kept, in place of /dev/shm")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(_normalized(sys.argv[1:] if args is None else args))
    bounded = all(0 < seconds < math.inf for seconds in (given.hang_timeout, given.heartbeat_timeout))
    if not bounded or given.max_failures < 1:
        parser.error(
            "--hang-timeout and --heartbeat-timeout must be greater than 0 and finite, and --max-failures at least 1"
        )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            parser.error(f"{name}={os.environ[name]!r} in the environment must be a whole number, as torchrun sets it")
    if given.memory is not None and (problems := host_directory.not_a_directory(given.memory)):
        parser.error(f"--{problems[0]}")
    if not given.module and not os.path.isfile(given.script):
        parser.error(f"there is no file {given.script}")
    try:
        memory = host_directory.memory(given.memory and os.path.abspath(given.memory))
    except OSError as error:
        parser.error(f"--memory: {error}")
    command = [*_python(), *(["-m"] if given.module else []), given.script, *given.args]
    return Keeper(command, given.hang_timeout, given.heartbeat_timeout, given.max_failures, memory).run()


def _normalized(args: list[str]) -> list[str]:
    """The arguments with `-mMODULE` as `-m MODULE`, as Python itself accepts it, and with the new names of deprecated
    flags. The script's own arguments stay as they are."""
    first = len(args)
    for i, arg in enumerate(args):
        is_value = i > 0 and args[i - 1] in (*_VALUED, *_RENAMED)
        if not is_value and (arg.startswith("-m") or not arg.startswith("-")):
            first = i
            break
    flags, script = args[:first], args[first:]
    if script and script[0].startswith("-m") and len(script[0]) > 2:
        script = ["-m", script[0][2:], *script[1:]]
    tells = os.environ.get("RANK", "0") == "0"
    return [*renamed_flags(flags, _RENAMED, "fzero.run" if tells else None), *script]


def _python() -> list[str]:
    """The interpreter with the options that this one was started with: -u, -X dev, -W error."""
    options = sys.orig_argv[1:]
    here = next((i for i, option in enumerate(options) if option.startswith("-m")), 0)
    return [sys.executable, *options[:here]]
