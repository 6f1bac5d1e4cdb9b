"""Forks in place of fresh interpreters (tests/forks.py): a script, and who starts it, see no difference."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from scripts import ROOT, environment

pytestmark = pytest.mark.forks
TELLS = """
import json, os, sys
print(json.dumps({
    "forked": "forks" in sys.modules, "parent": os.getppid(), "argv": sys.argv, "orig": sys.orig_argv,
    "cwd": os.getcwd(), "first": sys.path[0], "in path": sys.path.index(ROOT),
    "name": __name__, "file": globals().get("__file__"),
    "mine": os.environ.get("MINE"), "kept": "PYTHONHASHSEED" in os.environ, "group": os.getpgrp() == os.getpid(),
    "session": os.getsid(0) == os.getpid(), "ignored": int(sys.stdin.read() or 0),
    "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)), "hash": hash("a"),
    "seen": b"MINE=yes" in open("/proc/self/environ", "rb").read().split(bytes(1)),
}))
"""


def told(*line: str, **more: Any) -> dict[str, Any]:
    more = {"env": environment() | {"MINE": "yes"}, "input": "", "text": True, "stdout": subprocess.PIPE, **more}
    done = subprocess.run([sys.executable, *line], check=True, **more)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["file", "-m", "-c"])
def test_a_script_sees_what_it_sees_in_a_fresh_interpreter(tmp_path: Path, kind: str) -> None:
    code = f"ROOT = {str(ROOT)!r}\n{TELLS}"
    (path := tmp_path / "tells.py").write_text(code)
    line = {"file": [str(path)], "-m": ["-u", "-m", "tells"], "-c": ["-P", "-c", code.replace("\n}", "}")]}[kind]
    fork = told(*line, "a", "b c", cwd=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", forks._FRESH)
        fresh = told(*line, "a", "b c", cwd=tmp_path)
    assert fork.pop("forked") and not fresh.pop("forked")
    assert fork.pop("hash") != fresh.pop("hash")
    assert fork == fresh


def test_streams_descriptors_groups_and_signals(tmp_path: Path) -> None:
    read, write = os.pipe()
    code = f"import os, sys; os.write({write}, sys.stdin.buffer.read()); print('said'); print('told', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"through", capture_output=True, pass_fds=[write], env=environment()
    )
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"through", "nobody else holds the other end"
    assert (done.stdout, done.stderr) == (b"said\n", b"told\n")
    for how in ({}, {"start_new_session": True}, {"process_group": 0}):
        code = "import json, os; print(json.dumps([os.getpgrp(), os.getsid(0), os.getpid()]))"
        group, session, pid = told("-c", code, **how)
        assert (group == pid) == bool(how) and (session == pid) == ("start_new_session" in how)
    code = "import signal; print([signal.getsignal(s) == signal.SIG_IGN for s in (10, 12)].__repr__().lower())"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert told("-c", code) == [True, False]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def sigint_interrupts() -> Iterator[None]:
    """A shell starts commands in the background with SIGINT ignored, and what this process ignores its children do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_interrupts")
@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('why')", 1, "why"),
        ("import atexit; atexit.register(print, 'last'); 1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -2, "KeyboardInterrupt"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('last'))).start()", 0, ""),
    ],
)
def test_how_a_script_ends(code: str, expected: int, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == expected and words in done.stderr, done.stderr
    assert "forks.py" not in done.stderr and ("last" in code) == (done.stdout == "last\n")


def test_an_end_is_seen_by_who_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=environment()) as process:
        assert process.poll() is None and process.pid in forks.children(os.getpid())
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


STARTS = """
import multiprocessing, os, pickle, subprocess, sys
class Named: pass
def double(x):
    assert type(pickle.loads(pickle.dumps(Named()))).__module__ in ("__main__", "__mp_main__")
    return 2 * x
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Named())).__class__ is Named)
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(double, [3]))
    code = "import os, sys; print(os.getppid(), 'forks' in sys.modules)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True).split() == [str(os.getpid()), "True"])
    print("forks" in sys.modules)
    if "end" not in sys.argv:
        print(subprocess.check_output([sys.executable, __file__, "end"], text=True).count("True"))
"""


def test_a_script_that_starts_others(tmp_path: Path) -> None:
    """By fork, as a fresh interpreter, and as forks of its own; nobody is left."""
    (path := tmp_path / "starts.py").write_text(STARTS)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env=environment(),
        start_new_session=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["True", "[6]", "[6]", "True", "True", "3"], done


def test_a_child_of_a_killed_fork_hears_of_it(tmp_path: Path) -> None:
    """By the kernel's signal at the death of a parent, which it asks for before it begins."""
    code = (
        "import subprocess, sys, time\nfrom fzero._utils import procfs\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(100)']\n"
        "child = subprocess.Popen(command, preexec_fn=procfs.die_with_parent)\n"
        "print(child.pid, flush=True), time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment()) as one:
        assert one.stdout is not None
        child = int(one.stdout.readline())
        os.kill(child, 0)
        one.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("line", "more"),
    [(["-X", "dev", "-c"], {}), (["-c"], {"PYTHONHASHSEED": "3"}), (["-c"], {"OMP_NUM_THREADS": "2"})],
)
def test_what_no_fork_can_have_is_a_fresh_interpreter(line: list[str], more: dict[str, str]) -> None:
    """Options, a hash seed, more threads."""
    code = 'import os, sys; print(f\'["{sys.flags.dev_mode}", {int("forks" in sys.modules)}]\')'
    dev, forked = told(*line, code, env=environment() | more)
    assert dev == str("dev" in line) and not forked


def test_without_a_seed_it_is_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours:
        monkeypatch.setattr(forks._Seeds, "find", lambda *_: forks.Seed(0, ours, {}))
        assert told("-c", "import sys; print(int('forks' in sys.modules))") == 0


def test_ranks_have_hash_seeds_of_their_own() -> None:
    code = "print(hash('a'))"
    found = [told("-c", code, env=environment() | {"RANK": str(rank)}) for rank in (0, 1, 0)]
    assert found[0] == found[2] != found[1]


@pytest.mark.fresh
def test_the_mark_fresh() -> None:
    assert told("-c", "import sys; print(int('forks' in sys.modules))") == 0
