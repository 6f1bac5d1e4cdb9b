"""A mesh is for one thread at a time: what would share its buffers, or read a state while a step writes it, is an error
by name and changes nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero import optim
from fzero.errors import BusyError


class Gate(TorchDispatchMode):
    """Stops the thread that enters it at its first operation, until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reached.set()
        assert self.opened.wait(60)
        return func(*args, **(kwargs or {}))


def test_what_runs_at_once_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean()

    mesh, params, batch = fz.make_mesh(), {"w": torch.randn(4, 4)}, torch.randn(6, 4)
    step = fz.train_step(loss, optim.adamw(0.1))
    train, other = (fz.compile(step, mesh, backend="eager") for _ in range(2))
    evaluate = fz.compile(fz.eval_step(loss), mesh, backend="eager")
    state, expected = train.init(params), other.init(params)
    for _ in range(3):
        expected, _ = other(expected, batch)
    state, _ = train(state, batch)
    evaluate(state.params, batch)
    calls = {
        "step": lambda: train(state, batch),
        "eval_step": lambda: evaluate(state.params, batch),
        "gather": lambda: train.gather(state),
        "init": lambda: train.init(params),
        "restore": lambda: other.restore(tmp_path),
        "checkpoint.save": lambda: fz.checkpoint.save(tmp_path, state),
        "move": lambda: fz.move(state, "cpu"),
        "check_replicas": lambda: train.check_replicas(state),
    }
    gate, done = Gate(), list[Any]()

    def in_thread() -> None:
        with gate:
            done.append(train(state, batch))

    thread = threading.Thread(target=in_thread)
    thread.start()
    try:
        assert gate.reached.wait(60)
        for owner, call in calls.items():
            with pytest.raises(BusyError, match=f"fzero.{owner}: its mesh is in use") as caught:
                call()
            assert "\nFix: " in str(caught.value)
    finally:
        gate.opened.set()
        thread.join(60)
    assert len(done) == 1 and not list(tmp_path.iterdir())
    state, _ = train(state, batch)
    torch.testing.assert_close(state.params, expected.params, rtol=0, atol=0)
    fz.checkpoint.save(tmp_path, state)
    assert int(other.restore(tmp_path).step) == 3


def test_a_call_that_fails_lets_the_next_one_run() -> None:
    train = fz.compile(fz.train_step(lambda p, x: (x @ p["w"]).mean(), optim.sgd(0.1)), fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.eye(3)})
    with pytest.raises(fz.errors.FzeroError):
        train(3, torch.ones(2, 3))
    assert int(train(state, torch.ones(2, 3))[0].step) == 1


def test_the_mesh_is_held_until_an_exit_stack_closes() -> None:
    mesh = fz.make_mesh(data=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mesh.alone("test"))
        with pytest.raises(BusyError), mesh.alone("again"):
            pass
    with mesh.alone("test"):
        pass


def test_an_interrupt_releases_the_mesh() -> None:
    """Ctrl-C arrives at a random moment of taking and releasing the mesh."""
    mesh = fz.make_mesh(data=1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for trial in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + trial * 1e-6)
                while True:
                    with mesh.alone("test"):
                        pass
            except KeyboardInterrupt:
                pass
            assert not mesh.context.holder, f"trial {trial}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
