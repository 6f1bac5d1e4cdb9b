"""Lines that say how long something has been going on."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import progress


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
    assert "fzero.compile: 0 s, tracing and planning slow" in terminal.getvalue()


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
    monkeypatch.setattr("fzero.runtime.compiled.shown", progress.shown)
    train = fz.compile(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)), fz.make_mesh(data=1))
    state = train.init({"w": torch.eye(3)})
    train(state, torch.ones(2, 3))
    assert [what for what, _ in seen] == ["fzero.init", "fzero.compile"]
    assert seen[0][1] == "starting" and "tracing" in seen[1][1]
