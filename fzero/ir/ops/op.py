"""Defines the row of an op: the class that every op in the table subclasses.

A row answers every question about a line: form and rule (verify), shared memory (views, the pool), place, bytes (cost),
    text (show), execution (execute), meaning (the interpreter), and meaning of results (blame). A new op is a new row,
    and the rewrite that makes lines of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol

import torch
from typing_extensions import TypeVar

from fzero.errors import FzeroTypeError
from fzero.ir.attributes import Attrs, JoinAttrs, PartAttrs
from fzero.ir.program import Line, Place, Placement, Program, Value
from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.shard_regions import Boxes, Dim

ANY = -1
"""Any number of arguments or results."""

_WORDS = {
    "computes": {"device", "said", "there", ""},
    "between": {"ranks", "tiers", ""},
    "pool": {
        "total",
        "sum",
        "gather",
        "scatter",
        "reduce",
        "exchange",
        "fetch",
        "send",
        "leaves",
        "results",
        "",
    },
}
_FLAGS = ("in_text", "body", "reads_old", "waits", "settles")
_FLAGS += ("in_place", "outlives", "makes_own", "overwrites", "batched")

A = TypeVar("A", bound=Attrs, default=Attrs)


class Text(NamedTuple):
    """A line as it is written: `out = code`, with a remark; `listed` where the results come as a list, even of one."""

    code: str
    remark: str = ""
    listed: bool = False


class Rules(Protocol):
    """The verifier as a row's rule sees it (fzero/ir/verifier.py has the meaning of each)."""

    program: Program
    known: dict[str, Value]
    started: dict[str, Line]
    written: set[str]
    carried: set[str]
    overwritten: set[str]
    device_only: set[str]
    turns: int
    aliases: dict[str, str]
    batch_axes: frozenset[str]

    def bad(self, line: Line, text: str) -> None: ...
    def root(self, name: str) -> str: ...
    def pairs(self, line: Line, targets: Sequence[Value], sources: Sequence[Value], how: str) -> None: ...
    def micro(self, line: Line) -> tuple[int, int]: ...


class Running(Protocol):
    """The surroundings of a running program (fzero/runtime/execute.py)."""

    mesh: Mesh
    carrier: Any
    tiers: Any
    attempt: Any
    batch_axes: tuple[str, ...]

    def part_of(
        self, shape: tuple[int, ...], axis: str | tuple[str, ...], dims: tuple[Dim, ...] = ()
    ) -> tuple[Boxes, int]: ...
    def wait(
        self, moving: Any, into: Sequence[torch.Tensor] = (), together: bool = False, host: bool = True
    ) -> Sequence[torch.Tensor]: ...
    def send(
        self,
        values: Sequence[torch.Tensor],
        *,
        axis: str,
        shift: int,
        into: Sequence[str],
        every: int = 1,
        once: bool = False,
        through: Sequence[torch.Tensor] = (),
    ) -> Any: ...


class Told(Protocol):
    """The interpreter as a row sees it (fzero/testing/interpreter.py)."""

    mesh: Mesh
    program: Program
    values: dict[str, torch.Tensor]
    started: dict[str, tuple[Line, list[torch.Tensor]]]

    def function(self, name: str) -> Callable[..., Any]: ...
    def write(self, names: Sequence[str], new: Sequence[torch.Tensor]) -> None: ...
    def part_index(self, count: int, micro: int) -> int: ...
    def valid_range(self, line: Line) -> tuple[int, int]: ...
    def cut(self, x: torch.Tensor, source: Value, out: Value) -> torch.Tensor: ...
    def gather(self, x: torch.Tensor, axis: str) -> torch.Tensor: ...
    def reduce(self, x: torch.Tensor, op: str, axis: str) -> None: ...
    def hand(self, values: Sequence[torch.Tensor], axis: str, peer: int, number: int) -> None: ...
    def take(self, like: Sequence[torch.Tensor], axis: str, peer: int, number: int) -> Sequence[torch.Tensor]: ...


class Standing(Protocol):
    """The meanings of a program's names, as blame follows them (fzero/testing/first_difference.py)."""

    def same(self, name: str, source: str) -> None: ...
    def part(self, name: str, source: str, micro: int) -> None: ...
    def total(self, name: str, total: str | None, part: str) -> None: ...
    def reduced(self, name: str, source: str, axes: Sequence[str]) -> None: ...
    def made(self, values: Sequence[Value], micro: int, source: str | None = None) -> None: ...
    def written(self, names: Sequence[str]) -> None: ...
    def start_of(self, handle: str) -> Line: ...


