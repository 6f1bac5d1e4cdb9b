"""Traces a step once more and compares the result with the program that runs, so that a program never runs on, or is
saved, after the code of its step has come to mean something else.

A program contains the values that the user's code read when it was traced: settings, files, the clock, draws of
Python's random. If a value has changed since and matters, then a new trace has a different operation. No list of the
kinds of values is needed for that, unlike for the comparison of `read_values.py`, which costs much less.

The step is traced again at its second call, which finds functions that draw or count; when that comparison finds a
changed value; and before its results are saved, gathered or written back. A trace costs about 45 ms of CPU time for
each block, and runs the user's function once, so that what it prints appears again. The global random number generators
are left as they were.
"""

from __future__ import annotations

import itertools
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from fzero.comm import control_group
from fzero.compiler.lowered import Lowered
from fzero.compiler.traced_step import recorded_program
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.ir.printer import show
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.step import EvalStep, Step
from fzero.trace.graph_capture import without_gc
from fzero.trace.guards.torch_switches import Autocast, autocast, autocast_as
from fzero.trace.guards.user_frames import Place, is_library, line
from fzero.trace.recorder import FROM
from fzero.trace.subgraph import signature


@dataclass(frozen=True)
class TraceRecord:
    """What the program of a step was traced from, and the text of its operations.

    Attributes:
        step: the step, with its open choices decided.
        params, batch: the tables of the tensors that it was traced for.
        autocast, dtype: the autocast state and the default dtype that it was traced under.
        text: its operations, compressed: one for each line.
    """

    step: Step | EvalStep
    mesh: Mesh
    params: Inputs
    batch: Inputs
    autocast: Autocast
    dtype: torch.dtype
    text: bytes

    @classmethod
    def of(cls, step: Step | EvalStep, mesh: Mesh, lowered: Lowered) -> TraceRecord:
        """Returns the record of a step that has just been lowered."""
        assert lowered.recorded is not None
        text = "\n".join(text for text, _ in _lines(lowered.recorded))
        packed = zlib.compress(text.encode(), 1)
        return cls(step, mesh, lowered.params, lowered.batch, autocast(), torch.get_default_dtype(), packed)

    def check(self, owner: str, changed: Callable[[], list[str]]) -> None:
        """Traces the step again.

        Args:
            owner: the public call that the error names.
            changed: returns the changed values that are known, for the error.

        Raises:
            FzeroValueError: an operation is different; names the first one. Or Python or NumPy drew random numbers,
                even if this trace drew alike.
        """
        trace = lambda: recorded_program(self.step, self.mesh, self.params, self.batch)  # noqa: E731
        with _same_settings(self.autocast, self.dtype), _random_states_kept(), without_gc():
            begin = _random_states()
            lines = _lines(trace())
            draws = _draws(trace, begin) if _random_states() != begin else []
        before = [(text, None) for text in zlib.decompress(self.text).decode().split("\n")]
        for (old, _), (new, place) in itertools.zip_longest(before, lines, fillvalue=("nothing", None)):
            if old != new:
                found = [line(place)] if place else []
                drawn = [f"draws random numbers: {place}" for place in draws]
                problems = [*found, *changed(), *drawn, f"before: {old}", f"now: {new}"]
                what = f"{self.step.name} computes something different than when it was traced"
                raise FzeroValueError(owner, what, problems, _FIX)
        if draws:
            what = f"{self.step.name} draws random numbers in Python, and its program would repeat them in every step"
            raise FzeroValueError(owner, what, draws, _FIX)


class UnsavedTrace:
    """The records of the programs of a compiled step that ran, until a new trace has shown that they still hold.

    The tensors of a state refer to it, so it does not refer to the compiled step: a step that is dropped is freed.

    Args:
        noted: called before the step is traced again; what it returns is called afterwards.
    """

    def __init__(self, mesh: Mesh, noted: Callable[[], Callable[[], None]]):
        self._mesh, self._noted = mesh, noted
        self._ran: dict[int, tuple[TraceRecord, Callable[[], list[str]]]] = {}

    def ran(self, record: TraceRecord, changed: Callable[[], list[str]]) -> None:
        """Notes that a program runs."""
        self._ran[id(record)] = record, changed

    def __call__(self, owner: str) -> None:
        """Raises an error, on every rank, if a program that ran is not what the code says now on some rank. It costs
        nothing if no step has run since the last check.

        Args:
            owner: the public call that errors name.
        """
        if self._ran:

            def act() -> None:
                note = self._noted()
                for record, changed in self._ran.values():
                    record.check(owner, changed)
                note()

            # Its own name for the exchange: a rank whose state no step has computed makes none.
            control_group.run_on_all_ranks(self._mesh.control, f"{owner} of a trained state", act)
            self._ran = {}


_FIX = (
    "pass what changes from step to step in the batch, as a 0-dim tensor, or to the optimizer as a schedule of the "
    "step; draw by fz.random with the step's key; compile the step again if it rarely changes; if a context manager is "
    "around the steps, save inside of it"
)


def _lines(program: Program) -> list[tuple[str, Place | None]]:
    """Returns the operations of a program, of its subgraphs and of the optimizer as text, each with the user's line if
    it is known."""
    lines: list[tuple[str, Place | None]] = []
    graphs = {name: function.graph for name, function in program.functions.items()}
    if (update := program.update) is not None:
        graphs["optimizer"] = update.attrs.graph
    for name, graph in graphs.items():
        between = [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
        nodes = [*graph.inputs, *between, graph.graph.output_node()]
        told = signature(graph)
        lines += [(f"{name}: {text}", node.meta.get(FROM)) for text, node in zip(told, nodes, strict=True)]
    text = "\n".join([*(f"{v.name}: {v}" for v in program.inputs), show(program, full=True)])
    return [*lines, *((one, None) for one in text.split("\n"))]


@contextmanager
def _same_settings(cast: Autocast, dtype: torch.dtype) -> Iterator[None]:
    """Sets autocast and the default dtype: a save may be outside of a context that the steps are called in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with autocast_as(cast):
            yield
    finally:
        torch.set_default_dtype(before)


def _draws(trace: Callable[[], object], begin: tuple[Any, ...]) -> list[str]:
    """Returns which global generators a trace draws from, with the user's lines where they are known. The states
    before this call are those after a trace that began with `begin`. Another thread may draw at the same time, but
    then two traces from the same state end in different ones.
    """
    end, places = _random_states(), dict[str, None]()

    def called(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is random._inst:  # type: ignore[attr-defined]
            while (above := frame.f_back) is not None and is_library(frame.f_code.co_filename):
                frame = above
            places[line((frame.f_code.co_filename, frame.f_lineno))] = None

    _set_random_states(begin)
    profiler = sys.getprofile()
    sys.setprofile(called)
    try:
        trace()
    finally:
        sys.setprofile(profiler)
    again = _random_states()
    drawn = [a != b and b == c for a, b, c in zip(begin, end, again, strict=True)]
    return [*(["numpy.random"] if drawn[1] else []), *([*places] or ["random"] if drawn[0] else [])]


def _random_states() -> tuple[Any, ...]:
    """Returns the states of the global generators of Python and NumPy, which can be compared."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and pickle.dumps(numpy.random.get_state(legacy=False))


def _set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        import numpy

        numpy.random.set_state(pickle.loads(states[1]))


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restores the states of the global random number generators."""
    states = _random_states()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _set_random_states(states)
