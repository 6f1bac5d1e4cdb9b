"""Defines `Op`, the class that every op in the op table subclasses.

An op's class answers every question about it: its form and rules (the verifier), shared memory (views and the arena),
where it computes, its bytes (cost), its text (the printer) and its execution. To add an op, add a class and the rewrite
that inserts the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol

import torch
from typing_extensions import TypeVar

from fzero.errors import FzeroTypeError
from fzero.ir.attributes import Attrs, JoinAttrs, PartAttrs
from fzero.ir.program import Instruction, Place, Program, Value
from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.placements import MeshPlacement, Shard
from fzero.sharding.shard_regions import Boxes

ANY = -1
"""Any number of arguments or results."""

_WORDS = {
    "computes": {"device", "said", "there", ""},
    "pool": {
        "total",
        "sum",
        "gather",
        "scatter",
        "reduce",
        "exchange",
        "exchange_rows",
        "fetch",
        "replicate",
        "leaves",
        "results",
        "",
    },
}
_FLAGS = ("settles", "makes_own", "batched")

A = TypeVar("A", bound=Attrs, default=Attrs)


class Text(NamedTuple):
    """The text of an op: `out = code`, with a remark. `listed`: whether the code returns its results as a list even
    if there is only one.
    """

    code: str
    remark: str = ""
    listed: bool = False


class Rules(Protocol):
    """The verifier as the rule of an op sees it (fzero/ir/verifier.py explains each attribute)."""

    program: Program
    known: dict[str, Value]
    started: dict[str, Instruction]
    written: set[str]
    carried: set[str]
    overwritten: set[str]
    device_only: set[str]
    iterations: int
    aliases: dict[str, str]
    batch_axes: frozenset[str]

    def bad(self, op: Instruction, text: str) -> None: ...
    def root(self, name: str) -> str: ...
    def pairs(self, op: Instruction, targets: Sequence[Value], sources: Sequence[Value], how: str) -> None: ...
    def micro(self, op: Instruction) -> tuple[int, int]: ...


class Running(Protocol):
    """The surroundings of a running program (fzero/runtime/execute.py)."""

    mesh: Mesh
    carrier: Any
    tiers: Any
    attempt: Any

    def part_of(
        self, shape: tuple[int, ...], axis: str | tuple[str, ...], dims: tuple[Shard, ...] = ()
    ) -> tuple[Boxes, int]: ...
    def wait(
        self, moving: Any, into: Sequence[torch.Tensor] = (), together: bool = False, host: bool = True
    ) -> Sequence[torch.Tensor]: ...
    def replicate(
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


class Op(Generic[A]):
    """An op: one row of the op table.

    Attributes:
        name: name of the op, which is also what the text of a program calls.
        words: further names that the text of a program uses for the op.
        args: number of values that it reads, or `ANY`.
        out: number of values that it makes, or `ANY`.
        writes: whether it may (True), must ("always") or must not (False) write tensors of the state.
        attrs: the class of its attributes, which are everything it says besides its arguments and results
            (fzero/ir/attributes.py).
        computes: where it computes: on the "device"; "said": where its attribute `on` says; "there": where its first
            argument lies; "": nowhere.
        settles: whether the op may write host memory that a copy to the device still reads although that copy has
            been waited for. On CUDA only the device waits, so these ops wait for such copies themselves before they
            write.
        pool: how its results lie in the arena (fzero/compiler/buffer_allocation.py): "total", "sum", "gather",
            "scatter", "reduce", "exchange", "exchange_rows", "fetch", "send", "leaves", "results" or "". A "total"
            accumulates over the iterations of the enclosing loop, a "sum" over ops.
        makes_own: whether its results share memory with nothing else.
        batched: whether one op may process several values, with the same effect as several ops that process one each.
        uncaptured: why a CUDA graph cannot contain the op; "" if it can.
    """

    name: ClassVar[str]
    words: ClassVar[tuple[str, ...]] = ()
    args: ClassVar[int] = ANY
    out: ClassVar[int] = ANY
    writes: ClassVar[bool | str] = False
    attrs: ClassVar[type[Attrs]] = Attrs
    computes: ClassVar[str] = "device"
    settles: ClassVar[bool] = False
    pool: ClassVar[str] = ""
    makes_own: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    uncaptured: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Raises FzeroTypeError at the definition of the class if a field has a value that no op can have."""
        super().__init_subclass__()
        problems = [
            f"{f}={v!r}: must be one of {sorted(may)}" for f, may in _WORDS.items() if (v := getattr(cls, f)) not in may
        ]
        problems += [
            f"{f}={getattr(cls, f)!r}: must be a bool" for f in _FLAGS if not isinstance(getattr(cls, f), bool)
        ]
        if not isinstance(cls.writes, bool) and cls.writes != "always":
            problems.append(f"writes={cls.writes!r}: must be a bool or 'always'")
        for field in ("args", "out"):
            if type(num := getattr(cls, field)) is not int or num < ANY:
                problems.append(f"{field}={num!r}: must be a number of values, or ANY")
        if not (isinstance(cls.attrs, type) and issubclass(cls.attrs, Attrs)):
            problems.append(f"attrs={cls.attrs!r}: must be a class of attributes, as those of fzero/ir/attributes.py")
        # Classes that only others derive from have no name yet.
        if not str(name := getattr(cls, "name", "_")).isidentifier():
            problems.append(f"name={name!r}: must be an identifier, because the text of a program calls it")
        if problems:
            fix = "see fzero.ir.ops.op.Op for the meaning of each field"
            raise FzeroTypeError("ops", f"the row {cls.__name__} is invalid", problems, fix)

    # --- what follows from its fields and methods ---

    @property
    def in_text(self) -> bool:
        """Whether the text of a program contains its name. A call contains the name of its subgraph instead."""
        return type(self).runs is not Op.runs or type(self).names is not Op.names

    @property
    def outlives(self) -> bool:
        """Whether its results accumulate over the iterations of the enclosing loop and are read after it."""
        return self.pool == "total"

    @property
    def in_place(self) -> bool:
        """Whether its results are its first arguments, overwritten."""
        return self.pool == "sum"

    # --- what is checked ---

    def check(self, op: Instruction[A], args: list[Value], rules: Rules) -> None:
        """Reports the violations of a well-formed op to `rules`. `args`: the values that it reads."""
        raise NotImplementedError(self.name)

    def check_program(self, program: Program) -> Iterable[str]:
        """Returns violations that concern the complete program, caused by ops of this kind or by what they need."""
        return ()

    def reads_new(self, op: Instruction[A], name: str, aliases: Mapping[str, str]) -> bool:
        """Returns whether an op is meant to read a tensor of the state after it was written: gathers and copies of
        new values do, and assignments read their targets.
        """
        return False

    def on_host(self, op: Instruction[A], first: Value | None) -> bool:
        """Returns whether the host computes the op. `first`: its first argument."""
        return (
            op.on_host
            if self.computes == "said"
            else self.computes == "there" and first is not None and first.tier == "host"
        )

    def iterations(self, op: Instruction[A]) -> int:
        """Returns how often to go through its body to see all its effects."""
        return 0

    def iterations_run(self, op: Instruction[A], result: Any) -> int:
        """Returns how often its body runs, given the value that the op returned."""
        return 0

    # --- memory, bytes and time ---

    def shares(self, op: Instruction[A]) -> Iterable[tuple[str, str]]:
        """Returns the results that may lie in the memory of an argument, each with that argument. For a call, the
        subgraph says more.
        """
        return ()

    def is_view(self, op: Instruction[A], values: Mapping[str, Value], mesh: AbstractMesh) -> bool:
        """Returns whether the results that `shares` lists certainly lie in the memory of their arguments."""
        return True

    def touched(self, op: Instruction[A], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        """Returns the bytes of memory that an op which calls no subgraph reads and writes where it computes."""
        return 0.0

    # --- its text, and its execution ---

    def given(self, op: Instruction[A]) -> Sequence[str]:
        """Returns the names of the values that are passed to it when it runs, in the order of its text."""
        return op.args

    def text(self, op: Instruction[A], program: Program) -> Text:
        return Text(f"{op.callee}({', '.join([*op.args, *into(op, program)])})")

    def runs(self, on: Running) -> Callable[..., Any] | None:
        """Returns the callable that its name stands for in the text; None if that is a subgraph of the program, or
        Python itself.
        """
        return None

    def names(self, on: Running) -> Mapping[str, Any]:
        """Returns the callable that each of its names in the text stands for."""
        found = self.runs(on)
        return {} if found is None else {self.name: found}


class Start(Op[A]):
    """A transfer: it begins here, and continues until its `wait`.

    Attributes:
        reads_until_wait: whether it reads the memory of its arguments until the wait. A reduction reads copies of
            them in the arena.
        direct: whether it sends directly to one rank. In any other transfer between ranks every rank along its axes
            takes part, so that its end shows that they have finished earlier transfers.
    """

    out = 1
    computes = ""
    reads_until_wait: ClassVar[bool] = True
    direct: ClassVar[bool] = False

    def channel(self, op: Instruction[A]) -> str:
        """Returns the name of the queue that the transfer joins."""
        raise NotImplementedError(self.name)

    def moved_bytes(self, op: Instruction[A], values: Mapping[str, Value], mesh: AbstractMesh) -> int:
        """Returns the number of bytes that a rank moves in the transfer."""
        raise NotImplementedError(self.name)

    def sent(self, op: Instruction[A]) -> tuple[str, ...]:
        """Returns the names of the values that it moves."""
        return op.args

    def given(self, op: Instruction[A]) -> Sequence[str]:
        return self.sent(op)

    def filled(self, op: Instruction[A]) -> Sequence[Place | None]:
        """Returns the buffers in the arena that its wait returns."""
        return op.into

    def received(self, op: Instruction[A], value: Value) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape and dtype of a value after it has arrived."""
        return value.shape, value.dtype

    def arrives(self, op: Instruction[A], placement: MeshPlacement) -> MeshPlacement:
        """Returns the placement of a value after it has arrived."""
        return placement


# --- fragments of text ---


def into(op: Instruction, program: Program) -> Iterator[str]:
    """Yields the argument that names the op's buffers in the arena, if it has any: `apart` if one of them is
    allocated separately from the arena.
    """
    if op.into:
        apart = any(place is not None and place.arena == "apart" for place in op.into)
        yield f"into={'apart' if apart else 'pool'}[{program.pool_index[id(op)]}]"


def micro_text(op: Instruction[PartAttrs]) -> list[str]:
    """Returns the arguments that say which micro-batch an op is for, and how many there are. In a loop the first is
    the loop variable.
    """
    if op.attrs.micro is not None:
        return [*map(str, op.attrs.micro)]
    return ["micro", str(op.attrs.count)] if op.attrs.count is not None else []


def join_text(op: Instruction[JoinAttrs]) -> list[str]:
    """Returns the reduction as an argument, unless it is the sum."""
    return [] if op.attrs.reduction == "sum" else [f"op={op.attrs.reduction!r}"]


def over(op: Instruction) -> str:
    """Returns the axis that an op communicates or shards over as its argument; several axes as a tuple."""
    axes = op.axes
    return f"axis={(axes[0] if len(axes) == 1 else axes)!r}"


def micro_of(op: Instruction, iteration: int) -> tuple[int, int]:
    """Returns the micro-batch that an op is for in one iteration of the enclosing loop, and how many there
    are.
    """
    return (iteration, op.count) if op.micro is None else op.micro
