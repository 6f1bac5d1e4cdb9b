"""Runs one rank as a child process and restarts it when it dies: `python -m fzero.run script.py`, between torchrun and
the script.

    torchrun --nproc-per-node 8 -m fzero.run train.py --its --flags

The other ranks keep their processes, their memory and their compiled code, because torchrun, which would stop them
all, only sees the supervisor. A script that exits by itself, also with an error, ends the run with its exit code. This
file does not import PyTorch.
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

from fzero._utils import procfs
from fzero._utils.deprecation import renamed_flags
from fzero.comm.launcher_environment import restarts_left
from fzero.elastic import host_directory, node_heartbeat

_LOOK = 0.05  # seconds between two checks of the process
_STACKS = 1.0  # seconds for a process to print its stacks
_VALUED = ("--hang-timeout", "--heartbeat-timeout", "--max-failures", "--memory")
_RENAMED = {
    "--hang": "--hang-timeout",
    "--lost-host": "--heartbeat-timeout",
    "--max-losses": "--max-failures",
}
_HEARTBEAT_TIMEOUT = 45.0  # seconds
_AGAIN = 1  # the exit code that asks torchrun to restart the ranks
_FRESH = 5.0  # seconds for which a rank that waited for other ranks is assumed to be still waiting


class Supervisor:
    """The supervisor of one rank: its process, and what is known of it.

    Args:
        command: the command that starts the process.
        hang_timeout: seconds without progress that fzero can see, from the second step on, after which the process
            is killed.
        heartbeat_timeout: seconds without a heartbeat from another host, after which a rank that makes no progress
            is ended.
        max_failures: failures in a row, without a step between them, after which the run ends.
        memory: the directory of the run's in-memory checkpoints on this host.
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
        self._hang_timeout, self._since = hang_timeout, time.time()
        self._heartbeat = node_heartbeat.start(memory, heartbeat_timeout)
        self._rank = int(os.environ.get("RANK", "0"))
        self._progress = host_directory.RankProgress(memory, self._rank)
        self._progress.say(host_directory.STARTING, 0)
        self._parent, self._stop_requested = os.getppid(), False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the rank until it ends for good, and returns its exit code."""
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            procfs.die_with_parent(signal.SIGTERM)
            # torchrun ended before the kernel was asked to tell.
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
        node_heartbeat.end(self._heartbeat)
        # When the number of hosts changes, torchrun sends SIGTERM to the ranks, as it does at the end of a run, and
        # starts them again. This does not count as one of its restarts.
        again = restarts_left() or (code == 128 + signal.SIGTERM and host_directory.elastic())
        if code == 0 or not again:  # the last one of the host also removes a directory that was made again
            last = self._progress.leave()
            if last or os.environ.get("LOCAL_RANK", "0") == "0":
                host_directory.remove(self._memory)
        return code

    def _lives(self) -> int:
        """Starts the rank until it ends without being restarted, and returns the exit code of its last process.

        Steps are counted from 0, as in `run.steps`: in step 19 a rank has finished 19 steps.
        """
        losses, last = 0, -1
        while True:
            code = self._watch()
            seen = self._progress.read()
            step, phase = seen.step, seen.phase
            finished = phase == host_directory.FINISHED
            if code == 0 and not finished and phase != host_directory.STARTING:
                self._say(
                    f"ended in step {step}, before the end of the run: the "
                    "other ranks wait for it, and the run ends here"
                )
                return 1
            if code >= 0 or self._stop_requested or finished:
                return code if code >= 0 else 128 - code
            # A new step is progress, so only failures without a step between them count.
            losses = 1 if step > last else losses + 1
            last, name = step, signal.Signals(-code).name
            where = f"in step {step}" if phase != host_directory.STARTING else "before it called fz.run"
            if losses >= self._max_failures:
                self._say(f"died of {name} {losses} time{'s' * (losses > 1)} {where}: the run ends here")
                return 128 - code
            self._say(f"died of {name} {where}; it is restarted")

    def _watch(self) -> int:
        """Starts the process of the rank, watches it, and returns its exit code, which is negative for a signal."""
        self._progress.begin()
        own = {host_directory.MEMORY: str(self._memory), host_directory.SUPERVISOR: str(os.getpid())}
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **own, **node_heartbeat.environment()},
            preexec_fn=procfs.die_with_parent,
            process_group=host_directory.own_group(),
        )
        if self._stop_requested:  # the stop was requested after the process before had ended
            self._process.send_signal(signal.SIGTERM)
        beats, since = -1, time.monotonic()
        while self._process.poll() is None:
            time.sleep(_LOOK)
            seen = self._progress.read()
            if seen.beats != beats:
                beats, since = seen.beats, time.monotonic()
            if seen.phase != host_directory.FINISHED and (why := node_heartbeat.lost_host(self._memory, self._since)):
                again = "torchrun restarts the ranks on the remaining hosts"
                self._say(f"ends: {why}; {again if restarts_left() else 'there is no restart left: --max-restarts'}")
                self._process.kill()
                self._process.wait()
                return _AGAIN
            waits = time.monotonic() - seen.waited < _FRESH and seen.phase == host_directory.STEPPING
            watched = seen.phase == host_directory.JOINING or seen.has_stepped
            # A rank that waits for another one gets twice the time, so that the one that hangs is killed first.
            if watched and time.monotonic() - since > self._hang_timeout * (2 if waits else 1):
                self._end(seen.step)
        return self._process.wait()

    def _end(self, step: int) -> None:
        """Kills a process that hangs, after asking it to print its stacks."""
        assert self._process is not None
        self._say(f"has made no progress for {self._hang_timeout:g} s in step {step}; its stacks:")
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS)
        self._process.kill()
        self._process.wait()

    def _hear(self, number: int, _: Any) -> None:
        """Passes a signal on to the rank. If torchrun is gone, ends the rank and removes the directory of the run
        instead."""
        if os.getppid() != self._parent and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, the owner, is gone
            if self._process is not None:
                self._process.kill()
            host_directory.remove(self._memory)
            os._exit(128 + number)
        self._stop_requested = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _say(self, text: str) -> None:
        print(f"fzero.run: rank {self._rank} {text}", file=sys.stderr, flush=True)


def main(args: list[str] | None = None) -> int:
    """Parses the command line of `python -m fzero.run`, supervises the rank, and returns the exit code."""
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
    if given.memory is not None and (problems := host_directory.not_a_directory(given.memory)):
        parser.error(f"--{problems[0]}")
    if not given.module and not os.path.isfile(given.script):
        parser.error(f"the file {given.script} does not exist")
    try:
        memory = host_directory.memory(given.memory and os.path.abspath(given.memory))
    except OSError as error:
        parser.error(f"--memory: {error}")
    command = [*_python(), *(["-m"] if given.module else []), given.script, *given.args]
    return Supervisor(command, given.hang_timeout, given.heartbeat_timeout, given.max_failures, memory).run()


def _normalized(args: list[str]) -> list[str]:
    """Returns the arguments with `-mMODULE` written as `-m MODULE`, a form that Python accepts too, and deprecated
    flags under their new names.

    The script's own arguments stay as they are.
    """
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
    """Returns the command of the interpreter with the options that this process was started with, such as -u, -X dev,
    -W error."""
    options = sys.orig_argv[1:]
    here = next((i for i, option in enumerate(options) if option.startswith("-m")), 0)
    return [sys.executable, *options[:here]]
