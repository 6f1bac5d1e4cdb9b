"""Shows and records the progress of a training loop: a live line on a terminal, JSON lines in a file, and trackers
(`fz.log`).

It reads the metrics of steps. It must not change a step, nor make the loop wait for the device longer than necessary:
it reads values of a device one step late.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from fzero import tree
from fzero._utils.arguments import count, function, number, path_like, plain_numbers, shown
from fzero._utils.bounded_json import parsed
from fzero._utils.deprecation import keyword_aliases
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import scheduled
from fzero.runtime.compiled_base import Compiled
from fzero.runtime.metrics_watch import fetched
from fzero.step import State

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = dict[str, Any]
Tracker = Callable[[Record], None]

SELDOM = 15.0
"""Seconds between the lines that are printed if the output is not a terminal and the number of steps is unknown."""

LINES = 20
"""Number of lines that a run prints if the output is not a terminal and the number of steps is known."""

_SHOWN = 24
"""Number of losses in the sparkline."""

_BAR, _REMAINING = 20, 8
"""Columns of a terminal that the progress bar and the remaining time take."""


class Log:
    """The log of one loop. Made by `fz.log`; also a context manager that closes itself.

    Example:
        >>> import fzero as fz
        >>> with fz.log(path=None, steps=2) as report:
        ...     for step in range(2):
        ...         report(step + 1, {"loss": 1.0 / (step + 1)}, accuracy=0.5)
        step 1/2  loss 1.0000  ... MiB  accuracy 0.5
        step 2/2  loss 0.5000  ... MiB  accuracy 0.5
    """

    def __init__(
        self,
        train: Compiled | None,
        path: Path | None,
        steps: int | None,
        tokens: int | None,
        lr: Schedule | float | None,
        to: tuple[Tracker, ...],
        describe: Callable[[Record], str] | None,
        below: Callable[[Record], RenderableType] | None,
        print_fn: Callable[[str], None],
    ):
        self._train, self._path, self._steps, self._tokens, self._lr = train, path, steps, tokens, lr
        self._trackers, self._describe, self._below, self._print_fn = to, describe, below, print_fn
        self._file: TextIO | None = None
        self._losses: deque[float] = deque(maxlen=1024)
        self._pending: tuple[_Later, Record, float] | None = None
        self._stack = contextlib.ExitStack()
        self._clock = self._told = time.perf_counter()
        self._live: Any = None
        self._first: int | None = None
        self._writes = train is None or train.mesh.rank == 0
        self._named: dict[str, None] = {}  # names of the entries that calls have passed as keywords, in order

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, step: State | int, metrics: Mapping[str, Any], **more: Any) -> None:
        """Logs a step that was taken.

        Args:
            step: the state that the step returned, or the step's number, starting from 1.
            metrics: the metrics of the step. Scalars and `aux` are recorded.
            more: further entries: numbers, 0-dim tensors, strings.
        """
        now = time.perf_counter()
        # Taken before anything else, so that the time of writing a record counts for the next step, in which the loop
        # spends it.
        seconds, self._clock = now - self._clock, now
        if not self._writes:
            return
        if not isinstance(step, (State, int)):
            what = f"{shown(step)} is neither a state nor the number of a step"
            raise FzeroTypeError("log", what, fix="report(state, metrics), as the step returned them")
        at = step.step if isinstance(step, State) else step
        self._named |= dict.fromkeys(more)
        given, rest = _entries({"step": at, **metrics, **more})
        later = _Later(given)
        self._tell_pending()
        self._pending = later, rest, seconds
        if not later.on_device:
            self._tell_pending()

    def close(self) -> None:
        """Logs the record that was held back, and closes the live line, the file and the trackers."""
        try:
            self._tell_pending()
        finally:
            self._stack.close()

    def _tell_pending(self) -> None:
        # Cleared first, so that `close` does not repeat a record that failed.
        pending, self._pending = self._pending, None
        if pending is not None:
            self._tell(*pending)

    def _tell(self, later: _Later, rest: Record, seconds: float) -> None:
        values = later.read()
        step = values["step"] = round(values["step"])
        record = values | self._rates(step, seconds) | rest
        if self._first is None:
            self._first = step
            self._open(step)
        if (loss := record.get("loss")) is not None:
            self._losses.append(loss)
        if self._file is not None:
            print(json.dumps(record), file=self._file, flush=True)
        for tracker in self._trackers:
            tracker(record)
        if self._live is not None:
            self._live(record)
            return
        now, every = time.perf_counter(), max(1, (self._steps or 0) // LINES)
        due = step % every == 0 or step == self._steps if self._steps else now - self._told >= SELDOM
        if step == self._first or due:
            self._told = now
            self._print_fn(f"{_place(step, self._steps)}  {self.text(record)}")

    def _rates(self, step: int, seconds: float) -> Record:
        found: Record = {}
        if self._lr is not None:
            # An optimizer calls its schedule with a tensor, so the schedule may use torch functions of it.
            count = torch.tensor(step - 1)
            found["lr"] = float(scheduled("log", self._lr, count) if callable(self._lr) else self._lr)
        if self._tokens is not None:
            found["tokens_per_s"] = self._tokens / seconds
        found |= {"step_s": seconds, "peak_bytes": _peak(self._train)}
        if self._train is not None and self._train.mesh.device.type != "cpu":
            plan = self._train.plan
            if plan.mfu is not None:
                found["mfu"] = plan.mfu * plan.step_seconds / seconds
        return found

    def _open(self, first: int) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            before = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
            self._file = self._stack.enter_context(self._path.open("w"))
            self._file.writelines(line for line in before if _before(line, first))  # later steps will be logged again
        from rich.console import Console

        if (console := Console()).is_terminal:
            self._live = self._stack.enter_context(_live(console, first, self._steps, self._losses, self))

    def text(self, record: Record) -> str:
        """Formats a record as a line: with `describe`, or else the entries in `FORMATS` and those that calls of the log
        passed as keywords."""
        if self._describe is not None:
            return self._describe(record)
        named = [f"{name} {record[name]:.4g}" for name in self._named if isinstance(record.get(name), int | float)]
        return "  ".join([described(record), *named])

    def below(self, record: Record) -> RenderableType | None:
        """Returns the renderable below the line on a terminal, if there is one."""
        return self._below(record) if self._below else None


@keyword_aliases("fz.log", say="print_fn")
@plain_numbers
def log(
    train: Compiled | None = None,
    path: str | os.PathLike[str] | None = "log.jsonl",
    *,
    steps: int | None = None,
    tokens: int | None = None,
    lr: Schedule | float | None = None,
    to: str | Tracker | Iterable[str | Tracker] = (),
    describe: Callable[[Record], str] | None = None,
    below: Callable[[Record], RenderableType] | None = None,
    print_fn: Callable[[str], None] | None = None,
) -> Log:
    """Returns a function that logs each step of a training loop: `report(state, metrics)`.

    On a terminal it shows one live line, with a curve of the loss; elsewhere it prints about twenty plain lines per
    run. Each step is written to `path` as a JSON line. Only the first rank writes; the others may call it.

    A record has `step`, the scalars of the metrics (`loss`, `grad_norm`, `finite`, ...) and of `aux` by dotted names,
    `step_s` (seconds since the previous record) and `peak_bytes` (of the device; on a CPU, of the process). If `tokens`
    and `lr` are given, it has `tokens_per_s` and `lr`. On a device with a known peak it has `mfu` (model FLOPs
    utilization, as `Plan.mfu`). It also has the keyword arguments of the call.

    Args:
        train: the compiled step. Its mesh determines which rank writes, its plan how many FLOPs a step has. If None,
            every process that calls the log writes.
        path: the file for the JSON lines; None for no file. A run that continues keeps the lines of the steps before
            its first one.
        steps: number of steps of the whole run, for the progress bar.
        tokens: number of tokens per step, over all ranks.
        lr: a number, or the optimizer's schedule. The schedule is called as the optimizer calls it, with a 0-dim
            integer tensor that is 0 in the first step.
        to: trackers: "tensorboard", "wandb" or "mlflow", if they are installed, or functions of a record.
        describe: returns the text of a record for the line.
        below: returns what a terminal shows below the line, for `rich`.
        print_fn: prints a plain line; by default `print`, flushed.

    Communication: none.
    Memory: the scalars of one step. On a device other than the CPU a record is written one step later, so that the loop
    does not wait for the step in flight.

    Raises:
        FzeroValueError: for an unknown tracker, or one that is not installed.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1))
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> state, records = train.init({"w": torch.eye(4)}), []
        >>> with fz.log(train, path=None, steps=3, to=records.append, print_fn=lambda line: None) as report:
        ...     for _ in range(3):
        ...         state, metrics = train(state, torch.ones(2, 4))
        ...         report(state, metrics)
        >>> [record["step"] for record in records], sorted(records[0])
        ([1, 2, 3], ['finite', 'grad_norm', 'loss', 'peak_bytes', 'step', 'step_s'])
    """
    named = (to,) if isinstance(to, str) or callable(to) else tuple(to)
    problems = [
        *([] if train is None or isinstance(train, Compiled) else [f"train={shown(train)}: not a compiled step"]),
        *([] if path is None else path_like("path", path)),
        *([] if steps is None else count("steps", steps)),
        *([] if tokens is None else count("tokens", tokens)),
        *(function("lr", lr, "step") if callable(lr) else [] if lr is None else number("lr", lr)),
        *(
            f"to={shown(t)}: neither a function of a record nor one of {', '.join(map(repr, TRACKERS))}"
            for t in named
            if not callable(t) and t not in TRACKERS
        ),
    ]
    if problems:
        fix = "fz.log(train, 'runs/log.jsonl', steps=1000, to='tensorboard')"
        raise FzeroValueError("log", "invalid arguments", problems, fix)
    file = None if path is None else Path(path)
    writes = train is None or train.mesh.rank == 0
    found = tuple(t if callable(t) else TRACKERS[t](file) for t in named) if writes else ()
    return Log(train, file, steps, tokens, lr, found, describe, below, print_fn or _print)


def described(record: Record) -> str:
    """Formats a record as a line: the entries in `FORMATS` that it has."""
    parts = [text(record[name]) for name, text in FORMATS.items() if name in record]
    return "  ".join(parts)


FORMATS: dict[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {x:.4f}",
    "grad_norm": lambda x: f"grad_norm {x:.2f}",
    "lr": lambda x: f"lr {x:.1e}",
    "tokens_per_s": lambda x: f"{x:,.0f} tokens/s",
    "mfu": lambda x: f"MFU {x:.1%}",
    "peak_bytes": lambda x: f"{x / 2**20:,.0f} MiB",
}
"""The entries of a record that a line shows, in order."""


def sparkline(values: Iterable[float]) -> str:
    """Draws a curve of numbers as text. Infinite values and NaN are left out."""
    values = [v for v in values if math.isfinite(v)]
    seen = [values[i * len(values) // _SHOWN] for i in range(_SHOWN)] if len(values) > _SHOWN else values
    low, high = min(seen, default=0), max(seen, default=0)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (v - low) / (high - low))] if high > low else "▄" for v in seen)


class _Later:
    """The numbers of a step. Those on a device are copied asynchronously after the step that computes them, and read
    when they have arrived."""

    def __init__(self, values: Mapping[str, Any]):
        far = {name: x for name, x in values.items() if isinstance(x, torch.Tensor) and x.device.type != "cpu"}
        near = {name: x for name, x in values.items() if name not in far}
        self._near = {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in near.items()}
        self._order, self._far = list(values), list(far)
        self._copy = fetched(torch.stack([x.detach().double() for x in far.values()])) if far else None

    @property
    def on_device(self) -> bool:
        return self._copy is not None

    def read(self) -> Record:
        found = self._near
        if self._copy is not None:
            values, event = self._copy
            if event is not None:
                event.synchronize()
            found = found | dict(zip(self._far, values.tolist(), strict=True))
        return {name: found[name] for name in self._order}


def _entries(given: Mapping[str, Any]) -> tuple[Record, Record]:
    """Returns the numbers of a record, including those of `aux` by their names, and the other entries, which are
    recorded unchanged."""
    numbers, rest = {}, {}
    for name, x in given.items():
        if name == "aux":
            pairs = tree.with_names(x)
            numbers |= {n: v for n, v in pairs if isinstance(v, torch.Tensor) and v.dim() == 0}
        elif isinstance(x, torch.Tensor):
            if x.dim() == 0:
                numbers[name] = x
        elif isinstance(x, int | float):
            numbers[name] = x
        elif name != "precision":
            rest[name] = x
    return numbers, rest


def _peak(train: Compiled | None) -> int:
    if train is not None and train.mesh.device.type == "cuda":
        return torch.cuda.max_memory_allocated(train.mesh.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def _place(step: int, steps: int | None) -> str:
    return f"step {step}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"


def _before(line: str, first: int) -> bool:
    try:
        return parsed(line, dict[str, Any])["step"] < first
    except (ValueError, KeyError, TypeError):  # an incomplete line of a run that was killed
        return False


def _print(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _live(console: Any, first: int, steps: int | None, losses: deque[float], log: Log) -> Any:
    from rich.console import Group
    from rich.live import Live
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    of = "/{task.total}" if steps else ""
    number, bar, rest = TextColumn(f"step {{task.completed}}{of}"), BarColumn(_BAR), TextColumn("{task.description}")
    progress = Progress(number, bar, rest, TimeRemainingColumn(), console=console)
    task = progress.add_task("", total=steps, completed=first - 1)
    with Live(progress, console=console) as live:

        def show(record: Record) -> None:
            below, place = log.below(record), f"step {record['step']}{f'/{steps}' if steps else ''}"
            with_bar, text = _fitted(place, sparkline(losses), log.text(record), console.width)
            progress.columns = (number, *([bar] if with_bar else []), rest, TimeRemainingColumn())
            progress.update(task, completed=record["step"], description=escape(text))
            live.update(progress if below is None else Group(progress, below))

        yield show


def _fitted(place: str, curve: str, text: str, width: int) -> tuple[bool, str]:
    """Fits the text of a line into a number of columns. Returns whether there is room for the bar, and the text between
    the bar and the remaining time.

    The number of the step and the remaining time always stay. In a narrow terminal the curve is left out first, then
    the bar, then the last entries of the text.
    """
    from rich.cells import cell_len, set_cell_size

    room = width - cell_len(place) - 1 - _REMAINING - 1
    for with_bar, description in ((True, f"{curve}  {text}" if curve else text), (True, text), (False, text)):
        if cell_len(description) <= room - (_BAR + 1) * with_bar:
            return with_bar, description
    return False, set_cell_size(text, max(0, room - 1)).rstrip() + "…"


def _tensorboard(path: Path | None) -> Tracker:
    with _installed("tensorboard", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(None if path is None else str(path.parent / "tensorboard"))
    atexit.register(writer.close)  # it buffers its output

    def track(record: Record) -> None:
        for name, value in _scalars(record).items():
            writer.add_scalar(name, value, record["step"])

    return track


def _wandb(path: Path | None) -> Tracker:
    with _installed("wandb", "wandb"):
        import wandb  # pyright: ignore[reportMissingImports]
    if wandb.run is None:
        wandb.init()
    return lambda record: wandb.log(_scalars(record), step=record["step"])


def _mlflow(path: Path | None) -> Tracker:
    with _installed("mlflow", "mlflow"):
        import mlflow  # pyright: ignore[reportMissingImports]
    return lambda record: mlflow.log_metrics(_scalars(record), step=record["step"])


TRACKERS: dict[str, Callable[[Path | None], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""The named trackers, each with the function that makes it from the path of the log."""


def _scalars(record: Record) -> dict[str, float]:
    return {name: float(x) for name, x in record.items() if name != "step" and isinstance(x, int | float)}


@contextlib.contextmanager
def _installed(name: str, package: str) -> Any:
    try:
        yield
    except ImportError as error:
        raise FzeroValueError(
            "log", f"to: {name!r} is not installed ({error})", fix=f"pip install {package}"
        ) from error
