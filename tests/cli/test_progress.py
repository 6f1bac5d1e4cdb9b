"""Lines that say how long something has been going on."""

from __future__ import annotations

import fcntl
import io
import os
import re
import select
import struct
import sys
import termios
import threading
import time
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.live import Live

import fzero as fz
from fzero._utils import progress
from fzero.runtime.build.inductor import _Progress


class _Terminal(io.StringIO):
    """A terminal, and when something has been written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_what_takes_long_is_shown_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", (0.0, 0.0))
    monkeypatch.setattr(progress, "OFTEN", 0.001)
    for setting in ("on", "off"):
        monkeypatch.setenv("FZERO_PROGRESS", setting)
        outer, inner, asked = _Terminal(), _Terminal(), threading.Semaphore(0)

        def planned(asked: threading.Semaphore = asked) -> str:
            asked.release()
            return "planned"

        with progress.shown("build", lambda: "1 of 3 ready", outer), progress.shown("plan", planned, inner):
            for _ in range(2):  # what is said the first time was written by the second
                assert asked.acquire(timeout=60)
        text: Any = outer.getvalue()
        assert (
            ("build: " in text and " s, plan: planned" in text and text.endswith("\r")) if setting == "on" else not text
        )
        assert not inner.getvalue(), "of two, one inside the other, there is one line, which says how far the inner is"
        assert not [t for t in threading.enumerate() if t.name in ("build", "plan")]


@pytest.mark.parametrize("columns", [1, 40, 80, 140])
def test_a_line_fits_into_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is longer than the terminal is wide would wrap, and then each drawing of it is another line."""
    monkeypatch.delenv("FZERO_PROGRESS", raising=False)
    there, here = os.openpty()
    try:
        fcntl.ioctl(here, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        now = 0.0
        with open(here, "w", closefd=False) as stream:
            line = progress.Progress("fzero.compile", stream, clock=lambda: now)
            for text in ("compiled 1 of 3 functions; " + "x" * 120, "損失" * 60, "short"):
                now += 10.0
                line(text)
            line.close()
        read = b""
        while select.select([there], [], [], 0.2)[0]:
            read += os.read(there, 1 << 16)
        drawn = read.decode().split("\r")
    finally:
        os.close(there)
        os.close(here)
    wide = [sum(1 + (c in "損失") for c in text) for text in drawn]
    assert max(wide) == max(1, columns - 1)
    assert "\n" not in "".join(drawn) and drawn[1].endswith("…")
    assert set(drawn[-2]) <= {" "} and not drawn[-1], "at the end the line is empty"
    if columns > 1:
        assert drawn[1].startswith("fzero.compile: 10 s, compiled 1 of")
        assert drawn[3].startswith("fzero.compile: 30 s, short")


def test_above_a_live_display_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while `fz.log` shows a run and the first evaluation is compiled."""
    monkeypatch.delenv("FZERO_PROGRESS", raising=False)
    monkeypatch.setattr(sys, "stderr", _Terminal())
    out, now = io.StringIO(), 0.0
    with Live("step 3", console=Console(file=out, force_terminal=True, width=80), auto_refresh=False):
        line = progress.Progress("fzero.compile", clock=lambda: now)
        for _ in range(100):
            now += 0.2
            line("compiled 1 of 3 functions")
        line.close()
    assert out.getvalue().count("fzero.compile") == 2, "one after two seconds, one 15 seconds later"


def test_an_estimate_that_has_passed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FZERO_PROGRESS", raising=False)
    now, out = 0.0, io.StringIO()
    line = progress.Progress("fzero.plan", out, clock=lambda: now)
    for now, about in ((138.0, 147.2), (168.0, 168.3), (199.0, 0.0)):  # noqa: B007 - read by the clock
        line("planning", about)
    assert out.getvalue().splitlines() == [
        "fzero.plan: 138 s of about 147 s, planning",
        "fzero.plan: 168 s, planning",
        "fzero.plan: 199 s, planning",
    ]


def test_what_raises_is_not_shown_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), progress.shown("build", lambda: "", _Terminal()):
        raise KeyError
    with progress.shown("build", lambda: "", _Terminal()):
        assert [t for t in threading.enumerate() if t.name == "build"]


def test_a_step_says_that_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", (0.0, 0.0))
    monkeypatch.setenv("FZERO_PROGRESS", "on")
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    written = terminal.written

    def slow(p: Any, x: Any) -> Any:
        assert written.wait(60), "while it is traced"
        return (x @ p["w"]).square().mean()

    train = fz.compile(fz.train_step(slow, fz.optim.sgd(0.1)), fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.eye(4)})
    terminal.written.clear()
    train(state, torch.ones(2, 4))
    assert re.search(r"fzero\.compile: \d s, tracing and planning slow", terminal.getvalue())


def test_a_line_on_a_terminal_is_redrawn_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FZERO_PROGRESS", raising=False)
    now, terminal = 0.0, _Terminal()
    line = progress.Progress("fzero.compile", terminal, clock=lambda: now)
    for i in range(1, 101):
        now = i / 10  # for ten seconds, of which the first has no line
        line("compiled 1 of 3 functions")
    assert terminal.getvalue().count("fzero.compile") == 19


def test_bytes_of_a_state_are_counted_while_they_are_made(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", (0.0, 0.0))
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    monkeypatch.delenv("FZERO_PROGRESS", raising=False)
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with progress.moving("fzero.init", "made", 0):
        time.sleep(3 * progress.OFTEN)
        assert "starting" in out.getvalue() and "made" not in out.getvalue()
        progress.moved(3 << 20)
        time.sleep(3 * progress.OFTEN)
    with progress.moving("fzero.init", "made", 1):
        time.sleep(2 * progress.OFTEN)
    assert "3.0 MiB made" in out.getvalue() and set(out.getvalue().split(":")[0].splitlines()) == {"fzero.init"}


def test_a_compiled_step_says_what_takes_long(monkeypatch):
    """Of `init` and tracing, on the first rank. These functions are too small to compile."""
    seen = []
    real = progress.shown
    monkeypatch.setattr(progress, "shown", lambda what, text: (seen.append((what, text())), real(what, text))[1])
    monkeypatch.setattr("fzero.runtime.program_build.shown", progress.shown)
    train = fz.compile(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)), fz.make_mesh(data=1))
    state = train.init({"w": torch.eye(3)})
    train(state, torch.ones(2, 3))
    assert [what for what, _ in seen] == ["fzero.init", "fzero.compile"]
    assert seen[0][1] == "starting" and "tracing" in seen[1][1]


def test_the_phases_of_compiling_are_told_apart() -> None:
    told, one = _Progress(others=True, num=3), _Progress(others=False, num=1)
    assert str(one) == "starting Inductor to compile 1 function"
    one("f", ready=False)
    assert str(one) == "compiling the code of 1 function"
    one("f")
    assert str(one) == "loading compiled functions"
    said = []
    for ready in (False, True):
        for name in "abc":
            told(name, ready=ready)
            said.append(str(told))
    assert said == [
        "generated code of 1 of 3 functions",
        "generated code of 2 of 3 functions",
        "compiling the code of 3 functions",
        "compiled 1 of 3 functions",
        "compiled 2 of 3 functions",
        "waiting for functions that other ranks compile",
    ]