class Op(Generic[A]):
    """One row of the table.

    Attributes:
        name: of the op, which is also what the text of a program calls.
        in_text: whether the text of a program has its name: a call has its function's instead.
        words: further names that the text of a program has for it.
        args: number of values read, or `ANY`.
        out: number of values made, or `ANY`.
        writes: whether a line of it may, must ("always") or must not write leaves.
        attrs: what each line of it says beside its arguments and results (fzero/ir/attributes.py), with the types.
        body: whether it has lines of its own.
        reads_old: whether these read leaves as they were before other lines wrote them.
        computes: where: on the "device"; "said" by its `on`; "there", where its first argument lies; ""
            nowhere.
        between: what a start moves values between: "ranks", "tiers", or "" of what is not a start.
        waits: whether it takes the handle of a start.
        settles: whether it may be on the host where a copy to the device still reads, though it was waited for: on CUDA
            the device alone waits, so these do before they write.
        pool: how its results lie in the pool (fzero/compiler/buffer_allocation.py): "total", "sum", "gather",
        "scatter", "reduce",
            "exchange", "fetch", "send", "leaves", "results" or "".
        in_place: whether its results are its first arguments, written.
        outlives: whether its results are read after the loop that it is in, and grow with each turn.
        makes_own: whether its results share memory with nothing.
        overwrites: whether it writes its leaves without reading them.
        batched: whether one line of it may do to several values what several lines do to one each.
        uncaptured: why a CUDA graph cannot hold it; "" if one can.
    """

    name: ClassVar[str]
    in_text: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = ()
    args: ClassVar[int] = ANY
    out: ClassVar[int] = ANY
    writes: ClassVar[bool | str] = False
    attrs: ClassVar[type[Attrs]] = Attrs
    body: ClassVar[bool] = False
    reads_old: ClassVar[bool] = False
    computes: ClassVar[str] = "device"
    between: ClassVar[str] = ""
    waits: ClassVar[bool] = False
    settles: ClassVar[bool] = False
    pool: ClassVar[str] = ""
    in_place: ClassVar[bool] = False
    outlives: ClassVar[bool] = False
    makes_own: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    uncaptured: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Raises FzeroTypeError, when the class is defined, if a field has a value that no row can have."""
        super().__init_subclass__()
        problems = [
            f"{f}={v!r}: is one of {sorted(may)}" for f, may in _WORDS.items() if (v := getattr(cls, f)) not in may
        ]
        problems += [f"{f}={getattr(cls, f)!r}: is a bool" for f in _FLAGS if not isinstance(getattr(cls, f), bool)]
        if not isinstance(cls.writes, bool) and cls.writes != "always":
            problems.append(f"writes={cls.writes!r}: is a bool or 'always'")
        for field in ("args", "out"):
            if type(num := getattr(cls, field)) is not int or num < ANY:
                problems.append(f"{field}={num!r}: is a number of values, or ANY")
        if not (isinstance(cls.attrs, type) and issubclass(cls.attrs, Attrs)):
            problems.append(f"attrs={cls.attrs!r}: is a class of attributes, as those of fzero/ir/attributes.py")
        if not str(name := getattr(cls, "name", "_")).isidentifier():
            problems.append(f"name={name!r}: is what the text of a program calls")
        if problems:
            fix = "see fzero.ir.ops.op.Op for what each field says"
            raise FzeroTypeError("ops", f"the row {cls.__name__} is invalid", problems, fix)

    # --- what is checked ---

    def check(self, line: Line[A], args: list[Value], rules: Rules) -> None:
        """Adds the violations of a well-formed line to the rules. `args`: what it reads."""
        raise NotImplementedError(self.name)

    def check_program(self, program: Program) -> Iterable[str]:
        """Violations of a whole program, by lines of this op or what they need."""
        return ()

    def reads_new(self, line: Line[A], name: str, aliases: Mapping[str, str]) -> bool:
        """Whether a line is meant to read a leaf after its write: gathers and copies of new values do, and assignments
        read their targets."""
        return False

    def on_host(self, line: Line[A], first: Value | None) -> bool:
        """Whether the host computes a line, whose first argument this is."""
        return (
            line.on_host
            if self.computes == "said"
            else self.computes == "there" and first is not None and first.tier == "host"
        )

    def turns(self, line: Line[A]) -> int:
        """The number of times to go through its own lines to see all its effects."""
        return 0

    def turns_run(self, line: Line[A], result: Any) -> int:
        """The number of times that its own lines are run, when it has returned this."""
        return 0

    # --- memory, bytes and time ---

    def shares(self, line: Line[A]) -> Iterable[tuple[str, str]]:
        """Its results that may lie in the memory of an argument, each with that argument. Of a call its function says
        more."""
        return ()

    def is_view(self, line: Line[A], values: Mapping[str, Value], mesh: AbstractMesh) -> bool:
        """Whether those results surely lie there."""
        return True

    def touched(self, line: Line[A], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        """Bytes of memory that a line which calls no function reads and writes where it computes."""
        return 0.0

    # --- its text, and its execution ---

    def given(self, line: Line[A]) -> Sequence[str]:
        """The values that it is handed when it runs, in the order of its text."""
        return line.args

    def text(self, line: Line[A], program: Program) -> Text:
        return Text(f"{line.callee}({', '.join([*line.args, *into(line, program)])})")

    def runs(self, on: Running) -> Callable[..., Any] | None:
        """The callable behind its name in the text; None where that is a function of the program, or Python itself."""
        return None

    def names(self, on: Running) -> Mapping[str, Any]:
        """What is behind each of its names in the text."""
        found = self.runs(on)
        return {} if found is None else {self.name: found}

    def means(self, line: Line[A], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        """The results of a line, worked out in the simplest way. `turn`: of the loop around it."""
        raise AssertionError(f"a line that no program has when it is run: {self.name}")

    def stands(self, line: Line[A], of: Standing, micro: int, turn: int) -> None:
        """Notes the meaning of each result, and the written leaves."""
        of.made(line.out, micro)


class Start(Op[A]):
    """A transfer that begins, and goes on until its `wait`.

    Attributes:
        reads_until_wait: whether it reads where its arguments lie; a reduction reads their copies in the pool.
        holds_device_only: whether its wait holds up the device alone: the host goes on while it still reads there.
        may_hold_device_only: whether its wait may do so, if it says (`WaitAttrs.host`): the host goes on while it still
            fills there.
        tree: whether its messages, where they are small, go up and down a tree instead of around a ring.
        direct: whether they go straight to one rank.
        meets: whether every rank along its axes takes part, each time: its end shows that they are done with earlier
            transfers.
        hands_out: whether its wait hands out the moved values; parts of another rank's state are no values of a step.
        by_message: whether ranks send it though they share memory.
        sinks: whether its wait sinks to the first reader of its results; else it stays in place.
        hoisted: where it starts (fzero/compiler/overlap.py): "ahead" of its first reader, "at once" behind the maker of
            its arguments, or, "", in place.
    """

    out = 1
    computes = ""
    reads_until_wait: ClassVar[bool] = True
    holds_device_only: ClassVar[bool] = False
    may_hold_device_only: ClassVar[bool] = False
    tree: ClassVar[bool] = False
    direct: ClassVar[bool] = False
    meets: ClassVar[bool] = True
    hands_out: ClassVar[bool] = True
    by_message: ClassVar[bool] = False
    sinks: ClassVar[bool] = True
    hoisted: ClassVar[str] = ""

    def channel(self, line: Line[A]) -> str:
        """The queue that it joins."""
        raise NotImplementedError(self.name)

    def moved_bytes(self, line: Line[A], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        """Bytes that a rank moves in it."""
        raise NotImplementedError(self.name)

    def sent(self, line: Line[A]) -> tuple[str, ...]:
        """The values that it moves."""
        return line.args

    def given(self, line: Line[A]) -> Sequence[str]:
        return self.sent(line)

    def filled(self, line: Line[A]) -> Sequence[Place | None]:
        """The places in the pool that its wait hands out."""
        return line.into

    def arrives(self, line: Line[A], placement: Placement) -> Placement:
        """The placement of a value when it has arrived."""
        return placement

    def handed_out(
        self, line: Line[A], moved: list[torch.Tensor], out: Sequence[Value], told: Told
    ) -> Sequence[torch.Tensor]:
        """The results of its wait."""
        raise NotImplementedError(self.name)

    def stands(self, line: Line[A], of: Standing, micro: int, turn: int) -> None:
        of.written(line.writes)


# --- parts of texts ---


def into(line: Line, program: Program) -> Iterator[str]:
    """The argument that names the line's places in the pool, if it has some: `apart`, if one is apart from the
    arena."""
    if line.into:
        apart = any(place is not None and place.arena == "apart" for place in line.into)
        yield f"into={'apart' if apart else 'pool'}[{program.pool_index[id(line)]}]"


def micro_text(line: Line[PartAttrs]) -> list[str]:
    """The micro-batch that a line is for, and their number, as its arguments: in a loop by the loop's variable."""
    if line.attrs.micro is not None:
        return [*map(str, line.attrs.micro)]
    return ["micro", str(line.attrs.count)] if line.attrs.count is not None else []


def join_text(line: Line[JoinAttrs]) -> list[str]:
    """The reduction, as an argument, where they are not added up."""
    return [] if line.attrs.reduction == "sum" else [f"op={line.attrs.reduction!r}"]


def over(line: Line) -> str:
    """The axis that a line is over, as its argument; several as a tuple."""
    axes = line.axes
    return f"axis={(axes[0] if len(axes) == 1 else axes)!r}"


def micro_of(line: Line, turn: int) -> tuple[int, int]:
    """The micro-batch that a line is for in a turn of the loop around it, and how many there are."""
    return (turn, line.count) if line.micro is None else line.micro
